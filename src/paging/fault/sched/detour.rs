//! Detour: the evictor runs on another processor than a handler that gives way.
//!
//! The scheduler takes a processor whose only thread runs under `SCHED_IDLE` for a free one, so it puts
//! the evictor right there when a handler wakes it: the handler's fault waits until the evictor has
//! finished, and a supervisor that sees no progress for a tick ends the idle policy (`idle_policy`), for
//! up to 1,024 faults, which took 140 us each then instead of 75 to 120 (hash map of 113 MiB, limit
//! 38 MiB, two processors).

use crate::paging::fault::sched::shared::HandlerSched;
use crate::sys::thread::{self, Processors};

/// Where one thread does not run; it owns this.
#[derive(Debug, Default)]
pub(in crate::paging) struct Detour {
    avoided: Processors,
}

impl Detour {
    /// Keeps the calling thread off the processors of handlers that give way now, where there are
    /// others.
    pub(in crate::paging) fn take(&mut self, sched: &HandlerSched) {
        let avoided = sched.idle_policies.processors();
        if avoided != self.avoided {
            thread::run_off(&avoided);
            self.avoided = avoided;
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::paging::fault::sched::idle_policy::PolicySupervisor;

    #[test]
    fn the_thread_is_off_the_processors_of_handlers_that_give_way_and_on_them_afterwards() {
        let sched = HandlerSched::new(1).expect("descriptors");
        let everywhere = thread::allowed();
        let first = (0..1024).find(|processor| everywhere.has(*processor)).expect("one at least");
        let is_single = everywhere == Processors::from_iter([first]);
        sched.idle_policies.of(0).adopt();
        sched.idle_policies.of(0).runs_on(first);
        sched.idle_policies.request(0);
        let mut supervisor = PolicySupervisor::new(1);
        supervisor.look(&sched.idle_policies, || true);
        let mut detour = Detour::default();
        detour.take(&sched);
        let gives_way = sched.idle_policies.processors() == Processors::from_iter([first]);
        assert_eq!(thread::allowed().has(first), is_single || !gives_way);
        supervisor.end_all(&sched.idle_policies);
        detour.take(&sched);
        assert_eq!(thread::allowed(), everywhere);
    }
}
