//! Stores: where the pages that are not resident live.
//!
//! A [`Store`] is flat bytes addressed by offset, read and written in whole pages through
//! [`Queue`]s; who owns which bytes is the slot map's business. Layer 3: uses
//! `base`, `sys`, `meta`.
//!
//! # Invariants
//! 1. A request is reported exactly once: done or failed. A short transfer is a failure (`EIO`).
//! 2. Offsets, lengths and addresses are multiples of [`IO_ALIGN`].

#![expect(unsafe_code, reason = "declares the unsafe calls that move bytes through raw buffers")]

use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::fmt::Debug;
use std::os::fd::RawFd;
use std::time::Duration;

/// Alignment of every offset, length and buffer address, in bytes: what all block devices take.
pub const IO_ALIGN: usize = 4096;

/// Most buffers of one vectored request.
pub const SEGMENTS_MAX: usize = 64;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Store to memory.
    Read,
    /// Memory to store.
    Write,
}

/// One buffer of a request.
#[derive(Clone, Copy, Debug)]
pub struct Segment {
    /// Start of the buffer; a multiple of [`IO_ALIGN`].
    pub ptr: *mut u8,
    /// Bytes; a multiple of [`IO_ALIGN`].
    pub len: usize,
}

/// A read or write of consecutive bytes of the store into or from a few buffers.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Names the request in its [`Completion`].
    pub token: u64,
    /// Read or write.
    pub op: Op,
    /// First byte on the store.
    pub offset: u64,
    /// The buffers, in store order; 1 to [`SEGMENTS_MAX`] of them.
    pub segments: &'a [Segment],
}

/// A finished request.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// Whether all bytes were moved.
    pub result: Result<()>,
}

/// A place that keeps bytes for pages that are not resident.
pub trait Store: Send + Sync + Debug {
    /// Bytes the store can hold.
    fn capacity(&self) -> ByteCount;

    /// Bytes the store occupies at the moment where that is known (blocks of a sparse file).
    fn occupied(&self) -> Option<ByteCount>;

    /// Opens a queue that takes up to `depth` requests at once.
    ///
    /// # Errors
    /// When the kernel refuses the resources.
    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>>;

    /// Reads `len` bytes at `offset` now. Takes no lock and allocates nothing, so that it can be
    /// called from a signal handler.
    ///
    /// # Errors
    /// [`Error::Io`](crate::Error::Io); a short read is `EIO`.
    ///
    /// # Safety
    /// `into` is valid for writes of `len` bytes and nobody else uses them during the call.
    unsafe fn read_now(&self, offset: u64, into: *mut u8, len: usize) -> Result<()>;

    /// Gives the device space of a range back. Afterwards its bytes are unspecified.
    /// A store that cannot do this returns `Ok`.
    ///
    /// # Errors
    /// When the device refuses in a way that is not "not supported".
    fn discard(&self, offset: u64, len: u64) -> Result<()>;

    /// One line for people: kind, path, size.
    fn describe(&self) -> String;
}

/// Requests in flight to one store, owned by one thread.
///
/// Dropping a queue waits for what is in flight, for a bounded time.
pub trait Queue: Send {
    /// Accepts a request; nothing happens before [`submit`](Queue::submit). Returns whether there
    /// was room (`false`: the depth is reached, collect completions first).
    ///
    /// # Safety
    /// The buffers stay valid, and for a read untouched and for a write unchanged, until the
    /// request's completion has been reported.
    unsafe fn push(&mut self, request: Request<'_>) -> bool;

    /// Hands all accepted requests to the device.
    ///
    /// # Errors
    /// When the kernel refuses; the requests stay accepted and the call can be repeated.
    fn submit(&mut self) -> Result<()>;

    /// Makes [`wait`](Queue::wait) return also when `fd` becomes readable. At most 4.
    ///
    /// # Errors
    /// When the kernel refuses.
    fn watch(&mut self, fd: RawFd) -> Result<()>;

    /// Reports finished requests. When none is finished yet, waits until one is, a watched
    /// descriptor is readable, or `timeout` has passed; a zero timeout only looks. Also submits.
    ///
    /// # Errors
    /// When the kernel refuses to wait. `EINTR` is a normal early return, not an error.
    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(Completion)) -> Result<()>;

    /// Requests accepted and not yet reported.
    fn in_flight(&self) -> u32;
}
