//! Forked children: which process made something, and what a child must not keep of it.
//!
//! A child of `fork(2)` has all descriptors of its parent, and all of its memory but the mappings of
//! `sys::vm`. Descriptors that it keeps would outlive the parent: with a
//! device's go its lock, its claim and the space of a file without a name. So descriptors are
//! [`Private`]: the child closes them before `fork` returns there. Far addresses stay reserved in the
//! child, without access: else its own allocations would come to lie there, and look far.
//!
//! What cleans up when it is dropped asks [`Born`] first: a child inherits the value, but not what
//! it stands for.
//!
//! # Invariants
//! 1. What runs in the child before `fork` returns is async-signal-safe: atomics, `close(2)` and
//!    `mmap(2)`.
//! 2. A descriptor is marked for as long as a [`Private`] of this process owns it. (Between the
//!    system call and the mark another thread may fork: that child keeps the descriptor.)

#![expect(unsafe_code, reason = "maps memory in forked children")]

use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// Descriptors from here on are not closed in children: the usual bound is 1,024, and few programs
/// raise it so far.
const FDS_MAX: usize = 1 << 16;

/// Address ranges that are kept reserved in children; more are not.
const PLACES_MAX: usize = 256;

/// How many forks lie between this process and the first one that used this code.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// One bit per descriptor: it is [`Private`].
static PRIVATE: [AtomicU64; FDS_MAX / 64] = [const { AtomicU64::new(0) }; FDS_MAX / 64];

static PLACES: [Place; PLACES_MAX] = [const { Place::free() }; PLACES_MAX];

/// An address range; free while its start is zero.
struct Place {
    start: AtomicUsize,
    len: AtomicUsize,
}

impl Place {
    /// Taken, and not complete.
    const CLAIMED: usize = 1;

    const fn free() -> Place {
        Place { start: AtomicUsize::new(0), len: AtomicUsize::new(0) }
    }
}

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Born(u32);

impl Born {
    /// This process.
    pub(crate) fn here() -> Born {
        watch();
        Born(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this is the process, and not a forked child of it.
    pub(crate) fn is_here(self) -> bool {
        FORKS.load(Ordering::Relaxed) == self.0
    }
}

/// What owns a descriptor: closed in forked children, where dropping it does nothing.
#[derive(Debug)]
pub(crate) struct Private<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    born: Born,
}

impl<T: AsRawFd> Private<T> {
    pub(crate) fn new(inner: T) -> Private<T> {
        let born = Born::here();
        mark(inner.as_raw_fd(), true);
        Private { inner: ManuallyDrop::new(inner), born }
    }

    /// Whether this process opened it; else it is closed.
    pub(crate) fn is_here(&self) -> bool {
        self.born.is_here()
    }
}

impl<T: AsRawFd> Deref for Private<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsRawFd> DerefMut for Private<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsRawFd> Drop for Private<T> {
    fn drop(&mut self) {
        if self.born.is_here() {
            // First: the number may be somebody else's as soon as it is closed.
            mark(self.inner.as_raw_fd(), false);
            // SAFETY: not used after this, the only place that drops it.
            unsafe { ManuallyDrop::drop(&mut self.inner) }
        }
    }
}

fn mark(fd: RawFd, private: bool) {
    let fd = usize::try_from(fd).expect("an open descriptor");
    let Some(word) = PRIVATE.get(fd / 64) else { return };
    let bit = 1 << (fd % 64);
    if private {
        word.fetch_or(bit, Ordering::Relaxed);
    } else {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

/// Keeps a range of addresses, which is not inherited, reserved in children.
pub(crate) fn keep_place(start: usize, len: usize) {
    watch();
    let free = PLACES.iter().find(|place| {
        let (free, claimed) = (0, Place::CLAIMED);
        place.start.compare_exchange(free, claimed, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    });
    if let Some(place) = free {
        place.len.store(len, Ordering::Relaxed);
        place.start.store(start, Ordering::Release);
    }
}

/// The range is about to be unmapped.
pub(crate) fn give_up_place(start: usize) {
    let place = PLACES.iter().find(|place| place.start.load(Ordering::Relaxed) == start);
    if let Some(place) = place {
        place.start.store(0, Ordering::Relaxed);
    }
}

/// Runs `child` in every child of a `fork` from now on, before `fork` returns there; see
/// `pthread_atfork(3)`. It must be async-signal-safe.
pub(crate) fn in_forked_children(child: extern "C" fn()) {
    // SAFETY: registers a function that lives as long as the program and takes no arguments.
    unsafe { libc::pthread_atfork(None, None, Some(child)) };
}

/// From now on children of this process are told apart and tidied.
fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        if cfg!(not(miri)) {
            in_forked_children(in_child);
        }
    });
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    for (at, word) in PRIVATE.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = at * 64 + bits.trailing_zeros() as usize;
            bits &= bits - 1;
            // It is owned by a `Private` of the parent's, which will neither use nor close it in this
            // process.
            let _ = nix::unistd::close(fd as RawFd);
        }
    }
    for place in &PLACES {
        let start = place.start.swap(0, Ordering::Acquire);
        if start > Place::CLAIMED {
            reserve(start, place.len.load(Ordering::Relaxed));
        }
    }
}

/// Maps a range of the child's that is not mapped, without access.
fn reserve(start: usize, len: usize) {
    let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED_NOREPLACE;
    let (start, len) = (NonZeroUsize::new(start), NonZeroUsize::new(len));
    let len = len.expect("a range has bytes");
    // SAFETY: replaces nothing, and cannot be accessed. Should the kernel refuse, the range is free
    // for others, as without this.
    let _ = unsafe { mmap_anonymous(start, len, ProtFlags::PROT_NONE, flags) };
}

#[cfg(all(test, not(miri), not(loom)))]
mod tests {
    use super::*;
    use std::io::{Read, pipe};

    /// Runs `body` in a forked child; returns what it says.
    fn in_fork(body: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child only makes system calls and ends without cleaning up.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let status = i32::from(!body());
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::_exit(status) };
        }
        let mut status = 0;
        // SAFETY: the status is a valid place to write to.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!(waited, pid);
        status == 0
    }

    fn is_open(fd: RawFd) -> bool {
        // SAFETY: takes no pointers.
        unsafe { libc::fcntl(fd, libc::F_GETFD) != -1 }
    }

    #[test]
    fn a_child_has_no_private_descriptor_and_closes_none_of_its_own() {
        let (mut reader, writer) = pipe().expect("a pipe");
        let private = Private::new(writer);
        let fd = private.as_raw_fd();
        let mut private = Some(private);
        assert!(in_fork(|| {
            let closed = !is_open(fd);
            // SAFETY: takes no pointers. The number is free, and becomes the child's own.
            let own = unsafe { libc::dup2(1, fd) } == fd;
            let was_here = private.as_ref().is_some_and(Private::is_here);
            drop(private.take());
            closed && own && !was_here && is_open(fd)
        }));
        assert!(is_open(fd) && private.as_ref().is_some_and(Private::is_here));
        drop(private);
        // Nobody else holds it: the pipe has ended.
        assert_eq!(reader.read(&mut [0]).expect("a pipe"), 0);
    }
}
