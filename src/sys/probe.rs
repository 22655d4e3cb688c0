//! Feature probe: what this kernel, machine and process allow.
//!
//! [`Probe::run`] asks everything once; `farheap doctor` shows it and the runtime decides by it.
//! userfaultfd is here ([`Route`], [`Features`]), memory and limits in [`host`](self::Memory),
//! devices and directories in [`place`](self::Device). Layer 1; uses `base`.
//!
//! The probe asks by trying: it opens userfaultfds and io_urings and closes them again, reserves
//! address space and gives it back. It writes nothing, except for [`Directory::probe`], whose
//! temporary file is gone when it returns.

#![expect(unsafe_code, reason = "opens userfaultfds and calls ioctl on them")]

pub(crate) mod contents;
mod host;
mod place;

pub use contents::Contents;
pub use host::{CgroupLimit, Limits, Memory};
pub use place::{Device, DeviceKind, Directory, temporary_dir};

use super::{inherited, raw};
use crate::base::units::ByteCount;
use linux_raw_sys::general as kernel;
use nix::errno::Errno;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::{fmt, fs};

/// Bit of `CAP_SYS_PTRACE` in a capability set.
const CAP_SYS_PTRACE: u32 = 19;
/// Entries of the ring that is set up to see whether one can be.
const URING_PROBE_ENTRIES: u32 = 4;

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

    /// Whether faults of the kernel on behalf of the process (`read(2)` into an absent page) are
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
/// kernel has, whichever were asked for.
pub(super) fn negotiate(uffd: &OwnedFd, wanted: Features) -> Result<Features, i32> {
    let api = kernel::UFFD_API.into();
    let mut args = kernel::uffdio_api { api, features: wanted.0, ioctls: 0 };
    // SAFETY: UFFDIO_API reads and writes one `struct uffdio_api`; `args` is one, alive and
    // exclusively borrowed during the call.
    unsafe { ioctl::negotiate(uffd.as_raw_fd(), &raw mut args) }.map_err(raw)?;
    Ok(Features(args.features))
}

/// A set of userfaultfd feature bits (`UFFD_FEATURE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features(pub u64);

impl Features {
    /// Synchronous write protection of anonymous memory (Linux 5.7).
    pub const WRITE_PROTECT: Features = Features(kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64);
    /// A forked child's faults are delivered too; needs `CAP_SYS_PTRACE`.
    pub const EVENT_FORK: Features = Features(kernel::UFFD_FEATURE_EVENT_FORK as u64);
    /// A fault raises `SIGBUS` in the faulting thread instead of an event.
    pub const SIGBUS: Features = Features(kernel::UFFD_FEATURE_SIGBUS as u64);
    /// Fault events name the thread.
    pub const THREAD_ID: Features = Features(kernel::UFFD_FEATURE_THREAD_ID as u64);
    /// Fault events carry the exact address, not its page's (Linux 5.18).
    pub const EXACT_ADDRESS: Features = Features(kernel::UFFD_FEATURE_EXACT_ADDRESS as u64);
    /// `UFFDIO_POISON` (Linux 6.6).
    pub const POISON: Features = Features(kernel::UFFD_FEATURE_POISON as u64);
    /// Write protection that the kernel lifts without an event (Linux 6.7).
    pub const WP_ASYNC: Features = Features(kernel::UFFD_FEATURE_WP_ASYNC as u64);
    /// `UFFDIO_MOVE` (Linux 6.8).
    pub const MOVE: Features = Features(kernel::UFFD_FEATURE_MOVE as u64);

    /// The kernel's names of the bits, from bit 0.
    const NAMES: [&str; 17] = [
        "PAGEFAULT_FLAG_WP",
        "EVENT_FORK",
        "EVENT_REMAP",
        "EVENT_REMOVE",
        "MISSING_HUGETLBFS",
        "MISSING_SHMEM",
        "EVENT_UNMAP",
        "SIGBUS",
        "THREAD_ID",
        "MINOR_HUGETLBFS",
        "MINOR_SHMEM",
        "EXACT_ADDRESS",
        "WP_HUGETLBFS_SHMEM",
        "WP_UNPOPULATED",
        "POISON",
        "WP_ASYNC",
        "MOVE",
    ];

    /// Whether all bits of `other` are in the set.
    #[must_use]
    pub fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The kernel's names of the bits in the set, `UFFD_FEATURE_` left out. Bits newer than this
    /// crate have no name and are left out.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        let named = Features::NAMES.iter().enumerate();
        named.filter(move |(bit, _)| self.0 >> bit & 1 == 1).map(|(_, name)| *name)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.names().collect::<Vec<_>>().join(" "))
    }
}

/// How trying one route ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The route.
    pub route: Route,
    /// `Ok`, or why not.
    pub outcome: Result<(), Refusal>,
}

/// Why the kernel refused something, in its words and in ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The `errno` value.
    pub errno: i32,
    /// The likely cause on this machine.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.reason, std::io::Error::from_raw_os_error(self.errno))
    }
}

/// What the process may do, as far as it explains refusals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Privileges {
    /// `CAP_SYS_PTRACE` is effective.
    pub sys_ptrace: bool,
    /// The process is in a user namespace of its own, where capabilities do not count for
    /// userfaultfd.
    pub user_namespace: bool,
    /// A seccomp filter is at work, as in most containers.
    pub seccomp: bool,
    /// `vm.unprivileged_userfaultfd`; `None` before Linux 5.2.
    pub unprivileged_userfaultfd: Option<bool>,
}

impl Privileges {
    /// Reads `/proc`.
    #[must_use]
    pub fn detect() -> Privileges {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_default().trim()
        };
        let effective = u64::from_str_radix(field("CapEff:"), 16).unwrap_or(0);
        let uid_map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        let identity = ["0", "0", "4294967295"];
        Privileges {
            sys_ptrace: effective >> CAP_SYS_PTRACE & 1 == 1,
            user_namespace: !uid_map.is_empty() && !uid_map.split_whitespace().eq(identity),
            seccomp: field("Seccomp:") == "2",
            unprivileged_userfaultfd: host::read_number("/proc/sys/vm/unprivileged_userfaultfd")
                .map(|value| value != 0),
        }
    }

    /// Explains why a route was refused.
    fn explain(self, route: Route, errno: i32) -> String {
        match (route, errno) {
            (Route::Device, libc::ENOENT) => {
                "there is no /dev/userfaultfd: the kernel is older than 6.1 or built without \
                 CONFIG_USERFAULTFD, or the container is not given the device"
            }
            (Route::Device, libc::EACCES) => {
                "the permissions of /dev/userfaultfd exclude this user"
            }
            (Route::Device, libc::EPERM) => {
                "the container's device rules do not allow /dev/userfaultfd"
            }
            (_, libc::EMFILE | libc::ENFILE) => "too many files are open",
            (Route::Device, _) => "/dev/userfaultfd does not give out a userfaultfd",
            (_, libc::ENOSYS) if self.seccomp => {
                "the kernel is built without CONFIG_USERFAULTFD, or a seccomp filter hides the call"
            }
            (_, libc::ENOSYS) => "the kernel is built without CONFIG_USERFAULTFD",
            (Route::SyscallUserMode, libc::EINVAL) => {
                "the kernel is older than 5.11 and has no user-mode-only faults"
            }
            (Route::Syscall, libc::EPERM)
                if self.unprivileged_userfaultfd == Some(false) && !self.sys_ptrace =>
            {
                "vm.unprivileged_userfaultfd is 0 and the process has no CAP_SYS_PTRACE"
            }
            (Route::Syscall, libc::EPERM)
                if self.unprivileged_userfaultfd == Some(false) && self.user_namespace =>
            {
                "vm.unprivileged_userfaultfd is 0, and CAP_SYS_PTRACE of a user namespace does \
                 not count"
            }
            (_, libc::EPERM | libc::EACCES) if self.seccomp => {
                "a seccomp filter forbids the call, as containers do by default"
            }
            (_, libc::EPERM | libc::EACCES) => {
                "the call is not permitted; a security module may forbid it"
            }
            _ => "the call failed",
        }
        .to_owned()
    }
}

/// What userfaultfd allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Userfaultfd {
    /// Each route of [`Route::ALL`], tried.
    pub attempts: Vec<Attempt>,
    /// The features of the kernel; empty when no route is open.
    pub features: Features,
    /// Whether this process may ask for [`Features::EVENT_FORK`].
    pub may_follow_forks: bool,
}

impl Userfaultfd {
    /// Tries every route.
    #[must_use]
    pub fn probe(privileges: Privileges) -> Userfaultfd {
        let mut attempts = Vec::with_capacity(Route::ALL.len());
        let mut found = Userfaultfd {
            attempts: Vec::new(),
            features: Features::default(),
            may_follow_forks: false,
        };
        for route in Route::ALL {
            // Asking for nothing returns all features (fs/userfaultfd.c, `userfaultfd_api`).
            let outcome = open_route(route).and_then(|fd| negotiate(&fd, Features::default()));
            if let Ok(features) = outcome {
                found.features = features;
                found.may_follow_forks |=
                    open_route(route).and_then(|fd| negotiate(&fd, Features::EVENT_FORK)).is_ok();
            }
            let outcome = outcome
                .map(|_| ())
                .map_err(|errno| Refusal { errno, reason: privileges.explain(route, errno) });
            attempts.push(Attempt { route, outcome });
        }
        found.attempts = attempts;
        found
    }

    /// The best route that is open.
    #[must_use]
    pub fn best(&self) -> Option<Route> {
        self.attempts.iter().find(|attempt| attempt.outcome.is_ok()).map(|attempt| attempt.route)
    }

    /// The refusals, each with its route, for an error message.
    #[must_use]
    pub fn refusals(&self) -> String {
        let refused = self.attempts.iter().filter_map(|attempt| {
            let refusal = attempt.outcome.as_ref().err()?;
            Some(format!("{}: {refusal}", attempt.route))
        });
        refused.collect::<Vec<_>>().join("; ")
    }
}

/// What io_uring allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uring {
    /// Whether a ring could be set up; if not, why.
    pub setup: Result<(), Refusal>,
    /// `kernel.io_uring_disabled` (Linux 6.6): 0 open, 1 only for members of a group and the
    /// privileged, 2 closed.
    pub disabled: Option<u64>,
}

impl Uring {
    /// Sets a small ring up and drops it.
    #[must_use]
    pub fn probe(privileges: Privileges) -> Uring {
        let disabled = host::read_number("/proc/sys/kernel/io_uring_disabled");
        let setup = io_uring::IoUring::new(URING_PROBE_ENTRIES).map(|_| ()).map_err(|error| {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            let reason = match (errno, disabled) {
                (libc::EPERM, Some(1)) => {
                    "kernel.io_uring_disabled is 1 and the process is not in io_uring_group"
                }
                (libc::EPERM, Some(2)) => "kernel.io_uring_disabled is 2",
                (libc::EPERM | libc::EACCES | libc::ENOSYS, _) if privileges.seccomp => {
                    "a seccomp filter forbids io_uring, as containers do by default"
                }
                (libc::ENOSYS, _) => "the kernel has no io_uring (5.1 and later have)",
                (libc::ENOMEM, _) => "RLIMIT_MEMLOCK is too small for a ring",
                _ => "io_uring_setup(2) failed",
            };
            Refusal { errno, reason: reason.to_owned() }
        });
        Uring { setup, disabled }
    }
}

/// What this kernel, machine and process allow.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    /// The kernel's release, such as `6.18.0`; empty when `/proc` does not say.
    pub kernel: String,
    /// What explains refusals.
    pub privileges: Privileges,
    /// userfaultfd.
    pub userfaultfd: Userfaultfd,
    /// io_uring.
    pub uring: Uring,
    /// Memory and its limits.
    pub memory: Memory,
    /// Limits of address space and mappings.
    pub limits: Limits,
}

impl Probe {
    /// Asks everything; takes about a millisecond.
    #[must_use]
    pub fn run() -> Probe {
        let privileges = Privileges::detect();
        Probe {
            kernel: host::read_line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            privileges,
            userfaultfd: Userfaultfd::probe(privileges),
            uring: Uring::probe(privileges),
            memory: Memory::detect(),
            limits: Limits::detect(),
        }
    }
}

/// Reserves `len` bytes of writable address space, uncommitted, and gives them back: whether the
/// runtime will get its span.
///
/// # Errors
/// The `errno` value: `ENOMEM` when `RLIMIT_AS` or `vm.overcommit_memory=2` stand in the way.
pub fn try_reserve(len: ByteCount) -> Result<(), i32> {
    let mapped = inherited::map(len.as_usize(), 1).map_err(raw)?;
    // SAFETY: exactly the mapping made above, which nobody else knows of.
    unsafe { inherited::unmap(mapped.addr().get(), len.as_usize()) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_named_by_their_bits() {
        let features = Features(Features::MOVE.0 | Features::SIGBUS.0 | 1 << 40);
        assert_eq!(features.to_string(), "SIGBUS MOVE");
        assert!(features.contains(Features::MOVE));
        assert!(!features.contains(Features::POISON));
        assert_eq!(
            Features(Features::WP_ASYNC.0 | Features::POISON.0).to_string(),
            "POISON WP_ASYNC"
        );
    }

    #[test]
    fn a_refused_call_is_explained_by_what_the_process_lacks() {
        let plain = Privileges { unprivileged_userfaultfd: Some(false), ..Privileges::default() };
        let reason = plain.explain(Route::Syscall, libc::EPERM);
        assert!(reason.contains("no CAP_SYS_PTRACE"), "{reason}");
        let boxed = Privileges { seccomp: true, ..plain };
        let reason = boxed.explain(Route::SyscallUserMode, libc::EPERM);
        assert!(reason.contains("seccomp"), "{reason}");
        let root_of_namespace = Privileges { sys_ptrace: true, user_namespace: true, ..plain };
        let reason = root_of_namespace.explain(Route::Syscall, libc::EPERM);
        assert!(reason.contains("user namespace"), "{reason}");
        let reason = plain.explain(Route::Device, libc::EACCES);
        assert!(reason.contains("permissions"), "{reason}");
    }

    #[test]
    fn the_best_route_is_the_first_that_is_open() {
        let refused = |route| Attempt {
            route,
            outcome: Err(Refusal { errno: libc::EPERM, reason: "no".to_owned() }),
        };
        let mut found = Userfaultfd {
            attempts: vec![
                refused(Route::Device),
                refused(Route::Syscall),
                Attempt { route: Route::SyscallUserMode, outcome: Ok(()) },
            ],
            features: Features::default(),
            may_follow_forks: false,
        };
        assert_eq!(found.best(), Some(Route::SyscallUserMode));
        assert!(found.refusals().starts_with("/dev/userfaultfd: no (Operation not permitted"));
        found.attempts.pop();
        assert_eq!(found.best(), None);
    }
}
