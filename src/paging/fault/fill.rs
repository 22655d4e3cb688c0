//! Fills: a page whose content is on the store is brought in, from the first change of its word to
//! the last.
//!
//! Handlers and threads that serve their own faults (`sigbus`) fill pages by the same steps and the
//! same rules. Only the read in the middle differs: a handler hands it to the device's queue and does
//! something else meanwhile, a thread calls the store and waits.
//!
//! ```text
//!   Stored --begin_fill--> Filling --read, check_read--> end_fill --> Moving --map_fills--> Resident
//!                             |  ^ |                        |            '--kernel refuses--> Stored
//!                             |  | '--discarded-------------+--> Empty
//!                             |  '--retry_after: read again
//!                             '--fail_fill--> Poisoned, or Stored when no thread waits for it
//! ```
//! # Invariants
//! 1. The caller of `begin_fill` has frame and slot to itself until it ends the fill.
//! 2. A page that a thread waits for is lost only when reads of it failed for a whole deadline, or the device has
//!    answered with something else a few times; a page that no thread waits for is never lost, and is read a few
//!    times only.

use crate::base::deadline::Deadline;
use crate::base::error::{Error, Result};
use crate::base::units::{PageId, SlotId};
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::protocol::{self, Filled};
use crate::paging::page::word::{FrameId, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::Health;
use crate::paging::pager::lost;
use crate::paging::pager::memory::{ReadPage, RegionMemory};
use crate::paging::pager::slot_store::SlotStore;
use crate::sys::uffd::{Protect, Wake};
use std::time::Duration;

/// `Stored` -> `Filling`: reserves a frame to read a page into. Else returns why the fault waits; `None`: the word
/// changed, look again.
pub(super) fn begin_fill(
    memory: &RegionMemory,
    page: PageId,
    stored: Word,
    purpose: Purpose,
) -> std::result::Result<FrameId, Option<FaultStatus>> {
    let (frame, _) = memory.pool().reserve_fills(1).ok_or(Some(FaultStatus::NoRoom))?;
    if !begin_fill_into(memory, frame, page, stored, purpose) {
        return Err(None);
    }
    memory.pool().check_low();
    Ok(frame)
}

/// `Stored` -> `Filling`, into a frame that was reserved before. `false`: the word changed; the
/// frame is given back.
pub(super) fn begin_fill_into(
    memory: &RegionMemory,
    frame: FrameId,
    page: PageId,
    stored: Word,
    purpose: Purpose,
) -> bool {
    memory.frames().note(frame, page, stored.slot());
    let filling = Word::filling(frame).with_wanted(purpose == Purpose::Fault);
    let begun = memory.word(page).try_change(stored, filling).is_ok();
    if !begun {
        memory.pool().cancel_fill(frame);
    }
    begun
}

/// Reads of one page that have failed.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Attempts {
    all: u32,
    /// Those that the device answered, with what was never written there.
    wrong: u32,
}

impl Attempts {
    pub(in crate::paging) const NONE: Attempts = Attempts { all: 0, wrong: 0 };

    /// Counts one that failed with `error`.
    pub(in crate::paging) fn note(&mut self, error: &Error) {
        self.all += 1;
        self.wrong += u32::from(matches!(error, Error::Corrupt { .. }));
    }

    /// True if there was one.
    pub(in crate::paging) fn any(self) -> bool {
        self.all > 0
    }
}

/// After how long a read that failed is repeated; `None`: not at all. `is_over` says whether the
/// deadline has passed.
pub(in crate::paging) fn retry_after(
    deadline: Duration,
    purpose: Purpose,
    attempts: Attempts,
    is_useless: bool,
    is_over: impl FnOnce() -> bool,
) -> Option<Duration> {
    const PREFETCH_ATTEMPTS_MAX: u32 = 3;
    /// Another path to the device, or its own correction, may give the right bytes; time does not.
    const WRONG_MAX: u32 = 4;
    let gives_up = match purpose {
        Purpose::Fault => attempts.wrong >= WRONG_MAX || is_over(),
        Purpose::Prefetch => attempts.all >= PREFETCH_ATTEMPTS_MAX,
    };
    (!gives_up && !is_useless).then(|| pause_before(attempts.all, deadline))
}

/// True if the page that is being read into a frame was discarded meanwhile.
pub(in crate::paging) fn is_discarded(memory: &RegionMemory, frame: FrameId) -> bool {
    memory.word(memory.frames().page(frame)).load().dead()
}

/// Calls `read`, which reads a page and compares it with what was written, again and again while that may help: the
/// way of a thread that waits for its reads. Returns what the last one returned; `None` ends it.
pub(in crate::paging) fn read_until_deadline(
    health: &Health,
    purpose: Purpose,
    is_discarded: impl Fn() -> bool,
    mut read: impl FnMut() -> Option<Result<()>>,
) -> Option<Result<()>> {
    let mut deadline = Deadline::new(health.deadline());
    let mut attempts = Attempts::NONE;
    loop {
        let Err(error) = read()? else { return Some(Ok(())) };
        attempts.note(&error);
        match retry_after(health.deadline(), purpose, attempts, is_discarded(), || {
            deadline.is_over()
        }) {
            // nanosleep(2) is async-signal-safe in Linux.
            Some(pause) if !health.is_stopping() => std::thread::sleep(pause),
            _ => return Some(Err(error)),
        }
    }
}

/// `Filling` -> `Moving`: the page whose slot was read into `frame` is the caller's, to be mapped.
/// `None`: it was discarded; the frame is given back.
pub(in crate::paging) fn end_fill(
    memory: &RegionMemory,
    slots: &SlotStore,
    frame: FrameId,
) -> Option<ReadPage> {
    let ended = take_filled(memory, slots, frame, memory.frames().slot(frame));
    if ended.is_none() {
        memory.pool().cancel_fill(frame);
    }
    ended
}

/// As [`end_fill`], but the frame stays the caller's, and so does the page's slot
/// where `slot` does not name it.
pub(in crate::paging) fn take_filled(
    memory: &RegionMemory,
    slots: &SlotStore,
    frame: FrameId,
    slot: Option<SlotId>,
) -> Option<ReadPage> {
    let page = memory.frames().page(frame);
    match protocol::filled(memory.word(page), frame, slot) {
        Filled::Moving { moving, wanted } => Some(ReadPage { moving, wanted }),
        Filled::Died(dead) => {
            slots.put(slot);
            memory.publish(page, dead, Word::EMPTY);
            memory.wake(page);
            None
        }
    }
}

/// `Moving` -> `Resident`: maps neighbouring pages that were read into neighbouring frames, from `first` on, for a write
/// or not. Returns how many were mapped, the first ones, at least one.
///
/// # Errors
/// Outcome of a fault on the first page when the kernel refused: it is on the store again, or lost, and the others are
/// as they were.
pub(in crate::paging) fn map_fills(
    pager: &Pager,
    first: FrameId,
    read: &[ReadPage],
    write: bool,
    wake: Wake,
) -> std::result::Result<usize, FaultStatus> {
    let page = pager.frames().page(first);
    let pages = || (page.0..).map(PageId);
    // How its first write is noticed: not at all where it is written now, or cannot be mapped protected.
    let is_tracked = !write && !pager.pool().moves_in(first);
    let guessed = is_tracked && pager.readahead().writes().expects(page);
    let protect = if is_tracked && !guessed { Protect::Yes } else { Protect::No };
    let place = (page, first, read.len());
    let (mapped, protected) = match pager.memory().install(place, protect, wake) {
        Ok(mapped) => mapped,
        Err(error) => {
            let moving = read[0].moving;
            let stored = Word::stored(moving.slot().expect("a fill has a slot"));
            let status = lost::not_mapped(pager, page, (moving, stored), read[0].wanted, &error);
            pager.pool().cancel_fill(first);
            pager.wake(page);
            return Err(status);
        }
    };
    if protect == Protect::Yes {
        pages().take(mapped).for_each(|page| pager.readahead().writes().count(page));
    }
    pager.memory().publish_read(page, &read[..mapped], |resident| {
        resident.with_protected(protected == Protect::Yes).with_guessed(guessed)
    });
    pager.counters().pages_in.add(mapped as u64);
    pager.slots().note_transfer();
    Ok(mapped)
}

/// The page that `frame` was for cannot be read. It is lost if a thread waits for it, else it stays
/// on the store. The frame stays the caller's: the device may still have it.
pub(in crate::paging) fn fail_fill(pager: &Pager, frame: FrameId, purpose: Purpose, cause: &Error) {
    let page = pager.frames().page(frame);
    let slot = pager.frames().slot(frame);
    let read = take_filled(pager.memory(), pager.slots(), frame, slot);
    let Some(ReadPage { moving, .. }) = read else { return };
    match purpose {
        Purpose::Fault => lost::poison(pager, page, moving, cause),
        Purpose::Prefetch => {
            pager.publish(page, moving, Word::stored(slot.expect("a fill has a slot")));
            // A thread that faulted on it meanwhile waits for this read, and faults again.
            pager.wake(page);
        }
    }
}

/// How long a failed read waits before it is repeated: not at all the first time, for a short read
/// or a flipped bit is mostly over by then; then 1 ms, doubled up to an eighth of the deadline and
/// 200 ms, which is no load for a device that fails for seconds.
fn pause_before(attempt: u32, deadline: Duration) -> Duration {
    const FIRST: Duration = Duration::from_millis(1);
    const LONGEST: Duration = Duration::from_millis(200);
    match attempt {
        0 | 1 => Duration::ZERO,
        _ => (FIRST * (1 << (attempt - 2).min(8))).min(LONGEST).min(deadline / 8),
    }
}
