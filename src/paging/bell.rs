//! A bell: wakes one thread, by one system call however often it is rung before the thread looks.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, Ordering};
use crate::sys::event::{EventFd, poll_readable};
use crate::sys::signals::SignalsBlocked;
use crossbeam_utils::CachePadded;
use std::os::fd::RawFd;
use std::time::Duration;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Bell {
    event: EventFd,
    /// It was rung, and its thread has not looked yet.
    is_rung: CachePadded<AtomicBool>,
}

impl Bell {
    /// # Errors
    /// [`Error::Os`] without a descriptor for it.
    pub(in crate::paging) fn new() -> Result<Bell> {
        let event =
            EventFd::new().map_err(|errno| Error::Os { call: "eventfd", errno: errno.0 })?;
        Ok(Bell { event, is_rung: CachePadded::default() })
    }

    /// Wakes the bell's thread, once until it has looked.
    pub(in crate::paging) fn ring(&self) {
        // With the flag set and the event not yet signalled, nobody else signals it: a signal handler
        // that needed the thread that is called would wait for ever.
        let _blocked = SignalsBlocked::new();
        if !self.is_rung.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Wakes the bell's thread even if it was called before.
    pub(in crate::paging) fn ring_again(&self) {
        self.event.signal();
    }

    /// Whether it was rung since its thread looked last. Costs no system call.
    pub(in crate::paging) fn is_rung(&self) -> bool {
        self.is_rung.load(Ordering::Acquire)
    }

    /// The bell's thread is awake, and looks next at all that it can be called for.
    pub(in crate::paging) fn answer(&self) {
        // The event first: a ring that comes in between is heard by the next wait.
        self.event.drain();
        // A swap, not a store: a caller before it has shown what it called for, and one after it
        // signals the event.
        self.is_rung.swap(false, Ordering::AcqRel);
    }

    /// Waits until the bell is rung, or `timeout` has passed.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses to wait.
    pub(in crate::paging) fn wait(&self, timeout: Duration) -> Result<()> {
        let waited = poll_readable(&[self.raw_fd()], timeout);
        waited.map(drop).map_err(|errno| Error::Os { call: "poll", errno: errno.0 })
    }

    pub(in crate::paging) fn raw_fd(&self) -> RawFd {
        self.event.raw_fd()
    }
}
