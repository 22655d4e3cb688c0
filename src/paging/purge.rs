//! Purge: how a region has the heap above it give free memory back.
//!
//! Freed far memory stays with jemalloc for a while, contents and all. To a region it looks like
//! any other, and short of memory the evictor would write it to the device. So a region that is
//! short calls the heap's maintenance thread, which purges the arenas. A region without a heap has
//! none, and a call does nothing.
//!
//! # Invariants
//! 1. Handlers, the evictor and threads that fault do not wait here; a thread that reclaims memory
//!    waits for [`ANSWER_MAX`] at most.
//! 2. The maintenance thread purges at most once in [`REST`], however often it is called.

use crate::base::deadline::Deadline;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank};
use crate::sys::signals::{FaultLock, SignalsBlocked};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long a reclaiming thread waits for the maintenance thread.
const ANSWER_MAX: Duration = Duration::from_millis(5);

/// Least time between two answers: data that dies young is reused meanwhile.
pub(crate) const REST: Duration = Duration::from_millis(50);

/// Calls and answers.
#[derive(Debug)]
pub(crate) struct Purge {
    thread: FaultLock<Option<Thread>>,
    is_there: AtomicBool,
    called: AtomicBool,
    answers: AtomicU64,
    /// Microseconds from `epoch` to the last answer.
    answered_us: AtomicU64,
    epoch: Instant,
}

impl Purge {
    pub(in crate::paging) fn new() -> Purge {
        Purge {
            thread: FaultLock::new(Rank::Leaf, None),
            is_there: AtomicBool::new(false),
            called: AtomicBool::new(false),
            answers: AtomicU64::new(0),
            answered_us: AtomicU64::new(0),
            epoch: Instant::now(),
        }
    }

    /// Calls the maintenance thread, once until it has answered.
    pub(in crate::paging) fn call(&self) {
        // Interrupted between flag and call, this thread would keep all others from calling.
        let _blocked = SignalsBlocked::new();
        if !self.is_there.load(Ordering::Acquire) || self.called.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(thread) = &*self.thread.lock() {
            thread.unpark();
        }
    }

    /// Calls it and waits shortly for what comes of it, unless it has just answered.
    pub(crate) fn call_and_wait(&self) {
        if !self.is_there.load(Ordering::Acquire) || !self.has_rested() {
            return;
        }
        let before = self.answers.load(Ordering::Acquire);
        self.call();
        let mut deadline = Deadline::new(ANSWER_MAX);
        while self.answers.load(Ordering::Acquire) == before && !deadline.is_over() {
            // The maintenance thread has nobody to tell: callers come and go.
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    fn has_rested(&self) -> bool {
        let answers = self.answers.load(Ordering::Acquire);
        let answered = Duration::from_micros(self.answered_us.load(Ordering::Relaxed));
        answers == 0 || self.epoch.elapsed().saturating_sub(answered) >= REST
    }

    // For the maintenance thread.

    /// Says who purges; `None`: nobody any more.
    pub(crate) fn set_thread(&self, thread: Option<Thread>) {
        self.is_there.store(thread.is_some(), Ordering::Release);
        *self.thread.lock() = thread;
    }

    /// True if the thread was called and has not answered.
    pub(crate) fn is_called(&self) -> bool {
        self.called.load(Ordering::Acquire)
    }

    /// The same, and it is time for an answer, which [`answer`](Self::answer) ends.
    pub(crate) fn is_due(&self) -> bool {
        self.is_called() && self.has_rested()
    }

    /// The thread has purged.
    pub(crate) fn answer(&self) {
        let now = self.epoch.elapsed().as_micros() as u64;
        self.answered_us.store(now, Ordering::Relaxed);
        self.called.store(false, Ordering::Release);
        // Pairs with the acquire in `call_and_wait`: what was purged is uncharged.
        self.answers.fetch_add(1, Ordering::Release);
    }
}
