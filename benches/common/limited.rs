//! This program once more, as a child in a memory control group that may swap to a file.
//!
//! The child waits for a line on its standard input, so that its parent can put it into the group before it
//! allocates, and says what it found in lines on its standard output.

use crate::group::{MemoryGroup, SwapSpace, fresh_name};
use crate::process::{check_interrupt, is_root};
use crate::{Failure, Result};
use farheap::Heap;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// What groups are charged for and resident sizes leave out: page tables, stacks of the kernel, and
/// what each processor has in stock. With none of it the kernel kills processes in small groups.
pub(crate) const GROUP_SLACK: usize = 2 << 20;

/// The least limit that farheap takes, in bytes.
pub(crate) const LIMIT_MIN: u64 = 8 << 20;

const START: &str = "start";

/// Names the folder of the child's group to it.
const GROUP: &str = "FARHEAP_BENCH_GROUP";

/// A child, killed when dropped.
pub(crate) struct Limited {
    child: Child,
    /// Removed after the child has ended.
    _group: Option<MemoryGroup>,
}

impl Limited {
    /// Starts this program with `--child` and a text, in the group if there is one.
    pub(crate) fn start(task: &str, group: Option<MemoryGroup>) -> Result<Limited> {
        let program = match &group {
            Some(_) => unread_copy()?,
            None => std::env::current_exe().map_err(Failure::io)?,
        };
        Limited::start_program(&program, task, group)
    }

    /// The same of another program.
    pub(crate) fn start_program(
        program: &Path,
        task: &str,
        group: Option<MemoryGroup>,
    ) -> Result<Limited> {
        let mut command = Command::new(program);
        command.args(["--child", task]).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(group) = &group {
            command.env(GROUP, group.dir());
        }
        let child = command.spawn().map_err(Failure::io)?;
        let mut limited = Limited { child, _group: group };
        if let Some(group) = &limited._group {
            group.add(limited.child.id())?;
        }
        let mut to = limited.child.stdin.take().expect("asked for above");
        writeln!(to, "{START}").map_err(Failure::io)?;
        Ok(limited)
    }

    /// Hands each line to `hear`, until that returns true and the child has ended. Returns whether that
    /// came before the deadline.
    ///
    /// # Errors
    /// Those of `hear`; a child that ends before; an interrupt.
    pub(crate) fn listen(
        &mut self,
        deadline: Duration,
        what: &str,
        mut hear: impl FnMut(&str) -> Result<bool>,
    ) -> Result<bool> {
        /// Between two looks for an interrupt.
        const WAIT: Duration = Duration::from_millis(100);
        let from = BufReader::new(self.child.stdout.take().expect("asked for when it started"));
        let (told, lines) = channel();
        // A child that hangs must not stop its parent, which reads with a deadline therefore.
        std::thread::spawn(move || from.lines().try_for_each(|line| told.send(line).map_err(drop)));
        let until = Instant::now() + deadline;
        loop {
            check_interrupt()?;
            match lines.recv_timeout(WAIT) {
                Ok(line) => {
                    if hear(&line.map_err(Failure::io)?)? {
                        self.child.wait().map_err(Failure::io)?;
                        return Ok(true);
                    }
                }
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => return Ok(false),
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait().map_err(Failure::io)?;
                    check_interrupt()?;
                    return Err(Failure::Broken(format!("{what} ended early: {status}")));
                }
            }
        }
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Returns a copy of this program without a name, none of which is in memory. The kernel charges code to the group that
/// reads it first: the child's then, as in a container, not that of this process, which runs the same code.
fn unread_copy() -> Result<PathBuf> {
    static COPY: OnceLock<Result<File>> = OnceLock::new();
    let copy = || {
        let me = std::env::current_exe()?;
        let path = me.with_file_name(fresh_name());
        fs::copy(&me, &path)?;
        // Not to write: the kernel refuses to run what can be written.
        let file = File::open(&path);
        fs::remove_file(&path)?;
        let file = file?;
        // Only clean pages can be dropped.
        file.sync_all()?;
        Ok(file)
    };
    let file = COPY.get_or_init(|| copy().map_err(Failure::io)).as_ref().map_err(Clone::clone)?;
    posix_fadvise(file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
        .map_err(|errno| Failure::io(errno.into()))?;
    Ok(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
}

/// Runs a baseline, a child in a memory group, up to three times. The kernel kills a group now and then whose
/// pages it cannot write to swap as fast as the child makes them dirty; that says nothing about the next run.
///
/// # Errors
/// Those of `run`: at once when it is no failure of the child, else of the last time.
pub(crate) fn run_baseline<T>(name: &str, run: impl Fn() -> Result<T>) -> Result<T> {
    const TRIES: usize = 3;
    let mut result = run();
    for _ in 1..TRIES {
        let Err(Failure::Broken(why)) = &result else { break };
        println!("again: baseline {name}: {why}");
        result = run();
    }
    result
}

/// In the child: waits until it may begin. Nothing comes when the parent is gone: false.
fn may_begin() -> bool {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).is_ok() && line.trim_end() == START
}

/// In the child: runs it when it may begin, and says the answer and the peak, or what went wrong.
pub(crate) fn serve(run: impl FnOnce() -> Result<(u64, u64)>) -> ExitCode {
    if !may_begin() {
        return ExitCode::FAILURE;
    }
    match run() {
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

/// A swap file, in use until dropped.
pub(crate) struct SwapFile {
    /// Before the file: swap is off when that goes.
    space: Option<SwapSpace>,
    path: PathBuf,
}

impl SwapFile {
    pub(crate) fn create(dir: &Path, bytes: usize) -> Result<SwapFile> {
        const CHUNK: usize = 1 << 20;
        if !is_root() {
            return Err(Failure::Skipped("swap needs root".to_owned()));
        }
        // Swap on a file in memory would page the file itself out to it.
        if is_in_memory(dir) {
            return Err(Failure::Skipped(format!("swap: {} is in memory", dir.display())));
        }
        let mut swap = SwapFile { space: None, path: dir.join(fresh_name()) };
        let mut options = OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o600).open(&swap.path);
        let mut file = file.map_err(Failure::io)?;
        let zeros = vec![0_u8; CHUNK];
        for _ in 0..bytes.div_ceil(CHUNK) {
            check_interrupt()?;
            file.write_all(&zeros).map_err(Failure::io)?;
        }
        file.sync_all().map_err(Failure::io)?;
        swap.space = Some(SwapSpace::start(&swap.path)?);
        Ok(swap)
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        self.space = None;
        drop(fs::remove_file(&self.path));
    }
}

/// Where files of the baselines go, unless said: where farheap's own does.
pub(crate) fn default_dir() -> PathBuf {
    let dir = std::env::temp_dir();
    if is_in_memory(&dir) { PathBuf::from("/var/tmp") } else { dir }
}

/// Whether a directory is on a file system in memory.
fn is_in_memory(dir: &Path) -> bool {
    use nix::sys::statfs::{TMPFS_MAGIC, statfs};
    statfs(dir).is_ok_and(|found| found.filesystem_type() == TMPFS_MAGIC)
}

/// The number after a name in a file of `/proc`; 0 when it is not there.
pub(crate) fn proc_field(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut lines = text.lines().map(str::split_whitespace);
    let mut line = lines.find_map(|mut words| (words.next() == Some(name)).then_some(words));
    line.as_mut().and_then(Iterator::next).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// Bytes of this process that were resident at their peak, without those of files.
pub(crate) fn peak() -> u64 {
    let field = |name| proc_field("/proc/self/status", name) * 1024;
    field("VmHWM:").saturating_sub(field("RssFile:"))
}

/// Bytes of this process that are resident, code included.
pub(crate) fn resident() -> u64 {
    proc_field("/proc/self/status", "VmRSS:") * 1024
}

/// Figures of what a process has paged so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paged {
    /// Faults that waited for the device.
    pub(crate) faults: u64,
    /// Bytes from and to the device.
    pub(crate) read: u64,
    pub(crate) written: u64,
}

impl Paged {
    /// Of this process: by the heap; without one by the kernel, with swap.
    pub(crate) fn now(heap: Option<&Heap>) -> Paged {
        const PAGE: u64 = 4096;
        if let Some(heap) = heap {
            let stats = heap.stats();
            let (read, written) = (stats.bytes_read.get(), stats.bytes_written.get());
            return Paged { faults: stats.faults_read, read, written };
        }
        let (read, written) = swapped();
        Paged { faults: major_faults(), read: read * PAGE, written: written * PAGE }
    }
}

/// Faults of this process's group for which the kernel had to read; 0 where it is in none.
pub(crate) fn major_faults() -> u64 {
    group_field("pgmajfault").unwrap_or(0)
}

/// Pages that the kernel has brought back from swap and written to it, for this process's group. Groups of version 1
/// do not count what is written: there it is that of the machine, on which nothing else swaps as a rule.
pub(crate) fn swapped() -> (u64, u64) {
    let read = group_field("workingset_refault_anon").unwrap_or(0);
    let written = "pswpout";
    (read, group_field(written).unwrap_or_else(|| proc_field("/proc/vmstat", written)))
}

/// A count of this process's memory group.
fn group_field(name: &str) -> Option<u64> {
    let text = fs::read_to_string(Path::new(&std::env::var_os(GROUP)?).join("memory.stat")).ok()?;
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}
