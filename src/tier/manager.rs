//! The memory manager: one hard limit over table pages, far pages and temporary memory.
//!
//! Consumers join a [`MemoryManager`] and get an [`Account`], their part of the one budget. A
//! charge that does not fit makes the manager ask the consumers' [`Reclaim`]ers for bytes,
//! cheapest first. Temporary memory is handed out by [`MemoryManager::allocate_temporary`]; what
//! does not fit even after reclaiming spills to a [`Spill`], such as a far-memory region.
//! Uses `sys`; `pool` and `region` join it from above.
//!
//! # Invariants
//! 1. Bytes are charged before they have memory: what is charged never exceeds the limit unless
//!    the limit was lowered, and then only until reclaiming has caught up.
//! 2. Reclaimers are called without any lock of the manager held.

use super::budget::Budget;
use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::sys::vm::{HUGE_PAGE, Huge, KERNEL_PAGE, Mapping};
use std::fmt;
use std::fmt::Debug;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most consumers of one manager.
pub const CONSUMERS_MAX: usize = 16;

/// How often the background thread looks without being called.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a charge that found nothing to reclaim waits before it tries again.
const RETRY_AFTER: Duration = Duration::from_micros(200);

/// Least bytes reclaimed at a time: batches are what makes reclaiming cheap.
const RECLAIM_MIN: u64 = 256 << 10;

/// What freeing bytes may cost, cheapest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// Memory that holds nothing.
    Spare,
    /// Data that the device or the host can give again: clean pages.
    Clean,
    /// Data that has to be written first.
    Write,
}

impl Effort {
    const ALL: [Effort; 3] = [Effort::Spare, Effort::Clean, Effort::Write];
}

/// A consumer that can give memory back: a buffer pool, a region, a host's plan or result cache.
pub trait Reclaim: Send + Sync {
    /// Frees about `want` bytes, spending no more than `effort`, and returns how many it freed
    /// (it has uncharged them). Called from any thread, several at once; it must not charge.
    fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount;

    /// Who is asked first among consumers at the same effort: the lowest.
    fn cost(&self, _effort: Effort) -> u32 {
        100
    }

    /// Says who holds what cannot be reclaimed, for messages.
    fn describe_held(&self) -> String {
        String::new()
    }
}

/// Memory beyond the limit for temporary data: pages of it come and go by themselves.
pub trait Spill: Send + Sync {
    /// Reserves `len` bytes of evictable memory; `None` when there is none left.
    fn allocate(&self, len: ByteCount) -> Option<NonNull<u8>>;

    /// Gives back what [`allocate`](Spill::allocate) returned.
    fn free(&self, ptr: NonNull<u8>, len: ByteCount);
}

/// How memory is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every consumer may use what the others do not.
    Cooperative,
    /// Temporary memory has a part of its own, this many percent, and nothing gives way: the
    /// traditional system, for comparison.
    Partitioned {
        /// The temporary memory's part.
        temporary_pct: u8,
    },
}

/// What the host is told about memory pressure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pressure {
    /// Less is free than the low watermark: background reclaim begins.
    Low {
        /// Bytes charged.
        used: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// A caller has to reclaim itself.
    Direct {
        /// Bytes it wants.
        wanted: ByteCount,
    },
    /// Temporary memory went beyond the limit.
    Spilled {
        /// Bytes of the allocation.
        len: ByteCount,
    },
    /// A caller got an error.
    Failed {
        /// Bytes it wanted.
        wanted: ByteCount,
    },
}

/// A consumer's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConsumerStats {
    /// The name it joined with.
    pub name: &'static str,
    /// Bytes charged.
    pub used: ByteCount,
    /// The most it ever had charged.
    pub used_max: ByteCount,
    /// Bytes that others cannot take from it.
    pub floor: ByteCount,
    /// The most it may charge.
    pub ceiling: ByteCount,
}

/// The manager's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManagerStats {
    /// The limit.
    pub limit: ByteCount,
    /// Bytes charged by all consumers.
    pub used: ByteCount,
    /// The most there ever were.
    pub used_max: ByteCount,
    /// Bytes reclaimed at each effort.
    pub reclaimed: [ByteCount; 3],
    /// Charges that had to reclaim themselves.
    pub direct: u64,
    /// Rounds of background reclaim.
    pub background: u64,
    /// Bytes of temporary memory beyond the limit, at the moment.
    pub spilled: ByteCount,
    /// Per consumer, in the order they joined.
    pub consumers: Vec<ConsumerStats>,
}

/// A consumer's part of the budget; leaves the manager when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Account(Arc<Member>);

struct Member {
    name: &'static str,
    budget: Arc<Budget>,
    floor: AtomicU64,
    reclaimer: Ranked<Option<Weak<dyn Reclaim>>>,
}

impl Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.budget)
    }
}

impl Account {
    /// Says who gives this consumer's memory back.
    pub fn set_reclaimer(&self, reclaimer: Weak<dyn Reclaim>) {
        *self.0.reclaimer.lock() = Some(reclaimer);
    }

    /// Protects `floor` bytes of this consumer from the others.
    pub fn set_floor(&self, floor: ByteCount) {
        self.0.floor.store(floor.0, Ordering::Relaxed);
    }

    /// Bounds this consumer.
    pub fn set_ceiling(&self, ceiling: ByteCount) {
        self.0.budget.set_limit(ceiling);
    }

    /// Bytes charged.
    #[must_use]
    pub fn used(&self) -> ByteCount {
        self.0.budget.charged()
    }

    /// The most that may be charged.
    #[must_use]
    pub fn ceiling(&self) -> ByteCount {
        self.0.budget.limit()
    }

    /// Charges `bytes` if they fit without reclaiming.
    #[must_use]
    pub fn try_charge(&self, bytes: ByteCount) -> bool {
        self.0.budget.try_charge(bytes)
    }

    /// Takes a charge back.
    pub fn uncharge(&self, bytes: ByteCount) {
        self.0.budget.uncharge(bytes);
    }
}

/// See the module's documentation.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::tier::manager::{MemoryManager, Mode};
///
/// let manager = MemoryManager::start(ByteCount::mib(64), Mode::Cooperative)?;
/// let sort_buffer = manager.allocate_temporary(ByteCount::mib(8))?;
/// assert_eq!(manager.stats().used, ByteCount::mib(8));
/// manager.free_temporary(sort_buffer);
/// assert!(manager.allocate_temporary(ByteCount::mib(65)).is_err());
/// # Ok::<(), farheap::Error>(())
/// ```
pub struct MemoryManager {
    shared: Arc<Shared>,
    thread: Ranked<Option<JoinHandle<()>>>,
}

/// Told about pressure; called without locks, must not block.
type OnPressure = dyn Fn(Pressure) + Send + Sync;

struct Shared {
    budget: Arc<Budget>,
    mode: Mode,
    members: Ranked<Vec<Weak<Member>>>,
    temporary: Account,
    spill: Ranked<Option<Arc<dyn Spill>>>,
    on_pressure: Ranked<Option<Arc<OnPressure>>>,
    reclaimed: [AtomicU64; 3],
    direct: AtomicU64,
    background: AtomicU64,
    spilled: AtomicU64,
    deadline_ms: AtomicU64,
    stop: AtomicBool,
    called: AtomicBool,
    bell: (Mutex<()>, Condvar),
}

impl Debug for MemoryManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryManager").field("budget", &self.shared.budget).finish_non_exhaustive()
    }
}

impl MemoryManager {
    /// Starts a manager of `limit` bytes, with its background thread.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread is to be had.
    pub fn start(limit: ByteCount, mode: Mode) -> Result<Arc<MemoryManager>> {
        let budget = Arc::new(Budget::new(limit));
        let temporary = new_member(&budget, "temporary", share(mode, limit, true));
        let shared = Arc::new(Shared {
            members: Ranked::new(Rank::Heap, vec![Arc::downgrade(&temporary)]),
            temporary: Account(temporary),
            budget,
            mode,
            spill: Ranked::new(Rank::Heap, None),
            on_pressure: Ranked::new(Rank::Leaf, None),
            reclaimed: [const { AtomicU64::new(0) }; 3],
            direct: AtomicU64::new(0),
            background: AtomicU64::new(0),
            spilled: AtomicU64::new(0),
            deadline_ms: AtomicU64::new(30_000),
            stop: AtomicBool::new(false),
            called: AtomicBool::new(false),
            bell: (Mutex::new(()), Condvar::new()),
        });
        let seen = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("farheap-reclaim".to_owned())
            .spawn(move || seen.run())
            .map_err(|error| Error::Os {
                call: "clone",
                errno: error.raw_os_error().unwrap_or_default(),
            })?;
        Ok(Arc::new(MemoryManager { shared, thread: Ranked::new(Rank::Leaf, Some(thread)) }))
    }

    /// Opens an account for a consumer.
    ///
    /// # Panics
    /// When there are [`CONSUMERS_MAX`] already.
    #[must_use]
    pub fn join(&self, name: &'static str) -> Account {
        let shared = &self.shared;
        let ceiling = share(shared.mode, shared.budget.limit(), false);
        let member = new_member(&shared.budget, name, ceiling);
        let mut members = shared.members.lock();
        members.retain(|member| member.strong_count() > 0);
        assert!(members.len() < CONSUMERS_MAX, "more than {CONSUMERS_MAX} consumers");
        members.push(Arc::downgrade(&member));
        Account(member)
    }

    /// The budget of a consumer that charges by itself, such as a region.
    #[must_use]
    #[cfg_attr(not(test), expect(dead_code, reason = "for a region that joins"))]
    pub(crate) fn budget_of(account: &Account) -> Arc<Budget> {
        Arc::clone(&account.0.budget)
    }

    /// Says where temporary memory goes that does not fit.
    pub fn set_spill(&self, spill: Arc<dyn Spill>) {
        *self.shared.spill.lock() = Some(spill);
    }

    /// Calls `told` on every event of memory pressure, from the thread that met it.
    pub fn on_pressure(&self, told: impl Fn(Pressure) + Send + Sync + 'static) {
        *self.shared.on_pressure.lock() = Some(Arc::new(told));
    }

    /// How long charges wait for memory before they fail; 30 seconds unless set.
    pub fn set_deadline(&self, deadline: Duration) {
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.shared.deadline_ms.store(ms, Ordering::Relaxed);
    }

    /// Charges `bytes` to `account`, reclaiming where needed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when nothing gave way before the deadline.
    pub fn charge(&self, account: &Account, bytes: ByteCount) -> Result<()> {
        if account.try_charge(bytes) {
            if self.shared.budget.free().0 < self.shared.low() {
                self.shared.call();
            }
            return Ok(());
        }
        let deadline = Duration::from_millis(self.shared.deadline_ms.load(Ordering::Relaxed));
        self.shared.charge_slowly(account, bytes, deadline)
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        self.shared.budget.limit()
    }

    /// Sets the limit, and reclaims what is above a lower one.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the holders when the consumers cannot come below it before
    /// the deadline: too much is pinned. The old limit is then in force again.
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        let shared = &self.shared;
        let old = shared.budget.limit();
        shared.apply_limit(limit);
        let deadline = Duration::from_millis(shared.deadline_ms.load(Ordering::Relaxed));
        let began = Instant::now();
        loop {
            let over = shared.budget.charged().0.saturating_sub(limit.0);
            if over == 0 {
                return Ok(());
            }
            if shared.reclaim(None, ByteCount(over)).0 > 0 {
                continue;
            }
            if began.elapsed() >= deadline {
                shared.apply_limit(old);
                return Err(shared.out_of_memory(ByteCount(over), began.elapsed()));
            }
            std::thread::sleep(RETRY_AFTER);
        }
    }

    /// Allocates `len` bytes of temporary memory, aligned to 4,096; contents are unspecified.
    /// Table pages give way for it. What does not fit even then spills, if a [`Spill`] is set.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when it does not fit; at once when it can never fit.
    pub fn allocate_temporary(&self, len: ByteCount) -> Result<TemporaryMemory> {
        let shared = &self.shared;
        let bytes = len.as_usize().max(1).checked_next_multiple_of(KERNEL_PAGE);
        let bytes = bytes.ok_or(Error::BadRange { reason: "length overflows" })?;
        let len = ByteCount(bytes as u64);
        let account = &shared.temporary;
        let room = account.ceiling().0.saturating_sub(shared.floors().0);
        let patience = if account.used().0.saturating_add(len.0) > room {
            None
        } else if shared.spill.lock().is_some() {
            Some(Duration::from_millis(20))
        } else {
            Some(Duration::from_millis(shared.deadline_ms.load(Ordering::Relaxed)))
        };
        let charged = match patience {
            None => Err(shared.out_of_memory(len, Duration::ZERO)),
            Some(_) if account.try_charge(len) => Ok(()),
            Some(patience) => shared.charge_slowly(account, len, patience),
        };
        match charged {
            Ok(()) => {
                let align = if bytes >= HUGE_PAGE { HUGE_PAGE } else { KERNEL_PAGE };
                let huge = if bytes >= HUGE_PAGE { Huge::Yes } else { Huge::No };
                let mapping =
                    Mapping::reserve(bytes, align, huge).inspect_err(|_| account.uncharge(len))?;
                let addr = mapping.addr();
                Ok(TemporaryMemory { addr, len, home: Home::Local { _mapping: mapping } })
            }
            Err(error) => self.spill_temporary(len).ok_or_else(|| {
                shared.tell(Pressure::Failed { wanted: len });
                error
            }),
        }
    }

    fn spill_temporary(&self, len: ByteCount) -> Option<TemporaryMemory> {
        let spill = self.shared.spill.lock().clone()?;
        let ptr = spill.allocate(len)?;
        self.shared.spilled.fetch_add(len.0, Ordering::Relaxed);
        self.shared.tell(Pressure::Spilled { len });
        let addr = ptr.as_ptr().expose_provenance();
        Some(TemporaryMemory { addr, len, home: Home::Spilled(spill) })
    }

    /// Gives temporary memory back at once.
    pub fn free_temporary(&self, memory: TemporaryMemory) {
        let ptr = memory.as_ptr();
        let TemporaryMemory { len, home, .. } = memory;
        match home {
            Home::Local { _mapping } => {
                drop(_mapping);
                self.shared.temporary.uncharge(len);
            }
            Home::Spilled(spill) => {
                spill.free(ptr, len);
                self.shared.spilled.fetch_sub(len.0, Ordering::Relaxed);
            }
        }
    }

    /// The account that temporary memory is charged to.
    #[must_use]
    pub fn temporary(&self) -> &Account {
        &self.shared.temporary
    }

    /// The figures at the moment.
    #[must_use]
    pub fn stats(&self) -> ManagerStats {
        let shared = &self.shared;
        let members = shared.members.lock();
        let consumers = members.iter().filter_map(Weak::upgrade).map(|member| ConsumerStats {
            name: member.name,
            used: member.budget.charged(),
            used_max: member.budget.charged_max(),
            floor: ByteCount(member.floor.load(Ordering::Relaxed)),
            ceiling: member.budget.limit(),
        });
        ManagerStats {
            limit: shared.budget.limit(),
            used: shared.budget.charged(),
            used_max: shared.budget.charged_max(),
            reclaimed: [0, 1, 2].map(|i| ByteCount(shared.reclaimed[i].load(Ordering::Relaxed))),
            direct: shared.direct.load(Ordering::Relaxed),
            background: shared.background.load(Ordering::Relaxed),
            spilled: ByteCount(shared.spilled.load(Ordering::Relaxed)),
            consumers: consumers.collect(),
        }
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.call();
        let thread = self.thread.lock().take();
        // The last owner may be the background thread's own call into a consumer.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Bytes of free memory below which background reclaim begins.
    fn low(&self) -> u64 {
        (self.budget.limit().0 / 64).min(16 << 20)
    }

    fn apply_limit(&self, limit: ByteCount) {
        self.budget.set_limit(limit);
        let members = self.members.lock();
        for member in members.iter().filter_map(Weak::upgrade) {
            let is_temporary = Arc::ptr_eq(&member, &self.temporary.0);
            member.budget.set_limit(share(self.mode, limit, is_temporary));
        }
    }

    /// The floors of all consumers but temporary memory.
    fn floors(&self) -> ByteCount {
        let members = self.members.lock();
        let floors = members.iter().filter_map(Weak::upgrade);
        ByteCount(floors.map(|member| member.floor.load(Ordering::Relaxed)).sum())
    }

    fn tell(&self, event: Pressure) {
        let told = self.on_pressure.lock().clone();
        if let Some(told) = told {
            told(event);
        }
    }

    fn charge_slowly(&self, account: &Account, bytes: ByteCount, patience: Duration) -> Result<()> {
        self.direct.fetch_add(1, Ordering::Relaxed);
        self.tell(Pressure::Direct { wanted: bytes });
        let began = Instant::now();
        loop {
            let own = account.0.budget.limit().0.saturating_sub(account.used().0);
            // Above its own ceiling a consumer can only take from itself.
            let from = (own < bytes.0).then_some(&account.0);
            let free = self.budget.free().0.min(own);
            let want =
                bytes.0.saturating_sub(free).max(RECLAIM_MIN.min(self.budget.limit().0 / 16));
            let freed = self.reclaim_for(&account.0, from, ByteCount(want));
            if account.try_charge(bytes) {
                return Ok(());
            }
            if began.elapsed() >= patience {
                let error = self.out_of_memory(bytes, began.elapsed());
                self.tell(Pressure::Failed { wanted: bytes });
                return Err(error);
            }
            if freed.0 == 0 {
                std::thread::sleep(RETRY_AFTER);
            }
        }
    }

    fn reclaim_for(
        &self,
        asking: &Arc<Member>,
        only: Option<&Arc<Member>>,
        want: ByteCount,
    ) -> ByteCount {
        if only.is_some() || self.mode != Mode::Cooperative {
            return self.reclaim_from(Some(asking), Some(asking), want);
        }
        self.reclaim_from(Some(asking), None, want)
    }

    fn reclaim(&self, only: Option<&Arc<Member>>, want: ByteCount) -> ByteCount {
        self.reclaim_from(None, only, want)
    }

    /// Asks the consumers for `want` bytes, cheapest first. `asking` may go below its own floor.
    fn reclaim_from(
        &self,
        asking: Option<&Arc<Member>>,
        only: Option<&Arc<Member>>,
        want: ByteCount,
    ) -> ByteCount {
        let mut members: [Option<Asked>; CONSUMERS_MAX] = [const { None }; CONSUMERS_MAX];
        let mut count = 0;
        for member in self.members.lock().iter().filter_map(Weak::upgrade) {
            let reclaimer = member.reclaimer.lock().as_ref().and_then(Weak::upgrade);
            if only.is_none_or(|only| Arc::ptr_eq(only, &member))
                && let Some(reclaimer) = reclaimer
            {
                members[count] = Some((member, reclaimer));
                count += 1;
            }
        }
        let members = &mut members[..count];
        let mut freed = 0;
        for effort in Effort::ALL {
            members.sort_unstable_by_key(|m| m.as_ref().map(|(_, r)| r.cost(effort)));
            for (member, reclaimer) in members.iter().flatten() {
                let is_asking = asking.is_some_and(|asking| Arc::ptr_eq(asking, member));
                let floor = if is_asking { 0 } else { member.floor.load(Ordering::Relaxed) };
                let room = member.budget.charged().0.saturating_sub(floor);
                let ask = room.min(want.0.saturating_sub(freed));
                if ask > 0 {
                    let got = reclaimer.reclaim(ByteCount(ask), effort).0;
                    self.reclaimed[effort as usize].fetch_add(got, Ordering::Relaxed);
                    freed += got;
                }
            }
            if freed >= want.0 {
                break;
            }
        }
        ByteCount(freed)
    }

    fn out_of_memory(&self, wanted: ByteCount, waited: Duration) -> Error {
        let mut consumers = Vec::new();
        let members: Vec<_> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        for member in members {
            let held = member.reclaimer.lock().as_ref().and_then(Weak::upgrade);
            let held = held.map(|r| r.describe_held()).unwrap_or_default();
            consumers.push(format!("{} {}{held}", member.name, member.budget.charged()));
        }
        Error::OutOfMemory {
            wanted,
            used: self.budget.charged(),
            limit: self.budget.limit(),
            consumers: consumers.join(", "),
            waited,
        }
    }

    // The background thread.

    fn call(&self) {
        if !self.called.swap(true, Ordering::AcqRel) {
            let _held = self.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.1.notify_one();
        }
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Acquire) {
            {
                let held = self.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
                if !self.called.load(Ordering::Acquire) {
                    drop(self.bell.1.wait_timeout(held, LOOK_EVERY));
                }
            }
            self.called.store(false, Ordering::Release);
            let (low, free) = (self.low(), self.budget.free().0);
            if free < low && self.mode == Mode::Cooperative {
                self.background.fetch_add(1, Ordering::Relaxed);
                let (used, limit) = (self.budget.charged(), self.budget.limit());
                self.tell(Pressure::Low { used, limit });
                self.reclaim(None, ByteCount(2 * low - free));
            }
        }
    }
}

/// A consumer and who gives its memory back.
type Asked = (Arc<Member>, Arc<dyn Reclaim>);

fn new_member(budget: &Arc<Budget>, name: &'static str, ceiling: ByteCount) -> Arc<Member> {
    Arc::new(Member {
        name,
        budget: Arc::new(Budget::under(Arc::clone(budget), ceiling)),
        floor: AtomicU64::new(0),
        reclaimer: Ranked::new(Rank::Space, None),
    })
}

/// The ceiling of a consumer.
fn share(mode: Mode, limit: ByteCount, temporary: bool) -> ByteCount {
    match mode {
        Mode::Cooperative => limit,
        Mode::Partitioned { temporary_pct } => {
            let part = (limit.0 as u128 * u128::from(temporary_pct) / 100) as u64;
            ByteCount(if temporary { part } else { limit.0.saturating_sub(part) })
        }
    }
}

/// Temporary memory of a query; give it back by [`MemoryManager::free_temporary`].
#[must_use = "dropping it without `free_temporary` leaves it charged"]
pub struct TemporaryMemory {
    /// As a number, so that the memory can be handed to another thread.
    addr: usize,
    len: ByteCount,
    home: Home,
}

enum Home {
    /// Unmapped when dropped.
    Local {
        _mapping: Mapping,
    },
    Spilled(Arc<dyn Spill>),
}

impl TemporaryMemory {
    /// First byte.
    #[must_use]
    pub fn as_ptr(&self) -> NonNull<u8> {
        NonNull::new(std::ptr::with_exposed_provenance_mut(self.addr))
            .expect("memory is never at zero")
    }

    /// Bytes, rounded up to whole 4,096.
    #[must_use]
    pub fn len(&self) -> ByteCount {
        self.len
    }

    /// Never: there is at least one page.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Whether it is memory beyond the limit.
    #[must_use]
    pub fn is_spilled(&self) -> bool {
        matches!(self.home, Home::Spilled(_))
    }
}

impl Debug for TemporaryMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TemporaryMemory({:#x}, {}, spilled: {})", self.addr, self.len, self.is_spilled())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cache that gives all it has.
    struct Cache {
        account: Account,
        held: AtomicU64,
        effort: Effort,
    }

    impl Reclaim for Cache {
        fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount {
            if effort < self.effort {
                return ByteCount::ZERO;
            }
            let give = want.0.min(self.held.load(Ordering::Relaxed));
            self.held.fetch_sub(give, Ordering::Relaxed);
            self.account.uncharge(ByteCount(give));
            ByteCount(give)
        }
    }

    fn cache(manager: &MemoryManager, effort: Effort, bytes: ByteCount) -> Arc<Cache> {
        let account = manager.join("cache");
        manager.charge(&account, bytes).expect("fits");
        let held = AtomicU64::new(bytes.0);
        let cache = Arc::new(Cache { account: account.clone(), held, effort });
        let weak: Weak<Cache> = Arc::downgrade(&cache);
        account.set_reclaimer(weak);
        cache
    }

    fn start(mib: u64, mode: Mode) -> Arc<MemoryManager> {
        let manager = MemoryManager::start(ByteCount::mib(mib), mode).expect("starts");
        manager.set_deadline(Duration::from_millis(20));
        manager
    }

    #[test]
    fn the_cheapest_consumer_gives_way_first() {
        let manager = start(64, Mode::Cooperative);
        let dear = cache(&manager, Effort::Write, ByteCount::mib(30));
        let cheap = cache(&manager, Effort::Clean, ByteCount::mib(30));
        let memory = manager.allocate_temporary(ByteCount::mib(24)).expect("cheap gives way");
        assert!(cheap.account.used() <= ByteCount::mib(10));
        assert_eq!(dear.account.used(), ByteCount::mib(30));
        assert!(manager.stats().used <= manager.limit());
        manager.free_temporary(memory);
        assert_eq!(manager.temporary().used(), ByteCount::ZERO);
    }

    #[test]
    fn a_floor_is_kept_from_others() {
        let manager = start(64, Mode::Cooperative);
        let cache = cache(&manager, Effort::Clean, ByteCount::mib(60));
        cache.account.set_floor(ByteCount::mib(40));
        let error = manager.allocate_temporary(ByteCount::mib(30)).expect_err("floor");
        assert!(error.to_string().contains("cache"), "{error}");
        assert!(cache.account.used() >= ByteCount::mib(40));
        let memory = manager.allocate_temporary(ByteCount::mib(20)).expect("above the floor");
        manager.free_temporary(memory);
    }

    #[test]
    fn partitions_do_not_give_way_to_each_other() {
        let manager = start(64, Mode::Partitioned { temporary_pct: 50 });
        let account = manager.join("table");
        assert!(account.try_charge(ByteCount::mib(32)));
        assert!(!account.try_charge(ByteCount(1)));
        assert!(manager.allocate_temporary(ByteCount::mib(33)).is_err());
        let memory = manager.allocate_temporary(ByteCount::mib(32)).expect("its own half");
        manager.free_temporary(memory);
    }

    #[test]
    fn a_limit_below_what_is_pinned_is_refused_and_the_old_one_stays() {
        let manager = start(64, Mode::Cooperative);
        let pinned = manager.join("pinned");
        manager.charge(&pinned, ByteCount::mib(20)).expect("fits");
        let _cache = cache(&manager, Effort::Clean, ByteCount::mib(30));
        let error = manager.set_limit(ByteCount::mib(10)).expect_err("20 MiB are pinned");
        assert!(error.to_string().contains("pinned 20"), "{error}");
        assert_eq!(manager.limit(), ByteCount::mib(64));
        manager.set_limit(ByteCount::mib(30)).expect("the cache gives way");
        assert!(manager.stats().used <= ByteCount::mib(30));
    }

    /// Mappings that are not charged, as a region's would be evicted.
    struct Elsewhere(Mutex<Vec<Mapping>>);

    impl Spill for Elsewhere {
        fn allocate(&self, len: ByteCount) -> Option<NonNull<u8>> {
            let mapping = Mapping::reserve(len.as_usize(), KERNEL_PAGE, Huge::No).ok()?;
            let ptr = NonNull::new(mapping.as_ptr());
            self.0.lock().expect("lock").push(mapping);
            ptr
        }
        fn free(&self, ptr: NonNull<u8>, _len: ByteCount) {
            self.0.lock().expect("lock").retain(|mapping| mapping.as_ptr() != ptr.as_ptr());
        }
    }

    #[test]
    fn what_does_not_fit_spills_and_is_told() {
        let manager = start(16, Mode::Cooperative);
        let told = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&told);
        manager.on_pressure(move |event| {
            if let Pressure::Spilled { len } = event {
                seen.fetch_add(len.0, Ordering::Relaxed);
            }
        });
        let elsewhere = Arc::new(Elsewhere(Mutex::new(Vec::new())));
        manager.set_spill(Arc::clone(&elsewhere) as Arc<dyn Spill>);
        let memory = manager.allocate_temporary(ByteCount::mib(32)).expect("spills");
        assert!(memory.is_spilled());
        assert_eq!(told.load(Ordering::Relaxed), 32 << 20);
        assert_eq!(manager.stats().spilled, ByteCount::mib(32));
        manager.free_temporary(memory);
        assert!(elsewhere.0.lock().expect("lock").is_empty());
    }

    #[test]
    fn a_budget_of_a_consumer_is_part_of_the_limit() {
        let manager = start(16, Mode::Cooperative);
        let account = manager.join("region");
        let budget = MemoryManager::budget_of(&account);
        assert!(budget.try_charge(ByteCount::mib(10)));
        assert_eq!(manager.stats().used, ByteCount::mib(10));
        assert!(!manager.temporary().try_charge(ByteCount::mib(7)));
    }
}
