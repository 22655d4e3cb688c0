//! Scattered pages that one thread asks for in batches before it reads them.

use crate::child::{Kind, Paging};
use crate::device::{LoopDevice, Target};
use crate::far::{self, Far};
use crate::os::KERNEL_PAGE;
use crate::raw;
use crate::report::{Figure, Row};
use crate::work::{Mix, Op, Order, check};
use crate::{Failure, Plan, Result, Sample, Side, take_turns};

use farheap::region::Advice;
use std::ptr::slice_from_raw_parts;
use std::time::{Duration, Instant};

const BATCHES: [usize; 3] = [1, 8, 64];

pub(crate) fn batches(plan: &Plan, rows: &mut Vec<Row>) -> Result<()> {
    let device = LoopDevice::create(far::device_bytes(plan.data))?;
    let config = far::config(plan.cache, plan.data);
    let far = Far::stored(config, far::device_store(device.path())?, plan.data)?;
    let target = Target::on_loop(plan.data)?;
    let mut mapped = Paging::start(Kind::Mapped, target.path(), plan.data, plan.cache)?;
    for batch in BATCHES {
        let mix = || Mix::new(Order::Perm, plan.data, 1);
        let (mut ours, mut theirs) = (mix(), mix());
        let mut sides: Vec<Side<'_>> = vec![
            Box::new(|time| prefetched(&far, &mut ours, batch, time)),
            Box::new(|time| raw::batches(target.file(), &mut theirs, batch, time)),
            Box::new(|time| mapped.random(1, 0, time)),
        ];
        let samples = take_turns(plan, &mut sides)?;
        let work = format!("loop: prefetch, batches of {batch}");
        let row = |name: &str, side: usize, goal| {
            Row::turns(&work, Figure::Rate, &samples[0], name, &samples[side], goal)
        };
        rows.push(row("raw io_uring, the same depth", 1, Some(0.8)));
        let goal = (batch == 64).then_some(3.0);
        rows.push(row("mmap MADV_RANDOM, memory group", 2, goal));
    }
    Ok(())
}

/// Asks for a batch of pages, then reads a word of each.
pub(crate) fn prefetched(far: &Far, mix: &mut Mix, batch: usize, time: Duration) -> Result<Sample> {
    mix.run(time, |ops, until| {
        let mut wanted: Vec<Op> = Vec::with_capacity(batch);
        let mut ranges: Vec<*const [u8]> = Vec::with_capacity(batch);
        let mut count = 0;
        while count == 0 || Instant::now() < until {
            wanted.clear();
            wanted.extend((0..batch).map(|_| ops.next()));
            ranges.clear();
            ranges.extend(wanted.iter().map(|op| {
                let start = far.words.as_ptr().wrapping_add(op.page * KERNEL_PAGE);
                slice_from_raw_parts(start.cast_const(), KERNEL_PAGE)
            }));
            far.region.advise(&ranges, Advice::WillNeed).map_err(Failure::of)?;
            wanted.iter().for_each(|op| check(op.word, far.words.read(op.word)));
            count += batch as u64;
        }
        Ok(count)
    })
}
