//! Memory for what allocates inside of an allocation: the loader, the C library under farheap's own
//! code, farheap's threads. Local, and independent of thread-local variables.
//!
//! Blocks have sizes of powers of two and a header before them; freed ones wait in lists. There are
//! few of them: tables of the loader, a few hundred bytes for a thread. Those that find no room come
//! from farheap's local memory. Uses nothing of the crate.

#![expect(unsafe_code, reason = "is an allocator")]

use crate::mapping::kernel_mmap;
use libc::c_void;
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Address space for all blocks. Without memory until it is used.
const SPAN: usize = 64 << 20;
/// The smallest block, header included, as a power of two; and how many sizes there are.
const SMALLEST: u32 = 6;
const CLASSES: usize = 21;
/// Bytes of a header.
const HEADER: usize = 16;
/// Attempts to take the lock before a thread yields.
const SPINS: u32 = 100;

/// Header of a block.
#[repr(C)]
struct BlockHeader {
    /// The class of the block.
    class: usize,
    /// Bytes from the block's start to what the caller got.
    offset: usize,
}

const _: () = assert!(size_of::<BlockHeader>() == HEADER);

/// Freed blocks by class, each with the address of the next one in it; and what was never used.
struct BlockLists {
    free: [usize; CLASSES],
    unused: usize,
    end: usize,
}

struct InnerHeap {
    locked: AtomicBool,
    /// Start of the range; 0 before it is mapped, 1 where it could not be.
    base: AtomicUsize,
    lists: UnsafeCell<BlockLists>,
}

// SAFETY: the lists are used under the lock only.
unsafe impl Sync for InnerHeap {}

static INNER: InnerHeap = InnerHeap {
    locked: AtomicBool::new(false),
    base: AtomicUsize::new(0),
    lists: UnsafeCell::new(BlockLists { free: [0; CLASSES], unused: 0, end: 0 }),
};

/// Base of a range that could not be mapped.
const REFUSED: usize = 1;

fn lock() {
    let mut rounds = 0;
    while INNER.locked.swap(true, Ordering::Acquire) {
        rounds += 1;
        if rounds % SPINS == 0 {
            std::thread::yield_now();
        }
        std::hint::spin_loop();
    }
}

fn unlock() {
    INNER.locked.store(false, Ordering::Release);
}

/// Takes the lock for a fork, so that the child finds the lists as they should be.
pub(crate) fn before_fork() {
    lock();
}

/// Ends [`before_fork`], in parent and child.
pub(crate) fn after_fork() {
    unlock();
}

/// True if a block is from here.
#[inline]
pub(crate) fn owns(block: *const c_void) -> bool {
    let base = INNER.base.load(Ordering::Relaxed);
    base > REFUSED && block.addr().wrapping_sub(base) < SPAN
}

impl BlockLists {
    /// A block of a class, as an address.
    fn take(&mut self, class: usize) -> Option<usize> {
        if self.free[class] != 0 {
            let block = self.free[class];
            // SAFETY: a freed block of these lists, which begins with the address of the next one.
            self.free[class] = unsafe { (block as *const usize).read() };
            return Some(block);
        }
        let size = 1 << (SMALLEST as usize + class);
        if self.end - self.unused < size {
            return None;
        }
        let block = self.unused;
        self.unused += size;
        Some(block)
    }

    /// Maps the range, once.
    fn open(&mut self) {
        if INNER.base.load(Ordering::Relaxed) != 0 {
            return;
        }
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { kernel_mmap(ptr::null_mut(), SPAN, access, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            INNER.base.store(REFUSED, Ordering::Relaxed);
            return;
        }
        (self.unused, self.end) = (base.addr(), base.addr() + SPAN);
        INNER.base.store(base.addr(), Ordering::Relaxed);
    }
}

/// Allocates `size` bytes at a multiple of `align`, a power of two; null when there is no room.
pub(crate) fn allocate(size: usize, align: usize, zeroed: bool) -> *mut c_void {
    let align = align.max(HEADER);
    // Blocks begin at multiples of 64, so that with the header up to `align` bytes come before it.
    let all = size.checked_add(align).filter(|all| *all <= SPAN);
    let Some(all) = all else { return ptr::null_mut() };
    let order = all.next_power_of_two().trailing_zeros().max(SMALLEST);
    let class = (order - SMALLEST) as usize;
    if class >= CLASSES {
        return ptr::null_mut();
    }
    lock();
    // SAFETY: under the lock, and borrowed until it is given back.
    let lists = unsafe { &mut *INNER.lists.get() };
    lists.open();
    let block = lists.take(class);
    unlock();
    let Some(block) = block else { return ptr::null_mut() };
    let given = (block + HEADER).next_multiple_of(align);
    // SAFETY: the header lies before what is given, inside of the block.
    unsafe {
        ((given - HEADER) as *mut BlockHeader).write(BlockHeader { class, offset: given - block })
    };
    let given = given as *mut c_void;
    if zeroed {
        // SAFETY: the block has that many bytes from here on.
        unsafe { given.write_bytes(0, size) };
    }
    given
}

/// The header of a block.
///
/// # Safety
/// The block is from here and was not freed.
unsafe fn header(block: *mut c_void) -> BlockHeader {
    // The header ends where the block begins for its caller.
    let header = (block.addr() - HEADER) as *const BlockHeader;
    // SAFETY: written when it was allocated.
    unsafe { header.read() }
}

/// Frees a block.
///
/// # Safety
/// The block is from here, was not freed, and is not used again.
pub(crate) unsafe fn free(block: *mut c_void) {
    // SAFETY: as the caller promises.
    let BlockHeader { class, offset } = unsafe { header(block) };
    let start = block.addr() - offset;
    lock();
    // SAFETY: under the lock, and borrowed until it is given back.
    let lists = unsafe { &mut *INNER.lists.get() };
    // SAFETY: the block is nobody's any more, and has at least 64 bytes.
    unsafe { (start as *mut usize).write(lists.free[class]) };
    lists.free[class] = start;
    unlock();
}

/// Bytes of a block that may be used.
///
/// # Safety
/// The block is from here and was not freed.
pub(crate) unsafe fn usable(block: *mut c_void) -> usize {
    // SAFETY: as the caller promises.
    let BlockHeader { class, offset } = unsafe { header(block) };
    (1 << (SMALLEST as usize + class)) - offset
}
