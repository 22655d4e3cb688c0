//! Sub-allocators; the maps and the pool's B+-tree against std's map, and where their nodes lie.

#[path = "../../../tests/common/mod.rs"]
mod common;

mod ahead;
mod collective;
mod leveled;
mod model;
mod panics;
mod placement;
mod pool_tree;

use farheap::store::Store;
use farheap_collections::sub::{Collective, CollectiveConfig};
use std::sync::Arc;

/// A collective, or `None` with the reason printed where userfaultfd is not permitted.
fn new_collective(config: CollectiveConfig, store: Arc<dyn Store>) -> Option<Collective> {
    common::where_permitted("collective", Collective::create(config, store))
}
