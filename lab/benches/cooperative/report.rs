//! Tables and CSV files.

use crate::Failure;
use crate::run::Run;
use std::fmt::Write;
use std::path::Path;

/// A value beside its baseline; the ratio is turned so that higher is better.
pub(crate) struct Row {
    pub(crate) work: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    pub(crate) baseline: String,
    pub(crate) baseline_value: f64,
    /// Lower values are better.
    pub(crate) invert: bool,
    pub(crate) goal: &'static str,
}

impl Row {
    fn ratio(&self) -> f64 {
        let ratio = self.value / self.baseline_value;
        if self.invert { 1.0 / ratio } else { ratio }
    }

    pub(crate) fn print(&self) {
        let Row { work, value, unit, baseline, baseline_value, .. } = self;
        let (ratio, goal) = (self.ratio(), self.goal);
        println!(
            "{work:<46} {value:>10.2} {unit:<7} {baseline:<14} {baseline_value:>10.2}  \
             {ratio:>8.2}  {goal}"
        );
    }
}

pub(crate) fn write_rows(rows: &[Row], path: &Path) -> Result<(), Failure> {
    let mut csv = String::from("work,value,unit,baseline,baseline_value,ratio,goal\n");
    for row in rows {
        let Row { work, value, unit, baseline, baseline_value, goal, .. } = row;
        let work = work.replace(',', ";");
        let ratio = row.ratio();
        writeln!(csv, "{work},{value:.4},{unit},{baseline},{baseline_value:.4},{ratio:.4},{goal}")?;
    }
    Ok(std::fs::write(path, csv)?)
}

/// A line for each run.
pub(crate) fn print(run: &Run) {
    let (quiet, query, all) = (run.quiet(), run.during_queries(), run.all());
    println!(
        "{:<34} new orders/s {:>6.0} all, {:>6.0} without query, {:>6.0} during; faults per new \
         order {:>5.2} without, {:>5.2} during; {:>6.0} pages written/s; resident {:.1} % used \
         {:.1} %",
        run.name,
        all.orders_per_s(),
        quiet.orders_per_s(),
        query.orders_per_s(),
        quiet.faults_per_order(),
        query.faults_per_order(),
        all.written as f64 / all.seconds,
        run.resident_max_pct,
        run.used_max_pct,
    );
    let times: Vec<String> = run
        .queries
        .iter()
        .map(|q| {
            let spilled = if q.spilled { " spilled" } else { "" };
            if q.allocate_ms.is_nan() {
                format!("{:.2} s{spilled}", q.total_s)
            } else {
                format!("{:.2} + {:.1} + {:.1} ms{spilled}", q.allocate_ms, q.touch_ms, q.read_ms)
            }
        })
        .collect();
    if !times.is_empty() || run.failed_queries > 0 {
        println!("{:<34} queries: {}; {} failed", "", times.join(", "), run.failed_queries);
    }
}

pub(crate) fn write_samples(runs: &[Run], path: &Path) -> Result<(), Failure> {
    let mut csv = String::from(
        "run,seconds,orders_per_s,faults_per_s,written_per_s,pool_mib,temporary_mib,spilled_mib,\
         other_mib,during_query\n",
    );
    for run in runs {
        for s in &run.samples {
            let name = run.name.replace(',', ";");
            let per_s = |count: u64| count as f64 / s.length;
            let (orders, faults, written) = (per_s(s.orders), per_s(s.faults), per_s(s.written));
            writeln!(
                csv,
                "{name},{:.3},{orders:.1},{faults:.1},{written:.1},{:.2},{:.2},{:.2},{:.2},{}",
                s.seconds, s.pool_mib, s.temporary_mib, s.spilled_mib, s.beside_mib, s.during_query
            )?;
        }
    }
    Ok(std::fs::write(path, csv)?)
}

/// A line for each run.
pub(crate) fn write_runs(runs: &[Run], path: &Path) -> Result<(), Failure> {
    let mut csv = String::from(
        "run,orders_per_s,orders_per_s_without_query,orders_per_s_during,faults_without,\
         faults_during,written_per_s,allocate_ms,touch_ms,read_ms,query_s,spilled,failed,resident_max_pct\n",
    );
    for run in runs {
        let (quiet, query, all) = (run.quiet(), run.during_queries(), run.all());
        let spilled = run.queries.iter().filter(|q| q.spilled).count();
        writeln!(
            csv,
            "{},{:.1},{:.1},{:.1},{:.3},{:.3},{:.0},{:.3},{:.3},{:.3},{:.3},{spilled},{},{:.2}",
            run.name.replace(',', ";"),
            all.orders_per_s(),
            quiet.orders_per_s(),
            query.orders_per_s(),
            quiet.faults_per_order(),
            query.faults_per_order(),
            all.written as f64 / all.seconds,
            run.median(|q| q.allocate_ms),
            run.median(|q| q.touch_ms),
            run.median(|q| q.read_ms),
            run.median(|q| q.total_s),
            run.failed_queries,
            run.resident_max_pct,
        )?;
    }
    Ok(std::fs::write(path, csv)?)
}
