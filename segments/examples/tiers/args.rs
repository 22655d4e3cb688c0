//! The command line: what may be asked for, checked before anything runs.

use crate::answers::QUERIES;
use crate::options::{Compare, Limit, cores, scale_factor};
use crate::tables::Unit;
use crate::tiers::{Definition, Rule};
use clap::Parser;
use farheap::ByteCount;
use std::path::PathBuf;
use std::time::Duration;

/// Threads beyond this only cost memory.
const THREADS_MAX: i64 = 1_024;
/// A day.
const SECONDS_MAX: u64 = 86_400;

/// TPC-H over columns whose chunks lie on tiers, and migrate while queries run.
///
/// Generates the columns that the queries read into local memory, answers the queries there, migrates
/// the columns to their tiers, and answers the queries again: every answer is checked against the local
/// one, at scale factor 1 against the published one too. With --migrate, threads then run queries while
/// the columns migrate back and forth.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "tiers",
    max_term_width = 100,
    after_help = "Exit status: 0 all answers right, 1 otherwise, 2 wrong use, 3 userfaultfd is not \
                  permitted (`farheap doctor` says how to permit it).",
    after_long_help = "Exit status:\n  \
          0  all answers right\n  \
          1  a wrong answer, or a migration that failed\n  \
          2  wrong use: an option, a tier's definition or its device\n  \
          3  userfaultfd is not permitted; `farheap doctor` says how to permit it\n\n\
        Examples:\n  \
          tiers                              all columns on a temporary file, 20 % of them resident\n  \
          tiers --tier l_extendedprice=ssd --tier orders=ssd\n  \
          tiers --define nvme=device:/dev/nvme1n1 --define zram=device:/dev/zram0 \
          --tier lineitem=nvme --tier orders=zram\n  \
          tiers --migrate --seconds 600 --threads 2 --rate 512MiB\n  \
          tiers --auto 20%                   the hottest chunks in local memory, a fifth of the data"
)]
pub(crate) struct Args {
    /// Size of the data: 1 is 6,001,215 rows of lineitem
    #[arg(short, long, value_name = "FACTOR", default_value = "1", value_parser = scale_factor)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) scale_factor: f64,

    /// Places columns: a column, a table or `all`, and a tier or `local`; may be given several times,
    /// later ones win [default: all columns on the first tier defined]
    #[arg(short = 't', long = "tier", value_name = "COLUMN=TIER")]
    pub(crate) rules: Vec<Rule>,

    /// A file with one COLUMN=TIER on each line, which --tier overrides; `#` begins a comment
    #[arg(long, value_name = "FILE")]
    pub(crate) tiers: Option<PathBuf>,

    /// Defines a tier by options as in FARHEAP_CONF, for example ssd=far_limit:64MiB; may be
    /// given several times [default: `ssd`, an unlinked temporary file]
    #[arg(short, long = "define", value_name = "TIER=OPTIONS")]
    pub(crate) definitions: Vec<Definition>,

    /// Resident memory of tiers that define no limit: a size (512MiB) or a share of the tier's data
    /// (25%, may exceed 100%) [default: 20% or the least that works]
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub(crate) cache: Option<Limit>,

    /// How often each query runs, on local memory and on tiers
    #[arg(short, long, value_name = "N", default_value_t = 3)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000), allow_negative_numbers = true)]
    pub(crate) runs: u32,

    /// Queries to run
    #[arg(short, long, value_name = "LIST", value_delimiter = ',', value_parser = query)]
    #[arg(default_value = "1,3,4,6,9,12,14,18")]
    pub(crate) queries: Vec<u8>,

    /// Whether to load into local memory first, to answer and time the queries there
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    pub(crate) local: Compare,

    /// Migrate the columns back and forth while queries run, for --seconds
    #[arg(short, long)]
    pub(crate) migrate: bool,

    /// Place the columns that lie on tiers by how often they are read, while queries run: the hottest ones in
    /// local memory of this size (64MiB) or share of the data (20%)
    #[arg(short, long, value_name = "BUDGET", conflicts_with = "migrate")]
    #[arg(allow_hyphen_values = true)]
    pub(crate) auto: Option<Limit>,

    /// What --auto places by itself
    #[arg(long, value_name = "UNIT", default_value = "chunk", requires = "auto")]
    pub(crate) auto_by: Unit,

    /// How long to migrate, or each part of --auto: without it, placing, with it
    #[arg(long, value_name = "N", default_value_t = 10)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    #[arg(allow_negative_numbers = true)]
    seconds: u64,

    /// Maximum number of bytes a second to migrate [default: no bound]
    #[arg(long, value_name = "SIZE", requires = "migrate", allow_hyphen_values = true)]
    pub(crate) rate: Option<ByteCount>,

    /// Threads that load, and that run queries while columns migrate [default: one per core]
    #[arg(long, value_name = "N", default_value_t = cores(), hide_default_value = true)]
    #[arg(value_parser = clap::value_parser!(i32).range(1..=THREADS_MAX))]
    #[arg(allow_negative_numbers = true)]
    pub(crate) threads: i32,

    /// Print the tiers' statistics at the end
    #[arg(long)]
    pub(crate) stats: bool,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
}

impl Args {
    /// How long to migrate.
    pub(crate) fn duration(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }
}

fn query(text: &str) -> Result<u8, String> {
    let number = text.trim().trim_start_matches(['Q', 'q']).parse();
    number.ok().filter(|number| QUERIES.contains(number)).ok_or_else(|| {
        let known = QUERIES.map(|query| query.to_string()).join(", ");
        format!("this program knows the queries {known}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(arguments: &[&str]) -> Result<Args, clap::Error> {
        Args::try_parse_from([&["tiers"], arguments].concat())
    }

    #[test]
    fn the_command_line_is_well_formed_and_the_default_is_every_query() {
        Args::command().debug_assert();
        let args = parse(&[]).expect("defaults are valid");
        assert_eq!(args.queries, QUERIES);
        assert!(!args.migrate && args.rules.is_empty() && args.definitions.is_empty());
    }

    #[test]
    fn senseless_values_are_usage_errors_that_name_the_option() {
        for [option, value] in [
            ["--scale-factor", "0"],
            ["--tier", "l_extendedprice"],
            ["--tier", "l_extendedprise=ssd"],
            ["--tier", "=ssd"],
            ["--tier", "all="],
            ["--define", "ssd"],
            ["--define", "local=far_limit:64MiB"],
            ["--define", "ssd=handlers:65"],
            ["--define", "ssd=colour:red"],
            ["--cache", "0%"],
            ["--cache", "-5MiB"],
            ["--runs", "0"],
            ["--queries", "2"],
            ["--seconds", "0"],
            ["--rate", "fast"],
            ["--threads", "0"],
            ["--local", "maybe"],
        ] {
            let error = parse(&["--migrate", option, value]).expect_err(value);
            assert_eq!(error.exit_code(), 2, "{option} {value}");
            assert!(error.to_string().contains(option), "{error}");
        }
        for arguments in
            [&["--auto", "0%"][..], &["--auto", "10%", "--migrate"], &["--auto-by", "chunk"]]
        {
            let error = parse(arguments).expect_err("senseless");
            assert!(error.to_string().contains("--auto"), "{error}");
        }
    }
}
