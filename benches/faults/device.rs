//! Files, loop devices and swap that exist for the length of a row.
//!
//! Every guard undoes what it did when it is dropped: after an error, a failed check, or an
//! interrupt, which ends the round that runs (see [`catch_interrupts`](crate::process)).

use crate::group::{SwapSpace, fresh_name, tool};
use crate::os::{self, write_pattern};
use crate::{Failure, Result, process};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A file with the pattern in the directory for temporary files, removed when dropped.
#[derive(Debug)]
pub(crate) struct PatternFile {
    path: PathBuf,
    file: File,
}

impl PatternFile {
    pub(crate) fn create(dir: &Path, bytes: usize) -> Result<PatternFile> {
        let path = dir.join(fresh_name());
        File::create(&path).map_err(Failure::io)?;
        let file = os::open_direct(&path).inspect_err(|_| drop(fs::remove_file(&path)));
        let file = PatternFile { file: file?, path };
        write_pattern(&file.file, bytes)?;
        Ok(file)
    }
}

impl Drop for PatternFile {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.path));
    }
}

/// A directory in memory that is never swapped out.
///
/// Swap on a loop device over an ordinary tmpfs stops for ever: the kernel pages the device's own
/// file out to it, and the one thread that serves the device waits for itself.
#[derive(Debug)]
struct MemoryDir {
    path: PathBuf,
}

impl MemoryDir {
    fn mount() -> Result<MemoryDir> {
        let path = std::env::temp_dir().join(fresh_name());
        fs::create_dir(&path).map_err(Failure::io)?;
        let name = path.to_str().expect("the name is UTF-8");
        let options = "size=100%,mode=700,noswap";
        if let Err(why) = tool("mount", &["-t", "tmpfs", "-o", options, "farheap-fault", name]) {
            drop(fs::remove_dir(&path));
            return Err(why);
        }
        Ok(MemoryDir { path })
    }
}

impl Drop for MemoryDir {
    fn drop(&mut self) {
        let name = self.path.to_str().expect("the name is UTF-8");
        // Lazily: the device may let go of its file a moment later.
        if let Err(error) = tool("umount", &["-l", name]) {
            eprintln!("fault: {error}");
        }
        drop(fs::remove_dir(&self.path));
    }
}

/// A block device in memory: a loop device with direct I/O over a file on tmpfs.
#[derive(Debug)]
pub(crate) struct LoopDevice {
    path: PathBuf,
    _dir: MemoryDir,
}

impl LoopDevice {
    /// Needs root.
    pub(crate) fn create(bytes: usize) -> Result<LoopDevice> {
        if !process::is_root() {
            return Err(Failure::Skipped("loop devices need root".to_owned()));
        }
        let dir = MemoryDir::mount()?;
        let backing = dir.path.join("device");
        let why = |error| Failure::Skipped(format!("{}: {error}", backing.display()));
        let file = File::create_new(&backing).map_err(why)?;
        file.set_len(bytes as u64).map_err(why)?;
        let name = backing.to_str().expect("the name is UTF-8");
        let path = tool("losetup", &["-f", "--show", "--direct-io=on", name])?;
        let device = LoopDevice { path: path.into(), _dir: dir };
        // All of its memory now: a memory group must not be charged for it later.
        write_pattern(&os::open_direct(&device.path)?, bytes)?;
        Ok(device)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let path = self.path.to_str().expect("the name is ASCII");
        if let Err(error) = tool("losetup", &["-d", path]) {
            eprintln!("fault: {error}");
        }
    }
}

/// A device or file with the pattern, for baselines.
#[derive(Debug)]
pub(crate) enum Target {
    File(PatternFile),
    Loop { device: LoopDevice, file: File },
}

impl Target {
    pub(crate) fn on_loop(bytes: usize) -> Result<Target> {
        let device = LoopDevice::create(bytes)?;
        let file = os::open_direct(device.path())?;
        Ok(Target::Loop { device, file })
    }

    /// Open for direct I/O.
    pub(crate) fn file(&self) -> &File {
        match self {
            Target::File(file) => &file.file,
            Target::Loop { file, .. } => file,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        match self {
            Target::File(file) => &file.path,
            Target::Loop { device, .. } => device.path(),
        }
    }
}

/// What swap is on.
#[derive(Debug)]
enum SwapOn {
    Loop(LoopDevice),
    File(PatternFile),
}

/// Swap on something of its own. The whole machine may swap to it.
#[derive(Debug)]
pub(crate) struct Swap {
    /// Before what it is on: it is off when that goes.
    _space: SwapSpace,
    _on: SwapOn,
}

impl Swap {
    pub(crate) fn on_loop(bytes: usize) -> Result<Swap> {
        Swap::start(SwapOn::Loop(LoopDevice::create(bytes)?))
    }

    pub(crate) fn on_file(dir: &Path, bytes: usize) -> Result<Swap> {
        if !process::is_root() {
            return Err(Failure::Skipped("swap needs root".to_owned()));
        }
        Swap::start(SwapOn::File(PatternFile::create(dir, bytes)?))
    }

    fn start(on: SwapOn) -> Result<Swap> {
        let path = match &on {
            SwapOn::Loop(device) => &device.path,
            SwapOn::File(file) => &file.path,
        };
        Ok(Swap { _space: SwapSpace::start(path)?, _on: on })
    }
}
