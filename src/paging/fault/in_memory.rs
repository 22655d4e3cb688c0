//! Faults that need no device: zeros, pages on their way out, first writes, lost races.
//!
//! Shared by the handlers and by threads that serve their own faults (`in_thread`). Takes no lock
//! that is held during I/O and allocates nothing, so that it can run in a signal handler.
//!
//! # Invariants
//! 1. As for handlers: who made a page's word `Moving` installs it, nobody else.
#![expect(unsafe_code, reason = "maps the zero page into holes")]

use crate::base::error::Error;
use crate::base::sync::Ordering;
use crate::base::units::PageId;
use crate::paging::diagnostics;
use crate::paging::evict::policy::Insert;
use crate::paging::kernel_filled::Opening;
use crate::paging::page::note::Fate;
use crate::paging::page::protocol;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::health::NO_SLOT;
use crate::paging::starved::{Line, Starving};
use crate::sys;
use crate::sys::uffd::{Fault, Outcome, Protect, Wake};
use std::time::{Duration, Instant};

/// How long a fault on a page without content may wait for room after the evictor found nothing to
/// evict, while the device takes writes: everything is pinned, or not far memory. A page with
/// content is waited for; so long until that is said.
pub(in crate::paging) const STARVED_MAX: Duration = Duration::from_secs(2);

/// What became of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Answer {
    /// Resolved.
    Done,
    /// Will be resolved by a read in flight.
    Reading,
    /// Another thread is changing the page: try again soon.
    Again,
    /// The device has as many requests as it may have: try again when one has finished.
    Busy,
    /// No frame is to be had: try again when the evictor has freed some.
    Starved,
}

/// Why a page is brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Asked {
    /// A thread waits for it.
    Fault,
    /// It is read ahead.
    Ahead,
}

impl Pager {
    /// Serves a fault on a page that is not `Stored`, as far as that goes without waiting.
    /// `None`: the word changed, look again.
    pub(in crate::paging) fn resolve_in_memory(
        &self,
        page: PageId,
        word: Word,
        fault: &Fault,
    ) -> Option<Answer> {
        match word.state() {
            State::Empty => self.fill_zeros(page),
            State::Filling | State::Moving => Some(Answer::Again),
            State::Resident => self.touch_resident(page, word, fault),
            State::Cooling => self.take_back(page, word, Asked::Fault),
            State::Writing => self.copy_out(page, word),
            State::Poisoned => {
                self.wake(page);
                Some(Answer::Done)
            }
            State::Stored => None,
        }
    }

    /// `Empty`: maps zeros. `None`: the word changed, look again.
    fn fill_zeros(&self, page: PageId) -> Option<Answer> {
        let chunk = self.chunk_of(page);
        if self.chunks().is_open(chunk) {
            // Open since the fault was sent: the kernel fills the page now.
            self.wake(page);
            return Some(Answer::Done);
        }
        // Until the end, when the word keeps the tables.
        let Some(_entered) = self.chunks().enter(chunk) else { return Some(Answer::Again) };
        if !self.count_tables(chunk) {
            return Some(Answer::Starved);
        }
        match self.try_open(page) {
            Opening::Opened => {
                self.check_low();
                return Some(Answer::Done);
            }
            Opening::Wait => return Some(Answer::Starved),
            Opening::Unfit => {}
        }
        let moving = Word::moving(None);
        self.word(page).try_change(Word::EMPTY, moving).ok()?;
        if !self.chunks().is_still_closed(chunk) {
            self.settle(page, moving, Word::EMPTY);
            return Some(Answer::Again);
        }
        match self.install_zeros(page) {
            Ok(true) => {
                self.settle_mapped(page, moving, Word::resident(None), Some(Insert::Fresh));
                self.counters().faults_zero.bump();
                self.check_low();
                Some(Answer::Done)
            }
            Ok(false) => {
                self.settle(page, moving, Word::EMPTY);
                Some(Answer::Starved)
            }
            Err(error) => Some(self.not_mapped(page, moving, Word::EMPTY, &error)),
        }
    }

    /// `Resident`: a first write to a protected page, a hole of a sparse one or one that the program
    /// made (`MADV_DONTNEED`), or a lost race.
    fn touch_resident(&self, page: PageId, word: Word, fault: &Fault) -> Option<Answer> {
        if fault.protected {
            return self.open_for_writes(page, word);
        }
        if word.sparse() || self.is_hole(fault.address) {
            return self.fill_hole(page, word, fault.address).then_some(Answer::Done);
        }
        self.counters().faults_racing.bump();
        self.wake(page);
        Some(Answer::Done)
    }

    /// `Resident`, and a write found it protected: lifts the protection.
    fn open_for_writes(&self, page: PageId, word: Word) -> Option<Answer> {
        let (moving, opened) = protocol::open_for_writes(self.word(page), word).ok()?;
        if let Err(error) = self.allow_own_writes(page) {
            diagnostics::fatal("a write-protected page could not be opened", &error);
        }
        self.settle(page, moving, opened);
        if !self.evict_by_move {
            // Who was woken before that and faulted again finds it open.
            self.wake(page);
        }
        if word.protected() {
            self.counters().faults_protect.bump();
            self.readahead.was_written(page);
            self.counters().prefetch_hits.add(u64::from(word.prefetched()));
        }
        Some(Answer::Done)
    }

    /// `Cooling`: the page has not left yet; brings its frame back.
    pub(in crate::paging) fn take_back(
        &self,
        page: PageId,
        word: Word,
        asked: Asked,
    ) -> Option<Answer> {
        let frame = word.frame().expect("a cooling page has a frame");
        if !self.evict_by_move && !self.charge_page() {
            return Some(Answer::Starved);
        }
        let note = self.frames.note_of(frame);
        let Ok(slot) = protocol::take_back(self.word(page), word, note) else {
            self.uncharge_copy();
            return None;
        };
        let moving = Word::moving(None);
        let prefetched = note.prefetched();
        match self.return_frame(page, frame) {
            Ok(fate) => {
                let unseen = prefetched && asked == Asked::Ahead;
                let resident = Word::resident(slot).with_prefetched(unseen);
                self.settle_mapped(page, moving, resident, None);
                self.frames.decide(frame, fate);
                if asked == Asked::Fault {
                    self.counters().faults_cooling.bump();
                    self.counters().prefetch_hits.add(u64::from(prefetched));
                }
                Some(Answer::Done)
            }
            Err(error) => {
                self.uncharge_copy();
                let answer = self.not_mapped(page, moving, Word::cooling(frame), &error);
                if self.word(page).load().state() == State::Poisoned {
                    self.put_slot(slot);
                    self.frames.decide(frame, Fate::Dropped);
                }
                Some(answer)
            }
        }
    }

    /// `Writing`: the device may still read the frame, so the page gets a copy of it.
    fn copy_out(&self, page: PageId, word: Word) -> Option<Answer> {
        let frame = word.frame().expect("a page being written has a frame");
        if !self.charge_page() {
            return Some(Answer::Starved);
        }
        if protocol::copy_out(self.word(page), word).is_err() {
            self.budget.uncharge(self.page_size());
            return None;
        }
        let moving = Word::moving(None);
        if let Err(error) = self.copy_rest(page, frame, 0, Protect::No) {
            diagnostics::fatal("a page being written could not be mapped", &error);
        }
        self.settle_mapped(page, moving, Word::resident(None), None);
        self.frames.decide(frame, Fate::Dropped);
        self.counters().faults_cooling.bump();
        Some(Answer::Done)
    }

    // Want of room.

    /// Notes that room was made: there is hope for those who wait for it.
    pub(in crate::paging) fn note_room_made(&self) {
        self.health().set_exhausted(false);
        self.starved.note_room_made(self.health().write_errno() == 0);
    }

    /// Whether no room can be made for fresh pages at the moment.
    pub(in crate::paging) fn is_stuck(&self) -> bool {
        self.health().is_exhausted() || self.health().write_errno() != 0
    }

    /// The line in which a fault on a page waits for room; `None`: it needs none.
    pub(in crate::paging) fn line_of(&self, page: PageId) -> Option<Line> {
        match self.word(page).load().state() {
            State::Empty if self.chunks().is_open(self.chunk_of(page)) => None,
            State::Empty => Some(Line::Fresh),
            State::Stored | State::Writing => Some(Line::Content),
            State::Cooling if !self.evict_by_move => Some(Line::Content),
            _ => None,
        }
    }

    /// Lines up a fault for which there is no room, or that must not pass others.
    pub(in crate::paging) fn starve(&self, page: PageId, fault: Fault, arrived: Instant) {
        let line = self.line_of(page).unwrap_or(Line::Content);
        self.counters().faults_starved.bump();
        self.starving.fetch_add(1, Ordering::AcqRel);
        self.starved.push(fault, arrived, line);
        self.call_evictor();
    }

    /// A fault does not wait for room any more.
    pub(in crate::paging) fn not_starving(&self, starving: &Starving) {
        self.starved.done(starving);
        self.starving.fetch_sub(1, Ordering::AcqRel);
    }

    /// How long a fault may wait without progress. `None`: for ever. A page with
    /// content is not lost for want of room alone: only when the device fails what is written too.
    pub(in crate::paging) fn hopeless_after(&self, line: Line) -> Option<Duration> {
        let errno = self.health().write_errno();
        // While the device has a write there is hope for as long as it may take for that.
        let exhausted = self.health().is_exhausted() && !self.starved.is_writing();
        match line {
            _ if errno != 0 && errno != NO_SLOT => Some(self.health().deadline()),
            Line::Fresh if exhausted => Some(STARVED_MAX.min(self.health().deadline())),
            Line::Fresh if errno != 0 => Some(self.health().deadline()),
            _ => None,
        }
    }

    /// Gives up on a fault that has waited for room for too long; says so of one that never is.
    /// Returns whether it was given up.
    pub(in crate::paging) fn give_up_hopeless(&self, starving: &mut Starving) -> bool {
        let line = starving.line();
        let limit = self.hopeless_after(line);
        let progress = self.starved.progress(line);
        let for_long = limit.unwrap_or(STARVED_MAX);
        if !starving.hope().is_over(self.starved.shown(), progress, for_long) {
            return false;
        }
        self.give_up_or_say(self.page_at(starving.fault.address), limit)
    }

    /// A fault has waited for room for `limit`, or for long. Returns whether it was given up.
    pub(in crate::paging) fn give_up_or_say(&self, page: PageId, limit: Option<Duration>) -> bool {
        let cause = Error::LimitExceeded { reason: String::new() };
        if limit.is_none() {
            diagnostics::warn("a thread waits for its page", &cause);
            return false;
        }
        self.give_up(page, &cause);
        true
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
            self.count_tables_anyway(chunk);
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
            self.settle(page, moving, word);
            return self.wake(page);
        }
        if word.state() == State::Cooling {
            // Not before the change: note, invariant 2. (A page being written leaves its slots to
            // the evictor.)
            self.put_slot(frame.and_then(|frame| self.frames.slot(frame)));
        }
        self.poison(page, moving, cause);
        if let Some(frame) = frame {
            self.frames.decide(frame, Fate::Dropped);
        }
    }

    /// Whether nothing is mapped at an address. Without a page map that is found out by filling it.
    fn is_hole(&self, addr: usize) -> bool {
        let Some(map) = self.uffd.pagemap() else { return true };
        let mut there = [true];
        map.scan(addr, &mut there).is_ok() && !there[0]
    }

    /// Fills one kernel page of a resident page, where it has a hole, with zeros. The page may be
    /// written there without a fault from then on. `false`: look at the page again.
    fn fill_hole(&self, page: PageId, word: Word, addr: usize) -> bool {
        // The word cannot leave `Resident` unnoticed while this thread has made it `Moving`.
        let moving = word.leaving();
        if self.word(page).try_change(word, moving).is_err() {
            return false;
        }
        // SAFETY: a hole of a sparse page reads as zero, and this thread alone changes the page's
        // mapping now.
        let outcome = unsafe { self.uffd.zeropage(addr, crate::sys::vm::KERNEL_PAGE, Wake::Yes) };
        let filled = outcome == Outcome::Done;
        let sparse = word.with_sparse(true).with_protected(false);
        self.settle(page, moving, if filled { sparse } else { word });
        match outcome {
            Outcome::Done => self.counters().faults_zero.bump(),
            Outcome::Failed { errno: errno @ sys::EPERM, .. } => {
                let cause = Error::Os { call: "UFFDIO_ZEROPAGE", errno };
                diagnostics::fatal("a hole of a page could not be filled", &cause);
            }
            _ => {
                self.counters().faults_racing.bump();
                self.wake(page);
            }
        }
        true
    }
}
