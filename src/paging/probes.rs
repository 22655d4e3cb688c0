//! Probes (USDT) for tracers such as bpftrace, perf and gdb: where faults are answered, pages leave, writes end, and
//! work stalls.
//!
//! A probe is a `nop` that a note of the file describes, and costs no more while nobody traces it: arguments are values
//! that are at hand. `book/src/how_to/containers.md` has a table of them. Used by `fault` and `evict`.

use crate::base::units::PageId;
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

/// Defines functions that are a probe each.
macro_rules! probes {
    ($($(#[$doc:meta])* $function:ident($($argument:ident: $type:ty = $value:expr),*) is $name:ident;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        pub(in crate::paging) fn $function($($argument: $type),*) {
            // Miri knows no assembly.
            #[cfg(not(miri))]
            probe::probe!(farheap, $name, $($value),*);
            #[cfg(miri)]
            let _ = ($($value),*);
        }
    )* };
}

probes! {
    /// A fault was answered, in nanoseconds.
    fault_answered(page: PageId = page.0, took: Duration = took.as_nanos() as u64) is fault;
    /// Pages have left memory.
    evicted(pages: usize = pages) is evict;
    /// The device has pages.
    written(pages: usize = pages, bytes: usize = bytes) is write_back;
    /// Work waits from now on.
    stalled(reason: StallReason = reason as u8) is stall;
}
