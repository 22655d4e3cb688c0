//! Crashes: what was flushed is there or is known to be stale, and never a wrong answer.
//!
//! Guards: G7.

use crate::common::child::{Victim, case};
use crate::common::eventually;
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, Error, PageId};
use farheap_collections::pool::BTree;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::sync::Arc;
use std::time::Duration;

/// Keys that nobody touches after the flush.
const STABLE: u32 = 4_000;

fn manager() -> Arc<MemoryManager> {
    MemoryManager::start(ByteCount::mib(2)).expect("manager")
}

fn stable_key(number: u32) -> Vec<u8> {
    format!("{:08}-stable", number * 10).into_bytes()
}

fn stable_value(number: u32) -> Vec<u8> {
    vec![number as u8; 30 + number as usize % 40]
}

fn load(pool: &Arc<BufferPool>) -> BTree {
    let tree = BTree::create(pool).expect("tree");
    for number in 0..STABLE {
        tree.insert(&stable_key(number), &stable_value(number)).expect("insert");
        tree.insert(format!("{:08}-goes", number * 10 + 5).as_bytes(), b"x").expect("insert");
    }
    pool.flush().expect("flush");
    tree
}

/// Splits and merges nodes all over the tree: nothing of this is flushed.
fn change(tree: &BTree, random: &mut StdRng) {
    let number = random.random_range(0..STABLE * 10);
    let key = format!("{number:08}-new").into_bytes();
    match random.random_range(0..4) {
        0 => {
            tree.remove(&key).expect("remove");
        }
        1 => {
            let key = format!("{:08}-goes", number / 10 * 10 + 5);
            tree.remove(key.as_bytes()).expect("remove");
        }
        _ => {
            let value = vec![7; random.random_range(0..300)];
            tree.insert(&key, &value).expect("insert");
        }
    }
}

fn is_detected(error: &Error) -> bool {
    matches!(error, Error::StalePage { .. } | Error::CorruptPage { .. } | Error::NoSuchPage { .. })
}

/// How many of the flushed keys are there; the others must be known to be stale.
fn survivors(tree: &BTree) -> u32 {
    let mut found = 0;
    for number in 0..STABLE {
        match tree.get(&stable_key(number)) {
            Ok(value) => {
                assert_eq!(value, Some(stable_value(number)), "key {number}");
                found += 1;
            }
            Err(error) => assert!(is_detected(&error), "key {number}: {error}"),
        }
    }
    found
}

/// Scans on from each key until the first error; what is found must be in order and complete.
fn check_scans(tree: &BTree) {
    for first in (0..STABLE).step_by(500) {
        let mut next = first;
        for entry in tree.scan(&stable_key(first)) {
            let (key, value) = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    assert!(is_detected(&error), "{error}");
                    break;
                }
            };
            if key.ends_with(b"-stable") {
                assert_eq!((key, value), (stable_key(next), stable_value(next)));
                next += 1;
            }
        }
    }
}

#[test]
fn a_crash_loses_what_was_not_flushed_and_never_answers_wrongly() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut torn = 0;
    for _ in 0..12 {
        let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
        let pool = PoolConfig::new().create_on(Arc::clone(&store) as _, &manager()).expect("pool");
        let tree = load(&pool);
        for _ in 0..random.random_range(1..20_000) {
            change(&tree, &mut random);
        }
        let root = tree.root();
        // What is dirty is lost: dropping a pool does not write.
        drop((tree, pool));
        let pool = PoolConfig::new().open_on(store, &manager()).expect("opens");
        let tree = BTree::open(&pool, root);
        torn += STABLE - survivors(&tree);
        check_scans(&tree);
        assert!(eventually(|| pool.holders() == 0));
    }
    println!("{torn} of {} keys were stale", 12 * STABLE);
    assert!(torn > 0, "no crash tore the tree: the test does not test");
}

#[test]
fn a_crash_without_changes_after_the_flush_loses_nothing() {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let pool = PoolConfig::new().create_on(Arc::clone(&store) as _, &manager()).expect("pool");
    let tree = load(&pool);
    let root = tree.root();
    drop((tree, pool));
    let pool = PoolConfig::new().open_on(store, &manager()).expect("opens");
    assert_eq!(survivors(&BTree::open(&pool, root)), STABLE);
}

#[test]
fn a_free_list_whose_pages_were_used_again_before_a_crash_does_not_keep_the_table_shut() {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let pool = PoolConfig::new().create_on(Arc::clone(&store) as _, &manager()).expect("pool");
    let pages: Vec<PageId> = (0..3000).map(|_| pool.allocate().expect("page").id()).collect();
    let kept = pages[2999];
    pool.fix_exclusive(kept).expect("page").fill(9);
    for page in &pages[..2999] {
        pool.fix_exclusive(*page).expect("page").free();
    }
    // The list of free pages is several pages long, and is kept in free pages.
    pool.flush().expect("flush");
    for _ in 0..2999 {
        pool.allocate().expect("page").fill(1);
    }
    pool.evict_clean(ByteCount::mib(1));
    drop(pool);
    let pool = PoolConfig::new().open_on(store, &manager()).expect("opens");
    assert!(pool.fix_shared(kept).expect("flushed").iter().all(|byte| *byte == 9));
    for _ in 0..3000 {
        assert_ne!(pool.allocate().expect("page").id(), kept);
    }
}

/// Not a test by itself: the process that [`a_killed_process_leaves_a_table_that_opens`] kills.
/// Changes a table for ever.
fn change_until_killed(path: &str) -> ! {
    let pool = PoolConfig::new().create(path, ByteCount::mib(64), &manager()).expect("pool");
    let tree = load(&pool);
    println!("flushed {}", tree.root().0);
    let mut random = StdRng::seed_from_u64(1);
    loop {
        change(&tree, &mut random);
    }
}

#[test]
fn a_killed_process_leaves_a_table_that_opens() {
    const TEST: &str = "a_killed_process_leaves_a_table_that_opens";
    if let Some(path) = case(TEST) {
        change_until_killed(&path);
    }
    let dir = tempfile::tempdir().expect("directory");
    for round in 0..4 {
        let path = dir.path().join(format!("table-{round}"));
        let mut child = Victim::start(TEST, path.to_str().expect("UTF-8"));
        let root = child.said("flushed ").expect("it flushes").parse().expect("a number");
        // Any moment is a good one to be killed at.
        std::thread::sleep(Duration::from_millis(5 + 60 * round));
        child.kill();
        let pool = PoolConfig::new().open(&path, &manager()).expect("opens");
        let tree = BTree::open(&pool, PageId(root));
        let found = survivors(&tree);
        println!("{found} of {STABLE} keys are there");
        check_scans(&tree);
    }
}
