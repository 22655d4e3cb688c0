//! When a forked child looks which of the inherited pages have become its alone.

use std::time::{Duration, Instant};

/// When the child looks for the first time whether pages have become its alone: one that only starts a program is
/// gone by then.
const LOOK_FIRST: Duration = Duration::from_millis(10);
/// ... and from then on, while it or its parent has faults: each page that the parent takes out or writes meanwhile is
/// a copy that the child has. With 10 ms, and 1/20 of the time, redis and its child had 0.09 of the limit more.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(5);
/// ... where neither the child nor its parent has had a fault.
const LOOK_IDLE_MAX: Duration = Duration::from_millis(100);
/// How often it looks at least.
pub(super) const LOOK_EVERY_MAX: Duration = Duration::from_secs(1);
/// A look may take 1/LOOK_PART of the time.
const LOOK_PART: u32 = 10;

/// When the thread looks whether pages have become the child's alone: more often while parent and child
/// have faults, and never for more than 1/[`LOOK_PART`] of the time.
pub(super) struct RescanTimer {
    at: Instant,
    every: Duration,
    /// When all pages were looked at last, and how many faults parent and child had had by then.
    last: Option<Instant>,
    faults: u64,
}

impl RescanTimer {
    pub(super) fn new() -> RescanTimer {
        let at = Instant::now() + LOOK_FIRST;
        RescanTimer { at, every: LOOK_EVERY_MIN, last: None, faults: 0 }
    }

    /// When the next look is.
    pub(super) fn next(&self) -> Instant {
        self.at
    }

    /// True if there was none yet.
    pub(super) fn is_first(&self) -> bool {
        self.last.is_none()
    }

    /// True if all pages are to be looked at; `faults` are those of parent and child until now.
    pub(super) fn is_due(&mut self, now: Instant, faults: u64) -> bool {
        let is_quiet = faults == std::mem::replace(&mut self.faults, faults);
        self.every = if is_quiet { LOOK_IDLE_MAX.min(self.every * 2) } else { LOOK_EVERY_MIN };
        !is_quiet || self.last.is_none_or(|last| now - last >= LOOK_EVERY_MAX)
    }

    /// All pages were looked at, from `began` until now.
    pub(super) fn note_look(&mut self, began: Instant) {
        self.last = Some(began);
        self.every = self.every.max(began.elapsed() * LOOK_PART);
    }

    pub(super) fn plan_next(&mut self) {
        self.at = Instant::now() + self.every;
    }
}
