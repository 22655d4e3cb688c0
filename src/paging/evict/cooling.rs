//! Decisions about frames that have cooled, and about those whose page another hand took.

use crate::paging::evict::Evictor;
use crate::paging::evict::outgoing::Outgoing;
use crate::paging::fault::in_memory;
use crate::paging::fault::starved::take_first;
use crate::paging::fault::status::Purpose;
use crate::paging::page::CHUNK_PAGES;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::protocol::{self, Borrowed, Content};
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::paging::probes;

impl Evictor {
    /// Decides about frames that have cooled, leaving the youngest `keep`; writes the dirty ones.
    pub(super) fn finish_cooling(&mut self, keep: usize) -> bool {
        let count = self.outgoing.cooling.len().saturating_sub(keep).min(self.writes.room());
        let least = self.outgoing.cooling.len() - count;
        while self.outgoing.cooling.len() > least {
            let frame = take_first(&mut self.outgoing.cooling).expect("longer than `least`");
            if !give_run_back(&self.pager, &mut self.outgoing, frame) {
                self.finish_frame(frame);
            }
        }
        self.outgoing.due = self.outgoing.due.saturating_sub(count);
        self.release();
        self.writes.write_dirty(&mut self.outgoing);
        count > 0
    }

    /// Tells the policy which pages left, and gives their frames to the threads that need them: all at
    /// once, which costs one release of memory.
    pub(super) fn release(&mut self) {
        if !self.outgoing.left.is_empty() {
            probes::evicted(self.outgoing.left.len());
            let mut policy = self.pager.memory().policy().lock();
            self.outgoing.left.drain(..).for_each(|page| policy.evicted(page));
        }
        let freed = self.outgoing.freed.len();
        self.renew_runs();
        self.pager.pool().give_back(&mut self.outgoing.freed);
        self.made_room(freed);
        if freed > 0 {
            self.requests.note_freed();
        }
    }

    /// Gets fresh memory for the freed runs that are whole: the next
    /// chunk that is read takes it, or a fresh one. The kernel has to clear new memory, and here no
    /// fault waits for that. Other fills cannot use it, and other consumers may want the memory.
    /// A run that a direct store has filled keeps its memory, for the next one.
    fn renew_runs(&mut self) {
        let frames = self.pager.frames();
        let is_wanted =
            self.pager.pool().managed().deficit() == 0 && self.pager.pool().excess() == 0;
        // What was read by runs leaves by runs, and more is being read.
        let is_used = self.arrivals.fresh_prevail() || self.pager.chunks().has_had_whole();
        if !self.pager.pool().moves() || self.outgoing.freed.len() < CHUNK_PAGES || !is_wanted {
            return;
        }
        self.outgoing.freed.sort_unstable();
        let mut at = 0;
        while at + CHUNK_PAGES <= self.outgoing.freed.len() {
            let first = self.outgoing.freed[at];
            let begins =
                frames.run_of(first).is_some() && (first.0 as usize).is_multiple_of(CHUNK_PAGES);
            let is_run = begins
                && self.outgoing.freed[at + CHUNK_PAGES - 1].0 as usize
                    == first.0 as usize + CHUNK_PAGES - 1;
            let is_filled = is_run && frames.spare_runs().is_filled(first);
            if is_filled {
                frames.spare_runs().put(first);
            }
            if is_filled || is_used && is_run && self.pager.pool().renew(first) {
                self.outgoing.freed.drain(at..at + CHUNK_PAGES);
            } else {
                at += 1;
            }
        }
    }

    /// Takes those frames out of the standby line that another hand has taken the page from, now and then: they
    /// count as waiting pages as long as they are in it, and keep the memory of pages that were discarded.
    pub(super) fn tidy_line(&mut self) {
        self.outgoing.joined = 0;
        let Outgoing { cooling, borrowed, due, .. } = &mut self.outgoing;
        let (mut at, pager) = (0, &self.pager);
        cooling.retain(|&frame| {
            let outcome = pager.frames().meta_of(frame).outcome();
            // A chunk that was touched comes back whole by its first frame.
            let waits = at < *due
                || outcome == FrameOutcome::Open
                || outcome == FrameOutcome::MovedBack && pager.frames().run_of(frame).is_some();
            at += 1;
            if !waits {
                borrowed.push_back((frame, None));
            }
            waits
        });
    }

    /// Finds out what a cooled page needs.
    fn finish_frame(&mut self, frame: FrameId) {
        let pager = &self.pager;
        let (page, slot) = (pager.frames().page(frame), pager.frames().slot(frame));
        if pager.word(page).load() != Word::cooling(frame) {
            self.outgoing.borrowed.push_back((frame, None));
            return;
        }
        let hash = pager.slots().hash_frame(pager.frames(), frame);
        let same = slot.filter(|slot| pager.slots().hash(*slot) == hash);
        let content = match same {
            Some(slot) => Content::Clean(slot),
            None if hash == pager.slots().hash_of_zeros() => Content::Zero,
            None => Content::Dirty,
        };
        if !protocol::cooled(pager.word(page), frame, content) {
            self.outgoing.borrowed.push_back((frame, None));
            return;
        }
        let (note, is_clean) = (pager.frames().meta_of(frame), same.is_some());
        if note.prefetched() {
            // What is not clean somebody has written.
            let counters = pager.counters();
            if is_clean { &counters.prefetch_unused } else { &counters.prefetch_hits }.bump();
        }
        if note.guessed() {
            let writes = pager.readahead().writes();
            if is_clean { writes.count(page) } else { writes.happened(page) }
        }
        match content {
            // The slot is chosen together with its neighbours', in `write_dirty`.
            Content::Dirty => {
                self.outgoing.hashes[frame.0 as usize] = hash;
                self.writes.dirty.push(frame);
                return;
            }
            Content::Clean(_) => pager.counters().evicted_clean.bump(),
            Content::Zero => {
                pager.slots().put(slot);
                pager.counters().evicted_zero.bump();
            }
        }
        pager.counters().evict_times.add(self.outgoing.chosen[frame.0 as usize].elapsed());
        self.outgoing.left.push(page);
        self.outgoing.freed.push(frame);
    }

    /// Frees the frames whose takers have finished.
    pub(super) fn finish_borrowed(&mut self) {
        for _ in 0..self.outgoing.borrowed.len() {
            let borrowed = take_first(&mut self.outgoing.borrowed).expect("counted above");
            let (frame, written) = borrowed;
            let note = self.pager.frames().meta_of(frame);
            match protocol::look_at_borrowed(self.pager.word(note.page()), frame, note) {
                Borrowed::Wait => {
                    self.outgoing.borrowed.push_back(borrowed);
                    continue;
                }
                Borrowed::Cooling => {
                    self.outgoing.cooling.push_back(frame);
                    continue;
                }
                Borrowed::Over(false) => drop(self.pager.frames().release(frame)),
                Borrowed::Over(true) => self.outgoing.freed.push(frame),
            }
            self.pager.slots().put(written);
            self.made_room(1);
        }
        self.release();
    }
}

/// Brings a chunk back of whose run this frame is the first, if a page of it was touched in the line: it is in use,
/// which nobody saw before. Its pages are the policy's from now on.
fn give_run_back(pager: &Pager, outgoing: &mut Outgoing, first: FrameId) -> bool {
    /// So that room is made, however much is in use.
    const IN_A_ROW_MAX: u32 = 32;
    let is_first = (first.0 as usize).is_multiple_of(CHUNK_PAGES);
    if !is_first || pager.frames().run_of(first).is_none() || outgoing.due > 0 {
        return false;
    }
    let run = first.0..first.0 + CHUNK_PAGES as u32;
    let state = |frame| pager.word(pager.frames().page(FrameId(frame))).load().state();
    let is_touched = |frame| matches!(state(frame), State::Resident | State::Moving);
    if outgoing.given_back >= IN_A_ROW_MAX || !run.clone().any(is_touched) {
        outgoing.given_back = 0;
        return false;
    }
    outgoing.given_back += 1;
    let count = outgoing.cooling.iter().take_while(|next| run.contains(&next.0)).count();
    for frame in [first].into_iter().chain(outgoing.cooling.drain(..count)) {
        let page = pager.frames().page(frame);
        // What becomes of it shows when the evictor looks at what is borrowed.
        let _ = in_memory::take_back(pager, page, Word::cooling(frame), Purpose::Prefetch);
        outgoing.borrowed.push_back((frame, None));
    }
    true
}
