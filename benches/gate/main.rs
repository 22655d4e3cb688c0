//! Does a change make anything slower? Two revisions in turns, on one row for each way through the library.
//!
//! ```text
//! cargo bench --bench gate -- --against HEAD~3      # the tree as it is, against a revision: eight minutes
//! cargo bench --bench gate -- --against v0.1 miss   # rows whose names contain one of the words
//! cargo bench --bench gate -- --list                # the rows
//! cargo bench --bench gate -- --test                # does it work? seconds, against itself
//! ```
//! The revision is unpacked and built under `target/gate`; its own `gate` runs its rows, so it must have one.
//! Every sample is a process of its own, and both sides take turns. A ratio is the median of the rounds'
//! own ratios (more is better). The goal of a row is what the old revision reaches against itself: the lower
//! quartile of the ratios of neighbouring rounds. Below that the new one is slower, and the exit status
//! tells it. Prints a table and writes `target/figures/gate.csv` and `gate.svg`.

#[path = "../faults/work.rs"]
#[expect(dead_code, reason = "the benchmark of faults uses the rest")]
mod accesses;
#[path = "../alloc/sample.rs"]
#[expect(dead_code, reason = "the benchmark of allocators uses the rest")]
mod allocations;
#[path = "../common/bare.rs"]
mod bare;
#[path = "../faults/device.rs"]
#[expect(dead_code, reason = "the benchmark of faults uses the rest")]
mod device;
#[path = "../common/failure.rs"]
mod failure;
#[path = "../faults/far.rs"]
#[expect(dead_code, reason = "the benchmark of faults uses the rest")]
mod far;
#[path = "../common/group.rs"]
#[expect(dead_code, reason = "other benchmarks use the rest")]
mod group;
#[path = "../common/numbers.rs"]
mod numbers;
#[path = "../faults/os.rs"]
#[expect(dead_code, reason = "the benchmark of faults uses the rest")]
mod os;
#[path = "../common/process.rs"]
mod process;
mod revision;
mod rows;
#[path = "../faults/sample.rs"]
mod sample;
#[path = "../common/sides.rs"]
#[expect(dead_code, reason = "the benchmark of allocators uses the rest")]
mod sides;
#[path = "../common/table.rs"]
mod table;
#[path = "../common/texts.rs"]
mod texts;
#[path = "../alloc/work.rs"]
#[expect(dead_code, reason = "the benchmark of allocators uses the rest")]
mod work;

use clap::Parser;
use device::LoopDevice;
use failure::{Failure, Result};
use farheap::FarHeap;
use revision::Revision;
use rows::{ROWS, Where};
pub(crate) use sample::Sample;
use std::path::PathBuf;
use std::process::ExitCode;
use table::Row;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

#[derive(Debug, Parser)]
#[command(name = "gate", about = "Two revisions in turns: is anything slower?")]
struct Args {
    /// Rows whose names contain one of these words
    words: Vec<String>,
    /// The revision to compare with, as git names it; without it this build runs against itself
    #[arg(long, value_name = "REV")]
    against: Option<String>,
    /// Rounds of both sides: 9, with --test 2
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Lists the rows
    #[arg(long)]
    list: bool,
    /// Directory of temporary files, on a disk
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    dir: PathBuf,
    /// A smoke run of seconds
    #[arg(long)]
    test: bool,
    /// Passed by cargo
    #[arg(long, hide = true)]
    bench: bool,
    /// The row of a child
    #[arg(long, hide = true, requires = "place")]
    child: Option<String>,
    /// Where the child's row has its data
    #[arg(long, hide = true)]
    place: Option<PathBuf>,
}

fn main() -> ExitCode {
    let mut args = Args::parse();
    if let (Some(name), Some(place)) = (&args.child, &args.place) {
        return sides::tell(rows::serve(name, place, args.test));
    }
    // `cargo test --benches` passes nothing and wants to be quick.
    args.test |= !args.bench && args.against.is_none();
    if args.list {
        ROWS.iter().for_each(|row| println!("{:12} {}", row.name, row.about));
        return ExitCode::SUCCESS;
    }
    process::catch_interrupts();
    match run(&args) {
        Ok(slower) if slower.is_empty() || args.test => ExitCode::SUCCESS,
        Ok(slower) => {
            eprintln!("gate: slower: {}", slower.join(", "));
            ExitCode::FAILURE
        }
        Err(failure) => failure::end("gate", Err(failure)),
    }
}

/// Runs all rows; returns the names of those that got slower.
fn run(args: &Args) -> Result<Vec<String>> {
    let rounds = args.rounds.unwrap_or(if args.test { 2 } else { 9 }).max(2);
    let new = Revision::of_this_build()?;
    let old = match &args.against {
        Some(name) => Revision::build(name)?,
        None => Revision::of_this_build()?,
    };
    let wanted = |name: &str| {
        args.words.is_empty() || args.words.iter().any(|word| name.contains(word.as_str()))
    };
    let device = LoopDevice::create(rows::device_bytes(args.test));
    println!("this build against {}, {rounds} rounds, files in {}", old.name, args.dir.display());
    table::print_heading();
    let mut all = Vec::new();
    for row in ROWS.iter().filter(|row| wanted(row.name)) {
        let place = match (row.place, &device) {
            (Where::Directory, _) => args.dir.as_path(),
            (Where::Device, Ok(device)) => device.path(),
            (Where::Device, Err(why)) => {
                println!("skipped: {}: {why}", row.name);
                continue;
            }
        };
        let (mut olds, mut news) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            olds.push(old.sample(row, place, args.test)?);
            news.push(new.sample(row, place, args.test)?);
        }
        let compared = compare(row, &old.name, olds, news);
        table::print_group(row.about, std::slice::from_ref(&compared));
        all.push(compared);
        table::write("gate", &all, args.test)?;
    }
    table::print_goals(&all);
    let slower = |row: &&Row| row.goal.is_some_and(|goal| row.ratio < goal);
    Ok(all.iter().filter(slower).map(|row| row.work.clone()).collect())
}

/// The row of two sides that took turns. Its goal is the lower quartile of the old side against itself.
fn compare(row: &rows::Kind, against: &str, olds: Vec<f64>, news: Vec<f64>) -> Row {
    let better = |value: f64, base: f64| if row.more { value / base } else { base / value };
    let mut noise: Vec<f64> = olds.windows(2).map(|pair| better(pair[1], pair[0])).collect();
    noise.sort_by(f64::total_cmp);
    let goal = noise[noise.len() / 4].min(1.0);
    let name = (row.name.to_owned(), row.unit);
    Row::of_rounds(name, news, (against.to_owned(), olds), better, Some(goal))
}
