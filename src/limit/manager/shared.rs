//! State shared by the manager, the accounts and the background thread.

use crate::base::error::{Error, Result};
use crate::base::local::keep_local;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering, Ranked};
use crate::base::units::ByteCount;
use crate::limit::admission::Turn;
use crate::limit::budget::Budget;
use crate::limit::manager::member::Member;
use crate::limit::manager::report::Pressure;
use crate::limit::manager::spill::Spill;
use crate::limit::manager::stats::ManagerCounts;
use crate::sys::fork::Born;
use crate::sys::messages;
use crate::sys::signals::SignalsBlocked;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Maximum number of consumers of one manager.
pub(super) const CONSUMERS_MAX: usize = 16;

/// Smallest limit of a manager.
pub(super) const LIMIT_MIN: ByteCount = ByteCount::mib(1);

/// How often the background thread looks without being called.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long a charge that found nothing to reclaim waits before it tries again.
pub(super) const RETRY_AFTER: Duration = Duration::from_micros(200);

/// How long nothing is freed before a charge that can be done without gives up.
pub(super) const BRIEFLY: Duration = Duration::from_millis(1);

/// Told about pressure; called without locks, must not block.
pub(super) type OnPressure = dyn Fn(Pressure) + Send + Sync;

/// State shared by the manager, its accounts and its thread.
pub(super) struct ManagerState {
    pub(super) budget: Arc<Budget>,
    /// Held while the limit or a floor changes, and while shares are worked out and applied:
    /// the last to apply them knows what the others knew.
    pub(super) shares: Ranked<()>,
    pub(super) members: Ranked<Vec<Weak<Member>>>,
    pub(super) temporary: Arc<Member>,
    pub(super) host: Callbacks,
    pub(super) turns: Turns,
    /// The kernel has refused to move pages. Each try may cost address space, so there are no more:
    /// consumers drop their pages instead.
    pub(super) moves_fail: AtomicBool,
    pub(super) counts: ManagerCounts,
    pub(super) deadline_ms: AtomicU64,
    pub(super) born: Born,
    pub(super) bell: Bell,
}

/// Callbacks that the host has registered.
pub(super) struct Callbacks {
    pub(super) spill: Ranked<Option<Weak<dyn Spill>>>,
    pub(super) on_pressure: OnceLock<Box<OnPressure>>,
}

/// Work of one thread at a time.
#[derive(Default)]
pub(super) struct Turns {
    pub(super) gathering: Turn,
    pub(super) resizing: Turn,
}

/// Reason for which the background thread waits.
#[derive(Debug, Default)]
pub(super) struct Bell {
    is_over: AtomicBool,
    is_rung: AtomicBool,
    lock: Mutex<()>,
    rung: Condvar,
}

impl Bell {
    /// Calls the thread, once until it has looked.
    pub(super) fn ring(&self) {
        if self.is_rung.load(Ordering::Relaxed) {
            return; // A call that is missed so is made up for within `LOOK_EVERY`.
        }
        // A region's evictor calls as well, and must find the bell free.
        let _blocked = SignalsBlocked::new();
        if !self.is_rung.swap(true, Ordering::AcqRel) {
            let _held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.rung.notify_one();
        }
    }

    /// Calls the thread to its end.
    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::Release);
        self.ring();
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Waits for a call, for [`LOOK_EVERY`] at most.
    fn wait(&self) {
        let held = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_rung.load(Ordering::Acquire) {
            drop(self.rung.wait_timeout(held, LOOK_EVERY));
        }
        self.is_rung.store(false, Ordering::Release);
    }
}

impl ManagerState {
    /// Bytes of free memory below which background reclaim begins; it goes on up to twice that.
    pub(super) fn low(&self) -> u64 {
        const MOST: u64 = 16 << 20;
        (self.budget.limit().0 / 64).min(MOST)
    }

    pub(super) fn deadline(&self) -> Duration {
        Duration::from_millis(self.deadline_ms.load(Ordering::Relaxed))
    }

    /// True if this process is a forked child of the manager's.
    pub(super) fn is_foreign(&self) -> bool {
        !self.born.is_here()
    }

    /// The consumers that have not left.
    pub(super) fn each_member(&self) -> impl Iterator<Item = Arc<Member>> + use<> {
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
    pub(super) fn apply_limit(&self, limit: ByteCount) -> Result<()> {
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

    /// Gives every consumer the share of the limit that its ceiling allows.
    pub(super) fn apply_shares(&self) {
        let shares = self.shares.lock();
        let limit = self.budget.limit();
        let mut changed: [Option<Arc<Member>>; CONSUMERS_MAX] = [const { None }; CONSUMERS_MAX];
        let floors = self.floors().0;
        for (slot, member) in changed.iter_mut().zip(self.each_member()) {
            let is_other = member.set_share(match self.is_temporary(&member) {
                // Nobody can take it back, so it may not take what others' floors keep.
                true => ByteCount(limit.0.saturating_sub(floors.saturating_sub(member.floor().0))),
                false => limit,
            });
            *slot = is_other.then_some(member);
        }
        drop(shares);
        changed.iter().flatten().for_each(|member| self.tell_ceiling(member));
    }

    /// Tells a consumer its ceiling, once more where it has changed meanwhile: of threads that tell
    /// different ones, the last tells what is in force.
    pub(super) fn tell_ceiling(&self, member: &Arc<Member>) {
        let Some(reclaimer) = member.reclaimer() else { return };
        loop {
            let ceiling = member.budget.limit();
            let told = self.guarded(member, || reclaimer.ceiling_changed(ceiling));
            if told.is_none() || member.budget.limit() == ceiling {
                return;
            }
        }
    }

    pub(super) fn is_temporary(&self, member: &Arc<Member>) -> bool {
        Arc::ptr_eq(member, &self.temporary)
    }

    /// The floors of all consumers.
    pub(super) fn floors(&self) -> ByteCount {
        let floors = self.each_member().map(|member| member.floor().0);
        ByteCount(floors.fold(0, u64::saturating_add))
    }

    pub(super) fn tell(&self, event: Pressure) {
        if let Some(told) = self.host.on_pressure.get() {
            told(event);
        }
    }

    /// A caller gets an error.
    pub(super) fn fail(&self, wanted: ByteCount) {
        self.counts.failed.bump();
        self.tell(Pressure::Failed { wanted });
    }

    pub(super) fn out_of_memory(&self, by: &str, wanted: ByteCount, waited: Duration) -> Error {
        let mut members: Vec<_> = self.each_member().collect();
        members.sort_by_key(|member| std::cmp::Reverse(member.budget.charged()));
        let consumers: Vec<_> = members
            .iter()
            .map(|member| {
                let held = member
                    .reclaimer()
                    .and_then(|reclaimer| self.guarded(member, || reclaimer.describe_held()))
                    .unwrap_or_default();
                format!("{} {}{held}", member.name, member.budget.charged())
            })
            .collect();
        Error::OutOfMemory {
            by: by.to_owned(),
            wanted,
            used: self.budget.charged(),
            limit: self.budget.limit(),
            consumers: consumers.join(", "),
            waited,
        }
    }

    // The background thread.

    pub(super) fn call_if_low(&self) {
        if self.budget.own_free().0 < self.low() {
            self.bell.ring();
        }
    }

    pub(super) fn run(&self) {
        SignalsBlocked::for_good();
        let mut pause_until = None;
        let mut over = Over::default();
        while !self.bell.is_over() {
            let _ours = keep_local(); // Anew each time: a heap may have started meanwhile.
            self.bell.wait();
            self.look_at_held(&mut over);
            self.enforce_ceilings();
            self.serve_asks();
            // Where nothing can be had, looking again at each charge would be all this does.
            let now = Instant::now();
            if pause_until.is_none_or(|until| now >= until) {
                let found = self.charge_counted() | self.keep_low();
                pause_until = (!found).then_some(now + LOOK_EVERY);
            }
        }
    }

    /// Bytes that all consumers have.
    pub(super) fn held(&self) -> ByteCount {
        let more = self.each_member().map(|member| member.uncharged.load(Ordering::Relaxed));
        ByteCount(self.budget.charged().0 + more.sum::<u64>())
    }

    /// Tells, once, that consumers have been above the limit for a while.
    pub(super) fn look_at_held(&self, over: &mut Over) {
        let (held, limit) = (self.held(), self.budget.limit());
        self.counts.held_max.fetch_max(held.0, Ordering::Relaxed);
        if !over.look(held, limit, Instant::now()) {
            return;
        }
        // What can be evicted would have been.
        let of = |member: &Arc<Member>| (member.is_counted.load(Ordering::Relaxed), member.held());
        let Some(most) = self.each_member().max_by_key(of) else { return };
        let more = ByteCount(held.0 - limit.0);
        messages::warn(
            "a memory manager is above its limit",
            format_args!(
                "memory manager: {held} are in use, {more} above the limit of {limit}: {} has {}, \
                 which cannot be evicted (said again only after it was below the limit)",
                most.name,
                most.held()
            ),
        );
        messages::flush();
        self.tell(Pressure::Over { held, limit, consumer: Arc::clone(&most.name) });
    }

    /// Reclaims up to the high watermark when less than the low one is free. Returns `false` when
    /// nothing could be reclaimed.
    pub(super) fn keep_low(&self) -> bool {
        let (low, free) = (self.low(), self.budget.own_free().0);
        if free >= low {
            return true;
        }
        self.counts.background.bump();
        let (used, limit) = (self.budget.charged(), self.budget.limit());
        self.tell(Pressure::Low { used, limit });
        let over = used.0.saturating_sub(limit.0);
        self.reclaim(ByteCount(over + 2 * low - free)).0 > 0
    }
}

/// State of consumers above the limit: if they are, and if that was told.
#[derive(Debug, Default)]
pub(super) struct Over {
    since: Option<Instant>,
    told: bool,
}

impl Over {
    /// Takes a look; returns whether it is time to tell.
    pub(super) fn look(&mut self, held: ByteCount, limit: ByteCount, now: Instant) -> bool {
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
