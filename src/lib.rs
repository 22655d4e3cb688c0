//! farheap lets a process use more heap than it has RAM.

pub mod base;
mod meta;
mod sys;

mod heap;
pub mod store;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
