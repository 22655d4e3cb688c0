//! Work: what one handler does about the faults that it has read.
//!
//! A fault is answered at once where memory is enough (`in_memory`), or leads to a read (`reads`), or
//! waits: here for another thread or for a place at the device, or with the region's `starved` faults
//! for room. `huge_reads` and `prefetch` read what was not touched yet.
//!
//! # Invariants
//! 1. Every fault is answered: its page is installed, its thread woken because another thread installed
//!    it, or failed with SIGBUS; or it is kept until the state that blocks it has passed.
//! 2. Faults are served in the order in which they arrive, as far as they want the same: those
//!    that wait are looked at before new ones.
//! 3. A page with content is lost only when a request that the device has got failed, or was not
//!    answered, for a whole deadline; never because its fault waited here, or for room.

use crate::base::deadline::Term;
use crate::base::error::{Error, Result};
use crate::base::units::PageId;
use crate::paging::fault::fill;
use crate::paging::fault::huge_reads::HugeReads;
use crate::paging::fault::in_memory;
use crate::paging::fault::no_room;
use crate::paging::fault::prefetch::Prefetch;
use crate::paging::fault::reads::{Demand, Reads, Turn};
use crate::paging::fault::sched::ThreadSched;
use crate::paging::fault::starved::{FAULTS_HELD_MAX, WAITING_MAX, take_first};
use crate::paging::fault::status::FaultStatus;
use crate::paging::page::protocol;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::readahead::FaultOn;
use crate::sys;
use crate::sys::uffd::Fault;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A fault that waits for another thread, or for a place at the device.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    fault: Fault,
    /// When its event was read.
    arrived: Instant,
    /// The wait's reason and its beginning.
    why: FaultStatus,
    term: Term,
}

/// See [module](self).
pub(super) struct Work {
    pager: Arc<Pager>,
    /// The handler's.
    index: usize,
    /// In the order in which they arrived.
    waiting: VecDeque<Waiting>,
    reads: Reads,
    huge_reads: HugeReads,
    prefetch: Prefetch,
}

impl Work {
    /// Bytes that one allocates, for a region of this number of frames. Room for thousands of faults that
    /// wait is left out: it gets memory when they do.
    pub(super) fn bytes(frames: usize) -> usize {
        Reads::bytes(frames)
    }

    /// Prepares all the memory that the handler will ever use.
    ///
    /// # Errors
    /// The store's error when it is asked for a queue.
    pub(super) fn new(pager: Arc<Pager>, index: usize) -> Result<Work> {
        Ok(Work {
            index,
            waiting: VecDeque::with_capacity(FAULTS_HELD_MAX),
            reads: Reads::new(Arc::clone(&pager), index)?,
            huge_reads: HugeReads::new(Arc::clone(&pager)),
            prefetch: Prefetch::new(Arc::clone(&pager)),
            pager,
        })
    }

    /// Whether the handler has begun something that it has to finish.
    pub(super) fn is_pending(&self) -> bool {
        !self.reads.is_idle()
            || !self.waiting.is_empty()
            || self.prefetch.has_work()
            || !self.huge_reads.is_idle()
    }

    /// Whether the maximum number of faults waits, and no more may be read.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() + self.pager.starved().len() >= WAITING_MAX
    }

    /// Notes that the handler has nothing to do but what it does now, if that is so and `more` is
    /// zero.
    pub(super) fn rest_if_last(&self, more: usize, sched: &ThreadSched) -> bool {
        self.reads.rest_if_last(more, self.turn(sched))
    }

    fn turn<'a>(&self, sched: &'a ThreadSched) -> Turn<'a> {
        let has_other_work = !self.waiting.is_empty() || self.prefetch.is_waiting();
        Turn { sched, has_other_work }
    }

    // Faults.

    /// Answers a fault, or keeps it for later.
    pub(super) fn answer(&mut self, fault: Fault, arrived: Instant) {
        self.answer_again(fault, arrived, None);
    }

    /// Keeps a fault for later, whatever its page is.
    pub(super) fn put_off(&mut self, fault: Fault, arrived: Instant) {
        let term = Term::start(self.reads.shown());
        self.waiting.push_back(Waiting { fault, arrived, why: FaultStatus::TryAgain, term });
    }

    /// Looks at all faults that wait for another thread or for the device, the oldest first.
    pub(super) fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let waiting = take_first(&mut self.waiting).expect("counted above");
            self.answer_again(waiting.fault, waiting.arrived, Some(waiting));
        }
    }

    fn answer_again(&mut self, fault: Fault, arrived: Instant, before: Option<Waiting>) {
        let page = self.pager.page_at(fault.address);
        if self.pager.starved().len() > 0 && no_room::must_wait(&self.pager, page) {
            return no_room::wait_for_room(&self.pager, page, fault, arrived);
        }
        match self.resolve(page, fault, arrived) {
            FaultStatus::Resolved => self.count_resolved(arrived),
            FaultStatus::Reading => {}
            FaultStatus::NoRoom => no_room::wait_for_room(&self.pager, page, fault, arrived),
            why @ (FaultStatus::TryAgain | FaultStatus::QueueFull) => {
                self.keep(fault, arrived, why, before);
            }
        }
    }

    fn count_resolved(&self, arrived: Instant) {
        self.pager.counters().fault_times[self.index].add(arrived.elapsed());
    }

    /// Keeps a fault that waits for another thread, or for a place at the device.
    fn keep(&mut self, fault: Fault, arrived: Instant, why: FaultStatus, before: Option<Waiting>) {
        let (shown, deadline) = (self.reads.shown(), self.pager.health().deadline());
        let before = before.filter(|before| before.why == why);
        let mut term = before.map_or_else(|| Term::start(shown), |before| before.term);
        // All that the device has got it has not answered for a whole deadline: it will not even
        // get this one.
        if why == FaultStatus::QueueFull
            && term.is_over(shown, deadline)
            && self.reads.is_device_silent()
        {
            let page = self.pager.page_at(fault.address);
            let slot = self.pager.word(page).load().slot();
            let cause = no_room::timed_out(&self.pager, slot);
            if no_room::give_up(&self.pager, page, &cause) {
                return;
            }
        }
        self.waiting.push_back(Waiting { fault, arrived, why, term });
    }

    /// Serves the region's faults that wait for room, the oldest first, as far as there is some.
    pub(super) fn serve_starved(&mut self) {
        if self.pager.starved().len() == 0 {
            return;
        }
        let mut round = self.pager.starved().begin(no_room::is_stuck(&self.pager));
        while let Some(mut starved) = self.pager.starved().take(&mut round) {
            let (fault, arrived, class) = (starved.fault(), starved.arrived(), starved.class());
            let page = self.pager.page_at(fault.address);
            match self.resolve(page, fault, arrived) {
                FaultStatus::Resolved => self.count_resolved(arrived),
                FaultStatus::Reading => {}
                FaultStatus::NoRoom => {
                    let (pager, shown) = (&self.pager, self.pager.starved().shown());
                    if !no_room::give_up_stalled(pager, page, class, starved.stall(), shown) {
                        if pager.starved().put_back(starved, &mut round) {
                            continue;
                        }
                        break;
                    }
                }
                why @ (FaultStatus::TryAgain | FaultStatus::QueueFull) => {
                    self.keep(fault, arrived, why, None);
                }
            }
            no_room::stop_waiting(&self.pager, &starved);
        }
        if self.pager.starved().len() > 0 {
            self.pager.pool().waiters().call_evictor();
        }
    }

    /// Brings the faulting page in, as far as that goes without waiting.
    fn resolve(&mut self, page: PageId, fault: Fault, arrived: Instant) -> FaultStatus {
        let demand = Demand { write: fault.write, arrived };
        loop {
            let word = self.pager.word(page).load();
            let status = match word.state() {
                State::Stored => self.start_read(page, word, demand),
                State::Filling if !word.dead() => self.join_read(page, word, demand),
                _ => in_memory::resolve_in_memory(&self.pager, page, word, &fault),
            };
            if let Some(status) = status {
                return status;
            }
        }
    }

    /// `Stored`: reads the page, and what probably comes next.
    fn start_read(&mut self, page: PageId, stored: Word, demand: Demand) -> Option<FaultStatus> {
        let status = self.reads.accept(page, stored, Some(demand))?;
        if status == FaultStatus::Reading {
            let (reads, huge_reads) = (&mut self.reads, &mut self.huge_reads);
            self.prefetch.follow(page, FaultOn::StoredPage, reads, huge_reads);
        }
        Some(status)
    }

    /// `Filling`: the fault waits for the read, which may have been begun ahead of it.
    fn join_read(&mut self, page: PageId, filling: Word, demand: Demand) -> Option<FaultStatus> {
        if !protocol::want(self.pager.word(page), filling) {
            return None;
        }
        let frame = filling.frame().expect("a page being read has a frame");
        self.reads.demand(frame, demand);
        if self.pager.frames().run_of(frame).is_some() && !filling.wanted() {
            // The first fault on a chunk that may be held: the stream has got there.
            if !self.huge_reads.contains(frame) {
                self.pager.sched().call_all();
            }
            let (reads, huge_reads) = (&mut self.reads, &mut self.huge_reads);
            self.prefetch.follow(page, FaultOn::PageReadAhead, reads, huge_reads);
        }
        Some(FaultStatus::Reading)
    }

    // The device.

    /// Maps chunks that are due, and hands all reads that are due to the device.
    pub(super) fn submit(&mut self, sched: &ThreadSched) {
        let turn = self.turn(sched);
        self.huge_reads.map_ready(&mut self.reads, turn);
        self.reads.wake_all(0, turn);
        self.prefetch.accept_requests(&mut self.reads, &mut self.huge_reads);
        self.prefetch.note_starving();
        self.reads.accept_repeats();
        while let Some(token) = self.reads.start() {
            let cause = Error::Os { call: "the store", errno: sys::EIO };
            self.abandon(token, &cause, self.turn(sched));
        }
    }

    /// Waits for the device, faults and calls. `idle`: the turn has found nothing to do so far.
    ///
    /// # Errors
    /// When the device's queue is of no use any more.
    pub(super) fn wait(&mut self, idle: bool, sched: &mut ThreadSched) -> Result<()> {
        let timeout = self.wait_max(idle);
        let for_faults = idle && self.rest_if_last(0, sched);
        let polled = self.reads.wait(timeout, sched.about_to_wait(for_faults))?;
        sched.waited(idle && !self.reads.has_finished(), polled);
        Ok(())
    }

    /// How long to wait at most.
    fn wait_max(&self, idle: bool) -> Duration {
        const OTHER_THREAD: Duration = Duration::from_micros(50);
        const ROOM: Duration = Duration::from_millis(1);
        if self.waiting.iter().any(|waiting| waiting.why == FaultStatus::TryAgain) {
            return OTHER_THREAD;
        }
        let waits = !self.waiting.is_empty() || self.prefetch.is_waiting();
        let max = match waits || self.pager.starved().len() > 0 {
            true => ROOM,
            false => self.reads.wait_max(idle),
        };
        self.reads.next_repeat().map_or(max, |repeat| max.min(repeat))
    }

    /// Maps what the device has read, and deals with what it has not.
    pub(super) fn complete(&mut self, sched: &mut ThreadSched) {
        while let Some(finished) = self.reads.next_finished() {
            sched.device_answered(finished.took, finished.bytes);
            let turn = self.turn(sched);
            let frames = finished.frames();
            for (n, &frame) in frames.iter().enumerate() {
                match fill::check_read(&self.pager, frame, &finished.result) {
                    Ok(()) if self.huge_reads.page_read(frame) => {}
                    Ok(()) => self.reads.map(frame, frames.len() - 1 - n, turn),
                    Err(error) => {
                        self.huge_reads.break_up(frame, &mut self.reads, turn);
                        self.reads.read_failed(frame, &error);
                    }
                }
            }
        }
        let turn = self.turn(sched);
        self.huge_reads.map_ready(&mut self.reads, turn);
        let mut from = 0;
        while let Some(token) = self.reads.next_overdue(&mut from) {
            let cause = self.reads.overdue_error(token);
            self.abandon(token, &cause, turn);
        }
        self.reads.wake_all(0, turn);
    }

    /// Gives up the pages of a read.
    fn abandon(&mut self, token: usize, cause: &Error, turn: Turn<'_>) {
        let (frames, count) = self.reads.abandon(token);
        for frame in &frames[..count] {
            self.huge_reads.break_up(*frame, &mut self.reads, turn);
        }
        frames[..count].iter().for_each(|frame| self.reads.fail(*frame, cause));
        self.reads.free_if_refused(token);
    }
}
