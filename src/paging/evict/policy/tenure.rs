//! Tenure: a small queue on probation, a large main set that only proven pages may enter.
//!
//! Made for what this crate sees and what it runs: no hit is visible, and analytic programs scan
//! ranges larger than RAM again and again, where every policy that evicts in order of arrival
//! hits nothing at all. Four rules:
//!
//! 1. A new page enters the probation queue. While the main set has room, the queue's oldest
//!    moves there unproven; otherwise it is the next victim and becomes a ghost. There is room for as many pages as
//!    were listed when victims were last wanted: chunks that the kernel fills, which no list knows, take the rest.
//! 2. A ghost read again before as many pages left as the main set holds (its *refault
//!    distance*; cf. the working-set detection of Linux) would have been a hit there: it enters
//!    the main set. What returns later, such as a scan of four times the cache, may not: it would
//!    push out pages that are just as useful. So a part of the scan stays and is hit every time.
//! 3. The main set gives up a *random* unit of 64 KiB, page after page, when nobody is on probation. Without knowledge of hits
//!    arrival order says nothing about popularity, and in a scan the oldest page is the very one
//!    needed next. A page touched while it cools comes back and earns turns.
//!    One that was read again after fewer than a quarter of the main set's pages had left (rule 2)
//!    is used more often than most, such as an inner node of a tree among its leaves: it earns
//!    turns as well, twice as many each time.
//! 4. Nothing in the main set may rest there for ever: it gives up the next page where clearly fewer of its pages came
//!    back soon than of those on probation, or hardly any (see [`Vitality`]). Now and then the other of the two gives up
//!    one, to see whether it comes back.
//!
//! Measured against the other policies and the optimum: `book/src/measurements/policies.md`.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::evict::policy::bag::Bag;
use crate::paging::evict::policy::events::{Hint, Insert};
use crate::paging::evict::policy::pages::{Place, PolicyPages};
use crate::paging::evict::policy::queues::PageQueues;
use crate::paging::evict::policy::tally::Tally;
use std::ops::Range;

/// Turns a page can earn, at most, by being touched while it cools.
///
/// Without turns every lap of the hand unmaps every hot page once more; with them it is tried
/// again only after 1, 2, then always 3 laps. Measured: `book/src/design/eviction.md`.
const TURNS_MAX: u8 = 3;

/// Pages with turns left that are passed over, at most, for each victim; then one is taken in spite of its
/// turns.
const SKIPS_MAX: u32 = 32;

/// Pages of an aligned unit of the main set, which leave one after the other: 64 KiB. Single pages leave holes, and
/// between holes a scan reads in small pieces. A page with turns stays, and uses none up: only that which is picked does.
const UNIT: u64 = 16;

/// The probation queue's share of the resident pages, in percent, beyond which its oldest page moves on. Larger costs
/// hits in the main set; smaller leaves less time for a page to be used several times on arrival.
const SMALL_PCT: u64 = 5;

/// The queue's additional share while everything that arrives was read ahead, in parts of the
/// resident pages: such pages must live until they are used, which nobody sees.
const AHEAD_PART: u64 = 8;

/// How fast the share of pages read ahead is forgotten: about this many arrivals.
const AHEAD_MEMORY: i64 = 64;

/// Refault distance, in sizes of the main set, up to which a page it gave up counts as alive.
const ALIVE_MAIN_SETS: u64 = 4;

/// Pages that left are remembered up to this part of the number of resident pages: a list may be worth less soon.
const MEMORY_PART: u64 = 4;
/// But this number in any case: of fewer the return of one would decide.
const MEMORY_MIN: u64 = 256;

/// Refault distance, in parts of the main set, up to which a page is hot. With a half, ranges that are
/// scanned in turn lose 4 hits in 100; with an eighth, a tree's inner nodes gain half as much.
const HOT_PART: u64 = 4;

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Tenure {
    /// Pages on probation; and those that a hint gave up, which go before all others.
    queues: PageQueues,
    main: Bag,
    /// Pages of which those in the main set go next: what is left of the unit that was picked last.
    unit: Range<u64>,
    small_target: u64,
    resident_target: u64,
    /// Share of recent arrivals that were read ahead, of 256.
    ahead_share: i64,
    /// Pages that became ghosts so far: the clock of [`PolicyPages::absence`].
    time: u64,
    vitality: Vitality,
}

impl Tenure {
    /// The refault distance of `page`, which is about to come in from the store; also learns from its
    /// return whether the main set is alive.
    fn refault_distance(&mut self, pages: &PolicyPages, page: PageId) -> Option<u64> {
        let distance = self.absence(pages, page)?;
        let is_main = pages.place(page) == Place::MainGhost;
        let soon = if is_main { self.main.len() * ALIVE_MAIN_SETS } else { self.resident_target };
        if distance <= soon {
            self.vitality.come_back(is_main);
        }
        Some(distance)
    }

    /// Pages on probation to aim for.
    fn small_target(&self) -> u64 {
        self.small_target + self.resident_target / AHEAD_PART * self.ahead_share as u64 / 256
    }

    /// Moves the oldest page on probation to the main set if there is room (rule 1). Every
    /// arrival moves one at most, which is enough to keep up.
    fn publish(&mut self, pages: &mut PolicyPages) {
        let small = self.small_target();
        if self.small() > small && self.main.len() + small < self.resident_target {
            let page = self.queues.pop(pages, Place::Small);
            let page = page.expect("longer than its target, which is not negative");
            self.main.insert(pages, page);
        }
    }

    /// The next page of a unit of the main set that was picked at random, without turns left if one is found soon (rule 3).
    fn pick_main(&mut self, pages: &mut PolicyPages) -> Option<PageId> {
        let goes = |page: &PageId| pages.place(*page) == Place::Main && !pages.has_turns(*page);
        if let Some(page) = self.unit.by_ref().map(PageId).find(goes) {
            return Some(page);
        }
        for _ in 0..SKIPS_MAX {
            let page = self.main.pick()?;
            if !pages.take_turn(page) {
                let first = page.0 / UNIT * UNIT;
                self.unit = first..(first + UNIT).min(pages.count().0);
                return Some(page);
            }
        }
        self.main.pick()
    }

    /// The order of no pages yet, of which about `resident` will fit into RAM.
    ///
    /// # Errors
    /// When the kernel refuses a mapping.
    pub(super) fn new(pages: &PolicyPages, resident: PageCount) -> Result<Tenure> {
        let mut order = Tenure {
            queues: PageQueues::new(pages.count())?,
            main: Bag::new(pages.count())?,
            unit: 0..0,
            small_target: 0,
            resident_target: 0,
            ahead_share: 0,
            time: 0,
            vitality: Vitality::default(),
        };
        order.resize(resident);
        Ok(order)
    }

    /// Pages on the lists.
    pub(super) fn len(&self) -> u64 {
        self.queues.total() + self.main.len()
    }

    /// Numbers of 32 bits that the lists take: one for each page, and its node's links.
    pub(super) fn numbers(&self) -> u64 {
        self.main.len() + 3 * self.queues.total()
    }

    /// Pages on probation.
    fn small(&self) -> u64 {
        self.queues.len(Place::Small)
    }

    /// How many pages have left since a ghost did.
    pub(super) fn absence(&self, pages: &PolicyPages, page: PageId) -> Option<u64> {
        pages.absence(page, self.time)
    }

    /// Lists a page that is on no list and no victim. Of a ghost it returns how many pages have left since this one did:
    /// with room for all of them it would be here.
    pub(super) fn arrive(
        &mut self,
        pages: &mut PolicyPages,
        page: PageId,
        how: Insert,
    ) -> Option<u64> {
        let ahead = if how == Insert::Prefetched { 256 } else { 0 };
        // Rounded away from zero, so that the share reaches both ends.
        let change = ahead - self.ahead_share;
        self.ahead_share += change / AHEAD_MEMORY + change.signum();
        // Readahead's guess is no proof of use: it starts on probation, ghost or not.
        let returned = self.refault_distance(pages, page);
        let distance = returned.filter(|_| how == Insert::Filled);
        if distance.is_some_and(|distance| distance <= self.main.len() / HOT_PART) {
            pages.reward_refault(page);
        } else {
            pages.lose_credit(page);
        }
        if distance.is_some_and(|distance| distance <= self.main.len()) {
            self.main.insert(pages, page);
        } else {
            self.queues.push(pages, page, Place::Small);
            self.publish(pages);
        }
        pages.set_read(page, how != Insert::Fresh);
        returned
    }

    /// Lists a victim that was touched before it left.
    pub(super) fn come_back(&mut self, pages: &mut PolicyPages, page: PageId, victim: Place) {
        let is_main = victim == Place::MainVictim;
        self.note_leave(is_main);
        self.vitality.come_back(is_main);
        if is_main {
            pages.reward(page, TURNS_MAX);
        }
        self.main.insert(pages, page);
    }

    /// Makes a victim that left RAM a ghost.
    pub(super) fn leave(&mut self, pages: &mut PolicyPages, page: PageId) {
        self.note_leave(pages.place(page) == Place::MainVictim);
        pages.set_ghost(page, self.time);
        self.time += 1;
    }

    fn note_leave(&mut self, is_main: bool) {
        self.vitality.leave(is_main, (self.resident_target / MEMORY_PART).max(MEMORY_MIN));
    }

    /// Takes a page off its list. Its place is `Unknown` then.
    pub(super) fn unlink(&mut self, pages: &mut PolicyPages, page: PageId) {
        match pages.place(page) {
            Place::Small | Place::Cold => self.queues.remove(pages, page),
            Place::Main => self.main.remove(pages, page),
            other => unreachable!("{page} is not resident: {other:?}"),
        }
    }

    /// Takes the next victim off its list and returns it with its place among victims; `None` only when
    /// no page is listed.
    pub(super) fn next(&mut self, pages: &mut PolicyPages) -> Option<(PageId, Place)> {
        if let Some(page) = self.queues.pop(pages, Place::Cold) {
            return Some((page, Place::SmallVictim));
        }
        if (self.vitality.is_mains_turn() || self.small() == 0)
            && let Some(page) = self.pick_main(pages)
        {
            self.main.remove(pages, page);
            return Some((page, Place::MainVictim));
        }
        self.queues.pop(pages, Place::Small).map(|page| (page, Place::SmallVictim))
    }

    /// Lists a page, which was just unlinked, again, where a hint says.
    pub(super) fn advise(&mut self, pages: &mut PolicyPages, page: PageId, hint: Hint) {
        match hint {
            Hint::Cold => {
                pages.forget(page);
                self.queues.push(pages, page, Place::Cold);
            }
            Hint::WillNeed => {
                pages.grant_turns(page, TURNS_MAX);
                self.main.insert(pages, page);
            }
        }
    }

    /// About `resident` pages fit into RAM from now on.
    pub(super) fn resize(&mut self, resident: PageCount) {
        self.small_target = (resident.get() * SMALL_PCT / 100).max(1);
        self.resident_target = resident.get();
    }
}

/// Compares what comes back of the pages that the two lists gave up.
#[derive(Debug, Default)]
struct Vitality {
    /// Those on probation, and of the main set.
    tallies: [Tally; 2],
    /// Victims since the last probe.
    since_probe: u64,
}

impl Vitality {
    /// Victims from one probe to the next.
    const PROBE_EVERY: u64 = 32;
    /// Added to what came back of each list: one of which nothing is known stays.
    const PRIOR: u64 = 16;

    /// Notes that a page has left; about `memory` of them are remembered.
    fn leave(&mut self, is_main: bool, memory: u64) {
        self.tallies[usize::from(is_main)].left += 1;
        Tally::fade(&mut self.tallies, memory);
    }

    /// Notes that such a page is in use after all.
    fn come_back(&mut self, is_main: bool) {
        self.tallies[usize::from(is_main)].came_back += 1;
    }

    /// Called once for every victim: true if it shall come from the main set (rule 4).
    fn is_mains_turn(&mut self) -> bool {
        let [probation, main] = self.tallies;
        let [of_probation, of_main] = [probation, main].map(|tally| tally.came_back + Self::PRIOR);
        let is_worth_less = 4 * of_main * (probation.left + Self::PRIOR)
            < 3 * of_probation * (main.left + Self::PRIOR);
        let is_lifeless = 8 * main.came_back + Self::PRIOR < main.left;
        self.since_probe = (self.since_probe + 1) % Self::PROBE_EVERY;
        (is_worth_less || is_lifeless) != (self.since_probe == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 1,000 victims those of the main set, after this number of 100 pages that each list gave up came back.
    fn mains_turns(of_probation: u64, of_main: u64) -> usize {
        let mut vitality = Vitality::default();
        for (is_main, count) in [(false, of_probation), (true, of_main)] {
            (0..100).for_each(|_| vitality.leave(is_main, 1_000));
            (0..count).for_each(|_| vitality.come_back(is_main));
        }
        (0..1_000).filter(|_| vitality.is_mains_turn()).count()
    }

    #[test]
    fn the_list_of_which_fewer_pages_come_back_gives_up_the_next_but_for_probes() {
        let probes = 1_000 / Vitality::PROBE_EVERY as usize;
        assert_eq!(mains_turns(0, 100), probes);
        assert_eq!(mains_turns(50, 50), probes, "alike");
        assert_eq!(mains_turns(100, 50), 1_000 - probes);
    }

    #[test]
    fn a_main_set_of_which_nothing_comes_back_goes_whatever_comes_back_of_the_others() {
        let mut vitality = Vitality::default();
        assert!(!vitality.is_mains_turn(), "nothing is known");
        (0..1_000).for_each(|_| vitality.leave(true, 10_000));
        assert!(vitality.is_mains_turn());
    }

    #[test]
    fn what_came_back_long_ago_is_forgotten() {
        let mut vitality = Vitality::default();
        for _ in 0..100 {
            vitality.leave(true, 64);
            vitality.come_back(true);
        }
        (0..1_000).for_each(|_| vitality.leave(true, 64));
        assert!(
            vitality.tallies[1].left <= 64 && vitality.tallies[1].came_back == 0,
            "{vitality:?}"
        );
    }
}
