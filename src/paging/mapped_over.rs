//! Memory that the program maps over far memory (`mmap` with `MAP_FIXED`, or `mremap` to a fixed address) is
//! the program's: it is not evicted, not dropped, and not registered.
//!
//! Nobody reports such a mapping. userfaultfd has an event for it, but a handler could read one while
//! the evictor drops pages, and the event holds up every call meanwhile. So a thread that takes memory
//! away asks first: one call tells for any range whether all of it is one registered mapping
//! ([`Uffd::is_registered`](crate::sys::uffd::Uffd::is_registered), 0.3 us for a whole batch). A
//! mapping that is made between that question and the call that follows it at once is not seen; a
//! pinned page is never taken away, so a program that pins the range first excludes that.
//!
//! ```text
//!   Resident --taken--> Moving --all of it is the program's--> Poisoned: not charged, nobody looks
//!                         '-----a part of it is--------------> Resident with a pin for good
//! ```
//! Memory mapped over free addresses belongs to the program from then on: `farheap run` says so where the C library
//! is called ([`Region::claim_part_pages`]), and addresses are asked about before they are handed out again
//! (`Extents::reserve`), as a system call may have come unseen. When the range is freed, what is left of the program's mapping there is replaced by far memory
//! ([`take_over`], [`take_part_over`]). Nobody can have opened the chunk around it by then, nor opens it
//! before all of it is far memory: `kernel_filled::try_open` asks with the chunk latched, and a chunk
//! that is being opened is not taken for the program's (`page::gaps`, with loom models).
//!
//! [`Region::claim_part_pages`]: crate::paging::region::Region::claim_part_pages
//!
//! # Invariants
//! 1. Memory is taken out of the region, or dropped there while its contents count, only after
//!    `owns` said that it is far memory.
//! 2. Only far memory is registered.

use crate::base::units::PageId;
use crate::paging::diagnostics as report;
use crate::paging::kernel_filled;
use crate::paging::page::backoff;
use crate::paging::page::chunk_state::Entered;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::slot_store::SlotStore;
use crate::sys::signals::SignalsBlocked;
use crate::sys::vm::KERNEL_PAGE;

/// Gives up a page, `Moving` by this thread and mapped, of which a part is not far memory any more.
/// Says whether that was so. The page is on none of the policy's lists.
pub(in crate::paging) fn disown(
    memory: &RegionMemory,
    slots: &SlotStore,
    page: PageId,
    moving: Word,
) -> bool {
    match memory.mapper().far_bytes(memory.table().addr(page), memory.table().page_bytes()) {
        // Its charge is what the program's mapping does not need of us.
        0 => {
            slots.put(moving.slot());
            memory.publish(page, moving, Word::poisoned(None));
            memory.budget().uncharge(memory.table().page_size());
            memory.pool().managed().gave_back(memory.table().page_bytes() as u64);
        }
        far if far < memory.table().page_bytes() => {
            // Counted first, as by `Region::pin`.
            memory.table().count_pinned(u64::from(moving.pins() == 0));
            let kept = moving.kept();
            let pinned = kept.pinned().unwrap_or(kept);
            memory.publish_resident(page, moving, pinned, None);
        }
        _ => return false,
    }
    true
}

/// Enters the chunk of a page, closed: a page of it that is mapped anew is the handlers'. `None`: the
/// process has too many mappings to close it. It stays closed as long as the program's mapping is in
/// it: a chunk is opened only when all of it is far memory.
fn enter_closed(memory: &RegionMemory, page: PageId) -> Option<Entered<'_>> {
    let chunk = memory.table().chunk_of(page);
    let mut spins = 0;
    loop {
        if let Some(entered) = memory.chunks().enter(chunk) {
            return Some(entered);
        }
        if !kernel_filled::close_around(memory, page) {
            return None;
        }
        backoff(&mut spins);
    }
}

/// Makes those of `count` pages of one chunk, from `first` on, far memory again that the program had mapped
/// something over and has freed.
pub(in crate::paging) fn take_over(memory: &RegionMemory, first: PageId, count: u64) {
    let Some(_entered) = enter_closed(memory, first) else { return };
    let moving = Word::moving(None);
    for page in (first.0..first.0 + count).map(PageId) {
        // (A page that is in use again is not free.)
        let is_free = memory.word(page).load().state() == State::Empty;
        if !is_free || memory.owns_page(page) {
            continue;
        }
        if memory.word(page).try_change(Word::EMPTY, moving).is_ok() {
            if let Err(error) = memory.map_anew(page) {
                report::warn("memory that was mapped over stays the program's", &error);
            }
            memory.publish(page, moving, Word::EMPTY);
        }
    }
}

/// Makes a part of a page far memory again, in whole kernel pages, that the program has freed and had mapped
/// something over. What else is in the page stays. (Else the next to get that part would write to the
/// program's file.)
pub(in crate::paging) fn take_part_over(
    memory: &RegionMemory,
    slots: &SlotStore,
    page: PageId,
    start: usize,
    len: usize,
) {
    if memory.mapper().owns(start, len) {
        return;
    }
    let _blocked = SignalsBlocked::new();
    let Some(_entered) = enter_closed(memory, page) else { return };
    let Some((moving, after)) = take_word(memory, slots, page) else { return };
    for start in (start..start + len).step_by(KERNEL_PAGE) {
        if memory.mapper().owns(start, KERNEL_PAGE) {
            continue;
        }
        let register = || memory.mapper().register_faults(start, KERNEL_PAGE);
        if let Err(error) = memory.table().map_part_anew(start, KERNEL_PAGE, register) {
            report::warn("memory that was mapped over stays the program's", &error);
        }
    }
    if let Some(moving) = moving {
        memory.publish(page, moving, after);
    }
}

/// Keeps the evictor from deciding meanwhile that none of a page is far memory: the page's word, made
/// `Moving` where that could happen, and what it is afterwards. `None`: the page is lost, and stays so
/// until all of it is freed.
fn take_word(
    memory: &RegionMemory,
    slots: &SlotStore,
    page: PageId,
) -> Option<(Option<Word>, Word)> {
    let mut spins = 0;
    loop {
        let seen = memory.word(page).load();
        let (moving, after) = match seen.state() {
            State::Resident => (seen.leaving(), seen),
            // Given up by `disown`. A fault finds it empty and fills what is far memory.
            State::Poisoned
                if memory
                    .mapper()
                    .far_bytes(memory.table().addr(page), memory.table().page_bytes())
                    == 0 =>
            {
                (Word::moving(None), Word::EMPTY)
            }
            State::Poisoned => return None,
            State::Moving | State::Filling => {
                backoff(&mut spins);
                continue;
            }
            // Not mapped: the evictor does not look at it.
            _ => return Some((None, seen)),
        };
        if memory.word(page).try_change(seen, moving).is_ok() {
            if seen.state() == State::Poisoned {
                slots.put(seen.slot());
            }
            return Some((Some(moving), after));
        }
    }
}
