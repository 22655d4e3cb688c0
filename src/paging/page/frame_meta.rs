//! The record of a staging frame's content, kept while a page word names the frame.
//!
//! A page's word has room for the frame only; page and slot stand in the frame's [`FrameMeta`], and so
//! does the [`FrameOutcome`] by which one hand tells another that it is done with the frame.
//!
//! # Invariants
//! 1. It is written by the frame's owner before a word names the frame, and not again before
//!    the frame is the owner's once more.
//! 2. A reader owns the frame or has just won the change of the word that names it. What was
//!    read *before* that change may be of an earlier round of the same frame.
//! 3. A read that was revoked leaves the page to the revoker. Frame and slot stay the reader's, for
//!    the device uses them: it frees them when the read has returned and the revoker has changed the
//!    page's word.
//!
//! ```text
//!                begin_read (owner)                 end_read (owner)
//!   no read ------------------------> under way -----------------------> no read, the page is the owner's
//!      ^                                  | revoke_read (watchdog)
//!      |     end_read (owner): false      v
//!      +------------------------------ revoked, the page is the watchdog's
//! ```

#![expect(unsafe_code, reason = "a struct of atomics is valid when zero")]

use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::base::units::{PageId, SlotId};

/// Outcome of a frame's content once its page left `Cooling` or `Writing` by another hand
/// than the evictor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum FrameOutcome {
    /// Nobody took it, or the taker is still at work.
    Open = 0,
    /// A handler moved the memory back into the region; the frame has none.
    MovedBack = 1,
    /// The content is not needed any more; the frame still has its memory.
    Dropped = 2,
}

/// The record of a frame's content.
#[derive(Debug, Default)]
pub(crate) struct FrameMeta {
    page: AtomicU64,
    /// The page's slot, plus 1; 0 for none.
    slot: AtomicU64,
    outcome: AtomicU32,
    /// 1: nobody has been seen to use the page since it was read ahead.
    prefetched: AtomicU32,
    /// 1: the page was mapped writable on the guess that it will be written.
    guessed: AtomicU32,
    /// Reads by a thread that waits for them (in-thread mode): 63..32 the thread's id | 31..2 count |
    /// 1..0 none, under way or revoked. The count tells one from the next.
    read: AtomicU64,
}

const READ_STATE: u64 = 3;
const UNDER_WAY: u64 = 1;
const REVOKED: u64 = 2;
const READ_COUNT_ONE: u64 = 4;
const READ_THREAD_SHIFT: u32 = 32;

/// One read by a thread that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadTurn(u64);

impl ReadTurn {
    /// The thread that reads.
    pub(crate) fn thread(self) -> u32 {
        (self.0 >> READ_THREAD_SHIFT) as u32
    }
}

// SAFETY: six atomic integers, for which zero is valid.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for FrameMeta {}

impl FrameMeta {
    /// Notes what the frame holds before the page's word names it; nothing else is known of it then.
    pub(crate) fn write(&self, page: PageId, slot: Option<SlotId>) {
        // Relaxed: published by the change of the word.
        self.page.store(page.0, Ordering::Relaxed);
        self.slot.store(slot.map_or(0, |slot| slot.0 + 1), Ordering::Relaxed);
        self.outcome.store(FrameOutcome::Open as u32, Ordering::Relaxed);
        self.prefetched.store(0, Ordering::Relaxed);
        self.guessed.store(0, Ordering::Relaxed);
    }

    /// The page whose content the frame holds.
    pub(crate) fn page(&self) -> PageId {
        PageId(self.page.load(Ordering::Relaxed))
    }

    /// The page's slot: an older or equal copy.
    pub(crate) fn slot(&self) -> Option<SlotId> {
        self.slot.load(Ordering::Relaxed).checked_sub(1).map(SlotId)
    }

    /// The page has no slot any more: it is the frame's owner's.
    pub(crate) fn forget_slot(&self) {
        self.slot.store(0, Ordering::Relaxed);
    }

    /// Notes, beside `write`, whether the page was read ahead and not seen used.
    pub(crate) fn set_prefetched(&self, prefetched: bool) {
        self.prefetched.store(u32::from(prefetched), Ordering::Relaxed);
    }

    pub(crate) fn prefetched(&self) -> bool {
        self.prefetched.load(Ordering::Relaxed) != 0
    }

    /// Notes, beside `write`, whether the page was mapped writable on a guess.
    pub(crate) fn set_guessed(&self, guessed: bool) {
        self.guessed.store(u32::from(guessed), Ordering::Relaxed);
    }

    pub(crate) fn guessed(&self) -> bool {
        self.guessed.load(Ordering::Relaxed) != 0
    }

    /// The owner, a thread that waits for it, begins a read into the frame that the page's word names.
    pub(crate) fn begin_read(&self, thread: u32) {
        // Relaxed: only the owner begins and ends.
        let before = self.read.load(Ordering::Relaxed);
        let count = (before & !READ_STATE).wrapping_add(READ_COUNT_ONE) & u64::from(u32::MAX);
        let turn = u64::from(thread) << READ_THREAD_SHIFT | count | UNDER_WAY;
        // Pairs with the acquire in `read_under_way`: page and slot are this read's.
        self.read.store(turn, Ordering::Release);
    }

    /// The read has returned. `false`: it was revoked; the page is not the owner's any more.
    #[must_use]
    pub(crate) fn end_read(&self) -> bool {
        let under_way = self.read.load(Ordering::Relaxed) & !READ_STATE | UNDER_WAY;
        let ended = under_way & !READ_STATE;
        let (order, other) = (Ordering::AcqRel, Ordering::Acquire);
        let is_ours = self.read.compare_exchange(under_way, ended, order, other).is_ok();
        if !is_ours {
            // Only the owner changes it from here on.
            self.read.store(ended, Ordering::Release);
        }
        is_ours
    }

    /// The read that is under way, if there is one.
    pub(crate) fn read_under_way(&self) -> Option<ReadTurn> {
        let turn = self.read.load(Ordering::Acquire);
        (turn & READ_STATE == UNDER_WAY).then_some(ReadTurn(turn))
    }

    /// Takes the page from a read that does not end. `true`: the page's word is the caller's to
    /// change, at once, for the reader may wait for that.
    #[must_use]
    pub(crate) fn revoke_read(&self, turn: ReadTurn) -> bool {
        let revoked = turn.0 & !READ_STATE | REVOKED;
        let (order, other) = (Ordering::AcqRel, Ordering::Acquire);
        self.read.compare_exchange(turn.0, revoked, order, other).is_ok()
    }

    /// Tells the frame's owner what became of the content; the last thing a taker does with it.
    pub(crate) fn decide(&self, outcome: FrameOutcome) {
        // Pairs with the acquire in `outcome`: the owner reuses the frame after the taker's work.
        self.outcome.store(outcome as u32, Ordering::Release);
    }

    pub(crate) fn outcome(&self) -> FrameOutcome {
        match self.outcome.load(Ordering::Acquire) {
            1 => FrameOutcome::MovedBack,
            2 => FrameOutcome::Dropped,
            _ => FrameOutcome::Open,
        }
    }
}
