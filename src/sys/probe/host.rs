//! Memory and what limits it, read from `/proc` and `/sys`.
//!
//! The parsers take text, so that tests give them other machines'. Used by [`super`].

use crate::base::units::ByteCount;
use crate::sys::fork::Private;
use crate::sys::messages;
use crate::sys::statm::{Statm, mem_info, read_text};
use libc::RLIM_INFINITY;
use nix::sys::resource::{Resource, getrlimit};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Limits from here on mean "none": control groups of version 1 say so with the largest multiple
/// of a page below 2^63.
const UNLIMITED_FROM: u64 = 1 << 62;

/// The memory of the machine and how much of it the process may use.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// `MemTotal`; `None` when `/proc` is not mounted.
    pub total: Option<ByteCount>,
    /// The tightest limit among the process's control groups and their ancestors.
    pub cgroup: Option<CgroupLimit>,
    /// Of the same limits, the one that leaves least; others may share a group.
    pub fullest: Option<CgroupLimit>,
    /// Memory of the machine that can be had without swapping: `MemAvailable` of `/proc/meminfo`.
    pub left: Option<ByteCount>,
    /// Resident bytes of this process, without those of files, which a group's use leaves out, too.
    pub resident: ByteCount,
    /// True if the machine swaps.
    pub swap: bool,
}

/// The memory limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupLimit {
    /// The limit.
    pub bytes: ByteCount,
    /// The file it stands in: `memory.max` or `memory.high`, or `memory.limit_in_bytes` in
    /// version 1.
    pub file: PathBuf,
    /// Bytes that the group uses, without caches of files, which the kernel takes back first.
    pub used: ByteCount,
}

impl CgroupLimit {
    /// Bytes that the group can still take.
    #[must_use]
    pub fn left(&self) -> ByteCount {
        ByteCount(self.bytes.0.saturating_sub(self.used.0))
    }

    /// Bytes that a process may have of the group when it is alone there.
    pub(crate) fn share(&self) -> ByteCount {
        ByteCount(self.bytes.0 - margin(self.bytes.0).min(self.bytes.0))
    }
}

/// Bytes left free of so much memory of a group: the kernel charges more than what is resident to it, 1.5 and 1 % in
/// groups of 96 and 256 MiB (examples/limit), mostly page tables; and other processes may need some at once.
fn margin(bytes: u64) -> u64 {
    const LEAST: u64 = 1 << 20;
    bytes / 16 + LEAST
}

/// The use of a control group. A look allocates nothing.
#[derive(Debug)]
pub(crate) struct GroupUse {
    current: PathBuf,
    /// That file, while it can be read: to open it takes half of a look.
    open: Option<Private<File>>,
    statistics: PathBuf,
    /// Bytes, at the last look, and what of them caches files: the kernel takes that back first.
    charged: u64,
    of_files: u64,
    /// Pages of files that the kernel has taken from the group although they were in use: they were read again soon.
    refaults: u64,
}

impl GroupUse {
    /// The use of the group with this folder, in either version.
    pub(crate) fn of(dir: &Path) -> GroupUse {
        let current = ["memory.current", "memory.usage_in_bytes"].map(|name| dir.join(name));
        let current = current.into_iter().find(|file| file.exists()).unwrap_or_default();
        let statistics = dir.join("memory.stat");
        let (open, charged, of_files, refaults) = (None, 0, 0, 0);
        let mut new = GroupUse { current, open, statistics, charged, of_files, refaults };
        new.look();
        new.look_at_files();
        new
    }

    /// Looks at what is charged. What is open of a group that has gone cannot be read: there may be another one of its
    /// name by now.
    pub(crate) fn look(&mut self) {
        let mut text = [0; 32];
        let open = self.open.as_ref().filter(|file| file.is_here());
        let len = open.and_then(|file| file.read_at(&mut text, 0).ok()).or_else(|| {
            self.open = File::open(&self.current).ok().map(Private::new);
            self.open.as_ref()?.read_at(&mut text, 0).ok()
        });
        let number = len.and_then(|len| std::str::from_utf8(&text[..len]).ok());
        self.charged = number.and_then(|text| text.trim().parse().ok()).unwrap_or(self.charged);
    }

    /// Looks at what of it caches files; takes 10 us and more.
    pub(crate) fn look_at_files(&mut self) {
        let mut text = [0; 16 << 10];
        let Some(text) = read_text(&self.statistics, &mut text) else { return };
        let field = |name| group_field(text, name).unwrap_or(0);
        self.of_files = field("inactive_file") + field("active_file");
        self.refaults = field("workingset_refault_file");
    }

    /// Pages of files that came back after they had been taken from the group.
    #[cfg(feature = "heap")]
    pub(crate) fn refaults(&self) -> u64 {
        self.refaults
    }

    /// Bytes that the group uses, without caches of files.
    pub(crate) fn used(&self) -> ByteCount {
        ByteCount(self.charged.saturating_sub(self.of_files))
    }
}

impl Memory {
    /// Reads `/proc` and the control groups.
    #[must_use]
    pub fn detect() -> Memory {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let groups = group_dirs(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"));
        let limits: Vec<_> = groups.iter().flat_map(limits).collect();
        let meminfo = read("/proc/meminfo");
        Memory {
            total: mem_info(&meminfo, "MemTotal:"),
            left: mem_info(&meminfo, "MemAvailable:"),
            resident: Statm::open().ok().and_then(|statm| statm.anonymous()).unwrap_or_default(),
            cgroup: limits.iter().min_by_key(|limit| limit.bytes).cloned(),
            fullest: limits.into_iter().min_by_key(CgroupLimit::left),
            swap: read("/proc/swaps").lines().count() > 1,
        }
    }

    /// How much memory the process may use: the smaller of machine and control group.
    #[must_use]
    pub fn available(&self) -> Option<ByteCount> {
        let group = self.cgroup.as_ref().map(|limit| limit.bytes);
        self.total.into_iter().chain(group).min()
    }

    /// The limit of a process that may have what there is: of a control group all but a margin, of what the machine has left
    /// half.
    pub(crate) fn auto_limit(&self) -> Option<ByteCount> {
        let of_group = self.cgroup.as_ref().map(CgroupLimit::share);
        let of_machine =
            self.left.or(self.total).map(|left| ByteCount(self.resident.0 + left.0 / 2));
        of_group.into_iter().chain(of_machine).min()
    }

    /// Bytes that this process can have resident in its control groups at the moment.
    pub(crate) fn room(&self) -> Option<ByteCount> {
        self.fullest.as_ref().map(|group| self.room_in(group))
    }

    fn room_in(&self, group: &CgroupLimit) -> ByteCount {
        let left = group.left().0;
        ByteCount(self.resident.0 + left.saturating_sub(margin(left)))
    }

    /// Why `limit` cannot be reached, if so: the kernel's OOM killer ends the process, or the kernel
    /// throttles it, before as many bytes are resident.
    #[must_use]
    pub fn objection(&self, limit: ByteCount) -> Option<String> {
        if let Some(group) = self.fullest.as_ref().filter(|group| limit > self.room_in(group)) {
            return Some(format!(
                "the limit of {limit} is more than the {} that the process can have in its control group \
                 ({} in {}, of which {} are in use)",
                self.room_in(group),
                group.bytes,
                group.file.display(),
                group.used
            ));
        }
        let total = self.total.filter(|total| limit > *total)?;
        Some(format!("the limit of {limit} is more than the machine's memory, {total}"))
    }

    /// Prints what speaks against a limit.
    pub(crate) fn warn_of(limit: ByteCount) {
        if let Some(why) = Memory::detect().objection(limit) {
            let end = "the kernel may end the process before farheap makes room";
            let kind = "a limit is above what there is";
            messages::warn(kind, format_args!("{why}: {end}"));
        }
    }
}

/// Limits of the address space: soft `RLIMIT_AS`, `None` for unlimited; and `vm.overcommit_memory`: 0 heuristic,
/// 1 always, 2 never.
pub(crate) fn address_space() -> (Option<ByteCount>, Option<u64>) {
    let soft = getrlimit(Resource::RLIMIT_AS).map_or(RLIM_INFINITY, |(soft, _)| soft);
    let limit = (soft != RLIM_INFINITY).then_some(ByteCount(soft));
    (limit, read_number("/proc/sys/vm/overcommit_memory"))
}

/// Reads a file that holds one number.
fn read_number(path: impl AsRef<Path>) -> Option<u64> {
    fs::read_to_string(path).ok()?.lines().next()?.trim().parse().ok()
}

/// A mounted control group hierarchy and the process's place in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GroupDir {
    /// The hierarchy's mount point: the highest ancestor that can be seen.
    mount: PathBuf,
    /// The process's group, at or below `mount`.
    dir: PathBuf,
    /// The files that limit memory.
    files: &'static [&'static str],
}

/// Finds the process's memory groups from `/proc/self/cgroup` and `/proc/self/mountinfo`
/// (cgroups(7), proc_pid_mountinfo(5)).
fn group_dirs(cgroup: &str, mountinfo: &str) -> Vec<GroupDir> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let has_memory = controllers.split(',').any(|name| name == "memory");
        let (kind, files): (_, &[&str]) = match (controllers, has_memory) {
            ("", _) => ("cgroup2", &["memory.max", "memory.high"]),
            (_, true) => ("cgroup", &["memory.limit_in_bytes"]),
            _ => continue,
        };
        let mounts = mountinfo.lines().filter_map(|line| group_mount(line, kind));
        // In a container the mount shows a part of the hierarchy: the group's path below the
        // mount's root is what can be seen. A group outside of it shows as the mount point.
        found.extend(mounts.map(|(root, mount)| {
            let below = Path::new(group).strip_prefix(&root).unwrap_or(Path::new(""));
            GroupDir { dir: mount.join(below), mount, files }
        }));
    }
    found
}

/// Reads a line of `mountinfo`: root and mount point of a hierarchy of this kind with memory.
fn group_mount(line: &str, kind: &str) -> Option<(PathBuf, PathBuf)> {
    let (mount, file_system) = line.split_once(" - ")?;
    let mut fields = file_system.split(' ');
    let (fs_kind, options) = (fields.next()?, fields.nth(1)?);
    if fs_kind != kind || (kind == "cgroup" && !options.split(',').any(|name| name == "memory")) {
        return None;
    }
    let mut fields = mount.split(' ').skip(3);
    Some((unescape(fields.next()?), unescape(fields.next()?)))
}

/// Undoes the octal escapes of blanks in `mountinfo`.
fn unescape(path: &str) -> PathBuf {
    [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")]
        .iter()
        .fold(path.to_owned(), |path, (escape, plain)| path.replace(escape, plain))
        .into()
}

/// The limits of a group and its ancestors.
fn limits(group: &GroupDir) -> impl Iterator<Item = CgroupLimit> + '_ {
    let ancestors = group.dir.ancestors().take_while(|dir| dir.starts_with(&group.mount));
    ancestors.flat_map(|dir| group.files.iter().map(move |file| (dir, dir.join(file)))).filter_map(
        |(dir, file)| {
            let bytes = read_number(&file).filter(|bytes| *bytes < UNLIMITED_FROM)?;
            Some(CgroupLimit { bytes: ByteCount(bytes), file, used: GroupUse::of(dir).used() })
        },
    )
}

/// A number of a group and the groups below, out of its `memory.stat`. Version 1 has fields of their own for those.
fn group_field(stat: &str, name: &str) -> Option<u64> {
    let field = |prefix: &str| {
        let value = |line: &str| {
            let line = line.strip_prefix(prefix)?.strip_prefix(name)?;
            line.strip_prefix(' ')?.trim().parse().ok()
        };
        stat.lines().find_map(value)
    };
    field("total_").or_else(|| field(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_a_group_counts_the_groups_below() {
        let first = "workingset_refault_file 3\ntotal_workingset_refault_file 5\n";
        assert_eq!(group_field(first, "workingset_refault_file"), Some(5));
        assert_eq!(group_field("workingset_refault_file 3\n", "workingset_refault_file"), Some(3));
        assert_eq!(group_field("workingset_refault_anon 3\n", "workingset_refault_file"), None);
    }

    #[test]
    fn code_in_memory_is_not_taken_for_room() {
        let (resident, _) = Statm::open().expect("/proc is mounted").look().expect("numbers");
        let counted = Memory::detect().resident;
        assert!(counted.0 + (512 << 10) < resident.0, "{counted} of {resident}");
    }

    #[test]
    fn the_second_version_of_control_groups_is_found() {
        let found = group_dirs(
            "0::/user.slice/app.scope\n",
            "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        );
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].dir, Path::new("/sys/fs/cgroup/user.slice/app.scope"));
        assert_eq!(found[0].files, ["memory.max", "memory.high"]);
    }

    #[test]
    fn only_the_memory_hierarchy_of_the_first_version_counts() {
        let found = group_dirs(
            "9:name=systemd:/\n4:memory:/jobs/7\n1:cpu:/\n",
            "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
             35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
        );
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].dir, Path::new("/sys/fs/cgroup/memory/jobs/7"));
        assert_eq!(found[0].files, ["memory.limit_in_bytes"]);
    }

    #[test]
    fn a_container_sees_its_group_at_the_mount_point() {
        let mount =
            |root: &str| format!("30 23 0:26 {root} /mnt/a\\040b rw - cgroup2 cgroup2 rw\n");
        let found = group_dirs("0::/docker/abc/inner\n", &mount("/docker/abc"));
        assert_eq!(found[0].dir, Path::new("/mnt/a b/inner"));
        let found = group_dirs("0::/elsewhere\n", &mount("/docker/abc"));
        assert_eq!(found[0].dir, Path::new("/mnt/a b"));
    }

    #[test]
    #[cfg_attr(miri, ignore = "makes directories")]
    fn the_tightest_limit_of_all_ancestors_counts() {
        let mount = tempfile::tempdir().expect("a temporary directory");
        let dir = mount.path().join("outer/inner");
        fs::create_dir_all(&dir).expect("directories");
        let write = |path: &str, text: &str| fs::write(mount.path().join(path), text).expect(path);
        write("memory.max", "max\n");
        write("outer/memory.max", "1073741824\n");
        write("outer/inner/memory.max", "9223372036854771712\n");
        let group = GroupDir { mount: mount.path().to_owned(), dir, files: &["memory.max"] };
        write("outer/memory.current", "805306368\n");
        write("outer/memory.stat", "anon 1\ninactive_file 134217728\nactive_file 134217728\n");
        let only = |group: &GroupDir| limits(group).collect::<Vec<_>>();
        let [limit] = &only(&group)[..] else { panic!("the outer group has a limit") };
        assert_eq!((limit.bytes, limit.used), (ByteCount::gib(1), ByteCount::mib(512)));
        assert!(limit.file.ends_with("outer/memory.max"), "{limit:?}");
        write("outer/memory.max", "max\n");
        assert_eq!(only(&group), []);
    }

    #[test]
    #[cfg_attr(miri, ignore = "makes files")]
    fn the_use_of_a_group_is_read_from_a_file_that_stays_open_until_it_cannot_be_read() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let [here, away] = ["memory.current", "away"].map(|name| dir.path().join(name));
        fs::write(&here, "1\n").expect("a file");
        let mut usage = GroupUse::of(dir.path());
        fs::rename(&here, &away).expect("the same file");
        fs::write(&away, "2\n").expect("the same file");
        usage.look();
        assert_eq!(usage.used(), ByteCount(2), "by the open file");
        // As what is open of a group that has gone: it opens, and cannot be read.
        usage.open = Some(Private::new(File::open(dir.path()).expect("a directory")));
        usage.look();
        assert_eq!(usage.used(), ByteCount(2), "as it was: there is no such group");
        fs::write(&here, "3\n").expect("another file");
        usage.look();
        assert_eq!(usage.used(), ByteCount(3), "another group of this name");
    }

    #[test]
    fn a_limit_above_what_the_control_group_has_left_is_objected_to() {
        let group = |bytes, used| CgroupLimit {
            bytes: ByteCount::mib(bytes),
            file: "/x/memory.max".into(),
            used: ByteCount::mib(used),
        };
        let memory = Memory {
            total: Some(ByteCount::gib(4)),
            cgroup: Some(group(1024, 0)),
            fullest: Some(group(2048, 1536)),
            ..Memory::default()
        };
        assert_eq!(memory.objection(ByteCount::mib(479)), None);
        let text = memory.objection(ByteCount::mib(480)).expect("too much");
        assert!(text.contains("479.0 MiB") && text.contains("/x/memory.max"), "{text}");
        let bare = Memory { total: Some(ByteCount::gib(4)), ..Memory::default() };
        assert_eq!(bare.objection(ByteCount::gib(4)), None);
        assert!(bare.objection(ByteCount::gib(5)).expect("too much").contains("the machine's"));
        assert_eq!(Memory::default().objection(ByteCount::gib(5)), None);
    }

    #[test]
    fn memory_available_is_the_smaller_of_machine_and_group() {
        let mut memory =
            Memory { total: mem_info("MemTotal:  2048 kB\n", "MemTotal:"), ..Memory::default() };
        assert_eq!(memory.available(), Some(ByteCount::mib(2)));
        let used = ByteCount::ZERO;
        memory.cgroup = Some(CgroupLimit { bytes: ByteCount::mib(1), file: PathBuf::new(), used });
        assert_eq!(memory.available(), Some(ByteCount::mib(1)));
        assert_eq!(Memory::default().available(), None);
    }
}
