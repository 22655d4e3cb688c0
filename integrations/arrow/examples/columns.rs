//! Record batches in far memory beside ones in memory: answers, times, resident memory of the process.
//!
//! `cargo run --release -p farheap-arrow --example columns -- far` and `-- memory`, each in a process of its own. With
//! `far` the process has a limit of 64 MiB, or that of `LIMIT`. `ROWS` is another number of rows, 3,000,000 (166 MiB)
//! unless set.

use anyhow::{Context, Result, bail};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Int64Array, RecordBatch, StringArray};
use arrow_schema::ArrowError;
use farheap::Heap;
use std::sync::Arc;
use std::time::Instant;

/// Rows of a batch, and groups of rows.
const BATCH: i64 = 8192;
const GROUPS: usize = 1000;

/// A batch of rows from a number on: a group's number, a value, a text.
fn batch(start: i64, rows: i64) -> Result<RecordBatch, ArrowError> {
    let rows = || start..start + rows;
    let text = |row: i64| format!("row {row}, {:x}, {:x}", row * 0x9E37_79B9, row * 0x1CE4_E5B9);
    let groups = Int64Array::from_iter_values(rows().map(|row| row * 7919 % GROUPS as i64));
    RecordBatch::try_from_iter([
        ("group", Arc::new(groups) as _),
        ("value", Arc::new(Int64Array::from_iter_values(rows())) as _),
        ("text", Arc::new(StringArray::from_iter_values(rows().map(text))) as _),
    ])
}

/// Sum of the values of each group, and of the texts' lengths.
fn sums(batches: &[RecordBatch]) -> (i64, usize) {
    let (mut sums, mut lengths) = (vec![0; GROUPS], 0);
    for batch in batches {
        let groups = batch.column(0).as_primitive::<Int64Type>();
        let values = batch.column(1).as_primitive::<Int64Type>();
        for (group, value) in groups.values().iter().zip(values.values()) {
            sums[*group as usize] += value;
        }
        lengths += batch.column(2).as_string::<i32>().iter().flatten().map(str::len).sum::<usize>();
    }
    (sums.into_iter().enumerate().map(|(group, sum)| group as i64 * (sum % 1009)).sum(), lengths)
}

/// Does something and prints how long that took, what it returned, and the peak of resident memory so far.
fn timed<T: std::fmt::Debug>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<()> {
    let began = Instant::now();
    let (answer, seconds) = (work()?, began.elapsed().as_secs_f64());
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).context("no VmHWM")?;
    println!("{what:<28} {seconds:7.2} s  {answer:?}  {}", peak.replace('\t', " "));
    Ok(())
}

fn main() -> Result<()> {
    let rows = std::env::var("ROWS").map_or(Ok(3_000_000), |text| text.parse())?;
    let is_far = match std::env::args().nth(1).as_deref() {
        None | Some("far") => true,
        Some("memory") => false,
        Some(other) => bail!("{other}: far or memory"),
    };
    // Of the process. The device is a temporary file here.
    let limit = std::env::var("LIMIT").unwrap_or_else(|_| "64MiB".to_owned());
    let heap =
        match is_far.then(|| Heap::builder().set("limit", &limit)?.dir(".").start()).transpose() {
            Ok(heap) => heap,
            Err(error) => {
                println!("skipped: {error}");
                return Ok(());
            }
        };
    let mut batches: Vec<RecordBatch> = Vec::new();
    timed("built", || {
        for start in (0..rows).step_by(BATCH as usize) {
            let batch = batch(start, BATCH.min(rows - start))?;
            batches.extend(match &heap {
                Some(heap) => farheap_arrow::copy_batches(&[batch], heap.tier())?,
                None => vec![batch],
            });
        }
        Ok(batches.len())
    })?;
    timed("sums", || Ok(sums(&batches)))?;
    timed("sums again", || Ok(sums(&batches)))?;
    timed("sums of every tenth batch", || {
        let some: Vec<_> = batches.iter().step_by(10).cloned().collect();
        Ok(sums(&some))
    })?;
    drop(batches);
    Ok(heap.map_or(Ok(()), |heap| heap.shutdown())?)
}
