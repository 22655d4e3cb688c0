//! Parity of blocks: one or two blocks from which as many lost ones are computed.
//!
//! Of the blocks `D[0] .. D[k-1]` of a row the first parity is `P`, their sum, and the second `Q`, the sum of
//! `g^i * D[i]`, in the field of 256 elements with the polynomial `x^8 + x^4 + x^3 + x^2 + 1` and `g = 2`. Sums are
//! exclusive ors.
//!
//! A lost block is a sum of others, each times a number ([`recipe`]), so that it is computed block by block as they come,
//! in one page of memory: a signal handler can do it. That is why no general coder is used: `reed-solomon-simd` wants all
//! blocks of a row at once, takes memory to decode, and has tables of 8 MiB, which would have to stay resident.

use std::array;

/// Maximum number of blocks of a row with their parity.
pub(crate) const COLUMNS_MAX: usize = 8;

const POLYNOMIAL: u8 = 0x1d;

fn times(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        product ^= if b & 1 == 1 { a } else { 0 };
        a = a << 1 ^ if a & 0x80 != 0 { POLYNOMIAL } else { 0 };
        b >>= 1;
    }
    product
}

fn inverse(a: u8) -> u8 {
    // All elements but zero have the order 255.
    (0..254).fold(1, |power, _| times(power, a))
}

/// `g^i`: how often block `i` is in the second parity.
fn weight(i: usize) -> u8 {
    (0..i).fold(1, |power, _| times(power, 2))
}

/// `into += from`.
pub(crate) fn add(into: &mut [u8], from: &[u8]) {
    for (into, from) in into.iter_mut().zip(from) {
        *into ^= from;
    }
}

/// `into *= g`.
pub(crate) fn double(into: &mut [u8]) {
    // Without branches and tables, so that it is done for as many bytes at once as the processor can.
    for byte in into {
        *byte = *byte << 1 ^ ((*byte as i8 >> 7) as u8 & POLYNOMIAL);
    }
}

/// `into += factor * from`.
pub(crate) fn add_times(into: &mut [u8], factor: u8, from: &[u8]) {
    match factor {
        0 => {}
        1 => add(into, from),
        _ => {
            let table: [u8; 256] = array::from_fn(|byte| times(factor, byte as u8));
            for (into, from) in into.iter_mut().zip(from) {
                *into ^= table[usize::from(*from)];
            }
        }
    }
}

/// How often each column is in the block of column `wanted`, for rows of `data` blocks, if only the columns of `has` are
/// there, as bits; `None`: they do not suffice. Columns that are not used have zero.
pub(crate) fn recipe(
    data: usize,
    parity: usize,
    wanted: usize,
    has: u8,
) -> Option<[u8; COLUMNS_MAX]> {
    let has = |column: usize| has >> column & 1 == 1;
    let mut lost = (0..data).filter(|column| *column != wanted && !has(*column));
    let (other, more) = (lost.next(), lost.next());
    let (p, q) = (data, data + 1);
    let has_second = parity > 1 && has(q);
    let mut factors = [0; COLUMNS_MAX];
    match (other, more) {
        (None, _) if has(p) => {
            factors[..=p].fill(1);
        }
        (None, _) if has_second => {
            let scale = inverse(weight(wanted));
            (0..data).for_each(|column| factors[column] = times(weight(column), scale));
            factors[q] = scale;
        }
        (Some(other), None) if has(p) && has_second => {
            let (mine, its) = (weight(wanted), weight(other));
            let scale = inverse(mine ^ its);
            let of = |column| times(weight(column) ^ its, scale);
            (0..data).for_each(|column| factors[column] = of(column));
            (factors[p], factors[q]) = (times(its, scale), scale);
            factors[other] = 0;
        }
        _ => return None,
    }
    factors[wanted] = 0;
    Some(factors)
}

/// A number that stands for a block's bytes.
pub(crate) fn sum_of(block: &[u8]) -> u32 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    // Four at a time, because each multiplication waits for the one before.
    let mut sums = [1_u64, 2, 3, 4];
    for words in block.chunks_exact(32) {
        for (sum, word) in sums.iter_mut().zip(words.chunks_exact(8)) {
            let word = u64::from_ne_bytes(word.try_into().unwrap_or_default());
            *sum = (*sum ^ word).wrapping_mul(FACTOR).rotate_left(29);
        }
    }
    let sum = sums.iter().fold(0_u64, |all, sum| (all ^ sum).wrapping_mul(FACTOR).rotate_left(29));
    (sum >> 32 ^ sum) as u32
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A row with its parity.
    fn row(data: usize, parity: usize, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut row: Vec<Vec<u8>> =
            (0..data).map(|column| bytes[column * 64..][..64].to_vec()).collect();
        let (mut p, mut q) = (vec![0; 64], vec![0; 64]);
        for block in row.iter().rev() {
            add(&mut p, block);
            double(&mut q);
            add(&mut q, block);
        }
        row.extend([p, q].into_iter().take(parity));
        row
    }

    proptest! {
        #[test]
        fn as_many_blocks_as_there_is_parity_may_be_lost_whichever_they_are(
            bytes in prop::collection::vec(any::<u8>(), 64 * COLUMNS_MAX),
        ) {
            for (data, parity) in (1..COLUMNS_MAX).flat_map(|data| [(data, 1), (data, 2)]) {
                let columns = data + parity;
                if columns > COLUMNS_MAX {
                    continue;
                }
                let row = row(data, parity, &bytes);
                for (wanted, lost) in (0..data).flat_map(|a| (0..columns).map(move |b| (a, b))) {
                    let lost = if parity == 2 { lost } else { wanted };
                    let has = (0..columns).filter(|column| *column != wanted && *column != lost);
                    let has = has.fold(0_u8, |has, column| has | 1 << column);
                    let recipe = recipe(data, parity, wanted, has).expect("it suffices");
                    let mut found = vec![0; 64];
                    for (column, factor) in recipe.iter().enumerate().filter(|(_, factor)| **factor > 0) {
                        prop_assert!(has >> column & 1 == 1, "column {} is lost", column);
                        add_times(&mut found, *factor, &row[column]);
                    }
                    prop_assert_eq!(&found, &row[wanted]);
                }
            }
        }
    }

    #[test]
    fn too_few_columns_have_no_recipe() {
        assert_eq!(recipe(4, 1, 0, 0b01110), None);
        assert_eq!(recipe(4, 1, 0, 0b11100), None);
        assert_eq!(recipe(4, 2, 0, 0b01_1100), None);
        assert_eq!(recipe(4, 2, 0, 0b11_1000), None);
    }

    #[test]
    fn a_sum_changes_with_any_byte() {
        let mut block = vec![7; 4096];
        let sum = sum_of(&block);
        for at in 0..4096 {
            block[at] ^= 1 << (at % 8);
            assert_ne!(sum_of(&block), sum, "byte {at}");
            block[at] ^= 1 << (at % 8);
        }
    }
}
