//! Atomics and locks: one switch between std and loom, and locks that know their rank.
//!
//! Lock order (a thread may take a lock only of a higher rank than all it holds; debug builds
//! check it): see [`Rank`].

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{
    AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The order in which locks may nest, lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub(crate) enum Rank {
    /// The heap's control state (start, shutdown).
    Heap = 0,
    /// Address ranges of a region.
    Space = 1,
    /// How a memory manager's limit is divided.
    Shares = 2,
    /// A memory manager's list of consumers.
    Consumers = 3,
    /// The eviction policy's lists.
    Policy = 4,
    /// Staging frames.
    Frames = 5,
    /// A store's slot map.
    Slots = 6,
    /// Leaf locks: nothing is taken under them.
    Leaf = 7,
}

thread_local! {
    /// Bit `r` is set while this thread holds a lock of rank `r`. Const and without a destructor,
    /// so that it works inside allocators and at thread exit.
    static HELD: Cell<u16> = const { Cell::new(0) };
}

/// Sets aside what the calling thread holds, while it lives: a signal handler of this crate begins
/// anew, for it takes only locks that nothing it may have interrupted holds.
#[must_use = "the thread's locks count again when this is dropped"]
pub(crate) struct Interrupted(u16);

impl Interrupted {
    pub(crate) fn new() -> Interrupted {
        Interrupted(HELD.replace(0))
    }
}

impl Drop for Interrupted {
    fn drop(&mut self) {
        HELD.set(self.0);
    }
}

/// A mutex with a rank. Poisoning is ignored: our critical sections keep their data valid at
/// every step, and a handler that stopped because another thread panicked would hang the process.
#[derive(Debug)]
pub(crate) struct Ranked<T> {
    rank: Rank,
    inner: Mutex<T>,
}

impl<T> Ranked<T> {
    pub(crate) const fn new(rank: Rank, value: T) -> Ranked<T> {
        Ranked { rank, inner: Mutex::new(value) }
    }

    /// Takes the lock.
    ///
    /// # Panics
    /// In debug builds, when the thread already holds a lock of the same or a higher rank.
    pub(crate) fn lock(&self) -> RankedGuard<'_, T> {
        if cfg!(debug_assertions) {
            let held = HELD.get();
            assert!(
                held >> (self.rank as u8) == 0,
                "lock order: {:?} taken while holding ranks {held:#b}",
                self.rank
            );
            HELD.set(held | 1 << self.rank as u8);
        }
        RankedGuard {
            rank: self.rank,
            inner: self.inner.lock().unwrap_or_else(PoisonError::into_inner),
        }
    }
}

#[cfg(not(loom))]
impl<T> Ranked<T> {
    /// The value, without the lock: in a forked child a thread that is not there may hold it.
    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.inner.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Holds a [`Ranked`] lock; gives it back when dropped.
#[derive(Debug)]
pub(crate) struct RankedGuard<'a, T> {
    rank: Rank,
    inner: MutexGuard<'a, T>,
}

impl<T> Deref for RankedGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T> Drop for RankedGuard<'_, T> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) {
            HELD.set(HELD.get() & !(1 << self.rank as u8));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(debug_assertions)]
    use crate::base::testing::ExpectedPanic;

    #[test]
    fn locks_nest_in_rank_order() {
        let outer = Ranked::new(Rank::Space, 1);
        let inner = Ranked::new(Rank::Slots, 2);
        let a = outer.lock();
        let b = inner.lock();
        assert_eq!(*a + *b, 3);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "lock order")]
    fn a_lock_below_one_that_is_held_is_refused() {
        let _expected = ExpectedPanic::saying("lock order");
        let outer = Ranked::new(Rank::Space, 1);
        let inner = Ranked::new(Rank::Slots, 2);
        let _b = inner.lock();
        let _a = outer.lock();
    }
}
