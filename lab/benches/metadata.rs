//! Where jemalloc's metadata of a far tier lies: what that changes.
//!
//! ```text
//! cargo bench -p farheap-lab --bench metadata                      # two minutes; 1 GiB of disk
//! cargo bench -p farheap-lab --bench metadata -- written           # rows whose names contain one of the words
//! cargo bench -p farheap-lab --bench metadata -- --dir /mnt/ssd --paper --rounds 20   # the paper's size: 48 GiB, hours
//! cargo bench -p farheap-lab --bench metadata -- --count 655360 "16 KiB, written"     # 10 GiB of it
//! cargo bench -p farheap-lab --bench metadata -- --test            # does it work? seconds
//! ```
//! After Weisgut et al., *Separated Allocator Metadata in Disaggregated In-Memory Databases*: 3 million
//! blocks of 16 KiB and 10 million of 1 KiB, one after the other, on a far tier with a cache that holds a hundredth of
//! it (their Figure 8; half of ours is for tables); blocks of random sizes in memory of a tier that fits (Figure 9, there on a remote NUMA node; here
//! on the last one, where there are several);
//! the share of the metadata (Figure 6); and the address space that jemalloc's option `retain` takes
//! (Finding 1). *Separated* is `far_metadata:off`, *together* `far_metadata:on`. By default a hundredth
//! of their counts. Every sample is a process of its own, both sides take turns, values are medians, and a
//! ratio is the median of the rounds' own ratios. Blocks are written whole where it says so, and a part of
//! them is read again and checked. Prints a table and writes `target/figures/metadata.csv`, row by
//! row, and `metadata.svg`.
#![expect(unsafe_code, reason = "allocates by hand")]

#[path = "../../benches/common/mod.rs"]
mod common;
#[path = "../../benches/common/failure.rs"]
mod failure;
#[path = "../../benches/common/process.rs"]
#[expect(dead_code, reason = "this benchmark does not catch interrupts")]
mod process;
#[path = "../../benches/common/raw.rs"]
mod raw;
#[path = "../../benches/common/table.rs"]
mod table;

use allocator_api2::alloc::Allocator;
use clap::{Parser, ValueEnum};
use common::Unnamed;
use failure::{Failure, Result};
use farheap::store::MemStore;
use farheap::{ByteCount, Far, FarHeap, Heap, probe};
use std::alloc::Layout;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;
use table::Row;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

/// Exit status of a child that the machine does not permit.
const SKIPPED: u8 = 3;

/// 1/CHECKED of the blocks are read again.
const CHECKED: usize = 61;

/// Rounds of [`Work::Churn`].
const ROUNDS: usize = 10;

/// The share of metadata in the paper's TPC-H, in percent.
const SHARE_OF_TPCH: f64 = 0.35;

#[derive(Debug, Parser)]
struct Options {
    /// Only rows whose names contain one of these.
    words: Vec<String>,
    /// The paper's counts instead of a hundredth of them.
    #[arg(long)]
    paper: bool,
    /// Directory of the device file; where temporary files go unless said otherwise.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Rounds in turns; the median counts. The paper has 20.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// As many blocks in each work, whatever the paper has.
    #[arg(long)]
    count: Option<usize>,
    /// What a child process does: its work, and where metadata is.
    #[arg(long, hide = true)]
    child: Option<Work>,
    #[arg(long, hide = true)]
    together: bool,
}

/// What is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Work {
    /// Blocks of 16 KiB, written, far beyond the limit.
    Written16KiB,
    /// Blocks of 1 KiB, likewise.
    Written1KiB,
    /// Blocks from 1 byte to 16 KiB, in memory.
    RandomSmall,
    /// Blocks from 16 to 256 KiB, in memory.
    RandomLarge,
    /// Blocks from 1 byte to 256 KiB, of which half are freed in each of some rounds.
    Churn,
}

impl Work {
    fn name(self) -> &'static str {
        match self {
            Work::Written16KiB => "16 KiB, written",
            Work::Written1KiB => "1 KiB, written",
            Work::RandomSmall => "random, 1 B to 16 KiB",
            Work::RandomLarge => "random, 16 to 256 KiB",
            Work::Churn => "churn, 1 B to 256 KiB",
        }
    }

    /// How many blocks the paper has, or has not said, or as many as fit.
    fn count(self, options: &Options) -> usize {
        let paper = match self {
            Work::Written16KiB => 3_000_000,
            Work::Written1KiB | Work::RandomSmall => 10_000_000,
            // Theirs are 10 million, 1.4 TB: the tables of so much may not take half of any limit below 25 GiB.
            Work::RandomLarge => 3_000_000,
            Work::Churn => 1_000_000,
        };
        match (options.count, options.test, options.paper) {
            (Some(count), ..) => count,
            (_, true, _) => paper / 5_000,
            (_, _, true) => paper,
            _ => paper / 100,
        }
    }

    fn sizes(self) -> (usize, usize) {
        match self {
            Work::Written16KiB => (16 << 10, 16 << 10),
            Work::Written1KiB => (1 << 10, 1 << 10),
            Work::RandomSmall => (1, 16 << 10),
            Work::RandomLarge => (16 << 10, 256 << 10),
            Work::Churn => (1, 256 << 10),
        }
    }

    fn is_written(self) -> bool {
        matches!(self, Work::Written16KiB | Work::Written1KiB)
    }

    /// The limit of what is written: the least for such pages, or twice what the tables of all blocks take, which
    /// may be half of it. Most of them are the kernel's page tables.
    fn limit(self, options: &Options) -> ByteCount {
        const LEAST: ByteCount = ByteCount::mib(16);
        /// 1/PART of what is allocated: 10 MiB a GiB.
        const PART: usize = 100;
        let blocks = self.count(options) * self.sizes().1;
        LEAST.max(ByteCount((2 * blocks / PART) as u64))
    }

    fn start(self, options: &Options) -> Result<Heap> {
        let builder = Heap::builder().far_metadata(options.together);
        let builder = builder.span(ByteCount::gib(if options.paper { 6 << 10 } else { 1 << 10 }));
        let builder = match (self.is_written(), &options.dir) {
            (true, None) => builder.far_limit(self.limit(options)),
            (true, Some(dir)) => builder.far_limit(self.limit(options)).dir(dir),
            (false, _) => {
                // Blocks that are not written take address space, and room on a store, which few file systems have. Half
                // of the limit has to have room for their tables, which nobody touches: 8 MiB a GiB.
                let (limit, room) = if options.paper { (32 << 10, 4 << 10) } else { (512, 64) };
                let store = MemStore::new(ByteCount::gib(room)).map_err(Failure::of)?;
                // As far away as memory is here: their Figure 9 is of a remote NUMA node.
                let far_node = probe::NumaNode::all().last().map(|node| node.number);
                let far_node = far_node.filter(|node| *node > 0);
                builder.far_limit(ByteCount::mib(limit)).store(Arc::new(store)).node(far_node)
            }
        };
        builder.start().map_err(Failure::of)
    }
}

/// What a child has to say.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// By the clock where blocks are written, else of the processor.
    seconds: f64,
    /// Of the processor.
    cpu: f64,
    /// Percent of metadata in blocks and metadata.
    share: f64,
    /// Of addresses that the tier's allocator holds.
    address_mib: f64,
    read_mib: f64,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if options.test || !options.bench && options.child.is_none() {
        options.test = true;
        options.rounds = 1;
    }
    let result = match options.child {
        Some(work) => work.sample(&options).map(|sample| {
            let Sample { seconds, cpu, share, address_mib, read_mib } = sample;
            println!("{seconds} {cpu} {share} {address_mib} {read_mib}");
        }),
        None => run(&options),
    };
    let is_skipped = matches!(result, Err(Failure::Skipped(_)));
    let ended = failure::end("metadata", result);
    if is_skipped && options.child.is_some() { ExitCode::from(SKIPPED) } else { ended }
}

fn run(options: &Options) -> Result<()> {
    table::print_heading();
    let mut rows = Vec::new();
    let wants = |name: &str| {
        options.words.is_empty() || options.words.iter().any(|word| name.contains(word.as_str()))
    };
    let works = [Work::Written16KiB, Work::Written1KiB, Work::RandomSmall, Work::RandomLarge];
    for work in works.into_iter().filter(|work| wants(work.name())) {
        add(&mut rows, work.name(), placements(work, options)?, options)?;
    }
    if wants("retain") {
        add(&mut rows, "retain", retain(options)?, options)?;
    }
    table::print_goals(&rows);
    let folder = table::write("metadata", &rows, options.test)?;
    println!("written: metadata.csv, metadata.svg in {}", folder.display());
    Ok(())
}

fn add(rows: &mut Vec<Row>, name: &str, new: Vec<Row>, options: &Options) -> Result<()> {
    table::print_group(name, &new);
    rows.extend(new);
    table::write("metadata", rows, options.test).map(drop)
}

/// A work with metadata separated and together, and beside the device where it is written.
fn placements(work: Work, options: &Options) -> Result<Vec<Row>> {
    let count = work.count(options);
    let bytes = count * work.sizes().1;
    let [mut separated, mut together] = [const { Vec::new() }; 2];
    let mut devices = Vec::new();
    for _ in 0..options.rounds.max(1) {
        separated.push(child(work, options, &[])?);
        together.push(child(work, options, &["--together"])?);
        if work.is_written() {
            devices.push(device(bytes, options)?);
        }
    }
    let seconds =
        |samples: &[Sample]| samples.iter().map(|sample| sample.seconds).collect::<Vec<_>>();
    let per_block = |samples: &[Sample]| {
        seconds(samples).into_iter().map(|all| all * 1e9 / count as f64).collect::<Vec<_>>()
    };
    let name = |what: &str| format!("{}: {what}", work.name());
    let bases = ("metadata in the tier".to_owned(), per_block(&together));
    let faster = |value: f64, base: f64| base / value;
    let mut rows = vec![Row::of_rounds(
        (name("metadata separated"), "ns"),
        per_block(&separated),
        bases,
        faster,
        None,
    )];
    if work.is_written() {
        let cpu = |samples: &[Sample]| {
            samples.iter().map(|sample| sample.cpu * 1e9 / count as f64).collect::<Vec<_>>()
        };
        rows.push(Row::of_rounds(
            (name("processor time, metadata separated"), "ns"),
            cpu(&separated),
            ("metadata in the tier".to_owned(), cpu(&together)),
            faster,
            None,
        ));
        let mib = |seconds: f64| bytes as f64 / seconds / f64::from(1 << 20);
        let rates = seconds(&separated).into_iter().map(mib).collect();
        let gib = bytes as f64 / f64::from(1 << 30);
        let (elapsed, of_processor): (Vec<f64>, Vec<f64>) = devices.into_iter().unzip();
        let devices = ("the device, sequential".to_owned(), elapsed.into_iter().map(mib).collect());
        let share_of = |value: f64, base: f64| value / base;
        rows.push(Row::of_rounds((name("written"), "MiB/s"), rates, devices, share_of, Some(0.8)));
        let per_gib =
            |seconds: Vec<f64>| seconds.into_iter().map(|all| all / gib).collect::<Vec<_>>();
        rows.push(Row::of_rounds(
            (name("processor"), "s/GiB"),
            per_gib(separated.iter().map(|sample| sample.cpu).collect()),
            ("the device, sequential".to_owned(), per_gib(of_processor)),
            faster,
            None,
        ));
        // A page that fills slowly may leave before it is full.
        let read = separated.iter().map(|sample| sample.read_mib).fold(0.0, f64::max);
        if read > bytes as f64 / f64::from(1 << 20) / 100.0 {
            return Err(Failure::Broken(format!(
                "{read} MiB were read while nothing was asked for"
            )));
        }
    }
    let shares = separated.iter().map(|sample| sample.share).collect::<Vec<_>>();
    let of_tpch = ("the paper's TPC-H".to_owned(), vec![SHARE_OF_TPCH; shares.len()]);
    rows.push(Row::of_rounds((name("share of metadata"), "%"), shares, of_tpch, faster, None));
    Ok(rows)
}

/// The address space that is used with jemalloc's option `retain`, and without.
fn retain(options: &Options) -> Result<Vec<Row>> {
    let [mut on, mut off] = [const { Vec::new() }; 2];
    for _ in 0..options.rounds.max(1) {
        on.push(child(Work::Churn, options, &["retain:true"])?);
        off.push(child(Work::Churn, options, &["retain:false"])?);
    }
    let field =
        |samples: &[Sample], of: fn(&Sample) -> f64| samples.iter().map(of).collect::<Vec<_>>();
    let row = |what: &str, unit, of: fn(&Sample) -> f64| {
        let bases = ("retain on".to_owned(), field(&on, of));
        let name = (format!("retain off: {what}"), unit);
        Row::of_rounds(name, field(&off, of), bases, |value, base| base / value, None)
    };
    Ok(vec![
        row("address space", "MiB", |sample| sample.address_mib),
        row("time", "s", |sample| sample.seconds),
    ])
}

/// Seconds in which the device writes as much, and those of the processor.
fn device(bytes: usize, options: &Options) -> Result<(f64, f64)> {
    let len = bytes.next_multiple_of(raw::BLOCK);
    let unnamed =
        Unnamed::new(options.dir.as_deref(), ByteCount(len as u64)).map_err(Failure::io)?;
    let file = raw::open(&unnamed.path()).map_err(Failure::io)?;
    let (began, cpu_before) = (Instant::now(), process::cpu_time());
    raw::transfer(&file, len, true).map_err(Failure::io)?;
    Ok((began.elapsed().as_secs_f64(), (process::cpu_time() - cpu_before).as_secs_f64()))
}

/// Samples a work in a process of its own; a last argument with a colon is jemalloc's.
fn child(work: Work, options: &Options, arguments: &[&str]) -> Result<Sample> {
    let program = std::env::current_exe().map_err(Failure::io)?;
    let mut child = Command::new(program);
    let name = work.to_possible_value().expect("no work is hidden").get_name().to_owned();
    child.args(["--child", &name, "--count", &work.count(options).to_string()]);
    child.args(options.paper.then_some("--paper"));
    if let Some(dir) = &options.dir {
        child.arg("--dir").arg(dir);
    }
    for argument in arguments {
        if argument.contains(':') {
            child.env("_RJEM_MALLOC_CONF", argument);
        } else {
            child.arg(argument);
        }
    }
    let output = child.output().map_err(Failure::io)?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.code() == Some(i32::from(SKIPPED)) {
        return Err(Failure::Skipped(text.trim_start_matches("skipped: ").to_owned()));
    }
    let numbers: Vec<f64> = text.split(' ').filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [seconds, cpu, share, address_mib, read_mib] if output.status.success() => {
            Ok(Sample { seconds, cpu, share, address_mib, read_mib })
        }
        _ => {
            let errors = String::from_utf8_lossy(&output.stderr);
            Err(Failure::Broken(format!("{name}: {} {text} {errors}", output.status)))
        }
    }
}

/// A far block; freed when dropped.
struct Block {
    ptr: NonNull<u8>,
    layout: Layout,
}

impl Block {
    fn new(size: usize) -> Result<Block> {
        let layout = Layout::from_size_align(size, 8).expect("a valid layout");
        let ptr =
            Far.allocate(layout).map_err(|_| Failure::Broken("out of far memory".to_owned()))?;
        Ok(Block { ptr: ptr.cast(), layout })
    }

    fn words(&mut self) -> &mut [u64] {
        let len = self.layout.size() / 8;
        // SAFETY: the block is ours, aligned, and as large; any bytes are numbers, and those of new far
        // memory are zeros or what an earlier block has left.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { Far.deallocate(self.ptr, self.layout) }
    }
}

impl Work {
    /// The child's part.
    fn sample(self, options: &Options) -> Result<Sample> {
        let heap = self.start(options)?;
        let (from, to) = self.sizes();
        let mut random = 0x9E37_79B9_7F4A_7C15_u64;
        let mut roll = move || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 16) as usize
        };
        let rounds = if self == Work::Churn { ROUNDS } else { 1 };
        let count = self.count(options);
        let mut blocks: Vec<Block> = Vec::with_capacity(count);
        let (began, cpu_before) = (Instant::now(), process::cpu_time());
        for _ in 0..rounds {
            let half = if blocks.is_empty() { 0 } else { blocks.len() / 2 };
            for _ in 0..half {
                let at = roll() % blocks.len();
                blocks.swap_remove(at);
            }
            while blocks.len() < count {
                let size = if from == to { from } else { from + roll() % (to - from + 1) };
                let mut block = Block::new(size)?;
                if self.is_written() {
                    raw::fill_block(block.words(), (blocks.len() * size) as u64);
                }
                blocks.push(block);
            }
        }
        // What waits for no device is told by the processor's time: others may want it too.
        let cpu = process::cpu_time() - cpu_before;
        let seconds = if self.is_written() { began.elapsed() } else { cpu }.as_secs_f64();
        let read_mib = heap.stats().bytes_read.get() as f64 / f64::from(1 << 20);
        let usage = heap.usage();
        let metadata = usage.metadata_bytes.get() as f64;
        let used = (usage.small_bytes.get() + usage.large_bytes.get()) as f64;
        let address = usage.active_bytes.0 + usage.dirty_bytes.0 + usage.retained_bytes.0;
        if self.is_written() {
            for (at, block) in blocks.iter_mut().enumerate().step_by(CHECKED) {
                raw::check_block(block.words(), (at * from) as u64);
            }
        }
        drop(blocks);
        // Also the check that nothing was lost.
        heap.shutdown().map_err(Failure::of)?;
        Ok(Sample {
            seconds,
            cpu: cpu.as_secs_f64(),
            share: 100.0 * metadata / (used + metadata),
            address_mib: address as f64 / f64::from(1 << 20),
            read_mib,
        })
    }
}
