//! The frame pool: the limit, and frames with their charge.
//!
//! A fill takes a frame and its charge here, the evictor brings freed ones back. What a thread cannot
//! get it waits for ([`RoomWaiters`]); the evictor is called to make room, and calls the handlers
//! when there is some.
//!
//! # Invariants
//! 1. Every frame with memory is charged, before it has memory; the page that a fill by COPY maps is
//!    charged beside it.
#![expect(unsafe_code, reason = "drops the memory of frames")]

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, Ordering};
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;
use crate::limit::manager::Account;
use crate::paging::config::RegionConfig;
use crate::paging::fault::sched::HandlerSched;
use crate::paging::managed::Managed;
use crate::paging::page::frames::Frames;
use crate::paging::page::word::FrameId;
use crate::paging::page::{BATCH_MAX, CHUNK_PAGES, PAGE, PAGE_SIZE};
use crate::paging::pager::room::{RoomWaiters, Watermarks};
use crate::paging::pager::slot_charge::SlotCharge;
use crate::paging::purge::Purge;
use crate::sys::vm::{Discarder, HUGE_PAGE, Piece};
use std::sync::Arc;

/// Why there is no run of frames to read into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum NoRun {
    /// The limit leaves no room at the moment.
    Starved,
    /// All are in use, or there are none.
    AllInUse,
}

/// Frames, what they are charged to, and the threads that wait for them.
#[derive(Debug)]
pub(in crate::paging) struct FramePool {
    staging: Frames,
    discarder: Arc<Discarder>,
    budget: Arc<Budget>,
    /// The region's place under a memory manager.
    managed: Managed,
    /// Gives back what the heap keeps of freed memory.
    purge: Purge,
    moves: bool,
    watermarks: Watermarks,
    waiters: RoomWaiters,
    /// A frame without a charge of its own uses the one that is kept for copies. Only the evictor
    /// lends it, and has it back before it takes the next page out.
    copy_charge_lent: AtomicBool,
    slot_charge: SlotCharge,
}

impl FramePool {
    /// Frames under `budget`, all empty.
    ///
    /// # Errors
    /// When the address space cannot be reserved.
    pub(super) fn new(
        config: &RegionConfig,
        moves: bool,
        account: Option<Account>,
        discarder: Arc<Discarder>,
        sched: Arc<HandlerSched>,
    ) -> Result<FramePool> {
        let own = || Arc::new(Budget::new(config.limit));
        let budget = account.as_ref().map_or_else(own, |account| Arc::clone(account.budget()));
        let singles = frame_count(budget.limit());
        let runs = (budget.limit().as_usize() / 8 / HUGE_PAGE).min(RUNS_MAX);
        Ok(FramePool {
            staging: Frames::new(singles, runs)?,
            discarder,
            budget,
            managed: Managed::new(account),
            purge: Purge::new(),
            moves,
            watermarks: Watermarks::new(),
            waiters: RoomWaiters::new(config, sched)?,
            copy_charge_lent: AtomicBool::new(false),
            slot_charge: SlotCharge::default(),
        })
    }

    // Parts.

    /// The frames.
    pub(in crate::paging) fn staging(&self) -> &Frames {
        &self.staging
    }

    /// Bytes charged, and the limit.
    pub(in crate::paging) fn budget(&self) -> &Budget {
        &self.budget
    }

    pub(in crate::paging) fn managed(&self) -> &Managed {
        &self.managed
    }

    pub(in crate::paging) fn purge(&self) -> &Purge {
        &self.purge
    }

    /// The threads that wait for frames.
    pub(in crate::paging) fn waiters(&self) -> &RoomWaiters {
        &self.waiters
    }

    /// When there is too little room.
    pub(in crate::paging) fn watermarks(&self) -> &Watermarks {
        &self.watermarks
    }

    /// True if pages are taken out by MOVE, else by write-protect, copy and DONTNEED.
    pub(in crate::paging) fn moves(&self) -> bool {
        self.moves
    }

    /// Bytes that fills can take without evicting: unused budget and spare frames.
    pub(in crate::paging) fn available(&self) -> u64 {
        self.budget.free().0 + self.staging.spare_bytes() as u64
    }

    /// Calls the evictor when so little is available that it starts.
    pub(in crate::paging) fn check_low(&self) {
        if self.available() < self.watermarks.evict_below() {
            self.waiters.call_evictor();
        }
    }

    // Frames with their charge.

    /// Bytes of the limit that fills leave free. Evicting by copy needs a frame before it frees a page.
    pub(in crate::paging) fn headroom(&self) -> ByteCount {
        const PAGES: u64 = 8;
        if self.moves { ByteCount::ZERO } else { ByteCount(PAGES * PAGE_SIZE.0) }
    }

    /// Charges one page more than there is, for as long as the region exists. A page that cannot be
    /// moved out is copied, and is in memory twice for a moment; without this, a full region would
    /// exceed its limit then, or could evict nothing.
    /// Under a manager it is part of what the region keeps for itself, which others make room for.
    ///
    /// # Errors
    /// [`Error::LimitTooSmall`] when the limit has no room for it.
    pub(in crate::paging) fn keep_copy_charge(&self) -> Result<()> {
        if self.managed.account().is_some() || self.budget.try_charge(PAGE_SIZE) {
            return Ok(());
        }
        let minimum = ByteCount(self.budget.charged().0 + PAGE_SIZE.0);
        Err(Error::LimitTooSmall { limit: self.budget.limit(), minimum })
    }

    /// Of what is charged, what is no memory at the moment: what is kept for a copy that is not under
    /// way, and for slots which cannot be given out yet.
    pub(in crate::paging) fn charged_ahead(&self) -> u64 {
        let is_lent = self.copy_charge_lent.load(Ordering::Relaxed);
        self.slot_charge.kept().0 + if is_lent { 0 } else { PAGE_SIZE.0 }
    }

    /// Bytes above what the limit allows while nothing is under way.
    pub(in crate::paging) fn excess(&self) -> u64 {
        let allowed = self.budget.limit().0.saturating_sub(self.headroom().0 / 2);
        self.budget.charged().0.saturating_sub(allowed)
    }

    /// A frame with memory: a spare one, or an empty one that is charged.
    pub(in crate::paging) fn charged_frame(&self, headroom: ByteCount) -> Option<FrameId> {
        self.charged_frames(1, headroom).map(|(first, _)| first)
    }

    /// Neighbouring frames with memory, one to `most`: spare ones, or empty ones that are charged.
    fn charged_frames(&self, most: usize, headroom: ByteCount) -> Option<(FrameId, usize)> {
        /// Each row of neighbours is a segment of a request, and a call to map it: more than new memory costs.
        const SPARES_MIN: usize = 8;
        let spares = |least| self.staging.take_spares(least, most);
        let charged = || {
            let bytes = |count| ByteCount((count * PAGE) as u64);
            let charges = |count: &usize| self.charge_leaving(bytes(*count), headroom);
            let charged = [most, 1].into_iter().find(charges)?;
            let taken = self.staging.take_empties(charged);
            let got = taken.map_or(0, |(_, count)| count);
            self.budget.uncharge(bytes(charged - got));
            taken
        };
        spares(SPARES_MIN.min(most)).or_else(charged).or_else(|| spares(1))
    }

    /// Charges `bytes` if the limit has room for them and `headroom` more; spare runs give way if
    /// that is enough.
    pub(in crate::paging) fn charge_leaving(&self, bytes: ByteCount, headroom: ByteCount) -> bool {
        loop {
            if self.budget.try_charge_leaving(bytes, headroom) {
                return true;
            }
            let most = self.budget.free().0 + self.staging.spare_runs().bytes() as u64;
            if most < bytes.0.saturating_add(headroom.0) || self.free_spare_run() == 0 {
                return false;
            }
        }
    }

    /// True if a frame's memory becomes the page's, by MOVE, when it is installed. Runs of frames are huge pages, which
    /// COPY cannot build. Of a single frame the kernel would clear new memory, which costs more than to copy.
    pub(in crate::paging) fn moves_in(&self, frame: FrameId) -> bool {
        self.staging.run_of(frame).is_some()
    }

    /// Takes what fills of one to `most` pages need: neighbouring frames, and charges for the pages as well.
    pub(in crate::paging) fn reserve_fills(&self, most: usize) -> Option<(FrameId, usize)> {
        let (first, count) = self.charged_frames(most, self.headroom())?;
        let charged = [count, 1].into_iter().find(|count| self.charge_pages(*count)).unwrap_or(0);
        self.recycle(FrameId(first.0 + charged as u32), count - charged);
        (charged > 0).then_some((first, charged))
    }

    /// Charges fresh pages, if they may still be mapped. They leave some room, because they cannot be
    /// evicted while the device is full: pages that have a slot come and go through it, so that
    /// what was written stays readable.
    pub(in crate::paging) fn charge_fresh(&self, count: usize) -> bool {
        let room = self.watermarks.for_fresh().0 + (count * PAGE) as u64;
        self.available() >= room && self.charge_pages(count)
    }

    /// Charges `bytes` if the limit has room for them and `headroom` more; spare frames give way if that is enough.
    pub(in crate::paging) fn charge_with_spares(
        &self,
        bytes: ByteCount,
        headroom: ByteCount,
    ) -> bool {
        while !self.charge_leaving(bytes, headroom) {
            if self.available() < bytes.0 + headroom.0 {
                return false;
            }
            let Some(frame) = self.staging.take_spare() else { return false };
            self.free(frame, 1);
        }
        true
    }

    /// Charges pages.
    pub(in crate::paging) fn charge_pages(&self, count: usize) -> bool {
        self.charge_with_spares(ByteCount((count * PAGE) as u64), self.headroom())
    }

    /// Returns what [`reserve_fills`](Self::reserve_fills) took for a page, unused.
    pub(in crate::paging) fn cancel_fill(&self, frame: FrameId) {
        if !self.moves_in(frame) {
            self.budget.uncharge(PAGE_SIZE);
        }
        self.recycle(frame, 1);
    }

    /// Lists neighbouring frames whose memory was never mapped in the region as spare, or frees their memory when
    /// there are plenty or others wait for it.
    pub(in crate::paging) fn recycle(&self, first: FrameId, count: usize) {
        // Each saves new memory of the kernel, 1.4 us for 4 KiB (book/src/measurements/fault_rates.md), which no page can
        // have meanwhile.
        const SPARES_MAX: usize = 256;
        let keeps = self.managed.deficit() == 0;
        let worth = (self.watermarks.evict_below() as usize / PAGE).min(SPARES_MAX);
        let is_single = self.staging.run_of(first).is_none();
        let room = worth.saturating_sub(self.staging.spare_len());
        let kept = if keeps && is_single { count.min(room) } else { 0 };
        let mut frames = (first.0..).take(count).map(FrameId);
        if kept > 0 {
            self.staging.put_spares(frames.by_ref().take(kept));
        }
        if kept < count {
            self.free(FrameId(first.0 + kept as u32), count - kept);
        }
    }

    /// Frees the memory of all of `frames`, through which pages have left, and empties the list.
    /// The kernel may still be reading it, so nobody may write it again (`page::frames`). One call
    /// frees many frames, neighbours as one range: a run that comes back whole is still the huge
    /// page that it was. Frames that the pages were copied to are recycled.
    pub(in crate::paging) fn give_back(&self, frames: &mut Vec<FrameId>) {
        if !self.moves {
            return frames.drain(..).for_each(|frame| self.recycle(frame, 1));
        }
        frames.sort_unstable();
        let mut pieces = [Piece::new(0, 0); BATCH_MAX];
        let (mut from, mut count) = (0, 0);
        for at in 0..frames.len() {
            let follows = at > from && frames[at - 1].0 + 1 == frames[at].0;
            if follows {
                pieces[count - 1].grow(PAGE);
                continue;
            }
            if count == BATCH_MAX {
                self.free_frames(&frames[from..at], &pieces);
                (from, count) = (at, 0);
            }
            pieces[count] = Piece::new(self.staging.addr(frames[at]), PAGE);
            count += 1;
        }
        self.free_frames(&frames[from..], &pieces[..count]);
        frames.clear();
    }

    /// Frees the memory of frames, which lie at `pieces`, and their charge.
    fn free_frames(&self, frames: &[FrameId], pieces: &[Piece]) {
        if frames.is_empty() {
            return;
        }
        // SAFETY: the caller took the frames off the lists and gives them up.
        let freed = unsafe { self.discarder.discard(pieces) };
        // Else they are lost to the lists, charge and all, which is safe.
        if freed.is_ok() {
            self.staging.put_empties(frames);
            self.uncharge_freed((frames.len() * PAGE) as u64);
        }
    }

    /// Exchanges the memory of a whole run of frames for a fresh huge page, and lists it as spare. `false`: the kernel refused, and nothing has changed. To
    /// write over the old memory would be cheaper (the kernel clears the new), but see `page::frames`.
    pub(in crate::paging) fn renew(&self, first: FrameId) -> bool {
        let piece = Piece::new(self.staging.addr(first), HUGE_PAGE);
        // SAFETY: the caller's frames, whose pages have left, are a huge page long.
        if unsafe { self.discarder.discard(&[piece]) }.is_err() {
            return false;
        }
        self.staging.touch(first);
        self.staging.spare_runs().put(first);
        true
    }

    /// A run of frames to read a chunk into, charged: a spare one, or an empty one.
    pub(in crate::paging) fn charged_run(&self) -> std::result::Result<FrameId, NoRun> {
        if let Some(first) = self.staging.spare_runs().take() {
            return Ok(first);
        }
        let first = self.staging.take_run().ok_or(NoRun::AllInUse)?;
        if self.charge_with_spares(ByteCount(HUGE_PAGE as u64), self.headroom()) {
            // All of its memory comes with the first touch. That has to be before frames of it may
            // be given back, and with them their share of the charge.
            self.staging.touch(first);
            return Ok(first);
        }
        (first.0..).take(CHUNK_PAGES).for_each(|n| self.staging.put_empty(FrameId(n)));
        Err(NoRun::Starved)
    }

    /// Frees the memory and the charge of a spare run; returns how many bytes that were.
    pub(in crate::paging) fn free_spare_run(&self) -> u64 {
        let Some(first) = self.staging.spare_runs().take() else { return 0 };
        self.free(first, CHUNK_PAGES);
        HUGE_PAGE as u64
    }

    /// Frees the memory and the charge of neighbouring frames, a run of them at most.
    pub(in crate::paging) fn free(&self, first: FrameId, count: usize) {
        let piece = Piece::new(self.staging.addr(first), count * PAGE);
        let mut frames = [first; CHUNK_PAGES];
        frames.iter_mut().zip(first.0..).for_each(|(frame, n)| *frame = FrameId(n));
        self.free_frames(&frames[..count], &[piece]);
    }

    /// Uncharges frames that were freed, but for what tables of slots keep.
    fn uncharge_freed(&self, bytes: u64) {
        let bytes = bytes - self.slot_charge.keep(bytes);
        self.budget.uncharge(ByteCount(bytes));
        self.managed.gave_back(bytes);
    }

    /// Charges tables of slots, for the evictor. `false`: the limit leaves no room; if they are
    /// `needed`, what is freed next is kept for them.
    pub(in crate::paging) fn charge_slots(&self, bytes: ByteCount, needed: bool) -> bool {
        let kept = self.slot_charge.take();
        let missing = ByteCount(bytes.0.saturating_sub(kept));
        // Nothing is missing: not even that is granted above a limit that was lowered, where frames have
        // paid and slots are needed most.
        if missing > ByteCount::ZERO && !self.charge_with_spares(missing, ByteCount::ZERO) {
            self.slot_charge.put_back(kept, if needed { bytes.0 } else { 0 });
            return false;
        }
        self.budget.uncharge(ByteCount(kept.saturating_sub(bytes.0)));
        true
    }

    /// Neighbouring frames to take the content of at most `most` pages out to: the first, and how
    /// many.
    pub(in crate::paging) fn frames_for_eviction(&self, most: usize) -> Option<(FrameId, usize)> {
        if self.moves {
            self.staging.take_empties(most).or_else(|| {
                // All are spare: after an eviction that nobody needed the room of.
                self.free(self.staging.take_spare()?, 1);
                self.staging.take_empties(most)
            })
        } else {
            self.frame_for_copy().map(|frame| (frame, 1))
        }
    }

    /// A frame to copy a page to, for the next `take_by_copy`: where the limit leaves no room for
    /// one, with the charge that is kept for this ([`FramePool::keep_copy_charge`]).
    pub(in crate::paging) fn frame_for_copy(&self) -> Option<FrameId> {
        self.charged_frame(ByteCount::ZERO).or_else(|| {
            let frame = self.staging.take_empty()?;
            self.copy_charge_lent.store(true, Ordering::Relaxed);
            Some(frame)
        })
    }

    /// Returns the charge that a copy would have needed.
    pub(in crate::paging) fn uncharge_copy(&self) {
        if !self.moves {
            self.budget.uncharge(PAGE_SIZE);
        }
    }

    /// True if what is missing may come from others, who are asked for it. The evictor leaves its
    /// own pages alone meanwhile.
    pub(in crate::paging) fn others_may_give(&self, missing: u64, exhausted: bool) -> bool {
        let spares = self.staging.spare_bytes() as u64;
        let own = self.budget.own_free().0 + spares;
        if missing == 0 || own < self.watermarks.evict_until() {
            return false; // Short of its own ceiling.
        }
        self.managed.others_may_give(missing, exhausted)
    }

    /// Takes the frame of [`frame_for_copy`](Self::frame_for_copy) back, unused.
    pub(in crate::paging) fn give_copy_frame_back(&self, frame: FrameId) {
        if self.copy_charge_lent.swap(false, Ordering::Relaxed) {
            drop(self.staging.release(frame));
        } else {
            self.recycle(frame, 1);
        }
    }

    /// A page was copied to that frame and unmapped. A frame without a charge of its own has the
    /// page's from now on, and what was lent is back.
    pub(in crate::paging) fn charge_copied(&self) {
        if !self.copy_charge_lent.swap(false, Ordering::Relaxed) {
            self.budget.uncharge(PAGE_SIZE);
        }
    }
}

/// Pages that wait in the standby line of a region: a sixteenth of the limit, within bounds.
pub(in crate::paging) fn standby_count(limit: ByteCount) -> usize {
    const PAGES_MAX: usize = 8192;
    (limit.as_usize() / 16 / PAGE).min(PAGES_MAX)
}

/// Staging frames of a region: a quarter of the limit, within bounds.
fn frame_count(limit: ByteCount) -> usize {
    // Beside the standby line.
    const FRAMES_MAX: usize = 1024;
    (limit.as_usize() / 4 / PAGE).min(FRAMES_MAX + standby_count(limit))
}

/// Maximum number of runs of frames.
pub(in crate::paging) const RUNS_MAX: usize = 8;
