//! Nearest neighbours in a graph larger than the memory it may use, under every placement.
//!
//! ```text
//! cargo run --release -p farheap-collections --example hnsw
//! cargo run --release -p farheap-collections --example hnsw -- --vectors 50000 --dimensions 128 --local 25
//! ```
//! Builds one index, copies it into a collective for each placement and size of local memory, and
//! runs the same queries on each: pages brought in per query, latency, recall. All placements must
//! find the same, and nearly what looking at all vectors finds. `--help` has the options.
//!
//! `index` is the graph, a container on sub-allocators; `data` makes vectors and knows the right answers,
//! `measure` builds, places and searches, `report` tells.

#[cfg(test)]
#[path = "../../../tests/common/mod.rs"]
mod common;
mod data;
mod index;
mod measure;
mod report;
#[cfg(test)]
mod tests;

use clap::Parser;
use data::Data;
use farheap::{ByteCount, Error};
use index::GraphStrategy;
use measure::{Point, Setting};
use std::path::PathBuf;
use std::process::ExitCode;

/// Least share of the true neighbours that a healthy graph finds with the default width.
const RECALL_MIN: f64 = 0.8;

/// A graph index (HNSW) in far memory: what the placement of its records is worth.
///
/// Half of the local memory is purely local for the placements that use it, the rest is page
/// cache; the others have all of it as page cache. The index's table of addresses, 16 bytes a
/// vector, is local for all of them and counted for none.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "hnsw",
    max_term_width = 100,
    after_help = "Exit status: 0 all placements found the same and recall is sound, 1 otherwise, \
                  2 wrong use, 3 userfaultfd is not permitted (`farheap doctor` says how to permit \
                  it).\n\n\
                  Writes target/figures/hnsw.csv and target/figures/hnsw.svg."
)]
pub(crate) struct Args {
    /// Vectors in the index.
    #[arg(short = 'n', long, default_value_t = 150_000, value_parser = clap::value_parser!(u32).range(100..))]
    pub(crate) vectors: u32,
    /// Dimensions of a vector.
    #[arg(short, long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) dimensions: u16,
    /// Queries measured at each point; as many others run before to fill the page cache.
    #[arg(short, long, default_value_t = 1_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) queries: u32,
    /// Neighbours that a query asks for.
    #[arg(short = 'k', long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=100))]
    pub(crate) count: u16,
    /// Candidates that a search keeps.
    #[arg(short, long, default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) width: u16,
    /// Links of a record in each layer, twice as many in the lowest.
    #[arg(short = 'm', long, default_value_t = 12, value_parser = clap::value_parser!(u16).range(2..=128))]
    pub(crate) links: u16,
    /// Local memory in percent of the records; at least 8 MiB of it is page cache.
    #[arg(short, long, value_delimiter = ',', default_values_t = [20, 35, 50])]
    pub(crate) local: Vec<u32>,
    /// Skewness of the clusters asked for: 0 is uniform.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) skew: f64,
    /// Page size.
    #[arg(short, long, default_value = "4KiB")]
    pub(crate) page: ByteCount,
    /// Where cold pages go: a regular file or a block device, whose contents are lost [default:
    /// memory]
    #[arg(long, value_name = "PATH")]
    pub(crate) device: Option<PathBuf>,
    /// Seed of vectors, queries and layers.
    #[arg(long, default_value_t = 42)]
    pub(crate) seed: u64,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            problems.iter().for_each(|problem| eprintln!("hnsw: {problem}"));
            ExitCode::from(1)
        }
        Err(error) => {
            eprintln!("hnsw: {error}");
            let status = match error.downcast_ref::<Error>() {
                Some(Error::UffdUnavailable { .. }) => 3,
                Some(Error::Config { .. } | Error::Device { .. } | Error::LimitTooSmall { .. }) => {
                    2
                }
                _ => 1,
            };
            ExitCode::from(status)
        }
    }
}

/// Builds, measures and tells; what is wrong with the answers, if anything.
fn run(args: &Args) -> Result<Vec<String>, Box<dyn std::error::Error>> {
    let data = Data::new(args);
    let built = measure::build(args, &data)?;
    let mut points: Vec<Point> = Vec::new();
    for percent in &args.local {
        for strategy in GraphStrategy::ALL {
            let setting = Setting { strategy, percent: *percent };
            let point = measure::point(args, &data, &built, setting)?;
            eprintln!("{}", report::line(&point));
            points.push(point);
        }
    }
    report::print(args, &built, &points);
    report::write(args, &points)?;
    let mut problems = Vec::new();
    let same = points.iter().all(|point| point.answers == points[0].answers);
    if !same {
        problems.push("placements of the same graph found different neighbours".to_owned());
    }
    let sound = RECALL_MIN.min(f64::from(args.width) / 64.0 * RECALL_MIN);
    if let Some(point) = points.iter().find(|point| point.recall < sound) {
        problems.push(format!("recall {:.3} is below {sound:.2}", point.recall));
    }
    Ok(problems)
}
