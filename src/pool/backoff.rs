//! Waiting for a latch: spin, then yield, then sleep.

use crate::base::deadline::Deadline;
use std::time::Duration;

/// Attempts before the thread gives up its time slice: most latches are held for less than that.
const SPINS_MAX: u32 = 32;

/// Time slices given up before the thread sleeps.
const YIELDS_MAX: u32 = 64;

/// One sleep. Latches are one word: there is no queue to wait in.
const NAP: Duration = Duration::from_micros(50);

/// One wait for a latch.
pub(super) struct Backoff {
    turns: u32,
    /// Begins when spinning did not help: reading the clock costs as much as a whole spin.
    deadline: Option<Deadline>,
    limit: Duration,
}

impl Backoff {
    pub(super) fn new(limit: Duration) -> Backoff {
        Backoff { turns: 0, deadline: None, limit }
    }

    /// Waits a little; `false` when the deadline had passed before the caller looked at the latch.
    pub(super) fn wait(&mut self) -> bool {
        self.turns += 1;
        if self.turns <= SPINS_MAX {
            std::hint::spin_loop();
            return true;
        }
        let deadline = self.deadline.get_or_insert_with(|| Deadline::new(self.limit));
        if self.turns <= SPINS_MAX + YIELDS_MAX {
            std::thread::yield_now();
        } else {
            std::thread::sleep(NAP);
        }
        !deadline.is_over()
    }

    /// Waits until `get` returns something; `None` when the deadline passed first.
    pub(super) fn until<T>(&mut self, mut get: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let got = get();
            if got.is_some() || !self.wait() {
                return got;
            }
        }
    }

    pub(super) fn waited(&self) -> Duration {
        self.deadline.map(|deadline| deadline.waited()).unwrap_or_default()
    }
}
