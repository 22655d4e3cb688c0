//! Transfers: the requests of one thread to the store.
//!
//! A handler reads by its [`Transfers`]; the evictor writes back by its own, and tests a device that failed. A
//! transfer moves neighbouring slots from or to the frames of their pages, in one request. It is merged, started,
//! watched until its deadline and collected here, and what it has read is compared with what was written. What
//! follows a failure is the owner's business: reads are repeated, writes put back. Threads that wait for their reads
//! themselves (`fault::sigbus`) use [`check_read`] alone: they have no queue.
//!
//! ```text
//!   start --> AtDevice --------------- answered --------------> finished --next_finished--> forgotten
//!     |          '-- deadline over --> Overdue -- answered --------^ ^
//!     |                                 ^                            |
//!     '-- panic: the store may have it -+-- Lost (next_overdue)      |
//!     '-- panic: the store does not have it --> Refused -------------'
//! ```
//! # Invariants
//! 1. Frames and slots of a transfer are the device's until it is finished, overdue or not: nobody touches a frame that
//!    is read into, nor writes to one that is being written.
//! 2. A transfer is reported once by [`Transfers::next_finished`], and before that at most once by
//!    [`Transfers::next_overdue`].
#![expect(unsafe_code, reason = "hands frames to the device")]

use crate::base::counter::Gauge;
use crate::base::deadline::{Stopwatch, Term, look_every};
use crate::base::error::{Error, Result};
use crate::base::units::SlotId;
use crate::paging::counters::Counters;
use crate::paging::page::frames::Frames;
use crate::paging::page::word::FrameId;
use crate::paging::page::{CHUNK_PAGES, PAGE};
use crate::paging::pager::Pager;
use crate::paging::pager::slot_store::SlotStore;
use crate::store::{Op, Queue, Request, SEGMENTS_MAX, Store};
use crate::sys;
use std::os::fd::RawFd;
use std::ptr::{null_mut, slice_from_raw_parts_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pages of one merged read, 512 KiB: large enough for the device's full rate, small enough that the first
/// pages of a window are installed while the rest is being read.
pub(in crate::paging) const READ_MAX: usize = (512 << 10) / PAGE;
/// Pages of one merged write, and of one read into a run of frames, 1 MiB: what devices are fastest with.
pub(in crate::paging) const LONG_MAX: usize = (1 << 20) / PAGE;

/// Purpose of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Aim {
    /// A read that threads wait for, or that is repeated.
    Demand,
    /// A read ahead of faults.
    Prefetch,
    /// A write to new slots.
    WriteBack,
    /// A write over the slot that a page has: it says nothing about space for others.
    Overwrite,
    /// A write of zeros, to see whether the device takes it.
    Probe,
}

impl Aim {
    fn op(self) -> Op {
        match self {
            Aim::Demand | Aim::Prefetch => Op::Read,
            Aim::WriteBack | Aim::Overwrite | Aim::Probe => Op::Write,
        }
    }
}

/// See [module](self).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    AtDevice,
    /// The store panicked, and may have it all the same.
    Lost,
    /// The store panicked, and does not have it.
    Refused,
    /// Its owner knows that it takes too long.
    Overdue,
}

/// A request: pages in consecutive slots.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct Transfer {
    aim: Aim,
    started: Instant,
    /// Since the device got it.
    term: Term,
    state: Stage,
    /// The first slot.
    slot: SlotId,
    pages: usize,
    /// Frames in the order of the slots, neighbours in memory as one segment: the virtual disk is paid by segment.
    firsts: [FrameId; SEGMENTS_MAX],
    lens: [u16; SEGMENTS_MAX],
    segments: usize,
}

impl Transfer {
    fn new(aim: Aim, slot: SlotId, started: Instant, shown: Duration) -> Transfer {
        Transfer {
            aim,
            started,
            term: Term::start(shown),
            state: Stage::AtDevice,
            slot,
            pages: 0,
            firsts: [FrameId(0); SEGMENTS_MAX],
            lens: [0; SEGMENTS_MAX],
            segments: 0,
        }
    }

    fn push(&mut self, frame: FrameId) {
        let last = self.segments.wrapping_sub(1);
        if self.pages > 0 && self.firsts[last].0 + u32::from(self.lens[last]) == frame.0 {
            self.lens[last] += 1;
        } else {
            (self.firsts[self.segments], self.lens[self.segments]) = (frame, 1);
            self.segments += 1;
        }
        self.pages += 1;
    }

    fn segments(&self) -> impl Iterator<Item = (FrameId, u16)> {
        self.firsts[..self.segments].iter().copied().zip(self.lens)
    }

    pub(in crate::paging) fn aim(&self) -> Aim {
        self.aim
    }

    /// The time since it was started.
    pub(in crate::paging) fn took(&self) -> Duration {
        self.started.elapsed()
    }

    /// The time that counts for its deadline, by its owner's [`Transfers::shown`].
    pub(in crate::paging) fn age(&self, shown: Duration) -> Duration {
        self.term.age(shown)
    }

    /// The pages' slots and frames.
    pub(in crate::paging) fn pages(&self) -> impl Iterator<Item = (SlotId, FrameId)> {
        let frames = |(first, len): (FrameId, u16)| (first.0..).take(len.into()).map(FrameId);
        (self.slot.0..).map(SlotId).zip(self.segments().flat_map(frames))
    }

    /// How many pages there are.
    pub(in crate::paging) fn len(&self) -> usize {
        self.pages
    }

    /// True if the store panicked and does not have it.
    pub(in crate::paging) fn is_refused(&self) -> bool {
        self.state == Stage::Refused
    }

    /// True if it was reported by [`Transfers::next_overdue`].
    pub(in crate::paging) fn is_overdue(&self) -> bool {
        self.state == Stage::Overdue
    }
}

/// The transfers under way, by token: a token is free, or that of one transfer.
#[derive(Debug)]
struct UnderWay {
    /// As many as were ever under way at once: all of a handler would be 110 KiB, and mostly there are one or two.
    transfers: Vec<Option<Transfer>>,
    free: Vec<usize>,
}

impl UnderWay {
    fn new(depth: usize) -> UnderWay {
        UnderWay { transfers: Vec::with_capacity(depth), free: Vec::with_capacity(depth) }
    }

    fn len(&self) -> usize {
        self.transfers.len() - self.free.len()
    }

    fn put(&mut self, transfer: Transfer) -> usize {
        let token = self.free.pop().unwrap_or_else(|| {
            let has_room = self.transfers.len() < self.transfers.capacity();
            assert!(has_room, "transfers are bounded by the queue's depth");
            self.transfers.push(None);
            self.transfers.len() - 1
        });
        self.transfers[token] = Some(transfer);
        token
    }

    fn take(&mut self, token: usize) -> Transfer {
        self.free.push(token);
        self.transfers[token].take().expect("a completion has its transfer")
    }
}

/// See [module](self).
pub(in crate::paging) struct Transfers {
    pager: Arc<Pager>,
    queue: Box<dyn Queue>,
    depth: usize,
    under_way: UnderWay,
    finished: Vec<(u64, Result<()>)>,
    /// Tells how long the device has had a transfer.
    watch: Stopwatch,
    /// When deadlines were looked at last.
    checked: Instant,
    has_lost: bool,
}

impl Transfers {
    /// Opens a queue for `depth` transfers, whose waits end as well when one of `watched` is readable. Allocates all
    /// the memory that it will ever use.
    ///
    /// # Errors
    /// The store's error.
    pub(in crate::paging) fn new(
        pager: Arc<Pager>,
        depth: u32,
        watched: &[RawFd],
    ) -> Result<Transfers> {
        let mut queue = pager.slots().store().open_queue(depth)?;
        watched.iter().try_for_each(|fd| queue.watch(*fd))?;
        let (depth, now) = (depth as usize, Instant::now());
        Ok(Transfers {
            queue,
            depth,
            under_way: UnderWay::new(depth),
            finished: Vec::with_capacity(depth),
            watch: Stopwatch::start(pager.health().deadline(), now),
            checked: now,
            has_lost: false,
            pager,
        })
    }

    /// Bytes of all that, on a store.
    pub(in crate::paging) fn bytes(store: &dyn Store, depth: u32) -> usize {
        let transfer =
            size_of::<Option<Transfer>>() + size_of::<usize>() + size_of::<(u64, Result<()>)>();
        store.queue_bytes(depth).0 as usize + depth as usize * transfer
    }

    /// How many more may be started.
    pub(in crate::paging) fn room(&self) -> usize {
        self.depth - self.under_way.len()
    }

    /// True if nothing is at the device or back from it.
    pub(in crate::paging) fn is_idle(&self) -> bool {
        self.under_way.len() == 0
    }

    /// All that are not collected.
    pub(in crate::paging) fn under_way(&self) -> impl Iterator<Item = &Transfer> {
        self.under_way.transfers.iter().flatten()
    }

    // Start.

    /// How many of the first `frames`, whose slots follow each other, go by one request. A run of frames goes alone, and
    /// is written whole.
    pub(in crate::paging) fn mergeable(
        &self,
        op: Op,
        frames: impl Iterator<Item = FrameId>,
    ) -> usize {
        let mut frames = frames.peekable();
        let Some(&first) = frames.peek() else { return 0 };
        let run_of = |frame| self.pager.frames().run_of(frame);
        let most = match (op, run_of(first).is_some()) {
            (Op::Write, true) => CHUNK_PAGES,
            (Op::Read, false) => READ_MAX,
            (Op::Read, true) | (Op::Write, false) => LONG_MAX,
        };
        let (mut segments, mut next) = (1, first.0);
        let fits = |frame: &FrameId| {
            segments += usize::from(frame.0 != next);
            next = frame.0 + 1;
            segments <= SEGMENTS_MAX && run_of(*frame) == run_of(first)
        };
        frames.take(most).take_while(fits).count()
    }

    /// Hands a transfer of consecutive slots, from `slot` on, to the queue; returns since when the device has it.
    pub(in crate::paging) fn start(&mut self, aim: Aim, slot: SlotId, frames: &[FrameId]) -> Term {
        let now = Instant::now();
        let mut transfer = Transfer::new(aim, slot, now, self.watch.look(now));
        frames.iter().for_each(|frame| transfer.push(*frame));
        let mut segments = [slice_from_raw_parts_mut(null_mut(), 0); SEGMENTS_MAX];
        for (segment, (first, len)) in segments.iter_mut().zip(transfer.segments()) {
            let len = usize::from(len) * PAGE;
            *segment = slice_from_raw_parts_mut(self.pager.frames().ptr(first), len);
        }
        let token = self.under_way.put(transfer);
        self.gauge(aim).up();
        let request = Request {
            token: token as u64,
            op: aim.op(),
            offset: self.pager.slots().offset(slot),
            segments: &segments[..transfer.segments],
        };
        let before = self.queue.in_flight();
        let queue = &mut *self.queue;
        // SAFETY: the frames are off all lists and the owner's, who touches none until the transfer is finished, nor
        // writes to one that is being written (invariant 1); the slots are theirs.
        let pushed = self.pager.guarded(|| unsafe { queue.push(request) });
        assert!(pushed.unwrap_or(true), "transfers are bounded by the queue's depth");
        if pushed.is_none() {
            self.panicked(token, self.queue.in_flight() == before);
        }
        transfer.term
    }

    /// The store panicked when it got a transfer. Unless it says that it took nothing, whether the device has the
    /// request is unknown: as if it never answered.
    fn panicked(&mut self, token: usize, is_refused: bool) {
        let transfer = self.under_way.transfers[token].as_mut().expect("just started");
        transfer.state = if is_refused { Stage::Refused } else { Stage::Lost };
        self.has_lost |= !is_refused;
        if is_refused {
            let transfer = *transfer;
            let result = Err(self.failed(&transfer, sys::EIO));
            self.finished.push((token as u64, result));
        }
    }

    fn gauge(&self, aim: Aim) -> &Gauge {
        match aim.op() {
            Op::Read => &self.pager.counters().reads_in_flight,
            Op::Write => &self.pager.counters().writes_in_flight,
        }
    }

    fn failed(&self, of: &Transfer, errno: i32) -> Error {
        let op = if of.aim.op() == Op::Read { "read" } else { "write" };
        let len = (of.pages * PAGE) as u64;
        self.pager.slots().failed(op, Some(of.slot), len, errno)
    }

    // End.

    /// Waits, no longer than `timeout`, until a transfer is finished or a watched descriptor is readable; returns
    /// whether one is.
    ///
    /// # Errors
    /// When the queue is of no use any more.
    pub(in crate::paging) fn wait(&mut self, timeout: Duration) -> Result<bool> {
        let timeout = if self.has_finished() { Duration::ZERO } else { timeout };
        let (queue, finished) = (&mut self.queue, &mut self.finished);
        let mut done = |token, result| finished.push((token, result));
        let waited = self.pager.guarded(|| queue.wait(timeout, &mut done));
        Ok(waited.unwrap_or(Ok(true))? || self.has_finished())
    }

    /// True if one is finished and not collected.
    pub(in crate::paging) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// The next transfer that is finished: frames and slots are the owner's again.
    pub(in crate::paging) fn next_finished(&mut self) -> Option<(Transfer, Result<()>)> {
        let (token, result) = self.finished.pop()?;
        let transfer = self.under_way.take(token as usize);
        self.gauge(transfer.aim).down();
        Some((transfer, result))
    }

    /// The next transfer, from token `from` on, that the device has had for too long, and the error. Looks again after
    /// `every`, where nothing was lost.
    pub(in crate::paging) fn next_overdue(
        &mut self,
        from: &mut usize,
        every: Duration,
    ) -> Option<(Transfer, Error)> {
        let (now, deadline) = (Instant::now(), self.pager.health().deadline());
        if *from == 0 {
            let is_early = now - self.checked < every.min(look_every(deadline));
            if self.is_idle() || is_early && !self.has_lost {
                return None;
            }
            (self.checked, self.has_lost) = (now, false);
        }
        let shown = self.watch.look(now);
        let mut is_due = |transfer: &mut Transfer| match transfer.state {
            Stage::AtDevice => transfer.term.is_over(shown, deadline),
            Stage::Lost => true,
            Stage::Refused | Stage::Overdue => false,
        };
        let mut rest = self.under_way.transfers[*from..].iter_mut();
        *from += 1 + rest.position(|transfer| transfer.as_mut().is_some_and(&mut is_due))?;
        let transfer = self.under_way.transfers[*from - 1].as_mut().expect("found above");
        let errno = if transfer.state == Stage::Lost { sys::EIO } else { sys::ETIMEDOUT };
        transfer.state = Stage::Overdue;
        let transfer = *transfer;
        Some((transfer, self.failed(&transfer, errno)))
    }

    /// The time that counts for deadlines.
    pub(in crate::paging) fn shown(&mut self) -> Duration {
        self.watch.look(Instant::now())
    }
}

/// Outcome of a page of a read that ended with `result`: compares what is in its frame with what was written to its
/// slot, and counts failures.
///
/// # Errors
/// That of the read, or [`Error::Corrupt`].
pub(in crate::paging) fn check_read(
    slots: &SlotStore,
    frames: &Frames,
    counters: &Counters,
    frame: FrameId,
    result: &Result<()>,
) -> Result<()> {
    let slot = frames.slot_of_fill(frame);
    let is_other = || slots.verifies() && slots.hash_frame(frames, frame) != slots.hash(slot);
    let read = match result {
        Ok(()) if is_other() => Err(slots.corrupt(slot)),
        result => result.clone(),
    };
    match &read {
        Ok(()) => {}
        Err(Error::Corrupt { .. }) => counters.checksum_errors.bump(),
        Err(_) => counters.read_errors.bump(),
    }
    read
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn transfer(frames: &[u32]) -> Transfer {
        let mut transfer = Transfer::new(Aim::Prefetch, SlotId(7), Instant::now(), Duration::ZERO);
        frames.iter().for_each(|frame| transfer.push(FrameId(*frame)));
        transfer
    }

    #[test]
    fn transfers_one_after_another_use_the_same_token() {
        let mut under_way = UnderWay::new(8);
        for _ in 0..16 {
            let token = under_way.put(transfer(&[0]));
            under_way.take(token);
        }
        assert_eq!((under_way.transfers.len(), under_way.len()), (1, 0));
        let tokens: Vec<usize> = (0..8).map(|_| under_way.put(transfer(&[0]))).collect();
        assert!((0..8).all(|token| tokens.contains(&token)), "all at once");
    }

    #[test]
    fn frames_that_are_neighbours_are_one_segment_and_keep_their_slots() {
        let frames = [0, 1, 2, 9, 10, 4, 3];
        let transfer = transfer(&frames);
        let segments: Vec<(u32, u16)> =
            transfer.segments().map(|(first, len)| (first.0, len)).collect();
        assert_eq!(segments, [(0, 3), (9, 2), (4, 1), (3, 1)]);
        let pages: Vec<(u64, u32)> =
            transfer.pages().map(|(slot, frame)| (slot.0, frame.0)).collect();
        let expected: Vec<(u64, u32)> = (7..).zip(frames).collect();
        assert_eq!((pages, transfer.len()), (expected, frames.len()));
    }
}
