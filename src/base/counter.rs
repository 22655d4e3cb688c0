//! Statistics: counts that people read.

use crate::base::sync::{AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// A count of events. Code that decides must not read it, so that a count can be reset or removed
/// without changing what happens: the tidy test allows [`reading`](Self::reading) only where statistics are
/// shown.
#[derive(Debug, Default)]
pub(crate) struct Counter(CachePadded<AtomicU64>);

impl Counter {
    pub(crate) fn add(&self, events: u64) {
        // Relaxed: statistics order nothing.
        self.0.fetch_add(events, Ordering::Relaxed);
    }

    pub(crate) fn reading(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
