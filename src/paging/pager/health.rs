//! Health: what fails at the moment, for how long it may, and whether the region stops.

use crate::base::error::Error;
use crate::base::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::paging::diagnostics;
use crate::sys;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

pub(in crate::paging) use crate::paging::diagnostics::NO_SLOT;

/// Panics of a store's code that a region survives: one that panics all the time serves nobody.
const PANICS_MAX: u64 = 16;

/// The state of one region's health.
#[derive(Debug)]
pub(in crate::paging) struct Health {
    /// How long the device may take for a request.
    deadline: Duration,
    /// Why write-back fails at the moment: 0, an `errno` or [`NO_SLOT`].
    write_errno: AtomicU32,
    /// Writes that have failed.
    writes_failed: AtomicU64,
    /// A whole pass of the evictor freed nothing.
    exhausted: AtomicBool,
    stop: AtomicBool,
    /// Panics of the store's code that were survived.
    panics: AtomicU64,
}

impl Health {
    pub(in crate::paging) fn new(deadline: Duration) -> Health {
        Health {
            deadline,
            write_errno: AtomicU32::new(0),
            writes_failed: AtomicU64::new(0),
            exhausted: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            panics: AtomicU64::new(0),
        }
    }

    /// How long the device may take for a request.
    pub(in crate::paging) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Why write-back fails at the moment: 0, an `errno` or [`NO_SLOT`].
    pub(in crate::paging) fn write_errno(&self) -> u32 {
        self.write_errno.load(Ordering::Acquire)
    }

    /// Notes why write-back fails.
    pub(in crate::paging) fn note_write_failed(&self, errno: u32) {
        self.writes_failed.fetch_add(1, Ordering::Relaxed);
        self.write_errno.store(errno, Ordering::Release);
    }

    /// Writes that have failed, attempts without a free slot included.
    pub(in crate::paging) fn writes_failed(&self) -> u64 {
        self.writes_failed.load(Ordering::Relaxed)
    }

    /// Notes that write-back works; returns whether it failed before.
    pub(in crate::paging) fn note_write_works(&self) -> bool {
        self.write_errno.swap(0, Ordering::AcqRel) != 0
    }

    /// True if a whole pass of the evictor freed nothing, and no room was made since.
    pub(in crate::paging) fn is_exhausted(&self) -> bool {
        self.exhausted.load(Ordering::Acquire)
    }

    pub(in crate::paging) fn set_exhausted(&self, exhausted: bool) {
        self.exhausted.store(exhausted, Ordering::Release);
    }

    /// True if the region's threads are to end.
    pub(in crate::paging) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    pub(in crate::paging) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Calls code of the store, which may be the host's own. `None`: it panicked, which the process
    /// is told; what was asked of it may or may not have happened.
    pub(super) fn guarded<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let result = catch_unwind(AssertUnwindSafe(call));
        if result.is_err() {
            let cause = Error::Os { call: "the store", errno: sys::EIO };
            if self.panics.fetch_add(1, Ordering::Relaxed) >= PANICS_MAX {
                diagnostics::fatal("the store panicked too often", &cause);
            }
            diagnostics::warn("the store panicked; the handler goes on", &cause);
        }
        result.ok()
    }
}

/// The `errno` of a failed request.
pub(in crate::paging) fn errno_of(error: &Error) -> i32 {
    match error {
        Error::Io { errno, .. } | Error::Os { errno, .. } => *errno,
        _ => sys::EIO,
    }
}
