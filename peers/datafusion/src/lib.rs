//! The two sides of the comparison, and what compares them; `main.rs` says how to run it.

#[path = "../../../benches/common/failure.rs"]
mod failure;
#[path = "../../../benches/common/group.rs"]
mod group;
#[expect(dead_code, reason = "benchmarks of the library use the rest")]
#[path = "../../../benches/common/limited.rs"]
mod limited;
#[path = "../../../benches/common/process.rs"]
mod process;
#[path = "../../../benches/common/table.rs"]
mod table;

mod child;
mod engine;

use child::{Outcome, Phase, Task};
use clap::Parser;
use failure::{Failure, Result};
use farheap::ByteCount;
use group::MemoryGroup;
use limited::{GROUP_SLACK, SwapFile};
use std::process::ExitCode;
use std::time::Duration;
use table::Row;

/// What each phase has to reach of swap's speed, and the load of its speed in memory.
const GOAL: f64 = 1.0;
const GOAL_LOAD: f64 = 0.5;
/// The text pool from which the generator cuts comments has this size at every scale.
const TEXT_POOL: u64 = 300 << 20;

/// DataFusion on farheap, against the same engine on the system's allocator in a memory control group with swap.
///
/// Swap needs root and memory control groups; a run without says so. The swap file serves the whole machine as
/// long as this runs.
#[derive(Debug, Parser)]
struct Args {
    /// TPC-H scale factor: 0.5, with --test 0.02
    #[arg(long, value_name = "FACTOR")]
    scale: Option<f64>,
    /// Resident sizes: 650MiB,500MiB,370MiB, with --test 330MiB
    #[arg(long, value_delimiter = ',', value_name = "SIZE")]
    resident: Vec<ByteCount>,
    /// Rounds of each side: 3, with --test 1
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Size from which blocks are far
    #[arg(long, default_value = "16KiB", value_name = "SIZE")]
    threshold: ByteCount,
    /// Further keys of farheap's configuration
    #[arg(long, value_name = "KEY:VALUE,...", default_value = "")]
    conf: String,
    /// Runs farheap only
    #[arg(long)]
    alone: bool,
    /// Stops a run after this time, in seconds
    #[arg(long, value_name = "S", default_value_t = 600)]
    deadline: u64,
    /// A short run
    #[arg(long)]
    test: bool,
    /// What a child process runs, as text
    #[arg(long, hide = true, value_name = "TASK")]
    child: Option<String>,
}

/// Runs the comparison, or one side of it as its child.
pub fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(task) = &args.child {
        return child::serve(task);
    }
    process::catch_interrupts();
    failure::end("farheap-peer-datafusion", run(&args))
}

fn run(args: &Args) -> Result<()> {
    let scale = args.scale.unwrap_or(if args.test { 0.02 } else { 0.5 });
    let rounds = args.rounds.unwrap_or(if args.test { 1 } else { 3 }).max(1);
    let deadline = Duration::from_secs(args.deadline);
    let mut sizes = args.resident.clone();
    if sizes.is_empty() {
        let mib: &[u64] = if args.test { &[330] } else { &[650, 500, 370] };
        sizes.extend(mib.iter().map(|mib| ByteCount::mib(*mib)));
    }
    let in_memory = Task::on_system(scale).run(None, deadline)?;
    println!(
        "scale factor {scale}: {} MiB of record batches, a text pool of {} MiB; in memory: {in_memory}",
        in_memory.data >> 20,
        TEXT_POOL >> 20,
    );
    let swap = if args.alone { None } else { swap_file(in_memory.data + 2 * TEXT_POOL)? };
    table::print_heading();
    let mut rows = Vec::new();
    for resident in sizes {
        let more = if args.conf.is_empty() { "" } else { "," };
        let (threshold, conf) = (args.threshold.0, &args.conf);
        let conf = format!("limit:{},threshold:{threshold}{more}{conf}", resident.0);
        let (mut far, mut base) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let outcome = Task::on_far(scale, &conf).run(None, deadline)?;
            outcome.check(&in_memory)?;
            // Swap gets what farheap really had.
            let memory = outcome.peak as usize + GROUP_SLACK;
            far.push(outcome);
            if swap.is_some() {
                let outcome = limited::run_baseline("swap", || {
                    let group = MemoryGroup::create(memory, true)?;
                    Task::on_system(scale).run(Some(group), deadline)
                })?;
                outcome.check(&in_memory)?;
                base.push(outcome);
            }
        }
        let size = format!("{} MiB", resident.0 >> 20);
        let peak = far.iter().map(|run| run.peak).max().unwrap_or(0) >> 20;
        let text = far.iter().map(Outcome::to_string).collect::<Vec<_>>().join(" | ");
        let new = compare(&size, &far, &base, &in_memory);
        table::print_group(&format!("{size} resident, peak {peak} MiB: {text}"), &new);
        rows.extend(new);
        let folder = table::write("datafusion", &rows, args.test)?;
        println!("written: datafusion.csv, datafusion.svg in {}", folder.display());
    }
    table::print_goals(&rows);
    Ok(())
}

/// Swap of this number of bytes; where it is not permitted, says so.
fn swap_file(bytes: u64) -> Result<Option<SwapFile>> {
    match SwapFile::create(&limited::default_dir(), bytes as usize) {
        Err(Failure::Skipped(why)) => {
            println!("skipped: baseline swap: {why}");
            Ok(None)
        }
        made => made.map(Some),
    }
}

/// The rows of one resident size.
fn compare(size: &str, far: &[Outcome], base: &[Outcome], in_memory: &Outcome) -> Vec<Row> {
    let row = |work: &str,
               unit,
               figure: &dyn Fn(&Outcome) -> f64,
               (name, base): (&str, &[Outcome]),
               goal| {
        let less = |value: f64, base: f64| if value == base { 1.0 } else { base / value };
        let values = |outcomes: &[Outcome]| outcomes.iter().map(figure).collect();
        let base = (name.to_owned(), values(base));
        Row::of_rounds((format!("{size} {work}"), unit), values(far), base, less, goal)
    };
    let memory = vec![in_memory.clone(); far.len()];
    let of_load = |run: &Outcome| run.phases[0].secs;
    let mut rows = vec![row("load", "s", &of_load, ("in memory", &memory[..]), Some(GOAL_LOAD))];
    if base.is_empty() {
        return rows;
    }
    let swap = ("swap", base);
    for (at, Phase { name, .. }) in in_memory.phases.iter().enumerate() {
        rows.push(row(name, "s", &|run| run.phases[at].secs, swap, Some(GOAL)));
    }
    rows.push(row("all", "s", &|run| run.sum(|phase| phase.secs), swap, Some(GOAL)));
    rows.push(row("processor time", "s CPU", &|run| run.sum(|phase| phase.cpu_secs), swap, None));
    rows.push(row("read", "MB", &|run| run.sum(|phase| phase.read) / 1e6, swap, None));
    rows.push(row("written", "MB", &|run| run.sum(|phase| phase.written) / 1e6, swap, None));
    rows
}
