//! A region's record of the children that inherit it.

use crate::base::gate::Gate;
use crate::paging::fork::children::Children;
use std::os::fd::RawFd;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct ForkState {
    gate: Gate,
    children: Children,
    /// The descriptor that a child reads the store by, if it takes one; `None`: children have no part in the region.
    inherited: Option<Option<RawFd>>,
    /// See [`why_not`](Self::why_not).
    why_not: Option<&'static str>,
}

impl ForkState {
    pub(in crate::paging) fn new(
        inherited: Option<Option<RawFd>>,
        why_not: Option<&'static str>,
    ) -> ForkState {
        ForkState { gate: Gate::new(), children: Children::new(), inherited, why_not }
    }

    /// Stops the region's threads while the process forks.
    pub(in crate::paging) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(in crate::paging) fn children(&self) -> &Children {
        &self.children
    }

    pub(in crate::paging) fn inherited(&self) -> Option<Option<RawFd>> {
        self.inherited
    }

    /// Why children have no part in a region that they would have one in by its options; told at each fork.
    pub(super) fn why_not(&self) -> Option<&'static str> {
        self.why_not
    }
}
