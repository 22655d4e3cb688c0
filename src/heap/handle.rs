//! Handles that choose a tier: `Vec<T, Far>` and `Box<T, Local>` by type, `Vec<T, Tier>` by value; and
//! arenas, as `Vec<T, &Arena>`.
//!
//! All implement [`Allocator`] of `allocator-api2`, and std's where the compiler has it (`build.rs`), or
//! under the feature `nightly`. Uses `global`, `placement`, `tiers`.
//!
//! # Invariants
//! 1. Empty layouts get a dangling pointer with the layout's alignment and no memory.
//! 2. The slice returned has exactly the size asked for, so that the size which a caller frees
//!    with is the one that magazines file the object under.

#![expect(unsafe_code, reason = "implements allocators")]

use super::droppable::Arena;
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
    /// Whether `ptr` points into far memory, of whichever tier.
    #[must_use]
    pub fn contains<T>(ptr: *const T) -> bool {
        is_far(ptr.cast())
    }
}

impl Tier {
    /// The far tier that `ptr` points into; `None` for local memory, and in a forked child.
    #[must_use]
    pub fn of<T>(ptr: *const T) -> Option<Tier> {
        match origin(ptr.cast()) {
            Origin::Far(arenas) => Some(arenas.tier()),
            Origin::Local | Origin::Parent => None,
        }
    }
}

/// Source that a handle asks for its memory.
trait Handle {
    /// Allocates; null when there is no such memory.
    ///
    /// # Safety
    /// The layout's size is not zero.
    unsafe fn take(&self, layout: Layout, fill: Fill) -> *mut u8;

    /// Frees.
    ///
    /// # Safety
    /// `ptr` is an allocation of the handle's memory with `layout`, which is not empty, and is not used again.
    #[inline]
    unsafe fn free(&self, ptr: NonNull<u8>, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { global::free(ptr.as_ptr(), layout) }
    }

    /// Resizes; `Err` leaves the allocation as it was.
    ///
    /// # Safety
    /// As for [`free`](Self::free); neither size is zero, and the alignments are equal.
    #[inline]
    unsafe fn resize(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Resized {
        // SAFETY: as the caller promises.
        let moved = unsafe { global::reallocate_in_tier(ptr.as_ptr(), old, new) };
        NonNull::new(moved).map_or(Resized::Failed, Resized::Done)
    }
}

/// Outcome of an attempt to resize.
enum Resized {
    Done(NonNull<u8>),
    Failed,
    /// A new allocation is needed, and a copy.
    MustMove,
}

impl Handle for Arena {
    #[inline]
    unsafe fn take(&self, layout: Layout, fill: Fill) -> *mut u8 {
        Arena::take(self, layout, fill)
    }

    #[inline]
    unsafe fn free(&self, ptr: NonNull<u8>, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { Arena::free(self, ptr, layout) }
    }

    unsafe fn resize(&self, ptr: NonNull<u8>, old: Layout, new: Layout) -> Resized {
        // SAFETY: as the caller promises.
        let resized = unsafe { self.resize_in_place(ptr, old, new) };
        resized.map_or(Resized::MustMove, Resized::Done)
    }
}

impl Handle for Far {
    #[inline]
    unsafe fn take(&self, layout: Layout, fill: Fill) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { global::allocate_far(layout, fill) }
    }
}

impl Handle for Tier {
    #[inline]
    unsafe fn take(&self, layout: Layout, fill: Fill) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { global::allocate_in(*self, layout, fill) }
    }
}

impl Handle for Local {
    #[inline]
    unsafe fn take(&self, layout: Layout, fill: Fill) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { global::allocate_local(layout, fill) }
    }
}

/// Allocates, empty layouts included.
#[inline]
fn allocate(from: &impl Handle, layout: Layout, fill: Fill) -> Result<NonNull<[u8]>, AllocError> {
    let ptr = if layout.size() == 0 {
        ptr::without_provenance_mut(layout.align())
    } else {
        // SAFETY: the layout is not empty.
        unsafe { from.take(layout, fill) }
    };
    let ptr = NonNull::new(ptr).ok_or(AllocError)?;
    Ok(NonNull::slice_from_raw_parts(ptr, layout.size()))
}

/// Frees, empty layouts included.
///
/// # Safety
/// `ptr` is an allocation of the handle's memory with `layout` and is not used again.
#[inline]
unsafe fn deallocate(from: &impl Handle, ptr: NonNull<u8>, layout: Layout) {
    if layout.size() != 0 {
        // SAFETY: as the caller promises.
        unsafe { from.free(ptr, layout) }
    }
}

/// Resizes; `Err` leaves the allocation as it was.
///
/// # Safety
/// As for [`deallocate`].
unsafe fn resize(
    from: &impl Handle,
    ptr: NonNull<u8>,
    old: Layout,
    new: Layout,
    fill: Fill,
) -> Result<NonNull<[u8]>, AllocError> {
    if old.size() == 0 || new.size() == 0 || old.align() != new.align() {
        // SAFETY: as the caller promises.
        return unsafe { move_between(from, ptr, old, new, fill) };
    }
    // SAFETY: as the caller promises; the sizes are not zero and the alignments equal.
    let moved = match unsafe { from.resize(ptr, old, new) } {
        Resized::Done(moved) => moved,
        Resized::Failed => return Err(AllocError),
        // SAFETY: as the caller promises.
        Resized::MustMove => return unsafe { move_between(from, ptr, old, new, fill) },
    };
    if fill == Fill::Zero && new.size() > old.size() {
        // SAFETY: the allocation now has `new.size()` bytes.
        let tail = unsafe { moved.add(old.size()) };
        // SAFETY: the rest of the allocation, which is the caller's.
        unsafe { global::clear(tail.as_ptr(), new.size() - old.size()) };
    }
    Ok(NonNull::slice_from_raw_parts(moved, new.size()))
}

/// Resizes by a new allocation and a copy.
///
/// # Safety
/// As for [`deallocate`].
unsafe fn move_between(
    from: &impl Handle,
    ptr: NonNull<u8>,
    old: Layout,
    new: Layout,
    fill: Fill,
) -> Result<NonNull<[u8]>, AllocError> {
    let moved = allocate(from, new, fill)?;
    let len = old.size().min(new.size());
    // SAFETY: both are valid for `len` bytes, and the new one overlaps nothing.
    unsafe { moved.cast::<u8>().copy_from_nonoverlapping(ptr, len) };
    // SAFETY: as the caller promises.
    unsafe { deallocate(from, ptr, old) };
    Ok(moved)
}

/// Implements one `Allocator` trait for one handle.
macro_rules! allocator {
    ($trait:path, $error:path, $handle:ty) => {
        // SAFETY: memory stays valid until it is freed, or an arena is dropped, wherever the handle moves;
        // the address says where it goes back to, so that clones free each other's memory. An arena has
        // no clones.
        unsafe impl $trait for $handle {
            allocator! { @allocate $error; allocate Any, allocate_zeroed Zero }

            #[inline]
            unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
                // SAFETY: as the caller promises.
                unsafe { deallocate(self, ptr, layout) }
            }

            allocator! { @resize $error; grow Any, grow_zeroed Zero, shrink Any }
        }
    };
    (@allocate $error:path; $($name:ident $fill:ident),*) => { $(
        #[inline]
        fn $name(&self, layout: Layout) -> Result<NonNull<[u8]>, $error> {
            allocate(self, layout, Fill::$fill).map_err(|_| $error)
        }
    )* };
    (@resize $error:path; $($name:ident $fill:ident),*) => { $(
        #[inline]
        unsafe fn $name(
            &self,
            ptr: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, $error> {
            // SAFETY: as the caller promises.
            unsafe { resize(self, ptr, old, new, Fill::$fill) }.map_err(|_| $error)
        }
    )* };
}

/// Implements both traits for handles.
macro_rules! handles {
    ($($handle:ty),*) => { $(
        allocator!(Allocator, AllocError, $handle);
        #[cfg(any(feature = "nightly", std_allocator))]
        allocator!(std::alloc::Allocator, std::alloc::AllocError, $handle);
    )* };
}

handles!(Far, Tier, Local, Arena);

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
