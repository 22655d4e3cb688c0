//! A region under a memory manager: what it gives to others, and what it asks of them.
//!
//! A region that stands alone has its limit to itself. One that has joined a manager charges the
//! same budget as everybody else, so that it can be short of memory for two reasons. Short of its
//! own ceiling, it evicts, as ever. Short of the shared limit, it first *asks*: others may hold
//! memory that costs less to give up. Neither handlers nor the evictor wait for the answer; what
//! the manager's thread finds is told by `room_made`. And others ask it: its *deficit* is what the
//! evictor takes out of the region for them and gives back to the kernel, not to the handlers.
//!
//! ```text
//!          short of the shared limit             others gave
//!   Idle ------------------------------> Asked --------------> Idle
//!    ^                                     |
//!    |  some time has passed               | others gave nothing, or did not answer
//!    '--------------- Refused <------------'      (while Refused: evicts its own pages)
//! ```
//!
//! # Invariants
//! 1. Nothing here blocks a handler or the evictor.

use crate::base::error::Result;
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::limit::manager::{Account, MemoryManager, ReclaimCost};
use std::time::{Duration, Instant};

const IDLE: u32 = 0;
const ASKED: u32 = 1;
const REFUSED: u32 = 2;

/// How long the evictor leaves it to others before it evicts its own pages.
const ANSWER_MAX: Duration = Duration::from_millis(5);
/// How long a refusal holds: others, who have just said that they have nothing, are asked 20 times a second and
/// not for each page that comes in.
const REFUSED_FOR: Duration = Duration::from_millis(50);

/// A region's place under a limit that is not its own.
#[derive(Debug)]
pub(in crate::paging) struct Managed {
    account: Option<Account>,
    /// Bytes that others wait for.
    deficit: AtomicU64,
    /// Bytes ever given to others.
    covered: AtomicU64,
    help: AtomicU32,
    /// Microseconds from `epoch` to the last change of `help`.
    since_us: AtomicU64,
    epoch: Instant,
    /// Bytes that the region keeps for itself, charged at the start.
    fixed: AtomicU64,
}

impl Managed {
    pub(in crate::paging) fn new(account: Option<Account>) -> Managed {
        Managed {
            account,
            deficit: AtomicU64::new(0),
            covered: AtomicU64::new(0),
            help: AtomicU32::new(IDLE),
            since_us: AtomicU64::new(0),
            epoch: Instant::now(),
            fixed: AtomicU64::new(0),
        }
    }

    fn set_help(&self, help: u32) {
        let now = self.epoch.elapsed().as_micros() as u64;
        self.since_us.store(now, Ordering::Relaxed);
        self.help.store(help, Ordering::Release);
    }

    fn in_state_for(&self) -> Duration {
        let since = Duration::from_micros(self.since_us.load(Ordering::Relaxed));
        self.epoch.elapsed().saturating_sub(since)
    }

    /// The region's account, where a manager has given it one.
    pub(in crate::paging) fn account(&self) -> Option<&Account> {
        self.account.as_ref()
    }

    /// Bytes that a limit guarantees to the region's pages: under a manager what is left of the account's
    /// floor, else all of it.
    pub(in crate::paging) fn guaranteed(&self, limit: ByteCount) -> ByteCount {
        let Some(account) = &self.account else { return limit };
        let fixed = self.fixed.load(Ordering::Relaxed);
        ByteCount(account.floor().min(limit).0.saturating_sub(fixed))
    }

    /// Charges `fixed` bytes, which the region keeps for itself whatever it holds: a manager's limit is
    /// one on all that is resident, where that of a region alone is one on far memory.
    ///
    /// # Errors
    /// When others do not give way for it.
    pub(in crate::paging) fn charge_fixed(
        &self,
        manager: &MemoryManager,
        fixed: ByteCount,
    ) -> Result<()> {
        let Some(account) = &self.account else { return Ok(()) };
        manager.charge(account, fixed)?;
        self.fixed.store(fixed.0, Ordering::Relaxed);
        Ok(())
    }

    // Giving.

    /// Bytes that the evictor has to free for others.
    pub(in crate::paging) fn deficit(&self) -> u64 {
        self.deficit.load(Ordering::Relaxed)
    }

    /// Bytes that others were ever given; what was given back is uncharged.
    pub(in crate::paging) fn covered(&self) -> u64 {
        self.covered.load(Ordering::Acquire)
    }

    /// Asks the evictor to free `bytes` for others.
    pub(in crate::paging) fn add_deficit(&self, bytes: u64) {
        self.deficit.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Notes bytes that were given back to the kernel: others may wait for them.
    pub(in crate::paging) fn gave_back(&self, bytes: u64) {
        if self.deficit() > 0 {
            let part = self.reduce_deficit(bytes);
            // Pairs with the acquire in `covered`: what was given back is uncharged.
            self.covered.fetch_add(part, Ordering::Release);
        }
    }

    /// Takes up to `bytes` off the deficit; returns how much.
    pub(in crate::paging) fn reduce_deficit(&self, bytes: u64) -> u64 {
        let mut deficit = self.deficit.load(Ordering::Relaxed);
        while deficit > 0 {
            let part = deficit.min(bytes);
            let (left, order) = (deficit - part, Ordering::Relaxed);
            match self.deficit.compare_exchange(deficit, left, order, order) {
                Ok(_) => return part,
                Err(now) => deficit = now,
            }
        }
        0
    }

    // Asking.

    /// True if what is missing may come from others, who are asked for it. The evictor leaves its
    /// own pages alone meanwhile. `exhausted`: it has none left.
    pub(in crate::paging) fn others_may_give(&self, missing: u64, exhausted: bool) -> bool {
        let Some(account) = self.account.as_ref().filter(|account| account.may_ask()) else {
            return false; // Alone.
        };
        match self.help.load(Ordering::Acquire) {
            ASKED => {
                if self.in_state_for() <= ANSWER_MAX {
                    return true;
                }
                self.set_help(REFUSED);
                false
            }
            REFUSED if self.in_state_for() < if exhausted { ANSWER_MAX } else { REFUSED_FOR } => {
                false
            }
            _ => {
                self.set_help(ASKED);
                // Nothing of its own left: others have to write theirs.
                let cost = if exhausted { ReclaimCost::WriteBack } else { ReclaimCost::Reread };
                account.ask(ByteCount(missing), cost);
                true
            }
        }
    }

    /// Others have given `freed` bytes, or nothing.
    pub(in crate::paging) fn others_gave(&self, freed: u64) {
        self.set_help(if freed > 0 { IDLE } else { REFUSED });
    }
}
