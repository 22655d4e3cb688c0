//! Regions of far memory and what is built of them, without a heap.

mod chunks;
#[path = "../common/mod.rs"]
mod common;
mod huge;
mod limits;
mod mappings;
mod privacy;
mod shadow;
mod soak;
mod stats;
