//! Whole programs on more data than memory: farheap as it comes, against the kernel's own paging.
//!
//! ```text
//! cargo bench --bench programs                          # 32 MiB of data each, some minutes
//! cargo bench --bench programs -- --program hash_map --paper     # 1 Mi values of 100 bytes
//! cargo bench --bench programs -- --size 1GiB --times 4 --rounds 1
//! cargo bench --bench programs -- --conf readahead:off  # with a configuration of one's own
//! cargo bench --bench programs -- --servers one,copies,parity,dying --times 2     # beside the file
//! cargo bench --bench programs -- --test                # does it work? seconds
//! ```
//! Every side runs the same program in a process of its own, in turns, each in a memory control group of the
//! same size: with a heap in farheap's default configuration, whose limit follows the group, on the default
//! temporary file; without a heap (then `FarHeap` is jemalloc) with a swap file; and, where all data is in
//! arrays, with the arrays in a mapped file. Only the second may swap. The group has room for what a process
//! without a heap has before the program begins, its code included, for 2 MiB that the kernel charges besides,
//! and for the data divided by `--times`: a heap's threads and tables are at its own expense. Every answer is
//! compared with that of a run in memory.

mod child;
mod network;
mod os;
mod work;

#[path = "../common/failure.rs"]
mod failure;
#[path = "../common/group.rs"]
mod group;
#[path = "../common/limited.rs"]
mod limited;
#[path = "../common/neighbours.rs"]
mod neighbours;
#[path = "../common/numbers.rs"]
mod numbers;
#[path = "../common/process.rs"]
mod process;
#[path = "../common/servers.rs"]
mod servers;
#[path = "../common/table.rs"]
mod table;
#[path = "../common/texts.rs"]
mod texts;

// The queries, the columns and the right answers; the example has more in these files.
#[expect(dead_code, unused_imports, reason = "the example uses the rest, and its tests do")]
#[path = "../../examples/tpch/answers.rs"]
mod answers;
#[expect(dead_code, unused_imports, reason = "the example uses the rest, and its tests do")]
#[path = "../../examples/tpch/lineitem.rs"]
mod lineitem;
#[expect(dead_code, unused_imports, reason = "the example uses the rest, and its tests do")]
#[path = "../../examples/tpch/progress.rs"]
mod progress;
#[expect(dead_code, unused_imports, reason = "the example uses the rest, and its tests do")]
#[path = "../../examples/tpch/queries.rs"]
mod queries;

use child::{Outcome, Phase, Side, Task};
use clap::Parser;
use failure::{Failure, Result};
use farheap::{ByteCount, FarHeap};
use limited::{GROUP_SLACK, LIMIT_MIN, SwapFile};
use neighbours::Neighbours;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use table::Row;
use work::Program;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// The least that any phase of a program may reach of its baseline's speed, and a program of a mapped file's.
const GOAL: f64 = 0.8;
/// The least that a program may reach of swap's speed, and its processor time on average.
const GOAL_LEVEL: f64 = 1.0;
/// The same of the B-tree map at twice its limit: more of it than swap's order of use keeps is not to be known.
const GOAL_BTREE: f64 = 0.9;
/// What the geometric means of whole programs have to reach.
const GOAL_MEAN_SWAP: f64 = 1.6;
const GOAL_MEAN_MMAP: f64 = 2.0;
/// Swap's bytes written by ours.
const GOAL_WRITTEN: f64 = 1.0 / 1.5;

const ABOUT: &str = "Whole programs on more data than memory, against the kernel's own paging";
const NOTES: &str = "\
All sides need root and memory control groups (version 1 or 2); what cannot run says why. The swap \
file serves the whole machine as long as the benchmark runs. Columns of target/figures/programs.csv: \
work, value, unit, baseline, baseline_value, ratio (more is better), goal.

UMap is not run: its programs are C++ and built apart; `fault` names its published figures.";

#[derive(Clone, Debug, Parser)]
#[command(name = "programs", about = ABOUT, after_help = NOTES)]
struct Args {
    /// Programs to run, by name: all that --list shows
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    program: Vec<String>,
    /// Lists the programs
    #[arg(long)]
    list: bool,
    /// How many times the memory that is left for it the data is: 2,4, with --test 2; that is at least 8 MiB
    #[arg(long, value_delimiter = ',', value_name = "N")]
    times: Vec<u64>,
    /// Data of each program: 64MiB, with --test 8.5MiB
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteCount>,
    /// As --size 228MiB: a hash map of 1 Mi values of 100 bytes
    #[arg(long, conflicts_with_all = ["size", "test"])]
    paper: bool,
    /// Rounds of each side: 3, with --test 1
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// What to compare with
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Side::Swap, Side::Mmap])]
    baseline: Vec<Side>,
    /// Compares far memory on servers, which it starts on this machine, with the file, and nothing else
    #[arg(long, value_delimiter = ',', value_enum, conflicts_with_all = ["baseline", "conf"])]
    servers: Vec<network::Servers>,
    /// Keys of farheap's configuration, instead of the defaults
    #[arg(long, value_name = "KEY:VALUE,...", default_value = "")]
    conf: String,
    /// Busy threads of the idle scheduling class beside every run
    #[arg(long, value_name = "N", default_value_t = 0)]
    neighbours: usize,
    /// Directory of all temporary files, instead of farheap's default
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Stops a run after this time; it counts as having taken that long
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
    #[arg(long, hide = true, value_name = "N")]
    busy: Option<usize>,
}

impl Args {
    fn size(&self) -> usize {
        let size = match self.size {
            Some(size) => size,
            None if self.paper => ByteCount::mib(228),
            // Hardly more than the least limit.
            None if self.test => ByteCount(17 << 19),
            None => ByteCount::mib(64),
        };
        size.as_usize()
    }

    /// Of each side.
    fn rounds(&self) -> usize {
        self.rounds.unwrap_or(if self.test { 1 } else { 3 }).max(1)
    }

    /// Where files of the baselines go: where farheap's own does.
    fn dir(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(limited::default_dir)
    }
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if let Some(task) = &args.child {
        return child::serve(task);
    }
    if let Some(count) = args.busy {
        return failure::end("programs", neighbours::serve(count));
    }
    // `cargo test --benches` passes nothing and wants to be quick.
    args.test |= !args.bench && !args.paper && args.size.is_none();
    if args.times.is_empty() {
        args.times.extend([2].into_iter().chain((!args.test).then_some(4)));
    }
    args.times.retain(|times| *times > 0);
    if args.list {
        work::ALL.iter().for_each(|program| println!("{:10} {}", program.name, program.about));
        return ExitCode::SUCCESS;
    }
    process::catch_interrupts();
    failure::end("programs", run(&args))
}

fn run(args: &Args) -> Result<()> {
    let known = |name: &String| work::ALL.iter().any(|program| program.name == name);
    if let Some(name) = args.program.iter().find(|name| !known(name)) {
        return Err(Failure::Broken(format!("there is no program `{name}`; --list shows all")));
    }
    let wanted = |program: &&Program| {
        args.program.is_empty() || args.program.iter().any(|name| name == program.name)
    };
    let programs: Vec<&Program> = work::ALL.iter().filter(wanted).collect();
    let largest = programs.iter().map(|program| (program.data)(args.size())).max().unwrap_or(0);
    let mut sides = if args.servers.is_empty() { args.baseline.clone() } else { Vec::new() };
    sides.retain(|side| matches!(side, Side::Swap | Side::Mmap));
    // A hash map that grows is there twice for a moment, the smaller half the size.
    let _swap = if sides.contains(&Side::Swap) {
        keep_or_say(
            SwapFile::create(&args.dir(), 2 * largest + (64 << 20)),
            Side::Swap,
            &mut sides,
        )?
    } else {
        None
    };
    let _neighbours = Neighbours::start(args.neighbours)?;
    println!("temporary files in {}, {} idle neighbours", args.dir().display(), args.neighbours);
    table::print_heading();
    let (mut rows, mut broken) = (Vec::new(), None);
    for program in programs {
        match run_program(args, program, &mut sides, &mut rows) {
            Ok(()) => {}
            Err(Failure::Broken(why)) => {
                println!("  failed: {why}");
                broken = Some(Failure::Broken(format!("{}: {why}", program.name)));
            }
            Err(failure) => return Err(failure),
        }
    }
    let means: Vec<Row> = sides.iter().flat_map(|side| means(&rows, *side)).collect();
    table::print_group("all programs", &means);
    rows.extend(means);
    if let Some(folder) = write(&rows, args) {
        println!("\nwritten: tables and pictures in {}", folder.display());
    }
    table::print_goals(&rows);
    broken.map_or(Ok(()), Err)
}

/// Writes all rows so far; where it may not, says so and goes on.
fn write(rows: &[Row], args: &Args) -> Option<PathBuf> {
    let name = if args.servers.is_empty() { "programs" } else { "programs_network" };
    let folder = table::write(name, rows, args.test);
    folder.inspect_err(|why| println!("no figures were written: {why}")).ok()
}

/// What a baseline needs; when it is not permitted, says so and leaves the baseline out.
fn keep_or_say<T>(made: Result<T>, side: Side, sides: &mut Vec<Side>) -> Result<Option<T>> {
    match made {
        Ok(made) => Ok(Some(made)),
        Err(Failure::Skipped(why)) => {
            println!("skipped: baseline {}: {why}", side.name());
            sides.retain(|other| *other != side);
            Ok(None)
        }
        Err(failure) => Err(failure),
    }
}

fn run_program(
    args: &Args,
    program: &Program,
    sides: &mut Vec<Side>,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let data = (program.data)(args.size());
    let deadline = Duration::from_secs(args.deadline);
    let mut task = Task::new(program.name, args.size(), args.dir(), args.dir.is_some());
    task.conf.clone_from(&args.conf);
    let in_memory = task.run(Side::Memory, None, deadline)?;
    println!("{}: {} MiB of data; in memory {in_memory}", program.name, data >> 20);
    if in_memory.stopped {
        return Err(Failure::Broken("it takes longer than the deadline in memory".to_owned()));
    }
    for times in &args.times {
        let memory = in_memory.own + GROUP_SLACK + (data as u64 / times).max(LIMIT_MIN) as usize;
        if !args.servers.is_empty() {
            let name = format!("{} {times}x", program.name);
            let new = network::run(args, &name, &task, memory, &in_memory)?;
            table::print_group(&format!("{name}: group {} MiB", memory >> 20), &new);
            rows.extend(new);
            write(rows, args);
            continue;
        }
        let mut far: Vec<Outcome> = Vec::new();
        let mut bases: Vec<(Side, Vec<Outcome>)> =
            sides.iter().map(|side| (*side, Vec::new())).collect();
        bases.retain(|(side, _)| *side != Side::Mmap || program.maps);
        for _ in 0..args.rounds() {
            let outcome = task.run(Side::Far, Some(memory), deadline)?;
            outcome.check(&in_memory)?;
            far.push(outcome);
            let mut dropped = Vec::new();
            for (side, outcomes) in &mut bases {
                let run = || task.run(*side, Some(memory), deadline);
                match limited::run_baseline(side.name(), run) {
                    Ok(outcome) => {
                        outcome.check(&in_memory)?;
                        outcomes.push(outcome);
                    }
                    Err(Failure::Interrupted) => return Err(Failure::Interrupted),
                    Err(failure) => {
                        println!("skipped: baseline {}: {failure}", side.name());
                        // What is not permitted once is not tried again.
                        if matches!(failure, Failure::Skipped(_)) {
                            sides.retain(|other| other != side);
                        }
                        dropped.push(*side);
                    }
                }
            }
            bases.retain(|(side, _)| !dropped.contains(side));
            if far.iter().any(|outcome| outcome.stopped) {
                break;
            }
        }
        let peak = far.iter().map(|outcome| outcome.peak).max().unwrap_or(0);
        let name = format!("{} {times}x", program.name);
        let new: Vec<Row> =
            bases.iter().flat_map(|(side, base)| compare(&name, &far, *side, base)).collect();
        let text = far.iter().map(Outcome::to_string).collect::<Vec<_>>().join(" | ");
        let title = format!("{name}: group {} MiB, peak {} MiB: {text}", memory >> 20, peak >> 20);
        table::print_group(&title, &new);
        rows.extend(new);
        write(rows, args);
        if far.iter().any(|outcome| outcome.stopped) {
            return Err(Failure::Broken(format!("{name} was stopped after {} s", args.deadline)));
        }
    }
    Ok(())
}

/// The rows of a program in one group against one baseline.
fn compare(name: &str, far: &[Outcome], side: Side, base: &[Outcome]) -> Vec<Row> {
    let (base_name, goal) = match side {
        Side::Swap if name == "btree_map 2x" => (side.name(), Some(GOAL_BTREE)),
        Side::Swap => (side.name(), Some(GOAL_LEVEL)),
        // What servers are compared with.
        Side::Far => ("file", None),
        _ => (side.name(), Some(GOAL)),
    };
    let whole = |outcomes: &[Outcome]| outcomes.iter().all(|outcome| !outcome.stopped);
    if !whole(far) && !whole(base) {
        println!("  {name}: stopped on both sides, there is no ratio to {base_name}");
        return Vec::new();
    }
    if !(whole(far) && whole(base)) {
        // At least as long as this.
        let secs = |outcomes: &[Outcome]| outcomes.iter().map(|run| run.sum(|p| p.secs)).collect();
        let work = (format!("{name} stopped at the deadline, {WHOLE}"), "s");
        let base = (base_name.to_owned(), secs(base));
        return vec![Row::of_rounds(work, secs(far), base, |value, base| base / value, goal)];
    }
    let row = |work: &str, unit, figure: &dyn Fn(&Outcome) -> f64, goal| {
        let values = |outcomes: &[Outcome]| outcomes.iter().map(figure).collect();
        let less = |value: f64, base: f64| if value == base { 1.0 } else { base / value };
        let base = (base_name.to_owned(), values(base));
        Row::of_rounds((format!("{name} {work}"), unit), values(far), base, less, goal)
    };
    let phases = far[0].phases.iter().enumerate().filter(|(_, phase)| phase.name != work::FREE);
    let mut rows: Vec<Row> = phases
        .map(|(at, phase)| {
            row(&phase.name, "s", &move |outcome| outcome.phases[at].secs, goal.map(|_| GOAL))
        })
        .collect();
    let sum = |figure: fn(&Phase) -> f64| move |outcome: &Outcome| outcome.sum(figure);
    rows.push(row(WHOLE, "s", &sum(|phase| phase.secs), goal));
    rows.push(row(PROCESSOR, "s CPU", &sum(|phase| phase.cpu_secs), None));
    rows.push(row("faults", "k", &sum(|phase| phase.faults / 1e3), None));
    rows.push(row("pages in", "k", &sum(|phase| phase.read / 4096e3), None));
    let goal = (side == Side::Swap).then_some(GOAL_WRITTEN);
    rows.push(row("written", "MB", &sum(|phase| phase.written / 1e6), goal));
    rows
}

/// The rows of a program from its start to its end.
const WHOLE: &str = "whole";
const PROCESSOR: &str = "processor time";

/// The geometric means over whole programs.
fn means(rows: &[Row], side: Side) -> Vec<Row> {
    let level = (side == Side::Swap).then_some(GOAL_LEVEL);
    let speed = if side == Side::Swap { GOAL_MEAN_SWAP } else { GOAL_MEAN_MMAP };
    let mean = |what: &str, goal| {
        let of_side = rows.iter().filter(|row| row.baseline == side.name());
        let logs: Vec<f64> =
            of_side.filter(|row| row.work.ends_with(what)).map(|row| row.ratio.ln()).collect();
        let mean = (logs.iter().sum::<f64>() / logs.len() as f64).exp();
        let work = (format!("geometric mean of {} programs, {what}", logs.len()), "times");
        let base = (side.name().to_owned(), vec![1.0]);
        let row = Row::of_rounds(work, vec![mean], base, |value, base| value / base, goal);
        (!logs.is_empty()).then_some(row)
    };
    [mean(WHOLE, Some(speed)), mean(PROCESSOR, level)].into_iter().flatten().collect()
}
