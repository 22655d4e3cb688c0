//! Replacement: what share of Belady's hits the policies get on the same trace.

use crate::cost::{PAGE, Random, filled, in_memory};
use crate::report::Row;
use crate::{Failure, Options};
use farheap::PageId;
use farheap::pool::{BufferPool, Clock, PoolConfig, Proven};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Pages of the table per frame of the pool.
const TABLE_PER_POOL: u64 = 4;

/// Page numbers in the order they are asked for.
type Trace = Vec<u64>;

/// A skewed page of `pages`: a tenth of each range gets most of what goes there, again and again.
fn skewed(random: &mut Random, pages: u64) -> u64 {
    let mut range = pages;
    while range > 8 && random.below(10) < 6 {
        range = range.div_ceil(3);
    }
    // Hot pages lie scattered.
    random.below(range).wrapping_mul(0x9E37_79B9_7F4A_7C15) % pages
}

/// Point accesses only.
fn points(pages: u64, len: u64) -> Trace {
    let mut random = Random(0x5EED_0001);
    (0..len).map(|_| 2 + skewed(&mut random, pages)).collect()
}

/// Point accesses, and a scan of a third of the table that goes on beside them.
fn points_and_scan(pages: u64, len: u64) -> Trace {
    let mut random = Random(0x5EED_0002);
    let mut at = 0;
    let mut next = |turn: u64| {
        if turn.is_multiple_of(2) {
            at = (at + 1) % pages;
            return 2 + at;
        }
        2 + skewed(&mut random, pages)
    };
    (0..len).map(&mut next).collect()
}

/// New pages at the end are hot for a while, as orders are; old ones are looked up now and then.
fn recent(pages: u64, len: u64) -> Trace {
    let mut random = Random(0x5EED_0003);
    let next = |turn: u64| {
        let end = pages / 2 + turn * (pages / 2 - 1) / len;
        let window = if random.below(10) < 8 { pages / 16 } else { end };
        2 + end - random.below(window.min(end))
    };
    (0..len).map(next).collect()
}

/// Hits of the policy that knows the future, with `frames` frames.
fn belady_hits(trace: &Trace, frames: usize) -> u64 {
    let mut next_use = vec![usize::MAX; trace.len()];
    let mut seen = HashMap::new();
    for (at, page) in trace.iter().enumerate().rev() {
        next_use[at] = seen.insert(*page, at).unwrap_or(usize::MAX);
    }
    let (mut resident, mut by_use) = (HashMap::new(), BTreeSet::new());
    let mut hits = 0;
    for (at, page) in trace.iter().enumerate() {
        if let Some(old) = resident.insert(*page, next_use[at]) {
            by_use.remove(&(old, *page));
            hits += 1;
        } else if resident.len() > frames
            && let Some((_, victim)) = by_use.pop_last()
        {
            resident.remove(&victim);
        }
        by_use.insert((next_use[at], *page));
    }
    hits
}

fn hits(pool: &Arc<BufferPool>, trace: &Trace) -> Result<u64, Failure> {
    let before = pool.stats().misses;
    for page in trace {
        let guard = pool.fix_shared(PageId(*page))?;
        assert_eq!(guard[..8], page.to_le_bytes());
    }
    Ok(trace.len() as u64 - (pool.stats().misses - before))
}

pub(crate) fn rows(options: &Options) -> Result<Vec<Row>, Failure> {
    let frames: u64 = if options.test { 512 } else { 8192 };
    let (pages, len) = (frames * TABLE_PER_POOL, frames * if options.test { 8 } else { 60 });
    let mut rows = Vec::new();
    let traces = [
        ("skewed points", points(pages, len)),
        ("skewed points and a scan", points_and_scan(pages, len)),
        ("recent pages", recent(pages, len)),
    ];
    for (name, trace) in &traces {
        for (policy, config) in [
            ("Clock", PoolConfig::new().replacement(Clock)),
            ("Proven", PoolConfig::new().replacement(Proven)),
        ] {
            let pool = in_memory(pages, frames, config.cleaner(false))?;
            filled(&pool, pages)?;
            pool.evict_all()?;
            // All that the limit allows: metadata and free memory are the pool's loss.
            let whole = (pool.manager().limit().get() / PAGE) as usize;
            let value = hits(&pool, trace)? as f64 / len as f64;
            rows.push(Row {
                work: format!("policy {policy}: {name}"),
                value,
                unit: "hits",
                baseline: "Belady",
                baseline_value: belady_hits(trace, whole) as f64 / len as f64,
                goal: "near 1",
            });
        }
    }
    Ok(rows)
}
