//! When a server was last found silent.
//!
//! A connection on which a server owes an answer for too long is given up. Each idle one to the same server would keep the
//! next thread that uses it as long, and all others may wait for that thread: so those that were heard before are ended
//! when they are looked at, and only one that was made since is used.

use crate::link::Link;
use crate::sync::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Silence {
    opened: Instant,
    /// When a connection was given up last, in nanoseconds after `opened`.
    found: AtomicU64,
}

impl Silence {
    pub(crate) fn new() -> Silence {
        Silence { opened: Instant::now(), found: AtomicU64::new(0) }
    }

    /// A connection is given up because the server is silent.
    pub(crate) fn note(&self) {
        self.found.store(self.opened.elapsed().as_nanos() as u64, Ordering::SeqCst);
    }

    /// True if a connection can be used. Ends one that is idle, and that the server has ended or fallen silent on.
    pub(crate) fn spares(&self, link: &mut Link) -> bool {
        if link.heard() < self.opened + Duration::from_nanos(self.found.load(Ordering::SeqCst)) {
            link.take_leave();
        }
        link.is_usable()
    }
}
