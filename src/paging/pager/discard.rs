//! Discarding: pages whose content nobody needs give up frames, slots and pending writes.
#![expect(unsafe_code, reason = "drops pages of the region")]

use crate::base::error::Result;
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::kernel_filled;
use crate::paging::mapped_over;
use crate::paging::page::frame_meta::FrameOutcome;
use crate::paging::page::protocol::{self, Discard};
use crate::paging::page::word::Word;
use crate::paging::page::{BATCH_MAX, CHUNK_LEN, PAGE, backoff};
use crate::paging::pager::Pager;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::{self, Piece};

/// As [`discard`] for the pages from `offset` to `end` of the region, which the program gives up; what it has mapped over
/// them is left to the kernel.
///
/// # Errors
/// [`Error::Os`](crate::Error::Os) when the kernel does not let go of the program's own.
pub(in crate::paging) fn clear(pager: &Pager, offset: usize, end: usize) -> Result<()> {
    let start = pager.table().start();
    let page_of = |offset: usize| PageId((offset / PAGE) as u64);
    if pager.mapper().owns(start + offset, end - offset) {
        discard(pager, page_of(offset), PageCount(((end - offset) / PAGE) as u64));
        return Ok(());
    }
    (offset..end).step_by(PAGE).try_for_each(|at| {
        if pager.mapper().owns(start + at, PAGE) {
            discard(pager, page_of(at), PageCount(1));
            return Ok(());
        }
        // SAFETY: the program's own mapping, which it gives advice for.
        unsafe { vm::drop_content(start + at, PAGE) }
    })
}

/// Makes `count` pages from `first` read as zero: frames, slots and pending writes go.
pub(crate) fn discard(pager: &Pager, first: PageId, count: PageCount) {
    let (memory, end) = (pager.memory(), PageId(first.0 + count.0));
    let mut next = first;
    while next < end {
        let part_end = PageId((next.0 + 1).next_multiple_of(CHUNK_LEN.0).min(end.0));
        let chunk = pager.table().chunk_of(next);
        let _blocked = SignalsBlocked::new();
        let len = (part_end.0 - next.0) as usize * PAGE;
        let owned = pager.mapper().owns(pager.table().addr(next), len);
        if !owned {
            // Where it is open, the kernel fills what the program has mapped there.
            let _ = kernel_filled::close(memory, chunk);
        }
        while let Err(seen) = kernel_filled::discard_in_open(memory, chunk, next, part_end) {
            discard_in_closed(pager, next, part_end);
            // If the chunk was latched meanwhile, pages found `Empty` may be the chunk's.
            if pager.chunks().is_as_seen(chunk, seen) {
                break;
            }
        }
        if !owned {
            mapped_over::take_over(memory, next, part_end.0 - next.0);
        }
        pager.tables().note_emptied(chunk);
        next = part_end;
    }
}

fn discard_in_closed(pager: &Pager, first: PageId, end: PageId) {
    let mut batch: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
    let mut batched = 0;
    for page in (first.0..end.0).map(PageId) {
        if let Some(word) = discard_start(pager, page) {
            batch[batched] = (page, word);
            batched += 1;
        }
        if batched == BATCH_MAX {
            discard_resident_run(pager, &batch);
            batched = 0;
        }
    }
    discard_resident_run(pager, &batch[..batched]);
}

/// Discards one page unless it is mapped; a mapped one is returned, `Resident`, for a batch.
fn discard_start(pager: &Pager, page: PageId) -> Option<Word> {
    let mut spins = 0u32;
    loop {
        match protocol::discard(pager.word(page), |frame| pager.frames().meta_of(frame)) {
            Discard::Done => return None,
            Discard::Mapped(word) => return Some(word),
            Discard::Freed(slot) => {
                pager.slots().put(slot);
                return None;
            }
            Discard::Dropped(frame, slot) => {
                pager.slots().put(slot);
                pager.counters().died_before_write.bump();
                pager.frames().decide(frame, FrameOutcome::Dropped);
                return None;
            }
            Discard::Abandoned(frame) => {
                // The evictor frees the old slot, and the frame when the device lets go of it.
                pager.counters().died_during_write.bump();
                pager.frames().decide(frame, FrameOutcome::Dropped);
                return None;
            }
            Discard::Mend(slot) => {
                pager.slots().put(slot);
                pager.memory().unpoison(page);
                pager.publish(page, Word::moving(None), Word::EMPTY);
                return None;
            }
            Discard::Busy => backoff(&mut spins),
            Discard::Changed => {}
        }
    }
}

/// Unmaps a batch of resident pages that are discarded, in ascending order.
fn discard_resident_run(pager: &Pager, batch: &[(PageId, Word)]) {
    let mut pieces: [Piece; BATCH_MAX] = [Piece::new(0, 0); BATCH_MAX];
    let mut taken: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
    let (mut piece_count, mut taken_count) = (0, 0);
    for &(page, seen) in batch {
        let Some(word) = take_for_discard(pager, page, seen) else { continue };
        taken[taken_count] = (page, word);
        taken_count += 1;
        pager.table().push_piece(&mut pieces, &mut piece_count, page);
    }
    if taken_count == 0 {
        return;
    }
    let taken = &taken[..taken_count];
    {
        let mut policy = pager.memory().policy().lock();
        taken.iter().for_each(|(page, _)| policy.removed(*page));
    }
    // SAFETY: each page is `Moving` by this thread, and its owner gave its content up.
    unsafe { pager.mapper().discard(&pieces[..piece_count]) }
        .expect("MADV_DONTNEED of own anonymous pages succeeds");
    let unwritten = taken.iter().filter(|(_, word)| word.slot().is_none()).count();
    pager.counters().discarded_dirty.add(unwritten as u64);
    for &(page, word) in taken {
        pager.slots().put(word.slot());
        pager.table().count_unpinned(u64::from(word.pins() > 0));
        pager.publish(page, word, Word::EMPTY);
    }
    pager.budget().uncharge(ByteCount((taken.len() * PAGE) as u64));
}

/// Takes a page seen `Resident` for unmapping; discards it otherwise when it moved on.
fn take_for_discard(pager: &Pager, page: PageId, seen: Word) -> Option<Word> {
    let mut word = seen;
    while pager.word(page).try_change(word, word.leaving()).is_err() {
        word = discard_start(pager, page)?;
    }
    Some(word.leaving())
}
