//! Affinity: a handler runs on the processor of the thread whose faults it serves.
//!
//! Waking a thread on another processor costs more than everything a fault needs otherwise
//! (10-17 us against 3-7 on the same one, measured here). While the faults come from one thread
//! and one at a time, the handler therefore follows that thread and gives way to it
//! (`idle_policy`): the thread sleeps while the handler works, so they never want the processor at
//! the same time. When several threads fault, there is work for all processors: the handlers run where the
//! scheduler puts them, and the helpers serve faults as well.
//!
//! The kernel wakes all threads that wait for faults, for each fault: a second handler that has
//! nothing to do costs a thread that faults alone more than its own handler does. So the first
//! handler serves all faults, follows threads, and alone activates the others.

use crate::paging::fault::sched::bystanders::Bystanders;
use crate::paging::fault::sched::idle_policy::IdleState;
use crate::paging::fault::sched::shared::HandlerSched;
use crate::sys::thread;
use std::time::{Duration, Instant};

/// Faults of one thread in a row, each alone, after which the thread is followed.
const STREAK: u32 = 16;
/// Slowest streak that is worth it: a thread that faults less often does not notice.
const STREAK_TIME_MAX: Duration = Duration::from_millis(8);
/// Points that a fault of another kind takes from the score; at zero the thread is not followed any more.
const DISTURBANCE: u32 = 4;
/// Faults for which no thread is followed after a denial, doubled with each that comes at once.
const HOLD_OFF: u32 = 16;
const DENIALS_MAX: u32 = 4;
/// Times that the handler had to be woken after which it looks where its thread runs now: a thread
/// on the same processor needs to wake it rarely.
const LOOK_MIN: u32 = 2;
const LOOK_MAX: u32 = 64;
/// After this many faults without a dominant thread, all handlers are activated.
const UNFOLLOWED_MAX: u32 = 256;

/// A fault that has arrived, as far as it says where to run.
#[derive(Clone, Copy, Debug)]
pub(super) struct FaultArrival {
    pub(super) thread: u32,
    /// Nothing else is being served.
    pub(super) is_alone: bool,
    /// The handler slept and was woken for it.
    pub(super) woke_handler: bool,
}

/// No thread: no thread has this id.
const NO_THREAD: u32 = 0;

/// How fast a thread faults.
#[derive(Debug)]
struct FaultPace {
    /// Faults of the thread until its pace is looked at, and since when.
    faults_left: u32,
    since: Instant,
}

impl FaultPace {
    fn start() -> FaultPace {
        FaultPace { faults_left: STREAK, since: Instant::now() }
    }

    /// Counts a fault. Returns whether it ends a streak that was fast enough to follow its thread.
    fn ends_fast_streak(&mut self) -> bool {
        self.faults_left = self.faults_left.saturating_sub(1);
        if self.faults_left > 0 {
            return false;
        }
        let is_fast = self.since.elapsed() < STREAK_TIME_MAX;
        *self = FaultPace::start();
        is_fast
    }
}

/// The processor that the handler is bound to, where it is that of the followed thread.
#[derive(Debug)]
struct Binding {
    /// The calling handler runs there only, unless the supervisor has unbound it.
    processor: Option<u32>,
    /// Times that the handler was woken since it looked where its thread runs, and after how many it
    /// looks again.
    wakes: u32,
    look_after: u32,
}

impl Binding {
    const NONE: Binding = Binding { processor: None, wakes: 0, look_after: LOOK_MIN };

    /// Moves to the processor of a thread; `false`: not allowed, or it is gone.
    fn bind(&mut self, to: u32, bystanders: &Bystanders) -> bool {
        let Some(processor) = thread::processor_of(to) else { return self.processor.is_some() };
        if self.processor != Some(processor) {
            // Before it moves: one may run there now, and would go on until it is done, with the handler behind it.
            bystanders.keep_off(processor);
            self.processor = thread::run_on(processor).then_some(processor);
            if self.processor.is_none() {
                bystanders.run_anywhere();
            }
        }
        self.processor.is_some()
    }

    /// The followed thread had to wake the handler all the same: perhaps it has moved.
    fn woken_by(&mut self, followed: u32, bystanders: &Bystanders) {
        self.wakes += 1;
        if self.wakes < self.look_after {
            return;
        }
        self.wakes = 0;
        let before = self.processor;
        self.bind(followed, bystanders);
        let has_moved = self.processor != before;
        self.look_after = if has_moved { LOOK_MIN } else { (self.look_after * 2).min(LOOK_MAX) };
    }

    /// Lets the handler and those that it kept off run anywhere, if it was bound: each call of the kernel counts here,
    /// where several threads fault in turns.
    fn unbind(&mut self, bystanders: &Bystanders) {
        if self.processor.take().is_some() {
            bystanders.run_anywhere();
            thread::run_anywhere(thread::current());
        }
    }
}

/// Faults for which no thread is followed, because following was denied.
#[derive(Debug, Default)]
struct HoldOff {
    faults_left: u32,
    denials: u32,
}

impl HoldOff {
    /// Counts a fault; returns whether it is one for which no thread is followed.
    fn takes_fault(&mut self) -> bool {
        let is_held = self.faults_left > 0;
        self.faults_left -= u32::from(is_held);
        is_held
    }

    /// Following was denied: the more often in a row, the more faults go by before the next try.
    fn note_denied(&mut self) {
        self.faults_left = HOLD_OFF << self.denials;
        self.denials = (self.denials + 1).min(DENIALS_MAX);
    }

    /// Following was granted: denials from now on count anew.
    fn note_granted(&mut self) {
        self.denials = 0;
    }
}

/// Which thread a handler follows.
#[derive(Debug)]
pub(super) struct Affinity {
    handler: usize,
    thread: u32,
    unfollowed: u32,
    score: u32,
    pace: FaultPace,
    binding: Binding,
    hold_off: HoldOff,
}

impl Affinity {
    pub(super) fn new(handler: usize) -> Affinity {
        Affinity {
            handler,
            thread: NO_THREAD,
            unfollowed: 0,
            score: 0,
            pace: FaultPace::start(),
            binding: Binding::NONE,
            hold_off: HoldOff::default(),
        }
    }

    /// Notes a fault that the calling handler is about to serve. Returns whether to wake the helpers.
    pub(super) fn fault(&mut self, arrival: FaultArrival, sched: &HandlerSched) -> bool {
        if self.handler != 0 {
            return false;
        }
        if self.needs_helpers(arrival, sched) && sched.activate_helpers() {
            return true;
        }
        if self.hold_off.takes_fault() {
            return false;
        }
        if arrival.thread == self.thread && arrival.is_alone {
            self.own_fault(arrival, sched);
        } else {
            self.score = self.score.saturating_sub(DISTURBANCE);
            if self.score == 0 {
                self.unbind(sched);
                self.start(arrival.thread);
            }
        }
        false
    }

    /// True if many faults lately were of several threads.
    fn needs_helpers(&mut self, arrival: FaultArrival, sched: &HandlerSched) -> bool {
        if arrival.is_alone && arrival.thread == self.thread {
            self.unfollowed = self.unfollowed.saturating_sub(DISTURBANCE);
            if self.unfollowed == 0 {
                sched.deactivate_helpers();
            }
            return false;
        }
        self.unfollowed = (self.unfollowed + 1).min(UNFOLLOWED_MAX);
        self.unfollowed == UNFOLLOWED_MAX
    }

    /// A fault of the followed thread.
    fn own_fault(&mut self, arrival: FaultArrival, sched: &HandlerSched) {
        self.score = (self.score + 1).min(2 * STREAK);
        match sched.idle_policies.of(self.handler).state() {
            IdleState::Normal => self.consider_following(sched),
            IdleState::Requested => {}
            IdleState::Idle => {
                self.hold_off.note_granted();
                if arrival.woke_handler {
                    self.binding.woken_by(self.thread, sched.idle_policies.bystanders());
                }
            }
            IdleState::Denied => {
                sched.idle_policies.of(self.handler).accept_denial();
                self.hold_off.note_denied();
                self.unbind(sched);
                // Still the thread that faults alone: other handlers would only be woken for nothing.
                self.start(self.thread);
            }
        }
    }

    fn start(&mut self, thread: u32) {
        self.thread = thread;
        self.score = 0;
        self.pace = FaultPace::start();
    }

    /// Not following: starts to, when the faults come fast enough.
    fn consider_following(&mut self, sched: &HandlerSched) {
        // The supervisor did so when it ended the idle policy, perhaps before the handler had moved.
        self.binding.unbind(sched.idle_policies.bystanders());
        let bystanders = sched.idle_policies.bystanders();
        if self.pace.ends_fast_streak() && self.binding.bind(self.thread, bystanders) {
            sched.idle_policies.request(self.handler);
        }
    }

    fn unbind(&mut self, sched: &HandlerSched) {
        sched.idle_policies.release(self.handler);
        self.binding.unbind(sched.idle_policies.bystanders());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::paging::fault::sched::idle_policy::PolicySupervisor;

    #[test]
    fn each_denial_in_a_row_holds_off_for_twice_as_many_faults_up_to_a_maximum() {
        let mut hold_off = HoldOff::default();
        let held = |hold_off: &mut HoldOff| (0..).take_while(|_| hold_off.takes_fault()).count();
        let after_denial = |hold_off: &mut HoldOff| {
            hold_off.note_denied();
            held(hold_off)
        };
        assert_eq!(held(&mut hold_off), 0, "nothing was denied");
        let counts: Vec<usize> = (0..6).map(|_| after_denial(&mut hold_off)).collect();
        assert_eq!(counts, [16, 32, 64, 128, 256, 256]);
        hold_off.note_granted();
        assert_eq!(after_denial(&mut hold_off), 16, "anew");
    }

    #[test]
    fn a_thread_that_faults_alone_needs_no_helper_while_its_handler_may_not_give_way() {
        let sched = HandlerSched::new(2).expect("descriptors");
        let mut affinity = Affinity::new(0);
        let thread = thread::current();
        let arrival = FaultArrival { thread, is_alone: true, woke_handler: true };
        sched.idle_policies.of(0).adopt();
        for _ in 0..2 * STREAK {
            affinity.fault(arrival, &sched);
        }
        assert_eq!(sched.idle_policies.of(0).state(), IdleState::Requested);
        // It is granted where that is allowed, and ends: this thread wants the processor, and does nothing.
        let mut supervisor = PolicySupervisor::new(2);
        for _ in 0..2 {
            supervisor.look(&sched.idle_policies, || true);
        }
        assert_eq!(sched.idle_policies.of(0).state(), IdleState::Denied);
        for _ in 0..2 * UNFOLLOWED_MAX {
            assert!(!affinity.fault(arrival, &sched));
            if sched.idle_policies.of(0).state() == IdleState::Requested {
                supervisor.look(&sched.idle_policies, || true);
                supervisor.look(&sched.idle_policies, || true);
            }
        }
        assert!(!sched.is_active(1));
    }
}
