//! Scans whose pages were asked for before: they read the same pairs, with fewer faults.

use crate::common::mem_store;
use farheap::ByteCount;
use farheap::region::FaultMode;
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{FarBTreeMap, FarLeveledMap, FarPagedMap, TreeStrategy};
use std::sync::Arc;

const PAIRS: u64 = 5_000;
type Value = [u64; 16];

/// A collective, or `None` with the reason printed where userfaultfd is not permitted.
fn collective(mode: FaultMode, local: ByteCount) -> Option<Arc<Collective>> {
    collective_of(ByteCount::kib(4), mode, local)
}

fn collective_of(page: ByteCount, mode: FaultMode, local: ByteCount) -> Option<Arc<Collective>> {
    let region = CollectiveConfig::default_region().mode(mode);
    let config = CollectiveConfig::new().page(page).local(local).region(region);
    crate::new_collective(config, mem_store(ByteCount::mib(64))).map(Arc::new)
}

fn tree(collective: &Arc<Collective>, strategy: TreeStrategy) -> FarBTreeMap<u64, Value> {
    let mut map = FarBTreeMap::new(collective.clone(), strategy);
    for key in 0..PAIRS {
        map.insert(key * 7 % PAIRS * 2, [key * 7 % PAIRS; 16]).expect("room");
    }
    map.make_page_aware().expect("room");
    map
}

/// Faults that a scan of `pairs` pairs takes, after all pages left, when `fetch` ran before it.
fn faults(
    map: &FarBTreeMap<u64, Value>,
    from: u64,
    pairs: usize,
    fetch: impl FnOnce(&FarBTreeMap<u64, Value>),
) -> u64 {
    let collective = map.collective();
    collective.region().evict_all().expect("the store has room");
    fetch(map);
    let before = collective.stats().faults_read;
    let scan = map.range(from..).take(pairs).map(|(key, value)| (*key, value[15]));
    let first = from.div_ceil(2);
    let last = PAIRS.min(first.saturating_add(pairs as u64));
    assert!(scan.eq((first..last).map(|at| (at * 2, at))), "{pairs} pairs from {from}");
    collective.stats().faults_read - before
}

#[test]
fn a_scan_of_a_tree_that_was_fetched_takes_few_faults() {
    for local in [ByteCount::ZERO, ByteCount::kib(200)] {
        let Some(collective) = collective(FaultMode::InThread, local) else { return };
        for strategy in [TreeStrategy::Dfs, TreeStrategy::LocalDfs] {
            let map = tree(&collective, strategy);
            let (mut alone, mut fetched) = (0, 0);
            for from in (0..2 * PAIRS).step_by(997) {
                alone += faults(&map, from, 100, |_| ());
                fetched += faults(&map, from, 100, |map| map.fetch_from(&from, 100));
            }
            assert!(fetched * 2 < alone, "{strategy}, {local}: {fetched} faults of {alone}");
        }
    }
}

#[test]
fn any_key_and_any_number_of_pairs_can_be_fetched() {
    let Some(collective) = collective(FaultMode::InThread, ByteCount::kib(100)) else { return };
    FarBTreeMap::<u64, Value>::new(collective.clone(), TreeStrategy::Dfs).fetch_from(&1, 10);
    for strategy in TreeStrategy::ALL {
        let map = tree(&collective, strategy);
        for from in [0, 1, 2, 4_999, 2 * PAIRS - 2, 2 * PAIRS, u64::MAX] {
            for pairs in [0, 1, 2, 1_000, usize::MAX] {
                faults(&map, from, pairs.min(2_000), |map| map.fetch_from(&from, pairs));
            }
        }
    }
}

#[test]
fn a_fetch_with_handler_threads_is_a_prefetch() {
    let Some(collective) = collective(FaultMode::Auto, ByteCount::ZERO) else { return };
    let map = tree(&collective, TreeStrategy::Dfs);
    faults(&map, 500, 100, |map| map.fetch_from(&500, 100));
}

/// A map whose leaves lie in one collective and are fetched to the page.
trait Paged {
    fn fetch(&self, from: u64, pairs: usize);
    fn scan(&self, from: u64, pairs: usize) -> Vec<(u64, u64)>;
}

impl Paged for FarPagedMap<u64, Value> {
    fn fetch(&self, from: u64, pairs: usize) {
        self.fetch_from(&from, pairs);
    }

    fn scan(&self, from: u64, pairs: usize) -> Vec<(u64, u64)> {
        self.iter_from(&from).take(pairs).map(|(key, value)| (*key, value[15])).collect()
    }
}

impl Paged for FarLeveledMap<u64, Value> {
    fn fetch(&self, from: u64, pairs: usize) {
        self.fetch_from(&from, pairs);
    }

    fn scan(&self, from: u64, pairs: usize) -> Vec<(u64, u64)> {
        self.range(from..).take(pairs).map(|(key, value)| (*key, value[15])).collect()
    }
}

/// Fetches and scans; a leaf holds `capacity` pairs.
fn check(collective: &Collective, map: &dyn Paged, capacity: u64) {
    for (from, pairs) in [(0, 1), (17, 100), (4_990, 100), (300, usize::MAX), (u64::MAX, 3)] {
        collective.region().evict_all().expect("the store has room");
        let before = collective.stats();
        map.fetch(from, pairs);
        let last = PAIRS.min(from.saturating_add(pairs as u64));
        let want: Vec<(u64, u64)> = (from..last).map(|key| (key, key)).collect();
        assert_eq!(map.scan(from, pairs), want);
        let after = collective.stats();
        assert_eq!(after.faults_read - before.faults_read, 1, "the leaf where the scan starts");
        // All leaves that the scan has come to, and no other.
        let leaves = after.pages_in - before.pages_in;
        let most = (last.saturating_sub(from)).div_ceil(capacity) * 2 + 1;
        assert!(leaves <= most, "{leaves} leaves of {most} for {pairs} pairs from {from}");
    }
}

#[test]
fn a_scan_of_a_map_of_pages_that_was_fetched_takes_one_fault() {
    let Some(leaves) = collective(FaultMode::InThread, ByteCount::ZERO) else { return };
    let Some(above) = collective(FaultMode::InThread, ByteCount::mib(1)) else { return };
    let mut paged = FarPagedMap::<u64, Value>::new(leaves.clone()).expect("pairs are small");
    for key in 0..PAIRS {
        paged.insert(key, [key; 16]).expect("room");
    }
    paged.pack(1.0).expect("room");
    let capacity = paged.len().div_ceil(paged.leaves()) as u64;
    check(&leaves, &paged, capacity);
    drop(paged);
    let mut leveled = FarLeveledMap::<u64, Value>::with_levels(leaves.clone(), vec![above])
        .expect("pairs are small");
    for key in 0..PAIRS {
        leveled.insert(key, [key; 16]).expect("room");
    }
    check(&leaves, &leveled, capacity);
}

/// What is fetched of pages larger than the kernel's is all of them.
#[test]
fn pages_larger_than_the_kernels_are_fetched_whole() {
    const PAGE: ByteCount = ByteCount::kib(64);
    let Some(leaves) = collective_of(PAGE, FaultMode::InThread, ByteCount::ZERO) else { return };
    let mut paged = FarPagedMap::<u64, Value>::new(leaves.clone()).expect("pairs are small");
    for key in 0..PAIRS {
        paged.insert(key, [key; 16]).expect("room");
    }
    leaves.region().evict_all().expect("the store has room");
    paged.fetch_from(&300, 3_000);
    let before = leaves.stats();
    let want: Vec<(u64, u64)> = (300..3_300).map(|key| (key, key)).collect();
    assert_eq!(Paged::scan(&paged, 300, 3_000), want);
    let faults = leaves.stats().faults_read - before.faults_read;
    assert_eq!(faults, 0, "all that the scan has come to was fetched");
}
