//! The active set: which handlers serve faults.
//!
//! The kernel wakes all threads that wait for faults, for each fault: a second handler that has
//! nothing to do costs a thread that faults alone more than its own handler does. So the first
//! handler serves all faults, and activates a helper when it sees two threads fault in turn, each on
//! a processor of its own. The helper then follows one of them and the first handler the other,
//! until one of the two stops. When more threads fault there is work for every handler: all helpers
//! are activated.
//!
//! A pair pays where the store answers before the call returns: its handlers do not sleep between
//! a fault and its page. Handlers that wait for a device sleep and are woken anyway, both of them
//! for each fault, and each is bound to a processor that the device's own work wants as well:
//! there two threads are served as more are.
//!
//! ```text
//!   inactive --- `activate_pair` ---> active for one thread --- `deactivate`, by either ---> inactive
//!            --- `activate_all` ----> active for any thread --- `deactivate`, or
//!                                                               `activate_pair` with others -> inactive
//! ```
//! The first handler is always active, and alone activates.

use crate::base::sync::{AtomicU32, Ordering};

/// No thread: no thread has this id.
pub(super) const NO_THREAD: u32 = 0;
/// Faults of any thread.
pub(super) const ANY_THREAD: u32 = u32::MAX;

/// The assignments of a region's handlers.
#[derive(Debug)]
pub(super) struct ActiveSet {
    /// Per handler: the thread whose faults it serves. The first handler serves all, and this is the
    /// thread that it follows.
    assigned: Box<[AtomicU32]>,
}

impl ActiveSet {
    pub(super) fn new(handlers: usize) -> ActiveSet {
        ActiveSet { assigned: (0..handlers).map(|_| AtomicU32::new(NO_THREAD)).collect() }
    }

    /// The thread that a handler was activated for: one, [`ANY_THREAD`] or [`NO_THREAD`].
    pub(super) fn assigned(&self, handler: usize) -> u32 {
        // Relaxed: a handler that learns of it late serves faults a little longer or later.
        self.assigned[handler].load(Ordering::Relaxed)
    }

    pub(super) fn is_active(&self, handler: usize) -> bool {
        handler == 0 || self.assigned(handler) != NO_THREAD
    }

    /// Assigns the first handler to `first` and a helper to `second`; returns the helper, to be woken.
    /// `None`: there is none. The others become inactive.
    pub(super) fn activate_pair(&self, first: u32, second: u32) -> Option<usize> {
        const HELPER: usize = 1;
        if !self.has_helpers() {
            return None;
        }
        self.deactivate();
        self.assigned[0].store(first, Ordering::Relaxed);
        self.assigned[HELPER].store(second, Ordering::Relaxed);
        Some(HELPER)
    }

    /// Activates all helpers; `false` when they are, or there is none.
    pub(super) fn activate_all(&self) -> bool {
        let inactive = |assigned: &&AtomicU32| assigned.load(Ordering::Relaxed) != ANY_THREAD;
        let mut changed = false;
        for assigned in self.assigned[1..].iter().filter(inactive) {
            assigned.store(ANY_THREAD, Ordering::Relaxed);
            changed = true;
        }
        changed
    }

    pub(super) fn has_helpers(&self) -> bool {
        self.assigned.len() > 1
    }

    /// Ends all assignments.
    pub(super) fn deactivate(&self) {
        for assigned in &self.assigned {
            assigned.store(NO_THREAD, Ordering::Relaxed);
        }
    }
}

/// The two threads that faulted last, and how often.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pair {
    threads: [u32; 2],
    faults: [u32; 2],
}

impl Pair {
    /// Notes a fault; returns the two threads once both have faulted often and no other thread has.
    pub(super) fn note(&mut self, thread: u32) -> Option<[u32; 2]> {
        const FAULTS: u32 = 64;
        const SHARE_MIN: u32 = 16;
        let Some(at) = self.threads.iter().position(|known| *known == thread) else {
            *self = Pair { threads: [self.threads[1], thread], faults: [0; 2] };
            return None;
        };
        self.faults[at] += 1;
        if self.faults[0] + self.faults[1] < FAULTS {
            return None;
        }
        let both = self.faults.iter().all(|faults| *faults >= SHARE_MIN);
        self.faults = [0; 2];
        both.then_some(self.threads)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn two_threads_that_fault_in_turn_are_a_pair_and_others_are_not() {
        let play = |faults: &dyn Fn(u32) -> u32| {
            let mut pair = Pair::default();
            (0..1_000).filter_map(|n| pair.note(faults(n))).last()
        };
        assert_eq!(play(&|n| 7 + n % 2), Some([7, 8]));
        assert_eq!(play(&|_| 7), None);
        assert_eq!(play(&|n| 7 + n % 3), None);
        assert_eq!(play(&|n| if n % 32 == 0 { 8 } else { 7 }), None);
    }

    #[test]
    fn helpers_are_active_from_their_activation_to_its_end() {
        let set = ActiveSet::new(3);
        let assigned = |set: &ActiveSet| [0, 1, 2].map(|handler| set.assigned(handler));
        assert_eq!(set.activate_pair(7, 8), Some(1));
        assert_eq!(assigned(&set), [7, 8, NO_THREAD]);
        assert!(set.is_active(0) && set.is_active(1) && !set.is_active(2));
        assert!(set.activate_all() && !set.activate_all());
        assert_eq!(assigned(&set)[1..], [ANY_THREAD; 2]);
        set.deactivate();
        assert_eq!(assigned(&set), [NO_THREAD; 3]);
        let alone = ActiveSet::new(1);
        assert_eq!((alone.activate_pair(7, 8), alone.activate_all()), (None, false));
    }
}
