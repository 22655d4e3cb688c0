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
//!   Closed --latch--> Busy --let go--> Open --latch--> Busy --register, scan--> CloseOutcome
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
//! 3. An `Empty` word says that a page holds nothing only of a chunk that was closed before the word
//!    was loaded and has not been latched since (`page::chunk_state`).
#![expect(unsafe_code, reason = "drops pages of open chunks")]

use crate::base::units::{ByteCount, PageId};
use crate::paging::page::chunk_state::{ChunkView, Phase};
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::page::{CHUNK_LEN, CHUNK_PAGES, PAGE, PAGE_SIZE, backoff};
use crate::paging::pager::health::Health;
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::table::PageTable;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::Piece;

/// Outcome of opening a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum OpenOutcome {
    Opened,
    /// There is no room for it at the moment; some is on its way.
    Wait,
    /// Its pages come one by one.
    Unfit,
}

/// Outcome of closing a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum CloseOutcome {
    /// All of its pages cool in frames.
    Taken,
    /// Its pages are ordinary resident ones.
    Listed,
    /// There is no open chunk.
    None,
}

/// True if memory around an `Empty` page is being used densely, so that the chunk is worth
/// opening: a neighbouring page or chunk is in use.
fn is_dense(memory: &RegionMemory, page: PageId, chunk: ChunkId) -> bool {
    // A neighbour in another chunk may have left: an evictor that keeps up with a thread which fills memory in
    // order has taken the chunk before by then. The first page of each chunk came by itself, so that the kernel
    // could fill the others only by 4 KiB, and such migrations copied 0.9 GiB/s instead of 2.5
    // (book/src/design/write_back.md). One in the same chunk must be mapped, or the chunk cannot be opened.
    let is_near = |other: Option<u64>| {
        other.is_some_and(|other| match memory.table().chunk_of(PageId(other)) == chunk {
            true => memory.table().is_resident(other),
            false => memory.table().holds_something(other),
        })
    };
    let chunk_before = chunk.0.checked_sub(1).map(ChunkId);
    is_near(page.0.checked_sub(1))
        || is_near(Some(page.0 + 1))
        || chunk_before.is_some_and(|chunk| memory.chunks().is_open(chunk))
        || memory.chunks().is_open(ChunkId(chunk.0 + 1))
}

/// Opens the chunk of an `Empty` page if that is allowed, dense, and within the limit.
pub(in crate::paging) fn try_open(
    memory: &RegionMemory,
    health: &Health,
    page: PageId,
) -> OpenOutcome {
    let chunk = memory.table().chunk_of(page);
    let may_open = memory.chunks().pagemap().is_some() && memory.chunks().may_open(chunk);
    if !may_open || !is_dense(memory, page, chunk) || !memory.chunks().latch(chunk, Phase::Closed) {
        return OpenOutcome::Unfit;
    }
    // Asked with the chunk latched: a thread that takes a part of it back which the program had mapped
    // over (`mapped_over`) relies on it that only a chunk which is far memory, all of it, is opened.
    let is_own = memory.mapper().owns(memory.table().chunk_addr(chunk), CHUNK);
    let opened = is_own && open_latched(memory, chunk);
    let now = if opened { Phase::Open } else { Phase::Closed };
    memory.chunks().unlatch(chunk, Phase::Closed, now);
    if opened {
        memory.counters().chunks_opened.bump();
        memory.policy().lock().opened();
        return OpenOutcome::Opened;
    }
    if !is_own {
        return OpenOutcome::Unfit;
    }
    // Room comes with the next write that ends. A page of its own now would leave a chunk of
    // small pages, which the kernel fills one by one and gives back one by one.
    let room = memory.pool().watermarks().for_fresh().0 + CHUNK as u64;
    let is_aimed_at = memory.pool().watermarks().evict_until() >= room;
    let writing = is_aimed_at && memory.pool().waiters().starved().is_writing();
    let healthy = health.write_errno() == 0;
    let is_fresh = |page: PageId| memory.word(page).load().state() == State::Empty;
    if writing && healthy && memory.table().pages_of_chunk(chunk).all(is_fresh) {
        return OpenOutcome::Wait;
    }
    OpenOutcome::Unfit
}

fn open_latched(memory: &RegionMemory, chunk: ChunkId) -> bool {
    let mut absent = 0;
    for page in memory.table().pages_of_chunk(chunk) {
        let word = memory.word(page).load();
        match word.state() {
            State::Empty => absent += 1,
            State::Resident if is_plain(word) => {}
            _ => return false,
        }
    }
    let page = PAGE_SIZE.0;
    let reserve = memory.pool().watermarks().for_fresh();
    if absent == CHUNK_LEN.0
        && memory.pool().available() >= reserve.0 + CHUNK as u64
        && let Some(opened) = open_with_run(memory, chunk)
    {
        return opened;
    }
    if !memory.pool().charge_leaving(ByteCount(absent * page), reserve) {
        return false;
    }
    let (count, really_absent) = adopt_pages(memory, chunk);
    let whole = count == CHUNK_PAGES;
    // Pages that came or went since they were counted.
    let more = ByteCount(really_absent.saturating_sub(absent) * page);
    if whole && memory.budget().try_charge_leaving(more, ByteCount::ZERO) {
        if leave_to_kernel(memory, chunk) {
            memory.budget().uncharge(ByteCount(absent.saturating_sub(really_absent) * page));
            return true;
        }
        // The kernel has no mapping left (max_map_count).
        memory.budget().uncharge(more);
    }
    list_resident(memory, chunk, &mut memory.table().pages_of_chunk(chunk).take(count));
    memory.budget().uncharge(ByteCount(absent * page));
    false
}

/// Opens a chunk without content, latched, with the memory of a spare run, which is zero and
/// charged: no fault waits for the kernel to clear some. `None`: there is none that can be used.
fn open_with_run(memory: &RegionMemory, chunk: ChunkId) -> Option<bool> {
    let first = memory.frames().spare_runs().take_zeros()?;
    if !move_run_in(memory, chunk, first) {
        // A part of it may have been mapped for a moment.
        memory.pool().free(first, CHUNK_PAGES);
        return None;
    }
    (first.0..).take(CHUNK_PAGES).for_each(|n| memory.frames().put_empty(FrameId(n)));
    memory.counters().chunks_reused.bump();
    let opened = leave_to_kernel(memory, chunk);
    // Before anybody looks at the words: the chunk is latched.
    let_go(memory.table(), memory.table().pages_of_chunk(chunk));
    if !opened {
        // The kernel has no mapping left (max_map_count).
        list_resident(memory, chunk, &mut memory.table().pages_of_chunk(chunk));
    }
    Some(opened)
}

/// Moves a run of frames to an empty chunk; its words are `Moving` then. `false`: nothing has
/// changed, because another handler is at one of the pages, or the kernel still holds the run.
fn move_run_in(memory: &RegionMemory, chunk: ChunkId, first: FrameId) -> bool {
    if !claim_all(memory.table(), chunk) {
        return false;
    }
    let (dst, src) = (memory.table().chunk_addr(chunk), memory.frames().addr(first));
    let moved = memory.move_or_stop(dst, src, CHUNK).bytes;
    if moved == CHUNK {
        return true;
    }
    if moved > 0 {
        memory.mapper().move_back(dst, src, moved);
    }
    let_go(memory.table(), memory.table().pages_of_chunk(chunk));
    false
}

/// Makes all pages of a latched chunk, which are `Empty`, `Moving`. `false`: nothing has changed, for one of them
/// holds something, or another handler is at it.
pub(in crate::paging) fn claim_all(table: &PageTable, chunk: ChunkId) -> bool {
    let claims =
        |page: &PageId| table.word(*page).try_change(Word::EMPTY, Word::moving(None)).is_ok();
    let claimed = table.pages_of_chunk(chunk).take_while(claims).count();
    if claimed == CHUNK_PAGES {
        return true;
    }
    let_go(table, table.pages_of_chunk(chunk).take(claimed));
    false
}

/// Lets go of pages that were [claimed](claim_all): they are empty.
fn let_go(table: &PageTable, pages: impl Iterator<Item = PageId>) {
    pages.for_each(|page| table.publish(page, Word::moving(None), Word::EMPTY));
}

/// True if a mapped page is as the kernel would have filled it: one that has given its slot up may be protected.
fn is_plain(word: Word) -> bool {
    word.slot().is_none() && word.pins() == 0 && !word.protected()
}

/// Takes pages under the chunk's charge, in order, until one is in another thread's hands;
/// returns how many it took, and how many of them are not mapped.
fn adopt_pages(memory: &RegionMemory, chunk: ChunkId) -> (usize, u64) {
    let (mut count, mut absent) = (0, 0);
    for page in memory.table().pages_of_chunk(chunk) {
        let word = memory.word(page).load();
        match word.state() {
            State::Empty => absent += 1,
            State::Resident if is_plain(word) => {
                let leaving = word.leaving();
                if memory.word(page).try_change(word, leaving).is_err() {
                    break;
                }
                memory.policy().lock().removed(page);
                memory.publish(page, leaving, Word::EMPTY);
            }
            _ => break,
        }
        count += 1;
    }
    (count, absent)
}

/// Makes those of the given pages that are mapped ordinary resident pages; returns how many
/// are not. The chunk is latched and registered.
fn list_resident(
    memory: &RegionMemory,
    chunk: ChunkId,
    pages: &mut dyn Iterator<Item = PageId>,
) -> u64 {
    let mut there = [false; CHUNK_PAGES];
    let pagemap = memory.chunks().pagemap().expect("chunks are opened only with a pagemap");
    if let Err(error) = pagemap.scan(memory.table().chunk_addr(chunk), &mut there) {
        crate::paging::diagnostics::fatal("the pages of a chunk could not be looked up", &error);
    }
    let mut absent = 0;
    for page in pages {
        if !there[page.as_usize() % CHUNK_PAGES] {
            absent += 1;
            continue;
        }
        claim_empty(memory.table(), page);
        // No arrival: the page came when its chunk was opened.
        memory.policy().lock().list(page);
        memory.publish(page, Word::moving(None), Word::resident(None));
    }
    absent
}

/// Makes an `Empty` page of a latched chunk `Moving`. A handler that began with the page before
/// the chunk was opened may hold it for a moment, until it looks at the chunk.
fn claim_empty(table: &PageTable, page: PageId) {
    let moving = Word::moving(None);
    let mut spins = 0;
    while let Err(now) = table.word(page).try_change(Word::EMPTY, moving) {
        assert_eq!(now, moving, "{page} of a latched chunk");
        backoff(&mut spins);
    }
}

/// Closes an open chunk: its pages become ordinary pages. Returns whether it was open.
pub(in crate::paging) fn close(memory: &RegionMemory, chunk: ChunkId) -> bool {
    let _blocked = SignalsBlocked::new();
    if memory.chunks().latch_open(chunk).is_err() {
        return false;
    }
    if register_alone(memory, chunk) {
        end_close(memory, chunk);
        return true;
    }
    memory.chunks().unlatch(chunk, Phase::Open, Phase::Open);
    close_run(memory, chunk)
}

/// Makes the pages of a chunk, latched and registered, ordinary ones, and unlatches it.
fn end_close(memory: &RegionMemory, chunk: ChunkId) {
    let absent = list_resident(memory, chunk, &mut memory.table().pages_of_chunk(chunk));
    memory.budget().uncharge(ByteCount(absent * PAGE_SIZE.0));
    memory.pool().managed().gave_back(absent * PAGE_SIZE.0);
    memory.chunks().unlatch(chunk, Phase::Open, Phase::Closed);
    memory.counters().chunks_closed.bump();
}

/// Closes the whole run of open chunks that a chunk lies in, which needs no mapping: the run is
/// one, or several that are whole. Returns whether the chunk was open and is closed; where the
/// kernel refuses even that, all stays as it is.
fn close_run(memory: &RegionMemory, chunk: ChunkId) -> bool {
    /// Chunks that are opened beside the run meanwhile make it longer: then once more.
    const TRIES: u32 = 16;
    // One at a time, and nobody waits for this with a chunk latched: two that each hold what
    // the other needs would wait for ever.
    let _one = memory.chunks().lock_closing_run();
    let mut refused = Ok(());
    for _ in 0..TRIES {
        if memory.chunks().latch_open(chunk).is_err() {
            return refused.is_ok(); // Somebody has closed it.
        }
        let (mut first, mut end) = (chunk.0, chunk.0 + 1);
        let is_in_run = |at: usize| {
            at < memory.chunks().count() && memory.chunks().latch_open(ChunkId(at)).is_ok()
        };
        while first > 0 && is_in_run(first - 1) {
            first -= 1;
        }
        while is_in_run(end) {
            end += 1;
        }
        let (addr, len) = (memory.table().chunk_addr(ChunkId(first)), (end - first) * CHUNK);
        refused = memory.mapper().register_own(addr, len);
        if refused.is_ok() {
            (first..end).for_each(|at| end_close(memory, ChunkId(at)));
            return true;
        }
        let (open, run) = (Phase::Open, first..end);
        run.for_each(|at| memory.chunks().unlatch(ChunkId(at), open, open));
    }
    if let Err(error) = refused {
        crate::paging::diagnostics::warn("chunks could not be registered again, and stay", &error);
    }
    false
}

/// Closes the next open chunk as [`close_into`] does.
pub(in crate::paging) fn close_next_into(memory: &RegionMemory, first: FrameId) -> CloseOutcome {
    let next = memory.chunks().next_open();
    next.map_or(CloseOutcome::None, |chunk| close_into(memory, chunk, first))
}

/// Closes an open chunk by taking its memory out to the run of frames that begins with
/// `first`, where its pages cool. The frames' charge is the chunk's. A chunk of which the
/// kernel uses a page, or that has holes, is closed as usual, and the frames stay empty.
pub(in crate::paging) fn close_into(
    memory: &RegionMemory,
    chunk: ChunkId,
    first: FrameId,
) -> CloseOutcome {
    if memory.chunks().latch_open(chunk).is_err() {
        return CloseOutcome::None;
    }
    if !register_alone(memory, chunk) {
        memory.chunks().unlatch(chunk, Phase::Open, Phase::Open);
        return if close_run(memory, chunk) { CloseOutcome::Listed } else { CloseOutcome::None };
    }
    let is_own = memory.mapper().owns(memory.table().chunk_addr(chunk), CHUNK);
    let taken = is_own && is_whole(memory, chunk) && move_chunk(memory, chunk, first);
    if !taken {
        end_close(memory, chunk);
        return CloseOutcome::Listed;
    }
    memory.chunks().unlatch(chunk, Phase::Open, Phase::Closed);
    memory.counters().chunks_closed.bump();
    CloseOutcome::Taken
}

/// True if all pages of a chunk, latched and registered, are there.
fn is_whole(memory: &RegionMemory, chunk: ChunkId) -> bool {
    let mut there = [false; CHUNK_PAGES];
    let pagemap = memory.chunks().pagemap().expect("chunks are opened only with a pagemap");
    pagemap.scan(memory.table().chunk_addr(chunk), &mut there).is_ok()
        && there.iter().all(|there| *there)
}

/// Moves all of a chunk, latched and registered, to a run of frames; `false` and nothing has
/// changed when the kernel uses a page of it.
fn move_chunk(memory: &RegionMemory, chunk: ChunkId, first: FrameId) -> bool {
    let (dst, src) = (memory.frames().addr(first), memory.table().chunk_addr(chunk));
    let moved = memory.move_or_stop(dst, src, CHUNK).bytes;
    if moved < CHUNK {
        if moved > 0 {
            memory.mapper().move_back(dst, src, moved);
        }
        memory.counters().evict_busy.bump();
        return false;
    }
    memory.counters().chunks_evicted.bump();
    memory.table().pages_of_chunk(chunk).for_each(|page| claim_empty(memory.table(), page));
    cool_all(memory, chunk, first);
    true
}

/// Lets all pages of a latched chunk, which are `Moving` by this thread, cool in the run of frames that begins with
/// `first` and has their content.
pub(in crate::paging) fn cool_all(memory: &RegionMemory, chunk: ChunkId, first: FrameId) {
    let mut policy = memory.policy().lock();
    for (page, frame) in memory.table().pages_of_chunk(chunk).zip((first.0..).map(FrameId)) {
        policy.policy.bypassed(page);
        memory.frames().note(frame, page, None);
        memory.publish(page, Word::moving(None), Word::cooling(frame));
    }
}

/// Lets the kernel fill a latched chunk without asking. `false`: the process has too many mappings, and
/// nothing has changed.
fn leave_to_kernel(memory: &RegionMemory, chunk: ChunkId) -> bool {
    memory.mapper().leave_to_kernel(memory.table().chunk_addr(chunk), CHUNK)
}

/// Registers a latched chunk by itself. `false`: the process has too many mappings for that,
/// and nothing has changed.
fn register_alone(memory: &RegionMemory, chunk: ChunkId) -> bool {
    !memory.chunks().cuts_too_many(chunk)
        && memory.mapper().register_own(memory.table().chunk_addr(chunk), CHUNK).is_ok()
}

/// Closes the chunk of a page, so that the page's word speaks for it. `false`: the process has
/// too many mappings.
pub(in crate::paging) fn close_around(memory: &RegionMemory, page: PageId) -> bool {
    let chunk = memory.table().chunk_of(page);
    memory.chunks().is_closed(chunk) || close(memory, chunk) || !memory.chunks().is_open(chunk)
}

/// Discards pages `first..end` of one chunk if it is open; else as what it was seen closed.
pub(in crate::paging) fn discard_in_open(
    memory: &RegionMemory,
    chunk: ChunkId,
    first: PageId,
    end: PageId,
) -> std::result::Result<(), ChunkView> {
    memory.chunks().latch_open(chunk)?;
    let pages = end.0 - first.0;
    // Where the process has too many mappings it stays open, empty and charged, until it can
    // be closed with its run.
    let whole = pages == CHUNK_LEN.0 && register_alone(memory, chunk);
    let piece = Piece::new(memory.table().addr(first), pages as usize * PAGE);
    // SAFETY: the chunk is latched and open, so nobody else changes its mapping, and the
    // caller gave the pages' contents up.
    unsafe { memory.mapper().discard(&[piece]) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    if whole {
        memory.budget().uncharge(ByteCount(CHUNK as u64));
    }
    memory.chunks().unlatch(chunk, Phase::Open, if whole { Phase::Closed } else { Phase::Open });
    Ok(())
}

/// True if a page reads as zero: nothing is mapped there, and nothing is stored.
pub(in crate::paging) fn holds_nothing(memory: &RegionMemory, page: PageId) -> bool {
    let chunk = memory.table().chunk_of(page);
    let seen = memory.chunks().look(chunk);
    let empty = memory.word(page).load().state() == State::Empty;
    empty && seen.phase() == Phase::Closed && memory.chunks().is_as_seen(chunk, seen)
}

/// Bytes that are charged for open chunks and not resident, by looking.
pub(in crate::paging) fn open_but_absent(memory: &RegionMemory) -> ByteCount {
    let Some(pagemap) = memory.chunks().pagemap() else { return ByteCount::ZERO };
    let mut there = [false; CHUNK_PAGES];
    let mut absent = 0;
    for chunk in memory.chunks().all_open() {
        if pagemap.scan(memory.table().chunk_addr(chunk), &mut there).is_ok() {
            absent += there.iter().filter(|there| !**there).count() * PAGE;
        }
    }
    ByteCount(absent as u64)
}
