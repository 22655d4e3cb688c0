//! Freed memory that one thread keeps for its next allocations: a [`ThreadCache`], one of far memory
//! and one of large local blocks.
//!
//! `current` knows the calling thread's caches. `cache` is one thread's cache, `caches` all of a tier;
//! `magazine` its free objects by size class, `large` those above 32 KiB, `allowance` the bound on what
//! all caches keep together, `biased_lock` the lock that its owner takes for two stores and a load.

mod allowance;
mod biased_lock;
mod cache;
mod caches;
mod current;
mod large;
pub(super) mod magazine;

pub(super) use allowance::Allowance;
pub(super) use cache::{Access, Flush, Revoked, ThreadCache, reallocate_with};
#[cfg(test)]
pub(super) use caches::CACHES_MAX;
pub(super) use caches::{Revoker, ThreadCaches, processors, suited};
pub(super) use current::{
    access, access_at_once, access_local, access_own, claim_local, register_exit,
};
