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

use super::pending::{self, Entry, OuterQueue, Pending, block_bytes, whole_blocks};
use super::ring::{Kept, Ring, Taken};
use super::{Completion, DEPTH_MAX, IO_ALIGN, OnlyUser, Op, Queue, Request, Segment, Store};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::vm::{Huge, Mapping};
use lz4_flex::block::{CompressTable, compress_into_with_table, get_maximum_output_size};
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
/// How long a queue that is dropped waits for the blocks that it moves on.
const DROP_WAIT_MAX: Duration = Duration::from_secs(5);

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
    /// Name of the store in errors of blocks in memory.
    name: Arc<str>,
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
        let block = block_bytes(block)?;
        let least = Ring::memory_min(block);
        if memory < least {
            let reason =
                format!("{memory} is less than {least}, for pages of {}", ByteCount(block as u64));
            return Err(Error::Config { key: "compress".to_owned(), reason });
        }
        let next = OnlyUser::of(next)?;
        let blocks = next.capacity().as_usize() / block;
        let ring = Arc::new(Ring::new(memory, block, blocks)?);
        let name = format!("compressed memory before {}", next.name()).into();
        Ok(CompressedStore { next, ring, name })
    }

    /// The numbers of a range's blocks.
    fn blocks(&self, offset: u64, len: u64) -> std::ops::Range<u64> {
        whole_blocks(offset, len, self.ring.block(), self.capacity())
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
        let desk = Desk {
            ring: Arc::clone(&self.ring),
            name: Arc::clone(&self.name),
            pending: Pending::new(depth),
            packer: Packer {
                page: vec![0; block].into(),
                packed: vec![0; get_maximum_output_size(block)].into(),
                table: CompressTable::large(),
            },
            has_written: false,
            mover: Mover {
                moving: None,
                batch: Vec::with_capacity(bounces),
                paused: None,
                bounces: Mapping::reserve(bounces * block, IO_ALIGN, Huge::No)?,
            },
        };
        let inner = self.next.open_queue(depth + bounces as u32)?;
        Ok(Box::new(OuterQueue { inner, desk }))
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
                Some(false) => {
                    return Err(Error::Corrupt { store: Arc::clone(&self.name), slot: block });
                }
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

    fn name(&self) -> Arc<str> {
        self.next.name()
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

/// The requests of a queue that compresses and decompresses, and what they pass through.
struct Desk {
    ring: Arc<Ring>,
    /// As the store's.
    name: Arc<str>,
    pending: Pending,
    packer: Packer,
    /// Whether it writes: such a queue moves blocks on.
    has_written: bool,
    mover: Mover,
}

/// Compresses blocks.
struct Packer {
    /// A block whose bytes lie in several buffers.
    page: Box<[u8]>,
    packed: Box<[u8]>,
    table: CompressTable,
}

impl Packer {
    /// The block from byte `at` of a write, compressed. `None`: it does not become smaller.
    fn pack(&mut self, entry: &Entry, at: u64) -> Option<&[u8]> {
        let size = self.page.len();
        let (parts, count) = entry.buffers(at, size);
        let bytes = if count == 1 {
            // SAFETY: the caller of `push` keeps the buffer unchanged.
            unsafe { std::slice::from_raw_parts(parts[0].ptr, size) }
        } else {
            entry.copy_to(at, &mut self.page);
            &self.page[..]
        };
        let most = size / KEPT_DEN * KEPT_NUM;
        let len = compress_into_with_table(bytes, &mut self.packed, &mut self.table).ok()?;
        (len <= most).then(|| &self.packed[..len])
    }
}

/// Moves the oldest blocks of the ring on to the next store, one batch at a time.
struct Mover {
    moving: Option<Move>,
    /// Blocks in the bounce buffers, in their order.
    batch: Vec<Taken>,
    /// When the next store has failed.
    paused: Option<Instant>,
    bounces: Mapping,
}

/// Outcome of a block of a write.
enum Written {
    Kept,
    /// It is for the next store.
    Passed,
    /// It is being moved on: later.
    Busy,
}

impl pending::Desk for Desk {
    fn pending(&self) -> &Pending {
        &self.pending
    }

    fn pending_mut(&mut self) -> &mut Pending {
        &mut self.pending
    }

    unsafe fn accept(&mut self, request: Request<'_>, _inner: &mut dyn Queue) -> bool {
        let block = self.ring.block();
        let capacity = ByteCount((self.ring.blocks() * block) as u64);
        let Some(index) = self.pending.accept(&request, block, capacity) else { return false };
        self.has_written |= request.op == Op::Write;
        self.pending.wait(index);
        true
    }

    /// Deals with what waits, and with what is to be moved on, as far as that goes now.
    fn hand_on(&mut self, inner: &mut dyn Queue) {
        while let Some(index) = self.pending.first_waiting() {
            let is_handed = match self.pending.entry(index).op {
                Op::Read => self.hand_read(index, inner),
                Op::Write => self.hand_write(index, inner),
            };
            if !is_handed {
                break;
            }
            self.pending.end_first_wait();
        }
        if self.has_written {
            self.mover.move_on(&self.ring, inner);
        }
    }

    fn settle(&mut self, completion: Completion) {
        if completion.token & TOKEN_MOVE != 0 {
            return self.mover.settle(&self.ring, &completion);
        }
        self.pending.settle(completion.token as usize, completion.result);
    }

    /// Waits for what is being moved on, as dropping the inner queue would, so that its blocks are
    /// settled: others may wait for that.
    fn close(&mut self, inner: &mut dyn Queue) {
        let mut left = Some(Instant::now() + DROP_WAIT_MAX);
        while let Some(end) = left
            && self.mover.is_writing()
        {
            let waited = inner.wait(Duration::from_millis(100), &mut |done| self.settle(done));
            left = left.filter(|_| waited.is_ok() && Instant::now() < end);
        }
        if let Some(moving) = self.mover.moving.take().filter(|moving| moving.pieces == 0) {
            self.ring.end_move(moving.segment, false);
        }
    }
}

impl Desk {
    /// Hands `count` blocks of an entry to the inner queue, from the first that is not handed on; `false`:
    /// there is no room.
    fn pass(&mut self, index: usize, count: u64, inner: &mut dyn Queue) -> bool {
        if count == 0 {
            return true;
        }
        let len = count * self.ring.block() as u64;
        let entry = self.pending.entry_mut(index);
        let (parts, buffers) = entry.buffers(entry.handed, len as usize);
        let offset = entry.offset + entry.handed;
        let request =
            Request { token: index as u64, op: entry.op, offset, segments: &parts[..buffers] };
        // SAFETY: the caller of `push` keeps the buffers, and promised that the range overlaps no other
        // request's; nor is one of its blocks being moved on (`Ring::leave`).
        if !unsafe { inner.push(request) } {
            return false;
        }
        entry.pieces += 1;
        entry.handed += len;
        true
    }

    /// Reads what is in the ring, and hands the rest on; `false`: not all of it.
    fn hand_read(&mut self, index: usize, inner: &mut dyn Queue) -> bool {
        let size = self.ring.block();
        loop {
            let entry = self.pending.entry_mut(index);
            if entry.is_handed() {
                return true;
            }
            let block = (entry.offset + entry.handed) / size as u64;
            let (parts, _) = entry.buffers(entry.handed, size);
            // SAFETY: the block lies whole in this buffer (`Pending::accept`), which the caller of `push`
            // leaves to the queue.
            let bytes = unsafe { std::slice::from_raw_parts_mut(parts[0].ptr, size) };
            match self.ring.read(block, bytes) {
                Some(true) => entry.handed += size as u64,
                Some(false) => {
                    entry.failure =
                        Some(Error::Corrupt { store: Arc::clone(&self.name), slot: block });
                }
                None => {
                    let last = (entry.offset + entry.len) / size as u64;
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
        let size = self.ring.block() as u64;
        let mut run = 0;
        loop {
            let entry = self.pending.entry(index);
            if entry.failure.is_some() {
                return true;
            }
            if entry.handed + run * size == entry.len {
                return self.pass(index, run, inner);
            }
            match self.write(index, run) {
                Written::Passed => run += 1,
                // What comes before it has to be on its way first.
                Written::Kept if self.pass(index, run, inner) => {
                    self.pending.entry_mut(index).handed += size;
                    run = 0;
                }
                Written::Busy if self.pass(index, run, inner) => return false,
                Written::Kept | Written::Busy => return false,
            }
        }
    }

    /// Compresses a block of a write, the `run`th that is not handed on, into the ring.
    fn write(&mut self, index: usize, run: u64) -> Written {
        let size = self.ring.block() as u64;
        let entry = self.pending.entry(index);
        let at = entry.handed + run * size;
        let block = (entry.offset + at) / size;
        let kept = match self.packer.pack(entry, at) {
            Some(packed) => self.ring.keep(block, packed),
            None => Kept::NoRoom,
        };
        match kept {
            Kept::Yes => Written::Kept,
            Kept::Moving => Written::Busy,
            Kept::NoRoom if self.ring.leave(block) => Written::Passed,
            Kept::NoRoom => Written::Busy,
        }
    }
}

impl Mover {
    /// Moves the oldest blocks on.
    fn move_on(&mut self, ring: &Ring, inner: &mut dyn Queue) {
        loop {
            if self.paused.is_some_and(|since| since.elapsed() < PAUSE) {
                return;
            }
            let moving = match &mut self.moving {
                Some(moving) => moving,
                None => {
                    let Some(segment) = ring.begin_move() else { return };
                    self.moving.insert(Move { segment, cursor: 0, pieces: 0, all: true })
                }
            };
            if moving.pieces > 0 {
                return;
            }
            self.batch.clear();
            let size = ring.block();
            while self.batch.len() < self.bounces.len() / size {
                // SAFETY: within the mapping.
                let into = unsafe { self.bounces.as_ptr().add(self.batch.len() * size) };
                // SAFETY: no write of a batch is under way (invariant 2).
                let into = unsafe { std::slice::from_raw_parts_mut(into, size) };
                let taken = ring.take(moving.segment, &mut moving.cursor, into);
                let Some(taken) = taken else { break };
                self.batch.push(taken);
            }
            if self.batch.is_empty() {
                let (segment, all) = (moving.segment, moving.all);
                self.moving = None;
                ring.end_move(segment, all);
                self.paused = (!all).then(Instant::now);
                continue;
            }
            self.write_batch(ring, inner);
        }
    }

    /// Hands the batch to the next store, neighbours in one write.
    fn write_batch(&mut self, ring: &Ring, inner: &mut dyn Queue) {
        let size = ring.block();
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
                self.batch[from..from + count].iter().for_each(|taken| ring.settle(*taken, false));
            }
            from += count;
        }
    }

    /// Books what became of a write of the batch.
    fn settle(&mut self, ring: &Ring, completion: &Completion) {
        let token = completion.token & !TOKEN_MOVE;
        let (from, count) = ((token >> 32) as usize, token as u32 as usize);
        let is_written = completion.result.is_ok();
        let moving = self.moving.as_mut().expect("its writes are not finished");
        moving.pieces -= 1;
        moving.all &= is_written;
        self.batch[from..from + count].iter().for_each(|taken| ring.settle(*taken, is_written));
    }

    fn is_writing(&self) -> bool {
        self.moving.as_ref().is_some_and(|moving| moving.pieces > 0)
    }
}
