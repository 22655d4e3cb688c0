//! TPC-H Q1 and Q6 over a `lineitem` table larger than the memory it may use.
//!
//! ```text
//! cargo run --release --example tpch -- --scale-factor 1 --limit 25%
//! ```
//!
//! Generates the columns into far memory while a limit on resident far memory holds, runs the
//! queries, checks all answers and compares the times with local memory. `--help` has the options
//! and exit statuses.
//!
//! `lineitem` generates and stores, `queries` computes, `answers` knows what is right, `far` is all
//! that touches the library, `resident` watches from outside of it, `report` tells.

mod answers;
mod args;
#[path = "../common/checks.rs"]
mod checks;
#[path = "../common/failure.rs"]
mod failure;
mod far;
mod lineitem;
#[path = "../common/memory.rs"]
mod memory;
#[path = "../common/options.rs"]
mod options;
mod progress;
mod queries;
mod report;
mod resident;

use answers::{Query, Reference, published};
use args::Args;
use checks::{Check, ms, thousands};
use clap::Parser;
use failure::Failure;
use far::{FAR, Far, LOCAL, Local, Stats, Tier};
use farheap::ByteCount;
use lineitem::{Plan, ROW_BYTES, Table};
use options::{Compare, Limit};
use progress::Progress;
use report::{AnswerText, Io, Phase, RESIDENT_SLACK, Report, Resident};
use resident::Sampler;
use std::process::ExitCode;
use std::time::Instant;
use std::{fs, io};

/// The limit when nothing else is said, as a share of the loaded bytes.
const LIMIT_DEFAULT: Limit = Limit::Percent(25.0);

/// Memory to leave alone when deciding whether a local copy of the columns fits.
const MEMORY_RESERVE: ByteCount = ByteCount::mib(256);

fn main() -> ExitCode {
    let args = Args::parse();
    failure::end("tpch", run(&args).map(|report| report.holds()))
}

/// The whole job: load, run, check, tell.
fn run(args: &Args) -> Result<Report, Failure> {
    let plan = Plan::count(args.scale_factor, args.threads);
    let sampler = Sampler::start()?;
    // Before the heap starts, so that whatever it needs counts as far.
    let before_heap = sampler.now()?;
    let tier = Tier::start(&far::Options {
        limit: args.limit.map(|limit| limit.of(plan.bytes())),
        limit_default: LIMIT_DEFAULT.of(plan.bytes()),
        device: args.device.clone(),
    })?;
    let limit = tier.stats().limit_bytes;
    print_job(args, &plan, limit);

    let before_local = sampler.now()?;
    let local = load_local(args, &plan, limit)?;
    let local_growth = sampler.now()?.get().saturating_sub(before_local.get());
    let local_bytes = ByteCount(before_heap.get() + local_growth);

    sampler.reset();
    let mut job = Job { args, tier: &tier, sampler: &sampler, local_bytes, wrong: Vec::new() };
    let (far, reference, mut load) = job.load_far(&plan)?;
    load.local_ms.extend(local.as_ref().map(|local| local.load_ms));
    let mut phases = vec![load];
    let local_table = local.as_ref().map(|local| &local.table);
    phases.extend(job.measure(&far, local_table, &reference)?);

    let report = Report {
        scale_factor: args.scale_factor,
        rows: plan.rows(),
        data_bytes: plan.bytes().get(),
        limit_bytes: limit.get(),
        threads: far.parts.len(),
        cold: args.cold,
        resident: Resident {
            process_bytes_max: sampler.max().get(),
            local_bytes: local_bytes.get(),
            library_bytes_max: tier.stats().resident_bytes_max.get(),
            samples: sampler.samples(),
        },
        answers: answer_texts(&args.queries, &reference),
        checks: Vec::new(),
        phases,
    };
    let mut wrong = job.wrong;
    if !far.all_columns(far::is_far) {
        wrong.push("some of the columns are not in far memory".to_owned());
    }
    drop((far, sampler));
    let statistics = args.stats.then(|| tier.statistics());
    let stopped = tier.shutdown();
    let report = with_checks(report, wrong, local.is_some(), &args.queries, &reference);
    print_report(&report);
    if let Some(statistics) = statistics {
        println!("\n{statistics}");
    }
    write_files(args, &report)?;
    stopped?;
    Ok(report)
}

/// Columns in local memory, to compare with.
struct LocalCopy {
    table: Table<Local>,
    load_ms: f64,
}

/// Loads the columns into local memory when that is wanted and fits.
fn load_local(args: &Args, plan: &Plan, limit: ByteCount) -> Result<Option<LocalCopy>, Failure> {
    let needed = plan.bytes().get() + plan.bytes().min(limit).get() + MEMORY_RESERVE.get();
    let fits = memory::available().is_none_or(|available| needed <= available.get());
    match args.local {
        Compare::Never => return Ok(None),
        Compare::Auto if !fits => {
            eprintln!(
                "no local copy of the columns to compare with: {} would be needed in all \
                 (--local always insists)",
                ByteCount(needed)
            );
            return Ok(None);
        }
        Compare::Auto | Compare::Always => {}
    }
    let progress = progress(args, "local", plan, &String::new);
    let (table, _) = Table::load(plan, LOCAL, &progress).map_err(no_room)?;
    Ok(Some(LocalCopy { table, load_ms: ms(progress.finish()) }))
}

/// Progress of loading what `plan` counted, unless nobody wants to see it.
fn progress<'a>(
    args: &Args,
    label: &'a str,
    plan: &Plan,
    note: &'a (dyn Fn() -> String + Sync),
) -> Progress<'a> {
    if args.quiet { Progress::hidden() } else { Progress::new(label, plan.rows(), note) }
}

/// The failure to allocate a column.
fn no_room(error: impl std::fmt::Display) -> Failure {
    Failure { status: 1, text: format!("no room for the columns: {error}") }
}

/// What measuring needs all along.
struct Job<'a> {
    args: &'a Args,
    tier: &'a Tier,
    sampler: &'a Sampler,
    local_bytes: ByteCount,
    /// What was wrong, with answers above all, a line each.
    wrong: Vec<String>,
}

impl Job<'_> {
    /// Loads the columns into far memory.
    fn load_far(&self, plan: &Plan) -> Result<(Table<Far>, Reference, Phase), Failure> {
        let note = || {
            let stats = self.tier.stats();
            let (resident, limit) = (stats.resident_bytes, stats.limit_bytes);
            let written = stats.bytes_written;
            format!(", far {resident} of {limit}, written {written}")
        };
        let progress = progress(self.args, "far  ", plan, &note);
        let before = self.tier.stats();
        let (table, reference) = Table::load(plan, FAR, &progress).map_err(no_room)?;
        let mut phase = Phase { name: "load", ..Phase::default() };
        phase.far_ms.push(ms(progress.finish()));
        self.sampler.now_exact()?;
        self.account(&mut phase, before);
        Ok((table, reference, phase))
    }

    /// Runs every query on far and, if there, local memory in turns, and checks each answer.
    fn measure(
        &mut self,
        far: &Table<Far>,
        local: Option<&Table<Local>>,
        reference: &Reference,
    ) -> Result<Vec<Phase>, Failure> {
        let mut phases = Vec::new();
        for &query in &self.args.queries {
            let mut phase = Phase { name: query.name(), ..Phase::default() };
            if let Some(local) = local {
                // Not timed: the first run of a query pays for cold code and sleeping cores.
                self.check("local", query, &queries::run(query, local), reference);
            }
            for run in 0..self.args.runs {
                // Far and local swap turns, so that neither always finds the caches warmer.
                if run % 2 == 0 {
                    self.run_far(query, far, reference, &mut phase)?;
                }
                if let Some(local) = local {
                    let started = Instant::now();
                    let answer = queries::run(query, local);
                    phase.local_ms.push(ms(started.elapsed()));
                    self.check("local", query, &answer, reference);
                }
                if run % 2 == 1 {
                    self.run_far(query, far, reference, &mut phase)?;
                }
            }
            phases.push(phase);
        }
        Ok(phases)
    }

    /// One run on far memory.
    fn run_far(
        &mut self,
        query: Query,
        far: &Table<Far>,
        reference: &Reference,
        phase: &mut Phase,
    ) -> Result<(), Failure> {
        if self.args.cold {
            self.tier.evict_all()?;
        }
        let before = self.tier.stats();
        self.sampler.take_phase_max();
        let started = Instant::now();
        let answer = queries::run(query, far);
        phase.far_ms.push(ms(started.elapsed()));
        self.sampler.now_exact()?;
        self.account(phase, before);
        self.check("far", query, &answer, reference);
        Ok(())
    }

    /// Adds the traffic since `before` and the resident size since the last look to `phase`.
    fn account(&self, phase: &mut Phase, before: Stats) {
        let since = self.tier.stats().since(&before);
        phase.io.pages_in += since.pages_in;
        phase.io.pages_out += since.pages_out;
        phase.io.bytes_read += since.bytes_read.get();
        phase.io.bytes_written += since.bytes_written.get();
        let far = self.sampler.take_phase_max().get().saturating_sub(self.local_bytes.get());
        phase.far_resident_bytes_max = phase.far_resident_bytes_max.max(far);
    }

    fn check(&mut self, side: &str, query: Query, answer: &answers::Answer, right: &Reference) {
        let right = right.answer(query);
        if *answer != right {
            let (got, wanted) = (answer.lines().join("; "), right.lines().join("; "));
            self.wrong
                .push(format!("{} on {side} memory: {got} instead of {wanted}", query.name()));
        }
    }
}

fn answer_texts(queries: &[Query], reference: &Reference) -> Vec<AnswerText> {
    let text =
        |&query: &Query| AnswerText { query: query.name(), lines: reference.answer(query).lines() };
    queries.iter().map(text).collect()
}

/// The report with everything checked that must or should hold.
fn with_checks(
    mut report: Report,
    wrong: Vec<String>,
    local: bool,
    queries: &[Query],
    reference: &Reference,
) -> Report {
    let limit = ByteCount(report.limit_bytes);
    let mut checks: Vec<_> = wrong.into_iter().map(|text| Check::must(false, text)).collect();
    if checks.is_empty() {
        let sides = if local { "far and local" } else { "far" };
        let text = format!("every answer from {sides} memory equals the row-by-row reference");
        checks.push(Check::must(true, text));
    }
    for &query in queries {
        if let Some(published) = published(query, report.scale_factor) {
            let holds = reference.answer(query).lines() == published;
            checks.push(Check::must(
                holds,
                format!("{} is the answer published in the TPC-H specification", query.name()),
            ));
        }
    }
    let far = ByteCount(report.resident.far_bytes_max());
    checks.push(Check::must(
        far.get() <= limit.get() + RESIDENT_SLACK.get(),
        format!(
            "far resident {far}, the largest of {} samples, is at most limit {limit} + \
             {RESIDENT_SLACK}",
            report.resident.samples
        ),
    ));
    let counted = ByteCount(report.resident.library_bytes_max);
    checks.push(Check::must(
        counted <= limit,
        format!("far resident {counted}, as the library counts, is at most limit {limit}"),
    ));
    checks.extend(checks_when_all_fits(&report));
    report.checks = checks;
    report
}

/// What should hold when the limit is above the data, with a tenth to spare for whole pages.
fn checks_when_all_fits(report: &Report) -> Vec<Check> {
    if report.cold || report.limit_bytes < report.data_bytes + report.data_bytes / 10 {
        return Vec::new();
    }
    let traffic = |pick: fn(&Io) -> u64| report.phases.iter().map(|phase| pick(&phase.io)).sum();
    let (read, written): (u64, u64) = (traffic(|io| io.bytes_read), traffic(|io| io.bytes_written));
    let mut checks = vec![Check::should(
        read == 0 && written == 0,
        format!("the data fits: {read} bytes read from the device, {written} written"),
    )];
    for phase in report.phases.iter().filter(|phase| phase.name != "load") {
        if let Some(ratio) = phase.ratio() {
            let name = phase.name;
            let text =
                format!("the data fits: {name} takes {ratio:.3} of its local time, at most 1.03");
            checks.push(Check::should(ratio <= 1.03, text));
        }
    }
    checks
}

/// Says what is about to happen.
fn print_job(args: &Args, plan: &Plan, limit: ByteCount) {
    println!(
        "lineitem at scale factor {}: {} rows of {ROW_BYTES} bytes, {} in 7 columns",
        args.scale_factor,
        thousands(plan.rows()),
        plan.bytes(),
    );
    println!(
        "limit {limit}, {:.2} % of the data; {} threads, {} runs of each query{}",
        100.0 * limit.get() as f64 / plan.bytes().get() as f64,
        args.threads,
        args.runs,
        if args.cold { ", all far memory evicted before each" } else { "" },
    );
}

/// Prints answers, table and verdicts.
fn print_report(report: &Report) {
    println!();
    for answer in &report.answers {
        println!("{}", answer.query);
        for line in &answer.lines {
            println!("  {line}");
        }
    }
    println!("\n{}", report.table());
    println!(
        "Pages and bytes are sums over all runs. Resident is the largest sample of the process"
    );
    println!("less its local memory; the limit is {}.\n", ByteCount(report.limit_bytes));
    println!("{}", report.resident.explanation(ByteCount(report.limit_bytes)));
    for check in &report.checks {
        println!("{} {}", check.verdict, check.text);
    }
}

/// Writes the files that were asked for.
fn write_files(args: &Args, report: &Report) -> Result<(), Failure> {
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(report).map_err(io::Error::from)?;
        fs::write(path, json + "\n").map_err(|error| cannot_write(path, &error))?;
    }
    if let Some(path) = &args.csv {
        fs::write(path, report.csv()).map_err(|error| cannot_write(path, &error))?;
    }
    Ok(())
}

fn cannot_write(path: &std::path::Path, error: &io::Error) -> Failure {
    Failure { status: 1, text: format!("{}: {error}", path.display()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farheap::Error;

    #[test]
    fn failures_have_the_exit_status_that_the_help_promises() {
        let status = |error: Error| Failure::from(error).status;
        assert_eq!(status(Error::UffdUnavailable { reasons: String::new() }), 3);
        assert_eq!(status(Error::BadSize { text: String::new() }), 2);
        assert_eq!(status(Error::LimitTooSmall { limit: ByteCount(1), minimum: ByteCount(2) }), 2);
        assert_eq!(status(Error::Device { path: "/".into(), reason: String::new() }), 2);
        assert_eq!(status(Error::InUse { bytes: ByteCount(1) }), 1);
    }

    #[test]
    fn a_wrong_answer_or_a_limit_passed_fails_the_report() {
        let reference = Reference::default();
        let limit = ByteCount::mib(10);
        let report = |resident: ByteCount| Report {
            scale_factor: 0.5,
            rows: 1,
            data_bytes: limit.get(),
            limit_bytes: limit.get(),
            threads: 1,
            cold: false,
            phases: Vec::new(),
            resident: Resident { process_bytes_max: resident.get(), ..Resident::default() },
            answers: Vec::new(),
            checks: Vec::new(),
        };
        let holds = |resident, wrong| {
            with_checks(report(resident), wrong, true, &[Query::Q1], &reference).holds()
        };
        let most = ByteCount(limit.get() + RESIDENT_SLACK.get());
        assert!(holds(most, Vec::new()));
        assert!(!holds(ByteCount(most.get() + 1), Vec::new()));
        assert!(!holds(most, vec!["Q1 on far memory: 1 instead of 2".to_owned()]));
    }

    #[test]
    fn answers_that_differ_from_the_published_ones_fail_at_scale_factor_1() {
        let report = Report {
            scale_factor: 1.0,
            rows: 1,
            data_bytes: 1,
            limit_bytes: 1,
            threads: 1,
            cold: false,
            phases: Vec::new(),
            resident: Resident::default(),
            answers: Vec::new(),
            checks: Vec::new(),
        };
        let wrong = Reference::default();
        assert!(!with_checks(report, Vec::new(), false, &[Query::Q6], &wrong).holds());
    }
}
