//! Sub-allocators: memory by what a program knows about its objects.
//!
//! The far-memory model divides addresses into local memory, which never faults, and pages, which
//! come and go as one. A [`Collective`] owns both and hands out objects through sub-allocators:
//!
//! ```text
//!             Collective
//!   purely_local() ...   suballocator_of(ptr)   deallocate(any ptr)
//!        |
//!        +-- PurelyLocal   one, bounded         local arena (never faults)
//!        +-- PerPage       one page each  --.
//!        +-- Swappable     the rest       --+-- Region (far pages, page cache, store)
//!        `-- HintOnly      for comparison --'
//! ```
//! Pointers are plain and interchangeable. What a page holds is written down in local memory,
//! never in the page: freeing does not fault. The maps of this crate take their nodes from it.

mod collective;
mod kinds;
mod pages;
mod runs;

pub use collective::{AllocError, Collective, CollectiveConfig};
pub use kinds::{AnySub, HintOnly, Kind, PerPage, PurelyLocal, SubAllocator, Swappable};
