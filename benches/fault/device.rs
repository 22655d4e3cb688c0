//! Files, loop devices, swap and memory groups that exist for the length of a row.
//!
//! Every guard undoes what it did when it is dropped: after an error, a failed check, or an
//! interrupt, which ends the round that runs (see [`catch_interrupts`](crate::os)).

use crate::os::{self, write_pattern};
use crate::{Failure, Result};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A name that no other run uses.
fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("farheap-fault-{}-{next}", std::process::id())
}

/// Runs a tool to its end; its output without the newline.
fn tool(name: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(name).args(args).output();
    let output = output.map_err(|error| Failure::Skipped(format!("{name}: {error}")))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Skipped(format!("{name} {}: {}", args.join(" "), why.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

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
        if !os::is_root() {
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

/// Swap space, in use until dropped. The whole machine may swap to it.
#[derive(Debug)]
pub(crate) struct Swap {
    on: SwapOn,
}

impl Swap {
    pub(crate) fn on_loop(bytes: usize) -> Result<Swap> {
        Swap::start(SwapOn::Loop(LoopDevice::create(bytes)?))
    }

    pub(crate) fn on_file(dir: &Path, bytes: usize) -> Result<Swap> {
        if !os::is_root() {
            return Err(Failure::Skipped("swap needs root".to_owned()));
        }
        Swap::start(SwapOn::File(PatternFile::create(dir, bytes)?))
    }

    fn start(on: SwapOn) -> Result<Swap> {
        let swap = Swap { on };
        tool("chmod", &["600", swap.path()])?;
        tool("mkswap", &[swap.path()])?;
        tool("swapon", &[swap.path()])?;
        Ok(swap)
    }

    fn path(&self) -> &str {
        let path = match &self.on {
            SwapOn::Loop(device) => &device.path,
            SwapOn::File(file) => &file.path,
        };
        path.to_str().expect("the name is ASCII")
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // Fails when it never came on, which `start` has said.
        drop(tool("swapoff", &[self.path()]));
    }
}

/// A memory group with a limit, for one child process.
#[derive(Debug)]
pub(crate) struct MemoryGroup {
    dir: PathBuf,
}

impl MemoryGroup {
    /// A group whose processes may use `limit` bytes of memory, and swap or not. Needs root.
    pub(crate) fn create(limit: usize, may_swap: bool) -> Result<MemoryGroup> {
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (parent, limit_file, no_swap_file) = if v1.join("memory.limit_in_bytes").exists() {
            (v1.to_owned(), "memory.limit_in_bytes", "memory.swappiness")
        } else {
            (unified()?, "memory.max", "memory.swap.max")
        };
        let dir = parent.join(fresh_name());
        let why = |error| Failure::Skipped(format!("{}: {error}", dir.display()));
        fs::create_dir(&dir).map_err(why)?;
        let group = MemoryGroup { dir: dir.clone() };
        fs::write(dir.join(limit_file), limit.to_string()).map_err(why)?;
        if !may_swap {
            fs::write(dir.join(no_swap_file), "0").map_err(why)?;
        }
        Ok(group)
    }

    pub(crate) fn add(&self, process: u32) -> Result<()> {
        let file = self.dir.join("cgroup.procs");
        fs::write(file, process.to_string()).map_err(Failure::io)
    }
}

/// The root of the unified hierarchy, with the memory controller on for its groups.
fn unified() -> Result<PathBuf> {
    for dir in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].map(PathBuf::from) {
        let controllers = fs::read_to_string(dir.join("cgroup.controllers")).unwrap_or_default();
        if controllers.split_whitespace().any(|name| name == "memory") {
            let on = fs::write(dir.join("cgroup.subtree_control"), "+memory");
            on.map_err(|error| Failure::Skipped(format!("memory groups: {error}")))?;
            return Ok(dir);
        }
    }
    Err(Failure::Skipped("no memory controller of control groups".to_owned()))
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The child has been waited for, but the kernel may take a moment to notice.
        const TRIES: u32 = 50;
        const RETRY: Duration = Duration::from_millis(20);
        for _ in 0..TRIES {
            match fs::remove_dir(&self.dir) {
                Ok(()) => return,
                // Busy as long as the kernel counts the child in, and it tells nobody when it ceases.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
        eprintln!("fault: {} could not be removed", self.dir.display());
    }
}
