//! Polling: how long a filler looks for the device's answer before it sleeps.
//!
//! A processor that has nothing to do halts, and it takes longer to wake it than to serve a fault,
//! most of all where it is virtual. A filler that gives way ([`lease`](super::lease)) takes nothing
//! from anybody while it looks: whoever wants the processor gets it at once. So it looks as long
//! as the device usually takes, if that is short.

use std::time::Duration;

/// Part of a new answer in the usual time: one in this many.
const WEIGHT: u32 = 8;
/// Longer answers count as this long: after a hiccup polling comes back within some 50 answers.
const ANSWER_MAX: Duration = Duration::from_millis(10);

/// What is known about the device's answers.
#[derive(Debug)]
pub(super) struct Polling {
    usual: Duration,
    longest: Duration,
}

impl Polling {
    /// Polls for `longest` at most.
    pub(super) fn new(longest: Duration) -> Polling {
        Polling { usual: Duration::ZERO, longest }
    }

    /// The device has answered a request.
    pub(super) fn answered(&mut self, after: Duration) {
        self.usual = self.usual * (WEIGHT - 1) / WEIGHT + after.min(ANSWER_MAX) / WEIGHT;
    }

    /// How long to look for an answer: zero when it usually takes too long.
    pub(super) fn time(&self) -> Duration {
        if self.usual <= self.longest { self.longest } else { Duration::ZERO }
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
