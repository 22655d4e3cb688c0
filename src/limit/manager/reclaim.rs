//! Asking the consumers: in which order, how much, and what when one misbehaves.

use crate::base::deadline::Deadline;
use crate::base::error::Result;
use crate::base::sync::Ordering;
use crate::base::units::ByteCount;
use crate::limit::admission;
use crate::limit::donation::Donation;
use crate::limit::manager::consumer::{Reclaim, ReclaimCost};
use crate::limit::manager::member::Member;
use crate::limit::manager::report::Pressure;
use crate::limit::manager::shared::{CONSUMERS_MAX, ManagerState, RETRY_AFTER};
use crate::sys::vm::Mapping;
use std::cell::Cell;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least bytes reclaimed at a time: batches are what makes reclaiming cheap.
const RECLAIM_MIN: u64 = 256 << 10;

thread_local! {
    /// This thread is in a call to a reclaimer.
    static RECLAIMING: Cell<bool> = const { Cell::new(false) };
}

/// Which consumers are asked, and for which one.
#[derive(Clone, Copy)]
struct Ask<'a> {
    /// Whose need it is: it may go below its own floor.
    asking: Option<&'a Arc<Member>>,
    /// Only this consumer.
    only: Option<&'a Arc<Member>>,
    /// Every consumer but the one that asks.
    others: bool,
    /// The highest cost.
    cost: ReclaimCost,
}

impl Ask<'_> {
    fn concerns(&self, member: &Arc<Member>) -> bool {
        let is_asking = self.asking.is_some_and(|asking| Arc::ptr_eq(asking, member));
        self.only.is_none_or(|only| Arc::ptr_eq(only, member)) && !(self.others && is_asking)
    }

    /// Bytes that may be taken from a consumer. `tables` of its bytes are tables, which it needs for
    /// what its floor protects and for what it has on the device as well.
    fn room(&self, member: &Arc<Member>, tables: ByteCount) -> u64 {
        let is_asking = self.asking.is_some_and(|asking| Arc::ptr_eq(asking, member));
        let kept = if is_asking { 0 } else { member.floor().0.saturating_add(tables.0) };
        member.budget.charged().0.saturating_sub(kept)
    }
}

/// A consumer and its reclaimer.
type Reclaimer = (Arc<Member>, Arc<dyn Reclaim>);

impl ManagerState {
    /// Charges what does not fit as it is. With `stall`, gives up when nothing was freed for so
    /// long, without waiting for the deadline.
    pub(super) fn charge_slowly(
        &self,
        account: &Arc<Member>,
        bytes: ByteCount,
        stall: Option<Duration>,
    ) -> Result<()> {
        let began = Instant::now();
        if self.claim(account, bytes, stall) {
            return Ok(());
        }
        Err(self.out_of_memory(&account.name, bytes, began.elapsed()))
    }

    /// The same; `false` instead of an error, which has to look at all that is held.
    pub(super) fn claim(
        &self,
        account: &Arc<Member>,
        bytes: ByteCount,
        stall: Option<Duration>,
    ) -> bool {
        let budget = &account.budget;
        if RECLAIMING.get() || bytes > budget.limit() {
            return false;
        }
        self.counts.direct.bump();
        self.tell(Pressure::Direct { wanted: bytes });
        let least = RECLAIM_MIN.min(self.budget.limit().0 / 16);
        let reclaim = |missing: ByteCount| {
            let asking = Some(account);
            // Above its own ceiling a consumer can only take from itself.
            let only = asking.filter(|_| budget.own_free() < missing);
            let ask = Ask { asking, only, others: false, cost: ReclaimCost::WriteBack };
            self.reclaim_from(ask, ByteCount(missing.0.max(least)))
        };
        let room = || match self.is_temporary(account) {
            true => self.room_beside_floors(account),
            false => budget.limit(),
        };
        let patient = self.patience(stall);
        admission::claim(budget, &self.turns.gathering, bytes, room, reclaim, patient)
    }

    /// Reclaims a batch while a large claim gathers: for who is about to charge less. Else the one thread made room for
    /// all of them, and they took most of it (`book/src/measurements/cooperative.md`, the paper's scale).
    pub(super) fn help_claim(&self, bytes: ByteCount) {
        let is_small = self.turns.gathering.wanted() > (4 * RECLAIM_MIN).max(bytes.0);
        if is_small && !self.is_foreign() {
            self.reclaim(ByteCount(RECLAIM_MIN));
        }
    }

    /// Tells after each round of reclaim whether to go on; waits a little when it freed nothing.
    pub(super) fn patience(&self, stall: Option<Duration>) -> impl FnMut(ByteCount) -> bool {
        let mut deadline = Deadline::new(self.deadline());
        let mut stall = stall.map(Deadline::new);
        move |freed| {
            if let Some(stall) = &mut stall {
                if freed.0 > 0 {
                    stall.restart();
                }
                if stall.is_over() {
                    return false;
                }
            }
            if deadline.is_over() || RECLAIMING.get() {
                return false;
            }
            if freed.0 == 0 {
                // Somebody may unpin, or a write may finish: nobody can tell when.
                std::thread::sleep(RETRY_AFTER);
            }
            true
        }
    }

    /// Asks all consumers for `want` bytes.
    pub(super) fn reclaim(&self, want: ByteCount) -> ByteCount {
        let ask = Ask { asking: None, only: None, others: false, cost: ReclaimCost::WriteBack };
        self.reclaim_from(ask, want)
    }

    /// Asks everybody else for `want` bytes.
    pub(super) fn reclaim_for(&self, member: &Arc<Member>, want: ByteCount) -> ByteCount {
        let cost = ReclaimCost::WriteBack;
        let ask = Ask { asking: Some(member), only: None, others: true, cost };
        self.reclaim_from(ask, want)
    }

    /// Reclaims what consumers hold above their ceilings.
    pub(super) fn enforce_ceilings(&self) {
        for member in self.each_member() {
            let over = member.budget.charged().0.saturating_sub(member.budget.limit().0);
            if over > 0 {
                let (asking, only) = (Some(&member), Some(&member));
                let ask = Ask { asking, only, others: false, cost: ReclaimCost::WriteBack };
                self.reclaim_from(ask, ByteCount(over));
            }
        }
    }

    /// Serves consumers that asked without waiting. What others would have to write is no better
    /// than what the asking consumer holds itself.
    pub(super) fn serve_asks(&self) {
        for member in self.each_member() {
            let want = ByteCount(member.asks.swap(0, Ordering::Relaxed));
            if want.0 == 0 {
                continue;
            }
            let asking = Some(&member);
            let writes = member.asks_for_writes.load(Ordering::Relaxed);
            let cost = if writes { ReclaimCost::WriteBack } else { ReclaimCost::Reread };
            let ask = Ask { asking, only: None, others: true, cost };
            let freed = self.reclaim_from(ask, want);
            if let Some(reclaimer) = member.reclaimer() {
                self.guarded(&member, || reclaimer.room_made(freed));
            }
        }
    }

    /// Asks the consumers for `want` bytes, cheapest first.
    fn reclaim_from(&self, ask: Ask<'_>, want: ByteCount) -> ByteCount {
        if RECLAIMING.get() {
            return ByteCount::ZERO;
        }
        let mut members: [Option<Reclaimer>; CONSUMERS_MAX] = [const { None }; CONSUMERS_MAX];
        let mut count = 0;
        for member in self.each_member().filter(|member| ask.concerns(member)) {
            if let Some(reclaimer) = member.reclaimer() {
                members[count] = Some((member, reclaimer));
                count += 1;
            }
        }
        let members = &mut members[..count];
        let mut freed = 0;
        for cost in ReclaimCost::ALL.into_iter().filter(|cost| *cost <= ask.cost) {
            members.sort_by_key(|asked| {
                let (member, reclaimer) = asked.as_ref()?;
                self.guarded(member, || reclaimer.order(cost))
            });
            for (member, reclaimer) in members.iter().flatten() {
                let tables = self.guarded(member, || reclaimer.metadata()).unwrap_or_default();
                let bytes = ask.room(member, tables).min(want.0.saturating_sub(freed));
                if bytes > 0 {
                    let got = self.call_reclaimer(member, &**reclaimer, ByteCount(bytes), cost);
                    self.counts.reclaimed[cost as usize].add(got.0);
                    member.counts.gave.add(got.0);
                    freed += got.0;
                }
            }
            if freed >= want.0 {
                break;
            }
        }
        ByteCount(freed)
    }

    /// Lets consumers fill `room` with memory of theirs; returns the bytes that `account` has been
    /// charged for, and the part of the room that was lost over it. Floors are kept.
    pub(super) fn gather_donations(
        &self,
        room: &Mapping,
        account: &Arc<Member>,
    ) -> (ByteCount, Option<Range<usize>>) {
        if RECLAIMING.get() || self.moves_fail.load(Ordering::Relaxed) {
            return (ByteCount::ZERO, None);
        }
        let mut donation = Donation::new(room, &account.budget);
        for member in self.each_member().filter(|member| !Arc::ptr_eq(member, account)) {
            let Some(reclaimer) = member.reclaimer() else { continue };
            donation.allow(ByteCount(member.budget.charged().0.saturating_sub(member.floor().0)));
            let before = donation.charged();
            self.guarded(&member, || reclaimer.donate(&mut donation));
            let got = donation.charged().0 - before.0;
            self.counts.reclaimed[ReclaimCost::Reread as usize].add(got);
            member.counts.gave.add(got);
        }
        let lost = donation.lost();
        if lost.is_some() {
            self.moves_fail.store(true, Ordering::Relaxed);
        }
        (donation.charged(), lost)
    }

    fn call_reclaimer(
        &self,
        member: &Arc<Member>,
        reclaimer: &dyn Reclaim,
        want: ByteCount,
        cost: ReclaimCost,
    ) -> ByteCount {
        let call = || reclaimer.reclaim(want, cost);
        self.guarded(member, call).unwrap_or(ByteCount::ZERO)
    }

    /// Calls the host's code, which may panic and may call the manager. `None`: it panicked, now
    /// or before.
    pub(super) fn guarded<T>(&self, member: &Arc<Member>, call: impl FnOnce() -> T) -> Option<T> {
        if member.broken.load(Ordering::Acquire) {
            return None;
        }
        let outer = RECLAIMING.replace(true);
        let result = std::panic::catch_unwind(AssertUnwindSafe(call));
        RECLAIMING.set(outer);
        // Another thread may have called it at the same time: one of them tells.
        if result.is_err() && !member.broken.swap(true, Ordering::AcqRel) {
            self.tell(Pressure::Broken { consumer: Arc::clone(&member.name) });
        }
        result.ok()
    }

    /// True if this thread is in a call to a reclaimer, which cannot wait for itself.
    pub(super) fn is_reclaiming() -> bool {
        RECLAIMING.get()
    }
}
