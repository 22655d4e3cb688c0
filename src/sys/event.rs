//! Waiting for descriptors and waking threads: `poll(2)` and `eventfd(2)`.
//!
//! `poll(2)` takes no more descriptors than `RLIMIT_NOFILE` allows to be opened, and a sandboxed
//! program may set that to 0 once it has opened what it needs. `select(2)` has no such rule, but
//! needs a bit for every lower descriptor; so it is used only where `poll(2)` refuses.

#![expect(unsafe_code, reason = "borrows descriptors by number, calls select")]

use crate::sys::file::Errno;
use crate::sys::fork::Private;
use nix::errno::Errno as Refusal;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{self, EfdFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Maximum number of descriptors of one [`poll_readable`].
pub(crate) const POLL_MAX: usize = 8;

/// Waits until one of `fds` is readable (or closed, or in error) or `timeout` has passed. Returns
/// whether one is. A signal ends the wait early: `Ok(false)`. Works under any `RLIMIT_NOFILE`.
///
/// See `ppoll(2)`, `pselect(2)`.
///
/// # Panics
/// With more than [`POLL_MAX`] descriptors.
pub(crate) fn poll_readable(fds: &[RawFd], timeout: Duration) -> Result<bool, Errno> {
    poll(fds, PollFlags::POLLIN, timeout)
}

/// As [`poll_readable`], for room to write to `fd`.
pub(crate) fn poll_writable(fd: RawFd, timeout: Duration) -> Result<bool, Errno> {
    poll(&[fd], PollFlags::POLLOUT, timeout)
}

fn poll(fds: &[RawFd], events: PollFlags, timeout: Duration) -> Result<bool, Errno> {
    let mut polled: [PollFd<'_>; POLL_MAX] = std::array::from_fn(|at| {
        let fd = fds.get(at).copied().unwrap_or(libc::STDERR_FILENO);
        // SAFETY: used for this call only, and a number that is no open descriptor is reported by
        // it (POLLNVAL).
        PollFd::new(unsafe { BorrowedFd::borrow_raw(fd) }, events)
    });
    match ppoll(&mut polled[..fds.len()], Some(timespec(timeout).into()), None) {
        Ok(ready) => Ok(ready > 0),
        Err(Refusal::EINTR) => Ok(false),
        // The time-out is valid, so there are more descriptors than RLIMIT_NOFILE.
        Err(Refusal::EINVAL) => select(fds, events, timeout),
        Err(refusal) => Err(refusal.into()),
    }
}

/// As [`poll`], where that refuses the number of descriptors.
#[cold]
#[inline(never)]
fn select(fds: &[RawFd], events: PollFlags, timeout: Duration) -> Result<bool, Errno> {
    /// Bits of a small set, which also fits a signal handler's stack, and of a large one.
    const SMALL: usize = 1024;
    const LARGE: usize = 65_536;
    const NAP: Duration = Duration::from_millis(1);
    let highest = fds.iter().max().copied().unwrap_or(-1);
    match usize::try_from(highest).unwrap_or(0) {
        0..SMALL => select_among::<{ SMALL / 64 }>(fds, events, timeout),
        SMALL..LARGE => select_among::<{ LARGE / 64 }>(fds, events, timeout),
        _ => {
            // Ends early, as a signal would end it: the caller looks for itself.
            std::thread::sleep(NAP.min(timeout));
            Ok(false)
        }
    }
}

/// See `pselect(2)`. The kernel reads as many bits as the highest descriptor says, not as many as
/// `fd_set` has, which is all that `nix` can pass.
fn select_among<const WORDS: usize>(
    fds: &[RawFd],
    events: PollFlags,
    timeout: Duration,
) -> Result<bool, Errno> {
    let mut set = [0_u64; WORDS];
    let mut highest = -1;
    for &fd in fds.iter().filter(|fd| **fd >= 0) {
        set[fd as usize / 64] |= 1 << (fd % 64);
        highest = highest.max(fd);
    }
    let none = std::ptr::null_mut();
    let some: *mut libc::fd_set = set.as_mut_ptr().cast();
    let for_room = events == PollFlags::POLLOUT;
    let (readable, writable) = if for_room { (none, some) } else { (some, none) };
    let limit = timespec(timeout);
    // SAFETY: the set has a bit for each descriptor up to the highest (checked by the index above),
    // the time-out outlives the call, no signal mask is given.
    let ready =
        unsafe { libc::pselect(highest + 1, readable, writable, none, &limit, std::ptr::null()) };
    match Refusal::result(ready) {
        Ok(ready) => Ok(ready > 0),
        Err(Refusal::EINTR) => Ok(false),
        // Closed, which counts as ready: the caller's next call on it says so.
        Err(Refusal::EBADF) => Ok(true),
        Err(refusal) => Err(refusal.into()),
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
pub(crate) struct EventFd(Private<eventfd::EventFd>);

impl EventFd {
    /// Creates an event that has not been signalled.
    pub(crate) fn new() -> Result<EventFd, Errno> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(EventFd(Private::new(eventfd::EventFd::from_flags(flags)?)))
    }

    /// The descriptor, to wait on.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the event readable. Does not block, allocate or lock: usable in a signal handler.
    pub(crate) fn signal(&self) {
        let written = self.0.write(1);
        // EAGAIN: the counter is at its maximum, the event therefore readable already. EBADF: the program has closed
        // it, by which the thread that waits is woken, and tells.
        debug_assert!(matches!(written, Ok(8) | Err(Refusal::EAGAIN | Refusal::EBADF)));
    }

    /// Takes all signals back; returns whether there were any.
    pub(crate) fn drain(&self) -> bool {
        self.0.read().is_ok()
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
        let (fd, readable) = (event.raw_fd(), PollFlags::POLLIN);
        let both = [fd, other.raw_fd()];
        assert_eq!(select(&both, readable, Duration::ZERO), Ok(false));
        assert_eq!(select(&both, readable, Duration::from_millis(2)), Ok(false));
        event.signal();
        assert_eq!(select(&both, readable, Duration::from_secs(60)), Ok(true));
        assert_eq!(select(&both[1..], readable, Duration::ZERO), Ok(false));
        assert_eq!(select(&[fd], PollFlags::POLLOUT, Duration::ZERO), Ok(true));
        assert_eq!(select_among::<1024>(&both, readable, Duration::ZERO), Ok(true));
        // One that no set has a bit for: ends early.
        assert_eq!(select(&[1 << 20], readable, Duration::from_secs(60)), Ok(false));
    }
}
