//! Device baselines: direct I/O of the same accesses, without any far memory.

use crate::os::{KERNEL_PAGE, Memory, Pipeline, Transfer, Words, read_at, write_at};
use crate::work::{Look, Mix, Ops, Scan, check, look, stamped};
use crate::{Result, Sample};
use std::fs::File;
use std::time::{Duration, Instant};

/// Units of a scan that are read ahead, by this baseline and as goal for far memory.
pub(crate) const SCAN_DEPTH: usize = 8;

/// Fills a buffer with what belongs at the page of a word.
fn fill_page(buffer: Words, word: usize, stamp: u64) {
    let first = word - word % buffer.len();
    (0..buffer.len()).for_each(|at| buffer.write(at, stamped(first + at, stamp)));
}

/// How a write reaches the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writes {
    /// An operation is one read or one write of a page.
    Instead,
    /// A write reads its page, changes it and writes it: what a cache that always misses does.
    AfterReading,
}

/// Every thread reads (and writes) one 4 KiB page at a time.
pub(crate) fn pages(file: &File, mix: &mut Mix, writes: Writes, time: Duration) -> Result<Sample> {
    mix.run(time, |ops, until| pages_of_thread(file, ops, writes, until))
}

fn pages_of_thread(file: &File, ops: &mut Ops, writes: Writes, until: Instant) -> Result<u64> {
    let memory = Memory::anonymous(KERNEL_PAGE)?;
    let buffer = memory.words();
    let mut count = 0;
    loop {
        let op = ops.next();
        let offset = (op.page * KERNEL_PAGE) as u64;
        if !op.write || writes == Writes::AfterReading {
            read_at(file, buffer, offset)?;
            check(op.word, buffer.read(op.word % buffer.len()));
        }
        if op.write {
            fill_page(buffer, op.word, count);
            write_at(file, buffer, offset)?;
        }
        count += 1;
        if Instant::now() >= until {
            return Ok(count);
        }
    }
}

/// One thread keeps `depth` reads of 4 KiB pages in flight.
pub(crate) fn pages_deep(
    file: &File,
    mix: &mut Mix,
    depth: usize,
    time: Duration,
) -> Result<Sample> {
    let pipeline = std::sync::Mutex::new(Pipeline::new(file, depth, KERNEL_PAGE)?);
    mix.run(time, |ops, until| {
        let mut pipeline = pipeline.lock().expect("no check failed");
        let mut count = 0;
        while count == 0 || Instant::now() < until {
            while pipeline.in_flight() < depth {
                let offset = (ops.next().page * KERNEL_PAGE) as u64;
                pipeline.push(Transfer { offset, write: false }, |_| ());
            }
            pipeline.collect(1, |offset, words| {
                check(offset as usize / 8, words.read(0));
                count += 1;
            })?;
        }
        Ok(count)
    })
}

/// One thread reads batches of 4 KiB pages, and waits for each batch to be complete.
pub(crate) fn batches(file: &File, mix: &mut Mix, batch: usize, time: Duration) -> Result<Sample> {
    let pipeline = std::sync::Mutex::new(Pipeline::new(file, batch, KERNEL_PAGE)?);
    mix.run(time, |ops, until| {
        let mut pipeline = pipeline.lock().expect("no check failed");
        let mut count = 0;
        while count == 0 || Instant::now() < until {
            for _ in 0..batch {
                let offset = (ops.next().page * KERNEL_PAGE) as u64;
                pipeline.push(Transfer { offset, write: false }, |_| ());
            }
            while pipeline.in_flight() > 0 {
                let least = pipeline.in_flight();
                pipeline.collect(least, |offset, words| {
                    check(offset as usize / 8, words.read(0));
                })?;
            }
            count += batch as u64;
        }
        Ok(count)
    })
}

/// Reads units one after the other, `depth` in flight, and sums their words.
pub(crate) fn scan(
    file: &File,
    scan: &mut Scan,
    unit: usize,
    depth: usize,
    time: Duration,
) -> Result<Sample> {
    let mut pipeline = Pipeline::new(file, depth, unit)?;
    // `run` counts a unit when it is asked for; those in flight at the end even out.
    scan.run(time, |at| {
        if pipeline.in_flight() == depth {
            pipeline.collect(1, |offset, words| look(words, offset as usize / 8, Look::Sum))?;
        }
        pipeline.push(Transfer { offset: at as u64 * 8, write: false }, |_| ());
        Ok(())
    })
}

/// Writes `bytes` from the beginning, `depth` units in flight.
pub(crate) fn write_once(file: &File, bytes: usize, unit: usize, depth: usize) -> Result<Sample> {
    let mut pipeline = Pipeline::new(file, depth, unit)?;
    let clock = Sample::start();
    for offset in (0..bytes).step_by(unit) {
        if pipeline.in_flight() == depth {
            pipeline.collect(1, |_, _| ())?;
        }
        let transfer = Transfer { offset: offset as u64, write: true };
        pipeline.push(transfer, |words| {
            (0..words.len()).for_each(|at| words.write(at, (offset / 8 + at) as u64));
        });
    }
    while pipeline.in_flight() > 0 {
        pipeline.collect(1, |_, _| ())?;
    }
    Ok(clock.stop(bytes as u64))
}
