//! State that the handlers of a region share about when and where they run.

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, Ordering};
use crate::paging::fault::sched::idle_policy::IdlePolicies;
use crate::paging::waker::Waker;
use std::os::fd::RawFd;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct HandlerSched {
    /// True while the helpers serve faults: all handlers but the first.
    helpers_active: AtomicBool,
    pub(super) idle_policies: IdlePolicies,
    /// Per handler.
    pub(super) wakers: Box<[Waker]>,
}

impl HandlerSched {
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) without descriptors for the wakers.
    pub(in crate::paging) fn new(handlers: usize) -> Result<HandlerSched> {
        let wakers: Result<Vec<Waker>> = (0..handlers).map(|_| Waker::new()).collect();
        Ok(HandlerSched {
            helpers_active: AtomicBool::new(false),
            idle_policies: IdlePolicies::new(handlers)?,
            wakers: wakers?.into_boxed_slice(),
        })
    }

    /// True if a handler serves faults.
    pub(super) fn is_active(&self, handler: usize) -> bool {
        // Relaxed: a handler that learns of it late serves faults a little longer or later.
        handler == 0 || self.helpers_active.load(Ordering::Relaxed)
    }

    /// Lets the helpers serve faults; `false` when they do, or there is none.
    pub(super) fn activate_helpers(&self) -> bool {
        self.handlers() > 1 && !self.helpers_active.swap(true, Ordering::Relaxed)
    }

    pub(super) fn deactivate_helpers(&self) {
        // Not written for each fault: other handlers read it.
        if self.helpers_active.load(Ordering::Relaxed) {
            self.helpers_active.store(false, Ordering::Relaxed);
        }
    }

    /// Number of handlers.
    pub(in crate::paging) fn handlers(&self) -> usize {
        self.wakers.len()
    }

    /// Descriptor that is readable when a handler is called.
    pub(in crate::paging) fn waker_fd(&self, handler: usize) -> RawFd {
        self.wakers[handler].raw_fd()
    }

    /// Wakes a handler, which looks at all that it can be called for.
    pub(in crate::paging) fn call(&self, handler: usize) {
        self.wakers[handler].wake();
    }

    /// Wakes all handlers.
    pub(in crate::paging) fn call_all(&self) {
        self.wakers.iter().for_each(Waker::wake);
    }

    /// The scheduling policies of the handlers, for their supervisor.
    pub(in crate::paging) fn idle_policies(&self) -> &IdlePolicies {
        &self.idle_policies
    }
}
