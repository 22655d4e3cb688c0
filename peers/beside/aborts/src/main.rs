//! farheap in one piece with its program, and where no panic is caught.

#[path = "../../common.rs"]
mod common;

use farheap::{FarHeap, Heap, Scope, Tier};
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

fn main() -> ExitCode {
    let heap = match common::start("capacity:256MiB,threshold:64KiB") {
        Ok(heap) => heap,
        Err(skipped) => return skipped,
    };
    let threads: Vec<_> = (0..4_u64)
        .map(|thread| {
            std::thread::spawn(move || {
                let _far = Scope::enter(Tier::FAR);
                let lists: Vec<Vec<u64>> = (0..2_000)
                    .map(|list| (0..list % 1000).map(|at| at * list + thread).collect())
                    .collect();
                Heap::running().expect("a heap").region().evict_all().expect("a device");
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
