//! The evictor's state: what is on its way out, and what the device has been given.

use crate::base::deadline::{Stopwatch, Term};
use crate::base::error::Result;
use crate::base::units::{PageId, SlotId};
use crate::paging::evict::arrivals::Arrivals;
use crate::paging::evict::device_space::DeviceSpace;
use crate::paging::evict::requests::Requests;
use crate::paging::fault::sched::Detour;
use crate::paging::page::BATCH_MAX;
use crate::paging::page::word::FrameId;
use crate::paging::pager::Pager;
use crate::paging::pager::slot_store::ContentHash;
use crate::store::{Completion, Queue, SEGMENTS_MAX, queue_bytes};
use crate::sys::thread::THREAD_BYTES;
use crate::sys::vm::HUGE_PAGE;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Write requests in flight.
pub(super) const DEPTH: u32 = 32;
/// The token of a test write, beyond those of other writes.
pub(super) const PROBE: u64 = DEPTH as u64;
/// Pause of write-back after a failed write, doubled up to the maximum while writes fail.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(10);

/// A page on its way to the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dirty {
    pub(super) page: PageId,
    pub(super) frame: FrameId,
    pub(super) hash: ContentHash,
    pub(super) slot: SlotId,
}

impl Dirty {
    /// Whether the page's frame follows that of `before` in memory.
    pub(super) fn is_beside(&self, before: &Dirty) -> bool {
        before.frame.0 + 1 == self.frame.0
    }
}

/// A write: pages in consecutive slots. Without pages it is free.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) pages: Vec<Dirty>,
    pub(super) started: Instant,
    /// Since the device got it.
    pub(super) term: Term,
    pub(super) overdue: bool,
    /// Over the page's old slot: says nothing about space for others.
    pub(super) in_place: bool,
}

impl Write {
    /// Pages that one ever has at most.
    fn pages_max(page_bytes: usize) -> usize {
        (HUGE_PAGE / page_bytes).max(SEGMENTS_MAX)
    }

    /// A free one, for as many pages as a write ever has.
    pub(super) fn new(page_bytes: usize) -> Write {
        let pages = Vec::with_capacity(Write::pages_max(page_bytes));
        let term = Term::start(Duration::ZERO);
        Write { pages, started: Instant::now(), term, overdue: false, in_place: false }
    }
}

/// A test write on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Probe {
    pub(super) slot: SlotId,
    pub(super) frame: FrameId,
}

/// Pages on their way out.
pub(super) struct Leaving {
    /// Frames whose pages cool, oldest first.
    pub(super) cooling: VecDeque<FrameId>,
    pub(super) cooling_max: usize,
    /// Frames whose pages left by another hand that is not finished with them.
    pub(super) lingering: VecDeque<Linger>,
    /// Pages that have left, and frames that nobody uses any more: until the next `let_go`.
    pub(super) left: Vec<PageId>,
    pub(super) freed: Vec<FrameId>,
    /// Per frame: when its page was chosen.
    pub(super) chosen: Vec<Instant>,
}

/// What the device is given, and has been.
pub(super) struct DeviceWrites {
    pub(super) queue: Box<dyn Queue>,
    pub(super) dirty: Vec<Dirty>,
    pub(super) writes: Vec<Write>,
    pub(super) free_writes: Vec<usize>,
    pub(super) finished: Vec<Completion>,
    pub(super) write_pause: Duration,
    pub(super) write_again: Option<Instant>,
    pub(super) probe: Option<Probe>,
    pub(super) deadline: Duration,
    /// Tells how long the device has had a write.
    pub(super) watch: Stopwatch,
}

/// The evictor thread's state.
pub(in crate::paging) struct Evictor {
    pub(super) pager: Arc<Pager>,
    pub(super) requests: Arc<Requests>,
    pub(super) victims: Vec<PageId>,
    /// Victims looked at since something was freed.
    pub(super) fruitless: usize,
    pub(super) leaving: Leaving,
    pub(super) device: DeviceWrites,
    pub(super) arrivals: Arrivals,
    pub(super) space: DeviceSpace,
    pub(super) detour: Detour,
}

/// A frame that another thread took the page from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linger {
    pub(super) page: PageId,
    pub(super) frame: FrameId,
    /// The slot the page was being written to.
    pub(super) written: Option<SlotId>,
}

impl Evictor {
    /// Bytes of an evictor and its thread, for a region of this number of frames.
    pub(in crate::paging) fn bytes(frames: usize, page_bytes: usize) -> usize {
        let page = size_of::<FrameId>() // cooling
            + size_of::<Linger>()
            + size_of::<Dirty>()
            + size_of::<PageId>() // left
            + size_of::<FrameId>() // freed
            + size_of::<Instant>(); // chosen
        let write = size_of::<Write>()
            + Write::pages_max(page_bytes) * size_of::<Dirty>()
            + size_of::<Completion>();
        size_of::<Evictor>()
            + queue_bytes(DEPTH + 1)
            + frames * page
            + DEPTH as usize * write
            + BATCH_MAX * size_of::<PageId>()
            + THREAD_BYTES
    }

    pub(in crate::paging) fn new(
        pager: Arc<Pager>,
        requests: Arc<Requests>,
        deadline: Duration,
    ) -> Result<Evictor> {
        let mut queue = pager.slots().store().open_queue(DEPTH + 1)?; // With a test write.
        queue.watch(pager.pool().waiters().evictor_bell().raw_fd())?;
        let frames = pager.frames().count();
        Ok(Evictor {
            requests,
            victims: Vec::with_capacity(BATCH_MAX),
            fruitless: 0,
            detour: Detour::default(),
            leaving: Leaving {
                cooling: VecDeque::with_capacity(frames),
                cooling_max: 0,
                lingering: VecDeque::with_capacity(frames),
                left: Vec::with_capacity(frames),
                freed: Vec::with_capacity(frames),
                chosen: vec![Instant::now(); frames],
            },
            device: DeviceWrites {
                queue,
                dirty: Vec::with_capacity(frames),
                writes: (0..DEPTH).map(|_| Write::new(pager.page_bytes())).collect(),
                free_writes: (0..DEPTH as usize).collect(),
                finished: Vec::with_capacity(DEPTH as usize),
                write_pause: PAUSE_MIN,
                write_again: None,
                probe: None,
                deadline,
                watch: Stopwatch::start(deadline, Instant::now()),
            },
            arrivals: Arrivals::default(),
            space: DeviceSpace::new(),
            pager,
        })
    }
}
