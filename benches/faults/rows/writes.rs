//! Writes: the first to a clean page, data that dies young, data that spills.

use crate::device::{PatternFile, Target};
use crate::far::{self, Far};
use crate::os::{KERNEL_PAGE, Words};
use crate::raw::{self, SCAN_DEPTH};
use crate::report::{Figure, Row};
use crate::work::{check, stamped};
use crate::{Failure, Plan, Result, Sample, Side, take_turns};
use allocator_api2::vec::Vec as FarVec;
use farheap::region::Advice;
use farheap::{ByteCount, Heap};
use std::ptr::slice_from_raw_parts;
use std::time::Duration;

/// UMap's median microseconds of a first write to a resident clean page.
const UMAP_FIRST_WRITE_US: f64 = 33.4;

/// Which of the pages that were read are written: all, or one of a number.
const WRITTEN: [usize; 2] = [1, 16];

pub(crate) fn first(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    WRITTEN.into_iter().try_for_each(|every| first_writes(plan, every, rows))
}

/// Reads pages in, then writes a word of every so manieth.
fn first_writes(plan: &Plan, every: usize, rows: &mut Vec<Row>) -> Result<()> {
    let config = far::config(plan.cache, plan.data);
    let far = Far::stored(config, far::memory_store(plan.data)?, plan.data)?;
    // Pages that are read ahead and not written soon make room for others: the write would
    // then be a fault for the page, not the first write to a resident one.
    let all = slice_from_raw_parts(far.words.as_ptr(), plan.data);
    far.region.advise(&[all], Advice::Random).map_err(Failure::of)?;
    // New pages are on probation in a twentieth of the cache: less than that stays resident.
    let pages = (plan.cache / 32 / KERNEL_PAGE).max(1);
    let mut stamp = 0;
    let mut from = 0;
    let (mut writes, mut protected, mut missing) = (0, 0, 0);
    let side = |_: Duration| {
        let starts = (0..pages).map(|n| (from + n) * KERNEL_PAGE / 8);
        starts.clone().for_each(|at| check(at, far.words.read(at)));
        stamp += 1;
        let before = far.region.stats();
        let clock = Sample::start();
        starts.step_by(every).for_each(|at| far.words.write(at, stamped(at, stamp)));
        let count = pages.div_ceil(every) as u64;
        let sample = clock.stop(count);
        let after = far.region.stats();
        writes += count;
        protected += after.faults_protect - before.faults_protect;
        missing += after.faults_read + after.faults_cooling;
        missing -= before.faults_read + before.faults_cooling;
        // Other pages next time: these are dirty now.
        from = (from + pages) % (plan.data / KERNEL_PAGE - pages);
        Ok(sample)
    };
    let samples = take_turns(plan, &mut [Box::new(side)])?;
    let which = if every == 1 { "all".to_owned() } else { format!("one of {every}") };
    let work = format!("memory: first write to a clean page, {which}");
    let (figure, umap) = (Figure::Time, "UMap, published");
    let goal = (every == 1).then_some(10.0);
    rows.push(Row::published(&work, figure, &samples[0], umap, UMAP_FIRST_WRITE_US, goal));
    for (kind, faults) in [("protection", protected), ("missing-page", missing)] {
        let share = faults as f64 / writes as f64;
        let work = format!("{work}: {kind} faults");
        rows.push(Row::less(work, share, "a write", "none", 0.0, None));
    }
    Ok(())
}

/// Memory that is freed before it comes under pressure never reaches the device.
pub(crate) fn short_lived(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    const TURNS: usize = 16;
    let size = plan.cache / 2;
    let config = far::config(plan.cache, plan.data);
    let store = far::file_store(&plan.dir, plan.data)?;
    let far = Far::fresh(config, store, KERNEL_PAGE)?;
    for turn in 0..TURNS {
        let length = ByteCount(size as u64);
        let ptr = far.region.map(length).map_err(Failure::of)?.cast::<u8>();
        let words = far::range(&far.region, ptr.as_ptr(), size);
        (0..words.len()).for_each(|at| words.write(at, stamped(at, turn as u64)));
        (0..words.len()).step_by(64).for_each(|at| check(at, words.read(at)));
        words.unmap(&far.region)?;
    }
    written_row(rows, "mapped", TURNS, far.region.stats().bytes_written.0);
    drop(far);
    let heap = start_heap(plan)?;
    for turn in 0..TURNS {
        let mut values: FarVec<u64, farheap::Far> =
            FarVec::with_capacity_in(size / 8, farheap::Far);
        values.extend((0..size / 8).map(|at| stamped(at, turn as u64)));
        (0..values.len()).step_by(64).for_each(|at| check(at, values[at]));
    }
    let written = heap.stats().bytes_written.0;
    heap.shutdown().map_err(Failure::of)?;
    written_row(rows, "allocated", TURNS, written);
    Ok(())
}

fn start_heap(plan: &Plan) -> Result<Heap> {
    let limit = plan.cache.max(64 << 20);
    Heap::builder().far_limit(ByteCount(limit as u64)).dir(&plan.dir).start().map_err(Failure::of)
}

fn written_row(rows: &mut Vec<Row>, how: &str, turns: usize, bytes: u64) {
    let work = format!("short-lived: {how}, {turns} x half the limit");
    rows.push(Row::less(work, bytes as f64 / 1e6, "MB out", "nothing", 0.0, Some(1.0)));
}

/// Writes all words once.
fn write_all(words: Words) {
    (0..words.len()).for_each(|at| words.write(at, at as u64));
}

pub(crate) fn spill(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    const UNIT: usize = 256 << 10;
    let cache = plan.cache;
    let data = 2 * cache;
    let target = Target::File(PatternFile::create(&plan.dir, data)?);
    let mut worst: f64 = 0.0;
    let mut sides: Vec<Side<'_>> = vec![
        Box::new(|_| {
            let config = far::config(cache, data);
            let far = Far::fresh(config, far::file_store(&plan.dir, data)?, data)?;
            let clock = Sample::start();
            write_all(far.words);
            let sample = clock.stop(data as u64);
            let stats = far.region.stats();
            let spilled = data as u64 - stats.resident_bytes.0;
            worst = worst.max(stats.bytes_written.0 as f64 / spilled as f64);
            Ok(sample)
        }),
        Box::new(|_| raw::write_once(target.file(), data, UNIT, SCAN_DEPTH)),
    ];
    let samples = take_turns(plan, &mut sides)?;
    drop(sides);
    let work = "file: data twice the cache written".to_owned();
    let (ours, theirs) = (&samples[0], &samples[1]);
    let name = "raw writes, 8 of 256 KiB in flight";
    rows.push(Row::turns(&work, Figure::Speed, ours, name, theirs, Some(0.8)));
    let work = format!("{work}: bytes written");
    let goal = Some(1.0 / 1.05);
    rows.push(Row::less(work, worst, "times", "bytes spilled", 1.0, goal));
    Ok(())
}
