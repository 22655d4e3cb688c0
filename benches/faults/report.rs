//! What rows are made of.

use crate::table::print_heading;
pub(crate) use crate::table::{Row, median};
use crate::{Plan, Sample};
use std::fs;

/// What is read off a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Figure {
    /// Thousands of operations a second.
    Rate,
    /// Millions of operations a second.
    Accesses,
    /// Megabytes a second.
    Speed,
    /// Microseconds of processor time an operation.
    Cpu,
    /// Microseconds an operation.
    Time,
}

impl Figure {
    fn of(self, sample: &Sample) -> f64 {
        match self {
            Figure::Rate => sample.rate() / 1e3,
            Figure::Accesses | Figure::Speed => sample.rate() / 1e6,
            Figure::Cpu => sample.cpu_secs / sample.count * 1e6,
            Figure::Time => sample.secs / sample.count * 1e6,
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Figure::Rate => "k/s",
            Figure::Accesses => "M/s",
            Figure::Speed => "MB/s",
            Figure::Cpu => "us CPU",
            Figure::Time => "us",
        }
    }

    /// How many times better `value` is than `base`.
    fn ratio(self, value: f64, base: f64) -> f64 {
        match self {
            Figure::Rate | Figure::Accesses | Figure::Speed => value / base,
            Figure::Cpu | Figure::Time => base / value,
        }
    }
}

impl Row {
    /// Two sides that took turns.
    pub(crate) fn turns(
        work: impl Into<String>,
        figure: Figure,
        samples: &[Sample],
        baseline: impl Into<String>,
        base: &[Sample],
        goal: Option<f64>,
    ) -> Row {
        let values = samples.iter().map(|sample| figure.of(sample)).collect();
        let bases = base.iter().map(|sample| figure.of(sample)).collect();
        let work = (work.into(), figure.unit());
        Row::of_rounds(work, values, (baseline.into(), bases), |a, b| figure.ratio(a, b), goal)
    }

    /// A side against a published figure.
    pub(crate) fn published(
        work: impl Into<String>,
        figure: Figure,
        samples: &[Sample],
        baseline: impl Into<String>,
        base: f64,
        goal: Option<f64>,
    ) -> Row {
        let values: Vec<f64> = samples.iter().map(|sample| figure.of(sample)).collect();
        let bases = vec![base; values.len()];
        let work = (work.into(), figure.unit());
        Row::of_rounds(work, values, (baseline.into(), bases), |a, b| figure.ratio(a, b), goal)
    }

    /// One number of which less is better, against another.
    pub(crate) fn less(
        work: impl Into<String>,
        value: f64,
        unit: &'static str,
        baseline: impl Into<String>,
        baseline_value: f64,
        goal: Option<f64>,
    ) -> Row {
        let ratio =
            if value == 0.0 && baseline_value == 0.0 { 1.0 } else { baseline_value / value };
        let (work, baseline) = (work.into(), baseline.into());
        Row { work, value, unit, baseline, baseline_value, ratio, spread: (ratio, ratio), goal }
    }
}

pub(crate) fn heading(plan: &Plan) {
    let mib = |bytes: usize| bytes >> 20;
    println!(
        "{} MiB of data, cache {} MiB, {} rounds of {} ms a side, temporary files in {}",
        mib(plan.data),
        mib(plan.cache),
        plan.rounds,
        plan.round.as_millis(),
        plan.dir.display(),
    );
    println!("transparent huge pages: {}", huge_pages());
    print_heading();
}

/// What the kernel does without being asked.
pub(crate) fn huge_pages() -> String {
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    let text = text.unwrap_or_default();
    let chosen = text.split('[').nth(1).and_then(|rest| rest.split(']').next());
    chosen.unwrap_or("unknown").to_owned()
}
