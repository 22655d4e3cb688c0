//! Who may use the inside of a slot: its owner, or whoever has barred it.
//!
//! The owner comes all the time and pays for two stores and a load. The other side comes to empty
//! the magazines of threads that sleep, or for good, and pays for both with a barrier on all
//! threads (`sys::membarrier`).
//!
//! ```text
//!   owner:  busy = true; [order]; barred? -- no --> inside; busy = false
//!                                    '------ yes -> busy = false: takes the shared path
//!   other:  barred = true; barrier; busy? -- no --> inside; barred = false
//!                                    '------ yes -> not now; barred = false
//! ```
//! After the barrier the owner has either made `busy` visible or will see the bar. Used by `slot`;
//! knows nothing but atomics, and loom runs it.
//!
//! # Invariants
//! 1. Only the owner writes `busy`. The other side does not: the owner may be just between setting
//!    `busy` and looking at the bar, and would be inside unseen once the bar is lifted.
//! 2. Whoever found the slot empty after the barrier is alone inside until the bar is lifted,
//!    whatever `busy` says then: the owner sets it only to find the bar.

use crate::base::strict_assert;
use crate::base::sync::{
    AtomicBool,
    Ordering::{Acquire, Relaxed, Release},
};

/// A slot's door; see the module's documentation.
pub(super) struct Bar {
    busy: AtomicBool,
    barred: AtomicBool,
}

impl Bar {
    pub(super) fn new() -> Bar {
        Bar { busy: AtomicBool::new(false), barred: AtomicBool::new(false) }
    }

    /// Lets the owner in; `false` while the slot is barred. Ends with [`leave`](Self::leave).
    #[inline]
    pub(super) fn enter(&self) -> bool {
        self.knock();
        // Pairs with the Release in `lift`: what was done to the inside is visible.
        if self.barred.load(Acquire) {
            self.leave();
            return false;
        }
        true
    }

    /// The owner's first half of entering.
    #[inline]
    pub(super) fn knock(&self) {
        strict_assert!(!self.busy.load(Relaxed), "a hook allocated from the tier that it serves");
        self.busy.store(true, Relaxed);
        order();
    }

    /// The owner leaves.
    #[inline]
    pub(super) fn leave(&self) {
        self.busy.store(false, Release);
    }

    /// Keeps the owner out from its next time on. Follow with a barrier on all threads.
    pub(super) fn set(&self) {
        self.barred.store(true, Relaxed);
    }

    /// Lets the owner in again.
    pub(super) fn lift(&self) {
        self.barred.store(false, Release);
    }

    pub(super) fn is_set(&self) -> bool {
        self.barred.load(Relaxed)
    }

    /// Whether the owner is outside, if asked with the bar set and a barrier since.
    pub(super) fn is_empty(&self) -> bool {
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

    struct Slot {
        bar: Bar,
        inside: UnsafeCell<u32>,
    }

    impl Slot {
        fn use_inside(&self) {
            // Loom fails when another thread is inside, too.
            self.inside.with_mut(|_| ());
        }
    }

    #[test]
    fn loom_nobody_is_inside_beside_the_owner_in_round_after_round() {
        loom::model(|| {
            let slot = Arc::new(Slot { bar: Bar::new(), inside: UnsafeCell::new(0) });
            let of_owner = Arc::clone(&slot);
            let owner = thread::spawn(move || {
                for _ in 0..2 {
                    if of_owner.bar.enter() {
                        of_owner.use_inside();
                        of_owner.bar.leave();
                    }
                }
            });
            for _ in 0..2 {
                slot.bar.set();
                fence(Ordering::SeqCst); // The barrier on all threads.
                if slot.bar.is_empty() {
                    slot.use_inside();
                }
                slot.bar.lift();
            }
            owner.join().expect("the owner asserts nothing false");
        });
    }
}
