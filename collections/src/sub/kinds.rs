//! Sub-allocators: purely local, one page, the rest; as types and as one value.
//!
//! All borrow their [`Collective`]; pointers from any of them are plain addresses and are freed by
//! the collective.

use super::collective::{AllocError, Collective};
use super::pages::Owner;
use std::alloc::Layout;
use std::ptr::NonNull;

/// Which kind of memory a sub-allocator hands out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Local memory that never faults, of bounded size.
    PurelyLocal,
    /// One page of far memory.
    PerPage,
    /// Far memory of any number of pages.
    Swappable,
}

/// Hands out objects within one subspace.
pub trait SubAllocator {
    /// Kind of this memory.
    fn kind(&self) -> Kind;

    /// Allocates from this sub-allocator's subspace, uninitialised. A size of zero gives a
    /// dangling, aligned pointer.
    ///
    /// # Errors
    /// [`AllocError::Full`] when the subspace has no room, [`AllocError::TooLarge`] and
    /// [`AllocError::Align`] for what it could never hold, [`AllocError::Far`] when the far
    /// memory's store or address space has no more pages.
    fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, AllocError>;

    /// True if a pointer lies in this sub-allocator's subspace.
    fn contains(&self, ptr: *const u8) -> bool;

    /// True if less than `ratio` of the subspace is in use: always for `Swappable`, which has no bound.
    fn occupancy_under(&self, ratio: f64) -> bool;
}

impl Collective {
    /// The local memory, which never faults. Full from the start when its capacity is zero.
    #[must_use]
    pub fn purely_local(&self) -> PurelyLocal<'_> {
        PurelyLocal(self)
    }

    /// A sub-allocator of a new, empty page.
    ///
    /// # Errors
    /// [`AllocError::Far`] when there are no more pages.
    pub fn new_page(&self) -> Result<PerPage<'_>, AllocError> {
        Ok(PerPage { collective: self, page: self.take_page()? })
    }

    /// The far memory for everything else.
    #[must_use]
    pub fn swappable(&self) -> Swappable<'_> {
        Swappable(self)
    }

    /// The allocator that knows hints only, for comparison.
    #[must_use]
    pub fn hint_only(&self) -> HintOnly<'_> {
        HintOnly(self)
    }

    /// The sub-allocator whose subspace contains a pointer; `None` when this collective has not
    /// handed it out.
    #[must_use]
    pub fn suballocator_of(&self, ptr: *const u8) -> Option<AnySub<'_>> {
        if self.is_local(ptr) {
            return Some(AnySub::PurelyLocal(self.purely_local()));
        }
        let page = self.page_of(ptr)?;
        match self.owner_holding(page) {
            Owner::PerPage => Some(AnySub::PerPage(PerPage { collective: self, page })),
            Owner::Swappable | Owner::Hinted | Owner::Large => {
                Some(AnySub::Swappable(self.swappable()))
            }
            Owner::Free => None,
        }
    }
}

/// The local memory of a collective: never faults, bounded.
#[derive(Clone, Copy, Debug)]
pub struct PurelyLocal<'a>(&'a Collective);

impl SubAllocator for PurelyLocal<'_> {
    fn kind(&self) -> Kind {
        Kind::PurelyLocal
    }

    fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        self.0.allocate_local(layout)
    }

    fn contains(&self, ptr: *const u8) -> bool {
        self.0.is_local(ptr)
    }

    fn occupancy_under(&self, ratio: f64) -> bool {
        (self.0.local_used().get() as f64) < ratio * self.0.local_capacity().get() as f64
    }
}

/// One page of far memory: what is allocated here comes and goes together.
///
/// The page is given back when it is empty and no `PerPage` of it is left.
#[derive(Debug)]
pub struct PerPage<'a> {
    collective: &'a Collective,
    page: u32,
}

impl SubAllocator for PerPage<'_> {
    fn kind(&self) -> Kind {
        Kind::PerPage
    }

    fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        self.collective.allocate_in_page(self.page, layout)
    }

    fn contains(&self, ptr: *const u8) -> bool {
        self.collective.page_of(ptr) == Some(self.page)
    }

    fn occupancy_under(&self, ratio: f64) -> bool {
        let page = self.collective.page_size().as_usize();
        (self.collective.page_used(self.page) as f64) < ratio * page as f64
    }
}

impl Drop for PerPage<'_> {
    fn drop(&mut self) {
        self.collective.let_go(self.page);
    }
}

/// The rest of far memory.
#[derive(Clone, Copy, Debug)]
pub struct Swappable<'a>(&'a Collective);

impl SubAllocator for Swappable<'_> {
    fn kind(&self) -> Kind {
        Kind::Swappable
    }

    fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        self.0.allocate_swappable(layout)
    }

    fn contains(&self, ptr: *const u8) -> bool {
        matches!(self.0.owner_of(ptr), Some(Owner::Swappable | Owner::Large))
    }

    fn occupancy_under(&self, _ratio: f64) -> bool {
        true
    }
}

/// A sub-allocator whose kind is known when the program runs.
#[derive(Debug)]
pub enum AnySub<'a> {
    /// Local memory.
    PurelyLocal(PurelyLocal<'a>),
    /// One page.
    PerPage(PerPage<'a>),
    /// The rest.
    Swappable(Swappable<'a>),
}

impl AnySub<'_> {
    fn as_dyn(&self) -> &dyn SubAllocator {
        match self {
            AnySub::PurelyLocal(sub) => sub,
            AnySub::PerPage(sub) => sub,
            AnySub::Swappable(sub) => sub,
        }
    }
}

impl SubAllocator for AnySub<'_> {
    fn kind(&self) -> Kind {
        self.as_dyn().kind()
    }

    fn allocate(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        self.as_dyn().allocate(layout)
    }

    fn contains(&self, ptr: *const u8) -> bool {
        self.as_dyn().contains(ptr)
    }

    fn occupancy_under(&self, ratio: f64) -> bool {
        self.as_dyn().occupancy_under(ratio)
    }
}

/// The comparison: an allocator that knows hints only, as C++'s `allocate(n, hint)` does.
///
/// Places an object into the hint's page if that has room, else into any page with room, else into
/// a new one. It cannot be told to keep strangers out of a page.
#[derive(Clone, Copy, Debug)]
pub struct HintOnly<'a>(&'a Collective);

impl HintOnly<'_> {
    /// Allocates near `hint` if there is room.
    ///
    /// # Errors
    /// As [`SubAllocator::allocate`], without `Full`.
    pub fn allocate(
        &self,
        layout: Layout,
        hint: Option<*const u8>,
    ) -> Result<NonNull<u8>, AllocError> {
        self.0.allocate_hinted(layout, hint)
    }
}
