//! Sums of a table's blocks, and which of them were written and not flushed: see [`table`](crate::table).

#![expect(unsafe_code, reason = "reads the buffers of requests")]

use crate::blocks::BLOCK;
use crate::parity::sum_of;
use crate::sync::{AtomicU32, Ordering, zeros};
use crate::sys::IoSlice;
use crate::unflushed::Unflushed;

// Sums that no block has.
const UNKNOWN: u32 = 0;
const DOUBTFUL: u32 = 1;

/// Knowledge of a table's blocks.
#[derive(Debug)]
pub(crate) struct TableBlocks {
    /// Sums of the blocks as they were read or written last; 0: unknown; 1: a write has failed that was sent.
    sums: Box<[AtomicU32]>,
    unflushed: Unflushed,
}

impl TableBlocks {
    pub(crate) fn new(bytes: u64) -> TableBlocks {
        let sums = zeros((bytes / BLOCK) as usize);
        TableBlocks { sums, unflushed: Unflushed::new(bytes) }
    }

    fn sums(&self, offset: u64) -> impl Iterator<Item = &AtomicU32> {
        self.sums[(offset / BLOCK) as usize..].iter()
    }

    /// A server has written a range, and nobody was told yet. Nobody reads or writes it meanwhile.
    ///
    /// # Safety
    /// The buffers can be read, and nobody changes them.
    pub(crate) unsafe fn written(
        &self,
        offset: u64,
        len: u64,
        buffers: impl Iterator<Item = IoSlice>,
    ) {
        // SAFETY: the caller's promise.
        let blocks = buffers.flat_map(|buffer| unsafe { buffer.bytes() }.chunks(BLOCK as usize));
        for (sum, block) in self.sums(offset).zip(blocks) {
            sum.store(known(block), Ordering::SeqCst);
        }
        self.unflushed.add(offset, len);
    }

    /// Compares what was read with what is known, and notes what is not; returns whether all of it is right.
    ///
    /// # Safety
    /// As for [`written`](TableBlocks::written).
    pub(crate) unsafe fn check(&self, offset: u64, buffers: impl Iterator<Item = IoSlice>) -> bool {
        // SAFETY: the caller's promise.
        let blocks = buffers.flat_map(|buffer| unsafe { buffer.bytes() }.chunks(BLOCK as usize));
        self.sums(offset).zip(blocks).all(|(sum, block)| {
            let found = known(block);
            let noted = sum.compare_exchange(UNKNOWN, found, Ordering::SeqCst, Ordering::SeqCst);
            noted.map_or_else(|expected| expected == found, |_| true)
        })
    }

    fn set(&self, offset: u64, len: u64, to: u32) {
        let blocks = (len / BLOCK) as usize;
        self.sums(offset).take(blocks).for_each(|sum| sum.store(to, Ordering::SeqCst));
    }

    /// A write of a range has failed that may be done, in part, or come late: it is not read before it is written again.
    pub(crate) fn doubt(&self, offset: u64, len: u64) {
        self.set(offset, len, DOUBTFUL);
    }

    pub(crate) fn unflushed(&self) -> &Unflushed {
        &self.unflushed
    }

    /// Compares bytes that a server has with what was written there.
    pub(crate) fn compare(&self, offset: u64, bytes: &[u8]) -> Compared {
        let blocks = bytes.chunks(BLOCK as usize).map(known);
        let pairs = self.sums(offset).map(|sum| sum.load(Ordering::SeqCst)).zip(blocks);
        pairs.fold(Compared::Right, |so_far, (sum, found)| match sum {
            _ if sum == found => so_far,
            UNKNOWN | DOUBTFUL if so_far != Compared::Wrong => Compared::Unknown,
            UNKNOWN | DOUBTFUL => so_far,
            _ => Compared::Wrong,
        })
    }

    /// The content of a range is of no use any more.
    pub(crate) fn discarded(&self, offset: u64, len: u64) {
        self.unflushed.remove(offset, len);
        self.set(offset, len, UNKNOWN);
    }
}

/// The sum of a block.
fn known(block: &[u8]) -> u32 {
    sum_of(block).max(DOUBTFUL + 1)
}

/// How bytes compare with what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compared {
    Right,
    /// A block's write has failed or is under way.
    Unknown,
    Wrong,
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_block_that_changed_is_found_and_an_unknown_one_is_noted() {
        let blocks = TableBlocks::new(8 * BLOCK);
        let mut bytes = vec![1_u8; 2 * BLOCK as usize];
        bytes[BLOCK as usize..].fill(2);
        let slice = IoSlice::new(bytes.as_mut_ptr(), bytes.len());
        // SAFETY: of all calls here: the bytes live, and nobody changes them during a call.
        let check = |at: u64| unsafe { blocks.check(at * BLOCK, std::iter::once(slice)) };
        assert!(check(3) && check(3) && !check(2) && !check(4), "3 and 4 are known");
        // SAFETY: as above.
        unsafe { blocks.written(4 * BLOCK, 2 * BLOCK, std::iter::once(slice)) };
        assert!(check(4) && !check(3));
        assert_eq!(blocks.unflushed().next_run(0, 8 * BLOCK), Some((4 * BLOCK, 2 * BLOCK)));
        blocks.doubt(4 * BLOCK, BLOCK);
        assert!(!check(4), "it may be either");
        assert_eq!(blocks.compare(4 * BLOCK, &bytes), Compared::Unknown);
        blocks.discarded(4 * BLOCK, BLOCK);
        assert!(check(3), "block 3 was right, and 4 was not known");
        assert_eq!(blocks.unflushed().next_run(0, 8 * BLOCK), Some((5 * BLOCK, BLOCK)));
    }
}
