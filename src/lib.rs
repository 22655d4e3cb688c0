#![doc = include_str!("../README.md")]
#![cfg_attr(feature = "nightly", feature(allocator_api))]
// Under loom there is only what its models run; the rest needs a kernel.
#![cfg_attr(loom, allow(unfulfilled_lint_expectations, reason = "some unsafe code is left out"))]
#![cfg_attr(loom, allow(dead_code, reason = "most users of these modules are left out"))]

pub mod base;
#[cfg(not(loom))]
pub mod config;
#[cfg(not(loom))]
pub mod containers;
#[cfg(not(loom))]
mod heap;
// The protocols of the heap's slots, for their models.
#[cfg(loom)]
#[path = "heap/bar.rs"]
mod heap_bar;
#[cfg(loom)]
#[path = "heap/counts.rs"]
mod heap_counts;
#[cfg(not(loom))]
mod meta;
mod page;
#[cfg(not(loom))]
pub mod pool;
// The protocol of the pool's page words, for its models.
#[cfg(loom)]
#[path = "pool/latch.rs"]
mod pool_latch;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
mod runtime;
#[cfg(not(loom))]
pub mod store;
#[cfg(not(loom))]
pub mod sub;
#[cfg(not(loom))]
mod sys;
pub mod tier;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
#[cfg(not(loom))]
pub use config::Config;
#[cfg(not(loom))]
pub use heap::{Far, FarHeap, Local, Placement, Scope, malloc, scope};
#[cfg(not(loom))]
pub use region::Stats;
#[cfg(not(loom))]
pub use runtime::Heap;
#[cfg(not(loom))]
pub use sys::probe;
#[cfg(not(loom))]
pub use tier::manager::{MemoryManager, Temporary};
