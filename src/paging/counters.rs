//! Event counts of one region, kept where the event happens.

use crate::base::sync::{AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// A monotone event count.
#[derive(Debug, Default)]
pub(crate) struct Counter(CachePadded<AtomicU64>);

impl Counter {
    pub(crate) fn bump(&self) {
        self.add(1);
    }

    pub(crate) fn add(&self, n: u64) {
        // Relaxed: statistics order nothing.
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many of something there are now, and the most there ever were.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    now: CachePadded<AtomicU64>,
    max: AtomicU64,
}

impl Gauge {
    pub(crate) fn up(&self) {
        // Relaxed: statistics order nothing.
        let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
        if now > self.max.load(Ordering::Relaxed) {
            self.max.fetch_max(now, Ordering::Relaxed);
        }
    }

    pub(crate) fn down(&self) {
        self.now.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn max(&self) -> u64 {
        self.max.load(Ordering::Relaxed)
    }
}

/// All counts of one region; [`Stats`](crate::paging::region::Stats) documents what each means.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) faults_zero: Counter,
    pub(crate) faults_read: Counter,
    pub(crate) faults_cooling: Counter,
    pub(crate) faults_protect: Counter,
    pub(crate) faults_racing: Counter,
    pub(crate) faults_starved: Counter,
    pub(crate) pages_in: Counter,
    pub(crate) pages_prefetched: Counter,
    pub(crate) pages_read_ahead: Counter,
    pub(crate) pages_out: Counter,
    pub(crate) evicted_clean: Counter,
    pub(crate) evicted_zero: Counter,
    pub(crate) evict_busy: Counter,
    pub(crate) install_busy: Counter,
    pub(crate) died_before_write: Counter,
    pub(crate) died_during_write: Counter,
    pub(crate) freed_unwritten: Counter,
    pub(crate) prefetch_hits: Counter,
    pub(crate) prefetch_unseen: Counter,
    pub(crate) reads_in_flight: Gauge,
    pub(crate) writes_in_flight: Gauge,
    pub(crate) polls: Counter,
    pub(crate) poll_hits: Counter,
    pub(crate) poll_yields: Counter,
    pub(crate) read_errors: Counter,
    pub(crate) write_errors: Counter,
    pub(crate) checksum_errors: Counter,
    pub(crate) poisoned: Counter,
    pub(crate) panics: Counter,
    pub(crate) chunks_opened: Counter,
    pub(crate) chunks_closed: Counter,
    pub(crate) chunks_evicted: Counter,
    pub(crate) chunks_reused: Counter,
    pub(crate) chunks_read: Counter,
}
