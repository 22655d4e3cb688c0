//! Probes (USDT) for tracers such as bpftrace and gdb: where faults are answered, pages leave, writes end, and work
//! stalls.
//!
//! A probe is a `nop` that a note of the file describes, and costs no more while nobody traces it: arguments are values
//! that are at hand. `book/src/how_to/containers.md` has a table of them. Used by `fault` and `evict`.

use crate::base::units::PageId;
use probe::probe;
use std::time::Duration;

/// Why work waits; the numbers are those of the table.
#[derive(Clone, Copy)]
pub(in crate::paging) enum StallReason {
    /// A fault finds no frame within the limit.
    NoFrame = 1,
    /// A fault finds the device's queue full.
    QueueFull = 2,
    /// A write failed, or the device has no space: write-back pauses.
    WritesPaused = 3,
}

/// A fault was answered.
#[inline(always)]
pub(in crate::paging) fn fault_answered(page: PageId, took: Duration) {
    probe!(farheap, fault, page.0, took.as_nanos() as u64);
}

/// Pages have left memory.
#[inline(always)]
pub(in crate::paging) fn evicted(pages: usize) {
    probe!(farheap, evict, pages);
}

/// The device has written pages.
#[inline(always)]
pub(in crate::paging) fn written(pages: usize, bytes: usize) {
    probe!(farheap, write_back, pages, bytes);
}

/// Work waits from now on.
#[inline(always)]
pub(in crate::paging) fn stalled(reason: StallReason) {
    probe!(farheap, stall, reason as u8);
}
