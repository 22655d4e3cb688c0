//! Columns placed by how often queries read them, within a budget of local memory.
//!
//! Threads run queries and check every answer, all the time: first over the tiers alone, then while
//! [`AutoPlacement`] plans and moves, then over what it has chosen.

use crate::answers::Answer;
use crate::queries;
use crate::tables::{Database, Unit};
use crate::tiers::Tiers;
use farheap::{ByteCount, Tier};
use farheap_segments::AutoPlacement;
use serde::Serialize;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

/// Plans until one moves nothing, at most.
const PLANS_MAX: usize = 20;

/// What happened.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Auto {
    pub(crate) budget_bytes: u64,
    /// The largest number of bytes of segments that were local after a plan.
    pub(crate) local_bytes: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) plans: usize,
    /// Queries a second, over the tiers alone and with the plan.
    pub(crate) queries_per_s: [f64; 2],
    pub(crate) queries: u64,
    pub(crate) wrong: u64,
    /// Why moving ended before its time.
    pub(crate) error: Option<String>,
}

/// How to place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub(crate) bytes: ByteCount,
    pub(crate) by: Unit,
    /// Of each of the three parts.
    pub(crate) time: Duration,
    pub(crate) threads: usize,
}

/// Places the columns that lie on tiers; what is wrong is told in a line each.
pub(crate) fn run(
    data: &Database,
    tiers: &Tiers,
    right: &[(u8, Answer)],
    budget: Budget,
) -> (Auto, Vec<String>) {
    let (stop, answered) = (&AtomicBool::new(false), &AtomicU64::new(0));
    let wrong = &Mutex::new(Vec::new());
    let mut auto = Auto { budget_bytes: budget.bytes.get(), ..Auto::default() };
    thread::scope(|scope| {
        for turn in 0..budget.threads {
            scope.spawn(move || {
                for (query, expected) in right.iter().cycle().skip(turn % right.len()) {
                    let answer = queries::run(*query, data);
                    answered.fetch_add(1, Relaxed);
                    if answer != *expected {
                        let name = format!("Q{query} while columns are placed");
                        wrong.lock().expect("no panic").push(expected.difference(&answer, &name));
                    }
                    if stop.load(Relaxed) {
                        break;
                    }
                }
            });
        }
        let queries_per_s = || {
            let (begun, before) = (Instant::now(), answered.load(Relaxed));
            // At least one round of the queries: a rate of single ones says nothing.
            let least = right.len() as u64;
            while begun.elapsed() < budget.time || answered.load(Relaxed) - before < least {
                thread::sleep(Duration::from_millis(20)); // Only the queries are to work here.
            }
            (answered.load(Relaxed) - before) as f64 / begun.elapsed().as_secs_f64()
        };
        auto.queries_per_s[0] = queries_per_s();
        place(data, tiers, budget, &mut auto);
        auto.queries_per_s[1] = queries_per_s();
        stop.store(true, Relaxed);
    });
    let wrong = std::mem::take(&mut *wrong.lock().expect("no panic"));
    (auto.queries, auto.wrong) = (answered.load(Relaxed), wrong.len() as u64);
    (auto, wrong)
}

/// Plans and moves until a plan finds nothing to move, or the time is up.
fn place(data: &Database, tiers: &Tiers, budget: Budget, auto: &mut Auto) {
    let mut placement = AutoPlacement::new(budget.bytes);
    for (name, column) in data.columns() {
        let far = tiers.placement(name);
        if far != Tier::LOCAL {
            column.place_by_reads(&mut placement, far, budget.by);
        }
    }
    let begun = Instant::now();
    while auto.plans < PLANS_MAX && (auto.plans == 0 || begun.elapsed() < budget.time) {
        let migration = placement.rebalance();
        auto.plans += 1;
        auto.moved_bytes += migration.progress().bytes().get();
        auto.local_bytes = auto.local_bytes.max(placement.local_bytes().get());
        auto.error = migration.error().map(ToString::to_string);
        if auto.error.is_some() || migration.moved() == 0 {
            break;
        }
        thread::sleep(budget.time / 8); // Until there is something new to plan by.
    }
}
