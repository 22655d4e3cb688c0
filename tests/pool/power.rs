//! Power cuts and failing calls: what a flush acknowledged is there, and nothing is invented.
//!
//! A workload runs on a device that remembers every write and sync. The device is then cut off at every
//! sync and at moments between; of the writes since the last sync each is kept, lost or torn. From the
//! history of each page it is known what may be found when the table is opened again. The same history
//! is used where calls to the device fail, each in turn.
//!
//! Guards: G7.

use crate::common::faulty::FaultyStore;
use crate::common::hooked::Hooked;
use crate::common::power::{PowerStore, Replay};
use crate::common::{Dice, PATIENCE, place, seed};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::{MemStore, Op, Store};
use farheap::{ByteCount, Error, PageId};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

const PAGE: usize = 4096;

/// Moments between two syncs at which the power is cut, in all. More by this variable.
const CUTS: u64 = 2_000;
const MORE_CUTS: &str = "FARHEAP_TEST_CUTS";

/// A page's life: when it became what. `None`: not in use.
type Life = Vec<(usize, Option<u64>)>;

/// A flush.
#[derive(Default)]
struct Flushed {
    begin: usize,
    /// Of each page, how many changes there had been.
    before: BTreeMap<u64, usize>,
    /// When it had returned; of one that failed, never.
    end: Option<usize>,
}

impl Flushed {
    fn is_over(&self, at: usize) -> bool {
        self.end.is_some_and(|end| end <= at)
    }

    /// How often a page had changed when it began.
    fn known(&self, page: u64) -> usize {
        self.before.get(&page).copied().unwrap_or(0)
    }
}

/// A pool on the device, and what was done to it.
struct Workload {
    store: PowerStore,
    pool: Option<Arc<BufferPool>>,
    /// Tells this table's pages from an older table's.
    table: u64,
    lives: BTreeMap<u64, Life>,
    flushes: Vec<Flushed>,
    versions: u64,
    dice: Dice,
}

fn config() -> PoolConfig {
    // Nothing but the workload writes: the seed decides what is done.
    PoolConfig::new().cleaner(false).huge_frames(false)
}

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::kib(1_024 + 64)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

fn fill(bytes: &mut [u8], table: u64, page: u64, version: u64) {
    for (n, word) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match n {
            0 => table,
            1 => page,
            2 => version,
            n => Dice::new(table ^ page << 32 ^ version).roll() ^ n as u64,
        };
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// The version of a page's content. Panics at anything that was never written there.
fn version(bytes: &[u8], table: u64, page: u64) -> u64 {
    let version = u64::from_le_bytes(bytes[16..24].try_into().expect("8 bytes"));
    let mut expected = vec![0; bytes.len()];
    fill(&mut expected, table, page, version);
    assert!(bytes == expected, "page {page} has a content that nobody wrote");
    version
}

impl Workload {
    /// A table in the place of an older one.
    fn new(store: PowerStore, seed: u64) -> Result<Workload, Error> {
        Workload::start(store, seed, config(), &manager())
    }

    fn start(
        store: PowerStore,
        seed: u64,
        config: PoolConfig,
        manager: &Arc<MemoryManager>,
    ) -> Result<Workload, Error> {
        let pool = config.create_on(Arc::new(store.clone()), manager)?;
        // Nor does the manager evict in the background: enough is free always.
        pool.account().set_ceiling(ByteCount(manager.limit().0 - (64 << 10)));
        let pool = Some(pool);
        let (lives, flushes) = (BTreeMap::new(), Vec::new());
        let dice = Dice::new(seed);
        let mut all = Workload { store, pool, table: seed, lives, flushes, versions: 0, dice };
        // A table is durable when it was created.
        all.flushes.push(Flushed { end: Some(all.store.now()), ..Flushed::default() });
        Ok(all)
    }

    fn pool(&self) -> Arc<BufferPool> {
        Arc::clone(self.pool.as_ref().expect("open"))
    }

    fn live(&self, page: u64) -> Option<u64> {
        self.lives.get(&page).and_then(|life| life.last()?.1)
    }

    fn change(&mut self, page: u64, to: Option<u64>) {
        let now = self.store.now();
        self.lives.entry(page).or_default().push((now, to));
    }

    fn allocate(&mut self) -> Result<(), Error> {
        let pool = self.pool();
        let mut guard = pool.allocate()?;
        let page = guard.id().0;
        assert_eq!(self.live(page), None, "page {page} is in use");
        self.overwrite(&mut guard, page);
        Ok(())
    }

    fn overwrite(&mut self, bytes: &mut [u8], page: u64) {
        self.versions += 1;
        self.change(page, Some(self.versions));
        fill(bytes, self.table, page, self.versions);
    }

    /// A page in use.
    fn some_page(&mut self) -> Option<u64> {
        let live: Vec<u64> =
            self.lives.keys().copied().filter(|page| self.live(*page).is_some()).collect();
        let index = self.dice.below(live.len().max(1) as u64);
        live.get(index as usize).copied()
    }

    fn rewrite(&mut self) -> Result<(), Error> {
        let Some(page) = self.some_page() else { return Ok(()) };
        let pool = self.pool();
        let mut guard = pool.fix_exclusive(PageId(page))?;
        assert_eq!(Some(version(&guard, self.table, page)), self.live(page), "page {page}");
        self.overwrite(&mut guard, page);
        Ok(())
    }

    fn free(&mut self) -> Result<(), Error> {
        let Some(page) = self.some_page() else { return Ok(()) };
        let pool = self.pool();
        let guard = pool.fix_exclusive(PageId(page))?;
        self.change(page, None);
        guard.free();
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Error> {
        let before = self.lives.iter().map(|(page, life)| (*page, life.len())).collect();
        let begin = self.store.now();
        let done = self.pool().flush();
        let end = done.is_ok().then(|| self.store.now());
        self.flushes.push(Flushed { begin, before, end });
        done
    }

    /// One step; what fails has changed nothing.
    fn step(&mut self, live_max: u64) -> Result<(), Error> {
        let live = self.lives.keys().filter(|page| self.live(**page).is_some()).count() as u64;
        match self.dice.below(64) {
            0 => self.flush(),
            1 => self.pool().evict_all(),
            2 => {
                self.pool().evict_clean(ByteCount::kib(64));
                Ok(())
            }
            3..20 if live < live_max => self.allocate(),
            20..30 => self.free(),
            30 => {
                // Pages enough for a list of free ones that is longer than the header.
                (0..live / 2).try_for_each(|_| self.free())
            }
            _ => self.rewrite(),
        }
    }

    /// All pages that are in use have their newest content.
    fn check_all(&self, pool: &BufferPool) {
        for (page, life) in &self.lives {
            match life.last().expect("it was allocated").1 {
                Some(newest) => {
                    let guard = pool.fix_shared(PageId(*page)).expect("in use");
                    assert_eq!(version(&guard, self.table, *page), newest, "page {page}");
                }
                None => {
                    let error = pool.fix_shared(PageId(*page)).expect_err("free");
                    assert!(matches!(error, Error::NoSuchPage { .. }), "page {page}: {error}");
                }
            }
        }
    }

    /// What a page was at a moment.
    fn state(&self, page: u64, at: usize) -> Option<u64> {
        let life: &[_] = self.lives.get(&page).map_or(&[], |life| life);
        life[..life.partition_point(|(when, _)| *when <= at)].last().and_then(|last| last.1)
    }

    /// Recovers as from a log with all changes up to the moment `at`.
    fn redo(&self, pool: &BufferPool, at: usize) {
        let in_use: Vec<u64> = pool.pages_in_use().map(|page| page.0).collect();
        for page in self.lives.keys() {
            match self.state(*page, at) {
                Some(newest) => {
                    let found = pool.fix_shared(PageId(*page));
                    if found.is_ok_and(|guard| version(&guard, self.table, *page) == newest) {
                        continue;
                    }
                    let mut guard = pool.fix_to_overwrite(PageId(*page)).expect("any page");
                    assert!(guard.lsn() == 0 && guard.iter().all(|byte| *byte == 0), "page {page}");
                    fill(&mut guard, self.table, *page, newest);
                }
                None if in_use.contains(page) => {
                    pool.fix_to_overwrite(PageId(*page)).expect("any page").free();
                }
                None => {}
            }
        }
        pool.flush().expect("flush");
        self.check_at(pool, at);
    }

    /// All is as it was at the moment `at`.
    fn check_at(&self, pool: &BufferPool, at: usize) {
        for page in self.lives.keys() {
            let Some(newest) = self.state(*page, at) else { continue };
            let guard = pool.fix_shared(PageId(*page)).expect("in use");
            assert_eq!(version(&guard, self.table, *page), newest, "page {page}");
        }
        let live = self.lives.keys().filter(|page| self.state(**page, at).is_some());
        let in_use = pool.pages_in_use().map(|page| page.0);
        assert!(in_use.eq(live.copied()), "cut at {at}");
    }

    /// Looks at what a cut at the moment `at` left. Returns the number of pages that were torn.
    fn check_cut(&self, image: &PowerStore, at: usize, is_torn: impl Fn(u64) -> bool) -> u64 {
        let pool = config().open_on(Arc::new(image.clone()), &manager()).expect("opens");
        let last = self.flushes.iter().rposition(|flush| flush.is_over(at)).expect("created");
        let flushed = &self.flushes[last];
        // Of these the header may be there.
        let others = || self.flushes[last + 1..].iter().filter(|flush| flush.begin <= at);
        let mut torn = 0;
        for page in 2..image.capacity().get() / PAGE as u64 {
            let found =
                pool.fix_shared(PageId(page)).map(|guard| version(&guard, self.table, page));
            let life: &[_] = self.lives.get(&page).map_or(&[], |life| life);
            let after = life.partition_point(|(when, _)| *when <= at);
            let known = flushed.known(page);
            let acknowledged = known.checked_sub(1).and_then(|last| life[last].1);
            let later = &life[known.min(after)..after];
            let was = |version: u64| life[..after].iter().any(|(_, then)| *then == Some(version));
            let is_later = |version| later.iter().any(|(_, then)| *then == Some(version));
            let is_changed = !later.is_empty();
            let is_freed = later.iter().any(|(_, then)| then.is_none());
            let is_right = match (&found, acknowledged) {
                (Ok(version), Some(flushed)) => *version == flushed || is_later(*version),
                // The list of free pages may have lost its end: they are as they were.
                (Ok(version), None) => was(*version),
                (Err(Error::NoSuchPage { .. }), Some(_)) => is_freed,
                (Err(Error::NoSuchPage { .. }), None) => true,
                (Err(Error::CorruptPage { .. }), Some(_)) => {
                    torn += 1;
                    is_freed || is_changed && is_torn(page)
                }
                // It was free once, and held a part of the list; or another header than that of the
                // last flush says that it is in use, which was written then, and again.
                (Err(Error::CorruptPage { .. }), None) => {
                    life[..after].iter().any(|(_, then)| then.is_none())
                        || is_torn(page)
                            && others().any(|flush| (1..after).contains(&flush.known(page)))
                }
                (Err(_), _) => false,
            };
            assert!(
                is_right,
                "cut at {at}: page {page} is {found:?}, flushed {acknowledged:?}, {life:?}"
            );
        }
        if at.is_multiple_of(4) {
            self.redo(&pool, at);
            drop(pool);
            let pool = config().open_on(Arc::new(image.clone()), &manager()).expect("flushed");
            self.check_at(&pool, at);
            return torn;
        }
        // What is in use is not given out, and the table goes on.
        let in_use = |page: u64| {
            let life = &self.lives.get(&page).map_or(&[][..], |life| life);
            let known = flushed.known(page);
            known > 0 && life[known - 1..].iter().all(|(when, then)| *when > at || then.is_some())
        };
        for _ in 0..8 {
            match pool.allocate() {
                Ok(page) => {
                    assert!(!in_use(page.id().0), "cut at {at}: {} is given out", page.id())
                }
                Err(error) => assert!(matches!(error, Error::StoreFull { .. }), "{error}"),
            }
        }
        pool.flush().expect("goes on");
        torn
    }
}

/// A device with the flushed pages of an older table all over it.
fn used_device(pages: usize) -> PowerStore {
    let store = PowerStore::new(vec![0; pages * PAGE]);
    let pool = config().create_on(Arc::new(store.clone()), &manager()).expect("pool");
    while let Ok(mut page) = pool.allocate() {
        let id = page.id().0;
        fill(&mut page, 1, id, 1);
    }
    pool.flush().expect("flush");
    drop(pool);
    PowerStore::new(store.bytes())
}

/// Runs a workload on a table of `pages` and cuts the power about `cuts` times.
fn cut_power(seed: u64, pages: usize, steps: u64, cuts: u64) {
    let device = used_device(pages);
    let before = device.bytes();
    let mut all = Workload::new(device, seed).expect("created");
    let created = all.store.now();
    for _ in 0..steps {
        match all.step(pages as u64 * 3 / 4) {
            Ok(()) | Err(Error::StoreFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    all.check_all(&all.pool());
    all.pool = None;
    let events = all.store.events();
    let mut dice = Dice::new(seed ^ 7);
    let is_sync = |at: &usize| matches!(events[*at - 1], crate::common::power::Event::Sync);
    let mut moments: Vec<usize> = (created..=events.len()).filter(is_sync).collect();
    moments.extend(moments.clone().iter().map(|at| at - 1).filter(|at| *at >= created));
    while (moments.len() as u64) < cuts {
        moments.push(created + dice.below((events.len() - created + 1) as u64) as usize);
    }
    moments.sort_unstable();
    let mut replay = Replay::new(before.len());
    replay.durable.copy_from_slice(&before);
    let mut torn = 0;
    for at in &moments {
        replay.go_to(&events, *at);
        let image = PowerStore::new(replay.cut(&events, *at, &mut dice));
        let in_doubt = |page| replay.is_in_doubt(&events, *at, page as usize * PAGE, PAGE);
        torn += all.check_cut(&image, *at, in_doubt);
    }
    let (cuts, flushes) = (moments.len(), all.flushes.len());
    println!("{cuts} cuts of {} events with {flushes} flushes; {torn} pages torn", events.len());
    assert!(flushes > 10 && torn > 0, "the test does not test");
}

fn cuts() -> u64 {
    std::env::var(MORE_CUTS).ok().and_then(|text| text.parse().ok()).unwrap_or(CUTS)
}

#[test]
fn a_power_cut_leaves_what_was_flushed_and_invents_nothing() {
    let seed = seed("a_power_cut");
    for round in 0..4 {
        cut_power(seed.wrapping_add(round), 128, 3_000, cuts() / 4);
    }
}

#[test]
fn a_power_cut_leaves_a_long_list_of_free_pages() {
    cut_power(seed("a_long_list"), 2_048, 10_000, cuts() / 20);
}

/// Runs workloads on three tables of one pool, and cuts the power of all their devices at once.
#[test]
fn a_power_cut_leaves_each_table_of_a_pool_as_it_was_flushed() {
    const PAGES: usize = 128;
    let seed = seed("each_table_of_a_pool");
    let first = used_device(PAGES);
    let devices = [first.clone(), first.beside(first.bytes()), first.beside(first.bytes())];
    let before = first.bytes();
    // The tables do not fit into the memory together.
    let manager = MemoryManager::start(ByteCount::kib(1_500)).expect("manager");
    manager.set_deadline(PATIENCE);
    let mut all: Vec<Workload> = Vec::new();
    for (n, device) in (0u64..).zip(&devices) {
        let beside = |one: &Workload| config().beside(&one.pool());
        let config = all.first().map_or_else(config, beside);
        all.push(Workload::start(device.clone(), seed + n, config, &manager).expect("created"));
    }
    let created = first.time();
    let mut dice = Dice::new(seed ^ 9);
    for _ in 0..6_000 {
        let table = dice.below(3) as usize;
        match all[table].step(PAGES as u64 * 3 / 4) {
            Ok(()) | Err(Error::StoreFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    all.iter().for_each(|table| table.check_all(&table.pool()));
    all.iter_mut().for_each(|table| table.pool = None);
    let events: Vec<_> = devices.iter().map(PowerStore::events).collect();
    let mut replays = [(); 3].map(|()| Replay::new(before.len()));
    replays.iter_mut().for_each(|replay| replay.durable.copy_from_slice(&before));
    let span = (first.time() - created + 1) as u64;
    let mut times: Vec<usize> =
        (0..cuts() / 8).map(|_| created + dice.below(span) as usize).collect();
    times.sort_unstable();
    let mut torn = 0;
    for time in times {
        for (n, table) in all.iter().enumerate() {
            let (events, at) = (&events[n], devices[n].until(time));
            replays[n].go_to(events, at);
            let image = PowerStore::new(replays[n].cut(events, at, &mut dice));
            let in_doubt = |page| replays[n].is_in_doubt(events, at, page as usize * PAGE, PAGE);
            torn += table.check_cut(&image, at, in_doubt);
        }
    }
    let flushes: Vec<usize> = all.iter().map(|table| table.flushes.len()).collect();
    println!("{flushes:?} flushes; {torn} pages torn");
    assert!(flushes.iter().all(|flushes| *flushes > 10) && torn > 0, "the test does not test");
}

/// 1/OPENED of the tables are opened once for each call that opening makes.
const OPENED: u64 = 32;

/// What a run with a failing call came to.
struct Failed {
    errors: u64,
    /// Calls to the device whose call fails, before its table was opened again.
    calls: u64,
}

/// Runs workloads on the tables of one pool, of which the device of one fails the call of this number; checks
/// memory, then each call of opening that table again, then all tables after a power cut.
fn fail_call(seed: u64, tables: usize, victim: usize, call: u64, steps: u64) -> Failed {
    const PAGES: usize = 512;
    let first = PowerStore::new(vec![0; PAGES * PAGE]);
    let others = (1..tables).map(|_| first.beside(vec![0; PAGES * PAGE]));
    let stores: Vec<PowerStore> = [first.clone()].into_iter().chain(others).collect();
    let weak = &stores[victim];
    weak.fail_at(Some(call));
    let mut errors = 0;
    let mut note = |table: usize, result: Result<(), Error>| match result {
        Ok(()) | Err(Error::StoreFull { .. }) => {}
        Err(error @ (Error::Io { .. } | Error::Os { .. } | Error::Device { .. })) => {
            assert_eq!(table, victim, "call {call}: {error}");
            errors += 1;
        }
        Err(error) => panic!("call {call}: {error}"),
    };
    let manager = manager();
    let mut all: Vec<Workload> = Vec::new();
    for (n, store) in stores.iter().enumerate() {
        let start = || {
            let beside = |one: &Workload| config().beside(&one.pool());
            let config = all.first().map_or_else(config, beside);
            Workload::start(store.clone(), seed + n as u64, config, &manager)
        };
        let started = start().or_else(|error| {
            note(n, Err(error));
            start()
        });
        all.push(started.expect("the device is well again"));
    }
    let mut dice = Dice::new(seed);
    for step in 0..steps {
        let n = dice.below(tables as u64) as usize;
        let done = if step % 64 == 63 { all[n].flush() } else { all[n].step(PAGES as u64 * 3 / 4) };
        note(n, done);
    }
    // The last flush may fail for good, if a sync failed; what is in memory is whole in any case.
    all.iter_mut().enumerate().for_each(|(n, table)| note(n, table.flush()));
    let calls = weak.calls();
    weak.fail_at(None);
    all.iter().for_each(|table| table.check_all(&table.pool()));
    all.iter_mut().for_each(|table| table.pool = None);
    let open = || config().open_on(Arc::new(weak.clone()), &manager).map(drop);
    for nth in (0..).take_while(|_| call.is_multiple_of(OPENED)) {
        let call = weak.calls() + nth;
        weak.fail_at(Some(call));
        note(victim, open());
        if weak.calls() <= call {
            break; // Opening makes no more calls.
        }
        weak.fail_at(None);
        open().expect("the device is well again");
    }
    weak.fail_at(None);
    for (store, table) in stores.iter().zip(&all) {
        let (events, end) = (store.events(), store.now());
        let mut replay = Replay::new(PAGES * PAGE);
        replay.go_to(&events, end);
        for _ in 0..3 {
            let image = PowerStore::new(replay.cut(&events, end, &mut dice));
            let in_doubt = |page| replay.is_in_doubt(&events, end, page as usize * PAGE, PAGE);
            table.check_cut(&image, end, in_doubt);
        }
    }
    Failed { errors, calls }
}

/// Fails each call to the device of a table in turn, or one in `every`, from one on that the seed says.
fn fail_calls(seed: u64, tables: usize, victim: usize, steps: u64, every: u64) {
    let all = fail_call(seed, tables, victim, u64::MAX, steps);
    assert_eq!(all.errors, 0, "no call fails");
    let mut calls: Vec<u64> = (seed % every..all.calls).step_by(every as usize).collect();
    let tried = calls.len();
    calls.retain(|call| fail_call(seed, tables, victim, *call, steps).errors > 0);
    let (all, failed) = (all.calls, calls.len());
    println!("table {victim} of {tables}: {tried} of {all} calls, {failed} of them with an error");
    // What eviction does not write is written later.
    assert!(failed > tried / 4, "{failed} of {tried} calls");
}

#[test]
fn a_call_that_fails_is_an_error_or_none_and_loses_no_page_wherever_it_is() {
    fail_calls(seed("a_call_that_fails"), 1, 0, 700, 1);
}

#[test]
fn a_call_that_fails_harms_no_other_table_of_its_pool_wherever_it_is() {
    let seed = seed("a_call_of_one_table_fails");
    let every = if cuts() > CUTS { 1 } else { 4 };
    (0..3).for_each(|victim| fail_calls(seed.wrapping_add(victim), 3, victim as usize, 400, every));
}

/// A table with a page that its log kept from being written, after a crash.
fn never_written(device: PowerStore) -> (Arc<BufferPool>, PageId) {
    let pool = config()
        .before_write(|_, lsn| if lsn == 7 { Err(Error::NotRunning) } else { Ok(()) })
        .create_on(Arc::new(device.clone()), &manager())
        .expect("pool");
    let mut page = pool.allocate().expect("page");
    page.set_lsn(7);
    let id = page.id();
    drop(page);
    let error = pool.flush().expect_err("refused");
    assert!(matches!(error, Error::WriteRefused { first, .. } if first == id), "{error}");
    drop(pool);
    (config().open_on(Arc::new(device), &manager()).expect("opens"), id)
}

#[test]
fn a_page_that_was_never_written_is_corrupt_and_neither_zeros_nor_of_an_older_table() {
    for device in [PowerStore::new(vec![0; 64 * PAGE]), used_device(64)] {
        let (pool, id) = never_written(device);
        let found = pool.fix_shared(id).map(|page| page.to_vec());
        let is_corrupt = matches!(found, Err(Error::CorruptPage { page, .. }) if page == id);
        assert!(is_corrupt, "{found:?}");
    }
}

#[test]
fn a_wrong_byte_in_either_copy_of_the_header_loses_nothing() {
    let store = PowerStore::new(vec![0; 64 * PAGE]);
    let mut all = Workload::new(store.clone(), 1).expect("created");
    for _ in 0..40 {
        all.allocate().expect("room");
    }
    for _ in 0..10 {
        all.free().expect("in use");
    }
    all.flush().expect("flush");
    all.pool = None;
    let whole = store.bytes();
    let damaged = |places: &[usize]| {
        let mut bytes = whole.clone();
        places.iter().for_each(|at| bytes[*at] ^= 0x10);
        PowerStore::new(bytes)
    };
    for at in (0..64).chain((64..2 * PAGE).step_by(97)).chain(PAGE..PAGE + 64) {
        let device = damaged(&[at]);
        for _ in 0..2 {
            // The second time from copies that were written anew.
            let pool = config().open_on(Arc::new(device.clone()), &manager());
            let pool = pool.unwrap_or_else(|error| panic!("byte {at}: {error}"));
            all.check_all(&pool);
            pool.flush().expect("flush");
        }
        let bytes = device.bytes();
        assert!(bytes[..PAGE] == bytes[PAGE..2 * PAGE], "byte {at} stays wrong");
    }
    let error = config().open_on(Arc::new(damaged(&[100, PAGE + 100])), &manager());
    let error = error.map(drop).expect_err("no header").to_string();
    assert!(error.contains("has a damaged header"), "{error}");
}

#[test]
fn a_table_of_an_older_format_is_refused_and_stays_as_it_is() {
    let store = used_device(16);
    drop(config().create_on(Arc::new(store.clone()), &manager()).expect("created"));
    let mut older = store.bytes();
    [7, PAGE + 7].into_iter().for_each(|at| older[at] = b'4');
    let device = PowerStore::new(older.clone());
    let error = config().open_on(Arc::new(device.clone()), &manager()).map(drop);
    let error = error.expect_err("another format").to_string();
    assert!(error.contains("is a table of another version of the format"), "{error}");
    assert!(device.bytes() == older);
}

#[test]
fn after_a_sync_that_failed_no_flush_succeeds_and_memory_is_whole() {
    let memory = Arc::new(MemStore::new(ByteCount::mib(1)).expect("store"));
    let faulty = FaultyStore::new(memory, 1);
    let control = faulty.control();
    let pool = config().create_on(Arc::new(faulty), &manager()).expect("pool");
    let id = pool.allocate().expect("page").id();
    control.fail_syncs(1, libc::EIO);
    for _ in 0..2 {
        let error = pool.flush().expect_err("not durable");
        assert!(matches!(error, Error::Device { .. }), "{error}");
        assert!(error.to_string().contains("open the table again"), "{error}");
    }
    let error = pool.flush_pages(&[id]).expect_err("not durable");
    assert!(matches!(error, Error::Device { .. }), "{error}");
    pool.evict_all().expect("eviction asks for no sync");
    assert_eq!(pool.fix_shared(id).map(|page| page[0]), Ok(0));
}

#[test]
fn pages_that_are_flushed_by_number_are_durable_and_others_are_left_alone() {
    let store = PowerStore::new(vec![0; 64 * PAGE]);
    let mut all = Workload::new(store.clone(), 3).expect("created");
    for _ in 0..20 {
        all.allocate().expect("room");
    }
    all.flush().expect("flush");
    let pool = all.pool();
    for page in 2..22 {
        let mut guard = pool.fix_exclusive(PageId(page)).expect("page");
        all.overwrite(&mut guard, page);
    }
    let before = pool.stats().pages_written;
    pool.flush_pages(&[PageId(9), PageId(4), PageId(9)]).expect("flush");
    assert_eq!(pool.stats().pages_written - before, 2);
    assert!(matches!(pool.flush_pages(&[PageId(22)]), Err(Error::NoSuchPage { .. })));
    drop(pool);
    all.pool = None;
    let mut replay = Replay::new(64 * PAGE);
    replay.go_to(&store.events(), store.now());
    let pool = config().open_on(Arc::new(PowerStore::new(replay.durable)), &manager());
    let pool = pool.expect("opens");
    for page in 2..22 {
        let life = &all.lives[&page];
        let expected = if [4, 9].contains(&page) { life[1].1 } else { life[0].1 };
        let found = version(&pool.fix_shared(PageId(page)).expect("whole"), all.table, page);
        assert_eq!(Some(found), expected, "page {page}");
    }
}

#[test]
fn a_new_file_and_what_was_flushed_to_it_outlive_a_power_cut_of_its_file_system() {
    let dir = tempfile::tempdir().expect("directory");
    let image = dir.path().join("disk");
    std::fs::File::create(&image).and_then(|file| file.set_len(64 << 20)).expect("file");
    let Some(mounted) = place::FileSystem::ext4(&image) else { return };
    let path = mounted.path().join("table");
    let manager = manager();
    let pool = config().create(&path, ByteCount::mib(8), &manager).expect("pool");
    for _ in 0..1_000 {
        let mut page = pool.allocate().expect("page");
        let id = page.id().0;
        fill(&mut page, 5, id, id);
    }
    pool.flush().expect("flush");
    // What the device has at this moment; the file system writes the rest seconds later.
    let cut = dir.path().join("cut");
    std::fs::copy(&image, &cut).expect("copied");
    drop(pool);
    drop(mounted);
    let mounted = place::FileSystem::mount(&cut).expect("its journal is replayed");
    let pool = config().open(mounted.path().join("table"), &manager).expect("is there");
    for page in 2..1_002 {
        let guard = pool.fix_shared(PageId(page)).expect("flushed");
        assert_eq!(version(&guard, 5, page), page);
    }
    drop(pool);
}

#[test]
fn a_page_that_is_allocated_during_a_flush_is_not_in_use_after_a_crash() {
    let pool: Arc<OnceLock<Weak<BufferPool>>> = Arc::default();
    let allocates = Arc::clone(&pool);
    let memory = Arc::new(MemStore::new(ByteCount::mib(1)).expect("store"));
    let store = Hooked::new(Arc::clone(&memory), move |op, offset| {
        // The flush writes the first page of a user.
        if op == Op::Write && offset == 2 * PAGE as u64 {
            let pool = allocates.get().and_then(Weak::upgrade).expect("made before");
            assert_eq!(pool.allocate().expect("page").id(), PageId(3));
        }
    });
    let made = config().create_on(store, &manager()).expect("pool");
    pool.set(Arc::downgrade(&made)).expect("once");
    drop(made.allocate().expect("page"));
    made.flush().expect("flush");
    drop(made);
    let pool = config().open_on(memory, &manager()).expect("opens");
    drop(pool.fix_shared(PageId(2)).expect("flushed"));
    let error = pool.fix_shared(PageId(3)).map(drop).expect_err("never written");
    assert!(matches!(error, Error::NoSuchPage { .. }), "{error}");
}
