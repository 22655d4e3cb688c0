//! Temporary memory made of the pool's frames: what leaves is on the device, what stays is whole,
//! and the limit holds.
//!
//! Guards: G1, G5.

use crate::common::numbered::{add_pages, await_given_back, fill, holds};
use crate::common::visits::{Visits, mapped_bytes};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, PageId};
use std::sync::Arc;
use std::time::Instant;

const PAGES: u64 = 7600;

/// A pool of 32 MiB that is nearly full of pages that hold their numbers; nothing is dirty.
fn full_pool(page: ByteCount, pages: u64) -> Arc<BufferPool> {
    let manager = MemoryManager::start(ByteCount::mib(32)).expect("manager");
    manager.set_deadline(crate::common::PATIENCE);
    let store = Arc::new(MemStore::new(ByteCount::mib(96)).expect("store"));
    let config = PoolConfig::new().page(page).cleaner(false);
    let pool = config.create_on(store, &manager).expect("pool");
    add_pages(&pool, pages);
    pool
}

/// Bytes of this process's memory in RAM between two addresses.
fn resident_between(start: usize, end: usize) -> u64 {
    mapped_bytes("Rss", |mapping| mapping.start >= start && mapping.end <= end)
}

#[test]
fn clean_pages_hand_their_frames_over_and_are_read_again() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let manager = Arc::clone(pool.manager());
    let memory = manager.allocate_temporary(ByteCount::mib(16)).expect("fits");
    let stats = pool.stats();
    assert!(stats.donated >= 3000, "{stats:?}");
    let start = memory.as_ptr().as_ptr().addr();
    let there = resident_between(start, start + (16 << 20));
    assert!(there >= stats.donated * 4096, "{there} bytes of {stats:?}");
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    for page in (2..PAGES + 2).rev() {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
    }
    drop(memory);
    assert_eq!(manager.temporary().used(), ByteCount::ZERO);
    drop(pool);
    await_given_back(&manager);
}

#[test]
fn dirty_pages_stay_in_memory_unwritten_and_whole() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let manager = Arc::clone(pool.manager());
    let dirty: Vec<u64> = (2..PAGES + 2).filter(|page| page % 40 == 7).collect();
    for page in &dirty {
        fill(&mut pool.fix_exclusive(PageId(*page)).expect("page"), page + 1_000_000);
    }
    let written = pool.stats().pages_written;
    let _memory = manager.allocate_temporary(ByteCount::mib(8)).expect("fits");
    let stats = pool.stats();
    assert!(stats.donated >= 1500, "{stats:?}");
    assert_eq!(stats.pages_written, written, "nothing had to be written");
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    for page in dirty {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page + 1_000_000), "{page}");
    }
}

#[test]
fn runs_with_a_page_that_is_held_stay() {
    let pool = full_pool(ByteCount::kib(4), PAGES - 600);
    let held: Vec<_> =
        (0..13).map(|run| pool.fix_shared(PageId(run * 512 + 9)).expect("page")).collect();
    let memory = pool.manager().allocate_temporary(ByteCount::mib(16)).expect("one by one");
    assert_eq!(pool.stats().donated, 0, "every run has a page that is held");
    for guard in &held {
        assert!(holds(guard, guard.id().0));
    }
    drop((held, memory));
    let _memory = pool.manager().allocate_temporary(ByteCount::mib(16)).expect("fits");
}

#[test]
fn larger_pages_are_donated_too() {
    let pool = full_pool(ByteCount::kib(64), 480);
    let _memory = pool.manager().allocate_temporary(ByteCount::mib(12)).expect("fits");
    assert!(pool.stats().donated >= 100, "{:?}", pool.stats());
    for page in 2..482 {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
    }
}

#[test]
fn readers_and_writers_never_see_a_page_that_is_moving() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let pages = 2..PAGES + 2;
    Visits::new(pages.clone(), pages).beside(&pool, 3, || {
        // Where the writers are quicker, too many pages are dirty for a run to change hands.
        let started = Instant::now();
        let none = || pool.stats().donated == 0 && started.elapsed() < crate::common::PATIENCE;
        for round in (0..).take_while(|round| *round < 60_u64 || none()) {
            if round % 4 == 3 {
                pool.flush().expect("written");
            }
            let memory =
                pool.manager().allocate_temporary(ByteCount::mib(2 + round % 9)).expect("fits");
            let first = memory.as_ptr().as_ptr().addr();
            assert!(first.is_multiple_of(4096));
            drop(memory);
        }
    });
    assert!(pool.stats().donated > 0, "{:?}", pool.stats());
    let stats = pool.manager().stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}
