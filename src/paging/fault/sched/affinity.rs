//! Where a handler runs: on the processor of the thread whose faults it serves.
//!
//! Waking a thread on another processor costs more than everything a fault needs otherwise
//! (10-17 us against 3-7 on the same one, measured here). While the faults come from one thread
//! and one at a time, the handler therefore follows that thread and gives way to it
//! ([`lease`](crate::paging::fault::sched::idle_policy)): the thread sleeps while the handler works, so they never want the
//! processor at the same time. Two threads that fault in turn get a handler each, where the store
//! answers at once ([`team`](crate::paging::fault::sched::active_set)). When more do, there is work for all processors, and
//! the handler runs where the scheduler puts it.

use crate::paging::fault::sched::active_set::{ANYBODY, NOBODY, Pair, Team};
use crate::paging::fault::sched::idle_policy::{Leases, Standing};
use crate::sys::thread;
use std::time::{Duration, Instant};

/// Lonely faults in a row after which a thread is followed.
const STREAK: u32 = 16;
/// Slowest streak that is worth it: a thread that faults less often does not notice.
const STREAK_TIME_MAX: Duration = Duration::from_millis(8);
/// What a fault of another kind takes from the score; at zero the thread is not followed any more.
const DISTURBANCE: u32 = 4;
/// Faults for which nobody is followed after a refusal, doubled with each that comes at once.
const HOLD_OFF: u32 = 64;
const DENIALS_MAX: u32 = 4;
/// Times that the handler had to be woken after which it looks where its thread runs now: a thread
/// on the same processor needs to wake it rarely.
const LOOK_MIN: u32 = 2;
const LOOK_MAX: u32 = 64;
/// Faults of the partner's thread, or wakes for nothing, after which a team of two breaks up.
const FOREIGN_MAX: u32 = 64;
/// Faults that nobody can be followed for after which all handlers are called.
const CROWD: u32 = 256;

/// A fault, as far as it says where to run.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Seen {
    pub(in crate::paging) thread: u32,
    /// Nothing else is being served.
    pub(in crate::paging) lonely: bool,
    /// The handler slept and was woken for it.
    pub(in crate::paging) slept: bool,
    /// The store answers before the call returns.
    pub(in crate::paging) at_once: bool,
}

/// Handlers to be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Call {
    None,
    Helper(usize),
    All,
}

/// Which thread a handler follows.
#[derive(Debug)]
pub(in crate::paging) struct Follow {
    handler: usize,
    thread: u32,
    /// The thread that the other handler follows.
    partner: u32,
    pair: Pair,
    foreign: u32,
    crowd: u32,
    score: u32,
    /// Faults of the thread until its pace is looked at, and since when.
    until_pace: u32,
    since: Instant,
    /// The processor the handler is bound to.
    bound: Option<u32>,
    slept: u32,
    look_after: u32,
    hold_off: u32,
    denials: u32,
}

impl Follow {
    pub(in crate::paging) fn new(handler: usize) -> Follow {
        Follow {
            handler,
            thread: NOBODY,
            partner: NOBODY,
            pair: Pair::default(),
            foreign: 0,
            crowd: 0,
            score: 0,
            until_pace: STREAK,
            since: Instant::now(),
            bound: None,
            slept: 0,
            look_after: LOOK_MIN,
            hold_off: 0,
            denials: 0,
        }
    }

    /// Notes a fault that the calling handler is about to serve. Says who is to be woken.
    pub(in crate::paging) fn fault(&mut self, seen: Seen, leases: &Leases, team: &Team) -> Call {
        if self.handler == 0 && self.partner != NOBODY && !seen.at_once {
            self.let_go(leases, team);
            self.start(NOBODY);
        }
        if self.partner != NOBODY && seen.thread == self.partner {
            self.foreign(leases, team);
            return Call::None;
        }
        let call = self.call(seen, leases, team);
        if call != Call::None {
            return call;
        }
        if self.hold_off > 0 {
            self.hold_off -= 1;
            return Call::None;
        }
        if seen.thread == self.thread && (seen.lonely || self.partner != NOBODY) {
            self.own_fault(seen, leases, team);
        } else {
            self.score = self.score.saturating_sub(DISTURBANCE);
            if self.score == 0 {
                self.let_go(leases, team);
                self.start(seen.thread);
            }
        }
        Call::None
    }

    /// Whom the first handler needs.
    fn call(&mut self, seen: Seen, leases: &Leases, team: &Team) -> Call {
        if self.handler != 0 || self.partner != NOBODY || !team.has_helpers() {
            return Call::None;
        }
        if let Some(threads) = self.pair.note(seen.thread)
            && self.hold_off == 0
            && seen.at_once
            && let Some(helper) = self.share_out(threads, leases, team)
        {
            return Call::Helper(helper);
        }
        if seen.lonely && seen.thread == self.thread {
            self.crowd = self.crowd.saturating_sub(DISTURBANCE);
            if self.crowd == 0 && team.duty(1) == ANYBODY {
                team.dismiss();
            }
            return Call::None;
        }
        self.crowd = (self.crowd + 1).min(CROWD);
        if self.crowd == CROWD && team.call_all() { Call::All } else { Call::None }
    }

    /// The handler was woken and found nothing to do.
    pub(in crate::paging) fn woken_for_nothing(&mut self, leases: &Leases, team: &Team) {
        if self.partner != NOBODY {
            self.foreign(leases, team);
        }
    }

    /// Takes up what a helper was called in for, or ends it.
    pub(in crate::paging) fn report_for_duty(&mut self, leases: &Leases, team: &Team) {
        let duty = team.duty(self.handler);
        if self.handler == 0 {
            if duty == NOBODY && self.partner != NOBODY {
                self.partner = NOBODY; // The helper has left.
            }
            return;
        }
        if duty == NOBODY {
            if self.thread != NOBODY {
                self.let_go(leases, team);
                self.start(NOBODY);
            }
        } else if duty == ANYBODY {
            if self.thread != NOBODY {
                self.let_go_alone(leases);
                self.start(NOBODY);
            }
        } else if duty != self.thread {
            self.follow(duty, team.duty(0), leases);
        }
    }

    /// A fault of the followed thread.
    fn own_fault(&mut self, seen: Seen, leases: &Leases, team: &Team) {
        self.foreign = 0;
        self.score = (self.score + 1).min(2 * STREAK);
        match leases.of(self.handler).standing() {
            Standing::None => self.consider(leases),
            Standing::Asked => {}
            Standing::Lent => {
                self.denials = 0;
                if seen.slept {
                    self.look();
                }
            }
            Standing::Denied => {
                leases.of(self.handler).accept_denial();
                self.bound = None; // Unbound by the lender, if it was bound.
                self.hold_off = HOLD_OFF << self.denials;
                self.denials = (self.denials + 1).min(DENIALS_MAX);
                self.let_go(leases, team);
                self.start(NOBODY);
            }
        }
    }

    /// A sign that the other handler's thread is the only one that faults.
    fn foreign(&mut self, leases: &Leases, team: &Team) {
        self.foreign += 1;
        if self.foreign > FOREIGN_MAX {
            self.let_go(leases, team);
            self.start(NOBODY);
        }
    }

    /// Two threads on two processors: a handler for each.
    fn share_out(&mut self, threads: [u32; 2], leases: &Leases, team: &Team) -> Option<usize> {
        let [one, other] = threads.map(thread::processor_of);
        if one.is_none() || other.is_none() || one == other {
            return None;
        }
        let helper = team.call_in(threads[0], threads[1])?;
        self.follow(threads[0], threads[1], leases);
        Some(helper)
    }

    fn follow(&mut self, thread: u32, partner: u32, leases: &Leases) {
        self.start(thread);
        self.partner = partner;
        self.score = 2 * STREAK;
        if self.bind() && leases.of(self.handler).ask() {
            leases.ring();
        }
    }

    fn start(&mut self, thread: u32) {
        self.thread = thread;
        self.partner = NOBODY;
        self.foreign = 0;
        self.score = 0;
        self.until_pace = STREAK;
        self.since = Instant::now();
    }

    /// Not following: starts to, when the faults come fast enough.
    fn consider(&mut self, leases: &Leases) {
        self.bound = None; // Whoever ended the lease unbound the handler.
        self.until_pace = self.until_pace.saturating_sub(1);
        if self.until_pace > 0 {
            return;
        }
        let fast = self.since.elapsed() < STREAK_TIME_MAX;
        self.until_pace = STREAK;
        self.since = Instant::now();
        if fast && self.bind() && leases.of(self.handler).ask() {
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

    fn let_go(&mut self, leases: &Leases, team: &Team) {
        if self.partner != NOBODY {
            team.dismiss();
        }
        self.let_go_alone(leases);
    }

    fn let_go_alone(&mut self, leases: &Leases) {
        if leases.of(self.handler).give_back() {
            leases.ring();
        }
        if self.bound.take().is_some() {
            thread::run_anywhere(thread::current());
        }
    }
}
