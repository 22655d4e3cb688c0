//! The page handler allocates nothing: a thread that serves faults must not wait for the heap.
//!
//! The program's allocator is the heap, which counts what threads named `farheap-*` ask of it.

#![expect(unsafe_code, reason = "counts allocations")]

mod common;

use allocator_api2::vec::Vec as FarVec;
use common::{Dice, bytes, eventually, heap, seed, watchdog};
use farheap::region::Advice;
use farheap::{ByteCount, Far, FarHeap};
use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Passes every call on to the heap; counts those of the library's own threads.
struct Counting(FarHeap);

#[global_allocator]
static HEAP: Counting = Counting(FarHeap::new());

static COUNTS: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
/// Bytes of the latest of them: where it came from.
static LATEST: AtomicU64 = AtomicU64::new(0);

fn count(layout: Layout) {
    if !COUNTS.load(Ordering::Relaxed) {
        return;
    }
    let mut name = [0_u8; 16];
    // SAFETY: PR_GET_NAME writes 16 bytes into the buffer.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    if name.starts_with(b"farheap-") {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        LATEST.store(layout.size() as u64, Ordering::Relaxed);
    }
}

// SAFETY: passes every call on to the heap's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout);
        // SAFETY: as the caller promises.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { self.0.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(layout);
        // SAFETY: as the caller promises.
        unsafe { self.0.realloc(ptr, layout, size) }
    }
}

/// Faults, evictions, write-backs, prefetches, discards and pins, from several threads.
fn work(heap: &farheap::Heap, seed: u64) {
    std::thread::scope(|scope| {
        for thread in 0..3 {
            scope.spawn(move || {
                let mut dice = Dice::new(seed + thread);
                for _ in 0..2 {
                    let mut data: FarVec<u64, Far> = FarVec::new_in(Far);
                    data.resize((12 << 20) / 8, thread);
                    for _ in 0..4_000 {
                        let at = dice.below(data.len() as u64) as usize;
                        data[at] += 1;
                        let (ptr, len) = (data[at..].as_ptr().cast(), ByteCount(8));
                        let elsewhere = &data[dice.below(data.len() as u64) as usize..];
                        match dice.below(20) {
                            0 => heap
                                .region()
                                .advise(&[bytes(ptr, len)], Advice::PageOutNow)
                                .expect("evict"),
                            // Most of the data is not resident: its start nearly always was.
                            1 => heap
                                .region()
                                .advise(&[bytes(elsewhere.as_ptr().cast(), len)], Advice::WillNeed)
                                .expect("prefetch"),
                            2 => drop(heap.region().pin(bytes(ptr, len))),
                            _ => {}
                        }
                    }
                }
            });
        }
    });
    heap.purge();
}

/// Whether no other thread of this process runs at the moment.
fn others_sleep() -> bool {
    std::thread::sleep(Duration::from_millis(20));
    // SAFETY: gettid has no conditions.
    let this = unsafe { libc::gettid() }.to_string();
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    tasks.flatten().filter(|task| task.file_name() != this.as_str()).all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
    })
}

#[test]
fn the_librarys_threads_allocate_nothing_after_their_start() {
    let _watchdog = watchdog("no_alloc", Duration::from_secs(240));
    let seed = seed("no_alloc");
    let Some(heap) = heap("far_limit:8MiB,capacity:128MiB,handlers:2") else { return };
    // The threads have started when they have served something and sleep again.
    let mut first: FarVec<u64, Far> = FarVec::new_in(Far);
    first.resize((9 << 20) / 8, 1);
    assert!(eventually(|| others_sleep() && others_sleep()), "all have started");
    COUNTS.store(true, Ordering::SeqCst);
    let by_test = std::thread::Builder::new().name("farheap-test".to_owned());
    by_test
        .spawn(|| drop(std::hint::black_box(Box::new(1))))
        .expect("a thread")
        .join()
        .expect("ok");
    assert!(ALLOCATIONS.swap(0, Ordering::SeqCst) > 0, "the count works");
    work(&heap, seed);
    let stats = heap.stats();
    COUNTS.store(false, Ordering::SeqCst);
    println!("{stats:?}");
    assert!(stats.faults_read > 0 && stats.pages_out > 0 && stats.pages_prefetched > 0);
    let (count, size) = (ALLOCATIONS.load(Ordering::SeqCst), LATEST.load(Ordering::SeqCst));
    assert_eq!(count, 0, "the latest allocation was of {size} bytes");
}
