//! A thread's requests to the servers, however these keep the pages.

#![expect(unsafe_code, reason = "takes the buffers of requests")]

use crate::ends::{NbdBuffer, NbdEnd, SERVERS_MAX};
use crate::set_queue::SetQueue;
use crate::striped_queue::StripedQueue;
use crate::sys::{self, Awaited};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// Maximum number of descriptors that are watched beside the servers'.
const WATCHED_MAX: usize = 4;

/// Requests in flight to the servers of a client, owned by one thread.
///
/// Allocates when it is made, and never again.
#[derive(Debug)]
pub struct NbdQueue {
    way: QueueWay,
    watched: Vec<RawFd>,
}

#[derive(Debug)]
enum QueueWay {
    Copies(Box<SetQueue>),
    Striped(Box<StripedQueue>),
}

impl NbdQueue {
    pub(crate) fn of_copies(queue: SetQueue) -> NbdQueue {
        NbdQueue { way: QueueWay::Copies(queue.into()), watched: Vec::with_capacity(WATCHED_MAX) }
    }

    pub(crate) fn striped(queue: StripedQueue) -> NbdQueue {
        NbdQueue { way: QueueWay::Striped(queue.into()), watched: Vec::with_capacity(WATCHED_MAX) }
    }

    /// Bytes beside those of the requests.
    pub(crate) const fn bytes() -> usize {
        WATCHED_MAX * size_of::<RawFd>()
    }

    /// Makes [`wait`](NbdQueue::wait) return also while a descriptor is readable, which stays open as long as the queue;
    /// returns whether there was room for it.
    #[must_use]
    pub fn watch(&mut self, fd: RawFd) -> bool {
        let has_room = self.watched.len() < WATCHED_MAX;
        self.watched.extend(has_room.then_some(fd));
        has_room
    }

    /// Requests whose end was not reported.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        match &self.way {
            QueueWay::Copies(queue) => queue.in_flight(),
            QueueWay::Striped(queue) => queue.in_flight(),
        }
    }

    /// Takes a read of `len` bytes at `offset`, or a write; returns whether there was room. Nothing is sent before
    /// [`submit`](NbdQueue::submit) or [`wait`](NbdQueue::wait).
    ///
    /// # Safety
    /// The buffers have `len` bytes together, and can be read, for a read also written, until the request's end has been
    /// reported or the queue was dropped; nobody else uses those of a read meanwhile, and nobody changes those of a
    /// write. Requests in flight do not overlap on the export, through whichever queues, unless all of them are reads.
    ///
    /// # Panics
    /// When the range is empty, is no multiple of 4,096 bytes, or lies outside of the exports; with parity also when the
    /// length of a buffer is no such multiple.
    pub unsafe fn push(
        &mut self,
        token: u64,
        is_read: bool,
        offset: u64,
        buffers: impl ExactSizeIterator<Item = NbdBuffer>,
    ) -> bool {
        match &mut self.way {
            // SAFETY: the caller's promise, passed on.
            QueueWay::Copies(queue) => unsafe { queue.push(token, is_read, offset, buffers) },
            // SAFETY: as above.
            QueueWay::Striped(queue) => unsafe { queue.push(token, is_read, offset, buffers) },
        }
    }

    /// Sends what was pushed.
    pub fn submit(&mut self) {
        match &mut self.way {
            QueueWay::Copies(queue) => queue.submit(),
            QueueWay::Striped(queue) => queue.submit(),
        }
    }

    fn report(&mut self, done: &mut dyn FnMut(NbdEnd)) -> bool {
        match &mut self.way {
            QueueWay::Copies(queue) => queue.report(done),
            QueueWay::Striped(queue) => queue.report(done),
        }
    }

    /// Reports requests that have ended, with their tokens. While none has, waits until one does, a watched descriptor
    /// is readable, or `timeout` has passed. Sends what was pushed before. Returns whether a request was reported or a
    /// watched descriptor is readable.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(NbdEnd)) -> io::Result<bool> {
        let start = Instant::now();
        loop {
            self.submit();
            if self.report(done) {
                return Ok(true);
            }
            let left = timeout.saturating_sub(start.elapsed());
            let mut awaited = [Awaited { fd: -1, write: false }; SERVERS_MAX + WATCHED_MAX];
            let (of_links, most) = match &self.way {
                QueueWay::Copies(queue) => {
                    (fill(&mut awaited, queue.awaited()), queue.look_every())
                }
                QueueWay::Striped(queue) => {
                    (fill(&mut awaited, queue.awaited()), queue.look_every())
                }
            };
            let others = self.watched.iter().map(|fd| Awaited { fd: *fd, write: false });
            let count = of_links + fill(&mut awaited[of_links..], others);
            let ready = sys::wait(&awaited[..count], left.min(most.unwrap_or(left)))?;
            let of_links = ready & ((1 << of_links) - 1);
            match &mut self.way {
                QueueWay::Copies(queue) => {
                    if of_links != 0 {
                        queue.pump();
                    }
                    queue.check();
                }
                QueueWay::Striped(queue) => queue.look(of_links),
            }
            let (is_reported, is_woken) = (self.report(done), ready != of_links);
            // Not by what was left before: there would be another call only to find that nothing is.
            if is_reported || is_woken || start.elapsed() >= timeout {
                self.submit();
                return Ok(is_reported || is_woken);
            }
        }
    }
}

fn fill(awaited: &mut [Awaited], with: impl Iterator<Item = Awaited>) -> usize {
    awaited.iter_mut().zip(with).map(|(to, from)| *to = from).count()
}
