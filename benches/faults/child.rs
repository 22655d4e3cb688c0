//! The kernel's own paging, in a child process under a memory limit.
//!
//! The child maps a file or device (`Mapped`), or fills anonymous memory that goes to swap
//! (`Swapped`). It runs one round for every line on its standard input and answers with a line:
//!
//! ```text
//! parent: random THREADS WRITE_PCT MICROSECONDS     child: OPS SECONDS CPU_SECONDS
//! parent: scan UNIT MICROSECONDS                    child: BYTES SECONDS CPU_SECONDS
//! ```

use crate::group::MemoryGroup;
use crate::os::{Memory, open_direct};
use crate::work::{Look, Mix, Order, Scan, look};
use crate::{Failure, Result, Sample};
use clap::ValueEnum;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// Memory of the child besides its cache.
const SLACK: usize = 12 << 20;

/// What the child pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// A mapped file, `MADV_RANDOM`.
    Mapped,
    /// A mapped file, `MADV_SEQUENTIAL`.
    Scanned,
    /// Anonymous memory on swap.
    Swapped,
}

/// The child, from the outside.
pub(crate) struct Paging {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    /// Removed after the child has ended.
    _group: MemoryGroup,
}

impl Paging {
    /// Starts a child that pages `data` bytes in `cache` bytes of memory.
    pub(crate) fn start(kind: Kind, path: &Path, data: usize, cache: usize) -> Result<Paging> {
        let group = MemoryGroup::create(cache + SLACK, kind == Kind::Swapped)?;
        let me = std::env::current_exe().map_err(Failure::io)?;
        let name = kind.to_possible_value().expect("no kind is hidden").get_name().to_owned();
        let mut child = Command::new(me)
            .args(["--child", &name, "--data", &data.to_string(), "--target"])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::io)?;
        let to = child.stdin.take().expect("asked for above");
        let from = BufReader::new(child.stdout.take().expect("asked for above"));
        let mut paging = Paging { child, to, from, _group: group };
        paging._group.add(paging.child.id())?;
        let ready = paging.ask("start")?;
        if ready != "ready" {
            return Err(Failure::Broken(format!("the child said `{ready}`")));
        }
        Ok(paging)
    }

    pub(crate) fn random(
        &mut self,
        threads: usize,
        write_pct: u64,
        time: Duration,
    ) -> Result<Sample> {
        self.round(&format!("random {threads} {write_pct} {}", time.as_micros()))
    }

    pub(crate) fn scan(&mut self, unit: usize, time: Duration) -> Result<Sample> {
        self.round(&format!("scan {unit} {}", time.as_micros()))
    }

    fn round(&mut self, line: &str) -> Result<Sample> {
        let answer = self.ask(line)?;
        let fields: Vec<f64> = answer.split(' ').filter_map(|field| field.parse().ok()).collect();
        let [count, secs, cpu_secs] = fields[..] else {
            return Err(Failure::Broken(format!("the child said `{answer}`")));
        };
        Ok(Sample { count, secs, cpu_secs })
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        writeln!(self.to, "{line}").map_err(Failure::io)?;
        let mut answer = String::new();
        self.from.read_line(&mut answer).map_err(Failure::io)?;
        Ok(answer.trim().to_owned())
    }
}

impl Drop for Paging {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The child's side.
pub(crate) fn serve(kind: Kind, target: &Path, data: usize) -> Result<()> {
    let mut lines = std::io::stdin().lines();
    let first = lines.next().transpose().map_err(Failure::io)?;
    if first.as_deref() != Some("start") {
        return Ok(());
    }
    let memory = match kind {
        Kind::Swapped => Memory::patterned(data)?,
        Kind::Mapped | Kind::Scanned => Memory::of_file(&open_direct(target)?, data)?,
    };
    memory.advise(match kind {
        Kind::Scanned => libc::MADV_SEQUENTIAL,
        Kind::Mapped | Kind::Swapped => libc::MADV_RANDOM,
    });
    println!("ready");
    let mut mixes: HashMap<(usize, u64), Mix> = HashMap::new();
    let mut scans: HashMap<usize, Scan> = HashMap::new();
    for line in lines {
        let line = line.map_err(Failure::io)?;
        let (work, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let numbers: Vec<u64> = rest.split(' ').filter_map(|field| field.parse().ok()).collect();
        let sample = match (work, &numbers[..]) {
            ("random", &[threads, write_pct, micros]) => {
                let threads = threads as usize;
                let mix = || Mix::new(Order::Random, data, threads).with_writes(write_pct);
                let mix = mixes.entry((threads, write_pct)).or_insert_with(mix);
                mix.access(memory.words(), Duration::from_micros(micros))?
            }
            ("scan", &[unit, micros]) => {
                let unit = unit as usize;
                let scan = scans.entry(unit).or_insert_with(|| Scan::new(data, unit));
                scan.run(Duration::from_micros(micros), |at| {
                    look(memory.words().part(at, unit / 8), at, Look::Sum);
                    Ok(())
                })?
            }
            _ => return Err(Failure::Broken(format!("`{line}` is no round"))),
        };
        println!("{} {} {}", sample.count, sample.secs, sample.cpu_secs);
    }
    Ok(())
}
