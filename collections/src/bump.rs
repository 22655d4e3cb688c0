//! Bump allocator: everything allocated in one goes at once.
//!
//! A [`Bump`] takes chunks from a tier and hands out their bytes one after the other, from a *lane*
//! of the calling thread's, so that threads do not wait for each other. Small blocks are never freed one by
//! one; large ones are blocks of the tier, freed and resized as anywhere.
//!
//! # Invariants
//! 1. What the allocator knows about its memory is local: dropping it touches none of the memory.
//! 2. A block of at least [`LARGE`] bytes, or of more than a page's alignment, is in the list of large
//!    blocks with its layout; any other one lies in a chunk.
//! 3. The bytes from a lane's `at` to its `end` are of its last chunk, and in no block.

#![expect(unsafe_code, reason = "allocates")]

use farheap::allocator_api2::alloc::{AllocError, Allocator, Layout};
use farheap::{ByteCount, Scope, Tier};
use std::collections::HashMap;
use std::fmt;
use std::num::NonZero;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Blocks of at least this size are allocated individually: a vector that grows would leave each of its
/// former blocks unused in a chunk.
const LARGE: usize = 32 << 10;

/// Largest alignment of small blocks.
const ALIGN_MAX: usize = 4096;

/// Bytes of a lane's first chunk, and of its largest: each is twice as large as the one before. The caches
/// of threads keep blocks of these sizes, so that the chunks of one query serve the next.
const CHUNK_FIRST: usize = 64 << 10;
const CHUNK_LAST: usize = 1 << 20;

/// Maximum number of lanes.
const LANES_MAX: usize = 16;

/// Memory that is freed at once, for objects that end together, such as those of a query.
///
/// It is an allocator, and so is a reference to it: `Vec<T, &Bump>`. Blocks are cheap (a lock that other
/// threads seldom take, and an addition), and freed together, without a look at them: far memory of it that
/// has left is not brought back. A freed block below 32 KiB is used again only if it was the last one of its
/// thread; larger ones come from the tier's own allocator and go back to it when they are freed.
///
/// Any thread may allocate and free at any time. The borrow checker ensures that no block is used after
/// the allocator is gone; code that keeps raw pointers has to ensure it itself. Values are dropped by their
/// containers, if at all: the allocator drops nothing.
///
/// In a forked child it goes on with local memory.
///
/// # Examples
/// ```
/// use farheap::Tier;
/// use farheap::allocator_api2::{boxed::Box, vec::Vec};
/// use farheap_collections::Bump;
///
/// let query = Bump::new(Tier::LOCAL); // `Tier::FAR`, or another one, where a heap runs.
/// let mut groups: Vec<Vec<u64, &Bump>, &Bump> = Vec::new_in(&query);
/// for group in 0..100 {
///     let mut rows = Vec::new_in(&query);
///     rows.extend((0..1000).map(|row| row * group));
///     groups.push(rows);
/// }
/// let largest = Box::leak(Box::new_in(groups[99][999], &query)); // Nothing leaks.
/// assert_eq!(*largest, 99 * 999);
/// std::mem::forget(groups); // Nor does this.
/// assert!(query.reserved().get() > 800_000);
/// drop(query); // All of it goes.
/// ```
pub struct Bump {
    tier: Tier,
    lanes: Box<[Mutex<Lane>]>,
    large: Mutex<HashMap<usize, LargeBlock>>,
}

/// A large block. The address is its key.
struct LargeBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is the allocator's, which any thread may use under the lock.
unsafe impl Send for LargeBlock {}

/// Source of small blocks of some of the threads.
struct Lane {
    /// Where the last chunk begins and ends, and what of it is free; empty and dangling without one.
    start: usize,
    at: NonNull<u8>,
    end: usize,
    chunks: Vec<(NonNull<u8>, Layout)>,
}

// SAFETY: as for `LargeBlock`.
unsafe impl Send for Lane {}

impl Lane {
    fn new() -> Lane {
        Lane { start: 0, at: NonNull::dangling(), end: 0, chunks: Vec::new() }
    }

    /// Hands out a block of the last chunk, if it has room.
    #[inline]
    fn take(&mut self, layout: Layout) -> Option<NonNull<u8>> {
        let at = self.at.addr().get();
        // Sums of addresses and small sizes: no overflow.
        let start = (at + layout.align() - 1) & !(layout.align() - 1);
        if start + layout.size() > self.end {
            return None;
        }
        // SAFETY: inside of the chunk, or at its end.
        let block = unsafe { self.at.add(start - at) };
        // SAFETY: as above.
        self.at = unsafe { block.add(layout.size()) };
        Some(block)
    }

    /// True if a block is the last one that was handed out. One at the end of another lane's chunk may lie
    /// before the first of this one's.
    fn is_last(&self, ptr: NonNull<u8>, size: usize) -> bool {
        let block = ptr.addr().get();
        block >= self.start && block + size == self.at.addr().get()
    }

    /// The layout of the next chunk.
    fn next_chunk(&self) -> Layout {
        let doublings = self.chunks.len().min((CHUNK_LAST / CHUNK_FIRST).ilog2() as usize);
        Layout::from_size_align(CHUNK_FIRST << doublings, ALIGN_MAX).expect("a valid layout")
    }

    fn add(&mut self, chunk: NonNull<u8>, layout: Layout) {
        let _local = Scope::enter(Tier::LOCAL);
        self.chunks.push((chunk, layout));
        self.start = chunk.addr().get();
        (self.at, self.end) = (chunk, self.start + layout.size());
    }
}

/// The calling thread's number: threads share lanes by it.
fn thread_number() -> usize {
    static THREADS: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = THREADS.fetch_add(1, Relaxed);
    }
    // A destructor of the thread may run after the number has been destroyed.
    NUMBER.try_with(|number| *number).unwrap_or(0)
}

/// Processors that the process may use.
fn processors() -> usize {
    // Asked once: it reads files of control groups.
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND.get_or_init(|| std::thread::available_parallelism().map_or(1, NonZero::get))
}

/// Poisoning is ignored: what is locked is valid at every step.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE || layout.align() > ALIGN_MAX
}

impl Bump {
    /// Creates a bump allocator without memory: its blocks come from `tier`. Far allocations fail where no
    /// heap runs.
    #[must_use]
    pub fn new(tier: Tier) -> Bump {
        let _local = Scope::enter(Tier::LOCAL);
        let lanes = (0..processors().min(LANES_MAX)).map(|_| Mutex::new(Lane::new()));
        Bump { tier, lanes: lanes.collect(), large: Mutex::default() }
    }

    /// Where its blocks come from.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Bytes that it has taken from the tier: what is allocated, and the rest of its chunks.
    #[must_use]
    pub fn reserved(&self) -> ByteCount {
        let of_lane = |lane: &Mutex<Lane>| {
            lock(lane).chunks.iter().map(|(_, layout)| layout.size()).sum::<usize>()
        };
        let small: usize = self.lanes.iter().map(of_lane).sum();
        let large: usize = lock(&self.large).values().map(|block| block.layout.size()).sum();
        ByteCount((small + large) as u64)
    }

    /// Frees everything that was allocated in it. It can be used again.
    pub fn reset(&mut self) {
        self.free_all();
    }

    fn free_all(&self) {
        for lane in &self.lanes {
            let Lane { chunks, .. } = std::mem::replace(&mut *lock(lane), Lane::new());
            for (chunk, layout) in chunks {
                // SAFETY: allocated with this layout, and nobody uses its blocks any more.
                unsafe { self.tier.deallocate(chunk, layout) }
            }
        }
        let large = std::mem::take(&mut *lock(&self.large));
        for LargeBlock { ptr, layout } in large.into_values() {
            // SAFETY: as above.
            unsafe { self.tier.deallocate(ptr, layout) }
        }
    }

    fn lane(&self) -> &Mutex<Lane> {
        &self.lanes[thread_number() % self.lanes.len()]
    }

    fn take_small(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        let lane = self.lane();
        let chunk = {
            let mut lane = lock(lane);
            if let Some(block) = lane.take(layout) {
                return Ok(block);
            }
            lane.next_chunk()
        };
        // Not under the lock: it may wait for jemalloc's locks. Another thread of the lane may have added a
        // chunk by now, the rest of which is lost then.
        let memory = self.tier.allocate(chunk)?.cast();
        let mut lane = lock(lane);
        lane.add(memory, chunk);
        Ok(lane.take(layout).expect("a chunk has room for a small block"))
    }

    fn note(&self, ptr: NonNull<u8>, layout: Layout) {
        let _local = Scope::enter(Tier::LOCAL);
        let before = lock(&self.large).insert(ptr.addr().get(), LargeBlock { ptr, layout });
        assert!(before.is_none(), "a block was handed out that another one has");
    }

    /// Takes a large block off the list.
    fn forget(&self, ptr: NonNull<u8>) {
        let block = lock(&self.large).remove(&ptr.addr().get());
        assert!(block.is_some(), "{ptr:p} is no block of this bump allocator, or was freed");
    }

    /// Resizes a block where it is, or by the tier's allocator; `None`: it has to move.
    ///
    /// # Safety
    /// As for [`Allocator::grow`] and [`Allocator::shrink`], whichever it is; neither layout is empty, and the
    /// alignments are equal.
    unsafe fn resize(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
        zeroed: bool,
    ) -> Option<Result<NonNull<u8>, AllocError>> {
        if is_large(old) && is_large(new) {
            self.forget(ptr);
            let moved = match new.size() < old.size() {
                // SAFETY: a block of the tier's allocator; as the caller promises.
                true => unsafe { self.tier.shrink(ptr, old, new) },
                // SAFETY: as above.
                false if zeroed => unsafe { self.tier.grow_zeroed(ptr, old, new) },
                // SAFETY: as above.
                false => unsafe { self.tier.grow(ptr, old, new) },
            };
            let moved = moved.map(NonNull::cast);
            match moved {
                Ok(moved) => self.note(moved, new),
                Err(_) => self.note(ptr, old),
            }
            return Some(moved);
        }
        if is_large(old) || is_large(new) {
            return None;
        }
        let mut lane = lock(self.lane());
        if lane.is_last(ptr, old.size()) && ptr.addr().get() + new.size() <= lane.end {
            // SAFETY: up to the end of the chunk.
            lane.at = unsafe { ptr.add(new.size()) };
            if zeroed && new.size() > old.size() {
                // SAFETY: inside of the block.
                let tail = unsafe { ptr.add(old.size()) };
                // SAFETY: up to the end of the block, of which it is the new part.
                unsafe { tail.write_bytes(0, new.size() - old.size()) };
            }
            return Some(Ok(ptr));
        }
        (new.size() <= old.size()).then_some(Ok(ptr))
    }

    /// Resizes, by a copy where need be.
    ///
    /// # Safety
    /// As for [`Allocator::grow`] and [`Allocator::shrink`], whichever it is.
    unsafe fn resize_or_move(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
        zeroed: bool,
    ) -> Result<NonNull<[u8]>, AllocError> {
        if old.size() != 0
            && new.size() != 0
            && old.align() == new.align()
            // SAFETY: as the caller promises.
            && let Some(resized) = unsafe { self.resize(ptr, old, new, zeroed) }
        {
            return resized.map(|moved| NonNull::slice_from_raw_parts(moved, new.size()));
        }
        let moved = if zeroed { self.allocate_zeroed(new) } else { self.allocate(new) }?;
        let len = old.size().min(new.size());
        // SAFETY: both are valid for `len` bytes, and the new one overlaps nothing.
        unsafe { moved.cast::<u8>().copy_from_nonoverlapping(ptr, len) };
        // SAFETY: as the caller promises.
        unsafe { self.deallocate(ptr, old) };
        Ok(moved)
    }
}

// SAFETY: memory stays valid until it is freed, or the allocator is dropped, wherever that moves: it lies in blocks of
// the tier's allocator. It has no clones.
unsafe impl Allocator for Bump {
    #[inline]
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        let block = if layout.size() == 0 {
            NonNull::without_provenance(NonZero::new(layout.align()).expect("no alignment is zero"))
        } else if is_large(layout) {
            let block = self.tier.allocate(layout)?.cast();
            self.note(block, layout);
            block
        } else {
            self.take_small(layout)?
        };
        Ok(NonNull::slice_from_raw_parts(block, layout.size()))
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        if is_large(layout) {
            // Mostly fresh memory, which is zero already.
            let block = self.tier.allocate_zeroed(layout)?.cast();
            self.note(block, layout);
            return Ok(NonNull::slice_from_raw_parts(block, layout.size()));
        }
        let block = self.allocate(layout)?;
        // SAFETY: the block is ours, and as large.
        unsafe { block.cast::<u8>().write_bytes(0, layout.size()) };
        Ok(block)
    }

    #[inline]
    unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return;
        }
        if is_large(layout) {
            self.forget(ptr);
            // SAFETY: as the caller promises.
            return unsafe { self.tier.deallocate(ptr, layout) };
        }
        let mut lane = lock(self.lane());
        if lane.is_last(ptr, layout.size()) {
            lane.at = ptr;
        }
    }

    unsafe fn grow(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: as the caller promises.
        unsafe { self.resize_or_move(ptr, old, new, false) }
    }

    unsafe fn grow_zeroed(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: as the caller promises.
        unsafe { self.resize_or_move(ptr, old, new, true) }
    }

    unsafe fn shrink(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Result<NonNull<[u8]>, AllocError> {
        // SAFETY: as the caller promises.
        unsafe { self.resize_or_move(ptr, old, new, false) }
    }
}

impl Drop for Bump {
    fn drop(&mut self) {
        self.free_all();
    }
}

impl fmt::Debug for Bump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bump")
            .field("tier", &self.tier)
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
