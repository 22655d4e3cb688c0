//! What a call through the C ABI costs, against the same call from Rust in the same run.
//!
//! `cargo bench -p farheap-ffi --bench ffi` prints a table and writes `target/figures/ffi.csv` and
//! `ffi.svg`; `-- --test` runs every row once, checks it and writes nothing. The C side is
//! `side.cpp`, compiled with g++ -O2 when the benchmark starts, and called through its own loops; in
//! three ways, because thread-local data costs more in a shared library ([`sides::Way`]). The library is
//! the one that cargo has built with the benchmark, by the same profile as the Rust side.
//! `-- --loop NAME WAY CALLS` runs one loop alone, for `perf stat`; WAY is `rust` for the Rust side.

#[path = "../../tests/common/mod.rs"]
mod common;
mod report;
mod rows;
mod sides;

use report::Row;
use sides::{Sides, Way};
use std::time::Instant;

/// Rounds of each row; the median counts.
const ROUNDS: usize = 15;

/// Calls in a round.
const CALLS: u64 = 200_000;

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Measures the Rust side: nanoseconds for one call, and the answer.
fn time(row: &rows::Pair<'_>, calls: u64) -> (f64, u64) {
    let began = Instant::now();
    let answer = (row.own)(calls);
    (began.elapsed().as_nanos() as f64 / calls as f64, answer)
}

/// Measures all sides in turns.
fn measure(row: &rows::Pair<'_>, sides: &mut Sides, is_test: bool) -> Row {
    let (rounds, calls) = if is_test { (1, 1000) } else { (ROUNDS, CALLS) };
    let (mut foreign, mut own) = ([const { Vec::new() }; Way::ALL.len()], Vec::new());
    for _ in 0..rounds {
        let (ns, expected) = time(row, calls);
        own.push(ns);
        for (times, way) in foreign.iter_mut().zip(Way::ALL) {
            let (ns, answer) = sides.run(way, row.foreign, calls);
            times.push(ns);
            assert_eq!(answer, expected, "{}: all sides do the same", row.name);
        }
    }
    Row { name: row.name, goal: row.goal, foreign_ns: foreign.map(median), own_ns: median(own) }
}

/// Runs one loop of one side.
fn run_alone(pairs: &[rows::Pair<'_>], sides: &mut Sides, wanted: &[String]) {
    let [name, way, calls] = wanted else { panic!("--loop NAME WAY CALLS") };
    let row = pairs.iter().find(|row| row.foreign == name).expect("a loop of side.cpp");
    let calls = calls.parse().expect("a number of calls");
    let way = Way::ALL.into_iter().find(|known| known.name() == way);
    let (ns, _) = way.map_or_else(|| time(row, calls), |way| sides.run(way, name, calls));
    println!("{name}: {ns:.2} ns");
}

fn main() {
    let is = |option: &str| std::env::args().any(|argument| argument == option);
    let is_test = is("--test");
    let wanted: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|w| name.contains(w));
    let Some(mut sides) = Sides::start() else { return };
    let Some(world) = rows::World::start() else { return };
    let pairs = rows::pairs(&world);
    if is("--loop") {
        return run_alone(&pairs, &mut sides, &wanted);
    }
    let pairs = pairs.iter().filter(|pair| is_wanted(pair.name));
    let rows: Vec<Row> = pairs.map(|pair| measure(pair, &mut sides, is_test)).collect();
    report::print(&rows);
    if !is_test && wanted.is_empty() {
        report::write(&rows).expect("target/figures can be written");
    }
}
