//! Keys and values whose own code panics in the middle of an operation: the maps are whole
//! afterwards, and never show a key that was dropped.

use crate::common::{Injected, inject_panic, mem_store};
use farheap::ByteCount;
use farheap::region::RegionConfig;
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{
    FarBTreeMap, FarLeveledMap, FarPagedMap, FarSkipList, ListStrategy, TreeStrategy,
};
use std::cell::Cell;
use std::cmp::Ordering;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

fn collective(local: ByteCount) -> Option<Arc<Collective>> {
    let region = CollectiveConfig::default_region();
    let limit = RegionConfig::LIMIT_MIN;
    let config = CollectiveConfig::new().local(local).region(region.limit(limit));
    crate::new_collective(config, mem_store(ByteCount::mib(256))).map(Arc::new)
}

thread_local! {
    /// Clones of keys until one panics.
    static CLONES_LEFT: Cell<u64> = const { Cell::new(u64::MAX) };
}

/// A key that says when it is used after it was dropped, and whose clones may panic.
#[derive(Debug)]
struct Key {
    id: u64,
    alive: Arc<AtomicBool>,
    _wide: [u64; 30],
}

impl Key {
    fn new(id: u64) -> Key {
        let alive = Arc::new(AtomicBool::new(true));
        // Leaked, so that the flag can be looked at after the key was dropped.
        std::mem::forget(alive.clone());
        Key { id, alive, _wide: [id; 30] }
    }
}

impl Drop for Key {
    fn drop(&mut self) {
        self.alive.store(false, Relaxed);
    }
}

impl Clone for Key {
    fn clone(&self) -> Key {
        let left = CLONES_LEFT.get();
        CLONES_LEFT.set(left.wrapping_sub(1));
        if left == 0 {
            inject_panic();
        }
        Key::new(self.id)
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Key {}

impl PartialOrd for Key {
    fn partial_cmp(&self, other: &Key) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Key {
    fn cmp(&self, other: &Key) -> Ordering {
        assert!(self.alive.load(Relaxed) && other.alive.load(Relaxed), "a key that was dropped");
        self.id.cmp(&other.id)
    }
}

/// A value whose drop panics if it is to.
struct Value(bool);

impl Drop for Value {
    fn drop(&mut self) {
        if self.0 {
            inject_panic();
        }
    }
}

/// `clear` panics at its first pair; then more pairs come, until local nodes must go.
macro_rules! clear_that_panics {
    ($map:expr) => {
        for before in [1, 2, 40] {
            let mut map = $map;
            for id in 0..before {
                let refused = map.insert(Key::new(id), Value(id == 0)).is_err();
                assert!(!refused, "there is room for {id}");
            }
            let cleared = catch_unwind(AssertUnwindSafe(|| map.clear()));
            let panic = cleared.expect_err("the first pair panics");
            assert!(panic.is::<Injected>() && map.is_empty(), "{before}");
            for id in 0..2_000 {
                let refused = map.insert(Key::new(id * 7 % 2_000), Value(false)).is_err();
                assert!(!refused, "there is room for {id}");
            }
            assert_eq!((map.len(), map.iter().count()), (2_000, 2_000));
        }
    };
}

#[test]
fn no_map_finds_a_key_that_a_clear_with_a_panic_has_dropped() {
    let local = ByteCount::kib(64);
    let Some(collective) = collective(local) else { return };
    for strategy in TreeStrategy::ALL {
        clear_that_panics!(FarBTreeMap::new(collective.clone(), strategy));
    }
    for strategy in ListStrategy::ALL {
        clear_that_panics!(FarSkipList::new(collective.clone(), strategy));
    }
}

/// Inserts and removes with the n-th clone panicking, for every n until none does: what was there
/// before is there afterwards, and nothing is counted that is not.
macro_rules! clones_that_panic {
    ($map:expr) => {
        let mut panics = 0;
        for left in 0.. {
            let mut map = $map;
            let mut there = Vec::new();
            CLONES_LEFT.set(left);
            // Downwards, then upwards between: each way in which leaves come and go.
            let ids = (0..400).rev().map(|id| id * 2).chain((0..400).map(|id| id * 2 + 1));
            let inserted = catch_unwind(AssertUnwindSafe(|| {
                for id in ids {
                    let refused = map.insert(Key::new(id), Value(false)).is_err();
                    assert!(!refused, "there is room for {id}");
                    there.push(id);
                }
                for id in 0..there.len() as u64 {
                    assert!(map.remove(&Key::new(id)).is_some(), "{id}");
                    there.retain(|there| *there != id);
                }
            }));
            CLONES_LEFT.set(u64::MAX);
            there.sort_unstable();
            let found: Vec<u64> = map.iter().map(|(key, _)| key.id).collect();
            assert_eq!(found, there, "clone {left} panicked");
            assert_eq!(map.len(), there.len(), "clone {left} panicked");
            for id in there {
                assert!(map.get(&Key::new(id)).is_some(), "{id}, clone {left} panicked");
            }
            let Err(panic) = inserted else { break };
            assert!(panic.is::<Injected>(), "clone {left}: a panic of the map's own");
            panics += 1;
        }
        assert!(panics > 50, "{panics} clones");
    };
}

#[test]
fn a_paged_map_is_whole_after_a_clone_that_panics() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    clones_that_panic!(FarPagedMap::new(collective.clone()).expect("keys fit"));
}

#[test]
fn a_leveled_map_is_whole_after_a_clone_that_panics() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    clones_that_panic!(FarLeveledMap::new(collective.clone()).expect("keys fit"));
}
