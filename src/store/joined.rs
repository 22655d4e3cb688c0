//! Two stores as one: what a region needs to move pages from one device to the other in place.
//!
//! [`JoinedStore`] has the bytes of the first store from 0, and those of the second from a boundary on. Nothing
//! is kept between the end of the first and the boundary, so no range lies on both. A region cuts either half
//! into slots by itself, and so decides what goes where; a slot's number says where it is.
//!
//! ```text
//!   offset  0 ............ first ......|  gap  |............ second ............
//!                                              ^ boundary
//! ```
//! # Invariants
//! 1. The boundary is a multiple of [`UNIT`]: whatever the page size, no two slots of the halves share what
//!    describes a group of slots, and none of the first is beside one of the second.

#![expect(unsafe_code, reason = "passes buffers on to two stores")]

use super::slots::GROUP_SLOTS;
use super::{Completion, Inherited, OnlyUser, Polled, Polling, Queue, Request, Store};
use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::sys::vm::HUGE_PAGE;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// A group of slots of the largest page size.
const UNIT: u64 = GROUP_SLOTS * HUGE_PAGE as u64;

/// Longest sleep in one queue while the other has requests and no descriptor that says when they are done.
const BLIND_WAIT_MAX: Duration = Duration::from_micros(200);

/// One of the two stores of a [`JoinedStore`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Side {
    /// The first: where pages go unless something else is said.
    #[default]
    First,
    /// The second.
    Second,
}

impl Side {
    /// The other one.
    #[must_use]
    pub fn other(self) -> Side {
        match self {
            Side::First => Side::Second,
            Side::Second => Side::First,
        }
    }
}

/// The halves of a store that consists of two; see [`Store::halves`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Halves {
    /// Bytes of the first, from offset 0.
    pub first: ByteCount,
    /// The offset of the second, which has the rest of the capacity; a multiple of 512 MiB, and more than
    /// `first`.
    pub boundary: u64,
}

/// Two stores as one, between which a region moves pages in place:
/// [`Region::retier`](crate::region::Region::retier).
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{JoinedStore, MemStore, Store};
/// use std::sync::Arc;
///
/// let fast = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let large = Arc::new(MemStore::new(ByteCount::mib(256))?);
/// let store = JoinedStore::new(fast, large)?;
/// assert_eq!(store.room(), ByteCount::mib(320));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct JoinedStore {
    first: OnlyUser,
    second: OnlyUser,
    boundary: u64,
}

impl JoinedStore {
    /// Joins two stores, whose contents are of no use from now on.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) when either has a user, or both are the same.
    pub fn new(first: Arc<dyn Store>, second: Arc<dyn Store>) -> Result<JoinedStore> {
        let boundary = (first.capacity().0 / UNIT + 1) * UNIT;
        Ok(JoinedStore { first: OnlyUser::of(first)?, second: OnlyUser::of(second)?, boundary })
    }

    /// The store of an offset, and the offset there.
    fn at(&self, offset: u64) -> (&dyn Store, u64) {
        match offset.checked_sub(self.boundary) {
            None => (&*self.first, offset),
            Some(offset) => (&*self.second, offset),
        }
    }
}

// SAFETY: each half is a store that keeps the promises, and they share no offsets.
unsafe impl Store for JoinedStore {
    fn capacity(&self) -> ByteCount {
        ByteCount(self.boundary + self.second.capacity().0)
    }

    fn halves(&self) -> Option<Halves> {
        Some(Halves { first: self.first.capacity(), boundary: self.boundary })
    }

    fn occupied(&self) -> Option<ByteCount> {
        Some(ByteCount(self.first.occupied()?.0 + self.second.occupied()?.0))
    }

    fn outlives_process(&self) -> bool {
        self.first.outlives_process() || self.second.outlives_process()
    }

    fn room(&self) -> ByteCount {
        ByteCount(self.first.room().0 + self.second.room().0)
    }

    fn memory(&self) -> ByteCount {
        ByteCount(self.first.memory().0 + self.second.memory().0)
    }

    fn compressed(&self) -> ByteCount {
        ByteCount(self.first.compressed().0 + self.second.compressed().0)
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let mut queues = [self.first.open_queue(depth)?, self.second.open_queue(depth)?];
        let [first, second] = &mut queues;
        let news = second.news();
        let is_told = news.is_some();
        news.map_or(Ok(()), |news| first.watch(news))?;
        Ok(Box::new(JoinedQueue { queues, boundary: self.boundary, is_told }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut u8, len: usize) -> Result<()> {
        let (store, offset) = self.at(offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { store.read_now(offset, into, len) }
    }

    fn sync(&self) -> Result<()> {
        self.first.sync().and(self.second.sync())
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let (store, offset) = self.at(offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { store.discard(offset, len) }
    }

    unsafe fn zero(&self, offset: u64, len: u64) -> Result<()> {
        let (store, offset) = self.at(offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { store.zero(offset, len) }
    }

    fn describe(&self) -> String {
        format!("{}; second: {}", self.first.describe(), self.second.describe())
    }

    fn name(&self) -> Arc<str> {
        format!("{} with {}", self.first.name(), self.second.name()).into()
    }

    fn inherit(&self) -> Option<Inherited> {
        let ([one, none], [other, nothing]) =
            (self.first.inherit()?.descriptors, self.second.inherit()?.descriptors);
        // Halves are not joined ones themselves.
        (none.is_none() && nothing.is_none()).then_some(Inherited { descriptors: [one, other] })
    }

    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        self.first.open_in_child()
    }
}

/// A queue of each store, waited for as one.
struct JoinedQueue {
    queues: [Box<dyn Queue>; 2],
    boundary: u64,
    /// The first watches the second's descriptor for news.
    is_told: bool,
}

// SAFETY: each request is one of a queue that keeps the promises.
unsafe impl Queue for JoinedQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let second = request.offset.checked_sub(self.boundary);
        let queue = &mut self.queues[usize::from(second.is_some())];
        let offset = second.unwrap_or(request.offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { queue.push(Request { offset, ..request }) }
    }

    fn submit(&mut self) -> Result<()> {
        self.queues.iter_mut().try_for_each(|queue| queue.submit())
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.queues.iter_mut().try_for_each(|queue| queue.watch(fd))
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(Completion)) -> Result<()> {
        let [first, second] = &mut self.queues;
        if second.in_flight() == 0 {
            // What its ring has to say of the watched descriptors, the first one knows by itself. Left there, it
            // would end this wait, and each after it, at once.
            if self.is_told {
                second.wait(Duration::ZERO, done)?;
            }
            return first.wait(timeout, done);
        }
        if first.in_flight() == 0 {
            return second.wait(timeout, done);
        }
        let total = first.in_flight() + second.in_flight();
        second.wait(Duration::ZERO, done)?;
        first.wait(Duration::ZERO, done)?;
        if first.in_flight() + second.in_flight() < total || timeout.is_zero() {
            return Ok(());
        }
        // An early return does no harm: the caller looks at what it has, and waits again.
        let slice = if self.is_told { timeout } else { timeout.min(BLIND_WAIT_MAX) };
        first.wait(slice, done)?;
        second.wait(Duration::ZERO, done)
    }

    fn poll_by(&mut self, polling: Polling) {
        self.queues.iter_mut().for_each(|queue| queue.poll_by(polling));
    }

    fn polled(&mut self) -> Polled {
        let [first, second] = [0, 1].map(|at: usize| self.queues[at].polled());
        Polled {
            waits: first.waits + second.waits,
            hits: first.hits + second.hits,
            yields: first.yields + second.yields,
            yield_max: first.yield_max.max(second.yield_max),
        }
    }

    fn in_flight(&self) -> u32 {
        self.queues.iter().map(|queue| queue.in_flight()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{BlockStore, IO_ALIGN, MemStore, Op, Segment};
    use crate::sys::event::{EventFd, poll_readable};
    use crate::sys::vm::{Huge, Mapping};

    fn memory() -> Arc<dyn Store> {
        Arc::new(MemStore::new(ByteCount::mib(1)).expect("address space"))
    }

    fn file() -> Arc<dyn Store> {
        Arc::new(BlockStore::temporary(None, Some(ByteCount::mib(1))).expect("a temporary file"))
    }

    /// Writes to the second store and waits for it, so that its ring watches what the queue watches.
    fn write_to_second(queue: &mut JoinedQueue) {
        let buffer = Mapping::reserve(IO_ALIGN, IO_ALIGN, Huge::Default).expect("address space");
        let segments = [Segment { ptr: buffer.as_ptr(), len: IO_ALIGN }];
        let (op, offset) = (Op::Write, queue.boundary);
        let request = Request { token: 0, op, offset, segments: &segments };
        // SAFETY: the buffer outlives the request, which is waited for, and the file is this test's.
        assert!(unsafe { queue.push(request) });
        queue.submit().expect("a queue that works");
        let mut ended = 0;
        while ended == 0 {
            let done = &mut |Completion { result, .. }: Completion| {
                result.expect("the file can be written");
                ended += 1;
            };
            queue.wait(Duration::from_millis(10), done).expect("a queue that works");
        }
    }

    #[test]
    fn a_queue_waits_again_after_a_bell_was_answered() {
        for first in [memory(), file()] {
            let second = file();
            let mut queues = [&first, &second].map(|store| store.open_queue(4).expect("a queue"));
            let Some(news) = queues[1].news() else { return };
            queues[0].watch(news).expect("room for a descriptor");
            let mut queue = JoinedQueue { queues, boundary: UNIT, is_told: true };
            let bell = EventFd::new().expect("eventfd");
            queue.watch(bell.raw_fd()).expect("room for a descriptor");
            write_to_second(&mut queue);
            bell.signal();
            queue.wait(Duration::from_millis(10), &mut |_| ()).expect("a queue that works");
            bell.drain();
            queue.wait(Duration::ZERO, &mut |_| ()).expect("a queue that works");
            let is_readable = poll_readable(&[news], Duration::ZERO).expect("a descriptor");
            assert!(!is_readable, "it ends each wait of the first queue at once");
        }
    }
}
