//! The memory manager: one hard limit over table pages, far pages and temporary memory.
//!
//! Consumers [`join`](MemoryManager::join) a [`MemoryManager`] and get an [`Account`], their part
//! of the one budget. A charge that does not fit makes the manager ask the consumers'
//! [`Reclaim`]ers for bytes, cheapest first (`crate::limit::admission` is the protocol). Temporary memory is
//! handed out by [`MemoryManager::allocate_temporary`]; what does not fit even after reclaiming
//! spills to a [`Spill`], such as a far heap. Uses `sys`; `pool` and `region` join it from above.
//!
//! ```text
//!   pool pages     far pages, frames   temporary memory   host's caches   counted memory
//!        |                |                   |                 |               |
//!     Account          Account             Account           Account         Account
//!        '----------------'---------.---------'-----------------'---------------'
//!                              one Budget: charged <= limit
//!                                   |
//!      charge fits: two atomic adds | does not fit: spare -> clean -> written, floors kept
//!      free < low watermark: the background thread reclaims up to the high one
//! ```
//!
//! # Invariants
//! 1. Bytes are charged before they have memory: what is charged never exceeds the limit unless
//!    the limit was lowered, and then only until reclaiming has caught up; or memory that exists
//!    already was counted ([`Account::set_used`]).
//! 2. Reclaimers and the pressure callback are called without any lock of the manager held.
//! 3. A reclaimer that charges, allocates or resizes fails at once: it cannot wait for itself.

mod account;
mod arena;
mod reclaim;
mod report;
mod temporary;
#[cfg(test)]
mod tests;

pub use crate::limit::donation::HandOver;
pub use crate::limit::manager::account::{Account, Effort, Reclaim};
pub use crate::limit::manager::arena::Temporary;
pub use crate::limit::manager::report::{ConsumerStats, ManagerStats, Mode, Pressure};
pub use crate::limit::manager::temporary::{Spill, TemporaryMemory};

use crate::base::deadline::Deadline;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::limit::admission::{self, Turn};
use crate::limit::budget::Budget;
use crate::limit::manager::account::Member;
use crate::sys::fork::Born;
use crate::sys::probe::Memory;
use crate::sys::signals::SignalsBlocked;
use std::fmt;
use std::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Most consumers of one manager.
pub const CONSUMERS_MAX: usize = 16;

/// Smallest limit of a manager.
pub const LIMIT_MIN: ByteCount = ByteCount::mib(1);

/// How often the background thread looks without being called.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a charge that found nothing to reclaim waits before it tries again.
const RETRY_AFTER: Duration = Duration::from_micros(200);

/// How long nothing is freed before a charge that can be done without gives up.
const BRIEFLY: Duration = Duration::from_millis(1);

/// See the module's documentation.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::limit::manager::{MemoryManager, Mode};
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

/// What the manager, its accounts and its thread share.
struct Shared {
    budget: Arc<Budget>,
    mode: Mode,
    /// Held while the limit, a floor or a part changes, and while shares are worked out and applied:
    /// who comes last knows what the others knew.
    shares: Ranked<()>,
    members: Ranked<Vec<Weak<Member>>>,
    temporary: Account,
    spill: Ranked<Option<Weak<dyn Spill>>>,
    on_pressure: OnceLock<Box<OnPressure>>,
    gathering: Turn,
    resizing: Turn,
    /// The kernel has refused to move pages. Each try may cost address space, so there are no more:
    /// consumers drop their pages instead.
    moves_fail: AtomicBool,
    reclaimed: [AtomicU64; 3],
    direct: AtomicU64,
    background: AtomicU64,
    failed: AtomicU64,
    spilled: AtomicU64,
    /// The most that its thread has seen all consumers have.
    held_max: AtomicU64,
    deadline_ms: AtomicU64,
    born: Born,
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
    /// [`Error::LimitTooSmall`] below [`LIMIT_MIN`]; [`Error::Config`] for a part of more than
    /// 100 %; [`Error::Os`] when no thread is to be had.
    pub fn start(limit: ByteCount, mode: Mode) -> Result<Arc<MemoryManager>> {
        let _ours = keep_local();
        if limit < LIMIT_MIN {
            return Err(Error::LimitTooSmall { limit, minimum: LIMIT_MIN });
        }
        if let Mode::Partitioned { temporary_pct } = mode
            && temporary_pct > 100
        {
            let reason = format!("{temporary_pct} % is more than there is");
            return Err(Error::Config { key: "temporary_pct".to_owned(), reason });
        }
        Memory::warn_of(limit);
        let budget = Arc::new(Budget::new(limit));
        let shared = Arc::new_cyclic(|weak| {
            let share = match mode {
                Mode::Cooperative => limit,
                Mode::Partitioned { temporary_pct } => part_of(limit, temporary_pct.into()),
            };
            let temporary = Member::new(&budget, "temporary", share, Weak::clone(weak));
            Shared {
                members: Ranked::new(Rank::Consumers, vec![Arc::downgrade(&temporary)]),
                temporary: Account(temporary),
                budget,
                mode,
                shares: Ranked::new(Rank::Shares, ()),
                spill: Ranked::new(Rank::Leaf, None),
                on_pressure: OnceLock::new(),
                gathering: Turn::new(),
                resizing: Turn::new(),
                moves_fail: AtomicBool::new(false),
                reclaimed: [const { AtomicU64::new(0) }; 3],
                direct: AtomicU64::new(0),
                background: AtomicU64::new(0),
                failed: AtomicU64::new(0),
                spilled: AtomicU64::new(0),
                held_max: AtomicU64::new(0),
                deadline_ms: AtomicU64::new(30_000),
                born: Born::here(),
                stop: AtomicBool::new(false),
                called: AtomicBool::new(false),
                bell: (Mutex::new(()), Condvar::new()),
            }
        });
        let seen = Arc::clone(&shared);
        let _blocked = SignalsBlocked::new();
        let thread = std::thread::Builder::new()
            .name("farheap-reclaim".to_owned())
            .spawn(move || seen.run())
            .map_err(|error| Error::Os {
                call: "clone",
                errno: error.raw_os_error().unwrap_or_default(),
            })?;
        Ok(Arc::new(MemoryManager { shared, thread: Ranked::new(Rank::Leaf, Some(thread)) }))
    }

    /// Opens an account for a consumer. The name is for messages and statistics.
    ///
    /// # Errors
    /// [`Error::TooManyConsumers`] when there are [`CONSUMERS_MAX`] already.
    pub fn join(&self, name: &str) -> Result<Account> {
        let _ours = keep_local();
        let shared = &self.shared;
        // Until it is in the list, nobody would tell it of another share.
        let _shares = shared.shares.lock();
        let share = shared.common_share();
        let member = Member::new(&shared.budget, name, share, Arc::downgrade(shared));
        let mut members = shared.members.lock();
        members.retain(|member| member.strong_count() > 0);
        if members.len() >= CONSUMERS_MAX {
            let name = name.to_owned();
            return Err(Error::TooManyConsumers { name, most: CONSUMERS_MAX });
        }
        members.push(Arc::downgrade(&member));
        Ok(Account(member))
    }

    /// Calls `told` on every event of memory pressure, from the thread that met it, which holds no
    /// lock of this crate's manager. It must not block, and is for the manager's whole life.
    ///
    /// # Errors
    /// [`Error::Config`] when there is a callback already.
    pub fn on_pressure(&self, told: impl Fn(Pressure) + Send + Sync + 'static) -> Result<()> {
        self.shared.on_pressure.set(Box::new(told)).map_err(|_| Error::Config {
            key: "on_pressure".to_owned(),
            reason: "a callback is registered already".to_owned(),
        })
    }

    /// How long charges wait for memory before they fail; 30 seconds unless set. Time in which the
    /// process is stopped does not count.
    pub fn set_deadline(&self, deadline: Duration) {
        let ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        self.shared.deadline_ms.store(ms, Ordering::Relaxed);
    }

    /// Charges `bytes` to `account`, reclaiming where needed.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the consumers, the largest first: when nothing gave way
    /// before the deadline, or at once when `bytes` are more than the account's ceiling, when they
    /// are more than is left of temporary memory's part, or when called from a reclaimer. [`Error::Forked`] in a child of the manager's process.
    pub fn charge(&self, account: &Account, bytes: ByteCount) -> Result<()> {
        if account.try_charge(bytes) {
            self.shared.call_if_low();
            return Ok(());
        }
        if self.shared.is_foreign() {
            return Err(Error::Forked { what: "a memory manager" });
        }
        self.shared.charge_slowly(account, bytes, None).inspect_err(|_| self.shared.fail(bytes))
    }

    /// As [`charge`](Self::charge), for what can be done without: gives up when nothing was freed for
    /// [`BRIEFLY`], and nobody is told of a failure.
    pub(crate) fn charge_briefly(&self, account: &Account, bytes: ByteCount) -> bool {
        if account.try_charge(bytes) {
            self.shared.call_if_low();
            return true;
        }
        !self.shared.is_foreign() && self.shared.claim(account, bytes, Some(BRIEFLY))
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        self.shared.budget.limit()
    }

    /// How memory is divided.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.shared.mode
    }

    /// Sets the limit, and reclaims what is above a lower one. One resize at a time: others wait.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the holders when the consumers cannot come below it before
    /// the deadline, because too much is pinned or protected; [`Error::LimitTooSmall`] below
    /// [`LIMIT_MIN`] or the floors. The old limit is then in force.
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        let shared = &self.shared;
        let began = Instant::now();
        let mut deadline = Deadline::new(shared.deadline());
        let turn = loop {
            match shared.resizing.take() {
                Some(turn) => break turn,
                None if deadline.is_over() || Shared::is_reclaiming() => {
                    return Err(shared.out_of_memory(limit, began.elapsed()));
                }
                // Another thread resizes: it has a deadline too.
                None => std::thread::sleep(RETRY_AFTER),
            }
        };
        let apply = |limit| shared.apply_limit(limit);
        let reclaim = |over| shared.reclaim(over);
        let patient = shared.patience(None);
        let resized = admission::resize(&shared.budget, limit, apply, reclaim, patient);
        drop(turn);
        if resized? {
            return Ok(());
        }
        let over = shared.budget.charged().0.saturating_sub(limit.0);
        Err(shared.out_of_memory(ByteCount(over), began.elapsed()))
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
        let consumers = shared.each_member().map(|member| ConsumerStats {
            name: Arc::clone(&member.name),
            used: member.budget.charged(),
            used_max: member.budget.charged_max(),
            held: member.held(),
            miscounted: ByteCount(member.miscounted.load(Ordering::Relaxed)),
            metadata: member
                .reclaimer()
                .and_then(|reclaimer| shared.guarded(&member, || reclaimer.metadata()))
                .unwrap_or_default(),
            reclaimed: ByteCount(member.gave.load(Ordering::Relaxed)),
            floor: member.floor(),
            ceiling: member.budget.limit(),
        });
        ManagerStats {
            limit: shared.budget.limit(),
            used: shared.budget.charged(),
            used_max: shared.budget.charged_max(),
            held: shared.held(),
            held_max: ByteCount(shared.held_max.load(Ordering::Relaxed)).max(shared.held()),
            reclaimed: [0, 1, 2].map(|i| ByteCount(shared.reclaimed[i].load(Ordering::Relaxed))),
            direct: shared.direct.load(Ordering::Relaxed),
            background: shared.background.load(Ordering::Relaxed),
            failed: shared.failed.load(Ordering::Relaxed),
            spilled: ByteCount(shared.spilled.load(Ordering::Relaxed)),
            consumers: consumers.collect(),
        }
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().take();
        if self.shared.is_foreign() {
            std::mem::forget(thread); // The parent's.
            return;
        }
        self.shared.stop.store(true, Ordering::Release);
        self.shared.call();
        // The last owner may be the background thread's own call into a consumer.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Bytes of free memory below which background reclaim begins; it goes on up to twice that.
    fn low(&self) -> u64 {
        const MOST: u64 = 16 << 20;
        (self.budget.limit().0 / 64).min(MOST)
    }

    fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    /// Whether this process is a forked child of the manager's.
    fn is_foreign(&self) -> bool {
        !self.born.is_here()
    }

    /// The consumers that have not left.
    fn each_member(&self) -> impl Iterator<Item = Arc<Member>> + use<> {
        let mut members: [Option<Arc<Member>>; CONSUMERS_MAX] = [const { None }; CONSUMERS_MAX];
        let live = self.members.lock();
        for (slot, member) in members.iter_mut().zip(live.iter().filter_map(Weak::upgrade)) {
            *slot = Some(member);
        }
        members.into_iter().flatten()
    }

    /// Puts a limit in force.
    ///
    /// # Errors
    /// [`Error::LimitTooSmall`] below [`LIMIT_MIN`] or the floors.
    fn apply_limit(&self, limit: ByteCount) -> Result<()> {
        let shares = self.shares.lock();
        let minimum = LIMIT_MIN.max(self.floors());
        if limit < minimum {
            return Err(Error::LimitTooSmall { limit, minimum });
        }
        self.budget.set_limit(limit);
        drop(shares);
        self.apply_shares();
        Ok(())
    }

    /// Gives every consumer the share of the limit that its ceiling and the mode allow.
    fn apply_shares(&self) {
        let shares = self.shares.lock();
        let (limit, common) = (self.budget.limit(), self.common_share());
        let mut changed: [Option<Arc<Member>>; CONSUMERS_MAX] = [const { None }; CONSUMERS_MAX];
        for (slot, member) in changed.iter_mut().zip(self.each_member()) {
            let is_other = member.set_share(match (self.mode, member.part()) {
                // Nobody can take it back, so it may not take what others' floors keep.
                (Mode::Cooperative, _) if self.is_temporary(&member) => {
                    ByteCount(limit.0.saturating_sub(self.floors_of_others(&self.temporary).0))
                }
                (Mode::Cooperative, _) => limit,
                (Mode::Partitioned { temporary_pct }, _) if self.is_temporary(&member) => {
                    part_of(limit, temporary_pct.into())
                }
                (Mode::Partitioned { .. }, Some(part)) => part_of(limit, part),
                (Mode::Partitioned { .. }, None) => common,
            });
            *slot = is_other.then_some(member);
        }
        drop(shares);
        changed.iter().flatten().for_each(|member| self.tell_ceiling(member));
    }

    /// Tells a consumer its ceiling, once more where it has changed meanwhile: of threads that tell
    /// different ones, the last tells what is in force.
    fn tell_ceiling(&self, member: &Arc<Member>) {
        let Some(reclaimer) = member.reclaimer() else { return };
        loop {
            let ceiling = member.budget.limit();
            let told = self.guarded(member, || reclaimer.ceiling_changed(ceiling));
            if told.is_none() || member.budget.limit() == ceiling {
                return;
            }
        }
    }

    fn is_temporary(&self, member: &Arc<Member>) -> bool {
        Arc::ptr_eq(member, &self.temporary.0)
    }

    /// Percent of the limit that belong to somebody, temporary memory included.
    fn parts(&self) -> u64 {
        let Mode::Partitioned { temporary_pct } = self.mode else { return 0 };
        let parts: u64 = self.each_member().filter_map(|member| member.part()).sum();
        parts + u64::from(temporary_pct)
    }

    /// What consumers without a part of their own may have.
    fn common_share(&self) -> ByteCount {
        let limit = self.budget.limit();
        ByteCount(limit.0.saturating_sub(part_of(limit, self.parts()).0))
    }

    /// The floors of all consumers.
    fn floors(&self) -> ByteCount {
        let floors = self.each_member().map(|member| member.floor().0);
        ByteCount(floors.fold(0, u64::saturating_add))
    }

    /// What nobody but the others can have.
    fn floors_of_others(&self, account: &Account) -> ByteCount {
        ByteCount(self.floors().0.saturating_sub(account.floor().0))
    }

    fn tell(&self, event: Pressure) {
        if let Some(told) = self.on_pressure.get() {
            told(event);
        }
    }

    /// A caller gets an error.
    fn fail(&self, wanted: ByteCount) {
        self.failed.fetch_add(1, Ordering::Relaxed);
        self.tell(Pressure::Failed { wanted });
    }

    fn out_of_memory(&self, wanted: ByteCount, waited: Duration) -> Error {
        let mut members: Vec<_> = self.each_member().collect();
        members.sort_by_key(|member| std::cmp::Reverse(member.budget.charged()));
        let consumers: Vec<_> = members
            .iter()
            .map(|member| {
                let held = member
                    .reclaimer()
                    .and_then(|reclaimer| self.guarded(member, || reclaimer.describe_held()))
                    .unwrap_or_default();
                let part = match self.has_part(member) {
                    true => format!(" of its part of {}", member.budget.limit()),
                    false => String::new(),
                };
                format!("{} {}{part}{held}", member.name, member.budget.charged())
            })
            .collect();
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
        if self.called.load(Ordering::Relaxed) {
            return; // A call that is missed so is made up for within `LOOK_EVERY`.
        }
        // A region's evictor calls as well, and must find the bell free.
        let _blocked = SignalsBlocked::new();
        if !self.called.swap(true, Ordering::AcqRel) {
            let _held = self.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.1.notify_one();
        }
    }

    fn call_if_low(&self) {
        if self.budget.own_free().0 < self.low() {
            self.call();
        }
    }

    fn run(&self) {
        SignalsBlocked::for_good();
        let mut pause_until = None;
        let mut over = Over::default();
        while !self.stop.load(Ordering::Acquire) {
            let _ours = keep_local(); // Anew each time: a heap may have started meanwhile.
            {
                let held = self.bell.0.lock().unwrap_or_else(PoisonError::into_inner);
                if !self.called.load(Ordering::Acquire) {
                    drop(self.bell.1.wait_timeout(held, LOOK_EVERY));
                }
            }
            self.called.store(false, Ordering::Release);
            self.look_at_held(&mut over);
            self.enforce_ceilings();
            if self.mode != Mode::Cooperative {
                continue;
            }
            self.serve_asks();
            // Where nothing can be had, looking again at each charge would be all this does.
            let now = Instant::now();
            if pause_until.is_none_or(|until| now >= until) {
                let found = self.keep_low();
                pause_until = (!found).then_some(now + LOOK_EVERY);
            }
        }
    }

    /// Bytes that all consumers have.
    fn held(&self) -> ByteCount {
        let more = self.each_member().map(|member| member.uncharged.load(Ordering::Relaxed));
        ByteCount(self.budget.charged().0 + more.sum::<u64>())
    }

    /// Tells, once, that consumers have been above the limit for a while.
    fn look_at_held(&self, over: &mut Over) {
        let (held, limit) = (self.held(), self.budget.limit());
        self.held_max.fetch_max(held.0, Ordering::Relaxed);
        if !over.look(held, limit, Instant::now()) {
            return;
        }
        // What can be evicted would have been.
        let of = |member: &Arc<Member>| (member.is_counted.load(Ordering::Relaxed), member.held());
        let Some(most) = self.each_member().max_by_key(of) else { return };
        let more = ByteCount(held.0 - limit.0);
        let _ = crate::sys::stderr::send(
            format!(
                "farheap: memory manager: {held} are in use, {more} above the limit of {limit}: \
                 {} has {}, which cannot be evicted (said again only after it was below the limit)\n",
                most.name,
                most.held()
            )
            .as_bytes(),
        );
        self.tell(Pressure::Over { held, limit, consumer: Arc::clone(&most.name) });
    }

    /// Reclaims up to the high watermark when less than the low one is free. Returns `false` when
    /// there was nothing to be had.
    fn keep_low(&self) -> bool {
        let (low, free) = (self.low(), self.budget.own_free().0);
        if free >= low {
            return true;
        }
        self.background.fetch_add(1, Ordering::Relaxed);
        let (used, limit) = (self.budget.charged(), self.budget.limit());
        self.tell(Pressure::Low { used, limit });
        let over = used.0.saturating_sub(limit.0);
        self.reclaim(ByteCount(over + 2 * low - free)).0 > 0
    }
}

/// Whether consumers are above the limit, and whether that was told.
#[derive(Debug, Default)]
struct Over {
    since: Option<Instant>,
    told: bool,
}

impl Over {
    /// Takes a look; returns whether it is time to tell.
    fn look(&mut self, held: ByteCount, limit: ByteCount, now: Instant) -> bool {
        /// How long others have to give way to what was counted before anybody is told.
        const LAST: Duration = Duration::from_secs(1);
        /// Far enough below the limit that it is another time: 1/16 of it.
        const PART: u64 = 16;
        if held <= limit {
            self.since = None;
            self.told &= held.0 > limit.0 - limit.0 / PART;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        let tells = !self.told && now.saturating_duration_since(since) >= LAST;
        self.told |= tells;
        tells
    }
}

/// So many percent of the limit.
fn part_of(limit: ByteCount, pct: u64) -> ByteCount {
    ByteCount((limit.0 as u128 * u128::from(pct) / 100) as u64)
}
