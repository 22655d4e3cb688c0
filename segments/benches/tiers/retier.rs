//! Pages of a region that change their device in place, beside the device by itself.

#![expect(unsafe_code, reason = "reads and writes far memory through raw pointers")]

use crate::common::Unnamed;
use crate::failure::{Failure, Result};
use crate::table::{self, Row};
use crate::{Options, broken, raw, word};
use farheap::ByteCount;
use farheap::region::{Region, RegionConfig};
use farheap::store::{BlockStore, JoinedStore, MemStore, Side, Store};
use hdrhistogram::Histogram;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const PAGE: usize = 16 << 10;
const ONE_DISK: &str = "a file to another, one disk";

pub(crate) fn rows(options: &Options, limit: ByteCount, rows: &mut Vec<Row>) -> Result<()> {
    let memory = || Ok(Arc::new(MemStore::new(options.size).map_err(Failure::of)?) as _);
    let file = || {
        Ok(Arc::new(BlockStore::temporary(options.dir.as_deref(), None).map_err(Failure::of)?) as _)
    };
    let mut new = Vec::new();
    new.extend(moves(options, limit, "memory to a file", memory()?, file()?)?);
    new.extend(moves(options, limit, ONE_DISK, file()?, file()?)?);
    new.push(beside(options, limit, file()?, file()?)?);
    table::print_group("retier", &new);
    rows.extend(new);
    table::write("tiers", rows, options.test).map(drop)
}

/// A region on two stores, and a mapping of it all of whose pages are on the first.
struct Data {
    region: Region,
    ptr: *mut u64,
    len: usize,
}

impl Data {
    fn new(
        options: &Options,
        limit: ByteCount,
        first: Arc<dyn Store>,
        second: Arc<dyn Store>,
    ) -> Result<Data> {
        let store = JoinedStore::new(first, second).map_err(Failure::of)?;
        let config = RegionConfig::new().limit(limit).page(ByteCount(PAGE as u64));
        let region = Region::create(config, Arc::new(store)).map_err(Failure::of)?;
        let ptr = region.map(options.size).map_err(Failure::of)?.as_ptr().cast::<u64>();
        let data = Data { region, ptr, len: options.size.as_usize() };
        for at in 0..data.len / 8 {
            let place = data.ptr.wrapping_add(at);
            // SAFETY: in the mapping, which this thread alone uses.
            unsafe { place.write(word(0, at)) };
        }
        data.region.evict_all().map_err(Failure::of)?;
        Ok(data)
    }

    /// Moves everything, and what it keeps in memory to the device; returns the seconds.
    fn go(&self, to: Side) -> Result<f64> {
        let began = Instant::now();
        let len = ByteCount(self.len as u64);
        let retier = self.region.retier(self.ptr.cast(), len, to).map_err(Failure::of)?;
        let done = retier.run(|_| {}).map_err(Failure::of)?;
        self.region.evict_all().map_err(Failure::of)?;
        let seconds = began.elapsed().as_secs_f64();
        let right = done.is_complete() && self.region.stored_on(to) == len;
        if right { Ok(seconds) } else { Err(broken("pages were left behind")) }
    }

    fn check(&self) {
        for at in 0..self.len / 8 {
            let place = self.ptr.wrapping_add(at);
            // SAFETY: in the mapping.
            let seen = unsafe { place.read_volatile() };
            assert_eq!(seen, word(0, at), "word {at}");
        }
    }
}

/// To the second side, beside the device and a copy by themselves, and back without looking at the clock.
fn moves(
    options: &Options,
    limit: ByteCount,
    name: &str,
    first: Arc<dyn Store>,
    second: Arc<dyn Store>,
) -> Result<Vec<Row>> {
    let data = Data::new(options, limit, first, second)?;
    let unnamed = || Unnamed::new(options.dir.as_deref(), options.size).map_err(broken);
    let unnamed = [unnamed()?, unnamed()?];
    let open = |unnamed: &Unnamed| raw::open(&unnamed.path()).map_err(broken);
    let [from, file]: [File; 2] = [open(&unnamed[0])?, open(&unnamed[1])?];
    let [mut values, mut writes, mut copies] = [const { Vec::new() }; 3];
    // The first round finds blocks that the file system has not given out.
    for round in 0..=options.rounds {
        let rate = |seconds: f64| data.len as f64 / seconds / f64::from(1 << 20);
        let began = Instant::now();
        raw::transfer(&from, data.len, true).map_err(broken)?;
        let write = rate(began.elapsed().as_secs_f64());
        // Of what was written a moment ago, as what a retier reads here was.
        let began = Instant::now();
        raw::copy(&from, &file, data.len).map_err(broken)?;
        let copy = rate(began.elapsed().as_secs_f64());
        let moved = rate(data.go(Side::Second)?);
        if round > 0 {
            values.push(moved);
            writes.push(write);
            copies.push(copy);
        }
        if round == options.rounds {
            data.check();
        }
        data.go(Side::First)?;
    }
    let row = |base: &str, bases, goal| {
        let name = (format!("retier {name}"), "MiB/s");
        let bases = (base.to_owned(), bases);
        Row::of_rounds(name, values.clone(), bases, |value, base| value / base, goal)
    };
    let row_of_device = row("the device, sequential", writes, Some(0.8));
    // Reading takes a part of what a disk can do, for any program that copies on it.
    let reads_too = (name == ONE_DISK).then(|| row("a raw copy on that disk", copies, None));
    Ok(std::iter::once(row_of_device).chain(reads_too).collect())
}

/// What faults on other pages notice.
fn beside(
    options: &Options,
    limit: ByteCount,
    first: Arc<dyn Store>,
    second: Arc<dyn Store>,
) -> Result<Row> {
    let data = Data::new(options, limit, first, second)?;
    let hot = ByteCount(limit.get() * 2);
    let other = data.region.map(hot).map_err(Failure::of)?.as_ptr() as usize;
    let pages = hot.as_usize() / PAGE;
    let touch = |page: usize, write: bool| {
        let word = (other + page * PAGE) as *mut u64;
        if write {
            // SAFETY: in the other mapping, which one thread at a time uses.
            unsafe { word.write_volatile(page as u64) };
        }
        // SAFETY: as above.
        assert_eq!(unsafe { word.read_volatile() }, page as u64);
    };
    (0..pages).for_each(|page| touch(page, true));
    let mut dice = StdRng::seed_from_u64(7);
    let mut touches = |until: &dyn Fn() -> bool| {
        let mut times = Histogram::<u64>::new(3).expect("three digits");
        while !until() {
            let page = dice.random_range(0..pages);
            let began = Instant::now();
            touch(page, false);
            times.saturating_record(began.elapsed().as_nanos() as u64);
        }
        times.value_at_quantile(0.99) as f64 / 1e3
    };
    let time = Duration::from_millis(if options.test { 50 } else { 1_000 });
    let [mut values, mut bases] = [const { Vec::new() }; 2];
    for round in 0..options.rounds {
        let began = Instant::now();
        bases.push(touches(&|| began.elapsed() > time));
        let done = AtomicBool::new(false);
        let to = if round % 2 == 0 { Side::Second } else { Side::First };
        let len = ByteCount(data.len as u64);
        let retier = data.region.retier(data.ptr.cast(), len, to).map_err(Failure::of)?;
        let moved = std::thread::scope(|scope| {
            let moves = scope.spawn(|| {
                let moved = retier.run(|_| {});
                done.store(true, Ordering::Relaxed);
                moved
            });
            values.push(touches(&|| done.load(Ordering::Relaxed)));
            moves.join().expect("no panic")
        });
        moved.map_err(Failure::of)?;
    }
    let bases = ("p99 without a retier".to_owned(), bases);
    let name = ("touches of other pages beside a retier, p99".to_owned(), "us");
    Ok(Row::of_rounds(name, values, bases, |value, base| base / value, Some(1.0 / 1.5)))
}
