//! The loaded tables, of which every run gets a copy.

use crate::Failure;
use crate::common::Unnamed;
use crate::load;
use crate::options::Options;
use crate::q9;
use crate::schema::{Catalog, Sizes};
use farheap::ByteCount;
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::time::Instant;

/// Room for what is inserted; the file is sparse.
const ROOM: ByteCount = ByteCount::gib(24);

/// Says on standard error what is done next: runs at the paper's scale take minutes.
pub(crate) fn progress(what: &str) {
    eprintln!("... {what}");
}

/// The tables after the load.
pub(crate) struct Source<'o> {
    options: &'o Options,
    file: Unnamed,
    pub(crate) catalog: Catalog,
    /// Query 9's answer.
    pub(crate) answer: q9::Answer,
    pub(crate) bytes: ByteCount,
}

impl<'o> Source<'o> {
    pub(crate) fn load(options: &'o Options) -> Result<Source<'o>, Failure> {
        let sizes = Sizes::new(options.warehouses, options.scale);
        let file = Unnamed::new(options.dir.as_deref(), ROOM)?;
        let began = Instant::now();
        let bar = ProgressBar::new(options.warehouses);
        let style = "loading {bar:30} {pos}/{len} warehouses, {eta} left";
        bar.set_style(ProgressStyle::with_template(style)?);
        // The load may take more memory than the runs: only its result counts.
        let limit = ByteCount(options.limit.get().max(ByteCount::gib(2).get()));
        let manager = MemoryManager::start(limit)?;
        let pool = PoolConfig::new().create(file.path(), ROOM, &manager)?;
        let report = |done: u64| {
            bar.set_position(done);
            if bar.is_hidden() && done * 10 % options.warehouses < 10 {
                progress(&format!("{done} of {} warehouses loaded", options.warehouses));
            }
        };
        let database = load::load(&pool, sizes, options.seed, &report)?;
        bar.finish_and_clear();
        progress("query 9, row by row");
        let answer = q9::naive(&database)?;
        pool.flush()?;
        let bytes = ByteCount(pool.pages() * pool.page_size().get());
        let took = began.elapsed().as_secs_f64();
        let each = bytes.get() as f64 / options.warehouses as f64 / 1e6;
        println!(
            "loaded {} warehouses: {bytes}, {each:.0} MB each, in {took:.0} s; the limit is {}",
            options.warehouses, options.limit
        );
        Ok(Source { options, file, catalog: database.catalog(), answer, bytes })
    }

    /// A copy to work on.
    pub(crate) fn copy(&self) -> Result<Unnamed, Failure> {
        progress(&format!("copying {}", self.bytes));
        let copy = Unnamed::new(self.options.dir.as_deref(), ROOM)?;
        let from = File::open(self.file.path())?;
        let mut to = OpenOptions::new().write(true).open(copy.path())?;
        std::io::copy(&mut from.take(self.bytes.get()), &mut to)?;
        to.sync_all()?;
        Ok(copy)
    }
}
