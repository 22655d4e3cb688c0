//! Threads that end: far memory that the kernel reads and writes for them is kept until they are gone.
//!
//! After its last instruction the kernel does three things for a thread: it follows the list of its robust mutexes, marks
//! those that it holds, and stores a zero where others wait for its end. A fault of that is not served: no userfaultfd is asked
//! for a thread that ends, so what lies in memory that has left would be lost, and waiters would wait for ever. A destructor of the thread
//! pins it ([`keep`]), and the maintenance thread ends the pins when the thread is gone ([`release`]). What the kernel does for
//! a process that is killed is outside of this. Uses `sys`; the tiers' pins by [`Keeper`].

use crate::base::local::keep_local;
use crate::base::sync::{AtomicUsize, Ordering};
use crate::sys::ending;
use std::sync::{Mutex, OnceLock, PoisonError};

/// How far memory is kept. Functions, because what they use uses this module.
#[derive(Debug)]
pub(super) struct Keeper {
    /// Pins a range; `false`: it is not far, or cannot be pinned.
    pub(super) keep: fn(usize, usize) -> bool,
    /// Ends a pin.
    pub(super) release: fn(usize, usize),
}

static KEEPER: OnceLock<Keeper> = OnceLock::new();

/// A pin for a thread.
#[derive(Clone, Copy, Debug)]
struct ThreadPin {
    thread: u32,
    start: usize,
    len: usize,
}

/// The pins of threads that end; and their number.
static KEPT: Mutex<Vec<ThreadPin>> = Mutex::new(Vec::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Keeps what threads need at their end, from now on.
pub(super) fn watch(keeper: Keeper) {
    // Set before: the functions are the same.
    let _ = KEEPER.set(keeper);
}

/// Keeps what the kernel will need of far memory for the calling thread, which ends.
pub(super) fn keep() {
    let Some(keeper) = KEEPER.get() else { return };
    let _local = keep_local();
    let thread = ending::current_thread();
    ending::for_each_range(|start, len| {
        let is_kept = (keeper.keep)(start, len);
        if is_kept {
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push(ThreadPin { thread, start, len });
            COUNT.store(kept.len(), Ordering::Relaxed);
        }
        is_kept
    });
}

/// Releases what was kept for threads that are gone.
pub(crate) fn release() {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return;
    }
    let Some(keeper) = KEEPER.get() else { return };
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.retain(|one| {
        // A new thread may have the number of the old one: then this is kept as long as that lives.
        let is_needed = !ending::is_gone(one.thread);
        if !is_needed {
            (keeper.release)(one.start, one.len);
        }
        is_needed
    });
    COUNT.store(kept.len(), Ordering::Relaxed);
}
