//! What a call through the C ABI costs, against the same call from Rust in the same run.
//!
//! `cargo bench -p farheap-ffi --bench ffi` prints a table and writes `target/figures/ffi.csv` and
//! `ffi.svg`; `-- --test` runs every row once, checks it and writes nothing. The C side is
//! `ffi.cpp`, compiled with g++ -O2 when the benchmark starts, and called through its own loops.

#[path = "../../tests/common/mod.rs"]
mod common;
mod report;
mod rows;

use report::Row;
use std::time::Instant;

/// Rounds of each row; the median counts.
const ROUNDS: usize = 15;

/// Calls in a round.
const CALLS: u64 = 200_000;

/// One side of a row: makes that many calls and returns a number to check.
type Side<'a> = dyn Fn(u64) -> u64 + 'a;

/// Nanoseconds for one call.
fn time(side: &Side<'_>, calls: u64) -> (f64, u64) {
    let began = Instant::now();
    let answer = side(calls);
    (began.elapsed().as_nanos() as f64 / calls as f64, answer)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Measures both sides in turns.
fn measure(row: &rows::Pair<'_>, is_test: bool) -> Row {
    let (rounds, calls) = if is_test { (1, 1000) } else { (ROUNDS, CALLS) };
    let (mut foreign, mut own) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (ns, answer) = time(&*row.foreign, calls);
        foreign.push(ns);
        let (ns, expected) = time(&*row.own, calls);
        own.push(ns);
        assert_eq!(answer, expected, "{}: both sides do the same", row.name);
    }
    Row { name: row.name, goal: row.goal, foreign_ns: median(foreign), own_ns: median(own) }
}

fn main() {
    let is_test = std::env::args().any(|argument| argument == "--test");
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| name.contains(w));
    let Some(library) = rows::Library::build() else { return };
    let Some(world) = rows::World::start() else { return };
    let pairs = rows::pairs(&library, &world);
    let pairs = pairs.iter().filter(|pair| is_wanted(pair.name));
    let rows: Vec<Row> = pairs.map(|pair| measure(pair, is_test)).collect();
    report::print(&rows);
    if !is_test && wanted.is_empty() {
        report::write(&rows).expect("target/figures can be written");
    }
}
