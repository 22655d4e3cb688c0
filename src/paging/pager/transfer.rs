//! Transfers: memory that goes between the region and staging frames.
#![expect(unsafe_code, reason = "moves and copies pages of the region")]

use crate::base::error::Result;
use crate::base::units::PageId;
use crate::paging::diagnostics;
use crate::paging::page::word::FrameId;
use crate::paging::pager::Pager;
use crate::paging::pager::mapper::Moved;
use crate::sys;
use crate::sys::uffd::{Outcome, Protect, Wake};

/// Copies what of a page is not mapped yet from a frame, which keeps its memory.
///
/// # Errors
/// When the kernel is out of memory and nothing of the page is mapped.
pub(crate) fn copy_rest(
    pager: &Pager,
    page: PageId,
    frame: FrameId,
    mapped: usize,
    protect: Protect,
) -> Result<()> {
    // SAFETY: the page is `Moving` by this thread, and the frame holds its content.
    unsafe {
        pager.mapper().copy_rest(pager.addr(page), pager.frames().ptr(frame), mapped, protect)
    }
}

/// Moves memory between the region and frames, see [`Mapper::move_memory`]: memory locks that are in
/// the way are taken off, and the program is told, because what is locked could never leave, and a
/// limit that cannot be kept helps nobody.
///
/// # Safety
/// As for `Uffd::move_pages`.
pub(in crate::paging) unsafe fn move_memory(
    pager: &Pager,
    dst: usize,
    src: usize,
    len: usize,
    wake: Wake,
) -> Outcome {
    let unlock = || take_locks_off(pager, dst, src, len);
    // SAFETY: the caller's promise.
    unsafe { pager.mapper().move_memory(dst, src, len, wake, unlock) }
}

/// Ends all memory locks of region and frames if one is on either range; says whether.
fn take_locks_off(pager: &Pager, dst: usize, src: usize, len: usize) -> bool {
    let (far, staged) = if pager.table().contains(dst) { (dst, src) } else { (src, dst) };
    let locked = pager.table().is_locked(far, len) || pager.frames().is_locked(staged, len);
    if locked {
        pager.frames().unlock();
        pager.table().unlock();
        diagnostics::unlocked();
    }
    locked
}

/// Moves memory of the region out to frames, or of a run of frames to an empty chunk, whole
/// pages of it: a page of which only a part could be moved is put together again.
pub(in crate::paging) fn move_or_stop(pager: &Pager, dst: usize, src: usize, len: usize) -> Moved {
    // SAFETY: the pages are `Moving` by this thread, or in a chunk that it latched, and it may
    // unmap them; the frames are empty ones of this thread's. Or the frames are a run of this
    // thread's, and the pages are `Moving` by it and missing.
    let outcome = unsafe { move_memory(pager, dst, src, len, Wake::No) };
    let moved = outcome.bytes_of(len);
    let refused = matches!(outcome, Outcome::Failed { errno: sys::EINVAL | sys::ENOENT, .. });
    let whole = moved - moved % pager.page_bytes();
    if moved > whole {
        pager.mapper().move_back(dst + whole, src + whole, moved - whole);
    }
    Moved { bytes: whole, refused }
}

/// Moves a page, `Moving` by this thread, out to an empty frame of its own where one MOVE does not: it lies in
/// several of the kernel's mappings, has holes, or code may run in a part of it. `false`: it stays as it was.
pub(in crate::paging) fn move_in_pieces(pager: &Pager, page: PageId, frame: FrameId) -> bool {
    let (dst, src) = (pager.frames().addr(frame), pager.addr(page));
    if !pager.mapper().fill_holes(src) {
        return false;
    }
    let act = |dst, src, len| {
        // SAFETY: the page is `Moving` by this thread, which may unmap it; the frame is its own and empty.
        let piece = || unsafe { move_memory(pager, dst, src, len, Wake::No) };
        match piece() {
            // MOVE wants both sides to have the same protection. To what may not be written nothing helps.
            Outcome::Failed { bytes: 0, errno: sys::EINVAL } => {
                pager.frames().while_executable(dst, len, piece)
            }
            outcome => outcome,
        }
    };
    // SAFETY: as above.
    unsafe { pager.mapper().move_pieces(dst, src, act) }
}
