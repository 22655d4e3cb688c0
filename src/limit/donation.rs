//! Memory that changes hands: what a consumer held becomes temporary memory, frames and all.
//!
//! Dropping pages and faulting in others costs 0.6 us a page, most of it zeroing. Moving the page
//! tables of whole 2 MiB costs a few us for 512 pages (`book/src/design/pool.md`). Used by
//! `manager`; `pool` gives.
//!
//! # Invariants
//! 1. Bytes change from the giver's account to the taker's in one step that the shared budget does
//!    not see: what is charged in all stays the same.
//! 2. What lies in the taker's room and is not charged has no memory.
//! 3. Once a move has failed there are no more: the room has a part that may not be its own.
#![expect(unsafe_code, reason = "moves pages between mappings")]

use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;
use crate::sys::vm::{HUGE_PAGE, Mapping};
use std::ops::Range;

/// Moves after which no more are made: each may cost the kernel a mapping, and a process has
/// 65,530 of them.
const MOVES_MAX: usize = 8192;

/// Room for memory that changes hands; see [`Reclaim::donate`](crate::limit::manager::Reclaim).
#[derive(Debug)]
pub struct Donation<'a> {
    room: &'a Mapping,
    to: &'a Budget,
    filled: usize,
    charged: u64,
    /// Bytes that may still be taken from the consumer that is asked.
    allowed: u64,
    moves: usize,
    /// Where a move failed.
    lost: Option<Range<usize>>,
}

impl<'a> Donation<'a> {
    pub(crate) fn new(room: &'a Mapping, to: &'a Budget) -> Donation<'a> {
        Donation { room, to, filled: 0, charged: 0, allowed: 0, moves: 0, lost: None }
    }

    /// Says how many bytes the next consumer may lose.
    pub(crate) fn allow(&mut self, bytes: ByteCount) {
        self.allowed = bytes.0;
    }

    /// Bytes that changed hands so far, charged to the taker.
    pub(crate) fn charged(&self) -> ByteCount {
        ByteCount(self.charged)
    }

    /// The part of the room that may not be its own any more, because a move failed.
    pub(super) fn lost(&self) -> Option<Range<usize>> {
        self.lost.clone()
    }

    /// Bytes that can still be taken, in whole huge pages.
    pub(crate) fn wanted(&self) -> usize {
        if self.moves >= MOVES_MAX || self.lost.is_some() {
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
    /// When the kernel refuses: the range of `from` and its charge are as they were, and nothing
    /// more is [wanted](Self::wanted).
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
        assert!(len > 0 && len <= self.wanted(), "{len} bytes of {}", self.wanted());
        if !giver.pass_on(self.to, bytes) {
            return Ok(None);
        }
        // SAFETY: the caller's promise for the source; of the room, what lies above `filled` was
        // never touched and is nobody's, for no move has failed (asserted above, by `wanted`).
        let moved = unsafe { from.move_pages(offset, len, self.room, self.filled) };
        if let Err(error) = moved {
            giver.take_back(self.to, bytes);
            self.lost = Some(self.filled..self.filled + len);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::sync::{AtomicBool, Ordering};
    use crate::sys::vm::Huge;
    use std::sync::Arc;

    const HUGE: ByteCount = ByteCount(HUGE_PAGE as u64);

    #[test]
    #[cfg_attr(miri, ignore = "moves pages")]
    fn a_giver_that_was_charged_again_meanwhile_gets_back_what_could_not_be_moved() {
        let shared = Arc::new(Budget::new(ByteCount::mib(64)));
        let giver = Budget::under(Arc::clone(&shared), HUGE);
        let taker = Budget::under(Arc::clone(&shared), ByteCount::mib(64));
        assert!(giver.try_charge(HUGE));
        let room = Mapping::reserve(HUGE_PAGE, HUGE_PAGE, Huge::No).expect("2 MiB map");
        let is_charged_again = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !giver.try_charge(HUGE) {
                    std::hint::spin_loop();
                }
                is_charged_again.store(true, Ordering::Relaxed);
            });
            while !is_charged_again.load(Ordering::Relaxed) {
                let mut donation = Donation::new(&room, &taker);
                donation.allow(HUGE);
                // The kernel refuses ranges that overlap (EINVAL), after the bytes were passed on.
                // SAFETY: nobody uses the range, and it holds nothing.
                let taken = unsafe { donation.take(&room, 0, HUGE_PAGE, &giver, HUGE) };
                assert!(taken.is_err(), "{taken:?}");
            }
        });
        assert_eq!(giver.charged(), ByteCount::mib(4), "above its limit of 2 MiB for now");
        assert_eq!((taker.charged(), shared.charged()), (ByteCount::ZERO, ByteCount::mib(4)));
    }
}
