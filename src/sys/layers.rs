//! Which regular files lie below a block device, and which loop devices on a file, as sysfs tells.
//!
//! The kernel's claims (`O_EXCL`) and locks (`flock(2)`) each end at a loop device: one that claims
//! the loop device and one that locks the file behind it do not see each other. Safe code.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Devices looked at below one device: a mapped device may lie on several, these on others.
const DEVICES_MAX: usize = 256;

/// A file that a loop device keeps its bytes in.
#[derive(Debug)]
pub(crate) struct Below {
    pub(crate) path: PathBuf,
    /// Opened for reading.
    pub(crate) file: io::Result<OwnedFd>,
}

/// The files below the block device with these numbers, directly or through partitions and mapped
/// devices.
pub(crate) fn files_below(device: (u32, u32)) -> Vec<Below> {
    let (major, minor) = device;
    let mut files = Vec::new();
    let mut next = VecDeque::from([PathBuf::from(format!("/sys/dev/block/{major}:{minor}"))]);
    for _ in 0..DEVICES_MAX {
        let Some(dir) = next.pop_front().map(fs::canonicalize) else { break };
        let Ok(dir) = dir else { continue };
        if let Some(path) = backing_file(&dir) {
            let file = fs::File::open(&path).map(OwnedFd::from);
            files.push(Below { path, file });
        }
        if dir.join("partition").exists() {
            next.extend(dir.parent().map(Path::to_path_buf));
        }
        let slaves = fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
        next.extend(slaves.map(|slave| slave.path()));
    }
    files
}

/// The loop device that keeps its bytes in the file with this device and inode number.
pub(crate) fn loop_device_over(id: (u64, u64)) -> Option<PathBuf> {
    let devices = fs::read_dir("/sys/block").ok()?.flatten();
    let over = devices.map(|entry| entry.path()).find(|dir| {
        let file = backing_file(dir).and_then(|path| fs::metadata(path).ok());
        file.is_some_and(|file| (file.dev(), file.ino()) == id)
    });
    Some(Path::new("/dev").join(over?.file_name()?))
}

/// The file behind a loop device, of its directory in sysfs.
fn backing_file(dir: &Path) -> Option<PathBuf> {
    let mut path = fs::read(dir.join("loop/backing_file")).ok()?;
    if path.last() == Some(&b'\n') {
        path.pop();
    }
    Some(PathBuf::from(std::ffi::OsString::from_vec(path)))
}
