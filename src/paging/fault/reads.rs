//! Reads: accepted, merged, handed to the device, and what is done with the pages that it has read.
//!
//! [`Reads`] is one handler's queue to the device, with what it knows of each frame that it reads
//! into. A page goes through the steps of `fill`; this module decides which pages are read by one
//! request, when a failed read is repeated and when a silent device is given up, and wakes threads.
//!
//! # Invariants
//! 1. No thread touches a frame under a read until the read is reported.
//! 2. The reads accepted and in flight together are no more than [`DEPTH`].

use crate::base::deadline::{Stopwatch, Term, look_every};
use crate::base::error::{Error, Result};
use crate::base::units::{PageId, SlotId};
use crate::paging::evict::policy::Insert;
use crate::paging::fault::fill;
use crate::paging::fault::fill::{Attempts, NotBegun};
use crate::paging::fault::no_room;
use crate::paging::fault::sched::{Polled, Polling, ThreadSched};
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::frames::push;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::store::{Completion, Op, Queue, Request, SEGMENTS_MAX, Segment, queue_bytes};
use crate::sys::uffd::Wake;
use crate::sys::vm::KERNEL_PAGE;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests a handler keeps in flight.
pub(in crate::paging) const DEPTH: u32 = 256;
/// Bytes of one merged read: large enough for the device's full rate, small enough that the first
/// pages of a window are installed while the rest is being read.
const READ_BYTES_MAX: usize = 512 << 10;
/// Bytes of one read into a huge page: what the device is fastest with.
const CHUNK_READ_BYTES_MAX: usize = 1 << 20;
/// Bytes installed for threads that wait before they are woken: bounds how long a page that is
/// there is waited for.
const WAKE_BYTES_MAX: usize = 64 << 10;

/// A fault that waits for a page which its own handler reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub(super) write: bool,
    /// When its event was read.
    pub(super) arrived: Instant,
}

/// The rest of the handler, to a thread that is about to be woken and may run in its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn<'a> {
    pub(super) sched: &'a ThreadSched,
    /// There is more to do than reads and starved faults.
    pub(super) has_other_work: bool,
}

/// A page that will be read and was not handed to the device yet.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    slot: SlotId,
    frame: FrameId,
    prefetch: bool,
}

/// A page whose read failed, and when it is read again.
#[derive(Clone, Copy, Debug)]
struct Repeat {
    frame: FrameId,
    due: Instant,
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
struct Read {
    frames: [FrameId; SEGMENTS_MAX],
    count: usize,
    started: Instant,
    /// Since the device got it.
    term: Term,
    prefetch: bool,
    /// The device does not have it after all.
    is_refused: bool,
    /// Its pages were given up; the frames wait for the device to let go.
    is_abandoned: bool,
}

/// A read that is over.
#[derive(Debug)]
pub(super) struct Finished {
    frames: [FrameId; SEGMENTS_MAX],
    count: usize,
    pub(super) result: Result<()>,
    pub(super) took: Duration,
    pub(super) bytes: usize,
}

impl Finished {
    /// The frames whose pages are still to be mapped.
    pub(super) fn frames(&self) -> &[FrameId] {
        &self.frames[..self.count]
    }
}

/// A handler's record of a frame that it reads into.
#[derive(Clone, Copy, Debug)]
struct FrameRead {
    /// The frame is this handler's.
    is_pending: bool,
    /// `None`: the page was only asked for ahead.
    demand: Option<Demand>,
    /// Reads that failed.
    attempts: Attempts,
    /// Since the device got the first of them.
    term: Term,
}

impl FrameRead {
    const NONE: FrameRead = FrameRead {
        is_pending: false,
        demand: None,
        attempts: Attempts::NONE,
        term: Term::start(Duration::ZERO),
    };

    fn purpose(&self) -> Purpose {
        if self.demand.is_some() { Purpose::Fault } else { Purpose::Prefetch }
    }
}

/// The reads that the device has, by their tokens. A token is free, or a read's.
#[derive(Debug)]
struct InFlight {
    /// By token, as many as were ever in flight at once: all would be 80 KiB, and mostly there are one or two.
    reads: Vec<Option<Read>>,
    free: Vec<usize>,
    /// Reads that were asked for ahead of faults.
    prefetches: usize,
}

impl InFlight {
    fn new() -> InFlight {
        let depth = DEPTH as usize;
        let (reads, free) = (Vec::with_capacity(depth), Vec::with_capacity(depth));
        InFlight { reads, free, prefetches: 0 }
    }

    /// The token of the read that is [put](Self::put) next.
    fn take_token(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            assert!(self.reads.len() < DEPTH as usize, "reads are bounded by the queue's depth");
            self.reads.push(None);
            self.reads.len() - 1
        })
    }

    fn put(&mut self, token: usize, read: Read) {
        self.prefetches += usize::from(read.prefetch);
        self.reads[token] = Some(read);
    }

    /// The device does not have a read any more.
    fn take(&mut self, token: usize) -> Read {
        let read = self.reads[token].take().expect("a token belongs to a read");
        self.free.push(token);
        self.prefetches -= usize::from(read.prefetch);
        read
    }

    fn get(&self, token: usize) -> &Read {
        self.reads[token].as_ref().expect("a token belongs to a read")
    }

    fn get_mut(&mut self, token: usize) -> &mut Read {
        self.reads[token].as_mut().expect("a token belongs to a read")
    }

    /// The first token from one on whose read is wanted.
    fn find(&mut self, from: usize, mut is_wanted: impl FnMut(&mut Read) -> bool) -> Option<usize> {
        let mut reads = self.reads[from..].iter_mut();
        let found = reads.position(|read| read.as_mut().is_some_and(&mut is_wanted));
        found.map(|found| from + found)
    }
}

/// One handler's reads; see [module](self).
pub(super) struct Reads {
    pager: Arc<Pager>,
    /// The handler's.
    index: usize,
    queue: Box<dyn Queue>,
    accepted: Vec<Accepted>,
    repeats: Vec<Repeat>,
    in_flight: InFlight,
    finished: Vec<Completion>,
    /// By frame, up to the last one that was read into.
    frames: Vec<FrameRead>,
    /// Pages that were mapped and whose waiters have not been woken yet.
    to_wake: Vec<PageId>,
    /// Tells how long the device has had a read.
    watch: Stopwatch,
    /// When deadlines were looked at last.
    checked: Instant,
}

impl Reads {
    /// Opens a queue, which also ends its waits for faults and for calls of the handler. Allocates all
    /// the memory that it will ever use.
    ///
    /// # Errors
    /// The store's error.
    pub(super) fn new(pager: Arc<Pager>, index: usize) -> Result<Reads> {
        let mut queue = pager.slots().store().open_queue(DEPTH)?;
        queue.watch(pager.mapper().raw_fd())?;
        queue.watch(pager.sched().bell_fd(index))?;
        let frames = pager.frames().count();
        let now = Instant::now();
        Ok(Reads {
            index,
            queue,
            accepted: Vec::with_capacity(frames),
            repeats: Vec::with_capacity(frames),
            in_flight: InFlight::new(),
            finished: Vec::with_capacity(DEPTH as usize),
            frames: Vec::with_capacity(frames),
            to_wake: Vec::with_capacity(WAKE_BYTES_MAX / KERNEL_PAGE),
            watch: Stopwatch::start(pager.health().deadline(), now),
            checked: now,
            pager,
        })
    }

    /// Bytes of all that, for a region of this number of frames.
    pub(super) fn bytes(frames: usize) -> usize {
        let request = size_of::<Option<Read>>() + size_of::<usize>() + size_of::<Completion>();
        let frame = size_of::<Accepted>() + size_of::<Repeat>() + size_of::<FrameRead>();
        let wakes = WAKE_BYTES_MAX / KERNEL_PAGE * size_of::<PageId>();
        queue_bytes(DEPTH, SEGMENTS_MAX) + DEPTH as usize * request + frames * frame + wakes
    }

    /// Whether nothing is accepted, at the device or back from it.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.in_flight() == 0
            && self.finished.is_empty()
            && self.accepted.is_empty()
            && self.repeats.is_empty()
    }

    /// Whether this many pages more may be read.
    pub(super) fn has_room_for(&self, pages: u64) -> bool {
        self.accepted.len() as u64 + u64::from(self.queue.in_flight()) + pages <= u64::from(DEPTH)
    }

    // Accepting.

    /// `Stored`: accepts a read of the page, for a fault or ahead of one. `None`: the word changed.
    pub(super) fn accept(
        &mut self,
        page: PageId,
        stored: Word,
        demand: Option<Demand>,
    ) -> Option<FaultStatus> {
        if !self.has_room_for(1) {
            return Some(FaultStatus::QueueFull);
        }
        let purpose = if demand.is_some() { Purpose::Fault } else { Purpose::Prefetch };
        if purpose == Purpose::Prefetch && self.pager.starved().len() > 0 {
            return Some(FaultStatus::NoRoom); // Faults go first.
        }
        match fill::begin_fill(&self.pager, page, stored, purpose) {
            Ok(frame) => {
                self.push_accepted(frame, demand);
                Some(FaultStatus::Reading)
            }
            Err(NotBegun::NoRoom) => Some(FaultStatus::NoRoom),
            Err(NotBegun::Changed) => None,
        }
    }

    /// As [`accept`](Self::accept), ahead of faults and into a frame that the caller has reserved, and
    /// that is given back if the page is not `Stored`. Returns whether it was accepted.
    pub(super) fn accept_into(&mut self, frame: FrameId, page: PageId) -> bool {
        let word = self.pager.word(page).load();
        if word.state() != State::Stored {
            self.pager.pool().cancel_fill(frame);
            return false;
        }
        let accepted = fill::begin_fill_into(&self.pager, frame, page, word, Purpose::Prefetch);
        if accepted {
            self.push_accepted(frame, None);
        }
        accepted
    }

    fn push_accepted(&mut self, frame: FrameId, demand: Option<Demand>) {
        let at = frame.0 as usize;
        if at >= self.frames.len() {
            self.frames.resize(at + 1, FrameRead::NONE);
        }
        self.frames[at] = FrameRead { is_pending: true, demand, ..FrameRead::NONE };
        let slot = fill::slot_of_fill(&self.pager, frame);
        self.accepted.push(Accepted { slot, frame, prefetch: demand.is_none() });
    }

    /// A fault waits for the page that is being read into `frame`. One that this handler reads ahead
    /// is demanded from now on. (Where another handler reads it, that handler learns of it when the
    /// read is over.)
    pub(super) fn demand(&mut self, frame: FrameId, demand: Demand) {
        let read = self.frames.get_mut(frame.0 as usize);
        if let Some(read) = read.filter(|read| read.is_pending && read.demand.is_none()) {
            read.demand = Some(demand);
            self.pager.counters().prefetch_hits.bump();
        }
    }

    // At the device.

    /// Hands accepted reads to the device, neighbours there as one request. Returns a read in whose
    /// request the store panicked, to be [given up](Self::abandon): call again for the rest.
    pub(super) fn start(&mut self) -> Option<usize> {
        // What a thread waits for goes first, and alone where its neighbours are not urgent.
        self.accepted.sort_unstable_by_key(|accepted| (accepted.prefetch, accepted.slot));
        let (mut at, mut broken) = (0, None);
        while at < self.accepted.len() && broken.is_none() {
            let count = self.mergeable(at);
            broken = self.push_read(at, count);
            at += count;
        }
        self.accepted.drain(..at);
        broken
    }

    /// How many accepted pages from `at` on lie one after the other on the device. What has failed
    /// before is read alone: a bad place costs no other page.
    fn mergeable(&self, at: usize) -> usize {
        let Accepted { slot: first, prefetch, frame } = self.accepted[at];
        let bytes = match self.pager.frames().run_of(frame) {
            Some(_) => CHUNK_READ_BYTES_MAX,
            None => READ_BYTES_MAX,
        };
        let most = (bytes / self.pager.page_bytes()).clamp(1, SEGMENTS_MAX);
        let failed = |of: &Accepted| self.frames[of.frame.0 as usize].attempts.any();
        if failed(&self.accepted[at]) {
            return 1;
        }
        let follows = |(n, of): &(usize, &Accepted)| {
            of.slot.0 == first.0 + *n as u64 && of.prefetch == prefetch && !failed(of)
        };
        self.accepted[at..].iter().take(most).enumerate().take_while(follows).count()
    }

    /// Hands one request to the device; returns its token if the store panicked.
    fn push_read(&mut self, at: usize, count: usize) -> Option<usize> {
        let token = self.in_flight.take_token();
        let page_bytes = self.pager.page_bytes();
        let empty = Segment { ptr: std::ptr::null_mut(), len: 0 };
        let mut segments = [empty; SEGMENTS_MAX];
        let mut frames = [FrameId(0); SEGMENTS_MAX];
        let mut last = 0;
        for (n, accepted) in self.accepted[at..at + count].iter().enumerate() {
            frames[n] = accepted.frame;
            let ptr = self.pager.frames().ptr(accepted.frame);
            // Neighbours in memory are one segment: the virtual disk is paid by segment.
            if n > 0 && frames[n - 1].0 + 1 == accepted.frame.0 {
                segments[last].len += page_bytes;
                continue;
            }
            last += usize::from(n > 0);
            segments[last] = Segment { ptr, len: page_bytes };
        }
        let request = Request {
            token: token as u64,
            op: Op::Read,
            offset: self.pager.slot_offset(self.accepted[at].slot),
            segments: &segments[..=last],
        };
        let prefetch = self.accepted[at].prefetch;
        let started = Instant::now();
        let term = Term::start(self.watch.look(started));
        for frame in &frames[..count] {
            let read = &mut self.frames[frame.0 as usize];
            if !read.attempts.any() {
                read.term = term;
            }
        }
        self.pager.counters().reads_in_flight.up();
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        let pushed = self.pager.guarded(|| push(queue, request));
        assert!(pushed.unwrap_or(true), "reads are bounded by the queue's depth");
        // After a panic it is unknown whether the device has the request, as if it never answered,
        // unless the store says that it took nothing.
        let is_refused = pushed.is_none() && self.queue.in_flight() == before;
        let is_abandoned = false;
        let read = Read { frames, count, started, term, prefetch, is_refused, is_abandoned };
        self.in_flight.put(token, read);
        pushed.is_none().then_some(token)
    }

    /// How long to wait for the device at most, where there is no other reason to wake.
    pub(super) fn wait_max(&self, idle: bool) -> Duration {
        const LOOK: Duration = Duration::from_millis(100);
        match self.queue.in_flight() > 0 {
            true => LOOK.min(look_every(self.pager.health().deadline())),
            false if idle => LOOK,
            false => Duration::ZERO,
        }
    }

    /// Waits for news of the device, for faults and for calls of the handler; while requests are under way, looks
    /// for them first, as `polling` says.
    ///
    /// # Errors
    /// When the queue is of no use any more.
    pub(super) fn wait(&mut self, timeout: Duration, polling: Polling) -> Result<Polled> {
        let (queue, finished, pager) = (&mut self.queue, &mut self.finished, &self.pager);
        let polling = if queue.in_flight() > 0 { polling } else { Polling::NOT };
        let polled = polling.wait(timeout, |timeout| {
            let mut done = |completion| finished.push(completion);
            pager.guarded(|| queue.wait(timeout, &mut done)).unwrap_or(Ok(true))
        })?;
        polled.count(self.pager.counters());
        Ok(polled)
    }

    /// Whether the device has reported something that was not looked at yet.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The next read that is over. Frames of one that was given up are given back.
    pub(super) fn next_finished(&mut self) -> Option<Finished> {
        let completion = self.finished.pop()?;
        let read = self.release(completion.token as usize);
        let took = read.started.elapsed();
        let counters = self.pager.counters();
        counters.read_times[self.index].add(took);
        let bytes = read.count * self.pager.page_bytes();
        let mut count = read.count;
        if read.is_abandoned {
            read.frames[..count].iter().for_each(|frame| self.pager.pool().cancel_fill(*frame));
            count = 0;
        }
        Some(Finished { frames: read.frames, count, result: completion.result, took, bytes })
    }

    /// The device does not have a read any more.
    fn release(&mut self, token: usize) -> Read {
        let read = self.in_flight.take(token);
        self.pager.counters().reads_in_flight.down();
        read
    }

    // What was read.

    /// When the fault arrived that waits for the page being read into `frame`; `None`: it was not read
    /// for a fault that this handler has seen.
    pub(super) fn demanded_at(&self, frame: FrameId) -> Option<Instant> {
        self.frames[frame.0 as usize].demand.map(|demand| demand.arrived)
    }

    /// The page that was read into `frame` becomes `Moving`; says whether a thread waits for it, too.
    /// `None`: it was discarded.
    pub(super) fn end_fill(&mut self, frame: FrameId) -> Option<(Word, bool)> {
        self.frames[frame.0 as usize].is_pending = false;
        fill::end_fill(&self.pager, frame)
    }

    /// Maps the page that was read into `frame`. Threads that wait for it are woken by that, or later
    /// together with others. `more` pages follow.
    pub(super) fn map(&mut self, frame: FrameId, more: usize, turn: Turn<'_>) {
        if let Some((moving, wanted)) = self.end_fill(frame) {
            self.map_moving(frame, moving, wanted, more, turn);
        }
    }

    /// As [`map`](Self::map), for a page that is `moving` already, and `wanted` if a thread waits for
    /// it.
    pub(super) fn map_moving(
        &mut self,
        frame: FrameId,
        moving: Word,
        wanted: bool,
        more: usize,
        turn: Turn<'_>,
    ) {
        let page = self.pager.frames().page(frame);
        let demand = self.frames[frame.0 as usize].demand;
        let write = demand.is_some_and(|demand| demand.write);
        let insert = if wanted { Insert::Filled } else { Insert::Prefetched };
        let wake = if wanted && self.wakes_at_once(turn) { Wake::Yes } else { Wake::No };
        if fill::map_fill(&self.pager, frame, moving, write, insert, wake).is_err() || !wanted {
            return;
        }
        self.count_served(demand.map(|demand| demand.arrived));
        if wake == Wake::Yes {
            return;
        }
        self.to_wake.push(page);
        if self.to_wake.len() * self.pager.page_bytes() >= WAKE_BYTES_MAX {
            self.wake_all(more, turn);
        }
    }

    /// Counts a fault that a read has served. `None`: another handler's.
    pub(super) fn count_served(&self, arrived: Option<Instant>) {
        let counters = self.pager.counters();
        counters.faults_read.bump();
        match arrived {
            Some(arrived) => counters.fault_times[self.index].add(arrived.elapsed()),
            None => counters.prefetch_hits.bump(),
        }
    }

    /// Whether threads are woken by mapping their page, which saves a call. Not while pages are on
    /// their way that were asked for ahead: a thread that reads several of them goes on when all are
    /// there that can be. Nor by a handler that gives way: a thread that it wakes runs in its place at
    /// once, and must not find the page in its hands.
    fn wakes_at_once(&self, turn: Turn<'_>) -> bool {
        self.in_flight.prefetches == 0 && !turn.sched.gives_way()
    }

    /// Wakes the threads that wait for pages mapped since the last time; `more` pages follow.
    pub(super) fn wake_all(&mut self, more: usize, turn: Turn<'_>) {
        while let Some(page) = self.to_wake.pop() {
            self.rest_if_last(more + self.to_wake.len(), turn);
            self.pager.wake(page);
        }
    }

    /// Notes that the handler has nothing to do but what it does now, if that is so and `more` is
    /// zero: the thread that it wakes next may run in its place for long.
    pub(super) fn rest_if_last(&self, more: usize, turn: Turn<'_>) -> bool {
        let is_last =
            more == 0 && self.is_idle() && self.pager.starved().len() == 0 && !turn.has_other_work;
        turn.sched.rest(is_last);
        is_last
    }

    // Failure.

    /// A read failed. It is repeated, alone, at growing intervals, or its page is given up.
    pub(super) fn read_failed(&mut self, frame: FrameId, error: &Error) {
        let now = Instant::now();
        let (shown, deadline) = (self.watch.look(now), self.pager.health().deadline());
        let read = &mut self.frames[frame.0 as usize];
        read.attempts.note(error);
        let (purpose, attempts) = (read.purpose(), read.attempts);
        let is_over = || read.term.is_over(shown, deadline);
        let is_discarded = fill::is_discarded(&self.pager, frame);
        let pause = fill::retry_after(&self.pager, purpose, attempts, is_discarded, is_over);
        if let Some(pause) = pause {
            return self.repeats.push(Repeat { frame, due: now + pause });
        }
        self.fail(frame, error);
        self.pager.pool().cancel_fill(frame);
    }

    /// The page being read into `frame` is given up; the frame stays the device's.
    pub(super) fn fail(&mut self, frame: FrameId, cause: &Error) {
        let read = &mut self.frames[frame.0 as usize];
        read.is_pending = false;
        fill::fail_fill(&self.pager, frame, read.purpose(), cause);
    }

    /// How long it is until a read that failed is to be repeated, if the device has room for it.
    pub(super) fn next_repeat(&self) -> Option<Duration> {
        let due = self.repeats.iter().map(|repeat| repeat.due).min();
        let due = due.filter(|_| self.queue.in_flight() < DEPTH)?;
        Some(due.saturating_duration_since(Instant::now()))
    }

    /// Accepts the reads that are to be repeated by now, as far as the device takes them.
    pub(super) fn accept_repeats(&mut self) {
        if self.repeats.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut at = 0;
        while at < self.repeats.len() {
            let Repeat { frame, due } = self.repeats[at];
            if due > now || !self.has_room_for(1) {
                at += 1;
                continue;
            }
            self.repeats.swap_remove(at);
            let slot = fill::slot_of_fill(&self.pager, frame);
            self.accepted.push(Accepted { slot, frame, prefetch: false });
        }
    }

    /// A read that the device has not answered in time, to be [given up](Self::abandon). Looks from
    /// time to time only.
    pub(super) fn next_overdue(&mut self, from: &mut usize) -> Option<usize> {
        const INTERVAL: Duration = Duration::from_millis(50);
        let (now, deadline) = (Instant::now(), self.pager.health().deadline());
        if *from == 0 {
            if now - self.checked < INTERVAL.min(look_every(deadline)) {
                return None;
            }
            self.checked = now;
        }
        let shown = self.watch.look(now);
        let is_overdue = |read: &mut Read| !read.is_abandoned && read.term.is_over(shown, deadline);
        let token = self.in_flight.find(*from, is_overdue)?;
        *from = token + 1;
        Some(token)
    }

    /// The error of a read that the device has had for too long.
    pub(super) fn overdue_error(&self, token: usize) -> Error {
        let read = self.in_flight.get(token);
        no_room::timed_out(&self.pager, Some(fill::slot_of_fill(&self.pager, read.frames[0])))
    }

    /// Gives a read up: its pages are to [fail](Self::fail), and its frames stay with the device until
    /// it answers. Returns the frames and their number.
    pub(super) fn abandon(&mut self, token: usize) -> ([FrameId; SEGMENTS_MAX], usize) {
        let read = self.in_flight.get_mut(token);
        read.is_abandoned = true;
        let (frames, count) = (read.frames, read.count);
        self.pager.counters().read_errors.bump();
        (frames, count)
    }

    /// Frees the frames of a read that was given up, if the device does not have them.
    pub(super) fn free_if_refused(&mut self, token: usize) {
        let read = self.in_flight.get(token);
        if read.is_refused && read.is_abandoned {
            let read = self.release(token);
            read.frames[..read.count]
                .iter()
                .for_each(|frame| self.pager.pool().cancel_fill(*frame));
        }
    }

    /// Whether all that the device was asked for has passed its deadline.
    pub(super) fn is_device_silent(&self) -> bool {
        self.accepted.is_empty()
            && self.in_flight.reads.iter().flatten().all(|read| read.is_abandoned)
    }

    /// The time that counts for deadlines.
    pub(super) fn shown(&mut self) -> Duration {
        self.watch.look(Instant::now())
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn reads_one_after_another_use_the_same_token() {
        let mut in_flight = InFlight::new();
        let read = Read {
            frames: [FrameId(0); SEGMENTS_MAX],
            count: 1,
            started: Instant::now(),
            term: Term::start(Duration::ZERO),
            prefetch: true,
            is_refused: false,
            is_abandoned: false,
        };
        for _ in 0..2 * DEPTH {
            let token = in_flight.take_token();
            in_flight.put(token, read);
            in_flight.take(token);
        }
        assert_eq!((in_flight.reads.len(), in_flight.prefetches), (1, 0));
        let tokens: Vec<usize> = (0..DEPTH).map(|_| in_flight.take_token()).collect();
        assert!((0..DEPTH as usize).all(|token| tokens.contains(&token)), "all at once");
    }
}
