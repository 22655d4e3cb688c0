//! TPC-H within a budget: answers, times, resident memory of the process beside what operators have reserved.
//!
//! ```text
//! cargo run --release --example tpch -- make DIR 1                    # tables of scale factor 1, as Parquet
//! cargo run --release --example tpch -- far DIR 512MiB 1,6,joins      # under a limit of the budget and 64 MiB
//! ```
//! `memory` in place of `far` has no limit, `budget` has DataFusion's own pool. Queries are those of the benchmark by
//! number, `all` of them, and two joins whose builds have all columns of lineitem: `join` builds one, 1.5 GB at scale
//! factor 1, `joins` two. With these tables the answers of the benchmark are compared with its own. `integrations/run.py`
//! measures all of it.

use anyhow::{Context, Result, bail};
use datafusion::arrow::record_batch::{RecordBatch, RecordBatchReader};
use datafusion::arrow::util::display::array_value_to_string;
use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool, UnboundedMemoryPool};
use datafusion::execution::runtime_env::RuntimeEnvBuilder;
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::prelude::{ParquetReadOptions, SessionConfig, SessionContext};
use farheap::{ByteCount, FarHeap, Heap};
use farheap_datafusion::FarMemoryPool;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use tpchgen::generators as of;
use tpchgen::q_and_a::{answers_sf1, queries};

#[global_allocator]
static ALLOC: FarHeap = FarHeap::new();

/// What a process may have beside the budget: what operators do not reserve, code and stacks.
const BESIDE: ByteCount = ByteCount::mib(64);
/// What may be granted beyond the budget.
const FAR: ByteCount = ByteCount::gib(16);
const SAMPLE_EVERY: Duration = Duration::from_millis(2);
/// Answers of the benchmark are rounded to two digits.
const ROUNDED: f64 = 0.0101;

/// The benchmark's parameters for which its answers are.
const PARAMETERS: [&[&str]; 22] = [
    &["90"],
    &["15", "BRASS", "EUROPE"],
    &["BUILDING", "1995-03-15"],
    &["1993-07-01"],
    &["ASIA", "1994-01-01"],
    &["1994-01-01", "0.06", "24"],
    &["FRANCE", "GERMANY"],
    &["BRAZIL", "AMERICA", "ECONOMY ANODIZED STEEL"],
    &["green"],
    &["1993-10-01"],
    &["GERMANY", "0.0001"],
    &["MAIL", "SHIP", "1994-01-01"],
    &["special", "requests"],
    &["1995-09-01"],
    &["1996-01-01"],
    &["Brand#45", "MEDIUM POLISHED", "49", "14", "23", "45", "19", "3", "36", "9"],
    &["Brand#23", "MED BOX"],
    &["300"],
    &["Brand#12", "Brand#23", "Brand#34", "1", "10", "20"],
    &["forest", "1994-01-01", "CANADA"],
    &["SAUDI ARABIA"],
    &["13", "31", "23", "29", "30", "18", "17"],
];
const TABLES: [&str; 8] =
    ["nation", "region", "part", "supplier", "partsupp", "customer", "orders", "lineitem"];

/// The rows of a table.
fn rows(table: &str, scale: f64) -> Box<dyn RecordBatchReader> {
    match table {
        "nation" => {
            Box::new(tpchgen_arrow::NationArrow::new(of::NationGenerator::new(scale, 1, 1)))
        }
        "region" => {
            Box::new(tpchgen_arrow::RegionArrow::new(of::RegionGenerator::new(scale, 1, 1)))
        }
        "part" => Box::new(tpchgen_arrow::PartArrow::new(of::PartGenerator::new(scale, 1, 1))),
        "supplier" => {
            Box::new(tpchgen_arrow::SupplierArrow::new(of::SupplierGenerator::new(scale, 1, 1)))
        }
        "partsupp" => {
            Box::new(tpchgen_arrow::PartSuppArrow::new(of::PartSuppGenerator::new(scale, 1, 1)))
        }
        "customer" => {
            Box::new(tpchgen_arrow::CustomerArrow::new(of::CustomerGenerator::new(scale, 1, 1)))
        }
        "orders" => Box::new(tpchgen_arrow::OrderArrow::new(of::OrderGenerator::new(scale, 1, 1))),
        _ => Box::new(tpchgen_arrow::LineItemArrow::new(of::LineItemGenerator::new(scale, 1, 1))),
    }
}

fn make(dir: &str, scale: f64) -> Result<()> {
    for table in TABLES {
        let rows = rows(table, scale);
        let path = format!("{dir}/{table}.parquet");
        let file = File::create(&path).with_context(|| path.clone())?;
        let mut writer = ArrowWriter::try_new(file, rows.schema(), None)?;
        for batch in rows {
            writer.write(&batch?)?;
        }
        writer.close()?;
    }
    Ok(())
}

/// The statements of a query.
fn statements(query: &str) -> Result<Vec<String>> {
    // The left side is what a join keeps.
    let most = |table: &str| -> String {
        let schema = tpchgen_arrow::LineItemArrow::schema_ref();
        let columns = schema.fields().iter().map(|field| format!("max({table}.{})", field.name()));
        columns.collect::<Vec<_>>().join(", ")
    };
    let same = |one: &str, other: &str| {
        format!(
            "{one}.l_orderkey = {other}.l_orderkey and {one}.l_linenumber = {other}.l_linenumber"
        )
    };
    let number: i32 = match query {
        "join" => {
            let (most, same) = (most("a"), same("a", "b"));
            return Ok(vec![format!(
                "select count(*), {most} from lineitem a join lineitem b on {same}"
            )]);
        }
        "joins" => {
            let (most, same, inner) =
                (most("a") + ", " + &most("b"), same("a", "b"), same("d", "c"));
            let both = format!("(select d.* from lineitem d join lineitem c on {inner})");
            return Ok(vec![format!(
                "select count(*), {most} from lineitem a join {both} b on {same}"
            )]);
        }
        number => number.parse()?,
    };
    let mut text = queries::query(number).context("there are 22 queries")?.replace(":s", "");
    // The last ones first: `:1` begins `:10`.
    for (at, parameter) in PARAMETERS[number as usize - 1].iter().enumerate().rev() {
        text = text.replace(&format!(":{}", at + 1), parameter);
    }
    let text = text.replace("day (3)", "day");
    let statements = text.split(';').map(|text| text.trim().to_owned());
    Ok(statements.filter(|text| !text.is_empty()).collect())
}

/// The cells of an answer.
fn cells(batches: &[RecordBatch]) -> Result<Vec<Vec<String>>> {
    let mut rows = Vec::new();
    for batch in batches {
        for row in 0..batch.num_rows() {
            let cells = batch.columns().iter().map(|column| array_value_to_string(column, row));
            rows.push(cells.collect::<Result<Vec<_>, _>>()?);
        }
    }
    Ok(rows)
}

/// Whether an answer is the benchmark's own; its limits may cut among equal rows, which are compared by number then.
fn is_right(number: i32, rows: &[Vec<String>]) -> Option<bool> {
    let answer = answers_sf1::answer(number)?;
    let mut right = answer.lines().filter(|line| !line.trim().is_empty()).skip(1);
    let is_same = |(cell, right): (&String, &str)| match (cell.parse::<f64>(), right.parse::<f64>())
    {
        (Ok(cell), Ok(right)) => (cell - right).abs() <= ROUNDED,
        _ => cell.trim() == right,
    };
    let is_row = |row: &Vec<String>| {
        let line = right.next()?;
        Some(row.iter().zip(line.split('|').map(str::trim)).all(is_same))
    };
    let rows: Vec<Option<bool>> = rows.iter().map(is_row).collect();
    Some(rows.iter().all(|row| *row == Some(true)) && right.next().is_none())
}

/// Bytes that a line of `/proc/self/status` names.
fn status(name: &str) -> u64 {
    let text = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Runs the queries one by one; fails for none of them.
async fn run(context: &SessionContext, dir: &str, queries: &str) -> Result<()> {
    for table in TABLES {
        let path = format!("{dir}/{table}.parquet");
        context.register_parquet(table, path, ParquetReadOptions::default()).await?;
    }
    let is_of_scale_1 = context.table("orders").await?.count().await? == 1_500_000;
    let all: Vec<String> = match queries {
        "all" => (1..=22).map(|number: i32| number.to_string()).collect(),
        some => some.split(',').map(str::to_owned).collect(),
    };
    for query in all {
        let (began, mut answer) = (Instant::now(), Ok(Vec::new()));
        for statement in statements(&query)? {
            let frame = context.sql(&statement).await?;
            match frame.collect().await {
                Ok(rows) if statement.starts_with("select") => answer = Ok(rows),
                Ok(_) => {}
                Err(error) => answer = Err(error.find_root().to_string()),
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let answer = match answer {
            Ok(batches) => {
                let mut rows = cells(&batches)?;
                let right = query.parse::<i32>().ok().filter(|_| is_of_scale_1);
                let right = match right.and_then(|number| is_right(number, &rows)) {
                    None => "",
                    Some(true) => ", the benchmark's answer",
                    Some(false) => ", NOT the benchmark's answer",
                };
                rows.sort(); // Rows that are equal in the order of the query.
                let mut hasher = DefaultHasher::new();
                rows.hash(&mut hasher);
                format!("{} rows, {:016x}{right}", rows.len(), hasher.finish())
            }
            Err(error) => format!("failed: {}", error.lines().next().unwrap_or_default()),
        };
        println!("{query:<6} {seconds:7.2} s  {answer}  VmHWM: {} kB", status("VmHWM:") >> 10);
    }
    Ok(())
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["make", dir, scale] = words[..] {
        return make(dir, scale.parse()?);
    }
    let [side, dir, budget, queries] = words[..] else {
        bail!("make DIR SCALE, or far, budget or memory DIR BUDGET QUERIES");
    };
    let budget: ByteCount = budget.parse()?;
    let far = Arc::new(FarMemoryPool::new(budget, FAR));
    let pool: Arc<dyn MemoryPool> = match side {
        "memory" => Arc::new(UnboundedMemoryPool::default()),
        "budget" => Arc::new(GreedyMemoryPool::new(budget.as_usize())),
        "far" => {
            let limit = ByteCount(budget.0 + BESIDE.0);
            if let Err(error) =
                Heap::builder().limit(limit).threshold(ByteCount::kib(16)).dir(dir).start()
            {
                println!("skipped: {error}");
                return Ok(());
            }
            Arc::clone(&far) as _
        }
        other => bail!("{other}: far, budget or memory"),
    };
    let runtime = RuntimeEnvBuilder::new().with_memory_pool(pool).build_arc()?;
    let mut config = SessionConfig::new().with_target_partitions(2);
    // As written: the joins' left sides are kept.
    config.options_mut().optimizer.join_reordering = !queries.contains("join");
    let context = SessionContext::new_with_config_rt(config, runtime);
    let is_over = Arc::new(AtomicBool::new(false));
    let sampler = {
        let (far, is_over) = (Arc::clone(&far), Arc::clone(&is_over));
        std::thread::spawn(move || {
            let (mut apart, mut resident_max) = (0, 0);
            while !is_over.load(Relaxed) {
                let (resident, reserved) = (status("VmRSS:"), far.total());
                resident_max = resident.max(resident_max);
                // While the budget is in use: else most of what is resident was never reserved.
                if reserved.bytes > budget {
                    apart = apart.max(resident.saturating_sub(budget.0));
                }
                // The kernel tells nobody of a peak: samples at steady intervals find it.
                std::thread::sleep(SAMPLE_EVERY);
            }
            (apart, resident_max)
        })
    };
    let workers =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    workers.block_on(run(&context, dir, queries))?;
    is_over.store(true, Relaxed);
    let (apart, resident_max) = sampler.join().expect("the sampler has no reason to panic");
    eprintln!("at most resident {}, apart {}", ByteCount(resident_max), ByteCount(apart));
    far.operators().iter().for_each(|(name, reserved)| eprintln!("{name}: {reserved}"));
    Ok(())
}
