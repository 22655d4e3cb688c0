//! The only system calls: sockets that never block, and one place to wait for them.

#![expect(unsafe_code, reason = "passes raw buffers to the kernel")]

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, SockaddrStorage, UnixAddr, connect, getsockopt,
    setsockopt, socket, sockopt,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::{Duration, Instant};

/// Descriptors get numbers from here on, where the program rarely has any: some close those that they do not know.
const NUMBER_MIN: RawFd = 512;
/// Maximum number of descriptors of one wait.
pub(crate) const POLL_MAX: usize = 16;
/// Maximum number of buffers of one transfer; the kernel takes 1,024.
pub(crate) const VECTOR_MAX: usize = 128;

/// A buffer as the kernel takes it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct IoSlice(libc::iovec);

// SAFETY: a place and a length; their users promise that the memory may be used, by any thread.
unsafe impl Send for IoSlice {}
// SAFETY: as above.
unsafe impl Sync for IoSlice {}

impl IoSlice {
    pub(crate) const NONE: IoSlice = IoSlice::new(std::ptr::null_mut(), 0);

    pub(crate) const fn new(ptr: *mut u8, len: usize) -> IoSlice {
        IoSlice(libc::iovec { iov_base: ptr.cast(), iov_len: len })
    }

    pub(crate) fn len(self) -> usize {
        self.0.iov_len
    }

    pub(crate) fn ptr(self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// The rest after the first `count` bytes, at most `most` of it.
    pub(crate) fn part(self, count: usize, most: usize) -> IoSlice {
        assert!(count <= self.len(), "{count} of {} bytes", self.len());
        IoSlice::new(self.ptr().wrapping_add(count), (self.len() - count).min(most))
    }

    /// Copies `from` to its start.
    ///
    /// # Safety
    /// The memory can be written, and nobody else uses it.
    pub(crate) unsafe fn copy_from(self, from: &[u8]) {
        assert!(from.len() <= self.len(), "{} bytes for {}", from.len(), self.len());
        // SAFETY: the caller's promise; a slice of ours does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.ptr(), from.len()) }
    }

    /// Copies its bytes to `into`, which is as long.
    ///
    /// # Safety
    /// The memory can be read.
    pub(crate) unsafe fn copy_to(self, into: &mut [u8]) {
        assert!(into.len() == self.len(), "{} bytes for {}", self.len(), into.len());
        // SAFETY: the caller's promise; a slice of ours does not overlap it.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr(), into.as_mut_ptr(), into.len()) }
    }

    /// Its bytes.
    ///
    /// # Safety
    /// The memory can be read as long as `'a`, and nobody writes it.
    pub(crate) unsafe fn bytes<'a>(self) -> &'a [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len()) }
    }

    /// Its bytes, to be changed.
    ///
    /// # Safety
    /// The memory can be read and written as long as `'a`, and nobody else uses it, but what this slice is passed to.
    pub(crate) unsafe fn bytes_mut<'a>(self) -> &'a mut [u8] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr(), self.len()) }
    }

    /// Fills it with zeros.
    ///
    /// # Safety
    /// As for `copy_from`.
    pub(crate) unsafe fn clear(self) {
        // SAFETY: the caller's promise.
        unsafe { std::ptr::write_bytes(self.ptr(), 0, self.len()) }
    }
}

/// Sends from buffers; `None`: the socket takes nothing now.
///
/// # Safety
/// The buffers can be read.
pub(crate) unsafe fn send(fd: BorrowedFd<'_>, from: &[IoSlice]) -> io::Result<Option<usize>> {
    let message = message(from);
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the vector lives during the call, and the caller promises that its buffers can be read.
    moved(|| unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}

/// Receives into buffers; `None`: there is nothing now.
///
/// # Errors
/// Those of `recvmsg(2)`, and that the other side has ended the connection.
///
/// # Safety
/// The buffers can be written, and nobody else uses them.
pub(crate) unsafe fn receive(fd: BorrowedFd<'_>, into: &[IoSlice]) -> io::Result<Option<usize>> {
    let mut message = message(into);
    // SAFETY: the vector lives during the call, and the caller promises that its buffers can be written.
    match moved(|| unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }) {
        Ok(Some(0)) => Err(io::ErrorKind::UnexpectedEof.into()),
        result => result,
    }
}

/// True if a connection has neither ended nor anything to be read.
pub(crate) fn is_quiet(fd: BorrowedFd<'_>) -> bool {
    let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    nix::sys::socket::recv(fd.as_raw_fd(), &mut [0], flags) == Err(Errno::EAGAIN)
}

fn message(buffers: &[IoSlice]) -> libc::msghdr {
    // SAFETY: null pointers and zeros say that there is neither an address nor control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = buffers.as_ptr().cast_mut().cast(); // Transparent; the kernel only reads it.
    message.msg_iovlen = buffers.len();
    message
}

fn moved(mut call: impl FnMut() -> isize) -> io::Result<Option<usize>> {
    loop {
        if let Ok(count) = usize::try_from(call()) {
            return Ok(Some(count));
        }
        match Errno::last() {
            Errno::EINTR => {}
            Errno::EAGAIN => return Ok(None),
            errno => return Err(errno.into()),
        }
    }
}

/// A descriptor to wait for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Awaited {
    pub(crate) fd: RawFd,
    /// Wait until it can be written too.
    pub(crate) write: bool,
}

/// Waits until a descriptor is ready, or `timeout` has passed; sets a bit for each that is ready. A signal ends it
/// early.
pub(crate) fn wait(awaited: &[Awaited], timeout: Duration) -> io::Result<u32> {
    let mut polled = [libc::pollfd { fd: -1, events: 0, revents: 0 }; POLL_MAX];
    for (to, from) in polled.iter_mut().zip(awaited) {
        to.fd = from.fd;
        to.events = libc::POLLIN | if from.write { libc::POLLOUT } else { 0 };
    }
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    };
    let count = awaited.len().min(POLL_MAX) as libc::nfds_t;
    // SAFETY: array and timeout live during the call, and there are `count` descriptors.
    let ready =
        unsafe { libc::ppoll(polled.as_mut_ptr(), count, &raw const timeout, std::ptr::null()) };
    if ready < 0 && Errno::last() != Errno::EINTR {
        return Err(Errno::last().into());
    }
    let bits = (0..).zip(&polled).filter(|(_, polled)| ready > 0 && polled.revents != 0);
    Ok(bits.fold(0, |mask, (at, _)| mask | 1 << at))
}

/// A deadline of what is waited for step by step. Time beyond two steps at once does not count: this process was stopped,
/// and what the other side has sent may be on its way.
#[derive(Debug)]
pub(crate) struct WaitTerm {
    end: Instant,
    looked: Instant,
    step: Duration,
}

impl WaitTerm {
    const STEPS: u32 = 8;

    pub(crate) fn within(wait: Duration) -> WaitTerm {
        let now = Instant::now();
        WaitTerm { end: now + wait, looked: now, step: wait / WaitTerm::STEPS }
    }

    /// Returns how long to wait before it is asked again; zero: it is over.
    pub(crate) fn left(&mut self) -> Duration {
        let now = Instant::now();
        self.end += (now - self.looked).saturating_sub(self.step * 2);
        self.looked = now;
        self.end.saturating_duration_since(now).min(self.step)
    }
}

/// Connects to a TCP socket.
pub(crate) fn connect_tcp(address: SocketAddr, term: &mut WaitTerm) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let fd = new_socket(family)?;
    setsockopt(&fd, sockopt::TcpNoDelay, &true)?;
    match connect(fd.as_raw_fd(), &SockaddrStorage::from(address)) {
        Ok(()) => return Ok(fd),
        Err(Errno::EINPROGRESS) => {}
        Err(errno) => return Err(errno.into()),
    }
    loop {
        let left = term.left();
        let awaited = [Awaited { fd: fd.as_raw_fd(), write: true }];
        if wait(&awaited, left)? != 0 {
            return match getsockopt(&fd, sockopt::SocketError)? {
                0 => Ok(fd),
                errno => Err(io::Error::from_raw_os_error(errno)),
            };
        }
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
    }
}

/// Bounds the time for which the kernel keeps sending what the other side does not acknowledge, whether this process lives
/// or not. (A Unix socket's bytes are at the other side when they are sent.)
pub(crate) fn bound_unacked(fd: BorrowedFd<'_>, most: Duration) {
    let millis = most.as_millis().min(u128::from(u32::MAX)) as u32;
    let _ = setsockopt(&fd, sockopt::TcpUserTimeout, &millis);
}

/// Connects to a Unix socket. A server that accepts nothing for so long that its backlog is full is `EAGAIN`.
pub(crate) fn connect_unix(path: &Path) -> io::Result<OwnedFd> {
    let fd = new_socket(AddressFamily::Unix)?;
    connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(fd)
}

fn new_socket(family: AddressFamily) -> io::Result<OwnedFd> {
    let fd =
        socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    match fcntl(&fd, FcntlArg::F_DUPFD_CLOEXEC(NUMBER_MIN)) {
        // SAFETY: the descriptor was just made and nobody else owns it.
        Ok(copy) => Ok(unsafe { OwnedFd::from_raw_fd(copy) }),
        // As where `ulimit -n` is smaller.
        Err(_) => Ok(fd),
    }
}

/// Ends a connection at once: data that the kernel has not sent yet is dropped, as far as it can be.
pub(crate) fn abort(fd: OwnedFd) {
    let now = libc::linger { l_onoff: 1, l_linger: 0 };
    // A Unix socket has no such thing; its data is in the server's hands already.
    let _ = setsockopt(&fd, sockopt::Linger, &now);
    let _ = nix::sys::socket::shutdown(fd.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    drop(fd);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_nobody_could_wait_does_not_count() {
        let (now, step) = (Instant::now(), Duration::from_secs(60));
        let end = now - step / 60;
        assert_eq!(WaitTerm { end, looked: now - step * 4, step }.left(), step);
        assert_eq!(WaitTerm { end, looked: now, step }.left(), Duration::ZERO);
        assert_eq!(WaitTerm::within(Duration::ZERO).left(), Duration::ZERO);
    }
}
