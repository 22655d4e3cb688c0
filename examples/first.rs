//! The first program of README.

use farheap::allocator_api2::vec::Vec;
use farheap::{Far, Heap};

fn main() -> Result<(), farheap::Error> {
    let heap = Heap::builder().parse("limit:64MiB")?.start()?; // Maximum resident memory.
    let mut squares: Vec<u64, Far> = Vec::new_in(Far);
    squares.extend((0..24 << 20).map(|n: u64| n * n)); // 192 MiB, three times as much.
    assert!(squares.iter().zip(0..).all(|(square, n)| *square == n * n));
    println!("{}", heap.stats());
    drop(squares);
    heap.shutdown()
}
