//! Random faults of 4 KiB pages on devices.

use crate::child::{Kind, Paging};
use crate::device::{LoopDevice, PatternFile, Swap, Target};
use crate::far::{self, Far};
use crate::raw::{self, Writes};
use crate::report::{Figure, Row};
use crate::work::{Mix, Order};
use crate::{Failure, Plan, Result, Sample, Side, take_turns};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Random writes a second by UMap on a disk, 4 KiB, 1 and 2 threads.
const UMAP_MIXED: [(usize, f64); 2] = [(1, 8.663), (2, 9.498)];

/// Accesses far memory; counts the accesses that were no hits.
fn missing(far: &Far, mix: &mut Mix, time: Duration) -> Result<Sample> {
    let before = far.region.stats();
    let sample = mix.access(far.words, time)?;
    let after = far.region.stats();
    let brought =
        |stats: &farheap::Stats| stats.faults_read + stats.faults_cooling + stats.pages_prefetched;
    let missed = (brought(&after) - brought(&before)) as f64;
    Ok(Sample { count: sample.count.min(missed), ..sample })
}

pub(crate) fn on_file(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let store = far::file_store(&plan.dir, plan.data)?;
    let config = far::config(plan.cache, plan.data);
    let far = Far::stored(config, store, plan.data)?;
    let target = Target::File(PatternFile::create(&plan.dir, plan.data)?);
    against_raw(plan, "file", &far, &target, rows)?;
    against_mapped(plan, ("file", 1.0), &far, paging(plan, Kind::Mapped, target.path())?, rows)?;
    allow_swap(plan)?;
    let swap = Swap::on_file(&plan.dir, plan.data + plan.data / 4)?;
    let swapped = paging(plan, Kind::Swapped, target.path())?;
    against_swap(plan, "file", &far, swapped, rows)?;
    drop(swap);
    Ok(())
}

pub(crate) fn on_loop(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let device = LoopDevice::create(far::device_bytes(plan.data))?;
    let config = far::config(plan.cache, plan.data);
    let far = Far::stored(config, far::device_store(device.path())?, plan.data)?;
    let target = Target::on_loop(plan.data)?;
    against_raw(plan, "loop", &far, &target, rows)?;
    against_mapped(plan, ("loop", 0.9), &far, paging(plan, Kind::Mapped, target.path())?, rows)?;
    allow_swap(plan)?;
    let swap = Swap::on_loop(plan.data + plan.data / 4)?;
    let swapped = paging(plan, Kind::Swapped, target.path())?;
    against_swap(plan, "loop", &far, swapped, rows)?;
    drop(swap);
    // The region's device goes after the region.
    drop(far);
    Ok(())
}

fn paging(plan: &Plan, kind: Kind, path: &Path) -> Result<Paging> {
    Paging::start(kind, path, plan.data, plan.cache)
}

/// Misses against reads of the device, the same number in flight.
fn against_raw(
    plan: &Plan,
    place: &str,
    far: &Far,
    target: &Target,
    rows: &mut Vec<Row>,
) -> Result<()> {
    for &threads in &plan.threads {
        let mix = |threads| Mix::new(Order::Perm, plan.data, threads);
        let (mut ours, mut theirs, mut deep) = (mix(threads), mix(threads), mix(1));
        let mut sides: Vec<Side<'_>> = vec![
            Box::new(|time| missing(far, &mut ours, time)),
            Box::new(|time| raw::pages(target.file(), &mut theirs, Writes::Instead, time)),
            Box::new(|time| raw::pages_deep(target.file(), &mut deep, threads, time)),
        ];
        let samples = take_turns(plan, &mut sides)?;
        let work = format!("{place}: 4 KiB misses, {}", threads_text(threads));
        // At 8 threads two processors, not the device, are the limit.
        let goal = (threads == 1).then_some(0.8);
        let row = |name: &str, side: usize, goal| {
            Row::turns(&work, Figure::Rate, &samples[0], name, &samples[side], goal)
        };
        rows.push(row("pread O_DIRECT, as many threads", 1, goal));
        rows.push(row("io_uring, as many in flight", 2, None));
    }
    Ok(())
}

fn allow_swap(plan: &Plan) -> Result<()> {
    if plan.swap {
        return Ok(());
    }
    Err(Failure::Skipped("swap is for the whole machine: ask for it with --swap".to_owned()))
}

/// Random accesses, hits included, against the kernel's paging of the same accesses.
fn against_mapped(
    plan: &Plan,
    (place, goal): (&str, f64),
    far: &Far,
    mut mapped: Paging,
    rows: &mut Vec<Row>,
) -> Result<()> {
    against_child(plan, place, far, &mut mapped, (MAPPED, goal), rows)
}

const MAPPED: &str = "mmap MADV_RANDOM, memory group";
const SWAP: &str = "anonymous on swap, memory group";

fn against_swap(
    plan: &Plan,
    place: &str,
    far: &Far,
    mut swapped: Paging,
    rows: &mut Vec<Row>,
) -> Result<()> {
    against_child(plan, place, far, &mut swapped, (SWAP, 2.0), rows)
}

fn against_child(
    plan: &Plan,
    place: &str,
    far: &Far,
    child: &mut Paging,
    goal: (&str, f64),
    rows: &mut Vec<Row>,
) -> Result<()> {
    for &threads in &plan.threads {
        let work = format!("{place}: 4 KiB random reads, {}", threads_text(threads));
        let (ours, theirs) = beside_child(plan, far, child, (threads, 0))?;
        rows.push(Row::turns(work, Figure::Rate, &ours, goal.0, &theirs, Some(goal.1)));
    }
    Ok(())
}

/// The same random accesses to far memory and in the child, in turns.
fn beside_child(
    plan: &Plan,
    far: &Far,
    child: &mut Paging,
    (threads, write_pct): (usize, u64),
) -> Result<(Vec<Sample>, Vec<Sample>)> {
    let ours = Mix::new(Order::Random, plan.data, threads);
    let mut ours = ours.with_writes(write_pct);
    let mut sides: Vec<Side<'_>> = vec![
        Box::new(|time| ours.access(far.words, time)),
        Box::new(|time| child.random(threads, write_pct, time)),
    ];
    let mut samples = take_turns(plan, &mut sides)?;
    let theirs = samples.pop().expect("two sides");
    Ok((samples.pop().expect("two sides"), theirs))
}

pub(crate) fn threads_text(threads: usize) -> String {
    if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") }
}

/// Accesses of `mixed` that write.
const WRITE_PCT: u64 = 50;

/// Half of the accesses write.
pub(crate) fn mixed(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let config = far::config(plan.cache, plan.data);
    let store = far::file_store(&plan.dir, plan.data)?;
    let far = Arc::new(Far::stored(config, store, plan.data)?);
    let target = Target::File(PatternFile::create(&plan.dir, plan.data)?);
    for &threads in &plan.threads {
        let mix = || Mix::new(Order::Random, plan.data, threads).with_writes(WRITE_PCT);
        let (mut ours, mut instead, mut after) = (mix(), mix(), mix());
        let mut sides: Vec<Side<'_>> = vec![
            Box::new(|time| ours.access(far.words, time)),
            Box::new(|time| raw::pages(target.file(), &mut instead, Writes::Instead, time)),
            Box::new(|time| raw::pages(target.file(), &mut after, Writes::AfterReading, time)),
        ];
        let samples = take_turns(plan, &mut sides)?;
        let work = format!("file: 4 KiB, 50 % writes, {}", threads_text(threads));
        let row = |name: &str, side: usize, goal| {
            Row::turns(&work, Figure::Rate, &samples[0], name, &samples[side], goal)
        };
        rows.push(row("raw, a read or a write", 1, Some(0.8)));
        rows.push(row("raw, a read and perhaps a write", 2, None));
        if let Some((_, umap)) = UMAP_MIXED.iter().find(|(count, _)| *count == threads) {
            let name = "UMap, published";
            let goal = Some(3.0);
            rows.push(Row::published(&work, Figure::Rate, &samples[0], name, *umap, goal));
        }
    }
    let mapped = paging(plan, Kind::Mapped, target.path())?;
    mixed_beside(plan, &far, mapped, (MAPPED, 0.8), rows)?;
    allow_swap(plan)?;
    let _swap = Swap::on_file(&plan.dir, plan.data + plan.data / 4)?;
    let swapped = paging(plan, Kind::Swapped, target.path())?;
    mixed_beside(plan, &far, swapped, (SWAP, 1.0), rows)
}

/// Half of the accesses write, by rate and by processor time. The kernel's own threads, which write for
/// the child, are not in its time.
fn mixed_beside(
    plan: &Plan,
    far: &Far,
    mut child: Paging,
    (name, goal): (&str, f64),
    rows: &mut Vec<Row>,
) -> Result<()> {
    /// Processor time of swap that an operation may take here.
    const CPU_MAX: f64 = 1.3;
    for &threads in &plan.threads {
        let work = format!("file: 4 KiB, 50 % writes, {}", threads_text(threads));
        let (ours, theirs) = beside_child(plan, far, &mut child, (threads, WRITE_PCT))?;
        rows.push(Row::turns(&work, Figure::Rate, &ours, name, &theirs, Some(goal)));
        let goal = (name == SWAP).then_some(1.0 / CPU_MAX);
        rows.push(Row::turns(work, Figure::Cpu, &ours, name, &theirs, goal));
    }
    Ok(())
}
