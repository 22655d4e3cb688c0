//! Retier: pages of a range that change their device in place.

#![expect(unsafe_code, reason = "calls the host's function")]

use crate::error::{Failure, Result, check_sized, write_sized};
use farheap::ByteCount;
use farheap::region::{Region, Retiered};
use farheap::store::Side;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

/// One of the two devices of a heap.
pub type farheap_side = u32;

pub const FARHEAP_SIDE_FIRST: farheap_side = 0;
pub const FARHEAP_SIDE_SECOND: farheap_side = 1;

/// How far pages have moved.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct farheap_retiered {
    pub size: usize,
    pub bytes: u64,
    pub of_bytes: u64,
    pub read_bytes: u64,
    pub elapsed_ns: u64,
}

/// Told how far it has come; returns whether it goes on.
pub type farheap_progress =
    Option<unsafe extern "C" fn(userdata: *mut c_void, so_far: *const farheap_retiered) -> bool>;

/// What a host asks for beside the range.
pub(crate) struct Asked {
    pub(crate) to: farheap_side,
    pub(crate) rate: u64,
    pub(crate) progress: farheap_progress,
    pub(crate) userdata: *mut c_void,
}

pub(crate) fn side(side: farheap_side) -> Result<Side> {
    match side {
        FARHEAP_SIDE_FIRST => Ok(Side::First),
        FARHEAP_SIDE_SECOND => Ok(Side::Second),
        other => Err(Failure::argument(format!("{other} is no side"))),
    }
}

fn in_c(of: &Retiered) -> farheap_retiered {
    farheap_retiered {
        size: size_of::<farheap_retiered>(),
        bytes: of.bytes().get(),
        of_bytes: of.of_bytes().get(),
        read_bytes: of.read().get(),
        elapsed_ns: u64::try_from(of.elapsed().as_nanos()).unwrap_or(u64::MAX),
    }
}

/// Moves the pages of a range, and says how far it has come.
///
/// # Safety
/// `out` is NULL or begins with its size and has that much room; `asked.progress` may be called with
/// `asked.userdata` on this thread.
pub(crate) unsafe fn run(
    region: &Region,
    ptr: *const c_void,
    len: usize,
    asked: &Asked,
    out: *mut farheap_retiered,
) -> Result<()> {
    // Before anything moves.
    // SAFETY: as the caller promises.
    unsafe { check_sized(out, size_of::<farheap_retiered>()) }?;
    let cancel = AtomicBool::new(false);
    let retier = region.retier(ptr.cast(), ByteCount(len as u64), side(asked.to)?)?;
    let done = retier.rate(ByteCount(asked.rate)).cancelled_by(&cancel).run(|so_far| {
        let Some(progress) = asked.progress else { return };
        let so_far = in_c(so_far);
        // SAFETY: a function that may be called with this, as the caller promises.
        let goes_on = unsafe { progress(asked.userdata, &raw const so_far) };
        cancel.store(!goes_on, Ordering::Relaxed);
    })?;
    // SAFETY: as the caller promises.
    unsafe { write_sized(out, &in_c(&done), size_of::<farheap_retiered>()) }
}
