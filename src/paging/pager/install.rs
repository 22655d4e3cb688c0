//! Installing: content of frames, zeros, and the marks of lost pages.
#![expect(unsafe_code, reason = "installs pages of the region")]

use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageId};
use crate::paging::diagnostics;
use crate::paging::fault::status::FaultStatus;
use crate::paging::mapped_over;
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::errno_of;
use crate::paging::pager::mapper::is_copied_then;
use crate::paging::pager::pieces::install_error;
use crate::paging::pager::transfer;
use crate::sys;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{HUGE_PAGE, Piece};

/// How a page that was read is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WriteTracking {
    /// Writable: it is being written, or cannot be protected.
    Open,
    /// Write-protected, so that the first write is seen.
    Protected,
    /// Writable, because it will probably be written.
    Guessed,
}

impl WriteTracking {
    pub(crate) fn protect(self) -> Protect {
        if self == WriteTracking::Protected { Protect::Yes } else { Protect::No }
    }

    /// Marks the word of the page, which was mapped so, accordingly.
    pub(crate) fn mark(self, word: Word, protect: Protect) -> Word {
        word.with_protected(protect == Protect::Yes).with_guessed(self == WriteTracking::Guessed)
    }
}

/// Maps a frame's content as `page`, which is `Moving` by this thread; returns whether it is write-protected:
/// where MOVE refuses, because the program has split the mapping or may not write there, it is, or it could not
/// leave again. The frame is consumed, its memory or the charge of the fill now the page's. The waiting threads are
/// woken by that, if asked for, or by [`publish_mapped`](Pager::publish_mapped).
///
/// # Errors
/// When the kernel is out of memory: the page is still missing, the frame still the caller's.
pub(crate) fn install(
    pager: &Pager,
    page: PageId,
    frame: FrameId,
    protect: Protect,
    wake: Wake,
) -> Result<Protect> {
    let (dst, src) = (pager.addr(page), pager.frames().addr(frame));
    let by_move = pager.pool().moves_in(frame);
    let outcome = if by_move {
        pager.mapper().clear_way(dst, pager.page_bytes());
        // SAFETY: the page is missing and this thread alone may fill it (it is `Moving`); the
        // frame is this thread's and holds the page's content.
        unsafe { transfer::move_memory(pager, dst, src, pager.page_bytes(), wake) }
    } else {
        // SAFETY: as above.
        unsafe { pager.mapper().copy(dst, src as *const u8, protect, wake) }
    };
    let mapped = match outcome {
        Outcome::Done => {
            pager.mapper().note_mapped();
            match by_move {
                true => pager.frames().put_empty(frame),
                false => pager.pool().recycle(frame),
            }
            return Ok(protect);
        }
        // Rarely, just after a device read, the kernel still holds the frame.
        Outcome::Busy { bytes } => {
            pager.counters().install_busy.bump();
            bytes
        }
        // Nobody else fills it. Should the kernel say so of a page that is missing: once more.
        Outcome::Present { bytes } => {
            check_missing(pager, page, bytes);
            bytes
        }
        Outcome::Failed { bytes, .. } => bytes,
    };
    if mapped == 0 && !is_copied_then(outcome) {
        return Err(install_error(outcome));
    }
    let protect = if by_move && mapped == 0 { Protect::Yes } else { protect };
    // A page half of which is mapped cannot be tried again: nor can it be unmapped, for
    // threads may have written to that half.
    transfer::copy_rest(pager, page, frame, mapped, protect)?;
    if wake == Wake::Yes {
        pager.wake(page);
    }
    if by_move {
        // The page is mapped, whatever becomes of the frame's memory.
        drop(pager.frames().release(frame));
    } else {
        pager.pool().recycle(frame);
    }
    Ok(protect)
}

/// Maps a run of frames, with its content, as the chunk that begins with `first`: all of its
/// pages are `Moving` by this thread. Returns how many of them are mapped, the first ones; the
/// frames of the others are as they were.
pub(in crate::paging) fn map_chunk(pager: &Pager, first: PageId, frame: FrameId) -> usize {
    let chunk = Piece::new(pager.addr(first), HUGE_PAGE);
    // A huge page can be moved whole to where there is no page table. One that small pages have
    // left behind goes with them (Linux 6.14); before that, MOVE takes the huge page apart.
    if !pager.mapper().owns(chunk.start(), HUGE_PAGE) {
        return 0;
    }
    // SAFETY: nothing is mapped there: all pages are `Moving` by this thread and missing.
    drop(unsafe { pager.mapper().discard(&[chunk]) });
    let moved =
        transfer::move_or_stop(pager, pager.addr(first), pager.frames().addr(frame), HUGE_PAGE)
            .bytes;
    let pages = moved / pager.page_bytes();
    (frame.0..).take(pages).for_each(|n| pager.frames().put_empty(FrameId(n)));
    if moved == HUGE_PAGE {
        pager.chunks().set_whole(pager.chunk_of(first), true);
    }
    pages
}

/// Ends the process when a page that this thread alone may fill is mapped from a byte on.
/// Nobody knows what it holds, and it would be tried for ever.
fn check_missing(pager: &Pager, page: PageId, bytes: usize) {
    let mut there = [false];
    let start = pager.addr(page) + bytes;
    let Some(map) = pager.mapper().pagemap() else { return };
    if map.scan(start, &mut there).is_ok() && there[0] {
        diagnostics::broken(format_args!(
            "{page} at {:#x}, {:?}, is mapped from byte {bytes} on although it was missing \
             (in-thread: {}, by move: {} in, {} out)",
            pager.addr(page),
            pager.word(page).load(),
            pager.mapper().is_in_thread(),
            pager.pool().moves().fill,
            pager.pool().moves().evict,
        ));
    }
}

/// How a page read from the store into `frame` is to be mapped, for a write or not.
pub(crate) fn write_tracking(
    pager: &Pager,
    page: PageId,
    frame: FrameId,
    write: bool,
) -> WriteTracking {
    if pager.pool().moves_in(frame) || write {
        return WriteTracking::Open;
    }
    if pager.readahead.expects_write(page) {
        return WriteTracking::Guessed;
    }
    pager.readahead.was_not_written(page);
    WriteTracking::Protected
}

/// Maps zeros as `page`, which is `Moving` by this thread. Returns `false` when the limit
/// leaves no memory for it.
///
/// # Errors
/// When the kernel is out of memory: the page is still missing.
pub(crate) fn install_zeros(pager: &Pager, page: PageId) -> Result<bool> {
    if !pager.pool().has_room_for_fresh() {
        return Ok(false);
    }
    // COPY would build small pages.
    let only_huge = pager.pool().moves().fill && pager.page_bytes() >= HUGE_PAGE;
    if only_huge && let Some(frame) = pager.pool().charged_frame(pager.pool().headroom()) {
        // Fresh memory, for spare frames of this size are and empty ones get some.
        if let Err(error) = pager.frames().populate(frame) {
            pager.pool().recycle(frame);
            return Err(error);
        }
        return match install(pager, page, frame, Protect::No, Wake::No) {
            Ok(_) => Ok(true),
            Err(error) => {
                pager.pool().recycle(frame);
                Err(error)
            }
        };
    }
    if only_huge || !pager.pool().charge_page() {
        return Ok(false);
    }
    // SAFETY: the page is missing and `Moving` by this thread; `zeros` is never written.
    let copied = unsafe { pager.mapper().copy_zeros(pager.addr(page)) };
    if copied.is_err() {
        pager.budget().uncharge(pager.page_size());
    }
    copied.map(|()| true)
}

// Failure.

/// Whether the kernel may soon do what it has refused.
pub(in crate::paging) fn is_passing(pager: &Pager, error: &Error) -> bool {
    matches!(errno_of(error), sys::ENOMEM | sys::EAGAIN | sys::EBUSY | sys::EEXIST)
        && !pager.mapper().fails_too_long(pager.health().deadline())
}

/// Says what is to become of a fault whose page, `moving` by this thread, could not be mapped.
/// `before` is what the page was.
pub(in crate::paging) fn not_mapped(
    pager: &Pager,
    page: PageId,
    moving: Word,
    before: Word,
    error: &Error,
) -> FaultStatus {
    match errno_of(error) {
        // The program has unmapped the range: who touches it gets what that costs.
        sys::ENOENT => {
            pager.publish(page, moving, before);
            pager.wake(page);
            FaultStatus::Resolved
        }
        _ if is_passing(pager, error) => {
            diagnostics::warn("a page could not be mapped, trying again", error);
            pager.publish(page, moving, before);
            FaultStatus::TryAgain
        }
        // It would fail for ever: the program has forbidden the call (seccomp).
        _ => {
            poison(pager, page, moving, error);
            FaultStatus::Resolved
        }
    }
}

/// Holders of the limit's memory now.
pub(in crate::paging) fn no_room(pager: &Pager) -> diagnostics::NoRoom {
    diagnostics::NoRoom {
        limit: pager.budget().limit(),
        tables: pager.tables().bytes(),
        pinned: ByteCount(pager.table().pinned() * pager.page_size().0),
        errno: pager.health().write_errno(),
    }
}

/// Makes a `Moving`, missing page lost: a touch is SIGBUS from now on, as for the threads that wait.
/// Says so on standard error.
pub(crate) fn poison(pager: &Pager, page: PageId, from: Word, cause: &Error) {
    pager.counters().poisoned.bump();
    diagnostics::lost_page(pager.addr(page), pager.page_bytes(), cause, no_room(pager));
    if pager.mapper().can_poison() {
        // SAFETY: the page is missing and its content is lost.
        let outcome = unsafe { pager.mapper().poison(pager.addr(page)) };
        if outcome != Outcome::Done {
            diagnostics::fatal("a lost page could not be poisoned", &install_error(outcome));
        }
    } else if let Err(error) = pager.table().fence(page) {
        diagnostics::fatal("a lost page could not be fenced off", &error);
    }
    pager.publish(page, from, Word::poisoned(from.slot()));
    pager.wake(page);
}

/// Makes a poisoned page that was discarded usable again.
pub(in crate::paging) fn unpoison(pager: &Pager, page: PageId) {
    let mended = if pager.mapper().can_poison() && mapped_over::owns_page(pager, page) {
        let piece = Piece::new(pager.addr(page), pager.page_bytes());
        // SAFETY: the page's content is lost already; this clears the marker.
        unsafe { pager.mapper().discard(&[piece]) }
    } else {
        mapped_over::map_anew(pager, page)
    };
    if let Err(error) = mended {
        diagnostics::fatal("a lost page could not be made usable again", &error);
    }
}
