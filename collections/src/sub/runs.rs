//! Runs of bits: the first one that is clear, setting and clearing one.
//!
//! Used by [`super::pages`] on the bits of one page. An object of up to 64 granules (1 KiB) lies in
//! two neighbouring words; longer runs take the general way. Most often there is room where the first
//! clear bit is: [`set_first`] looks there and nowhere else.

/// Bits of a word.
const BITS: usize = 64;

/// Sets a run of bits from the first clear one of word `at` on, and returns where that is; `None` when
/// not all of them are clear, or the run is longer than a word.
#[inline]
pub(super) fn set_first(words: &mut [u64], at: usize, count: usize) -> Option<usize> {
    let word = *words.get(at)?;
    let first = word.trailing_ones() as usize;
    if first == BITS || count > BITS {
        return None;
    }
    let ones = u64::MAX >> (BITS - count);
    if word & ones << first != 0 {
        return None;
    }
    if first + count > BITS {
        let next = words.get_mut(at + 1)?;
        let high = ones >> (BITS - first);
        if *next & high != 0 {
            return None;
        }
        *next |= high;
    }
    words[at] = word | ones << first;
    Some(at * BITS + first)
}

/// The first run of `want` clear bits that starts at a multiple of `align`, and the number of words
/// before the first clear bit. No bit of the first `full_words` words is clear.
pub(super) fn find(
    words: &[u64],
    full_words: usize,
    want: usize,
    align: usize,
) -> Option<(usize, usize)> {
    let (full_words, first) = first_clear(words, full_words)?;
    let at = if want > BITS || align > 1 {
        find_long(words, full_words * BITS + first, want, align)?
    } else {
        find_short(words, full_words, want)?
    };
    Some((at, full_words))
}

/// Sets a run of bits.
pub(super) fn set(words: &mut [u64], at: usize, count: usize) {
    masks(at, count).for_each(|(word, mask)| words[word] |= mask);
}

/// Clears a run of bits if all are set and it lies within the words; returns whether it was so.
#[inline]
pub(super) fn clear(words: &mut [u64], at: usize, count: usize) -> bool {
    if count > BITS || at + count > words.len() * BITS {
        return clear_long(words, at, count);
    }
    let (word, first) = (at / BITS, at % BITS);
    let ones = u64::MAX >> (BITS - count);
    let low = ones << first;
    if words[word] & low != low {
        return false;
    }
    if first + count > BITS {
        let high = ones >> (BITS - first);
        if words[word + 1] & high != high {
            return false;
        }
        words[word + 1] &= !high;
    }
    words[word] &= !low;
    true
}

#[inline(never)]
fn clear_long(words: &mut [u64], at: usize, count: usize) -> bool {
    let is_set = at + count <= words.len() * BITS
        && masks(at, count).all(|(word, mask)| words[word] & mask == mask);
    if is_set {
        masks(at, count).for_each(|(word, mask)| words[word] &= !mask);
    }
    is_set
}

/// Two neighbouring words as one number; behind the last word all bits are set.
fn pair(words: &[u64], at: usize) -> u128 {
    let high = words.get(at + 1).copied().unwrap_or(u64::MAX);
    u128::from(high) << BITS | u128::from(words[at])
}

/// The word with the first clear bit, and which bit of it.
fn first_clear(words: &[u64], from: usize) -> Option<(usize, usize)> {
    let rest = words.get(from..)?;
    let at = rest.iter().position(|word| *word != u64::MAX)?;
    Some((from + at, rest[at].trailing_ones() as usize))
}

/// The first run of at most 64 clear bits.
fn find_short(words: &[u64], from: usize, want: usize) -> Option<usize> {
    (from..words.len()).find_map(|at| {
        let mut clear = !pair(words, at);
        // A bit stays where as many clear ones begin.
        let mut len = 1;
        while len < want {
            let step = len.min(want - len);
            clear &= clear >> step;
            len += step;
        }
        let starts = clear as u64;
        (starts != 0).then(|| at * BITS + starts.trailing_zeros() as usize)
    })
}

/// The first run of any length and alignment.
fn find_long(words: &[u64], from: usize, want: usize, align: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let start = next_bit(words, at, words.len() * BITS, false).next_multiple_of(align);
        if start + want > words.len() * BITS {
            return None;
        }
        let end = next_bit(words, start, start + want, true);
        if end == start + want {
            return Some(start);
        }
        at = end.max(start + 1);
    }
}

/// First position from `from` to `limit` whose bit equals `set`, or `limit`.
fn next_bit(words: &[u64], from: usize, limit: usize, set: bool) -> usize {
    let mut word = from / BITS;
    let mut skip = from % BITS;
    while word * BITS < limit {
        let bits = if set { words[word] } else { !words[word] } & (u64::MAX << skip);
        if bits != 0 {
            return (word * BITS + bits.trailing_zeros() as usize).min(limit);
        }
        (word, skip) = (word + 1, 0);
    }
    limit
}

/// The words that a run covers, with the covered bits of each.
fn masks(at: usize, count: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = at + count;
    (at / BITS..end.div_ceil(BITS)).map(move |word| {
        let low = if word == at / BITS { u64::MAX << (at % BITS) } else { u64::MAX };
        let high = if end < (word + 1) * BITS { (1 << (end % BITS)) - 1 } else { u64::MAX };
        (word, low & high)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same, a bit at a time.
    struct Plain(Vec<bool>);

    impl Plain {
        fn find(&self, want: usize, align: usize) -> Option<usize> {
            (0..self.0.len())
                .step_by(align)
                .filter(|at| at + want <= self.0.len())
                .find(|at| self.0[*at..at + want].iter().all(|bit| !bit))
        }

        fn clear(&mut self, at: usize, count: usize) -> bool {
            let is_set =
                at + count <= self.0.len() && self.0[at..at + count].iter().all(|bit| *bit);
            if is_set {
                self.0[at..at + count].fill(false);
            }
            is_set
        }

        fn words(&self) -> Vec<u64> {
            let word = |bits: &[bool]| bits.iter().rev().fold(0, |w, bit| w << 1 | u64::from(*bit));
            self.0.chunks(BITS).map(word).collect()
        }
    }

    #[test]
    fn runs_of_all_lengths_and_alignments_are_found_as_a_plain_search_finds_them() {
        let (mut words, mut plain) = (vec![0; 4], Plain(vec![false; 256]));
        let (mut dice, mut taken, mut refused) = (0x2545_F491_4F6C_DD1D_u64, Vec::new(), 0);
        let steps = if cfg!(miri) { 300 } else { 100_000 };
        for step in 0..steps {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let most = if dice & 7 == 0 { 120 } else { 24 };
            let (want, align) = ((dice >> 8) as usize % most + 1, 1 << (dice >> 20 & 7).min(3));
            let full = words.iter().take_while(|word| **word == u64::MAX).count();
            if dice >> 32 & 1 == 0 {
                let found = find(&words, full.min(step % 5), want, align);
                assert_eq!(found.map(|(at, _)| at), plain.find(want, align), "step {step}");
                let Some((at, before)) = found else {
                    refused += 1;
                    continue;
                };
                assert_eq!(before, full);
                let first = plain.0.iter().position(|bit| !bit);
                let is_first = align == 1 && want <= BITS && first == Some(at);
                match set_first(&mut words.clone(), full, want) {
                    Some(place) if align == 1 => assert_eq!((place, is_first), (at, true)),
                    _ => assert!(!is_first, "step {step}"),
                }
                if is_first {
                    set_first(&mut words, full, want);
                } else {
                    set(&mut words, at, want);
                }
                plain.0[at..at + want].fill(true);
                taken.push((at, want));
            } else if let Some(last) = taken.len().checked_sub(1) {
                let (at, count) = taken.swap_remove((dice >> 33) as usize % (last + 1));
                assert!(clear(&mut words, at, count) && plain.clear(at, count));
            }
            assert_eq!(words, plain.words(), "step {step}");
        }
        assert!(cfg!(miri) || refused > steps / 50, "{refused} refusals");
    }

    #[test]
    fn what_is_not_all_set_or_ends_outside_is_not_cleared() {
        let mut words = [u64::MAX, u64::MAX >> 1];
        for (at, count) in [(100, 28), (127, 1), (60, 68), (0, 128), (64, 65), (120, 100)] {
            assert!(!clear(&mut words, at, count), "{count} bits at {at}");
        }
        assert_eq!(words, [u64::MAX, u64::MAX >> 1]);
        assert!(clear(&mut words, 60, 67));
        assert_eq!(words, [u64::MAX >> 4, 0]);
    }
}
