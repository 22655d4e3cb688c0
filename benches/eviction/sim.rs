//! Plays traces against policies, as the pager would.
//!
//! A cache of `frames` pages, of which a share is cooling: victims still in RAM, in the order in
//! which they were named. What the policy is told is what the pager knows: a hit on a resident
//! page is invisible, a hit on a cooling page is a minor fault, a touch of an absent page is a
//! read, the first touch ever is zero-filled and costs no read.

use crate::contender::{Contender, Eviction};
use crate::trace::Trace;
use farheap::region::policy::Insert;
use farheap::{PageCount, PageId};
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
    trace.touches.iter().for_each(|&page| cache.touch(page));
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

/// Belady's optimum: evicts the page whose next touch is farthest away.
pub(crate) fn belady(trace: &Trace, frames: u32) -> Outcome {
    const NEVER: u32 = u32::MAX;
    let touches = &trace.touches;
    let mut next_touch = vec![NEVER; touches.len()];
    let mut last = vec![NEVER; trace.pages as usize];
    for (now, &page) in touches.iter().enumerate().rev() {
        next_touch[now] = last[page as usize];
        last[page as usize] = now as u32;
    }
    let mut outcome = Outcome::default();
    // For a resident page its next touch; entries of the heap that disagree are stale.
    let mut due: Vec<Option<u32>> = vec![None; trace.pages as usize];
    let mut seen = vec![false; trace.pages as usize];
    let (mut heap, mut resident) = (BinaryHeap::new(), 0);
    for (now, &page) in touches.iter().enumerate() {
        let index = page as usize;
        if due[index].is_some() {
            outcome.hits += 1;
        } else {
            let counter = if seen[index] { &mut outcome.reads } else { &mut outcome.fresh };
            *counter += 1;
            seen[index] = true;
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
        due[index] = Some(next_touch[now]);
        heap.push((next_touch[now], page));
    }
    outcome
}

/// LRU with perfect knowledge of hits, which no policy here has.
pub(crate) fn ideal_lru(trace: &Trace, frames: u32) -> Outcome {
    let mut outcome = Outcome::default();
    let mut touched = vec![None; trace.pages as usize];
    let mut seen = vec![false; trace.pages as usize];
    // Every touch in time order; those that are not their page's last are stale.
    let (mut sequence, mut resident) = (VecDeque::new(), 0);
    for (now, &page) in trace.touches.iter().enumerate() {
        let index = page as usize;
        if touched[index].is_some() {
            outcome.hits += 1;
        } else {
            let counter = if seen[index] { &mut outcome.reads } else { &mut outcome.fresh };
            *counter += 1;
            seen[index] = true;
            resident += 1;
        }
        touched[index] = Some(now);
        sequence.push_back((now, index));
        while resident > frames {
            let (then, victim) = sequence.pop_front().expect("holds every resident page");
            if touched[victim] == Some(then) {
                touched[victim] = None;
                resident -= 1;
            }
        }
    }
    outcome
}

/// The clock with an accessed bit set by every hit, which no policy here has.
pub(crate) fn ideal_clock(trace: &Trace, frames: u32) -> Outcome {
    let mut outcome = Outcome::default();
    // `None`: absent; otherwise the accessed bit.
    let mut accessed: Vec<Option<bool>> = vec![None; trace.pages as usize];
    let mut seen = vec![false; trace.pages as usize];
    let mut ring: VecDeque<usize> = VecDeque::new();
    for &page in &trace.touches {
        let index = page as usize;
        if let Some(bit) = &mut accessed[index] {
            *bit = true;
            outcome.hits += 1;
            continue;
        }
        let counter = if seen[index] { &mut outcome.reads } else { &mut outcome.fresh };
        *counter += 1;
        seen[index] = true;
        while ring.len() == frames as usize {
            let candidate = ring.pop_front().expect("frames > 0");
            if accessed[candidate] == Some(true) {
                accessed[candidate] = Some(false);
                ring.push_back(candidate);
            } else {
                accessed[candidate] = None;
            }
        }
        accessed[index] = Some(false);
        ring.push_back(index);
    }
    outcome
}

/// First in, first out, written without the library: what `fifo` without cooling must equal.
pub(crate) fn plain_queue(trace: &Trace, frames: u32) -> Outcome {
    let mut outcome = Outcome::default();
    let mut resident = vec![false; trace.pages as usize];
    let mut seen = vec![false; trace.pages as usize];
    let mut queue = VecDeque::new();
    for &page in &trace.touches {
        let index = page as usize;
        if resident[index] {
            outcome.hits += 1;
            continue;
        }
        let counter = if seen[index] { &mut outcome.reads } else { &mut outcome.fresh };
        *counter += 1;
        seen[index] = true;
        if queue.len() == frames as usize {
            let victim: usize = queue.pop_front().expect("frames > 0");
            resident[victim] = false;
        }
        resident[index] = true;
        queue.push_back(index);
    }
    outcome
}
