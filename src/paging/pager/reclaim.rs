//! Reclaim: what a region gives up when others under its memory manager are short.
//!
//! The manager calls this from the threads of those who are short. What can be freed at once is; the
//! rest the evictor takes out, and the caller waits for it as long as pages keep leaving.

use crate::base::deadline::Deadline;
use crate::base::units::{ByteCount, PageCount};
use crate::limit::manager::{Reclaim, ReclaimCost};
use crate::paging::page::{PAGE, PAGE_SIZE};
use crate::paging::pager::Pager;
use crate::paging::pager::frame_pool::FramePool;
use std::time::Duration;

/// How long who reclaims waits for the next page to leave.
const STALL_MAX: Duration = Duration::from_millis(100);

/// Frees spare frames, down to `keep` bytes of them.
pub(in crate::paging) fn free_spares(pool: &FramePool, want: u64, keep: u64) -> u64 {
    let frames = pool.staging();
    let mut freed = 0;
    while freed < want && frames.spare_bytes() as u64 > keep {
        if let Some(frame) = frames.take_spare() {
            pool.free(frame, 1);
            freed += PAGE_SIZE.0;
            continue;
        }
        match pool.free_spare_run() {
            0 => break,
            bytes => freed += bytes,
        }
    }
    freed
}

/// Frees `want` bytes by evicting; returns how many were freed before nothing more went.
fn evict_for_others(pager: &Pager, want: u64) -> u64 {
    let managed = pager.pool().managed();
    let before = managed.covered();
    managed.add_deficit(want);
    pager.pool().waiters().call_evictor();
    let (mut seen, mut stall) = (0, Deadline::new(STALL_MAX));
    loop {
        let covered = managed.covered() - before;
        if covered > seen {
            seen = covered;
            stall.restart();
        }
        let stopped = pager.health().is_stopping();
        let stalled = stall.is_over();
        if covered >= want || stopped || stalled || pager.health().is_exhausted() {
            managed.reduce_deficit(want.saturating_sub(covered));
            return covered.min(want);
        }
        // The evictor has no one to tell.
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Sets the limit, which is a ceiling under a manager.
pub(in crate::paging) fn set_limit(pager: &Pager, limit: ByteCount) {
    match pager.pool().managed().account() {
        // Tells `ceiling_changed` if it has; watermarks follow in any case.
        Some(account) => account.set_ceiling(limit),
        None => pager.budget().set_limit(limit),
    }
    follow_limit(pager);
}

/// Sets the watermarks and the policy's sizes that follow from the limit.
fn follow_limit(pager: &Pager) {
    let limit = pager.budget().limit();
    pager.pool().watermarks().set(limit);
    pager.memory().policy().lock().resize(PageCount(limit.0 / PAGE as u64));
    pager.pool().waiters().call_evictor();
}

impl Reclaim for Pager {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        let high = self.pool().watermarks().high();
        match cost {
            ReclaimCost::Free => {
                let spares =
                    free_spares(self.pool(), want.0, high) + self.tables().release(self.memory());
                let charged = self.budget().charged();
                self.pool().purge().call_and_wait();
                let purged = charged.0.saturating_sub(self.budget().charged().0);
                ByteCount(spares + purged)
            }
            // Whether a page is clean shows when it has left.
            ReclaimCost::Reread => ByteCount::ZERO,
            ReclaimCost::WriteBack => {
                let spares = free_spares(self.pool(), want.0, 0);
                ByteCount(
                    spares
                        + if spares < want.0 { evict_for_others(self, want.0 - spares) } else { 0 },
                )
            }
        }
    }

    fn order(&self, cost: ReclaimCost) -> u32 {
        // Cold far pages that are clean after all go without a write: before dirty table pages.
        if cost == ReclaimCost::WriteBack { 50 } else { 20 }
    }

    fn describe_held(&self) -> String {
        let mut held = Vec::new();
        let pinned = self.table().pinned() * PAGE as u64;
        if pinned > 0 {
            held.push(format!("{} pinned", ByteCount(pinned)));
        }
        if self.health().write_errno() != 0 {
            held.push("write-back fails".to_owned());
        }
        if held.is_empty() { String::new() } else { format!(" ({})", held.join(", ")) }
    }

    fn metadata(&self) -> ByteCount {
        self.tables().bytes()
    }

    fn ceiling_changed(&self, _ceiling: ByteCount) {
        follow_limit(self);
    }

    fn room_made(&self, freed: ByteCount) {
        if freed.0 > 0 {
            self.note_room_made();
        }
        self.pool().managed().others_gave(freed.0);
        self.pool().waiters().feed_handlers();
        self.pool().waiters().call_evictor();
    }
}
