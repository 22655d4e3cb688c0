//! Content on its way out: between the region's mapping and staging frames, and back.
#![expect(unsafe_code, reason = "unmaps pages of the region")]

use crate::base::error::Result;
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::page::note::Fate;
use crate::page::word::{FrameId, State};
use crate::region::pager::install::install_error;
use crate::region::pager::{BATCH_MAX, Pager};
use crate::region::report;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{KERNEL_PAGE, Piece};
use crate::tier::policy::EvictionPolicy;

impl Pager {
    /// Takes up to `want` victims, at least one, off the policy's lists. One of a chunk that came in
    /// whole takes the others of the chunk along: they have been used as little, and to take
    /// them one by one would split the huge page that they are.
    pub(super) fn choose(
        &self,
        policy: &mut dyn EvictionPolicy,
        want: usize,
        victims: &mut Vec<PageId>,
    ) {
        let per_chunk = self.pages_per_chunk() as usize;
        // Room for a chunk with whatever comes last.
        let most = if self.has_read_chunks() { want.min(BATCH_MAX + 1 - per_chunk) } else { want };
        while victims.len() < most {
            let mut named = None;
            policy.victims(PageCount(1), &mut |page| named = Some(page));
            let Some(page) = named else { return };
            victims.push(page);
            let chunk = self.chunk_of(page);
            // The first chunk of all may come after `most` was chosen.
            let fits = victims.len() + per_chunk <= BATCH_MAX + 1;
            if !fits || !self.chunks.is_whole(chunk) {
                continue;
            }
            for other in self.pages_of_chunk(chunk).filter(|other| *other != page) {
                let word = self.word(other).load();
                if word.state() == State::Resident && word.pins() == 0 {
                    policy.removed(other);
                    policy.bypassed(other);
                    victims.push(other);
                }
            }
        }
    }

    /// Frames to take neighbouring pages from `first` out to: a run for a whole chunk.
    pub(super) fn frames_for_run(&self, first: PageId, count: usize) -> Option<(FrameId, usize)> {
        let chunk = self.chunk_of(first);
        if !self.chunks.is_whole(chunk) {
            return self.frames_for_eviction(count);
        }
        self.chunks.set_whole(chunk, false);
        if count as u64 == self.pages_per_chunk()
            && let Some(run) = self.frames.take_run()
        {
            return Some((run, count));
        }
        self.frames_for_eviction(count)
    }

    /// Neighbouring frames to take the content of at most `most` pages out to: the first, and how
    /// many.
    pub(super) fn frames_for_eviction(&self, most: usize) -> Option<(FrameId, usize)> {
        if self.evict_by_move {
            self.frames.take_empties(most).or_else(|| {
                // All are spare: after an eviction that nobody needed the room of.
                self.free_frame(self.frames.take_spare()?);
                self.frames.take_empties(most)
            })
        } else {
            let frame = self.charged_frame(ByteCount::ZERO).or_else(|| self.borrowed_frame());
            frame.map(|frame| (frame, 1))
        }
    }

    /// A frame above a limit that was lowered and is not reached yet. Fills have left room for it
    /// below the old limit, and the page that it is for goes at once.
    fn borrowed_frame(&self) -> Option<FrameId> {
        let frame = self.frames.take_empty()?;
        self.budget.charge(self.page_size());
        Some(frame)
    }

    /// Takes the contents of `count` `Moving` pages from `first` into neighbouring frames and
    /// unmaps them from the region; returns how many it took. The next one is in use by the kernel
    /// and stays as it was; the frames that are left are given back.
    pub(super) fn take_contents(&self, first: PageId, frame: FrameId, count: usize) -> usize {
        if self.evict_by_move {
            self.take_by_move(first, frame, count)
        } else {
            usize::from(self.take_by_copy(first, frame))
        }
    }

    fn take_by_move(&self, first: PageId, frame: FrameId, count: usize) -> usize {
        let len = count * self.page_bytes;
        self.clear_way(self.frames.addr(frame), len);
        let moved = self.move_or_stop(self.frames.addr(frame), self.addr(first), len);
        let whole = moved / self.page_bytes;
        let end = frame.0 + count as u32;
        (frame.0 + whole as u32..end).for_each(|frame| drop(self.frames.release(FrameId(frame))));
        whole
    }

    /// Moves memory of the region out to frames, or of a run of frames to an empty chunk, whole
    /// pages of it: a page of which only a part could be moved is put together again. Returns the
    /// bytes that went.
    pub(in crate::region) fn move_or_stop(&self, dst: usize, src: usize, len: usize) -> usize {
        // SAFETY: the pages are `Moving` by this thread, or in a chunk that it latched, and it may
        // unmap them; the frames are empty ones of this thread's. Or the frames are a run of this
        // thread's, and the pages are `Moving` by it and missing.
        let outcome = unsafe { self.uffd.move_pages(dst, src, len, Wake::No) };
        let moved = match outcome {
            Outcome::Done => return len,
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
        let whole = moved - moved % self.page_bytes;
        if moved > whole {
            self.move_back(dst + whole, src + whole, moved - whole);
        }
        whole
    }

    /// Moves memory that was just moved out back to where it came from, which is missing.
    pub(in crate::region) fn move_back(&self, from: usize, to: usize, len: usize) {
        // SAFETY: the memory goes back to where it was, for which this thread still answers.
        let back = unsafe { self.uffd.move_pages(to, from, len, Wake::Yes) };
        if back != Outcome::Done {
            let error = crate::Error::Os { call: "UFFDIO_MOVE", errno: crate::sys::EIO };
            report::fatal("half of a page could not be moved back", &error);
        }
    }

    /// Maps the zero page into the holes of a frame, so that it can go back to the region whole.
    pub(super) fn fill_frame_holes(&self, frame: FrameId) {
        for at in (0..self.page_bytes).step_by(KERNEL_PAGE) {
            let unit = (self.frames.addr(frame) + at) as *const u8;
            // SAFETY: the frame is this thread's and readable; a hole of staging memory is filled
            // by the kernel.
            let _ = unsafe { unit.read_volatile() };
        }
    }

    /// Has the kernel give memory to a frame, or to the run of frames that begins with it.
    pub(in crate::region) fn touch_frame(&self, frame: FrameId) {
        // SAFETY: the frame is this thread's and holds nothing.
        unsafe { self.frames.ptr(frame).write_volatile(0) };
    }

    /// For kernels without MOVE: nobody can write the page while it is copied, because writes
    /// fault first and wait for its word. (A device request of the application in flight is not
    /// seen: such kernels need a pin around direct I/O into far memory.)
    fn take_by_copy(&self, page: PageId, frame: FrameId) -> bool {
        if self.uffd.forbid_writes(self.addr(page), self.page_bytes).is_err() {
            self.recycle(frame);
            return false;
        }
        // SAFETY: the page is mapped and write-protected, the frame is this thread's; both are
        // `page_bytes` long and do not overlap. Holes of a sparse page cannot be here: chunks are
        // opened only where MOVE exists.
        unsafe {
            let src = self.addr(page) as *const u8;
            std::ptr::copy_nonoverlapping(src, self.frames.ptr(frame), self.page_bytes);
        }
        let piece = Piece::new(self.addr(page), self.page_bytes);
        // SAFETY: the page is `Moving` by this thread and its content is in the frame.
        unsafe { self.discarder.discard(&[piece]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        self.budget.uncharge(self.page_size());
        true
    }

    /// Maps a cooling frame's content back as `page`, which is `Moving` by this thread. Returns
    /// what that leaves of the frame.
    pub(in crate::region) fn return_frame(&self, page: PageId, frame: FrameId) -> Result<Fate> {
        if !self.evict_by_move {
            return self.copy_rest(page, frame, 0, Protect::No).map(|()| Fate::Dropped);
        }
        let (dst, src) = (self.addr(page), self.frames.addr(frame));
        self.clear_way(dst, self.page_bytes);
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content and nobody else moves it.
        let outcome = unsafe { self.uffd.move_pages(dst, src, self.page_bytes, Wake::No) };
        match outcome {
            Outcome::Done => Ok(Fate::MovedBack),
            // A page half of which is mapped cannot cool on: threads may write to that half.
            Outcome::Busy { bytes }
            | Outcome::Present { bytes }
            | Outcome::Failed { bytes, .. }
                if bytes > 0 || matches!(outcome, Outcome::Busy { .. }) =>
            {
                self.copy_rest(page, frame, bytes, Protect::No)?;
                Ok(Fate::MovedBack)
            }
            _ => Err(install_error(outcome)),
        }
    }

    /// Moves the content of a page, `Moving` by this thread, back from a frame that the device may
    /// still be reading: what the device gets then is nobody's. `false`: the kernel holds on to
    /// the frame, which is as it was.
    pub(super) fn try_return(&self, page: PageId, frame: FrameId) -> bool {
        let (dst, src) = (self.addr(page), self.frames.addr(frame));
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content.
        let bytes = match unsafe { self.uffd.move_pages(dst, src, self.page_bytes, Wake::No) } {
            Outcome::Done => return true,
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
        if bytes > 0 {
            self.move_back(dst, src, bytes);
        }
        false
    }

    /// Returns the charge that a copy would have needed.
    pub(in crate::region) fn uncharge_copy(&self) {
        if !self.evict_by_move {
            self.budget.uncharge(self.page_size());
        }
    }
}
