//! Everything at once, for a while: threads that fault, discard, evict, prefetch and pin, a limit
//! that goes up and down, mappings that come and go, and a device that fails and heals, against a
//! shadow copy.
//!
//! A few seconds of it run always. `FARHEAP_SOAK_SECONDS=600 cargo test --test region -- soak --ignored`
//! runs it for longer; `FARHEAP_TEST_SEED` repeats a run's decisions.
//!
//! Guards: G1, G5.
#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

use crate::common::faulty::{FaultControl, FaultyStore};
use crate::common::{Dice, bytes, mem_store, region, seed, watchdog};
use farheap::ByteCount;
use farheap::region::{Advice, Install, Region, RegionConfig};
use farheap::store::Op;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

const UNIT: usize = 4096;
const THREADS: usize = 3;

/// One thread's part of the region: a stamp per 4 KiB, 0 for "reads as zero".
struct Shadow<'a> {
    region: &'a Region,
    base: usize,
    stamps: Vec<u64>,
    dice: Dice,
}

impl Shadow<'_> {
    fn word(&self, unit: usize, at: usize) -> *mut u64 {
        assert!(unit < self.stamps.len() && at < UNIT / 8);
        (self.base + unit * UNIT + at * 8) as *mut u64
    }

    fn write(&mut self, unit: usize) {
        let stamp = self.dice.roll() | 1;
        for at in 0..UNIT / 8 {
            // SAFETY: in this thread's part of the mapping.
            unsafe { self.word(unit, at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[unit] = stamp;
    }

    fn check(&self, unit: usize) {
        let stamp = self.stamps[unit];
        for at in [0, 1, 63, 256, 511] {
            // SAFETY: in this thread's part of the mapping.
            let seen = unsafe { self.word(unit, at).read_volatile() };
            let want = if stamp == 0 { 0 } else { stamp ^ at as u64 };
            assert_eq!(seen, want, "unit {unit} word {at}");
        }
    }

    fn step(&mut self) {
        let units = self.stamps.len();
        let first = self.dice.below(units as u64) as usize;
        let count = 1 + self.dice.below((units - first).min(96) as u64) as usize;
        let ptr = self.word(first, 0).cast::<u8>().cast_const();
        let len = ByteCount((count * UNIT) as u64);
        match self.dice.below(100) {
            0..35 => self.write(first),
            35..75 => self.check(first),
            75..80 => {
                // SAFETY: this thread's own units; the shadow forgets them as well.
                unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }
                    .expect("inside the region");
                self.stamps[first..first + count].fill(0);
            }
            // An error while the device fails: the pages stay.
            80..84 => drop(self.region.advise(&[bytes(ptr, len)], Advice::PageOutNow)),
            84..90 => {
                self.region.advise(&[bytes(ptr, len)], Advice::WillNeed).expect("inside the region")
            }
            90..92 => {
                if let Ok(_pinned) = self.region.pin(bytes(ptr, len)) {
                    self.write(first);
                    self.check(first + count - 1);
                }
            }
            92..94 => self.map_and_unmap(),
            _ => (first..first + count).for_each(|unit| self.check(unit)),
        }
    }

    /// A mapping that lives shortly. There may be no room for it.
    fn map_and_unmap(&mut self) {
        let units = 1 + self.dice.below(64) as usize;
        let len = ByteCount((units * UNIT) as u64);
        let Ok(range) = self.region.map(len) else { return };
        let mut brief = Shadow {
            region: self.region,
            base: range.addr().get(),
            stamps: vec![0; units],
            dice: self.dice.clone(),
        };
        (0..units).for_each(|unit| brief.check(unit));
        (0..units).for_each(|unit| brief.write(unit));
        drop(self.region.advise(&[range.as_ptr().cast_const()], Advice::PageOutNow));
        (0..units).for_each(|unit| brief.check(unit));
        // SAFETY: mapped by this case, which is done with it.
        unsafe { self.region.unmap(range) }.expect("just mapped");
    }
}

/// Breaks the device in a way that passes, and heals it.
fn trouble(control: &FaultControl, dice: &mut Dice) {
    match dice.below(8) {
        // A page is read three times before it is lost.
        0 => control.fail_next(Op::Read, 2, libc::EIO),
        1 => control.shorten_reads(2),
        // SAFETY: the regions verify what they read.
        2 => unsafe { control.corrupt_reads(2) },
        3 => control.fail_fraction(Op::Write, 300_000, libc::EIO),
        4 => control.fail_fraction(Op::Write, 1_000_000, libc::ENOSPC),
        5 => control.delay(Duration::from_millis(1 + dice.below(20))),
        6 => control.pause(),
        _ => {}
    }
    std::thread::sleep(Duration::from_millis(20 + dice.below(200)));
    control.heal();
    // A fault without room is given up after two seconds: an outage is shorter than that.
    std::thread::sleep(Duration::from_millis(dice.below(300)));
}

/// Returns how many requests failed on purpose; `None`: skipped.
fn soak(config: RegionConfig, seed: u64, duration: Duration) -> Option<u64> {
    let limit = config.limit;
    println!("{:?}, {} handlers", config.install, config.handlers);
    let part = ByteCount((limit.0 * 2 / THREADS as u64).next_multiple_of(UNIT as u64));
    let all = ByteCount(part.0 * THREADS as u64);
    let faulty = FaultyStore::new(mem_store(ByteCount(all.0 * 2)), seed);
    let control = faulty.control();
    let region = region(config, Arc::new(faulty))?;
    let base = region.map(all).expect("the span has room").cast::<u8>();
    let (base_addr, end) = (base.as_ptr() as usize, Instant::now() + duration);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let region = &region;
            scope.spawn(move || {
                let mut shadow = Shadow {
                    region,
                    base: base_addr + thread * part.as_usize(),
                    stamps: vec![0; part.as_usize() / UNIT],
                    dice: Dice::new(seed + thread as u64),
                };
                while Instant::now() < end {
                    shadow.step();
                }
                (0..shadow.stamps.len()).for_each(|unit| shadow.check(unit));
            });
        }
        let mut dice = Dice::new(!seed);
        while Instant::now() < end {
            trouble(&control, &mut dice);
            let larger = ByteCount(limit.0 + dice.below(2) * limit.0 / 2);
            // Pins may keep it from being reached at once.
            drop(region.set_limit(larger));
        }
    });
    region.set_limit(limit).expect("nothing is pinned any more");
    let stats = region.stats();
    println!("{stats:?}");
    assert!(stats.pages_in > 0 && stats.pages_out > 0);
    assert_eq!((stats.poisoned, stats.panics), (0, 0));
    assert!(stats.resident_bytes.0 <= limit.0);
    assert!(stats.resident_bytes_max.0 <= limit.0 * 3 / 2);
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(base, all.as_usize())) }
        .expect("mapped above");
    let started = Instant::now();
    while region.stats().stored_bytes.0 > 0 {
        assert!(started.elapsed() < crate::common::PATIENCE, "slots outlive their pages");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(region.stats().committed_bytes.0, 0);
    Some(control.injected())
}

fn soak_all(name: &'static str, total: Duration) {
    let ways = [(Install::Auto, 1), (Install::Auto, 2), (Install::Copy, 2)];
    let _watchdog = watchdog(name, total * 2 + Duration::from_secs(120));
    let seed = seed(name);
    let mut injected = 0;
    for (install, handlers) in ways {
        let config = RegionConfig::new()
            .limit(RegionConfig::LIMIT_MIN)
            .span(ByteCount::gib(4))
            .install(install)
            .handlers(handlers);
        injected += soak(config, seed, total / ways.len() as u32).unwrap_or(1);
    }
    assert!(injected > 0, "nothing ever failed");
}

/// How long the long runs are.
pub(crate) fn long() -> Duration {
    let seconds = std::env::var("FARHEAP_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(600))
}

#[test]
fn five_seconds_of_everything_lose_nothing() {
    soak_all("short soak", Duration::from_secs(5));
}

#[test]
#[ignore = "runs for FARHEAP_SOAK_SECONDS, default 600"]
fn minutes_of_everything_lose_nothing() {
    soak_all("soak", long());
}
