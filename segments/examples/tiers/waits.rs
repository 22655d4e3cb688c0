//! How long readers wait for a chunk's values: every read of a segment is timed.
//!
//! Two looks at the clock, for 65,536 rows. A read ends when the values are there to be touched, wherever
//! they lie; faults on far pages come later and are the tier's, not the migration's.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Nanoseconds. Relaxed, as it guards no other data.
static LONGEST: AtomicU64 = AtomicU64::new(0);

/// What `read` returns, after its time has been counted in.
pub(crate) fn timed<R>(read: impl FnOnce() -> R) -> R {
    let begun = Instant::now();
    let value = read();
    let waited = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
    // Looked at first: threads do not fight for a line that hardly ever changes.
    if waited > LONGEST.load(Relaxed) {
        LONGEST.fetch_max(waited, Relaxed);
    }
    value
}

/// The longest time since this was last asked.
pub(crate) fn take_longest() -> Duration {
    Duration::from_nanos(LONGEST.swap(0, Relaxed))
}
