//! Faults that need no device: zeros, pages on their way out, first writes, lost races.
//!
//! Shared by the handlers and by threads that serve their own faults (`sigbus`). Takes no lock
//! that is held during I/O and allocates nothing, so that it can run in a signal handler.
//!
//! # Invariants
//! 1. A page is installed only by the thread that made its word `Moving`.
#![expect(unsafe_code, reason = "maps the zero page into holes")]

use crate::base::error::Error;
use crate::base::units::PageId;
use crate::paging::diagnostics;
use crate::paging::evict::content;
use crate::paging::evict::policy::Insert;
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::kernel_filled;
use crate::paging::kernel_filled::OpenOutcome;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::protocol;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::install;
use crate::paging::pager::transfer;
use crate::paging::tables::charge;
use crate::sys;
use crate::sys::uffd::{Fault, Outcome, Protect};

impl Pager {
    /// Serves a fault on a page that is not `Stored`, as far as that goes without waiting.
    /// `None`: the word changed, look again.
    pub(in crate::paging) fn resolve_in_memory(
        &self,
        page: PageId,
        word: Word,
        fault: &Fault,
    ) -> Option<FaultStatus> {
        match word.state() {
            State::Empty => self.fill_zeros(page),
            State::Filling | State::Moving => Some(FaultStatus::TryAgain),
            State::Resident => self.touch_resident(page, word, fault),
            State::Cooling => self.take_back(page, word, Purpose::Fault),
            State::Writing => self.copy_out(page, word),
            State::Poisoned => {
                self.wake(page);
                Some(FaultStatus::Resolved)
            }
            State::Stored => None,
        }
    }

    /// `Empty`: maps zeros. `None`: the word changed, look again.
    fn fill_zeros(&self, page: PageId) -> Option<FaultStatus> {
        let chunk = self.chunk_of(page);
        if self.chunks().is_open(chunk) {
            // Open since the fault was sent: the kernel fills the page now.
            self.wake(page);
            return Some(FaultStatus::Resolved);
        }
        // Until the end, when the word keeps the tables.
        let Some(_entered) = self.chunks().enter(chunk) else { return Some(FaultStatus::TryAgain) };
        if !charge::count_tables(self, chunk) {
            return Some(FaultStatus::NoRoom);
        }
        match kernel_filled::try_open(self, page) {
            OpenOutcome::Opened => {
                self.pool().check_low();
                return Some(FaultStatus::Resolved);
            }
            OpenOutcome::Wait => return Some(FaultStatus::NoRoom),
            OpenOutcome::Unfit => {}
        }
        let moving = Word::moving(None);
        self.word(page).try_change(Word::EMPTY, moving).ok()?;
        if !self.chunks().is_still_closed(chunk) {
            self.publish(page, moving, Word::EMPTY);
            return Some(FaultStatus::TryAgain);
        }
        match install::install_zeros(self, page) {
            Ok(true) => {
                self.publish_mapped(page, moving, Word::resident(None), Some(Insert::Fresh));
                self.counters().faults_zero.bump();
                self.pool().check_low();
                Some(FaultStatus::Resolved)
            }
            Ok(false) => {
                self.publish(page, moving, Word::EMPTY);
                Some(FaultStatus::NoRoom)
            }
            Err(error) => Some(install::not_mapped(self, page, moving, Word::EMPTY, &error)),
        }
    }

    /// `Resident`: a first write to a protected page, a hole of a sparse one or one that the program
    /// made (`MADV_DONTNEED`), or a lost race.
    fn touch_resident(&self, page: PageId, word: Word, fault: &Fault) -> Option<FaultStatus> {
        if fault.protected {
            return self.open_for_writes(page, word);
        }
        if word.sparse() || self.is_hole(fault.address) {
            return self.fill_hole(page, word, fault.address).then_some(FaultStatus::Resolved);
        }
        self.counters().faults_racing.bump();
        self.wake(page);
        Some(FaultStatus::Resolved)
    }

    /// `Resident`, and a write found it protected: lifts the protection.
    fn open_for_writes(&self, page: PageId, word: Word) -> Option<FaultStatus> {
        let (moving, opened) = protocol::open_for_writes(self.word(page), word).ok()?;
        if let Err(error) = self.mapper().allow_writes(self.addr(page)) {
            diagnostics::fatal("a write-protected page could not be opened", &error);
        }
        self.publish(page, moving, opened);
        if !self.pool().evicts_by_move() {
            // Who was woken before that and faulted again finds it open.
            self.wake(page);
        }
        if word.protected() {
            self.counters().faults_protect.bump();
            self.readahead().was_written(page);
            self.counters().prefetch_hits.add(u64::from(word.prefetched()));
        }
        Some(FaultStatus::Resolved)
    }

    /// `Cooling`: the page has not left yet; brings its frame back, for a fault or ahead of one.
    pub(in crate::paging) fn take_back(
        &self,
        page: PageId,
        word: Word,
        purpose: Purpose,
    ) -> Option<FaultStatus> {
        let frame = word.frame().expect("a cooling page has a frame");
        if !self.pool().evicts_by_move() && !self.pool().charge_page() {
            return Some(FaultStatus::NoRoom);
        }
        let note = self.frames().meta_of(frame);
        let Ok(slot) = protocol::take_back(self.word(page), word, note) else {
            self.pool().uncharge_copy();
            return None;
        };
        let moving = Word::moving(None);
        let prefetched = note.prefetched();
        match content::return_frame(self, page, frame) {
            Ok(outcome) => {
                let unseen = prefetched && purpose == Purpose::Prefetch;
                let resident = Word::resident(slot).with_prefetched(unseen);
                self.publish_mapped(page, moving, resident, None);
                self.frames().decide(frame, outcome);
                if purpose == Purpose::Fault {
                    self.counters().faults_cooling.bump();
                    self.counters().prefetch_hits.add(u64::from(prefetched));
                }
                Some(FaultStatus::Resolved)
            }
            Err(error) => {
                self.pool().uncharge_copy();
                let answer = install::not_mapped(self, page, moving, Word::cooling(frame), &error);
                if self.word(page).load().state() == State::Poisoned {
                    self.put_slot(slot);
                    self.frames().decide(frame, FrameOutcome::Dropped);
                }
                Some(answer)
            }
        }
    }

    /// `Writing`: the device may still read the frame, so the page gets a copy of it.
    fn copy_out(&self, page: PageId, word: Word) -> Option<FaultStatus> {
        let frame = word.frame().expect("a page being written has a frame");
        if !self.pool().charge_page() {
            return Some(FaultStatus::NoRoom);
        }
        if protocol::copy_out(self.word(page), word).is_err() {
            self.budget().uncharge(self.page_size());
            return None;
        }
        let moving = Word::moving(None);
        if let Err(error) = transfer::copy_rest(self, page, frame, 0, Protect::No) {
            diagnostics::fatal("a page being written could not be mapped", &error);
        }
        self.publish_mapped(page, moving, Word::resident(None), None);
        self.frames().decide(frame, FrameOutcome::Dropped);
        self.counters().faults_cooling.bump();
        Some(FaultStatus::Resolved)
    }

    /// Whether nothing is mapped at an address. Without a page map that is found out by filling it.
    fn is_hole(&self, addr: usize) -> bool {
        let Some(map) = self.mapper().pagemap() else { return true };
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
        let outcome = unsafe { self.mapper().map_zero_page(addr) };
        let filled = outcome == Outcome::Done;
        let sparse = word.with_sparse(true).with_protected(false);
        self.publish(page, moving, if filled { sparse } else { word });
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
