//! An unordered set of pages that picks one at random in O(1).
//!
//! The members are dense in an array; each page's word in [`PolicyPages`] holds its position.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::evict::policy::pages::{Place, PolicyPages};

/// See the module's documentation. Its members, and no others, are at `Place::Main`.
#[derive(Debug)]
pub(super) struct Bag {
    /// The first `len` entries are the members; the array takes RAM for as many as it ever had.
    members: LazyArray<u32>,
    len: u64,
    /// xorshift64: never zero.
    random: u64,
}

impl Bag {
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(pages: PageCount) -> Result<Bag> {
        Ok(Bag {
            members: LazyArray::new(pages.as_usize())?,
            len: 0,
            random: 0x9e37_79b9_7f4a_7c15,
        })
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Puts in `page`, which is on no list and not a member.
    pub(super) fn insert(&mut self, pages: &mut PolicyPages, page: PageId) {
        self.members[self.len as usize] = page.get() as u32;
        pages.place_at(page, self.len, Place::Main);
        self.len += 1;
    }

    /// Takes out `page`, a member. Its place is `Unknown` then.
    pub(super) fn remove(&mut self, pages: &mut PolicyPages, page: PageId) {
        let at = pages.position(page);
        let last = self.members[self.len as usize - 1];
        assert_eq!(u64::from(self.members[at as usize]), page.get(), "{page} is not at {at}");
        self.members[at as usize] = last;
        pages.place_at(PageId(u64::from(last)), at, Place::Main);
        pages.set_place(page, Place::Unknown);
        self.len -= 1;
    }

    /// A member at random; `None` when there is none.
    pub(super) fn pick(&mut self) -> Option<PageId> {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        // The high half times a length below 2^32 does not overflow.
        let at = ((self.random >> 32) * self.len) >> 32;
        (self.len > 0).then(|| PageId(u64::from(self.members[at as usize])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn picks_reach_every_member_and_no_page_taken_out() {
        let mut pages = PolicyPages::new(PageCount(100)).expect("small");
        let mut bag = Bag::new(PageCount(100)).expect("small");
        (0..50).for_each(|page| bag.insert(&mut pages, PageId(page)));
        (0..50).step_by(2).for_each(|page| bag.remove(&mut pages, PageId(page)));
        let picked: BTreeSet<u64> =
            (0..1_000).filter_map(|_| bag.pick()).map(PageId::get).collect();
        assert_eq!(picked, (0..50).filter(|page| page % 2 == 1).collect());
        (1..50).step_by(2).for_each(|page| bag.remove(&mut pages, PageId(page)));
        assert_eq!((bag.pick(), bag.len()), (None, 0));
    }
}
