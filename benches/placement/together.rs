//! Keys that are read together and are no neighbours: what rearranging by co-access is worth.

use crate::run::{Outcome, ample, local_bytes};
use crate::workload::{Value, hash, pairs};
use farheap::ByteCount;
use farheap::containers::{FarBTreeMap, FarPagedMap, TreeStrategy};
use farheap::region::RegionConfig;
use farheap::store::MemStore;
use farheap::sub::{Collective, CollectiveConfig};
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Zipf};
use std::sync::Arc;

/// Keys of a group.
const GROUP: u64 = 4;

fn group(of: u64) -> impl Iterator<Item = u64> {
    (of * GROUP..(of + 1) * GROUP).map(hash)
}

fn measure(
    collective: &Collective,
    n: u64,
    cache: u64,
    asked: &[u64],
    mut get: impl FnMut(u64) -> u8,
) -> Outcome<(u64, u64, u64)> {
    let region = collective.region();
    region.set_limit(ample(n))?;
    region.evict_all()?;
    let cache = ByteCount(cache).max(RegionConfig::limit_min(collective.page_size()));
    region.set_limit(ByteCount(cache.get() + region.stats().metadata_bytes))?;
    region.evict_all()?;
    let before = region.stats();
    let mut sum = 0_u64;
    for of in asked {
        sum += group(*of).map(|key| u64::from(get(key))).sum::<u64>();
    }
    let after = region.stats();
    Ok((after.pages_in - before.pages_in, after.pages_out - before.pages_out, sum))
}

pub(crate) fn run(
    n: u64,
    queries: usize,
    local: &[u64],
    region: RegionConfig,
    seed: u64,
) -> Outcome<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let zipf = Zipf::new((n / GROUP) as f64, 0.8).expect("a valid distribution");
    let asked: Vec<u64> = (0..queries).map(|_| zipf.sample(&mut rng) as u64 - 1).collect();
    for local in local {
        let bytes = local_bytes(n, *local);
        let make = |local| -> Outcome<Arc<Collective>> {
            let config = CollectiveConfig { local: ByteCount(local), region: region.clone() };
            Ok(Arc::new(Collective::create(config, Arc::new(MemStore::new(ample(n))?))?))
        };
        {
            let collective = make(bytes / 2)?;
            let mut map =
                FarBTreeMap::<u64, Value>::new(collective.clone(), TreeStrategy::LocalDfs);
            for (key, value) in pairs(n, seed) {
                map.insert(key, value)?;
            }
            map.make_page_aware()?;
            let get = |map: &FarBTreeMap<u64, Value>, key| map.get(&key).expect("there")[0];
            let found = measure(&collective, n, bytes / 2, &asked, |key| get(&map, key))?;
            println!("{local} % btree local+dfs: {found:?}");
            for leaves in [true, false] {
                region_ample(&collective, n)?;
                let moved = map.place_together((0..n / GROUP).map(group), 0.9, leaves)?;
                let found = measure(&collective, n, bytes / 2, &asked, |key| get(&map, key))?;
                println!(
                    "{local} % btree by groups (only leaves: {leaves}), {moved} moved: {found:?}"
                );
                map.make_page_aware()?;
            }
        }
        let directory = FarPagedMap::<u64, Value>::directory_bytes(n as usize / 25 + 1).get();
        let collective = make(0)?;
        let mut map = FarPagedMap::<u64, Value>::new(collective.clone())?;
        for (key, value) in pairs(n, seed) {
            map.insert(key, value)?;
        }
        map.pack(1.0)?;
        let cache = bytes.saturating_sub(directory);
        let get = |key| map.get(&key).expect("there")[0];
        let found = measure(&collective, n, cache, &asked, get)?;
        println!("{local} % paged dense: {found:?}");
    }
    Ok(())
}

fn region_ample(collective: &Collective, n: u64) -> Outcome<()> {
    Ok(collective.region().set_limit(ample(n))?)
}
