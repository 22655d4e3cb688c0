//! The open file or device of a store, shared with its queues.

#![expect(unsafe_code, reason = "passes buffers on to the transfer")]

use super::Op;
use super::inline_queue::Mover;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::sys::file::{self, Caching, Errno, FileKind, IoVec, SysResult};
use crate::sys::fork::{Private, out_of_the_way};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum number of bytes given back by one call. ext4 keeps reads of the file waiting meanwhile: 0.16 ms for
/// 64 KiB, 0.7 ms for 4 MiB, 11 ms for 64 MiB. Fewer bytes a call cost more calls, more cost reads.
const DISCARD_LEN_MAX: u64 = 4 << 20;

/// How old an answer about the space of a file system may be: asking takes 1 to 3 us, which an
/// allocation of many extents would pay for each.
const ROOM_AGE_MAX: Duration = Duration::from_millis(10);

/// A file with a name, or one without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Named {
    Yes,
    No,
}

/// Name of the file.
#[derive(Debug)]
struct Called {
    /// The file or device; the directory of a file without a name.
    path: PathBuf,
    named: Named,
    /// By errors.
    name: Arc<str>,
}

/// The open file of a store, shared with its queues.
#[derive(Debug)]
pub(super) struct Device {
    fd: Private<OwnedFd>,
    kind: FileKind,
    /// Where the store begins in the file.
    base: u64,
    capacity: ByteCount,
    called: Called,
    caching: Caching,
    /// The files below a loop device, locked.
    below: Vec<Private<OwnedFd>>,
    /// The kernel has no way to return space.
    pub(super) no_discard: AtomicBool,
    /// The file has its space, and keeps it: what is discarded is only forgotten.
    pub(super) reserved: AtomicBool,
    room: Room,
    /// The file's name is known to be on the device.
    is_name_durable: AtomicBool,
}

/// Bytes that there is space for, by an answer of the file system that is [`ROOM_AGE_MAX`] old at most.
#[derive(Debug)]
struct Room {
    bytes: AtomicU64,
    /// When it was asked, in milliseconds since `opened`, plus 1; 0: not yet.
    asked: AtomicU64,
    opened: Instant,
}

impl Room {
    fn new() -> Room {
        Room { bytes: AtomicU64::new(0), asked: AtomicU64::new(0), opened: Instant::now() }
    }

    /// The last answer, or that of `ask` now.
    fn get(&self, ask: impl FnOnce() -> u64) -> u64 {
        let now = self.opened.elapsed().as_millis() as u64 + 1;
        let asked = self.asked.load(Ordering::Relaxed);
        // Any racer may ask; both store what is true now.
        if asked == 0 || now - asked.min(now) >= ROOM_AGE_MAX.as_millis() as u64 {
            self.bytes.store(ask(), Ordering::Relaxed);
            self.asked.store(now, Ordering::Relaxed);
        }
        self.bytes.load(Ordering::Relaxed)
    }
}

impl Device {
    pub(super) fn new(
        fd: OwnedFd,
        kind: FileKind,
        capacity: ByteCount,
        path: PathBuf,
        caching: Caching,
        named: Named,
    ) -> Device {
        let shown = path.display();
        let name = match (named, kind) {
            (Named::No, _) => format!("unlinked file in {shown}"),
            (Named::Yes, FileKind::Block) => format!("block device {shown}"),
            (Named::Yes, _) => format!("file {shown}"),
        };
        Device {
            fd: Private::new(out_of_the_way(fd)),
            kind,
            base: 0,
            capacity,
            called: Called { path, named, name: name.into() },
            caching,
            below: Vec::new(),
            no_discard: AtomicBool::new(false),
            reserved: AtomicBool::new(false),
            room: Room::new(),
            is_name_durable: AtomicBool::new(kind != FileKind::Regular || named == Named::No),
        }
    }

    /// The store takes the bytes from `base` on only, and keeps the files below the device locked.
    pub(super) fn set_place(&mut self, base: u64, below: Vec<OwnedFd>) {
        self.base = base;
        self.below = below.into_iter().map(Private::new).collect();
    }

    /// Keeps the file open in forked children, and with it its lock and its claim.
    pub(super) fn share(&self) -> RawFd {
        self.fd.share();
        self.below.iter().for_each(Private::share);
        self.fd.as_raw_fd()
    }

    pub(super) fn capacity(&self) -> ByteCount {
        self.capacity
    }

    pub(super) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(super) fn path(&self) -> &Path {
        &self.called.path
    }

    pub(super) fn name(&self) -> &Arc<str> {
        &self.called.name
    }

    pub(super) fn is_named(&self) -> bool {
        self.called.named == Named::Yes
    }

    /// The file and how it is used, in front of and behind what the store says of its engine.
    pub(super) fn describe(&self) -> (String, &'static str) {
        let caching = match self.caching {
            Caching::Direct => "O_DIRECT",
            Caching::Buffered => "buffered, because the file system has no O_DIRECT",
        };
        let discard = if self.no_discard.load(Ordering::Relaxed) { ", no discard" } else { "" };
        let reserved = if self.reserved.load(Ordering::Relaxed) { ", reserved" } else { "" };
        (format!("{}, {}{reserved}, {caching}", self.called.name, self.capacity), discard)
    }

    pub(super) fn is_in_memory(&self) -> bool {
        // (A device's node is on a tmpfs too; that says nothing about the device.)
        self.kind == FileKind::Regular && file::is_in_memory(self.as_fd())
    }

    /// Bytes that there is space for: what the file occupies and what its file system has left.
    pub(super) fn room(&self) -> ByteCount {
        if self.kind != FileKind::Regular || self.reserved.load(Ordering::Relaxed) {
            return self.capacity;
        }
        let room = self.room.get(|| {
            let occupied = file::info(self.as_fd()).map(|info| info.occupied);
            let room = occupied.and_then(|bytes| Ok(bytes + file::available(self.as_fd())?));
            // Of a file system that does not tell, nothing is known.
            room.unwrap_or(u64::MAX)
        });
        ByteCount(room).min(self.capacity)
    }

    /// Waits until the device has what was written, and the name of the file. The name is made
    /// durable once, also of a file that exists: the process that made it may have been killed before.
    pub(super) fn sync(&self) -> SysResult {
        file::sync_data(self.as_fd())?;
        if !self.is_name_durable.load(Ordering::Relaxed) {
            file::sync_name(self.as_fd(), &self.called.path)?;
            self.is_name_durable.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Where byte `offset` of the store is in the file.
    pub(super) fn place(&self, offset: u64) -> u64 {
        self.base + offset
    }

    /// Returns a range's space, a piece at a time.
    pub(super) fn discard(&self, offset: u64, len: u64) -> SysResult {
        let end = offset + len;
        let mut at = offset;
        // A hint that is only ever set; a racer that misses it asks the kernel once more.
        while at < end && !self.no_discard.load(Ordering::Relaxed) {
            let piece = DISCARD_LEN_MAX.min(end - at);
            match self.discard_piece(at, piece) {
                Err(Errno(libc::EOPNOTSUPP | libc::ENOSYS)) => {
                    self.no_discard.store(true, Ordering::Relaxed);
                }
                result => result?,
            }
            at += piece;
        }
        Ok(())
    }

    /// By whichever way there is. Not by `BLKZEROOUT`: zeros take space.
    fn discard_piece(&self, offset: u64, len: u64) -> SysResult {
        let offset = self.place(offset);
        if self.kind == FileKind::Block {
            match file::discard_blocks(self.as_fd(), offset, len) {
                Err(Errno(libc::EOPNOTSUPP)) => {}
                result => return result,
            }
        }
        if self.reserved.load(Ordering::Relaxed) {
            return file::forget(self.as_fd(), offset, len);
        }
        file::punch_hole(self.as_fd(), offset, len)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Mover for Arc<Device> {
    fn capacity(&self) -> ByteCount {
        self.capacity
    }

    fn name(&self) -> &Arc<str> {
        &self.called.name
    }

    unsafe fn transfer(&self, op: Op, iovecs: &mut [IoVec], offset: u64) -> SysResult {
        // SAFETY: the caller vouches for the buffers.
        unsafe { file::transfer(self.as_fd(), op.direction(), iovecs, self.place(offset)) }
    }
}
