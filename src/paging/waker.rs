//! A waker: wakes one thread, by one system call however often it is called before the thread looks.

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, Ordering};
use crate::sys::event::{EventFd, poll_readable};
use crate::sys::signals::SignalsBlocked;
use crossbeam_utils::CachePadded;
use std::os::fd::RawFd;
use std::time::Duration;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Waker {
    event: EventFd,
    /// It was called, and its thread has not looked yet.
    is_woken: CachePadded<AtomicBool>,
}

impl Waker {
    /// # Errors
    /// [`Error::Os`] without a descriptor for it.
    pub(in crate::paging) fn new() -> Result<Waker> {
        let event =
            EventFd::new().map_err(|errno| Error::Os { call: "eventfd", errno: errno.0 })?;
        Ok(Waker { event, is_woken: CachePadded::default() })
    }

    /// Wakes the waker's thread, once until it has looked.
    pub(in crate::paging) fn wake(&self) {
        // With the flag set and the event not yet signalled, nobody else signals it: a signal handler
        // that needed the thread that is called would wait for ever.
        let _blocked = SignalsBlocked::new();
        if !self.is_woken.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Wakes the waker's thread even if it was called before.
    pub(in crate::paging) fn wake_again(&self) {
        self.event.signal();
    }

    /// True if it was called since its thread looked last. Costs no system call.
    pub(in crate::paging) fn is_woken(&self) -> bool {
        self.is_woken.load(Ordering::Acquire)
    }

    /// The waker's thread is awake, and looks next at all that it can be called for.
    pub(in crate::paging) fn clear(&self) {
        // The event first: a call that comes in between ends the next wait.
        self.event.drain();
        // A swap, not a store: a caller before it has shown what it called for, and one after it
        // signals the event.
        self.is_woken.swap(false, Ordering::AcqRel);
    }

    /// Waits until the waker is called, or `timeout` has passed.
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
