//! The program's standard error, as it was when the library was first used.
//!
//! A program may close descriptor 2 and open a file, which gets that number: a line written there would
//! stand among the program's own data. So lines go to a duplicate made at the start ([`keep`]), which programs
//! rarely choose the number of, and only if it still is of the file that it was made of. A forked child has no
//! duplicate: a daemon would keep the pipe open that somebody reads to its end. It writes to descriptor 2,
//! by the same condition, and so does a process whose duplicate was closed.
//!
//! Nothing here waits for a reader. The description behind a descriptor is shared with other processes, so it
//! cannot be made non-blocking for this one alone. A pipe and a socket take the wish with the call; a
//! terminal, a file, or a pipe of an old kernel is asked with `poll(2)` first.
#![expect(unsafe_code, reason = "writes to a descriptor that may have been closed")]

use super::event::poll_writable;
use super::fork::{Private, copy_out_of_the_way, file_of, has_own_table};
use nix::errno::Errno;
use nix::sys::stat::fstat;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

/// Outcome of writing some bytes.
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

/// Standard error at the start; `None`: it was closed.
static KEPT: OnceLock<Option<KeptStderr>> = OnceLock::new();

struct KeptStderr {
    /// `None`: no descriptor was free.
    copy: Option<Private<OwnedFd>>,
    /// Device and inode.
    file: (u64, u64),
}

/// Keeps standard error as it is now. Later calls change nothing.
pub fn keep() {
    KEPT.get_or_init(|| {
        let file = file_of(libc::STDERR_FILENO)?;
        Some(KeptStderr { copy: copy_out_of_the_way(&std::io::stderr()).map(Private::new), file })
    });
}

/// A descriptor to write to.
enum Target {
    /// Open as long as nobody closes it.
    Borrowed(BorrowedFd<'static>),
    Owned(OwnedFd),
}

impl AsFd for Target {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Target::Borrowed(fd) => *fd,
            Target::Owned(fd) => fd.as_fd(),
        }
    }
}

/// Present destination of messages; `None`: nothing, for what was standard error is not open any more.
fn target() -> Option<Target> {
    let kept = KEPT.get()?.as_ref()?;
    let is_it = |fd: &RawFd| file_of(*fd) == Some(kept.file);
    if has_own_table() {
        return second_of_process().filter(|fd| is_it(&fd.as_raw_fd())).map(Target::Owned);
    }
    let copy = kept.copy.as_ref().filter(|copy| copy.is_here()).map(|copy| copy.as_raw_fd());
    // The copy may have been closed.
    let number = copy.into_iter().chain([libc::STDERR_FILENO]).find(is_it)?;
    // SAFETY: used by calls that report a number which is not open.
    Some(Target::Borrowed(unsafe { BorrowedFd::borrow_raw(number) }))
}

/// Descriptor 2 of the process, for a thread with a table of its own. See `pidfd_getfd(2)` (Linux 5.6).
fn second_of_process() -> Option<OwnedFd> {
    let own = |fd: libc::c_long| {
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the descriptor was just made and nobody else owns it.
        Some(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    // SAFETY: takes no pointers.
    let process = own(unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) })?;
    let (process, second) = (process.as_raw_fd(), libc::STDERR_FILENO);
    // SAFETY: takes no pointers.
    own(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, second, 0) })
}

/// Writes some of `bytes`, without a lock, an allocation, or a wait.
pub(crate) fn send(bytes: &[u8]) -> Sent {
    let bytes = &bytes[..bytes.len().min(PIPE_BUF)];
    let Some(target) = target() else { return Sent::Lost };
    let fd = target.as_fd();
    let sent = match kind(fd) {
        libc::S_IFIFO => send_to_pipe(fd, bytes),
        libc::S_IFSOCK => send_to_socket(fd, bytes),
        _ => Err(Errno::EOPNOTSUPP),
    };
    match sent {
        // No call of this kind here (before Linux 6.5, for a pipe): ask, then write. Another writer
        // that fills the pipe in between could still make this wait.
        Err(Errno::EOPNOTSUPP | Errno::EINVAL | Errno::ENOSYS) => meaning(send_if_ready(fd, bytes)),
        sent => meaning(sent),
    }
}

/// Waits for room for at most `timeout`.
pub(crate) fn wait_for_room(timeout: Duration) {
    if let Some(target) = target() {
        let _ = poll_writable(target.as_fd().as_raw_fd(), timeout);
    }
}

fn meaning(sent: nix::Result<usize>) -> Sent {
    match sent {
        Ok(count) => Sent::Some(count),
        Err(Errno::EAGAIN | Errno::EINTR) => Sent::Full,
        Err(_) => Sent::Lost,
    }
}

/// `S_IFIFO`, `S_IFSOCK`, ...; 0 when it is closed.
fn kind(fd: BorrowedFd<'_>) -> libc::mode_t {
    fstat(fd).map_or(0, |about| about.st_mode & libc::S_IFMT)
}

/// See `pwritev2(2)`: an offset of -1 is that of the description.
fn send_to_pipe(fd: BorrowedFd<'_>, bytes: &[u8]) -> nix::Result<usize> {
    let piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    // SAFETY: the vector names one buffer, valid for reads of its length.
    let sent = unsafe { libc::pwritev2(fd.as_raw_fd(), &raw const piece, 1, -1, libc::RWF_NOWAIT) };
    Errno::result(sent).map(isize::unsigned_abs)
}

/// See `send(2)`.
fn send_to_socket(fd: BorrowedFd<'_>, bytes: &[u8]) -> nix::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: the slice is valid for reads of its length.
    let sent = unsafe { libc::send(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) };
    Errno::result(sent).map(isize::unsigned_abs)
}

fn send_if_ready(fd: BorrowedFd<'_>, bytes: &[u8]) -> nix::Result<usize> {
    match poll_writable(fd.as_raw_fd(), Duration::ZERO) {
        Ok(true) => nix::unistd::write(fd, bytes),
        Ok(false) => Err(Errno::EAGAIN),
        Err(errno) => Err(Errno::from_raw(errno.0)),
    }
}
