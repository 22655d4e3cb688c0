//! Queries on several threads while columns migrate back and forth.
//!
//! One thread migrates column by column, to local memory and back to its tier, so that local memory
//! has one column at most; the others run queries and check every answer. Readers are timed by `waits`.

use crate::answers::Answer;
use crate::queries;
use crate::tables::{AnyColumn, Database};
use crate::tiers::Tiers;
use crate::waits;
use farheap::{ByteCount, Tier};
use farheap_segments::{Migration, Migrator, SegmentError};
use serde::Serialize;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// What happened.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Stress {
    pub(crate) seconds: f64,
    pub(crate) threads: usize,
    pub(crate) queries: u64,
    pub(crate) wrong: u64,
    /// The longest that a reader waited for a chunk's values.
    pub(crate) reader_wait_us_max: f64,
    /// Segments that have moved.
    pub(crate) segments: u64,
    pub(crate) bytes: u64,
    /// The longest that the migrator waited until the readers of an old copy had left.
    pub(crate) migrator_wait_ms_max: f64,
    /// Why migrating ended before its time.
    pub(crate) error: Option<String>,
}

impl Stress {
    /// Bytes migrated a second.
    pub(crate) fn rate(&self) -> ByteCount {
        ByteCount((self.bytes as f64 / self.seconds.max(1e-9)) as u64)
    }

    /// Counts a migration in; whether to go on.
    fn count(&mut self, migration: &Migration) -> bool {
        self.segments += migration.moved() as u64;
        self.bytes += migration.progress().bytes().get();
        let wait = migration.reader_wait_max().as_secs_f64() * 1e3;
        self.migrator_wait_ms_max = self.migrator_wait_ms_max.max(wait);
        match migration.error() {
            None => true,
            Some(SegmentError::Cancelled) => false,
            Some(error) => {
                self.error = Some(error.to_string());
                false
            }
        }
    }
}

/// Moves all segments of a column.
pub(crate) fn migrate(
    column: &dyn AnyColumn,
    to: Tier,
    rate: Option<ByteCount>,
    cancel: &AtomicBool,
) -> Migration {
    let mut migrator = Migrator::new();
    migrator.rate(rate.unwrap_or_default()).cancelled_by(cancel);
    column.move_all(&mut migrator, to);
    migrator.run(|_| {})
}

/// Runs the queries on `threads` threads for `time` while the columns migrate, and checks every answer;
/// what is wrong is told in a line each.
pub(crate) fn run(
    data: &Database,
    tiers: &Tiers,
    right: &[(u8, Answer)],
    threads: usize,
    time: Duration,
    rate: Option<ByteCount>,
) -> (Stress, Vec<String>) {
    let (stop, columns_moved) = (&AtomicBool::new(false), &AtomicU64::new(0));
    waits::take_longest();
    let begun = Instant::now();
    let (mut stress, readers) = thread::scope(|scope| {
        let readers: Vec<_> = (0..threads)
            .map(|turn| scope.spawn(move || query_until(stop, data, right, turn)))
            .collect();
        let migrator = scope.spawn(|| migrate_until(stop, data, tiers, rate, columns_moved));
        // Sleeps in pieces: a migration that failed ends the run. One column is moved on any machine.
        let is_over = || begun.elapsed() >= time && columns_moved.load(Relaxed) > 0;
        while !is_over() && !migrator.is_finished() {
            thread::sleep(Duration::from_millis(20).min(time));
        }
        stop.store(true, Relaxed);
        let stress = migrator.join().expect("migrating ends");
        let readers = readers.into_iter().map(|reader| reader.join().expect("queries end"));
        (stress, readers.collect::<Vec<_>>())
    });
    stress.seconds = begun.elapsed().as_secs_f64();
    stress.threads = threads;
    stress.reader_wait_us_max = waits::take_longest().as_secs_f64() * 1e6;
    let mut lines = Vec::new();
    for (queries, wrong) in readers {
        stress.queries += queries;
        stress.wrong += wrong.len() as u64;
        lines.extend(wrong);
    }
    (stress, lines)
}

/// Runs queries, the first by `turn`, each at least once; counts them, and tells wrong answers.
fn query_until(
    stop: &AtomicBool,
    data: &Database,
    right: &[(u8, Answer)],
    turn: usize,
) -> (u64, Vec<String>) {
    let (mut count, mut wrong) = (0, Vec::new());
    for (query, expected) in right.iter().cycle().skip(turn % right.len()) {
        let answer = queries::run(*query, data);
        count += 1;
        if answer != *expected {
            wrong.push(expected.difference(&answer, &format!("Q{query} during migrations")));
        }
        if stop.load(Relaxed) && count >= right.len() as u64 {
            break;
        }
    }
    (count, wrong)
}

/// Migrates column after column to local memory and back, until told to stop.
fn migrate_until(
    stop: &AtomicBool,
    data: &Database,
    tiers: &Tiers,
    rate: Option<ByteCount>,
    columns_moved: &AtomicU64,
) -> Stress {
    let columns = data.columns();
    let placed: Vec<_> = columns
        .iter()
        .map(|(name, column)| (*column, tiers.placement(name)))
        .filter(|(_, placement)| *placement != Tier::LOCAL)
        .collect();
    let mut stress = Stress::default();
    for (column, placement) in placed.iter().cycle() {
        let there = stress.count(&migrate(*column, Tier::LOCAL, rate, stop));
        if !there || !stress.count(&migrate(*column, *placement, rate, stop)) {
            break;
        }
        columns_moved.fetch_add(1, Relaxed);
    }
    stress
}
