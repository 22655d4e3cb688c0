//! Statistics: counts that people read.

use crate::base::sync::{AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// A count of events. Code that decides must not read it, so that a count can be reset or removed
/// without changing what happens: the tidy test allows [`reading`](Self::reading) only where statistics are
/// shown.
#[derive(Debug, Default)]
pub(crate) struct Counter(CachePadded<AtomicU64>);

impl Counter {
    pub(crate) fn bump(&self) {
        self.add(1);
    }

    pub(crate) fn add(&self, events: u64) {
        // Relaxed: statistics order nothing.
        self.0.fetch_add(events, Ordering::Relaxed);
    }

    pub(crate) fn reading(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// How many of something there are now, and the most there ever were; read as a [`Counter`] is.
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

    pub(crate) fn reading(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn reading_max(&self) -> u64 {
        self.max.load(Ordering::Relaxed)
    }
}
