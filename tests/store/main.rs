//! Stores on real files and devices: what they accept, what they refuse, and that both engines
//! move the same bytes.

#![expect(unsafe_code, reason = "hands buffers to queues and changes the thread's user")]

mod claims;
#[path = "../common/mod.rs"]
mod common;
mod devices;
mod faulty;
mod network;
#[path = "../../network/tests/common/mod.rs"]
mod servers;
#[path = "../../src/base/testing.rs"]
mod testing;

use farheap::store::{BlockStore, IoEngine, MemStore, Op, Queue, Request, Store};
use farheap::{ByteCount, Error};
use std::fs::{self, File};
use std::io::{PipeReader, PipeWriter, Read as _, Write as _};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use testing::ExpectedPanic;

const PAGE: usize = 4096;
const LONG: Duration = Duration::from_secs(60);
const MIB: ByteCount = ByteCount::mib(1);

/// Held while a child runs: until some time after its exec it has copies of all descriptors, and
/// with them locks and claims that a test of another thread has just given up.
static CHILD: Mutex<()> = Mutex::new(());

/// Runs a program to its end.
fn output(command: &mut Command) -> std::io::Result<Output> {
    let _running = CHILD.lock().unwrap_or_else(PoisonError::into_inner);
    command.output()
}

fn succeeds(command: &mut Command) -> bool {
    output(command).is_ok_and(|output| output.status.success())
}

/// Waits until no child has copies of descriptors that this thread has closed.
fn settle() {
    drop(CHILD.lock());
}

/// Pages of memory at an address that every device takes.
#[derive(Clone, PartialEq, Eq)]
#[repr(align(4096))]
struct Page([u8; PAGE]);

fn pages(count: usize, seed: u64) -> Vec<Page> {
    let mut state = seed | 1;
    let mut pages = vec![Page([0; PAGE]); count];
    for byte in pages.iter_mut().flat_map(|page| &mut page.0) {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (state >> 56) as u8;
    }
    pages
}

/// One segment per page, last page first: no two neighbours are contiguous in memory.
fn scattered(pages: &mut [Page]) -> Vec<*mut [u8]> {
    pages.iter_mut().rev().map(|page| slice_from_raw_parts_mut(page.0.as_mut_ptr(), PAGE)).collect()
}

fn whole(pages: &mut [Page]) -> Vec<*mut [u8]> {
    vec![slice_from_raw_parts_mut(pages.as_mut_ptr().cast(), size_of_val(pages))]
}

/// Pushes and waits for one request.
fn run(queue: &mut dyn Queue, op: Op, offset: u64, segments: &[*mut [u8]]) -> Result<(), Error> {
    // SAFETY: callers pass segments of pages that they own; the completion is awaited below.
    assert!(unsafe { queue.push(Request { token: 9, op, offset, segments }) });
    let done = collect(queue, 1);
    assert_eq!(done[0].0, 9);
    done[0].1.clone()
}

fn collect(queue: &mut dyn Queue, count: usize) -> Vec<(u64, Result<(), Error>)> {
    let mut done = Vec::new();
    while done.len() < count {
        queue.wait(LONG, &mut |token, result| done.push((token, result))).expect("wait");
    }
    assert_eq!(done.len(), count);
    done
}

/// Runs `body` on every kind of store, with both engines.
fn on_every_store(body: impl Fn(&dyn Store)) {
    let memory = || MemStore::new(ByteCount::mib(4)).expect("memory");
    body(&memory());
    for engine in [IoEngine::Sync, IoEngine::Uring] {
        let store = BlockStore::temporary(None, Some(ByteCount::mib(4))).expect("temporary");
        match store.with_engine(engine) {
            Ok(store) => {
                println!("{}", store.describe());
                body(&store);
            }
            Err(error) => println!("skipped {engine:?}: {error}"),
        }
    }
}

#[test]
fn bytes_come_back_as_they_were_written_however_they_are_split() {
    on_every_store(|store| {
        let mut queue = store.open_queue(8).expect("queue");
        let (mut written, mut read) = (pages(48, 1), pages(48, 2));
        run(&mut *queue, Op::Write, 8 * 4096, &whole(&mut written)).expect("write");
        run(&mut *queue, Op::Read, 8 * 4096, &scattered(&mut read)).expect("read");
        assert!(read.iter().rev().eq(&written), "{}", store.describe());
        let into = read.as_mut_ptr().cast();
        // SAFETY: the buffer is one page of ours.
        unsafe { store.read_now(9 * 4096, slice_from_raw_parts_mut(into, PAGE)) }
            .expect("read now");
        assert!(read[0] == written[1]);
    });
}

#[test]
fn a_full_queue_takes_no_more_until_completions_are_reported() {
    on_every_store(|store| {
        let mut queue = store.open_queue(64).expect("queue");
        let mut written = pages(64, 3);
        for (token, page) in written.iter_mut().enumerate() {
            let segments = [slice_from_raw_parts_mut(page.0.as_mut_ptr(), PAGE)];
            let offset = (63 - token as u64) * 4096;
            let request =
                Request { token: token as u64, op: Op::Write, offset, segments: &segments };
            // SAFETY: `written` outlives the completions, awaited below, and is not changed.
            assert!(unsafe { queue.push(request) });
        }
        let mut extra = pages(1, 4);
        let segments = whole(&mut extra);
        let request = Request { token: 64, op: Op::Write, offset: 1 << 20, segments: &segments };
        // SAFETY: refused, as asserted.
        assert!(!unsafe { queue.push(request) });
        queue.submit().expect("submit");
        assert_eq!(queue.in_flight(), 64);
        let mut tokens: Vec<u64> = collect(&mut *queue, 64).iter().map(|c| c.0).collect();
        tokens.sort_unstable();
        assert!(tokens.iter().copied().eq(0..64));
        assert_eq!(queue.in_flight(), 0);
        let mut read = pages(64, 5);
        run(&mut *queue, Op::Read, 0, &scattered(&mut read)).expect("read");
        assert!(read == written);
    });
}

#[test]
fn a_queue_may_be_opened_used_and_dropped_by_different_threads() {
    on_every_store(|store| {
        let mut queue = store.open_queue(4).expect("queue");
        let queue = std::thread::scope(|scope| {
            let used = scope.spawn(move || {
                let mut written = pages(2, 6);
                run(&mut *queue, Op::Write, 0, &whole(&mut written)).expect("write");
                queue
            });
            used.join().expect("the thread ends well")
        });
        assert_eq!(queue.in_flight(), 0);
    });
}

#[test]
fn dropping_a_queue_waits_for_its_writes() {
    on_every_store(|store| {
        let mut written = pages(32, 7);
        let mut queue = store.open_queue(4).expect("queue");
        let segments = whole(&mut written);
        let request = Request { token: 0, op: Op::Write, offset: 0, segments: &segments };
        // SAFETY: `written` outlives the queue, whose drop waits.
        assert!(unsafe { queue.push(request) });
        queue.submit().expect("submit");
        drop(queue);
        let mut read = pages(32, 8);
        let into = read.as_mut_ptr().cast();
        // SAFETY: the buffer is ours and 32 pages long.
        unsafe { store.read_now(0, slice_from_raw_parts_mut(into, 32 * PAGE)) }.expect("read now");
        assert!(read == written);
    });
}

fn pipe() -> (PipeReader, PipeWriter) {
    std::io::pipe().expect("pipe")
}

#[test]
fn a_watched_descriptor_ends_every_wait_while_it_is_readable() {
    on_every_store(|store| {
        let mut queue = store.open_queue(4).expect("queue");
        let ((mut quiet, _keep), (mut noisy, mut writer)) = (pipe(), pipe());
        queue.watch(quiet.as_raw_fd()).expect("watch");
        queue.watch(noisy.as_raw_fd()).expect("watch");
        let mut none = |token, _| panic!("nothing was pushed: {token}");
        for timeout in [Duration::from_millis(2), Duration::ZERO, Duration::ZERO] {
            assert!(!queue.wait(timeout, &mut none).expect("time-out"));
        }
        let waker = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            writer.write_all(b"ab").expect("write");
            writer
        });
        let started = Instant::now();
        queue.wait(LONG, &mut none).expect("woken");
        let mut byte = [0];
        noisy.read_exact(&mut byte).expect("a byte is there");
        assert!(queue.wait(Duration::ZERO, &mut none).expect("a look"), "a byte was left");
        assert!(queue.wait(LONG, &mut none).expect("woken by what was left"));
        noisy.read_exact(&mut byte).expect("a byte is there");
        assert!(started.elapsed() < LONG);
        let writer = waker.join().expect("waker");
        // Completions are reported while the descriptor is watched, and it still wakes.
        let mut written = pages(1, 9);
        run(&mut *queue, Op::Write, 0, &whole(&mut written)).expect("write");
        drop(writer);
        settle();
        queue.wait(LONG, &mut none).expect("a closed pipe is readable");
        assert_eq!(noisy.read(&mut byte).expect("end of file"), 0);
        drop((queue, &mut quiet));
    });
}

#[test]
fn dropping_a_queue_lets_go_of_what_it_watched() {
    on_every_store(|store| {
        let mut queue = store.open_queue(4).expect("queue");
        let (reader, mut writer) = pipe();
        queue.watch(reader.as_raw_fd()).expect("watch");
        queue.wait(Duration::from_millis(1), &mut |_, _| ()).expect("time-out");
        drop(queue);
        drop(reader);
        settle();
        let error = writer.write_all(b"a").expect_err("nobody holds the other end");
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    });
}

#[test]
fn watching_more_than_four_descriptors_is_an_error() {
    on_every_store(|store| {
        let mut queue = store.open_queue(4).expect("queue");
        let (reader, _writer) = pipe();
        for _ in 0..4 {
            queue.watch(reader.as_raw_fd()).expect("watch");
        }
        assert!(queue.watch(reader.as_raw_fd()).is_err());
    });
}

#[test]
fn a_zero_timeout_only_looks() {
    on_every_store(|store| {
        let mut queue = store.open_queue(4).expect("queue");
        let mut written = pages(1, 10);
        let segments = whole(&mut written);
        let request = Request { token: 1, op: Op::Write, offset: 0, segments: &segments };
        // SAFETY: `written` outlives the completion, which is awaited.
        assert!(unsafe { queue.push(request) });
        let mut done = 0;
        while done == 0 {
            queue.wait(Duration::ZERO, &mut |_, _| done += 1).expect("look");
        }
        queue.wait(Duration::ZERO, &mut |_, _| done += 1).expect("look");
        assert_eq!(done, 1);
    });
}

#[test]
#[should_panic(expected = "of a store of")]
fn a_request_past_the_end_is_refused() {
    let _expected = ExpectedPanic::saying("of a store of");
    let store = MemStore::new(MIB).expect("memory");
    let mut queue = store.open_queue(4).expect("queue");
    let _ = run(&mut *queue, Op::Read, MIB.get(), &whole(&mut pages(1, 11)));
}

#[test]
fn discarding_returns_the_blocks_of_a_file() {
    let store = BlockStore::temporary(None, Some(ByteCount::mib(16))).expect("temporary");
    assert_eq!(store.occupied(), Some(ByteCount::ZERO));
    let mut queue = store.open_queue(4).expect("queue");
    let mut written = pages(256, 12);
    for piece in 0..12 {
        run(&mut *queue, Op::Write, piece << 20, &whole(&mut written)).expect("write");
    }
    let full = store.occupied().expect("a file tells");
    assert!(full >= ByteCount::mib(12), "{full}");
    // SAFETY: nobody else uses the store.
    unsafe { store.discard(4096, ByteCount::mib(12).get() - 8192) }.expect("discard");
    let left = store.occupied().expect("a file tells");
    assert!(left <= ByteCount::kib(64), "{left} of {full}");
    // The pages on either side are untouched.
    let mut read = pages(1, 0);
    run(&mut *queue, Op::Read, 0, &whole(&mut read)).expect("read");
    assert!(read[0] == written[0]);
    run(&mut *queue, Op::Read, (12 << 20) - 4096, &whole(&mut read)).expect("read");
    assert!(read[0] == written[255]);
}

#[test]
fn discarded_memory_is_zero() {
    let store = MemStore::new(MIB).expect("memory");
    let mut queue = store.open_queue(4).expect("queue");
    let mut read = pages(2, 13);
    run(&mut *queue, Op::Write, 0, &whole(&mut read)).expect("write");
    // SAFETY: nobody else uses the store.
    unsafe { store.discard(4096, 4096) }.expect("discard");
    run(&mut *queue, Op::Read, 0, &whole(&mut read)).expect("read");
    assert!(read[0] == pages(1, 13)[0] && read[1].0.iter().all(|byte| *byte == 0));
}

#[test]
fn a_temporary_store_leaves_no_name_behind() {
    let dir = tempfile::tempdir().expect("directory");
    let store = BlockStore::temporary(Some(dir.path()), Some(MIB)).expect("temporary");
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 0);
    assert!(store.describe().contains("unlinked"), "{}", store.describe());
}

#[test]
fn a_temporary_store_is_as_large_as_the_space_available() {
    let store = BlockStore::temporary(None, None).expect("temporary");
    assert!(store.capacity() > MIB);
    assert!(store.capacity().get().is_multiple_of(4096));
    assert_eq!(store.occupied(), Some(ByteCount::ZERO));
}

#[test]
fn a_new_file_is_created_for_its_owner_only_and_keeps_its_bytes() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("new");
    let store = BlockStore::open(&path, Some(ByteCount::mib(2))).expect("created");
    let metadata = fs::metadata(&path).expect("exists");
    assert_eq!((metadata.len(), metadata.blocks()), (2 << 20, 0));
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    let mut queue = store.open_queue(4).expect("queue");
    run(&mut *queue, Op::Write, 0, &whole(&mut pages(1, 14))).expect("write");
    drop((queue, store));
    settle();
    let store = BlockStore::open(&path, None).expect("opened again");
    assert_eq!(store.capacity(), ByteCount::mib(2));
    let mut read = pages(1, 0);
    run(&mut *store.open_queue(4).expect("queue"), Op::Read, 0, &whole(&mut read)).expect("read");
    assert!(read == pages(1, 14));
}

#[test]
fn a_device_that_holds_data_is_refused_and_left_as_it_is() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("precious");
    let refuse = |bytes: &[u8], what: &str| {
        fs::write(&path, bytes).expect("write");
        settle();
        assert_says(BlockStore::scratch(&path, None, false), &path, what);
        assert!(fs::read(&path).expect("read") == bytes, "{what}: it was changed");
    };
    let mut disk = vec![0; 2 << 20];
    disk[512..520].copy_from_slice(b"EFI PART");
    refuse(&disk, "holds data at byte 512, which would be lost");
    // Not "too small, extend it".
    refuse(b"root:x:0:0:root:/root:/bin/sh\n", "holds data at byte 0, which");
    fs::write(&path, &disk).expect("write");
    settle();
    let store = BlockStore::scratch(&path, None, true).expect("allowed");
    assert_eq!(store.capacity(), ByteCount((2 << 20) - (128 << 10)));
}

#[test]
fn a_device_for_evicted_pages_keeps_its_mark_and_is_taken_again() {
    let dir = tempfile::tempdir().expect("directory");
    for (len, base) in [(MIB, 128 << 10), (ByteCount::mib(64), 1 << 20)] {
        let path = sparse(dir.path(), len.get());
        for round in 0..2 {
            settle();
            let store = BlockStore::scratch(&path, None, false).expect("zeros, or marked");
            let capacity = store.capacity().get();
            assert_eq!(capacity, len.get() - base);
            let mut queue = store.open_queue(4).expect("queue");
            let mut written = pages(1, 21 + round);
            for offset in [0, capacity - 4096] {
                run(&mut *queue, Op::Write, offset, &whole(&mut written)).expect("write");
                let mut read = pages(1, 0);
                run(&mut *queue, Op::Read, offset, &whole(&mut read)).expect("read");
                assert!(read == written);
            }
            drop(queue);
            // SAFETY: nobody else uses the store.
            unsafe { store.discard(0, capacity) }.expect("discard");
            assert_eq!(store.occupied(), Some(ByteCount(4096)), "the mark");
        }
        let head = fs::read(&path).expect("read");
        assert!(head.starts_with(b"farheap: evicted pages\n"));
        assert_eq!(head.len() as u64, len.get());
    }
}

#[test]
fn an_existing_file_is_used_as_far_as_asked_or_rounded_down() {
    let dir = tempfile::tempdir().expect("directory");
    let path = sparse(dir.path(), (2 << 20) + 100);
    let all = BlockStore::open(&path, None).expect("open").capacity();
    settle();
    let some = BlockStore::open(&path, Some(MIB)).expect("open").capacity();
    assert_eq!((all, some), (ByteCount::mib(2), MIB));
}

fn sparse(dir: &Path, len: u64) -> PathBuf {
    let path = dir.join("backing");
    File::create(&path).expect("create").set_len(len).expect("set length");
    path
}

/// Asserts that opening fails with an error that names the path and says `reason`.
fn assert_refused(path: &Path, capacity: Option<ByteCount>, reason: &str) {
    settle();
    assert_says(BlockStore::open(path, capacity), path, reason);
}

fn assert_says(result: farheap::Result<BlockStore>, path: &Path, reason: &str) {
    let error = result.expect_err(reason);
    assert!(matches!(error, Error::Device { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains(reason) && text.contains(&path.display().to_string()), "{text}");
}

#[test]
fn paths_that_are_no_store_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("directory");
    let missing = dir.path().join("missing");
    assert_refused(&missing, None, "does not exist; give a capacity to create a file");
    let below = format!("its directory {} does not exist", missing.display());
    assert_refused(&missing.join("below"), Some(MIB), &below);
    assert_refused(&missing.join("below"), None, &below);
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&missing, &link).expect("a link");
    let dangles = format!("is a link to {}, which does not exist", missing.display());
    assert_refused(&link, Some(MIB), &dangles);
    assert_refused(&link, None, &dangles);
    assert!(!missing.exists());
    assert_refused(dir.path(), None, "is a directory");
    assert_refused(Path::new("/dev/null"), Some(MIB), "is a character device");
    let fifo = dir.path().join("fifo");
    assert!(succeeds(Command::new("mkfifo").arg(&fifo)));
    assert_refused(&fifo, None, "is a pipe");
}

#[test]
fn sizes_that_do_not_fit_are_refused_with_the_reason() {
    let dir = tempfile::tempdir().expect("directory");
    let path = sparse(dir.path(), (1 << 20) - 1);
    assert_refused(&path, None, "is too small");
    let path = sparse(dir.path(), 2 << 20);
    let what_to_do = "has 2097152 bytes, but 3.0 MiB are needed; delete it to have it created, or \
                      extend it: truncate --size=3145728";
    assert_refused(&path, Some(ByteCount::mib(3)), what_to_do);
    assert_refused(&path, Some(ByteCount(MIB.get() + 512)), "is not aligned");
    assert_refused(&path, Some(ByteCount::kib(512)), "is below");
    let temporary = BlockStore::temporary(Some(dir.path()), Some(ByteCount(MIB.get() + 1)));
    assert_says(temporary, dir.path(), "is not aligned");
    let huge = BlockStore::temporary(Some(dir.path()), Some(ByteCount(1 << 62)));
    assert_says(huge, dir.path(), "cannot hold a file");
    let new = dir.path().join("new");
    assert_refused(&new, Some(ByteCount(1 << 62)), "cannot hold a file");
    assert!(!new.exists(), "nothing is left behind");
}

#[test]
fn a_file_in_use_is_refused_until_its_store_is_dropped() {
    let dir = tempfile::tempdir().expect("directory");
    let path = sparse(dir.path(), 1 << 20);
    let store = BlockStore::open(&path, None).expect("open");
    assert_refused(&path, None, "is in use");
    let queue = store.open_queue(1).expect("queue");
    drop(store);
    assert_refused(&path, None, "is in use");
    drop(queue);
    settle();
    BlockStore::open(&path, None).expect("free again");
}

#[test]
fn a_file_that_ends_early_is_an_io_error_not_zeros() {
    let dir = tempfile::tempdir().expect("directory");
    for engine in [IoEngine::Sync, IoEngine::Auto] {
        settle();
        let path = sparse(dir.path(), 1 << 20);
        let store =
            BlockStore::open(&path, None).expect("open").with_engine(engine).expect("engine");
        File::options().write(true).open(&path).expect("open").set_len(8192).expect("truncate");
        let mut queue = store.open_queue(4).expect("queue");
        let mut buffer = pages(4, 15);
        let error = run(&mut *queue, Op::Read, 0, &scattered(&mut buffer)).expect_err("too short");
        let name: Arc<str> = format!("file {}", path.display()).into();
        assert_eq!(store.name(), name);
        let expected =
            Error::Io { op: "read", store: name, offset: 0, len: 16384, errno: libc::EIO };
        assert_eq!(error, expected, "{engine:?}");
        // SAFETY: the buffer is ours and four pages long.
        let error = unsafe {
            store.read_now(0, slice_from_raw_parts_mut(buffer.as_mut_ptr().cast(), 4 * PAGE))
        };
        assert_eq!(error, Err(expected));
    }
}

/// Whether the test may use what needs root; says so if not.
fn is_root() -> bool {
    // SAFETY: takes no pointers, cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        println!("skipped: needs root");
    }
    root
}

#[test]
fn a_file_of_somebody_else_is_refused() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().expect("directory");
    let path = sparse(dir.path(), 1 << 20);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("mode");
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).expect("mode");
    let thread = std::thread::spawn(move || {
        // SAFETY: takes no pointers; changes this thread's file-system user only (setfsuid(2)).
        unsafe { libc::setfsuid(65_534) };
        assert_refused(&path, None, "no permission");
        assert_says(
            BlockStore::temporary(path.parent(), None),
            path.parent().expect("dir"),
            "no permission",
        );
    });
    thread.join().expect("refused");
}

/// Makes the kernel refuse io_uring to the calling thread, as container sandboxes do.
fn forbid_io_uring() {
    const NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let instruction =
        |code, jt, k| libc::sock_filter { code, jt, jf: u8::from(code == IF_EQUAL), k };
    let mut filter = [
        instruction(NUMBER, 0, 0),
        instruction(IF_EQUAL, 0, libc::SYS_io_uring_setup as u32),
        instruction(RETURN, 0, refuse),
        instruction(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes no pointers; concerns this thread only (PR_SET_NO_NEW_PRIVS).
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the program and its instructions outlive the call (PR_SET_SECCOMP).
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) }, 0);
}

#[test]
fn where_io_uring_is_refused_the_store_works_without_and_says_why() {
    let thread = std::thread::spawn(|| {
        let open = || BlockStore::temporary(None, Some(MIB)).expect("temporary");
        let opened_before = open();
        forbid_io_uring();
        let forced = open().with_engine(IoEngine::Uring).expect_err("refused");
        assert_eq!(forced, Error::Os { call: "io_uring_setup", errno: libc::EPERM });
        let opened_after = open();
        assert!(opened_after.describe().contains("refused: Operation not permitted"));
        for store in [opened_before, opened_after] {
            let mut queue = store.open_queue(4).expect("queue");
            run(&mut *queue, Op::Write, 0, &whole(&mut pages(1, 22))).expect("write");
        }
    });
    thread.join().expect("works without");
}

#[test]
fn many_queues_move_random_pages_without_mixing_them_up() {
    const PAGES_PER_QUEUE: u64 = 256;
    let seed: u64 = std::env::var("FARHEAP_SEED")
        .map_or_else(|_| std::process::id().into(), |text| text.parse().expect("a number"));
    println!("FARHEAP_SEED={seed}");
    on_every_store(|store| {
        std::thread::scope(|scope| {
            for number in 0..4 {
                let first = number * PAGES_PER_QUEUE;
                scope.spawn(move || shuffle_pages(store, first, PAGES_PER_QUEUE, seed ^ number));
            }
        });
    });
}

/// Reads and writes pages `[first, first + count)` in random order, eight at a time, and checks
/// every read against what was written last.
fn shuffle_pages(store: &dyn Store, first: u64, count: u64, seed: u64) {
    const DEPTH: usize = 8;
    let mut random = seed;
    let mut next = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) % below
    };
    let mut queue = store.open_queue(DEPTH as u32).expect("queue");
    let mut versions = vec![0_u64; count as usize];
    let mut buffers = pages(DEPTH, 0);
    for round in 1..300 {
        // Distinct pages: requests in flight must not overlap.
        let start = next(count);
        let batch: [(Op, u64); DEPTH] = std::array::from_fn(|i| {
            let page = (start + 31 * i as u64) % count;
            let known = versions[page as usize] > 0;
            (if known && next(2) == 0 { Op::Read } else { Op::Write }, page)
        });
        for ((buffer, (op, page)), token) in buffers.iter_mut().zip(batch).zip(0..) {
            if op == Op::Write {
                versions[page as usize] = round;
                *buffer = stamp(first + page, round);
            }
            let segments = [slice_from_raw_parts_mut(buffer.0.as_mut_ptr(), PAGE)];
            let offset = (first + page) * 4096;
            // SAFETY: the buffers are not touched before all completions are in, below.
            assert!(unsafe { queue.push(Request { token, op, offset, segments: &segments }) });
        }
        for (_, result) in collect(&mut *queue, DEPTH) {
            result.expect("moved");
        }
        for (buffer, (_, page)) in buffers.iter().zip(batch) {
            let expected = stamp(first + page, versions[page as usize]);
            assert!(*buffer == expected, "page {page} in round {round}");
        }
    }
}

fn stamp(page: u64, version: u64) -> Page {
    let mut stamped = Page([version as u8; PAGE]);
    stamped.0[..8].copy_from_slice(&page.to_le_bytes());
    stamped.0[PAGE - 8..].copy_from_slice(&version.to_le_bytes());
    stamped
}
