//! Placement by reads, within a budget of local memory as large as the tier's cache, against all columns
//! on the tier, and against the static choice of somebody who knows the queries.
//!
//! All are taken in one process, in turns; the tier with twice the cache, which has as much memory
//! in all, in one of its own.

use crate::child::{self, Side};
use crate::failure::{Failure, Result};
use crate::table::Row;
use crate::tables::Unit;
use crate::tpch::{Job, Told};
use crate::{Options, broken, load};
use farheap::{ByteCount, Tier};
use farheap_segments::{AutoPlacement, Migrator};

/// Plans until one moves nothing, at most.
const PLANS_MAX: usize = 6;

/// Columns by how many of the eight queries read them; the others are read by one.
const READ_BY: [(usize, &[&str]); 3] = [
    (5, &["l_discount", "l_shipdate", "l_extendedprice", "l_orderkey", "o_orderkey"]),
    (4, &["l_quantity", "o_orderdate"]),
    (
        2,
        &[
            "l_partkey",
            "l_commitdate",
            "l_receiptdate",
            "o_custkey",
            "o_orderpriority",
            "p_partkey",
        ],
    ),
];

/// All rows; a machine that does not allow them is told.
pub(crate) fn rows(options: &Options, rows: &mut Vec<Row>) -> Result<()> {
    match measure(options) {
        Ok(new) => crate::add("auto", rows, new, options),
        Err(Failure::Skipped(why)) => {
            println!("  skipped: auto: {why}");
            Ok(())
        }
        Err(failure) => Err(failure),
    }
}

fn measure(options: &Options) -> Result<Vec<Row>> {
    let bytes = load::Plan::count(options.scale_factor).bytes().get();
    let cache = ByteCount(bytes * options.cache / 100).max(ByteCount::mib(8));
    let job = Job { options, cache };
    let twice = Job { options, cache: ByteCount(2 * cache.get()) };
    let [mut told, mut with_twice]: [Vec<Told>; 2] = [const { Vec::new() }; 2];
    for _ in 0..options.rounds {
        told.push(job.run(Side::Auto, &job.conf(""))?);
        with_twice.push(twice.run(Side::Far, &twice.conf(""))?);
    }
    let queries = crate::answers::QUERIES.len() as f64;
    let rates = |told: &[Told], name: &str| -> Vec<f64> {
        told.iter().map(|told| queries / told.get(name)).collect()
    };
    let row = |by: &str, baseline: &str, bases, goal| {
        let name = (format!("auto by {by}, {} % of the data local", options.cache), "1/s");
        let bases = (baseline.to_owned(), bases);
        Row::of_rounds(name, rates(&told, by), bases, |value, base| value / base, goal)
    };
    let mut new = Vec::new();
    for by in ["chunk", "column"] {
        new.push(row(by, "all far", rates(&told, "tier"), Some(1.0)));
        new.push(row(by, "all far, twice the cache", rates(&with_twice, "tier"), Some(1.0)));
        new.push(row(by, "best static choice", rates(&told, "static"), Some(0.9)));
    }
    Ok(new)
}

/// The child's part.
pub(crate) fn run(options: &Options) -> Result<()> {
    let heap = child::start(options)?;
    let job = child::Job::load(options)?;
    job.move_all(Tier::FAR)?;
    job.tell("tier")?;
    for (by, name) in [(Unit::Chunk, "chunk"), (Unit::Column, "column")] {
        job.move_all(Tier::FAR)?;
        place(&job, by, options.budget)?;
        job.tell(name)?;
    }
    job.move_all(Tier::FAR)?;
    choose(&job, options.budget)?;
    job.tell("static")?;
    drop(job);
    heap.shutdown().map_err(Failure::of)
}

/// Plans after each pass of the queries, until nothing is to be moved.
fn place(job: &child::Job, by: Unit, budget: ByteCount) -> Result<()> {
    let mut placement = AutoPlacement::new(budget);
    for (_, column) in job.data.columns() {
        column.place_by_reads(&mut placement, Tier::FAR, by);
    }
    for plan in 0..PLANS_MAX {
        job.pass(1)?;
        let migration = placement.rebalance();
        if let Some(error) = migration.error() {
            return Err(broken(error));
        }
        let local = placement.local_bytes();
        if local > budget {
            return Err(Failure::Broken(format!("{local} are local, of {budget}")));
        }
        if plan > 0 && migration.moved() == 0 {
            break;
        }
    }
    Ok(())
}

/// Fills the budget by what most queries read.
fn choose(job: &child::Job, budget: ByteCount) -> Result<()> {
    let columns = job.data.columns();
    let (mut room, mut migrator) = (budget, Migrator::new());
    for name in READ_BY.iter().flat_map(|(_, names)| *names) {
        let column = columns.iter().find(|(known, _)| known == name);
        let (_, column) = column.ok_or_else(|| Failure::Broken(format!("no column {name}")))?;
        column.move_within(&mut migrator, Tier::LOCAL, &mut room);
    }
    match migrator.run(|_| {}).error() {
        Some(error) => Err(broken(error)),
        None => Ok(()),
    }
}
