//! The slot store: where evicted pages are kept, and what was written there.
//!
//! # Invariants
//! 1. A slot's hash is stored before a page word names the slot, and read only through such a word.
#![expect(unsafe_code, reason = "sees frames as bytes")]

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::{SlotCount, SlotId};
use crate::meta::LazyArray;
use crate::paging::config::RegionConfig;
use crate::paging::page::frames::Frames;
use crate::paging::page::word::FrameId;
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::store::{OnlyUser, SlotMap, Store};
use crate::sys;
use crossbeam_utils::CachePadded;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::Arc;
use twox_hash::XxHash3_128;

/// A hash of a page's content, seeded at random: two contents have the same one by a chance of 2^-64.
pub(in crate::paging) type ContentHash = u64;

/// A region's store, its slots, and the hashes of their contents.
#[derive(Debug)]
pub(in crate::paging) struct SlotStore {
    /// Used by nobody else as long as a thread may write to it.
    store: OnlyUser,
    /// Name of the store in errors.
    name: Arc<str>,
    map: SlotMap,
    /// Per slot: hash of what was written there.
    hashes: LazyArray<AtomicU64>,
    hash_seed: u64,
    zeros_hash: ContentHash,
    verifies: bool,
    /// See [`transfers`](Self::transfers).
    transfers: CachePadded<AtomicU64>,
}

impl SlotStore {
    /// # Errors
    /// When no page fits into the store, or the kernel refuses the mappings.
    pub(super) fn new(config: &RegionConfig, store: OnlyUser) -> Result<SlotStore> {
        let count = slot_count(&*store)?;
        // Random, so that content cannot be made to collide ahead of time.
        let hash_seed = sys::random_u64()?;
        Ok(SlotStore {
            name: store.name(),
            store,
            map: SlotMap::new(SlotCount(count as u64))?,
            hashes: LazyArray::new(count)?,
            hash_seed,
            zeros_hash: hash_of(hash_seed, &[0; PAGE]),
            verifies: config.checksum,
            transfers: CachePadded::new(AtomicU64::new(0)),
        })
    }

    /// Slots of a forked child's own, for what it takes out of its memory; `self` is what it inherits.
    ///
    /// # Errors
    /// When the store has none to give, or the kernel refuses the mappings.
    pub(in crate::paging) fn open_in_child(&self) -> Result<SlotStore> {
        let store = self.store.open_in_child()?;
        let count = store.capacity().as_usize() / PAGE;
        let hashes = LazyArray::new(count)?;
        hashes.set_inherited(true)?;
        Ok(SlotStore {
            name: store.name(),
            map: SlotMap::new(SlotCount(count as u64))?,
            store: OnlyUser::in_child(store),
            hashes,
            hash_seed: self.hash_seed,
            zeros_hash: self.zeros_hash,
            verifies: self.verifies,
            transfers: CachePadded::new(AtomicU64::new(0)),
        })
    }

    /// Makes the slots readable in children that are forked from now on; `None` where they are not, else the
    /// descriptor that takes, if any.
    pub(in crate::paging) fn inherit(&self) -> Option<Option<RawFd>> {
        self.hashes.set_inherited(true).ok()?;
        self.store.inherit().ok()
    }

    pub(in crate::paging) fn store(&self) -> &dyn Store {
        &*self.store
    }

    /// Notes that pages have come from the store or gone there.
    pub(in crate::paging) fn note_transfer(&self) {
        // Relaxed: the evictor looks later whether it has changed, and that orders nothing.
        self.transfers.fetch_add(1, Ordering::Relaxed);
    }

    /// Changes whenever pages come from the store or go there. No statistic: the evictor decides by it.
    pub(in crate::paging) fn transfers(&self) -> u64 {
        self.transfers.load(Ordering::Relaxed)
    }

    /// The error of a request for `len` bytes from a slot on. Allocates nothing.
    pub(in crate::paging) fn failed(
        &self,
        op: &'static str,
        slot: Option<SlotId>,
        len: u64,
        errno: i32,
    ) -> Error {
        let offset = slot.map_or(0, |slot| self.offset(slot));
        Error::Io { op, store: Arc::clone(&self.name), offset, len, errno }
    }

    /// The error of a read that took too long, or that the device did not even take.
    pub(in crate::paging) fn timed_out(&self, slot: Option<SlotId>) -> Error {
        self.failed("read", slot, PAGE as u64, sys::ETIMEDOUT)
    }

    /// The error of a slot that holds other bytes than were written there.
    pub(in crate::paging) fn corrupt(&self, slot: SlotId) -> Error {
        Error::Corrupt { store: Arc::clone(&self.name), slot: slot.0 }
    }

    /// The error of a store without a free slot.
    pub(in crate::paging) fn full(&self) -> Error {
        Error::StoreFull { store: Arc::clone(&self.name), pages: self.map.slots().0 }
    }

    /// Which slots are in use.
    pub(in crate::paging) fn map(&self) -> &SlotMap {
        &self.map
    }

    /// Where a slot lies on the store.
    pub(in crate::paging) fn offset(&self, slot: SlotId) -> u64 {
        slot.0 * PAGE as u64
    }

    /// Frees a page's slot.
    pub(in crate::paging) fn put(&self, slot: Option<SlotId>) {
        if let Some(slot) = slot {
            self.map.put(slot);
        }
    }

    // Content.

    /// Hash of a frame's bytes. The frame may be taken away meanwhile; then the value is
    /// meaningless and the caller's next change of the page word fails.
    pub(in crate::paging) fn hash_frame(&self, frames: &Frames, frame: FrameId) -> ContentHash {
        // SAFETY: a frame is a page of readable memory for ever; the kernel may replace its
        // pages meanwhile, which changes what is read but not that it can be read.
        let bytes = unsafe { std::slice::from_raw_parts(frames.ptr(frame), PAGE) };
        self.hash_bytes(bytes)
    }

    /// Hash of a page's bytes.
    pub(in crate::paging) fn hash_bytes(&self, page: &[u8]) -> ContentHash {
        hash_of(self.hash_seed, page)
    }

    /// True if a slot's content is checked when it was read.
    pub(in crate::paging) fn verifies(&self) -> bool {
        self.verifies
    }

    /// Hash of a page of zeros.
    pub(in crate::paging) fn hash_of_zeros(&self) -> ContentHash {
        self.zeros_hash
    }

    /// Hash of what was written to a slot.
    pub(in crate::paging) fn hash(&self, slot: SlotId) -> ContentHash {
        // Relaxed: published by the word change that named the slot.
        self.hashes[slot.as_usize()].load(Ordering::Relaxed)
    }

    pub(in crate::paging) fn set_hash(&self, slot: SlotId, hash: ContentHash) {
        self.hashes[slot.as_usize()].store(hash, Ordering::Relaxed);
    }

    /// Gives the memory of hashes back.
    ///
    /// # Safety
    /// None of the slots is in use, and nobody gives one out meanwhile.
    pub(in crate::paging) unsafe fn drop_hashes(&self, slots: Range<usize>) -> Result<()> {
        // SAFETY: a hash is read of a slot in use only, and written by the thread that gives it out.
        unsafe { self.hashes.give_back_shared(slots) }
    }
}

/// Pages that fit into a store.
///
/// # Errors
/// When none does.
fn slot_count(store: &dyn Store) -> Result<usize> {
    let count = store.capacity().as_usize() / PAGE;
    if count == 0 {
        let reason = format!("no page of {PAGE_SIZE} fits into {}", store.describe());
        return Err(Error::config("capacity", reason));
    }
    Ok(count)
}

/// The low half of the hash of 128 bits, as of a pool's pages.
fn hash_of(seed: u64, page: &[u8]) -> ContentHash {
    XxHash3_128::oneshot_with_seed(seed, page) as u64
}
