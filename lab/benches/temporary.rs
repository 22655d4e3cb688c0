//! Temporary memory: what spilling costs, and what room costs that others have to give.
//!
//! ```text
//! cargo bench -p farheap-lab --bench temporary                       # two minutes; needs 2 GiB of disk and RAM
//! cargo bench -p farheap-lab --bench temporary -- --dir /mnt/nvme    # device file and table elsewhere
//! cargo bench -p farheap-lab --bench temporary -- --only spill       # some rows
//! cargo bench -p farheap-lab --bench temporary -- --test             # does it work?
//! ```
//! Every row has its baseline measured in the same run, in turns; medians. Prints a table and
//! writes `target/figures/temporary.csv` and `temporary.svg`. It checks what it reads.

#![expect(unsafe_code, reason = "touches temporary memory")]

#[path = "../../benches/common/mod.rs"]
mod common;
#[path = "../../benches/common/raw.rs"]
mod raw;

use clap::Parser;
use common::Unnamed;
use farheap::manager::{MemoryManager, TemporaryMemory};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::{Region, RegionConfig};
use farheap::store::BlockStore;
use farheap::{ByteCount, PageId};
use plotters::prelude::*;
use raw::{BLOCK, check_block, fill_block};
use std::fmt::Write;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

/// Costs of temporary memory.
#[derive(Clone, Debug, Parser)]
struct Options {
    /// Directory of the device file and the table file.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// MiB of the limit.
    #[arg(long, default_value_t = 256)]
    limit_mib: u64,
    /// Interleaved rounds; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only rows that contain this.
    #[arg(long)]
    only: Option<String>,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn file(&self, len: ByteCount) -> std::io::Result<Unnamed> {
        Unnamed::new(self.dir.as_deref(), len)
    }

    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.contains(only.as_str()))
    }
}

/// A measured value beside its baseline; the ratio is turned so that higher is better.
struct Row {
    work: String,
    value: f64,
    unit: &'static str,
    baseline: &'static str,
    baseline_value: f64,
    ratio: f64,
    goal: &'static str,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    // `cargo test --benches` passes nothing and wants to be quick.
    if options.test || !options.bench {
        options.test = true;
        options.limit_mib = 32;
        options.rounds = 1;
    }
    let folder = if options.test { "target/figures/smoke" } else { "target/figures" };
    match run(&options).and_then(|rows| report(&rows, folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("temporary: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    if options.wants("spill") {
        rows.extend(spill(options)?);
    }
    if options.wants("fresh") {
        rows.extend(fresh(options)?);
    }
    if options.wants("half") {
        rows.extend(half(options)?);
    }
    Ok(rows)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

// Twice the limit.

/// A block of temporary memory.
fn block_of(memory: &mut TemporaryMemory, at: usize) -> &mut [u64] {
    assert!(at + BLOCK <= memory.len().as_usize());
    // SAFETY: in bounds.
    let start = unsafe { memory.as_ptr().add(at) }.cast::<u64>();
    // SAFETY: the memory is this thread's alone for as long as it is borrowed; any bytes are
    // valid numbers.
    unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), BLOCK / 8) }
}

/// Seconds of a round: writing all, reading it back, and all of it.
#[derive(Clone, Copy)]
struct Round {
    write: f64,
    read: f64,
    whole: f64,
}

/// Seconds of writing all and reading it back.
fn through_memory(manager: &MemoryManager, len: ByteCount) -> Result<Round, Failure> {
    let began = Instant::now();
    let mut memory = manager.allocate_temporary(len)?;
    assert!(memory.is_spilled(), "{len} fit");
    for at in (0..len.as_usize()).step_by(BLOCK) {
        fill_block(block_of(&mut memory, at), at as u64);
    }
    let write = began.elapsed().as_secs_f64();
    for at in (0..len.as_usize()).step_by(BLOCK) {
        check_block(block_of(&mut memory, at), at as u64);
    }
    let read = began.elapsed().as_secs_f64() - write;
    drop(memory);
    Ok(Round { write, read, whole: began.elapsed().as_secs_f64() })
}

/// The same through a file: large blocks, several in flight, sequential.
fn through_file(file: &File, len: usize) -> Result<Round, Failure> {
    let (began, mut times) = (Instant::now(), [0.0; 2]);
    for (write, time) in [true, false].into_iter().zip(&mut times) {
        let phase = Instant::now();
        raw::transfer(file, len, write)?;
        *time = phase.elapsed().as_secs_f64();
    }
    let [write, read] = times;
    Ok(Round { write, read, whole: began.elapsed().as_secs_f64() })
}

fn spill(options: &Options) -> Result<Vec<Row>, Failure> {
    let limit = ByteCount::mib(options.limit_mib);
    let len = ByteCount(2 * limit.get());
    let (device, beside) = (options.file(ByteCount(2 * len.get()))?, options.file(len)?);
    let store = BlockStore::open(device.path(), None)?;
    let manager = MemoryManager::start(limit)?;
    let config = RegionConfig::new().limit(limit);
    let region = Region::create_under(&manager, config, Arc::new(store))?;
    let file = raw::open(&beside.path())?;
    let (mut ours, mut raws) = (Vec::new(), Vec::new());
    // The first round finds blocks that the file system has not given out.
    let mut before = region.stats();
    for round in 0..=options.rounds {
        let raw = through_file(&file, len.as_usize())?;
        let our = through_memory(&manager, len)?;
        let now = region.stats();
        // A page that is written once and read once was not read in vain, nor pushed out twice.
        let mib = |now: u64, before: u64| (now - before) >> 20;
        let written = mib(now.bytes_written.0, before.bytes_written.0);
        let read = mib(now.bytes_read.0, before.bytes_read.0);
        println!("round {round}: {written} MiB written, {read} MiB read of {len}");
        before = now;
        if round > 0 {
            raws.push(raw);
            ours.push(our);
        }
    }
    let stats = manager.stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    println!("{}", region.stats());
    let alone = MemoryManager::start(limit)?;
    let refused = alone.allocate_temporary(len).expect_err("more than there is");
    println!("without far memory: {refused}");
    let row = |work: &str, times: f64, goal, of: fn(&Round) -> f64| {
        let mib = times * len.get() as f64 / 1_048_576.0;
        let rate = |rounds: &[Round]| mib / median(rounds.iter().map(of).collect());
        let (value, baseline_value) = (rate(&ours), rate(&raws));
        let work = format!("spill: {work} 2x the limit");
        let (unit, baseline) = ("MiB/s", "raw device, sequential");
        Row { work, value, unit, baseline, baseline_value, ratio: value / baseline_value, goal }
    };
    Ok(vec![
        row("write and read back", 2.0, "0.9", |round| round.whole),
        row("of it, write", 1.0, "", |round| round.write),
        row("of it, read back", 1.0, "", |round| round.read),
    ])
}

// Memory that fits.

fn touch(memory: &TemporaryMemory) {
    for at in (0..memory.len().as_usize()).step_by(4096) {
        // SAFETY: in bounds.
        let byte = unsafe { memory.as_ptr().add(at) };
        // SAFETY: memory of this thread's own.
        unsafe { byte.write_volatile(1) };
    }
}

fn ms(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}

fn per_gib(ms: f64, len: ByteCount) -> f64 {
    ms * (1_u64 << 30) as f64 / len.get() as f64
}

/// Allocates, touches all, frees; milliseconds per GiB.
fn once(manager: &MemoryManager, len: ByteCount, spilled: bool) -> Result<f64, Failure> {
    let began = Instant::now();
    let memory = manager.allocate_temporary(len)?;
    assert_eq!(memory.is_spilled(), spilled);
    touch(&memory);
    let time = per_gib(ms(began), len);
    drop(memory);
    Ok(time)
}

/// Plain anonymous memory, as a process gets it that manages nothing.
fn anonymous(len: ByteCount) -> f64 {
    let began = Instant::now();
    let mut bytes: Vec<u8> = Vec::with_capacity(len.as_usize());
    for at in (0..len.as_usize()).step_by(4096) {
        bytes.spare_capacity_mut()[at].write(1);
    }
    per_gib(ms(began), len)
}

/// Fresh memory that fits: local, and as far memory that nothing evicts.
fn fresh(options: &Options) -> Result<Vec<Row>, Failure> {
    let limit = ByteCount::mib(options.limit_mib);
    let len = ByteCount(limit.get() / 2);
    let device = options.file(ByteCount(4 * limit.get()))?;
    let store = BlockStore::open(device.path(), None)?;
    let manager = MemoryManager::start(limit)?;
    let config = RegionConfig::new().limit(limit);
    let region = Region::create_under(&manager, config, Arc::new(store))?;
    // Far-backed: above what its ceiling leaves, all temporary memory spills at once.
    let (mut local, mut far, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..options.rounds.max(2) {
        plain.push(anonymous(len));
        local.push(once(&manager, len, false)?);
        manager.temporary().set_ceiling(ByteCount::mib(1));
        far.push(once(&manager, len, true)?);
        manager.temporary().set_ceiling(ByteCount(u64::MAX));
    }
    assert_eq!(region.stats().pages_out, 0, "everything fits");
    let (local, far, plain) = (median(local), median(far), median(plain));
    let row = |work: &str, value: f64| Row {
        work: format!("fresh: half the limit, {work}, touched"),
        value,
        unit: "ms/GiB",
        baseline: "anonymous memory",
        baseline_value: plain,
        ratio: plain / value,
        goal: "1",
    };
    Ok(vec![row("local", local), row("far-backed", far)])
}

/// A pool whose pages fill the limit, a share of them dirty.
fn warm(
    manager: &Arc<MemoryManager>,
    path: &Path,
    limit: ByteCount,
    config: PoolConfig,
) -> Result<(Arc<BufferPool>, u64), Failure> {
    let pool = config.overwrite(true).create(path, ByteCount(2 * limit.get()), manager)?;
    let pages = limit.get() / 4096 * 97 / 100;
    for _ in 0..pages {
        let mut page = pool.allocate()?;
        let id = page.id();
        page[..8].copy_from_slice(&id.0.to_le_bytes());
    }
    pool.flush()?;
    Ok((pool, pages))
}

fn dirty(pool: &BufferPool, pages: u64, percent: u64) -> Result<(), Failure> {
    for page in 2..pages + 2 {
        // Brought in again, and made dirty in part.
        if page % 10 < percent / 10 {
            pool.fix_exclusive(PageId(page))?[8] += 1;
        } else {
            assert_eq!(pool.fix_shared(PageId(page))?[..8], page.to_le_bytes());
        }
    }
    Ok(())
}

/// Until the cleaner has nothing to write.
fn settled(pool: &BufferPool) {
    let mut last = pool.stats().pages_written;
    loop {
        std::thread::sleep(Duration::from_millis(100)); // Time for it to write some.
        let now = pool.stats().pages_written;
        if now == last {
            return;
        }
        last = now;
    }
}

/// Milliseconds per GiB to allocate half the limit beside a warm pool: allocation, and all.
fn beside_pool(
    options: &Options,
    percent: u64,
    batch: usize,
    cleaner: bool,
) -> Result<(f64, f64), Failure> {
    let limit = ByteCount::mib(options.limit_mib);
    let table = options.file(ByteCount(2 * limit.get()))?;
    let manager = MemoryManager::start(limit)?;
    let config = PoolConfig::new().evict_batch(batch).cleaner(cleaner);
    let (pool, pages) = warm(&manager, &table.path(), limit, config)?;
    let len = ByteCount(limit.get() / 2);
    dirty(&pool, pages, percent)?;
    if cleaner {
        settled(&pool);
    }
    let began = Instant::now();
    let memory = manager.allocate_temporary(len)?;
    let allocated = ms(began);
    touch(&memory);
    let touched = ms(began);
    drop(memory);
    let stats = manager.stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    Ok((per_gib(allocated, len), per_gib(touched, len)))
}

fn half(options: &Options) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for percent in [0, 50, 90] {
        let kinds = [(1, false), (256, false), (256, true)];
        let mut times = [const { (Vec::new(), Vec::new()) }; 3];
        for _ in 0..options.rounds {
            for ((batch, cleaner), (bare, all)) in kinds.into_iter().zip(&mut times) {
                let (allocated, touched) = beside_pool(options, percent, batch, cleaner)?;
                bare.push(allocated);
                all.push(touched);
            }
        }
        let [single, batched, cleaned] = times.map(|(bare, all)| (median(bare), median(all)));
        for ((bare, all), name, goal) in
            [(batched, "cleaner off", "10"), (cleaned, "cleaner on", "10; under 5 ms/GiB")]
        {
            let row = |what: &str, value: f64, baseline_value: f64| Row {
                work: format!("half the limit, {percent} % dirty, {name}, {what}"),
                value,
                unit: "ms/GiB",
                baseline: "one page at a time",
                baseline_value,
                ratio: baseline_value / value,
                goal,
            };
            rows.push(row("allocated", bare, single.0));
            rows.push(row("touched", all, single.1));
        }
    }
    Ok(rows)
}

// The table, the CSV and the figure.

fn report(rows: &[Row], folder: &str) -> Result<(), Failure> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder);
    std::fs::create_dir_all(&folder)?;
    let mut csv = String::from("work,value,unit,baseline,baseline_value,ratio,goal\n");
    for Row { work, value, unit, baseline, baseline_value: base, ratio, goal } in rows {
        println!(
            "{work:<52} {value:>9.2} {unit:<7} {base:>9.2} {baseline:<22} {ratio:>7.3}  goal {goal}"
        );
        writeln!(csv, "\"{work}\",{value:.4},{unit},\"{baseline}\",{base:.4},{ratio:.4},{goal}")?;
    }
    std::fs::write(folder.join("temporary.csv"), csv)?;
    draw(rows, &folder.join("temporary.svg"))
}

fn draw(rows: &[Row], path: &Path) -> Result<(), Failure> {
    let height = 60 + 22 * rows.len() as u32;
    let root = SVGBackend::new(path, (1000, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let style = ("sans-serif", 13).into_font();
    let title = "times better than the baseline (line at 1)";
    root.draw(&Text::new(title, (10, 10), style.clone()))?;
    let scale = |ratio: f64| 560 + (ratio.clamp(0.01, 100.0).log10() * 150.0) as i32;
    for (index, row) in rows.iter().enumerate() {
        let y = 40 + 22 * index as i32;
        root.draw(&Text::new(row.work.clone(), (10, y), style.clone()))?;
        let ends = [(scale(1.0), y), (scale(row.ratio), y + 14)];
        root.draw(&Rectangle::new(ends, BLUE.mix(0.6).filled()))?;
        root.draw(&Text::new(format!("{:.3}", row.ratio), (930, y), style.clone()))?;
    }
    let bottom = height as i32 - 10;
    root.draw(&PathElement::new(vec![(scale(1.0), 30), (scale(1.0), bottom)], BLACK))?;
    root.present()?;
    Ok(())
}
