//! farheap lets a process use more heap than it has RAM.

#![cfg_attr(feature = "nightly", feature(allocator_api))]

pub mod base;
pub mod config;
mod heap;
mod meta;
mod page;
pub mod pool;
pub mod region;
mod runtime;
pub mod store;
mod sys;
pub mod tier;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
pub use config::Config;
pub use heap::{Far, FarHeap, Local, Placement, Scope, scope};
pub use region::Stats;
pub use runtime::Heap;
pub use sys::probe;
