//! Redo: pages are overwritten whatever they are, and numbers brought into use.
//!
//! Guards: G7.

#![expect(unsafe_code, reason = "damages a page behind the pool's back")]

use crate::common::PATIENCE;
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::{MemStore, Queue, Request, Store};
use farheap::{ByteCount, Error, PageId};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::{Arc, Barrier};

const PAGE: u64 = 4096;

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn store() -> Arc<MemStore> {
    Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"))
}

fn create(store: &Arc<MemStore>) -> Arc<BufferPool> {
    PoolConfig::new().create_on(Arc::clone(store) as _, &manager()).expect("pool")
}

fn reopen(store: &Arc<MemStore>, pool: Arc<BufferPool>) -> Arc<BufferPool> {
    drop(pool);
    PoolConfig::new().open_on(Arc::clone(store) as _, &manager()).expect("opens")
}

/// Pages 2, 3, ... that hold their numbers.
fn add(pool: &BufferPool, count: u64) {
    for _ in 0..count {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page.fill(id.0 as u8);
        page.set_lsn(id.0);
    }
}

fn assert_holds(pool: &BufferPool, page: u64) {
    let guard = pool.fix_shared(PageId(page)).expect("page");
    assert!(guard.iter().all(|byte| *byte == page as u8), "{page}");
    assert_eq!(guard.lsn(), page);
}

/// Overwrites a page, which is zeros before, with its number.
fn overwrite(pool: &BufferPool, page: u64) {
    let mut guard = pool.fix_to_overwrite(PageId(page)).expect("any page");
    assert_eq!((guard.id(), guard.lsn()), (PageId(page), 0));
    assert!(guard.iter().all(|byte| *byte == 0), "{page}");
    guard.fill(page as u8);
    guard.set_lsn(page);
}

fn in_use(pool: &BufferPool) -> Vec<u64> {
    pool.pages_in_use().map(|page| page.0).collect()
}

/// Fills a page's place on the store with a byte.
fn damage(store: &MemStore, page: u64) {
    #[repr(align(4096))]
    struct Aligned([u8; PAGE as usize]);
    let mut bytes = Box::new(Aligned([0x55; PAGE as usize]));
    let mut queue: Box<dyn Queue> = store.open_queue(1).expect("queue");
    let segments = [slice_from_raw_parts_mut(bytes.0.as_mut_ptr(), PAGE as usize)];
    let op = farheap::store::Op::Write;
    let request = Request { token: 0, op, offset: page * PAGE, segments: &segments };
    // SAFETY: the buffer outlives the wait below; the pool has the page neither in memory nor in flight.
    assert!(unsafe { queue.push(request) });
    let mut done = None;
    queue.wait(PATIENCE, &mut |_, result| done = Some(result)).expect("waits");
    assert_eq!(done, Some(Ok(())));
}

#[test]
fn a_page_is_overwritten_whether_it_is_resident_absent_or_damaged() {
    let store = store();
    let pool = create(&store);
    add(&pool, 4);
    pool.flush().expect("flush");
    overwrite(&pool, 2);
    pool.evict_all().expect("written");
    damage(&store, 3);
    for found in [pool.fix_shared(PageId(3)).map(drop), pool.fix_exclusive(PageId(3)).map(drop)] {
        assert!(matches!(found, Err(Error::CorruptPage { page: PageId(3), .. })), "{found:?}");
    }
    let read = pool.stats().pages_read;
    overwrite(&pool, 3);
    overwrite(&pool, 4);
    assert_eq!(pool.stats().pages_read, read, "nothing is read that is overwritten");
    pool.evict_all().expect("written");
    (2..6).for_each(|page| assert_holds(&pool, page));
    assert_eq!((in_use(&pool), pool.holders()), (vec![2, 3, 4, 5], 0));
}

#[test]
fn a_page_is_brought_into_use_free_or_beyond_the_end_and_what_lies_between_is_free() {
    let store = store();
    let pool = create(&store);
    add(&pool, 4);
    pool.fix_exclusive(PageId(3)).expect("page").free();
    pool.fix_exclusive(PageId(4)).expect("page").free();
    overwrite(&pool, 3);
    assert_eq!(in_use(&pool), [2, 3, 5]);
    overwrite(&pool, 1_500);
    assert_eq!((in_use(&pool), pool.pages()), (vec![2, 3, 5, 1_500], 1_501));
    pool.flush().expect("flush");
    let pool = reopen(&store, pool);
    assert_eq!((in_use(&pool), pool.pages()), (vec![2, 3, 5, 1_500], 1_501));
    [2, 3, 5, 1_500].into_iter().for_each(|page| assert_holds(&pool, page));
    // Each free page is given out once, before the table grows.
    let mut given: Vec<u64> = (0..1_495).map(|_| pool.allocate().expect("page").id().0).collect();
    given.sort_unstable();
    let free: Vec<u64> = (4..1_500).filter(|page| *page != 5).collect();
    assert_eq!(given, free);
    assert_eq!(pool.allocate().expect("page").id(), PageId(1_501));
}

#[test]
fn threads_that_take_one_number_follow_each_other() {
    const THREADS: usize = 4;
    const PAGES: std::ops::Range<u64> = 2..2_000;
    let store = store();
    let pool = create(&store);
    let barrier = Barrier::new(THREADS);
    let take = |thread: usize, page: u64| {
        // The first one brings it into use, the others find it there.
        let mut guard = pool.fix_to_overwrite(PageId(page))?;
        let is_zero = guard.iter().all(|byte| *byte == 0);
        guard.fill(page as u8);
        guard.set_lsn(page);
        if page.is_multiple_of(3) && thread == 0 {
            guard.free();
        }
        Ok::<bool, Error>(is_zero)
    };
    std::thread::scope(|scope| {
        let work = |thread: usize| {
            let take_all = PAGES.map(|page| {
                barrier.wait();
                take(thread, page)
            });
            take_all.collect::<Vec<_>>()
        };
        let threads: Vec<_> =
            (0..THREADS).map(|thread| scope.spawn(move || work(thread))).collect();
        for thread in threads {
            let taken = thread.join().expect("no panic");
            assert!(taken.iter().all(|taken| matches!(taken, Ok(true))), "{taken:?}");
        }
    });
    for page in PAGES.filter(|page| !page.is_multiple_of(3)) {
        assert_holds(&pool, page);
    }
}

#[test]
fn numbers_that_no_page_can_have_are_errors_and_change_nothing() {
    let store = store();
    let pool = create(&store);
    add(&pool, 1);
    let used = pool.account().used();
    for header in [0, 1] {
        let error = pool.fix_to_overwrite(PageId(header)).map(drop).expect_err("the header");
        assert!(matches!(error, Error::NoSuchPage { .. }), "{error}");
    }
    let room = (64 << 20) / PAGE;
    for page in [room, u64::MAX] {
        let result = pool.fix_to_overwrite(PageId(page)).map(drop);
        assert!(matches!(result, Err(Error::StoreFull { .. })), "{page}: {result:?}");
    }
    assert_eq!((in_use(&pool), pool.pages()), (vec![2], 3));
    assert_eq!(pool.account().used(), used);
    overwrite(&pool, room - 1);
    assert_holds(&pool, room - 1);
}
