//! Where evicted pages could go: directories, files and block devices, looked at.
//!
//! [`Directory::probe`] writes a temporary file that is gone afterwards; [`StoreDevice::probe`] writes
//! nothing at all. The library's store makes its own checks when it opens.

use crate::probe::{read_line, read_number};
use farheap::ByteCount;
use farheap::probe::{self, Contents};
use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes that a direct transfer is tried with.
const BLOCK_LEN: usize = 4096;
/// Sectors of sysfs, whatever the device's own block size (kernel.org: block layer statistics).
const SECTOR_LEN: u64 = 512;

/// A buffer that direct I/O accepts.
#[repr(C, align(4096))]
struct Block([u8; BLOCK_LEN]);

/// A directory for the temporary file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Directory {
    /// Free space for this user.
    pub(crate) free: ByteCount,
    /// The file system's kind as `/proc/self/mountinfo` names it (`ext4`, `tmpfs`), if found.
    pub(crate) file_system: Option<String>,
    /// Why 4 KiB written with `O_DIRECT` could not be read back; `None` if they could.
    pub(crate) direct_io_refusal: Option<String>,
}

impl Directory {
    /// Looks at a directory by writing and reading a temporary file in it.
    ///
    /// # Errors
    /// When `path` is not a directory or no file can be written there.
    pub(crate) fn probe(path: &Path) -> io::Result<Directory> {
        if !fs::metadata(path)?.is_dir() {
            return Err(io::Error::from(io::ErrorKind::NotADirectory));
        }
        round_trip(&unlinked_file(path, 0)?)?;
        let direct = unlinked_file(path, libc::O_DIRECT).and_then(|file| round_trip(&file));
        let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Ok(Directory {
            free: free_space(path)?,
            file_system: file_system(&mountinfo, &fs::canonicalize(path)?),
            direct_io_refusal: direct.err().map(|error| error.to_string()),
        })
    }
}

/// Creates a file without a name, readable by its owner only.
fn unlinked_file(dir: &Path, flags: i32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    match options.custom_flags(flags | libc::O_TMPFILE).open(dir) {
        // File systems without O_TMPFILE say so with one of these (open(2)).
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::EOPNOTSUPP | libc::EISDIR | libc::EINVAL)
            ) =>
        {
            let path = dir.join(format!(".farheap-probe-{}", std::process::id()));
            let opened = options.create_new(true).custom_flags(flags).open(&path);
            // O_DIRECT is refused only after the file was made (open(2), EINVAL).
            let removed = fs::remove_file(&path);
            let file = opened?;
            removed.map(|()| file)
        }
        opened => opened,
    }
}

/// Writes a block and reads it back.
fn round_trip(file: &File) -> io::Result<()> {
    let written = Box::new(Block([0xA5; BLOCK_LEN]));
    let mut read = Box::new(Block([0; BLOCK_LEN]));
    file.write_all_at(&written.0, 0)?;
    file.read_exact_at(&mut read.0, 0)?;
    if read.0 == written.0 {
        Ok(())
    } else {
        Err(io::Error::other("the bytes read are not the bytes written"))
    }
}

fn free_space(dir: &Path) -> io::Result<ByteCount> {
    let answer = statvfs(dir)?;
    Ok(ByteCount(answer.blocks_available().saturating_mul(answer.fragment_size())))
}

/// The kind of the file system that holds `path`: of the longest mount point above it.
fn file_system(mountinfo: &str, path: &Path) -> Option<String> {
    let mounts = mountinfo.lines().filter_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        let point = mount.split(' ').nth(4)?;
        path.starts_with(point).then(|| (point.len(), file_system.split(' ').next()))
    });
    // Of equally long ones the last is mounted on top.
    mounts.max_by_key(|(len, _)| *len)?.1.map(str::to_owned)
}

/// File that a device path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// A block device.
    Block,
    /// A regular file.
    File,
}

/// A block device or file given as the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreDevice {
    /// Block device or file.
    pub(crate) kind: DeviceKind,
    /// Its size.
    pub(crate) size: ByteCount,
    /// Bytes of a logical block, of a block device.
    pub(crate) block: Option<ByteCount>,
    /// True if freed space can be discarded, of a block device.
    pub(crate) discard: Option<bool>,
    /// True if it refuses writes: the device's flag, or the file's permissions for this user.
    pub(crate) read_only: bool,
    /// The user that a regular file belongs to, if that is not the one that this process runs as:
    /// it is refused then.
    pub(crate) other_owner: Option<u32>,
    /// True if other users than the owner may read or write a regular file.
    pub(crate) is_open_to_others: bool,
    /// True if a file system or another program holds the block device.
    pub(crate) busy: bool,
    /// Its content, as far as that is looked at.
    pub(crate) contents: Contents,
    /// Why it cannot be opened with `O_DIRECT`; `None` when it can.
    pub(crate) direct_io_refusal: Option<String>,
}

impl StoreDevice {
    /// Looks at a block device or file without writing to it.
    ///
    /// # Errors
    /// When it cannot be opened for reading, or is neither a block device nor a regular file.
    pub(crate) fn probe(path: &Path) -> io::Result<StoreDevice> {
        let meta = fs::metadata(path)?;
        let kind = if meta.file_type().is_block_device() {
            DeviceKind::Block
        } else if meta.is_file() {
            DeviceKind::File
        } else {
            let message = "is neither a block device nor a regular file";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        };
        let file = File::open(path)?;
        let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
        let queue = BlockFacts::of(&meta, kind);
        // Neither truncates nor creates. A kernel may refuse it for a mounted device.
        let writable = OpenOptions::new().write(true).open(path);
        let size = queue.as_ref().map_or(ByteCount(meta.len()), |queue| queue.size);
        Ok(StoreDevice {
            kind,
            size,
            block: queue.as_ref().map(|queue| queue.block),
            discard: queue.as_ref().map(|queue| queue.discard),
            read_only: queue.is_some_and(|queue| queue.read_only) || writable.is_err(),
            other_owner: (kind == DeviceKind::File && meta.uid() != geteuid().as_raw())
                .then(|| meta.uid()),
            is_open_to_others: kind == DeviceKind::File && meta.mode() & 0o077 != 0,
            busy: kind == DeviceKind::Block && is_busy(path),
            contents: probe::contents(&file, size)?,
            direct_io_refusal: direct.err().map(|error| error.to_string()),
        })
    }
}

/// Facts of sysfs about a block device.
struct BlockFacts {
    size: ByteCount,
    block: ByteCount,
    discard: bool,
    read_only: bool,
}

impl BlockFacts {
    fn of(meta: &fs::Metadata, kind: DeviceKind) -> Option<BlockFacts> {
        if kind != DeviceKind::Block {
            return None;
        }
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let dir = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        // A partition has no queue of its own: it is in its disk's directory.
        let queue = [dir.join("queue"), dir.join("../queue")];
        let of_queue = |name: &str| queue.iter().find_map(|queue| read_number(queue.join(name)));
        Some(BlockFacts {
            size: ByteCount(read_number(dir.join("size"))?.saturating_mul(SECTOR_LEN)),
            block: ByteCount(of_queue("logical_block_size").unwrap_or(SECTOR_LEN)),
            discard: of_queue("discard_max_bytes").is_some_and(|bytes| bytes > 0),
            read_only: read_line(dir.join("ro")).as_deref() == Some("1"),
        })
    }
}

/// True if a block device is mounted or claimed: opening it with O_EXCL, without O_CREAT, then
/// fails with EBUSY (open(2)).
fn is_busy(path: &Path) -> bool {
    let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_is_that_of_the_longest_mount_point_above() {
        let mountinfo = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                         2 1 0:9 / /tmp rw - tmpfs tmpfs rw\n";
        assert_eq!(file_system(mountinfo, Path::new("/tmp/x")).as_deref(), Some("tmpfs"));
        assert_eq!(file_system(mountinfo, Path::new("/tmpx")).as_deref(), Some("ext4"));
    }

    #[test]
    fn a_writable_directory_passes_and_is_left_empty() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let found = Directory::probe(dir.path()).expect("probe");
        assert!(found.free > ByteCount::ZERO);
        assert_eq!(fs::read_dir(dir.path()).expect("read_dir").count(), 0);
    }

    #[test]
    fn a_file_is_not_a_directory_and_a_directory_is_not_a_device() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        let error = Directory::probe(file.path()).expect_err("a file");
        assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
        let error = StoreDevice::probe(Path::new("/")).expect_err("a directory");
        assert!(error.to_string().contains("neither a block device nor a regular file"));
    }

    #[test]
    fn what_a_file_holds_is_recognized() {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.as_file().set_len(1 << 20).expect("set_len");
        let empty = StoreDevice::probe(file.path()).expect("probe");
        assert_eq!((empty.kind, empty.size), (DeviceKind::File, ByteCount::mib(1)));
        assert_eq!(empty.contents, Contents::Zeros);
        assert!(!empty.read_only && !empty.busy);
        file.as_file().write_all_at(b"ext", 1080).expect("write");
        let contents = || StoreDevice::probe(file.path()).expect("probe").contents;
        assert_eq!(contents(), Contents::Data { offset: 1080 });
    }
}
