//! Recovery: finds out that write-back works again when there is no page to write.
//!
//! While write-back fails the region takes no more data than it certainly can keep, so after most
//! of it was freed nothing needs to be written, and no write could tell that the device has
//! recovered. Then the evictor writes a frame of zeros to a free slot now and then.

use crate::base::units::{ByteCount, SlotCount};
use crate::paging::evict::Evictor;
use crate::paging::evict::write_back::{PROBE, Probe, WriteBack};
use crate::paging::page::frames::push;
use crate::paging::pager::health::NO_SLOT;
use crate::paging::pager::health::errno_of;
use crate::store::{Completion, Op, Request, Segment};

impl Evictor {
    /// While there is room, and nothing is being written that would tell: takes back what was said
    /// when there was none, and tries whether the device can be written. (What cools may do so for
    /// ever while there is room.)
    pub(super) fn recover(&mut self) {
        let pager = &self.pager;
        // Below the low watermark pages are on their way out, or would be.
        let has_room = pager.pool().available() >= pager.pool().watermarks().low();
        if !has_room || !self.writes.is_idle() || self.writes.probe.is_some() {
            return;
        }
        if pager.health().is_exhausted() {
            // What nobody could make has been given back.
            self.made_room(1);
        }
        self.writes.recover();
    }
}

impl WriteBack {
    /// Takes a failure back that has no cause any more, or tries whether it has.
    fn recover(&mut self) {
        match self.pager.health().write_errno() {
            0 => {}
            NO_SLOT if self.pager.slots().map().in_use() < self.pager.slots().map().slots() => {
                self.note_works();
            }
            NO_SLOT => {}
            _ if self.is_paused() => {}
            _ => self.start_probe(),
        }
    }

    fn start_probe(&mut self) {
        let pager = &self.pager;
        let Some((slot, _)) = pager.slots().map().take_run(SlotCount(1)) else {
            return;
        };
        let Some(frame) = pager.pool().charged_frame(ByteCount::ZERO) else {
            return pager.put_slot(Some(slot));
        };
        pager.frames().clear(frame);
        let segments = [Segment { ptr: pager.frames().ptr(frame), len: pager.page_bytes() }];
        let request = Request {
            token: PROBE,
            op: Op::Write,
            offset: pager.slot_offset(slot),
            segments: &segments,
        };
        self.probe = Some(Probe { slot, frame });
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        let pushed = self.pager.guarded(|| push(queue, request));
        // After a panic of a store that may have taken the request, its answer is waited for.
        let is_taken = pushed.unwrap_or(self.queue.in_flight() != before);
        if !is_taken {
            let (pager, len) = (&self.pager, self.pager.page_bytes() as u64);
            let result = Err(pager.slots().failed("write", Some(slot), len, crate::sys::EIO));
            self.finish_probe(Completion { token: PROBE, result });
        }
    }

    pub(super) fn finish_probe(&mut self, completion: Completion) {
        let Probe { slot, frame } = self.probe.take().expect("a completion has its write");
        let errno = completion.result.map_err(|error| errno_of(&error) as u32);
        if errno.is_ok() {
            self.note_works();
        }
        self.pager.put_slot(Some(slot));
        self.pager.pool().recycle(frame);
        if let Err(errno) = errno {
            self.pause(errno);
        }
    }
}
