//! Write-back: dirty pages get runs of slots and leave in large writes; what fails comes back.

use crate::base::deadline::Term;
use crate::base::units::{SlotCount, SlotId};
use crate::paging::diagnostics;
use crate::paging::evict::Evictor;
use crate::paging::evict::content;
use crate::paging::evict::state::{Dirty, Linger, PAUSE_MIN, PROBE, Write};
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::frames::push;
use crate::paging::page::protocol::{self, Written};
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::health::NO_SLOT;
use crate::paging::pager::health::errno_of;
use crate::paging::pager::transfer;
use crate::paging::tables::charge;
use crate::store::{Completion, Op, Request, SEGMENTS_MAX, Segment};
use crate::sys::uffd::Protect;
use std::time::{Duration, Instant};

/// Bytes of one merged write.
const WRITE_BYTES_MAX: usize = 1 << 20;
const PAUSE_MAX: Duration = Duration::from_millis(200);

impl Evictor {
    /// Whether write-back waits after a failure: only pages that need no write can go, or those
    /// that may be written over their old slots.
    pub(super) fn is_paused(&self) -> bool {
        self.device.write_again.is_some_and(|again| Instant::now() < again)
    }

    pub(super) fn pages_per_write(&self) -> usize {
        (WRITE_BYTES_MAX / self.pager.page_bytes()).clamp(1, SEGMENTS_MAX)
    }

    /// Gives all dirty pages slots, runs of them, and starts their writes, as far as there are
    /// free requests.
    pub(super) fn write_dirty(&mut self) {
        if self.device.dirty.is_empty() {
            return;
        }
        let mut dirty = std::mem::take(&mut self.device.dirty);
        if self.is_paused() {
            // Only what can be written over its old slot may go while the rest waits.
            let full = self.device_is_full();
            let mut at = 0;
            while at < dirty.len() {
                if full && self.slot_to_overwrite(dirty[at].frame).is_some() {
                    at += 1;
                } else {
                    self.put_back(dirty.swap_remove(at));
                }
            }
        }
        dirty.sort_unstable_by_key(|dirty| dirty.page);
        let mut done = 0;
        while done < dirty.len() && !self.device.free_writes.is_empty() {
            let Some(count) = self.write_some(&mut dirty[done..]) else { break };
            done += count;
        }
        dirty.drain(..done);
        self.device.dirty = dirty;
    }

    /// Whether write-back fails because the device has no space left.
    pub(super) fn device_is_full(&self) -> bool {
        let errno = self.pager.health().write_errno();
        errno == crate::sys::ENOSPC as u32 || errno == NO_SLOT
    }

    /// The old slot of a page that is being written, unless a forked child may still read it.
    fn slot_to_overwrite(&self, frame: FrameId) -> Option<SlotId> {
        self.pager.frames().slot(frame).filter(|slot| !self.pager.slots().map().is_held(*slot))
    }

    /// Starts one write, or returns a page that there is no space for; returns for how many of the
    /// first pages. `None`: they wait for writes under way.
    fn write_some(&mut self, dirty: &mut [Dirty]) -> Option<usize> {
        let Dirty { frame, .. } = dirty[0];
        if self.device_is_full()
            && let Some(slot) = self.slot_to_overwrite(frame)
        {
            // Its old slot, whose content is out of date, takes no space. If the write fails, the
            // page stays in memory without a slot.
            self.pager.frames().forget_slot(frame);
            dirty[0].slot = slot;
            self.start_write(&dirty[..1], true);
            return Some(1);
        }
        let want = self.count_for_write(dirty);
        charge::ready_slots(&self.pager, SlotCount(want as u64));
        let Some((first, got)) = self.pager.slots().map().take_run(SlotCount(want as u64)) else {
            if self.pager.slots().map().has_asleep() && self.is_writing() {
                return None; // The frames of these pay for the tables of more slots.
            }
            self.writes_fail(NO_SLOT);
            if self.slot_to_overwrite(frame).is_some() {
                return Some(0); // Over its old slot, now that the device counts as full.
            }
            self.put_back(dirty[0]);
            return Some(1);
        };
        for (n, dirty) in dirty[..got.as_usize()].iter_mut().enumerate() {
            dirty.slot = SlotId(first.0 + n as u64);
        }
        self.start_write(&dirty[..got.as_usize()], false);
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
    fn start_write(&mut self, run: &[Dirty], in_place: bool) {
        let token = self.device.free_writes.pop().expect("the caller looked");
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
        let term = Term::start(self.device.watch.look(started));
        let write = &mut self.device.writes[token];
        write.pages.extend_from_slice(run);
        (write.started, write.term) = (started, term);
        (write.overdue, write.in_place) = (false, in_place);
        self.pager.starved().set_writing(true);
        self.pager.counters().writes_in_flight.up();
        let before = self.device.queue.in_flight();
        let queue = &mut *self.device.queue;
        match self.pager.guarded(|| push(queue, request)) {
            Some(pushed) => assert!(pushed, "writes are bounded by the queue's depth"),
            // A panic before the store took the request is a write that failed. Else whether the
            // device has it is unknown: as if it never answered.
            None if self.device.queue.in_flight() == before => {
                let offset = self.pager.slot_offset(run[0].slot);
                let len = (run.len() * self.pager.page_bytes()) as u64;
                let error = crate::Error::Io { op: "write", offset, len, errno: crate::sys::EIO };
                self.finish_write(Completion { token: token as u64, result: Err(error) });
            }
            None => self.abandon_write(token, crate::sys::EIO),
        }
    }

    pub(super) fn finish_write(&mut self, completion: Completion) {
        if completion.token == PROBE {
            return self.finish_probe(completion);
        }
        let token = completion.token as usize;
        let mut run = std::mem::take(&mut self.device.writes[token].pages);
        assert!(!run.is_empty(), "a completion has its write");
        let Write { started, in_place, .. } = self.device.writes[token];
        self.pager.counters().writes_in_flight.down();
        self.pager.counters().write_times.add(started.elapsed());
        match completion.result {
            Ok(()) => {
                if !in_place {
                    self.writes_work();
                }
                run.iter().for_each(|dirty| self.written(dirty));
                self.let_go();
            }
            Err(error) => {
                diagnostics::write_failed(
                    &error,
                    self.pager.slots().description(),
                    self.pager.slots().store().room(),
                );
                self.writes_fail(errno_of(&error) as u32);
                run.iter().for_each(|dirty| {
                    self.pager.slots().map().put(dirty.slot);
                    if self.pager.frames().slot(dirty.frame) == Some(dirty.slot) {
                        // Half written: not the page's any more.
                        self.pager.frames().forget_slot(dirty.frame);
                    }
                    self.put_back(*dirty);
                });
            }
        }
        run.clear();
        self.device.writes[token].pages = run;
        self.device.free_writes.push(token);
        self.pager.starved().set_writing(self.is_writing());
    }

    /// A page's write is done.
    fn written(&mut self, dirty: &Dirty) {
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
                pager
                    .counters()
                    .evict_times
                    .add(self.leaving.chosen[dirty.frame.0 as usize].elapsed());
                self.leaving.left.push(dirty.page);
                self.leaving.freed.push(dirty.frame);
            }
            Written::Taken => {
                // A handler copied the page out, or it was discarded: neither slot is its any more.
                let written = Some(dirty.slot);
                let Dirty { page, frame, .. } = *dirty;
                self.leaving.lingering.push_back(Linger { page, frame, written });
            }
        }
    }

    /// Returns a page that cannot be written to the region.
    fn put_back(&mut self, dirty: Dirty) {
        let pager = &self.pager;
        let Dirty { page, frame, .. } = dirty;
        let slot = pager.frames().slot(frame);
        match protocol::unwritten(pager.word(page), frame, slot) {
            Written::Won => {}
            Written::Taken => {
                // A handler copied the page out, or it was discarded: the old slot is this
                // thread's.
                pager.put_slot(slot);
                self.leaving.lingering.push_back(Linger { page, frame, written: None });
                return;
            }
        }
        let moving = Word::moving(slot);
        if !pager.pool().evicts_by_move() {
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
    fn writes_fail(&mut self, errno: u32) {
        if errno != NO_SLOT {
            self.pager.counters().write_errors.bump();
        }
        self.writes_pause(errno);
    }

    pub(super) fn writes_pause(&mut self, errno: u32) {
        self.pager.health().note_write_failed(errno);
        self.device.write_again = Some(Instant::now() + self.device.write_pause);
        self.device.write_pause = (self.device.write_pause * 2).min(PAUSE_MAX);
    }

    /// Notes a write that took new space: the device can be written.
    pub(super) fn writes_work(&mut self) {
        if self.pager.health().note_write_works() {
            self.device.write_again = None;
            self.device.write_pause = PAUSE_MIN;
        }
    }

    /// Reports writes that the device has not answered in time, and rescues their pages, earlier
    /// where faults wait for room. Those that the kernel holds on to stay readable: a handler copies them out where there is room.
    pub(super) fn check_deadlines(&mut self) {
        if self.device.free_writes.len() == self.device.writes.len() {
            return;
        }
        let starving = self.pager.pool().waiters().is_starving();
        let shown = self.device.watch.look(Instant::now());
        for token in 0..self.device.writes.len() {
            let write = &mut self.device.writes[token];
            if write.pages.is_empty() {
                continue;
            }
            let age = write.term.age(shown);
            if write.term.is_over(shown, self.device.deadline) && !write.overdue {
                let error = crate::Error::Io {
                    op: "write",
                    offset: self.pager.slot_offset(write.pages[0].slot),
                    len: (write.pages.len() * self.pager.page_bytes()) as u64,
                    errno: crate::sys::ETIMEDOUT,
                };
                diagnostics::warn("the device does not answer a write", &error);
                self.abandon_write(token, crate::sys::ETIMEDOUT);
            }
            // A fault that waits for room is given up after the deadline: it must not come to that.
            if self.device.writes[token].overdue || starving && age > self.device.deadline / 2 {
                self.rescue(token);
            }
        }
    }

    /// Moves the pages of a write back into the region as far as the kernel lets them go. They
    /// need no more room there, and are out of the device's hands; frames and slots are not.
    fn rescue(&self, token: usize) {
        let pager = &self.pager;
        if !pager.pool().evicts_by_move() {
            return;
        }
        for &Dirty { page, frame, .. } in &self.device.writes[token].pages {
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

    fn abandon_write(&mut self, token: usize, errno: i32) {
        self.device.writes[token].overdue = true;
        self.pager.starved().set_writing(self.is_writing());
        self.pager.counters().write_errors.bump();
        self.pager.health().note_write_failed(errno as u32);
        self.pager.health().set_exhausted(true);
    }
}
