//! Consumers: their accounts, and who gives their memory back.

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;
use crate::limit::donation::HandOver;
use crate::limit::manager::{Mode, Pressure, Shared};
use std::fmt;
use std::fmt::Debug;
use std::sync::{Arc, Weak};

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
    /// All of them, cheapest first.
    pub const ALL: [Effort; 3] = [Effort::Spare, Effort::Clean, Effort::Write];
}

/// A consumer that can give memory back: a buffer pool, a far heap, a host's plan or result cache.
///
/// All calls come from any thread, several at once, without a lock of the manager held. A call
/// must not touch far memory that may be absent, and a charge made from within one fails at once
/// instead of reclaiming. A call that panics is caught; the consumer is not asked again.
///
/// # Examples
/// ```
/// use farheap::limit::manager::{Account, Effort, MemoryManager, Mode, Reclaim};
/// use farheap::ByteCount;
/// use std::sync::{Arc, Mutex, Weak};
///
/// struct PlanCache(Account, Mutex<Vec<Vec<u8>>>);
///
/// impl Reclaim for PlanCache {
///     fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount {
///         let mut freed = 0;
///         let mut plans = self.1.lock().unwrap_or_else(|e| e.into_inner());
///         while effort >= Effort::Clean && freed < want.get() {
///             let Some(plan) = plans.pop() else { break };
///             freed += plan.len() as u64;
///         }
///         self.0.uncharge(ByteCount(freed));
///         ByteCount(freed)
///     }
/// }
///
/// let manager = MemoryManager::start(ByteCount::mib(16), Mode::Cooperative)?;
/// let account = manager.join("plans")?;
/// let cache = Arc::new(PlanCache(account.clone(), Mutex::new(Vec::new())));
/// let weak: Weak<PlanCache> = Arc::downgrade(&cache);
/// account.set_reclaimer(weak);
/// manager.charge(&account, ByteCount::mib(10))?;
/// cache.1.lock().expect("no panic").push(vec![0; 10 << 20]);
/// // The plan gives way.
/// let memory = manager.allocate_temporary(ByteCount::mib(12))?;
/// assert_eq!(account.used(), ByteCount::ZERO);
/// # drop(memory);
/// # Ok::<(), farheap::Error>(())
/// ```
pub trait Reclaim: Send + Sync {
    /// Frees about `want` bytes, spending no more than `effort`, and returns how many it freed
    /// (it has uncharged them).
    fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount;

    /// Who is asked first among consumers at the same effort: the lowest.
    fn cost(&self, _effort: Effort) -> u32 {
        100
    }

    /// Gives memory away with its frames, in whole 2 MiB, as much as `room` wants: what a large
    /// temporary allocation is made of then needs neither be dropped nor faulted in and zeroed.
    /// For consumers of this crate; a host's cache keeps the default, which gives nothing.
    fn hand_over(&self, _room: &mut HandOver<'_>) {}

    /// Says who holds what cannot be reclaimed, for messages.
    fn describe_held(&self) -> String {
        String::new()
    }

    /// Of the bytes charged, those that describe the others: page states, tables.
    fn metadata(&self) -> ByteCount {
        ByteCount::ZERO
    }

    /// Is told that the most it may charge has changed.
    fn ceiling_changed(&self, _ceiling: ByteCount) {}

    /// Is told what became of a request for room that it made without waiting: how many bytes
    /// others gave.
    fn room_made(&self, _freed: ByteCount) {}
}

/// What memory that can only be counted is charged by.
const STEP: ByteCount = ByteCount::kib(64);

/// A consumer's part of the budget; leaves the manager when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Account(pub(super) Arc<Member>);

pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) budget: Arc<Budget>,
    pub(super) floor: AtomicU64,
    /// As set; what the mode allows may be less.
    pub(super) ceiling: AtomicU64,
    /// Percent of the limit in a partitioned manager; [`NO_PART`] for none of its own.
    pub(super) part: AtomicU64,
    pub(super) reclaimer: Ranked<Option<Weak<dyn Reclaim>>>,
    /// Held while what is charged is set to what was counted.
    counting: Ranked<()>,
    /// Its memory is counted: it exists already, and nobody can evict it.
    pub(super) is_counted: AtomicBool,
    /// Bytes that were counted and that there was no room to charge.
    pub(super) uncharged: AtomicU64,
    /// Bytes taken back that were not charged.
    pub(super) miscounted: AtomicU64,
    /// Its reclaimer panicked.
    pub(super) broken: AtomicBool,
    /// Bytes it asks others for without waiting.
    pub(super) asks: AtomicU64,
    /// These are worth writing others' data for.
    pub(super) asks_for_writes: AtomicBool,
    /// Bytes reclaimed from it.
    pub(super) gave: AtomicU64,
    manager: Weak<Shared>,
}

/// A consumer that shares with others what nobody has a part of.
const NO_PART: u64 = u64::MAX;

impl Member {
    pub(super) fn new(
        budget: &Arc<Budget>,
        name: &str,
        share: ByteCount,
        manager: Weak<Shared>,
    ) -> Arc<Member> {
        Arc::new(Member {
            name: Arc::from(name),
            budget: Arc::new(Budget::under(Arc::clone(budget), share)),
            floor: AtomicU64::new(0),
            ceiling: AtomicU64::new(u64::MAX),
            part: AtomicU64::new(NO_PART),
            reclaimer: Ranked::new(Rank::Leaf, None),
            counting: Ranked::new(Rank::Leaf, ()),
            is_counted: AtomicBool::new(false),
            uncharged: AtomicU64::new(0),
            miscounted: AtomicU64::new(0),
            broken: AtomicBool::new(false),
            asks: AtomicU64::new(0),
            asks_for_writes: AtomicBool::new(false),
            gave: AtomicU64::new(0),
            manager,
        })
    }

    pub(super) fn floor(&self) -> ByteCount {
        ByteCount(self.floor.load(Ordering::Relaxed))
    }

    /// Bytes that it has: charged, or counted without room to charge them.
    pub(super) fn held(&self) -> ByteCount {
        ByteCount(self.budget.charged().0 + self.uncharged.load(Ordering::Relaxed))
    }

    /// Percent of the limit that are its own in a partitioned manager.
    pub(super) fn part(&self) -> Option<u64> {
        Some(self.part.load(Ordering::Relaxed)).filter(|part| *part != NO_PART)
    }

    /// Who gives its memory back, unless that has panicked before.
    pub(super) fn reclaimer(&self) -> Option<Arc<dyn Reclaim>> {
        if self.broken.load(Ordering::Acquire) {
            return None;
        }
        self.reclaimer.lock().as_ref().and_then(Weak::upgrade)
    }

    /// Applies what the mode allows it; returns whether that is something else than before. The
    /// caller holds the lock on shares.
    pub(super) fn set_share(&self, share: ByteCount) -> bool {
        let ceiling = ByteCount(self.ceiling.load(Ordering::Relaxed).min(share.0));
        let is_other = self.budget.limit() != ceiling;
        if is_other {
            self.budget.set_limit(ceiling);
        }
        is_other
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.budget.uncharge(self.budget.charged());
    }
}

impl Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.name, self.budget)
    }
}

impl Account {
    /// The name it joined with.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Says who gives this consumer's memory back. Without one its memory is only counted.
    pub fn set_reclaimer(&self, reclaimer: Weak<dyn Reclaim>) {
        *self.0.reclaimer.lock() = Some(reclaimer);
        self.0.broken.store(false, Ordering::Release);
    }

    /// Protects `floor` bytes of this consumer from the others. It may fall below by itself.
    ///
    /// # Errors
    /// [`Error::LimitExceeded`] when all floors together would exceed the limit: the old one stays.
    pub fn set_floor(&self, floor: ByteCount) -> Result<()> {
        let manager = self.0.manager.upgrade();
        let shares = manager.as_ref().map(|manager| manager.shares.lock());
        let old = self.0.floor.swap(floor.0, Ordering::Relaxed);
        let Some(manager) = &manager else { return Ok(()) };
        let (floors, limit) = (manager.floors(), manager.budget.limit());
        if floors > limit {
            self.0.floor.store(old, Ordering::Relaxed);
            let reason = format!("floors of {floors} in all do not fit a limit of {limit}");
            return Err(Error::LimitExceeded { reason });
        }
        drop(shares);
        manager.apply_shares();
        Ok(())
    }

    /// Bounds this consumer. What it holds above that is reclaimed in the background.
    pub fn set_ceiling(&self, ceiling: ByteCount) {
        self.0.ceiling.store(ceiling.0, Ordering::Relaxed);
        if let Some(manager) = self.0.manager.upgrade() {
            manager.apply_shares();
            manager.call();
        }
    }

    /// Gives this consumer a part of its own in a [partitioned](crate::limit::manager::Mode::Partitioned) manager,
    /// in percent of the limit, or takes it away. Consumers without one share, first come first
    /// served, what is left; temporary memory's part is the mode's. Changes nothing in a
    /// cooperative manager.
    ///
    /// # Errors
    /// [`Error::Config`] when all parts together would be more than 100 %, or for the account of
    /// temporary memory; the old one stays.
    pub fn set_part(&self, pct: Option<u8>) -> Result<()> {
        let Some(manager) = self.0.manager.upgrade() else { return Ok(()) };
        let bad = |reason| Err(Error::Config { key: "part".to_owned(), reason });
        if Arc::ptr_eq(&self.0, &manager.temporary.0) {
            return bad(
                "temporary memory has the part that the manager was started with".to_owned()
            );
        }
        let shares = manager.shares.lock();
        let old = self.0.part.swap(pct.map_or(NO_PART, u64::from), Ordering::Relaxed);
        let all = manager.parts();
        if all > 100 {
            self.0.part.store(old, Ordering::Relaxed);
            return bad(format!("{all} % in all are more than there is"));
        }
        drop(shares);
        manager.apply_shares();
        manager.call();
        Ok(())
    }

    /// Bytes that this consumer has: those charged, or, where more were counted
    /// ([`set_used`](Self::set_used)) than there was room to charge, those counted.
    #[must_use]
    pub fn held(&self) -> ByteCount {
        self.0.held()
    }

    /// Bytes charged.
    #[must_use]
    pub fn used(&self) -> ByteCount {
        self.0.budget.charged()
    }

    /// Bytes protected from the others.
    #[must_use]
    pub fn floor(&self) -> ByteCount {
        self.0.floor()
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

    /// Takes a charge back. Of more than is charged, what is charged; the rest is a mistake of the
    /// caller's, which is counted ([`ConsumerStats::miscounted`](crate::limit::manager::ConsumerStats)), told once
    /// on standard error and each time as [`Pressure::Miscounted`](crate::limit::manager::Pressure), and takes
    /// nothing from other consumers.
    pub fn uncharge(&self, bytes: ByteCount) {
        let missing = bytes.0 - self.0.budget.uncharge_up_to(bytes).0;
        if missing > 0 {
            self.miscounted(ByteCount(missing));
        }
    }

    /// Takes `bytes` back if so much is charged; else nothing, and returns `false`.
    #[must_use]
    pub fn try_uncharge(&self, bytes: ByteCount) -> bool {
        self.0.budget.try_uncharge(bytes)
    }

    #[cold]
    fn miscounted(&self, bytes: ByteCount) {
        let _ours = keep_local();
        if self.0.miscounted.fetch_add(bytes.0, Ordering::Relaxed) == 0 {
            let _ = crate::sys::stderr::send(
                format!(
                    "farheap: consumer \"{}\" of a memory manager has taken back {bytes} more than \
                     it had charged; its figures are too low from now on (said once)\n",
                    self.name()
                )
                .as_bytes(),
            );
        }
        if let Some(manager) = self.0.manager.upgrade() {
            manager.tell(Pressure::Miscounted { consumer: Arc::clone(&self.0.name), bytes });
        }
    }

    /// Makes `bytes` all that is charged, for memory that exists already, such as a library's that
    /// can only be counted. Where that exceeds the limit, others give way in the background.
    /// For accounts that nothing else charges: what is charged beside it, this takes back, and
    /// [`uncharge`](Self::uncharge) finds it missing.
    pub fn set_used(&self, bytes: ByteCount) {
        let counting = self.0.counting.lock();
        self.0.is_counted.store(true, Ordering::Relaxed);
        self.0.budget.set_charged(bytes);
        self.0.uncharged.store(0, Ordering::Relaxed);
        drop(counting);
        if let Some(manager) = self.0.manager.upgrade() {
            manager.call_if_low();
        }
    }

    /// As [`set_used`](Self::set_used), without exceeding the limit: charges what fits of a growth
    /// and calls the background thread for the rest. `false`: some of it did not fit.
    pub(crate) fn set_used_as_fits(&self, bytes: ByteCount) -> bool {
        let counting = self.0.counting.lock();
        self.0.is_counted.store(true, Ordering::Relaxed);
        let used = self.used();
        self.0.budget.uncharge_up_to(ByteCount(used.0.saturating_sub(bytes.0)));
        let mut missing = bytes.0.saturating_sub(used.0);
        while missing > 0 {
            let step = missing.min(STEP.0);
            if !self.try_charge(ByteCount(step)) {
                break;
            }
            missing -= step;
        }
        self.0.uncharged.store(missing, Ordering::Relaxed);
        drop(counting);
        if let Some(manager) = self.0.manager.upgrade() {
            manager.call_if_low();
        }
        missing == 0
    }

    /// Whether others may give way to this consumer.
    pub(crate) fn may_ask(&self) -> bool {
        self.0.manager.upgrade().is_some_and(|manager| manager.mode == Mode::Cooperative)
    }

    /// The budget of a consumer that charges by itself, such as a region.
    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.0.budget
    }

    /// Asks others for memory without waiting, from a thread that must not wait, at no more than
    /// `effort` (clean or written): what they gave is told by [`Reclaim::room_made`].
    pub(crate) fn ask(&self, want: ByteCount, effort: Effort) {
        self.0.asks_for_writes.store(effort == Effort::Write, Ordering::Relaxed);
        self.0.asks.fetch_max(want.0, Ordering::Relaxed);
        match self.0.manager.upgrade() {
            Some(manager) => manager.call(),
            None => self.0.asks.store(0, Ordering::Relaxed),
        }
    }
}
