//! The far maps against std's `BTreeMap`: random operations under a tiny local limit, with
//! refused allocations in the middle of whatever is going on.

use crate::common::{Dice, eventually, mem_store, seed, watchdog};
use farheap::ByteCount;
use farheap::region::RegionConfig;
use farheap_collections::sub::{AllocError, Collective, CollectiveConfig};
use farheap_collections::{
    FarBTreeMap, FarPagedMap, FarSkipList, ListStrategy, Refused, TreeStrategy,
};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

/// A collective, or `None` with the reason printed where userfaultfd is not permitted.
fn collective(local: ByteCount) -> Option<Arc<Collective>> {
    let region = CollectiveConfig::default_region();
    let limit = RegionConfig::LIMIT_MIN;
    let config = CollectiveConfig::new().local(local).region(region.limit(limit));
    crate::new_collective(config, mem_store(ByteCount::mib(256))).map(Arc::new)
}

/// A value that counts how many of its kind are alive; as large as the benchmark's.
struct Value {
    id: u64,
    alive: Arc<AtomicI64>,
    _bulk: [u8; 130],
}

impl Value {
    fn new(id: u64, alive: &Arc<AtomicI64>) -> Value {
        alive.fetch_add(1, Ordering::Relaxed);
        Value { id, alive: alive.clone(), _bulk: [id as u8; 130] }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What the test does with either container.
trait Map {
    fn insert(&mut self, key: u64, value: Value)
    -> Result<Option<Value>, Box<Refused<u64, Value>>>;
    fn remove(&mut self, key: u64) -> Option<Value>;
    fn get(&self, key: u64) -> Option<u64>;
    fn pairs(&self) -> Vec<(u64, u64)>;
    fn range(&self, bounds: (Bound<u64>, Bound<u64>)) -> Vec<(u64, u64)>;
    fn rearrange(&mut self) -> Result<(), AllocError>;
    fn len(&self) -> usize;
    fn links_total(&self) -> u64;
}

macro_rules! implement_map {
    ($map:ident) => {
        impl Map for $map<u64, Value> {
            fn insert(
                &mut self,
                key: u64,
                value: Value,
            ) -> Result<Option<Value>, Box<Refused<u64, Value>>> {
                self.insert(key, value).map_err(Box::new)
            }
            fn remove(&mut self, key: u64) -> Option<Value> {
                self.remove(&key)
            }
            fn get(&self, key: u64) -> Option<u64> {
                self.get(&key).map(|value| value.id)
            }
            fn pairs(&self) -> Vec<(u64, u64)> {
                self.iter().map(|(key, value)| (*key, value.id)).collect()
            }
            fn range(&self, bounds: (Bound<u64>, Bound<u64>)) -> Vec<(u64, u64)> {
                self.range(bounds).map(|(key, value)| (*key, value.id)).collect()
            }
            fn rearrange(&mut self) -> Result<(), AllocError> {
                self.make_page_aware()
            }
            fn len(&self) -> usize {
                self.len()
            }
            fn links_total(&self) -> u64 {
                self.links().total()
            }
        }
    };
}
implement_map!(FarBTreeMap);
implement_map!(FarSkipList);

/// Plays random operations on a map and on the model; they agree after each.
struct Play<'a> {
    map: Box<dyn Map>,
    model: BTreeMap<u64, u64>,
    alive: Arc<AtomicI64>,
    collective: &'a Collective,
    dice: Dice,
    keys: u64,
    refused: u64,
}

impl Play<'_> {
    fn insert(&mut self, key: u64) {
        let id = self.dice.roll();
        match self.map.insert(key, Value::new(id, &self.alive)) {
            Ok(old) => assert_eq!(old.map(|old| old.id), self.model.insert(key, id)),
            Err(refused) => {
                assert_eq!((refused.key, refused.value.id), (key, id), "the pair comes back");
                assert_eq!(self.map.get(key), None);
                self.refused += 1;
            }
        }
    }

    fn bound(&mut self) -> Bound<u64> {
        let key = self.dice.below(self.keys);
        match self.dice.below(5) {
            0 => Bound::Unbounded,
            1 | 2 => Bound::Included(key),
            _ => Bound::Excluded(key),
        }
    }

    fn check_range(&mut self) {
        let bounds = match (self.bound(), self.bound()) {
            // std panics for ranges that end before they start.
            (Bound::Included(a) | Bound::Excluded(a), Bound::Included(b) | Bound::Excluded(b)) => {
                (Bound::Included(a.min(b)), Bound::Excluded(a.max(b)))
            }
            bounds => bounds,
        };
        let want: Vec<_> = self.model.range(bounds).map(|(key, id)| (*key, *id)).collect();
        assert_eq!(self.map.range(bounds), want, "{bounds:?}");
    }

    fn check_all(&self) {
        assert_eq!(self.map.len(), self.model.len());
        let want: Vec<_> = self.model.iter().map(|(key, id)| (*key, *id)).collect();
        assert_eq!(self.map.pairs(), want);
        assert_eq!(self.alive.load(Ordering::Relaxed), self.model.len() as i64);
    }

    fn step(&mut self, grow: bool) {
        let key = self.dice.below(self.keys);
        let inserts = if grow { 60 } else { 25 };
        match self.dice.below(1000) {
            990..994 => {
                let refuse = self.dice.below(3) > 0;
                let after = self.dice.below(40);
                self.collective.refuse_after(refuse.then_some(after));
            }
            994..998 => {
                self.check_range();
                self.collective.refuse_after(None);
            }
            998.. => {
                // It may run out of memory half-way, and is whole all the same.
                self.refused += u64::from(self.map.rearrange().is_err());
                self.check_all();
            }
            dice if dice % 100 < inserts => self.insert(key),
            dice if dice % 100 < 85 => {
                let removed = self.map.remove(key).map(|value| value.id);
                assert_eq!(removed, self.model.remove(&key), "{key}");
            }
            _ => assert_eq!(self.map.get(key), self.model.get(&key).copied(), "{key}"),
        }
    }
}

fn play(name: &str, local: ByteCount, make: impl FnOnce(Arc<Collective>) -> Box<dyn Map>) {
    let _watchdog = watchdog("the maps' model", Duration::from_secs(120));
    let seed = seed(name);
    let Some(collective) = collective(local) else { return };
    let used_before = (collective.far_pages(), collective.local_used());
    let map = make(collective.clone());
    let alive = Arc::new(AtomicI64::new(0));
    let dice = Dice::new(seed);
    let (model, keys) = (BTreeMap::new(), 3000);
    let mut play = Play { map, model, alive, collective: &collective, dice, keys, refused: 0 };
    for step in 0..16_000 {
        play.step(step < 8_000);
    }
    play.collective.refuse_after(None);
    play.check_all();
    assert!(play.refused > 0, "some allocations were refused");
    assert!(play.map.links_total() > 0);
    let alive = play.alive.clone();
    drop(play);
    assert_eq!(alive.load(Ordering::Relaxed), 0, "every value is dropped once");
    // The swappable and the hinted pool each keep one page to continue with.
    assert!(collective.far_pages() <= used_before.0 + 2, "{} pages", collective.far_pages());
    assert_eq!(collective.local_used(), used_before.1);
}

fn tree(strategy: TreeStrategy) {
    let name = format!("btree {strategy}");
    play(&name, ByteCount::kib(50), |collective| {
        Box::new(FarBTreeMap::<u64, Value>::new(collective, strategy))
    });
}

fn list(strategy: ListStrategy) {
    let name = format!("skip list {strategy}");
    play(&name, ByteCount::kib(50), |collective| {
        Box::new(FarSkipList::<u64, Value>::new(collective, strategy))
    });
}

#[test]
fn a_plain_tree_agrees_with_the_model() {
    tree(TreeStrategy::Plain);
}

#[test]
fn a_hinted_tree_agrees_with_the_model() {
    tree(TreeStrategy::Hint);
}

#[test]
fn a_local_tree_agrees_with_the_model() {
    tree(TreeStrategy::Local);
}

#[test]
fn a_depth_first_tree_agrees_with_the_model() {
    tree(TreeStrategy::Dfs);
}

#[test]
fn a_local_depth_first_tree_agrees_with_the_model() {
    tree(TreeStrategy::LocalDfs);
}

#[test]
fn a_van_emde_boas_tree_agrees_with_the_model() {
    tree(TreeStrategy::Veb);
}

#[test]
fn a_local_van_emde_boas_tree_agrees_with_the_model() {
    tree(TreeStrategy::LocalVeb);
}

#[test]
fn a_plain_list_agrees_with_the_model() {
    list(ListStrategy::Plain);
}

#[test]
fn a_hinted_list_agrees_with_the_model() {
    list(ListStrategy::Hint);
}

#[test]
fn a_local_list_agrees_with_the_model() {
    list(ListStrategy::Local);
}

#[test]
fn a_paged_list_agrees_with_the_model() {
    list(ListStrategy::Page);
}

#[test]
fn a_local_paged_list_agrees_with_the_model() {
    list(ListStrategy::LocalPage);
}

#[test]
fn a_purely_local_capacity_of_zero_means_none() {
    play("no local memory", ByteCount::ZERO, |collective| {
        Box::new(FarBTreeMap::<u64, Value>::new(collective, TreeStrategy::LocalDfs))
    });
}

#[test]
fn bulk_loading_gives_the_sorted_pairs_for_every_size() {
    let Some(collective) = collective(ByteCount::kib(20)) else { return };
    for strategy in TreeStrategy::ALL {
        for n in (0..40).chain([1000, 1001]) {
            let pairs = (0..n).map(|key: u64| (key * 3, key));
            let sorted: Vec<_> = pairs.collect();
            let mut map =
                FarBTreeMap::bulk_load(collective.clone(), strategy, sorted.clone()).expect("room");
            assert_eq!(map.len(), sorted.len());
            let seen: Vec<_> = map.iter().map(|(key, value)| (*key, *value)).collect();
            assert_eq!(seen, sorted, "{strategy} {n}");
            map.insert(1, 1).expect("room");
            for (key, value) in &sorted {
                assert_eq!(map.remove(key), Some(*value));
            }
            assert_eq!(map.len(), 1);
        }
    }
    for strategy in ListStrategy::ALL {
        let pairs = (0..1000).map(|key: u64| (key * 3, key));
        let list = FarSkipList::bulk_load(collective.clone(), strategy, pairs.clone());
        assert!(list.expect("room").iter().map(|(k, v)| (*k, *v)).eq(pairs));
    }
    assert_eq!(collective.local_used(), ByteCount::ZERO);
}

#[test]
fn a_bulk_load_that_runs_out_of_memory_leaks_nothing() {
    let Some(collective) = collective(ByteCount::kib(20)) else { return };
    let alive = Arc::new(AtomicI64::new(0));
    for after in [0, 1, 30, 100, 250] {
        let pairs: Vec<_> = (0..500).map(|key: u64| (key, Value::new(key, &alive))).collect();
        collective.refuse_after(Some(after));
        let error = FarBTreeMap::bulk_load(collective.clone(), TreeStrategy::Dfs, pairs);
        assert_eq!(error.err(), Some(AllocError::Full), "{after}");
        collective.refuse_after(None);
        assert_eq!(alive.load(Ordering::Relaxed), 0);
        assert_eq!(collective.far_pages(), 0);
    }
}

#[test]
fn values_larger_than_a_page_and_values_of_no_size_are_kept() {
    let Some(collective) = collective(ByteCount::mib(1)) else { return };
    for strategy in TreeStrategy::ALL {
        let mut map = FarBTreeMap::new(collective.clone(), strategy);
        for key in 0..50_u32 {
            match map.insert(key, [key; 3000]) {
                Ok(old) => assert!(old.is_none()),
                // An allocator of hints places everything in pages.
                Err(refused) => assert!(matches!(refused.error, AllocError::TooLarge { .. })),
            }
        }
        map.make_page_aware().expect("room");
        let is_hint = strategy == TreeStrategy::Hint;
        assert_eq!(map.len(), if is_hint { 0 } else { 50 });
        assert!(map.iter().all(|(key, value)| value.iter().all(|word| word == key)));
        let mut units = FarBTreeMap::new(collective.clone(), strategy);
        assert_eq!(units.insert((), ()).expect("room"), None);
        assert_eq!(units.insert((), ()).expect("room"), Some(()));
        assert_eq!(units.get(&()), Some(&()));
    }
}

#[test]
fn over_aligned_values_stay_aligned_or_are_refused() {
    #[repr(align(512))]
    struct Aligned(u64);
    #[derive(Debug)]
    #[repr(align(8192))]
    struct MoreThanAPage(#[expect(dead_code, reason = "gives it a size")] u8);
    let Some(collective) = collective(ByteCount::kib(64)) else { return };
    for strategy in TreeStrategy::ALL {
        let mut map = FarBTreeMap::new(collective.clone(), strategy);
        for key in 0..100_u64 {
            map.insert(key, Aligned(key)).expect("room");
        }
        map.make_page_aware().expect("room");
        for (key, value) in &map {
            assert_eq!((value.0, (&raw const *value).addr() % 512), (*key, 0));
        }
        if !strategy.uses_local() {
            let mut map = FarBTreeMap::new(collective.clone(), strategy);
            let refused = map.insert(1, MoreThanAPage(1)).expect_err("pages have 4 KiB");
            let error = refused.error;
            assert!(matches!(error, AllocError::Align { .. } | AllocError::TooLarge { .. }));
        }
    }
}

#[test]
fn a_paged_map_agrees_with_the_model() {
    let _watchdog = watchdog("paged", Duration::from_secs(120));
    let seed = seed("paged map");
    let Some(collective) = collective(ByteCount::kib(40)) else { return };
    let alive = Arc::new(AtomicI64::new(0));
    let mut dice = Dice::new(seed);
    let mut map = FarPagedMap::<u64, Value>::new(collective.clone()).expect("pairs are small");
    let mut model: BTreeMap<u64, u64> = BTreeMap::new();
    let mut refused = 0;
    for step in 0..20_000_u64 {
        let (key, id) = (dice.below(3_000), dice.roll());
        match dice.below(1_000) {
            990..994 => {
                let after = dice.below(20);
                collective.refuse_after((dice.below(3) > 0).then_some(after));
            }
            994..996 => {
                let fill = 0.1 + dice.below(10) as f64 / 10.0;
                refused += u64::from(map.pack(fill).is_err());
            }
            996..998 => refused += u64::from(map.place_by_heat().is_err()),
            998.. => {
                collective.refuse_after(None);
                let want: Vec<_> = model.iter().map(|(key, id)| (*key, *id)).collect();
                let seen: Vec<_> = map.iter().map(|(key, value)| (*key, value.id)).collect();
                assert_eq!(seen, want, "step {step}");
                let tail = map.iter_from(&key).map(|(key, value)| (*key, value.id));
                assert!(tail.eq(model.range(key..).map(|(key, id)| (*key, *id))), "step {step}");
                assert_eq!(
                    (map.len(), alive.load(Ordering::Relaxed)),
                    (want.len(), want.len() as i64)
                );
            }
            dice if dice % 100 < 40 => match map.insert(key, Value::new(id, &alive)) {
                Ok(old) => assert_eq!(old.map(|old| old.id), model.insert(key, id)),
                Err(back) => {
                    assert_eq!((back.key, back.value.id), (key, id));
                    refused += 1;
                }
            },
            dice if dice % 100 < 75 => {
                assert_eq!(map.remove(&key).map(|value| value.id), model.remove(&key), "{key}");
            }
            _ => assert_eq!(map.get(&key).map(|value| value.id), model.get(&key).copied()),
        }
    }
    assert!(refused > 0, "some allocations were refused");
    collective.refuse_after(None);
    drop(map);
    assert_eq!(alive.load(Ordering::Relaxed), 0, "every value is dropped once");
    assert_eq!((collective.far_pages(), collective.local_used()), (0, ByteCount::ZERO));
}

#[test]
fn leaves_that_are_used_move_to_local_memory_and_leave_it_when_others_are_used_more() {
    let Some(collective) = collective(ByteCount::kib(8)) else { return };
    let mut map = FarPagedMap::<u64, u64>::new(collective.clone()).expect("pairs are small");
    for key in 0..10_000 {
        map.insert(key, key).expect("room");
    }
    let mut use_key = |key: u64, times: u32| {
        for _ in 0..times {
            assert_eq!(map.get(&key), Some(&key));
        }
        map.place_by_heat().expect("room");
        let value: *const u64 = map.get(&key).expect("there");
        collective.is_local(value.cast())
    };
    assert!(use_key(77, 10));
    assert!(use_key(5_000, 10));
    assert!(use_key(9_999, 10));
    let value: *const u64 = map.get(&77).expect("there");
    assert!(!collective.is_local(value.cast()), "two leaves fit, and two others are hotter");
}

#[test]
fn pairs_that_a_leaf_cannot_hold_twice_are_refused_and_pairs_of_no_size_are_kept() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let error = FarPagedMap::<u64, [u8; 3000]>::new(collective.clone()).err();
    assert!(matches!(error, Some(AllocError::TooLarge { max: 4096, .. })), "{error:?}");
    let mut units = FarPagedMap::new(collective).expect("they have no size");
    assert_eq!(units.insert((), ()).expect("room"), None);
    assert_eq!(units.insert((), ()).expect("room"), Some(()));
    assert_eq!((units.get(&()), units.len()), (Some(&()), 1));
}

/// A map that is filled, with what it holds; the values say which they are.
fn filled(map: &mut dyn Map, alive: &Arc<AtomicI64>, keys: u64) -> Vec<(u64, u64)> {
    for key in 0..keys {
        assert!(map.insert(key * 7 % keys, Value::new(key, alive)).expect("room").is_none());
    }
    map.pairs()
}

/// Refuses the first allocation of an operation, then the second, and so on until it succeeds:
/// after each refusal the map holds what it held, and goes on working.
fn refuse_at_every_index(collective: &Arc<Collective>, make: impl Fn() -> Box<dyn Map>) {
    let alive = Arc::new(AtomicI64::new(0));
    let mut map = make();
    let mut want = filled(&mut *map, &alive, 150);
    let mut refused = 0;
    for after in 0.. {
        collective.refuse_after(Some(after));
        let outcome = map.rearrange();
        collective.refuse_after(None);
        assert_eq!(map.pairs(), want, "a rearrangement refused after {after}");
        if outcome.is_ok() {
            break;
        }
        refused += 1;
    }
    // Inserts split nodes up to the root, now and then.
    for key in 1_000..1_100 {
        for after in 0.. {
            collective.refuse_after(Some(after));
            let outcome = map.insert(key, Value::new(key, &alive));
            collective.refuse_after(None);
            match outcome {
                Ok(old) => {
                    assert!(old.is_none());
                    want.push((key, key));
                    break;
                }
                Err(back) => assert_eq!((back.key, back.value.id), (key, key)),
            }
            refused += 1;
            assert_eq!(map.pairs(), want, "an insert refused after {after}");
        }
    }
    assert!(refused > 100, "{refused} refusals");
    assert_eq!(map.pairs(), want);
    assert_eq!(alive.load(Ordering::Relaxed), want.len() as i64);
    for (key, id) in want {
        assert_eq!(map.remove(key).map(|value| value.id), Some(id));
    }
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn an_allocation_refused_at_any_index_loses_nothing() {
    let _watchdog = watchdog("refusals", Duration::from_secs(120));
    let Some(collective) = collective(ByteCount::kib(10)) else { return };
    for strategy in TreeStrategy::ALL.into_iter().filter(|s| *s != TreeStrategy::Plain) {
        refuse_at_every_index(&collective, || {
            Box::new(FarBTreeMap::<u64, Value>::new(collective.clone(), strategy))
        });
    }
    for strategy in ListStrategy::ALL.into_iter().filter(|s| *s != ListStrategy::Plain) {
        refuse_at_every_index(&collective, || {
            Box::new(FarSkipList::<u64, Value>::new(collective.clone(), strategy))
        });
    }
}

#[test]
fn a_paged_map_survives_a_refusal_at_any_index() {
    let Some(collective) = collective(ByteCount::kib(40)) else { return };
    let alive = Arc::new(AtomicI64::new(0));
    let mut map = FarPagedMap::<u64, Value>::new(collective.clone()).expect("pairs are small");
    for key in 0..2_000_u64 {
        map.insert(key * 7 % 2_000, Value::new(key, &alive)).expect("room");
    }
    let pairs = |map: &FarPagedMap<u64, Value>| -> Vec<(u64, u64)> {
        map.iter().map(|(key, value)| (*key, value.id)).collect()
    };
    let (want, mut refused) = (pairs(&map), 0);
    type Work = fn(&mut FarPagedMap<u64, Value>) -> Result<(), AllocError>;
    let works: [Work; 3] =
        [|map| map.pack(0.8), |map| map.place_by_recency(3), |map| map.place_by_heat()];
    for work in works {
        for after in 0..150 {
            // Other leaves are hot each time, so that some must leave local memory.
            let hot = after * 37 % 2_000;
            assert!((0..50).all(|_| map.get(&hot).is_some()));
            collective.refuse_after(Some(after));
            // What finds local memory full leaves the rest where it is, and says nothing.
            refused += u64::from(work(&mut map).is_err());
            collective.refuse_after(None);
            assert_eq!(pairs(&map), want, "refused after {after}");
        }
        work(&mut map).expect("room");
    }
    assert!(refused > 100, "{refused} refusals");
    assert!(collective.local_used() > ByteCount::ZERO);
}

#[test]
fn a_scan_that_was_prefetched_reads_the_same_pairs() {
    let Some(collective) = collective(ByteCount::kib(8)) else { return };
    let mut map = FarPagedMap::<u64, u64>::new(collective.clone()).expect("pairs are small");
    for key in 0..10_000 {
        map.insert(key, key).expect("room");
    }
    map.place_by_recency(1).expect("room");
    collective.region().evict_all().expect("the store has room");
    let before = collective.stats().pages_prefetched;
    map.prefetch_from(&3_000, 2_000);
    assert!(eventually(|| collective.stats().pages_prefetched > before), "nothing is prefetched");
    let scan = map.iter_from(&3_000).take(2_000).map(|(key, value)| (*key, *value));
    assert!(scan.eq((3_000..5_000).map(|key| (key, key))));
    // The leaf that got the last pairs is local: there is nothing to ask for.
    let last: *const u64 = map.get(&9_999).expect("there");
    assert!(collective.is_local(last.cast()));
    map.prefetch_from(&9_999, 1);
}

#[test]
fn a_rearrangement_goes_on_where_it_stopped() {
    let Some(collective) = collective(ByteCount::kib(20)) else { return };
    for strategy in TreeStrategy::ALL {
        let alive = Arc::new(AtomicI64::new(0));
        let mut map = FarBTreeMap::<u64, Value>::new(collective.clone(), strategy);
        for key in 0..2_000_u64 {
            map.insert(key * 7 % 2_003, Value::new(key, &alive)).expect("room");
        }
        let mut steps = 0;
        let mut next = 10_000;
        while !map.make_page_aware_step(50).expect("room") {
            steps += 1;
            // The tree changes meanwhile, as it does for a program that goes on working.
            map.insert(next, Value::new(next, &alive)).expect("room");
            map.remove(&(next * 13 % 2_003));
            next += 1;
            assert!(steps < 1_000, "it ends");
        }
        let in_steps = matches!(strategy, TreeStrategy::Dfs | TreeStrategy::LocalDfs);
        assert_eq!(steps > 10, in_steps, "{strategy}: {steps} steps");
        let links = map.links();
        if in_steps {
            assert!(links.in_page > links.cross_page, "{strategy}: {links:?}");
        }
        assert_eq!(map.iter().count(), map.len());
        assert!(map.iter().map(|(key, _)| *key).is_sorted());
    }
}
