//! Tests of the heap as a whole, over a source that checks its use.
//!
//! There is one default tier per process, so tests that install one take turns.

#![expect(unsafe_code, reason = "allocates by hand")]

use super::far_arenas::ClosedArenas;
use super::testing::TestSource;
use super::*;
use crate::Error;
use crate::base::sync::{AtomicBool, Ordering::SeqCst};
use crate::base::units::ByteCount;
use allocator_api2::alloc::Allocator;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout};
use std::cell::RefCell;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;
use std::{slice, thread};

mod large;
mod memory;
mod tiers;
mod without_size;

const HEAP: FarHeap = FarHeap::new();

/// A running heap, this test's alone; shut down when dropped.
struct Running {
    source: Arc<TestSource>,
    arenas: &'static FarArenas,
    _turn: MutexGuard<'static, ()>,
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn start(capacity: ByteCount, options: FarArenasOptions) -> Running {
    let turn = turn();
    let source = Arc::new(TestSource::new(ByteCount::gib(4), capacity));
    let arenas = FarArenas::create(source.clone(), options).expect("jemalloc has an arena left");
    install(arenas).expect("no heap is running");
    Running { source, arenas, _turn: turn }
}

fn start_default() -> Running {
    start(ByteCount::gib(1), FarArenasOptions::default())
}

impl Running {
    fn stop(self) {
        uninstall(&[self.arenas]).expect("all far memory has been freed");
        assert_eq!(self.source.committed(), ByteCount::ZERO);
        assert_eq!(self.source.reserved(), ByteCount::ZERO);
        assert_eq!(Arc::strong_count(&self.source), 1);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After a failed test: whatever is left stays behind, and the tests that follow fail too rather
        // than crash.
        if default_tier().is_some() {
            let _ = uninstall(&[self.arenas]);
        }
    }
}

/// A block allocated by hand through the global allocator, filled with a pattern.
struct Block {
    ptr: *mut u8,
    layout: Layout,
    seed: u8,
}

// SAFETY: owns its memory.
unsafe impl Send for Block {}

impl Block {
    fn new(layout: Layout, seed: u8) -> Option<Block> {
        // SAFETY: tests use no empty layouts.
        let ptr = unsafe { HEAP.alloc(layout) };
        Block::filled(ptr, layout, seed)
    }

    fn zeroed(layout: Layout, seed: u8) -> Option<Block> {
        // SAFETY: tests use no empty layouts.
        let ptr = unsafe { HEAP.alloc_zeroed(layout) };
        if !ptr.is_null() {
            // SAFETY: just allocated with this size, and zeroed.
            let bytes = unsafe { slice::from_raw_parts(ptr, layout.size()) };
            assert!(bytes.iter().all(|&byte| byte == 0), "{layout:?} is not zero");
        }
        Block::filled(ptr, layout, seed)
    }

    fn filled(ptr: *mut u8, layout: Layout, seed: u8) -> Option<Block> {
        assert_eq!(ptr.addr() % layout.align(), 0, "{layout:?} at {ptr:p}"); // Null too.
        let mut block = (!ptr.is_null()).then(|| Block { ptr, layout, seed })?;
        block.fill();
        Some(block)
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: our allocation; written whole before it is read, in `fill`.
        unsafe { slice::from_raw_parts_mut(self.ptr, self.layout.size()) }
    }

    fn fill(&mut self) {
        let seed = self.seed;
        let pattern = |(index, byte): (usize, &mut u8)| *byte = seed.wrapping_add(index as u8);
        self.bytes().iter_mut().enumerate().for_each(pattern);
    }

    fn check(&mut self, len: usize) {
        let seed = self.seed;
        let wrong = |(index, byte): (usize, &u8)| *byte != seed.wrapping_add(index as u8);
        let found = self.bytes()[..len].iter().enumerate().position(wrong);
        assert_eq!(found, None, "byte of {:?}", self.layout);
    }

    /// True if there was memory for it.
    fn resize(&mut self, size: usize) -> bool {
        // SAFETY: our allocation; tests use no empty layouts.
        let ptr = unsafe { HEAP.realloc(self.ptr, self.layout, size) };
        if ptr.is_null() {
            self.check(self.layout.size());
            return false;
        }
        let kept = self.layout.size().min(size);
        self.ptr = ptr;
        self.layout = Layout::from_size_align(size, self.layout.align()).expect("a valid layout");
        self.check(kept);
        self.fill();
        true
    }

    fn is_far(&self) -> bool {
        Far::contains(self.ptr)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.check(self.layout.size());
        }
        // SAFETY: our allocation.
        unsafe { HEAP.dealloc(self.ptr, self.layout) };
    }
}

/// A block whose contents do not matter.
struct Untouched(*mut u8, Layout);

impl Untouched {
    fn new(layout: Layout) -> Untouched {
        // SAFETY: tests use no empty layouts.
        let ptr = unsafe { HEAP.alloc(layout) };
        assert!(!ptr.is_null());
        Untouched(ptr, layout)
    }
}

impl Drop for Untouched {
    fn drop(&mut self) {
        // SAFETY: our allocation.
        unsafe { HEAP.dealloc(self.0, self.1) };
    }
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("a valid layout")
}

fn block(size: usize) -> Block {
    Block::new(layout(size, 8), size as u8).expect("there is memory")
}

#[test]
fn the_size_threshold_sends_allocations_far() {
    let running = start_default();
    assert!(!block(65_535).is_far());
    assert!(block(65_536).is_far());
    running.stop();
}

#[test]
fn without_a_threshold_only_scopes_and_handles_are_far() {
    let running = start(
        ByteCount::gib(1),
        FarArenasOptions { threshold: None, ..FarArenasOptions::default() },
    );
    assert!(!block(1 << 20).is_far());
    {
        let _scope = Scope::enter(Tier::FAR);
        assert!(block(16).is_far());
        let _inner = Scope::enter(Tier::LOCAL);
        assert!(!block(1 << 20).is_far());
    }
    running.stop();
}

#[test]
fn a_pinned_thread_stays_local() {
    let running = start_default();
    thread::spawn(|| {
        pin_thread_local();
        let _scope = Scope::enter(Tier::FAR);
        assert!(!block(1 << 20).is_far());
    })
    .join()
    .expect("the thread asserts nothing false");
    running.stop();
}

#[test]
fn a_local_block_that_grows_past_the_threshold_becomes_far_and_stays_far() {
    let running = start_default();
    let mut grown = block(1000);
    assert!(!grown.is_far());
    assert!(grown.resize(100_000));
    assert!(grown.is_far());
    assert!(grown.resize(10));
    assert!(grown.is_far());
    drop(grown);
    running.stop();
}

#[test]
fn freed_far_memory_never_comes_back_local_nor_local_memory_far() {
    let running = start_default();
    let far: Vec<Block> = {
        let _scope = Scope::enter(Tier::FAR);
        (0..2000).map(|_| block(48)).collect()
    };
    let local: Vec<Block> = (0..2000).map(|_| block(48)).collect();
    // Freed where the policy says the opposite.
    drop(far);
    {
        let _scope = Scope::enter(Tier::FAR);
        drop(local);
    }
    let local: Vec<Block> = (0..2000).map(|_| block(48)).collect();
    assert!(local.iter().all(|block| !block.is_far()));
    let _scope = Scope::enter(Tier::FAR);
    let far: Vec<Block> = (0..2000).map(|_| block(48)).collect();
    assert!(far.iter().all(Block::is_far));
    drop(far);
    running.stop();
}

#[test]
fn over_aligned_layouts_are_served_far() {
    let running = start_default();
    let _scope = Scope::enter(Tier::FAR);
    for log in 0..=24 {
        for size in [1, 40, 5_000, 70_000, 3 << 20] {
            let mut aligned = Block::new(layout(size, 1 << log), 7).expect("there is memory");
            assert!(aligned.is_far());
            assert!(aligned.resize(size * 2));
            assert_eq!(aligned.ptr.addr() % (1 << log), 0);
        }
    }
    running.stop();
}

#[test]
fn recycled_memory_is_zeroed_on_request() {
    let running = start_default();
    let _scope = Scope::enter(Tier::FAR);
    for size in [16, 500, 5_000, 40_000, 100_000, 900_000, 5 << 20] {
        let dirty: Vec<Block> = (0..20).map(|_| block(size)).collect();
        drop(dirty);
        let zeroed: Vec<_> = (0..20).map(|_| Block::zeroed(layout(size, 8), 1)).collect();
        assert!(zeroed.iter().all(Option::is_some));
    }
    running.stop();
}

#[test]
fn fresh_zeroed_memory_is_not_touched() {
    let running = start_default();
    let size = 256 << 20;
    // SAFETY: the layout is not empty.
    let ptr = unsafe { HEAP.alloc_zeroed(layout(size, 8)) };
    assert!(Far::contains(ptr));
    let mut resident = vec![0_u8; size / 4096];
    // SAFETY: the range is mapped (large blocks start on a page) and the vector has a byte for
    // each of its pages.
    let result = unsafe { libc::mincore(ptr.cast(), size, resident.as_mut_ptr()) };
    assert_eq!(result, 0);
    // But for its edges, which the source leaves to be cleared.
    assert!(resident.iter().filter(|&&page| page & 1 == 1).count() <= 2);
    // SAFETY: allocated above.
    unsafe { HEAP.dealloc(ptr, layout(size, 8)) };
    running.stop();
}

#[test]
fn a_full_tier_returns_null_and_recovers_after_a_free() {
    let running = start(ByteCount::mib(64), FarArenasOptions::default());
    let mut blocks: Vec<Block> = std::iter::from_fn(|| Block::new(layout(1 << 20, 8), 3)).collect();
    assert!((50..=64).contains(&blocks.len()), "{} blocks of 1 MiB in 64 MiB", blocks.len());
    assert!(!blocks[0].resize(32 << 20));
    blocks.truncate(8);
    // Not of the same size: what was freed must go back to the source first.
    let other = Block::new(layout(40 << 20, 8), 3).expect("what was freed is available");
    drop(other);
    drop(blocks);
    running.stop();
}

#[test]
fn failing_allocations_do_not_use_up_address_space() {
    let running = start(ByteCount::mib(16), FarArenasOptions::default());
    let full: Vec<Block> = std::iter::from_fn(|| Block::new(layout(1 << 20, 8), 3)).collect();
    assert!(Block::new(layout(3 << 20, 8), 3).is_none());
    let before = running.source.reserved();
    for _ in 0..200 {
        assert!(Block::new(layout(3 << 20, 8), 3).is_none());
    }
    assert_eq!(running.source.reserved(), before);
    drop(full);
    running.stop();
}

#[test]
fn a_raised_capacity_is_used_at_once() {
    let running = start(ByteCount::mib(8), FarArenasOptions::default());
    assert!(Block::new(layout(20 << 20, 8), 3).is_none());
    running.source.set_capacity(ByteCount::mib(64));
    assert!(Block::new(layout(20 << 20, 8), 3).is_some());
    running.stop();
}

#[test]
fn impossible_sizes_are_null_or_an_error() {
    let running = start_default();
    let huge = layout(isize::MAX as usize - 4096, 8);
    // SAFETY: the layout is not empty.
    assert!(unsafe { HEAP.alloc(huge) }.is_null());
    assert!(Far.allocate(huge).is_err());
    assert!(Far.allocate(layout(1 << 50, 1 << 20)).is_err());
    running.stop();
}

#[test]
fn handles_choose_their_tier_whatever_the_scope_says() {
    let running = start_default();
    let mut far = allocator_api2::vec::Vec::new_in(Far);
    let mut local = allocator_api2::vec::Vec::new_in(Local);
    {
        let _scope = Scope::enter(Tier::LOCAL);
        far.extend(0..100_000_u32);
    }
    {
        let _scope = Scope::enter(Tier::FAR);
        local.extend(0..100_000_u32);
    }
    assert!(Far::contains(far.as_ptr()));
    assert!(!Far::contains(local.as_ptr()));
    assert!(far.iter().eq(local.iter()));
    far.truncate(1);
    far.shrink_to_fit();
    assert!(Far::contains(far.as_ptr()));
    drop(far);
    running.stop();
}

#[test]
fn handles_serve_empty_layouts_and_growth_out_of_them() {
    let running = start_default();
    let empty = layout(0, 64);
    let ptr = Far.allocate(empty).expect("needs no memory").cast::<u8>();
    assert_eq!(ptr.addr().get() % 64, 0);
    // SAFETY: allocated above, with this layout.
    let grown = unsafe { Far.grow_zeroed(ptr, empty, layout(100, 64)) }.expect("there is memory");
    assert!(Far::contains(grown.cast::<u8>().as_ptr()));
    // SAFETY: allocated above, with this layout.
    let shrunk = unsafe { Far.shrink(grown.cast(), layout(100, 64), empty) }.expect("fits");
    // SAFETY: allocated above, with this layout.
    unsafe { Far.deallocate(shrunk.cast(), empty) };
    let allocated = running.arenas.allocated();
    assert_eq!(allocated, ByteCount::ZERO);
    running.stop();
}

#[test]
fn growing_with_zeroes_clears_exactly_the_new_part() {
    let running = start_default();
    drop((0..50).map(|_| block(100_000)).collect::<Vec<_>>());
    let (old, new) = (layout(30_000, 8), layout(90_000, 8));
    let ptr = Far.allocate(old).expect("there is memory").cast::<u8>();
    // SAFETY: allocated above with this size.
    unsafe { ptr.write_bytes(9, 30_000) };
    // SAFETY: allocated above with this layout.
    let ptr = unsafe { Far.grow_zeroed(ptr, old, new) }.expect("there is memory").cast::<u8>();
    // SAFETY: written or zeroed whole.
    let bytes = unsafe { slice::from_raw_parts(ptr.as_ptr(), 90_000) };
    assert!(bytes[..30_000].iter().all(|&byte| byte == 9));
    assert!(bytes[30_000..].iter().all(|&byte| byte == 0));
    // SAFETY: allocated above with this layout.
    unsafe { Far.deallocate(ptr, new) };
    running.stop();
}

#[test]
fn without_a_heap_everything_is_local_and_the_far_handle_fails() {
    let _turn = turn();
    let _scope = Scope::enter(Tier::FAR);
    assert!(!block(1 << 20).is_far());
    assert!(Far.allocate(layout(8, 8)).is_err());
}

#[test]
fn a_second_heap_is_refused() {
    let running = start_default();
    let source = Arc::new(TestSource::new(ByteCount::mib(64), ByteCount::mib(64)));
    let second =
        FarArenas::create(source, FarArenasOptions::default()).expect("jemalloc has an arena left");
    assert_eq!(install(second), Err(Error::AlreadyRunning));
    second.close().and_then(ClosedArenas::end).expect("nothing was allocated from it");
    running.stop();
}

#[test]
fn shutting_down_with_far_memory_in_use_is_refused_and_changes_nothing() {
    let running = start_default();
    let held = block(100_000);
    assert_eq!(uninstall(&[running.arenas]), Err(Error::InUse { bytes: ByteCount(100_000) }));
    assert!(block(100_000).is_far());
    drop(held);
    running.stop();
}

/// Set when dropped, so that a test that fails does not wait for its threads for ever.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn a_heap_ends_while_a_thread_asks_for_far_memory() {
    let _turn = turn();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(SeqCst) {
                if let Ok(ptr) = Far.allocate(layout(100, 8)) {
                    // SAFETY: allocated above with this layout.
                    unsafe { Far.deallocate(ptr.cast(), layout(100, 8)) };
                }
            }
        });
        let _stop = Stop(&stop);
        for _ in 0..100 {
            let source = Arc::new(TestSource::new(ByteCount::mib(256), ByteCount::mib(64)));
            let options = FarArenasOptions { arenas: 1, ..FarArenasOptions::default() };
            let arenas = FarArenas::create(source, options).expect("jemalloc has an arena left");
            install(arenas).expect("no heap is running");
            while arenas.arenas().committed() == ByteCount::ZERO {
                thread::yield_now();
            }
            // The thread holds a block for moments only, but may be stopped in one of them.
            while let Err(error) = uninstall(&[arenas]) {
                assert!(matches!(error, Error::InUse { .. }), "{error}");
                thread::yield_now();
            }
        }
    });
}

#[test]
fn asking_for_the_control_that_another_thread_has_does_not_free_it() {
    let running = start_default();
    let control = running.arenas.caches().take_control();
    assert!(control.is_some());
    assert!(running.arenas.caches().take_control().is_none());
    assert!(running.arenas.caches().take_control().is_none(), "the refusal freed it");
    drop(control);
    running.stop();
}

#[test]
fn a_heap_can_be_started_again_with_threads_that_knew_the_old_one() {
    let (send, receive) = mpsc::channel::<Arc<Barrier>>();
    let old = thread::spawn(move || {
        for barrier in receive {
            assert!(block(70_000).is_far());
            barrier.wait();
        }
    });
    for _ in 0..3 {
        let running = start_default();
        let barrier = Arc::new(Barrier::new(2));
        send.send(barrier.clone()).expect("the thread listens");
        barrier.wait();
        running.stop();
    }
    drop(send);
    old.join().expect("the thread asserts nothing false");
}

#[test]
fn data_that_dies_young_is_reused_without_calls_to_the_source() {
    let running = start_default();
    let sizes = [100_000, 3 << 20, 40 << 20].map(|size| layout(size, 8));
    let allocate_all = || drop(sizes.map(Untouched::new));
    allocate_all();
    let (commits, decommits) =
        (running.source.commits.load(SeqCst), running.source.decommits.load(SeqCst));
    (0..1000).for_each(|_| allocate_all());
    assert_eq!(running.source.commits.load(SeqCst), commits);
    assert_eq!(running.source.decommits.load(SeqCst), decommits);
    running.stop();
}

#[test]
fn a_source_that_is_short_gets_free_memory_back_when_it_is_worth_it() {
    let options =
        FarArenasOptions { decay: Duration::from_secs(1000), ..FarArenasOptions::default() };
    let running = start(ByteCount::gib(1), options);
    drop((0..16).map(|_| block(2 << 20)).collect::<Vec<_>>());
    let free = running.arenas.arenas().committed();
    assert!(free >= ByteCount::mib(24), "{}", running.arenas.memory());
    running.arenas.give_back(ByteCount::mib(64));
    assert_eq!(running.arenas.arenas().committed(), free, "too little to be worth it");
    running.arenas.give_back(ByteCount::mib(1));
    assert!(
        running.arenas.arenas().committed() <= ByteCount::mib(8),
        "{}",
        running.arenas.memory()
    );
    running.stop();
}

#[test]
fn maintenance_empties_the_caches_of_sleeping_threads() {
    let options = FarArenasOptions { dirty_max: ByteCount::ZERO, ..FarArenasOptions::default() };
    let running = start(ByteCount::gib(1), options);
    let (wake, sleep) = mpsc::channel::<()>();
    let (ready, wait) = mpsc::channel::<()>();
    let sleeper = thread::spawn(move || {
        let _scope = Scope::enter(Tier::FAR);
        drop([16, 3_000, 30_000, 200_000].map(|size| [(); 4].map(|()| block(size))));
        ready.send(()).expect("the test waits");
        sleep.recv().expect("the test wakes us");
        assert!(block(3_000).is_far());
    });
    wait.recv().expect("the thread works");
    // The first round notes what the thread has done, the second finds it idle.
    running.arenas.maintain();
    running.arenas.maintain();
    assert_eq!(running.arenas.arenas().committed(), ByteCount::ZERO);
    wake.send(()).expect("the thread waits");
    sleeper.join().expect("the thread asserts nothing false");
    running.stop();
}

#[test]
fn threads_that_exit_leave_nothing_behind() {
    let running = start_default();
    for _ in 0..50 {
        thread::spawn(|| {
            let _scope = Scope::enter(Tier::FAR);
            drop((0..100).map(|index| block(10 + index * 300)).collect::<Vec<_>>());
        })
        .join()
        .expect("the thread asserts nothing false");
    }
    running.arenas.arenas().purge();
    assert_eq!(running.source.committed(), ByteCount::ZERO);
    running.stop();
}

#[test]
fn thread_local_destructors_can_allocate_and_free_far_memory() {
    struct Late(RefCell<Vec<Block>>);
    impl Drop for Late {
        fn drop(&mut self) {
            let mut blocks = self.0.borrow_mut();
            blocks.push(block(100_000));
            assert!(blocks.iter().all(Block::is_far));
            blocks.clear();
        }
    }
    thread_local! {
        static BEFORE: Late = const { Late(RefCell::new(Vec::new())) };
        static AFTER: Late = const { Late(RefCell::new(Vec::new())) };
    }
    let running = start_default();
    thread::spawn(|| {
        // One destructor on each side of the heap's own.
        BEFORE.with(|late| late.0.borrow_mut().clear());
        let held = block(70_000);
        BEFORE.with(|late| late.0.borrow_mut().push(held));
        AFTER.with(|late| late.0.borrow_mut().push(block(80_000)));
    })
    .join()
    .expect("the thread asserts nothing false");
    running.stop();
}

#[test]
fn more_threads_than_slots_are_served_without_caches() {
    let running = start_default();
    // All caches but one, then this thread and another one.
    let claimed: Vec<_> = (1..thread_cache::CACHES_MAX)
        .map(|_| running.arenas.claim_cache().expect("is open"))
        .collect();
    assert!(claimed.iter().all(Option::is_some));
    let _scope = Scope::enter(Tier::FAR);
    let with_slot = block(100);
    let mut without = thread::spawn(|| {
        let _scope = Scope::enter(Tier::FAR);
        block(200)
    })
    .join()
    .expect("the thread asserts nothing false");
    assert!(running.arenas.claim_cache().expect("is open").is_none());
    assert!(without.is_far());
    assert!(without.resize(100_000));
    assert_eq!(running.arenas.allocated(), ByteCount(100_100));
    drop((with_slot, without));
    running.stop();
}

#[test]
fn memory_moves_between_threads_under_all_operations_at_once() {
    const THREADS: usize = 4;
    let options =
        FarArenasOptions { arenas: 2, decay: Duration::ZERO, ..FarArenasOptions::default() };
    let running = start(ByteCount::mib(96), options);
    let stop = AtomicUsize::new(0);
    thread::scope(|threads| {
        let (senders, receivers): (Vec<_>, Vec<_>) =
            (0..THREADS).map(|_| mpsc::sync_channel::<Block>(64)).unzip();
        for (index, receiver) in receivers.into_iter().enumerate() {
            let next = senders[(index + 1) % THREADS].clone();
            let stop = &stop;
            threads.spawn(move || {
                hammer(index as u64, &next, &receiver);
                stop.fetch_add(1, SeqCst);
                // The neighbour must not wait for a full channel.
                while stop.load(SeqCst) < THREADS {
                    let _ = receiver.recv_timeout(Duration::from_millis(1));
                }
            });
        }
        let stop = &stop;
        threads.spawn(move || {
            pin_thread_local();
            while stop.load(SeqCst) < THREADS {
                running_tier().maintain();
                // As the maintenance thread does, only more often.
                thread::sleep(Duration::from_millis(1));
            }
        });
    });
    running.stop();
}

fn running_tier() -> &'static FarArenas {
    default_tier().expect("a heap is running")
}

/// Numbers below a bound, from a seed (xorshift).
fn dice(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move |bound| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as usize % bound
    }
}

/// Random operations on blocks that come from and go to other threads.
fn hammer(seed: u64, next: &mpsc::SyncSender<Block>, previous: &mpsc::Receiver<Block>) {
    let mut random = dice(seed);
    let mut kept: Vec<Block> = Vec::new();
    for round in 0..3000 {
        let _scope = (random(2) == 0).then(|| Scope::enter(Tier::FAR));
        let shift = random(12);
        let size = 1 + random(256 << shift);
        let made = match random(4) {
            0 => Block::zeroed(layout(size, 1 << random(8)), round as u8),
            _ => Block::new(layout(size, 8), round as u8),
        };
        kept.extend(made);
        if let Some(block) = kept.last_mut() {
            block.resize(1 + random(2 * size));
        }
        if kept.len() > 8 {
            let given = kept.swap_remove(random(8));
            drop(next.try_send(given));
        }
        kept.extend(previous.try_recv());
        if kept.len() > 16 {
            kept.truncate(random(16));
        }
        if round % 500 == 0 {
            thread::spawn(|| drop(block(70_000))).join().expect("asserts nothing false");
        }
    }
}

/// One step of the model test.
#[derive(Clone, Debug)]
enum Step {
    Allocate { size: usize, align_log: u32, zeroed: bool, far: bool },
    Resize { which: usize, size: usize, far: bool },
    Free { which: usize },
    Maintain,
    Purge,
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![1..100_usize, 1..20_000_usize, 60_000..80_000_usize, 1..3_000_000_usize]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (size(), 0..14_u32, any::<bool>(), any::<bool>())
            .prop_map(|(size, align_log, zeroed, far)| Step::Allocate { size, align_log, zeroed, far }),
        3 => (any::<usize>(), size(), any::<bool>())
            .prop_map(|(which, size, far)| Step::Resize { which, size, far }),
        3 => any::<usize>().prop_map(|which| Step::Free { which }),
        1 => Just(Step::Maintain),
        1 => Just(Step::Purge),
    ]
}

proptest! {
    // A failing case is printed with its steps and its seed.
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_keep_their_contents_under_any_sequence(steps in prop::collection::vec(step(), 1..150)) {
        let options = FarArenasOptions { dirty_max: ByteCount::mib(4), ..FarArenasOptions::default() };
        let running = start(ByteCount::mib(24), options);
        let mut blocks: Vec<Block> = Vec::new();
        for (index, step) in steps.into_iter().enumerate() {
            match step {
                Step::Allocate { size, align_log, zeroed, far } => {
                    let _scope = far.then(|| Scope::enter(Tier::FAR));
                    let make = if zeroed { Block::zeroed } else { Block::new };
                    let made = make(layout(size, 1 << align_log), index as u8);
                    let expected = far || size >= 65_536;
                    prop_assert!(made.as_ref().is_none_or(|block| block.is_far() == expected));
                    blocks.extend(made);
                }
                Step::Resize { which, size, far } if !blocks.is_empty() => {
                    let which = which % blocks.len();
                    let _scope = far.then(|| Scope::enter(Tier::FAR));
                    let was_far = blocks[which].is_far();
                    let grows = size > blocks[which].layout.size();
                    if blocks[which].resize(size) {
                        let expected = was_far || (grows && (far || size >= 65_536));
                        prop_assert_eq!(blocks[which].is_far(), expected);
                    }
                }
                Step::Free { which } if !blocks.is_empty() => {
                    blocks.swap_remove(which % blocks.len());
                }
                Step::Maintain => running.arenas.maintain(),
                Step::Purge => running.arenas.arenas().purge(),
                Step::Resize { .. } | Step::Free { .. } => {}
            }
            let far = blocks.iter().filter(|block| block.is_far());
            let bytes: usize = far.map(|block| block.layout.size()).sum();
            prop_assert_eq!(running.arenas.allocated(), ByteCount(bytes as u64));
        }
        drop(blocks);
        running.stop();
    }
}
