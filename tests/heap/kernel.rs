//! The kernel and far memory: system calls on evicted buffers, and kernels that refuse
//! userfaultfd in part or altogether.
//!
//! Guards: G5, G8.

#![expect(unsafe_code, reason = "sees aligned blocks as bytes")]

use crate::common::child::{Ended, alone, case, run, run_under};
use crate::common::refuse::{Refused, refuse, refuse_new_calls};
use crate::common::{Dice, StopOnDrop, bytes, heap, seed};
use allocator_api2::vec::Vec as FarVec;
use farheap::region::Advice;
use farheap::{ByteCount, Error, Far, Heap};
use std::fs::OpenOptions;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes in far memory, aligned as `O_DIRECT` wants them.
pub(crate) struct Buffer(FarVec<Block, Far>);

#[derive(Clone, Copy)]
#[repr(C, align(4096))]
pub(crate) struct Block([u8; 4096]);

impl Buffer {
    pub(crate) fn new(blocks: usize) -> Buffer {
        let mut buffer = FarVec::with_capacity_in(blocks, Far);
        buffer.resize(blocks, Block([0xEE; 4096]));
        Buffer(buffer)
    }

    pub(crate) fn random(blocks: usize, dice: &mut Dice) -> Buffer {
        let mut buffer = Buffer::new(blocks);
        let words = buffer.bytes_mut().chunks_exact_mut(8);
        words.for_each(|word| word.copy_from_slice(&dice.roll().to_le_bytes()));
        buffer
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        let (start, len) = (self.0.as_ptr().cast(), size_of_val(&*self.0));
        // SAFETY: blocks are arrays of bytes without padding, borrowed as long as `self`.
        unsafe { std::slice::from_raw_parts(start, len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, len) = (self.0.as_mut_ptr().cast(), size_of_val(&*self.0));
        // SAFETY: as in `bytes`; any bytes make a block, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start, len) }
    }

    /// Takes the buffer out of memory.
    fn evict(&self, heap: &Heap) {
        std::hint::black_box(self.bytes()[0]);
        let left = |heap: &Heap| heap.stats().evicted_clean + heap.stats().pages_out;
        let before = left(heap);
        heap.region()
            .advise(
                &[bytes(self.0.as_ptr().cast(), ByteCount(self.bytes().len() as u64))],
                Advice::PageOutNow,
            )
            .expect("evict");
        assert!(left(heap) > before, "nothing was evicted");
    }
}

/// A heap that serves faults of kernel mode; else prints why not.
fn kernel_heap(conf: &str) -> Option<Heap> {
    let heap = heap(conf)?;
    if !heap.region().serves_kernel_faults() {
        println!("skipped: only faults of user mode are permitted here");
        return None;
    }
    Some(heap)
}

#[test]
fn system_calls_read_and_write_evicted_memory() {
    alone("system_calls_read_and_write_evicted_memory", || {
        let mut dice = Dice::new(seed("system calls"));
        let Some(heap) = kernel_heap("far_limit:128MiB,capacity:256MiB") else { return };
        let source = Buffer::random(1024, &mut dice);
        let mut target = Buffer::new(1024);

        let mut file = tempfile::tempfile().expect("a file");
        source.evict(&heap);
        file.write_all(source.bytes()).expect("write to a file");
        file.rewind().expect("rewind");
        target.evict(&heap);
        file.read_exact(target.bytes_mut()).expect("read from a file");
        assert!(source.bytes() == target.bytes(), "a file mixes bytes up");

        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        assert_transferred(&heap, &source, &mut target, &mut writer, &mut reader);
        let (mut reader, mut writer) = UnixStream::pair().expect("sockets");
        assert_transferred(&heap, &source, &mut target, &mut writer, &mut reader);
    });
}

fn assert_transferred(
    heap: &Heap,
    source: &Buffer,
    target: &mut Buffer,
    writer: &mut (dyn Write + Send),
    reader: &mut dyn Read,
) {
    target.bytes_mut().fill(0xEE);
    source.evict(heap);
    target.evict(heap);
    std::thread::scope(|scope| {
        scope.spawn(|| writer.write_all(source.bytes()).expect("write"));
        reader.read_exact(target.bytes_mut()).expect("read");
    });
    assert!(source.bytes() == target.bytes(), "other bytes were read than written");
}

#[test]
fn direct_reads_lose_nothing_to_evictions_under_way() {
    alone("direct_reads_lose_nothing_to_evictions_under_way", || {
        let mut dice = Dice::new(seed("direct reads"));
        let Some(heap) = kernel_heap("far_limit:8MiB,capacity:64MiB") else { return };
        let dir = tempfile::tempdir().expect("a directory");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).custom_flags(libc::O_DIRECT);
        let Ok(mut file) = options.open(dir.path().join("direct")) else {
            return println!("skipped: no O_DIRECT in {}", dir.path().display());
        };
        let source = Buffer::random(256, &mut dice);
        let mut target = Buffer::new(256);
        source.evict(&heap);
        file.write_all(source.bytes()).expect("write");
        let start = target.bytes().as_ptr() as usize;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let others = StopOnDrop(&done);
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    heap.region()
                        .advise(&[bytes(start as *const u8, ByteCount::mib(1))], Advice::PageOutNow)
                        .expect("evict");
                }
            });
            let lost = (0..100).find(|_| {
                target.bytes_mut().fill(0xEE);
                file.rewind().expect("rewind");
                file.read_exact(target.bytes_mut()).expect("read");
                source.bytes() != target.bytes()
            });
            drop(others);
            assert_eq!(lost, None, "other bytes were read than written in this round");
        });
        println!("{:?}", heap.stats());
    });
}

#[test]
fn with_faults_of_user_mode_only_system_calls_fail_and_the_rest_works() {
    let name = "with_faults_of_user_mode_only_system_calls_fail_and_the_rest_works";
    if case(name).is_some() {
        let required = Heap::builder().parse("far_limit:8MiB,mode:kernel").expect("known keys");
        let error = required.start().expect_err("refused").to_string();
        assert!(error.contains("/dev/userfaultfd") && error.contains("farheap doctor"), "{error}");
        let mut dice = Dice::new(seed("user mode"));
        let heap = Heap::builder()
            .parse("far_limit:8MiB,capacity:64MiB")
            .expect("known keys")
            .start()
            .expect("user mode is enough to start");
        assert!(!heap.region().serves_kernel_faults());
        let source = Buffer::random(4096, &mut dice);
        let mut copy = Buffer::new(4096);
        copy.bytes_mut().copy_from_slice(source.bytes());
        assert!(source.bytes() == copy.bytes(), "ordinary access works");
        let mut file = tempfile::tempfile().expect("a file");
        source.evict(&heap);
        let refused = |result: std::io::Result<usize>| result.map_err(|e| e.raw_os_error());
        assert_eq!(refused(file.write(&source.bytes()[..4096])), Err(Some(libc::EFAULT)));
        file.set_len(4096).expect("length");
        copy.evict(&heap);
        assert_eq!(refused(file.read(&mut copy.bytes_mut()[..4096])), Err(Some(libc::EFAULT)));
        assert_eq!(copy.bytes()[..4096], source.bytes()[..4096], "nothing was read");
        assert_eq!(refused(file.write(&copy.bytes()[..4096])), Ok(4096), "touched before");
        return;
    }
    let ended = run(name, "", |command| refuse(command, Refused::KernelFaults));
    ended.expect_success();
    let said = ["only faults of user mode: a system call", "So no allocation goes far", "sysctl"];
    assert_says(&ended, &said);
}

/// A start is refused, and the program goes on without a heap.
fn assert_refused() {
    let threads = || std::fs::read_dir("/proc/self/task").expect("/proc").count();
    let before = threads();
    let error = Heap::builder().parse("far_limit:8MiB,capacity:64MiB").expect("known keys").start();
    println!("start: {}", error.as_ref().expect_err("refused"));
    assert!(crate::common::eventually(|| threads() == before), "threads are left");
    assert!(Heap::running().is_none());
    assert!(FarVec::<u8, Far>::new_in(Far).try_reserve(1).is_err());
    let again = Heap::builder().parse("far_limit:8MiB,capacity:64MiB").expect("known keys").start();
    assert_eq!(again.expect_err("refused again").to_string(), error.expect_err("").to_string());
}

fn assert_says(ended: &Ended, parts: &[&str]) {
    ended.expect_success();
    let missing: Vec<_> = parts.iter().filter(|part| !ended.text.contains(**part)).collect();
    assert!(missing.is_empty(), "{missing:?} not in:\n{}", ended.text);
}

#[test]
fn without_userfaultfd_the_start_fails_and_names_every_way_tried() {
    let name = "without_userfaultfd_the_start_fails_and_names_every_way_tried";
    if case(name).is_some() {
        let error = Heap::builder().from_env().expect("options").start().expect_err("refused");
        assert!(matches!(error, Error::UffdUnavailable { .. }), "{error}");
        return assert_refused();
    }
    let ended = run(name, "", |command| refuse(command, Refused::Userfaultfd));
    let ways = ["/dev/userfaultfd", "userfaultfd(2)", "user mode only", "farheap doctor"];
    assert_says(&ended, &ways);
}

#[test]
fn with_too_few_descriptors_the_start_fails_and_says_so() {
    let name = "with_too_few_descriptors_the_start_fails_and_says_so";
    if case(name).is_some() {
        return assert_refused();
    }
    let started = ["6", "7", "8", "9", "10", "12", "14"].into_iter().find(|limit| {
        let few = format!("ulimit -n {limit}; exec \"$@\"");
        let ended = run_under(&["sh", "-c", &few, "sh"], name, "", |_| ());
        let started = ended.text.contains("refused: Heap");
        if !started {
            assert_says(&ended, &["Too many open files"]);
        }
        started
    });
    assert!(!matches!(started, Some("6" | "7")), "a heap needs more than {started:?} descriptors");
}

#[test]
fn with_too_little_address_space_the_start_fails_and_a_smaller_span_works() {
    let name = "with_too_little_address_space_the_start_fails_and_a_smaller_span_works";
    if case(name).is_some() {
        assert_refused();
        let Some(heap) = heap("far_limit:8MiB,capacity:64MiB,span:1GiB") else { return };
        let buffer = Buffer::random(4096, &mut Dice::new(1));
        assert!(heap.stats().bytes_written.0 > 0);
        drop(buffer);
        return;
    }
    let wrapper = ["sh", "-c", "ulimit -v 8000000; exec \"$@\"", "sh"];
    let ended = run_under(&wrapper, name, "", |_| ());
    if !ended.show_skips() {
        let said = ["configuration: span: 1.0 TiB cannot", "mmap failed: Cannot allocate memory"];
        assert_says(&ended, &said);
        assert_says(&ended, &["`ulimit -v` allows 7.6 GiB", "such as 2.0 GiB"]);
    }
}

/// A robust mutex, see `pthread_mutexattr_setrobust(3)`.
fn init_robust(mutex: *mut libc::pthread_mutex_t) {
    let mut attributes = std::mem::MaybeUninit::uninit();
    // SAFETY: initialises the attributes.
    assert_eq!(unsafe { libc::pthread_mutexattr_init(attributes.as_mut_ptr()) }, 0);
    let robust = libc::PTHREAD_MUTEX_ROBUST;
    // SAFETY: initialised above.
    assert_eq!(unsafe { libc::pthread_mutexattr_setrobust(attributes.as_mut_ptr(), robust) }, 0);
    // SAFETY: initialises a mutex that nobody uses yet, in memory of its size.
    assert_eq!(unsafe { libc::pthread_mutex_init(mutex, attributes.as_ptr()) }, 0);
}

#[test]
fn robust_mutexes_in_evicted_memory_tell_that_their_owner_has_ended() {
    alone("robust_mutexes_in_evicted_memory_tell_that_their_owner_has_ended", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:64MiB") else { return };
        // One in each block, each in a page of its own.
        let mut buffer = Buffer::new(64);
        let mutexes =
            || buffer.0.iter().step_by(8).map(|block| (&raw const *block).expose_provenance());
        let mutexes: Vec<_> = mutexes().collect();
        let mutex =
            |addr: &usize| std::ptr::with_exposed_provenance_mut::<libc::pthread_mutex_t>(*addr);
        buffer.bytes_mut().fill(0);
        mutexes.iter().for_each(|addr| init_robust(mutex(addr)));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let other = Buffer::new(1); // The thread uses far memory.
                for addr in &mutexes {
                    // SAFETY: initialised above.
                    assert_eq!(unsafe { libc::pthread_mutex_lock(mutex(addr)) }, 0);
                }
                drop(other);
                buffer.evict(&heap);
            });
        });
        // The scope ends before the thread does: until the kernel is done with it, the mutexes are its own.
        for addr in &mutexes {
            let told = crate::common::eventually(|| {
                // SAFETY: initialised above.
                unsafe { libc::pthread_mutex_trylock(mutex(addr)) == libc::EOWNERDEAD }
            });
            assert!(told, "the owner has died, and nobody knows");
        }
        // What was kept for the thread leaves again.
        let map = std::fs::File::open("/proc/self/pagemap").expect("the page map");
        let is_out = |addr: &usize| {
            let mut entry = [0; 8];
            map.read_exact_at(&mut entry, (addr / 4096 * 8) as u64).expect("an entry");
            u64::from_ne_bytes(entry) >> 63 == 0
        };
        let len = ByteCount(buffer.bytes().len() as u64);
        let leave = || {
            heap.region()
                .advise(&[bytes(buffer.0.as_ptr().cast(), len)], Advice::PageOutNow)
                .expect("evict");
            mutexes.iter().all(is_out)
        };
        assert!(crate::common::eventually(leave), "pages stay after their thread");
    });
}

#[test]
fn a_sandbox_that_knows_no_new_calls_changes_no_bytes() {
    let name = "a_sandbox_that_knows_no_new_calls_changes_no_bytes";
    alone(name, || {
        let Some(heap) = heap("capacity:512MiB,far_limit:64MiB") else { return };
        let seed = seed("sandbox");
        let mut dice = Dice::new(seed);
        let blocks = 24 << 8; // 24 MiB.
        let early = Buffer::random(blocks, &mut dice);
        refuse_new_calls();
        let mut others: Vec<_> = (0..5).map(|_| Buffer::random(blocks, &mut dice)).collect();
        let mut again = Dice::new(seed);
        let mut right =
            |buffer: &Buffer| buffer.bytes() == Buffer::random(blocks, &mut again).bytes();
        assert!(right(&early) && others.iter().all(&mut right), "other bytes");
        // Locked memory leaves all the same: by an advice of its own, or when the lock is taken off.
        let (start, len) = (others[0].0.as_ptr().cast(), others[0].bytes().len());
        #[expect(clippy::disallowed_methods, reason = "a program may call it")]
        // SAFETY: locks memory, changes nothing.
        let locked = unsafe { libc::mlock(start, len / 4) };
        println!("mlock: {locked}");
        for _ in 0..2 {
            others[1..].iter().for_each(|buffer| {
                std::hint::black_box(buffer.bytes().iter().step_by(4096).fold(0, |a, b| a ^ b));
            });
            heap.region().evict_all().expect("evict");
        }
        let mut given_up = others.pop().expect("a buffer");
        let (start, len) = (given_up.0.as_mut_ptr().cast(), given_up.bytes().len());
        // SAFETY: bytes, which zeros are too; nobody needs what they hold.
        unsafe {
            Heap::madvise(bytes(start, ByteCount(len as u64)).cast_mut(), libc::MADV_DONTNEED)
        }
        .expect("far memory");
        assert!(given_up.bytes().iter().all(|byte| *byte == 0), "given up, and still there");
        drop(given_up);
        heap.purge();
        let mut again = Dice::new(seed);
        let mut right =
            |buffer: &Buffer| buffer.bytes() == Buffer::random(blocks, &mut again).bytes();
        assert!(right(&early) && others.iter().all(&mut right), "other bytes");
        drop((early, others));
        heap.shutdown().expect("an end");
    });
}

#[test]
fn a_heap_works_with_one_handler_and_without_io_uring() {
    alone("a_heap_works_with_one_handler_and_without_io_uring", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:64MiB,handlers:1,io:sync") else { return };
        let source = Buffer::random(4096, &mut Dice::new(2));
        assert!(heap.stats().bytes_written.0 > 0);
        assert!(source.bytes() == Buffer::random(4096, &mut Dice::new(2)).bytes());
    });
}
