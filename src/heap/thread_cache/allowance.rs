//! Allowance: one bound on what all threads of a tier keep of freed memory.
//!
//! Blocks that a thread keeps are charged like any memory. With a bound per thread alone, enough threads
//! keep more than the limit, and freed data is evicted and written: 64 threads with 3 MiB of live data under
//! 32 MiB wrote 245 MiB in 6 s. So a cache's caches begin with
//! room for nothing and get more in steps, from a common [`Allowance`], which is asked only when a
//! cache is full: what caches serve costs nothing more. A cache that is flushed returns all. Used by
//! `thread_cache`, `far_arenas` and `local`; knows nothing but atomics.
//!
//! # Invariants
//! 1. The parts of all caches together never exceed the allowance, until it is made smaller: then
//!    no part grows until enough has been returned.
//! 2. A [`CacheShare`] is changed by one thread at a time, the one inside its cache.

use crate::base::sync::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Bytes that all caches of a tier may keep.
pub(in crate::heap) struct Allowance {
    total: AtomicUsize,
    taken: AtomicUsize,
    /// ThreadCaches that have taken some.
    holders: AtomicUsize,
    /// A cache was refused its fair share.
    refused: AtomicBool,
}

/// One cache's part of an [`Allowance`].
pub(super) struct CacheShare {
    bytes: AtomicUsize,
}

impl Allowance {
    pub(in crate::heap) const fn new(total: usize) -> Allowance {
        Allowance {
            total: AtomicUsize::new(total),
            taken: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            refused: AtomicBool::new(false),
        }
    }

    /// Bytes of each cache when all is taken.
    pub(super) fn share(&self) -> usize {
        self.total() / self.holders.load(Relaxed).max(1)
    }

    /// Bytes that all caches may have together.
    pub(super) fn total(&self) -> usize {
        self.total.load(Relaxed)
    }

    /// Changes what all caches may have together; what some have beyond it stays with them until
    /// they are flushed.
    pub(super) fn set_total(&self, total: usize) {
        self.total.store(total, Relaxed);
    }

    /// Bytes that caches have taken.
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    /// True if caches have more than all of them may have together.
    pub(super) fn is_exceeded(&self) -> bool {
        self.taken() > self.total()
    }

    /// True if a cache was refused its fair share since the last call: others have more than theirs.
    pub(super) fn take_refused(&self) -> bool {
        self.refused.load(Relaxed) && self.refused.swap(false, Relaxed)
    }
}

impl CacheShare {
    pub(super) fn new() -> CacheShare {
        CacheShare { bytes: AtomicUsize::new(0) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Takes `bytes` more. The first half of the allowance is first come, first served; of the rest
    /// each cache gets at most its fair share. A refusal changes nothing that other threads read,
    /// because every free may come here then.
    pub(super) fn take(&self, from: &Allowance, bytes: usize) -> bool {
        let (mine, total) = (self.bytes(), from.total());
        let holders = from.holders.load(Relaxed) + usize::from(mine == 0);
        let is_fair = mine + bytes <= total / holders.max(1);
        let most = if is_fair { total } else { total / 2 };
        let more = |taken: usize| taken.checked_add(bytes).filter(|taken| *taken <= most);
        if from.taken.fetch_update(Relaxed, Relaxed, more).is_err() {
            if is_fair && !from.refused.load(Relaxed) {
                from.refused.store(true, Relaxed);
            }
            return false;
        }
        if mine == 0 {
            from.holders.fetch_add(1, Relaxed);
        }
        self.bytes.store(mine + bytes, Relaxed);
        true
    }

    /// Returns `bytes` of it, or all that there is.
    pub(super) fn give_back(&self, to: &Allowance, bytes: usize) {
        let mine = self.bytes();
        let bytes = bytes.min(mine);
        if bytes == 0 {
            return;
        }
        self.bytes.store(mine - bytes, Relaxed);
        to.taken.fetch_sub(bytes, Relaxed);
        if bytes == mine {
            to.holders.fetch_sub(1, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_half_is_anybodys_and_the_rest_is_shared() {
        let (all, first, second) = (Allowance::new(100), CacheShare::new(), CacheShare::new());
        assert!(first.take(&all, 40) && second.take(&all, 10));
        assert!(!first.take(&all, 20), "more than its share, and half is taken");
        assert!(!all.take_refused());
        assert!(first.take(&all, 10) && second.take(&all, 40));
        assert_eq!(all.taken(), 100);
        assert!(!second.take(&all, 1));
        first.give_back(&all, usize::MAX);
        assert_eq!((all.taken(), all.share()), (50, 100));
        assert!(second.take(&all, 50));
    }

    #[test]
    fn an_allowance_made_smaller_is_exceeded_until_enough_has_come_back() {
        let (all, first, second) = (Allowance::new(100), CacheShare::new(), CacheShare::new());
        assert!(first.take(&all, 50) && second.take(&all, 10));
        all.set_total(40);
        assert!(all.is_exceeded() && !second.take(&all, 1));
        first.give_back(&all, 30);
        assert_eq!((all.taken(), all.is_exceeded(), first.bytes()), (30, false, 20));
        assert!(second.take(&all, 10));
        first.give_back(&all, 20);
        assert_eq!(all.share(), 40, "it holds nothing any more");
    }

    #[test]
    fn who_is_refused_a_fair_share_is_noticed_once() {
        let (all, hog, other) = (Allowance::new(100), CacheShare::new(), CacheShare::new());
        assert!(hog.take(&all, 90));
        assert!(!other.take(&all, 20));
        assert_eq!((all.take_refused(), all.take_refused(), all.share()), (true, false, 100));
        hog.give_back(&all, usize::MAX);
        assert!(other.take(&all, 20) && hog.take(&all, 50));
        assert_eq!(all.share(), 50);
    }
}
