//! The loaded tables, of which every run gets a copy.

use crate::Failure;
use crate::load;
use crate::options::Options;
use crate::q9;
use crate::schema::{Catalog, Sizes};
use farheap::ByteCount;
use farheap::pool::PoolConfig;
use farheap::tier::manager::{MemoryManager, Mode};
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Room for what is inserted; the file is sparse.
const ROOM: ByteCount = ByteCount::gib(24);

/// A file that is removed, whatever happens.
pub(crate) struct Removed(PathBuf);

impl Removed {
    pub(crate) fn new(options: &Options, name: &str) -> Removed {
        let dir = options.dir.clone().unwrap_or_else(std::env::temp_dir);
        Removed(dir.join(format!("farheap-cooperative-{}-{name}", std::process::id())))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Removed {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The tables after the load.
pub(crate) struct Source<'o> {
    options: &'o Options,
    file: Removed,
    pub(crate) catalog: Catalog,
    /// Query 9's answer.
    pub(crate) answer: q9::Answer,
    pub(crate) bytes: ByteCount,
}

impl<'o> Source<'o> {
    pub(crate) fn load(options: &'o Options) -> Result<Source<'o>, Failure> {
        let sizes = Sizes::new(options.warehouses, options.scale);
        let file = Removed::new(options, "loaded");
        let began = Instant::now();
        let bar = ProgressBar::new(options.warehouses);
        let style = "loading {bar:30} {pos}/{len} warehouses, {eta} left";
        bar.set_style(ProgressStyle::with_template(style)?);
        // The load may take more memory than the runs: only its result counts.
        let limit = ByteCount(options.limit.get().max(ByteCount::gib(2).get()));
        let manager = MemoryManager::start(limit, Mode::Cooperative)?;
        let pool = PoolConfig::new().create(file.path(), ROOM, &manager)?;
        let database = load::load(&pool, sizes, options.seed, &|done| bar.set_position(done))?;
        bar.finish_and_clear();
        let answer = q9::naive(&database)?;
        pool.flush()?;
        let bytes = ByteCount(pool.pages().get() * pool.page_size().get());
        let took = began.elapsed().as_secs_f64();
        let each = bytes.get() as f64 / options.warehouses as f64 / 1e6;
        println!(
            "loaded {} warehouses: {bytes}, {each:.0} MB each, in {took:.0} s; the limit is {}",
            options.warehouses, options.limit
        );
        Ok(Source { options, file, catalog: database.catalog(), answer, bytes })
    }

    /// A copy to work on.
    pub(crate) fn copy(&self) -> Result<Removed, Failure> {
        let copy = Removed::new(self.options, "work");
        let from = File::open(self.file.path())?;
        let mut open = OpenOptions::new();
        let mut to = open.write(true).create(true).truncate(true).open(copy.path())?;
        std::io::copy(&mut from.take(self.bytes.get()), &mut to)?;
        to.set_len(ROOM.get())?;
        to.sync_all()?;
        Ok(copy)
    }
}
