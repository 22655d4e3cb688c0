//! Which fillers are on duty.
//!
//! The kernel wakes everybody who waits for faults, for each of them: a second filler that has
//! nothing to do costs a thread that faults alone more than its own filler does. So the first
//! filler serves all faults, and calls a helper in when it sees two threads fault in turn, each on
//! a processor of its own. The helper then follows one of them and the first filler the other,
//! until one of the two stops or a third one joins.
//!
//! ```text
//!   off duty --- first filler: `call_in` ---> on duty for a thread --- either: `dismiss` ---> off
//! ```

use crate::base::sync::{AtomicU32, Ordering};

/// No thread has this id.
pub(super) const NOBODY: u32 = 0;

/// The duties of a region's fillers.
#[derive(Debug)]
pub(super) struct Team {
    /// Per filler: the thread it is on duty for. The first filler's is the one it follows.
    duties: Box<[AtomicU32]>,
}

impl Team {
    pub(super) fn new(fillers: usize) -> Team {
        Team { duties: (0..fillers).map(|_| AtomicU32::new(NOBODY)).collect() }
    }

    /// The thread that a filler was called in for, [`NOBODY`] when it was not.
    pub(super) fn duty(&self, filler: usize) -> u32 {
        // Relaxed: a filler that learns of it late serves faults a little longer or later.
        self.duties[filler].load(Ordering::Relaxed)
    }

    /// Sends the first filler to `first` and a helper to `second`; returns the helper, to be woken.
    /// `None`: there is none, or it is on duty.
    pub(super) fn call_in(&self, first: u32, second: u32) -> Option<usize> {
        const HELPER: usize = 1;
        let duty = self.duties.get(HELPER)?;
        self.duties[0].store(first, Ordering::Relaxed);
        let called = duty.compare_exchange(NOBODY, second, Ordering::Relaxed, Ordering::Relaxed);
        called.is_ok().then_some(HELPER)
    }

    /// Ends a helper's duty.
    pub(super) fn dismiss(&self) {
        for duty in &self.duties {
            duty.store(NOBODY, Ordering::Relaxed);
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
    /// Notes a fault; returns the two threads once both have faulted often and nobody else has.
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
    fn a_helper_is_called_in_once_until_it_is_dismissed() {
        let team = Team::new(2);
        assert_eq!(team.call_in(7, 8), Some(1));
        assert_eq!((team.duty(0), team.duty(1)), (7, 8));
        assert_eq!(team.call_in(7, 9), None);
        team.dismiss();
        assert_eq!(team.duty(1), NOBODY);
        assert_eq!(Team::new(1).call_in(7, 8), None);
    }
}
