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
//!   Resident --taken--> Moving --it is the program's--> Poisoned: not charged, nobody looks
//! ```
//! Memory mapped over free addresses belongs to the program from then on: `farheap run` says so where the C library
//! is called ([`Region::claim`]), and addresses are asked about before they are handed out again
//! (`Extents::reserve`), as a system call may have come unseen. When the range is freed, what is left of the program's mapping there is replaced by far memory
//! ([`take_over`]). Nobody can have opened the chunk around it by then, nor opens it
//! before all of it is far memory: `kernel_filled::try_open` asks with the chunk latched, and a chunk
//! that is being opened is not taken for the program's (`page::gaps`, with loom models).
//!
//! [`Region::claim`]: crate::paging::region::Region::claim
//!
//! # Invariants
//! 1. Memory is taken out of the region, or dropped there while its contents count, only after
//!    `owns` said that it is far memory.
//! 2. Only far memory is registered.

use crate::base::units::PageId;
use crate::paging::diagnostics as report;
use crate::paging::kernel_filled;
use crate::paging::page::chunk_state::Entered;
use crate::paging::page::word::{State, Word};
use crate::paging::page::{PAGE, PAGE_SIZE, backoff};
use crate::paging::pager::memory::RegionMemory;
use crate::paging::pager::slot_store::SlotStore;

/// Gives up a page, `Moving` by this thread and mapped, that is not far memory any more.
/// Returns whether that was so. The page is on none of the policy's lists.
pub(in crate::paging) fn disown(
    memory: &RegionMemory,
    slots: &SlotStore,
    page: PageId,
    moving: Word,
) -> bool {
    if memory.owns_page(page) {
        return false;
    }
    slots.put(moving.slot());
    memory.publish(page, moving, Word::poisoned(None));
    // Its charge is what the program's mapping does not need of us.
    memory.budget().uncharge(PAGE_SIZE);
    memory.pool().managed().gave_back(PAGE as u64);
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
