//! What an allocation and its free cost, for our tiers and the allocators of others.
//!
//! ```text
//! cargo bench --bench alloc                          # all works, ten minutes
//! cargo bench --bench alloc -- pair "churn 16 KiB"   # works whose names contain one of the words
//! cargo bench --bench alloc -- --libraries /opt/lib  # where the others' shared libraries are
//! cargo bench --bench alloc -- --test                # does it work? seconds
//! ```
//! Pairs and random sizes from 16 bytes to 8 MiB, churn as of a query engine's chunks, on one and two
//! threads, and frees by another thread. *Far* is far memory that fits, of which a block's first byte
//! is written; where a work is *written*, a byte of every page is, so that the memory is resident.
//! TCMalloc, mimalloc, snmalloc and TBBmalloc are shared libraries that are loaded before the same
//! program; one that is not there is skipped with a line that says so. Every sample is a process of
//! its own, allocators take turns, values are medians, and a ratio is the median of the rounds' own
//! ratios. Prints a table and writes `target/figures/alloc.csv`, row by row, and `alloc.svg`.

#[path = "../common/bare.rs"]
mod bare;
#[path = "../common/failure.rs"]
#[expect(dead_code, reason = "this benchmark does not catch interrupts")]
mod failure;
mod sample;
#[path = "../common/sides.rs"]
mod sides;
#[path = "../common/table.rs"]
mod table;
mod work;

use clap::Parser;
use failure::{Failure, Result};
use sides::{SIDES, Side};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use table::Row;
use work::{Kind, Touch, Work, works};

/// Largest size that jemalloc caches.
const SMALL: usize = 32 << 10;

/// Smallest size of a query engine's chunks.
const CHUNK: usize = 16 << 10;

/// The time of jemalloc over ours that we want: up to [`SMALL`] bytes; local, and far.
const GOAL_LOCAL: f64 = 0.95;
const GOAL_FAR: f64 = 0.87;

/// What a pair above [`SMALL`], and churn of chunks, may cost, in nanoseconds.
const PAIR_NS: f64 = 30.0;
const CHURN_NS: f64 = 200.0;

#[derive(Debug, Parser)]
struct Options {
    /// Only works whose names contain one of these.
    words: Vec<String>,
    /// Rounds in turns; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Milliseconds of a sample.
    #[arg(long, default_value_t = 40)]
    ms: u64,
    /// Directory in which to look for the shared libraries of allocators first.
    #[arg(long)]
    libraries: Option<PathBuf>,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// The allocator and the work of a child process.
    #[arg(long, hide = true)]
    child: Option<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    work: usize,
}

/// The samples of one allocator.
struct Samples {
    side: Side,
    ns: Vec<f64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if let Some(name) = &options.child {
        return child(name, &options);
    }
    failure::end("alloc", run(&options))
}

/// One sample, for the parent.
fn child(name: &str, options: &Options) -> ExitCode {
    let side = Side::named(name).expect("the parent names one");
    let sample = side.run(works()[options.work], Duration::from_millis(options.ms));
    sides::tell(sample.map(|ns| ns.to_string()))
}

fn run(options: &Options) -> Result<()> {
    let (rounds, ms) = if options.test { (1, 1) } else { (options.rounds.max(1), options.ms) };
    let time = Duration::from_millis(ms);
    let libraries = options.libraries.as_deref();
    let chosen = |work: &Work| {
        let name = work.name();
        options.words.is_empty() || options.words.iter().any(|word| name.contains(word.as_str()))
    };
    let works: Vec<(usize, Work)> =
        works().into_iter().enumerate().filter(|(_, work)| chosen(work)).collect();
    let Some((first, _)) = works.first() else {
        return Err(Failure::Broken("no work has such a name".to_owned()));
    };
    let mut sides = Vec::new();
    for side in SIDES {
        match side.sample(*first, Duration::from_millis(1), libraries) {
            Ok(_) => sides.push(side),
            Err(Failure::Skipped(why)) => println!("skipped: {why}"),
            Err(failure) => return Err(failure),
        }
    }
    if !sides.iter().any(|side| side.is_ours()) {
        return Err(Failure::Skipped("there is no far memory here to compare".to_owned()));
    }
    table::print_heading();
    let mut rows = Vec::new();
    for (index, work) in works {
        let mut all: Vec<Samples> =
            sides.iter().map(|side| Samples { side: *side, ns: Vec::new() }).collect();
        for _ in 0..rounds {
            for samples in &mut all {
                samples.ns.push(samples.side.sample(index, time, libraries)?);
            }
        }
        let new = rows_of(work, &all);
        table::print_group(&work.name(), &new);
        rows.extend(new);
        table::write("alloc", &rows, options.test)?;
    }
    print_geometric_mean(&rows);
    table::print_goals(&rows);
    let folder = table::write("alloc", &rows, options.test)?;
    println!("written: alloc.csv, alloc.svg in {}", folder.display());
    Ok(())
}

/// Each of our tiers against each other allocator, and against what it may cost.
fn rows_of(work: Work, all: &[Samples]) -> Vec<Row> {
    let mut rows = Vec::new();
    for ours in all.iter().filter(|samples| samples.side.is_ours()) {
        let name = || (format!("{} {}", work.name(), ours.side.name()), "ns");
        // More is better: the other's time over ours.
        let ratio = |value: f64, base: f64| base / value;
        if let Some(most) = most_ns(work) {
            let bases = (format!("at most {most} ns"), vec![most; ours.ns.len()]);
            rows.push(Row::of_rounds(name(), ours.ns.clone(), bases, ratio, Some(1.0)));
        }
        for other in all.iter().filter(|samples| !samples.side.is_ours()) {
            let bases = (other.side.name().to_owned(), other.ns.clone());
            let goal = goal_of(work, ours.side).filter(|_| other.side == Side::Jemalloc);
            rows.push(Row::of_rounds(name(), ours.ns.clone(), bases, ratio, goal));
        }
    }
    rows
}

/// What the work may cost at most, in nanoseconds.
fn most_ns(work: Work) -> Option<f64> {
    match work.kind {
        _ if work.touch == Touch::All => None,
        Kind::Pair if work.from > SMALL => Some(PAIR_NS),
        Kind::Churn { .. } if work.from >= CHUNK => Some(CHURN_NS),
        _ => None,
    }
}

/// What we want against jemalloc.
fn goal_of(work: Work, ours: Side) -> Option<f64> {
    match ours {
        Side::Local => Some(GOAL_LOCAL),
        Side::Far if work.to <= SMALL => Some(GOAL_FAR),
        _ => None,
    }
}

/// Local memory against jemalloc, over all works.
fn print_geometric_mean(rows: &[Row]) {
    let is_local = |row: &&Row| row.work.ends_with(" local") && row.baseline == "jemalloc";
    let logs: Vec<f64> = rows.iter().filter(is_local).map(|row| row.ratio.ln()).collect();
    if !logs.is_empty() {
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        println!("local against jemalloc: {mean:.2} in the geometric mean of {} works", logs.len());
    }
}
