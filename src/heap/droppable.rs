//! Droppable arenas: everything allocated in one goes at once.
//!
//! An [`Arena`] takes chunks from a placement and hands out their bytes one after the other, from a *lane*
//! of the calling thread's, so that threads do not wait for each other. Small blocks are never freed one by
//! one; large ones are blocks of the placement, freed and resized as anywhere. Uses `global`, `handle`,
//! `placement`.
//!
//! # Invariants
//! 1. What the arena knows about its memory is local: dropping it touches none of the memory.
//! 2. A block of at least [`LARGE`] bytes, or of more than a page's alignment, is in the list of large
//!    blocks with its layout; any other one lies in a chunk.
//! 3. The bytes from a lane's `at` to its `end` are of its last chunk, and in no block.

#![expect(unsafe_code, reason = "allocates")]

use super::global;
use super::placement::{self, Fill, Placement};
use super::thread_cache::processors;
use crate::base::sync::{AtomicUsize, Ordering::Relaxed, Rank, Ranked};
use crate::base::units::ByteCount;
use std::alloc::Layout;
use std::collections::HashMap;
use std::fmt;
use std::ptr::{self, NonNull};

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
const LANES_MAX: u32 = 16;

/// Memory that is freed at once, for objects that end together, such as those of a query.
///
/// It is an allocator, and so is a reference to it: `Vec<T, &Arena>`. Blocks are cheap (a lock that other
/// threads seldom take, and an addition), and freed together, without a look at them: far memory of it that
/// has left is not brought back. A freed block below 32 KiB is used again only if it was the last one of its
/// thread; larger ones come from the placement's own allocator and go back to it when they are freed.
///
/// Any thread may allocate and free at any time. The borrow checker ensures that no block is used after
/// the arena is gone; code that keeps raw pointers has to ensure it itself. Values are dropped by their
/// containers, if at all: the arena drops nothing.
///
/// In a forked child it goes on with local memory.
///
/// # Examples
/// ```
/// use farheap::{Arena, Placement};
/// use farheap::allocator_api2::{boxed::Box, vec::Vec};
///
/// let query = Arena::new(Placement::Local); // `Far` or a tier where a heap runs.
/// let mut groups: Vec<Vec<u64, &Arena>, &Arena> = Vec::new_in(&query);
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
pub struct Arena {
    placement: Placement,
    lanes: Box<[Ranked<Lane>]>,
    large: Ranked<HashMap<usize, LargeBlock>>,
}

/// A large block. The address is its key.
struct LargeBlock {
    ptr: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory is the arena's, which any thread may use under the lock.
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

    /// Whether a block is the last one that was handed out. One at the end of another lane's chunk may lie
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
        let _pinned = placement::pin();
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

fn is_large(layout: Layout) -> bool {
    layout.size() >= LARGE || layout.align() > ALIGN_MAX
}

impl Arena {
    /// Creates an arena without memory: its blocks come from `placement`. Far allocations fail where no
    /// heap runs.
    #[must_use]
    pub fn new(placement: Placement) -> Arena {
        let _pinned = placement::pin();
        let lanes = (0..processors().min(LANES_MAX)).map(|_| Ranked::new(Rank::Leaf, Lane::new()));
        Arena { placement, lanes: lanes.collect(), large: Ranked::new(Rank::Leaf, HashMap::new()) }
    }

    /// Where its blocks come from.
    #[must_use]
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Bytes that it has taken from the placement: what is allocated, and the rest of its chunks.
    #[must_use]
    pub fn reserved(&self) -> ByteCount {
        let of_lane = |lane: &Ranked<Lane>| {
            lane.lock().chunks.iter().map(|(_, layout)| layout.size()).sum::<usize>()
        };
        let small: usize = self.lanes.iter().map(of_lane).sum();
        let large: usize = self.large.lock().values().map(|block| block.layout.size()).sum();
        ByteCount((small + large) as u64)
    }

    /// Frees everything that was allocated in it. It can be used again.
    pub fn reset(&mut self) {
        self.free_all();
    }

    fn free_all(&self) {
        for lane in &self.lanes {
            let Lane { chunks, .. } = std::mem::replace(&mut *lane.lock(), Lane::new());
            for (chunk, layout) in chunks {
                // SAFETY: allocated with this layout, and nobody uses its blocks any more.
                unsafe { global::free(chunk.as_ptr(), layout) }
            }
        }
        let large = std::mem::take(&mut *self.large.lock());
        for LargeBlock { ptr, layout } in large.into_values() {
            // SAFETY: as above.
            unsafe { global::free(ptr.as_ptr(), layout) }
        }
    }

    fn lane(&self) -> &Ranked<Lane> {
        &self.lanes[thread_number() % self.lanes.len()]
    }

    /// Memory of the placement; null when there is none.
    fn ask(&self, layout: Layout, fill: Fill) -> Option<NonNull<u8>> {
        let ptr = match self.placement {
            // SAFETY: no layout here is empty.
            Placement::Local => unsafe { global::allocate_local(layout, fill) },
            // SAFETY: as above.
            Placement::Far => unsafe { global::allocate_far(layout, fill) },
            // SAFETY: as above.
            Placement::Tier(tier) => unsafe { global::allocate_in(tier, layout, fill) },
        };
        NonNull::new(ptr)
    }

    /// Allocates; null when there is no memory.
    pub(super) fn take(&self, layout: Layout, fill: Fill) -> *mut u8 {
        let block =
            if is_large(layout) { self.take_large(layout, fill) } else { self.take_small(layout) };
        let Some(block) = block else { return ptr::null_mut() };
        if fill == Fill::Zero && !is_large(layout) {
            // SAFETY: the block is ours, and as large.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block.as_ptr()
    }

    fn take_small(&self, layout: Layout) -> Option<NonNull<u8>> {
        let lane = self.lane();
        let chunk = {
            let mut lane = lane.lock();
            if let Some(block) = lane.take(layout) {
                return Some(block);
            }
            lane.next_chunk()
        };
        // Not under the lock: it may wait for jemalloc's locks. Another thread of the lane may have added a
        // chunk by now, the rest of which is lost then.
        let memory = self.ask(chunk, Fill::Any)?;
        let mut lane = lane.lock();
        lane.add(memory, chunk);
        Some(lane.take(layout).expect("a chunk has room for a small block"))
    }

    fn take_large(&self, layout: Layout, fill: Fill) -> Option<NonNull<u8>> {
        let ptr = self.ask(layout, fill)?;
        self.note(ptr, layout);
        Some(ptr)
    }

    fn note(&self, ptr: NonNull<u8>, layout: Layout) {
        let _pinned = placement::pin();
        let before = self.large.lock().insert(ptr.addr().get(), LargeBlock { ptr, layout });
        assert!(before.is_none(), "a block was handed out that another one has");
    }

    /// Takes a large block off the list.
    fn forget(&self, ptr: NonNull<u8>) {
        let block = self.large.lock().remove(&ptr.addr().get());
        assert!(block.is_some(), "{ptr:p} is no block of this arena, or was freed");
    }

    /// Frees a block.
    ///
    /// # Safety
    /// It is a block of this arena with this layout, and is not used again.
    pub(super) unsafe fn free(&self, ptr: NonNull<u8>, layout: Layout) {
        if is_large(layout) {
            self.forget(ptr);
            // SAFETY: as the caller promises.
            return unsafe { global::free(ptr.as_ptr(), layout) };
        }
        let mut lane = self.lane().lock();
        if lane.is_last(ptr, layout.size()) {
            lane.at = ptr;
        }
    }

    /// Resizes a block where it is, or by the placement's allocator; `None`: it has to move.
    ///
    /// # Safety
    /// As for [`free`](Self::free); `new` has the same alignment and is not empty.
    pub(super) unsafe fn resize_in_place(
        &self,
        ptr: NonNull<u8>,
        old: Layout,
        new: Layout,
    ) -> Option<NonNull<u8>> {
        if is_large(old) && is_large(new) {
            self.forget(ptr);
            // SAFETY: a block of the placement's allocator; as the caller promises.
            let moved = unsafe { global::reallocate_in_tier(ptr.as_ptr(), old, new) };
            let moved = NonNull::new(moved);
            match moved {
                Some(moved) => self.note(moved, new),
                None => self.note(ptr, old),
            }
            return moved;
        }
        if is_large(old) || is_large(new) {
            return None;
        }
        let mut lane = self.lane().lock();
        if lane.is_last(ptr, old.size()) && ptr.addr().get() + new.size() <= lane.end {
            // SAFETY: up to the end of the chunk.
            lane.at = unsafe { ptr.add(new.size()) };
            return Some(ptr);
        }
        (new.size() <= old.size()).then_some(ptr)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.free_all();
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("placement", &self.placement)
            .field("reserved", &self.reserved())
            .finish_non_exhaustive()
    }
}
