//! Staging frames: the memory through which pages come and go.
//!
//! The staging area is a range of page-sized slots next to the region. A *spare* frame has
//! memory (and a charge in the budget) and waits for a fill; an *empty* one is just an address
//! that an evicted page can be moved to. Device reads land in frames, MOVE carries a frame into
//! the region and back, so that memory circulates and is neither allocated nor freed on the way.
//!
//! # Invariants
//! 1. A frame is on at most one list; whoever took it off owns its memory.
//! 2. A frame on the empty list has no page mapped.
#![expect(unsafe_code, reason = "drops the pages of frames it owns")]

use super::note::{Fate, Note};
use super::word::FrameId;
use crate::base::error::Result;
use crate::base::strict_assert;
use crate::base::sync::{AtomicUsize, Ordering, Rank, Ranked};
use crate::base::units::{PageId, SlotId};
use crate::meta::LazyArray;
use crate::sys::vm::{Huge, Mapping};

/// The staging area and its lists.
#[derive(Debug)]
pub(crate) struct Frames {
    staging: Mapping,
    page_bytes: usize,
    lists: Ranked<Lists>,
    /// Length of the spare list, readable without the lock.
    spare_len: AtomicUsize,
    notes: LazyArray<Note>,
}

#[derive(Debug)]
struct Lists {
    empty: Vec<FrameId>,
    spare: Vec<FrameId>,
}

impl Frames {
    /// Reserves `count` frames of `page_bytes` each, all empty.
    ///
    /// # Errors
    /// When the address space is not to be had.
    pub(crate) fn new(count: usize, page_bytes: usize, huge: Huge) -> Result<Frames> {
        let staging = Mapping::reserve(count * page_bytes, page_bytes, huge)?;
        let last = u32::try_from(count).expect("frame counts are small");
        let empty = (0..last).rev().map(FrameId).collect();
        Ok(Frames {
            staging,
            page_bytes,
            lists: Ranked::new(Rank::Frames, Lists { empty, spare: Vec::with_capacity(count) }),
            spare_len: AtomicUsize::new(0),
            notes: LazyArray::new(count)?,
        })
    }

    pub(crate) fn count(&self) -> usize {
        self.notes.len()
    }

    /// First address and bytes of the staging area.
    pub(crate) fn range(&self) -> (usize, usize) {
        (self.staging.addr(), self.staging.len())
    }

    /// Allows core dumps to contain the frames.
    pub(crate) fn include_in_dumps(&self) -> Result<()> {
        self.staging.include_in_dumps()
    }

    pub(crate) fn addr(&self, frame: FrameId) -> usize {
        self.staging.addr() + frame.0 as usize * self.page_bytes
    }

    pub(crate) fn ptr(&self, frame: FrameId) -> *mut u8 {
        self.addr(frame) as *mut u8
    }

    /// Frames that have memory and wait for a fill.
    pub(crate) fn spare_len(&self) -> usize {
        self.spare_len.load(Ordering::Relaxed)
    }

    pub(crate) fn take_spare(&self) -> Option<FrameId> {
        if self.spare_len() == 0 {
            return None;
        }
        let mut lists = self.lists.lock();
        let frame = lists.spare.pop();
        self.spare_len.store(lists.spare.len(), Ordering::Relaxed);
        frame
    }

    pub(crate) fn take_empty(&self) -> Option<FrameId> {
        self.lists.lock().empty.pop()
    }

    pub(crate) fn put_spare(&self, frame: FrameId) {
        let mut lists = self.lists.lock();
        strict_assert!(lists.spare.len() < lists.spare.capacity(), "{frame:?} is listed twice");
        lists.spare.push(frame);
        self.spare_len.store(lists.spare.len(), Ordering::Relaxed);
    }

    /// Lists a frame without memory.
    pub(crate) fn put_empty(&self, frame: FrameId) {
        let mut lists = self.lists.lock();
        strict_assert!(lists.empty.len() < self.count(), "{frame:?} is listed twice");
        lists.empty.push(frame);
    }

    /// Gives the frame's memory back to the kernel and lists it as empty.
    ///
    /// # Errors
    /// When the kernel refuses; the frame is then lost to the lists, which is safe.
    pub(crate) fn release(&self, frame: FrameId) -> Result<()> {
        let offset = frame.0 as usize * self.page_bytes;
        // SAFETY: the caller took the frame off the lists and gives it up (invariant 1).
        unsafe { self.staging.discard(offset, self.page_bytes) }?;
        self.put_empty(frame);
        Ok(())
    }

    /// The frame's note.
    pub(crate) fn note_of(&self, frame: FrameId) -> &Note {
        &self.notes[frame.0 as usize]
    }

    /// Notes what a frame holds before its page's word names it.
    pub(crate) fn note(&self, frame: FrameId, page: PageId, slot: Option<SlotId>) {
        self.note_of(frame).write(page, slot);
    }

    /// The page a frame was noted with. Pairs with the word change that published the frame.
    pub(crate) fn page(&self, frame: FrameId) -> PageId {
        self.note_of(frame).page()
    }

    /// The slot a frame was noted with; for its owner.
    pub(crate) fn slot(&self, frame: FrameId) -> Option<SlotId> {
        self.note_of(frame).slot()
    }

    /// Makes the slot the caller's: the frame's page has none any more.
    pub(crate) fn forget_slot(&self, frame: FrameId) {
        self.notes[frame.0 as usize].forget_slot();
    }

    /// Tells the evictor what became of the content; the last thing a taker does with a frame.
    pub(crate) fn decide(&self, frame: FrameId, fate: Fate) {
        self.note_of(frame).decide(fate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_go_round_between_the_lists() {
        let frames = Frames::new(2, 4096, Huge::No).expect("two frames map");
        assert_eq!(frames.take_spare(), None);
        let a = frames.take_empty().expect("two are empty");
        let b = frames.take_empty().expect("one is empty");
        assert_eq!(frames.take_empty(), None);
        frames.put_spare(a);
        assert_eq!(frames.take_spare(), Some(a));
        frames.release(b).expect("own memory drops");
        assert_eq!(frames.take_empty(), Some(b));
    }
}
