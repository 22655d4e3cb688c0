//! Stores in a regular file or on a raw block device.
//!
//! [`BlockStore`] opens, checks and claims the file; its [`Device`] is shared with the queues, on
//! io_uring ([`UringQueue`]) or without ([`InlineQueue`]). Uses `sys::file`.
//!
//! # Invariants
//! 1. Nobody else writes the file, and nobody else reads it while this store writes: it has no name, is
//!    locked with `flock(2)`, or is claimed with `O_EXCL` (block devices; locked too). The files behind a loop device are locked as well.
//! 2. `capacity` bytes from `base` on can be addressed; both are multiples of [`IO_ALIGN`].
//! 3. What a new store overwrites was zeros or pages of an earlier run, unless its user said that
//!    it may overwrite anything.

#![expect(unsafe_code, reason = "passes buffers on to the transfer")]

use super::device::{Device, Named};
use super::inline_queue::{InlineQueue, Mover};
use super::signature::{FoundFile, Use, refused};
use super::uring_queue::UringQueue;
use super::vectors::Vectors;
use super::{DEPTH_MAX, IO_ALIGN, Op, Queue, Store, check_range};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::file::{self, Caching, Claim, Errno, FileKind, IoVec, Lock, SysResult};
use crate::sys::layers;
use crate::sys::messages;
use crate::sys::uring::Ring;
use crate::sys::{EMFILE, ENFILE};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

/// Smallest store.
pub(super) const CAPACITY_MIN: ByteCount = ByteCount::mib(1);

/// Names tried for a temporary file where the file system has no unnamed files.
const NAMES_MAX: u32 = 16;

/// Times the default capacity is halved when the file system does not allow files that long.
const HALVINGS_MAX: u32 = 16;

/// How long a claim or a lock is waited for that may be that of a process which has just been
/// killed: the kernel takes its ring apart behind its back, and until then the ring keeps the file
/// open. Of 40 starts right after `kill -9` of a process that was writing 33 met `EBUSY`, for up to
/// 65 ms.
pub(super) const RELEASE_WAIT_MAX: Duration = Duration::from_secs(2);

/// Pauses between two attempts; each is twice as long as the one before.
const RELEASE_PAUSE_MIN: Duration = Duration::from_millis(1);
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(64);

/// Bytes reserved by one call, which a signal interrupts and starts anew.
const RESERVE_LEN_MAX: u64 = 1 << 30;

/// How a [`BlockStore`] talks to the kernel.
#[doc(hidden)]
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// io_uring where this process may use it, else synchronous calls; these also for a file on
    /// a tmpfs, where there is no device to wait for.
    #[default]
    Auto,
    /// io_uring; an error where this process may not use it.
    Uring,
    /// One synchronous call after the other, on the thread that submits.
    Sync,
}

/// A store in a regular file or on a raw block device.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{BlockStore, Store};
///
/// let store = BlockStore::temporary(None, Some(ByteCount::mib(64)))?;
/// assert_eq!(store.capacity(), ByteCount::mib(64));
/// assert_eq!(store.occupied(), Some(ByteCount::ZERO));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct BlockStore {
    device: Arc<Device>,
    engine: Engine,
}

/// The engine after the choice.
#[derive(Clone, Copy, Debug)]
enum Engine {
    /// io_uring; whether a queue may go without when it cannot be had.
    Uring { or_sync: bool },
    /// Synchronous, for a reason.
    Sync { why: WhySync },
}

#[derive(Clone, Copy, Debug)]
enum WhySync {
    Asked,
    InMemory,
    UringRefused(Errno),
}

impl BlockStore {
    /// Creates a store in a new file without a name in `dir` (default: `$TMPDIR`,
    /// `/tmp`, or `/var/tmp` where `/tmp` is in memory): readable by its owner only, sparse, and
    /// gone when the process ends, however it ends.
    ///
    /// Without `capacity` the store is as large as the space that the file system has available
    /// now. Space is not reserved: a file system that fills up shows as `ENOSPC` on a write.
    ///
    /// # Errors
    /// [`Error::Device`] naming the directory: it cannot be written, has too little space, or the
    /// capacity is below 1 MiB or not a multiple of 4,096 bytes.
    pub fn temporary(dir: Option<&Path>, capacity: Option<ByteCount>) -> Result<BlockStore> {
        let device = temporary_device(dir, capacity)?;
        Ok(BlockStore::new(device))
    }

    /// Opens a store in the regular file or on the block device at `path`, whose contents stay
    /// what they are until the store is written. The path is claimed until the store and its
    /// queues are dropped.
    ///
    /// Without `capacity` all of the file or device is used, rounded down to whole 4,096 bytes;
    /// with it, only so much. A file that does not exist is created with that capacity, for its
    /// owner only.
    ///
    /// # Errors
    /// [`Error::Device`] with the path and what is wrong with it: missing, a directory or another
    /// kind of file, too small, read-only, in use, no permission, or not aligned (a capacity that
    /// is not a multiple of 4,096 bytes, or a device with larger blocks).
    pub fn open(path: impl AsRef<Path>, capacity: Option<ByteCount>) -> Result<BlockStore> {
        BlockStore::open_for(Use::Table, path.as_ref(), capacity)
    }

    /// Opens a store for contents that begin anew in the regular file or on the block device at
    /// `path`: [`open`](BlockStore::open), but what holds somebody's data is refused, unless
    /// `overwrite` allows it to be lost.
    ///
    /// Free are zeros, and what [`scratch`](BlockStore::scratch) left in an earlier run. A regular
    /// file has to be zeros from start to end; holes are not read. Of a block device the first and
    /// the last MiB are read, the places of further superblocks, and 64 KiB at 63 places between.
    /// Where `overwrite` allows it, the signatures of others are erased.
    ///
    /// A file that other users may read or write is made its owner's only, which is said on
    /// standard error; it has to belong to the user that this process runs as.
    ///
    /// # Errors
    /// As for [`open`](BlockStore::open), and [`Error::Device`] with the offset of what the path holds, when it
    /// cannot be written, or when other users keep access to the file.
    pub fn create(
        path: impl AsRef<Path>,
        capacity: Option<ByteCount>,
        overwrite: bool,
    ) -> Result<BlockStore> {
        BlockStore::open_for(Use::NewTable { overwrite }, path.as_ref(), capacity)
    }

    /// Opens a store for evicted pages in the regular file or on the block device at `path`, whose
    /// contents are lost: [`create`](BlockStore::create), which leaves a signature at the start by
    /// which the next run knows that the pages can go. A device with the signature is free while all
    /// else is zeros in its first and its last MiB, where the pages of a store never are: it
    /// begins at 1 MiB, and ends 1 MiB before the end of a block device; at 128 KiB each where
    /// `capacity`, which counts that, is below 64 MiB.
    ///
    /// # Errors
    /// As for [`create`](BlockStore::create).
    pub fn scratch(
        path: impl AsRef<Path>,
        capacity: Option<ByteCount>,
        overwrite: bool,
    ) -> Result<BlockStore> {
        BlockStore::open_for(Use::Scratch { overwrite }, path.as_ref(), capacity)
    }

    /// Opens a store for a purpose. To be read only, any number may be opened at once, by several processes; they keep out
    /// one that is opened otherwise, and that keeps them out.
    ///
    /// # Errors
    /// As for [`open`](BlockStore::open).
    pub(crate) fn open_for(
        what: Use,
        path: &Path,
        capacity: Option<ByteCount>,
    ) -> Result<BlockStore> {
        check_capacity(path, capacity)?;
        match file::kind_of(path) {
            Ok(kind) => BlockStore::open_existing(what, path, kind, capacity),
            Err(Errno(libc::ENOENT)) => BlockStore::open_missing(what, path, capacity),
            Err(errno) => Err(refused(path, explain(errno))),
        }
    }

    /// Creates the file at `path`, where nothing is, if there is a capacity to create it with.
    fn open_missing(what: Use, path: &Path, capacity: Option<ByteCount>) -> Result<BlockStore> {
        if let Ok(target) = path.read_link() {
            let target = target.display();
            return Err(refused(path, format!("is a link to {target}, which does not exist")));
        }
        if cfg!(not(feature = "network")) && path.to_string_lossy().contains("://") {
            return Err(refused(path, "farheap was built without its feature `network`"));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty() && !dir.exists());
        if let Some(dir) = dir {
            return Err(refused(path, format!("its directory {} does not exist", dir.display())));
        }
        let len = capacity.ok_or_else(|| refused(path, what.describe_missing()))?;
        create_at(path, len)?;
        BlockStore::open_existing(what, path, FileKind::Regular, capacity)
            .inspect_err(|_| drop(std::fs::remove_file(path)))
    }

    fn open_existing(
        what: Use,
        path: &Path,
        kind: FileKind,
        capacity: Option<ByteCount>,
    ) -> Result<BlockStore> {
        let claim = match kind {
            FileKind::Regular => Claim::Shared,
            FileKind::Block => Claim::Exclusive,
            other => return Err(refused(path, describe_wrong_kind(other))),
        };
        let is_reading = what == Use::Reading;
        let (fd, caching) = open_caching(path, |caching| match what {
            Use::Reading => file::open_read_only(path, caching),
            _ => while_busy(Errno(libc::EBUSY), || file::open(path, caching, claim)),
        })?;
        let info = file::info(fd.as_fd()).map_err(|errno| refused(path, explain(errno)))?;
        if info.kind != kind {
            return Err(refused(path, "was replaced while it was opened"));
        }
        let how = if is_reading { Lock::Shared } else { Lock::Exclusive };
        lock(fd.as_fd(), how).map_err(|errno| refused(path, describe_lock(errno)))?;
        let below = match kind {
            FileKind::Block => lock_below(path, info.device, how)?,
            _ => check_above(path, info.id).map(|()| Vec::new())?,
        };
        let len = match kind {
            FileKind::Block => inspect_device(path, fd.as_fd(), is_reading)?,
            _ => info.len,
        };
        let candidate = FoundFile { path, fd: fd.as_fd(), kind, len };
        candidate.check_free(what)?;
        let capacity = fit(path, RoomOwner::of(kind, what), len, capacity)?;
        if kind == FileKind::Regular && !is_reading {
            check_len_limit(path, capacity)?;
        }
        let place = candidate.take(what, capacity)?;
        let capacity = ByteCount(place.end - place.start);
        let mut device = Device::new(fd, kind, capacity, path.to_path_buf(), caching, Named::Yes);
        device.set_place(place.start, below);
        if kind == FileKind::Block && file::can_discard(info.device) == Some(false) {
            *device.no_discard.get_mut() = true;
        }
        Ok(BlockStore::new(device))
    }

    /// Returns the store with another engine for the queues opened from now on.
    ///
    /// # Errors
    /// [`Error::Os`] when io_uring is asked for and refused.
    #[doc(hidden)]
    pub fn with_engine(mut self, engine: IoEngine) -> Result<BlockStore> {
        self.engine = match engine {
            IoEngine::Sync => Engine::Sync { why: WhySync::Asked },
            IoEngine::Auto => choose_engine(&self.device),
            IoEngine::Uring => {
                Ring::new(1)
                    .map_err(|errno| Error::Os { call: "io_uring_setup", errno: errno.0 })?;
                Engine::Uring { or_sync: false }
            }
        };
        Ok(self)
    }

    /// Takes the space of all of the store from its file system now, so that no write meets a full
    /// one. What is discarded later reads as zeros and stays reserved. A block device has its
    /// space. File systems that write elsewhere than before (btrfs, ZFS) keep no such promise.
    ///
    /// # Errors
    /// [`Error::Device`] when the file system has too little space or cannot reserve any; what it
    /// has taken by then stays with the file.
    pub(crate) fn reserve_space(&self) -> Result<()> {
        let (path, capacity) = (self.device.path(), self.device.capacity());
        if self.device.kind() != FileKind::Regular {
            return Ok(());
        }
        let mut at = 0;
        while at < capacity.0 {
            let piece = RESERVE_LEN_MAX.min(capacity.0 - at);
            let reserved = file::reserve(self.device.as_fd(), self.device.place(at), piece);
            reserved.map_err(|errno| match errno {
                Errno(libc::ENOSPC | libc::EDQUOT) => {
                    let left = ByteCount(file::available(self.device.as_fd()).unwrap_or(0));
                    let what =
                        format!("has no {capacity} to be reserved: {at} bytes are, and then");
                    let what_to_do = "free space there, or set a smaller `capacity`";
                    refused(path, format!("{what} {left} were left ({errno}); {what_to_do}"))
                }
                errno => refused(path, format!("its file system cannot reserve space: {errno}")),
            })?;
            at += piece;
        }
        self.device.reserved.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// True if the store's file is in memory itself (tmpfs), where evicting to it frees none.
    pub(crate) fn is_in_memory(&self) -> bool {
        self.device.is_in_memory()
    }

    /// Bytes that a file occupies at the moment: its blocks. `None` for a block device.
    #[must_use]
    pub fn occupied(&self) -> Option<ByteCount> {
        if self.device.kind() != FileKind::Regular {
            return None;
        }
        file::info(self.device.as_fd()).ok().map(|info| ByteCount(info.occupied))
    }

    /// The device's refusal as the crate's error.
    fn failed(&self, op: &'static str, offset: u64, len: u64) -> impl Fn(Errno) -> Error {
        let store = Arc::clone(self.device.name());
        move |errno| Error::Io { op, store: Arc::clone(&store), offset, len, errno: errno.0 }
    }

    fn new(device: Device) -> BlockStore {
        let engine = choose_engine(&device);
        BlockStore { device: Arc::new(device), engine }
    }
}

// SAFETY: reads and writes are the kernel's, of a file or device that is this process's by a lock; a
// transfer that is short is an error. Its queues are this crate's.
unsafe impl Store for BlockStore {
    fn capacity(&self) -> ByteCount {
        self.device.capacity()
    }

    fn outlives_process(&self) -> bool {
        self.device.is_named()
    }

    fn room(&self) -> ByteCount {
        self.device.room()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let (device, depth) = (Arc::clone(&self.device), depth.clamp(1, DEPTH_MAX));
        let Engine::Uring { or_sync } = self.engine else {
            return Ok(Box::new(InlineQueue::new(device, depth)?));
        };
        match UringQueue::new(Arc::clone(&device), depth, Vectors::new(depth)?) {
            Ok(queue) => Ok(Box::new(queue)),
            Err(errno) if or_sync && !matches!(errno.0, EMFILE | ENFILE) => {
                Ok(Box::new(InlineQueue::new(device, depth)?))
            }
            Err(errno) => Err(Error::Os { call: "io_uring_setup", errno: errno.0 }),
        }
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let len = into.len() as u64;
        check_range(offset, len, self.device.capacity());
        let mut iovecs = [IoVec::new(into.cast(), into.len())];
        // SAFETY: the caller vouches for the buffer.
        unsafe { self.device.transfer(Op::Read, &mut iovecs, offset) }
            .map_err(|errno| Op::Read.failed(self.device.name(), offset, len, errno))
    }

    fn sync(&self) -> Result<()> {
        self.device.sync().map_err(self.failed("sync", 0, 0))
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len, self.device.capacity());
        self.device.discard(offset, len).map_err(self.failed("discard", offset, len))
    }

    fn describe(&self) -> String {
        let (file, discard) = self.device.describe();
        let engine = match self.engine {
            Engine::Uring { .. } => "io_uring".to_owned(),
            Engine::Sync { why: WhySync::Asked } => "synchronous I/O".to_owned(),
            Engine::Sync { why: WhySync::InMemory } => {
                "synchronous I/O, because the file is in memory".to_owned()
            }
            Engine::Sync { why: WhySync::UringRefused(errno) } => {
                format!("synchronous I/O, because io_uring was refused: {errno}")
            }
        };
        format!("{file}, {engine}{discard}")
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(self.device.name())
    }

    fn inherit(&self) -> Result<Option<RawFd>> {
        Ok(Some(self.device.share()))
    }

    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        // Synchronous: a ring would cost each child that is forked as much as the fork.
        let dir = (!self.device.is_named()).then(|| self.device.path());
        let device = temporary_device(dir, None)?;
        device.share();
        let engine = Engine::Sync { why: WhySync::Asked };
        Ok(Arc::new(BlockStore { device: Arc::new(device), engine }))
    }
}

/// A new file without a name, see [`BlockStore::temporary`].
fn temporary_device(dir: Option<&Path>, capacity: Option<ByteCount>) -> Result<Device> {
    let dir = dir.map_or_else(file::temporary_dir, Path::to_path_buf);
    check_capacity(&dir, capacity)?;
    let (fd, caching) = open_caching(&dir, |caching| create_unlinked(&dir, caching))?;
    let capacity = match capacity {
        Some(capacity) => {
            set_len(&dir, fd.as_fd(), capacity)?;
            capacity
        }
        None => set_len_available(&dir, fd.as_fd())?,
    };
    let kind = FileKind::Regular;
    Ok(Device::new(fd, kind, capacity, dir, caching, Named::No))
}

fn choose_engine(device: &Device) -> Engine {
    // A tmpfs cannot start a transfer without waiting, so io_uring hands each to a worker thread:
    // 130 k/s 4 KiB reads one at a time, 451 k/s of 32 at once; synchronous 442 k/s and 709 k/s.
    if device.is_in_memory() {
        return Engine::Sync { why: WhySync::InMemory };
    }
    match Ring::new(1) {
        Ok(_) => Engine::Uring { or_sync: true },
        Err(errno) => Engine::Sync { why: WhySync::UringRefused(errno) },
    }
}

pub(super) fn check_capacity(path: &Path, capacity: Option<ByteCount>) -> Result<()> {
    let Some(capacity) = capacity else { return Ok(()) };
    if !capacity.get().is_multiple_of(IO_ALIGN as u64) {
        let bytes = capacity.get();
        return Err(refused(
            path,
            format!("capacity of {bytes} bytes is not aligned: not a multiple of {IO_ALIGN}"),
        ));
    }
    if capacity < CAPACITY_MIN {
        return Err(refused(path, format!("capacity of {capacity} is below {CAPACITY_MIN}")));
    }
    Ok(())
}

/// Opens with `O_DIRECT` where the file system has it, else buffered.
fn open_caching(
    path: &Path,
    open: impl Fn(Caching) -> SysResult<OwnedFd>,
) -> Result<(OwnedFd, Caching)> {
    match open(Caching::Direct) {
        Ok(fd) => match file::direct_align(fd.as_fd()) {
            // Accepted at open, refused at the first transfer.
            Some(0) => {}
            Some(align) if align as usize > IO_ALIGN => {
                return Err(refused(path, not_aligned(align)));
            }
            _ => return Ok((fd, Caching::Direct)),
        },
        Err(Errno(libc::EINVAL)) => {}
        Err(errno) => return Err(refused(path, explain(errno))),
    }
    let fd = open(Caching::Buffered).map_err(|errno| refused(path, explain(errno)))?;
    Ok((fd, Caching::Buffered))
}

/// Creates a file in `dir` that has no name, or loses it at once.
fn create_unlinked(dir: &Path, caching: Caching) -> SysResult<OwnedFd> {
    match file::create_unnamed(dir, caching) {
        // The file system or kernel has no unnamed files (open(2)).
        Err(Errno(libc::EOPNOTSUPP | libc::EISDIR | libc::ENOENT)) => {
            create_and_unlink(dir, caching)
        }
        result => result,
    }
}

fn create_and_unlink(dir: &Path, caching: Caching) -> SysResult<OwnedFd> {
    // Only has to differ from names in use, which the creation checks.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for attempt in 0..NAMES_MAX {
        let (pid, ns) = (std::process::id(), now.as_nanos());
        let path = dir.join(format!(".farheap-{pid}-{ns}-{attempt}"));
        let created = file::create(&path, caching);
        if matches!(created, Err(Errno(libc::EEXIST))) {
            continue;
        }
        // Also after an error: `EINVAL` for lack of `O_DIRECT` comes after the creation.
        let unlinked = std::fs::remove_file(&path);
        let fd = created?;
        unlinked.map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EIO)))?;
        return Ok(fd);
    }
    Err(Errno(libc::EEXIST))
}

/// Creates the file that a user named; nothing is left behind by a failure.
fn create_at(path: &Path, capacity: ByteCount) -> Result<()> {
    let fd =
        file::create(path, Caching::Buffered).map_err(|errno| refused(path, explain(errno)))?;
    set_len(path, fd.as_fd(), capacity).inspect_err(|_| drop(std::fs::remove_file(path)))
}

/// Locks the file for this store.
fn lock(fd: BorrowedFd<'_>, how: Lock) -> SysResult {
    while_busy(Errno(libc::EWOULDBLOCK), || file::lock(fd, how))
}

fn describe_lock(errno: Errno) -> String {
    match errno {
        Errno(libc::EWOULDBLOCK) => "is in use by another store or process".to_owned(),
        errno => format!("cannot be locked: {errno}"),
    }
}

/// Locks the files behind a loop device, or behind loop devices below: another store may use the
/// same bytes through the file, or through another loop device.
fn lock_below(path: &Path, device: (u32, u32), how: Lock) -> Result<Vec<OwnedFd>> {
    let mut locked = Vec::new();
    for below in layers::files_below(device) {
        let name = below.path.display();
        match below.file {
            Ok(file) => {
                lock(file.as_fd(), how).map_err(|errno| {
                    refused(path, format!("lies on {name}, which {}", describe_lock(errno)))
                })?;
                locked.push(file);
            }
            // Not ours to read, deleted, or of another mount namespace.
            Err(error) => messages::warn(
                "a file that a device lies on cannot be locked",
                format_args!(
                    "{}: {name}, which it lies on, cannot be locked ({error}): see to it that \
                     nothing else uses that file",
                    path.display()
                ),
            ),
        }
    }
    Ok(locked)
}

/// Checks that no loop device lies on a regular file: its user need not have locked the file.
fn check_above(path: &Path, id: (u64, u64)) -> Result<()> {
    let Some(device) = layers::loop_device_over(id) else { return Ok(()) };
    let device = device.display();
    let what_to_do = format!("name that instead, or detach it: losetup --detach {device}");
    Err(refused(path, format!("is what {device} keeps its bytes in; {what_to_do}")))
}

/// Repeats a call while it fails with `busy`, for up to [`RELEASE_WAIT_MAX`].
fn while_busy<T>(busy: Errno, mut call: impl FnMut() -> SysResult<T>) -> SysResult<T> {
    let deadline = Instant::now() + RELEASE_WAIT_MAX;
    let mut pause = RELEASE_PAUSE_MIN;
    loop {
        match call() {
            Err(errno) if errno == busy && Instant::now() < deadline => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(RELEASE_PAUSE_MAX);
            }
            result => return result,
        }
    }
}

/// Checks that this process may write a file of `len` bytes: the kernel does not refuse a write
/// behind that limit but ends the process.
fn check_len_limit(path: &Path, len: ByteCount) -> Result<()> {
    let most = ByteCount(file::len_max());
    if len <= most {
        return Ok(());
    }
    let what_to_do = "raise it (`ulimit -f`, RLIMIT_FSIZE), or set a smaller `capacity`";
    Err(refused(
        path,
        format!("cannot hold a file of {len}: this process may write {most} a file; {what_to_do}"),
    ))
}

fn set_len(path: &Path, fd: BorrowedFd<'_>, len: ByteCount) -> Result<()> {
    check_len_limit(path, len)?;
    file::set_len(fd, len.get())
        .map_err(|errno| refused(path, format!("cannot hold a file of {len}: {errno}")))
}

/// Sets the length to what the file system has available; returns it.
fn set_len_available(dir: &Path, fd: BorrowedFd<'_>) -> Result<ByteCount> {
    let available = file::available(fd).map_err(|errno| refused(dir, explain(errno)))?;
    check_len_limit(dir, CAPACITY_MIN)?;
    let mut capacity = fit(dir, RoomOwner::Free, available.min(file::len_max()), None)?;
    for _ in 0..HALVINGS_MAX {
        if file::set_len(fd, capacity.get()) != Err(Errno(libc::EFBIG)) {
            break;
        }
        capacity = fit(dir, RoomOwner::Free, capacity.get() / 2, None)?;
    }
    set_len(dir, fd, capacity)?;
    Ok(capacity)
}

/// Checks a block device; returns its bytes.
fn inspect_device(path: &Path, fd: BorrowedFd<'_>, is_reading: bool) -> Result<u64> {
    let explained = |errno| refused(path, explain(errno));
    if !is_reading && file::is_read_only(fd).map_err(explained)? {
        return Err(refused(path, "is read-only"));
    }
    let block = file::logical_block_len(fd).map_err(explained)?;
    if block as usize > IO_ALIGN {
        return Err(refused(path, not_aligned(block)));
    }
    file::device_len(fd).map_err(explained)
}

/// Holder of the room for a store, for messages.
#[derive(Clone, Copy)]
enum RoomOwner {
    /// A file that exists.
    File,
    Device,
    /// A file or device with a table, of which nobody may change the length.
    Table,
    /// Bytes that a file system has available.
    Free,
}

impl RoomOwner {
    fn of(kind: FileKind, what: Use) -> RoomOwner {
        match what {
            Use::OldTable | Use::Reading => RoomOwner::Table,
            _ if kind == FileKind::Block => RoomOwner::Device,
            _ => RoomOwner::File,
        }
    }

    /// Says that `len` bytes are less than what is needed, and what to do.
    fn too_small(self, len: u64, wanted: Option<ByteCount>) -> String {
        let least = wanted.unwrap_or(CAPACITY_MIN);
        let (what, remedy) = match self {
            RoomOwner::File => {
                // Without a capacity no file is created.
                let again = if wanted.is_some() { "delete it to have it created, or " } else { "" };
                let extend = format!("extend it: truncate --size={}", least.get());
                ("this file exists and has", format!("{again}{extend}"))
            }
            RoomOwner::Device => ("this device has", "use less of it, or a larger one".to_owned()),
            RoomOwner::Table => {
                ("it has", "it was cut off, or is another file than the one meant".to_owned())
            }
            RoomOwner::Free => {
                ("its file system has", "free space there, or use another directory".to_owned())
            }
        };
        format!("is too small: {what} {len} bytes, but {least} are needed; {remedy}")
    }
}

/// Returns how much of `len` bytes to use.
fn fit(path: &Path, room: RoomOwner, len: u64, wanted: Option<ByteCount>) -> Result<ByteCount> {
    let usable = ByteCount(len - len % IO_ALIGN as u64);
    let least = wanted.unwrap_or(CAPACITY_MIN);
    if usable < least {
        return Err(refused(path, room.too_small(len, wanted)));
    }
    Ok(wanted.unwrap_or(usable))
}

fn not_aligned(block: u32) -> String {
    format!("is not aligned: it has blocks of {block} bytes, more than {IO_ALIGN}")
}

fn describe_wrong_kind(kind: FileKind) -> String {
    let what = match kind {
        FileKind::Directory => "a directory",
        FileKind::Character => "a character device",
        FileKind::Fifo => "a pipe",
        _ => "neither a regular file nor a block device",
    };
    format!("is {what}; give a regular file or a block device")
}

/// Says in the user's words why a file could not be opened.
fn explain(errno: Errno) -> String {
    match errno {
        Errno(libc::EACCES | libc::EPERM) => format!("no permission to read and write: {errno}"),
        Errno(libc::EROFS) => format!("is read-only: {errno}"),
        Errno(libc::EBUSY) => format!("is in use (mounted, or claimed by another user): {errno}"),
        Errno(libc::ENOENT | libc::ENOTDIR) => format!("does not exist: {errno}"),
        Errno(libc::ENXIO | libc::ENODEV) => format!("has no device behind it: {errno}"),
        errno => format!("cannot be opened: {errno}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_busy_is_tried_again_and_other_failures_are_not() {
        let mut answers = [Err(Errno(libc::EBUSY)), Err(Errno(libc::EBUSY)), Ok(7)].into_iter();
        let mut call = || answers.next().expect("not called again");
        assert_eq!(while_busy(Errno(libc::EBUSY), &mut call), Ok(7));
        let mut answers = [Err(Errno(libc::EACCES))].into_iter();
        let mut call = || answers.next().unwrap_or(Ok(7));
        assert_eq!(while_busy(Errno(libc::EBUSY), &mut call), Err(Errno(libc::EACCES)));
    }

    #[test]
    fn a_file_that_needs_a_name_loses_it_at_once() {
        let dir = tempfile::tempdir().expect("directory");
        let fd = create_and_unlink(dir.path(), Caching::Buffered).expect("created");
        assert_eq!(std::fs::read_dir(dir.path()).expect("list").count(), 0);
        file::set_len(fd.as_fd(), 4096).expect("still usable");
    }
}
