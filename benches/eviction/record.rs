//! Records the page trace of a program, for `--trace`.
//!
//! lackey, a tool of valgrind's, prints every load and store, and valgrind the system calls that map memory. Of that
//! the pages of 4 KiB are kept that lie in anonymous mappings but for stacks, which is what is far under `farheap run`
//! once the heap has started. A program is some hundred times slower meanwhile; its threads run one at a time.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, ExitStatus};

const PAGE_SHIFT: u32 = 12;

/// A page that is among this many latest ones is not noted again: no cache is so small that it would have left.
const LATEST: usize = 4;

/// Runs a command to its end and writes its trace.
pub(crate) fn record(command: &[String], to: &Path) -> Result<(), String> {
    let why = |what: &str| {
        let what = what.to_owned();
        move |error: std::io::Error| format!("{what}: {error}")
    };
    let (log, log_end) = std::io::pipe().map_err(why("a pipe"))?;
    let mut valgrind = Command::new("valgrind");
    // `sh` gives its descriptor 9 to what it becomes; ours are closed when a program is executed.
    let log_path = format!("/proc/{}/fd/{}", std::process::id(), log_end.as_raw_fd());
    valgrind.args([
        "--tool=lackey",
        "--trace-mem=yes",
        "--basic-counts=no",
        "--trace-syscalls=yes",
    ]);
    valgrind.arg("--log-fd=9").args(command);
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"exec 9>"$0" && exec "$@""#, &log_path]);
    shell.arg(valgrind.get_program()).args(valgrind.get_args());
    let mut child = shell.spawn().map_err(why("sh"))?;
    // Until the child has opened it, nobody else keeps the pipe open.
    let file = File::create(to).map_err(why(&to.display().to_string()))?;
    let mut recorder = Recorder::new(BufWriter::new(file));
    let waiter = std::thread::spawn(move || {
        let status = child.wait();
        drop(log_end);
        status
    });
    let mut lines = BufReader::with_capacity(1 << 20, log);
    let mut line = Vec::new();
    while lines.read_until(b'\n', &mut line).map_err(why("valgrind"))? > 0 {
        recorder.hear(&line).map_err(why("the trace"))?;
        line.clear();
    }
    recorder.out.flush().map_err(why("the trace"))?;
    let status: std::io::Result<ExitStatus> = waiter.join().expect("waiting does not panic");
    let status = status.map_err(why("valgrind"))?;
    println!("{} events of {} pages, {status}", recorder.events, recorder.touched.len());
    if status.success() { Ok(()) } else { Err(format!("{}: {status}", command.join(" "))) }
}

struct Recorder<W> {
    out: W,
    /// Anonymous mappings: first page, and the page after the last.
    mapped: BTreeMap<u64, u64>,
    /// Pages with content.
    touched: HashSet<u64>,
    latest: [u64; LATEST],
    /// What is in `latest` next.
    next: usize,
    /// The mapping of the last touch that was looked up.
    near: Range<u64>,
    near_is_heap: bool,
    brk: Range<u64>,
    events: u64,
}

impl<W: Write> Recorder<W> {
    fn new(out: W) -> Recorder<W> {
        Recorder {
            out,
            mapped: BTreeMap::new(),
            touched: HashSet::new(),
            latest: [0; LATEST],
            next: 0,
            near: 0..0,
            near_is_heap: false,
            brk: 0..0,
            events: 0,
        }
    }

    /// Takes a line of valgrind's.
    fn hear(&mut self, line: &[u8]) -> std::io::Result<()> {
        match line {
            // Loads, stores, and both. Lines of instructions begin with their letter.
            [b' ', b'L' | b'S' | b'M', b' ', access @ ..] => self.access(access),
            [b'S', b'Y', b'S', b'C', b'A', b'L', b'L', ..] => {
                self.system_call(&String::from_utf8_lossy(line))
            }
            _ => Ok(()),
        }
    }

    fn access(&mut self, text: &[u8]) -> std::io::Result<()> {
        let Some(comma) = text.iter().position(|byte| *byte == b',') else { return Ok(()) };
        let hex =
            |at: u64, byte: &u8| at << 4 | u64::from((*byte as char).to_digit(16).unwrap_or(0));
        let first = text[..comma].iter().fold(0, hex);
        let digits = text[comma + 1..].iter().take_while(|byte| byte.is_ascii_digit());
        let len = digits.fold(0, |len, byte| 10 * len + u64::from(byte - b'0'));
        let last = (first + len.max(1) - 1) >> PAGE_SHIFT;
        (first >> PAGE_SHIFT..=last).try_for_each(|page| self.touch(page))
    }

    fn touch(&mut self, page: u64) -> std::io::Result<()> {
        if self.latest.contains(&page) || !self.is_heap(page) {
            return Ok(());
        }
        self.latest[self.next] = page;
        self.next = (self.next + 1) % LATEST;
        self.touched.insert(page);
        self.events += 1;
        writeln!(self.out, "{page}")
    }

    fn is_heap(&mut self, page: u64) -> bool {
        if !self.near.contains(&page) {
            let before = self.mapped.range(..=page).next_back();
            let after = self.mapped.range(page + 1..).next().map_or(u64::MAX, |(first, _)| *first);
            (self.near, self.near_is_heap) = match before {
                Some((&first, &end)) if page < end => (first..end, true),
                Some((_, &end)) => (end..after, false),
                None => (0..after, false),
            };
        }
        self.near_is_heap
    }

    /// Takes a line such as `SYSCALL[7,1](9) sys_mmap ( 0x0, 8192, 3, 34, -1, 0 ) --> [pre-success] Success(0x4a0b000)`.
    fn system_call(&mut self, line: &str) -> std::io::Result<()> {
        let Some((call, rest)) = line.split_once(" ( ") else { return Ok(()) };
        let name = call.rsplit(' ').next().unwrap_or_default();
        let Some((words, result)) = rest.split_once(')') else { return Ok(()) };
        let words: Vec<u64> = words.split(',').map(number).collect();
        // What another thread may run beside has its result in a line of its own.
        let is_async = result.contains("[async]");
        let result = result.split_once("Success(").map(|(_, text)| number(text));
        let Some(result) = result.or(is_async.then_some(0)) else { return Ok(()) };
        let pages = |at: u64, len: u64| at >> PAGE_SHIFT..(at + len).div_ceil(1 << PAGE_SHIFT);
        self.near = 0..0;
        match (name, &words[..]) {
            ("sys_mmap", &[_, len, _, flags, ..]) => {
                let is_heap =
                    flags & libc::MAP_ANONYMOUS as u64 != 0 && flags & libc::MAP_STACK as u64 == 0;
                let pages = pages(result, len);
                self.unmap(pages.clone())?;
                if is_heap {
                    self.mapped.insert(pages.start, pages.end);
                }
                Ok(())
            }
            ("sys_munmap", &[at, len]) => self.unmap(pages(at, len)),
            ("sys_madvise", &[at, len, advice])
                if [libc::MADV_DONTNEED as u64, libc::MADV_FREE as u64].contains(&advice) =>
            {
                self.discard(pages(at, len))
            }
            ("sys_mremap", &[at, old, new, ..]) => {
                // What is moved keeps its content; that it has other numbers then costs a first touch.
                self.unmap(pages(at, old))?;
                let pages = pages(result, new);
                self.mapped.insert(pages.start, pages.end);
                Ok(())
            }
            ("sys_brk", _) => {
                let end = result.div_ceil(1 << PAGE_SHIFT);
                if self.brk.start == 0 {
                    self.brk = end..end;
                }
                self.unmap(end..self.brk.end)?;
                self.brk.end = end;
                if !self.brk.is_empty() {
                    self.mapped.insert(self.brk.start, end);
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Notes that pages are no mapping of the heap, or no more.
    fn unmap(&mut self, pages: Range<u64>) -> std::io::Result<()> {
        self.discard(pages.clone())?;
        let cut: Vec<(u64, u64)> = self
            .mapped
            .range(..pages.end)
            .rev()
            .take_while(|(_, end)| **end > pages.start)
            .map(|(first, end)| (*first, *end))
            .collect();
        for (first, end) in cut {
            self.mapped.remove(&first);
            if first < pages.start {
                self.mapped.insert(first, pages.start);
            }
            if end > pages.end {
                self.mapped.insert(pages.end, end);
            }
        }
        Ok(())
    }

    fn discard(&mut self, pages: Range<u64>) -> std::io::Result<()> {
        self.latest = [0; LATEST];
        let gone: Vec<u64> = if pages.end.saturating_sub(pages.start) < self.touched.len() as u64 {
            pages.filter(|page| self.touched.contains(page)).collect()
        } else {
            self.touched.iter().copied().filter(|page| pages.contains(page)).collect()
        };
        for page in gone {
            self.touched.remove(&page);
            self.events += 1;
            writeln!(self.out, "-{page}")?;
        }
        Ok(())
    }
}

/// The number at the beginning of a text, in either notation; what is none is 0.
fn number(text: &str) -> u64 {
    let text = text.trim();
    let (digits, radix) = text.strip_prefix("0x").map_or((text, 10), |hex| (hex, 16));
    let end = digits.find(|c: char| !c.is_digit(radix)).unwrap_or(digits.len());
    u64::from_str_radix(&digits[..end], radix).unwrap_or(0)
}

/// Checks that the recorder takes valgrind's lines as it should.
pub(crate) fn check() {
    let lines = "\
SYSCALL[7,1](9) sys_mmap ( 0x0, 16384, 3, 34, 4294967295, 0 ) --> [pre-success] Success(0x10000)
 S 0000000000010008,8
 L 0000000000010ff8,16
I  0000000000400000,3
 M 0000000000500000,8
 L 0000000000010010,8
SYSCALL[7,1](28) sys_madvise ( 0x10000, 4096, 4 ) --> [async] ...
SYSCALL[7,1](28) ... [async] --> Success(0x0)
 L 0000000000010010,8
SYSCALL[7,1](11) sys_munmap ( 0x11000, 4096 )[sync] --> Success(0x0)
 L 0000000000011010,8
 L 0000000000013010,8
";
    let mut recorder = Recorder::new(Vec::new());
    for line in lines.lines() {
        recorder.hear(line.as_bytes()).expect("a vector takes all that is written");
    }
    let trace = String::from_utf8(recorder.out).expect("numbers are text");
    assert_eq!(
        trace.split_whitespace().collect::<Vec<_>>(),
        ["16", "17", "-16", "16", "-17", "19"]
    );
}
