//! Bump allocators whose memory goes at once.

#![expect(unsafe_code, reason = "uses the caller's pointers")]

use crate::error::{
    FARHEAP_E_OUT_OF_MEMORY, Failure, Result, call, check_out, farheap_status, value, write,
};
use crate::handle::{self, opaque};
use crate::scope::{farheap_placement, wanted};
use farheap::allocator_api2::alloc::Allocator;
use farheap_collections::Bump;
use std::alloc::Layout;
use std::ffi::c_void;
use std::ptr::{self, NonNull};

opaque! {
    /// A handle of a bump allocator.
    farheap_bump = 11: Bump
}

/// The layout of a block; one of nothing is one of a byte.
fn layout(size: usize, align: usize) -> Result<Layout> {
    let refused = |_| Failure::argument(format!("{size} bytes aligned to {align}: no such block"));
    Layout::from_size_align(size.max(1), align).map_err(refused)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_bump_new(
    placement: farheap_placement,
    out: *mut *mut farheap_bump,
) -> farheap_status {
    call(|| {
        check_out(out)?;
        let Some(placement) = wanted(placement)? else {
            return Err(Failure::argument("the memory of a bump allocator is local or far"));
        };
        let handle = handle::create::<farheap_bump>(Bump::new(placement))?;
        // SAFETY: writable, as the caller promises.
        unsafe { write(out, handle) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_bump_free(bump: *mut farheap_bump) -> farheap_status {
    if bump.is_null() {
        return crate::error::FARHEAP_OK;
    }
    call(|| handle::take(bump).map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_bump_allocate(
    bump: *mut farheap_bump,
    size: usize,
    align: usize,
) -> *mut c_void {
    value(ptr::null_mut(), || {
        // SAFETY: not freed during the call, as the caller promises.
        let bump = unsafe { handle::get(bump) }?;
        let block = bump.allocate(layout(size, align)?).map_err(|_| {
            let message = format!("no memory for {size} bytes of a bump allocator");
            Failure::with_errno(FARHEAP_E_OUT_OF_MEMORY, libc::ENOMEM, message)
        })?;
        Ok(block.as_ptr().cast())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_bump_deallocate(
    bump: *mut farheap_bump,
    block: *mut c_void,
    size: usize,
    align: usize,
) -> farheap_status {
    call(|| {
        // SAFETY: not freed during the call, as the caller promises.
        let bump = unsafe { handle::get(bump) }?;
        let layout = layout(size, align)?;
        if let Some(block) = NonNull::new(block.cast()) {
            // SAFETY: a block of this allocator with this layout, as the caller promises.
            unsafe { bump.deallocate(block, layout) };
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn farheap_bump_reserved(
    bump: *const farheap_bump,
    out: *mut u64,
) -> farheap_status {
    call(|| {
        // SAFETY: not freed during the call, as the caller promises.
        let bump = unsafe { handle::get(bump) }?;
        // SAFETY: NULL or writable, as the caller promises.
        unsafe { write(out, bump.reserved().get()) }
    })
}
