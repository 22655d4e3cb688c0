//! Sets of blocks of 4 KiB, which several threads change.

use crate::sync::{AtomicU64, Ordering, zeros};
use std::ops::Range;

/// Bytes of a block: what all offsets and lengths are multiples of.
pub(crate) const BLOCK: u64 = 4096;

/// A set of blocks. Its memory is touched where it has members.
#[derive(Debug)]
pub(crate) struct BlockSet {
    words: Box<[AtomicU64]>,
    members: AtomicU64,
}

impl BlockSet {
    /// Creates an empty set of the blocks of `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> BlockSet {
        let words = bytes.div_ceil(BLOCK * 64) as usize;
        BlockSet { words: zeros(words), members: AtomicU64::new(0) }
    }

    /// The words of the blocks of `len` bytes from `offset` on, with a mask of each.
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = (&AtomicU64, u64)> {
        let Range { start, end } = offset / BLOCK..(offset + len).div_ceil(BLOCK);
        (start / 64..end.div_ceil(64)).map(move |word| {
            let from = start.saturating_sub(word * 64);
            let to = (end - word * 64).min(64);
            let mask = (u64::MAX >> (64 - (to - from))) << from;
            (&self.words[word as usize], mask)
        })
    }

    // All of them SeqCst: set and read beside the end of a request on another thread, which must not be late.

    pub(crate) fn insert(&self, offset: u64, len: u64) {
        for (word, mask) in self.parts(offset, len) {
            let before = word.fetch_or(mask, Ordering::SeqCst);
            self.members.fetch_add((mask & !before).count_ones().into(), Ordering::Relaxed);
        }
    }

    pub(crate) fn remove(&self, offset: u64, len: u64) {
        for (word, mask) in self.parts(offset, len) {
            if word.load(Ordering::SeqCst) & mask != 0 {
                let before = word.fetch_and(!mask, Ordering::SeqCst);
                self.members.fetch_sub((mask & before).count_ones().into(), Ordering::Relaxed);
            }
        }
    }

    /// Removes all members, but for those that are inserted meanwhile.
    pub(crate) fn clear(&self) {
        for word in self.words.iter().filter(|word| word.load(Ordering::SeqCst) != 0) {
            let before = word.swap(0, Ordering::SeqCst);
            self.members.fetch_sub(before.count_ones().into(), Ordering::Relaxed);
        }
    }

    /// True if a block of the range is a member.
    pub(crate) fn has_any(&self, offset: u64, len: u64) -> bool {
        self.parts(offset, len).any(|(word, mask)| word.load(Ordering::SeqCst) & mask != 0)
    }

    /// True if all blocks of the range are members.
    pub(crate) fn has_all(&self, offset: u64, len: u64) -> bool {
        self.parts(offset, len).all(|(word, mask)| word.load(Ordering::SeqCst) & mask == mask)
    }

    /// Number of members; a moment old where others change them.
    pub(crate) fn count(&self) -> u64 {
        // One that is removed while it is inserted may be taken off before it is added.
        (self.members.load(Ordering::Relaxed) as i64).max(0) as u64
    }

    /// The first run of members from byte `from` on, of `most` bytes at most: where it begins, and its length.
    pub(crate) fn next_run(&self, from: u64, most: u64) -> Option<(u64, u64)> {
        let first = from / BLOCK;
        let bits = |word: usize| self.words.get(word).map_or(0, |bits| bits.load(Ordering::SeqCst));
        let mut at = (first / 64) as usize;
        let mut word = bits(at) & (u64::MAX << (first % 64));
        while word == 0 {
            at += 1;
            if at >= self.words.len() {
                return None;
            }
            word = bits(at);
        }
        let start = at as u64 * 64 + u64::from(word.trailing_zeros());
        let is_member = |block: u64| bits((block / 64) as usize) >> (block % 64) & 1 == 1;
        let len = (0..most / BLOCK).take_while(|n| is_member(start + n)).count() as u64;
        Some((start * BLOCK, len * BLOCK))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const BLOCKS: u64 = 300;

    proptest! {
        #[test]
        fn a_set_of_blocks_is_a_set(
            steps in prop::collection::vec((any::<bool>(), 0..BLOCKS, 1..BLOCKS), 1..40),
        ) {
            let set = BlockSet::new(BLOCKS * BLOCK);
            let mut model = BTreeSet::new();
            for (insert, first, count) in steps {
                let count = count.min(BLOCKS - first);
                let (offset, len) = (first * BLOCK, count * BLOCK);
                prop_assert_eq!(set.has_any(offset, len), model.range(first..first + count).next().is_some());
                prop_assert_eq!(set.has_all(offset, len), model.range(first..first + count).count() as u64 == count);
                let run = set.next_run(offset, len);
                prop_assert_eq!(run.map(|run| run.0 / BLOCK), model.range(first..).next().copied());
                if let Some((start, len)) = run {
                    prop_assert!(len >= BLOCK);
                    prop_assert!((start / BLOCK..(start + len) / BLOCK).all(|block| model.contains(&block)));
                }
                if insert {
                    set.insert(offset, len);
                    model.extend(first..first + count);
                } else {
                    set.remove(offset, len);
                    model.retain(|block| !(first..first + count).contains(block));
                }
                prop_assert_eq!(set.count(), model.len() as u64);
            }
        }
    }
}
