//! Allocating and freeing pages: their numbers, and memory that is zero.

use super::chunk::CHUNK_PAGES;
use super::frames::Frames;
use super::free_list::FreeLists;
use super::latch::{HeldWord, Latch};
use super::multi_page::{make_parts, make_unused};
use crate::base::error::{Error, Result};
use crate::base::units::PageId;

/// Pages whose space is given back at a time: a thread that allocates them waits for the device meanwhile,
/// which takes 0.7 ms for 4 MiB on ext4.
const CUT_MAX: usize = 1024;

/// Allocates a zeroed buffer of 2^`order` pages; it is locked, and its word noted.
///
/// # Errors
/// [`Error::StoreFull`] when the table has reached its capacity, [`Error::OutOfMemory`].
pub(super) fn allocate(frames: &Frames, order: u8) -> Result<(PageId, HeldWord)> {
    frames.charge(order)?;
    let taken = take_page(frames, order);
    let page = taken.inspect_err(|_| frames.uncharge(order))?;
    Ok((page, begin_use(frames, page, order)))
}

/// Brings a buffer of this number into use, zeroed; it is locked, and its word noted.
///
/// # Errors
/// As for [`allocate`], and [`Error::BadRange`] when one of its pages is in use.
pub(super) fn claim(frames: &Frames, first: PageId, order: u8) -> Result<HeldWord> {
    let room = frames.table.capacity() as u64;
    let after = first.0.checked_add(1 << order).filter(|after| *after <= room);
    let after = after.ok_or_else(|| frames.table.full())?;
    frames.charge(order)?;
    let taken = take_number(frames, first, order, after);
    taken.inspect_err(|_| frames.uncharge(order))?;
    Ok(begin_use(frames, first, order))
}

/// Takes a buffer of this number, which ends before `after`, and locks it. What lies between the
/// table's end and it becomes free.
fn take_number(frames: &Frames, first: PageId, order: u8, after: u64) -> Result<()> {
    let table = &frames.table;
    loop {
        // Words are charged before they are written.
        for page in chunks_of(first.0.min(table.end())..after) {
            frames.charge_metadata(page)?;
        }
        let mut free = frames.free.lock();
        let end = table.end();
        // The table may have become smaller meanwhile, and given words back.
        let mut chunks = chunks_of(first.0.min(end)..after);
        if !chunks.all(|page| frames.chunks.is_charged(page)) {
            continue;
        }
        let known = first.0.min(end)..after.min(end);
        let gap = end..first.0.max(end);
        if !known.is_empty() && !free.take_range(known.clone()) {
            return Err(Error::BadRange {
                reason: "a page of it is in use, or a part of a buffer".into(),
            });
        }
        let gap_words = table.words(gap.start as usize..gap.end as usize);
        let is_taken =
            make_unused(gap_words) && make_parts(table, first, order) && lock_absent(frames, first);
        if is_taken {
            // The lowest is to be taken first, when it is allocated.
            gap.rev().for_each(|page| free.put(0, PageId(page)));
            // Last: a thread that sees the page within the table finds its word locked.
            table.set_end(after.max(end));
            return Ok(());
        }
        free.put_range(known);
        drop(free);
        std::thread::yield_now();
    }
}

/// A page of each chunk that a range of pages reaches into.
fn chunks_of(pages: std::ops::Range<u64>) -> impl Iterator<Item = PageId> {
    const CHUNK: u64 = CHUNK_PAGES as u64;
    (pages.start / CHUNK..pages.end.div_ceil(CHUNK)).map(|chunk| PageId(chunk * CHUNK))
}

/// A buffer that was taken and locked, and whose memory is charged, is in use.
fn begin_use(frames: &Frames, page: PageId, order: u8) -> HeldWord {
    frames.chunks.note_multi_page(page, order);
    let latch = frames.table.word(page);
    // Memory that was dropped, or never touched, is zero.
    frames.arrive(page, order);
    latch.loaded(false, 0, order);
    HeldWord::locked(latch.load()).changed()
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

/// Where the free pages begin that lie before the table's end without a page in use between, and not
/// before `least`.
pub(super) fn free_tail(frames: &Frames, free: &FreeLists, least: u64) -> u64 {
    let end = frames.table.end();
    // Mostly the last page is in use, and not all free ones have to be looked at.
    let is_used = end <= least || !frames.table.word(PageId(end - 1)).load().is_unused();
    if is_used { end } else { free.tail(least, end) }
}

/// Ends the table where its free tail begins, but not before `least`, and calls `give_back` with the pages
/// that it loses, some at a time; they are locked until then, so that nobody brings one of them into use.
/// Their words and page tables are given back as well. A page of the tail that another thread has locked for a moment leaves the table as it is.
pub(super) fn cut_tail(frames: &Frames, least: u64, mut give_back: impl FnMut(PageId, u64)) {
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
        let after = after.ok_or_else(|| table.full())?;
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
