//! How often a segment is read, by samples.
//!
//! Reads cost a thread-local countdown, 1 to 2 ns with what is counted; a count of each would be a cache
//! line that all readers of a segment fight for.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// One read in this many is counted on average: half of the longest distance between two of them. With
/// 32, five scans of a column counted one in six of its chunks, and plans by chunk followed chance: 0.82 of
/// the queries a second of the best static choice, where plans by column had 1.06.
const SAMPLE_EVERY: u32 = 4;

/// When a thread counts next.
#[derive(Clone, Copy)]
struct Countdown {
    /// Reads that are not counted before that.
    left: u32,
    /// State of its random numbers; 0: the thread has none yet.
    random: u32,
}

thread_local! {
    static COUNTDOWN: Cell<Countdown> = const { Cell::new(Countdown { left: 0, random: 0 }) };
}

/// Counted reads of one segment.
#[derive(Debug, Default)]
pub(super) struct Visits(AtomicU32);

impl Visits {
    /// The segment is read.
    #[inline]
    pub(super) fn note(&self) {
        COUNTDOWN.with(|countdown| match countdown.get() {
            Countdown { left: 0, random } => self.count(countdown, random),
            now => countdown.set(Countdown { left: now.left - 1, ..now }),
        });
    }

    #[cold]
    fn count(&self, countdown: &Cell<Countdown>, random: u32) {
        static THREADS: AtomicU32 = AtomicU32::new(0);
        if random == 0 {
            // A thread's first read is not counted: there may be a thread for each query, all of which
            // begin with the same column.
            let seed = THREADS.fetch_add(1, Relaxed).wrapping_mul(2).wrapping_add(1);
            return countdown.set(Countdown::random(seed.wrapping_mul(0x9E37_79B9)));
        }
        self.0.fetch_add(1, Relaxed); // A count guards no other data.
        countdown.set(Countdown::random(random));
    }

    /// The counted reads since the last call.
    pub(super) fn take(&self) -> u32 {
        self.0.swap(0, Relaxed)
    }
}

impl Countdown {
    /// The next one after `state`, which is not zero. At random, because queries read their columns in
    /// turn: every fourth read would be of the same one.
    fn random(mut state: u32) -> Countdown {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        Countdown { left: state % (2 * SAMPLE_EVERY - 1), random: state }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_read_in_four_is_counted_whichever_turn_it_has() {
        const TURNS: u32 = SAMPLE_EVERY * 2_000;
        let visits: [Visits; 4] = Default::default();
        for _ in 0..TURNS {
            visits.iter().for_each(Visits::note);
        }
        for visits in &visits {
            let counted = visits.take();
            // 2,000 are expected, and some 30 are the deviation.
            assert!((1_800..=2_200).contains(&counted), "{counted}");
            assert_eq!(visits.take(), 0);
        }
    }

    #[test]
    fn threads_that_read_once_are_not_all_counted_and_not_all_missed() {
        let visits = [Visits::default(), Visits::default()];
        for _ in 0..200 {
            std::thread::scope(|scope| {
                scope.spawn(|| (0..40).for_each(|at| visits[usize::from(at > 0)].note()));
            });
        }
        let [first, others] = visits.map(|visits| visits.take());
        assert_eq!(first, 0, "the first read of a thread draws its countdown");
        assert!((1_500..=2_400).contains(&others), "{others} of 7,800");
    }
}
