//! Bytes allocated and freed: counted by who allocates and frees, summed by who looks.
//!
//! An object may be freed through other counters than those that it was allocated through. Used by
//! `thread_cache` and `far_arenas`; knows nothing but atomics, and loom runs it.
//!
//! # Invariants
//! 1. An object is counted as allocated before its address is handed out, and a new place of it
//!    before the old one is counted as freed.

use crate::base::sync::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// Bytes since the counters exist, as the callers asked for them.
pub(super) struct Counts {
    allocated: AtomicU64,
    freed: AtomicU64,
}

impl Counts {
    pub(super) fn new() -> Counts {
        Counts { allocated: AtomicU64::new(0), freed: AtomicU64::new(0) }
    }

    /// Counts an allocation, for the one thread that changes these counters.
    #[inline]
    pub(super) fn allocated_alone(&self, bytes: usize) {
        let now = self.allocated.load(Relaxed).wrapping_add(bytes as u64);
        self.allocated.store(now, Release);
    }

    /// Counts a free, for the one thread that changes these counters.
    #[inline]
    pub(super) fn freed_alone(&self, bytes: usize) {
        let now = self.freed.load(Relaxed).wrapping_add(bytes as u64);
        self.freed.store(now, Release);
    }

    /// Counts an allocation beside others.
    pub(super) fn allocated(&self, bytes: usize) {
        self.allocated.fetch_add(bytes as u64, Release);
    }

    /// Counts a free beside others.
    pub(super) fn freed(&self, bytes: usize) {
        self.freed.fetch_add(bytes as u64, Release);
    }

    /// Bytes that came and went: grows with whatever happens.
    pub(super) fn traffic(&self) -> u64 {
        self.allocated.load(Relaxed).wrapping_add(self.freed.load(Relaxed))
    }
}

/// Bytes allocated and not freed, through all counters that `all` yields: never zero while an
/// object lives that was allocated before the call, also if another thread moves it meanwhile.
pub(super) fn in_use<'a, I>(all: impl Fn() -> I) -> u64
where
    I: Iterator<Item = &'a Counts>,
{
    // All counters of frees first: the Acquire pairs with the Release of who freed, so that of
    // what is seen as freed the allocation, and of what has moved the new place, are counted below,
    // through whichever counters.
    let freed = all().map(|counts| counts.freed.load(Acquire)).fold(0, u64::wrapping_add);
    let allocated = all().map(|counts| counts.allocated.load(Relaxed)).fold(0, u64::wrapping_add);
    allocated.saturating_sub(freed)
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_an_object_that_moves_meanwhile_is_in_use() {
        loom::model(|| {
            let all = Arc::new([Counts::new(), Counts::new()]);
            let [shared, cache] = &*all;
            cache.allocated_alone(10);
            let of_mover = Arc::clone(&all);
            let mover = thread::spawn(move || {
                of_mover[0].allocated(10);
                of_mover[0].freed(10);
            });
            assert!(in_use(|| [shared, cache].into_iter()) >= 10, "the object seems to be gone");
            mover.join().expect("the mover asserts nothing false");
            assert_eq!(in_use(|| all.iter()), 10);
        });
    }
}
