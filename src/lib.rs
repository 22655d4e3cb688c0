//! farheap lets a process use more heap than it has RAM.

pub mod base;
pub mod config;
mod heap;
pub mod store;
mod sys;

pub use base::error::{Error, Result};
pub use base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
pub use config::Config;
pub use sys::probe;
