//! Programs whose global allocator is the heap.

#[path = "../common/mod.rs"]
mod common;
mod fork;
mod inherit;
mod manager_local;
mod memory;
mod node;
mod ordinary;
mod pool;
mod process_limit;
mod shadow;
mod small;
mod tiers;
mod tiers_attack;

use farheap::FarHeap;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();
