//! One run: streams, a query now and then, and samples of what happens.

use crate::Failure;
use crate::check;
use crate::oltp::{Kind, Stream};
use crate::options::Options;
use crate::q9;
use crate::resident::Watch;
use crate::schema::Database;
use crate::source::{Source, progress};
use allocator_api2::vec::Vec as AllocVec;
use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::{Region, RegionConfig};
use farheap::store::BlockStore;
use farheap_collections::Temporary;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How the limit is divided between tables and temporary data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One manager for both.
    Cooperative,
    /// A manager for each, of half the limit: the traditional system.
    Partitioned,
}

/// What asks for temporary memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Query {
    None,
    /// Allocates and touches this share of the limit and holds it.
    Simulated(f64),
    Q9,
}

/// What a run is to be.
pub(crate) struct Plan<'a> {
    pub(crate) name: String,
    pub(crate) mode: Mode,
    pub(crate) read_only: bool,
    pub(crate) query: Query,
    pub(crate) pool: PoolConfig,
    /// Share of the limit that is the pool's floor.
    pub(crate) floor: f64,
    /// Temporary memory that does not fit goes to far memory.
    pub(crate) spill: bool,
    /// What else runs beside the streams.
    pub(crate) beside: Option<&'a (dyn Beside + Sync)>,
}

/// Something else under the same limit.
pub(crate) trait Beside {
    /// Joins the manager, and runs until `stop` is set.
    fn run(&self, manager: &Arc<MemoryManager>, stop: &AtomicBool) -> Result<(), String>;
    /// Bytes held at the moment.
    fn used(&self) -> ByteCount;
}

impl Plan<'_> {
    pub(crate) fn new(name: impl Into<String>, mode: Mode, options: &Options) -> Self {
        Plan {
            name: name.into(),
            mode,
            read_only: options.read_only,
            query: Query::Simulated(0.5),
            pool: PoolConfig::new(),
            floor: 0.0,
            spill: false,
            beside: None,
        }
    }
}

/// The state at a moment, and what happened since the sample before.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sample {
    pub(crate) seconds: f64,
    pub(crate) length: f64,
    pub(crate) orders: u64,
    pub(crate) faults: u64,
    pub(crate) written: u64,
    /// Processor time of the process.
    pub(crate) cpu_s: f64,
    pub(crate) pool_mib: f64,
    pub(crate) temporary_mib: f64,
    pub(crate) spilled_mib: f64,
    pub(crate) beside_mib: f64,
    pub(crate) during_query: bool,
    /// The query ended some time ago: the pool has filled again.
    pub(crate) is_quiet: bool,
}

/// Time of a thread as the scheduler counts it, in milliseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Scheduled {
    pub(crate) running_ms: f64,
    /// Ready to run, while others ran.
    pub(crate) ready_ms: f64,
}

impl Scheduled {
    /// Of the calling thread so far: `/proc/thread-self/schedstat`; zero where there is none.
    fn now() -> Scheduled {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let mut fields = text.split_whitespace().map(|ns| ns.parse().unwrap_or(0.0) / 1e6);
        let [running_ms, ready_ms] = [(); 2].map(|()| fields.next().unwrap_or(0.0));
        Scheduled { running_ms, ready_ms }
    }

    fn since(self) -> Scheduled {
        let now = Scheduled::now();
        let (running_ms, ready_ms) =
            (now.running_ms - self.running_ms, now.ready_ms - self.ready_ms);
        Scheduled { running_ms, ready_ms }
    }
}

/// What a query met.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) allocate_ms: f64,
    /// Of `allocate_ms`, what the thread had a processor, and waited for one.
    pub(crate) allocate_share: Scheduled,
    pub(crate) touch_ms: f64,
    /// Reading all of it once more.
    pub(crate) read_ms: f64,
    pub(crate) total_s: f64,
    pub(crate) spilled: bool,
    /// Pages of the pool that were written while it allocated.
    pub(crate) written: u64,
}

/// A run's outcome.
pub(crate) struct Run {
    pub(crate) name: String,
    pub(crate) samples: Vec<Sample>,
    pub(crate) queries: Vec<Asked>,
    pub(crate) failed_queries: u64,
    /// Largest resident size, as a share of the limit.
    pub(crate) resident_max_pct: f64,
    pub(crate) used_max_pct: f64,
}

/// Sums over some of the samples.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sum {
    pub(crate) seconds: f64,
    pub(crate) orders: u64,
    pub(crate) faults: u64,
    pub(crate) written: u64,
    pub(crate) cpu_s: f64,
}

impl Sum {
    /// Microseconds of processor time.
    pub(crate) fn cpu_us_per_order(&self) -> f64 {
        1e6 * self.cpu_s / (self.orders as f64).max(1.0)
    }

    pub(crate) fn orders_per_s(&self) -> f64 {
        self.orders as f64 / self.seconds.max(1e-9)
    }

    pub(crate) fn faults_per_order(&self) -> f64 {
        self.faults as f64 / (self.orders as f64).max(1.0)
    }

    pub(crate) fn written_per_order(&self) -> f64 {
        self.written as f64 / (self.orders as f64).max(1.0)
    }
}

impl Run {
    pub(crate) fn sum(&self, of: impl Fn(&Sample) -> bool) -> Sum {
        let mut sum = Sum::default();
        for s in self.samples.iter().filter(|s| of(s)) {
            sum.seconds += s.length;
            sum.orders += s.orders;
            sum.faults += s.faults;
            sum.written += s.written;
            sum.cpu_s += s.cpu_s;
        }
        sum
    }

    /// While no query runs and the pool has filled again.
    pub(crate) fn quiet(&self) -> Sum {
        self.sum(|s| s.is_quiet)
    }

    pub(crate) fn during_queries(&self) -> Sum {
        self.sum(|s| s.during_query)
    }

    pub(crate) fn all(&self) -> Sum {
        self.sum(|_| true)
    }

    pub(crate) fn median(&self, of: impl Fn(&Asked) -> f64) -> f64 {
        let mut values: Vec<f64> = self.queries.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
    }
}

/// What the threads of a run share.
struct Shared<'a> {
    options: &'a Options,
    database: &'a Database,
    pool: &'a BufferPool,
    /// Of the temporary data; the tables' too, where the run is cooperative.
    temporary: &'a Arc<MemoryManager>,
    stop: AtomicBool,
    orders: AtomicU64,
    rolled_back: AtomicU64,
    during_query: AtomicBool,
    /// When the last query ended, in ms since `began`.
    query_ended_ms: AtomicU64,
    began: Instant,
}

/// Runs `plan` on a fresh copy of the source's tables.
pub(crate) fn run(options: &Options, source: &Source, plan: Plan<'_>) -> Result<Run, Failure> {
    let file = source.copy()?;
    let watch = Watch::start(options.limit);
    let half = ByteCount(options.limit.get() / 2);
    let (manager, temporary) = match plan.mode {
        Mode::Cooperative => {
            let manager = MemoryManager::start(options.limit)?;
            (Arc::clone(&manager), manager)
        }
        Mode::Partitioned => (MemoryManager::start(half)?, MemoryManager::start(half)?),
    };
    let pool = plan.pool.open(file.path(), &manager)?;
    let floor = (options.limit.get() as f64 * plan.floor) as u64;
    pool.account().set_floor(ByteCount(floor))?;
    let far = plan.spill.then(|| far_memory(options, &temporary)).transpose()?;
    let database = Database::open(&pool, &source.catalog);
    let shared = Shared {
        options,
        database: &database,
        pool: &pool,
        temporary: &temporary,
        stop: AtomicBool::new(false),
        orders: AtomicU64::new(0),
        rolled_back: AtomicU64::new(0),
        during_query: AtomicBool::new(false),
        query_ended_ms: AtomicU64::new(0),
        began: Instant::now(),
    };
    let mut outcome = Run {
        name: plan.name,
        samples: Vec::new(),
        queries: Vec::new(),
        failed_queries: 0,
        resident_max_pct: 0.0,
        used_max_pct: 0.0,
    };
    let (warm_up, seconds) = (options.warm_up, options.seconds);
    progress(&format!("{}: {warm_up} s of warm-up, {seconds} s", outcome.name));
    std::thread::scope(|scope| -> Result<(), Failure> {
        let shared = &shared;
        let streams: Vec<_> = (0..options.streams)
            .map(|number| scope.spawn(move || stream(shared, number, plan.read_only)))
            .collect();
        let beside = plan.beside.map(|beside| scope.spawn(|| beside.run(&manager, &shared.stop)));
        // The time that was asked for before anything is measured; the streams fill the pool.
        std::thread::sleep(Duration::from_secs_f64(options.warm_up));
        let query = scope.spawn(move || ask(shared, plan.query, &source.answer, plan.read_only));
        outcome.samples = sample(shared, &pool, plan.beside);
        shared.stop.store(true, Ordering::Release);
        let (queries, failed) = query.join().expect("the query's thread")?;
        (outcome.queries, outcome.failed_queries) = (queries, failed);
        for stream in streams {
            stream.join().expect("a stream")?;
        }
        beside.map_or(Ok(()), |beside| beside.join().expect("what runs beside"))?;
        Ok(())
    })?;
    outcome.resident_max_pct = watch.stop();
    let mut used_max = manager.stats().used_bytes_max.get();
    if !Arc::ptr_eq(&manager, &temporary) {
        used_max += temporary.stats().used_bytes_max.get();
    }
    outcome.used_max_pct = 100.0 * used_max as f64 / options.limit.get() as f64;
    drop(far);
    progress("checking");
    verify(&shared, plan.read_only)?;
    Ok(outcome)
}

/// Far memory for what does not fit, on a file of its own.
fn far_memory(options: &Options, manager: &Arc<MemoryManager>) -> Result<Arc<Region>, Failure> {
    let room = ByteCount(options.limit.get() * 3);
    let store = BlockStore::temporary(options.dir.as_deref(), Some(room))?;
    let config = RegionConfig::new().limit(options.limit);
    Ok(Region::create_under(manager, config, Arc::new(store))?)
}

fn stream(shared: &Shared<'_>, number: u64, read_only: bool) -> Result<(), String> {
    let mut stream = Stream::new(shared.database, number, shared.options.seed, read_only);
    while !shared.stop.load(Ordering::Relaxed) {
        match stream.transaction().map_err(|error| format!("a transaction: {error}"))? {
            Kind::NewOrder => shared.orders.fetch_add(1, Ordering::Relaxed),
            Kind::RolledBack => shared.rolled_back.fetch_add(1, Ordering::Relaxed),
            Kind::Other => 0,
        };
    }
    Ok(())
}

/// The tables at rest: TPC-C's conditions, no order lost or made up, and query 9's answer.
fn verify(shared: &Shared<'_>, read_only: bool) -> Result<(), Failure> {
    let census = check::check(shared.database)?;
    let made = if read_only { 0 } else { shared.orders.load(Ordering::Relaxed) };
    if census.orders != made {
        return Err(format!("{} orders are stored, but {made} were made", census.orders).into());
    }
    let memory = Temporary::new(shared.temporary);
    let answer = q9::run(shared.database, shared.options.query_threads, &memory)?;
    if answer != q9::naive(shared.database)? {
        return Err("query 9 and the naive computation differ".into());
    }
    Ok(())
}

/// Processor time of the process, in hundredths of a second (proc_pid_stat(5)).
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("proc is mounted");
    let fields = stat.rsplit(')').next().expect("a name in brackets").split_whitespace();
    let [user, system] = [11, 12].map(|n| fields.clone().nth(n).expect("a field"));
    let ticks = |text: &str| text.parse::<f64>().expect("a number");
    (ticks(user) + ticks(system)) / 100.0
}

/// Takes samples until the run is over.
fn sample(
    shared: &Shared<'_>,
    pool: &BufferPool,
    beside: Option<&(dyn Beside + Sync)>,
) -> Vec<Sample> {
    let options = shared.options;
    let tick = Duration::from_secs_f64((options.seconds / 240.0).max(0.01));
    let mib = |bytes: ByteCount| bytes.get() as f64 / f64::from(1 << 20);
    let mut samples = Vec::new();
    let began = Instant::now();
    let (mut last_at, mut last) = (0.0, (0, pool.stats(), cpu_s()));
    last.0 = shared.orders.load(Ordering::Relaxed);
    while last_at < options.seconds {
        // Throughput over time is counted by intervals, and this is one.
        std::thread::sleep(tick);
        let at = began.elapsed().as_secs_f64();
        let now = (shared.orders.load(Ordering::Relaxed), pool.stats(), cpu_s());
        let during_query = shared.during_query.load(Ordering::Relaxed);
        let ended = shared.query_ended_ms.load(Ordering::Relaxed) as f64 / 1e3;
        let since = shared.began.elapsed().as_secs_f64() - ended;
        samples.push(Sample {
            seconds: at,
            length: at - last_at,
            orders: now.0 - last.0,
            faults: now.1.misses - last.1.misses,
            written: now.1.pages_written - last.1.pages_written,
            cpu_s: now.2 - last.2,
            pool_mib: mib(pool.account().used()),
            temporary_mib: mib(shared.temporary.temporary().used()),
            spilled_mib: mib(shared.temporary.stats().spilled_bytes),
            beside_mib: beside.map_or(0.0, |beside| mib(beside.used())),
            during_query,
            is_quiet: !during_query && since > options.hold,
        });
        (last_at, last) = (at, now);
    }
    samples
}

type Queries = (Vec<Asked>, u64);

/// Runs a query every so often.
fn ask(
    shared: &Shared<'_>,
    query: Query,
    loaded: &q9::Answer,
    read_only: bool,
) -> Result<Queries, String> {
    let (mut asked, mut failed) = (Vec::new(), 0);
    let began = Instant::now();
    // After half a pause, so that the first is seen against a full pool.
    let mut next = shared.options.every / 2.0;
    while !shared.stop.load(Ordering::Acquire) {
        // A query is due seconds from now, the end of the run at a time that others decide: looked
        // for 500 times a second, which is fine enough for either and costs the streams nothing.
        std::thread::sleep(Duration::from_millis(2));
        if query == Query::None || began.elapsed().as_secs_f64() < next {
            continue;
        }
        next += shared.options.every;
        shared.during_query.store(true, Ordering::Relaxed);
        let outcome = match query {
            Query::Simulated(share) => simulate(shared, share),
            _ => q9(shared, loaded, read_only)?,
        };
        let now = shared.began.elapsed().as_millis() as u64;
        shared.query_ended_ms.store(now, Ordering::Relaxed);
        shared.during_query.store(false, Ordering::Relaxed);
        match outcome {
            Some(outcome) => asked.push(outcome),
            None => failed += 1,
        }
    }
    Ok((asked, failed))
}

/// Allocates and touches a share of the limit and holds it for a while.
fn simulate(shared: &Shared<'_>, share: f64) -> Option<Asked> {
    let bytes = (shared.options.limit.get() as f64 * share) as usize / 4096 * 4096;
    let pages_written = || shared.pool.stats().pages_written;
    let before = pages_written();
    let scheduled = Scheduled::now();
    let began = Instant::now();
    let memory = Temporary::new(shared.temporary);
    let mut data: AllocVec<u8, _> = AllocVec::new_in(memory);
    let allocated = data.try_reserve_exact(bytes).is_ok();
    let allocate_ms = began.elapsed().as_secs_f64() * 1e3;
    let allocate_share = scheduled.since();
    let written = pages_written() - before;
    let spilled = shared.temporary.stats().spilled_bytes > ByteCount::ZERO;
    let step = |began: &mut Instant| {
        let ms = began.elapsed().as_secs_f64() * 1e3;
        *began = Instant::now();
        ms
    };
    let mut at = Instant::now();
    if allocated {
        data.resize(bytes, 1);
    }
    let touch_ms = step(&mut at);
    let sum: usize = data.iter().step_by(4096).map(|byte| usize::from(*byte)).sum();
    assert_eq!(sum, data.len() / 4096, "temporary memory lost what was written");
    let read_ms = step(&mut at);
    let until = Duration::from_secs_f64(shared.options.hold);
    while allocated && began.elapsed() < until && !shared.stop.load(Ordering::Relaxed) {
        // The paper's simulated query holds its memory and does nothing; it gives up when the run
        // ends before it does.
        std::thread::sleep(Duration::from_millis(2));
    }
    drop(data);
    let total_s = began.elapsed().as_secs_f64();
    allocated.then_some(Asked {
        allocate_ms,
        allocate_share,
        touch_ms,
        read_ms,
        total_s,
        spilled,
        written,
    })
}

/// Query 9 allocates all along.
const NONE: f64 = f64::NAN;

/// Runs query 9; what it says of the loaded rows is known.
fn q9(shared: &Shared<'_>, loaded: &q9::Answer, read_only: bool) -> Result<Option<Asked>, String> {
    let began = Instant::now();
    let memory = Temporary::new(shared.temporary);
    let threads = shared.options.query_threads;
    let answer = match q9::run(shared.database, threads, &memory) {
        Ok(answer) => answer,
        Err(error) if error.is::<q9::NoMemory>() => return Ok(None),
        Err(error) => return Err(format!("query 9: {error}")),
    };
    let total_s = began.elapsed().as_secs_f64();
    let same = |(group, sum): (&(u32, u32), &[i64; 2])| {
        let now = answer.get(group).copied().unwrap_or_default();
        now[0] == sum[0] && (now[1] == sum[1] || !read_only)
    };
    if !loaded.iter().all(same) {
        return Err("query 9 gave another answer than before the run".to_owned());
    }
    let spilled = shared.temporary.stats().spilled_bytes > ByteCount::ZERO;
    let [allocate_ms, touch_ms, read_ms] = [NONE; 3];
    let allocate_share = Scheduled::default();
    Ok(Some(Asked { allocate_ms, allocate_share, touch_ms, read_ms, total_s, spilled, written: 0 }))
}
