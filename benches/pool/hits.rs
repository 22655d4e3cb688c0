//! What a fix of a resident page costs.
//!
//! `hot`: one page. `random`: pages that do not depend on each other, so that the processor works
//! on several at once. `chained`: what was read decides which page comes next, as on the way down
//! a tree: each hit is waited for.
#![expect(unsafe_code, reason = "raw loads are the baseline")]

use crate::cost::{PAGE, Random, filled, in_memory, median, rate};
use crate::report::Row;
use crate::{Failure, Options};
use farheap::PageId;
use farheap::pool::{BufferPool, PoolConfig};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How pages follow each other.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Walk {
    Hot,
    Random,
    Chained,
}

/// Nanoseconds a call and thread of `call`, which returns what it read in the page it is given.
fn ns(options: &Options, threads: u64, walk: Walk, call: impl Fn(PageId) -> u64 + Sync) -> f64 {
    let pages = if walk == Walk::Hot { 1 } else { options.hit_pages };
    let turn = |random: &mut Random| {
        let page = PageId(2 + random.below(pages));
        let read = call(page);
        if walk == Walk::Chained {
            // The compiler must not know that this is the page's number.
            random.0 = random.0.wrapping_add(black_box(read));
        }
        assert_eq!(read, page.0);
    };
    let calls = rate(options, threads, |random, stop: &AtomicBool| {
        let mut calls = 0;
        while !stop.load(Ordering::Relaxed) {
            (0..256).for_each(|_| turn(random));
            calls += 256;
        }
        calls
    });
    1e9 * threads as f64 / calls
}

/// As [`ns`] of two atomic changes of one word that all threads share: what a pin by a counter
/// cannot do without.
fn swaps_ns(options: &Options, threads: u64) -> f64 {
    let counter = AtomicU64::new(0);
    ns(options, threads, Walk::Hot, |page| {
        counter.fetch_add(1, Ordering::AcqRel);
        counter.fetch_sub(1, Ordering::AcqRel);
        page.0
    })
}

/// As [`ns`] of a plain load from a page between two compare-and-swaps of a word of its own, as a
/// pin has them: what random hits that hold their page cannot do without.
fn pinned_ns(
    options: &Options,
    threads: u64,
    walk: Walk,
    load: impl Fn(PageId) -> u64 + Sync,
) -> f64 {
    let words: Vec<AtomicU64> = (0..options.hit_pages + 2).map(|_| AtomicU64::new(0)).collect();
    let swap = |word: &AtomicU64, by: u64| loop {
        let seen = word.load(Ordering::Relaxed);
        let new = seen.wrapping_add(by);
        if word.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return;
        }
    };
    ns(options, threads, walk, |page| {
        let word = &words[page.0 as usize];
        swap(word, 1);
        let value = load(page);
        swap(word, u64::MAX);
        value
    })
}

/// Nanoseconds a page of [`BufferPool::read_many`], 256 pages a call, and of [`worked`].
fn many_ns(options: &Options, pool: &BufferPool, threads: u64) -> f64 {
    let calls = rate(options, threads, |random, stop: &AtomicBool| {
        let mut calls = 0;
        let mut pages = [PageId(0); 256];
        while !stop.load(Ordering::Relaxed) {
            pages.fill_with(|| PageId(2 + random.below(options.hit_pages)));
            let check = |i: usize, value: Option<u64>| {
                assert_eq!(worked(value.expect("within the page")), pages[i].0);
            };
            pool.read_many(&pages, 0, |page| page.u64(0), check).expect("resident");
            calls += 256;
        }
        calls
    });
    1e9 * threads as f64 / calls
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

pub(crate) fn rows(options: &Options) -> Result<Vec<Row>, Failure> {
    let pages = options.hit_pages;
    let mut rows = Vec::new();
    let mut small = None;
    for huge in [false, true] {
        let config = PoolConfig::new().cleaner(false).huge_frames(huge);
        let pool = in_memory(pages, pages, config)?;
        filled(&pool, pages)?;
        pool.flush()?;
        if huge {
            // All but the first run, which has the header in it, and the last, which is not full.
            await_huge(&pool, pages.saturating_sub(1024) * PAGE);
        }
        let frames = if huge { ", huge frames" } else { "" };
        for threads in [1, 2] {
            for walk in [Walk::Hot, Walk::Random, Walk::Chained] {
                if !(huge && walk == Walk::Hot) {
                    rows.extend(rows_of(options, &pool, small.as_ref(), threads, walk, frames)?);
                }
            }
        }
        // The same pages in small frames stay for their raw loads.
        small = Some(pool);
    }
    Ok(rows)
}

/// Waits until the pool's thread has put so much into huge frames; says how much it was.
fn await_huge(pool: &BufferPool, bytes: u64) {
    let mut waited = Duration::ZERO;
    while pool.stats().huge_bytes.get() < bytes && waited < Duration::from_secs(10) {
        // Only the statistics tell of huge frames. The pool makes about four in this time.
        std::thread::sleep(Duration::from_millis(20));
        waited += Duration::from_millis(20);
    }
    println!("{} of the pool in huge frames after {waited:?}", pool.stats().huge_bytes);
}

/// What [`rows_of`] measures, in this order in each round.
const WAYS: usize = 10;

/// What a program may do with what it read: some three hundred instructions, each of which waits for
/// the one before, so that the processor sees one or two pages at a time.
fn worked(read: u64) -> u64 {
    let mut state = read;
    for _ in 0..100 {
        state = black_box(state.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ read);
    }
    black_box(state);
    read
}

fn rows_of(
    options: &Options,
    pool: &Arc<BufferPool>,
    small: Option<&Arc<BufferPool>>,
    threads: u64,
    walk: Walk,
    frames: &str,
) -> Result<Vec<Row>, Failure> {
    let load = raw_load(pool)?;
    let small_load = raw_load(small.unwrap_or(pool))?;
    let is_random = walk == Walk::Random;
    let optimistic = |page| {
        let value = pool.read_optimistic(page, |guard| guard.u64(0));
        value.expect("resident").expect("within the page")
    };
    let rounds = if options.test { 1 } else { 5 };
    let options = Options { seconds: options.seconds / rounds as f64, ..options.clone() };
    let mut measured: [Vec<f64>; WAYS] = Default::default();
    for _ in 0..rounds {
        let round = [
            ns(&options, threads, walk, &load),
            ns(&options, threads, walk, optimistic),
            ns(&options, threads, walk, |page| word(&pool.fix_shared(page).expect("resident"))),
            ns(&options, threads, walk, |page| word(&pool.fix_exclusive(page).expect("resident"))),
            swaps_ns(&options, threads),
            pinned_ns(&options, threads, walk, &load),
            ns(&options, threads, walk, &small_load),
            if is_random { ns(&options, threads, walk, |page| worked(load(page))) } else { 0.0 },
            if is_random {
                ns(&options, threads, walk, |page| worked(optimistic(page)))
            } else {
                0.0
            },
            if is_random { many_ns(&options, pool, threads) } else { 0.0 },
        ];
        measured.iter_mut().zip(round).for_each(|(all, ns)| all.push(ns));
    }
    let [
        raw,
        optimistic,
        shared,
        exclusive,
        swaps,
        pinned,
        raw_small,
        raw_worked,
        hit_worked,
        many,
    ] = measured.map(median);
    let costs = [("optimistic", optimistic), ("shared", shared), ("exclusive", exclusive)];
    let vmcache = ["vmcache 6.4 ns", "vmcache 25 ns", "vmcache 28 ns"];
    let name = format!("{walk:?}").to_lowercase();
    let mut rows = Vec::new();
    let mut push = |how: &str, value, (baseline, baseline_value), goal| {
        let work = format!("hit {name} {how} {threads} threads{frames}");
        rows.push(Row { work, value, unit: "ns", baseline, baseline_value, goal });
    };
    for (i, (how, value)) in costs.into_iter().enumerate() {
        if walk == Walk::Hot {
            let baseline = if i > 0 { ("two swaps", swaps) } else { ("raw load", raw) };
            push(how, value, baseline, vmcache[i]);
            continue;
        }
        push(how, value, ("raw load", raw), "0.77: 1.3 of raw");
        if small.is_some() {
            let how = format!("{how}, to small frames,");
            push(&how, value, ("raw load, small frames", raw_small), "0.77: 1.3 of raw");
        }
        if i > 0 {
            push(&format!("{how}, a pin,"), value, ("load and two swaps", pinned), "0.77");
        }
    }
    if is_random {
        push("and work, optimistic", hit_worked, ("raw load and work", raw_worked), "0.77");
        push("and work, read_many", many, ("raw load and work", raw_worked), "0.77");
    }
    Ok(rows)
}

/// A plain load of what [`filled`] wrote, from where the pool keeps it.
fn raw_load(pool: &BufferPool) -> Result<impl Fn(PageId) -> u64 + Sync + use<>, Failure> {
    let base = pool.fix_shared(PageId(2))?.as_ptr().expose_provenance() - 2 * PAGE as usize;
    Ok(move |page: PageId| {
        let first = std::ptr::with_exposed_provenance::<u64>(base);
        let at = first.wrapping_byte_add((page.0 * PAGE) as usize);
        // SAFETY: the first bytes of a resident page that nobody changes or evicts.
        unsafe { at.read_volatile() }
    })
}
