//! Open chunks: fresh memory at kernel speed.
//!
//! A page that was never evicted needs no handler: the kernel can fill it. A chunk of 2 MiB whose
//! pages are all fresh is *opened* when its neighbourhood is being used densely: it is taken out
//! of userfaultfd's hands and charged in full, and from then on the kernel zero-fills it, with
//! huge pages, without a fault of ours. Under pressure the evictor *closes* it: registers it
//! again, looks which pages are there (`/proc/self/pagemap`), hands them to the policy as
//! ordinary resident pages, and takes back the charge of those that are not. Isolated touches of
//! sparse memory open nothing and cost a page each.
//!
//! ```text
//!   Closed --latch--> Busy --let go--> Open --latch--> Busy --register, scan--> Closed
//! ```
//! | state | page words | who fills holes |
//! |---|---|---|
//! | `Closed` | as in `page::word` | handlers |
//! | `Open` | all `Empty`, whatever is mapped | the kernel |
//! | `Busy` | changing by the thread that latched it | faults wait |
//!
//! # Invariants
//! 1. An open chunk is charged for all its pages.
//! 2. Pages of an open chunk have no slot.
//! 3. Holes of a page that a closed chunk left partly filled read as zero: such pages are
//!    `sparse`.
//! 4. An `Empty` word says that a page holds nothing only of a chunk that was closed before the word
//!    was loaded and has not been latched since (`page::opening`).
#![expect(unsafe_code, reason = "drops pages of open chunks")]

use crate::base::units::{ByteCount, PageId};
use crate::paging::evict::policy::Insert;
use crate::paging::page::backoff;
use crate::paging::page::chunk_state::{Phase, Seen};
use crate::paging::page::chunks::CHUNK;
use crate::paging::page::chunks::ChunkId;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{KERNEL_PAGE, Piece};

/// What became of a chunk that was to be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Opening {
    Opened,
    /// There is no room for it at the moment; some is on its way.
    Wait,
    /// Its pages come one by one.
    Unfit,
}

/// What became of a chunk that was to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Closed {
    /// All of its pages cool in frames.
    Taken,
    /// Its pages are ordinary resident ones.
    Listed,
    /// There is no open chunk.
    None,
}

impl Pager {
    /// Whether memory around an `Empty` page is being used densely, so that the chunk is worth
    /// opening: a neighbouring page or chunk is in use.
    fn is_dense(&self, page: PageId, chunk: ChunkId) -> bool {
        let resident = |page: u64| self.table().is_resident(page);
        let before = page.0.checked_sub(1).is_some_and(resident);
        let chunk_before = chunk.0.checked_sub(1).map(ChunkId);
        before
            || resident(page.0 + 1)
            || chunk_before.is_some_and(|chunk| self.chunks().is_open(chunk))
            || self.chunks().is_open(ChunkId(chunk.0 + 1))
    }

    /// Opens the chunk of an `Empty` page if that is allowed, dense, and within the limit.
    pub(in crate::paging) fn try_open(&self, page: PageId) -> Opening {
        let chunk = self.chunk_of(page);
        let may_open = self.chunks().pagemap().is_some() && self.chunks().may_open(chunk);
        let is_own = || self.mapper().owns(self.table().chunk_addr(chunk), CHUNK);
        if !may_open || !self.is_dense(page, chunk) || !is_own() {
            return Opening::Unfit;
        }
        if !self.chunks().latch(chunk, Phase::Closed) {
            return Opening::Unfit;
        }
        let opened = self.open_latched(chunk);
        let now = if opened { Phase::Open } else { Phase::Closed };
        self.chunks().unlatch(chunk, Phase::Closed, now);
        if opened {
            self.counters().chunks_opened.bump();
            self.policy().lock().opened(self.pages_per_chunk());
            return Opening::Opened;
        }
        // Room comes with the next write that ends. A page of its own now would leave a chunk of
        // small pages, which the kernel fills one by one and gives back one by one.
        let room = self.pool().reserve_for_fresh().0 + CHUNK as u64;
        let is_aimed_at = self.pool().high_bytes() >= room;
        let writing = is_aimed_at && self.starved().is_writing();
        let healthy = self.health().write_errno() == 0;
        let is_fresh = |page: PageId| self.word(page).load().state() == State::Empty;
        if writing && healthy && self.table().pages_of_chunk(chunk).all(is_fresh) {
            return Opening::Wait;
        }
        Opening::Unfit
    }

    fn open_latched(&self, chunk: ChunkId) -> bool {
        let mut absent = 0;
        for page in self.table().pages_of_chunk(chunk) {
            let word = self.word(page).load();
            match word.state() {
                State::Empty => absent += 1,
                State::Resident if word.slot().is_none() && word.pins() == 0 => {}
                _ => return false,
            }
        }
        let page = self.page_size().0;
        let reserve = self.pool().reserve_for_fresh();
        if absent == self.pages_per_chunk()
            && self.pool().available() >= reserve.0 + CHUNK as u64
            && let Some(opened) = self.open_with_run(chunk)
        {
            return opened;
        }
        if !self.pool().charge_leaving(ByteCount(absent * page), reserve) {
            return false;
        }
        let (count, really_absent) = self.adopt_pages(chunk);
        let whole = count == self.pages_per_chunk();
        // Pages that came or went since they were counted.
        let more = ByteCount(really_absent.saturating_sub(absent) * page);
        if whole && self.budget().try_charge_leaving(more, ByteCount::ZERO) {
            if self.leave_to_kernel(chunk) {
                self.budget().uncharge(ByteCount(absent.saturating_sub(really_absent) * page));
                return true;
            }
            // The kernel has no mapping left (max_map_count).
            self.budget().uncharge(more);
        }
        let first = chunk.0 as u64 * self.pages_per_chunk();
        self.hand_over(chunk, &mut (first..first + count).map(PageId));
        self.budget().uncharge(ByteCount(absent * page));
        false
    }

    /// Opens a chunk without content, latched, with the memory of a spare run, which is zero and
    /// charged: no fault waits for the kernel to clear some. `None`: there is none that can be used.
    fn open_with_run(&self, chunk: ChunkId) -> Option<bool> {
        let first = self.frames().take_spare_run()?;
        if !self.move_run_in(chunk, first) {
            // A part of it may have been mapped for a moment.
            self.pool().free_run(first);
            return None;
        }
        (first.0..)
            .take(self.frames().run_frames())
            .for_each(|n| self.frames().put_empty(FrameId(n)));
        self.counters().chunks_reused.bump();
        let opened = self.leave_to_kernel(chunk);
        // Before anybody looks at the words: the chunk is latched.
        self.table()
            .pages_of_chunk(chunk)
            .for_each(|page| self.settle(page, Word::moving(None), Word::EMPTY));
        if !opened {
            // The kernel has no mapping left (max_map_count).
            self.hand_over(chunk, &mut self.table().pages_of_chunk(chunk));
        }
        Some(opened)
    }

    /// Moves a run of frames to an empty chunk; its words are `Moving` then. `false`: nothing has
    /// changed, because another handler is at one of the pages, or the kernel still holds the run.
    fn move_run_in(&self, chunk: ChunkId, first: FrameId) -> bool {
        let claims =
            |page: &PageId| self.word(*page).try_change(Word::EMPTY, Word::moving(None)).is_ok();
        let claimed = self.table().pages_of_chunk(chunk).take_while(claims).count();
        let (dst, src) = (self.table().chunk_addr(chunk), self.frames().addr(first));
        let is_alone = claimed as u64 == self.pages_per_chunk();
        let moved = if is_alone { self.move_or_stop(dst, src, CHUNK).bytes } else { 0 };
        if moved == CHUNK {
            return true;
        }
        if moved > 0 {
            self.mapper().move_back(dst, src, moved);
        }
        let claimed = self.table().pages_of_chunk(chunk).take(claimed);
        claimed.for_each(|page| self.settle(page, Word::moving(None), Word::EMPTY));
        false
    }

    /// Takes pages under the chunk's charge, in order, until one is in another thread's hands;
    /// returns how many it took, and how many of them are not mapped.
    fn adopt_pages(&self, chunk: ChunkId) -> (u64, u64) {
        let (mut count, mut absent) = (0, 0);
        for page in self.table().pages_of_chunk(chunk) {
            let word = self.word(page).load();
            match word.state() {
                State::Empty => absent += 1,
                State::Resident if word.slot().is_none() && word.pins() == 0 => {
                    let leaving = word.leaving();
                    if self.word(page).try_change(word, leaving).is_err() {
                        break;
                    }
                    self.policy().lock().removed(page);
                    self.settle(page, leaving, Word::EMPTY);
                }
                _ => break,
            }
            count += 1;
        }
        (count, absent)
    }

    /// Makes those of the given pages that are mapped ordinary resident pages; returns how many
    /// are not. The chunk is latched and registered.
    fn hand_over(&self, chunk: ChunkId, pages: &mut dyn Iterator<Item = PageId>) -> u64 {
        const UNITS: usize = CHUNK / KERNEL_PAGE;
        let mut there = [false; UNITS];
        let pagemap = self.chunks().pagemap().expect("chunks are opened only with a pagemap");
        if let Err(error) = pagemap.scan(self.table().chunk_addr(chunk), &mut there) {
            crate::paging::diagnostics::fatal(
                "the pages of a chunk could not be looked up",
                &error,
            );
        }
        let units = self.page_bytes() / KERNEL_PAGE;
        let first = chunk.0 as u64 * self.pages_per_chunk();
        let mut absent = 0;
        for page in pages {
            let at = (page.0 - first) as usize * units;
            let count = there[at..at + units].iter().filter(|there| **there).count();
            if count == 0 {
                absent += 1;
                continue;
            }
            let moving = self.claim_empty(page);
            let resident = Word::resident(None).with_sparse(count < units);
            // No arrival: the page came when its chunk was opened.
            self.policy().lock().inserted(page, Insert::Fresh);
            self.settle(page, moving, resident);
        }
        absent
    }

    /// Makes an `Empty` page of a latched chunk `Moving`. A handler that began with the page before
    /// the chunk was opened may hold it for a moment, until it looks at the chunk.
    fn claim_empty(&self, page: PageId) -> Word {
        let moving = Word::moving(None);
        let mut spins = 0;
        while let Err(now) = self.word(page).try_change(Word::EMPTY, moving) {
            assert_eq!(now, moving, "{page} of a latched chunk");
            backoff(&mut spins);
        }
        moving
    }

    /// Closes an open chunk: its pages become ordinary pages. Returns whether it was open.
    pub(in crate::paging) fn close(&self, chunk: ChunkId) -> bool {
        let _blocked = SignalsBlocked::new();
        if self.chunks().latch_open(chunk).is_err() {
            return false;
        }
        if self.register_alone(chunk) {
            self.end_close(chunk);
            return true;
        }
        self.chunks().unlatch(chunk, Phase::Open, Phase::Open);
        self.close_run(chunk)
    }

    /// Makes the pages of a chunk, latched and registered, ordinary ones, and unlatches it.
    fn end_close(&self, chunk: ChunkId) {
        let absent = self.hand_over(chunk, &mut self.table().pages_of_chunk(chunk));
        self.budget().uncharge(ByteCount(absent * self.page_size().0));
        self.managed().gave_back(absent * self.page_size().0);
        self.chunks().unlatch(chunk, Phase::Open, Phase::Closed);
        self.counters().chunks_closed.bump();
    }

    /// Closes the whole run of open chunks that a chunk lies in, which needs no mapping: the run is
    /// one, or several that are whole. Returns whether the chunk was open and is closed; where the
    /// kernel refuses even that, all stays as it is.
    fn close_run(&self, chunk: ChunkId) -> bool {
        /// Chunks that are opened beside the run meanwhile make it longer: then once more.
        const TRIES: u32 = 16;
        // One at a time, and nobody waits for this with a chunk latched: two that each hold what
        // the other needs would wait for ever.
        let _one = self.chunks().lock_closing_run();
        let mut refused = Ok(());
        for _ in 0..TRIES {
            if self.chunks().latch_open(chunk).is_err() {
                return refused.is_ok(); // Somebody has closed it.
            }
            let (mut first, mut end) = (chunk.0, chunk.0 + 1);
            let is_in_run = |at: usize| {
                at < self.chunks().count() && self.chunks().latch_open(ChunkId(at)).is_ok()
            };
            while first > 0 && is_in_run(first - 1) {
                first -= 1;
            }
            while is_in_run(end) {
                end += 1;
            }
            let (addr, len) = (self.table().chunk_addr(ChunkId(first)), (end - first) * CHUNK);
            refused = self.mapper().register_own(addr, len);
            if refused.is_ok() {
                (first..end).for_each(|at| self.end_close(ChunkId(at)));
                return true;
            }
            let (open, run) = (Phase::Open, first..end);
            run.for_each(|at| self.chunks().unlatch(ChunkId(at), open, open));
        }
        if let Err(error) = refused {
            crate::paging::diagnostics::warn(
                "chunks could not be registered again, and stay",
                &error,
            );
        }
        false
    }

    /// Closes the next open chunk by taking its memory out to the run of frames that begins with
    /// `first`, where its pages cool. The frames' charge is the chunk's. A chunk of which the
    /// kernel uses a page, or that has holes, is closed as usual, and the frames stay empty.
    pub(in crate::paging) fn close_into(&self, first: FrameId) -> Closed {
        let Some(chunk) = self.chunks().next_open() else { return Closed::None };
        if self.chunks().latch_open(chunk).is_err() {
            return Closed::None;
        }
        if !self.register_alone(chunk) {
            self.chunks().unlatch(chunk, Phase::Open, Phase::Open);
            return if self.close_run(chunk) { Closed::Listed } else { Closed::None };
        }
        let is_own = self.mapper().owns(self.table().chunk_addr(chunk), CHUNK);
        let taken = is_own && self.is_whole(chunk) && self.move_chunk(chunk, first);
        if !taken {
            self.end_close(chunk);
            return Closed::Listed;
        }
        self.chunks().unlatch(chunk, Phase::Open, Phase::Closed);
        self.counters().chunks_closed.bump();
        Closed::Taken
    }

    /// Whether all pages of a chunk, latched and registered, are there.
    fn is_whole(&self, chunk: ChunkId) -> bool {
        let mut there = [false; CHUNK / KERNEL_PAGE];
        let pagemap = self.chunks().pagemap().expect("chunks are opened only with a pagemap");
        pagemap.scan(self.table().chunk_addr(chunk), &mut there).is_ok()
            && there.iter().all(|there| *there)
    }

    /// Moves all of a chunk, latched and registered, to a run of frames; `false` and nothing has
    /// changed when the kernel uses a page of it.
    fn move_chunk(&self, chunk: ChunkId, first: FrameId) -> bool {
        let (dst, src) = (self.frames().addr(first), self.table().chunk_addr(chunk));
        let moved = self.move_or_stop(dst, src, CHUNK).bytes;
        if moved < CHUNK {
            if moved > 0 {
                self.mapper().move_back(dst, src, moved);
            }
            self.counters().evict_busy.bump();
            return false;
        }
        self.counters().chunks_evicted.bump();
        let mut policy = self.policy().lock();
        for (page, frame) in self.table().pages_of_chunk(chunk).zip((first.0..).map(FrameId)) {
            policy.bypassed(page);
            self.frames().note(frame, page, None);
            self.frames().note_of(frame).set_prefetched(false);
            self.frames().note_of(frame).set_guessed(false);
            let moving = self.claim_empty(page);
            self.settle(page, moving, Word::cooling(frame));
        }
        true
    }

    /// Has the kernel fill a latched chunk without asking. It stays registered, so that far memory is
    /// told from what the program maps over it. `false`: the process has too many mappings, and
    /// nothing has changed.
    fn leave_to_kernel(&self, chunk: ChunkId) -> bool {
        let addr = self.table().chunk_addr(chunk);
        // The kernel takes no mode away from a registration: it has to end first.
        if self.mapper().unregister(addr, CHUNK).is_err() {
            return false;
        }
        if let Err(error) = self.mapper().register_unwatched(addr, CHUNK) {
            super::diagnostics::fatal("an open chunk could not be registered", &error);
        }
        true
    }

    /// Registers a latched chunk by itself. `false`: the process has too many mappings for that,
    /// and nothing has changed.
    fn register_alone(&self, chunk: ChunkId) -> bool {
        !self.chunks().cuts_too_many(chunk)
            && self.mapper().register_own(self.table().chunk_addr(chunk), CHUNK).is_ok()
    }

    /// Closes the chunk of a page, so that the page's word speaks for it. `false`: the process has
    /// too many mappings.
    pub(in crate::paging) fn close_around(&self, page: PageId) -> bool {
        let chunk = self.chunk_of(page);
        self.chunks().is_closed(chunk) || self.close(chunk) || !self.chunks().is_open(chunk)
    }

    /// Closes one open chunk, going round; `false` when there is none.
    pub(in crate::paging) fn close_next(&self) -> bool {
        self.chunks().next_open().is_some_and(|chunk| self.close(chunk))
    }

    /// Discards pages `first..end` of one chunk if it is open; else as what it was seen closed.
    pub(in crate::paging) fn discard_in_open(
        &self,
        chunk: ChunkId,
        first: PageId,
        end: PageId,
    ) -> std::result::Result<(), Seen> {
        self.chunks().latch_open(chunk)?;
        let pages = end.0 - first.0;
        // Where the process has too many mappings it stays open, empty and charged, until it can
        // be closed with its run.
        let whole = pages == self.pages_per_chunk() && self.register_alone(chunk);
        let piece = Piece::new(self.addr(first), pages as usize * self.page_bytes());
        // SAFETY: the chunk is latched and open, so nobody else changes its mapping, and the
        // caller gave the pages' contents up.
        unsafe { self.mapper().discard(&[piece]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        if whole {
            self.budget().uncharge(ByteCount(CHUNK as u64));
        }
        self.chunks().unlatch(chunk, Phase::Open, if whole { Phase::Closed } else { Phase::Open });
        Ok(())
    }

    /// Whether a page reads as zero: nothing is mapped there, and nothing is stored.
    pub(in crate::paging) fn holds_nothing(&self, page: PageId) -> bool {
        let chunk = self.chunk_of(page);
        let seen = self.chunks().look(chunk);
        let empty = self.word(page).load().state() == State::Empty;
        empty && seen.phase() == Phase::Closed && self.chunks().is_as_seen(chunk, seen)
    }

    /// Bytes that are charged for open chunks and not resident, by looking.
    pub(in crate::paging) fn open_but_absent(&self) -> ByteCount {
        let Some(pagemap) = self.chunks().pagemap() else { return ByteCount::ZERO };
        let mut there = [false; CHUNK / KERNEL_PAGE];
        let mut absent = 0;
        for chunk in self.chunks().all_open() {
            if pagemap.scan(self.table().chunk_addr(chunk), &mut there).is_ok() {
                absent += there.iter().filter(|there| !**there).count() * KERNEL_PAGE;
            }
        }
        ByteCount(absent as u64)
    }
}
