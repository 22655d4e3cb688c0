//! Times of a server's reads, counted by their size: quantiles without locks or allocations.
//!
//! Each power of two has four sizes, so that a quantile is at most a quarter too large. Counts are halved now and then:
//! what a server did long ago does not tell how long to wait for it now. Two threads that count at once may lose one of
//! the two, here and there: a quantile all the same.

use crate::sync::{AtomicU64, Ordering};
use std::time::Duration;

/// Times below this power of two nanoseconds are one size, a microsecond.
const SHIFT_MIN: u32 = 10;
/// Sizes of a power of two.
const PARTS: u64 = 4;
/// The last one has all times from 69 s on.
const SIZES: usize = (PARTS * (36 - SHIFT_MIN as u64)) as usize;
/// Times after which counts are halved.
const HALVED_EVERY: u64 = 4096;
/// Times after which the time to wait for is computed anew.
const COMPUTED_EVERY: u64 = 32;

/// See [module](self).
#[derive(Debug)]
pub(crate) struct ReadTimes {
    counts: [AtomicU64; SIZES],
    noted: AtomicU64,
    /// The 95th percentile, in nanoseconds.
    p95_ns: AtomicU64,
}

impl Default for ReadTimes {
    fn default() -> ReadTimes {
        let zero = || AtomicU64::new(0);
        ReadTimes { counts: std::array::from_fn(|_| zero()), noted: zero(), p95_ns: zero() }
    }
}

fn size_of(ns: u64) -> usize {
    let ns = ns.max(1 << SHIFT_MIN);
    let shift = ns.ilog2();
    let part = (ns >> (shift - PARTS.ilog2())) % PARTS;
    ((u64::from(shift - SHIFT_MIN) * PARTS + part) as usize).min(SIZES - 1)
}

/// Least time that is larger than all of a size.
fn end_of(size: usize) -> u64 {
    let (shift, part) = (size as u64 / PARTS + u64::from(SHIFT_MIN), size as u64 % PARTS);
    (PARTS + part + 1) << (shift - u64::from(PARTS.ilog2()))
}

impl ReadTimes {
    pub(crate) fn note(&self, took: Duration) {
        let size = size_of(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.counts[size].fetch_add(1, Ordering::Relaxed);
        let noted = self.noted.fetch_add(1, Ordering::Relaxed) + 1;
        if noted.is_multiple_of(HALVED_EVERY) {
            for count in &self.counts {
                count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
            }
        }
        if noted.is_multiple_of(COMPUTED_EVERY) || noted < COMPUTED_EVERY {
            self.p95_ns.store(self.quantile(95).as_nanos() as u64, Ordering::Relaxed);
        }
    }

    /// The time within which this part of a hundred ends; zero: none was noted.
    pub(crate) fn quantile(&self, percent: u64) -> Duration {
        let counts = self.counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        let wanted = (counts.iter().sum::<u64>() * percent).div_ceil(100);
        let mut sum = 0;
        let size = counts.iter().position(|count| {
            sum += count;
            sum >= wanted && wanted > 0
        });
        Duration::from_nanos(size.map_or(0, end_of))
    }

    /// The 95th percentile as it was computed last.
    pub(crate) fn p95(&self) -> Duration {
        Duration::from_nanos(self.p95_ns.load(Ordering::Relaxed))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    #[test]
    fn a_size_ends_where_the_next_begins() {
        for size in 0..SIZES - 1 {
            assert_eq!((size_of(end_of(size) - 1), size_of(end_of(size))), (size, size + 1));
        }
        assert_eq!((size_of(0), size_of(u64::MAX)), (0, SIZES - 1));
    }

    #[test]
    fn quantiles_are_at_most_a_quarter_too_large() {
        let times = ReadTimes::default();
        assert_eq!((times.quantile(50), times.p95()), (Duration::ZERO, Duration::ZERO));
        (1..=1000).for_each(|n| times.note(US * n));
        for (percent, us) in [(50, 500), (95, 950), (99, 990)] {
            let found = times.quantile(percent);
            assert!((US * us..=US * us * 5 / 4).contains(&found), "{percent} %: {found:?}");
        }
        assert!((US * 900..US * 1300).contains(&times.p95()), "{:?}", times.p95());
    }

    #[test]
    fn one_slow_read_of_thirty_is_beyond_the_time_to_wait_and_one_of_ten_is_not() {
        for (one_of, is_beyond) in [(30, true), (10, false)] {
            let times = ReadTimes::default();
            let took = |n: u32| if n.is_multiple_of(one_of) { US * 20_000 } else { US * 100 };
            (1..=960).for_each(|n| times.note(took(n)));
            assert_eq!(times.p95() < US * 20_000, is_beyond, "one of {one_of}");
        }
    }

    #[test]
    fn what_was_long_ago_counts_no_more() {
        let times = ReadTimes::default();
        (0..HALVED_EVERY).for_each(|_| times.note(US * 50_000));
        (0..4 * HALVED_EVERY).for_each(|_| times.note(US * 100));
        assert!(times.quantile(95) < US * 200, "{:?}", times.quantile(95));
        assert!(times.p95() < US * 200);
    }
}
