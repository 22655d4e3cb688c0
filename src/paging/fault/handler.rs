//! Handlers: the threads that resolve page faults.
//!
//! A [`Handler`] is one thread. It reads many faults at once and gives each to its [`FaultQueue`], which looks at the
//! page's word: it answers what needs no device at once, starts reads for the rest, installs pages as the reads finish,
//! and keeps what has to wait: for another thread or for a place at the device here, for room with the region's
//! `starved` faults. It never waits for one fault while another can be served, and never allocates after its
//! start. When and where it runs is in [`sched`](super::sched).
//!
//! | module | does |
//! |---|---|
//! | `in_memory` | what needs no device |
//! | `fill` | the steps of a page that comes from the store, for `sigbus` too |
//! | `reads` | has the handler's transfers; repeats what failed; wakes threads |
//! | `huge_reads` | reads chunks that a stream leads to whole |
//! | `prefetch` | what faults and requests lead to |
//! | `no_room` | faults that wait for room, and those that are given up |
//! | `sigbus` | threads that serve their own faults |
//! | `supervisor` | the thread that watches the others |
//!
//! # Invariants
//! 1. Every fault is answered: its page is installed, its thread woken because another thread installed
//!    it, or failed with SIGBUS; or it is kept until the state that blocks it has passed.
//! 2. Faults are served in the order in which they arrive, as far as they want the same: those
//!    that wait are looked at before new ones.
//! 3. A page with content is lost only when a request that the device has got failed, or was not
//!    answered, for a whole deadline; never because its fault waited here, or for room.

use crate::base::deadline::Term;
use crate::base::error::Result;
use crate::base::gate::{Closed, LOOK_EVERY};
use crate::base::units::PageId;
use crate::paging::config::RegionConfig;
use crate::paging::diagnostics;
use crate::paging::fault::huge_reads::HugeReads;
use crate::paging::fault::in_memory;
use crate::paging::fault::no_room;
use crate::paging::fault::prefetch::{self, Prefetch};
use crate::paging::fault::reads::{Demand, Reads, WakeContext};
use crate::paging::fault::sched::ThreadSched;
use crate::paging::fault::starved::{FAULTS_HELD_MAX, FAULTS_MAX, WAITING_MAX, take_first};
use crate::paging::fault::status::FaultStatus;
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::protocol;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::paging::probes::{self, StallReason};
use crate::paging::readahead::FaultOn;
use crate::paging::transfer::{Transfer, check_read};
use crate::store::Store;
use crate::sys::thread::THREAD_BYTES;
use crate::sys::uffd::{Fault, Message};
use arrayvec::ArrayVec;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One handler thread's state.
pub(in crate::paging) struct Handler {
    pager: Arc<Pager>,
    sched: ThreadSched,
    faults: FaultQueue,
    messages: [Message; FAULTS_MAX],
}

impl Handler {
    /// Prepares a handler: all the memory it will ever use.
    ///
    /// # Errors
    /// The store's error when it is asked for a queue.
    pub(in crate::paging) fn new(
        pager: Arc<Pager>,
        index: usize,
        config: &RegionConfig,
    ) -> Result<Handler> {
        let poll = config.poll.unwrap_or_default();
        let sched = ThreadSched::new(Arc::clone(pager.sched()), index, poll);
        let faults = FaultQueue::new(Arc::clone(&pager), index)?;
        Ok(Handler { pager, sched, faults, messages: [Message::EMPTY; FAULTS_MAX] })
    }

    /// Bytes of a handler and its thread, for a region of this number of frames.
    pub(in crate::paging) fn bytes(store: &dyn Store, frames: usize) -> usize {
        size_of::<Handler>() + ThreadSched::BYTES + FaultQueue::bytes(store, frames) + THREAD_BYTES
    }

    /// Serves faults until the region stops.
    pub(in crate::paging) fn run(&mut self) {
        self.sched.adopt();
        while !self.pager.health().is_stopping() {
            if let Err(error) = self.turn() {
                diagnostics::fatal("a handler lost its userfaultfd or its device queue", &error);
            }
        }
    }

    /// Serves what there is, then waits for more.
    fn turn(&mut self) -> Result<()> {
        if self.pager.fork().gate().is_closed(Closed::All) {
            self.stand_still()?;
        }
        if !self.sched.begin_turn() && !self.faults.is_pending() {
            return self.sched.stand_by();
        }
        self.faults.retry_waiting();
        self.faults.serve_starved();
        let count = self.read_faults()?;
        self.faults.submit(&self.sched);
        self.faults.wait(count == 0, &mut self.sched)?;
        self.faults.complete(&mut self.sched);
        self.sched.follow_faults();
        Ok(())
    }

    /// Waits while the process forks. Faults are kept for later: one of the thread that forks would
    /// wait for the fork, and the fork for it.
    fn stand_still(&mut self) -> Result<()> {
        let pager = Arc::clone(&self.pager);
        let gate = pager.fork().gate();
        gate.stand_still(Closed::All, || {
            if self.faults.is_full() {
                std::thread::sleep(LOOK_EVERY);
                return Ok(());
            }
            let count = pager.mapper().read(&mut self.messages)?;
            for at in 0..count {
                self.note_moved(self.messages[at]);
                if let Some(fault) = self.messages[at].fault() {
                    if gate.note_fault(fault.thread, fault.address) {
                        pager.mapper().wake(fault.address);
                    } else {
                        self.faults.put_off(fault, Instant::now());
                    }
                }
            }
            self.sched.wait_for_call(pager.mapper().raw_fd(), LOOK_EVERY)
        })
    }

    /// Reads and answers all pending faults; returns how many there were.
    fn read_faults(&mut self) -> Result<usize> {
        if self.faults.is_full() {
            // They keep the descriptor readable, so that waiting for news ends at once.
            const PAUSE: Duration = Duration::from_micros(50);
            std::thread::sleep(PAUSE);
            return Ok(1);
        }
        let mut seen = 0;
        loop {
            let count = self.pager.mapper().read(&mut self.messages)?;
            if count > 0 {
                self.answer_messages(count, Instant::now());
            }
            seen += count;
            if count < FAULTS_MAX {
                return Ok(seen);
            }
        }
    }

    /// Answers the faults among the first `count` messages.
    fn answer_messages(&mut self, count: usize, arrived: Instant) {
        for at in 0..count {
            let message = self.messages[at];
            self.note_moved(message);
            if let Some(fault) = message.fault() {
                let is_alone = self.faults.rest_if_last(count - 1, &self.sched);
                self.sched.fault_arrived(fault.thread, is_alone);
                self.faults.answer(fault, arrived);
            }
        }
    }

    fn note_moved(&self, message: Message) {
        if let Some(from) = message.moved_from() {
            diagnostics::broken(format_args!(
                "the program has moved far memory at {from:#x} (mremap): what is not in memory \
                 would read as zero there"
            ));
        }
    }
}

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

/// The faults that a handler has read: answered, or kept.
struct FaultQueue {
    pager: Arc<Pager>,
    /// The handler's.
    index: usize,
    /// In the order in which they arrived.
    waiting: VecDeque<Waiting>,
    reads: Reads,
    huge_reads: HugeReads,
    prefetch: Prefetch,
}

impl FaultQueue {
    /// Bytes that one allocates, for a region of this number of frames. Room for thousands of faults that
    /// wait is left out: it gets memory when they do.
    fn bytes(store: &dyn Store, frames: usize) -> usize {
        Reads::bytes(store, frames)
    }

    /// Prepares all the memory that the handler will ever use.
    ///
    /// # Errors
    /// The store's error when it is asked for a queue.
    fn new(pager: Arc<Pager>, index: usize) -> Result<FaultQueue> {
        Ok(FaultQueue {
            index,
            waiting: VecDeque::with_capacity(FAULTS_HELD_MAX),
            reads: Reads::new(Arc::clone(&pager), index)?,
            huge_reads: HugeReads::new(Arc::clone(&pager)),
            prefetch: Prefetch::new(Arc::clone(&pager)),
            pager,
        })
    }

    /// True if the handler has begun something that it has to finish.
    fn is_pending(&self) -> bool {
        !self.reads.is_idle()
            || !self.waiting.is_empty()
            || self.prefetch.has_work()
            || !self.huge_reads.is_idle()
    }

    /// True if the maximum number of faults waits, and no more may be read.
    fn is_full(&self) -> bool {
        self.waiting.len() + self.pager.starved().len() >= WAITING_MAX
    }

    /// Notes that the handler has nothing to do but what it does now, if that is so and `more` is
    /// zero.
    fn rest_if_last(&self, more: usize, sched: &ThreadSched) -> bool {
        self.reads.rest_if_last(more, self.context(sched))
    }

    fn context<'a>(&self, sched: &'a ThreadSched) -> WakeContext<'a> {
        let has_other_work = !self.waiting.is_empty() || self.prefetch.is_waiting();
        WakeContext { sched, has_other_work }
    }

    // Faults.

    /// Answers a fault, or keeps it for later.
    fn answer(&mut self, fault: Fault, arrived: Instant) {
        self.answer_again(fault, arrived, None);
    }

    /// Keeps a fault for later, whatever its page is.
    fn put_off(&mut self, fault: Fault, arrived: Instant) {
        let term = Term::start(self.reads.shown());
        self.waiting.push_back(Waiting { fault, arrived, why: FaultStatus::TryAgain, term });
    }

    /// Looks at all faults that wait for another thread or for the device, the oldest first.
    fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let waiting = take_first(&mut self.waiting).expect("counted above");
            self.answer_again(waiting.fault, waiting.arrived, Some(waiting));
        }
    }

    fn answer_again(&mut self, fault: Fault, arrived: Instant, before: Option<Waiting>) {
        let page = self.pager.table().page_at(fault.address);
        let must_wait = self.pager.starved().len() > 0
            && no_room::must_wait(self.pager.memory(), self.pager.health(), page);
        if must_wait || !self.serve(page, fault, arrived, before) {
            no_room::wait_for_room(self.pager.memory(), self.pager.health(), page, fault, arrived);
        }
    }

    /// Brings the page of a fault in, or keeps the fault, unless there is no room: `false`.
    fn serve(
        &mut self,
        page: PageId,
        fault: Fault,
        arrived: Instant,
        before: Option<Waiting>,
    ) -> bool {
        match self.resolve(page, fault, arrived) {
            FaultStatus::Resolved => {
                let took = arrived.elapsed();
                probes::fault_answered(page, took);
                self.pager.counters().fault_times[self.index].add(took);
            }
            FaultStatus::Reading => {}
            FaultStatus::NoRoom => return false,
            why @ (FaultStatus::TryAgain | FaultStatus::QueueFull) => {
                self.keep(fault, arrived, why, before);
            }
        }
        true
    }

    /// Keeps a fault that waits for another thread, or for a place at the device.
    fn keep(&mut self, fault: Fault, arrived: Instant, why: FaultStatus, before: Option<Waiting>) {
        let (shown, deadline) = (self.reads.shown(), self.pager.health().deadline());
        let before = before.filter(|before| before.why == why);
        if why == FaultStatus::QueueFull && before.is_none() {
            probes::stalled(StallReason::QueueFull);
        }
        let mut term = before.map_or_else(|| Term::start(shown), |before| before.term);
        // All that the device has got it has not answered for a whole deadline: it will not even
        // get this one.
        if why == FaultStatus::QueueFull
            && term.is_over(shown, deadline)
            && self.reads.is_device_silent()
        {
            let page = self.pager.table().page_at(fault.address);
            let slot = self.pager.word(page).load().slot();
            let cause = self.pager.slots().timed_out(slot);
            if no_room::give_up(&self.pager, page, &cause) {
                return;
            }
        }
        self.waiting.push_back(Waiting { fault, arrived, why, term });
    }

    /// Serves the region's faults that wait for room, the oldest first, as far as there is some.
    fn serve_starved(&mut self) {
        if self.pager.starved().len() == 0 {
            return;
        }
        let mut round = self.pager.starved().begin(no_room::is_stuck(self.pager.health()));
        while let Some(mut starved) = self.pager.starved().take(&mut round) {
            let (fault, arrived, class) = (starved.fault(), starved.arrived(), starved.class());
            let page = self.pager.table().page_at(fault.address);
            if !self.serve(page, fault, arrived, None) {
                let (pager, shown) = (&self.pager, self.pager.starved().shown());
                if !no_room::give_up_stalled(pager, page, class, starved.stall(), shown) {
                    if pager.starved().put_back(starved, &mut round) {
                        continue;
                    }
                    break;
                }
            }
            no_room::stop_waiting(self.pager.pool(), &starved);
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
                _ => in_memory::resolve_in_memory(&self.pager, page, word, fault.protected),
            };
            if let Some(status) = status {
                return status;
            }
        }
    }

    /// `Stored`: reads the page, and what probably comes next.
    fn start_read(&mut self, page: PageId, stored: Word, demand: Demand) -> Option<FaultStatus> {
        let window = prefetch::next_window(&self.pager, page, FaultOn::StoredPage);
        let together = window.is_some() || self.pager.memory().policy().lock().left_lately(page);
        let status = self.reads.accept(page, stored, demand, together);
        if let Some(window) = window {
            self.prefetch.follow(page, window, &mut self.reads, &mut self.huge_reads);
        }
        status
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
            if let Some(window) = prefetch::next_window(&self.pager, page, FaultOn::PageReadAhead) {
                self.prefetch.follow(page, window, &mut self.reads, &mut self.huge_reads);
            }
        }
        Some(FaultStatus::Reading)
    }

    // The device.

    /// Maps chunks that are due, and hands all reads that are due to the device.
    fn submit(&mut self, sched: &ThreadSched) {
        let context = self.context(sched);
        self.huge_reads.map_ready(&mut self.reads, context);
        self.reads.wake_all(0, context);
        self.prefetch.accept_requests(&mut self.reads, &mut self.huge_reads);
        self.prefetch.note_starving();
        self.reads.accept_repeats();
        self.reads.start();
    }

    /// Waits for the device, faults and calls. `idle`: the turn has found nothing to do so far.
    ///
    /// # Errors
    /// When the device's queue is of no use any more.
    fn wait(&mut self, idle: bool, sched: &mut ThreadSched) -> Result<()> {
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
    fn complete(&mut self, sched: &mut ThreadSched) {
        while let Some((read, result)) = self.reads.next_finished() {
            sched.device_answered(read.took());
            if !read.is_overdue() {
                self.complete_read(&read, &result, self.context(sched));
            }
        }
        let context = self.context(sched);
        self.huge_reads.map_ready(&mut self.reads, context);
        let mut from = 0;
        while let Some((read, cause)) = self.reads.next_overdue(&mut from) {
            for (_, frame) in read.pages() {
                self.huge_reads.break_up(frame, &mut self.reads, context);
            }
            read.pages().for_each(|(_, frame)| self.reads.fail(frame, &cause));
        }
        self.reads.wake_all(0, context);
    }

    fn complete_read(&mut self, read: &Transfer, result: &Result<()>, context: WakeContext<'_>) {
        let FaultQueue { pager, reads, huge_reads, .. } = self;
        let mut to_map: ArrayVec<FrameId, CHUNK_PAGES> = ArrayVec::new();
        for (_, frame) in read.pages() {
            match check_read(pager.slots(), pager.frames(), pager.counters(), frame, result) {
                Ok(()) if huge_reads.page_read(frame) => {}
                Ok(()) => to_map.push(frame),
                Err(error) => {
                    huge_reads.break_up(frame, reads, context);
                    reads.read_failed(frame, &error, read.is_refused());
                }
            }
        }
        let page = |frame: &FrameId| pager.frames().page(*frame).0;
        let mut more = to_map.len();
        for row in to_map.chunk_by(|a, b| a.0 + 1 == b.0 && page(a) + 1 == page(b)) {
            more -= row.len();
            reads.map(row[0], row.len(), more, context);
        }
    }
}
