//! The supervisor thread of a region: ends what handlers and faulting threads cannot end themselves.
//!
//! It takes the idle policy back from handlers that starve (`sched::idle_policy`), and pages from
//! reads that the device does not answer (`watchdog`). It waits for no device and for no page.

use crate::paging::fault::sched::{Bystander, PolicySupervisor};
use crate::paging::fault::watchdog::Watchdog;
use crate::paging::pager::Pager;
use crate::sys::event::poll_readable;
use std::sync::Arc;
use std::time::Duration;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Supervisor {
    pager: Arc<Pager>,
    policies: PolicySupervisor,
    watchdog: Watchdog,
}

impl Supervisor {
    pub(in crate::paging) fn new(pager: Arc<Pager>) -> Supervisor {
        let policies = PolicySupervisor::new(pager.sched().handlers());
        Supervisor { policies, watchdog: Watchdog::new(pager.clone()), pager }
    }

    /// Looks until the region stops.
    pub(in crate::paging) fn run(&mut self) {
        let uffd = self.pager.mapper().raw_fd();
        let has_faults = || poll_readable(&[uffd], Duration::ZERO) == Ok(true);
        let idle_policies = self.pager.sched().idle_policies();
        idle_policies.bystanders().with(Bystander::Supervisor, || {
            while !self.pager.health().is_stopping() {
                let timeout = self.policies.look(idle_policies, has_faults);
                let timeout = self.watchdog.look().map_or(timeout, |next| next.min(timeout));
                idle_policies.wait_for_call(timeout);
            }
        });
        self.policies.end_all(idle_policies);
    }
}
