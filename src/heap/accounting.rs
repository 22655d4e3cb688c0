//! Uses of a tier's memory.
//!
//! [`Usage`] is a snapshot: blocks, pages and metadata by jemalloc's statistics, RAM by the region's.
//! Uses `jemalloc`; made by `far_arena`, `far_arenas` and `tiers`, completed by the runtime.

use super::jemalloc::JemallocArena;
use crate::base::statistics::statistics;
use crate::base::units::ByteCount;

/// Passes the table of what memory is for to a macro, behind what else it gets; as
/// [`for_region_stats!`](crate::for_region_stats).
#[doc(hidden)]
#[macro_export]
macro_rules! for_usage {
    ($callback:ident $($head:tt)*) => {
        $callback! {
            $($head)*
            "blocks" {
                /// Bytes in blocks, as callers asked for them. jemalloc does not count these for local memory: there
                /// it is the sum of `small_bytes` and `large_bytes`.
                allocated_bytes: bytes "allocated";
                /// Bytes of small blocks (below 16 KiB), rounded up to their classes; with those that threads keep
                /// for their next allocations.
                small_bytes: bytes "in small blocks";
                /// Bytes of the other blocks, likewise.
                large_bytes: bytes "in large blocks";
            }
            "pages" {
                /// Bytes of pages with blocks, unused parts included. Far, they need not be resident.
                active_bytes: bytes "active";
                /// Bytes of pages that are free, and kept for a while for reuse.
                dirty_bytes: bytes "dirty";
                /// Bytes of addresses that jemalloc keeps without memory, for later.
                retained_bytes: bytes "of addresses retained";
                /// Bytes of what jemalloc keeps about all this: in RAM, or far by the option `far_metadata`.
                metadata_bytes: bytes "of metadata";
                /// Bytes of RAM that all of this has, metadata included.
                resident_bytes: bytes "resident";
            }
        }
    };
}

for_usage!(statistics (
    /// Uses of the memory of a tier at the moment.
    ///
    /// From [`Heap::usage`](crate::Heap::usage) and [`Local::usage`](crate::Local::usage). The `resident` bytes of local
    /// memory and all tiers together are what the allocator adds to the process's resident memory.
    pub struct Usage;
));

impl Usage {
    /// Jemalloc's account of an arena, as of its last epoch; `resident_bytes` is that of the metadata.
    /// Zeros for an arena that is gone.
    pub(super) fn of_arena(arena: JemallocArena) -> Usage {
        let Ok(bytes) = arena.bytes() else { return Usage::default() };
        let of_pages = bytes.active + bytes.dirty;
        Usage {
            allocated_bytes: ByteCount((bytes.small + bytes.large) as u64),
            small_bytes: ByteCount(bytes.small as u64),
            large_bytes: ByteCount(bytes.large as u64),
            active_bytes: ByteCount(bytes.active as u64),
            dirty_bytes: ByteCount(bytes.dirty as u64),
            retained_bytes: ByteCount(bytes.retained as u64),
            metadata_bytes: ByteCount(bytes.metadata as u64),
            resident_bytes: ByteCount(bytes.resident.saturating_sub(of_pages) as u64),
        }
    }
}
