//! farheap lets a process use more heap than it has RAM.

#![cfg_attr(feature = "nightly", feature(allocator_api))]

pub mod base;
#[cfg_attr(not(test), expect(dead_code, unused_imports, reason = "the runtime starts the heap"))]
mod heap;
pub mod store;
mod sys;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
pub use heap::{Far, FarHeap, Local, Placement, Scope, scope};
