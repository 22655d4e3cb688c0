//! The measurements.
#![expect(unsafe_code, reason = "raw reads and touches are the baselines")]

use crate::common::Unnamed;
use crate::report::Row;
use crate::{Failure, Options};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, Clock, PoolConfig};
use farheap::store::{BlockStore, MemStore, Op, Request, Store};
use farheap::{ByteCount, PageId};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub(crate) const PAGE: u64 = 4096;

/// A small, fast generator: the benchmark must not measure the generator.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// Runs `work` in `threads` threads for the given time; returns calls a second of all together.
pub(crate) fn rate<F>(options: &Options, threads: u64, work: F) -> f64
where
    F: Fn(&mut Random, &AtomicBool) -> u64 + Sync,
{
    let (stop, done) = (AtomicBool::new(false), AtomicU64::new(0));
    let began = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (stop, done, work) = (&stop, &done, &work);
            scope.spawn(move || {
                let mut random = Random(0x9E37_79B9_7F4A_7C15 ^ (thread + 1) << 40);
                (0..20).for_each(|_| _ = random.below(2));
                let calls = work(&mut random, stop);
                done.fetch_add(calls, Ordering::Relaxed);
            });
        }
        // The row is a rate over this time: the threads count until it is over.
        std::thread::sleep(Duration::from_secs_f64(options.seconds));
        stop.store(true, Ordering::Relaxed);
    });
    done.load(Ordering::Relaxed) as f64 / began.elapsed().as_secs_f64()
}

pub(crate) fn filled(pool: &BufferPool, pages: u64) -> Result<(), Failure> {
    for _ in 0..pages {
        let mut page = pool.allocate()?;
        let id = page.id().0;
        page[..8].copy_from_slice(&id.to_le_bytes());
    }
    Ok(())
}

pub(crate) fn in_memory(
    pages: u64,
    room_pages: u64,
    config: PoolConfig,
) -> Result<Arc<BufferPool>, Failure> {
    let store = Arc::new(MemStore::new(ByteCount((pages + 64) * PAGE))?);
    let limit = ByteCount(room_pages * PAGE * 9 / 8 + (2 << 20));
    let manager = MemoryManager::start(limit)?;
    Ok(config.create_on(store, &manager)?)
}

pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures[figures.len() / 2]
}

/// Microseconds a page of evicting a full pool of clean pages, by `threads` threads.
fn evict_us(options: &Options, threads: u64, batch: usize) -> Result<f64, Failure> {
    let pages = if options.test { 1000 } else { 64 << 10 };
    let config = PoolConfig::new().cleaner(false).replacement(Clock).evict_batch(batch);
    let pool = in_memory(pages, pages, config.checksum(false))?;
    filled(&pool, pages)?;
    pool.flush()?;
    // Passes that only cool pages are part of eviction in a running pool, too.
    let began = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| while pool.evict_clean(ByteCount(256 * PAGE)).get() > 0 {});
        }
    });
    let us = began.elapsed().as_secs_f64() * 1e6;
    let evicted = pool.stats().evicted;
    assert!(evicted * 100 >= pages * 99, "{evicted} of {pages} pages evicted");
    Ok(us / evicted as f64)
}

pub(crate) fn evictions(options: &Options) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let mut alone = 0.0;
    let ways = [(1, 1), (1, 256), (2, 1), (2, 256)];
    let mut measured: [Vec<f64>; 4] = Default::default();
    for _ in 0..if options.test { 1 } else { 7 } {
        for ((threads, batch), all) in ways.into_iter().zip(&mut measured) {
            all.push(evict_us(options, threads, batch)?);
        }
    }
    let [single_1, batch_1, single_2, batch_2] = measured.map(median);
    for (threads, single, batch) in [(1, single_1, batch_1), (2, single_2, batch_2)] {
        let work = format!("evict clean pages {threads} threads");
        let (baseline, goal) = ("one madvise a page", "under 1 us");
        rows.push(Row {
            work,
            value: batch,
            unit: "us/page",
            baseline,
            baseline_value: single,
            goal,
        });
        if threads == 1 {
            alone = batch;
        } else {
            rows.push(Row {
                work: "evict speed of 2 threads together".to_owned(),
                value: 1.0 / batch,
                unit: "pages/us",
                baseline: "1 thread",
                baseline_value: 1.0 / alone,
                goal: "above 1",
            });
        }
    }
    Ok(rows)
}

/// Random reads of single pages by blocking threads, without any pool.
fn raw_blocking(options: &Options, store: &BlockStore, pages: u64, threads: u64) -> f64 {
    rate(options, threads, |random, stop| {
        let buffer = Buffer::new(1);
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            buffer.read(store, 1 + random.below(pages));
            calls += 1;
        }
        calls
    })
}

/// Random reads at a depth, `depth` at a time, all waited for.
fn raw_depth(options: &Options, store: &BlockStore, pages: u64, depth: usize) -> f64 {
    rate(options, 1, |random, stop| {
        let buffer = Buffer::new(depth);
        let mut queue = store.open_queue(depth as u32).expect("queue");
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            for i in 0..depth {
                buffer.push(&mut *queue, i, 1 + random.below(pages));
            }
            let mut done = 0;
            while done < depth {
                queue
                    .wait(Duration::from_secs(1), &mut |_, result| {
                        result.expect("read");
                        done += 1;
                    })
                    .expect("wait");
            }
            calls += depth as u64;
        }
        calls
    })
}

/// Aligned pages to read into.
struct Buffer(Vec<[u8; PAGE as usize]>, usize);

impl Buffer {
    fn new(pages: usize) -> Buffer {
        let memory = vec![[0; PAGE as usize]; pages + 1];
        let skip = memory.as_ptr().addr().next_multiple_of(PAGE as usize) - memory.as_ptr().addr();
        Buffer(memory, skip)
    }

    fn at(&self, index: usize) -> *mut u8 {
        let bytes = self.0.as_ptr().cast::<u8>().cast_mut();
        bytes.wrapping_add(self.1 + index * PAGE as usize)
    }

    fn read(&self, store: &BlockStore, page: u64) {
        // SAFETY: the buffer is this thread's, aligned and a page long.
        unsafe { store.read_now(page * PAGE, slice_from_raw_parts_mut(self.at(0), PAGE as usize)) }
            .expect("read");
    }

    fn push(&self, queue: &mut dyn farheap::store::Queue, index: usize, page: u64) {
        let segments = [slice_from_raw_parts_mut(self.at(index), PAGE as usize)];
        let request = Request { token: 0, op: Op::Read, offset: page * PAGE, segments: &segments };
        // SAFETY: each request has a page of its own, and the buffer outlives the queue's waits.
        assert!(unsafe { queue.push(request) });
    }
}

pub(crate) fn reads(options: &Options) -> Result<Vec<Row>, Failure> {
    let pages = options.pool_mib * 8 * 256;
    let limit = ByteCount::mib(options.pool_mib);
    let capacity = ByteCount((pages + 64) * PAGE);
    let file = Unnamed::new(options.dir.as_deref(), capacity)?;
    let path = &file.path();
    {
        let manager = MemoryManager::start(limit)?;
        let pool = PoolConfig::new().create(path, capacity, &manager)?;
        filled(&pool, pages)?;
        pool.flush()?;
    }
    let mut rows = Vec::new();
    let threads: &[u64] = if options.test { &[2] } else { &[1, 2, 4, 8] };
    for &threads in threads {
        let raw = raw_blocking(options, &BlockStore::open(path, None)?, pages, threads);
        let value = pool_reads(options, path, pages, threads)?;
        let again = raw_blocking(options, &BlockStore::open(path, None)?, pages, threads);
        let work = format!("read random pages 8x pool {threads} threads");
        let (baseline, baseline_value) = ("raw blocking reads", (raw + again) / 2.0);
        rows.push(Row { work, value, unit: "pages/s", baseline, baseline_value, goal: "0.9" });
    }
    let raw = raw_depth(options, &BlockStore::open(path, None)?, pages, 32);
    let value = pool_groups(options, path, pages)?;
    let again = raw_depth(options, &BlockStore::open(path, None)?, pages, 32);
    rows.push(Row {
        work: "read fix_many of 32 from 1 thread".to_owned(),
        value,
        unit: "pages/s",
        baseline: "raw reads at depth 32",
        baseline_value: (raw + again) / 2.0,
        goal: "0.85",
    });
    Ok(rows)
}

fn opened(options: &Options, path: &std::path::Path) -> Result<Arc<BufferPool>, Failure> {
    let limit = ByteCount::mib(options.pool_mib);
    let manager = MemoryManager::start(limit)?;
    let pool = PoolConfig::new().open(path, &manager)?;
    // Full from the start: every read evicts.
    let warm: Vec<PageId> = (2..=options.pool_mib * 256).map(PageId).collect();
    for group in warm.chunks(64) {
        drop(pool.fix_many(group)?);
    }
    Ok(pool)
}

/// Pages that missed, a second: what the device was asked for.
fn pool_reads(
    options: &Options,
    path: &std::path::Path,
    pages: u64,
    threads: u64,
) -> Result<f64, Failure> {
    let pool = opened(options, path)?;
    let before = pool.stats().pages_read;
    let began = Instant::now();
    rate(options, threads, |random, stop| {
        while !stop.load(Ordering::Relaxed) {
            let page = PageId(2 + random.below(pages));
            let guard = pool.fix_shared(page).expect("page");
            assert_eq!(guard[..8], page.0.to_le_bytes());
        }
        0
    });
    let read = pool.stats().pages_read - before;
    Ok(read as f64 / began.elapsed().as_secs_f64())
}

fn pool_groups(options: &Options, path: &std::path::Path, pages: u64) -> Result<f64, Failure> {
    let pool = opened(options, path)?;
    let before = pool.stats().pages_read;
    let began = Instant::now();
    rate(options, 1, |random, stop| {
        while !stop.load(Ordering::Relaxed) {
            // One of every 32nd part, so that none comes twice.
            let part = pages / 32;
            let group: Vec<PageId> =
                (0..32).map(|i| PageId(2 + i * part + random.below(part))).collect();
            for guard in pool.fix_many(&group).expect("group") {
                assert_eq!(guard[..8], guard.id().0.to_le_bytes());
            }
        }
        0
    });
    let read = pool.stats().pages_read - before;
    Ok(read as f64 / began.elapsed().as_secs_f64())
}

/// What a pool is like when temporary memory is asked for.
#[derive(Clone, Copy)]
struct Warm {
    dirty_pct: u64,
    /// Pages of the table per page of the pool: above one, resident pages lie scattered.
    table_per_pool: u64,
    batch: usize,
    cleaner: bool,
}

/// Allocating half the limit.
#[derive(Clone, Copy)]
struct Taken {
    /// Milliseconds a GiB: the allocation, that and the first touch, and a second touch, when
    /// nothing is left that could fault.
    allocated: f64,
    touched: f64,
    again: f64,
    /// Page faults of the first touch, a GiB.
    faults: f64,
    /// Percent of the pool in huge frames before.
    huge_pct: f64,
}

/// Page faults of this process so far that needed no I/O.
fn faults() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").expect("/proc");
    let after = text.rsplit(')').next().expect("a name in parentheses");
    after.split_whitespace().nth(7).and_then(|n| n.parse().ok()).expect("a number")
}

fn allocate_ms(options: &Options, warm: Warm) -> Result<Taken, Failure> {
    let table = options.pool_mib * warm.table_per_pool;
    let capacity = ByteCount::mib(table * 2);
    let file = Unnamed::new(options.dir.as_deref(), capacity)?;
    // A little less than fits: a pool at its limit has nothing to spare for huge frames.
    let pages = table * 246;
    let manager = MemoryManager::start(ByteCount::mib(options.pool_mib))?;
    let config = PoolConfig::new().evict_batch(warm.batch).cleaner(warm.cleaner);
    let config = config.huge_frames(warm.cleaner);
    let pool = config.create(file.path(), capacity, &manager)?;
    filled(&pool, pages)?;
    pool.flush()?;
    if warm.table_per_pool > 1 {
        let mut random = Random(0x5EED);
        let mut group = [PageId(0); 32];
        for _ in 0..options.pool_mib * 256 / 16 {
            let part = pages / 32;
            (0..32).for_each(|i| group[i as usize] = PageId(2 + i * part + random.below(part)));
            drop(pool.fix_many(&group)?);
        }
    }
    for page in (2..pages + 2).filter(|page| page % 10 < warm.dirty_pct / 10) {
        pool.fix_exclusive(PageId(page))?[8] += 1;
    }
    if warm.cleaner {
        let head_start = Duration::from_millis(if options.test { 50 } else { 1500 });
        // The row is of a pool whose cleaner has had this time, not of one that it is done with: a
        // pool in use is never that.
        std::thread::sleep(head_start);
        let mut huge = ByteCount(u64::MAX);
        while huge != pool.stats().huge_bytes && !options.test {
            huge = pool.stats().huge_bytes;
            // The pool's thread makes a huge frame in 5 ms and does not say when it has made the
            // last: it has when 60 times as long has brought none.
            std::thread::sleep(Duration::from_millis(300));
        }
    }
    let huge_pct = pool.stats().huge_bytes.get() * 100 / pool.stats().resident_bytes.get();
    let half = ByteCount::mib(options.pool_mib / 2);
    let began = Instant::now();
    let memory = manager.allocate_temporary(half)?;
    let allocated = began.elapsed().as_secs_f64() * 1e3;
    let faults_before = faults();
    let looked = began.elapsed().as_secs_f64() * 1e3 - allocated;
    touch(memory.as_ptr().as_ptr(), half.as_usize());
    let touched = began.elapsed().as_secs_f64() * 1e3 - looked;
    let faults = faults() - faults_before;
    let began = Instant::now();
    touch(memory.as_ptr().as_ptr(), half.as_usize());
    let again = began.elapsed().as_secs_f64() * 1e3;
    drop(memory);
    let gib = half.get() as f64 / (1u64 << 30) as f64;
    let [allocated, touched, again, faults] =
        [allocated, touched, again, faults].map(|figure| figure / gib);
    Ok(Taken { allocated, touched, again, faults, huge_pct: huge_pct as f64 })
}

/// Medians of rounds in which each way has its turn.
fn allocate_medians<const N: usize>(
    options: &Options,
    ways: [Warm; N],
) -> Result<[Taken; N], Failure> {
    let rounds = if options.test { 1 } else { 3 };
    let mut all: [Vec<Taken>; N] = std::array::from_fn(|_| Vec::new());
    for _ in 0..rounds {
        for (way, taken) in ways.iter().zip(&mut all) {
            taken.push(allocate_ms(options, *way)?);
        }
    }
    Ok(all.map(|taken| {
        let middle = |of: fn(&Taken) -> f64| median(taken.iter().map(of).collect());
        Taken {
            allocated: middle(|t| t.allocated),
            touched: middle(|t| t.touched),
            again: middle(|t| t.again),
            faults: middle(|t| t.faults),
            huge_pct: middle(|t| t.huge_pct),
        }
    }))
}

fn touch(start: *mut u8, len: usize) {
    for offset in (0..len).step_by(PAGE as usize) {
        // SAFETY: within memory that was just allocated with `len` bytes.
        unsafe { start.wrapping_add(offset).write_volatile(1) };
    }
}

/// Half the limit as temporary memory, in a pool of which so much is dirty, and whose table has so
/// many pages for each of the pool.
pub(crate) fn temporary(
    options: &Options,
    dirty_pct: u64,
    table_per_pool: u64,
) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let way = |batch, cleaner| Warm { dirty_pct, table_per_pool, batch, cleaner };
    let ways = [way(1, false), way(256, false), way(256, true)];
    let [single, bare, cleaned] = allocate_medians(options, ways)?;
    let spread = if table_per_pool > 1 { " scattered" } else { "" };
    for (taken, name, goal) in [(bare, "", "10"), (cleaned, " cleaner on", "5 ms/GiB")] {
        let work = format!("temporary half the limit {dirty_pct} % dirty{spread}{name}");
        let Taken { allocated, touched, again, faults, huge_pct } = taken;
        println!(
            "{work}: {faults:.0} faults a GiB at the first touch, {huge_pct} % in huge frames"
        );
        let rows_of = [
            (format!("{work} touched"), touched, "one page at a time", single.touched, goal),
            (work.clone(), allocated, "one page at a time", single.allocated, goal),
            (format!("{work}, the touch"), touched - allocated, "touched again", again, "1"),
        ];
        for (work, value, baseline, baseline_value, goal) in rows_of {
            rows.push(Row { work, value, unit: "ms/GiB", baseline, baseline_value, goal });
        }
    }
    Ok(rows)
}

pub(crate) fn writes_of_reads(options: &Options) -> Result<Vec<Row>, Failure> {
    let pages = options.pool_mib * 512;
    let capacity = ByteCount::mib(options.pool_mib * 3);
    let file = Unnamed::new(options.dir.as_deref(), capacity)?;
    let manager = MemoryManager::start(ByteCount::mib(options.pool_mib))?;
    let pool = PoolConfig::new().create(file.path(), capacity, &manager)?;
    filled(&pool, pages)?;
    let mut last = pool.stats().pages_written;
    loop {
        // The cleaner tells nobody that it has caught up: it has when it wrote nothing in this time.
        std::thread::sleep(Duration::from_millis(200));
        let now = pool.stats().pages_written;
        if now == last {
            break;
        }
        last = now;
    }
    let before = pool.stats();
    rate(options, 2, |random, stop| {
        while !stop.load(Ordering::Relaxed) {
            let page = PageId(2 + random.below(pages));
            assert_eq!(pool.fix_shared(page).expect("page")[..8], page.0.to_le_bytes());
        }
        0
    });
    let after = pool.stats();
    Ok(vec![
        Row {
            work: "write during a read-only run after a load".to_owned(),
            value: (after.pages_written - before.pages_written) as f64,
            unit: "pages",
            baseline: "pages read meanwhile",
            baseline_value: (after.pages_read - before.pages_read) as f64,
            goal: "0",
        },
        Row {
            work: "metadata of a pool".to_owned(),
            value: after.metadata_bytes.get() as f64,
            unit: "bytes",
            baseline: "bytes ever touched",
            baseline_value: (pages * PAGE) as f64,
            goal: "proportional",
        },
    ])
}
