//! The limit on resident bytes.
//!
//! [`Budget`] counts every byte of far memory that can be resident: pages mapped in the region
//! and staging frames. A charge comes before the memory exists, so resident never exceeds the
//! limit.
//!
//! A budget may be a consumer's part of a shared one ([`Budget::under`]): a charge then has to
//! fit both, and is counted in both.

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
    /// What all consumers together may charge.
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

    /// Whether a charge that was just made is still within the limit; takes it back if not.
    fn stands(&self, after: u64, headroom: u64, bytes: u64) -> bool {
        if after.saturating_add(headroom) > self.limit.load(Ordering::Relaxed) {
            self.charged.fetch_sub(bytes, Ordering::AcqRel);
            return false;
        }
        self.charged_max.fetch_max(after, Ordering::Relaxed);
        true
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
        if !self.try_charge_own(bytes, headroom) {
            return false;
        }
        let Some(shared) = &self.shared else { return true };
        let fits = shared.try_charge_own(bytes, headroom);
        if !fits {
            self.charged.fetch_sub(bytes.0, Ordering::Relaxed);
        }
        fits
    }

    /// Charges as much of `bytes` as fits; returns how much that is.
    pub(crate) fn charge_up_to(&self, bytes: ByteCount) -> ByteCount {
        let own = self.charge_own_up_to(bytes);
        let Some(shared) = &self.shared else { return own };
        let both = shared.charge_own_up_to(own);
        self.charged.fetch_sub(own.0 - both.0, Ordering::Relaxed);
        both
    }

    fn charge_own_up_to(&self, bytes: ByteCount) -> ByteCount {
        let mut charged = self.charged.load(Ordering::Relaxed);
        loop {
            let free = self.limit.load(Ordering::Relaxed).saturating_sub(charged);
            let fits = free.min(bytes.0);
            let after = charged + fits;
            match self.charged.compare_exchange_weak(
                charged,
                after,
                Ordering::AcqRel, // Pairs with `set_limit`.
                Ordering::Relaxed,
            ) {
                Ok(_) if fits == 0 || self.stands(after, 0, fits) => return ByteCount(fits),
                Ok(_) => charged = self.charged.load(Ordering::Relaxed),
                Err(now) => charged = now,
            }
        }
    }

    fn try_charge_own(&self, bytes: ByteCount, headroom: ByteCount) -> bool {
        // The counter guards no data; the pages it counts are published by their words.
        let mut charged = self.charged.load(Ordering::Relaxed);
        loop {
            let Some(after) = charged.checked_add(bytes.0) else { return false };
            if after.saturating_add(headroom.0) > self.limit.load(Ordering::Relaxed) {
                return false;
            }
            match self.charged.compare_exchange_weak(
                charged,
                after,
                Ordering::AcqRel, // Pairs with `set_limit`.
                Ordering::Relaxed,
            ) {
                Ok(_) => return self.stands(after, headroom.0, bytes.0),
                Err(now) => charged = now,
            }
        }
    }

    /// Charges `bytes` whatever the limit, for memory by which more is about to be freed.
    pub(crate) fn charge(&self, bytes: ByteCount) {
        self.charge_own(bytes);
        if let Some(shared) = &self.shared {
            shared.charge(bytes);
        }
    }

    fn charge_own(&self, bytes: ByteCount) {
        let after = self.charged.fetch_add(bytes.0, Ordering::Relaxed) + bytes.0;
        self.charged_max.fetch_max(after, Ordering::Relaxed);
    }

    /// Passes `bytes` of this budget's charge on to another part of the same shared budget, which
    /// does not change. `false`, and nothing passed on, when the other's own limit forbids it.
    #[must_use]
    pub(crate) fn pass_on(&self, to: &Budget, bytes: ByteCount) -> bool {
        assert!(self.is_sibling_of(to), "bytes change hands within one budget only");
        let fits = to.try_charge_own(bytes, ByteCount::ZERO);
        if fits {
            self.uncharge_own(bytes);
        }
        fits
    }

    /// Takes back what was passed on to `to`, whatever this budget's limit: others may have charged
    /// meanwhile what it had left.
    pub(crate) fn take_back(&self, to: &Budget, bytes: ByteCount) {
        assert!(self.is_sibling_of(to), "bytes change hands within one budget only");
        self.charge_own(bytes);
        to.uncharge_own(bytes);
    }

    fn is_sibling_of(&self, other: &Budget) -> bool {
        match (&self.shared, &other.shared) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Takes a charge back.
    pub(crate) fn uncharge(&self, bytes: ByteCount) {
        self.uncharge_own(bytes);
        if let Some(shared) = &self.shared {
            shared.uncharge(bytes);
        }
    }

    fn uncharge_own(&self, bytes: ByteCount) {
        let before = self.charged.fetch_sub(bytes.0, Ordering::Relaxed);
        strict_assert!(before >= bytes.0, "uncharged {bytes} of {before} bytes");
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
}
