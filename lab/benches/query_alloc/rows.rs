//! Rows of one rate.

use crate::engine::{Seen, mean, quantile};
use crate::operators::CLASSES;
use crate::sides::Side;
use crate::table::Row;
use crate::{Program, Samples, TENTH};

/// The time of jemalloc over ours that we want: local, and far.
const GOAL_LOCAL: f64 = 0.95;
const GOAL_FAR: f64 = 0.87;

type Of = fn(&Seen) -> f64;

const LATENCIES: [(&str, &str, Of); 4] = [
    ("latency p50", "ms", |seen| quantile(&seen.latencies, 0.5)),
    ("latency p99", "ms", |seen| quantile(&seen.latencies, 0.99)),
    ("wait, mean", "ms", |seen| mean(&seen.waits)),
    ("page faults", "", |seen| seen.page_faults as f64),
];

/// What is looked at of each allocator by itself, and what it is a part of.
const EACH: [(&str, &str, Of, &str, Of); 5] = [
    (
        "peak resident",
        "MiB",
        |seen| seen.of_memory(|at| at.resident).0,
        "requested",
        |seen| seen.of_memory(|at| at.requested).0,
    ),
    (
        "average resident",
        "MiB",
        |seen| seen.of_memory(|at| at.resident).1,
        "requested",
        |seen| seen.of_memory(|at| at.requested).1,
    ),
    ("resident afterwards", "MiB", Seen::after, "peak", |seen| seen.of_memory(|at| at.resident).0),
    (
        "least of the last third",
        "MiB",
        |seen| seen.least(0.67, 1.0),
        "of the second",
        |seen| seen.least(0.33, 0.67),
    ),
    ("mean wait", "ms", |seen| mean(&seen.waits), "latency", |seen| mean(&seen.latencies)),
];

/// What is looked at of each allocator beside jemalloc, and as the paper had it beside as it comes, round by round.
const BESIDE: [(&str, &str, Of); 4] = [
    ("time of", "s", |seen| seen.seconds),
    ("processor time of", "s", |seen| seen.processor_s),
    ("median latency of", "ms", |seen| quantile(&seen.latencies, 0.5)),
    ("mean resident of", "MiB", |seen| seen.of_memory(|at| at.resident).1),
];

/// The same, where memory that was freed lazily is looked at.
const LAZY: [(&str, &str, Of, &str, Of); 2] = [
    (
        "lazily freed",
        "MiB",
        |seen| seen.of_memory(|at| at.lazy).1,
        "resident",
        |seen| seen.of_memory(|at| at.resident).1,
    ),
    (
        "resident but for lazily freed",
        "MiB",
        |seen| seen.of_memory(|at| (at.resident - at.lazy).max(0.0)).1,
        "requested",
        |seen| seen.of_memory(|at| at.requested).1,
    ),
];

impl Samples {
    fn each(&self, of: Of) -> Vec<f64> {
        self.seen.iter().map(of).collect()
    }
}

/// Ours against each other allocator, each allocator by itself, and the sizes of what is allocated.
pub(crate) fn rows_of(rate: &str, all: &[Samples]) -> Vec<Row> {
    let mut rows = Vec::new();
    let less = |value: f64, base: f64| base / value.max(1e-3);
    let is_ours = |samples: &&Samples| samples.program.side().is_ours();
    for ours in all.iter().filter(is_ours) {
        for other in all.iter().filter(|samples| !is_ours(samples)) {
            for (what, unit, of) in LATENCIES {
                let name = (format!("rate {rate}, {what} {}", ours.program.name()), unit);
                let bases = (other.program.name(), other.each(of));
                let is_goal = what == "latency p50"
                    && other.program == Program::Usual(Side::Jemalloc)
                    && ["half", "one"].contains(&rate);
                let is_local = ours.program == Program::Usual(Side::Local);
                let goal = if is_local { GOAL_LOCAL } else { GOAL_FAR };
                let goal = is_goal.then_some(goal);
                rows.push(Row::of_rounds(name, ours.each(of), bases, less, goal));
            }
        }
    }
    let lazy: &[_] = if rate == TENTH { &LAZY } else { &[] };
    for samples in all {
        for (what, unit, of, base, of_base) in EACH.iter().chain(lazy) {
            let name = (format!("rate {rate}, {what} {}", samples.program.name()), *unit);
            let bases = ((*base).to_owned(), samples.each(*of_base));
            rows.push(Row::of_rounds(name, samples.each(*of), bases, less, None));
        }
    }
    for samples in all.iter().filter(|samples| !is_ours(samples)) {
        let base = match samples.program {
            Program::Usual(_) => Program::Usual(Side::Jemalloc),
            Program::Theirs(side) => Program::Usual(side),
        };
        let Some(base) = all.iter().find(|other| other.program == base) else { continue };
        for (what, unit, of) in &BESIDE {
            let name = (format!("rate {rate}, {what} {}", samples.program.name()), *unit);
            let bases = (base.program.name(), base.each(*of));
            rows.push(Row::of_rounds(name, samples.each(*of), bases, less, None));
        }
    }
    rows.extend(sizes(rate, all));
    rows
}

/// Shares of the classes of sizes, by number and by bytes. All allocators are asked for the same.
fn sizes(rate: &str, all: &[Samples]) -> Vec<Row> {
    let Some(seen) = all.first().and_then(|samples| samples.seen.first()) else {
        return Vec::new();
    };
    let share = |counts: &[u64], class: usize| {
        100.0 * counts[class] as f64 / counts.iter().sum::<u64>().max(1) as f64
    };
    let row = |class: usize| {
        let kib = |at: usize| CLASSES.get(at).map_or(String::new(), |end| format!("{}", end >> 10));
        let from = class.checked_sub(1).map_or("0".to_owned(), kib);
        let name = (format!("rate {rate}, allocations from {from} KiB to {}", kib(class)), "%");
        let by_bytes = ("by bytes".to_owned(), vec![share(&seen.class_bytes, class)]);
        let by_number = vec![share(&seen.classes, class)];
        Row::of_rounds(name, by_number, by_bytes, |number, bytes| number / bytes, None)
    };
    (0..=CLASSES.len()).map(row).collect()
}
