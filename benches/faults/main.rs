//! What faults cost: every figure next to a baseline measured in the same run.
//!
//! ```text
//! cargo bench --bench faults                        # all rows, a few minutes
//! cargo bench --bench faults -- --list              # the rows
//! cargo bench --bench faults -- faults-loop memory  # rows whose names contain one of the words
//! cargo bench --bench faults -- --swap              # with swap among the baselines, as root
//! cargo bench --bench faults -- --neighbours 2      # beside two busy threads of the idle class
//! cargo bench --bench faults -- --full              # 4 GiB of data, as in UMap's figures
//! cargo bench --bench faults -- tune                # which settings suit the machine
//! cargo bench --bench faults -- profile --threads 1 # who does what in a fault; `loop`, `file`
//! cargo bench --bench faults -- --test              # does it work? seconds
//! ```
//! Work and baselines take turns in short rounds; values are medians, and a ratio is the median
//! of the rounds' own ratios, so that a slow moment of the machine hits both. Every access checks
//! what it reads. Prints a table and writes `target/figures/faults.csv` and `faults.svg`. What the
//! machine does not permit is skipped with a line that says why.

mod bare;
mod child;
mod device;
#[path = "../common/failure.rs"]
mod failure;
mod far;
#[path = "../common/group.rs"]
#[expect(dead_code, reason = "other benchmarks use the rest")]
mod group;
#[path = "../common/neighbours.rs"]
mod neighbours;
mod os;
#[path = "../common/process.rs"]
mod process;
mod profile;
mod raw;
mod report;
mod rows;
mod sample;
#[path = "../common/table.rs"]
mod table;
mod tune;
mod work;

use clap::Parser;
use failure::{Failure, Result};
use neighbours::Neighbours;
pub(crate) use sample::Sample;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use table::Row;

#[derive(Debug, Parser)]
#[command(name = "faults", about = "What faults cost, next to baselines of the same run")]
struct Args {
    /// Rows whose names contain one of these words; `tune` compares settings instead
    filters: Vec<String>,
    /// A smoke run of seconds
    #[arg(long)]
    test: bool,
    /// As much data as UMap was measured with: 4 GiB, cache 512 MiB
    #[arg(long, conflicts_with = "test")]
    full: bool,
    /// Lists the rows
    #[arg(long)]
    list: bool,
    /// Faulting threads, instead of 1, 2 and 8
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Measured time of each side of a comparison
    #[arg(long, value_name = "S")]
    seconds: Option<f64>,
    /// Compares with swap, too, as root: the whole machine may swap to it meanwhile
    #[arg(long)]
    swap: bool,
    /// Busy threads of the idle scheduling class beside all rows
    #[arg(long, value_name = "N", default_value_t = 0)]
    neighbours: usize,
    /// Handlers of `profile`
    #[arg(long, value_name = "N")]
    handlers: Option<usize>,
    /// `profile` of pages that are asked for in batches of this size
    #[arg(long, value_name = "N")]
    batch: Option<usize>,
    /// For how long handlers of `profile` look for the device's answers
    #[arg(long, value_name = "US")]
    poll: Option<u64>,
    /// Accesses of `profile` that are writes
    #[arg(long, value_name = "PERCENT", default_value_t = 0)]
    writes: u64,
    /// `profile` of threads that serve their own faults
    #[arg(long)]
    in_thread: bool,
    /// Directory of temporary files
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
    #[arg(long, hide = true, requires_all = ["data", "target"])]
    child: Option<child::Kind>,
    #[arg(long, hide = true)]
    data: Option<usize>,
    #[arg(long, hide = true)]
    target: Option<PathBuf>,
    #[arg(long, hide = true)]
    busy: Option<usize>,
}

/// Sizes and times of a run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Bytes of data, and of the cache in front of it.
    pub(crate) data: usize,
    pub(crate) cache: usize,
    /// Rounds of each side, after one to warm up.
    pub(crate) rounds: usize,
    pub(crate) round: Duration,
    pub(crate) threads: Vec<usize>,
    pub(crate) swap: bool,
    pub(crate) dir: PathBuf,
    /// A smoke run.
    pub(crate) test: bool,
}

impl Plan {
    fn of(args: &Args) -> Plan {
        // `cargo test --benches` does not pass `--bench` and wants to be quick.
        let test = args.test || !args.bench && !args.full && args.seconds.is_none();
        let (data, cache) = match (test, args.full) {
            (true, _) => (64 << 20, 8 << 20),
            (_, true) => (4 << 30, 512 << 20),
            _ => (1 << 30, 128 << 20),
        };
        let rounds = if test { 1 } else { 7 };
        let seconds = args.seconds.unwrap_or(if test { 0.02 } else { 2.1 });
        Plan {
            data,
            cache,
            rounds,
            round: Duration::from_secs_f64(seconds.max(0.001) / rounds as f64),
            threads: args.threads.map_or(vec![1, 2, 8], |threads| vec![threads.clamp(1, 64)]),
            swap: args.swap,
            dir: args.dir.clone().unwrap_or_else(std::env::temp_dir),
            test,
        }
    }
}

impl Plan {
    /// The same time in more rounds: for work that only needs a processor, of which others take
    /// their share at any moment.
    fn with_short_rounds(&self) -> Plan {
        const PARTS: usize = 10;
        if self.test {
            return self.clone();
        }
        let (rounds, round) = (self.rounds * PARTS, self.round / PARTS as u32);
        Plan { rounds, round, ..self.clone() }
    }
}

/// One side of a comparison: runs for about the time it is given.
pub(crate) type Side<'a> = Box<dyn FnMut(Duration) -> Result<Sample> + 'a>;

/// Lets the sides take turns; returns the samples of each, the first round left out.
pub(crate) fn take_turns(plan: &Plan, sides: &mut [Side<'_>]) -> Result<Vec<Vec<Sample>>> {
    let mut samples = vec![Vec::with_capacity(plan.rounds); sides.len()];
    for round in 0..=plan.rounds {
        for (side, samples) in sides.iter_mut().zip(&mut samples) {
            let sample = side(plan.round)?;
            process::check_interrupt()?;
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    Ok(samples)
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let (Some(kind), Some(target), Some(data)) = (args.child, &args.target, args.data) {
        return failure::end("faults", child::serve(kind, target, data));
    }
    if let Some(count) = args.busy {
        return failure::end("faults", neighbours::serve(count));
    }
    if args.list {
        rows::ALL.iter().for_each(|group| println!("{:14} {}", group.name, group.about));
        println!("{:14} compares install paths, handlers, ways to wait", "tune");
        println!("{:14} what each thread does in a fault", "profile");
        return ExitCode::SUCCESS;
    }
    process::catch_interrupts();
    let plan = Plan::of(&args);
    if args.filters.iter().any(|word| word == "tune") {
        return failure::end("faults", tune::run(&plan));
    }
    if args.filters.iter().any(|word| word == "profile") {
        return failure::end("faults", profile::run(&plan, &args));
    }
    failure::end("faults", run_rows(&args, &plan))
}

fn run_rows(args: &Args, plan: &Plan) -> Result<()> {
    let wanted = |name: &str| {
        args.filters.is_empty() || args.filters.iter().any(|word| name.contains(word.as_str()))
    };
    report::heading(plan);
    let _neighbours = Neighbours::start(args.neighbours)?;
    if args.neighbours > 0 {
        println!("{} idle neighbours", args.neighbours);
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut broken = None;
    for group in rows::ALL.iter().filter(|group| wanted(group.name)) {
        let before = rows.len();
        let outcome = (group.run)(plan, &mut rows);
        table::print_group(group.name, &rows[before..]);
        match outcome {
            Ok(()) => {}
            Err(Failure::Skipped(why)) => println!("  skipped: {why}"),
            Err(Failure::Interrupted) => return Err(Failure::Interrupted),
            Err(failure) => {
                println!("  failed: {failure}");
                broken = Some(failure);
            }
        }
    }
    match table::write("faults", &rows, plan.test) {
        Ok(folder) => println!("\nwritten: faults.csv, faults.svg in {}", folder.display()),
        Err(why) => println!("\nno figures were written: {why}"),
    }
    table::print_goals(&rows);
    broken.map_or(Ok(()), Err)
}
