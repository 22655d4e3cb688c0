//! Several tables in one pool: each has its own file, all share memory, victims and thread.
//!
//! Guards: G1, G5, G7.

use crate::common::child::alone;
use crate::common::faulty::FaultyStore;
use crate::common::power::PowerStore;
use crate::common::{Dice, PATIENCE, StopOnDrop, eventually, seed};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::{BlockStore, MemStore, Op};
use farheap::{ByteCount, Error, PageId};
use farheap_collections::pool::BTree;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const CAPACITY: ByteCount = ByteCount::mib(64);

fn manager(limit: ByteCount) -> Arc<MemoryManager> {
    let manager = MemoryManager::start(limit).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn config() -> PoolConfig {
    PoolConfig::new().huge_frames(false)
}

fn store() -> Arc<MemStore> {
    Arc::new(MemStore::new(CAPACITY).expect("store"))
}

/// Allocates pages that say which table they are of.
fn add(pool: &BufferPool, table: u8, count: usize) -> Vec<PageId> {
    let add = |_| {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page.fill(id.0 as u8 ^ table);
        id
    };
    (0..count).map(add).collect()
}

fn assert_holds(pool: &BufferPool, table: u8, pages: &[PageId]) {
    for page in pages {
        let guard = pool.fix_shared(*page).expect("page");
        assert!(guard.iter().all(|byte| *byte == page.0 as u8 ^ table), "{page} of {table}");
    }
}

/// What the tables say of memory is what is charged for their pool.
fn assert_sums_up(tables: &[&Arc<BufferPool>], shared: u64) {
    let of = |pool: &&Arc<BufferPool>| {
        let stats = pool.stats();
        stats.resident_bytes.get() + stats.metadata_bytes.get() + stats.fixed_bytes.get() - shared
    };
    let sum = tables.iter().map(of).sum::<u64>() + shared;
    assert_eq!(tables[0].account().used().get(), sum);
}

/// What a pool without tables costs: what all its tables count as theirs.
fn shared_bytes() -> u64 {
    let manager = manager(ByteCount::mib(16));
    let quiet = || config().cleaner(false);
    let one = quiet().create_on(store(), &manager).expect("pool");
    let used = one.account().used().get();
    let other = quiet().beside(&one).create_on(store(), &manager).expect("pool");
    let (all, own) = (one.account().used().get(), |pool: &BufferPool| {
        let stats = pool.stats();
        stats.metadata_bytes.get() + stats.fixed_bytes.get()
    });
    assert_eq!(own(&one), used);
    used + own(&other) - all
}

#[test]
fn tables_of_other_files_and_page_sizes_share_one_limit() {
    let manager = manager(ByteCount::mib(8));
    let dir = tempfile::tempdir().expect("directory");
    let at = |name: &str| dir.path().join(name);
    let quiet = || config().cleaner(false);
    let one = quiet().create(at("one"), CAPACITY, &manager).expect("pool");
    let large = quiet().beside(&one).page(ByteCount::kib(16));
    let large = large.create(at("large"), CAPACITY, &manager).expect("pool");
    let plain = quiet().beside(&large).checksum(false);
    let plain = plain.create(at("plain"), CAPACITY, &manager).expect("pool");
    assert_eq!(manager.consumers().len(), 2, "the pool and temporary memory");
    let (ones, larges, plains) = (add(&one, 1, 2_500), add(&large, 2, 600), add(&plain, 3, 2_500));
    for pool in [&one, &large, &plain] {
        assert!(pool.stats().evicted > 0, "{:?}", pool.stats());
        pool.flush().expect("flush");
    }
    assert_holds(&one, 1, &ones);
    assert_holds(&large, 2, &larges);
    assert_holds(&plain, 3, &plains);
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    assert_sums_up(&[&one, &large, &plain], shared_bytes());
    // The first one is not special.
    drop(one);
    assert_holds(&large, 2, &larges);
    assert_sums_up(&[&large, &plain], shared_bytes());
    let one = quiet().beside(&plain).open(at("one"), &manager).expect("closed");
    drop((large, plain));
    assert_holds(&one, 1, &ones);
    let large = quiet().beside(&one).page(ByteCount::kib(16)).read_only(true);
    let large = large.open(at("large"), &manager).expect("closed");
    assert_holds(&large, 2, &larges);
    let error = large.fix_exclusive(larges[0]).expect_err("only read");
    assert!(error.to_string().contains("large"), "{error}");
    drop(one.fix_exclusive(ones[0]).expect("changeable"));
}

#[test]
fn what_is_cold_leaves_whatever_table_it_is_of() {
    const HOT: usize = 400;
    let manager = manager(ByteCount::mib(6));
    let hot = config().cleaner(false).create_on(store(), &manager).expect("pool");
    let scanned = config().cleaner(false).beside(&hot).create_on(store(), &manager).expect("pool");
    let (hots, cold) = (add(&hot, 1, HOT), add(&scanned, 2, 4_000));
    hot.flush().expect("flush");
    scanned.flush().expect("flush");
    assert_holds(&hot, 1, &hots);
    let before = hot.stats().misses;
    for pages in cold.chunks(200).chain(cold.chunks(200)) {
        assert_holds(&hot, 1, &hots);
        assert_holds(&scanned, 2, pages);
    }
    // 40 rounds over 400 pages, which are a third of the memory.
    let missed = hot.stats().misses - before;
    assert!(missed <= HOT as u64, "{missed} misses of hot pages");
    assert!(scanned.stats().misses >= 4_000, "{:?}", scanned.stats());
}

#[test]
fn files_come_and_go_while_others_are_used() {
    let seed = seed("files_come_and_go");
    let (manager, dir) = (manager(ByteCount::mib(6)), tempfile::tempdir().expect("directory"));
    let main = config().create(dir.path().join("main"), CAPACITY, &manager).expect("pool");
    let tree = BTree::create(&main).expect("room");
    let stop = AtomicBool::new(false);
    let come_and_go = |thread: u64| {
        let path = dir.path().join(format!("table {thread}"));
        let (mut dice, table) = (Dice::new(seed ^ thread), thread as u8 + 1);
        let pool = config().beside(&main).create(&path, CAPACITY, &manager).expect("pool");
        let mut pages = add(&pool, table, 100);
        pool.flush().expect("flush");
        drop(pool);
        for _ in 0..15 {
            let pool = config().beside(&main).open(&path, &manager).expect("closed");
            assert_holds(&pool, table, &pages);
            pages.extend(add(&pool, table, dice.below(100) as usize));
            pool.prefetch(&pages);
            let gone = pages.split_off(pages.len().saturating_sub(dice.below(60) as usize));
            gone.iter().for_each(|page| pool.fix_exclusive(*page).expect("page").free());
            pool.flush().expect("flush");
        }
    };
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        let come_and_go = &come_and_go;
        let busy = scope.spawn(|| {
            let mut n = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let key = (n % 20_000).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes();
                tree.insert(&key, &[n as u8; 200]).expect("room");
                n += 1;
            }
            n
        });
        let threads: Vec<_> =
            (0..2).map(|thread| scope.spawn(move || come_and_go(thread))).collect();
        threads.into_iter().for_each(|thread| thread.join().expect("thread"));
        drop(others);
        println!("{} changes meanwhile", busy.join().expect("thread"));
    });
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    // What was dropped while a thread of the library used it is gone a moment later.
    let shared = shared_bytes();
    let is_alone = || {
        let stats = main.stats();
        let own = stats.resident_bytes.get() + stats.metadata_bytes.get() + stats.fixed_bytes.get();
        main.account().used().get() == own && own > shared
    };
    assert!(eventually(is_alone), "{:?} of {}", main.stats(), main.account().used());
}

#[test]
fn the_thread_works_for_each_table_and_ends_with_the_last() {
    let manager = manager(ByteCount::mib(8));
    let first = config().create_on(store(), &manager).expect("pool");
    let second = config().beside(&first).create_on(store(), &manager).expect("pool");
    drop(first);
    let third = config().beside(&second).create_on(store(), &manager).expect("pool");
    for (pool, table) in [(&second, 2), (&third, 3)] {
        let pages = add(pool, table, 50);
        pool.evict_all().expect("written");
        assert_eq!(pool.stats().resident_bytes, ByteCount::ZERO);
        pool.prefetch(&pages);
        let is_read = || pool.stats().resident_bytes == ByteCount(50 * 4096);
        assert!(eventually(is_read), "{:?}", pool.stats());
        assert_holds(pool, table, &pages);
    }
    // Nearly all of the memory is dirty pages that nobody changes any more.
    let pages = [(&second, 2), (&third, 3)].map(|(pool, table)| add(pool, table, 900));
    let is_clean = || [&second, &third].iter().all(|pool| pool.stats().pages_cleaned > 0);
    assert!(eventually(is_clean), "{:?} {:?}", second.stats(), third.stats());
    assert_holds(&second, 2, &pages[0]);
    drop((second, third));
    assert!(eventually(|| manager.stats().used_bytes == ByteCount::ZERO), "{:?}", manager.stats());
    assert_eq!(manager.consumers().len(), 1, "temporary memory is left");
}

#[test]
fn a_table_of_another_manager_is_refused_before_anything_is_overwritten() {
    let (one, other) = (manager(ByteCount::mib(8)), manager(ByteCount::mib(8)));
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let pool = config().create_on(store(), &one).expect("pool");
    let error = config().beside(&pool).create(&path, CAPACITY, &other);
    let error = error.map(drop).expect_err("another limit");
    assert!(matches!(error, Error::Config { .. }) && error.to_string().contains("manager"));
    assert!(!path.exists());
    let missing = config().beside(&pool).open(&path, &one).map(drop).expect_err("no file");
    assert!(missing.to_string().contains("does not exist"), "{missing}");
    assert_holds(&pool, 1, &add(&pool, 1, 10));
}

#[test]
fn each_error_names_the_file() {
    let (manager, dir) = (manager(ByteCount::mib(8)), tempfile::tempdir().expect("directory"));
    let path = |name: &str| dir.path().join(name);
    let one = config().create(path("orders"), CAPACITY, &manager).expect("pool");
    let other = config().beside(&one).create(path("items"), CAPACITY, &manager).expect("pool");
    let pages = [add(&one, 1, 20), add(&other, 2, 20)];
    other.flush().expect("flush");
    drop(other);
    let mut bytes = std::fs::read(path("items")).expect("file");
    bytes[pages[1][3].as_usize() * 4096 + 5] ^= 1;
    std::fs::write(path("items"), bytes).expect("file");
    let other = config().beside(&one).open(path("items"), &manager).expect("opens");
    let names = |error: Error, name: &str| {
        let text = error.to_string();
        assert!(text.contains(&*path(name).to_string_lossy()), "{text}");
    };
    names(other.fix_shared(pages[1][3]).expect_err("damaged"), "items");
    names(other.fix_shared(PageId(500)).expect_err("no page"), "items");
    names(one.fix_shared(PageId(500)).expect_err("no page"), "orders");
    let held = one.fix_exclusive(pages[0][0]).expect("page");
    let patience = std::time::Duration::from_millis(5);
    names(one.fix_shared_within(pages[0][0], patience).expect_err("held"), "orders");
    drop(held);
    assert_holds(&one, 1, &pages[0]);
}

/// Beside a table that is well, so that the file that is named is no guess.
#[test]
fn what_device_memory_or_log_refuse_is_said_with_the_file() {
    let (manager, dir) = (manager(ByteCount::mib(2)), tempfile::tempdir().expect("directory"));
    let path = |name: &str| dir.path().join(name);
    let quiet = || config().cleaner(false);
    let one = quiet().create(path("orders"), CAPACITY, &manager).expect("pool");
    let file = BlockStore::create(path("items"), Some(ByteCount::mib(4)), false).expect("file");
    let faulty = FaultyStore::new(Arc::new(file), 1);
    let control = faulty.control();
    let is_refusing = Arc::new(AtomicBool::new(false));
    let refuses = Arc::clone(&is_refusing);
    let log = move |_, _| match refuses.load(Ordering::SeqCst) {
        true => Err(Error::NotRunning),
        false => Ok(()),
    };
    let other = quiet().beside(&one).before_write(log);
    let other = other.create_on(Arc::new(faulty), &manager).expect("pool");
    let pages = [add(&one, 1, 20), add(&other, 2, 100)];
    let names = |error: Error| {
        let text = error.to_string();
        assert!(text.contains(&*path("items").to_string_lossy()), "{text}");
        assert!(!text.contains(&*path("orders").to_string_lossy()), "{text}");
        (error, text)
    };

    is_refusing.store(true, Ordering::SeqCst);
    let (error, _) = names(other.flush().expect_err("the log refuses"));
    assert!(matches!(error, Error::WriteRefused { .. }), "{error}");
    is_refusing.store(false, Ordering::SeqCst);

    control.fail_next(Op::Write, u64::MAX, libc::ENOSPC);
    let (error, _) = names(other.flush().expect_err("the device is full"));
    assert!(matches!(error, Error::Io { op: "write", errno: libc::ENOSPC, .. }), "{error}");

    // What cannot be written cannot leave: the error says which file that is, and why.
    manager.set_deadline(std::time::Duration::from_secs(1));
    let error = (0..1000).find_map(|_| other.allocate().err()).expect("2 MiB hold 512 pages");
    let (error, text) = names(error);
    assert!(matches!(&error, Error::OutOfMemory { by, .. } if by.contains("items")), "{error}");
    assert!(text.contains("No space left"), "{text}");
    control.heal();
    manager.set_deadline(PATIENCE);
    assert_holds(&other, 2, &pages[1]);

    let error = (0..2000).find_map(|_| other.allocate().err()).expect("4 MiB hold 1,024 pages");
    let (error, _) = names(error);
    assert!(matches!(error, Error::StoreFull { .. }), "{error}");

    other.evict_all().expect("the device is well again");
    control.fail_next(Op::Read, 1, libc::EIO);
    let (error, _) = names(other.fix_shared(pages[1][0]).expect_err("the device refuses"));
    assert!(matches!(error, Error::Io { op: "read", .. }), "{error}");

    control.fail_syncs(1, libc::EIO);
    names(other.flush().expect_err("the device does not say that it has all"));
    one.flush().expect("its device is well");
    assert_holds(&one, 1, &pages[0]);
    assert_holds(&other, 2, &pages[1]);
}

/// Bytes of the process in RAM, page tables included.
fn in_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("proc");
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    };
    field("RssAnon:") + field("VmPTE:")
}

#[test]
fn a_hundred_tables_cost_what_is_charged_for_them() {
    alone("a_hundred_tables_cost_what_is_charged_for_them", || {
        const TABLES: u8 = 100;
        let (manager, dir) = (manager(ByteCount::mib(64)), tempfile::tempdir().expect("directory"));
        let open = |n: u8, beside: Option<&BufferPool>| {
            let config = beside.map_or_else(config, |pool| config().beside(pool));
            config.create(dir.path().join(n.to_string()), CAPACITY, &manager).expect("pool")
        };
        let first = open(0, None);
        let (charged, used) = (first.account().used().get(), in_memory());
        let tables: Vec<_> = (1..=TABLES).map(|n| open(n, Some(&first))).collect();
        let pages: Vec<_> = (1..).zip(&tables).map(|(n, pool)| add(pool, n, 5)).collect();
        let charged = (first.account().used().get() - charged) / u64::from(TABLES);
        let used = in_memory().saturating_sub(used) / u64::from(TABLES);
        println!("a table of 5 pages: {charged} bytes charged, {used} used");
        // Other tests run beside this one.
        assert!(charged <= 200 << 10, "{charged} bytes a table");
        for ((n, pool), pages) in (1..).zip(&tables).zip(&pages) {
            assert_holds(pool, n, pages);
        }
    });
}

/// Four threads that read groups at once take a queue each, all but one of which are closed afterwards.
#[test]
fn queues_that_nobody_uses_any_more_are_closed_and_uncharged() {
    const THREADS: usize = 4;
    const GROUP: usize = 8;
    let faulty = FaultyStore::new(store(), 1);
    let control = faulty.control();
    let manager = manager(ByteCount::mib(8));
    let pool = config().cleaner(false).create_on(Arc::new(faulty), &manager).expect("pool");
    let pages = add(&pool, 1, THREADS * GROUP);
    pool.evict_all().expect("written, by one queue");
    let fixed = || pool.stats().fixed_bytes;
    let with_one = fixed();
    control.pause();
    let with_all = std::thread::scope(|scope| {
        for group in pages.chunks(GROUP) {
            scope.spawn(|| pool.fix_many(group).map(drop).expect("pages"));
        }
        let are_reading = eventually(|| control.held() == (THREADS * GROUP) as u64);
        let with_all = fixed();
        control.release();
        assert!(are_reading);
        with_all
    });
    let queue = (with_all.0 - with_one.0) / (THREADS as u64 - 1);
    println!("a queue: {queue} bytes");
    assert!((1..=32 << 10).contains(&queue), "{queue} bytes a queue");
    assert!(eventually(|| fixed() == with_one), "{with_one}, then {with_all}, now {}", fixed());
    assert_holds(&pool, 1, &pages);
}

/// Each call to either device fails in turn: it is an error of the table whose device it was, or none,
/// and the other table goes on.
#[test]
fn a_device_that_fails_harms_its_own_table_only() {
    let stores = [(); 2].map(|()| PowerStore::new(vec![0; 4 << 20]));
    let manager = manager(ByteCount::mib(2));
    let quiet = || config().cleaner(false);
    let whole = quiet().create_on(Arc::new(stores[0].clone()), &manager).expect("pool");
    let weak =
        quiet().beside(&whole).create_on(Arc::new(stores[1].clone()), &manager).expect("pool");
    let pages = [add(&whole, 1, 600), add(&weak, 2, 600)];
    whole.flush().expect("flush");
    weak.flush().expect("flush");
    let mut errors = 0;
    for call in 0..200 {
        stores[1].fail_at(Some(stores[1].calls() + call % 7));
        let page = pages[1][call as usize * 3 % 600];
        match weak.fix_exclusive(page) {
            Ok(mut guard) => guard.fill(page.0 as u8 ^ 2),
            Err(error) => {
                assert!(matches!(error, Error::Io { .. } | Error::Os { .. }), "{error}");
                errors += 1;
            }
        }
        // What it needs of the memory has to come from both.
        let at = call as usize * 7 % 500;
        assert_holds(&whole, 1, &pages[0][at..at + 100]);
        stores[1].fail_at(None);
    }
    println!("{errors} errors");
    assert!(errors > 0, "no read failed");
    whole.flush().expect("flush");
    assert_holds(&whole, 1, &pages[0]);
    assert_holds(&weak, 2, &pages[1]);
    weak.flush().expect("the device is well again");
}
