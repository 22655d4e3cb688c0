//! One run of a program in a process of its own, from both sides.
//!
//! The child answers with lines:
//!
//! ```text
//! own BYTES                            resident before the program begins
//! phase NAME SECONDS CPU_SECONDS FAULTS BYTES_READ BYTES_WRITTEN    as soon as the phase has ended
//! stall SECONDS                        if asked for: the longest time that its thread did not run
//! end ANSWER PEAK_BYTES                or: skipped WHY, or: failed WHY
//! ```

use crate::group::MemoryGroup;
use crate::limited::{self, Limited, Paged};
use crate::os::{Array, Plain, ThreadClock};
use crate::process::cpu_time;
use crate::{Failure, Result, work};
use clap::ValueEnum;
use farheap::{Far, Heap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Phase {
    pub(crate) name: String,
    pub(crate) secs: f64,
    pub(crate) cpu_secs: f64,
    /// Faults that waited for the disk.
    pub(crate) faults: f64,
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
    /// Seconds of the longest time that its thread did not run, if that was asked for.
    pub(crate) stall: f64,
    /// Resident bytes before the program began, those of files included.
    pub(crate) own: usize,
    /// Resident bytes at their peak, without those of files.
    pub(crate) peak: usize,
}

impl Outcome {
    pub(crate) fn sum(&self, figure: impl Fn(&Phase) -> f64) -> f64 {
        self.phases.iter().map(figure).sum()
    }

    /// Takes a line of the child; whether it was the last one.
    fn hear(&mut self, line: &str, what: &str) -> Result<bool> {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields[at].parse::<f64>().unwrap_or(f64::NAN);
        match &fields[..] {
            ["own", _] => self.own = number(1) as usize,
            ["stall", _] => self.stall = number(1),
            ["phase", name, _, _, _, _, _] => {
                let [secs, cpu_secs, faults, read, written] = [2, 3, 4, 5, 6].map(number);
                let name = (*name).to_owned();
                self.phases.push(Phase { name, secs, cpu_secs, faults, read, written });
            }
            ["end", answer, _] => {
                (self.answer, self.peak) = ((*answer).to_owned(), number(2) as usize);
                return Ok(true);
            }
            ["skipped", ..] => return Err(Failure::Skipped(line["skipped ".len()..].to_owned())),
            _ => return Err(Failure::Broken(format!("{what}: {line}"))),
        }
        Ok(false)
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
    /// Whether stalls are looked for.
    pub(crate) watches: bool,
}

impl Task {
    pub(crate) fn new(program: &str, size: usize, dir: PathBuf, dir_is_given: bool) -> Task {
        let (program, conf) = (program.to_owned(), String::new());
        Task { program, size, dir, dir_is_given, conf, watches: false }
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
        let (given, dir) = (self.dir_is_given, self.dir.display());
        let task = format!(
            "{}\n{}\n{}\n{}\n{}\n{given}\n{dir}",
            self.program,
            side.name(),
            self.size,
            self.conf,
            self.watches
        );
        let mut child = Limited::start(&task, group)?;
        let what = format!("{} on {}", self.program, side.name());
        let mut outcome = Outcome::default();
        if !child.listen(deadline, &what, |line| outcome.hear(line, &what))? {
            let secs = deadline.as_secs_f64() - outcome.sum(|phase| phase.secs);
            let (name, secs) = ("stopped".to_owned(), secs.max(0.0));
            outcome.phases.push(Phase { name, secs, ..Phase::default() });
            outcome.stopped = true;
        }
        Ok(outcome)
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
        let before = self.paged();
        let (cpu, began) = (cpu_time(), Instant::now());
        let result = work();
        let (secs, cpu_secs) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
        let now = self.paged();
        let (faults, read) = (now.faults - before.faults, now.read - before.read);
        let written = now.written - before.written;
        println!("phase {name} {secs} {cpu_secs} {faults} {read} {written}");
        result
    }

    /// An array of zeros, where this side has its data.
    pub(crate) fn array<T: Plain>(&self, len: usize) -> Result<Array<T>> {
        match self.side {
            Side::Mmap => Array::mapped(self.dir, len),
            _ => Ok(Array::Owned(vec![T::default(); len])),
        }
    }

    /// What was paged so far; of files the kernel counts as written the pages made dirty.
    fn paged(&self) -> Paged {
        if self.side != Side::Mmap {
            return Paged::now(self.heap.as_ref());
        }
        let field = |name| limited::proc_field("/proc/self/io", name);
        let faults = limited::major_faults();
        Paged { faults, read: field("read_bytes:"), written: field("write_bytes:") }
    }
}

/// The child's side.
pub(crate) fn serve(task: &str) -> ExitCode {
    limited::serve(|| run(task))
}

fn run(task: &str) -> Result<(u64, u64)> {
    let wrong = || Failure::Broken(format!("no task: {task:?}"));
    let fields: Vec<&str> = task.splitn(7, '\n').collect();
    let [program, side, size, conf, watches, given, dir] = fields[..] else { return Err(wrong()) };
    let program = work::ALL.iter().find(|known| known.name == program).ok_or_else(wrong)?;
    let side = Side::named(side).ok_or_else(wrong)?;
    let size = size.parse().map_err(|_| wrong())?;
    let heap = if side == Side::Far {
        let builder = Heap::builder().parse(conf).map_err(Failure::of)?;
        let builder = if given == "true" { builder.dir(dir) } else { builder };
        let heap = builder.start().map_err(Failure::of)?;
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
    println!("own {}", limited::resident());
    let run = Run { side, dir: Path::new(dir), heap };
    let watch = (watches == "true").then(StallWatch::start);
    let answer = (program.run)(&run, size)?;
    if let Some(watch) = watch {
        println!("stall {}", watch.end().as_secs_f64());
    }
    let peak = limited::peak();
    // Also the check that nothing was lost.
    run.heap.map_or(Ok(()), |heap| heap.shutdown()).map_err(Failure::of)?;
    Ok((answer, peak))
}

/// Looks for the longest time that a thread does not run: a fault that waits for a server, most of all.
struct StallWatch {
    is_over: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl StallWatch {
    /// Watches the calling thread.
    fn start() -> StallWatch {
        /// Between two looks.
        const TICK: Duration = Duration::from_millis(2);
        let is_over = Arc::new(AtomicBool::new(false));
        let (clock, over) = (ThreadClock::of_this(), Arc::clone(&is_over));
        let thread = std::thread::spawn(move || {
            let (mut longest, mut since, mut ran) = (Duration::ZERO, Instant::now(), clock.now());
            while !over.load(Ordering::Relaxed) {
                // The kernel tells nobody that a thread stands still: its clock is looked at, and a stall is known to a tick.
                std::thread::sleep(TICK);
                let now = clock.now();
                if now != ran {
                    (since, ran) = (Instant::now(), now);
                }
                longest = longest.max(since.elapsed());
            }
            longest
        });
        StallWatch { is_over, thread }
    }

    fn end(self) -> Duration {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.join().expect("it does not panic")
    }
}
