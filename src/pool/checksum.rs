//! Checksums of pages: in the last 8 bytes of each, over all else of it, its number and its table.
#![expect(unsafe_code, reason = "reads and writes the trailers of held pages")]

use super::page_table::TablePages;
use crate::base::units::PageId;

/// Bytes of a checksum.
const SUM: usize = 8;

/// True if a page that was read, and that the caller holds locked, has its checksum in the table of
/// this `identity`. A page of zeros has none: the header names no page that was never written.
pub(super) fn matches(table: &TablePages, page: PageId, identity: u64) -> bool {
    // SAFETY: within a page that the caller holds locked; aligned to 8.
    let stored = unsafe { place(table, page).read() };
    stored == sum(table, page, identity)
}

/// Sets the checksum of a page that the caller is about to write.
pub(super) fn set(table: &TablePages, page: PageId, identity: u64) {
    let sum = sum(table, page, identity);
    // SAFETY: the sum belongs to the page's only writer, the caller; nobody reads it while the page
    // is resident.
    unsafe { place(table, page).write(sum) };
}

fn sum(table: &TablePages, page: PageId, identity: u64) -> u64 {
    let len = table.page_bytes() - SUM;
    // SAFETY: the caller holds the page, so that its payload does not change; the sum itself,
    // which the writer changes, lies behind `len`.
    let bytes = unsafe { std::slice::from_raw_parts(table.ptr(page), len) };
    let sum = twox_hash::XxHash3_128::oneshot_with_seed(identity ^ page.0, bytes) as u64;
    // 0 is what a page that was never written has there.
    sum.max(1)
}

fn place(table: &TablePages, page: PageId) -> *mut u64 {
    table.ptr(page).wrapping_add(table.page_bytes() - SUM).cast()
}
