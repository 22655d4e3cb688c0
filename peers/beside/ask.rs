//! Numbers read by jemalloc's `mallctl`.

#![expect(unsafe_code, reason = "asks jemalloc")]

use std::ffi::CStr;

/// Returns the number of this name.
pub(crate) fn ask<T: Copy + Default>(name: &CStr) -> T {
    let (mut value, mut len) = (T::default(), size_of::<T>());
    let (into, none) = ((&raw mut value).cast(), std::ptr::null_mut());
    // SAFETY: `value` is writable for `len` bytes, which jemalloc compares with the control's size.
    let errno = unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), into, &raw mut len, none, 0) };
    assert_eq!(errno, 0, "{name:?}");
    value
}
