//! farheap lets a process use more heap than it has RAM.

pub mod base;
mod heap;
mod meta;
mod page;
pub mod region;
pub mod store;
mod sys;
pub mod tier;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
