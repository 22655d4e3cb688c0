//! Trace-driven comparison of the eviction policies with Belady's optimum.
//!
//! ```text
//! cargo bench --bench eviction                       # made traces, under a minute
//! cargo bench --bench eviction -- --full             # larger ones
//! cargo bench --bench eviction -- --trace FILE       # your own: one page number a line
//! cargo bench --bench eviction -- --record FILE sort lines      # the trace of a program, by valgrind
//! cargo bench --bench eviction -- --trace FILE --resident 32,64 # misses by MiB in memory
//! cargo bench --bench eviction -- --seed 7           # other random numbers
//! cargo bench --bench eviction -- --test             # does it work? (so does `cargo test`)
//! ```
//! Prints a table and writes `target/figures/eviction.csv`, `eviction_all.csv` and
//! `eviction.svg`. It checks its own answers: every touch is accounted for, no policy beats the
//! optimum, no cache exceeds its frames, first in first out without cooling equals a plain queue.

mod chunks;
mod contender;
mod record;
mod replay;
mod report;
mod s3fifo;
mod sim;
mod trace;

use contender::Contender;
use sim::Outcome;
use std::path::{Path, PathBuf};
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
    frames: u32,
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

/// Where the files of a smoke test go.
const SMOKE: &str = "target/figures/smoke";

struct Options {
    scale: Scale,
    trace: Option<PathBuf>,
    /// MiB in memory to play the trace with, instead of the usual shares.
    resident: Vec<f64>,
    /// MiB that the program had before its heap began.
    local: f64,
    /// Where the files go, below the crate; a smoke test does not replace real figures.
    folder: &'static str,
}

impl Options {
    fn read(&self, path: &Path) -> Result<Trace, String> {
        Trace::read(path, (self.local * 256.0) as usize)
    }
}

fn main() -> ExitCode {
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = args.iter().position(|arg| arg == "--record") {
        // `cargo bench` puts an argument of its own behind all.
        args.pop_if(|last| last == "--bench");
        return end(match &args.split_off(at)[..] {
            [_, to, command @ ..] if !command.is_empty() => record::record(command, Path::new(to)),
            _ => Err("--record needs a file and a command".to_owned()),
        });
    }
    end(parse(args).and_then(|options| {
        contender::check();
        record::check();
        if let (Some(path), false) = (&options.trace, options.resident.is_empty()) {
            let trace = options.read(path)?;
            return replay::run(&trace, &options.resident, options.folder);
        }
        let cases = play_all(&options)?;
        report::print(&cases);
        report::write(&cases, options.folder)?;
        if options.trace.is_some() {
            return Ok(());
        }
        // What `--resident` does, as long as it takes no time.
        if options.folder == SMOKE {
            let trace = Kind::BTree.make(options.scale, 0);
            replay::run(&trace, &[2.0], options.folder)?;
        }
        // A chunk has 512 pages.
        let scale = options.scale;
        let pages = scale.pages.max(10_000);
        let scale = Scale { pages, touches: scale.touches.max(5 * pages as usize), ..scale };
        replay::fresh(&Trace::of_fresh_data(scale), options.folder)
    }))
}

fn end(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("eviction: {message}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: Vec<String>) -> Result<Options, String> {
    const TINY: Scale = Scale { pages: 1_000, touches: 10_000, seed: 42 };
    const MADE: Scale = Scale { pages: 100_000, touches: 1_000_000, seed: 42 };
    // `cargo bench` passes `--bench`, `cargo test --benches` does not and wants to be quick.
    let is_bench = args.iter().any(|arg| arg == "--bench");
    args.retain(|arg| arg != "--bench");
    let (scale, folder) = if is_bench { (MADE, "target/figures") } else { (TINY, SMOKE) };
    let mut options = Options { scale, trace: None, resident: Vec::new(), local: 0.0, folder };
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
            "--resident" => {
                let wrong = |_| "--resident: MiB with commas between them".to_owned();
                let sizes = value()?;
                options.resident =
                    sizes.split(',').map(str::parse).collect::<Result<_, _>>().map_err(wrong)?;
            }
            "--local" => {
                let text = value()?;
                options.local = text.parse().map_err(|_| format!("--local: `{text}` MiB"))?;
            }
            other => return Err(format!("unknown option `{other}`; see benches/eviction/main.rs")),
        }
    }
    Ok(options)
}

fn play_all(options: &Options) -> Result<Vec<Case>, String> {
    let scale = options.scale;
    let mut cases = Vec::new();
    if let Some(path) = &options.trace {
        let trace = options.read(path)?;
        println!("{}: {} touches of {} pages", trace.name, trace.touches(), trace.size);
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
    let frames = frames(trace.size, cache_permille);
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
        frames,
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
        assert_eq!(accounted, trace.touches(), "{what}: {outcome:?}");
        assert_eq!(outcome.fresh, case.belady.fresh, "{what}: every page has one first touch");
        assert!(outcome.hits <= case.belady.hits, "{what}: {outcome:?} beats {:?}", case.belady);
        assert!(outcome.minor <= outcome.hits, "{what}: {outcome:?}");
    }
    for run in case.runs.iter().filter(|run| run.cooling_pct == 0) {
        assert_eq!(run.outcome.minor, 0, "{what}: nothing cools, but {} saw it", run.kind);
    }
    let queue = sim::plain_queue(trace, case.frames);
    assert_eq!(case.outcome(Contender::Fifo, 0), queue, "{what}: fifo is no plain queue");
}
