//! The policy's lists, and how many pages have ever come in.
//!
//! Pages are counted where the policy is told of them, under its lock, because the evictor decides
//! by what arrives which kind of memory makes room ([`Arrivals`]).

use crate::base::units::PageId;
use crate::paging::evict::policy::{EvictionPolicy, Insert};
use std::ops::{Deref, DerefMut};

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

/// The resident pages as the policy knows them.
#[derive(Debug)]
pub(in crate::paging) struct Residents {
    policy: Box<dyn EvictionPolicy>,
    arrived: Arrived,
}

impl Residents {
    pub(in crate::paging) fn new(policy: Box<dyn EvictionPolicy>) -> Residents {
        Residents { policy, arrived: Arrived::default() }
    }

    /// Notes that an absent page has come in.
    pub(in crate::paging) fn arrive(&mut self, page: PageId, how: Insert) {
        match how {
            Insert::Fresh => self.arrived.fresh += 1,
            Insert::Filled => self.arrived.filled += 1,
            Insert::Prefetched => {
                self.arrived.filled += 1;
                self.arrived.ahead += 1;
            }
        }
        self.policy.inserted(page, how);
    }

    /// Notes that the kernel fills a chunk of `pages` pages from now on. The policy hears of them when
    /// the chunk is closed.
    pub(in crate::paging) fn opened(&mut self, pages: u64) {
        self.arrived.fresh += pages;
    }

    /// How many pages have ever come in.
    pub(in crate::paging) fn arrived(&self) -> Arrived {
        self.arrived
    }
}

impl Deref for Residents {
    type Target = dyn EvictionPolicy;

    fn deref(&self) -> &Self::Target {
        &*self.policy
    }
}

impl DerefMut for Residents {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut *self.policy
    }
}

/// While what arrives is mostly read in order, this many times the bytes of a chunk leave by
/// the policy before a chunk does: fresh data is given up as well, only slowly.
const AGEING: u64 = 8;

/// What arrives is read in order while at least 1/ORDERED_PART of it came ahead of its fault: of reads at
/// random 1 in 30 does, of a scan what the device has read before the reader gets there.
const ORDERED_PART: u64 = 8;

/// Which pages arrive: read from the device, or fresh.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Arrivals {
    /// What had come in at the last look.
    before: Arrived,
    /// Pages that arrived lately.
    filled: u64,
    ahead: u64,
    fresh: u64,
    /// Pages that left by the policy since a chunk left.
    since_chunk: u64,
}

impl Arrivals {
    /// Whether most of what arrived lately is fresh.
    pub(super) fn fresh_prevail(&self) -> bool {
        self.fresh > self.filled
    }

    /// Notes how many pages have ever arrived; what came before the last few chunks of `chunk`
    /// pages is forgotten.
    pub(super) fn look(&mut self, arrived: Arrived, chunk: u64) {
        const MEMORY_CHUNKS: u64 = 4;
        self.filled += arrived.filled - self.before.filled;
        self.ahead += arrived.ahead - self.before.ahead;
        self.fresh += arrived.fresh - self.before.fresh;
        self.before = arrived;
        while self.filled + self.fresh > MEMORY_CHUNKS * chunk {
            let Arrivals { filled, ahead, fresh, .. } = *self;
            (self.filled, self.ahead, self.fresh) = (filled / 2, ahead / 2, fresh / 2);
        }
    }

    /// Whether room is needed for pages that are read in order, and `want` of their likes should
    /// make it, not a chunk of `chunk` pages. What is read at random is needed again at random: while its likes
    /// made room, a hot set of 300 MiB that had left with its chunks got back one page in eight that were read,
    /// and fresh data that nobody came back for kept the rest of the limit.
    pub(super) fn filled_make_room(&mut self, want: u64, chunk: u64) -> bool {
        if self.since_chunk >= AGEING * chunk {
            self.since_chunk = 0;
            return false;
        }
        let prevail = self.filled > self.fresh && ORDERED_PART * self.ahead > self.filled;
        self.since_chunk += if prevail { want } else { 0 };
        prevail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of a chunk.
    const CHUNK: u64 = 32;

    #[test]
    fn fresh_pages_are_answered_by_chunks() {
        let mut arrivals = Arrivals::default();
        (1..100).for_each(|turn| {
            arrivals.look(Arrived { filled: turn, ahead: turn, fresh: 2 * turn }, CHUNK);
            assert!(!arrivals.filled_make_room(1, CHUNK));
        });
    }

    #[test]
    fn pages_read_in_order_make_room_for_their_likes_and_a_chunk_goes_now_and_then() {
        let mut arrivals = Arrivals::default();
        arrivals.look(Arrived { filled: 10_000, ahead: 10_000, fresh: 20_000 }, CHUNK);
        let mut chunks = 0;
        for turn in 0..10 * AGEING * CHUNK {
            let filled = 20_000 + turn;
            arrivals.look(Arrived { filled, ahead: filled, fresh: 20_000 }, CHUNK);
            chunks += u64::from(!arrivals.filled_make_room(1, CHUNK));
        }
        assert_eq!(chunks, 9, "one for {} pages", AGEING * CHUNK);
    }

    #[test]
    fn pages_read_at_random_are_answered_by_chunks() {
        let mut arrivals = Arrivals::default();
        (1..100).for_each(|turn| {
            arrivals.look(Arrived { filled: 30 * turn, ahead: turn, fresh: turn }, CHUNK);
            assert!(!arrivals.filled_make_room(1, CHUNK));
        });
    }

    #[test]
    fn what_arrived_long_ago_is_forgotten() {
        let mut arrivals = Arrivals::default();
        arrivals.look(Arrived { filled: 0, ahead: 0, fresh: 1 << 40 }, CHUNK);
        (1..8).for_each(|turn| {
            let filled = turn * CHUNK;
            arrivals.look(Arrived { filled, ahead: filled, fresh: 1 << 40 }, CHUNK);
        });
        assert!(arrivals.filled_make_room(1, CHUNK));
    }
}
