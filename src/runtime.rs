//! Start and stop of the process's far heap and its tiers, in order.
//!
//! Up: store, region (handler threads), tier (arenas), maintenance, installation in front of the global
//! allocator; then further tiers in the same way. Down: the reverse, and only when no far memory is
//! allocated. The default tier ends last.

#![expect(unsafe_code, reason = "passes the call that clears on; gives space back")]

mod advice;
mod live;
mod maintenance;
mod process_limit;

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{Rank, Ranked, RankedGuard};
use crate::base::units::ByteCount;
use crate::config::{Builder, Config};
use crate::heap::{self, ExtentSource, FarArenas, FarArenasOptions, Local, TIERS_MAX, Tier, Usage};
use crate::paging::region::{self, FaultMode, Region, Stats};
use crate::store::{BlockStore, Store};
#[cfg(feature = "network")]
use crate::store::{EncryptedStore, NetworkStore, servers_of};
use crate::sys::fork::PerProcess;
use crate::sys::messages::{self, Deliver};
use crate::sys::probe::NumaNode;
use crate::sys::statm::Statm;
use maintenance::{Beside, LocalMemory, Maintenance};
use process_limit::ProcessLimit;
pub use process_limit::let_code_leave_by;
use std::ptr::{NonNull, slice_from_raw_parts};
use std::sync::{Arc, Once};

/// A tier that runs.
#[derive(Debug)]
struct Running {
    heap: Heap,
    /// `None`: it could not be started again after a shutdown that was refused.
    maintenance: Option<Maintenance>,
    beside: Beside,
}

/// The default tier's name.
const DEFAULT: &str = "far";
/// Maximum length of a tier's name, in bytes.
const NAME_MAX: usize = 32;

/// The line that start-up prints where only faults of user mode can be served, in one line.
const USER_MODE_ONLY: &str = "the kernel permits this process only faults of user mode: a \
     system call such as read(2) or write(2) fails with EFAULT on far memory that is not resident. ";
/// Follows [`USER_MODE_ONLY`] where the threshold is not in force.
const LOCAL_BY_SIZE: &str = "So no allocation goes far because of its size; the handle Far, far \
     scopes and temporary memory work, `mode:user` sends sizes far all the same. ";
const USER_MODE_REMEDY: &str = "`sudo sysctl vm.unprivileged_userfaultfd=1` permits all faults; \
     `farheap doctor` (from `cargo install farheap-cli`) names other ways";

/// Printed at start-up where jemalloc's metadata is far: it resets its locks in a child, which are far memory.
const FORKS_END: &str = "with `far_metadata:on` a child of fork(2) ends with SIGSEGV; programs that are \
     started by posix_spawn(3) or vfork(2) are not concerned";

/// All tiers that run, the default one first. Of this process: a child that was forked while a thread started or ended a
/// tier would wait for its parent's for ever.
fn all_running() -> RankedGuard<'static, Vec<Running>> {
    static RUNNING: PerProcess<Ranked<Vec<Running>>> = PerProcess::new();
    let _ours = keep_local();
    RUNNING.get_or_make(|| Ranked::new(Rank::Heap, Vec::new())).lock()
}

/// The process's far heap, or a further tier of it.
///
/// A handle: dropping it stops nothing, because far allocations may live on;
/// [`shutdown`](Heap::shutdown) does. [`Heap::running`] finds it again.
///
/// The heap that [`start`](Builder::start) starts is the default tier: [`Far`](crate::Far), far scopes and the
/// global allocator allocate from it. [`add_tier`](Heap::add_tier) adds others, each with a device, page
/// size and limit of its own, which programs name ([`Tier`]).
///
/// Its [`region`](Heap::region) takes advice about ranges of its memory, and pins them: [`Region::advise`],
/// [`Region::pin`].
///
/// # Examples
/// ```
/// use farheap::{ByteCount, Far, Heap};
/// use allocator_api2::vec::Vec;
///
/// let heap = match Heap::builder().far_limit(ByteCount::mib(16)).start() {
///     Ok(heap) => heap,
///     Err(error) => {
///         println!("{error}"); // Says how to allow userfaultfd.
///         return Ok(());
///     }
/// };
/// let mut column: Vec<u64, Far> = Vec::new_in(Far);
/// column.extend(0..8 << 20); // 64 MiB, four times the limit.
/// assert_eq!(column.iter().sum::<u64>(), (8 << 20) * ((8 << 20) - 1) / 2);
/// assert!(heap.stats().resident_bytes_max <= ByteCount::mib(16));
/// drop(column);
/// heap.shutdown()?;
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Heap {
    region: Arc<Region>,
    arenas: &'static FarArenas,
    name: Arc<str>,
}

impl Builder {
    /// Starts the far heap of this process. Allocations go far from now on, by policy: what uses
    /// [`Far`](crate::Far), what runs in a far [`Scope`](crate::Scope), and with
    /// [`FarHeap`](crate::FarHeap) as global allocator what is at least as large as the
    /// [threshold](Heap::threshold), where system calls can be given such memory.
    ///
    /// # Errors
    /// As [`limits`](Builder::limits); [`Error::AlreadyRunning`] when one runs; [`Error::Forked`] in a child of a
    /// process that had one, whose far pointers the child may still hold; [`Error::UffdUnavailable`] without
    /// permission for userfaultfd; [`Error::Device`] for a device or directory that cannot be used;
    /// [`Error::Os`] when the kernel refuses resources. Under a memory manager also
    /// [`Error::TooManyConsumers`], and [`Error::LimitExceeded`] when its limit does not hold all floors, of which
    /// the far heap needs 8 MiB.
    pub fn start(self) -> Result<Heap> {
        let _delivered = Deliver::new();
        if heap::is_left_to_parent() {
            return Err(Error::Forked { what: "a far heap" });
        }
        let config = self.build()?;
        // A forked child has no tier of its own: what it allocates is local. Before the lock is taken, for which
        // a child of another thread's would wait.
        static AT_FORK: std::sync::Once = std::sync::Once::new();
        AT_FORK.call_once(|| crate::sys::fork::in_forked_children(heap::leave_to_parent));
        let mut running = all_running();
        if !running.is_empty() {
            return Err(Error::AlreadyRunning);
        }
        heap::keep_own_allocations_local();
        for found in heap::settle_jemalloc()? {
            warn(format_args!("{found}"));
        }
        // Before the region starts threads.
        if crate::sys::thread::is_single() {
            crate::sys::membarrier::register();
        }
        let (store, manager) = (open_store(&config)?, config.parts().1);
        let region = match manager {
            Some(manager) => Region::create_under(manager, config.region(), store)?,
            None if config.asks_for_limit() || !config.far_is_auto() => {
                Arc::new(Region::create(config.region(), store)?)
            }
            // Its limit follows what there is.
            None => Arc::new(region::create(config.region(), store, None)?),
        };
        let threshold = threshold(&config, &region);
        if !region.serves_kernel_faults() && config.mode() != FaultMode::InThread {
            let by_size = if threshold == config.threshold() { "" } else { LOCAL_BY_SIZE };
            warn(format_args!("{USER_MODE_ONLY}{by_size}{USER_MODE_REMEDY}"));
        }
        let limit = config
            .limit()
            .map(|limit| ProcessLimit::new(limit, config.far_is_auto(), config.asks_for_limit()));
        let beside = match (manager, limit) {
            (Some(manager), _) => Beside::Counted(LocalMemory::join(manager, &region)?),
            (None, Some(Ok(limit))) => {
                // Far memory began with what others leave; it may have more when they do.
                limit.set(limit.limit(), &region)?;
                notice_forks();
                Beside::Bounded(Arc::new(limit))
            }
            (None, Some(Err(error))) if config.asks_for_limit() => return Err(error),
            (None, _) => Beside::Nothing,
        };
        if config.check() {
            heap::check::begin();
        }
        let options = FarArenasOptions { threshold, ..options(&config) };
        let process = beside.process_limit().map(|limit| (Arc::clone(&region), Arc::clone(limit)));
        let heap = start_tier(&mut running, DEFAULT, region, options, beside)?;
        let _ours = keep_local();
        *limited() = Some(process);
        Ok(heap)
    }
}

/// The default tier's region and the limit of the process that it gives way to, if there is one.
type Limited = Option<(Arc<Region>, Arc<ProcessLimit>)>;

/// The [`Limited`] of the heap that runs; `None`: none does. Not in [`all_running`], which is locked for as long as a tier takes to
/// start or to end: forks would wait for that, and in a child for ever. It has one of its own.
fn limited() -> RankedGuard<'static, Option<Limited>> {
    static LIMITED: PerProcess<Ranked<Option<Limited>>> = PerProcess::new();
    LIMITED.get_or_make(|| Ranked::new(Rank::Leaf, None)).lock()
}

/// From now on there is room for children before they are forked. Called when there is a region: what it does before a fork
/// comes later.
fn notice_forks() {
    static NOTICED: Once = Once::new();
    extern "C" fn before() {
        if !heap::is_left_to_parent() {
            let _ours = keep_local();
            let limited = limited().clone().flatten();
            if let Some((region, limit)) = limited {
                limit.make_room_for_child(&region);
            }
        }
    }
    extern "C" fn after() {}
    NOTICED.call_once(|| crate::sys::fork::around_forks(before, after, after));
}

impl Heap {
    /// Returns a builder with the defaults, which [`start`](Builder::start) starts as the far heap of this process,
    /// and [`add_tier`](Heap::add_tier) as a further tier.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Adds a far tier to the heap: its own device or store and `far_limit`, as the
    /// configuration says, and its own threads. Nothing goes there by itself: programs name it, by [`tier`](Heap::tier).
    ///
    /// The name is for people and for [`tiers`](Heap::tiers): at most 32 letters, digits, `-` and `_`. The
    /// configuration's `far_limit` is the tier's own; of a heap that was started under a [memory
    /// manager](Builder::manager) it is the tier's ceiling, and the manager's limit holds for all
    /// tiers together. The limit of the process holds for all tiers: the default one gives way.
    ///
    /// # Errors
    /// As [`start`](Builder::start); [`Error::NotRunning`] when this heap was shut down;
    /// [`Error::Config`] for a name that is taken or has other characters, for an eighth further
    /// tier, and for a manager and the options `threshold`, `check` and `limit`, which are not a tier's.
    ///
    /// # Examples
    /// See [`Tier`].
    pub fn add_tier(&self, name: &str, tier: Builder) -> Result<Heap> {
        let _delivered = Deliver::new();
        if !self.region.is_here() {
            return Err(Error::Forked { what: "a far heap" });
        }
        let refused = |reason: String| Error::config(&format!("tier `{name}`"), reason);
        let config = tier.build()?;
        config.check_places_nothing()?;
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if name.is_empty() || name.len() > NAME_MAX || !name.bytes().all(is_plain) {
            let reason = format!("a name is 1 to {NAME_MAX} letters, digits, `-` and `_`");
            return Err(refused(reason));
        }
        let mut running = all_running();
        if !running.iter().any(|tier| tier.heap.is_same(self)) {
            return Err(Error::NotRunning);
        }
        if running.iter().any(|tier| *tier.heap.name == *name) {
            return Err(refused("a tier of this name runs already".to_owned()));
        }
        let is_free = |slot: &usize| running.iter().all(|tier| tier.heap.tier().slot() != *slot);
        let Some(slot) = (1..TIERS_MAX).find(is_free) else {
            return Err(refused(format!("{TIERS_MAX} far tiers run already")));
        };
        let store = open_store(&config)?;
        let consumer = format!("far tier {name}");
        let under = running[0].heap.region.manager().map(|manager| (manager, &*consumer));
        let region = Arc::new(region::create(config.region(), store, under)?);
        let options = FarArenasOptions { slot, threshold: None, ..options(&config) };
        start_tier(&mut running, name, region, options, Beside::Nothing)
    }

    /// The far heap that runs in this process, if one does. That of a parent does not run in its
    /// forked child.
    #[must_use]
    pub fn running() -> Option<Heap> {
        all_running().first().map(|default| default.heap.clone())
    }

    /// All far tiers that run in this process, the default one first; none in a forked child.
    #[must_use]
    pub fn tiers() -> Vec<Heap> {
        let running = all_running();
        let _ours = keep_local(); // Else the list itself may keep a tier from being shut down.
        running.iter().map(|tier| tier.heap.clone()).collect()
    }

    /// Evicts far memory for `len` bytes that the program is about to touch beside it, and waits until they
    /// fit, under a [limit on the process](crate::config::Builder::limit). Returns after how many
    /// more bytes to call again.
    #[doc(hidden)]
    #[must_use]
    pub fn make_room_beside(len: ByteCount) -> ByteCount {
        const NEVER: ByteCount = ByteCount(u64::MAX);
        if heap::is_left_to_parent() {
            return NEVER; // What a forked child allocates is not limited.
        }
        let _ours = keep_local();
        let limited = limited().clone();
        match limited {
            Some(Some((region, limit))) => limit.make_room(&region, len),
            Some(None) => NEVER,
            None => ByteCount::ZERO, // It may start.
        }
    }

    /// Changes the limit of the process while it runs. Far memory that is above a lower one is out when this
    /// returns, or soon afterwards where a `far_limit` was set, which does not change:
    /// [`Region::set_limit`] does that.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when this heap was shut down; [`Error::Config`] for a further tier, under a
    /// memory manager and with `limit:off`; as
    /// [`Region::set_limit`].
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        let Some(process) = self.process_limit().ok_or(Error::NotRunning)? else {
            let reason =
                "nothing bounds the process here: `limit:off`, a memory manager, or a further tier";
            return Err(Error::config("limit", reason));
        };
        let minimum = self.region.limit_min();
        if limit < minimum {
            return Err(Error::LimitTooSmall { limit, minimum });
        }
        process.set(limit, &self.region)
    }

    /// The limit of the process now; `None` where nothing bounds it by this tier: see [`set_limit`](Heap::set_limit).
    #[must_use]
    pub fn limit(&self) -> Option<ByteCount> {
        Some(self.process_limit()??.limit())
    }

    /// `None` after the shutdown; an inner `None` where nothing bounds the process by this tier.
    fn process_limit(&self) -> Option<Option<Arc<ProcessLimit>>> {
        let running = all_running();
        Some(running.iter().find(|tier| tier.heap.is_same(self))?.beside.process_limit().cloned())
    }

    /// The tier that this is: what [`Scope::enter`](crate::Scope::enter) and its like take, and a handle to allocate
    /// by. [`Tier::FAR`] is the default one, also while another heap runs that was started later.
    #[must_use]
    pub fn tier(&self) -> Tier {
        self.arenas.tier()
    }

    /// The tier's name: `far` is the default one's.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// True if two handles are of one tier.
    fn is_same(&self, other: &Heap) -> bool {
        std::ptr::eq(self.arenas, other.arenas)
    }

    /// The heap's memory and its device.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The size from which the global allocator places allocations far now, zero for all; `None`: no size does, because the configuration says `threshold:off`, because only faults of user mode are
    /// permitted here (see [`FaultMode::Auto`]), because the heap has been shut down, or because this is not
    /// the default tier.
    #[must_use]
    pub fn threshold(&self) -> Option<ByteCount> {
        let default = heap::default_tier().filter(|arenas| std::ptr::eq(*arenas, self.arenas));
        default.and_then(FarArenas::threshold)
    }

    /// Gives freed far memory that is kept for reuse back now, frames and all, and has its device space
    /// given back soon. By itself that waits until the device has been quiet for half a second, or until more has been
    /// freed than is stored for two seconds.
    pub fn purge(&self) {
        let _ = self.while_running(|arenas| {
            arenas.give_all_back();
            self.region.return_space();
        });
    }

    /// Uses of this tier's memory now; zeros once it was shut down, and in a forked child. Takes
    /// jemalloc's locks, all of them in turn: not for hot paths.
    ///
    /// # Examples
    /// ```
    /// use farheap::{Far, Heap};
    /// # fn main() -> Result<(), farheap::Error> {
    /// let heap = match Heap::builder().parse("far_limit:16MiB,capacity:64MiB")?.start() {
    ///     Ok(heap) => heap,
    ///     Err(error) => {
    ///         println!("{error}"); // Says how to allow userfaultfd.
    ///         return Ok(());
    ///     }
    /// };
    /// let numbers = allocator_api2::vec::Vec::<u64, Far>::with_capacity_in(100_000, Far);
    /// let usage = heap.usage();
    /// assert_eq!(usage.allocated_bytes.get(), 800_000);
    /// assert!(usage.large_bytes.get() >= 800_000 && usage.active_bytes >= usage.large_bytes);
    /// println!("{usage}");
    /// drop(numbers);
    /// heap.shutdown()?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn usage(&self) -> Usage {
        let of_arenas = self.while_running(FarArenas::memory).unwrap_or_default();
        // A forked child has none.
        let far = self.region.is_here().then(|| self.region.stats().resident_bytes);
        let resident_bytes = far.into_iter().chain([of_arenas.resident_bytes]).sum();
        Usage { resident_bytes, ..of_arenas }
    }

    /// Asks the tier's arenas something while they exist.
    fn while_running<T>(&self, ask: impl FnOnce(&FarArenas) -> T) -> Option<T> {
        // Else the answer itself may keep a tier from being shut down.
        let _ours = keep_local();
        // The lock keeps the tier's arenas from being destroyed meanwhile.
        let running = all_running();
        running.iter().any(|tier| tier.heap.is_same(self)).then(|| ask(self.arenas))
    }

    /// A snapshot of the statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.region.stats()
    }

    /// Stops the far heap: everything new is local. The default tier takes all others along; one of
    /// these goes alone. When the last handle is gone, this one too, its threads end and the device is
    /// wiped, if asked for, and released; until then the region's statistics are readable, and all else fails
    /// with [`Error::NotRunning`].
    ///
    /// # Errors
    /// [`Error::InUse`] while memory of a tier that is to end is allocated, or a thread does not leave the
    /// allocator for five seconds: everything goes on as before. [`Error::NotRunning`] when it was
    /// shut down already. [`Error::Forked`] in a child of the process that started it: nothing changes.
    /// [`Error::Jemalloc`] when jemalloc keeps an arena although nothing of it is allocated: the far
    /// heap has ended then, everything new is local, and another can be started; but the threads and
    /// the device of this one stay until the process ends, because the arena still names its
    /// addresses.
    pub fn shutdown(&self) -> Result<()> {
        let _delivered = Deliver::new();
        if !self.region.is_here() {
            return Err(Error::Forked { what: "a far heap" });
        }
        let mut running = all_running();
        let Some(at) = running.iter().position(|tier| tier.heap.is_same(self)) else {
            return Err(Error::NotRunning);
        };
        let _ours = keep_local(); // Else the lists below may keep a tier from being shut down.
        let end = if at == 0 { running.len() } else { at + 1 };
        let mut ending: Vec<Running> = running.drain(at..end).collect();
        // Nobody may look after arenas that are being destroyed.
        ending.iter_mut().for_each(|tier| drop(tier.maintenance.take()));
        let arenas: Vec<_> = ending.iter().rev().map(|tier| tier.heap.arenas).collect();
        heap::check::let_all_go();
        let result = heap::uninstall(&arenas);
        if let Err(Error::InUse { .. }) = result {
            for tier in &mut ending {
                // Without it, memory that is freed stays longer; the heap goes on all the same.
                let Heap { arenas, region, name } = &tier.heap;
                tier.maintenance =
                    Maintenance::start(arenas, region, tier.beside.clone(), name).ok();
            }
            drop(running.splice(at..at, ending));
        } else {
            if at == 0 {
                let ended = limited().take();
                drop(ended); // Not under the lock.
            }
            // A handle that is left holds the region, which would go on.
            ending.iter().for_each(|tier| tier.heap.region.extents().end());
        }
        result
    }
}

impl Local {
    /// Uses of the process's local memory now, by jemalloc's account: that of all that is not far, but for
    /// the metadata of far tiers. jemalloc takes all of a block for resident, of which the last pages may never
    /// have been touched: a block of random size is a tenth larger than what was asked for. Where the kernel
    /// counts less, `resident_bytes` is what the process has in RAM beside files and far memory; the C
    /// library's memory and stacks are in that.
    ///
    /// Local memory is outside of the limit of a heap that stands alone; under a
    /// [memory manager](crate::limit::manager) it counts against its limit as "local memory", and under a
    /// [limit on the process](crate::config::Builder::limit) far memory gives way to it. Takes jemalloc's locks, as
    /// [`Heap::usage`] does.
    #[must_use]
    pub fn usage() -> Usage {
        let usage = heap::local_memory();
        let far: ByteCount = Heap::tiers().iter().map(|tier| tier.usage().resident_bytes).sum();
        let anonymous = Statm::open().ok().and_then(|statm| statm.anonymous());
        let most = anonymous.map_or(u64::MAX, |all| all.0.saturating_sub(far.0));
        Usage { resident_bytes: usage.resident_bytes.min(ByteCount(most)), ..usage }
    }
}

/// Says something about a start.
fn warn(text: std::fmt::Arguments<'_>) {
    messages::tell("a heap starts", u32::MAX, text);
}

/// How the arenas of a tier behave, as far as the configuration says it alone.
fn options(config: &Config) -> FarArenasOptions {
    let metadata_is_far = config.far_metadata();
    if let (Some(node), [_]) = (config.node(), &NumaNode::all()[..]) {
        warn(format_args!(
            "node {node} is the only one of this machine: `node:{node}` changes nothing"
        ));
    }
    FarArenasOptions { metadata_is_far, ..FarArenasOptions::default() }
}

/// Puts a tier onto a region, and in front of the global allocator.
fn start_tier(
    running: &mut Vec<Running>,
    name: &str,
    region: Arc<Region>,
    options: FarArenasOptions,
    beside: Beside,
) -> Result<Heap> {
    let _ours = keep_local();
    if options.metadata_is_far {
        warn(format_args!("{FORKS_END}"));
    }
    let arenas = FarArenas::create(region.clone() as Arc<dyn ExtentSource>, options)?;
    // Before the tier serves: what a new thread allocates until it has begun is not kept local.
    let maintenance = Maintenance::start(arenas, &region, beside.clone(), name);
    let installed = maintenance.and_then(|maintenance| {
        heap::install(arenas)?;
        Ok(maintenance)
    });
    let maintenance = match installed {
        Ok(maintenance) => Some(maintenance),
        Err(error) => {
            arenas.close()?.end()?;
            return Err(error);
        }
    };
    let tier = Heap { region, arenas, name: name.into() };
    running.push(Running { heap: tier.clone(), maintenance, beside });
    Ok(tier)
}

impl ExtentSource for Region {
    fn base(&self) -> usize {
        self.addresses().start
    }

    fn span(&self) -> usize {
        self.addresses().len()
    }

    fn reserve(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        self.extents().reserve(len, align)
    }

    fn commit(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        self.extents().commit(ptr, len)
    }

    unsafe fn clear(&self, ptr: NonNull<u8>, len: ByteCount) {
        // SAFETY: as the caller promises.
        unsafe { self.extents().clear(ptr, len) }
    }

    fn decommit(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.extents().decommit(ptr, len);
    }

    fn release(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.extents().release(ptr, len);
    }

    fn pin(&self, ptr: *const u8, len: ByteCount) -> bool {
        Region::pin(self, slice_from_raw_parts(ptr, len.as_usize())).map(std::mem::forget).is_ok()
    }

    fn unpin(&self, ptr: *const u8, len: ByteCount) {
        // Not pinned any more: it was given back, which ends pins.
        let _ = Region::unpin(self, slice_from_raw_parts(ptr, len.as_usize()));
    }

    /// Half of the limit is free, of a shared one too.
    fn has_plenty(&self) -> bool {
        let budget = self.budget();
        budget.free().0 >= budget.limit().0.div_ceil(2)
    }
}

impl Builder {
    /// Opens the store that these options describe.
    ///
    /// # Errors
    /// As [`limits`](Builder::limits); [`Error::Device`] for a device or directory that cannot be used;
    /// [`Error::Unsupported`] for an engine that the kernel lacks.
    pub fn open_store(&self) -> Result<Arc<dyn Store>> {
        let _delivered = Deliver::new();
        open_store(&self.clone().build()?)
    }
}

/// The size from which allocations go far by themselves: where the kernel's own faults are not
/// served none does, unless the configuration says otherwise.
///
/// A program does not know which of its large blocks a library passes to a system call:
/// `std::fs::read` of a file of 64 KiB or more failed with `EFAULT`, before anything was evicted,
/// because the kernel may not fault on pages that are still missing.
fn threshold(config: &Config, region: &Region) -> Option<ByteCount> {
    let never_in_system_calls = matches!(config.mode(), FaultMode::InThread | FaultMode::User);
    if region.serves_kernel_faults() || never_in_system_calls { config.threshold() } else { None }
}

fn open_store(config: &Config) -> Result<Arc<dyn Store>> {
    if let Some(store) = config.parts().0 {
        return Ok(Arc::clone(store));
    }
    #[cfg(feature = "network")]
    if let Some(servers) = config.device().map(servers_of).transpose()?.flatten() {
        // With `encrypt` the region does it.
        let encrypts = servers.wants_encryption() && !config.encrypt();
        let store =
            NetworkStore::open(servers, config.capacity(), config.overwrite(), config.deadline())?;
        let store: Arc<dyn Store> = Arc::new(store);
        return if encrypts { Ok(Arc::new(EncryptedStore::new(store)?)) } else { Ok(store) };
    }
    let store = match config.device() {
        Some(device) => BlockStore::scratch(device, config.capacity(), config.overwrite())?,
        None => BlockStore::temporary(config.dir(), config.capacity())?,
    };
    if store.is_in_memory() {
        warn(format_args!(
            "{}: this file system is in memory (tmpfs), so that evicting to it frees no memory; \
             set `dir` or `device` to something on a disk",
            store.describe()
        ));
    }
    if config.reserve()
        && let Err(error) = store.reserve_space()
    {
        // What was reserved of a named file goes back; its contents could go anyway. The failure
        // is the news even when this fails too.
        // SAFETY: the store was just opened, and no heap has begun to use it.
        let _ = unsafe { store.discard(0, store.capacity().0) };
        return Err(error);
    }
    Ok(Arc::new(store.with_engine(config.io())?))
}
