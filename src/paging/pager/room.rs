//! Room: the limit, its watermarks, frames with their charge, and who is woken for want of them.
#![expect(unsafe_code, reason = "drops the memory of frames")]

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::paging::page::BATCH_MAX;
use crate::paging::page::word::FrameId;
use crate::paging::pager::Pager;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE, Piece};

/// Why there is no run of frames to read into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum NoRun {
    /// The limit leaves no room at the moment.
    Starved,
    /// All are in use, or there are none.
    AllInUse,
}

impl Pager {
    /// Sets the watermarks that follow from the limit.
    pub(crate) fn set_watermarks(&self, limit: ByteCount) {
        const RESERVE_MAX: u64 = 16 << 20;
        let page = self.page_bytes() as u64;
        let high = (limit.0 / 16).min(RESERVE_MAX.max(8 * page)).max(2 * page);
        self.low_bytes.store(high / 2, Ordering::Relaxed);
        self.high_bytes.store(high, Ordering::Relaxed);
    }

    /// Bytes that fills can take without evicting: unused budget and spare frames.
    pub(crate) fn available(&self) -> u64 {
        self.budget.free().0 + self.frames.spare_bytes() as u64
    }

    /// Calls the evictor when less than the low watermark is available.
    pub(crate) fn check_low(&self) {
        if self.available() < self.low_bytes.load(Ordering::Relaxed) {
            self.call_evictor();
        }
    }

    // Bells.

    /// Wakes the evictor, once until it has looked.
    pub(crate) fn call_evictor(&self) {
        self.evictor_bell.ring();
    }

    /// Wakes the handlers that wait for frames.
    pub(crate) fn feed_handlers(&self) {
        if self.starving.load(Ordering::Acquire) > 0 {
            self.sched.call_all();
        }
    }

    // Frames with their charge.

    /// What fills leave of the limit. Evicting by copy needs a frame before it frees a page.
    pub(super) fn headroom(&self) -> ByteCount {
        const PAGES: u64 = 8;
        if self.evict_by_move { ByteCount::ZERO } else { ByteCount(PAGES * self.page_size().0) }
    }

    /// Charges one page more than there is, for as long as the region exists. A page that cannot be
    /// moved out is copied, and is in memory twice for a moment; without this, a full region would
    /// exceed its limit then (by all of its tables with pages of 2 MiB), or could evict nothing.
    /// Under a manager it is part of what the region keeps for itself, which others make room for.
    ///
    /// # Errors
    /// [`Error::LimitTooSmall`] when the limit has no room for it.
    pub(super) fn keep_copy_charge(&self) -> Result<()> {
        if self.joined.account.is_some() || self.budget.try_charge(self.page_size()) {
            return Ok(());
        }
        let minimum = ByteCount(self.budget.charged().0 + self.page_size().0);
        Err(Error::LimitTooSmall { limit: self.budget.limit(), minimum })
    }

    /// Of what is charged, what is kept for a copy and not in use at the moment.
    pub(in crate::paging) fn copy_charge(&self) -> u64 {
        if self.copy_charge_lent.load(Ordering::Relaxed) { 0 } else { self.page_size().0 }
    }

    /// Bytes above what the limit allows while nothing is under way.
    pub(crate) fn excess(&self) -> u64 {
        let allowed = self.budget.limit().0.saturating_sub(self.headroom().0 / 2);
        self.budget.charged().0.saturating_sub(allowed)
    }

    /// A frame with memory: a spare one, or an empty one that is charged.
    pub(crate) fn charged_frame(&self, headroom: ByteCount) -> Option<FrameId> {
        if let Some(frame) = self.frames.take_spare() {
            return Some(frame);
        }
        if !self.charge_leaving(self.page_size(), headroom) {
            return None;
        }
        let frame = self.frames.take_empty();
        if frame.is_none() {
            self.budget.uncharge(self.page_size());
        }
        frame
    }

    /// Charges `bytes` if the limit has room for them and `headroom` more; spare runs give way if
    /// that is enough.
    pub(in crate::paging) fn charge_leaving(&self, bytes: ByteCount, headroom: ByteCount) -> bool {
        loop {
            if self.budget.try_charge_leaving(bytes, headroom) {
                return true;
            }
            let most = self.budget.free().0 + self.frames.spare_run_bytes() as u64;
            if most < bytes.0.saturating_add(headroom.0) || self.free_spare_run() == 0 {
                return false;
            }
        }
    }

    /// Whether a frame's memory becomes the page's, by MOVE, when it is installed. Runs of frames
    /// are huge pages, which COPY cannot build.
    pub(in crate::paging) fn moves_in(&self, frame: FrameId) -> bool {
        self.fill_by_move || self.frames.run_of(frame).is_some()
    }

    /// Takes what a fill needs: a frame, and with COPY a charge for the page as well.
    pub(crate) fn reserve_fill(&self) -> Option<FrameId> {
        let frame = self.charged_frame(self.headroom())?;
        if !self.fill_by_move && !self.charge_page() {
            self.recycle(frame);
            return None;
        }
        Some(frame)
    }

    /// What of the limit pages without a slot cannot have.
    pub(crate) fn reserve(&self) -> ByteCount {
        let high = self.high_bytes.load(Ordering::Relaxed);
        ByteCount(high.max(self.headroom().0 + 2 * self.page_size().0))
    }

    /// Whether fresh pages may still be mapped. They leave some room, because they cannot be
    /// evicted while the device is full: pages that have a slot come and go through it, so that
    /// what was written stays readable.
    pub(super) fn has_room_for_fresh(&self) -> bool {
        self.available() >= self.reserve_for_fresh().0 + self.page_size().0
    }

    /// What fresh pages leave of the limit.
    pub(in crate::paging) fn reserve_for_fresh(&self) -> ByteCount {
        ByteCount(self.low_bytes.load(Ordering::Relaxed) / 2).max(self.page_size())
    }

    /// Charges one page; spare frames give way when the limit is reached.
    pub(crate) fn charge_page(&self) -> bool {
        let headroom = self.headroom();
        if self.charge_leaving(self.page_size(), headroom) {
            return true;
        }
        let Some(frame) = self.frames.take_spare() else { return false };
        self.free_frame(frame);
        self.budget.try_charge_leaving(self.page_size(), headroom)
    }

    /// Returns what [`reserve_fill`](Self::reserve_fill) took, unused.
    pub(crate) fn cancel_fill(&self, frame: FrameId) {
        if !self.moves_in(frame) {
            self.budget.uncharge(self.page_size());
        }
        self.recycle(frame);
    }

    /// Spare frames that are worth keeping: none while others wait for their memory, or where
    /// fills carry it off into the region.
    fn spare_max(&self) -> usize {
        if self.fill_by_move || self.owed() > 0 {
            return 0;
        }
        let bytes = self.low_bytes.load(Ordering::Relaxed) as usize;
        let most = BATCH_MAX.min(self.frames.singles() / 2);
        (bytes / self.page_bytes()).clamp(1, most)
    }

    /// Lists a frame whose memory was never mapped in the region as spare, or frees its memory when
    /// there are plenty or others wait for it.
    pub(crate) fn recycle(&self, frame: FrameId) {
        if self.frames.run_of(frame).is_none() && self.frames.spare_len() < self.spare_max() {
            self.frames.put_spare(frame);
        } else {
            self.free_frame(frame);
        }
    }

    /// Frees the memory of all of `frames`, through which pages have left, and empties the list.
    /// The kernel may still be reading it, so nobody may write it again (`page::frames`). One call
    /// frees many frames, neighbours as one range: a run that comes back whole is still the huge
    /// page that it was. Frames that the pages were copied to are recycled.
    pub(crate) fn give_back(&self, frames: &mut Vec<FrameId>) {
        if !self.evict_by_move {
            return frames.drain(..).for_each(|frame| self.recycle(frame));
        }
        frames.sort_unstable();
        let mut pieces = [Piece::new(0, 0); BATCH_MAX];
        let (mut from, mut count) = (0, 0);
        for at in 0..frames.len() {
            let follows = at > from && frames[at - 1].0 + 1 == frames[at].0;
            if follows {
                pieces[count - 1].grow(self.page_bytes());
                continue;
            }
            if count == BATCH_MAX {
                self.free_frames(&frames[from..at], &pieces);
                (from, count) = (at, 0);
            }
            pieces[count] = Piece::new(self.frames.addr(frames[at]), self.page_bytes());
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
            let bytes = (frames.len() * self.page_bytes()) as u64;
            self.frames.put_empties(frames);
            self.budget.uncharge(ByteCount(bytes));
            self.gave_back(bytes);
        }
    }

    /// Clears a frame of this thread's.
    pub(in crate::paging) fn clear_frame(&self, frame: FrameId) {
        // SAFETY: the frame is `page_bytes` long, and this thread's.
        unsafe { std::ptr::write_bytes(self.frames.ptr(frame), 0, self.page_bytes()) };
    }

    /// Exchanges the memory of a whole run of frames, or of a frame that is huge itself, for a fresh
    /// huge page, and lists it as spare. `false`: the kernel refused, and nothing has changed. To
    /// write over the old memory would be cheaper (the kernel clears the new), but see `page::frames`.
    pub(in crate::paging) fn renew(&self, first: FrameId) -> bool {
        let piece = Piece::new(self.frames.addr(first), HUGE_PAGE);
        // SAFETY: the caller's frames, whose pages have left, are a huge page long.
        if unsafe { self.discarder.discard(&[piece]) }.is_err() {
            return false;
        }
        self.touch_frame(first);
        match self.frames.run_of(first) {
            Some(_) => self.frames.put_spare_run(first),
            None => self.frames.put_spare(first),
        }
        true
    }

    /// A run of frames to read a chunk into, charged: a spare one, or an empty one.
    pub(in crate::paging) fn charged_run(&self) -> std::result::Result<FrameId, NoRun> {
        if let Some(first) = self.frames.take_spare_run() {
            return Ok(first);
        }
        let first = self.frames.take_run().ok_or(NoRun::AllInUse)?;
        if self.charge_run() {
            // All of its memory comes with the first touch. That has to be before frames of it may
            // be given back, and with them their share of the charge.
            self.touch_frame(first);
            return Ok(first);
        }
        (first.0..).take(self.frames.run_frames()).for_each(|n| self.frames.put_empty(FrameId(n)));
        Err(NoRun::Starved)
    }

    /// Charges a run of frames; single spare frames give way if that is enough.
    fn charge_run(&self) -> bool {
        let bytes = ByteCount(HUGE_PAGE as u64);
        loop {
            if self.charge_leaving(bytes, self.headroom()) {
                return true;
            }
            if self.available() < bytes.0 + self.headroom().0 {
                return false;
            }
            let Some(frame) = self.frames.take_spare() else { return false };
            self.free_frame(frame);
        }
    }

    /// Frees the memory and the charge of a spare run; returns how many bytes that were.
    pub(in crate::paging) fn free_spare_run(&self) -> u64 {
        let Some(first) = self.frames.take_spare_run() else { return 0 };
        self.free_run(first);
        HUGE_PAGE as u64
    }

    /// Frees the memory and the charge of a whole run.
    pub(in crate::paging) fn free_run(&self, first: FrameId) {
        let piece = Piece::new(self.frames.addr(first), HUGE_PAGE);
        let mut frames = [first; HUGE_PAGE / KERNEL_PAGE];
        let count = self.frames.run_frames();
        frames.iter_mut().zip(first.0..).for_each(|(frame, n)| *frame = FrameId(n));
        self.free_frames(&frames[..count], &[piece]);
    }

    /// Frees the memory of a frame and its charge.
    pub(crate) fn free_frame(&self, frame: FrameId) {
        if self.frames.release(frame).is_ok() {
            self.budget.uncharge(self.page_size());
            self.gave_back(self.page_bytes() as u64);
        }
    }
}
