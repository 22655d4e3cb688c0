//! A small transactional key-value store on a buffer pool, a B+-tree and a log of its own.
//!
//! ```text
//! cargo run --release --example engine                                   # moves money about, and checks
//! cargo run --release --example engine -- --dir /mnt/store put KEY VALUE
//! cargo run --release --example engine -- --dir /mnt/store get KEY
//! cargo run --release --example engine -- --dir /mnt/store remove KEY
//! cargo run --release --example engine -- --dir /mnt/store list
//! cargo run --release --example engine -- --dir /mnt/store checkpoint
//! ```
//! `engine.rs` is the store, `log.rs` its log; `book/src/how_to/engine.md` says how they work together. What is
//! committed survives `kill -9` and power cuts (`tests/pool/crashed_engine.rs`).

mod engine;

use clap::{Parser, Subcommand};
use engine::{Engine, Result};
use farheap::ByteCount;
use farheap::store::BlockStore;
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A key-value store that loses nothing that was committed.
#[derive(Debug, Parser)]
struct Options {
    /// Directory of the store; one that is removed at the end unless given.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// MiB of memory for the table's pages.
    #[arg(long, default_value_t = 8)]
    limit_mib: u64,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Sets a key's value.
    Put { key: String, value: String },
    /// Prints a key's value.
    Get { key: String },
    /// Removes a key.
    Remove { key: String },
    /// Prints all entries.
    List,
    /// Brings the table up to date and empties the log.
    Checkpoint,
    /// Moves money between accounts, and checks that none is lost.
    Demo,
}

fn open(dir: &Path, limit: ByteCount) -> Result<Engine> {
    let (table, log) = (dir.join("table"), dir.join("log"));
    let log = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(log)?;
    // The log's name, too, has to outlive a power cut; the pool sees to the table's.
    std::fs::File::open(dir)?.sync_all()?;
    let store = match table.exists() {
        true => BlockStore::open(&table, None)?,
        false => BlockStore::create(&table, Some(ByteCount::gib(4)), false)?,
    };
    Engine::open(Arc::new(store), Box::new(log), limit)
}

fn main() -> Result<()> {
    let options = Options::parse();
    let temporary = if options.dir.is_none() { Some(tempfile::tempdir()?) } else { None };
    let dir = options.dir.as_deref().or(temporary.as_ref().map(|dir| dir.path()));
    let dir = dir.expect("one of the two");
    let limit = ByteCount::mib(options.limit_mib);
    let engine = open(dir, limit)?;
    match options.command.unwrap_or(Command::Demo) {
        Command::Put { key, value } => {
            let mut transaction = engine.begin()?;
            transaction.put(key.as_bytes(), value.as_bytes())?;
            transaction.commit()
        }
        Command::Remove { key } => {
            let mut transaction = engine.begin()?;
            transaction.remove(key.as_bytes())?;
            transaction.commit()
        }
        Command::Checkpoint => engine.checkpoint(),
        Command::Get { key } => {
            let value = engine.get(key.as_bytes())?.ok_or("there is no such key")?;
            println!("{}", String::from_utf8_lossy(&value));
            Ok(())
        }
        Command::List => engine.scan(b"", |key, value| {
            println!("{}\t{}", String::from_utf8_lossy(key), String::from_utf8_lossy(value));
            true
        }),
        Command::Demo => {
            fill(&engine)?;
            move_about(&engine)?;
            let before = sum(&engine)?;
            // Dropping the store writes nothing: it is opened as after a crash.
            drop(engine);
            let after = sum(&open(dir, limit)?)?;
            println!("{} accounts have {before} before and {after} after opening again", ACCOUNTS);
            if before == after { Ok(()) } else { Err("money was lost".into()) }
        }
    }
}

const ACCOUNTS: u64 = 20_000;
const EACH: u64 = 100;

fn account(number: u64) -> [u8; 8] {
    number.to_be_bytes()
}

fn amount(value: &[u8]) -> Result<u64> {
    Ok(u64::from_le_bytes(value.try_into()?))
}

/// Gives each account its money, in a few transactions.
fn fill(engine: &Engine) -> Result<()> {
    for first in (0..ACCOUNTS).step_by(100) {
        let mut transaction = engine.begin()?;
        for number in first..first + 100 {
            transaction.put(&account(number), &EACH.to_le_bytes())?;
        }
        transaction.commit()?;
    }
    Ok(())
}

/// Moves money between accounts. Where there is not enough the transaction is dropped.
fn move_about(engine: &Engine) -> Result<()> {
    let mut refused = 0;
    for round in 0..2_000u64 {
        let [from, to] = [7919, 104_729].map(|factor| account(round * factor % ACCOUNTS));
        let moved = round % 250;
        let mut transaction = engine.begin()?;
        let has = amount(&transaction.get(&from)?.ok_or("no such account")?)?;
        transaction.put(&from, &has.wrapping_sub(moved).to_le_bytes())?;
        let has_other = amount(&transaction.get(&to)?.ok_or("no such account")?)?;
        transaction.put(&to, &(has_other + moved).to_le_bytes())?;
        if has < moved || from == to {
            refused += 1;
            continue;
        }
        transaction.commit()?;
    }
    println!("{refused} of 2000 transactions were rolled back");
    Ok(())
}

fn sum(engine: &Engine) -> Result<u64> {
    let (mut total, mut wrong) = (0, None);
    engine.scan(b"", |_, value| match amount(value) {
        Ok(amount) => {
            total += amount;
            true
        }
        Err(error) => {
            wrong = Some(error);
            false
        }
    })?;
    wrong.map_or(Ok(total), Err)
}
