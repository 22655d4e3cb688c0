//! `farheap-papers`: the figures and tables of four papers, by name, measured here.
//!
//! ```text
//! cargo run --release -p farheap-papers -- --list
//! cargo run --release -p farheap-papers -- figure 5 metadata
//! cargo run --release -p farheap-papers -- --all --quick
//! ```
//! [`catalogue`] knows what there is: for each figure the benchmark that measures it, which of its rows
//! are the figure's, the paper's values, and the findings as conditions on ours. [`figures`] runs the
//! benchmark and reads its rows, [`picture`] draws both side by side, [`verdict`] tells what holds.

mod catalogue;
mod figures;
mod picture;
mod verdict;

use catalogue::{CATALOGUE, Item, Kind};
use clap::Parser;
use clap::builder::PossibleValuesParser;
use figures::Size;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use verdict::{Verdict, verdicts};

/// Reproduces figures and tables of the papers that farheap is built on.
///
/// Runs the benchmark of the figure, prints the paper's values beside those measured here, says of each
/// finding whether it holds here, and draws both.
#[derive(Debug, Parser)]
#[command(name = "farheap-papers", max_term_width = 100)]
#[command(
    after_help = "Papers: metadata (Separated Allocator Metadata in Disaggregated In-Memory \
Databases), cooperative (Cooperative Memory Management for Table and Temporary Data), collective \
(Collective Allocator Abstraction to Control Object Spatial Locality in C++), query (On the Impact of \
Memory Allocation on High-Performance Query Processing).

Exit status: 0 when all was measured, whatever holds; 1 when a benchmark failed; 2 for wrong use."
)]
struct Args {
    /// What to reproduce: `figure` or `table`.
    #[arg(requires = "number", required_unless_present_any = ["list", "all"])]
    kind: Option<Kind>,
    /// Its number in the paper.
    #[arg(requires = "paper")]
    number: Option<u32>,
    /// The paper.
    #[arg(value_parser = PossibleValuesParser::new(PAPERS))]
    paper: Option<String>,
    /// Lists what can be reproduced, and measures nothing.
    #[arg(long)]
    list: bool,
    /// Everything that can be reproduced.
    #[arg(long, conflicts_with_all = ["kind", "list"])]
    all: bool,
    /// Small runs, in minutes; all of them in less than an hour on two processors.
    #[arg(long)]
    quick: bool,
    /// The papers' sizes: hours, and tens of GB of disk.
    #[arg(long, conflicts_with = "quick")]
    paper_size: bool,
    /// Does not run the benchmark: takes the rows that it has left.
    #[arg(long, conflicts_with_all = ["quick", "paper_size"])]
    keep: bool,
    /// Checks that the command works with the rows of the benchmarks' smoke runs (`-- --test`), in
    /// seconds; runs those that have left none. Says nothing about any finding.
    #[arg(long, conflicts_with_all = ["quick", "paper_size", "keep"])]
    smoke: bool,
}

/// The papers by their short names.
const PAPERS: [&str; 4] = ["metadata", "cooperative", "collective", "query"];

fn main() -> ExitCode {
    let args = Args::parse();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member of the workspace");
    let all: Vec<&Item> = CATALOGUE.iter().collect();
    if args.list {
        all.iter().for_each(|item| println!("{:<22} {}", item.name(), item.title));
        return ExitCode::SUCCESS;
    }
    let wanted = |item: &&&Item| {
        args.all
            || (Some(item.kind), Some(item.number)) == (args.kind, args.number)
                && args.paper.as_deref() == Some(item.paper)
    };
    let wanted: Vec<&Item> = all.iter().filter(wanted).copied().collect();
    if wanted.is_empty() {
        eprintln!("farheap-papers: {}", unknown(&args, &all));
        return ExitCode::from(2);
    }
    let size = match (args.keep, args.quick, args.paper_size, args.smoke) {
        (true, ..) => Size::AsMeasured,
        (_, true, ..) => Size::Quick,
        (_, _, true, _) => Size::Paper,
        (.., true) => Size::Smoke,
        _ => Size::Usual,
    };
    match reproduce(root, &wanted, size) {
        0 => ExitCode::SUCCESS,
        failed => {
            eprintln!("farheap-papers: {failed} of {} could not be measured", wanted.len());
            ExitCode::FAILURE
        }
    }
}

/// What to say of a figure that is not there.
fn unknown(args: &Args, all: &[&Item]) -> String {
    let asked = match (args.kind, args.number, &args.paper) {
        (Some(kind), Some(number), Some(paper)) => format!("{} {number} {paper}", kind.name()),
        _ => {
            return "name a figure or table, its number and its paper; --list lists them"
                .to_owned();
        }
    };
    let of_paper = all.iter().filter(|item| args.paper.as_deref() == Some(item.paper));
    let names: Vec<String> = of_paper.map(|item| item.name()).collect();
    match names.is_empty() {
        true => format!("`{asked}` cannot be reproduced, nor can anything else of that paper"),
        false => {
            format!("`{asked}` cannot be reproduced; of that paper there are {}", names.join(", "))
        }
    }
}

/// Reproduces items, several of one benchmark by one run of it; returns how many failed.
fn reproduce(root: &Path, items: &[&Item], size: Size) -> usize {
    let folder = figures::folder(root, size).join("papers");
    let busy = busy();
    let (mut failed, mut skipped, mut told) = (0, 0, Vec::new());
    let mut benches: Vec<&str> = items.iter().map(|item| item.run.bench).collect();
    benches.sort_unstable();
    benches.dedup();
    // In the order of the catalogue, and what one benchmark measures together.
    benches.sort_by_key(|bench| items.iter().position(|item| item.run.bench == *bench));
    for bench in benches {
        let of_bench: Vec<&&Item> = items.iter().filter(|item| item.run.bench == bench).collect();
        let began = Instant::now();
        let measured = figures::run(root, &of_bench[0].run, size);
        if began.elapsed().as_secs() > 0 {
            println!("{bench}: {} s", began.elapsed().as_secs());
        }
        if size == Size::Smoke && measured.is_ok() && !figures::has_rows(root, bench, size) {
            println!("skipped: {bench}: the benchmark measures nothing here");
            skipped += of_bench.len();
            continue;
        }
        for item in of_bench {
            let seen = measured.clone().and_then(|()| figures::read(root, item, size));
            let drawn = seen.and_then(|found| {
                println!("\n{}: {}", item.name(), item.title);
                verdict::print(item, &found);
                told.extend(verdicts(item, &found));
                picture::draw(&folder, item, &found)
            });
            match drawn {
                Ok(path) => println!("drawn: {}", display(&path, root)),
                Err(why) => {
                    eprintln!("farheap-papers: {}: {why}", item.name());
                    failed += 1;
                }
            }
        }
    }
    let count = |verdict| told.iter().filter(|one| **one == verdict).count();
    println!(
        "\n{} figures and tables; of {} findings {} hold here, {} do not, {} were not measured",
        items.len() - failed - skipped,
        told.len(),
        count(Verdict::Holds),
        count(Verdict::DoesNot),
        count(Verdict::Open),
    );
    if let Some(busy) = busy.filter(|_| matches!(size, Size::Quick | Size::Usual | Size::Paper)) {
        println!("{busy}: times may say more of that than of the findings");
    }
    failed
}

/// What else the machine had to do when this began, if it was more than its processors can.
fn busy() -> Option<String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    let load = text.split(' ').next()?.parse::<f64>().ok()?;
    // A half: each benchmark needs a processor itself, most need two.
    let is_busy = load > processors as f64 / 2.0;
    is_busy.then(|| format!("the load was {load} on {processors} processors at the beginning"))
}

fn display(path: &Path, root: &Path) -> String {
    let short: PathBuf = path.strip_prefix(root).unwrap_or(path).to_owned();
    short.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
        assert!(Args::try_parse_from(["farheap-papers"]).is_err());
        assert!(Args::try_parse_from(["farheap-papers", "figure", "5"]).is_err());
        let args = Args::try_parse_from(["farheap-papers", "table", "3", "collective"]);
        assert_eq!(args.expect("valid").kind, Some(Kind::Table));
        let error = Args::try_parse_from(["farheap-papers", "figure", "5", "metadate"]);
        let error = error.expect_err("no such paper").to_string();
        assert!(error.contains("metadate") && error.contains("cooperative"), "{error}");
        assert!(CATALOGUE.iter().all(|item| PAPERS.contains(&item.paper)));
    }

    #[test]
    fn a_figure_that_is_not_there_is_named_beside_those_that_are() {
        let args = Args::try_parse_from(["farheap-papers", "figure", "99", "cooperative"]);
        let all: Vec<&Item> = CATALOGUE.iter().collect();
        let text = unknown(&args.expect("well-formed"), &all);
        assert!(text.contains("`figure 99 cooperative`"), "{text}");
        assert!(text.contains("figure 2 cooperative") && !text.contains("metadata"), "{text}");
    }
}
