//! Runs of frames that have memory and wait for a use: of zeros, or *filled*.
//!
//! A run that a direct store has filled keeps its memory when its pages are stored: it never was in the region, so
//! nobody else reads it (`frames`, invariant 4). Any chunk that is read or stored can use it; a fresh chunk needs zeros.
//!
//! # Invariants
//! 1. A run is not filled when it is taken empty; the evictor notes that it was filled, while the run is its own. So it
//!    holds for each run that is whole in the evictor's hands, and for those that are listed.

use crate::base::strict_assert;
use crate::base::sync::{AtomicBool, AtomicUsize, Ordering, Rank};
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::word::FrameId;
use crate::sys::signals::FaultLock;
use crate::sys::vm::HUGE_PAGE;

/// See [module](self).
#[derive(Debug)]
pub(crate) struct SpareRuns {
    listed: FaultLock<Vec<FrameId>>,
    /// Length of the list, readable without the lock.
    len: AtomicUsize,
    /// For each run, whether a direct store has filled it.
    filled: Box<[AtomicBool]>,
}

impl SpareRuns {
    /// Of this many runs, none is spare.
    pub(super) fn new(runs: usize) -> SpareRuns {
        SpareRuns {
            listed: FaultLock::new(Rank::Frames, Vec::with_capacity(runs)),
            len: AtomicUsize::new(0),
            filled: (0..runs).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Bytes of spare runs.
    pub(crate) fn bytes(&self) -> usize {
        self.len.load(Ordering::Relaxed) * HUGE_PAGE
    }

    /// Lists a whole run of the caller's: of fresh memory, or one that is filled.
    pub(crate) fn put(&self, first: FrameId) {
        let mut listed = self.listed.lock();
        strict_assert!(!listed.contains(&first), "the run of {first:?} is listed twice");
        listed.push(first);
        self.len.store(listed.len(), Ordering::Relaxed);
    }

    /// Takes a run, whatever it holds; its first frame. Filled ones first: they can be of use to fewer.
    pub(crate) fn take(&self) -> Option<FrameId> {
        self.take_that_is(true).or_else(|| self.take_zeros())
    }

    /// Takes a run whose memory is zero; its first frame.
    pub(crate) fn take_zeros(&self) -> Option<FrameId> {
        self.take_that_is(false)
    }

    fn take_that_is(&self, filled: bool) -> Option<FrameId> {
        if self.len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut listed = self.listed.lock();
        let at = listed.iter().rposition(|first| self.is_filled(*first) == filled)?;
        let first = listed.swap_remove(at);
        self.len.store(listed.len(), Ordering::Relaxed);
        Some(first)
    }

    /// Notes whether a direct store has filled the run of a frame, if that is of one.
    pub(crate) fn set_filled(&self, frame: FrameId, filled: bool) {
        // Relaxed: other threads look at listed runs only, under the lock.
        if let Some(run) = self.filled.get(frame.0 as usize / CHUNK_PAGES) {
            run.store(filled, Ordering::Relaxed);
        }
    }

    /// True if a direct store has filled the run of a frame.
    pub(crate) fn is_filled(&self, frame: FrameId) -> bool {
        let run = self.filled.get(frame.0 as usize / CHUNK_PAGES);
        run.is_some_and(|run| run.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_was_filled_is_not_for_those_who_need_zeros() {
        let runs = SpareRuns::new(2);
        let of = CHUNK_PAGES as u32;
        let [zeros, filled] = [0, of].map(FrameId);
        runs.set_filled(FrameId(of + 1), true);
        runs.set_filled(FrameId(2 * of), true); // Of no run.
        assert_eq!(
            [0, of - 1, of, 2 * of - 1, 2 * of].map(|n| runs.is_filled(FrameId(n))),
            [false, false, true, true, false]
        );
        [filled, zeros].into_iter().for_each(|first| runs.put(first));
        assert_eq!(runs.bytes(), 2 * HUGE_PAGE);
        assert_eq!((runs.take_zeros(), runs.take_zeros()), (Some(zeros), None));
        runs.put(zeros);
        assert_eq!(runs.take(), Some(filled), "zeros are kept for others");
        assert_eq!((runs.take(), runs.take(), runs.bytes()), (Some(zeros), None, 0));
    }
}
