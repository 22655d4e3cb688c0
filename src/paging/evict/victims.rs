//! Taking victims out of the region: clean ones are dropped, others moved into frames to cool.

use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::evict::Evictor;
use crate::paging::evict::content::{self, Listed};
use crate::paging::evict::state::{TakenOut, VICTIMS_MAX};
use crate::paging::kernel_filled::{self, CloseOutcome};
use crate::paging::mapped_over;
use crate::paging::page::word::{FrameId, Word};
use crate::paging::page::{BATCH_MAX, CHUNK_LEN, CHUNK_PAGES, PAGE, PAGE_SIZE};
use crate::paging::pager::memory::RegionMemory;
use crate::sys::vm::Piece;
use std::time::Instant;

/// Open chunks are evicted whole while they are at least 1/OPEN_PART of the limit:
/// then what they hold is most probably older than what the policy knows.
const OPEN_PART: u64 = 8;

/// Outcome of an attempt to evict a chunk whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Chunkwise {
    /// It cools.
    Went,
    /// It is closed, its pages are ordinary ones.
    Closed,
    /// All runs of frames are on their way to the device.
    Wait,
    /// The policy's pages go first.
    Later,
    /// Pages must go one by one.
    Unfit,
}

impl Evictor {
    /// Takes up to `want` victims out of the region; returns whether it is worth going on.
    pub(super) fn evict(&mut self, want: usize) -> bool {
        /// Victims that may be under way before the first of them frees anything.
        const UNDER_WAY: usize = 2 * BATCH_MAX;
        /// Batches looked through in one turn for the few pages that need no write.
        const PAUSED_ROUNDS_MAX: usize = 64;
        let mut victims = std::mem::take(&mut self.victims);
        let (mut went, mut resident) = (0, PageCount(0));
        let limit = PageCount(self.pager.budget().limit().0 / PAGE_SIZE.0);
        for _ in 0..if self.writes.is_paused() { PAUSED_ROUNDS_MAX } else { 1 } {
            let want = if self.writes.is_paused() { BATCH_MAX } else { want };
            victims.clear();
            {
                let mut policy = self.pager.memory().policy().lock();
                content::choose(self.pager.memory(), &mut policy, want, &mut victims);
                resident = policy.policy.resident();
            }
            went = self.take_out(&mut victims, Listed::No);
            self.fruitless += victims.len().max(1);
            self.stays.look(victims.len(), self.kept, limit);
            if went > 0 || self.fruitless > 2 * resident.as_usize() {
                break;
            }
        }
        let exhausted = self.fruitless > 2 * resident.as_usize() + UNDER_WAY;
        if exhausted {
            self.pager.health().set_exhausted(true);
        }
        let more = !victims.is_empty() && !exhausted;
        self.victims = victims;
        went > 0 || more
    }

    /// Unmaps the given pages as far as they are resident and not pinned; returns how many.
    pub(super) fn take_out(&mut self, victims: &mut [PageId], listed: Listed) -> usize {
        victims.sort_unstable();
        let chosen = Instant::now();
        let pause = self.writes.is_paused();
        self.kept = 0;
        let mut taken = std::mem::take(&mut self.taken);
        let TakenOut { clean, run } = &mut taken;
        let mut pieces = [Piece::new(0, 0); VICTIMS_MAX];
        let (mut piece_count, mut clean_count, mut run_len, mut moved) = (0, 0, 0, 0);
        // Once each: a page is there twice, and would wait for itself, if one of its chunk that did not go along with it,
        // because it was pinned or on its way in, was named as well (`content::choose`).
        for page in victims.chunk_by(PageId::eq).map(|same| same[0]) {
            let Some(word) = content::take_victim(self.pager.memory(), page, listed) else {
                continue;
            };
            if word.slot().is_some() && word.protected() {
                clean[clean_count] = (page, word);
                clean_count += 1;
                self.pager.table().push_piece(&mut pieces, &mut piece_count, page);
            } else if pause && word.slot().is_none() {
                content::keep(self.pager.memory(), page, word);
            } else {
                // Up to the end of a chunk: one that came in whole can leave whole, and faults on it wait for one call.
                let begins = page.0.is_multiple_of(CHUNK_LEN.0);
                let follows = run_len > 0 && run[run_len - 1].0.0 + 1 == page.0 && !begins;
                if !follows {
                    moved += self.move_out(&run[..run_len], chosen);
                    run_len = 0;
                }
                run[run_len] = (page, word);
                run_len += 1;
            }
        }
        moved += self.move_out(&run[..run_len], chosen);
        if !self.pager.mapper().owns_all(&pieces[..piece_count]) {
            (clean_count, piece_count) = content::leave_others(
                self.pager.memory(),
                self.pager.slots(),
                &mut clean[..clean_count],
                &mut pieces,
            );
        }
        content::drop_clean(self.pager.memory(), &clean[..clean_count], &pieces[..piece_count]);
        self.pager.counters().evict_times.add_many(chosen.elapsed(), clean_count as u64);
        self.taken = taken;
        self.made_room(clean_count);
        clean_count + moved
    }

    /// Takes the memory of neighbouring pages, `Moving` by this thread, out of the region into
    /// frames, to cool there; returns how many pages left.
    fn move_out(&mut self, run: &[(PageId, Word)], chosen: Instant) -> usize {
        let (mut done, mut moved) = (0, 0);
        // Once the kernel has refused a part of the run, pages go one by one: it says no to all for one.
        let mut most = run.len();
        while done < run.len() {
            let rest = &run[done..run.len().min(done + most)];
            let Some((first, got)) =
                content::frames_for_run(self.pager.memory(), rest[0].0, rest.len())
            else {
                run[done..]
                    .iter()
                    .for_each(|(page, word)| content::keep(self.pager.memory(), *page, *word));
                break;
            };
            let taken = self.pager.memory().take_contents(rest[0].0, first, got);
            let whole = taken.bytes / PAGE;
            for (victim, frame) in rest[..whole].iter().zip((first.0..).map(FrameId)) {
                self.cool(*victim, frame, chosen);
            }
            (done, moved) = (done + whole, moved + whole);
            if whole == got {
                continue;
            }
            if taken.refused && most > 1 {
                most = 1;
                continue;
            }
            let (page, word) = rest[whole];
            // MOVE takes nothing that is shared with a child, and a write that would end the sharing stops
            // at the protection.
            let copied =
                word.protected().then(|| self.pager.memory().copy_protected(page)).flatten();
            match copied {
                Some(frame) => self.cool((page, word), frame, chosen),
                None if mapped_over::disown(
                    self.pager.memory(),
                    self.pager.slots(),
                    page,
                    word,
                ) => {}
                None => {
                    // It may have been a hole that was filled since, where a write is not seen.
                    let kept = word.kept().with_protected(false);
                    self.pager.memory().publish_resident(page, word, kept, None);
                    self.pager.counters().evict_busy.bump();
                    self.kept += 1;
                }
            }
            (done, moved) = (done + 1, moved + usize::from(copied.is_some()));
        }
        moved
    }

    /// The content of a victim, `Moving` by this thread, is in `frame` now.
    fn cool(&mut self, (page, word): (PageId, Word), frame: FrameId, chosen: Instant) {
        self.pager.frames().note(frame, page, word.slot());
        let note = self.pager.frames().meta_of(frame);
        note.set_prefetched(word.prefetched());
        note.set_guessed(word.guessed());
        self.outgoing.chosen[frame.0 as usize] = chosen;
        self.pager.publish(page, word, Word::cooling(frame));
        self.outgoing.cooling.push_back(frame);
        self.outgoing.joined += 1;
    }

    /// True if the next to go is a page that the policy knows, although there are open chunks. Data read back
    /// in order pushes itself out then, which mostly costs no write, and fresh data, which it comes to next,
    /// stays, unless the former is read again and again; so does fresh data that is used again and again.
    fn policy_goes_first(&mut self, want: usize) -> bool {
        /// Victims that came to nothing so far: then chunks must go.
        const FRUITLESS_MAX: usize = 2 * BATCH_MAX;
        let (listed, fresh_return) = {
            let policy = self.pager.memory().policy().lock();
            let listed = policy.policy.resident().0 * PAGE as u64;
            (listed, policy.returns.fresh_return_more())
        };
        listed * OPEN_PART > self.pager.budget().limit().0
            && self.fruitless <= FRUITLESS_MAX
            && self.arrivals.policy_goes_first(want as u64, fresh_return)
    }

    /// Takes an open chunk out whole, as the huge page that it mostly is; its pages cool in a run
    /// of frames. Fresh memory under pressure leaves this way: a chunk costs one MOVE, one write
    /// and one release, where its pages one by one would split the huge page first.
    pub(super) fn evict_chunk(&mut self, want: usize) -> Chunkwise {
        if !self.pager.chunks().any_open() || !self.takes_chunks() {
            return Chunkwise::Unfit;
        }
        if self.policy_goes_first(want) {
            return Chunkwise::Later;
        }
        let share = ByteCount(self.pager.chunks().open_bytes().0 * OPEN_PART);
        if share < self.pager.budget().limit() {
            return Chunkwise::Unfit;
        }
        match self.take_run() {
            Some(run) => self.take_chunk(run, |memory| kernel_filled::close_next_into(memory, run)),
            None if self.under_way() > 0 => Chunkwise::Wait,
            None => Chunkwise::Unfit,
        }
    }

    /// True if chunks can leave whole: there are runs of frames, and slots for all of a chunk, or its
    /// pages must be able to come back one by one.
    pub(super) fn takes_chunks(&self) -> bool {
        let able = self.pager.pool().moves() && self.pager.frames().has_runs();
        able && self.pager.health().write_errno() == 0 && !self.writes.is_paused()
    }

    /// A run of frames that is not in use.
    pub(super) fn take_run(&self) -> Option<FrameId> {
        self.pager.frames().take_run().or_else(|| {
            // All that are not in use are spare.
            self.pager.pool().free_spare_run();
            self.pager.frames().take_run()
        })
    }

    /// Takes the chunk that `close` closes into a run of frames, to cool there.
    pub(super) fn take_chunk(
        &mut self,
        run: FrameId,
        close: impl FnOnce(&RegionMemory) -> CloseOutcome,
    ) -> Chunkwise {
        let chosen = Instant::now();
        match close(self.pager.memory()) {
            CloseOutcome::Taken => {
                self.cool_run(run, chosen);
                Chunkwise::Went
            }
            outcome => {
                let frames = (run.0..).take(CHUNK_PAGES).map(FrameId);
                frames.for_each(|frame| self.pager.frames().put_empty(frame));
                if outcome == CloseOutcome::Listed { Chunkwise::Closed } else { Chunkwise::Unfit }
            }
        }
    }

    /// The pages of a run of frames cool from now on.
    pub(super) fn cool_run(&mut self, first: FrameId, chosen: Instant) {
        self.outgoing.chosen[first.0 as usize..][..CHUNK_PAGES].fill(chosen);
        self.outgoing.cooling.extend((first.0..).map(FrameId).take(CHUNK_PAGES));
    }
}
