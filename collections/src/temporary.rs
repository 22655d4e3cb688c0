//! `Temporary`: temporary memory for collections.
//!
//! Large allocations are temporary memory of their own. Small ones are cut from *slabs*: temporary
//! memory of 64 KiB to 2 MiB that is divided into pieces of one size class. A slab is given back
//! with its last piece, so that memory that dies together is free at once.
//!
//! # Invariants
//! 1. A slab's pieces are free (on its list, or beyond `fresh`) or the caller's, never both.
//! 2. A slab that has a free piece is in its class's `open` set; a slab without pieces in use
//!    does not exist.
#![expect(unsafe_code, reason = "implements `Allocator`; keeps lists in free memory")]

use farheap::allocator_api2::alloc::{AllocError, Allocator, Layout};
use farheap::manager::{MemoryManager, TemporaryMemory};
use farheap::{ByteCount, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Larger allocations, and those aligned to more, are on their own.
const SMALL_MAX: usize = 64 << 10;
/// Smallest piece: room for the list of free pieces.
const PIECE_MIN: usize = 16;
/// First slab of a class.
const SLAB_MIN: usize = 64 << 10;
/// Slabs grow to this as a class has more of them.
const SLAB_MAX: usize = 2 << 20;
/// Slabs of a size before the next is twice as large.
const SLABS_PER_SIZE: usize = 4;
/// Alignment of slabs.
const SLAB_ALIGN: usize = 4096;

/// An allocator of temporary memory for collections, by one limit with everything else.
///
/// Clones share their memory, and one lock: give threads that allocate all the time one each, by
/// [`Temporary::new`]. What does not fit spills to far memory as
/// [`MemoryManager::allocate_temporary`] says; an allocation that can do neither fails, which
/// collections report by `try_reserve` and answer by an abort otherwise.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::allocator_api2::vec::Vec;
/// use farheap::manager::MemoryManager;
/// use farheap_collections::Temporary;
///
/// let manager = MemoryManager::start(ByteCount::mib(16))?;
/// let mut rows: Vec<u64, _> = Vec::new_in(Temporary::new(&manager));
/// rows.extend(0..100_000);
/// assert!(manager.stats().used_bytes >= ByteCount(800_000));
/// assert!(rows.try_reserve(1 << 32).is_err());
/// drop(rows);
/// assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone)]
pub struct Temporary(Arc<Slabs>);

struct Slabs {
    manager: Arc<MemoryManager>,
    state: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    /// By first address.
    large: BTreeMap<usize, TemporaryMemory>,
    /// By first address, of all classes.
    slabs: BTreeMap<usize, Slab>,
    /// Per class: slabs with free pieces, and how many slabs there are.
    classes: BTreeMap<usize, Class>,
}

#[derive(Default)]
struct Class {
    open: BTreeSet<usize>,
    slabs: usize,
}

struct Slab {
    memory: TemporaryMemory,
    /// Bytes of a piece.
    piece: usize,
    /// Pieces in use.
    used: usize,
    /// Address of the first free piece that was used before; 0 for none. Each holds the next.
    free: usize,
    /// Bytes from the start that were ever handed out.
    fresh: usize,
}

impl Slab {
    fn is_full(&self) -> bool {
        self.free == 0 && self.fresh + self.piece > self.memory.len().as_usize()
    }

    fn take(&mut self) -> NonNull<u8> {
        self.used += 1;
        let start = self.memory.as_ptr();
        if self.free == 0 {
            let at = self.fresh;
            self.fresh += self.piece;
            // SAFETY: the slab has room for a piece at `fresh`: the caller looked (`is_full`).
            return unsafe { start.add(at) };
        }
        let offset = self.free - start.addr().get();
        // SAFETY: addresses on the list are of pieces of this slab.
        let piece = unsafe { start.add(offset) };
        // SAFETY: a free piece is at least `PIECE_MIN` long and holds the address of the next; a
        // piece's start is aligned to 16 (`class_of`).
        self.free = unsafe { piece.cast::<usize>().read() };
        piece
    }

    /// True if `piece` is where one begins that was handed out.
    fn has(&self, piece: NonNull<u8>) -> bool {
        let offset = piece.addr().get() - self.memory.as_ptr().addr().get();
        offset < self.fresh && offset.is_multiple_of(self.piece)
    }

    fn give_back(&mut self, piece: NonNull<u8>) {
        self.used -= 1;
        // SAFETY: the piece is free now, and as in `take`.
        unsafe { piece.cast::<usize>().write(self.free) };
        self.free = piece.addr().get();
    }
}

/// Bytes of the pieces that a layout is served by: four sizes for each doubling, multiples of 16,
/// and powers of two where alignment asks for more.
fn class_of(layout: Layout) -> usize {
    let size = layout.size().max(PIECE_MIN);
    if layout.align() > PIECE_MIN {
        return size.max(layout.align()).next_power_of_two();
    }
    let step = (size.next_power_of_two() / 8).max(PIECE_MIN);
    size.next_multiple_of(step)
}

fn is_small(layout: Layout) -> bool {
    layout.size() <= SMALL_MAX && layout.align() <= SLAB_ALIGN
}

impl Temporary {
    /// An allocator of a manager's temporary memory, with slabs of its own.
    #[must_use]
    pub fn new(manager: &Arc<MemoryManager>) -> Temporary {
        Temporary(Arc::new(Slabs { manager: Arc::clone(manager), state: Mutex::default() }))
    }

    /// The manager whose memory this is.
    #[must_use]
    pub fn manager(&self) -> &Arc<MemoryManager> {
        &self.0.manager
    }

    fn state(&self) -> MutexGuard<'_, Blocks> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn allocate_large(&self, layout: Layout) -> Result<NonNull<u8>> {
        // Temporary memory is aligned to 4,096; what asks for more gets room to move.
        let slack = if layout.align() > SLAB_ALIGN { layout.align() } else { 0 };
        let len = ByteCount((layout.size() as u64).saturating_add(slack as u64));
        let memory = self.0.manager.allocate_temporary(len)?;
        let start = memory.as_ptr();
        let offset = start.addr().get().next_multiple_of(layout.align()) - start.addr().get();
        // SAFETY: the memory is `slack` longer than the layout, and the offset is less than that.
        let ptr = unsafe { start.add(offset) };
        self.state().large.insert(ptr.addr().get(), memory);
        Ok(ptr)
    }

    fn allocate_small(&self, layout: Layout) -> Result<NonNull<u8>> {
        let piece = class_of(layout);
        let mut state = self.state();
        let open = state.classes.get(&piece).and_then(|class| class.open.first().copied());
        let at = match open {
            Some(at) => at,
            None => {
                let slabs = state.classes.get(&piece).map_or(0, |class| class.slabs);
                // Reclaiming takes time and calls the host: not under the lock.
                drop(state);
                let memory = self.new_slab(piece, slabs)?;
                state = self.state();
                state.add(piece, memory)
            }
        };
        Ok(state.take_from(at))
    }

    fn new_slab(&self, piece: usize, slabs: usize) -> Result<TemporaryMemory> {
        let doublings = (slabs / SLABS_PER_SIZE).min(SLAB_MAX.ilog2() as usize);
        let len = (SLAB_MIN << doublings).min(SLAB_MAX).max(4 * piece);
        self.0.manager.allocate_temporary(ByteCount(len as u64))
    }
}

impl Blocks {
    fn add(&mut self, piece: usize, memory: TemporaryMemory) -> usize {
        let at = memory.as_ptr().addr().get();
        self.slabs.insert(at, Slab { memory, piece, used: 0, free: 0, fresh: 0 });
        let class = self.classes.entry(piece).or_default();
        class.open.insert(at);
        class.slabs += 1;
        at
    }

    fn take_from(&mut self, at: usize) -> NonNull<u8> {
        let slab = self.slabs.get_mut(&at).expect("open slabs exist");
        let piece = slab.take();
        if slab.is_full() {
            let class = self.classes.get_mut(&slab.piece).expect("a slab has a class");
            class.open.remove(&at);
        }
        piece
    }

    /// Takes a piece back; returns the slab's memory when it was the last.
    fn give_back(&mut self, piece: NonNull<u8>) -> Option<TemporaryMemory> {
        let (&at, slab) =
            self.slabs.range_mut(..=piece.addr().get()).next_back().expect("a piece has a slab");
        assert!(slab.has(piece), "freed {piece:?}, which is no temporary object");
        slab.give_back(piece);
        let class = self.classes.get_mut(&slab.piece).expect("a slab has a class");
        if slab.used > 0 {
            class.open.insert(at);
            return None;
        }
        class.open.remove(&at);
        class.slabs -= 1;
        self.slabs.remove(&at).map(|slab| slab.memory)
    }
}

// SAFETY: memory stays valid until it is freed, wherever the handle moves: it belongs to the arena
// that all clones share, and memory that has spilled is the same.
unsafe impl Allocator for Temporary {
    fn allocate(&self, layout: Layout) -> std::result::Result<NonNull<[u8]>, AllocError> {
        let ptr = if layout.size() == 0 {
            NonNull::new(std::ptr::without_provenance_mut(layout.align()))
        } else if !self.0.manager.is_here() {
            None
        } else if is_small(layout) {
            self.allocate_small(layout).ok()
        } else {
            self.allocate_large(layout).ok()
        };
        ptr.map(|ptr| NonNull::slice_from_raw_parts(ptr, layout.size())).ok_or(AllocError)
    }

    unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 || !self.0.manager.is_here() {
            return; // Of the parent's memory a forked child has nothing.
        }
        let mut state = self.state();
        let memory = if is_small(layout) {
            state.give_back(ptr)
        } else {
            Some(state.large.remove(&ptr.addr().get()).expect("a large object is known"))
        };
        // Unmapping takes time: not under the lock.
        drop(state);
        drop(memory);
    }
}

impl fmt::Debug for Temporary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state();
        write!(f, "Temporary({} slabs, {} large)", state.slabs.len(), state.large.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ExpectedPanic;

    fn start(mib: u64) -> Arc<MemoryManager> {
        MemoryManager::start(ByteCount::mib(mib)).expect("starts")
    }

    #[test]
    fn classes_hold_their_layouts_and_waste_at_most_a_quarter() {
        for size in 1..=SMALL_MAX {
            for align in [1, 8, 16] {
                let class = class_of(Layout::from_size_align(size, align).expect("valid"));
                assert!(class >= size && class.is_multiple_of(16), "{size} in {class}");
                assert!(size <= 64 || class * 4 <= size * 5 + 64, "{size} in {class}");
            }
        }
        let aligned = Layout::from_size_align(100, 4096).expect("valid");
        assert_eq!(class_of(aligned), 4096);
    }

    #[test]
    fn what_is_no_object_is_not_written_to() {
        let _expected = ExpectedPanic::saying("which is no temporary object");
        let manager = start(8);
        let allocator = Temporary::new(&manager);
        let layout = Layout::from_size_align(100, 8).expect("valid");
        let object = allocator.allocate(layout).expect("fits").cast::<u8>();
        let beyond = object.addr().get() + (1 << 20);
        for addr in [object.addr().get() + 1, object.addr().get() + 112, beyond] {
            let foreign = NonNull::new(std::ptr::without_provenance_mut(addr)).expect("not null");
            let free = std::panic::AssertUnwindSafe(|| {
                // SAFETY: refused before anything is written.
                unsafe { allocator.deallocate(foreign, layout) }
            });
            assert!(std::panic::catch_unwind(free).is_err(), "{addr:#x}");
        }
        // SAFETY: allocated above with this layout, freed once.
        unsafe { allocator.deallocate(object, layout) };
        assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
    }

    #[test]
    fn pieces_are_disjoint_aligned_and_reused_and_all_of_it_is_free_in_the_end() {
        let manager = start(64);
        let allocator = Temporary::new(&manager);
        let mut dice = 0x9E37_79B9_7F4A_7C15_u64;
        let mut roll = |bound: u64| {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (dice >> 33) % bound
        };
        let mut live: Vec<(NonNull<u8>, Layout, u8)> = Vec::new();
        for step in 0..4000_u32 {
            if roll(3) == 0 && !live.is_empty() {
                let (ptr, layout, mark) = live.swap_remove(roll(live.len() as u64) as usize);
                for at in [0, layout.size() / 2, layout.size() - 1] {
                    // SAFETY: in bounds of a live allocation.
                    let byte = unsafe { ptr.add(at) };
                    // SAFETY: written below.
                    assert_eq!(unsafe { byte.read() }, mark, "{layout:?} was overwritten");
                }
                // SAFETY: allocated below with this layout, freed once.
                unsafe { allocator.deallocate(ptr, layout) };
                continue;
            }
            let size = 1 + roll(if step % 50 == 0 { 200_000 } else { 900 }) as usize;
            let layout = Layout::from_size_align(size, 1 << roll(14)).expect("valid");
            let ptr = allocator.allocate(layout).expect("fits").cast::<u8>();
            assert!(ptr.addr().get().is_multiple_of(layout.align()));
            let mark = step as u8;
            // SAFETY: the allocation is `size` long.
            unsafe { ptr.write_bytes(mark, size) };
            live.push((ptr, layout, mark));
        }
        for (ptr, layout, _) in live {
            // SAFETY: allocated above with this layout, freed once.
            unsafe { allocator.deallocate(ptr, layout) };
        }
        assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
    }
}
