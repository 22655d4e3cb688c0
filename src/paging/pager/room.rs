//! When there is too little room for fills, and who is woken then: the frame pool's watermarks, the
//! threads that wait for frames, and the evictor that makes some.

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::paging::config::RegionConfig;
use crate::paging::fault::sched::HandlerSched;
use crate::paging::fault::starved::{FAULTS_HELD_MAX, StarvedFaults};
use crate::paging::page::PAGE;
use crate::paging::page::chunks::CHUNK;
use crate::paging::table_sizes::FAULT_TABLES;
use crate::paging::waker::Waker;
use crossbeam_utils::CachePadded;
use std::sync::Arc;

/// Bytes that are still available when background eviction starts, and when it stops.
#[derive(Debug)]
pub(in crate::paging) struct Watermarks {
    low: AtomicU64,
    high: AtomicU64,
    /// While threads wait for room for fresh memory: see [`evict_until`](Self::evict_until).
    ahead: AtomicU64,
    is_ahead: AtomicBool,
    /// While data is read in order.
    in_order: AtomicU64,
    is_in_order: AtomicBool,
}

impl Watermarks {
    pub(super) fn new() -> Watermarks {
        let [low, high, ahead, in_order] = [const { AtomicU64::new(0) }; 4];
        let [is_ahead, is_in_order] = [const { AtomicBool::new(false) }; 2];
        Watermarks { low, high, ahead, is_ahead, in_order, is_in_order }
    }

    /// Bytes still available below which background eviction starts, but for times of
    /// [`is_ahead`](Self::set_ahead).
    pub(in crate::paging) fn low(&self) -> u64 {
        self.low.load(Ordering::Relaxed)
    }

    /// Bytes still available at which background eviction stops, but for times of
    /// [`is_ahead`](Self::set_ahead).
    pub(in crate::paging) fn high(&self) -> u64 {
        self.high.load(Ordering::Relaxed)
    }

    /// Lets background eviction run further ahead, or not: where threads write fresh memory faster than
    /// it is written back. Fresh memory comes and goes in chunks: with less than one on its way out
    /// while the next is being filled, thread and device wait for each other in turn. Not always, because
    /// data that nearly fits would leave, and what is read back would have less room.
    pub(in crate::paging) fn set_ahead(&self, is_ahead: bool) {
        if self.is_ahead.load(Ordering::Relaxed) != is_ahead {
            self.is_ahead.store(is_ahead, Ordering::Relaxed);
        }
    }

    /// Keeps more room, or not, while data is read in order: pages that are read ahead come many at a time.
    pub(in crate::paging) fn set_in_order(&self, is_in_order: bool) {
        if self.is_in_order.load(Ordering::Relaxed) != is_in_order {
            self.is_in_order.store(is_in_order, Ordering::Relaxed);
        }
    }

    /// Bytes still available below which background eviction starts at present.
    pub(in crate::paging) fn evict_below(&self) -> u64 {
        self.evict_until() / 2
    }

    /// Bytes still available at which background eviction stops at present.
    pub(in crate::paging) fn evict_until(&self) -> u64 {
        if self.is_ahead.load(Ordering::Relaxed) {
            self.ahead.load(Ordering::Relaxed)
        } else if self.is_in_order.load(Ordering::Relaxed) {
            self.in_order.load(Ordering::Relaxed)
        } else {
            self.high()
        }
    }

    /// Sets what follows from the limit.
    pub(in crate::paging) fn set(&self, limit: ByteCount) {
        // Room for what arrives while the evictor answers and the device writes a batch: what waits in the standby
        // line follows.
        const RESERVE_MAX: u64 = 16 << 20;
        const BATCH_BYTES: u64 = 64 * PAGE as u64;
        const { assert!(BATCH_BYTES / 4 >= FAULT_TABLES, "fresh pages leave room for tables") }
        let high = (limit.0 / 64).clamp(BATCH_BYTES, RESERVE_MAX);
        self.low.store(high / 2, Ordering::Relaxed);
        self.high.store(high, Ordering::Relaxed);
        // Two writes of 2 MiB in flight do not fill a device of 1 ms (book/src/measurements/fault_rates.md).
        let in_order = (limit.0 / 16).min(RESERVE_MAX);
        self.in_order.store(in_order, Ordering::Relaxed);
        self.ahead.store(ahead(limit).0.max(in_order), Ordering::Relaxed);
    }

    /// Bytes of the limit that fresh pages leave free.
    pub(in crate::paging) fn for_fresh(&self) -> ByteCount {
        ByteCount(self.low() / 2)
    }
}

/// Bytes that background eviction keeps available, or on its way out, while it [runs
/// ahead](Watermarks::set_ahead): chunks for the device, one that is being filled, and an eighth of
/// the limit at most: with a quarter, a small limit had no room for a hot set of two thirds of it.
fn ahead(limit: ByteCount) -> ByteCount {
    const CHUNKS: u64 = 4;
    ByteCount(limit.0 / 8).min(ByteCount(CHUNKS * CHUNK as u64))
}

/// Threads that wait for room, and the evictor that makes it.
#[derive(Debug)]
pub(in crate::paging) struct RoomWaiters {
    evictor_waker: Waker,
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
            evictor_waker: Waker::new()?,
            sched,
            starved: StarvedFaults::new(config.handlers * FAULTS_HELD_MAX, config.deadline),
            starving: CachePadded::new(AtomicU32::new(0)),
        })
    }

    /// Faults that wait for room.
    pub(in crate::paging) fn starved(&self) -> &StarvedFaults {
        &self.starved
    }

    pub(in crate::paging) fn evictor_waker(&self) -> &Waker {
        &self.evictor_waker
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
        self.evictor_waker.wake();
    }

    /// Wakes the handlers that wait for frames.
    pub(in crate::paging) fn feed_handlers(&self) {
        if self.is_starving() {
            self.sched.call_all();
        }
    }
}
