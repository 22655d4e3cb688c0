//! Segments: right values wherever they are and while they move, whatever the destination does.

#[path = "../../tests/common/mod.rs"]
mod common;

use common::faulty::FaultyStore;
use common::{Dice, StopOnDrop, eventually, heap, mem_store, seed, watchdog};
use farheap::store::Op;
use farheap::{ByteCount, Error, Far, Heap, Tier};
use farheap_segments::{AutoPlacement, Migrator, Segment, SegmentError};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

/// A process has one heap: tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Alone {
    heap: Heap,
    _turn: MutexGuard<'static, ()>,
}

fn alone(conf: &str) -> Option<Alone> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    Some(Alone { heap: heap(conf)?, _turn: turn })
}

impl Alone {
    /// All far memory has been freed, or this fails.
    fn end(self) {
        assert_eq!(self.heap.usage().allocated_bytes, ByteCount::ZERO);
        self.heap.shutdown().expect("nothing far is left");
    }
}

fn value(salt: u64, at: u64) -> u64 {
    (salt << 40 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

fn segment(salt: u64, len: usize, placement: Tier) -> Segment<u64> {
    Segment::collect(placement, (0..len).map(|at| value(salt, at as u64))).expect("memory")
}

fn wrong(salt: u64, values: &[u64]) -> usize {
    values.iter().zip(0..).filter(|(seen, at)| **seen != value(salt, *at)).count()
}

fn add_all<'a>(migrator: &mut Migrator<'a>, segments: &'a [Segment<u64>], to: Tier) {
    for segment in segments {
        migrator.add(segment, to);
    }
}

#[test]
fn values_are_right_in_each_tier_and_the_limit_holds() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:128MiB") else { return };
    let segments: Vec<_> = (0..12).map(|salt| segment(salt, 2 * MIB / 8, Tier::LOCAL)).collect();
    for to in [Tier::FAR, Tier::FAR, Tier::LOCAL, Tier::FAR] {
        segments.iter().for_each(|segment| segment.migrate(to).expect("memory"));
        for (segment, salt) in segments.iter().zip(0..) {
            assert_eq!(segment.tier(), to);
            assert_eq!(segment.bytes(), ByteCount(2 << 20));
            let values = segment.read();
            assert_eq!(Far::contains(values.as_ptr()), to == Tier::FAR);
            assert_eq!((values.len(), wrong(salt, &values)), (2 * MIB / 8, 0));
        }
    }
    let stats = alone.heap.stats();
    assert!(stats.resident_bytes_max <= ByteCount::mib(8), "{stats:?}");
    assert!(stats.pages_out > 0, "24 MiB did not fit: {stats:?}");
    drop(segments);
    alone.end();
}

#[test]
fn segments_move_through_several_tiers() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let tier = |name, conf| {
        let config = Heap::builder().parse(conf).expect("options");
        alone.heap.add_tier(name, config).expect("a tier")
    };
    let small = tier("small", "far_limit:8MiB,capacity:64MiB");
    let large = tier("large", "far_limit:16MiB,capacity:64MiB");
    let segments: Vec<_> = (0..12).map(|salt| segment(salt, 2 * MIB / 8, Tier::FAR)).collect();
    for to in [&small, &large, &small] {
        let placement = to.tier();
        let mut migrator = Migrator::new();
        add_all(&mut migrator, &segments, placement);
        assert_eq!(migrator.run(|_| {}).error(), None);
        for (segment, salt) in segments.iter().zip(0..) {
            let values = segment.read();
            assert_eq!((segment.tier(), wrong(salt, &values)), (placement, 0));
            assert_eq!(Tier::of(values.as_ptr()), Some(to.tier()));
        }
        assert!(to.stats().resident_bytes_max <= to.stats().limit_bytes, "{:?}", to.stats());
    }
    assert_eq!(alone.heap.usage().allocated_bytes, ByteCount::ZERO);
    assert_eq!(large.usage().allocated_bytes, ByteCount::ZERO);
    drop(segments);
    assert_eq!(small.usage().allocated_bytes, ByteCount::ZERO);
    alone.end();
}

#[test]
fn empty_segments_and_values_without_bytes_move_too() {
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let empty = Segment::<u64>::copy_of(Tier::LOCAL, &[]).expect("no memory is needed");
    let units = Segment::copy_of(Tier::LOCAL, &[(); 1_000]).expect("no memory is needed");
    empty.migrate(Tier::FAR).expect("nothing to copy");
    units.migrate(Tier::FAR).expect("nothing to copy");
    assert!(empty.is_empty() && empty.tier() == Tier::FAR);
    assert_eq!((units.len(), units.read().len(), units.bytes()), (1_000, 1_000, ByteCount::ZERO));
    drop((empty, units));
    alone.end();
}

#[test]
fn readers_see_whole_segments_while_they_move_back_and_forth() {
    const SEGMENTS: usize = 10;
    const LEN: usize = MIB / 8;
    let _watchdog = watchdog("segment", Duration::from_secs(240));
    let seed = seed("segment");
    let Some(alone) = alone("far_limit:8MiB,capacity:128MiB") else { return };
    let segments: Vec<_> =
        (0..SEGMENTS as u64).map(|salt| segment(salt, LEN, Tier::LOCAL)).collect();
    let (stop, read) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        for thread in 0..2 {
            let (segments, stop, read) = (&segments, &stop, &read);
            scope.spawn(move || {
                let mut dice = Dice::new(seed + thread);
                while !stop.load(Ordering::Relaxed) {
                    let salt = dice.below(SEGMENTS as u64);
                    let values = segments[salt as usize].read();
                    assert_eq!(wrong(salt, &values), 0, "segment {salt}");
                    read.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // Two migrators that want different things of the same segments.
        scope.spawn(|| {
            let mut dice = Dice::new(seed + 7);
            while !stop.load(Ordering::Relaxed) {
                let far = dice.below(2) == 0;
                let to = if far { Tier::FAR } else { Tier::LOCAL };
                segments[dice.below(SEGMENTS as u64) as usize].migrate(to).expect("memory");
            }
        });
        for round in 0..12 {
            let to = if round % 2 == 0 { Tier::FAR } else { Tier::LOCAL };
            let mut migrator = Migrator::new();
            add_all(&mut migrator, &segments, to);
            let mut told = 0;
            let migration = migrator.run(|progress| {
                told += 1;
                assert_eq!((progress.segments(), progress.of_segments()), (told, SEGMENTS));
                assert_eq!(progress.bytes(), ByteCount((told * MIB) as u64));
            });
            assert_eq!((migration.moved(), migration.error()), (SEGMENTS, None));
        }
        assert!(eventually(|| read.load(Ordering::Relaxed) >= 20), "{read:?} of 20");
        drop(others);
    });
    drop(segments);
    alone.end();
}

#[test]
fn a_copy_stays_as_long_as_it_is_read_and_no_longer() {
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let moved = segment(3, MIB / 8, Tier::FAR);
    let (first, second) = (moved.read(), moved.read());
    let old = first.as_ptr();
    moved.migrate(Tier::LOCAL).expect("memory");
    assert_ne!(moved.read().as_ptr(), old);
    assert!(alone.heap.usage().allocated_bytes >= ByteCount::mib(1), "it is still read");
    drop(first);
    assert_eq!((second.as_ptr(), wrong(3, &second)), (old, 0));
    drop(second);
    assert_eq!(alone.heap.usage().allocated_bytes, ByteCount::ZERO, "the last reader has freed it");
    drop(moved);
    alone.end();
}

#[test]
fn a_migrator_waits_for_the_readers_of_what_it_has_moved() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let segments = [1, 2].map(|salt| segment(salt, MIB / 8, Tier::LOCAL));
    let [reading, begun] = [AtomicBool::new(true), AtomicBool::new(false)];
    std::thread::scope(|scope| {
        let values = segments[0].read();
        let migrator = scope.spawn(|| {
            let mut migrator = Migrator::new();
            add_all(&mut migrator, &segments, Tier::FAR);
            begun.store(true, Ordering::Release);
            migrator
                .run(|_| assert!(!reading.load(Ordering::Acquire), "a reader was not waited for"))
        });
        let is_moved = || begun.load(Ordering::Acquire) && segments[0].tier() != Tier::LOCAL;
        assert!(eventually(is_moved), "the first segment does not move");
        assert_eq!(segments[1].tier(), Tier::LOCAL);
        assert_eq!(wrong(1, &values), 0);
        reading.store(false, Ordering::Release);
        drop(values);
        assert_eq!(migrator.join().expect("no panic").moved(), 2);
    });
    drop(segments);
    alone.end();
}

#[test]
fn what_the_destination_has_no_room_for_stays_where_it_is() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:16MiB,span:1GiB") else { return };
    let segments: Vec<_> = (0..5).map(|salt| segment(salt, 8 * MIB / 8, Tier::LOCAL)).collect();
    let mut migrator = Migrator::new();
    add_all(&mut migrator, &segments, Tier::FAR);
    let migration = migrator.run(|_| {});
    let (moved, bytes) = (migration.moved(), ByteCount(8 << 20));
    assert!((1..5).contains(&moved), "{migration:?}");
    assert_eq!(migration.error(), Some(&SegmentError::NoMemory { bytes, to: Tier::FAR }));
    assert!(
        alone.heap.usage().allocated_bytes < ByteCount((moved as u64 + 1) * bytes.0),
        "the copy was freed"
    );
    for (segment, salt) in segments.iter().zip(0..) {
        let is_far = segment.tier() == Tier::FAR;
        assert_eq!((is_far, wrong(salt, &segment.read())), (salt < moved as u64, 0));
    }
    drop(segments);
    alone.end();
}

#[test]
fn a_cancelled_migration_leaves_the_segment_whole_where_it_was() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let segments = [1, 2].map(|salt| segment(salt, 4 * MIB / 8, Tier::LOCAL));
    let cancel = AtomicBool::new(false);
    let mut migrator = Migrator::new();
    add_all(&mut migrator, &segments, Tier::FAR);
    migrator.cancelled_by(&cancel);
    let migration = migrator.run(|_| cancel.store(true, Ordering::Relaxed));
    assert_eq!((migration.moved(), migration.error()), (1, Some(&SegmentError::Cancelled)));
    assert_eq!(segments.each_ref().map(Segment::tier), [Tier::FAR, Tier::LOCAL]);
    assert_eq!(segments.each_ref().map(Segment::bytes), [ByteCount(4 << 20); 2]);
    assert_eq!((wrong(1, &segments[0].read()), wrong(2, &segments[1].read())), (0, 0));

    // In the middle of a segment, of which the rate allows a part in an hour.
    cancel.store(false, Ordering::Relaxed);
    let migration = std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let mut slow = Migrator::new();
            slow.add(&segments[1], Tier::FAR).rate(ByteCount::kib(1)).cancelled_by(&cancel);
            slow.run(|_| {})
        });
        let is_under_way = eventually(|| alone.heap.usage().allocated_bytes >= ByteCount::mib(8));
        cancel.store(true, Ordering::Relaxed);
        assert!(is_under_way, "the second segment has no copy");
        run.join().expect("no panic")
    });
    assert_eq!((migration.moved(), migration.error()), (0, Some(&SegmentError::Cancelled)));
    assert_eq!((segments[1].tier(), wrong(2, &segments[1].read())), (Tier::LOCAL, 0));
    assert_eq!(
        alone.heap.usage().allocated_bytes,
        ByteCount::mib(4),
        "the unfinished copy was freed"
    );
    drop(segments);
    alone.end();
}

#[test]
fn a_rate_is_kept() {
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let segments = [1, 2].map(|salt| segment(salt, MIB / 8, Tier::LOCAL));
    let mut migrator = Migrator::new();
    add_all(&mut migrator, &segments, Tier::FAR);
    let begun = Instant::now();
    let migration = migrator.rate(ByteCount::mib(10)).run(|_| {});
    assert!(
        begun.elapsed() >= Duration::from_millis(200),
        "2 MiB at 10 MiB a second: {migration:?}"
    );
    assert!(migration.progress().elapsed() >= Duration::from_millis(200));
    drop(segments);
    alone.end();
}

/// Resident bytes of this process that are no file's.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("RssAnon");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn what_segments_leave_goes_back_to_the_kernel_at_once() {
    const SEGMENTS: u64 = 12;
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:128MiB") else { return };
    // Small enough for the allocator to keep what is freed, for seconds.
    let segments: Vec<_> =
        (0..SEGMENTS).map(|salt| segment(salt, 4 * MIB / 8, Tier::LOCAL)).collect();
    let before = resident();
    segments.iter().for_each(|segment| segment.migrate(Tier::FAR).expect("memory"));
    // Half of the 48 MiB allow for the limit, and for what runs beside this.
    let after = resident();
    assert!(after + (24 << 20) < before, "{before} before, {after} after");
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop(segments);
    alone.end();
}

#[test]
fn what_is_written_out_leaves_memory_that_it_would_fit_into() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:64MiB,capacity:128MiB") else { return };
    let segments: Vec<_> = (0..4).map(|salt| segment(salt, 4 * MIB / 8, Tier::LOCAL)).collect();
    let mut migrator = Migrator::new();
    add_all(&mut migrator, &segments, Tier::FAR);
    assert_eq!(migrator.run(|_| {}).error(), None);
    assert_eq!(alone.heap.stats().pages_out, 0, "it fits");
    let mut back = Migrator::new();
    add_all(&mut back, &segments, Tier::LOCAL);
    assert_eq!(back.run(|_| {}).error(), None);

    let migration = migrator.write_out().run(|_| {});
    assert_eq!((migration.moved(), migration.error()), (4, None));
    let written = |bytes| alone.heap.stats().bytes_written >= ByteCount::mib(bytes);
    assert!(eventually(|| written(16)), "{}", alone.heap.stats());
    for (segment, salt) in segments.iter().zip(0..) {
        let values = segment.read();
        assert_eq!(wrong(salt, &values), 0);
    }
    let stats = alone.heap.stats();
    assert!(stats.bytes_read >= ByteCount::mib(15), "{stats:?}");
    drop(segments);
    alone.end();
}

/// Chunks that are written out go to the device past the tier's memory: they take no room from pages in use there.
#[test]
fn what_is_written_out_leaves_pages_in_use_where_they_are() {
    const HOT: usize = 16 * MIB / 8;
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:32MiB,capacity:128MiB") else { return };
    let hot = segment(99, HOT, Tier::FAR);
    let segments: Vec<_> = (0..8).map(|salt| segment(salt, 8 * MIB / 8, Tier::LOCAL)).collect();
    assert_eq!(wrong(99, &hot.read()), 0);
    let before = alone.heap.stats();
    let mut out = Migrator::new();
    add_all(&mut out, &segments, Tier::FAR);
    assert_eq!(out.write_out().run(|_| {}).error(), None);
    assert_eq!(wrong(99, &hot.read()), 0);
    let stats = alone.heap.stats();
    assert_eq!(stats.chunks_opened, before.chunks_opened, "{before:?} {stats:?}");
    assert_eq!(stats.pages_in, before.pages_in, "what is in use was read again: {stats:?}");
    assert!(stats.resident_bytes_max <= ByteCount::mib(32), "{stats:?}");
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop((segments, hot));
    alone.end();
}

/// Two migrators that write out, from tier to tier and for the few runs of frames that there are, while others read
/// what is on its way: segments that are no whole number of chunks, on a device that is slow and at times fails.
#[test]
fn what_is_written_out_is_right_while_it_is_read_on_its_way() {
    const LEN: usize = 5 * MIB / 8 + 1;
    const SEGMENTS: u64 = 6;
    let _watchdog = watchdog("segment", Duration::from_secs(240));
    let seed = seed("segment");
    let Some(alone) = alone("far_limit:16MiB,capacity:128MiB") else { return };
    let store = FaultyStore::new(mem_store(ByteCount::mib(128)), seed);
    let faults = store.control();
    faults.delay(Duration::from_millis(2));
    let options = Heap::builder().parse("far_limit:24MiB").expect("options");
    let slow = alone.heap.add_tier("slow", options.store(Arc::new(store))).expect("a tier");
    let tiers = [Tier::LOCAL, Tier::FAR, slow.tier()];
    let segments: Vec<_> = (0..SEGMENTS).map(|salt| segment(salt, LEN, Tier::LOCAL)).collect();
    let (stop, moved) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        for thread in 0..2 {
            let (segments, stop) = (&segments, &stop);
            scope.spawn(move || {
                let mut dice = Dice::new(seed + thread);
                while !stop.load(Ordering::Relaxed) {
                    let salt = dice.below(SEGMENTS);
                    let values = segments[salt as usize].read();
                    let from = dice.below(LEN as u64 - 4_096);
                    let part = values[from as usize..][..4_096].iter().zip(from..);
                    let wrong = part.filter(|(seen, at)| **seen != value(salt, *at)).count();
                    assert_eq!((values.len(), wrong), (LEN, 0), "segment {salt} from {from}");
                }
            });
        }
        let migrators: Vec<_> = segments
            .chunks(SEGMENTS as usize / 2)
            .zip(10..)
            .map(|(half, salt)| {
                let (moved, tiers) = (&moved, &tiers);
                scope.spawn(move || {
                    let (begun, mut dice) = (Instant::now(), Dice::new(seed + salt));
                    while begun.elapsed() < Duration::from_secs(3) {
                        let mut migrator = Migrator::new();
                        for segment in half {
                            migrator.add(segment, tiers[dice.below(3) as usize]);
                        }
                        let migration = migrator.write_out().run(|_| {});
                        // While its device refuses writes, a tier has room for what is there, and for what
                        // fits into memory: then a segment stays where it was.
                        let error = migration.error();
                        assert!(
                            matches!(error, None | Some(SegmentError::NoMemory { .. })),
                            "{error:?}"
                        );
                        moved.fetch_add(migration.moved() as u64, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        while migrators.iter().any(|thread| !thread.is_finished()) {
            faults.fail_next(Op::Write, 1, 5);
            std::thread::sleep(Duration::from_millis(300)); // Between two failures of the device.
        }
        faults.heal();
        drop(others);
    });
    println!("{} moved, {} writes failed, {}", moved.into_inner(), faults.injected(), slow.stats());
    // A device that works again takes all of them.
    assert!(eventually(|| {
        let mut out = Migrator::new();
        add_all(&mut out, &segments, tiers[2]);
        out.write_out().run(|_| {}).error().is_none()
    }));
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    for stats in [alone.heap.stats(), slow.stats()] {
        assert!(stats.resident_bytes_max <= stats.limit_bytes && stats.poisoned == 0, "{stats:?}");
    }
    drop(segments);
    assert_eq!(slow.usage().allocated_bytes, ByteCount::ZERO);
    alone.end();
}

#[test]
fn what_comes_back_is_read_ahead_of_the_copying_under_a_small_limit_too() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:16MiB,capacity:64MiB") else { return };
    let segments: Vec<_> = (0..3).map(|salt| segment(salt, 8 * MIB / 8, Tier::LOCAL)).collect();
    let mut out = Migrator::new();
    add_all(&mut out, &segments, Tier::FAR);
    assert_eq!(out.write_out().run(|_| {}).error(), None);
    alone.heap.region().evict_all().expect("the device works");
    let asked = alone.heap.stats().pages_prefetched;
    let mut back = Migrator::new();
    add_all(&mut back, &segments, Tier::LOCAL);
    assert_eq!(back.run(|_| {}).error(), None);
    let stats = alone.heap.stats();
    // Of 1,536; those on which the copying waits are faults.
    assert!(stats.pages_prefetched - asked > 100, "{stats:?}");
    assert!(stats.resident_bytes_max <= ByteCount::mib(16), "{stats:?}");
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop(segments);
    alone.end();
}

/// Each of the first writes of a migration fails in turn, then all of them for a while.
#[test]
fn segments_are_whole_while_the_device_refuses_what_is_written_out() {
    let _watchdog = watchdog("segment", Duration::from_secs(240));
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let store = FaultyStore::new(mem_store(ByteCount::mib(64)), 1);
    let faults = store.control();
    let options = Heap::builder().parse("far_limit:16MiB").expect("options");
    let heap = match options.store(Arc::new(store)).start() {
        Ok(heap) => heap,
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let segments: Vec<_> = (0..2).map(|salt| segment(salt, 4 * MIB / 8, Tier::LOCAL)).collect();
    for failing in [1, 1, 2, 3, 1_000] {
        faults.fail_next(Op::Write, failing, 5);
        let mut migrator = Migrator::new();
        add_all(&mut migrator, &segments, Tier::FAR);
        assert_eq!(migrator.write_out().run(|_| {}).error(), None, "memory holds it");
        let is_refused = eventually(|| faults.injected() > 0);
        assert!(is_refused, "what was handed on is not written: {}", heap.stats());
        for (segment, salt) in segments.iter().zip(0..) {
            assert_eq!((segment.tier(), wrong(salt, &segment.read())), (Tier::FAR, 0));
        }
        faults.heal();
        let mut back = Migrator::new();
        add_all(&mut back, &segments, Tier::LOCAL);
        assert_eq!(back.run(|_| {}).error(), None, "{} failures", faults.injected());
        for (segment, salt) in segments.iter().zip(0..) {
            assert_eq!(wrong(salt, &segment.read()), 0);
        }
        assert_eq!(heap.usage().allocated_bytes, ByteCount::ZERO);
    }
    assert_eq!(heap.stats().poisoned, 0, "{:?}", heap.stats());
    drop(segments);
    heap.shutdown().expect("nothing far is left");
}

#[test]
fn a_heap_does_not_end_under_a_segment() {
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let kept = segment(9, MIB / 8, Tier::FAR);
    alone.heap.shutdown().expect_err("a segment is there");
    kept.migrate(Tier::LOCAL).expect("memory");
    alone.heap.shutdown().expect("nothing far is left");
    let error = kept.migrate(Tier::FAR).expect_err("there is no far memory");
    assert_eq!(error, SegmentError::NoMemory { bytes: ByteCount::mib(1), to: Tier::FAR });
    assert_eq!((kept.tier(), wrong(9, &kept.read())), (Tier::LOCAL, 0));
}

/// Reads a segment this often, right in each.
fn read_often(segments: &[Segment<u64>], which: usize, times: usize) {
    for at in 0..times {
        let values = segments[which].read();
        assert_eq!(values[at % values.len()], value(which as u64, (at % values.len()) as u64));
    }
}

fn local(segments: &[Segment<u64>]) -> Vec<usize> {
    let is_local = |at: &usize| segments[*at].tier() == Tier::LOCAL;
    (0..segments.len()).filter(is_local).collect()
}

#[test]
fn what_is_read_most_comes_into_local_memory_within_the_budget_and_leaves_it_again() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let segments: Vec<_> = (0..12).map(|salt| segment(salt, MIB / 8, Tier::FAR)).collect();
    let mut placement = AutoPlacement::new(ByteCount(2 * MIB as u64 + 1));
    for segment in &segments {
        placement.add(segment, Tier::FAR);
    }
    let plan = placement.rebalance();
    assert_eq!((plan.moved(), plan.error()), (0, None), "nothing was read");
    // 8,000 counted reads, and some 80.
    for (which, times) in [(3, 32_000), (7, 32_000), (0, 320), (5, 320)] {
        read_often(&segments, which, times);
    }
    let plan = placement.rebalance();
    assert_eq!((plan.moved(), plan.error(), local(&segments)), (2, None, vec![3, 7]));
    assert_eq!(placement.local_bytes(), ByteCount::mib(2));
    let plan = placement.rebalance();
    assert_eq!((plan.moved(), local(&segments)), (0, vec![3, 7]), "nothing new is known");

    // Readers go on to others; what was counted before weighs a quarter by now.
    for (which, times) in [(5, 96_000), (9, 96_000), (7, 320)] {
        read_often(&segments, which, times);
    }
    assert_eq!((placement.rebalance().error(), local(&segments)), (None, vec![5, 9]));
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop(segments);
    alone.end();
}

#[test]
fn segments_of_a_column_come_all_together_or_not_at_all() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:64MiB") else { return };
    let tier = alone.heap.add_tier(
        "other",
        Heap::builder().parse("far_limit:8MiB,capacity:64MiB").expect("options"),
    );
    let other = tier.as_ref().expect("a tier").tier();
    let segments: Vec<_> = (0..9).map(|salt| segment(salt, MIB / 8, Tier::FAR)).collect();
    let mut placement = AutoPlacement::new(ByteCount::mib(5));
    for column in segments.chunks(3) {
        placement.add_together(column, other);
    }
    // One segment of the first is read most, but each of the last more than those on average.
    for (which, times) in [(0, 32_000), (6, 16_000), (7, 16_000), (8, 16_000), (3, 320)] {
        read_often(&segments, which, times);
    }
    let plan = placement.rebalance();
    assert_eq!((plan.moved(), plan.error(), local(&segments)), (3, None, vec![6, 7, 8]));
    assert_eq!(segments[3].tier(), Tier::FAR, "the program's own choice of a far tier");
    read_often(&segments, 3, 320_000);
    assert_eq!((placement.rebalance().error(), local(&segments)), (None, vec![3, 4, 5]));
    assert_eq!(segments[6].tier(), other);
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop(segments);
    assert_eq!(tier.expect("a tier").usage().allocated_bytes, ByteCount::ZERO);
    alone.end();
}

#[test]
fn a_plan_that_finds_no_room_or_is_cancelled_keeps_segments_and_budget() {
    let _watchdog = watchdog("segment", Duration::from_secs(120));
    let Some(alone) = alone("far_limit:8MiB,capacity:16MiB,span:1GiB") else { return };
    let far =
        |salt| Segment::collect(Tier::FAR, (0..MIB / 8).map(move |at| value(salt, at as u64)));
    let kept: Vec<_> = (10..).map_while(|salt| far(salt).ok()).collect();
    let segments: Vec<_> = (0..3).map(|salt| segment(salt, 8 * MIB / 8, Tier::LOCAL)).collect();
    let cancel = AtomicBool::new(true);
    let mut placement = AutoPlacement::new(ByteCount::mib(8));
    for segment in &segments {
        placement.add(segment, Tier::FAR);
    }
    placement.cancelled_by(&cancel);
    read_often(&segments, 1, 3_200);
    let plan = placement.rebalance();
    assert_eq!((plan.moved(), plan.error()), (0, Some(&SegmentError::Cancelled)));
    cancel.store(false, Ordering::Relaxed);
    let plan = placement.rebalance();
    let error = SegmentError::NoMemory { bytes: ByteCount::mib(8), to: Tier::FAR };
    assert_eq!((plan.moved(), plan.error()), (0, Some(&error)));
    assert_eq!(local(&segments), [0, 1, 2]);
    drop(kept);
    let plan = placement.rebalance();
    assert!(plan.moved() > 0, "there is room for one at least: {plan:?}");
    assert!(local(&segments).contains(&1), "what is read stays");
    for (segment, salt) in segments.iter().zip(0..) {
        assert_eq!(wrong(salt, &segment.read()), 0);
    }
    drop(segments);
    alone.end();
}
