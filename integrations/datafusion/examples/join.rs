//! A join and an aggregate beyond their budget: answers, times, resident memory of the process.
//!
//! `cargo run --release -p farheap-datafusion --example join -- far`, or `-- memory` without any limit, or `-- budget`
//! with DataFusion's own pool, where queries fail. The process has a limit of 256 MiB with `far`, the pool 128 MiB. `ROWS`
//! is another number of rows of each table, 2,000,000 (350 MiB) unless set.

use anyhow::{Context, Result, bail};
use datafusion::arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use datafusion::arrow::util::pretty::pretty_format_batches;
use datafusion::common::JoinType;
use datafusion::datasource::MemTable;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool, UnboundedMemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::functions_aggregate::expr_fn::{count, max, sum};
use datafusion::prelude::{DataFrame, SessionConfig, SessionContext, col};
use farheap::{ByteCount, FarHeap, Heap};
use farheap_datafusion::FarMemoryPool;
use std::sync::Arc;
use std::time::Instant;

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

const LIMIT: ByteCount = ByteCount::mib(256);
const NEAR: ByteCount = ByteCount::mib(128);

/// A table: an own number, a key, a text.
fn table(rows: i64, names: [&str; 3]) -> Result<Arc<MemTable>> {
    let batch = |start: i64| {
        let rows = || start..(start + 8192).min(rows);
        let text = |row: i64| format!("{row:>50}{:>50x}{:>50x}", row * 7919, row * 104_729);
        let columns: [ArrayRef; 3] = [
            Arc::new(Int64Array::from_iter_values(rows())),
            Arc::new(Int64Array::from_iter_values(rows().map(|row| row * 7919 % 1_000_003))),
            Arc::new(StringArray::from_iter_values(rows().map(text))),
        ];
        RecordBatch::try_from_iter(names.into_iter().zip(columns))
    };
    let batches: Result<Vec<_>, _> = (0..rows).step_by(8192).map(batch).collect();
    let batches = batches?;
    Ok(Arc::new(MemTable::try_new(batches[0].schema(), vec![batches])?))
}

/// Runs a query and prints its answer, how long it took, and the peak of resident memory so far.
async fn timed(what: &str, query: DataFrame) -> Result<()> {
    let began = Instant::now();
    let answer = match query.collect().await {
        Ok(rows) => pretty_format_batches(&rows)?.to_string().lines().nth(3).map(str::to_owned),
        Err(error) => Some(error.find_root().to_string()),
    };
    let (answer, seconds) = (answer.unwrap_or_default(), began.elapsed().as_secs_f64());
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).context("VmHWM")?;
    println!("{what:<12} {seconds:7.2} s  {answer}  {}", peak.replace('\t', " "));
    Ok(())
}

fn main() -> Result<()> {
    let rows = std::env::var("ROWS").map_or(Ok(2_000_000), |text| text.parse())?;
    let far = Arc::new(FarMemoryPool::new(NEAR, ByteCount::gib(16)));
    let pool: Arc<dyn MemoryPool> = match std::env::args().nth(1).as_deref() {
        Some("memory") => Arc::new(UnboundedMemoryPool::default()),
        Some("budget") => Arc::new(GreedyMemoryPool::new(NEAR.as_usize())),
        None | Some("far") => {
            let heap = Heap::builder().limit(LIMIT).threshold(ByteCount::kib(16)).dir(".");
            if let Err(error) = heap.start() {
                println!("skipped: {error}");
                return Ok(());
            }
            Arc::clone(&far) as _
        }
        Some(other) => bail!("{other}: far, memory or budget"),
    };
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
    let config = SessionConfig::new().with_target_partitions(2);
    let context = SessionContext::new_with_config_rt(config, runtime);
    let left = context.read_table(table(rows, ["a", "left", "text"])?)?;
    let right = context.read_table(table(rows, ["b", "right", "more"])?)?;
    let both = left.clone().join(right, JoinType::Inner, &["left"], &["right"], None)?;
    let all = vec![count(col("a")), sum(col("b")), max(col("text")), max(col("more"))];
    let groups = left.aggregate(vec![col("text")], vec![max(col("left")).alias("left")])?;
    let workers = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    workers.block_on(async {
        timed("join", both.aggregate(vec![], all)?).await?;
        let all = vec![count(col("text")), sum(col("left")), max(col("text"))];
        timed("aggregate", groups.aggregate(vec![], all)?).await
    })?;
    far.operators().iter().for_each(|(name, reserved)| eprintln!("{name}: {reserved}"));
    Ok(())
}
