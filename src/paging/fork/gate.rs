//! The gate: stops the threads of a region, or of a child's share of one, while the process forks.
//!
//! ```text
//!   open --close(Evictor)--> evictor stands still --close(All)--> all stand still --open--> open
//!                                                       |
//!                                 the thread that forks faults: break_open (its child gets nothing)
//! ```
//! A thread stands still between two turns, when no page is `Moving` by it, so that words, frames and
//! mappings agree in the child. A thread that stands still reads faults, and keeps them for later: one
//! of the thread that forks would wait for ever.
//!
//! # Invariants
//! 1. While the gate is closed and not broken, no page is installed or taken out by a closed thread.

use crate::base::sync::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// How long a thread that stands still waits before it looks again.
pub(in crate::paging) const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long the thread that forks waits before it looks again for threads that have not stopped.
const PAUSE: Duration = Duration::from_micros(20);

/// Which threads stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(in crate::paging) enum Closed {
    /// None.
    No = 0,
    /// The threads that take pages out.
    Evictor = 1,
    /// Those that bring pages in as well.
    All = 2,
}

/// See [module](self).
#[derive(Debug, Default)]
pub(in crate::paging) struct Gate {
    closed: AtomicU32,
    /// Threads that stand still.
    still: AtomicU32,
    /// The thread that forks.
    thread: AtomicU32,
    broken: AtomicBool,
}

impl Gate {
    /// Stops threads until `still` of them stand, because `thread` is going to fork. `call` wakes them.
    pub(in crate::paging) fn close(&self, what: Closed, thread: u32, still: u32, call: impl Fn()) {
        self.thread.store(thread, Ordering::Relaxed);
        // Release: pairs with `is_closed`, after which the thread is read.
        self.closed.store(what as u32, Ordering::Release);
        call();
        // Acquire: what the threads did before is seen, and is in the child.
        while self.still.load(Ordering::Acquire) < still {
            std::thread::sleep(PAUSE);
        }
    }

    /// Lets all go on; `call` wakes them. Returns whether the gate was closed all the time.
    pub(in crate::paging) fn open(&self, call: impl Fn()) -> bool {
        self.closed.store(Closed::No as u32, Ordering::Release);
        call();
        !self.broken.swap(false, Ordering::AcqRel)
    }

    /// Whether threads of a kind are to stand still.
    pub(in crate::paging) fn is_closed(&self, for_whom: Closed) -> bool {
        self.closed.load(Ordering::Acquire) >= for_whom as u32
    }

    /// Whether a fault of the thread that forks has opened the gate.
    pub(in crate::paging) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }

    /// The calling thread stands still, while `wait` is called again and again, until the gate opens.
    pub(in crate::paging) fn stand_still<E>(
        &self,
        who: Closed,
        mut wait: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        self.still.fetch_add(1, Ordering::AcqRel);
        let mut waited = Ok(());
        while self.is_closed(who) && waited.is_ok() {
            waited = wait();
        }
        self.still.fetch_sub(1, Ordering::AcqRel);
        waited
    }

    /// A thread that stands still has read a fault of `thread`. If it is the one that forks, it has not
    /// begun to, and waits: the gate opens, and the child is told ([`is_broken`](Self::is_broken)).
    pub(in crate::paging) fn note_fault(&self, thread: u32) {
        if thread == self.thread.load(Ordering::Relaxed) {
            self.broken.store(true, Ordering::Release);
            self.closed.store(Closed::No as u32, Ordering::Release);
        }
    }
}
