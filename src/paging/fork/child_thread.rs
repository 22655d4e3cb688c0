//! The thread of a child region: answers the faults of a forked child on what it has inherited.
//!
//! `evict` is the other half of its work: what leaves when the child has more than its budget.
#![expect(unsafe_code, reason = "installs pages of the region")]

mod evict;
mod rescan;

use crate::base::error::{Error, Result};
use crate::base::gate::{Closed, LOOK_EVERY};
use crate::base::local::keep_local;
use crate::base::units::{PageId, SlotId};
use crate::paging::diagnostics;
use crate::paging::fault::fill;
use crate::paging::fault::status::Purpose;
use crate::paging::fork::child_region::ChildRegion;
use crate::paging::fork::children::Birth;
use crate::paging::fork::entry::{Backing, Entry};
use crate::paging::fork::snapshot::{ForkSnapshot, Needed};
use crate::paging::page::PAGE;
use crate::paging::pager::pieces::{FarParts, GONE};
use crate::store::{Queue, SEGMENTS_MAX};
use crate::sys;
use crate::sys::event::poll_readable;
use crate::sys::fork;
use crate::sys::signals::SignalsBlocked;
use crate::sys::uffd::{Message, Outcome, Protect, Uffd, Wake};
use crate::sys::vm::{HUGE_PAGE, Huge, Mapping};
use rescan::{LOOK_EVERY_MAX, RescanTimer};
use std::os::fd::RawFd;
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Instant;

/// Pages that are taken out together at most.
const BATCH_MAX: usize = SEGMENTS_MAX;

/// In a child that was just forked: serves the faults on what it has inherited from now on.
///
/// # Errors
/// As [`ChildRegion::new`], and when the thread cannot be started.
pub(super) fn start(snapshot: ForkSnapshot, birth: Birth) -> Result<Arc<ChildRegion>> {
    let child = ChildRegion::new(snapshot, birth)?;
    let (begun, has_begun) = channel();
    let served = Arc::clone(&child);
    let _blocked = SignalsBlocked::new();
    fork::start_thread(c"farheap-child", move || serve(served, begun))
        .map_err(sys::refused("pthread_create"))?;
    let lost = Error::Os { call: "starting a thread", errno: sys::EIO };
    has_begun.recv().unwrap_or(Err(lost)).map(|()| child)
}

/// The thread of a child region.
fn serve(child: Arc<ChildRegion>, begun: Sender<Result<()>>) {
    let _ours = keep_local();
    SignalsBlocked::for_good();
    let mut server = match Server::new(child) {
        Ok(server) => server,
        Err(error) => return drop(begun.send(Err(error))),
    };
    drop(begun.send(Ok(())));
    drop(begun);
    let run = std::panic::AssertUnwindSafe(|| server.run());
    let error = match std::panic::catch_unwind(run) {
        Ok(Err(error)) => error,
        _ => Error::Os { call: "a handler thread", errno: sys::EIO },
    };
    diagnostics::fatal("inherited far memory cannot be served any more", &error)
}

/// State of a child region's thread.
struct Server {
    child: Arc<ChildRegion>,
    uffd: Uffd,
    queue: Option<Box<dyn Queue>>,
    /// Pages are read into the first page, and moved to the others when they leave.
    frames: Mapping,
    messages: Vec<Message>,
    kept: Vec<Message>,
    rescans: RescanTimer,
    /// All threads of the program have ended.
    is_ending: bool,
    /// When pages are taken out again, after a write that failed or a batch that the kernel kept.
    write_again: Option<Instant>,
}

impl Server {
    fn new(child: Arc<ChildRegion>) -> Result<Server> {
        let mut keep: Vec<RawFd> = child.needed.iter().map(Needed::fd).collect();
        fork::take_own_table(&mut keep).map_err(sys::refused("close_range"))?;
        let uffd = child.pager.mapper().open_again()?;
        let frames = Mapping::reserve((BATCH_MAX + 1) * PAGE, HUGE_PAGE, Huge::No)?;
        uffd.register_unwatched(frames.addr() + PAGE, BATCH_MAX * PAGE)?;
        uffd.register_missing(child.bell.addr(), PAGE)?;
        child.far.lock().each(|start, len| uffd.register_missing(start, len))?;
        let queue = child.own().map(|own| own.store().open_queue(1)).transpose()?;
        Ok(Server {
            child,
            uffd,
            queue,
            frames,
            messages: vec![Message::EMPTY; 64],
            kept: Vec::new(),
            rescans: RescanTimer::new(),
            is_ending: false,
            write_again: None,
        })
    }

    fn run(&mut self) -> Result<()> {
        loop {
            if self.child.gate.is_closed(Closed::Evictor) {
                self.stand_still()?;
            }
            let now = Instant::now();
            if self.rescans.next() <= now {
                self.look(now);
            }
            let count = self.read()?;
            let kept = std::mem::take(&mut self.kept);
            kept.iter().for_each(|message| self.answer(*message));
            for at in 0..count {
                self.answer(self.messages[at]);
            }
            if count == 0 && kept.is_empty() {
                let patience = self.rescans.next().saturating_duration_since(Instant::now());
                let patience = patience.min(LOOK_EVERY_MAX);
                poll_readable(&[self.uffd.raw_fd()], patience).map_err(waiting)?;
            }
        }
    }

    fn read(&mut self) -> Result<usize> {
        self.uffd.read(&mut self.messages)
    }

    /// The process is about to fork: takes nothing out, and serves faults until all is to stand still.
    fn stand_still(&mut self) -> Result<()> {
        let child = Arc::clone(&self.child);
        child.gate.stand_still(Closed::Evictor, || {
            if child.gate.is_closed(Closed::All) {
                return self.keep_faults();
            }
            let count = self.read()?;
            for at in 0..count {
                let message = self.messages[at];
                self.bring_in(message);
            }
            poll_readable(&[self.uffd.raw_fd()], LOOK_EVERY).map(drop).map_err(waiting)
        })
    }

    /// Stands still until the process has forked. Counted anew: the thread that forks goes on only when this one has
    /// served what it had read, and holds no lock.
    fn keep_faults(&mut self) -> Result<()> {
        let child = Arc::clone(&self.child);
        let table = child.pager.table();
        *child.far.lock() = FarParts::find(&self.uffd, table.start(), table.len());
        child.gate.stand_still(Closed::All, || {
            let count = self.read()?;
            for at in 0..count {
                let message = self.messages[at];
                match message.fault() {
                    Some(fault) if fault.address != child.bell.addr() => {
                        if child.gate.note_fault(fault.thread, fault.address) {
                            // A failed wake means that nobody can wait there.
                            drop(self.uffd.wake(fault.address, PAGE));
                        } else {
                            self.kept.push(message);
                        }
                    }
                    _ => self.bring_in(message),
                }
            }
            poll_readable(&[self.uffd.raw_fd()], LOOK_EVERY).map(drop).map_err(waiting)
        })
    }

    fn answer(&mut self, message: Message) {
        self.bring_in(message);
        self.keep_to_budget();
    }

    /// Answers a message; nothing is taken out for that.
    fn bring_in(&mut self, message: Message) {
        if let Some(from) = message.moved_from() {
            let text = "the program has moved inherited far memory (mremap)";
            diagnostics::broken(format_args!("{text} at {from:#x}"));
        }
        let Some(fault) = message.fault() else { return };
        if fault.address == self.child.bell.addr() {
            // SAFETY: the page holds nothing.
            let _ = unsafe { self.uffd.zeropage(fault.address, Wake::Yes) };
        } else {
            self.serve(fault.address);
        }
    }

    // In.

    /// Brings the page of a fault in.
    fn serve(&mut self, address: usize) {
        let page = self.child.pager.table().page_at(address);
        let entry = self.child.entry(page);
        if !entry.is_out() || entry.backing() == Backing::Nothing {
            // SAFETY: what was never there, or the program has dropped, reads as zero.
            let zeroed = unsafe { self.uffd.zeropage(address, Wake::Yes) };
            self.installed(page, zeroed);
            return self.note_in(page, entry.came_in());
        }
        let read = match entry.backing() {
            Backing::Frame(frame) => Ok(self.child.pager.frames().ptr(frame).cast_const()),
            Backing::Slot { layer, slot } => self.fetch(layer, slot),
            Backing::Nothing => unreachable!("looked at above"),
        };
        match read {
            Ok(content) => {
                let copied = self.copy_in(page, content);
                self.installed(page, copied);
                let came = match entry.backing() {
                    Backing::Frame(frame) => {
                        self.drop_frame(frame);
                        Entry::in_memory(Backing::Nothing)
                    }
                    _ => entry.came_in(),
                };
                self.note_in(page, came);
            }
            Err(error) => self.lose(page, &error),
        }
    }

    /// Reads a slot, again and again while that may help, as a thread does that serves its own faults.
    fn fetch(&mut self, layer: u16, slot: SlotId) -> Result<*const u8> {
        let slots = self.child.slots(layer);
        let into = slice_from_raw_parts_mut(self.frames.as_ptr(), PAGE);
        let read = || {
            // SAFETY: the first page of `frames` is this thread's, for reads alone; nobody writes the slot:
            // it is held for this process, or its own.
            unsafe { slots.store().read_now(slots.offset(slot), into) }?;
            // SAFETY: the page was just read, and nobody else uses it.
            let bytes = unsafe { &*into };
            match slots.verifies() && slots.hash_bytes(bytes) != slots.hash(slot) {
                true => Err(slots.corrupt(slot)),
                false => Ok(()),
            }
        };
        // What was discarded by then has no slot.
        let is_discarded = || false;
        let (health, read) = (self.child.pager.health(), || Some(read()));
        let ended = fill::read_until_deadline(health, Purpose::Fault, is_discarded, read);
        ended.expect("it is not revoked").map(|()| into.cast_const().cast())
    }

    /// Copies a page in.
    fn copy_in(&self, page: PageId, content: *const u8) -> Outcome {
        let start = self.child.pager.table().addr(page);
        // SAFETY: the page is missing, and `content` is what it holds, a page long.
        unsafe { self.uffd.copy(start, content, PAGE, Protect::No, Wake::Yes) }
    }

    /// A page was installed, or there is no way to.
    fn installed(&self, page: PageId, outcome: Outcome) {
        match outcome {
            Outcome::Done => {}
            Outcome::Present { .. } | GONE => {
                drop(self.uffd.wake(self.child.pager.table().addr(page), PAGE));
            }
            Outcome::Busy { .. } | Outcome::Failed { .. } => {
                let cause = Error::Os { call: "installing a page", errno: sys::ENOMEM };
                diagnostics::fatal("inherited far memory could not be mapped", &cause)
            }
        }
    }

    fn note_in(&self, page: PageId, entry: Entry) {
        if !entry.is_listed() {
            self.child.queue.lock().push_back(page);
        }
        self.child.set(page, entry.listed());
    }

    /// Makes touching a page SIGBUS, whose content cannot be read.
    fn lose(&self, page: PageId, cause: &Error) {
        let start = self.child.pager.table().addr(page);
        diagnostics::lost_inherited(start, cause);
        // SAFETY: the page is missing and its content is lost.
        let poisoned = unsafe { self.uffd.poison(start) };
        if poisoned != Outcome::Done {
            diagnostics::fatal("a lost page could not be poisoned", cause);
        }
        drop(self.uffd.wake(start, PAGE));
    }
}

fn waiting(errno: crate::sys::file::Errno) -> Error {
    Error::Os { call: "poll", errno: errno.0 }
}
