//! Which data comes back soon after it has left: fresh data, or data that was read from the device.
//!
//! The policy hears nothing of fresh data in open chunks, so it cannot weigh that data against the pages on
//! its lists: the evictor has to choose between the two (`victims`). Which choice was right shows afterwards,
//! by what is read again. Tables that an engine loads are not needed again soon, hash tables of its next
//! query are, and nothing tells one from the other before.
//!
//! ```text
//!            evicted                 read again: did it come back soon?
//!   fresh ------------> left, fresh ------------------------------------> read
//!     ^                                evicted                              |
//!     |  discarded    read ------------> left, read -----------------------+
//!     +------------- (any)               read again: did it come back soon?
//! ```
//! A page comes back *soon* when a fault reads it before as many pages have left as the limit has room for:
//! it would have been hit, had others left in its place (the refault distance of Linux's working-set
//! detection, `mm/workingset.c`). The policy remembers when it left, and whether it had been read. What is read ahead of
//! a fault does not count, as it costs little.

use crate::base::units::PageCount;
use crate::paging::evict::policy::Insert;
use crate::paging::evict::policy::tally::Tally;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(in crate::paging) struct Returns {
    /// Pages that fit into memory.
    limit: u64,
    /// Of fresh data, and of data that had been read.
    tallies: [Tally; 2],
}

impl Returns {
    pub(super) fn new(limit: PageCount) -> Returns {
        Returns { limit: limit.get(), ..Returns::default() }
    }

    /// From now on `limit` pages fit into memory.
    pub(super) fn resize(&mut self, limit: PageCount) {
        self.limit = limit.get();
    }

    /// True if a page that left that long ago would be here, had others left in its place.
    pub(super) fn is_soon(&self, absence: u64) -> bool {
        absence <= self.limit
    }

    /// A page has left, which was read when it came in, or was fresh.
    pub(super) fn leave(&mut self, was_read: bool) {
        self.tallies[usize::from(was_read)].left += 1;
        // A limit's worth is remembered: with half of that, a query of DataFusion wrote 1.3 times as much.
        Tally::fade(&mut self.tallies, self.limit);
    }

    /// A page has come in that had left; `absence` is how many have since then.
    pub(super) fn arrive(&mut self, was_read: bool, absence: u64, how: Insert) {
        if how == Insert::Filled && self.is_soon(absence) {
            self.tallies[usize::from(was_read)].came_back += 1;
        }
    }

    /// True if more of the fresh data that left came back by faults than of the data that had been read, by half as
    /// much again: below that it is chance, as where all data is used alike.
    pub(in crate::paging) fn fresh_return_more(&self) -> bool {
        let [fresh, read] = self.tallies;
        2 * fresh.came_back * (read.left + 1) > 3 * read.came_back * (fresh.left + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_a_limit_of_pages_is_remembered() {
        let mut returns = Returns::new(PageCount(64));
        for page in 0..1_000 {
            returns.leave(page % 3 == 0);
            let [fresh, read] = returns.tallies;
            assert!(fresh.left + read.left <= 64, "{returns:?}");
        }
        let [fresh, read] = returns.tallies;
        assert!(fresh.left > read.left, "{returns:?}");
    }
}
