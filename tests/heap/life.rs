//! A heap from start to end: what it costs while data fits, what it gives back, what it refuses.
//!
//! Guards: G1, G2, G3, G10.

use crate::common::child::{alone, case, run};
use crate::common::{StopOnDrop, bytes, eventually, heap, watchdog};
use allocator_api2::boxed::Box as FarBox;
use allocator_api2::vec::Vec as FarVec;
use farheap::region::Advice;
use farheap::{ByteCount, Error, Far, Heap};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const MIB: usize = 1 << 20;

/// A sparse file for a heap to use as its device.
fn device(dir: &Path, len: usize) -> PathBuf {
    let path = dir.join("device");
    fs::File::create(&path).and_then(|file| file.set_len(len as u64)).expect("a sparse file");
    path
}

/// Bytes of device space that a file takes beside the mark at its beginning.
fn occupied(path: &Path) -> u64 {
    fs::metadata(path).expect("the device").blocks() * 512 - 4096
}

/// `words` words that are neither zero nor equal.
fn numbers(words: usize) -> FarVec<u64, Far> {
    let mut numbers = FarVec::with_capacity_in(words, Far);
    numbers.extend((0..words as u64).map(|n| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1));
    numbers
}

fn assert_numbers(numbers: &[u64]) {
    let wrong = numbers
        .iter()
        .enumerate()
        .find(|(n, seen)| **seen != (*n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    assert_eq!(wrong, None);
}

#[test]
fn nothing_is_read_or_written_while_the_data_fits() {
    alone("nothing_is_read_or_written_while_the_data_fits", || {
        let dir = tempfile::tempdir().expect("a directory");
        let path = device(dir.path(), 256 * MIB);
        let Some(heap) = heap(&format!("far_limit:96MiB,device:{}", path.display())) else {
            return;
        };
        for _ in 0..3 {
            let large = numbers(32 * MIB / 8);
            let small: Vec<FarBox<[u64; 100], Far>> =
                (0..20_000).map(|n| FarBox::new_in([n; 100], Far)).collect();
            assert_numbers(&large);
            assert!(small.iter().zip(0..).all(|(object, n)| object[99] == n));
            drop((large, small));
            heap.purge();
        }
        let stats = heap.stats();
        assert_eq!((stats.bytes_read.0, stats.bytes_written.0), (0, 0), "{stats:?}");
        assert!(stats.resident_bytes_max.0 >= 32 << 20, "the data was resident: {stats:?}");
        assert_eq!((stats.stored_bytes.0, occupied(&path)), (0, 0));
    });
}

#[test]
fn memory_that_is_never_touched_is_never_written() {
    alone("memory_that_is_never_touched_is_never_written", || {
        let dir = tempfile::tempdir().expect("a directory");
        let path = device(dir.path(), 512 * MIB);
        let Some(heap) = heap(&format!("far_limit:8MiB,device:{}", path.display())) else { return };
        for _ in 0..20 {
            let vectors: Vec<FarVec<u8, Far>> =
                (1..20).map(|n| FarVec::with_capacity_in(n * MIB, Far)).collect();
            let usage = heap.usage();
            assert!(usage.allocated_bytes >= ByteCount::mib(190), "{usage}");
            drop(vectors);
        }
        heap.purge();
        let stats = heap.stats();
        assert_eq!((stats.bytes_read.0, stats.bytes_written.0), (0, 0), "{stats:?}");
        assert_eq!((stats.stored_bytes.0, occupied(&path)), (0, 0));
        assert!(stats.resident_bytes_max.0 < 1 << 20, "{stats:?}");
    });
}

#[test]
fn freeing_evicted_data_returns_the_space_of_the_device() {
    alone("freeing_evicted_data_returns_the_space_of_the_device", || {
        let _watchdog = watchdog("device space", Duration::from_secs(200));
        let dir = tempfile::tempdir().expect("a directory");
        let path = device(dir.path(), 256 * MIB);
        let Some(heap) = heap(&format!("far_limit:8MiB,device:{}", path.display())) else { return };
        let mut vectors: Vec<_> = (0..16).map(|_| numbers(4 * MIB / 8)).collect();
        let full = occupied(&path);
        assert!(full >= 48 << 20, "64 MiB under a limit of 8: {full} on the device");
        // Every other one, so that what stays lies between what goes.
        let mut at = 0;
        vectors.retain(|_| {
            at += 1;
            at % 2 == 0
        });
        heap.purge();
        assert!(eventually(|| occupied(&path) <= 33 << 20), "{} left", occupied(&path));
        vectors.iter().for_each(|numbers| assert_numbers(numbers));
        drop(vectors);
        heap.purge();
        // ext4 keeps blocks of its own for a file that had many extents: 4 KiB, or 12.
        assert!(eventually(|| occupied(&path) <= 64 << 10), "{} left", occupied(&path));
        assert_eq!(heap.stats().stored_bytes.0, 0);
    });
}

#[test]
fn a_heap_is_one_a_process_and_ends_only_when_it_is_empty() {
    alone("a_heap_is_one_a_process_and_ends_only_when_it_is_empty", || {
        let start = |conf| Heap::builder().parse(conf).expect("a good configuration").start();
        let Some(first) = heap("far_limit:8MiB,capacity:64MiB") else { return };
        assert_eq!(start("far_limit:16MiB").expect_err("one runs"), Error::AlreadyRunning);
        let kept = numbers(16 * MIB / 8);
        let error = first.shutdown().expect_err("16 MiB are in use");
        assert!(matches!(error, Error::InUse { bytes } if bytes.0 >= 16 << 20), "{error}");
        assert!(Heap::running().is_some());
        assert_numbers(&kept);
        assert_numbers(&numbers(16 * MIB / 8));
        drop(kept);
        first.shutdown().expect("nothing is in use");
        assert_eq!(first.shutdown().expect_err("stopped"), Error::NotRunning);
        let somewhere = [0_u8; 64];
        let (ptr, len) = (somewhere.as_ptr(), ByteCount(64));
        let region = first.region();
        let refused = [
            region.evict_all(),
            region.set_limit(ByteCount::mib(64)),
            region.advise(&[bytes(ptr, len)], Advice::PageOutNow),
            region.advise(&[bytes(ptr, len)], Advice::PageOut),
            region.advise(&[bytes(ptr, len)], Advice::WillNeed),
            region.advise(&[bytes(ptr, len)], Advice::WillNeedNow),
            region.pin(bytes(ptr, len)).map(drop),
            region.unpin(bytes(ptr, len)),
            region.advise(&[bytes(ptr, len)], Advice::Cold),
        ];
        assert!(refused.iter().all(|answer| *answer == Err(Error::NotRunning)), "{refused:?}");
        assert!(Heap::running().is_none());
        assert!(FarVec::<u8, Far>::new_in(Far).try_reserve(1).is_err(), "no heap is running");
        for _ in 0..5 {
            let again = start("far_limit:16MiB,capacity:64MiB").expect("none runs");
            assert_numbers(&numbers(24 * MIB / 8));
            again.shutdown().expect("nothing is in use");
        }
        assert!(first.stats().bytes_written.0 > 0, "statistics outlive the heap");
    });
}

#[test]
fn a_limit_below_the_minimum_is_refused_with_the_minimum() {
    let minimum_of = |conf| match Heap::builder().parse(conf).and_then(|options| options.limits()) {
        Err(Error::LimitTooSmall { minimum, .. }) => minimum,
        other => panic!("{conf}: {other:?}"),
    };
    assert_eq!(minimum_of("far_limit:4MiB"), ByteCount::mib(8));
}

#[test]
fn a_limit_may_change_while_data_is_live() {
    alone("a_limit_may_change_while_data_is_live", || {
        let Some(heap) = heap("far_limit:64MiB,capacity:256MiB") else { return };
        let data = numbers(48 * MIB / 8);
        heap.region().set_limit(ByteCount::mib(8)).expect("everything can be evicted");
        assert!(heap.stats().resident_bytes.0 <= 8 << 20);
        assert_numbers(&data);
        assert!(heap.stats().resident_bytes.0 <= 8 << 20);
        assert!(matches!(
            heap.region().set_limit(ByteCount::mib(7)),
            Err(Error::LimitTooSmall { .. })
        ));
        heap.region().set_limit(ByteCount::mib(64)).expect("raising always works");
        assert_numbers(&data);
        let pass_without_reading = || {
            let read = heap.stats().bytes_read.0;
            assert_numbers(&data);
            heap.stats().bytes_read.0 == read
        };
        // What was on its way out when the limit rose comes back once.
        assert!((0..5).any(|_| pass_without_reading()), "all of it fits again");
    });
}

/// The descriptor of this process's temporary store in `dir`.
fn store_descriptor(dir: &Path) -> Option<PathBuf> {
    let descriptors = fs::read_dir("/proc/self/fd").expect("/proc");
    let mut paths = descriptors.map(|entry| entry.expect("an entry").path());
    paths.find(|path| fs::read_link(path).is_ok_and(|target| target.starts_with(dir)))
}

#[test]
fn a_killed_process_leaves_nothing_behind() {
    let name = "a_killed_process_leaves_nothing_behind";
    if let Some(dir) = case(name) {
        let Some(_heap) = heap(&format!("far_limit:8MiB,capacity:64MiB,dir:{dir}")) else { return };
        let data = numbers(32 * MIB / 8);
        let store = store_descriptor(dir.as_ref()).expect("the store is open");
        let meta = fs::metadata(&store).expect("open");
        println!("mode={:o} blocks={}", meta.permissions().mode() & 0o7777, meta.blocks() / 2048);
        // It is killed while it holds data.
        let pid = std::process::id().to_string();
        Command::new("kill").args(["-KILL", &pid]).status().expect("kill runs");
        assert_numbers(&data);
        return;
    }
    let dir = tempfile::tempdir().expect("a directory");
    let ended = run(name, dir.path().to_str().expect("UTF-8"), |_| ());
    if ended.show_skips() {
        return;
    }
    let signal = std::os::unix::process::ExitStatusExt::signal(&ended.status);
    assert_eq!(signal, Some(libc::SIGKILL), "{}", ended.text);
    assert!(ended.text.contains("mode=600 blocks=2"), "{}", ended.text);
    assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 0);
}

/// A line of the kernel's description of a thread.
fn status_line(task: &Path, key: &str) -> String {
    let text = fs::read_to_string(task.join("status")).expect("/proc");
    let line = text.lines().find_map(|line| line.strip_prefix(key)).expect("a line");
    line.trim().to_owned()
}

#[test]
fn signal_handlers_of_the_program_run_on_its_own_threads() {
    alone("signal_handlers_of_the_program_run_on_its_own_threads", || {
        let own = status_line("/proc/thread-self".as_ref(), "SigBlk:");
        let Some(heap) = heap("far_limit:8MiB,capacity:64MiB,handlers:2") else { return };
        // A thread takes its name when it first runs.
        let named = || {
            let tasks = fs::read_dir("/proc/self/task").expect("/proc").flatten();
            tasks.filter(|task| status_line(&task.path(), "Name:").starts_with("farheap-")).count()
        };
        assert!(
            eventually(|| named() == 5),
            "evictor, lender, two handlers, maintenance: {}",
            named()
        );
        let mut threads = 0;
        for task in fs::read_dir("/proc/self/task").expect("/proc") {
            let task = task.expect("an entry").path();
            if status_line(&task, "Name:").starts_with("farheap-") {
                threads += 1;
                let mask = u64::from_str_radix(&status_line(&task, "SigBlk:"), 16).expect("hex");
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGUSR1] {
                    assert_ne!(mask & 1 << (signal - 1), 0, "{signal} in {mask:x}");
                }
                assert_eq!(mask & 1 << (libc::SIGSEGV - 1), 0, "crashes stay loud");
            }
        }
        assert_eq!(threads, 5, "evictor, lender, two handlers, maintenance");
        assert_eq!(status_line("/proc/thread-self".as_ref(), "SigBlk:"), own);
        heap.shutdown().expect("nothing is in use");
    });
}

/// Resident anonymous bytes of this process, exactly, as the kernel counts them.
fn resident_exactly() -> u64 {
    let text = fs::read_to_string("/proc/self/smaps_rollup").expect("/proc");
    let line = text.lines().find(|line| line.starts_with("Anonymous:")).expect("a line");
    let number = line.split_whitespace().nth(1).expect("a number");
    number.parse::<u64>().expect("a number") << 10
}

/// Resident bytes of this process, within what the kernel's counters lag behind.
fn resident_roughly() -> u64 {
    let text = fs::read_to_string("/proc/self/statm").expect("/proc");
    let field = |n| text.split_whitespace().nth(n).and_then(|field| field.parse::<u64>().ok());
    (field(1).expect("resident") - field(2).expect("shared")) * 4096
}

/// What the library needs locally for the data of these tests.
const LOCAL_MAX: u64 = 8 << 20;

#[test]
fn the_resident_size_reported_is_what_the_kernel_counts() {
    alone("the_resident_size_reported_is_what_the_kernel_counts", || {
        let before = resident_exactly();
        let Some(heap) = heap("far_limit:128MiB,capacity:512MiB") else { return };
        let data = numbers(192 * MIB / 8);
        assert_numbers(&data);
        // Until background eviction is done and both are read at the same state.
        let agree = eventually(|| {
            let reported = heap.stats().resident_bytes.0;
            let counted = resident_exactly() - before;
            let same = heap.stats().resident_bytes.0 == reported;
            same && counted >= reported - reported / 100
                && counted <= reported + reported / 100 + LOCAL_MAX
        });
        let reported = heap.stats().resident_bytes.0;
        let counted = resident_exactly() - before;
        println!("reported {reported}, counted {counted}");
        assert!(agree, "reported {reported}, counted {counted}");
        // How far writers and readers are ahead of the evictor, or it of them, depends on when they run.
        assert!(reported >= 64 << 20, "{reported} of a limit of 128 MiB");
        drop(data);
    });
}

#[test]
fn the_resident_size_stays_below_the_limit_while_hammered() {
    alone("the_resident_size_stays_below_the_limit_while_hammered", || {
        let before = resident_roughly();
        let Some(heap) = heap("far_limit:128MiB,capacity:1GiB") else { return };
        let (largest, done) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let others = StopOnDrop(&done);
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    largest.fetch_max(resident_roughly(), Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let hammers: Vec<_> = (0..3)
                .map(|_| {
                    scope.spawn(|| {
                        for _ in 0..3 {
                            let data = numbers(80 * MIB / 8);
                            assert_numbers(&data);
                        }
                    })
                })
                .collect();
            hammers.into_iter().for_each(|thread| thread.join().expect("right data"));
            drop(others);
        });
        let grown = largest.into_inner() - before;
        println!("{grown} at most, limit {}", 128 << 20);
        assert!(grown <= (128 << 20) + LOCAL_MAX, "{grown}");
        assert!(heap.stats().resident_bytes_max.0 <= 128 << 20, "{:?}", heap.stats());
        assert!(heap.stats().bytes_read.0 > 0, "the limit had an effect");
    });
}
