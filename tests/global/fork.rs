//! `fork` and child processes while a heap runs. The program's allocator is the heap.
//!
//! Guards: G5, G10.

#![expect(unsafe_code, reason = "forks")]

use crate::common::child::{alone, cases};
use crate::common::{StopOnDrop, eventually, heap};
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as FarVec;
use farheap::manager::{Account, MemoryManager, TemporaryMemory};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::{Region, RegionConfig};
use farheap::store::{MemStore, Queue, Store};
use farheap::{ByteCount, Error, Far, Heap, Scope, Tier, malloc};
use farheap_collections::Temporary;
use farheap_collections::sub::{Collective, CollectiveConfig, SubAllocator};
use std::alloc::Layout;
use std::fs::DirEntry;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const WORDS: usize = (32 << 20) / 8;

/// How a forked child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `body` in a forked child; its result is the exit status.
fn fork(body: impl FnOnce() -> bool) -> End {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child calls `body`, which only reads memory, and ends without cleaning up.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = i32::from(!body());
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(status) };
    }
    wait_for(pid)
}

fn wait_for(pid: i32) -> End {
    assert!(pid > 0, "fork: {}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "{}", io::Error::last_os_error());
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}

fn read(word: &u64) -> u64 {
    // SAFETY: a reference is valid; volatile, so that the access happens.
    unsafe { std::ptr::from_ref(word).read_volatile() }
}

fn numbers() -> FarVec<u64, Far> {
    let mut numbers = FarVec::with_capacity_in(WORDS, Far);
    numbers.extend((0..WORDS as u64).map(|n| n | 1 << 63));
    numbers
}

#[test]
fn a_forked_child_reads_the_parents_far_data() {
    alone("a_forked_child_reads_the_parents_far_data", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:128MiB") else { return };
        let (data, local) = (numbers(), vec![7_u64; 1000]);
        heap.region().evict_all().expect("the device has room");
        // All evicted, then one page of each kind: written, read, and never touched again.
        for touched in [None, Some(0), Some(WORDS / 2)] {
            touched.map(|at| read(&data[at]));
            for at in [0, 1, WORDS / 2, WORDS - 1] {
                let end = fork(|| read(&data[at]) == at as u64 | 1 << 63);
                assert_eq!(end, End::Exit(0), "word {at}, touched {touched:?}");
            }
        }
        assert_eq!(fork(|| local.iter().sum::<u64>() == 7000), End::Exit(0), "local memory");
        assert!(data.iter().zip(0..).all(|(seen, n)| *seen == n | 1 << 63), "the parent's data");
        heap.region().evict_all().expect("as before");
    });
}

/// A store that opens no queue before it may.
#[derive(Debug)]
struct SlowToOpen {
    inner: Arc<dyn Store>,
    is_asked: Arc<AtomicBool>,
    may_open: Arc<AtomicBool>,
}

// SAFETY: passes everything on to a store.
unsafe impl Store for SlowToOpen {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn open_queue(&self, depth: u32) -> farheap::Result<Box<dyn Queue>> {
        self.is_asked.store(true, Ordering::Relaxed);
        assert!(eventually(|| self.may_open.load(Ordering::Relaxed)), "nobody lets it open");
        self.inner.open_queue(depth)
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> farheap::Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.read_now(offset, into) }
    }

    fn sync(&self) -> farheap::Result<()> {
        self.inner.sync()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[test]
fn a_child_of_a_process_whose_heap_is_starting_can_fork() {
    alone("a_child_of_a_process_whose_heap_is_starting_can_fork", || {
        const CONF: &str = "limit:64MiB,capacity:64MiB";
        let Some(first) = heap(CONF) else { return };
        // From now on something is done before a fork, and there is no far memory to tell a child by.
        first.shutdown().expect("nothing is in use");
        drop(first);
        let [is_asked, may_open] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let store = Arc::new(SlowToOpen {
            inner: Arc::new(MemStore::new(ByteCount::mib(64)).expect("memory for a store")),
            is_asked: Arc::clone(&is_asked),
            may_open: Arc::clone(&may_open),
        });
        let start = Heap::builder().limit(ByteCount::mib(64)).store(store);
        let starting = std::thread::spawn(|| start.start());
        assert!(eventually(|| is_asked.load(Ordering::Relaxed)), "a queue is opened");
        // SAFETY: ends the child where it waits for ever: SIGALRM is not handled.
        let ends_soon = || unsafe { libc::alarm(60) };
        // Neither does this process wait for the start.
        let end = fork(|| {
            ends_soon();
            // Nor does the child ask what only a thread of its parent's could answer.
            let has_none = Heap::running().is_none() && Heap::tiers().is_empty();
            has_none && fork(|| true) == End::Exit(0)
        });
        may_open.store(true, Ordering::Relaxed);
        let second = starting.join().expect("it starts").expect("as the first one");
        assert_eq!(end, End::Exit(0));
        second.shutdown().expect("nothing is in use");
    });
}

#[test]
fn forking_while_threads_fault_harms_nobody() {
    alone("forking_while_threads_fault_harms_nobody", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:512MiB") else { return };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let others = StopOnDrop(&done);
            for thread in 0..3_u64 {
                let done = &done;
                scope.spawn(move || {
                    let mut data = FarVec::new_in(Far);
                    data.resize(1 << 20, thread);
                    let mut round = 0;
                    while !done.load(Ordering::Relaxed) {
                        for at in (0..data.len()).step_by(500) {
                            assert_eq!(data[at], thread + round);
                            data[at] += 1;
                        }
                        round += 1;
                    }
                });
            }
            let mut forks = 0;
            while forks < 100 || heap.stats().bytes_read.0 < 16 << 20 {
                forks += 1;
                let local = vec![1_u8; 30_000];
                assert_eq!(fork(|| local.iter().all(|byte| *byte == 1)), End::Exit(0));
            }
            drop(others);
        });
    });
}

#[test]
fn programs_can_be_started_from_a_far_scope() {
    alone("programs_can_be_started_from_a_far_scope", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:128MiB") else { return };
        let _data = numbers();
        for round in 0..20 {
            let output = {
                let _far = Scope::enter(Tier::FAR);
                let mut command = Command::new("sh");
                command.args(["-c", "echo $WORD $0", "argument"]).env("WORD", "environment");
                let output = command.output();
                drop(command);
                output
            };
            let output = match output {
                Err(error) if !heap.region().serves_kernel_faults() => {
                    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
                    return;
                }
                output => output.expect("sh starts"),
            };
            assert!(Far::contains(output.stdout.as_ptr()), "the output was read into far memory");
            assert_eq!(output.stdout, b"environment argument\n", "round {round}");
            heap.region().evict_all().expect("the device has room");
        }
    });
}

/// A `Command` that must fork (for `pre_exec`, `uid`, ...) reads its arguments in the child.
#[test]
fn commands_that_fork_take_far_arguments() {
    alone("commands_that_fork_take_far_arguments", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:128MiB") else { return };
        let _far = Scope::enter(Tier::FAR);
        let mut command = Command::new("sh");
        command.args(["-c", "exit 7"]);
        // SAFETY: the closure does nothing.
        unsafe { command.pre_exec(|| Ok(())) };
        heap.region().evict_all().expect("the device has room");
        match command.status() {
            // The kernel reads the arguments, which may have no page in memory.
            Err(error) if !heap.region().serves_kernel_faults() => {
                assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
            }
            status => assert_eq!(status.expect("sh starts").code(), Some(7)),
        }
    });
}

/// How a process that returns from `main` or a thread ends it: destructors and `atexit` included.
fn leave(status: i32) -> ! {
    // SAFETY: ends the process; takes no pointers.
    unsafe { libc::exit(status) }
}

const SIZES: [usize; 7] = [24, 900, 9_000, 40_000, 300_000, 3 << 20, 20 << 20];

/// Blocks of all kinds of sizes, partly touched, partly on the device.
struct Blocks {
    typed: Vec<FarVec<u8, Far>>,
    global: Vec<Vec<u8>>,
    raw: Vec<NonNull<u8>>,
}

impl Blocks {
    fn new(heap: &Heap) -> Blocks {
        let mut blocks = Blocks { typed: Vec::new(), global: Vec::new(), raw: Vec::new() };
        for round in 0..20 {
            for size in SIZES.into_iter().filter(|size| *size < 1 << 20 || round == 0) {
                let mut typed = FarVec::with_capacity_in(size, Far);
                typed.resize(size.min(50_000), round);
                blocks.typed.push(typed);
                let far = Scope::enter(Tier::FAR);
                let global = vec![round; size];
                drop(far);
                blocks.global.push(global);
                let raw = malloc::allocate(size, 16, Some(Tier::FAR), false);
                blocks.raw.push(raw.expect("the device has room"));
            }
        }
        heap.region().evict_all().expect("the device has room");
        blocks.typed[5].push(1);
        blocks.global[4][0] = 0;
        blocks
    }

    fn are_right(&self) -> bool {
        let typed = self.typed.iter().all(|block| block[1..20].iter().all(|b| *b == block[2]));
        typed && self.global.iter().all(|block| block[1..].iter().all(|byte| *byte == block[1]))
    }

    /// In a forked child: tries to resize, and frees, all in the ways that there are.
    fn free_inherited(mut self) -> bool {
        let mut right = true;
        for (at, block) in self.raw.drain(..).enumerate() {
            // SAFETY: a block of the heap's, used no more if it was moved.
            let usable = unsafe { malloc::usable_size(block) };
            // SAFETY: as above. It stays where it is.
            right &= unsafe { malloc::reallocate(block, usable / 2) } == Some(block);
            match at % 3 {
                // SAFETY: as above.
                0 => unsafe { malloc::free(block) },
                // SAFETY: as above, with the size and alignment that it was allocated with.
                1 => unsafe { malloc::free_sized(block, usable, 16) },
                _ => {
                    // SAFETY: as above. It is local from then on.
                    let grown = unsafe { malloc::reallocate(block, usable * 2) };
                    right &= grown.is_some_and(|grown| !Far::contains(grown.as_ptr()));
                    // SAFETY: a block of the heap's, freed once.
                    grown.into_iter().for_each(|grown| unsafe { malloc::free(grown) });
                }
            }
        }
        for block in &mut self.typed {
            let is_full = block.capacity() - block.len() < 1 << 20;
            right &= block.try_reserve(1 << 20).is_ok();
            // Its place is where it was; what is new is local.
            right &= Far::contains(block.as_ptr()) != is_full;
        }
        let new = Far.allocate(Layout::new::<u64>());
        right && self.are_right() && new.is_ok_and(|new| !Far::contains(new.as_ptr().cast::<u8>()))
    }
}

/// What is new in a forked child lies where no far pointer of the parent's does.
fn allocates_locally() -> bool {
    let _far = Scope::enter(Tier::FAR);
    let blocks: Vec<Vec<u8>> = (0..200).map(|n| vec![n; 1 << 20]).collect();
    let is_local = |block: &Vec<u8>| !Far::contains(block.as_ptr());
    blocks.iter().zip(0..).all(|(block, n)| is_local(block) && block[1 << 19] == n)
}

#[test]
fn a_forked_child_that_only_frees_far_memory_lives() {
    const TEST: &str = "a_forked_child_that_only_frees_far_memory_lives";
    alone(TEST, || {
        let Some(heap) = heap("far_limit:8MiB,capacity:512MiB") else { return };
        let mut blocks = Some(Blocks::new(&heap));
        for _ in 0..3 {
            let end = fork(|| {
                let blocks = blocks.take().expect("the parent's are still there");
                let shut_down = heap.shutdown();
                let started = Heap::builder().start();
                let refused = matches!(shut_down, Err(Error::Forked { .. }))
                    && matches!(started, Err(Error::Forked { .. }))
                    && Heap::running().is_none();
                heap.purge();
                let right = blocks.free_inherited();
                drop(heap.clone());
                // With all that runs at the end of a process.
                leave(i32::from(!(refused && right && allocates_locally())));
            });
            assert_eq!(end, End::Exit(0));
        }
        assert!(blocks.as_ref().is_some_and(Blocks::are_right), "the parent's data");
        let blocks = blocks.expect("the parent's");
        let raw = blocks.raw.clone();
        drop(blocks);
        for block in raw {
            // SAFETY: blocks of the heap's, freed once.
            unsafe { malloc::free(block) };
        }
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn a_thread_that_forked_can_end_in_the_child() {
    alone("a_thread_that_forked_can_end_in_the_child", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:128MiB") else { return };
        let parent = std::process::id();
        for _ in 0..20 {
            let ended = std::thread::spawn(move || {
                // The thread keeps these for its next allocations.
                let blocks: Vec<FarVec<u8, Far>> =
                    (1..100).map(|n| FarVec::with_capacity_in(n * 50, Far)).collect();
                drop(blocks);
                #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
                // SAFETY: the child only ends this thread, its last one, and itself with it.
                let pid = unsafe { libc::fork() };
                pid
            })
            .join()
            .expect("no panic");
            assert_eq!(std::process::id(), parent, "the child has no other thread than that one");
            assert_eq!(wait_for(ended), End::Exit(0));
        }
        heap.shutdown().expect("everything was freed");
    });
}

/// Everything that a process can own of this crate, at once.
struct Everything {
    spilled: TemporaryMemory,
    temporary: TemporaryMemory,
    small: FarVec<u8, Temporary>,
    collective: Collective,
    object: NonNull<u8>,
    pool: Arc<BufferPool>,
    region: Region,
    mapped: NonNull<u8>,
    account: Account,
    manager: Arc<MemoryManager>,
    heap: Heap,
}

impl Everything {
    fn new(manager: Arc<MemoryManager>, heap: Heap) -> Option<Everything> {
        let store = || -> Arc<dyn Store> {
            Arc::new(MemStore::new(ByteCount::mib(64)).expect("memory for a store"))
        };
        let config = RegionConfig::new().limit(ByteCount::mib(8));
        let region = crate::common::region(config, store())?;
        let mapped = region.map(ByteCount::mib(16)).expect("there is room").cast::<u8>();
        // SAFETY: mapped just now, 16 MiB.
        unsafe { mapped.write_bytes(1, 16 << 20) };
        let collective = Collective::create(CollectiveConfig::new(), store());
        let collective = crate::common::where_permitted("collective", collective)?;
        let object = collective.swappable().allocate(Layout::new::<[u64; 10]>()).expect("room");
        let pool = PoolConfig::new().create_on(store(), &manager).expect("a pool");
        drop(pool.allocate().expect("a page"));
        let mut small = FarVec::new_in(Temporary::new(&manager));
        small.extend(0..100);
        let account = manager.join("a cache").expect("an account");
        manager.charge(&account, ByteCount::mib(1)).expect("it fits");
        Some(Everything {
            spilled: manager.allocate_temporary(ByteCount::mib(200)).expect("it spills"),
            temporary: manager.allocate_temporary(ByteCount::mib(1)).expect("it fits"),
            small,
            collective,
            object,
            pool,
            region,
            mapped,
            account,
            manager,
            heap,
        })
    }

    fn drop_all(self) {
        let layout = Layout::new::<[u64; 10]>();
        // SAFETY: allocated with this layout, freed once.
        unsafe { self.collective.deallocate(self.object, layout) };
        // SAFETY: mapped once, and nobody uses it any more.
        unsafe {
            self.region
                .unmap(NonNull::slice_from_raw_parts(self.mapped, ByteCount::mib(16).as_usize()))
        }
        .expect("was mapped");
        drop((self.spilled, self.temporary, self.small, self.collective, self.pool));
        drop((self.region, self.account, self.manager, self.heap));
    }
}

#[test]
fn a_forked_child_can_drop_all_that_it_inherits() {
    alone("a_forked_child_can_drop_all_that_it_inherits", || {
        let manager = MemoryManager::start(ByteCount::mib(64)).expect("starts");
        let conf = "far_limit:32MiB,capacity:512MiB";
        let Some(heap) = crate::common::heap_under(&manager, conf) else { return };
        let mut all = Everything::new(manager, heap);
        if all.is_none() {
            return;
        }
        let end = fork(|| {
            all.take().expect("the parent's are still there").drop_all();
            // Threads of the child's own get no stacks and descriptors that are then taken away.
            std::thread::spawn(|| ()).join().is_ok() && allocates_locally()
        });
        assert_eq!(end, End::Exit(0));
        let all = all.expect("the parent's");
        let heap = all.heap.clone();
        all.drop_all();
        heap.shutdown().expect("everything was freed");
    });
}

/// What the descriptors of a process lead to.
fn descriptors(pid: i32) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a child's");
    let link = |entry: io::Result<DirEntry>| std::fs::read_link(entry.ok()?.path()).ok();
    links.filter_map(link).map(|path| path.to_string_lossy().into_owned()).collect()
}

#[test]
fn a_child_that_lives_on_keeps_the_device_and_nothing_else() {
    const TEST: &str = "a_child_that_lives_on_keeps_the_device_and_nothing_else";
    cases(TEST, &["device", "dir"], |kind| {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("far");
        let before = descriptors(std::process::id() as i32);
        let place = match kind {
            "device" => {
                let file = std::fs::File::create(&file).expect("a file");
                file.set_len(128 << 20).expect("a sparse file");
                format!("device:{}", dir.path().join("far").display())
            }
            _ => format!("dir:{},capacity:128MiB", dir.path().display()),
        };
        let conf = format!("far_limit:8MiB,{place}");
        let Some(heap) = heap(&conf) else { return };
        // A name below a thread is thrown away when it ends, and a thread that waits for the process meanwhile spins.
        let own = descriptors(std::process::id() as i32);
        assert!(own.iter().all(|link| !link.contains("/task/")), "{own:?}");
        let data = numbers();
        heap.region().evict_all().expect("the device has room");
        let (mut told, tell) = io::pipe().expect("a pipe");
        let (mut began, begin) = io::pipe().expect("a pipe");
        #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
        // SAFETY: the child waits, reads and ends without cleaning up.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            drop((tell, begin));
            let ended = told.read(&mut [0]).is_ok_and(|len| len == 0);
            let right = data.iter().zip(0..).all(|(seen, n)| *seen == n | 1 << 63);
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::_exit(i32::from(!(ended && right))) };
        }
        // What the child does before `fork` returns there is done.
        drop(begin);
        assert_eq!(began.read(&mut [0]).expect("a pipe"), 0);
        let mut kept = descriptors(pid);
        kept.retain(|link| !link.starts_with("pipe:") && !before.contains(link));
        // What it reads from, and a file without a name that it writes to.
        let is_device = |link: &String| *link == file.to_string_lossy();
        let has_device = kept.iter().any(is_device);
        assert_eq!(has_device, kind == "device", "{kept:?}");
        kept.retain(|link| !is_device(link) && !link.ends_with(" (deleted)"));
        assert_eq!(kept, Vec::<String>::new(), "beside what was there before the heap");
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("a child's");
        assert!(!maps.contains("io_uring"), "{maps}");
        drop(data);
        heap.shutdown().expect("everything was freed");
        drop(heap);
        // The child still reads it.
        let again = Heap::builder().parse(&conf).expect("valid").start();
        assert_eq!(again.is_err(), kind == "device", "{again:?}");
        drop((told, tell));
        assert_eq!(wait_for(pid), End::Exit(0));
        if again.is_err() {
            // The lock on the file has ended with the child.
            drop(crate::common::heap(&conf).expect("as before"));
        }
    });
}
