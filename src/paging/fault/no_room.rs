//! No room: faults that wait until the evictor has made some, and those that are given up.
//!
//! The waiting faults themselves, and their order, are in [`starved`](crate::paging::fault::starved).

use crate::base::error::Error;
use crate::base::units::PageId;
use crate::paging::diagnostics;
use crate::paging::fault::starved::{RoomClass, Stall, StarvedFault};
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::frame_pool::FramePool;
use crate::paging::pager::health::{Health, NO_SLOT};
use crate::paging::pager::lost;
use crate::paging::pager::memory::RegionMemory;
use crate::paging::probes::{self, StallReason};
use crate::sys::uffd::Fault;
use std::time::{Duration, Instant};

/// How long a fault on a page without content may wait for room after the evictor found nothing to
/// evict, while the device takes writes: everything is pinned, or not far memory. A fault on a page
/// with content waits on; after this time that is reported.
const STARVED_MAX: Duration = Duration::from_secs(2);

/// True if no room can be made for fresh pages at the moment.
pub(in crate::paging) fn is_stuck(health: &Health) -> bool {
    health.is_exhausted() || health.write_errno() != 0
}

/// The class in which a fault on a page waits for room; `None`: it needs none.
pub(in crate::paging) fn room_class(memory: &RegionMemory, page: PageId) -> Option<RoomClass> {
    match memory.word(page).load().state() {
        State::Empty if memory.chunks().is_open(memory.table().chunk_of(page)) => None,
        State::Empty => Some(RoomClass::Fresh),
        State::Stored | State::Writing => Some(RoomClass::Content),
        State::Cooling if !memory.pool().moves() => Some(RoomClass::Content),
        _ => None,
    }
}

/// True if a fault on a page must not be served before those that wait for room.
pub(in crate::paging) fn must_wait(memory: &RegionMemory, health: &Health, page: PageId) -> bool {
    let class = room_class(memory, page);
    class.is_some_and(|class| memory.pool().waiters().starved().must_wait(class, is_stuck(health)))
}

/// Keeps a fault for which there is no room, or that must not pass others.
pub(in crate::paging) fn wait_for_room(
    memory: &RegionMemory,
    health: &Health,
    page: PageId,
    fault: Fault,
    arrived: Instant,
) {
    let class = room_class(memory, page).unwrap_or(RoomClass::Content);
    memory.counters().faults_starved.bump();
    probes::stalled(StallReason::NoFrame);
    memory.pool().waiters().begin_starving();
    memory.pool().waiters().starved().push(fault, arrived, class, health.writes_failed());
    memory.pool().waiters().call_evictor();
}

/// A fault does not wait for room any more.
pub(in crate::paging) fn stop_waiting(pool: &FramePool, starved: &StarvedFault) {
    pool.waiters().starved().done(starved);
    pool.waiters().end_starving();
}

/// How long a fault may wait for room without progress; `None`: for ever. A page with
/// content is not lost for want of room alone: only when the device fails what is written too.
/// Faults on fresh pages that come one after the other wait for one deadline together: once one was given up, the
/// later ones wait only until one more write has failed. (What has content would be lost by that.)
fn give_up_after(
    health: &Health,
    pool: &FramePool,
    class: RoomClass,
    stall: &Stall,
) -> Option<Duration> {
    let starved = pool.waiters().starved();
    let errno = health.write_errno();
    // A write that the device has may make room, for as long as it may take.
    let exhausted = health.is_exhausted() && !starved.is_writing();
    let more_failed = health.writes_failed() > stall.writes_failed();
    let limit = match class {
        RoomClass::Fresh if errno != 0 && more_failed && starved.has_given_up() => Duration::ZERO,
        _ if errno != 0 && errno != NO_SLOT => health.deadline(),
        RoomClass::Fresh if exhausted => STARVED_MAX.min(health.deadline()),
        RoomClass::Fresh if errno != 0 => health.deadline(),
        _ => return None,
    };
    Some(limit)
}

/// Gives up on a fault that has waited for room for too long, or warns where it waits on.
/// Returns whether it was given up.
pub(in crate::paging) fn give_up_stalled(
    pager: &Pager,
    page: PageId,
    class: RoomClass,
    stall: &mut Stall,
    shown: Duration,
) -> bool {
    let limit = give_up_after(pager.health(), pager.pool(), class, stall);
    let progress = pager.starved().progress(class);
    if !stall.has_lasted(shown, progress, limit.unwrap_or(STARVED_MAX)) {
        return false;
    }
    let cause = Error::LimitExceeded { reason: String::new() };
    let given_up = limit.is_some() && give_up(pager, page, &cause);
    match given_up {
        true if class == RoomClass::Fresh => pager.starved().note_given_up(),
        true => {}
        false => diagnostics::waits_for_room(lost::no_room(pager)),
    }
    given_up
}

/// Gives up on a fault that cannot be served in time: SIGBUS with the cause, not a hang. `false`: the
/// limit leaves no room for the tables that a lost page needs, so that its thread has to wait on.
pub(in crate::paging) fn give_up(pager: &Pager, page: PageId, cause: &Error) -> bool {
    let chunk = pager.table().chunk_of(page);
    let word = pager.word(page).load();
    let entered = match word.state() {
        State::Empty => pager.chunks().enter(chunk),
        _ => None,
    };
    if word.state() == State::Empty {
        if entered.is_none() {
            // Opened, or about to be: the thread faults again if not.
            pager.wake(page);
            return true;
        }
        if !pager.tables().count_chunk(pager.memory(), chunk) {
            return false;
        }
    }
    let (slot, frame) = match word.state() {
        State::Empty => (None, None),
        State::Stored => (word.slot(), None),
        // In a frame, but without room for it in the region.
        State::Cooling | State::Writing => (None, word.frame()),
        // The page is on its way in by other means; the thread faults again if it is not.
        _ => {
            pager.wake(page);
            return true;
        }
    };
    let moving = Word::moving(slot);
    if pager.word(page).try_change(word, moving).is_err() {
        pager.wake(page);
        return true;
    }
    if word.state() == State::Empty && !pager.chunks().is_still_closed(chunk) {
        // Opened since: the kernel fills the page.
        pager.publish(page, moving, word);
        pager.wake(page);
        return true;
    }
    if word.state() == State::Cooling {
        // Not before the change: frame metadata, invariant 2. (A page being written leaves its slots to
        // the evictor.)
        pager.slots().put(frame.and_then(|frame| pager.frames().slot(frame)));
    }
    lost::poison(pager, page, moving, cause);
    if let Some(frame) = frame {
        pager.frames().decide(frame, FrameOutcome::Dropped);
    }
    true
}
