//! Allocating and freeing pages: their numbers, and memory that is zero.

use super::frames::Frames;
use super::latch::HeldWord;
use super::multi_page::make_parts;
use crate::base::error::{Error, Result};
use crate::base::units::{PageCount, PageId};

/// Allocates a zeroed buffer of 2^`order` pages; it is locked, and its word noted.
///
/// # Errors
/// [`Error::StoreFull`] when the table has reached its capacity, [`Error::OutOfMemory`].
pub(super) fn allocate(frames: &Frames, order: u8) -> Result<(PageId, HeldWord)> {
    frames.charge(order)?;
    let taken = take_page(frames, order);
    let page = taken.inspect_err(|_| frames.uncharge(order))?;
    frames.chunks.note_multi_page(page, order);
    let latch = frames.table.word(page);
    // Memory that was dropped, or never touched, is zero.
    latch.loaded(false, 0, order);
    frames.arrive(page, order);
    Ok((page, HeldWord::locked(latch.load()).changed()))
}

/// Drops a buffer that is locked and makes its number free.
pub(super) fn free(frames: &Frames, page: PageId, order: u8) {
    frames.split_for(page);
    frames.leave(page, order);
    frames.table.discard(page, order);
    frames.table.word(page).freed();
    frames.uncharge(order);
    frames.free.lock().put(order, page);
}

/// Takes a free page, or a fresh one behind the last, and locks it; its words are charged.
fn take_page(frames: &Frames, order: u8) -> Result<PageId> {
    let table = &frames.table;
    loop {
        let mut free = frames.free.lock();
        if let Some(page) = free.take(order) {
            drop(free);
            return lock_free(frames, page, order);
        }
        // Grows under the lock only.
        let end = table.end();
        let room = table.capacity() as u64;
        let after = end.checked_add(1 << order).filter(|after| *after <= room);
        let after = after.ok_or(Error::StoreFull { pages: PageCount(room) })?;
        let (first, last) = (PageId(end), PageId(after - 1));
        if !frames.chunks.is_charged(first) || !frames.chunks.is_charged(last) {
            drop(free);
            frames.charge_metadata(first)?;
            frames.charge_metadata(last)?;
        } else if make_parts(table, first, order) && lock_absent(frames, first) {
            // Last: a thread that sees the page within the table finds its word locked.
            table.set_end(after);
            return Ok(first);
        } else {
            drop(free);
            std::thread::yield_now();
        }
    }
}

/// Locks a page that was in the free list.
fn lock_free(frames: &Frames, page: PageId, order: u8) -> Result<PageId> {
    if let Err(error) = frames.charge_metadata(page) {
        frames.free.lock().put(order, page);
        return Err(error);
    }
    while !lock_absent(frames, page) {
        std::thread::yield_now();
    }
    Ok(page)
}

/// Locks a page that is not allocated. `false`: its chunk is frozen, or it holds a part of the free
/// list that is being written; both are over soon.
fn lock_absent(frames: &Frames, page: PageId) -> bool {
    let latch = frames.table.word(page);
    let seen = latch.load();
    assert!(!seen.is_readable(), "{page} was free, but is {seen:?}");
    latch.try_begin_load(seen)
}
