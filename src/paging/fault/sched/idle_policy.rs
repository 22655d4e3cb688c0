//! Leases: for how long a handler gives way to the threads it serves.
//!
//! The kernel wakes a thread on an idle processor rather than on the one where the waker still
//! runs, so that a faulting thread flees from its handler and every fault costs two wake-ups across
//! processors. A waker under `SCHED_IDLE` counts as no load: the woken thread takes its place at
//! once, and when it faults again the handler goes on where it was, without a wake-up.
//!
//! But a handler that gives way to everybody starves when others want the processor, with faults
//! unanswered and locks held. So the policy is lent: one thread, the [`Lender`], grants a lease
//! that a handler asks for, and takes it back when the handler has not finished a turn within a
//! [`TICK`], whatever the reason. No fault waits longer for a starving handler than two of them.
//!
//! ```text
//!          handler                    lender
//!   Free ---------> Wanted -----------------------> Held ---> Free   nothing to do for a tick
//!    ^                 |                             | |
//!    |                 +---> Denied <----------------+ |        starved, or not allowed
//!    +-----------------------  |      handler           v
//!    ^                                             Returned ---> Free
//! ```
//! # Invariants
//! 1. Only the lender changes a handler's policy. It does so before it leaves `Wanted` for `Held`,
//!    and after it left `Held`, so that what is not `Held` or `Wanted` takes its share, or is
//!    about to without anybody else's help.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::paging::diagnostics;
use crate::paging::pager::Pager;
use crate::paging::watchdog::Watchdog;
use crate::sys::event::{EventFd, poll_readable};
use crate::sys::thread::{self, Share};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest time that a handler keeps a lease without finishing a turn.
const TICK: Duration = Duration::from_millis(1);
/// How long a handler that starved gets no lease, doubled up to the maximum when it starves again
/// soon: one that was held this many times longer was worth it.
const DENIED_MIN: Duration = Duration::from_millis(5);
const DENIED_MAX: Duration = Duration::from_millis(320);
const WORTH_IT: u32 = 10;

const FREE: u32 = 0;
const WANTED: u32 = 1;
const HELD: u32 = 2;
const RETURNED: u32 = 3;
const DENIED: u32 = 4;

/// What a handler has of its lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Standing {
    /// It runs like any other thread.
    None,
    /// It has asked.
    Asked,
    /// It gives way.
    Lent,
    /// It asked and was refused, or starved.
    Denied,
}

/// One handler's lease.
#[derive(Debug, Default)]
pub(in crate::paging) struct Lease {
    state: AtomicU32,
    thread: AtomicU32,
    /// Twice the turns begun, plus 1 while the handler has nothing left to do.
    beat: AtomicU64,
}

impl Lease {
    /// The calling thread is the handler of this lease.
    pub(in crate::paging) fn adopt(&self) {
        self.thread.store(thread::current(), Ordering::Relaxed);
    }

    /// A turn begins.
    pub(in crate::paging) fn begin_turn(&self) {
        // Relaxed: the lender only compares values, and this thread alone writes.
        let turn = (self.beat.load(Ordering::Relaxed) & !1) + 2;
        self.beat.store(turn, Ordering::Relaxed);
    }

    /// Whether the handler has nothing more to do than it is about to finish, or to wait for.
    pub(in crate::paging) fn rest(&self, resting: bool) {
        let turn = self.beat.load(Ordering::Relaxed) & !1;
        self.beat.store(turn | u64::from(resting), Ordering::Relaxed);
    }

    pub(in crate::paging) fn standing(&self) -> Standing {
        match self.state.load(Ordering::Relaxed) {
            WANTED => Standing::Asked,
            HELD => Standing::Lent,
            DENIED => Standing::Denied,
            _ => Standing::None,
        }
    }

    /// Asks for the lease; `true`: the lender is to be told.
    pub(in crate::paging) fn ask(&self) -> bool {
        self.change(FREE, WANTED)
    }

    /// Gives the lease back; `true`: the lender is to be told.
    pub(in crate::paging) fn give_back(&self) -> bool {
        self.change(HELD, RETURNED)
    }

    /// The handler knows that it was refused, and may ask again.
    pub(in crate::paging) fn accept_denial(&self) {
        self.change(DENIED, FREE);
    }

    fn change(&self, from: u32, to: u32) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// What the lender remembers of a lease.
#[derive(Clone, Copy, Debug)]
struct Memory {
    beat: u64,
    granted: Instant,
    denied_until: Option<Instant>,
    denied_for: Duration,
}

/// The thread that lends.
#[derive(Debug)]
pub(in crate::paging) struct Lender {
    pager: Arc<Pager>,
    memories: Vec<Memory>,
    /// Looks after threads that read for themselves, because this one waits for no device.
    watchdog: Watchdog,
}

/// All leases of a region, and how to reach their lender.
#[derive(Debug)]
pub(in crate::paging) struct Leases {
    leases: Box<[Lease]>,
    bell: EventFd,
}

impl Leases {
    /// # Errors
    /// [`Error::Os`] without a descriptor for the bell.
    pub(in crate::paging) fn new(handlers: usize) -> Result<Leases> {
        let bell = EventFd::new().map_err(|errno| Error::Os { call: "eventfd", errno: errno.0 })?;
        Ok(Leases { leases: (0..handlers).map(|_| Lease::default()).collect(), bell })
    }

    pub(in crate::paging) fn of(&self, handler: usize) -> &Lease {
        &self.leases[handler]
    }

    /// Tells the lender that a lease has changed, or that the region stops.
    pub(in crate::paging) fn ring(&self) {
        self.bell.signal();
    }
}

impl Lender {
    pub(in crate::paging) fn new(pager: Arc<Pager>) -> Lender {
        let granted = Instant::now();
        let memory = Memory { beat: 0, granted, denied_until: None, denied_for: DENIED_MIN };
        let watchdog = Watchdog::new(pager.clone());
        Lender { memories: vec![memory; pager.leases.leases.len()], watchdog, pager }
    }

    /// Lends until the region stops.
    pub(in crate::paging) fn run(&mut self) {
        const LOOK: Duration = Duration::from_secs(10);
        while !self.pager.health().is_stopping() {
            let timeout = if self.look() { TICK } else { LOOK };
            let timeout = self.watchdog.look().map_or(timeout, |next| next.min(timeout));
            let bell = &self.pager.leases.bell;
            if poll_readable(&[bell.raw_fd()], timeout) != Ok(false) {
                bell.drain();
            }
        }
        // Whoever starves now would hold up the end.
        (0..self.memories.len()).for_each(|at| self.take_back(at, FREE));
    }

    /// Looks at all leases; returns whether any is held.
    fn look(&mut self) -> bool {
        let mut any_held = false;
        for at in 0..self.memories.len() {
            let lease = self.pager.leases.of(at);
            match lease.state.load(Ordering::Acquire) {
                WANTED => self.grant(at),
                HELD => self.check(at),
                RETURNED => self.take_back(at, FREE),
                _ => {}
            }
            any_held |= self.pager.leases.of(at).state.load(Ordering::Relaxed) == HELD;
        }
        any_held
    }

    fn grant(&mut self, at: usize) {
        let lease = self.pager.leases.of(at);
        let memory = &mut self.memories[at];
        let denied = memory.denied_until.is_some_and(|until| Instant::now() < until);
        let handler = lease.thread.load(Ordering::Relaxed);
        if denied || !thread::may_give_way() || thread::set_share(handler, Share::GivesWay).is_err()
        {
            lease.state.store(DENIED, Ordering::Release);
            return;
        }
        memory.beat = lease.beat.load(Ordering::Relaxed);
        memory.granted = Instant::now();
        lease.state.store(HELD, Ordering::Release);
    }

    /// Takes a lease back from a handler that did nothing since the last look.
    fn check(&mut self, at: usize) {
        let lease = self.pager.leases.of(at);
        let beat = lease.beat.load(Ordering::Relaxed);
        let handler = lease.thread.load(Ordering::Relaxed);
        let memory = &mut self.memories[at];
        if beat != memory.beat {
            memory.beat = beat;
            return;
        }
        let resting = beat & 1 != 0;
        let asked = || poll_readable(&[self.pager.uffd.raw_fd()], Duration::ZERO) == Ok(true);
        if resting && !asked() {
            return self.take_back(at, FREE);
        }
        // Asleep, it waits for its device: that is not for want of a processor. Where nobody can
        // tell, a lease that ends costs speed, and a handler that starves would hang its threads.
        if !resting && thread::wants_processor(handler) == Some(false) {
            return;
        }
        let worth_it = memory.granted.elapsed() > memory.denied_for * WORTH_IT;
        memory.denied_for =
            if worth_it { DENIED_MIN } else { (memory.denied_for * 2).min(DENIED_MAX) };
        memory.denied_until = Some(Instant::now() + memory.denied_for);
        self.take_back(at, DENIED);
    }

    /// Ends a lease: the handler takes its share again, wherever there is room.
    fn take_back(&self, at: usize, then: u32) {
        let lease = self.pager.leases.of(at);
        let handler = lease.thread.load(Ordering::Relaxed);
        if lease.state.load(Ordering::Acquire) == FREE {
            return;
        }
        lease.state.store(then, Ordering::Release);
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
}
