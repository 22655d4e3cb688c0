//! The policy's record of a page: where it is, how often it came back, whether it was read.
//!
//! [`PolicyPages`] holds five bytes for every page ever seen. Uses `meta`.
//!
//! # Invariants
//! 1. A page whose place is `Small`, `Main` or `Cold` is in exactly the one [`queue`](crate::paging::evict::policy::queues::PageQueues)
//!    or [`Bag`](crate::paging::evict::policy::bag::Bag) that the policy keeps for that place; no other page is in any.
//! 2. The number in the word of such a page is its position there; in that of a ghost, the time it left.

use crate::base::error::{Error, Result};
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use std::fmt;

/// In the word of a page that is listed, a victim or a ghost: its content was read from the store when it came in.
const READ: u32 = 1 << 31;

/// Times in words are modulo this.
const TIMES: u64 = READ as u64;

/// Maximum number of pages of a region: each may have a node in the queues, and each queue has one.
const PAGES_MAX: u64 = READ as u64 - QUEUES.len() as u64;

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

/// The places that are queues.
pub(super) const QUEUES: [Place; 2] = [Place::Small, Place::Cold];

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

/// The state of every page of a region.
pub(super) struct PolicyPages {
    /// 31 see [`READ`] | 30..0 see invariant 2.
    words: LazyArray<u32>,
    tags: LazyArray<u8>,
}

impl PolicyPages {
    /// # Errors
    /// When there are more than [`PAGES_MAX`] pages or the kernel refuses the mapping.
    pub(super) fn new(pages: PageCount) -> Result<PolicyPages> {
        if pages.get() > PAGES_MAX {
            return Err(Error::BadRange {
                reason: "an eviction policy keeps track of at most 2^31 - 2 pages".into(),
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
        self.set_position(page, time % TIMES);
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

    /// How long before `now` the page left, if it is a ghost.
    pub(super) fn absence(&self, page: PageId, now: u64) -> Option<u64> {
        let is_ghost = matches!(self.place(page), Place::Ghost | Place::MainGhost);
        is_ghost.then(|| now.wrapping_sub(self.position(page)) % TIMES)
    }

    /// True if the page, which is not `Unknown`, was read when it came in.
    pub(super) fn was_read(&self, page: PageId) -> bool {
        self.words[page.as_usize()] & READ != 0
    }

    /// Notes whether the page, which is not `Unknown`, was read when it came in.
    pub(super) fn set_read(&mut self, page: PageId, read: bool) {
        let word = &mut self.words[page.as_usize()];
        *word = *word & !READ | if read { READ } else { 0 };
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

    /// True if the page has turns left.
    pub(super) fn has_turns(&self, page: PageId) -> bool {
        self.tag(page).turns() > 0
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
        self.set_position(page, position);
        self.set_place(page, place);
    }

    /// The position that was noted last for `page`, which is still there.
    pub(super) fn position(&self, page: PageId) -> u64 {
        u64::from(self.words[page.as_usize()] & !READ)
    }

    /// Notes the position of `page`, whose place stays.
    pub(super) fn set_position(&mut self, page: PageId, position: u64) {
        let word = &mut self.words[page.as_usize()];
        *word = *word & READ | position as u32;
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

#[cfg(test)]
mod tests {
    use super::*;

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
        pages.set_ghost(page, TIMES + 77);
        assert_eq!(pages.absence(page, TIMES + 80), Some(3));
        assert_eq!(turns(&mut pages), 0);
        pages.reward_refault(page);
        assert_eq!(turns(&mut pages), 7);
        assert_eq!(pages.absence(page, 2 * TIMES), Some(TIMES - 77));
        pages.lose_credit(page);
        pages.reward_refault(page);
        assert_eq!(turns(&mut pages), 1);
    }

    #[test]
    fn a_region_of_more_pages_than_31_bits_name_is_refused() {
        let error = PolicyPages::new(PageCount((1 << 31) - 1)).expect_err("one too many");
        assert!(matches!(error, Error::BadRange { .. }), "{error}");
    }
}
