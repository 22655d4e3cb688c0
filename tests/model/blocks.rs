//! Blocks of far memory of one thread, with a stamp for every 4 KiB.
#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

use crate::common::{Dice, bytes};
use allocator_api2::alloc::Allocator;
use farheap::region::Advice;
use farheap::{ByteCount, Far, Heap};
use std::alloc::Layout;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page.
const PAGE: usize = 4096;
/// Words that share a stamp.
const PART: usize = PAGE / 8;

/// Children, of all threads.
pub(crate) static FORKED: AtomicU64 = AtomicU64::new(0);

struct Block {
    base: NonNull<u64>,
    words: usize,
    align: usize,
    /// 0: reads as zero.
    stamps: Vec<u64>,
    pinned: bool,
}

impl Block {
    fn layout(&self) -> Layout {
        layout(self.words, self.align)
    }

    fn start(&self) -> *const u8 {
        self.base.as_ptr().cast()
    }

    fn len(&self) -> ByteCount {
        ByteCount(self.words as u64 * 8)
    }

    fn part(&self, part: usize) -> std::ops::Range<usize> {
        part * PART..((part + 1) * PART).min(self.words)
    }

    fn read(&self, at: usize) -> u64 {
        assert!(at < self.words);
        // SAFETY: inside of the block, which belongs to this thread.
        unsafe { self.base.as_ptr().wrapping_add(at).read_volatile() }
    }

    fn write(&mut self, part: usize, dice: &mut Dice) {
        let stamp = dice.roll() | 1;
        for at in self.part(part) {
            // SAFETY: as in `read`.
            unsafe { self.base.as_ptr().wrapping_add(at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[part] = stamp;
    }

    fn expected(stamp: u64, at: usize) -> u64 {
        if stamp == 0 { 0 } else { stamp ^ at as u64 }
    }

    /// Checks a part's words below `end`.
    fn check_below(&self, part: usize, end: usize) {
        for at in self.part(part).take_while(|at| *at < end) {
            let seen = self.read(at);
            let want = Block::expected(self.stamps[part], at);
            assert_eq!(seen, want, "word {at} of {} at {:p}", self.words, self.base);
        }
    }

    fn check(&self, part: usize) {
        self.check_below(part, self.words);
    }

    fn check_all(&self) {
        (0..self.stamps.len()).for_each(|part| self.check(part));
    }
}

fn layout(words: usize, align: usize) -> Layout {
    Layout::from_size_align(words * 8, align).expect("a power of two")
}

/// All blocks of a thread.
pub(crate) struct Blocks<'a> {
    heap: &'a Heap,
    blocks: Vec<Block>,
    held: u64,
    most: u64,
    /// Where system calls may touch far memory.
    file: Option<File>,
    /// Forked, and not waited for.
    children: Vec<i32>,
}

impl<'a> Blocks<'a> {
    pub(crate) fn new(heap: &'a Heap, most: u64) -> Blocks<'a> {
        let file =
            heap.region().serves_kernel_faults().then(|| tempfile::tempfile().expect("a file"));
        Blocks { heap, blocks: Vec::new(), held: 0, most, file, children: Vec::new() }
    }

    pub(crate) fn check_all(&mut self) {
        self.wait_for_children();
        self.blocks.iter().for_each(Block::check_all);
    }

    /// A size: most are small, some as large as a share of all.
    fn words(&self, dice: &mut Dice) -> usize {
        let bound = match dice.below(10) {
            0..4 => 200,
            4..7 => 8 << 10,
            7..9 => 32 << 10,
            _ => self.most / 8 / 8,
        };
        1 + dice.below(bound) as usize
    }

    /// A child has the blocks as they are, and what it writes is its own.
    pub(crate) fn fork(&mut self, dice: &mut Dice) {
        /// Blocks that a child looks at: to bring all in takes it longer than all other steps together.
        const CHECKED: u64 = 12;
        #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
        // SAFETY: the child reads and writes its copy of the blocks, and ends without cleaning up.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "fork: {}", std::io::Error::last_os_error());
        if pid == 0 {
            let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                for _ in 0..CHECKED.min(self.blocks.len() as u64) {
                    let block = dice.below(self.blocks.len() as u64) as usize;
                    let block = &mut self.blocks[block];
                    block.check_all();
                    let parts = block.stamps.len() as u64;
                    (0..8).for_each(|_| block.write(dice.below(parts) as usize, dice));
                    block.check_all();
                }
            }));
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::_exit(i32::from(ended.is_err())) };
        }
        FORKED.fetch_add(1, Ordering::Relaxed);
        self.children.push(pid);
        if self.children.len() > 2 {
            self.wait_for_children();
        }
    }

    fn wait_for_children(&mut self) {
        for pid in self.children.drain(..) {
            let mut status = 0;
            // SAFETY: the status is a valid place to write to.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!((waited, status), (pid, 0), "a child and its status");
        }
    }

    pub(crate) fn step(&mut self, dice: &mut Dice) {
        if self.blocks.is_empty() || (self.held < self.most && dice.below(8) == 0) {
            return self.allocate(dice);
        }
        let index = dice.below(self.blocks.len() as u64) as usize;
        match dice.below(100) {
            0..30 => {
                let parts = self.blocks[index].stamps.len() as u64;
                (0..4).for_each(|_| self.blocks[index].write(dice.below(parts) as usize, dice));
            }
            30..60 => {
                let block = &self.blocks[index];
                let parts = block.stamps.len() as u64;
                (0..4).for_each(|_| block.check(dice.below(parts) as usize));
            }
            60..64 => self.blocks[index].check_all(),
            64..71 => self.resize(index, dice),
            71..78 => self.free(index),
            78..90 => self.hint(index, dice),
            90..94 => self.discard(index, dice),
            _ => self.through_a_file(index),
        }
    }

    fn allocate(&mut self, dice: &mut Dice) {
        let words = self.words(dice);
        let align = [8, 8, 64, 4096, 65536][dice.below(5) as usize];
        let zeroed = dice.below(2) == 0;
        let layout = layout(words, align);
        let made = if zeroed { Far.allocate_zeroed(layout) } else { Far.allocate(layout) };
        // Far memory that the limit's tables leave no room for is refused.
        let Ok(base) = made else { return };
        let stamps = vec![0; words.div_ceil(PART)];
        let mut block = Block { base: base.cast(), words, align, stamps, pinned: false };
        assert_eq!(block.start() as usize % align, 0);
        if !zeroed {
            (0..block.stamps.len()).for_each(|part| block.write(part, dice));
        }
        self.held += block.len().0;
        self.blocks.push(block);
    }

    fn free(&mut self, index: usize) {
        if self.blocks[index].pinned {
            return;
        }
        let block = self.blocks.swap_remove(index);
        block.check(0);
        self.held -= block.len().0;
        // SAFETY: allocated with this layout, and forgotten.
        unsafe { Far.deallocate(block.base.cast(), block.layout()) };
    }

    fn resize(&mut self, index: usize, dice: &mut Dice) {
        let words = self.words(dice);
        let block = &mut self.blocks[index];
        if block.pinned {
            return;
        }
        let (old, new) = (block.layout(), layout(words, block.align));
        let before = block.words;
        let base = block.base.cast();
        let made = if words >= before {
            // SAFETY: allocated with the old layout; the new one is not smaller.
            unsafe { Far.grow_zeroed(base, old, new) }
        } else {
            // SAFETY: allocated with the old layout; the new one is smaller.
            unsafe { Far.shrink(base, old, new) }
        };
        let Ok(base) = made else { return };
        block.base = base.cast();
        block.words = words;
        let kept = before.div_ceil(PART).min(words.div_ceil(PART));
        block.stamps.resize(words.div_ceil(PART), 0);
        (0..kept).for_each(|part| block.check_below(part, before));
        (before..words).for_each(|at| assert_eq!(block.read(at), 0, "word {at} of {words}"));
        // The part with the old end holds two kinds of words.
        if words > before && !before.is_multiple_of(PART) {
            block.write(before / PART, dice);
        }
        self.held = self.held - old.size() as u64 + new.size() as u64;
    }

    /// What a program may say about its memory, none of which changes it.
    fn hint(&mut self, index: usize, dice: &mut Dice) {
        let heap = self.heap;
        let block = &mut self.blocks[index];
        let (start, len) = (block.start(), block.len());
        match dice.below(8) {
            0 | 1 => heap
                .region()
                .advise(&[bytes(start, len)], Advice::WillNeed)
                .expect("inside the region"),
            // An error while others have much in use: the pages stay.
            2 | 3 => drop(heap.region().advise(&[bytes(start, len)], Advice::PageOutNow)),
            4 => {
                if !block.pinned
                    && len.0 < 256 << 10
                    && heap.region().pin(bytes(start, len)).map(std::mem::forget).is_ok()
                {
                    block.pinned = true;
                    block.check_all();
                }
            }
            5 | 6 => {
                if std::mem::take(&mut block.pinned) {
                    heap.region().unpin(bytes(start, len)).expect("was pinned");
                }
            }
            _ => {
                let all = [
                    Advice::Normal,
                    Advice::Random,
                    Advice::Sequential,
                    Advice::WillNeed,
                    Advice::Cold,
                ];
                heap.region()
                    .advise(&[bytes(start, len)], all[dice.below(5) as usize])
                    .expect("inside the region");
            }
        }
    }

    fn discard(&mut self, index: usize, dice: &mut Dice) {
        let block = &mut self.blocks[index];
        let start = block.start() as usize;
        let first = start.next_multiple_of(PAGE);
        let end = (start + block.words * 8) / PAGE * PAGE;
        if block.pinned || first >= end {
            return;
        }
        // SAFETY: this thread's own block; the shadow forgets the pages as well.
        unsafe { self.heap.region().discard(bytes(block.start(), block.len()).cast_mut()) }
            .expect("inside the region");
        for part in 0..block.stamps.len() {
            let range = block.part(part);
            let (from, to) = (start + range.start * 8, start + range.end * 8);
            if from >= first && to <= end {
                block.stamps[part] = 0;
            } else if to > first && from < end {
                block.write(part, dice);
            }
        }
    }

    /// Written to a file and read back into the same place.
    fn through_a_file(&self, index: usize) {
        let Some(file) = &self.file else { return };
        let block = &self.blocks[index];
        if block.words > 128 << 10 {
            return;
        }
        let (start, len) = (block.base.as_ptr().cast::<u8>(), block.words * 8);
        // SAFETY: this thread's block; nothing else refers to it meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
        file.write_all_at(bytes, 0).expect("written from far memory");
        file.read_exact_at(bytes, 0).expect("read into far memory");
        block.check(0);
        block.check(block.stamps.len() - 1);
    }
}

impl Drop for Blocks<'_> {
    fn drop(&mut self) {
        for block in self.blocks.drain(..) {
            if block.pinned {
                self.heap.region().unpin(bytes(block.start(), block.len())).expect("was pinned");
            }
            // SAFETY: allocated with this layout, and forgotten.
            unsafe { Far.deallocate(block.base.cast(), block.layout()) };
        }
    }
}

/// Writes numbers to new memory and reads them back.
pub(crate) fn fill_and_check(memory: NonNull<u8>, words: usize, dice: &mut Dice) {
    let (memory, stamp) = (memory.cast::<u64>(), dice.roll());
    let step = [1, 64, 512][dice.below(3) as usize];
    for at in (0..words).step_by(step) {
        // SAFETY: inside of the memory, which belongs to the caller.
        unsafe { memory.as_ptr().wrapping_add(at).write_volatile(stamp ^ at as u64) };
    }
    for at in (0..words).step_by(step) {
        // SAFETY: as above.
        let seen = unsafe { memory.as_ptr().wrapping_add(at).read_volatile() };
        assert_eq!(seen, stamp ^ at as u64, "word {at} of {words} of temporary memory");
    }
}
