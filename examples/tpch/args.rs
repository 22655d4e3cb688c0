//! The command line: what may be asked for, checked before anything runs.

use crate::answers::Query;
use crate::options::{Compare, Limit, cores, scale_factor};
use clap::Parser;
use std::path::PathBuf;

/// Threads beyond this only cost memory.
const THREADS_MAX: i64 = 1_024;

/// TPC-H Q1 and Q6 over a lineitem table larger than the memory it may use.
///
/// Generates the seven columns of lineitem that the queries read into far memory, runs the queries
/// several times while a limit on resident far memory holds, checks every answer, and compares the
/// times with the same columns in local memory. The resident size is sampled from /proc, not asked
/// of the library.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "tpch",
    max_term_width = 100,
    after_help = "Exit status: 0 all answers right and the limit held, 1 otherwise, 2 wrong use, \
                  3 userfaultfd is not permitted (`farheap doctor` says how to permit it).\n\n\
                  FARHEAP_CONF, as in FARHEAP_CONF=far_limit:512MiB,device:/dev/nvme1n1, is \
                  the configuration to start from; options override it.",
    after_long_help = "Exit status:\n  \
          0  all answers right and the limit held\n  \
          1  a wrong answer, or the limit did not hold\n  \
          2  wrong use: an option, FARHEAP_CONF or the device\n  \
          3  userfaultfd is not permitted; `farheap doctor` says how to permit it\n\n\
        Environment:\n  \
          FARHEAP_CONF  the configuration to start from, as in\n                \
          far_limit:512MiB,device:/dev/nvme1n1; options override it\n\n\
        Examples:\n  \
          tpch                               scale factor 1, a quarter of the data resident\n  \
          tpch -s 10 --limit 1GiB --device /dev/nvme1n1\n  \
          tpch --limit 200%                  everything fits: what does far memory cost then?"
)]
pub(crate) struct Args {
    /// Size of the data: 1 is 6,001,215 rows, 218 MiB of columns
    #[arg(short, long, value_name = "FACTOR", default_value = "1", value_parser = scale_factor)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) scale_factor: f64,

    /// Far memory that may be resident: a size (512MiB) or a share of the data (25%, may exceed
    /// 100%) [default: the limit of FARHEAP_CONF, else 25% or the least that works]
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) limit: Option<Limit>,

    /// Where cold pages go: a regular file or a block device, whose contents are lost [default: an
    /// unlinked temporary file]
    #[arg(short, long, value_name = "PATH")]
    pub(crate) device: Option<PathBuf>,

    /// How often each query runs
    #[arg(short, long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000), allow_negative_numbers = true)]
    pub(crate) runs: u32,

    /// Threads that load and scan, each its own part of the table [default: one per core]
    #[arg(short, long, value_name = "N", default_value_t = cores(), hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(i32).range(1..=THREADS_MAX))]
    #[arg(allow_negative_numbers = true)]
    pub(crate) threads: i32,

    /// Queries to run
    #[arg(short, long, value_name = "LIST", default_value = "1,6", value_delimiter = ',')]
    #[arg(value_parser = query)]
    pub(crate) queries: Vec<Query>,

    /// Evict all far memory before each run
    #[arg(long)]
    pub(crate) cold: bool,

    /// Whether to also hold the columns in local memory, to compare times
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) local: Compare,

    /// Print the far heap's statistics and latencies at the end
    #[arg(long)]
    pub(crate) stats: bool,

    /// Show no progress while loading
    #[arg(long)]
    pub(crate) quiet: bool,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Write the table as comma-separated values
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
}

fn query(text: &str) -> Result<Query, String> {
    match text.trim().trim_start_matches(['Q', 'q']) {
        "1" => Ok(Query::Q1),
        "6" => Ok(Query::Q6),
        _ => Err("this program knows the queries 1 and 6".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from([&["tpch"], arguments].concat())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Args::command().debug_assert();
    }

    #[test]
    fn nothing_asked_means_scale_factor_1_both_queries_and_a_comparison_if_it_fits() {
        let args = parse(&[]).expect("defaults are valid");
        assert_eq!(args.scale_factor, 1.0);
        assert_eq!(args.queries, [Query::Q1, Query::Q6]);
        assert_eq!((args.limit, args.runs, args.local), (None, 3, Compare::Auto));
        assert!(args.threads >= 1);
    }

    #[test]
    fn senseless_values_are_usage_errors_that_name_the_option() {
        for [option, value] in [
            ["--scale-factor", "0"],
            ["--scale-factor", "-1"],
            ["--scale-factor", "NaN"],
            ["--scale-factor", "inf"],
            ["--scale-factor", "1001"],
            ["--scale-factor", "ten"],
            ["--limit", "0"],
            ["--limit", "0%"],
            ["--limit", "-5%"],
            ["--limit", "NaN%"],
            ["--limit", "-5MiB"],
            ["--limit", "a quarter"],
            ["--runs", "0"],
            ["--runs", "-1"],
            ["--threads", "0"],
            ["--queries", "2"],
            ["--local", "maybe"],
        ] {
            let error = parse(&[option, value]).expect_err(value);
            assert_eq!(error.exit_code(), 2, "{option} {value}");
            assert!(error.to_string().contains(option), "{error}");
        }
    }
}
