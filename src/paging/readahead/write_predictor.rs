//! The write predictor: whether pages that were read in are written before they leave.
//!
//! A page that is read is mapped write-protected, so that it can be dropped without a look
//! when no thread wrote it. Its first write then is a fault, some 9 us. Mapped writable, it costs
//! nothing to write, but has to be moved out and hashed when it leaves, some 4 us. Which is
//! cheaper depends on how many of such pages are written, and [`WritePredictor`] estimates that share: for
//! each chunk, and for all of them as long as nothing is known of one. The threads that install
//! pages ask it; write-protection faults and the evictor train it.
//!
//! The estimate does not depend on its own decisions: of protected pages it counts the arrivals and
//! the first writes, of pages mapped writable on a guess the departures, dirty and clean.

use crate::base::error::Result;
use crate::base::sync::{AtomicU32, Ordering};
use crate::meta::LazyArray;
use crate::paging::page::CHUNK_PAGES;

/// All of the pages.
const ALL: u32 = 1 << 16;
/// Share of pages written above which a guess is cheaper: a fault of 9 us that is saved against
/// 4 us for each page that was guessed wrong.
const WORTH_IT: u32 = ALL / 3;
/// Number of the last pages that the share of a chunk follows, about: as many as it has,
/// because they come in by hundreds, and none of them is written yet.
const CHUNK_MEMORY: u32 = CHUNK_PAGES as u32;
/// The same of the region.
const REGION_MEMORY: u32 = 8 * CHUNK_MEMORY;

/// The shares of a region.
#[derive(Debug)]
pub(super) struct WritePredictor {
    region: AtomicU32,
    /// Per chunk: its share plus 1; 0 while nothing is known.
    chunks: LazyArray<AtomicU32>,
}

impl WritePredictor {
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(chunks: usize) -> Result<WritePredictor> {
        Ok(WritePredictor { region: AtomicU32::new(0), chunks: LazyArray::new(chunks)? })
    }

    /// True if a page of the chunk, about to be mapped for a read, will probably be written.
    pub(super) fn expects_write(&self, chunk: usize) -> bool {
        // Relaxed: an estimate orders nothing.
        let share = self.chunks[chunk].load(Ordering::Relaxed).checked_sub(1);
        share.unwrap_or_else(|| self.region.load(Ordering::Relaxed)) > WORTH_IT
    }

    /// A page that counts was not written, as far as is known.
    pub(super) fn unwritten(&self, chunk: usize) {
        self.learn(chunk, |share, memory| share - share.div_ceil(memory));
    }

    /// A page that counts was written.
    pub(super) fn written(&self, chunk: usize) {
        self.learn(chunk, |share, memory| (share + ALL / memory).min(ALL));
    }

    /// Two threads may learn at once, and one of them in vain: it is an estimate.
    fn learn(&self, chunk: usize, change: impl Fn(u32, u32) -> u32) {
        let region = self.region.load(Ordering::Relaxed);
        self.region.store(change(region, REGION_MEMORY), Ordering::Relaxed);
        let share = self.chunks[chunk].load(Ordering::Relaxed).checked_sub(1).unwrap_or(region);
        self.chunks[chunk].store(change(share, CHUNK_MEMORY) + 1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of a chunk are read in and mapped protected; one in `part` is written, at the end.
    fn protected(predictor: &WritePredictor, chunk: usize, pages: usize, part: usize) {
        (0..pages).for_each(|_| predictor.unwritten(chunk));
        (0..pages / part).for_each(|_| predictor.written(chunk));
    }

    #[test]
    fn pages_that_are_only_read_stay_protected() {
        let predictor = WritePredictor::new(4).expect("a small mapping");
        protected(&predictor, 0, 512, 16);
        assert!(!predictor.expects_write(0) && !predictor.expects_write(1));
    }

    #[test]
    fn pages_that_are_all_written_are_mapped_writable_in_chunks_never_seen_too() {
        let predictor = WritePredictor::new(8).expect("a small mapping");
        (0..4).for_each(|chunk| protected(&predictor, chunk, 512, 1));
        assert!((0..8).all(|chunk| predictor.expects_write(chunk)));
    }

    #[test]
    fn guesses_that_come_to_nothing_end() {
        let predictor = WritePredictor::new(1).expect("a small mapping");
        protected(&predictor, 0, 512, 1);
        assert!(predictor.expects_write(0));
        let departures = (0..).take_while(|_| {
            predictor.unwritten(0);
            predictor.expects_write(0)
        });
        assert!((256..1024).contains(&departures.count()));
    }

    #[test]
    fn a_chunk_that_is_written_differs_from_the_others() {
        let predictor = WritePredictor::new(16).expect("a small mapping");
        for _ in 0..4 {
            protected(&predictor, 0, 512, 1);
            (1..16).for_each(|chunk| protected(&predictor, chunk, 512, 64));
        }
        assert!(predictor.expects_write(0));
        assert!((1..16).all(|chunk| !predictor.expects_write(chunk)));
    }
}
