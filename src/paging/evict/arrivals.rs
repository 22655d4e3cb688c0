//! The policy's lists, and how many pages have ever come in.
//!
//! Pages are counted where the policy is told of them, under its lock, because the evictor decides
//! by what arrives which kind of memory makes room ([`Arrivals`](crate::paging::evict::victims)).

use crate::base::units::PageId;
use crate::paging::evict::policy::{EvictionPolicy, Insert};
use std::ops::{Deref, DerefMut};

/// Pages that have ever come in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::paging) struct Arrived {
    /// Read from the device.
    pub(in crate::paging) filled: u64,
    /// Without content, one by one or with a chunk that the kernel fills.
    pub(in crate::paging) fresh: u64,
}

/// The resident pages as the policy knows them.
#[derive(Debug)]
pub(in crate::paging) struct Residents {
    policy: Box<dyn EvictionPolicy>,
    arrived: Arrived,
}

impl Residents {
    pub(in crate::paging) fn new(policy: Box<dyn EvictionPolicy>) -> Residents {
        Residents { policy, arrived: Arrived::default() }
    }

    /// Notes that an absent page has come in.
    pub(in crate::paging) fn arrive(&mut self, page: PageId, how: Insert) {
        match how {
            Insert::Fresh => self.arrived.fresh += 1,
            Insert::Filled | Insert::Prefetched => self.arrived.filled += 1,
        }
        self.policy.inserted(page, how);
    }

    /// Notes that the kernel fills a chunk of `pages` pages from now on. The policy hears of them when
    /// the chunk is closed.
    pub(in crate::paging) fn opened(&mut self, pages: u64) {
        self.arrived.fresh += pages;
    }

    /// How many pages have ever come in.
    pub(in crate::paging) fn arrived(&self) -> Arrived {
        self.arrived
    }
}

impl Deref for Residents {
    type Target = dyn EvictionPolicy;

    fn deref(&self) -> &Self::Target {
        &*self.policy
    }
}

impl DerefMut for Residents {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.policy
    }
}
