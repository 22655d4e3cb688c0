//! A memory barrier on all running threads of the process: `membarrier(2)`.
//!
//! Makes the rare side of a two-sided protocol pay for both: the frequent side needs only a
//! compiler fence between its store and its load, where it would otherwise need a full fence.

#![expect(unsafe_code, reason = "membarrier has no wrapper in libc")]

use std::sync::OnceLock;

/// Tells the kernel that this process will run barriers, unless it knows; returns whether it may.
///
/// Takes no time while the process has one thread. Else the kernel waits until all processors have been
/// elsewhere: 18 ms, most of what a start and end of a heap took.
pub(crate) fn register() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| call(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED))
}

/// Runs a full memory barrier on every running thread of this process, and returns whether the
/// kernel could (Linux 4.14, not forbidden by a sandbox).
///
/// Afterwards each thread has either made all its earlier stores visible or will see all stores
/// that this thread made before the call.
pub(crate) fn on_all_threads() -> bool {
    register() && call(libc::MEMBARRIER_CMD_PRIVATE_EXPEDITED)
}

fn call(command: libc::c_int) -> bool {
    // SAFETY: membarrier takes numbers only and touches no memory of ours.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_barrier_can_be_repeated() {
        assert_eq!(on_all_threads(), on_all_threads());
    }
}
