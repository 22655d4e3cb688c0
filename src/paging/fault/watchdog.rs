//! The watchdog: a deadline for reads that threads wait for themselves.
//!
//! In in-thread mode a thread reads the device by a call that cannot be cancelled. While it waits,
//! its page is `Filling`, and every other thread that touches the page waits, too. The watchdog
//! revokes a read that the device has had for a whole deadline (`page::frame_meta`) and gives the page up:
//! the other threads get SIGBUS, with the cause on standard error. The reader finds out when its call
//! returns, and gets SIGBUS as well; until then it keeps frame and slot, so nothing is read into memory
//! that others use. A page that was only asked for ahead is left alone until a thread waits for it.
//!
//! Runs in the supervisor's thread, which waits for no device and for no page. Each read is known by its
//! turn in the frame's note, so that nothing is listed anywhere, and a read costs its thread two
//! changes of one word.

use crate::base::deadline::{Stopwatch, Term, look_every};
use crate::paging::fault::fill;
use crate::paging::page::frame_meta::ReadTurn;
use crate::paging::page::word::{FrameId, State};
use crate::paging::pager::Pager;
use crate::paging::pager::lost;
use crate::paging::pager::memory::ReadPage;
use crate::sys::thread;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A thread that runs, or waits for a processor, may have had its answer long ago. It gets this many
/// deadlines, for a store may also look for the answer all the time.
const RUNNING_DEADLINES: u32 = 4;

/// How often to look while nothing is read.
const IDLE: Duration = Duration::from_millis(100);

/// Record of the reads into the frames.
#[derive(Debug)]
pub(in crate::paging) struct Watchdog {
    pager: Arc<Pager>,
    watch: Stopwatch,
    /// Per frame: the read that was under way at the last look. Empty where threads do not read.
    seen: Vec<Option<(ReadTurn, Term)>>,
    next: Instant,
}

impl Watchdog {
    pub(in crate::paging) fn new(pager: Arc<Pager>) -> Watchdog {
        let frames = if pager.mapper().is_in_thread() { pager.frames().count() } else { 0 };
        let now = Instant::now();
        let watch = Stopwatch::start(pager.health().deadline(), now);
        Watchdog { pager, watch, seen: vec![None; frames], next: now }
    }

    /// Revokes what has taken too long. Returns when to look again; `None`: there is nothing to look
    /// for.
    pub(in crate::paging) fn look(&mut self) -> Option<Duration> {
        let now = Instant::now();
        if self.seen.is_empty() {
            return None;
        }
        if now >= self.next {
            let every = look_every(self.pager.health().deadline());
            self.next = now + if self.look_at_all(now) { every } else { every.max(IDLE) };
        }
        Some(self.next.saturating_duration_since(now))
    }

    /// Returns whether anything is being read.
    fn look_at_all(&mut self, now: Instant) -> bool {
        let shown = self.watch.look(now);
        let deadline = self.pager.health().deadline();
        let mut any = false;
        for (at, seen) in self.seen.iter_mut().enumerate() {
            let frame = FrameId(at as u32);
            let turn = self.pager.frames().meta_of(frame).read_under_way();
            any |= turn.is_some();
            match (turn, seen.as_mut()) {
                (Some(turn), Some((known, term))) if turn == *known => {
                    if !term.is_over(shown, deadline) {
                        continue;
                    }
                    let is_long = term.age(shown) >= deadline.saturating_mul(RUNNING_DEADLINES);
                    if is_long || thread::wants_processor(turn.thread()) != Some(true) {
                        revoke(&self.pager, frame, turn);
                    }
                }
                (turn, _) => *seen = turn.map(|turn| (turn, Term::start(shown))),
            }
        }
        any
    }
}

/// Takes the page from a read that has passed its deadline, if a thread waits for it.
fn revoke(pager: &Pager, frame: FrameId, turn: ReadTurn) {
    let note = pager.frames().meta_of(frame);
    let word = pager.word(note.page()).load();
    let is_waited_for = word.state() == State::Filling && (word.wanted() || word.dead());
    if !is_waited_for || !note.revoke_read(turn) {
        return;
    }
    // Of this read: it has not ended before it was revoked.
    let page = note.page();
    let slot = note.slot();
    // Without its slot, which stays the reader's as long as the device reads it.
    let read = fill::take_filled(pager.memory(), pager.slots(), frame, None);
    if let Some(ReadPage { moving, .. }) = read {
        pager.counters().read_errors.bump();
        lost::poison(pager, page, moving, &pager.slots().timed_out(slot));
    }
}
