//! The example engine: what it committed is there after `kill -9` and after power cuts, and nothing else.
//!
//! A workload of transactions that follow from a seed counts them in the store itself. After a crash
//! the store must be exactly what it was after as many transactions as it counts, and these must be at
//! least those that were acknowledged and at most those that were begun.
//!
//! Guards: G7.

#[path = "../../examples/engine/engine.rs"]
mod engine;

use crate::common::child::{Victim, case};
use crate::common::power::{PowerStore, Replay};
use crate::common::{Dice, seed};
use engine::{Engine, Medium};
use farheap::ByteCount;
use farheap::store::BlockStore;
use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// Times that the store's process is killed. More by this variable.
const KILLS: u64 = 20;
const MORE_KILLS: &str = "FARHEAP_TEST_KILLS";

/// Moments at which the power is cut.
const CUTS: u64 = 100;
const MORE_CUTS: &str = "FARHEAP_TEST_CUTS";

const LIMIT: ByteCount = ByteCount::mib(2);
const COUNTER: &[u8] = b"counter";

fn times(variable: &str, else_times: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(else_times)
}

/// What transaction `number` changes.
fn changes(seed: u64, number: u64) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let mut dice = Dice::new(seed ^ number.wrapping_mul(0x9E37_79B9));
    let count = 1 + dice.below(6);
    let mut changes: Vec<_> = (0..count)
        .map(|_| {
            let key = format!("key {:05}", dice.below(3_000)).into_bytes();
            let len = dice.below(400) as usize;
            (key, (dice.below(4) > 0).then(|| vec![number as u8; len]))
        })
        .collect();
    changes.push((COUNTER.to_vec(), Some(number.to_le_bytes().to_vec())));
    changes
}

fn advance(model: &mut Model, seed: u64, number: u64) {
    for (key, value) in changes(seed, number) {
        match value {
            Some(value) => drop(model.insert(key, value)),
            None => drop(model.remove(&key)),
        }
    }
}

fn commit(engine: &Engine, seed: u64, number: u64) -> engine::Result<()> {
    let mut rolled_back = engine.begin()?;
    rolled_back.put(b"key 00000", b"never committed")?;
    rolled_back.put(format!("never {number}").as_bytes(), b"committed")?;
    drop(rolled_back);
    let mut transaction = engine.begin()?;
    for (key, value) in changes(seed, number) {
        match value {
            Some(value) => transaction.put(&key, &value)?,
            None => transaction.remove(&key)?,
        }
    }
    assert_eq!(transaction.get(COUNTER)?, Some(number.to_le_bytes().to_vec()), "its own change");
    transaction.commit()
}

fn counted(engine: &Engine) -> u64 {
    let counter = engine.get(COUNTER).expect("readable");
    counter.map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
}

/// The store is what the model is.
fn assert_is(engine: &Engine, model: &Model) {
    let mut expected = model.iter();
    let each = |key: &[u8], value: &[u8]| {
        let next = expected.next().map(|(key, value)| (&key[..], &value[..]));
        assert_eq!(Some((key, value)), next);
        true
    };
    engine.scan(b"", each).expect("readable");
    assert_eq!(expected.next(), None, "it is missing");
}

impl Medium for PowerStore {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.get(offset as usize, into);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let full = || io::Error::from(io::ErrorKind::StorageFull);
        self.put(offset as usize, bytes).then_some(()).ok_or_else(full)
    }

    fn sync(&self) -> io::Result<()> {
        farheap::store::Store::sync(self).map_err(io::Error::other)
    }
}

/// A machine with two devices.
struct Machine {
    table: PowerStore,
    log: PowerStore,
}

const TABLE_LEN: usize = 4 << 20;
const LOG_LEN: usize = 4 << 20;

impl Machine {
    fn new(table: Vec<u8>, log: Vec<u8>) -> Machine {
        let table = PowerStore::new(table);
        let log = table.beside(log);
        Machine { table, log }
    }

    fn open(&self) -> Engine {
        let (table, log) = (Arc::new(self.table.clone()), Box::new(self.log.clone()));
        Engine::open(table, log, LIMIT).expect("opens")
    }

    /// What a power cut at this time leaves.
    fn cut(&self, before: &[Vec<u8>; 2], time: usize, dice: &mut Dice) -> Machine {
        let device = |device: &PowerStore, before: &Vec<u8>, dice: &mut Dice| {
            let (events, at) = (device.events(), device.until(time));
            let mut replay = Replay { durable: before.clone(), synced: 0 };
            replay.go_to(&events, at);
            replay.cut(&events, at, dice)
        };
        let table = device(&self.table, &before[0], dice);
        Machine::new(table, device(&self.log, &before[1], dice))
    }

    fn bytes(&self) -> [Vec<u8>; 2] {
        [self.table.bytes(), self.log.bytes()]
    }
}

#[test]
fn a_power_cut_at_any_moment_leaves_what_was_committed_and_nothing_else() {
    let seed = seed("power cuts of the engine");
    let mut dice = Dice::new(seed);
    let machine = Machine::new(vec![0; TABLE_LEN], vec![0; LOG_LEN]);
    let blank = machine.bytes();
    let engine = machine.open();
    let opened = machine.table.time();
    // When each transaction was begun, and when it was acknowledged.
    let mut life = vec![(0, opened)];
    let mut models = vec![Model::new()];
    for number in 1..=400 {
        let begun = machine.table.time();
        commit(&engine, seed, number).expect("committed");
        life.push((begun, machine.table.time()));
        let mut model = models[number as usize - 1].clone();
        advance(&mut model, seed, number);
        models.push(model);
    }
    let end = machine.table.time();
    drop(engine);
    for _ in 0..times(MORE_CUTS, CUTS) {
        let time = dice.below(end as u64 + 1) as usize;
        let acknowledged = life.iter().rposition(|(_, end)| *end <= time).unwrap_or(0) as u64;
        let begun = life.iter().rposition(|(begun, _)| *begun < time).unwrap_or(0) as u64;
        let mut left = machine.cut(&blank, time, &mut dice);
        // The power is cut again while the store recovers, now and then.
        let mut first = None;
        for _ in 0..=dice.below(3) {
            let before = left.bytes();
            let engine = left.open();
            let count = counted(&engine);
            assert!(
                (acknowledged..=begun).contains(&count),
                "cut at {time}: {count}, but {acknowledged} to {begun} were committed"
            );
            assert_eq!(*first.get_or_insert(count), count, "cut at {time}, and again");
            assert_is(&engine, &models[count as usize]);
            drop(engine);
            let again = dice.below(left.table.time() as u64 + 1) as usize;
            left = left.cut(&before, again, &mut dice);
        }
        let engine = left.open();
        let count = counted(&engine) as usize;
        let mut model = models[count].clone();
        for number in count as u64 + 1..count as u64 + 40 {
            commit(&engine, seed, number).expect("goes on");
            advance(&mut model, seed, number);
        }
        assert_is(&engine, &model);
        drop(engine);
        assert_is(&left.open(), &model);
    }
}

fn open_files(dir: &Path) -> Engine {
    let mut options = std::fs::OpenOptions::new();
    let log = options.read(true).write(true).create(true).truncate(false).open(dir.join("log"));
    let log = log.expect("log");
    let path = dir.join("table");
    let table = if path.exists() {
        BlockStore::open(&path, None)
    } else {
        BlockStore::create(&path, Some(ByteCount::mib(64)), false)
    };
    Engine::open(Arc::new(table.expect("table")), Box::new(log), LIMIT).expect("opens")
}

/// Not a test by itself: the process that [`a_killed_process_leaves_what_was_committed`] kills.
/// Commits transactions for ever.
fn commit_until_killed(dir: &str, seed: u64) -> ! {
    let engine = open_files(Path::new(dir));
    for number in counted(&engine) + 1.. {
        commit(&engine, seed, number).expect("committed");
        println!("committed {number}");
        io::stdout().flush().expect("a pipe");
    }
    unreachable!("a number for each transaction");
}

/// Runs the child and kills it a while after `commits` transactions; returns the last one that it
/// acknowledged.
fn run_and_kill(dir: &Path, seed: u64, commits: u64, after: Duration) -> u64 {
    let mut child = Victim::start(KILLED, &format!("{seed} {}", dir.display()));
    let next = |child: &mut Victim| child.said("committed ").map(|number| number.parse().ok());
    let mut acknowledged = 0;
    for _ in 0..commits {
        acknowledged = next(&mut child).flatten().max(Some(acknowledged)).unwrap_or(0);
    }
    std::thread::sleep(after);
    child.kill();
    // A line that was cut off has fewer digits: a smaller number.
    while let Some(number) = next(&mut child) {
        acknowledged = number.max(Some(acknowledged)).unwrap_or(0);
    }
    acknowledged
}

const KILLED: &str = "a_killed_process_leaves_what_was_committed";

#[test]
fn a_killed_process_leaves_what_was_committed() {
    if let Some(case) = case(KILLED) {
        let (seed, dir) = case.split_once(' ').expect("both");
        commit_until_killed(dir, seed.parse().expect("a number"));
    }
    let seed = seed("kills of the engine");
    let mut dice = Dice::new(seed);
    let dir = tempfile::tempdir().expect("directory");
    let (mut model, mut count) = (Model::new(), 0);
    for round in 0..times(MORE_KILLS, KILLS) {
        // Mostly while it works, now and then while it starts and recovers.
        let commits = dice.below(4).min(1) * (1 + dice.below(8));
        let after = Duration::from_micros(dice.below(30_000));
        let acknowledged = run_and_kill(dir.path(), seed, commits, after);
        let engine = open_files(dir.path());
        let now = counted(&engine);
        assert!(now >= acknowledged && now >= count, "{now}, but {acknowledged} were committed");
        (count + 1..=now).for_each(|number| advance(&mut model, seed, number));
        count = now;
        assert_is(&engine, &model);
        if round % 8 == 0 {
            engine.checkpoint().expect("checkpoint");
        }
    }
    println!("{count} transactions");
    assert!(count >= KILLS / 2, "it was killed before it did anything");
}
