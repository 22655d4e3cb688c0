//! Giving a server what it missed, beside writers.
//!
//! A block is copied from a server that has it to one that lacks it. Meanwhile it may be written anew: then the copy is
//! older than the write, and must not count, whichever of the two comes last. Writers never wait for a copy, and a copy
//! does not wait for writers; each looks for the other after it has shown itself:
//!
//! ```text
//!   writer: writing += block, then looks at `place` ------ a copy is there: the target is left out, the copy disturbed
//!   copier: place := block, then looks at `writing` ------ a writer is there: not now
//!           read, write; lacking -= block; was disturbed: lacking += block; place := none
//! ```
//! One of two that meet sees the other, for both show themselves first, and a fence is between. A writer that has left the
//! target out notes at its end that the target lacks the block: before the copier's note, which the disturbance takes
//! back, or after it.

use crate::blocks::{BLOCK, BlockSet};
use crate::sync::{AtomicBool, AtomicU64, Ordering, fence};

/// The copy that is being made, as a word; 0: none.
///
/// 63..16 first block | 15..4 number of blocks | 3..0 the target, plus 1
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CopyPlace(u64);

impl CopyPlace {
    const NONE: CopyPlace = CopyPlace(0);

    fn new(to: usize, offset: u64, len: u64) -> CopyPlace {
        let (first, count) = (offset / BLOCK, len / BLOCK);
        assert!(to < 15 && count < 1 << 12 && first < 1 << 48, "{len} bytes for server {to}");
        CopyPlace(first << 16 | count << 4 | (to as u64 + 1))
    }

    /// The target of a copy of part of the range.
    fn overlap(self, offset: u64, len: u64) -> Option<usize> {
        let (first, count, to) = (self.0 >> 16, self.0 >> 4 & 0xfff, self.0 & 0xf);
        let (from, end) = (offset / BLOCK, (offset + len).div_ceil(BLOCK));
        (to > 0 && from < first + count && first < end).then(|| to as usize - 1)
    }
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Copying {
    /// Blocks that are being written.
    writing: BlockSet,
    place: AtomicU64,
    is_disturbed: AtomicBool,
}

impl Copying {
    pub(crate) fn new(bytes: u64) -> Copying {
        Copying {
            writing: BlockSet::new(bytes),
            place: AtomicU64::new(CopyPlace::NONE.0),
            is_disturbed: AtomicBool::new(false),
        }
    }

    /// A write begins. Returns the server that must not get it, because it is getting an older copy.
    pub(crate) fn begin_write(&self, offset: u64, len: u64) -> Option<usize> {
        self.writing.insert(offset, len);
        fence(Ordering::SeqCst); // Pairs with that in `copy`: one of the two sees the other.
        let to = CopyPlace(self.place.load(Ordering::SeqCst)).overlap(offset, len)?;
        // A swap: what this writer notes at its end comes behind the copier's note, if the copier does not see it.
        self.is_disturbed.swap(true, Ordering::SeqCst);
        Some(to)
    }

    /// A write is over, and what servers lack by it is noted.
    pub(crate) fn end_write(&self, offset: u64, len: u64) {
        self.writing.remove(offset, len);
    }

    /// Makes a copy by `copy`, which returns whether the target has it, and notes that in `lacking`. One at a time.
    pub(crate) fn copy(
        &self,
        to: usize,
        offset: u64,
        len: u64,
        lacking: &BlockSet,
        copy: impl FnOnce() -> bool,
    ) {
        self.place.store(CopyPlace::new(to, offset, len).0, Ordering::SeqCst);
        fence(Ordering::SeqCst); // Pairs with that in `begin_write`.
        if !self.writing.has_any(offset, len) && copy() {
            lacking.remove(offset, len);
            if self.is_disturbed.swap(false, Ordering::SeqCst) {
                lacking.insert(offset, len);
            }
        }
        self.place.store(CopyPlace::NONE.0, Ordering::SeqCst);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_write_beside_a_copy_leaves_its_target_out_and_lacking() {
        let (copying, lacking) = (Copying::new(1 << 20), BlockSet::new(1 << 20));
        lacking.insert(0, 8192);
        copying.copy(1, 0, 4096, &lacking, || {
            assert_eq!(copying.begin_write(4096, 4096), None, "beside it");
            assert_eq!(copying.begin_write(0, 8192), Some(1));
            true
        });
        assert!(lacking.has_any(0, 4096) && lacking.has_any(4096, 4096));
        copying.copy(1, 0, 4096, &lacking, || panic!("it is being written"));
        copying.end_write(0, 8192);
        copying.copy(1, 0, 4096, &lacking, || true);
        assert!(!lacking.has_any(0, 4096) && lacking.has_any(4096, 4096));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::Ordering::SeqCst;
    use loom::sync::Arc;
    use loom::thread;

    /// One block on two servers, as version numbers; the second was away and lacks it.
    struct World {
        copying: Copying,
        lacking: BlockSet,
        content: [AtomicU64; 2],
    }

    #[test]
    fn loom_a_server_that_counts_has_the_last_write() {
        loom::model(|| {
            let world = Arc::new(World {
                copying: Copying::new(BLOCK),
                lacking: BlockSet::new(BLOCK),
                content: [AtomicU64::new(1), AtomicU64::new(0)],
            });
            world.lacking.insert(0, BLOCK);
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || {
                let World { copying, lacking, content } = &*other;
                let left_out = copying.begin_write(0, BLOCK);
                content[0].store(2, SeqCst);
                if left_out.is_none() {
                    content[1].store(2, SeqCst);
                    lacking.remove(0, BLOCK);
                } else {
                    lacking.insert(0, BLOCK);
                }
                copying.end_write(0, BLOCK);
            });
            let World { copying, lacking, content } = &*world;
            copying.copy(1, 0, BLOCK, lacking, || {
                content[1].store(content[0].load(SeqCst), SeqCst);
                true
            });
            writer.join().expect("the writer");
            if !lacking.has_any(0, BLOCK) {
                assert_eq!(content[1].load(SeqCst), 2);
            }
        });
    }
}
