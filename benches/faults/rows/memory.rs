//! A store without latency: what the fault path itself costs.

use super::faults::threads_text;
use crate::bare::{Bare, Handler};
use crate::far::{self, Far};
use crate::os::Memory;
use crate::report::{Figure, Row};
use crate::work::{self, Look, Mix, Order, Scan, access_timed, look};
use crate::{Plan, Result, Sample, Side, take_turns};
use farheap::region::FaultMode;
use hdrhistogram::Histogram;
use std::sync::Arc;

/// UMap's rates with a store in memory, random reads of 4 KiB pages, 1 and 2 threads, in k/s.
const UMAP_RATES: [(usize, f64); 2] = [(1, 24.107), (2, 49.109)];
/// UMap's microseconds of processor time a fault, and its latencies in microseconds.
const UMAP_CPU_US: f64 = 35.7;
const UMAP_LATENCIES_US: [(f64, f64); 3] = [(0.5, 24.3), (0.99, 71.3), (0.999, 3_791.0)];
/// UMap's sequential MB/s: page bytes and speed. It has no pages above 1 MiB.
const UMAP_SCAN: [(usize, f64); 3] = [(64 << 10, 349.0), (256 << 10, 1_199.0), (2 << 20, 1_006.0)];

/// How faults are delivered, where the library can choose.
const MODES: [(&str, FaultMode); 2] =
    [("handler", FaultMode::Auto), ("in-thread", FaultMode::InThread)];

pub(crate) fn random(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    for (name, mode) in MODES {
        let config = far::config(plan.cache, plan.data).mode(mode);
        let far = Far::stored(config, far::memory_store(plan.data)?, plan.data)?;
        misses(plan, name, &far, rows)?;
        rates(plan, name, &far, rows)?;
    }
    Ok(())
}

/// Every access misses: latencies, processor time, and the rate next to the floor.
fn misses(plan: &Plan, mode: &str, far: &Far, rows: &mut Vec<Row>) -> Result<()> {
    let bare = Bare::new(plan.data)?;
    let handled = Arc::new(Bare::new(plan.data)?);
    let _handler = Handler::start(&handled, plan.cache);
    let mut cache = bare.cache(plan.cache);
    let mix = || Mix::new(Order::Perm, plan.data, 1);
    let (mut ours, mut ioctls, mut faults) = (mix(), mix(), mix());
    let mut latencies_ns = work::new_latencies();
    let mut bare_ns = work::new_latencies();
    let mut sides: Vec<Side<'_>> = vec![
        Box::new(|time| Ok(access_timed(far.words, &mut ours, time, &mut latencies_ns))),
        Box::new(|time| {
            ioctls.run_alone(time, |op| {
                bare.install(&mut cache, op.page)?;
                work::check(op.word, bare.words().read(op.word));
                Ok(())
            })
        }),
        Box::new(|time| Ok(access_timed(handled.words(), &mut faults, time, &mut bare_ns))),
    ];
    let samples = take_turns(plan, &mut sides)?;
    drop(sides);
    let work = format!("memory: 4 KiB misses, {mode}, 1 thread");
    let row = |figure, name: &str, side: usize, goal| {
        Row::turns(&work, figure, &samples[0], name, &samples[side], goal)
    };
    // Within 1.3 of the floor.
    rows.push(row(Figure::Rate, "bare ioctl loop, no faults", 1, Some(1.0 / 1.3)));
    rows.push(row(Figure::Rate, "bare handler thread", 2, None));
    rows.push(row(Figure::Cpu, "bare ioctl loop, no faults", 1, None));
    rows.push(row(Figure::Cpu, "bare handler thread", 2, None));
    let umap = "UMap, published";
    let cpu = Row::published(&work, Figure::Cpu, &samples[0], umap, UMAP_CPU_US, Some(3.0));
    rows.push(cpu);
    for (quantile, umap_us) in UMAP_LATENCIES_US {
        let us = |histogram: &Histogram<u64>| histogram.value_at_quantile(quantile) as f64 / 1e3;
        let name = format!("{work}, p{}", quantile * 100.0);
        let goal = (quantile == 0.999).then_some(10.0);
        let value = us(&latencies_ns);
        rows.push(Row::less(&name, value, "us", umap, umap_us, goal));
        rows.push(Row::less(&name, value, "us", "bare handler thread", us(&bare_ns), None));
    }
    Ok(())
}

/// Random accesses, hits included, as in UMap's figures.
fn rates(plan: &Plan, mode: &str, far: &Far, rows: &mut Vec<Row>) -> Result<()> {
    for &threads in &plan.threads {
        let mut ours = Mix::new(Order::Random, plan.data, threads);
        let mut sides: Vec<Side<'_>> = vec![Box::new(|time| ours.access(far.words, time))];
        let samples = take_turns(plan, &mut sides)?;
        drop(sides);
        let work = format!("memory: 4 KiB random reads, {mode}, {}", threads_text(threads));
        let known = UMAP_RATES.iter().find(|(count, _)| *count == threads);
        let (name, umap, goal) = match known {
            Some((_, umap)) => ("UMap, published", *umap, Some(2.0)),
            None => ("UMap, published for 2 threads", UMAP_RATES[1].1, None),
        };
        rows.push(Row::published(&work, Figure::Rate, &samples[0], name, umap, goal));
    }
    Ok(())
}

/// Sequential reads, by steps of the sizes that UMap's pages had.
pub(crate) fn scan(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    for ((page, umap), goal) in UMAP_SCAN.into_iter().zip([None, Some(0.5), Some(0.8)]) {
        let cache = plan.cache;
        let data = plan.data.max(2 * cache);
        let config = far::config(cache, data);
        let far = Far::stored(config, far::memory_store(data)?, data)?;
        let source = Memory::patterned(data)?;
        // Far memory ends up in cache-sized memory, so does the copy.
        let buffer = Memory::patterned(cache)?;
        let (mut touched, mut summed, mut copied) =
            (Scan::new(data, page), Scan::new(data, page), Scan::new(data, page));
        let (count, words) = (page / 8, far.words);
        let mut sides: Vec<Side<'_>> = vec![
            Box::new(|time| {
                touched.run(time, |at| {
                    look(words.part(at, count), at, Look::Touch);
                    Ok(())
                })
            }),
            Box::new(|time| {
                copied.run(time, |at| {
                    let copy = buffer.words().part(at % (cache / 8), count);
                    source.words().part(at, count).copy_to(copy);
                    look(copy, at, Look::Touch);
                    Ok(())
                })
            }),
            Box::new(|time| {
                summed.run(time, |at| {
                    look(words.part(at, count), at, Look::Sum);
                    Ok(())
                })
            }),
        ];
        let samples: Vec<Vec<Sample>> = take_turns(plan, &mut sides)?;
        let work = format!("memory: scan by {} KiB", page >> 10);
        let touched = format!("{work}, a word of each 4 KiB");
        let (ours, copies) = (&samples[0], &samples[1]);
        rows.push(Row::turns(
            touched,
            Figure::Speed,
            ours,
            "memcpy to as much memory",
            copies,
            goal,
        ));
        let summed = format!("{work}, all words");
        let name = if page > 1 << 20 { "UMap, published, 1 MiB" } else { "UMap, published" };
        rows.push(Row::published(summed, Figure::Speed, &samples[2], name, umap, None));
    }
    Ok(())
}
