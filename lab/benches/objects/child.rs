//! One run of the program in a process of its own, from both sides.
//!
//! The child answers with lines:
//!
//! ```text
//! own BYTES               resident before the program begins
//! phase NAME SECONDS CPU_SECONDS FAULTS BYTES_READ BYTES_WRITTEN
//! end ANSWER PEAK_BYTES   or: skipped WHY, or: failed WHY
//! ```

use crate::group::MemoryGroup;
use crate::limited::{self, Limited, Paged};
use crate::process::cpu_time;
use crate::work::{Mix, Program};
use crate::{Failure, Result};
use farheap::{Far, Heap};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What a phase took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Phase {
    pub(crate) secs: f64,
    pub(crate) cpu_secs: f64,
    /// Faults that read the device.
    pub(crate) faults: f64,
    /// Bytes from and to the device.
    pub(crate) read: f64,
    pub(crate) written: f64,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) load: Phase,
    pub(crate) run: Phase,
    pub(crate) answer: String,
    /// Resident bytes before the program began, those of files included.
    pub(crate) own: usize,
    /// Resident bytes at their peak, without those of files.
    pub(crate) peak: usize,
}

impl Outcome {
    /// Takes a line of the child; whether it was the last one.
    fn hear(&mut self, line: &str, what: &str) -> Result<bool> {
        let fields: Vec<&str> = line.split(' ').collect();
        let number = |at: usize| fields[at].parse::<f64>().unwrap_or(f64::NAN);
        match &fields[..] {
            ["own", _] => self.own = number(1) as usize,
            ["phase", name, _, _, _, _, _] => {
                let [secs, cpu_secs, faults, read, written] = [2, 3, 4, 5, 6].map(number);
                let phase = Phase { secs, cpu_secs, faults, read, written };
                match *name {
                    "load" => self.load = phase,
                    "run" => self.run = phase,
                    _ => {}
                }
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
}

/// What a child is to run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) mix: Mix,
    /// Bytes of the table.
    pub(crate) size: usize,
    /// Operations before those that are measured, and those.
    pub(crate) warm: u64,
    pub(crate) operations: u64,
    pub(crate) deadline: Duration,
    pub(crate) dir: &'a Path,
}

impl Task<'_> {
    /// Runs it in far memory of this configuration; `None`: in memory of the process's own. `memory`: in
    /// a group of this number of bytes, which may swap where nothing is far.
    pub(crate) fn run(&self, conf: Option<&str>, memory: Option<usize>) -> Result<Outcome> {
        let group = memory.map(|bytes| MemoryGroup::create(bytes, conf.is_none())).transpose()?;
        let Task { size, warm, operations, .. } = self;
        let text = [
            self.mix.name(),
            conf.unwrap_or_default(),
            &format!("{size} {warm} {operations}"),
            &self.dir.display().to_string(),
        ];
        let mut child = Limited::start(&text.join("\n"), group)?;
        let (mut outcome, what) = (Outcome::default(), conf.unwrap_or("ordinary memory"));
        if !child.listen(self.deadline, what, |line| outcome.hear(line, what))? {
            let secs = self.deadline.as_secs();
            return Err(Failure::Broken(format!("{what}: stopped after {secs} s")));
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
    let fields: Vec<&str> = task.splitn(4, '\n').collect();
    let [name, conf, numbers, dir] = fields[..] else { return Err(wrong()) };
    let mix = Mix::ALL.into_iter().find(|mix| mix.name() == name).ok_or_else(wrong)?;
    let numbers: Vec<u64> = numbers.split(' ').filter_map(|word| word.parse().ok()).collect();
    let [size, warm, operations] = numbers[..] else { return Err(wrong()) };
    // Its buffer lives as long as the process: it must not be far.
    drop(std::io::stdout());
    let heap = if conf.is_empty() { None } else { Some(start(conf, dir)?) };
    println!("own {}", limited::resident());
    let mut program = phase(heap.as_ref(), "load", || Program::load(mix, size as usize));
    phase(heap.as_ref(), "warm", || program.run(warm));
    phase(heap.as_ref(), "run", || program.run(operations));
    phase(heap.as_ref(), "check", || program.read_all());
    let answer = program.answer;
    drop(program);
    let peak = limited::peak();
    // Also the check that nothing was lost.
    heap.map_or(Ok(()), |heap| heap.shutdown()).map_err(Failure::of)?;
    Ok((answer, peak))
}

fn start(conf: &str, dir: &str) -> Result<Heap> {
    let builder = Heap::builder().dir(dir).parse(conf).map_err(Failure::of)?;
    let heap = builder.start().map_err(Failure::of)?;
    // Where only faults of user mode are permitted nothing goes, and nothing would be measured.
    if !Far::contains(vec![0_u8; 64].as_ptr()) {
        return Err(Failure::Skipped("small objects are not far here".to_owned()));
    }
    Ok(heap)
}

/// Runs one phase and reports it.
fn phase<T>(heap: Option<&Heap>, name: &str, work: impl FnOnce() -> T) -> T {
    let (before, cpu, began) = (Paged::now(heap), cpu_time(), Instant::now());
    let result = work();
    let (secs, cpu_secs) = (began.elapsed().as_secs_f64(), (cpu_time() - cpu).as_secs_f64());
    let now = Paged::now(heap);
    let (faults, read) = (now.faults - before.faults, now.read - before.read);
    let written = now.written - before.written;
    println!("phase {name} {secs} {cpu_secs} {faults} {read} {written}");
    result
}
