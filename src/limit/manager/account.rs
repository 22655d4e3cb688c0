//! A consumer's hold on its part of the budget.

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;
use crate::limit::manager::consumer::{Reclaim, ReclaimCost};
use crate::limit::manager::member::Member;
use crate::limit::manager::report::Pressure;
use crate::limit::manager::shared::ManagerState;
use crate::sys::messages;
use std::fmt::{self, Debug};
use std::sync::{Arc, Weak};

/// A consumer's part of the budget; leaves the manager when the last clone is dropped.
#[derive(Clone)]
pub struct Account {
    member: Arc<Member>,
    manager: Weak<ManagerState>,
}

impl Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.member.fmt(f)
    }
}

impl Account {
    pub(super) fn new(member: Arc<Member>, shared: &Arc<ManagerState>) -> Account {
        Account { member, manager: Arc::downgrade(shared) }
    }

    pub(super) fn member(&self) -> &Arc<Member> {
        &self.member
    }

    /// The name it joined with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.member.name
    }

    /// Sets what gives this consumer's memory back. Without a reclaimer its memory is only counted.
    pub fn set_reclaimer(&self, reclaimer: Weak<dyn Reclaim>) {
        *self.member.reclaimer.lock() = Some(reclaimer);
        self.member.broken.store(false, Ordering::Release);
    }

    /// Protects `floor` bytes of this consumer from the others. It may fall below by itself. A far heap
    /// keeps at least what it needs to serve faults: 8 MiB.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] when all floors together would exceed the limit: the old one stays.
    pub fn set_floor(&self, floor: ByteCount) -> Result<()> {
        let manager = self.manager.upgrade();
        let shares = manager.as_ref().map(|manager| manager.shares.lock());
        let floor = floor.0.max(self.member.wishes.floor_min.load(Ordering::Relaxed));
        let old = self.member.wishes.floor.swap(floor, Ordering::Relaxed);
        let Some(manager) = &manager else { return Ok(()) };
        let (floors, limit) = (manager.floors(), manager.budget.limit());
        if floors > limit {
            self.member.wishes.floor.store(old, Ordering::Relaxed);
            let reason = format!("floors of {floors} in all do not fit a limit of {limit}");
            return Err(Error::LimitExceeded { reason });
        }
        drop(shares);
        manager.apply_shares();
        Ok(())
    }

    /// Says what this consumer cannot work without: its floor from now on, and never less.
    ///
    /// # Errors
    /// As [`set_floor`](Self::set_floor).
    pub(crate) fn need(&self, bytes: ByteCount) -> Result<()> {
        self.member.wishes.floor_min.store(bytes.0, Ordering::Relaxed);
        self.set_floor(bytes)
    }

    /// Bounds this consumer. What it holds above that is reclaimed in the background.
    pub fn set_ceiling(&self, ceiling: ByteCount) {
        self.member.wishes.ceiling.store(ceiling.0, Ordering::Relaxed);
        if let Some(manager) = self.manager.upgrade() {
            manager.apply_shares();
            manager.bell.ring();
        }
    }

    /// Bytes that this consumer has: those charged, or, where more were counted
    /// ([`set_used`](Self::set_used)) than there was room to charge, those counted.
    #[must_use]
    pub fn held(&self) -> ByteCount {
        self.member.held()
    }

    /// Bytes charged.
    #[must_use]
    pub fn used(&self) -> ByteCount {
        self.member.budget.charged()
    }

    /// Bytes protected from the others.
    #[must_use]
    pub fn floor(&self) -> ByteCount {
        self.member.floor()
    }

    /// The most that may be charged.
    #[must_use]
    pub fn ceiling(&self) -> ByteCount {
        self.member.budget.limit()
    }

    /// Charges `bytes` if they fit without reclaiming.
    #[must_use]
    pub fn try_charge(&self, bytes: ByteCount) -> bool {
        self.member.budget.try_charge(bytes)
    }

    /// Takes a charge back. Of more than is charged, what is charged; the rest is a mistake of the
    /// caller's, which is counted ([`ConsumerStats::miscounted_bytes`](crate::limit::manager::ConsumerStats)), told
    /// once on standard error and each time as [`Pressure::Miscounted`](crate::limit::manager::Pressure), and takes
    /// nothing from other consumers.
    pub fn uncharge(&self, bytes: ByteCount) {
        let missing = bytes.0 - self.member.budget.uncharge_up_to(bytes).0;
        if missing > 0 {
            self.miscounted(ByteCount(missing));
        }
    }

    /// Takes `bytes` back if so much is charged; else nothing, and returns `false`.
    #[must_use]
    pub fn try_uncharge(&self, bytes: ByteCount) -> bool {
        self.member.budget.try_uncharge(bytes)
    }

    #[cold]
    fn miscounted(&self, bytes: ByteCount) {
        let _ours = keep_local();
        self.member.counts.miscounted.add(bytes.0);
        if !self.member.counts.miscount_told.swap(true, Ordering::Relaxed) {
            messages::warn(
                "a consumer of a memory manager has taken back more than it had charged",
                format_args!(
                    "consumer \"{}\" of a memory manager has taken back {bytes} more than it had \
                     charged; its figures are too low from now on (said once)",
                    self.name()
                ),
            );
            messages::flush();
        }
        if let Some(manager) = self.manager.upgrade() {
            manager.tell(Pressure::Miscounted { consumer: Arc::clone(&self.member.name), bytes });
        }
    }

    /// Counts `bytes` to this consumer, for memory that exists already, such as a library's that can
    /// only be counted. They are charged as far as there is room beside what others' floors keep, the
    /// rest as others give way, in the background: until then it is [held](Self::held), but not used.
    /// For accounts that nothing else charges: what is charged beside it, this takes back, and
    /// [`uncharge`](Self::uncharge) finds it missing.
    pub fn set_used(&self, bytes: ByteCount) {
        let Some(manager) = self.manager.upgrade() else { return };
        if manager.count(&self.member, Some(bytes)) > ByteCount::ZERO {
            manager.bell.ring();
        }
        manager.call_if_low();
    }

    /// True if there are others to give way: the manager may have ended.
    pub(crate) fn may_ask(&self) -> bool {
        self.manager.strong_count() > 0
    }

    /// The budget of a consumer that charges by itself, such as a region.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.member.budget
    }

    /// Asks others for memory without waiting, from a thread that must not wait, at no more than
    /// `cost` ([`ReclaimCost::Reread`] or above): what they gave is told by [`Reclaim::room_made`].
    pub(crate) fn ask(&self, want: ByteCount, cost: ReclaimCost) {
        self.member.asks_for_writes.store(cost == ReclaimCost::WriteBack, Ordering::Relaxed);
        self.member.asks.fetch_max(want.0, Ordering::Relaxed);
        match self.manager.upgrade() {
            Some(manager) => manager.bell.ring(),
            None => self.member.asks.store(0, Ordering::Relaxed),
        }
    }
}
