//! What several benchmarks need.

use farheap::ByteCount;
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A file without a name: its space is free again when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Unnamed(File);

impl Unnamed {
    /// A sparse file of this length in `dir`, or where temporary files go.
    pub(crate) fn new(dir: Option<&Path>, len: ByteCount) -> std::io::Result<Unnamed> {
        let file = match dir {
            Some(dir) => tempfile::tempfile_in(dir)?,
            None => tempfile::tempfile()?,
        };
        // tempfile leaves it open to other users where O_TMPFILE makes it, and a store would say so.
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.set_len(len.get())?;
        Ok(Unnamed(file))
    }

    /// What opens it, in this process and while this lives.
    pub(crate) fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.0.as_raw_fd()))
    }
}
