//! Queues whose requests are done by the time [`submit`](Queue::submit) returns.
//!
//! [`InlineQueue`] runs requests one after the other on the calling thread: on a file where there
//! is no io_uring, and on the memory store. Requests pass through a ring of fixed size:
//!
//! ```text
//! reported <= ran <= accepted <= reported + depth      (counters, each an index modulo depth)
//!          ^ finished  ^ waiting for submit
//! ```

#![expect(unsafe_code, reason = "passes buffers on to the transfer")]

use super::vectors::Vectors;
use super::{DEPTH_MAX, Op, Queue, Request, WATCHES_FULL, WATCHES_MAX};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::event::poll_readable;
use crate::sys::file::{IoVec, SysResult};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Something that moves bytes while the caller waits.
pub(super) trait Mover: Send {
    /// Bytes that there are.
    fn capacity(&self) -> ByteCount;

    /// Name in errors.
    fn name(&self) -> &Arc<str>;

    /// Moves all bytes of `iovecs`, which it may use up.
    ///
    /// # Safety
    /// As for [`Queue::push`], until the call returns.
    unsafe fn transfer(&self, op: Op, iovecs: &mut [IoVec], offset: u64) -> SysResult;
}

#[derive(Debug)]
struct Queued {
    token: u64,
    op: Op,
    offset: u64,
    len: u64,
    /// Number of its buffers.
    count: usize,
    result: Result<()>,
}

/// Bytes of a queue for each request, its buffers aside.
pub(super) const ENTRY_BYTES: usize = size_of::<Queued>();

/// A queue over a [`Mover`].
#[derive(Debug)]
pub(super) struct InlineQueue<T> {
    target: T,
    entries: Box<[Queued]>,
    vectors: Vectors,
    accepted: u64,
    ran: u64,
    reported: u64,
    watched: [RawFd; WATCHES_MAX],
    watches: usize,
}

impl<T: Mover> InlineQueue<T> {
    /// # Errors
    /// As for [`Vectors::new`].
    pub(super) fn new(target: T, depth: u32) -> Result<InlineQueue<T>> {
        let depth = depth.clamp(1, DEPTH_MAX);
        let entry =
            || Queued { token: 0, op: Op::Read, offset: 0, len: 0, count: 0, result: Ok(()) };
        Ok(InlineQueue {
            target,
            entries: (0..depth).map(|_| entry()).collect(),
            vectors: Vectors::new(depth)?,
            accepted: 0,
            ran: 0,
            reported: 0,
            watched: [-1; WATCHES_MAX],
            watches: 0,
        })
    }

    fn entry(&mut self, number: u64) -> &mut Queued {
        let depth = self.entries.len() as u64;
        &mut self.entries[(number % depth) as usize]
    }
}

// SAFETY: buffers are used within `submit` alone, which moves all bytes or fails; each entry is reported
// once after that.
unsafe impl<T: Mover> Queue for InlineQueue<T> {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let len = request.check(self.target.capacity());
        if self.in_flight() as usize == self.entries.len() {
            return false;
        }
        let index = (self.accepted % self.entries.len() as u64) as usize;
        let entry = &mut self.entries[index];
        entry.token = request.token;
        entry.op = request.op;
        entry.offset = request.offset;
        entry.len = len;
        entry.count = self.vectors.set(index, &request);
        self.accepted += 1;
        true
    }

    fn submit(&mut self) -> Result<()> {
        let depth = self.entries.len() as u64;
        while self.ran < self.accepted {
            let index = (self.ran % depth) as usize;
            let entry = &mut self.entries[index];
            let iovecs = self.vectors.get(index, entry.count);
            // SAFETY: the caller of `push` keeps the buffers until the completion is reported.
            let result = unsafe { self.target.transfer(entry.op, iovecs, entry.offset) };
            let name = self.target.name();
            entry.result =
                result.map_err(|errno| entry.op.failed(name, entry.offset, entry.len, errno));
            self.ran += 1;
        }
        Ok(())
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        *self.watched.get_mut(self.watches).ok_or(WATCHES_FULL)? = fd;
        self.watches += 1;
        Ok(())
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        self.submit()?;
        if self.reported == self.ran {
            return poll_readable(&self.watched[..self.watches], timeout)
                .map_err(|errno| Error::Os { call: "poll", errno: errno.0 });
        }
        while self.reported < self.ran {
            let entry = self.entry(self.reported);
            let result = std::mem::replace(&mut entry.result, Ok(()));
            let token = entry.token;
            self.reported += 1;
            done(token, result);
        }
        Ok(true)
    }

    fn in_flight(&self) -> u32 {
        (self.accepted - self.reported) as u32
    }
}
