//! The work: which page, which word, read or write, and the checks of every answer.
//!
//! The random numbers and the orders are those that UMap's figures were measured with, so that
//! figures compare: thread t runs splitmix64 from seed 42 + t.

use crate::os::{KERNEL_PAGE, Words};
use crate::{Result, Sample};
use hdrhistogram::Histogram;
use std::time::{Duration, Instant};

/// The index part of a stored word; above it is a stamp that writes change.
const INDEX_MASK: u64 = (1 << 40) - 1;
/// Words of a page.
const PAGE_WORDS: u64 = KERNEL_PAGE as u64 / 8;
/// Operations between two looks at the clock.
const STRIDE: u64 = 32;

/// What is stored at a word's index by a write: the index, and a stamp that makes the page dirty.
pub(crate) fn stamped(index: usize, stamp: u64) -> u64 {
    index as u64 | stamp << 40
}

/// Fails when a word does not hold what was written there.
#[inline]
pub(crate) fn check(index: usize, value: u64) {
    assert!(value & INDEX_MASK == index as u64, "word {index} holds {value:#x}");
}

/// splitmix64.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn of_thread(thread: usize) -> Rng {
        Rng(42 + thread as u64)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Which pages are visited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Independent random pages; every eighth is a hit when an eighth of the data is cached.
    Random,
    /// A permutation: no page twice before all others.
    Perm,
}

/// One access.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) page: usize,
    pub(crate) word: usize,
    pub(crate) write: bool,
}

/// One thread's accesses; it goes on where it stopped.
#[derive(Clone, Debug)]
pub(crate) struct Ops {
    rng: Rng,
    order: Order,
    pages: u64,
    write_pct: u64,
    step: u64,
}

impl Ops {
    pub(crate) fn next(&mut self) -> Op {
        let x = self.rng.next();
        let page = match self.order {
            Order::Random => x % self.pages,
            Order::Perm => self.step.wrapping_mul(0x9E37_79B1).wrapping_add(12345) % self.pages,
        };
        self.step += 1;
        let write = (x >> 32) % 100 < self.write_pct;
        let word = page * PAGE_WORDS + (x >> 40) % PAGE_WORDS;
        Op { page: page as usize, word: word as usize, write }
    }
}

/// The accesses of all threads of one side of a comparison.
#[derive(Clone, Debug)]
pub(crate) struct Mix {
    threads: Vec<Ops>,
}

impl Mix {
    /// `bytes` of data, visited by `threads`.
    pub(crate) fn new(order: Order, bytes: usize, threads: usize) -> Mix {
        let pages = (bytes / KERNEL_PAGE) as u64;
        let ops = |thread: usize| Ops {
            rng: Rng::of_thread(thread),
            order,
            pages,
            write_pct: 0,
            // Threads start far apart in the one permutation.
            step: thread as u64 * pages / threads as u64,
        };
        Mix { threads: (0..threads).map(ops).collect() }
    }

    pub(crate) fn with_writes(mut self, percent: u64) -> Mix {
        self.threads.iter_mut().for_each(|ops| ops.write_pct = percent);
        self
    }

    /// All threads run `each` on their accesses for `time`; returns the sum of what they counted.
    pub(crate) fn run(
        &mut self,
        time: Duration,
        each: impl Fn(&mut Ops, Instant) -> Result<u64> + Sync,
    ) -> Result<Sample> {
        let clock = Sample::start();
        let until = Instant::now() + time;
        let counted: Result<u64> = if let [ops] = &mut self.threads[..] {
            each(ops, until)
        } else {
            std::thread::scope(|scope| {
                let run = |ops| scope.spawn(|| each(ops, until));
                let threads: Vec<_> = self.threads.iter_mut().map(run).collect();
                threads.into_iter().map(|thread| thread.join().expect("no check fails")).sum()
            })
        };
        Ok(clock.stop(counted?))
    }

    /// One thread hands its accesses to `each` for `time`.
    pub(crate) fn run_alone(
        &mut self,
        time: Duration,
        mut each: impl FnMut(Op) -> Result<()>,
    ) -> Result<Sample> {
        let clock = Sample::start();
        let until = Instant::now() + time;
        let mut count = 0;
        loop {
            each(self.threads[0].next())?;
            count += 1;
            if Instant::now() >= until {
                return Ok(clock.stop(count));
            }
        }
    }

    /// All threads access `words` for `time`.
    pub(crate) fn access(&mut self, words: Words, time: Duration) -> Result<Sample> {
        self.run(time, |ops, until| Ok(access(words, ops, until)))
    }
}

/// Accesses `words` until the time is up; returns how often.
fn access(words: Words, ops: &mut Ops, until: Instant) -> u64 {
    let mut count = 0;
    loop {
        for _ in 0..STRIDE {
            access_once(words, ops.next(), count);
            count += 1;
        }
        if Instant::now() >= until {
            return count;
        }
    }
}

#[inline]
fn access_once(words: Words, op: Op, stamp: u64) {
    if op.write {
        words.write(op.word, stamped(op.word, stamp & 0xFF_FFFF));
    } else {
        check(op.word, words.read(op.word));
    }
}

/// An empty histogram of nanoseconds.
pub(crate) fn new_latencies() -> Histogram<u64> {
    const SECONDS_MAX: u64 = 10;
    let most_ns = SECONDS_MAX * 1_000_000_000;
    Histogram::new_with_bounds(100, most_ns, 3).expect("the bounds are in order")
}

/// As [`Mix::access`] with one thread, with the time of every access.
pub(crate) fn access_timed(
    words: Words,
    mix: &mut Mix,
    time: Duration,
    latencies_ns: &mut Histogram<u64>,
) -> Sample {
    let clock = Sample::start();
    let until = Instant::now() + time;
    let ops = &mut mix.threads[0];
    let mut count = 0;
    let mut before = Instant::now();
    loop {
        access_once(words, ops.next(), count);
        let after = Instant::now();
        latencies_ns.saturating_record((after - before).as_nanos() as u64);
        before = after;
        count += 1;
        if before >= until {
            return clock.stop(count);
        }
    }
}

/// How much of each page a scan looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Look {
    /// One word of every 4 KiB.
    Touch,
    /// All words, summed.
    Sum,
}

/// Looks at consecutive words whose first has this index; panics when they are wrong.
pub(crate) fn look(words: Words, first: usize, how: Look) {
    match how {
        Look::Touch => {
            let step = crate::os::KERNEL_PAGE / 8;
            (0..words.len()).step_by(step).for_each(|at| check(first + at, words.read(at)));
        }
        Look::Sum => {
            let sum = (0..words.len()).fold(0u64, |sum, at| sum.wrapping_add(words.read(at)));
            let (count, first) = (words.len() as u64, first as u64);
            let right = count.wrapping_mul(first).wrapping_add(count * (count - 1) / 2);
            assert_eq!(sum, right, "sum of {count} words from {first}");
        }
    }
}

/// A scan of data in units, round and round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scan {
    unit: usize,
    units: usize,
    at: usize,
}

impl Scan {
    pub(crate) fn new(bytes: usize, unit: usize) -> Scan {
        Scan { unit, units: bytes / unit, at: 0 }
    }

    /// Index of the next unit.
    pub(crate) fn next(&mut self) -> usize {
        let unit = self.at;
        self.at = (self.at + 1) % self.units;
        unit
    }

    /// Hands units to `each` as offset in words, until the time is up; counts bytes.
    pub(crate) fn run(
        &mut self,
        time: Duration,
        mut each: impl FnMut(usize) -> Result<()>,
    ) -> Result<Sample> {
        let clock = Sample::start();
        let until = Instant::now() + time;
        let mut bytes = 0;
        loop {
            each(self.next() * self.unit / 8)?;
            bytes += self.unit as u64;
            if Instant::now() >= until {
                return Ok(clock.stop(bytes));
            }
        }
    }
}
