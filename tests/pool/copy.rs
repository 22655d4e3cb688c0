//! A copy of a table that is made while others change it: with the log from the copy's beginning on it is
//! the table as it is (`book/src/design/pool.md`, a copy while writers go on).
//!
//! Guards: G7.

use crate::common::{Dice, PATIENCE, StopOnDrop, eventually, seed};
use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::MemStore;
use farheap::{ByteCount, Error, PageId};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// What became of a page: filled with a byte, or freed.
type Record = (PageId, Option<u8>);

/// A table with its log.
struct Table {
    pool: Arc<BufferPool>,
    log: Mutex<Vec<Record>>,
    /// Shared by each change, from its record to its end.
    changes: RwLock<()>,
}

fn store() -> Arc<MemStore> {
    Arc::new(MemStore::new(ByteCount::mib(32)).expect("store"))
}

fn manager() -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(3)).expect("manager");
    manager.set_deadline(PATIENCE);
    manager
}

impl Table {
    fn new() -> Table {
        let pool = PoolConfig::new().create_on(store(), &manager()).expect("pool");
        Table { pool, log: Mutex::new(Vec::new()), changes: RwLock::new(()) }
    }

    fn note(&self, page: PageId, what: Option<u8>) {
        self.log.lock().expect("no panic").push((page, what));
    }

    /// Allocates, changes and frees pages of its own until `stop`.
    fn change(&self, mut dice: Dice, stop: &AtomicBool) {
        let mut mine: Vec<PageId> = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let _change = self.changes.read().expect("no panic");
            let value = dice.roll() as u8;
            let at = dice.below(mine.len().max(1) as u64) as usize;
            if mine.len() < 100 || mine.len() < 600 && dice.below(2) == 0 {
                let mut page = self.pool.allocate().expect("room");
                page.fill(value);
                self.note(page.id(), Some(value));
                mine.push(page.id());
            } else if dice.below(4) == 0 {
                let page = mine.swap_remove(at);
                let guard = self.pool.fix_exclusive(page).expect("page");
                self.note(page, None);
                guard.free();
            } else {
                let mut guard = self.pool.fix_exclusive(mine[at]).expect("page");
                guard.fill(value);
                self.note(mine[at], Some(value));
            }
        }
    }

    /// Copies the table into another; returns where the log began then.
    fn copy_to(&self, copy: &BufferPool) -> usize {
        let begin = {
            let _none = self.changes.write().expect("no panic");
            self.log.lock().expect("no panic").len()
        };
        for page in self.pool.pages_in_use() {
            match self.pool.fix_shared(page) {
                Ok(from) => copy.fix_to_overwrite(page).expect("room").copy_from_slice(&from),
                Err(Error::NoSuchPage { .. }) => {} // Freed meanwhile: the log says so.
                Err(error) => panic!("{page}: {error}"),
            }
        }
        begin
    }
}

/// Repeats what the log says.
fn redo(copy: &BufferPool, log: &[Record]) {
    let last: BTreeMap<PageId, Option<u8>> = log.iter().copied().collect();
    for (page, what) in last {
        let is_in_use = !matches!(copy.fix_shared(page), Err(Error::NoSuchPage { .. }));
        match what {
            Some(value) => copy.fix_to_overwrite(page).expect("room").fill(value),
            None if is_in_use => copy.fix_exclusive(page).expect("page").free(),
            None => {}
        }
    }
}

#[test]
fn a_copy_with_the_log_from_its_beginning_is_the_table() {
    let seed = seed("a_copy_with_the_log");
    let table = Table::new();
    let into = store();
    let copy = PoolConfig::new().create_on(Arc::clone(&into) as _, &manager()).expect("pool");
    let stop = AtomicBool::new(false);
    let (begin, end) = std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        for thread in 0..2 {
            let (table, stop) = (&table, &stop);
            scope.spawn(move || table.change(Dice::new(seed ^ thread), stop));
        }
        let len = || table.log.lock().expect("no panic").len();
        assert!(eventually(|| len() > 3_000), "the table grows");
        let begin = table.copy_to(&copy);
        let end = len();
        assert!(eventually(|| len() > end + 1_000), "the writers went on");
        drop(others);
        (begin, end)
    });
    let log = table.log.into_inner().expect("no panic");
    println!("{} records while {} pages were copied", end - begin, copy.pages_in_use().count());
    // To the log's end, or to any moment from the copy's end on.
    for upto in [end, log.len()] {
        redo(&copy, &log[begin..upto]);
        let pages: BTreeMap<PageId, Option<u8>> = log[..upto].iter().copied().collect();
        let in_use: BTreeMap<PageId, u8> =
            pages.into_iter().filter_map(|(page, value)| Some((page, value?))).collect();
        assert!(copy.pages_in_use().eq(in_use.keys().copied()));
        for (page, value) in in_use {
            let guard = copy.fix_shared(page).expect("page");
            assert!(guard.iter().all(|byte| *byte == value), "{page}");
        }
    }
    copy.flush().expect("flush");
    let count = copy.pages_in_use().count();
    drop(copy);
    let again = PoolConfig::new().open_on(into, &manager()).expect("opens");
    assert_eq!(again.pages_in_use().count(), count);
}
