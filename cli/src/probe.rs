//! Findings of `farheap doctor`: the library's own probe, with the causes of refusals, and limits
//! that explain what is slow.

use farheap::ByteCount;
use farheap::probe::{self, Memory, NumaNode, Route};
use std::path::Path;
use std::{fmt, fs};

/// Bit of `CAP_SYS_PTRACE` in a capability set.
const CAP_SYS_PTRACE: u32 = 19;

/// A set of userfaultfd feature bits (`UFFD_FEATURE_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Features(pub(crate) u64);

impl Features {
    /// A fault raises `SIGBUS` in the faulting thread instead of an event.
    pub(crate) const SIGBUS: Features = Features(1 << 7);
    /// `UFFDIO_POISON` (Linux 6.6).
    pub(crate) const POISON: Features = Features(1 << 14);
    /// `UFFDIO_MOVE` (Linux 6.8).
    pub(crate) const MOVE: Features = Features(1 << 16);

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

    /// True if all bits of `other` are in the set.
    pub(crate) fn contains(self, other: Features) -> bool {
        self.0 & other.0 == other.0
    }

    /// The kernel's names of the bits in the set, `UFFD_FEATURE_` left out. Bits newer than this
    /// crate have no name and are left out.
    pub(crate) fn names(self) -> impl Iterator<Item = &'static str> {
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
pub(crate) struct Attempt {
    /// The route.
    pub(crate) route: Route,
    /// `Ok`, or why not.
    pub(crate) outcome: Result<(), Refusal>,
}

/// Why the kernel refused something, in its words and in ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// The `errno` value.
    pub(crate) errno: i32,
    /// The likely cause on this machine.
    pub(crate) reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.reason, std::io::Error::from_raw_os_error(self.errno))
    }
}

/// Rights of the process, as far as they explain refusals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Privileges {
    /// `CAP_SYS_PTRACE` is effective.
    pub(crate) sys_ptrace: bool,
    /// The process is in a user namespace of its own, where capabilities do not count for
    /// userfaultfd.
    pub(crate) user_namespace: bool,
    /// A seccomp filter is at work, as in most containers.
    pub(crate) seccomp: bool,
    /// `vm.unprivileged_userfaultfd`; `None` before Linux 5.2.
    pub(crate) unprivileged_userfaultfd: Option<bool>,
}

impl Privileges {
    /// Reads `/proc`.
    pub(crate) fn detect() -> Privileges {
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
            unprivileged_userfaultfd: read_number("/proc/sys/vm/unprivileged_userfaultfd")
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

/// Abilities of userfaultfd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Userfaultfd {
    /// Each route of [`Route::ALL`], tried.
    pub(crate) attempts: Vec<Attempt>,
    /// The features of the kernel; empty when no route is open.
    pub(crate) features: Features,
}

impl Userfaultfd {
    /// Each route as it was tried, and why it was refused.
    pub(crate) fn of(routes: &[(Route, Result<u64, i32>)], privileges: Privileges) -> Userfaultfd {
        let attempt = |(route, outcome): &(Route, Result<u64, i32>)| {
            let explain = |errno| Refusal { errno, reason: privileges.explain(*route, errno) };
            Attempt { route: *route, outcome: outcome.map(drop).map_err(explain) }
        };
        let open = routes.iter().find_map(|(_, outcome)| outcome.ok());
        Userfaultfd {
            attempts: routes.iter().map(attempt).collect(),
            features: Features(open.unwrap_or_default()),
        }
    }

    /// The best route that is open.
    pub(crate) fn best(&self) -> Option<Route> {
        self.attempts.iter().find(|attempt| attempt.outcome.is_ok()).map(|attempt| attempt.route)
    }
}

/// Abilities of io_uring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Uring {
    /// `Ok` if a ring could be set up, else why not.
    pub(crate) setup: Result<(), Refusal>,
    /// `kernel.io_uring_disabled` (Linux 6.6): 0 open, 1 only for members of a group and the
    /// privileged, 2 closed.
    pub(crate) disabled: Option<u64>,
}

impl Uring {
    /// Why a ring could not be set up, if so.
    fn of(ring: Result<(), i32>, privileges: Privileges) -> Uring {
        let disabled = read_number("/proc/sys/kernel/io_uring_disabled");
        let setup = ring.map_err(|errno| {
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

/// Limits of address space, locked memory and mappings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Soft `RLIMIT_AS`; `None` for unlimited.
    pub(crate) address_space: Option<ByteCount>,
    /// Soft `RLIMIT_MEMLOCK`; `None` for unlimited.
    pub(crate) locked: Option<ByteCount>,
    /// `vm.max_map_count`.
    pub(crate) map_count: Option<u64>,
    /// `vm.overcommit_memory`: 0 heuristic, 1 always, 2 never.
    pub(crate) overcommit: Option<u64>,
    /// Transparent huge pages: `always`, `madvise` or `never`; `None` when the kernel has none.
    pub(crate) thp: Option<String>,
    /// How hard an allocation tries for a huge page: `always`, `defer`, `defer+madvise`,
    /// `madvise` or `never`.
    pub(crate) thp_defrag: Option<String>,
}

impl Limits {
    /// Reads `/proc` and `/sys`.
    pub(crate) fn detect() -> Limits {
        let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let chosen = |file: &str| {
            let path = Path::new("/sys/kernel/mm/transparent_hugepage").join(file);
            chosen_word(&fs::read_to_string(path).ok()?)
        };
        Limits {
            address_space: soft_limit(&limits, "Max address space"),
            locked: soft_limit(&limits, "Max locked memory"),
            map_count: read_number("/proc/sys/vm/max_map_count"),
            overcommit: read_number("/proc/sys/vm/overcommit_memory"),
            thp: chosen("enabled"),
            thp_defrag: chosen("defrag"),
        }
    }
}

/// Reads a file's first line.
pub(crate) fn read_line(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok()?.lines().next().map(str::to_owned)
}

/// Reads a file that holds one number.
pub(crate) fn read_number(path: impl AsRef<Path>) -> Option<u64> {
    read_line(path)?.trim().parse().ok()
}

/// The soft value of a line of `/proc/self/limits`; `None` for unlimited.
fn soft_limit(limits: &str, name: &str) -> Option<ByteCount> {
    let line = limits.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok().map(ByteCount)
}

/// The word in brackets, as in `always [madvise] never`.
fn chosen_word(text: &str) -> Option<String> {
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Abilities of this kernel, machine and process.
#[derive(Clone, Debug)]
pub(crate) struct Probe {
    /// The kernel's release, such as `6.18.0`; empty when `/proc` does not say.
    pub(crate) kernel: String,
    /// Reasons of refusals.
    pub(crate) privileges: Privileges,
    pub(crate) userfaultfd: Userfaultfd,
    pub(crate) uring: Uring,
    /// Memory and its limits.
    pub(crate) memory: Memory,
    /// NUMA nodes with memory.
    pub(crate) nodes: Vec<NumaNode>,
    /// Limits of address space and mappings.
    pub(crate) limits: Limits,
}

impl Probe {
    /// Asks everything; takes about a millisecond.
    pub(crate) fn run() -> Probe {
        let privileges = Privileges::detect();
        let routes = Route::ALL.map(|route| (route, route.features()));
        Probe {
            kernel: read_line("/proc/sys/kernel/osrelease").unwrap_or_default(),
            privileges,
            userfaultfd: Userfaultfd::of(&routes, privileges),
            uring: Uring::of(probe::try_ring(), privileges),
            memory: Memory::detect(),
            nodes: NumaNode::all(),
            limits: Limits::detect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_tried_and_each_refusal_has_a_reason() {
        let found = Probe::run().userfaultfd;
        let routes: Vec<Route> = found.attempts.iter().map(|attempt| attempt.route).collect();
        assert_eq!(routes, Route::ALL);
        for refusal in found.attempts.iter().filter_map(|attempt| attempt.outcome.as_ref().err()) {
            assert!(refusal.errno > 0 && !refusal.reason.is_empty(), "{refusal:?}");
        }
        // Where a route is open, the kernel names what it can do: SIGBUS since 4.14.
        assert_eq!(found.best().is_some(), found.features.contains(Features::SIGBUS), "{found:?}");
    }

    #[test]
    fn features_are_named_by_their_bits() {
        let features = Features(Features::MOVE.0 | Features::SIGBUS.0 | 1 << 40);
        assert_eq!(features.to_string(), "SIGBUS MOVE");
        assert!(features.contains(Features::MOVE));
        assert!(!features.contains(Features::POISON));
        assert_eq!(Features(1 << 15 | Features::POISON.0).to_string(), "POISON WP_ASYNC");
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
        };
        assert_eq!(found.best(), Some(Route::SyscallUserMode));
        found.attempts.pop();
        assert_eq!(found.best(), None);
    }

    #[test]
    fn limits_and_choices_are_read_from_their_lines() {
        let limits = "Limit  Soft Limit  Hard Limit  Units\n\
                      Max locked memory         8388608              unlimited            bytes\n\
                      Max address space         unlimited            unlimited            bytes\n";
        assert_eq!(soft_limit(limits, "Max locked memory"), Some(ByteCount::mib(8)));
        assert_eq!(soft_limit(limits, "Max address space"), None);
        assert_eq!(chosen_word("always [madvise] never\n").as_deref(), Some("madvise"));
        assert_eq!(chosen_word("none"), None);
    }
}
