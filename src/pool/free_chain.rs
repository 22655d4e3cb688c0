//! The list of free pages in a table file: begins in the header, and goes on in free pages.
//!
//! ```text
//! at the end of the header's words:   free count 8 | next 8 | sum 8 | free page numbers ...
//! free pages:                         free count 8 | next 8 | sum 8 | free page numbers ...
//! ```
//! The chain runs through free pages, which hold nothing
//! else at the time of a flush; `next` is 0 at its end. `sum` is over all else of the page and the
//! sum before it in the chain, so that it is over the header's generation too. A page of the chain
//! that was used again before a crash has another sum, and ends the chain. What no longer finds a
//! place in the chain is lost to later runs, which costs space only.
#![expect(unsafe_code, reason = "reads and writes pages of the list")]

use super::file::TableFile;
use super::frames::PoolFrames;
use crate::base::error::Result;
use crate::base::units::PageId;
use crate::store::Op;
use crate::sys::vm::{Huge, Mapping};
use std::ptr::slice_from_raw_parts_mut;

/// Words before the numbers: count, next, sum.
const HEAD_WORDS: usize = 3;
/// Pages looked at for one that is still free.
const TRIES_MAX: usize = 64;

/// Writes `free` into the words of `head` from `at` on, which the caller writes then, and what finds
/// no room there into free pages; if possible, into others than those of the `last` chain, on which
/// the table rests until this one counts. Returns these pages.
pub(super) fn write(
    file: &TableFile,
    frames: &PoolFrames,
    head: &mut PageBuffer,
    at: usize,
    free: &[u64],
    last: &[PageId],
) -> Result<Vec<PageId>> {
    let mut part = ChainPart::fill(frames, head, at, free, last, 0);
    let mut chain = Vec::new();
    while let Some(page) = part.next {
        let mut buffer = PageBuffer::new(frames.table.page_bytes())?;
        let next = ChainPart::fill(frames, &mut buffer, 0, part.rest, last, part.sum);
        let written = transfer(file, frames, Op::Write, page, &mut buffer);
        frames.table.word(page).abort_load();
        if written.is_err() {
            next.next.iter().for_each(|next| frames.table.word(*next).abort_load());
        }
        written?;
        chain.push(page);
        part = next;
    }
    Ok(chain)
}

/// Successor of a page of the chain.
struct ChainPart<'f> {
    /// The next page, locked.
    next: Option<PageId>,
    rest: &'f [u64],
    sum: u64,
}

impl<'f> ChainPart<'f> {
    /// Fills the words of a page of the chain from `at` on.
    fn fill(
        frames: &PoolFrames,
        buffer: &mut PageBuffer,
        at: usize,
        free: &'f [u64],
        last: &[PageId],
        before: u64,
    ) -> ChainPart<'f> {
        let words = buffer.words_mut();
        let room = words.len() - at - HEAD_WORDS;
        let (here, rest) = free.split_at(room.min(free.len()));
        let next = if rest.is_empty() { None } else { lock_page(frames, here, last) };
        words[at] = here.len() as u64;
        words[at + 1] = next.unwrap_or(PageId(0)).0;
        words[at + HEAD_WORDS..][..here.len()].copy_from_slice(here);
        let sum = sum(words, at, before);
        words[at + 2] = sum;
        ChainPart { next, rest, sum }
    }
}

/// True if the words of the header, whose part of the chain begins at `at`, are whole.
pub(super) fn is_whole(head: &PageBuffer, at: usize) -> bool {
    let words = head.words();
    sum(words, at, 0) == words[at + 2]
}

/// Notes the pages that `head`, which is whole, and the chain behind it name. Returns the chain.
///
/// # Errors
/// When the list contradicts itself or the table.
pub(super) fn read(
    file: &TableFile,
    frames: &PoolFrames,
    head: PageBuffer,
    at: usize,
) -> Result<Vec<PageId>> {
    let refused = |reason: &str| file.refused(reason);
    let (mut buffer, mut at, mut chain) = (head, at, Vec::new());
    let end = frames.table.end();
    while (chain.len() as u64) < end {
        let words = buffer.words();
        let (count, next, sum_here) = (words[at] as usize, words[at + 1], words[at + 2]);
        let entries = words[at + HEAD_WORDS..].get(..count);
        for entry in entries.ok_or_else(|| refused("has a damaged free list"))? {
            let page = PageId(*entry);
            if !frames.table.contains(page) {
                return Err(refused("has a damaged free list"));
            }
            // Words that say something are within the limit.
            frames.charge_metadata(page)?;
            if !frames.free.lock().put(page) {
                return Err(refused("has a free list that names a page twice"));
            }
            frames.table.word(page).mark_unused();
        }
        if next == 0 || next >= end {
            return Ok(chain);
        }
        transfer(file, frames, Op::Read, PageId(next), &mut buffer)?;
        if sum(buffer.words(), 0, sum_here) != buffer.words()[2] {
            // The rest was used again after the last flush, and is lost to this run.
            return Ok(chain);
        }
        chain.push(PageId(next));
        at = 0;
    }
    Err(refused("has a free list that runs in circles"))
}

/// Reads or writes a page that is no page of a user: the header, or a locked one of the chain.
pub(super) fn transfer(
    file: &TableFile,
    frames: &PoolFrames,
    op: Op,
    page: PageId,
    buffer: &mut PageBuffer,
) -> Result<()> {
    let segment = slice_from_raw_parts_mut(buffer.memory.as_ptr(), frames.table.page_bytes());
    let mut only = Some(((), segment, frames.table.offset(page)));
    let (mut result, account) = (Ok(()), &frames.account);
    // SAFETY: the buffer is the caller's; the header and free pages are read and written by this
    // module and `header` only, under no overlapping request.
    unsafe { file.transfer(account, op, || only.take(), |(), done| result = done) }?;
    result
}

/// A free page to hold the rest of the chain, locked: a thread that allocates it waits until it is
/// written, so that the chain never lies over a page's own content.
fn lock_page(frames: &PoolFrames, here: &[u64], last: &[PageId]) -> Option<PageId> {
    let is_locked = |page: &PageId| {
        let latch = frames.table.word(*page);
        let seen = latch.load();
        seen.is_unused() && latch.try_begin_load(seen)
    };
    let pages = here.iter().copied().map(PageId);
    let others = pages.clone().filter(|page| !last.contains(page)).take(TRIES_MAX);
    others.chain(pages.take(TRIES_MAX)).find(is_locked)
}

/// The sum of a page of the chain whose part of it begins at word `at`.
fn sum(words: &[u64], at: usize, before: u64) -> u64 {
    let (above, below) = words.split_at(at + 2);
    let summed = above.iter().chain(&below[1..]);
    let bytes: Vec<u8> = summed.flat_map(|word| word.to_le_bytes()).collect();
    twox_hash::XxHash3_128::oneshot_with_seed(before, &bytes) as u64
}

/// An aligned page seen as words.
pub(super) struct PageBuffer {
    words: &'static mut [u64],
    memory: Mapping,
}

impl PageBuffer {
    pub(super) fn new(bytes: usize) -> Result<PageBuffer> {
        let memory = Mapping::reserve(bytes, bytes, Huge::No)?;
        // SAFETY: the mapping is `bytes` long, zeroed and aligned; it lives as long as the slice,
        // which is lent out no longer than the value lives that has both.
        let words = unsafe { std::slice::from_raw_parts_mut(memory.as_ptr().cast(), bytes / 8) };
        Ok(PageBuffer { words, memory })
    }

    pub(super) fn words(&self) -> &[u64] {
        self.words
    }

    pub(super) fn words_mut(&mut self) -> &mut [u64] {
        self.words
    }
}
