//! Deadlines of a process that may be stopped.
//!
//! A process that is stopped (`SIGSTOP`, a frozen control group, a debugger, a suspended machine)
//! finds by the clock that every deadline has passed, although nobody had a chance to do anything
//! meanwhile. So what counts is not the time that has passed but the steps in which the waiting
//! thread has looked, and a step counts for no more than [`step_max`]: a stop of any length is one
//! step. And nobody gives up at the look that finds the time over, but at the next one, after
//! looking once more for what was waited for.
//!
//! ```text
//!   clock     |----|----|----|========= stopped =========|----|----|
//!   counted   |----|----|----|--------|----|----|
//!                                     ^ one step
//! ```
//! A waiting thread has to look more often than once in [`step_max`]; otherwise it waits longer than
//! was asked for.

use std::time::{Duration, Instant};

/// Time that one step counts for at most, whatever the limit is: far more than a busy machine keeps a
/// thread waiting for a processor.
const STEP_MAX: Duration = Duration::from_secs(1);

/// Steps that a time limit has at least.
const STEPS_MIN: u32 = 4;

/// Time that one step counts for under a limit.
fn step_max(limit: Duration) -> Duration {
    (limit / STEPS_MIN).clamp(Duration::from_nanos(1), STEP_MAX)
}

/// How often a thread that waits under a limit has to look.
pub(crate) fn look_every(limit: Duration) -> Duration {
    const LEAST: Duration = Duration::from_micros(100);
    (step_max(limit) / 2).max(LEAST)
}

/// The time that a thread has waited, as it has looked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    last: Instant,
    counted: Duration,
    step_max: Duration,
}

impl Stopwatch {
    /// Starts one, at zero, for time limits of `limit` or longer.
    pub(crate) fn start(limit: Duration, now: Instant) -> Stopwatch {
        Stopwatch { last: now, counted: Duration::ZERO, step_max: step_max(limit) }
    }

    /// Looks; returns what has been counted.
    pub(crate) fn look(&mut self, now: Instant) -> Duration {
        let step = now.saturating_duration_since(self.last);
        self.last = now.max(self.last);
        self.counted += step.min(self.step_max);
        self.counted
    }
}

/// One wait under a time limit by somebody's stopwatch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Term {
    since: Duration,
    was_over: bool,
}

impl Term {
    /// One that begins at what a stopwatch shows.
    pub(crate) const fn start(shown: Duration) -> Term {
        Term { since: shown, was_over: false }
    }

    /// The time since it began.
    pub(crate) fn age(&self, shown: Duration) -> Duration {
        shown.saturating_sub(self.since)
    }

    /// True if it is over, and was at the look before. Between the two the caller has looked for
    /// what it waits for.
    pub(crate) fn is_over(&mut self, shown: Duration, limit: Duration) -> bool {
        let is_over = self.age(shown) >= limit;
        std::mem::replace(&mut self.was_over, is_over) && is_over
    }
}

/// A wait of one thread: a stopwatch and its only term.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    watch: Stopwatch,
    term: Term,
    limit: Duration,
}

impl Deadline {
    /// A wait for at most `limit` that begins now.
    pub(crate) fn new(limit: Duration) -> Deadline {
        Deadline::new_at(limit, Instant::now())
    }

    pub(crate) fn new_at(limit: Duration, now: Instant) -> Deadline {
        let watch = Stopwatch::start(limit, now);
        Deadline { watch, term: Term::start(Duration::ZERO), limit }
    }

    /// Looks; tells whether to give up. The caller has looked for what it waits for just before.
    pub(crate) fn is_over(&mut self) -> bool {
        self.is_over_at(Instant::now())
    }

    pub(crate) fn is_over_at(&mut self, now: Instant) -> bool {
        self.term.is_over(self.watch.look(now), self.limit)
    }

    /// Begins anew: there was progress.
    pub(crate) fn restart(&mut self) {
        *self = Deadline::new(self.limit);
    }

    /// The time that has been counted, up to the last look.
    pub(crate) fn waited(&self) -> Duration {
        self.term.age(self.watch.counted)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);
    const HOUR: Duration = Duration::from_secs(3600);

    /// Looks every `pause` until the wait is over; returns when that was.
    fn play(deadline: &mut Deadline, from: Instant, pause: Duration) -> Duration {
        let mut now = from;
        while !deadline.is_over_at(now) {
            now += pause;
        }
        now - from
    }

    #[test]
    fn time_in_which_the_thread_runs_counts_in_full() {
        let start = Instant::now();
        let pause = look_every(LIMIT);
        let took = play(&mut Deadline::new_at(LIMIT, start), start, pause);
        assert!((LIMIT..=LIMIT + 2 * pause).contains(&took), "{took:?}");
    }

    #[test]
    fn a_stop_of_any_length_counts_as_one_step() {
        let start = Instant::now();
        let mut deadline = Deadline::new_at(LIMIT, start);
        assert!(!deadline.is_over_at(start + HOUR) && !deadline.is_over_at(start + HOUR));
        assert_eq!(deadline.waited(), LIMIT / STEPS_MIN);
        // The longest limits too: a second of a day.
        let mut long = Deadline::new_at(24 * HOUR, start);
        assert!(!long.is_over_at(start + 48 * HOUR));
        assert_eq!(long.waited(), STEP_MAX);
    }

    #[test]
    fn nobody_gives_up_without_looking_once_more() {
        let start = Instant::now();
        let pause = look_every(LIMIT);
        let mut deadline = Deadline::new_at(LIMIT, start);
        let mut now = start;
        while deadline.waited() + pause < LIMIT {
            now += pause;
            assert!(!deadline.is_over_at(now));
        }
        // The step that passes the limit was spent stopped.
        assert!(!deadline.is_over_at(now + HOUR), "not at the first look after a stop");
        assert!(deadline.is_over_at(now + HOUR), "at the second");
    }

    #[test]
    fn a_limit_of_nothing_still_looks_twice() {
        let start = Instant::now();
        for limit in [Duration::ZERO, Duration::from_nanos(3)] {
            let mut deadline = Deadline::new_at(limit, start);
            let looks = (1..100).map(|n| start + Duration::from_nanos(n));
            let over = looks.filter(|now| deadline.is_over_at(*now)).count();
            assert!((90..99).contains(&over), "{over} of 99 looks at {limit:?}");
        }
    }

    #[test]
    fn waits_by_one_stopwatch_end_each_at_its_own_time() {
        let start = Instant::now();
        let mut watch = Stopwatch::start(LIMIT, start);
        let mut early = Term::start(watch.look(start));
        let half = start + LIMIT / STEPS_MIN;
        let mut late = Term::start(watch.look(half));
        let shown = (1..=3).map(|n| watch.look(half + n * LIMIT / STEPS_MIN)).last();
        let shown = shown.expect("three looks");
        assert!(!early.is_over(shown, LIMIT) && early.is_over(shown, LIMIT));
        assert!(!late.is_over(shown, LIMIT) && !late.is_over(shown, LIMIT));
    }

    #[test]
    fn a_clock_that_jumps_back_counts_nothing() {
        let start = Instant::now() + HOUR;
        let mut watch = Stopwatch::start(LIMIT, start);
        assert_eq!(watch.look(start - HOUR), Duration::ZERO);
        assert_eq!(watch.look(start), Duration::ZERO);
    }
}
