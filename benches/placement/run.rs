//! Building a container of a variant, and measuring queries on it.

use crate::workload::{Mix, PAIR_BYTES, Query, Value, pairs};
use farheap::containers::{FarBTreeMap, FarSkipList, Links, ListStrategy, TreeStrategy};
use farheap::region::RegionConfig;
use farheap::store::MemStore;
use farheap::sub::{Collective, CollectiveConfig};
use farheap::{ByteCount, Error};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A container under test and where its nodes go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Variant {
    BTree(TreeStrategy),
    SkipList(ListStrategy),
}

impl Variant {
    pub(crate) fn all() -> Vec<Variant> {
        let trees = TreeStrategy::ALL.into_iter().map(Variant::BTree);
        trees.chain(ListStrategy::ALL.into_iter().map(Variant::SkipList)).collect()
    }

    pub(crate) fn structure(self) -> &'static str {
        match self {
            Variant::BTree(_) => "btree",
            Variant::SkipList(_) => "skiplist",
        }
    }

    pub(crate) fn name(self) -> String {
        match self {
            Variant::BTree(strategy) => strategy.to_string(),
            Variant::SkipList(strategy) => strategy.to_string(),
        }
    }

    pub(crate) fn uses_local(self) -> bool {
        match self {
            Variant::BTree(strategy) => strategy.uses_local(),
            Variant::SkipList(strategy) => strategy.uses_local(),
        }
    }

    fn build(self, collective: Arc<Collective>, n: u64, seed: u64) -> Outcome<Box<dyn Map>> {
        Ok(match self {
            Variant::BTree(strategy) => {
                let mut map = FarBTreeMap::new(collective, strategy);
                for (key, value) in pairs(n, seed) {
                    map.insert(key, value)?;
                }
                map.make_page_aware()?;
                Box::new(map)
            }
            Variant::SkipList(strategy) => {
                let mut list = FarSkipList::new(collective, strategy);
                for (key, value) in pairs(n, seed) {
                    list.insert(key, value)?;
                }
                list.make_page_aware()?;
                Box::new(list)
            }
        })
    }
}

/// What the benchmark does with a container.
pub(crate) trait Map {
    /// Finds a key and reads so many pairs from there; a sum over them.
    fn scan(&mut self, key: u64, len: usize) -> u64;
    /// Finds a key and replaces its value.
    fn update(&mut self, key: u64, value: &Value) -> bool;
    fn links(&self) -> Links;
}

/// Reads both ends of a value, and adds up what the pairs read have in common for all variants.
fn taste(key: u64, value: &Value) -> u64 {
    std::hint::black_box((value[0], value[value.len() - 1]));
    key
}

macro_rules! implement_map {
    ($map:ident) => {
        impl Map for $map<u64, Value> {
            fn scan(&mut self, key: u64, len: usize) -> u64 {
                let pairs = self.range(key..).take(len);
                pairs.fold(0, |sum, (key, value)| sum.wrapping_add(taste(*key, value)))
            }

            fn update(&mut self, key: u64, value: &Value) -> bool {
                self.get_mut(&key).is_some_and(|place| {
                    *place = *value;
                    true
                })
            }

            fn links(&self) -> Links {
                $map::links(self)
            }
        }
    };
}
implement_map!(FarBTreeMap);
implement_map!(FarSkipList);

/// A container that was built, ready for queries.
pub(crate) struct Built {
    map: Box<dyn Map>,
    collective: Arc<Collective>,
    n: u64,
    measured: u64,
    pub(crate) built_in: Duration,
    pub(crate) links: Links,
    pub(crate) far_pages: u64,
    pub(crate) local_used: u64,
}

/// One point: queries at a size of local memory.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) local_pct: u64,
    pub(crate) mix: Mix,
    pub(crate) pages_in: u64,
    pub(crate) pages_out: u64,
    pub(crate) took: Duration,
    /// Sum over everything read: the same for all variants.
    pub(crate) sum: u64,
}

impl Point {
    pub(crate) fn swapped(&self) -> u64 {
        self.pages_in + self.pages_out
    }
}

/// Bytes of local memory at a percentage.
pub(crate) fn local_bytes(n: u64, local_pct: u64) -> u64 {
    PAIR_BYTES * n * local_pct / 100
}

/// Page cache and purely-local bytes of a variant.
pub(crate) fn division(variant: Variant, n: u64, local_pct: u64) -> (u64, u64) {
    let bytes = local_bytes(n, local_pct);
    if variant.uses_local() { (bytes - bytes / 2, bytes / 2) } else { (bytes, 0) }
}

/// Inserts all pairs with an ample page cache; `None` where userfaultfd is not permitted.
pub(crate) fn build(
    variant: Variant,
    n: u64,
    purely_local: u64,
    seed: u64,
) -> Outcome<Option<Built>> {
    let data = ByteCount(PAIR_BYTES * n * 6 + (64 << 20));
    let config = CollectiveConfig {
        local: ByteCount(purely_local),
        region: RegionConfig { limit: data, ..CollectiveConfig::default().region },
    };
    let collective = match Collective::create(config, Arc::new(MemStore::new(data)?)) {
        Ok(collective) => Arc::new(collective),
        Err(error @ Error::UffdUnavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(None);
        }
        Err(error) => return Err(error.into()),
    };
    let began = Instant::now();
    let map = variant.build(collective.clone(), n, seed)?;
    let built_in = began.elapsed();
    let links = map.links();
    let (far_pages, local_used) = (collective.far_pages(), collective.local_used().get());
    Ok(Some(Built { map, collective, n, measured: 0, built_in, links, far_pages, local_used }))
}

impl Built {
    /// Runs queries with a page cache of `cache` bytes that is empty at the start.
    pub(crate) fn measure(&mut self, cache: u64, local_pct: u64, mix: Mix) -> Outcome<Point> {
        assert_eq!(mix.n, self.n, "queries for another container");
        // Other values each time: a page that is written what it holds already stays clean.
        let queries = mix.queries(self.measured);
        self.measured += 1;
        let minimum = RegionConfig::limit_min(self.collective.page_size());
        let region = self.collective.region();
        region.evict_all()?;
        region.set_limit(ByteCount(cache).max(minimum))?;
        region.evict_all()?;
        let before = region.stats();
        let began = Instant::now();
        let mut sum = 0_u64;
        for query in &queries {
            match query {
                Query::Scan(key, len) => sum = sum.wrapping_add(self.map.scan(*key, *len)),
                Query::Update(key, value) => {
                    assert!(self.map.update(*key, value), "every key asked for is there");
                }
            }
        }
        let took = began.elapsed();
        let after = self.collective.region().stats();
        assert!(after.resident_bytes <= after.limit_bytes, "the limit holds");
        let pages = |pages: u64| pages * self.collective.page_size().get() / 4096;
        Ok(Point {
            local_pct,
            mix,
            pages_in: pages(after.pages_in - before.pages_in),
            pages_out: pages(after.pages_out - before.pages_out),
            took,
            sum,
        })
    }
}
