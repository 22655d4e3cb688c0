//! Filling pages one after the other, each to a given part.

use crate::sub::{AllocError, Collective, PerPage, SubAllocator};
use std::alloc::Layout;
use std::ptr::NonNull;

/// The page being filled.
pub(super) struct PageFiller<'a> {
    collective: &'a Collective,
    fill: f64,
    current: Option<PerPage<'a>>,
}

impl<'a> PageFiller<'a> {
    pub(super) fn new(collective: &'a Collective, fill: f64) -> PageFiller<'a> {
        PageFiller { collective, fill, current: None }
    }

    /// Allocates in the current page; starts a new one when it is filled as far as allowed.
    pub(super) fn allocate(&mut self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        // No page can hold it: it goes to pages of its own.
        if layout.size() > self.collective.page_size().as_usize() {
            return self.collective.swappable().allocate(layout);
        }
        if let Some(page) = &self.current
            && page.occupancy_under(self.fill)
        {
            match page.allocate(layout) {
                Err(AllocError::Full) => {}
                done => return done,
            }
        }
        self.current.insert(self.collective.new_page()?).allocate(layout)
    }
}
