//! The protocol of charges that have to make room first, and of a limit that changes meanwhile.
//!
//! A charge that does not fit becomes a *claim*: it asks for bytes to be reclaimed and tries
//! again. Small charges come and go all the time, so a large claim would never find all its bytes
//! free at one moment; therefore one claim at a time *gathers*: it charges what is free, piece by
//! piece, and keeps it while it reclaims the rest. It tells how much that is, so that others can pay
//! for what they charge meanwhile with as much as they reclaim at a time.
//!
//! ```text
//!            fits                         gathered all
//!   charge ---------> Charged <------------------------------.
//!     | does not fit     ^  fits                             |
//!     v                  |          turn is free             |
//!   Claiming ------------+--------------------------> Gathering --reclaim--.
//!     ^  | reclaim, wait                               | ^                 |
//!     '--'                                             | '-----------------'
//!     | patience is over                               | patience is over: gives all back
//!     v                                                v
//!   Refused <------------------------------------------'
//!
//!   limit: Set --lower--> Lowering --reclaimed enough--> Set
//!                            '---- patience is over: the old limit is in force again
//! ```
//! Nothing here knows who reclaims: callers pass that, and loom runs the same code
//! (`RUSTFLAGS="--cfg loom" cargo test --profile models --lib loom_`). Uses `base` and `budget`.
//!
//! # Invariants
//! 1. What is charged exceeds the limit only between a lowering and the end of its reclaim.
//! 2. A claim that is refused leaves nothing charged.
//! 3. At most one claim of a [`Turn`] gathers, so no two claims wait for each other's bytes.
//! 4. `reclaim` and `patient` are called without any lock held.

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::limit::budget::Budget;

/// The right to gather, or to change the limit: one thread has it at a time. Not a lock: nobody blocks on it.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    taken: AtomicBool,
    wanted: AtomicU64,
}

impl Turn {
    /// Bytes that the thread which has it still has to gather. A hint: only the amount of work depends on it.
    pub(crate) fn wanted(&self) -> u64 {
        self.wanted.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self) -> Option<Taken<'_>> {
        // Pairs with the release in `drop`: what the one before charged is seen.
        let taken = self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
        // Not `then_some`: a `Taken` that is made is dropped, and frees the holder's turn.
        taken.is_ok().then(|| Taken(self))
    }
}

/// The turn is this thread's until it is dropped, also by a panic.
#[derive(Debug)]
pub(crate) struct Taken<'a>(&'a Turn);

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.wanted.store(0, Ordering::Relaxed);
        self.0.taken.store(false, Ordering::Release);
    }
}

/// Charges gathered so far; given back when dropped before it is whole, also by a panic.
struct Gathered<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Drop for Gathered<'_> {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.budget.uncharge(ByteCount(self.bytes));
        }
    }
}

/// Charges `bytes`, reclaiming until they fit. `room` says how much of what is free the claim may
/// have; `reclaim` frees about what it is asked for and returns how much that was; `patient` is asked
/// after each round, with that number, whether to go on. Returns whether the bytes are charged.
pub(crate) fn claim(
    budget: &Budget,
    turn: &Turn,
    bytes: ByteCount,
    room: impl Fn() -> ByteCount,
    mut reclaim: impl FnMut(ByteCount) -> ByteCount,
    mut patient: impl FnMut(ByteCount) -> bool,
) -> bool {
    let mut gathered = Gathered { budget, bytes: 0 };
    let mut taken = None;
    let mut last = false;
    loop {
        taken = taken.or_else(|| turn.take());
        if taken.is_some() {
            let rest = ByteCount(bytes.0 - gathered.bytes);
            gathered.bytes += budget.charge_up_to(rest.min(room())).0;
            turn.wanted.store(bytes.0 - gathered.bytes, Ordering::Relaxed);
        } else if bytes <= room() && budget.try_charge(bytes) {
            return true;
        }
        if gathered.bytes == bytes.0 {
            // They are the caller's now.
            gathered.bytes = 0;
            return true;
        }
        if last {
            return false;
        }
        let freed = reclaim(ByteCount(bytes.0 - gathered.bytes));
        // What the last round freed is still looked at.
        last = !patient(freed);
    }
}

/// Sets the limit and reclaims what is above it. The caller has the turn of resizes. Returns
/// `false` when the patience was over: the limit is then what it was before.
///
/// # Errors
/// As `apply`, which refuses a limit.
pub(crate) fn resize(
    budget: &Budget,
    limit: ByteCount,
    mut apply: impl FnMut(ByteCount) -> Result<()>,
    mut reclaim: impl FnMut(ByteCount) -> ByteCount,
    mut patient: impl FnMut(ByteCount) -> bool,
) -> Result<bool> {
    let old = budget.limit();
    apply(limit)?;
    loop {
        let over = budget.charged().0.saturating_sub(limit.0);
        if over == 0 {
            return Ok(true);
        }
        let freed = reclaim(ByteCount(over));
        if !patient(freed) {
            // A raised limit may have been relied on since: it stays where the old one is refused.
            return Ok(budget.charged() <= limit || apply(old).is_err());
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    /// All that is free.
    fn any() -> ByteCount {
        ByteCount(u64::MAX)
    }

    #[test]
    fn a_claim_keeps_what_it_gathered_while_others_take_the_rest() {
        let budget = Budget::new(ByteCount(100));
        let turn = Turn::default();
        assert!(budget.try_charge(ByteCount(100)));
        let mut rounds = 0;
        // Each round frees 20, of which a bystander takes 10 before the claim looks again.
        let reclaim = |_| {
            rounds += 1;
            budget.uncharge(ByteCount(20));
            assert!(rounds > 4 || budget.try_charge(ByteCount(10)));
            ByteCount(20)
        };
        assert!(claim(&budget, &turn, ByteCount(60), any, reclaim, |_| true));
        assert_eq!(rounds, 5);
        assert!(turn.take().is_some(), "the turn is free again");
    }

    #[test]
    fn asking_for_a_turn_that_is_taken_does_not_free_it() {
        let turn = Turn::default();
        let taken = turn.take();
        assert!(taken.is_some());
        assert!(turn.take().is_none());
        assert!(turn.take().is_none(), "the refusal freed it");
        drop(taken);
        assert!(turn.take().is_some());
    }

    #[test]
    fn a_refused_claim_leaves_nothing_charged() {
        let budget = Budget::new(ByteCount(100));
        let turn = Turn::default();
        assert!(budget.try_charge(ByteCount(70)));
        let refused = !claim(&budget, &turn, ByteCount(60), any, |_| ByteCount::ZERO, |_| false);
        assert!(refused);
        assert_eq!(budget.charged(), ByteCount(70));
    }

    #[test]
    fn a_panic_while_reclaiming_gives_back_turn_and_bytes() {
        let budget = Budget::new(ByteCount(100));
        let turn = Turn::default();
        assert!(budget.try_charge(ByteCount(70)));
        let panics = std::panic::AssertUnwindSafe(|| {
            // Which the panic hook does not tell of.
            let reclaim = |_| std::panic::resume_unwind(Box::new("a reclaimer"));
            claim(&budget, &turn, ByteCount(60), any, reclaim, |_| true)
        });
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(budget.charged(), ByteCount(70));
        assert!(turn.take().is_some());
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use crate::base::sync::AtomicU64;
    use loom::sync::Arc;
    use loom::thread;

    /// A consumer whose bytes can be taken away, as a pool's clean pages.
    struct Cache {
        budget: Budget,
        held: AtomicU64,
    }

    impl Cache {
        fn give(&self, want: ByteCount) -> ByteCount {
            let mut held = self.held.load(Ordering::Relaxed);
            loop {
                let give = held.min(want.0);
                let left = held - give;
                match self.held.compare_exchange(held, left, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => {
                        self.budget.uncharge(ByteCount(give));
                        return ByteCount(give);
                    }
                    Err(now) => held = now,
                }
            }
        }
    }

    fn cache(shared: &std::sync::Arc<Budget>, held: u64) -> Arc<Cache> {
        let budget = Budget::under(std::sync::Arc::clone(shared), ByteCount(100));
        assert!(budget.try_charge(ByteCount(held)));
        Arc::new(Cache { budget, held: AtomicU64::new(held) })
    }

    /// All that is free.
    fn any() -> ByteCount {
        ByteCount(u64::MAX)
    }

    /// A few rounds, then patience is over.
    fn rounds(mut left: u32) -> impl FnMut(ByteCount) -> bool {
        move |_| {
            thread::yield_now();
            left -= 1;
            left > 0
        }
    }

    /// In every order with up to four involuntary switches: without a bound, the loops of two claims
    /// and their consumer take loom hours.
    fn explore(model: impl Fn() + Send + Sync + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = Some(4);
        builder.check(model);
    }

    #[test]
    fn loom_two_claims_reclaim_side_by_side_and_the_limit_holds() {
        explore(|| {
            let shared = std::sync::Arc::new(Budget::new(ByteCount(100)));
            let cache = cache(&shared, 100);
            let turn = Arc::new(Turn::default());
            let claimer = |bytes: u64| {
                let (shared, cache) = (std::sync::Arc::clone(&shared), Arc::clone(&cache));
                let turn = Arc::clone(&turn);
                thread::spawn(move || {
                    let budget = Budget::under(shared, ByteCount(100));
                    let give = |want| cache.give(want);
                    let got = claim(&budget, &turn, ByteCount(bytes), any, give, rounds(2));
                    assert_eq!(budget.charged().0, if got { bytes } else { 0 });
                    got
                })
            };
            let (one, other) = (claimer(60), claimer(50));
            let one = one.join().expect("no panic");
            let other = other.join().expect("no panic");
            // 60 and 50 do not fit both; the one that was refused left nothing behind.
            assert!(!(one && other), "both fit");
            let claimed = u64::from(one) * 60 + u64::from(other) * 50;
            assert_eq!(shared.charged().0, claimed + cache.held.load(Ordering::Relaxed));
            assert!(shared.charged_max().0 <= 100);
        });
    }

    #[test]
    fn loom_a_claim_races_a_resize_and_every_byte_is_accounted_for() {
        explore(|| {
            let shared = std::sync::Arc::new(Budget::new(ByteCount(100)));
            let cache = cache(&shared, 80);
            let turn = Arc::new(Turn::default());
            let (of_claim, to_give) = (std::sync::Arc::clone(&shared), Arc::clone(&cache));
            let claiming = thread::spawn(move || {
                let budget = Budget::under(of_claim, ByteCount(100));
                let give = |want| to_give.give(want);
                claim(&budget, &turn, ByteCount(40), any, give, rounds(2))
            });
            let lowered = resize(
                &shared,
                ByteCount(50),
                |limit| {
                    shared.set_limit(limit);
                    Ok(())
                },
                |over| cache.give(over),
                rounds(3),
            );
            let lowered = lowered.expect("no limit is refused");
            let claimed = u64::from(claiming.join().expect("no panic")) * 40;
            let charged = shared.charged().0;
            assert_eq!(charged, claimed + cache.held.load(Ordering::Relaxed));
            assert_eq!(shared.limit().0, if lowered { 50 } else { 100 });
            assert!(charged <= shared.limit().0, "{charged} of {}", shared.limit());
        });
    }
}
