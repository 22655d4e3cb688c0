//! A table whose last pages are freed becomes smaller, and so does its file.
//!
//! Guards: G3, G7.

use crate::common::{Dice, PATIENCE, StopOnDrop, amount, seed};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::{ByteCount, Error, PageId};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const CAPACITY: ByteCount = ByteCount::mib(64);

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(8)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

/// Allocates pages that hold their numbers.
fn add(pool: &BufferPool, count: usize) -> Vec<PageId> {
    let add = |_| {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page.fill(id.0 as u8);
        id
    };
    (0..count).map(add).collect()
}

fn free(pool: &BufferPool, pages: &[PageId]) {
    pages.iter().for_each(|page| pool.fix_exclusive(*page).expect("page").free());
}

fn assert_holds(pool: &BufferPool, pages: &[PageId]) {
    for page in pages {
        let guard = pool.fix_shared(*page).expect("page");
        assert!(guard.iter().all(|byte| *byte == page.0 as u8), "{page}");
    }
}

fn occupied(path: &Path) -> u64 {
    std::fs::metadata(path).expect("file").blocks() * 512
}

#[test]
fn a_flush_gives_the_space_of_free_pages_at_the_end_back() {
    let dir = tempfile::tempdir().expect("directory");
    let (path, manager) = (dir.path().join("table"), manager());
    let pool = PoolConfig::new().create(&path, CAPACITY, &manager).expect("pool");
    let pages = add(&pool, 4000);
    pool.flush().expect("flush");
    let full = occupied(&path);
    assert!(full >= 4000 * 4096, "{full}");
    // One page in use keeps what lies before it.
    let (kept, last) = (&pages[..1000], pages[2000]);
    let freed: Vec<PageId> = pages[1000..].iter().copied().filter(|page| *page != last).collect();
    free(&pool, &freed);
    assert_eq!(pool.pages(), 4002, "not before a flush");
    pool.flush().expect("flush");
    assert_eq!(pool.pages(), last.0 + 1);
    assert!(matches!(pool.fix_shared(pages[3000]), Err(Error::NoSuchPage { .. })));
    free(&pool, &[last]);
    pool.flush().expect("flush");
    assert_eq!(pool.pages(), 1002);
    let small = occupied(&path);
    assert!(small <= 1200 * 4096, "{small} of {full} bytes");
    assert_holds(&pool, kept);
    // It grows again, from where it ends now.
    let again = add(&pool, 500);
    assert_eq!(again.first(), Some(&PageId(1002)));
    pool.flush().expect("flush");
    drop(pool);
    let pool = PoolConfig::new().open(&path, &manager).expect("opens");
    assert_eq!(pool.pages(), 1502);
    assert_holds(&pool, kept);
    assert_holds(&pool, &again);
}

#[test]
fn a_table_of_pages_that_are_all_freed_is_a_header() {
    let dir = tempfile::tempdir().expect("directory");
    let (path, manager) = (dir.path().join("table"), manager());
    let pool = PoolConfig::new().create(&path, CAPACITY, &manager).expect("pool");
    let pages = add(&pool, 3_000);
    pool.flush().expect("flush");
    free(&pool, &pages);
    pool.flush().expect("flush");
    assert_eq!(pool.pages(), 2);
    assert_eq!(pool.pages_in_use().count(), 0);
    assert_holds(&pool, &add(&pool, 10));
}

#[test]
fn threads_allocate_and_free_while_the_table_is_cut() {
    let seed = seed("threads_allocate_and_free");
    let dir = tempfile::tempdir().expect("directory");
    let (path, manager) = (dir.path().join("table"), manager());
    let pool = PoolConfig::new().create(&path, CAPACITY, &manager).expect("pool");
    let stop = AtomicBool::new(false);
    let work = |thread: u64| {
        let (mut dice, mut mine) = (Dice::new(seed ^ thread), Vec::new());
        for _ in 0..200 {
            mine.extend(add(&pool, 1 + dice.below(40) as usize));
            // The last ones go, often all of them: the table's end moves to and fro.
            let kept = dice.below(mine.len() as u64 + 1) as usize;
            assert_holds(&pool, &mine);
            free(&pool, &mine.split_off(if dice.below(3) == 0 { 0 } else { kept }));
        }
        mine
    };
    let mine = std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        let work = &work;
        let flusher = scope.spawn(|| {
            let mut cuts = 0;
            while !stop.load(Ordering::Relaxed) {
                let before = pool.pages();
                pool.flush().expect("flush");
                cuts += u64::from(pool.pages() < before);
            }
            cuts
        });
        let workers: Vec<_> = (0..3).map(|thread| scope.spawn(move || work(thread))).collect();
        let mine: Vec<_> = workers.into_iter().flat_map(|w| w.join().expect("worker")).collect();
        drop(others);
        println!("cut {} times", flusher.join().expect("flusher"));
        mine
    });
    pool.flush().expect("flush");
    let end = mine.iter().map(|page| page.0 + 1).max().unwrap_or(2);
    assert_eq!(pool.pages(), end);
    assert_eq!(pool.pages_in_use().count(), mine.len());
    drop(pool);
    let pool = PoolConfig::new().open(&path, &manager).expect("opens");
    assert_eq!(pool.pages_in_use().count(), mine.len());
    assert_holds(&pool, &mine);
}

#[test]
fn what_the_table_loses_costs_nothing_of_the_limit_any_more() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    // So much that eviction keeps all words: a 64th is more than they take.
    let manager = MemoryManager::start(ByteCount::mib(32)).expect("manager");
    manager.set_deadline(PATIENCE);
    let config = || PoolConfig::new().cleaner(false).huge_frames(false);
    let pool = config().create(&path, CAPACITY, &manager).expect("pool");
    let kept = add(&pool, 100);
    let before = pool.stats().metadata_bytes.get();
    for round in 0..3 {
        let mut pages = add(&pool, 12_640);
        let large = pool.stats().metadata_bytes.get();
        assert!(large >= before + 24 * 4096, "{large} after {before}");
        free(&pool, &pages.split_off(if round == 2 { 5_000 } else { 0 }));
        pool.flush().expect("flush");
        let small = pool.stats().metadata_bytes.get();
        // Of 12,640 pages 5,000 stay in the last round. Before Linux 6.14 the kernel keeps page tables.
        let chunks = if round == 2 { 13 } else { 23 };
        assert!(small + chunks * 4096 <= large, "{small} of {large}, {before} before");
        assert_holds(&pool, &kept);
        assert_holds(&pool, &pages);
    }
    let stats = pool.stats();
    let sum = stats.resident_bytes.get() + stats.metadata_bytes.get() + stats.fixed_bytes.get();
    assert_eq!(pool.account().used().get(), sum);
}

#[test]
fn free_pages_that_the_file_names_are_charged_when_it_is_opened() {
    let dir = tempfile::tempdir().expect("directory");
    let (path, manager) = (dir.path().join("table"), manager());
    let pool = PoolConfig::new().create(&path, CAPACITY, &manager).expect("pool");
    let pages = add(&pool, 8_000);
    free(&pool, &pages[..7_000]);
    pool.flush().expect("flush");
    drop(pool);
    let pool = PoolConfig::new().open(&path, &manager).expect("opens");
    let metadata = pool.stats().metadata_bytes.get();
    assert!(metadata >= 13 * 4096, "{metadata} for the words of 7,000 free pages");
    assert_holds(&pool, &pages[7_000..]);
}

#[test]
fn a_page_behind_the_end_is_never_read_while_the_table_moves_its_end() {
    let seed = seed("a_page_behind_the_end");
    let dir = tempfile::tempdir().expect("directory");
    let (path, manager) = (dir.path().join("table"), manager());
    // Without sums a page of the hole behind the end would be zeros.
    let config = PoolConfig::new().checksum(false).huge_frames(false);
    let pool = config.create(&path, CAPACITY, &manager).expect("pool");
    let stop = AtomicBool::new(false);
    let read = |thread: u64| {
        let mut dice = Dice::new(seed ^ thread);
        let (mut found, mut missing) = (0u64, 0u64);
        while !stop.load(Ordering::Relaxed) {
            let page = PageId(2 + dice.below(3_000));
            match pool.fix_shared(page) {
                Ok(guard) => {
                    assert!(guard.iter().all(|byte| *byte == page.0 as u8), "{page} is another");
                    found += 1;
                }
                Err(error) => {
                    assert!(matches!(error, Error::NoSuchPage { .. }), "{error}");
                    missing += 1;
                }
            }
        }
        (found, missing)
    };
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        let read = &read;
        let readers: Vec<_> = (0..2).map(|thread| scope.spawn(move || read(thread))).collect();
        let mut dice = Dice::new(seed);
        for _ in 0..amount(25) {
            let pages = add(&pool, 500 + dice.below(2_400) as usize);
            pool.evict_all().expect("written");
            free(&pool, &pages);
            pool.flush().expect("flush");
            assert_eq!(pool.pages(), 2);
        }
        drop(others);
        let counts: Vec<_> = readers.into_iter().map(|it| it.join().expect("reader")).collect();
        println!("found and missing: {counts:?}");
    });
}
