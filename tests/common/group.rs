//! Control groups with a memory limit.

use farheap::ByteCount;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

/// Names the group that a child joins.
const GROUP: &str = "FARHEAP_TEST_GROUP";

/// A control group, removed when dropped.
pub(crate) struct Group(PathBuf);

impl Group {
    /// `None` where none can be made.
    pub(crate) fn new(limit: ByteCount) -> Option<Group> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("farheap-test-{}-{number}", std::process::id());
        let versions =
            [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        versions.into_iter().find_map(|(mount, file)| {
            let group = Group(Path::new(mount).join(&name));
            fs::create_dir(&group.0).ok()?;
            // Not created: only what the kernel offers.
            let mut file = File::options().write(true).open(group.0.join(file)).ok()?;
            file.write_all(limit.get().to_string().as_bytes()).ok()?;
            Some(group)
        })
    }

    /// Lets a child [`join`](Group::join).
    pub(crate) fn admit(&self, child: &mut Command) {
        child.env(GROUP, self.0.join("cgroup.procs"));
    }

    /// Moves this process to the group that admitted it, if one did.
    pub(crate) fn join() {
        if let Some(procs) = std::env::var_os(GROUP) {
            fs::write(procs, std::process::id().to_string()).expect("joins the group");
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The children have ended, and so has their membership.
        let _ = fs::remove_dir(&self.0);
    }
}
