//! Rearrangement in parts: how long one takes, and how much memory all of it needs on the way.

use crate::run::{Outcome, ample};
use crate::workload::{Value, hash, pairs};
use farheap::Error;
use farheap::region::RegionConfig;
use farheap::store::MemStore;
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{FarBTreeMap, TreeStrategy};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Nodes moved at once: some hundred pages.
const NODES: usize = 2_000;

/// Builds a tree in hashed order, rearranges it in parts, adds a tenth, and does it again.
pub(crate) fn run(n: u64, region: RegionConfig, seed: u64) -> Outcome<()> {
    let config = CollectiveConfig::new().region(region);
    let collective = match Collective::create(config, Arc::new(MemStore::new(ample(n))?)) {
        Ok(collective) => Arc::new(collective),
        Err(error @ Error::UffdUnavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut map: FarBTreeMap<u64, Value> = FarBTreeMap::new(collective, TreeStrategy::Dfs);
    for (key, value) in pairs(n, seed) {
        map.insert(key, value)?;
    }
    println!("\n| rearrangement | steps | pages before | most | after | longest step | all |");
    println!("|---|---:|---:|---:|---:|---:|---:|");
    rearrange("after the load", &mut map)?;
    rearrange("again", &mut map)?;
    for i in n..n + n / 10 {
        map.insert(hash(i), [i as u8; size_of::<Value>()])?;
    }
    rearrange("after a tenth was added", &mut map)
}

fn rearrange(name: &str, map: &mut FarBTreeMap<u64, Value>) -> Outcome<()> {
    let before = map.collective().far_pages();
    let (mut steps, mut most, mut longest) = (0, before, Duration::ZERO);
    let began = Instant::now();
    loop {
        let step = Instant::now();
        let through = map.make_page_aware_step(NODES)?;
        longest = longest.max(step.elapsed());
        steps += 1;
        most = most.max(map.collective().far_pages());
        if through {
            break;
        }
    }
    let after = map.collective().far_pages();
    let all = began.elapsed();
    println!("| {name} | {steps} | {before} | {most} | {after} | {longest:.1?} | {all:.1?} |");
    Ok(())
}
