//! The calling thread's cache: claimed at its first far allocation, given back when it exits.
//!
//! Kept in constant thread-local cells without a destructor, as in `placement`; a second thread-local
//! value has the destructor. Uses `cache`.
//!
//! # Invariants
//! 1. A thread that has given its cache back takes no other; what still allocates then (later
//!    destructors) takes the shared path.

use super::cache::{Access, ThreadCache, ThreadCaches};
use std::cell::Cell;
use std::ptr;

/// What a thread knows of its cache; see the module's documentation.
struct Current {
    /// The caches that `cache` is one of; they are never freed, so the address names them.
    caches: Cell<*const ThreadCaches>,
    cache: Cell<Option<&'static ThreadCache>>,
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

/// Gives the cache back when the thread exits.
struct ExitGuard;

thread_local! {
    static CURRENT: Current = const {
        Current {
            caches: Cell::new(ptr::null()),
            cache: Cell::new(None),
            life: Cell::new(Life::Fresh),
        }
    };
    static EXIT: ExitGuard = const { ExitGuard };
}

impl Drop for ExitGuard {
    fn drop(&mut self) {
        CURRENT.with(|current| {
            current.life.set(Life::Exiting);
            if let Some(cache) = current.cache.take() {
                cache.give_back();
            }
        });
    }
}

/// Opens the calling thread's cache among `caches`; at the first call `claim` claims one, or fails to
/// for now. `None`: there is none left, or its bias is revoked at the moment; take the shared path.
#[inline]
pub(in crate::heap) fn access<E>(
    caches: &'static ThreadCaches,
    claim: impl FnOnce() -> Result<Option<&'static ThreadCache>, E>,
) -> Option<Access<'static>> {
    CURRENT.with(|current| {
        if ptr::eq(current.caches.get(), caches)
            && let Some(cache) = current.cache.get()
        {
            return cache.access();
        }
        attach(current, caches, claim)
    })
}

/// As [`access`], of a cache that the thread has already.
#[inline]
pub(in crate::heap) fn access_own(caches: &'static ThreadCaches) -> Option<Access<'static>> {
    CURRENT.with(|current| {
        let cache = current.cache.get().filter(|_| ptr::eq(current.caches.get(), caches));
        cache.and_then(ThreadCache::access)
    })
}

#[cold]
fn attach<E>(
    current: &Current,
    caches: &'static ThreadCaches,
    claim: impl FnOnce() -> Result<Option<&'static ThreadCache>, E>,
) -> Option<Access<'static>> {
    if ptr::eq(current.caches.get(), caches) && current.cache.get().is_none() {
        return None;
    }
    if !register_exit() {
        return None;
    }
    // That none was left is remembered too: asking again costs a search.
    let cache = claim().ok()?;
    current.caches.set(caches);
    current.cache.set(cache);
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
