//! Random numbers as TPC-C wants them.

/// xorshift64: the same numbers for the same seed.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

/// TPC-C's constants `C` of the skewed choice; any value within `A` will do.
const C_CUSTOMER: u64 = 259;
const C_ITEM: u64 = 7_911;

const LETTERS: &[u8; 32] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF";

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        let mut random =
            Random(0x9E37_79B9_7F4A_7C15 ^ (seed + 1).wrapping_mul(0xD134_2543_DE82_EF95));
        random.next();
        random.next();
        random
    }

    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// A number from 0 to `n` - 1.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn within(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    pub(crate) fn percent(&mut self, pct: u64) -> bool {
        self.below(100) < pct
    }

    fn skewed(&mut self, a: u64, c: u64, n: u64) -> u32 {
        (((self.below(a + 1) | self.below(n)) + c) % n) as u32
    }

    /// A customer of a district with `n` of them, from 0 on: NURand(1023).
    pub(crate) fn customer(&mut self, n: u64) -> u32 {
        self.skewed(1023, C_CUSTOMER, n)
    }

    /// One of `n` items, from 0 on: NURand(8191).
    pub(crate) fn item(&mut self, n: u64) -> u32 {
        self.skewed(8191, C_ITEM, n)
    }

    /// Fills with capital letters.
    pub(crate) fn letters(&mut self, into: &mut [u8]) {
        for chunk in into.chunks_mut(12) {
            let mut bits = self.next();
            for byte in chunk {
                *byte = LETTERS[(bits & 31) as usize];
                bits >>= 5;
            }
        }
    }

    /// 0 to `n` - 1 in random order.
    pub(crate) fn permutation(&mut self, n: u64) -> Vec<u32> {
        let mut all: Vec<u32> = (0..n as u32).collect();
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i as u64 + 1) as usize);
        }
        all
    }
}
