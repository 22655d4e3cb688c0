//! One handler's part in when and where it runs.

use crate::base::error::{Error, Result};
use crate::paging::fault::sched::affinity::{Affinity, FaultArrival};
use crate::paging::fault::sched::busy_poll::{BusyPoll, Polled, Polling};
use crate::paging::fault::sched::idle_policy::IdleState;
use crate::paging::fault::sched::shared::HandlerSched;
use crate::paging::fault::starved::FAULTS_MAX;
use crate::sys::event::poll_readable;
use crate::sys::thread;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Scheduling of one handler thread, which owns it.
#[derive(Debug)]
pub(in crate::paging) struct ThreadSched {
    shared: Arc<HandlerSched>,
    handler: usize,
    affinity: Affinity,
    /// Faults that have arrived, and that the affinity has not been told of.
    arrivals: Vec<FaultArrival>,
    busy_poll: BusyPoll,
    /// The last wait was for faults only, and ended without news of the device.
    waited_for_faults: bool,
    /// The last turn found nothing to do.
    was_idle: bool,
}

impl ThreadSched {
    /// Bytes that one allocates.
    pub(in crate::paging) const BYTES: usize = FAULTS_MAX * size_of::<FaultArrival>();

    /// `poll` is how long to look for the device's answers at most.
    pub(in crate::paging) fn new(
        shared: Arc<HandlerSched>,
        handler: usize,
        poll: Duration,
    ) -> ThreadSched {
        ThreadSched {
            shared,
            handler,
            affinity: Affinity::new(handler),
            arrivals: Vec::with_capacity(FAULTS_MAX),
            busy_poll: BusyPoll::new(poll),
            waited_for_faults: false,
            was_idle: false,
        }
    }

    /// The calling thread is the handler.
    pub(in crate::paging) fn adopt(&self) {
        // Giving way is about processors: its reads are what threads wait for.
        thread::keep_io_priority();
        self.shared.idle_policies.of(self.handler).adopt();
    }

    // Before: faults arrive.

    /// Begins a turn. Returns whether the handler is active: one that is not, and has no work left,
    /// [stands by](Self::stand_by).
    pub(in crate::paging) fn begin_turn(&mut self) -> bool {
        self.shared.idle_policies.of(self.handler).begin_turn();
        self.shared.is_active(self.handler)
    }

    /// Waits to be called, not for faults: the kernel wakes all threads that wait for those, for each.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub(in crate::paging) fn stand_by(&self) -> Result<()> {
        const LOOK: Duration = Duration::from_secs(1);
        self.rest(true);
        let waker = &self.shared.wakers[self.handler];
        waker.wait(LOOK)?;
        waker.clear();
        Ok(())
    }

    /// Waits to be called, or until a descriptor is readable, while the process forks.
    ///
    /// # Errors
    /// When the kernel refuses to wait.
    pub(in crate::paging) fn wait_for_call(&self, fd: RawFd, timeout: Duration) -> Result<()> {
        self.rest(true);
        let waker = &self.shared.wakers[self.handler];
        let waited = poll_readable(&[fd, waker.raw_fd()], timeout);
        waited.map_err(|errno| Error::Os { call: "poll", errno: errno.0 })?;
        waker.clear();
        Ok(())
    }

    /// A fault of `thread` has arrived, and is served next. `is_alone`: nothing else is being served. What
    /// follows from it for the handler's place is left to [`follow_faults`](Self::follow_faults).
    pub(in crate::paging) fn fault_arrived(&mut self, thread: u32, is_alone: bool) {
        let arrival = FaultArrival { thread, is_alone, woke_handler: self.waited_for_faults };
        if self.arrivals.len() == FAULTS_MAX {
            self.follow_faults();
        }
        self.arrivals.push(arrival);
    }

    /// Runs where the faults that have arrived say, from now on.
    ///
    /// To be called when nobody waits for the handler: to look where a thread runs and to move there takes
    /// 30 to 100 us, as long as the device takes for a page.
    pub(in crate::paging) fn follow_faults(&mut self) {
        for arrival in self.arrivals.drain(..) {
            if self.affinity.fault(arrival, &self.shared) {
                self.shared.call_all();
            }
        }
    }

    // After: the handler waits, or wakes a thread that may run in its place.

    /// Notes whether the handler has nothing to do but what it does next, which is to wait or to wake
    /// a thread that may run in its place for long.
    pub(in crate::paging) fn rest(&self, is_last: bool) {
        self.shared.idle_policies.of(self.handler).rest(is_last);
    }

    /// True if threads that the handler wakes run in its place at once.
    pub(in crate::paging) fn gives_way(&self) -> bool {
        self.shared.idle_policies.of(self.handler).state() == IdleState::Idle
    }

    /// The handler is about to wait, for nothing but faults if `for_faults`. Returns how it looks for
    /// news before it sleeps.
    pub(in crate::paging) fn about_to_wait(&mut self, for_faults: bool) -> Polling {
        self.waited_for_faults = for_faults;
        self.busy_poll.plan(self.gives_way(), Instant::now())
    }

    /// The handler has waited. `idle`: it found nothing to do in this turn.
    pub(in crate::paging) fn waited(&mut self, idle: bool, polled: Polled) {
        self.busy_poll.looked(polled, Instant::now());
        self.waited_for_faults &= idle;
        let waker = &self.shared.wakers[self.handler];
        // Not after every fault that was waited for: to clear the waker is a system call. A handler
        // that stays idle clears one that was not called as well: its flag is set before the event is
        // signalled, so a signal can come after the waker was cleared.
        if idle && self.was_idle || waker.is_woken() {
            waker.clear();
        }
        self.was_idle = idle;
    }

    /// The device has answered a request.
    pub(in crate::paging) fn device_answered(&mut self, after: Duration) {
        self.busy_poll.answered(after);
    }
}
