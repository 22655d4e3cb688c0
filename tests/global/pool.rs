//! A pool in a program whose global allocator is farheap keeps nothing of its own in far memory:
//! who makes room for far memory must not wait for itself.
//!
//! Guards: the interface.

use crate::common::child::alone;
use crate::common::{heap_under, watchdog};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::{ByteCount, PageId, Scope, Tier};
use std::sync::Arc;
use std::time::Duration;

/// Allocates and frees pages, more than the limit holds, and checks what stayed.
fn use_pages(pool: &Arc<BufferPool>) -> Vec<PageId> {
    let pages: Vec<PageId> = (0..16_000_u64)
        .map(|n| {
            let mut page = pool.allocate().expect("page");
            page.fill(n as u8);
            page.id()
        })
        .collect();
    for page in pages.iter().step_by(2) {
        pool.fix_exclusive(*page).expect("page").free();
    }
    for (n, page) in pages.iter().enumerate().skip(1).step_by(2) {
        assert_eq!(pool.fix_shared(*page).expect("page")[0], n as u8);
    }
    pool.flush().expect("written");
    pages
}

#[test]
fn a_pool_made_in_a_far_scope_has_nothing_far_of_its_own() {
    alone("a_pool_made_in_a_far_scope_has_nothing_far_of_its_own", || {
        let _watchdog = watchdog("pool_global", Duration::from_secs(120));
        let manager = MemoryManager::start(ByteCount::mib(32)).expect("manager");
        let conf = "far_limit:32MiB,capacity:256MiB,threshold:4KiB,mode:user";
        let Some(heap) = heap_under(&manager, conf) else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("table");
        let pool = {
            let _far = Scope::enter(Tier::FAR);
            let pool =
                PoolConfig::new().create(&path, ByteCount::mib(128), &manager).expect("pool");
            let numbers: Vec<u64> = (0..4 << 20).collect();
            drop(use_pages(&pool));
            assert!(numbers.iter().enumerate().all(|(n, number)| n as u64 == *number));
            pool
        };
        // Refused while anything far is in use.
        heap.shutdown().expect("nothing of the pool is far");
        assert_eq!(use_pages(&pool).len(), 16_000);
    });
}
