//! Random numbers that both sides of a comparison have alike, and a sum of answers.

/// The number at a place of a sequence of random ones (splitmix64).
pub(crate) fn mix(at: u64) -> u64 {
    let mut z = at.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A sum that depends on the order.
pub(crate) fn fold(sum: u64, value: u64) -> u64 {
    (sum.rotate_left(5) ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}
