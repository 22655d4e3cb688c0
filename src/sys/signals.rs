//! Signal masks: handlers of the program run on the program's threads.
#![expect(unsafe_code, reason = "changes the signal mask of the calling thread")]

use std::mem::MaybeUninit;

/// Signals that a thread raises itself by what it does; blocked ones would kill without a word.
const RAISED: [libc::c_int; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGSYS,
];

/// Keeps the program's signal handlers off the threads started while this lives: they inherit
/// the mask. A handler that touched far memory on a thread that serves faults would wait for ever.
#[must_use = "the mask is restored when this is dropped"]
pub(crate) struct SignalsBlocked {
    before: libc::sigset_t,
}

impl SignalsBlocked {
    pub(crate) fn new() -> SignalsBlocked {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: fills the set it is given (sigsetops(3)).
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: filled above.
        let mut all = unsafe { all.assume_init() };
        for signal in RAISED {
            // SAFETY: a valid set and a valid signal.
            unsafe { libc::sigdelset(&raw mut all, signal) };
        }
        let mut before = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: both sets are valid for the call; with a known `how` it cannot fail
        // (pthread_sigmask(3)) and stores the mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, before.as_mut_ptr()) };
        // SAFETY: stored by the call.
        SignalsBlocked { before: unsafe { before.assume_init() } }
    }
}

impl Drop for SignalsBlocked {
    fn drop(&mut self) {
        let none = std::ptr::null_mut();
        // SAFETY: a mask that the kernel gave out; the old one is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, none) };
    }
}
