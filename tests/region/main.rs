//! Regions of far memory and what is built of them, without a heap.

mod chunks;
#[path = "../common/mod.rs"]
mod common;
mod limits;
mod mappings;
mod privacy;
mod probes;
mod shadow;
mod soak;
mod stats;
mod waiting;
mod whole;
