//! The idle policy: when a handler runs under `SCHED_IDLE`, and so gives way to the threads it serves.
//!
//! The kernel wakes a thread on an idle processor rather than on the one where the waker still
//! runs, so that a faulting thread flees from its handler and every fault costs two wake-ups across
//! processors. A waker under `SCHED_IDLE` counts as no load: the woken thread takes its place at
//! once, and when it faults again the handler goes on where it was, without a wake-up.
//!
//! But a handler under `SCHED_IDLE` starves when other threads want the processor, with faults
//! unanswered and locks held. So the policy is supervised: one thread, which runs
//! [`PolicySupervisor::look`], sets it when a handler requests it, and ends it when the handler has
//! not finished a turn within a [`TICK`], whatever the reason. No fault waits longer for a starving
//! handler than two of them.
//!
//! ```text
//!            handler                 supervisor
//!   Normal ---------> Requested -----------------> Idle ---> Normal   nothing to do for a tick
//!     ^                   |                         | |
//!     |                   +---> Denied <------------+ |        starved, or not allowed
//!     +---------------------------  |    handler      v
//!     ^                                           Released ---> Normal
//! ```
//! # Invariants
//! 1. Only the supervisor changes a handler's policy. It does so before it changes `Requested` to
//!    `Idle`, and after it changed `Idle` to something else, so that a handler whose state is neither
//!    `Idle` nor `Requested` takes its share of the processor, or is about to without any help.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::paging::diagnostics;
use crate::paging::fault::sched::bystanders::Bystanders;
use crate::sys::event::{EventFd, poll_readable};
use crate::sys::thread::{self, Share};
use std::time::{Duration, Instant};

/// Maximum time that a handler keeps the policy without finishing a turn.
const TICK: Duration = Duration::from_millis(1);
/// How long a handler that starved is denied the policy, doubled up to the maximum when it starves
/// again soon: a policy that was kept for 20 times what starving costs, two ticks, was worth it.
const DENIED_MIN: Duration = Duration::from_millis(2);
const DENIED_MAX: Duration = Duration::from_millis(320);
const WORTH_IT: Duration = Duration::from_millis(40);

const NORMAL: u32 = 0;
const REQUESTED: u32 = 1;
const IDLE: u32 = 2;
const RELEASED: u32 = 3;
const DENIED: u32 = 4;

/// Under which policy a handler runs, as it knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdleState {
    /// As any other thread.
    Normal,
    /// It has requested the idle policy.
    Requested,
    /// The idle policy: it gives way.
    Idle,
    /// The idle policy was refused, or ended because the handler starved.
    Denied,
}

/// One handler's policy.
#[derive(Debug, Default)]
pub(super) struct IdlePolicy {
    state: AtomicU32,
    thread: AtomicU32,
    /// Twice the turns begun, plus 1 while the handler has nothing left to do.
    beat: AtomicU64,
}

impl IdlePolicy {
    /// The calling thread is the handler.
    pub(super) fn adopt(&self) {
        self.thread.store(thread::current(), Ordering::Relaxed);
    }

    /// A turn begins.
    pub(super) fn begin_turn(&self) {
        // Relaxed: the supervisor only compares values, and this thread alone writes.
        let turn = (self.beat.load(Ordering::Relaxed) & !1) + 2;
        self.beat.store(turn, Ordering::Relaxed);
    }

    /// Is told if the handler has nothing more to do than it is about to finish, or to wait for.
    pub(super) fn rest(&self, resting: bool) {
        let turn = self.beat.load(Ordering::Relaxed) & !1;
        self.beat.store(turn | u64::from(resting), Ordering::Relaxed);
    }

    pub(super) fn state(&self) -> IdleState {
        match self.state.load(Ordering::Relaxed) {
            REQUESTED => IdleState::Requested,
            IDLE => IdleState::Idle,
            DENIED => IdleState::Denied,
            _ => IdleState::Normal,
        }
    }

    /// The handler knows that it was denied, and may request the policy again.
    pub(super) fn accept_denial(&self) {
        self.change(DENIED, NORMAL);
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// The policies of a region's handlers, and how to reach their supervisor.
#[derive(Debug)]
pub(in crate::paging) struct IdlePolicies {
    policies: Box<[IdlePolicy]>,
    supervisor: EventFd,
    bystanders: Bystanders,
}

impl IdlePolicies {
    /// # Errors
    /// [`Error::Os`] without a descriptor to wake the supervisor.
    pub(super) fn new(handlers: usize) -> Result<IdlePolicies> {
        let supervisor =
            EventFd::new().map_err(|errno| Error::Os { call: "eventfd", errno: errno.0 })?;
        let policies = (0..handlers).map(|_| IdlePolicy::default()).collect();
        Ok(IdlePolicies { policies, supervisor, bystanders: Bystanders::default() })
    }

    pub(super) fn of(&self, handler: usize) -> &IdlePolicy {
        &self.policies[handler]
    }

    /// The threads that are to stay out of a handler's way.
    pub(in crate::paging) fn bystanders(&self) -> &Bystanders {
        &self.bystanders
    }

    /// Requests the idle policy for a handler.
    pub(super) fn request(&self, handler: usize) {
        if self.of(handler).change(NORMAL, REQUESTED) {
            self.call_supervisor();
        }
    }

    /// Ends the idle policy of a handler, if it has it.
    pub(super) fn release(&self, handler: usize) {
        if self.of(handler).change(IDLE, RELEASED) {
            self.call_supervisor();
        }
    }

    /// Wakes the supervisor.
    pub(in crate::paging) fn call_supervisor(&self) {
        self.supervisor.signal();
    }

    /// Waits until the supervisor is called, or `timeout` has passed.
    pub(in crate::paging) fn wait_for_call(&self, timeout: Duration) {
        if poll_readable(&[self.supervisor.raw_fd()], timeout) != Ok(false) {
            self.supervisor.drain();
        }
    }
}

/// The supervisor's record of a handler.
#[derive(Clone, Copy, Debug)]
struct History {
    beat: u64,
    granted: Instant,
    denied_until: Option<Instant>,
    denied_for: Duration,
}

/// Grants and ends the idle policy; see [module](self).
#[derive(Debug)]
pub(in crate::paging) struct PolicySupervisor {
    histories: Vec<History>,
}

impl PolicySupervisor {
    /// Looks after the policies of `handlers` handlers.
    pub(in crate::paging) fn new(handlers: usize) -> PolicySupervisor {
        let granted = Instant::now();
        let history = History { beat: 0, granted, denied_until: None, denied_for: DENIED_MIN };
        PolicySupervisor { histories: vec![history; handlers] }
    }

    /// Looks at all policies; returns how long that will do. `has_faults` says whether the kernel
    /// has faults that no handler has read.
    pub(in crate::paging) fn look(
        &mut self,
        policies: &IdlePolicies,
        has_faults: impl Fn() -> bool,
    ) -> Duration {
        const LOOK: Duration = Duration::from_secs(10);
        let mut any_idle = false;
        for (policy, history) in policies.policies.iter().zip(&mut self.histories) {
            match policy.state.load(Ordering::Acquire) {
                REQUESTED => grant(policy, history),
                IDLE => check(policy, history, &has_faults),
                RELEASED => end(policy, NORMAL),
                _ => continue,
            }
            let gives_way = policy.state.load(Ordering::Relaxed) == IDLE;
            if !gives_way {
                policies.bystanders.run_anywhere();
            }
            any_idle |= gives_way;
        }
        if any_idle { TICK } else { LOOK }
    }

    /// Ends all idle policies: a handler that starves would hold up the region's end.
    pub(in crate::paging) fn end_all(&self, policies: &IdlePolicies) {
        policies.policies.iter().for_each(|policy| end(policy, NORMAL));
    }
}

fn grant(policy: &IdlePolicy, history: &mut History) {
    let denied = history.denied_until.is_some_and(|until| Instant::now() < until);
    let handler = policy.thread.load(Ordering::Relaxed);
    if denied || !thread::may_give_way() || thread::set_share(handler, Share::GivesWay).is_err() {
        policy.state.store(DENIED, Ordering::Release);
        return;
    }
    history.beat = policy.beat.load(Ordering::Relaxed);
    history.granted = Instant::now();
    policy.state.store(IDLE, Ordering::Release);
}

/// Ends the policy of a handler that did nothing since the last look.
fn check(policy: &IdlePolicy, history: &mut History, has_faults: impl Fn() -> bool) {
    let beat = policy.beat.load(Ordering::Relaxed);
    let handler = policy.thread.load(Ordering::Relaxed);
    if beat != history.beat {
        history.beat = beat;
        return;
    }
    let resting = beat & 1 != 0;
    if resting && !has_faults() {
        return end(policy, NORMAL);
    }
    // Asleep, it waits for its device: that is not for want of a processor. Where this cannot be
    // found out, a policy that ends costs speed, and a handler that starves would hang its threads.
    if !resting && thread::wants_processor(handler) == Some(false) {
        return;
    }
    let soon = history.granted.elapsed() < WORTH_IT;
    history.denied_for = if soon { (history.denied_for * 2).min(DENIED_MAX) } else { DENIED_MIN };
    history.denied_until = Some(Instant::now() + history.denied_for);
    end(policy, DENIED);
}

/// Ends a policy: the handler takes its share again, on any processor.
fn end(policy: &IdlePolicy, then: u32) {
    let handler = policy.thread.load(Ordering::Relaxed);
    if policy.state.load(Ordering::Acquire) == NORMAL {
        return;
    }
    policy.state.store(then, Ordering::Release);
    match thread::set_share(handler, Share::Equal) {
        // A handler that has ended meanwhile needs nothing.
        Ok(()) | Err(Error::Os { errno: crate::sys::ESRCH, .. }) => {}
        Err(cause) => diagnostics::warn(
            "a handler gives way for good; faults wait when processors are busy",
            &cause,
        ),
    }
    thread::run_anywhere(handler);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A handler has the policy since `kept` ago, starves, and was denied for the maximum the last time: returns for how long now.
    fn denied_after(kept: Duration) -> Duration {
        let policies = IdlePolicies::new(1).expect("a descriptor");
        // The thread of the test, which runs, and so wants a processor.
        policies.of(0).adopt();
        policies.of(0).state.store(IDLE, Ordering::Relaxed);
        let mut supervisor = PolicySupervisor::new(1);
        let history = &mut supervisor.histories[0];
        history.granted = Instant::now().checked_sub(kept).expect("the machine runs for longer");
        history.denied_for = DENIED_MAX;
        supervisor.look(&policies, || true);
        assert_eq!(policies.of(0).state(), IdleState::Denied);
        supervisor.histories[0].denied_for
    }

    #[test]
    fn a_handler_that_starves_is_denied_for_long_only_where_it_had_the_policy_briefly() {
        assert_eq!(denied_after(Duration::from_millis(500)), DENIED_MIN);
        assert_eq!(denied_after(Duration::ZERO), DENIED_MAX);
    }
}
