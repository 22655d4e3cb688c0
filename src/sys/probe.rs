//! Feature probe: what this kernel and machine allow.
//!
//! `farheap doctor` and `farheap_has_feature` of C ask, and judge what is found; it is what the library
//! itself begins with: routes to a userfaultfd ([`Route`]), memory and its limits ([`Memory`]), what a
//! device holds ([`Contents`]).
//!
//! The probe asks by trying: it opens userfaultfds and a ring and closes them again, reserves
//! address space and gives it back. It writes nothing.

#![expect(unsafe_code, reason = "opens userfaultfds and calls ioctl on them")]

pub(crate) mod contents;
mod host;
mod nodes;

pub use contents::Contents;
#[cfg(feature = "heap")]
pub(crate) use host::GroupUse;
pub(crate) use host::address_space;
pub use host::{CgroupLimit, Memory};
pub use nodes::NumaNode;

pub use super::file::temporary_dir;

use super::file::FileKind;
use super::{inherited, raw};
use crate::base::units::ByteCount;
use linux_raw_sys::general as kernel;
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::{fmt, io};

/// Entries of the ring that is set up to see whether one can be.
const RING_ENTRIES: u32 = 4;

/// The requests.
mod ioctl {
    use linux_raw_sys::general::{_UFFDIO_API, UFFDIO, uffdio_api};

    nix::ioctl_readwrite!(negotiate, UFFDIO, _UFFDIO_API, uffdio_api);
    // `USERFAULTFD_IOC_NEW`: makes `/dev/userfaultfd` give out a userfaultfd.
    nix::ioctl_write_int_bad!(open, nix::request_code_none!(UFFDIO, 0));
}

/// A way to a userfaultfd, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// `/dev/userfaultfd` (Linux 6.1): who may open the file gets faults from kernel mode too.
    Device,
    /// The system call with faults from kernel mode: needs `CAP_SYS_PTRACE`, or
    /// `vm.unprivileged_userfaultfd=1`.
    Syscall,
    /// The system call with faults from user mode only (Linux 5.11): open to everyone. System
    /// calls that touch absent pages fail with `EFAULT`.
    SyscallUserMode,
}

impl Route {
    /// Every route, in the order in which they are tried.
    pub const ALL: [Route; 3] = [Route::Device, Route::Syscall, Route::SyscallUserMode];

    /// The features of userfaultfd (`UFFD_FEATURE_*`) that the kernel has by this route, tried.
    ///
    /// # Errors
    /// The `errno` value of the refusal.
    pub fn features(self) -> Result<u64, i32> {
        // Asking for nothing returns all features (fs/userfaultfd.c, `userfaultfd_api`).
        open_route(self).and_then(|fd| negotiate(&fd, 0))
    }

    /// True if faults of the kernel on behalf of the process (`read(2)` into an absent page) are
    /// delivered.
    #[must_use]
    pub fn has_kernel_faults(self) -> bool {
        self != Route::SyscallUserMode
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Route::Device => "/dev/userfaultfd",
            Route::Syscall => "userfaultfd(2)",
            Route::SyscallUserMode => "userfaultfd(2), user mode only",
        })
    }
}

/// Opens a userfaultfd by one route: close-on-exec, non-blocking, before its `UFFDIO_API`.
/// Returns the `errno` value of a refusal.
pub(crate) fn open_route(route: Route) -> Result<OwnedFd, i32> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    match route {
        Route::Device => {
            let device = File::options()
                .read(true)
                .write(true)
                .custom_flags(libc::O_CLOEXEC)
                .open("/dev/userfaultfd")
                .map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            // SAFETY: `device` is open; USERFAULTFD_IOC_NEW takes its flags by value and touches
            // no memory of the process (fs/userfaultfd.c, `userfaultfd_dev_ioctl`). Any other
            // character device under that name refuses the request with ENOTTY.
            let fd = unsafe { ioctl::open(device.as_raw_fd(), flags) };
            fd.map(own).map_err(raw)
        }
        Route::Syscall => open_by_syscall(flags),
        Route::SyscallUserMode => open_by_syscall(flags | kernel::UFFD_USER_MODE_ONLY as i32),
    }
}

fn open_by_syscall(flags: libc::c_int) -> Result<OwnedFd, i32> {
    // SAFETY: userfaultfd(2) takes flags by value and touches no memory of the process.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    Errno::result(fd as libc::c_int).map(own).map_err(raw)
}

/// Owns the descriptor that a system call has just returned.
fn own(fd: libc::c_int) -> OwnedFd {
    // SAFETY: the kernel has just given out `fd` to this call, so nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// Runs `UFFDIO_API` on a new userfaultfd, which can take it only once; returns the features the
/// kernel has (`UFFD_FEATURE_*`), whichever were asked for.
pub(super) fn negotiate(uffd: &OwnedFd, wanted: u64) -> Result<u64, i32> {
    let api = kernel::UFFD_API.into();
    let mut args = kernel::uffdio_api { api, features: wanted, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`; `args` is one, alive and
    // exclusively borrowed during the call.
    unsafe { ioctl::negotiate(uffd.as_raw_fd(), &raw mut args) }.map_err(raw)?;
    Ok(args.features)
}

/// Tries to set up a ring of io_uring.
///
/// # Errors
/// The `errno` value of the refusal.
pub fn try_ring() -> Result<(), i32> {
    let ring = io_uring::IoUring::new(RING_ENTRIES).map(drop);
    ring.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// Reserves `len` bytes of writable address space, uncommitted, and gives them back: whether the
/// runtime will get its span.
///
/// # Errors
/// `ENOMEM` when `RLIMIT_AS` or `vm.overcommit_memory=2` stand in the way.
pub fn try_reserve(len: ByteCount) -> Result<(), i32> {
    let mapped = inherited::map(len.as_usize(), 1).map_err(raw)?;
    // SAFETY: exactly the mapping made above, which nobody else knows of.
    unsafe { inherited::unmap(mapped.addr().get(), len.as_usize()) };
    Ok(())
}

/// Looks at what a block device or regular file of `len` bytes holds.
///
/// # Errors
/// When it cannot be read.
pub fn contents(file: &File, len: ByteCount) -> io::Result<Contents> {
    let is_block = file.metadata()?.file_type().is_block_device();
    let kind = if is_block { FileKind::Block } else { FileKind::Regular };
    Contents::look(file.as_fd(), kind, len.0).map_err(|errno| io::Error::from_raw_os_error(errno.0))
}
