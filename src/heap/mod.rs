//! The heap: jemalloc arenas whose extents come from a region. Layer 6.
//!
//! Top down: [`FarHeap`] is the global allocator and decides what is far (`global`); [`Far`] and
//! [`Local`] decide by type (`handle`); [`scope`] decides for a thread (`thread`); [`malloc`] is
//! for who frees without a size. Far memory
//! comes from the installed [`Tier`]: arenas (`tier`), what threads keep of them (`slot`,
//! `magazine`, `allowance`), extent hooks (`hooks`) onto an [`ExtentSource`] (`source`), and all of
//! jemalloc's controls (`jemalloc`).
//!
//! # Invariants
//! 1. A far pointer never enters an automatic cache, a local one never a far cache: the address
//!    decides where a pointer goes back to.
//! 2. jemalloc's metadata is local memory, and it is never asked for zeroed far memory: inside of
//!    it nothing touches a far page.
//! 3. Nothing here waits for a device, but for clearing what the caller wants zeroed, which happens
//!    last, outside of jemalloc and of slots. Hooks run pinned local.

mod allowance;
mod bar;
mod counts;
mod global;
mod handle;
mod hooks;
mod jemalloc;
mod magazine;
pub mod malloc;
mod slot;
pub(crate) mod source;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod thread;
mod tier;

pub use global::FarHeap;
pub(crate) use global::{install, installed, is_left_to_parent, leave_to_parent, uninstall};
pub use handle::{Far, Local};
pub(crate) use source::{Edges, ExtentSource};
pub use thread::{Placement, Scope, scope};
pub(crate) use thread::{keep_own_allocations_local, pin_thread_local};
pub(crate) use tier::{Tier, TierOptions};
