//! Queues of pages, oldest first, of which any page can be taken out in O(1).
//!
//! The nodes of all queues are dense in one array, and each page's word in [`PolicyPages`] holds its node's position: so
//! links take memory of listed pages alone, where links in the words would take eight bytes of every page that was ever
//! seen. Each queue is a ring through a node of its own, at its position in [`QUEUES`], that stands for no page.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::meta::LazyArray;
use crate::paging::evict::policy::pages::{Place, PolicyPages, QUEUES};

/// A page, and its neighbours' positions; 12 bytes.
type Node = [u32; 3];
const PAGE_ID: usize = 0;
const OLDER: usize = 1;
const NEWER: usize = 2;

/// See the module's documentation. Pages in the queues, and no others, are at a place that is one.
#[derive(Debug)]
pub(super) struct PageQueues {
    /// The first `end` nodes are in use; the array takes RAM for as many as ever were.
    nodes: LazyArray<Node>,
    end: u32,
    lens: [u64; QUEUES.len()],
}

impl PageQueues {
    /// Empty queues of pages of a region of `pages`.
    ///
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(pages: PageCount) -> Result<PageQueues> {
        let mut nodes = LazyArray::new(pages.as_usize() + QUEUES.len())?;
        let end = QUEUES.len() as u32;
        (0..end).for_each(|at| nodes[at as usize] = [0, at, at]);
        Ok(PageQueues { nodes, end, lens: [0; QUEUES.len()] })
    }

    pub(super) fn len(&self, place: Place) -> u64 {
        self.lens[queue(place)]
    }

    /// Pages in all queues.
    pub(super) fn total(&self) -> u64 {
        self.lens.iter().sum()
    }

    /// Puts `page`, which is on no list, at the new end of the queue that `place` is.
    pub(super) fn push(&mut self, pages: &mut PolicyPages, page: PageId, place: Place) {
        assert!(!pages.place(page).is_resident(), "{page} is on a list: {:?}", pages.place(page));
        let (ring, at) = (queue(place), self.end);
        self.nodes[at as usize][PAGE_ID] = page.get() as u32;
        self.join(self.nodes[ring][OLDER], at);
        self.join(at, ring as u32);
        self.end += 1;
        self.lens[ring] += 1;
        pages.place_at(page, u64::from(at), place);
    }

    /// Takes the oldest page out of a queue. Its place is `Unknown` then.
    pub(super) fn pop(&mut self, pages: &mut PolicyPages, place: Place) -> Option<PageId> {
        let oldest = self.nodes[queue(place)][NEWER];
        let page = PageId(u64::from(self.nodes[oldest as usize][PAGE_ID]));
        (self.len(place) > 0).then(|| self.remove(pages, page))?;
        Some(page)
    }

    /// Takes `page` out of the queue that it is in. Its place is `Unknown` then.
    pub(super) fn remove(&mut self, pages: &mut PolicyPages, page: PageId) {
        let at = pages.position(page) as u32;
        let [found, older, newer] = self.nodes[at as usize];
        assert_eq!(u64::from(found), page.get(), "{page} is not at {at}");
        self.lens[queue(pages.place(page))] -= 1;
        self.join(older, newer);
        self.end -= 1;
        if at != self.end {
            let last @ [moved, older, newer] = self.nodes[self.end as usize];
            self.nodes[at as usize] = last;
            self.join(older, at);
            self.join(at, newer);
            pages.set_position(PageId(u64::from(moved)), u64::from(at));
        }
        pages.set_place(page, Place::Unknown);
    }

    /// Makes two nodes neighbours.
    fn join(&mut self, older: u32, newer: u32) {
        self.nodes[older as usize][NEWER] = newer;
        self.nodes[newer as usize][OLDER] = older;
    }
}

/// The position of a queue's own node.
fn queue(place: Place) -> usize {
    QUEUES.iter().position(|queue| *queue == place).expect("the caller names a queue")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: PageCount = PageCount(100);

    fn drain(pages: &mut PolicyPages, queues: &mut PageQueues, place: Place) -> Vec<u64> {
        std::iter::from_fn(|| queues.pop(pages, place)).map(PageId::get).collect()
    }

    #[test]
    fn queues_keep_their_order_whatever_is_taken_out_and_put_in_again() {
        let mut pages = PolicyPages::new(PAGES).expect("small");
        let mut queues = PageQueues::new(PAGES).expect("small");
        for page in 0..PAGES.get() {
            queues.push(&mut pages, PageId(page), QUEUES[page as usize % 2]);
        }
        for page in (0..PAGES.get()).step_by(5) {
            queues.remove(&mut pages, PageId(page));
        }
        queues.push(&mut pages, PageId(35), Place::Small);
        assert_eq!((queues.len(Place::Small), queues.len(Place::Cold)), (41, 40));
        let kept =
            |parity| (0..PAGES.get()).filter(move |page| page % 2 == parity && page % 5 != 0);
        let small: Vec<u64> = kept(0).chain([35]).collect();
        assert_eq!(drain(&mut pages, &mut queues, Place::Small), small);
        assert_eq!(drain(&mut pages, &mut queues, Place::Cold), kept(1).collect::<Vec<_>>());
        assert_eq!((queues.end, queues.pop(&mut pages, Place::Small)), (2, None));
    }
}
