//! Fresh chunks beside pages: what the evictor gives up where the kernel fills memory that the policy does not hear of.
//!
//! A fresh touch in a used neighbourhood opens its chunk of 2 MiB: it is charged whole, and no touch of it is seen. It
//! leaves whole. Where room is missing, something has to choose between the oldest open chunk and a page of the
//! policy's; [`Choice`] has the library's rule (`src/paging/evict/victims.rs`) and others. Pages that follow the last one
//! of a stream count as read ahead. Pages leave by a standby line of a sixteenth but while streams arrive.

use crate::contender::{Contender, Eviction};
use crate::trace::{CHUNK, Event, Trace};
use farheap::PageId;
use farheap::region::policy::Insert;
use farheap::region::policy::PageCount;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;
use std::ops::Range;

/// Open chunks go whole while they are at least this part of the frames, and the policy's pages before them only while
/// those are.
const OPEN_PART: u64 = 8;

/// The frames by those of the standby line.
const LINE_PART: u32 = 16;

/// What makes room where there are open chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// As the library: chunks, but pages while these are read in order and are not read again, or while fresh data comes
    /// back more.
    Shipped,
    Chunks,
    Pages,
    /// What a byte at random belongs to: a chunk is chosen in proportion to its bytes.
    AnyByte,
    /// So that as large a part of chunks leaves as of pages.
    Alike,
}

impl Choice {
    pub(crate) const ALL: [Choice; 5] =
        [Choice::Shipped, Choice::Chunks, Choice::Pages, Choice::AnyByte, Choice::Alike];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Choice::Shipped => "shipped",
            Choice::Chunks => "chunks first",
            Choice::Pages => "pages first",
            Choice::AnyByte => "any byte",
            Choice::Alike => "alike",
        }
    }
}

/// What became of a trace's touches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) reads: u64,
    pub(crate) soft: u64,
    /// Chunks that were opened, and those that left whole.
    pub(crate) opened: u64,
    pub(crate) left_whole: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unseen,
    Absent,
    Resident { is_stored: bool },
    Cooling { number: u64, is_stored: bool },
    Open,
}

/// Which of the pages that left came back before as many others left as there are frames.
#[derive(Default)]
struct Returns {
    left: [u64; 2],
    came_back: [u64; 2],
    /// Also ahead of a fault.
    read_again: [u64; 2],
}

struct Memory {
    policy: Box<dyn Eviction>,
    choice: Choice,
    states: Vec<State>,
    frames: u64,
    used: u64,
    /// Open chunks, oldest first.
    open: VecDeque<u32>,
    is_open: Vec<bool>,
    /// Pages of each open chunk that have content, and which.
    live: Vec<u32>,
    is_live: Vec<bool>,
    cooling: u64,
    line: VecDeque<(u32, u64)>,
    named: u64,
    /// When a page left, in pages that left, and whether it had been read before.
    left: Vec<Option<(u64, bool)>>,
    was_read: Vec<bool>,
    gone: u64,
    returns: Returns,
    /// What arrived lately: read, of that ahead, and fresh.
    filled: u64,
    ahead: u64,
    fresh: u64,
    /// Pages that went before chunks since a chunk went.
    since_chunk: u64,
    /// The last pages of streams, latest first.
    streams: VecDeque<u32>,
    random: StdRng,
    outcome: Outcome,
}

/// Plays a trace in `frames`.
pub(crate) fn play(choice: Choice, trace: &Trace, frames: u32) -> Outcome {
    let frames = frames.max(2 * CHUNK);
    let chunks = trace.pages.div_ceil(CHUNK) as usize;
    let pages = PageCount(chunks as u64 * u64::from(CHUNK));
    let resident = PageCount(u64::from(frames - frames / LINE_PART));
    let mut memory = Memory {
        policy: Contender::Tenure.build(pages, resident),
        choice,
        states: vec![State::Unseen; pages.as_usize()],
        frames: u64::from(frames),
        used: 0,
        open: VecDeque::new(),
        is_open: vec![false; chunks],
        live: vec![0; chunks],
        is_live: vec![false; pages.as_usize()],
        cooling: 0,
        line: VecDeque::new(),
        named: 0,
        left: vec![None; pages.as_usize()],
        was_read: vec![false; pages.as_usize()],
        gone: 0,
        returns: Returns::default(),
        filled: 0,
        ahead: 0,
        fresh: 0,
        since_chunk: 0,
        streams: VecDeque::new(),
        random: StdRng::seed_from_u64(1),
        outcome: Outcome::default(),
    };
    for event in &trace.events {
        match *event {
            Event::Touch(page) => memory.touch(page),
            Event::Discard(page) => memory.discard(page),
        }
    }
    memory.check();
    memory.outcome
}

impl Memory {
    fn touch(&mut self, page: u32) {
        let index = page as usize;
        match self.states[index] {
            State::Resident { .. } => {}
            State::Open => self.set_live(page, true),
            State::Cooling { is_stored, .. } => {
                self.outcome.soft += 1;
                self.cooling -= 1;
                self.policy.retouched(PageId(u64::from(page)));
                self.states[index] = State::Resident { is_stored };
            }
            State::Absent => self.read(page),
            State::Unseen if self.may_open(page / CHUNK, page) => {
                self.open_chunk(page / CHUNK);
                self.set_live(page, true);
            }
            State::Unseen => {
                self.make_room(1);
                self.arrive(page, Insert::Fresh);
                self.states[index] = State::Resident { is_stored: false };
            }
        }
    }

    fn read(&mut self, page: u32) {
        const STREAMS: usize = 8;
        self.outcome.reads += 1;
        self.make_room(1);
        let stream = page
            .checked_sub(1)
            .and_then(|before| self.streams.iter().position(|last| *last == before));
        if let Some(at) = stream {
            self.streams.remove(at);
        }
        self.streams.push_front(page);
        self.streams.truncate(STREAMS);
        let how = if stream.is_some() { Insert::Prefetched } else { Insert::Filled };
        if let Some((when, was_read)) = self.left[page as usize].take()
            && self.gone - when <= self.frames
        {
            self.returns.read_again[usize::from(was_read)] += 1;
            self.returns.came_back[usize::from(was_read)] += u64::from(how == Insert::Filled);
        }
        self.was_read[page as usize] = true;
        self.arrive(page, how);
        self.states[page as usize] = State::Resident { is_stored: true };
    }

    fn arrive(&mut self, page: u32, how: Insert) {
        match how {
            Insert::Fresh => self.came(0, 0, 1),
            Insert::Filled => self.came(1, 0, 0),
            Insert::Prefetched => self.came(1, 1, 0),
        }
        self.policy.inserted(PageId(u64::from(page)), how);
        self.used += 1;
    }

    fn came(&mut self, filled: u64, ahead: u64, fresh: u64) {
        self.filled += filled;
        self.ahead += ahead;
        self.fresh += fresh;
        while self.filled + self.fresh > 4 * u64::from(CHUNK) {
            (self.filled, self.ahead, self.fresh) =
                (self.filled / 2, self.ahead / 2, self.fresh / 2);
        }
    }

    /// Whether the chunk of a fresh page is worth opening, and has nothing that was stored.
    fn may_open(&self, chunk: u32, page: u32) -> bool {
        let pages = self.pages_of(chunk);
        let pages = pages.start as usize..pages.end as usize;
        let is_near = |other: usize| match self.states.get(other) {
            Some(State::Resident { .. }) => true,
            Some(State::Absent | State::Cooling { .. } | State::Open) => !pages.contains(&other),
            _ => false,
        };
        let is_open = |chunk: usize| self.is_open.get(chunk).is_some_and(|open| *open);
        let before = |number: u32| (number as usize).checked_sub(1);
        let is_dense = before(page).is_some_and(is_near)
            || is_near(page as usize + 1)
            || before(chunk).is_some_and(is_open)
            || is_open(chunk as usize + 1);
        is_dense
            && self.states[pages]
                .iter()
                .all(|state| matches!(state, State::Unseen | State::Resident { is_stored: false }))
    }

    fn open_chunk(&mut self, chunk: u32) {
        // What is there is adopted.
        for page in self.pages_of(chunk) {
            let is_there = self.states[page as usize] != State::Unseen;
            self.set_live(page, is_there);
            if is_there {
                self.policy.removed(PageId(u64::from(page)));
                self.used -= 1;
            }
            self.states[page as usize] = State::Open;
            self.was_read[page as usize] = false;
            self.left[page as usize] = None;
        }
        let pages = u64::from(CHUNK);
        self.make_room(pages);
        self.came(0, 0, pages);
        self.used += pages;
        self.open.push_back(chunk);
        self.is_open[chunk as usize] = true;
        self.outcome.opened += 1;
    }

    fn make_room(&mut self, pages: u64) {
        while self.frames - self.used < pages {
            let open = self.open.len() as u64 * u64::from(CHUNK);
            if open > 0 && !self.policy_goes_first(open) {
                if open * OPEN_PART >= self.frames || self.policy.resident().get() == 0 {
                    self.evict_chunk();
                    continue;
                }
                self.close_chunk();
            }
            self.evict_page();
        }
    }

    fn policy_goes_first(&mut self, open: u64) -> bool {
        /// Times a chunk's bytes that leave before a chunk does.
        const AGEING: u64 = 8;
        let listed = self.policy.resident().get();
        if listed == 0 {
            return false;
        }
        let Returns { left, came_back, read_again } = &self.returns;
        let fresh_return = 2 * came_back[0] * (left[1] + 1) > 3 * came_back[1] * (left[0] + 1);
        match self.choice {
            Choice::Chunks => false,
            Choice::Pages => true,
            Choice::AnyByte => self.random.random_range(0..listed + open) < listed,
            Choice::Alike => {
                let chunks = open / u64::from(CHUNK);
                self.random.random_range(0..listed + chunks) < listed
            }
            Choice::Shipped => {
                let [fresh, read] = *read_again;
                let read_return = 2 * read * (left[0] + 1) > 3 * fresh * (left[1] + 1);
                let in_order = self.in_order() && !read_return;
                let wants = listed * OPEN_PART > self.frames && (in_order || fresh_return);
                if wants && self.since_chunk >= AGEING * u64::from(CHUNK) {
                    self.since_chunk = 0;
                    return false;
                }
                self.since_chunk += u64::from(wants);
                wants
            }
        }
    }

    fn in_order(&self) -> bool {
        self.filled > self.fresh && 8 * self.ahead > self.filled
    }

    fn evict_chunk(&mut self) {
        let chunk = self.close();
        self.used -= u64::from(CHUNK);
        self.outcome.left_whole += 1;
        for page in self.pages_of(chunk) {
            // Zeros are not stored.
            if !self.is_live[page as usize] {
                self.states[page as usize] = State::Unseen;
                continue;
            }
            self.states[page as usize] = State::Absent;
            self.policy.bypassed(PageId(u64::from(page)));
            self.policy.evicted(PageId(u64::from(page)));
            self.leave(page);
        }
    }

    /// Closes the oldest open chunk.
    fn close(&mut self) -> u32 {
        let chunk = self.open.pop_front().expect("asked for when there is one");
        self.is_open[chunk as usize] = false;
        chunk
    }

    fn pages_of(&self, chunk: u32) -> Range<u32> {
        chunk * CHUNK..(chunk + 1) * CHUNK
    }

    /// Notes whether a page of an open chunk has content.
    fn set_live(&mut self, page: u32, is_live: bool) {
        let was_live = std::mem::replace(&mut self.is_live[page as usize], is_live);
        let live = &mut self.live[(page / CHUNK) as usize];
        *live = *live + u32::from(is_live) - u32::from(was_live);
    }

    /// Makes the oldest open chunk pages of the policy's.
    fn close_chunk(&mut self) {
        let chunk = self.close();
        for page in self.pages_of(chunk) {
            self.states[page as usize] = State::Resident { is_stored: false };
            self.policy.inserted(PageId(u64::from(page)), Insert::Fresh);
        }
    }

    fn leave(&mut self, page: u32) {
        let was_read = self.was_read[page as usize];
        self.left[page as usize] = Some((self.gone, was_read));
        self.gone += 1;
        let returns = &mut self.returns;
        returns.left[usize::from(was_read)] += 1;
        if returns.left[0] + returns.left[1] > self.frames {
            returns.left = returns.left.map(|count| count / 2);
            returns.came_back = returns.came_back.map(|count| count / 2);
            returns.read_again = returns.read_again.map(|count| count / 2);
        }
    }

    /// Takes the longest-cooling page out, and lets others cool.
    fn evict_page(&mut self) {
        let streams = self.fresh > self.filled || self.in_order();
        let target = if streams { 0 } else { self.frames / 16 };
        let want = PageCount((target + 1).saturating_sub(self.cooling));
        let (states, line, number) = (&mut self.states, &mut self.line, &mut self.named);
        let named = self.policy.victims(want, &mut |page| {
            let State::Resident { is_stored } = states[page.as_usize()] else {
                panic!("{page} was named but is not resident");
            };
            states[page.as_usize()] = State::Cooling { number: *number, is_stored };
            line.push_back((page.get() as u32, *number));
            *number += 1;
        });
        self.cooling += named.get();
        while let Some((page, named)) = self.line.pop_front() {
            if matches!(self.states[page as usize], State::Cooling { number, .. } if number == named)
            {
                self.states[page as usize] = State::Absent;
                self.cooling -= 1;
                self.used -= 1;
                self.policy.evicted(PageId(u64::from(page)));
                self.leave(page);
                return;
            }
        }
        // All there is are open chunks.
        self.evict_chunk();
    }

    fn discard(&mut self, page: u32) {
        let state = &mut self.states[page as usize];
        match state {
            State::Open => return self.discard_in_open(page),
            State::Unseen => return,
            State::Cooling { .. } => self.cooling -= 1,
            State::Absent | State::Resident { .. } => {}
        }
        self.used -= u64::from(*state != State::Absent);
        *state = State::Unseen;
        self.was_read[page as usize] = false;
        self.left[page as usize] = None;
        self.policy.removed(PageId(u64::from(page)));
    }

    /// The room of a chunk is free once none of its pages has content.
    fn discard_in_open(&mut self, page: u32) {
        self.set_live(page, false);
        let chunk = page / CHUNK;
        if self.live[chunk as usize] == 0 {
            self.open.retain(|open| *open != chunk);
            self.is_open[chunk as usize] = false;
            self.used -= u64::from(CHUNK);
            self.pages_of(chunk).for_each(|page| self.states[page as usize] = State::Unseen);
        }
    }

    /// Checks that every frame that is used has a page.
    fn check(&self) {
        let in_memory = self.states.iter().filter(|s| !matches!(s, State::Unseen | State::Absent));
        assert_eq!(in_memory.count() as u64, self.used, "{:?}", self.choice);
        assert!(self.used <= self.frames, "{} of {} frames", self.used, self.frames);
    }
}
