//! Transactions beside a query's temporary memory: one limit for both, or a part for each.
//!
//! ```text
//! cargo bench --bench cooperative                      # scaled down, under two minutes
//! cargo bench --bench cooperative -- --read-only       # as the paper: no real updates
//! cargo bench --bench cooperative -- --test            # does it work?
//! ```
//! Tables of TPC-C's shape in B+-trees; streams of transactions with real writes; now and then a
//! query allocates half the limit for some seconds. Prints throughput, faults per new order and
//! allocation latency for both modes, and writes `target/figures/cooperative.csv` (over time) and
//! `cooperative.svg`. It checks after each run that no order is lost.

mod data;
mod plot;

use clap::Parser;
use data::{Database, Stream};
use farheap::ByteCount;
use farheap::pool::PoolConfig;
use farheap::tier::manager::{MemoryManager, Mode};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) type Failure = Box<dyn std::error::Error>;

/// The cooperative workload.
#[derive(Clone, Debug, Parser)]
struct Options {
    /// Warehouses; about 40 MB each.
    #[arg(long, default_value_t = 2)]
    warehouses: u64,
    /// The limit, MiB: the transactions' hot set fits it, but not half of it.
    #[arg(long, default_value_t = 64)]
    limit_mib: u64,
    /// Streams of transactions.
    #[arg(long, default_value_t = 8)]
    streams: u64,
    /// Seconds of a run, after a warm-up of a third of it.
    #[arg(long, default_value_t = 24.0)]
    seconds: f64,
    /// Seconds from one query to the next; it holds its memory for a quarter of them.
    #[arg(long, default_value_t = 8.0)]
    every: f64,
    /// Directory of the table file.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Read what would be written.
    #[arg(long)]
    read_only: bool,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The state every so many milliseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    pub(crate) seconds: f64,
    pub(crate) orders_per_s: f64,
    pub(crate) pool_mib: f64,
    pub(crate) temporary_mib: f64,
}

/// A mode's outcome.
pub(crate) struct Run {
    pub(crate) name: &'static str,
    pub(crate) samples: Vec<Sample>,
    /// New orders a second and faults per new order, while no query runs.
    pub(crate) orders_per_s: f64,
    pub(crate) faults_per_order: f64,
    pub(crate) allocations_ms: Vec<f64>,
    pub(crate) used_max_pct: f64,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if options.test || !options.bench {
        options.test = true;
        (options.warehouses, options.limit_mib, options.streams) = (1, 16, 2);
        (options.seconds, options.every) = (0.6, 0.3);
    }
    match compare(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cooperative: {error}");
            ExitCode::FAILURE
        }
    }
}

fn compare(options: &Options) -> Result<(), Failure> {
    let modes = [
        ("cooperative", Mode::Cooperative),
        ("partitioned", Mode::Partitioned { temporary_pct: 50 }),
    ];
    let mut runs = Vec::new();
    for (name, mode) in modes {
        let run = run(options, name, mode)?;
        println!(
            "{name:<12} {:>9.0} new orders/s, {:>6.2} faults per new order, allocation {:?} ms, \
             used at most {:.1} % of the limit",
            run.orders_per_s, run.faults_per_order, run.allocations_ms, run.used_max_pct
        );
        runs.push(run);
    }
    println!(
        "without a query, cooperative : partitioned: faults {:.2}, throughput {:.2}",
        runs[0].faults_per_order / runs[1].faults_per_order,
        runs[0].orders_per_s / runs[1].orders_per_s
    );
    plot::write(&runs, if options.test { "target/figures/smoke" } else { "target/figures" })
}

/// Removes the table file, whatever happens.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn run(options: &Options, name: &'static str, mode: Mode) -> Result<Run, Failure> {
    let dir = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let file = Removed(dir.join(format!("farheap-bench-coop-{}-{name}", std::process::id())));
    let limit = ByteCount::mib(options.limit_mib);
    let manager = MemoryManager::start(limit, mode)?;
    // The tables grow by what the orders insert; the file is sparse.
    let capacity = ByteCount::gib(8);
    let pool = PoolConfig::new().create(&file.0, capacity, &manager)?;
    let database = Database::load(&pool, options.warehouses)?;
    pool.flush()?;
    let (stop, orders) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut outcome = Run {
        name,
        samples: Vec::new(),
        orders_per_s: 0.0,
        faults_per_order: 0.0,
        allocations_ms: Vec::new(),
        used_max_pct: 0.0,
    };
    std::thread::scope(|scope| -> Result<(), Failure> {
        let work = |number| {
            let (database, stop, orders) = (&database, &stop, &orders);
            move || {
                let mut stream = Stream::new(database, number, options.read_only);
                while !stop.load(Ordering::Relaxed) {
                    let is_order = stream.transaction().expect("a transaction");
                    orders.fetch_add(u64::from(is_order), Ordering::Relaxed);
                }
            }
        };
        for number in 0..options.streams {
            scope.spawn(work(number));
        }
        // Warm-up: not counted.
        std::thread::sleep(Duration::from_secs_f64(options.seconds / 3.0));
        let watched = watch(options, &manager, &pool, &orders, &mut outcome);
        stop.store(true, Ordering::Relaxed);
        watched
    })?;
    let written = if options.read_only { 0 } else { orders.load(Ordering::Relaxed) };
    let found = database.count_new_orders()?;
    if found != written {
        return Err(format!("{found} orders are stored, but {written} were made").into());
    }
    let stats = manager.stats();
    outcome.used_max_pct = 100.0 * stats.used_max.get() as f64 / limit.get() as f64;
    Ok(outcome)
}

/// Samples the run and plays the query.
fn watch(
    options: &Options,
    manager: &MemoryManager,
    pool: &farheap::pool::BufferPool,
    orders: &AtomicU64,
    outcome: &mut Run,
) -> Result<(), Failure> {
    let tick = Duration::from_secs_f64((options.seconds / 120.0).max(0.01));
    let half = ByteCount::mib(options.limit_mib / 2);
    let began = Instant::now();
    let (mut query, mut quiet) = (None, (0.0, 0u64, 0u64));
    let mut next_query = options.every / 2.0;
    let (mut last_at, mut last_orders) = (0.0, orders.load(Ordering::Relaxed));
    let mut last_faults = pool.stats().misses;
    while last_at < options.seconds {
        // One sample a tick.
        std::thread::sleep(tick);
        let at = began.elapsed().as_secs_f64();
        let (now, faults) = (orders.load(Ordering::Relaxed), pool.stats().misses);
        // The first quarter after a query, the pool fills again.
        let is_quiet =
            query.is_none() && at + options.every * 0.5 < next_query + options.every / 4.0;
        if is_quiet {
            quiet.0 += at - last_at;
            quiet.1 += now - last_orders;
            quiet.2 += faults - last_faults;
        }
        outcome.samples.push(Sample {
            seconds: at,
            orders_per_s: (now - last_orders) as f64 / (at - last_at),
            pool_mib: pool.account().used().get() as f64 / f64::from(1 << 20),
            temporary_mib: manager.temporary().used().get() as f64 / f64::from(1 << 20),
        });
        (last_at, last_orders, last_faults) = (at, now, faults);
        if query.is_none() && at >= next_query {
            let asked = Instant::now();
            query = Some((manager.allocate_temporary(half)?, at + options.every / 4.0));
            outcome.allocations_ms.push(asked.elapsed().as_secs_f64() * 1e3);
            next_query += options.every;
        }
        if let Some((memory, _)) = query.take_if(|(_, until)| at >= *until) {
            manager.free_temporary(memory);
        }
    }
    if let Some((memory, _)) = query.take() {
        manager.free_temporary(memory);
    }
    outcome.orders_per_s = quiet.1 as f64 / quiet.0.max(1e-9);
    outcome.faults_per_order = quiet.2 as f64 / (quiet.1 as f64).max(1.0);
    Ok(())
}
