//! Building the index, placing copies of it, and running queries on them.

use crate::Args;
use crate::data::Data;
use crate::index::{FarGraphIndex, GraphConfig, GraphStrategy};
use farheap::ByteCount;
use farheap::region::{FaultMode, RegionConfig};
use farheap::store::{BlockStore, MemStore, Store};
use farheap_collections::Links;
use farheap_collections::sub::{Collective, CollectiveConfig};
use indicatif::{ProgressBar, ProgressStyle};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Watched searches before records are placed by them, for each query measured.
const WATCHED_PER_QUERY: usize = 1;

/// Candidates that an insert looks at in each layer.
const BUILD_WIDTH: usize = 80;

/// The index as it was built, with room for all of it.
pub(crate) struct Built {
    pub(crate) index: FarGraphIndex,
    pub(crate) took: Duration,
    pub(crate) bytes: u64,
}

/// What is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) strategy: GraphStrategy,
    /// Local memory, percent of the records' bytes.
    pub(crate) percent: u32,
}

/// What came out.
pub(crate) struct Point {
    pub(crate) setting: Setting,
    pub(crate) cache: ByteCount,
    pub(crate) purely_local: ByteCount,
    /// Pages read from the store, per query.
    pub(crate) pages_per_query: f64,
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) recall: f64,
    pub(crate) links: Links,
    pub(crate) arranged_in: Duration,
    /// What was found, for each query.
    pub(crate) answers: Vec<Vec<u32>>,
}

/// A collective in which everything is resident, for now.
fn collective(
    args: &Args,
    bytes: u64,
    local: ByteCount,
    is_copy: bool,
) -> Outcome<Arc<Collective>> {
    // Before and after a rearrangement, at once.
    let room = ByteCount(bytes * 4).max(ByteCount::mib(64));
    let store: Arc<dyn Store> = match &args.device {
        Some(path) if is_copy => Arc::new(BlockStore::scratch(path, Some(room), false)?),
        _ => Arc::new(MemStore::new(room)?),
    };
    let region = CollectiveConfig::default_region()
        .limit(room)
        // No pointer of a container reaches a system call.
        .mode(FaultMode::InThread);
    Ok(Arc::new(Collective::create(
        CollectiveConfig::new().page(args.page).local(local).region(region),
        store,
    )?))
}

/// Builds the index.
pub(crate) fn build(args: &Args, data: &Data) -> Outcome<Built> {
    let record = u64::from(args.dimensions) * 4 + u64::from(args.links) * 12 + 16;
    let config = GraphConfig { links: args.links.into(), width: BUILD_WIDTH, seed: args.seed };
    let home = collective(args, record * u64::from(args.vectors), ByteCount::ZERO, false)?;
    let mut index = FarGraphIndex::new(home, GraphStrategy::Plain, args.dimensions.into(), config);
    let style = ProgressStyle::with_template("building {bar:40} {pos}/{len} {per_sec} {eta}")?;
    let bar = ProgressBar::new(data.vectors.len() as u64).with_style(style);
    let began = Instant::now();
    for vector in &data.vectors {
        index.insert(vector)?;
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (took, bytes) = (began.elapsed(), index.record_bytes());
    eprintln!("built {} vectors, {} of records, in {took:.1?}", index.len(), ByteCount(bytes));
    Ok(Built { index, took, bytes })
}

/// Places a copy of the index and runs the queries on it.
pub(crate) fn point(args: &Args, data: &Data, built: &Built, setting: Setting) -> Outcome<Point> {
    let Setting { strategy, percent } = setting;
    let (count, width) = (usize::from(args.count), usize::from(args.width));
    let least = RegionConfig::LIMIT_MIN;
    let all = ByteCount(built.bytes * u64::from(percent) / 100).max(least);
    let half = ByteCount((all.0 / 2).min(all.0 - least.0));
    let purely_local = if strategy.uses_local() { half } else { ByteCount::ZERO };
    let cache = ByteCount(all.0 - purely_local.0);
    let home = collective(args, built.bytes, purely_local, true)?;
    let mut index = built.index.copy_to(home.clone(), strategy)?;
    let began = Instant::now();
    if strategy == GraphStrategy::Watched {
        for query in data.earlier.iter().cycle().take(data.earlier.len() * WATCHED_PER_QUERY) {
            index.search_watched(query, count, width);
        }
    }
    index.make_page_aware(1.0)?;
    let (arranged_in, links) = (began.elapsed(), index.links());
    let region = home.region();
    region.evict_all()?;
    region.set_limit(cache)?;
    for query in &data.earlier {
        std::hint::black_box(index.search(query, count, width));
    }
    let before = region.stats();
    let mut answers = Vec::with_capacity(data.queries.len());
    let mut times = Vec::with_capacity(data.queries.len());
    for query in &data.queries {
        let began = Instant::now();
        let found = index.search(query, count, width);
        times.push(began.elapsed());
        answers.push(found.iter().map(|near| near.id).collect());
    }
    let pages = region.stats().pages_in - before.pages_in;
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    Ok(Point {
        setting,
        cache,
        purely_local,
        pages_per_query: pages as f64 / times.len() as f64,
        p50: at(50),
        p99: at(99),
        recall: data.recall(&answers),
        links,
        arranged_in,
        answers,
    })
}
