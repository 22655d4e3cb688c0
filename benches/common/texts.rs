//! A table of texts that are cut at random out of a pool: the load of TPC-H's generator.

use crate::numbers::{fold, mix};

/// The pool of texts: this part of the data, hot all the time the table is written. It fits where the data is
/// four times the limit; a pool as large as the limit would only tell which side has a page more.
pub(crate) const POOL_PART: usize = 6;
/// Words of one text, and how many texts are drawn for each that is kept: the generator of TPC-H throws
/// most of what it draws away.
const TEXT_WORDS: usize = 16;
const DRAWS: u64 = 16;

/// Words of the pool, and of the table, of `size` bytes of data.
pub(crate) fn lengths(size: usize) -> (usize, usize) {
    let pool = size / POOL_PART / 8;
    (pool, (size / 8 - pool) / TEXT_WORDS * TEXT_WORDS)
}

pub(crate) fn fill(pool: &mut [u64]) {
    pool.iter_mut().zip(0..).for_each(|(word, at)| *word = mix(at));
}

/// Writes the table; returns a sum of what was drawn and thrown away.
pub(crate) fn load(pool: &[u64], table: &mut [u64]) -> u64 {
    let mut sum = 0;
    for (row, text) in table.chunks_exact_mut(TEXT_WORDS).enumerate() {
        let start = |draw| mix(row as u64 * DRAWS + draw) as usize % (pool.len() - TEXT_WORDS);
        sum = (0..DRAWS - 1).fold(sum, |sum, draw| fold(sum, pool[start(draw)]));
        text.copy_from_slice(&pool[start(DRAWS - 1)..][..TEXT_WORDS]);
    }
    sum
}

/// Goes on with the sum over the table.
pub(crate) fn scan(table: &[u64], sum: u64) -> u64 {
    table.iter().fold(sum, |sum, word| fold(sum, *word))
}
