//! Writing to standard error without ever waiting for its reader.
//!
//! The description behind it is shared with other processes, so it cannot be made non-blocking
//! for this one alone. A pipe and a socket take the wish with the call; a terminal, a file, or a
//! pipe of an old kernel is asked with `poll(2)` first.
#![expect(unsafe_code, reason = "writes to standard error")]

use super::event::poll_writable;
use nix::errno::Errno;
use nix::sys::stat::fstat;
use std::time::Duration;

/// What became of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// This number of bytes, the first ones, are written.
    Some(usize),
    /// There is no room at the moment.
    Full,
    /// Nobody can read them any more: standard error is closed, or broken.
    Lost,
}

/// Bytes that a pipe takes whole or not at all; see `pipe(7)`.
const PIPE_BUF: usize = 4096;

/// Writes some of `bytes`, without a lock, an allocation, or a wait.
pub(crate) fn send(bytes: &[u8]) -> Sent {
    let bytes = &bytes[..bytes.len().min(PIPE_BUF)];
    let sent = match kind() {
        libc::S_IFIFO => send_to_pipe(bytes),
        libc::S_IFSOCK => send_to_socket(bytes),
        _ => Err(Errno::EOPNOTSUPP),
    };
    match sent {
        // No call of this kind here (before Linux 6.5, for a pipe): ask, then write. Another writer
        // that fills the pipe in between could still make this wait.
        Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS) => meaning(send_if_ready(bytes)),
        sent => meaning(sent),
    }
}

/// Waits for room for at most `timeout`.
pub(crate) fn wait_for_room(timeout: Duration) {
    let _ = poll_writable(libc::STDERR_FILENO, timeout);
}

fn meaning(sent: nix::Result<usize>) -> Sent {
    match sent {
        Ok(count) => Sent::Some(count),
        Err(Errno::EAGAIN | Errno::EINTR) => Sent::Full,
        Err(_) => Sent::Lost,
    }
}

/// What standard error is at the moment: `S_IFIFO`, `S_IFSOCK`, ...; 0 when it is closed.
fn kind() -> libc::mode_t {
    fstat(std::io::stderr()).map_or(0, |about| about.st_mode & libc::S_IFMT)
}

/// See `pwritev2(2)`: an offset of -1 is that of the description.
fn send_to_pipe(bytes: &[u8]) -> nix::Result<usize> {
    let piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the vector names one buffer, valid for reads of its length.
    let sent =
        unsafe { libc::pwritev2(libc::STDERR_FILENO, &raw const piece, 1, -1, libc::RWF_NOWAIT) };
    Errno::result(sent).map(isize::unsigned_abs)
}

/// See `send(2)`.
fn send_to_socket(bytes: &[u8]) -> nix::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the slice is valid for reads of its length.
    let sent =
        unsafe { libc::send(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len(), flags) };
    Errno::result(sent).map(isize::unsigned_abs)
}

fn send_if_ready(bytes: &[u8]) -> nix::Result<usize> {
    match poll_writable(libc::STDERR_FILENO, Duration::ZERO) {
        Ok(true) => nix::unistd::write(std::io::stderr(), bytes),
        Ok(false) => Err(Errno::EAGAIN),
        Err(errno) => Err(Errno::from_raw(errno.0)),
    }
}
