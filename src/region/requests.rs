//! Requests of other threads to the evictor, and its answers.
//!
//! A short bounded queue under a mutex that nobody holds while touching far memory.

use crate::base::units::{PageCount, PageId};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Requests that wait at the same time; further callers wait for a place.
const REQUESTS_MAX: usize = 64;

/// A range that somebody wants out.
#[derive(Clone, Copy, Debug)]
pub(super) struct EvictRequest {
    pub(super) id: u64,
    pub(super) first: PageId,
    pub(super) count: PageCount,
}

#[derive(Debug)]
struct State {
    queue: Vec<EvictRequest>,
    answered: Vec<u64>,
    next_id: u64,
    closed: bool,
}

/// The queue.
#[derive(Debug)]
pub(super) struct Requests {
    state: Mutex<State>,
    changed: Condvar,
}

impl Requests {
    pub(super) fn new() -> Requests {
        let state = State {
            queue: Vec::with_capacity(REQUESTS_MAX),
            answered: Vec::with_capacity(REQUESTS_MAX),
            next_id: 0,
            closed: false,
        };
        Requests { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, guard: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for a range to be evicted, calls `ring`, and waits for the answer. Returns `false`
    /// when the region stops instead.
    pub(super) fn evict(&self, first: PageId, count: PageCount, ring: impl Fn()) -> bool {
        let mut state = self.lock();
        while state.queue.len() + state.answered.len() >= REQUESTS_MAX && !state.closed {
            state = self.wait(state);
        }
        let id = state.next_id;
        state.next_id += 1;
        state.queue.push(EvictRequest { id, first, count });
        ring();
        loop {
            if let Some(at) = state.answered.iter().position(|answered| *answered == id) {
                state.answered.swap_remove(at);
                self.changed.notify_all();
                return true;
            }
            if state.closed {
                return false;
            }
            state = self.wait(state);
        }
    }

    /// The oldest request, if any.
    pub(super) fn take(&self) -> Option<EvictRequest> {
        let mut state = self.lock();
        (!state.queue.is_empty()).then(|| state.queue.remove(0))
    }

    pub(super) fn answer(&self, id: u64) {
        self.lock().answered.push(id);
        self.changed.notify_all();
    }

    /// Nobody will answer any more.
    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }
}
