//! What can go wrong with a table's file or device, and what the pool says and does then.
//!
//! Guards: G5, G6, G9.

use crate::common::faulty::{FaultControl, FaultyStore};
use crate::common::hooked::Hooked;
use crate::common::{PATIENCE, eventually, inject_panic, place};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig, SharedGuard};
use farheap::store::{BlockStore, MemStore, Op, Store};
use farheap::{ByteCount, Error, PageId};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

/// How long a charge waits that must fail. One that must not fail has [`PATIENCE`]: on a machine with
/// many runnable processes a thread does nothing for much longer than this.
const SHORT: Duration = Duration::from_secs(1);

fn manager(limit: ByteCount) -> Arc<MemoryManager> {
    let manager = MemoryManager::start(limit).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn fill(pool: &BufferPool, count: u64) -> Vec<PageId> {
    (0..count)
        .map(|_| {
            let mut page = pool.allocate().expect("page");
            let id = page.id();
            page.fill(id.0 as u8);
            id
        })
        .collect()
}

fn assert_holds(pool: &BufferPool, id: PageId) {
    let page = pool.fix_shared(id).expect("page");
    assert!(page.iter().all(|byte| *byte == id.0 as u8), "{id}");
}

fn faulty_pool(limit: ByteCount, config: PoolConfig) -> (Arc<BufferPool>, FaultControl) {
    let faulty = FaultyStore::new(Arc::new(MemStore::new(ByteCount::mib(64)).expect("store")), 1);
    let control = faulty.control();
    let pool = config.create_on(Arc::new(faulty), &manager(limit)).expect("pool");
    (pool, control)
}

#[test]
fn a_write_that_fails_leaves_the_page_dirty_and_a_later_flush_succeeds() {
    let config = PoolConfig::new().cleaner(false);
    let (pool, control) = faulty_pool(ByteCount::mib(8), config);
    let ids = fill(&pool, 500);
    control.fail_next(Op::Write, 3, 5);
    let error = pool.flush().expect_err("the device refused");
    assert!(matches!(error, Error::Io { op: "write", .. }), "{error}");
    assert!(pool.stats().write_errors > 0);
    // The pages may have been written by fewer requests than were to fail.
    control.heal();
    let written = pool.stats().pages_written;
    pool.flush().expect("the device is well again");
    assert!(pool.stats().pages_written > written, "what failed was written now");
    pool.evict_all().expect("clean");
    assert_eq!(pool.stats().resident_bytes, ByteCount::ZERO);
    ids.iter().for_each(|id| assert_holds(&pool, *id));
}

#[test]
fn a_device_that_refuses_writes_loses_no_page_and_memory_runs_out_instead() {
    let (pool, control) = faulty_pool(ByteCount::mib(2), PoolConfig::new());
    let ids = fill(&pool, 300);
    control.fail_next(Op::Write, u64::MAX, 5);
    pool.manager().set_deadline(SHORT);
    let mut more = Vec::new();
    let error = loop {
        match pool.allocate() {
            Ok(mut page) => {
                more.push(page.id());
                let number = page.id().0 as u8;
                page.fill(number);
            }
            Err(error) => break error,
        }
        assert!(more.len() < 1000, "2 MiB hold 512 pages");
    };
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    control.heal();
    pool.manager().set_deadline(PATIENCE);
    ids.iter().chain(&more).for_each(|id| assert_holds(&pool, *id));
    fill(&pool, 1000);
    ids.iter().chain(&more).for_each(|id| assert_holds(&pool, *id));
}

#[test]
fn charges_wait_together_while_the_device_refuses_writes() {
    const REFUSED: usize = 20;
    let deadline = Duration::from_secs(2);
    let (pool, control) = faulty_pool(ByteCount::mib(2), PoolConfig::new());
    fill(&pool, 300);
    control.fail_next(Op::Write, u64::MAX, libc::ENOSPC);
    pool.manager().set_deadline(deadline);
    let mut waits = Vec::new();
    while waits.len() < REFUSED {
        let began = Instant::now();
        match pool.allocate() {
            Ok(mut page) => page.fill(7),
            Err(Error::OutOfMemory { consumers, .. }) => {
                assert!(consumers.contains("os error 28"), "{consumers}");
                waits.push(began.elapsed());
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(waits.iter().sum::<Duration>() >= deadline, "given up after {waits:?}");
    // Each of the others is refused at once: even where a thread does not run for seconds, not half of them wait.
    let long = waits.iter().filter(|wait| **wait >= deadline / 2).count();
    assert!(long < REFUSED / 2, "waited {waits:?}");
    control.heal();
    fill(&pool, 1000);
}

#[test]
fn a_read_that_fails_is_an_error_and_the_next_one_succeeds() {
    let (pool, control) = faulty_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 100);
    pool.evict_all().expect("written");
    control.fail_next(Op::Read, 2, 5);
    assert!(matches!(pool.fix_shared(ids[3]), Err(Error::Io { op: "read", .. })));
    assert!(matches!(pool.fix_many(&ids[10..20]), Err(Error::Io { .. })));
    assert!(eventually(|| pool.holders() == 0));
    ids.iter().for_each(|id| assert_holds(&pool, *id));
}

#[test]
fn a_flush_that_waits_in_vain_has_written_what_came_before_and_holds_nothing() {
    let config = PoolConfig::new().cleaner(false).deadline(Duration::from_millis(50));
    let (pool, _) = faulty_pool(ByteCount::mib(8), config);
    let ids = fill(&pool, 2);
    let held = pool.fix_exclusive(ids[1]).expect("page");
    let error = pool.flush().expect_err("a page is held");
    assert!(matches!(error, Error::LatchTimeout { page, .. } if page == ids[1]), "{error}");
    assert_eq!(pool.stats().pages_written, 1);
    drop(held);
    drop(pool.fix_exclusive(ids[0]).expect("nobody holds it"));
    pool.evict_all().expect("nothing is held");
    assert_eq!((pool.stats().pages_written, pool.stats().resident_bytes), (2, ByteCount::ZERO));
}

#[test]
fn a_flush_lets_go_of_what_it_holds_before_it_waits() {
    let (pool, _) = faulty_pool(ByteCount::mib(8), PoolConfig::new().cleaner(false));
    let ids = fill(&pool, 2);
    // A thread that changes a tree holds a node and waits for a child, which may come earlier.
    let node = pool.fix_exclusive(ids[1]).expect("page");
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| pool.flush());
        let written = eventually(|| pool.stats().pages_written == 1);
        let child = pool.fix_exclusive(ids[0]).map(drop);
        drop(node);
        flush.join().expect("no panic").expect("nobody holds a page for long");
        assert!(written, "the flush waits with a page held");
        child.expect("the flush does not hold it");
    });
}

#[test]
fn of_two_flushes_the_later_header_stays() {
    // The first write of a header that the test asks for waits until it is told to go on.
    let (began, begins) = mpsc::channel();
    let (go, gate) = mpsc::channel::<()>();
    let (is_armed, gate) = (Arc::new(AtomicBool::new(false)), Mutex::new(gate));
    let armed = Arc::clone(&is_armed);
    let memory = Arc::new(MemStore::new(ByteCount::mib(16)).expect("store"));
    let store = Hooked::new(Arc::clone(&memory), move |op, offset| {
        if op == Op::Write && offset == 0 && armed.swap(false, Ordering::SeqCst) {
            began.send(()).expect("the test waits");
            let _ = gate.lock().expect("one waits").recv();
        }
    });
    let manager = manager(ByteCount::mib(8));
    let pool = PoolConfig::new().cleaner(false).create_on(store, &manager).expect("pool");
    let id = fill(&pool, 1)[0];
    pool.fix_exclusive(id).expect("page").free();
    std::thread::scope(|scope| {
        is_armed.store(true, Ordering::SeqCst);
        let first = scope.spawn(|| pool.flush());
        begins.recv_timeout(PATIENCE).expect("the first flush has seen a free page");
        assert_eq!(fill(&pool, 1), [id]);
        let second = scope.spawn(|| pool.flush());
        // Time for the second to overtake the first, which it must not.
        let began = Instant::now();
        while !second.is_finished() && began.elapsed() < Duration::from_millis(200) {
            std::thread::sleep(Duration::from_millis(1));
        }
        go.send(()).expect("the first flush waits");
        first.join().expect("no panic").expect("flush");
        second.join().expect("no panic").expect("flush");
    });
    drop(pool);
    let pool = PoolConfig::new().open_on(memory, &manager).expect("opens");
    assert_holds(&pool, id);
    assert_ne!(pool.allocate().expect("page").id(), id);
}

#[test]
fn a_page_is_in_the_table_when_it_is_locked_for_who_allocates_it_and_not_before() {
    // A thread allocates the first page of a chunk, whose words need memory for which a page has to
    // be written, and waits in the log.
    let (asked, asks) = mpsc::channel();
    let (go, gate) = mpsc::channel::<()>();
    let (is_armed, gate) = (Arc::new(AtomicBool::new(false)), Mutex::new(gate));
    let armed = Arc::clone(&is_armed);
    let config = PoolConfig::new().cleaner(false).before_write(move |_, _| {
        if armed.swap(false, Ordering::SeqCst) {
            asked.send(()).expect("the test waits");
            let _ = gate.lock().expect("one waits").recv();
        }
        Ok(())
    });
    let manager = MemoryManager::start(ByteCount::mib(5)).expect("manager");
    manager.set_deadline(PATIENCE);
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let pool = config.create_on(store, &manager).expect("pool");
    // The manager has enough free always, so that nobody evicts in the background.
    pool.account().set_ceiling(ByteCount::mib(4));
    let ids = fill(&pool, 1022);
    pool.evict_all().expect("written");
    manager.set_deadline(SHORT);
    let mut held: Vec<_> = ids.iter().map_while(|id| pool.fix_shared(*id).ok()).collect();
    held.pop();
    pool.evict_all().expect("room for a page");
    let dirty = held.pop().expect("a page").id();
    pool.fix_exclusive(dirty).expect("page").set_lsn(1);
    let clean = held.pop();
    manager.set_deadline(PATIENCE);
    is_armed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let allocates = scope.spawn(|| pool.allocate().map(|page| page.id()));
        asks.recv_timeout(PATIENCE).expect("it needs memory");
        drop(clean);
        let early = pool.fix_shared(PageId(1024)).map(drop);
        go.send(()).expect("it waits");
        drop(held);
        assert_eq!(allocates.join().expect("no panic"), Ok(PageId(1024)));
        assert!(matches!(early, Err(Error::NoSuchPage { .. })), "{early:?}");
    });
}

#[test]
fn the_log_is_asked_before_every_write_and_what_it_refuses_stays() {
    let durable = Arc::new(AtomicU64::new(0));
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (log, seen) = (Arc::clone(&durable), Arc::clone(&asked));
    let config = PoolConfig::new().before_write(move |page, lsn| {
        seen.lock().expect("no panic").push((page, lsn));
        if lsn <= log.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(Error::Device {
            path: page.to_string().into(),
            reason: "no room in the log".to_owned(),
        })
    });
    let (pool, _) = faulty_pool(ByteCount::mib(4), config);
    let ids = fill(&pool, 400);
    for id in &ids {
        pool.fix_exclusive(*id).expect("page").set_lsn(id.0);
    }
    // The cleaner may have written some of them before they had one.
    asked.lock().expect("no panic").clear();
    durable.store(200, Ordering::SeqCst);
    // Cleaner, eviction and checkpoint all ask; pages with a record beyond 200 cannot leave.
    let beyond: Vec<PageId> = ids.iter().copied().filter(|id| id.0 > 200).collect();
    let refusal = |result: Result<(), Error>| match result.expect_err("the others stay") {
        Error::WriteRefused { pages, first, reason, .. } => {
            assert!(beyond.contains(&first), "{first}");
            assert!(reason.contains(&first.to_string()), "{reason}");
            pages
        }
        other => panic!("{other}"),
    };
    assert_eq!(refusal(pool.flush()), beyond.len() as u64);
    assert_eq!(refusal(pool.evict_all()), beyond.len() as u64);
    assert!(pool.stats().write_refusals >= 2 * beyond.len() as u64);
    let resident = pool.stats().resident_bytes.get() / 4096;
    assert_eq!(resident, beyond.len() as u64);
    let written = pool.stats().pages_written;
    assert!(written >= 199, "{written}");
    assert!(asked.lock().expect("no panic").iter().all(|(page, lsn)| page.0 == *lsn));
    durable.store(u64::MAX, Ordering::SeqCst);
    pool.evict_all().expect("nothing stays");
    assert_eq!(pool.stats().resident_bytes, ByteCount::ZERO);
    assert_eq!(pool.fix_shared(ids[300]).expect("page").lsn(), ids[300].0);
}

/// Ends all panics but the first `count` of a hook.
fn panics(left: &AtomicU64) -> bool {
    let take = |left: u64| left.checked_sub(1);
    left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
}

/// A pool whose log panics when it is asked first.
fn pool_of_a_bad_log(config: PoolConfig) -> Arc<BufferPool> {
    let left = AtomicU64::new(1);
    let config = config.before_write(move |page, _| {
        if panics(&left) {
            println!("{page}: injected panic");
            inject_panic();
        }
        Ok(())
    });
    faulty_pool(ByteCount::mib(2), config).0
}

#[test]
fn a_log_that_panics_refuses_that_page_only() {
    let pool = pool_of_a_bad_log(PoolConfig::new().cleaner(false));
    let ids = fill(&pool, 10);
    let error = pool.flush().expect_err("a page is left out");
    assert!(matches!(error, Error::WriteRefused { pages: 1, .. }), "{error}");
    assert!(error.to_string().contains("panic"), "{error}");
    assert_eq!((pool.stats().pages_written, pool.stats().write_refusals), (9, 1));
    pool.evict_all().expect("it is well again, and nothing is held");
    assert_eq!((pool.stats().pages_written, pool.stats().resident_bytes), (10, ByteCount::ZERO));
    ids.iter().for_each(|id| assert_holds(&pool, *id));
}

#[test]
fn the_cleaner_survives_a_log_that_panics() {
    let pool = pool_of_a_bad_log(PoolConfig::new());
    fill(&pool, 10);
    // The cleaner writes what rests when memory is nearly used up.
    let ballast = pool.manager().join("ballast").expect("account");
    let (limit, used) = (pool.manager().limit().get(), pool.manager().stats().used_bytes.get());
    assert!(ballast.try_charge(ByteCount(limit - used - limit / 32)));
    let cleaned = || pool.stats().write_refusals == 1 && pool.stats().pages_cleaned >= 10;
    assert!(eventually(cleaned), "{:?}", pool.stats());
}

#[test]
fn a_log_that_panics_while_memory_is_reclaimed_does_not_end_reclaiming() {
    let pool = pool_of_a_bad_log(PoolConfig::new().cleaner(false));
    // Memory comes when the thread that reclaims has had a processor.
    pool.manager().set_deadline(crate::common::PATIENCE);
    let ids = fill(&pool, 2000);
    assert_eq!(pool.stats().write_refusals, 1);
    ids.iter().for_each(|id| assert_holds(&pool, *id));
}

#[test]
fn a_store_that_panics_while_a_page_is_read_fails_that_read_only() {
    let left = Arc::new(AtomicU64::new(0));
    let armed = Arc::clone(&left);
    let memory = Arc::new(MemStore::new(ByteCount::mib(16)).expect("store"));
    let store = Hooked::new(memory, move |op, offset| {
        if op == Op::Read && panics(&armed) {
            println!("{offset}: injected panic");
            inject_panic();
        }
    });
    let manager = manager(ByteCount::mib(8));
    let pool = PoolConfig::new().cleaner(false).create_on(store, &manager).expect("pool");
    let id = fill(&pool, 1)[0];
    pool.evict_all().expect("written");
    let used = pool.account().used();
    left.store(1, Ordering::SeqCst);
    let error = pool.fix_shared(id).expect_err("the read failed");
    assert!(matches!(error, Error::Io { op: "read", .. }), "{error}");
    assert_eq!((pool.holders(), pool.account().used()), (0, used));
    assert_holds(&pool, id);
}

/// Absent pages, and as many held pages as leave memory for one more. The absent ones need more than the
/// queues that are closed when nobody has used them for a second.
fn nearly_full(pool: &BufferPool) -> (Vec<PageId>, Vec<SharedGuard<'_>>) {
    let mut ids = fill(pool, 1000);
    pool.evict_all().expect("written");
    let others = ids.split_off(64);
    pool.manager().set_deadline(SHORT);
    let mut held: Vec<_> = others.iter().map_while(|id| pool.fix_shared(*id).ok()).collect();
    held.pop();
    pool.evict_all().expect("nothing is dirty");
    assert_eq!(pool.stats().resident_bytes.get(), held.len() as u64 * 4096);
    (ids, held)
}

#[test]
fn a_page_that_is_prefetched_does_not_wait_for_memory_for_the_next() {
    let config = PoolConfig::new().cleaner(false).huge_frames(false);
    let (pool, _) = faulty_pool(ByteCount::mib(2), config);
    let (absent, held) = nearly_full(&pool);
    pool.manager().set_deadline(PATIENCE);
    let misses = pool.stats().misses;
    pool.prefetch(&absent);
    assert!(eventually(|| pool.stats().misses > misses), "{:?}", pool.stats());
    let page = pool.fix_shared_within(absent[0], PATIENCE);
    assert_eq!(page.expect("read, and let go").id(), absent[0]);
    drop(held);
}

#[test]
fn a_group_of_pages_waits_for_memory_once() {
    let config = PoolConfig::new().cleaner(false).huge_frames(false);
    let (pool, _) = faulty_pool(ByteCount::mib(2), config);
    let (absent, held) = nearly_full(&pool);
    let failed = pool.manager().stats().failed;
    let error = pool.fix_many(&absent).expect_err("there is memory for one");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    assert_eq!(pool.manager().stats().failed, failed + 1);
    assert_eq!(pool.holders(), held.len() as u64);
    pool.manager().set_deadline(PATIENCE);
    std::thread::scope(|scope| {
        let claims = || pool.manager().stats().direct;
        let before = claims();
        let group = scope.spawn(|| pool.fix_many(&absent).map(|guards| guards.len()));
        let has_met_the_lack_of_memory = eventually(|| claims() > before);
        drop(held);
        assert!(has_met_the_lack_of_memory);
        assert_eq!(group.join().expect("no panic"), Ok(absent.len()));
    });
}

#[test]
fn a_new_table_takes_the_place_of_nothing_that_anybody_would_miss() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let (manager, capacity) = (manager(ByteCount::mib(8)), ByteCount::mib(8));
    let create = |config: PoolConfig| config.create(&path, capacity, &manager);
    let refused = |config: PoolConfig, what: &str| {
        let before = std::fs::read(&path).expect("file");
        let error = create(config).expect_err(what).to_string();
        assert!(error.contains(what) && error.contains("overwrite"), "{error}");
        assert!(std::fs::read(&path).expect("file") == before, "{what}: it was changed");
    };
    let mut data = vec![0; 8 << 20];
    data[7 << 20] = 1;
    std::fs::write(&path, &data).expect("written");
    refused(PoolConfig::new(), "holds data at byte 7340032, which would be lost");
    let pool = create(PoolConfig::new().overwrite(true)).expect("allowed");
    let ids = fill(&pool, 100);
    pool.flush().expect("flush");
    drop(pool);
    refused(PoolConfig::new(), "holds data at byte 0");
    // A mistake in the settings costs no data either.
    let wrong = || PoolConfig::new().overwrite(true).page(ByteCount(5000));
    create(wrong()).expect_err("page size");
    let pool = PoolConfig::new().open(&path, &manager).expect("as it was");
    ids.iter().for_each(|id| assert_holds(&pool, *id));
    drop(pool);
    let pool = create(PoolConfig::new().overwrite(true)).expect("allowed");
    assert_eq!(pool.pages(), 2);
    drop(pool);
    // What an earlier run evicted nobody misses, but a table is no place to evict to.
    BlockStore::scratch(&path, None, false).expect_err("a table");
    drop(BlockStore::scratch(&path, None, true).expect("allowed"));
    drop(create(PoolConfig::new()).expect("free"));
}

/// Each of two pools would overwrite the other's pages.
#[test]
fn a_table_has_one_pool_at_a_time() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let (manager, capacity) = (manager(ByteCount::mib(8)), ByteCount::mib(8));
    let refused = |second: farheap::Result<Arc<BufferPool>>| match second {
        Err(Error::Device { reason, .. }) => assert!(reason.contains("another"), "{reason}"),
        other => panic!("a second pool on one table: {other:?}"),
    };
    let store: Arc<dyn Store> = Arc::new(MemStore::new(capacity).expect("store"));
    let pool = PoolConfig::new().create_on(Arc::clone(&store), &manager).expect("pool");
    let ids = fill(&pool, 100);
    refused(PoolConfig::new().create_on(Arc::clone(&store), &manager));
    pool.flush().expect("the store takes all");
    pool.evict_all().expect("nothing is dirty");
    refused(PoolConfig::new().open_on(Arc::clone(&store), &manager));
    ids.iter().for_each(|id| assert_holds(&pool, *id));
    drop(pool);
    let pool = PoolConfig::new().open_on(store, &manager).expect("the store is free");
    ids.iter().for_each(|id| assert_holds(&pool, *id));

    let _named = PoolConfig::new().create(&path, capacity, &manager).expect("pool");
    refused(PoolConfig::new().overwrite(true).create(&path, capacity, &manager));
    refused(PoolConfig::new().open(&path, &manager));
}

#[test]
fn what_is_no_table_is_refused_with_advice_for_who_opens_one() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    let said = |read_only| {
        let config = PoolConfig::new().read_only(read_only);
        config.open(&path, &manager).expect_err("no table").to_string()
    };
    for read_only in [false, true] {
        let missing = said(read_only);
        assert!(missing.contains("does not exist") && !missing.contains("capacity"), "{missing}");
    }
    std::fs::write(&path, vec![7; 800_000]).expect("a file");
    for read_only in [false, true] {
        let garbage = said(read_only);
        assert!(garbage.contains("has 800000 bytes, but 1.0 MiB are needed"), "{garbage}");
        assert!(garbage.contains("another file") && !garbage.contains("extend"), "{garbage}");
    }
}

#[test]
fn a_table_that_cannot_be_written_is_refused_when_it_is_opened() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    drop(PoolConfig::new().create(&path, ByteCount::mib(8), &manager).expect("pool"));
    let mut allowed = std::fs::metadata(&path).expect("file").permissions();
    allowed.set_readonly(true);
    std::fs::set_permissions(&path, allowed).expect("own file");
    if std::fs::OpenOptions::new().write(true).open(&path).is_ok() {
        println!("skipped: this user may write read-only files");
        return;
    }
    let error = PoolConfig::new().open(&path, &manager).expect_err("read-only");
    assert!(error.to_string().contains(path.to_str().expect("UTF-8")), "{error}");
}

#[test]
fn a_page_that_is_shorter_on_the_device_than_in_the_header_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    let pool = PoolConfig::new().create(&path, ByteCount::mib(8), &manager).expect("pool");
    fill(&pool, 1500);
    pool.flush().expect("flush");
    drop(pool);
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("file");
    file.set_len(4 << 20).expect("truncated");
    let error = PoolConfig::new().open(&path, &manager).expect_err("short");
    assert!(error.to_string().contains("1502 pages, but room for 1024"), "{error}");
}

/// Fills a table, opens it again and looks.
fn round_trip(path: &Path, capacity: ByteCount) {
    let manager = manager(ByteCount::mib(4));
    let pool = PoolConfig::new().create(path, capacity, &manager).expect("pool");
    let ids = fill(&pool, 3000);
    pool.flush().expect("flush");
    drop(pool);
    let pool = PoolConfig::new().open(path, &manager).expect("opens");
    ids.iter().for_each(|id| assert_holds(&pool, *id));
    let group: Vec<PageId> = ids.iter().step_by(11).copied().collect();
    assert_eq!(pool.fix_many(&group).expect("group").len(), group.len());
}

#[test]
fn a_raw_block_device_holds_a_table() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = dir.path().join("disk");
    let file = std::fs::File::create(&backing).expect("file");
    file.set_len(32 << 20).expect("length");
    let Some(device) = place::LoopDevice::attach(&backing, &[]) else { return };
    round_trip(device.path(), ByteCount::mib(32));
}

/// A program that wants no file to stay opens its table so.
#[test]
fn a_table_whose_file_has_no_name_can_be_flushed() {
    let (file, capacity) =
        (tempfile::tempfile().expect("a file without a name"), ByteCount::mib(16));
    file.set_len(capacity.0).expect("an empty file");
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    round_trip(Path::new(&path), capacity);
}

#[test]
fn a_read_only_device_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = dir.path().join("disk");
    let manager = manager(ByteCount::mib(4));
    drop(PoolConfig::new().create(&backing, ByteCount::mib(8), &manager).expect("pool"));
    let Some(device) = place::LoopDevice::attach(&backing, &["--read-only"]) else { return };
    let error = PoolConfig::new().open(device.path(), &manager).expect_err("read-only");
    assert!(matches!(error, Error::Device { .. }), "{error}");
}

#[test]
fn metadata_follows_what_is_resident_and_lies_within_the_limit() {
    // A table of 64 GiB in a file with holes, of which a few places are touched.
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    let pool = PoolConfig::new().create(&path, ByteCount::gib(64), &manager).expect("pool");
    let untouched = pool.stats().metadata_bytes;
    assert!(untouched <= ByteCount::kib(64), "{untouched} for nothing");
    fill(&pool, 512);
    let some = pool.stats().metadata_bytes.get() - untouched.get();
    assert!(some > 0 && some <= 3 * 8192, "{some} for one 2 MiB");
    fill(&pool, 512 * 20);
    let more = pool.stats().metadata_bytes.get() - untouched.get();
    // Three quarters of the limit are resident at least; words and page tables of 2 MiB take 8 KiB. A
    // 64th of the limit is kept for what was resident before.
    let most = 9 * 8192 + manager.limit().get() / 64;
    assert!((3 * 8192..=most).contains(&more), "{more} after {some}");
    // The pool's own thread still evicts: the two counts are not of one moment.
    let agree = || {
        let (used, stats) = (manager.stats().used_bytes.get(), pool.stats());
        used == stats.resident_bytes.get() + stats.metadata_bytes.get() + stats.fixed_bytes.get()
    };
    assert!(eventually(agree), "{:?} in use, {:?}", manager.stats().used_bytes, pool.stats());
    assert!(manager.stats().used_bytes_max <= manager.limit());
}
