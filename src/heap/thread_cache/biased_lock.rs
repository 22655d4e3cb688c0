//! A lock that is biased towards one thread, its owner: it protects the contents of a thread cache.
//!
//! The owner takes it all the time, for two stores and a load. Another thread takes it to empty the
//! caches of threads that sleep, or for good: it revokes the bias, and pays for both sides with a
//! barrier on all threads (`sys::membarrier`).
//!
//! ```text
//!   owner:   busy = true; [order]; revoked? -- no --> inside; busy = false
//!                                     '------ yes -> busy = false: takes the shared path
//!   revoker: revoked = true; barrier; busy? -- no --> inside; revoked = false
//!                                       '------ yes -> not now; revoked = false
//! ```
//! After the barrier the owner has either made `busy` visible or will see that it is revoked. Used by
//! `cache`; knows nothing but atomics, and loom runs it.
//!
//! # Invariants
//! 1. Only the owner writes `busy`. If the revoker wrote it, the owner could be just between setting
//!    `busy` and looking at `revoked`, and would be inside unseen once the bias is restored.
//! 2. A revoker that found the owner outside after the barrier is alone inside until it restores the
//!    bias, whatever `busy` says then: the owner sets it only to find that it is revoked.

use crate::base::strict_assert;
use crate::base::sync::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};

/// See the module's documentation.
pub(super) struct BiasedLock {
    busy: AtomicBool,
    revoked: AtomicBool,
}

impl BiasedLock {
    pub(super) fn new() -> BiasedLock {
        BiasedLock { busy: AtomicBool::new(false), revoked: AtomicBool::new(false) }
    }

    /// Takes the lock for the owner; `false` while the bias is revoked. Ends with [`leave`](Self::leave).
    #[inline]
    pub(super) fn enter(&self) -> bool {
        self.announce();
        // Pairs with the Release in `restore`: what the revoker did inside is visible.
        if self.revoked.load(Acquire) {
            self.leave();
            return false;
        }
        true
    }

    /// The first half of [`enter`](Self::enter).
    #[inline]
    pub(super) fn announce(&self) {
        strict_assert!(!self.busy.load(Relaxed), "a hook allocated from the tier that it serves");
        self.busy.store(true, Relaxed);
        order();
    }

    /// Releases the owner's lock.
    #[inline]
    pub(super) fn leave(&self) {
        self.busy.store(false, Release);
    }

    /// Keeps the owner out from its next `enter` on. Follow with a barrier on all threads.
    pub(super) fn revoke(&self) {
        self.revoked.store(true, Relaxed);
    }

    /// Lets the owner in again.
    pub(super) fn restore(&self) {
        self.revoked.store(false, Release);
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.revoked.load(Relaxed)
    }

    /// True if the owner is outside, if asked when it is revoked and after a barrier.
    pub(super) fn is_idle(&self) -> bool {
        // Pairs with the Release in `leave`.
        !self.busy.load(Acquire)
    }
}

/// Orders a store before a load for the compiler; for the processor the other side's barrier does.
#[cfg(not(loom))]
#[inline]
fn order() {
    std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
}

/// Loom knows no barrier on all threads: there both sides have a fence.
#[cfg(loom)]
fn order() {
    crate::base::sync::fence(crate::base::sync::Ordering::SeqCst);
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::base::sync::{Ordering, fence};
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    struct Cache {
        lock: BiasedLock,
        inside: UnsafeCell<u32>,
    }

    impl Cache {
        fn use_inside(&self) {
            // Loom fails when another thread is inside, too.
            self.inside.with_mut(|_| ());
        }
    }

    #[test]
    fn loom_nobody_is_inside_beside_the_owner_in_round_after_round() {
        loom::model(|| {
            let cache = Arc::new(Cache { lock: BiasedLock::new(), inside: UnsafeCell::new(0) });
            let of_owner = Arc::clone(&cache);
            let owner = thread::spawn(move || {
                for _ in 0..2 {
                    if of_owner.lock.enter() {
                        of_owner.use_inside();
                        of_owner.lock.leave();
                    }
                }
            });
            for _ in 0..2 {
                cache.lock.revoke();
                fence(Ordering::SeqCst); // The barrier on all threads.
                if cache.lock.is_idle() {
                    cache.use_inside();
                }
                cache.lock.restore();
            }
            owner.join().expect("the owner asserts nothing false");
        });
    }
}
