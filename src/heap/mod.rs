//! The heap: jemalloc arenas whose extents come from a region.
//!
//! Top down: [`FarHeap`] is the global allocator and decides what is far (`global`); [`Far`], [`Tier`]
//! and [`Local`] decide by type (`handle`); [`Scope`] decides for a thread (`scope`, `placement`);
//! [`c_malloc`] is for callers that free without a size. Local memory is jemalloc's, with a cache of large
//! blocks in front of it (`local`). Far memory comes from the installed tiers (`tiers`), each a
//! [`FarArenas`] (`far_arenas`, which `entry` lets threads into): arenas (`arena_set`, `far_arena`), what
//! threads keep of them (`thread_cache`), a bound on what is dirty (`dirty_bound`), extent hooks onto an [`ExtentSource`] (`hooks`), and all of jemalloc's
//! controls (`jemalloc`). `ending` keeps what the kernel needs of far
//! memory when a thread ends. `accounting` says what the memory of a tier is for. `check` looks for wrong frees, by
//! what `tail` keeps of blocks.
//!
//! # Invariants
//! 1. A far pointer never enters an automatic cache, a local one never a far cache: the address
//!    decides where a pointer goes back to.
//! 2. jemalloc's metadata is local memory, unless a tier was asked for far metadata, and it is never
//!    asked for zeroed far memory: inside of it nothing touches a far page.
//! 3. Nothing here waits for a device, but for far metadata, and for clearing what the caller wants
//!    zeroed, which happens last, outside of jemalloc and of caches. Hooks run pinned local.

mod accounting;
mod arena_set;
pub mod c_malloc;
pub(crate) mod check;
mod counts;
mod dirty_bound;
mod ending;
mod entry;
mod far_arena;
mod far_arenas;
mod far_options;
mod global;
mod handle;
mod hooks;
mod jemalloc;
mod local;
mod page_sizes;
mod placement;
mod scope;
mod tail;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod thread_cache;
mod tiers;

pub use accounting::Usage;
pub(crate) use ending::release as release_for_ended_threads;
pub(crate) use far_arenas::FarArenas;
pub(crate) use far_options::FarArenasOptions;
pub use global::FarHeap;
pub use handle::{Far, Local};
pub(crate) use hooks::ExtentSource;
pub(crate) use jemalloc::options::settle as settle_jemalloc;
pub(crate) use local::set_cache_max as set_local_cache_max;
pub use placement::Tier;
pub(crate) use placement::{TIERS_MAX, keep_own_allocations_local, pin_thread_local};
pub use scope::Scope;
pub(crate) use tiers::{
    count as tier_count, default_tier, give_local_back, install, is_left_to_parent,
    leave_to_parent, local_memory, local_resident, maintain_local, uninstall,
};
