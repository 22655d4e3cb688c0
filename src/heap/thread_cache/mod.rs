//! What one thread keeps of far memory for its next allocations: a [`ThreadCache`].
//!
//! `current` knows the calling thread's cache. `cache` is one thread's cache, and all of them; `magazine` its free objects by size class,
//! `allowance` the bound on what all caches keep together, `biased_lock` the lock that its owner
//! takes for two stores and a load.

mod allowance;
mod biased_lock;
mod cache;
mod current;
pub(super) mod magazine;

#[cfg(test)]
pub(super) use cache::CACHES_MAX;
pub(super) use cache::{Access, Revoked, ThreadCache, ThreadCaches, reallocate_with};
pub(super) use current::{access, access_own, register_exit};
