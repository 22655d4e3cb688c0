//! The evictor's parts.

use crate::base::error::Result;
use crate::base::units::{PageCount, PageId};
use crate::paging::diagnostics;
use crate::paging::evict::arrivals::Arrivals;
use crate::paging::evict::device_space::DeviceSpace;
use crate::paging::evict::outgoing::Outgoing;
use crate::paging::evict::requests::Requests;
use crate::paging::evict::write_back::WriteBack;
use crate::paging::page::word::Word;
use crate::paging::page::{BATCH_MAX, CHUNK_PAGES};
use crate::paging::pager::Pager;
use crate::store::Store;
use crate::sys::thread::THREAD_BYTES;
use std::sync::Arc;

/// The evictor thread's state.
pub(in crate::paging) struct Evictor {
    pub(super) pager: Arc<Pager>,
    pub(super) requests: Arc<Requests>,
    pub(super) victims: Vec<PageId>,
    pub(super) taken: TakenOut,
    /// Victims looked at since something was freed.
    pub(super) fruitless: usize,
    /// Of the pages that were last to be taken out, those that the kernel did not give.
    pub(super) kept: usize,
    pub(super) stays: Stays,
    pub(super) outgoing: Outgoing,
    pub(super) writes: WriteBack,
    pub(super) arrivals: Arrivals,
    pub(super) space: DeviceSpace,
}

impl Evictor {
    /// Bytes of an evictor and its thread, for a region of this number of frames.
    pub(in crate::paging) fn bytes(store: &dyn Store, frames: usize) -> usize {
        size_of::<Evictor>()
            + frames * Outgoing::FRAME_BYTES
            + WriteBack::bytes(store, frames)
            + VICTIMS_MAX * (size_of::<PageId>() + 2 * size_of::<(PageId, Word)>())
            + THREAD_BYTES
    }

    /// # Errors
    /// The store's error when it is asked for a queue.
    pub(in crate::paging) fn new(pager: Arc<Pager>, requests: Arc<Requests>) -> Result<Evictor> {
        Ok(Evictor {
            requests,
            victims: Vec::with_capacity(VICTIMS_MAX),
            taken: TakenOut::new(),
            fruitless: 0,
            kept: 0,
            stays: Stays::default(),
            outgoing: Outgoing::new(pager.frames().count()),
            writes: WriteBack::new(Arc::clone(&pager))?,
            arrivals: Arrivals::default(),
            space: DeviceSpace::new(),
            pager,
        })
    }
}

/// Maximum number of victims at once: a batch, of which the last one brings the others of its chunk.
pub(super) const VICTIMS_MAX: usize = BATCH_MAX + CHUNK_PAGES;

/// Room for victims whose words are `Moving`, which are too many for the stack.
#[derive(Default)]
pub(super) struct TakenOut {
    /// Known to be clean.
    pub(super) clean: Box<[(PageId, Word)]>,
    /// Neighbours that leave by one MOVE.
    pub(super) run: Box<[(PageId, Word)]>,
}

impl TakenOut {
    fn new() -> TakenOut {
        let words = || vec![(PageId(0), Word::EMPTY); VICTIMS_MAX].into_boxed_slice();
        TakenOut { clean: words(), run: words() }
    }
}

/// Victims that the kernel does not give: they make the limit smaller than it is.
#[derive(Debug, Default)]
pub(super) struct Stays {
    looked: usize,
    kept: usize,
}

impl Stays {
    /// Notes that `kept` of `victims` stayed. Once as many were looked at as the limit has pages, prints how many
    /// stayed, if those are most of them, and counts anew.
    pub(super) fn look(&mut self, victims: usize, kept: usize, limit: PageCount) {
        self.looked += victims;
        self.kept += kept;
        if self.looked < limit.as_usize() {
            return;
        }
        if self.kept * 2 > self.looked {
            diagnostics::pages_stay(self.kept, self.looked);
        }
        *self = Stays::default();
    }
}
