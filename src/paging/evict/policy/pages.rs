//! The policy's record of a page: where it is, its neighbours there, how often it came back.
//!
//! [`PolicyPages`] holds nine bytes for every page ever seen; [`List`]s are threaded through it, so
//! that moving a page is O(1) and allocates nothing. Uses `meta`.
//!
//! # Invariants
//! 1. A page whose place is `Small`, `Main` or `Cold` is on exactly the one list (or in the one
//!    [`Bag`](crate::paging::evict::policy::bag::Bag)) that the policy keeps for that place; no other page is on any.
//! 2. The word of a page on a list holds its neighbours; in a bag, its position; of a ghost, the
//!    time it left.

use crate::base::error::{Error, Result};
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use std::fmt;

/// No page: the end of a list.
const NONE: u32 = u32::MAX;

/// Maximum number of pages of a region: all that 32 bits name, but for [`NONE`].
const PAGES_MAX: u64 = u32::MAX as u64;

/// Maximum number of rewards that are remembered of a page.
const CREDIT_MAX: u8 = 3;

/// Turns after the last of them, where they double.
const REFAULT_TURNS_MAX: u8 = (1 << CREDIT_MAX) - 1;

/// Where a page is in a policy's eyes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Never seen, or forgotten.
    Unknown,
    /// Left RAM; remembered with the time it left.
    Ghost,
    /// As `Ghost`, but named from the main list.
    MainGhost,
    /// On the list of pages on probation.
    Small,
    /// On the main list.
    Main,
    /// On the list of pages that a hint gave up.
    Cold,
    /// Named a victim from the probation list and neither back nor gone yet.
    SmallVictim,
    /// Named a victim from the main list and neither back nor gone yet.
    MainVictim,
}

impl Place {
    /// True if the page is resident in the policy's eyes.
    pub(super) fn is_resident(self) -> bool {
        matches!(self, Place::Small | Place::Main | Place::Cold)
    }

    /// True if the page was named and nothing was heard of it since.
    pub(super) fn is_victim(self) -> bool {
        matches!(self, Place::SmallVictim | Place::MainVictim)
    }
}

/// A page's place and credit.
///
/// ```text
/// 7..6 credit: returns that were rewarded | 5..3 turns left | 2..0 place
/// ```
/// All zero is `Unknown` without credit.
#[derive(Clone, Copy)]
struct Tag(u8);

impl Tag {
    fn place(self) -> Place {
        match self.0 & 7 {
            0 => Place::Unknown,
            1 => Place::Ghost,
            2 => Place::Small,
            3 => Place::Main,
            4 => Place::SmallVictim,
            5 => Place::MainVictim,
            6 => Place::Cold,
            7 => Place::MainGhost,
            other => unreachable!("no place has the number {other}"),
        }
    }

    fn with_place(self, place: Place) -> Tag {
        let number = match place {
            Place::Unknown => 0,
            Place::Ghost => 1,
            Place::Small => 2,
            Place::Main => 3,
            Place::SmallVictim => 4,
            Place::MainVictim => 5,
            Place::Cold => 6,
            Place::MainGhost => 7,
        };
        Tag(self.0 & !7 | number)
    }

    fn turns(self) -> u8 {
        self.0 >> 3 & 7
    }

    fn credit(self) -> u8 {
        self.0 >> 6
    }

    fn with_credit(self, credit: u8, turns: u8) -> Tag {
        let fits = credit <= CREDIT_MAX && turns <= REFAULT_TURNS_MAX;
        assert!(fits, "credit {credit} has two bits, turns {turns} have three");
        Tag(credit << 6 | turns << 3 | self.0 & 7)
    }
}

/// A list of pages, oldest to newest. Its links live in [`PolicyPages`].
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    oldest: u32,
    newest: u32,
    len: u64,
}

impl List {
    pub(super) const fn new() -> List {
        List { oldest: NONE, newest: NONE, len: 0 }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn oldest(&self) -> Option<PageId> {
        page(self.oldest)
    }
}

/// The state of every page of a region.
pub(super) struct PolicyPages {
    /// On a list: 63..32 newer neighbour | 31..0 older neighbour. Else see invariant 2.
    words: LazyArray<u64>,
    tags: LazyArray<u8>,
}

impl PolicyPages {
    /// # Errors
    /// When there are more than [`PAGES_MAX`] pages or the kernel refuses the mapping.
    pub(super) fn new(pages: PageCount) -> Result<PolicyPages> {
        if pages.get() > PAGES_MAX {
            return Err(Error::BadRange {
                reason: "an eviction policy keeps track of at most 2^32 - 1 pages".into(),
            });
        }
        Ok(PolicyPages {
            words: LazyArray::new(pages.as_usize())?,
            tags: LazyArray::new(pages.as_usize())?,
        })
    }

    /// All pages there may be.
    pub(super) fn count(&self) -> PageCount {
        PageCount(self.tags.len() as u64)
    }

    pub(super) fn place(&self, page: PageId) -> Place {
        self.tag(page).place()
    }

    /// Notes that `page`, which is on no list, is now at `place`.
    pub(super) fn set_place(&mut self, page: PageId, place: Place) {
        self.set_tag(page, self.tag(page).with_place(place));
    }

    /// Forgets everything about `page`, which is on no list.
    pub(super) fn forget(&mut self, page: PageId) {
        self.set_tag(page, Tag(0));
    }

    /// Forgets the pages of a range, none of which is on a list, and gives the memory of their
    /// entries back, as far as it is theirs alone.
    pub(super) fn release(&mut self, first: PageId, count: PageCount) {
        let end = (first.as_usize() + count.as_usize()).min(self.tags.len());
        let range = first.as_usize()..end;
        // Not written where it is zero: that would take memory.
        self.tags[range.clone()].iter_mut().filter(|tag| **tag != 0).for_each(|tag| *tag = 0);
        // What the kernel refuses to take back stays with this process: it costs nothing but memory.
        let _ = self.words.give_back(range.clone());
        let _ = self.tags.give_back(range);
    }

    /// Makes `page` a ghost that left at `time`. It keeps its credit, and no turns.
    pub(super) fn set_ghost(&mut self, page: PageId, time: u64) {
        self.words[page.as_usize()] = time;
        let from_main = self.place(page) == Place::MainVictim;
        let ghost = if from_main { Place::MainGhost } else { Place::Ghost };
        let tag = self.tag(page);
        self.set_tag(page, tag.with_credit(tag.credit(), 0).with_place(ghost));
    }

    /// Rewards `page`, a ghost, for having been read again soon: 1 turn the first time, then 3, then
    /// always [`REFAULT_TURNS_MAX`].
    pub(super) fn reward_refault(&mut self, page: PageId) {
        let tag = self.tag(page);
        let credit = (tag.credit() + 1).min(CREDIT_MAX);
        self.set_tag(page, tag.with_credit(credit, (1 << credit) - 1));
    }

    /// Forgets how often `page` came back.
    pub(super) fn lose_credit(&mut self, page: PageId) {
        self.set_tag(page, self.tag(page).with_credit(0, 0));
    }

    /// When `page` left, if it is a ghost.
    pub(super) fn ghost_time(&self, page: PageId) -> Option<u64> {
        let is_ghost = matches!(self.place(page), Place::Ghost | Place::MainGhost);
        is_ghost.then(|| self.words[page.as_usize()])
    }

    /// Rewards `page` for having been touched while it was a victim: one turn more than last
    /// time, up to `turns_max`, during which it is not tried again.
    pub(super) fn reward(&mut self, page: PageId, turns_max: u8) {
        let tag = self.tag(page);
        let credit = (tag.credit() + 1).min(turns_max);
        self.set_tag(page, tag.with_credit(credit, credit));
    }

    /// Gives `page` turns without its having come back.
    pub(super) fn grant_turns(&mut self, page: PageId, turns: u8) {
        let tag = self.tag(page);
        self.set_tag(page, tag.with_credit(tag.credit(), turns));
    }

    /// Uses up one of the page's turns; `false` when it has none left.
    pub(super) fn take_turn(&mut self, page: PageId) -> bool {
        let tag = self.tag(page);
        let turns = tag.turns();
        if turns > 0 {
            self.set_tag(page, tag.with_credit(tag.credit(), turns - 1));
        }
        turns > 0
    }

    /// Puts `page`, which is on no list, at a position of an array, whose place is `place`.
    pub(super) fn place_at(&mut self, page: PageId, position: u64, place: Place) {
        self.words[page.as_usize()] = position;
        self.set_place(page, place);
    }

    /// The position that `place_at` noted last for `page`, which is still there.
    pub(super) fn position(&self, page: PageId) -> u64 {
        self.words[page.as_usize()]
    }

    /// Puts `page`, which is on no list, at the new end of `list`, whose place is `place`.
    pub(super) fn push_newest(&mut self, list: &mut List, page: PageId, place: Place) {
        assert!(!self.place(page).is_resident(), "{page} is on a list: {:?}", self.place(page));
        assert!(place.is_resident(), "{place:?} has no list");
        let older = list.newest;
        self.words[page.as_usize()] = u64::from(NONE) << 32 | u64::from(older);
        match older {
            NONE => list.oldest = index(page),
            _ => self.set_newer(older, index(page)),
        }
        list.newest = index(page);
        list.len += 1;
        self.set_place(page, place);
    }

    /// Takes `page`, a member of `list`, off it. Its place is `Unknown` then.
    pub(super) fn unlink(&mut self, list: &mut List, page: PageId) {
        assert!(self.place(page).is_resident(), "{page} is on no list: {:?}", self.place(page));
        let (older, newer) = self.neighbours(page);
        match older {
            NONE => list.oldest = newer,
            _ => self.set_newer(older, newer),
        }
        match newer {
            NONE => list.newest = older,
            _ => self.set_older(newer, older),
        }
        list.len -= 1;
        self.set_place(page, Place::Unknown);
    }

    /// Takes the oldest member off `list`.
    pub(super) fn pop_oldest(&mut self, list: &mut List) -> Option<PageId> {
        let page = list.oldest()?;
        self.unlink(list, page);
        Some(page)
    }

    /// The older and the newer neighbour.
    fn neighbours(&self, page: PageId) -> (u32, u32) {
        let word = self.words[page.as_usize()];
        (word as u32, (word >> 32) as u32)
    }

    fn set_older(&mut self, of: u32, older: u32) {
        let word = &mut self.words[of as usize];
        *word = *word >> 32 << 32 | u64::from(older);
    }

    fn set_newer(&mut self, of: u32, newer: u32) {
        let word = &mut self.words[of as usize];
        *word = u64::from(newer) << 32 | u64::from(*word as u32);
    }

    fn tag(&self, page: PageId) -> Tag {
        Tag(self.tags[page.as_usize()])
    }

    fn set_tag(&mut self, page: PageId, tag: Tag) {
        self.tags[page.as_usize()] = tag.0;
    }
}

impl fmt::Debug for PolicyPages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PolicyPages({})", self.tags.len())
    }
}

/// The page's index; it fits because `PolicyPages` has at most [`PAGES_MAX`] of them.
fn index(page: PageId) -> u32 {
    page.get() as u32
}

fn page(index: u32) -> Option<PageId> {
    (index != NONE).then(|| PageId(u64::from(index)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(pages: &mut PolicyPages, list: &mut List) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some(page) = list.oldest() {
            pages.unlink(list, page);
            order.push(page.get());
        }
        order
    }

    #[test]
    fn a_list_keeps_its_order_through_insertions_and_removals() {
        let mut pages = PolicyPages::new(PageCount(10)).expect("small");
        let mut list = List::new();
        for page in [3, 4, 2, 0] {
            pages.push_newest(&mut list, PageId(page), Place::Small);
        }
        pages.unlink(&mut list, PageId(4));
        assert_eq!(list.len(), 3);
        assert_eq!(drain(&mut pages, &mut list), [3, 2, 0]);
        assert_eq!(list.len(), 0);
    }

    #[test]
    fn credit_grows_with_every_return_and_outlives_the_eviction_without_turns() {
        let mut pages = PolicyPages::new(PageCount(1)).expect("small");
        let page = PageId(0);
        let turns = |pages: &mut PolicyPages| (0..9).take_while(|_| pages.take_turn(page)).count();
        pages.reward(page, 3);
        assert_eq!(turns(&mut pages), 1);
        pages.reward(page, 3);
        pages.reward(page, 3);
        pages.reward(page, 3);
        assert_eq!(turns(&mut pages), 3);
        pages.reward(page, 3);
        pages.set_ghost(page, 77);
        assert_eq!(pages.ghost_time(page), Some(77));
        assert_eq!(turns(&mut pages), 0);
        pages.reward_refault(page);
        assert_eq!(turns(&mut pages), 7);
        assert_eq!(pages.ghost_time(page), Some(77));
        pages.lose_credit(page);
        pages.reward_refault(page);
        assert_eq!(turns(&mut pages), 1);
    }

    #[test]
    fn a_region_of_more_pages_than_32_bits_name_is_refused() {
        let error = PolicyPages::new(PageCount(1 << 32)).expect_err("one too many");
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
    }
}
