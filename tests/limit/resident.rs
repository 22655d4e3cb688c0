//! What the kernel counts as resident, beside what the memory manager reports. Each test runs in a
//! process of its own.
//!
//! Guards: G1.

#![expect(unsafe_code, reason = "touches temporary memory; forks")]

use crate::common::child::alone;
use crate::common::{Dice, StopOnDrop, consumer, eventually, heap_under};
use allocator_api2::vec::Vec as FarVec;
use farheap::manager::{MemoryManager, TemporaryMemory};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::{Region, RegionConfig};
use farheap::store::BlockStore;
use farheap::{ByteCount, Error, Far, PageId};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// Resident anonymous bytes of this process, as the kernel counts them by walking its tables.
fn resident() -> u64 {
    kib(&fs::read_to_string("/proc/self/smaps_rollup").expect("/proc"), "Anonymous:")
}

/// A number of KiB in a file of `/proc`, in bytes.
fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(name)).expect("a line");
    line.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok()).expect("a number") << 10
}

/// Resident bytes that are no file's, page tables included; cheap enough for every 10 ms.
fn resident_now() -> u64 {
    let text = fs::read_to_string("/proc/self/status").expect("/proc");
    kib(&text, "RssAnon:") + kib(&text, "RssShmem:") + kib(&text, "VmPTE:")
}

fn start(mib: u64) -> Arc<MemoryManager> {
    MemoryManager::start(ByteCount::mib(mib)).expect("manager")
}

fn table(manager: &Arc<MemoryManager>, mib: u64) -> (tempfile::TempDir, Arc<BufferPool>) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("table");
    let pool = PoolConfig::new().create(path, ByteCount::mib(mib), manager).expect("pool");
    (dir, pool)
}

fn fill(pool: &BufferPool, pages: u64) -> u64 {
    for _ in 0..pages {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page[..8].copy_from_slice(&id.0.to_le_bytes());
    }
    pages
}

/// Writes to each page of temporary memory, and reads it back.
fn use_all(memory: &TemporaryMemory) {
    let words = |at: usize| {
        // SAFETY: within the memory, which is this test's own.
        unsafe { memory.as_ptr().add(at) }.cast::<u64>()
    };
    for at in (0..memory.len().as_usize()).step_by(4096) {
        // SAFETY: aligned, and nobody else uses it.
        unsafe { words(at).write_volatile(at as u64) };
    }
    for at in (0..memory.len().as_usize()).step_by(4096) {
        // SAFETY: as above.
        assert_eq!(unsafe { words(at).read_volatile() }, at as u64);
    }
}

/// Far numbers that are changed and checked at random.
struct Numbers(FarVec<AtomicU64, Far>);

impl Numbers {
    fn new(mib: u64) -> Numbers {
        let mut numbers = FarVec::new_in(Far);
        numbers.extend((0..mib * MIB / 8).map(AtomicU64::new));
        Numbers(numbers)
    }

    fn touch(&self, dice: &mut Dice) {
        let at = dice.below(self.0.len() as u64);
        let number = &self.0[at as usize];
        // Only the top bit is ever changed.
        let before = number.fetch_xor(1 << 63, Ordering::Relaxed);
        assert_eq!(before & !(1 << 63), at, "far memory holds what was written");
    }
}

#[test]
fn what_is_reported_per_consumer_is_what_the_kernel_counts() {
    alone("what_is_reported_per_consumer_is_what_the_kernel_counts", || {
        let manager = start(256);
        let Some(heap) = heap_under(&manager, "far_limit:256MiB,capacity:512MiB") else { return };
        let (_dir, pool) = table(&manager, 128);
        let grown = |name: &str, kernel: u64, reported: ByteCount| {
            let now = consumer(&manager, name).expect("joined").used_bytes;
            let (kernel, reported) = (resident() - kernel, now.get() - reported.get());
            println!("{name}: reported {reported}, counted {kernel}");
            reported.abs_diff(kernel) <= reported / 100
        };
        let used = |name: &str| consumer(&manager, name).expect("joined").used_bytes;
        let (kernel, before) = (resident(), used("pool"));
        fill(&pool, 15_000);
        assert!(eventually(|| grown("pool", kernel, before)));
        let (kernel, before) = (resident(), used("far heap"));
        let numbers = Numbers::new(96);
        assert!(eventually(|| grown("far heap", kernel, before)));
        let (kernel, before) = (resident(), used("temporary"));
        let memory = manager.allocate_temporary(ByteCount::mib(64)).expect("fits");
        use_all(&memory);
        assert!(eventually(|| grown("temporary", kernel, before)));
        drop((memory, numbers));
        heap.shutdown().expect("nothing is in use");
    });
}

/// Looks at resident memory until `stop`, beside the limit that may be reached at the time.
struct Watch<'a> {
    before: u64,
    /// A lowered limit counts when the call that lowered it has returned.
    allowed: &'a AtomicU64,
    stop: &'a AtomicBool,
    looks: &'a AtomicU64,
}

/// What a watch has to have looked for its largest number to say something.
const LOOKS_LEAST: u64 = 21;

impl Watch<'_> {
    /// The largest resident size in thousandths of the limit.
    fn run(&self) -> u64 {
        let mut most = 0;
        while !self.stop.load(Ordering::Acquire) {
            let allowed = self.allowed.load(Ordering::Acquire);
            let grown = resident_now().saturating_sub(self.before);
            let allowed = allowed.max(self.allowed.load(Ordering::Acquire));
            let permille = (grown * 1000).div_ceil(allowed);
            most = most.max(permille);
            self.looks.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(10));
        }
        most
    }
}

#[test]
fn resident_memory_never_exceeds_a_limit_that_moves_while_everything_runs() {
    let name = "resident_memory_never_exceeds_a_limit_that_moves_while_everything_runs";
    alone(name, || {
        let seed = crate::common::seed(name);
        let before = resident_now();
        let manager = start(96);
        manager.set_deadline(crate::common::PATIENCE);
        let Some(heap) = heap_under(&manager, "far_limit:128MiB,capacity:1GiB") else { return };
        let (_dir, pool) = table(&manager, 192);
        let (allowed, stop) = (AtomicU64::new(96 * MIB), AtomicBool::new(false));
        let looks = AtomicU64::new(0);
        let running = || !stop.load(Ordering::Acquire);
        let most = std::thread::scope(|scope| {
            let others = StopOnDrop(&stop);
            let watch = Watch { before, allowed: &allowed, stop: &stop, looks: &looks };
            let watching = scope.spawn(move || watch.run());
            scope.spawn(|| {
                let pages = fill(&pool, 32_000);
                let mut dice = Dice::new(seed);
                while running() {
                    let id = PageId(2 + dice.below(pages));
                    let word = match dice.below(4) {
                        0 => pool.fix_exclusive(id).map(|mut page| {
                            page[8] ^= 1;
                            page[..8].to_vec()
                        }),
                        _ => pool.fix_shared(id).map(|page| page[..8].to_vec()),
                    };
                    assert_eq!(word.expect("page"), id.0.to_le_bytes());
                }
            });
            scope.spawn(|| {
                let numbers = Numbers::new(160);
                let mut dice = Dice::new(seed + 1);
                while running() {
                    numbers.touch(&mut dice);
                }
            });
            scope.spawn(|| {
                let mut dice = Dice::new(seed + 2);
                while running() {
                    let len = ByteCount::mib(1 + dice.below(48));
                    use_all(&manager.allocate_temporary(len).expect("or spilled"));
                }
            });
            let limits = [64, 112, 72, 128, 80, 96, 64, 128].into_iter().cycle().enumerate();
            let is_enough = |n| n >= 24 && looks.load(Ordering::Relaxed) >= LOOKS_LEAST;
            for (_, mib) in limits.take_while(|(n, _)| !is_enough(*n)) {
                std::thread::sleep(Duration::from_millis(100));
                let limit = ByteCount::mib(mib);
                if limit > manager.limit() {
                    allowed.store(limit.get(), Ordering::Release);
                }
                match manager.set_limit(limit) {
                    Ok(()) => allowed.store(limit.get(), Ordering::Release),
                    Err(Error::OutOfMemory { .. }) => {} // Temporary memory held more.
                    Err(error) => panic!("{error}"),
                }
            }
            drop(others);
            watching.join().expect("the watch looks only")
        });
        println!("{looks:?} looks, at most {most} thousandths of the limit");
        assert!(most <= 1010, "{most} thousandths of the limit: {:?}", manager.stats());
        heap.shutdown().expect("nothing is in use");
    });
}

/// Largest resident size while `work` is done, once or until there were looks enough, in thousandths of `limit`;
/// `before`: what was resident before any of it started.
fn most_resident(limit: u64, before: u64, mut work: impl FnMut()) -> u64 {
    let (allowed, stop) = (AtomicU64::new(limit), AtomicBool::new(false));
    let looks = AtomicU64::new(0);
    let most = std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        let watch = Watch { before, allowed: &allowed, stop: &stop, looks: &looks };
        let watching = scope.spawn(move || watch.run());
        work();
        while looks.load(Ordering::Relaxed) < LOOKS_LEAST {
            work();
        }
        drop(others);
        watching.join().expect("the watch looks only")
    });
    println!("{looks:?} looks, at most {most} thousandths of the limit");
    most
}

/// Fixes pages at random, many at once and singly, for reading and for changing.
fn fix_at_random(pool: &BufferPool, pages: u64, seed: u64, fixes: u64) {
    let mut dice = Dice::new(seed);
    for _ in 0..fixes {
        let id = PageId(2 + dice.below(pages - 32));
        match dice.below(8) {
            0 => {
                let group: Vec<PageId> = (0..32).map(|n| PageId(id.0 + n)).collect();
                for page in pool.fix_many(&group).expect("pages") {
                    assert_eq!(page[..8], page.id().0.to_le_bytes());
                }
            }
            1..=3 => pool.fix_exclusive(id).expect("page")[8] ^= 1,
            _ => assert_eq!(pool.fix_shared(id).expect("page")[..8], id.0.to_le_bytes()),
        }
    }
}

#[test]
fn a_pool_without_a_heap_stays_below_a_small_limit_with_all_that_it_keeps_for_itself() {
    let name = "a_pool_without_a_heap_stays_below_a_small_limit_with_all_that_it_keeps_for_itself";
    alone(name, || {
        let seed = crate::common::seed(name);
        let before = resident_now();
        let limit = 16;
        let manager = start(limit);
        let (_dir, pool) = table(&manager, 64);
        let pages = fill(&pool, 14_000);
        let most = most_resident(limit * MIB, before, || {
            std::thread::scope(|scope| {
                for thread in 0..4 {
                    let pool = &pool;
                    scope.spawn(move || fix_at_random(pool, pages, seed + thread, 10_000));
                }
                for n in 1..60 {
                    let len = ByteCount::mib(1 + n % 8);
                    use_all(&manager.allocate_temporary(len).expect("pages give way"));
                }
            });
        });
        assert!(most <= 1010, "{most} thousandths of the limit: {:?}", manager.stats());
    });
}

#[test]
fn a_region_without_a_heap_stays_below_a_small_limit_with_all_that_it_keeps_for_itself() {
    let name =
        "a_region_without_a_heap_stays_below_a_small_limit_with_all_that_it_keeps_for_itself";
    alone(name, || {
        let seed = crate::common::seed(name);
        let dir = tempfile::tempdir().expect("a directory");
        let before = resident_now();
        let limit = 24;
        let config = RegionConfig::new().limit(ByteCount::mib(limit));
        let path = dir.path().join("device");
        let store = BlockStore::open(path, Some(ByteCount::mib(256))).expect("store");
        let manager = start(limit);
        let region = match Region::create_under(&manager, config, Arc::new(store)) {
            Err(Error::UffdUnavailable { reasons }) => {
                return println!("skipped: userfaultfd is not permitted here: {reasons}");
            }
            region => region.expect("region"),
        };
        let len = ByteCount::mib(96);
        let first = region.map(len).expect("fits the device").cast::<u64>();
        let word = |at: u64| {
            // SAFETY: within the range.
            unsafe { first.add(at as usize) }
        };
        // SAFETY: aligned memory of this test's own.
        (0..len.get() / 8).step_by(512).for_each(|at| unsafe { word(at).write_volatile(at) });
        let most = most_resident(limit * MIB, before, || {
            let mut dice = Dice::new(seed);
            for _ in 0..20_000 {
                let at = dice.below(len.get() / 4096) * 512;
                // SAFETY: as above.
                assert_eq!(unsafe { word(at).read_volatile() }, at);
                // SAFETY: as above.
                unsafe { word(at).write_volatile(at) };
            }
        });
        assert!(most <= 1010, "{most} thousandths of the limit: {}", region.stats());
    });
}

#[test]
fn a_heap_ends_before_its_manager_and_another_may_follow() {
    alone("a_heap_ends_before_its_manager_and_another_may_follow", || {
        let manager = start(64);
        for _ in 0..3 {
            let Some(heap) = heap_under(&manager, "far_limit:64MiB,capacity:256MiB") else {
                return;
            };
            let numbers = Numbers::new(96);
            let spilled = manager.allocate_temporary(ByteCount::mib(128)).expect("spills");
            use_all(&spilled);
            drop((numbers, spilled));
            heap.shutdown().expect("nothing is in use");
            drop(heap);
            let gone = eventually(|| consumer(&manager, "far heap").is_none());
            assert!(gone, "{:?}", manager.stats());
            assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
        }
        let error = manager.allocate_temporary(ByteCount::mib(128)).expect_err("nowhere to spill");
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    });
}

#[test]
fn freed_far_memory_makes_room_without_being_written() {
    alone("freed_far_memory_makes_room_without_being_written", || {
        let manager = start(64);
        // The heap may keep an eighth of its ceiling.
        let Some(heap) = heap_under(&manager, "far_limit:512MiB,capacity:512MiB") else { return };
        let writes_nothing = || {
            drop(Numbers::new(36));
            let before = heap.stats().pages_out;
            let memory = manager.allocate_temporary(ByteCount::mib(48)).expect("fits");
            use_all(&memory);
            heap.stats().pages_out == before
        };
        // A thread that reclaims waits a few milliseconds for the heap: too little on a busy machine, once.
        assert!((0..50).any(|_| writes_nothing()), "{}", heap.stats());
        heap.shutdown().expect("nothing is in use");
    });
}

#[test]
fn a_heap_outlives_the_hosts_handle_to_its_manager() {
    alone("a_heap_outlives_the_hosts_handle_to_its_manager", || {
        let manager = start(64);
        let Some(heap) = heap_under(&manager, "far_limit:64MiB,capacity:256MiB") else { return };
        drop(manager);
        let numbers = Numbers::new(128);
        let mut dice = Dice::new(1);
        (0..20_000).for_each(|_| numbers.touch(&mut dice));
        let stats = heap.region().manager().expect("it has joined one").stats();
        // Local memory is counted when it is there already.
        let counted = ByteCount::mib(1);
        assert!(
            stats.used_bytes_max <= ByteCount(stats.limit_bytes.get() + counted.get()),
            "{stats:?}"
        );
        drop(numbers);
        heap.shutdown().expect("nothing is in use");
    });
}

/// Runs `body` in a forked child; its result is whether the child ended with success.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child calls `body` and ends without cleaning up.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = i32::from(!body());
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(status) };
    }
    assert!(pid > 0, "fork");
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    waited == pid && libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn a_forked_child_gets_errors_and_harms_nobody() {
    alone("a_forked_child_gets_errors_and_harms_nobody", || {
        let manager = start(64);
        let Some(heap) = heap_under(&manager, "far_limit:64MiB,capacity:256MiB") else { return };
        let memory = manager.allocate_temporary(ByteCount::mib(8)).expect("fits");
        use_all(&memory);
        let account = manager.join("query").expect("room");
        let copy = Arc::clone(&manager);
        let mut kept = Some(memory);
        let ended = in_child(|| {
            let forked = |error| matches!(error, Error::Forked { .. });
            let temporary = copy.allocate_temporary(ByteCount::mib(1)).is_err_and(forked);
            let charge = copy.charge(&account, ByteCount::mib(100)).is_err_and(forked);
            // Unmaps nothing: the child may have other memory there by now.
            drop(kept.take());
            drop(copy);
            temporary && charge
        });
        assert!(ended, "the child got the errors and ended by itself");
        use_all(kept.as_ref().expect("the parent's handle"));
        drop(kept);
        assert_eq!(manager.temporary().used(), ByteCount::ZERO);
        heap.shutdown().expect("nothing is in use");
    });
}
