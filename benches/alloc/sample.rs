//! Samples of the works with each allocator.
#![expect(unsafe_code, reason = "allocates by hand")]

use crate::bare::Bare;
use crate::sides::{Side, with_heap};
use crate::work::Work;
use crate::{Failure, Result};
use farheap::{ByteCount, FarHeap, Tier};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::time::Duration;

/// What nothing reaches.
const LIMIT: ByteCount = ByteCount::gib(2);

impl Side {
    /// Samples a work in a process of its own; nanoseconds per allocation and its free.
    ///
    /// # Errors
    /// [`Failure::Skipped`] when the allocator is not on this machine or may not run here.
    pub(crate) fn sample(
        self,
        work: usize,
        time: Duration,
        libraries: Option<&Path>,
    ) -> Result<f64> {
        let mut child = self.command(libraries)?;
        child.args(["--work", &work.to_string()]);
        child.args(["--ms", &time.as_millis().to_string()]);
        let text = self.answer(child)?;
        text.parse().map_err(|_| Failure::Broken(format!("{}: {text}", self.name())))
    }

    /// The child's part: samples in this process.
    ///
    /// # Errors
    /// [`Failure::Skipped`] without permission for far memory; [`Failure::Broken`] when the library
    /// that should serve this process was not loaded.
    pub(crate) fn run(self, work: Work, time: Duration) -> Result<f64> {
        match self {
            Side::Local => with_heap(LIMIT, || work.sample(&OutOfLine, Some(Tier::LOCAL), time)),
            Side::Far => with_heap(LIMIT, || work.sample(&OutOfLine, Some(Tier::FAR), time)),
            Side::Jemalloc => Ok(work.sample(&Bare, None, time)),
            Side::System | Side::Preloaded(..) => {
                self.check_loaded()?;
                Ok(work.sample(&System, None, time))
            }
        }
    }
}

/// [`FarHeap`] out of line, as a global allocator always is behind `__rust_alloc`.
struct OutOfLine;

// SAFETY: passes every call on.
unsafe impl GlobalAlloc for OutOfLine {
    #[inline(never)]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as the caller promises.
        unsafe { FarHeap::new().alloc(layout) }
    }

    #[inline(never)]
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { FarHeap::new().dealloc(ptr, layout) }
    }
}
