//! Page sizes by level: pages, bytes and time for each size of leaf, and what the cost model picks.
//!
//! One B+-tree moves from collective to collective (`repack_into`): leaves of 4 to 64 KiB, the
//! levels above in nodes of 4 KiB, purely local. All have the same local memory, whose page cache is
//! full of what other queries of the same kind have asked for. Two stores: memory, and memory that
//! takes 100 us longer for each request, as a disk does.

use crate::faulty::{FaultControl, FaultyStore};
use crate::run::{Map, Outcome, ample, local_bytes};
use crate::workload::{Mix, Query, SCAN_MEAN, Value, pairs};
use farheap::region::{RegionConfig, Stats};
use farheap::store::MemStore;
use farheap::{ByteCount, Error};
use farheap_collections::sub::{Collective, CollectiveConfig};
use farheap_collections::{FarLeveledMap, FaultCost, LevelPlan, Workload};
use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Page sizes of leaves, in KiB.
const LEAVES_KIB: [u64; 5] = [4, 8, 16, 32, 64];
/// Page size of the levels above.
const PAGE: ByteCount = ByteCount(4096);
/// Pairs that a scan goes over, on average.
const SCANS: [usize; 3] = [1, 50, 500];
/// What the slow store takes longer for a request.
const DELAYS: [Duration; 2] = [Duration::ZERO, Duration::from_micros(100)];
/// Local memory in percent of the data.
const LOCAL_PCT: u64 = 25;
/// What a region takes at least, twice; matters at tiny scales.
const LOCAL_MIN: ByteCount = ByteCount(16 << 20);
/// The interval in queries.
const THINNED: usize = 5;
const UPDATES: f64 = 0.05;
/// The fastest of this number of rounds counts.
const ROUNDS: usize = 3;
/// Other queries that are asked before, for each query measured.
const WARM: usize = 5;

/// Leaves of a size under a load.
struct Row {
    delay: Duration,
    scan: usize,
    leaf_kib: u64,
    pages: u64,
    bytes: u64,
    took: Duration,
    expected: Duration,
    sum: u64,
}

fn collective(
    region: RegionConfig,
    page: ByteCount,
    local: ByteCount,
    room: ByteCount,
) -> Result<(Arc<Collective>, FaultControl), Error> {
    let store = FaultyStore::new(Arc::new(MemStore::new(room)?), 1);
    let control = store.control();
    let limit = region.limit.max(RegionConfig::LIMIT_MIN);
    let config = CollectiveConfig::new().local(local).page(page).region(region.limit(limit));
    Ok((Arc::new(Collective::create(config, Arc::new(store))?), control))
}

/// Measures all, prints a table and writes `placement_levels.csv`.
pub(crate) fn run(
    n: u64,
    queries: usize,
    region: RegionConfig,
    seed: u64,
    folder: &Path,
) -> Outcome<()> {
    let directory = FarLeveledMap::<u64, Value>::directory_bytes(n as usize, PAGE, PAGE);
    let above = match collective(region.clone(), PAGE, directory, ample(n)) {
        Ok((above, _)) => above,
        Err(error @ Error::UffdUnavailable { .. }) => {
            println!("skipped: {error}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut costs = Vec::new();
    for delay in DELAYS {
        let make = |page| -> Outcome<Arc<Collective>> {
            let (collective, control) =
                collective(region.clone(), page, ByteCount::ZERO, ByteCount::mib(256))?;
            control.delay(delay);
            Ok(collective)
        };
        costs.push(FaultCost::measure(make)?);
    }
    println!("\nfault: {costs:.2?}");
    let mut map: Option<FarLeveledMap<u64, Value>> = None;
    let mut rows = Vec::new();
    for leaf_kib in LEAVES_KIB {
        let page = ByteCount::kib(leaf_kib);
        let (leaves, control) = collective(region.clone(), page, ByteCount::ZERO, ample(n))?;
        let map = match &mut map {
            Some(map) => {
                map.repack_into(leaves.clone(), vec![above.clone()], 1.0)?;
                map
            }
            map => map.insert(load(&leaves, &above, n, seed)?),
        };
        for (delay, cost) in DELAYS.into_iter().zip(&costs) {
            for scan in SCANS {
                let mix = Mix { n, count: queries / THINNED, alpha: 0.8, updates: UPDATES, seed };
                let workload = Workload {
                    pairs: n as usize,
                    pairs_per_read: scan as f64,
                    update_share: UPDATES,
                    local: ByteCount(local_bytes(n, LOCAL_PCT)).max(LOCAL_MIN),
                };
                let plan = LevelPlan::with_pages::<u64, Value>(workload, *cost, page, PAGE)
                    .ok_or("pairs are small")?;
                let load = Load { delay, scan, mix, control: &control };
                rows.push(measure(map, &leaves, &plan, &load)?);
            }
        }
    }
    report(&rows, folder)
}

fn load(
    leaves: &Arc<Collective>,
    above: &Arc<Collective>,
    n: u64,
    seed: u64,
) -> Outcome<FarLeveledMap<u64, Value>> {
    let mut map = FarLeveledMap::with_levels(leaves.clone(), vec![above.clone()])?;
    for (key, value) in pairs(n, seed) {
        map.insert(key, value)?;
    }
    map.repack(1.0)?;
    Ok(map)
}

struct Load<'a> {
    delay: Duration,
    scan: usize,
    mix: Mix,
    control: &'a FaultControl,
}

fn measure(
    map: &mut FarLeveledMap<u64, Value>,
    leaves: &Collective,
    plan: &LevelPlan,
    load: &Load<'_>,
) -> Outcome<Row> {
    let region = leaves.region();
    let page = leaves.page_size().get();
    let (mut took, mut swapped, mut sum) = (Duration::MAX, 0, 0_u64);
    for round in 0..ROUNDS {
        // Other values each time: a page that is written what it holds already stays clean.
        let queries = load.mix.queries(round as u64);
        load.control.delay(Duration::ZERO);
        region.set_limit(ample(load.mix.n))?;
        region.evict_all()?;
        region.set_limit(ByteCount(plan.cache.get() + region.stats().metadata_bytes.0))?;
        // The plan is for a cache that is full of what was asked for before.
        let others = Mix { seed: load.mix.seed + 1, count: load.mix.count * WARM, ..load.mix };
        ask(map, &others.queries(round as u64), load.scan);
        load.control.delay(load.delay);
        let before: Stats = region.stats();
        let began = Instant::now();
        sum = ask(map, &queries, load.scan);
        took = took.min(began.elapsed());
        let after = region.stats();
        swapped = after.pages_in + after.pages_out - before.pages_in - before.pages_out;
    }
    load.control.delay(Duration::ZERO);
    Ok(Row {
        delay: load.delay,
        scan: load.scan,
        leaf_kib: page >> 10,
        pages: swapped,
        bytes: swapped * 4096,
        took,
        expected: Duration::from_secs_f64(plan.op_ns * load.mix.count as f64 / 1e9),
        sum,
    })
}

/// Asks; a sum over everything read.
fn ask(map: &mut FarLeveledMap<u64, Value>, queries: &[Query], scan: usize) -> u64 {
    let mut sum = 0_u64;
    for query in queries {
        match query {
            Query::Scan(key, len) => {
                let len = (len * scan / SCAN_MEAN).max(1);
                sum = sum.wrapping_add(Map::scan(map, *key, len));
            }
            Query::Update(key, value) => {
                assert!(map.update(*key, value), "every key asked for is there");
            }
        }
    }
    sum
}

fn report(rows: &[Row], folder: &Path) -> Outcome<()> {
    println!("\n| store | scan | leaf | pages | MiB | time | expected | against the fastest |");
    println!("|---|---:|---:|---:|---:|---:|---:|---:|");
    let mut csv = "work,value,unit,baseline,baseline_value,ratio,goal\n".to_owned();
    for delay in DELAYS {
        for scan in SCANS {
            let same = |row: &&Row| row.delay == delay && row.scan == scan;
            let of_load: Vec<&Row> = rows.iter().filter(same).collect();
            let least = |time: fn(&Row) -> Duration| of_load.iter().min_by_key(|row| time(row));
            let fastest = least(|row| row.took).ok_or("rows")?;
            let chosen = least(|row| row.expected).ok_or("rows")?;
            for row in &of_load {
                assert_eq!(row.sum, fastest.sum, "all leaves hold the same pairs");
                let is_chosen = row.leaf_kib == chosen.leaf_kib;
                let ratio = row.took.as_secs_f64() / fastest.took.as_secs_f64();
                let (mib, mark) = (row.bytes >> 20, if is_chosen { " (chosen)" } else { "" });
                println!(
                    "| +{delay:?} | {scan} | {} KiB{mark} | {} | {mib} | {:.1?} | {:.1?} | {ratio:.2} |",
                    row.leaf_kib, row.pages, row.took, row.expected,
                );
            }
            let work = format!("leaf pages by plan, scan {scan}, store +{delay:?}");
            let (mine, best) = (chosen.took.as_secs_f64(), fastest.took.as_secs_f64());
            writeln!(
                csv,
                "{work},{mine:.4},s,{} KiB measured fastest,{best:.4},{:.3},>=0.8",
                fastest.leaf_kib,
                best / mine,
            )?;
            let small = of_load.iter().find(|row| row.leaf_kib == 4).ok_or("rows")?;
            let base = small.took.as_secs_f64();
            writeln!(csv, "{work},{mine:.4},s,4 KiB,{base:.4},{:.3},>=1", base / mine)?;
        }
    }
    std::fs::create_dir_all(folder)?;
    std::fs::write(folder.join("placement_levels.csv"), csv)?;
    Ok(())
}
