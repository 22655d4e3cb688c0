//! Handles that choose a tier: `Vec<T, Far>` and `Box<T, Local>` by type, `Vec<T, Tier>` by value.
//!
//! All implement [`Allocator`] of `allocator-api2`, and std's where the compiler has it (`build.rs`), or
//! under the feature `nightly`. Uses `global`, `placement`, `tiers`.
//!
//! # Invariants
//! 1. Empty layouts get a dangling pointer with the layout's alignment and no memory.
//! 2. The slice returned has exactly the size asked for, so that the size which a caller frees
//!    with is the one that magazines file the object under.

#![expect(unsafe_code, reason = "implements allocators")]

use super::global;
use super::placement::{Fill, Tier};
use super::tiers::{Origin, is_far, origin};
use allocator_api2::alloc::{AllocError, Allocator};
use std::alloc::Layout;
use std::ptr::{self, NonNull};

/// Allocates far memory of the default tier, whatever scope and size say.
///
/// A system call reads and writes it like other memory where the kernel's own faults are served
/// ([`serves_kernel_faults`](crate::paging::region::Region::serves_kernel_faults)). Elsewhere, as in an
/// unprivileged program on most distributions, it fails with `EFAULT` on pages that are not
/// resident, those that were never touched among them: give it [`Local`] buffers, or
/// [pin](crate::paging::region::Region::pin) the far ones.
///
/// While no far heap is running, allocation fails with [`AllocError`].
///
/// # Examples
/// ```
/// use allocator_api2::alloc::{AllocError, Allocator};
/// use farheap::Far;
/// use std::alloc::Layout;
///
/// // No heap has been started in this program.
/// assert_eq!(Far.allocate(Layout::new::<u64>()), Err(AllocError));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Far;

/// Allocates local memory, whatever scope and size say.
///
/// # Examples
/// ```
/// use allocator_api2::vec::Vec;
/// use farheap::{Far, Local};
///
/// let mut index = Vec::new_in(Local);
/// index.extend([1, 2, 3]);
/// assert!(!Far::contains(index.as_ptr()));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Local;

impl Far {
    /// True if `ptr` points into far memory, of whichever tier.
    #[must_use]
    pub fn contains<T>(ptr: *const T) -> bool {
        is_far(ptr.cast())
    }
}

impl Tier {
    /// The tier that `ptr` points into, [`LOCAL`](Tier::LOCAL) if it is no far one; `None` for far memory of the process
    /// that this one was forked from.
    #[must_use]
    pub fn of<T>(ptr: *const T) -> Option<Tier> {
        match origin(ptr.cast()) {
            Origin::Far(arenas) => Some(arenas.tier()),
            Origin::Local => Some(Tier::LOCAL),
            Origin::Parent => None,
        }
    }
}

/// Allocates, empty layouts included.
#[inline]
fn allocate(from: Tier, layout: Layout, fill: Fill) -> Result<NonNull<[u8]>, AllocError> {
    let ptr = if layout.size() == 0 {
        ptr::without_provenance_mut(layout.align())
    } else {
        // SAFETY: the layout is not empty.
        unsafe { global::allocate_at(from, layout, fill) }
    };
    let ptr = NonNull::new(ptr).ok_or(AllocError)?;
    Ok(NonNull::slice_from_raw_parts(ptr, layout.size()))
}

/// Frees, empty layouts included.
///
/// # Safety
/// `ptr` is an allocation of a handle with `layout` and is not used again.
#[inline]
unsafe fn deallocate(ptr: NonNull<u8>, layout: Layout) {
    if layout.size() != 0 {
        // SAFETY: as the caller promises.
        unsafe { global::free(ptr.as_ptr(), layout) }
    }
}

/// Resizes; `Err` leaves the allocation as it was.
///
/// # Safety
/// As for [`deallocate`].
unsafe fn resize(
    from: Tier,
    ptr: NonNull<u8>,
    old: Layout,
    new: Layout,
    fill: Fill,
) -> Result<NonNull<[u8]>, AllocError> {
    if old.size() == 0 || new.size() == 0 || old.align() != new.align() {
        let moved = allocate(from, new, fill)?;
        let len = old.size().min(new.size());
        // SAFETY: both are valid for `len` bytes, and the new one overlaps nothing.
        unsafe { moved.cast::<u8>().copy_from_nonoverlapping(ptr, len) };
        // SAFETY: as the caller promises.
        unsafe { deallocate(ptr, old) };
        return Ok(moved);
    }
    // SAFETY: as the caller promises; the sizes are not zero and the alignments equal.
    let moved = unsafe { global::reallocate_in_tier(ptr.as_ptr(), old, new) };
    let moved = NonNull::new(moved).ok_or(AllocError)?;
    if fill == Fill::Zero && new.size() > old.size() {
        // SAFETY: the allocation now has `new.size()` bytes.
        let tail = unsafe { moved.add(old.size()) };
        // SAFETY: the rest of the allocation, which is the caller's.
        unsafe { global::clear(tail.as_ptr(), new.size() - old.size()) };
    }
    Ok(NonNull::slice_from_raw_parts(moved, new.size()))
}

/// Implements one `Allocator` trait for one handle.
macro_rules! allocator {
    ($trait:path, $error:path, $handle:ty, $tier:expr) => {
        // SAFETY: memory stays valid until it is freed, wherever the handle moves; the address says where it
        // goes back to, so that clones free each other's memory.
        unsafe impl $trait for $handle {
            allocator! { @allocate $error, $tier; allocate Any, allocate_zeroed Zero }

            #[inline]
            unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
                // SAFETY: as the caller promises.
                unsafe { deallocate(ptr, layout) }
            }

            allocator! { @resize $error, $tier; grow Any, grow_zeroed Zero, shrink Any }
        }
    };
    (@allocate $error:path, $tier:expr; $($name:ident $fill:ident),*) => { $(
        #[inline]
        fn $name(&self, layout: Layout) -> Result<NonNull<[u8]>, $error> {
            allocate($tier(self), layout, Fill::$fill).map_err(|_| $error)
        }
    )* };
    (@resize $error:path, $tier:expr; $($name:ident $fill:ident),*) => { $(
        #[inline]
        unsafe fn $name(
            &self,
            ptr: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, $error> {
            // SAFETY: as the caller promises.
            unsafe { resize($tier(self), ptr, old, new, Fill::$fill) }.map_err(|_| $error)
        }
    )* };
}

/// Implements both traits for handles.
macro_rules! handles {
    ($($handle:ty: $tier:expr),*) => { $(
        allocator!(Allocator, AllocError, $handle, $tier);
        #[cfg(any(feature = "nightly", std_allocator))]
        allocator!(std::alloc::Allocator, std::alloc::AllocError, $handle, $tier);
    )* };
}

handles!(Far: |_| Tier::FAR, Tier: |t: &Tier| *t, Local: |_| Tier::LOCAL);

#[cfg(all(test, any(feature = "nightly", std_allocator)))]
mod tests {
    use super::*;

    #[test]
    fn the_standard_librarys_containers_take_the_handles() {
        let mut numbers = std::vec::Vec::with_capacity_in(3, Local);
        numbers.extend(0..100);
        numbers.shrink_to_fit();
        assert_eq!(numbers.iter().sum::<u64>(), 4950);
        let boxed = std::boxed::Box::new_in(numbers, Local);
        assert!(!Far::contains(boxed.as_ptr()));
        assert_eq!(std::vec::Vec::<u64, Far>::new_in(Far).capacity(), 0);
    }
}
