//! Pages of a pool that are filled with a number: a reader that finds another one has seen a torn page, or
//! another page.

use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::BufferPool;
use std::time::{Duration, Instant};

/// Longest wait for another thread to let go.
const PATIENCE: Duration = super::PATIENCE;

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

/// Waits until nothing is charged any more: the pool's thread, or the manager's, may be the last to
/// let go of a pool that was dropped.
pub(crate) fn await_given_back(manager: &MemoryManager) {
    let began = Instant::now();
    while manager.stats().used_bytes > ByteCount::ZERO {
        assert!(began.elapsed() < PATIENCE, "{:?}", manager.stats());
        std::thread::sleep(Duration::from_millis(1)); // Until the next look.
    }
}
