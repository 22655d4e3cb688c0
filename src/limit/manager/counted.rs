//! Memory that nobody can take back: what was counted, and temporary memory.
//!
//! It is charged only as far as there is room beside what others' floors keep, also while their owners
//! do not use that. A region that cannot charge its floor can bring in no page: if memory that stays
//! took that room, the threads that use far memory would stop.

use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::limit::manager::member::Member;
use crate::limit::manager::shared::ManagerState;
use std::sync::Arc;

/// Bytes that the floors of others keep from a consumer.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    all: u64,
    /// Of these, what the others do not use at the moment.
    unused: u64,
}

impl ManagerState {
    /// Bytes that the floors of others keep from a consumer. They need their tables beside what their
    /// floors protect.
    fn kept_from(&self, asking: &Arc<Member>) -> Kept {
        let mut kept = Kept::default();
        let has_floor = |member: &Arc<Member>| member.floor() > ByteCount::ZERO;
        for member in self.each_member().filter(has_floor) {
            if Arc::ptr_eq(&member, asking) {
                continue;
            }
            let tables = member
                .reclaimer()
                .and_then(|reclaimer| self.guarded(&member, || reclaimer.metadata()))
                .unwrap_or_default();
            let bytes = member.floor().0.saturating_add(tables.0);
            kept.all = kept.all.saturating_add(bytes);
            let unused = bytes.saturating_sub(member.budget.charged().0);
            kept.unused = kept.unused.saturating_add(unused);
        }
        kept
    }

    /// Bytes that memory which nobody can take back may be charged without reclaiming.
    pub(super) fn room_beside_floors(&self, asking: &Arc<Member>) -> ByteCount {
        ByteCount(self.budget.own_free().0.saturating_sub(self.kept_from(asking).unused))
    }

    /// Charges temporary memory that fits without reclaiming.
    pub(super) fn try_charge_temporary(&self, bytes: ByteCount) -> bool {
        bytes <= self.room_beside_floors(&self.temporary) && self.temporary.budget.try_charge(bytes)
    }

    /// Charges what a consumer counted, `bytes` or what it had before, as far as there is room.
    /// Returns how much could not be charged.
    pub(super) fn count(&self, member: &Arc<Member>, bytes: Option<ByteCount>) -> ByteCount {
        let kept = self.kept_from(member);
        let most = ByteCount(self.budget.limit().0.saturating_sub(kept.all));
        let room = ByteCount(self.budget.own_free().0.saturating_sub(kept.unused));
        member.count(bytes, most, room)
    }

    /// Charges memory that was counted and for which there was no room, as others give way to it.
    /// `false`: they do not.
    pub(super) fn charge_counted(&self) -> bool {
        let is_counted = |member: &Arc<Member>| member.is_counted.load(Ordering::Relaxed);
        let mut found = true;
        for member in self.each_member().filter(is_counted) {
            let missing = self.count(&member, None);
            if missing > ByteCount::ZERO {
                found &= self.reclaim_for(&member, missing) > ByteCount::ZERO;
                self.count(&member, None);
            }
        }
        found
    }
}
