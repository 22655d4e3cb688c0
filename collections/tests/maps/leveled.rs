//! The leveled map against std's `BTreeMap`: levels in memory of different kinds and page sizes,
//! with refused allocations in the middle of whatever is going on.

use crate::common::{Dice, mem_store, seed, watchdog};
use farheap::ByteCount;
use farheap::region::{FaultMode, RegionConfig};
use farheap_collections::sub::{AllocError, Collective, CollectiveConfig};
use farheap_collections::{FarLeveledMap, FaultCost, LevelPlan, Refused, Workload};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

fn collective(page_kib: u64, local_kib: u64) -> Option<Arc<Collective>> {
    let page = ByteCount::kib(page_kib);
    let region = CollectiveConfig::default_region();
    let limit = RegionConfig::LIMIT_MIN;
    // A thread that serves its own fault has counted it when it goes on.
    let mode = FaultMode::InThread;
    let region = region.limit(limit).span(ByteCount::gib(1)).mode(mode);
    let config = CollectiveConfig::new().page(page).local(ByteCount::kib(local_kib)).region(region);
    crate::new_collective(config, mem_store(ByteCount::mib(256))).map(Arc::new)
}

/// A key so wide that seven fit into a page: trees are high with few pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Wide(u64, [u64; 63]);

fn wide(key: u64) -> Wide {
    Wide(key, [!key; 63])
}

/// A value that counts how many of its kind are alive.
struct Value {
    id: u64,
    alive: Arc<AtomicI64>,
    _bulk: [u8; 128],
}

impl Value {
    fn new(id: u64, alive: &Arc<AtomicI64>) -> Value {
        alive.fetch_add(1, Ordering::Relaxed);
        Value { id, alive: alive.clone(), _bulk: [id as u8; 128] }
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

type Map = FarLeveledMap<Wide, Value>;

fn pairs(map: &Map) -> Vec<(u64, u64)> {
    map.iter().map(|(key, value)| (key.0, value.id)).collect()
}

/// Leaves of 4 and 16 KiB, levels above that are far, local in part, or in two collectives.
fn kinds() -> Option<Vec<Vec<Arc<Collective>>>> {
    let far = collective(4, 0)?;
    let some = collective(4, 24)?;
    let (leaves, lower, upper) = (collective(16, 0)?, collective(8, 16)?, collective(4, 64)?);
    Some(vec![vec![far], vec![some], vec![leaves, lower, upper]])
}

fn new_map(levels: &[Arc<Collective>]) -> Map {
    FarLeveledMap::with_levels(levels[0].clone(), levels[1..].to_vec()).expect("pairs are small")
}

/// Plays random operations on a map and on the model; they agree after each.
struct Play {
    map: Map,
    model: BTreeMap<u64, u64>,
    alive: Arc<AtomicI64>,
    dice: Dice,
    refused: u64,
}

impl Play {
    fn change(&mut self) {
        let (key, id) = (self.dice.below(700), self.dice.roll());
        match self.dice.below(100) {
            0..45 => match self.map.insert(wide(key), Value::new(id, &self.alive)) {
                Ok(old) => assert_eq!(old.map(|old| old.id), self.model.insert(key, id)),
                Err(Refused { key: back, value, .. }) => {
                    assert_eq!((back, value.id), (wide(key), id), "the pair comes back");
                    self.refused += 1;
                }
            },
            45..80 => {
                let removed = self.map.remove(&wide(key)).map(|value| value.id);
                assert_eq!(removed, self.model.remove(&key), "{key}");
            }
            80..90 => {
                let place = self.map.get_mut(&wide(key));
                assert_eq!(place.is_some(), self.model.contains_key(&key));
                if let Some(place) = place {
                    place.id = id;
                    self.model.insert(key, id);
                }
            }
            _ => {
                let got = self.map.get(&wide(key)).map(|value| value.id);
                assert_eq!(got, self.model.get(&key).copied());
            }
        }
    }

    fn check(&mut self) {
        let want: Vec<_> = self.model.iter().map(|(key, id)| (*key, *id)).collect();
        assert_eq!(pairs(&self.map), want);
        assert_eq!((self.map.len(), self.alive.load(Ordering::Relaxed)), {
            (want.len(), want.len() as i64)
        });
        let (start, end) = (self.dice.below(700), self.dice.below(700));
        let bounds = match self.dice.below(3) {
            0 => (Bound::Included(start), Bound::Excluded(end.max(start))),
            1 => (Bound::Excluded(start), Bound::Included(end.max(start))),
            _ => (Bound::Included(start), Bound::Unbounded),
        };
        let (from, to) = bounds;
        let seen = self.map.range((from.map(wide), to.map(wide)));
        let seen: Vec<_> = seen.map(|(key, value)| (key.0, value.id)).collect();
        let want: Vec<_> = self.model.range(bounds).map(|(key, id)| (*key, *id)).collect();
        assert_eq!(seen, want, "{bounds:?}");
    }
}

#[test]
fn a_leveled_map_agrees_with_the_model() {
    let _watchdog = watchdog("leveled", Duration::from_secs(120));
    let seed = seed("leveled map");
    let Some(kinds) = kinds() else { return };
    let refuse = |count| kinds.iter().flatten().for_each(|c| c.refuse_after(count));
    for (index, levels) in kinds.iter().enumerate() {
        let (alive, dice) = (Arc::new(AtomicI64::new(0)), Dice::new(seed + index as u64));
        let (map, model) = (new_map(levels), BTreeMap::new());
        let mut play = Play { map, model, alive, dice, refused: 0 };
        for _ in 0..8_000 {
            match play.dice.below(1_000) {
                0..8 => {
                    let after = play.dice.below(20);
                    refuse((play.dice.below(3) > 0).then_some(after));
                }
                8..11 => {
                    let fill = 0.1 + play.dice.below(10) as f64 / 10.0;
                    play.refused += u64::from(play.map.repack(fill).is_err());
                }
                11..13 => {
                    let to = &kinds[play.dice.below(3) as usize];
                    let done = play.map.repack_into(to[0].clone(), to[1..].to_vec(), 0.8);
                    play.refused += u64::from(done.is_err());
                }
                13..20 => {
                    refuse(None);
                    play.check();
                }
                20 => play.map.collective(0).region().evict_all().expect("the store has room"),
                _ => play.change(),
            }
        }
        assert!(play.refused > 0, "some allocations were refused");
        assert!(play.map.height() > 2, "{} levels", play.map.height());
        refuse(None);
        play.check();
        let alive = play.alive.clone();
        drop(play);
        assert_eq!(alive.load(Ordering::Relaxed), 0, "every value is dropped once");
    }
    for collective in kinds.iter().flatten() {
        assert_eq!((collective.far_pages(), collective.local_used()), (0, ByteCount::ZERO));
    }
}

#[test]
fn a_leveled_map_survives_a_refusal_at_any_index() {
    let Some(kinds) = kinds() else { return };
    for (levels, others) in kinds.iter().zip(kinds.iter().skip(1).chain(&kinds)) {
        let alive = Arc::new(AtomicI64::new(0));
        let refuse = |count| levels.iter().chain(others).for_each(|c| c.refuse_after(count));
        let mut map = new_map(levels);
        let mut refused = 0;
        // Every insert is refused at each of its allocations before it passes.
        for key in 0..400_u64 {
            let key = key * 7 % 401;
            let before = pairs(&map);
            for after in 0.. {
                refuse(Some(after));
                let done = map.insert(wide(key), Value::new(key, &alive));
                refuse(None);
                let Err(back) = done else { break };
                assert_eq!((back.key, back.value.id), (wide(key), key));
                assert_eq!(pairs(&map), before, "{key} refused after {after}");
                refused += 1;
            }
        }
        assert!(refused > 20, "{refused} refusals");
        let want = pairs(&map);
        for after in 0..1_000 {
            refuse(Some(after));
            let done = map.repack_into(others[0].clone(), others[1..].to_vec(), 0.7);
            refuse(None);
            assert_eq!(pairs(&map), want, "repacking refused after {after}");
            if done.is_ok() {
                assert!(after > 20, "as many allocations as nodes");
                break;
            }
        }
        map.repack(1.0).expect("room");
        assert_eq!(pairs(&map), want);
        assert_eq!(alive.load(Ordering::Relaxed), want.len() as i64);
    }
}

#[test]
fn upper_levels_are_local_before_lower_ones() {
    let Some(collective) = collective(4, 40) else { return };
    let mut map = FarLeveledMap::<Wide, u64>::new(collective.clone()).expect("pairs are small");
    for key in 0..4_000_u64 {
        map.insert(wide(key * 7 % 4_001), key).expect("room");
    }
    map.repack(0.8).expect("room");
    let nodes = map.nodes();
    assert!(nodes.len() > 4, "{nodes:?}");
    assert_eq!(nodes[0].1, 0, "leaves are far");
    let mut room = 10;
    for (level, (all, local)) in nodes.iter().enumerate().skip(1).rev() {
        assert_eq!(*local, room.min(*all), "level {level} of {nodes:?}");
        room -= local;
    }
    let links = map.links();
    assert_eq!(links.purely_local, 9, "ten nodes of a tree");
    assert_eq!(links.total() + 1, nodes.iter().map(|(all, _)| all).sum::<u64>());
    // A node that is made later does not keep its elders out.
    map.repack(0.6).expect("room");
    assert_eq!(map.nodes().iter().map(|(_, local)| local).sum::<u64>(), 10);
    assert_eq!(map.nodes().last(), Some(&(1, 1)), "the root is local");
}

#[test]
fn a_directory_without_local_memory_is_far_and_costs_a_page_for_each_level() {
    for (local_kib, faults) in [(0, 4), (4, 3), (1024, 1)] {
        let Some(collective) = collective(4, local_kib) else { return };
        let mut map = FarLeveledMap::<Wide, u64>::new(collective.clone()).expect("small");
        for key in 0..1_000 {
            map.insert(wide(key), key).expect("room");
        }
        map.repack(1.0).expect("room");
        assert_eq!(map.height(), 4);
        collective.region().evict_all().expect("the store has room");
        let before = collective.stats().pages_in;
        assert_eq!(map.get(&wide(500)), Some(&500));
        assert_eq!(collective.stats().pages_in - before, faults, "{local_kib} KiB");
    }
}

#[test]
fn larger_leaves_are_brought_in_whole() {
    let mut pages = Vec::new();
    for page_kib in [4, 64] {
        let (Some(leaves), Some(above)) = (collective(page_kib, 0), collective(4, 64)) else {
            return;
        };
        let mut map = FarLeveledMap::with_levels(leaves.clone(), vec![above]).expect("small");
        for key in 0..40_000_u64 {
            map.insert(key, !key).expect("room");
        }
        // Keys that arrive in order fill their leaves.
        let capacity = page_kib * 1024 / 16;
        assert_eq!(map.nodes()[0].0, 40_000_u64.div_ceil(capacity));
        assert_eq!(map.nodes()[1], (1, 1), "one local node above them");
        leaves.region().evict_all().expect("the store has room");
        let before = leaves.stats().pages_in;
        let scan = map.range(10_000..20_000).map(|(key, value)| (*key, *value));
        assert!(scan.eq((10_000..20_000).map(|key| (key, !key))));
        pages.push(leaves.stats().pages_in - before);
    }
    let whole = [3 * 16, 4 * 16];
    assert!((40..=41).contains(&pages[0]) && whole.contains(&pages[1]), "{pages:?}");
}

#[test]
fn pairs_that_a_page_cannot_hold_twice_are_refused_and_pairs_of_no_size_are_kept() {
    let Some(collective) = collective(4, 0) else { return };
    let error = FarLeveledMap::<u64, [u8; 3000]>::new(collective.clone()).err();
    assert!(matches!(error, Some(AllocError::TooLarge { max: 4096, .. })), "{error:?}");
    let error = FarLeveledMap::<[u8; 2040], ()>::new(collective.clone()).err();
    assert!(matches!(error, Some(AllocError::TooLarge { max: 4096, .. })), "{error:?}");
    let mut units = FarLeveledMap::new(collective).expect("they have no size");
    assert_eq!(units.insert((), ()).expect("room"), None);
    assert_eq!(units.insert((), ()).expect("room"), Some(()));
    assert_eq!((units.get(&()), units.len()), (Some(&()), 1));
    assert_eq!(units.remove(&()), Some(()));
    assert_eq!((units.height(), units.iter().count()), (0, 0));
}

#[test]
fn a_plan_from_measured_faults_makes_a_map() {
    if collective(4, 0).is_none() {
        return;
    }
    let make = |page: ByteCount| {
        Ok::<_, AllocError>(collective(page.get() >> 10, 0).expect("permitted, as above"))
    };
    let cost = FaultCost::measure(make).expect("the store has room");
    assert!(cost.of(ByteCount::kib(4)) > 0.0 && cost.byte_ns >= 0.0, "{cost:?}");
    let local = ByteCount::mib(12);
    let workload = Workload { pairs: 100_000, pairs_per_read: 50.0, update_share: 0.1, local };
    let plan = LevelPlan::choose::<u64, [u8; 150]>(workload, cost).expect("pairs fit");
    let kib = |bytes: ByteCount| bytes.get().div_ceil(1024);
    let leaves = collective(kib(plan.leaf_page), 0).expect("permitted");
    let above = collective(kib(plan.page), kib(plan.directory)).expect("permitted");
    let mut map = FarLeveledMap::with_levels(leaves, vec![above.clone()]).expect("pairs fit");
    for key in 0..workload.pairs as u64 {
        map.insert(key, [key as u8; 150]).expect("room");
    }
    map.repack(1.0).expect("room");
    assert_eq!(above.local_used(), plan.directory, "{plan:?}");
    assert_eq!(above.far_pages(), 0, "all of {:?} is local, as planned: {plan:?}", map.nodes());
    assert_eq!(map.range(70_000..).next(), Some((&70_000, &[70_000_u64 as u8; 150])));
}
