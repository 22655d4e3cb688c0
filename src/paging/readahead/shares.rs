//! Shares: how often something happens to a chunk's pages, of the times when it could have.
//!
//! **Writes.** A page that is read is mapped write-protected, so that it can be dropped without a look
//! when no thread wrote it. Its first write then is a fault, some 9 us. Mapped writable, it costs
//! nothing to write, but has to be moved out and hashed when it leaves, some 4 us. Which is
//! cheaper depends on how many of such pages are written. The threads that install pages ask; write-protection faults and
//! the evictor train. The estimate does not depend on its own decisions: of protected pages the arrivals count and
//! the first writes, of pages mapped writable on a guess the departures, dirty and clean.
//!
//! **Neighbours.** Where a fault is followed by its neighbour's, both could have come by one request of the device; where it
//! is not, what came with it is in the way of others. A query reads the columns of a table in pieces of 64 KiB, a hash table
//! stays one. Faults that begin a stream count, and those that go on (`streams`).

use crate::base::error::Result;
use crate::base::sync::{AtomicU32, Ordering};
use crate::base::units::PageId;
use crate::meta::LazyArray;
use crate::paging::page::CHUNK_PAGES;

/// All of the pages.
const ALL: u32 = 1 << 16;

/// The shares of a region: one for each chunk, and that of all of them as long as nothing is known of one.
#[derive(Debug)]
pub(in crate::paging) struct Shares {
    region: AtomicU32,
    /// Per chunk: its share plus 1; 0 while nothing is known.
    chunks: LazyArray<AtomicU32>,
    /// Number of the last pages that the share of a chunk follows, about. That of the region follows eight times as many.
    memory: u32,
    /// The share above which it is expected.
    worth_it: u32,
}

impl Shares {
    /// Expected of more than one page in `part`, by the last `memory` pages of a chunk.
    ///
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(chunks: usize, memory: u32, part: u32) -> Result<Shares> {
        let (region, chunks) = (AtomicU32::new(0), LazyArray::new(chunks)?);
        Ok(Shares { region, chunks, memory, worth_it: ALL / part })
    }

    /// True if it will probably happen to a page.
    pub(in crate::paging) fn expects(&self, page: PageId) -> bool {
        // Relaxed: an estimate orders nothing.
        let share =
            self.chunks[page.as_usize() / CHUNK_PAGES].load(Ordering::Relaxed).checked_sub(1);
        share.unwrap_or_else(|| self.region.load(Ordering::Relaxed)) > self.worth_it
    }

    /// A page counts, to which it has not happened, as far as is known.
    pub(in crate::paging) fn count(&self, page: PageId) {
        self.learn(page, |share, memory| share - share.div_ceil(memory));
    }

    /// It has happened to a page that counts.
    pub(in crate::paging) fn happened(&self, page: PageId) {
        self.learn(page, |share, memory| (share + ALL / memory).min(ALL));
    }

    /// Two threads may learn at once, and one of them in vain: it is an estimate.
    fn learn(&self, page: PageId, change: impl Fn(u32, u32) -> u32) {
        let region = self.region.load(Ordering::Relaxed);
        self.region.store(change(region, 8 * self.memory), Ordering::Relaxed);
        let chunk = &self.chunks[page.as_usize() / CHUNK_PAGES];
        let share = chunk.load(Ordering::Relaxed).checked_sub(1).unwrap_or(region);
        chunk.store(change(share, self.memory) + 1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A page of a chunk.
    fn of(chunk: usize) -> PageId {
        PageId((chunk * CHUNK_PAGES) as u64)
    }

    /// Of pages that are written.
    fn writes(chunks: usize) -> Shares {
        Shares::new(chunks, 512, 3).expect("a small mapping")
    }

    /// Pages of a chunk are read in and mapped protected; one in `part` is written, at the end.
    fn protected(predictor: &Shares, chunk: usize, pages: usize, part: usize) {
        (0..pages).for_each(|_| predictor.count(of(chunk)));
        (0..pages / part).for_each(|_| predictor.happened(of(chunk)));
    }

    #[test]
    fn pages_that_are_only_read_stay_protected() {
        let predictor = writes(4);
        protected(&predictor, 0, 512, 16);
        assert!(!predictor.expects(of(0)) && !predictor.expects(of(1)));
    }

    #[test]
    fn pages_that_are_all_written_are_mapped_writable_in_chunks_never_seen_too() {
        let predictor = writes(8);
        (0..4).for_each(|chunk| protected(&predictor, chunk, 512, 1));
        assert!((0..8).all(|chunk| predictor.expects(of(chunk))));
    }

    #[test]
    fn guesses_that_come_to_nothing_end() {
        let predictor = writes(1);
        protected(&predictor, 0, 512, 1);
        assert!(predictor.expects(of(0)));
        let departures = (0..).take_while(|_| {
            predictor.count(of(0));
            predictor.expects(of(0))
        });
        assert!((256..1024).contains(&departures.count()));
    }

    #[test]
    fn a_chunk_that_is_written_differs_from_the_others() {
        let predictor = writes(16);
        for _ in 0..4 {
            protected(&predictor, 0, 512, 1);
            (1..16).for_each(|chunk| protected(&predictor, chunk, 512, 64));
        }
        assert!(predictor.expects(of(0)));
        assert!((1..16).all(|chunk| !predictor.expects(of(chunk))));
    }
}
