//! The memory manager: one hard limit over table pages, far pages and temporary memory.
//!
//! Consumers [`join`](MemoryManager::join) a [`MemoryManager`] and get an [`Account`], their part
//! of the one budget. A charge that does not fit makes the manager ask the consumers'
//! [`Reclaim`]ers for bytes, cheapest first (`crate::limit::admission` is the protocol). Temporary memory is
//! handed out by [`MemoryManager::allocate_temporary`]; what does not fit even after reclaiming
//! spills to a far region. Uses `sys`; `pool` and `region` join it from above.
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
//!    the limit was lowered, and then only until reclaiming has caught up. Memory that exists already
//!    ([`Account::set_used`]) is charged as far as there is room beside what others' floors keep.
//! 2. Reclaimers and the pressure callback are called without any lock of the manager held.
//! 3. A reclaimer that charges, allocates or resizes fails at once: it cannot wait for itself.

mod account;
mod consumer;
mod counted;
mod member;
mod reclaim;
mod report;
mod shared;
mod spill;
mod stats;
mod temporary;
#[cfg(test)]
mod tests;

#[doc(hidden)]
pub use crate::limit::donation::Donation;
pub use crate::limit::manager::account::Account;
pub use crate::limit::manager::consumer::{Reclaim, ReclaimCost};
pub use crate::limit::manager::report::Pressure;
pub(crate) use crate::limit::manager::spill::Spill;
pub use crate::limit::manager::stats::{ConsumerStats, ManagerStats};
pub use crate::limit::manager::temporary::TemporaryMemory;

use crate::base::deadline::Deadline;
use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::limit::admission;
use crate::limit::budget::Budget;
use crate::limit::manager::member::Member;
use crate::limit::manager::shared::{
    BRIEFLY, Bell, CONSUMERS_MAX, Callbacks, LIMIT_MIN, ManagerState, RETRY_AFTER, Turns,
};
use crate::limit::manager::stats::ManagerCounts;
use crate::sys::fork::Born;
use crate::sys::messages::Deliver;
use crate::sys::probe::Memory;
use crate::sys::signals::SignalsBlocked;
use crate::sys::thread;
use std::fmt::{self, Debug};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Purpose of the memory that a lower limit has not found.
const NEW_LIMIT: &str = "the new limit";

/// See the module's documentation.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::manager::MemoryManager;
///
/// let manager = MemoryManager::start(ByteCount::mib(64))?;
/// let sort_buffer = manager.allocate_temporary(ByteCount::mib(8))?;
/// assert_eq!(manager.stats().used_bytes, ByteCount::mib(8));
/// drop(sort_buffer);
/// assert!(manager.allocate_temporary(ByteCount::mib(65)).is_err());
/// # Ok::<(), farheap::Error>(())
/// ```
pub struct MemoryManager {
    shared: Arc<ManagerState>,
    temporary: Account,
    thread: Ranked<Option<JoinHandle<()>>>,
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
    /// [`Error::LimitTooSmall`] below 1 MiB; [`Error::Os`] when no thread can be started.
    pub fn start(limit: ByteCount) -> Result<Arc<MemoryManager>> {
        let _delivered = Deliver::new();
        let _ours = keep_local();
        if limit < LIMIT_MIN {
            return Err(Error::LimitTooSmall { limit, minimum: LIMIT_MIN });
        }
        Memory::warn_of(limit);
        let budget = Arc::new(Budget::new(limit));
        let temporary = Member::new(&budget, "temporary", limit);
        let shared = Arc::new(ManagerState {
            members: Ranked::new(Rank::Consumers, vec![Arc::downgrade(&temporary)]),
            temporary,
            budget,
            shares: Ranked::new(Rank::Shares, ()),
            host: Callbacks { spill: Ranked::new(Rank::Leaf, None), on_pressure: OnceLock::new() },
            turns: Turns::default(),
            moves_fail: AtomicBool::new(false),
            counts: ManagerCounts::default(),
            deadline_ms: AtomicU64::new(30_000),
            born: Born::here(),
            bell: Bell::default(),
        });
        let temporary = Account::new(Arc::clone(&shared.temporary), &shared);
        let seen = Arc::clone(&shared);
        let _blocked = SignalsBlocked::new();
        let thread = thread::spawn("farheap-reclaim", move || seen.run())?;
        let thread = Ranked::new(Rank::Leaf, Some(thread));
        Ok(Arc::new(MemoryManager { shared, temporary, thread }))
    }

    /// Opens an account for a consumer. The name is for messages and statistics.
    ///
    /// # Errors
    /// [`Error::TooManyConsumers`] when there are 16 already.
    pub fn join(&self, name: &str) -> Result<Account> {
        let _ours = keep_local();
        let shared = &self.shared;
        // Until it is in the list, nobody would tell it of another share.
        let _shares = shared.shares.lock();
        let member = Member::new(&shared.budget, name, shared.budget.limit());
        let mut members = shared.members.lock();
        members.retain(|member| member.strong_count() > 0);
        if members.len() >= CONSUMERS_MAX {
            let name = name.to_owned();
            return Err(Error::TooManyConsumers { name, most: CONSUMERS_MAX });
        }
        members.push(Arc::downgrade(&member));
        Ok(Account::new(member, shared))
    }

    /// True if this process made the manager, and not the one that it was forked from.
    #[must_use]
    pub fn is_here(&self) -> bool {
        !self.shared.is_foreign()
    }

    /// Calls `told` on every event of memory pressure, from the thread that met it, which holds no
    /// lock of this crate's manager. It must not block, and is for the manager's whole life.
    ///
    /// # Errors
    /// [`Error::Config`] when there is a callback already.
    pub fn on_pressure(&self, told: impl Fn(Pressure) + Send + Sync + 'static) -> Result<()> {
        let is_set = self.shared.host.on_pressure.set(Box::new(told));
        is_set.map_err(|_| Error::config("on_pressure", "a callback is registered already"))
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
    /// before the deadline, or at once when `bytes` are more than the account's ceiling or when called
    /// from a reclaimer. [`Error::Forked`] in a child of the manager's process.
    pub fn charge(&self, account: &Account, bytes: ByteCount) -> Result<()> {
        self.charge_for(account, bytes, false)
    }

    /// As [`charge`](Self::charge); a brief one gives up when nothing was freed for [`BRIEFLY`].
    pub(crate) fn charge_for(
        &self,
        account: &Account,
        bytes: ByteCount,
        is_brief: bool,
    ) -> Result<()> {
        self.shared.help_claim(bytes);
        if account.try_charge(bytes) {
            self.shared.call_if_low();
            return Ok(());
        }
        if self.shared.is_foreign() {
            return Err(Error::Forked { what: "a memory manager" });
        }
        self.shared
            .charge_slowly(account.member(), bytes, is_brief.then_some(BRIEFLY))
            .inspect_err(|_| self.shared.fail(bytes))
    }

    /// As [`charge`](Self::charge), for what can be done without: gives up when nothing was freed for
    /// [`BRIEFLY`], and nobody is told of a failure.
    pub(crate) fn charge_briefly(&self, account: &Account, bytes: ByteCount) -> bool {
        if account.try_charge(bytes) {
            self.shared.call_if_low();
            return true;
        }
        !self.shared.is_foreign() && self.shared.claim(account.member(), bytes, Some(BRIEFLY))
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> ByteCount {
        self.shared.budget.limit()
    }

    /// Sets the limit, and reclaims what is above a lower one. One resize at a time: others wait.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming the holders when the consumers cannot come below it before
    /// the deadline, because too much is pinned or protected; [`Error::LimitTooSmall`] below
    /// 1 MiB or the floors. The old limit is then in force.
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        let shared = &self.shared;
        let began = Instant::now();
        let mut deadline = Deadline::new(shared.deadline());
        let turn = loop {
            match shared.turns.resizing.take() {
                Some(turn) => break turn,
                None if deadline.is_over() || ManagerState::is_reclaiming() => {
                    return Err(shared.out_of_memory(NEW_LIMIT, limit, began.elapsed()));
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
        Err(shared.out_of_memory(NEW_LIMIT, ByteCount(over), began.elapsed()))
    }

    /// The account that temporary memory is charged to.
    #[must_use]
    pub fn temporary(&self) -> &Account {
        &self.temporary
    }

    /// The statistics at the moment.
    #[must_use]
    pub fn stats(&self) -> ManagerStats {
        let shared = &self.shared;
        let (limit, held) = (shared.budget.limit(), shared.held());
        let mut stats = ManagerStats {
            limit_bytes: limit,
            used_bytes: shared.budget.charged(),
            used_bytes_max: shared.budget.charged_max(),
            held_bytes: held,
            over_bytes: ByteCount(held.0.saturating_sub(limit.0)),
            temporary_bytes: shared.temporary.budget.charged(),
            consumers: shared.each_member().count() as u64,
            ..ManagerStats::default()
        };
        shared.counts.show(&mut stats);
        stats
    }

    /// The consumers' names and statistics, in the order in which they joined; temporary memory is
    /// the first.
    #[must_use]
    pub fn consumers(&self) -> Vec<(Arc<str>, ConsumerStats)> {
        let _ours = keep_local();
        let members = self.shared.each_member();
        members.map(|member| (Arc::clone(&member.name), self.stats_of(&member))).collect()
    }

    fn stats_of(&self, member: &Arc<Member>) -> ConsumerStats {
        let metadata = member
            .reclaimer()
            .and_then(|reclaimer| self.shared.guarded(member, || reclaimer.metadata()));
        let mut stats = ConsumerStats {
            used_bytes: member.budget.charged(),
            used_bytes_max: member.budget.charged_max(),
            metadata_bytes: metadata.unwrap_or_default(),
            held_bytes: member.held(),
            floor_bytes: member.floor(),
            ceiling_bytes: member.budget.limit(),
            ..ConsumerStats::default()
        };
        member.counts.show(&mut stats);
        stats
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().take();
        if self.shared.is_foreign() {
            std::mem::forget(thread); // The parent's.
            return;
        }
        self.shared.bell.end();
        // The last owner may be the background thread's own call into a consumer.
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
