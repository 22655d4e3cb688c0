//! What allocators do to a query engine: latency, waits, and memory over time.
//!
//! ```text
//! cargo bench -p farheap-lab --bench query_alloc                   # all allocators at three rates, five minutes
//! cargo bench -p farheap-lab --bench query_alloc -- --paper        # 16 times the rows, 5 times the queries
//! cargo bench -p farheap-lab --bench query_alloc -- --libraries /opt/lib  # where the others' shared libraries are
//! cargo bench -p farheap-lab --bench query_alloc -- --test         # does it work? seconds
//! ```
//! After Durner, Leis and Neumann, *On the Impact of Memory Allocation on High-Performance Query Processing*:
//! hash joins, group-bys and materialisations with the sizes and the shares of their Figure 2, queries that arrive at
//! exponentially distributed times, at most ten of them active. Theirs run on 60 cores and share a query
//! among them; here a query is one thread's. The rates are a half, one and two times 0.8 of what the machine
//! can do with jemalloc. Figures 4, 5 and 7 (latency, wait), 3, 6 and 8 (memory over time), Tables 1 (page
//! faults; not what is remote) and 2 (peak and average of requested and resident memory). *Local* and *far*
//! are ours, far memory that fits. Every sample is a process of its own, allocators take turns, values are
//! medians, and a ratio is the median of the rounds' own ratios. Queries check their answers. Prints a
//! table and writes `target/figures/query_alloc.csv`, row by row, `query_alloc_memory.csv`, and pictures.

#[path = "../../../benches/common/bare.rs"]
mod bare;
mod engine;
#[path = "../../../benches/common/failure.rs"]
#[expect(dead_code, reason = "this benchmark does not catch interrupts")]
mod failure;
mod operators;
mod picture;
mod place;
#[path = "../../../benches/common/sides.rs"]
mod sides;
#[path = "../../../benches/common/table.rs"]
mod table;

use clap::Parser;
use engine::{Load, Seen, quantile};
use failure::{Failure, Result};
use sides::{SIDES, Side};
use std::path::PathBuf;
use std::process::ExitCode;
use table::Row;

/// Shares of the machine's throughput at which queries arrive.
const RATES: [(&str, f64); 3] = [("half", 0.4), ("one", 0.8), ("two", 1.6)];

/// The time of jemalloc over ours that we want: local, and far.
const GOAL_LOCAL: f64 = 0.95;
const GOAL_FAR: f64 = 0.87;

#[derive(Debug, Parser)]
struct Options {
    /// Only allocators whose names contain one of these; ours and jemalloc always.
    words: Vec<String>,
    /// 16 times the rows, 5 times the queries.
    #[arg(long)]
    paper: bool,
    /// Rounds in turns; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Directory in which to look for the shared libraries of allocators first.
    #[arg(long)]
    libraries: Option<PathBuf>,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
    /// The allocator of a child process, and its load.
    #[arg(long, hide = true)]
    child: Option<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    queries: usize,
    #[arg(long, hide = true)]
    rate: Option<f64>,
    #[arg(long, hide = true, default_value_t = 1)]
    scale: u64,
}

/// What one allocator's runs have shown at one rate.
pub(crate) struct Samples {
    pub(crate) side: Side,
    pub(crate) seen: Vec<Seen>,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    if let Some(name) = &options.child {
        return child(name, &options);
    }
    if options.test || !options.bench {
        options.test = true;
        options.rounds = 1;
    }
    failure::end("query_alloc", run(&options))
}

/// One run, for the parent.
fn child(name: &str, options: &Options) -> ExitCode {
    let side = Side::named(name).expect("the parent names one");
    let load = Load { queries: options.queries, rate: options.rate, scale: options.scale };
    sides::tell(place::run(side, load).map(|seen| seen.to_text()))
}

fn sample(side: Side, load: Load, options: &Options) -> Result<Seen> {
    let mut command = side.command(options.libraries.as_deref())?;
    command.args(["--queries", &load.queries.to_string(), "--scale", &load.scale.to_string()]);
    if let Some(rate) = load.rate {
        command.args(["--rate", &rate.to_string()]);
    }
    let text = side.answer(command)?;
    Seen::from_text(&text).ok_or_else(|| Failure::Broken(format!("{}: {text}", side.name())))
}

fn run(options: &Options) -> Result<()> {
    let (queries, scale) = match (options.test, options.paper) {
        (true, _) => (12, 1),
        (_, true) => (1_500, 32),
        _ => (300, 2),
    };
    let all_at_once = Load { queries, rate: None, scale };
    let throughput = queries as f64 / sample(Side::Jemalloc, all_at_once, options)?.seconds;
    println!(
        "{queries} queries a run; {throughput:.1} queries/s is what the machine can do with jemalloc"
    );
    let sides = sides(Load { queries: 2, ..all_at_once }, options)?;
    table::print_heading();
    let (mut rows, mut rates) = (Vec::new(), Vec::new());
    for (name, share) in RATES {
        let load = Load { rate: Some(share * throughput), ..all_at_once };
        let mut all: Vec<Samples> =
            sides.iter().map(|side| Samples { side: *side, seen: Vec::new() }).collect();
        for _ in 0..options.rounds.max(1) {
            for samples in &mut all {
                samples.seen.push(sample(samples.side, load, options)?);
            }
        }
        let new = rows_of(name, &all);
        table::print_group(&format!("rate {name}"), &new);
        rows.extend(new);
        rates.push((name, all));
        table::write("query_alloc", &rows, options.test)?;
    }
    table::print_goals(&rows);
    let folder = table::write("query_alloc", &rows, options.test)?;
    picture::write(&folder, &rates)
        .map_err(|error| Failure::Broken(format!("pictures: {error}")))?;
    println!(
        "written: query_alloc.csv, query_alloc_memory.csv and pictures in {}",
        folder.display()
    );
    Ok(())
}

/// The allocators that are here, and asked for.
fn sides(load: Load, options: &Options) -> Result<Vec<Side>> {
    let mut found = Vec::new();
    let wants = |side: &Side| {
        let name = side.name();
        let always = side.is_ours() || *side == Side::Jemalloc || options.words.is_empty();
        always || options.words.iter().any(|word| name.contains(word.as_str()))
    };
    for side in SIDES.into_iter().filter(wants) {
        match sample(side, load, options) {
            Ok(_) => found.push(side),
            Err(Failure::Skipped(why)) => println!("skipped: {why}"),
            Err(failure) => return Err(failure),
        }
    }
    if found.iter().any(|side| side.is_ours()) {
        return Ok(found);
    }
    Err(Failure::Skipped("there is no far memory here to compare".to_owned()))
}

/// Ours against each other allocator, and each one's memory by what was requested of it.
fn rows_of(rate: &str, all: &[Samples]) -> Vec<Row> {
    let mut rows = Vec::new();
    let less = |value: f64, base: f64| base / value.max(1e-3);
    for ours in all.iter().filter(|samples| samples.side.is_ours()) {
        for other in all.iter().filter(|samples| !samples.side.is_ours()) {
            for (what, unit, of) in LATENCIES {
                let name = (format!("rate {rate}, {what} {}", ours.side.name()), unit);
                let bases = (other.side.name().to_owned(), other.each(of));
                let is_goal =
                    what == "latency p50" && other.side == Side::Jemalloc && rate != "two";
                let goal = if ours.side == Side::Local { GOAL_LOCAL } else { GOAL_FAR };
                rows.push(Row::of_rounds(
                    name,
                    ours.each(of),
                    bases,
                    less,
                    is_goal.then_some(goal),
                ));
            }
        }
    }
    for samples in all {
        for (what, of, base) in MEMORY {
            let name = (format!("rate {rate}, {what} resident {}", samples.side.name()), "MiB");
            let bases = ("requested".to_owned(), samples.each(base));
            rows.push(Row::of_rounds(name, samples.each(of), bases, less, None));
        }
    }
    rows
}

type Of = fn(&Seen) -> f64;

const LATENCIES: [(&str, &str, Of); 4] = [
    ("latency p50", "ms", |seen| quantile(&seen.latencies, 0.5)),
    ("latency p99", "ms", |seen| quantile(&seen.latencies, 0.99)),
    ("wait, mean", "ms", |seen| seen.waits.iter().sum::<f64>() / seen.waits.len() as f64),
    ("page faults", "", |seen| seen.page_faults as f64),
];

/// Peak and average: of what is resident, of what is requested.
const MEMORY: [(&str, Of, Of); 2] = [
    ("peak", |seen| seen.of_memory(|at| at.2).0, |seen| seen.of_memory(|at| at.1).0),
    ("average", |seen| seen.of_memory(|at| at.2).1, |seen| seen.of_memory(|at| at.1).1),
];

impl Samples {
    fn each(&self, of: Of) -> Vec<f64> {
        self.seen.iter().map(of).collect()
    }
}
