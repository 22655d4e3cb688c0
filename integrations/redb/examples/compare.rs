//! A database of redb in a buffer pool beside one in a file: answers, times, resident memory of the process.
//!
//! `cargo run --release --example compare -- pool` and `-- file`, each in a process of its own. Both have 64 MiB, or
//! `LIMIT`: redb's cache over a file, or a small one and a pool. `KEYS` is another number of keys than 1,000,000.

use anyhow::{Context, Result, bail};
use farheap::{ByteCount, manager::MemoryManager, pool::PoolConfig};
use farheap_redb::PoolBackend;
use redb::{Database, ReadableDatabase, TableDefinition};
use std::time::Instant;

const TABLE: TableDefinition<u64, &[u8]> = TableDefinition::new("table");
/// Of the memory, what redb caches itself above a pool.
const CACHE: ByteCount = ByteCount::mib(4);
/// Bytes of a value; lookups; changes, in transactions of 100.
const VALUE: usize = 200;
const LOOKUPS: u64 = 50_000;
const CHANGES: u64 = 5_000;

/// The key at a place of a sequence without order.
fn key(at: u64, keys: u64) -> u64 {
    let mixed = at.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) % keys
}

fn insert(database: &Database, keys: impl Iterator<Item = u64>, byte: u8) -> Result<()> {
    let writing = database.begin_write()?;
    let mut table = writing.open_table(TABLE)?;
    for key in keys {
        let mut value = [byte; VALUE];
        value[..8].copy_from_slice(&key.to_le_bytes());
        table.insert(key, &value[..])?;
    }
    drop(table);
    Ok(writing.commit()?)
}

/// Sum over the values at some keys.
fn sum(database: &Database, keys: impl Iterator<Item = u64>) -> Result<u64> {
    let reading = database.begin_read()?;
    let table = reading.open_table(TABLE)?;
    let mut sum = 0_u64;
    for key in keys {
        let value = table.get(key)?.context("every key is there")?;
        sum += value.value().iter().map(|byte| u64::from(*byte)).sum::<u64>();
    }
    Ok(sum)
}

/// Does something and prints how long that took, what it returned, and the peak of resident memory so far.
fn timed<T: std::fmt::Debug>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<()> {
    let began = Instant::now();
    let answer = work()?;
    let seconds = began.elapsed().as_secs_f64();
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find(|line| line.starts_with("VmHWM")).context("no VmHWM")?;
    println!("{what:<28} {seconds:7.2} s  {answer:?}  {}", peak.replace('\t', " "));
    Ok(())
}

fn main() -> Result<()> {
    let keys = std::env::var("KEYS").map_or(Ok(1_000_000), |text| text.parse())?;
    let directory = tempfile::tempdir_in(".")?; // Not in memory, as /tmp may be.
    let path = directory.path().join("database");
    let mut builder = Database::builder();
    let memory: ByteCount = std::env::var("LIMIT").as_deref().unwrap_or("64MiB").parse()?;
    let shared = memory.0.checked_sub(CACHE.0).context("LIMIT: redb alone has 4 MiB of it")?;
    let manager = MemoryManager::start(ByteCount(shared))?;
    let database = match std::env::args().nth(1).as_deref() {
        Some("file") => builder.set_cache_size(memory.as_usize()).create(&path)?,
        None | Some("pool") => {
            let config = PoolConfig::new().whole_pages(true);
            let pool = config.create(&path, ByteCount::gib(64), &manager)?;
            builder
                .set_cache_size(CACHE.as_usize())
                .create_with_backend(PoolBackend::new(&pool)?)?
        }
        Some(other) => bail!("{other}: pool or file"),
    };
    timed("loaded", || {
        (0..10).try_for_each(|part| insert(&database, keys * part / 10..keys * (part + 1) / 10, 1))
    })?;
    let all = || (0..LOOKUPS).map(|at| key(at, keys));
    timed("lookups of all keys", || sum(&database, all()))?;
    timed("lookups of a tenth of them", || sum(&database, all().map(|key| key / 10)))?;
    timed("transactions", || {
        (0..CHANGES / 100).try_for_each(|at| {
            insert(&database, (100 * at..100 * (at + 1)).map(|at| key(at, keys)), 2)
        })
    })?;
    timed("scan", || sum(&database, 0..keys))?;
    // Another part of the program needs memory: the pool gives it, and takes it back afterwards.
    let half = ByteCount(shared / 2);
    timed("half for something else", || Ok(manager.allocate_temporary(half).map(drop)?))?;
    timed("lookups again", || sum(&database, all()))
}
