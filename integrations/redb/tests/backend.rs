//! The contract of a storage backend: lengths, zeros, parts of pages, errors.

#![expect(unsafe_code, reason = "implements a store")]

use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::{MemStore, Queue, Store};
use farheap::{ByteCount, Error, PageId};
use farheap_redb::PoolBackend;
use redb::{BackendError, StorageBackend};
use std::io::ErrorKind;
use std::ops::Bound;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

const PAGE: u64 = 4096;

fn pool(config: PoolConfig, capacity: ByteCount) -> Arc<BufferPool> {
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("a manager");
    let store = MemStore::new(capacity).expect("memory");
    config.create_on(Arc::new(store), &manager).expect("a pool")
}

fn whole(capacity: ByteCount) -> Arc<BufferPool> {
    pool(PoolConfig::new().whole_pages(true), capacity)
}

fn read(backend: &PoolBackend, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xAA; len];
    backend.read(offset, &mut bytes).expect("within the storage");
    bytes
}

#[test]
fn positions_that_were_not_written_are_zero() {
    let backend = PoolBackend::new(&whole(ByteCount::mib(8))).expect("a backend");
    assert_eq!(backend.len().expect("a length"), 0);
    backend.set_len(100 * PAGE).expect("room");
    assert_eq!(read(&backend, 0, 100 * PAGE as usize), vec![0; 100 * PAGE as usize]);
    backend.write(50 * PAGE + 7, &[1, 2, 3]).expect("room");
    assert_eq!(read(&backend, 50 * PAGE + 6, 5), [0, 1, 2, 3, 0]);
    let around = read(&backend, 49 * PAGE, 3 * PAGE as usize);
    assert_eq!(around.iter().filter(|byte| **byte != 0).count(), 3);
}

#[test]
fn a_range_may_begin_and_end_within_pages() {
    let pool = whole(ByteCount::mib(8));
    let backend = PoolBackend::new(&pool).expect("a backend");
    backend.set_len(40 * PAGE).expect("room");
    let bytes: Vec<u8> = (0..35 * PAGE + 123).map(|at| (at % 251) as u8).collect();
    backend.write(3 * PAGE + 77, &bytes).expect("room");
    assert_eq!(read(&backend, 3 * PAGE + 77, bytes.len()), bytes);
    pool.evict_all().expect("memory takes it");
    assert_eq!(read(&backend, 3 * PAGE + 77, bytes.len()), bytes, "from the store");
    assert_eq!(read(&backend, 9 * PAGE, 1), bytes[6 * PAGE as usize - 77..][..1]);
}

#[test]
fn what_was_cut_off_is_zero_when_the_storage_grows_again() {
    let pool = whole(ByteCount::mib(8));
    let backend = PoolBackend::new(&pool).expect("a backend");
    backend.set_len(60 * PAGE).expect("room");
    backend.write(0, &vec![9; 60 * PAGE as usize]).expect("room");
    backend.sync_data().expect("memory takes it");
    backend.set_len(10 * PAGE + 5).expect("shorter");
    let past = backend.read(10 * PAGE, &mut [0; 6]).expect_err("past the end");
    assert_eq!(past.kind(), ErrorKind::UnexpectedEof);
    assert!(backend.write(10 * PAGE + 5, &[1]).is_err(), "past the end");
    backend.set_len(60 * PAGE).expect("room");
    assert_eq!(read(&backend, 10 * PAGE, 6), [9, 9, 9, 9, 9, 0]);
    assert!(read(&backend, 11 * PAGE, 49 * PAGE as usize).iter().all(|byte| *byte == 0));
    // Their space is the device's again.
    backend.set_len(10 * PAGE).expect("shorter");
    backend.sync_data().expect("memory takes it");
    assert_eq!(pool.pages(), 3 + 10, "headers, the length, ten pages");
}

#[test]
fn pages_that_a_crash_left_behind_the_end_are_zero_when_the_storage_grows() {
    let pool = whole(ByteCount::mib(8));
    let backend = PoolBackend::new(&pool).expect("a backend");
    backend.set_len(20 * PAGE).expect("room");
    backend.write(0, &vec![9; 20 * PAGE as usize]).expect("room");
    drop(backend);
    // The page with the length was written before the crash, the header that lacks the freed pages was not.
    let mut meta = pool.fix_exclusive(PageId(2)).expect("the page with the length");
    meta[8..16].copy_from_slice(&(5 * PAGE + 3).to_le_bytes());
    drop(meta);
    let backend = PoolBackend::new(&pool).expect("a backend");
    backend.set_len(20 * PAGE).expect("room");
    assert_eq!(read(&backend, 5 * PAGE, 4), [9, 9, 9, 0]);
    assert!(read(&backend, 6 * PAGE, 14 * PAGE as usize).iter().all(|byte| *byte == 0));
}

#[test]
fn threads_may_write_parts_of_one_page_at_once() {
    const PARTS: u64 = 4;
    let pool =
        pool(PoolConfig::new().whole_pages(true).page(ByteCount::kib(64)), ByteCount::mib(64));
    let backend = PoolBackend::new(&pool).expect("a backend");
    let pages = 800;
    backend.set_len(pages * 16 * PAGE).expect("room");
    let barrier = Barrier::new(PARTS as usize);
    // No thread may end before the others, which wait for it.
    let write = &|part: u64| {
        let mut ended = Ok(());
        for page in 0..pages {
            barrier.wait();
            let offset = (16 * page + part) * PAGE;
            ended = ended.and(backend.write(offset, &[part as u8 + 1; 4096]));
        }
        ended.expect("room");
    };
    std::thread::scope(|scope| (0..PARTS).for_each(|part| drop(scope.spawn(move || write(part)))));
    for page in 0..pages {
        let bytes = read(&backend, 16 * page * PAGE, (PARTS * PAGE) as usize);
        let parts: Vec<u8> = bytes.chunks(4096).map(|part| part[17]).collect();
        assert_eq!(parts, [1, 2, 3, 4], "page {page}");
    }
}

/// Memory whose syncs end when they may.
#[derive(Debug)]
struct SlowToSync {
    inner: MemStore,
    is_slow: AtomicBool,
    began: Barrier,
    may_end: Barrier,
}

// SAFETY: passes everything on to a store.
unsafe impl Store for SlowToSync {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn open_queue(&self, depth: u32) -> farheap::Result<Box<dyn Queue>> {
        self.inner.open_queue(depth)
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> farheap::Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.read_now(offset, into) }
    }

    fn sync(&self) -> farheap::Result<()> {
        if self.is_slow.swap(false, Ordering::Relaxed) {
            self.began.wait();
            self.may_end.wait();
        }
        self.inner.sync()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[test]
fn a_sync_beside_another_ends_after_it() {
    let store = Arc::new(SlowToSync {
        inner: MemStore::new(ByteCount::mib(8)).expect("memory"),
        is_slow: AtomicBool::new(false),
        began: Barrier::new(2),
        may_end: Barrier::new(2),
    });
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("a manager");
    let config = PoolConfig::new().whole_pages(true);
    let pool = config.create_on(Arc::clone(&store) as Arc<dyn Store>, &manager).expect("a pool");
    let backend = &PoolBackend::new(&pool).expect("a backend");
    backend.set_len(4 * PAGE).expect("room");
    backend.sync_data().expect("memory");
    backend.write(0, &[1; 4096]).expect("room");
    store.is_slow.store(true, Ordering::Relaxed);
    std::thread::scope(|scope| {
        let sync = || backend.sync_data().expect("memory");
        scope.spawn(sync);
        store.began.wait();
        let second = scope.spawn(sync);
        // Long enough for one that does not wait; one that does can never be over.
        std::thread::sleep(Duration::from_millis(100));
        let is_over = second.is_finished();
        store.may_end.wait();
        assert!(!is_over, "what the first sync writes was not durable yet");
    });
}

#[test]
fn a_sync_keeps_length_and_content_for_the_next_backend() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("table");
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("a manager");
    let config = || PoolConfig::new().whole_pages(true);
    let pool = config().create(&path, ByteCount::mib(8), &manager).expect("a pool");
    let backend = PoolBackend::new(&pool).expect("a backend");
    backend.set_len(20 * PAGE).expect("room");
    backend.write(5 * PAGE, &[5; 4096]).expect("room");
    backend.sync_data().expect("a disk");
    // Pages that are in use already: their sync writes no header.
    backend.write(5 * PAGE + 1, &[6]).expect("room");
    backend.sync_data().expect("a disk");
    // A length that no page came with: redb relies on it before its header has the new one.
    backend.set_len(30 * PAGE).expect("room");
    backend.sync_data().expect("a disk");
    // A pool that is dropped writes nothing.
    drop((backend, pool));
    let pool = config().open(&path, &manager).expect("the pool");
    let backend = PoolBackend::new(&pool).expect("the backend");
    assert_eq!(backend.len().expect("a length"), 30 * PAGE);
    assert_eq!(read(&backend, 5 * PAGE - 1, 4), [0, 5, 6, 5]);
}

#[test]
fn a_table_without_room_says_so_and_keeps_its_length() {
    let backend = PoolBackend::new(&whole(ByteCount(13 * PAGE))).expect("a backend");
    backend.set_len(10 * PAGE).expect("room for ten pages");
    backend.write(0, &[1; 10 * PAGE as usize]).expect("room for ten pages");
    let full = backend.set_len(11 * PAGE).expect_err("three pages are not the database's");
    assert_eq!(full.kind(), ErrorKind::StorageFull, "{full}");
    assert_eq!(backend.len().expect("a length"), 10 * PAGE);
    assert_eq!(read(&backend, 9 * PAGE, 4096), [1; 4096]);
}

#[test]
fn tables_of_others_are_refused() {
    let error = PoolBackend::new(&pool(PoolConfig::new(), ByteCount::mib(1)));
    assert!(matches!(error, Err(Error::Config { key, .. }) if key == "whole_pages"));
    let other = whole(ByteCount::mib(1));
    other.allocate().expect("a page").fill(7);
    assert!(matches!(PoolBackend::new(&other), Err(Error::Device { .. })));
    // Its first page is free, another one is not.
    let other = whole(ByteCount::mib(1));
    let first = other.allocate().expect("a page");
    drop(other.allocate().expect("a page"));
    first.free();
    assert!(matches!(PoolBackend::new(&other), Err(Error::Device { .. })));
}

#[test]
fn a_table_has_one_backend_at_a_time() {
    let pool = whole(ByteCount::mib(1));
    let first = PoolBackend::new(&pool).expect("a backend");
    let second = PoolBackend::new(&pool);
    assert!(matches!(second, Err(Error::Device { .. })), "{second:?}");
    drop(first);
    PoolBackend::new(&pool).expect("the table is free");
}

#[test]
fn only_the_whole_storage_can_be_locked() {
    let backend = PoolBackend::new(&whole(ByteCount::mib(1))).expect("a backend");
    let (all, end) = (Bound::Unbounded, Bound::Unbounded);
    assert!(backend.try_lock_range(all, end).expect("it is the pool's"));
    backend.unlock_range(all, end).expect("the same");
    let part = backend.try_lock_range(Bound::Included(4096), end);
    assert!(matches!(part, Err(BackendError::Unsupported)));
}
