//! Handlers: resolve page faults by bringing pages in from the store.
//!
//! A [`Handler`] is one thread. It reads many faults at once, looks at each page's word, answers
//! what needs no device at once, starts reads for the rest and installs pages as the reads
//! finish. It never waits for one fault while another can be served. Uses `store`, `page`; owned
//! by [`Region`](crate::paging::region::Region). Never allocates after its start.
//!
//! # Invariants
//! 1. A page is installed only by the thread that made its word `Moving`.
//! 2. Every fault is answered: installed, woken because a racer installed it, kept in `waiting`,
//!    or with the region's [starved](crate::paging::starved) ones, until the state that blocks it has
//!    passed, or failed with SIGBUS.
//! 3. A frame under a read is touched by nobody until the read is reported.
//! 4. Faults are served in the order in which they arrive, as far as they want the same: those
//!    that wait are looked at before new ones.
//! 5. A page with content is lost only when a request that the device has got failed, or was not
//!    answered, for a whole deadline; never because its fault waited here, or for room.
//!
//! | module | does |
//! |---|---|
//! | `reads` | hands reads to the device, installs what it answers, repeats what failed |
//! | `chunks` | reads chunks that a stream leads to whole |

use crate::base::deadline::{Stopwatch, Term, look_every};
use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{PageCount, PageId};
use crate::paging::config::RegionConfig;
use crate::paging::diagnostics;
use crate::paging::fault::huge_reads::Chunk;
use crate::paging::fault::in_memory::{Answer, Asked};
use crate::paging::fault::reads::{Access, Fill, Intent, Read, Retry, WAKE_BYTES_MAX};
use crate::paging::fault::sched::ThreadSched;
use crate::paging::page::protocol;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::readahead::{FaultOn, PrefetchRun, Window};
use crate::paging::starved::{FAULTS_HELD_MAX, FAULTS_MAX, WAITING_MAX};
use crate::store::{Completion, Queue};
use crate::sys;
use crate::sys::uffd::{Fault, Message};
use crate::sys::vm::KERNEL_PAGE;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Requests a handler keeps in flight.
pub(in crate::paging) const DEPTH: u32 = 256;
/// A fault that waits for another thread, or for a place at the device.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    fault: Fault,
    /// When its event was read.
    arrived: Instant,
    /// What it waits for, and since when.
    why: Answer,
    term: Term,
}

/// One handler thread's state.
pub(in crate::paging) struct Handler {
    pub(in crate::paging) pager: Arc<Pager>,
    pub(in crate::paging) index: usize,
    pub(in crate::paging) queue: Box<dyn Queue>,
    ahead: Option<PrefetchRun>,
    /// It waits for a run of frames, not for room.
    pub(in crate::paging) waits_for_run: bool,
    messages: [Message; FAULTS_MAX],
    /// In the order in which they arrived.
    waiting: VecDeque<Waiting>,
    pub(in crate::paging) fills: Vec<Fill>,
    /// Reads that failed, to be repeated.
    pub(in crate::paging) retries: Vec<Retry>,
    pub(in crate::paging) reads: Vec<Option<Read>>,
    pub(in crate::paging) free_reads: Vec<usize>,
    /// Reads in flight that were asked for ahead of faults.
    pub(in crate::paging) reads_ahead: usize,
    pub(in crate::paging) intents: Vec<Intent>,
    /// When the event of the fault being answered was read.
    pub(in crate::paging) arrived: Instant,
    finished: Vec<Completion>,
    /// By run of frames: the chunk that this handler reads into it.
    pub(in crate::paging) chunks: Vec<Option<Chunk>>,
    /// How many of them there are.
    pub(in crate::paging) chunks_open: usize,
    /// Pages that were installed and whose waiters have not been woken yet.
    pub(in crate::paging) wakes: Vec<PageId>,
    /// It waits for room to read ahead.
    starving: bool,
    pub(in crate::paging) sched: ThreadSched,
    pub(in crate::paging) deadline: Duration,
    /// Tells how long the device has had a read.
    pub(in crate::paging) watch: Stopwatch,
    pub(in crate::paging) checked: Instant,
}

impl Handler {
    /// Prepares a handler: all the memory it will ever use.
    pub(in crate::paging) fn new(
        pager: Arc<Pager>,
        index: usize,
        config: &RegionConfig,
    ) -> Result<Handler> {
        let mut queue = pager.store.open_queue(DEPTH)?;
        queue.watch(pager.uffd.raw_fd())?;
        queue.watch(pager.sched.bell_fd(index))?;
        let frames = pager.frames.count();
        Ok(Handler {
            index,
            queue,
            ahead: None,
            waits_for_run: false,
            messages: [Message::EMPTY; FAULTS_MAX],
            waiting: VecDeque::with_capacity(FAULTS_HELD_MAX),
            fills: Vec::with_capacity(frames),
            retries: Vec::with_capacity(frames),
            reads: vec![None; DEPTH as usize],
            free_reads: (0..DEPTH as usize).collect(),
            reads_ahead: 0,
            intents: vec![Intent::idle(); frames],
            arrived: Instant::now(),
            finished: Vec::with_capacity(DEPTH as usize),
            chunks: vec![None; pager.frames.runs()],
            chunks_open: 0,
            wakes: Vec::with_capacity(WAKE_BYTES_MAX / KERNEL_PAGE),
            starving: false,
            sched: ThreadSched::new(
                Arc::clone(&pager.sched),
                index,
                config.spin,
                config.poll.unwrap_or_default(),
            ),
            deadline: config.deadline,
            watch: Stopwatch::start(config.deadline, Instant::now()),
            checked: Instant::now(),
            pager,
        })
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
        if !self.sched.begin_turn() && !self.has_work() {
            return self.sched.stand_by();
        }
        self.retry_waiting();
        self.serve_starved();
        let news = self.read_faults()?;
        self.sched.faults_read(news);
        self.map_chunks();
        self.wake_all(0);
        self.read_ahead();
        self.note_starving();
        self.start_retries();
        self.start_reads()?;
        self.wait(news == 0 && self.finished.is_empty())?;
        while let Some(completion) = self.finished.pop() {
            self.finish_read(completion);
        }
        self.map_chunks();
        self.check_deadlines();
        self.wake_all(0);
        Ok(())
    }

    /// Waits for faults, calls and the device. `idle`: the turn has found nothing to do so far.
    fn wait(&mut self, idle: bool) -> Result<()> {
        let timeout = self.wait_for(idle);
        let for_faults = idle && self.rest_if_last(0);
        self.queue.poll_by(self.sched.about_to_wait(for_faults));
        let (queue, finished) = (&mut self.queue, &mut self.finished);
        let mut done = |completion| finished.push(completion);
        self.pager.guarded(|| queue.wait(timeout, &mut done)).unwrap_or(Ok(()))?;
        let polled = self.queue.polled();
        if polled.waits > 0 {
            let counters = self.pager.counters();
            counters.polls.add(polled.waits.into());
            counters.poll_hits.add(polled.hits.into());
            counters.poll_yields.add(polled.yields.into());
        }
        self.sched.waited(idle && self.finished.is_empty(), polled);
        Ok(())
    }

    /// Whether the handler has begun something that it has to finish.
    fn has_work(&self) -> bool {
        self.queue.in_flight() > 0
            || !self.fills.is_empty()
            || !self.retries.is_empty()
            || !self.waiting.is_empty()
            || self.ahead.is_some()
            || self.chunks_open > 0
            || self.starving
    }

    /// How long to wait for news.
    fn wait_for(&self, idle: bool) -> Duration {
        const TRANSIENT: Duration = Duration::from_micros(50);
        const STARVED: Duration = Duration::from_millis(1);
        const LOOK: Duration = Duration::from_millis(100);
        if self.waiting.iter().any(|waiting| waiting.why == Answer::Again) {
            return TRANSIENT;
        }
        let retry = match self.queue.in_flight() < DEPTH {
            true => self.next_retry(),
            false => LOOK, // When the device has answered.
        };
        if !self.waiting.is_empty() || self.ahead.is_some() || self.pager.starved.len() > 0 {
            return STARVED.min(retry);
        }
        match self.queue.in_flight() > 0 {
            true => LOOK.min(look_every(self.deadline)).min(retry),
            false if idle => LOOK.min(retry),
            false => Duration::ZERO,
        }
    }

    /// Reads and answers all pending faults; spins shortly for the first.
    fn read_faults(&mut self) -> Result<usize> {
        if self.waiting.len() + self.pager.starved.len() >= WAITING_MAX {
            // They keep the descriptor readable, so that waiting for news ends at once.
            const PAUSE: Duration = Duration::from_micros(50);
            std::thread::sleep(PAUSE);
            return Ok(1);
        }
        let mut seen = 0;
        let spin_until = self.sched.spin_until();
        loop {
            let count = self.pager.uffd.read(&mut self.messages)?;
            if count > 0 {
                self.arrived = Instant::now();
            }
            let arrived = self.arrived;
            for at in 0..count {
                let message = self.messages[at];
                if let Some(from) = message.moved_from() {
                    diagnostics::broken(format_args!(
                        "the program has moved far memory at {from:#x} (mremap): what is not in \
                         memory would read as zero there"
                    ));
                }
                if let Some(fault) = message.fault() {
                    let is_alone = self.rest_if_last(count - 1);
                    self.sched.fault_arrived(fault.thread, is_alone);
                    self.answer(fault, arrived, None);
                }
            }
            seen += count;
            let keep_looking =
                count == 0 && seen == 0 && spin_until.is_some_and(|until| Instant::now() < until);
            if count < FAULTS_MAX && !keep_looking {
                return Ok(seen);
            }
            std::hint::spin_loop();
        }
    }

    /// Answers one fault, which may have waited, or keeps it for later.
    fn answer(&mut self, fault: Fault, arrived: Instant, before: Option<Waiting>) {
        let page = self.pager.page_at(fault.address);
        let line = self.pager.line_of(page);
        if line.is_some_and(|line| self.pager.starved.bars(line, self.pager.is_stuck())) {
            return self.pager.starve(page, fault, arrived);
        }
        self.arrived = arrived;
        match self.resolve(fault) {
            Answer::Done => self.pager.counters().fault_times[self.index].add(arrived.elapsed()),
            Answer::Reading => {}
            Answer::Starved => self.pager.starve(page, fault, arrived),
            why @ (Answer::Again | Answer::Busy) => self.keep(fault, arrived, why, before),
        }
    }

    /// Keeps a fault that waits for another thread, or for a place at the device.
    fn keep(&mut self, fault: Fault, arrived: Instant, why: Answer, before: Option<Waiting>) {
        let shown = self.watch.look(Instant::now());
        let before = before.filter(|before| before.why == why);
        let mut term = before.map_or_else(|| Term::start(shown), |before| before.term);
        // All that the device has got it has not answered for a whole deadline: it will not even
        // get this one.
        if why == Answer::Busy && term.is_over(shown, self.deadline) && self.is_device_silent() {
            let page = self.pager.page_at(fault.address);
            return self.pager.give_up(page, &self.timed_out(self.pager.word(page).load()));
        }
        self.waiting.push_back(Waiting { fault, arrived, why, term });
    }

    /// Notes that the handler has nothing to do but what it does now, if that is so and `more` is
    /// zero: the thread that it wakes next may run in its place for long.
    pub(in crate::paging) fn rest_if_last(&self, more: usize) -> bool {
        let last = more == 0
            && self.queue.in_flight() == 0
            && self.finished.is_empty()
            && self.fills.is_empty()
            && self.retries.is_empty()
            && self.waiting.is_empty()
            && self.pager.starved.len() == 0
            && self.ahead.is_none();
        self.sched.rest(last);
        last
    }

    /// Looks at all faults that wait for another thread or for the device, the oldest first.
    fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let waiting = self.waiting.pop_front().expect("counted above");
            self.answer(waiting.fault, waiting.arrived, Some(waiting));
        }
    }

    /// Serves the region's faults that wait for room, the oldest first, as far as there is some.
    fn serve_starved(&mut self) {
        let starved = &self.pager.starved;
        if starved.len() == 0 {
            return;
        }
        let mut round = starved.begin(self.pager.is_stuck());
        while let Some(mut starving) = self.pager.starved.take(&mut round) {
            let (fault, arrived) = (starving.fault, starving.arrived);
            self.arrived = arrived;
            match self.resolve(fault) {
                Answer::Done => {
                    self.pager.counters().fault_times[self.index].add(arrived.elapsed())
                }
                Answer::Reading => {}
                Answer::Starved => {
                    if !self.pager.give_up_hopeless(&mut starving) {
                        if self.pager.starved.put_back(starving, &mut round) {
                            continue;
                        }
                        break;
                    }
                }
                why @ (Answer::Again | Answer::Busy) => self.keep(fault, arrived, why, None),
            }
            self.pager.not_starving(&starving);
        }
        if self.pager.starved.len() > 0 {
            self.pager.call_evictor();
        }
    }

    /// Tells the evictor whether this handler waits for room to read ahead.
    fn note_starving(&mut self) {
        let starving = self.ahead.is_some() && !self.waits_for_run;
        if starving != self.starving {
            self.starving = starving;
            if starving {
                self.pager.starving.fetch_add(1, Ordering::AcqRel);
            } else {
                self.pager.starving.fetch_sub(1, Ordering::AcqRel);
            }
        }
        if starving {
            self.pager.call_evictor();
        }
    }

    /// Brings the faulting page in, as far as that goes without waiting.
    fn resolve(&mut self, fault: Fault) -> Answer {
        let page = self.pager.page_at(fault.address);
        let access = if fault.write { Access::Write } else { Access::Read };
        loop {
            let word = self.pager.word(page).load();
            let answer = match word.state() {
                State::Stored => self.start_demanded(page, word, access),
                State::Filling if !word.dead() => self.catch_up(page, word, access),
                _ => self.pager.resolve_in_memory(page, word, &fault),
            };
            if let Some(answer) = answer {
                return answer;
            }
        }
    }

    /// A fault on a page that is being read: one that was read ahead is wanted after all. (Where
    /// another handler reads it, that handler learns of it when the read is over.)
    fn catch_up(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        if !protocol::want(self.pager.word(page), word) {
            return None;
        }
        let frame = word.frame().expect("a page being read has a frame");
        let arrived = self.arrived;
        if self.intents[frame.0 as usize].is_wanted_now(access, arrived) {
            self.pager.counters().prefetch_hits.bump();
        }
        if self.pager.frames.run_of(frame).is_some() && !word.wanted() {
            self.chunk_wanted(page, frame);
        }
        Some(Answer::Reading)
    }

    /// `Stored`, by a fault: as [`start_fill`](Self::start_fill), and what probably comes next.
    fn start_demanded(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        let answer = self.start_fill(page, word, access)?;
        if answer == Answer::Reading
            && let Some(window) = self.pager.next_window(page, FaultOn::StoredPage)
        {
            self.ask_ahead(window);
        }
        Some(answer)
    }

    /// Asks for what a stream leads to.
    pub(in crate::paging) fn ask_ahead(&mut self, mut window: Window) {
        let end = self.pager.page_count().0;
        let chunks = window.split_chunks(self.pager.pages_per_chunk(), end);
        let mut room = true;
        for ahead in window.pages(end) {
            room = room && self.start_ahead(ahead);
            if !room {
                // When the evictor has made some.
                let (first, count) = (ahead, PageCount(1));
                self.pager.readahead.request(PrefetchRun { first, count, for_stream: true });
            }
        }
        if let Some((first, count)) = chunks {
            self.ask_chunks(first, count, room);
        }
    }

    /// Accepts a read of a page that a stream leads to; `false`: there is no room at the moment.
    pub(in crate::paging) fn start_ahead(&mut self, page: PageId) -> bool {
        let word = self.pager.word(page).load();
        if word.state() != State::Stored {
            return true;
        }
        let answer = self.start_fill(page, word, Access::Ahead);
        self.pager.counters().pages_read_ahead.add(u64::from(answer == Some(Answer::Reading)));
        answer.is_none_or(|answer| answer == Answer::Reading)
    }

    /// The error of a page that the device was asked for too long ago, or could not even be.
    pub(in crate::paging) fn timed_out(&self, word: Word) -> Error {
        let offset = match word.state() {
            State::Stored => word.slot().map_or(0, |slot| self.pager.slot_offset(slot)),
            _ => 0,
        };
        let len = self.pager.page_bytes() as u64;
        Error::Io { op: "read", offset, len, errno: sys::ETIMEDOUT }
    }

    // Read-ahead.

    /// Accepts pages that were asked for ahead of their faults, as long as there are frames.
    fn read_ahead(&mut self) {
        while let Some(mut run) = self.ahead.take().or_else(|| self.pager.readahead.next_request())
        {
            while run.count.0 > 0 {
                if let Some(asked) = self.accept_chunk(run) {
                    run = match asked {
                        Ok(rest) => rest,
                        Err(()) => return self.postpone(run),
                    };
                    continue;
                }
                if self.accept_ahead(run.first) == Answer::Starved {
                    self.waits_for_run = false;
                    return self.postpone(run);
                }
                let (first, count) = (PageId(run.first.0 + 1), PageCount(run.count.0 - 1));
                run = PrefetchRun { first, count, ..run };
            }
        }
    }

    /// Keeps what was asked for ahead until there is room.
    fn postpone(&mut self, run: PrefetchRun) {
        // Advice is not worth waiting for when nothing can be evicted.
        let hopeless = self.pager.health().is_exhausted();
        self.ahead = (!hopeless).then_some(run);
    }

    fn accept_ahead(&mut self, page: PageId) -> Answer {
        let word = self.pager.word(page).load();
        match word.state() {
            State::Stored => match self.start_fill(page, word, Access::Ahead) {
                Some(Answer::Done | Answer::Reading) => {
                    self.pager.counters().pages_prefetched.bump();
                    Answer::Done
                }
                // Queue full counts as starved here: the rest of the run waits its turn.
                Some(Answer::Starved | Answer::Busy | Answer::Again) => Answer::Starved,
                None => Answer::Done,
            },
            State::Cooling => {
                self.pager.take_back(page, word, Asked::Ahead).unwrap_or(Answer::Done)
            }
            _ => Answer::Done,
        }
    }
}
