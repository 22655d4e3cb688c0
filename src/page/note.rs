//! What is known of the content of a staging frame while a page word names the frame.
//!
//! A page's word has room for the frame only; page and slot stand in the frame's [`Note`], and so
//! does the [`Fate`] by which one hand tells another that it is done with the frame.
//!
//! # Invariants
//! 1. A note is written by the frame's owner before a word names the frame, and not again before
//!    the frame is the owner's once more.
//! 2. Who reads a note owns the frame or has just won the change of the word that names it. A note
//!    read *before* that change may be of an earlier round of the same frame.

#![expect(unsafe_code, reason = "a note of atomics is valid when zero")]

use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::base::units::{PageId, SlotId};

/// What became of a frame's content once its page left `Cooling` or `Writing` by another hand
/// than the evictor's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Fate {
    /// Nobody took it, or the taker is still at work.
    Open = 0,
    /// A filler moved the memory back into the region; the frame has none.
    MovedBack = 1,
    /// The content is not needed any more; the frame still has its memory.
    Dropped = 2,
}

/// A frame's note.
#[derive(Debug, Default)]
pub(crate) struct Note {
    page: AtomicU64,
    /// The page's slot, plus 1; 0 for none.
    slot: AtomicU64,
    fate: AtomicU32,
    /// 1: nobody has been seen to use the page since it was read ahead.
    prefetched: AtomicU32,
    /// 1: the page was mapped writable on the guess that it will be written.
    guessed: AtomicU32,
}
// SAFETY: five atomic integers, for which zero is valid.
#[cfg(not(loom))]
unsafe impl crate::meta::Zeroed for Note {}

impl Note {
    /// Notes what the frame holds before the page's word names it.
    pub(crate) fn write(&self, page: PageId, slot: Option<SlotId>) {
        // Relaxed: published by the change of the word.
        self.page.store(page.0, Ordering::Relaxed);
        self.slot.store(slot.map_or(0, |slot| slot.0 + 1), Ordering::Relaxed);
        self.fate.store(Fate::Open as u32, Ordering::Relaxed);
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

    /// Tells the frame's owner what became of the content; the last thing a taker does with it.
    pub(crate) fn decide(&self, fate: Fate) {
        // Pairs with the acquire in `fate`: the owner reuses the frame after the taker's work.
        self.fate.store(fate as u32, Ordering::Release);
    }

    pub(crate) fn fate(&self) -> Fate {
        match self.fate.load(Ordering::Acquire) {
            1 => Fate::MovedBack,
            2 => Fate::Dropped,
            _ => Fate::Open,
        }
    }
}
