//! The buffer pool, from outside.

#[path = "../common/mod.rs"]
mod common;
mod copy;
mod crash;
mod crashed_engine;
mod donation;
mod donation_refused;
mod errors;
mod huge;
mod network;
mod pages;
mod power;
mod read_only;
mod redo;
#[path = "../../network/tests/common/mod.rs"]
mod servers;
mod shrink;
mod tables;
mod whole_pages;
