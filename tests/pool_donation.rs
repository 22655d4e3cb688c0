//! Temporary memory made of the pool's frames: what leaves is on the device, what stays is whole,
//! and the limit holds.

mod common;

use common::numbered::{add_pages, await_given_back, fill, holds};
use farheap::manager::{MemoryManager, Mode};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, PageId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

const PAGES: u64 = 7600;

/// A pool of 32 MiB that is nearly full of pages that hold their numbers; nothing is dirty.
fn full_pool(page: ByteCount, pages: u64) -> Arc<BufferPool> {
    let manager = MemoryManager::start(ByteCount::mib(32), Mode::Cooperative).expect("manager");
    manager.set_deadline(common::PATIENCE);
    let store = Arc::new(MemStore::new(ByteCount::mib(96)).expect("store"));
    let config = PoolConfig::new().page(page).cleaner(false);
    let pool = config.create_on(store, &manager).expect("pool");
    add_pages(&pool, pages);
    pool
}

/// Bytes of this process's memory in RAM between two addresses.
fn resident_between(start: usize, end: usize) -> u64 {
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
    let (mut inside, mut kib) = (false, 0);
    for line in smaps.lines() {
        let head = line.split_once(' ').and_then(|(range, _)| range.split_once('-'));
        let range = head.and_then(|(from, to)| {
            let number = |text| usize::from_str_radix(text, 16).ok();
            Some((number(from)?, number(to)?))
        });
        if let Some((from, to)) = range {
            inside = from >= start && to <= end;
        } else if let Some(rest) = line.strip_prefix("Rss:")
            && inside
        {
            kib += rest.trim().trim_end_matches(" kB").parse::<u64>().expect("a number");
        }
    }
    kib << 10
}

#[test]
fn clean_pages_hand_their_frames_over_and_are_read_again() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let manager = Arc::clone(pool.manager());
    let memory = manager.allocate_temporary(ByteCount::mib(16)).expect("fits");
    let stats = pool.stats();
    assert!(stats.donated >= 3000, "{stats:?}");
    let start = memory.as_ptr().as_ptr().addr();
    let there = resident_between(start, start + (16 << 20));
    assert!(there >= stats.donated * 4096, "{there} bytes of {stats:?}");
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    for page in (2..PAGES + 2).rev() {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
    }
    drop(memory);
    assert_eq!(manager.temporary().used(), ByteCount::ZERO);
    drop(pool);
    await_given_back(&manager);
}

#[test]
fn dirty_pages_stay_in_memory_unwritten_and_whole() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let manager = Arc::clone(pool.manager());
    let dirty: Vec<u64> = (2..PAGES + 2).filter(|page| page % 40 == 7).collect();
    for page in &dirty {
        fill(&mut pool.fix_exclusive(PageId(*page)).expect("page"), page + 1_000_000);
    }
    let written = pool.stats().pages_written;
    let _memory = manager.allocate_temporary(ByteCount::mib(8)).expect("fits");
    let stats = pool.stats();
    assert!(stats.donated >= 1500, "{stats:?}");
    assert_eq!(stats.pages_written, written, "nothing had to be written");
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{:?}", manager.stats());
    for page in dirty {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page + 1_000_000), "{page}");
    }
}

#[test]
fn runs_with_a_page_that_is_held_or_a_large_buffer_stay() {
    let pool = full_pool(ByteCount::kib(4), PAGES - 600);
    let mut buffer = pool.allocate_buffer(7).expect("buffer");
    fill(&mut buffer, 77);
    let first = buffer.id();
    drop(buffer);
    let held: Vec<_> =
        (0..13).map(|run| pool.fix_shared(PageId(run * 512 + 9)).expect("page")).collect();
    let memory = pool.manager().allocate_temporary(ByteCount::mib(16)).expect("one by one");
    assert_eq!(pool.stats().donated, 0, "every run has a page that is held");
    for guard in &held {
        assert!(holds(guard, guard.id().0));
    }
    drop((held, memory));
    let _memory = pool.manager().allocate_temporary(ByteCount::mib(16)).expect("fits");
    assert!(holds(&pool.fix_buffer_shared(first, 7).expect("buffer"), 77));
}

#[test]
fn larger_pages_are_donated_too() {
    let pool = full_pool(ByteCount::kib(64), 480);
    let _memory = pool.manager().allocate_temporary(ByteCount::mib(12)).expect("fits");
    assert!(pool.stats().donated >= 100, "{:?}", pool.stats());
    for page in 2..482 {
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
    }
}

#[test]
fn readers_and_writers_never_see_a_page_that_is_moving() {
    let pool = full_pool(ByteCount::kib(4), PAGES);
    let versions: Vec<AtomicU64> = (0..PAGES + 2).map(AtomicU64::new).collect();
    let stop = AtomicBool::new(false);
    let seed = 0x5EED_u64;
    println!("seed {seed:#x}");
    std::thread::scope(|scope| {
        for thread in 1..4u64 {
            let (pool, versions, stop) = (&pool, &versions, &stop);
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(thread) | 1;
                while !stop.load(Ordering::Relaxed) {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    let page = 2 + state % PAGES;
                    visit(pool, PageId(page), &versions[page as usize], state >> 40);
                }
            });
        }
        // Where the writers are quicker, too many pages are dirty for a run to change hands.
        let started = Instant::now();
        let none = || pool.stats().donated == 0 && started.elapsed() < common::PATIENCE;
        for round in (0..).take_while(|round| *round < 60_u64 || none()) {
            if round % 4 == 3 {
                pool.flush().expect("written");
            }
            let memory =
                pool.manager().allocate_temporary(ByteCount::mib(2 + round % 9)).expect("fits");
            let first = memory.as_ptr().as_ptr().addr();
            assert!(first.is_multiple_of(4096));
            drop(memory);
        }
        stop.store(true, Ordering::Relaxed);
    });
    for page in 2..PAGES + 2 {
        let expected = versions[page as usize].load(Ordering::Relaxed);
        assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), expected), "{page}");
    }
    assert!(pool.stats().donated > 0, "{:?}", pool.stats());
    let stats = pool.manager().stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    assert_eq!(pool.holders(), 0);
}

/// Mostly looks at a page, now and then changes all of it.
fn visit(pool: &BufferPool, page: PageId, version: &AtomicU64, dice: u64) {
    match dice % 64 {
        0 => {
            let mut guard = pool.fix_exclusive(page).expect("page");
            let next = version.load(Ordering::Relaxed) + 1;
            version.store(next, Ordering::Relaxed);
            fill(&mut guard, next);
        }
        1..20 => {
            let guard = pool.fix_shared(page).expect("page");
            assert!(holds(&guard, version.load(Ordering::Relaxed)), "{page}");
        }
        _ => {
            let value = pool.read_optimistic(page, |look| {
                let first = look.u64(0);
                (1..look.len() / 8).all(|word| look.u64(word * 8) == first).then_some(first)
            });
            let value = value.expect("page").flatten();
            assert!(value.is_some_and(|value| value >= page.0), "{page} reads as {value:?}");
        }
    }
}
