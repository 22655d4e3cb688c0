//! Heaps in programs whose global allocator is another one.

mod caches;
#[path = "../common/mod.rs"]
mod common;
mod config;
mod failures;
mod kernel;
mod life;
mod probe;
mod system_calls;
mod untouched;
mod zeroed;
