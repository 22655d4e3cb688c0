//! A pointer to something that threads visit, and that goes away while others are visited.
//!
//! For places that a signal handler looks at, which can take no lock. Each place counts its own
//! visitors: a count for all places would be above zero for ever while threads keep visiting the others.
//!
//! ```text
//!   Free --offer--> Offered --withdraw--> Leaving --all visitors have left--> Free
//! ```
//! | state | visitors |
//! |---|---|
//! | `Free`, `Leaving` | find nothing, and leave at once |
//! | `Offered` | find the pointer |
//!
//! # Invariants
//! 1. A visitor is counted from before it looks at the pointer until it has left. It sees that the
//!    place is `Leaving`, or the one who withdraws sees it counted: both change the same counter.
//! 2. A place is offered anew only once no visitor of the last offer is left.

use super::sync::{AtomicPtr, AtomicUsize, Ordering};
use std::ptr::{null_mut, without_provenance_mut};

/// The pointer of a place that is `Leaving`.
fn leaving<T>() -> *mut T {
    without_provenance_mut(1)
}

/// A place.
#[derive(Debug)]
pub(crate) struct Visited<T> {
    /// Null: `Free`.
    what: AtomicPtr<T>,
    visitors: AtomicUsize,
}

impl<T> Visited<T> {
    #[cfg(not(loom))]
    pub(crate) const fn new() -> Visited<T> {
        Visited { what: AtomicPtr::new(null_mut()), visitors: AtomicUsize::new(0) }
    }

    /// Loom's atomics are made at run time.
    #[cfg(loom)]
    pub(crate) fn new() -> Visited<T> {
        Visited { what: AtomicPtr::new(null_mut()), visitors: AtomicUsize::new(0) }
    }

    /// Offers `what`, unless something else is offered here.
    pub(crate) fn offer(&self, what: *const T) -> bool {
        let (free, what) = (null_mut(), what.cast_mut());
        // Release: visitors see what is behind the pointer. Acquire pairs with the end of `withdraw`.
        self.what.compare_exchange(free, what, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Ends the offer of `what`, if it is what is offered: afterwards nobody visits it. `wait` is called
    /// again and again while somebody does.
    pub(crate) fn withdraw(&self, what: *const T, mut wait: impl FnMut()) {
        let what = what.cast_mut();
        let left = self.what.compare_exchange(
            what,
            leaving(),
            Ordering::Relaxed, // Published by the change of the counter below.
            Ordering::Relaxed,
        );
        if left.is_err() {
            return;
        }
        // A change that changes nothing: a visitor is counted before it, or sees the store above
        // (invariant 1).
        let mut visitors = self.visitors.fetch_add(0, Ordering::AcqRel);
        while visitors > 0 {
            wait();
            visitors = self.visitors.load(Ordering::Acquire);
        }
        self.what.store(null_mut(), Ordering::Release);
    }

    /// Visits what is offered.
    pub(crate) fn visit(&self) -> Option<Visit<'_, T>> {
        // Acquire: see `withdraw`.
        self.visitors.fetch_add(1, Ordering::AcqRel);
        let visit = Visit { place: self, what: self.what.load(Ordering::Acquire) };
        let is_offered = !visit.what.is_null() && visit.what != leaving();
        is_offered.then_some(visit)
    }
}

/// Keeps what is visited from being withdrawn.
#[must_use = "the visit ends when this is dropped"]
pub(crate) struct Visit<'a, T> {
    place: &'a Visited<T>,
    what: *mut T,
}

impl<T> Visit<'_, T> {
    /// The offer, unless it has been withdrawn.
    pub(crate) fn what(&self) -> *const T {
        self.what
    }
}

impl<T> Drop for Visit<'_, T> {
    fn drop(&mut self) {
        // Release: what the visitor did is over for the thread that sees zero.
        self.place.visitors.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_place_waits_for_its_visitors_before_it_is_offered_anew() {
        let (one, other) = (1, 2);
        let place = Visited::new();
        assert!(place.visit().is_none());
        assert!(place.offer(&raw const one));
        assert!(!place.offer(&raw const other), "taken");
        place.withdraw(&raw const other, || panic!("it is not offered here"));
        let mut visit = place.visit();
        assert_eq!(visit.as_ref().map(Visit::what), Some(&raw const one));
        let mut waits = 0;
        place.withdraw(&raw const one, || {
            waits += 1;
            assert!(place.visit().is_none() && !place.offer(&raw const other), "on its way out");
            drop(visit.take());
        });
        assert_eq!(waits, 1);
        assert!(place.offer(&raw const other));
        assert_eq!(place.visit().map(|visit| visit.what()), Some(&raw const other));
    }
}

#[cfg(all(test, loom))]
mod model {
    use super::*;
    use crate::base::sync::AtomicBool;
    use loom::thread;
    use std::sync::Arc;

    struct Thing {
        is_there: AtomicBool,
    }

    fn thing() -> Thing {
        Thing { is_there: AtomicBool::new(true) }
    }

    /// One thread visits while another withdraws what is offered, and a third one offers something
    /// else as soon as it can: what is visited is there.
    #[test]
    fn loom_what_is_visited_has_not_been_taken_away() {
        loom::model(|| {
            let shared = Arc::new((Visited::new(), thing(), thing()));
            let (place, one, _) = &*shared;
            assert!(place.offer(&raw const *one));
            let visitor = thread::spawn({
                let shared = Arc::clone(&shared);
                move || {
                    let (place, one, other) = &*shared;
                    let Some(visit) = place.visit() else { return };
                    let found = if visit.what() == &raw const *one { one } else { other };
                    assert!(found.is_there.load(Ordering::Relaxed), "taken away during a visit");
                }
            });
            let next = thread::spawn({
                let shared = Arc::clone(&shared);
                move || shared.0.offer(&raw const shared.2)
            });
            place.withdraw(&raw const *one, thread::yield_now);
            one.is_there.store(false, Ordering::Relaxed);
            visitor.join().expect("no panic");
            next.join().expect("no panic");
        });
    }
}
