//! The allocators that are compared. Each sample is a process of its own, so that none finds what
//! another one has left, and an allocator of a shared library can be loaded before the program.
#![expect(unsafe_code, reason = "allocates by hand")]

use crate::bare::Bare;
use crate::work::Work;
use crate::{Failure, Result};
use farheap::{ByteCount, Config, FarHeap, Heap, Placement};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Where distributions put libraries.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];

/// Exit status of a child that the machine does not permit.
pub(crate) const SKIPPED: u8 = 3;

/// An allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// [`FarHeap`], local memory.
    Local,
    /// [`FarHeap`], far memory that fits.
    Far,
    /// jemalloc as tikv-jemallocator has it.
    Jemalloc,
    /// `malloc` of the system.
    System,
    /// `malloc` of a library that is loaded before the program: its name, the names of its file, the
    /// package of Debian's that has it.
    Preloaded(&'static str, &'static [&'static str], &'static str),
}

/// All allocators; ours first.
pub(crate) const SIDES: [Side; 8] = [
    Side::Local,
    Side::Far,
    Side::Jemalloc,
    Side::Preloaded(
        "TCMalloc",
        &["libtcmalloc_minimal.so.4", "libtcmalloc.so.4"],
        "libtcmalloc-minimal4",
    ),
    Side::Preloaded(
        "mimalloc",
        &["libmimalloc.so.3", "libmimalloc.so.2", "libmimalloc.so"],
        "libmimalloc2.0",
    ),
    Side::Preloaded("snmalloc", &["libsnmallocshim.so"], "none; build it with cmake"),
    Side::Preloaded("TBBmalloc", &["libtbbmalloc_proxy.so.2"], "libtbbmalloc2"),
    Side::System,
];

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Local => "local",
            Side::Far => "far",
            Side::Jemalloc => "jemalloc",
            Side::System => "system",
            Side::Preloaded(name, ..) => name,
        }
    }

    pub(crate) fn named(name: &str) -> Option<Side> {
        SIDES.into_iter().find(|side| side.name() == name)
    }

    pub(crate) fn is_ours(self) -> bool {
        matches!(self, Side::Local | Side::Far)
    }

    /// The library to load before the program.
    ///
    /// # Errors
    /// [`Failure::Skipped`] when it is not on this machine.
    fn library(self, folder: Option<&Path>) -> Result<Option<PathBuf>> {
        let Side::Preloaded(name, files, package) = self else { return Ok(None) };
        let folders = || folder.into_iter().chain(FOLDERS.iter().map(Path::new));
        let found = files
            .iter()
            .flat_map(|file| folders().map(move |folder| folder.join(file)))
            .find(|path| path.exists());
        let missing = || {
            Failure::Skipped(format!("{name}: no {} here (Debian package: {package})", files[0]))
        };
        found.map(Some).ok_or_else(missing)
    }

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
        let program = std::env::current_exe().map_err(Failure::io)?;
        let mut child = Command::new(program);
        child.args(["--child", self.name(), "--work", &work.to_string()]);
        child.args(["--ms", &time.as_millis().to_string()]);
        if let Some(library) = self.library(libraries)? {
            child.env("LD_PRELOAD", &library);
            // TBBmalloc's proxy loads the allocator itself by name.
            child.env("LD_LIBRARY_PATH", library.parent().unwrap_or(Path::new("/")));
        }
        if self == Side::Jemalloc {
            // What this library changes of jemalloc's defaults; tikv-jemallocator does not.
            child.env("_RJEM_MALLOC_CONF", "cache_oblivious:true");
        }
        let output = child.output().map_err(Failure::io)?;
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if output.status.code() == Some(i32::from(SKIPPED)) {
            return Err(Failure::Skipped(text));
        }
        let errors = String::from_utf8_lossy(&output.stderr);
        let broken =
            || Failure::Broken(format!("{}: {} {text} {errors}", self.name(), output.status));
        if !output.status.success() {
            return Err(broken());
        }
        text.parse().map_err(|_| broken())
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
            Side::System => Ok(work.sample(&System, None, time)),
            Side::Preloaded(name, files, _) => {
                let maps = std::fs::read_to_string("/proc/self/maps").map_err(Failure::io)?;
                let stem = files[0].split(".so").next().unwrap_or(files[0]);
                if !maps.contains(stem) {
                    return Err(Failure::Broken(format!("{name} was not loaded")));
                }
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
