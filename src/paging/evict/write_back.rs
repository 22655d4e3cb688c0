//! Write-back: dirty pages get runs of slots and leave in large writes; what fails comes back.

use crate::base::error::Result;
use crate::base::units::{ByteCount, SlotCount, SlotId};
use crate::paging::diagnostics;
use crate::paging::evict::outgoing::Outgoing;
use crate::paging::page::PAGE;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::protocol::{self, Written};
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::{NO_SLOT, errno_of};
use crate::paging::probes::{self, StallReason};
use crate::paging::transfer::{Aim, LONG_MAX, Transfer, Transfers};
use crate::store::{Op, Store, is_barred, may_come_late};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Write requests in flight.
const DEPTH: u32 = 32;
/// Pause of write-back after a failed write, doubled up to the maximum while writes fail. A device that fails
/// at once would otherwise take all of the evictor's time, and clean pages would not leave.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(200);

/// Writes to come, and writes under way.
pub(in crate::paging) struct WriteBack {
    pager: Arc<Pager>,
    transfers: Transfers,
    /// Frames of pages without a slot yet.
    pub(super) dirty: Vec<FrameId>,
    write_pause: Duration,
    write_again: Option<Instant>,
}

impl WriteBack {
    /// Bytes for a region of this number of frames.
    pub(super) fn bytes(store: &dyn Store, frames: usize) -> usize {
        Transfers::bytes(store, DEPTH) + frames * size_of::<FrameId>()
    }

    /// # Errors
    /// When the store has no queue to give.
    pub(super) fn new(pager: Arc<Pager>) -> Result<WriteBack> {
        let watched = [pager.pool().waiters().evictor_waker().raw_fd()];
        Ok(WriteBack {
            transfers: Transfers::new(Arc::clone(&pager), DEPTH, &watched)?,
            dirty: Vec::with_capacity(pager.frames().count()),
            write_pause: PAUSE_MIN,
            write_again: None,
            pager,
        })
    }

    /// Waits for the device, no longer than `timeout`, and settles what it has done.
    ///
    /// # Errors
    /// When its queue is lost.
    pub(super) fn collect(&mut self, timeout: Duration, outgoing: &mut Outgoing) -> Result<()> {
        self.transfers.wait(timeout)?;
        while let Some((write, result)) = self.transfers.next_finished() {
            match write.aim() {
                Aim::Probe => self.finish_probe(&write, result),
                _ => self.finish(&write, result, outgoing),
            }
        }
        Ok(())
    }

    // What is under way.

    /// Writes of pages.
    fn writes(&self) -> impl Iterator<Item = &Transfer> {
        self.transfers.under_way().filter(|write| write.aim() != Aim::Probe)
    }

    /// Pages that wait for a write, or are being written.
    pub(super) fn pages(&self) -> usize {
        self.dirty.len() + self.writes().map(Transfer::len).sum::<usize>()
    }

    /// More pages that it takes now.
    pub(super) fn room(&self) -> usize {
        let room = self.transfers.room() * LONG_MAX;
        room.saturating_sub(self.dirty.len())
    }

    /// True if nothing is to be written, or being written.
    pub(super) fn is_idle(&self) -> bool {
        self.dirty.is_empty() && !self.has_writes()
    }

    /// True if the device has a write.
    pub(super) fn has_writes(&self) -> bool {
        self.writes().next().is_some()
    }

    /// True if the device has a write that it has not failed to answer.
    pub(super) fn is_writing(&self) -> bool {
        self.writes().any(|write| !write.is_overdue())
    }

    /// True if the device has a write that it has failed to answer.
    pub(super) fn is_stuck(&self) -> bool {
        self.writes().any(Transfer::is_overdue)
    }

    /// True if the device takes another request.
    pub(super) fn has_room(&self) -> bool {
        self.transfers.room() > 0
    }

    /// How long to wait before a failing device is tried again.
    pub(super) fn pause_left(&self) -> Option<Duration> {
        let left = self.write_again?.saturating_duration_since(Instant::now());
        Some(left.max(PAUSE_MIN / 10))
    }

    /// True if write-back waits after a failure: only pages that need no write can go, or those
    /// that may be written over their old slots.
    pub(super) fn is_paused(&self) -> bool {
        self.write_again.is_some_and(|again| Instant::now() < again)
    }

    /// Gives all dirty pages slots, runs of them, and starts their writes, as far as there are
    /// free requests.
    pub(super) fn write_dirty(&mut self, outgoing: &mut Outgoing) {
        if self.dirty.is_empty() {
            return;
        }
        let mut dirty = std::mem::take(&mut self.dirty);
        if self.is_paused() {
            // Only what can be written over its old slot may go while the rest waits.
            let full = self.is_full();
            let mut at = 0;
            while at < dirty.len() {
                if full && self.slot_to_overwrite(dirty[at]).is_some() {
                    at += 1;
                } else {
                    self.put_back(dirty.swap_remove(at), outgoing);
                }
            }
        }
        // Neighbours get consecutive slots, so that they go by one write and come back by one read.
        dirty.sort_unstable_by_key(|frame| self.pager.frames().page(*frame));
        let mut done = 0;
        while done < dirty.len() && self.has_room() {
            let Some(count) = self.write_some(&dirty[done..], outgoing) else { break };
            done += count;
        }
        dirty.drain(..done);
        self.dirty = dirty;
    }

    /// True if write-back fails because the device has no space left.
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
    fn write_some(&mut self, dirty: &[FrameId], outgoing: &mut Outgoing) -> Option<usize> {
        let frame = dirty[0];
        if self.is_full()
            && let Some(slot) = self.slot_to_overwrite(frame)
        {
            // Its old slot, whose content is out of date, takes no space. If the write fails, the
            // page stays in memory without a slot.
            self.pager.frames().forget_slot(frame);
            self.start(Aim::Overwrite, slot, &dirty[..1]);
            return Some(1);
        }
        let want = SlotCount(self.transfers.mergeable(Op::Write, dirty.iter().copied()) as u64);
        self.pager.tables().ready_slots(self.pager.memory(), self.pager.slots(), want);
        let map = self.pager.slots().map();
        let Some((first, got)) = map.take_run(want) else {
            if map.has_asleep() && self.is_writing() {
                return None; // The frames of these pay for the tables of more slots.
            }
            self.fail(NO_SLOT);
            if self.slot_to_overwrite(frame).is_some() {
                return Some(0); // Over its old slot, now that the device counts as full.
            }
            self.put_back(frame, outgoing);
            return Some(1);
        };
        self.start(Aim::WriteBack, first, &dirty[..got.as_usize()]);
        Some(got.as_usize())
    }

    /// Starts writing pages to consecutive slots.
    fn start(&mut self, aim: Aim, first: SlotId, frames: &[FrameId]) {
        self.pager.starved().set_writing(true);
        self.transfers.start(aim, first, frames);
    }

    fn finish(&mut self, write: &Transfer, result: Result<()>, outgoing: &mut Outgoing) {
        self.pager.counters().write_times.add(write.took());
        match result {
            Ok(()) => {
                probes::written(write.len(), write.len() * PAGE);
                if write.aim() == Aim::WriteBack {
                    self.note_works();
                }
                write.pages().for_each(|(slot, frame)| self.written(slot, frame, outgoing));
            }
            Err(error) => {
                // These slots cannot be written, and nothing has failed: others can.
                let is_barred = is_barred(&error);
                if !is_barred {
                    diagnostics::write_failed(&error, self.pager.slots().store().room());
                    self.fail(errno_of(&error) as u32);
                }
                for (slot, frame) in write.pages() {
                    // One that a late write may reach stays in use for ever.
                    self.pager.slots().put(Some(slot).filter(|_| !may_come_late(&error)));
                    if self.pager.frames().slot(frame) == Some(slot) {
                        // Half written: not the page's any more.
                        self.pager.frames().forget_slot(frame);
                    }
                    match is_barred {
                        true => self.dirty.push(frame),
                        false => self.put_back(frame, outgoing),
                    }
                }
            }
        }
        self.pager.starved().set_writing(self.is_writing());
    }

    /// A page's write is done.
    fn written(&self, slot: SlotId, frame: FrameId, outgoing: &mut Outgoing) {
        let pager = &self.pager;
        let (page, old) = (pager.frames().page(frame), pager.frames().slot(frame));
        // Invariant 2: published by the change of the word.
        pager.slots().set_hash(slot, outgoing.hashes[frame.0 as usize]);
        pager.counters().pages_out.bump();
        pager.slots().note_transfer();
        let outcome = protocol::written(pager.word(page), frame, slot);
        pager.slots().put(old);
        match outcome {
            Written::Won => {
                pager.counters().evict_times.add(outgoing.chosen[frame.0 as usize].elapsed());
                outgoing.left.push(page);
                outgoing.freed.push(frame);
            }
            // A handler copied the page out, or it was discarded: neither slot is its any more.
            Written::Taken => outgoing.borrowed.push_back((frame, Some(slot))),
        }
    }

    /// Returns a page that cannot be written to the region.
    fn put_back(&self, frame: FrameId, outgoing: &mut Outgoing) {
        let pager = &self.pager;
        let (page, slot) = (pager.frames().page(frame), pager.frames().slot(frame));
        if protocol::unwritten(pager.word(page), frame, slot) == Written::Taken {
            // A handler copied the page out, or it was discarded: the old slot is this thread's.
            pager.slots().put(slot);
            outgoing.borrowed.push_back((frame, None));
            return;
        }
        // Where pages are copied the frame's charge moves to the page; the frame's memory goes right after.
        if let Err(error) = pager.memory().return_frame(page, frame) {
            diagnostics::fatal("a page could not be returned after a failed write", &error);
        }
        pager.memory().publish_mapped(page, Word::moving(slot), Word::resident(slot), None);
        drop(pager.frames().release(frame));
    }

    /// Pauses write-back; clean pages are evicted meanwhile.
    fn fail(&mut self, errno: u32) {
        if errno != NO_SLOT {
            self.pager.counters().write_errors.bump();
        }
        self.pause(errno);
    }

    fn pause(&mut self, errno: u32) {
        probes::stalled(StallReason::WritesPaused);
        self.pager.health().note_write_failed(errno);
        self.write_again = Some(Instant::now() + self.write_pause);
        self.write_pause = (self.write_pause * 2).min(PAUSE_MAX);
    }

    /// Notes a write that took new space: the device can be written.
    fn note_works(&mut self) {
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
        let mut from = 0;
        while let Some((write, error)) = self.transfers.next_overdue(&mut from, Duration::ZERO) {
            if write.aim() != Aim::Probe {
                diagnostics::warn("the device does not answer a write", &error);
                self.pager.counters().write_errors.bump();
                self.pager.health().note_write_failed(errno_of(&error) as u32);
                self.pager.health().set_exhausted(true);
                self.pager.starved().set_writing(self.is_writing());
            }
        }
        if !self.has_writes() {
            return;
        }
        let starving = self.pager.pool().waiters().is_starving();
        let (shown, half) = (self.transfers.shown(), self.pager.health().deadline() / 2);
        // A fault that waits for room is given up after the deadline: it must not come to that.
        let is_late = |write: &&Transfer| write.is_overdue() || starving && write.age(shown) > half;
        self.writes().filter(is_late).for_each(|write| self.rescue(write));
    }

    /// Moves the pages of a write back into the region as far as the kernel lets them go. They
    /// need no more room there, and are out of the device's hands; frames and slots are not.
    fn rescue(&self, write: &Transfer) {
        let pager = &self.pager;
        if !pager.pool().moves() {
            return;
        }
        for (_, frame) in write.pages() {
            let page = pager.frames().page(frame);
            if !protocol::rescue(pager.word(page), frame) {
                continue;
            }
            if !pager.memory().try_return(page, frame) {
                protocol::not_rescued(pager.word(page), frame);
                // So it is with the others, most probably: the device has pinned them.
                return;
            }
            let slot = pager.frames().slot(frame);
            pager.frames().forget_slot(frame);
            pager.memory().publish_mapped(page, Word::moving(None), Word::resident(slot), None);
            pager.frames().decide(frame, FrameOutcome::MovedBack);
        }
    }

    // Recovery.

    /// Takes a failure back that has no cause any more, or tries whether it has.
    pub(super) fn recover(&mut self) {
        match self.pager.health().write_errno() {
            0 => {}
            NO_SLOT if self.pager.slots().map().in_use() < self.pager.slots().map().slots() => {
                self.note_works();
            }
            NO_SLOT => {}
            _ if self.is_paused() || !self.transfers.is_idle() => {}
            _ => self.start_probe(),
        }
    }

    /// Writes zeros to a free slot. While write-back fails the region takes no more data than it certainly can keep, so
    /// after most of it was freed nothing needs to be written, and no write could tell that the device has recovered.
    fn start_probe(&mut self) {
        let pager = &self.pager;
        let Some((slot, _)) = pager.slots().map().take_run(SlotCount(1)) else {
            return;
        };
        let Some(frame) = pager.pool().charged_frame(ByteCount::ZERO) else {
            return pager.slots().put(Some(slot));
        };
        pager.frames().clear(frame);
        self.transfers.start(Aim::Probe, slot, &[frame]);
    }

    fn finish_probe(&mut self, probe: &Transfer, result: Result<()>) {
        let is_late = result.as_ref().is_err_and(may_come_late);
        for (slot, frame) in probe.pages() {
            self.pager.slots().put(Some(slot).filter(|_| !is_late));
            self.pager.pool().recycle(frame, 1);
        }
        match result {
            Ok(()) => self.note_works(),
            // This slot cannot be written, and nothing has failed: the next can.
            Err(error) if is_barred(&error) => self.recover(),
            Err(error) => self.pause(errno_of(&error) as u32),
        }
    }
}
