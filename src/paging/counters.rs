//! Event counts and durations of one region, noted where the event happens and read by people: no code
//! of the pager decides by them.

use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::paging::latency::Recorder;
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

/// All counts and durations of one region; [`Stats`](crate::paging::region::Stats) documents what each means.
#[derive(Debug)]
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
    /// Per handler.
    pub(crate) fault_times: Box<[Recorder]>,
    /// Per handler.
    pub(crate) read_times: Box<[Recorder]>,
    pub(crate) write_times: Recorder,
    pub(crate) evict_times: Recorder,
}

impl Counters {
    pub(in crate::paging) fn new(handlers: usize) -> Result<Counters> {
        let recorders = || (0..handlers).map(|_| Recorder::new()).collect::<Result<_>>();
        Ok(Counters {
            faults_zero: Counter::default(),
            faults_read: Counter::default(),
            faults_cooling: Counter::default(),
            faults_protect: Counter::default(),
            faults_racing: Counter::default(),
            faults_starved: Counter::default(),
            pages_in: Counter::default(),
            pages_prefetched: Counter::default(),
            pages_read_ahead: Counter::default(),
            pages_out: Counter::default(),
            evicted_clean: Counter::default(),
            evicted_zero: Counter::default(),
            evict_busy: Counter::default(),
            install_busy: Counter::default(),
            died_before_write: Counter::default(),
            died_during_write: Counter::default(),
            freed_unwritten: Counter::default(),
            prefetch_hits: Counter::default(),
            prefetch_unseen: Counter::default(),
            reads_in_flight: Gauge::default(),
            writes_in_flight: Gauge::default(),
            polls: Counter::default(),
            poll_hits: Counter::default(),
            poll_yields: Counter::default(),
            read_errors: Counter::default(),
            write_errors: Counter::default(),
            checksum_errors: Counter::default(),
            poisoned: Counter::default(),
            panics: Counter::default(),
            chunks_opened: Counter::default(),
            chunks_closed: Counter::default(),
            chunks_evicted: Counter::default(),
            chunks_reused: Counter::default(),
            chunks_read: Counter::default(),
            fault_times: recorders()?,
            read_times: recorders()?,
            write_times: Recorder::new()?,
            evict_times: Recorder::new()?,
        })
    }
}
