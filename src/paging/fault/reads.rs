//! Reads: accepted, merged, handed to the device, installed when it answers, repeated when it fails.

use crate::base::deadline::{Term, look_every};
use crate::base::error::{Error, Result};
use crate::base::units::{PageId, SlotId};
use crate::paging::evict::policy::Insert;
use crate::paging::fault::handler::{DEPTH, Handler};
use crate::paging::fault::in_memory::Answer;
use crate::paging::page::frames::push;
use crate::paging::page::protocol::{self, Filled};
use crate::paging::page::word::{FrameId, Word};
use crate::store::{Completion, Op, Request, SEGMENTS_MAX, Segment};
use crate::sys;
use crate::sys::uffd::Wake;
use std::time::{Duration, Instant};

/// Bytes of one merged read: large enough for the device's full rate, small enough that the first
/// pages of a window are installed while the rest is being read.
const READ_BYTES_MAX: usize = 512 << 10;
/// Bytes of one read into a huge page: what the device is fastest with.
const CHUNK_READ_BYTES_MAX: usize = 1 << 20;
/// Reads of one page ahead of faults.
pub(in crate::paging) const AHEAD_ATTEMPTS_MAX: u32 = 3;
/// Bytes installed for threads that wait before they are woken: bounds how long a page that is
/// there is waited for.
pub(in crate::paging) const WAKE_BYTES_MAX: usize = 64 << 10;

/// How long a failed read waits before it is repeated: not at all the first time, for a short read
/// or a flipped bit is mostly over by then; then 1 ms, doubled up to an eighth of the deadline and
/// 200 ms, which is no load for a device that fails for seconds.
pub(in crate::paging) fn pause_before(attempt: u32, deadline: Duration) -> Duration {
    const FIRST: Duration = Duration::from_millis(1);
    const LONGEST: Duration = Duration::from_millis(200);
    match attempt {
        0 | 1 => Duration::ZERO,
        _ => (FIRST * (1 << (attempt - 2).min(8))).min(LONGEST).min(deadline / 8),
    }
}

/// What a page is read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Access {
    Read,
    Write,
    Ahead,
}

/// A fill that was accepted and not handed to the device yet.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Fill {
    pub(in crate::paging) slot: SlotId,
    pub(in crate::paging) frame: FrameId,
    pub(in crate::paging) ahead: bool,
}

/// A fill whose read failed, and when it is repeated.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Retry {
    frame: FrameId,
    due: Instant,
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Read {
    frames: [FrameId; SEGMENTS_MAX],
    count: usize,
    started: Instant,
    /// Since the device got it.
    term: Term,
    /// It was asked for ahead of faults.
    ahead: bool,
    /// Past its deadline: the pages are lost, the frames wait for the device to let go.
    overdue: bool,
}

/// What a handler knows about the frames it reads into.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Intent {
    pub(in crate::paging) access: Access,
    /// Reads that failed.
    pub(in crate::paging) attempts: u32,
    /// Since the device got the first of them.
    term: Term,
    /// When the fault's event was read.
    pub(in crate::paging) arrived: Instant,
    /// The frame is this handler's.
    pub(in crate::paging) pending: bool,
}

impl Intent {
    pub(in crate::paging) fn idle() -> Intent {
        Intent { pending: false, ..Intent::new(Access::Read, Instant::now()) }
    }

    /// For a page that is about to be read.
    pub(in crate::paging) fn new(access: Access, arrived: Instant) -> Intent {
        Intent { access, attempts: 0, term: Term::start(Duration::ZERO), arrived, pending: true }
    }

    /// Whether the page was only asked for ahead. If so, it is wanted from now on.
    pub(in crate::paging) fn is_wanted_now(&mut self, access: Access, arrived: Instant) -> bool {
        let was_ahead = self.pending && self.access == Access::Ahead;
        if was_ahead {
            (self.access, self.arrived) = (access, arrived);
        }
        was_ahead
    }
}

impl Handler {
    /// `Stored`: accepts a read of the page's slot.
    pub(in crate::paging) fn start_fill(
        &mut self,
        page: PageId,
        word: Word,
        access: Access,
    ) -> Option<Answer> {
        if self.fills.len() + self.queue.in_flight() as usize >= DEPTH as usize {
            return Some(Answer::Busy);
        }
        if access == Access::Ahead && self.pager.starved.len() > 0 {
            return Some(Answer::Starved); // Faults go first.
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
        self.intents[frame.0 as usize] = Intent::new(access, arrived);
        self.fills.push(Fill { slot, frame, ahead: access == Access::Ahead });
        self.pager.check_low();
        Some(Answer::Reading)
    }

    /// Hands accepted fills to the device, neighbours on the device as one request.
    pub(in crate::paging) fn start_reads(&mut self) -> Result<()> {
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
        let most = (bytes / self.pager.page_bytes()).clamp(1, SEGMENTS_MAX);
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
                segments[last].len += self.pager.page_bytes();
                continue;
            }
            last += usize::from(n > 0);
            segments[last] = Segment { ptr, len: self.pager.page_bytes() };
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
        let term = Term::start(self.watch.look(started));
        self.reads[token] = Some(Read { frames, count, started, term, ahead, overdue: false });
        for frame in &frames[..count] {
            let intent = &mut self.intents[frame.0 as usize];
            if intent.attempts == 0 {
                intent.term = term;
            }
        }
        self.pager.counters().reads_in_flight.up();
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        let Some(pushed) = self.pager.guarded(|| push(queue, request)) else {
            self.abandon_read(token, &Error::Os { call: "the store", errno: sys::EIO });
            // Whether the device has the request is unknown, as if it never answered, unless the
            // store says that it took nothing.
            if self.queue.in_flight() == before {
                self.reads[token] = None;
                self.pager.counters().reads_in_flight.down();
                self.reads_ahead -= usize::from(ahead);
                self.free_reads.push(token);
                frames[..count].iter().for_each(|frame| self.pager.cancel_fill(*frame));
            }
            return;
        };
        assert!(pushed, "fills are bounded by the queue's depth");
    }

    pub(in crate::paging) fn finish_read(&mut self, completion: Completion) {
        let token = completion.token as usize;
        let read = self.reads[token].take().expect("a completion has its read");
        self.free_reads.push(token);
        self.reads_ahead -= usize::from(read.ahead);
        self.pager.counters().reads_in_flight.down();
        let took = read.started.elapsed();
        self.pager.counters().read_times[self.index].add(took);
        self.sched.device_answered(took, read.count * self.pager.page_bytes());
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
    pub(in crate::paging) fn wake_all(&mut self, more: usize) {
        while let Some(page) = self.wakes.pop() {
            self.rest_if_last(more + self.wakes.len());
            self.pager.wake(page);
        }
    }

    fn check_content(&self, frame: FrameId, result: &Result<()>) -> Result<()> {
        if let Err(error) = result {
            let counters = self.pager.counters();
            match error {
                Error::Corrupt { .. } => counters.checksum_errors.bump(),
                _ => counters.read_errors.bump(),
            }
            return Err(error.clone());
        }
        let slot = self.pager.frames.slot(frame).expect("a fill has a slot");
        if self.pager.verify && self.pager.hash_frame(frame) != self.pager.sum(slot) {
            self.pager.counters().checksum_errors.bump();
            return Err(Error::Corrupt { slot: slot.0 });
        }
        Ok(())
    }

    /// Whether who waits for a page is woken by mapping it, which saves a call. Not while pages
    /// are on their way that were asked for ahead: a thread that reads several of them goes on
    /// when all are there that can be. Nor by a handler that gives way: who is woken runs in its
    /// place at once, and must not find the page in its hands.
    fn wakes_at_once(&self) -> bool {
        self.reads_ahead == 0 && !self.sched.gives_way()
    }

    /// Installs a page whose slot has been read into `frame`. Who waits for it is woken by that,
    /// or later together with others. `more` pages follow.
    pub(in crate::paging) fn install(&mut self, frame: FrameId, more: usize) {
        if let Some((moving, wanted)) = self.fill_ended(frame) {
            self.map_filled(frame, moving, wanted, more);
        }
    }

    /// Maps the page that was read into `frame`, which this thread has just made `Moving`.
    pub(in crate::paging) fn map_filled(
        &mut self,
        frame: FrameId,
        moving: Word,
        wanted: bool,
        more: usize,
    ) {
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
                pager.counters().pages_in.bump();
                if wanted {
                    pager.counters().faults_read.bump();
                    match access {
                        // It is another handler's fault.
                        Access::Ahead => pager.counters().prefetch_hits.bump(),
                        _ => pager.counters().fault_times[self.index].add(arrived.elapsed()),
                    }
                    if wake == Wake::Yes {
                        return;
                    }
                    self.wakes.push(page);
                    if self.wakes.len() * pager.page_bytes() >= WAKE_BYTES_MAX {
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
    pub(in crate::paging) fn bury(&self, page: PageId, dead: Word, slot: Option<SlotId>) {
        let pager = &self.pager;
        pager.put_slot(slot);
        pager.settle(page, dead, Word::EMPTY);
        pager.wake(page);
    }

    /// A read failed. It is repeated, alone, at growing intervals, until the deadline has passed
    /// since the device first got it; then the page is lost. One that nobody waits for is repeated
    /// a few times only: it stays on the device.
    fn read_failed(&mut self, frame: FrameId, error: &Error) {
        let word = self.pager.word(self.pager.frames.page(frame)).load();
        let now = Instant::now();
        let shown = self.watch.look(now);
        let intent = &mut self.intents[frame.0 as usize];
        intent.attempts += 1;
        let attempts = intent.attempts;
        let is_over = match intent.access {
            Access::Ahead => attempts >= AHEAD_ATTEMPTS_MAX,
            Access::Read | Access::Write => intent.term.is_over(shown, self.deadline),
        };
        if !is_over && !word.dead() {
            let due = now + pause_before(attempts, self.deadline);
            return self.retries.push(Retry { frame, due });
        }
        self.lose(frame, error);
        self.pager.cancel_fill(frame);
    }

    /// How long it is until a read that failed is to be repeated.
    pub(in crate::paging) fn next_retry(&self) -> Duration {
        let due = self.retries.iter().map(|retry| retry.due).min();
        due.map_or(Duration::MAX, |due| due.saturating_duration_since(Instant::now()))
    }

    /// Accepts the reads that are to be repeated by now, as far as the device takes them.
    pub(in crate::paging) fn start_retries(&mut self) {
        if self.retries.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut at = 0;
        while at < self.retries.len() {
            let Retry { frame, due } = self.retries[at];
            let asked = self.fills.len() + self.queue.in_flight() as usize;
            if due > now || asked >= DEPTH as usize {
                at += 1;
                continue;
            }
            self.retries.swap_remove(at);
            let slot = self.pager.frames.slot(frame).expect("a fill has a slot");
            self.fills.push(Fill { slot, frame, ahead: false });
        }
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
                    // A thread that faulted on it meanwhile waits for this read, and faults again.
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
    pub(in crate::paging) fn check_deadlines(&mut self) {
        const INTERVAL: Duration = Duration::from_millis(50);
        let now = Instant::now();
        if now - self.checked < INTERVAL.min(look_every(self.deadline)) {
            return;
        }
        self.checked = now;
        let shown = self.watch.look(now);
        for at in 0..self.reads.len() {
            let Some(read) = &mut self.reads[at] else { continue };
            if read.overdue || !read.term.is_over(shown, self.deadline) {
                continue;
            }
            let slot = self.pager.frames.slot(read.frames[0]).expect("a fill has a slot");
            self.abandon_read(at, &self.timed_out(Word::stored(slot)));
        }
    }

    /// Whether everything that the device was asked for has passed its deadline.
    pub(in crate::paging) fn is_device_silent(&self) -> bool {
        self.fills.is_empty() && self.reads.iter().flatten().all(|read| read.overdue)
    }

    /// Fails the pages of a read. The frames stay with the device until it answers.
    fn abandon_read(&mut self, token: usize, cause: &Error) {
        let read = self.reads[token].as_mut().expect("an abandoned read is in flight");
        read.overdue = true;
        let read = *read;
        self.pager.counters().read_errors.bump();
        read.frames[..read.count].iter().for_each(|frame| self.break_chunk(*frame));
        read.frames[..read.count].iter().for_each(|frame| self.lose(*frame, cause));
    }
}
