//! Tables that are only read: by several pools at once, from files that cannot be written.
//!
//! Guards: G5, G9.

use crate::common::power::PowerStore;
use crate::common::{PATIENCE, eventually};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::{ByteCount, Error, PageId};
use farheap_collections::pool::BTree;
use std::path::Path;
use std::sync::Arc;

const KEYS: u64 = 20_000;

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(2)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn reading() -> PoolConfig {
    PoolConfig::new().read_only(true)
}

fn fill(pool: &Arc<BufferPool>) -> BTree {
    let entries = (0..KEYS).map(|n| (n.to_be_bytes(), [n as u8; 100]));
    let tree = BTree::load(pool, entries).expect("room");
    pool.flush().expect("flush");
    tree
}

/// A table larger than the memory of a pool; returns its root.
fn table(path: &Path) -> PageId {
    let pool = PoolConfig::new().create(path, ByteCount::mib(16), &manager()).expect("pool");
    fill(&pool).root()
}

fn assert_readable(pool: &Arc<BufferPool>, root: PageId) {
    let tree = BTree::open(pool, root);
    for n in (0..KEYS).step_by(7) {
        let value = tree.get_ref(&n.to_be_bytes()).expect("readable");
        assert_eq!(value.as_deref(), Some(&[n as u8; 100][..]), "{n}");
    }
    assert_eq!(tree.scan(b"").count() as u64, KEYS);
}

fn is_refusal<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.expect_err("the table is only read");
    assert!(matches!(error, Error::Device { .. }), "{error}");
    assert!(error.to_string().contains("read only"), "{error}");
}

#[test]
fn several_pools_read_a_table_and_keep_a_writer_out() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let root = table(&path);
    let before = std::fs::read(&path).expect("file");
    let mut permissions = std::fs::metadata(&path).expect("file").permissions();
    permissions.set_readonly(true);
    std::fs::set_permissions(&path, permissions).expect("ours");
    let [one, other] = [(); 2].map(|()| reading().open(&path, &manager()).expect("readable"));
    std::thread::scope(|scope| {
        for pool in [&one, &other] {
            scope.spawn(|| assert_readable(pool, root));
        }
    });
    let refused = PoolConfig::new().open(&path, &manager());
    let refused = refused.map(drop).expect_err("in use").to_string();
    assert!(refused.contains("in use") || refused.contains("ermission"), "{refused}");
    one.evict_all().expect("nothing to write");
    one.flush().expect("nothing to write");
    drop((one, other));
    assert!(std::fs::read(&path).expect("file") == before, "the file was changed");
}

#[test]
fn a_writer_keeps_readers_out() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let root = table(&path);
    let writer = PoolConfig::new().open(&path, &manager()).expect("opens");
    let refused = reading().open(&path, &manager()).map(drop).expect_err("in use").to_string();
    assert!(refused.contains("in use"), "{refused}");
    drop(writer);
    assert_readable(&reading().open(&path, &manager()).expect("readable"), root);
    let missing = reading().open(dir.path().join("none"), &manager()).map(drop);
    let missing = missing.expect_err("no file").to_string();
    assert!(missing.contains("does not exist"), "{missing}");
}

#[test]
fn whatever_would_change_a_page_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let root = table(&path);
    let pool = reading().open(&path, &manager()).expect("readable");
    is_refusal(pool.fix_exclusive(root));
    is_refusal(pool.allocate());
    is_refusal(pool.fix_to_overwrite(root));
    is_refusal(pool.fix_to_overwrite(PageId(4000)));
    is_refusal(BTree::create(&pool));
    let missing = pool.fix_exclusive(PageId(1 << 40)).expect_err("no page");
    assert!(matches!(missing, Error::NoSuchPage { .. }), "{missing}");
    let tree = BTree::open(&pool, root);
    is_refusal(tree.insert(b"new", b"value"));
    is_refusal(tree.remove(&7u64.to_be_bytes()));
    is_refusal(tree.update(&7u64.to_be_bytes(), |value| value.fill(0)));
    let guard = pool.fix_shared(root).expect("readable");
    assert!(pool.try_fix_exclusive(root).is_none());
    drop(guard.try_upgrade().expect_err("no upgrade"));
    assert!(pool.try_fix_exclusive(root).is_none(), "nobody holds the page");
    assert!(pool.fix_optimistic(root).expect("readable").try_upgrade().is_none());
    is_refusal(pool.fix_optimistic(root).expect("readable").upgrade());
    assert!(eventually(|| pool.holders() == 0));
    assert_readable(&pool, root);
    let error = reading().create(dir.path().join("new"), ByteCount::mib(4), &manager());
    let error = error.map(drop).expect_err("nothing to read");
    assert!(matches!(error, Error::Config { .. }), "{error}");
    assert!(!dir.path().join("new").exists(), "nothing is left behind");
}

#[test]
fn each_call_that_fails_is_an_error_or_none_and_the_device_is_not_written() {
    let store = PowerStore::new(vec![0; 4 << 20]);
    let pool = PoolConfig::new().create_on(Arc::new(store.clone()), &manager()).expect("pool");
    let root = fill(&pool).root();
    drop(pool);
    let (events, calls) = (store.now(), store.calls());
    let read = || -> Result<(), Error> {
        let pool = reading().open_on(Arc::new(store.clone()), &manager())?;
        let tree = BTree::open(&pool, root);
        for n in (0..KEYS).step_by(997) {
            let value = tree.get(&n.to_be_bytes())?;
            assert_eq!(value.as_deref(), Some(&[n as u8; 100][..]), "{n}");
        }
        let pages: Vec<PageId> = (10..40).map(PageId).collect();
        drop(pool.fix_many(&pages)?);
        pool.flush()
    };
    read().expect("no call fails");
    let count = store.calls() - calls;
    let failed = (0..count).filter(|call| {
        store.fail_at(Some(store.calls() + call));
        let result = read();
        store.fail_at(None);
        result.is_err()
    });
    let failed = failed.count() as u64;
    println!("{failed} of {count} calls were errors");
    assert!(failed > count / 2, "{failed} of {count}");
    read().expect("it is well again");
    assert_eq!(store.now(), events, "something was written or synced");
}
