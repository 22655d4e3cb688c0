//! How a far tier behaves, and its numbers. Used by `far_arenas`.

use super::thread_cache;
use crate::base::units::ByteCount;
use std::time::Duration;

/// Maximum number of arenas that [`FarArenasOptions::default`] asks for.
const ARENAS_MAX: u32 = 16;

/// Bytes that all caches of far memory keep at most: what a few threads need for their working sets, and
/// CACHE_MAX_MORE for each processor where there are many ([`thread_cache::suited`]). With what those of local memory
/// keep (`local`) that is less than 64 MiB on 8 processors, however many threads there are.
const CACHE_MAX: ByteCount = ByteCount::mib(36);
const CACHE_MAX_MORE: ByteCount = ByteCount::mib(4);

/// How a tier behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FarArenasOptions {
    /// Its place among the tiers of the process; 0 is the default tier's.
    pub(crate) slot: usize,
    /// Arenas that threads are spread over, one a processor: with two threads that miss their
    /// caches at once two arenas are 1.5 to 2.8 times as fast as one (`cargo bench --bench
    /// alloc -- churn`). Each keeps dirty extents of its own.
    pub(crate) arenas: u32,
    /// Sizes from here up go far without being asked to; `None`: no size does.
    pub(crate) threshold: Option<ByteCount>,
    /// How long freed extents keep their contents for reuse.
    pub(crate) decay: Duration,
    /// Maximum number of dirty bytes; less under a small limit.
    pub(crate) dirty_max: ByteCount,
    /// True if jemalloc's metadata of the tier is far memory of the tier.
    pub(crate) metadata_is_far: bool,
    /// Bytes that all threads together may keep of freed objects.
    pub(crate) cache_max: ByteCount,
}

impl Default for FarArenasOptions {
    fn default() -> FarArenasOptions {
        FarArenasOptions {
            slot: 0,
            arenas: thread_cache::processors().min(ARENAS_MAX),
            threshold: Some(ByteCount::kib(64)),
            decay: Duration::from_secs(1),
            dirty_max: ByteCount::gib(1),
            metadata_is_far: false,
            cache_max: thread_cache::suited(CACHE_MAX, CACHE_MAX_MORE),
        }
    }
}
