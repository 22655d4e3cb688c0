//! Allowance: one bound on what all threads of a tier keep of freed memory.
//!
//! What a thread keeps is charged like any memory. With a bound per thread alone, enough threads
//! keep more than the limit, and freed data is evicted and written. So a cache's caches begin with
//! room for nothing and get more in steps, from a common [`Allowance`], which is asked only when a
//! cache is full: what caches serve costs nothing more. A cache that is flushed returns all. Used by
//! `thread_cache` and `far_arenas`; knows nothing but atomics.
//!
//! # Invariants
//! 1. The parts of all caches together never exceed the allowance.
//! 2. A [`Part`] is changed by one thread at a time, the one inside its cache.

use crate::base::sync::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// What all caches of a tier may keep, in bytes.
pub(super) struct Allowance {
    total: usize,
    taken: AtomicUsize,
    /// ThreadCaches that have taken some.
    holders: AtomicUsize,
    /// A cache was refused its fair share.
    refused: AtomicBool,
}

/// One cache's part of an [`Allowance`].
pub(super) struct Part {
    bytes: AtomicUsize,
}

impl Allowance {
    pub(super) fn new(total: usize) -> Allowance {
        Allowance {
            total,
            taken: AtomicUsize::new(0),
            holders: AtomicUsize::new(0),
            refused: AtomicBool::new(false),
        }
    }

    /// What each cache may have when all is taken.
    pub(super) fn share(&self) -> usize {
        self.total / self.holders.load(Relaxed).max(1)
    }

    /// Bytes that caches have taken.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        self.taken.load(Relaxed)
    }

    /// Whether a cache was refused its fair share since the last call: others have more than theirs.
    pub(super) fn take_refused(&self) -> bool {
        self.refused.load(Relaxed) && self.refused.swap(false, Relaxed)
    }
}

impl Part {
    pub(super) fn new() -> Part {
        Part { bytes: AtomicUsize::new(0) }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Takes `bytes` more. The first half of the allowance is first come, first served; of the rest
    /// each cache gets at most its fair share. A refusal changes nothing that other threads read,
    /// because every free may come here then.
    pub(super) fn take(&self, from: &Allowance, bytes: usize) -> bool {
        let mine = self.bytes();
        let holders = from.holders.load(Relaxed) + usize::from(mine == 0);
        let is_fair = mine + bytes <= from.total / holders.max(1);
        let most = if is_fair { from.total } else { from.total / 2 };
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

    /// Returns all of it.
    pub(super) fn give_back(&self, to: &Allowance) {
        let mine = self.bytes.swap(0, Relaxed);
        if mine > 0 {
            to.taken.fetch_sub(mine, Relaxed);
            to.holders.fetch_sub(1, Relaxed);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_first_half_is_anybodys_and_the_rest_is_shared() {
        let (all, first, second) = (Allowance::new(100), Part::new(), Part::new());
        assert!(first.take(&all, 40) && second.take(&all, 10));
        assert!(!first.take(&all, 20), "more than its share, and half is taken");
        assert!(!all.take_refused());
        assert!(first.take(&all, 10) && second.take(&all, 40));
        assert_eq!(all.taken(), 100);
        assert!(!second.take(&all, 1));
        first.give_back(&all);
        assert_eq!((all.taken(), all.share()), (50, 100));
        assert!(second.take(&all, 50));
    }

    #[test]
    fn who_is_refused_a_fair_share_is_noticed_once() {
        let (all, hog, other) = (Allowance::new(100), Part::new(), Part::new());
        assert!(hog.take(&all, 90));
        assert!(!other.take(&all, 20));
        assert_eq!((all.take_refused(), all.take_refused(), all.share()), (true, false, 100));
        hog.give_back(&all);
        assert!(other.take(&all, 20) && hog.take(&all, 50));
        assert_eq!(all.share(), 50);
    }
}
