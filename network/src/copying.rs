//! Giving a server what it missed, beside writers.
//!
//! A block is copied from a server that has it to one that lacks it. Meanwhile it may be written anew: then the copy is
//! older than the write, and must not count, whichever of the two comes last. Writers never wait for a copy, and a copy
//! does not wait for writers; each looks for the other after it has shown itself:
//!
//! ```text
//!   writer: writing += block, then looks at `place` ------ a copy is there: the target is left out, the copy disturbed
//!           and then at what is barred -------------------- a copy was there and may come late: no write
//!   copier: place := block, then looks at `writing` ------ a writer is there: not now
//!           read, write; lacking -= block; was disturbed: lacking += block; place := none
//!                 '--the connection breaks: barred += block; place := none
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

/// A write may reach the place late, so that there must be no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Barred;

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

    /// A write begins, unless its place is barred. Returns the server that must not get it, because it is getting an
    /// older copy.
    pub(crate) fn begin_write(
        &self,
        offset: u64,
        len: u64,
        is_barred: impl FnOnce() -> bool,
    ) -> Result<Option<usize>, Barred> {
        self.writing.insert(offset, len);
        fence(Ordering::SeqCst); // Pairs with that in `copy`: one of the two sees the other.
        let to = CopyPlace(self.place.load(Ordering::SeqCst)).overlap(offset, len);
        // Behind the look at the place: a copy that is lost has barred its place before it is over.
        if is_barred() {
            self.end_write(offset, len);
            return Err(Barred);
        }
        if to.is_some() {
            // A swap: what this writer notes at its end comes behind the copier's note, if the copier does not see it.
            self.is_disturbed.swap(true, Ordering::SeqCst);
        }
        Ok(to)
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
        // From here on no writer gives the target a block of the range; what one has given it before stays.
        let is_due = !self.writing.has_any(offset, len) && lacking.has_all(offset, len);
        if is_due && copy() {
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
            assert_eq!(copying.begin_write(4096, 4096, || false), Ok(None), "beside it");
            assert_eq!(copying.begin_write(0, 8192, || false), Ok(Some(1)));
            true
        });
        assert!(lacking.has_any(0, 4096) && lacking.has_any(4096, 4096));
        copying.copy(1, 0, 4096, &lacking, || panic!("it is being written"));
        copying.end_write(0, 8192);
        copying.copy(1, 0, 4096, &lacking, || true);
        assert!(!lacking.has_any(0, 4096) && lacking.has_any(4096, 4096));
    }

    #[test]
    fn what_a_writer_gave_the_target_meanwhile_is_not_copied_over() {
        let (copying, lacking) = (Copying::new(1 << 20), BlockSet::new(1 << 20));
        lacking.insert(0, 4096);
        copying.copy(1, 0, 8192, &lacking, || panic!("the target has the second block"));
    }

    #[test]
    fn no_copy_begins_between_the_look_at_what_is_barred_and_the_write() {
        let (copying, lacking) = (Copying::new(1 << 20), BlockSet::new(1 << 20));
        lacking.insert(0, 4096);
        let began = copying.begin_write(0, 4096, || {
            copying.copy(1, 0, 4096, &lacking, || panic!("it is being written"));
            true
        });
        assert_eq!(began, Err(Barred));
        copying.copy(1, 0, 4096, &lacking, || false);
        assert!(!copying.writing.has_any(0, 4096), "the write has ended");
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
        barred: BlockSet,
        content: [AtomicU64; 2],
    }

    impl World {
        fn new() -> Arc<World> {
            let world = World {
                copying: Copying::new(BLOCK),
                lacking: BlockSet::new(BLOCK),
                barred: BlockSet::new(BLOCK),
                content: [AtomicU64::new(1), AtomicU64::new(0)],
            };
            world.lacking.insert(0, BLOCK);
            Arc::new(world)
        }

        /// Writes version 2.
        fn write(&self) {
            let World { copying, lacking, barred, content } = self;
            let Ok(left_out) = copying.begin_write(0, BLOCK, || barred.has_any(0, BLOCK)) else {
                return;
            };
            content[0].store(2, SeqCst);
            if left_out.is_none() {
                content[1].store(2, SeqCst);
                lacking.remove(0, BLOCK);
            } else {
                lacking.insert(0, BLOCK);
            }
            copying.end_write(0, BLOCK);
        }

        fn check(&self) {
            if !self.lacking.has_any(0, BLOCK) {
                assert_eq!(self.content[1].load(SeqCst), 2);
            }
        }
    }

    #[test]
    fn loom_a_copy_that_comes_late_finds_no_write_that_counts() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || other.write());
            let mut copied = None;
            world.copying.copy(1, 0, BLOCK, &world.lacking, || {
                copied = Some(world.content[0].load(SeqCst));
                world.barred.insert(0, BLOCK); // The connection broke.
                false
            });
            if let Some(copied) = copied {
                world.content[1].store(copied, SeqCst);
            }
            writer.join().expect("the writer");
            world.check();
        });
    }

    #[test]
    fn loom_a_server_that_counts_has_the_last_write() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || other.write());
            let World { copying, lacking, content, .. } = &*world;
            copying.copy(1, 0, BLOCK, lacking, || {
                content[1].store(content[0].load(SeqCst), SeqCst);
                true
            });
            writer.join().expect("the writer");
            world.check();
        });
    }
}
