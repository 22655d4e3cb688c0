//! Buffers of several pages: which words and which chunks they reach into.
//!
//! A buffer has one latch, the word of its first page. The words of the others say that they are not
//! allocated, as long as the buffer is: nobody fixes them, and memory that is one buffer's is nobody
//! else's. The table file does not say where its buffers are; so they say it from when a buffer is
//! allocated, or found in the list of free pages, or first loaded.
//!
//! # Invariants
//! 1. While a buffer of several pages is resident, the words of all its pages but the first are
//!    unused. Nobody but its loading or allocating thread makes them so, and only from being absent.
//! 2. A chunk into which such a buffer reaches is never frozen.

use super::fix::Backoff;
use super::latch::{Latch, LatchWord};
use super::{BufferPool, CHUNK_PAGES};
use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::PageId;

/// Buffers of several pages reach into the chunk: its words do not tell what lies in it.
const BUFFERS: u64 = 4;

/// One thread changes the memory of the chunk as a whole: it moves it away, drops it in one range with
/// neighbours, or collapses it into a huge page.
pub(super) const FROZEN: u64 = 8;

/// Words of a buffer's pages but the first, locked while the buffer is loaded. Absent as before when
/// dropped.
pub(super) struct Inside<'p>(&'p [Latch]);

impl Inside<'_> {
    /// The buffer is loaded: they are no pages by themselves.
    pub(super) fn become_parts(self) {
        self.0.iter().for_each(Latch::freed);
        std::mem::forget(self);
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(Latch::abort_load);
    }
}

impl BufferPool {
    /// Locks the words inside of a buffer that was never resident, whose first page this thread has
    /// locked.
    ///
    /// # Errors
    /// [`Error::BadRange`] when one of them is, or was, a page by itself: the buffer is of another
    /// order; [`Error::LatchTimeout`] when one is locked for too long.
    pub(super) fn lock_inside(
        &self,
        first: PageId,
        was: LatchWord,
        order: u8,
    ) -> Result<Inside<'_>> {
        let start = first.as_usize() + 1;
        let after = match was.known_order() {
            Some(_) => start, // They are parts already.
            None => first.as_usize() + (1 << order),
        };
        let mut backoff = Backoff::new(self.deadline);
        let mut at = start;
        while at < after {
            let inside = || Inside(&self.words[start..at]);
            let (latch, seen) = (&self.words[at], self.words[at].load());
            if seen.is_readable() || seen.is_unused() || seen.known_order().is_some() {
                drop(inside());
                return Err(Error::BadRange { reason: "a page of the buffer is one by itself" });
            }
            if latch.try_begin_load(seen) {
                at += 1;
            } else if !backoff.wait() {
                drop(inside());
                return Err(self.timeout(PageId(at as u64), &backoff));
            }
        }
        Ok(Inside(&self.words[start..after]))
    }

    /// Makes the words inside of a buffer unused that is about to be a part of the table. `false`:
    /// one of them is locked, for the chunk is frozen, which takes microseconds.
    pub(super) fn make_parts(&self, first: PageId, order: u8) -> bool {
        let start = first.as_usize();
        self.words[start + 1..start + (1 << order)].iter().all(|latch| {
            let seen = latch.load();
            let is_locked = !seen.is_unused() && latch.try_begin_load(seen);
            if is_locked {
                latch.freed();
            }
            is_locked || seen.is_unused()
        })
    }

    /// Keeps the chunks into which a buffer of several pages is about to reach from being frozen.
    pub(super) fn note_buffer(&self, page: PageId, order: u8) {
        if order == 0 {
            return;
        }
        let (first, last) = (page.as_usize(), page.as_usize() + (1 << order) - 1);
        for chunk in first / CHUNK_PAGES..=last / CHUNK_PAGES {
            // What froze the chunk before is done in microseconds.
            while self.charged[chunk].fetch_or(BUFFERS, Ordering::AcqRel) & FROZEN != 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Reserves a chunk's memory for one change of all of it; `false` while another thread does so,
    /// or when a buffer of several pages reaches into it.
    pub(super) fn try_freeze(&self, chunk: usize) -> bool {
        let note = &self.charged[chunk];
        let seen = note.load(Ordering::Acquire);
        // Pairs with `note_buffer`: the second of the two sees the other's bit.
        seen & (BUFFERS | FROZEN) == 0
            && note
                .compare_exchange(seen, seen | FROZEN, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
    }

    pub(super) fn unfreeze(&self, chunk: usize) {
        self.charged[chunk].fetch_and(!FROZEN, Ordering::Release);
    }
}
