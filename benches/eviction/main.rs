//! Trace-driven comparison of the eviction policies with Belady's optimum.
//!
//! ```text
//! cargo bench --bench eviction                       # made traces, under a minute
//! cargo bench --bench eviction -- --full             # larger ones
//! cargo bench --bench eviction -- --trace FILE       # your own: one page number a line
//! cargo bench --bench eviction -- --seed 7           # other random numbers
//! cargo bench --bench eviction -- --test             # does it work? (so does `cargo test`)
//! ```
//! Prints a table and writes `target/figures/eviction.csv`, `eviction_all.csv` and
//! `eviction.svg`. It checks its own answers: every touch is accounted for, no policy beats the
//! optimum, no cache exceeds its frames, first in first out without cooling equals a plain queue.

mod contender;
mod report;
mod s3fifo;
mod sim;
mod trace;

use contender::Contender;
use sim::Outcome;
use std::path::PathBuf;
use std::process::ExitCode;
use trace::{Kind, Scale, Trace};

/// Cache sizes, in tenths of a percent of the pages.
const CACHES_PERMILLE: [u32; 4] = [50, 125, 250, 500];

/// Shares of the frames that cool, in percent.
const COOLING_PCTS: [u32; 4] = [0, 1, 5, 10];

/// The share that the table shows, in percent.
const COOLING_PCT: u32 = 1;

/// One policy in one cache on one trace.
pub(crate) struct Run {
    pub(crate) kind: Contender,
    pub(crate) cooling_pct: u32,
    pub(crate) outcome: Outcome,
}

impl Run {
    fn new(kind: Contender, cooling_pct: u32, outcome: Outcome) -> Run {
        Run { kind, cooling_pct, outcome }
    }
}

/// Everything played on one trace in one cache.
pub(crate) struct Case {
    pub(crate) trace: String,
    pub(crate) cache_permille: u32,
    pub(crate) belady: Outcome,
    pub(crate) lru: Outcome,
    pub(crate) clock: Outcome,
    pub(crate) runs: Vec<Run>,
}

impl Case {
    fn cache_pct(&self) -> f64 {
        f64::from(self.cache_permille) / 10.0
    }

    /// What a policy did with this share of cooling frames.
    pub(crate) fn outcome(&self, kind: Contender, cooling_pct: u32) -> Outcome {
        let found = self.runs.iter().find(|r| r.kind == kind && r.cooling_pct == cooling_pct);
        found.expect("every policy was played with every share").outcome
    }
}

struct Options {
    scale: Scale,
    trace: Option<PathBuf>,
    /// Where the files go, below the crate; a smoke test does not replace real figures.
    folder: &'static str,
}

fn main() -> ExitCode {
    let result = parse(std::env::args().skip(1)).and_then(|options| {
        contender::check();
        let cases = play_all(&options)?;
        report::print(&cases);
        report::write(&cases, options.folder)
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("eviction: {message}");
            ExitCode::FAILURE
        }
    }
}

fn parse(args: impl Iterator<Item = String>) -> Result<Options, String> {
    const TINY: Scale = Scale { pages: 1_000, touches: 10_000, seed: 42 };
    const MADE: Scale = Scale { pages: 100_000, touches: 1_000_000, seed: 42 };
    const SMOKE: &str = "target/figures/smoke";
    // `cargo bench` passes `--bench`, `cargo test --benches` does not and wants to be quick.
    let mut args: Vec<String> = args.collect();
    let is_bench = args.iter().any(|arg| arg == "--bench");
    args.retain(|arg| arg != "--bench");
    let mut options = if is_bench {
        Options { scale: MADE, trace: None, folder: "target/figures" }
    } else {
        Options { scale: TINY, trace: None, folder: SMOKE }
    };
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let seed = options.scale.seed;
        match arg.as_str() {
            "--test" => (options.scale, options.folder) = (Scale { seed, ..TINY }, SMOKE),
            "--full" => options.scale = Scale { seed, touches: 5_000_000, ..MADE },
            "--seed" => {
                let text = value()?;
                options.scale.seed =
                    text.parse().map_err(|_| format!("--seed: `{text}` is not a number"))?;
            }
            "--trace" => options.trace = Some(value()?.into()),
            other => return Err(format!("unknown option `{other}`; see benches/eviction/main.rs")),
        }
    }
    Ok(options)
}

fn play_all(options: &Options) -> Result<Vec<Case>, String> {
    let scale = options.scale;
    let mut cases = Vec::new();
    if let Some(path) = &options.trace {
        let trace = Trace::read(path)?;
        println!("{}: {} touches of {} pages", trace.name, trace.touches.len(), trace.pages);
        cases.extend(CACHES_PERMILLE.map(|permille| play_case(&trace, permille)));
        return Ok(cases);
    }
    println!("{} touches of {} pages a trace, seed {}", scale.touches, scale.pages, scale.seed);
    for kind in Kind::ALL {
        for permille in CACHES_PERMILLE {
            cases.push(play_case(&kind.make(scale, frames(scale.pages, permille)), permille));
        }
    }
    Ok(cases)
}

/// Frames of a cache of `permille` of `pages`.
fn frames(pages: u32, permille: u32) -> u32 {
    (u64::from(pages) * u64::from(permille) / 1_000).max(1) as u32
}

fn play_case(trace: &Trace, cache_permille: u32) -> Case {
    let frames = frames(trace.pages, cache_permille);
    let mut runs = Vec::new();
    for kind in Contender::ALL {
        for cooling_pct in COOLING_PCTS {
            let outcome = sim::play(kind, trace, frames, frames * cooling_pct / 100);
            runs.push(Run::new(kind, cooling_pct, outcome));
        }
    }
    let case = Case {
        trace: trace.name.clone(),
        cache_permille,
        belady: sim::belady(trace, frames),
        lru: sim::ideal_lru(trace, frames),
        clock: sim::ideal_clock(trace, frames),
        runs,
    };
    check(&case, trace);
    case
}

/// Checks what must hold whatever the figures are.
fn check(case: &Case, trace: &Trace) {
    let what = format!("{}, cache {} permille", case.trace, case.cache_permille);
    let policies = case.runs.iter().map(|run| run.outcome);
    for outcome in policies.chain([case.belady, case.lru, case.clock]) {
        let accounted = outcome.fresh + outcome.hits + outcome.reads;
        assert_eq!(accounted, trace.touches.len() as u64, "{what}: {outcome:?}");
        assert_eq!(outcome.fresh, case.belady.fresh, "{what}: every page has one first touch");
        assert!(outcome.hits <= case.belady.hits, "{what}: {outcome:?} beats {:?}", case.belady);
        assert!(outcome.minor <= outcome.hits, "{what}: {outcome:?}");
    }
    for run in case.runs.iter().filter(|run| run.cooling_pct == 0) {
        assert_eq!(run.outcome.minor, 0, "{what}: nothing cools, but {} saw it", run.kind);
    }
    let queue = sim::plain_queue(trace, frames(trace.pages, case.cache_permille));
    assert_eq!(case.outcome(Contender::Fifo, 0), queue, "{what}: fifo is no plain queue");
}
