//! Zeros in place of what a range holds, wherever that is: for [`Region::clear`](crate::paging::region::Region::clear).
#![expect(unsafe_code, reason = "clears and drops memory that the program gives up")]

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::kernel_filled;
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::pager::discard;
use crate::sys::vm::{self, KERNEL_PAGE};

/// Makes the bytes from `offset` to `end` of the region, multiples of 4 KiB that the program gives up, read
/// as zero.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the kernel does not let a part of a page be written.
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

/// Fills a part of a page with zeros, given up by its owner, or has the kernel drop it where it is not
/// far memory.
fn clear_part(pager: &Pager, offset: usize, end: usize) -> Result<()> {
    let base = pager.table().start();
    let page = PageId((offset / pager.page_bytes()) as u64);
    let clear = |start: usize, len: usize| {
        let is_lost = pager.word(page).load().state() == State::Poisoned;
        // What is lost stays so as long as a part of it is wanted: touching it is SIGBUS.
        if is_lost || kernel_filled::holds_nothing(pager, page) {
            return Ok(());
        }
        // SAFETY: given up, as the caller says.
        unsafe { vm::fill_with_zeros(start, len) }
    };
    if pager.mapper().owns(base + offset, end - offset) {
        return clear(base + offset, end - offset);
    }
    for start in (base + offset..base + end).step_by(KERNEL_PAGE) {
        if pager.mapper().owns(start, KERNEL_PAGE) {
            clear(start, KERNEL_PAGE)?;
        } else {
            // SAFETY: the program's own mapping, which it gives advice for.
            unsafe { vm::drop_content(start, KERNEL_PAGE) }?;
        }
    }
    Ok(())
}
