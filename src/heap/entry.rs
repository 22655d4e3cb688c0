//! State of a far tier, open or closed, and how many threads are inside of its shared path.
//!
//! A thread that has a cache is inside while its cache is busy; one without is counted here. Used by
//! `far_arenas`; closing a tier waits until nobody is inside.

use crate::base::sync::{AtomicBool, AtomicUsize, Ordering::SeqCst};

/// No far memory is available: the tier is shut down, or the thread has ended for jemalloc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed;

/// The way into a tier past its caches.
pub(super) struct Entry {
    inside: AtomicUsize,
    closed: AtomicBool,
}

impl Entry {
    pub(super) const fn new() -> Entry {
        Entry { inside: AtomicUsize::new(0), closed: AtomicBool::new(false) }
    }

    /// Enters the shared path.
    ///
    /// # Errors
    /// [`Closed`].
    pub(super) fn enter(&self) -> Result<Inside<'_>, Closed> {
        let inside = self.enter_even_if_closed();
        // Sequentially consistent with `close`: either it sees us inside, or we see it closed.
        if self.is_closed() { Err(Closed) } else { Ok(inside) }
    }

    /// Enters for an object that exists, which keeps the tier from being closed for good.
    pub(super) fn enter_even_if_closed(&self) -> Inside<'_> {
        self.inside.fetch_add(1, SeqCst);
        Inside { count: &self.inside }
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
pub(super) struct Inside<'a> {
    count: &'a AtomicUsize,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.count.fetch_sub(1, SeqCst);
    }
}
