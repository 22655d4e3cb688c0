//! Polling: how long a filler looks for the device's answer before it sleeps.
//!
//! A processor that has nothing to do halts, and it takes longer to wake it than to serve a fault,
//! most of all where it is virtual. A filler that gives way ([`lease`](super::lease)) takes nothing
//! from anybody while it looks: whoever wants the processor gets it at once. So it looks as long
//! as the device usually takes, if that is short.

use crate::store::{Polled, Polling};
use std::time::{Duration, Instant};

/// Part of a new answer in the usual time: one in this many.
const WEIGHT: u32 = 8;
/// Longer answers count as this long: after a hiccup polling comes back within some 50 answers.
const ANSWER_MAX: Duration = Duration::from_millis(10);

/// A filler whose processor came back late does not offer it for so many times as long.
const LATE_COSTS: u32 = 64;
/// What is late.
const LATE: Duration = Duration::from_micros(100);

/// What is known about the device's answers.
#[derive(Debug)]
pub(super) struct Patience {
    usual: Duration,
    longest: Duration,
    /// Another thread wanted the processor for long: no offers until then.
    not_before: Instant,
    mode: u32,
}

impl Patience {
    /// Polls for `longest` at most.
    pub(super) fn new(longest: Duration) -> Patience {
        let mode = std::env::var("F_POLL").ok().and_then(|v| v.parse().ok()).unwrap_or(0);
        Patience { usual: Duration::ZERO, longest, not_before: Instant::now(), mode }
    }

    /// The device has answered a request.
    pub(super) fn answered(&mut self, after: Duration) {
        self.usual = self.usual * (WEIGHT - 1) / WEIGHT + after.min(ANSWER_MAX) / WEIGHT;
    }

    /// Learns from what looking brought.
    pub(super) fn learn(&mut self, polled: Polled) {
        if polled.yield_max > LATE && self.mode & 4 == 0 {
            self.not_before = Instant::now() + polled.yield_max * LATE_COSTS;
        }
    }

    /// How to look, by whether the filler gives way to everybody.
    pub(super) fn polling(&self, gives_way: bool) -> Polling {
        let answers = if self.usual <= self.longest { self.longest } else { Duration::ZERO };
        if gives_way {
            return Polling { answers, events: Duration::ZERO, yields: false };
        }
        if answers.is_zero() || self.mode & 1 == 0 || Instant::now() < self.not_before {
            return Polling::default();
        }
        let events = if self.mode & 2 != 0 { Duration::from_micros(30) } else { Duration::ZERO };
        Polling { answers, events, yields: true }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_quick_device_is_looked_at_and_a_slow_one_is_not() {
        let (quick, slow) = (Duration::from_micros(60), Duration::from_millis(4));
        let longest = Duration::from_micros(200);
        let mut polling = Polling::new(longest);
        (0..100).for_each(|_| polling.answered(quick));
        assert_eq!(polling.time(), longest);
        (0..8).for_each(|_| polling.answered(slow));
        assert_eq!(polling.time(), Duration::ZERO);
        (0..100).for_each(|_| polling.answered(quick));
        assert_eq!(polling.time(), longest);
    }

    #[test]
    fn zero_never_polls() {
        let mut polling = Polling::new(Duration::ZERO);
        polling.answered(Duration::from_micros(1));
        assert_eq!(polling.time(), Duration::ZERO);
    }
}
