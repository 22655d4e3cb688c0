//! One limit over all consumers of memory.

#[path = "../common/mod.rs"]
mod common;
mod group;
mod manager;
mod resident;
