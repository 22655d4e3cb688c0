//! The command line.

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use farheap::ByteCount;
use std::path::PathBuf;

/// Transactions beside a query's temporary memory: one limit for both, or a part for each.
///
/// Without an experiment: Figure 2 of "Cooperative Memory Management for Table and Temporary Data"
/// (throughput and memory over time, cooperative and partitioned), once with a simulated query
/// that holds half the limit, once with CH-benCHmark's query 9. About three minutes.
#[derive(Clone, Debug, Parser)]
#[command(name = "cooperative", max_term_width = 100)]
pub(crate) struct Options {
    /// Warehouses; about 109 MB each.
    #[arg(long, default_value_t = 4)]
    pub(crate) warehouses: u64,
    /// Share of TPC-C's customers, items, stock and orders.
    #[arg(long, default_value_t = 1.0)]
    pub(crate) scale: f64,
    /// The limit, such as 256MiB: the transactions' hot set fits it, but not half of it.
    #[arg(long, default_value = "96MiB")]
    pub(crate) limit: ByteCount,
    /// Streams of transactions, each with a warehouse and a district as its home.
    #[arg(long, default_value_t = 8)]
    pub(crate) streams: u64,
    /// Threads of query 9.
    #[arg(long, default_value_t = 2)]
    pub(crate) query_threads: usize,
    /// Seconds of warm-up before each run.
    #[arg(long, default_value_t = 4.0)]
    pub(crate) warm_up: f64,
    /// Seconds of each run.
    #[arg(long, default_value_t = 18.0)]
    pub(crate) seconds: f64,
    /// Seconds from one query to the next.
    #[arg(long, default_value_t = 6.0)]
    pub(crate) every: f64,
    /// Seconds for which the simulated query holds its memory.
    #[arg(long, default_value_t = 2.0)]
    pub(crate) hold: f64,
    /// Seed of all random numbers.
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
    /// Directory of the table files, which have no names and are gone when this ends, however it
    /// ends [default: the directory for temporary files].
    #[arg(long)]
    pub(crate) dir: Option<PathBuf>,
    /// NewOrder and OrderStatus only, and reads in place of writes, as in the paper.
    #[arg(long)]
    pub(crate) read_only: bool,
    /// What to run instead of Figure 2; may be given several times.
    #[arg(long, value_enum)]
    pub(crate) experiment: Vec<Experiment>,
    /// The paper's scale, in all that is not given otherwise: 100 warehouses (10.7 GB of disk,
    /// twice), limit 2 GB, 64 streams, 60 s of warm-up, 120 s, a query every 30 s for 5 s. Takes
    /// half an hour; `--warm-up 30 --seconds 60 --every 20` take a quarter of an hour. Each run
    /// prints its line when it ends: what was run counts if the rest is interrupted.
    #[arg(long)]
    pub(crate) full: bool,
    /// A small run that checks that everything works, in seconds.
    #[arg(long)]
    pub(crate) test: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    pub(crate) bench: bool,
}

/// The paper's open questions, and what it measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Experiment {
    /// Figure 2.
    Figure,
    /// Reads only, against reads and writes, with and without a background cleaner.
    Writes,
    /// A floor for the tables protects the transactions: what the query pays.
    Floor,
    /// Replacement policies under cooperation.
    Policies,
    /// A host's result cache under the same limit.
    Caches,
    /// Temporary data of half, one and two limits.
    Spill,
    /// Reads and writes of a transaction without a query, by streams, with and without a cleaner.
    Victims,
    /// Temporary memory of half the limit, five times a second: the median and the tail.
    Tail,
    /// Transactions whose tables fit: what the pool costs beside memory that nothing looks after.
    Fits,
    /// All of them.
    All,
}

impl Options {
    pub(crate) fn read() -> Options {
        let matches = Options::command().get_matches();
        let mut options = Options::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        if options.full {
            let is_given =
                |name: &str| matches.value_source(name) == Some(ValueSource::CommandLine);
            options.enlarge(&is_given);
        }
        if options.test || !options.bench {
            options.test = true;
            (options.warehouses, options.scale, options.streams) = (2, 0.02, 3);
            options.limit = ByteCount::mib(4);
            (options.warm_up, options.seconds) = (0.1, 0.6);
            (options.every, options.hold) = (0.2, 0.1);
        }
        options
    }

    /// The paper's scale, but for what was given.
    fn enlarge(&mut self, is_given: &dyn Fn(&str) -> bool) {
        fn set<T>(option: &mut T, value: T, is_given: bool) {
            if !is_given {
                *option = value;
            }
        }
        set(&mut self.warehouses, 100, is_given("warehouses"));
        set(&mut self.limit, ByteCount::mib(1_907), is_given("limit"));
        set(&mut self.streams, 64, is_given("streams"));
        set(&mut self.warm_up, 60.0, is_given("warm_up"));
        set(&mut self.seconds, 120.0, is_given("seconds"));
        set(&mut self.every, 30.0, is_given("every"));
        set(&mut self.hold, 5.0, is_given("hold"));
    }

    /// Whether `experiment` was asked for.
    pub(crate) fn wants(&self, experiment: Experiment) -> bool {
        let asked = &self.experiment;
        match experiment {
            Experiment::Figure if asked.is_empty() => true,
            _ => self.test || asked.contains(&experiment) || asked.contains(&Experiment::All),
        }
    }

    /// Where figures go.
    pub(crate) fn folder(&self) -> PathBuf {
        let folder = if self.test { "target/figures/smoke" } else { "target/figures" };
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(folder)
    }
}
