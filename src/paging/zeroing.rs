//! Zeros in place of what a range holds, wherever that is: for [`Region::clear`](crate::paging::region::Region::clear).
#![expect(unsafe_code, reason = "clears and drops memory that the program gives up")]

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::diagnostics;
use crate::paging::kernel_filled;
use crate::paging::page::backoff;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::discard;
use crate::paging::pager::lost;
use crate::sys::access;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{self, KERNEL_PAGE, Piece};

/// Makes the bytes from `offset` to `end` of the region, multiples of 4 KiB that the program gives up, read
/// as zero.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the kernel does not let a part of a page be brought in.
pub(in crate::paging) fn clear(pager: &Pager, offset: usize, end: usize) -> Result<()> {
    let (page, base) = (pager.page_bytes(), pager.table().start());
    let first = offset.next_multiple_of(page).min(end);
    let behind = (end / page * page).max(first);
    clear_part(pager, offset, first)?;
    if first == behind {
        // No page lies whole in the range.
    } else if pager.mapper().owns(base + first, behind - first) {
        let (first, behind) = (first / page, behind / page);
        discard::discard(pager, PageId(first as u64), PageCount((behind - first) as u64));
    } else {
        for at in (first..behind).step_by(page) {
            if pager.mapper().owns(base + at, page) {
                discard::discard(pager, PageId((at / page) as u64), PageCount(1));
            } else {
                clear_part(pager, at, at + page)?;
            }
        }
    }
    clear_part(pager, behind, end)
}

/// Drops a part of a page, given up by its owner, or lets the kernel drop it where it is not far memory.
fn clear_part(pager: &Pager, offset: usize, end: usize) -> Result<()> {
    let base = pager.table().start();
    let page = PageId((offset / pager.page_bytes()) as u64);
    if offset == end {
        return Ok(());
    }
    if pager.mapper().owns(base + offset, end - offset) {
        return clear_far(pager, page, Piece::new(base + offset, end - offset));
    }
    for start in (base + offset..base + end).step_by(KERNEL_PAGE) {
        if pager.mapper().owns(start, KERNEL_PAGE) {
            clear_far(pager, page, Piece::new(start, KERNEL_PAGE))?;
        } else {
            // SAFETY: the program's own mapping, which it gives advice for.
            unsafe { vm::drop_content(start, KERNEL_PAGE) }?;
        }
    }
    Ok(())
}

/// Drops a part of a page that is far memory. It is not written: the kernel may still read what it holds, through
/// references that nobody reports (a pipe, a socket).
fn clear_far(pager: &Pager, page: PageId, part: Piece) -> Result<()> {
    let mut spins = 0;
    // Under pressure the page may leave again before it is dropped, as one that is pinned.
    loop {
        if kernel_filled::holds_nothing(pager.memory(), page)
            || kernel_filled::drop_part_in_open(pager.memory(), page, part)
        {
            return Ok(());
        }
        let word = pager.word(page).load();
        match word.state() {
            // What is lost stays so as long as a part of it is wanted: touching it is SIGBUS.
            State::Poisoned => return Ok(()),
            State::Resident if drop_mapped(pager, page, word, part) => return Ok(()),
            State::Resident | State::Moving | State::Empty => backoff(&mut spins),
            State::Filling | State::Cooling | State::Writing | State::Stored => {
                let is_lost = || pager.word(page).load().state() == State::Poisoned;
                access::bring_in(part.start(), || !is_lost())?;
            }
        }
    }
}

/// Drops a part of a page that was seen mapped. `false`: the page changed, look again.
fn drop_mapped(pager: &Pager, page: PageId, seen: Word, part: Piece) -> bool {
    let _blocked = SignalsBlocked::new();
    let moving = seen.leaving();
    if pager.word(page).try_change(seen, moving).is_err() {
        return false;
    }
    // The slot holds what is dropped, so that the page must not leave as one that equals it.
    if seen.protected()
        && let Err(error) =
            pager.mapper().allow_writes(pager.table().addr(page), pager.table().page_bytes())
    {
        if !lost::is_passing(pager.mapper(), pager.health().deadline(), &error) {
            diagnostics::fatal("a write-protected page could not be opened", &error);
        }
        pager.publish(page, moving, seen);
        return false;
    }
    // SAFETY: the page is `Moving` by this thread, and its owner gave the part's content up.
    unsafe { pager.mapper().discard(&[part]) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    // At once: a system call must not find a hole in a page that is pinned, where it could not wait for a handler.
    let filled = pager.mapper().fill_dropped(part);
    let left = seen.with_protected(false).with_sparse(seen.sparse() || !filled);
    pager.publish(page, moving, left);
    true
}
