//! No room: faults that wait until the evictor has made some, and those that are given up.
//!
//! The waiting faults themselves, and their order, are in [`starved`](crate::paging::fault::starved).

use crate::base::error::Error;
use crate::base::units::{PageId, SlotId};
use crate::paging::diagnostics;
use crate::paging::fault::starved::{RoomClass, StarvedFault};
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::NO_SLOT;
use crate::paging::pager::install;
use crate::paging::tables::charge;
use crate::sys;
use crate::sys::uffd::Fault;
use std::time::{Duration, Instant};

/// How long a fault on a page without content may wait for room after the evictor found nothing to
/// evict, while the device takes writes: everything is pinned, or not far memory. A fault on a page
/// with content waits on; after this time that is reported.
pub(super) const STARVED_MAX: Duration = Duration::from_secs(2);

impl Pager {
    /// Notes that room was made, which is progress for the faults that wait for it.
    pub(in crate::paging) fn note_room_made(&self) {
        self.health().set_exhausted(false);
        self.starved().note_room_made(self.health().write_errno() == 0);
    }

    /// Whether no room can be made for fresh pages at the moment.
    pub(in crate::paging) fn is_stuck(&self) -> bool {
        self.health().is_exhausted() || self.health().write_errno() != 0
    }

    /// The class in which a fault on a page waits for room; `None`: it needs none.
    pub(in crate::paging) fn room_class(&self, page: PageId) -> Option<RoomClass> {
        match self.word(page).load().state() {
            State::Empty if self.chunks().is_open(self.chunk_of(page)) => None,
            State::Empty => Some(RoomClass::Fresh),
            State::Stored | State::Writing => Some(RoomClass::Content),
            State::Cooling if !self.pool().evicts_by_move() => Some(RoomClass::Content),
            _ => None,
        }
    }

    /// Whether a fault on a page must not be served before those that wait for room.
    pub(in crate::paging) fn must_wait(&self, page: PageId) -> bool {
        let class = self.room_class(page);
        class.is_some_and(|class| self.starved().must_wait(class, self.is_stuck()))
    }

    /// Keeps a fault for which there is no room, or that must not pass others.
    pub(in crate::paging) fn wait_for_room(&self, page: PageId, fault: Fault, arrived: Instant) {
        let class = self.room_class(page).unwrap_or(RoomClass::Content);
        self.counters().faults_starved.bump();
        self.pool().begin_starving();
        self.starved().push(fault, arrived, class);
        self.pool().call_evictor();
    }

    /// A fault does not wait for room any more.
    pub(in crate::paging) fn stop_waiting(&self, starved: &StarvedFault) {
        self.starved().done(starved);
        self.pool().end_starving();
    }

    /// How long a fault may wait for room without progress; `None`: for ever. A page with
    /// content is not lost for want of room alone: only when the device fails what is written too.
    pub(in crate::paging) fn give_up_after(&self, class: RoomClass) -> Option<Duration> {
        let errno = self.health().write_errno();
        // A write that the device has may make room, for as long as it may take.
        let exhausted = self.health().is_exhausted() && !self.starved().is_writing();
        match class {
            _ if errno != 0 && errno != NO_SLOT => Some(self.health().deadline()),
            RoomClass::Fresh if exhausted => Some(STARVED_MAX.min(self.health().deadline())),
            RoomClass::Fresh if errno != 0 => Some(self.health().deadline()),
            _ => None,
        }
    }

    /// Gives up on a fault that has waited for room for too long, or warns where it waits on.
    /// Returns whether it was given up.
    pub(in crate::paging) fn give_up_stalled(&self, starved: &mut StarvedFault) -> bool {
        let class = starved.class();
        let limit = self.give_up_after(class);
        let progress = self.starved().progress(class);
        let for_long = limit.unwrap_or(STARVED_MAX);
        if !starved.stall().has_lasted(self.starved().shown(), progress, for_long) {
            return false;
        }
        self.give_up_or_warn(self.page_at(starved.fault().address), limit)
    }

    /// A fault has waited for room for `limit`, or for long. Returns whether it was given up.
    pub(in crate::paging) fn give_up_or_warn(&self, page: PageId, limit: Option<Duration>) -> bool {
        let cause = Error::LimitExceeded { reason: String::new() };
        if limit.is_none() {
            diagnostics::warn("a thread waits for its page", &cause);
            return false;
        }
        self.give_up(page, &cause);
        true
    }

    /// The error of a read that took too long, or of one that the device did not even take.
    pub(in crate::paging) fn timed_out(&self, slot: Option<SlotId>) -> Error {
        let offset = slot.map_or(0, |slot| self.slot_offset(slot));
        Error::Io { op: "read", offset, len: self.page_bytes() as u64, errno: sys::ETIMEDOUT }
    }

    /// Gives up on a fault that cannot be served in time: SIGBUS with the cause, not a hang.
    pub(in crate::paging) fn give_up(&self, page: PageId, cause: &Error) {
        let chunk = self.chunk_of(page);
        let word = self.word(page).load();
        let entered = match word.state() {
            State::Empty => self.chunks().enter(chunk),
            _ => None,
        };
        if word.state() == State::Empty {
            if entered.is_none() {
                return self.wake(page); // Opened, or about to be: the thread faults again if not.
            }
            charge::count_tables_anyway(self, chunk);
        }
        let (slot, frame) = match word.state() {
            State::Empty => (None, None),
            State::Stored => (word.slot(), None),
            // In a frame, but without room for it in the region.
            State::Cooling | State::Writing => (None, word.frame()),
            // The page is on its way in by other means; the thread faults again if it is not.
            _ => return self.wake(page),
        };
        let moving = Word::moving(slot);
        if self.word(page).try_change(word, moving).is_err() {
            return self.wake(page);
        }
        if word.state() == State::Empty && !self.chunks().is_still_closed(chunk) {
            // Opened since: the kernel fills the page.
            self.publish(page, moving, word);
            return self.wake(page);
        }
        if word.state() == State::Cooling {
            // Not before the change: frame metadata, invariant 2. (A page being written leaves its slots to
            // the evictor.)
            self.put_slot(frame.and_then(|frame| self.frames().slot(frame)));
        }
        install::poison(self, page, moving, cause);
        if let Some(frame) = frame {
            self.frames().decide(frame, FrameOutcome::Dropped);
        }
    }
}
