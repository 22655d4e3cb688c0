//! One side in a process of its own. It says what it did in lines:
//!
//! ```text
//! phase NAME SECONDS CPU_SECONDS BYTES_READ BYTES_WRITTEN    as soon as the phase has ended
//! data BYTES                                                 the size of the tables
//! end ANSWER PEAK_BYTES                                      or: skipped WHY, or: failed WHY
//! ```

use crate::engine::{Engine, QUERIES};
use crate::group::MemoryGroup;
use crate::limited::{self, Limited};
use crate::process::cpu_time;
use crate::{Failure, Result};
use farheap::Heap;
use std::fmt;
use std::hash::{DefaultHasher, Hasher};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// One part of a run.
#[derive(Clone, Debug)]
pub(crate) struct Phase {
    pub(crate) name: String,
    pub(crate) secs: f64,
    pub(crate) cpu_secs: f64,
    /// Bytes moved from and to the disk.
    pub(crate) read: f64,
    pub(crate) written: f64,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) phases: Vec<Phase>,
    answer: String,
    /// Bytes of the tables.
    pub(crate) data: u64,
    /// Resident bytes at their peak, without those of files.
    pub(crate) peak: u64,
}

impl Outcome {
    pub(crate) fn sum(&self, figure: impl Fn(&Phase) -> f64) -> f64 {
        self.phases.iter().map(figure).sum()
    }

    /// Fails unless the answers are equal.
    pub(crate) fn check(&self, right: &Outcome) -> Result<()> {
        if self.answer == right.answer {
            return Ok(());
        }
        let (answer, right) = (&self.answer, &right.answer);
        Err(Failure::Broken(format!("the answer is {answer}, in memory it is {right}")))
    }

    /// Takes a line of the child; whether it was the last one.
    fn hear(&mut self, line: &str) -> Result<bool> {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields[at].parse::<f64>().unwrap_or(f64::NAN);
        match &fields[..] {
            ["phase", name, _, _, _, _] => self.phases.push(Phase {
                name: (*name).to_owned(),
                secs: number(2),
                cpu_secs: number(3),
                read: number(4),
                written: number(5),
            }),
            ["data", _] => self.data = number(1) as u64,
            ["end", answer, _] => {
                (self.answer, self.peak) = ((*answer).to_owned(), number(2) as u64);
                return Ok(true);
            }
            ["skipped", ..] => return Err(Failure::Skipped(line["skipped ".len()..].to_owned())),
            _ => return Err(Failure::Broken(line.to_owned())),
        }
        Ok(false)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Phase { name, secs, .. }) in self.phases.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {secs:.2} s")?;
        }
        Ok(())
    }
}

/// What a child is to run.
pub(crate) struct Task {
    program: &'static str,
    scale: f64,
    /// Of the heap; empty: there is none.
    conf: String,
}

impl Task {
    /// On the system's allocator.
    pub(crate) fn on_system(scale: f64) -> Task {
        Task { program: "system", scale, conf: String::new() }
    }

    /// With a heap of this configuration.
    pub(crate) fn on_far(scale: f64, conf: &str) -> Task {
        Task { program: env!("CARGO_PKG_NAME"), scale, conf: conf.to_owned() }
    }

    /// Runs it in a process of its own.
    pub(crate) fn run(&self, group: Option<MemoryGroup>, deadline: Duration) -> Result<Outcome> {
        let me = std::env::current_exe().map_err(Failure::io)?;
        let program = me.with_file_name(self.program);
        if !program.exists() {
            let why =
                format!("there is no {}: `cargo build --release` makes it", program.display());
            return Err(Failure::Broken(why));
        }
        let task = format!("{}\n{}", self.scale, self.conf);
        let mut child = Limited::start_program(&program, &task, group)?;
        let mut outcome = Outcome::default();
        if !child.listen(deadline, "the engine", |line| outcome.hear(line))? {
            let why = format!("no end after {} s, but {outcome}", deadline.as_secs());
            return Err(Failure::Broken(why));
        }
        Ok(outcome)
    }
}

/// The child's side.
pub(crate) fn serve(task: &str) -> ExitCode {
    limited::serve(|| run(task))
}

fn run(task: &str) -> Result<(u64, u64)> {
    let wrong = || Failure::Broken(format!("no task: {task:?}"));
    let (scale, conf) = task.split_once('\n').ok_or_else(wrong)?;
    let scale: f64 = scale.parse().map_err(|_| wrong())?;
    let heap = if conf.is_empty() {
        None
    } else {
        let started = Heap::builder().parse(conf).and_then(|builder| builder.start());
        Some(started.map_err(Failure::of)?)
    };
    let engine = Engine::new()?;
    let bytes = phase("load", heap.as_ref(), || engine.load(scale))?;
    println!("data {bytes}");
    let mut answers = DefaultHasher::new();
    for (name, sql) in QUERIES {
        answers.write_u64(phase(name, heap.as_ref(), || engine.query(sql))?);
    }
    // The heap runs as long as the process: the generator keeps its text pool.
    Ok((answers.finish(), limited::peak()))
}

/// Runs one phase and reports it.
fn phase<T>(name: &str, heap: Option<&Heap>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let (read, written) = moved(heap);
    let (cpu, began) = (cpu_time(), Instant::now());
    let result = work()?;
    let (secs, cpu_secs) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    let now = moved(heap);
    println!("phase {name} {secs} {cpu_secs} {} {}", now.0 - read, now.1 - written);
    Ok(result)
}

/// Bytes read from and written to the disk so far.
fn moved(heap: Option<&Heap>) -> (u64, u64) {
    const PAGE: u64 = 4096;
    match heap {
        Some(heap) => {
            let stats = heap.stats();
            (stats.bytes_read.get(), stats.bytes_written.get())
        }
        None => {
            let (read, written) = limited::swapped();
            (read * PAGE, written * PAGE)
        }
    }
}
