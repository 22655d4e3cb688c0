//! Chunks that become whole and are taken apart again, by several threads at once: scans and advice that read them
//! whole, discards, pins, protections and advice of the kernel's that split them, a limit that goes up and down, and
//! children, against a shadow copy.
//!
//! A few seconds of it run always. `FARHEAP_SOAK_SECONDS=600 cargo test --test region -- whole --ignored` runs it
//! for longer; `FARHEAP_TEST_SEED` repeats a run's decisions.
//!
//! Guards: G1, G5.
#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers, and forks")]
#![expect(clippy::disallowed_methods, reason = "does to far memory what a program may do")]

use crate::common::child::alone;
use crate::common::{Dice, StopOnDrop, bytes, mem_store, region, seed, watchdog};
use crate::soak::long;
use farheap::ByteCount;
use farheap::region::{Advice, PinGuard, Region, RegionConfig};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const UNIT: usize = 4096;
const UNITS: usize = (2 << 20) / UNIT;
/// Words of a unit that carry its stamp.
const WORDS: [usize; 4] = [0, 17, 256, 511];

/// One thread's chunks: a stamp for each unit, 0 for "reads as zero".
struct Part<'a> {
    region: &'a Region,
    base: usize,
    stamps: Vec<u64>,
    dice: Dice,
    pinned: Vec<PinGuard<'a>>,
}

impl<'a> Part<'a> {
    fn new(region: &'a Region, base: usize, chunks: usize, dice: Dice) -> Part<'a> {
        Part { region, base, stamps: vec![0; chunks * UNITS], dice, pinned: Vec::new() }
    }

    fn word(&self, unit: usize, at: usize) -> *mut u64 {
        assert!(unit < self.stamps.len() && at < UNIT / 8);
        (self.base + unit * UNIT + at * 8) as *mut u64
    }

    fn range(&self, first: usize, count: usize) -> *mut [u8] {
        assert!(first + count <= self.stamps.len());
        bytes(self.word(first, 0).cast(), ByteCount((count * UNIT) as u64)).cast_mut()
    }

    fn write(&mut self, unit: usize) {
        let stamp = self.dice.roll() | 1;
        for at in WORDS {
            // SAFETY: in this thread's part of the mapping.
            unsafe { self.word(unit, at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[unit] = stamp;
    }

    fn is_right(&self, unit: usize) -> bool {
        let stamp = self.stamps[unit];
        WORDS.iter().all(|at| {
            // SAFETY: in this thread's part of the mapping, or of one that nobody writes.
            let seen = unsafe { self.word(unit, *at).read_volatile() };
            seen == if stamp == 0 { 0 } else { stamp ^ *at as u64 }
        })
    }

    fn check(&self, unit: usize) {
        assert!(self.is_right(unit), "unit {unit}, stamp {:#x}", self.stamps[unit]);
    }

    fn advise(&self, first: usize, count: usize, advice: Advice) {
        let range = self.range(first, count).cast_const();
        self.region.advise(&[range], advice).expect("the store has room");
    }

    /// Advice to the kernel. What it refuses does not matter.
    fn advise_kernel(&self, first: usize, count: usize, advice: i32) {
        let range = self.range(first, count);
        // SAFETY: this thread's part of the mapping; none of the advice changes what it holds.
        unsafe { libc::madvise(range.cast(), range.len(), advice) };
    }

    fn discard(&mut self, first: usize, count: usize) {
        // SAFETY: this thread's own units; the shadow forgets them as well.
        unsafe { self.region.discard(self.range(first, count)) }.expect("of the mapping");
        self.stamps[first..first + count].fill(0);
    }

    /// Does something at random to a chunk, a few neighbours, or any unit.
    fn step(&mut self) {
        let (chunks, chunk_dice) = ((self.stamps.len() / UNITS) as u64, self.dice.roll());
        let start = (chunk_dice % chunks) as usize * UNITS;
        let (first, units) = (start + self.dice.below(UNITS as u64) as usize, self.stamps.len());
        let few = 1 + self.dice.below(64.min((units - first) as u64)) as usize;
        let most = (1 + self.dice.below(3) as usize) * UNITS;
        let row = most.min(units - start);
        match self.dice.below(64) {
            0..8 => (start..start + row).for_each(|unit| self.check(unit)),
            8..11 => (start..start + row).rev().for_each(|unit| self.check(unit)),
            11..19 => self.advise(start, row, Advice::WillNeed),
            19..21 => self.advise(first, few, Advice::WillNeed),
            21..24 => self.advise(first, few, Advice::Cold),
            24..26 => self.advise(start, row, Advice::Cold),
            26..30 => self.advise(first, few, Advice::PageOutNow),
            30..34 => self.advise(start, row, Advice::PageOutNow),
            34..36 => self.advise(start, row, Advice::PageOut),
            36..39 => self.discard(first, few),
            39..41 => self.thin_out(start),
            41..43 => (start..start + UNITS).for_each(|unit| self.write(unit)),
            43..45 => {
                self.discard(start, UNITS);
                (start..start + UNITS).for_each(|unit| self.write(unit));
            }
            45..48 => (first..first + few).for_each(|unit| self.write(unit)),
            48..52 => self.pin(first, few),
            52..54 => self.pinned.clear(),
            54..56 => self.protect(first, few),
            56..57 => self.advise_kernel(start, row, libc::MADV_HUGEPAGE),
            57..58 => self.advise_kernel(start, row, libc::MADV_NOHUGEPAGE),
            58..59 => self.advise_kernel(start, UNITS, 25), // MADV_COLLAPSE
            59..60 => self.advise_kernel(first, few, libc::MADV_COLD),
            60..61 => self.advise_kernel(first, few, libc::MADV_PAGEOUT),
            61..62 => self.advise_kernel(first, few, libc::MADV_POPULATE_WRITE),
            _ => (0..64).for_each(|_| self.touch_any()),
        }
    }

    fn touch_any(&mut self) {
        let unit = self.dice.below(self.stamps.len() as u64) as usize;
        if self.dice.below(4) == 0 { self.write(unit) } else { self.check(unit) }
    }

    /// Brings a chunk in whole and leaves a few units of it, which go next, but for some that are pinned.
    fn thin_out(&mut self, start: usize) {
        /// Looks for the last unit of the chunk: a touch before it is read would read a page of it alone.
        const LOOKS: u32 = 200;
        self.pinned.clear();
        // Units that read as zero would not be on the device.
        (start..start + UNITS).for_each(|unit| self.write(unit));
        self.advise(start, UNITS, Advice::PageOutNow);
        self.advise(start, UNITS, Advice::WillNeed);
        for _ in 0..LOOKS {
            if self.region.is_at_hand(self.word(start + UNITS - 1, 0).cast()) {
                break;
            }
            std::thread::sleep(Duration::from_micros(100)); // Nobody tells; without room it is not read at all.
        }
        let left = 8 + self.dice.below(120) as usize;
        self.discard(start + left, UNITS - left);
        let (first, count) = (self.dice.below(4) as usize, 1 + self.dice.below(3) as usize);
        self.pin(start + first, count);
        self.advise(start, left, Advice::Cold);
    }

    /// Pins units for a while; not many, of a small limit.
    fn pin(&mut self, first: usize, count: usize) {
        const PINNED_MAX: usize = 4;
        if self.pinned.len() >= PINNED_MAX {
            let oldest = self.dice.below(PINNED_MAX as u64) as usize;
            drop(self.pinned.swap_remove(oldest));
        }
        // Units that were pinned and are discarded have no pin any more, which their guard does not mind.
        if let Ok(guard) = self.region.pin(self.range(first, count).cast_const()) {
            self.pinned.push(guard);
        }
    }

    fn protect(&mut self, first: usize, count: usize) {
        let range = self.range(first, count);
        for access in [libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE] {
            // SAFETY: of the mapping; it is only read until it may be written again.
            let done = unsafe { libc::mprotect(range.cast(), range.len(), access) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            (first..first + count).for_each(|unit| self.check(unit));
        }
        self.write(first);
    }

    /// A child looks at these units, which nobody writes.
    fn look_in_child(&mut self) {
        /// For the child: until then it is to be done.
        const SECONDS: u32 = 500;
        let start = self.dice.below(self.stamps.len() as u64) as usize;
        // SAFETY: the child reads memory and ends, without a lock or an allocation.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child if it hangs.
            unsafe { libc::alarm(SECONDS) };
            let units = (start..self.stamps.len()).chain(0..start).take(2 * UNITS);
            let is_right = units.fold(true, |right, unit| right & self.is_right(unit));
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!is_right)) };
        }
        assert!(child > 0, "fork: {}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: waits for this thread's child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the child's status");
    }
}

/// Works on chunks under a limit, for a while, with threads of which one forks if `forks`.
fn work(config: RegionConfig, threads: usize, forks: bool, seed: u64, duration: Duration) {
    let (limit, handlers) = (config.limit, config.handlers);
    let chunks = 2 * limit.as_usize() / (UNITS * UNIT) / threads + 1;
    let part = chunks * UNITS * UNIT;
    let all = ByteCount((part * (threads + 1)) as u64);
    let Some(region) = region(config, mem_store(ByteCount(2 * all.0))) else { return };
    let base = region.map(all).expect("fits the device").addr().get();
    let end = Instant::now() + duration;
    // The last part is written once.
    let mut still = Part::new(&region, base + threads * part, chunks, Dice::new(!seed));
    (0..chunks * UNITS).for_each(|unit| still.write(unit));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let dice = Dice::new(seed.wrapping_add(thread as u64));
                let mut part = Part::new(&region, base + thread * part, chunks, dice);
                let is_over = &is_over;
                scope.spawn(move || {
                    (0..part.stamps.len()).for_each(|unit| part.write(unit));
                    while Instant::now() < end && !is_over.load(Ordering::Acquire) {
                        part.step();
                    }
                    part.pinned.clear();
                    (0..part.stamps.len()).for_each(|unit| part.check(unit));
                })
            })
            .collect();
        while Instant::now() < end && !workers.iter().any(|worker| worker.is_finished()) {
            match still.dice.below(8) {
                0 if forks => still.look_in_child(),
                1 => drop(region.set_limit(ByteCount(limit.0 / 2))), // Pins may keep it from being reached.
                2 | 3 => drop(region.set_limit(limit)),
                4 => drop(region.evict_all()),
                _ => {}
            }
            let unit = still.dice.below((chunks * UNITS) as u64) as usize;
            (unit..(unit + UNITS).min(chunks * UNITS)).for_each(|unit| still.check(unit));
        }
    });
    let stats = region.stats();
    println!("{limit}, {handlers} handlers, {threads} threads, forks: {forks}: {stats}");
    assert_eq!((stats.poisoned, stats.panics, stats.checksum_errors), (0, 0, 0), "{stats:?}");
    assert!(stats.resident_bytes_max <= limit, "{stats:?}");
}

fn work_all(name: &'static str, total: Duration) {
    // The limit in MiB, handlers, threads.
    let ways = [(16, 1, 2), (32, 2, 3), (64, 2, 4)];
    let _watch = watchdog(name, total * 2 + Duration::from_secs(120));
    let seed = seed(name);
    for (mib, handlers, threads) in ways {
        for forks in [false, true] {
            let config = RegionConfig::new()
                .limit(ByteCount::mib(mib))
                .span(ByteCount::gib(4))
                .handlers(handlers);
            work(config, threads, forks, seed, total / (2 * ways.len() as u32));
        }
    }
}

#[test]
fn eight_seconds_of_chunks_that_become_whole_lose_nothing() {
    // While a child lives the kernel does not move what it shares, whatever test has it.
    alone("eight_seconds_of_chunks_that_become_whole_lose_nothing", || {
        work_all("short work on whole chunks", Duration::from_secs(8));
    });
}

#[test]
#[ignore = "runs for FARHEAP_SOAK_SECONDS, default 600"]
fn minutes_of_chunks_that_become_whole_lose_nothing() {
    work_all("work on whole chunks", long());
}
