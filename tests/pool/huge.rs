//! Runs of pages in huge frames: what they hold, how they leave, and what temporary memory gets.
//!
//! Guards: G1, G5.

use crate::common::PATIENCE;
use crate::common::numbered::{add_pages, await_given_back, holds};
use crate::common::visits::{Visits, mapped_bytes};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, PageId};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// 40 MiB.
const PAGES: u64 = 10_240;

/// Bytes that come to lie in huge frames: the first run has the header in it, the last is not full.
const ALL_HUGE: u64 = 38 << 20;

/// Longest wait for the pool's thread to begin, where the kernel makes no huge pages.
const BEGINS: Duration = Duration::from_secs(120);

/// A pool under 64 MiB with clean pages that hold their numbers.
fn pool(config: PoolConfig) -> Arc<BufferPool> {
    let manager = MemoryManager::start(ByteCount::mib(64)).expect("manager");
    manager.set_deadline(PATIENCE);
    let store = Arc::new(MemStore::new(ByteCount::mib(96)).expect("store"));
    let pool = config.create_on(store, &manager).expect("pool");
    add_pages(&pool, PAGES);
    pool
}

fn assert_whole(pool: &BufferPool) {
    for page in 2..PAGES + 2 {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
    }
}

/// Waits for `bytes` in huge frames. `false` when the kernel makes none.
fn becomes_huge(pool: &BufferPool, bytes: u64) -> bool {
    let began = Instant::now();
    while pool.stats().huge_bytes.get() < bytes {
        assert!(began.elapsed() < PATIENCE, "it began and did not end: {:?}", pool.stats());
        if began.elapsed() > BEGINS && pool.stats().huge_bytes == ByteCount::ZERO {
            println!("skipped: the kernel makes no huge pages");
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// Bytes in huge pages of the mappings that reach into a range of addresses.
fn huge_between(start: usize, end: usize) -> u64 {
    mapped_bytes("AnonHugePages", |mapping| mapping.start < end && mapping.end > start)
}

#[test]
fn a_pool_at_rest_moves_to_huge_frames_and_pages_leave_them_singly() {
    let pool = pool(PoolConfig::new());
    let base = pool.fix_shared(PageId(2)).expect("page").as_ptr().addr() - 2 * 4096;
    let end = base + (PAGES as usize + 1) * 4096;
    if !becomes_huge(&pool, ALL_HUGE) {
        return;
    }
    assert_whole(&pool);
    let huge = pool.stats().huge_bytes.get();
    assert!(huge_between(base, end) >= huge, "{huge} of {}", huge_between(base, end));
    let manager = Arc::clone(pool.manager());
    assert!(manager.stats().used_bytes <= manager.limit(), "{:?}", manager.stats());
    let before = pool.stats();
    while pool.stats().evicted - before.evicted < 3000 {
        pool.evict_clean(ByteCount::kib(64));
    }
    let after = pool.stats();
    assert!(after.huge_bytes < before.huge_bytes, "{after:?}");
    assert!(huge_between(base, end) < huge, "{} of {huge}", huge_between(base, end));
    assert_whole(&pool);
    assert!(becomes_huge(&pool, ALL_HUGE), "once more");
    // A page that is freed leaves singly as well.
    pool.fix_exclusive(PageId(5000)).expect("page").free();
    assert!(pool.stats().huge_bytes.get() < huge);
    drop(pool);
    await_given_back(&manager);
}

#[test]
fn temporary_memory_takes_huge_frames_over() {
    let pool = pool(PoolConfig::new());
    if !becomes_huge(&pool, ALL_HUGE) {
        return;
    }
    let manager = Arc::clone(pool.manager());
    let before = pool.stats();
    let memory = manager.allocate_temporary(ByteCount::mib(32)).expect("fits");
    let given = pool.stats().donated - before.donated;
    assert!(given >= 8 * 512, "{given} pages");
    let start = memory.as_ptr().as_ptr().addr();
    let there = huge_between(start, start + (32 << 20));
    assert!(there >= (given - 512) * 4096, "{there} bytes of {given} pages");
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    assert_whole(&pool);
    drop(memory);
    assert_eq!(manager.temporary().used(), ByteCount::ZERO);
}

#[test]
fn without_huge_frames_there_are_none() {
    let pool = pool(PoolConfig::new().huge_frames(false));
    let base = pool.fix_shared(PageId(2)).expect("page").as_ptr().addr() - 2 * 4096;
    // What is not done ends at no time: where it is done there are some by then.
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(pool.stats().huge_bytes, ByteCount::ZERO);
    assert_eq!(huge_between(base, base + (PAGES as usize) * 4096), 0);
}

#[test]
fn readers_writers_and_eviction_keep_pages_whole_while_frames_come_and_go() {
    let pool = pool(PoolConfig::new());
    // The first quarter of the table is changed: a run with dirty pages is not collapsed.
    Visits::new(2..PAGES + 2, 2..PAGES / 4).beside(&pool, 2, || {
        for round in 0..4u64 {
            // Nothing leaves meanwhile: runs are collapsed beside those who read and write.
            std::thread::sleep(Duration::from_millis(500));
            println!("round {round}: {} in huge frames", pool.stats().huge_bytes);
            drop(pool.manager().allocate_temporary(ByteCount::mib(28 + 4 * round)).expect("fits"));
            pool.evict_clean(ByteCount::mib(4));
        }
    });
    let stats = pool.manager().stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}
