//! The paper's open questions (its section 6), an experiment for each.

use crate::Failure;
use crate::options::Options;
use crate::plot;
use crate::report;
use crate::run::{Beside, PARTITIONED, Plan, Query, Run, run};
use crate::source::Source;
use farheap::pool::{Clock, PoolConfig};
use farheap::tier::manager::Mode;

pub(crate) fn writes(_options: &Options, _source: &Source<'_>) -> Result<(), Failure> {
    Ok(())
}
pub(crate) fn floor(_options: &Options, _source: &Source<'_>) -> Result<(), Failure> {
    Ok(())
}
pub(crate) fn policies(_options: &Options, _source: &Source<'_>) -> Result<(), Failure> {
    Ok(())
}
pub(crate) fn caches(_options: &Options, _source: &Source<'_>) -> Result<(), Failure> {
    Ok(())
}
pub(crate) fn spill(_options: &Options, _source: &Source<'_>) -> Result<(), Failure> {
    Ok(())
}
