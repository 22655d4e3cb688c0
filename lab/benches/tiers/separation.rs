//! Figure 7: TPC-H and its migration with jemalloc's metadata separated, and together with the data.
//!
//! Processor time is what compares with the paper's runtime: its far memory is a node's, which nobody waits for a disk for.
//! *Separated* is `far_metadata:off`, *together* `far_metadata:on`; both take turns, each in a process of its
//! own, at each scale factor.

use crate::child::Side;
use crate::failure::{Failure, Result};
use crate::table::Row;
use crate::tpch::{Job, Told};
use crate::{Options, load};
use farheap::ByteCount;

/// All rows; a machine that does not allow them is told.
pub(crate) fn rows(options: &Options, rows: &mut Vec<Row>) -> Result<()> {
    for &scale_factor in &options.scale_factors {
        match at(&Options { scale_factor, ..options.clone() }) {
            Ok(new) => crate::add("separation", rows, new, options)?,
            Err(Failure::Skipped(why)) => {
                println!("  skipped: separation: {why}");
                return Ok(());
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(())
}

/// The rows of one scale factor.
fn at(options: &Options) -> Result<Vec<Row>> {
    let bytes = load::Plan::count(options.scale_factor).bytes().get();
    let cache = ByteCount(bytes * options.cache / 100).max(ByteCount::mib(8));
    let job = Job { options, cache };
    let [mut separated, mut together]: [Vec<Told>; 2] = [const { Vec::new() }; 2];
    for _ in 0..options.rounds * options.pairs {
        separated.push(job.run(Side::Far, &job.conf(",far_metadata:off"))?);
        together.push(job.run(Side::Far, &job.conf(",far_metadata:on"))?);
    }
    let row = |work: &str, name: &str| {
        let all = |told: &[Told]| told.iter().map(|told| told.get(name)).collect();
        let work = format!("separation, scale factor {}: {work}", options.scale_factor);
        let bases = ("metadata in the tier".to_owned(), all(&together));
        Row::of_rounds((work, "s"), all(&separated), bases, |value, base| base / value, None)
    };
    Ok(vec![
        row("queries", "tier"),
        row("migration", "migrate"),
        row("processor time of queries", "tier_cpu"),
        row("processor time of migration", "migrate_cpu"),
    ])
}
