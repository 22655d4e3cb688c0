//! The buffer pool from outside: what its pages promise, and what its errors say.
//!
//! Guards: G1, G5.

use crate::common::faulty::FaultyStore;
use crate::common::{PATIENCE, StopOnDrop, eventually};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, Clock, ExclusiveGuard, OptimisticGuard, PoolConfig};
use farheap::store::{MemStore, Op};
use farheap::{ByteCount, Error, PageId};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// How long is waited for what must fail. What must not fail has [`PATIENCE`]: on a machine with many
/// runnable processes a thread does nothing for much longer than this.
const SHORT: Duration = Duration::from_secs(1);

fn manager(limit: ByteCount) -> Arc<MemoryManager> {
    let manager = MemoryManager::start(limit).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn small_pool(limit: ByteCount, config: PoolConfig) -> Arc<BufferPool> {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    config.deadline(PATIENCE).create_on(store, &manager(limit)).expect("pool")
}

/// Fills `count` fresh pages with their numbers.
fn fill(pool: &BufferPool, count: u64) -> Vec<PageId> {
    (0..count)
        .map(|_| {
            let mut page = pool.allocate().expect("page");
            let id = page.id();
            page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&id.0.to_le_bytes()));
            id
        })
        .collect()
}

fn assert_holds(bytes: &[u8], id: PageId) {
    for word in bytes.chunks_exact(8) {
        assert_eq!(word, id.0.to_le_bytes(), "{id}");
    }
}

#[test]
fn pages_survive_eviction_within_the_limit() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 4000);
    for id in &ids {
        assert_holds(&pool.fix_shared(*id).expect("page"), *id);
    }
    let stats = pool.manager().stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    assert!(pool.stats().evicted >= 4000, "{:?}", pool.stats());
}

#[test]
fn looking_copies_nothing_into_the_page_itself() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 2);
    let look = pool.fix_optimistic(ids[0]).expect("page");
    let mut other = pool.fix_exclusive(ids[1]).expect("page");
    assert_eq!(look.copy_to(0, &mut other[8..2008]), Some(()), "another page");
    assert!(look.validate());
    let mut page = pool.fix_exclusive(ids[0]).expect("page");
    let before = page.to_vec();
    let end = page.len();
    for into in [0..1, 8..2008, 2000..4000, end - 1..end] {
        assert_eq!(look.copy_to(0, &mut page[into.clone()]), None, "{into:?}");
    }
    assert!(!look.validate(), "somebody holds it");
    assert_eq!(*page, *before);
}

#[test]
fn an_address_leads_to_its_page_and_back_wherever_the_page_is() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 4000);
    let address = |id: PageId| pool.page_address(id).expect("a page");
    let before: Vec<_> = ids.iter().map(|id| address(*id)).collect();
    pool.evict_all().expect("evicted");
    for (id, at) in ids.iter().zip(before) {
        assert_eq!(pool.fix_shared(*id).expect("page").as_ptr(), at, "{id} has moved");
        assert_eq!(pool.page_at(at), Some(*id));
        assert_eq!(pool.page_at(at.wrapping_add(4095)), Some(*id));
    }
}

#[test]
fn what_is_no_page_has_no_address_and_the_other_way_round() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let room = 64 << 20 >> 12;
    for page in [0, 1, room, u64::MAX] {
        assert_eq!(pool.page_address(PageId(page)), None, "page {page}");
    }
    let (first, last) = (PageId(2), PageId(room - 1));
    let at = |id| pool.page_address(id).expect("there is room for it");
    assert_eq!(pool.page_at(at(last).wrapping_add(4095)), Some(last));
    let here = 0u8;
    for outside in [
        at(first).wrapping_sub(1),
        at(last).wrapping_add(4096),
        std::ptr::null(),
        &raw const here,
        std::ptr::without_provenance(usize::MAX),
    ] {
        assert_eq!(pool.page_at(outside), None, "{outside:?}");
    }
}

#[test]
fn groups_are_read_whole_and_in_order() {
    let pool = small_pool(ByteCount::mib(8), PoolConfig::new().replacement(Clock));
    let ids = fill(&pool, 3000);
    let group: Vec<PageId> = ids.iter().step_by(7).copied().collect();
    pool.prefetch(&group[..32]);
    let guards = pool.fix_many(&group).expect("group");
    assert_eq!(guards.len(), group.len());
    for (guard, id) in guards.iter().zip(&group) {
        assert_eq!(guard.id(), *id);
        assert_holds(guard, *id);
    }
    assert_eq!(pool.holders(), group.len() as u64);
    drop(guards);
    assert!(eventually(|| pool.holders() == 0));
}

#[test]
fn many_pages_are_each_read_once_whether_they_are_resident_or_not() {
    let pool = small_pool(ByteCount::mib(8), PoolConfig::new().replacement(Clock));
    let ids = fill(&pool, 3000);
    let mut read = vec![0; ids.len()];
    let before = pool.stats();
    pool.read_many(&ids, 16, |page| page.u64(16), |index, n| read[index] += n.expect("a word"))
        .expect("all pages");
    let expected: Vec<u64> = ids.iter().map(|id| id.0).collect();
    assert_eq!(read, expected);
    assert!(pool.stats().pages_read > before.pages_read, "all of them were resident");
    assert!(eventually(|| pool.holders() == 0));
    let mut calls = 0;
    let twice = [ids[5], ids[5], ids[2999]];
    pool.read_many(&twice, 1 << 20, |page| page.u64(0), |_, _| calls += 1).expect("far beyond");
    assert_eq!(calls, 3);
    pool.read_many(&[], 0, |page| page.id(), |_, _| calls += 1).expect("nothing");
    assert_eq!(calls, 3);
    let outside = pool.read_many(&[ids[0], PageId(1 << 40)], 0, |_| (), |_, ()| ());
    assert!(matches!(outside, Err(Error::NoSuchPage { .. })), "{outside:?}");
}

#[test]
fn what_is_tried_neither_waits_nor_reads() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 4000);
    pool.flush().expect("flush");
    let is_absent = |id: &&PageId| pool.try_fix_shared(**id).is_none();
    let absent = *ids.iter().find(is_absent).expect("a page that has left");
    let before = pool.stats();
    assert!(pool.try_fix_shared(absent).is_none());
    assert!(pool.try_fix_exclusive(absent).is_none());
    assert!(pool.try_fix_shared(PageId(1 << 40)).is_none());
    assert_eq!(pool.stats().pages_read, before.pages_read);
    let held = pool.fix_exclusive(absent).expect("page");
    assert!(pool.try_fix_shared(absent).is_none());
    drop(held);
    let shared = pool.fix_shared(absent).expect("page");
    drop(pool.try_fix_shared(absent).expect("shared"));
    assert!(pool.try_fix_exclusive(absent).is_none());
    let seen = pool.fix_optimistic(absent).expect("readable");
    assert_eq!(seen.u64(0), Some(absent.0));
    assert!(seen.validate());
    drop(shared);
    pool.fix_exclusive(absent).expect("page")[0] += 1;
    assert!(!seen.validate());
}

#[test]
fn a_table_opened_again_has_what_was_flushed() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let ids;
    {
        let pool = PoolConfig::new().create(&path, ByteCount::mib(16), &manager(ByteCount::mib(4)));
        let pool = pool.expect("pool");
        ids = fill(&pool, 1500);
        pool.fix_exclusive(ids[7]).expect("page").free();
        pool.fix_exclusive(ids[8]).expect("page").free();
        pool.flush().expect("flush");
    }
    let pool = PoolConfig::new().open(&path, &manager(ByteCount::mib(4))).expect("opens");
    for id in ids.iter().filter(|id| **id != ids[7] && **id != ids[8]) {
        assert_holds(&pool.fix_shared(*id).expect("page"), *id);
    }
    assert!(matches!(pool.fix_shared(ids[7]), Err(Error::NoSuchPage { .. })));
    let again = pool.allocate().expect("a free page").id();
    assert!(again == ids[7] || again == ids[8], "{again}");
}

/// The pages behind the last: those of a scan that does not know where the table ends.
fn behind_the_last(pool: &BufferPool) -> Vec<PageId> {
    let end = pool.pages();
    (end..end + 32).map(PageId).collect()
}

#[test]
fn pages_that_are_looked_at_before_they_are_allocated_belong_to_who_allocates_them() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                behind_the_last(&pool).iter().for_each(|page| drop(pool.fix_shared(*page)));
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                pool.prefetch(&behind_the_last(&pool));
            }
        });
        let appends = scope.spawn(|| fill(&pool, 12_000)).join();
        drop(others);
        for id in appends.expect("no panic") {
            assert_holds(&pool.fix_shared(id).expect("page"), id);
        }
    });
    // The threads of pool and manager may still be at it: the two counts are not of one moment.
    let agree = || {
        let (used, stats) = (pool.account().used().get(), pool.stats());
        used == stats.resident_bytes.get() + stats.metadata_bytes.get() + stats.fixed_bytes.get()
    };
    assert!(eventually(agree), "{:?} in use, {:?}", pool.account().used(), pool.stats());
}

fn assert_no_such_pages(pool: &BufferPool, pages: impl Iterator<Item = u64>) {
    for page in pages.map(PageId) {
        pool.prefetch(&[page]);
        let errors = [
            pool.fix_shared(page).map(drop),
            pool.fix_exclusive(page).map(drop),
            pool.fix_optimistic(page).map(drop),
            pool.fix_many(&[page]).map(drop),
        ];
        for error in errors {
            assert!(matches!(error, Err(Error::NoSuchPage { .. })), "{page}: {error:?}");
        }
    }
}

#[test]
fn free_pages_are_no_pages_and_are_given_out_from_the_lowest_on() {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let manager = manager(ByteCount::mib(4));
    let pool = PoolConfig::new().create_on(Arc::clone(&store) as _, &manager).expect("pool");
    // More free pages than the header has room for.
    let ids = fill(&pool, 3_000);
    let (kept, freed) = ids.split_at(1_000);
    let last = freed[1_999];
    freed[..1_999].iter().for_each(|id| pool.fix_exclusive(*id).expect("page").free());
    let free = || freed[0].0..last.0;
    assert_no_such_pages(&pool, free().step_by(100));
    pool.flush().expect("flush");
    drop(pool);
    let pool = PoolConfig::new().open_on(store, &manager).expect("opens");
    assert_no_such_pages(&pool, free().step_by(100));
    kept.iter()
        .chain([&last])
        .for_each(|id| assert_holds(&pool.fix_shared(*id).expect("page"), *id));
    let given: Vec<u64> = (0..1_999).map(|_| pool.allocate().expect("free").id().0).collect();
    assert_eq!(given, free().collect::<Vec<_>>());
}

#[test]
fn a_run_that_only_reads_writes_nothing_once_the_cleaner_has_caught_up() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let ids = fill(&pool, 4000);
    pool.flush().expect("flush");
    let before = pool.stats();
    for id in ids.iter().chain(&ids) {
        drop(pool.fix_shared(*id).expect("page"));
    }
    let after = pool.stats();
    assert_eq!(after.pages_written, before.pages_written);
    assert!(after.pages_read > before.pages_read + 4000);
}

#[test]
fn errors_name_what_is_wrong_with_a_table_file() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    let open = |config: PoolConfig| config.open(&path, &manager).expect_err("refused").to_string();
    assert!(open(PoolConfig::new()).contains("does not exist"));
    let pool = PoolConfig::new().create(&path, ByteCount::mib(8), &manager).expect("pool");
    fill(&pool, 1000);
    pool.flush().expect("flush");
    drop(pool);
    let other = open(PoolConfig::new().page(ByteCount::kib(16)));
    assert!(other.contains("pages of 4096 bytes"), "{other}");
    let file = std::fs::OpenOptions::new().write(true).open(&path).expect("file");
    file.set_len(2 << 20).expect("truncated");
    let short = open(PoolConfig::new());
    assert!(short.contains("is short"), "{short}");
    std::fs::write(&path, vec![1; 2 << 20]).expect("overwritten");
    let other = open(PoolConfig::new());
    assert!(other.contains("no table file"), "{other}");
    let odd = PoolConfig::new().page(ByteCount(5000)).open(&path, &manager);
    assert!(matches!(odd, Err(Error::Config { .. }) | Err(Error::Device { .. })));
}

#[test]
fn a_changed_byte_in_the_file_is_a_corrupt_page() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("table");
    let manager = manager(ByteCount::mib(8));
    let pool = PoolConfig::new().create(&path, ByteCount::mib(8), &manager).expect("pool");
    let ids = fill(&pool, 10);
    pool.flush().expect("flush");
    drop(pool);
    let mut bytes = std::fs::read(&path).expect("file");
    bytes[ids[3].as_usize() * 4096 + 100] ^= 1;
    std::fs::write(&path, bytes).expect("file");
    let pool = PoolConfig::new().open(&path, &manager).expect("opens");
    let error = pool.fix_shared(ids[3]).expect_err("corrupt");
    assert_eq!(error, Error::CorruptPage { page: ids[3], table: path.clone() });
    assert_holds(&pool.fix_shared(ids[4]).expect("whole"), ids[4]);
    let error = pool.fix_many(&ids).expect_err("corrupt");
    assert_eq!(error, Error::CorruptPage { page: ids[3], table: path.clone() });
    assert!(eventually(|| pool.holders() == 0));
}

#[test]
fn pages_out_of_range_are_errors() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    fill(&pool, 3);
    for page in [0, 1, 5, 1 << 40, u64::MAX] {
        let error = pool.fix_shared(PageId(page)).expect_err("no such page");
        assert!(matches!(error, Error::NoSuchPage { .. }), "{error}");
        assert!(pool.fix_exclusive(PageId(page)).is_err());
        assert!(pool.fix_optimistic(PageId(page)).is_err());
        assert!(pool.fix_many(&[PageId(page)]).is_err());
    }
}

#[test]
fn when_all_pages_are_fixed_the_error_counts_the_holders() {
    let pool = small_pool(ByteCount::mib(1), PoolConfig::new());
    let mut held = Vec::new();
    pool.manager().set_deadline(SHORT);
    let error = loop {
        match pool.allocate() {
            Ok(page) => held.push(page),
            Err(error) => break error,
        }
    };
    let text = error.to_string();
    assert!(text.contains(&format!("fixed by {} holders", held.len())), "{text}");
    held.pop();
    pool.manager().set_deadline(PATIENCE);
    drop(pool.allocate().expect("one is free now"));
    // A leaked guard keeps its page, and only that.
    std::mem::forget(held.pop());
    held.clear();
    assert_eq!(pool.holders(), 1);
    fill(&pool, 1000);
    assert_eq!(pool.holders(), 1);
}

#[test]
fn a_latch_that_is_held_too_long_is_an_error_that_names_the_holder() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let id = fill(&pool, 1)[0];
    let held = pool.fix_shared(id).expect("page");
    assert!(pool.try_fix_exclusive(id).is_none());
    let error = pool.fix_exclusive_within(id, Duration::from_millis(5)).expect_err("held");
    assert!(error.to_string().contains("held by 1 reader"), "{error}");
    let held = held.try_upgrade().expect("the only one");
    assert!(pool.try_fix_shared(id).is_none());
    let error = pool.fix_shared_within(id, Duration::from_millis(5)).expect_err("held");
    assert!(error.to_string().contains("held by a writer or a load;"), "{error}");
    let held = held.downgrade();
    let second = pool.try_fix_shared(id).expect("shared again");
    assert!(held.try_upgrade().is_err());
    drop(second);
}

/// Looks at a page, and upgrades in another thread while `held` holds it; lets go once that waits.
fn upgraded_while_held<'p, Guard>(
    look: OptimisticGuard<'p>,
    held: Guard,
    let_go: impl FnOnce(Guard),
) -> Option<ExclusiveGuard<'p>> {
    assert!(look.try_upgrade().is_none(), "the page is held");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(move || look.upgrade());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished(), "it waits");
        let_go(held);
        waiting.join().expect("no panic").expect("the holder has gone")
    })
}

#[test]
fn an_upgrade_waits_for_holders_and_takes_the_page_as_it_was_seen() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let id = fill(&pool, 1)[0];
    let look = || pool.fix_optimistic(id).expect("page");
    let seen = look();
    let reader = pool.fix_shared(id).expect("page");
    assert!(seen.try_upgrade().is_none() && seen.validate(), "held, and not changed");
    let mut guard = upgraded_while_held(seen, reader, drop).expect("as it was");
    assert_holds(&guard, id);
    guard[0] ^= 1;
    drop(guard);
    assert!(seen.try_upgrade().is_none() && !seen.validate(), "changed");
    let (seen, idle) = (look(), pool.fix_exclusive(id).expect("page"));
    drop(upgraded_while_held(seen, idle, drop).expect("nobody changed it"));
    assert!(look().upgrade().expect("free").is_some());
    assert!(eventually(|| pool.holders() == 0));
}

#[test]
fn an_upgrade_of_a_page_that_was_changed_or_evicted_says_so_and_does_not_wait() {
    let pool = small_pool(ByteCount::mib(4), PoolConfig::new());
    let id = fill(&pool, 1)[0];
    let seen = pool.fix_optimistic(id).expect("page");
    let writer = pool.fix_exclusive(id).expect("page");
    let changed = upgraded_while_held(seen, writer, |mut writer| writer[0] ^= 1);
    assert!(changed.is_none());
    let reader = pool.fix_shared(id).expect("page");
    assert!(seen.upgrade().expect("no wait").is_none(), "changed, and held besides");
    drop(reader);
    let seen = pool.fix_optimistic(id).expect("page");
    pool.evict_all().expect("evicted");
    assert!(seen.upgrade().expect("no wait").is_none(), "evicted");
}

#[test]
fn an_upgrade_waits_no_longer_than_the_deadline() {
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let config = PoolConfig::new().deadline(Duration::from_millis(20));
    let pool = config.create_on(store, &manager(ByteCount::mib(4))).expect("pool");
    let id = fill(&pool, 1)[0];
    let seen = pool.fix_optimistic(id).expect("page");
    let _reader = pool.fix_shared(id).expect("page");
    let error = seen.upgrade().expect_err("held");
    assert!(matches!(error, Error::LatchTimeout { page, .. } if page == id), "{error}");
    assert!(error.to_string().contains("1 reader"), "{error}");
}

#[test]
fn a_limit_below_what_is_fixed_is_refused() {
    let pool = small_pool(ByteCount::mib(8), PoolConfig::new());
    let held: Vec<_> = (0..1000).map(|_| pool.allocate().expect("page")).collect();
    pool.manager().set_deadline(SHORT);
    let error = pool.manager().set_limit(ByteCount::mib(2)).expect_err("1,000 pages are fixed");
    assert!(error.to_string().contains("fixed by 1000 holders"), "{error}");
    assert_eq!(pool.manager().limit(), ByteCount::mib(8));
    drop(held);
    pool.manager().set_limit(ByteCount::mib(2)).expect("pages give way");
    assert!(pool.manager().stats().used_bytes <= ByteCount::mib(2));
}

#[test]
fn the_log_is_asked_before_a_page_is_written() {
    let durable = Arc::new(AtomicU64::new(0));
    let asked = Arc::clone(&durable);
    let config = PoolConfig::new().cleaner(false).before_write(move |_, lsn| {
        if lsn <= asked.load(Ordering::SeqCst) { Ok(()) } else { Err(Error::NotRunning) }
    });
    let pool = small_pool(ByteCount::mib(4), config);
    let mut page = pool.allocate().expect("page");
    page[0] = 1;
    page.set_lsn(10);
    let id = page.id();
    drop(page);
    let error = pool.flush().expect_err("the page is left out");
    assert!(matches!(&error, Error::WriteRefused { pages: 1, first, .. } if *first == id));
    assert!(
        error.to_string().starts_with("1 changed pages of the memory store were not"),
        "{error}"
    );
    assert_eq!((pool.stats().pages_written, pool.stats().write_refusals), (0, 1));
    durable.store(10, Ordering::SeqCst);
    pool.flush().expect("flush");
    assert_eq!(pool.stats().pages_written, 1);
    assert_eq!(pool.fix_shared(id).expect("page").lsn(), 10);
}

#[test]
fn table_pages_give_way_to_temporary_memory_and_come_back() {
    let pool = small_pool(ByteCount::mib(16), PoolConfig::new());
    let manager = Arc::clone(pool.manager());
    let ids = fill(&pool, 3500);
    let memory = manager.allocate_temporary(ByteCount::mib(8)).expect("table pages give way");
    assert!(pool.stats().resident_bytes <= ByteCount::mib(8));
    for id in &ids {
        assert_holds(&pool.fix_shared(*id).expect("page"), *id);
    }
    assert!(manager.stats().used_bytes <= manager.limit());
    drop(memory);
    assert!(manager.allocate_temporary(ByteCount::mib(17)).is_err());
}

#[test]
fn a_failed_write_keeps_the_page_in_memory() {
    let store = Arc::new(MemStore::new(ByteCount::mib(16)).expect("store"));
    let faulty = FaultyStore::new(store, 1);
    let control = faulty.control();
    let config = PoolConfig::new().cleaner(false);
    let pool = config.create_on(Arc::new(faulty), &manager(ByteCount::mib(4))).expect("pool");
    let ids = fill(&pool, 10);
    control.fail_next(Op::Write, 1000, 5);
    assert!(matches!(pool.flush(), Err(Error::Io { .. })));
    assert_holds(&pool.fix_shared(ids[0]).expect("page"), ids[0]);
}

#[test]
fn readers_writers_and_eviction_keep_every_page_whole() {
    const PAGES: u64 = 2000;
    let store = Arc::new(MemStore::new(ByteCount::mib(64)).expect("store"));
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("manager");
    let pool = PoolConfig::new().create_on(store, &manager).expect("pool");
    let ids = fill(&pool, PAGES);
    // Every page holds one number, repeated; writers change all of them by one.
    let versions: Vec<AtomicU64> = ids.iter().map(|id| AtomicU64::new(id.0)).collect();
    let stop = AtomicBool::new(false);
    let seed = 0x5EED_u64;
    println!("seed {seed:#x}");
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (pool, ids, versions, stop) = (&pool, &ids, &versions, &stop);
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(thread + 1) | 1;
                let mut random = || {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state
                };
                let mut turns = 0u32;
                while !stop.load(Ordering::Relaxed) {
                    let index = (random() % PAGES) as usize;
                    turn(pool, ids[index], &versions[index], random() % 4);
                    turns += 1;
                    if turns == 20_000 {
                        stop.store(true, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    for (id, version) in ids.iter().zip(&versions) {
        let page = pool.fix_shared(*id).expect("page");
        let expected = version.load(Ordering::Relaxed).to_le_bytes();
        assert!(page.chunks_exact(8).all(|word| word == expected), "{id}");
    }
    assert!(eventually(|| pool.holders() == 0));
    let stats = pool.manager().stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}

/// One reader's or writer's visit.
fn turn(pool: &BufferPool, id: PageId, version: &AtomicU64, what: u64) {
    match what {
        0 => {
            let mut page = pool.fix_exclusive(id).expect("page");
            let next = version.load(Ordering::Relaxed) + 1;
            version.store(next, Ordering::Relaxed);
            page.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&next.to_le_bytes()));
        }
        1 => {
            let page = pool.fix_shared(id).expect("page");
            let first: [u8; 8] = page[..8].try_into().expect("eight bytes");
            assert!(page.chunks_exact(8).all(|word| word == first), "{id}");
            assert_eq!(u64::from_le_bytes(first), version.load(Ordering::Relaxed));
        }
        _ => {
            let whole = pool.read_optimistic(id, |page| {
                let first = page.u64(0);
                (1..pool.payload() / 8).all(|word| page.u64(word * 8) == first)
            });
            assert!(whole.expect("page"), "{id}");
        }
    }
}
