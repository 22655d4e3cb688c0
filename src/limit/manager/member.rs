//! A consumer as the manager keeps it.

use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;
use crate::limit::manager::consumer::Reclaim;
use crate::limit::manager::stats::ConsumerCounts;
use std::fmt::{self, Debug};
use std::sync::{Arc, Weak};

/// One consumer: its part of the budget, and what the manager knows of it.
pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) budget: Arc<Budget>,
    pub(super) wishes: Wishes,
    pub(super) reclaimer: Ranked<Option<Weak<dyn Reclaim>>>,
    /// Held while what is charged follows what was counted.
    counting: Ranked<()>,
    /// Its memory is counted: it exists already, and nobody can evict it.
    pub(super) is_counted: AtomicBool,
    /// Bytes that were counted and that there was no room to charge.
    pub(super) uncharged: AtomicU64,
    /// Its reclaimer panicked.
    pub(super) broken: AtomicBool,
    /// Bytes it asks others for without waiting.
    pub(super) asks: AtomicU64,
    /// These are worth writing others' data for.
    pub(super) asks_for_writes: AtomicBool,
    pub(super) counts: ConsumerCounts,
}

/// Wishes of a consumer's owner, in bytes.
pub(super) struct Wishes {
    pub(super) floor: AtomicU64,
    /// Its floor is never less: what it needs to work.
    pub(super) floor_min: AtomicU64,
    /// As set; what the limit allows may be less.
    pub(super) ceiling: AtomicU64,
}

impl Member {
    pub(super) fn new(budget: &Arc<Budget>, name: &str, share: ByteCount) -> Arc<Member> {
        Arc::new(Member {
            name: Arc::from(name),
            budget: Arc::new(Budget::under(Arc::clone(budget), share)),
            wishes: Wishes {
                floor: AtomicU64::new(0),
                floor_min: AtomicU64::new(0),
                ceiling: AtomicU64::new(u64::MAX),
            },
            reclaimer: Ranked::new(Rank::Leaf, None),
            counting: Ranked::new(Rank::Leaf, ()),
            is_counted: AtomicBool::new(false),
            uncharged: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            asks: AtomicU64::new(0),
            asks_for_writes: AtomicBool::new(false),
            counts: ConsumerCounts::default(),
        })
    }

    pub(super) fn floor(&self) -> ByteCount {
        ByteCount(self.wishes.floor.load(Ordering::Relaxed))
    }

    /// Bytes that it has: charged, or counted without room to charge them.
    pub(super) fn held(&self) -> ByteCount {
        ByteCount(self.budget.charged().0 + self.uncharged.load(Ordering::Relaxed))
    }

    /// Charges what was counted: `bytes`, or what it had before, up to `most`, and growth only as far
    /// as `room` goes. Returns how much could not be charged.
    pub(super) fn count(
        &self,
        bytes: Option<ByteCount>,
        most: ByteCount,
        room: ByteCount,
    ) -> ByteCount {
        let _counting = self.counting.lock();
        self.is_counted.store(true, Ordering::Relaxed);
        let (bytes, charged) = (bytes.unwrap_or_else(|| self.held()), self.budget.charged());
        let wanted = bytes.min(most);
        self.budget.uncharge_up_to(ByteCount(charged.0.saturating_sub(wanted.0)));
        let growth = ByteCount(wanted.0.saturating_sub(charged.0)).min(room);
        let charged = charged.min(wanted).0 + self.budget.charge_up_to(growth).0;
        let missing = bytes.0.saturating_sub(charged);
        self.uncharged.store(missing, Ordering::Relaxed);
        ByteCount(missing)
    }

    /// Reclaimer of its memory, unless it has panicked before.
    pub(super) fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        if self.broken.load(Ordering::Acquire) {
            return None;
        }
        self.reclaimer.lock().as_ref().and_then(Weak::upgrade)
    }

    /// Applies its share of the limit; returns whether its ceiling changes by that. The caller holds
    /// the lock on shares.
    pub(super) fn set_share(&self, share: ByteCount) -> bool {
        let ceiling = ByteCount(self.wishes.ceiling.load(Ordering::Relaxed).min(share.0));
        let is_other = self.budget.limit() != ceiling;
        if is_other {
            self.budget.set_limit(ceiling);
        }
        is_other
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.budget.uncharge(self.budget.charged());
    }
}

impl Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.budget)
    }
}
