//! Uses of a tier's memory.
//!
//! [`TierMemory`] is a snapshot: blocks, pages and metadata by jemalloc's statistics, RAM by the region's.
//! Uses `jemalloc`; made by `far_arena`, `far_arenas` and `tiers`, completed by the runtime.

use super::jemalloc::JemallocArena;
use crate::base::statistics::statistics;
use crate::base::units::ByteCount;

/// Passes the table of what memory is for to a macro, behind what else it gets; as
/// [`for_region_stats!`](crate::for_region_stats).
#[doc(hidden)]
#[macro_export]
macro_rules! for_tier_memory {
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
                /// Bytes of what jemalloc keeps about all this: in RAM, or far by the option `metadata`.
                metadata_bytes: bytes "of metadata";
                /// Bytes of RAM that all of this has, metadata included.
                resident_bytes: bytes "resident";
            }
        }
    };
}

for_tier_memory!(statistics (
    /// Uses of the memory of a tier at the moment.
    ///
    /// From [`Heap::memory`](crate::Heap::memory) and [`Heap::local_memory`](crate::Heap::local_memory). The `resident` bytes of local memory and all
    /// tiers together are what the allocator adds to the process's resident memory.
    pub struct TierMemory;
));

impl TierMemory {
    /// The share of the metadata in blocks and metadata, from 0 to 1.
    #[must_use]
    pub fn metadata_share(&self) -> f64 {
        let all = self.small_bytes.0 + self.large_bytes.0 + self.metadata_bytes.0;
        if all == 0 { 0.0 } else { self.metadata_bytes.0 as f64 / all as f64 }
    }

    /// Jemalloc's account of an arena, as of its last epoch; `resident_bytes` is that of the metadata.
    /// Zeros for an arena that is gone.
    pub(super) fn of_arena(arena: JemallocArena) -> TierMemory {
        let Ok(bytes) = arena.bytes() else { return TierMemory::default() };
        let of_pages = bytes.active + bytes.dirty;
        TierMemory {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_metadata_is_of_blocks_and_metadata() {
        assert_eq!(TierMemory::default().metadata_share().to_bits(), 0.0_f64.to_bits());
        let memory = TierMemory {
            small_bytes: ByteCount(60),
            large_bytes: ByteCount(15),
            metadata_bytes: ByteCount(25),
            ..TierMemory::default()
        };
        assert!((memory.metadata_share() - 0.25).abs() < 1e-9);
    }
}
