//! Where the nodes of containers lie after a load: how much of local memory is used, and which far
//! nodes share pages.

use crate::common::mem_store;
use farheap::ByteCount;
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{FarBTreeMap, FarSkipList, ListStrategy, TreeStrategy};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Pairs of 160 bytes, as the benchmark's.
const PAIRS: u64 = 40_000;
type Value = [u8; 150];

/// A collective with this number of bytes of local memory for each pair, or `None` with the reason printed
/// where userfaultfd is not permitted.
fn collective(local_for_pair: u64) -> Option<Arc<Collective>> {
    let local = ByteCount(local_for_pair * PAIRS);
    let config = CollectiveConfig::new().local(local);
    crate::new_collective(config, mem_store(ByteCount::mib(256))).map(Arc::new)
}

/// Keys in no order.
fn keys() -> impl Iterator<Item = u64> {
    // One step of SplitMix64: no two are alike.
    (1..=PAIRS).map(|key| {
        let key = key.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (key ^ key >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9)
    })
}

fn list(collective: Arc<Collective>, strategy: ListStrategy) -> FarSkipList<u64, Value> {
    let mut list = FarSkipList::new(collective, strategy);
    keys().for_each(|key| assert!(list.insert(key, [1; 150]).expect("room").is_none()));
    list
}

fn tree(collective: Arc<Collective>, strategy: TreeStrategy) -> FarBTreeMap<u64, Value> {
    let mut tree = FarBTreeMap::new(collective, strategy);
    keys().for_each(|key| assert!(tree.insert(key, [1; 150]).expect("room").is_none()));
    tree
}

#[test]
fn a_local_list_keeps_most_nodes_where_local_memory_is_as_large_as_the_pairs() {
    for (local_for_pair, least_pct) in [(160, 66), (40, 15)] {
        let Some(collective) = collective(local_for_pair) else { return };
        let list = list(collective.clone(), ListStrategy::Local);
        let is_local = |key: &u64| collective.is_local(std::ptr::from_ref(key).cast());
        let local = list.iter().filter(|(key, _)| is_local(key)).count() as u64;
        let pct = local * 100 / PAIRS;
        assert!(pct >= least_pct, "{local_for_pair} bytes a pair: {pct} % of the nodes are local");
    }
}

#[test]
fn scans_of_a_local_tree_come_to_few_far_pages() {
    let Some(collective) = collective(160) else { return };
    let tree = tree(collective.clone(), TreeStrategy::Local);
    let places: Vec<*const u8> =
        tree.iter().map(|(key, _)| std::ptr::from_ref(key).cast()).collect();
    let far_pages = |scan: &[*const u8]| {
        let far = scan.iter().filter(|place| !collective.is_local(**place));
        far.map(|place| *place as usize / 4096).collect::<BTreeSet<usize>>().len()
    };
    let pages: usize = places.chunks_exact(50).map(far_pages).sum();
    let scans = places.len() / 50;
    assert!(pages <= scans * 7, "{pages} far pages in {scans} scans of 50 pairs");
}

#[test]
fn a_list_rearranged_by_another_strategy_lies_as_if_loaded_with_it() {
    let (Some(one), Some(other)) = (collective(20), collective(20)) else { return };
    let mut changed = list(one, ListStrategy::Local);
    changed.set_strategy(ListStrategy::LocalPage);
    changed.make_page_aware().expect("room");
    let mut loaded = list(other, ListStrategy::LocalPage);
    loaded.make_page_aware().expect("room");
    assert_eq!(changed.links(), loaded.links());
    assert_eq!(changed.collective().far_pages(), loaded.collective().far_pages());
}

#[test]
fn a_tree_rearranged_by_another_strategy_lies_as_if_loaded_with_it() {
    let (Some(one), Some(other)) = (collective(20), collective(20)) else { return };
    let mut changed = tree(one, TreeStrategy::LocalDfs);
    changed.make_page_aware().expect("room");
    changed.set_strategy(TreeStrategy::LocalVeb);
    changed.make_page_aware().expect("room");
    let mut loaded = tree(other, TreeStrategy::LocalVeb);
    loaded.make_page_aware().expect("room");
    assert_eq!(changed.links(), loaded.links());
    assert_eq!(changed.collective().far_pages(), loaded.collective().far_pages());
}
