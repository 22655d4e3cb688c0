//! Random writes, reads, discards, evictions, prefetches and pins of a region that is much larger
//! than its limit, against a shadow copy; also while children read it.
//!
//! Guards: G5.

#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

use crate::common::child::alone;
use crate::common::{
    Dice, StopOnDrop, amount, bytes, eventually, mem_store, region, seed, watchdog,
};
use farheap::ByteCount;
use farheap::region::{Advice, FaultMode, Install, Region, RegionConfig, Stats};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const UNIT: usize = 4096;

/// One thread's part of the region: a stamp per 4 KiB unit, 0 for "reads as zero".
struct Shadow<'a> {
    region: &'a Region,
    base: *mut u8,
    stamps: Vec<u64>,
    dice: Dice,
}

impl Shadow<'_> {
    fn start(&self, unit: usize) -> *mut u8 {
        assert!(unit < self.stamps.len());
        // SAFETY: the unit lies in this thread's part of the mapping.
        unsafe { self.base.add(unit * UNIT) }
    }

    fn word(&self, unit: usize, at: usize) -> *mut u64 {
        assert!(at < UNIT / 8);
        // SAFETY: in the unit, checked above.
        unsafe { self.start(unit).cast::<u64>().add(at) }
    }

    fn write(&mut self, unit: usize) {
        let stamp = self.dice.roll() | 1;
        for at in 0..UNIT / 8 {
            // SAFETY: in the unit; this thread alone uses it.
            unsafe { self.word(unit, at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[unit] = stamp;
    }

    fn check(&self, unit: usize) {
        for at in [0, 1, 17, 255, 256, 511] {
            let (seen, want) = self.seen_and_wanted(unit, at);
            assert_eq!(seen, want, "unit {unit} word {at}");
        }
    }

    fn seen_and_wanted(&self, unit: usize, at: usize) -> (u64, u64) {
        // SAFETY: in the unit; this thread alone uses it.
        let seen = unsafe { self.word(unit, at).read_volatile() };
        let stamp = self.stamps[unit];
        (seen, if stamp == 0 { 0 } else { stamp ^ at as u64 })
    }

    /// A child has this thread's part as it was when it was forked.
    fn fork(&self) {
        #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
        // SAFETY: the child reads its memory, and ends.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let is_right = |unit| {
                let (seen, wanted) = self.seen_and_wanted(unit, 17);
                seen == wanted
            };
            let right = (0..self.stamps.len()).all(is_right);
            // SAFETY: ends the child at once.
            unsafe { libc::_exit(if right { 7 } else { 1 }) };
        }
        assert!(pid > 0, "{}", std::io::Error::last_os_error());
        let mut status = 0;
        // SAFETY: waits for the child.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
    }

    fn range(&mut self) -> (usize, usize) {
        let first = self.dice.below(self.stamps.len() as u64) as usize;
        let count = 1 + self.dice.below((self.stamps.len() - first).min(64) as u64) as usize;
        (first, count)
    }

    /// Writes all units in order, and looks at earlier ones meanwhile.
    fn write_all(&mut self) {
        for unit in 0..self.stamps.len() {
            self.write(unit);
            if self.dice.below(64) == 0 {
                let earlier = self.dice.below(unit as u64 + 1) as usize;
                self.check(earlier);
            }
            // Half of these are on their way out, or not written yet.
            if self.dice.below(4096) == 0 {
                let (first, count) = self.range();
                let (ptr, len) = (self.start(first), ByteCount((count * UNIT) as u64));
                if self.dice.below(2) == 0 {
                    self.region
                        .advise(&[bytes(ptr, len)], Advice::PageOutNow)
                        .expect("the store has room");
                } else {
                    self.region
                        .advise(&[bytes(ptr, len)], Advice::WillNeed)
                        .expect("inside the region");
                }
            }
        }
    }

    fn step(&mut self) {
        let (first, count) = self.range();
        let (ptr, len) = (self.start(first), ByteCount((count * UNIT) as u64));
        match self.dice.below(100) {
            0..40 => self.write(first),
            40..85 => self.check(first),
            85..90 => {
                // SAFETY: this thread's own units; the shadow forgets them as well.
                unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }
                    .expect("inside the region");
                self.stamps[first..first + count].fill(0);
            }
            90..94 => self
                .region
                .advise(&[bytes(ptr, len)], Advice::PageOutNow)
                .expect("the store has room"),
            94..97 => {
                self.region.advise(&[bytes(ptr, len)], Advice::WillNeed).expect("inside the region")
            }
            97..98 => {
                if let Ok(_pinned) = self.region.pin(bytes(ptr, len)) {
                    self.check(first);
                    self.write(first);
                }
            }
            _ => (first..first + count).for_each(|unit| self.check(unit)),
        }
    }
}

fn hammer(name: &'static str, config: RegionConfig, threads: usize, steps: usize) {
    let work = |shadow: &mut Shadow<'_>| (0..amount(steps)).for_each(|_| shadow.step());
    hammer_after(name, config, threads, work);
}

/// Each thread does its work on its own part, and checks all of that; returns the statistics.
fn hammer_after(
    name: &'static str,
    config: RegionConfig,
    threads: usize,
    work: impl Fn(&mut Shadow<'_>) + Sync,
) -> Option<Stats> {
    let _watchdog = watchdog(name, Duration::from_secs(240));
    let seed = seed(name);
    let limit = config.limit;
    let part = ByteCount((limit.0 * 4 / threads as u64).next_multiple_of(UNIT as u64));
    let bytes = ByteCount(part.0 * threads as u64 * 2);
    let region = region(config, mem_store(bytes))?;
    let base =
        region.map(ByteCount(part.0 * threads as u64)).expect("the span has room").cast::<u8>();
    let base_addr = base.as_ptr() as usize;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (region, work) = (&region, &work);
            scope.spawn(move || {
                let mut shadow = Shadow {
                    region,
                    base: (base_addr + thread * part.as_usize()) as *mut u8,
                    stamps: vec![0; part.as_usize() / UNIT],
                    dice: Dice::new(seed + thread as u64),
                };
                work(&mut shadow);
                (0..shadow.stamps.len()).for_each(|unit| shadow.check(unit));
            });
        }
    });
    let stats = region.stats();
    println!("{name}: {stats:?}");
    assert!(stats.resident_bytes_max.0 <= limit.0, "{} above {limit}", stats.resident_bytes_max.0);
    assert!(stats.pages_out > 0 && stats.pages_in > 0, "the limit had no effect");
    assert_eq!((stats.poisoned, stats.panics), (0, 0));
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(base, part.as_usize() * threads)) }
        .expect("mapped above");
    // Slots of pages that were being read or written are freed when the device has answered.
    let left = || (region.stats().committed_bytes.0, region.stats().stored_bytes.0);
    assert!(eventually(|| left() == (0, 0)), "slots outlive their pages: {:?}", left());
    Some(stats)
}

fn config(install: Install) -> RegionConfig {
    RegionConfig::new().limit(RegionConfig::LIMIT_MIN).install(install).span(ByteCount::gib(4))
}

#[test]
fn pages_keep_their_content() {
    hammer("auto", config(Install::Auto), 1, 20_000);
}

#[test]
fn pages_keep_their_content_under_four_threads_and_two_handlers() {
    hammer("auto, 4 threads", config(Install::Auto).handlers(2), 4, 8_000);
}

#[test]
fn pages_keep_their_content_under_a_limit_of_chunks() {
    hammer("chunks", config(Install::Auto).limit(ByteCount::mib(64)), 2, 8_000);
}

#[test]
fn content_is_kept_without_move() {
    hammer("copy", config(Install::Copy), 2, 8_000);
}

#[test]
fn content_is_kept_when_threads_serve_their_own_faults() {
    hammer("in-thread", config(Install::Auto).mode(FaultMode::InThread), 4, 6_000);
}

/// Fresh memory is the kernel's to fill until it leaves, huge pages whole.
#[test]
fn fresh_memory_keeps_its_content_on_its_way_out() {
    for (name, mode, threads) in [
        ("fresh", FaultMode::Auto, 1),
        ("fresh, two threads", FaultMode::Auto, 2),
        ("fresh, in-thread", FaultMode::InThread, 2),
        ("fresh, encrypted", FaultMode::Auto, 1),
    ] {
        let config = config(Install::Auto);
        let encrypt = name.contains("encrypted");
        let config = config.limit(ByteCount::mib(64)).mode(mode).encrypt(encrypt);
        let stats = hammer_after(name, config, threads, |shadow| {
            shadow.write_all();
            (0..300).for_each(|_| shadow.step());
        });
        let Some(stats) = stats else { return };
        assert!(stats.chunks_opened == 0 || stats.chunks_evicted > 0, "{stats:?}");
    }
}

/// While the kernel compacts memory, it moves pages from frame to frame: then a call that moves
/// several finds one that is not ready, and reports less than it has moved (`sys::uffd`).
#[test]
fn content_is_kept_while_the_kernel_compacts_memory() {
    const COMPACT: &str = "/proc/sys/vm/compact_memory";
    if let Err(error) = std::fs::write(COMPACT, "1") {
        return println!("skipped: {COMPACT}: {error}");
    }
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = StopOnDrop(&done);
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                std::fs::write(COMPACT, "1").expect("as before");
            }
        });
        hammer("compacted", config(Install::Auto), 2, 2_000);
        hammer("chunks compacted", config(Install::Auto).limit(ByteCount::mib(64)), 2, 2_000);
        drop(others);
    });
}

#[test]
fn content_is_kept_encrypted() {
    hammer("encrypted", config(Install::Auto).encrypt(true).handlers(2), 2, 8_000);
}

#[test]
fn content_is_kept_while_children_read_it() {
    // While a child lives the kernel does not move what it shares, whatever test has it.
    alone("content_is_kept_while_children_read_it", || {
        hammer_after("forked", config(Install::Auto), 3, |shadow| {
            for _ in 0..amount(600) {
                match shadow.dice.below(100) {
                    0 => shadow.fork(),
                    _ => shadow.step(),
                }
            }
            shadow.fork();
        });
    });
}

/// A page discarded while another thread's fault opens the chunk that it lies in: the discard, which
/// began when the chunk was closed, comes to the page when it is the chunk's.
#[test]
fn a_page_discarded_while_its_chunk_is_opened_reads_as_zero() {
    let rounds = amount(20_000);
    const UNITS: usize = (2 << 20) / UNIT;
    let _watch = watchdog("discard beside opening", Duration::from_secs(240));
    let config = RegionConfig::new().limit(ByteCount::mib(64));
    let Some(region) = region(config, mem_store(ByteCount::mib(64))) else { return };
    let len = ByteCount((UNITS * UNIT) as u64);
    let base = region.map(len).expect("the span has room").cast::<u8>();
    let start = base.as_ptr() as usize;
    let word = |unit: usize| (start + unit * UNIT) as *mut u64;
    let mut dice = Dice::new(seed("discard beside opening"));
    let gate = std::sync::Barrier::new(2);
    let mut kept = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..rounds {
                gate.wait();
                // Beside a page in use: that opens the chunk.
                // SAFETY: in the mapping, as all others here.
                unsafe { word(UNITS - 1).write_volatile(1) };
                gate.wait();
            }
        });
        for round in 0..rounds as u64 {
            // SAFETY: as above.
            unsafe { word(UNITS - 2).write_volatile(round | 1 << 63) };
            gate.wait();
            (0..dice.below(4_000)).for_each(|_| std::hint::spin_loop());
            let others = ByteCount(len.0 - UNIT as u64);
            // SAFETY: nobody else uses the range.
            unsafe { region.discard(bytes(base.as_ptr(), others).cast_mut()) }
                .expect("in the mapping");
            // SAFETY: as above.
            let seen = unsafe { word(UNITS - 2).read_volatile() };
            kept += u64::from(seen != 0);
            gate.wait();
            // SAFETY: nobody uses the mapping at the moment.
            unsafe { region.discard(bytes(base.as_ptr(), len).cast_mut()) }.expect("the mapping");
        }
    });
    println!("{} chunks opened", region.stats().chunks_opened);
    assert_eq!(kept, 0, "of {rounds} discards left the content");
}

/// Fresh memory that takes the huge pages of chunks that have left: it reads as zero, and what left
/// comes back.
#[test]
fn fresh_memory_in_the_huge_pages_of_chunks_that_left_reads_as_zero() {
    let _watch = watchdog("fresh memory reads as zero", Duration::from_secs(240));
    let config = RegionConfig::new().limit(ByteCount::mib(64));
    let Some(region) = region(config, mem_store(ByteCount::mib(256))) else { return };
    let len = ByteCount::mib(192);
    let first = region.map(len).expect("fits the device").cast::<u64>();
    let words = len.as_usize() / 8;
    let page = |at: usize| {
        assert!(at + 512 <= words);
        let start = first.as_ptr().wrapping_add(at);
        // SAFETY: 512 words of the range, which nobody else uses while the slice lives.
        unsafe { std::slice::from_raw_parts_mut(start, 512) }
    };
    for at in (0..words).step_by(512) {
        let page = page(at);
        assert!(page.iter().all(|word| *word == 0), "word {at}");
        page.fill(at as u64 | 1 << 63);
    }
    for at in (0..words).step_by(512) {
        assert!(page(at).iter().all(|word| *word == at as u64 | 1 << 63), "word {at}");
    }
    let stats = region.stats();
    println!("{} of {} chunks reused", stats.chunks_reused, stats.chunks_opened);
    // Where chunks leave whole at all.
    assert!(stats.chunks_evicted < 16 || stats.chunks_reused > 0, "{stats:?}");
    assert!(stats.resident_bytes_max.0 <= stats.limit_bytes.0, "{stats:?}");
}
