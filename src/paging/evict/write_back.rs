//! Write-back: dirty pages get runs of slots and leave in large writes; what fails comes back.

use crate::base::deadline::{Stopwatch, Term};
use crate::base::error::Result;
use crate::base::units::{SlotCount, SlotId};
use crate::paging::diagnostics;
use crate::paging::evict::content;
use crate::paging::evict::leaving::{Dirty, Leaving, Linger};
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::frames::push;
use crate::paging::page::protocol::{self, Written};
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::NO_SLOT;
use crate::paging::pager::health::errno_of;
use crate::paging::pager::transfer;
use crate::paging::tables::charge;
use crate::store::{Completion, Op, Queue, Request, SEGMENTS_MAX, Segment, queue_bytes};
use crate::sys::uffd::Protect;
use crate::sys::vm::HUGE_PAGE;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Write requests in flight.
const DEPTH: u32 = 32;
/// The token of a test write, beyond those of other writes.
pub(super) const PROBE: u64 = DEPTH as u64;
/// Pause of write-back after a failed write, doubled up to the maximum while writes fail. A device that fails
/// at once would otherwise take all of the evictor's time, and clean pages would not leave.
const PAUSE_MIN: Duration = Duration::from_millis(10);
/// Bytes of one merged write.
const WRITE_BYTES_MAX: usize = 1 << 20;
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// A write: pages in consecutive slots. Without pages it is free.
#[derive(Debug)]
struct Write {
    pages: Vec<Dirty>,
    started: Instant,
    /// Since the device got it.
    term: Term,
    overdue: bool,
    /// Over the page's old slot: says nothing about space for others.
    in_place: bool,
}

impl Write {
    /// Pages that one ever has at most.
    fn pages_max(page_bytes: usize) -> usize {
        (HUGE_PAGE / page_bytes).max(SEGMENTS_MAX)
    }

    /// A free one, for as many pages as a write ever has.
    fn new(page_bytes: usize) -> Write {
        let pages = Vec::with_capacity(Write::pages_max(page_bytes));
        let term = Term::start(Duration::ZERO);
        Write { pages, started: Instant::now(), term, overdue: false, in_place: false }
    }
}

/// A test write on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) slot: SlotId,
    pub(super) frame: FrameId,
}

/// Writes to come, and writes under way.
pub(in crate::paging) struct WriteBack {
    pub(super) pager: Arc<Pager>,
    pub(super) queue: Box<dyn Queue>,
    /// Pages without a slot yet.
    pub(super) dirty: Vec<Dirty>,
    writes: Vec<Write>,
    free_writes: Vec<usize>,
    finished: Vec<Completion>,
    write_pause: Duration,
    write_again: Option<Instant>,
    pub(super) probe: Option<Probe>,
    deadline: Duration,
    /// Tells how long the device has had a write.
    watch: Stopwatch,
}

impl WriteBack {
    /// Bytes for a region of this number of frames.
    pub(super) fn bytes(frames: usize, page_bytes: usize) -> usize {
        let write = size_of::<Write>()
            + Write::pages_max(page_bytes) * size_of::<Dirty>()
            + size_of::<Completion>();
        queue_bytes(DEPTH + 1, SEGMENTS_MAX) + frames * size_of::<Dirty>() + DEPTH as usize * write
    }

    /// # Errors
    /// When the store has no queue to give.
    pub(super) fn new(pager: Arc<Pager>, deadline: Duration) -> Result<WriteBack> {
        let mut queue = pager.slots().store().open_queue(DEPTH + 1)?; // With a test write.
        queue.watch(pager.pool().waiters().evictor_bell().raw_fd())?;
        Ok(WriteBack {
            queue,
            dirty: Vec::with_capacity(pager.frames().count()),
            writes: (0..DEPTH).map(|_| Write::new(pager.page_bytes())).collect(),
            free_writes: (0..DEPTH as usize).collect(),
            finished: Vec::with_capacity(DEPTH as usize),
            write_pause: PAUSE_MIN,
            write_again: None,
            probe: None,
            deadline,
            watch: Stopwatch::start(deadline, Instant::now()),
            pager,
        })
    }

    /// Waits for the device, no longer than `timeout`, and settles what it has done.
    ///
    /// # Errors
    /// When its queue is lost.
    pub(super) fn collect(&mut self, timeout: Duration, leaving: &mut Leaving) -> Result<()> {
        let (queue, finished) = (&mut self.queue, &mut self.finished);
        let mut done = |completion| finished.push(completion);
        self.pager.guarded(|| queue.wait(timeout, &mut done)).unwrap_or(Ok(false))?;
        while let Some(completion) = self.finished.pop() {
            self.finish(completion, leaving);
        }
        Ok(())
    }

    // What is under way.

    /// Pages that wait for a write, or are being written.
    pub(super) fn pages(&self) -> usize {
        let writing: usize = self.writes.iter().map(|write| write.pages.len()).sum();
        self.dirty.len() + writing
    }

    /// More pages that it takes now.
    pub(super) fn room(&self) -> usize {
        (self.free_writes.len() * self.pages_per_write()).saturating_sub(self.dirty.len())
    }

    /// Whether nothing is to be written, or being written.
    pub(super) fn is_idle(&self) -> bool {
        self.dirty.is_empty() && !self.has_writes()
    }

    /// Whether the device has a write.
    pub(super) fn has_writes(&self) -> bool {
        self.free_writes.len() < DEPTH as usize
    }

    /// Whether the device has a write that it has not failed to answer.
    pub(super) fn is_writing(&self) -> bool {
        self.writes.iter().any(|write| !write.pages.is_empty() && !write.overdue)
    }

    /// Whether the device has a write that it has failed to answer.
    pub(super) fn is_stuck(&self) -> bool {
        self.writes.iter().any(|write| !write.pages.is_empty() && write.overdue)
    }

    /// Whether the device takes another request.
    pub(super) fn has_room(&self) -> bool {
        self.queue.in_flight() < DEPTH
    }

    /// How long the device has to answer.
    pub(super) fn deadline(&self) -> Duration {
        self.deadline
    }

    /// How long to wait before a failing device is tried again.
    pub(super) fn pause_left(&self) -> Option<Duration> {
        let left = self.write_again?.saturating_duration_since(Instant::now());
        Some(left.max(PAUSE_MIN / 10))
    }

    /// Whether write-back waits after a failure: only pages that need no write can go, or those
    /// that may be written over their old slots.
    pub(super) fn is_paused(&self) -> bool {
        self.write_again.is_some_and(|again| Instant::now() < again)
    }

    fn pages_per_write(&self) -> usize {
        (WRITE_BYTES_MAX / self.pager.page_bytes()).clamp(1, SEGMENTS_MAX)
    }

    /// Gives all dirty pages slots, runs of them, and starts their writes, as far as there are
    /// free requests.
    pub(super) fn write_dirty(&mut self, leaving: &mut Leaving) {
        if self.dirty.is_empty() {
            return;
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        if self.is_paused() {
            // Only what can be written over its old slot may go while the rest waits.
            let full = self.is_full();
            let mut at = 0;
            while at < dirty.len() {
                if full && self.slot_to_overwrite(dirty[at].frame).is_some() {
                    at += 1;
                } else {
                    self.put_back(dirty.swap_remove(at), leaving);
                }
            }
        }
        // Neighbours get consecutive slots, so that they go by one write and come back by one read.
        dirty.sort_unstable_by_key(|dirty| dirty.page);
        let mut done = 0;
        while done < dirty.len() && !self.free_writes.is_empty() {
            let Some(count) = self.write_some(&mut dirty[done..], leaving) else { break };
            done += count;
        }
        dirty.drain(..done);
        self.dirty = dirty;
    }

    /// Whether write-back fails because the device has no space left.
    pub(super) fn is_full(&self) -> bool {
        let errno = self.pager.health().write_errno();
        errno == crate::sys::ENOSPC as u32 || errno == NO_SLOT
    }

    /// The old slot of a page that is being written, unless a forked child may still read it.
    fn slot_to_overwrite(&self, frame: FrameId) -> Option<SlotId> {
        self.pager.frames().slot(frame).filter(|slot| !self.pager.slots().map().is_held(*slot))
    }

    /// Starts one write, or returns a page that there is no space for; returns for how many of the
    /// first pages. `None`: they wait for writes under way.
    fn write_some(&mut self, dirty: &mut [Dirty], leaving: &mut Leaving) -> Option<usize> {
        let Dirty { frame, .. } = dirty[0];
        if self.is_full()
            && let Some(slot) = self.slot_to_overwrite(frame)
        {
            // Its old slot, whose content is out of date, takes no space. If the write fails, the
            // page stays in memory without a slot.
            self.pager.frames().forget_slot(frame);
            dirty[0].slot = slot;
            self.start(&dirty[..1], true, leaving);
            return Some(1);
        }
        let want = SlotCount(self.count_for_write(dirty) as u64);
        charge::ready_slots(&self.pager, want);
        let map = self.pager.slots().map();
        let Some((first, got)) = map.take_run(want) else {
            if map.has_asleep() && self.is_writing() {
                return None; // The frames of these pay for the tables of more slots.
            }
            self.fail(NO_SLOT);
            if self.slot_to_overwrite(frame).is_some() {
                return Some(0); // Over its old slot, now that the device counts as full.
            }
            self.put_back(dirty[0], leaving);
            return Some(1);
        };
        for (n, dirty) in dirty[..got.as_usize()].iter_mut().enumerate() {
            dirty.slot = SlotId(first.0 + n as u64);
        }
        self.start(&dirty[..got.as_usize()], false, leaving);
        Some(got.as_usize())
    }

    /// How many of the first pages one write takes. A run of frames leaves alone and whole.
    fn count_for_write(&self, dirty: &[Dirty]) -> usize {
        let frames = self.pager.frames();
        let run = frames.run_of(dirty[0].frame);
        let most = if run.is_some() { frames.run_frames() } else { self.pages_per_write() };
        let (mut count, mut segments) = (1, 1);
        while count < dirty.len().min(most) && frames.run_of(dirty[count].frame) == run {
            segments += usize::from(!dirty[count].is_beside(&dirty[count - 1]));
            if segments > SEGMENTS_MAX {
                break;
            }
            count += 1;
        }
        count
    }

    /// Starts writing a run of pages to their consecutive slots.
    fn start(&mut self, run: &[Dirty], in_place: bool, leaving: &mut Leaving) {
        let token = self.free_writes.pop().expect("the caller looked");
        let mut segments = [Segment { ptr: std::ptr::null_mut(), len: 0 }; SEGMENTS_MAX];
        let mut count = 0;
        for (n, dirty) in run.iter().enumerate() {
            if n > 0 && dirty.is_beside(&run[n - 1]) {
                segments[count - 1].len += self.pager.page_bytes();
                continue;
            }
            let ptr = self.pager.frames().ptr(dirty.frame);
            segments[count] = Segment { ptr, len: self.pager.page_bytes() };
            count += 1;
        }
        let request = Request {
            token: token as u64,
            op: Op::Write,
            offset: self.pager.slot_offset(run[0].slot),
            segments: &segments[..count],
        };
        let started = Instant::now();
        let term = Term::start(self.watch.look(started));
        let write = &mut self.writes[token];
        write.pages.extend_from_slice(run);
        (write.started, write.term) = (started, term);
        (write.overdue, write.in_place) = (false, in_place);
        self.pager.starved().set_writing(true);
        self.pager.counters().writes_in_flight.up();
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        match self.pager.guarded(|| push(queue, request)) {
            Some(pushed) => assert!(pushed, "writes are bounded by the queue's depth"),
            // A panic before the store took the request is a write that failed. Else whether the
            // device has it is unknown: as if it never answered.
            None if self.queue.in_flight() == before => {
                let len = (run.len() * self.pager.page_bytes()) as u64;
                let (slots, first) = (self.pager.slots(), Some(run[0].slot));
                let error = slots.failed("write", first, len, crate::sys::EIO);
                self.finish(Completion { token: token as u64, result: Err(error) }, leaving);
            }
            None => self.abandon(token, crate::sys::EIO),
        }
    }

    fn finish(&mut self, completion: Completion, leaving: &mut Leaving) {
        if completion.token == PROBE {
            return self.finish_probe(completion);
        }
        let token = completion.token as usize;
        let mut run = std::mem::take(&mut self.writes[token].pages);
        assert!(!run.is_empty(), "a completion has its write");
        let Write { started, in_place, .. } = self.writes[token];
        self.pager.counters().writes_in_flight.down();
        self.pager.counters().write_times.add(started.elapsed());
        match completion.result {
            Ok(()) => {
                if !in_place {
                    self.note_works();
                }
                run.iter().for_each(|dirty| self.written(dirty, leaving));
            }
            Err(error) => {
                diagnostics::write_failed(&error, self.pager.slots().store().room());
                self.fail(errno_of(&error) as u32);
                run.iter().for_each(|dirty| {
                    self.pager.slots().map().put(dirty.slot);
                    if self.pager.frames().slot(dirty.frame) == Some(dirty.slot) {
                        // Half written: not the page's any more.
                        self.pager.frames().forget_slot(dirty.frame);
                    }
                    self.put_back(*dirty, leaving);
                });
            }
        }
        run.clear();
        self.writes[token].pages = run;
        self.free_writes.push(token);
        self.pager.starved().set_writing(self.is_writing());
    }

    /// A page's write is done.
    fn written(&self, dirty: &Dirty, leaving: &mut Leaving) {
        let pager = &self.pager;
        // Invariant 2: published by the change of the word.
        pager.slots().set_hash(dirty.slot, dirty.hash);
        pager.counters().pages_out.bump();
        pager.slots().note_transfer();
        let old = pager.frames().slot(dirty.frame);
        let outcome = protocol::written(pager.word(dirty.page), dirty.frame, dirty.slot);
        pager.put_slot(old);
        match outcome {
            Written::Won => {
                pager.counters().evict_times.add(leaving.chosen[dirty.frame.0 as usize].elapsed());
                leaving.left.push(dirty.page);
                leaving.freed.push(dirty.frame);
            }
            Written::Taken => {
                // A handler copied the page out, or it was discarded: neither slot is its any more.
                let written = Some(dirty.slot);
                let Dirty { page, frame, .. } = *dirty;
                leaving.lingering.push_back(Linger { page, frame, written });
            }
        }
    }

    /// Returns a page that cannot be written to the region.
    fn put_back(&self, dirty: Dirty, leaving: &mut Leaving) {
        let pager = &self.pager;
        let Dirty { page, frame, .. } = dirty;
        let slot = pager.frames().slot(frame);
        match protocol::unwritten(pager.word(page), frame, slot) {
            Written::Won => {}
            Written::Taken => {
                // A handler copied the page out, or it was discarded: the old slot is this
                // thread's.
                pager.put_slot(slot);
                leaving.lingering.push_back(Linger { page, frame, written: None });
                return;
            }
        }
        let moving = Word::moving(slot);
        if !pager.pool().moves().evict {
            // The frame's charge moves to the page; the frame's memory goes right after.
            if let Err(error) = transfer::copy_rest(pager, page, frame, 0, Protect::No) {
                diagnostics::fatal("a page could not be returned after a failed write", &error);
            }
            pager.publish_mapped(page, moving, Word::resident(slot), None);
            drop(pager.frames().release(frame));
            return;
        }
        match content::return_frame(pager, page, frame) {
            Ok(_) => {
                pager.publish_mapped(page, moving, Word::resident(slot), None);
                drop(pager.frames().release(frame));
            }
            Err(error) => {
                diagnostics::fatal("a page could not be returned after a failed write", &error)
            }
        }
    }

    /// Pauses write-back; clean pages are evicted meanwhile.
    fn fail(&mut self, errno: u32) {
        if errno != NO_SLOT {
            self.pager.counters().write_errors.bump();
        }
        self.pause(errno);
    }

    pub(super) fn pause(&mut self, errno: u32) {
        self.pager.health().note_write_failed(errno);
        self.write_again = Some(Instant::now() + self.write_pause);
        self.write_pause = (self.write_pause * 2).min(PAUSE_MAX);
    }

    /// Notes a write that took new space: the device can be written.
    pub(super) fn note_works(&mut self) {
        if self.pager.health().note_write_works() {
            self.write_again = None;
            self.write_pause = PAUSE_MIN;
            // Faults that come from now on wait for a deadline of their own.
            self.pager.starved().note_room_made(true);
        }
    }

    /// Reports writes that the device has not answered in time, and rescues their pages, earlier
    /// where faults wait for room. Those that the kernel holds on to stay readable: a handler
    /// copies them out where there is room.
    pub(super) fn check_deadlines(&mut self) {
        if !self.has_writes() {
            return;
        }
        let starving = self.pager.pool().waiters().is_starving();
        let shown = self.watch.look(Instant::now());
        for token in 0..self.writes.len() {
            let write = &mut self.writes[token];
            if write.pages.is_empty() {
                continue;
            }
            let age = write.term.age(shown);
            if write.term.is_over(shown, self.deadline) && !write.overdue {
                let len = (write.pages.len() * self.pager.page_bytes()) as u64;
                let (slots, first) = (self.pager.slots(), Some(write.pages[0].slot));
                let error = slots.failed("write", first, len, crate::sys::ETIMEDOUT);
                diagnostics::warn("the device does not answer a write", &error);
                self.abandon(token, crate::sys::ETIMEDOUT);
            }
            // A fault that waits for room is given up after the deadline: it must not come to that.
            if self.writes[token].overdue || starving && age > self.deadline / 2 {
                self.rescue(token);
            }
        }
    }

    /// Moves the pages of a write back into the region as far as the kernel lets them go. They
    /// need no more room there, and are out of the device's hands; frames and slots are not.
    fn rescue(&self, token: usize) {
        let pager = &self.pager;
        if !pager.pool().moves().evict {
            return;
        }
        for &Dirty { page, frame, .. } in &self.writes[token].pages {
            if !protocol::rescue(pager.word(page), frame) {
                continue;
            }
            if !content::try_return(pager, page, frame) {
                protocol::not_rescued(pager.word(page), frame);
                // So it is with the others, most probably: the device has pinned them.
                return;
            }
            let slot = pager.frames().slot(frame);
            pager.frames().forget_slot(frame);
            pager.publish_mapped(page, Word::moving(None), Word::resident(slot), None);
            pager.frames().decide(frame, FrameOutcome::MovedBack);
        }
    }

    fn abandon(&mut self, token: usize, errno: i32) {
        self.writes[token].overdue = true;
        self.pager.starved().set_writing(self.is_writing());
        self.pager.counters().write_errors.bump();
        self.pager.health().note_write_failed(errno as u32);
        self.pager.health().set_exhausted(true);
    }
}
