//! Small objects on four times the memory: farheap with everything far, against the kernel's swap.
//!
//! ```text
//! cargo bench -p farheap-lab --bench objects                             # 32 MiB for data, some minutes
//! cargo bench -p farheap-lab --bench objects -- --memory 256MiB --rounds 1
//! cargo bench -p farheap-lab --bench objects -- --mix objects
//! cargo bench -p farheap-lab --bench objects -- --test                   # does it work? seconds
//! ```
//! A table of objects of 16 to 512 bytes is read and updated: Zipf 0.99, a tenth of the operations are
//! updates, of which every second allocates a new object and frees the old one, and of each object read a
//! copy lives for 64 operations. Every side runs it in a process of its own, in turns, each in a memory control
//! group of the same size: with a heap of `threshold:0`, whose limit follows the group;
//! and without a heap with a swap file. The group has room for what a process without a heap has before the
//! program begins, its code included, for 2 MiB that the kernel charges besides, and for the data divided by
//! `--times`. A side has paged in what it keeps by as many operations as are measured then. Answers are compared
//! with those of a run in memory.

mod child;
mod work;

#[path = "../../../benches/common/failure.rs"]
mod failure;
#[path = "../../../benches/common/group.rs"]
mod group;
#[path = "../../../benches/common/limited.rs"]
mod limited;
#[path = "../../../benches/common/numbers.rs"]
mod numbers;
#[path = "../../../benches/common/process.rs"]
mod process;
#[path = "../../../benches/common/table.rs"]
mod table;

use child::{Outcome, Task};
use clap::Parser;
use failure::{Failure, Result};
use farheap::{ByteCount, FarHeap};
use limited::{GROUP_SLACK, LIMIT_MIN, SwapFile};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use table::Row;
use work::Mix;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// Our operations a second by swap's have to reach this.
const GOAL: f64 = 1.3;
/// Swap's bytes written by ours.
const GOAL_WRITTEN: f64 = 1.0 / 1.5;

const SWAP: &str = "swap";

const ABOUT: &str = "Small objects on more data than memory, against the kernel's swap";
const NOTES: &str = "\
All sides need root and memory control groups (version 1 or 2); where there is no swap that is said, and farheap \
runs alone. The swap file serves the whole machine as long as the benchmark runs. Columns \
of target/figures/objects.csv: work, value, unit, baseline, baseline_value, ratio (more is better), goal.";

#[derive(Clone, Debug, Parser)]
#[command(name = "objects", about = ABOUT, after_help = NOTES)]
struct Args {
    /// What is left of the group for data: 32MiB, with --test 8MiB, which is the least
    #[arg(long, value_name = "SIZE")]
    memory: Option<ByteCount>,
    /// How many times this the data is
    #[arg(long, value_name = "N", default_value_t = 4)]
    times: u64,
    /// Operations that are measured: 200,000, with --test 4,000
    #[arg(long, value_name = "N")]
    operations: Option<u64>,
    /// What the table consists of: objects, `objects and records`
    #[arg(long, value_delimiter = ',', value_name = "NAME", value_parser = mix_named)]
    mix: Vec<Mix>,
    /// More keys of farheap's configuration
    #[arg(long, value_name = "KEY:VALUE,...", default_value = "")]
    conf: String,
    /// Rounds of each side: 3, with --test 1
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Directory of the temporary file and the swap file, instead of farheap's default
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Stops after a run that takes longer
    #[arg(long, value_name = "S", default_value_t = 600)]
    deadline: u64,
    /// A smoke run of seconds
    #[arg(long)]
    test: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
    /// What a child process runs, as text
    #[arg(long, hide = true, value_name = "TASK")]
    child: Option<String>,
}

fn mix_named(name: &str) -> std::result::Result<Mix, String> {
    let found = Mix::ALL.into_iter().find(|mix| mix.name() == name);
    found.ok_or_else(|| "neither `objects` nor `objects and records`".to_owned())
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if let Some(task) = &args.child {
        return child::serve(task);
    }
    // `cargo test --benches` passes nothing and wants to be quick.
    args.test |= !args.bench && args.memory.is_none();
    process::catch_interrupts();
    failure::end("objects", run(&args))
}

fn run(args: &Args) -> Result<()> {
    let memory = args.memory.map_or(if args.test { LIMIT_MIN } else { 32 << 20 }, ByteCount::get);
    let memory = memory.max(LIMIT_MIN);
    let size = (memory * args.times.max(1)) as usize;
    let operations = args.operations.unwrap_or(if args.test { 4_000 } else { 200_000 });
    let dir = args.dir.clone().unwrap_or_else(limited::default_dir);
    // Twice: what is read back keeps its place there.
    let swap = match SwapFile::create(&dir, 2 * size + (64 << 20)) {
        Err(Failure::Skipped(why)) => {
            println!("skipped: baseline {SWAP}: {why}");
            None
        }
        made => Some(made?),
    };
    let deadline = Duration::from_secs(args.deadline);
    println!("temporary files in {}, {} MiB for data", dir.display(), memory >> 20);
    table::print_heading();
    let (mut rows, mixes) =
        (Vec::new(), if args.mix.is_empty() { &Mix::ALL[..] } else { &args.mix });
    for &mix in mixes {
        let (dir, warm) = (dir.as_path(), operations);
        let task = Task { mix, size, warm, operations, deadline, dir };
        let mut sides = vec![Side::far(args)];
        sides.extend(swap.is_some().then(|| Side {
            name: SWAP.to_owned(),
            conf: None,
            runs: vec![],
        }));
        let rounds = args.rounds.unwrap_or(if args.test { 1 } else { 3 }).max(1);
        measure(&task, memory as usize, &mut sides, rounds)?;
        let new = compare(mix.name(), operations, &sides);
        let peaks = sides.iter().filter_map(|side| {
            let peak = side.runs.iter().map(|run| run.peak).max()?;
            Some(format!("{} {:.1}", side.name, peak as f64 / 1e6))
        });
        let peaks = peaks.collect::<Vec<_>>().join(", ");
        table::print_group(&format!("{}: peak MB: {peaks}", mix.name()), &new);
        rows.extend(new);
        match table::write("objects", &rows, args.test) {
            Ok(folder) => println!("written: objects.csv, objects.svg in {}", folder.display()),
            Err(why) => println!("no figures were written: {why}"),
        }
    }
    table::print_goals(&rows);
    Ok(())
}

/// What is compared.
struct Side {
    name: String,
    /// The heap's configuration.
    conf: Option<String>,
    runs: Vec<Outcome>,
}

impl Side {
    fn far(args: &Args) -> Side {
        let conf = format!("threshold:0,{}", args.conf);
        let conf = Some(conf.trim_end_matches(',').to_owned());
        Side { name: "farheap".to_owned(), conf, runs: Vec::new() }
    }
}

/// Runs all sides in turns, with `memory` bytes for data.
fn measure(task: &Task<'_>, memory: usize, sides: &mut Vec<Side>, rounds: usize) -> Result<()> {
    let in_memory = task.run(None, None)?;
    let right = in_memory.answer;
    let group = in_memory.own + GROUP_SLACK + memory;
    for _ in 0..rounds {
        let mut refused = None;
        for side in &mut *sides {
            let run = || task.run(side.conf.as_deref(), Some(group));
            let is_swap = side.conf.is_none();
            let run = match if is_swap { limited::run_baseline(SWAP, run) } else { run() } {
                // Where nothing can be far there is nothing to compare.
                Err(Failure::Skipped(why)) if side.conf.is_none() => {
                    println!("skipped: baseline {}: {why}", side.name);
                    refused = Some(side.name.clone());
                    continue;
                }
                run => run?,
            };
            if run.answer != right {
                let (name, answer) = (&side.name, &run.answer);
                let what = format!("{name}: the answer is {answer}, in memory it is {right}");
                return Err(Failure::Broken(what));
            }
            side.runs.push(run);
        }
        sides.retain(|side| Some(&side.name) != refused.as_ref());
    }
    Ok(())
}

/// The rows of each side against swap, and against the first one.
fn compare(work: &str, operations: u64, sides: &[Side]) -> Vec<Row> {
    let mut rows = Vec::new();
    let far = || sides.iter().filter(|side| side.conf.is_some());
    for base in sides {
        let is_swap = base.conf.is_none();
        let others = far().filter(|side| {
            is_swap
                || far()
                    .next()
                    .is_some_and(|first| first.name == base.name && side.name != base.name)
        });
        for side in others {
            let goal = is_swap.then_some(GOAL);
            let row = |what: &str, unit, figure: &dyn Fn(&Outcome) -> f64, more: bool, goal| {
                let values = |side: &Side| side.runs.iter().map(figure).collect();
                let name = (format!("{work}, {}: {what}", side.name), unit);
                let base = (base.name.clone(), values(base));
                let ratio = |value: f64, base: f64| match more {
                    _ if value == base => 1.0,
                    true => value / base,
                    false => base / value,
                };
                Row::of_rounds(name, values(side), base, ratio, goal)
            };
            let operations = operations as f64;
            rows.push(row("faults", "/op", &|run| run.run.faults / operations, false, None));
            let page = 4096.0 * operations;
            rows.push(row("pages in", "/op", &|run| run.run.read / page, false, None));
            rows.push(row("throughput", "op/s", &|run| operations / run.run.secs, true, goal));
            let goal = is_swap.then_some(GOAL_WRITTEN);
            rows.push(row("written", "MB", &|run| run.run.written / 1e6, false, goal));
            rows.push(row("processor time", "s CPU", &|run| run.run.cpu_secs, false, None));
            rows.push(row("load", "s", &|run| run.load.secs, false, None));
        }
    }
    rows
}
