//! Queues on io_uring: many requests at the device at once, one place to wait.
//!
//! A [`UringQueue`] is a fixed table of flights. A flight's index is the tag of its ring entry; its
//! vector of buffers lives in the table until the outcome is in.
//!
//! # Invariants
//! 1. A flight is in the free list or has exactly one entry in the ring, never both.
//! 2. At most one poll per watched descriptor is in the ring. It is one-shot and pushed anew by
//!    the wait after the one that it ended: the kernel then looks at the descriptor again, so that
//!    no event is lost that was left unread. (A multishot poll tells of new events only.)

#![expect(unsafe_code, reason = "passes buffers on to the ring")]

use super::device::Device;
use super::inline_queue::ENTRY_BYTES;
use super::vectors::Vectors;
use super::{Op, Queue, Request, WATCHES_FULL, WATCHES_MAX};
use crate::base::deadline::{Deadline, look_every};
use crate::base::error::{Error, Result};
use crate::sys::file::{Errno, IoVec};
use crate::sys::messages;
use crate::sys::uring::{Ring, RingOutcome};
use crate::sys::vm::never_unmap;
use std::os::fd::{AsFd, RawFd};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

/// Tags from here on are polls; below, flights.
const TAG_WATCH: u64 = 1 << 32;

/// The tag of cancellations, whose outcome nobody needs.
const TAG_CANCEL: u64 = 1 << 33;

/// Times a request is started again after the kernel said `EAGAIN` or `EINTR`.
const RETRIES_MAX: u32 = 16;

/// Longest single wait: keeps deadlines representable.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// How long dropping a queue waits for the device, and then again after cancelling.
const DROP_WAIT_MAX: Duration = Duration::from_secs(5);

/// Said once: a process that gives up on a device mostly does so with many queues.
static GIVEN_UP: Once = Once::new();

/// True if a queue of this process was dropped with requests in flight.
pub(crate) fn has_given_up() -> bool {
    GIVEN_UP.is_completed()
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    token: u64,
    op: Op,
    offset: u64,
    len: u64,
    moved: u64,
    /// Buffers left: `first..count` of those that it had.
    first: usize,
    count: usize,
    retries: u32,
}

#[derive(Clone, Copy, Debug)]
struct WatchedFd {
    fd: RawFd,
    armed: bool,
}

/// Result of one look at the ring.
#[derive(Clone, Copy, Debug, Default)]
struct Reaped {
    has_reported: bool,
    woken: bool,
}

impl Reaped {
    fn is_news(self) -> bool {
        self.has_reported || self.woken
    }
}

/// A queue on io_uring.
pub(super) struct UringQueue {
    ring: Ring,
    device: Arc<Device>,
    flights: Box<[Flight]>,
    vectors: Vectors,
    /// Indices of unused flights: `free[..free_len]`.
    free: Box<[u32]>,
    free_len: usize,
    watches: [Option<WatchedFd>; WATCHES_MAX],
    /// The last wait only looked, and found nothing.
    has_looked: bool,
}

/// Bytes of a queue of this depth, of requests of up to `segments` buffers: of the kinds there are, of the
/// largest.
pub(crate) fn queue_bytes(depth: u32, segments: usize) -> usize {
    /// Of a ring, for each entry: a submission, two completions and an index.
    const RING_ENTRY: usize = 64 + 2 * 16 + 4;
    let depth = depth as usize;
    let entries = (depth + WATCHES_MAX).next_power_of_two();
    let flights = depth * (size_of::<Flight>() + size_of::<u32>()) + entries * RING_ENTRY;
    depth * Vectors::bytes(segments) + flights.max(depth * ENTRY_BYTES)
}

impl UringQueue {
    /// `depth` is that of `vectors`.
    pub(super) fn new(
        device: Arc<Device>,
        depth: u32,
        vectors: Vectors,
    ) -> std::result::Result<UringQueue, Errno> {
        let idle = Flight {
            token: 0,
            op: Op::Read,
            offset: 0,
            len: 0,
            moved: 0,
            first: 0,
            count: 0,
            retries: 0,
        };
        Ok(UringQueue {
            ring: Ring::new(depth + WATCHES_MAX as u32)?,
            device,
            flights: vec![idle; depth as usize].into_boxed_slice(),
            vectors,
            // The lowest is used first, and the one that was used last.
            free: (0..depth).rev().collect(),
            free_len: depth as usize,
            watches: [None; WATCHES_MAX],
            has_looked: false,
        })
    }

    /// Puts what is left of a flight into the ring.
    fn launch(&mut self, index: u32) {
        let flight = &self.flights[index as usize];
        let iovecs = &self.vectors.get(index as usize, flight.count)[flight.first..];
        let (direction, at) = (flight.op.direction(), flight.offset + flight.moved);
        let offset = self.device.place(at);
        let fd = self.device.as_fd();
        // SAFETY:
        // - The caller of `push` keeps the buffers until the completion is reported.
        // - The vector is not touched before the outcome (invariant 1). It and the device's
        //   descriptor live as long as the ring; what is submitted uses neither any more
        //   (IORING_FEAT_SUBMIT_STABLE, which `Ring::new` demands; requests hold the file).
        unsafe { self.ring.push_transfer(index.into(), fd, direction, iovecs, offset) }
    }

    /// Takes all outcomes that are there.
    fn reap(&mut self, done: &mut dyn FnMut(u64, Result<()>)) -> Reaped {
        let mut reaped = Reaped::default();
        while let Some(RingOutcome { tag, result }) = self.ring.take() {
            if tag >= TAG_CANCEL {
                continue;
            }
            if tag >= TAG_WATCH {
                let watch = &mut self.watches[(tag - TAG_WATCH) as usize];
                // An error means that the descriptor cannot be polled any more.
                *watch = watch.filter(|_| result.is_ok()).map(|w| WatchedFd { armed: false, ..w });
                reaped.woken = true;
                continue;
            }
            let index = u32::try_from(tag).expect("tags below TAG_WATCH are indices");
            if let Some(result) = self.settle(index, result) {
                let token = self.flights[index as usize].token;
                self.free[self.free_len] = index;
                self.free_len += 1;
                reaped.has_reported = true;
                done(token, result);
            }
        }
        reaped
    }

    /// Books an outcome: the flight's end, or `None` when it goes on.
    fn settle(
        &mut self,
        index: u32,
        result: std::result::Result<u32, Errno>,
    ) -> Option<Result<()>> {
        let flight = &mut self.flights[index as usize];
        let errno = match result {
            // End of file, or a device that takes nothing.
            Ok(0) => Errno(libc::EIO),
            Ok(moved) => {
                flight.moved += u64::from(moved);
                if flight.moved == flight.len {
                    return Some(Ok(()));
                }
                let left = &mut self.vectors.get(index as usize, flight.count)[flight.first..];
                flight.first += IoVec::advance(left, moved as usize);
                self.launch(index);
                return None;
            }
            Err(Errno(libc::EAGAIN | libc::EINTR)) if flight.retries < RETRIES_MAX => {
                flight.retries += 1;
                self.launch(index);
                return None;
            }
            // The rest of a transfer that stopped at an odd place.
            Err(Errno(libc::EINVAL)) if flight.moved > 0 => Errno(libc::EIO),
            Err(errno) => errno,
        };
        Some(Err(flight.op.failed(self.device.name(), flight.offset, flight.len, errno)))
    }

    fn arm_watches(&mut self) {
        for (index, watch) in self.watches.iter_mut().enumerate() {
            if let Some(watch) = watch.as_mut().filter(|watch| !watch.armed) {
                self.ring.push_poll(TAG_WATCH + index as u64, watch.fd);
                watch.armed = true;
            }
        }
    }

    /// Waits until the ring is empty or the time is up.
    fn drain(&mut self, limit: Duration) {
        let mut deadline = Deadline::new(limit);
        let slice = look_every(limit);
        loop {
            self.reap(&mut |_, _| ());
            let armed = self.watches.iter().flatten().any(|watch| watch.armed);
            let busy = armed || self.in_flight() > 0;
            if !busy || deadline.is_over() || self.ring.submit_and_wait(slice).is_err() {
                return;
            }
        }
    }

    fn cancel_watches(&mut self) {
        for (index, watch) in self.watches.iter().enumerate() {
            if watch.is_some_and(|watch| watch.armed) {
                self.ring.push_cancel(TAG_CANCEL, TAG_WATCH + index as u64);
            }
        }
    }

    /// Gives up on a device that does not answer, and with it the memory that it may still use: without
    /// O_DIRECT the kernel holds no pages of it and goes by the address, whatever is mapped there. The
    /// device stays this process's, for what is still to be written would overwrite a successor's data.
    fn leave_to_the_kernel(&mut self) {
        let is_free = |index: usize| self.free[..self.free_len].contains(&(index as u32));
        let (mut start, mut end) = (usize::MAX, 0);
        for index in (0..self.flights.len()).filter(|index| !is_free(*index)) {
            let flight = &self.flights[index];
            for buffer in &self.vectors.get(index, flight.count)[flight.first..] {
                let addr = buffer.ptr().addr();
                (start, end) = (start.min(addr), end.max(addr + buffer.len()));
            }
        }
        never_unmap(start, end);
        std::mem::forget(Arc::clone(&self.device));
        GIVEN_UP.call_once(|| {
            let text = format_args!(
                "a device has not answered for 10 s; the memory and the device that its requests \
                 use stay in use until the process ends"
            );
            messages::warn("a device has not answered", text);
            messages::flush();
        });
    }

    fn cancel_requests(&mut self) {
        for index in 0..self.flights.len() as u32 {
            if !self.free[..self.free_len].contains(&index) {
                self.ring.push_cancel(TAG_CANCEL, index.into());
            }
        }
    }
}

// SAFETY: a flight is reported when the kernel has reported its entry and all bytes were moved, or with
// an error and no entry in the ring (invariant 1).
unsafe impl Queue for UringQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let len = request.check(self.device.capacity());
        if self.free_len == 0 {
            return false;
        }
        self.free_len -= 1;
        let index = self.free[self.free_len];
        let count = self.vectors.set(index as usize, &request);
        self.flights[index as usize] = Flight {
            token: request.token,
            op: request.op,
            offset: request.offset,
            len,
            moved: 0,
            first: 0,
            count,
            retries: 0,
        };
        self.launch(index);
        true
    }

    fn submit(&mut self) -> Result<()> {
        self.ring.submit().map_err(enter_failed)
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        let free = self.watches.iter_mut().find(|watch| watch.is_none()).ok_or(WATCHES_FULL)?;
        *free = Some(WatchedFd { fd, armed: false });
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        let deadline = Instant::now() + timeout.min(WAIT_MAX);
        let mut reaped = self.reap(done);
        // A poll that ended before now told of what the caller has probably read since, unless it has done nothing
        // but look. Whatever is still there ends the new one at once.
        reaped.woken &= std::mem::take(&mut self.has_looked);
        loop {
            if reaped.is_news() {
                self.submit()?;
                return Ok(true);
            }
            self.arm_watches();
            if self.ring.has_outcomes() {
                // Nothing that the kernel would have to be asked for.
                reaped = self.reap(done);
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !left.is_zero() || self.ring.has_unsubmitted() || self.ring.has_news() {
                self.ring.submit_and_wait(left).map_err(enter_failed)?;
                reaped = self.reap(done);
            }
            if left.is_zero() {
                self.has_looked = timeout.is_zero() && !reaped.is_news();
                self.submit()?;
                return Ok(reaped.is_news());
            }
        }
    }

    fn in_flight(&self) -> u32 {
        (self.flights.len() - self.free_len) as u32
    }
}

impl Drop for UringQueue {
    fn drop(&mut self) {
        if !self.ring.is_here() {
            return; // What is in flight is the parent's.
        }
        // A poll left in the ring would keep its descriptor's file open until the kernel gets
        // round to tearing the ring down, after this call.
        if self.submit().is_ok() {
            self.cancel_watches();
        }
        self.drain(DROP_WAIT_MAX);
        if self.in_flight() > 0 && self.submit().is_ok() {
            self.cancel_requests();
            self.drain(DROP_WAIT_MAX);
        }
        if self.in_flight() > 0 {
            self.leave_to_the_kernel();
        }
    }
}

fn enter_failed(errno: Errno) -> Error {
    Error::Os { call: "io_uring_enter", errno: errno.0 }
}
