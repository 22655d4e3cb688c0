//! A database in a pool: answers as those of a map, under a limit smaller than the data, through crashes and failures.

#[path = "../../../tests/common/power.rs"]
#[allow(dead_code, reason = "a part of it is used")]
mod power;

use farheap::manager::MemoryManager;
use farheap::pool::{BufferPool, PoolConfig};
use farheap::store::Store;
use farheap::{ByteCount, Result};
use farheap_redb::PoolBackend;
use power::{PowerStore, Replay};
use redb::{
    Database, Durability, ReadableDatabase, ReadableTable, ReadableTableMetadata, TableDefinition,
};
use std::collections::BTreeMap;
use std::sync::Arc;

const TABLE: TableDefinition<u64, &[u8]> = TableDefinition::new("table");
/// What redb caches itself.
const CACHE: usize = 1 << 20;

/// A small fast generator of test decisions (splitmix64), so that a printed seed repeats a run.
#[derive(Clone, Debug)]
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.roll() % bound
    }
}

/// The seed of this run: `FARHEAP_TEST_SEED`, else from the clock; printed, so that it repeats.
fn seed(test: &str) -> u64 {
    let seed = std::env::var("FARHEAP_TEST_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("the clock is past 1970").as_nanos() as u64
    });
    println!("{test}: FARHEAP_TEST_SEED={seed}");
    seed
}

type Model = BTreeMap<u64, Vec<u8>>;

fn config() -> PoolConfig {
    PoolConfig::new().whole_pages(true)
}

fn database(pool: &Arc<BufferPool>) -> Database {
    let backend = PoolBackend::new(pool).expect("a backend");
    let mut builder = Database::builder();
    builder.set_cache_size(CACHE).create_with_backend(backend).expect("a database")
}

/// Changes some keys in one transaction; returns the map after it.
fn change(
    database: &Database,
    before: &Model,
    dice: &mut Dice,
) -> (Model, std::result::Result<(), redb::Error>) {
    let mut after = before.clone();
    let mut write = || {
        let mut writing = database.begin_write()?;
        writing.set_durability(Durability::Immediate)?;
        {
            let mut table = writing.open_table(TABLE)?;
            for _ in 0..dice.below(40) + 1 {
                let key = dice.below(300);
                if dice.below(4) == 0 {
                    table.remove(key)?;
                    after.remove(&key);
                } else {
                    let value = vec![dice.roll() as u8; dice.below(3000) as usize];
                    table.insert(key, &*value)?;
                    after.insert(key, value);
                }
            }
        }
        writing.commit()?;
        Ok(())
    };
    let ended = write();
    (after, ended)
}

/// Everything that the database has.
fn content(database: &Database) -> Model {
    let reading = database.begin_read().expect("a transaction");
    let table = match reading.open_table(TABLE) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Model::new(),
        Err(error) => panic!("{error}"),
    };
    let entries = table.iter().expect("entries");
    let own =
        |entry: std::result::Result<(redb::AccessGuard<u64>, redb::AccessGuard<&[u8]>), _>| {
            let (key, value) = entry.expect("an entry");
            (key.value(), value.value().to_vec())
        };
    entries.map(own).collect()
}

#[test]
fn a_database_larger_than_the_limit_answers_as_a_map_does() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("table");
    let manager = MemoryManager::start(ByteCount::mib(4)).expect("a manager");
    let pool = config().create(&path, ByteCount::gib(1), &manager).expect("a pool");
    let mut stored = database(&pool);
    let mut dice = Dice(seed("a_database_larger_than_the_limit"));
    let mut model = Model::new();
    for _ in 0..10 {
        let writing = stored.begin_write().expect("a transaction");
        let mut table = writing.open_table(TABLE).expect("a table");
        for _ in 0..1000 {
            let key = dice.below(8_000);
            let value = vec![key as u8; dice.below(2000) as usize];
            table.insert(key, &*value).expect("room");
            model.insert(key, value);
        }
        drop(table);
        writing.commit().expect("a disk");
    }
    assert!(content(&stored) == model, "all entries, in order");
    let stats = pool.stats();
    assert!(stats.evicted > 500 && stats.misses > 500, "the limit was at work: {stats}");
    let used = manager.stats();
    assert!(used.held_bytes_max <= used.limit_bytes, "{used}");

    // Readers of the state before, beside a writer.
    let old = stored.begin_read().expect("a transaction");
    let writing = stored.begin_write().expect("a transaction");
    let kept: Vec<u64> = model.keys().copied().filter(|key| key % 2 == 0).collect();
    let mut table = writing.open_table(TABLE).expect("a table");
    table.retain(|key, _| key % 2 == 0).expect("a disk");
    drop(table);
    writing.commit().expect("a disk");
    let before = old.open_table(TABLE).expect("the table");
    assert_eq!(before.len().expect("a count"), model.len() as u64);
    drop((before, old));

    // Compaction cuts the storage; the rest is there after a restart.
    model.retain(|key, _| key % 2 == 0);
    let pages = pool.pages();
    stored.compact().expect("a disk");
    assert!(stored.check_integrity().expect("a disk"), "nothing to repair");
    drop((stored, pool));
    let pool = config().open(&path, &manager).expect("the pool");
    assert!(pool.pages() < pages, "{} of {pages} pages", pool.pages());
    let stored = database(&pool);
    assert!(content(&stored) == model && content(&stored).len() == kept.len());
}

#[test]
fn another_consumer_gets_the_memory_of_a_database_and_gives_it_back() {
    let directory = tempfile::tempdir().expect("a directory");
    let manager = MemoryManager::start(ByteCount::mib(12)).expect("a manager");
    let path = directory.path().join("table");
    let pool = config().create(&path, ByteCount::gib(1), &manager).expect("a pool");
    let stored = database(&pool);
    let insert = |byte: u8| {
        let writing = stored.begin_write().expect("a transaction");
        let mut table = writing.open_table(TABLE).expect("a table");
        for key in 0..6_000 {
            table.insert(key, &*vec![byte; 1500]).expect("room");
        }
        drop(table);
        writing.commit().expect("a disk");
    };
    insert(1);
    let resident = || pool.stats().resident_bytes;
    let before = resident();
    assert!(before > ByteCount::mib(8), "{before}");
    let memory = manager.allocate_temporary(ByteCount::mib(8)).expect("memory");
    assert!(!memory.is_spilled(), "there is no heap to spill to");
    assert!(resident() < ByteCount::mib(5), "{}", resident());
    insert(2); // With what is left.
    assert!(content(&stored).values().all(|value| *value == [2; 1500]));
    drop(memory);
    assert_eq!(content(&stored).len(), 6_000);
    assert!(resident() > ByteCount::mib(8), "{}", resident());
}

#[test]
fn readers_see_one_commit_each_while_a_writer_goes_on() {
    const READERS: usize = 3;
    const READS: usize = 15;
    const KEYS: u64 = 1_000;
    let directory = tempfile::tempdir().expect("a directory");
    let manager = MemoryManager::start(ByteCount::mib(3)).expect("a manager");
    let path = directory.path().join("table");
    let pool = config().create(&path, ByteCount::gib(1), &manager).expect("a pool");
    let stored = database(&pool);
    let write = |byte: u8| {
        let mut writing = stored.begin_write().expect("a transaction");
        // Without waiting for the disk, so that much happens at once.
        writing.set_durability(Durability::None).expect("a new transaction");
        let mut table = writing.open_table(TABLE).expect("a table");
        for key in 0..KEYS {
            table.insert(key, &*vec![byte; 2_000 + usize::from(byte)]).expect("room");
        }
        drop(table);
        writing.commit().expect("memory");
    };
    write(0);
    let read = || {
        let mut last = 0;
        for _ in 0..READS {
            let found = content(&stored);
            let byte = found[&0][0];
            assert!(byte >= last, "{byte} after {last}");
            let expected = vec![byte; 2_000 + usize::from(byte)];
            assert!(found.len() as u64 == KEYS && found.values().all(|value| *value == expected));
            last = byte;
        }
    };
    std::thread::scope(|scope| {
        (0..READERS).for_each(|_| drop(scope.spawn(read)));
        (1..=20).for_each(write);
    });
    assert!(pool.stats().misses > 0, "the limit was at work");
}

/// A pool without a thread that writes by itself, so that the seed decides what is written.
fn quiet(store: Arc<dyn Store>, is_new: bool) -> Result<Arc<BufferPool>> {
    let manager = MemoryManager::start(ByteCount::kib(1_280))?;
    let config = config().cleaner(false).huge_frames(false);
    if is_new { config.create_on(store, &manager) } else { config.open_on(store, &manager) }
}

const DISK: usize = 12 << 20;

#[test]
fn what_was_committed_is_there_after_a_power_cut() {
    let mut dice = Dice(seed("what_was_committed"));
    let store = PowerStore::new(vec![0; DISK]);
    let pool = quiet(Arc::new(store.clone()), true).expect("a pool");
    let stored = database(&pool);
    // Of each commit the event after which it was begun, and after which it had returned.
    let created = store.now();
    let mut commits = vec![(0, created, Model::new())];
    for _ in 0..60 {
        let begun = store.now();
        let (after, ended) = change(&stored, &commits[commits.len() - 1].2, &mut dice);
        ended.expect("a working device");
        commits.push((begun, store.now(), after));
    }
    assert!(pool.stats().evicted > 0, "pages left between two syncs: {}", pool.stats());
    drop((stored, pool));
    let events = store.events();
    let mut replay = Replay::new(DISK);
    let cuts = 120;
    for cut in 0..cuts {
        let span = events.len() - created;
        let at = created + span * cut / cuts + dice.below((span / cuts) as u64) as usize;
        replay.go_to(&events, at);
        let image = replay.cut(&events, at, &mut dice);
        let pool = quiet(Arc::new(PowerStore::new(image)), false).expect("the table");
        let found = content(&database(&pool));
        let last = commits.iter().rposition(|(_, ended, _)| *ended <= at).expect("the creation");
        let next = commits.get(last + 1).filter(|(begun, ..)| *begun <= at);
        let is_last = found == commits[last].2;
        assert!(
            is_last || next.is_some_and(|(.., after)| found == *after),
            "cut {cut} at event {at}: {} entries, {} after commit {last}",
            found.len(),
            commits[last].2.len()
        );
    }
}

#[test]
fn a_device_that_fails_once_costs_no_commit() {
    let mut dice = Dice(seed("a_device_that_fails"));
    for _ in 0..40 {
        let store = PowerStore::new(vec![0; DISK]);
        let pool = quiet(Arc::new(store.clone()), true).expect("a pool");
        let stored = database(&pool);
        let (before, ended) = change(&stored, &Model::new(), &mut dice);
        ended.expect("a working device");
        let calls = store.calls();
        store.fail_at(Some(calls + dice.below(60)));
        let mut model = before;
        let mut next = None;
        for _ in 0..20 {
            let (after, ended) = change(&stored, &model, &mut dice);
            if ended.is_err() {
                next = Some(after);
                break;
            }
            model = after;
        }
        store.fail_at(None);
        drop(stored);
        drop(pool);
        let pool = quiet(Arc::new(PowerStore::new(store.bytes())), false).expect("the table");
        let found = content(&database(&pool));
        let is_next = next.is_some_and(|next| found == next);
        assert!(found == model || is_next, "{} of {} entries", found.len(), model.len());
    }
}

#[test]
fn a_full_table_fails_the_transaction_and_keeps_what_was_committed() {
    let store = PowerStore::new(vec![0; 3 << 20]);
    let pool = quiet(Arc::new(store.clone()), true).expect("a pool");
    let stored = database(&pool);
    let insert = |keys: std::ops::Range<u64>| -> std::result::Result<(), redb::Error> {
        let writing = stored.begin_write()?;
        {
            let mut table = writing.open_table(TABLE)?;
            for key in keys {
                table.insert(key, &*vec![7; 1000])?;
            }
        }
        writing.commit()?;
        Ok(())
    };
    insert(0..200).expect("room for 200 KB");
    let full = insert(200..20_000).expect_err("no room for 20 MB");
    let text = format!("{full:?}");
    assert!(text.contains("StorageFull"), "{text}");
    drop(stored);
    let found = content(&database(&pool));
    assert!(found.len() == 200 && found.values().all(|value| *value == [7; 1000]));
}
