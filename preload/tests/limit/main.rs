//! Programs under `farheap run`: what they have resident, and that their answers are the same.

#[path = "../common/mod.rs"]
mod common;
mod peak;
mod programs;
