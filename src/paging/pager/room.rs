//! When there is too little room for fills, and who is woken then: the frame pool's watermarks, the
//! threads that wait for frames, and the evictor that makes some.

use crate::base::error::Result;
use crate::base::sync::{AtomicU32, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::paging::bell::Bell;
use crate::paging::config::RegionConfig;
use crate::paging::fault::sched::HandlerSched;
use crate::paging::fault::starved::{FAULTS_HELD_MAX, StarvedFaults};
use crossbeam_utils::CachePadded;
use std::sync::Arc;

/// Bytes that are still available when background eviction starts, and when it stops.
#[derive(Debug)]
pub(in crate::paging) struct Watermarks {
    page: ByteCount,
    low: AtomicU64,
    high: AtomicU64,
}

impl Watermarks {
    pub(super) fn new(page: ByteCount) -> Watermarks {
        Watermarks { page, low: AtomicU64::new(0), high: AtomicU64::new(0) }
    }

    /// Bytes still available below which background eviction starts.
    pub(in crate::paging) fn low(&self) -> u64 {
        self.low.load(Ordering::Relaxed)
    }

    /// Bytes still available at which background eviction stops.
    pub(in crate::paging) fn high(&self) -> u64 {
        self.high.load(Ordering::Relaxed)
    }

    /// Sets what follows from the limit.
    pub(in crate::paging) fn set(&self, limit: ByteCount) {
        const RESERVE_MAX: u64 = 16 << 20;
        let page = self.page.0;
        let high = (limit.0 / 16).min(RESERVE_MAX.max(8 * page)).max(2 * page);
        self.low.store(high / 2, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
    }

    /// What fresh pages leave of the limit.
    pub(in crate::paging) fn for_fresh(&self) -> ByteCount {
        ByteCount(self.low() / 2).max(self.page)
    }
}

/// Threads that wait for room, and the evictor that makes it.
#[derive(Debug)]
pub(in crate::paging) struct RoomWaiters {
    evictor_bell: Bell,
    sched: Arc<HandlerSched>,
    /// Faults that wait for room.
    starved: StarvedFaults,
    /// How many of them there are, where threads serve themselves too, and handlers that wait for
    /// room to read ahead.
    starving: CachePadded<AtomicU32>,
}

impl RoomWaiters {
    /// # Errors
    /// When the kernel refuses a descriptor.
    pub(super) fn new(config: &RegionConfig, sched: Arc<HandlerSched>) -> Result<RoomWaiters> {
        Ok(RoomWaiters {
            evictor_bell: Bell::new()?,
            sched,
            starved: StarvedFaults::new(config.handlers * FAULTS_HELD_MAX, config.deadline),
            starving: CachePadded::new(AtomicU32::new(0)),
        })
    }

    /// Faults that wait for room.
    pub(in crate::paging) fn starved(&self) -> &StarvedFaults {
        &self.starved
    }

    pub(in crate::paging) fn evictor_bell(&self) -> &Bell {
        &self.evictor_bell
    }

    /// One thread more waits for room.
    pub(in crate::paging) fn begin_starving(&self) {
        self.starving.fetch_add(1, Ordering::AcqRel);
    }

    /// One thread fewer waits for room.
    pub(in crate::paging) fn end_starving(&self) {
        self.starving.fetch_sub(1, Ordering::AcqRel);
    }

    pub(in crate::paging) fn is_starving(&self) -> bool {
        self.starving.load(Ordering::Acquire) > 0
    }

    /// Wakes the evictor, once until it has looked.
    pub(in crate::paging) fn call_evictor(&self) {
        self.evictor_bell.ring();
    }

    /// Wakes the handlers that wait for frames.
    pub(in crate::paging) fn feed_handlers(&self) {
        if self.is_starving() {
            self.sched.call_all();
        }
    }
}
