//! Regions: far address space whose cold pages live on a store..
//!
//! A [`Region`] is one reservation of addresses, the page words that say where each page is, and
//! the threads that bring pages in (`handler`) and take them out (`evictor`). It is usable by
//! itself, as a buffer larger than memory; the heap cuts jemalloc's extents from one.
//!
//! ```text
//!  thread touches p ---fault---> userfaultfd --> handler: word(p)?
//!                                                  Empty   -> zeros, no I/O
//!                                                  Cooling -> frame back, no I/O
//!                                                  Stored  -> read slot into a frame (io_uring)
//!                                                               ... done -> MOVE/COPY, wake
//!  low watermark --> evictor: victims -> MOVE into frames -> cool -> hash: clean? zero? dirty
//!                                                             -> runs of slots, one write each
//! ```
//! # Invariants
//! 1. Resident bytes (mapped pages and staging frames) never exceed the limit.
//! 2. No thread of a region touches far memory of its own region.

#![expect(unsafe_code, reason = "lends staging frames to the device")]

pub use crate::paging::evict::policy;
pub use crate::paging::latency::{Latencies, Latency};
pub(crate) use crate::paging::purge::REST;
pub use crate::paging::readahead::Advice;
pub use crate::paging::stats::Stats;

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount};
use crate::limit::manager::{Account, MemoryManager};
use crate::paging::evict::Evictor;
use crate::paging::evict::policy::PolicyKind;
use crate::paging::evict::requests::Requests;
use crate::paging::fault::handler::Handler;
use crate::paging::fault::sched::idle_policy::Lender;
use crate::paging::pager::Pager;
use crate::paging::ranges::{Committed, Space};
use crate::store::{Queue, Request, SealedStore, Store, Wipe};
use crate::sys::probe::{Limits, Memory};
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE};
use std::ptr::NonNull;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

/// Smallest page size.
pub const PAGE_MIN: ByteCount = ByteCount::kib(4);
/// Largest page size.
pub const PAGE_MAX: ByteCount = ByteCount::mib(2);

/// How pages come and go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Install {
    /// The fastest for the page size, by measurement: huge pages, which is pages of 2 MiB and chunks
    /// that a stream leads to, are filled by MOVE and others by COPY; evictions MOVE what may be
    /// dirty and drop what is known to be clean.
    #[default]
    Auto,
    /// COPY, write protection and `MADV_DONTNEED` only: the one way below Linux 6.8. Uses nothing
    /// newer than Linux 5.7, whatever the kernel has: lost pages are fenced off by a mapping
    /// instead of `UFFDIO_POISON`. Memory that an application's direct I/O is reading into must be
    /// pinned.
    Copy,
    /// MOVE both ways, for comparison: memory that was in use is not used again (the kernel may still
    /// be reading it), so small pages then cost more than by COPY.
    Move,
}

impl Install {
    /// Whether fills and evictions use MOVE.
    pub(in crate::paging) fn resolve(
        self,
        page_bytes: usize,
        kernel_moves: bool,
    ) -> Result<(bool, bool)> {
        match self {
            // The kernel clears what a frame that is moved in gets as new memory, which costs more
            // than copying, but for huge pages (docs/design/faults.md).
            Install::Auto => Ok((kernel_moves && page_bytes >= HUGE_PAGE, kernel_moves)),
            Install::Copy => Ok((false, false)),
            Install::Move if kernel_moves => Ok((true, true)),
            Install::Move => Err(Error::Unsupported {
                feature: "UFFDIO_MOVE (Linux 6.8)",
                why: "`install:move` was asked for; use `install:auto`",
            }),
        }
    }
}

/// Who serves a fault.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Handler threads. System calls may touch far memory that is not resident.
    #[default]
    Handler,
    /// The faulting thread itself, in a `SIGBUS` handler: the lowest latency, and no privilege
    /// needed. System calls on far memory that is not resident fail with `EFAULT`; SIGBUS must
    /// not be blocked, nor be in the mask of a signal handler that touches far memory, and a handler
    /// that the program installs for it later must pass on what is not its own. A SIGBUS handler that
    /// was there before is still called for what is not far, for lost pages and for hardware memory
    /// errors.
    InThread,
}

/// What a region is made of.
#[derive(Clone, Debug)]
pub struct RegionConfig {
    /// Most bytes that may be resident. Default 1 GiB.
    pub limit: ByteCount,
    /// Bytes that come and go as one; a power of two from 4 KiB to 2 MiB. Default 64 KiB.
    pub page: ByteCount,
    /// Address space to reserve; rounded up to 2 MiB. Default 1 TiB.
    pub span: ByteCount,
    /// Threads that serve faults, 1 to 64. Default 2: the first serves all faults, with
    /// asynchronous I/O; the second helps while two threads fault in turn, each beside one, and
    /// all help while more do.
    pub handlers: usize,
    /// Who serves faults. Default: handler threads.
    pub mode: Mode,
    /// How pages are installed and evicted. Default by page size.
    pub install: Install,
    /// Whether each slot's content is verified when it is read back. Default yes.
    pub checksum: bool,
    /// How long a handler looks for the next fault before it sleeps. Default 0.
    pub spin: Duration,
    /// How long a handler looks for the device's answer before it sleeps, on devices that usually
    /// answer within that time. Whoever wants its processor gets it meanwhile, but it does not
    /// halt. Default 200 us; 0: never.
    pub poll: Duration,
    /// How long the device may take for one request, and for how long a read that fails is repeated.
    /// Time in which the process is stopped does not count. Default 30 s.
    pub deadline: Duration,
    /// Whether pages that a stream of faults leads to are read ahead. Default yes.
    pub readahead: bool,
    /// Which page goes next. Default: tenure, by `docs/design/eviction.md`.
    pub policy: PolicyKind,
    /// Refuses to start where only faults of user mode can be served. Default no.
    pub kernel_faults_required: bool,
    /// Whether core dumps contain resident far memory. Default no.
    pub dump: bool,
    /// Whether pages are encrypted before they reach the store, under a key that only this
    /// process knows. Default no.
    pub encrypt: bool,
    /// What happens to the pages on the store when the region is dropped. Default nothing.
    pub wipe: Wipe,
}

impl Default for RegionConfig {
    fn default() -> RegionConfig {
        RegionConfig {
            limit: ByteCount::gib(1),
            page: ByteCount::kib(64),
            span: ByteCount::gib(1024),
            handlers: 2,
            mode: Mode::Handler,
            install: Install::Auto,
            checksum: true,
            spin: Duration::ZERO,
            poll: Duration::from_micros(200),
            deadline: Duration::from_secs(30),
            readahead: true,
            policy: PolicyKind::default(),
            kernel_faults_required: false,
            dump: false,
            encrypt: false,
            wipe: Wipe::Off,
        }
    }
}

impl RegionConfig {
    /// The smallest limit that works with a page size.
    #[must_use]
    pub fn limit_min(page: ByteCount) -> ByteCount {
        const PAGES_MIN: u64 = 64;
        ByteCount::mib(8).max(ByteCount(page.0.saturating_mul(PAGES_MIN)))
    }

    /// The most that tables take of so much far memory, each page touched and stored: what describes
    /// pages and slots, and the kernel's page tables. They count against the limit while they are
    /// used. What is allocated is bounded so that they never take more than half of the limit; see
    /// [`far_max`](Self::far_max).
    #[must_use]
    pub fn tables_max(&self, far: ByteCount) -> ByteCount {
        let resident = PageCount(self.limit.0 / self.page.0.max(1));
        let committed = Committed::of(far.0, self.page.0.max(1));
        crate::paging::tables::tables_max(&committed, resident, SlotCount(u64::MAX))
    }

    /// About the most far memory that can be allocated under this limit with this page size, however
    /// large the device is. Less where what is allocated is scattered: parts of 2 MiB count whole.
    #[must_use]
    pub fn far_max(&self) -> ByteCount {
        let gib = ByteCount::gib(1);
        let fixed = self.tables_max(ByteCount::ZERO).0;
        let per_gib = (self.tables_max(ByteCount(gib.0 << 10)).0 - fixed) >> 10;
        let room = crate::paging::tables::tables_allowed(self.limit).0.saturating_sub(fixed);
        ByteCount((u128::from(room) * u128::from(gib.0) / u128::from(per_gib)) as u64)
    }

    fn check(mut self) -> Result<RegionConfig> {
        let bad = |key: &str, reason: String| Error::Config { key: key.to_owned(), reason };
        if !self.page.is_power_of_two() || self.page < PAGE_MIN || self.page > PAGE_MAX {
            let reason = format!("{} is not a power of two from 4 KiB to 2 MiB", self.page);
            return Err(bad("page", reason));
        }
        let minimum = RegionConfig::limit_min(self.page);
        if self.limit < minimum {
            return Err(Error::LimitTooSmall { limit: self.limit, minimum });
        }
        if !(1..=64).contains(&self.handlers) {
            return Err(bad("handlers", format!("{} is not from 1 to 64", self.handlers)));
        }
        let huge = HUGE_PAGE as u64;
        let span = self.span.0.checked_next_multiple_of(huge).filter(|span| *span < 1 << 46);
        let Some(span) = span.filter(|span| *span >= huge) else {
            return Err(bad("span", format!("{} is not from 2 MiB to 64 TiB", self.span)));
        };
        self.span = ByteCount(span);
        Ok(self)
    }
}

/// Far memory: addresses whose cold pages are kept on a store, under one limit.
///
/// # Examples
/// ```
/// use farheap::region::{Region, RegionConfig};
/// use farheap::store::MemStore;
/// use farheap::ByteCount;
/// use std::sync::{Arc, Weak};
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let config = RegionConfig { limit: ByteCount::mib(8), ..RegionConfig::default() };
/// match Region::create(config, store) {
///     Ok(region) => {
///         let ptr = region.map(ByteCount::mib(32))?;
///         assert!(region.contains(ptr.as_ptr()));
///         // SAFETY: mapped above, and nobody uses it.
///         unsafe { region.unmap(ptr, ByteCount::mib(32)) }?;
///     }
///     // The message says how to allow userfaultfd.
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct Region {
    pub(in crate::paging) pager: Arc<Pager>,
    pub(in crate::paging) space: Space,
    pub(in crate::paging) requests: Arc<Requests>,
    threads: Vec<JoinHandle<()>>,
    /// Held while pins are added or ended.
    pub(in crate::paging) pin_lock: std::sync::Mutex<()>,
    wipe: Wipe,
    manager: Option<Arc<MemoryManager>>,
}

/// Opens a region's account: its ceiling, and what it cannot work without.
fn join(manager: &MemoryManager, config: &RegionConfig) -> Result<Account> {
    let account = manager.join("far heap")?;
    account.set_floor(RegionConfig::limit_min(config.page))?;
    account.set_ceiling(config.limit);
    Ok(account)
}

/// Names the span, and what limits the address space, when that is what a start failed for.
fn name_span(error: Error, span: ByteCount) -> Error {
    if !matches!(error, Error::Os { call: "mmap", errno: libc::ENOMEM }) {
        return error;
    }
    let limits = Limits::detect();
    let why = match (limits.address_space, limits.overcommit) {
        // Half of it, because the program and the tables need some too.
        (Some(most), _) if most.0 >= 4 << 20 => {
            let fits = ByteCount(1 << (most.0 / 2).ilog2());
            format!(
                "`ulimit -v` allows {most} of address space; set a smaller span, such as {fits}"
            )
        }
        (_, Some(2)) => {
            "vm.overcommit_memory is 2, with which reservations count as memory; set a \
                         smaller span"
                .to_owned()
        }
        _ => "set a smaller span".to_owned(),
    };
    let (key, reason) = ("span".to_owned(), format!("{span} cannot be reserved ({error}): {why}"));
    Error::Config { key, reason }
}

impl Region {
    /// Reserves the address space and starts the threads.
    ///
    /// # Errors
    /// [`Error::UffdUnavailable`] without permission for userfaultfd, [`Error::Config`] and
    /// [`Error::LimitTooSmall`] for settings that cannot work, [`Error::Os`] when the kernel
    /// refuses resources.
    pub fn create(config: RegionConfig, store: Arc<dyn Store>) -> Result<Region> {
        Region::create_with(config, store, None)
    }

    /// [`create`](Region::create) under a memory manager: `config.limit` is then a ceiling, the
    /// manager's limit holds for this region and all other consumers together, and temporary
    /// memory of the manager that does not fit may [spill](crate::limit::manager::Spill) here. As
    /// much as the page size needs to work ([`RegionConfig::limit_min`]) is the region's floor.
    ///
    /// # Errors
    /// As [`create`](Region::create); [`Error::TooManyConsumers`]; [`Error::LimitExceeded`] when
    /// the manager's limit does not hold the floors.
    pub fn create_under(
        manager: &Arc<MemoryManager>,
        config: RegionConfig,
        store: Arc<dyn Store>,
    ) -> Result<Arc<Region>> {
        let region = Arc::new(Region::create_with(config, store, Some(manager))?);
        let spill: Weak<Region> = Arc::downgrade(&region);
        manager.set_spill(spill);
        Ok(region)
    }

    fn create_with(
        config: RegionConfig,
        store: Arc<dyn Store>,
        manager: Option<&Arc<MemoryManager>>,
    ) -> Result<Region> {
        let _ours = keep_local();
        crate::paging::diagnostics::prepare();
        let config = config.check()?;
        if manager.is_none() {
            Memory::warn_of(config.limit);
        }
        let account = manager.map(|manager| join(manager, &config)).transpose()?;
        let store = match config.encrypt {
            true => Arc::new(SealedStore::new(store, config.page)?),
            false => store,
        };
        let space = Space::new(config.span.as_usize(), config.page.as_usize())?;
        let pager =
            Pager::new(&config, store, account).map_err(|error| name_span(error, config.span))?;
        let pager = Arc::new(pager);
        if let Some(account) = &pager.joined.account {
            let reclaimer: Weak<Pager> = Arc::downgrade(&pager);
            account.set_reclaimer(reclaimer);
        }
        if let Some(manager) = manager {
            pager.charge_fixed(manager)?;
        }
        let requests = Arc::new(Requests::new());
        let evictor = Evictor::new(pager.clone(), requests.clone(), config.deadline)?;
        let handlers: Result<Vec<Handler>> =
            (0..config.handlers).map(|n| Handler::new(pager.clone(), n, &config)).collect();
        let mut region = Region {
            pager,
            space,
            requests,
            threads: Vec::with_capacity(config.handlers + 2),
            pin_lock: std::sync::Mutex::new(()),
            wipe: config.wipe,
            manager: manager.cloned(),
        };
        let evict = Work { state: evictor, run: Evictor::run };
        if config.mode == Mode::InThread {
            crate::paging::fault::sigbus::list(&region.pager)?;
        }
        region.spawn("farheap-evict", evict)?;
        let lend = Work { state: Lender::new(region.pager.clone()), run: Lender::run };
        region.spawn("farheap-lend", lend)?;
        for handler in handlers? {
            let fill = Work { state: handler, run: Handler::run };
            region.spawn("farheap-fill", fill)?;
        }
        Ok(region)
    }

    /// Starts a handler thread. A panic of its own code is a broken invariant: the process ends
    /// loudly, because pages that the thread was changing would hang whoever touches them. (A
    /// panic of the store's code is survived, see [`guarded`].)
    fn spawn<T: Send + 'static>(&mut self, name: &str, mut work: Work<T>) -> Result<()> {
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let _ours = keep_local();
                SignalsBlocked::for_good();
                let run = std::panic::AssertUnwindSafe(|| (work.run)(&mut work.state));
                if std::panic::catch_unwind(run).is_err() {
                    let cause = Error::Os { call: "a handler thread", errno: crate::sys::EIO };
                    crate::paging::diagnostics::fatal("a handler thread panicked", &cause);
                }
            })
            .map_err(|error| Error::Os {
                call: "starting a handler thread",
                errno: error.raw_os_error().unwrap_or(crate::sys::EIO),
            })?;
        self.threads.push(thread);
        Ok(())
    }

    // Ranges.

    /// Hands out `len` bytes of far memory, rounded up to whole pages, that read as zero.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the region's process,
    /// [`Error::BadRange`] for a length of zero, [`Error::AddressSpace`] when no range is left,
    /// [`Error::StoreFull`] when limit and device together could not keep so much,
    /// [`Error::LimitExceeded`] when the tables that describe all that is mapped could take more
    /// than half of the limit ([`RegionConfig::tables_max`]).
    pub fn map(&self, len: ByteCount) -> Result<NonNull<u8>> {
        if !self.is_here() {
            return Err(Error::Forked { what: "a region" });
        }
        let len = self.whole_pages(len)?;
        let offset = self.space.reserve(len, self.pager.page_bytes)?;
        let capacity = self.capacity();
        if let Err(error) = self.space.commit(offset, len, |after| self.fits(after, capacity)) {
            self.space.release(offset, len);
            return Err(if let Error::StoreFull { .. } = error { self.full() } else { error });
        }
        let addr = self.pager.region.addr() + offset;
        Ok(NonNull::new(addr as *mut u8).expect("a region is never at address zero"))
    }

    /// Takes back a range from [`map`](Region::map): contents, frames and slots go. In a forked
    /// child of the region's process, which has no part of it, this does nothing.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not one of this region's, or not all of it is mapped.
    ///
    /// # Safety
    /// The caller mapped all of the range, or speaks for who did; nobody uses it any more, no
    /// reference into it exists, and nobody else unmaps it. (A region that a heap or a collective
    /// uses holds what they have mapped as well.)
    #[expect(unsafe_code, reason = "takes memory away that references could point to")]
    pub unsafe fn unmap(&self, ptr: NonNull<u8>, len: ByteCount) -> Result<()> {
        let len = self.whole_pages(len)?;
        let offset = self.offset_of(ptr.as_ptr(), len)?;
        if !offset.is_multiple_of(self.pager.page_bytes) {
            return Err(Error::BadRange { reason: "does not start at a page" });
        }
        if !self.is_here() {
            return Ok(());
        }
        if !self.space.is_live(offset, len) {
            return Err(Error::BadRange { reason: "is not mapped" });
        }
        self.space.decommit(offset, len, &self.pager);
        self.space.release(offset, len);
        Ok(())
    }

    /// Whether an address lies in this region.
    #[must_use]
    pub fn contains(&self, ptr: *const u8) -> bool {
        (ptr as usize).wrapping_sub(self.pager.region.addr()) < self.pager.region.len()
    }

    /// Whether this process made the region, and not the one that it was forked from.
    pub(crate) fn is_here(&self) -> bool {
        self.pager.region.is_here()
    }

    /// Bytes that come and go as one.
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        self.pager.page_size()
    }

    fn whole_pages(&self, len: ByteCount) -> Result<usize> {
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero" });
        }
        let len = len.as_usize().checked_next_multiple_of(self.pager.page_bytes);
        len.ok_or(Error::BadRange { reason: "length overflows" })
    }

    pub(in crate::paging) fn offset_of(&self, ptr: *const u8, len: usize) -> Result<usize> {
        let outside = Error::BadRange { reason: "lies outside of the region" };
        let offset = (ptr as usize).checked_sub(self.pager.region.addr()).ok_or(outside.clone())?;
        let end = offset.checked_add(len).ok_or(Error::BadRange { reason: "length overflows" })?;
        if end > self.pager.region.len() { Err(outside) } else { Ok(offset) }
    }

    /// Pages that limit and device can keep together.
    pub(in crate::paging) fn capacity(&self) -> PageCount {
        let pager = &self.pager;
        let failing =
            !matches!(pager.write_errno.load(Ordering::Acquire), 0 | crate::paging::pager::NO_SLOT);
        if failing && pager.exhausted.load(Ordering::Acquire) {
            return PageCount(0);
        }
        // What the device has taken is all that can be said while it takes no more.
        let stored = if failing { pager.slots.in_use() } else { self.slots_with_space() };
        let resident = pager.guaranteed().0.saturating_sub(pager.reserve().0);
        PageCount(stored.0.saturating_add(resident / pager.page_bytes as u64))
    }

    /// Slots that the store has space for now: others may fill its file system.
    fn slots_with_space(&self) -> SlotCount {
        let pager = &self.pager;
        let room = SlotCount(pager.store.room().0 / pager.page_bytes as u64);
        pager.slots.slots().min(room)
    }

    /// Why nothing more can be mapped.
    fn full(&self) -> Error {
        let store = &self.pager.store;
        let (room, capacity) = (store.room(), store.capacity());
        if room >= capacity {
            return Error::StoreFull { slots: self.pager.slots.slots() };
        }
        let what_to_do = "free space there, or have it reserved at the start: `reserve:on`";
        let reason =
            format!("its file system has space for {room} of {capacity} only; {what_to_do}");
        Error::Device { path: store.describe().into(), reason }
    }

    /// Whether limit and device can keep so much, of `capacity` pages, and describe it.
    ///
    /// # Errors
    /// [`Error::StoreFull`], [`Error::LimitExceeded`].
    pub(in crate::paging) fn fits(&self, committed: &Committed, capacity: PageCount) -> Result<()> {
        if committed.pages > capacity.0 {
            return Err(Error::StoreFull { slots: self.pager.slots.slots() });
        }
        let limit = self.pager.budget.limit();
        let resident = PageCount(limit.0 / self.pager.page_bytes as u64);
        let most = crate::paging::tables::tables_max(committed, resident, self.pager.slots.slots());
        let allowed = crate::paging::tables::tables_allowed(limit);
        if most > allowed {
            let far = ByteCount(committed.pages * self.pager.page_bytes as u64);
            let page = self.page_size();
            // Not for who only asks whether there is room.
            let _ours = keep_local();
            let reason = format!(
                "the tables of {far} of far memory in pages of {page} may take {most}, of {allowed} \
                 that a limit of {limit} allows them: raise the limit, or the page size"
            );
            return Err(Error::LimitExceeded { reason });
        }
        Ok(())
    }

    /// First and number of the pages that a range touches.
    pub(in crate::paging) fn pages_of(
        &self,
        ptr: *const u8,
        len: ByteCount,
    ) -> Result<(PageId, PageCount)> {
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero" });
        }
        let offset = self.offset_of(ptr, len.as_usize())?;
        let first = offset / self.pager.page_bytes;
        let end = (offset + len.as_usize()).div_ceil(self.pager.page_bytes);
        Ok((PageId(first as u64), PageCount((end - first) as u64)))
    }

    /// The memory manager that the region has joined, if it has.
    #[must_use]
    pub fn manager(&self) -> Option<&Arc<MemoryManager>> {
        self.manager.as_ref()
    }

    /// The region's account at its memory manager, to set its floor.
    #[must_use]
    pub fn account(&self) -> Option<&Account> {
        self.pager.joined.account.as_ref()
    }

    /// A snapshot of the region's statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.pager, self.space.committed())
    }

    /// How long faults, device requests and evictions have taken since the region's start.
    ///
    /// Merging the histograms takes some 10 us; recording costs a fault two looks at the clock and
    /// an addition.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        let pager = &self.pager;
        Latencies {
            fault: Latency::of(&pager.fault_times),
            read: Latency::of(&pager.read_times),
            write: Latency::of([&pager.write_times]),
            evict: Latency::of([&pager.evict_times]),
        }
    }

    /// Whether system calls may be given far memory that is not resident: `false` where only
    /// faults of user mode are served, and `read(2)` into such memory fails with `EFAULT`.
    #[must_use]
    pub fn serves_kernel_faults(&self) -> bool {
        self.pager.serves_kernel_faults()
    }
}

impl Drop for Region {
    /// Stops the threads, wipes the store if asked to, and unmaps the address space, whatever the
    /// device does: what is stuck there is waited for a bounded time, and the memory that it uses then
    /// stays mapped. Nobody may use the region's memory any more; a thread that waits for a page of it,
    /// or touches one later, gets a signal (SIGSEGV, or SIGBUS in in-thread mode), never zeros.
    fn drop(&mut self) {
        if !self.is_here() {
            // A forked child has neither the threads nor the memory; the handler of in-thread mode
            // may still look at the pager.
            std::mem::forget((std::mem::take(&mut self.threads), Arc::clone(&self.pager)));
            return;
        }
        self.pager.stop.store(true, Ordering::Release);
        self.requests.close();
        self.pager.evictor_bell.signal();
        self.pager.ring_handlers();
        self.pager.leases.ring();
        if self.pager.in_thread {
            crate::paging::fault::sigbus::unlist(&self.pager);
        }
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                std::thread::sleep(Duration::from_micros(100));
            }
            // The kernel does not let a thread end before its requests have, however long that takes.
            if !crate::store::has_given_up() {
                // A handler that panicked has said so already.
                drop(thread.join());
            }
        }
        let used = ByteCount(self.pager.slots.touched().0 * self.pager.page_bytes as u64);
        // SAFETY: the region is at its end, and nobody else keeps pages on its store.
        let wiped = unsafe { crate::store::wipe(&*self.pager.store, self.wipe, used) };
        if let Err(error) = wiped {
            crate::paging::diagnostics::warn("the store could not be wiped", &error);
        }
        crate::paging::diagnostics::flush();
    }
}

/// A handler thread's state and what it does with it.
struct Work<T> {
    state: T,
    run: fn(&mut T),
}

/// Calls code of the store, which may be the host's own. `None`: it panicked, which the process
/// is told; what was asked of it may or may not have happened.
pub(in crate::paging) fn guarded<T>(pager: &Pager, call: impl FnOnce() -> T) -> Option<T> {
    const PANICS_MAX: u64 = 16;
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
    if result.is_err() {
        let cause = Error::Os { call: "the store", errno: crate::sys::EIO };
        pager.counters.panics.bump();
        if pager.counters.panics.get() > PANICS_MAX {
            crate::paging::diagnostics::fatal("the store panicked too often", &cause);
        }
        crate::paging::diagnostics::warn("the store panicked; the handler goes on", &cause);
    }
    result.ok()
}

/// Hands a request to a queue whose buffers are staging frames.
pub(in crate::paging) fn push(queue: &mut dyn Queue, request: Request<'_>) -> bool {
    // SAFETY: the frames are taken off all lists by the thread that pushes and touched by nobody
    // until the completion is reported: handlers read into frames they own (handler, invariant 3),
    // and a frame being written is only read (evictor, invariant 1).
    unsafe { queue.push(request) }
}

/// The `errno` of a failed request.
pub(in crate::paging) fn errno_of(error: &Error) -> i32 {
    match error {
        Error::Io { errno, .. } | Error::Os { errno, .. } => *errno,
        _ => crate::sys::EIO,
    }
}

const _: () = assert!(KERNEL_PAGE == PAGE_MIN.0 as usize);
