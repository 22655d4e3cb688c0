//! Staging frames: the memory through which pages come and go.
//!
//! The staging area is a range of page-sized slots next to the region. A *spare* frame has
//! memory (and a charge in the budget) and waits for a fill; an *empty* one is just an address
//! that an evicted page can be moved to. Device reads land in frames; COPY copies them into the
//! region, or MOVE carries runs of them there, and pages that leave come to empty frames by MOVE.
//!
//! The kernel may read memory of the region long after the page has left it: a pipe
//! (`vmsplice(2)`) or a socket (`MSG_ZEROCOPY`) holds plain references, which MOVE does not see
//! and no call reports. So what leaves the region is never written again: when the page's content
//! is safe its memory goes back to the kernel, which knows when it can be used for something else.
//!
//! ```text
//!   | run 0: a huge page of frames | run 1 | ... | single frames, spare or empty ............ |
//! ```
//! A *run* is as many frames as a huge page has, at a multiple of its size: a huge page can be
//! moved there whole. Its frames are given out together; each comes back by itself, and the run
//! is empty again with the last of them. One that came back whole may get fresh memory at once, as
//! a *spare* run of zeros for the next chunk that is read whole or is fresh. One that was *filled* by a
//! direct store keeps its memory, for the next chunk that is stored or read whole.
//!
//! # Invariants
//! 1. A frame is on at most one list; the thread that took it off owns its memory.
//! 2. A frame on the empty list has no page mapped.
//! 3. A frame of a run is on no list: it is in use, or counted as back in `Run::out`.
//! 4. Memory of a spare frame or run was never mapped in the region. A spare run that is not filled
//!    holds zeros.
#![expect(unsafe_code, reason = "drops the pages of frames it owns")]

use crate::base::error::Result;
use crate::base::strict_assert;
use crate::base::sync::{AtomicUsize, Ordering, Rank};
use crate::base::units::{PageId, SlotId};
use crate::meta::LazyArray;
use crate::paging::page::frame_meta::{FrameMeta, FrameOutcome};
use crate::paging::page::spare_runs::SpareRuns;
use crate::paging::page::word::FrameId;
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::sys::signals::FaultLock;
use crate::sys::vm::{HUGE_PAGE, Huge, Mapping};

/// The staging area and its lists.
#[derive(Debug)]
pub(crate) struct Frames {
    staging: Mapping,
    lists: FaultLock<Lists>,
    /// Length of the spare list, readable without the lock.
    spare_len: AtomicUsize,
    spare_runs: SpareRuns,
    notes: LazyArray<FrameMeta>,
    /// Frames of runs: the first ones.
    in_runs: usize,
}

#[derive(Debug)]
struct Lists {
    empty: FrameSet,
    spare: FrameSet,
    /// Frames of each run that are in use, or spare.
    out: Vec<usize>,
}

/// A set of frames, a bit each: neighbours are found, and low ones are used first.
#[derive(Debug)]
struct FrameSet {
    bits: Vec<u64>,
    count: usize,
}

impl FrameSet {
    fn none(frames: usize) -> FrameSet {
        FrameSet { bits: vec![0; frames.div_ceil(64)], count: 0 }
    }

    fn has(&self, frame: usize) -> bool {
        self.bits[frame / 64] & 1 << (frame % 64) != 0
    }

    fn insert(&mut self, frame: usize) {
        strict_assert!(!self.has(frame), "frame {frame} is listed twice");
        self.bits[frame / 64] |= 1 << (frame % 64);
        self.count += 1;
    }

    /// The longest run of at most `most` frames, the first of those.
    fn longest(&self, most: usize) -> Option<(usize, usize)> {
        let mut best: Option<(usize, usize)> = None;
        let end = self.bits.len() * 64;
        let mut at = 0;
        while at < end {
            let rest = self.bits[at / 64] >> (at % 64);
            if rest == 0 {
                at = (at / 64 + 1) * 64;
                continue;
            }
            at += rest.trailing_zeros() as usize;
            let len = (at..end.min(at + most)).take_while(|frame| self.has(*frame)).count();
            if best.is_none_or(|(_, longest)| len > longest) {
                best = Some((at, len));
            }
            if len == most {
                break;
            }
            at += len;
        }
        best
    }

    /// Takes the longest run of at most `most` frames out, if it has `least`.
    fn take(&mut self, least: usize, most: usize) -> Option<(FrameId, usize)> {
        if self.count < least {
            return None;
        }
        let (first, len) = self.longest(most).filter(|(_, len)| *len >= least)?;
        (first..first + len).for_each(|frame| self.bits[frame / 64] &= !(1 << (frame % 64)));
        self.count -= len;
        Some((FrameId(first as u32), len))
    }
}

impl Frames {
    /// Reserves `singles` frames, and `runs` runs of them, all empty.
    ///
    /// # Errors
    /// When there is no address space for them.
    pub(crate) fn new(singles: usize, runs: usize) -> Result<Frames> {
        let in_runs = runs * CHUNK_PAGES;
        let count = in_runs + singles;
        let staging = Mapping::reserve(count * PAGE, HUGE_PAGE, Huge::No)?;
        if in_runs > 0 {
            // What is read into a run is read into a huge page. A kernel without them refuses.
            drop(staging.use_huge_pages(0, in_runs * PAGE));
        }
        u32::try_from(count).expect("frame counts are small");
        let mut empty = FrameSet::none(count);
        (in_runs..count).for_each(|frame| empty.insert(frame));
        let lists = Lists { empty, spare: FrameSet::none(count), out: vec![0; runs] };
        Ok(Frames {
            staging,
            lists: FaultLock::new(Rank::Frames, lists),
            spare_len: AtomicUsize::new(0),
            spare_runs: SpareRuns::new(runs),
            notes: LazyArray::new(count)?,
            in_runs,
        })
    }

    /// All frames.
    pub(crate) fn count(&self) -> usize {
        self.notes.len()
    }

    /// Frames that are not parts of runs.
    pub(crate) fn singles(&self) -> usize {
        self.count() - self.in_runs
    }

    pub(crate) fn has_runs(&self) -> bool {
        self.in_runs > 0
    }

    /// All runs.
    pub(crate) fn runs(&self) -> usize {
        self.in_runs / CHUNK_PAGES
    }

    /// The run a frame is part of.
    pub(crate) fn run_of(&self, frame: FrameId) -> Option<usize> {
        let at = frame.0 as usize;
        (at < self.in_runs).then_some(at / CHUNK_PAGES)
    }

    /// Bytes of what there is to know of the frames, their memory aside.
    pub(crate) fn table_bytes(&self) -> usize {
        self.count() * (size_of::<FrameMeta>() + size_of::<FrameId>())
    }

    /// First address and bytes of the staging area.
    pub(crate) fn range(&self) -> (usize, usize) {
        (self.staging.addr(), self.staging.len())
    }

    /// Lets children that are forked from now on have the frames' memory, or not.
    pub(crate) fn set_inherited(&self, inherited: bool) -> Result<()> {
        self.staging.set_inherited(inherited)
    }

    /// Makes what is known of frames readable in all children.
    pub(crate) fn inherit_notes(&self) -> Result<()> {
        self.notes.set_inherited(true)
    }

    /// Binds frames to a NUMA node: the memory of a run becomes that of its pages.
    pub(crate) fn bind(&self, node: u32) -> Result<()> {
        self.staging.bind(node)
    }

    pub(crate) fn addr(&self, frame: FrameId) -> usize {
        self.staging.addr() + frame.0 as usize * PAGE
    }

    pub(crate) fn ptr(&self, frame: FrameId) -> *mut u8 {
        self.addr(frame) as *mut u8
    }

    /// Frames that have memory and wait for a fill.
    pub(crate) fn spare_len(&self) -> usize {
        self.spare_len.load(Ordering::Relaxed)
    }

    pub(crate) fn take_spare(&self) -> Option<FrameId> {
        self.take_spares(1, 1).map(|(first, _)| first)
    }

    /// Takes neighbours, `least` to `most`: the longest run of spare frames there is.
    pub(crate) fn take_spares(&self, least: usize, most: usize) -> Option<(FrameId, usize)> {
        if self.spare_len() < least {
            return None;
        }
        let mut lists = self.lists.lock();
        let taken = lists.spare.take(least, most);
        self.spare_len.store(lists.spare.count, Ordering::Relaxed);
        taken
    }

    pub(crate) fn take_empty(&self) -> Option<FrameId> {
        self.take_empties(1).map(|(first, _)| first)
    }

    /// Takes neighbours, at most `most`: the longest run of empty frames there is.
    pub(crate) fn take_empties(&self, most: usize) -> Option<(FrameId, usize)> {
        self.lists.lock().empty.take(1, most)
    }

    /// Takes a whole run; its first frame.
    pub(crate) fn take_run(&self) -> Option<FrameId> {
        let run = {
            let mut lists = self.lists.lock();
            let run = lists.out.iter().position(|out| *out == 0)?;
            lists.out[run] = CHUNK_PAGES;
            run
        };
        // The page table that small pages have left behind goes (Linux 6.14): where there is one, MOVE
        // takes a huge page apart, and the kernel fills with small ones.
        // SAFETY: the run is this thread's, and nothing is mapped there (invariant 2).
        drop(unsafe { self.staging.discard(run * HUGE_PAGE, HUGE_PAGE) });
        self.spare_runs.set_filled(FrameId((run * CHUNK_PAGES) as u32), false);
        Some(FrameId((run * CHUNK_PAGES) as u32))
    }

    /// Bytes of frames and runs that have memory and wait for a use.
    pub(crate) fn spare_bytes(&self) -> usize {
        self.spare_len() * PAGE + self.spare_runs.bytes()
    }

    /// Runs that have memory and wait for a use.
    pub(crate) fn spare_runs(&self) -> &SpareRuns {
        &self.spare_runs
    }

    /// Lists frames with memory that wait for a fill.
    pub(crate) fn put_spares(&self, frames: impl Iterator<Item = FrameId>) {
        let mut lists = self.lists.lock();
        frames.for_each(|frame| lists.spare.insert(frame.0 as usize));
        self.spare_len.store(lists.spare.count, Ordering::Relaxed);
    }

    /// Lists a frame without memory.
    pub(crate) fn put_empty(&self, frame: FrameId) {
        self.put_empties(&[frame]);
    }

    /// Lists frames without memory.
    pub(crate) fn put_empties(&self, frames: &[FrameId]) {
        let mut lists = self.lists.lock();
        for &frame in frames {
            match self.run_of(frame) {
                None => lists.empty.insert(frame.0 as usize),
                Some(run) => {
                    strict_assert!(lists.out[run] > 0, "{frame:?} came back twice");
                    lists.out[run] -= 1;
                }
            }
        }
    }

    /// Gives the frame's memory back to the kernel and lists it as empty.
    ///
    /// # Errors
    /// When the kernel refuses; the frame is then lost to the lists, which is safe.
    pub(crate) fn release(&self, frame: FrameId) -> Result<()> {
        let offset = frame.0 as usize * PAGE;
        // SAFETY: the caller took the frame off the lists and gives it up (invariant 1).
        unsafe { self.staging.discard(offset, PAGE) }?;
        self.put_empty(frame);
        Ok(())
    }

    /// Clears a frame of the caller's.
    pub(crate) fn clear(&self, frame: FrameId) {
        // SAFETY: the frame is a page long, and the caller's.
        unsafe { std::ptr::write_bytes(self.ptr(frame), 0, PAGE) };
    }

    /// Makes the kernel give memory to a frame, or to the run of frames that begins with it.
    pub(crate) fn touch(&self, frame: FrameId) {
        // SAFETY: the frame is the caller's and holds nothing.
        unsafe { self.ptr(frame).write_volatile(0) };
    }

    /// Calls `act` while code may run in a frame, as in memory of the program's that it moves.
    pub(crate) fn while_executable<T>(&self, frame: FrameId, act: impl FnOnce() -> T) -> T {
        self.staging.while_executable(frame.0 as usize * PAGE, act)
    }

    /// True if the memory at a range of the staging area is locked (`mlock`).
    pub(crate) fn is_locked(&self, start: usize, len: usize) -> bool {
        self.staging.is_locked(start - self.staging.addr(), len)
    }

    /// Ends all memory locks of the staging area.
    pub(crate) fn unlock(&self) {
        self.staging.unlock();
    }

    /// The frame's note.
    pub(crate) fn meta_of(&self, frame: FrameId) -> &FrameMeta {
        &self.notes[frame.0 as usize]
    }

    /// Notes what a frame holds before its page's word names it.
    pub(crate) fn note(&self, frame: FrameId, page: PageId, slot: Option<SlotId>) {
        self.meta_of(frame).write(page, slot);
    }

    /// The page a frame was noted with. Pairs with the word change that published the frame.
    pub(crate) fn page(&self, frame: FrameId) -> PageId {
        self.meta_of(frame).page()
    }

    /// The slot a frame was noted with; for its owner.
    pub(crate) fn slot(&self, frame: FrameId) -> Option<SlotId> {
        self.meta_of(frame).slot()
    }

    /// The slot that is read into a frame.
    pub(crate) fn slot_of_fill(&self, frame: FrameId) -> SlotId {
        self.slot(frame).expect("a fill has a slot")
    }

    /// Makes the slot the caller's: the frame's page has none any more.
    pub(crate) fn forget_slot(&self, frame: FrameId) {
        self.notes[frame.0 as usize].forget_slot();
    }

    /// Tells the evictor what became of the content; the last thing a taker does with a frame.
    pub(crate) fn decide(&self, frame: FrameId, outcome: FrameOutcome) {
        self.meta_of(frame).decide(outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_go_round_between_the_lists() {
        let frames = Frames::new(2, 0).expect("two frames map");
        assert_eq!(frames.take_spare(), None);
        let a = frames.take_empty().expect("two are empty");
        let b = frames.take_empty().expect("one is empty");
        assert_eq!(frames.take_empty(), None);
        frames.put_spares([a].into_iter());
        assert_eq!(frames.take_spare(), Some(a));
        frames.release(b).expect("own memory drops");
        assert_eq!(frames.take_empty(), Some(b));
    }

    #[test]
    fn the_longest_run_of_empty_neighbours_is_taken() {
        let frames = Frames::new(200, 0).expect("200 frames map");
        assert_eq!(frames.take_empties(200), Some((FrameId(0), 200)));
        let back: Vec<FrameId> = (10..13).chain(60..70).chain(100..104).map(FrameId).collect();
        frames.put_empties(&back);
        assert_eq!(frames.take_empties(4), Some((FrameId(60), 4)));
        assert_eq!(frames.take_empties(64), Some((FrameId(64), 6)));
        assert_eq!(frames.take_empties(64), Some((FrameId(100), 4)));
        assert_eq!(frames.take_empties(64), Some((FrameId(10), 3)));
        assert_eq!(frames.take_empties(64), None);
    }

    #[test]
    fn a_run_is_given_out_again_when_the_last_of_its_frames_is_back() {
        let frames = Frames::new(4, 2).expect("two runs and four frames map");
        assert_eq!((frames.singles(), frames.count()), (4, 2 * CHUNK_PAGES + 4));
        let [second, end] = [1, 2].map(|run| (run * CHUNK_PAGES) as u32);
        let runs = (Some(FrameId(0)), Some(FrameId(second)));
        assert_eq!((frames.take_run(), frames.take_run()), runs);
        assert_eq!(frames.take_run(), None);
        assert!(frames.addr(FrameId(second)).is_multiple_of(HUGE_PAGE));
        (second + 1..end).for_each(|frame| frames.put_empty(FrameId(frame)));
        assert_eq!(frames.take_run(), None, "one of it is in use");
        frames.put_empty(FrameId(second));
        assert_eq!(frames.take_run(), Some(FrameId(second)));
        assert_eq!(frames.take_empties(9), Some((FrameId(end), 4)), "singles are apart");
        assert_eq!((frames.run_of(FrameId(end - 1)), frames.run_of(FrameId(end))), (Some(1), None));
    }

    #[test]
    fn a_spare_run_is_in_use_until_its_memory_is_gone() {
        let frames = Frames::new(4, 1).expect("a run and four frames map");
        assert_eq!((frames.spare_runs().take(), frames.take_run()), (None, Some(FrameId(0))));
        frames.spare_runs().put(FrameId(0));
        assert_eq!((frames.spare_bytes(), frames.take_run()), (HUGE_PAGE, None));
        assert_eq!(frames.spare_runs().take(), Some(FrameId(0)));
        assert_eq!((frames.spare_bytes(), frames.spare_runs().take()), (0, None));
        let all: Vec<FrameId> = (0..CHUNK_PAGES as u32).map(FrameId).collect();
        frames.put_empties(&all);
        assert_eq!(frames.take_run(), Some(FrameId(0)));
    }
}
