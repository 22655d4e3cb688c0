//! Segments that migrate, and TPC-H over segments on tiers: how fast, and how much memory it takes.
//!
//! ```text
//! cargo bench -p farheap-lab --bench tiers           # minutes; needs 1 GiB of disk and RAM
//! cargo bench -p farheap-lab --bench tiers -- migrate        # groups whose names contain one of the words
//! cargo bench -p farheap-lab --bench tiers -- --size 4GiB --limit 256MiB
//! cargo bench -p farheap-lab --bench tiers -- tpch separation --paper     # scale factor 2; 1 to 8
//! cargo bench -p farheap-lab --bench tiers -- --test         # does it work? seconds
//! ```
//! Segments of 8 MiB go from local memory to the far tier and back, in the default configuration, with
//! a limit of a quarter of the data, and what is still in memory afterwards is written out as well. The
//! device by itself writes and reads the same bytes in turns. Values are medians, a ratio is the
//! median of the rounds' own ratios. Prints a table and writes `target/figures/tiers.csv`, row by
//! row, and `tiers.svg`. It checks what it reads.
//!
//! `tpch` and `separation` have the queries of the example `tiers`, in processes of their own: Figures 5
//! to 7 of "Separated Allocator Metadata in Disaggregated In-Memory Databases: Friend or Foe?". `cpp` has the same of
//! a store in C++. `auto` has them placed by how often they are read.

#[path = "../../../segments/examples/tiers/answers.rs"]
#[allow(dead_code, unused_imports, reason = "the example's, and its tests run there")]
mod answers;
mod auto;
mod child;
#[path = "../../../benches/common/mod.rs"]
mod common;
mod cpp;
#[path = "../../../benches/common/failure.rs"]
mod failure;
#[path = "../../../benches/common/group.rs"]
#[expect(dead_code, reason = "this benchmark does not swap")]
mod group;
#[path = "../../../segments/examples/tiers/load.rs"]
#[allow(dead_code, unused_imports, reason = "the example's, and its tests run there")]
mod load;
#[path = "../../../benches/common/process.rs"]
#[expect(dead_code, reason = "this benchmark does not catch interrupts")]
mod process;
#[path = "../../../segments/examples/tiers/queries/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the example's, and its tests run there")]
mod queries;
#[path = "../../../benches/common/raw.rs"]
mod raw;
mod separation;
#[path = "../../../benches/common/servers.rs"]
mod servers;
#[path = "../../../benches/common/table.rs"]
mod table;
#[path = "../../../segments/examples/tiers/tables.rs"]
#[allow(dead_code, unused_imports, reason = "the example's, and its tests run there")]
mod tables;
mod tpch;
#[path = "../../../segments/examples/tiers/waits.rs"]
#[allow(dead_code, unused_imports, reason = "the example's, and its tests run there")]
mod waits;

use clap::Parser;
use common::Unnamed;
use failure::{Failure, Result};
use farheap::region::Advice;
use farheap::{ByteCount, Heap, Tier};
use farheap_segments::{Migrator, Segment};
use hdrhistogram::Histogram;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use table::Row;

const SEGMENT: usize = 8 << 20;
const WORDS: usize = SEGMENT / 8;

/// Segments that stay local and are queried while the others migrate.
const HOT: usize = 2;

/// Words that a query adds up.
const QUERY_WORDS: usize = 8 << 10;

#[derive(Clone, Debug, Parser)]
struct Options {
    /// Only groups whose names contain one of these: migrate, queries, memory, tpch, separation, cpp, auto.
    words: Vec<String>,
    /// Bytes that migrate.
    #[arg(long, default_value = "256MiB")]
    size: ByteCount,
    /// The limit of the far tier; a quarter of the data unless said otherwise.
    #[arg(long)]
    limit: Option<ByteCount>,
    /// Directory of the device file; where temporary files go unless said otherwise.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Rounds in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// TPC-H's scale factor: 370 MB of columns at 1.
    #[arg(long, default_value_t = 0.5)]
    scale_factor: f64,
    /// Scale factors of `separation`.
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.5")]
    scale_factors: Vec<f64>,
    /// Pairs of `separation` in each round.
    #[arg(long, default_value_t = 1)]
    pairs: usize,
    /// How often each query runs on each side.
    #[arg(long, default_value_t = 3)]
    passes: usize,
    /// Cache of the tier, in percent of the columns.
    #[arg(long, default_value_t = 20)]
    cache: u64,
    /// TPC-H at the paper's scale factors: some minutes each.
    #[arg(long)]
    paper: bool,
    /// A process for one side of TPC-H.
    #[arg(long, hide = true)]
    child: Option<child::Side>,
    /// What a child may have in local memory.
    #[arg(long, hide = true, default_value = "0")]
    budget: ByteCount,
    /// The configuration of the child's tier.
    #[arg(long, hide = true, default_value = "")]
    conf: String,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| name.contains(word.as_str()))
    }
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if let Some(side) = options.child {
        return child::serve(&options, side);
    }
    if options.paper {
        options.scale_factor = options.scale_factor.max(2.0);
        options.scale_factors = vec![1.0, 2.0, 4.0, 8.0];
    }
    if options.test || !options.bench {
        options.test = true;
        options.size = ByteCount::mib(48);
        (options.rounds, options.passes, options.scale_factor) = (1, 1, 0.05);
        options.cache = 50;
        options.scale_factors = vec![0.1];
    }
    failure::end("tiers", run(&options))
}

fn run(options: &Options) -> Result<()> {
    let limit = options.limit.unwrap_or(ByteCount(options.size.get() / 4).max(ByteCount::mib(8)));
    println!("{} in segments of {}, limit {limit}", options.size, ByteCount(SEGMENT as u64));
    table::print_heading();
    let mut rows = Vec::new();
    if ["migrate", "queries", "memory"].into_iter().any(|name| options.wants(name)) {
        segment_rows(options, limit, &mut rows)?;
    }
    if options.wants("tpch") {
        tpch::rows(options, &mut rows)?;
    }
    if options.wants("separation") {
        separation::rows(options, &mut rows)?;
    }
    if options.wants("cpp") {
        cpp::rows(options, &mut rows)?;
    }
    if options.wants("auto") {
        auto::rows(options, &mut rows)?;
    }
    table::print_goals(&rows);
    let folder = table::write("tiers", &rows, options.test)?;
    println!("written: tiers.csv, tiers.svg in {}", folder.display());
    Ok(())
}

/// Rows of segments that migrate between local memory and one far tier.
fn segment_rows(options: &Options, limit: ByteCount, rows: &mut Vec<Row>) -> Result<()> {
    let mut builder = Heap::builder().far_limit(limit);
    if let Some(dir) = &options.dir {
        builder = builder.dir(dir);
    }
    let heap = builder.start().map_err(Failure::of)?;
    for (name, work) in [
        ("migrate", migrate as fn(&Options, &Heap) -> Result<Vec<Row>>),
        ("queries", beside),
        ("memory", memory),
    ] {
        if options.wants(name) {
            add(name, rows, work(options, &heap)?, options)?;
        }
    }
    heap.shutdown().map_err(Failure::of)
}

/// Tells new rows, and writes them beside the others.
fn add(name: &str, rows: &mut Vec<Row>, new: Vec<Row>, options: &Options) -> Result<()> {
    table::print_group(name, &new);
    rows.extend(new);
    table::write("tiers", rows, options.test).map(drop)
}

fn broken(error: impl std::fmt::Display) -> Failure {
    Failure::Broken(error.to_string())
}

fn word(segment: usize, at: usize) -> u64 {
    ((segment * WORDS + at) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn segments(count: usize, placement: Tier) -> Result<Vec<Segment<u64>>> {
    let segment = |n| Segment::collect(placement, (0..WORDS).map(move |at| word(n, at)));
    (0..count).map(segment).collect::<std::result::Result<_, _>>().map_err(broken)
}

/// All of their words are right.
fn check(segments: &[Segment<u64>]) {
    for (n, segment) in segments.iter().enumerate() {
        let wrong = segment.read().iter().enumerate().filter(|(at, w)| **w != word(n, *at)).count();
        assert_eq!(wrong, 0, "segment {n}");
    }
}

fn move_all(segments: &[Segment<u64>], to: Tier) -> Result<()> {
    let mut migrator = Migrator::new();
    for segment in segments {
        migrator.add(segment, to);
    }
    migrator.write_out().run(|_| {}).error().map_or(Ok(()), |error| Err(broken(error)))
}

/// Moves all to the far tier, and what it keeps in memory to the device; returns the seconds.
fn out(heap: &Heap, segments: &[Segment<u64>]) -> Result<f64> {
    let began = Instant::now();
    move_all(segments, Tier::FAR)?;
    for segment in segments {
        let values = segment.read();
        heap.region().advise(&[&*values], Advice::PageOutNow).map_err(Failure::of)?;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// To the device and back, beside the device by itself.
fn migrate(options: &Options, heap: &Heap) -> Result<Vec<Row>> {
    let count = options.size.as_usize() / SEGMENT;
    let len = count * SEGMENT;
    let unnamed = Unnamed::new(options.dir.as_deref(), ByteCount(len as u64)).map_err(broken)?;
    let file: File = raw::open(&unnamed.path()).map_err(broken)?;
    let moved = segments(count, Tier::LOCAL)?;
    let [mut outs, mut ins, mut writes, mut reads] = [const { Vec::new() }; 4];
    // The first round finds blocks that the file system has not given out.
    for round in 0..=options.rounds {
        let rate = |seconds: f64| len as f64 / seconds / f64::from(1 << 20);
        let [write, read] = [true, false].map(|write| {
            let began = Instant::now();
            raw::transfer(&file, len, write).map(|()| rate(began.elapsed().as_secs_f64()))
        });
        let out = rate(out(heap, &moved)?);
        let began = Instant::now();
        move_all(&moved, Tier::LOCAL)?;
        let back = rate(began.elapsed().as_secs_f64());
        if round == options.rounds {
            check(&moved);
        }
        if round > 0 {
            outs.push(out);
            ins.push(back);
            writes.push(write.map_err(broken)?);
            reads.push(read.map_err(broken)?);
        }
    }
    let row = |work: &str, values, bases| {
        let name = (format!("migrate {work}"), "MiB/s");
        let bases = ("the device, sequential".to_owned(), bases);
        Row::of_rounds(name, values, bases, |value, base| value / base, Some(0.8))
    };
    Ok(vec![row("local to far, written out", outs, writes), row("far to local", ins, reads)])
}

/// Queries one after the other until `until` says that it is enough; microseconds of each, and of
/// the longest call that begins to read.
fn query(hot: &[Segment<u64>], until: impl Fn() -> bool) -> (Histogram<u64>, Duration) {
    let mut times = Histogram::new(3).expect("three digits");
    let (mut at, mut longest) = (0_usize, Duration::ZERO);
    while !until() {
        let began = Instant::now();
        let (n, from) = (at % hot.len(), at.wrapping_mul(0x9E37_79B1) % (WORDS - QUERY_WORDS));
        let values = hot[n].read();
        longest = longest.max(began.elapsed());
        let sum =
            values[from..][..QUERY_WORDS].iter().fold(0, |sum: u64, word| sum.wrapping_add(*word));
        std::hint::black_box(sum);
        times.saturating_record(began.elapsed().as_nanos() as u64);
        at += 1;
    }
    (times, longest)
}

/// What queries of other segments notice of a migration.
fn beside(options: &Options, heap: &Heap) -> Result<Vec<Row>> {
    let hot = segments(HOT, Tier::LOCAL)?;
    let moved = segments(options.size.as_usize() / SEGMENT, Tier::LOCAL)?;
    let time = Duration::from_millis(if options.test { 50 } else { 1_000 });
    let [mut beside, mut alone, mut waits] = [const { Vec::new() }; 3];
    for _ in 0..options.rounds {
        let began = Instant::now();
        let (quiet, _) = query(&hot, || began.elapsed() > time);
        let done = AtomicBool::new(false);
        let (busy, longest, result) = std::thread::scope(|scope| {
            let migrates = scope.spawn(|| {
                let result = out(heap, &moved).and_then(|_| move_all(&moved, Tier::LOCAL));
                done.store(true, Ordering::Relaxed);
                result
            });
            let (times, longest) = query(&hot, || done.load(Ordering::Relaxed));
            (times, longest, migrates.join().expect("no panic"))
        });
        result?;
        let us = |times: &Histogram<u64>| times.value_at_quantile(0.99) as f64 / 1e3;
        beside.push(us(&busy));
        alone.push(us(&quiet));
        waits.push(longest.as_secs_f64() * 1e6);
    }
    let row = |work: &str, values, bases, goal| {
        let bases = ("p99 without a migration".to_owned(), bases);
        let name = (work.to_owned(), "us");
        Row::of_rounds(name, values, bases, |value, base| base / value, goal)
    };
    Ok(vec![
        row("queries beside a migration, p99", beside, alone.clone(), Some(1.0 / 1.5)),
        row("queries beside a migration, longest wait to read", waits, alone, None),
    ])
}

/// Resident bytes of this process that are no file's.
fn resident() -> Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status").map_err(broken)?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok()
    };
    field("RssAnon:").map(|kib| kib << 10).ok_or_else(|| broken("/proc/self/status has no RssAnon"))
}

/// How much more memory there is during a migration than before.
fn memory(options: &Options, heap: &Heap) -> Result<Vec<Row>> {
    let moved = segments(options.size.as_usize() / SEGMENT, Tier::LOCAL)?;
    // Once before: what the tier needs for itself is there then.
    out(heap, &moved)?;
    let mut extra = Vec::new();
    for _ in 0..options.rounds {
        move_all(&moved, Tier::LOCAL)?;
        heap.purge();
        let before = resident()?;
        let done = AtomicBool::new(false);
        let (peak, result) = std::thread::scope(|scope| {
            let migrates = scope.spawn(|| {
                let result = out(heap, &moved);
                done.store(true, Ordering::Relaxed);
                result
            });
            let mut peak = Ok(before);
            while !done.load(Ordering::Relaxed) {
                peak = peak.and_then(|peak| Ok(peak.max(resident()?)));
                std::thread::sleep(Duration::from_micros(500)); // Leaves the processor to the migration.
            }
            (peak, migrates.join().expect("no panic"))
        });
        result?;
        extra.push((peak? - before) as f64 / f64::from(1 << 20));
    }
    let segment = vec![(SEGMENT >> 20) as f64; extra.len()];
    let bases = ("one segment".to_owned(), segment);
    let name = ("memory during a migration, above before".to_owned(), "MiB");
    // A sample of nothing is no division by zero.
    let ratio = |value: f64, base: f64| base / value.max(0.1);
    Ok(vec![Row::of_rounds(name, extra, bases, ratio, Some(1.0))])
}
