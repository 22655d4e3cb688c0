//! Reports to the user: failures, and statistics at the end.

#![expect(unsafe_code, reason = "has a destructor, exports _exit")]

use crate::mapping;
use crate::own::enter;
use crate::start::settings;
use farheap::{ByteCount, Heap, messages};
use std::fmt::{Display, Formatter};
use std::sync::atomic::{AtomicBool, Ordering};

/// A peak above the limit by less than 1/OVER_PART of it is not worth a line.
const OVER_PART: u64 = 16;

/// Prepares for messages: this is called before the program has done anything.
pub(crate) fn prepare() {
    messages::keep_standard_error();
    // The library's own copy of the standard library: a panic's message is not to go to a descriptor 2 that is the
    // program's file by now.
    std::panic::set_hook(Box::new(|panic| say(&panic.to_string())));
}

/// Says something on standard error, with the name of the program.
pub(crate) fn say(text: &str) {
    let program = std::env::current_exe().unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    messages::say(&format!("{name} ({}): {text}", std::process::id()));
}

/// Runs after `main` and the destructors of the program.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_THE_END: extern "C" fn() = at_the_end;

extern "C" fn at_the_end() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let Some(_inside) = enter() else { return };
    // A forked child is another program to the user, and knows nothing of the parent's far memory.
    let Some(settings) = settings().filter(|_| is_first_process()) else { return };
    if TOLD.swap(true, Ordering::Relaxed) {
        return;
    }
    let limit = settings.limit();
    if !settings.stats && limit.is_none_or(|(limit, _)| may_have_had() <= limit) {
        return; // As most programs.
    }
    let heap = Heap::running();
    let process = Process { peak: resident_max(), limit };
    if settings.stats && (heap.is_some() || settings.first) {
        say(&format!("{}; {process}", heap.map_or_else(nothing_far, |heap| far(&heap))));
    } else if process.is_above() {
        say(&format!(
            "{process}: memory that is not far (code, stacks, local memory, memory mapped by the program) cannot \
             leave"
        ));
    }
}

fn nothing_far() -> String {
    format!("nothing far, local {}", farheap::malloc::local_resident())
}

fn far(heap: &Heap) -> String {
    let (stats, mapped) = (heap.stats(), mapping::far_bytes());
    format!(
        "far {}, of it {mapped} mapped, resident {} of at most {}, peak {}; faults {} read, {} zero; {} read, \
         {} written; local {}",
        ByteCount(heap.usage().allocated_bytes.0 + mapped.0),
        stats.resident_bytes,
        stats.limit_bytes,
        stats.resident_bytes_max,
        stats.faults_read,
        stats.faults_zero,
        stats.bytes_read,
        stats.bytes_written,
        farheap::malloc::local_resident(),
    )
}

/// Resident memory of the whole process, up to now.
struct Process {
    /// `None`: the kernel does not say.
    peak: Option<ByteCount>,
    /// And whether memory of files, of which the kernel does not tell the peak, counts.
    limit: Option<(ByteCount, bool)>,
}

impl Process {
    /// True if the peak is above the limit, by more than what comes and goes before far memory has left.
    fn is_above(&self) -> bool {
        let most = |limit: ByteCount| limit.0 + limit.0 / OVER_PART;
        let over =
            |(peak, (limit, counts_files)): (ByteCount, _)| counts_files && peak.0 > most(limit);
        self.peak.zip(self.limit).is_some_and(over)
    }
}

impl Display for Process {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self.peak {
            Some(peak) => write!(f, "process: peak {peak}")?,
            None => f.write_str("process: peak unknown")?,
        }
        match self.limit {
            Some((limit, true)) => write!(f, " of at most {limit}")?,
            Some((limit, false)) => write!(f, ", files included, of at most {limit} without")?,
            None => f.write_str(", without a limit")?,
        }
        f.write_str(if self.is_above() { ", above its limit" } else { "" })
    }
}

/// At least [`resident_max`], for a fiftieth of the time: `getrusage(2)` counts the program before this one too (`exec`
/// keeps the number).
fn may_have_had() -> ByteCount {
    // SAFETY: numbers, of which zero is one.
    let mut used: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: there is room for the answer.
    unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut used) };
    ByteCount::kib(used.ru_maxrss.unsigned_abs())
}

/// The most memory that the process ever had in RAM, see `proc_pid_status(5)`.
fn resident_max() -> Option<ByteCount> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(ByteCount::kib(kib))
}

/// `_exit(2)`, which runs no destructors: statistics are printed all the same.
///
/// A child of `vfork(2)` ends like this too. It shares its parent's memory, but has a process of its
/// own: nothing is printed there.
#[unsafe(no_mangle)]
extern "C" fn _exit(status: libc::c_int) -> ! {
    at_the_end();
    #[expect(clippy::disallowed_methods, reason = "the C library's function is this one")]
    loop {
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::syscall(libc::SYS_exit_group, status) };
    }
}

/// True if this process is the one that the library was loaded in, not a child that it forked.
fn is_first_process() -> bool {
    settings().is_some_and(|settings| settings.process == std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_above_a_limit_that_was_named_and_no_other() {
        let process = |counts_files| Process {
            peak: Some(ByteCount::mib(40)),
            limit: Some((ByteCount::mib(32), counts_files)),
        };
        let text = process(true).to_string();
        assert_eq!(text, "process: peak 40.0 MiB of at most 32.0 MiB, above its limit");
        let text = process(false).to_string();
        assert_eq!(text, "process: peak 40.0 MiB, files included, of at most 32.0 MiB without");
    }
}
