//! Objects inside of pages: which granules of each page are in use.
//!
//! [`Pages`] keeps its state beside the pages, in local memory: allocating and freeing touch no
//! far page. [`Pool`] picks pages for objects that may go anywhere. Used by [`super::Collective`],
//! under its lock.
//!
//! ```text
//! note of a page, in whole cache lines:  head: two words | a bit for each granule | unused
//! ```
//! # Invariants
//! 1. A granule's bit is set exactly while it belongs to an object, or lies past the end.
//! 2. `used` of a page is the number of its bits set by objects.
//! 3. No bit of the first `full_words` words is clear.

use super::runs;
use crate::sys::WordMapping;
use farheap::Result;
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

/// Record of a page beside its bits.
///
/// ```text
/// word 0:  63..32 holds      | 31..0 used
/// word 1:  63..48 - | 47..40 listed | 39..32 owner | 31..0 full_words
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHead {
    /// Granules in use; of an object larger than a page, its pages.
    used: u32,
    /// How often it is kept from being given back.
    holds: u32,
    /// Words of bits, from the first on, in which no bit is clear: where a search starts.
    full_words: u32,
    owner: u8,
    /// The owner whose list of pages with room it is on, or 0.
    listed: u8,
}

/// Where notes begin: no note is in two cache lines, or pages, that need not be.
const PAGE: usize = 4096;
/// Words of a note before the bits.
const HEAD_WORDS: usize = 2;
/// Words of a cache line.
const LINE_WORDS: usize = 8;

impl PageHead {
    #[inline]
    fn of(note: &[u64]) -> PageHead {
        let (first, second) = (note[0], note[1]);
        PageHead {
            used: first as u32,
            holds: (first >> 32) as u32,
            full_words: second as u32,
            owner: (second >> 32) as u8,
            listed: (second >> 40) as u8,
        }
    }

    #[inline]
    fn write_to(self, note: &mut [u64]) {
        note[0] = u64::from(self.holds) << 32 | u64::from(self.used);
        let owners = u64::from(self.listed) << 40 | u64::from(self.owner) << 32;
        note[1] = owners | u64::from(self.full_words);
    }

    /// True if the page holds no object and nobody holds on to it.
    #[inline]
    pub(super) fn is_idle(self) -> bool {
        self.used == 0 && self.holds == 0
    }

    #[inline]
    pub(super) fn owner(self) -> Owner {
        Owner::from_byte(self.owner)
    }

    /// As of a page that somebody holds on to.
    #[inline]
    pub(super) fn held(self) -> PageHead {
        PageHead { holds: self.holds + 1, ..self }
    }
}

/// Finds room for an object beyond the first clear bit, and takes it.
#[inline(never)]
fn search(bits: &mut [u64], full_words: &mut u32, layout: Layout) -> Option<usize> {
    let (want, align) = (granules(layout), (layout.align() / GRANULE).max(1));
    let (at, full) = runs::find(bits, *full_words as usize, want, align)?;
    runs::set(bits, at, want);
    *full_words = full as u32;
    Some(at)
}

/// The pages of one range of addresses.
///
/// All that is known of a page is in one note: of a page of 4 KiB that is one cache line. In
/// tables of their own, each a mapping, the fields of a page had the same low 12 bits of their
/// addresses and met in one set of the cache (`book/src/measurements/allocations.md`).
#[derive(Debug)]
pub(super) struct Pages {
    base: usize,
    page_shift: u32,
    note_words: usize,
    notes: WordMapping,
}

impl Pages {
    /// State for `count` pages from `base`. Pages have a power of two of bytes, 1 KiB at least.
    pub(super) fn new(base: usize, page_bytes: usize, count: usize) -> Result<Pages> {
        assert!(page_bytes.is_power_of_two() && page_bytes >= 64 * GRANULE, "{page_bytes}");
        let note_words = (HEAD_WORDS + page_bytes / GRANULE / 64).next_multiple_of(LINE_WORDS);
        let notes = WordMapping::map(count * note_words * size_of::<u64>(), PAGE)?;
        Ok(Pages { base, page_shift: page_bytes.trailing_zeros(), note_words, notes })
    }

    pub(super) fn page_bytes(&self) -> usize {
        1 << self.page_shift
    }

    /// Words of a page's bits.
    fn bit_words(&self) -> usize {
        self.page_bytes() / GRANULE / 64
    }

    #[inline]
    fn note(&self, page: u32) -> &[u64] {
        let first = page as usize * self.note_words;
        &self.notes.words()[first..first + self.note_words]
    }

    #[inline]
    fn note_mut(&mut self, page: u32) -> &mut [u64] {
        let first = page as usize * self.note_words;
        &mut self.notes.words_mut()[first..first + self.note_words]
    }

    #[inline]
    fn head(&self, page: u32) -> PageHead {
        PageHead::of(self.note(page))
    }

    fn change(&mut self, page: u32, change: impl FnOnce(&mut PageHead)) {
        let note = self.note_mut(page);
        let mut head = PageHead::of(note);
        change(&mut head);
        head.write_to(note);
    }

    #[inline]
    pub(super) fn page_of(&self, addr: usize) -> u32 {
        ((addr - self.base) >> self.page_shift) as u32
    }

    #[inline]
    pub(super) fn addr(&self, page: u32) -> usize {
        self.base + ((page as usize) << self.page_shift)
    }

    #[inline]
    pub(super) fn owner(&self, page: u32) -> Owner {
        self.head(page).owner()
    }

    pub(super) fn set_owner(&mut self, page: u32, owner: Owner) {
        self.change(page, |head| head.owner = owner as u8);
    }

    /// Bytes in use in a page.
    pub(super) fn used_bytes(&self, page: u32) -> usize {
        self.head(page).used as usize * GRANULE
    }

    /// True if a page holds no object and nobody holds on to it.
    pub(super) fn is_idle(&self, page: u32) -> bool {
        self.head(page).is_idle()
    }

    /// Keeps an empty page from being given back.
    pub(super) fn hold(&mut self, page: u32) {
        self.change(page, |head| head.holds += 1);
    }

    pub(super) fn unhold(&mut self, page: u32) {
        self.change(page, |head| {
            head.holds =
                head.holds.checked_sub(1).expect("a page is let go as often as it was held");
        });
    }

    /// Puts an object into a page; its address, or `None` when there is no room.
    #[inline]
    pub(super) fn take(&mut self, page: u32, layout: Layout) -> Option<usize> {
        let want = granules(layout);
        let (addr, words) = (self.addr(page), self.bit_words());
        let note = self.note_mut(page);
        let mut head = PageHead::of(note);
        if head.used as usize + want > words * 64 {
            return None;
        }
        let bits = &mut note[HEAD_WORDS..HEAD_WORDS + words];
        let first = head.full_words as usize;
        let at = if layout.align() <= GRANULE { runs::set_first(bits, first, want) } else { None };
        let at = match at {
            Some(at) => at,
            None => search(bits, &mut head.full_words, layout)?,
        };
        head.used += want as u32;
        head.write_to(note);
        Some(addr + at * GRANULE)
    }

    /// Takes an object out of its page; that page, and what is known of it now.
    ///
    /// # Panics
    /// When these are not the granules of an object: a double free, or a wrong layout.
    #[inline]
    pub(super) fn give(&mut self, addr: usize, layout: Layout) -> (u32, PageHead) {
        assert!(addr.is_multiple_of(GRANULE), "freed {addr:#x}, which is inside of an object");
        let page = self.page_of(addr);
        let at = (addr - self.addr(page)) / GRANULE;
        let (count, words) = (granules(layout), self.bit_words());
        let note = self.note_mut(page);
        let mut head = PageHead::of(note);
        let was_set = runs::clear(&mut note[HEAD_WORDS..HEAD_WORDS + words], at, count);
        assert!(was_set, "freed {count} granules at {addr:#x} twice");
        head.used -= count as u32;
        head.full_words = head.full_words.min((at / 64) as u32);
        head.write_to(note);
        (page, head)
    }

    /// An object begins that is larger than a page.
    pub(super) fn take_large(&mut self, addr: usize, count: usize) {
        let first = self.page_of(addr);
        (first..first + count as u32).for_each(|page| self.set_owner(page, Owner::Large));
        self.change(first, |head| head.used = count as u32);
    }

    /// Such an object ends.
    ///
    /// # Panics
    /// When there is none of this size: a double free, or a wrong layout.
    pub(super) fn give_large(&mut self, addr: usize, count: usize) {
        let first = self.page_of(addr);
        let is_one = addr == self.addr(first)
            && self.owner(first) == Owner::Large
            && self.head(first).used as usize == count;
        assert!(is_one, "freed {addr:#x}, which is no object of {count} pages");
        (first..first + count as u32).for_each(|page| self.set_owner(page, Owner::Free));
        self.change(first, |head| head.used = 0);
    }

    /// Makes everything of a page from `first_byte` on unusable.
    pub(super) fn fence(&mut self, page: u32, first_byte: usize) {
        let (at, limit) = (first_byte / GRANULE, self.page_bytes() / GRANULE);
        runs::set(&mut self.note_mut(page)[HEAD_WORDS..], at, limit - at);
    }
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
    #[inline]
    pub(super) fn take(&mut self, pages: &mut Pages, layout: Layout) -> Option<usize> {
        match self.current.and_then(|page| pages.take(page, layout)) {
            Some(addr) => Some(addr),
            None => self.take_from_next(pages, layout),
        }
    }

    #[inline(never)]
    fn take_from_next(&mut self, pages: &mut Pages, layout: Layout) -> Option<usize> {
        while let Some(next) = self.roomy.pop() {
            // A page that was given back in the meantime left its entry behind.
            let mut listed = 0;
            pages.change(next, |head| listed = std::mem::take(&mut head.listed));
            if listed == self.owner as u8 {
                self.replace_current(pages, next);
                if let Some(addr) = pages.take(next, layout) {
                    return Some(addr);
                }
            }
        }
        None
    }

    /// Continues with a fresh page.
    pub(super) fn replace_current(&mut self, pages: &Pages, page: u32) -> Option<u32> {
        let old = self.current.replace(page).filter(|old| *old != page);
        old.filter(|old| pages.is_idle(*old))
    }

    /// Notes that a page of this pool lost an object, and has this head since; returns whether the page
    /// can be given back.
    #[inline]
    pub(super) fn freed(&mut self, pages: &mut Pages, page: u32, head: PageHead) -> bool {
        if self.current == Some(page) {
            return false;
        }
        if head.is_idle() {
            if head.listed != 0 {
                pages.change(page, |head| head.listed = 0);
            }
            return true;
        }
        let used = head.used as usize * GRANULE;
        if head.listed == 0 && (self.reuse == Reuse::Always || used * 2 <= pages.page_bytes()) {
            pages.change(page, |head| head.listed = self.owner as u8);
            self.roomy.push(page);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ExpectedPanic;

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
        let _expected = ExpectedPanic::saying("inside of an object");
        let mut pages = Pages::new(1 << 30, 4096, 1).expect("small arrays");
        let object = pages.take(0, layout(48, 8)).expect("an empty page");
        pages.give(object + 1, layout(48, 8));
    }

    /// True if an object of three pages from page 1 on can be freed by what a caller says of it.
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
        let _expected = ExpectedPanic::saying("which is no object of");
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
        let _expected = ExpectedPanic::saying("twice");
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
            let (page, head) = pages.give(*addr, layout(1024, 8));
            assert!(!pool.freed(&mut pages, page, head));
        }
        let all: Vec<usize> =
            (0..9).map_while(|_| pool.take(&mut pages, layout(1024, 8))).collect();
        assert_eq!(all.len(), 6, "four in the second page, two in the first");
    }
}
