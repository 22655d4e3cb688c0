//! What a fix of a resident page costs.
//!
//! `hot`: one page. `random`: pages that do not depend on each other, so that the processor works
//! on several at once. `chained`: what was read decides which page comes next, as on the way down
//! a tree: each hit is waited for.
#![expect(unsafe_code, reason = "raw loads are the baseline")]

use crate::cost::{PAGE, Random, filled, in_memory, rate};
use crate::report::Row;
use crate::{Failure, Options};
use farheap::PageId;
use farheap::pool::{BufferPool, PoolConfig};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

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
        let page = PageId(1 + random.below(pages));
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

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

pub(crate) fn rows(options: &Options) -> Result<Vec<Row>, Failure> {
    let pages = options.hit_pages;
    let pool = in_memory(pages, pages, PoolConfig::new().cleaner(false))?;
    filled(&pool, pages)?;
    let mut rows = Vec::new();
    for threads in [1, 2] {
        for walk in [Walk::Hot, Walk::Random, Walk::Chained] {
            rows.extend(rows_of(options, &pool, threads, walk)?);
        }
    }
    Ok(rows)
}

fn rows_of(
    options: &Options,
    pool: &Arc<BufferPool>,
    threads: u64,
    walk: Walk,
) -> Result<[Row; 3], Failure> {
    let base = pool.fix_shared(PageId(1))?.as_ptr().addr() - PAGE as usize;
    let raw = ns(options, threads, walk, |page| {
        let first = std::ptr::with_exposed_provenance::<u64>(base);
        let at = first.wrapping_byte_add((page.0 * PAGE) as usize);
        // SAFETY: the first bytes of a resident page that nobody changes or evicts.
        unsafe { at.read_volatile() }
    });
    let optimistic = ns(options, threads, walk, |page| {
        let value = pool.read_optimistic(page, |guard| guard.u64(0));
        value.expect("resident").expect("within the page")
    });
    let shared = ns(options, threads, walk, |page| word(&pool.fix_shared(page).expect("resident")));
    let exclusive =
        ns(options, threads, walk, |page| word(&pool.fix_exclusive(page).expect("resident")));
    let swaps = swaps_ns(options, threads);
    let costs = [("optimistic", optimistic), ("shared", shared), ("exclusive", exclusive)];
    let vmcache = ["vmcache 6.4 ns", "vmcache 25 ns", "vmcache 28 ns"];
    Ok([0, 1, 2].map(|i| {
        let (how, value) = costs[i];
        let (baseline, baseline_value) = match walk {
            Walk::Hot if i > 0 => ("two swaps", swaps),
            _ => ("raw load", raw),
        };
        let goal = if walk == Walk::Hot { vmcache[i] } else { "0.77: 1.3 of raw" };
        let name = format!("{walk:?}").to_lowercase();
        let work = format!("hit {name} {how} {threads} threads");
        Row { work, value, unit: "ns", baseline, baseline_value, goal }
    }))
}
