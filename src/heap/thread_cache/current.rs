//! The calling thread's caches: the one of a far tier is claimed at its first allocation there, that of
//! local memory at its first free of a large local block. All are given back when the thread exits.
//!
//! Kept in constant thread-local cells without a destructor, as in `placement`; a second thread-local
//! value has the destructor. Uses `cache`, `caches`, `ending`.
//!
//! # Invariants
//! 1. A thread that has given its caches back takes no others; what still allocates then (later
//!    destructors) takes the shared path.

use super::cache::{Access, ThreadCache};
use super::caches::ThreadCaches;
use crate::heap::ending;
use crate::heap::placement::TIERS_MAX;
use std::cell::Cell;
use std::ptr;

/// A thread's cache of the far tier in one slot.
struct OfTier {
    /// The caches that `cache` is one of; they are never freed, so the address names them.
    caches: Cell<*const ThreadCaches>,
    cache: Cell<Option<&'static ThreadCache>>,
}

impl OfTier {
    const fn none() -> OfTier {
        OfTier { caches: Cell::new(ptr::null()), cache: Cell::new(None) }
    }

    /// The cache, if it is one of `caches`.
    #[inline]
    fn among(&self, caches: &'static ThreadCaches) -> Option<&'static ThreadCache> {
        self.cache.get().filter(|_| ptr::eq(self.caches.get(), caches))
    }
}

/// A thread's record of its caches; see the module's documentation.
struct Current {
    /// By the tier's slot.
    far: [OfTier; TIERS_MAX],
    /// The cache of local memory, and whether one has been claimed, in vain perhaps.
    local: Cell<Option<&'static ThreadCache>>,
    local_claimed: Cell<bool>,
    life: Cell<Life>,
}

/// How far the thread is with its cache.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    /// No destructor is registered yet.
    Fresh,
    /// The destructor is being registered, which may allocate.
    Registering,
    /// May have a cache.
    Running,
    /// The destructor has run.
    Exiting,
}

/// Gives the caches back when the thread exits, and has far memory that the kernel needs then kept.
struct ExitGuard;

thread_local! {
    static CURRENT: Current = const {
        Current {
            far: [const { OfTier::none() }; TIERS_MAX],
            local: Cell::new(None),
            local_claimed: Cell::new(false),
            life: Cell::new(Life::Fresh),
        }
    };
    static EXIT: ExitGuard = const { ExitGuard };
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        CURRENT.with(|current| {
            current.life.set(Life::Exiting);
            let far = current.far.iter().map(|of_tier| of_tier.cache.take());
            far.chain([current.local.take()]).flatten().for_each(ThreadCache::give_back);
            ending::keep();
        });
    }
}

/// Opens the calling thread's cache of the default tier, if `caches` are that tier's, the thread has one, and
/// its bias is not revoked. Calls nothing, so that its callers need not save registers: else take
/// [`access`], out of line.
#[inline]
pub(in crate::heap) fn access_at_once(caches: &'static ThreadCaches) -> Option<Access<'static>> {
    CURRENT.with(|current| current.far[0].among(caches).and_then(ThreadCache::access))
}

/// Opens the calling thread's cache among `caches`; at the first call `claim` claims one, or fails to
/// for now. `None`: there is none left, or its bias is revoked at the moment; take the shared path.
pub(in crate::heap) fn access<E>(
    caches: &'static ThreadCaches,
    claim: impl FnOnce() -> Result<Option<&'static ThreadCache>, E>,
) -> Option<Access<'static>> {
    CURRENT.with(|current| {
        let of_tier = &current.far[caches.slot()];
        if ptr::eq(of_tier.caches.get(), caches) {
            return of_tier.cache.get()?.access();
        }
        attach(of_tier, caches, claim)
    })
}

/// As [`access`], of a cache that the thread has already.
#[inline]
pub(in crate::heap) fn access_own(caches: &'static ThreadCaches) -> Option<Access<'static>> {
    CURRENT.with(|current| {
        // The default tier's is looked for first: for its slot nothing has to be read.
        let cache = current.far[0].among(caches);
        cache.or_else(|| current.far[caches.slot()].among(caches)).and_then(ThreadCache::access)
    })
}

/// Opens the calling thread's cache of local memory, if it has one and its bias is not revoked.
#[inline]
pub(in crate::heap) fn access_local() -> Option<Access<'static>> {
    CURRENT.with(|current| current.local.get().and_then(ThreadCache::access))
}

/// Claims a cache of local memory for the calling thread if it has never done so.
#[cold]
pub(in crate::heap) fn claim_local(claim: impl FnOnce() -> Option<&'static ThreadCache>) {
    CURRENT.with(|current| {
        if !current.local_claimed.get() && register_exit() {
            current.local_claimed.set(true);
            current.local.set(claim());
        }
    });
}

#[cold]
fn attach<E>(
    of_tier: &OfTier,
    caches: &'static ThreadCaches,
    claim: impl FnOnce() -> Result<Option<&'static ThreadCache>, E>,
) -> Option<Access<'static>> {
    if !register_exit() {
        return None;
    }
    // That none was left is remembered too: asking again costs a search.
    let cache = claim().ok()?;
    of_tier.caches.set(caches);
    of_tier.cache.set(cache);
    cache?.access()
}

/// Makes sure that the thread's destructor runs; `false` when it has run, or on the way there.
pub(in crate::heap) fn register_exit() -> bool {
    CURRENT.with(|current| {
        if current.life.get() == Life::Fresh {
            current.life.set(Life::Registering);
            // `Err` only after the destructor has run; then it has set `Exiting`.
            if EXIT.try_with(|_| ()).is_ok() {
                current.life.set(Life::Running);
            }
        }
        current.life.get() == Life::Running
    })
}
