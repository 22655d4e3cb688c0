//! A store that keeps blocks compressed in memory, in front of another one.
//!
//! A [`CompressedStore`] has a fixed amount of memory. Blocks that are written are compressed (LZ4) and kept
//! there; those that do not become smaller go to the next store at once. When memory runs low the oldest
//! blocks are moved on to the next store, beside the writes of the queue that does it. Reads find out which
//! of the two has a block. Uses `ring`, and the next store's queues.
//!
//! ```text
//!   push(write) -> waiting -> compressed: into the ring, done
//!                          -> not smaller, or no room: to the next store
//!   push(read)  -> waiting -> in the ring: decompressed, done
//!                          -> else: from the next store
//!   oldest segment of the ring -> bounce buffers -> the next store -> clean
//! ```
//! # Invariants
//! 1. A block's newest content is in the ring, if its word leads there, else at the next store.
//! 2. The bounce buffers are used by the writes of one batch, which are settled before the next one.

#![expect(unsafe_code, reason = "compresses and decompresses in raw buffers")]

use super::ring::{Kept, Ring, Taken};
use super::{
    Completion, DEPTH_MAX, IO_ALIGN, OnlyUser, Op, Polled, Polling, Queue, Request, SEGMENTS_MAX,
    Segment, Store, check_range,
};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::vm::{Huge, Mapping};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the bounce buffers of a queue, unless a block is larger.
const BOUNCES_LEN: usize = 1 << 20;
/// Marks the inner queue's tokens of blocks that are moved on; the rest is where in the batch.
const TOKEN_MOVE: u64 = 1 << 63;
/// A block is kept if it shrinks to KEPT_NUM/KEPT_DEN or less: what saves less is read faster from memory that
/// holds others.
const KEPT_NUM: usize = 3;
const KEPT_DEN: usize = 4;
/// How long a next store that fails is left alone before blocks are moved there again.
const PAUSE: Duration = Duration::from_secs(1);

/// A store that keeps blocks compressed in memory, and on another store what does not fit or does not
/// become smaller.
///
/// All requests are of whole blocks. What is in memory ends with the process: not for files that are to
/// outlive it.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{CompressedStore, MemStore, Store};
/// use std::sync::Arc;
///
/// let next = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let store = CompressedStore::new(next, ByteCount::mib(8), ByteCount::kib(16))?;
/// assert_eq!(store.capacity(), ByteCount::mib(64));
/// assert_eq!(store.memory(), ByteCount::mib(8));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct CompressedStore {
    next: OnlyUser,
    ring: Arc<Ring>,
}

impl CompressedStore {
    /// Keeps up to `memory` bytes of compressed blocks in front of `next`, whose contents are of no use from
    /// now on. A block is what is compressed as one, and the unit of requests.
    ///
    /// # Errors
    /// [`Error::BadRange`] when `block` is not a positive multiple of 4 KiB, [`Error::Config`] for
    /// less memory than 2 MiB or 128 blocks, [`Error::Os`] without address space, [`Error::Device`] when
    /// `next` has a user.
    pub fn new(
        next: Arc<dyn Store>,
        memory: ByteCount,
        block: ByteCount,
    ) -> Result<CompressedStore> {
        let block = block.as_usize();
        if block == 0 || !block.is_multiple_of(IO_ALIGN) {
            return Err(Error::BadRange { reason: "block is not a multiple of 4,096 bytes" });
        }
        let least = Ring::memory_min(block);
        if memory < least {
            let reason =
                format!("{memory} is less than {least}, for pages of {}", ByteCount(block as u64));
            return Err(Error::Config { key: "compress".to_owned(), reason });
        }
        let next = OnlyUser::of(next)?;
        let blocks = next.capacity().as_usize() / block;
        let ring = Arc::new(Ring::new(memory, block, blocks)?);
        Ok(CompressedStore { next, ring })
    }

    /// The numbers of a range's blocks.
    fn blocks(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        check_range(offset, len, self.capacity());
        let block = self.ring.block() as u64;
        let is_whole = offset.is_multiple_of(block) && len.is_multiple_of(block);
        assert!(is_whole, "bytes {offset}+{len} of a store of blocks of {block}");
        offset / block..(offset + len) / block
    }
}

// SAFETY: moves bytes through a ring that keeps them, and a store that keeps the promises; which of the two
// has a block's newest content is in the block's word (invariant 1).
unsafe impl Store for CompressedStore {
    fn capacity(&self) -> ByteCount {
        ByteCount((self.ring.blocks() * self.ring.block()) as u64)
    }

    fn occupied(&self) -> Option<ByteCount> {
        self.next.occupied()
    }

    fn room(&self) -> ByteCount {
        self.next.room().min(self.capacity())
    }

    fn memory(&self) -> ByteCount {
        self.ring.memory()
    }

    fn compressed(&self) -> ByteCount {
        self.ring.kept()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let block = self.ring.block();
        let bounces = (BOUNCES_LEN / block).max(1);
        let depth = depth.clamp(1, DEPTH_MAX - bounces as u32);
        let empty = Entry {
            token: 0,
            op: Op::Read,
            first: 0,
            count: 0,
            segments: [Segment { ptr: std::ptr::null_mut(), len: 0 }; SEGMENTS_MAX],
            buffers: 0,
            handed: 0,
            pieces: 0,
            failure: None,
        };
        let desk = Desk {
            ring: Arc::clone(&self.ring),
            entries: (0..depth).map(|_| empty.clone()).collect(),
            free: (0..depth as usize).rev().collect(),
            waiting: VecDeque::with_capacity(depth as usize),
            finished: VecDeque::with_capacity(depth as usize),
            page: vec![0; block].into(),
            packed: vec![0; get_maximum_output_size(block)].into(),
            table: CompressTable::large(),
            has_written: false,
            batch: Vec::with_capacity(bounces),
            moving: None,
            paused: None,
            bounces: Mapping::reserve(bounces * block, IO_ALIGN, Huge::No)?,
        };
        let inner = self.next.open_queue(depth + bounces as u32)?;
        Ok(Box::new(CompressedQueue { inner, desk }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut u8, len: usize) -> Result<()> {
        let size = self.ring.block();
        for (at, block) in self.blocks(offset, len as u64).enumerate() {
            // SAFETY: within the caller's buffer.
            let part = unsafe { into.add(at * size) };
            // SAFETY: the buffer is the caller's, and nobody else uses it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(part, size) };
            match self.ring.read(block, bytes) {
                Some(true) => {}
                Some(false) => return Err(Error::Corrupt { slot: block }),
                // SAFETY: the caller's promise, passed on for a part.
                None => unsafe { self.next.read_now(block * size as u64, part, size) }?,
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.next.sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.blocks(offset, len).for_each(|block| self.ring.forget(block));
        // SAFETY: the caller's promise, passed on.
        unsafe { self.next.discard(offset, len) }
    }

    unsafe fn zero(&self, offset: u64, len: u64) -> Result<()> {
        self.blocks(offset, len).for_each(|block| self.ring.forget(block));
        // SAFETY: as in `discard`.
        unsafe { self.next.zero(offset, len) }
    }

    fn describe(&self) -> String {
        format!("{} of memory (LZ4), then {}", self.ring.memory(), self.next.describe())
    }
}

/// An accepted request.
#[derive(Clone, Debug)]
struct Entry {
    token: u64,
    op: Op,
    /// Number of the first block, and how many there are.
    first: u64,
    count: u64,
    segments: [Segment; SEGMENTS_MAX],
    buffers: usize,
    /// Blocks that are dealt with, or handed to the inner queue.
    handed: u64,
    /// Requests of the inner queue that are not finished.
    pieces: u32,
    failure: Option<Error>,
}

impl Entry {
    /// The parts of the caller's buffers that hold `len` bytes from `at`.
    fn buffers(&self, mut at: usize, mut len: usize) -> ([Segment; SEGMENTS_MAX], usize) {
        let mut parts = [Segment { ptr: std::ptr::null_mut(), len: 0 }; SEGMENTS_MAX];
        let mut count = 0;
        for segment in &self.segments[..self.buffers] {
            if at >= segment.len || len == 0 {
                at = at.saturating_sub(segment.len);
                continue;
            }
            let here = len.min(segment.len - at);
            // SAFETY: within the segment.
            let ptr = unsafe { segment.ptr.add(at) };
            parts[count] = Segment { ptr, len: here };
            (count, len, at) = (count + 1, len - here, 0);
        }
        (parts, count)
    }

    fn is_done(&self) -> bool {
        self.pieces == 0 && (self.handed == self.count || self.failure.is_some())
    }
}

/// A segment of the ring on its way to the next store.
#[derive(Debug)]
struct Move {
    segment: usize,
    cursor: usize,
    /// Writes of the batch that are not finished.
    pieces: u32,
    /// Whether all blocks so far have been written.
    all: bool,
}

/// A queue that compresses and decompresses.
struct CompressedQueue {
    /// Dropped before the bounce buffers that its requests use.
    inner: Box<dyn Queue>,
    desk: Desk,
}

/// The requests of a queue, and the buffers that they pass through.
struct Desk {
    ring: Arc<Ring>,
    entries: Box<[Entry]>,
    free: Vec<usize>,
    /// Entries that are not handed on whole, oldest first.
    waiting: VecDeque<usize>,
    /// Entries that need nothing of the inner queue any more.
    finished: VecDeque<usize>,
    /// A block whose bytes lie in several buffers.
    page: Box<[u8]>,
    /// A compressed block.
    packed: Box<[u8]>,
    table: CompressTable,
    /// Whether it writes: such a queue moves blocks on.
    has_written: bool,
    moving: Option<Move>,
    /// Blocks in the bounce buffers, in their order.
    batch: Vec<Taken>,
    /// When the next store has failed.
    paused: Option<Instant>,
    bounces: Mapping,
}

// SAFETY: entries only remember the buffers of requests, whose owners let the queue use them from
// whichever thread the queue is on (`Queue::push`, `Queue: Send`).
unsafe impl Send for Desk {}

/// What became of a block of a write.
enum Written {
    Kept,
    /// It is for the next store.
    Passed,
    /// It is being moved on: later.
    Busy,
}

impl Desk {
    /// Deals with what waits, and with what is to be moved on, as far as that goes now.
    fn hand_on(&mut self, inner: &mut dyn Queue) {
        while let Some(&index) = self.waiting.front() {
            let is_handed = match self.entries[index].op {
                Op::Read => self.hand_read(index, inner),
                Op::Write => self.hand_write(index, inner),
            };
            if !is_handed {
                break;
            }
            self.waiting.pop_front();
            if self.entries[index].is_done() {
                self.finished.push_back(index);
            }
        }
        if self.has_written {
            self.move_on(inner);
        }
    }

    /// Hands `count` blocks of an entry to the inner queue, from the first that is not handed on; `false`:
    /// there is no room.
    fn pass(&mut self, index: usize, count: u64, inner: &mut dyn Queue) -> bool {
        if count == 0 {
            return true;
        }
        let size = self.ring.block();
        let entry = &mut self.entries[index];
        let (parts, buffers) = entry.buffers(entry.handed as usize * size, count as usize * size);
        let offset = (entry.first + entry.handed) * size as u64;
        let request =
            Request { token: index as u64, op: entry.op, offset, segments: &parts[..buffers] };
        // SAFETY: the caller of `push` keeps the buffers, and promised that the range overlaps no other
        // request's; nor is one of its blocks being moved on (`Ring::leave`).
        if !unsafe { inner.push(request) } {
            return false;
        }
        entry.pieces += 1;
        entry.handed += count;
        true
    }

    /// Reads what is in the ring, and hands the rest on; `false`: not all of it.
    fn hand_read(&mut self, index: usize, inner: &mut dyn Queue) -> bool {
        let size = self.ring.block();
        loop {
            let entry = &mut self.entries[index];
            if entry.handed == entry.count || entry.failure.is_some() {
                return true;
            }
            let block = entry.first + entry.handed;
            let (parts, _) = entry.buffers(entry.handed as usize * size, size);
            // SAFETY: the block lies whole in this buffer (`push`), which the caller of `push` leaves to
            // the queue.
            let bytes = unsafe { std::slice::from_raw_parts_mut(parts[0].ptr, size) };
            match self.ring.read(block, bytes) {
                Some(true) => entry.handed += 1,
                Some(false) => entry.failure = Some(Error::Corrupt { slot: block }),
                None => {
                    let last = entry.first + entry.count;
                    // A block that is not in the ring does not come there while it is read.
                    let away = (block..last).take_while(|block| !self.ring.is_here(*block)).count();
                    if !self.pass(index, away as u64, inner) {
                        return false;
                    }
                }
            }
        }
    }

    /// Compresses into the ring, and hands the rest on; `false`: not all of it.
    fn hand_write(&mut self, index: usize, inner: &mut dyn Queue) -> bool {
        let mut run = 0;
        loop {
            let entry = &self.entries[index];
            if entry.failure.is_some() {
                return true;
            }
            if entry.handed + run == entry.count {
                return self.pass(index, run, inner);
            }
            match self.write(index, run) {
                Written::Passed => run += 1,
                // What comes before it has to be on its way first.
                Written::Kept if self.pass(index, run, inner) => {
                    self.entries[index].handed += 1;
                    run = 0;
                }
                Written::Busy if self.pass(index, run, inner) => return false,
                Written::Kept | Written::Busy => return false,
            }
        }
    }

    /// Compresses a block of a write, the `run`th that is not handed on, into the ring.
    fn write(&mut self, index: usize, run: u64) -> Written {
        let size = self.ring.block();
        let entry = &self.entries[index];
        let block = entry.first + entry.handed + run;
        let (parts, count) = entry.buffers((entry.handed + run) as usize * size, size);
        let mut at = 0;
        let bytes = if count == 1 {
            // SAFETY: the caller of `push` keeps the buffer unchanged.
            unsafe { std::slice::from_raw_parts(parts[0].ptr, size) }
        } else {
            for part in &parts[..count] {
                let into = self.page[at..at + part.len].as_mut_ptr();
                // SAFETY: as above; the page is the queue's own.
                unsafe { into.copy_from_nonoverlapping(part.ptr, part.len) };
                at += part.len;
            }
            &self.page[..]
        };
        let most = size / KEPT_DEN * KEPT_NUM;
        let packed = compress_into_with_table(bytes, &mut self.packed, &mut self.table);
        let kept = match packed {
            Ok(len) if len <= most => self.ring.keep(block, &self.packed[..len]),
            _ => Kept::NoRoom,
        };
        match kept {
            Kept::Yes => Written::Kept,
            Kept::Moving => Written::Busy,
            Kept::NoRoom if self.ring.leave(block) => Written::Passed,
            Kept::NoRoom => Written::Busy,
        }
    }

    // Moving on.

    /// Moves the oldest blocks on, one batch at a time.
    fn move_on(&mut self, inner: &mut dyn Queue) {
        loop {
            if self.paused.is_some_and(|since| since.elapsed() < PAUSE) {
                return;
            }
            let moving = match &mut self.moving {
                Some(moving) => moving,
                None => {
                    let Some(segment) = self.ring.begin_move() else { return };
                    self.moving.insert(Move { segment, cursor: 0, pieces: 0, all: true })
                }
            };
            if moving.pieces > 0 {
                return;
            }
            self.batch.clear();
            let size = self.ring.block();
            while self.batch.len() < self.bounces.len() / size {
                // SAFETY: within the mapping.
                let into = unsafe { self.bounces.as_ptr().add(self.batch.len() * size) };
                // SAFETY: no write of a batch is under way (invariant 2).
                let into = unsafe { std::slice::from_raw_parts_mut(into, size) };
                let taken = self.ring.take(moving.segment, &mut moving.cursor, into);
                let Some(taken) = taken else { break };
                self.batch.push(taken);
            }
            if self.batch.is_empty() {
                let (segment, all) = (moving.segment, moving.all);
                self.moving = None;
                self.ring.end_move(segment, all);
                self.paused = (!all).then(Instant::now);
                continue;
            }
            self.write_batch(inner);
        }
    }

    /// Hands the batch to the next store, neighbours in one write.
    fn write_batch(&mut self, inner: &mut dyn Queue) {
        let size = self.ring.block();
        let moving = self.moving.as_mut().expect("a batch is that of a segment under way");
        let mut from = 0;
        while from < self.batch.len() {
            let first = self.batch[from].block;
            let is_next = |(at, taken): &(u64, &Taken)| taken.block == first + at;
            let count = (0..).zip(&self.batch[from..]).take_while(is_next).count();
            // SAFETY: within the mapping.
            let ptr = unsafe { self.bounces.as_ptr().add(from * size) };
            let segments = [Segment { ptr, len: count * size }];
            let token = TOKEN_MOVE | (from as u64) << 32 | count as u64;
            let request =
                Request { token, op: Op::Write, offset: first * size as u64, segments: &segments };
            // SAFETY: the bounce buffers are left alone until the batch is settled (invariant 2); nobody
            // writes a block that is moving.
            if unsafe { inner.push(request) } {
                moving.pieces += 1;
            } else {
                moving.all = false;
                let ring = &self.ring;
                self.batch[from..from + count].iter().for_each(|taken| ring.settle(*taken, false));
            }
            from += count;
        }
    }

    // Finishing.

    /// Books what the inner queue has finished.
    fn settle(&mut self, completion: Completion) {
        if completion.token & TOKEN_MOVE != 0 {
            let token = completion.token & !TOKEN_MOVE;
            let (from, count) = ((token >> 32) as usize, token as u32 as usize);
            let is_written = completion.result.is_ok();
            let moving = self.moving.as_mut().expect("its writes are not finished");
            moving.pieces -= 1;
            moving.all &= is_written;
            let ring = &self.ring;
            self.batch[from..from + count].iter().for_each(|taken| ring.settle(*taken, is_written));
            return;
        }
        let index = completion.token as usize;
        let entry = &mut self.entries[index];
        entry.pieces -= 1;
        if let Err(error) = completion.result {
            entry.failure.get_or_insert(error);
        }
        if entry.is_done() {
            self.waiting.retain(|waiting| *waiting != index);
            self.finished.push_back(index);
        }
    }

    /// Reports what is finished.
    fn report(&mut self, done: &mut dyn FnMut(Completion)) {
        while let Some(index) = self.finished.pop_front() {
            self.free.push(index);
            let entry = &mut self.entries[index];
            let result = entry.failure.take().map_or(Ok(()), Err);
            done(Completion { token: entry.token, result });
        }
    }
}

// SAFETY: a request is reported when the inner queue has reported all of its pieces, none of which is
// handed on any more, and the rest has been copied.
unsafe impl Queue for CompressedQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let desk = &mut self.desk;
        let size = desk.ring.block();
        let len = request.check(ByteCount((desk.ring.blocks() * size) as u64));
        let is_whole = (request.offset | len).is_multiple_of(size as u64);
        assert!(is_whole, "bytes {}+{len} of a store of blocks of {size}", request.offset);
        for segment in request.segments {
            let whole = segment.len.is_multiple_of(size);
            assert!(whole || request.op == Op::Write, "{segment:?} of a read is not whole blocks");
        }
        let Some(index) = desk.free.pop() else { return false };
        let entry = &mut desk.entries[index];
        (entry.token, entry.op) = (request.token, request.op);
        (entry.first, entry.count) = (request.offset / size as u64, len / size as u64);
        (entry.handed, entry.pieces, entry.failure) = (0, 0, None);
        entry.buffers = request.segments.len();
        entry.segments[..entry.buffers].copy_from_slice(request.segments);
        desk.has_written |= request.op == Op::Write;
        desk.waiting.push_back(index);
        true
    }

    fn submit(&mut self) -> Result<()> {
        self.desk.hand_on(&mut *self.inner);
        self.inner.submit()
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.inner.watch(fd)
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(Completion)) -> Result<()> {
        self.desk.hand_on(&mut *self.inner);
        let timeout = if self.desk.finished.is_empty() { timeout } else { Duration::ZERO };
        let desk = &mut self.desk;
        let waited = self.inner.wait(timeout, &mut |completion| desk.settle(completion));
        // Room came back: what waited for it goes now, not with the next call.
        self.desk.hand_on(&mut *self.inner);
        self.desk.report(done);
        waited?;
        self.inner.submit()
    }

    fn poll_by(&mut self, polling: Polling) {
        self.inner.poll_by(polling);
    }

    fn polled(&mut self) -> Polled {
        self.inner.polled()
    }

    fn in_flight(&self) -> u32 {
        (self.desk.entries.len() - self.desk.free.len()) as u32
    }
}

impl Drop for CompressedQueue {
    /// Waits for what is being moved on, as dropping the inner queue would, so that its blocks are
    /// settled: others may wait for that.
    fn drop(&mut self) {
        let mut left = Some(Instant::now() + DROP_WAIT_MAX);
        let desk = &mut self.desk;
        while let Some(end) = left
            && desk.moving.as_ref().is_some_and(|moving| moving.pieces > 0)
        {
            let waited = self.inner.wait(Duration::from_millis(100), &mut |done| desk.settle(done));
            left = left.filter(|_| waited.is_ok() && Instant::now() < end);
        }
        if let Some(moving) = desk.moving.take().filter(|moving| moving.pieces == 0) {
            desk.ring.end_move(moving.segment, false);
        }
    }
}

/// How long a queue that is dropped waits for the blocks that it moves on.
const DROP_WAIT_MAX: Duration = Duration::from_secs(5);
