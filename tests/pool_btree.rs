//! The B+-tree against std's map, alone and with several threads, in a pool smaller than the tree.

use farheap::manager::{MemoryManager, Mode};
use farheap::pool::{BTree, BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, Error};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::collections::BTreeMap;
use std::sync::Arc;

fn pool(limit: ByteCount) -> Arc<BufferPool> {
    let manager = MemoryManager::start(limit, Mode::Cooperative).expect("manager");
    let store = Arc::new(MemStore::new(ByteCount::mib(128)).expect("store"));
    PoolConfig::new().create_on(store, &manager).expect("pool")
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
    assert!(pool.pages().get() <= pages.get() * 3 / 2, "{} then {}", pages, pool.pages());
    assert_eq!(pool.holders(), 0);
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
    let manager = MemoryManager::start(ByteCount::mib(4), Mode::Cooperative).expect("manager");
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
