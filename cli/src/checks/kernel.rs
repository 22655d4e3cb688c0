//! Judges the kernel: userfaultfd, io_uring, memory and limits.

use super::{Check, Configuration, Verdict};
use crate::probe::{Features, Limits, Privileges, Probe, Refusal, Uring, Userfaultfd};
use farheap::ByteCount;
use farheap::config::FaultMode;
use farheap::probe::{Memory, NumaNode, Route, try_reserve};
use farheap::region::RegionConfig;

/// The first kernel with faults from user mode only, which everybody may use.
const KERNEL_MIN: (u32, u32) = (5, 11);
/// The kernel's own default of `vm.max_map_count`.
const MAP_COUNT_MIN: u64 = 65_530;
/// Enough for a ring and its registered buffers; the kernel's default since 5.16.
const LOCKED_MIN: ByteCount = ByteCount::mib(8);

const CONTAINER: &str = "in a container, start it with:";
/// With the calls of farheap added to the runtime's own profile.
const BY_PROFILE: &str = "farheap doctor --seccomp --base default.json >farheap.json; \
     docker run --security-opt seccomp=farheap.json IMAGE";

/// The kernel's release.
pub(super) fn release(probe: &Probe) -> Check {
    const NAME: &str = "kernel";
    let mut numbers = probe.kernel.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse::<u32>().ok();
    match (next(), next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_MIN => {
            Check::new(NAME, Verdict::Pass, format!("Linux {}", probe.kernel))
        }
        (Some(_), Some(_)) => {
            Check::new(NAME, Verdict::Fail, format!("Linux {} is too old", probe.kernel))
                .meaning("farheap needs Linux 5.11 or later, and is fastest from 6.8 on")
        }
        _ => Check::new(NAME, Verdict::Warn, "the release is unknown: /proc is not mounted"),
    }
}

/// The routes to a userfaultfd.
pub(super) fn userfaultfd(probe: &Probe, config: Option<&Configuration>) -> Check {
    const NAME: &str = "userfaultfd";
    let mode = config.map(|config| config.region.mode).unwrap_or_default();
    let required = mode == FaultMode::Kernel;
    let best = probe.userfaultfd.best();
    let mut check = match best {
        Some(route) if route.has_kernel_faults() => {
            return Check::new(NAME, Verdict::Pass, format!("by {route}, kernel-mode faults too"));
        }
        Some(route) => {
            let verdict = if required { Verdict::Fail } else { Verdict::Warn };
            let check = Check::new(NAME, verdict, format!("only by {route}")).meaning(
                "with user-mode-only faults a system call fails with EFAULT when it reads or \
                 writes far memory that is not resident",
            );
            let check = check.meaning("`farheap run` refuses every program");
            match mode {
                FaultMode::Kernel => check.meaning("`mode:kernel` asks for kernel-mode faults"),
                FaultMode::Auto => check.meaning(
                    "no allocation goes far because of its size; the handle `Far`, far scopes and \
                     temporary memory do (`mode:user` sends sizes far all the same)",
                ),
                _ => check,
            }
        }
        None => Check::new(NAME, Verdict::Fail, "not available")
            .meaning("farheap cannot serve page faults and refuses to start"),
    };
    let mut repairs: Vec<(&str, &str)> = Vec::new();
    for attempt in &probe.userfaultfd.attempts {
        let Err(refusal) = &attempt.outcome else { continue };
        check = check.meaning(format!("{}: {refusal}", attempt.route));
        repairs.extend(route_repairs(attempt.route, refusal, probe.privileges));
    }
    repairs.dedup();
    repairs.into_iter().fold(check, |check, (when, command)| check.repair_when(when, command))
}

/// Commands that open a route which was refused.
fn route_repairs(
    route: Route,
    refusal: &Refusal,
    privileges: Privileges,
) -> Vec<(&'static str, &'static str)> {
    const BY_DEVICE: (&str, &str) = (CONTAINER, "docker run --device /dev/userfaultfd IMAGE");
    match (route, refusal.errno) {
        (Route::Device, libc::EACCES) => vec![
            ("until the next boot:", "sudo setfacl -m u:$USER:rw /dev/userfaultfd"),
            (
                "for good:",
                "echo 'KERNEL==\"userfaultfd\", MODE=\"0666\"' | \
                 sudo tee /etc/udev/rules.d/60-userfaultfd.rules && \
                 sudo udevadm control --reload && sudo udevadm trigger /dev/userfaultfd",
            ),
        ],
        (Route::Device, libc::ENOENT | libc::EPERM) => vec![BY_DEVICE],
        (Route::Syscall | Route::SyscallUserMode, libc::EPERM | libc::EACCES | libc::ENOSYS)
            if privileges.seccomp =>
        {
            vec![(CONTAINER, BY_PROFILE)]
        }
        (Route::Syscall, libc::EPERM) => vec![
            ("for every process:", "sudo sysctl vm.unprivileged_userfaultfd=1"),
            ("for one program:", "sudo setcap cap_sys_ptrace+ep BINARY"),
        ],
        _ => Vec::new(),
    }
}

const NO_MOVE: &str = "pages are copied out instead of moved, and what a direct or asynchronous read, or a \
     registered buffer of io_uring, brings into far memory is lost unless it is pinned";

/// The features of userfaultfd; nothing when no userfaultfd can be opened to ask.
pub(super) fn features(found: &Userfaultfd, config: Option<&Configuration>) -> Option<Check> {
    const NAME: &str = "userfaultfd features";
    found.best()?;
    let has = |feature| found.features.contains(feature);
    let mut check = Check::new(NAME, Verdict::Pass, found.features.to_string());
    let in_thread = config.is_some_and(|config| config.region.mode == FaultMode::InThread);
    for (feature, from, required, meaning) in [
        (Features::MOVE, "6.8", false, NO_MOVE),
        (Features::SIGBUS, "4.14", in_thread, "`mode:in_thread` does not work"),
        (Features::POISON, "6.6", false, "a lost page cannot be marked for the kernel"),
    ] {
        if has(feature) {
            continue;
        }
        check.verdict = check.verdict.max(if required { Verdict::Fail } else { Verdict::Warn });
        check = check.meaning(format!("no {feature} (Linux {from} has it): {meaning}"));
    }
    Some(check)
}

/// io_uring.
pub(super) fn uring(found: &Uring) -> Check {
    const NAME: &str = "io_uring";
    let Err(refusal) = &found.setup else {
        return Check::new(NAME, Verdict::Pass, "a ring can be set up");
    };
    let check = Check::new(NAME, Verdict::Warn, refusal.to_string())
        .meaning("the store is read and written by system calls, one request at a time per thread");
    match (refusal.errno, found.disabled) {
        (_, Some(1 | 2)) => check.repair("sudo sysctl kernel.io_uring_disabled=0"),
        (libc::ENOMEM, _) => check.repair("ulimit -l unlimited"),
        (libc::EPERM | libc::EACCES | libc::ENOSYS, _) => check.repair_when(CONTAINER, BY_PROFILE),
        _ => check,
    }
}

/// Memory available, and whether the limit fits.
pub(super) fn memory(memory: &Memory, config: Option<&Configuration>) -> Check {
    const NAME: &str = "memory";
    let Some(available) = memory.available() else {
        return Check::new(NAME, Verdict::Warn, "unknown: /proc/meminfo cannot be read")
            .meaning("a limit in percent does not work; give bytes");
    };
    let found = match &memory.cgroup {
        Some(limit) if limit.bytes == available => {
            format!("{available}, the limit in {}", limit.file.display())
        }
        _ => format!("{available}, all of the machine's; no control group limits it"),
    };
    // Not the limit of the process: what nobody has named follows what the group leaves.
    match config.and_then(|config| memory.objection(config.region.limit)) {
        Some(why) => Check::new(NAME, Verdict::Warn, found)
            .meaning(format!("{why}: the kernel may end the process before farheap makes room"))
            .repair("export FARHEAP_CONF=limit:auto"),
        None => Check::new(NAME, Verdict::Pass, found),
    }
}

/// NUMA nodes, which a tier can be bound to.
pub(super) fn nodes(nodes: &[NumaNode], config: Option<&Configuration>) -> Check {
    const NAME: &str = "NUMA nodes";
    let one = |node: &NumaNode| {
        let without = if node.has_processors { "" } else { ", without processors" };
        format!("{} ({}, {} free{without})", node.number, node.total, node.free)
    };
    let found = match nodes {
        [] => "unknown: /sys does not say".to_owned(),
        [only] => format!("{}, the only one: `node` changes nothing here", one(only)),
        all => all.iter().map(one).collect::<Vec<_>>().join("; "),
    };
    let bound = config.and_then(|config| config.region.node);
    let asked = nodes.iter().find(|node| Some(node.number) == bound);
    match (asked, config) {
        (Some(node), Some(config)) if config.region.limit > node.free => {
            Check::new(NAME, Verdict::Warn, found)
                .meaning(format!(
                    "node {} has {} free, less than the limit of {}: where it has none left the kernel ends \
                     the process",
                    node.number,
                    node.free,
                    config.region.limit
                ))
                .repair_when("for example:", "export FARHEAP_CONF=node:0,far_limit:25%")
        }
        _ => Check::new(NAME, Verdict::Pass, found),
    }
}

/// Part of the configured limit that tables take.
pub(super) fn tables(config: &Configuration) -> Check {
    const NAME: &str = "tables";
    let region = &config.region;
    let gib = ByteCount::gib(1);
    let per_gib = ByteCount((region.tables_max(ByteCount::gib(1024)).get()) / 1024);
    let most = region.far_max();
    let found = format!(
        "up to {per_gib} for each GiB of far memory: at most {most} of it under a limit of {}",
        region.limit
    );
    match config.size("capacity") {
        Some(capacity) if capacity > most => Check::new(NAME, Verdict::Warn, found)
            .meaning(format!("allocations are refused before a capacity of {capacity} is used")),
        _ if most < gib => {
            Check::new(NAME, Verdict::Warn, found).meaning("a larger limit holds more of them")
        }
        _ => Check::new(NAME, Verdict::Pass, found),
    }
}

/// Swap.
pub(super) fn swap(memory: &Memory) -> Check {
    const NAME: &str = "swap";
    if !memory.swap {
        return Check::new(NAME, Verdict::Pass, "off");
    }
    Check::new(NAME, Verdict::Warn, "on")
        .meaning("the kernel may swap out what farheap keeps resident, and page twice")
        .repair_when("for one program:", "systemd-run --user --scope -p MemorySwapMax=0 BINARY")
        .repair_when("for the machine:", "sudo swapoff -a")
}

/// Transparent huge pages.
pub(super) fn huge_pages(limits: &Limits) -> Check {
    const NAME: &str = "huge pages";
    let defrag = limits.thp_defrag.as_deref().unwrap_or("unknown");
    match limits.thp.as_deref() {
        Some(mode @ ("always" | "madvise")) => {
            Check::new(NAME, Verdict::Pass, format!("{mode} (defrag {defrag})"))
        }
        Some(mode) => Check::new(NAME, Verdict::Warn, mode)
            .meaning("resident far memory is mapped in small pages: more TLB misses")
            .repair("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        None => Check::new(NAME, Verdict::Warn, "the kernel has none")
            .meaning("resident far memory is mapped in small pages: more TLB misses"),
    }
}

/// Checks that the span can be reserved.
pub(super) fn address_space(limits: &Limits, config: Option<&Configuration>) -> Check {
    let span = config.map_or_else(|| RegionConfig::new().span, |config| config.region.span);
    reservation(limits, span, try_reserve(span))
}

fn reservation(limits: &Limits, span: ByteCount, outcome: Result<(), i32>) -> Check {
    const NAME: &str = "address space";
    let Err(errno) = outcome else {
        return Check::new(NAME, Verdict::Pass, format!("{span} can be reserved"));
    };
    let error = std::io::Error::from_raw_os_error(errno);
    let mut check = Check::new(NAME, Verdict::Fail, format!("{span} cannot be reserved: {error}"));
    if let Some(limit) = limits.address_space {
        check = check.meaning(format!("the address space is limited to {limit}"));
        check = check.repair("ulimit -v unlimited");
    }
    if limits.overcommit == Some(2) {
        check = check.meaning("vm.overcommit_memory is 2: reservations count as memory");
        check = check.repair("sudo sysctl vm.overcommit_memory=0");
    }
    check.repair_when("or reserve less:", "export FARHEAP_CONF=span:64GiB")
}

/// How many mappings the process may have.
pub(super) fn map_count(limits: &Limits) -> Check {
    const NAME: &str = "mappings";
    match limits.map_count {
        Some(count) if count < MAP_COUNT_MIN => {
            Check::new(NAME, Verdict::Warn, format!("vm.max_map_count is {count}"))
                .meaning("a fragmented far heap may run out of mappings")
                .repair(format!("sudo sysctl vm.max_map_count={MAP_COUNT_MIN}"))
        }
        Some(count) => Check::new(NAME, Verdict::Pass, format!("up to {count}")),
        None => Check::new(NAME, Verdict::Warn, "vm.max_map_count cannot be read"),
    }
}

/// How much memory the process may lock.
pub(super) fn locked_memory(limits: &Limits) -> Check {
    const NAME: &str = "locked memory";
    match limits.locked {
        Some(limit) if limit < LOCKED_MIN => {
            Check::new(NAME, Verdict::Warn, format!("limited to {limit}"))
                .meaning("I/O buffers cannot be registered with io_uring: slower")
                .repair("ulimit -l unlimited")
        }
        Some(limit) => Check::new(NAME, Verdict::Pass, format!("up to {limit}")),
        None => Check::new(NAME, Verdict::Pass, "unlimited"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe::Attempt;
    use farheap::probe::CgroupLimit;

    fn refused(route: Route, errno: i32) -> Attempt {
        Attempt { route, outcome: Err(Refusal { errno, reason: "refused".to_owned() }) }
    }

    /// This machine's probe with other routes.
    fn probe(attempts: Vec<Attempt>) -> Probe {
        let mut probe = Probe::run();
        probe.privileges = Privileges::default();
        probe.userfaultfd.attempts = attempts;
        probe
    }

    fn commands(check: &Check) -> Vec<&str> {
        check.repairs.iter().map(|repair| repair.command.as_str()).collect()
    }

    #[test]
    fn user_mode_faults_warn_of_efault_and_fail_where_kernel_mode_is_required() {
        let probe = probe(vec![
            refused(Route::Device, libc::EACCES),
            refused(Route::Syscall, libc::EPERM),
            Attempt { route: Route::SyscallUserMode, outcome: Ok(()) },
        ]);
        let check = userfaultfd(&probe, None);
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.meaning[0].contains("fails with EFAULT"), "{check:?}");
        assert!(check.meaning[1].contains("`farheap run` refuses"), "{check:?}");
        let local = |check: &Check| check.meaning[2].contains("goes far because of its size");
        assert!(local(&check), "{check:?}");
        for text in ["far_limit:64MiB,mode:user", "far_limit:64MiB,mode:in_thread"] {
            let config = Configuration::parse(text).expect(text);
            assert!(!local(&userfaultfd(&probe, Some(&config))), "{text}");
        }
        assert!(commands(&check).contains(&"sudo setfacl -m u:$USER:rw /dev/userfaultfd"));
        assert!(commands(&check).contains(&"sudo sysctl vm.unprivileged_userfaultfd=1"));
        let strict = Configuration::parse("far_limit:64MiB,mode:kernel").expect("a configuration");
        assert_eq!(userfaultfd(&probe, Some(&strict)).verdict, Verdict::Fail);
    }

    #[test]
    fn a_container_without_any_route_is_told_how_to_be_started() {
        let mut probe = probe(vec![
            refused(Route::Device, libc::ENOENT),
            refused(Route::Syscall, libc::EPERM),
            refused(Route::SyscallUserMode, libc::EPERM),
        ]);
        probe.privileges.seccomp = true;
        let check = userfaultfd(&probe, None);
        assert_eq!(check.verdict, Verdict::Fail);
        assert_eq!(commands(&check), ["docker run --device /dev/userfaultfd IMAGE", BY_PROFILE]);
    }

    #[test]
    fn missing_features_fail_only_what_the_configuration_asks_for() {
        let found = Userfaultfd {
            attempts: vec![Attempt { route: Route::Device, outcome: Ok(()) }],
            features: Features(Features::SIGBUS.0 | Features::POISON.0),
        };
        let verdict = |text: &str| {
            let config = Configuration::parse(text).expect(text);
            features(&found, Some(&config)).expect("a route is open").verdict
        };
        assert_eq!(verdict("far_limit:64MiB"), Verdict::Warn);
        assert_eq!(verdict("far_limit:64MiB"), Verdict::Warn);
    }

    #[test]
    fn without_io_uring_there_are_system_calls() {
        let refusal = Refusal { errno: libc::EPERM, reason: "refused".to_owned() };
        let found = Uring { setup: Err(refusal), disabled: Some(2) };
        let check = uring(&found);
        assert_eq!(check.verdict, Verdict::Warn);
        assert_eq!(commands(&check), ["sudo sysctl kernel.io_uring_disabled=0"]);
    }

    #[test]
    fn a_limit_above_the_control_groups_warns() {
        let mut found = Memory::default();
        let (bytes, used) = (ByteCount::gib(1), ByteCount::ZERO);
        found.cgroup = Some(CgroupLimit { bytes, file: "/x/memory.max".into(), used });
        found.fullest = found.cgroup.clone();
        let config = |text: &str| Configuration::parse(text).expect(text);
        assert_eq!(memory(&found, Some(&config("limit:959MiB"))).verdict, Verdict::Pass);
        assert_eq!(memory(&found, Some(&config("limit:960MiB"))).verdict, Verdict::Warn);
        assert!(memory(&found, None).found.contains("/x/memory.max"));
        let outer = CgroupLimit { bytes, file: "/y".into(), used: ByteCount::mib(900) };
        found.fullest = Some(outer);
        let check = memory(&found, Some(&config("limit:512MiB")));
        assert_eq!(check.verdict, Verdict::Warn);
        assert!(check.meaning[0].contains("115.2 MiB"), "{:?}", check.meaning);
        let check = memory(&found, Some(&config("limit:512MiB,far_limit:64MiB")));
        assert_eq!(check.verdict, Verdict::Pass, "far memory gives way: {:?}", check.meaning);
    }

    #[test]
    fn tables_are_told_per_gib_and_bound_what_can_be_allocated() {
        let check = |text: &str| tables(&Configuration::parse(text).expect(text));
        let small = check("far_limit:8MiB,capacity:2GiB");
        assert_eq!(small.verdict, Verdict::Warn);
        assert!(small.meaning[0].contains("2.0 GiB"), "{small:?}");
        let large = check("far_limit:1GiB,capacity:40GiB");
        assert_eq!(large.verdict, Verdict::Pass, "{large:?}");
        assert!(large.found.contains("for each GiB"), "{large:?}");
    }

    #[test]
    fn a_refused_reservation_names_each_limit_with_its_repair() {
        let limits = Limits {
            overcommit: Some(2),
            address_space: Some(ByteCount::gib(4)),
            ..Limits::default()
        };
        let check = reservation(&limits, RegionConfig::new().span, Err(libc::ENOMEM));
        assert_eq!(check.verdict, Verdict::Fail);
        assert_eq!(check.meaning.len(), 2);
        assert!(commands(&check).contains(&"sudo sysctl vm.overcommit_memory=0"));
        assert!(commands(&check).contains(&"ulimit -v unlimited"));
        assert_eq!(reservation(&limits, RegionConfig::new().span, Ok(())).verdict, Verdict::Pass);
    }
}
