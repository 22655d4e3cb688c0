//! Handlers: the threads that resolve page faults.
//!
//! A [`Handler`] is one thread. It reads many faults at once, looks at each page's word, answers
//! what needs no device at once, starts reads for the rest and installs pages as the reads
//! finish. It never waits for one fault while another can be served, and never allocates after its
//! start. This module is its loop; what it does for a fault is in [`fault_queue`](super::fault_queue), when and where
//! it runs in [`sched`](super::sched).
//!
//! | module | does |
//! |---|---|
//! | `fault_queue` | one handler's faults: answered, or kept until they can be |
//! | `in_memory` | what needs no device |
//! | `fill` | the steps of a page that comes from the store, for `sigbus` too |
//! | `reads` | has the handler's transfers; repeats what failed; wakes threads |
//! | `huge_reads` | reads chunks that a stream leads to whole |
//! | `prefetch` | what faults and requests lead to |
//! | `no_room` | faults that wait for room, and those that are given up |
//! | `sigbus` | threads that serve their own faults |
//! | `supervisor` | the thread that watches the others |

use crate::base::error::Result;
use crate::base::gate::{Closed, LOOK_EVERY};
use crate::paging::config::RegionConfig;
use crate::paging::diagnostics;
use crate::paging::fault::fault_queue::FaultQueue;
use crate::paging::fault::sched::ThreadSched;
use crate::paging::fault::starved::FAULTS_MAX;
use crate::paging::pager::Pager;
use crate::sys::thread::THREAD_BYTES;
use crate::sys::uffd::Message;
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
    pub(in crate::paging) fn bytes(frames: usize) -> usize {
        size_of::<Handler>() + ThreadSched::BYTES + FaultQueue::bytes(frames) + THREAD_BYTES
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
        self.sched.faults_read(count);
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
                    gate.note_fault(fault.thread);
                    self.faults.put_off(fault, Instant::now());
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
