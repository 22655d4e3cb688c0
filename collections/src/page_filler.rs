//! Filling pages one after the other, each to a given part.

use crate::sub::{AllocError, Collective, PerPage, SubAllocator};
use std::alloc::Layout;
use std::ptr::NonNull;

/// Pages of a collective, filled one after the other: what is allocated in a row shares pages.
#[derive(Debug)]
pub struct PageFiller<'a> {
    collective: &'a Collective,
    fill: f64,
    current: Option<PerPage<'a>>,
}

impl<'a> PageFiller<'a> {
    /// Pages that are filled to this part, 0 to 1: [`FILL_DEFAULT`](crate::FILL_DEFAULT), or 1 where nothing is
    /// inserted later.
    #[must_use]
    pub fn new(collective: &'a Collective, fill: f64) -> PageFiller<'a> {
        PageFiller { collective, fill, current: None }
    }

    /// Allocates in the current page; starts a new one when it is filled as far as allowed.
    ///
    /// # Errors
    /// As for [`SubAllocator::allocate`], without `Full` and `TooLarge`: what no page can hold gets pages of its own.
    pub fn allocate(&mut self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
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
