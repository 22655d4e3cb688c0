//! Signal masks: which code of this crate a signal handler of the program may interrupt.
//!
//! A handler may touch far memory. The thread that it interrupts then waits in the middle of what
//! it was doing until the fault is served, so it must hold nothing that serving a fault needs:
//! locks of that kind are [`FaultLock`]s, and a thread that is changing a page's word, or has a
//! chunk latched, holds a [`SignalsBlocked`]. Threads of the crate block signals for good.
//!
//! # Invariants
//! 1. The kernel's mask of a thread blocks all but the signals that a thread raises itself whenever
//!    the thread's depth is above zero.

use crate::base::sync::{Rank, Ranked, RankedGuard};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// Signals that a thread raises itself by what it does; blocked ones would kill without a word.
const RAISED: [Signal; 7] = [
    Signal::SIGSEGV,
    Signal::SIGBUS,
    Signal::SIGILL,
    Signal::SIGFPE,
    Signal::SIGTRAP,
    Signal::SIGABRT,
    Signal::SIGSYS,
];

thread_local! {
    /// Guards of this thread that are alive. Const and without a destructor, so that it works inside
    /// allocators, in signal handlers and at thread exit.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    /// The mask from before the first of them changed it; `None`: it did not.
    static BEFORE: Cell<Option<SigSet>> = const { Cell::new(None) };
}

/// All signals but those that a thread raises itself.
pub(super) fn all_but_raised() -> SigSet {
    let mut all = SigSet::all();
    for signal in RAISED {
        all.remove(signal);
    }
    all
}

/// Keeps the program's signal handlers off the calling thread while it lives, and off the threads
/// started meanwhile, which inherit the mask. Guards nest, and only the outermost enters the
/// kernel: twice, 0.1 us each.
#[must_use = "signals are delivered again when this is dropped"]
#[derive(Debug)]
pub(crate) struct SignalsBlocked {
    /// Masks belong to their thread.
    not_send: PhantomData<*const ()>,
}

impl SignalsBlocked {
    #[inline]
    pub(crate) fn new() -> SignalsBlocked {
        let depth = DEPTH.get();
        if depth == 0 {
            block();
        }
        // Afterwards: a handler that came in between found the depth as it left it.
        DEPTH.set(depth + 1);
        SignalsBlocked { not_send: PhantomData }
    }

    /// For a thread whose signals are blocked by other means: an inherited mask, or the mask of the
    /// signal handler that it is in.
    pub(crate) fn already() -> SignalsBlocked {
        DEPTH.set(DEPTH.get() + 1);
        SignalsBlocked { not_send: PhantomData }
    }

    /// The same for a thread of the crate, until it ends.
    pub(crate) fn for_good() {
        super::thread::note_own();
        std::mem::forget(SignalsBlocked::already());
    }
}

impl Drop for SignalsBlocked {
    #[inline]
    fn drop(&mut self) {
        let depth = DEPTH.get() - 1;
        // First: from the call on, a handler may run.
        DEPTH.set(depth);
        if depth == 0 {
            unblock();
        }
    }
}

/// True if the calling thread holds a [`SignalsBlocked`].
pub(crate) fn are_blocked() -> bool {
    DEPTH.get() > 0
}

#[cold]
fn block() {
    if cfg!(miri) {
        return; // Has neither masks nor handlers.
    }
    // With a known `how` it cannot fail (pthread_sigmask(3)).
    BEFORE.set(all_but_raised().thread_swap_mask(SigmaskHow::SIG_SETMASK).ok());
}

#[cold]
fn unblock() {
    if let Some(before) = BEFORE.take() {
        let _ = before.thread_set_mask();
    }
}

/// A lock that serving a fault may need, held with signals blocked: interrupted under it by a handler
/// that touches far memory, a thread would wait for a handler that waits for the lock.
#[derive(Debug)]
pub(crate) struct FaultLock<T>(Ranked<T>);

impl<T> FaultLock<T> {
    pub(crate) const fn new(rank: Rank, value: T) -> FaultLock<T> {
        FaultLock(Ranked::new(rank, value))
    }

    /// Takes the lock.
    ///
    /// # Panics
    /// In debug builds, as [`Ranked::lock`].
    #[inline]
    pub(crate) fn lock(&self) -> FaultGuard<'_, T> {
        let signals = SignalsBlocked::new();
        FaultGuard { inner: self.0.lock(), _signals: signals }
    }
}

/// Holds a [`FaultLock`].
#[derive(Debug)]
pub(crate) struct FaultGuard<'a, T> {
    // Dropped in this order.
    inner: RankedGuard<'a, T>,
    _signals: SignalsBlocked,
}

impl<T> Deref for FaultGuard<'_, T> {
    type Target = T;
    #[inline]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> DerefMut for FaultGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

#[cfg(test)]
mod tests {
    #![expect(unsafe_code, reason = "installs a handler")]

    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    static HANDLED: AtomicU32 = AtomicU32::new(0);

    extern "C" fn count(_: libc::c_int) {
        HANDLED.fetch_add(1, Ordering::Relaxed);
    }

    fn raise() {
        // Unblocked, it is delivered before the call returns (raise(3)).
        nix::sys::signal::raise(Signal::SIGWINCH).expect("a signal");
    }

    #[test]
    #[cfg_attr(miri, ignore = "has no signals")]
    fn a_handler_runs_when_the_last_lock_is_released() {
        let count = nix::sys::signal::SigHandler::Handler(count);
        // SAFETY: the handler only changes an atomic.
        unsafe { nix::sys::signal::signal(Signal::SIGWINCH, count) }.expect("a handler");
        let one = FaultLock::new(Rank::Policy, 1);
        let two = FaultLock::new(Rank::Slots, 2);
        let handled = || HANDLED.load(Ordering::Relaxed);
        raise();
        assert_eq!(handled(), 1, "nothing is held");
        let first = one.lock();
        let second = two.lock();
        raise();
        assert!(are_blocked());
        assert_eq!((handled(), *first + *second), (1, 3), "two locks are held");
        // In the order in which they were taken, which is not that of a stack.
        drop(first);
        assert_eq!(handled(), 1, "one lock is held");
        drop(second);
        assert_eq!(handled(), 2, "nothing is held");
        assert!(!are_blocked());
    }
}
