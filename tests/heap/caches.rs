//! What threads keep of freed memory has one bound, however many threads there are.
//!
//! Guards: G2, G3.
#![expect(unsafe_code, reason = "allocates through the allocator trait")]

use crate::common::child::alone;
use crate::common::{Dice, eventually, heap, seed, watchdog};
use allocator_api2::alloc::Allocator;
use farheap::{ByteCount, Far, Heap, Local};
use std::alloc::Layout;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Each thread's live data is a batch, at most; what a thread would keep alone is 4 MiB and more.
const THREADS: u64 = 64;
const BATCH: usize = 64 << 10;
const ROUNDS: usize = 300;

/// A batch of blocks of one size, as a request's buffers: allocated, written, freed.
fn batch(size: usize) {
    let layout = Layout::from_size_align(size, 8).expect("a valid layout");
    let blocks: Vec<_> = (0..(BATCH / size).max(1))
        .map(|_| {
            let block = Far.allocate(layout).expect("the device has room").cast::<u8>();
            for at in (0..size).step_by(4096) {
                // SAFETY: inside of the block.
                let byte = unsafe { block.as_ptr().add(at) };
                // SAFETY: as above; the block is this thread's.
                unsafe { byte.write(1) };
            }
            block
        })
        .collect();
    for block in blocks {
        // SAFETY: allocated above with this layout.
        unsafe { Far.deallocate(block, layout) };
    }
}

#[test]
fn freed_data_is_not_written_however_many_threads_keep_some() {
    alone("freed_data_is_not_written_however_many_threads_keep_some", freed_data_is_not_written);
}

fn freed_data_is_not_written() {
    let _watchdog = watchdog("heap_caches", Duration::from_secs(240));
    let seed = seed("heap_caches");
    let Some(heap) = heap("far_limit:32MiB,capacity:1GiB") else { return };
    let all = Barrier::new(THREADS as usize);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let all = &all;
            scope.spawn(move || {
                let mut dice = Dice::new(seed ^ thread);
                for round in 0..ROUNDS {
                    let size = 1024 << dice.below(6);
                    batch(size + size / 4 * dice.below(4) as usize);
                    if round % 10 == 0 {
                        all.wait(); // Each has freed something lately, and none has ended.
                    }
                }
            });
        }
    });
    let stats = heap.stats();
    println!("{} KiB were written", stats.bytes_written.0 >> 10);
    // Without the common bound: more than 200 MiB.
    assert!(stats.bytes_written.0 <= 8 << 20, "{} MiB were written", stats.bytes_written.0 >> 20);
    heap.shutdown().expect("everything was freed");
}

/// Threads that live at the same time, each with caches of four far tiers and of local memory.
const MANY: usize = 1_000;

/// What all of their caches may keep together, of far memory and of local memory, where jemalloc has an automatic
/// cache for each thread that lives; and what idle ones may keep of far memory.
const KEPT_MAX: ByteCount = ByteCount::mib(64);
const LEFT_MAX: ByteCount = ByteCount::mib(1);

/// Allocates and frees some blocks of each size from `smallest` to 96 KiB.
fn touch(from: &impl Allocator, smallest: usize) {
    for size in (4..=16).map(|power| 1 << power).filter(|size| *size >= smallest) {
        for size in [size, size + size / 2] {
            let layout = Layout::from_size_align(size, 8).expect("a valid layout");
            let blocks =
                [(); 2].map(|()| from.allocate(layout).expect("there is room").cast::<u8>());
            // SAFETY: allocated above with this layout.
            blocks.into_iter().for_each(|block| unsafe { from.deallocate(block, layout) });
        }
    }
}

/// Bytes of pages that hold no block of a far tier: what caches keep, and the rest of slabs.
fn kept_far(tiers: &[Heap]) -> ByteCount {
    let beyond = |tier: &Heap| {
        let allocated = tier.usage().allocated_bytes; // First: what is allocated meanwhile counts as kept.
        tier.usage().active_bytes.0.saturating_sub(allocated.0)
    };
    ByteCount(tiers.iter().map(beyond).sum())
}

/// What jemalloc has in use of local memory: blocks, which caches may keep, and caches of its own.
fn in_use_local() -> ByteCount {
    Local::usage().active_bytes
}

#[test]
fn a_thousand_threads_keep_little_and_idle_ones_nothing() {
    alone("a_thousand_threads_keep_little_and_idle_ones_nothing", || {
        let _watchdog = watchdog("heap_caches", Duration::from_secs(240));
        let text = "far_limit:2GiB,capacity:4GiB,span:64GiB"; // Not what bounds the caches.
        let Some(default) = heap(text) else { return };
        let config = Heap::builder().parse(text).expect("options");
        for name in ["one", "two", "three"] {
            default.add_tier(name, config.clone()).expect("the machine has room");
        }
        let tiers = Heap::tiers();
        touch(&Local, 64 << 10); // Brings in what jemalloc needs once.
        let before = in_use_local();
        let (have_touched, may_end) = (AtomicUsize::new(0), Barrier::new(MANY + 1));
        let (busy, tiers) = (AtomicU64::new(0), &tiers);
        let idle = std::thread::scope(|scope| {
            for n in 0..MANY {
                let small_stack = std::thread::Builder::new().stack_size(256 << 10);
                let (busy, have_touched, may_end) = (&busy, &have_touched, &may_end);
                let work = move || {
                    touch(&Local, 64 << 10);
                    tiers.iter().for_each(|tier| touch(&tier.tier(), 1));
                    // A thread that has just freed blocks keeps some.
                    if n % 10 == 0 {
                        busy.fetch_max(kept_far(tiers).0, Relaxed);
                    }
                    have_touched.fetch_add(1, Relaxed);
                    may_end.wait();
                };
                small_stack.spawn_scoped(scope, work).expect("the machine has room");
            }
            while have_touched.load(Relaxed) < MANY {
                busy.fetch_max(kept_far(tiers).0, Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
            let local = || ByteCount(in_use_local().0.saturating_sub(before.0));
            let is_flushed = eventually(|| kept_far(tiers) <= LEFT_MAX && local() < KEPT_MAX);
            let (far, local) = (kept_far(tiers), local());
            may_end.wait();
            assert!(is_flushed, "idle threads keep {far} of far memory, {local} of local memory");
            local
        });
        let busy = ByteCount(busy.into_inner());
        println!("{MANY} threads kept {busy} of far memory, and idle ones {idle} of local memory");
        assert!(busy < KEPT_MAX && busy > ByteCount::ZERO, "{busy}");
        default.shutdown().expect("everything was freed");
    });
}
