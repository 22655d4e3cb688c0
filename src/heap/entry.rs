//! State of a far tier, open or closed, and how many threads are inside of its shared path.
//!
//! A thread that has a cache is inside while its cache is busy; one without is counted here. Used by
//! `far_arenas`; closing a tier waits until nobody is inside.

use crate::base::sync::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// No far memory is available: the tier is shut down, or the thread has ended for jemalloc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TierClosed;

/// The way into a tier past its caches.
pub(super) struct Entrance {
    inside: AtomicUsize,
    closed: AtomicBool,
}

impl Entrance {
    pub(super) const fn new() -> Entrance {
        Entrance { inside: AtomicUsize::new(0), closed: AtomicBool::new(false) }
    }

    /// Enters the shared path.
    ///
    /// # Errors
    /// [`TierClosed`].
    pub(super) fn enter(&self) -> Result<InsideTier<'_>, TierClosed> {
        let inside = self.enter_even_if_closed();
        // Sequentially consistent with `close`: either it sees us inside, or we see it closed.
        if self.is_closed() { Err(TierClosed) } else { Ok(inside) }
    }

    /// Enters for an object that exists, which keeps the tier from being closed for good.
    pub(super) fn enter_even_if_closed(&self) -> InsideTier<'_> {
        self.inside.fetch_add(1, SeqCst);
        InsideTier { count: &self.inside }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    pub(super) fn set_closed(&self, closed: bool) {
        self.closed.store(closed, SeqCst);
    }

    /// True if no thread is inside the shared path.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.load(SeqCst) == 0
    }
}

/// A thread inside the shared path.
pub(super) struct InsideTier<'a> {
    count: &'a AtomicUsize,
}

impl Drop for InsideTier<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, SeqCst);
    }
}
