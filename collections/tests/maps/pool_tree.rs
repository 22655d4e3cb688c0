//! The B+-tree against std's map, alone and with several threads, in a pool smaller than the tree.

use crate::common::{StopOnDrop, eventually};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, Error};
use farheap_collections::pool::BTree;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::sync::Arc;

fn pool(limit: ByteCount) -> Arc<BufferPool> {
    let manager = MemoryManager::start(limit).expect("manager");
    let store = Arc::new(MemStore::new(ByteCount::mib(128)).expect("store"));
    PoolConfig::new().create_on(store, &manager).expect("pool")
}

/// Checks that no fix is left. The pool locks pages itself to evict them, which its thread or the manager's
/// may be at for as long as the machine is busy with others.
fn assert_released(pool: &BufferPool) {
    assert!(eventually(|| pool.holders() == 0), "{} fixes are left", pool.holders());
}

/// Keys and values of many lengths.
fn bytes(random: &mut StdRng, key: u32, longest: usize) -> Vec<u8> {
    let mut bytes = format!("{key:08}").into_bytes();
    bytes.resize(8 + (key as usize * 7) % longest, b'k');
    if random.random_range(0..8) == 0 {
        bytes.push(b'!');
    }
    bytes
}

fn assert_equal(tree: &BTree, model: &BTreeMap<Vec<u8>, Vec<u8>>, from: &[u8]) {
    let found: Vec<_> = tree.scan(from).map(|entry| entry.expect("entry")).collect();
    let expected: Vec<_> =
        model.range(from.to_vec()..).map(|(k, v)| (k.clone(), v.clone())).collect();
    assert_eq!(found.len(), expected.len());
    assert!(found == expected);
}

#[test]
fn it_does_what_a_map_does() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let pool = pool(ByteCount::mib(2));
    let tree = BTree::create(&pool).expect("tree");
    let mut model = BTreeMap::new();
    for round in 0..40_000u32 {
        let key = random.random_range(0..20_000);
        let key = bytes(&mut random, key, 60);
        // Grows first, shrinks later.
        if random.random_range(0..40_000) > round {
            let value = bytes(&mut random, round, 200);
            let is_new = tree.insert(&key, &value).expect("insert");
            assert_eq!(is_new, model.insert(key, value).is_none());
        } else {
            assert_eq!(tree.remove(&key).expect("remove"), model.remove(&key).is_some());
        }
    }
    assert_equal(&tree, &model, b"");
    assert_equal(&tree, &model, b"00010000");
    for (key, value) in &model {
        assert_eq!(tree.get(key).expect("get").as_ref(), Some(value));
    }
    let pages = pool.pages();
    for key in model.keys() {
        assert!(tree.remove(key).expect("remove"));
    }
    assert_eq!(tree.scan(b"").count(), 0);
    // The pages that merging freed are used again.
    for (key, value) in &model {
        tree.insert(key, value).expect("insert");
    }
    assert_equal(&tree, &model, b"");
    assert!(pool.pages() <= pages * 3 / 2, "{} then {}", pages, pool.pages());
    assert_released(&pool);
}

#[test]
fn threads_with_keys_of_their_own_see_their_own_changes() {
    const THREADS: u32 = 4;
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let pool = pool(ByteCount::mib(2));
    let tree = BTree::create(&pool).expect("tree");
    let models: Vec<_> = std::thread::scope(|scope| {
        let work = |thread: u32| {
            let tree = tree.clone();
            scope.spawn(move || {
                let mut random = StdRng::seed_from_u64(seed ^ u64::from(thread));
                let mut model = BTreeMap::new();
                for round in 0..10_000u32 {
                    // Interleaved with the other threads' keys, so that they share leaves.
                    let number = random.random_range(0..3_000) * THREADS + thread;
                    let key = format!("{number:08}").into_bytes();
                    match random.random_range(0..4) {
                        0 | 1 => {
                            let value = bytes(&mut random, round, 120);
                            let is_new = tree.insert(&key, &value).expect("insert");
                            assert_eq!(is_new, model.insert(key, value).is_none());
                        }
                        2 => {
                            let removed = tree.remove(&key).expect("remove");
                            assert_eq!(removed, model.remove(&key).is_some());
                        }
                        _ => assert_eq!(tree.get(&key).expect("get"), model.get(&key).cloned()),
                    }
                }
                model
            })
        };
        let threads: Vec<_> = (0..THREADS).map(work).collect();
        threads.into_iter().map(|thread| thread.join().expect("thread")).collect()
    });
    let model: BTreeMap<_, _> = models.into_iter().flatten().collect();
    assert_equal(&tree, &model, b"");
}

#[test]
fn a_flushed_tree_is_found_again_by_its_root() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("manager");
    let pool = PoolConfig::new().create(&path, ByteCount::mib(16), &manager).expect("pool");
    let tree = BTree::create(&pool).expect("tree");
    for number in 0..5_000u32 {
        tree.insert(&number.to_be_bytes(), b"before the flush").expect("insert");
    }
    pool.flush().expect("flush");
    let root = tree.root();
    drop((tree, pool));
    let pool = PoolConfig::new().open(&path, &manager).expect("opens");
    let tree = BTree::open(&pool, root);
    assert_eq!(tree.scan(b"").count(), 5_000);
    assert!(tree.update(&7u32.to_be_bytes(), |value| value[0] = b'B').expect("update"));
    let value = tree.get(&7u32.to_be_bytes()).expect("get");
    assert_eq!(value.as_deref(), Some(&b"Before the flush"[..]));
    let long = vec![1; 2000];
    assert!(matches!(tree.insert(b"k", &long), Err(Error::BadRange { .. })));
}

fn number_key(number: u32) -> Vec<u8> {
    format!("key {number:08}").into_bytes()
}

#[test]
fn a_cursor_goes_both_ways_over_what_a_map_has() {
    let seed = rand::random::<u64>();
    println!("seed {seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let pool = pool(ByteCount::mib(2));
    let tree = BTree::create(&pool).expect("tree");
    let mut model = BTreeMap::new();
    for _ in 0..12_000 {
        let number = random.random_range(0..40_000);
        let key = bytes(&mut random, number, 60);
        let value = bytes(&mut random, number, 200);
        tree.insert(&key, &value).expect("insert");
        model.insert(key, value);
    }
    // Leaves that are empty, and others that were merged.
    for number in 10_000..25_000 {
        let keys: Vec<Vec<u8>> = model
            .range(format!("{number:08}").into_bytes()..)
            .take_while(|(key, _)| key.starts_with(format!("{number:08}").as_bytes()))
            .map(|(key, _)| key.clone())
            .collect();
        for key in keys {
            assert!(tree.remove(&key).expect("remove"));
            model.remove(&key);
        }
    }
    let entries: Vec<(&[u8], &[u8])> = model.iter().map(|(k, v)| (&k[..], &v[..])).collect();
    for round in 0..300 {
        let from = format!("{:08}", random.random_range(0..40_010)).into_bytes();
        let (mut cursor, mut at) = if round % 8 == 0 {
            (tree.cursor_at_end(), entries.len())
        } else {
            (tree.cursor(&from), entries.partition_point(|(key, _)| *key < &from[..]))
        };
        let forward = random.random_range(0..10);
        for _ in 0..random.random_range(0..1_000) {
            if random.random_range(0..10) < forward {
                assert_eq!(cursor.next().expect("next"), entries.get(at).copied());
                at = entries.len().min(at + 1);
            } else {
                let before = at.checked_sub(1).map(|before| entries[before]);
                assert_eq!(cursor.prev().expect("prev"), before);
                at = at.saturating_sub(1);
            }
        }
    }
    let mut back = tree.cursor_at_end();
    let mut left = entries.len();
    while let Some(entry) = back.prev().expect("prev") {
        left -= 1;
        assert_eq!(entry, entries[left]);
    }
    assert_eq!(left, 0);
    assert_released(&pool);
}

#[test]
fn cursors_see_all_that_stays_while_leaves_are_split_and_merged() {
    const STAYS: u32 = 2_000;
    let pool = pool(ByteCount::mib(2));
    let tree = BTree::create(&pool).expect("tree");
    for number in 0..STAYS {
        tree.insert(&number_key(number * 10), b"stays").expect("insert");
    }
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = StopOnDrop(&done);
        scope.spawn(|| {
            let mut random = StdRng::seed_from_u64(7);
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                let number = random.random_range(0..STAYS) * 10;
                let keys: Vec<_> = (1..10).map(|n| number_key(number + n)).collect();
                let value = vec![1; 400];
                keys.iter().for_each(|key| assert!(tree.insert(key, &value).expect("insert")));
                keys.iter().for_each(|key| assert!(tree.remove(key).expect("remove")));
            }
        });
        for _ in 0..10 {
            let mut forward = tree.cursor(b"");
            let mut next = 0;
            while let Some((key, value)) = forward.next().expect("next") {
                if value == b"stays" {
                    assert_eq!(key, number_key(next * 10));
                    next += 1;
                }
            }
            assert_eq!(next, STAYS);
            let mut backward = tree.cursor_at_end();
            while let Some((key, value)) = backward.prev().expect("prev") {
                if value == b"stays" {
                    next -= 1;
                    assert_eq!(key, number_key(next * 10));
                }
            }
            assert_eq!(next, 0);
        }
        drop(others);
    });
    assert_released(&pool);
}

/// Pages that entries of `bytes` in all would fill, if nodes had nothing but entries.
fn least_pages(pool: &BufferPool, bytes: usize) -> usize {
    bytes.div_ceil(pool.payload())
}

#[test]
fn ascending_keys_fill_their_leaves_in_the_tree_and_in_parts_of_it() {
    let entry = 4 + 2 + 12 + 50;
    // A part begins and ends in leaves that it shares with others.
    for (parts, percent) in [(1, 104), (10, 106)] {
        let pool = pool(ByteCount::mib(8));
        let tree = BTree::create(&pool).expect("tree");
        for number in 0..60_000u32 {
            let key = number_key(number % parts * 1_000_000 + number / parts);
            tree.insert(&key, &[7; 50]).expect("insert");
        }
        let pages = pool.pages_in_use().count();
        let least = least_pages(&pool, 60_000 * entry);
        assert!(pages * 100 <= least * percent, "{parts} parts: {pages} pages for {least}");
    }
}

#[test]
fn a_loaded_tree_has_all_entries_in_the_least_room_and_goes_on_as_any() {
    let pool = pool(ByteCount::mib(4));
    assert_eq!(BTree::load(&pool, [(b"", b""); 0]).expect("empty").scan(b"").count(), 0);
    let entries: Vec<(Vec<u8>, Vec<u8>)> =
        (0..30_000).map(|n| (number_key(n * 2), vec![n as u8; 20 + n as usize % 60])).collect();
    let before = pool.pages_in_use().count();
    let refused = entries.iter().cloned().chain([(b"key".to_vec(), Vec::new())]);
    let error = BTree::load(&pool, refused).expect_err("a key that is less than the last");
    assert!(matches!(error, Error::BadRange { .. }), "{error}");
    assert_eq!(pool.pages_in_use().count(), before, "all pages are free again");
    let tree = BTree::load(&pool, entries.iter().map(|(key, value)| (key, value))).expect("load");
    let bytes = entries.iter().map(|(key, value)| 6 + key.len() + value.len()).sum();
    let (pages, least) = (pool.pages_in_use().count() - before, least_pages(&pool, bytes));
    assert!(pages * 100 <= least * 104, "{pages} pages for {least}");
    let mut model: BTreeMap<_, _> = entries.into_iter().collect();
    assert_equal(&tree, &model, b"");
    for number in (0..60_000).step_by(7) {
        let key = number_key(number);
        if number % 2 == 0 {
            assert_eq!(tree.remove(&key).expect("remove"), model.remove(&key).is_some());
        } else {
            tree.insert(&key, b"new").expect("insert");
            model.insert(key, b"new".to_vec());
        }
    }
    assert_equal(&tree, &model, b"key 0003");
    assert_released(&pool);
}

#[test]
fn a_lent_value_stays_as_it_is_while_it_is_held() {
    let pool = pool(ByteCount::mib(2));
    let tree = BTree::create(&pool).expect("tree");
    for number in 0..3_000 {
        tree.insert(&number_key(number), &number.to_le_bytes()).expect("insert");
    }
    for number in (0..3_000).rev() {
        let lent = tree.get_ref(&number_key(number)).expect("get").expect("there");
        assert_eq!(&*lent, &number.to_le_bytes()[..]);
        assert!(pool.holders() >= 1);
    }
    assert!(tree.get_ref(b"nowhere").expect("get").is_none());
    assert_released(&pool);
}
