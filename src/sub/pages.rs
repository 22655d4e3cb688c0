//! Objects inside of pages: which granules of each page are in use.
//!
//! [`Pages`] keeps its state beside the pages, in local memory: allocating and freeing touch no
//! far page. [`Pool`] picks pages for objects that may go anywhere. Used by [`super::Collective`],
//! under its lock.
//!
//! # Invariants
//! 1. A granule's bit is set exactly while it belongs to an object, or lies past the end.
//! 2. `used` of a page is the number of its bits set by objects.

use crate::base::error::Result;
use crate::meta::LazyArray;
use std::alloc::Layout;

/// Unit of allocation, in bytes.
pub(super) const GRANULE: usize = 16;

/// Whose page it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Owner {
    /// Nobody's.
    Free = 0,
    /// A per-page sub-allocator's.
    PerPage = 1,
    /// The swappable sub-allocator's.
    Swappable = 2,
    /// The hint-only allocator's.
    Hinted = 3,
    /// Part of an object larger than a page.
    Large = 4,
}

impl Owner {
    fn from_byte(byte: u8) -> Owner {
        match byte {
            1 => Owner::PerPage,
            2 => Owner::Swappable,
            3 => Owner::Hinted,
            4 => Owner::Large,
            _ => Owner::Free,
        }
    }
}

/// Granules that an object of this layout takes.
pub(super) fn granules(layout: Layout) -> usize {
    layout.size().div_ceil(GRANULE)
}

/// The pages of one range of addresses.
#[derive(Debug)]
pub(super) struct Pages {
    base: usize,
    page_bytes: usize,
    words_per_page: usize,
    bits: LazyArray<u64>,
    /// For each page a word below which no bit is clear: where a search starts.
    full_words: LazyArray<u32>,
    used: LazyArray<u32>,
    holds: LazyArray<u32>,
    owners: LazyArray<u8>,
    listed: LazyArray<u8>,
}

impl Pages {
    /// State for `count` pages from `base`.
    pub(super) fn new(base: usize, page_bytes: usize, count: usize) -> Result<Pages> {
        let words_per_page = (page_bytes / GRANULE).div_ceil(64);
        Ok(Pages {
            base,
            page_bytes,
            words_per_page,
            bits: LazyArray::new(count * words_per_page)?,
            full_words: LazyArray::new(count)?,
            used: LazyArray::new(count)?,
            holds: LazyArray::new(count)?,
            owners: LazyArray::new(count)?,
            listed: LazyArray::new(count)?,
        })
    }

    pub(super) fn page_of(&self, addr: usize) -> u32 {
        ((addr - self.base) / self.page_bytes) as u32
    }

    pub(super) fn addr(&self, page: u32) -> usize {
        self.base + page as usize * self.page_bytes
    }

    pub(super) fn owner(&self, page: u32) -> Owner {
        Owner::from_byte(self.owners[page as usize])
    }

    pub(super) fn set_owner(&mut self, page: u32, owner: Owner) {
        self.owners[page as usize] = owner as u8;
    }

    /// Bytes in use in a page.
    pub(super) fn used_bytes(&self, page: u32) -> usize {
        self.used[page as usize] as usize * GRANULE
    }

    /// Whether a page holds no object and nobody holds on to it.
    pub(super) fn is_idle(&self, page: u32) -> bool {
        self.used[page as usize] == 0 && self.holds[page as usize] == 0
    }

    /// Keeps an empty page from being given back.
    pub(super) fn hold(&mut self, page: u32) {
        self.holds[page as usize] += 1;
    }

    pub(super) fn unhold(&mut self, page: u32) {
        let holds = &mut self.holds[page as usize];
        *holds = holds.checked_sub(1).expect("a page is let go as often as it was held");
    }

    /// Puts an object into a page; its address, or `None` when there is no room.
    pub(super) fn take(&mut self, page: u32, layout: Layout) -> Option<usize> {
        let want = granules(layout);
        let limit = self.page_bytes / GRANULE;
        if self.used[page as usize] as usize + want > limit {
            return None;
        }
        let align = (layout.align() / GRANULE).max(1);
        let full = self.full_words[page as usize] as usize;
        let words = self.words_mut(page);
        let free = next_bit(words, full * 64, limit, false);
        let at = find_run(words, free, limit, want, align)?;
        set_run(words, at, want, true);
        self.used[page as usize] += want as u32;
        self.full_words[page as usize] = (free / 64) as u32;
        Some(self.addr(page) + at * GRANULE)
    }

    /// Takes an object out of its page.
    ///
    /// # Panics
    /// When these are not the granules of an object: a double free, or a wrong layout.
    pub(super) fn give(&mut self, addr: usize, layout: Layout) -> u32 {
        assert!(addr.is_multiple_of(GRANULE), "freed {addr:#x}, which is inside of an object");
        let page = self.page_of(addr);
        let at = (addr - self.addr(page)) / GRANULE;
        let count = granules(layout);
        let words = self.words_mut(page);
        assert!(run_is_set(words, at, count), "freed {count} granules at {addr:#x} twice");
        set_run(words, at, count, false);
        self.used[page as usize] -= count as u32;
        let full = &mut self.full_words[page as usize];
        *full = (*full).min((at / 64) as u32);
        page
    }

    /// An object begins that is larger than a page.
    pub(super) fn take_large(&mut self, addr: usize, count: usize) {
        let first = self.page_of(addr);
        (first..first + count as u32).for_each(|page| self.set_owner(page, Owner::Large));
        self.used[first as usize] = count as u32;
    }

    /// Such an object ends.
    ///
    /// # Panics
    /// When there is none of this size: a double free, or a wrong layout.
    pub(super) fn give_large(&mut self, addr: usize, count: usize) {
        let first = self.page_of(addr);
        let is_one = addr == self.addr(first)
            && self.owner(first) == Owner::Large
            && self.used[first as usize] as usize == count;
        assert!(is_one, "freed {addr:#x}, which is no object of {count} pages");
        (first..first + count as u32).for_each(|page| self.set_owner(page, Owner::Free));
        self.used[first as usize] = 0;
    }

    /// Makes everything of a page from `first_byte` on unusable.
    pub(super) fn fence(&mut self, page: u32, first_byte: usize) {
        let (at, limit) = (first_byte / GRANULE, self.page_bytes / GRANULE);
        set_run(self.words_mut(page), at, limit - at, true);
    }

    fn words_mut(&mut self, page: u32) -> &mut [u64] {
        let first = page as usize * self.words_per_page;
        &mut self.bits[first..first + self.words_per_page]
    }
}

/// First position at or after `from` whose bit equals `set`, or `limit`.
fn next_bit(words: &[u64], from: usize, limit: usize, set: bool) -> usize {
    let mut word = from / 64;
    let mut skip = from % 64;
    while word < words.len() {
        let bits = if set { words[word] } else { !words[word] } & (u64::MAX << skip);
        if bits != 0 {
            return (word * 64 + bits.trailing_zeros() as usize).min(limit);
        }
        (word, skip) = (word + 1, 0);
    }
    limit
}

/// First run of `want` clear bits from `from` to `limit` that starts at a multiple of `align`.
fn find_run(words: &[u64], from: usize, limit: usize, want: usize, align: usize) -> Option<usize> {
    let mut at = from;
    loop {
        let start = next_bit(words, at, limit, false).next_multiple_of(align);
        if start + want > limit {
            return None;
        }
        let end = next_bit(words, start, limit, true);
        if end >= start + want {
            return Some(start);
        }
        at = end.max(start + 1);
    }
}

/// The words that a run covers, with the covered bits of each.
fn masks(at: usize, count: usize) -> impl Iterator<Item = (usize, u64)> {
    let end = at + count;
    (at / 64..end.div_ceil(64)).map(move |word| {
        let low = if word == at / 64 { u64::MAX << (at % 64) } else { u64::MAX };
        let high = if end < (word + 1) * 64 { (1 << (end % 64)) - 1 } else { u64::MAX };
        (word, low & high)
    })
}

fn set_run(words: &mut [u64], at: usize, count: usize, set: bool) {
    for (word, mask) in masks(at, count) {
        words[word] = if set { words[word] | mask } else { words[word] & !mask };
    }
}

fn run_is_set(words: &[u64], at: usize, count: usize) -> bool {
    masks(at, count).all(|(word, mask)| words[word] & mask == mask)
}

/// When a page with room is remembered for reuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reuse {
    /// After any object of it was freed: fills every hole, scatters what is allocated together.
    Always,
    /// When it is at most half full.
    HalfEmpty,
}

/// Pages of one owner with room for objects that may go anywhere.
#[derive(Debug)]
pub(super) struct Pool {
    owner: Owner,
    current: Option<u32>,
    roomy: Vec<u32>,
    reuse: Reuse,
}

impl Pool {
    pub(super) fn new(owner: Owner, reuse: Reuse) -> Pool {
        Pool { owner, current: None, roomy: Vec::new(), reuse }
    }

    /// Puts an object into a page that is in use; `None` when a fresh page is needed.
    pub(super) fn take(&mut self, pages: &mut Pages, layout: Layout) -> Option<usize> {
        loop {
            if let Some(page) = self.current
                && let Some(addr) = pages.take(page, layout)
            {
                return Some(addr);
            }
            let next = self.roomy.pop()?;
            // A page that was given back in the meantime left its entry behind.
            if std::mem::take(&mut pages.listed[next as usize]) == self.owner as u8 {
                self.replace_current(pages, next);
            }
        }
    }

    /// Continues with a fresh page.
    pub(super) fn replace_current(&mut self, pages: &Pages, page: u32) -> Option<u32> {
        let old = self.current.replace(page).filter(|old| *old != page);
        old.filter(|old| pages.is_idle(*old))
    }

    /// Notes that a page of this pool lost an object; returns whether the page can be given back.
    pub(super) fn freed(&mut self, pages: &mut Pages, page: u32) -> bool {
        if self.current == Some(page) {
            return false;
        }
        if pages.is_idle(page) {
            pages.listed[page as usize] = 0;
            return true;
        }
        if pages.listed[page as usize] != 0 {
            return false;
        }
        if self.reuse == Reuse::Always || pages.used_bytes(page) * 2 <= pages.page_bytes {
            pages.listed[page as usize] = self.owner as u8;
            self.roomy.push(page);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(size: usize, align: usize) -> Layout {
        Layout::from_size_align(size, align).expect("a valid layout")
    }

    #[test]
    fn a_page_is_filled_to_the_last_granule_and_says_when_it_is_full() {
        let mut pages = Pages::new(1 << 30, 4096, 2).expect("small arrays");
        let objects: Vec<usize> = (0..12).map_while(|_| pages.take(1, layout(336, 8))).collect();
        assert_eq!(objects.len(), 12);
        assert_eq!(pages.used_bytes(1), 4032);
        assert_eq!(pages.take(1, layout(80, 8)), None);
        assert_eq!(pages.take(1, layout(64, 8)), Some((1 << 30) + 4096 + 4032));
        assert_eq!(pages.take(1, layout(1, 1)), None);
    }

    #[test]
    #[should_panic(expected = "inside of an object")]
    fn freeing_the_inside_of_an_object_is_refused() {
        let mut pages = Pages::new(1 << 30, 4096, 1).expect("small arrays");
        let object = pages.take(0, layout(48, 8)).expect("an empty page");
        pages.give(object + 1, layout(48, 8));
    }

    /// Whether an object of three pages from page 1 on can be freed by what a caller says of it.
    fn give_large(at: usize, count: usize) -> bool {
        let mut pages = Pages::new(1 << 30, 4096, 8).expect("small arrays");
        pages.take_large((1 << 30) + 4096, 3);
        pages.take_large((1 << 30) + 4 * 4096, 2);
        pages.give_large((1 << 30) + at, count);
        (1..6).map(|page| pages.owner(page)).eq([
            Owner::Free,
            Owner::Free,
            Owner::Free,
            Owner::Large,
            Owner::Large,
        ])
    }

    #[test]
    fn an_object_of_several_pages_is_freed_by_its_own_size_only() {
        assert!(give_large(4096, 3));
        for (at, count) in [(4096, 2), (4096, 5), (2 * 4096, 2), (0, 3), (4096 + 16, 3)] {
            let freed = std::panic::catch_unwind(|| give_large(at, count));
            assert!(freed.is_err(), "{count} pages at {at}");
        }
    }

    #[test]
    fn holes_are_reused_and_aligned() {
        let mut pages = Pages::new(1 << 30, 4096, 1).expect("small arrays");
        let a = pages.take(0, layout(48, 8)).expect("an empty page");
        let b = pages.take(0, layout(256, 256)).expect("room");
        assert_eq!((a % 4096, b % 4096), (0, 256));
        let c = pages.take(0, layout(208, 16)).expect("the gap before the aligned object");
        assert_eq!(c % 4096, 48);
        pages.give(a, layout(48, 8));
        assert_eq!(pages.take(0, layout(33, 1)), Some(a));
    }

    #[test]
    #[should_panic(expected = "twice")]
    fn a_double_free_is_noticed() {
        let mut pages = Pages::new(1 << 30, 4096, 1).expect("small arrays");
        let a = pages.take(0, layout(48, 8)).expect("an empty page");
        pages.give(a, layout(48, 8));
        pages.give(a, layout(48, 8));
    }

    #[test]
    fn a_pool_refills_half_empty_pages_before_it_asks_for_fresh_ones() {
        let mut pages = Pages::new(1 << 30, 4096, 2).expect("small arrays");
        let mut pool = Pool::new(Owner::Swappable, Reuse::HalfEmpty);
        assert_eq!(pool.take(&mut pages, layout(1024, 8)), None);
        pool.replace_current(&pages, 0);
        let first: Vec<usize> =
            (0..4).map_while(|_| pool.take(&mut pages, layout(1024, 8))).collect();
        assert_eq!(pool.take(&mut pages, layout(1024, 8)), None);
        pool.replace_current(&pages, 1);
        for addr in &first[..2] {
            let page = pages.give(*addr, layout(1024, 8));
            assert!(!pool.freed(&mut pages, page));
        }
        let all: Vec<usize> =
            (0..9).map_while(|_| pool.take(&mut pages, layout(1024, 8))).collect();
        assert_eq!(all.len(), 6, "four in the second page, two in the first");
    }
}
