//! Transactions beside a query's temporary memory: one limit for both, or a part for each.
//!
//! ```text
//! cargo bench -p farheap-lab --bench cooperative                            # Figure 2, in about three minutes
//! cargo bench -p farheap-lab --bench cooperative -- --read-only             # as the paper: no real updates
//! cargo bench -p farheap-lab --bench cooperative -- --experiment floor      # one of the open questions
//! cargo bench -p farheap-lab --bench cooperative -- --full --seconds 60     # the paper's scale, but shorter
//! cargo bench -p farheap-lab --bench cooperative -- --help
//! cargo bench -p farheap-lab --bench cooperative -- --test                  # does it work?
//! ```
//! CH-benCHmark's tables (columns in data pages, B+-trees for keys), TPC-C's transactions, a
//! simulated query and query 9. After each run TPC-C's consistency conditions are checked, that no
//! order is lost, and query 9 against a naive computation. `book/src/measurements/cooperative.md` has the
//! results; figures go to `target/figures/cooperative*.csv` and `.svg`.

mod cache;
mod check;
#[path = "../../../benches/common/mod.rs"]
mod common;
mod device;
mod experiments;
mod figure;
mod load;
mod oltp;
mod options;
mod plot;
mod q9;
mod random;
mod report;
mod resident;
mod run;
mod schema;
mod source;
mod table;
mod unmap;

use options::{Experiment, Options};
use source::Source;
use std::process::ExitCode;

pub(crate) type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    match work(&Options::read()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cooperative: {error}");
            ExitCode::FAILURE
        }
    }
}

fn work(options: &Options) -> Result<(), Failure> {
    std::fs::create_dir_all(options.folder())?;
    let source = Source::load(options)?;
    let all = [
        (Experiment::Figure, figure::figure as fn(&Options, &Source<'_>) -> Result<(), Failure>),
        (Experiment::Writes, experiments::writes),
        (Experiment::Floor, experiments::floor),
        (Experiment::Policies, experiments::policies),
        (Experiment::Caches, experiments::caches),
        (Experiment::Spill, experiments::spill),
        (Experiment::Victims, experiments::victims),
        (Experiment::Tail, experiments::tail),
        (Experiment::Fits, experiments::fits),
    ];
    for (experiment, run) in all {
        if options.wants(experiment) {
            run(options, &source)?;
        }
    }
    Ok(())
}
