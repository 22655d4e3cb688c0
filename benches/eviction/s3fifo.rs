//! S3-FIFO (Yang et al., SOSP 2023) for pages without accessed bits.
//!
//! New pages enter a small probation queue; what leaves it untouched becomes a ghost, and a
//! ghost that is read again soon enters the main queue at once. So a scan passes through the
//! small queue and leaves the main one alone. A touch while cooling is the sign of use that the
//! original reads from its counters: it promotes to the main queue, and there earns turns.

use crate::contender::{Contender, Eviction, Hand};
use farheap::PageId;
use farheap::region::policy::Insert;
use farheap::region::policy::PageCount;
use std::collections::VecDeque;

/// The probation queue's share of the resident pages, in percent.
const SMALL_PCT: u64 = 10;

/// How many ghosts are remembered, in percent of the resident pages.
const GHOSTS_PCT: u64 = 90;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Absent,
    /// It left as the page of this number.
    Ghost(u64),
    Small,
    SmallVictim,
    /// In the main queue, or a victim of it.
    Main,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct S3Fifo {
    small: VecDeque<PageId>,
    main: Hand,
    places: Vec<Place>,
    small_target: u64,
    ghosts_max: u64,
    /// Pages that became ghosts so far.
    time: u64,
}

impl S3Fifo {
    pub(crate) fn new(pages: PageCount, resident: PageCount) -> S3Fifo {
        S3Fifo {
            small: VecDeque::new(),
            main: Hand::new(pages, Contender::Clock),
            places: vec![Place::Absent; pages.get() as usize],
            small_target: (resident.get() * SMALL_PCT / 100).max(1),
            ghosts_max: resident.get() * GHOSTS_PCT / 100,
            time: 0,
        }
    }

    fn place(&mut self, page: PageId) -> &mut Place {
        &mut self.places[page.as_usize()]
    }

    fn next(&mut self) -> PageId {
        let from_small = self.small.len() as u64 >= self.small_target;
        if from_small || self.main.resident() == PageCount(0) {
            let page = self.small.pop_front().expect("one of the queues has a page");
            *self.place(page) = Place::SmallVictim;
            return page;
        }
        self.main.next()
    }
}

impl Eviction for S3Fifo {
    fn resident(&self) -> PageCount {
        PageCount(self.main.resident().get() + self.small.len() as u64)
    }

    fn inserted(&mut self, page: PageId, how: Insert) {
        let (time, most) = (self.time, self.ghosts_max);
        let is_live = matches!(self.place(page), Place::Ghost(left) if time - *left <= most);
        if is_live && how == Insert::Filled {
            *self.place(page) = Place::Main;
            self.main.inserted(page, how);
        } else {
            *self.place(page) = Place::Small;
            self.small.push_back(page);
        }
    }

    fn retouched(&mut self, page: PageId) {
        if *self.place(page) == Place::Main {
            self.main.retouched(page);
        } else {
            *self.place(page) = Place::Main;
            self.main.inserted(page, Insert::Filled);
        }
    }

    fn evicted(&mut self, page: PageId) {
        *self.place(page) = Place::Ghost(self.time);
        self.time += 1;
    }

    fn removed(&mut self, page: PageId) {
        match *self.place(page) {
            Place::Small => self.small.retain(|other| *other != page),
            Place::Main => self.main.removed(page),
            _ => {}
        }
        *self.place(page) = Place::Absent;
    }

    fn victims(&mut self, want: PageCount, out: &mut dyn FnMut(PageId)) -> PageCount {
        let named = want.min(self.resident());
        (0..named.get()).for_each(|_| out(self.next()));
        named
    }
}
