//! The paper's open questions (its section 6), an experiment for each.

use crate::Failure;
use crate::cache::{Answers, Place, ResultCache};
use crate::device::Device;
use crate::options::Options;
use crate::plot;
use crate::report::{self, Row};
use crate::run::{Asked, Mode, Plan, Query, Run, run};
use crate::source::Source;
use crate::unmap;
use farheap::ByteCount;
use farheap::pool::{Clock, PoolConfig, Proven, Replacement, Worth};
use farheap::region::{Region, RegionConfig};
use farheap::store::MemStore;
use std::sync::Arc;

/// Prints a run, and keeps it.
fn keep(runs: &mut Vec<Run>, run: Run) {
    report::print(&run);
    runs.push(run);
}

/// Writes samples, a picture over time, and one of bars: throughput without and during queries,
/// faults, and what a query pays.
fn finish(options: &Options, name: &str, runs: &[Run]) -> Result<(), Failure> {
    let folder = options.folder();
    let file = |suffix: &str| folder.join(format!("cooperative_{name}{suffix}"));
    report::write_samples(runs, &file("_time.csv"))?;
    report::write_runs(runs, &file(".csv"))?;
    plot::over_time(runs, &file("_time.svg"))?;
    let kinds = [
        "new orders/s without query",
        "new orders/s during query",
        "faults per new order without query",
        "query: allocation and first touch, ms (query 9: all of it)",
    ];
    let bars = runs.iter().map(|run| {
        let (quiet, query) = (run.quiet(), run.during_queries());
        let paid = run.median(|q| q.allocate_ms + q.touch_ms);
        let paid = if paid.is_nan() { 1e3 * run.median(|q| q.total_s) } else { paid };
        let values =
            vec![quiet.orders_per_s(), query.orders_per_s(), quiet.faults_per_order(), paid];
        (run.name.clone(), values)
    });
    plot::bars(&file(".svg"), &kinds, &bars.collect::<Vec<_>>())
}

/// (a) What do writes change?
pub(crate) fn writes(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let mut runs = Vec::new();
    for (name, mode) in [("coop", Mode::Cooperative), ("part", Mode::Partitioned)] {
        for (kind, read_only) in [("reads", true), ("writes", false)] {
            let plan = Plan::new(format!("{name}, {kind}"), mode, options);
            keep(&mut runs, run(options, source, Plan { read_only, ..plan })?);
        }
    }
    let plan = Plan::new("coop, writes, no cleaner", Mode::Cooperative, options);
    let pool = PoolConfig::new().cleaner(false);
    keep(&mut runs, run(options, source, Plan { pool, ..plan })?);
    finish(options, "writes", &runs)
}

/// (b) A floor for the tables: who pays how much? What does not fit above it spills.
pub(crate) fn floor(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let Some(options) = with_far_memory(options) else { return Ok(()) };
    let mut runs = Vec::new();
    for floor in [0.0, 0.45, 0.6, 0.75] {
        let name = format!("floor {:.0} %", 100.0 * floor);
        let plan = Plan { floor, spill: true, ..Plan::new(name, Mode::Cooperative, &options) };
        keep(&mut runs, run(&options, source, plan)?);
    }
    finish(&options, "floor", &runs)
}

/// First in, first out, as far as the pool allows: a touch is worth one lap, however often.
#[derive(Clone, Copy, Debug)]
struct Once;

impl Replacement for Once {
    fn arrives(&self, _away: Option<f32>, _prefetched: bool) -> Worth {
        Worth { laps: 0, touched: false }
    }

    fn passes_touched(&self, _laps: u8) -> u8 {
        0
    }
}

/// Every touch is worth all laps: closest to what was used lately.
#[derive(Clone, Copy, Debug)]
struct Sticky;

impl Replacement for Sticky {
    fn arrives(&self, _away: Option<f32>, _prefetched: bool) -> Worth {
        Worth { laps: 1, touched: true }
    }

    fn passes_touched(&self, _laps: u8) -> u8 {
        3
    }
}

/// (c) Policies, with both kinds of queries.
pub(crate) fn policies(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let mut runs = Vec::new();
    for (kind, query) in [("half", Query::Simulated(0.5)), ("q9", Query::Q9)] {
        for name in ["proven", "clock", "once", "sticky"] {
            let pool = PoolConfig::new();
            let pool = match name {
                "proven" => pool.replacement(Proven),
                "clock" => pool.replacement(Clock),
                "once" => pool.replacement(Once),
                _ => pool.replacement(Sticky),
            };
            let plan = Plan::new(format!("{name}, {kind}"), Mode::Cooperative, options);
            keep(&mut runs, run(options, source, Plan { query, pool, ..plan })?);
        }
    }
    finish(options, "policies", &runs)
}

/// (d) A host's result cache: with a part of its own, giving way before tables, after them, or
/// first but with a floor.
pub(crate) fn caches(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let mut runs = Vec::new();
    let mut answers = Vec::new();
    for (name, place) in [
        ("a fifth for itself", Place::Fixed(0.2)),
        ("gives way first", Place::First),
        ("gives way last", Place::Last),
        ("first, floor of a tenth", Place::FirstWithFloor(0.1)),
    ] {
        let cache = ResultCache::new(options, place);
        let plan = Plan { beside: Some(&cache), ..Plan::new(name, Mode::Cooperative, options) };
        keep(&mut runs, run(options, source, plan)?);
        let Answers { looked_up, hits, seconds } = cache.answers();
        let (rate, share) = (looked_up as f64 / seconds, 100.0 * hits as f64 / looked_up as f64);
        println!("{:<34} {rate:.0} look-ups/s, {share:.1} % hits", "");
        answers.push((name.to_owned(), vec![rate, share]));
    }
    let folder = options.folder();
    let kinds = ["look-ups/s in the result cache", "hits, %"];
    plot::bars(&folder.join("cooperative_caches_hits.svg"), &kinds, &answers)?;
    finish(options, "caches", &runs)
}

/// (e) Temporary data of half, one and two limits: cooperative memory spills, a part of its own
/// fails. Last without streams, beside the device's speed.
pub(crate) fn spill(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let Some(options) = with_far_memory(options) else { return Ok(()) };
    let mut runs = Vec::new();
    for (name, mode) in [("coop", Mode::Cooperative), ("part", Mode::Partitioned)] {
        for share in [0.5, 1.0, 2.0] {
            let plan = Plan {
                query: Query::Simulated(share),
                spill: mode == Mode::Cooperative,
                ..Plan::new(format!("{name}, {share} limits"), mode, &options)
            };
            keep(&mut runs, run(&options, source, plan)?);
        }
    }
    let alone = Options { streams: 0, ..options.clone() };
    let plan = Plan::new("coop, 2 limits, no streams", Mode::Cooperative, &alone);
    let plan = Plan { query: Query::Simulated(2.0), spill: true, ..plan };
    keep(&mut runs, run(&alone, source, plan)?);
    let bytes = 2 * options.limit.get();
    let device = Device::new(&options, bytes)?;
    let (write, read) = (device.write, device.read()?);
    let alone = runs.last().expect("pushed above");
    let mb_per_s = |ms: f64| bytes as f64 / 1e3 / ms;
    let row = |work: &str, value, baseline_value, goal| Row {
        work: work.to_owned(),
        value,
        unit: "MB/s",
        baseline: "the device".to_owned(),
        baseline_value,
        invert: false,
        goal,
    };
    let rows = [
        row("writing 2 limits", mb_per_s(alone.median(|q| q.touch_ms)), write, ">= 0.8"),
        row("reading them back", mb_per_s(alone.median(|q| q.read_ms)), read, ">= 0.8"),
    ];
    rows.iter().for_each(Row::print);
    report::write_rows(&rows, &options.folder().join("cooperative_spill_speed.csv"))?;
    finish(&options, "spill", &runs)
}

/// (f) What leaves, and who writes it: reads and writes of a new order with 1, 2 and 8 streams and no query,
/// with and without a cleaner. Without one, only what leaves is written.
pub(crate) fn victims(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let (mut runs, mut rows) = (Vec::new(), Vec::new());
    for streams in [1, 2, 8] {
        let options = Options { streams, ..options.clone() };
        for (name, cleaner) in [("no cleaner", false), ("cleaner", true)] {
            let pool = PoolConfig::new().cleaner(cleaner);
            let plan = Plan::new(format!("{streams} streams, {name}"), Mode::Cooperative, &options);
            keep(&mut runs, run(&options, source, Plan { query: Query::None, pool, ..plan })?);
        }
        // The order in which vmcache's pages leave: a second chance, whether they are dirty or not.
        let pool = PoolConfig::new().cleaner(false).replacement(Clock);
        let plan =
            Plan::new(format!("{streams} streams, second chance"), Mode::Cooperative, &options);
        keep(&mut runs, run(&options, source, Plan { query: Query::None, pool, ..plan })?);
        let last = runs.len();
        let [without, with, chance] = [last - 3, last - 2, last - 1].map(|at| runs[at].all());
        let row = |work: &str, value, baseline: &str, baseline_value| Row {
            work: format!("{work} of a new order, {streams} streams"),
            value,
            unit: "pages",
            baseline: baseline.to_owned(),
            baseline_value,
            invert: true,
            goal: ">= 0.91",
        };
        let reads = without.faults_per_order();
        rows.push(row("reads", with.faults_per_order(), "no cleaner", reads));
        let writes = without.written_per_order();
        rows.push(row("writes", with.written_per_order(), "no cleaner", writes));
        let base = chance.faults_per_order();
        rows.push(row("reads without cleaner", reads, "second chance", base));
    }
    rows.iter().for_each(Row::print);
    report::write_rows(&rows, &options.folder().join("cooperative_victims_rows.csv"))?;
    finish(options, "victims", &runs)
}

/// (g) Temporary memory of half the limit, again and again beside the transactions: the median and the tail,
/// beside the goal, or beside the time that the device alone takes to write as many scattered pages.
pub(crate) fn tail(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let often = if options.test {
        options.clone()
    } else {
        Options { every: 0.2, hold: 0.05, ..options.clone() }
    };
    let mut runs = Vec::new();
    let plan = Plan::new("half the limit five times a second", Mode::Cooperative, &often);
    keep(&mut runs, run(&often, source, plan)?);
    let device = Device::new(options, 2 * options.limit.get())?;
    let half = options.limit.get() as f64 / 2.0;
    let per_gib = |ms: f64| ms * (1u64 << 30) as f64 / half;
    let mut queries = runs[0].queries.clone();
    queries.sort_by(|one, other| one.allocate_ms.total_cmp(&other.allocate_ms));
    let mut rows = Vec::new();
    for (name, part, goal_ms) in [("median", 0.5, 20.0), ("p99", 0.99, 100.0)] {
        let Some(query) = queries.get((queries.len() as f64 * part) as usize) else { continue };
        let device_ms = device.scattered_ms(query.written)?;
        println!(
            "{name} of {}: {:.1} ms for {} dirty pages, which the device alone writes in {device_ms:.1}; the thread \
             ran for {:.1}, and waited for a processor for {:.1}",
            queries.len(),
            query.allocate_ms,
            query.written,
            query.allocate_share.running_ms,
            query.allocate_share.ready_ms
        );
        rows.push(Row {
            work: format!("allocation of half the limit, {name}"),
            value: per_gib(query.allocate_ms),
            unit: "ms/GiB",
            baseline: if per_gib(device_ms) > goal_ms { "the device" } else { "the goal" }
                .to_owned(),
            baseline_value: per_gib(device_ms).max(goal_ms),
            invert: true,
            goal: ">= 1",
        });
    }
    let half = half as usize;
    for (name, piece) in [("madvise for each page", unmap::PAGE), ("madvise for all at once", half)]
    {
        rows.push(Row {
            work: "allocation of half the limit, median of the thread's processor time".to_owned(),
            value: per_gib(median_running(&queries)),
            unit: "ms/GiB",
            baseline: name.to_owned(),
            baseline_value: per_gib(unmap::give_back(half, piece)?.as_secs_f64() * 1e3),
            invert: true,
            goal: ">= 0.9",
        });
    }
    rows.iter().for_each(Row::print);
    report::write_rows(&rows, &options.folder().join("cooperative_tail_rows.csv"))?;
    finish(options, "tail", &runs)
}

/// Of what the threads of queries ran for while they allocated, in ms.
fn median_running(queries: &[Asked]) -> f64 {
    let mut all: Vec<f64> = queries.iter().map(|query| query.allocate_share.running_ms).collect();
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(0.0)
}

/// (h) Tables that fit: a limit with a fifth to spare and all that a pool does in the background, beside memory
/// for four times the tables in which nothing is ever looked for or written.
pub(crate) fn fits(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let (mut runs, mut rows) = (Vec::new(), Vec::new());
    for streams in [1, 8] {
        // New orders make the tables grow.
        let least = source.bytes.get() + (64 << 20);
        for (name, limit) in [("memory to spare", 4 * least), ("fits", least * 6 / 5)] {
            let options = Options { streams, limit: ByteCount(limit), ..options.clone() };
            let is_spare = name == "memory to spare";
            let pool = PoolConfig::new().cleaner(!is_spare).huge_frames(!is_spare);
            let plan = Plan::new(format!("{streams} streams, {name}"), Mode::Cooperative, &options);
            keep(&mut runs, run(&options, source, Plan { query: Query::None, pool, ..plan })?);
        }
        let [spare, fits] = [runs.len() - 2, runs.len() - 1].map(|at| runs[at].all());
        rows.push(Row {
            work: format!("processor time of a new order that fits, {streams} streams"),
            value: fits.cpu_us_per_order(),
            unit: "us",
            baseline: "to spare".to_owned(),
            baseline_value: spare.cpu_us_per_order(),
            invert: true,
            goal: ">= 0.91",
        });
    }
    rows.iter().for_each(Row::print);
    report::write_rows(&rows, &options.folder().join("cooperative_fits_rows.csv"))?;
    finish(options, "fits", &runs)
}

/// The options with a limit that is enough for far memory; says why when there is none.
fn with_far_memory(options: &Options) -> Option<Options> {
    let store = MemStore::new(ByteCount::mib(64)).ok()?;
    if let Err(error) = Region::create(RegionConfig::new(), Arc::new(store)) {
        println!("skipped: {error}");
        return None;
    }
    Some(Options { limit: options.limit.max(ByteCount::mib(32)), ..options.clone() })
}
