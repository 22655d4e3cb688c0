//! Pages of a pool that are filled with a number: whoever finds another one has seen a torn page, or
//! another page.

use farheap::pool::BufferPool;

/// Allocates pages that hold their own numbers; nothing is dirty afterwards.
pub(crate) fn add_pages(pool: &BufferPool, count: u64) {
    for _ in 0..count {
        let mut guard = pool.allocate().expect("page");
        let number = guard.id().0;
        fill(&mut guard, number);
    }
    pool.flush().expect("flush");
}

pub(crate) fn fill(bytes: &mut [u8], number: u64) {
    bytes.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
}

pub(crate) fn holds(bytes: &[u8], number: u64) -> bool {
    bytes.chunks_exact(8).all(|word| word == number.to_le_bytes())
}
