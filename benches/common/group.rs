//! Swap and memory control groups, for the kernel's own paging under a limit.
//!
//! Every guard undoes what it did when it is dropped.

use crate::{Failure, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A name that no other run uses.
pub(crate) fn fresh_name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let next = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("farheap-bench-{}-{next}", std::process::id())
}

/// Runs a tool to its end; its output without the newline.
pub(crate) fn tool(name: &str, args: &[&str]) -> Result<String> {
    let output = Command::new(name).args(args).output();
    let output = output.map_err(|error| Failure::Skipped(format!("{name}: {error}")))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::Skipped(format!("{name} {}: {}", args.join(" "), why.trim())));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Swap on a file or device, in use until dropped. The whole machine may swap to it.
#[derive(Debug)]
pub(crate) struct SwapSpace {
    path: String,
}

impl SwapSpace {
    /// Needs root. A file has no holes and lies on a disk: swap on a file in memory stops the machine.
    pub(crate) fn start(path: &Path) -> Result<SwapSpace> {
        let space = SwapSpace { path: path.to_str().expect("the name is UTF-8").to_owned() };
        tool("chmod", &["600", &space.path])?;
        tool("mkswap", &[&space.path])?;
        tool("swapon", &[&space.path])?;
        Ok(space)
    }
}

impl Drop for SwapSpace {
    fn drop(&mut self) {
        // Fails when it never came on, which `start` has said.
        drop(tool("swapoff", &[&self.path]));
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

    pub(crate) fn dir(&self) -> &Path {
        &self.dir
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
                // Busy while the kernel counts the child in. It tells nobody when that ends.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
        eprintln!("{} could not be removed", self.dir.display());
    }
}
