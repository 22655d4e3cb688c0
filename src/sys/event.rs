//! Waiting for descriptors and waking threads: `poll(2)` and `eventfd(2)`.
//!
//! `poll(2)` takes no more descriptors than `RLIMIT_NOFILE` allows to be opened, and a sandboxed
//! program may set that to 0 once it has opened what it needs. `select(2)` has no such rule, but
//! needs a bit for every lower descriptor; so it is used only where `poll(2)` refuses.

#![expect(unsafe_code, reason = "calls poll, select and eventfd")]

use crate::sys::file::Errno;
use crate::sys::fork::Private;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Most descriptors of one [`poll_readable`].
pub(crate) const POLL_MAX: usize = 8;

/// Waits until one of `fds` is readable (or closed, or in error) or `timeout` has passed. Returns
/// whether one is. A signal ends the wait early: `Ok(false)`. Works under any `RLIMIT_NOFILE`.
///
/// See `ppoll(2)`, `pselect(2)`.
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
    let limit = timespec(timeout);
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the slice holds `count` entries, the time-out outlives the call, no signal mask is
    // given (ppoll(2)).
    let ready = unsafe { libc::ppoll(polled.as_mut_ptr(), count, &limit, std::ptr::null()) };
    match Errno::check(ready) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno(libc::EINTR)) => Ok(false),
        // The time-out is valid, so `count` is above RLIMIT_NOFILE.
        Err(Errno(libc::EINVAL)) => select(polled, timeout),
        Err(errno) => Err(errno),
    }
}

/// As [`poll`], where that refuses the number of descriptors. All of `polled` wait for the same.
#[cold]
#[inline(never)]
fn select(polled: &[libc::pollfd], timeout: Duration) -> Result<bool, Errno> {
    /// Bits of a small set, which also fits a signal handler's stack, and of a large one.
    const SMALL: usize = 1024;
    const LARGE: usize = 65_536;
    const NAP: Duration = Duration::from_millis(1);
    let highest = polled.iter().map(|entry| entry.fd).max().unwrap_or(-1);
    match usize::try_from(highest).unwrap_or(0) {
        0..SMALL => select_among::<{ SMALL / 64 }>(polled, timeout),
        SMALL..LARGE => select_among::<{ LARGE / 64 }>(polled, timeout),
        _ => {
            // Ends early, as a signal would end it: the caller looks for itself.
            std::thread::sleep(NAP.min(timeout));
            Ok(false)
        }
    }
}

/// See `pselect(2)`. The kernel reads as many bits as the highest descriptor says, not as many as
/// `fd_set` has.
fn select_among<const WORDS: usize>(
    polled: &[libc::pollfd],
    timeout: Duration,
) -> Result<bool, Errno> {
    let mut set = [0_u64; WORDS];
    let mut highest = -1;
    for entry in polled.iter().filter(|entry| entry.fd >= 0) {
        set[entry.fd as usize / 64] |= 1 << (entry.fd % 64);
        highest = highest.max(entry.fd);
    }
    let none = std::ptr::null_mut();
    let some: *mut libc::fd_set = set.as_mut_ptr().cast();
    let for_room = polled.iter().any(|entry| entry.events == libc::POLLOUT);
    let (readable, writable) = if for_room { (none, some) } else { (some, none) };
    let limit = timespec(timeout);
    // SAFETY: the set has a bit for each descriptor up to the highest (checked by the index above),
    // the time-out outlives the call, no signal mask is given.
    let ready =
        unsafe { libc::pselect(highest + 1, readable, writable, none, &limit, std::ptr::null()) };
    match Errno::check(ready) {
        Ok(ready) => Ok(ready > 0),
        Err(Errno(libc::EINTR)) => Ok(false),
        // Closed, which counts as ready: the caller's next call on it says so.
        Err(Errno(libc::EBADF)) => Ok(true),
        Err(errno) => Err(errno),
    }
}

fn timespec(timeout: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
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

    #[test]
    fn the_other_way_to_wait_says_the_same() {
        let (event, other) = (EventFd::new().expect("eventfd"), EventFd::new().expect("eventfd"));
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let (fd, events) = (event.raw_fd(), libc::POLLIN);
        let both = [entry(fd, events), entry(other.raw_fd(), events)];
        assert_eq!(select(&both, Duration::ZERO), Ok(false));
        assert_eq!(select(&both, Duration::from_millis(2)), Ok(false));
        event.signal();
        assert_eq!(select(&both, Duration::from_secs(60)), Ok(true));
        assert_eq!(select(&both[1..], Duration::ZERO), Ok(false));
        assert_eq!(select(&[entry(fd, libc::POLLOUT)], Duration::ZERO), Ok(true));
        assert_eq!(select_among::<1024>(&both, Duration::ZERO), Ok(true));
        // One that no set has a bit for: ends early.
        assert_eq!(select(&[entry(1 << 20, events)], Duration::from_secs(60)), Ok(false));
    }
}
