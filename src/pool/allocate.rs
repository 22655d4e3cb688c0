//! Allocating and freeing pages: their numbers, and memory that is zero.

use super::chunk::CHUNK_PAGES;
use super::frames::PoolFrames;
use super::free_list::FreeList;
use super::latch::{HeldWord, Latch};
#[cfg(doc)]
use crate::base::error::Error;
use crate::base::error::Result;
use crate::base::units::PageId;
use std::ops::Range;

/// Pages whose space is given back at a time: a thread that allocates them waits for the device meanwhile,
/// which takes 0.7 ms for 4 MiB on ext4.
const CUT_MAX: usize = 1024;

/// Allocates a zeroed page; it is locked, and its word noted.
///
/// # Errors
/// [`Error::StoreFull`] when the table has reached its capacity, [`Error::OutOfMemory`].
pub(super) fn allocate(frames: &PoolFrames) -> Result<(PageId, HeldWord)> {
    frames.charge()?;
    let page = take_page(frames).inspect_err(|_| frames.uncharge())?;
    Ok((page, begin_use(frames, page)))
}

/// Brings the page of this number into use, zeroed; it is locked, and its word noted. `None`: another thread has just
/// taken it, or gives it back.
///
/// # Errors
/// As for [`allocate`].
pub(super) fn claim(frames: &PoolFrames, page: PageId) -> Result<Option<HeldWord>> {
    if page.as_usize() >= frames.table.capacity() {
        return Err(frames.table.full());
    }
    frames.charge()?;
    let taken = take_number(frames, page);
    if !matches!(taken, Ok(true)) {
        frames.uncharge();
    }
    Ok(taken?.then(|| begin_use(frames, page)))
}

/// Takes the page of this number, and locks it; `false`: it is not free. What lies between the table's end and it becomes
/// free.
fn take_number(frames: &PoolFrames, page: PageId) -> Result<bool> {
    let table = &frames.table;
    let after = page.0 + 1;
    loop {
        // Words are charged before they are written.
        for page in chunks_of(page.0.min(table.end())..after) {
            frames.charge_metadata(page)?;
        }
        let mut free = frames.free.lock();
        let end = table.end();
        // The table may have become smaller meanwhile, and given words back.
        if !chunks_of(page.0.min(end)..after).all(|page| frames.chunks.is_charged(page)) {
            continue;
        }
        let is_known = page.0 < end;
        if is_known && !free.take_page(page) {
            return Ok(false);
        }
        let gap = end..page.0.max(end);
        let gap_words = table.words(gap.start as usize..gap.end as usize);
        if make_unused(gap_words) && lock_absent(frames, page) {
            free.put_range(gap);
            // Last: a thread that sees the page within the table finds its word locked.
            table.set_end(after.max(end));
            return Ok(true);
        }
        if is_known {
            free.put(page);
        }
        drop(free);
        std::thread::yield_now();
    }
}

/// A page of each chunk that a range of pages reaches into.
fn chunks_of(pages: Range<u64>) -> impl Iterator<Item = PageId> {
    const CHUNK: u64 = CHUNK_PAGES as u64;
    (pages.start / CHUNK..pages.end.div_ceil(CHUNK)).map(|chunk| PageId(chunk * CHUNK))
}

/// Makes words unused that are behind the table's end. `false`: one of them is locked, for the chunk
/// is frozen, which takes microseconds.
fn make_unused(words: &[Latch]) -> bool {
    words.iter().all(|latch| {
        let seen = latch.load();
        let is_locked = !seen.is_unused() && latch.try_begin_load(seen);
        if is_locked {
            latch.freed();
        }
        is_locked || seen.is_unused()
    })
}

/// A page that was taken and locked, and whose memory is charged, is in use.
fn begin_use(frames: &PoolFrames, page: PageId) -> HeldWord {
    let latch = frames.table.word(page);
    // Memory that was dropped, or never touched, is zero.
    frames.arrive(page);
    latch.loaded(false, 0);
    HeldWord::locked(latch.load()).changed()
}

/// Drops a page that is locked and makes its number free.
pub(super) fn free(frames: &PoolFrames, page: PageId) {
    frames.split_for(page);
    frames.leave(page);
    frames.table.discard(page);
    frames.table.word(page).freed();
    frames.uncharge();
    frames.free.lock().put(page);
}

/// Where the free pages begin that lie before the table's end without a page in use between, and not
/// before `least`.
pub(super) fn free_tail(frames: &PoolFrames, free: &FreeList, least: u64) -> u64 {
    let end = frames.table.end();
    // Mostly the last page is in use, and not all free ones have to be looked at.
    let is_used = end <= least || !frames.table.word(PageId(end - 1)).load().is_unused();
    if is_used { end } else { free.tail(least, end) }
}

/// Ends the table where its free tail begins, but not before `least`, and calls `give_back` with the pages
/// that it loses, some at a time; they are locked until then, so that nobody brings one of them into use.
/// Their words and page tables are given back as well. A page of the tail that another thread has locked for a moment leaves the table as it is.
pub(super) fn cut_tail(frames: &PoolFrames, least: u64, mut give_back: impl FnMut(PageId, u64)) {
    let table = &frames.table;
    let mut free = frames.free.lock();
    let (start, end) = (free_tail(frames, &free, least), table.end());
    let words = table.words(start as usize..end as usize);
    let is_locked = |latch: &&Latch| {
        let seen = latch.load();
        seen.is_unused() && latch.try_begin_load(seen)
    };
    let locked = words.iter().take_while(is_locked).count();
    let is_all = locked == words.len();
    if is_all {
        free.cut(start);
        table.set_end(start);
    }
    drop(free);
    // From the start on, where a table that grows again begins.
    for part in words[..locked].chunks(CUT_MAX) {
        if is_all {
            give_back(table.page_of(&part[0]), part.len() as u64);
        }
        part.iter().for_each(Latch::abort_load);
    }
    if is_all {
        // Now that nobody holds them locked. Meanwhile the table may have grown again.
        frames.give_back_behind(end, &frames.free.lock());
    }
}

/// Takes a free page, or a fresh one behind the last, and locks it; its words are charged.
fn take_page(frames: &PoolFrames) -> Result<PageId> {
    let table = &frames.table;
    loop {
        let mut free = frames.free.lock();
        if let Some(page) = free.take() {
            drop(free);
            return lock_free(frames, page);
        }
        // Grows under the lock only.
        let page = PageId(table.end());
        if page.as_usize() >= table.capacity() {
            return Err(table.full());
        }
        if !frames.chunks.is_charged(page) {
            drop(free);
            frames.charge_metadata(page)?;
        } else if lock_absent(frames, page) {
            // Last: a thread that sees the page within the table finds its word locked.
            table.set_end(page.0 + 1);
            return Ok(page);
        } else {
            drop(free);
            std::thread::yield_now();
        }
    }
}

/// Locks a page that was in the free list.
fn lock_free(frames: &PoolFrames, page: PageId) -> Result<PageId> {
    if let Err(error) = frames.charge_metadata(page) {
        frames.free.lock().put(page);
        return Err(error);
    }
    while !lock_absent(frames, page) {
        std::thread::yield_now();
    }
    Ok(page)
}

/// Locks a page that is not allocated. `false`: its chunk is frozen, or it holds a part of the free
/// list that is being written; both are over soon.
fn lock_absent(frames: &PoolFrames, page: PageId) -> bool {
    let latch = frames.table.word(page);
    let seen = latch.load();
    assert!(!seen.is_readable(), "{page} was free, but is {seen:?}");
    latch.try_begin_load(seen)
}
