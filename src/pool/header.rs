//! The header of a table file: page 0, and the list of free pages.
//!
//! ```text
//! page 0:  magic 8 | page size 4 | flags 4 | end 8 | free count 8 | next 8 | sum 8 | free page numbers ...
//! others of the chain (free pages):          free count 8 | next 8 | sum 8 | free page numbers ...
//! ```
//! How a free page is named: `free_list`. The chain runs through free pages, which hold nothing
//! else at the time of a flush; `next` is 0 at its end. `sum` is over all else of the page and the
//! sum before it in the chain. A page of the chain that was used again before a crash has another
//! sum, and ends the chain. What no longer finds a place in the chain is lost to later runs,
//! which costs space only.
#![expect(unsafe_code, reason = "reads and writes the header")]

use super::file::TableFile;
use super::frames::Frames;
use super::free_list::FreeBuffer;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::units::PageId;
use crate::limit::admission::{Taken, Turn};
use crate::store::{Op, Segment};
use crate::sys::vm::{Huge, Mapping};
use std::sync::Arc;

const MAGIC: u64 = u64::from_le_bytes(*b"farpool2");
const HEAD_WORDS: usize = 3;
/// PageBuffer of a chain's page before the numbers: count, next, sum.
const CHAIN_WORDS: usize = 3;
/// Pages looked at for one that is still free.
const CHAIN_TRIES_MAX: usize = 64;
const FLAG_CHECKSUM: u32 = 1;

/// The header of one table file.
pub(super) struct Header {
    file: Arc<TableFile>,
    /// Whose turn it is to write the header.
    turn: Turn,
}

impl Header {
    pub(super) fn new(file: Arc<TableFile>) -> Header {
        Header { file, turn: Turn::new() }
    }

    /// Writes header and free list as they are at one moment during the call, or later.
    pub(super) fn write(&self, frames: &Frames) -> Result<()> {
        let _ours = keep_local();
        // From looking to writing: an older header must not come after a newer one.
        let _turn = self.take_turn(frames)?;
        let (end, free) = {
            let free = frames.free.lock();
            (frames.table.end(), free.entries())
        };
        let page_bytes = frames.table.page_bytes();
        let mut buffer = PageBuffer::new(page_bytes)?;
        let flags = if self.file.has_checksums() { FLAG_CHECKSUM } else { 0 };
        buffer.0[0] = MAGIC;
        buffer.0[1] = page_bytes as u64 | u64::from(flags) << 32;
        buffer.0[2] = end;
        let (mut at, mut head, mut rest) = (PageId(0), HEAD_WORDS, &free[..]);
        let mut before = 0;
        loop {
            let room = buffer.0.len() - head - CHAIN_WORDS;
            let (here, later) = rest.split_at(room.min(rest.len()));
            let next = if later.is_empty() { None } else { lock_chain_page(frames, here) };
            buffer.0[head] = here.len() as u64;
            buffer.0[head + 1] = next.unwrap_or(PageId(0)).0;
            let entries = buffer.0[head + CHAIN_WORDS..].iter_mut();
            entries.zip(here).for_each(|(entry, free)| *entry = free.0);
            before = chain_sum(buffer.0, head, before);
            buffer.0[head + 2] = before;
            let written = self.transfer(frames, Op::Write, at, &mut buffer);
            if at.0 > 0 {
                frames.table.word(at).abort_load();
            }
            let (Some(next), Ok(())) = (next, &written) else {
                next.iter().for_each(|next| frames.table.word(*next).abort_load());
                return written;
            };
            (at, head, rest) = (next, 0, later);
            buffer.0.fill(0);
        }
    }

    /// The turn to write the header, one thread at a time.
    fn take_turn(&self, frames: &Frames) -> Result<Taken<'_>> {
        let mut backoff = frames.backoff();
        backoff.until(|| self.turn.take()).ok_or_else(|| Error::LatchTimeout {
            page: PageId(0),
            holder: "another flush".to_owned(),
            waited: backoff.waited(),
        })
    }

    /// Reads header and free list.
    pub(super) fn read(&self, frames: &Frames) -> Result<()> {
        let (table, refused) = (&frames.table, |reason: &str| self.file.refused(reason));
        let mut buffer = PageBuffer::new(table.page_bytes())?;
        if table.capacity() == 0 {
            return Err(refused("is no table file: shorter than one page"));
        }
        self.transfer(frames, Op::Read, PageId(0), &mut buffer)?;
        if buffer.0[0] != MAGIC {
            return Err(refused("is no table file: it does not begin as one"));
        }
        let (page_bytes, flags) = (buffer.0[1] as u32, (buffer.0[1] >> 32) as u32);
        if page_bytes as usize != table.page_bytes() {
            let here = table.page_bytes();
            return Err(self.file.refused(format!("has pages of {page_bytes} bytes, not {here}")));
        }
        if (flags & FLAG_CHECKSUM != 0) != self.file.has_checksums() {
            return Err(refused("was created with another setting of `checksum`"));
        }
        let (end, room) = (buffer.0[2], table.capacity() as u64);
        if end == 0 || end > room {
            return Err(self.file.refused(format!("is short: {end} pages, but room for {room}")));
        }
        table.set_end(end);
        let (mut head, mut before) = (HEAD_WORDS, 0);
        for _ in 0..end {
            let sum = chain_sum(buffer.0, head, before);
            if sum != buffer.0[head + 2] {
                // The rest was used again after the last flush, and is lost to this run.
                return if head == 0 { Ok(()) } else { Err(refused("has a damaged header")) };
            }
            before = sum;
            let (count, next) = (buffer.0[head] as usize, buffer.0[head + 1]);
            let entries = buffer.0[head + CHAIN_WORDS..].get(..count);
            for entry in entries.ok_or_else(|| refused("has a damaged free list"))? {
                mark_free(frames, FreeBuffer(*entry)).map_err(refused)?;
            }
            if next == 0 || next >= end {
                return Ok(());
            }
            self.transfer(frames, Op::Read, PageId(next), &mut buffer)?;
            head = 0;
        }
        Err(refused("has a free list that runs in circles"))
    }

    fn transfer(
        &self,
        frames: &Frames,
        op: Op,
        page: PageId,
        buffer: &mut PageBuffer,
    ) -> Result<()> {
        let segment = Segment { ptr: buffer.1.as_ptr(), len: frames.table.page_bytes() };
        let mut only = Some(((), segment, frames.table.offset(page)));
        let (mut result, account) = (Ok(()), &frames.account);
        // SAFETY: the buffer is the caller's; the header and free pages are read and written by this
        // module only, under no overlapping request.
        unsafe { self.file.transfer(account, op, || only.take(), |(), done| result = done) }?;
        result
    }
}

/// A free page to hold the rest of the chain, locked: a thread that allocates it waits until it is
/// written, so that the chain never lies over a page's own content.
fn lock_chain_page(frames: &Frames, here: &[FreeBuffer]) -> Option<PageId> {
    let is_locked = |page: &PageId| {
        let latch = frames.table.word(*page);
        let seen = latch.load();
        seen.is_unused() && latch.try_begin_load(seen)
    };
    let single = here.iter().filter(|free| free.order() == Some(0)).map(|free| free.page());
    single.take(CHAIN_TRIES_MAX).find(is_locked)
}

/// Notes a buffer that the table file says is free.
///
/// # Errors
/// What is wrong with the file when there cannot be such a buffer.
fn mark_free(frames: &Frames, free: FreeBuffer) -> std::result::Result<(), &'static str> {
    let (table, page) = (&frames.table, free.page());
    let order = free.order().filter(|order| table.contains(page, *order));
    let order = order.ok_or("has a damaged free list")?;
    let first = page.as_usize();
    for latch in table.words(first..first + (1 << order)) {
        if latch.load().is_unused() {
            return Err("has a free list that names a page twice");
        }
        latch.mark_unused();
    }
    frames.free.lock().put(order, page);
    Ok(())
}

/// The sum of a page of the chain whose part of it begins at word `head`.
fn chain_sum(words: &[u64], head: usize, before: u64) -> u64 {
    let (above, below) = words.split_at(head + 2);
    let summed = above.iter().chain(&below[1..]);
    let bytes: Vec<u8> = summed.flat_map(|word| word.to_le_bytes()).collect();
    twox_hash::XxHash3_128::oneshot_with_seed(before, &bytes) as u64
}

/// An aligned page seen as words.
struct PageBuffer(&'static mut [u64], Mapping);

impl PageBuffer {
    fn new(bytes: usize) -> Result<PageBuffer> {
        let mapping = Mapping::reserve(bytes, bytes, Huge::No)?;
        // SAFETY: the mapping is `bytes` long, zeroed and aligned; it lives as long as the slice,
        // which does not leave this module, for both are fields of one value.
        let words = unsafe { std::slice::from_raw_parts_mut(mapping.as_ptr().cast(), bytes / 8) };
        Ok(PageBuffer(words, mapping))
    }
}
