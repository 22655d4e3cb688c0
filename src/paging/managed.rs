//! A region under a memory manager: what it gives to others, and what it asks of them.
//!
//! A region that stands alone has its limit to itself. One that has joined a manager charges the
//! same budget as everybody else, so that it can be short of memory for two reasons. Short of its
//! own ceiling, it evicts, as ever. Short of the shared limit, it first *asks*: others may hold
//! memory that costs less to give up. Neither handlers nor the evictor wait for the answer; what
//! the manager's thread finds is told by `room_made`. And others ask it: what it *owes* them the
//! evictor takes out of the region and gives back to the kernel, not to the handlers.
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
#![expect(unsafe_code, reason = "promises that far memory is memory")]

use crate::base::deadline::Deadline;
use crate::base::error::Result;
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::base::units::{ByteCount, PageCount};
use crate::limit::manager::{Account, Effort, MemoryManager, Reclaim, Spill};
use crate::paging::pager::Pager;
use crate::paging::region::Region;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

const IDLE: u32 = 0;
const ASKED: u32 = 1;
const REFUSED: u32 = 2;

/// How long the evictor leaves it to others before it evicts its own pages.
const ANSWER_MAX: Duration = Duration::from_millis(5);
/// How long a refusal holds.
const REFUSED_FOR: Duration = Duration::from_millis(50);
/// How long somebody who is owed waits for the next page to leave.
const STALL_MAX: Duration = Duration::from_millis(100);

/// Bytes that a region keeps for itself whatever it holds: threads' stacks, histograms, lists of the
/// evictor, upper page tables ...
const FIXED: u64 = 384 << 10;
/// ... for each handler its queue of requests (256 KiB of buffers' addresses) and its lists ...
const FIXED_PER_HANDLER: u64 = 512 << 10;
/// ... and for each frame what threads know of it. Measured: `docs/design/memory.md`.
const FIXED_PER_FRAME: u64 = 128;

/// A region's place under a limit that is not its own.
#[derive(Debug)]
pub(in crate::paging) struct Joined {
    pub(in crate::paging) account: Option<Account>,
    /// Bytes that others wait for.
    owed: AtomicU64,
    /// Bytes ever given to others.
    paid: AtomicU64,
    help: AtomicU32,
    /// Microseconds from `epoch` to the last change of `help`.
    since_us: AtomicU64,
    epoch: Instant,
    /// What the region keeps for itself, charged at the start.
    fixed: AtomicU64,
}

impl Joined {
    pub(in crate::paging) fn new(account: Option<Account>) -> Joined {
        Joined {
            account,
            owed: AtomicU64::new(0),
            paid: AtomicU64::new(0),
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

    /// Takes up to `bytes` off what is owed; returns how much.
    fn pay(&self, bytes: u64) -> u64 {
        let mut owed = self.owed.load(Ordering::Relaxed);
        while owed > 0 {
            let part = owed.min(bytes);
            let left = owed - part;
            match self.owed.compare_exchange(owed, left, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return part,
                Err(now) => owed = now,
            }
        }
        0
    }
}

impl Pager {
    // Giving.

    /// Bytes that the evictor has to free for others.
    pub(in crate::paging) fn owed(&self) -> u64 {
        self.joined.owed.load(Ordering::Relaxed)
    }

    /// Notes bytes that were given back to the kernel: others may wait for them.
    pub(in crate::paging) fn gave_back(&self, bytes: u64) {
        if self.owed() > 0 {
            let part = self.joined.pay(bytes);
            // Pairs with the acquire in `owe`: what was given back is uncharged.
            self.joined.paid.fetch_add(part, Ordering::Release);
        }
    }

    /// Frees `want` bytes by evicting; returns how many were freed before nothing more went.
    fn owe(&self, want: u64) -> u64 {
        let joined = &self.joined;
        let before = joined.paid.load(Ordering::Acquire);
        joined.owed.fetch_add(want, Ordering::Relaxed);
        self.call_evictor();
        let (mut seen, mut stall) = (0, Deadline::new(STALL_MAX));
        loop {
            let paid = joined.paid.load(Ordering::Acquire) - before;
            if paid > seen {
                seen = paid;
                stall.restart();
            }
            let stopped = self.health().is_stopping();
            let stalled = stall.is_over();
            if paid >= want || stopped || stalled || self.health().is_exhausted() {
                joined.pay(want.saturating_sub(paid));
                return paid.min(want);
            }
            // The evictor has no one to tell.
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Frees spare frames, down to `keep` bytes of them.
    fn free_spares(&self, want: u64, keep: u64) -> u64 {
        let page = self.page_bytes() as u64;
        let mut freed = 0;
        while freed < want && self.frames.spare_bytes() as u64 > keep {
            if let Some(frame) = self.frames.take_spare() {
                self.free_frame(frame);
                freed += page;
                continue;
            }
            match self.free_spare_run() {
                0 => break,
                bytes => freed += bytes,
            }
        }
        freed
    }

    // Asking.

    /// Whether what is missing may come from others, who are asked for it. The evictor leaves its
    /// own pages alone meanwhile.
    pub(in crate::paging) fn others_may_give(&self, missing: u64) -> bool {
        let joined = &self.joined;
        let Some(account) = &joined.account else { return false };
        let spares = self.frames.spare_bytes() as u64;
        let own = self.budget.own_free().0 + spares;
        let alone = self.health().is_exhausted();
        if missing == 0 || own < self.high_bytes.load(Ordering::Relaxed) || !account.may_ask() {
            return false; // Short of its own ceiling, or in a part of its own.
        }
        match joined.help.load(Ordering::Acquire) {
            ASKED => {
                if joined.in_state_for() <= ANSWER_MAX {
                    return true;
                }
                joined.set_help(REFUSED);
                false
            }
            REFUSED if joined.in_state_for() < if alone { ANSWER_MAX } else { REFUSED_FOR } => {
                false
            }
            _ => {
                joined.set_help(ASKED);
                // Nothing of its own left: others have to write theirs.
                let effort = if alone { Effort::Write } else { Effort::Clean };
                account.ask(ByteCount(missing), effort);
                true
            }
        }
    }

    // Limit.

    /// What the limit guarantees to this region's pages: all of it, or its floor under a manager.
    pub(in crate::paging) fn guaranteed(&self) -> ByteCount {
        match &self.joined.account {
            Some(account) => {
                let fixed = self.joined.fixed.load(Ordering::Relaxed);
                ByteCount(account.floor().min(self.budget.limit()).0.saturating_sub(fixed))
            }
            None => self.budget.limit(),
        }
    }

    /// Charges what the region keeps for itself, under a manager: its limit is one on all that is
    /// resident, where that of a region alone is one on far memory.
    ///
    /// # Errors
    /// When others do not give way for it.
    pub(in crate::paging) fn charge_fixed(&self, manager: &MemoryManager) -> Result<()> {
        let Some(account) = &self.joined.account else { return Ok(()) };
        let handlers = self.sched.handlers() as u64 * FIXED_PER_HANDLER;
        let frames = self.frames.count() as u64 * FIXED_PER_FRAME;
        let fixed = FIXED + handlers + frames + self.page_size().0;
        manager.charge(account, ByteCount(fixed))?;
        self.joined.fixed.store(fixed, Ordering::Relaxed);
        Ok(())
    }

    /// Sets the limit, which is a ceiling under a manager.
    pub(crate) fn set_limit(&self, limit: ByteCount) {
        match &self.joined.account {
            // Tells `ceiling_changed` if it has; watermarks follow in any case.
            Some(account) => account.set_ceiling(limit),
            None => self.budget.set_limit(limit),
        }
        self.follow_limit();
    }

    /// Sets the watermarks and the policy's sizes that follow from the limit.
    fn follow_limit(&self) {
        let limit = self.budget.limit();
        self.set_watermarks(limit);
        self.policy().lock().resize(PageCount(limit.0 / self.page_bytes() as u64));
        self.call_evictor();
    }
}

impl Reclaim for Pager {
    fn reclaim(&self, want: ByteCount, effort: Effort) -> ByteCount {
        let high = self.high_bytes.load(Ordering::Relaxed);
        match effort {
            Effort::Spare => {
                let spares = self.free_spares(want.0, high) + self.release_tables();
                let charged = self.budget.charged();
                self.care.call_and_wait();
                let purged = charged.0.saturating_sub(self.budget.charged().0);
                ByteCount(spares + purged)
            }
            // Whether a page is clean shows when it has left.
            Effort::Clean => ByteCount::ZERO,
            Effort::Write => {
                let spares = self.free_spares(want.0, 0);
                ByteCount(spares + if spares < want.0 { self.owe(want.0 - spares) } else { 0 })
            }
        }
    }

    fn cost(&self, effort: Effort) -> u32 {
        // Cold far pages that are clean after all go without a write: before dirty table pages.
        if effort == Effort::Write { 50 } else { 20 }
    }

    fn describe_held(&self) -> String {
        let mut held = Vec::new();
        let pinned = self.table().pinned() * self.page_bytes() as u64;
        if pinned > 0 {
            held.push(format!("{} pinned", ByteCount(pinned)));
        }
        if self.health().write_errno() != 0 {
            held.push("write-back fails".to_owned());
        }
        if held.is_empty() { String::new() } else { format!(" ({})", held.join(", ")) }
    }

    fn metadata(&self) -> ByteCount {
        self.tables.bytes()
    }

    fn ceiling_changed(&self, _ceiling: ByteCount) {
        self.follow_limit();
    }

    fn room_made(&self, freed: ByteCount) {
        if freed.0 > 0 {
            self.note_room_made();
        }
        self.joined.set_help(if freed.0 > 0 { IDLE } else { REFUSED });
        self.feed_handlers();
        self.call_evictor();
    }
}

// SAFETY: `map` hands out a range that nobody else has until it is unmapped, readable and writable
// for as long as the region exists, which whoever holds the memory holds too; its pages are
// multiples of 4,096.
unsafe impl Spill for Region {
    fn allocate(&self, len: ByteCount) -> Result<NonNull<u8>> {
        self.map(len)
    }

    unsafe fn free(&self, ptr: NonNull<u8>, len: ByteCount) {
        // SAFETY: `allocate` mapped the range, and the caller gives it back.
        unsafe { self.unmap(ptr, len) }.expect("the range was mapped for this memory");
    }
}
