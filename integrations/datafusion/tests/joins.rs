//! Queries whose operators exceed their budget: they fail with DataFusion's own pool, and answer with far memory, while
//! what is resident stays within the heap's limit.

use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::JoinType;
use datafusion::datasource::MemTable;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::disk_manager::{DiskManagerBuilder, DiskManagerMode};
use datafusion::execution::memory_pool::{
    GreedyMemoryPool, MemoryConsumer, MemoryPool, UnboundedMemoryPool,
};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::functions_aggregate::expr_fn::{count, max, sum};
use datafusion::prelude::{SessionConfig, SessionContext, col};
use farheap::{ByteCount, FarHeap, Heap, Local};
use farheap_datafusion::{FarMemoryPool, Reserved};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// The pool's budget, and what may be granted beyond it.
const NEAR: ByteCount = ByteCount::mib(4);
const FAR: ByteCount = ByteCount::gib(1);
/// What the heap may keep resident: of the tables, too, which are far.
const RESIDENT: ByteCount = ByteCount::mib(16);
/// Rows of a table, each with a text of about 180 bytes: 11 MiB.
const ROWS: i64 = 60_000;

/// The heap of this program, or why there is none.
static HEAP: OnceLock<std::result::Result<Heap, String>> = OnceLock::new();
/// One query at a time: what is resident is one's.
static TURN: Mutex<()> = Mutex::new(());

/// The heap, and the turn of a test; `None`, with the reason printed, where userfaultfd is not permitted.
fn turn() -> Option<(&'static Heap, MutexGuard<'static, ()>)> {
    let options = Heap::builder().far_limit(RESIDENT).capacity(ByteCount::gib(2));
    let start = || match options.threshold(ByteCount::kib(16)).start() {
        Ok(heap) => Ok(heap),
        Err(error @ farheap::Error::UffdUnavailable { .. }) => Err(error.to_string()),
        Err(error) => panic!("{error}"),
    };
    match HEAP.get_or_init(start) {
        Ok(heap) => Some((heap, TURN.lock().unwrap_or_else(PoisonError::into_inner))),
        Err(why) => {
            println!("skipped: {why}");
            None
        }
    }
}

/// A table of this number of rows: an own number, a key that some rows share, a text.
fn table(rows: i64, keys: i64, names: [&str; 3]) -> Result<Arc<MemTable>> {
    let batch = |start: i64| {
        let rows = || start..(start + 8192).min(rows);
        let text = |row: i64| format!("{row:>60}{:>60x}{:>60x}", row * 7919, row * 104_729);
        let columns: [ArrayRef; 3] = [
            Arc::new(Int64Array::from_iter_values(rows())),
            Arc::new(Int64Array::from_iter_values(rows().map(|row| row * 7919 % keys))),
            Arc::new(StringArray::from_iter_values(rows().map(text))),
        ];
        RecordBatch::try_from_iter(names.into_iter().zip(columns))
    };
    let batches = (0..rows).step_by(8192).map(batch);
    let batches: Vec<_> = batches.collect::<std::result::Result<_, _>>()?;
    Ok(Arc::new(MemTable::try_new(batches[0].schema(), vec![batches])?))
}

/// Queries by name.
#[derive(Clone, Copy, Debug)]
enum Query {
    Join,
    Aggregate,
    Sort,
}

/// The rows of an answer as text, or of many rows a hash of their numbers in order.
fn text_of(rows: &[RecordBatch]) -> Result<String> {
    let count: usize = rows.iter().map(RecordBatch::num_rows).sum();
    if count < 10 {
        return Ok(pretty_format_batches(rows)?.to_string());
    }
    let mut hasher = DefaultHasher::new();
    for batch in rows {
        let numbers = batch.column(0).as_any().downcast_ref::<Int64Array>();
        numbers.expect("numbers").values().iter().for_each(|number| number.hash(&mut hasher));
    }
    Ok(format!("{count} rows, {:x}", hasher.finish()))
}

/// Runs a query; an aggregate or a sort without files to spill to. Returns its rows as text.
fn run(query: Query, pool: Arc<dyn MemoryPool>) -> Result<String> {
    let mut files = DiskManagerBuilder::default();
    if !matches!(query, Query::Join) {
        files = files.with_mode(DiskManagerMode::Disabled);
    }
    let runtime = RuntimeEnvBuilder::new()
        .with_memory_pool(pool)
        .with_disk_manager_builder(files)
        .build_arc()?;
    let mut config = SessionConfig::new().with_target_partitions(2);
    // The left side is the one that a join keeps.
    config.options_mut().optimizer.join_reordering = false;
    let context = SessionContext::new_with_config_rt(config, runtime);
    let left = context.read_table(table(ROWS, ROWS, ["a", "left", "text"])?)?;
    let all = vec![count(col("a")), sum(col("a")), max(col("text"))];
    let frame = match query {
        Query::Join => {
            let right = context.read_table(table(ROWS, ROWS / 2, ["b", "right", "more"])?)?;
            let both = left.join(right, JoinType::Inner, &["left"], &["right"], None)?;
            both.aggregate(vec![], vec![count(col("a")), sum(col("b")), max(col("text"))])?
        }
        Query::Aggregate => left
            .aggregate(vec![col("text")], vec![max(col("a")).alias("a")])?
            .aggregate(vec![], all)?,
        Query::Sort => left.sort(vec![col("text").sort(false, true)])?,
    };
    let workers = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    text_of(&workers.block_on(frame.collect())?)
}

fn far_pool() -> (Arc<FarMemoryPool>, Arc<dyn MemoryPool>) {
    let pool = Arc::new(FarMemoryPool::new(NEAR, FAR));
    (Arc::clone(&pool), pool)
}

/// Fails unless a query exceeds the budget with DataFusion's pool, and answers with this one.
fn check(query: Query, operator: &str) {
    let Some((heap, _turn)) = turn() else { return };
    let right = run(query, Arc::new(UnboundedMemoryPool::default())).expect("an answer");
    let stock = run(query, Arc::new(GreedyMemoryPool::new(NEAR.as_usize())));
    let error = stock.expect_err("4 MiB are not enough").find_root().to_string();
    println!("{query:?}: {error}");
    let (pool, dynamic) = far_pool();
    assert_eq!(run(query, dynamic).expect("an answer"), right);

    let total = pool.total();
    assert_eq!((total.bytes, total.far_bytes), (ByteCount::ZERO, ByteCount::ZERO), "{total}");
    assert!(total.bytes_max > ByteCount::mib(8) && total.refused == 0, "{total}");
    let of_operator = pool.operators().into_iter().find(|(name, _)| name == operator);
    let Some((_, Reserved { far_bytes_max, .. })) = of_operator else {
        panic!("{operator} is none of {:?}", pool.operators());
    };
    assert!(far_bytes_max > ByteCount::mib(1), "{operator}: {far_bytes_max}");
    // The heap's own numbers: far memory kept its limit, and the rest did not take its place.
    let stats = heap.stats();
    assert!(stats.resident_bytes_max <= RESIDENT, "{stats}");
    assert!(stats.bytes_written > ByteCount::mib(1), "the limit was at work: {stats}");
    let local = Local::usage();
    assert!(local.resident_bytes < ByteCount::mib(64), "{local}");
    println!("{query:?}: {total}; local: {}", local.resident_bytes);
}

#[test]
fn a_join_beyond_its_budget_answers() {
    check(Query::Join, "HashJoinInput");
}

#[test]
fn an_aggregate_beyond_its_budget_answers_without_files() {
    check(Query::Aggregate, "FinalHashAggregateStream");
}

#[test]
fn a_sort_beyond_its_budget_answers_without_files() {
    check(Query::Sort, "ExternalSorter");
}

#[test]
fn far_memory_has_a_bound_that_the_error_names() {
    let Some((_, _turn)) = turn() else { return };
    let (far, pool) = far_pool();
    let one = MemoryConsumer::new("one").register(&pool);
    one.try_grow((NEAR.0 + FAR.0) as usize).expect("near and far");
    let error = one.try_grow(1).expect_err("not a byte more");
    assert!(matches!(error.find_root(), DataFusionError::ResourcesExhausted(_)), "{error}");
    assert!(error.to_string().contains("1.0 GiB far"), "{error}");
    assert_eq!((far.total().far_bytes, far.total().refused), (FAR, 1));
    let none = Arc::new(FarMemoryPool::new(NEAR, ByteCount::mib(1)));
    let query = run(Query::Join, Arc::clone(&none) as _);
    assert!(query.is_err() && none.total().refused > 0, "5 MiB are not enough, either");
}
