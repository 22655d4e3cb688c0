//! Building a container of a variant, and measuring queries on it.

use crate::report::Layout;
use crate::workload::{Mix, PAIR_BYTES, Query, Value, pairs};
use farheap::region::RegionConfig;
use farheap::store::MemStore;
use farheap::{ByteCount, Error};
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{
    FarBTreeMap, FarLeveledMap, FarPagedMap, FarSkipList, Links, ListStrategy, TreeStrategy,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A container under test and where its nodes go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Variant {
    BTree(TreeStrategy),
    SkipList(ListStrategy),
    /// Full leaves in pages.
    Dense,
    /// Full leaves, those inserted into last in purely-local memory: nothing is watched.
    Recent,
    /// Full leaves, those used most in purely-local memory, after having watched other queries.
    Hot,
    /// A B+-tree with the levels above its full leaves in purely-local memory, or far like them.
    Leveled {
        is_local: bool,
    },
}

/// What the paper does not have.
const BEYOND: [Variant; 5] = [
    Variant::Dense,
    Variant::Recent,
    Variant::Hot,
    Variant::Leveled { is_local: true },
    Variant::Leveled { is_local: false },
];
/// Page size of all levels.
const PAGE: ByteCount = ByteCount(4096);
/// Leaves that a scan comes to, on average: what `recent` moves together.
const RECENT_RUN: usize = 3;
/// Part of the local memory that `hot` and `recent` leave to the page cache.
const HOT_CACHE_SHARE: u64 = 10;
/// Queries that `hot` observes before it places leaves, for each query measured.
const OBSERVED_PER_QUERY: usize = 10;

impl Variant {
    pub(crate) fn all() -> Vec<Variant> {
        let trees = TreeStrategy::ALL.into_iter().map(Variant::BTree);
        let lists = ListStrategy::ALL.into_iter().map(Variant::SkipList);
        trees.chain(lists).chain(BEYOND).collect()
    }

    pub(crate) fn structure(self) -> &'static str {
        match self {
            Variant::BTree(_) => "btree",
            Variant::SkipList(_) => "skiplist",
            Variant::Dense | Variant::Recent | Variant::Hot => "paged",
            Variant::Leveled { .. } => "leveled",
        }
    }

    pub(crate) fn name(self) -> String {
        match self {
            Variant::BTree(strategy) => strategy.to_string(),
            Variant::SkipList(strategy) => strategy.to_string(),
            Variant::Dense => "dense".to_owned(),
            Variant::Recent => "recent".to_owned(),
            Variant::Hot => "hot".to_owned(),
            Variant::Leveled { is_local: true } => "local".to_owned(),
            Variant::Leveled { is_local: false } => "far".to_owned(),
        }
    }

    /// Whether the paper has it.
    pub(crate) fn is_of_paper(self) -> bool {
        matches!(self, Variant::BTree(_) | Variant::SkipList(_))
    }

    pub(crate) fn uses_local(self) -> bool {
        match self {
            Variant::BTree(strategy) => strategy.uses_local(),
            Variant::SkipList(strategy) => strategy.uses_local(),
            Variant::Dense => false,
            Variant::Recent | Variant::Hot => true,
            Variant::Leveled { is_local } => is_local,
        }
    }

    /// The variant that is built by rearranging this one, whose load is the same, once this one has
    /// been measured.
    pub(crate) fn rearranges_to(self) -> Option<Variant> {
        match self {
            Variant::BTree(TreeStrategy::LocalDfs) => Some(Variant::BTree(TreeStrategy::LocalVeb)),
            Variant::SkipList(ListStrategy::Local) => {
                Some(Variant::SkipList(ListStrategy::LocalPage))
            }
            _ => None,
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
            Variant::Dense | Variant::Recent | Variant::Hot => {
                let mut map = FarPagedMap::new(collective)?;
                for (key, value) in pairs(n, seed) {
                    map.insert(key, value)?;
                }
                map.pack(1.0)?;
                if self == Variant::Recent {
                    map.place_by_recency(RECENT_RUN)?;
                }
                Box::new(map)
            }
            Variant::Leveled { .. } => {
                let mut map = FarLeveledMap::new(collective)?;
                for (key, value) in pairs(n, seed) {
                    map.insert(key, value)?;
                }
                map.repack(1.0)?;
                Box::new(map)
            }
        })
    }
}

/// What the benchmark does with a container.
pub(crate) trait Map {
    /// Finds a key and reads this number of pairs from there; a sum over them.
    fn scan(&mut self, key: u64, len: usize) -> u64;
    /// Asks for the pages of a scan at once, if the container can.
    fn fetch(&mut self, _key: u64, _len: usize) {}
    /// Finds a key and replaces its value.
    fn update(&mut self, key: u64, value: &Value) -> bool;
    fn links(&self) -> Links;
    /// Rearranges as another variant does after the same load.
    fn rearrange(&mut self, _to: Variant) -> Outcome<()> {
        Err("this container has one arrangement".into())
    }
    /// Places by what was observed, if the container does that.
    fn place_by_heat(&mut self) -> Outcome<()> {
        Ok(())
    }
}

impl Map for FarPagedMap<u64, Value> {
    fn scan(&mut self, key: u64, len: usize) -> u64 {
        let pairs = self.iter_from(&key).take(len);
        pairs.fold(0, |sum, (key, value)| sum.wrapping_add(taste(*key, value)))
    }

    fn fetch(&mut self, key: u64, len: usize) {
        self.fetch_from(&key, len);
    }

    fn update(&mut self, key: u64, value: &Value) -> bool {
        self.get_mut(&key).is_some_and(|place| {
            *place = *value;
            true
        })
    }

    fn links(&self) -> Links {
        FarPagedMap::links(self)
    }

    fn place_by_heat(&mut self) -> Outcome<()> {
        Ok(FarPagedMap::place_by_heat(self)?)
    }
}

/// Reads both ends of a value, and adds up what the pairs read have in common for all variants.
fn taste(key: u64, value: &Value) -> u64 {
    std::hint::black_box((value[0], value[value.len() - 1]));
    key
}

macro_rules! implement_map {
    ($map:ident $(by $fetch:ident)? $(, $kind:ident)?) => {
        impl Map for $map<u64, Value> {
            fn scan(&mut self, key: u64, len: usize) -> u64 {
                let pairs = self.range(key..).take(len);
                pairs.fold(0, |sum, (key, value)| sum.wrapping_add(taste(*key, value)))
            }

            $(fn fetch(&mut self, key: u64, len: usize) {
                self.$fetch(&key, len);
            })?

            $(fn rearrange(&mut self, to: Variant) -> Outcome<()> {
                let Variant::$kind(strategy) = to else { return Err("another container".into()) };
                self.set_strategy(strategy);
                Ok(self.make_page_aware()?)
            })?

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
implement_map!(FarBTreeMap by fetch_from, BTree);
implement_map!(FarSkipList, SkipList);
implement_map!(FarLeveledMap by fetch_from);

/// A container that was built, ready for queries.
pub(crate) struct Built {
    variant: Variant,
    map: Box<dyn Map>,
    collective: Arc<Collective>,
    n: u64,
    measured: u64,
    /// Whether scans ask for their pages at once.
    pub(crate) fetches: bool,
    pub(crate) built_in: Duration,
    links: Links,
    far_pages: u64,
    local_used: u64,
}

/// One point: queries at a size of local memory.
#[derive(Clone, Debug)]
pub(crate) struct Point {
    pub(crate) local_pct: u64,
    pub(crate) mix: Mix,
    /// Bytes of the page cache: the least that a region takes, or more.
    pub(crate) cache: u64,
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

/// Page cache and purely-local bytes of a variant. What a directory takes of local memory is
/// taken off first.
pub(crate) fn division(variant: Variant, n: u64, local_pct: u64) -> (u64, u64) {
    let bytes = local_bytes(n, local_pct);
    let directory = FarPagedMap::<u64, Value>::directory_bytes(n as usize / 25 + 1).get();
    let minimum = RegionConfig::LIMIT_MIN.get();
    match variant {
        Variant::Leveled { is_local: true } => {
            let levels = FarLeveledMap::<u64, Value>::directory_bytes(n as usize, PAGE, PAGE).get();
            (bytes.saturating_sub(levels), levels.min(bytes))
        }
        Variant::Dense => (bytes.saturating_sub(directory), 0),
        Variant::Recent | Variant::Hot => {
            let bytes = bytes.saturating_sub(directory);
            let cache = (bytes * HOT_CACHE_SHARE / 100).max(minimum);
            (cache, bytes.saturating_sub(cache))
        }
        _ if variant.uses_local() => (bytes - bytes / 2, bytes / 2),
        _ => (bytes, 0),
    }
}

/// A page cache for everything, before and after a rearrangement.
pub(crate) fn ample(n: u64) -> ByteCount {
    ByteCount(PAIR_BYTES * n * 6 + (64 << 20))
}

/// Inserts all pairs with an ample page cache; `None` where userfaultfd is not permitted.
pub(crate) fn build(
    variant: Variant,
    n: u64,
    purely_local: u64,
    region: RegionConfig,
    seed: u64,
) -> Outcome<Option<Built>> {
    let data = region.limit;
    let config = CollectiveConfig::new().local(ByteCount(purely_local)).region(region);
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
    Ok(Some(Built {
        variant,
        map,
        collective,
        n,
        measured: 0,
        fetches: false,
        built_in,
        links,
        far_pages,
        local_used,
    }))
}

impl Built {
    /// Rearranges the container to another variant, which has been loaded in the same way.
    pub(crate) fn rearrange(&mut self, to: Variant) -> Outcome<()> {
        self.collective.region().set_limit(ample(self.n))?;
        let began = Instant::now();
        self.map.rearrange(to)?;
        self.built_in += began.elapsed();
        self.variant = to;
        self.links = self.map.links();
        self.far_pages = self.collective.far_pages();
        self.local_used = self.collective.local_used().get();
        Ok(())
    }

    /// Where the nodes lie.
    pub(crate) fn layout(&self, local_pct: u64) -> Layout {
        let Built { variant, n, links, far_pages, local_used, built_in, .. } = *self;
        Layout { variant, n, local_pct, links, far_pages, local_used, built_in }
    }

    /// Runs queries with a page cache of `cache` bytes that is empty at the start.
    pub(crate) fn measure(&mut self, cache: u64, local_pct: u64, mix: Mix) -> Outcome<Point> {
        assert_eq!(mix.n, self.n, "queries for another container");
        let minimum = RegionConfig::LIMIT_MIN;
        self.collective.region().set_limit(ample(self.n))?;
        if self.variant == Variant::Hot {
            // Other queries of the same kind, as yesterday's are to today's.
            let count = mix.count * OBSERVED_PER_QUERY;
            self.run(&Mix { count, seed: mix.seed + 1, ..mix }.queries(self.measured));
            self.map.place_by_heat()?;
            self.measured += 1;
        }
        // Other values each time: a page that is written what it holds already stays clean.
        let queries = mix.queries(self.measured);
        self.measured += 1;
        let region = self.collective.region();
        region.evict_all()?;
        // The region counts its tables too, which the artifact's page cache does not.
        let tables = region.stats().metadata_bytes.0;
        region.set_limit(ByteCount(ByteCount(cache).max(minimum).get() + tables))?;
        region.evict_all()?;
        let before = region.stats();
        let began = Instant::now();
        let sum = self.run(&queries);
        let took = began.elapsed();
        let after = self.collective.region().stats();
        assert!(after.resident_bytes_max.0 <= ample(self.n).get(), "the limit holds");
        Ok(Point {
            local_pct,
            mix,
            cache: ByteCount(cache).max(minimum).get(),
            pages_in: after.pages_in - before.pages_in,
            pages_out: after.pages_out - before.pages_out,
            took,
            sum,
        })
    }

    fn run(&mut self, queries: &[Query]) -> u64 {
        let mut sum = 0_u64;
        for query in queries {
            match query {
                Query::Scan(key, len) => {
                    if self.fetches {
                        self.map.fetch(*key, *len);
                    }
                    sum = sum.wrapping_add(self.map.scan(*key, *len));
                }
                Query::Update(key, value) => {
                    assert!(self.map.update(*key, value), "every key asked for is there");
                }
            }
        }
        sum
    }
}
