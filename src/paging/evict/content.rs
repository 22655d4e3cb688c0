//! Content on its way out: between the region's mapping and staging frames, and back.
#![expect(unsafe_code, reason = "unmaps pages of the region")]

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::diagnostics;
use crate::paging::evict::policy::EvictionPolicy;
use crate::paging::page::BATCH_MAX;
use crate::paging::page::note::Fate;
use crate::paging::page::word::{FrameId, State};
use crate::paging::pager::Pager;
use crate::paging::pager::mapper::{Moved, install_error, is_copied_then};
use crate::sys;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{KERNEL_PAGE, Piece, copy_checked};

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
        let most =
            if self.chunks().has_had_whole() { want.min(BATCH_MAX + 1 - per_chunk) } else { want };
        while victims.len() < most {
            let mut named = None;
            policy.victims(PageCount(1), &mut |page| named = Some(page));
            let Some(page) = named else { return };
            victims.push(page);
            let chunk = self.chunk_of(page);
            // The first chunk of all may come after `most` was chosen.
            let fits = victims.len() + per_chunk <= BATCH_MAX + 1;
            if !fits || !self.chunks().is_whole(chunk) {
                continue;
            }
            for other in self.table().pages_of_chunk(chunk).filter(|other| *other != page) {
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
        if !self.chunks().is_whole(chunk) {
            return self.pool().frames_for_eviction(count);
        }
        self.chunks().set_whole(chunk, false);
        if count as u64 == self.pages_per_chunk()
            && let Some(run) = self.frames().take_run()
        {
            return Some((run, count));
        }
        self.pool().frames_for_eviction(count)
    }

    /// Takes the contents of `count` `Moving` pages from `first` into neighbouring frames and
    /// unmaps them from the region; returns what it took. The next one is in use by the kernel, or
    /// refused, and stays as it was; the frames that are left are given back.
    pub(super) fn take_contents(&self, first: PageId, frame: FrameId, count: usize) -> Moved {
        if self.pool().evicts_by_move() {
            self.take_by_move(first, frame, count)
        } else {
            let taken = self.take_by_copy(first, frame);
            Moved { bytes: usize::from(taken) * self.page_bytes(), refused: false }
        }
    }

    fn take_by_move(&self, first: PageId, frame: FrameId, count: usize) -> Moved {
        let len = count * self.page_bytes();
        self.mapper().clear_way(self.frames().addr(frame), len);
        let moved = match self.mapper().owns(self.addr(first), len) {
            true => self.move_or_stop(self.frames().addr(frame), self.addr(first), len),
            false => Moved { bytes: 0, refused: true },
        };
        let whole = moved.bytes / self.page_bytes();
        let end = frame.0 + count as u32;
        (frame.0 + whole as u32..end).for_each(|frame| drop(self.frames().release(FrameId(frame))));
        moved
    }

    /// Takes the content of a page that MOVE refuses into a frame, which is returned. (Direct I/O of
    /// the application in flight is not seen: such I/O began before the program took the right to
    /// write there away.)
    pub(super) fn copy_refused(&self, page: PageId) -> Option<FrameId> {
        let frame = self.pool().frame_for_copy()?;
        self.take_by_copy(page, frame).then_some(frame)
    }

    /// Moves memory between the region and frames, see [`Mapper::move_memory`]: memory locks that are in
    /// the way are taken off, and the program is told, because what is locked could never leave, and a
    /// limit that cannot be kept helps nobody.
    ///
    /// # Safety
    /// As for `Uffd::move_pages`.
    pub(in crate::paging) unsafe fn move_memory(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: Wake,
    ) -> Outcome {
        let unlock = || self.take_locks_off(dst, src, len);
        // SAFETY: the caller's promise.
        unsafe { self.mapper().move_memory(dst, src, len, wake, unlock) }
    }

    /// Ends all memory locks of region and frames if one is on either range; says whether.
    fn take_locks_off(&self, dst: usize, src: usize, len: usize) -> bool {
        let (far, staged) = if self.table().contains(dst) { (dst, src) } else { (src, dst) };
        let locked = self.table().is_locked(far, len) || self.frames().is_locked(staged, len);
        if locked {
            self.frames().unlock();
            self.table().unlock();
            diagnostics::unlocked();
        }
        locked
    }

    /// Moves memory of the region out to frames, or of a run of frames to an empty chunk, whole
    /// pages of it: a page of which only a part could be moved is put together again.
    pub(in crate::paging) fn move_or_stop(&self, dst: usize, src: usize, len: usize) -> Moved {
        // SAFETY: the pages are `Moving` by this thread, or in a chunk that it latched, and it may
        // unmap them; the frames are empty ones of this thread's. Or the frames are a run of this
        // thread's, and the pages are `Moving` by it and missing.
        let outcome = unsafe { self.move_memory(dst, src, len, Wake::No) };
        let moved = match outcome {
            Outcome::Done => return Moved { bytes: len, refused: false },
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
        let refused = matches!(outcome, Outcome::Failed { errno: sys::EINVAL, .. });
        let whole = moved - moved % self.page_bytes();
        if moved > whole {
            self.mapper().move_back(dst + whole, src + whole, moved - whole);
        }
        Moved { bytes: whole, refused }
    }

    /// Maps the zero page into the holes of a frame, so that it can go back to the region whole.
    pub(super) fn fill_frame_holes(&self, frame: FrameId) {
        for at in (0..self.page_bytes()).step_by(KERNEL_PAGE) {
            let unit = (self.frames().addr(frame) + at) as *const u8;
            // SAFETY: the frame is this thread's and readable; a hole of staging memory is filled
            // by the kernel.
            let _ = unsafe { unit.read_volatile() };
        }
    }

    /// For kernels without MOVE, and pages that it refuses: nobody can write the page while it is
    /// copied, because writes fault first and wait for its word. (A device request of the application
    /// in flight is not seen: such kernels need a pin around direct I/O into far memory.)
    fn take_by_copy(&self, page: PageId, frame: FrameId) -> bool {
        let protected = self.mapper().forbid_writes(self.addr(page)).is_ok();
        let copied = protected
            && self.mapper().fill_holes(self.addr(page))
            && self.copy_to_frame(page, frame);
        if !copied || !self.owns_page(page) {
            // Where it stays protected although its word does not say so, a write lifts that.
            self.pool().give_copy_frame_back(frame);
            return false;
        }
        let piece = Piece::new(self.addr(page), self.page_bytes());
        // SAFETY: the page is `Moving` by this thread and its content is in the frame.
        unsafe { self.mapper().discard(&[piece]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        self.pool().charge_copied();
        true
    }

    /// Copies a page, `Moving` by this thread and without holes, to a frame. `false`: the program has
    /// protected it against reading.
    fn copy_to_frame(&self, page: PageId, frame: FrameId) -> bool {
        // SAFETY: the frame is this thread's and `page_bytes` long.
        unsafe { copy_checked(self.addr(page), self.frames().ptr(frame), self.page_bytes()) }
    }

    /// Maps a cooling frame's content back as `page`, which is `Moving` by this thread. Returns
    /// what that leaves of the frame.
    pub(in crate::paging) fn return_frame(&self, page: PageId, frame: FrameId) -> Result<Fate> {
        if !self.pool().evicts_by_move() {
            return self.copy_rest(page, frame, 0, Protect::No).map(|()| Fate::Dropped);
        }
        let (dst, src) = (self.addr(page), self.frames().addr(frame));
        self.mapper().clear_way(dst, self.page_bytes());
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content and nobody else moves it.
        let outcome = unsafe { self.move_memory(dst, src, self.page_bytes(), Wake::No) };
        match outcome {
            Outcome::Done => Ok(Fate::MovedBack),
            // A page half of which is mapped cannot cool on: threads may write to that half.
            Outcome::Busy { bytes }
            | Outcome::Present { bytes }
            | Outcome::Failed { bytes, .. }
                if bytes > 0 || is_copied_then(outcome) =>
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
        let (dst, src) = (self.addr(page), self.frames().addr(frame));
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content.
        let bytes = match unsafe { self.move_memory(dst, src, self.page_bytes(), Wake::No) } {
            Outcome::Done => return true,
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
        if bytes > 0 {
            self.mapper().move_back(dst, src, bytes);
        }
        false
    }
}
