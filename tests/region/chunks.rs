//! Chunks of far memory that are read, mapped and evicted whole, because a stream leads through
//! them: against what was written, while others discard, write and evict ahead of the reader.
//!
//! Guards: G1, G5.

#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]
#![expect(clippy::disallowed_methods, reason = "does to far memory what a program may do")]

use crate::common::faulty::FaultyStore;
use crate::common::{Dice, amount, bytes, eventually, mem_store, region, seed, watchdog};
use farheap::ByteCount;
use farheap::region::{Advice, Region, RegionConfig};
use farheap::store::{Op, Store};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Barrier};
use std::time::Duration;

const UNIT: usize = 4096;
const CHUNK: usize = 2 << 20;
const LIMIT: ByteCount = ByteCount::mib(64);

/// A mapping and what each unit of it holds: its first and last word.
struct Data {
    region: Region,
    base: *mut u8,
    stamps: Vec<u64>,
}

impl Data {
    /// Writes all of it; `None` where regions are not permitted.
    fn written(limit: ByteCount, store: Arc<dyn Store>) -> Option<Data> {
        let len = ByteCount::mib(160);
        let config = RegionConfig::new().limit(limit);
        let region = region(config, store)?;
        let base = region.map(len).expect("fits the device").cast::<u8>().as_ptr();
        let mut data = Data { region, base, stamps: vec![0; len.as_usize() / UNIT] };
        (0..data.stamps.len()).for_each(|unit| data.write(unit, unit as u64 | 1 << 63));
        Some(data)
    }

    /// Writes all of it and evicts it; `None` where regions are not permitted.
    fn stored() -> Option<Data> {
        let data = Data::written(LIMIT, mem_store(ByteCount::mib(256)))?;
        data.region.evict_all().expect("the store has room");
        Some(data)
    }

    fn word(&self, unit: usize, at: usize) -> *mut u64 {
        assert!(unit < self.stamps.len() && at < UNIT / 8);
        // SAFETY: in the mapping, checked above.
        unsafe { self.base.cast::<u64>().add(unit * UNIT / 8 + at) }
    }

    fn write(&mut self, unit: usize, stamp: u64) {
        for at in [0, UNIT / 8 - 1] {
            // SAFETY: in the mapping, which this thread alone uses.
            unsafe { self.word(unit, at).write_volatile(stamp) };
        }
        self.stamps[unit] = stamp;
    }

    fn check(&self, unit: usize) {
        for at in [0, UNIT / 8 - 1] {
            // SAFETY: as above.
            let seen = unsafe { self.word(unit, at).read_volatile() };
            assert_eq!(seen, self.stamps[unit], "unit {unit} word {at}");
        }
    }

    fn check_all(&self) {
        (0..self.stamps.len()).for_each(|unit| self.check(unit));
    }

    fn range(&self, first: usize, units: usize) -> (*mut u8, ByteCount) {
        (self.word(first, 0).cast(), ByteCount((units * UNIT) as u64))
    }

    fn discard(&mut self, unit: usize) {
        let (ptr, len) = self.range(unit, 1);
        // SAFETY: nobody needs what the unit holds.
        unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }.expect("a page of the mapping");
        self.stamps[unit] = 0;
    }

    /// Whether chunks can be read whole here: MOVE exists, by which they leave.
    fn moves(&self) -> bool {
        self.region.stats().chunks_evicted > 0
    }

    fn expect_within_limit(&self) {
        let stats = self.region.stats();
        assert!(stats.resident_bytes_max.0 <= LIMIT.0, "{stats:?}");
        assert_eq!((stats.poisoned, stats.checksum_errors), (0, 0), "{stats:?}");
    }
}

#[test]
fn a_scan_up_or_down_reads_whole_chunks_and_every_byte_is_right() {
    let _watch = watchdog("a scan reads whole chunks", Duration::from_secs(240));
    for descends in [false, true] {
        let Some(data) = Data::stored() else { return };
        for _ in 0..3 {
            match descends {
                true => (0..data.stamps.len()).rev().for_each(|unit| data.check(unit)),
                false => data.check_all(),
            }
        }
        let stats = data.region.stats();
        println!("{} chunks, {} pages", stats.chunks_read, stats.pages_in);
        // How many of the 240 depends on when the evictor runs.
        assert!(stats.chunks_read >= 8 || !data.moves(), "{stats:?}");
        data.expect_within_limit();
    }
}

/// The chunk that left last waits until the next one follows. A page of it that is touched meanwhile brings all of it
/// back, without a read.
#[test]
fn a_chunk_that_is_used_while_it_waits_to_leave_comes_back_whole() {
    let _watch = watchdog("a chunk is used while it waits", Duration::from_secs(240));
    const UNITS: usize = CHUNK / UNIT;
    let config = RegionConfig::new().limit(LIMIT);
    let Some(region) = region(config, mem_store(ByteCount::mib(256))) else { return };
    let base = region.map(ByteCount::mib(160)).expect("fits the device").cast::<u8>().as_ptr();
    let mut data = Data { region, base, stamps: vec![0; (160 << 20) / UNIT] };
    let read = |data: &Data, chunk: usize| {
        (chunk * UNITS..(chunk + 1) * UNITS).for_each(|unit| data.check(unit));
    };
    let (mut waited, mut touched, mut whole) = (None, 0, 0);
    for chunk in 0..data.stamps.len() / UNITS {
        (chunk * UNITS..(chunk + 1) * UNITS)
            .for_each(|unit| data.write(unit, unit as u64 | 1 << 63));
        assert!(eventually(|| data.region.stats().writes_in_flight == 0));
        // A thread that has to wait for room makes the evictor hurry: then nothing waits.
        let before = data.region.stats();
        if let Some(chunk) = waited.take() {
            read(&data, chunk);
            touched += 1;
            whole += usize::from(data.region.stats().faults_read == before.faults_read);
        }
        // They leave in the order in which they came, but for the first, whose first pages came one by one.
        let gone = before.chunks_evicted as usize;
        for chunk in gone.saturating_sub(1)..=gone {
            let cooling = data.region.stats().faults_cooling;
            data.check(chunk * UNITS + 7);
            if data.region.stats().faults_cooling > cooling {
                waited = Some(chunk);
            }
        }
    }
    println!("{whole} of {touched} came back whole: {:?}", data.region.stats());
    // None is touched where this thread always had to wait for room.
    assert!(2 * whole > touched || touched == 0);
    data.check_all();
    data.expect_within_limit();
}

/// What is ahead of the reader is read into frames, or held there, when it is discarded, written or
/// evicted.
#[test]
fn chunks_that_change_ahead_of_their_reader_are_right() {
    let _watch = watchdog("chunks change ahead of their reader", Duration::from_secs(400));
    let mut dice = Dice::new(seed("chunks change ahead of their reader"));
    for descends in [false, true] {
        let Some(mut data) = Data::stored() else { return };
        let units = data.stamps.len();
        let ahead = 4 * CHUNK / UNIT;
        // Where much changes hardly any chunk is read whole: little does at first.
        for one_of in [32_768, 8_192, 2_048, 2_048] {
            for nth in 0..units {
                let unit = if descends { units - 1 - nth } else { nth };
                data.check(unit);
                let distance = dice.below(ahead as u64) as usize;
                let other = match descends {
                    true => unit.saturating_sub(distance),
                    false => (unit + distance).min(units - 1),
                };
                match dice.below(one_of) {
                    0 => data.discard(other),
                    1 => data.write(other, dice.roll() | 1),
                    2 => {
                        let count = (dice.below(1024) as usize + 1).min(units - other);
                        let (ptr, len) = data.range(other, count);
                        data.region
                            .advise(&[bytes(ptr, len)], Advice::PageOutNow)
                            .expect("the store has room");
                    }
                    3 => {
                        let count = (2 * CHUNK / UNIT).min(units - other);
                        let (ptr, len) = data.range(other, count);
                        data.region
                            .advise(&[bytes(ptr, len)], Advice::WillNeed)
                            .expect("inside the region");
                    }
                    _ => {}
                }
            }
        }
        assert!(data.region.stats().chunks_read > 0 || !data.moves());
        data.expect_within_limit();
    }
}

/// Chunks that are held for a reader which has stopped are mapped after a while, and can go.
#[test]
fn a_lowered_limit_is_reached_although_chunks_were_held() {
    let _watch = watchdog("a lowered limit with held chunks", Duration::from_secs(120));
    let Some(data) = Data::stored() else { return };
    let limit = ByteCount::mib(8);
    for stop in [10, 21, 33] {
        let end = stop * CHUNK / UNIT + 1;
        (0..end).for_each(|unit| data.check(unit));
        data.region.set_limit(limit).expect("above the minimum");
        let reached = eventually(|| data.region.stats().charged_bytes.0 <= limit.0);
        assert!(reached, "{:?}", data.region.stats());
        data.check(end);
        data.region.set_limit(LIMIT).expect("as before");
    }
    data.check_all();
    data.expect_within_limit();
}

/// Fresh chunks that somebody wants out go by one write each, whether that is waited for or not.
#[test]
fn fresh_chunks_that_are_asked_out_leave_whole() {
    const CHUNKS: usize = 6;
    let _watch = watchdog("fresh chunks are asked out", Duration::from_secs(120));
    let Some(mut data) = Data::stored() else { return };
    if !data.moves() {
        return;
    }
    let units = CHUNKS * CHUNK / UNIT;
    let (ptr, len) = data.range(0, units);
    for waits in [true, false] {
        // SAFETY: nobody needs what the range holds, which this thread alone uses.
        unsafe { data.region.discard(bytes(ptr, len).cast_mut()) }
            .expect("whole pages of the mapping");
        (0..units).for_each(|unit| data.write(unit, unit as u64 | 1 << 62));
        let before = data.region.stats();
        if waits {
            data.region.advise(&[bytes(ptr, len)], Advice::PageOutNow).expect("the store has room");
        } else {
            data.region.advise(&[bytes(ptr, len)], Advice::PageOut).expect("a range of the region");
        }
        let wanted = before.chunks_evicted + CHUNKS as u64 - 2; // The first pages came one by one.
        let left = eventually(|| data.region.stats().chunks_evicted >= wanted);
        assert!(left, "{before:?} {:?}", data.region.stats());
        (0..units).for_each(|unit| data.check(unit));
    }
    data.expect_within_limit();
}

/// Where a part of a chunk is stored, the kernel cannot fill the rest. Zeros come by several pages at a fault there if
/// memory is filled in order, and by one else.
#[test]
fn fresh_pages_beside_stored_ones_come_by_several_if_they_are_filled_in_order() {
    let _watch = watchdog("beside stored ones", Duration::from_secs(120));
    let Some(mut data) = Data::stored() else { return };
    let (first, count) = (CHUNK / UNIT / 2, CHUNK / UNIT / 2);
    let (ptr, len) = data.range(first, count);
    for is_in_order in [true, false] {
        // SAFETY: nobody needs what the range holds, which this thread alone uses.
        unsafe { data.region.discard(bytes(ptr, len).cast_mut()) }
            .expect("whole pages of the mapping");
        let before = data.region.stats();
        let units = (first..first + count).skip(1).step_by(if is_in_order { 1 } else { 32 });
        units.clone().for_each(|unit| data.write(unit, unit as u64 | 1 << 61));
        let after = data.region.stats();
        let faults = after.faults_zero - before.faults_zero;
        if is_in_order {
            assert!(faults < count as u64 / 8, "{faults} for {count} pages");
        } else {
            assert_eq!(faults, units.clone().count() as u64);
            assert!(after.charged_bytes.0 < before.charged_bytes.0 + 2 * faults * UNIT as u64);
        }
        (0..CHUNK / UNIT)
            .filter(|unit| !(first..first + count).contains(unit))
            .for_each(|unit| data.check(unit));
        units.for_each(|unit| data.check(unit));
    }
    data.expect_within_limit();
}

/// Of a chunk that came in whole, all pages go along with the one that is named, but those that are pinned: the next of
/// these names the others again. An evictor that took each as often as it was named waited for itself.
#[test]
fn pages_that_are_named_twice_because_others_of_their_chunk_are_pinned_leave_once() {
    const PINNED: usize = 2;
    const LEFT: usize = 16;
    let _watch = watchdog("named twice", Duration::from_secs(120));
    let Some(mut data) = Data::stored() else { return };
    if !data.moves() {
        return;
    }
    let (units, chunk_len) = (CHUNK / UNIT, ByteCount(CHUNK as u64));
    let (ptr, _) = data.range(0, units);
    data.region.advise(&[bytes(ptr, chunk_len)], Advice::WillNeed).expect("inside the region");
    assert!(eventually(|| data.region.stats().chunks_read > 0), "{}", data.region.stats());
    // Few are left: a batch does not end with those that go along with the first.
    (LEFT..units).for_each(|unit| data.discard(unit));
    let (ptr, len) = data.range(0, PINNED);
    let pinned = data.region.pin(bytes(ptr, len)).expect("far from all that can be pinned");
    (10 * units..30 * units).for_each(|unit| data.check(unit));
    let (ptr, len) = data.range(0, LEFT);
    data.region.advise(&[bytes(ptr, len)], Advice::Cold).expect("inside the region");
    let before = data.region.stats();
    data.region.set_limit(ByteCount::mib(8)).expect("above the minimum");
    let at_hand = |unit: usize| data.region.is_at_hand(data.word(unit, 0).cast());
    assert!(eventually(|| !(PINNED..LEFT).any(at_hand)), "{before} {}", data.region.stats());
    assert!((0..PINNED).all(at_hand));
    drop(pinned);
    data.check_all();
    data.expect_within_limit();
}

/// Units at which rows of 64 KiB begin, in the second half of each chunk.
fn rows(data: &Data) -> impl Iterator<Item = usize> + use<> {
    let half = CHUNK / UNIT / 2;
    (0..data.stamps.len()).step_by(16).filter(move |unit| unit / half % 2 == 1)
}

/// A program that uses a few pages here and there needs no room for those beside them.
#[test]
fn fresh_pages_here_and_there_need_no_room_for_others() {
    let _watch = watchdog("here and there", Duration::from_secs(240));
    let store = FaultyStore::new(mem_store(ByteCount::mib(256)), 1);
    let control = store.control();
    let Some(mut data) = Data::written(LIMIT, Arc::new(store)) else { return };
    data.region.evict_all().expect("the store has room");
    for row in rows(&data) {
        (row..row + 16).for_each(|unit| data.discard(unit));
    }
    control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
    let before = data.region.stats();
    // 10 MiB of a limit of 64.
    for row in rows(&data) {
        (row + 1..row + 3).for_each(|unit| data.write(unit, unit as u64 | 1 << 60));
    }
    let after = data.region.stats();
    assert_eq!(after.faults_starved, before.faults_starved, "{after}");
    control.heal();
    data.check_all();
    data.expect_within_limit();
}

/// What lies between pages in use and is nobody's has no memory, and keeps none when they are freed.
#[test]
fn free_pages_beside_those_in_use_have_no_memory() {
    let _watch = watchdog("free beside used", Duration::from_secs(240));
    let Some(mut data) = Data::stored() else { return };
    let unmap = |data: &Data, first, units| {
        let (ptr, len) = data.range(first, units);
        let ptr = NonNull::new(ptr).expect("in the mapping");
        // SAFETY: mapped, and nobody needs what it holds.
        unsafe { data.region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
            .expect("mapped");
    };
    for row in rows(&data) {
        unmap(&data, row, 1);
        unmap(&data, row + 3, 13);
        (row + 1..row + 3).for_each(|unit| data.discard(unit));
        (row + 1..row + 3).for_each(|unit| data.write(unit, 7));
    }
    rows(&data).for_each(|row| unmap(&data, row + 1, 2));
    let of_data = || {
        let stats = data.region.stats();
        stats.charged_bytes.0 - stats.metadata_bytes.0
    };
    // (What is kept to be used again, for one, a huge page.)
    assert!(eventually(|| of_data() <= LIMIT.0 / 4), "{}", data.region.stats());
}

/// Where memory is filled in order, what the program guards (`MADV_GUARD_INSTALL`, Linux 6.13) stays so.
#[test]
fn zeros_that_come_by_several_leave_guards_in_place() {
    const MADV_GUARD_INSTALL: i32 = 102;
    let _watch = watchdog("guards", Duration::from_secs(120));
    let Some(mut data) = Data::stored() else { return };
    let first = CHUNK / UNIT / 2;
    (first..first + 64).for_each(|unit| data.discard(unit));
    let (guarded, len) = data.range(first + 40, 2);
    // SAFETY: pages of the mapping, which hold nothing.
    if unsafe { libc::madvise(guarded.cast(), len.as_usize(), MADV_GUARD_INSTALL) } != 0 {
        println!("skipped: the kernel has no guards");
        return;
    }
    (first..first + 40).for_each(|unit| data.write(unit, 7));
    let (_reader, writer) = std::io::pipe().expect("two descriptors");
    // SAFETY: the kernel reads a byte, or says that it must not.
    let got = unsafe { libc::write(writer.as_raw_fd(), guarded.cast(), 1) };
    assert_eq!(got, -1, "a guard is gone");
}

/// Each chunk has left before the next is begun, as where the evictor keeps up with a thread that fills memory in
/// order. Those after the first come as huge pages all the same, without a page that came by itself.
#[test]
fn what_is_filled_in_order_comes_in_chunks_although_the_ones_before_have_left() {
    const CHUNKS: usize = 12;
    let _watch = watchdog("filled in order", Duration::from_secs(120));
    let config = RegionConfig::new().limit(LIMIT);
    let Some(region) = region(config, mem_store(ByteCount::mib(64))) else { return };
    let len = ByteCount((CHUNKS * CHUNK) as u64);
    let base = region.map(len).expect("fits the device").cast::<u8>().as_ptr();
    let mut lone = Vec::new();
    for chunk in 0..CHUNKS {
        let (first, chunk_len) = (base.wrapping_add(chunk * CHUNK), ByteCount(CHUNK as u64));
        for at in (0..CHUNK).step_by(UNIT) {
            // SAFETY: in the mapping, which this thread alone uses.
            unsafe { first.wrapping_add(at).write_volatile(at as u8 | 1) };
        }
        region.advise(&[bytes(first, chunk_len)], Advice::PageOutNow).expect("the store has room");
        lone.push(region.stats().faults_zero);
    }
    let stats = region.stats();
    println!("pages that came by themselves after each chunk: {lone:?}, {stats}");
    if stats.chunks_opened == 0 {
        return; // The kernel's page map cannot be read here.
    }
    assert_eq!(lone.first(), lone.last(), "{stats}");
    assert_eq!(stats.chunks_opened, CHUNKS as u64, "{stats}");
}

/// A chunk of which a part is asked out while the rest is being filled: a fault there opens it again before the
/// part has left, which then leaves all the same.
#[test]
fn a_part_of_a_chunk_leaves_although_the_rest_is_being_filled() {
    const CHUNKS: usize = 8;
    let _watch = watchdog("a part of a chunk is asked out", Duration::from_secs(120));
    {
        let config = RegionConfig::new().limit(LIMIT);
        let Some(region) = region(config, mem_store(ByteCount::mib(64))) else { return };
        let base = region
            .map(ByteCount((CHUNKS * CHUNK) as u64))
            .expect("fits the device")
            .cast::<u8>()
            .as_ptr();
        let start = base.expose_provenance();
        let words = |first: usize| (first..first + CHUNK / 2).step_by(UNIT).map(|at| start + at);
        let word = std::ptr::with_exposed_provenance_mut::<usize>;
        // SAFETY: in the mapping; each half of a chunk is filled by one thread.
        let fill = |first| words(first).for_each(|at| unsafe { word(at).write_volatile(at) });
        // SAFETY: in the mapping, which nobody else uses then.
        let is_right = |first| words(first).all(|at| unsafe { word(at).read_volatile() } == at);
        for round in 0..amount(150) {
            let (first, rest) = (round % CHUNKS * CHUNK, round % CHUNKS * CHUNK + CHUNK / 2);
            let (part, len) = (base.wrapping_add(first), ByteCount(CHUNK as u64));
            // SAFETY: nobody needs what the chunk holds.
            unsafe { region.discard(bytes(part, len).cast_mut()) }.expect("a chunk of the mapping");
            fill(first);
            let (before, meet) = (region.stats(), Barrier::new(2));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    meet.wait();
                    fill(rest);
                });
                meet.wait();
                region
                    .advise(&[bytes(part, ByteCount(len.0 / 2))], Advice::PageOutNow)
                    .expect("the store has room");
            });
            let after = region.stats();
            let (left, pages) = (after.pages_out - before.pages_out, len.0 / 2 / UNIT as u64);
            assert_eq!(left, pages, "round {round}: {before} {after}");
            assert!(is_right(first) && is_right(rest), "round {round}");
        }
    }
}

/// Where a thread writes faster than the device does, it waits for room for the next chunk: while one is on its
/// way out another one is, and nothing goes page by page.
#[test]
fn what_is_written_faster_than_the_device_leaves_in_chunks_several_at_once() {
    let _watch = watchdog("written faster than the device", Duration::from_secs(240));
    // An evictor that has no processor for long finds each write answered when it looks.
    const ROUNDS: usize = 12;
    for limit in [16, 32].map(ByteCount::mib) {
        let mut most = 0;
        for _ in 0..ROUNDS {
            let store = FaultyStore::new(mem_store(ByteCount::mib(256)), 1);
            store.control().delay(Duration::from_millis(4));
            let Some(data) = Data::written(limit, Arc::new(store)) else { return };
            let stats = data.region.stats();
            if !data.moves() {
                return;
            }
            let (written, by_chunks) =
                (stats.bytes_written.get(), stats.chunks_evicted * CHUNK as u64);
            println!("under {limit}: {written} written, {by_chunks} by chunks, {stats}");
            // Before the evictor runs ahead, a part of the limit goes page by page.
            assert!(by_chunks >= written / 4 * 3, "{by_chunks} of {written}: {stats}");
            assert!(stats.resident_bytes_max <= limit, "{stats}");
            data.check_all();
            most = most.max(stats.writes_in_flight_max);
            if most >= 2 {
                break;
            }
        }
        assert!(most >= 2, "one write at a time under {limit}");
    }
}

#[test]
fn chunks_that_are_stored_whole_hold_what_was_given_and_leave_the_limit_alone() {
    let _watch = watchdog("chunks are stored whole", Duration::from_secs(240));
    const CHUNKS: usize = 48;
    let config = RegionConfig::new().limit(LIMIT);
    let Some(region) = region(config, mem_store(ByteCount::mib(256))) else { return };
    let len = ByteCount((CHUNKS * CHUNK) as u64);
    let base = region.map(len).expect("fits the device").cast::<u8>().as_ptr();
    let value = |chunk: usize, at: usize| ((chunk << 32 | at) as u64).wrapping_mul(0x9E37_79B9) | 1;
    let values = |chunk| (0..CHUNK / 8).map(|at| value(chunk, at)).collect::<Vec<_>>();
    let mut stored = 0;
    for chunk in 0..CHUNKS {
        let (ptr, from) = (base.wrapping_add(chunk * CHUNK).cast::<u64>(), values(chunk));
        // SAFETY: the chunk is mapped and of this thread alone.
        if unsafe { region.store_chunk(ptr, &from) } {
            stored += 1;
            // It holds something now, and stays as it is.
            // SAFETY: as above.
            assert!(!unsafe { region.store_chunk(ptr, &values(99)) });
        } else {
            // SAFETY: as above.
            unsafe { ptr.copy_from_nonoverlapping(from.as_ptr(), CHUNK / 8) };
        }
        let elsewhere = [ptr.wrapping_add(CHUNK / 16), std::ptr::without_provenance_mut(CHUNK)];
        // SAFETY: no chunk of the region begins there, so that nothing is done.
        let refused = elsewhere.map(|at| unsafe { region.store_chunk(at, &from) });
        assert_eq!(refused, [false, false]);
    }
    let seen = region.stats();
    println!("{stored} of {CHUNKS} chunks were stored whole");
    // None where MOVE is missing.
    assert!(stored > 0 || seen.chunks_evicted == 0, "{seen:?}");
    for chunk in 0..CHUNKS {
        let ptr = base.wrapping_add(chunk * CHUNK).cast::<u64>();
        let wrong = values(chunk).into_iter().zip(0..).filter(|(value, at)| {
            // SAFETY: mapped and filled above.
            let seen = unsafe { ptr.wrapping_add(*at).read() };
            seen != *value
        });
        assert_eq!(wrong.count(), 0, "chunk {chunk}");
    }
    let stats = region.stats();
    assert!(stats.resident_bytes_max.0 <= LIMIT.0, "{stats:?}");
}
