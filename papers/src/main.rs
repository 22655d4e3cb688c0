//! `farheap-papers`: the figures and tables of four papers, by name, measured here.
//!
//! ```text
//! cargo run --release -p farheap-papers -- --list
//! cargo run --release -p farheap-papers -- figure 5 metadata
//! cargo run --release -p farheap-papers -- --all --quick
//! ```
//! [`catalogue`] knows what there is: for each figure the benchmark that measures it, which of its rows
//! are the figure's, the paper's values, and the findings as conditions on ours. [`figures`] runs the
//! benchmark in rounds and keeps their rows, [`verdict`] tells what holds and whether that is decided, so
//! that no more rounds are needed, [`picture`] draws both side by side.

mod catalogue;
mod figures;
mod picture;
mod verdict;

use catalogue::{CATALOGUE, Item, Kind};
use clap::Parser;
use clap::builder::{PossibleValuesParser, RangedU64ValueParser};
use figures::{Found, Rounds, Size};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant, SystemTime};
use verdict::{Decision, Verdict, decisions, median};

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
    #[command(flatten)]
    size: Sizes,
    /// Rounds begin until this time is used up, such as `1h`; one of each benchmark is run in any case, but with
    /// --paper-size: there a round begins only if it is likely to end in time, and --resume goes on with those that did
    /// not. 18m with --quick, 2h otherwise, 1h with --paper-size.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    budget: Option<Duration>,
    /// Rounds at most.
    #[arg(long, value_name = "N", default_value_t = 30)]
    #[arg(value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    rounds: usize,
    /// Goes on from the rounds that earlier commands of the same size have measured.
    #[arg(long)]
    resume: bool,
    /// Measures nothing: decides by the rounds that earlier commands of the same size have measured.
    #[arg(long, conflicts_with_all = ["resume", "budget"])]
    keep: bool,
    /// First installs the allocators that figures compare with, from Debian's packages and as root. Without them their
    /// values are missing.
    #[arg(long, conflicts_with = "list")]
    install: bool,
}

/// How large runs are; of the benchmarks' own size without any.
#[derive(Debug, clap::Args)]
struct Sizes {
    /// Small runs; all of them in less than 20 minutes on two processors.
    #[arg(long)]
    quick: bool,
    /// The papers' sizes: hours, and tens of GB of disk.
    #[arg(long, conflicts_with = "quick")]
    paper_size: bool,
    /// Checks that the command works with the rows of the benchmarks' smoke runs (`-- --test`), in
    /// seconds; runs those that have left none. Says nothing about any finding.
    #[arg(long, conflicts_with_all = ["quick", "paper_size", "keep", "resume", "budget"])]
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
    if args.install
        && let Err(why) = install()
    {
        eprintln!("farheap-papers: {why}");
        return ExitCode::FAILURE;
    }
    let (size, usual_budget) = match (args.size.quick, args.size.paper_size, args.size.smoke) {
        (true, ..) => (Size::Quick, Duration::from_secs(18 * 60)),
        (_, true, _) => (Size::Paper, Duration::from_secs(3600)),
        (.., true) => (Size::Smoke, Duration::ZERO),
        _ => (Size::Usual, Duration::from_secs(2 * 3600)),
    };
    let plan = Plan {
        size,
        continues: args.resume || args.keep,
        budget: args.budget.unwrap_or(usual_budget),
        rounds: match (args.keep, args.size.smoke) {
            (true, _) => 0,
            (_, true) => 1,
            _ => args.rounds,
        },
    };
    match reproduce(root, &wanted, &plan) {
        0 => ExitCode::SUCCESS,
        failed => {
            eprintln!("farheap-papers: {failed} of {} could not be measured", wanted.len());
            ExitCode::FAILURE
        }
    }
}

/// Packages of Debian's with allocators that benchmarks load.
const PACKAGES: [&str; 3] = ["libtcmalloc-minimal4", "libtbbmalloc2", "libmimalloc2.0"];

/// Installs the allocators of others.
///
/// # Errors
/// A text, when this user or system cannot.
fn install() -> Result<(), String> {
    let packages = PACKAGES.join(" ");
    let is_root = std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    if !is_root {
        return Err(format!("only root can install: apt-get install {packages}"));
    }
    let mut apt = Command::new("apt-get");
    apt.args(["install", "-y", "--no-install-recommends"]).args(PACKAGES);
    let status = apt.status().map_err(|error| format!("apt-get, for {packages}: {error}"))?;
    status.success().then_some(()).ok_or_else(|| format!("apt-get install {packages}: {status}"))
}

/// How much is measured.
struct Plan {
    size: Size,
    /// From the rounds that are there.
    continues: bool,
    budget: Duration,
    /// Of each benchmark, at most.
    rounds: usize,
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

/// A benchmark, the items that it measures, and how far that is.
struct Bench<'a> {
    name: &'static str,
    items: Vec<&'a Item>,
    rounds: Rounds,
    /// The last round; before that what it is expected to take, which is known for the papers' sizes.
    took: Duration,
    failed: Option<String>,
    is_skipped: bool,
}

impl<'a> Bench<'a> {
    fn new(root: &Path, name: &'static str, items: &[&'a Item], plan: &Plan) -> Bench<'a> {
        let items: Vec<&Item> =
            items.iter().filter(|item| item.run.bench == name).copied().collect();
        let opened = Rounds::open(root, name, plan.size, plan.continues);
        let failed = opened.as_ref().err().cloned();
        let rounds = opened.unwrap_or_default();
        let minutes = if plan.size == Size::Paper { items[0].run.paper_minutes } else { 0 };
        let took = Duration::from_secs(60 * minutes);
        Bench { name, items, rounds, took, failed, is_skipped: false }
    }

    /// Findings that are decided, or that this benchmark does not measure here; and all.
    fn decided(&self) -> (usize, usize) {
        let rounds = self.items.iter().map(|item| (item, self.rounds.of(item)));
        let decisions = rounds.flat_map(|(item, rounds)| match rounds {
            Ok(rounds) => decisions(item, &rounds),
            Err(_) => Vec::new(),
        });
        let all = self.items.iter().map(|item| item.findings.len()).sum();
        let undecided = decisions.filter(|one| one.verdict == Verdict::Undecided).count();
        (all - undecided, all)
    }

    fn wants_round(&self, plan: &Plan, left: Duration) -> bool {
        if self.failed.is_some() || self.is_skipped || self.rounds.len() >= plan.rounds {
            return false;
        }
        let (decided, all) = self.decided();
        match self.rounds.len() {
            0 => plan.size != Size::Paper || self.took <= left,
            _ => decided < all && self.took <= left,
        }
    }

    /// Not begun: for want of time.
    fn is_left(&self, plan: &Plan) -> bool {
        plan.size == Size::Paper && self.rounds.len() == 0 && self.failed.is_none()
    }

    fn run_round(&mut self, root: &Path, size: Size) {
        let began = Instant::now();
        let run = &self.items[0].run;
        let measured = figures::run(root, run, size);
        if size == Size::Smoke && measured.is_ok() && !figures::has_rows(root, self.name, size) {
            println!("skipped: {}: the benchmark measures nothing here", self.name);
            self.is_skipped = true;
            return;
        }
        self.failed = measured.and_then(|()| self.rounds.add(root, self.name, size)).err();
        self.took = began.elapsed();
        if size != Size::Smoke && self.failed.is_none() {
            let (decided, all) = self.decided();
            let (name, round, took) = (self.name, self.rounds.len(), self.took.as_secs());
            println!("{name}: round {round}, {took} s; {decided} of {all} findings decided");
        }
    }
}

/// Reproduces items, several of one benchmark by one run of it; returns how many failed. Rounds of all benchmarks are
/// run in turns, so that what else the machine does at a time meets all of them.
fn reproduce(root: &Path, items: &[&Item], plan: &Plan) -> usize {
    let folder = figures::folder(root, plan.size).join("papers");
    let (busy, began) = (busy(), Instant::now());
    // In the order of the catalogue.
    let mut names: Vec<&str> = Vec::new();
    for item in items {
        if !names.contains(&item.run.bench) {
            names.push(item.run.bench);
        }
    }
    let mut benches: Vec<Bench<'_>> =
        names.into_iter().map(|name| Bench::new(root, name, items, plan)).collect();
    loop {
        let mut is_done = true;
        for bench in &mut benches {
            if bench.wants_round(plan, plan.budget.saturating_sub(began.elapsed())) {
                bench.run_round(root, plan.size);
                is_done = false;
            }
        }
        if is_done {
            break;
        }
    }
    let (mut failed, mut skipped, mut told, mut left) = (0, 0, Vec::new(), Vec::new());
    let mut table = Verdicts::new(root, plan.size);
    for bench in &benches {
        if bench.is_left(plan) {
            left.push(format!("{} (some {} min)", bench.name, bench.took.as_secs() / 60));
        }
        if bench.is_skipped || bench.is_left(plan) {
            skipped += bench.items.len();
            continue;
        }
        for item in &bench.items {
            let rounds = bench.failed.clone().map_or_else(|| bench.rounds.of(item), Err);
            let drawn = rounds.and_then(|rounds| {
                println!("\n{}: {}", item.name(), item.title);
                verdict::print(item, &rounds);
                let decisions = decisions(item, &rounds);
                table.add(item, &decisions, rounds.len());
                told.extend(decisions.iter().map(|decision| decision.verdict));
                picture::draw(&folder, item, &medians(&rounds))
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
        "\n{} figures and tables; of {} findings {} hold here, {} do not, {} are not decided, {} were not measured",
        items.len() - failed - skipped,
        told.len(),
        count(Verdict::Holds),
        count(Verdict::DoesNot),
        count(Verdict::Undecided),
        count(Verdict::Open),
    );
    if !left.is_empty() {
        // Else a budget that is too small for any would look like success.
        failed += usize::from(left.len() == benches.len());
        println!("left for another command, with --resume: {}", left.join(", "));
    }
    match table.write(&folder.join("verdicts.csv")) {
        Ok(()) => println!("written: {}", display(&folder.join("verdicts.csv"), root)),
        Err(why) => {
            eprintln!("farheap-papers: {why}");
            failed += 1;
        }
    }
    if let Some(busy) = busy.filter(|_| plan.size != Size::Smoke && plan.rounds > 0) {
        println!("{busy}: times may say more of that than of the findings");
    }
    failed
}

/// The medians of all rounds.
fn medians(rounds: &[Vec<Found>]) -> Vec<Found> {
    let of = |at: usize, value: fn(&Found) -> Option<f64>| {
        median(rounds.iter().filter_map(|round| value(&round[at])))
    };
    let points = rounds.first().into_iter().flatten().enumerate();
    let found = points.map(|(at, found)| Found {
        point: found.point,
        theirs: of(at, |found| found.theirs),
        ours: of(at, |found| found.ours),
    });
    found.collect()
}

/// What was found, as a table for other programs: when, of which revision.
struct Verdicts {
    text: String,
    /// The columns that all lines end with.
    end: String,
}

impl Verdicts {
    fn new(root: &Path, size: Size) -> Verdicts {
        let mut git = Command::new("git");
        git.current_dir(root).args(["describe", "--always", "--dirty", "--exclude=*"]);
        let revision = git.output().ok().filter(|output| output.status.success());
        let revision = revision.map_or_else(String::new, |output| {
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        });
        let date = humantime::format_rfc3339_seconds(SystemTime::now());
        let text = "item,finding,verdict,share,rounds,size,date,revision\n".to_owned();
        Verdicts { text, end: format!("{},{date},{revision}", size.name()) }
    }

    fn add(&mut self, item: &Item, decisions: &[Decision], rounds: usize) {
        for (finding, Decision { verdict, share }) in item.findings.iter().zip(decisions) {
            let (name, text, verdict) = (item.name(), finding.text, verdict.text());
            let end = &self.end;
            self.text += &format!("{name},\"{text}\",{verdict},{share:.3},{rounds},{end}\n");
        }
    }

    fn write(&self, path: &Path) -> Result<(), String> {
        let made = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        made.and_then(|()| std::fs::write(path, &self.text))
            .map_err(|error| format!("{}: {error}", path.display()))
    }
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
        assert!(Args::try_parse_from(["farheap-papers", "--all", "--rounds", "0"]).is_err());
        let args = Args::try_parse_from(["farheap-papers", "table", "3", "collective"]);
        assert_eq!(args.expect("valid").kind, Some(Kind::Table));
        let error = Args::try_parse_from(["farheap-papers", "figure", "5", "metadate"]);
        let error = error.expect_err("no such paper").to_string();
        assert!(error.contains("metadate") && error.contains("cooperative"), "{error}");
        assert!(CATALOGUE.iter().all(|item| PAPERS.contains(&item.paper)));
    }

    #[test]
    fn verdicts_are_a_table_with_quoted_findings() {
        let item = CATALOGUE.iter().find(|item| item.name() == "figure 2 cooperative");
        let item = item.expect("is there");
        let mut table = Verdicts::new(Path::new("."), Size::Quick);
        let holds = Decision { verdict: Verdict::Holds, share: 1.0 };
        table.add(item, &[holds; 4], 7);
        let lines: Vec<&str> = table.text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[2].starts_with("figure 2 cooperative,\"during a query throughput"));
        assert!(lines[2].contains("\",holds here,1.000,7,quick,20"), "{}", lines[2]);
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
