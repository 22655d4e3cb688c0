//! Regions: far address space whose cold pages live on a store.
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

#![expect(unsafe_code, reason = "wipes the store at the end, promises that far memory is memory")]

pub use crate::paging::config::{FaultMode, Install, RegionConfig};
// For the simulation of policies, a benchmark.
#[doc(hidden)]
pub use crate::paging::evict::policy;
pub use crate::paging::latency::{Latencies, Latency};
pub use crate::paging::pins::PinGuard;
#[cfg(feature = "heap")]
pub(crate) use crate::paging::purge::{Purge, REST};
pub use crate::paging::readahead::Advice;
pub use crate::paging::stats::Stats;

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::units::ByteCount;
use crate::limit::manager::{Account, MemoryManager, Spill};
use crate::paging::counters::Counters;
use crate::paging::evict::Evictor;
use crate::paging::evict::requests::Requests;
use crate::paging::extents::Extents;
use crate::paging::fault::handler::Handler;
use crate::paging::fault::supervisor::Supervisor;
use crate::paging::fork;
use crate::paging::limits::TwoLimits;
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::{Pager, reclaim};
use crate::paging::pins::Pins;
use crate::store::{OnlyUser, Store, Wipe};
use crate::sys::messages::Deliver;
use crate::sys::probe::{Memory, address_space};
use crate::sys::signals::SignalsBlocked;
use crate::sys::thread;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

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
/// let config = RegionConfig::new().limit(ByteCount::mib(8));
/// match Region::create(config, store) {
///     Ok(region) => {
///         let range = region.map(ByteCount::mib(32))?;
///         assert!(region.contains(range.cast().as_ptr()));
///         // SAFETY: mapped above, and nobody uses it.
///         unsafe { region.unmap(range) }?;
///     }
///     // The message says how to allow userfaultfd.
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct Region {
    pub(in crate::paging) pager: Arc<Pager>,
    pub(in crate::paging) extents: Extents,
    pub(in crate::paging) requests: Arc<Requests>,
    threads: Vec<JoinHandle<()>>,
    pub(in crate::paging) pins: Pins,
    wipe: Wipe,
    manager: Option<Arc<MemoryManager>>,
    pub(in crate::paging) limits: TwoLimits,
}

/// Opens a region's account: its ceiling, and what it cannot work without.
fn join(manager: &MemoryManager, name: &str, config: &RegionConfig) -> Result<Account> {
    let account = manager.join(name)?;
    account.need(RegionConfig::LIMIT_MIN)?;
    account.set_ceiling(config.limit);
    Ok(account)
}

/// Bytes that a region keeps for itself whatever it holds: what its parts say of themselves, the page
/// that is kept for copies, and what no part knows of.
fn fixed_bytes(store: &dyn Store, memory: &RegionMemory, handlers: usize) -> ByteCount {
    /// Kernel page tables of sparse arrays, small objects. Measured: `book/src/design/memory.md`.
    const OTHERS: usize = 256 << 10;
    let frames = memory.frames().count();
    let bytes = OTHERS
        + handlers * Handler::bytes(store, frames)
        + Evictor::bytes(store, frames)
        + Counters::bytes(handlers)
        + memory.frames().table_bytes()
        + thread::THREAD_BYTES // the supervisor's
        + PAGE;
    ByteCount(bytes as u64)
}

/// `store`, with pages encrypted before they reach it.
///
/// # Errors
/// [`Error::Config`] without the feature `encrypt`; else as `EncryptedStore::new`.
fn encrypted(store: Arc<dyn Store>) -> Result<Arc<dyn Store>> {
    #[cfg(feature = "encrypt")]
    return Ok(Arc::new(crate::store::EncryptedStore::new(store)?));
    #[cfg(not(feature = "encrypt"))]
    {
        let _ = store;
        Err(Error::config("encrypt", "farheap was built without its feature `encrypt`"))
    }
}

/// Starts a handler thread. A panic of its own code is a broken invariant: the process ends
/// loudly, because pages that the thread was changing would hang the threads that touch them. (A
/// panic of the store's code is survived, see `Pager::guarded`.) It says when it has begun, and
/// allocates locally from then on.
fn spawn<T: Send + 'static>(
    threads: &mut Vec<JoinHandle<()>>,
    name: &str,
    mut work: Work<T>,
    begun: Sender<()>,
) -> Result<()> {
    let _blocked = SignalsBlocked::new();
    let run = move || {
        let _ours = keep_local();
        SignalsBlocked::for_good();
        // Refused where the start of another thread failed: then this one is ended soon.
        let _ = begun.send(());
        drop(begun);
        let run = std::panic::AssertUnwindSafe(|| (work.run)(&mut work.state));
        if std::panic::catch_unwind(run).is_err() {
            let cause = Error::Os { call: "a handler thread", errno: crate::sys::EIO };
            crate::paging::diagnostics::fatal("a handler thread panicked", &cause);
        }
    };
    threads.push(thread::spawn(name, run)?);
    Ok(())
}

/// Names the span, and what limits the address space, when that is what a start failed for.
fn name_span(error: Error, span: ByteCount) -> Error {
    if !matches!(error, Error::Os { call: "mmap", errno: libc::ENOMEM }) {
        return error;
    }
    let why = match address_space() {
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
    Error::config("span", format!("{span} cannot be reserved ({error}): {why}"))
}

/// Makes a region, under a manager as the consumer of this name if one is given; who wants temporary memory to
/// spill to it says so.
///
/// # Errors
/// As [`Region::create`] and [`Region::create_under`].
pub(crate) fn create(
    config: RegionConfig,
    store: Arc<dyn Store>,
    under: Option<(&Arc<MemoryManager>, &str)>,
) -> Result<Region> {
    let _delivered = Deliver::new();
    let _ours = keep_local();
    let config = config.check()?;
    let manager = under.map(|(manager, _)| manager);
    // Asked of a thread that ends. Later its start might wait for the handlers that it is for.
    thread::may_give_way();
    let store = match config.encrypt {
        true => encrypted(store)?,
        false => store,
    };
    let store = OnlyUser::of(store)?;
    let joined = under.map(|(manager, name)| join(manager, name, &config));
    let account = joined.transpose()?;
    let pager =
        Pager::new(&config, store, account).map_err(|error| name_span(error, config.span))?;
    reclaim::set_limit(&pager, config.limit);
    pager.tables().start(pager.memory(), pager.slots(), manager.map(|manager| &**manager))?;
    pager.pool().keep_copy_charge()?;
    let pager = Arc::new(pager);
    let extents = Extents::new(Arc::clone(&pager))?;
    if let Some(account) = pager.pool().managed().account() {
        let reclaimer: Weak<Pager> = Arc::downgrade(&pager);
        account.set_reclaimer(reclaimer);
    }
    if let Some(manager) = manager {
        let fixed = fixed_bytes(pager.slots().store(), pager.memory(), config.handlers);
        pager.pool().managed().charge_fixed(manager, fixed)?;
    }
    let requests = Arc::new(Requests::new());
    let evictor = Evictor::new(pager.clone(), requests.clone())?;
    let handlers: Result<Vec<Handler>> =
        (0..config.handlers).map(|n| Handler::new(pager.clone(), n, &config)).collect();
    let mut region = Region {
        pins: Pins::new(Arc::clone(&pager)),
        pager,
        extents,
        requests,
        threads: Vec::with_capacity(config.handlers + 2),
        wipe: config.wipe,
        manager: manager.cloned(),
        limits: TwoLimits::new(config.limit),
    };
    let evict = Work { state: evictor, run: Evictor::run };
    if config.mode == FaultMode::InThread {
        crate::paging::fault::sigbus::list(&region.pager)?;
    }
    let (begun, all_begun) = std::sync::mpsc::channel();
    spawn(&mut region.threads, "farheap-evict", evict, begun.clone())?;
    let watch = Work { state: Supervisor::new(region.pager.clone()), run: Supervisor::run };
    spawn(&mut region.threads, "farheap-watch", watch, begun.clone())?;
    for handler in handlers? {
        let serve = Work { state: handler, run: Handler::run };
        spawn(&mut region.threads, "farheap-handle", serve, begun.clone())?;
    }
    // What std allocates when a thread starts is not kept local yet. Far, where a heap over this
    // region has everything far, these threads would wait for themselves.
    drop(begun);
    for _ in &region.threads {
        all_begun.recv().expect("a thread says that it has begun before it ends");
    }
    fork::list(&region.pager);
    Ok(region)
}

impl Region {
    /// Reserves the address space and starts the threads.
    ///
    /// # Errors
    /// [`Error::UffdUnavailable`] without permission for userfaultfd, [`Error::Config`] and
    /// [`Error::LimitTooSmall`] for settings that cannot work, [`Error::Device`] for a store that
    /// another region uses, [`Error::Os`] when the kernel refuses resources.
    pub fn create(config: RegionConfig, store: Arc<dyn Store>) -> Result<Region> {
        let limit = config.limit;
        create(config, store, None).inspect(|_| Memory::warn_of(limit))
    }

    /// [`create`](Region::create) under a memory manager: `config.limit` is then a ceiling, the
    /// manager's limit holds for this region and all other consumers together, and temporary
    /// memory of the manager that does not fit may spill here. As
    /// much as it needs to work ([`RegionConfig::LIMIT_MIN`]) is the region's floor.
    ///
    /// # Errors
    /// As [`create`](Region::create); [`Error::TooManyConsumers`]; [`Error::LimitExceeded`] when
    /// the manager's limit does not hold the floors.
    pub fn create_under(
        manager: &Arc<MemoryManager>,
        config: RegionConfig,
        store: Arc<dyn Store>,
    ) -> Result<Arc<Region>> {
        let region = Arc::new(create(config, store, Some((manager, "far heap")))?);
        let spill: Weak<Region> = Arc::downgrade(&region);
        manager.set_spill(spill);
        Ok(region)
    }

    /// Children that were forked and have its memory, as far as is known.
    pub(crate) fn children(&self) -> usize {
        self.pager.fork().children().count()
    }

    // Ranges.

    /// Hands out `len` bytes of far memory, rounded up to whole pages, that read as zero.
    ///
    /// # Errors
    /// [`Error::Forked`] in a child of the region's process,
    /// [`Error::BadRange`] for a length of zero, [`Error::AddressSpace`] when no range is left,
    /// [`Error::StoreFull`] when limit and device together could not keep so much, [`Error::Device`] when that is
    /// because it takes no writes or its file system is full,
    /// [`Error::LimitExceeded`] when the tables that describe all that is mapped could take more
    /// than half of the limit ([`RegionConfig::tables_max`]).
    pub fn map(&self, len: ByteCount) -> Result<NonNull<[u8]>> {
        self.map_aligned(len, PAGE_SIZE)
    }

    /// [`map`](Region::map) at a multiple of `align`, a power of two that is 4 KiB to 2 MiB.
    #[doc(hidden)]
    pub fn map_aligned(&self, len: ByteCount, align: ByteCount) -> Result<NonNull<[u8]>> {
        let len = self.extents.whole_pages(len)?;
        let start = self.extents.map(len, align.as_usize())?;
        Ok(NonNull::slice_from_raw_parts(start, len))
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
    pub unsafe fn unmap(&self, range: NonNull<[u8]>) -> Result<()> {
        let len = self.extents.whole_pages(ByteCount(range.len() as u64))?;
        // SAFETY: as the caller promises.
        unsafe { self.extents.unmap(range.cast(), len) }
    }

    /// Gives the program a range of its choice, because it is about to map something there
    /// (`MAP_FIXED`): what is free of it is nobody else's until it is [taken back](Region::unmap_parts). Returns
    /// how many bytes that were. `None`: not all of the range is free, and it was to be (`all_free`).
    ///
    /// # Errors
    /// As [`map`](Region::map); [`Error::BadRange`] when the range is not in this region, or a part of it is reserved
    /// for others.
    #[doc(hidden)]
    pub fn claim(
        &self,
        ptr: NonNull<u8>,
        len: ByteCount,
        all_free: bool,
    ) -> Result<Option<ByteCount>> {
        let claimed = self.extents.claim(ptr, len.as_usize(), all_free)?;
        Ok(claimed.map(|claimed| ByteCount(claimed as u64)))
    }

    /// Takes back parts of what [`map`](Region::map) and
    /// [`claim`](Region::claim) gave, in which parts may be free. Returns
    /// how many bytes were not.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region, or a part of it is reserved for others.
    ///
    /// # Safety
    /// As for [`unmap`](Region::unmap).
    #[doc(hidden)]
    pub unsafe fn unmap_parts(&self, ptr: NonNull<u8>, len: ByteCount) -> Result<ByteCount> {
        // SAFETY: as the caller promises.
        let mapped = unsafe { self.extents.unmap_parts(ptr, len.as_usize()) }?;
        Ok(ByteCount(mapped as u64))
    }

    /// True if all of a range is far memory still: in this region, and nothing mapped over it by the program.
    #[doc(hidden)]
    #[must_use]
    pub fn is_far(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        self.extents.is_far(ptr, len)
    }

    /// Ranges of the address space in use, for those who cut it up themselves.
    pub(crate) fn extents(&self) -> &Extents {
        &self.extents
    }

    /// The calling thread, which maintains the tier, keeps off the processor of a handler that gives way while it does `run`.
    #[cfg(feature = "heap")]
    pub(crate) fn as_bystander(&self, run: impl FnOnce()) {
        let who = crate::paging::fault::sched::Bystander::Maintenance;
        self.pager.sched().idle_policies().bystanders().with(who, run);
    }

    /// How the heap above is told to give free memory back.
    #[cfg(feature = "heap")]
    pub(crate) fn purge(&self) -> &Purge {
        self.pager.pool().purge()
    }

    /// True if an address lies in this region.
    #[must_use]
    pub fn contains(&self, ptr: *const u8) -> bool {
        self.addresses().contains(&(ptr as usize))
    }

    /// Addresses that the region has reserved: what is mapped lies among them.
    #[must_use]
    pub fn addresses(&self) -> Range<usize> {
        let start = self.pager.table().start();
        start..start + self.pager.table().len()
    }

    /// True if this process made the region, and not the one that it was forked from.
    #[must_use]
    pub fn is_here(&self) -> bool {
        self.pager.table().is_here()
    }

    /// The memory manager that the region has joined, if it has.
    #[must_use]
    pub fn manager(&self) -> Option<&Arc<MemoryManager>> {
        self.manager.as_ref()
    }

    /// The region's account at its memory manager, to set its floor.
    #[must_use]
    pub fn account(&self) -> Option<&Account> {
        self.pager.pool().managed().account()
    }

    /// A snapshot of the region's statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.pager, self.extents.committed())
    }

    /// Counts of the servers that hold the pages, in the order of their addresses; none of another store. Allocates
    /// nothing.
    #[cfg(feature = "network")]
    pub fn servers(&self) -> impl Iterator<Item = crate::store::ServerStats> {
        (0..).map_while(|at| self.pager.slots().store().server(at))
    }

    /// How long faults, device requests and evictions have taken since the region's start.
    ///
    /// Merging the histograms takes some 10 us; recording costs a fault two looks at the clock and
    /// an addition.
    #[must_use]
    pub fn latencies(&self) -> Latencies {
        let pager = &self.pager;
        Latencies {
            fault: Latency::of(&pager.counters().fault_times),
            read: Latency::of(&pager.counters().read_times),
            write: Latency::of([&pager.counters().write_times]),
            evict: Latency::of([&pager.counters().evict_times]),
        }
    }

    /// True if a descriptor is this library's own: of a userfaultfd, a device, or what its threads wait for. A
    /// program that closes descriptors which it does not know has to leave these out, or it is ended.
    #[must_use]
    pub fn owns_descriptor(fd: std::os::fd::RawFd) -> bool {
        crate::sys::fork::is_own(fd)
    }

    /// True if system calls may be given far memory that is not resident: `false` where only
    /// faults of user mode are served, and `read(2)` into such memory fails with `EFAULT`.
    #[must_use]
    pub fn serves_kernel_faults(&self) -> bool {
        self.pager.mapper().serves_kernel_faults()
    }
}

// SAFETY: `map` hands out a range that nobody else has until it is unmapped, readable and writable
// for as long as the region exists, which the holder of the memory holds too; its pages are
// multiples of 4,096.
unsafe impl Spill for Region {
    fn allocate(&self, len: ByteCount) -> Result<NonNull<u8>> {
        self.map(len).map(NonNull::cast)
    }

    unsafe fn free(&self, ptr: NonNull<u8>, len: ByteCount) {
        // SAFETY: `allocate` mapped the range, and the caller gives it back.
        unsafe { self.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
            .expect("the range was mapped for this memory");
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
        let _delivered = Deliver::new();
        fork::unlist(&self.pager);
        self.pager.health().stop();
        self.requests.close();
        self.pager.pool().waiters().evictor_waker().wake_again();
        self.pager.sched().call_all();
        self.pager.sched().idle_policies().call_supervisor();
        if self.pager.mapper().is_in_thread() {
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
        if self.wipe == Wipe::Off {
            self.pager.discard_freed_last();
        }
        let (slots, page) = (self.pager.slots(), PAGE as u64);
        let used = ByteCount(slots.map().touched().0 * page);
        // SAFETY: the region is at its end, and nobody else keeps pages on its store.
        if let Err(error) = unsafe { crate::store::wipe(slots.store(), self.wipe, used) } {
            crate::paging::diagnostics::warn("the store could not be wiped", &error);
        }
    }
}

/// Prepares for forks now, and not when the first region is created: what is registered later by
/// `pthread_atfork(3)` may use far memory, what was registered before must not.
#[doc(hidden)]
pub fn watch_forks() {
    fork::watch();
}

/// A handler thread's state and what it does with it.
struct Work<T> {
    state: T,
    run: fn(&mut T),
}
