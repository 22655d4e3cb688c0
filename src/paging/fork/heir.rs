//! An heir: the far memory of a forked child, which is its parent's as it was at the fork.
//!
//! The child has the parent's page words, frames and hashes as the fork has copied them, and its mappings;
//! the kernel copies a page when either side writes it. One thread of the child serves the faults on pages
//! that were not in memory: it reads them from the parent's slots, which the parent keeps as they are, or
//! copies them out of frames in which they cooled. Pages that only the child has are counted, and the
//! oldest of them taken out when there are more than its budget: to slots of its own where they were
//! written. What was on no device and in no frame reads as zero.
//!
//! ```text
//!   inherited:  word says Stored -> its slot;  Cooling, Writing -> its frame;  else in memory, or zero
//!        | touched, or found to be the child's alone
//!        v                  over budget: moved out, hashed
//!   In(backing) ----------------------------------------------> Out(slot of a layer, or zero)
//!        ^                                                              |
//!        '----------------------- fault: read, checked, copied ---------'
//! ```
//! A *layer* is a store with its slots: layer 0 is that of the process that made the region, the last one
//! the child's own; those between are of the processes by which they are related.
//!
//! What a descriptor is worth in a forked child is the program's to say: it may close all. So the thread
//! has a table of descriptors of its own.
//!
//! # Invariants
//! 1. Only the heir's thread installs pages and takes them out, one after the other; so no two changes of
//!    a page race. In a thread that forks it stands still meanwhile.
//! 2. A slot that an entry names is of a layer that stays readable as long as the process lives.
#![expect(unsafe_code, reason = "installs pages of the region and takes them out")]

use crate::base::error::{Error, Result};
use crate::base::gate::{Closed, Gate, LOOK_EVERY};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{PageId, SlotCount, SlotId};
use crate::meta::LazyArray;
use crate::paging::diagnostics;
use crate::paging::fork::children::{Birth, Children};
use crate::paging::fork::entry::{Backing, Entry};
use crate::paging::fork::legacy::{BUDGET_PAGES_MIN, Legacy, Needed};
use crate::paging::page::word::{FrameId, State as PageState};
use crate::paging::pager::Pager;
use crate::paging::pager::slot_store::{ContentHash, SlotStore};
use crate::store::{Op, Queue, Request, SEGMENTS_MAX, Segment};
use crate::sys;
use crate::sys::event::poll_readable;
use crate::sys::fork;
use crate::sys::signals::SignalsBlocked;
use crate::sys::uffd::{Message, Outcome, Protect, Uffd, Wake};
use crate::sys::vm::{HUGE_PAGE, Huge, KERNEL_PAGE, Mapping, Piece, make_own};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Bytes that are taken out together.
const BATCH_BYTES: usize = 1 << 20;
/// Pages that are taken out together at most.
const BATCH_MAX: usize = SEGMENTS_MAX;
/// How often the child looks whether pages have become its alone: a child that only starts a program is
/// gone by the first time.
const LOOK_EVERY_MIN: Duration = Duration::from_millis(10);
/// ... where neither the child nor its parent has had a fault.
const LOOK_IDLE_MAX: Duration = Duration::from_millis(100);
/// How often it looks at least.
const LOOK_EVERY_MAX: Duration = Duration::from_secs(1);
/// A look may take 1/LOOK_PART of the time.
const LOOK_PART: u32 = 20;
/// How long nothing is taken out after a write that failed.
const WRITE_PAUSE: Duration = Duration::from_secs(1);

/// See [module](self).
#[derive(Debug)]
pub(super) struct Heir {
    /// What the region was when the first of the line was forked: only read.
    pager: Arc<Pager>,
    entries: Arc<LazyArray<AtomicU64>>,
    /// From layer 1 on.
    layers: Vec<Arc<SlotStore>>,
    /// The last of the layers is this process's own.
    has_own: bool,
    needed: Vec<Needed>,
    budget: u64,
    gate: Gate,
    children: Children,
    /// A page that wakes the thread by being touched.
    bell: Mapping,
    /// Pages in memory that are this process's alone, oldest first.
    queue: Ranked<VecDeque<PageId>>,
}

impl Heir {
    /// In a child that was just forked: serves the faults on what it has inherited from now on. `end` is
    /// its end of the pipe by which its parent knows that it is alive.
    ///
    /// # Errors
    /// When something is refused that is needed for it; the memory must not be touched then.
    pub(super) fn start(legacy: Legacy, end: OwnedFd) -> Result<Arc<Heir>> {
        let Legacy { pager, entries, mut layers, mut needed, budget } = legacy;
        if !needed.iter().all(Needed::is_open) {
            let why = "the process has closed a descriptor that it would need for that";
            return Err(Error::Unsupported { feature: "inherited far memory", why });
        }
        // Before the thread has a table of descriptors of its own: a grandchild needs it, too.
        let own = pager.slots().open_in_child();
        let has_own = own.is_ok();
        if let Ok(own) = own {
            let inherited = own.inherit().and_then(|inherited| inherited.descriptor);
            needed.extend(inherited.map(Needed::new));
            layers.push(Arc::new(own));
        }
        needed.push(Needed::new(end.into_raw_fd()));
        let heir = Arc::new(Heir {
            pager,
            entries,
            layers,
            has_own,
            needed,
            budget,
            gate: Gate::new(),
            children: Children::new(),
            bell: Mapping::reserve(KERNEL_PAGE, KERNEL_PAGE, Huge::No)?,
            queue: Ranked::new(Rank::Policy, VecDeque::new()),
        });
        let (begun, has_begun) = channel();
        let served = Arc::clone(&heir);
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new().name("farheap-heir".to_owned());
        let thread = thread.spawn(move || serve(served, begun)).map_err(|error| Error::Os {
            call: "starting a thread",
            errno: error.raw_os_error().unwrap_or(sys::EIO),
        })?;
        drop(thread);
        let lost = Error::Os { call: "starting a thread", errno: sys::EIO };
        has_begun.recv().unwrap_or(Err(lost)).map(|()| heir)
    }

    // For the thread that forks a child of the child's.

    pub(super) fn gate(&self) -> &Gate {
        &self.gate
    }

    pub(super) fn pager(&self) -> &Arc<Pager> {
        &self.pager
    }

    pub(super) fn children(&self) -> &Children {
        &self.children
    }

    /// Stops the thread, or a part of what it does.
    pub(super) fn close(&self, what: Closed, thread: u32) {
        self.gate.close(what, thread, 1, || self.ring());
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // SAFETY: the page holds nothing, and nobody else uses it: one thread forks at a time.
        drop(unsafe { self.bell.discard(0, KERNEL_PAGE) });
        let page = self.bell.as_ptr();
        // SAFETY: mapped and readable; where it is missing, the heir's thread maps it.
        let _ = unsafe { page.read_volatile() };
    }

    /// Prepares for a child.
    ///
    /// # Errors
    /// As [`Birth::prepare`].
    pub(super) fn prepare_birth(&self) -> Result<Birth> {
        let own = self.own().ok_or(Error::Unsupported {
            feature: "inherited far memory in a child of the child's",
            why: "the child has no store of its own",
        })?;
        // Now and not earlier: the heir's thread has another table of descriptors.
        self.children.reap_now(own.map());
        Birth::prepare(own.map())
    }

    fn own(&self) -> Option<&SlotStore> {
        self.layers.last().filter(|_| self.has_own).map(|own| &**own)
    }

    /// What it leaves, in a child of this one, which has been forked while the thread stood still.
    pub(super) fn legacy(&self) -> Legacy {
        // They were this process's alone; now they are shared.
        for page in self.queue.lock().drain(..) {
            let entry = self.entry(page);
            self.set(page, entry.unlisted());
        }
        Legacy {
            pager: Arc::clone(&self.pager),
            entries: Arc::clone(&self.entries),
            layers: self.layers.clone(),
            needed: self.needed.clone(),
            budget: (self.budget / (self.children.count() as u64 + 2)).max(BUDGET_PAGES_MIN),
        }
    }

    // Pages.

    /// What is known of a page, by this process or by the words that it inherited.
    fn entry(&self, page: PageId) -> Entry {
        // Relaxed: changed by the heir's thread only.
        let entry = Entry::from_bits(self.entries[page.as_usize()].load(Ordering::Relaxed));
        entry.unwrap_or_else(|| self.inherited(page))
    }

    fn set(&self, page: PageId, entry: Entry) {
        self.entries[page.as_usize()].store(entry.bits(), Ordering::Relaxed);
    }

    /// What the words say.
    fn inherited(&self, page: PageId) -> Entry {
        let word = self.pager.word(page).load();
        match word.state() {
            PageState::Stored => Entry::out(backing(word.slot())),
            PageState::Filling => {
                let frame = word.frame().expect("a page being read has a frame");
                Entry::out(backing(self.pager.frames().slot(frame)))
            }
            PageState::Cooling | PageState::Writing => {
                Entry::out(Backing::Frame(word.frame().expect("it has a frame")))
            }
            PageState::Resident => Entry::in_memory(backing(word.slot())),
            // (One that is `Moving` is being discarded.)
            PageState::Empty | PageState::Moving | PageState::Poisoned => {
                Entry::in_memory(Backing::Nothing)
            }
        }
    }

    fn slots(&self, layer: u16) -> &SlotStore {
        match layer {
            0 => self.pager.slots(),
            layer => &self.layers[usize::from(layer) - 1],
        }
    }

    /// Says something on the program's standard error, which the thread has no descriptor of.
    fn say(say: impl FnOnce()) {
        let file = std::fs::File::options().write(true).open("/proc/self/fd/2");
        let Ok(file) = file else { return };
        let _as_second = fork::as_standard_error(file.as_raw_fd());
        say();
        diagnostics::flush();
    }
}

fn backing(slot: Option<SlotId>) -> Backing {
    slot.map_or(Backing::Nothing, |slot| Backing::Slot { layer: 0, slot })
}

/// The thread of an heir.
fn serve(heir: Arc<Heir>, begun: Sender<Result<()>>) {
    let _ours = keep_local();
    SignalsBlocked::for_good();
    let mut server = match Server::new(heir) {
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
    Heir::say(|| diagnostics::fatal("inherited far memory cannot be served any more", &error));
    std::process::abort();
}

/// What the thread of an heir works with.
struct Server {
    heir: Arc<Heir>,
    uffd: Uffd,
    queue: Option<Box<dyn Queue>>,
    /// Pages are read into the first page, and moved to the others when they leave.
    frames: Mapping,
    batch: usize,
    messages: Vec<Message>,
    kept: Vec<Message>,
    looks: Looks,
    /// All threads of the program have ended.
    is_ending: bool,
    write_again: Option<Instant>,
}

/// When the thread looks whether pages have become the child's alone: more often while parent and child
/// have faults, and never for more than 1/[`LOOK_PART`] of the time.
struct Looks {
    at: Instant,
    every: Duration,
    /// When all pages were looked at last, and how many faults parent and child had had by then.
    last: Option<Instant>,
    faults: u64,
}

impl Looks {
    fn new() -> Looks {
        Looks { at: Instant::now() + LOOK_EVERY_MIN, every: LOOK_EVERY_MIN, last: None, faults: 0 }
    }

    /// Whether all pages are to be looked at; `faults` are those of parent and child until now.
    fn is_due(&mut self, now: Instant, faults: u64) -> bool {
        let is_quiet = faults == std::mem::replace(&mut self.faults, faults);
        self.every = if is_quiet { LOOK_IDLE_MAX.min(self.every * 2) } else { LOOK_EVERY_MIN };
        !is_quiet || self.last.is_none_or(|last| now - last >= LOOK_EVERY_MAX)
    }

    /// All pages were looked at, from `began` until now.
    fn note_look(&mut self, began: Instant) {
        self.last = Some(began);
        self.every = self.every.max(began.elapsed() * LOOK_PART);
    }

    fn plan_next(&mut self) {
        self.at = Instant::now() + self.every;
    }
}

/// A page on its way out.
#[derive(Clone, Copy)]
struct Leaving {
    page: PageId,
    frame: usize,
    hash: ContentHash,
}

impl Server {
    fn new(heir: Arc<Heir>) -> Result<Server> {
        let mut keep: Vec<RawFd> = heir.needed.iter().map(Needed::fd).collect();
        fork::take_own_table(&mut keep).map_err(sys::refused("close_range"))?;
        let uffd = heir.pager.mapper().open_again()?;
        let page_bytes = heir.pager.page_bytes();
        let batch = (BATCH_BYTES / page_bytes).clamp(1, BATCH_MAX);
        let huge = if page_bytes >= HUGE_PAGE { Huge::Yes } else { Huge::No };
        let frames = Mapping::reserve((batch + 1) * page_bytes, HUGE_PAGE, huge)?;
        uffd.register_unwatched(frames.addr() + page_bytes, batch * page_bytes)?;
        uffd.register_missing(heir.bell.addr(), KERNEL_PAGE)?;
        let (start, len) = (heir.pager.table().start(), heir.pager.table().len());
        register(&uffd, start, len)?;
        let queue = heir.own().map(|own| own.store().open_queue(1)).transpose()?;
        Ok(Server {
            heir,
            uffd,
            queue,
            frames,
            batch,
            messages: vec![Message::EMPTY; 64],
            kept: Vec::new(),
            looks: Looks::new(),
            is_ending: false,
            write_again: None,
        })
    }

    fn run(&mut self) -> Result<()> {
        loop {
            if self.heir.gate.is_closed(Closed::Evictor) {
                self.stand_still()?;
            }
            let now = Instant::now();
            if self.looks.at <= now {
                self.look(now);
            }
            let count = self.read()?;
            let kept = std::mem::take(&mut self.kept);
            kept.iter().for_each(|message| self.answer(*message));
            for at in 0..count {
                self.answer(self.messages[at]);
            }
            if count == 0 && kept.is_empty() {
                let patience = self.looks.at.saturating_duration_since(Instant::now());
                let patience = patience.min(LOOK_EVERY_MAX);
                poll_readable(&[self.uffd.raw_fd()], patience).map_err(waiting)?;
            }
        }
    }

    fn read(&mut self) -> Result<usize> {
        self.uffd.read(&mut self.messages)
    }

    /// The process is about to fork.
    fn stand_still(&mut self) -> Result<()> {
        let heir = Arc::clone(&self.heir);
        heir.gate.stand_still(Closed::Evictor, || {
            let count = self.read()?;
            for at in 0..count {
                let message = self.messages[at];
                let Some(fault) = message.fault() else { continue };
                if fault.address == heir.bell.addr() {
                    self.answer(message);
                } else if heir.gate.is_closed(Closed::All) {
                    heir.gate.note_fault(fault.thread);
                    self.kept.push(message);
                } else {
                    self.serve(fault.address);
                }
            }
            poll_readable(&[self.uffd.raw_fd()], LOOK_EVERY).map(drop).map_err(waiting)
        })
    }

    fn answer(&mut self, message: Message) {
        if let Some(from) = message.moved_from() {
            let text = "the program has moved inherited far memory (mremap)";
            Heir::say(|| diagnostics::broken(format_args!("{text} at {from:#x}")));
        }
        let Some(fault) = message.fault() else { return };
        if fault.address == self.heir.bell.addr() {
            // SAFETY: the page holds nothing.
            let _ = unsafe { self.uffd.zeropage(fault.address, KERNEL_PAGE, Wake::Yes) };
            return;
        }
        self.serve(fault.address);
        self.keep_to_budget();
    }

    // In.

    /// Brings the page of a fault in.
    fn serve(&mut self, address: usize) {
        let page = self.heir.pager.page_at(address);
        let entry = self.heir.entry(page);
        if !entry.is_out() || entry.backing() == Backing::Nothing {
            // A part of the page that was never there, or that the program has dropped; of a page that is
            // out all parts are zeros, which come one by one.
            // SAFETY: what is missing there reads as zero.
            let zeroed = unsafe { self.uffd.zeropage(address, KERNEL_PAGE, Wake::Yes) };
            self.installed(page, zeroed);
            return self.note_in(page, entry.came_in());
        }
        let read = match entry.backing() {
            Backing::Frame(frame) => Ok(self.heir.pager.frames().ptr(frame).cast_const()),
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

    /// Reads a slot.
    fn fetch(&mut self, layer: u16, slot: SlotId) -> Result<*const u8> {
        let slots = self.heir.slots(layer);
        let (into, len) = (self.frames.as_ptr(), self.heir.pager.page_bytes());
        // SAFETY: the first page of `frames` is this thread's, for reads alone; nobody writes the slot:
        // it is held for this process, or its own.
        unsafe { slots.store().read_now(slots.offset(slot), into, len) }?;
        // SAFETY: the page was just read, and nobody else uses it.
        let bytes = unsafe { std::slice::from_raw_parts(into, len) };
        if slots.verifies() && slots.hash_bytes(bytes) != slots.hash(slot) {
            return Err(Error::Corrupt { slot: slot.0 });
        }
        Ok(into)
    }

    /// Copies a page in; what of it is there stays.
    fn copy_in(&self, page: PageId, content: *const u8) -> Outcome {
        let (start, len) = (self.heir.pager.addr(page), self.heir.pager.page_bytes());
        // SAFETY: the page is missing, and `content` is what it holds, a page long.
        let outcome = unsafe { self.uffd.copy(start, content, len, Protect::No, Wake::Yes) };
        if outcome == Outcome::Done {
            return outcome;
        }
        // The program has split the mapping, or unmapped a part: as far as it goes.
        let mut last = Outcome::Done;
        for at in (0..len).step_by(KERNEL_PAGE) {
            let content = content.wrapping_add(at);
            // SAFETY: as above, of a part.
            let part =
                unsafe { self.uffd.copy(start + at, content, KERNEL_PAGE, Protect::No, Wake::Yes) };
            last = match part {
                Outcome::Done | Outcome::Present { .. } | GONE => last,
                other => other,
            };
        }
        last
    }

    /// A page was installed, or there is no way to.
    fn installed(&self, page: PageId, outcome: Outcome) {
        match outcome {
            Outcome::Done => {}
            Outcome::Present { .. } | GONE => {
                let (start, len) = (self.heir.pager.addr(page), self.heir.pager.page_bytes());
                drop(self.uffd.wake(start, len));
            }
            Outcome::Busy { .. } | Outcome::Failed { .. } => {
                let cause = Error::Os { call: "installing a page", errno: sys::ENOMEM };
                Heir::say(|| {
                    diagnostics::fatal("inherited far memory could not be mapped", &cause)
                });
            }
        }
    }

    fn note_in(&self, page: PageId, entry: Entry) {
        if !entry.is_listed() {
            self.heir.queue.lock().push_back(page);
        }
        self.heir.set(page, entry.listed());
    }

    /// Makes touching a page SIGBUS, whose content cannot be read.
    fn lose(&self, page: PageId, cause: &Error) {
        let (start, len) = (self.heir.pager.addr(page), self.heir.pager.page_bytes());
        Heir::say(|| diagnostics::lost_inherited(start, len, cause));
        // SAFETY: the page is missing and its content is lost.
        let poisoned = unsafe { self.uffd.poison(start, len) };
        if poisoned != Outcome::Done {
            Heir::say(|| diagnostics::fatal("a lost page could not be poisoned", cause));
        }
        drop(self.uffd.wake(start, len));
    }

    // Out.

    /// Notes the inherited pages that have become this process's alone: it has written them, or the
    /// parent has, or has dropped them.
    fn look(&mut self, now: Instant) {
        if self.looks.last.is_none() {
            self.drop_frames();
        }
        // Without a fault nobody has written a shared page or brought another one in. (What an older
        // relative does is seen later.)
        let processes = [std::process::id(), std::os::unix::process::parent_id()];
        let faults = processes.into_iter().filter_map(sys::thread::faults_of).sum();
        if self.looks.is_due(now, faults) {
            self.find_owned();
            self.keep_to_budget();
            self.looks.note_look(now);
        }
        self.looks.plan_next();
        if !self.is_ending && sys::thread::is_alone() {
            // The C library ends a process with its last thread, but for this one. What runs at exit may
            // touch inherited memory.
            self.is_ending = std::thread::Builder::new().spawn(|| std::process::exit(0)).is_ok();
        }
    }

    /// Gives the parent's frames back that hold nothing which the child needs: copies of them, once the
    /// parent uses its own again.
    fn drop_frames(&self) {
        let frames = self.heir.pager.frames();
        for frame in (0..frames.count() as u32).map(FrameId) {
            let page = frames.page(frame);
            if self.heir.entry(page).backing() != Backing::Frame(frame) {
                self.drop_frame(frame);
            }
        }
    }

    fn drop_frame(&self, frame: FrameId) {
        let start = self.heir.pager.frames().addr(frame);
        let piece = Piece::new(start, self.heir.pager.page_bytes());
        // SAFETY: the parent's frame; no page's content is in this process's copy of it.
        drop(unsafe { self.heir.pager.mapper().discard(&[piece]) });
    }

    fn find_owned(&self) {
        let Some(pagemap) = self.uffd.pagemap() else { return };
        let table = self.heir.pager.table();
        let end = table.start() + table.len();
        let mut at = table.start();
        let mut owned = [false; HUGE_PAGE / KERNEL_PAGE];
        while let Ok(Some((from, to))) = pagemap.next_present(at, end) {
            let to = to.min(from + HUGE_PAGE);
            let owned = &mut owned[..(to - from) / KERNEL_PAGE];
            if pagemap.owned(from, owned).is_err() {
                break;
            }
            for (n, _) in owned.iter().enumerate().filter(|(_, owned)| **owned) {
                let page = self.heir.pager.page_at(from + n * KERNEL_PAGE);
                let entry = self.heir.entry(page);
                if !entry.is_listed() {
                    // (One that is out and there all the same was discarded during the fork.)
                    let came =
                        if entry.is_out() { Entry::in_memory(Backing::Nothing) } else { entry };
                    self.note_in(page, came);
                }
            }
            at = to;
        }
    }

    /// Takes pages out, the oldest first, until the rest is within the budget.
    fn keep_to_budget(&mut self) {
        if self.write_again.is_some_and(|again| Instant::now() < again) {
            return;
        }
        self.write_again = None;
        let mut tries = self.heir.queue.lock().len();
        while self.heir.queue.lock().len() as u64 > self.heir.budget && tries > 0 {
            tries = tries.saturating_sub(self.batch);
            if !self.take_out() {
                self.write_again = Some(Instant::now() + WRITE_PAUSE);
                return;
            }
        }
    }

    /// Takes a batch out. `false`: the store takes nothing.
    fn take_out(&mut self) -> bool {
        let mut leaving = [None; BATCH_MAX];
        let mut count = 0;
        for _ in 0..self.batch {
            let Some(page) = self.heir.queue.lock().pop_front() else { break };
            if !self.move_out(page, count + 1) {
                self.heir.queue.lock().push_back(page);
                continue;
            }
            let hash = self.hash_of(count + 1);
            if !self.leaves_clean(page, hash) {
                leaving[count] = Some(Leaving { page, frame: count + 1, hash });
                count += 1;
            }
        }
        let written = self.write(&leaving[..count]);
        for leaving in leaving[..count].iter().flatten().filter(|_| !written) {
            let content = self.frame(leaving.frame).cast_const();
            let copied = self.copy_in(leaving.page, content);
            self.installed(leaving.page, copied);
            self.heir.queue.lock().push_back(leaving.page);
        }
        let page_bytes = self.heir.pager.page_bytes();
        // SAFETY: what the frames hold was written, or is in the region again.
        drop(unsafe { self.frames.discard(page_bytes, self.batch * page_bytes) });
        written
    }

    fn frame(&self, frame: usize) -> *mut u8 {
        self.frames.as_ptr().wrapping_add(frame * self.heir.pager.page_bytes())
    }

    fn hash_of(&self, frame: usize) -> ContentHash {
        let (start, len) = (self.frame(frame), self.heir.pager.page_bytes());
        // SAFETY: a frame of this thread's, a page long.
        let bytes = unsafe { std::slice::from_raw_parts(start, len) };
        self.heir.pager.slots().hash_bytes(bytes)
    }

    /// Moves a page's memory to a frame. `false`: it is as it was, because the kernel uses it, or the
    /// parent had pinned it.
    fn move_out(&self, page: PageId, frame: usize) -> bool {
        let (start, len) = (self.heir.pager.addr(page), self.heir.pager.page_bytes());
        let word = self.heir.pager.word(page).load();
        let is_pinned = word.state() == PageState::Resident && word.pins() > 0;
        if is_pinned || self.uffd.is_registered(start, len) == Some(false) {
            return false;
        }
        self.fill_holes(start, len);
        let to = self.frame(frame).addr();
        let mut moved = 0;
        for _ in 0..2 {
            // SAFETY: this thread alone takes pages out; the frame is its own and empty.
            let outcome =
                unsafe { self.uffd.move_pages(to + moved, start + moved, len - moved, Wake::No) };
            match outcome {
                Outcome::Done => return true,
                Outcome::Busy { bytes } => {
                    moved += bytes;
                    // Shared with the parent until lately, most probably.
                    make_own(start + moved, len - moved);
                }
                Outcome::Present { bytes } | Outcome::Failed { bytes, .. } => {
                    moved += bytes;
                    break;
                }
            }
        }
        if moved > 0 {
            // SAFETY: it goes back to where it was.
            let back = unsafe { self.uffd.move_pages(start, to, moved, Wake::Yes) };
            if back != Outcome::Done {
                let error = Error::Os { call: "UFFDIO_MOVE", errno: sys::EIO };
                Heir::say(|| diagnostics::fatal("half of a page could not be moved back", &error));
            }
        }
        false
    }

    /// Maps zeros where parts of a page are missing, which read as that: MOVE stops at them.
    fn fill_holes(&self, start: usize, len: usize) {
        let mut there = [false; HUGE_PAGE / KERNEL_PAGE];
        let there = &mut there[..len / KERNEL_PAGE];
        if self.uffd.pagemap().is_none_or(|map| map.scan(start, there).is_err()) {
            return;
        }
        for (n, _) in there.iter().enumerate().filter(|(_, there)| !**there) {
            // SAFETY: a missing part of a page that is in memory reads as zero.
            let _ = unsafe { self.uffd.zeropage(start + n * KERNEL_PAGE, KERNEL_PAGE, Wake::Yes) };
        }
    }

    /// A page was moved out. `true`: it needs no write.
    fn leaves_clean(&self, page: PageId, hash: ContentHash) -> bool {
        let entry = self.heir.entry(page);
        let is_zero = hash == self.heir.pager.slots().hash_of_zeros();
        let is_clean = match entry.backing() {
            Backing::Slot { layer, slot } => self.heir.slots(layer).hash(slot) == hash,
            _ => false,
        };
        match (is_clean, is_zero) {
            (true, _) => self.heir.set(page, Entry::out(entry.backing())),
            (false, true) => {
                self.put(entry.backing());
                self.heir.set(page, Entry::out(Backing::Nothing));
            }
            (false, false) => return false,
        }
        true
    }

    /// Frees a slot, if it is this process's own.
    fn put(&self, backing: Backing) {
        if let (Backing::Slot { layer, slot }, Some(own)) = (backing, self.heir.own())
            && usize::from(layer) == self.heir.layers.len()
        {
            own.put(Some(slot));
        }
    }

    /// Writes pages to slots of this process's. `false`: they are not written.
    fn write(&mut self, pages: &[Option<Leaving>]) -> bool {
        if pages.is_empty() {
            return true;
        }
        let (heir, page_bytes) = (Arc::clone(&self.heir), self.heir.pager.page_bytes());
        let Some(own) = heir.own() else { return false };
        let layer = heir.layers.len() as u16;
        let mut done = 0;
        while done < pages.len() {
            let want = SlotCount((pages.len() - done) as u64);
            while own.map().awake().0 < want && own.map().wake() {}
            let Some((first, got)) = own.map().take_run(want) else { return false };
            let part: Vec<Leaving> =
                pages[done..].iter().flatten().take(got.as_usize()).copied().collect();
            if let Err(error) = self.write_run(own, first, &part, page_bytes) {
                (0..got.0).for_each(|n| own.put(Some(SlotId(first.0 + n))));
                Heir::say(|| {
                    diagnostics::warn("a forked child cannot write its pages out", &error)
                });
                return false;
            }
            for (leaving, slot) in part.iter().zip(first.0..) {
                own.set_hash(SlotId(slot), leaving.hash);
                self.put(heir.entry(leaving.page).backing());
                let backing = Backing::Slot { layer, slot: SlotId(slot) };
                heir.set(leaving.page, Entry::out(backing));
            }
            done += part.len();
        }
        true
    }

    fn write_run(
        &mut self,
        own: &SlotStore,
        first: SlotId,
        pages: &[Leaving],
        page_bytes: usize,
    ) -> Result<()> {
        let segments: Vec<Segment> = pages
            .iter()
            .map(|leaving| Segment { ptr: self.frame(leaving.frame), len: page_bytes })
            .collect();
        let offset = own.offset(first);
        let request = Request { token: 0, op: Op::Write, offset, segments: &segments };
        let len = request.len();
        let queue = self.queue.as_mut().expect("a layer of one's own has a queue");
        // SAFETY: the frames are this thread's, and are not touched before the request is done, or for
        // ever, if it does not get done: `run` ends the process then. The slots were just given out.
        let pushed = unsafe { queue.push(request) };
        assert!(pushed, "one write is made at a time");
        let mut result = None;
        while result.is_none() {
            queue.wait(Duration::from_secs(1), &mut |done| result = Some(done.result))?;
        }
        result.unwrap_or(Err(Error::Io { op: "write", offset, len, errno: sys::EIO }))
    }
}

/// The program has unmapped the memory: touching it costs what that costs.
const GONE: Outcome = Outcome::Failed { bytes: 0, errno: sys::ENOENT };

fn waiting(errno: crate::sys::file::Errno) -> Error {
    Error::Os { call: "poll", errno: errno.0 }
}

/// Registers a range for missing faults, but for what of it the program has mapped a file over.
fn register(uffd: &Uffd, start: usize, len: usize) -> Result<()> {
    let Err(error) = uffd.register_missing(start, len) else { return Ok(()) };
    if len <= KERNEL_PAGE {
        return match error {
            Error::Os { errno: sys::EINVAL | sys::ENOMEM, .. } => Ok(()),
            error => Err(error),
        };
    }
    let half = (len / 2).next_multiple_of(KERNEL_PAGE);
    register(uffd, start, half)?;
    register(uffd, start + half, len - half)
}
