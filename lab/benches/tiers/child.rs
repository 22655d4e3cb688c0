//! TPC-H in a process of its own: in DRAM first, then on one side.
//!
//! A child answers with lines `NAME VALUE`. Its parent puts the one whose columns are in a mapped file into
//! a memory group when it says `ready`.

#![expect(unsafe_code, reason = "maps a file over columns, asks jemalloc")]
#![expect(clippy::disallowed_methods, reason = "the baseline does without the library's wrappers")]

use crate::answers::{Answer, QUERIES};
use crate::auto;
use crate::process::cpu_time;
use crate::tables::Database;
use crate::{Failure, Options, Result, broken, load, queries};
use clap::ValueEnum;
use farheap::{Heap, Tier};
use farheap_segments::Migrator;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use std::cell::Cell;
use std::ffi::CStr;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::time::Instant;

/// Where the columns are, after DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// On a far tier.
    Far,
    /// In a mapped file.
    Mmap,
    /// On a far tier and in local memory, within a budget.
    Auto,
}

const PAGE: usize = 4096;

pub(crate) fn serve(options: &Options, side: Side) -> ExitCode {
    let result = match side {
        Side::Far => far(options),
        Side::Mmap => mapped(options),
        Side::Auto => auto::run(options),
    };
    match result {
        // Not through the allocator's end: mapped columns are not its memory any more.
        Ok(()) => std::process::exit(0),
        Err(Failure::Skipped(why)) => {
            println!("skipped {}", why.replace('\n', " "));
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("failed {}", failure.to_string().replace('\n', " "));
            ExitCode::FAILURE
        }
    }
}

/// The columns in DRAM, and the right answers.
pub(crate) struct Job {
    pub(crate) data: Database,
    right: Vec<Answer>,
    /// Passes so far: each has an order of its own.
    turn: Cell<u64>,
    passes: usize,
}

impl Job {
    /// Loads the columns, and tells how long the queries take over them.
    pub(crate) fn load(options: &Options) -> Result<Job> {
        let plan = load::Plan::count(options.scale_factor);
        let data = load::database(&plan, 2, &|_| Tier::LOCAL).map_err(broken)?;
        println!("bytes {}", plan.bytes().get());
        let right = QUERIES.iter().map(|query| queries::run(*query, &data)).collect();
        let job = Job { data, right, turn: Cell::new(0), passes: options.passes };
        forget_peak();
        let before = status("VmRSS:");
        job.tell("dram")?;
        // What the queries themselves need beside the columns.
        println!("overhead {}", status("VmHWM:").saturating_sub(before));
        Ok(job)
    }

    /// Runs the queries in random order, and tells the seconds of one pass, by the clock and of the processor.
    pub(crate) fn tell(&self, name: &str) -> Result<()> {
        let before = cpu_time();
        let seconds = self.pass(self.passes)?;
        let of_processor = (cpu_time() - before).as_secs_f64();
        println!("{name} {}", seconds / self.passes as f64);
        println!("{name}_cpu {}", of_processor / self.passes as f64);
        Ok(())
    }

    /// Runs the queries this often, in random order; the seconds.
    pub(crate) fn pass(&self, passes: usize) -> Result<f64> {
        let mut turns: Vec<usize> = (0..QUERIES.len() * passes).collect();
        let turn = self.turn.replace(self.turn.get() + 1);
        turns.shuffle(&mut StdRng::seed_from_u64(42 + turn));
        let mut seconds = 0.0;
        for turn in turns {
            let at = turn % QUERIES.len();
            let began = Instant::now();
            let answer = queries::run(QUERIES[at], &self.data);
            seconds += began.elapsed().as_secs_f64();
            if answer != self.right[at] {
                let query = format!("Q{}", QUERIES[at]);
                return Err(Failure::Broken(self.right[at].difference(&answer, &query)));
            }
        }
        Ok(seconds)
    }

    /// Moves all columns.
    pub(crate) fn move_all(&self, to: Tier) -> Result<()> {
        for (_, column) in self.data.columns() {
            let mut migrator = Migrator::new();
            column.move_all(&mut migrator, to);
            if let Some(error) = migrator.write_out().run(|_| {}).error() {
                return Err(broken(error));
            }
        }
        Ok(())
    }
}

/// A heap as the parent has it configured.
pub(crate) fn start(options: &Options) -> Result<Heap> {
    let too_small = |error| match error {
        farheap::Error::LimitTooSmall { .. } | farheap::Error::Config { .. } => {
            Failure::Skipped(error.to_string())
        }
        error => Failure::of(error),
    };
    let builder = Heap::builder().parse(&options.conf).map_err(too_small)?;
    builder.threshold(None).start().map_err(too_small)
}

/// On a far tier.
fn far(options: &Options) -> Result<()> {
    let heap = start(options)?;
    let job = Job::load(options)?;
    let before = Allocated::now();
    let (began, cpu) = (Instant::now(), cpu_time());
    job.move_all(Tier::FAR)?;
    println!("migrate {}", began.elapsed().as_secs_f64());
    println!("migrate_cpu {}", (cpu_time() - cpu).as_secs_f64());
    let after = Allocated::now();
    println!("far {}", heap.usage().allocated_bytes.get());
    println!("metadata {}", after.metadata.saturating_sub(before.metadata));
    println!("retained {}", after.retained.saturating_sub(before.retained));
    heap.region().evict_all().map_err(Failure::of)?;
    let moved = heap.stats();
    job.tell("tier")?;
    let now = heap.stats();
    let passes = options.passes.max(1) as u64;
    println!("read {}", (now.bytes_read.get() - moved.bytes_read.get()) / passes);
    println!("written {}", (now.bytes_written.get() - moved.bytes_written.get()) / passes);
    drop(job);
    heap.shutdown().map_err(Failure::of)
}

/// In a mapped file, in the memory group into which the parent puts this process.
fn mapped(options: &Options) -> Result<()> {
    let job = Job::load(options)?;
    let file = match &options.dir {
        Some(dir) => tempfile::tempfile_in(dir),
        None => tempfile::tempfile(),
    };
    let file = file.map_err(broken)?;
    let (mut at, mut ranges) = (0, Vec::new());
    for (_, column) in job.data.columns() {
        for Range { start, end } in column.ranges() {
            let pages = start.next_multiple_of(PAGE)..end & !(PAGE - 1);
            if !pages.is_empty() {
                let len = pages.len() as u64;
                ranges.push((pages, at));
                at += len;
            }
        }
    }
    for (pages, at) in &ranges {
        // SAFETY: a part of a segment, which this thread alone knows.
        let bytes = unsafe { std::slice::from_raw_parts(pages.start as *const u8, pages.len()) };
        file.write_all_at(bytes, *at).map_err(broken)?;
    }
    file.sync_all().map_err(broken)?;
    // What the page cache has of it is charged to where this process is now.
    // SAFETY: takes numbers.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    for (pages, at) in &ranges {
        map_over(&file, pages, *at)?;
    }
    println!("ready 0");
    std::io::stdout().flush().map_err(broken)?;
    let mut line = String::new();
    // Nothing comes when the parent is gone.
    std::io::stdin().read_line(&mut line).map_err(broken)?;
    if line != "go\n" {
        return Err(Failure::Skipped("there is no memory group".to_owned()));
    }
    job.tell("tier")?;
    std::mem::forget(job);
    Ok(())
}

/// Maps a part of a file where the same bytes are in memory.
fn map_over(file: &File, pages: &Range<usize>, at: u64) -> Result<()> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
    let start = pages.start as *mut libc::c_void;
    // SAFETY: the pages lie in a segment that is never freed; what they hold stays the same.
    let mapped =
        unsafe { libc::mmap(start, pages.len(), access, flags, file.as_raw_fd(), at as i64) };
    match mapped == libc::MAP_FAILED {
        true => Err(broken(std::io::Error::last_os_error())),
        false => Ok(()),
    }
}

/// What jemalloc has of everything.
struct Allocated {
    metadata: u64,
    retained: u64,
}

impl Allocated {
    fn now() -> Allocated {
        let mut epoch = 1_u64;
        let len = size_of::<u64>();
        // SAFETY: the option is a `u64`, which is written only.
        unsafe {
            let new = std::ptr::from_mut(&mut epoch).cast();
            let none = (std::ptr::null_mut(), std::ptr::null_mut());
            tikv_jemalloc_sys::mallctl(c"epoch".as_ptr(), none.0, none.1, new, len);
        }
        Allocated { metadata: number(c"stats.metadata"), retained: number(c"stats.retained") }
    }
}

/// A statistic of jemalloc's.
fn number(name: &CStr) -> u64 {
    let (mut value, mut len) = (0_usize, size_of::<usize>());
    let to = std::ptr::from_mut(&mut value).cast();
    // SAFETY: these statistics are `size_t`, and there is room for one.
    unsafe {
        tikv_jemalloc_sys::mallctl(name.as_ptr(), to, &mut len, std::ptr::null_mut(), 0);
    }
    value as u64
}

/// Bytes that a line of `/proc/self/status` says.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) << 10
}

/// From now on the kernel's peak is the one since.
fn forget_peak() {
    drop(std::fs::write("/proc/self/clear_refs", "5"));
}
