//! Advice to the kernel on local memory, which values fill and give up as a whole: see `madvise(2)`.
//!
//! Far memory is advised through the region of its tier.

#![expect(unsafe_code, reason = "advises the kernel on local memory, and drops what it holds")]
#![expect(clippy::disallowed_methods, reason = "system calls are made here and nowhere else")]

const KERNEL_PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Asks for huge pages in local memory that will be filled: each costs one fault of the kernel, where small ones
/// cost 512. Where the kernel has none, nothing changes.
pub(crate) fn fill_soon(ptr: *const u8, len: usize) {
    if let Some((first, len)) = within(ptr.addr(), len, HUGE_PAGE) {
        // SAFETY: changes how missing memory is provided; contents stay.
        unsafe { libc::madvise(first as *mut libc::c_void, len, libc::MADV_HUGEPAGE) };
    }
}

/// Gives the pages that lie whole in a range of local memory back to the kernel; they read as zero then. Where the
/// kernel refuses, as it does for locked memory, they stay.
///
/// # Safety
/// The range was allocated by [`Local`](farheap::Local), nobody needs what it holds, and no reference into it exists.
pub(crate) unsafe fn give_back(ptr: *const u8, len: usize) {
    if let Some((first, len)) = within(ptr.addr(), len, KERNEL_PAGE) {
        // SAFETY: jemalloc's memory is anonymous and private, the rest is the caller's promise.
        unsafe { libc::madvise(first as *mut libc::c_void, len, libc::MADV_DONTNEED) };
    }
}

/// Returns first address and bytes of the units that lie whole in a range, if there are any.
fn within(start: usize, len: usize, unit: usize) -> Option<(usize, usize)> {
    let (first, end) = (start.next_multiple_of(unit), (start + len) & !(unit - 1));
    (first < end).then(|| (first, end - first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_units_of_a_range_are_advised() {
        assert_eq!(within(4096, 8192, KERNEL_PAGE), Some((4096, 8192)));
        assert_eq!(within(4097, 8192, KERNEL_PAGE), Some((8192, 4096)));
        assert_eq!(within(4097, 4096, KERNEL_PAGE), None);
        assert_eq!(within(8192, 0, KERNEL_PAGE), None);
    }
}
