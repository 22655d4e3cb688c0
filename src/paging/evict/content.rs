//! Content on its way out: between the region's mapping and staging frames, and back.
#![expect(unsafe_code, reason = "unmaps and drops pages of the region")]

use crate::base::error::Result;
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::evict::arrivals::Residents;
use crate::paging::mapped_over;
use crate::paging::page::BATCH_MAX;
use crate::paging::page::backoff;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::word::{FrameId, State, Word};
use crate::paging::pager::Pager;
use crate::paging::pager::discard;
use crate::paging::pager::mapper::{Moved, is_copied_then};
use crate::paging::pager::pieces::install_error;
use crate::paging::pager::transfer;
use crate::sys::uffd::{Outcome, Protect, Wake};
use crate::sys::vm::{Piece, copy_checked};

/// Takes up to `want` victims, at least one, off the policy's lists. One of a chunk that came in
/// whole takes the others of the chunk along: they have been used as little, and to take
/// them one by one would split the huge page that they are.
pub(in crate::paging) fn choose(
    pager: &Pager,
    residents: &mut Residents,
    want: usize,
    victims: &mut Vec<PageId>,
) {
    let per_chunk = pager.pages_per_chunk() as usize;
    // Room for a chunk with whatever comes last.
    let most =
        if pager.chunks().has_had_whole() { want.min(BATCH_MAX + 1 - per_chunk) } else { want };
    while victims.len() < most {
        let mut named = None;
        residents.victims(PageCount(1), |page| named = Some(page));
        let Some(page) = named else { return };
        victims.push(page);
        let chunk = pager.chunk_of(page);
        // The first chunk of all may come after `most` was chosen.
        let fits = victims.len() + per_chunk <= BATCH_MAX + 1;
        if !fits || !pager.chunks().is_whole(chunk) {
            continue;
        }
        for other in pager.table().pages_of_chunk(chunk).filter(|other| *other != page) {
            let word = pager.word(other).load();
            if word.state() == State::Resident && word.pins() == 0 {
                residents.unlist(other);
                residents.bypassed(other);
                victims.push(other);
            }
        }
    }
}

/// Whether pages to take out are still on the policy's lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Listed {
    Yes,
    No,
}

/// Makes a victim `Moving`; `None` when it left the region by itself, or is pinned.
pub(in crate::paging) fn take_victim(pager: &Pager, page: PageId, listed: Listed) -> Option<Word> {
    let mut spins = 0;
    loop {
        let word = pager.word(page).load();
        match word.state() {
            State::Resident => {}
            State::Moving => {
                backoff(&mut spins);
                continue;
            }
            _ => return None,
        }
        let leaving = word.leaving();
        if pager.word(page).try_change(word, leaving).is_err() {
            continue;
        }
        if listed == Listed::Yes {
            pager.policy().lock().unlist(page);
        }
        if word.pins() == 0 {
            return Some(leaving);
        }
        keep(pager, page, leaving);
        return None;
    }
}

/// Leaves a victim where it is.
pub(in crate::paging) fn keep(pager: &Pager, page: PageId, word: Word) {
    pager.publish_resident(page, word, word.kept(), None);
}

/// Takes the pages that the program has mapped something over off a list of clean ones; returns
/// how many pages, in how many pieces, are left.
pub(in crate::paging) fn leave_others(
    pager: &Pager,
    clean: &mut [(PageId, Word)],
    pieces: &mut [Piece],
) -> (usize, usize) {
    let (mut left, mut piece_count) = (0, 0);
    for at in 0..clean.len() {
        let (page, word) = clean[at];
        if !mapped_over::disown(pager, page, word) {
            clean[left] = (page, word);
            left += 1;
            discard::push_piece(pager, pieces, &mut piece_count, page);
        }
    }
    (left, piece_count)
}

/// Drops pages that have been write-protected since their slots were read.
pub(in crate::paging) fn drop_clean(pager: &Pager, clean: &[(PageId, Word)], pieces: &[Piece]) {
    if clean.is_empty() {
        return;
    }
    // SAFETY: each page is `Moving` by this thread and equals its slot: it was installed
    // write-protected and no write was let through (that clears the flag first), so neither
    // a thread nor a device request of the application can have changed it.
    unsafe { pager.mapper().discard(pieces) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    {
        let mut policy = pager.policy().lock();
        clean.iter().for_each(|(page, _)| policy.evicted(*page));
    }
    for &(page, word) in clean {
        let slot = word.slot().expect("a clean page has a slot");
        pager.publish(page, word, Word::stored(slot));
    }
    let bytes = (clean.len() * pager.page_bytes()) as u64;
    pager.budget().uncharge(ByteCount(bytes));
    pager.managed().gave_back(bytes);
    pager.counters().evicted_clean.add(clean.len() as u64);
    let unseen = clean.iter().filter(|(_, word)| word.prefetched()).count();
    pager.counters().prefetch_unseen.add(unseen as u64);
}

/// Frames to take neighbouring pages from `first` out to: a run for a whole chunk.
pub(in crate::paging) fn frames_for_run(
    pager: &Pager,
    first: PageId,
    count: usize,
) -> Option<(FrameId, usize)> {
    let chunk = pager.chunk_of(first);
    if !pager.chunks().is_whole(chunk) {
        return pager.pool().frames_for_eviction(count);
    }
    pager.chunks().set_whole(chunk, false);
    if count as u64 == pager.pages_per_chunk()
        && let Some(run) = pager.frames().take_run()
    {
        return Some((run, count));
    }
    pager.pool().frames_for_eviction(count)
}

/// Takes the contents of `count` `Moving` pages from `first` into neighbouring frames and
/// unmaps them from the region; returns what it took. The next one is in use by the kernel, or
/// refused, and stays as it was; the frames that are left are given back.
pub(in crate::paging) fn take_contents(
    pager: &Pager,
    first: PageId,
    frame: FrameId,
    count: usize,
) -> Moved {
    if pager.pool().moves().evict {
        take_by_move(pager, first, frame, count)
    } else {
        let taken = take_by_copy(pager, first, frame);
        Moved { bytes: usize::from(taken) * pager.page_bytes(), refused: false }
    }
}

fn take_by_move(pager: &Pager, first: PageId, frame: FrameId, count: usize) -> Moved {
    let len = count * pager.page_bytes();
    pager.mapper().clear_way(pager.frames().addr(frame), len);
    let mut moved = match pager.mapper().owns(pager.addr(first), len) {
        true => transfer::move_or_stop(pager, pager.frames().addr(frame), pager.addr(first), len),
        false => Moved { bytes: 0, refused: true },
    };
    if moved.refused && count == 1 && transfer::move_in_pieces(pager, first, frame) {
        moved.bytes = len;
    }
    let whole = moved.bytes / pager.page_bytes();
    let end = frame.0 + count as u32;
    (frame.0 + whole as u32..end).for_each(|frame| drop(pager.frames().release(FrameId(frame))));
    moved
}

/// Takes the content of a page that MOVE does not take into a frame, which is returned. Nothing has written the page
/// since it was installed, because it was protected all along: no device is writing to it now.
pub(in crate::paging) fn copy_protected(pager: &Pager, page: PageId) -> Option<FrameId> {
    let frame = pager.pool().frame_for_copy()?;
    take_by_copy(pager, page, frame).then_some(frame)
}

/// For kernels without MOVE, and pages that are protected: nobody can write the page while it is
/// copied, because writes fault first and wait for its word. (A device request of the application
/// in flight is not seen: such kernels need a pin around direct I/O into far memory.)
fn take_by_copy(pager: &Pager, page: PageId, frame: FrameId) -> bool {
    let protected = pager.mapper().forbid_writes(pager.addr(page)).is_ok();
    let copied = protected
        && pager.mapper().fill_holes(pager.addr(page))
        && copy_to_frame(pager, page, frame);
    if !copied || !mapped_over::owns_page(pager, page) {
        // Where it stays protected although its word does not say so, a write lifts that.
        pager.pool().give_copy_frame_back(frame);
        return false;
    }
    let piece = Piece::new(pager.addr(page), pager.page_bytes());
    // SAFETY: the page is `Moving` by this thread and its content is in the frame.
    unsafe { pager.mapper().discard(&[piece]) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    pager.pool().charge_copied();
    true
}

/// Copies a page, `Moving` by this thread and without holes, to a frame. `false`: the program has
/// protected it against reading.
fn copy_to_frame(pager: &Pager, page: PageId, frame: FrameId) -> bool {
    // SAFETY: the frame is this thread's and `page_bytes` long.
    unsafe { copy_checked(pager.addr(page), pager.frames().ptr(frame), pager.page_bytes()) }
}

/// Maps a cooling frame's content back as `page`, which is `Moving` by this thread. Returns
/// what that leaves of the frame.
pub(in crate::paging) fn return_frame(
    pager: &Pager,
    page: PageId,
    frame: FrameId,
) -> Result<FrameOutcome> {
    if !pager.pool().moves().evict {
        return transfer::copy_rest(pager, page, frame, 0, Protect::No)
            .map(|()| FrameOutcome::Dropped);
    }
    let (dst, src) = (pager.addr(page), pager.frames().addr(frame));
    pager.mapper().clear_way(dst, pager.page_bytes());
    // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
    // content and nobody else moves it.
    let outcome = unsafe { transfer::move_memory(pager, dst, src, pager.page_bytes(), Wake::No) };
    match outcome {
        Outcome::Done => Ok(FrameOutcome::MovedBack),
        // A page half of which is mapped cannot cool on: threads may write to that half.
        Outcome::Busy { bytes } | Outcome::Present { bytes } | Outcome::Failed { bytes, .. }
            if bytes > 0 || is_copied_then(outcome) =>
        {
            transfer::copy_rest(pager, page, frame, bytes, Protect::No)?;
            Ok(FrameOutcome::MovedBack)
        }
        _ => Err(install_error(outcome)),
    }
}

/// Moves the content of a page, `Moving` by this thread, back from a frame that the device may
/// still be reading: what the device gets then is nobody's. `false`: the kernel holds on to
/// the frame, which is as it was.
pub(in crate::paging) fn try_return(pager: &Pager, page: PageId, frame: FrameId) -> bool {
    let (dst, src) = (pager.addr(page), pager.frames().addr(frame));
    // SAFETY: the page is missing and this thread alone may fill it; the frame holds its
    // content.
    let bytes =
        match unsafe { transfer::move_memory(pager, dst, src, pager.page_bytes(), Wake::No) } {
            Outcome::Done => return true,
            Outcome::Busy { bytes } | Outcome::Present { bytes } => bytes,
            Outcome::Failed { bytes, .. } => bytes,
        };
    if bytes > 0 {
        pager.mapper().move_back(dst, src, bytes);
        // A part of it was in the region for a moment: somebody may read it for long.
        pager.frames().spare_runs().set_filled(frame, false);
    }
    false
}
