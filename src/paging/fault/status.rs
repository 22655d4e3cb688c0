//! Outcomes of faults, and reasons to bring a page in: words that all of `fault` uses.

/// Outcome of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum FaultStatus {
    /// Its page is mapped, or the thread was told to fault again.
    Resolved,
    /// A read in flight will resolve it.
    Reading,
    /// Another thread is changing the page: try again soon.
    TryAgain,
    /// The device has as many requests as it may have: try again when one has finished.
    QueueFull,
    /// There is no frame, or no room within the limit: try again when the evictor has made some.
    NoRoom,
}

/// For what a page is brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum Purpose {
    /// A thread waits for it.
    Fault,
    /// It will probably be touched.
    Prefetch,
}
