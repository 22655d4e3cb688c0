//! Stores: where the pages that are not resident live.
//!
//! A [`Store`] is flat bytes addressed by offset, read and written in whole pages through
//! [`Queue`]s; who owns which bytes is the slot map's business. Uses
//! `base`, `sys`, `meta`.
//!
//! [`BlockStore`] keeps bytes in a file or on a block device, [`MemStore`] in memory;
//! `NetworkStore` (feature `network`) on servers; `EncryptedStore` (feature `encrypt`) wraps a store and encrypts what
//! it keeps.
//!
//! # Invariants
//! 1. A request is reported exactly once: done or failed. A short transfer is a failure (`EIO`).
//! 2. Offsets, lengths and addresses are multiples of 4,096 bytes.
//! 3. After construction queues allocate nothing from the Rust heap.

#![expect(unsafe_code, reason = "declares the unsafe calls that move bytes through raw buffers")]

mod bits;
mod block;
#[cfg(feature = "encrypt")]
mod cipher;
mod device;
#[cfg(feature = "encrypt")]
mod encrypted;
mod inline_queue;
mod mem;
#[cfg(feature = "network")]
mod network;
#[cfg(feature = "encrypt")]
mod pending;
mod signature;
pub(crate) mod slots;
mod uring_queue;
mod user;
mod vectors;
mod wipe;

pub use block::{BlockStore, IoEngine};
#[cfg(feature = "encrypt")]
pub use encrypted::EncryptedStore;
#[cfg(feature = "network")]
pub use farheap_nbd::{ServerState, ServerStats};
pub use mem::MemStore;
#[cfg(all(feature = "network", any(feature = "heap", feature = "pool")))]
pub(crate) use network::{NetworkStore, servers_of};
#[cfg(feature = "pool")]
pub(crate) use signature::Use;
pub(crate) use slots::SlotMap;
pub(crate) use uring_queue::{has_given_up, queue_bytes};
pub(crate) use user::OnlyUser;
pub use wipe::Wipe;
pub(crate) use wipe::wipe;

use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::file::{Errno, IoDirection};
use crate::sys::vm::{Huge, Mapping};
use std::fmt::Debug;
use std::os::fd::RawFd;
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::time::Duration;

/// Alignment of every offset, length and buffer address, in bytes: what all block devices take.
pub(crate) const IO_ALIGN: usize = 4096;

/// Maximum number of buffers of one vectored request.
pub(crate) const SEGMENTS_MAX: usize = 64;

/// Maximum number of requests that a queue holds, whatever depth is asked for.
pub(crate) const DEPTH_MAX: u32 = 4096;

/// Maximum number of descriptors that a queue watches.
pub(crate) const WATCHES_MAX: usize = 4;

/// `errno` of a write that was given up and may be carried out all the same, now or later: its place is not to be used
/// again. No device or file reports it.
pub(crate) const LATE: i32 = libc::ECONNABORTED;

/// `errno` of a write that was not begun, because an earlier one may still reach its place, which is not to be used again.
/// No device or file reports it.
pub(crate) const BARRED: i32 = libc::EREMCHG;

/// True if a write was not begun because of its place: it can be made elsewhere.
pub(crate) fn is_barred(error: &Error) -> bool {
    matches!(error, Error::Io { errno: BARRED, .. })
}

/// True if a failed write, or one before it, may still be carried out.
pub(crate) fn may_come_late(error: &Error) -> bool {
    matches!(error, Error::Io { errno: LATE | BARRED, .. })
}

/// Direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Store to memory.
    Read,
    /// Memory to store.
    Write,
}

impl Op {
    /// The word for messages.
    const fn name(self) -> &'static str {
        match self {
            Op::Read => "read",
            Op::Write => "write",
        }
    }

    const fn direction(self) -> IoDirection {
        match self {
            Op::Read => IoDirection::Read,
            Op::Write => IoDirection::Write,
        }
    }

    /// The error of a transfer that failed. Allocates nothing.
    fn failed(self, store: &Arc<str>, offset: u64, len: u64, errno: Errno) -> Error {
        Error::Io { op: self.name(), store: Arc::clone(store), offset, len, errno: errno.0 }
    }
}

/// A read or write of consecutive bytes of the store into or from a few buffers.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Names the request when it is [reported](Queue::wait).
    pub token: u64,
    /// Read or write.
    pub op: Op,
    /// First byte on the store.
    pub offset: u64,
    /// The buffers, in store order; 1 to 64 of them. Addresses and lengths are multiples of 4,096.
    pub segments: &'a [*mut [u8]],
}

impl Request<'_> {
    /// Bytes that the request moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.segments.iter().map(|segment| segment.len() as u64).sum()
    }

    /// Asserts that the request is one that a store of `capacity` can be given; returns its bytes.
    fn check(&self, capacity: ByteCount) -> u64 {
        let count = self.segments.len();
        assert!((1..=SEGMENTS_MAX).contains(&count), "a request of {count} segments");
        for segment in self.segments {
            let aligned = segment.addr() | segment.len();
            assert!(aligned.is_multiple_of(IO_ALIGN) && segment.len() > 0, "bad {segment:?}");
        }
        let len = self.bytes();
        check_range(self.offset, len, capacity);
        len
    }
}

/// Asserts that a range is aligned and lies within a store of `capacity`.
fn check_range(offset: u64, len: u64, capacity: ByteCount) {
    let aligned = (offset | len).is_multiple_of(IO_ALIGN as u64);
    let inside = offset.checked_add(len).is_some_and(|end| end <= capacity.get());
    assert!(aligned && inside, "bytes {offset}+{len} of a store of {capacity}");
}

/// The error of a queue that is asked to watch too much.
const WATCHES_FULL: Error = Error::Os { call: "watch", errno: libc::EMFILE };

/// A place that keeps bytes for pages that are not resident.
///
/// A store and its queues run on the threads that resolve faults and evict pages. They must not touch
/// far memory, which would wait for the same threads, and should allocate only when they are made:
/// memory is short when pages are evicted. `examples/own_store.rs` is a store of a program's own.
///
/// # Safety
/// Far memory is read back from here, pointers included, so memory safety rests on it:
/// 1. A read that succeeds has filled all of its buffer with the bytes that were written there last;
///    a read that fails has touched nothing but its buffer.
/// 2. The [`capacity`](Store::capacity) stays what it is, and so do bytes that nobody writes, discards
///    or zeroes through this trait.
/// 3. Its queues keep the promises of [`Queue`].
///
/// A device may break the first two behind a store's back. Checksums
/// ([`RegionConfig::checksum`](crate::paging::region::RegionConfig::checksum)) find that.
pub unsafe trait Store: Send + Sync + Debug {
    /// Bytes the store can hold.
    fn capacity(&self) -> ByteCount;

    /// True if the store's bytes, and the space that they take, outlive the process.
    fn outlives_process(&self) -> bool {
        false
    }

    /// Bytes that there is space for at the moment, at most [`capacity`](Store::capacity): less
    /// where the store grows on a file system that others fill.
    fn room(&self) -> ByteCount {
        self.capacity()
    }

    /// Opens a queue that takes up to `depth` requests at once; 1 to 4,096, other values
    /// are brought into that range.
    ///
    /// # Errors
    /// When the kernel refuses the resources.
    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>>;

    /// Bytes that a queue of this depth holds. Regions under a memory manager count them.
    fn queue_bytes(&self, depth: u32) -> ByteCount {
        ByteCount(queue_bytes(depth, SEGMENTS_MAX) as u64)
    }

    /// Fills `into` from `offset` now. Takes no lock and allocates nothing, so that it can be
    /// called from a signal handler.
    ///
    /// # Errors
    /// [`Error::Io`]; a short read is `EIO`.
    ///
    /// # Safety
    /// `into` is valid for writes and nobody else uses it during the call. Nobody writes the store's
    /// range during the call.
    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()>;

    /// Makes durable what was written so far: after a power cut it is still there. Waits until the
    /// device says so. What it covers are the writes whose completion was reported before the call.
    ///
    /// Without this call a write that succeeded may be lost or be kept in part, and the later of two
    /// writes may survive the earlier. A store whose bytes end with the process returns `Ok`.
    ///
    /// # Errors
    /// When the device cannot tell. Writes since the last success may be lost then, and a later
    /// success does not bring them back: the kernel forgets what it could not write.
    fn sync(&self) -> Result<()>;

    /// Gives the device space of a range back. Afterwards its bytes are unspecified.
    /// A store that cannot do this returns `Ok`, as by default.
    ///
    /// # Errors
    /// When the device refuses in a way that is not "not supported".
    ///
    /// # Safety
    /// Nobody needs the range's bytes: no region or pool keeps a page there.
    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let _ = (offset, len);
        Ok(())
    }

    /// Overwrites a range with zeros and waits until the device has them.
    ///
    /// # Errors
    /// The first write that fails, or [`Error::Os`] when the kernel refuses the resources.
    ///
    /// # Safety
    /// As for [`discard`](Store::discard).
    unsafe fn zero(&self, offset: u64, len: u64) -> Result<()> {
        overwrite(self, offset, len)
    }

    /// One line for people: kind, path, size.
    fn describe(&self) -> String;

    /// Name of the store in errors: kind and path, `file /data/table`. Asked when a region or pool begins to
    /// use the store.
    fn name(&self) -> Arc<str> {
        self.describe().into()
    }

    /// Counts of the server with this number, if the store is on one.
    #[cfg(feature = "network")]
    fn server(&self, at: usize) -> Option<ServerStats> {
        let _ = at;
        None
    }

    /// Makes [`read_now`](Store::read_now) work in children of `fork(2)` from now on, for as long as they
    /// live, whatever becomes of this process. Returns the descriptor that it reads by, if any: a child may
    /// close all others. Asked once, when a region begins to use the store.
    ///
    /// # Errors
    /// [`Error::Unsupported`], the default: it does not work there, so that children have no far memory.
    fn inherit(&self) -> Result<Option<RawFd>> {
        Err(NOT_FOR_CHILDREN)
    }

    /// Opens a store for what a forked child takes out of its memory; called in the child.
    ///
    /// # Errors
    /// [`Error::Unsupported`], the default: what the child writes stays in its memory, limit or not.
    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        Err(NOT_FOR_CHILDREN)
    }
}

/// The error of a store that a forked child cannot use.
const NOT_FOR_CHILDREN: Error =
    Error::Unsupported { feature: "a store for forked children", why: "this store has none" };

/// Bytes of one write of zeros.
const ZEROS_LEN: u64 = 1 << 20;
/// Writes of zeros in flight.
const ZERO_WRITES_MAX: u32 = 8;
/// How long the queue is waited for before it is looked at again.
const ZERO_WAIT: Duration = Duration::from_secs(1);

/// Writes zeros through a queue of the store: the way of a store that has no better one.
fn overwrite<S: Store + ?Sized>(store: &S, offset: u64, len: u64) -> Result<()> {
    check_range(offset, len, store.capacity());
    // Outlives the queue: dropping that waits for the device.
    let zeros = Mapping::reserve(ZEROS_LEN as usize, IO_ALIGN, Huge::No)?;
    let mut queue = store.open_queue(ZERO_WRITES_MAX)?;
    let end = offset + len;
    let mut at = offset;
    let mut outcome = Ok(());
    while at < end && outcome.is_ok() {
        let piece = ZEROS_LEN.min(end - at);
        let segments = [slice_from_raw_parts_mut(zeros.as_ptr(), piece as usize)];
        let request = Request { token: at, op: Op::Write, offset: at, segments: &segments };
        // SAFETY: nobody ever writes the mapping, which lives longer than the queue; the pieces
        // do not overlap, and the caller uses the range for nothing else.
        if unsafe { queue.push(request) } {
            at += piece;
        } else {
            collect_writes(&mut *queue, &mut outcome)?;
        }
    }
    while queue.in_flight() > 0 {
        collect_writes(&mut *queue, &mut outcome)?;
    }
    outcome
}

fn collect_writes(queue: &mut dyn Queue, outcome: &mut Result<()>) -> Result<()> {
    let mut note = |_, result| *outcome = std::mem::replace(outcome, Ok(())).and(result);
    queue.wait(ZERO_WAIT, &mut note).map(drop)
}

const _: () = assert!(ZEROS_LEN.is_multiple_of(IO_ALIGN as u64));

/// Requests in flight to one store, owned by one thread.
///
/// Dropping a queue waits for what is in flight, for a bounded time. What a stuck device still holds on
/// to after that uses the buffers for as long as it likes: see [`push`](Queue::push).
///
/// # Safety
/// Buffers are reused and freed by what a queue says:
/// 1. Each accepted request is reported once, with its token, and neither the queue nor the kernel uses
///    its buffers afterwards, whether it succeeded or not.
/// 2. Of a request that is reported as done, all bytes were moved.
/// 3. [`in_flight`](Queue::in_flight) counts all requests that may still use their buffers.
/// 4. A write that is reported as failed is not carried out later, unless the error's `errno` is `ECONNABORTED`: its
///    place is not used again then. Nor is that of one with `EREMCHG`, which was not begun and is made elsewhere.
pub unsafe trait Queue: Send {
    /// Accepts a request; nothing happens before [`submit`](Queue::submit). Returns whether there
    /// was room (`false`: the depth is reached, collect completions first).
    ///
    /// # Safety
    /// The buffers stay valid, and for a read untouched and for a write unchanged, until the
    /// request's completion has been reported; for ever, if the queue is dropped before. (Memory that
    /// this crate maps for itself stays mapped then.) No region or pool keeps a page where a write goes,
    /// but the one that makes it. Requests in flight to one store, through whichever
    /// queues, do not overlap on the store unless all of them are reads.
    ///
    /// # Panics
    /// When an offset, length or address is not a multiple of 4,096, the range does not lie
    /// within the store, or the number of segments is wrong.
    unsafe fn push(&mut self, request: Request<'_>) -> bool;

    /// Hands all accepted requests to the device.
    ///
    /// # Errors
    /// When the kernel refuses; the requests stay accepted and the call can be repeated.
    fn submit(&mut self) -> Result<()>;

    /// Makes [`wait`](Queue::wait) return also while `fd` is readable, as `poll(2)` does: what is
    /// left unread ends the next wait too. At most 4; the descriptor stays open as
    /// long as the queue.
    ///
    /// # Errors
    /// When there are too many.
    fn watch(&mut self, fd: RawFd) -> Result<()>;

    /// Reports finished requests: calls `done` with the token of each, and `Ok` if all bytes were moved. When
    /// none is finished yet, waits until one is, a watched
    /// descriptor is readable, or `timeout` has passed; a zero timeout only looks, which is best done without a
    /// system call: a handler looks again and again before it sleeps. Also submits. Returns whether a request was
    /// reported or a watched descriptor is readable.
    ///
    /// # Errors
    /// When the kernel refuses to wait. `EINTR` is a normal early return, not an error.
    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool>;

    /// Requests accepted and not yet reported.
    fn in_flight(&self) -> u32;
}
