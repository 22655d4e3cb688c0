//! What is compared: the library's policies, and two that it does not have.
//!
//! The clock and SIEVE are not among the library's, because without accessed bits no trace is a reason to
//! choose them: `docs/design/eviction.md`.

use farheap::region::policy::{EvictionPolicy, Hint, Insert, PolicyKind};
use farheap::{PageCount, PageId};
use std::fmt;

/// Turns that a page can earn, at most, by being touched while it cools: as in the library.
const TURNS_MAX: u8 = 3;
/// Pages with turns left that are passed over, at most, for each victim: as in the library.
const SKIPS_MAX: u32 = 32;

/// A policy that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Contender {
    Library(PolicyKind),
    /// Second chance: the hand lets a page cool, and a touch in that time earns it turns.
    Clock,
    /// SIEVE (Zhang et al., NSDI 2024): survivors keep their place, and the hand goes on to newer pages.
    Sieve,
}

impl Contender {
    pub(crate) const ALL: [Contender; 5] = [
        Contender::FIFO,
        Contender::Clock,
        Contender::Library(PolicyKind::S3Fifo),
        Contender::Sieve,
        Contender::DEFAULT,
    ];
    pub(crate) const FIFO: Contender = Contender::Library(PolicyKind::Fifo);
    pub(crate) const DEFAULT: Contender = Contender::Library(PolicyKind::Tenure);

    pub(crate) fn name(self) -> &'static str {
        match self {
            Contender::Library(kind) => kind.name(),
            Contender::Clock => "clock",
            Contender::Sieve => "sieve",
        }
    }

    /// Builds it for a region of `pages`, of which about `resident` fit.
    pub(crate) fn build(self, pages: PageCount, resident: PageCount) -> Box<dyn EvictionPolicy> {
        match self {
            Contender::Library(kind) => {
                kind.build(pages, resident).expect("a few megabytes can be mapped")
            }
            Contender::Clock => Box::new(Hand::new(pages, false)),
            Contender::Sieve => Box::new(Hand::new(pages, true)),
        }
    }
}

/// Checks the two that the library does not have against what they are meant to do.
pub(crate) fn check() {
    let pages = PageCount(100);
    let named = |policy: &mut dyn EvictionPolicy, want| {
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
struct Hand {
    notes: Vec<Note>,
    oldest: u32,
    newest: u32,
    len: u64,
    /// What survives keeps its place.
    is_sieve: bool,
    /// The next page that SIEVE tries; `NONE`: the oldest.
    at: u32,
}

impl Hand {
    fn new(pages: PageCount, is_sieve: bool) -> Hand {
        let notes = vec![Note::UNKNOWN; pages.get() as usize];
        Hand { notes, oldest: NONE, newest: NONE, len: 0, is_sieve, at: NONE }
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

    /// The next page without turns left, if one is near.
    fn next(&mut self) -> u32 {
        for skips in 0.. {
            let page = if self.is_sieve && self.at != NONE { self.at } else { self.oldest };
            if skips == SKIPS_MAX || !self.note(page).take_turn() {
                self.unlist(page);
                return page;
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

impl EvictionPolicy for Hand {
    fn resident(&self) -> PageCount {
        PageCount(self.len)
    }

    fn inserted(&mut self, page: PageId, _how: Insert) {
        self.list(page.get() as u32, NONE);
    }

    fn retouched(&mut self, page: PageId) {
        let page = page.get() as u32;
        let note = self.note(page);
        note.credit = (note.credit + 1).min(TURNS_MAX);
        note.turns = note.credit;
        let behind = if self.is_sieve { self.at } else { NONE };
        self.list(page, behind);
    }

    fn evicted(&mut self, page: PageId) {
        *self.note(page.get() as u32) = Note::UNKNOWN;
    }

    fn bypassed(&mut self, _page: PageId) {}

    fn removed(&mut self, page: PageId) {
        let page = page.get() as u32;
        if self.note(page).place == Place::Listed {
            self.unlist(page);
        }
        *self.note(page) = Note::UNKNOWN;
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.min(self.resident());
        for _ in 0..named.get() {
            let page = self.next();
            self.note(page).place = Place::Victim;
            out(PageId(u64::from(page)));
        }
        named
    }

    fn advise(&mut self, _page: PageId, _hint: Hint) {}

    fn resize(&mut self, _resident: PageCount) {}
}
