//! The first block of an export, by which it is found again.

use crate::blocks::BLOCK;

/// Bytes of a mark: the first block.
pub const MARK_LEN: usize = BLOCK as usize;

/// Bytes at the start of a block.
///
/// # Panics
/// When they are longer.
pub(crate) fn block_of(bytes: &[u8]) -> [u8; MARK_LEN] {
    let mut block = [0; MARK_LEN];
    block[..bytes.len()].copy_from_slice(bytes);
    block
}
