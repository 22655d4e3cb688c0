//! The far memory that a process leaves to a child, and the descriptors that it rests on.

use crate::base::error::Result;
use crate::base::sync::AtomicU64;
use crate::meta::LazyArray;
use crate::paging::page::PAGE;
use crate::paging::pager::Pager;
use crate::paging::pager::slot_store::SlotStore;
use crate::sys::fork;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Part of the limit that a child without siblings has for pages that are its alone: nobody evicts for both, so
/// that by this part parent and child together exceed the limit.
const BUDGET_PART: u64 = 8;
/// The least number of such pages.
pub(super) const BUDGET_PAGES_MIN: u64 = 16;

/// A descriptor that a grandchild needs, and the file that it was of when it was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needed {
    fd: RawFd,
    file: Option<(u64, u64)>,
}

impl Needed {
    pub(super) fn new(fd: RawFd) -> Needed {
        Needed { fd, file: fork::file_of(fd) }
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd
    }

    pub(super) fn is_open(&self) -> bool {
        self.file.is_some() && fork::file_of(self.fd) == self.file
    }
}

/// A process's part of a region, which it leaves to a child.
pub(super) struct ForkSnapshot {
    pub(super) pager: Arc<Pager>,
    pub(super) entries: Arc<LazyArray<AtomicU64>>,
    pub(super) layers: Vec<Arc<SlotStore>>,
    pub(super) needed: Vec<Needed>,
    /// Pages that the child may have alone.
    pub(super) budget: u64,
}

impl ForkSnapshot {
    /// The snapshot of the process that made a region.
    ///
    /// # Errors
    /// When there is no address space for it.
    pub(super) fn of_region(pager: Arc<Pager>, children: usize) -> Result<ForkSnapshot> {
        let entries = LazyArray::new(pager.table().page_count().as_usize())?;
        entries.set_inherited(true)?;
        let needed = pager.fork().inherited().flatten();
        let budget = pager.budget().limit().0 / PAGE as u64 / BUDGET_PART;
        Ok(ForkSnapshot {
            entries: Arc::new(entries),
            layers: Vec::new(),
            needed: needed.into_iter().map(Needed::new).collect(),
            budget: (budget / (children as u64 + 1)).max(BUDGET_PAGES_MIN),
            pager,
        })
    }
}
