//! Which page the hand takes: the policies.
//!
//! The mechanism is the same for all: a hand sweeps the resident pages in address order (so that
//! victims are neighbours), and finds out whether a page was touched since its last pass. A
//! policy decides what a page is worth when it comes in and when the hand passes.

use super::latch::HEAT_MAX;
use std::fmt::Debug;

/// Worth of a page: laps of the hand it stays without being touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worth {
    /// Laps, 0 to 3.
    pub laps: u8,
    /// True if the touch that brought the page in counts for the next pass of the hand.
    pub touched: bool,
}

/// Decides which pages leave the pool. A safe trait: a wrong decision costs time only.
pub trait Replacement: Send + Sync + Debug {
    /// Worth of an arriving page. `away` are the evictions since it was last evicted, in pools: 1.0 means that as many
    /// pages were evicted meanwhile as fit into the pool; `None` when it never was, or too long ago. It is
    /// `prefetched` if it is read ahead of a touch that may never come.
    fn arrives(&self, away: Option<f32>, prefetched: bool) -> Worth;

    /// The hand passes a page that was touched since its last pass and had `laps` left: how many
    /// it has now.
    fn passes_touched(&self, laps: u8) -> u8;
}

/// Second chance: a page leaves when the hand passes twice and it was not touched in between.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock;

impl Replacement for Clock {
    fn arrives(&self, _away: Option<f32>, _prefetched: bool) -> Worth {
        Worth { laps: 0, touched: true }
    }

    fn passes_touched(&self, _laps: u8) -> u8 {
        0
    }
}

/// Scan-resistant: a page has to prove itself. A new page leaves at the hand's next pass unless it
/// is touched again; one that comes back soon after its eviction, or is touched lap after lap,
/// earns laps.
#[derive(Clone, Copy, Debug, Default)]
pub struct Proven;

/// Up to this distance, in pools, a page that comes back would have been worth keeping.
const SOON: f32 = 1.0;

impl Replacement for Proven {
    fn arrives(&self, away: Option<f32>, prefetched: bool) -> Worth {
        match away {
            Some(away) if away <= SOON && !prefetched => Worth { laps: 1, touched: true },
            _ => Worth { laps: 0, touched: false },
        }
    }

    fn passes_touched(&self, laps: u8) -> u8 {
        (laps + 1).min(HEAT_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returning_page_is_worth_more_than_a_scanned_one() {
        let back = Proven.arrives(Some(0.5), false);
        let new = Proven.arrives(None, false);
        assert!(back.laps > new.laps && back.touched && !new.touched);
        assert_eq!(Proven.passes_touched(HEAT_MAX), HEAT_MAX);
    }
}
