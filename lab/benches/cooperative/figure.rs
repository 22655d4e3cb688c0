//! Figure 2: both modes over time, with a simulated query and with query 9; and what Figure 1 shows of them: memory
//! that is unused, and a query that needs more than its part.

use crate::Failure;
use crate::options::Options;
use crate::plot;
use crate::report::{self, Row};
use crate::run::{Mode, Plan, Query, Run, Sample, run};
use crate::source::Source;

/// Of the limit: more than a part of it.
const LARGER: f64 = 0.6;

pub(crate) fn figure(options: &Options, source: &Source<'_>) -> Result<(), Failure> {
    let mut runs = Vec::new();
    for (kind, query) in [("simulated query", Query::Simulated(0.5)), ("query 9", Query::Q9)] {
        for (name, mode) in [("cooperative", Mode::Cooperative), ("partitioned", Mode::Partitioned)]
        {
            let name = format!("{name}, {kind}");
            let outcome = run(options, source, Plan { query, ..Plan::new(name, mode, options) })?;
            report::print(&outcome);
            runs.push(outcome);
        }
    }
    // One query each: whether it finds memory does not depend on how long it runs.
    let short = Options { seconds: options.every, ..options.clone() };
    let larger = |mode| {
        let plan = Plan::new(format!("{mode:?}, {LARGER} limits"), mode, &short);
        run(&short, source, Plan { query: Query::Simulated(LARGER), ..plan })
    };
    let larger = [larger(Mode::Cooperative)?, larger(Mode::Partitioned)?];
    larger.iter().for_each(report::print);
    let mut rows = rows(&runs, options);
    rows.extend(traditional(&runs, &larger, options));
    for row in &rows {
        row.print();
    }
    let folder = options.folder();
    report::write_rows(&rows, &folder.join("cooperative.csv"))?;
    report::write_samples(&runs, &folder.join("cooperative_time.csv"))?;
    plot::over_time(&runs, &folder.join("cooperative.svg"))
}

/// Figure 1: what a part for each costs.
fn traditional(runs: &[Run], larger: &[Run; 2], options: &Options) -> [Row; 2] {
    let unused = |run: &Run| {
        let used = |sample: &Sample| sample.pool_mib + sample.temporary_mib;
        let mib = run.samples.iter().map(used).sum::<f64>() / run.samples.len() as f64;
        100.0 - 100.0 * mib / (options.limit.get() as f64 / f64::from(1 << 20))
    };
    let failed = |run: &Run| {
        let all = run.failed_queries + run.queries.len() as u64;
        100.0 * run.failed_queries as f64 / all as f64
    };
    let row = |work: &str, [value, baseline_value]: [f64; 2]| Row {
        work: work.to_owned(),
        value,
        unit: "%",
        baseline: "partitioned".to_owned(),
        baseline_value,
        invert: true,
        goal: "",
    };
    [
        row("memory unused", [unused(&runs[0]), unused(&runs[1])]),
        row(&format!("queries of {LARGER} limits that fail"), larger.each_ref().map(failed)),
    ]
}

/// What the project asks for.
fn rows(runs: &[Run], options: &Options) -> Vec<Row> {
    let [coop, part, coop_q9, part_q9] = runs else { unreachable!("four runs") };
    let row = |work: &str, value, unit, baseline_value, invert, goal| Row {
        work: work.to_owned(),
        value,
        unit,
        baseline: "partitioned".to_owned(),
        baseline_value,
        invert,
        goal,
    };
    let per_gb = |ms: f64| ms / (options.limit.get() as f64 / 2e9);
    let (a, b) = (coop.quiet(), part.quiet());
    let mut rows = vec![
        row("new orders without query", a.orders_per_s(), "1/s", b.orders_per_s(), false, ">= 1.7"),
        row(
            "faults per new order without query",
            a.faults_per_order(),
            "faults",
            b.faults_per_order(),
            true,
            ">= 2.22",
        ),
        row(
            "new orders during query",
            coop.during_queries().orders_per_s(),
            "1/s",
            part.during_queries().orders_per_s(),
            false,
            "",
        ),
        row(
            "new orders, all of the run",
            coop.all().orders_per_s(),
            "1/s",
            part.all().orders_per_s(),
            false,
            "",
        ),
        row(
            "allocation of half the limit",
            coop.median(|q| q.allocate_ms),
            "ms",
            part.median(|q| q.allocate_ms),
            true,
            "",
        ),
        row(
            "the same with its first touch",
            coop.median(|q| q.allocate_ms + q.touch_ms),
            "ms",
            part.median(|q| q.allocate_ms + q.touch_ms),
            true,
            "",
        ),
        row("query 9", coop_q9.median(|q| q.total_s), "s", part_q9.median(|q| q.total_s), true, ""),
        Row {
            baseline: "the paper".to_owned(),
            ..row(
                "allocation, per GB",
                per_gb(coop.median(|q| q.allocate_ms)),
                "ms",
                111.0,
                true,
                ">= 22",
            )
        },
    ];
    for run in runs {
        rows.push(Row {
            baseline: "limit".to_owned(),
            ..row(
                &format!("most resident: {}", run.name),
                run.resident_max_pct,
                "%",
                100.0,
                true,
                ">= 0.99",
            )
        });
    }
    if options.read_only {
        let written = coop.all().written as f64;
        rows.push(Row {
            baseline: "nothing".to_owned(),
            ..row("pages written by reading", written, "pages", 0.0, true, "nothing")
        });
    }
    rows
}
