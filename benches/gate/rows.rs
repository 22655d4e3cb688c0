//! The rows: the work of a child, and the one figure that it answers.

use crate::accesses::{Look, Mix, Order, Scan, look};
use crate::far::{self, Far};
use crate::os::KERNEL_PAGE;
use crate::sides::Side;
use crate::{Failure, Result, Sample, numbers, texts, work};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::RegionConfig;
use farheap::store::{BlockStore, MemStore, Store};
use farheap::{ByteCount, Heap, PageId};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where a row has its data.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Where {
    /// In a directory, if it has files at all.
    Directory,
    /// On a block device of memory.
    Device,
}

/// A row.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) about: &'static str,
    pub(crate) unit: &'static str,
    /// Whether more is better.
    pub(crate) more: bool,
    pub(crate) place: Where,
    run: fn(&Size, &Path) -> Result<f64>,
}

const fn row(
    (name, about): (&'static str, &'static str),
    (unit, more): (&'static str, bool),
    place: Where,
    run: fn(&Size, &Path) -> Result<f64>,
) -> Kind {
    Kind { name, about, unit, more, place, run }
}

const MORE: bool = true;
const LESS: bool = false;

pub(crate) const ROWS: &[Kind] = &[
    row(
        ("miss-cpu", "processor time of a read miss on a memory store, one thread"),
        ("us CPU", LESS),
        Where::Directory,
        |size, _| Ok(misses(size, far::memory_store(size.data)?, 1, 0)?.cpu_us()),
    ),
    row(
        ("miss-loop-1", "random read misses on a loop device, one thread"),
        ("k/s", MORE),
        Where::Device,
        |size, path| Ok(misses(size, far::device_store(path)?, 1, 0)?.rate() / 1e3),
    ),
    row(
        ("miss-loop-2", "random read misses on a loop device, two threads"),
        ("k/s", MORE),
        Where::Device,
        |size, path| Ok(misses(size, far::device_store(path)?, 2, 0)?.rate() / 1e3),
    ),
    row(
        ("miss-loop-8", "random read misses on a loop device, eight threads"),
        ("k/s", MORE),
        Where::Device,
        |size, path| Ok(misses(size, far::device_store(path)?, 8, 0)?.rate() / 1e3),
    ),
    row(
        ("scan-file", "a scan of a file, at the default page"),
        ("MB/s", MORE),
        Where::Directory,
        scan,
    ),
    row(
        ("writes-file", "random accesses on a file, half of them writes, two threads"),
        ("k/s", MORE),
        Where::Directory,
        |size, dir| Ok(misses(size, far::file_store(dir, size.data)?, 2, 50)?.rate() / 1e3),
    ),
    row(
        ("first-touch", "processor time of the first write to 4 KiB that fit"),
        ("ns CPU", LESS),
        Where::Directory,
        |size, _| first_touch(size),
    ),
    row(
        ("load", "a table of four times the limit, cut out of a hot pool, then scanned"),
        ("s", LESS),
        Where::Directory,
        load,
    ),
    row(
        ("alloc", "an allocation and its free, local and far: geometric mean of all works"),
        ("ns", LESS),
        Where::Directory,
        |size, _| allocations(size),
    ),
    row(
        ("pool-hit", "an optimistic read of a random resident page of the pool"),
        ("ns", LESS),
        Where::Directory,
        |size, _| pool_hits(size),
    ),
    row(
        ("pool-miss", "a shared fix of a random page of a pool four times its limit, on a file"),
        ("us", LESS),
        Where::Directory,
        pool_misses,
    ),
];

/// How much a sample is.
struct Size {
    data: usize,
    cache: usize,
    time: Duration,
    /// Of one work of an allocator.
    alloc_time: Duration,
    pool_pages: u64,
}

impl Size {
    fn new(test: bool) -> Size {
        let (mib, ms) = (1 << 20, Duration::from_millis);
        if test {
            let (data, cache) = (32 * mib, 8 * mib);
            Size { data, cache, time: ms(20), alloc_time: ms(1), pool_pages: 4096 }
        } else {
            let (data, cache) = (256 * mib, 32 * mib);
            Size { data, cache, time: ms(1000), alloc_time: ms(10), pool_pages: 1 << 16 }
        }
    }
}

/// Bytes of the loop device of all rows.
pub(crate) fn device_bytes(test: bool) -> usize {
    far::device_bytes(Size::new(test).data)
}

/// The child's side: the figure of a row.
pub(crate) fn serve(name: &str, place: &Path, test: bool) -> Result<String> {
    let row = ROWS.iter().find(|row| row.name == name);
    let row = row.ok_or_else(|| Failure::Skipped(format!("there is no row {name} here")))?;
    (row.run)(&Size::new(test), place).map(|figure| figure.to_string())
}

impl Sample {
    fn cpu_us(&self) -> f64 {
        self.cpu_secs / self.count * 1e6
    }
}

/// Far memory as it is configured by default, but for its size.
fn config(limit: usize, data: usize) -> RegionConfig {
    let span = ByteCount(data as u64 + (64 << 20));
    RegionConfig::new().limit(ByteCount(limit as u64)).span(span)
}

/// Random accesses to kernel pages of data that is eight times the cache.
fn misses(size: &Size, store: Arc<dyn Store>, threads: usize, writes: u64) -> Result<Sample> {
    let far = Far::stored(config(size.cache, size.data), store, size.data)?;
    let mix = Mix::new(Order::Random, size.data, threads);
    let mut mix = mix.with_writes(writes);
    mix.access(far.words, size.time / 4)?;
    mix.access(far.words, size.time)
}

fn scan(size: &Size, dir: &Path) -> Result<f64> {
    const UNIT: usize = 1 << 20;
    let store = far::file_store(dir, size.data)?;
    let far = Far::stored(config(size.cache, size.data), store, size.data)?;
    let sample = Scan::new(size.data, UNIT).run(size.time, |first| {
        look(far.words.part(first, UNIT / 8), first, Look::Sum);
        Ok(())
    })?;
    Ok(sample.rate() / 1e6)
}

fn first_touch(size: &Size) -> Result<f64> {
    let data = size.data / 2;
    let far = Far::fresh(config(2 * data, data), far::memory_store(data)?, data)?;
    let clock = Sample::start();
    let step = KERNEL_PAGE / 8;
    (0..far.words.len()).step_by(step).for_each(|at| far.words.write(at, at as u64));
    let sample = clock.stop((far.words.len() / step) as u64);
    Ok(sample.cpu_us() * 1e3)
}

fn load(size: &Size, dir: &Path) -> Result<f64> {
    let data = size.data / 4;
    let limit = ByteCount(data as u64 / 4).max(ByteCount::mib(8));
    let heap = Heap::builder().far_limit(limit).dir(dir).start().map_err(Failure::of)?;
    let (pool, table) = texts::lengths(data);
    let (mut pool, mut table) = (vec![0_u64; pool], vec![0_u64; table]);
    if !farheap::Far::contains(table.as_ptr()) {
        return Err(Failure::Skipped("nothing goes far by its size here".to_owned()));
    }
    let began = Instant::now();
    texts::fill(&mut pool);
    let drawn = texts::load(&pool, &mut table);
    let sum = texts::scan(&table, drawn);
    let secs = began.elapsed().as_secs_f64();
    assert_eq!(sum, texts::scan(&table, drawn), "the table reads differently the second time");
    drop((pool, table));
    // Also the check that nothing was lost.
    heap.shutdown().map_err(Failure::of)?;
    Ok(secs)
}

fn allocations(size: &Size) -> Result<f64> {
    let (mut logs, mut count) = (0.0, 0.0);
    for work in work::works() {
        for side in [Side::Local, Side::Far] {
            logs += side.run(work, size.alloc_time)?.ln();
            count += 1.0;
        }
    }
    Ok(f64::exp(logs / count))
}

/// A pool each of whose pages begins with its number.
fn pool(size: &Size, store: Arc<dyn Store>, limit: ByteCount) -> Result<Arc<BufferPool>> {
    let manager = MemoryManager::start(limit).map_err(Failure::of)?;
    let pool = PoolConfig::new().create_on(store, &manager).map_err(Failure::of)?;
    for _ in 0..size.pool_pages {
        let mut page = pool.allocate().map_err(Failure::of)?;
        let id = page.id().0;
        page[..8].copy_from_slice(&id.to_le_bytes());
    }
    pool.flush().map_err(Failure::of)?;
    Ok(pool)
}

/// Bytes of a store for the pool.
fn pool_bytes(size: &Size) -> ByteCount {
    ByteCount((size.pool_pages + 64) * KERNEL_PAGE as u64)
}

/// Reads random pages of the pool and checks their numbers; returns seconds a read.
fn pool_reads(size: &Size, read: impl Fn(PageId) -> Result<u64>) -> Result<f64> {
    let clock = Sample::start();
    let (until, mut at) = (Instant::now() + size.time, 0);
    while Instant::now() < until {
        for _ in 0..256 {
            at += 1;
            let page = 2 + numbers::mix(at) % (size.pool_pages - 2);
            let found = read(PageId(page))?;
            assert!(found == page, "page {page} holds {found}");
        }
    }
    let sample = clock.stop(at);
    Ok(sample.secs / sample.count)
}

fn pool_hits(size: &Size) -> Result<f64> {
    let bytes = pool_bytes(size);
    let store = Arc::new(MemStore::new(bytes).map_err(Failure::of)?);
    let pool = pool(size, store, ByteCount(bytes.get() * 9 / 8 + (2 << 20)))?;
    let read = |page| {
        let value = pool.read_optimistic(page, |guard| guard.u64(0)).map_err(Failure::of)?;
        value.ok_or_else(|| Failure::Broken("a page is shorter than a word".to_owned()))
    };
    Ok(pool_reads(size, read)? * 1e9)
}

fn pool_misses(size: &Size, dir: &Path) -> Result<f64> {
    let bytes = pool_bytes(size);
    let store = BlockStore::temporary(Some(dir), Some(bytes)).map_err(Failure::of)?;
    let pool = pool(size, Arc::new(store), ByteCount(bytes.get() / 4))?;
    let read = |page| {
        let guard = pool.fix_shared(page).map_err(Failure::of)?;
        Ok(u64::from_le_bytes(guard[..8].try_into().expect("a page is longer than a word")))
    };
    Ok(pool_reads(size, read)? * 1e6)
}
