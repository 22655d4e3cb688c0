//! A region's record of the children that inherit it.

use crate::base::gate::Gate;
use crate::paging::fork::children::Children;
use crate::store::Inherited;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct ForkState {
    gate: Gate,
    children: Children,
    /// The store's part for a child; `None`: children have no part in the region.
    inherited: Option<Inherited>,
    /// See [`why_not`](Self::why_not).
    why_not: Option<&'static str>,
}

impl ForkState {
    pub(in crate::paging) fn new(
        inherited: Option<Inherited>,
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

    pub(in crate::paging) fn inherited(&self) -> Option<Inherited> {
        self.inherited
    }

    /// Why children have no part in a region that they would have one in by its options; told at each fork.
    pub(super) fn why_not(&self) -> Option<&'static str> {
        self.why_not
    }
}
