//! Installing: content of frames, zeros, and the marks of lost pages.
#![expect(unsafe_code, reason = "installs pages of the region")]

use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageId};
use crate::paging::diagnostics;
use crate::paging::fault::status::FaultStatus;
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::errno_of;
use crate::paging::pager::mapper::{install_error, is_copied_then};
use crate::sys;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{HUGE_PAGE, Piece};

/// How a page that was read is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Guard {
    /// Writable: it is being written, or cannot be protected.
    Open,
    /// Write-protected, so that the first write is seen.
    Protected,
    /// Writable, because it will probably be written.
    Guessed,
}

impl Guard {
    pub(crate) fn protect(self) -> Protect {
        if self == Guard::Protected { Protect::Yes } else { Protect::No }
    }

    /// Marks the word of the page accordingly.
    pub(crate) fn mark(self, word: Word) -> Word {
        word.with_protected(self == Guard::Protected).with_guessed(self == Guard::Guessed)
    }
}

impl Pager {
    /// Maps a frame's content as `page`, which is `Moving` by this thread. The frame is consumed,
    /// its memory or the charge of the fill now the page's. Who waits is woken by that, if asked
    /// for, or by [`settle_mapped`](Self::settle_mapped).
    ///
    /// # Errors
    /// When the kernel is out of memory: the page is still missing, the frame still the caller's.
    pub(crate) fn install(
        &self,
        page: PageId,
        frame: FrameId,
        protect: Protect,
        wake: Wake,
    ) -> Result<()> {
        let (dst, src) = (self.addr(page), self.frames().addr(frame));
        let by_move = self.pool().moves_in(frame);
        let outcome = if by_move {
            self.mapper().clear_way(dst, self.page_bytes());
            // SAFETY: the page is missing and this thread alone may fill it (it is `Moving`); the
            // frame is this thread's and holds the page's content.
            unsafe { self.move_memory(dst, src, self.page_bytes(), wake) }
        } else {
            // SAFETY: as above.
            unsafe { self.mapper().copy(dst, src as *const u8, protect, wake) }
        };
        let mapped = match outcome {
            Outcome::Done => {
                self.mapper().note_mapped();
                match by_move {
                    true => self.frames().put_empty(frame),
                    false => self.pool().recycle(frame),
                }
                return Ok(());
            }
            // Rarely, just after a device read, the kernel still holds the frame.
            Outcome::Busy { bytes } => {
                self.counters().install_busy.bump();
                bytes
            }
            // Nobody else fills it. Should the kernel say so of a page that is missing: once more.
            Outcome::Present { bytes } => {
                self.check_missing(page, bytes);
                bytes
            }
            Outcome::Failed { bytes, .. } => bytes,
        };
        if mapped == 0 && !is_copied_then(outcome) {
            return Err(install_error(outcome));
        }
        // A page half of which is mapped cannot be tried again: nor can it be unmapped, for
        // threads may have written to that half.
        self.copy_rest(page, frame, mapped, protect)?;
        if wake == Wake::Yes {
            self.wake(page);
        }
        if by_move {
            // The page is mapped, whatever becomes of the frame's memory.
            drop(self.frames().release(frame));
        } else {
            self.pool().recycle(frame);
        }
        Ok(())
    }

    /// Maps a run of frames, with its content, as the chunk that begins with `first`: all of its
    /// pages are `Moving` by this thread. Returns how many of them are mapped, the first ones; the
    /// frames of the others are as they were.
    pub(in crate::paging) fn map_chunk(&self, first: PageId, frame: FrameId) -> usize {
        let chunk = Piece::new(self.addr(first), HUGE_PAGE);
        // A huge page can be moved whole to where there is no page table. One that small pages have
        // left behind goes with them (Linux 6.14); before that, MOVE takes the huge page apart.
        if !self.mapper().owns(chunk.start(), HUGE_PAGE) {
            return 0;
        }
        // SAFETY: nothing is mapped there: all pages are `Moving` by this thread and missing.
        drop(unsafe { self.mapper().discard(&[chunk]) });
        let moved = self.move_or_stop(self.addr(first), self.frames().addr(frame), HUGE_PAGE).bytes;
        let pages = moved / self.page_bytes();
        (frame.0..).take(pages).for_each(|n| self.frames().put_empty(FrameId(n)));
        if moved == HUGE_PAGE {
            self.chunks().set_whole(self.chunk_of(first), true);
        }
        pages
    }

    /// Ends the process when a page that this thread alone may fill is mapped from a byte on.
    /// Nobody knows what it holds, and it would be tried for ever.
    fn check_missing(&self, page: PageId, bytes: usize) {
        let mut there = [false];
        let start = self.addr(page) + bytes;
        let Some(map) = self.mapper().pagemap() else { return };
        if map.scan(start, &mut there).is_ok() && there[0] {
            diagnostics::broken(format_args!(
                "{page} at {:#x}, {:?}, is mapped from byte {bytes} on although it was missing \
                 (in-thread: {}, by move: {} in, {} out)",
                self.addr(page),
                self.word(page).load(),
                self.mapper().is_in_thread(),
                self.pool().fills_by_move(),
                self.pool().evicts_by_move(),
            ));
        }
    }

    /// How a page read from the store into `frame` is to be mapped, for a write or not.
    pub(crate) fn guard(&self, page: PageId, frame: FrameId, write: bool) -> Guard {
        if self.pool().moves_in(frame) || write {
            return Guard::Open;
        }
        if self.readahead.expects_write(page) {
            return Guard::Guessed;
        }
        self.readahead.was_not_written(page);
        Guard::Protected
    }

    /// Copies what of a page is not mapped yet from a frame, which keeps its memory.
    ///
    /// # Errors
    /// When the kernel is out of memory and nothing of the page is mapped.
    pub(crate) fn copy_rest(
        &self,
        page: PageId,
        frame: FrameId,
        mapped: usize,
        protect: Protect,
    ) -> Result<()> {
        // SAFETY: the page is `Moving` by this thread, and the frame holds its content.
        unsafe {
            self.mapper().copy_rest(self.addr(page), self.frames().ptr(frame), mapped, protect)
        }
    }

    /// Maps zeros as `page`, which is `Moving` by this thread. Returns `false` when the limit
    /// leaves no memory for it.
    ///
    /// # Errors
    /// When the kernel is out of memory: the page is still missing.
    pub(crate) fn install_zeros(&self, page: PageId) -> Result<bool> {
        if !self.pool().has_room_for_fresh() {
            return Ok(false);
        }
        // COPY would build small pages.
        let only_huge = self.pool().fills_by_move() && self.page_bytes() >= HUGE_PAGE;
        if only_huge && let Some(frame) = self.pool().charged_frame(self.pool().headroom()) {
            // Fresh memory, for spare frames of this size are and empty ones get some.
            if let Err(error) = self.frames().populate(frame) {
                self.pool().recycle(frame);
                return Err(error);
            }
            return match self.install(page, frame, Protect::No, Wake::No) {
                Ok(()) => Ok(true),
                Err(error) => {
                    self.pool().recycle(frame);
                    Err(error)
                }
            };
        }
        if only_huge || !self.pool().charge_page() {
            return Ok(false);
        }
        // SAFETY: the page is missing and `Moving` by this thread; `zeros` is never written.
        let copied = unsafe { self.mapper().copy_zeros(self.addr(page)) };
        if copied.is_err() {
            self.budget().uncharge(self.page_size());
        }
        copied.map(|()| true)
    }

    // Failure.

    /// Says what is to become of a fault whose page, `moving` by this thread, could not be mapped.
    /// `before` is what the page was.
    pub(in crate::paging) fn not_mapped(
        &self,
        page: PageId,
        moving: Word,
        before: Word,
        error: &Error,
    ) -> FaultStatus {
        match errno_of(error) {
            // The program has unmapped the range: who touches it gets what that costs.
            sys::ENOENT => {
                self.settle(page, moving, before);
                self.wake(page);
                FaultStatus::Resolved
            }
            sys::ENOMEM | sys::EAGAIN | sys::EBUSY | sys::EEXIST
                if !self.mapper().fails_too_long(self.health().deadline()) =>
            {
                diagnostics::warn("a page could not be mapped, trying again", error);
                self.settle(page, moving, before);
                FaultStatus::TryAgain
            }
            // It would fail for ever: the program has forbidden the call (seccomp).
            _ => {
                self.poison(page, moving, error);
                FaultStatus::Resolved
            }
        }
    }

    /// Makes a `Moving`, missing page lost: a touch is SIGBUS from now on, and who waits gets it.
    /// Says so on standard error.
    pub(crate) fn poison(&self, page: PageId, from: Word, cause: &Error) {
        self.counters().poisoned.bump();
        let room = diagnostics::NoRoom {
            limit: self.budget().limit(),
            tables: self.tables().bytes(),
            pinned: ByteCount(self.table().pinned() * self.page_size().0),
            errno: self.health().write_errno(),
        };
        diagnostics::lost_page(self.addr(page), self.page_bytes(), cause, room);
        if self.mapper().can_poison() {
            // SAFETY: the page is missing and its content is lost.
            let outcome = unsafe { self.mapper().poison(self.addr(page)) };
            if outcome != Outcome::Done {
                diagnostics::fatal("a lost page could not be poisoned", &install_error(outcome));
            }
        } else if let Err(error) = self.table().fence(page) {
            diagnostics::fatal("a lost page could not be fenced off", &error);
        }
        self.settle(page, from, Word::poisoned(from.slot()));
        self.wake(page);
    }

    /// Makes a poisoned page that was discarded usable again.
    pub(super) fn unpoison(&self, page: PageId) {
        let mended = if self.mapper().can_poison() && self.owns_page(page) {
            let piece = Piece::new(self.addr(page), self.page_bytes());
            // SAFETY: the page's content is lost already; this clears the marker.
            unsafe { self.mapper().discard(&[piece]) }
        } else {
            self.map_anew(page)
        };
        if let Err(error) = mended {
            diagnostics::fatal("a lost page could not be made usable again", &error);
        }
    }
}
