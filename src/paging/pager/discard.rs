//! Discarding: pages whose content nobody needs give up frames, slots and pending writes.
#![expect(unsafe_code, reason = "drops pages of the region")]

use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::page::BATCH_MAX;
use crate::paging::page::backoff;
use crate::paging::page::chunks::CHUNK;
use crate::paging::page::note::Fate;
use crate::paging::page::protocol::{self, Discard};
use crate::paging::page::word::Word;
use crate::paging::pager::Pager;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::Piece;

impl Pager {
    /// Makes `count` pages from `first` read as zero: frames, slots and pending writes go.
    pub(crate) fn discard(&self, first: PageId, count: PageCount) {
        let end = PageId(first.0 + count.0);
        let per_chunk = (CHUNK / self.page_bytes()) as u64;
        let mut next = first;
        while next < end {
            let part_end = PageId(((next.0 / per_chunk + 1) * per_chunk).min(end.0));
            let chunk = self.chunk_of(next);
            let _blocked = SignalsBlocked::new();
            let len = (part_end.0 - next.0) as usize * self.page_bytes();
            let owned = self.mapper().owns(self.addr(next), len);
            if !owned {
                // Where it is open, the kernel fills what the program has mapped there.
                let _ = self.close(chunk);
            }
            while let Err(seen) = self.discard_in_open(chunk, next, part_end) {
                self.discard_in_closed(next, part_end);
                // If the chunk was latched meanwhile, pages found `Empty` may be the chunk's.
                if self.chunks().is_as_seen(chunk, seen) {
                    break;
                }
            }
            if !owned {
                self.take_over(next, part_end.0 - next.0);
            }
            self.tables().note_emptied(chunk);
            next = part_end;
        }
    }

    fn discard_in_closed(&self, first: PageId, end: PageId) {
        let mut batch: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
        let mut batched = 0;
        for page in (first.0..end.0).map(PageId) {
            if let Some(word) = self.discard_start(page) {
                batch[batched] = (page, word);
                batched += 1;
            }
            if batched == BATCH_MAX {
                self.discard_resident_run(&batch);
                batched = 0;
            }
        }
        self.discard_resident_run(&batch[..batched]);
    }

    /// Discards one page unless it is mapped; a mapped one is returned, `Resident`, for a batch.
    fn discard_start(&self, page: PageId) -> Option<Word> {
        let mut spins = 0u32;
        loop {
            match protocol::discard(self.word(page), |frame| self.frames().note_of(frame)) {
                Discard::Done => return None,
                Discard::Mapped(word) => return Some(word),
                Discard::Freed(slot) => {
                    self.put_slot(slot);
                    return None;
                }
                Discard::Dropped(frame, slot) => {
                    self.put_slot(slot);
                    self.counters().died_before_write.bump();
                    self.frames().decide(frame, Fate::Dropped);
                    return None;
                }
                Discard::Abandoned(frame) => {
                    // The evictor frees the old slot, and the frame when the device lets go of it.
                    self.counters().died_during_write.bump();
                    self.frames().decide(frame, Fate::Dropped);
                    return None;
                }
                Discard::Mend(slot) => {
                    self.put_slot(slot);
                    self.unpoison(page);
                    self.settle(page, Word::moving(None), Word::EMPTY);
                    return None;
                }
                Discard::Busy => backoff(&mut spins),
                Discard::Changed => {}
            }
        }
    }

    /// Unmaps a batch of resident pages that are discarded, in ascending order.
    fn discard_resident_run(&self, batch: &[(PageId, Word)]) {
        let mut pieces: [Piece; BATCH_MAX] = [Piece::new(0, 0); BATCH_MAX];
        let mut taken: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
        let (mut piece_count, mut taken_count) = (0, 0);
        for &(page, seen) in batch {
            let Some(word) = self.take_for_discard(page, seen) else { continue };
            taken[taken_count] = (page, word);
            taken_count += 1;
            self.push_piece(&mut pieces, &mut piece_count, page);
        }
        if taken_count == 0 {
            return;
        }
        let taken = &taken[..taken_count];
        {
            let mut policy = self.policy().lock();
            taken.iter().for_each(|(page, _)| policy.removed(*page));
        }
        // SAFETY: each page is `Moving` by this thread, and its owner gave its content up.
        unsafe { self.mapper().discard(&pieces[..piece_count]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        let unwritten = taken.iter().filter(|(_, word)| word.slot().is_none()).count();
        self.counters().freed_unwritten.add(unwritten as u64);
        for &(page, word) in taken {
            self.put_slot(word.slot());
            self.table().count_unpinned(u64::from(word.pins() > 0));
            self.settle(page, word, Word::EMPTY);
        }
        self.budget().uncharge(ByteCount((taken.len() * self.page_bytes()) as u64));
    }

    /// Takes a page seen `Resident` for unmapping; discards it otherwise when it moved on.
    fn take_for_discard(&self, page: PageId, seen: Word) -> Option<Word> {
        let mut word = seen;
        while self.word(page).try_change(word, word.leaving()).is_err() {
            word = self.discard_start(page)?;
        }
        Some(word.leaving())
    }

    /// Adds a page to a list of ranges, growing the last one when the page follows it.
    pub(crate) fn push_piece(&self, pieces: &mut [Piece], count: &mut usize, page: PageId) {
        let start = self.addr(page);
        if let Some(last) = count.checked_sub(1).map(|last| &mut pieces[last])
            && last.start() + last.len() == start
        {
            last.grow(self.page_bytes());
            return;
        }
        pieces[*count] = Piece::new(start, self.page_bytes());
        *count += 1;
    }
}
