//! Requests of other threads to the evictor, and its answers.
//!
//! A short bounded queue under a mutex that nobody holds while touching far memory. The evictor takes
//! it, so signals are blocked as long as it is held.

use crate::base::units::{PageCount, PageId};
use crate::paging::page::word::FrameId;
use crate::paging::pager::frame_pool::RUNS_MAX;
use crate::sys::signals::SignalsBlocked;
use std::ops::ControlFlow::{self, Break, Continue};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Requests that wait at the same time; further callers wait for a place.
const REQUESTS_MAX: usize = 64;

/// A range that somebody wants out.
#[derive(Clone, Copy, Debug)]
pub(in crate::paging) struct EvictRequest {
    /// The waiter that gets the answer; `None`: nobody waits.
    pub(in crate::paging) id: Option<u64>,
    pub(in crate::paging) first: PageId,
    pub(in crate::paging) count: PageCount,
}

#[derive(Debug)]
struct RequestQueue {
    queue: Vec<EvictRequest>,
    /// Runs of frames that direct stores have filled, whose pages cool.
    filled: Vec<FrameId>,
    /// Times that frames of runs have become free.
    freed: u64,
    answered: Vec<u64>,
    next_id: u64,
    /// The space of all freed slots is wanted back.
    discard: bool,
    closed: bool,
}

/// The queue.
#[derive(Debug)]
pub(in crate::paging) struct Requests {
    state: Mutex<RequestQueue>,
    changed: Condvar,
    /// Apart: each write that ends would wake all who wait for an answer.
    has_freed: Condvar,
}

impl Requests {
    pub(in crate::paging) fn new() -> Requests {
        let state = RequestQueue {
            queue: Vec::with_capacity(REQUESTS_MAX),
            filled: Vec::with_capacity(RUNS_MAX),
            freed: 0,
            answered: Vec::with_capacity(REQUESTS_MAX),
            next_id: 0,
            discard: false,
            closed: false,
        };
        let [changed, has_freed] = [const { Condvar::new() }; 2];
        Requests { state: Mutex::new(state), changed, has_freed }
    }

    fn lock(&self) -> MutexGuard<'_, RequestQueue> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `look` has found what it looks for. A wait ends with the lock held, so signals are
    /// blocked meanwhile; they are let in between two waits.
    fn wait_for<T>(&self, mut look: impl FnMut(&mut RequestQueue) -> ControlFlow<T>) -> T {
        /// For how long a signal may be held up.
        const SIGNALS_WAIT_MAX: Duration = Duration::from_millis(20);
        loop {
            let _blocked = SignalsBlocked::new();
            let mut state = self.lock();
            if let Break(found) = look(&mut state) {
                return found;
            }
            drop(self.changed.wait_timeout(state, SIGNALS_WAIT_MAX));
        }
    }

    /// Asks for a range to be evicted, calls `ring`, and waits for the answer. Returns `false`
    /// when the region stops instead.
    pub(in crate::paging) fn evict(
        &self,
        first: PageId,
        count: PageCount,
        ring: impl Fn(),
    ) -> bool {
        let id = self.wait_for(|state| {
            if state.closed {
                return Break(None);
            }
            if state.queue.len() + state.answered.len() >= REQUESTS_MAX {
                return Continue(());
            }
            let id = state.next_id;
            state.next_id += 1;
            state.queue.push(EvictRequest { id: Some(id), first, count });
            ring();
            Break(Some(id))
        });
        let Some(id) = id else { return false };
        self.wait_for(|state| {
            if let Some(at) = state.answered.iter().position(|answered| *answered == id) {
                state.answered.swap_remove(at);
                self.changed.notify_all();
                return Break(true);
            }
            if state.closed { Break(false) } else { Continue(()) }
        })
    }

    /// Asks for a range to be evicted, without an answer, if there is a place. The caller wakes.
    pub(in crate::paging) fn evict_soon(&self, first: PageId, count: PageCount) {
        let _blocked = SignalsBlocked::new();
        let mut state = self.lock();
        if state.queue.len() + state.answered.len() < REQUESTS_MAX && !state.closed {
            state.queue.push(EvictRequest { id: None, first, count });
        }
    }

    /// Hands a run of frames over, whose pages cool from now on. The caller wakes.
    pub(in crate::paging) fn hand_over(&self, first: FrameId) {
        let _blocked = SignalsBlocked::new();
        self.lock().filled.push(first);
    }

    /// The run that was handed over last, if any.
    pub(in crate::paging) fn take_filled(&self) -> Option<FrameId> {
        self.lock().filled.pop()
    }

    /// Notes that frames of runs have become free, and tells those who wait for one.
    pub(in crate::paging) fn note_freed(&self) {
        self.lock().freed += 1;
        self.has_freed.notify_all();
    }

    /// Times that frames of runs have become free.
    pub(in crate::paging) fn freed(&self) -> u64 {
        let _blocked = SignalsBlocked::new();
        self.lock().freed
    }

    /// Waits until frames of runs have become free more than `seen` times, no longer than `most`.
    pub(in crate::paging) fn wait_for_freed(&self, seen: u64, most: Duration) {
        let _blocked = SignalsBlocked::new();
        let state = self.lock();
        if state.freed == seen && !state.closed {
            drop(self.has_freed.wait_timeout(state, most));
        }
    }

    /// Asks for the device space of all freed slots to be given back. The caller wakes.
    pub(in crate::paging) fn discard(&self) {
        let _blocked = SignalsBlocked::new();
        self.lock().discard = true;
    }

    /// True if somebody has asked for the device space of freed slots since the last call.
    pub(in crate::paging) fn take_discard(&self) -> bool {
        std::mem::take(&mut self.lock().discard)
    }

    /// The oldest request, if any.
    pub(in crate::paging) fn take(&self) -> Option<EvictRequest> {
        let mut state = self.lock();
        let request = (!state.queue.is_empty()).then(|| state.queue.remove(0));
        if request.is_some_and(|request| request.id.is_none()) {
            self.changed.notify_all(); // A place for a further caller.
        }
        request
    }

    pub(in crate::paging) fn answer(&self, id: u64) {
        self.lock().answered.push(id);
        self.changed.notify_all();
    }

    /// Nobody will answer any more.
    pub(in crate::paging) fn close(&self) {
        let _blocked = SignalsBlocked::new();
        self.lock().closed = true;
        self.changed.notify_all();
        self.has_freed.notify_all();
    }
}
