//! When the device space of freed slots is given back.
//!
//! Freed slots are written again before others ([`slots`](crate::store::slots)), so most of them need not
//! be given back. Giving back holds up reads: of a file, `fallocate(2)` keeps them out and waits for
//! those that are under way, and io_uring hands reads that find the file busy to worker threads; later
//! writes to the hole have to allocate. With 4 KiB pages, half of the accesses writes, eight threads, it
//! cost half of the rate (book/src/design/write_back.md, *Freed slots*).

#![expect(unsafe_code, reason = "discards slots that nobody uses")]

use crate::base::units::SlotCount;
use crate::paging::diagnostics;
use crate::paging::page::PAGE;
use crate::paging::pager::Pager;
use std::time::{Duration, Instant};

/// After this long without a transfer of pages the device counts as quiet.
const QUIET: Duration = Duration::from_millis(500);

/// After this long with more stale slots than used ones their space goes back although pages come and go.
/// Not at once: data that goes to the device, comes back and goes again, as a segment that migrates, finds its
/// space there, and with holes instead of it each write allocates, one at a time (book/src/design/write_back.md).
const PLENTY: Duration = Duration::from_secs(2);

/// Maximum length of one discard, 4 MiB: faults that come meanwhile wait for it, some 0.7 ms.
const DISCARD_MAX: SlotCount = SlotCount(1 << 10);

/// Minimum length of one discard beside faults and at the end, 1 MiB: 64 KiB take 0.16 ms, 4 MiB 0.7.
pub(super) const LONG: SlotCount = SlotCount(1 << 8);

/// The evictor's record of freed space.
#[derive(Debug)]
pub(super) struct DeviceSpace {
    /// Pages that had been read and written when it looked last.
    transfers: u64,
    /// Since when there were no more.
    quiet_since: Instant,
    /// Since when more slots were stale than in use; `None`: they are not.
    plenty_since: Option<Instant>,
    /// All of it is to be given back, because somebody has asked.
    pub(super) is_asked: bool,
}

impl Pager {
    /// Gives the device space of a run of freed slots back, of `least` or more; returns whether
    /// there was one. For the evictor, or when the region's threads have ended.
    pub(super) fn discard_freed(&self, least: SlotCount) -> bool {
        let run = self.slots().map().next_discardable(least, DISCARD_MAX);
        let Some(run) = run else { return false };
        let (offset, len) = (self.slots().offset(run.0), run.1.0 * PAGE as u64);
        // SAFETY: the slots are free, and stay so until `discarded`.
        let result = self.guarded(|| unsafe { self.slots().store().discard(offset, len) });
        if let Err(error) = result.unwrap_or(Ok(())) {
            diagnostics::warn("device space could not be returned", &error);
        }
        self.slots().map().discarded(run);
        true
    }

    /// At the region's end: gives back what was freed last, unless that goes with the store. Short runs
    /// stay, for there may be very many.
    pub(in crate::paging) fn discard_freed_last(&self) {
        let is_healthy = self.health().write_errno() == 0 && !crate::store::has_given_up();
        let is_wanted = is_healthy && self.slots().store().outlives_process();
        while is_wanted && self.discard_freed(LONG) {}
    }
}

impl DeviceSpace {
    pub(super) fn new() -> DeviceSpace {
        let quiet_since = Instant::now();
        DeviceSpace { transfers: 0, quiet_since, plenty_since: None, is_asked: false }
    }

    /// True if no page has come or gone for a while, of which there were `transfers` up to `now`.
    pub(super) fn is_quiet(&mut self, transfers: u64, now: Instant) -> bool {
        if transfers != self.transfers {
            self.transfers = transfers;
            self.quiet_since = now;
        }
        now.saturating_duration_since(self.quiet_since) >= QUIET
    }

    /// True if more slots are stale than in use, up to `now`, and have been for a while.
    pub(super) fn is_plenty(&mut self, stale: SlotCount, used: SlotCount, now: Instant) -> bool {
        if stale <= used {
            self.plenty_since = None;
            return false;
        }
        now.saturating_duration_since(*self.plenty_since.get_or_insert(now)) >= PLENTY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_quiet_half_a_second_after_the_last_transfer() {
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        let mut space = DeviceSpace { quiet_since: began, ..DeviceSpace::new() };
        assert!(!space.is_quiet(7, after(10)));
        assert!(!space.is_quiet(8, after(509)), "one more has come");
        assert!(!space.is_quiet(8, after(1008)));
        assert!(space.is_quiet(8, after(1009)));
        assert!(space.is_quiet(8, after(2000)));
        assert!(!space.is_quiet(9, after(2001)));
    }

    #[test]
    fn space_is_plenty_once_more_has_been_stale_than_used_for_two_seconds() {
        let began = Instant::now();
        let mut space = DeviceSpace::new();
        let mut is_plenty = |stale, used, ms| {
            space.is_plenty(SlotCount(stale), SlotCount(used), began + Duration::from_millis(ms))
        };
        assert!(!is_plenty(9, 8, 0));
        assert!(!is_plenty(9, 8, 1999));
        assert!(is_plenty(9, 8, 2000));
        assert!(!is_plenty(8, 8, 2001), "as many are used again");
        assert!(!is_plenty(9, 8, 2002));
        assert!(is_plenty(9, 0, 4002));
    }
}
