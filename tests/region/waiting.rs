//! A chunk that waits in frames before it leaves, and what a program does to it meanwhile.
//!
//! Guards: G1, G5.

#![expect(unsafe_code, reason = "reads and writes far memory, and changes its mappings")]
#![expect(clippy::disallowed_methods, reason = "does to far memory what a program may do")]

use crate::common::child::alone;
use crate::common::{Dice, amount, bytes, eventually, mem_store, region, seed, watchdog};
use farheap::ByteCount;
use farheap::region::{Advice, Region, RegionConfig};
use std::time::Duration;

const UNIT: usize = 4096;
const UNITS: usize = (2 << 20) / UNIT;
/// Units of a mapping, two and a half times the limit.
const ALL: usize = 80 * UNITS;
const LIMIT: ByteCount = ByteCount::mib(64);
const HANG: Duration = Duration::from_secs(240);

/// A mapping, and a stamp for each unit of it: 0 for "reads as zero".
struct Data {
    region: Region,
    base: usize,
    stamps: Vec<u64>,
    dice: Dice,
}

impl Data {
    /// `None` where regions are not permitted.
    fn new(test: &str) -> Option<Data> {
        let region = region(RegionConfig::new().limit(LIMIT), mem_store(ByteCount::mib(512)))?;
        let len = ByteCount((ALL * UNIT) as u64);
        let base = region.map(len).expect("fits the device").addr().get();
        Some(Data { region, base, stamps: vec![0; ALL], dice: Dice::new(seed(test)) })
    }

    fn word(&self, unit: usize, at: usize) -> *mut u64 {
        assert!(unit < ALL && at < UNIT / 8);
        (self.base + unit * UNIT + at * 8) as *mut u64
    }

    fn range(&self, first: usize, count: usize) -> (*mut u8, ByteCount) {
        assert!(first + count <= ALL);
        (self.word(first, 0).cast(), ByteCount((count * UNIT) as u64))
    }

    fn write(&mut self, unit: usize) {
        let stamp = self.dice.roll() | 1;
        for at in [0, 17, 511] {
            // SAFETY: in the mapping, which this thread alone uses.
            unsafe { self.word(unit, at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[unit] = stamp;
    }

    fn check(&self, unit: usize) {
        let stamp = self.stamps[unit];
        for at in [0, 17, 511] {
            // SAFETY: as above.
            let seen = unsafe { self.word(unit, at).read_volatile() };
            let wanted = if stamp == 0 { 0 } else { stamp ^ at as u64 };
            assert_eq!(seen, wanted, "unit {unit} word {at}");
        }
    }

    fn discard(&mut self, first: usize, count: usize) {
        let (ptr, len) = self.range(first, count);
        // SAFETY: nobody needs what is there.
        unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }.expect("of the mapping");
        self.stamps[first..first + count].fill(0);
    }

    /// Touches a unit of each of the chunks of which one waits most probably, while `filled` units are filled.
    fn touch_what_may_wait(&mut self, filled: usize) {
        let newest = (filled / UNITS).saturating_sub(LIMIT.as_usize() / UNIT / UNITS);
        for chunk in newest..newest + 6 {
            let unit = chunk * UNITS + self.dice.below(UNITS as u64) as usize;
            if self.dice.below(2) == 0 {
                self.check(unit);
            }
        }
    }

    fn at_hand(&self, first: usize, count: usize) -> usize {
        let is_at_hand = |unit: &usize| self.region.is_at_hand(self.word(*unit, 0).cast());
        (first..first + count).filter(is_at_hand).count()
    }

    fn protect(&self, first: usize, count: usize, access: i32) {
        let (ptr, len) = self.range(first, count);
        // SAFETY: of the mapping; it is only read until it may be written again.
        let done = unsafe { libc::mprotect(ptr.cast(), len.as_usize(), access) };
        assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
    }

    fn map_over(&mut self, first: usize, count: usize) {
        let (ptr, len) = self.range(first, count);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let how = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: of the mapping; nobody needs what is there.
        let got = unsafe { libc::mmap(ptr.cast(), len.as_usize(), access, how, -1, 0) };
        assert_eq!(got, ptr.cast());
        self.stamps[first..first + count].fill(0);
    }

    fn expect_within_limit(&self) {
        let stats = self.region.stats();
        assert!(stats.resident_bytes_max <= LIMIT, "{stats:?}");
        assert_eq!((stats.poisoned, stats.panics), (0, 0), "{stats:?}");
    }
}

#[test]
fn what_is_asked_out_leaves_although_it_was_touched_while_it_waited() {
    let _watch = watchdog("asked out", HANG);
    let Some(mut data) = Data::new("asked out") else { return };
    // What is read ahead of faults may come in just after all others have left.
    let (all, len) = data.range(0, ALL);
    data.region.advise(&[bytes(all, len)], Advice::Random).expect("of the mapping");
    for round in 0..amount(8) {
        data.discard(0, ALL);
        for unit in 0..ALL {
            data.write(unit);
            if unit % (UNITS / 2) != 100 {
                continue;
            }
            data.touch_what_may_wait(unit);
            match data.dice.below(32) {
                0 if round % 2 == 0 => {
                    data.region.evict_all().expect("the store has room");
                    assert_eq!(data.at_hand(0, unit), 0, "round {round}");
                }
                0 => {
                    let first = data.dice.below(unit as u64) as usize;
                    let count = 1 + data.dice.below((unit - first) as u64) as usize;
                    let (ptr, len) = data.range(first, count);
                    let asked = data.region.advise(&[bytes(ptr, len)], Advice::PageOutNow);
                    asked.expect("the store has room");
                    assert_eq!(data.at_hand(first, count), 0, "round {round}: {first} + {count}");
                }
                _ => {}
            }
        }
        (0..ALL).for_each(|unit| data.check(unit));
    }
    data.expect_within_limit();
}

#[test]
fn what_a_program_does_to_a_chunk_that_waits_is_seen() {
    let _watch = watchdog("mappings of chunks that wait", HANG);
    let Some(mut data) = Data::new("mappings of chunks that wait") else { return };
    for _ in 0..amount(4).max(2) {
        for chunk in 0..ALL / UNITS {
            data.discard(chunk * UNITS, UNITS);
            (chunk * UNITS..(chunk + 1) * UNITS).for_each(|unit| data.write(unit));
            data.touch_what_may_wait(chunk * UNITS);
            let other = chunk.saturating_sub(32) + data.dice.below(6) as usize;
            let (start, first) = (other * UNITS, other * UNITS + data.dice.below(500) as usize);
            match data.dice.below(6) {
                0 => {
                    data.map_over(first, 4);
                    (first..first + 4).for_each(|unit| data.write(unit));
                }
                1 => {
                    data.protect(start, UNITS, libc::PROT_READ);
                    (start..start + UNITS).step_by(7).for_each(|unit| data.check(unit));
                    data.protect(start, UNITS, libc::PROT_READ | libc::PROT_WRITE);
                }
                2 => {
                    let (ptr, len) = data.range(first, 12);
                    // Not where something else is mapped.
                    if let Ok(_pinned) = data.region.pin(bytes(ptr, len)) {
                        (first..first + 12).for_each(|unit| data.check(unit));
                    }
                }
                3 => data.discard(first, 12),
                _ => {}
            }
        }
        (0..ALL).for_each(|unit| data.check(unit));
    }
    data.expect_within_limit();
}

/// MOVE does not bring a page back to where the program may not write: it is copied.
#[test]
fn a_protected_chunk_that_comes_back_is_not_in_memory_twice() {
    alone("a_protected_chunk_that_comes_back_is_not_in_memory_twice", || {
        let Some(mut data) = Data::new("a protected chunk") else { return };
        // None waits where this thread had to wait for room in the end.
        for chunk in (0..20).flat_map(|_| (0..60).rev()) {
            if chunk == 59 {
                data.discard(0, ALL);
                (0..60 * UNITS).for_each(|unit| data.write(unit));
                assert!(eventually(|| data.region.stats().writes_in_flight == 0));
            }
            let first = chunk * UNITS;
            if data.at_hand(first, UNITS) > 0 {
                continue;
            }
            data.protect(first, UNITS, libc::PROT_READ);
            let (before, had) = (data.region.stats(), anonymous_kib());
            (first..first + UNITS).for_each(|unit| data.check(unit));
            let (after, has) = (data.region.stats(), anonymous_kib());
            data.protect(first, UNITS, libc::PROT_READ | libc::PROT_WRITE);
            if after.faults_cooling - before.faults_cooling == UNITS as u64 {
                // It waited, and came back without a read.
                assert!(has < had + 1024, "{had} KiB, then {has}");
                return;
            }
        }
        println!("no chunk waited");
    });
}

/// What was freed while it waited leaves although nobody wants room.
#[test]
fn pages_that_were_freed_while_they_waited_keep_no_memory() {
    const COUNT: usize = 4096;
    let _watch = watchdog("freed while they waited", HANG);
    let config = RegionConfig::new().limit(RegionConfig::LIMIT_MIN);
    let Some(region) = region(config, mem_store(ByteCount::mib(64))) else { return };
    let base = region.map(ByteCount((COUNT * UNIT) as u64)).expect("fits the device");
    let mut dice = Dice::new(seed("freed while they waited"));
    // Written at random, pages wait.
    for _ in 0..4 * COUNT {
        let unit = dice.below(COUNT as u64) as usize;
        let byte = base.cast::<u8>().as_ptr().wrapping_add(unit * UNIT);
        // SAFETY: in the mapping, which this thread alone uses.
        unsafe { byte.write_volatile(1) };
    }
    // SAFETY: mapped above; nobody needs what is there.
    unsafe { region.unmap(base) }.expect("just mapped");
    // Frames that are ready to be read into.
    let spare = ByteCount(256 << 10);
    let of_data = || region.stats().charged_bytes.0 - region.stats().metadata_bytes.0;
    assert!(eventually(|| of_data() <= spare.0), "{}", region.stats());
}

/// Anonymous memory of this process.
fn anonymous_kib() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("of this process");
    let line = text.lines().find(|line| line.starts_with("Anonymous:")).expect("it is counted");
    line.split_whitespace().nth(1).expect("KiB").parse().expect("a number")
}
