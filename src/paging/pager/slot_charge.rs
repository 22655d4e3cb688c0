//! The charge of tables that slots need before they are given out.
//!
//! A page written to make room needs a slot, so its tables cannot wait for room. Where the limit leaves
//! none, they are *due*: the frames that are freed next pay for them, before threads that wait for room can
//! have the memory. Each slot that is used frees a frame, so that the limit never keeps slots from being made.

use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::ByteCount;

/// See [module](self). Only the evictor makes something due; any thread frees frames.
#[derive(Debug, Default)]
pub(super) struct SlotCharge {
    due: AtomicU64,
    /// Bytes that stayed charged, and describe nothing yet.
    kept: AtomicU64,
}

impl SlotCharge {
    /// Of frames that are being freed, `bytes` in all, how much stays charged.
    pub(super) fn keep(&self, bytes: u64) -> u64 {
        let take = |due: u64| (due > 0).then(|| due - due.min(bytes));
        let order = Ordering::Relaxed;
        let kept = self.due.fetch_update(order, order, take).map_or(0, |due| due.min(bytes));
        if kept > 0 {
            self.kept.fetch_add(kept, Ordering::Relaxed);
        }
        kept
    }

    /// Nothing is due any more; what was kept is the caller's.
    pub(super) fn take(&self) -> u64 {
        self.due.store(0, Ordering::Relaxed);
        self.kept.swap(0, Ordering::Relaxed)
    }

    /// `bytes` are due; `kept` of them are charged, which the caller has taken.
    pub(super) fn put_back(&self, kept: u64, bytes: u64) {
        // A thread that had found something due before `take` may have added its part since.
        let kept = self.kept.fetch_add(kept, Ordering::Relaxed) + kept;
        self.due.store(bytes.saturating_sub(kept), Ordering::Relaxed);
    }

    /// Bytes that are charged and describe nothing yet.
    pub(super) fn kept(&self) -> ByteCount {
        ByteCount(self.kept.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn freed_frames_pay_what_is_due_and_no_more() {
        let charge = SlotCharge::default();
        assert_eq!(charge.keep(4096), 0, "nothing is due");
        charge.put_back(charge.take(), 4352);
        assert_eq!((charge.keep(4096), charge.keep(4096), charge.keep(4096)), (4096, 256, 0));
        assert_eq!(charge.kept(), ByteCount(4352));
        assert_eq!(charge.take(), 4352);
        charge.put_back(0, 4352);
        assert_eq!(charge.keep(1 << 21), 4352);
    }

    #[test]
    fn what_was_paid_in_part_counts_when_more_is_due() {
        let charge = SlotCharge::default();
        charge.put_back(0, 4352);
        assert_eq!(charge.keep(4096), 4096);
        let kept = charge.take();
        assert_eq!((kept, charge.keep(4096)), (4096, 0), "nobody pays meanwhile");
        charge.put_back(kept, 4352);
        assert_eq!((charge.keep(4096), charge.kept()), (256, ByteCount(4352)));
    }
}
