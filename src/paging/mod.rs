//! Paging: far address space whose cold pages live on a store. Uses `base`, `sys`,
//! `meta`, `store`, `limit`.

#[cfg(not(loom))]
pub(crate) mod advise;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod counters;
#[cfg(not(loom))]
mod diagnostics;
#[cfg(not(loom))]
mod direct_store;
#[cfg(not(loom))]
mod evict;
#[cfg(not(loom))]
mod extents;
#[cfg(not(loom))]
mod fault;
#[cfg(not(loom))]
mod fork;
#[cfg(not(loom))]
mod kernel_filled;
#[cfg(not(loom))]
mod latency;
#[cfg(not(loom))]
mod limits;
#[cfg(not(loom))]
mod managed;
#[cfg(not(loom))]
mod mapped_over;
mod page;
#[cfg(not(loom))]
mod pager;
#[cfg(not(loom))]
mod pins;
mod probes;
#[cfg(not(loom))]
mod purge;
#[cfg(not(loom))]
mod ranges;
#[cfg(not(loom))]
mod readahead;
#[cfg(not(loom))]
pub mod region;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod table_sizes;
#[cfg(not(loom))]
mod tables;
#[cfg(not(loom))]
mod transfer;
#[cfg(not(loom))]
mod waker;
