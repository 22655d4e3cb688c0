//! Polling: how long a filler looks for the device's answer before it sleeps.
//!
//! A processor that has nothing to do halts, and it takes longer to wake it than to serve a fault,
//! most of all where it is virtual. So a filler looks as long as the device usually takes, if that
//! is short. One that gives way ([`lease`](super::lease)) takes nothing from anybody meanwhile:
//! whoever wants the processor gets it at once. Any other offers the processor between two looks
//! (`sched_yield(2)`): the threads that it serves run, fault and leave it again. Where somebody
//! keeps it for long, the filler would wait for its turn with an answer in the ring, while one
//! that sleeps is preferred when it wakes; so it sleeps for some time.

use crate::store::{Polled, Polling};
use std::time::{Duration, Instant};

/// Part of a new answer in the usual time: one in this many.
const WEIGHT: u32 = 8;
/// Longer answers count as this long: after a hiccup polling comes back within some 50 answers.
const ANSWER_MAX: Duration = Duration::from_millis(10);
/// An offered processor that comes back later than this has gone to somebody who computes.
const LATE: Duration = Duration::from_micros(100);
/// For so many times as long it is not offered again: late returns take this part of the time.
const LATE_PART: u32 = 64;

/// What is known about the device's answers, and about who wants the processor.
#[derive(Debug)]
pub(super) struct Patience {
    usual: Duration,
    longest: Duration,
    /// Nothing is offered until then.
    offers_from: Instant,
}

impl Patience {
    /// Looks for `longest` at most.
    pub(super) fn new(longest: Duration) -> Patience {
        Patience { usual: Duration::ZERO, longest, offers_from: Instant::now() }
    }

    /// The device has answered a request.
    pub(super) fn answered(&mut self, after: Duration) {
        self.usual = self.usual * (WEIGHT - 1) / WEIGHT + after.min(ANSWER_MAX) / WEIGHT;
    }

    /// What looking came to, until `now`.
    pub(super) fn learn(&mut self, polled: Polled, now: Instant) {
        if polled.yield_max > LATE {
            self.offers_from = now + polled.yield_max * LATE_PART;
        }
    }

    /// How to look from `now` on; not at all when answers usually take too long.
    pub(super) fn polling(&self, gives_way: bool, now: Instant) -> Polling {
        let alone = gives_way || now >= self.offers_from;
        let time = if self.usual <= self.longest && alone { self.longest } else { Duration::ZERO };
        Polling { time, yields: !gives_way }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_micros(200);

    #[test]
    fn a_quick_device_is_looked_at_and_a_slow_one_is_not() {
        let (quick, slow) = (Duration::from_micros(60), Duration::from_millis(4));
        let now = Instant::now();
        let mut patience = Patience::new(LONGEST);
        let time = |patience: &Patience| patience.polling(true, now).time;
        (0..100).for_each(|_| patience.answered(quick));
        assert_eq!(time(&patience), LONGEST);
        (0..8).for_each(|_| patience.answered(slow));
        assert_eq!(time(&patience), Duration::ZERO);
        (0..100).for_each(|_| patience.answered(quick));
        assert_eq!(time(&patience), LONGEST);
    }

    #[test]
    fn zero_never_polls() {
        let mut patience = Patience::new(Duration::ZERO);
        patience.answered(Duration::from_micros(1));
        assert_eq!(patience.polling(true, Instant::now()).time, Duration::ZERO);
    }

    #[test]
    fn a_processor_that_came_back_late_is_not_offered_for_a_while() {
        let mut patience = Patience::new(LONGEST);
        let now = Instant::now();
        let returned = |yield_max| Polled { yield_max, ..Polled::default() };
        let offers = |patience: &Patience, at| !patience.polling(false, at).time.is_zero();
        patience.learn(returned(LATE), now);
        assert!(offers(&patience, now) && patience.polling(false, now).yields);
        patience.learn(returned(2 * LATE), now);
        assert!(!offers(&patience, now), "it sleeps");
        assert_eq!(patience.polling(true, now), Polling { time: LONGEST, yields: false });
        assert!(offers(&patience, now + 2 * LATE * LATE_PART));
    }
}
