//! In-thread mode: the faulting thread serves its own fault, in a SIGBUS handler.
//!
//! userfaultfd's SIGBUS feature turns a fault into a signal, so that no thread is woken and no
//! second processor takes part: the lowest latency, without privileges. The price: system calls
//! on pages that are not resident fail with `EFAULT`, because there is no instruction to signal.
//!
//! The handler finds the region by address, looks at the page's word as a handler does, and reads
//! the device synchronously. Prefetch and read-ahead stay with a handler thread; `WillNeedNow` reads
//! here, before there is a signal. A read that the device does not answer is revoked by the region's
//! [watchdog](crate::paging::fault::watchdog): its page is lost, and the other threads that touch it get SIGBUS.
//!
//! # Invariants
//! 1. A region is listed from before its first address is handed out until its threads stopped.
//! 2. What runs here takes no lock, and waits for no page or chunk, that its own thread holds: no code
//!    of this crate touches far memory while it holds one, and what a signal handler of the program
//!    may interrupt holds none (`sys::signals`). Nor is it interrupted itself: all signals are blocked.
#![expect(unsafe_code, reason = "reads into frames, follows listed pointers")]

use crate::base::deadline::Stopwatch;
use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicUsize, Interrupted, Ordering};
use crate::base::units::{PageCount, PageId};
use crate::base::visited::Visited;
use crate::paging::diagnostics;
use crate::paging::fault::fill;
use crate::paging::fault::in_memory;
use crate::paging::fault::no_room;
use crate::paging::fault::prefetch;
use crate::paging::fault::starved::{RoomClass, Stall};
use crate::paging::fault::status::{FaultStatus, Purpose};
use crate::paging::page::protocol;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::page::{PAGE, backoff};
use crate::paging::pager::Pager;
use crate::paging::pager::memory::{ReadPage, RegionMemory};
use crate::paging::pager::slot_store::SlotStore;
use crate::paging::probes::{self, StallReason};
use crate::paging::readahead::{FaultOn, PrefetchRun};
use crate::paging::transfer::check_read;
use crate::sys::signal::{self, BusCause, BusFault};
use crate::sys::signals::SignalsBlocked;
use crate::sys::thread;
use crate::sys::uffd::Wake;
use std::ptr::slice_from_raw_parts_mut;
use std::time::{Duration, Instant};

/// Regions in in-thread mode that a process can have at once.
const REGIONS_MAX: usize = 64;

static REGIONS: [ListedRegion; REGIONS_MAX] = [const { ListedRegion::new() }; REGIONS_MAX];

/// A place for a region.
struct ListedRegion {
    pager: Visited<Pager>,
    /// Its addresses, so that faults elsewhere need not visit it. They may be an earlier region's.
    start: AtomicUsize,
    len: AtomicUsize,
}

impl ListedRegion {
    const fn new() -> ListedRegion {
        let (start, len) = (AtomicUsize::new(0), AtomicUsize::new(0));
        ListedRegion { pager: Visited::new(), start, len }
    }

    fn may_contain(&self, addr: usize) -> bool {
        // Relaxed: a thread knows of an address only from after these were stored.
        addr.wrapping_sub(self.start.load(Ordering::Relaxed)) < self.len.load(Ordering::Relaxed)
    }
}

/// Lists a region with the signal handler.
///
/// # Errors
/// [`Error::Unsupported`] when too many regions are listed, [`Error::Os`] when the handler cannot
/// be installed.
pub(in crate::paging) fn list(pager: &Pager) -> Result<()> {
    signal::install(serve)?;
    let free = REGIONS.iter().find(|listed| listed.pager.offer(pager));
    let listed = free.ok_or(Error::Unsupported {
        feature: "another region in in-thread mode",
        why: "a process can have 64 at once",
    })?;
    listed.start.store(pager.table().start(), Ordering::Relaxed);
    listed.len.store(pager.table().len(), Ordering::Relaxed);
    Ok(())
}

/// Unlists a region that stops, and waits until no thread is serving a fault in it. Faults in other
/// regions are nothing to it.
pub(in crate::paging) fn unlist(pager: &Pager) {
    let mut spins = 0;
    REGIONS.iter().for_each(|listed| listed.pager.withdraw(pager, || backoff(&mut spins)));
}

/// Serves a SIGBUS if it is for a listed region.
fn serve(fault: BusFault) -> bool {
    // By the mask of this handler. What the thread was doing holds nothing that is needed here.
    let _blocked = SignalsBlocked::already();
    let _anew = Interrupted::new();
    REGIONS.iter().filter(|listed| listed.may_contain(fault.addr)).any(|listed| {
        let Some(visit) = listed.pager.visit() else { return false };
        // SAFETY: a pager lives until `unlist` has withdrawn it, which waits for this visit.
        let pager = unsafe { &*visit.what() };
        let inside = fault.addr.wrapping_sub(pager.table().start()) < pager.table().len();
        inside && serve_in_thread(pager, fault)
    })
}

/// Serves a fault of the calling thread; `false` when the page is lost, or the region stops.
fn serve_in_thread(pager: &Pager, bus: BusFault) -> bool {
    let page = pager.table().page_at(bus.addr);
    let mut spins = 0;
    let mut starved: Option<(Stopwatch, Stall)> = None;
    loop {
        let word = pager.word(page).load();
        // (A page that the kernel was told to poison faults in the same way.)
        if bus.cause != BusCause::Missing && word.state() == State::Resident {
            diagnostics::hardware_error(bus.addr);
            return false;
        }
        if pager.health().is_stopping() {
            return false; // What it might wait for will not come any more.
        }
        // The signal does not say whether the page is missing or protected. The word does, but a page may stay
        // protected when its word has forgotten that: after it was a hole and was filled, or when it could not leave.
        let protected = word.state() == State::Resident
            && bus.write
            && (word.protected() || !pager.memory().is_hole(page));
        let answer = match word.state() {
            State::Poisoned => return false,
            State::Stored => read_in_thread(pager, page, word, bus.write, Purpose::Fault),
            // For the watchdog: this thread waits for the read, too.
            State::Filling if !word.dead() => {
                protocol::want(pager.word(page), word).then_some(FaultStatus::TryAgain)
            }
            _ => in_memory::resolve_in_memory(pager, page, word, protected),
        };
        match answer {
            Some(FaultStatus::Resolved | FaultStatus::Reading) => {
                probes::fault_answered(page, Duration::ZERO); // The time is not taken here.
                return true;
            }
            Some(FaultStatus::TryAgain | FaultStatus::QueueFull) => backoff(&mut spins),
            Some(FaultStatus::NoRoom) => starve_in_thread(pager, page, &mut starved),
            None => {}
        }
    }
}

/// Waits a little for the evictor; gives up on the page when it stalls.
fn starve_in_thread(pager: &Pager, page: PageId, since: &mut Option<(Stopwatch, Stall)>) {
    const PAUSE: Duration = Duration::from_micros(50);
    let now = Instant::now();
    let class = no_room::room_class(pager.memory(), page).unwrap_or(RoomClass::Content);
    let progress = pager.starved().progress(class);
    let (watch, stall) = since.get_or_insert_with(|| {
        pager.counters().faults_starved.bump();
        probes::stalled(StallReason::NoFrame);
        let failed = pager.health().writes_failed();
        let stall = Stall::new(Duration::ZERO, progress, failed);
        (Stopwatch::start(pager.health().deadline(), now), stall)
    });
    if no_room::give_up_stalled(pager, page, class, stall, watch.look(now)) {
        return;
    }
    pager.pool().waiters().begin_starving();
    pager.pool().waiters().call_evictor();
    std::thread::sleep(PAUSE); // nanosleep(2) is async-signal-safe in Linux.
    pager.pool().waiters().end_starving();
}

/// Reads and installs a page before it is touched, if it is on the store and there is a frame.
/// Obstacles show themselves at the touch.
pub(in crate::paging) fn fetch(pager: &Pager, page: PageId) {
    let word = pager.word(page).load();
    if word.state() == State::Stored {
        read_in_thread(pager, page, word, false, Purpose::Prefetch);
    }
}

/// `Stored`: reads the page and maps it.
fn read_in_thread(
    pager: &Pager,
    page: PageId,
    stored: Word,
    write: bool,
    purpose: Purpose,
) -> Option<FaultStatus> {
    let frame = match fill::begin_fill(pager.memory(), page, stored, purpose) {
        Ok(frame) => frame,
        Err(status) => return status,
    };
    if purpose == Purpose::Fault {
        request_window(pager, page);
    }
    match read_frame(pager, frame, purpose) {
        Some(Ok(())) => {}
        Some(Err(error)) => {
            fill::fail_fill(pager, frame, purpose, &error);
            pager.pool().cancel_fill(frame);
            return None;
        }
        None => {
            clear_up(pager.memory(), pager.slots(), page, frame);
            return None;
        }
    }
    let read = fill::end_fill(pager.memory(), pager.slots(), frame)?;
    // A page that was asked for ahead is touched next by the thread that asked.
    let read = ReadPage { wanted: true, ..read };
    if let Err(status) = fill::map_fills(pager, frame, &[read], write, Wake::No) {
        return Some(status);
    }
    match purpose {
        Purpose::Fault => pager.counters().faults_read.bump(),
        Purpose::Prefetch => pager.counters().pages_prefetched.bump(),
    }
    Some(FaultStatus::Resolved)
}

/// A read that was revoked has returned: frame and slot are this thread's again, to be given back.
fn clear_up(memory: &RegionMemory, slots: &SlotStore, page: PageId, frame: FrameId) {
    let mut spins = 0;
    // Not before the watchdog has changed the word that names the frame.
    while memory.word(page).load().is_filling(frame) {
        backoff(&mut spins);
    }
    slots.put(memory.frames().slot(frame));
    memory.pool().cancel_fill(frame);
}

/// Reads a frame's slot and verifies it, again and again while that may help. `None`: it took too long, and the watchdog
/// has taken the page, but not frame and slot.
fn read_frame(pager: &Pager, frame: FrameId, purpose: Purpose) -> Option<Result<()>> {
    let (slots, frames, counters) = (pager.slots(), pager.frames(), pager.counters());
    let read = || Some(check_read(slots, frames, counters, frame, &read_once(pager, frame)?));
    let is_discarded = || fill::is_discarded(pager.memory(), frame);
    fill::read_until_deadline(pager.health(), purpose, is_discarded, read)
}

/// Reads a frame's slot once; returns what the store returned, or `None` where the read was revoked.
fn read_once(pager: &Pager, frame: FrameId) -> Option<Result<()>> {
    let (slots, frames) = (pager.slots(), pager.frames());
    let offset = slots.offset(frames.slot_of_fill(frame));
    let note = frames.meta_of(frame);
    note.begin_read(thread::current_noted());
    let into = slice_from_raw_parts_mut(frames.ptr(frame), PAGE);
    // SAFETY: the frame is this thread's, a page long, and nobody else uses it, nor writes
    // the slot: both stay this thread's if the read is revoked.
    let read = unsafe { slots.store().read_now(offset, into) };
    note.end_read().then_some(read)
}

/// Passes what a stream of faults leads to on to a handler.
fn request_window(pager: &Pager, page: PageId) {
    let Some(window) = prefetch::next_window(pager, page, FaultOn::StoredPage) else { return };
    let mut asked = false;
    for (first, count) in window.rows(pager.table().page_count().0) {
        let run = PrefetchRun { first, count: PageCount(count), for_stream: false };
        asked |= pager.readahead().request(run);
    }
    if asked {
        pager.sched().call(0);
    }
}
