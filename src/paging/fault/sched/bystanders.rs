//! Bystanders: the region's threads that stay off the processor on which a handler gives way.
//!
//! The scheduler takes a processor whose only thread runs under `SCHED_IDLE` for a free one, so it puts
//! the evictor right there when a handler wakes it: the handler's fault waits until the evictor has
//! finished, and the thread that is woken next flees to another processor. The handler says where
//! they may run while they sleep. When they moved themselves once they ran, the moves drove the faulting
//! thread off (`perf sched`, a hash map on two processors: 12 of 100 faults crossed, now 8).

use crate::base::sync::{AtomicU32, Ordering};
use crate::sys::thread;

/// No thread: no thread has this id.
const NO_THREAD: u32 = 0;

/// Which of the region's threads it is.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) enum Bystander {
    Evictor,
    Supervisor,
    Maintenance,
}

/// See [module](self).
#[derive(Debug, Default)]
pub(in crate::paging) struct Bystanders([AtomicU32; 3]);

impl Bystanders {
    /// The calling thread is a bystander while it does `run`.
    pub(in crate::paging) fn with(&self, who: Bystander, run: impl FnOnce()) {
        // Relaxed: a handler that learns of it late is disturbed a little longer.
        self.0[who as usize].store(thread::current(), Ordering::Relaxed);
        run();
        self.0[who as usize].store(NO_THREAD, Ordering::Relaxed);
    }

    /// Keeps all of them off a processor, where there are others.
    pub(super) fn keep_off(&self, processor: u32) {
        self.threads().for_each(|thread| thread::keep_off(thread, processor));
    }

    /// Lets all of them run on all processors again.
    pub(super) fn run_anywhere(&self) {
        self.threads().for_each(thread::run_anywhere);
    }

    fn threads(&self) -> impl Iterator<Item = u32> {
        let threads = self.0.iter().map(|thread| thread.load(Ordering::Relaxed));
        threads.filter(|thread| *thread != NO_THREAD)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_bystander_is_off_the_processor_while_it_is_told_so_and_on_it_afterwards() {
        let everywhere = thread::allowed();
        let (first, others) = everywhere.split_first().expect("one at least");
        let bystanders = Bystanders::default();
        bystanders.with(Bystander::Evictor, || {
            bystanders.keep_off(*first);
            assert_eq!(thread::allowed(), if others.is_empty() { &everywhere } else { others });
            bystanders.run_anywhere();
            assert_eq!(thread::allowed(), everywhere);
        });
        bystanders.keep_off(*first);
        assert_eq!(thread::allowed(), everywhere, "no bystander any more");
    }
}
