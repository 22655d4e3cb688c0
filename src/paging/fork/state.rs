//! What a region knows of the children that inherit it.

use crate::base::gate::Gate;
#[cfg(feature = "heap")]
use crate::base::local::keep_local;
#[cfg(feature = "heap")]
use crate::base::units::ByteCount;
use crate::paging::fork::children::Children;
use crate::store::Inherited;
use crate::sys::vm::KERNEL_PAGE;
#[cfg(feature = "heap")]
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct ForkState {
    gate: Gate,
    children: Children,
    /// What a child needs of the store; `None`: children have no part in the region.
    inherited: Option<Inherited>,
    /// Ranges that are written to around forks: addresses, and bytes.
    kept: Mutex<Vec<(usize, usize)>>,
}

impl ForkState {
    pub(in crate::paging) fn new(inherited: Option<Inherited>) -> ForkState {
        let (gate, children) = (Gate::new(), Children::new());
        ForkState { gate, children, inherited, kept: Mutex::new(Vec::new()) }
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

    /// Notes a range, which stays committed, as one that is written to around forks. Not while one is under way,
    /// else the list is locked for ever in the child.
    #[cfg(feature = "heap")]
    pub(super) fn keep(&self, ptr: NonNull<u8>, len: ByteCount) {
        let _ours = keep_local();
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push((ptr.as_ptr().expose_provenance(), len.as_usize()));
    }

    /// Whether an address is in a range that is written to around forks.
    pub(super) fn is_kept(&self, addr: usize) -> bool {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.iter().any(|(start, len)| addr.wrapping_sub(*start) < *len)
    }

    /// An address in each of the kernel's pages that are written to around forks.
    pub(super) fn kept(&self) -> impl Iterator<Item = usize> {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).clone();
        kept.into_iter().flat_map(|(start, len)| (start..start + len).step_by(KERNEL_PAGE))
    }
}
