//! The two limits of a region: what the program asks for, and what the process has room for.
//!
//! The smaller one holds. Used by `advise`, on behalf of the program and of the heap's maintenance.

use crate::base::units::ByteCount;
use std::sync::{Mutex, PoisonError};

/// Both limits.
#[derive(Debug)]
pub(in crate::paging) struct TwoLimits(Mutex<Both>);

#[derive(Clone, Copy, Debug)]
struct Both {
    asked: ByteCount,
    room: ByteCount,
}

impl TwoLimits {
    pub(in crate::paging) fn new(asked: ByteCount) -> TwoLimits {
        TwoLimits(Mutex::new(Both { asked, room: ByteCount(u64::MAX) }))
    }

    /// Takes what the program asks for, and has the limit that holds set if it is another one.
    pub(in crate::paging) fn ask(&self, asked: ByteCount, set: impl FnOnce(ByteCount)) {
        self.change(|both| both.asked = asked, set);
    }

    /// Takes what there is room for, and has the limit that holds set if it is another one.
    #[cfg(feature = "heap")]
    pub(in crate::paging) fn leave(&self, room: ByteCount, set: impl FnOnce(ByteCount)) {
        self.change(|both| both.room = room, set);
    }

    /// Under the lock, so that of two that change a limit at once the later one's is set last.
    fn change(&self, change: impl FnOnce(&mut Both), set: impl FnOnce(ByteCount)) {
        let mut both = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = both.asked.min(both.room);
        change(&mut both);
        let now = both.asked.min(both.room);
        if now != before {
            set(now);
        }
    }
}
