//! State that the handlers of a region share about when and where they run.

use crate::base::error::Result;
use crate::paging::bell::Bell;
use crate::paging::fault::sched::active_set::ActiveSet;
use crate::paging::fault::sched::idle_policy::IdlePolicies;
use std::os::fd::RawFd;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct HandlerSched {
    pub(super) active: ActiveSet,
    pub(super) idle_policies: IdlePolicies,
    /// Per handler.
    pub(super) bells: Box<[Bell]>,
}

impl HandlerSched {
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) without descriptors for the bells.
    pub(in crate::paging) fn new(handlers: usize) -> Result<HandlerSched> {
        let bells: Result<Vec<Bell>> = (0..handlers).map(|_| Bell::new()).collect();
        Ok(HandlerSched {
            active: ActiveSet::new(handlers),
            idle_policies: IdlePolicies::new(handlers)?,
            bells: bells?.into_boxed_slice(),
        })
    }

    /// Number of handlers.
    pub(in crate::paging) fn handlers(&self) -> usize {
        self.bells.len()
    }

    /// Descriptor that is readable when a handler is called.
    pub(in crate::paging) fn bell_fd(&self, handler: usize) -> RawFd {
        self.bells[handler].raw_fd()
    }

    /// Wakes a handler, which looks at all that it can be called for.
    pub(in crate::paging) fn call(&self, handler: usize) {
        self.bells[handler].ring();
    }

    /// Wakes all handlers.
    pub(in crate::paging) fn call_all(&self) {
        self.bells.iter().for_each(Bell::ring);
    }

    /// The scheduling policies of the handlers, for their supervisor.
    pub(in crate::paging) fn idle_policies(&self) -> &IdlePolicies {
        &self.idle_policies
    }
}
