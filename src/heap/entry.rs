//! Whether a far tier is open, and how many threads are inside of its shared path.
//!
//! A thread that has a cache is inside while its cache is busy; one without is counted here. Used by
//! `far_arenas`, and by `jemalloc` for its controls; closing a tier waits until nobody is inside, and so does a
//! fork (`forks`), during which threads wait outside.

use crate::base::sync::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::cell::Cell;
use std::time::Duration;

/// The pause before a thread that waits for a fork looks again. Nobody tells it: forks are few.
const LOOK_PAUSE: Duration = Duration::from_millis(1);

thread_local! {
    /// Whether the calling thread forks: it waits for nobody. Constant and without a destructor, as in
    /// `placement`.
    static FORKS: Cell<bool> = const { Cell::new(false) };
}

/// Keeps threads out of tiers.
pub(super) static TIERS_PAUSE: Pause = Pause::new();
/// Keeps threads out of jemalloc's controls.
pub(super) static CONTROLS_PAUSE: Pause = Pause::new();

/// The way into jemalloc's controls, which may walk all arenas under their locks.
pub(super) static CONTROLS: Entry = Entry::new(&CONTROLS_PAUSE);

/// Keeps threads out of what asks it, while one of them forks.
pub(super) struct Pause(AtomicBool);

impl Pause {
    pub(super) const fn new() -> Pause {
        Pause(AtomicBool::new(false))
    }

    /// Threads wait from now on, all but the calling one.
    pub(super) fn begin(&self) {
        FORKS.set(true);
        self.0.store(true, SeqCst);
    }

    /// They go on, in the process of the thread that began it, or in its child.
    pub(super) fn end(&self) {
        self.0.store(false, SeqCst);
        FORKS.set(false);
    }

    fn concerns_caller(&self) -> bool {
        self.0.load(SeqCst) && !FORKS.get()
    }
}

/// No far memory is available: the tier is shut down, or the thread has ended for jemalloc.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed;

/// The way into a tier past its caches.
pub(super) struct Entry {
    inside: AtomicUsize,
    closed: AtomicBool,
    pause: &'static Pause,
}

impl Entry {
    pub(super) const fn new(pause: &'static Pause) -> Entry {
        Entry { inside: AtomicUsize::new(0), closed: AtomicBool::new(false), pause }
    }

    /// Enters the shared path, after a pause.
    ///
    /// # Errors
    /// [`Closed`].
    pub(super) fn enter(&self) -> Result<Inside<'_>, Closed> {
        let inside = self.enter_even_if_closed();
        // Sequentially consistent with `close`: either it sees us inside, or we see it closed.
        if self.is_closed() { Err(Closed) } else { Ok(inside) }
    }

    /// As [`enter`](Self::enter), for a thread that may be inside already: it does not wait, for a pause
    /// waits for it.
    ///
    /// # Errors
    /// [`Closed`], in a pause too.
    pub(super) fn enter_at_once(&self) -> Result<Inside<'_>, Closed> {
        let inside = self.count();
        let may_enter = !self.is_closed() && !self.pause.concerns_caller();
        may_enter.then_some(inside).ok_or(Closed)
    }

    /// Enters for an object that exists, which keeps the tier from being closed for good; after a pause.
    pub(super) fn enter_even_if_closed(&self) -> Inside<'_> {
        loop {
            let inside = self.count();
            // Sequentially consistent with `Pause::begin`: either it sees us inside, or we see it.
            if !self.pause.concerns_caller() {
                return inside;
            }
            drop(inside);
            std::thread::sleep(LOOK_PAUSE);
        }
    }

    fn count(&self) -> Inside<'_> {
        self.inside.fetch_add(1, SeqCst);
        Inside { count: &self.inside }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(SeqCst)
    }

    pub(super) fn set_closed(&self, closed: bool) {
        self.closed.store(closed, SeqCst);
    }

    /// Whether no thread is inside the shared path.
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
