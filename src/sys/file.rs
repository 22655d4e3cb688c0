//! Regular files and block devices: opening, inspecting, moving bytes, giving space back.
//!
//! [`BlockStore`](crate::store::BlockStore) turns the [`Errno`]s into errors that name the path.
//! All descriptors are close-on-exec. Moving bytes allocates nothing and takes no lock.

#![expect(unsafe_code, reason = "calls the kernel on files and devices")]

use super::{environment, raw};
use nix::errno::Errno as Refusal;
use nix::fcntl::{self, AtFlags, FallocateFlags, OFlag};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::stat::{self, Mode};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;
use nix::sys::uio::pread;
use nix::unistd::{AccessFlags, Whence, faccessat, fdatasync, fsync, ftruncate, lseek64, syncfs};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Answer of the kernel to a call.
pub(crate) type SysResult<T = ()> = std::result::Result<T, Errno>;

/// The reason the kernel gave for refusing a call. See `errno(3)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) i32);

impl From<nix::errno::Errno> for Errno {
    fn from(errno: nix::errno::Errno) -> Errno {
        Errno(raw(errno))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&std::io::Error::from_raw_os_error(self.0), f)
    }
}

/// How the kernel treats written bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Caching {
    /// `O_DIRECT`: straight to the device; a full or failing device says so at the write.
    Direct,
    /// Through the page cache, where there is no `O_DIRECT`. `O_DSYNC`: a write reports the
    /// device's error instead of leaving it to an `fsync` that never comes.
    Buffered,
}

impl Caching {
    const fn flags(self) -> OFlag {
        match self {
            Caching::Direct => OFlag::O_DIRECT,
            Caching::Buffered => OFlag::O_DSYNC,
        }
    }
}

/// Claim on a block device by opening it, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// `O_EXCL` without `O_CREAT`: fails with `EBUSY` while mounted or claimed (open(2)).
    Exclusive,
    /// Plain.
    Shared,
}

/// File that a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    Block,
    /// A directory.
    Directory,
    /// A character device.
    Character,
    /// A pipe.
    Fifo,
    /// A socket or anything else.
    Other,
}

/// Result of `fstat(2)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileInfo {
    /// The kind of file.
    pub(crate) kind: FileKind,
    /// Bytes of a regular file; 0 for a device.
    pub(crate) len: u64,
    /// Bytes of file-system blocks that a regular file occupies.
    pub(crate) occupied: u64,
    /// Major and minor number of a device.
    pub(crate) device: (u32, u32),
    /// The numbers of its file system's device and of its inode.
    pub(crate) id: (u64, u64),
    /// The user that the file belongs to.
    pub(crate) owner: u32,
    /// Permissions: the last nine bits of the mode.
    pub(crate) permissions: u32,
}

/// Opens what exists at `path` for reading and writing. See `open(2)`.
pub(crate) fn open(path: &Path, caching: Caching, claim: Claim) -> Result<OwnedFd, Errno> {
    let claim = match claim {
        Claim::Exclusive => OFlag::O_EXCL,
        Claim::Shared => OFlag::empty(),
    };
    open_with(path, OFlag::O_RDWR | OFlag::O_NOCTTY | claim | caching.flags())
}

/// Opens what exists at `path` for reading only. See `open(2)`.
pub(crate) fn open_read_only(path: &Path, caching: Caching) -> Result<OwnedFd, Errno> {
    open_with(path, OFlag::O_RDONLY | OFlag::O_NOCTTY | caching.flags())
}

/// Creates a regular file at `path`, where there is none, for its owner only. See `open(2)`.
///
/// With [`Caching::Direct`] on a file system without it the call fails with `EINVAL`; the file may
/// exist nevertheless.
pub(crate) fn create(path: &Path, caching: Caching) -> Result<OwnedFd, Errno> {
    open_with(path, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | caching.flags())
}

/// Creates a file without a name in `dir`, for its owner only: it is gone when the last descriptor
/// closes, also after a crash. See `O_TMPFILE` in `open(2)`.
pub(crate) fn create_unnamed(dir: &Path, caching: Caching) -> Result<OwnedFd, Errno> {
    open_with(dir, OFlag::O_RDWR | OFlag::O_TMPFILE | OFlag::O_EXCL | caching.flags())
}

fn open_with(path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    retry(|| fcntl::open(path, flags | OFlag::O_CLOEXEC, mode))
}

/// Returns what `path` leads to, symbolic links followed. See `stat(2)`.
pub(crate) fn kind_of(path: &Path) -> Result<FileKind, Errno> {
    Ok(kind_from_mode(stat::stat(path)?.st_mode))
}

/// Describes an open file. See `fstat(2)`.
pub(crate) fn info(fd: BorrowedFd<'_>) -> Result<FileInfo, Errno> {
    let stat = stat::fstat(fd)?;
    Ok(FileInfo {
        kind: kind_from_mode(stat.st_mode),
        len: u64::try_from(stat.st_size).unwrap_or(0),
        // Always units of 512 bytes, whatever the file system's block size (stat(3type)).
        occupied: u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512),
        device: (libc::major(stat.st_rdev), libc::minor(stat.st_rdev)),
        id: (stat.st_dev, stat.st_ino),
        owner: stat.st_uid,
        permissions: stat.st_mode & 0o777,
    })
}

/// Sets the permissions of an open file. See `fchmod(2)`.
pub(crate) fn set_permissions(fd: BorrowedFd<'_>, permissions: u32) -> Result<(), Errno> {
    Ok(stat::fchmod(fd, Mode::from_bits_truncate(permissions))?)
}

/// Returns the user that this process runs as. See `geteuid(2)`.
pub(crate) fn user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Returns the bytes up to which this process may write a regular file; a call that goes further
/// ends the process with SIGXFSZ. See `RLIMIT_FSIZE` in `getrlimit(2)`.
pub(crate) fn len_max() -> u64 {
    getrlimit(Resource::RLIMIT_FSIZE).map_or(libc::RLIM_INFINITY, |(soft, _)| soft)
}

fn kind_from_mode(mode: libc::mode_t) -> FileKind {
    match mode & libc::S_IFMT {
        libc::S_IFREG => FileKind::Regular,
        libc::S_IFBLK => FileKind::Block,
        libc::S_IFDIR => FileKind::Directory,
        libc::S_IFCHR => FileKind::Character,
        libc::S_IFIFO => FileKind::Fifo,
        _ => FileKind::Other,
    }
}

/// Returns the alignment that `O_DIRECT` wants of offsets, where the kernel tells: `Some(0)` means
/// that the file does not support it. See `STATX_DIOALIGN` in `statx(2)` (Linux 6.1).
pub(crate) fn direct_align(fd: BorrowedFd<'_>) -> Option<u32> {
    let mut statx = std::mem::MaybeUninit::<libc::statx>::zeroed();
    let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: the empty path is a C string, the buffer a `statx`; both outlive the call.
    let result =
        unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, mask, statx.as_mut_ptr()) };
    if result != 0 {
        return None;
    }
    // SAFETY: zeroed above, which is a valid value, and filled by the call.
    let statx = unsafe { statx.assume_init() };
    (statx.stx_mask & libc::STATX_DIOALIGN != 0).then_some(statx.stx_dio_offset_align)
}

/// Returns the bytes that the file's file system has left for this user. See `fstatvfs(3)`.
pub(crate) fn available(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    let stat = fstatvfs(fd)?;
    Ok(stat.blocks_available().saturating_mul(stat.fragment_size()))
}

/// Returns whether the file lives in memory: on a tmpfs or ramfs. See `fstatfs(2)`.
pub(crate) fn is_in_memory(fd: BorrowedFd<'_>) -> bool {
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    fstatfs(fd).is_ok_and(|stat| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&stat.filesystem_type()))
}

/// Returns whether a directory lives in memory and whether this process may make files in it.
pub(crate) fn look_at_dir(path: &Path) -> Result<DirInfo, Errno> {
    let fd = open_with(path, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
    let wanted = AccessFlags::W_OK | AccessFlags::X_OK;
    let may = faccessat(&fd, c".", wanted, AtFlags::AT_EACCESS);
    Ok(DirInfo { in_memory: is_in_memory(fd.as_fd()), writable: may.is_ok() })
}

/// Result of [`look_at_dir`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DirInfo {
    pub(crate) in_memory: bool,
    pub(crate) writable: bool,
}

/// The directory of temporary files when none is named: `$TMPDIR`, else `/tmp`, or `/var/tmp` where
/// `/tmp` is in memory (tmpfs) and `/var/tmp` is not: a file in memory frees no memory.
#[must_use]
pub fn temporary_dir() -> PathBuf {
    if let Some(dir) = environment::variable("TMPDIR") {
        return dir.into();
    }
    let [usual, on_disk] = ["/tmp", "/var/tmp"].map(Path::new);
    let is_better = || look_at_dir(on_disk).is_ok_and(|dir| !dir.in_memory && dir.writable);
    if in_memory(usual) && is_better() { on_disk } else { usual }.to_path_buf()
}

fn in_memory(dir: &Path) -> bool {
    look_at_dir(dir).is_ok_and(|dir| dir.in_memory)
}

/// Sets the length of a regular file; what is added is a hole. See `ftruncate(2)`.
pub(crate) fn set_len(fd: BorrowedFd<'_>, len: u64) -> Result<(), Errno> {
    let len = libc::off_t::try_from(len).map_err(|_| Errno(libc::EFBIG))?;
    retry(|| ftruncate(fd, len))
}

/// The openers that a lock keeps out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lock {
    /// All that lock the file too.
    Exclusive,
    /// Those that lock it exclusively.
    Shared,
}

/// Locks the file against other openers that lock it too, without waiting: `EWOULDBLOCK` when it
/// is locked. The lock goes with the descriptor. See `flock(2)`.
pub(crate) fn lock(fd: BorrowedFd<'_>, lock: Lock) -> Result<(), Errno> {
    // Not `nix`'s `Flock`, which owns the descriptor.
    let how = if lock == Lock::Exclusive { libc::LOCK_EX } else { libc::LOCK_SH } | libc::LOCK_NB;
    // SAFETY: takes no pointers.
    retry(|| Refusal::result(unsafe { libc::flock(fd.as_raw_fd(), how) })).map(drop)
}

/// Requests of `linux/fs.h`.
mod ioctl {
    use linux_raw_sys::ioctl::{BLKDISCARD, BLKGETSIZE64, BLKROGET, BLKSSZGET};

    nix::ioctl_read_bad!(device_len, BLKGETSIZE64, u64);
    nix::ioctl_read_bad!(logical_block_len, BLKSSZGET, libc::c_int);
    nix::ioctl_read_bad!(read_only, BLKROGET, libc::c_int);
    nix::ioctl_write_ptr_bad!(discard, BLKDISCARD, [u64; 2]);
}

/// Returns the size of a block device in bytes.
pub(crate) fn device_len(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    let mut len = 0;
    // SAFETY: the request stores a `u64` (linux/fs.h).
    unsafe { ioctl::device_len(fd.as_raw_fd(), &raw mut len) }?;
    Ok(len)
}

/// Returns the logical block size of a block device: the smallest unit it takes.
pub(crate) fn logical_block_len(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut len = 0;
    // SAFETY: the request stores an `int` (linux/fs.h).
    unsafe { ioctl::logical_block_len(fd.as_raw_fd(), &raw mut len) }?;
    Ok(u32::try_from(len).unwrap_or(0))
}

/// Returns whether a block device refuses writes, which opening it for writing does not tell root.
pub(crate) fn is_read_only(fd: BorrowedFd<'_>) -> Result<bool, Errno> {
    let mut read_only = 0;
    // SAFETY: the request stores an `int` (linux/fs.h).
    unsafe { ioctl::read_only(fd.as_raw_fd(), &raw mut read_only) }?;
    Ok(read_only != 0)
}

/// Returns whether a block device can give space back, as sysfs tells; `None`: it does not tell.
pub(crate) fn can_discard(device: (u32, u32)) -> Option<bool> {
    let (major, minor) = device;
    // A partition has no queue of its own; its parent directory is the disk's.
    ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("/sys/dev/block/{major}:{minor}/{queue}/discard_max_bytes");
        let text = std::fs::read_to_string(path).ok()?;
        Some(text.trim().parse::<u64>().ok()? > 0)
    })
}

/// Waits until the device has what was written to the file, and of the file what it takes to read that
/// back: its length and where its blocks are. See `fdatasync(2)`.
pub(crate) fn sync_data(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    retry(|| fdatasync(fd))
}

/// Waits until the device has the directory entry of the file at `path`, which `fd` has open.
pub(crate) fn sync_name(fd: BorrowedFd<'_>, path: &Path) -> Result<(), Errno> {
    // A file that was unlinked, and is found by its descriptor in `/proc`, has no name to lose.
    if stat::fstat(fd)?.st_nlink == 0 {
        return Ok(());
    }
    // The entry of the file that a symbolic link leads to.
    let path = std::fs::canonicalize(path).ok();
    let dir = path.as_deref().and_then(Path::parent);
    match dir.map(|dir| open_with(dir, OFlag::O_RDONLY | OFlag::O_DIRECTORY)) {
        Some(Ok(dir)) => retry(|| fsync(dir.as_fd())),
        // A directory that may be entered but not listed, or one that the file was moved out of: all
        // of its file system then.
        _ => retry(|| syncfs(fd)),
    }
}

/// Frees the blocks of a range of a regular file or device, which reads as zero afterwards.
/// `EOPNOTSUPP` where that is impossible. See `FALLOC_FL_PUNCH_HOLE` in `fallocate(2)`.
pub(crate) fn punch_hole(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(fd, mode, offset, len)
}

/// Allocates the blocks of a range of a regular file, whose bytes stay as they are: a write there
/// cannot meet a full file system. `ENOSPC`, or `EOPNOTSUPP` where that is impossible. See
/// `fallocate(2)`.
pub(crate) fn reserve(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    fallocate(fd, FallocateFlags::FALLOC_FL_KEEP_SIZE, offset, len)
}

/// Makes a range of a regular file read as zero and keeps its blocks. `EOPNOTSUPP` where that is
/// impossible. See `FALLOC_FL_ZERO_RANGE` in `fallocate(2)`.
pub(crate) fn forget(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let mode = FallocateFlags::FALLOC_FL_ZERO_RANGE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(fd, mode, offset, len)
}

fn fallocate(fd: BorrowedFd<'_>, mode: FallocateFlags, offset: u64, len: u64) -> Result<(), Errno> {
    let offset = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EFBIG))?;
    let len = libc::off_t::try_from(len).map_err(|_| Errno(libc::EFBIG))?;
    retry(|| fcntl::fallocate(fd, mode, offset, len))
}

/// Tells a block device that a range is not needed; its bytes are unspecified afterwards.
pub(crate) fn discard_blocks(fd: BorrowedFd<'_>, offset: u64, len: u64) -> Result<(), Errno> {
    let range = [offset, len];
    // SAFETY: the request reads two `u64` (linux/fs.h).
    retry(|| unsafe { ioctl::discard(fd.as_raw_fd(), &raw const range) }).map(drop)
}

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoDirection {
    /// File to memory.
    Read,
    /// Memory to file.
    Write,
}

/// One buffer of a vectored transfer: the kernel's `iovec` (readv(2)).
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct IoVec(libc::iovec);

// SAFETY: an address and a length; moving them between threads does nothing to the memory.
unsafe impl Send for IoVec {}
// SAFETY: as above; nothing of it changes behind a shared reference.
unsafe impl Sync for IoVec {}

impl IoVec {
    /// No bytes.
    pub(crate) const EMPTY: IoVec =
        IoVec(libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 });

    pub(crate) fn new(ptr: *mut u8, len: usize) -> IoVec {
        IoVec(libc::iovec { iov_base: ptr.cast(), iov_len: len })
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Cuts the first `moved` bytes off `iovecs`; returns how many of its leading buffers are
    /// thereby empty.
    ///
    /// # Panics
    /// When there are fewer bytes than that.
    pub(crate) fn advance(iovecs: &mut [IoVec], mut moved: usize) -> usize {
        let mut done = 0;
        while moved > 0 {
            let first = &mut iovecs[done];
            let step = moved.min(first.len());
            *first = IoVec::new(first.ptr().wrapping_add(step), first.len() - step);
            moved -= step;
            done += usize::from(first.len() == 0);
        }
        done
    }
}

/// Moves all bytes of `iovecs`, which it uses up, to or from `offset`; goes on after a short
/// transfer and after a signal. `EIO` when the file ends or takes no more.
///
/// See `preadv(2)`. Async-signal-safe.
///
/// # Safety
/// Each buffer is valid for the transfer, and nobody else uses it meanwhile (a write: changes it).
pub(crate) unsafe fn transfer(
    fd: BorrowedFd<'_>,
    direction: IoDirection,
    iovecs: &mut [IoVec],
    mut offset: u64,
) -> Result<(), Errno> {
    let mut start = 0;
    while start < iovecs.len() {
        let rest = &iovecs[start..];
        let count = libc::c_int::try_from(rest.len()).map_err(|_| Errno(libc::EINVAL))?;
        let at = libc::off_t::try_from(offset).map_err(|_| Errno(libc::EINVAL))?;
        let (fd, vec) = (fd.as_raw_fd(), rest.as_ptr().cast::<libc::iovec>());
        // Not by `nix`, whose slices are references: others may write to these bytes at any time.
        let moved = retry(|| {
            Refusal::result(match direction {
                // SAFETY: `IoVec` is an `iovec`, `count` of them follow; the caller vouches for the
                // buffers, of which `advance` only ever cuts bytes off.
                IoDirection::Read => unsafe { libc::preadv(fd, vec, count, at) },
                // SAFETY: as above.
                IoDirection::Write => unsafe { libc::pwritev(fd, vec, count, at) },
            })
        })?;
        let moved = moved.unsigned_abs();
        if moved == 0 {
            return Err(Errno(libc::EIO));
        }
        start += IoVec::advance(&mut iovecs[start..], moved);
        offset += moved as u64;
    }
    Ok(())
}

/// Reads from `offset` on, as many bytes as there are and fit; returns their number. Direct I/O
/// stops at the first transfer that ends inside a block, which is the end of the file.
pub(crate) fn read_at(fd: BorrowedFd<'_>, into: &mut [u8], offset: u64) -> Result<usize, Errno> {
    const BLOCK: usize = 512;
    let mut len = 0;
    while len < into.len() {
        let rest = &mut into[len..];
        let at = libc::off_t::try_from(offset + len as u64).map_err(|_| Errno(libc::EINVAL))?;
        let read = retry(|| pread(fd, rest, at))?;
        len += read;
        if read == 0 || !read.is_multiple_of(BLOCK) {
            break;
        }
    }
    Ok(len)
}

/// Writes all of `from` at `offset`.
pub(crate) fn write_at(fd: BorrowedFd<'_>, from: &mut [u8], offset: u64) -> Result<(), Errno> {
    let mut iovecs = [IoVec::new(from.as_mut_ptr(), from.len())];
    // SAFETY: the buffer is this call's alone and as long as it says.
    unsafe { transfer(fd, IoDirection::Write, &mut iovecs, offset) }
}

/// Returns the first range of a regular file from `offset` on that is not a hole; `None`: only
/// holes follow. Space that was reserved and never written counts as a hole where the file system
/// tells (ext4, xfs). See `SEEK_DATA` in `lseek(2)`.
pub(crate) fn next_data(fd: BorrowedFd<'_>, offset: u64) -> Result<Option<Range<u64>>, Errno> {
    let seek = |from: u64, whence| {
        let from = libc::off64_t::try_from(from).map_err(|_| Refusal::EFBIG)?;
        // Nothing uses the file's position.
        lseek64(fd, from, whence).map(i64::unsigned_abs)
    };
    match seek(offset, Whence::SeekData) {
        Ok(start) => Ok(Some(start..seek(start, Whence::SeekHole)?)),
        Err(Refusal::ENXIO) => Ok(None),
        Err(refusal) => Err(refusal.into()),
    }
}

/// Repeats a call while signals interrupt it. Unbounded: each turn takes a delivered signal.
fn retry<T>(mut call: impl FnMut() -> nix::Result<T>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Refusal::EINTR) => {}
            result => return Ok(result?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::testing::ExpectedPanic;

    #[test]
    fn advancing_cuts_whole_and_partial_buffers() {
        let mut bytes = [0_u8; 30];
        let base = bytes.as_mut_ptr();
        let mut iovecs = [IoVec::new(base, 10), IoVec::new(base, 10), IoVec::new(base, 10)];
        assert_eq!(IoVec::advance(&mut iovecs, 4), 0);
        assert_eq!(iovecs[0].len(), 6);
        assert_eq!(iovecs[0].ptr(), base.wrapping_add(4));
        assert_eq!(IoVec::advance(&mut iovecs, 6), 1);
        assert_eq!(IoVec::advance(&mut iovecs[1..], 13), 1);
        assert_eq!(iovecs[2].len(), 7);
        assert_eq!(IoVec::advance(&mut iovecs[2..], 7), 1);
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn advancing_past_the_last_buffer_is_refused() {
        let _expected = ExpectedPanic::saying("index out of bounds");
        let mut bytes = [0_u8; 8];
        IoVec::advance(&mut [IoVec::new(bytes.as_mut_ptr(), 8)], 9);
    }
}
