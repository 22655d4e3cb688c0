//! Pools of whole pages: all bytes of a page are the user's, and so are all checks.
//!
//! Guards: G5, G7.

use crate::common::PATIENCE;
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, Error, PageId};
use farheap_collections::pool::BTree;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn whole() -> PoolConfig {
    PoolConfig::new().whole_pages(true).deadline(PATIENCE)
}

fn on_store(config: PoolConfig) -> Arc<BufferPool> {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    config.create_on(store, &manager()).expect("pool")
}

fn create(config: PoolConfig, path: &Path) -> Arc<BufferPool> {
    config.create(path, ByteCount::mib(64), &manager()).expect("pool")
}

/// Fills all of `count` fresh pages with their numbers.
fn fill(pool: &BufferPool, count: u64) -> Vec<PageId> {
    let fresh = (0..count).map(|_| {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page.fill(id.0 as u8);
        id
    });
    fresh.collect()
}

#[test]
fn all_bytes_of_pages_are_the_users_and_reach_the_file() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let pool = create(whole(), &path);
    assert_eq!(pool.payload(), 4096);
    let ids = fill(&pool, 3000); // More than there is memory for.
    let look = pool.fix_optimistic(ids[5]).expect("page");
    assert_eq!((look.byte(4095), look.byte(4096)), (Some(ids[5].0 as u8), None));
    assert_eq!((look.u64(4088).is_some(), look.u64(4089)), (true, None));
    pool.flush().expect("flush");
    drop(pool);
    let file = std::fs::read(&path).expect("file");
    let pool = whole().open(&path, &manager()).expect("pool");
    for id in ids {
        let page = pool.fix_shared(id).expect("page");
        assert_eq!(page[..], [id.0 as u8; 4096], "{id}");
        assert_eq!(page[..], file[id.as_usize() * 4096..][..4096], "{id} in the file");
    }
}

#[test]
fn a_table_is_opened_with_the_setting_that_it_was_created_with() {
    let dir = tempfile::tempdir().expect("directory");
    let (path, usual) = (dir.path().join("whole"), dir.path().join("usual"));
    drop(create(whole(), &path));
    drop(create(PoolConfig::new().checksum(false), &usual));
    let other = [
        PoolConfig::new().open(&path, &manager()),
        PoolConfig::new().checksum(false).open(&path, &manager()),
        whole().open(&usual, &manager()),
    ];
    for result in other {
        let error = result.expect_err("refused").to_string();
        assert!(error.contains("another setting of `whole_pages`"), "{error}");
    }
    drop(whole().checksum(false).open(&path, &manager()).expect("the same setting"));
}

#[test]
fn checksums_of_whole_pages_are_a_conflict() {
    for config in [whole().checksum(true), PoolConfig::new().checksum(true).whole_pages(true)] {
        let store = Arc::new(MemStore::new(ByteCount::mib(1)).expect("store"));
        let error = config.create_on(store, &manager()).expect_err("a conflict");
        assert!(matches!(&error, Error::Config { key, .. } if key == "checksum"), "{error}");
        assert!(error.to_string().contains("whole_pages"), "{error}");
    }
    assert_eq!(on_store(whole().whole_pages(false).checksum(true)).payload(), 4080);
}

#[test]
fn the_log_is_told_of_no_record() {
    let (asked, told) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let counts = (Arc::clone(&asked), Arc::clone(&told));
    let pool = on_store(whole().before_write(move |_, lsn| {
        counts.0.fetch_add(1, Ordering::Relaxed);
        counts.1.fetch_add(lsn, Ordering::Relaxed);
        Ok(())
    }));
    let ids = fill(&pool, 10);
    pool.flush().expect("flush");
    assert_eq!(asked.load(Ordering::Relaxed), 10);
    assert_eq!(told.load(Ordering::Relaxed), 0, "the last bytes are content");
    assert_eq!(pool.fix_shared(ids[9]).expect("page").lsn(), 0);
}

#[test]
#[should_panic(expected = "no room for the number of a log record")]
fn a_log_record_cannot_be_noted() {
    on_store(whole()).allocate().expect("page").set_lsn(1);
}

#[test]
fn a_page_that_is_fixed_to_overwrite_is_zeros_to_its_end() {
    let pool = on_store(whole());
    let id = fill(&pool, 1)[0];
    assert_eq!(pool.fix_to_overwrite(id).expect("resident")[..], [0; 4096]);
    pool.fix_exclusive(id).expect("page").fill(9);
    pool.evict_all().expect("evicted");
    assert_eq!(pool.fix_to_overwrite(id).expect("absent")[..], [0; 4096]);
    assert_eq!(pool.fix_to_overwrite(PageId(9)).expect("beyond the end")[..], [0; 4096]);
}

#[test]
fn what_the_device_has_is_given_out_as_it_is() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let pool = create(whole(), &path);
    let id = fill(&pool, 1)[0];
    pool.flush().expect("flush");
    drop(pool);
    let mut bytes = std::fs::read(&path).expect("file");
    bytes[id.as_usize() * 4096..][2048..4096].fill(99);
    std::fs::write(&path, &bytes).expect("file");
    let pool = whole().open(&path, &manager()).expect("opens");
    assert_eq!(pool.fix_shared(id).expect("a torn page is not told")[2048..], [99; 2048]);
    drop(pool);
    bytes[100] ^= 1;
    bytes[4096 + 100] ^= 1;
    std::fs::write(&path, &bytes).expect("file");
    let error = whole().open(&path, &manager()).expect_err("the header has a sum of its own");
    assert!(error.to_string().contains("damaged"), "{error}");
}

/// Makes a tree, has its pages leave, and reads all of it.
fn assert_holds_a_tree(page: ByteCount) {
    const KEYS: u64 = 30_000;
    let pool = on_store(whole().page(page));
    let tree = BTree::create(&pool).expect("room");
    for n in 0..KEYS {
        let key = n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes();
        tree.insert(&key, &n.to_le_bytes().repeat(n as usize % 32)).expect("room");
    }
    pool.evict_all().expect("evicted");
    let tree = BTree::open(&pool, tree.root());
    for n in 0..KEYS {
        let key = n.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes();
        let value = tree.get(&key).expect("readable");
        assert_eq!(value, Some(n.to_le_bytes().repeat(n as usize % 32)), "{n} of {page}");
    }
    assert_eq!(tree.scan(b"").count() as u64, KEYS);
    let loaded = BTree::load(&pool, (0..KEYS).map(|n| (n.to_be_bytes(), [7; 9]))).expect("room");
    assert_eq!(loaded.get(&77u64.to_be_bytes()).expect("readable"), Some(vec![7; 9]));
}

#[test]
fn a_tree_works_in_whole_pages_smaller_than_64_kib() {
    [4, 8, 32].map(ByteCount::kib).into_iter().for_each(assert_holds_a_tree);
    let pool = on_store(whole().page(ByteCount::kib(64)));
    let refused = [BTree::create(&pool), BTree::load(&pool, [(b"key", b"value")])];
    for result in refused {
        let error = result.expect_err("a node says its end in 16 bits");
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
    }
    assert_eq!(pool.pages_in_use().count(), 0, "nothing was allocated");
}
