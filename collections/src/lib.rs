//! Allocators above farheap's memory, ordered maps that place their nodes in it, and a B+-tree for a buffer pool.
//!
//! For [farheap], a heap larger than RAM. [`FarBTreeMap`] and [`FarSkipList`] are ordered maps whose nodes come from a
//! [`Collective`], which knows what each page holds ([`sub`]). A strategy decides the sub-allocator of each node:
//!
//! | strategy | nodes that many searches pass | nodes that are used together |
//! |---|---|---|
//! | plain | anywhere | anywhere |
//! | hint | anywhere | near a hint, if there is room |
//! | local | purely local | anywhere |
//! | dfs, vEB, page | anywhere | on one page, after `make_page_aware` |
//! | local+... | purely local | on one page |
//!
//! [`FarPagedMap`] is a map whose leaves fill pages and are placed by how they are used;
//! [`FarLeveledMap`] is a B+-tree whose levels have page sizes of their own, the upper ones local.
//! [`pool::BTree`] is an index in the pages of a [`BufferPool`](farheap::pool::BufferPool): bytes to bytes,
//! shared by threads, and durable as its table is. [`Temporary`] is an allocator for collections that a query
//! needs for a while, in a manager's temporary memory; `Bump` (feature `heap`) is one whose memory goes at once.
//!
//! The strategies are those of the paper on collective allocators (Hideshima, Sato, Ugawa 2024).
//! `examples/hnsw` in the repository is a container of one's own by the same means: an index that finds the
//! nearest of many vectors.
//!
//! # Examples
//! ```
//! use farheap::ByteCount;
//! use farheap::store::MemStore;
//! use farheap_collections::sub::{Collective, CollectiveConfig};
//! use farheap_collections::{FarBTreeMap, TreeStrategy};
//! use std::sync::Arc;
//!
//! let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
//! let config = CollectiveConfig::new().local(ByteCount::kib(64));
//! let collective = match Collective::create(config, store) {
//!     Ok(collective) => Arc::new(collective),
//!     // Without permission for userfaultfd; the message says how to get it.
//!     Err(error) => return Ok(println!("{error}")),
//! };
//! let mut squares = FarBTreeMap::new(collective, TreeStrategy::LocalDfs);
//! for n in 0..10_000_u64 {
//!     squares.insert(n, n * n)?;
//! }
//! squares.make_page_aware()?;
//! assert_eq!(squares.get(&99), Some(&9801));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
// A model of farheap's builds nothing above the protocols, and this crate is a dependency of its tests.
#![cfg(not(loom))]

mod btree;
#[cfg(feature = "heap")]
mod bump;
mod leveled;
mod local_set;
mod ordered;
mod page_filler;
mod paged;
mod pairs;
pub mod pool;
mod skiplist;
pub mod sub;
mod sys;
mod temporary;
#[cfg(test)]
#[path = "../../src/base/testing.rs"]
mod testing;

pub use btree::{FarBTreeMap, Iter, Range, TreeStrategy};
#[cfg(feature = "heap")]
pub use bump::Bump;
pub use leveled::{FarLeveledMap, FaultCost, LevelIter, LevelPlan, LevelRange, Workload};
pub use page_filler::PageFiller;
pub use paged::{FarPagedMap, PagedIter};
pub use skiplist::{FarSkipList, ListIter, ListRange, ListStrategy};
pub use temporary::Temporary;

use crate::sub::{AllocError, Collective};
use std::fmt;

/// Occupancy from which on a rearrangement starts a new page: the rest stays for later inserts.
pub const FILL_DEFAULT: f64 = 0.7;

/// A pair that could not be inserted, given back with the reason.
pub struct Refused<K, V> {
    /// The key.
    pub key: K,
    /// The value.
    pub value: V,
    /// Why there was no room.
    pub error: AllocError,
}

impl<K, V> fmt::Debug for Refused<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Refused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<K, V> fmt::Display for Refused<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the pair was not inserted: {}", self.error)
    }
}

impl<K, V> std::error::Error for Refused<K, V> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// How many links between nodes cross pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// Both ends are purely local.
    pub purely_local: u64,
    /// Both ends lie in the same page.
    pub in_page: u64,
    /// All others: following one may fault.
    pub cross_page: u64,
}

impl Links {
    /// All links.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.purely_local + self.in_page + self.cross_page
    }

    /// Counts a link between two nodes.
    pub fn count(&mut self, collective: &Collective, from: *const u8, to: *const u8) {
        if collective.is_local(from) && collective.is_local(to) {
            self.purely_local += 1;
        } else if collective.share_a_page(from, to) {
            self.in_page += 1;
        } else {
            self.cross_page += 1;
        }
    }
}
