//! How long things take: histograms that any thread adds to without a lock.
//!
//! A [`Recorder`] counts durations in buckets of about 3 % width with one relaxed addition each,
//! and allocates nothing. [`Latency`] is a snapshot of some recorders together.

use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::meta::LazyArray;
use std::fmt;
use std::time::Duration;

/// Buckets of each power of two: 2^5.
const SUB_BITS: u32 = 5;
/// Durations from here on, 36 minutes, count as this long.
const NS_MAX: u64 = (1 << 41) - 1;
const BUCKETS: usize = bucket(NS_MAX) + 1;

/// The shares of events that [`Latency`] has a duration for, per mille.
const SHARES: [u64; 4] = [500, 900, 990, 999];

/// The bucket of a duration: exact up to 63 ns, then the leading six bits.
const fn bucket(ns: u64) -> usize {
    let bits = 64 - (ns | 1).leading_zeros();
    let shift = bits.saturating_sub(SUB_BITS + 1);
    (((shift as u64) << SUB_BITS) + (ns >> shift)) as usize
}

/// The middle of a bucket.
const fn middle(bucket: usize) -> u64 {
    let shift = (bucket >> SUB_BITS).saturating_sub(1);
    let first = (bucket - (shift << SUB_BITS)) << shift;
    (first + (1 << shift >> 1)) as u64
}

/// One thread's durations of one kind; others may add to it too.
#[derive(Debug)]
pub(crate) struct Recorder {
    buckets: LazyArray<AtomicU64>,
    max: AtomicU64,
}

impl Recorder {
    /// Bytes of one that has seen all durations.
    pub(crate) const BYTES: usize = BUCKETS * size_of::<AtomicU64>();

    /// # Errors
    /// When there is no address space for the buckets.
    pub(crate) fn new() -> Result<Recorder> {
        Ok(Recorder { buckets: LazyArray::new(BUCKETS)?, max: AtomicU64::new(0) })
    }

    pub(crate) fn add(&self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Adds the same duration `count` times.
    pub(crate) fn add_many(&self, duration: Duration, count: u64) {
        let ns = u64::try_from(duration.as_nanos()).map_or(NS_MAX, |ns| ns.min(NS_MAX));
        // Relaxed: statistics order nothing.
        self.buckets[bucket(ns)].fetch_add(count, Ordering::Relaxed);
        if ns > self.max.load(Ordering::Relaxed) {
            self.max.fetch_max(ns, Ordering::Relaxed);
        }
    }
}

/// Durations of one kind of event since the region's start, in nanoseconds, to about 2 %.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Latency {
    /// Events.
    pub count: u64,
    /// Half of the events took at most this long.
    pub p50: u64,
    /// 90 % of the events took at most this long.
    pub p90: u64,
    /// 99 % of the events took at most this long.
    pub p99: u64,
    /// 99.9 % of the events took at most this long.
    pub p99_9: u64,
    /// The longest, exactly.
    pub max: u64,
}

impl Latency {
    /// Allocates nothing: the heap's maintenance thread asks once a second.
    pub(in crate::paging) fn of<'a, I>(recorders: I) -> Latency
    where
        I: IntoIterator<Item = &'a Recorder> + Clone,
    {
        let all = || recorders.clone().into_iter();
        let in_bucket = |at: usize| -> u64 {
            all().map(|recorder| recorder.buckets[at].load(Ordering::Relaxed)).sum()
        };
        let max =
            all().map(|recorder| recorder.max.load(Ordering::Relaxed)).max().unwrap_or_default();
        let count: u64 = (0..BUCKETS).map(in_bucket).sum();
        // Of each share, in ascending order, the bucket in which it is reached.
        let mut found = [0; SHARES.len()];
        let (mut seen, mut next) = (0, 0);
        for at in 0..BUCKETS {
            seen += in_bucket(at);
            while next < SHARES.len() && seen > 0 && seen * 1000 >= count * SHARES[next] {
                found[next] = middle(at).min(max);
                next += 1;
            }
        }
        let [p50, p90, p99, p99_9] = found;
        Latency { count, p50, p90, p99, p99_9, max }
    }
}

/// Times of a region's steps; see [`Region::latencies`](crate::paging::region::Region::latencies).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Latencies {
    /// From reading a fault's event to its answer: the page is mapped and the thread woken. What
    /// the kernel takes before (queueing the event, waking the handler) and after (running the
    /// thread) is not in it. A fault on a page that is being read already is answered by that
    /// read and not counted again.
    pub fault: Latency,
    /// From handing a read to the device's queue to seeing it finished; one of several pages
    /// counts once.
    pub read: Latency,
    /// The same for writes; with encryption it includes the wait for a buffer to encrypt in.
    pub write: Latency,
    /// From choosing a page to having its frame free: unmapping, cooling, hashing and, for dirty
    /// pages, writing. Pages that were touched or freed meanwhile are not counted.
    pub evict: Latency,
}

impl fmt::Display for Latencies {
    /// A table in microseconds.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "latency, us           count       p50       p90       p99     p99.9       max"
        )?;
        for (name, of) in [
            ("fault", &self.fault),
            ("device read", &self.read),
            ("device write", &self.write),
            ("eviction", &self.evict),
        ] {
            write!(f, "  {name:<14}{:>11}", of.count)?;
            for ns in [of.p50, of.p90, of.p99, of.p99_9, of.max] {
                write!(f, "{:>10.1}", ns as f64 / 1e3)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_has_a_bucket_whose_middle_is_near() {
        for ns in
            (0..70).chain((6..41).flat_map(|n| [1 << n, (1 << n) + 1, (3 << n) / 2, (2 << n) - 1]))
        {
            let middle = middle(bucket(ns));
            assert!(middle.abs_diff(ns) * 32 <= ns, "{ns} lies in the bucket around {middle}");
        }
        assert_eq!(bucket(NS_MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_of_all_recorders_together() {
        let (one, other) = (Recorder::new().expect("memory"), Recorder::new().expect("memory"));
        one.add_many(Duration::from_micros(10), 980);
        other.add_many(Duration::from_micros(1_000), 19);
        other.add(Duration::from_secs(3_600));
        let latency = Latency::of([&one, &other]);
        assert_eq!(latency.count, 1_000);
        assert!(latency.p50.abs_diff(10_000) < 300 && latency.p90.abs_diff(10_000) < 300);
        assert!(latency.p99.abs_diff(1_000_000) < 30_000, "{latency:?}");
        assert_eq!(latency.max, NS_MAX);
        assert_eq!(Latency::of([]), Latency::default());
    }
}
