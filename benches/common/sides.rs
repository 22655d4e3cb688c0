//! The allocators that are compared. Each runs in a process of its own, so that none finds what another
//! one has left, and an allocator of a shared library can be loaded before the program.

use crate::{Failure, Result};
use farheap::{ByteCount, Heap};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// Where distributions put libraries.
const FOLDERS: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
];

/// Exit status of a child that the machine does not permit.
const SKIPPED: u8 = 3;

/// An allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// [`FarHeap`](farheap::FarHeap), local memory.
    Local,
    /// [`FarHeap`](farheap::FarHeap), far memory that fits.
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

    /// This program once more, with the allocator that is compared.
    ///
    /// # Errors
    /// As [`library`](Self::library).
    pub(crate) fn command(self, libraries: Option<&Path>) -> Result<Command> {
        let program = std::env::current_exe().map_err(Failure::io)?;
        let mut child = Command::new(program);
        child.args(["--child", self.name()]);
        if let Some(library) = self.library(libraries)? {
            child.env("LD_PRELOAD", &library);
            // TBBmalloc's proxy loads the allocator itself by name.
            child.env("LD_LIBRARY_PATH", library.parent().unwrap_or(Path::new("/")));
        }
        if self == Side::Jemalloc {
            // What this library changes of jemalloc's defaults; tikv-jemallocator does not.
            child.env("_RJEM_MALLOC_CONF", "cache_oblivious:true,dirty_decay_ms:10000");
        }
        Ok(child)
    }

    /// Runs a command of [`command`](Self::command); returns its answer.
    ///
    /// # Errors
    /// As [`answer`].
    pub(crate) fn answer(self, child: Command) -> Result<String> {
        answer(self.name(), child)
    }

    /// In a child: the library that should serve this process was loaded.
    ///
    /// # Errors
    /// [`Failure::Broken`] when it was not.
    pub(crate) fn check_loaded(self) -> Result<()> {
        let Side::Preloaded(name, files, _) = self else { return Ok(()) };
        let maps = std::fs::read_to_string("/proc/self/maps").map_err(Failure::io)?;
        let stem = files[0].split(".so").next().unwrap_or(files[0]);
        if maps.contains(stem) {
            return Ok(());
        }
        Err(Failure::Broken(format!("{name} was not loaded")))
    }
}

/// Runs the command of a child that answers by [`tell`]; returns its answer.
///
/// # Errors
/// [`Failure::Skipped`] when it may not run here.
pub(crate) fn answer(name: &str, mut child: Command) -> Result<String> {
    let output = child.output().map_err(Failure::io)?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.code() == Some(i32::from(SKIPPED)) {
        return Err(Failure::Skipped(text));
    }
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Broken(format!("{name}: {} {text} {errors}", output.status)));
    }
    Ok(text)
}

/// In a child: says what a sample is, or why there is none, as [`answer`] reads it.
pub(crate) fn tell(sample: Result<String>) -> ExitCode {
    match sample {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("{failure}");
            let is_skipped = matches!(failure, Failure::Skipped(_));
            if is_skipped { ExitCode::from(SKIPPED) } else { ExitCode::FAILURE }
        }
    }
}

/// In a child: runs `body` beside a heap with a limit that nothing reaches.
///
/// # Errors
/// [`Failure::Broken`] when something was written, or lost.
pub(crate) fn with_heap<T>(limit: ByteCount, body: impl FnOnce() -> T) -> Result<T> {
    let heap = Heap::builder().far_limit(limit).start().map_err(Failure::of)?;
    let sample = body();
    let stats = heap.stats();
    if stats.bytes_written.0 + stats.bytes_read.0 > 0 {
        return Err(Failure::Broken("something was written, though everything fits".to_owned()));
    }
    // Also the check that nothing was lost.
    heap.shutdown().map_err(Failure::of)?;
    Ok(sample)
}
