//! Busy polling: how long a handler looks for the device's answer before it sleeps.
//!
//! A processor that has nothing to do halts, and it takes longer to wake it than to serve a fault,
//! most of all where it is virtual. So a handler looks as long as the device usually takes, if that
//! is short. A handler under the idle policy (`idle_policy`) takes nothing from other threads
//! meanwhile: one that wants the processor gets it at once. Any other handler offers the processor
//! between two looks (`sched_yield(2)`): the threads that it serves run, fault and leave it again.
//! Where another thread keeps the processor for long, the handler would wait for its turn with an
//! answer in the ring, while one that sleeps is preferred when it wakes; so it sleeps for some time.

use crate::base::error::Result;
use crate::paging::counters::Counters;
use std::time::{Duration, Instant};

/// A new answer is 1/WEIGHT of the usual time.
const WEIGHT: u32 = 8;
/// Longer answers count as this long: after a hiccup polling comes back within some 50 answers.
const ANSWER_MAX: Duration = Duration::from_millis(10);
/// An offered processor that comes back later than this has gone to a thread that computes.
const LATE: Duration = Duration::from_micros(100);
/// The processor is not offered again for this many times as long: late returns take 1/LATE_PART
/// of the time.
const LATE_PART: u32 = 64;
/// How a handler looks for news before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) struct Polling {
    /// For how long; zero: not at all.
    time: Duration,
    /// True if it offers the processor to other threads between two looks.
    yields: bool,
}

impl Polling {
    /// Not at all.
    pub(in crate::paging) const NOT: Polling = Polling { time: Duration::ZERO, yields: false };

    /// Waits by `wait`, which takes a time-out and returns whether there was news: for `timeout` at most, first
    /// without sleeping.
    ///
    /// # Errors
    /// As `wait`.
    pub(in crate::paging) fn wait(
        self,
        timeout: Duration,
        mut wait: impl FnMut(Duration) -> Result<bool>,
    ) -> Result<Polled> {
        let time = self.time.min(timeout);
        let mut polled = Polled::default();
        if !time.is_zero() {
            self.look(time, &mut polled, || wait(Duration::ZERO))?;
        }
        if !polled.is_hit {
            wait(timeout.saturating_sub(time))?;
        }
        Ok(polled)
    }

    fn look(
        self,
        time: Duration,
        polled: &mut Polled,
        mut look: impl FnMut() -> Result<bool>,
    ) -> Result<()> {
        polled.has_looked = true;
        let mut now = Instant::now();
        let until = now + time;
        loop {
            polled.is_hit = look()?;
            if polled.is_hit || now >= until {
                return Ok(());
            }
            let offered = now;
            if self.yields {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
            now = Instant::now();
            if self.yields {
                polled.yields += 1;
                polled.yield_max = polled.yield_max.max(now - offered);
            }
        }
    }
}

/// Result of looking before sleeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::paging) struct Polled {
    has_looked: bool,
    /// There was news.
    is_hit: bool,
    /// Times the processor was offered to others.
    yields: u32,
    /// The longest time until an offered processor came back.
    yield_max: Duration,
}

impl Polled {
    pub(in crate::paging) fn count(self, counters: &Counters) {
        if self.has_looked {
            counters.polls.add(1);
            counters.poll_hits.add(self.is_hit.into());
            counters.poll_yields.add(self.yields.into());
        }
    }
}

/// Estimates of the device's time, and of the demand for the processor.
#[derive(Debug)]
pub(super) struct BusyPoll {
    usual: Duration,
    longest: Duration,
    /// Nothing is offered until then.
    offers_from: Instant,
}

impl BusyPoll {
    /// Looks for `longest` at most.
    pub(super) fn new(longest: Duration) -> BusyPoll {
        BusyPoll { usual: Duration::ZERO, longest, offers_from: Instant::now() }
    }

    /// The device has answered a request.
    pub(super) fn answered(&mut self, after: Duration) {
        self.usual = self.usual * (WEIGHT - 1) / WEIGHT + after.min(ANSWER_MAX) / WEIGHT;
    }

    /// Result of looking, until `now`.
    pub(super) fn looked(&mut self, polled: Polled, now: Instant) {
        if polled.yield_max > LATE {
            self.offers_from = now + polled.yield_max * LATE_PART;
        }
    }

    /// How to look from `now` on; not at all when answers usually take too long.
    pub(super) fn plan(&self, gives_way: bool, now: Instant) -> Polling {
        let alone = gives_way || now >= self.offers_from;
        let helps = self.usual <= self.longest;
        let time = if helps && alone { self.longest } else { Duration::ZERO };
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
        let mut poll = BusyPoll::new(LONGEST);
        let time = |poll: &BusyPoll| poll.plan(true, now).time;
        (0..100).for_each(|_| poll.answered(quick));
        assert_eq!(time(&poll), LONGEST);
        (0..8).for_each(|_| poll.answered(slow));
        assert_eq!(time(&poll), Duration::ZERO);
        (0..100).for_each(|_| poll.answered(quick));
        assert_eq!(time(&poll), LONGEST);
    }

    #[test]
    fn zero_never_polls() {
        let mut poll = BusyPoll::new(Duration::ZERO);
        poll.answered(Duration::from_micros(1));
        assert_eq!(poll.plan(true, Instant::now()).time, Duration::ZERO);
    }

    #[test]
    fn a_processor_that_came_back_late_is_not_offered_for_a_while() {
        let mut poll = BusyPoll::new(LONGEST);
        let now = Instant::now();
        let returned = |yield_max| Polled { yield_max, ..Polled::default() };
        let offers = |poll: &BusyPoll, at| !poll.plan(false, at).time.is_zero();
        poll.looked(returned(LATE), now);
        assert!(offers(&poll, now) && poll.plan(false, now).yields);
        poll.looked(returned(2 * LATE), now);
        assert!(!offers(&poll, now), "it sleeps");
        assert_eq!(poll.plan(true, now), Polling { time: LONGEST, yields: false });
        assert!(offers(&poll, now + 2 * LATE * LATE_PART));
    }
}
