//! Magazines of large blocks: what a thread keeps of freed blocks above 32 KiB, local or far.
//!
//! jemalloc's caches end at [`SMALL_MAX`](super::magazine::SMALL_MAX): above, a pair of allocate and
//! free takes an arena's locks, and with 1 MiB blocks the kernel's zeroing comes on top once an arena
//! decays. Classes and their sizes are those of `magazine`. Used by `cache`.
//!
//! # Invariants
//! 1. Every block in the stack of class `c` has the size of class `c`, as in `magazine`.
//! 2. All blocks together never have more than `room` bytes, which comes from the tier's allowance.

use super::magazine::{CLASSES, SIZE_MAX, SIZES, SMALL_LAST, expect_each_once};
use crate::heap::tail;
use std::ptr;

/// Classes of large blocks: those after [`SMALL_LAST`].
const LARGE_CLASSES: usize = CLASSES - SMALL_LAST - 1;

/// Maximum number of blocks of a class: at most this many, of at most [`CLASS_BYTES`] together.
const DEPTH_MAX: usize = 32;
const CLASS_BYTES: usize = 2 * SIZE_MAX;

/// Bytes of room that are asked for at once, at least: the allowance is shared by all threads.
const STEP: usize = 64 << 10;

/// One class: a stack in its part of [`LargeMagazines::blocks`].
#[derive(Clone, Copy)]
struct LargeStack {
    first: u32,
    len: u32,
    depth: u32,
    /// The clock when a block was last taken.
    taken: u64,
}

/// The empty stacks.
const EMPTY: [LargeStack; LARGE_CLASSES] = {
    let mut stacks = [LargeStack { first: 0, len: 0, depth: 0, taken: 0 }; LARGE_CLASSES];
    let (mut index, mut first) = (0, 0);
    while index < LARGE_CLASSES {
        let fit = CLASS_BYTES / SIZES[SMALL_LAST + 1 + index];
        let depth = if fit > DEPTH_MAX { DEPTH_MAX } else { fit } as u32;
        stacks[index] = LargeStack { first, len: 0, depth, taken: 0 };
        first += depth;
        index += 1;
    }
    stacks
};

/// Blocks that all stacks hold together at most: 5 KiB of pointers.
const ENTRIES: usize = {
    let last = EMPTY[LARGE_CLASSES - 1];
    (last.first + last.depth) as usize
};

/// A thread's large blocks of one tier.
pub(super) struct LargeMagazines {
    /// Bytes of all blocks, and what they may be at present.
    held: usize,
    room: usize,
    /// Counts blocks taken.
    clock: u64,
    stacks: [LargeStack; LARGE_CLASSES],
    blocks: Box<[*mut u8; ENTRIES]>,
}

impl LargeMagazines {
    /// Empty magazines without room.
    pub(super) fn new() -> LargeMagazines {
        let blocks = vec![ptr::null_mut(); ENTRIES].into_boxed_slice();
        let blocks = blocks.try_into().expect("has the length of the array");
        LargeMagazines { held: 0, room: 0, clock: 0, stacks: EMPTY, blocks }
    }

    // `get` instead of an index, as in `magazine`.

    /// Takes a block of `class`, the last one put, if it is aligned to `align`.
    #[inline]
    pub(super) fn take(&mut self, class: usize, align: usize) -> Option<*mut u8> {
        let stack = self.stacks.get_mut(index_of(class))?;
        let len = stack.len.checked_sub(1)?;
        let block = *self.blocks.get((stack.first + len) as usize)?;
        if block.addr() & (align - 1) != 0 {
            return None; // As in `magazine`.
        }
        self.clock += 1;
        stack.len = len;
        stack.taken = self.clock;
        self.held -= SIZES[class];
        Some(block)
    }

    /// Keeps a freed block of `class`; `false` when there is no room.
    #[inline]
    pub(super) fn put(&mut self, class: usize, block: *mut u8) -> bool {
        let Some(stack) = self.stacks.get_mut(index_of(class)) else { return false };
        let at = (stack.first + stack.len) as usize;
        // As in `magazine`; before the first entry of all there is none.
        if stack.len > 0 && self.blocks.get(at.wrapping_sub(1)) == Some(&block) {
            tail::freed_twice(block);
        }
        let held = self.held + SIZES[class];
        if stack.len >= stack.depth || held > self.room {
            return false;
        }
        let Some(place) = self.blocks.get_mut(at) else { return false };
        *place = block;
        self.held = held;
        stack.len += 1;
        true
    }

    /// Bytes of room that a block of `class` lacks, if `most` bytes of room suffice for it; `None`:
    /// more room would not help, or there may be no more.
    pub(super) fn next_room(&self, class: usize, most: usize) -> Option<usize> {
        let stack = &self.stacks[index_of(class)];
        let missing =
            (self.held + SIZES[class]).checked_sub(self.room).filter(|bytes| *bytes > 0)?;
        let more = most.saturating_sub(self.room);
        (stack.len < stack.depth && missing <= more).then(|| missing.max(STEP.min(more)))
    }

    /// Gives the magazines more room.
    pub(super) fn add_room(&mut self, bytes: usize) {
        self.room += bytes;
    }

    /// Makes place for a block of `class` in the room that there is: the oldest blocks of the class
    /// that was taken from least recently go to `free`, with their size. So a thread whose sizes
    /// change does not keep blocks that it uses no more. `false`: there is no place.
    pub(super) fn make_place(
        &mut self,
        class: usize,
        mut free: impl FnMut(*mut u8, usize),
    ) -> bool {
        let (own, size) = (index_of(class), SIZES[class]);
        let LargeStack { len, depth, .. } = self.stacks[own];
        if len >= depth || size > self.room {
            return false;
        }
        while self.held + size > self.room {
            let Some(coldest) = self.coldest(own) else { return false };
            let stack = &mut self.stacks[coldest];
            let (first, len) = (stack.first as usize, stack.len as usize);
            let oldest = self.blocks[first];
            self.blocks.copy_within(first + 1..first + len, first);
            stack.len -= 1;
            let size = SIZES[SMALL_LAST + 1 + coldest];
            self.held -= size;
            free(oldest, size);
        }
        true
    }

    /// The class with blocks, other than `own`, that was taken from least recently; all by their index among
    /// the large ones. Without branches on which classes have blocks: the shortest samples of churn
    /// of 16 B to 8 MiB take 193 ns so, else 206.
    fn coldest(&self, own: usize) -> Option<usize> {
        let (mut coldest, mut earliest) = (None, u64::MAX);
        for (index, stack) in self.stacks.iter().enumerate() {
            let is_out = (stack.len == 0) | (index == own);
            let taken = stack.taken | u64::from(is_out).wrapping_neg();
            coldest = if taken < earliest { Some(index) } else { coldest };
            earliest = earliest.min(taken);
        }
        coldest
    }

    /// Bytes of all blocks.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.held
    }

    /// Empties all magazines into `free`, which gets each block with its size, and takes their room,
    /// which is returned. A block that is there twice ends the process, as in `magazine`.
    pub(super) fn drain(&mut self, mut free: impl FnMut(*mut u8, usize)) -> usize {
        for (stack, &size) in self.stacks.iter_mut().zip(&SIZES[SMALL_LAST + 1..]) {
            let (first, len) = (stack.first as usize, stack.len as usize);
            let blocks = &mut self.blocks[first..][..len];
            expect_each_once(blocks);
            blocks.iter().for_each(|&block| free(block, size));
            stack.len = 0;
        }
        self.held = 0;
        std::mem::take(&mut self.room)
    }
}

/// A class's index among the large ones.
#[inline]
const fn index_of(class: usize) -> usize {
    class - SMALL_LAST - 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::thread_cache::magazine::class_of;
    use std::alloc::Layout;

    fn class(size: usize) -> usize {
        class_of(Layout::from_size_align(size, 8).expect("a valid layout")).expect("has a class")
    }

    fn block(address: usize) -> *mut u8 {
        ptr::without_provenance_mut(address)
    }

    fn with_room(bytes: usize) -> LargeMagazines {
        let mut magazines = LargeMagazines::new();
        magazines.add_room(bytes);
        magazines
    }

    #[test]
    fn all_classes_share_one_room_and_give_the_last_block_first() {
        let mut magazines = with_room(200 << 10);
        let (small, large) = (class(64 << 10), class(128 << 10));
        assert!(magazines.put(small, block(1)) && magazines.put(large, block(2)));
        assert!(!magazines.put(small, block(3)), "the room is full");
        assert_eq!(magazines.take(large, 1), Some(block(2)));
        assert!(magazines.put(small, block(4)));
        assert_eq!(
            [(); 3].map(|()| magazines.take(small, 1)),
            [Some(block(4)), Some(block(1)), None]
        );
    }

    #[test]
    fn room_is_asked_for_in_steps_and_never_beyond_the_most() {
        let mut magazines = with_room(0);
        let small = class(40 << 10);
        assert_eq!(magazines.next_room(small, 1 << 20), Some(STEP));
        assert_eq!(magazines.next_room(small, 50 << 10), Some(50 << 10));
        assert_eq!(magazines.next_room(small, 39 << 10), None);
        assert_eq!(magazines.next_room(class(SIZE_MAX), SIZE_MAX), Some(SIZE_MAX));
        magazines.add_room(16 << 20);
        assert_eq!(magazines.next_room(small, usize::MAX), None, "there is room");
        let kept = (1..).take_while(|&place| magazines.put(small, block(place))).count();
        assert_eq!((kept, magazines.next_room(small, usize::MAX)), (DEPTH_MAX, None));
    }

    #[test]
    fn place_is_made_from_the_class_that_was_used_least_recently() {
        let mut magazines = with_room(400 << 10);
        let [cold, warm, new] = [64 << 10, 128 << 10, 96 << 10].map(class);
        for place in 1..=3 {
            assert!(magazines.put(cold, block(place)));
        }
        assert!(magazines.put(warm, block(9)));
        assert_eq!(magazines.take(warm, 1), Some(block(9)));
        assert!(magazines.put(warm, block(9)));
        let mut freed = Vec::new();
        assert!(magazines.make_place(new, |block, size| freed.push((block, size))));
        assert_eq!(freed, [(block(1), 64 << 10)]);
        assert!(magazines.put(new, block(10)));
        assert_eq!(
            [(); 3].map(|()| magazines.take(cold, 1)),
            [Some(block(3)), Some(block(2)), None]
        );
        assert_eq!(
            (magazines.take(warm, 1), magazines.take(new, 1)),
            (Some(block(9)), Some(block(10)))
        );
        assert!(!magazines.make_place(class(1 << 20), |_, _| panic!("it never fits")));
    }

    #[test]
    fn draining_frees_each_block_once_and_returns_the_room() {
        let mut magazines = with_room(10 << 20);
        assert!(magazines.put(class(SIZE_MAX), block(1)) && magazines.put(class(33_000), block(2)));
        let mut drained = Vec::new();
        assert_eq!(magazines.drain(|block, size| drained.push((block, size))), 10 << 20);
        assert_eq!(drained, [(block(2), 40 << 10), (block(1), SIZE_MAX)]);
        assert_eq!(magazines.drain(|_, _| panic!("nothing is left")), 0);
        assert!(!magazines.put(class(33_000), block(2)), "the room is gone");
    }
}
