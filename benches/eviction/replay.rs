//! Replays a trace in caches of given sizes: misses of the library's policy, of what knows more, of standby lines, and of
//! what chooses between fresh chunks and pages.

use crate::chunks::{self, Choice};
use crate::contender::Contender;
use crate::sim;
use crate::trace::Trace;
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// Lengths of the standby line, in parts of the frames; the library's is a sixteenth. Without one a victim leaves at
/// once.
const LINES: [Option<u32>; 4] = [None, Some(32), Some(16), Some(8)];

/// Prints a table and writes it to `eviction_replay.csv`.
pub(crate) fn run(trace: &Trace, resident_mib: &[f64], folder: &str) -> Result<(), String> {
    const PAGES_OF_MIB: f64 = 256.0;
    let mib = f64::from(trace.size) / PAGES_OF_MIB;
    println!("{}: {} touches, {mib:.1} MiB", trace.name, trace.touches());
    println!("Pages read, and in brackets soft faults, thousands:\n");
    print!("{:>12} {:>8} {:>8} {:>8}", "resident MiB", "fresh", "optimum", "LRU");
    LINES.into_iter().for_each(|line| print!(" {:>16}", name(line)));
    Choice::ALL.into_iter().for_each(|choice| print!(" {:>15}", choice.name()));
    println!();
    let mut text = "trace,resident_mib,policy,fresh,reads,soft_faults\n".to_owned();
    for &mib in resident_mib {
        let frames = ((mib * PAGES_OF_MIB) as u32).max(1);
        let mut row = |policy: &str, outcome: sim::Outcome| {
            let sim::Outcome { fresh, reads, minor, .. } = outcome;
            let (trace, policy) = (&trace.name, policy.replace(',', ";"));
            writeln!(text, "{trace},{mib},{policy},{fresh},{reads},{minor}")
                .expect("a string takes all that is written");
        };
        let (best, lru) = (sim::belady(trace, frames), sim::ideal_lru(trace, frames));
        row("optimum", best);
        row("exact LRU", lru);
        let thousands = |count: u64| count as f64 / 1e3;
        print!("{mib:>12} {:>8.1}", thousands(best.fresh));
        print!(" {:>8.1} {:>8.1}", thousands(best.reads), thousands(lru.reads));
        for line in LINES {
            let cooling = line.map_or(0, |part| frames / part);
            let outcome = sim::play(Contender::Tenure, trace, frames, cooling);
            assert!(outcome.reads >= best.reads, "{outcome:?} beats {best:?}");
            row(&name(line), outcome);
            print!(" {:>8.1} ({:>5.1})", thousands(outcome.reads), thousands(outcome.minor));
        }
        for choice in Choice::ALL {
            let chunks::Outcome { reads, soft, .. } = chunks::play(choice, trace, frames);
            row(
                &format!("with chunks: {}", choice.name()),
                sim::Outcome { fresh: best.fresh, hits: 0, minor: soft, reads },
            );
            print!(" {:>15.1}", thousands(reads));
        }
        println!();
    }
    write_csv("eviction_replay.csv", &text, folder)
}

/// Prints and writes what fresh chunks beside pages cost by what chooses between them.
pub(crate) fn fresh(traces: &[Trace], folder: &str) -> Result<(), String> {
    const CACHES_PERCENT: [u64; 3] = [13, 25, 50];
    println!(
        "Pages read by what makes room, thousands; chunks that left whole of those that were opened:\n"
    );
    print!("{:>20} {:>6}", "trace", "cache");
    Choice::ALL.into_iter().for_each(|choice| print!(" {:>26}", choice.name()));
    println!(" {:>9}", "optimum");
    let mut text = "trace,cache_pct,choice,reads,soft_faults,opened,left_whole\n".to_owned();
    for trace in traces {
        for percent in CACHES_PERCENT {
            let frames = (u64::from(trace.pages) * percent / 100) as u32;
            print!("{:>20} {percent:>5}%", trace.name);
            for choice in Choice::ALL {
                let found = chunks::play(choice, trace, frames);
                let chunks::Outcome { reads, soft, opened, left_whole } = found;
                let (name, choice) = (&trace.name, choice.name());
                writeln!(text, "{name},{percent},{choice},{reads},{soft},{opened},{left_whole}")
                    .expect("a string takes all that is written");
                print!(" {:>12.1} ({left_whole:>5}/{opened:>5})", reads as f64 / 1e3);
            }
            println!(" {:>9.1}", sim::belady(trace, frames).reads as f64 / 1e3);
        }
    }
    write_csv("eviction_fresh.csv", &text, folder)
}

fn write_csv(name: &str, text: &str, folder: &str) -> Result<(), String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let path = folder.join(name);
    let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, text));
    written.map_err(|error| format!("{}: {error}", path.display()))?;
    println!("\nwritten: {name} in {}", folder.display());
    Ok(())
}

fn name(line: Option<u32>) -> String {
    line.map_or("tenure, no line".to_owned(), |part| format!("line of 1/{part}"))
}
