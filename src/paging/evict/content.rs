//! Pages on their way out: victims are chosen, and clean ones dropped.
#![expect(unsafe_code, reason = "drops pages of the region")]

use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::evict::arrivals::Residents;
use crate::paging::mapped_over;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::page::{BATCH_MAX, CHUNK_PAGES, PAGE, backoff};
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::slot_store::SlotStore;
use crate::paging::probes;
use crate::sys::vm::Piece;

/// Takes up to `want` victims, at least one, off the policy's lists. One of a chunk that came in
/// whole takes the others of the chunk along: they have been used as little, and to take
/// them one by one would split the huge page that they are.
pub(in crate::paging) fn choose(
    memory: &RegionMemory,
    residents: &mut Residents,
    want: usize,
    victims: &mut Vec<PageId>,
) {
    // There is room for a chunk with whatever comes last.
    while victims.len() < want.min(BATCH_MAX) {
        let mut named = None;
        residents.policy.victims(PageCount(1), |page| named = Some(page));
        let Some(page) = named else { return };
        victims.push(page);
        let chunk = memory.table().chunk_of(page);
        if !memory.chunks().is_whole(chunk) {
            continue;
        }
        for other in memory.table().pages_of_chunk(chunk).filter(|other| *other != page) {
            let word = memory.word(other).load();
            if word.state() == State::Resident && word.pins() == 0 {
                residents.policy.bypassed(other);
                victims.push(other);
            }
        }
    }
}

/// State of pages to take out: on the policy's lists still, or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Listed {
    Yes,
    No,
}

/// Makes a victim `Moving`; `None` when it left the region by itself, or is pinned.
pub(in crate::paging) fn take_victim(
    memory: &RegionMemory,
    page: PageId,
    listed: Listed,
) -> Option<Word> {
    let mut spins = 0;
    let leaving = loop {
        let word = memory.word(page).load();
        match word.state() {
            State::Resident if memory.word(page).try_change(word, word.leaving()).is_ok() => {
                break word.leaving();
            }
            State::Resident => {}
            State::Moving => backoff(&mut spins),
            _ => return None,
        }
    };
    if listed == Listed::Yes {
        memory.policy().lock().policy.bypassed(page);
    }
    if leaving.pins() == 0 {
        return Some(leaving);
    }
    keep(memory, page, leaving);
    None
}

/// Leaves a victim where it is.
pub(in crate::paging) fn keep(memory: &RegionMemory, page: PageId, word: Word) {
    memory.publish_resident(page, word, word.kept(), None);
}

/// Takes the pages that the program has mapped something over off a list of clean ones; returns
/// how many pages, in how many pieces, are left.
pub(in crate::paging) fn leave_others(
    memory: &RegionMemory,
    slots: &SlotStore,
    clean: &mut [(PageId, Word)],
    pieces: &mut [Piece],
) -> (usize, usize) {
    let (mut left, mut piece_count) = (0, 0);
    for at in 0..clean.len() {
        let (page, word) = clean[at];
        if !mapped_over::disown(memory, slots, page, word) {
            clean[left] = (page, word);
            left += 1;
            memory.table().push_piece(pieces, &mut piece_count, page);
        }
    }
    (left, piece_count)
}

/// Drops pages that have been write-protected since their slots were read.
pub(in crate::paging) fn drop_clean(
    memory: &RegionMemory,
    clean: &[(PageId, Word)],
    pieces: &[Piece],
) {
    if clean.is_empty() {
        return;
    }
    // SAFETY: each page is `Moving` by this thread and equals its slot: it was installed
    // write-protected and no write was let through (that clears the flag first), so neither
    // a thread nor a device request of the application can have changed it.
    unsafe { memory.mapper().discard(pieces) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    {
        let mut policy = memory.policy().lock();
        clean.iter().for_each(|(page, _)| policy.evicted(*page));
    }
    for &(page, word) in clean {
        let slot = word.slot().expect("a clean page has a slot");
        memory.publish(page, word, Word::stored(slot));
    }
    let bytes = (clean.len() * PAGE) as u64;
    memory.budget().uncharge(ByteCount(bytes));
    memory.pool().managed().gave_back(bytes);
    probes::evicted(clean.len());
    memory.counters().evicted_clean.add(clean.len() as u64);
    let unseen = clean.iter().filter(|(_, word)| word.prefetched()).count();
    memory.counters().prefetch_unused.add(unseen as u64);
}

/// Frames to take neighbouring pages from `first` out to: a run for a whole chunk.
pub(in crate::paging) fn frames_for_run(
    memory: &RegionMemory,
    first: PageId,
    count: usize,
) -> Option<(FrameId, usize)> {
    let chunk = memory.table().chunk_of(first);
    if !memory.chunks().is_whole(chunk) {
        return memory.pool().frames_for_eviction(count);
    }
    memory.chunks().set_whole(chunk, false);
    if count == CHUNK_PAGES
        && let Some(run) = memory.frames().take_run()
    {
        return Some((run, count));
    }
    memory.pool().frames_for_eviction(count)
}
