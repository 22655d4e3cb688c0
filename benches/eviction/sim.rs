//! Plays traces against policies, as the pager would.
//!
//! A cache of `frames` pages, of which a share is cooling: victims still in RAM, in the order in
//! which they were named. What the policy is told is what the pager knows: a hit on a resident
//! page is invisible, a hit on a cooling page is a minor fault, a touch of an absent page is a
//! read, the first touch ever is zero-filled and costs no read.

use crate::contender::{Contender, Eviction};
use crate::trace::{Event, Trace};
use farheap::PageId;
use farheap::region::policy::Insert;
use farheap::region::policy::PageCount;
use std::collections::{BinaryHeap, VecDeque};

/// What became of a trace's touches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    /// First touches ever.
    pub(crate) fresh: u64,
    /// Touches of pages in RAM, minor faults included.
    pub(crate) hits: u64,
    /// Of these, touches of cooling pages.
    pub(crate) minor: u64,
    /// Touches that had to read the store.
    pub(crate) reads: u64,
}

impl Outcome {
    /// Reads avoided, as a share of the touches that could have been one.
    pub(crate) fn hit_ratio(&self) -> f64 {
        self.hits as f64 / (self.hits + self.reads).max(1) as f64
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Unseen,
    Absent,
    Resident,
    /// Since the victim with this number.
    Cooling(u64),
}

/// A cache driven by one policy.
struct Cache {
    policy: Box<dyn Eviction>,
    states: Vec<State>,
    frames: u64,
    cooling_target: u64,
    cooling: u64,
    /// Victims, oldest first; stale ones (touched since) are skipped.
    queue: VecDeque<(u32, u64)>,
    named: u64,
    outcome: Outcome,
}

/// Plays `trace` against a policy in a cache of `frames` with `cooling` of them cooling.
pub(crate) fn play(kind: Contender, trace: &Trace, frames: u32, cooling: u32) -> Outcome {
    let pages = PageCount(u64::from(trace.pages));
    let resident = PageCount(u64::from(frames - cooling));
    let mut cache = Cache {
        policy: kind.build(pages, resident),
        states: vec![State::Unseen; trace.pages as usize],
        frames: u64::from(frames),
        cooling_target: u64::from(cooling),
        cooling: 0,
        queue: VecDeque::new(),
        named: 0,
        outcome: Outcome::default(),
    };
    trace.events.iter().for_each(|&event| match event {
        Event::Touch(page) => cache.touch(page),
        Event::Discard(page) => cache.discard(page),
    });
    let in_ram = cache.states.iter().filter(|s| matches!(s, State::Resident | State::Cooling(_)));
    assert_eq!(in_ram.count() as u64, cache.policy.resident().get() + cache.cooling, "{kind}");
    cache.outcome
}

impl Cache {
    fn touch(&mut self, page: u32) {
        let id = PageId(u64::from(page));
        match self.states[page as usize] {
            State::Resident => self.outcome.hits += 1,
            State::Cooling(_) => {
                self.outcome.hits += 1;
                self.outcome.minor += 1;
                self.cooling -= 1;
                self.policy.retouched(id);
            }
            State::Absent => {
                self.outcome.reads += 1;
                self.make_room();
                self.policy.inserted(id, Insert::Filled);
            }
            State::Unseen => {
                self.outcome.fresh += 1;
                self.make_room();
                self.policy.inserted(id, Insert::Fresh);
            }
        }
        self.states[page as usize] = State::Resident;
    }

    fn discard(&mut self, page: u32) {
        let state = &mut self.states[page as usize];
        self.cooling -= u64::from(matches!(state, State::Cooling(_)));
        *state = State::Unseen;
        self.policy.removed(PageId(u64::from(page)));
    }

    /// Evicts the longest-cooling page when all frames are taken, and lets others cool.
    fn make_room(&mut self) {
        let used = self.policy.resident().get() + self.cooling;
        assert!(used <= self.frames, "{used} pages in {} frames", self.frames);
        if used < self.frames {
            return;
        }
        let want = PageCount((self.cooling_target + 1).saturating_sub(self.cooling));
        let (states, queue, number) = (&mut self.states, &mut self.queue, &mut self.named);
        let named = self.policy.victims(want, &mut |page| {
            let state = &mut states[page.as_usize()];
            assert!(*state == State::Resident, "{page} was named but is not resident");
            *state = State::Cooling(*number);
            queue.push_back((page.get() as u32, *number));
            *number += 1;
        });
        self.cooling += named.get();
        while let Some((page, number)) = self.queue.pop_front() {
            if self.states[page as usize] == State::Cooling(number) {
                self.states[page as usize] = State::Absent;
                self.cooling -= 1;
                self.policy.evicted(PageId(u64::from(page)));
                return;
            }
        }
        unreachable!("a full cache has a victim");
    }
}

/// How the pages of a trace came in, where each touch is known.
struct Seen {
    seen: Vec<bool>,
    outcome: Outcome,
}

impl Seen {
    fn new(trace: &Trace) -> Seen {
        Seen { seen: vec![false; trace.pages as usize], outcome: Outcome::default() }
    }

    /// Counts the touch of a page that is in RAM.
    fn hit(&mut self) {
        self.outcome.hits += 1;
    }

    /// Counts the touch of one that is not.
    fn miss(&mut self, page: usize) {
        let was_seen = std::mem::replace(&mut self.seen[page], true);
        *if was_seen { &mut self.outcome.reads } else { &mut self.outcome.fresh } += 1;
    }

    fn discard(&mut self, page: usize) {
        self.seen[page] = false;
    }
}

/// Belady's optimum: evicts the page whose next touch is farthest away.
pub(crate) fn belady(trace: &Trace, frames: u32) -> Outcome {
    const NEVER: u32 = u32::MAX;
    let events = &trace.events;
    let mut next_touch = vec![NEVER; events.len()];
    let mut last = vec![NEVER; trace.pages as usize];
    for (now, event) in events.iter().enumerate().rev() {
        match *event {
            Event::Touch(page) => {
                next_touch[now] = last[page as usize];
                last[page as usize] = now as u32;
            }
            // The touch after it reads nothing.
            Event::Discard(page) => last[page as usize] = NEVER,
        }
    }
    let mut counts = Seen::new(trace);
    // For a resident page its next touch; entries of the heap that disagree are stale.
    let mut due: Vec<Option<u32>> = vec![None; trace.pages as usize];
    let (mut heap, mut resident) = (BinaryHeap::new(), 0);
    for (now, &event) in events.iter().enumerate() {
        let page = match event {
            Event::Touch(page) => page,
            Event::Discard(page) => {
                resident -= u32::from(due[page as usize].take().is_some());
                counts.discard(page as usize);
                continue;
            }
        };
        if due[page as usize].is_some() {
            counts.hit();
        } else {
            counts.miss(page as usize);
            resident += 1;
        }
        while resident > frames {
            let (next, victim): (u32, u32) =
                heap.pop().expect("every resident page is in the heap");
            if due[victim as usize] == Some(next) && victim != page {
                due[victim as usize] = None;
                resident -= 1;
            }
        }
        due[page as usize] = Some(next_touch[now]);
        heap.push((next_touch[now], page));
    }
    counts.outcome
}

/// LRU with perfect knowledge of hits, which no policy here has.
pub(crate) fn ideal_lru(trace: &Trace, frames: u32) -> Outcome {
    let mut counts = Seen::new(trace);
    let mut touched = vec![None; trace.pages as usize];
    // Every touch in time order; those that are not their page's last are stale.
    let (mut sequence, mut resident) = (VecDeque::new(), 0);
    for (now, &event) in trace.events.iter().enumerate() {
        let page = match event {
            Event::Touch(page) => page as usize,
            Event::Discard(page) => {
                resident -= u32::from(touched[page as usize].take().is_some());
                counts.discard(page as usize);
                continue;
            }
        };
        if touched[page].is_some() {
            counts.hit();
        } else {
            counts.miss(page);
            resident += 1;
        }
        touched[page] = Some(now);
        sequence.push_back((now, page));
        while resident > frames {
            let (then, victim) = sequence.pop_front().expect("holds every resident page");
            if touched[victim] == Some(then) {
                touched[victim] = None;
                resident -= 1;
            }
        }
    }
    counts.outcome
}

/// The clock with an accessed bit set by every hit, which no policy here has.
pub(crate) fn ideal_clock(trace: &Trace, frames: u32) -> Outcome {
    let mut counts = Seen::new(trace);
    // `None`: absent; otherwise the accessed bit.
    let mut accessed: Vec<Option<bool>> = vec![None; trace.pages as usize];
    let mut resident = 0;
    // Pages that were discarded since are stale; a page that came back is there twice, and goes a little earlier.
    let mut ring: VecDeque<usize> = VecDeque::new();
    for &event in &trace.events {
        let page = match event {
            Event::Touch(page) => page as usize,
            Event::Discard(page) => {
                resident -= u32::from(accessed[page as usize].take().is_some());
                counts.discard(page as usize);
                continue;
            }
        };
        if let Some(bit) = &mut accessed[page] {
            *bit = true;
            counts.hit();
            continue;
        }
        counts.miss(page);
        while resident == frames {
            let candidate = ring.pop_front().expect("holds every resident page");
            match accessed[candidate] {
                Some(true) => {
                    accessed[candidate] = Some(false);
                    ring.push_back(candidate);
                }
                Some(false) => {
                    accessed[candidate] = None;
                    resident -= 1;
                }
                None => {}
            }
        }
        accessed[page] = Some(false);
        resident += 1;
        ring.push_back(page);
    }
    counts.outcome
}

/// First in, first out, written without the library: what `fifo` without cooling must equal.
pub(crate) fn plain_queue(trace: &Trace, frames: u32) -> Outcome {
    let mut counts = Seen::new(trace);
    // For a resident page its arrival; entries of the queue that disagree are stale.
    let mut arrived = vec![None; trace.pages as usize];
    let (mut queue, mut resident) = (VecDeque::new(), 0);
    for (now, &event) in trace.events.iter().enumerate() {
        let page = match event {
            Event::Touch(page) => page as usize,
            Event::Discard(page) => {
                resident -= u32::from(arrived[page as usize].take().is_some());
                counts.discard(page as usize);
                continue;
            }
        };
        if arrived[page].is_some() {
            counts.hit();
            continue;
        }
        counts.miss(page);
        while resident == frames {
            let (then, victim): (usize, usize) = queue.pop_front().expect("holds all residents");
            if arrived[victim] == Some(then) {
                arrived[victim] = None;
                resident -= 1;
            }
        }
        arrived[page] = Some(now);
        resident += 1;
        queue.push_back((now, page));
    }
    counts.outcome
}
