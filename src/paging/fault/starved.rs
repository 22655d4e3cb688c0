//! Faults that wait for room: all of a region's, served in the order in which they arrived.
//!
//! A fault for which there is no frame, or no memory within the limit, waits here, whichever handler
//! has read its event, until one of them finds room for it. They wait in two lines, because what
//! they need differs: a page with *content* needs room for itself, a *fresh* one must leave some
//! (`Pager::has_room_for_fresh`), or needs a whole chunk. Within a line the first is served first.
//! Content may pass what is fresh, but nothing that has waited for [`PASSED_MAX`]; while nothing
//! fresh can be served at all, because the device takes no writes, it always may.
//!
//! # Invariants
//! 1. Both lines are sorted by arrival.
//! 2. Room is taken for a fault, or ahead of one, only if that passes nobody who may not be passed.
//! 3. The lock is a leaf: no fault is served under it.

use crate::base::deadline::{Stopwatch, Term};
use crate::base::sync::{AtomicBool, AtomicU64, AtomicUsize, Ordering, Rank, Ranked};
use crate::sys::uffd::Fault;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How long a fresh page may be passed by pages with content: a chunk of it waits for 2 MiB, which a
/// slow device takes 20 ms to write, and a read of one page should not wait for that.
const PASSED_MAX: Duration = Duration::from_millis(10);

/// Faults read from the kernel at once.
pub(in crate::paging) const FAULTS_MAX: usize = 64;
/// Faults that may wait; more stay with the kernel, which hands out the oldest first.
pub(in crate::paging) const WAITING_MAX: usize = 4096;
/// Faults of one handler that wait, and those that it has just read.
pub(in crate::paging) const FAULTS_HELD_MAX: usize = WAITING_MAX + FAULTS_MAX;

/// What a fault needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Line {
    /// Room for a page that the device or a frame holds.
    Content,
    /// Room for a page of zeros.
    Fresh,
}

/// A fault that waits for room.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Starving {
    pub(in crate::paging) fault: Fault,
    /// When its event was read.
    pub(in crate::paging) arrived: Instant,
    line: Line,
    hope: Hope,
}

/// What somebody who waits for room knows of how it goes.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Hope {
    /// Since it waits without progress.
    term: Term,
    /// What has changed since, if it goes on.
    progress: u64,
}

impl Hope {
    pub(in crate::paging) fn new(shown: Duration, progress: u64) -> Hope {
        Hope { term: Term::start(shown), progress }
    }

    /// Whether there was no progress for `limit`, since this was so last.
    pub(in crate::paging) fn is_over(
        &mut self,
        shown: Duration,
        progress: u64,
        limit: Duration,
    ) -> bool {
        if self.progress != progress {
            *self = Hope::new(shown, progress);
        }
        let is_over = self.term.is_over(shown, limit);
        if is_over {
            *self = Hope::new(shown, progress);
        }
        is_over
    }
}

/// The lines; see [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Starved {
    lines: Ranked<Lines>,
    /// Faults of each line, those that are being served included.
    counts: [AtomicUsize; 2],
    /// The first fresh fault may not be passed any longer.
    is_due: AtomicBool,
    /// Times that room was made, for each line.
    progress: [AtomicU64; 2],
    /// The device has a write, whose deadline has not passed: room may be made by that.
    is_writing: AtomicBool,
}

#[derive(Debug)]
struct Lines {
    waiting: [VecDeque<Starving>; 2],
    watch: Stopwatch,
}

/// One round of serving.
#[derive(Debug)]
pub(in crate::paging) struct Round {
    /// Nothing fresh can be served: what does not get room is passed.
    stuck: bool,
    blocked: [bool; 2],
    /// Faults that may still be looked at: those that come meanwhile have their own round.
    left: usize,
}

impl Starved {
    /// Lines for at most `most` faults, under a time limit.
    pub(in crate::paging) fn new(most: usize, limit: Duration) -> Starved {
        let lines = Lines {
            waiting: [VecDeque::with_capacity(most), VecDeque::with_capacity(most)],
            watch: Stopwatch::start(limit, Instant::now()),
        };
        Starved {
            lines: Ranked::new(Rank::Leaf, lines),
            counts: [AtomicUsize::new(0), AtomicUsize::new(0)],
            is_due: AtomicBool::new(false),
            progress: [AtomicU64::new(0), AtomicU64::new(0)],
            is_writing: AtomicBool::new(false),
        }
    }

    /// Notes that room was made. What others leave of it fresh pages cannot have while the device
    /// takes no writes, so for them it is no progress then.
    pub(in crate::paging) fn note_room_made(&self, healthy: bool) {
        self.progress[Line::Content as usize].fetch_add(1, Ordering::Relaxed);
        if healthy {
            self.progress[Line::Fresh as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What changes when there is hope for a line.
    pub(in crate::paging) fn progress(&self, line: Line) -> u64 {
        self.progress[line as usize].load(Ordering::Relaxed)
    }

    pub(in crate::paging) fn set_writing(&self, is_writing: bool) {
        self.is_writing.store(is_writing, Ordering::Release);
    }

    pub(in crate::paging) fn is_writing(&self) -> bool {
        self.is_writing.load(Ordering::Acquire)
    }

    /// Faults in both lines.
    pub(in crate::paging) fn len(&self) -> usize {
        self.count(Line::Content) + self.count(Line::Fresh)
    }

    fn count(&self, line: Line) -> usize {
        self.counts[line as usize].load(Ordering::Acquire)
    }

    /// Whether a fault that comes now must not be served before those that wait.
    pub(in crate::paging) fn bars(&self, line: Line, stuck: bool) -> bool {
        match line {
            Line::Fresh => self.len() > 0,
            Line::Content => {
                self.count(Line::Content) > 0 || !stuck && self.is_due.load(Ordering::Relaxed)
            }
        }
    }

    /// Lines a fault up.
    pub(in crate::paging) fn push(&self, fault: Fault, arrived: Instant, line: Line) {
        let progress = self.progress(line);
        let mut lines = self.lines.lock();
        let shown = lines.watch.look(Instant::now());
        lines.insert(Starving { fault, arrived, line, hope: Hope::new(shown, progress) });
        self.counts[line as usize].fetch_add(1, Ordering::AcqRel);
    }

    /// Begins a round of serving.
    pub(in crate::paging) fn begin(&self, stuck: bool) -> Round {
        Round { stuck, blocked: [false; 2], left: self.len() }
    }

    /// The next fault to serve. It is still counted; follow with [`put_back`](Self::put_back) or
    /// [`done`](Self::done).
    pub(in crate::paging) fn take(&self, round: &mut Round) -> Option<Starving> {
        self.take_at(round, Instant::now())
    }

    fn take_at(&self, round: &mut Round, now: Instant) -> Option<Starving> {
        round.left = round.left.checked_sub(1)?;
        let mut lines = self.lines.lock();
        let shown = lines.watch.look(now);
        let first = lines.waiting[Line::Fresh as usize].front();
        let is_due = first.is_some_and(|first| first.hope.term.age(shown) >= PASSED_MAX);
        self.is_due.store(is_due, Ordering::Relaxed);
        let order = match is_due && !round.stuck {
            true => [Line::Fresh, Line::Content],
            false => [Line::Content, Line::Fresh],
        };
        order
            .into_iter()
            .filter(|line| !round.blocked[*line as usize])
            .find_map(|line| lines.waiting[line as usize].pop_front())
    }

    /// There is no room for a fault. Returns `false` when the round is over: others would pass it.
    pub(in crate::paging) fn put_back(&self, starving: Starving, round: &mut Round) -> bool {
        self.lines.lock().insert(starving);
        round.blocked[starving.line as usize] = true;
        round.stuck
    }

    /// A fault does not wait for room any more.
    pub(in crate::paging) fn done(&self, starving: &Starving) {
        self.counts[starving.line as usize].fetch_sub(1, Ordering::AcqRel);
        if starving.line == Line::Fresh {
            self.is_due.store(false, Ordering::Relaxed);
        }
    }

    /// The time that counts for [`Hope`].
    pub(in crate::paging) fn shown(&self) -> Duration {
        self.lines.lock().watch.look(Instant::now())
    }
}

impl Starving {
    pub(in crate::paging) fn line(&self) -> Line {
        self.line
    }

    pub(in crate::paging) fn hope(&mut self) -> &mut Hope {
        &mut self.hope
    }
}

impl Lines {
    /// Invariant 1. Mostly at the end, or, put back, at the beginning.
    fn insert(&mut self, starving: Starving) {
        let waiting = &mut self.waiting[starving.line as usize];
        if waiting.front().is_some_and(|first| first.arrived > starving.arrived) {
            return waiting.push_front(starving);
        }
        let after = waiting.iter().rev().take_while(|other| other.arrived > starving.arrived);
        let at = waiting.len() - after.count();
        waiting.insert(at, starving);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(30);

    fn fault(address: usize) -> Fault {
        Fault { address, write: false, protected: false, thread: 0 }
    }

    /// Lines with faults that arrived in the order of their addresses.
    fn lines(of: &[(usize, Line)]) -> (Starved, Instant) {
        let (starved, start) = (Starved::new(64, LIMIT), Instant::now());
        for &(address, line) in of {
            let arrived = start + Duration::from_nanos(address as u64);
            starved.push(fault(address), arrived, line);
        }
        (starved, start)
    }

    /// The addresses that a round serves at `now`, where `served` says whether there is room.
    fn round_at(
        starved: &Starved,
        now: Instant,
        stuck: bool,
        served: impl Fn(usize) -> bool,
    ) -> Vec<usize> {
        let mut round = starved.begin(stuck);
        let mut order = Vec::new();
        while let Some(starving) = starved.take_at(&mut round, now) {
            if served(starving.fault.address) {
                order.push(starving.fault.address);
                starved.done(&starving);
            } else if !starved.put_back(starving, &mut round) {
                break;
            }
        }
        order
    }

    fn round(starved: &Starved, stuck: bool, served: impl Fn(usize) -> bool) -> Vec<usize> {
        round_at(starved, Instant::now(), stuck, served)
    }

    #[test]
    fn faults_are_served_in_the_order_of_their_arrival() {
        let order = [3, 1, 4, 15, 9, 2, 6];
        let (starved, _) = lines(&order.map(|address| (address, Line::Content)));
        assert!(starved.bars(Line::Content, false) && starved.bars(Line::Fresh, false));
        assert_eq!(round(&starved, false, |address| address <= 4), [1, 2, 3, 4]);
        // The first that finds no room keeps its place, and those behind it theirs.
        assert_eq!(round(&starved, false, |address| address != 6), [] as [usize; 0]);
        assert_eq!(round(&starved, false, |_| true), [6, 9, 15]);
        assert_eq!(starved.len(), 0);
        assert!(!starved.bars(Line::Content, false) && !starved.bars(Line::Fresh, false));
    }

    #[test]
    fn every_fault_is_reached_however_many_wait_before_it() {
        let (starved, _) = lines(&(1..=64).map(|n| (n, Line::Content)).collect::<Vec<_>>());
        // Room for one at a time.
        for expected in 1..=64 {
            let served = round(&starved, false, |address| address == expected);
            assert_eq!(served, [expected]);
        }
    }

    #[test]
    fn content_passes_fresh_pages_for_a_while() {
        let (starved, _) = lines(&[(1, Line::Fresh), (2, Line::Content), (3, Line::Content)]);
        let start = Instant::now();
        let first = |address| move |other| other == address;
        assert_eq!(round_at(&starved, start - LIMIT, false, first(2)), [2]);
        let due = Instant::now() + PASSED_MAX;
        assert_eq!(round_at(&starved, due, false, first(3)), [] as [usize; 0]);
        assert!(starved.bars(Line::Content, false));
        // Where fresh pages cannot be served at all, nobody waits for them.
        assert_eq!(round_at(&starved, due, true, first(3)), [3]);
        assert!(starved.bars(Line::Content, false) && !starved.bars(Line::Content, true));
        assert_eq!(round_at(&starved, due, false, |_| true), [1]);
        assert!(!starved.bars(Line::Content, false));
    }

    #[test]
    fn hope_ends_after_a_time_without_progress() {
        let limit = Duration::from_secs(2);
        let mut hope = Hope::new(Duration::ZERO, 7);
        let mut over =
            |seconds, progress| hope.is_over(Duration::from_secs(seconds), progress, limit);
        assert!(!over(1, 7) && !over(2, 8), "there was progress");
        assert!(!over(3, 8) && !over(4, 8), "not at the first look");
        assert!(over(4, 8));
        assert!(!over(5, 8) && !over(6, 8), "and again after as long");
        assert!(over(6, 8));
    }
}
