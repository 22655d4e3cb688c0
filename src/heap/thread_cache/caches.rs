//! All caches of a tier, and emptying those of other threads.
//!
//! Uses `cache`, `allowance`; owned by `FarArenas`, and by `local` for local memory.
//!
//! # Invariants
//! 1. Caches are revoked only by the holder of the [`Revoker`], of which there is at most one.

#![expect(unsafe_code, reason = "opens what other threads own")]

use super::allowance::Allowance;
use super::cache::{Flush, ThreadCache};
use crate::base::sync::{
    AtomicBool, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use crate::base::units::ByteCount;
use crate::heap::placement;
use crate::sys::membarrier;
use std::num::NonZero;
use std::sync::OnceLock;

/// Maximum number of caches of a tier: as many as jemalloc has explicit caches, about.
pub(in crate::heap) const CACHES_MAX: usize = 4096;

/// Processors up to which caches keep the same; more threads run at once where there are more.
const PROCESSORS_FEW: u32 = 8;

/// Processors that this process may use.
pub(in crate::heap) fn processors() -> u32 {
    // Asked once: it reads files of control groups.
    static FOUND: OnceLock<u32> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let found = std::thread::available_parallelism().map_or(1, NonZero::get);
        u32::try_from(found).unwrap_or(u32::MAX)
    })
}

/// Bytes that all caches may keep on this machine: `few`, and `more` for each processor beyond eight.
pub(in crate::heap) fn suited(few: ByteCount, more: ByteCount) -> ByteCount {
    ByteCount(few.0 + u64::from(processors().saturating_sub(PROCESSORS_FEW)) * more.0)
}

/// Caches whose places are allocated together. A tier is never freed: places for all that it could
/// have would leak 64 KiB with each.
const SEGMENT: usize = 64;

/// Places of caches.
type CacheSegment = [OnceLock<&'static ThreadCache>; SEGMENT];

/// The caches of a tier.
pub(in crate::heap) struct ThreadCaches {
    segments: [OnceLock<Box<CacheSegment>>; CACHES_MAX / SEGMENT],
    /// ThreadCaches that exist: all below this index, but for one that is just being made.
    len: AtomicUsize,
    allowance: &'static Allowance,
    /// Held by the one thread that revokes caches.
    control: AtomicBool,
    /// Where threads look for their cache among these.
    slot: usize,
}

impl ThreadCaches {
    /// No caches yet, of the tier in this slot; `allowance` bounds what all of them keep.
    pub(in crate::heap) const fn new(allowance: &'static Allowance, slot: usize) -> ThreadCaches {
        ThreadCaches {
            segments: [const { OnceLock::new() }; CACHES_MAX / SEGMENT],
            len: AtomicUsize::new(0),
            allowance,
            control: AtomicBool::new(false),
            slot,
        }
    }

    /// The slot of the tier that they are of.
    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    /// Changes what all caches together may keep.
    pub(in crate::heap) fn set_max(&self, bytes: ByteCount) {
        self.allowance.set_total(bytes.as_usize());
    }

    /// Bytes that all caches together have room for at the moment: they keep no more than that.
    pub(in crate::heap) fn room(&self) -> ByteCount {
        ByteCount(self.allowance.taken() as u64)
    }

    /// True if some caches have more than their share while others need it: one was refused its
    /// share since the last call, or all may have less than before.
    pub(in crate::heap) fn some_have_too_much(&self) -> bool {
        self.allowance.take_refused() | self.allowance.is_exceeded()
    }

    /// Claims a cache for the calling thread: one that another thread has given back, else one that
    /// `make` makes for its index. `None`: all are taken.
    pub(in crate::heap) fn claim(
        &self,
        make: impl Fn(usize, &'static Allowance) -> ThreadCache,
    ) -> Option<&'static ThreadCache> {
        let free = self.iter().find(|cache| cache.try_own());
        if free.is_some() {
            return free;
        }
        let next = |len| (len < CACHES_MAX).then_some(len + 1);
        let index = self.len.fetch_update(Relaxed, Relaxed, next).ok()?;
        let _pinned = placement::pin();
        let cache: &'static ThreadCache = Box::leak(Box::new(make(index, self.allowance)));
        let segment = self.segments[index / SEGMENT]
            .get_or_init(|| Box::new([const { OnceLock::new() }; SEGMENT]));
        segment[index % SEGMENT].set(cache).ok().expect("the index was claimed above, once");
        Some(cache)
    }

    /// All caches that exist.
    pub(in crate::heap) fn iter(&self) -> impl Iterator<Item = &'static ThreadCache> {
        let len = self.len.load(Relaxed);
        (0..len).filter_map(|index| {
            self.segments[index / SEGMENT].get()?[index % SEGMENT].get().copied()
        })
    }

    /// Becomes the thread that may revoke caches; `None` while another one is.
    pub(in crate::heap) fn take_control(&self) -> Option<Revoker<'_>> {
        // Pairs with the Release in `Revoker::drop`.
        let free = self.control.compare_exchange(false, true, Acquire, Relaxed).is_ok();
        // Not `then_some`: a `Revoker` that is made is dropped, and frees the holder's.
        free.then(|| Revoker { caches: self })
    }
}

/// The right to revoke caches.
pub(in crate::heap) struct Revoker<'a> {
    caches: &'a ThreadCaches,
}

impl Revoker<'_> {
    /// Empties the caches that `choose` selects, unless their owners are inside. The caches are in
    /// use: not those of a tier that is closed.
    pub(in crate::heap) fn flush(&self, choose: impl Fn(&ThreadCache) -> bool, what: Flush) {
        let caches = || self.caches.iter();
        let chosen = |cache: &&ThreadCache| cache.is_revoked();
        caches().filter(|cache| choose(cache)).for_each(ThreadCache::revoke);
        if caches().any(ThreadCache::is_revoked) && membarrier::on_all_threads() {
            for cache in caches().filter(chosen) {
                // SAFETY: revoked, with a barrier since; used here only, before the cache is restored.
                if let Some(mut revoked) = unsafe { cache.access_revoked() } {
                    revoked.flush(what);
                }
            }
        }
        caches().filter(chosen).for_each(ThreadCache::restore);
    }
}

impl Drop for Revoker<'_> {
    fn drop(&mut self) {
        self.caches.control.store(false, Release);
    }
}
