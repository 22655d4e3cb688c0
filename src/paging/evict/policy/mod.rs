//! Eviction policies: which resident page goes next.
//!
//! The pager tells an [`EvictionPolicy`] what becomes resident and what is discarded, and asks
//! it for victims. Userfaultfd shows no accessed bits, so hits on resident pages are invisible:
//! instead a victim is unmapped and kept in RAM a little while ("cooling"). A touch in that time
//! costs a minor fault and comes back as [`retouched`](EvictionPolicy::retouched); otherwise the
//! page leaves and is [`evicted`](EvictionPolicy::evicted). Which policy is the default and why:
//! `docs/design/eviction.md`.
//!
//! ```text
//!              inserted                 victims                evicted
//!   (absent) ------------> resident ---------------> cooling -----------> (absent, maybe a ghost)
//!                             ^----------------------'  |
//!                                    retouched          '-- removed from any state: forgotten
//! ```
//! Uses `base` and `meta`; owned by the pager, under its policy lock.
//!
//! # Invariants
//! 1. A page is on at most one list; [`victims`](EvictionPolicy::victims) takes what it names
//!    off its list, so that no page is named twice unless it came back in between.
//! 2. After construction nothing allocates and every call is O(1) (`victims`: O(1) a victim).

pub(in crate::paging) mod api;
pub(in crate::paging) mod bag;
pub(in crate::paging) mod build;
pub(in crate::paging) mod clock;
pub(in crate::paging) mod fifo;
pub(in crate::paging) mod kind;
pub(in crate::paging) mod order;
pub(in crate::paging) mod pages;
pub(in crate::paging) mod s3fifo;
pub(in crate::paging) mod sieve;
pub(in crate::paging) mod tenure;
#[cfg(test)]
mod tests;

pub use crate::paging::evict::policy::api::{EvictionPolicy, Hint, Insert};
pub use crate::paging::evict::policy::kind::PolicyKind;
