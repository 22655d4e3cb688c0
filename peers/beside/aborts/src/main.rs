//! farheap in one piece with its program, and where no panic is caught.

use farheap::{Config, FarHeap, Heap, Placement, scope};
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

/// As the tests of C and C++: the machine does not allow it.
const SKIPPED: u8 = 77;

fn main() -> ExitCode {
    let config = Config::parse("capacity:256MiB,threshold:64KiB").expect("a configuration");
    let heap = match Heap::start(config) {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::from(SKIPPED);
        }
    };
    let threads: Vec<_> = (0..4_u64)
        .map(|thread| {
            std::thread::spawn(move || {
                let _far = scope(Placement::Far);
                let lists: Vec<Vec<u64>> = (0..2_000)
                    .map(|list| (0..list % 1000).map(|at| at * list + thread).collect())
                    .collect();
                Heap::running().expect("a heap").evict_all().expect("a device");
                for (list, numbers) in (0..).zip(&lists) {
                    let right = |(at, number): (u64, &u64)| *number == at * list + thread;
                    assert!((0..).zip(numbers).all(right), "list {list} of thread {thread}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert!(heap.stats().bytes_read.0 > 0);
    heap.shutdown().expect("nothing is allocated");
    println!("ok: {}", env!("CARGO_PKG_DESCRIPTION"));
    ExitCode::SUCCESS
}
