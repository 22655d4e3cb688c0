//! Containers that say where their nodes live. Layer 8; uses `sub`.
//!
//! [`FarBTreeMap`] and [`FarSkipList`] are ordered maps whose nodes come from a
//! [`Collective`](crate::sub::Collective). A strategy decides the sub-allocator of each node:
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
//! [`FarLeveledMap`] is a B+-tree whose levels have page sizes of their own, the upper ones local;
//! [`FarGraphIndex`] finds the nearest of many vectors.
//!
//! The strategies are those of the paper on collective allocators (Hideshima, Sato, Ugawa 2024).

mod btree;
mod hnsw;
mod leveled;
mod local_set;
mod ordered;
mod page_filler;
mod paged;
mod pairs;
mod skiplist;

pub use btree::{FarBTreeMap, Iter, Range, TreeStrategy};
pub use hnsw::{FarGraphIndex, GraphConfig, GraphStrategy, Neighbour};
pub use leveled::{FarLeveledMap, FaultCost, LevelIter, LevelPlan, LevelRange, Usage};
pub use paged::{FarPagedMap, PagedIter};
pub use skiplist::{FarSkipList, ListIter, ListRange, ListStrategy};

use crate::sub::AllocError;
use page_filler::PageFiller;
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

    fn count(&mut self, collective: &crate::sub::Collective, from: *const u8, to: *const u8) {
        if collective.is_local(from) && collective.is_local(to) {
            self.purely_local += 1;
        } else if collective.share_a_page(from, to) {
            self.in_page += 1;
        } else {
            self.cross_page += 1;
        }
    }
}
