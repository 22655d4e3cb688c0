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
#![expect(unsafe_code, reason = "maps the zero page into holes")]

use super::pager::{Ahead, Pager};
use super::report;
use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{PageCount, PageId, SlotId};
use crate::page::note::Fate;
use crate::page::protocol::{self, Filled};
use crate::page::word::{FrameId, State, Word};
use crate::store::{Completion, Op, Queue, Request, SEGMENTS_MAX, Segment};
use crate::sys::uffd::{Fault, Message, Outcome, Protect, Wake};
use crate::tier::policy::Insert;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Faults read from the kernel at once.
const FAULTS_MAX: usize = 64;
/// Requests a filler keeps in flight.
const DEPTH: u32 = 128;
/// Bytes of one merged read.
const READ_BYTES_MAX: usize = 1 << 20;
/// Reads of one page before it counts as lost.
const ATTEMPTS_MAX: u8 = 3;
/// How long a fault may wait for a frame after the evictor found nothing to evict.
const STARVED_MAX: Duration = Duration::from_secs(2);

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
    /// Since when it waits for a frame; `None` while it waits for a state to pass.
    starved: Option<Instant>,
}

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// Resolved.
    Done,
    /// Will be resolved by a read in flight.
    Reading,
    /// Another thread is changing the page: try again soon.
    Again,
    /// No frame is to be had: try again when the evictor has freed some.
    Starved,
}

/// A fill that was accepted and not handed to the device yet.
#[derive(Clone, Copy, Debug)]
struct Fill {
    slot: SlotId,
    frame: FrameId,
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
struct Read {
    frames: [FrameId; SEGMENTS_MAX],
    count: usize,
    started: Instant,
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
    ahead_queue: Arc<crossbeam_queue::ArrayQueue<Ahead>>,
    ahead: Option<Ahead>,
    messages: [Message; FAULTS_MAX],
    waiting: Vec<Waiting>,
    fills: Vec<Fill>,
    reads: Vec<Option<Read>>,
    free_reads: Vec<usize>,
    intents: Vec<Intent>,
    /// When the event of the fault being answered was read.
    arrived: Instant,
    finished: Vec<Completion>,
    starving: bool,
    spin: Duration,
    deadline: Duration,
    checked: Instant,
}

impl Filler {
    /// Prepares a filler: all the memory it will ever use.
    pub(super) fn new(
        pager: Arc<Pager>,
        index: usize,
        ahead_queue: Arc<crossbeam_queue::ArrayQueue<Ahead>>,
        spin: Duration,
        deadline: Duration,
    ) -> Result<Filler> {
        let mut queue = pager.store.open_queue(DEPTH)?;
        queue.watch(pager.uffd.raw_fd())?;
        queue.watch(pager.filler_bells[index].raw_fd())?;
        let frames = pager.frames.count();
        Ok(Filler {
            index,
            queue,
            ahead_queue,
            ahead: None,
            messages: [Message::EMPTY; FAULTS_MAX],
            waiting: Vec::with_capacity(4096),
            fills: Vec::with_capacity(frames),
            reads: vec![None; DEPTH as usize],
            free_reads: (0..DEPTH as usize).collect(),
            intents: vec![Intent::idle(); frames],
            arrived: Instant::now(),
            finished: Vec::with_capacity(DEPTH as usize),
            starving: false,
            spin,
            deadline,
            checked: Instant::now(),
            pager,
        })
    }

    /// Serves faults until the region stops.
    pub(super) fn run(&mut self) {
        while !self.pager.stop.load(Ordering::Acquire) {
            if let Err(error) = self.turn() {
                report::fatal("a filler lost its userfaultfd or its device queue", &error);
            }
        }
    }

    /// Serves what there is, then waits for more.
    fn turn(&mut self) -> Result<()> {
        let news = self.read_faults()?;
        self.retry_waiting();
        self.read_ahead();
        self.start_reads()?;
        let idle = news == 0 && self.finished.is_empty();
        let timeout = self.patience(idle);
        let finished = &mut self.finished;
        self.queue.wait(timeout, &mut |completion| finished.push(completion))?;
        self.pager.filler_bells[self.index].drain();
        while let Some(completion) = self.finished.pop() {
            self.finish_read(completion);
        }
        self.check_deadlines();
        Ok(())
    }

    /// How long to wait for news.
    fn patience(&self, idle: bool) -> Duration {
        const TRANSIENT: Duration = Duration::from_micros(50);
        const STARVED: Duration = Duration::from_millis(1);
        const LOOK: Duration = Duration::from_millis(100);
        if self.waiting.iter().any(|waiting| waiting.starved.is_none()) {
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
                if let Some(fault) = message.fault() {
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

    /// Answers one fault, or keeps it for later.
    fn answer(&mut self, fault: Fault, arrived: Instant, starved: Option<Instant>) {
        self.arrived = arrived;
        match self.resolve(fault) {
            Answer::Done => self.pager.fault_times[self.index].add(arrived.elapsed()),
            Answer::Reading => {}
            Answer::Again => self.waiting.push(Waiting { fault, arrived, starved: None }),
            Answer::Starved => {
                let since = starved.unwrap_or_else(Instant::now);
                if starved.is_none() {
                    self.pager.counters.faults_starved.bump();
                }
                if self.pager.exhausted.load(Ordering::Acquire) && since.elapsed() > STARVED_MAX {
                    self.fail_starved(self.pager.page_at(fault.address));
                } else {
                    self.waiting.push(Waiting { fault, arrived, starved: Some(since) });
                }
            }
        }
    }

    fn retry_waiting(&mut self) {
        for _ in 0..self.waiting.len() {
            let waiting = self.waiting.swap_remove(0);
            self.answer(waiting.fault, waiting.arrived, waiting.starved);
        }
        let starving =
            self.waiting.iter().any(|waiting| waiting.starved.is_some()) || self.ahead.is_some();
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
                State::Empty => self.fill_zeros(page),
                State::Stored => self.start_fill(page, word, access),
                State::Filling if word.dead() => Some(Answer::Again),
                // The install that follows the read wakes everybody who waits in the page.
                State::Filling => {
                    self.catch_up(word, access);
                    Some(Answer::Reading)
                }
                State::Moving => Some(Answer::Again),
                State::Resident => self.touch_resident(page, word, fault),
                State::Cooling => self.take_back(page, word, access),
                State::Writing if word.dead() => Some(Answer::Again),
                State::Writing => self.copy_out(page, word),
                State::Poisoned => {
                    self.pager.wake(page);
                    Some(Answer::Done)
                }
            };
            if let Some(answer) = answer {
                return answer;
            }
        }
    }

    /// `Empty`: maps zeros. `None`: the word changed, look again.
    fn fill_zeros(&mut self, page: PageId) -> Option<Answer> {
        let pager = &self.pager;
        let moving = Word::moving(None);
        pager.word(page).try_change(Word::EMPTY, moving).ok()?;
        match pager.install_zeros(page) {
            Ok(true) => {
                pager.settle_resident(page, moving, Word::resident(None), Some(Insert::Fresh));
                pager.counters.faults_zero.bump();
                pager.check_low();
                Some(Answer::Done)
            }
            Ok(false) => {
                pager.settle(page, moving, Word::EMPTY);
                Some(Answer::Starved)
            }
            Err(error) => {
                report::warn("a page could not be mapped, trying again", &error);
                pager.settle(page, moving, Word::EMPTY);
                Some(Answer::Again)
            }
        }
    }

    /// `Stored`: accepts a read of the page's slot.
    fn start_fill(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        if self.fills.len() + self.queue.in_flight() as usize >= DEPTH as usize {
            return Some(Answer::Again);
        }
        let Some(frame) = self.pager.reserve_fill() else { return Some(Answer::Starved) };
        let slot = word.slot().expect("a stored page has a slot");
        self.pager.frames.note(frame, page, Some(slot));
        if self.pager.word(page).try_change(word, Word::filling(frame)).is_err() {
            self.pager.cancel_fill(frame);
            return None;
        }
        let arrived = self.arrived;
        self.intents[frame.0 as usize] = Intent { access, attempts: 0, arrived, pending: true };
        self.fills.push(Fill { slot, frame });
        self.pager.check_low();
        Some(Answer::Reading)
    }

    /// A fault on a page that is being read: one that was read ahead is wanted after all. (Where
    /// another filler reads it, that filler does not learn of it.)
    fn catch_up(&mut self, word: Word, access: Access) {
        let frame = word.frame().expect("a page being read has a frame");
        let arrived = self.arrived;
        let intent = &mut self.intents[frame.0 as usize];
        if intent.pending && intent.access == Access::Ahead {
            *intent = Intent { access, arrived, ..*intent };
            self.pager.counters.prefetch_hits.bump();
        }
    }

    /// `Resident`: a first write to a protected page, a hole of a sparse one, or a lost race.
    fn touch_resident(&mut self, page: PageId, word: Word, fault: Fault) -> Option<Answer> {
        let pager = &self.pager;
        if fault.protected {
            if word.protected() {
                // The word first: the evictor must not take the page for clean any more.
                let opened = word.with_protected(false).with_prefetched(false);
                pager.word(page).try_change(word, opened).ok()?;
                pager.counters.faults_protect.bump();
                pager.counters.prefetch_hits.add(u64::from(word.prefetched()));
            }
            if let Err(error) = pager.uffd.allow_writes(pager.addr(page), pager.page_bytes) {
                report::fatal("a write-protected page could not be opened", &error);
            }
            return Some(Answer::Done);
        }
        if word.sparse() {
            return pager.fill_hole(page, word, fault.address).then_some(Answer::Done);
        }
        pager.counters.faults_racing.bump();
        pager.wake(page);
        Some(Answer::Done)
    }

    /// `Cooling`: the page has not left yet; brings its frame back.
    fn take_back(&mut self, page: PageId, word: Word, access: Access) -> Option<Answer> {
        let pager = &self.pager;
        let frame = word.frame().expect("a cooling page has a frame");
        if !pager.evict_by_move && !pager.charge_page() {
            return Some(Answer::Starved);
        }
        let note = pager.frames.note_of(frame);
        let Ok(slot) = protocol::take_back(pager.word(page), word, note) else {
            pager.uncharge_copy();
            return None;
        };
        let moving = Word::moving(None);
        let prefetched = note.prefetched();
        match pager.return_frame(page, frame) {
            Ok(fate) => {
                let unseen = prefetched && access == Access::Ahead;
                let resident = Word::resident(slot).with_prefetched(unseen);
                pager.settle_resident(page, moving, resident, None);
                pager.frames.decide(frame, fate);
                if access != Access::Ahead {
                    pager.counters.faults_cooling.bump();
                    pager.counters.prefetch_hits.add(u64::from(prefetched));
                }
                Some(Answer::Done)
            }
            Err(error) => {
                report::warn("a page could not be mapped, trying again", &error);
                pager.uncharge_copy();
                pager.settle(page, moving, Word::cooling(frame));
                Some(Answer::Again)
            }
        }
    }

    /// `Writing`: the device may still read the frame, so the page gets a copy of it.
    fn copy_out(&mut self, page: PageId, word: Word) -> Option<Answer> {
        let pager = &self.pager;
        let frame = word.frame().expect("a page being written has a frame");
        if !pager.charge_page() {
            return Some(Answer::Starved);
        }
        if protocol::copy_out(pager.word(page), word).is_err() {
            pager.budget.uncharge(pager.page_size());
            return None;
        }
        let moving = Word::moving(None);
        if let Err(error) = pager.copy_rest(page, frame, 0) {
            report::fatal("a page being written could not be mapped", &error);
        }
        pager.settle_resident(page, moving, Word::resident(None), None);
        pager.frames.decide(frame, Fate::Dropped);
        pager.counters.faults_cooling.bump();
        Some(Answer::Done)
    }

    /// Gives up on a fault for which nothing can be evicted: SIGBUS with the cause, not a hang.
    fn fail_starved(&mut self, page: PageId) {
        let word = self.pager.word(page).load();
        let slot = match word.state() {
            State::Empty => None,
            State::Stored => word.slot(),
            // The page is on its way in by other means; the thread faults again if it is not.
            _ => return self.pager.wake(page),
        };
        let moving = Word::moving(slot);
        if self.pager.word(page).try_change(word, moving).is_ok() {
            let cause = Error::LimitExceeded { reason: String::new() };
            self.pager.poison(page, moving, &cause);
        } else {
            self.pager.wake(page);
        }
    }

    // Read-ahead.

    /// Accepts pages that were asked for ahead of their faults, as long as there are frames.
    fn read_ahead(&mut self) {
        while let Some(mut run) = self.ahead.take().or_else(|| self.ahead_queue.pop()) {
            while run.count.0 > 0 {
                if self.accept_ahead(run.first) == Answer::Starved {
                    self.ahead = Some(run);
                    return;
                }
                run = Ahead { first: PageId(run.first.0 + 1), count: PageCount(run.count.0 - 1) };
            }
        }
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
                Some(Answer::Starved | Answer::Again) => Answer::Starved,
                None => Answer::Done,
            },
            State::Cooling => self.take_back(page, word, Access::Ahead).unwrap_or(Answer::Done),
            _ => Answer::Done,
        }
    }

    // Device reads.

    /// Hands accepted fills to the device, neighbours on the device as one request.
    fn start_reads(&mut self) -> Result<()> {
        self.fills.sort_unstable_by_key(|fill| fill.slot);
        let mut at = 0;
        while at < self.fills.len() {
            let count = self.mergeable(at);
            self.push_read(at, count);
            at += count;
        }
        self.fills.clear();
        Ok(())
    }

    /// How many fills from `at` on lie one after the other on the device.
    fn mergeable(&self, at: usize) -> usize {
        let most = (READ_BYTES_MAX / self.pager.page_bytes).clamp(1, SEGMENTS_MAX);
        let first = self.fills[at].slot.0;
        let follows = |(n, fill): &(usize, &Fill)| fill.slot.0 == first + *n as u64;
        self.fills[at..].iter().take(most).enumerate().take_while(follows).count()
    }

    fn push_read(&mut self, at: usize, count: usize) {
        let token = self.free_reads.pop().expect("fills are bounded by the queue's depth");
        let empty = Segment { ptr: std::ptr::null_mut(), len: 0 };
        let mut segments = [empty; SEGMENTS_MAX];
        let mut frames = [FrameId(0); SEGMENTS_MAX];
        for (n, fill) in self.fills[at..at + count].iter().enumerate() {
            frames[n] = fill.frame;
            let ptr = self.pager.frames.ptr(fill.frame);
            segments[n] = Segment { ptr, len: self.pager.page_bytes };
        }
        let request = Request {
            token: token as u64,
            op: Op::Read,
            offset: self.pager.slot_offset(self.fills[at].slot),
            segments: &segments[..count],
        };
        self.reads[token] = Some(Read { frames, count, started: Instant::now(), overdue: false });
        let pushed = super::push(&mut *self.queue, request);
        assert!(pushed, "fills are bounded by the queue's depth");
        self.pager.counters.reads_in_flight.up();
    }

    fn finish_read(&mut self, completion: Completion) {
        let token = completion.token as usize;
        let read = self.reads[token].take().expect("a completion has its read");
        self.free_reads.push(token);
        self.pager.counters.reads_in_flight.down();
        self.pager.read_times[self.index].add(read.started.elapsed());
        for &frame in &read.frames[..read.count] {
            if read.overdue {
                self.pager.cancel_fill(frame);
                continue;
            }
            match self.check_content(frame, &completion.result) {
                Ok(()) => self.install(frame),
                Err(error) => self.read_failed(frame, &error),
            }
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

    /// Installs a page whose slot has been read into `frame`.
    fn install(&mut self, frame: FrameId) {
        let pager = &self.pager;
        let page = pager.frames.page(frame);
        let slot = pager.frames.slot(frame);
        let intent = &mut self.intents[frame.0 as usize];
        intent.pending = false;
        let Intent { access, arrived, .. } = *intent;
        let pager = &self.pager;
        let moving = match protocol::filled(pager.word(page), frame, slot) {
            Filled::Moving(moving) => moving,
            Filled::Died(dead) => {
                self.bury(page, dead, slot);
                return pager.cancel_fill(frame);
            }
        };
        let protect = pager.protects_fills() && access != Access::Write;
        let mode = if protect { Protect::Yes } else { Protect::No };
        match pager.install(page, frame, mode) {
            Ok(()) => {
                let ahead = access == Access::Ahead;
                let word = Word::resident(slot).with_protected(protect).with_prefetched(ahead);
                let how = if ahead { Insert::Prefetched } else { Insert::Filled };
                pager.settle_resident(page, moving, word, Some(how));
                pager.counters.pages_in.bump();
                if !ahead {
                    pager.counters.faults_read.bump();
                    pager.fault_times[self.index].add(arrived.elapsed());
                }
            }
            Err(error) => {
                report::warn("a page could not be mapped, trying again", &error);
                pager.settle(page, moving, Word::stored(slot.expect("a fill has a slot")));
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
            self.fills.push(Fill { slot, frame });
            return;
        }
        self.lose(frame, error);
        self.pager.cancel_fill(frame);
    }

    /// The page that `frame` was for is lost; the frame stays the caller's.
    fn lose(&self, frame: FrameId, error: &Error) {
        let page = self.pager.frames.page(frame);
        let slot = self.pager.frames.slot(frame);
        match protocol::filled(self.pager.word(page), frame, slot) {
            Filled::Moving(moving) => self.pager.poison(page, moving, error),
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
            self.reads[at] = Some(Read { overdue: true, ..read });
            self.pager.counters.read_errors.bump();
            for &frame in &read.frames[..read.count] {
                let slot = self.pager.frames.slot(frame).expect("a fill has a slot");
                let cause = Error::Io {
                    op: "read",
                    offset: self.pager.slot_offset(slot),
                    len: self.pager.page_bytes as u64,
                    errno: crate::sys::ETIMEDOUT,
                };
                self.lose(frame, &cause);
            }
        }
    }

    /// After a panic: the pages this filler was reading are lost, loudly; everything else goes on.
    pub(super) fn abandon(&mut self) {
        self.pager.counters.panics.bump();
        let cause = Error::Os { call: "the filler", errno: crate::sys::EIO };
        for read in self.reads.iter().flatten().filter(|read| !read.overdue) {
            read.frames[..read.count].iter().for_each(|frame| self.lose(*frame, &cause));
        }
        for fill in &self.fills {
            self.lose(fill.frame, &cause);
        }
    }
}

impl Pager {
    /// Fills one kernel page of a sparse resident page with zeros. `false`: look at the page again.
    fn fill_hole(&self, page: PageId, word: Word, addr: usize) -> bool {
        // The word cannot leave `Resident` unnoticed while this thread has made it `Moving`.
        let moving = word.leaving();
        if self.word(page).try_change(word, moving).is_err() {
            return false;
        }
        // SAFETY: a hole of a sparse page reads as zero, and this thread alone changes the page's
        // mapping now.
        let outcome = unsafe { self.uffd.zeropage(addr, crate::sys::vm::KERNEL_PAGE, Wake::Yes) };
        self.settle(page, moving, word);
        match outcome {
            Outcome::Done => self.counters.faults_zero.bump(),
            _ => self.wake(page),
        }
        true
    }
}
