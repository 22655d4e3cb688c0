//! What the library tells the user: failures, and statistics at the end.

#![expect(unsafe_code, reason = "has a destructor, exports _exit")]

use crate::mapping;
use crate::own::enter;
use crate::start::{Settings, settings};
use farheap::region::own_descriptor;
use farheap::{ByteCount, Heap};
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, FromRawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Standard error as it was at the start: many programs close theirs before the end, and all descriptors
/// that they do not know.
static ERRORS: OnceLock<File> = OnceLock::new();

/// Keeps standard error for [`say`].
pub(crate) fn keep_standard_error() {
    // Without standard error there is nothing to print to.
    let Ok(kept) = std::io::stderr().as_fd().try_clone_to_owned() else { return };
    // The program must not close it unknowingly, and write to its number what is for another file.
    let kept = own_descriptor(kept);
    // SAFETY: it is open, and nobody closes it as long as the process lives.
    let kept = unsafe { File::from_raw_fd(kept) };
    // It is unset: this is called once.
    let _ = ERRORS.set(kept);
}

/// Says something on standard error, with the name of the program.
pub(crate) fn say(text: &str) {
    let program = std::env::current_exe().unwrap_or_default();
    let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let line = format!("farheap: {name} ({}): {text}\n", std::process::id());
    // There is no other place to report a failed write to.
    let _ = match ERRORS.get() {
        Some(mut errors) => errors.write_all(line.as_bytes()),
        None => std::io::stderr().write_all(line.as_bytes()),
    };
}

/// Runs after `main` and the destructors of the program.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_THE_END: extern "C" fn() = at_the_end;

extern "C" fn at_the_end() {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let Some(_inside) = enter() else { return };
    // A forked child is another program to the user, and knows nothing of the parent's far memory.
    let wanted = settings().is_some_and(|settings| settings.stats) && is_first_process();
    if !wanted || TOLD.swap(true, Ordering::Relaxed) {
        return;
    }
    let local = farheap::malloc::local_resident();
    let Some(heap) = Heap::running() else {
        if settings().is_some_and(|settings| settings.first) {
            say(&format!("nothing far, local {local}"));
        }
        return;
    };
    let (stats, mapped) = (heap.stats(), mapping::far_bytes());
    let limit = settings().and_then(Settings::limit);
    let process = match (resident_max(), limit) {
        (Some(max), Some(limit)) => format!("; process: peak {max} of at most {limit}"),
        (Some(max), None) => format!("; process: peak {max}"),
        (None, _) => String::new(),
    };
    say(&format!(
        "far {}, of it {} mapped, resident {} of at most {}, peak {}; faults {} read, {} zero; \
         {} read, {} written; local {local}{process}",
        ByteCount(heap.allocated().0 + mapped.0),
        mapped,
        stats.resident_bytes,
        stats.limit_bytes,
        stats.resident_bytes_max,
        stats.faults_read,
        stats.faults_zero,
        stats.bytes_read,
        stats.bytes_written,
    ));
}

/// The most memory that the process ever had in RAM, see `proc_pid_status(5)`. Not by `getrusage(2)`,
/// which counts the program before this one too (`exec` keeps the number).
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

/// Whether this process is the one that the library was loaded in, not a child that it forked.
fn is_first_process() -> bool {
    settings().is_some_and(|settings| settings.process == std::process::id())
}
