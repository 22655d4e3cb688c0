//! Samples of the works with each allocator.
#![expect(unsafe_code, reason = "allocates by hand")]

use crate::bare::Bare;
use crate::sides::Side;
use crate::work::Work;
use crate::{Failure, Result};
use farheap::{ByteCount, Config, FarHeap, Heap, Placement};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::time::Duration;

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
            Side::Local => with_heap(|| work.sample(&OutOfLine, Some(Placement::Local), time)),
            Side::Far => with_heap(|| work.sample(&OutOfLine, Some(Placement::Far), time)),
            Side::Jemalloc => Ok(work.sample(&Bare, None, time)),
            Side::System | Side::Preloaded(..) => {
                self.check_loaded()?;
                Ok(work.sample(&System, None, time))
            }
        }
    }
}

/// Runs `body` beside a heap with a limit that nothing reaches.
fn with_heap(body: impl FnOnce() -> f64) -> Result<f64> {
    let config = Config::builder().limit(ByteCount::gib(2)).build().map_err(Failure::of)?;
    let heap = Heap::start(config).map_err(Failure::of)?;
    let ns = body();
    let stats = heap.stats();
    if stats.bytes_written.0 + stats.bytes_read.0 > 0 {
        return Err(Failure::Broken("something was written, though everything fits".to_owned()));
    }
    // Also the check that nothing was lost.
    heap.shutdown().map_err(Failure::of)?;
    Ok(ns)
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
