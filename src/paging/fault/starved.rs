//! Faults that wait for room: all of a region's, served in the order in which they arrived.
//!
//! A fault for which there is no frame, or no memory within the limit, waits here, whichever handler
//! has read its event, until one of them finds room for it. There are two classes, because what the
//! faults need differs: a page with *content* needs room for itself, a *fresh* one must leave some
//! (`FramePool::charge_fresh`), or needs a whole chunk. Each class has a queue, whose first is
//! served first. Content may pass what is fresh, but nothing that has waited for [`PASSED_MAX`]; while
//! nothing fresh can be served at all, because the device takes no writes, it always may.
//!
//! # Invariants
//! 1. Both queues are sorted by arrival.
//! 2. Room is taken for a fault, or ahead of one, only if that passes no fault that may not be passed.
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

/// Kind of room that a fault needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum RoomClass {
    /// Room for a page that the device or a frame holds.
    Content,
    /// Room for a page of zeros.
    Fresh,
}

/// A fault that waits for room.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct StarvedFault {
    fault: Fault,
    /// When its event was read.
    arrived: Instant,
    class: RoomClass,
    stall: Stall,
}

/// For how long a wait for room has seen no progress.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Stall {
    /// Since it waits without progress.
    term: Term,
    /// The count of progress then.
    progress: u64,
    /// Writes that had failed when the wait began.
    writes_failed: u64,
}

impl Stall {
    pub(in crate::paging) fn new(shown: Duration, progress: u64, writes_failed: u64) -> Stall {
        Stall { term: Term::start(shown), progress, writes_failed }
    }

    /// Writes that had failed when the wait began.
    pub(in crate::paging) fn writes_failed(&self) -> u64 {
        self.writes_failed
    }

    /// True if there was no progress for `limit`, since it was begun or this was true last.
    pub(in crate::paging) fn has_lasted(
        &mut self,
        shown: Duration,
        progress: u64,
        limit: Duration,
    ) -> bool {
        let anew = Stall { term: Term::start(shown), progress, ..*self };
        if self.progress != progress {
            *self = anew;
        }
        let is_over = self.term.is_over(shown, limit);
        if is_over {
            *self = anew;
        }
        is_over
    }
}

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct StarvedFaults {
    queues: Ranked<Queues>,
    /// Faults of each class, those that are being served included.
    counts: [AtomicUsize; 2],
    /// The first fresh fault may not be passed any longer.
    is_due: AtomicBool,
    /// Times that room was made, for each class.
    progress: [AtomicU64; 2],
    /// The count of progress when a fresh fault was given up, and 1; 0: none was.
    given_up: AtomicU64,
    /// The device has a write, whose deadline has not passed: room may be made by that.
    is_writing: AtomicBool,
}

#[derive(Debug)]
struct Queues {
    waiting: [VecDeque<StarvedFault>; 2],
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

impl StarvedFaults {
    /// Queues for at most `most` faults, under a time limit.
    pub(in crate::paging) fn new(most: usize, limit: Duration) -> StarvedFaults {
        let queues = Queues {
            waiting: [VecDeque::with_capacity(most), VecDeque::with_capacity(most)],
            watch: Stopwatch::start(limit, Instant::now()),
        };
        StarvedFaults {
            queues: Ranked::new(Rank::Leaf, queues),
            counts: [AtomicUsize::new(0), AtomicUsize::new(0)],
            is_due: AtomicBool::new(false),
            progress: [AtomicU64::new(0), AtomicU64::new(0)],
            given_up: AtomicU64::new(0),
            is_writing: AtomicBool::new(false),
        }
    }

    /// Notes that room was made. What others leave of it fresh pages cannot have while the device
    /// takes no writes, so for them it is no progress then.
    pub(in crate::paging) fn note_room_made(&self, healthy: bool) {
        self.progress[RoomClass::Content as usize].fetch_add(1, Ordering::Relaxed);
        if healthy {
            self.progress[RoomClass::Fresh as usize].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A count that changes when room was made for a class.
    pub(in crate::paging) fn progress(&self, class: RoomClass) -> u64 {
        self.progress[class as usize].load(Ordering::Relaxed)
    }

    /// Notes that a fresh fault was given up.
    pub(in crate::paging) fn note_given_up(&self) {
        self.given_up.store(self.progress(RoomClass::Fresh) + 1, Ordering::Relaxed);
    }

    /// True if a fresh fault was given up, and no room was made for one since.
    pub(in crate::paging) fn has_given_up(&self) -> bool {
        self.given_up.load(Ordering::Relaxed) == self.progress(RoomClass::Fresh) + 1
    }

    pub(in crate::paging) fn set_writing(&self, is_writing: bool) {
        self.is_writing.store(is_writing, Ordering::Release);
    }

    pub(in crate::paging) fn is_writing(&self) -> bool {
        self.is_writing.load(Ordering::Acquire)
    }

    /// Faults of both classes.
    pub(in crate::paging) fn len(&self) -> usize {
        self.count(RoomClass::Content) + self.count(RoomClass::Fresh)
    }

    fn count(&self, class: RoomClass) -> usize {
        self.counts[class as usize].load(Ordering::Acquire)
    }

    /// True if a fault that comes now must not be served before those that wait.
    pub(in crate::paging) fn must_wait(&self, class: RoomClass, stuck: bool) -> bool {
        match class {
            RoomClass::Fresh => self.len() > 0,
            RoomClass::Content => {
                self.count(RoomClass::Content) > 0 || !stuck && self.is_due.load(Ordering::Relaxed)
            }
        }
    }

    /// Adds a fault.
    pub(in crate::paging) fn push(
        &self,
        fault: Fault,
        arrived: Instant,
        class: RoomClass,
        writes_failed: u64,
    ) {
        let progress = self.progress(class);
        let mut queues = self.queues.lock();
        let shown = queues.watch.look(Instant::now());
        let stall = Stall::new(shown, progress, writes_failed);
        queues.insert(StarvedFault { fault, arrived, class, stall });
        self.counts[class as usize].fetch_add(1, Ordering::AcqRel);
    }

    /// Begins a round of serving.
    pub(in crate::paging) fn begin(&self, stuck: bool) -> Round {
        Round { stuck, blocked: [false; 2], left: self.len() }
    }

    /// The next fault to serve. It is still counted; follow with [`put_back`](Self::put_back) or
    /// [`done`](Self::done).
    pub(in crate::paging) fn take(&self, round: &mut Round) -> Option<StarvedFault> {
        self.take_at(round, Instant::now())
    }

    fn take_at(&self, round: &mut Round, now: Instant) -> Option<StarvedFault> {
        round.left = round.left.checked_sub(1)?;
        let mut queues = self.queues.lock();
        let shown = queues.watch.look(now);
        let first = queues.waiting[RoomClass::Fresh as usize].front();
        let is_due = first.is_some_and(|first| first.stall.term.age(shown) >= PASSED_MAX);
        self.is_due.store(is_due, Ordering::Relaxed);
        let order = match is_due && !round.stuck {
            true => [RoomClass::Fresh, RoomClass::Content],
            false => [RoomClass::Content, RoomClass::Fresh],
        };
        order
            .into_iter()
            .filter(|class| !round.blocked[*class as usize])
            .find_map(|class| take_first(&mut queues.waiting[class as usize]))
    }

    /// There is no room for a fault. Returns `false` when the round is over: others would pass it.
    pub(in crate::paging) fn put_back(&self, starving: StarvedFault, round: &mut Round) -> bool {
        self.queues.lock().insert(starving);
        round.blocked[starving.class as usize] = true;
        round.stuck
    }

    /// A fault does not wait for room any more.
    pub(in crate::paging) fn done(&self, starving: &StarvedFault) {
        self.counts[starving.class as usize].fetch_sub(1, Ordering::AcqRel);
        if starving.class == RoomClass::Fresh {
            self.is_due.store(false, Ordering::Relaxed);
        }
    }

    /// The time that counts for [`Stall`].
    pub(in crate::paging) fn shown(&self) -> Duration {
        self.queues.lock().watch.look(Instant::now())
    }
}

impl StarvedFault {
    pub(in crate::paging) fn fault(&self) -> Fault {
        self.fault
    }

    /// When its event was read.
    pub(in crate::paging) fn arrived(&self) -> Instant {
        self.arrived
    }

    pub(in crate::paging) fn class(&self) -> RoomClass {
        self.class
    }

    pub(in crate::paging) fn stall(&mut self) -> &mut Stall {
        &mut self.stall
    }
}

/// Takes the first of a queue. One that is empty begins anew at the start of its memory: else a few faults at a
/// time wander through room for thousands, until all of it is resident.
pub(in crate::paging) fn take_first<T>(queue: &mut VecDeque<T>) -> Option<T> {
    let first = queue.pop_front();
    if queue.is_empty() {
        queue.clear();
    }
    first
}

impl Queues {
    /// Invariant 1. Mostly at the end, or, put back, at the beginning.
    fn insert(&mut self, starving: StarvedFault) {
        let waiting = &mut self.waiting[starving.class as usize];
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

    /// Faults that arrived in the order of their addresses.
    fn waiting(of: &[(usize, RoomClass)]) -> (StarvedFaults, Instant) {
        let (starved, start) = (StarvedFaults::new(64, LIMIT), Instant::now());
        for &(address, class) in of {
            let arrived = start + Duration::from_nanos(address as u64);
            starved.push(fault(address), arrived, class, 0);
        }
        (starved, start)
    }

    /// The addresses that a round serves at `now`, where `served` says whether there is room.
    fn round_at(
        starved: &StarvedFaults,
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

    fn round(starved: &StarvedFaults, stuck: bool, served: impl Fn(usize) -> bool) -> Vec<usize> {
        round_at(starved, Instant::now(), stuck, served)
    }

    #[test]
    fn faults_are_served_in_the_order_of_their_arrival() {
        let order = [3, 1, 4, 15, 9, 2, 6];
        let (starved, _) = waiting(&order.map(|address| (address, RoomClass::Content)));
        assert!(
            starved.must_wait(RoomClass::Content, false)
                && starved.must_wait(RoomClass::Fresh, false)
        );
        assert_eq!(round(&starved, false, |address| address <= 4), [1, 2, 3, 4]);
        // The first that finds no room keeps its place, and those behind it theirs.
        assert_eq!(round(&starved, false, |address| address != 6), [] as [usize; 0]);
        assert_eq!(round(&starved, false, |_| true), [6, 9, 15]);
        assert_eq!(starved.len(), 0);
        assert!(
            !starved.must_wait(RoomClass::Content, false)
                && !starved.must_wait(RoomClass::Fresh, false)
        );
    }

    #[test]
    fn every_fault_is_reached_however_many_wait_before_it() {
        let (starved, _) = waiting(&(1..=64).map(|n| (n, RoomClass::Content)).collect::<Vec<_>>());
        // Room for one at a time.
        for expected in 1..=64 {
            let served = round(&starved, false, |address| address == expected);
            assert_eq!(served, [expected]);
        }
    }

    #[test]
    fn faults_that_wait_one_after_another_use_the_same_memory() {
        let mut queue = VecDeque::with_capacity(64);
        let mut places: Vec<*const usize> = Vec::new();
        for n in 0..200 {
            queue.push_back(n);
            places.push(&raw const queue[0]);
            assert_eq!(take_first(&mut queue), Some(n));
        }
        assert!(places.iter().all(|place| *place == places[0]));
    }

    #[test]
    fn content_passes_fresh_pages_for_a_while() {
        let (starved, _) =
            waiting(&[(1, RoomClass::Fresh), (2, RoomClass::Content), (3, RoomClass::Content)]);
        let start = Instant::now();
        let first = |address| move |other| other == address;
        assert_eq!(round_at(&starved, start - LIMIT, false, first(2)), [2]);
        let due = Instant::now() + PASSED_MAX;
        assert_eq!(round_at(&starved, due, false, first(3)), [] as [usize; 0]);
        assert!(starved.must_wait(RoomClass::Content, false));
        // Where fresh pages cannot be served at all, no other fault waits for them.
        assert_eq!(round_at(&starved, due, true, first(3)), [3]);
        assert!(
            starved.must_wait(RoomClass::Content, false)
                && !starved.must_wait(RoomClass::Content, true)
        );
        assert_eq!(round_at(&starved, due, false, |_| true), [1]);
        assert!(!starved.must_wait(RoomClass::Content, false));
    }

    #[test]
    fn a_stall_lasts_for_a_time_without_progress() {
        let limit = Duration::from_secs(2);
        let mut stall = Stall::new(Duration::ZERO, 7, 0);
        let mut over =
            |seconds, progress| stall.has_lasted(Duration::from_secs(seconds), progress, limit);
        assert!(!over(1, 7) && !over(2, 8), "there was progress");
        assert!(!over(3, 8) && !over(4, 8), "not at the first look");
        assert!(over(4, 8));
        assert!(!over(5, 8) && !over(6, 8), "and again after as long");
        assert!(over(6, 8));
    }
}
