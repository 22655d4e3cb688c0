//! Advice to the kernel on memory of the heap.
//!
//! Apart from `vm`, whose mappings belong to regions: here the range is a part of one that is
//! jemalloc's, or the heap's own. See `madvise(2)`.
#![expect(unsafe_code, reason = "advises")]

const KERNEL_PAGE: usize = 4096;

/// Keeps the kernel pages that lie whole in a range from becoming huge ones. Where the kernel has none, nothing changes.
pub(crate) fn avoid_huge_pages(start: usize, len: usize) {
    if let Some((first, len)) = within(start, len) {
        // SAFETY: changes how missing memory is provided; contents stay.
        unsafe { libc::madvise(first as *mut libc::c_void, len, libc::MADV_NOHUGEPAGE) };
    }
}

/// Drops the kernel pages that lie whole in a range, which read as zero then. Where the kernel refuses,
/// as it does for locked memory, they stay.
///
/// # Safety
/// The range is private anonymous memory, nobody needs what it holds, and no reference into it exists.
pub(crate) unsafe fn discard(start: usize, len: usize) {
    if let Some((first, len)) = within(start, len) {
        // SAFETY: as the caller promises, for a part of the range.
        unsafe { libc::madvise(first as *mut libc::c_void, len, libc::MADV_DONTNEED) };
    }
}

/// First address and bytes of the kernel pages that lie whole in a range, if there are any. Miri knows no
/// advice.
fn within(start: usize, len: usize) -> Option<(usize, usize)> {
    let (first, end) = (start.next_multiple_of(KERNEL_PAGE), (start + len) & !(KERNEL_PAGE - 1));
    (first < end && !cfg!(miri)).then(|| (first, end - first))
}
