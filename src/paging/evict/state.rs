//! The evictor's parts.

use crate::base::error::Result;
use crate::base::units::PageId;
use crate::paging::evict::arrivals::Arrivals;
use crate::paging::evict::device_space::DeviceSpace;
use crate::paging::evict::leaving::Leaving;
use crate::paging::evict::requests::Requests;
use crate::paging::evict::write_back::WriteBack;
use crate::paging::fault::sched::Detour;
use crate::paging::page::BATCH_MAX;
use crate::paging::pager::Pager;
use crate::sys::thread::THREAD_BYTES;
use std::sync::Arc;
use std::time::Duration;

/// The evictor thread's state.
pub(in crate::paging) struct Evictor {
    pub(super) pager: Arc<Pager>,
    pub(super) requests: Arc<Requests>,
    pub(super) victims: Vec<PageId>,
    /// Victims looked at since something was freed.
    pub(super) fruitless: usize,
    pub(super) leaving: Leaving,
    pub(super) writes: WriteBack,
    pub(super) arrivals: Arrivals,
    pub(super) space: DeviceSpace,
    pub(super) detour: Detour,
}

impl Evictor {
    /// Bytes of an evictor and its thread, for a region of this number of frames.
    pub(in crate::paging) fn bytes(frames: usize, page_bytes: usize) -> usize {
        size_of::<Evictor>()
            + frames * Leaving::FRAME_BYTES
            + WriteBack::bytes(frames, page_bytes)
            + BATCH_MAX * size_of::<PageId>()
            + THREAD_BYTES
    }

    pub(in crate::paging) fn new(
        pager: Arc<Pager>,
        requests: Arc<Requests>,
        deadline: Duration,
    ) -> Result<Evictor> {
        Ok(Evictor {
            requests,
            victims: Vec::with_capacity(BATCH_MAX),
            fruitless: 0,
            leaving: Leaving::new(pager.frames().count()),
            writes: WriteBack::new(Arc::clone(&pager), deadline)?,
            detour: Detour::default(),
            arrivals: Arrivals::default(),
            space: DeviceSpace::new(),
            pager,
        })
    }
}
