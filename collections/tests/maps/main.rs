//! The maps and the pool's B+-tree against std's map, and where their nodes lie.

#[path = "../../../tests/common/mod.rs"]
mod common;

mod ahead;
mod leveled;
mod model;
mod panics;
mod placement;
mod pool_tree;
