//! Fillers: resolve page faults by bringing pages in from the store.
//!
//! A [`Filler`] is one thread. It reads many faults at once, looks at each page's word, answers
//! what needs no device at once, starts reads for the rest and installs pages as the reads
//! finish. It never waits for one fault while another can be served. Uses `store`, `page`; owned
//! by [`Region`](super::Region). Never allocates after its start.
//!
//! # Invariants
//! 1. A page is installed only by the thread that made its word `Moving`.
//! 2. Every fault is answered: installed, woken because a racer installed it, kept in `waiting`
//!    until the state that blocks it has passed, or failed with SIGBUS.
//! 3. A frame under a read is touched by nobody until the read is reported.
//!
//! `chunks` reads chunks that a stream leads to whole.

mod chunks;

use super::RegionConfig;
use super::follow::{Call, Follow, Seen};
use super::lease::Standing;
use super::pager::{Ahead, Pager};
use super::polling::Patience;
use super::readahead::{Found, Window};
use super::report;
use super::resolve::{Answer, Asked};
use super::team::NOBODY;
use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{PageCount, PageId, SlotId};
use crate::page::protocol::{self, Filled};
use crate::page::word::{FrameId, State, Word};
use crate::store::{Completion, Op, Queue, Request, SEGMENTS_MAX, Segment};
use crate::sys;
use crate::sys::event::poll_readable;
use crate::sys::uffd::{Fault, Message, Wake};
use crate::sys::vm::KERNEL_PAGE;
use crate::tier::policy::Insert;
use chunks::Chunk;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Faults read from the kernel at once.
const FAULTS_MAX: usize = 64;
/// Requests a filler keeps in flight.
const DEPTH: u32 = 256;
/// Bytes of one merged read: large enough for the device's full rate, small enough that the first
/// pages of a window are installed while the rest is being read.
const READ_BYTES_MAX: usize = 512 << 10;
/// Bytes of one read into a huge page: what the device is fastest with.
const CHUNK_READ_BYTES_MAX: usize = 1 << 20;
/// Reads of one page before it counts as lost.
const ATTEMPTS_MAX: u8 = 3;
/// Bytes installed for threads that wait before they are woken: bounds how long a page that is
/// there is waited for.
const WAKE_BYTES_MAX: usize = 64 << 10;

/// Who asked for a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
    Ahead,
}

/// A fault that cannot be answered yet.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    fault: Fault,
    /// When its event was read.
    arrived: Instant,
    /// What it waits for, and since when.
    why: Answer,
    since: Instant,
}

/// A fill that was accepted and not handed to the device yet.
#[derive(Clone, Copy, Debug)]
struct Fill {
    slot: SlotId,
    frame: FrameId,
    ahead: bool,
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
struct Read {
    frames: [FrameId; SEGMENTS_MAX],
    count: usize,
    started: Instant,
    /// It was asked for ahead of faults.
    ahead: bool,
    /// Past its deadline: the pages are lost, the frames wait for the device to let go.
    overdue: bool,
}

/// What a filler knows about the frames it reads into.
#[derive(Clone, Copy, Debug)]
struct Intent {
    access: Access,
    attempts: u8,
    /// When the fault's event was read.
    arrived: Instant,
    /// The frame is this filler's.
    pending: bool,
}

impl Intent {
    fn idle() -> Intent {
        Intent { access: Access::Read, attempts: 0, arrived: Instant::now(), pending: false }
    }
}

/// One handler thread's state.
pub(super) struct Filler {
    pager: Arc<Pager>,
    index: usize,
    queue: Box<dyn Queue>,
    ahead: Option<Ahead>,
    /// It waits for a run of frames, not for room.
    waits_for_run: bool,
    messages: [Message; FAULTS_MAX],
    waiting: Vec<Waiting>,
    fills: Vec<Fill>,
    reads: Vec<Option<Read>>,
    free_reads: Vec<usize>,
    /// Reads in flight that were asked for ahead of faults.
    reads_ahead: usize,
    intents: Vec<Intent>,
    /// When the event of the fault being answered was read.
    arrived: Instant,
    finished: Vec<Completion>,
    /// By run of frames: the chunk that this filler reads into it.
    chunks: Vec<Option<Chunk>>,
    /// How many of them there are.
    chunks_open: usize,
    /// Pages that were installed and whose waiters have not been woken yet.
    wakes: Vec<PageId>,
    starving: bool,
    follow: Follow,
    /// The last wait was for faults only.
    rested: bool,
    /// The last turn found nothing to do.
    idle_before: bool,
    spin: Duration,
    patience: Patience,
    deadline: Duration,
    checked: Instant,
}

impl Filler {
    /// Prepares a filler: all the memory it will ever use.
    pub(super) fn new(pager: Arc<Pager>, index: usize, config: &RegionConfig) -> Result<Filler> {
        let mut queue = pager.store.open_queue(DEPTH)?;
        queue.watch(pager.uffd.raw_fd())?;
        queue.watch(pager.filler_bells[index].raw_fd())?;
        let frames = pager.frames.count();
        Ok(Filler {
            index,
            queue,
            ahead: None,
            waits_for_run: false,
            messages: [Message::EMPTY; FAULTS_MAX],
            waiting: Vec::with_capacity(4096),
            fills: Vec::with_capacity(frames),
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
            follow: Follow::new(index),
            rested: false,
            idle_before: false,
            spin: config.spin,
            patience: Patience::new(config.poll),
            deadline: config.deadline,
            checked: Instant::now(),
            pager,
        })
    }

    /// Serves faults until the region stops.
    pub(super) fn run(&mut self) {
        self.pager.leases.of(self.index).adopt();
        while !self.pager.stop.load(Ordering::Acquire) {
            self.pager.leases.of(self.index).begin_turn();
            if let Err(error) = self.turn() {
                report::fatal("a filler lost its userfaultfd or its device queue", &error);
            }
        }
    }

    /// Serves what there is, then waits for more.
    fn turn(&mut self) -> Result<()> {
        self.follow.report_for_duty(&self.pager.leases, &self.pager.team);
        if self.is_off_duty() {
            return self.stand_by();
        }
        let news = self.read_faults()?;
        if news == 0 && self.rested {
            self.follow.woken_for_nothing(&self.pager.leases, &self.pager.team);
        }
        self.retry_waiting();
        self.map_chunks();
        self.wake_all(0);
        self.read_ahead();
        self.start_reads()?;
        let idle = news == 0 && self.finished.is_empty();
        let timeout = self.wait_for(idle);
        self.rested = idle && self.rest_if_last(0);
        let gives_way = self.pager.leases.of(self.index).standing() == Standing::Lent;
        self.queue.poll_by(self.patience.polling(gives_way, Instant::now()));
        let (queue, finished) = (&mut self.queue, &mut self.finished);
        let mut done = |completion| finished.push(completion);
        super::guarded(&self.pager, || queue.wait(timeout, &mut done)).unwrap_or(Ok(()))?;
        self.note_polled();
        self.rested &= self.finished.is_empty();
        let idle = idle && self.finished.is_empty();
        // Not after every fault that was waited for: the bell is a system call.
        self.pager.filler_looks(self.index, idle && self.idle_before);
        self.idle_before = idle;
        while let Some(completion) = self.finished.pop() {
            self.finish_read(completion);
        }
        self.map_chunks();
        self.check_deadlines();
        self.wake_all(0);
        Ok(())
    }

    /// Counts and learns from what looking before sleeping brought.
    fn note_polled(&mut self) {
        let polled = self.queue.polled();
        if polled.waits > 0 {
            self.patience.learn(polled, Instant::now());
            let counters = &self.pager.counters;
            counters.polls.add(polled.waits.into());
            counters.poll_hits.add(polled.hits.into());
            counters.poll_yields.add(polled.yields.into());
        }
    }

    /// Whether this is a helper that nobody needs. What it has begun it finishes.
    fn is_off_duty(&self) -> bool {
        let pager = &self.pager;
        self.index > 0
            && pager.team.duty(self.index) == NOBODY
            && self.queue.in_flight() == 0
            && self.fills.is_empty()
            && self.waiting.is_empty()
            && self.ahead.is_none()
            && self.chunks_open == 0
            && !self.starving
    }

    /// Waits to be called in. Faults are not waited for: the kernel wakes all who do, for each.
    fn stand_by(&mut self) -> Result<()> {
        const LOOK: Duration = Duration::from_secs(1);
        self.pager.leases.of(self.index).rest(true);
        let bell = self.pager.filler_bells[self.index].raw_fd();
        poll_readable(&[bell], LOOK).map_err(|errno| Error::Os { call: "poll", errno: errno.0 })?;
        self.pager.filler_looks(self.index, true);
        Ok(())
    }

    /// How long to wait for news.
    fn wait_for(&self, idle: bool) -> Duration {
        const TRANSIENT: Duration = Duration::from_micros(50);
        const STARVED: Duration = Duration::from_millis(1);
        const LOOK: Duration = Duration::from_millis(100);
        if self.waiting.iter().any(|waiting| waiting.why == Answer::Again) {
            return TRANSIENT;
        }
        if !self.waiting.is_empty() || self.ahead.is_some() {
            return STARVED;
        }
        if idle || self.queue.in_flight() > 0 { LOOK } else { Duration::ZERO }
    }

    /// Reads and answers all pending faults; spins shortly for the first.
    fn read_faults(&mut self) -> Result<usize> {
        let mut seen = 0;
        let patience = (!self.spin.is_zero()).then(Instant::now);
        loop {
            let count = self.pager.uffd.read(&mut self.messages)?;
            if count > 0 {
                self.arrived = Instant::now();
            }
            let arrived = self.arrived;
            for at in 0..count {
                let message = self.messages[at];
                if let Some(from) = message.moved_from() {
                    report::broken(format_args!(
                        "the program has moved far memory at {from:#x} (mremap): what is not in \
                         memory would read as zero there"
                    ));
                }
                if let Some(fault) = message.fault() {
                    let lonely = self.rest_if_last(count - 1);
                    let at_once = self.patience.answers_at_once();
                    let seen = Seen { thread: fault.thread, lonely, slept: self.rested, at_once };
                    let pager = &self.pager;
                    match self.follow.fault(seen, &pager.leases, &pager.team) {
                        Call::None => {}
                        Call::Helper(helper) => pager.call_filler(helper),
                        Call::All => pager.ring_fillers(),
                    }
                    self.answer(fault, arrived, None);
                }
            }
            seen += count;
            let keep_looking = count == 0
                && seen == 0
                && patience.is_some_and(|since| since.elapsed() < self.spin);
            if count < FAULTS_MAX && !keep_looking {
                return Ok(seen);
            }
            std::hint::spin_loop();
        }
    }

    /// Answers one fault, which may have waited, or keeps it for later.
    fn answer(&mut self, fault: Fault, arrived: Instant, before: Option<Waiting>) {
        self.arrived = arrived;
        let why = self.resolve(fault);
        match why {
            Answer::Done => return self.pager.fault_times[self.index].add(arrived.elapsed()),
            Answer::Reading => return,
            Answer::Again | Answer::Busy | Answer::Starved => {}
        }
        let before = before.filter(|before| before.why == why);
        if why == Answer::Starved && before.is_none() {
            self.pager.counters.faults_starved.bump();
        }
        let since = before.map_or_else(Instant::now, |before| before.since);
        let page = self.pager.page_at(fault.address);
        match why {
            Answer::Starved if self.pager.is_hopeless(page, since.elapsed(), self.deadline) => {
                self.pager.give_up(page, &Error::LimitExceeded { reason: String::new() });
            }
            Answer::Busy if since.elapsed() > self.deadline => {
                self.pager.give_up(page, &self.timed_out(self.pager.word(page).load()));
            }
            _ => self.waiting.push(Waiting { fault, arrived, why, since }),
        }
    }

    /// Notes that the filler has nothing to do but what it does now, if that is so and `more` is
    /// zero: the thread that it wakes next may run in its place for long.
    fn rest_if_last(&self, more: usize) -> bool {
        let last = more == 0
            && self.queue.in_flight() == 0
            && self.finished.is_empty()
            && self.fills.is_empty()
            && self.waiting.is_empty()
            && self.ahead.is_none();
        self.pager.leases.of(self.index).rest(last);
        last
    }

    fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let waiting = self.waiting.swap_remove(0);
            self.answer(waiting.fault, waiting.arrived, Some(waiting));
        }
        let starving = self.waiting.iter().any(|waiting| waiting.why == Answer::Starved)
            || self.ahead.is_some() && !self.waits_for_run;
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

    /// `Stored`: accepts a read of the page's slot.
    fn start_fill(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        if self.fills.len() + self.queue.in_flight() as usize >= DEPTH as usize {
            return Some(Answer::Busy);
        }
        let Some(frame) = self.pager.reserve_fill() else { return Some(Answer::Starved) };
        let slot = word.slot().expect("a stored page has a slot");
        self.pager.frames.note(frame, page, Some(slot));
        let filling = Word::filling(frame).with_wanted(access != Access::Ahead);
        if self.pager.word(page).try_change(word, filling).is_err() {
            self.pager.cancel_fill(frame);
            return None;
        }
        let arrived = self.arrived;
        self.intents[frame.0 as usize] = Intent { access, attempts: 0, arrived, pending: true };
        self.fills.push(Fill { slot, frame, ahead: access == Access::Ahead });
        self.pager.check_low();
        Some(Answer::Reading)
    }

    /// A fault on a page that is being read: one that was read ahead is wanted after all. (Where
    /// another filler reads it, that filler learns of it when the read is over.)
    fn catch_up(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        if !protocol::want(self.pager.word(page), word) {
            return None;
        }
        let frame = word.frame().expect("a page being read has a frame");
        let arrived = self.arrived;
        let intent = &mut self.intents[frame.0 as usize];
        if intent.pending && intent.access == Access::Ahead {
            *intent = Intent { access, arrived, ..*intent };
            self.pager.counters.prefetch_hits.bump();
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
            && let Some(window) = self.pager.next_window(page, Found::Stored)
        {
            self.ask_ahead(window);
        }
        Some(answer)
    }

    /// Asks for what a stream leads to.
    fn ask_ahead(&mut self, mut window: Window) {
        let end = self.pager.page_count().0;
        let chunks = window.split_chunks(self.pager.pages_per_chunk(), end);
        let mut room = true;
        for ahead in window.pages(end) {
            room = room && self.start_ahead(ahead);
            if !room {
                // When the evictor has made some. A full list drops the rest: it is a guess.
                let count = PageCount(1);
                let _ = self.pager.ahead.push(Ahead { first: ahead, count, held: true });
            }
        }
        if let Some((first, count)) = chunks {
            self.ask_chunks(first, count, room);
        }
    }

    /// Accepts a read of a page that a stream leads to; `false`: there is no room at the moment.
    fn start_ahead(&mut self, page: PageId) -> bool {
        let word = self.pager.word(page).load();
        if word.state() != State::Stored {
            return true;
        }
        let answer = self.start_fill(page, word, Access::Ahead);
        self.pager.counters.pages_read_ahead.add(u64::from(answer == Some(Answer::Reading)));
        answer.is_none_or(|answer| answer == Answer::Reading)
    }

    /// The error of a page that the device was asked for too long ago, or could not even be.
    fn timed_out(&self, word: Word) -> Error {
        let offset = match word.state() {
            State::Stored => word.slot().map_or(0, |slot| self.pager.slot_offset(slot)),
            _ => 0,
        };
        let len = self.pager.page_bytes as u64;
        Error::Io { op: "read", offset, len, errno: sys::ETIMEDOUT }
    }

    // Read-ahead.

    /// Accepts pages that were asked for ahead of their faults, as long as there are frames.
    fn read_ahead(&mut self) {
        while let Some(mut run) = self.ahead.take().or_else(|| self.pager.ahead.pop()) {
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
                run = Ahead { first, count, ..run };
            }
        }
    }

    /// Keeps what was asked for ahead until there is room.
    fn postpone(&mut self, run: Ahead) {
        // Advice is not worth waiting for when nothing can be evicted.
        let hopeless = self.pager.exhausted.load(Ordering::Acquire);
        self.ahead = (!hopeless).then_some(run);
    }

    fn accept_ahead(&mut self, page: PageId) -> Answer {
        let word = self.pager.word(page).load();
        match word.state() {
            State::Stored => match self.start_fill(page, word, Access::Ahead) {
                Some(Answer::Done | Answer::Reading) => {
                    self.pager.counters.pages_prefetched.bump();
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

    // Device reads.

    /// Hands accepted fills to the device, neighbours on the device as one request.
    fn start_reads(&mut self) -> Result<()> {
        // What a thread waits for goes first, and alone where its neighbours are not urgent.
        self.fills.sort_unstable_by_key(|fill| (fill.ahead, fill.slot));
        let mut at = 0;
        while at < self.fills.len() {
            let count = self.mergeable(at);
            self.push_read(at, count);
            at += count;
        }
        self.fills.clear();
        Ok(())
    }

    /// How many fills from `at` on lie one after the other on the device. What has failed before
    /// is read alone: a bad place costs nobody else's page.
    fn mergeable(&self, at: usize) -> usize {
        let Fill { slot: first, ahead, frame } = self.fills[at];
        let bytes = match self.pager.frames.run_of(frame) {
            Some(_) => CHUNK_READ_BYTES_MAX,
            None => READ_BYTES_MAX,
        };
        let most = (bytes / self.pager.page_bytes).clamp(1, SEGMENTS_MAX);
        let tried = |fill: &Fill| self.intents[fill.frame.0 as usize].attempts > 0;
        if tried(&self.fills[at]) {
            return 1;
        }
        let follows = |(n, fill): &(usize, &Fill)| {
            fill.slot.0 == first.0 + *n as u64 && fill.ahead == ahead && !tried(fill)
        };
        self.fills[at..].iter().take(most).enumerate().take_while(follows).count()
    }

    fn push_read(&mut self, at: usize, count: usize) {
        let token = self.free_reads.pop().expect("fills are bounded by the queue's depth");
        let empty = Segment { ptr: std::ptr::null_mut(), len: 0 };
        let mut segments = [empty; SEGMENTS_MAX];
        let mut frames = [FrameId(0); SEGMENTS_MAX];
        let mut last = 0;
        for (n, fill) in self.fills[at..at + count].iter().enumerate() {
            frames[n] = fill.frame;
            let ptr = self.pager.frames.ptr(fill.frame);
            // Neighbours in memory are one segment: the virtual disk is paid by segment.
            if n > 0 && frames[n - 1].0 + 1 == fill.frame.0 {
                segments[last].len += self.pager.page_bytes;
                continue;
            }
            last += usize::from(n > 0);
            segments[last] = Segment { ptr, len: self.pager.page_bytes };
        }
        let request = Request {
            token: token as u64,
            op: Op::Read,
            offset: self.pager.slot_offset(self.fills[at].slot),
            segments: &segments[..=last],
        };
        let ahead = self.fills[at].ahead;
        self.reads_ahead += usize::from(ahead);
        let started = Instant::now();
        self.reads[token] = Some(Read { frames, count, started, ahead, overdue: false });
        self.pager.counters.reads_in_flight.up();
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        let Some(pushed) = super::guarded(&self.pager, || super::push(queue, request)) else {
            self.abandon_read(token, &Error::Os { call: "the store", errno: sys::EIO });
            // Whether the device has the request is unknown, as if it never answered, unless the
            // store says that it took nothing.
            if self.queue.in_flight() == before {
                self.reads[token] = None;
                self.pager.counters.reads_in_flight.down();
                self.reads_ahead -= usize::from(ahead);
                self.free_reads.push(token);
                frames[..count].iter().for_each(|frame| self.pager.cancel_fill(*frame));
            }
            return;
        };
        assert!(pushed, "fills are bounded by the queue's depth");
    }

    fn finish_read(&mut self, completion: Completion) {
        let token = completion.token as usize;
        let read = self.reads[token].take().expect("a completion has its read");
        self.free_reads.push(token);
        self.reads_ahead -= usize::from(read.ahead);
        self.pager.counters.reads_in_flight.down();
        let took = read.started.elapsed();
        self.pager.read_times[self.index].add(took);
        self.patience.answered(took, read.count * self.pager.page_bytes);
        for (n, &frame) in read.frames[..read.count].iter().enumerate() {
            if read.overdue {
                self.pager.cancel_fill(frame);
                continue;
            }
            match self.check_content(frame, &completion.result) {
                Ok(()) if self.is_of_chunk(frame) => self.chunk_page_read(frame),
                Ok(()) => self.install(frame, read.count - 1 - n),
                Err(error) => {
                    self.break_chunk(frame);
                    self.read_failed(frame, &error);
                }
            }
        }
    }

    /// Wakes the threads that wait for pages installed since the last time; `more` pages follow.
    fn wake_all(&mut self, more: usize) {
        while let Some(page) = self.wakes.pop() {
            self.rest_if_last(more + self.wakes.len());
            self.pager.wake(page);
        }
    }

    fn check_content(&self, frame: FrameId, result: &Result<()>) -> Result<()> {
        if let Err(error) = result {
            let counters = &self.pager.counters;
            match error {
                Error::Corrupt { .. } => counters.checksum_errors.bump(),
                _ => counters.read_errors.bump(),
            }
            return Err(error.clone());
        }
        let slot = self.pager.frames.slot(frame).expect("a fill has a slot");
        if self.pager.verify && self.pager.hash_frame(frame) != self.pager.sum(slot) {
            self.pager.counters.checksum_errors.bump();
            return Err(Error::Corrupt { slot: slot.0 });
        }
        Ok(())
    }

    /// Whether who waits for a page is woken by mapping it, which saves a call. Not while pages
    /// are on their way that were asked for ahead: a thread that reads several of them goes on
    /// when all are there that can be. Nor by a filler that gives way: who is woken runs in its
    /// place at once, and must not find the page in its hands.
    fn wakes_at_once(&self) -> bool {
        let gives_way = self.pager.leases.of(self.index).standing() == Standing::Lent;
        self.reads_ahead == 0 && !gives_way
    }

    /// Installs a page whose slot has been read into `frame`. Who waits for it is woken by that,
    /// or later together with others. `more` pages follow.
    fn install(&mut self, frame: FrameId, more: usize) {
        if let Some((moving, wanted)) = self.fill_ended(frame) {
            self.map_filled(frame, moving, wanted, more);
        }
    }

    /// Maps the page that was read into `frame`, which this thread has just made `Moving`.
    fn map_filled(&mut self, frame: FrameId, moving: Word, wanted: bool, more: usize) {
        let pager = &self.pager;
        let page = pager.frames.page(frame);
        let slot = moving.slot();
        let Intent { access, arrived, .. } = self.intents[frame.0 as usize];
        let guard = pager.guard(page, frame, access == Access::Write);
        let wake = if wanted && self.wakes_at_once() { Wake::Yes } else { Wake::No };
        match pager.install(page, frame, guard.protect(), wake) {
            Ok(()) => {
                let word = guard.mark(Word::resident(slot)).with_prefetched(!wanted);
                let how = if wanted { Insert::Filled } else { Insert::Prefetched };
                pager.settle_resident(page, moving, word, Some(how));
                pager.counters.pages_in.bump();
                if wanted {
                    pager.counters.faults_read.bump();
                    match access {
                        // It is another filler's fault.
                        Access::Ahead => pager.counters.prefetch_hits.bump(),
                        _ => pager.fault_times[self.index].add(arrived.elapsed()),
                    }
                    if wake == Wake::Yes {
                        return;
                    }
                    self.wakes.push(page);
                    if self.wakes.len() * pager.page_bytes >= WAKE_BYTES_MAX {
                        self.wake_all(more);
                    }
                }
            }
            Err(error) => {
                let stored = Word::stored(slot.expect("a fill has a slot"));
                pager.not_mapped(page, moving, stored, &error);
                pager.cancel_fill(frame);
                pager.wake(page);
            }
        }
    }

    /// Ends a page that was discarded while its slot was being read; the frame stays the caller's.
    fn bury(&self, page: PageId, dead: Word, slot: Option<SlotId>) {
        let pager = &self.pager;
        pager.put_slot(slot);
        pager.settle(page, dead, Word::EMPTY);
        pager.wake(page);
    }

    /// A read failed: once more alone, or the page is lost.
    fn read_failed(&mut self, frame: FrameId, error: &Error) {
        let slot = self.pager.frames.slot(frame).expect("a fill has a slot");
        let intent = &mut self.intents[frame.0 as usize];
        intent.attempts += 1;
        if intent.attempts < ATTEMPTS_MAX && self.free_reads.len() > self.fills.len() {
            self.fills.push(Fill { slot, frame, ahead: false });
            return;
        }
        self.lose(frame, error);
        self.pager.cancel_fill(frame);
    }

    /// The page that `frame` was for cannot be brought in; the frame stays the caller's. The page
    /// is lost if somebody faulted on it. One that was only asked for ahead stays on the device.
    fn lose(&mut self, frame: FrameId, error: &Error) {
        self.intents[frame.0 as usize].pending = false;
        let pager = &self.pager;
        let page = pager.frames.page(frame);
        let slot = pager.frames.slot(frame);
        if self.intents[frame.0 as usize].access == Access::Ahead {
            let stored = Word::stored(slot.expect("a fill has a slot"));
            let mut filling = pager.word(page).load();
            while !filling.dead() {
                match pager.word(page).try_change(filling, stored) {
                    // Who faulted on it meanwhile waits for this read, and faults again.
                    Ok(()) => return pager.wake(page),
                    Err(now) => filling = now,
                }
            }
        }
        match protocol::filled(pager.word(page), frame, slot) {
            Filled::Moving { moving, .. } => pager.poison(page, moving, error),
            Filled::Died(dead) => self.bury(page, dead, slot),
        }
    }

    /// Fails reads that the device has not answered in time. Their frames stay with the device.
    fn check_deadlines(&mut self) {
        const INTERVAL: Duration = Duration::from_millis(50);
        if self.checked.elapsed() < INTERVAL {
            return;
        }
        self.checked = Instant::now();
        for at in 0..self.reads.len() {
            let Some(read) = self.reads[at] else { continue };
            if read.overdue || read.started.elapsed() < self.deadline {
                continue;
            }
            let slot = self.pager.frames.slot(read.frames[0]).expect("a fill has a slot");
            self.abandon_read(at, &self.timed_out(Word::stored(slot)));
        }
    }

    /// Fails the pages of a read. The frames stay with the device until it answers.
    fn abandon_read(&mut self, token: usize, cause: &Error) {
        let read = self.reads[token].as_mut().expect("an abandoned read is in flight");
        read.overdue = true;
        let read = *read;
        self.pager.counters.read_errors.bump();
        read.frames[..read.count].iter().for_each(|frame| self.break_chunk(*frame));
        read.frames[..read.count].iter().for_each(|frame| self.lose(*frame, cause));
    }
}
