//! Pages that change their device in place: against what was written, while others use them, and with
//! destinations that are full, fail, or take their time.

#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

mod common;

use common::faulty::{FaultControl, FaultyStore};
use common::{Dice, eventually, mem_store, region, seed, watchdog};
use farheap::region::{Mode, Region, RegionConfig};
use farheap::store::{BlockStore, JoinedStore, Op, Side, Store};
use farheap::{ByteCount, Error};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const UNIT: usize = 4096;
const LIMIT: ByteCount = ByteCount::mib(8);

/// A mapping, and what its units hold: their number and a version, in the first and the last word.
struct Data {
    region: Region,
    base: usize,
    units: usize,
}

fn joined(first: Arc<dyn Store>, second: Arc<dyn Store>) -> Arc<dyn Store> {
    Arc::new(JoinedStore::new(first, second).expect("nobody uses them"))
}

/// A joined store whose second side breaks on demand.
fn breakable(second: ByteCount) -> (Arc<dyn Store>, FaultControl) {
    let faulty = FaultyStore::new(mem_store(second), 1);
    let control = faulty.control();
    (joined(mem_store(ByteCount::mib(64)), Arc::new(faulty)), control)
}

fn config(page: ByteCount) -> RegionConfig {
    RegionConfig::new().limit(LIMIT).page(page)
}

impl Data {
    /// `len` bytes written and evicted; `None` where regions are not permitted.
    fn stored(config: RegionConfig, len: ByteCount, store: Arc<dyn Store>) -> Option<Data> {
        let region = region(config, store)?;
        let base = region.map(len).expect("fits the device").as_ptr() as usize;
        let data = Data { region, base, units: len.as_usize() / UNIT };
        (0..data.units).for_each(|unit| data.write(unit, 0));
        data.region.evict_all().expect("the store has room");
        Some(data)
    }

    /// 24 MiB in two stores in memory.
    fn usual() -> Option<Data> {
        let store = joined(mem_store(ByteCount::mib(64)), mem_store(ByteCount::mib(64)));
        Data::stored(config(ByteCount::kib(16)), ByteCount::mib(24), store)
    }

    fn words(&self, unit: usize) -> [*mut u64; 2] {
        assert!(unit < self.units);
        let start = self.base + unit * UNIT;
        [start as *mut u64, (start + UNIT - 8) as *mut u64]
    }

    fn write(&self, unit: usize, version: u64) {
        for word in self.words(unit) {
            // SAFETY: in the mapping; one thread at most writes a unit.
            unsafe { word.write_volatile(unit as u64 | version << 32) };
        }
    }

    /// The version of a unit, after a check.
    fn read(&self, unit: usize) -> u64 {
        // SAFETY: in the mapping.
        let [first, last] = self.words(unit).map(|word| unsafe { word.read_volatile() });
        assert_eq!(first & 0xFFFF_FFFF, unit as u64, "unit {unit}");
        assert_eq!(last & 0xFFFF_FFFF, unit as u64, "unit {unit}");
        first >> 32
    }

    /// Every unit has this version, and nothing is lost.
    fn check(&self, version: u64) {
        for unit in 0..self.units {
            assert_eq!(self.read(unit), version, "unit {unit}");
        }
        let stats = self.region.stats();
        assert_eq!((stats.poisoned, stats.checksum_errors), (0, 0), "{stats:?}");
        assert!(stats.resident_bytes_max <= LIMIT, "{stats:?}");
    }

    fn range(&self) -> (*const u8, ByteCount) {
        (self.base as *const u8, ByteCount((self.units * UNIT) as u64))
    }

    fn retier(&self, to: Side) -> farheap::Result<farheap::region::Retiered> {
        let (ptr, len) = self.range();
        self.region.retier(ptr, len, to).expect("a range of a region on two stores").run(|_| {})
    }

    fn stored_on(&self, side: Side) -> u64 {
        self.region.stored_on(side).get()
    }

    /// Each page has one slot at most, and all slots are of pages.
    fn check_nothing_leaked(&self) {
        let (ptr, len) = self.range();
        // SAFETY: nobody needs what it holds.
        unsafe { self.region.discard(ptr, len) }.expect("all of the mapping");
        let is_clear = || self.stored_on(Side::First) + self.stored_on(Side::Second) == 0;
        assert!(eventually(is_clear), "{:?}", self.region.stats());
    }
}

#[test]
fn pages_go_to_the_other_store_and_back_at_the_same_addresses() {
    let _watch = watchdog("pages go to the other store and back", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    assert_eq!(data.stored_on(Side::First), data.range().1.get());
    for (to, round) in [(Side::Second, 0), (Side::First, 1), (Side::Second, 2)] {
        let done = data.retier(to).expect("there is room");
        assert!(done.is_complete(), "{done:?}");
        assert_eq!(data.stored_on(to.other()), 0, "round {round}");
        data.check(0);
        // Clean or written, what leaves again leaves to where it is wanted.
        data.region.evict_all().expect("the store has room");
        assert_eq!(data.stored_on(to.other()), 0, "round {round}");
        assert_eq!(data.stored_on(to), data.range().1.get(), "round {round}");
    }
    data.check_nothing_leaked();
}

#[test]
fn pages_of_all_sizes_and_ways_change_their_device() {
    let _watch = watchdog("pages of all sizes change their device", Duration::from_secs(240));
    for page in [ByteCount::kib(4), ByteCount::kib(64), ByteCount::mib(2)] {
        let store = joined(mem_store(ByteCount::mib(64)), mem_store(ByteCount::mib(64)));
        let limit = RegionConfig::limit_min(page).max(LIMIT);
        let config = config(page).limit(limit);
        let Some(data) = Data::stored(config, ByteCount::mib(24), store) else { return };
        assert!(data.retier(Side::Second).expect("there is room").is_complete());
        assert_eq!(data.stored_on(Side::First), 0, "{page}");
        (0..data.units).for_each(|unit| assert_eq!(data.read(unit), 0, "{page}"));
    }
    let ways = [
        config(ByteCount::kib(16)).mode(Mode::InThread),
        config(ByteCount::kib(16)).install(farheap::region::Install::Copy),
    ];
    for config in ways {
        let store = joined(mem_store(ByteCount::mib(64)), mem_store(ByteCount::mib(64)));
        let Some(data) = Data::stored(config, ByteCount::mib(24), store) else { return };
        assert!(data.retier(Side::Second).expect("there is room").is_complete());
        assert_eq!(data.stored_on(Side::First), 0);
        data.check(0);
    }
}

#[test]
fn files_change_places_by_asynchronous_requests_to_both() {
    let _watch = watchdog("files change places", Duration::from_secs(120));
    let dir = tempfile::tempdir().expect("a directory");
    let file = || BlockStore::temporary(Some(dir.path()), None).expect("a file");
    let store = joined(Arc::new(file()), Arc::new(file()));
    let Some(data) = Data::stored(config(ByteCount::kib(16)), ByteCount::mib(24), store) else {
        return;
    };
    let half = ByteCount(data.range().1.get() / 2);
    let (ptr, _) = data.range();
    data.region.retier(ptr, half, Side::Second).expect("a range").run(|_| {}).expect("room");
    // Both have half of the pages: reads of both are under way at the same time.
    let mut dice = Dice::new(seed("files change places"));
    for _ in 0..4 * data.units {
        assert_eq!(data.read(dice.below(data.units as u64) as usize), 0);
    }
    // What is read ahead at that moment comes in afterwards, and is taken out the next time.
    let are_out = || {
        data.region.evict_all().expect("room");
        [Side::First, Side::Second].map(|side| data.stored_on(side)) == [half.get(); 2]
    };
    assert!(eventually(are_out), "{}", data.region.stats());
    data.check(0);
    data.check_nothing_leaked();
}

#[test]
fn what_is_mapped_dirty_or_fresh_goes_to_the_new_side_when_it_leaves() {
    let _watch = watchdog("mapped pages change their device", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    for unit in 0..512 {
        match unit % 3 {
            0 => data.write(unit, 0),
            1 => assert_eq!(data.read(unit), 0),
            _ => {}
        }
    }
    let fresh = data.region.map(ByteCount::mib(2)).expect("fits").as_ptr();
    // SAFETY: in what was just mapped.
    unsafe { fresh.write_volatile(7) };
    data.region
        .retier(fresh, ByteCount(1), Side::Second)
        .expect("a range")
        .run(|_| {})
        .expect("ok");
    assert!(data.retier(Side::Second).expect("there is room").is_complete());
    data.region.evict_all().expect("room");
    assert_eq!(data.stored_on(Side::First), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { fresh.read_volatile() }, 7);
    data.check(0);
}

#[test]
fn pinned_pages_stay_in_memory_and_give_their_place_up() {
    let _watch = watchdog("pinned pages change their device", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    let (ptr, len) = (data.range().0, ByteCount::mib(1));
    data.region.pin(ptr, len).expect("within the limit");
    assert!(data.retier(Side::Second).expect("there is room").is_complete());
    assert_eq!(data.stored_on(Side::First), 0);
    let faults = data.region.stats().faults_read;
    (0..len.as_usize() / UNIT).for_each(|unit| assert_eq!(data.read(unit), 0));
    assert_eq!(data.region.stats().faults_read, faults, "they were in memory all the time");
    data.region.unpin(ptr, len).expect("pinned");
    data.check(0);
}

#[test]
fn readers_and_writers_go_on_while_pages_move_to_and_fro() {
    const ROUNDS: u64 = 6;
    let _watch = watchdog("readers and writers go on", Duration::from_secs(240));
    let Some(data) = Data::usual() else { return };
    let (stop, seed) = (AtomicBool::new(false), seed("readers and writers go on"));
    let versions: Vec<AtomicU64> = (0..data.units).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (data, stop, versions) = (&data, &stop, &versions);
            scope.spawn(move || {
                let mut dice = Dice::new(seed + thread);
                while !stop.load(Ordering::Relaxed) {
                    // Each thread has the units of its own to write.
                    let unit = (dice.below(data.units as u64 / 3) * 3 + thread) as usize;
                    let version = versions[unit].load(Ordering::Relaxed);
                    assert_eq!(data.read(unit), version, "unit {unit}");
                    if dice.below(2) == 0 {
                        data.write(unit, version + 1);
                        versions[unit].store(version + 1, Ordering::Relaxed);
                    }
                }
            });
        }
        for round in 0..ROUNDS {
            let to = if round % 2 == 0 { Side::Second } else { Side::First };
            let outcome = data.retier(to);
            if outcome.as_ref().map(|done| done.is_complete()) != Ok(true) {
                stop.store(true, Ordering::Relaxed);
            }
            assert!(outcome.expect("there is room").is_complete(), "round {round}");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(data.stored_on(Side::Second), 0);
    for (unit, version) in versions.iter().enumerate() {
        assert_eq!(data.read(unit), version.load(Ordering::Relaxed), "unit {unit}");
    }
    assert!(data.region.stats().resident_bytes_max <= LIMIT);
    data.check_nothing_leaked();
}

#[test]
fn a_full_destination_ends_it_and_every_page_is_whole() {
    let _watch = watchdog("a full destination ends it", Duration::from_secs(120));
    let store = joined(mem_store(ByteCount::mib(64)), mem_store(ByteCount::mib(9)));
    let Some(data) = Data::stored(config(ByteCount::kib(16)), ByteCount::mib(24), store) else {
        return;
    };
    let error = data.retier(Side::Second).expect_err("24 MiB into 9");
    assert!(matches!(error, Error::StoreFull { pages, .. } if pages.0 == 9 * 64), "{error}");
    data.check(0);
    data.region.evict_all().expect("the first has room");
    let (first, second) = (data.stored_on(Side::First), data.stored_on(Side::Second));
    assert!(second > 4 << 20, "{second} have moved");
    assert_eq!(first + second, data.range().1.get(), "each page has one place");
    assert!(data.retier(Side::First).expect("there is room").is_complete());
    assert_eq!(data.stored_on(Side::Second), 0);
    data.check_nothing_leaked();
}

#[test]
fn a_destination_that_fails_ends_it_and_every_page_is_whole() {
    let _watch = watchdog("a destination that fails ends it", Duration::from_secs(240));
    for good in [0, 1, 5, 20] {
        let (store, control) = breakable(ByteCount::mib(64));
        let config = config(ByteCount::kib(64));
        let Some(data) = Data::stored(config, ByteCount::mib(24), store) else { return };
        let (ptr, len) = data.range();
        let mut done = 0;
        let retier = data.region.retier(ptr, len, Side::Second).expect("a range");
        if good == 0 {
            control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
        }
        let outcome = retier.run(|_| {
            done += 1;
            if done == good {
                control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
            }
        });
        if good > 12 {
            outcome.expect("nothing failed");
            continue;
        }
        let error = outcome.expect_err("all writes fail");
        assert!(matches!(error, Error::Io { op: "write", errno: libc::EIO, .. }), "{error}");
        // The side is broken still: memory goes on by the first.
        (0..data.units).for_each(|unit| data.write(unit, 1));
        data.check(1);
        control.heal();
        assert!(data.retier(Side::Second).expect("it is whole again").is_complete());
        data.check(1);
        data.check_nothing_leaked();
    }
}

#[test]
fn whichever_write_fails_every_page_is_whole() {
    /// A retier of 12 MiB, of which 1 MiB stays in memory, makes more: each is of 1 MiB at most.
    const WRITES_MIN: u64 = 11;
    let _watch = watchdog("whichever write fails", Duration::from_secs(240));
    let (store, control) = breakable(ByteCount::mib(64));
    let config = config(ByteCount::kib(64));
    let Some(data) = Data::stored(config, ByteCount::mib(12), store) else { return };
    let len = data.range().1.get();
    let (mut version, mut refused) = (0, 0);
    loop {
        control.fail_after(Op::Write, version, 1, libc::EIO);
        let outcome = data.retier(Side::Second);
        let is_hit = control.injected() > version;
        control.heal();
        if !is_hit {
            assert!(outcome.expect("nothing failed").is_complete());
            break;
        }
        match outcome {
            // A later write went well, before anybody looked.
            Ok(done) => assert!(done.is_complete(), "{done:?}"),
            Err(Error::Io { op: "write", errno: libc::EIO, .. }) => refused += 1,
            Err(other) => panic!("write {version}: {other}"),
        }
        data.check(version);
        let have_one_place = || {
            let is_out = data.region.evict_all().is_ok();
            is_out && data.stored_on(Side::First) + data.stored_on(Side::Second) == len
        };
        assert!(eventually(have_one_place), "write {version}: {}", data.region.stats());
        assert!(data.retier(Side::Second).expect("it is whole again").is_complete());
        assert_eq!(data.stored_on(Side::First), 0, "write {version}");
        assert!(data.retier(Side::First).expect("the first never failed").is_complete());
        version += 1;
        (0..data.units).for_each(|unit| data.write(unit, version));
        data.region.evict_all().expect("the store has room");
        // Some are dirty, the others are stored.
        (0..256).for_each(|unit| data.write(unit, version));
    }
    println!("{version} writes failed, {refused} of them ended a retier");
    assert!(version >= WRITES_MIN && refused > 0, "{version} writes, {refused} were reported");
    data.check(version);
    data.check_nothing_leaked();
}

#[test]
fn a_source_that_cannot_be_read_ends_it_and_pages_stay_where_they_are() {
    let _watch = watchdog("a source that cannot be read ends it", Duration::from_secs(240));
    for good in [0, 4] {
        let faulty = FaultyStore::new(mem_store(ByteCount::mib(64)), 1);
        let control = faulty.control();
        let store = joined(Arc::new(faulty), mem_store(ByteCount::mib(64)));
        let config = config(ByteCount::kib(16)).deadline(Duration::from_secs(1));
        let Some(data) = Data::stored(config, ByteCount::mib(24), store) else { return };
        let (ptr, len) = data.range();
        let fail = || control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
        if good == 0 {
            fail();
        }
        let mut done = 0;
        let outcome = data.region.retier(ptr, len, Side::Second).expect("a range").run(|_| {
            done += 1;
            if done == good {
                fail();
            }
        });
        let error = outcome.expect_err("nothing can be read");
        assert!(matches!(error, Error::Io { op: "read", .. }), "{error}");
        assert!(done < 12 && control.injected() > 0, "{done} chunks moved");
        control.heal();
        // Nobody touched what could not be read, so nothing is lost.
        data.check(0);
        let is_done = || data.retier(Side::Second).is_ok_and(|done| done.is_complete());
        assert!(eventually(is_done), "it is whole again: {}", data.region.stats());
        assert_eq!(data.stored_on(Side::First), 0);
        data.check(0);
        data.check_nothing_leaked();
    }
}

#[test]
fn cancelling_leaves_each_page_where_it_is() {
    let _watch = watchdog("cancelling leaves pages where they are", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    let (ptr, len) = data.range();
    let cancel = AtomicBool::new(false);
    let retier = data.region.retier(ptr, len, Side::Second).expect("a range");
    let done = retier
        .cancelled_by(&cancel)
        .run(|done| cancel.store(done.bytes() >= ByteCount::mib(6), Ordering::Relaxed))
        .expect("nothing failed");
    assert!(!done.is_complete() && done.bytes() >= ByteCount::mib(6), "{done:?}");
    assert_eq!(done.of_bytes(), len);
    data.check(0);
    data.region.evict_all().expect("room");
    let (first, second) = (data.stored_on(Side::First), data.stored_on(Side::Second));
    assert_eq!(first + second, len.get(), "each page has one place");
    assert!(second >= 6 << 20 && first > 0, "{first} {second}");
    data.check_nothing_leaked();
}

#[test]
fn a_rate_bounds_what_is_read() {
    let _watch = watchdog("a rate bounds what is read", Duration::from_secs(240));
    let Some(data) = Data::usual() else { return };
    let (ptr, len) = data.range();
    let retier = data.region.retier(ptr, len, Side::Second).expect("a range");
    let done = retier.rate(ByteCount::mib(48)).run(|_| {}).expect("room");
    // Faster is impossible; how much slower depends on the machine.
    assert!(done.elapsed() > Duration::from_millis(400), "{done:?}");
    assert_eq!((done.bytes(), done.read()), (len, len));
}

#[test]
fn addresses_that_are_given_back_want_nothing_any_more() {
    let _watch = watchdog("addresses given back want nothing", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    assert!(data.retier(Side::Second).expect("there is room").is_complete());
    let (ptr, len) = data.range();
    let start = std::ptr::NonNull::new(ptr.cast_mut()).expect("mapped");
    // SAFETY: mapped above, and nobody uses it any more.
    unsafe { data.region.unmap(start, len) }.expect("mapped");
    assert_eq!(data.stored_on(Side::Second), 0);
    let again = data.region.map(len).expect("fits").as_ptr() as usize;
    assert_eq!(again, data.base, "or this test has to look at more");
    (0..data.units).for_each(|unit| data.write(unit, 3));
    data.region.evict_all().expect("room");
    assert_eq!(data.stored_on(Side::Second), 0);
    assert_eq!(data.stored_on(Side::First), len.get());
    data.check(3);
}

#[test]
fn children_that_are_forked_meanwhile_read_what_was_there() {
    let _watch = watchdog("forked children read what was there", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    let data = &data;
    let moved = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let moves = scope.spawn(|| {
            let (ptr, len) = data.range();
            let retier = data.region.retier(ptr, len, Side::Second).expect("a range");
            retier
                .rate(ByteCount::mib(48))
                .run(|done| moved.store(done.bytes().get(), Ordering::Relaxed))
        });
        assert!(eventually(|| moved.load(Ordering::Relaxed) >= 4 << 20));
        #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
        // SAFETY: the child reads its memory, and ends.
        let pid = unsafe { libc::fork() };
        match pid {
            0 => {
                let right = (0..data.units).all(|unit| {
                    // SAFETY: in the mapping, which it has inherited.
                    data.words(unit)
                        .iter()
                        .all(|word| unsafe { word.read_volatile() } == unit as u64)
                });
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(if right { 7 } else { 1 }) }
            }
            child => {
                let mut status = 0;
                // SAFETY: waits for the child.
                assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
                assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
            }
        }
        assert!(moves.join().expect("no panic").expect("there is room").is_complete());
    });
    data.region.evict_all().expect("room");
    assert_eq!(data.stored_on(Side::First), 0);
    data.check(0);
    data.check_nothing_leaked();
}

/// MOVE takes out nothing that is shared with a child, and these pages are protected against the write that
/// would end the sharing.
#[test]
fn what_a_child_shares_leaves_for_the_new_side_as_well() {
    let _watch = watchdog("what a child shares leaves as well", Duration::from_secs(120));
    let Some(data) = Data::usual() else { return };
    data.check(0); // Some of it is mapped now, and clean.
    let (ended, mut ends) = std::io::pipe().expect("a pipe");
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child waits, and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        drop(ends);
        let mut byte = [0];
        // SAFETY: reads into a buffer of its own until its parent says that it may end.
        unsafe { libc::read(std::os::fd::AsRawFd::as_raw_fd(&ended), byte.as_mut_ptr().cast(), 1) };
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(0) };
    }
    let moved = data.retier(Side::Second);
    let evicted = data.region.evict_all();
    let stored = data.stored_on(Side::Second);
    std::io::Write::write_all(&mut ends, &[1]).expect("the child waits");
    let mut status = 0;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert!(moved.expect("there is room").is_complete());
    evicted.expect("there is room");
    assert_eq!(stored, data.range().1.get());
    data.check(0);
    data.check_nothing_leaked();
}

#[test]
fn a_store_by_itself_has_no_other_side() {
    let store = mem_store(ByteCount::mib(64));
    let Some(region) = region(config(ByteCount::kib(16)), Arc::clone(&store)) else { return };
    let ptr = region.map(ByteCount::mib(2)).expect("fits").as_ptr();
    let refused = region.retier(ptr, ByteCount::mib(2), Side::Second).map(drop);
    assert!(matches!(refused, Err(Error::Unsupported { .. })), "{refused:?}");
    let outside = region.retier(std::ptr::from_ref(&store).cast(), ByteCount(1), Side::Second);
    assert!(matches!(outside.map(drop), Err(Error::BadRange { .. })));
}
