//! Which handlers are on duty.
//!
//! The kernel wakes everybody who waits for faults, for each of them: a second handler that has
//! nothing to do costs a thread that faults alone more than its own handler does. So the first
//! handler serves all faults, and calls a helper in when it sees two threads fault in turn, each on
//! a processor of its own. The helper then follows one of them and the first handler the other,
//! until one of the two stops. When more threads fault there is work for everybody: all helpers
//! are called.
//!
//! A pair pays where the store answers before the call returns: its handlers do not sleep between
//! a fault and its page. Handlers that wait for a device sleep and are woken anyway, both of them
//! for each fault, and each is bound to a processor that the device's own work wants as well:
//! there two threads are served as more are.
//!
//! ```text
//!   off duty --- first handler: `call_in` ---> on duty for a thread --- either: `dismiss` ---> off
//!            --- first handler: `call_all` --> on duty --- `call_in`, `dismiss` -------------> off
//! ```

use crate::base::sync::{AtomicU32, Ordering};

/// No thread has this id.
pub(in crate::paging) const NOBODY: u32 = 0;
/// Duty for whoever faults.
pub(in crate::paging) const ANYBODY: u32 = u32::MAX;

/// The duties of a region's handlers.
#[derive(Debug)]
pub(in crate::paging) struct Team {
    /// Per handler: the thread it is on duty for. The first handler's is the one it follows.
    duties: Box<[AtomicU32]>,
}

impl Team {
    pub(in crate::paging) fn new(handlers: usize) -> Team {
        Team { duties: (0..handlers).map(|_| AtomicU32::new(NOBODY)).collect() }
    }

    /// The thread that a handler was called in for, [`NOBODY`] when it was not.
    pub(in crate::paging) fn duty(&self, handler: usize) -> u32 {
        // Relaxed: a handler that learns of it late serves faults a little longer or later.
        self.duties[handler].load(Ordering::Relaxed)
    }

    /// Sends the first handler to `first` and a helper to `second`; returns the helper, to be woken.
    /// `None`: there is none. The others go off duty.
    pub(in crate::paging) fn call_in(&self, first: u32, second: u32) -> Option<usize> {
        const HELPER: usize = 1;
        if !self.has_helpers() {
            return None;
        }
        self.dismiss();
        self.duties[0].store(first, Ordering::Relaxed);
        self.duties[HELPER].store(second, Ordering::Relaxed);
        Some(HELPER)
    }

    /// Calls all helpers; `false` when they are there, or there is none.
    pub(in crate::paging) fn call_all(&self) -> bool {
        let away = |duty: &&AtomicU32| duty.load(Ordering::Relaxed) != ANYBODY;
        let mut called = false;
        for duty in self.duties[1..].iter().filter(away) {
            duty.store(ANYBODY, Ordering::Relaxed);
            called = true;
        }
        called
    }

    pub(in crate::paging) fn has_helpers(&self) -> bool {
        self.duties.len() > 1
    }

    /// Ends the helpers' duty.
    pub(in crate::paging) fn dismiss(&self) {
        for duty in &self.duties {
            duty.store(NOBODY, Ordering::Relaxed);
        }
    }
}

/// The two threads that faulted last, and how often.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::paging) struct Pair {
    threads: [u32; 2],
    faults: [u32; 2],
}

impl Pair {
    /// Notes a fault; returns the two threads once both have faulted often and nobody else has.
    pub(in crate::paging) fn note(&mut self, thread: u32) -> Option<[u32; 2]> {
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
    fn helpers_are_on_duty_from_their_call_to_their_dismissal() {
        let team = Team::new(3);
        let duties = |team: &Team| [0, 1, 2].map(|handler| team.duty(handler));
        assert_eq!(team.call_in(7, 8), Some(1));
        assert_eq!(duties(&team), [7, 8, NOBODY]);
        assert!(team.call_all() && !team.call_all());
        assert_eq!(duties(&team)[1..], [ANYBODY; 2]);
        team.dismiss();
        assert_eq!(duties(&team), [NOBODY; 3]);
        let alone = Team::new(1);
        assert_eq!((alone.call_in(7, 8), alone.call_all()), (None, false));
    }
}
