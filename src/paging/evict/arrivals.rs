//! The resident pages: what the policy lists, how many have come in, and what comes back.
//!
//! Pages are counted where the policy is told of them, under its lock, because the evictor decides
//! by what arrives ([`Arrivals`]) and what returns ([`Returns`]) which kind of memory makes room.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::{Insert, Policy};
use crate::paging::evict::returns::Returns;
use crate::paging::page::CHUNK_LEN;

/// Pages that have ever come in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::paging) struct Arrived {
    /// Read from the device, for a fault or ahead of one.
    pub(in crate::paging) filled: u64,
    /// Of these, ahead of faults.
    pub(in crate::paging) ahead: u64,
    /// Without content, one by one or with a chunk that the kernel fills.
    pub(in crate::paging) fresh: u64,
}

/// The part for data that had been read: 1/AT_ONCE_PART, see [`Residents::left_lately`].
const AT_ONCE_PART: u64 = 16;

/// The resident pages as the policy knows them, and what is known of those that left.
#[derive(Debug)]
pub(in crate::paging) struct Residents {
    pub(in crate::paging) policy: Policy,
    pub(in crate::paging) arrived: Arrived,
    pub(in crate::paging) returns: Returns,
}

impl Residents {
    /// Of a region of `pages` pages, of which `limit` fit into memory.
    ///
    /// # Errors
    /// When the kernel refuses a mapping.
    pub(in crate::paging) fn new(pages: PageCount, limit: PageCount) -> Result<Residents> {
        let policy = Policy::new(pages, limit)?;
        Ok(Residents { policy, arrived: Arrived::default(), returns: Returns::new(limit) })
    }

    /// Notes that an absent page has come in. Returns how many pages have left since it left itself, if that is known.
    pub(in crate::paging) fn arrive(&mut self, page: PageId, how: Insert) -> Option<u64> {
        match how {
            Insert::Fresh => self.arrived.fresh += 1,
            Insert::Filled => self.arrived.filled += 1,
            Insert::Prefetched => {
                self.arrived.filled += 1;
                self.arrived.ahead += 1;
            }
        }
        let was_read = self.policy.was_read(page);
        let absence = self.policy.inserted(page, how);
        absence.inspect(|absence| self.returns.arrive(was_read, *absence, how))
    }

    /// Lists a page that is in memory already, unless the policy knows it: one of a chunk that is closed, or
    /// a page that the policy was told to forget.
    pub(in crate::paging) fn list(&mut self, page: PageId) {
        self.policy.inserted(page, Insert::Fresh);
    }

    /// Notes that the kernel fills a chunk from now on. The policy hears of its pages when the chunk is closed.
    pub(in crate::paging) fn opened(&mut self) {
        self.arrived.fresh += CHUNK_LEN.0;
    }

    /// True if a page left a short while ago: since then no more pages have left than the limit has room for, or than a part
    /// of that where it had been read, for then its neighbours are seldom needed soon.
    pub(in crate::paging) fn left_lately(&self, page: PageId) -> bool {
        let part = if self.policy.was_read(page) { AT_ONCE_PART } else { 1 };
        self.policy.absence(page).is_some_and(|absence| self.returns.is_soon(part * absence))
    }

    /// Notes that a page has left.
    pub(in crate::paging) fn evicted(&mut self, page: PageId) {
        self.returns.leave(self.policy.was_read(page));
        self.policy.evicted(page);
    }

    /// Forgets a page whose content was discarded, wherever it is.
    pub(in crate::paging) fn removed(&mut self, page: PageId) {
        self.policy.removed(page);
    }

    /// Forgets all pages of a range, which are empty, and gives back what memory there is of them alone.
    pub(in crate::paging) fn released(&mut self, first: PageId, count: PageCount) {
        self.policy.released(first, count);
    }

    /// Notes that about `limit` pages fit into memory from now on.
    pub(in crate::paging) fn resize(&mut self, limit: PageCount) {
        self.returns.resize(limit);
        self.policy.resize(limit);
    }
}

/// While the policy's pages go first, this many leave before a chunk does: fresh data is given up as well, only
/// slowly, and it shows whether it still comes back.
const AGEING: u64 = 8 * CHUNK_LEN.0;

/// Arrivals count as read in order while at least 1/ORDERED_PART of it came ahead of its fault: of reads at
/// random 1 in 30 does, of a scan what the device has read before the reader gets there.
const ORDERED_PART: u64 = 8;

/// Which pages arrive: read from the device, or fresh.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrivals {
    /// Arrivals at the last look.
    before: Arrived,
    /// Pages that arrived lately.
    filled: u64,
    ahead: u64,
    fresh: u64,
    /// Pages that went before chunks since a chunk was given up.
    since_chunk: u64,
}

impl Arrivals {
    /// True if most of what arrived lately was read in order.
    pub(super) fn in_order(&self) -> bool {
        self.filled > self.fresh && ORDERED_PART * self.ahead > self.filled
    }

    /// True if most of what arrived lately is fresh.
    pub(super) fn fresh_prevail(&self) -> bool {
        self.fresh > self.filled
    }

    /// Notes how many pages have ever arrived; what came before the last few chunks is forgotten.
    pub(super) fn look(&mut self, arrived: Arrived) {
        const MEMORY: u64 = 4 * CHUNK_LEN.0;
        self.filled += arrived.filled - self.before.filled;
        self.ahead += arrived.ahead - self.before.ahead;
        self.fresh += arrived.fresh - self.before.fresh;
        self.before = arrived;
        while self.filled + self.fresh > MEMORY {
            let Arrivals { filled, ahead, fresh, .. } = *self;
            (self.filled, self.ahead, self.fresh) = (filled / 2, ahead / 2, fresh / 2);
        }
    }

    /// True if `want` of the policy's pages should make room, not a chunk: what arrives is read in order, or fresh data
    /// comes back by faults more than what was read (`fresh_return`).
    ///
    /// Pages read at random are needed again at random: while its likes made room, a hot set of 300 MiB that
    /// had left with its chunks got back one page in eight that were read, and fresh data that nobody came
    /// back for kept the rest of the limit.
    pub(super) fn policy_goes_first(&mut self, want: u64, fresh_return: bool) -> bool {
        if !self.in_order() && !fresh_return {
            return false;
        }
        if self.since_chunk >= AGEING {
            self.since_chunk = 0;
            return false;
        }
        self.since_chunk += want;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;

    /// Pages that fit into memory.
    const LIMIT: u64 = 64;

    fn residents() -> Residents {
        Residents::new(PageCount(10_000), PageCount(LIMIT)).expect("address space")
    }

    fn leave(residents: &mut Residents, pages: Range<u64>) {
        for page in pages.map(PageId) {
            residents.policy.bypassed(page);
            residents.evicted(page);
        }
    }

    fn arrive(residents: &mut Residents, pages: Range<u64>, how: Insert) {
        for page in pages.map(PageId) {
            residents.arrive(page, how);
        }
    }

    #[test]
    fn nothing_is_known_at_first() {
        assert!(!residents().returns.fresh_return_more());
    }

    #[test]
    fn fresh_data_that_is_read_again_stays_rather_than_data_that_is_not() {
        let mut residents = residents();
        arrive(&mut residents, 1_000..1_020, Insert::Filled);
        leave(&mut residents, 1_000..1_020);
        leave(&mut residents, 0..20);
        assert!(!residents.returns.fresh_return_more());
        arrive(&mut residents, 0..10, Insert::Filled);
        assert!(residents.returns.fresh_return_more());
        // As much of both: then fresh data goes.
        arrive(&mut residents, 1_000..1_010, Insert::Filled);
        assert!(!residents.returns.fresh_return_more());
    }

    #[test]
    fn what_comes_back_late_or_ahead_of_a_fault_does_not_count() {
        let mut residents = residents();
        leave(&mut residents, 0..20);
        arrive(&mut residents, 0..10, Insert::Prefetched);
        assert!(!residents.returns.fresh_return_more());
        leave(&mut residents, 100..100 + 2 * LIMIT);
        arrive(&mut residents, 10..20, Insert::Filled);
        assert!(!residents.returns.fresh_return_more());
    }

    #[test]
    fn a_page_that_was_read_counts_as_read_until_it_is_discarded() {
        let mut residents = residents();
        arrive(&mut residents, 0..10, Insert::Filled);
        leave(&mut residents, 0..10);
        arrive(&mut residents, 0..10, Insert::Filled);
        assert!(!residents.returns.fresh_return_more(), "these were no fresh ones");
        (0..10).for_each(|page| residents.removed(PageId(page)));
        leave(&mut residents, 0..10);
        arrive(&mut residents, 0..10, Insert::Filled);
        leave(&mut residents, 0..10);
        assert!(residents.returns.fresh_return_more(), "all of these, and half of those");
    }

    #[test]
    fn a_page_that_the_kernel_filled_after_it_had_left_is_fresh() {
        let mut residents = residents();
        arrive(&mut residents, 0..8, Insert::Filled);
        leave(&mut residents, 0..8);
        leave(&mut residents, 0..8);
        arrive(&mut residents, 0..8, Insert::Filled);
        assert!(residents.returns.fresh_return_more());
    }

    #[test]
    fn pages_left_lately_until_a_limit_of_others_has_left_or_a_part_of_it_if_they_were_read() {
        let mut residents = residents();
        assert!(!residents.left_lately(PageId(1)), "it has not left");
        leave(&mut residents, 1..3);
        assert!(residents.left_lately(PageId(1)));
        arrive(&mut residents, 1..2, Insert::Filled);
        leave(&mut residents, 1..2);
        assert!(residents.left_lately(PageId(1)), "just now");
        leave(&mut residents, 100..100 + LIMIT / AT_ONCE_PART);
        assert!(!residents.left_lately(PageId(1)), "it was read");
        assert!(residents.left_lately(PageId(2)), "it is fresh");
        leave(&mut residents, 100..100 + 2 * LIMIT);
        assert!(!residents.left_lately(PageId(2)), "long ago");
    }

    #[test]
    fn what_was_learnt_fades() {
        let mut residents = residents();
        leave(&mut residents, 0..LIMIT);
        arrive(&mut residents, 0..LIMIT, Insert::Filled);
        assert!(residents.returns.fresh_return_more());
        // From now on what was read returns, and fresh data does not.
        for turn in 1..20 {
            leave(&mut residents, 100 * turn..100 * turn + LIMIT / 2);
            leave(&mut residents, 0..LIMIT / 4);
            arrive(&mut residents, 0..LIMIT / 4, Insert::Filled);
        }
        assert!(!residents.returns.fresh_return_more());
    }

    #[test]
    fn fresh_pages_are_answered_by_chunks() {
        let mut arrivals = Arrivals::default();
        (1..100).for_each(|turn| {
            arrivals.look(Arrived { filled: turn, ahead: turn, fresh: 2 * turn });
            assert!(!arrivals.policy_goes_first(1, false));
        });
    }

    #[test]
    fn pages_read_in_order_make_room_for_their_likes_and_a_chunk_goes_now_and_then() {
        let mut arrivals = Arrivals::default();
        arrivals.look(Arrived { filled: 10_000, ahead: 10_000, fresh: 20_000 });
        let mut chunks = 0;
        for turn in 0..10 * AGEING {
            let filled = 20_000 + turn;
            arrivals.look(Arrived { filled, ahead: filled, fresh: 20_000 });
            chunks += u64::from(!arrivals.policy_goes_first(1, false));
        }
        assert_eq!(chunks, 9, "one for {} pages", AGEING);
    }

    #[test]
    fn pages_read_at_random_are_answered_by_chunks() {
        let mut arrivals = Arrivals::default();
        (1..100).for_each(|turn| {
            arrivals.look(Arrived { filled: 30 * turn, ahead: turn, fresh: turn });
            assert!(!arrivals.policy_goes_first(1, false));
        });
    }

    #[test]
    fn fresh_pages_that_return_are_kept_whatever_arrives_and_a_chunk_goes_now_and_then() {
        let mut arrivals = Arrivals::default();
        let mut chunks = 0;
        for turn in 1..=10 * AGEING {
            arrivals.look(Arrived { filled: turn, ahead: 0, fresh: 2 * turn });
            chunks += u64::from(!arrivals.policy_goes_first(1, true));
        }
        assert_eq!(chunks, 9, "one for {} pages", AGEING);
    }

    #[test]
    fn what_arrived_long_ago_is_forgotten() {
        let mut arrivals = Arrivals::default();
        arrivals.look(Arrived { filled: 0, ahead: 0, fresh: 1 << 40 });
        (1..8).for_each(|turn| {
            let filled = turn * CHUNK_LEN.0;
            arrivals.look(Arrived { filled, ahead: filled, fresh: 1 << 40 });
        });
        assert!(arrivals.policy_goes_first(1, false));
    }
}
