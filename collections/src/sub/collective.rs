//! [`Collective`]: local memory and pages, and which objects they hold.
//!
//! The sub-allocators of `kinds` borrow it.
//!
//! # Invariants
//! 1. A page of the region belongs to one owner; it is free only while it holds no object.
//! 2. All state is behind one lock, under which the region's calls are made.

#![expect(unsafe_code, reason = "declares the unsafe call that frees; drops freed pages")]

use super::pages::{GRANULE, Owner, Pages, Pool, Reuse, granules};
use crate::sys::WordMapping;
use farheap::region::{Advice, Region, RegionConfig, Stats};
use farheap::store::Store;
use farheap::{ByteCount, Error};
use std::alloc::Layout;
use std::io;
use std::ptr::{NonNull, slice_from_raw_parts_mut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

type Result<T, E = Error> = std::result::Result<T, E>;

/// Page size of the local arena's bookkeeping; larger objects are not purely local.
const LOCAL_PAGE: usize = 256 << 10;
/// Smallest and largest pages; what one fault brings is the smallest.
const PAGE_MIN: ByteCount = ByteCount::kib(4);
const PAGE_MAX: ByteCount = ByteCount::mib(2);
/// Far pages mapped at once.
const CHUNK_PAGES: usize = 256;
/// Part of the page cache that empty pages may keep: as much as the far heap keeps dirty.
const KEPT_DIVISOR: u64 = 8;
/// Empty pages given back at once when others need their room.
const GIVE_BACK_MAX: usize = 64;

/// Why an object could not be allocated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocError {
    /// The sub-allocator has no room left; another one may have.
    #[error("the sub-allocator is full; take another one")]
    Full,
    /// The object is larger than anything that this sub-allocator can hold.
    #[error("an object of {size} bytes does not fit: at most {max}; allocate it elsewhere")]
    TooLarge {
        /// Bytes asked for.
        size: usize,
        /// The largest possible.
        max: usize,
    },
    /// The object's alignment is larger than this sub-allocator's pages.
    #[error("an alignment of {align} bytes is not possible: at most {max}; allocate it elsewhere")]
    Align {
        /// The alignment asked for.
        align: usize,
        /// The largest possible.
        max: usize,
    },
    /// The far memory cannot give more pages.
    #[error(transparent)]
    Far(#[from] Error),
}

impl AllocError {
    /// Returns what kind of failure this is, in std's words.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            AllocError::Full => io::ErrorKind::OutOfMemory,
            AllocError::TooLarge { .. } | AllocError::Align { .. } => io::ErrorKind::InvalidInput,
            AllocError::Far(error) => error.kind(),
        }
    }
}

impl From<AllocError> for io::Error {
    fn from(error: AllocError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}

/// Settings of a collective.
#[derive(Clone, Debug)]
#[must_use = "settings do nothing until something is made of them"]
#[non_exhaustive]
pub struct CollectiveConfig {
    /// See [`local()`](CollectiveConfig::local()).
    pub local: ByteCount,
    /// See [`page()`](CollectiveConfig::page()).
    pub page: ByteCount,
    /// See [`region()`](CollectiveConfig::region()).
    pub region: RegionConfig,
}

impl Default for CollectiveConfig {
    fn default() -> CollectiveConfig {
        let region = CollectiveConfig::default_region();
        CollectiveConfig { local: ByteCount::ZERO, page: ByteCount::kib(4), region }
    }
}

impl CollectiveConfig {
    /// Returns the defaults.
    pub fn new() -> CollectiveConfig {
        CollectiveConfig::default()
    }

    /// Sets the bytes of purely-local memory.
    ///
    /// Default: 0, none.
    pub fn local(mut self, value: ByteCount) -> CollectiveConfig {
        self.local = value;
        self
    }

    /// Sets the bytes of a page: what one sub-allocator has of the far memory at least, a power of two from 4 KiB to
    /// 2 MiB.
    ///
    /// Default: 4 KiB, which is what one fault brings.
    pub fn page(mut self, value: ByteCount) -> CollectiveConfig {
        self.page = value;
        self
    }

    /// Sets the far region: `limit` is the page cache's size, `span` the address space for far
    /// objects.
    ///
    /// Default: [`default_region`](CollectiveConfig::default_region).
    pub fn region(mut self, value: RegionConfig) -> CollectiveConfig {
        self.region = value;
        self
    }

    /// Returns the settings of a far region that suit a collective: 64 GiB of address space, and nothing is read ahead, because the pages that follow in memory are not
    /// what a search touches next: a third of what a skip list read was read in vain
    /// (`book/src/measurements/placements.md`).
    pub fn default_region() -> RegionConfig {
        RegionConfig::new().span(ByteCount::gib(64)).readahead(false)
    }
}

/// An allocator that is a collection of sub-allocators, each with a subspace of its own.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::MemStore;
/// use farheap_collections::sub::{AllocError, Collective, CollectiveConfig, SubAllocator};
/// use std::alloc::Layout;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let config = CollectiveConfig::new().local(ByteCount::kib(64));
/// let collective = match Collective::create(config, store) {
///     Ok(collective) => collective,
///     // Without permission for userfaultfd; the message says how to get it.
///     Err(error) => return Ok(println!("{error}")),
/// };
/// let node = Layout::new::<[u64; 40]>();
/// let page = collective.new_page()?;
/// let parent = page.allocate(node)?;
/// // Later, from the pointer alone: the page that the parent is in, if it still has room.
/// let child = match collective.suballocator_of(parent.as_ptr()).expect("its own").allocate(node) {
///     Err(AllocError::Full) => collective.swappable().allocate(node)?,
///     other => other?,
/// };
/// // SAFETY: both came from this collective with this layout.
/// unsafe { collective.deallocate(parent, node) };
/// // SAFETY: as above.
/// unsafe { collective.deallocate(child, node) };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Collective {
    region: Region,
    far_base: usize,
    far_len: usize,
    page_bytes: usize,
    page_shift: u32,
    /// Where the local arena begins; anywhere when its capacity is zero.
    local_base: usize,
    local_capacity: usize,
    state: Mutex<CollectiveState>,
    _local: Option<WordMapping>,
}

#[derive(Debug)]
struct CollectiveState {
    far: Pages,
    swappable: Pool,
    hinted: Pool,
    /// Pages that hold nothing: empty, and with what they held last.
    free: Vec<u32>,
    kept: Vec<u32>,
    chunk: std::ops::Range<u32>,
    in_use: u64,
    local: Pages,
    local_pool: Pool,
    local_fresh: std::ops::Range<u32>,
    local_used: usize,
    refuse_after: Option<u64>,
}

impl Collective {
    /// Reserves the local arena and the far region, and starts the region's threads.
    ///
    /// # Errors
    /// As [`Region::create`]; [`Error::Config`] when `page` is none of these.
    pub fn create(config: CollectiveConfig, store: Arc<dyn Store>) -> Result<Collective> {
        if !config.page.get().is_power_of_two() || !(PAGE_MIN..=PAGE_MAX).contains(&config.page) {
            let reason = format!("{} is not a power of two from 4 KiB to 2 MiB", config.page);
            return Err(Error::Config { key: "page".into(), reason });
        }
        let region = Region::create(config.region, store)?;
        let page_bytes = config.page.as_usize();
        let far = region.addresses();
        let (far_base, far_len) = (far.start, far.len());
        let far = Pages::new(far_base, page_bytes, far_len / page_bytes)?;
        let local_capacity = config.local.as_usize() / GRANULE * GRANULE;
        let (local, local_pages) = local_arena(local_capacity)?;
        let local_count = local_capacity.div_ceil(LOCAL_PAGE) as u32;
        let state = CollectiveState {
            far,
            swappable: Pool::new(Owner::Swappable, Reuse::HalfEmpty),
            hinted: Pool::new(Owner::Hinted, Reuse::Always),
            free: Vec::new(),
            kept: Vec::new(),
            chunk: 0..0,
            in_use: 0,
            local: local_pages,
            local_pool: Pool::new(Owner::Swappable, Reuse::Always),
            local_fresh: 0..local_count,
            local_used: 0,
            refuse_after: None,
        };
        Ok(Collective {
            region,
            far_base,
            far_len,
            page_bytes,
            page_shift: page_bytes.trailing_zeros(),
            local_base: local.as_ref().map_or(0, WordMapping::addr),
            local_capacity,
            state: Mutex::new(state),
            _local: local,
        })
    }

    /// True if a pointer lies in purely-local memory.
    #[must_use]
    pub fn is_local(&self, ptr: *const u8) -> bool {
        (ptr as usize).wrapping_sub(self.local_base) < self.local_capacity
    }

    /// True if a pointer lies in this collective's memory.
    #[must_use]
    pub fn contains(&self, ptr: *const u8) -> bool {
        self.is_local(ptr) || self.page_of(ptr).is_some()
    }

    /// True if two pointers lie in the same page of far memory.
    #[must_use]
    pub fn share_a_page(&self, a: *const u8, b: *const u8) -> bool {
        self.page_of(a).is_some_and(|page| self.page_of(b) == Some(page))
    }

    /// Frees an object of any of the sub-allocators, in constant time and without touching its
    /// page. A page that is empty then is used again before fresh ones, or given back when others
    /// need its room: then nothing of it is written to the store. Only where memory runs short while
    /// nothing is freed, such pages (up to an eighth of the limit) may be written, once.
    ///
    /// # Panics
    /// When the pointer is not of this collective, or not in use.
    ///
    /// # Safety
    /// `ptr` came from this collective with this layout, has not been freed, and is not used any
    /// more.
    pub unsafe fn deallocate(&self, ptr: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 || !self.region.is_here() {
            return; // Of an object of the parent's a forked child has nothing.
        }
        let addr = ptr.as_ptr() as usize;
        let mut state = self.state();
        if self.is_local(ptr.as_ptr()) {
            let state = &mut *state;
            let (page, head) = state.local.give(addr, layout);
            // An empty page stays with the pool: the local arena is never given back.
            state.local_pool.freed(&mut state.local, page, head.held());
            state.local_used -= granules(layout) * GRANULE;
            return;
        }
        assert!(self.page_of(ptr.as_ptr()).is_some(), "{ptr:?} is not of this collective");
        if layout.size() > self.page_bytes {
            let count = layout.size().div_ceil(self.page_bytes);
            state.far.give_large(addr, count);
            state.in_use -= count as u64;
            drop(state);
            let len = ByteCount((count * self.page_bytes) as u64);
            // SAFETY: the object was mapped for the caller, who gives it back (and promises that
            // nobody uses it).
            unsafe { self.region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
                .expect("a large object is a range of the region");
            return;
        }
        let fate = &mut *state;
        let (page, head) = fate.far.give(addr, layout);
        let idle = match head.owner() {
            Owner::Swappable => fate.swappable.freed(&mut fate.far, page, head),
            Owner::Hinted => fate.hinted.freed(&mut fate.far, page, head),
            _ => head.is_idle(),
        };
        if idle {
            self.release_page(&mut state, page);
        }
    }

    /// Poisoning is ignored: the state is valid at every step.
    fn state(&self) -> MutexGuard<'_, CollectiveState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // What sub-allocators need.

    /// A new, empty page for a [`PerPage`](super::PerPage), held until it is [let go](Self::let_go).
    pub(super) fn take_page(&self) -> Result<u32, AllocError> {
        let mut state = self.state();
        state.may_allocate()?;
        let page = self.fresh_page(&mut state, Owner::PerPage)?;
        state.far.hold(page);
        Ok(page)
    }

    /// The owner of a page, which is held as by [`take_page`](Self::take_page) when that is one
    /// `PerPage`.
    pub(super) fn owner_holding(&self, page: u32) -> Owner {
        let mut state = self.state();
        let owner = state.far.owner(page);
        if owner == Owner::PerPage {
            state.far.hold(page);
        }
        owner
    }

    pub(super) fn allocate_local(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        if layout.size() == 0 {
            return Ok(dangling(layout));
        }
        check(layout, LOCAL_PAGE)?;
        let mut guard = self.state();
        guard.may_allocate()?;
        let state = &mut *guard;
        let bytes = granules(layout) * GRANULE;
        if state.local_used + bytes > self.local_capacity {
            return Err(AllocError::Full);
        }
        loop {
            if let Some(addr) = state.local_pool.take(&mut state.local, layout) {
                state.local_used += bytes;
                return Ok(pointer(addr));
            }
            let page = state.local_fresh.next().ok_or(AllocError::Full)?;
            state.local_pool.replace_current(&state.local, page);
        }
    }

    pub(super) fn allocate_in_page(
        &self,
        page: u32,
        layout: Layout,
    ) -> Result<NonNull<u8>, AllocError> {
        if layout.size() == 0 {
            return Ok(dangling(layout));
        }
        check(layout, self.page_bytes)?;
        let mut state = self.state();
        state.may_allocate()?;
        state.far.take(page, layout).map(pointer).ok_or(AllocError::Full)
    }

    pub(super) fn allocate_swappable(&self, layout: Layout) -> Result<NonNull<u8>, AllocError> {
        if layout.size() == 0 {
            return Ok(dangling(layout));
        }
        let mut guard = self.state();
        guard.may_allocate()?;
        let state = &mut *guard;
        if layout.size() > self.page_bytes {
            return self.allocate_large(state, layout);
        }
        check(layout, self.page_bytes)?;
        if let Some(addr) = state.swappable.take(&mut state.far, layout) {
            return Ok(pointer(addr));
        }
        let page = self.fresh_page(state, Owner::Swappable)?;
        if let Some(idle) = state.swappable.replace_current(&state.far, page) {
            self.release_page(state, idle);
        }
        Ok(pointer(state.far.take(page, layout).expect("an empty page has room")))
    }

    pub(super) fn allocate_hinted(
        &self,
        layout: Layout,
        hint: Option<*const u8>,
    ) -> Result<NonNull<u8>, AllocError> {
        if layout.size() == 0 {
            return Ok(dangling(layout));
        }
        check(layout, self.page_bytes)?;
        let mut guard = self.state();
        guard.may_allocate()?;
        let state = &mut *guard;
        if let Some(page) = hint.and_then(|hint| self.page_of(hint))
            && state.far.owner(page) == Owner::Hinted
            && let Some(addr) = state.far.take(page, layout)
        {
            return Ok(pointer(addr));
        }
        if let Some(addr) = state.hinted.take(&mut state.far, layout) {
            return Ok(pointer(addr));
        }
        let page = self.fresh_page(state, Owner::Hinted)?;
        if let Some(idle) = state.hinted.replace_current(&state.far, page) {
            self.release_page(state, idle);
        }
        Ok(pointer(state.far.take(page, layout).expect("an empty page has room")))
    }

    fn allocate_large(
        &self,
        state: &mut CollectiveState,
        layout: Layout,
    ) -> Result<NonNull<u8>, AllocError> {
        if layout.align() > self.page_bytes {
            return Err(AllocError::Align { align: layout.align(), max: self.page_bytes });
        }
        let count = layout.size().div_ceil(self.page_bytes);
        let ptr = self.map_pages(count)?;
        state.far.take_large(ptr.as_ptr() as usize, count);
        state.in_use += count as u64;
        Ok(ptr)
    }

    /// Maps pages of the collective, whatever else the region has.
    fn map_pages(&self, count: usize) -> farheap::Result<NonNull<u8>> {
        let page = ByteCount(self.page_bytes as u64);
        self.region.map_aligned(ByteCount(count as u64 * page.0), page).map(NonNull::cast)
    }

    fn first_page(&self, addr: usize) -> u32 {
        ((addr - self.far_base) >> self.page_shift) as u32
    }

    pub(super) fn page_of(&self, ptr: *const u8) -> Option<u32> {
        let offset = (ptr as usize).wrapping_sub(self.far_base);
        (offset < self.far_len).then(|| (offset >> self.page_shift) as u32)
    }

    pub(super) fn owner_of(&self, ptr: *const u8) -> Option<Owner> {
        let page = self.page_of(ptr)?;
        Some(self.state().far.owner(page))
    }

    pub(super) fn page_used(&self, page: u32) -> usize {
        self.state().far.used_bytes(page)
    }

    pub(super) fn let_go(&self, page: u32) {
        if !self.region.is_here() {
            return;
        }
        let mut state = self.state();
        state.far.unhold(page);
        if state.far.is_idle(page) && state.far.owner(page) == Owner::PerPage {
            self.release_page(&mut state, page);
        }
    }

    fn fresh_page(&self, state: &mut CollectiveState, owner: Owner) -> Result<u32, AllocError> {
        let page = match self.kept_page(state).or_else(|| state.free.pop()) {
            Some(page) => page,
            None => self.next_of_chunk(state)?,
        };
        state.far.set_owner(page, owner);
        state.in_use += 1;
        Ok(page)
    }

    /// An empty page that was kept; what was evicted of it meanwhile is not read again.
    fn kept_page(&self, state: &mut CollectiveState) -> Option<u32> {
        let page = state.kept.pop()?;
        let start = state.far.addr(page);
        let mut parts = (start..start + self.page_bytes).step_by(PAGE_MIN.as_usize());
        if !parts.all(|part| self.region.is_at_hand(part as *const u8)) {
            self.drop_contents(state, page, 1);
        }
        Some(page)
    }

    /// Takes a page of the last chunk mapped; maps another one, or at least a page, if need be.
    fn next_of_chunk(&self, state: &mut CollectiveState) -> Result<u32, AllocError> {
        if let Some(page) = state.chunk.next() {
            return Ok(page);
        }
        let (ptr, count) = match self.map_pages(CHUNK_PAGES) {
            Ok(ptr) => (ptr, CHUNK_PAGES),
            Err(_) => (self.map_pages(1)?, 1),
        };
        let first = self.first_page(ptr.as_ptr() as usize);
        state.chunk = first + 1..first + count as u32;
        Ok(first)
    }

    /// Takes a page back that holds nothing. While there is room it stays as it is: a page costs as
    /// much as a hundred allocations to drop and to fault in again (`book/src/design/placement.md`).
    fn release_page(&self, state: &mut CollectiveState, page: u32) {
        state.far.set_owner(page, Owner::Free);
        state.in_use -= 1;
        let keeps = self.region.limit().get() / KEPT_DIVISOR / self.page_bytes as u64;
        if self.region.has_room() && (state.kept.len() as u64) < keeps {
            return state.kept.push(page);
        }
        let oldest = state.kept.len().min(GIVE_BACK_MAX);
        let mut pages: Vec<u32> = state.kept.drain(..oldest).chain([page]).collect();
        pages.sort_unstable();
        for run in pages.chunk_by(|page, next| page + 1 == *next) {
            self.drop_contents(state, run[0], run.len());
        }
        state.free.extend(pages);
    }

    fn drop_contents(&self, state: &CollectiveState, first: u32, count: usize) {
        let start = state.far.addr(first) as *mut u8;
        let pages = slice_from_raw_parts_mut(start, count * self.page_bytes);
        // SAFETY: the pages hold no object (they are idle), so nobody needs their contents.
        unsafe { self.region.discard(pages) }.expect("a page lies in the region");
    }

    // Figures and control.

    /// Brings the page of an object in whole, where it is larger than what one fault brings and not at hand.
    pub(crate) fn bring_in(&self, object: *const u8) {
        if self.page_bytes > PAGE_MIN.as_usize()
            && !self.is_local(object)
            && !self.region.is_at_hand(object)
        {
            // What is refused comes by faults.
            let _ = self.region.advise(&[self.page_around(object)], Advice::WillNeedNow);
        }
    }

    /// The page of an object, or of its start.
    pub(crate) fn page_around(&self, object: *const u8) -> *const [u8] {
        let offset = object.addr().wrapping_sub(self.far_base) & (self.page_bytes - 1);
        std::ptr::slice_from_raw_parts(object.wrapping_sub(offset), self.page_bytes)
    }

    /// Bytes of a page, see [`CollectiveConfig::page`](CollectiveConfig::page()).
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        ByteCount(self.page_bytes as u64)
    }

    /// Bytes of purely-local memory.
    #[must_use]
    pub fn local_capacity(&self) -> ByteCount {
        ByteCount(self.local_capacity as u64)
    }

    /// Bytes of purely-local memory in use.
    #[must_use]
    pub fn local_used(&self) -> ByteCount {
        ByteCount(self.state().local_used as u64)
    }

    /// Pages of far memory that hold objects.
    #[must_use]
    pub fn far_pages(&self) -> u64 {
        self.state().in_use
    }

    /// Work that the page handler has done.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.region.stats()
    }

    /// The far region: its hints, limit and eviction.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Lets `count` more allocations pass and refuses all after them as if memory had run out;
    /// `None` ends it. For tests of what a container does then.
    #[doc(hidden)]
    pub fn refuse_after(&self, count: Option<u64>) {
        self.state().refuse_after = count;
    }
}

impl CollectiveState {
    fn may_allocate(&mut self) -> Result<(), AllocError> {
        match &mut self.refuse_after {
            None => Ok(()),
            Some(0) => Err(AllocError::Full),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
        }
    }
}

/// The mapping of the local arena and the state of its pages; nothing for a capacity of zero.
fn local_arena(capacity: usize) -> Result<(Option<WordMapping>, Pages)> {
    let count = capacity.div_ceil(LOCAL_PAGE);
    if count == 0 {
        return Ok((None, Pages::new(0, LOCAL_PAGE, 0)?));
    }
    let mapping = WordMapping::map(count * LOCAL_PAGE, LOCAL_PAGE)?;
    let mut pages = Pages::new(mapping.addr(), LOCAL_PAGE, count)?;
    let tail = capacity - (count - 1) * LOCAL_PAGE;
    if tail < LOCAL_PAGE {
        pages.fence(count as u32 - 1, tail);
    }
    Ok((Some(mapping), pages))
}

fn check(layout: Layout, page: usize) -> Result<(), AllocError> {
    if layout.size() > page {
        return Err(AllocError::TooLarge { size: layout.size(), max: page });
    }
    if layout.align() > page {
        return Err(AllocError::Align { align: layout.align(), max: page });
    }
    Ok(())
}

fn pointer(addr: usize) -> NonNull<u8> {
    NonNull::new(addr as *mut u8).expect("no memory is at address zero")
}

fn dangling(layout: Layout) -> NonNull<u8> {
    pointer(layout.align())
}
