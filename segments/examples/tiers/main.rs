//! TPC-H over columns whose chunks lie on tiers, and migrate while queries run.
//!
//! ```text
//! cargo run --release -p farheap-segments --example tiers -- --migrate
//! ```
//!
//! `tables` has the columns, each a list of segments; `load` generates them, `queries` computes over
//! their slices, `answers` knows what is right, `tiers` starts the tiers and places columns, `stress`
//! queries while columns migrate, `auto` has them placed by how often they are read, `waits` times the
//! readers, `report` tells. `--help` has the options and exit statuses.

mod answers;
mod args;
mod auto;
#[path = "../../../examples/common/checks.rs"]
mod checks;
#[path = "../../../examples/common/failure.rs"]
mod failure;
mod load;
#[path = "../../../examples/common/memory.rs"]
mod memory;
#[path = "../../../examples/common/options.rs"]
mod options;
mod queries;
mod report;
mod stress;
mod tables;
mod tiers;
mod waits;

use answers::{Answer, published};
use args::Args;
use auto::Auto;
use checks::{Check, ms, thousands};
use clap::Parser;
use failure::Failure;
use farheap::{ByteCount, Tier};
use farheap_segments::SegmentError;
use options::Compare;
use report::{Moved, QueryTimes, Report, TierUse};
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::Instant;
use std::{fs, io};
use tables::{COLUMNS, Database};
use tiers::Tiers;

/// Memory to leave alone when deciding whether the data fits into local memory.
const MEMORY_RESERVE: ByteCount = ByteCount::mib(256);

fn main() -> ExitCode {
    let args = Args::parse();
    failure::end("tiers", run(&args).map(|report| report.holds()))
}

impl From<SegmentError> for Failure {
    fn from(error: SegmentError) -> Failure {
        Failure { status: 1, text: error.to_string() }
    }
}

/// Wrong use.
fn usage(text: String) -> Failure {
    Failure { status: 2, text }
}

/// The whole job: load, answer, migrate, answer again, tell.
fn run(args: &Args) -> Result<Report, Failure> {
    let mut rules = match &args.tiers {
        Some(path) => tiers::read_rules(path).map_err(usage)?,
        None => Vec::new(),
    };
    rules.extend(args.rules.iter().cloned());
    let placing = tiers::Plan::new(args.definitions.clone(), &rules).map_err(usage)?;
    if (args.migrate || args.auto.is_some()) && placing.is_all_local() {
        let option = if args.migrate { "--migrate" } else { "--auto" };
        return Err(usage(format!("{option} needs a column that lies on a tier")));
    }
    let plan = load::Plan::count(args.scale_factor);
    let bytes_of = |name: &str| {
        let column = COLUMNS.iter().find(|column| column.name == name);
        column.map_or(ByteCount::ZERO, |column| plan.bytes_of(column))
    };
    let tiers = Tiers::start(placing, &bytes_of, args.cache)?;
    print_job(args, &plan, &tiers);
    let measured = measure(args, &plan, &tiers);
    let statistics = args.stats.then(|| {
        let text = |tier: &tiers::OpenTier| format!("{}\n{}", tier.name, tier.heap.stats());
        tiers.all().iter().map(text).collect::<Vec<_>>().join("\n")
    });
    let stopped = tiers.shutdown();
    let report = measured?;
    print_report(&report);
    if let Some(statistics) = statistics {
        println!("\n{statistics}");
    }
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report).map_err(io::Error::from)?;
        fs::write(path, json + "\n")
            .map_err(|error| Failure { status: 1, text: format!("{}: {error}", path.display()) })?;
    }
    stopped?;
    Ok(report)
}

/// Loads, answers and migrates; the columns are gone when this returns.
fn measure(args: &Args, plan: &load::Plan, tiers: &Tiers) -> Result<Report, Failure> {
    let local_first = is_local_first(args, plan, tiers);
    let place = |column: &str| match local_first {
        true => Tier::LOCAL,
        false => tiers.placement(column),
    };
    let begun = Instant::now();
    let data = load::database(plan, args.threads, &place)?;
    let mut report = Report {
        scale_factor: args.scale_factor,
        data_bytes: plan.bytes().get(),
        load_seconds: begun.elapsed().as_secs_f64(),
        ..Report::default()
    };
    let names = args.queries.iter().map(|query| format!("Q{query}"));
    report.queries = names.map(|name| QueryTimes { name, ..QueryTimes::default() }).collect();
    let mut job = Job { args, data: &data, tiers, right: Vec::new(), wrong: Vec::new() };
    if local_first {
        job.answer(&mut report, |query| &mut query.local_ms);
        report.migration = Some(job.migrate_to_tiers()?);
    }
    job.answer(&mut report, |query| &mut query.tiers_ms);
    let wrong_alone = job.wrong.len();
    if args.migrate {
        let threads = usize::try_from(args.threads).unwrap_or(1);
        let (stress, wrong) =
            stress::run(&data, tiers, &job.right, threads, args.duration(), args.rate);
        report.stress = Some(stress);
        job.wrong.extend(wrong);
    }
    if let Some(budget) = args.auto {
        let budget = auto::Budget {
            bytes: budget.of(plan.bytes()),
            by: args.auto_by,
            time: args.duration(),
            threads: usize::try_from(args.threads).unwrap_or(1),
        };
        let (auto, wrong) = auto::run(&data, tiers, &job.right, budget);
        report.auto = Some(auto);
        job.wrong.extend(wrong);
    }
    report.checks = job.checks(&report, local_first, wrong_alone);
    report.tiers = tiers.all().iter().map(tier_use).collect();
    Ok(report)
}

/// Whether to load into local memory first.
fn is_local_first(args: &Args, plan: &load::Plan, tiers: &Tiers) -> bool {
    let limits: u64 = tiers.all().iter().map(|tier| tier.heap.stats().limit_bytes.get()).sum();
    let needed = plan.bytes().get() + limits + MEMORY_RESERVE.get();
    let fits = memory::available().is_none_or(|available| needed <= available.get());
    match args.local {
        Compare::Never => false,
        Compare::Always => true,
        Compare::Auto => {
            if !fits {
                eprintln!(
                    "loading onto the tiers at once: {} would be needed to begin in local memory \
                     (--local always insists)",
                    ByteCount(needed)
                );
            }
            fits
        }
    }
}

fn tier_use(tier: &tiers::OpenTier) -> TierUse {
    let stats = tier.heap.stats();
    TierUse {
        name: tier.name.clone(),
        limit_bytes: stats.limit_bytes.get(),
        data_bytes: tier.data.get(),
        resident_bytes_max: stats.resident_bytes_max.get(),
        bytes_read: stats.bytes_read.get(),
        bytes_written: stats.bytes_written.get(),
    }
}

/// What measuring needs all along.
struct Job<'a> {
    args: &'a Args,
    data: &'a Database,
    tiers: &'a Tiers,
    /// Each query's first answer, against which all others are checked.
    right: Vec<(u8, Answer)>,
    /// What was wrong, a line each.
    wrong: Vec<String>,
}

impl Job<'_> {
    /// Runs every query as often as asked for, and checks each answer.
    fn answer(&mut self, report: &mut Report, times: impl Fn(&mut QueryTimes) -> &mut Vec<f64>) {
        for (index, &query) in self.args.queries.iter().enumerate() {
            let before = self.traffic();
            for _ in 0..self.args.runs {
                let begun = Instant::now();
                let answer = queries::run(query, self.data);
                times(&mut report.queries[index]).push(ms(begun.elapsed()));
                match self.right.get(index) {
                    None => {
                        report.queries[index].answer = answer.lines();
                        self.right.push((query, answer));
                    }
                    Some((_, right)) if *right != answer => {
                        self.wrong.push(right.difference(&answer, &format!("Q{query}")));
                    }
                    Some(_) => {}
                }
            }
            // Nothing, while the columns are local.
            let after = self.traffic();
            report.queries[index].bytes_read += after.0 - before.0;
            report.queries[index].bytes_written += after.1 - before.1;
        }
    }

    /// Bytes read and written by all tiers.
    fn traffic(&self) -> (u64, u64) {
        let stats = self.tiers.all().iter().map(|tier| tier.heap.stats());
        stats.fold((0, 0), |sum, stats| {
            (sum.0 + stats.bytes_read.get(), sum.1 + stats.bytes_written.get())
        })
    }

    /// Migrates all columns from local memory to their tiers.
    fn migrate_to_tiers(&self) -> Result<Moved, Failure> {
        let (begun, never) = (Instant::now(), AtomicBool::new(false));
        let mut bytes = 0;
        for (name, column) in self.data.columns() {
            let to = self.tiers.placement(name);
            if to == Tier::LOCAL {
                continue;
            }
            let migration = stress::migrate(column, to, None, &never);
            if let Some(error) = migration.error() {
                return Err(error.clone().into());
            }
            bytes += migration.progress().bytes().get();
        }
        Ok(Moved { bytes, seconds: begun.elapsed().as_secs_f64() })
    }

    /// Everything that must hold.
    fn checks(&self, report: &Report, local_first: bool, wrong_alone: usize) -> Vec<Check> {
        let mut checks: Vec<_> =
            self.wrong.iter().map(|text| Check::must(false, text.clone())).collect();
        if wrong_alone == 0 {
            let first = if local_first { "the one over local memory" } else { "the first" };
            checks.push(Check::must(true, format!("every answer over the tiers equals {first}")));
        }
        let mut all_published = true;
        for (query, answer) in &self.right {
            let Some(lines) = published(*query, self.args.scale_factor) else {
                all_published = false;
                continue;
            };
            let text = format!("Q{query} is the answer published in the TPC-H specification");
            checks.push(Check::must(answer.is_published_as(&lines), text));
        }
        if !local_first && !all_published {
            let text = "answers are only compared with each other: the data was never local";
            checks.push(Check::should(false, text.to_owned()));
        }
        if let Some(stress) = &report.stress {
            let text = format!(
                "{} answers of {} during migrations were wrong",
                stress.wrong, stress.queries
            );
            checks.push(Check::must(stress.wrong == 0, text));
            let text = match &stress.error {
                Some(error) => format!("migrating ended early: {error}"),
                None => format!("{} segments migrated", thousands(stress.segments)),
            };
            checks.push(Check::must(stress.error.is_none() && stress.bytes > 0, text));
        } else if let Some(auto) = &report.auto {
            checks.extend(check_auto(auto));
        } else {
            checks.push(self.check_placements());
        }
        checks
    }

    /// That every column lies where it is to lie.
    fn check_placements(&self) -> Check {
        let columns = self.data.columns();
        let lies_there = |(name, column): &(&str, &dyn tables::AnyColumn)| {
            column.bytes_at(self.tiers.placement(name)) == column.bytes()
        };
        let holds = columns.iter().all(lies_there);
        Check::must(holds, "every segment lies on its column's tier".to_owned())
    }
}

/// That the budget was kept and all answers were right, and that it was worth it.
fn check_auto(auto: &Auto) -> [Check; 4] {
    let (local, budget) = (ByteCount(auto.local_bytes), ByteCount(auto.budget_bytes));
    let [before, after] = auto.queries_per_s;
    let moved = match &auto.error {
        Some(error) => format!("placing ended early: {error}"),
        None => format!("{} plans moved {}", auto.plans, ByteCount(auto.moved_bytes)),
    };
    let wrong =
        format!("{} answers of {} while columns were placed were wrong", auto.wrong, auto.queries);
    [
        Check::must(auto.wrong == 0, wrong),
        Check::must(auto.error.is_none(), moved),
        Check::must(local <= budget, format!("{local} were local at most, of {budget}")),
        Check::should(
            after >= before,
            format!("{before:.2} queries/s before, {after:.2} with the plan"),
        ),
    ]
}

/// Says what is about to happen.
fn print_job(args: &Args, plan: &load::Plan, tiers: &Tiers) {
    println!(
        "TPC-H at scale factor {}: {} rows of lineitem, {} in {} columns",
        args.scale_factor,
        thousands(plan.rows("lineitem")),
        plan.bytes(),
        COLUMNS.len(),
    );
    for tier in tiers.all() {
        let stats = tier.heap.stats();
        let (limit, data) = (stats.limit_bytes, tier.data);
        println!("tier {}: {data} of them, limit {limit}", tier.name);
    }
}

/// Prints tables and verdicts.
fn print_report(report: &Report) {
    println!("loaded in {:.1} s", report.load_seconds);
    if let Some(moved) = report.migration {
        let rate = ByteCount((moved.bytes as f64 / moved.seconds.max(1e-9)) as u64);
        let bytes = ByteCount(moved.bytes);
        println!("{bytes} migrated to the tiers in {:.1} s, {rate}/s", moved.seconds);
    }
    println!("\n{}\n\n{}\n", report.query_table(), report.tier_table());
    if let Some(stress) = &report.stress {
        println!(
            "{} queries on {} threads in {:.1} s while {} segments, {}, migrated: {}/s",
            stress.queries,
            stress.threads,
            stress.seconds,
            thousands(stress.segments),
            ByteCount(stress.bytes),
            stress.rate(),
        );
        println!(
            "longest wait of a reader for a chunk {:.1} us, of the migrator for readers {:.1} ms\n",
            stress.reader_wait_us_max, stress.migrator_wait_ms_max
        );
    }
    for check in &report.checks {
        println!("{} {}", check.verdict, check.text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farheap::Error;

    #[test]
    fn failures_have_the_exit_status_that_the_help_promises() {
        let status = |error: Error| Failure::from(error).status;
        assert_eq!(status(Error::UffdUnavailable { reasons: String::new() }), 3);
        assert_eq!(status(Error::LimitTooSmall { limit: ByteCount(1), minimum: ByteCount(2) }), 2);
        assert_eq!(status(Error::InUse { bytes: ByteCount(1) }), 1);
        assert_eq!(Failure::from(SegmentError::Cancelled).status, 1);
        let args = Args::parse_from(["tiers", "--migrate", "--tier", "all=local"]);
        assert_eq!(run(&args).err().map(|failure| failure.status), Some(2));
    }

    /// The only test here that starts a far heap, of which a process has one.
    #[test]
    fn answers_are_right_while_columns_migrate_between_local_memory_and_two_tiers() {
        let mut arguments =
            vec!["tiers", "--scale-factor", "0.01", "--runs", "1", "--threads", "2"];
        arguments.extend(["--define", "small=handlers:1", "--define", "large=handlers:2"]);
        arguments.extend([
            "--tier",
            "all=small",
            "--tier",
            "lineitem=large",
            "--tier",
            "part=local",
        ]);
        let placed =
            [&arguments[..], &["--auto", "30%", "--auto-by", "column", "--seconds", "1"]].concat();
        let report = match run(&Args::parse_from(placed)) {
            Err(failure) if failure.status == 3 => {
                println!("skipped: {}", failure.text);
                return;
            }
            report => report.map_err(|failure| failure.text).expect("a report"),
        };
        assert!(report.holds(), "{:?}", report.checks);
        assert!(report.auto.is_some_and(|auto| auto.plans > 0 && auto.queries > 0));
        arguments.extend(["--migrate", "--seconds", "1"]);
        let report = match run(&Args::parse_from(arguments)) {
            Err(failure) if failure.status == 3 => {
                println!("skipped: {}", failure.text);
                return;
            }
            report => report.map_err(|failure| failure.text).expect("a report"),
        };
        assert!(report.holds(), "{:?}", report.checks);
        assert!(report.tiers.iter().all(|tier| tier.resident_bytes_max > 0), "{:?}", report.tiers);
        let stress = report.stress.expect("asked for");
        // Each thread answers each query at least once.
        assert!(stress.queries >= 16 && stress.wrong == 0, "{stress:?}");
        assert!(stress.segments > 0 && stress.error.is_none(), "{stress:?}");
    }
}
