//! Local memory of a heap under a memory manager counts against the one limit.
//!
//! Guards: G1.

use crate::common::child::alone;
use crate::common::{consumer, eventually, heap_under};
use allocator_api2::vec::Vec as FarVec;
use farheap::manager::{MemoryManager, Pressure};
use farheap::{ByteCount, Far, Local};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

#[test]
fn local_memory_is_counted_makes_others_give_way_and_comes_back() {
    alone("local_memory_is_counted_makes_others_give_way_and_comes_back", || {
        let manager = MemoryManager::start(ByteCount::mib(64)).expect("manager");
        let told = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&told);
        let on_pressure = move |event| {
            if let Pressure::Over { held, consumer, .. } = event
                && &*consumer == "local memory"
            {
                count.fetch_max(held.get(), Ordering::Relaxed);
            }
        };
        manager.on_pressure(on_pressure).expect("the only one");
        let Some(heap) = heap_under(&manager, "far_limit:64MiB,capacity:128MiB") else { return };
        let local = || consumer(&manager, "local memory").expect("joined").used_bytes;
        let far = || consumer(&manager, "far heap").expect("joined").used_bytes;
        let mut numbers: FarVec<u64, Far> = FarVec::new_in(Far);
        numbers.extend(0..6 << 20);
        let is_there = || {
            assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
            far() >= ByteCount::mib(40)
        };
        assert!(eventually(is_there), "{:?}", manager.stats());
        let (before, full) = (local(), far());
        assert!(before > ByteCount::ZERO, "jemalloc holds something");
        let boxes: Vec<Box<[u8; 1000]>> = (0..24_000).map(|n| Box::new([n as u8; 1000])).collect();
        assert!(
            eventually(|| local() >= ByteCount(before.get() + (20 << 20))),
            "{:?}",
            manager.stats()
        );
        assert!(
            eventually(|| manager.stats().used_bytes <= manager.limit()),
            "{:?}",
            manager.stats()
        );
        assert!(far() < full, "far memory gave way: {:?}", manager.stats());
        assert!(boxes.iter().enumerate().all(|(n, bytes)| bytes[999] == n as u8));
        drop(boxes);
        let comes_back = || {
            drop(manager.allocate_temporary(ByteCount::mib(40)));
            local() < ByteCount(before.get() + (10 << 20))
        };
        assert!(eventually(comes_back), "{:?}", manager.stats());
        assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
        drop(numbers);
        local_memory_beyond_the_limit_is_seen_and_told(&manager, &told);
        heap.shutdown().expect("nothing is in use");
        assert!(consumer(&manager, "local memory").is_none(), "{:?}", manager.stats());
    });
}

/// Many small objects of more than twice the limit: nobody can evict them, so the figures and a line
/// on standard error say by how much the process is above it.
fn local_memory_beyond_the_limit_is_seen_and_told(manager: &MemoryManager, told: &AtomicU64) {
    let limit = manager.limit();
    let objects: Vec<Box<[u64; 12]>> = (0..1_500_000).map(|n| Box::new([n; 12])).collect();
    let local = Local::usage().resident_bytes;
    assert!(local > ByteCount(2 * limit.get()), "{local}");
    let is_seen = || manager.stats().over_bytes > limit;
    assert!(eventually(is_seen), "{}", manager.stats());
    assert!(consumer(manager, "local memory").expect("joined").held_bytes > limit);
    // Told once, at the moment at which it was seen: a slow machine has only a part of them by then.
    assert!(eventually(|| told.load(Ordering::Relaxed) > limit.get()), "{}", manager.stats());
    assert!(manager.stats().to_string().contains("OVER the limit"), "{}", manager.stats());
    assert!(objects.iter().enumerate().all(|(n, object)| object[11] == n as u64));
    drop(objects);
    let is_over = || {
        drop(manager.allocate_temporary(ByteCount::mib(40)));
        manager.stats().over_bytes == ByteCount::ZERO
    };
    assert!(eventually(is_over), "{}", manager.stats());
}
