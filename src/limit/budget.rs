//! The limit on resident bytes.
//!
//! [`Budget`] counts every byte of far memory that can be resident: pages mapped in the region
//! and staging frames. A charge comes before the memory exists, so resident never exceeds the
//! limit.
//!
//! A budget may be a consumer's part of a shared one ([`Budget::under`]): a charge then has to
//! fit both, and is counted in both.
//!
//! # Invariants
//! 1. What is charged to a shared budget is at least what is charged to all its parts: a charge is
//!    counted in the shared budget first, and taken back there last. So a part that takes back more
//!    than it has charged stops at zero, and no other part's bytes are lost.

use crate::base::strict_assert;
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::ByteCount;
use std::sync::Arc;

/// Bytes that may be resident and bytes that are charged.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: AtomicU64,
    charged: AtomicU64,
    charged_max: AtomicU64,
    /// Bytes that all consumers together may charge.
    shared: Option<Arc<Budget>>,
}

impl Budget {
    pub(crate) fn new(limit: ByteCount) -> Budget {
        Budget {
            limit: AtomicU64::new(limit.0),
            charged: AtomicU64::new(0),
            charged_max: AtomicU64::new(0),
            shared: None,
        }
    }

    /// A consumer's budget within a `shared` one.
    pub(crate) fn under(shared: Arc<Budget>, limit: ByteCount) -> Budget {
        Budget { shared: Some(shared), ..Budget::new(limit) }
    }

    pub(crate) fn limit(&self) -> ByteCount {
        ByteCount(self.limit.load(Ordering::Relaxed))
    }

    /// Sets the limit; what is charged above a lower one has to be evicted by the caller. Charges
    /// that looked at the old limit are either seen by a look at `charged` from now on, or see the
    /// new limit themselves and take themselves back.
    pub(crate) fn set_limit(&self, limit: ByteCount) {
        self.limit.store(limit.0, Ordering::Relaxed);
        // Changes of `charged` are totally ordered: one before this is seen by this thread, one
        // after it acquires the store above and looks at the limit again.
        self.charged.fetch_add(0, Ordering::AcqRel);
    }

    /// Fails if a charge that was just made is no longer within the limit: takes it back, and
    /// returns how much of it that was: somebody may have taken back more than was charged.
    fn stands(&self, after: u64, headroom: u64, bytes: u64) -> Result<(), ByteCount> {
        if after.saturating_add(headroom) > self.limit.load(Ordering::Relaxed) {
            return Err(self.take_own(ByteCount(bytes)));
        }
        self.charged_max.fetch_max(after, Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn charged(&self) -> ByteCount {
        ByteCount(self.charged.load(Ordering::Relaxed))
    }

    /// The largest charge there ever was.
    pub(crate) fn charged_max(&self) -> ByteCount {
        ByteCount(self.charged_max.load(Ordering::Relaxed))
    }

    /// Bytes that can still be charged.
    pub(crate) fn free(&self) -> ByteCount {
        let own = self.own_free();
        self.shared.as_ref().map_or(own, |shared| shared.free().min(own))
    }

    /// Bytes that can still be charged as far as this budget goes, whatever the shared one says.
    pub(crate) fn own_free(&self) -> ByteCount {
        ByteCount(self.limit().0.saturating_sub(self.charged().0))
    }

    /// Bytes that the shared budget has left; `None` for a budget that is nobody's part.
    #[cfg(test)]
    pub(crate) fn shared_free(&self) -> Option<ByteCount> {
        self.shared.as_ref().map(|shared| shared.own_free())
    }

    /// Charges `bytes` if the limit allows it.
    #[must_use]
    pub(crate) fn try_charge(&self, bytes: ByteCount) -> bool {
        self.try_charge_leaving(bytes, ByteCount::ZERO)
    }

    /// Charges `bytes` if the limit allows them and `headroom` more.
    #[must_use]
    pub(crate) fn try_charge_leaving(&self, bytes: ByteCount, headroom: ByteCount) -> bool {
        let Some(shared) = &self.shared else {
            return self.try_charge_own(bytes, headroom).is_ok();
        };
        // Looked at first, so that a consumer at its own limit leaves the shared count alone.
        let own = self.charged().0.saturating_add(bytes.0).saturating_add(headroom.0);
        if own > self.limit().0 || shared.try_charge_own(bytes, headroom).is_err() {
            return false;
        }
        match self.try_charge_own(bytes, headroom) {
            Ok(()) => true,
            Err(too_much) => {
                shared.uncharge(too_much);
                false
            }
        }
    }

    /// Charges as much of `bytes` as fits; returns how much that is.
    pub(crate) fn charge_up_to(&self, bytes: ByteCount) -> ByteCount {
        let Some(shared) = &self.shared else { return self.charge_own_up_to(bytes).0 };
        let (all, _) = shared.charge_own_up_to(bytes.min(self.own_free()));
        let (both, lost) = self.charge_own_up_to(all);
        shared.uncharge(ByteCount(all.0 - both.0 - lost.0));
        both
    }

    /// Returns what was charged, and what was charged for a moment and taken back by somebody else.
    fn charge_own_up_to(&self, bytes: ByteCount) -> (ByteCount, ByteCount) {
        let mut lost = 0;
        loop {
            let mut fits = 0;
            let before = self.change(|charged| {
                fits = self.limit().0.saturating_sub(charged).min(bytes.0 - lost);
                Some(charged + fits)
            });
            if fits == 0 {
                return (ByteCount::ZERO, ByteCount(lost));
            }
            match self.stands(before.unwrap_or(0) + fits, 0, fits) {
                Ok(()) => return (ByteCount(fits), ByteCount(lost)),
                Err(taken) => lost += fits - taken.0,
            }
        }
    }

    /// Refused: what the shared budget has to be given back of these bytes.
    fn try_charge_own(&self, bytes: ByteCount, headroom: ByteCount) -> Result<(), ByteCount> {
        let before = self.change(|charged| {
            let after = charged.checked_add(bytes.0)?;
            (after.saturating_add(headroom.0) <= self.limit().0).then_some(after)
        });
        self.stands(before.ok_or(bytes)? + bytes.0, headroom.0, bytes.0)
    }

    /// Charges `bytes` whatever the limit: what the shared budget has been charged already.
    fn charge_own(&self, bytes: ByteCount) {
        let after = self.charged.fetch_add(bytes.0, Ordering::Relaxed) + bytes.0;
        self.charged_max.fetch_max(after, Ordering::Relaxed);
    }

    /// Passes `bytes` of this budget's charge on to another part of the same shared budget, which
    /// does not change. `false`, and nothing passed on, when the other's own limit forbids it.
    #[must_use]
    pub(crate) fn pass_on(&self, to: &Budget, bytes: ByteCount) -> bool {
        assert!(self.is_sibling_of(to), "bytes change hands within one budget only");
        if to.try_charge_own(bytes, ByteCount::ZERO).is_err() {
            return false;
        }
        self.give_up(bytes);
        true
    }

    /// Takes back what was passed on to `to`, whatever this budget's limit: others may have charged
    /// meanwhile what it had left.
    pub(crate) fn take_back(&self, to: &Budget, bytes: ByteCount) {
        assert!(self.is_sibling_of(to), "bytes change hands within one budget only");
        self.charge_own(bytes);
        to.give_up(bytes);
    }

    fn is_sibling_of(&self, other: &Budget) -> bool {
        match (&self.shared, &other.shared) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Takes a charge back.
    pub(crate) fn uncharge(&self, bytes: ByteCount) {
        let taken = self.uncharge_up_to(bytes);
        strict_assert!(taken == bytes, "uncharged {bytes} where {taken} were charged");
    }

    /// Takes back as much of `bytes` as is charged; returns how much that is. What was never
    /// charged is nobody's: taking it from others would let them exceed the limit, and below zero
    /// the count would be 16 EiB.
    pub(crate) fn uncharge_up_to(&self, bytes: ByteCount) -> ByteCount {
        let taken = self.take_own(bytes);
        if let Some(shared) = &self.shared {
            shared.uncharge(taken);
        }
        taken
    }

    /// Takes `bytes` back if so much is charged.
    #[must_use]
    pub(crate) fn try_uncharge(&self, bytes: ByteCount) -> bool {
        let rest = |charged: u64| charged.checked_sub(bytes.0);
        let taken = self.change(rest).is_some();
        if taken && let Some(shared) = &self.shared {
            shared.uncharge(bytes);
        }
        taken
    }

    /// Takes back as much of `bytes` as is charged here, and leaves the shared budget alone.
    fn take_own(&self, bytes: ByteCount) -> ByteCount {
        let before = self.change(|charged| Some(charged.saturating_sub(bytes.0)));
        bytes.min(ByteCount(before.unwrap_or(0)))
    }

    /// Changes what is charged to what `to` makes of it, unless that is `None`; returns what it was.
    fn change(&self, to: impl FnMut(u64) -> Option<u64>) -> Option<u64> {
        // The counter guards no data; the pages it counts are published by their words. Pairs with `set_limit`.
        self.charged.fetch_update(Ordering::AcqRel, Ordering::Relaxed, to).ok()
    }

    /// Takes back `bytes` that another part of the same shared budget has now.
    fn give_up(&self, bytes: ByteCount) {
        let missing = bytes.0 - self.take_own(bytes).0;
        if missing > 0 {
            // Somebody has taken back more of this part than was charged: the other's are new then.
            let shared = self.shared.as_ref().expect("a part");
            shared.charge_own(ByteCount(missing));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn charges_stop_at_the_limit_and_resume_after_an_uncharge() {
        let budget = Budget::new(ByteCount(100));
        assert!(budget.try_charge(ByteCount(60)));
        assert!(!budget.try_charge(ByteCount(41)));
        assert!(budget.try_charge(ByteCount(40)));
        budget.uncharge(ByteCount(1));
        assert_eq!(budget.free(), ByteCount(1));
        assert!(!budget.try_charge_leaving(ByteCount(1), ByteCount(1)));
        assert_eq!(budget.charged_max(), ByteCount(100));
    }

    #[test]
    fn a_lowered_limit_refuses_until_enough_is_uncharged() {
        let budget = Budget::new(ByteCount(100));
        assert!(budget.try_charge(ByteCount(80)));
        budget.set_limit(ByteCount(50));
        assert_eq!(budget.free(), ByteCount::ZERO);
        budget.uncharge(ByteCount(40));
        assert!(budget.try_charge(ByteCount(10)));
        assert!(!budget.try_charge(ByteCount(1)));
        assert!(!budget.try_charge(ByteCount(u64::MAX)));
    }

    #[test]
    fn what_is_passed_on_stays_charged_in_all() {
        let shared = Arc::new(Budget::new(ByteCount(100)));
        let a = Budget::under(Arc::clone(&shared), ByteCount(100));
        let b = Budget::under(Arc::clone(&shared), ByteCount(50));
        assert!(a.try_charge(ByteCount(100)));
        assert!(!a.pass_on(&b, ByteCount(51)), "beyond the other's limit");
        assert!(a.pass_on(&b, ByteCount(40)));
        assert_eq!((a.charged(), b.charged()), (ByteCount(60), ByteCount(40)));
        assert_eq!(shared.charged(), ByteCount(100));
    }

    #[test]
    fn a_partial_charge_takes_what_both_limits_leave() {
        let shared = Arc::new(Budget::new(ByteCount(100)));
        let a = Budget::under(Arc::clone(&shared), ByteCount(80));
        let b = Budget::under(Arc::clone(&shared), ByteCount(100));
        assert_eq!(a.charge_up_to(ByteCount(90)), ByteCount(80));
        assert_eq!(b.charge_up_to(ByteCount(90)), ByteCount(20));
        assert_eq!((b.own_free(), b.shared_free()), (ByteCount(80), Some(ByteCount::ZERO)));
        assert_eq!(b.charge_up_to(ByteCount(1)), ByteCount::ZERO);
        assert_eq!(shared.charged(), ByteCount(100));
    }

    #[test]
    fn what_was_never_charged_takes_nothing_from_others() {
        let shared = Arc::new(Budget::new(ByteCount(100)));
        let a = Budget::under(Arc::clone(&shared), ByteCount(100));
        let b = Budget::under(Arc::clone(&shared), ByteCount(100));
        assert!(a.try_charge(ByteCount(30)) && b.try_charge(ByteCount(50)));
        assert_eq!(a.uncharge_up_to(ByteCount(40)), ByteCount(30));
        assert!(!b.try_uncharge(ByteCount(51)));
        assert_eq!((a.charged(), b.charged()), (ByteCount::ZERO, ByteCount(50)));
        assert_eq!(shared.charged(), ByteCount(50));
        assert!(b.try_charge(ByteCount(50)));
        assert_eq!(shared.charged(), ByteCount(100));
        assert_eq!(b.uncharge_up_to(ByteCount(93)), ByteCount(93));
        assert_eq!((b.charged(), shared.charged()), (ByteCount(7), ByteCount(7)));
        assert!(b.try_uncharge(ByteCount(7)));
        assert_eq!(shared.charged(), ByteCount::ZERO);
    }

    #[test]
    fn a_charge_of_a_consumer_has_to_fit_its_own_limit_and_the_shared_one() {
        let shared = Arc::new(Budget::new(ByteCount(100)));
        let a = Budget::under(Arc::clone(&shared), ByteCount(80));
        let b = Budget::under(Arc::clone(&shared), ByteCount(100));
        assert!(!a.try_charge(ByteCount(81)));
        assert!(a.try_charge(ByteCount(70)));
        assert!(!b.try_charge(ByteCount(31)));
        assert_eq!(b.charged(), ByteCount::ZERO);
        assert_eq!((a.free(), b.free()), (ByteCount(10), ByteCount(30)));
        assert!(b.try_charge(ByteCount(30)));
        assert_eq!(a.free(), ByteCount::ZERO);
        a.uncharge(ByteCount(70));
        assert_eq!(shared.charged(), ByteCount(30));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_charges_of_two_threads_never_exceed_the_limit_and_none_is_lost() {
        loom::model(|| {
            let budget = Arc::new(Budget::new(ByteCount(100)));
            let charging = |bytes: u64| {
                let budget = Arc::clone(&budget);
                thread::spawn(move || {
                    let charged = budget.try_charge(ByteCount(bytes));
                    assert!(budget.charged().0 <= 100, "{} charged", budget.charged());
                    if charged {
                        budget.uncharge(ByteCount(bytes / 2));
                    }
                    charged
                })
            };
            let (one, other) = (charging(60), charging(80));
            let one = one.join().expect("no panic");
            let other = other.join().expect("no panic");
            assert!(one || other, "nobody was let in");
            let expected = u64::from(one) * 30 + u64::from(other) * 40;
            assert_eq!(budget.charged(), ByteCount(expected));
            assert!(budget.charged_max().0 <= 100);
        });
    }

    /// One consumer counts and charges the same account at once and takes back too much, while its
    /// limit is lowered: the figures stay sums, and another consumer's bytes stay.
    #[test]
    fn loom_an_account_that_is_counted_and_charged_at_once_never_wraps() {
        let mut builder = loom::model::Builder::new();
        // With four preemptions, or a third call of a thread, the three take more than minutes.
        builder.preemption_bound = Some(2);
        builder.check(|| {
            let shared = std::sync::Arc::new(Budget::new(ByteCount(100)));
            let part = || Budget::under(std::sync::Arc::clone(&shared), ByteCount(100));
            let (host, other) = (Arc::new(part()), part());
            assert!(other.try_charge(ByteCount(40)));
            let charging = thread::spawn({
                let host = Arc::clone(&host);
                move || host.charge_up_to(ByteCount(70))
            });
            let lowering = thread::spawn({
                let host = Arc::clone(&host);
                move || {
                    host.set_limit(ByteCount(50));
                    host.uncharge_up_to(ByteCount(5));
                }
            });
            let count = |bytes: u64| {
                let charged = host.charged().0;
                host.uncharge_up_to(ByteCount(charged.saturating_sub(bytes)));
                host.charge_up_to(ByteCount(bytes.saturating_sub(charged)));
            };
            count(10);
            assert!(host.charged().0 <= 100, "{}", host.charged());
            charging.join().expect("no panic");
            lowering.join().expect("no panic");
            assert!(host.charged().0 <= 80, "{}", host.charged());
            assert_eq!(shared.charged().0, host.charged().0 + other.charged().0);
            assert_eq!(other.charged(), ByteCount(40));
        });
    }
}
