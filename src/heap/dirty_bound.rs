//! A bound in bytes on what a tier keeps of freed memory: the freeing thread notices that it is exceeded.
//!
//! jemalloc keeps freed extents for a time, and bounds no bytes; maintenance looks ten times a second,
//! and a thread frees gigabytes meanwhile. So bytes that are freed past the magazines are counted, in
//! steps, and when half the bound has been freed since the last look, the tier looks. Used by
//! `far_arenas`; knows nothing but atomics.

use crate::base::sync::{AtomicU64, Ordering::Relaxed};

/// Bytes that a thread counts by itself before it adds them to all threads': the addition costs a third
/// of a free.
pub(super) const STEP: usize = 256 << 10;

/// See the module's documentation.
pub(super) struct DirtyBound {
    most: AtomicU64,
    /// Bytes freed since the last look.
    freed: AtomicU64,
}

impl DirtyBound {
    pub(super) fn new(most: u64) -> DirtyBound {
        DirtyBound { most: AtomicU64::new(most), freed: AtomicU64::new(0) }
    }

    pub(super) fn set_most(&self, bytes: u64) {
        self.most.store(bytes, Relaxed);
    }

    /// Maximum number of dirty bytes.
    pub(super) fn most(&self) -> u64 {
        self.most.load(Relaxed)
    }

    /// Dirty bytes above which a look ends with a purge: as many as may be freed until the next look.
    pub(super) fn half(&self) -> u64 {
        self.most() / 2
    }

    /// Counts freed bytes; `true` for the one caller that is to look.
    pub(super) fn freed(&self, bytes: usize) -> bool {
        if bytes == 0 || self.freed.fetch_add(bytes as u64, Relaxed) + bytes as u64 <= self.half() {
            return false;
        }
        self.freed.swap(0, Relaxed) > self.half()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn one_caller_looks_for_each_half_of_the_bound() {
        let bound = DirtyBound::new(100);
        assert!(!bound.freed(50) && bound.freed(1), "more than half");
        assert!(!bound.freed(0) && !bound.freed(20) && bound.freed(200));
        bound.set_most(10);
        assert!(bound.freed(6));
    }
}
