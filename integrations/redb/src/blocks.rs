//! A set of page numbers, a bit each.

/// Page numbers: 32 KiB for each GiB of pages of 4 KiB, up to the highest one.
#[derive(Debug, Default)]
pub(crate) struct BlockSet {
    words: Vec<u64>,
}

/// Word and bit of a page.
fn place(page: u64) -> (usize, u64) {
    ((page / 64) as usize, 1 << (page % 64))
}

impl BlockSet {
    pub(crate) fn contains(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    pub(crate) fn insert(&mut self, page: u64) {
        let (word, bit) = place(page);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= bit;
    }

    pub(crate) fn remove(&mut self, page: u64) {
        let (word, bit) = place(page);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
    }

    /// The pages from `start` on.
    pub(crate) fn from(&self, start: u64) -> Vec<u64> {
        (start..64 * self.words.len() as u64).filter(|page| self.contains(*page)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_there_from_their_insertion_to_their_removal() {
        let mut set = BlockSet::default();
        [3, 63, 64, 1000].into_iter().for_each(|page| set.insert(page));
        set.remove(64);
        set.remove(5000);
        assert!(set.contains(63) && !set.contains(64) && !set.contains(5000));
        assert_eq!(set.from(0), [3, 63, 1000]);
        assert_eq!(set.from(64), [1000]);
    }
}
