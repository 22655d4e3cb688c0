//! `far_malloc` and its kin.

#![expect(unsafe_code, reason = "frees and resizes the caller's blocks")]

use crate::error::{
    FARHEAP_E_ARGUMENT, FARHEAP_E_NOT_RUNNING, FARHEAP_E_OUT_OF_MEMORY, Failure, value,
};
use crate::handle;
use crate::heap::bytes;
use crate::scope::{FARHEAP_FAR, FARHEAP_POLICY, farheap_placement, wanted};
use farheap::{Error, Far, Heap, Tier, malloc};
use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};

/// Alignment of what asks for none.
const ALIGN: usize = 16;
/// Returns a block, or NULL with the reason.
#[inline]
fn give(block: Option<NonNull<u8>>, size: usize, tier: Option<Tier>) -> *mut c_void {
    match block {
        Some(block) => block.as_ptr().cast(),
        None => refuse(size, tier),
    }
}

#[cold]
fn refuse(size: usize, tier: Option<Tier>) -> *mut c_void {
    let runs = |tier| Heap::tiers().iter().any(|heap| heap.tier() == tier);
    let (status, message) = if tier == Some(Tier::FAR) && !malloc::serves_far() {
        let forked = if handle::is_forked_child() { " (this is a forked child)" } else { "" };
        (FARHEAP_E_NOT_RUNNING, format!("no far heap is running{forked}"))
    } else if let Some(tier) = tier
        && tier != Tier::LOCAL
        && !runs(tier)
    {
        (FARHEAP_E_NOT_RUNNING, "the tier of this placement is not running".to_owned())
    } else {
        let message = format!(
            "no memory for {size} bytes: more than limit and device hold together, or an \
             impossible size"
        );
        (FARHEAP_E_OUT_OF_MEMORY, message)
    };
    let _noted = Failure::with_errno(status, libc::ENOMEM, message);
    set_errno(libc::ENOMEM);
    ptr::null_mut()
}

#[cold]
fn refuse_argument(message: String) -> *mut c_void {
    let _noted = Failure::with_errno(FARHEAP_E_ARGUMENT, libc::EINVAL, message);
    set_errno(libc::EINVAL);
    ptr::null_mut()
}

fn set_errno(errno: i32) {
    // SAFETY: takes nothing; the thread's own place.
    let place = unsafe { libc::__errno_location() };
    // SAFETY: valid for this thread, which only this thread uses.
    unsafe { place.write(errno) };
}

#[unsafe(no_mangle)]
pub extern "C" fn far_malloc(size: usize) -> *mut c_void {
    value(ptr::null_mut(), || Ok(give(malloc::allocate(size, ALIGN, None, false), size, None)))
}

#[unsafe(no_mangle)]
pub extern "C" fn far_calloc(count: usize, size: usize) -> *mut c_void {
    value(ptr::null_mut(), || {
        let bytes = count.saturating_mul(size);
        Ok(give(malloc::allocate(bytes, ALIGN, None, true), bytes, None))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn far_aligned_alloc(align: usize, size: usize) -> *mut c_void {
    far_allocate(FARHEAP_POLICY, size, align)
}

#[unsafe(no_mangle)]
pub extern "C" fn far_allocate(
    placement: farheap_placement,
    size: usize,
    align: usize,
) -> *mut c_void {
    value(ptr::null_mut(), || {
        if placement == FARHEAP_FAR
            && let Some(block) = malloc::allocate_at_hand(size, align)
        {
            return Ok(block.as_ptr().cast());
        }
        Ok(allocate_any(placement, size, align))
    })
}

#[inline(never)]
fn allocate_any(placement: farheap_placement, size: usize, align: usize) -> *mut c_void {
    let Ok(wanted) = wanted(placement) else {
        return refuse_argument(format!("{placement} is no placement"));
    };
    match malloc::allocate(size, align, wanted, false) {
        Some(block) => block.as_ptr().cast(),
        None if align.is_power_of_two() => refuse(size, wanted),
        None => refuse_argument(format!("an alignment of {align} is no power of two")),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn far_realloc(ptr: *mut c_void, size: usize) -> *mut c_void {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else {
        return far_malloc(size);
    };
    // SAFETY: a live block, as the caller promises.
    value(ptr::null_mut(), || Ok(give(unsafe { malloc::reallocate(block, size) }, size, None)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn far_madvise(start: *mut c_void, len: usize, advice: c_int) -> c_int {
    value(-1, || {
        // SAFETY: as the caller promises.
        match unsafe { Heap::madvise(bytes(start, len).cast_mut(), advice) } {
            Ok(true) => return Ok(0),
            Ok(false) => {}
            Err(error) => {
                set_errno(if let Error::Os { errno, .. } = error { errno } else { libc::EINVAL });
                return Err(error.into());
            }
        }
        #[expect(clippy::disallowed_methods, reason = "what is not far is the kernel's")]
        // SAFETY: as the caller promises.
        Ok(unsafe { libc::madvise(start, len, advice) })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn far_free(ptr: *mut c_void) {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else { return };
    value((), || {
        // SAFETY: a live block, as the caller promises.
        unsafe { malloc::free(block) };
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn far_free_sized(ptr: *mut c_void, size: usize, align: usize) {
    let Some(block) = NonNull::new(ptr.cast::<u8>()) else { return };
    value((), || {
        // SAFETY: a live block of this size, as the caller promises.
        unsafe { malloc::free_sized(block, size, align) };
        Ok(())
    });
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn far_usable_size(ptr: *const c_void) -> usize {
    match NonNull::new(ptr.cast_mut().cast::<u8>()) {
        // SAFETY: a live block, as the caller promises.
        Some(block) => unsafe { malloc::usable_size(block) },
        None => 0,
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn far_contains(ptr: *const c_void) -> bool {
    Far::contains(ptr)
}
