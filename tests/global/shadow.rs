//! Random allocations, writes, frees and reallocations through the heap under a tiny limit,
//! against a shadow copy: handles, and the global allocator with threshold and scopes.
//!
//! Guards: G5.

#![expect(unsafe_code, reason = "allocates through raw pointers")]

use crate::ALLOC;
use crate::common::child::{case, cases, run};
use crate::common::{Dice, amount, heap, seed, watchdog};
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as FarVec;
use farheap::{Far, Local, Scope, Tier};
use std::alloc::{GlobalAlloc, Layout};
use std::os::unix::process::ExitStatusExt;
use std::ptr::NonNull;
use std::sync::Mutex;
use std::time::Duration;

/// Words that share a stamp in the shadow copy.
const BLOCK: usize = 512;

/// Through which door memory comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    /// The handle [`Far`].
    Far,
    /// The handle [`Local`].
    Local,
    /// The global allocator: the threshold decides.
    Global,
    /// The global allocator in a far scope.
    Scope,
}

const DOORS: [Door; 4] = [Door::Far, Door::Local, Door::Global, Door::Scope];

/// An allocation of words and what must be in it: word `n` of a block with stamp `s` is `s ^ n`,
/// or 0 where the stamp is 0.
#[derive(Debug)]
struct Object {
    ptr: NonNull<u64>,
    words: usize,
    align: usize,
    door: Door,
    /// In local memory.
    stamps: allocator_api2::vec::Vec<u64, Local>,
}

// SAFETY: an object owns its memory; all doors free what other threads allocated.
unsafe impl Send for Object {}

impl Object {
    fn layout(&self, words: usize) -> Layout {
        Layout::from_size_align(words * 8, self.align).expect("a small layout")
    }

    /// `None` when there is no memory.
    fn new(
        door: Door,
        words: usize,
        align: usize,
        zeroed: bool,
        dice: &mut Dice,
    ) -> Option<Object> {
        let layout = Layout::from_size_align(words * 8, align).expect("a small layout");
        let ptr = allocate(door, layout, zeroed)?;
        assert!(ptr.as_ptr().addr().is_multiple_of(align), "{ptr:?} for {layout:?}");
        let mut stamps = FarVec::new_in(Local);
        stamps.resize(words.div_ceil(BLOCK), 0);
        let mut object = Object { ptr: ptr.cast(), words, align, door, stamps };
        if !zeroed {
            (0..object.stamps.len()).for_each(|block| object.write(block, dice));
        }
        Some(object)
    }

    fn word(&self, at: usize) -> *mut u64 {
        assert!(at < self.words);
        // SAFETY: in bounds, checked above.
        unsafe { self.ptr.as_ptr().add(at) }
    }

    fn block(&self, block: usize) -> std::ops::Range<usize> {
        block * BLOCK..((block + 1) * BLOCK).min(self.words)
    }

    fn write(&mut self, block: usize, dice: &mut Dice) {
        let stamp = dice.roll() | 1;
        for at in self.block(block) {
            // SAFETY: in bounds and this object's.
            unsafe { self.word(at).write_volatile(stamp ^ at as u64) };
        }
        self.stamps[block] = stamp;
    }

    fn check(&self, block: usize) {
        let stamp = self.stamps[block];
        for at in self.block(block) {
            let want = if stamp == 0 { 0 } else { stamp ^ at as u64 };
            // SAFETY: in bounds and this object's.
            let seen = unsafe { self.word(at).read_volatile() };
            assert_eq!(seen, want, "word {at} of {} through {:?}", self.words, self.door);
        }
    }

    fn check_all(&self) {
        (0..self.stamps.len()).for_each(|block| self.check(block));
    }

    /// Grows or shrinks, as `realloc` does; what is new gets written.
    fn resize(&mut self, words: usize, dice: &mut Dice) {
        let (old, new) = (self.layout(self.words), self.layout(words));
        let Some(ptr) = reallocate(self.door, self.ptr.cast(), old, new) else { return };
        let (kept, ends) = (self.words.min(words), self.words.min(words) / BLOCK);
        (self.ptr, self.words) = (ptr.cast(), words);
        self.stamps.resize(words.div_ceil(BLOCK), 0);
        // The block in which the old end lies is checked as far as it was kept.
        if !kept.is_multiple_of(BLOCK) {
            let stamp = self.stamps[ends];
            for at in ends * BLOCK..kept {
                let want = if stamp == 0 { 0 } else { stamp ^ at as u64 };
                // SAFETY: in bounds and this object's.
                let seen = unsafe { self.word(at).read_volatile() };
                assert_eq!(seen, want, "word {at} after {kept} words were kept of {words}");
            }
        }
        (ends..self.stamps.len()).for_each(|block| self.write(block, dice));
    }

    fn free(self) {
        let layout = self.layout(self.words);
        match self.door {
            // SAFETY: the object owns its memory, which came through this door with this layout.
            Door::Far => unsafe { Far.deallocate(self.ptr.cast(), layout) },
            // SAFETY: as above.
            Door::Local => unsafe { Local.deallocate(self.ptr.cast(), layout) },
            // SAFETY: as above; scopes do not matter for freeing.
            Door::Global | Door::Scope => unsafe {
                ALLOC.dealloc(self.ptr.as_ptr().cast(), layout)
            },
        }
    }
}

fn allocate(door: Door, layout: Layout, zeroed: bool) -> Option<NonNull<u8>> {
    let by_handle = |handle: &dyn Allocator| {
        let memory = if zeroed { handle.allocate_zeroed(layout) } else { handle.allocate(layout) };
        memory.ok().map(NonNull::cast)
    };
    let _scope = (door == Door::Scope).then(|| Scope::enter(Tier::FAR));
    match door {
        Door::Far => by_handle(&Far),
        Door::Local => by_handle(&Local),
        // SAFETY: the layout is not empty.
        _ if zeroed => NonNull::new(unsafe { ALLOC.alloc_zeroed(layout) }),
        // SAFETY: as above.
        _ => NonNull::new(unsafe { ALLOC.alloc(layout) }),
    }
}

fn reallocate(door: Door, ptr: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
    let by_handle = |handle: &dyn Allocator| {
        let memory = if new.size() >= old.size() {
            // SAFETY: the memory came from the handle with the old layout.
            unsafe { handle.grow(ptr, old, new) }
        } else {
            // SAFETY: as above.
            unsafe { handle.shrink(ptr, old, new) }
        };
        memory.ok().map(NonNull::cast)
    };
    let _scope = (door == Door::Scope).then(|| Scope::enter(Tier::FAR));
    match door {
        Door::Far => by_handle(&Far),
        Door::Local => by_handle(&Local),
        // SAFETY: the memory came from the global allocator with the old layout.
        _ => NonNull::new(unsafe { ALLOC.realloc(ptr.as_ptr(), old, new.size()) }),
    }
}

/// One thread's objects.
struct Player<'a> {
    objects: Vec<Object>,
    words: usize,
    /// A vector that grows as vectors do.
    growing: FarVec<u64, Far>,
    words_max: usize,
    /// The largest objects have up to 2 to the power of this many words.
    size_bits: u64,
    /// Objects on their way from one thread to another.
    exchange: &'a Mutex<Vec<Object>>,
    dice: Dice,
}

impl Player<'_> {
    fn step(&mut self) {
        match self.dice.below(100) {
            0..30 => self.allocate(),
            30..55 => self.pick(|object, dice| {
                let block = dice.below(object.stamps.len() as u64) as usize;
                object.check(block);
                object.write(block, dice);
            }),
            55..75 => self.pick(|object, _| object.check_all()),
            75..85 => self.resize(),
            85..90 => self.grow(),
            90..94 => self.pass_on(),
            _ => self.free(),
        }
        while self.words > self.words_max {
            self.free();
        }
    }

    fn size(&mut self) -> usize {
        let size = 1_usize << self.dice.below(self.size_bits);
        size + self.dice.below(size as u64) as usize
    }

    fn allocate(&mut self) {
        let door = DOORS[self.dice.below(8).min(3) as usize];
        let words = self.size();
        // Mostly what words need, sometimes much more.
        let align = if self.dice.below(8) == 0 { 8 << self.dice.below(15) } else { 8 };
        let zeroed = self.dice.below(4) == 0;
        self.objects.extend(Object::new(door, words, align, zeroed, &mut self.dice));
        self.words += words;
    }

    fn pick(&mut self, act: impl FnOnce(&mut Object, &mut Dice)) {
        if !self.objects.is_empty() {
            let at = self.dice.below(self.objects.len() as u64) as usize;
            act(&mut self.objects[at], &mut self.dice);
        }
    }

    fn resize(&mut self) {
        let words = self.size();
        self.pick(|object, dice| object.resize(words, dice));
        self.words = self.objects.iter().map(|object| object.words).sum();
    }

    fn grow(&mut self) {
        let start = self.growing.len() as u64;
        self.growing.extend(start..start + 5_000);
        if self.growing.len() > self.words_max / 4 {
            assert!(self.growing.iter().zip(0..).all(|(seen, n)| *seen == n), "a grown vector");
            self.growing.truncate(1);
            self.growing.shrink_to_fit();
        }
    }

    /// Hands an object over and takes another: freed by a thread that did not allocate it.
    fn pass_on(&mut self) {
        if self.objects.is_empty() {
            return;
        }
        let at = self.dice.below(self.objects.len() as u64) as usize;
        let object = self.objects.swap_remove(at);
        let taken = {
            let mut exchange = self.exchange.lock().expect("no thread failed");
            let at = self.dice.below(exchange.len() as u64 + 1) as usize;
            exchange.push(object);
            exchange.swap_remove(at)
        };
        taken.check_all();
        self.objects.push(taken);
        self.words = self.objects.iter().map(|object| object.words).sum();
    }

    fn free(&mut self) {
        if !self.objects.is_empty() {
            let at = self.dice.below(self.objects.len() as u64) as usize;
            let object = self.objects.swap_remove(at);
            object.check_all();
            self.words -= object.words;
            object.free();
        }
    }
}

fn play(option: &str, limit_mib: usize, threads: usize, steps: usize) {
    let _watchdog = watchdog("heap shadow", Duration::from_secs(280));
    let seed = seed("heap shadow");
    let conf = format!(
        "far_limit:{limit_mib}MiB,capacity:2GiB,threshold:16KiB,mode:user,handlers:2,{option}"
    );
    let Some(heap) = heap(&conf) else { return };
    let exchange = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let exchange = &exchange;
            scope.spawn(move || {
                let mut player = Player {
                    objects: Vec::new(),
                    words: 0,
                    growing: FarVec::new_in(Far),
                    words_max: 3 * (limit_mib << 20) / 8 / threads,
                    // Few objects of middle size fill a small limit, large ones a large one.
                    size_bits: if limit_mib > 64 { 21 } else { 18 },
                    exchange,
                    dice: Dice::new(seed + thread as u64),
                };
                (0..steps).for_each(|_| player.step());
                player.objects.drain(..).for_each(|object| {
                    object.check_all();
                    object.free();
                });
            });
        }
    });
    exchange.into_inner().expect("no thread failed").into_iter().for_each(|object| {
        object.check_all();
        object.free();
    });
    heap.purge();
    let stats = heap.stats();
    println!("{option}, {threads} threads: {stats:?}");
    assert!(stats.resident_bytes_max.0 <= stats.limit_bytes.0, "above the limit");
    assert!(stats.pages_out > 0 && stats.pages_in > 0, "the limit had no effect: {stats:?}");
    assert_eq!((stats.poisoned, stats.panics, stats.checksum_errors), (0, 0, 0));
    heap.shutdown().expect("everything was freed");
}

#[test]
fn one_thread_reads_what_it_wrote() {
    cases("one_thread_reads_what_it_wrote", &["check:off", "check:on"], |option| {
        play(option, 8, 1, amount(3_000));
    });
}

#[test]
fn four_threads_read_what_they_wrote_and_free_what_others_allocated() {
    let name = "four_threads_read_what_they_wrote_and_free_what_others_allocated";
    cases(name, &["check:off", "check:on"], |option| play(option, 8, 4, amount(1_000)));
}

/// Does what the case says with a block, of which it says the address first.
fn free_wrongly(case: &str) {
    let Some(_heap) = heap("far_limit:8MiB,capacity:64MiB,threshold:1KiB,mode:user,check:on")
    else {
        return;
    };
    let (small, large) = (Layout::new::<[u64; 12]>(), Layout::new::<[u64; 512]>());
    let layout = if case == "large" { large } else { small };
    // SAFETY: the layout is not empty.
    let block = unsafe { ALLOC.alloc(layout) };
    println!("\n{block:p}"); // Not behind the name of the test.
    let free = |layout| {
        // SAFETY: what is looked for is that this is not so.
        unsafe { ALLOC.dealloc(block, layout) }
    };
    match case {
        "behind" => {
            // SAFETY: as above; it is in the block's tail.
            unsafe { block.wrapping_add(small.size()).write(1) };
            free(layout);
        }
        "size" => free(large),
        "resized" => {
            free(layout);
            // SAFETY: as above.
            unsafe { ALLOC.realloc(block, layout, 5000) };
        }
        _ => {
            free(layout);
            free(layout);
        }
    }
}

#[test]
fn frees_that_are_wrong_end_the_process_with_address_and_cause() {
    let name = "frees_that_are_wrong_end_the_process_with_address_and_cause";
    if let Some(case) = case(name) {
        return free_wrongly(&case);
    }
    let cases = [
        ("small", "freed twice"),
        ("large", "freed twice"),
        ("resized", "freed twice"),
        ("size", "freed as a block of 4096 bytes, but has 96"),
        ("behind", "written to behind its end"),
    ];
    for (case, cause) in cases {
        let ended = run(name, case, |_| ());
        if ended.show_skips() {
            return;
        }
        let address =
            ended.text.lines().find(|line| line.starts_with("0x")).unwrap_or("no address");
        let wanted = format!("farheap: {address}: {cause}");
        let is_right = ended.status.signal() == Some(libc::SIGABRT) && ended.text.contains(&wanted);
        assert!(is_right, "{case}: {}, without `{wanted}`:\n{}", ended.status, ended.text);
    }
}
