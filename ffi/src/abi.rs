//! Which version this is, and what this machine can do.

#![expect(unsafe_code, reason = "exports functions")]

use crate::error::{FARHEAP_E_ABI, Failure, Result, call, farheap_status, value};
use farheap::probe::{Route, try_ring};
use std::ffi::c_char;

/// The version of the ABI: grows when a function or structure changes its meaning. What is only
/// added does not change it. The soname in `build.rs` has the same number.
pub const FARHEAP_ABI_VERSION: u32 = 1;

/// A thing that this library may be able to do here.
pub type farheap_feature = u32;

pub const FARHEAP_FEATURE_USERFAULTFD: farheap_feature = 1;
pub const FARHEAP_FEATURE_KERNEL_FAULTS: farheap_feature = 2;
pub const FARHEAP_FEATURE_MOVE: farheap_feature = 3;
pub const FARHEAP_FEATURE_IO_URING: farheap_feature = 4;
pub const FARHEAP_FEATURE_BTREE: farheap_feature = 5;

/// Of `linux/userfaultfd.h`.
const UFFD_FEATURE_MOVE: u64 = 1 << 16;

/// Refuses a host that was compiled for another ABI.
pub(crate) fn check(host: u32) -> Result<()> {
    if host == FARHEAP_ABI_VERSION {
        return Ok(());
    }
    let message = format!(
        "the program was compiled with a farheap.h of ABI version {host}, the library has \
         {FARHEAP_ABI_VERSION}: compile the program again"
    );
    Err(Failure::new(FARHEAP_E_ABI, message))
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_abi_version() -> u32 {
    FARHEAP_ABI_VERSION
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_check_abi(abi: u32) -> farheap_status {
    call(|| check(abi))
}

#[unsafe(no_mangle)]
pub extern "C" fn farheap_has_feature(feature: farheap_feature) -> bool {
    value(false, || {
        if feature == FARHEAP_FEATURE_BTREE {
            return Ok(true);
        }
        let mut open = Route::ALL.iter().filter_map(|route| Some((route, route.features().ok()?)));
        Ok(match feature {
            FARHEAP_FEATURE_USERFAULTFD => open.next().is_some(),
            FARHEAP_FEATURE_KERNEL_FAULTS => open.any(|(route, _)| route.has_kernel_faults()),
            FARHEAP_FEATURE_MOVE => open.any(|(_, features)| features & UFFD_FEATURE_MOVE != 0),
            FARHEAP_FEATURE_IO_URING => try_ring().is_ok(),
            _ => return Err(Failure::argument(format!("there is no feature {feature}"))),
        })
    })
}
