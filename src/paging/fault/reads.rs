//! Reads: accepted, handed to the device, and what is done with the pages that it has read.
//!
//! [`Reads`] is one handler's [`Transfers`], with what it knows of each frame that it reads into. A page goes through
//! the steps of `fill`; this module decides when a failed read is repeated, gives the pages of a silent device up, and
//! wakes threads.
//!
//! # Invariants
//! 1. The requests under way, and those that the accepted reads need, are no more than [`DEPTH`].

use crate::base::deadline::{Term, look_every};
use crate::base::error::{Error, Result};
use crate::base::units::{PageId, SlotId};
use crate::paging::fault::fill::{self, Attempts};
use crate::paging::fault::sched::{Polled, Polling, ThreadSched};
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::memory::ReadPage;
use crate::paging::pager::table::PageTable;
use crate::paging::probes;
use crate::paging::transfer::{Aim, LONG_MAX, READ_MAX, Transfer, Transfers};
use crate::store::{Op, Store};
use crate::sys::uffd::Wake;
use arrayvec::ArrayVec;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests that a handler keeps in flight.
pub(in crate::paging) const DEPTH: u32 = 256;
/// Pages installed for threads that wait before they are woken: bounds how long a page that is
/// there is waited for.
const WAKE_MAX: usize = 16;

/// A fault that waits for a page which its own handler reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct Demand {
    pub(super) write: bool,
    /// When its event was read.
    pub(super) arrived: Instant,
}

/// The rest of the handler, to a thread that is about to be woken and may run in its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct WakeContext<'a> {
    pub(super) sched: &'a ThreadSched,
    /// There is more to do than reads and starved faults.
    pub(super) has_other_work: bool,
}

/// A page whose read failed, and when it is read again.
#[derive(Clone, Copy, Debug)]
struct Repeat {
    frame: FrameId,
    due: Instant,
}

/// A handler's record of a frame that it reads into.
#[derive(Clone, Copy, Debug)]
struct FrameRead {
    /// The frame is this handler's.
    is_pending: bool,
    /// `None`: the page was only asked for ahead.
    demand: Option<Demand>,
    /// Of the next request for it.
    aim: Aim,
    /// Reads that failed.
    attempts: Attempts,
    /// Since the device got the first of them.
    term: Term,
}

impl FrameRead {
    const NONE: FrameRead = FrameRead {
        is_pending: false,
        demand: None,
        aim: Aim::Prefetch,
        attempts: Attempts::NONE,
        term: Term::start(Duration::ZERO),
    };

    fn purpose(&self) -> Purpose {
        if self.demand.is_some() { Purpose::Fault } else { Purpose::Prefetch }
    }
}

/// Counts the requests that read slots one after another into a run of frames.
#[derive(Default)]
pub(super) struct RequestCount {
    count: usize,
    /// The last slot, and the pages of its request.
    last: Option<(SlotId, usize)>,
}

impl RequestCount {
    pub(super) fn add(&mut self, slot: SlotId) {
        let joined = self.last.filter(|(last, pages)| last.0 + 1 == slot.0 && *pages < LONG_MAX);
        self.count += usize::from(joined.is_none());
        self.last = Some((slot, joined.map_or(1, |(_, pages)| pages + 1)));
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }
}

/// Pages of `page`'s cluster that are stored beside it, which is in `slot`: neighbours whose slots are neighbours as well.
fn stored_together(table: &PageTable, page: PageId, slot: SlotId) -> Range<u64> {
    let is_beside = |other: &u64| {
        let other = PageId(*other);
        let word = table.word(other).load();
        word.state() == State::Stored && word.slot() == Some(slot_beside(page, slot, other))
    };
    let cluster = table.pages_of_cluster(page);
    let first = (cluster.start..page.0).rev().take_while(is_beside).last();
    let last = (page.0 + 1..cluster.end).take_while(is_beside).last();
    first.unwrap_or(page.0)..last.unwrap_or(page.0) + 1
}

/// The slot of another page where it lies beside that of `page`, which is in `slot`; before the first slot none that
/// there is.
fn slot_beside(page: PageId, slot: SlotId, other: PageId) -> SlotId {
    SlotId(slot.0.wrapping_add(other.0.wrapping_sub(page.0)))
}

/// One handler's reads; see [module](self).
pub(super) struct Reads {
    pager: Arc<Pager>,
    /// The handler's.
    index: usize,
    transfers: Transfers,
    /// Transfers under way that were asked for ahead of faults.
    prefetches: usize,
    /// Frames that will be read into and were not handed to the device yet.
    accepted: Vec<FrameId>,
    /// The requests that these need at most.
    requests: usize,
    repeats: Vec<Repeat>,
    /// By frame, up to the last one that was read into.
    frames: Vec<FrameRead>,
    /// Pages that were mapped and whose waiters have not been woken yet.
    to_wake: Vec<PageId>,
}

impl Reads {
    /// Opens a queue, which also ends its waits for faults and for calls of the handler. Allocates all
    /// the memory that it will ever use.
    ///
    /// # Errors
    /// The store's error.
    pub(super) fn new(pager: Arc<Pager>, index: usize) -> Result<Reads> {
        let watched = [pager.mapper().raw_fd(), pager.sched().waker_fd(index)];
        let frames = pager.frames().count();
        Ok(Reads {
            index,
            transfers: Transfers::new(Arc::clone(&pager), DEPTH, &watched)?,
            prefetches: 0,
            accepted: Vec::with_capacity(frames),
            requests: 0,
            repeats: Vec::with_capacity(frames),
            frames: Vec::with_capacity(frames),
            to_wake: Vec::with_capacity(WAKE_MAX),
            pager,
        })
    }

    /// Bytes of all that, for a region of this number of frames.
    pub(super) fn bytes(store: &dyn Store, frames: usize) -> usize {
        let frame = size_of::<FrameId>() + size_of::<Repeat>() + size_of::<FrameRead>();
        Transfers::bytes(store, DEPTH) + frames * frame + WAKE_MAX * size_of::<PageId>()
    }

    /// True if nothing is accepted, at the device or back from it.
    pub(super) fn is_idle(&self) -> bool {
        self.transfers.is_idle() && self.accepted.is_empty() && self.repeats.is_empty()
    }

    /// True if this many requests more may be made.
    pub(super) fn has_room_for(&self, requests: usize) -> bool {
        self.requests + requests <= self.transfers.room()
    }

    // Accepting.

    /// `Stored`: accepts a read of the page for a fault, and of what is stored beside it in its cluster where that
    /// comes in `together`. `None`: the word changed.
    pub(super) fn accept(
        &mut self,
        page: PageId,
        stored: Word,
        demand: Demand,
        together: bool,
    ) -> Option<FaultStatus> {
        if !self.has_room_for(1) {
            return Some(FaultStatus::QueueFull);
        }
        let alone = page.0..page.0 + 1;
        let slot = stored.slot().expect("a stored page has a slot");
        // Two requests where the page itself is lost to another thread from between its neighbours. Faults that wait for
        // room go before neighbours.
        let together = together && self.has_room_for(2) && self.pager.starved().len() == 0;
        let wanted = match together {
            true => stored_together(self.pager.table(), page, slot),
            false => alone.clone(),
        };
        let count = (wanted.end - wanted.start) as usize;
        let Some((first, got)) = self.pager.pool().reserve_fills(count) else {
            return Some(FaultStatus::NoRoom);
        };
        let pages = if got == count { wanted } else { alone };
        let mut frames = (first.0..first.0 + got as u32).map(FrameId);
        let mut accepted = None;
        for (other, frame) in pages.map(PageId).zip(&mut frames) {
            let memory = self.pager.memory();
            let (word, purpose) = match other == page {
                true => (stored, Purpose::Fault),
                false => (memory.word(other).load(), Purpose::Prefetch),
            };
            if other != page && word != Word::stored(slot_beside(page, slot, other)) {
                self.pager.pool().cancel_fill(frame);
            } else if fill::begin_fill_into(memory, frame, other, word, purpose) {
                let demand = Some(demand).filter(|_| other == page);
                accepted = accepted.or(demand.map(|_| FaultStatus::Reading));
                self.push_accepted(frame, demand, Aim::Demand);
            }
        }
        frames.for_each(|frame| self.pager.pool().cancel_fill(frame));
        self.requests += if accepted.is_some() { 1 } else { 2 };
        self.pager.pool().check_low();
        accepted
    }

    /// Accepts reads of the first of `count` pages, as far as they are `Stored`, ahead of faults and into neighbouring
    /// frames. Returns how many it has looked at, and how many it has accepted; `None`: there is no room.
    pub(super) fn accept_row(&mut self, first: PageId, count: u64) -> Option<(u64, u64)> {
        let room = self.transfers.room().saturating_sub(self.requests) as u64;
        if room == 0 || self.pager.starved().len() > 0 {
            return None; // Faults go first.
        }
        let is_stored = |page: &PageId| self.pager.word(*page).load().state() == State::Stored;
        let most = count.min(room).min(READ_MAX as u64);
        let pages = (first.0..first.0 + most).map(PageId);
        let stored = pages.clone().take_while(is_stored).count();
        if stored == 0 {
            return Some((1, 0));
        }
        let (frame, got) = self.pager.pool().reserve_fills(stored)?;
        let accepted = self.accept_run(frame, pages.take(got));
        self.pager.pool().check_low();
        Some((got as u64, accepted))
    }

    /// As [`accept`](Self::accept), ahead of faults and into neighbouring frames that the caller has reserved, from `first`
    /// on. Frames of pages that are not `Stored`, or for which there is no room, are given back. Returns how many pages
    /// were accepted.
    pub(super) fn accept_run(
        &mut self,
        first: FrameId,
        pages: impl Iterator<Item = PageId>,
    ) -> u64 {
        let (mut accepted, before) = (0, self.requests);
        let mut requests = RequestCount::default();
        for (page, frame) in pages.zip((first.0..).map(FrameId)) {
            let word = self.pager.word(page).load();
            self.requests = before + requests.count();
            if word.state() != State::Stored || !self.has_room_for(1) {
                self.pager.pool().cancel_fill(frame);
                continue;
            }
            let memory = self.pager.memory();
            if fill::begin_fill_into(memory, frame, page, word, Purpose::Prefetch) {
                requests.add(self.pager.frames().slot_of_fill(frame));
                self.push_accepted(frame, None, Aim::Prefetch);
                accepted += 1;
            }
        }
        self.requests = before + requests.count();
        accepted
    }

    fn push_accepted(&mut self, frame: FrameId, demand: Option<Demand>, aim: Aim) {
        let at = frame.0 as usize;
        if at >= self.frames.len() {
            self.frames.resize(at + 1, FrameRead::NONE);
        }
        self.frames[at] = FrameRead { is_pending: true, demand, aim, ..FrameRead::NONE };
        self.accepted.push(frame);
    }

    /// A fault waits for the page that is being read into `frame`. One that this handler reads ahead
    /// is demanded from now on. (Where another handler reads it, that handler learns of it when the
    /// read is over.)
    pub(super) fn demand(&mut self, frame: FrameId, demand: Demand) {
        // A page of a run is not mapped before the others.
        let may_split = self.pager.frames().run_of(frame).is_none() && self.has_room_for(2);
        let read = self.frames.get_mut(frame.0 as usize);
        let Some(read) = read.filter(|read| read.is_pending && read.demand.is_none()) else {
            return;
        };
        read.demand = Some(demand);
        self.pager.counters().prefetch_hits.bump();
        if may_split {
            // Read by itself, if its neighbours are not read yet, before them.
            read.aim = Aim::Demand;
            self.requests += 2;
        }
    }

    // At the device.

    /// Hands accepted reads to the device, neighbours there as one request.
    pub(super) fn start(&mut self) {
        let slot_of = |frame| self.pager.frames().slot_of_fill(frame);
        // What a thread waits for goes first, and alone where its neighbours are not urgent.
        let reads = &self.frames;
        let is_ahead = |frame: FrameId| reads[frame.0 as usize].aim == Aim::Prefetch;
        self.accepted.sort_unstable_by_key(|frame| (is_ahead(*frame), slot_of(*frame)));
        let mut at = 0;
        while at < self.accepted.len() {
            let first = self.accepted[at];
            let (aim, slot) = (self.frames[first.0 as usize].aim, slot_of(first));
            let follows = |&(n, frame): &(u64, FrameId)| {
                let read = &self.frames[frame.0 as usize];
                slot_of(frame).0 == slot.0 + n && read.aim == aim && !read.attempts.any()
            };
            // What has failed before is read alone: a bad place costs no other page.
            let most = if self.frames[first.0 as usize].attempts.any() { 1 } else { usize::MAX };
            let rest = (0..).zip(self.accepted[at..].iter().copied());
            let neighbours = rest.take(most).take_while(|of| of.0 == 0 || follows(of));
            let count = self.transfers.mergeable(Op::Read, neighbours.map(|(_, frame)| frame));
            let frames = &self.accepted[at..at + count];
            let term = self.transfers.start(aim, slot, frames);
            for frame in frames {
                let read = &mut self.frames[frame.0 as usize];
                if !read.attempts.any() {
                    read.term = term;
                }
            }
            self.prefetches += usize::from(aim == Aim::Prefetch);
            at += count;
        }
        self.accepted.clear();
        self.requests = 0;
    }

    /// How long to wait for the device at most, where there is no other reason to wake.
    pub(super) fn wait_max(&self, idle: bool) -> Duration {
        const LOOK: Duration = Duration::from_millis(100);
        match self.transfers.is_idle() {
            false => LOOK.min(look_every(self.pager.health().deadline())),
            true if idle => LOOK,
            true => Duration::ZERO,
        }
    }

    /// Waits for news of the device, for faults and for calls of the handler; while requests are under way, looks
    /// for them first, as `polling` says.
    ///
    /// # Errors
    /// When the queue is of no use any more.
    pub(super) fn wait(&mut self, timeout: Duration, polling: Polling) -> Result<Polled> {
        let polling = if self.transfers.is_idle() { Polling::NOT } else { polling };
        let polled = polling.wait(timeout, |timeout| self.transfers.wait(timeout))?;
        polled.count(self.pager.counters());
        Ok(polled)
    }

    /// True if the device has reported something that was not looked at yet.
    pub(super) fn has_finished(&self) -> bool {
        self.transfers.has_finished()
    }

    /// The next read that is over. Frames of one that was overdue are given back.
    pub(super) fn next_finished(&mut self) -> Option<(Transfer, Result<()>)> {
        let (read, result) = self.transfers.next_finished()?;
        self.prefetches -= usize::from(read.aim() == Aim::Prefetch);
        self.pager.counters().read_times[self.index].add(read.took());
        if read.is_overdue() {
            read.pages().for_each(|(_, frame)| self.pager.pool().cancel_fill(frame));
        }
        Some((read, result))
    }

    // What was read.

    /// The page that was read into `frame` becomes `Moving`. `None`: it was discarded.
    fn end_fill(&mut self, frame: FrameId) -> Option<ReadPage> {
        self.frames[frame.0 as usize].is_pending = false;
        fill::end_fill(self.pager.memory(), self.pager.slots(), frame)
    }

    /// Maps neighbouring pages that were read into neighbouring frames, from `first` on. Threads that wait for them are
    /// woken by that, or later together with others. `more` pages follow.
    pub(super) fn map(
        &mut self,
        first: FrameId,
        count: usize,
        more: usize,
        context: WakeContext<'_>,
    ) {
        let frames = (first.0..).take(count).map(FrameId);
        let ended: ArrayVec<_, CHUNK_PAGES> = frames.map(|frame| self.end_fill(frame)).collect();
        let mut at = 0;
        while at < ended.len() {
            let frame = FrameId(first.0 + at as u32);
            let write = self.is_for_write(frame);
            let row = (frame.0..).map(FrameId).zip(&ended[at..]);
            let row =
                row.map_while(|(frame, read)| read.filter(|_| self.is_for_write(frame) == write));
            let row: ArrayVec<ReadPage, CHUNK_PAGES> = row.collect();
            at += match row.is_empty() {
                true => 1,
                false => self.map_row(frame, &row, write, more, context),
            };
        }
    }

    /// True if the page that was read into `frame` is mapped such that it can be written.
    fn is_for_write(&self, frame: FrameId) -> bool {
        let is_written = |demand: Demand| demand.write;
        self.pager.pool().moves_in(frame)
            || self.frames[frame.0 as usize].demand.is_some_and(is_written)
    }

    /// Maps the first pages of a row; returns how many it has looked at.
    fn map_row(
        &mut self,
        first: FrameId,
        row: &[ReadPage],
        write: bool,
        more: usize,
        context: WakeContext<'_>,
    ) -> usize {
        let page = self.pager.frames().page(first);
        let is_wanted = row.iter().any(|read| read.wanted);
        let wake = if is_wanted && self.wakes_at_once(context) { Wake::Yes } else { Wake::No };
        let Ok(mapped) = fill::map_fills(&self.pager, first, row, write, wake) else { return 1 };
        for (n, _) in (0..).zip(&row[..mapped]).filter(|(_, read)| read.wanted) {
            let page = PageId(page.0 + u64::from(n));
            // `None`: it was not read for a fault that this handler has seen.
            let demand = self.frames[(first.0 + n) as usize].demand;
            self.count_served(page, demand.map(|demand| demand.arrived));
            if wake == Wake::No {
                self.to_wake.push(page);
                if self.to_wake.len() >= WAKE_MAX {
                    self.wake_all(more, context);
                }
            }
        }
        mapped
    }

    /// Counts a fault that a read has served. `None`: another handler's.
    fn count_served(&self, page: PageId, arrived: Option<Instant>) {
        let counters = self.pager.counters();
        counters.faults_read.bump();
        match arrived {
            Some(arrived) => {
                let took = arrived.elapsed();
                probes::fault_answered(page, took);
                counters.fault_times[self.index].add(took);
            }
            None => counters.prefetch_hits.bump(),
        }
    }

    /// True if threads are woken by mapping their page, which saves a call. Not while pages are on
    /// their way that were asked for ahead: a thread that reads several of them goes on when all are
    /// there that can be. Nor by a handler that gives way: a thread that it wakes runs in its place at
    /// once, and must not find the page in its hands.
    fn wakes_at_once(&self, context: WakeContext<'_>) -> bool {
        self.prefetches == 0 && !context.sched.gives_way()
    }

    /// Wakes the threads that wait for pages mapped since the last time; `more` pages follow.
    pub(super) fn wake_all(&mut self, more: usize, context: WakeContext<'_>) {
        while let Some(page) = self.to_wake.pop() {
            self.rest_if_last(more + self.to_wake.len(), context);
            self.pager.wake(page);
        }
    }

    /// Notes that the handler has nothing to do but what it does now, if that is so and `more` is
    /// zero: the thread that it wakes next may run in its place for long.
    pub(super) fn rest_if_last(&self, more: usize, context: WakeContext<'_>) -> bool {
        let is_last = more == 0
            && self.is_idle()
            && self.pager.starved().len() == 0
            && !context.has_other_work;
        context.sched.rest(is_last);
        is_last
    }

    // Failure.

    /// A read failed. It is repeated, alone, at growing intervals, or its page is given up: at once where the store
    /// is broken.
    pub(super) fn read_failed(&mut self, frame: FrameId, error: &Error, is_broken: bool) {
        let (shown, deadline) = (self.transfers.shown(), self.pager.health().deadline());
        let read = &mut self.frames[frame.0 as usize];
        read.attempts.note(error);
        let (purpose, attempts) = (read.purpose(), read.attempts);
        let is_over = || read.term.is_over(shown, deadline);
        let is_useless = is_broken || fill::is_discarded(self.pager.memory(), frame);
        let pause = fill::retry_after(deadline, purpose, attempts, is_useless, is_over);
        if let Some(pause) = pause {
            return self.repeats.push(Repeat { frame, due: Instant::now() + pause });
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
        let due = due.filter(|_| self.transfers.room() > 0)?;
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
            self.frames[frame.0 as usize].aim = Aim::Demand;
            self.requests += 1;
            self.accepted.push(frame);
        }
    }

    /// A read that the device has not answered in time, and the error: its pages are to [fail](Self::fail), and its
    /// frames stay with the device until it answers.
    pub(super) fn next_overdue(&mut self, from: &mut usize) -> Option<(Transfer, Error)> {
        const INTERVAL: Duration = Duration::from_millis(50);
        let overdue = self.transfers.next_overdue(from, INTERVAL);
        self.pager.counters().read_errors.add(u64::from(overdue.is_some()));
        overdue
    }

    /// True if all that the device was asked for has passed its deadline.
    pub(super) fn is_device_silent(&self) -> bool {
        self.accepted.is_empty() && self.transfers.under_way().all(Transfer::is_overdue)
    }

    /// The time that counts for deadlines.
    pub(super) fn shown(&mut self) -> Duration {
        self.transfers.shown()
    }
}
