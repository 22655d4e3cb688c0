//! Bit sets of billions of bits: finding is fast and untouched parts cost no memory.
//!
//! A [`BitSet`] is a tree of words. Level 0 holds the bits; a bit of level `k + 1` says whether a
//! word of level `k` is other than zero. The top level is one word:
//!
//! ```text
//! level 2                  [....1.1.]                 one word
//! level 1        [........] [...1....] [1.......]     one bit per word of level 0
//! level 0   ... [..111...] [1.......] ...             the bits
//! ```
//!
//! Words live in lazily touched anonymous memory. In a set that starts full they are stored
//! inverted, so that zero-filled memory is a full set.
//!
//! # Invariants
//! 1. A bit of a level above 0 is set exactly when the word that it stands for is not zero.
//! 2. Bits past the end are clear.

use crate::base::error::Result;
use crate::meta::LazyArray;

const WORD: u64 = u64::BITS as u64;

/// Levels that a set of `u64::MAX` bits would take: 64 to the power of 11 is more.
const LEVELS_MAX: usize = 11;

/// A set of the numbers `[0, len)`.
#[derive(Debug)]
pub(super) struct BitSet {
    words: LazyArray<u64>,
    /// First word of each level.
    starts: [usize; LEVELS_MAX],
    levels: usize,
    /// Mask of stored words (exclusive or).
    invert: u64,
    len: u64,
    count: u64,
}

impl BitSet {
    /// Creates a set that holds nothing.
    pub(super) fn empty(len: u64) -> Result<BitSet> {
        BitSet::new(len, 0)
    }

    /// Creates a set that holds every number.
    pub(super) fn full(len: u64) -> Result<BitSet> {
        let mut set = BitSet::new(len, u64::MAX)?;
        let mut bits = len;
        for level in 0..set.levels {
            // Invariant 2: the last word of each level is the only one that is not all ones.
            if !bits.is_multiple_of(WORD) {
                set.store(level, bits / WORD, (1 << (bits % WORD)) - 1);
            }
            bits = bits.div_ceil(WORD);
        }
        set.count = len;
        Ok(set)
    }

    fn new(len: u64, invert: u64) -> Result<BitSet> {
        let mut starts = [0; LEVELS_MAX];
        let (mut levels, mut total, mut bits) = (0, 0, len.max(1));
        loop {
            starts[levels] = total;
            levels += 1;
            bits = bits.div_ceil(WORD);
            total += bits as usize;
            if bits == 1 {
                break;
            }
        }
        let words = LazyArray::new(total)?;
        Ok(BitSet { words, starts, levels, invert, len, count: 0 })
    }

    /// How many numbers the set holds.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the smallest number of the set that is at least `from`.
    pub(super) fn next(&mut self, from: u64) -> Option<u64> {
        if from >= self.len {
            return None;
        }
        // Up: to the first level that has a set bit at or after the position.
        let mut position = from;
        let mut level = 0;
        loop {
            let words = (0..=level).fold(self.len, |bits, _| bits.div_ceil(WORD));
            let rest = match position % WORD {
                // Past the last word of this level, which the level above counts as "nothing".
                _ if position / WORD >= words => 0,
                bit => self.load(level, position / WORD) & (u64::MAX << bit),
            };
            if rest != 0 {
                position = position - position % WORD + u64::from(rest.trailing_zeros());
                break;
            }
            level += 1;
            if level == self.levels {
                return None;
            }
            position = position / WORD + 1;
        }
        // Down: to the first bit below it, which exists by invariant 1.
        while level > 0 {
            level -= 1;
            let word = self.load(level, position);
            position = position * WORD + u64::from(word.trailing_zeros());
        }
        Some(position)
    }

    /// Returns how many of the numbers from `from` on are in the set without a gap, at most `most`.
    pub(super) fn run(&mut self, from: u64, most: u64) -> u64 {
        let end = from.saturating_add(most).min(self.len);
        let mut position = from;
        while position < end {
            let rest = self.load(0, position / WORD) >> (position % WORD);
            let ones = u64::from(rest.trailing_ones());
            position += ones;
            if ones == 0 || !position.is_multiple_of(WORD) {
                break;
            }
        }
        position.clamp(from, end.max(from)) - from
    }

    /// True if none of `count` numbers from `from` on is in the set.
    pub(super) fn is_clear(&mut self, from: u64, count: u64) -> bool {
        self.next(from).is_none_or(|found| found - from >= count)
    }

    /// Adds `count` numbers from `from` on, none of which is in the set.
    pub(super) fn insert(&mut self, from: u64, count: u64) {
        self.change(from, count, true);
        self.count += count;
    }

    /// Removes `count` numbers from `from` on, all of which are in the set.
    pub(super) fn remove(&mut self, from: u64, count: u64) {
        self.change(from, count, false);
        self.count -= count;
    }

    /// Flips a range to `value`, all of which has the other value, level by level: what changes in
    /// the level above are the words that became zero or ceased to be.
    fn change(&mut self, from: u64, count: u64, value: bool) {
        let end = from.checked_add(count).filter(|end| *end <= self.len);
        let end = end.expect("the range lies within the set");
        let mut position = from;
        while position < end {
            let (index, bit) = (position / WORD, position % WORD);
            let step = (WORD - bit).min(end - position);
            let mask = (u64::MAX >> (WORD - step)) << bit;
            let old = self.load(0, index);
            assert!(old & mask == if value { 0 } else { mask }, "bits {from}+{count} to {value}");
            let new = old ^ mask;
            self.store(0, index, new);
            if (old == 0) != (new == 0) {
                self.tell_above(index, value);
            }
            position += step;
        }
    }

    /// Carries to the levels above level 0 that word `index` of it became zero or ceased to be.
    fn tell_above(&mut self, index: u64, value: bool) {
        let mut position = index;
        for level in 1..self.levels {
            let bit = 1 << (position % WORD);
            let old = self.load(level, position / WORD);
            let new = if value { old | bit } else { old & !bit };
            self.store(level, position / WORD, new);
            if (old == 0) == (new == 0) {
                return;
            }
            position /= WORD;
        }
    }

    fn load(&mut self, level: usize, index: u64) -> u64 {
        self.words[self.starts[level] + index as usize] ^ self.invert
    }

    fn store(&mut self, level: usize, index: u64, word: u64) {
        self.words[self.starts[level] + index as usize] = word ^ self.invert;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::ExpectedPanic;

    /// Lengths around every place where a level begins or a word ends.
    const LENS: [u64; 12] = [1, 2, 63, 64, 65, 4095, 4096, 4097, 8191, 262_143, 262_144, 262_145];

    #[test]
    fn a_full_set_ends_at_its_length() {
        for len in LENS {
            let mut set = BitSet::full(len).expect("set");
            assert_eq!(set.count(), len);
            assert_eq!(set.run(0, u64::MAX), len, "{len}");
            assert_eq!(set.next(len - 1), Some(len - 1), "{len}");
            set.remove(0, len);
            assert_eq!(set.next(0), None, "{len}");
        }
    }

    #[test]
    fn the_only_number_is_found_from_wherever_the_search_starts() {
        for len in LENS {
            for number in [0, 1, len / 2, len - 1].into_iter().filter(|n| *n < len) {
                let mut set = BitSet::empty(len).expect("set");
                set.insert(number, 1);
                for from in [0, number / 2, number] {
                    assert_eq!(set.next(from), Some(number), "{number} from {from} of {len}");
                }
                assert_eq!(set.next(number + 1), None, "{number} of {len}");
                assert_eq!(set.run(number, 5), 1);
            }
        }
    }

    #[test]
    fn a_removed_range_is_skipped() {
        let mut set = BitSet::full(300_000).expect("set");
        set.remove(60, 270_000);
        assert_eq!(set.run(10, 1000), 50);
        assert_eq!(set.next(60), Some(270_060));
        assert!(set.is_clear(60, 270_000));
        assert!(!set.is_clear(60, 270_001));
        set.insert(4096, 10);
        assert_eq!(set.next(60), Some(4096));
    }

    #[test]
    #[should_panic(expected = "bits 5+1")]
    fn inserting_twice_is_refused() {
        let _expected = ExpectedPanic::saying("bits 5+1");
        let mut set = BitSet::empty(10).expect("set");
        set.insert(5, 1);
        set.insert(5, 1);
    }
}
