//! Memory: pages of the region, staging frames, and content that goes between them.
//!
//! # Invariants
//! 1. A page is in the policy's lists from just before it becomes `Resident` until a victim is taken or it is
//!    discarded.
#![expect(unsafe_code, reason = "moves and copies pages of the region")]

use crate::base::error::Result;
use crate::base::units::{ByteCount, PageId};
use crate::limit::budget::Budget;
use crate::paging::counters::Counters;
use crate::paging::diagnostics;
use crate::paging::evict::arrivals::Residents;
use crate::paging::evict::policy::Insert;
use crate::paging::page::PAGE;
use crate::paging::page::chunks::Chunks;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::frames::Frames;
use crate::paging::page::word::{FrameId, PageWord, Word};
use crate::paging::pager::frame_pool::FramePool;
use crate::paging::pager::mapper::{Mapper, Moved, is_copied_then};
use crate::paging::pager::pieces::install_error;
use crate::paging::pager::table::PageTable;
use crate::sys;
use crate::sys::signals::FaultLock;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{HUGE_PAGE, Piece, copy_checked};

/// A page whose content was read: its word, `Moving` by this thread, and whether a thread waits for it.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct ReadPage {
    pub(in crate::paging) moving: Word,
    pub(in crate::paging) wanted: bool,
}

/// Pages and frames, what maps them, the policy, which knows what is mapped, and the counters of all that.
#[derive(Debug)]
pub(in crate::paging) struct RegionMemory {
    pub(super) table: PageTable,
    pub(super) chunks: Chunks,
    pub(super) mapper: Mapper,
    pub(super) pool: FramePool,
    pub(super) policy: FaultLock<Residents>,
    pub(super) counters: Counters,
}

impl RegionMemory {
    /// Addresses and words of the pages.
    pub(in crate::paging) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Which chunks the kernel fills.
    pub(in crate::paging) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// Record of the mappings.
    pub(in crate::paging) fn mapper(&self) -> &Mapper {
        &self.mapper
    }

    /// Frames and their charge.
    pub(in crate::paging) fn pool(&self) -> &FramePool {
        &self.pool
    }

    /// The policy's records.
    pub(in crate::paging) fn policy(&self) -> &FaultLock<Residents> {
        &self.policy
    }

    pub(in crate::paging) fn frames(&self) -> &Frames {
        self.pool.staging()
    }

    pub(in crate::paging) fn budget(&self) -> &Budget {
        self.pool.budget()
    }

    pub(in crate::paging) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// True if chunks that a stream leads to are read whole, into runs of frames.
    pub(in crate::paging) fn reads_chunks(&self) -> bool {
        self.pool.moves() && !self.mapper.is_in_thread() && self.frames().has_runs()
    }

    /// True if a page is far memory.
    pub(in crate::paging) fn owns_page(&self, page: PageId) -> bool {
        self.mapper.owns(self.table.addr(page), PAGE)
    }

    /// True if nothing is mapped at a page. Without a page map that is found out by filling it.
    pub(in crate::paging) fn is_hole(&self, page: PageId) -> bool {
        let Some(map) = self.mapper.pagemap() else { return true };
        let mut there = [true];
        map.scan(self.table.addr(page), &mut there).is_ok() && !there[0]
    }

    /// Maps far memory without content where a page is.
    pub(in crate::paging) fn map_anew(&self, page: PageId) -> Result<()> {
        let register = || self.mapper.register_faults(self.table.addr(page), PAGE);
        self.table.map_anew(page, register)
    }

    // In.

    /// Copies a missing page from a frame, which keeps its memory.
    ///
    /// # Errors
    /// When the kernel is out of memory.
    pub(in crate::paging) fn copy_page(
        &self,
        page: PageId,
        frame: FrameId,
        protect: Protect,
    ) -> Result<()> {
        let (start, content) = (self.table.addr(page), self.frames().ptr(frame));
        // SAFETY: the page is `Moving` by this thread, and the frame holds its content.
        match unsafe { self.mapper.copy(start, content, PAGE, protect, Wake::No) } {
            Outcome::Done => Ok(()),
            refused => Err(install_error(refused)),
        }
    }

    /// Maps a cooling frame's content back as `page`, which is `Moving` by this thread. Returns
    /// what that leaves of the frame.
    pub(in crate::paging) fn return_frame(
        &self,
        page: PageId,
        frame: FrameId,
    ) -> Result<FrameOutcome> {
        if !self.pool.moves() {
            return self.copy_page(page, frame, Protect::No).map(|()| FrameOutcome::Dropped);
        }
        let (dst, src) = (self.table.addr(page), self.frames().addr(frame));
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content and nobody else moves it.
        let outcome = unsafe { self.move_memory(dst, src, PAGE, Wake::No) };
        if outcome != Outcome::Done {
            if !is_copied_then(outcome) {
                return Err(install_error(outcome));
            }
            self.copy_page(page, frame, Protect::No)?;
            // SAFETY: the page has the content. The charge is the page's now: the frame's memory goes at once.
            drop(unsafe { self.mapper.discard(&[Piece::new(src, PAGE)]) });
        }
        Ok(FrameOutcome::MovedBack)
    }

    /// Moves the content of a page, `Moving` by this thread, back from a frame that the device may
    /// still be reading: what the device gets then is nobody's. `false`: the kernel holds on to
    /// the frame, which is as it was.
    pub(in crate::paging) fn try_return(&self, page: PageId, frame: FrameId) -> bool {
        let (dst, src) = (self.table.addr(page), self.frames().addr(frame));
        // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
        // content.
        unsafe { self.move_memory(dst, src, PAGE, Wake::No) == Outcome::Done }
    }

    /// Maps the content of neighbouring frames, from `frame` on, as `count` pages from `first` on, which are `Moving` by
    /// this thread. Returns how many of them are mapped, the first ones, at least one, and whether they are
    /// write-protected: where MOVE refuses, because the program has split the mapping or may not write there, they are,
    /// or they could not leave again. Their frames are consumed, the memory or the charge of the fill now the page's. The
    /// waiting threads are woken by that, if asked for, or by [`wake`](RegionMemory::wake).
    ///
    /// # Errors
    /// When the kernel is out of memory: the pages are still missing, the frames still the caller's.
    pub(in crate::paging) fn install(
        &self,
        (first, frame, count): (PageId, FrameId, usize),
        protect: Protect,
        wake: Wake,
    ) -> Result<(usize, Protect)> {
        let (dst, src) = (self.table.addr(first), self.frames().addr(frame));
        let len = count * PAGE;
        let by_move = self.pool.moves_in(frame);
        let outcome = if by_move {
            self.clear_way(dst, len);
            // SAFETY: the pages are missing and this thread alone may fill them (they are `Moving`); the
            // frames are this thread's and hold the pages' contents.
            unsafe { self.move_memory(dst, src, len, wake) }
        } else {
            // SAFETY: as above.
            unsafe { self.mapper.copy(dst, src as *const u8, len, protect, wake) }
        };
        match outcome {
            Outcome::Done => self.mapper.note_mapped(),
            // Rarely, just after a device read, the kernel still holds the frame.
            Outcome::Busy { .. } => self.counters.install_busy.bump(),
            // Nobody else fills it. Should the kernel say so of a page that is missing: once more.
            Outcome::Present { bytes } => self.check_missing(first, bytes),
            Outcome::Failed { .. } => {}
        }
        let mapped = outcome.bytes_of(len);
        if mapped == HUGE_PAGE && self.frames().run_of(frame).is_some() {
            self.chunks.set_whole(self.table.chunk_of(first), true);
            self.counters.chunks_read.bump();
        }
        if mapped == 0 && !is_copied_then(outcome) {
            return Err(install_error(outcome));
        }
        let whole = mapped / PAGE;
        if whole > 0 {
            match by_move {
                true => (frame.0..).take(whole).for_each(|n| self.frames().put_empty(FrameId(n))),
                false => self.pool.recycle(frame, whole),
            }
            return Ok((whole, protect));
        }
        let protect = if by_move { Protect::Yes } else { protect };
        self.copy_page(first, frame, protect)?;
        if wake == Wake::Yes {
            self.wake(first);
        }
        match by_move {
            // The page is mapped, whatever becomes of the frame's memory.
            true => drop(self.frames().release(frame)),
            false => self.pool.recycle(frame, 1),
        }
        Ok((1, protect))
    }

    /// Clears the way for a MOVE of `len` bytes to `dst`, where nothing is mapped. A chunk can be moved as the huge page
    /// that it is to where there is no page table. One that small pages have left behind goes with them (Linux 6.14);
    /// before that, MOVE takes the huge page apart.
    fn clear_way(&self, dst: usize, len: usize) {
        if len >= HUGE_PAGE && self.mapper.owns(dst, len) {
            // SAFETY: nothing is mapped there: all pages are `Moving` by this thread and missing.
            drop(unsafe { self.mapper.discard(&[Piece::new(dst, len)]) });
        }
    }

    /// Maps zeros as `most` neighbouring pages, which are `Moving` by this thread, or as the first one. Returns how many;
    /// none when the limit leaves no memory for it.
    ///
    /// # Errors
    /// When the kernel is out of memory: the first page is still missing.
    pub(in crate::paging) fn install_zeros(&self, first: PageId, most: usize) -> Result<usize> {
        // COPY maps over the guards that the program has put there (`MADV_GUARD_INSTALL`).
        let map = self.mapper.pagemap().filter(|_| most > 1);
        let free = map.map_or(1, |map| map.absent_from(self.table.addr(first), most * PAGE) / PAGE);
        let charged = [free.max(1), 1].into_iter().find(|count| self.pool.charge_fresh(*count));
        let Some(count) = charged else { return Ok(0) };
        let copy = |count: usize| {
            // SAFETY: the pages are missing and `Moving` by this thread.
            let outcome = unsafe { self.mapper.copy_zeros(self.table.addr(first), count * PAGE) };
            let mapped = outcome.bytes_of(count * PAGE) / PAGE;
            if mapped == 0 { Err(install_error(outcome)) } else { Ok(mapped) }
        };
        // The kernel refuses all of them where some lie in another mapping.
        let installed = copy(count).or_else(|_| copy(1));
        let absent = count - installed.as_ref().unwrap_or(&0);
        self.pool.budget().uncharge(ByteCount((absent * PAGE) as u64));
        installed
    }

    /// Ends the process when a page that this thread alone may fill is mapped from a byte on.
    /// Nobody knows what it holds, and it would be tried for ever.
    fn check_missing(&self, page: PageId, bytes: usize) {
        let mut there = [false];
        let start = self.table.addr(page) + bytes;
        let Some(map) = self.mapper.pagemap() else { return };
        if map.scan(start, &mut there).is_ok() && there[0] {
            diagnostics::broken(format_args!(
                "{page} at {:#x}, {:?}, is mapped from byte {bytes} on although it was missing \
                 (in-thread: {}, out by move: {})",
                self.table.addr(page),
                self.table.word(page).load(),
                self.mapper.is_in_thread(),
                self.pool.moves(),
            ));
        }
    }

    // Out.

    /// Takes the contents of `count` `Moving` pages from `first` into neighbouring frames and
    /// unmaps them from the region; returns what it took. The next one is in use by the kernel, or
    /// refused, and stays as it was; the frames that are left are given back.
    pub(in crate::paging) fn take_contents(
        &self,
        first: PageId,
        frame: FrameId,
        count: usize,
    ) -> Moved {
        if self.pool.moves() {
            self.take_by_move(first, frame, count)
        } else {
            let taken = self.take_by_copy(first, frame);
            Moved { bytes: usize::from(taken) * PAGE, refused: false }
        }
    }

    fn take_by_move(&self, first: PageId, frame: FrameId, count: usize) -> Moved {
        let len = count * PAGE;
        let mut moved = match self.mapper.owns(self.table.addr(first), len) {
            true => self.move_or_stop(self.frames().addr(frame), self.table.addr(first), len),
            false => Moved { bytes: 0, refused: true },
        };
        if moved.refused && count == 1 && self.move_refused(first, frame) {
            moved.bytes = len;
        }
        let whole = moved.bytes / PAGE;
        let end = frame.0 + count as u32;
        (frame.0 + whole as u32..end).for_each(|frame| drop(self.frames().release(FrameId(frame))));
        moved
    }

    /// Takes the content of a page that MOVE does not take into a frame, which is returned. Nothing has written the
    /// page since it was installed, because it was protected all along: no device is writing to it now.
    pub(in crate::paging) fn copy_protected(&self, page: PageId) -> Option<FrameId> {
        let frame = self.pool.frame_for_copy()?;
        self.take_by_copy(page, frame).then_some(frame)
    }

    /// For kernels without MOVE, and pages that are protected: nobody can write the page while it is
    /// copied, because writes fault first and wait for its word. (A device request of the application
    /// in flight is not seen: such kernels need a pin around direct I/O into far memory.)
    fn take_by_copy(&self, page: PageId, frame: FrameId) -> bool {
        let protected = self.mapper.forbid_writes(self.table.addr(page)).is_ok();
        let copied = protected
            && self.mapper.fill_hole(self.table.addr(page))
            && self.copy_to_frame(page, frame);
        if !copied || !self.owns_page(page) {
            // Where it stays protected although its word does not say so, a write lifts that.
            self.pool.give_copy_frame_back(frame);
            return false;
        }
        let piece = Piece::new(self.table.addr(page), PAGE);
        // SAFETY: the page is `Moving` by this thread and its content is in the frame.
        unsafe { self.mapper.discard(&[piece]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        self.pool.charge_copied();
        true
    }

    /// Copies a page, `Moving` by this thread and no hole, to a frame. `false`: the program has
    /// protected it against reading.
    fn copy_to_frame(&self, page: PageId, frame: FrameId) -> bool {
        // SAFETY: the frame is this thread's and a page long.
        unsafe { copy_checked(self.table.addr(page), self.frames().ptr(frame), PAGE) }
    }

    // Either way.

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
        unsafe { self.mapper.move_memory(dst, src, len, wake, unlock) }
    }

    /// Ends all memory locks of region and frames if one is on either range; says whether.
    fn take_locks_off(&self, dst: usize, src: usize, len: usize) -> bool {
        let (far, staged) = if self.table.contains(dst) { (dst, src) } else { (src, dst) };
        let locked = self.table.is_locked(far, len) || self.frames().is_locked(staged, len);
        if locked {
            self.frames().unlock();
            self.table.unlock();
            diagnostics::unlocked();
        }
        locked
    }

    /// Moves memory of the region out to frames, or of a run of frames to an empty chunk, as far as that goes.
    pub(in crate::paging) fn move_or_stop(&self, dst: usize, src: usize, len: usize) -> Moved {
        // SAFETY: the pages are `Moving` by this thread, or in a chunk that it latched, and it may
        // unmap them; the frames are empty ones of this thread's. Or the frames are a run of this
        // thread's, and the pages are `Moving` by it and missing.
        let outcome = unsafe { self.move_memory(dst, src, len, Wake::No) };
        let refused = matches!(outcome, Outcome::Failed { errno: sys::EINVAL | sys::ENOENT, .. });
        Moved { bytes: outcome.bytes_of(len), refused }
    }

    /// Moves a page, `Moving` by this thread, out to an empty frame of its own where MOVE refused it: the program has
    /// dropped it, or code may run in it. `false`: it stays as it was.
    fn move_refused(&self, page: PageId, frame: FrameId) -> bool {
        let (dst, src) = (self.frames().addr(frame), self.table.addr(page));
        // SAFETY: the page is `Moving` by this thread, which may unmap it; the frame is its own and empty.
        let act = || unsafe { self.move_memory(dst, src, PAGE, Wake::No) };
        // MOVE wants both sides to have the same protection. To what may not be written nothing helps.
        self.owns_page(page)
            && self.mapper.fill_hole(src)
            && (act() == Outcome::Done
                || self.frames().while_executable(frame, act) == Outcome::Done)
    }

    // Lost pages.

    /// Makes a poisoned page that was discarded usable again.
    pub(in crate::paging) fn unpoison(&self, page: PageId) {
        let mended = if self.mapper.can_poison() && self.owns_page(page) {
            let piece = Piece::new(self.table.addr(page), PAGE);
            // SAFETY: the page's content is lost already; this clears the marker.
            unsafe { self.mapper.discard(&[piece]) }
        } else {
            self.map_anew(page)
        };
        if let Err(error) = mended {
            diagnostics::fatal("a lost page could not be made usable again", &error);
        }
    }

    // Words.

    pub(in crate::paging) fn word(&self, page: PageId) -> &PageWord {
        self.table.word(page)
    }

    /// Ends this thread's `Moving`, see [`PageTable::publish`].
    pub(in crate::paging) fn publish(&self, page: PageId, from: Word, to: Word) {
        self.table.publish(page, from, to);
    }

    /// Makes a mapped `Moving` page resident. The policy hears of it first (invariant 1).
    pub(in crate::paging) fn publish_resident(
        &self,
        page: PageId,
        from: Word,
        to: Word,
        how: Option<Insert>,
    ) {
        {
            let mut policy = self.policy.lock();
            match how {
                Some(how) => self.note_return(how, policy.arrive(page, how)),
                None => {
                    policy.policy.retouched(page);
                    policy.list(page);
                }
            }
        }
        self.table.publish(page, from, to);
    }

    /// As [`publish_resident`](Self::publish_resident), for a page that was missing: wakes the threads that
    /// wait for it, as the last thing, because a thread that is woken may run at once in place of this
    /// one and must not find the page in its hands.
    pub(in crate::paging) fn publish_mapped(
        &self,
        page: PageId,
        from: Word,
        to: Word,
        how: Option<Insert>,
    ) {
        self.mapper.note_mapped();
        self.publish_resident(page, from, to, how);
        self.wake(page);
    }

    /// As [`publish_resident`](Self::publish_resident), for neighbouring pages that were read; `flagged` adds to their
    /// words.
    pub(in crate::paging) fn publish_read(
        &self,
        first: PageId,
        read: &[ReadPage],
        flagged: impl Fn(Word) -> Word,
    ) {
        let pages = || (first.0..).map(PageId).zip(read);
        {
            let mut policy = self.policy.lock();
            let mut rest = read;
            let mut page = first;
            while !rest.is_empty() {
                // What of a cluster comes in with a page that is wanted is used as one with it.
                let left = (self.table.pages_of_cluster(page).end - page.0) as usize;
                let cluster =
                    rest.split_off(..left.min(rest.len())).expect("no more than there are");
                let wanted = cluster.iter().any(|read| read.wanted);
                for _ in cluster {
                    let how = if wanted { Insert::Filled } else { Insert::Prefetched };
                    self.note_return(how, policy.arrive(page, how));
                    page = PageId(page.0 + 1);
                }
            }
        }
        for (page, read) in pages() {
            let resident = Word::resident(read.moving.slot()).with_prefetched(!read.wanted);
            self.table.publish(page, read.moving, flagged(resident));
        }
    }

    /// Counts a read of a page that has left while `distance` others did: that many pages more would have saved it. (What
    /// left as zeros comes back without a read.)
    fn note_return(&self, how: Insert, distance: Option<u64>) {
        let Some(distance) = distance.filter(|_| how != Insert::Fresh) else { return };
        let (limit, counters) = (self.budget().limit().0 / PAGE as u64, &self.counters);
        counters.reads_saved_by_eighth.add(u64::from(distance <= limit / 8));
        counters.reads_saved_by_quarter.add(u64::from(distance <= limit / 4));
    }

    /// Wakes the threads that wait for a page, to fault again.
    pub(in crate::paging) fn wake(&self, page: PageId) {
        self.mapper.wake(self.table.addr(page));
    }
}
