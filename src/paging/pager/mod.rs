//! The pager: what handlers, evictors and discarding threads share.
//!
//! [`Pager`] holds the page words, the frames, the budget, the slots and the userfaultfd of one
//! region, and the operations on one page that every side needs: install, zero-fill, take back,
//! discard, poison. Threads live in [`handler`](crate::paging::fault::handler) and [`evictor`](crate::paging::evict).
//!
//! | module | does |
//! |---|---|
//! | this one | state, geometry, hashes, changes of a page's word |
//! | `memory` | pages and frames: installs the ones, fills the others, tells the policy |
//! | `table` | addresses and words of pages |
//! | `frame_pool` | limit, watermarks, frames with their charge, who is woken |
//! | `room`, `slot_charge` | threads that wait for room; what the frames that are freed next pay for |
//! | `mapper`, `pieces` | what is mapped: installs pages, takes them out; along the borders of the kernel's mappings |
//! | `slot_store` | the store, its slots, content hashes |
//! | `health` | what fails at the moment |
//! | `reclaim` | what a region gives up for others |
//! | `lost` | pages that cannot be mapped or read |
//! | `discard` | drops pages that nobody needs |
//!
//! # Invariants
//! 1. Memory of a page changes hands only by a change of its word; see `page::word`.
//! 2. Every mapped page and every frame with memory is charged, before it has memory.
//! 3. A slot belongs to one page word or one frame's metadata, never to both.

pub(in crate::paging) mod discard;
pub(in crate::paging) mod frame_pool;
pub(in crate::paging) mod health;
pub(super) mod lost;
pub(in crate::paging) mod mapper;
pub(in crate::paging) mod memory;
pub(in crate::paging) mod pieces;
pub(in crate::paging) mod reclaim;
pub(in crate::paging) mod room;
mod slot_charge;
pub(in crate::paging) mod slot_store;
pub(in crate::paging) mod table;

use crate::base::error::Result;
use crate::base::sync::Rank;
use crate::base::units::{PageCount, PageId};
use crate::limit::budget::Budget;
use crate::limit::manager::Account;
use crate::paging::config::RegionConfig;
use crate::paging::counters::Counters;
use crate::paging::evict::arrivals::Residents;
use crate::paging::fault::sched::HandlerSched;
use crate::paging::fault::starved::StarvedFaults;
use crate::paging::fork::state::ForkState;
use crate::paging::page::PAGE;
use crate::paging::page::chunks::Chunks;
use crate::paging::page::frames::Frames;
use crate::paging::page::word::{PageWord, Word};
use crate::paging::pager::frame_pool::FramePool;
use crate::paging::pager::health::Health;
use crate::paging::pager::mapper::Mapper;
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::slot_store::SlotStore;
use crate::paging::pager::table::PageTable;
use crate::paging::readahead::Readahead;
use crate::paging::tables::Tables;
use crate::store::{OnlyUser, Wipe};
use crate::sys::signals::FaultLock;
use std::sync::Arc;

/// State that the threads of one region share.
#[derive(Debug)]
pub(crate) struct Pager {
    memory: RegionMemory,
    tables: Tables,
    slots: SlotStore,
    readahead: Readahead,
    sched: Arc<HandlerSched>,
    health: Health,
    fork: ForkState,
}

impl Pager {
    /// `account` is the region's at a memory manager, where it has one.
    pub(crate) fn new(
        config: &RegionConfig,
        store: OnlyUser,
        account: Option<Account>,
    ) -> Result<Pager> {
        let pages = config.span.as_usize() / PAGE;
        let (mapper, moves) = Mapper::new(config)?;
        let sched = Arc::new(HandlerSched::new(config.handlers)?);
        let pool = FramePool::new(config, moves, account, mapper.discarder(), Arc::clone(&sched))?;
        let frames = pool.staging();
        let table = PageTable::new(config.span.as_usize())?;
        mapper.register_faults(table.start(), table.len())?;
        let (staging, staging_len) = frames.range();
        mapper.register_unwatched(staging, staging_len)?;
        if let Some(node) = config.node {
            table.bind(node)?;
            frames.bind(node)?;
        }
        let limit = PageCount(config.limit.0 / PAGE as u64);
        let residents = Residents::new(PageCount(pages as u64), limit)?;
        let slots = SlotStore::new(config, store)?;
        let may_inherit = config.inherit && config.wipe == Wipe::Off;
        let inherits = if may_inherit { mapper.can_be_inherited() } else { Ok(false) };
        let inherited = if inherits == Ok(true) { slots.inherit() } else { None };
        if inherited.is_some() {
            table.inherit_words()?;
            frames.inherit_notes()?;
        }
        Ok(Pager {
            fork: ForkState::new(inherited, inherits.err()),
            tables: Tables::new(config.span.as_usize())?,
            slots,
            memory: RegionMemory {
                table,
                chunks: Chunks::new(config.span.as_usize(), moves)?,
                mapper,
                pool,
                policy: FaultLock::new(Rank::Policy, residents),
                counters: Counters::new(config.handlers)?,
            },
            readahead: Readahead::new(config.span, config.readahead)?,
            sched,
            health: Health::new(config.deadline),
        })
    }

    // Parts.

    /// Pages and frames.
    pub(in crate::paging) fn memory(&self) -> &RegionMemory {
        &self.memory
    }

    /// Addresses and words of the pages.
    pub(in crate::paging) fn table(&self) -> &PageTable {
        &self.memory.table
    }

    /// Which chunks the kernel fills.
    pub(in crate::paging) fn chunks(&self) -> &Chunks {
        &self.memory.chunks
    }

    /// Predictor of the next touches.
    pub(in crate::paging) fn readahead(&self) -> &Readahead {
        &self.readahead
    }

    /// When and where handlers run.
    pub(in crate::paging) fn sched(&self) -> &Arc<HandlerSched> {
        &self.sched
    }

    /// Tables of pages and slots.
    pub(in crate::paging) fn tables(&self) -> &Tables {
        &self.tables
    }

    /// Frames and their charge.
    pub(in crate::paging) fn pool(&self) -> &FramePool {
        &self.memory.pool
    }

    pub(in crate::paging) fn frames(&self) -> &Frames {
        self.memory.pool.staging()
    }

    pub(in crate::paging) fn budget(&self) -> &Budget {
        self.memory.pool.budget()
    }

    /// Faults that wait for room.
    pub(in crate::paging) fn starved(&self) -> &StarvedFaults {
        self.memory.pool.waiters().starved()
    }

    /// Record of the mappings.
    pub(in crate::paging) fn mapper(&self) -> &Mapper {
        &self.memory.mapper
    }

    /// Where evicted pages are kept.
    pub(in crate::paging) fn slots(&self) -> &SlotStore {
        &self.slots
    }

    pub(in crate::paging) fn counters(&self) -> &Counters {
        &self.memory.counters
    }

    /// Present failures, and whether the region stops.
    pub(in crate::paging) fn health(&self) -> &Health {
        &self.health
    }

    /// Calls code of the store, see [`Health::guarded`]: `None` after a panic.
    pub(in crate::paging) fn guarded<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let result = self.health.guarded(call);
        if result.is_none() {
            // Not written at each call: all handlers share it.
            self.memory.counters.panics.bump();
        }
        result
    }

    /// Notes that room was made, which is progress for the faults that wait for it.
    pub(in crate::paging) fn note_room_made(&self) {
        self.health().set_exhausted(false);
        self.starved().note_room_made(self.health().write_errno() == 0);
    }

    /// Record of the children that inherit the region.
    pub(in crate::paging) fn fork(&self) -> &ForkState {
        &self.fork
    }

    // Words.

    pub(crate) fn word(&self, page: PageId) -> &PageWord {
        self.memory.table.word(page)
    }

    /// Ends this thread's `Moving`, see [`PageTable::publish`].
    pub(crate) fn publish(&self, page: PageId, from: Word, to: Word) {
        self.memory.table.publish(page, from, to);
    }

    /// Wakes the threads that wait for a page, to fault again.
    pub(crate) fn wake(&self, page: PageId) {
        self.memory.wake(page);
    }
}
