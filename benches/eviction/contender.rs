//! What is compared: the library's policy, and four that it does not have (`book/src/design/eviction.md`).

use crate::s3fifo::S3Fifo;
use farheap::PageId;
use farheap::region::policy::PageCount;
use farheap::region::policy::{Insert, Policy};
use std::fmt;

/// Turns that a page can earn, at most, by being touched while it cools: as in the library.
const TURNS_MAX: u8 = 3;
/// Pages with turns left that are passed over, at most, for each victim: as in the library.
const SKIPS_MAX: u32 = 32;

/// A policy, as [`Policy`] describes it.
pub(crate) trait Eviction {
    fn resident(&self) -> PageCount;
    fn inserted(&mut self, page: PageId, how: Insert);
    fn retouched(&mut self, page: PageId);
    fn evicted(&mut self, page: PageId);
    /// Only the library's remembers what was never on its lists.
    fn bypassed(&mut self, _page: PageId) {}
    fn removed(&mut self, page: PageId);
    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount;
}

impl Eviction for Policy {
    fn resident(&self) -> PageCount {
        Policy::resident(self)
    }

    fn inserted(&mut self, page: PageId, how: Insert) {
        Policy::inserted(self, page, how);
    }

    fn retouched(&mut self, page: PageId) {
        Policy::retouched(self, page);
    }

    fn evicted(&mut self, page: PageId) {
        Policy::evicted(self, page);
    }

    fn bypassed(&mut self, page: PageId) {
        Policy::bypassed(self, page);
    }

    fn removed(&mut self, page: PageId) {
        Policy::removed(self, page);
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        Policy::victims(self, want, out)
    }
}

/// A policy that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    /// First in, first out, as in UMap; a page touched while it cools starts anew.
    Fifo,
    /// Second chance: the hand lets a page cool, and a touch in that time earns it turns.
    Clock,
    /// Probation, main and ghost queues.
    S3Fifo,
    /// SIEVE (Zhang et al., NSDI 2024): survivors keep their place, and the hand goes on to newer pages.
    Sieve,
    /// The library's.
    Tenure,
}

impl Contender {
    pub(crate) const ALL: [Contender; 5] =
        [Contender::Fifo, Contender::Clock, Contender::S3Fifo, Contender::Sieve, Contender::Tenure];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Fifo => "fifo",
            Contender::Clock => "clock",
            Contender::S3Fifo => "s3fifo",
            Contender::Sieve => "sieve",
            Contender::Tenure => "tenure",
        }
    }

    /// Builds it for a region of `pages`, of which about `resident` fit.
    pub(crate) fn build(self, pages: PageCount, resident: PageCount) -> Box<dyn Eviction> {
        match self {
            Contender::Tenure => {
                Box::new(Policy::new(pages, resident).expect("a few megabytes can be mapped"))
            }
            Contender::S3Fifo => Box::new(S3Fifo::new(pages, resident)),
            hand => Box::new(Hand::new(pages, hand)),
        }
    }
}

/// Checks those that the library does not have against what they are meant to do.
pub(crate) fn check() {
    let pages = PageCount(100);
    let named = |policy: &mut dyn Eviction, want| {
        let mut found = Vec::new();
        policy.victims(PageCount(want), &mut |page| found.push(page.get()));
        found
    };
    let mut clock = Contender::Clock.build(pages, pages);
    let clock = clock.as_mut();
    clock.inserted(PageId(1), Insert::Fresh);
    assert_eq!(named(clock, 1), [1]);
    let laps = [(); 4].map(|()| {
        clock.retouched(PageId(1));
        clock.inserted(PageId(2), Insert::Fresh);
        let mut laps = 0;
        while named(clock, 1) == [2] {
            clock.removed(PageId(2));
            clock.inserted(PageId(2), Insert::Fresh);
            laps += 1;
        }
        clock.removed(PageId(2));
        laps
    });
    assert_eq!(laps, [1, 2, 3, 3], "passed over once more for each return in a row");

    let mut sieve = Contender::Sieve.build(pages, pages);
    let sieve = sieve.as_mut();
    (1..5).for_each(|page| sieve.inserted(PageId(page), Insert::Fresh));
    assert_eq!(named(sieve, 1), [1]);
    sieve.retouched(PageId(1));
    assert_eq!(named(sieve, 2), [2, 3]);
    sieve.inserted(PageId(5), Insert::Fresh);
    assert_eq!(named(sieve, 2), [4, 5], "new pages are ahead of the hand");
    assert_eq!(named(sieve, 1), [1], "the survivor comes a lap later");

    let mut s3fifo = Contender::S3Fifo.build(pages, PageCount(10));
    let s3fifo = s3fifo.as_mut();
    [1, 2].into_iter().for_each(|page| s3fifo.inserted(PageId(page), Insert::Fresh));
    assert_eq!(named(s3fifo, 2), [1, 2]);
    [1, 2].into_iter().for_each(|page| s3fifo.evicted(PageId(page)));
    s3fifo.inserted(PageId(1), Insert::Filled);
    s3fifo.inserted(PageId(2), Insert::Prefetched);
    assert_eq!(named(s3fifo, 2), [2, 1], "what was read ahead is on probation, ghost or not");
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No page: the end of the list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Absent,
    Listed,
    Victim,
}

#[derive(Clone, Copy, Debug)]
struct Note {
    older: u32,
    newer: u32,
    place: Place,
    /// Returns that were rewarded, and turns that are left of that.
    credit: u8,
    turns: u8,
}

impl Note {
    const UNKNOWN: Note =
        Note { older: NONE, newer: NONE, place: Place::Absent, credit: 0, turns: 0 };

    /// Uses up a turn; `false` when there is none left.
    fn take_turn(&mut self) -> bool {
        let has_one = self.turns > 0;
        self.turns -= u8::from(has_one);
        has_one
    }
}

/// A list of pages by arrival, over which a hand goes.
#[derive(Debug)]
pub(crate) struct Hand {
    notes: Vec<Note>,
    oldest: u32,
    newest: u32,
    len: u64,
    /// What survives keeps its place.
    is_sieve: bool,
    /// Turns that a page can earn.
    turns_max: u8,
    /// The next page that SIEVE tries; `NONE`: the oldest.
    at: u32,
}

impl Hand {
    pub(crate) fn new(pages: PageCount, kind: Contender) -> Hand {
        let notes = vec![Note::UNKNOWN; pages.get() as usize];
        let is_sieve = kind == Contender::Sieve;
        let turns_max = if kind == Contender::Fifo { 0 } else { TURNS_MAX };
        Hand { notes, oldest: NONE, newest: NONE, len: 0, is_sieve, turns_max, at: NONE }
    }

    fn note(&mut self, page: u32) -> &mut Note {
        &mut self.notes[page as usize]
    }

    /// Lists a page on the old side of another; of `NONE`: as the newest.
    fn list(&mut self, page: u32, newer: u32) {
        let older = if newer == NONE { self.newest } else { self.note(newer).older };
        *self.note(page) = Note { older, newer, place: Place::Listed, ..*self.note(page) };
        match older {
            NONE => self.oldest = page,
            older => self.note(older).newer = page,
        }
        match newer {
            NONE => self.newest = page,
            newer => self.note(newer).older = page,
        }
        self.len += 1;
    }

    fn unlist(&mut self, page: u32) {
        let Note { older, newer, .. } = *self.note(page);
        match older {
            NONE => self.oldest = newer,
            older => self.note(older).newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.note(newer).older = older,
        }
        // A hand that is there goes on.
        if self.at == page || (self.at == NONE && older == NONE) {
            self.at = newer;
        }
        self.len -= 1;
    }

    /// Takes the next page without turns left, if one is near.
    pub(crate) fn next(&mut self) -> PageId {
        for skips in 0.. {
            let page = if self.is_sieve && self.at != NONE { self.at } else { self.oldest };
            if skips == SKIPS_MAX || !self.note(page).take_turn() {
                self.unlist(page);
                self.note(page).place = Place::Victim;
                return PageId(u64::from(page));
            }
            if self.is_sieve {
                self.at = self.note(page).newer;
            } else {
                self.unlist(page);
                self.list(page, NONE);
            }
        }
        unreachable!("the loop ends after its last skip")
    }
}

impl Eviction for Hand {
    fn resident(&self) -> PageCount {
        PageCount(self.len)
    }

    fn inserted(&mut self, page: PageId, _how: Insert) {
        self.list(page.get() as u32, NONE);
    }

    fn retouched(&mut self, page: PageId) {
        let (page, most) = (page.get() as u32, self.turns_max);
        let note = self.note(page);
        note.credit = (note.credit + 1).min(most);
        note.turns = note.credit;
        let behind = if self.is_sieve { self.at } else { NONE };
        self.list(page, behind);
    }

    fn evicted(&mut self, page: PageId) {
        *self.note(page.get() as u32) = Note::UNKNOWN;
    }

    fn removed(&mut self, page: PageId) {
        let page = page.get() as u32;
        if self.note(page).place == Place::Listed {
            self.unlist(page);
        }
        *self.note(page) = Note::UNKNOWN;
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.min(self.resident());
        (0..named.get()).for_each(|_| out(self.next()));
        named
    }
}
