//! What the buffer pool costs: hits, eviction, reads, temporary memory, and its B+-tree.
//!
//! ```text
//! cargo bench --bench pool                    # a few minutes; needs 1.5 GiB of disk and RAM
//! cargo bench --bench pool -- --dir /mnt/nvme # table file elsewhere
//! cargo bench --bench pool -- --test          # does it work?
//! ```
//! Every row has its baseline measured in the same run. Prints a table and writes
//! `target/figures/pool.csv` and `pool.svg`. It checks what it reads.

#[path = "../common/mod.rs"]
mod common;
mod cost;
mod hits;
mod policies;
mod report;
mod trees;

use clap::Parser;
use report::Row;
use std::path::PathBuf;
use std::process::ExitCode;

/// Costs of the buffer pool.
#[derive(Clone, Debug, Parser)]
pub(crate) struct Options {
    /// Directory of the table file.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Seconds for each timed row.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// MiB of the pool; the table of the read rows is eight times as large.
    #[arg(long, default_value_t = 128)]
    pool_mib: u64,
    /// Pages of the hit rows.
    #[arg(long, default_value_t = 100_000)]
    hit_pages: u64,
    /// Only rows that contain this.
    #[arg(long)]
    only: Option<String>,
    /// A small run that checks that everything works.
    #[arg(long)]
    test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let mut options = Options::parse();
    // `cargo test --benches` passes nothing and wants to be quick.
    if options.test || !options.bench {
        options.test = true;
        options.seconds = 0.02;
        options.pool_mib = 8;
        options.hit_pages = 1000;
    }
    let folder = if options.test { "target/figures/smoke" } else { "target/figures" };
    match run(&options).and_then(|rows| report::write(&rows, folder)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pool: {error}");
            ExitCode::FAILURE
        }
    }
}

type Failure = Box<dyn std::error::Error>;

fn run(options: &Options) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    type Part = fn(&Options) -> Result<Vec<Row>, Failure>;
    let parts: [(&str, Part); 10] = [
        ("hit", hits::rows),
        ("evict", cost::evictions),
        ("read", cost::reads),
        ("temporary 0", |options| cost::temporary(options, 0, 1)),
        ("temporary 50", |options| cost::temporary(options, 50, 1)),
        ("temporary 90", |options| cost::temporary(options, 90, 1)),
        ("temporary scattered", |options| cost::temporary(options, 0, 4)),
        ("write", cost::writes_of_reads),
        ("policy", policies::rows),
        ("tree", trees::rows),
    ];
    for (name, part) in parts {
        if options.only.as_ref().is_none_or(|only| name.contains(only.as_str())) {
            let made = part(options)?;
            made.iter().for_each(report::print);
            rows.extend(made);
        }
    }
    Ok(rows)
}
