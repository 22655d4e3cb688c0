//! Buffers of several pages: the words of their pages.
//!
//! A buffer has one latch, the word of its first page. The words of the others say that they are not
//! allocated, as long as the buffer is: nobody fixes them, and no other page has their memory. The
//! table file does not say where its buffers are; so the words say it from when a buffer is allocated,
//! or found in the list of free pages, or first loaded.
//!
//! # Invariants
//! 1. While a buffer of several pages is resident, the words of all its pages but the first are
//!    unused. Only its loading or allocating thread makes them so, and only from being absent.
//! 2. A chunk into which such a buffer reaches is never frozen (`chunk`).

use super::backoff::Backoff;
use super::latch::{Latch, LatchWord};
use super::page_table::PageTable;
use crate::base::error::{Error, Result};
use crate::base::units::PageId;

/// Words of a buffer's pages but the first, locked while the buffer is loaded. Absent as before when
/// dropped.
pub(super) struct Inside<'p>(&'p [Latch]);

impl<'p> Inside<'p> {
    /// Locks the words inside of a buffer that was never resident, whose first page this thread has
    /// locked.
    ///
    /// # Errors
    /// [`Error::BadRange`] when one of them is, or was, a page by itself: the buffer is of another
    /// order; [`Error::LatchTimeout`] when one is locked for too long.
    pub(super) fn lock(
        table: &'p PageTable,
        first: PageId,
        was: LatchWord,
        order: u8,
        mut backoff: Backoff,
    ) -> Result<Inside<'p>> {
        let start = first.as_usize() + 1;
        let after = match was.known_order() {
            Some(_) => start, // They are parts already.
            None => first.as_usize() + (1 << order),
        };
        // Grows with what is locked, so that an error unlocks just that.
        let mut inside = Inside(table.words(start..start));
        let mut at = start;
        while at < after {
            let latch = table.word(PageId(at as u64));
            let seen = latch.load();
            if seen.is_readable() || seen.is_unused() || seen.known_order().is_some() {
                return Err(Error::BadRange {
                    reason: "a page of the buffer is one by itself".into(),
                });
            }
            if latch.try_begin_load(seen) {
                at += 1;
                inside.0 = table.words(start..at);
            } else if !backoff.wait() {
                return Err(table.timeout(PageId(at as u64), &backoff));
            }
        }
        Ok(inside)
    }

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

/// Makes the words inside of a buffer unused that is about to be a part of the table. `false`: as for
/// [`make_unused`].
pub(super) fn make_parts(table: &PageTable, first: PageId, order: u8) -> bool {
    let start = first.as_usize();
    make_unused(table.words(start + 1..start + (1 << order)))
}

/// Makes words unused that are behind the table's end. `false`: one of them is locked, for the chunk
/// is frozen, which takes microseconds.
pub(super) fn make_unused(words: &[Latch]) -> bool {
    words.iter().all(|latch| {
        let seen = latch.load();
        let is_locked = !seen.is_unused() && latch.try_begin_load(seen);
        if is_locked {
            latch.freed();
        }
        is_locked || seen.is_unused()
    })
}
