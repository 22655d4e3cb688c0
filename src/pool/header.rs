//! The table file: page 0 is its header, followed by the pages.
//!
//! ```text
//! page 0:  magic 8 | page size 4 | flags 4 | end 8 | free count 8 | next 8 | sum 8 | free page numbers ...
//! others of the chain (free pages):          free count 8 | next 8 | sum 8 | free page numbers ...
//! ```
//! A free number is `page | order << 56`. The chain runs through free pages, which hold nothing
//! else at the time of a flush; `next` is 0 at its end. `sum` is over all else of the page and the
//! sum before it in the chain. A page of the chain that was used again before a crash has another
//! sum, and ends the chain. What no longer finds a place in the chain is lost to later runs,
//! which costs space only.
#![expect(unsafe_code, reason = "reads and writes the header")]

use super::BufferPool;
use super::fix::Backoff;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::PageId;
use crate::limit::admission::Taken;
use crate::store::{Op, Request, Segment};
use crate::sys::vm::{Huge, Mapping};
use std::time::Duration;

const MAGIC: u64 = u64::from_le_bytes(*b"farpool2");
const HEAD_WORDS: usize = 3;
/// PageBuffer of a chain's page before the numbers: count, next, sum.
const CHAIN_WORDS: usize = 3;
/// Pages looked at for one that is still free.
const CHAIN_TRIES_MAX: usize = 64;
const FLAG_CHECKSUM: u32 = 1;
const ORDER_SHIFT: u32 = 56;

impl BufferPool {
    fn refused(&self, reason: impl Into<String>) -> Error {
        Error::Device { path: self.path.clone(), reason: reason.into() }
    }

    /// Writes header and free list as they are at one moment during the call, or later.
    pub(super) fn write_header(&self) -> Result<()> {
        let _ours = keep_local();
        // From looking to writing: an older header must not come after a newer one.
        let _turn = self.header_turn()?;
        let mut free: Vec<u64> = Vec::new();
        let end;
        {
            let alloc = self.alloc.lock();
            end = self.end.load(Ordering::Acquire);
            for (order, pages) in alloc.free.iter().enumerate() {
                free.extend(pages.iter().map(|page| page | (order as u64) << ORDER_SHIFT));
            }
        }
        let mut buffer = PageBuffer::new(self.page_bytes)?;
        let flags = if self.checksum { FLAG_CHECKSUM } else { 0 };
        buffer.0[0] = MAGIC;
        buffer.0[1] = self.page_bytes as u64 | u64::from(flags) << 32;
        buffer.0[2] = end;
        let (mut at, mut head, mut rest) = (0u64, HEAD_WORDS, &free[..]);
        let mut before = 0;
        loop {
            let room = buffer.0.len() - head - CHAIN_WORDS;
            let (here, later) = rest.split_at(room.min(rest.len()));
            let next = if later.is_empty() { 0 } else { self.lock_chain_page(here) };
            buffer.0[head] = here.len() as u64;
            buffer.0[head + 1] = next;
            buffer.0[head + CHAIN_WORDS..][..here.len()].copy_from_slice(here);
            before = chain_sum(buffer.0, head, before);
            buffer.0[head + 2] = before;
            let written = self.transfer(Op::Write, at, &mut buffer);
            self.unlock_chain_page(at);
            if next == 0 || written.is_err() {
                self.unlock_chain_page(next);
                return written;
            }
            (at, head, rest) = (next, 0, later);
            buffer.0.fill(0);
        }
    }

    /// The turn to write the header, one thread at a time.
    fn header_turn(&self) -> Result<Taken<'_>> {
        let mut backoff = Backoff::new(self.deadline);
        loop {
            if let Some(turn) = self.header.take() {
                return Ok(turn);
            }
            if !backoff.wait() {
                let (holder, waited) = ("another flush".to_owned(), backoff.waited());
                return Err(Error::LatchTimeout { page: PageId(0), holder, waited });
            }
        }
    }

    /// A free page to hold the rest of the chain, locked: who allocates it waits until it is
    /// written, so that the chain never lies over a page's own content. 0 when there is none.
    fn lock_chain_page(&self, here: &[u64]) -> u64 {
        let is_locked = |page: &&u64| {
            let latch = self.word(PageId(**page));
            let seen = latch.load();
            seen.is_unused() && latch.try_begin_load(seen)
        };
        let single = here.iter().filter(|page| **page >> ORDER_SHIFT == 0);
        single.take(CHAIN_TRIES_MAX).find(is_locked).copied().unwrap_or(0)
    }

    fn unlock_chain_page(&self, page: u64) {
        if page != 0 {
            self.word(PageId(page)).abort_load();
        }
    }

    /// Reads header and free list.
    pub(super) fn read_header(&self) -> Result<()> {
        let mut buffer = PageBuffer::new(self.page_bytes)?;
        if self.words.is_empty() {
            return Err(self.refused("is no table file: shorter than one page"));
        }
        self.transfer(Op::Read, 0, &mut buffer)?;
        if buffer.0[0] != MAGIC {
            return Err(self.refused("is no table file: it does not begin as one"));
        }
        let (page_bytes, flags) = (buffer.0[1] as u32, (buffer.0[1] >> 32) as u32);
        if page_bytes as usize != self.page_bytes {
            let here = self.page_bytes;
            return Err(self.refused(format!("has pages of {page_bytes} bytes, not {here}")));
        }
        if (flags & FLAG_CHECKSUM != 0) != self.checksum {
            return Err(self.refused("was created with another setting of `checksum`"));
        }
        let (end, room) = (buffer.0[2], self.words.len() as u64);
        if end == 0 || end > room {
            return Err(self.refused(format!("is short: {end} pages, but room for {room}")));
        }
        self.end.store(end, Ordering::Release);
        let (mut head, mut before) = (HEAD_WORDS, 0);
        for _ in 0..end {
            let sum = chain_sum(buffer.0, head, before);
            if sum != buffer.0[head + 2] {
                // The rest was used again after the last flush, and is lost to this run.
                return if head == 0 { Ok(()) } else { Err(self.refused("has a damaged header")) };
            }
            before = sum;
            let (count, next) = (buffer.0[head] as usize, buffer.0[head + 1]);
            let entries = buffer.0[head + CHAIN_WORDS..].get(..count);
            let entries = entries.ok_or_else(|| self.refused("has a damaged free list"))?;
            for entry in entries {
                self.mark_free(*entry, end)?;
            }
            if next == 0 || next >= end {
                return Ok(());
            }
            self.transfer(Op::Read, next, &mut buffer)?;
            head = 0;
        }
        Err(self.refused("has a free list that runs in circles"))
    }

    fn mark_free(&self, entry: u64, end: u64) -> Result<()> {
        let (page, order) = (entry & ((1 << ORDER_SHIFT) - 1), (entry >> ORDER_SHIFT) as usize);
        let mut alloc = self.alloc.lock();
        let list = alloc.free.get_mut(order).filter(|_| page > 0 && page + (1 << order) <= end);
        let list = list.ok_or_else(|| self.refused("has a damaged free list"))?;
        for latch in &self.words[page as usize..page as usize + (1 << order)] {
            if latch.load().is_unused() {
                return Err(self.refused("has a free list that names a page twice"));
            }
            latch.mark_unused();
        }
        list.push(page);
        Ok(())
    }

    fn transfer(&self, op: Op, page: u64, words: &mut PageBuffer) -> Result<()> {
        let mut queue = self.take_queue()?;
        let segments = [Segment { ptr: words.1.as_ptr(), len: self.page_bytes }];
        let offset = self.offset(PageId(page));
        // SAFETY: the buffer is this function's until the completion below; the header and free
        // pages are read and written by this module only, under no overlapping request.
        let pushed = unsafe { queue.push(Request { token: 0, op, offset, segments: &segments }) };
        assert!(pushed, "an idle queue takes a request");
        let mut result = None;
        while result.is_none() {
            queue.wait(Duration::from_secs(1), &mut |done| result = Some(done.result))?;
        }
        self.give_queue(queue);
        result.expect("set above")
    }
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
