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
use crate::paging::evict::policy::Insert;
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::kernel_filled::{self, OpenOutcome};
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::protocol;
use crate::paging::page::word::{State, Word};
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::paging::pager::Pager;
use crate::paging::pager::lost;
use crate::paging::pager::mapper::ZEROS_LEN;
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::table::{CLUSTER_PAGES, PageTable};
use crate::sys;
use crate::sys::uffd::{Outcome, Protect};
use arrayvec::ArrayVec;

/// Serves a fault on a page that is not `Stored`, as far as that goes without waiting. `protected`: it is there, and a
/// write found it write-protected. `None`: the word changed, look again.
pub(in crate::paging) fn resolve_in_memory(
    pager: &Pager,
    page: PageId,
    word: Word,
    protected: bool,
) -> Option<FaultStatus> {
    match word.state() {
        State::Empty => fill_zeros(pager, page),
        State::Filling | State::Moving => Some(FaultStatus::TryAgain),
        State::Resident => touch_resident(pager, page, word, protected),
        State::Cooling => take_back(pager, page, word, Purpose::Fault),
        State::Writing => copy_out(pager.memory(), page, word),
        State::Poisoned => {
            pager.wake(page);
            Some(FaultStatus::Resolved)
        }
        State::Stored => None,
    }
}

/// `Empty`: maps zeros. `None`: the word changed, look again.
fn fill_zeros(pager: &Pager, page: PageId) -> Option<FaultStatus> {
    let chunk = pager.table().chunk_of(page);
    if pager.chunks().is_open(chunk) {
        // Open since the fault was sent: the kernel fills the page now.
        pager.wake(page);
        return Some(FaultStatus::Resolved);
    }
    // Until the end, when the word keeps the tables.
    let Some(_entered) = pager.chunks().enter(chunk) else { return Some(FaultStatus::TryAgain) };
    if !pager.tables().count_chunk(pager.memory(), chunk) {
        return Some(FaultStatus::NoRoom);
    }
    match kernel_filled::try_open(pager.memory(), pager.health(), page) {
        OpenOutcome::Opened => {
            pager.pool().check_low();
            return Some(FaultStatus::Resolved);
        }
        OpenOutcome::Wait => return Some(FaultStatus::NoRoom),
        OpenOutcome::Unfit => {}
    }
    let moving = Word::moving(None);
    let row = take_empty(pager, page, moving)?;
    let is_closed = pager.chunks().is_still_closed(chunk);
    let installed = if is_closed { pager.memory().install_zeros(page, row) } else { Ok(0) };
    let count = *installed.as_ref().unwrap_or(&0);
    for at in usize::from(installed.is_err())..row {
        let (page, resident) = (PageId(page.0 + at as u64), Word::resident(None));
        match at < count {
            true => pager.memory().publish_resident(page, moving, resident, Some(Insert::Fresh)),
            false => pager.publish(page, moving, Word::EMPTY),
        }
    }
    if count > 0 {
        pager.mapper().note_mapped();
        pager.counters().faults_zero.bump();
        pager.pool().check_low();
        // Last: a thread that is woken may run at once in place of this one.
        pager.wake(page);
        return Some(FaultStatus::Resolved);
    }
    match installed {
        Ok(_) => Some(if is_closed { FaultStatus::NoRoom } else { FaultStatus::TryAgain }),
        Err(error) => Some(lost::not_mapped(pager, page, (moving, Word::EMPTY), true, &error)),
    }
}

/// Makes an `Empty` page `moving`, and those behind it as far as zeros may come in at once: no more than there are in use
/// just before it, for memory is filled in order there. Returns how many; `None`: the page's word changed.
fn take_empty(pager: &Pager, page: PageId, moving: Word) -> Option<usize> {
    let table = pager.table();
    let take = |page: &u64| table.word(PageId(*page)).try_change(Word::EMPTY, moving).is_ok();
    let is_used = |n: &u64| page.0.checked_sub(*n).is_some_and(|page| table.holds_something(page));
    // While the device takes no writes, what is not touched would hardly leave (`Evictor::take_out`).
    let most = if pager.health().write_errno() == 0 { ZEROS_LEN } else { 0 };
    let used = (1..=most).take_while(is_used).count() as u64;
    let end = (page.0 + 1).next_multiple_of(ZEROS_LEN).min(page.0 + used.max(1));
    Some((page.0..end).take_while(take).count()).filter(|count| *count > 0)
}

/// `Resident`: a first write to a protected page, a hole that the program made (`MADV_DONTNEED`), or a lost race.
fn touch_resident(pager: &Pager, page: PageId, word: Word, protected: bool) -> Option<FaultStatus> {
    if protected {
        return open_for_writes(pager, page, word);
    }
    if pager.memory().is_hole(page) {
        return fill_hole(pager.memory(), page, word).then_some(FaultStatus::Resolved);
    }
    pager.counters().faults_racing.bump();
    pager.wake(page);
    Some(FaultStatus::Resolved)
}

/// `Resident`, and a write found it protected: lifts the protection, of the next pages as well where pages are written
/// in order.
fn open_for_writes(pager: &Pager, page: PageId, word: Word) -> Option<FaultStatus> {
    let (moving, opened) = protocol::open_for_writes(pager.word(page), word).ok()?;
    let mut row: ArrayVec<OpenedPage, CLUSTER_PAGES> = ArrayVec::new();
    row.push(OpenedPage { page, before: word, moving, opened });
    take_next_to_open(pager.table(), page, &mut row);
    let first = row.iter().map(|of| of.page).min().unwrap_or(page);
    match pager.mapper().allow_writes(pager.table().addr(first), row.len() * PAGE) {
        Ok(()) => {
            pager.mapper().note_mapped();
            row.iter().for_each(|of| pager.publish(of.page, of.moving, of.opened));
        }
        // While a message of the kernel's is not read it refuses all calls (EAGAIN). Its reader may be this
        // thread, or have no processor: 10,000 calls were over first, and the process was ended.
        Err(error) if lost::is_passing(pager.mapper(), pager.health().deadline(), &error) => {
            diagnostics::warn("a write-protected page could not be opened, trying again", &error);
            row.iter().for_each(|of| pager.publish(of.page, of.moving, of.before));
            return Some(FaultStatus::TryAgain);
        }
        Err(error) => diagnostics::fatal("a write-protected page could not be opened", &error),
    }
    if !pager.pool().moves() {
        // A thread that was woken before that and faulted again finds it open.
        pager.wake(page);
    }
    if word.protected() {
        pager.counters().faults_protect.bump();
        pager.readahead().writes().happened(page);
        pager.counters().prefetch_hits.add(u64::from(word.prefetched()));
    }
    Some(FaultStatus::Resolved)
}

/// A page whose protection is lifted by this thread, and its words.
struct OpenedPage {
    page: PageId,
    before: Word,
    moving: Word,
    opened: Word,
}

/// Takes the protected pages of its cluster on one side of a page that is written, if the page on its other side is open
/// for writes: then they are written in order, and each would fault. They count as guessed, so that what they cost in
/// vain is learnt.
fn take_next_to_open(
    table: &PageTable,
    page: PageId,
    row: &mut ArrayVec<OpenedPage, CLUSTER_PAGES>,
) {
    let is_open =
        |page: u64| table.is_resident(page) && !table.word(PageId(page)).load().protected();
    let cluster = table.pages_of_cluster(page);
    let (before, after) = (cluster.start..page.0, page.0 + 1..cluster.end);
    if page.0.checked_sub(1).is_some_and(is_open) {
        after.take_while(|next| take_to_open(table, PageId(*next), row)).for_each(drop);
    } else if is_open(page.0 + 1) {
        before.rev().take_while(|next| take_to_open(table, PageId(*next), row)).for_each(drop);
    }
}

/// Takes a page that is protected; `false`: it is not.
fn take_to_open(
    table: &PageTable,
    page: PageId,
    row: &mut ArrayVec<OpenedPage, CLUSTER_PAGES>,
) -> bool {
    let before = table.word(page).load();
    let is_protected = before.state() == State::Resident && before.protected();
    let taken = is_protected.then(|| protocol::open_for_writes(table.word(page), before));
    let Some(Ok((moving, opened))) = taken else { return false };
    // Nobody has touched it yet.
    let opened = opened.with_guessed(true).with_prefetched(before.prefetched());
    row.push(OpenedPage { page, before, moving, opened });
    true
}

/// `Cooling`: the page has not left yet; brings its frame back, for a fault or ahead of one.
pub(in crate::paging) fn take_back(
    pager: &Pager,
    page: PageId,
    word: Word,
    purpose: Purpose,
) -> Option<FaultStatus> {
    let frame = word.frame().expect("a cooling page has a frame");
    if !pager.pool().moves() && !pager.pool().charge_pages(1) {
        return Some(FaultStatus::NoRoom);
    }
    let note = pager.frames().meta_of(frame);
    let Ok(slot) = protocol::take_back(pager.word(page), word, note) else {
        pager.pool().uncharge_copy();
        return None;
    };
    let (moving, prefetched) = (Word::moving(None), note.prefetched());
    match pager.memory().return_frame(page, frame) {
        Ok(outcome) => {
            let unseen = prefetched && purpose == Purpose::Prefetch;
            let resident = Word::resident(slot).with_prefetched(unseen);
            pager.memory().publish_mapped(page, moving, resident, None);
            pager.frames().decide(frame, outcome);
            if purpose == Purpose::Fault {
                pager.counters().faults_cooling.bump();
                pager.counters().prefetch_hits.add(u64::from(prefetched));
            }
            Some(FaultStatus::Resolved)
        }
        Err(error) => {
            pager.pool().uncharge_copy();
            let (words, is_wanted) = ((moving, Word::cooling(frame)), purpose == Purpose::Fault);
            let answer = lost::not_mapped(pager, page, words, is_wanted, &error);
            if pager.word(page).load().state() == State::Poisoned {
                pager.slots().put(slot);
                pager.frames().decide(frame, FrameOutcome::Dropped);
            }
            Some(answer)
        }
    }
}

/// `Writing`: the device may still read the frame, so the page gets a copy of it.
fn copy_out(memory: &RegionMemory, page: PageId, word: Word) -> Option<FaultStatus> {
    let frame = word.frame().expect("a page being written has a frame");
    if !memory.pool().charge_pages(1) {
        return Some(FaultStatus::NoRoom);
    }
    if protocol::copy_out(memory.word(page), word).is_err() {
        memory.budget().uncharge(PAGE_SIZE);
        return None;
    }
    if let Err(error) = memory.copy_page(page, frame, Protect::No) {
        diagnostics::fatal("a page being written could not be mapped", &error);
    }
    memory.publish_mapped(page, Word::moving(None), Word::resident(None), None);
    memory.frames().decide(frame, FrameOutcome::Dropped);
    memory.counters().faults_cooling.bump();
    Some(FaultStatus::Resolved)
}

/// Fills a resident page that is missing with zeros. It may be written without a fault from then on. `false`: look at
/// the page again.
fn fill_hole(memory: &RegionMemory, page: PageId, word: Word) -> bool {
    // The word cannot leave `Resident` unnoticed while this thread has made it `Moving`.
    let moving = word.leaving();
    if memory.word(page).try_change(word, moving).is_err() {
        return false;
    }
    // SAFETY: what the program has dropped reads as zero, and this thread alone changes the page's mapping now.
    let outcome = unsafe { memory.mapper().map_zero_page(memory.table().addr(page)) };
    let protected = word.protected() && outcome != Outcome::Done;
    memory.publish(page, moving, word.with_protected(protected));
    match outcome {
        Outcome::Done => memory.counters().faults_zero.bump(),
        Outcome::Failed { errno: errno @ sys::EPERM, .. } => {
            let cause = Error::Os { call: "UFFDIO_ZEROPAGE", errno };
            diagnostics::fatal("a page of zeros could not be made", &cause);
        }
        _ => {
            memory.counters().faults_racing.bump();
            memory.wake(page);
        }
    }
    true
}
