//! What allocators do to a query engine: latency, waits, and memory over time.
//!
//! ```text
//! cargo bench -p farheap-lab --bench query_alloc                   # all allocators at all rates, ten minutes
//! cargo bench -p farheap-lab --bench query_alloc -- --quick        # a fifth of the queries
//! cargo bench -p farheap-lab --bench query_alloc -- --paper        # three times the rows, four times the queries
//! cargo bench -p farheap-lab --bench query_alloc -- --libraries /opt/lib  # where the others' shared libraries are
//! cargo bench -p farheap-lab --bench query_alloc -- --test         # does it work? seconds
//! ```
//! After Durner, Leis and Neumann, *On the Impact of Memory Allocation on High-Performance Query Processing*: hash
//! joins, group-bys and materialisations with the sizes and the shares of their Figure 2, queries that arrive at
//! exponentially distributed times, at most ten of them active. Theirs run on 60 cores and share a query among
//! them; here a query is one thread's. The rates are a half, one and two times 0.8 of what the machine can do with
//! jemalloc; *all* arrive at once (Figure 1), *tenth* are twenty times as many queries of a tenth of the rows at rate
//! half (Figures 6 to 8: scale factor 10 of 100, 6 queries a second). Figures 2 (sizes), 4, 5 and 7 (latency,
//! wait), 3, 6 and 8 (memory over time), Tables 1 (page faults; not what is remote) and 2 (peak and average of
//! requested and resident memory). *Local* and *far* are ours, far memory that fits. *jemalloc, theirs* and
//! *TCMalloc, theirs* have the defaults of their versions; decays last for as many queries as came in ten seconds
//! there: runs here are shorter. Every sample is a process of its own, allocators take turns, values are medians,
//! and a ratio is the median of the rounds' own ratios. Queries check their answers. Prints a table and writes
//! `target/figures/query_alloc.csv`, row by row, `query_alloc_memory.csv`, and pictures.

#[path = "../../../benches/common/bare.rs"]
mod bare;
mod engine;
#[path = "../../../benches/common/failure.rs"]
#[expect(dead_code, reason = "this benchmark does not catch interrupts")]
mod failure;
mod operators;
mod picture;
mod place;
mod rows;
#[path = "../../../benches/common/sides.rs"]
mod sides;
#[path = "../../../benches/common/table.rs"]
mod table;

use clap::Parser;
use engine::{Load, Seen};
use failure::{Failure, Result};
use sides::{SIDES, Side};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

/// Shares of the machine's throughput at which queries arrive; those of a tenth with memory that is freed lazily.
const RATES: [(&str, Option<f64>); 5] = [
    ("all", None),
    ("half", Some(0.4)),
    ("one", Some(0.8)),
    ("two", Some(1.6)),
    (TENTH, Some(0.4)),
];
const TENTH: &str = "tenth";

/// Queries that came in the paper while a page of jemalloc's decayed: ten seconds, at 1.25 and 6 queries a second.
const DECAY_QUERIES: [f64; 2] = [12.5, 60.0];

#[derive(Debug, Parser)]
struct Options {
    /// Only allocators whose names contain one of these; ours and jemalloc always.
    words: Vec<String>,
    /// Three times the rows, four times the queries.
    #[arg(long)]
    paper: bool,
    /// A fifth of the queries.
    #[arg(long, conflicts_with = "paper")]
    quick: bool,
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
    #[arg(long, hide = true, default_value_t = 10)]
    tenths: u64,
    #[arg(long, hide = true)]
    lazy: bool,
}

/// An allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// As it comes.
    Usual(Side),
    /// With what the version in the paper did by default.
    Theirs(Side),
}

impl Program {
    pub(crate) fn name(self) -> String {
        match self {
            Program::Usual(side) => side.name().to_owned(),
            Program::Theirs(side) => format!("{}, theirs", side.name()),
        }
    }

    pub(crate) fn side(self) -> Side {
        let (Program::Usual(side) | Program::Theirs(side)) = self;
        side
    }
}

/// What one allocator's runs have shown at one rate.
pub(crate) struct Samples {
    pub(crate) program: Program,
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
    let (queries, rate) = (options.queries, options.rate);
    let load = Load { queries, rate, tenths: options.tenths, is_lazy_asked: options.lazy };
    sides::tell(place::run(side, load).map(|seen| seen.to_text()))
}

fn sample(program: Program, load: Load, options: &Options) -> Result<Seen> {
    let side = program.side();
    let mut command = side.command(options.libraries.as_deref())?;
    command.args(["--queries", &load.queries.to_string(), "--tenths", &load.tenths.to_string()]);
    if let Some(rate) = load.rate {
        command.args(["--rate", &rate.to_string()]);
    }
    if load.is_lazy_asked {
        command.arg("--lazy");
    }
    if let (Program::Theirs(_), Some(rate)) = (program, load.rate) {
        let queries = DECAY_QUERIES[usize::from(load.is_lazy_asked)];
        let ms = (1e3 * queries / rate).ceil();
        // jemalloc 5.1 frees lazily before it unmaps. A thread of its own: pages decay where nothing is allocated any
        // more, too. TCMalloc 2.5 gave back at once.
        let conf = format!(
            "cache_oblivious:true,dirty_decay_ms:{ms},muzzy_decay_ms:{ms},background_thread:true"
        );
        command.env("_RJEM_MALLOC_CONF", conf).env("TCMALLOC_AGGRESSIVE_DECOMMIT", "true");
    }
    let text = side.answer(command)?;
    Seen::from_text(&text).ok_or_else(|| Failure::Broken(format!("{}: {text}", side.name())))
}

fn run(options: &Options) -> Result<()> {
    let (queries, tenths) = match (options.test, options.paper, options.quick) {
        (true, ..) => (12, 10),
        (_, true, _) => (1_200, 320),
        (.., true) => (60, 100),
        _ => (300, 100),
    };
    let usual = Load { queries, rate: None, tenths, is_lazy_asked: false };
    let tenth = Load { queries: 20 * queries, tenths: tenths / 10, is_lazy_asked: true, ..usual };
    let jemalloc = Program::Usual(Side::Jemalloc);
    // By processor time, of which a busy machine changes little; all rates hang on it: a median of three.
    let processors = thread::available_parallelism().map_or(1.0, |count| count.get() as f64);
    let throughput = |load: Load| -> Result<f64> {
        let seconds = (0..3).map(|_| Ok(sample(jemalloc, load, options)?.processor_s));
        let seconds = table::median(seconds.collect::<Result<_>>()?).max(0.01);
        Ok(load.queries as f64 * processors / seconds)
    };
    let of_usual = throughput(usual)?;
    let of_tenth = throughput(tenth)?;
    println!(
        "{queries} queries a run; {of_usual:.1} queries/s is what the machine can do with jemalloc, {of_tenth:.1} of a tenth"
    );
    let programs = programs(Load { queries: 2, ..usual }, options)?;
    table::print_heading();
    let (mut all_rows, mut rates) = (Vec::new(), Vec::new());
    for (name, share) in RATES {
        let (load, throughput) = if name == TENTH { (tenth, of_tenth) } else { (usual, of_usual) };
        // More come than end: the longer, the longer they wait.
        let queries = load.queries * if name == "two" { 2 } else { 1 };
        let load = Load { queries, rate: share.map(|share| share * throughput), ..load };
        let mut all: Vec<Samples> = Vec::new();
        for program in &programs {
            // What decays matters where memory is looked at over time.
            if matches!(program, Program::Usual(_)) || ["one", TENTH].contains(&name) {
                all.push(Samples { program: *program, seen: Vec::new() });
            }
        }
        for _ in 0..options.rounds.max(1) {
            for samples in &mut all {
                samples.seen.push(sample(samples.program, load, options)?);
            }
        }
        let new = rows::rows_of(name, &all);
        table::print_group(name, &new);
        all_rows.extend(new);
        rates.push((name, all));
        table::write("query_alloc", &all_rows, options.test)?;
    }
    table::print_goals(&all_rows);
    let folder = table::write("query_alloc", &all_rows, options.test)?;
    picture::write(&folder, &rates)
        .map_err(|error| Failure::Broken(format!("pictures: {error}")))?;
    println!(
        "written: query_alloc.csv, query_alloc_memory.csv and pictures in {}",
        folder.display()
    );
    Ok(())
}

/// The allocators that are here, and asked for.
fn programs(load: Load, options: &Options) -> Result<Vec<Program>> {
    let mut found = Vec::new();
    let wants = |side: &Side| {
        let name = side.name();
        let always = side.is_ours() || *side == Side::Jemalloc || options.words.is_empty();
        always || options.words.iter().any(|word| name.contains(word.as_str()))
    };
    for side in SIDES.into_iter().filter(wants) {
        match sample(Program::Usual(side), load, options) {
            Ok(_) => found.push(Program::Usual(side)),
            Err(Failure::Skipped(why)) => println!("skipped: {why}"),
            Err(failure) => return Err(failure),
        }
    }
    if found.iter().any(|program| program.side().is_ours()) {
        let theirs = |program: &&Program| ["jemalloc", "TCMalloc"].contains(&program.side().name());
        let theirs: Vec<_> =
            found.iter().filter(theirs).map(|program| Program::Theirs(program.side())).collect();
        found.extend(theirs);
        return Ok(found);
    }
    Err(Failure::Skipped("there is no far memory here to compare".to_owned()))
}
