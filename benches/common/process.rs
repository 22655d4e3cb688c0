//! This process: its processor time, its rights, and the signals that ask it to end.
#![expect(unsafe_code, reason = "makes system calls")]

use crate::{Failure, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Processor time that this process has used.
pub(crate) fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
    // The second one ends the process at once.
    // SAFETY: signal(2) may be called in a handler.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}

/// From now on SIGINT and SIGTERM end the benchmark in order: devices and groups are removed.
pub(crate) fn catch_interrupts() {
    let handler = note_interrupt as extern "C" fn(i32) as libc::sighandler_t;
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler only stores to an atomic and resets itself.
        unsafe { libc::signal(signal, handler) };
    }
}

/// Fails after a SIGINT or SIGTERM.
pub(crate) fn check_interrupt() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) { Err(Failure::Interrupted) } else { Ok(()) }
}

pub(crate) fn is_root() -> bool {
    // SAFETY: takes nothing, changes nothing.
    unsafe { libc::geteuid() == 0 }
}
