//! A child region: the far memory of a forked child, which is its parent's as it was at the fork.
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
//! The program decides about descriptors in a forked child: it may close all. So the thread
//! has a table of descriptors of its own.
//!
//! # Invariants
//! 1. Only the child's thread installs pages and takes them out, one after the other; so no two changes of
//!    a page race. In a thread that forks it stands still meanwhile.
//! 2. A slot that an entry names is of a layer that stays readable as long as the process lives.
#![expect(unsafe_code, reason = "wakes the thread by touching a page")]

use crate::base::error::{Error, Result};
use crate::base::gate::{Closed, Gate};
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{PageId, SlotId};
use crate::meta::LazyArray;
use crate::paging::fork::children::{Birth, Children};
use crate::paging::fork::entry::{Backing, Entry};
use crate::paging::fork::snapshot::{BUDGET_PAGES_MIN, ForkSnapshot, Needed};
use crate::paging::page::word::State as PageState;
use crate::paging::pager::Pager;
use crate::paging::pager::pieces::FarParts;
use crate::paging::pager::slot_store::SlotStore;
use crate::sys::fork;
use crate::sys::vm::{Huge, KERNEL_PAGE, Mapping};
use std::collections::VecDeque;
use std::sync::Arc;

/// See [module](self).
#[derive(Debug)]
pub(super) struct ChildRegion {
    /// The region as it was when the first of the line was forked: only read.
    pub(super) pager: Arc<Pager>,
    entries: Arc<LazyArray<AtomicU64>>,
    /// From layer 1 on.
    pub(super) layers: Vec<Arc<SlotStore>>,
    /// The last of the layers is this process's own.
    has_own: bool,
    pub(super) needed: Vec<Needed>,
    pub(super) budget: u64,
    pub(super) gate: Gate,
    children: Children,
    /// The region's parts that are far memory in this process; found again when it forks.
    pub(super) far: Ranked<FarParts>,
    /// A page that wakes the thread by being touched.
    pub(super) bell: Mapping,
    /// Pages in memory that are this process's alone, oldest first.
    pub(super) queue: Ranked<VecDeque<PageId>>,
}

impl ChildRegion {
    /// The inheritance of a child that was just forked.
    ///
    /// # Errors
    /// When something is refused that is needed for it; the memory must not be touched then.
    pub(super) fn new(snapshot: ForkSnapshot, birth: Birth) -> Result<Arc<ChildRegion>> {
        let Birth { end, far, .. } = birth;
        let ForkSnapshot { pager, entries, mut layers, mut needed, budget } = snapshot;
        if !needed.iter().all(Needed::is_open) {
            let why = "the process has closed a descriptor that it would need for that";
            return Err(Error::Unsupported { feature: "inherited far memory", why });
        }
        // Before the thread has a table of descriptors of its own: a grandchild needs it, too.
        let own = pager.slots().open_in_child();
        let has_own = own.is_ok();
        if let Ok(own) = own {
            needed.extend(own.inherit().flatten().map(Needed::new));
            layers.push(Arc::new(own));
        }
        needed.push(Needed::new(fork::own_for_good(end)));
        Ok(Arc::new(ChildRegion {
            pager,
            entries,
            layers,
            has_own,
            needed,
            budget,
            gate: Gate::new(),
            children: Children::new(),
            far: Ranked::new(Rank::Leaf, far),
            bell: Mapping::reserve(KERNEL_PAGE, KERNEL_PAGE, Huge::No)?,
            queue: Ranked::new(Rank::Policy, VecDeque::new()),
        }))
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

    /// Stops the thread, or what it takes out. It stands still once for each: between the two it serves faults.
    pub(super) fn close(&self, what: Closed, thread: u32) {
        let still = if what == Closed::All { 2 } else { 1 };
        self.gate.close(what, thread, still, || self.ring());
    }

    /// Wakes the thread.
    pub(super) fn ring(&self) {
        // SAFETY: the page holds nothing, and nobody else uses it: one thread forks at a time.
        drop(unsafe { self.bell.discard(0, KERNEL_PAGE) });
        let page = self.bell.as_ptr();
        // SAFETY: mapped and readable; where it is missing, the child's thread maps it.
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
        // Now and not earlier: the child's thread has another table of descriptors.
        self.children.reap_now(own.map());
        let far = self.far.lock().clone();
        Birth::prepare(own.map(), far)
    }

    pub(super) fn own(&self) -> Option<&SlotStore> {
        self.layers.last().filter(|_| self.has_own).map(|own| &**own)
    }

    /// Its own snapshot, in a child of this one, which has been forked while the thread stood still.
    pub(super) fn snapshot(&self) -> ForkSnapshot {
        // They were this process's alone; now they are shared.
        for page in self.queue.lock().drain(..) {
            let entry = self.entry(page);
            self.set(page, entry.unlisted());
        }
        ForkSnapshot {
            pager: Arc::clone(&self.pager),
            entries: Arc::clone(&self.entries),
            layers: self.layers.clone(),
            needed: self.needed.clone(),
            budget: (self.budget / (self.children.count() as u64 + 2)).max(BUDGET_PAGES_MIN),
        }
    }

    // Pages.

    /// State of a page, known to this process or by the words that it inherited.
    pub(super) fn entry(&self, page: PageId) -> Entry {
        // Relaxed: changed by the child's thread only.
        let entry = Entry::from_bits(self.entries[page.as_usize()].load(Ordering::Relaxed));
        entry.unwrap_or_else(|| self.inherited(page))
    }

    pub(super) fn set(&self, page: PageId, entry: Entry) {
        self.entries[page.as_usize()].store(entry.bits(), Ordering::Relaxed);
    }

    /// State of a page by the inherited words.
    fn inherited(&self, page: PageId) -> Entry {
        let word = self.pager.word(page).load();
        match word.state() {
            PageState::Stored => Entry::out(backing(word.slot())),
            // Discarded while it was read ahead: it reads as zero, although its slot is in use until the read is over.
            PageState::Filling if word.dead() => Entry::in_memory(Backing::Nothing),
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

    pub(super) fn slots(&self, layer: u16) -> &SlotStore {
        match layer {
            0 => self.pager.slots(),
            layer => &self.layers[usize::from(layer) - 1],
        }
    }
}

fn backing(slot: Option<SlotId>) -> Backing {
    slot.map_or(Backing::Nothing, |slot| Backing::Slot { layer: 0, slot })
}
