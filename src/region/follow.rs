//! Where a filler runs: on the processor of the thread whose faults it serves.
//!
//! Waking a thread on another processor costs more than everything a fault needs otherwise
//! (10-17 us against 3-7 on the same one, measured here). While the faults come from one thread
//! and one at a time, the filler therefore follows that thread and gives way to it
//! ([`lease`](super::lease)): the thread sleeps while the filler works, so they never want the
//! processor at the same time. When faults overlap there is work for two processors, and the
//! filler runs where the scheduler puts it.

use super::lease::{Leases, Standing};
use crate::sys::thread;
use std::time::{Duration, Instant};

/// Lonely faults in a row after which a thread is followed.
const STREAK: u32 = 16;
/// Slowest streak that is worth it: a thread that faults less often does not notice.
const STREAK_TIME_MAX: Duration = Duration::from_millis(8);
/// What a fault of another kind takes from the score; at zero the thread is not followed any more.
const DISTURBANCE: u32 = 4;
/// Faults for which nobody is followed after a refusal.
const HOLD_OFF: u32 = 64;
/// Times that the filler had to be woken after which it looks where its thread runs now: a thread
/// on the same processor needs to wake it rarely.
const LOOK_MIN: u32 = 2;
const LOOK_MAX: u32 = 64;

/// A fault, as far as it says where to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    pub(super) thread: u32,
    /// Nothing else is being served.
    pub(super) lonely: bool,
    /// The filler slept and was woken for it.
    pub(super) slept: bool,
}

/// Which thread a filler follows.
#[derive(Debug)]
pub(super) struct Follow {
    filler: usize,
    thread: u32,
    score: u32,
    /// Faults of the thread until its pace is looked at, and since when.
    until_pace: u32,
    since: Instant,
    /// The processor the filler is bound to.
    bound: Option<u32>,
    slept: u32,
    look_after: u32,
    hold_off: u32,
}

impl Follow {
    pub(super) fn new(filler: usize) -> Follow {
        Follow {
            filler,
            thread: 0,
            score: 0,
            until_pace: STREAK,
            since: Instant::now(),
            bound: None,
            slept: 0,
            look_after: LOOK_MIN,
            hold_off: 0,
        }
    }

    /// Notes a fault that the calling filler is about to serve.
    pub(super) fn fault(&mut self, seen: Seen, leases: &Leases) {
        if self.hold_off > 0 {
            self.hold_off -= 1;
            return;
        }
        if !seen.lonely || seen.thread != self.thread {
            self.score = self.score.saturating_sub(DISTURBANCE);
            if self.score == 0 {
                self.let_go(leases);
                self.start(seen.thread);
            }
            return;
        }
        self.score = (self.score + 1).min(2 * STREAK);
        match leases.of(self.filler).standing() {
            Standing::None => self.consider(leases),
            Standing::Lent if seen.slept => self.look(),
            Standing::Lent => {}
            Standing::Denied => {
                leases.of(self.filler).accept_denial();
                self.bound = None; // Unbound by the lender, if it was bound.
                self.hold_off = HOLD_OFF;
                self.let_go(leases);
                self.start(0);
            }
        }
    }

    fn start(&mut self, thread: u32) {
        self.thread = thread;
        self.score = 0;
        self.until_pace = STREAK;
        self.since = Instant::now();
    }

    /// Not following: starts to, when the faults come fast enough.
    fn consider(&mut self, leases: &Leases) {
        self.bound = None; // Whoever ended the lease unbound the filler.
        self.until_pace -= 1;
        if self.until_pace > 0 {
            return;
        }
        let fast = self.since.elapsed() < STREAK_TIME_MAX;
        self.until_pace = STREAK;
        self.since = Instant::now();
        if fast && self.bind() && leases.of(self.filler).ask() {
            leases.ring();
        }
    }

    /// Following, and woken all the same: perhaps the thread has moved.
    fn look(&mut self) {
        self.slept += 1;
        if self.slept < self.look_after {
            return;
        }
        self.slept = 0;
        let before = self.bound;
        self.bind();
        let moved = self.bound != before;
        self.look_after = if moved { LOOK_MIN } else { (self.look_after * 2).min(LOOK_MAX) };
    }

    /// Moves to the processor of the followed thread; `false`: not allowed, or it is gone.
    fn bind(&mut self) -> bool {
        let processor = thread::processor_of(self.thread);
        if processor.is_some() && processor != self.bound {
            self.bound = processor.filter(|processor| thread::run_on(*processor));
        }
        self.bound.is_some()
    }

    fn let_go(&mut self, leases: &Leases) {
        if leases.of(self.filler).give_back() {
            leases.ring();
        }
        if self.bound.take().is_some() {
            thread::run_anywhere(thread::current());
        }
    }
}
