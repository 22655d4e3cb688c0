//! What the program maps over far memory (`mmap` with `MAP_FIXED`, or `mremap` to a fixed address) is
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
//! When the range is freed, what is left of the program's mapping there is replaced by far memory
//! ([`take_over`]).
//!
//! # Invariants
//! 1. Memory is taken out of the region, or dropped there while its contents count, only after
//!    `owns` said that it is far memory.
//! 2. Only far memory is registered.

use crate::base::error::Result;
use crate::base::units::PageId;
use crate::paging::diagnostics as report;
use crate::paging::page::word::{State, Word};
use crate::paging::pager::Pager;

/// Whether a page is far memory, all of it.
pub(in crate::paging) fn owns_page(pager: &Pager, page: PageId) -> bool {
    pager.mapper().owns(pager.addr(page), pager.page_bytes())
}

/// Gives up a page, `Moving` by this thread and mapped, of which a part is not far memory any more.
/// Says whether that was so. The page is on none of the policy's lists.
pub(in crate::paging) fn disown(pager: &Pager, page: PageId, moving: Word) -> bool {
    match pager.mapper().far_bytes(pager.addr(page), pager.page_bytes()) {
        // Its charge is what the program's mapping does not need of us.
        0 => {
            pager.put_slot(moving.slot());
            pager.publish(page, moving, Word::poisoned(None));
            pager.budget().uncharge(pager.page_size());
            pager.managed().gave_back(pager.page_bytes() as u64);
        }
        far if far < pager.page_bytes() => {
            // Counted first, as by `Region::pin`.
            pager.table().count_pinned(u64::from(moving.pins() == 0));
            let kept = moving.kept();
            let pinned = kept.pinned().unwrap_or(kept);
            pager.publish_resident(page, moving, pinned, None);
        }
        _ => return false,
    }
    true
}

/// Makes those of `count` pages of one chunk, from `first` on, far memory again that the program had mapped
/// something over and has freed.
pub(in crate::paging) fn take_over(pager: &Pager, first: PageId, count: u64) {
    // Where the kernel fills the chunk, the process having too many mappings to close it, nobody
    // would serve faults.
    let Some(_entered) = pager.chunks().enter(pager.chunk_of(first)) else { return };
    let moving = Word::moving(None);
    for page in (first.0..first.0 + count).map(PageId) {
        // (A page that is in use again is not free.)
        let is_free = pager.word(page).load().state() == State::Empty;
        if !is_free || owns_page(pager, page) {
            continue;
        }
        if pager.word(page).try_change(Word::EMPTY, moving).is_ok() {
            if let Err(error) = map_anew(pager, page) {
                report::warn("memory that was mapped over stays the program's", &error);
            }
            pager.publish(page, moving, Word::EMPTY);
        }
    }
}

/// Maps far memory without content where a page is.
pub(in crate::paging) fn map_anew(pager: &Pager, page: PageId) -> Result<()> {
    pager
        .table()
        .map_anew(page, || pager.mapper().register_faults(pager.addr(page), pager.page_bytes()))
}
