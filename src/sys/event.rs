//! Waiting for descriptors and waking threads: `poll(2)` and `eventfd(2)`.

#![expect(unsafe_code, reason = "calls poll and eventfd")]

use crate::sys::file::Errno;
use crate::sys::fork::Private;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Most descriptors of one [`poll_readable`].
pub(crate) const POLL_MAX: usize = 8;

/// Waits until one of `fds` is readable (or closed, or in error) or `timeout` has passed. Returns
/// whether one is. A signal ends the wait early: `Ok(false)`.
///
/// See `poll(2)`, `ppoll(2)`.
///
/// # Panics
/// With more than [`POLL_MAX`] descriptors.
pub(crate) fn poll_readable(fds: &[RawFd], timeout: Duration) -> Result<bool, Errno> {
    let mut polled = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; POLL_MAX];
    for (slot, fd) in polled[..fds.len()].iter_mut().zip(fds) {
        slot.fd = *fd;
    }
    poll(&mut polled[..fds.len()], timeout)
}

/// As [`poll_readable`], for room to write to `fd`.
pub(crate) fn poll_writable(fd: RawFd, timeout: Duration) -> Result<bool, Errno> {
    poll(&mut [libc::pollfd { fd, events: libc::POLLOUT, revents: 0 }], timeout)
}

fn poll(polled: &mut [libc::pollfd], timeout: Duration) -> Result<bool, Errno> {
    let limit = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the slice holds `count` entries, the time-out outlives the call, no signal mask is
    // given (ppoll(2)).
    let ready = unsafe { libc::ppoll(polled.as_mut_ptr(), count, &limit, std::ptr::null()) };
    match Errno::check(ready) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno(libc::EINTR)) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// A counter that other threads raise to wake the one that waits for it. See `eventfd(2)`.
#[derive(Debug)]
pub(crate) struct EventFd(Private<OwnedFd>);

impl EventFd {
    /// Creates an event that has not been signalled.
    pub(crate) fn new() -> Result<EventFd, Errno> {
        // SAFETY: takes no pointers (eventfd(2)).
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        let fd = Errno::check(fd)?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(EventFd(Private::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// The descriptor, to wait on.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the event readable. Does not block, allocate or lock: usable in a signal handler.
    pub(crate) fn signal(&self) {
        let one = 1_u64;
        // SAFETY: the buffer is 8 bytes, as eventfd(2) wants.
        let written = unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
        // EAGAIN: the counter is at its maximum, the event therefore readable already.
        debug_assert!(written == 8 || Errno::last() == Errno(libc::EAGAIN));
    }

    /// Takes all signals back; returns whether there were any.
    pub(crate) fn drain(&self) -> bool {
        let mut count = 0_u64;
        // SAFETY: the buffer is 8 bytes, as eventfd(2) wants.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
        read == 8
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signalled_event_is_readable_until_drained() {
        let event = EventFd::new().expect("eventfd");
        let fd = event.as_fd().as_raw_fd();
        assert!(!event.drain());
        assert_eq!(poll_readable(&[fd], Duration::ZERO), Ok(false));
        event.signal();
        event.signal();
        assert_eq!(poll_readable(&[fd], Duration::from_secs(60)), Ok(true));
        assert!(event.drain());
        assert_eq!(poll_readable(&[fd], Duration::ZERO), Ok(false));
    }
}
