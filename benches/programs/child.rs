//! One run of a program in a process of its own, from both sides.
//!
//! The child waits for a line on its standard input, so that its parent can put it into a memory
//! group before it allocates, and answers with lines:
//!
//! ```text
//! phase NAME SECONDS CPU_SECONDS BYTES_READ BYTES_WRITTEN    as soon as the phase has ended
//! end ANSWER PEAK_BYTES                                      or: skipped WHY, or: failed WHY
//! ```

use crate::group::MemoryGroup;
use crate::os::{self, Array, Plain};
use crate::process::{check_interrupt, cpu_time};
use crate::{Failure, Result, work};
use clap::ValueEnum;
use farheap::{Config, Far, Heap};
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Where a program has its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// In far memory.
    #[value(skip)]
    Far,
    /// In memory, all of it.
    #[value(skip)]
    Memory,
    /// In anonymous memory of a group with swap
    Swap,
    /// In a mapped file, in a group without swap
    Mmap,
}

impl Side {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Side::Far => "far",
            Side::Memory => "memory",
            Side::Swap => "swap",
            Side::Mmap => "mmap",
        }
    }

    fn named(name: &str) -> Option<Side> {
        let all = [Side::Far, Side::Memory, Side::Swap, Side::Mmap];
        all.into_iter().find(|side| side.name() == name)
    }
}

/// One part of a program.
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
    /// It was stopped at the deadline: figures are those until then.
    pub(crate) stopped: bool,
    /// Resident bytes at their peak, without those of files.
    pub(crate) peak: usize,
}

impl Outcome {
    pub(crate) fn sum(&self, figure: impl Fn(&Phase) -> f64) -> f64 {
        self.phases.iter().map(figure).sum()
    }

    /// Fails unless the answers are equal, if there is one.
    pub(crate) fn check(&self, right: &Outcome) -> Result<()> {
        if self.stopped || self.answer == right.answer {
            return Ok(());
        }
        let (answer, right) = (&self.answer, &right.answer);
        Err(Failure::Broken(format!("the answer is {answer}, in memory it is {right}")))
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
#[derive(Clone, Debug)]
pub(crate) struct Task {
    program: String,
    size: usize,
    dir: PathBuf,
    /// Whether far memory's file goes there too, not where it goes by default.
    dir_is_given: bool,
    /// The heap's configuration.
    pub(crate) conf: String,
}

impl Task {
    pub(crate) fn new(program: &str, size: usize, dir: PathBuf, dir_is_given: bool) -> Task {
        Task { program: program.to_owned(), size, dir, dir_is_given, conf: String::new() }
    }

    /// Runs it in a process of its own, of at most `memory` bytes.
    pub(crate) fn run(
        &self,
        side: Side,
        memory: Option<usize>,
        deadline: Duration,
    ) -> Result<Outcome> {
        let group = memory.map(|bytes| MemoryGroup::create(bytes, side == Side::Swap));
        let group = group.transpose()?;
        let me = std::env::current_exe().map_err(Failure::io)?;
        let (given, dir) = (self.dir_is_given, self.dir.display());
        let task = format!(
            "{}\n{}\n{}\n{}\n{given}\n{dir}",
            self.program,
            side.name(),
            self.size,
            self.conf
        );
        let child = Command::new(me)
            .args(["--child", &task])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Failure::io)?;
        let mut running = Running { child, _group: group };
        if let Some(group) = &running._group {
            group.add(running.child.id())?;
        }
        let mut to = running.child.stdin.take().expect("asked for above");
        writeln!(to, "start").map_err(Failure::io)?;
        let what = format!("{} on {}", self.program, side.name());
        running.outcome(deadline, &what)
    }
}

/// A child, killed when dropped.
struct Running {
    child: Child,
    /// Removed after the child has ended.
    _group: Option<MemoryGroup>,
}

impl Running {
    /// Collects what the child says, until it has ended.
    fn outcome(&mut self, deadline: Duration, what: &str) -> Result<Outcome> {
        /// Between two looks for an interrupt.
        const WAIT: Duration = Duration::from_millis(100);
        let from = BufReader::new(self.child.stdout.take().expect("asked for when it started"));
        let (told, lines) = channel();
        // A child that hangs must not stop its parent, which reads with a deadline therefore.
        std::thread::spawn(move || from.lines().try_for_each(|line| told.send(line).map_err(drop)));
        let (until, mut outcome) = (Instant::now() + deadline, Outcome::default());
        loop {
            check_interrupt()?;
            let line = match lines.recv_timeout(WAIT) {
                Ok(line) => line.map_err(Failure::io)?,
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => continue,
                Err(RecvTimeoutError::Timeout) => {
                    let secs = deadline.as_secs_f64() - outcome.sum(|phase| phase.secs);
                    let (name, secs) = ("stopped".to_owned(), secs.max(0.0));
                    outcome.phases.push(Phase {
                        name,
                        secs,
                        cpu_secs: 0.0,
                        read: 0.0,
                        written: 0.0,
                    });
                    outcome.stopped = true;
                    return Ok(outcome);
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().map_err(Failure::io)?;
                    check_interrupt()?;
                    return Err(Failure::Broken(format!("{what} ended early: {status}")));
                }
            };
            let fields: Vec<&str> = line.split(' ').collect();
            let number = |at: usize| fields[at].parse::<f64>().unwrap_or(f64::NAN);
            match &fields[..] {
                ["phase", name, _, _, _, _] => outcome.phases.push(Phase {
                    name: (*name).to_owned(),
                    secs: number(2),
                    cpu_secs: number(3),
                    read: number(4),
                    written: number(5),
                }),
                ["end", answer, _] => {
                    (outcome.answer, outcome.peak) = ((*answer).to_owned(), number(2) as usize);
                    self.child.wait().map_err(Failure::io)?;
                    return Ok(outcome);
                }
                ["skipped", ..] => {
                    return Err(Failure::Skipped(line["skipped ".len()..].to_owned()));
                }
                _ => return Err(Failure::Broken(format!("{what}: {line}"))),
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A run, seen by its program.
pub(crate) struct Run<'a> {
    side: Side,
    dir: &'a Path,
    heap: Option<Heap>,
}

impl Run<'_> {
    /// Runs one phase and reports it.
    pub(crate) fn phase<T>(&self, name: &str, work: impl FnOnce() -> T) -> T {
        let (read, written) = self.moved();
        let (cpu, began) = (cpu_time(), Instant::now());
        let result = work();
        let (secs, cpu_secs) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
        let now = self.moved();
        println!("phase {name} {secs} {cpu_secs} {} {}", now.0 - read, now.1 - written);
        result
    }

    /// An array of zeros, where this side has its data.
    pub(crate) fn array<T: Plain>(&self, len: usize) -> Result<Array<T>> {
        match self.side {
            Side::Mmap => Array::mapped(self.dir, len),
            _ => Ok(Array::Owned(vec![T::default(); len])),
        }
    }

    /// Bytes read from and written to the disk so far. The kernel counts pages swapped for the
    /// whole machine, which nothing else swaps on as a rule, and of files the pages made dirty.
    fn moved(&self) -> (u64, u64) {
        const PAGE: u64 = 4096;
        match (self.side, &self.heap) {
            (_, Some(heap)) => {
                let stats = heap.stats();
                (stats.bytes_read.get(), stats.bytes_written.get())
            }
            (Side::Mmap, _) => {
                let field = |name| os::proc_field("/proc/self/io", name);
                (field("read_bytes:"), field("write_bytes:"))
            }
            (Side::Swap, _) => {
                let field = |name| os::proc_field("/proc/vmstat", name) * PAGE;
                (field("pswpin"), field("pswpout"))
            }
            _ => (0, 0),
        }
    }
}

/// The child's side.
pub(crate) fn serve(task: &str) -> ExitCode {
    let mut line = String::new();
    // Nothing comes when the parent is gone.
    if std::io::stdin().read_line(&mut line).is_err() || line != "start\n" {
        return ExitCode::FAILURE;
    }
    match run(task) {
        Ok((answer, peak)) => {
            println!("end {answer:016x} {peak}");
            ExitCode::SUCCESS
        }
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

fn run(task: &str) -> Result<(u64, u64)> {
    let wrong = || Failure::Broken(format!("no task: {task:?}"));
    let fields: Vec<&str> = task.splitn(6, '\n').collect();
    let [program, side, size, conf, given, dir] = fields[..] else { return Err(wrong()) };
    let program = work::ALL.iter().find(|known| known.name == program).ok_or_else(wrong)?;
    let side = Side::named(side).ok_or_else(wrong)?;
    let size = size.parse().map_err(|_| wrong())?;
    let heap = if side == Side::Far {
        let builder = Config::builder().parse(conf).map_err(Failure::of)?;
        let builder = if given == "true" { builder.dir(dir) } else { builder };
        let config = builder.build().map_err(Failure::of)?;
        let heap = Heap::start(config).map_err(Failure::of)?;
        // Where only faults of user mode are permitted nothing goes, and nothing would be measured.
        if !Far::contains(vec![0_u8; 1 << 20].as_ptr()) {
            return Err(Failure::Skipped("nothing goes far by its size here".to_owned()));
        }
        Some(heap)
    } else {
        None
    };
    // Its buffer lives as long as the process: it must not be allocated in a scope of a program.
    drop(std::io::stdout());
    let run = Run { side, dir: Path::new(dir), heap };
    let answer = (program.run)(&run, size)?;
    let field = |name| os::proc_field("/proc/self/status", name) * 1024;
    let peak = field("VmHWM:").saturating_sub(field("RssFile:"));
    // Also the check that nothing was lost.
    run.heap.map_or(Ok(()), |heap| heap.shutdown()).map_err(Failure::of)?;
    Ok((answer, peak))
}
