//! Sequential reads of data larger than the cache, from devices.

use crate::child::{Kind, Paging};
use crate::device::{LoopDevice, PatternFile, Target};
use crate::far::{self, Far};
use crate::raw::{self, SCAN_DEPTH};
use crate::report::{Figure, Row};
use crate::work::{Look, Scan, look};
use crate::{Failure, Plan, Result, Side, take_turns};
use farheap::store::Store;
use std::sync::Arc;

/// Bytes that are looked at, or read, at a time.
const STEP: usize = 64 << 10;

pub(crate) fn on_file(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let target = Target::File(PatternFile::create(&plan.dir, plan.data)?);
    compare(plan, "file", far::file_store(&plan.dir, plan.data)?, &target, rows)
}

pub(crate) fn on_loop(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let target = Target::on_loop(plan.data)?;
    let device = LoopDevice::create(far::device_bytes(plan.data))?;
    compare(plan, "loop", far::device_store(device.path())?, &target, rows)
}

fn compare(
    plan: &Plan,
    place: &str,
    store: Arc<dyn Store>,
    target: &Target,
    rows: &mut Vec<Row>,
) -> Result<()> {
    let cache = plan.cache;
    let far = Far::stored(far::config(cache, plan.data), store, plan.data)?;
    let scan = || Scan::new(plan.data, STEP);
    let (mut ours, mut deep, mut single) = (scan(), scan(), scan());
    let mut sides: Vec<Side<'_>> = vec![
        Box::new(|time| {
            ours.run(time, |at| {
                look(far.words.part(at, STEP / 8), at, Look::Sum);
                Ok(())
            })
        }),
        Box::new(|time| raw::scan(target.file(), &mut deep, STEP, SCAN_DEPTH, time)),
        Box::new(|time| raw::scan(target.file(), &mut single, STEP, 1, time)),
    ];
    let paging = Paging::start(Kind::Scanned, target.path(), plan.data, cache);
    let skipped = match paging {
        Ok(mut mapped) => {
            sides.push(Box::new(move |time| mapped.scan(STEP, time)));
            None
        }
        Err(Failure::Skipped(why)) => Some(Failure::Skipped(why)),
        Err(failure) => return Err(failure),
    };
    let samples = take_turns(plan, &mut sides)?;
    let work = format!("{place}: scan by {} KiB", STEP >> 10);
    let row = |name: &str, side: usize, goal| {
        Row::turns(&work, Figure::Speed, &samples[0], name, &samples[side], goal)
    };
    rows.push(row("raw reads, 8 in flight", 1, Some(0.85)));
    rows.push(row("raw reads, 1 in flight", 2, None));
    match skipped {
        None => rows.push(row("mmap MADV_SEQUENTIAL, memory group", 3, Some(1.2))),
        Some(why) => return Err(why),
    }
    Ok(())
}
