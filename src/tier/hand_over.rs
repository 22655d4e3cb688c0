//! Memory that changes hands: what a consumer held becomes temporary memory, frames and all.
//!
//! Dropping pages and faulting in others costs 0.6 us a page, most of it zeroing. Moving the page
//! tables of whole 2 MiB costs a few us for 512 pages (`docs/design/pool.md`). Used by
//! `manager`; `pool` gives.
//!
//! # Invariants
//! 1. Bytes change from the giver's account to the taker's in one step that the shared budget does
//!    not see: what is charged in all stays the same.
//! 2. What lies in the taker's room and is not charged has no memory.
#![expect(unsafe_code, reason = "moves pages between mappings")]

use super::budget::Budget;
use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::sys::vm::{HUGE_PAGE, Mapping};

/// Moves after which no more are made: each may cost the kernel a mapping, and a process has
/// 65,530 of them.
const MOVES_MAX: usize = 8192;

/// Room for memory that changes hands; see [`Reclaim::hand_over`](super::manager::Reclaim).
#[derive(Debug)]
pub struct HandOver<'a> {
    room: &'a Mapping,
    to: &'a Budget,
    filled: usize,
    charged: u64,
    /// Bytes that may still be taken from the consumer that is asked.
    allowed: u64,
    moves: usize,
}

impl<'a> HandOver<'a> {
    pub(crate) fn new(room: &'a Mapping, to: &'a Budget) -> HandOver<'a> {
        HandOver { room, to, filled: 0, charged: 0, allowed: 0, moves: 0 }
    }

    /// Says how many bytes the next consumer may lose.
    pub(crate) fn allow(&mut self, bytes: ByteCount) {
        self.allowed = bytes.0;
    }

    /// Bytes that changed hands so far, charged to the taker.
    pub(crate) fn charged(&self) -> ByteCount {
        ByteCount(self.charged)
    }

    /// Bytes that can still be taken, in whole huge pages.
    pub(crate) fn wanted(&self) -> usize {
        if self.moves >= MOVES_MAX {
            return 0;
        }
        let room = self.room.len() - self.filled;
        room.min(self.allowed as usize) / HUGE_PAGE * HUGE_PAGE
    }

    /// Takes the memory of `[offset, offset + len)` of `from`, all multiples of a huge page, of
    /// which `bytes` are charged to `giver` and become the taker's. Returns where the contents are
    /// now; `None` when the taker's ceiling does not allow it.
    ///
    /// # Errors
    /// When the kernel refuses; nothing has changed then.
    ///
    /// # Safety
    /// Nobody but the caller uses the range of `from`, and no device does. What is in the range
    /// and not counted in `bytes`, the caller drops at its new place before it returns.
    pub(crate) unsafe fn take(
        &mut self,
        from: &Mapping,
        offset: usize,
        len: usize,
        giver: &Budget,
        bytes: ByteCount,
    ) -> Result<Option<*mut u8>> {
        assert!(len <= self.wanted(), "{len} bytes of {}", self.wanted());
        if !giver.pass_on(self.to, bytes) {
            return Ok(None);
        }
        // SAFETY: the caller's promise for the source; of the room, what lies above `filled` was
        // never touched and is nobody's.
        let moved = unsafe { from.move_pages(offset, len, self.room, self.filled) };
        if let Err(error) = moved {
            let back = self.to.pass_on(giver, bytes);
            assert!(back, "what was charged a moment ago fits");
            return Err(error);
        }
        let place = self.room.as_ptr().wrapping_add(self.filled);
        self.filled += len;
        self.charged += bytes.0;
        self.allowed = self.allowed.saturating_sub(bytes.0);
        self.moves += 1;
        Ok(Some(place))
    }
}
