//! Judges where evicted pages are to go: the temporary file's directory, or a device.

use super::{Check, Configuration, Subject, Verdict, servers};
use crate::place::{DeviceKind, Directory, StoreDevice};
use farheap::ByteCount;
use farheap::probe::temporary_dir;
use farheap_nbd::ServerAddress;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The smallest store.
const STORE_MIN: ByteCount = ByteCount::mib(1);
/// Every request of the store is a multiple of this.
const IO_ALIGN: ByteCount = ByteCount::kib(4);

/// Checks the device or directory of the command line, else of the configuration.
pub(super) fn checks(subject: &Subject, config: Option<&Configuration>) -> Vec<Check> {
    let configured = |key| config.and_then(|config| config.options.get(key)).map(PathBuf::from);
    let (device, dir) = if subject.device.is_some() || subject.dir.is_some() {
        (subject.device.clone(), subject.dir.clone())
    } else {
        (configured("device"), configured("dir"))
    };
    let servers = device.as_deref().and_then(Path::to_str);
    if let Some(servers) = servers.filter(|text| ServerAddress::is_address(text)) {
        return servers::checks(servers);
    }
    match device {
        Some(path) => match StoreDevice::probe(&path) {
            Ok(found) => device_checks(&path, &found, config),
            Err(error) => match (error.kind(), path.parent(), capacity(config)) {
                // A file that is missing is created, if its size is given.
                (std::io::ErrorKind::NotFound, Some(parent), Some(_)) if parent.is_dir() => {
                    directory(parent, config)
                }
                _ => vec![unusable_device(&path, &error)],
            },
        },
        None => directory(&dir.unwrap_or_else(temporary_dir), config),
    }
}

fn capacity(config: Option<&Configuration>) -> Option<ByteCount> {
    config?.size("capacity")
}

/// Quotes a path for a shell.
fn shell(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:+@%,".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

fn directory(dir: &Path, config: Option<&Configuration>) -> Vec<Check> {
    const NAME: &str = "directory";
    match Directory::probe(dir) {
        Ok(found) => directory_checks(dir, &found, config),
        Err(error) => vec![
            Check::new(NAME, Verdict::Fail, format!("{}: {error}", dir.display()))
                .meaning("the temporary file that keeps evicted pages cannot be made")
                .repair_when("choose another:", "export FARHEAP_CONF=dir:/var/tmp"),
        ],
    }
}

fn directory_checks(dir: &Path, found: &Directory, config: Option<&Configuration>) -> Vec<Check> {
    let kind = found.file_system.as_deref().unwrap_or("an unknown file system");
    let place = format!("{} on {kind}", dir.display());
    let directory = if matches!(kind, "tmpfs" | "ramfs") {
        Check::new("directory", Verdict::Warn, place)
            .meaning("this file system is in memory: evicting to it frees none")
            .repair_when("choose one on a disk:", "export FARHEAP_CONF=dir:/var/tmp")
    } else {
        Check::new("directory", Verdict::Pass, place)
    };
    let wanted = match config.map(|config| (config.size("capacity"), config.region.limit)) {
        Some((Some(capacity), _)) => Some((capacity, "configured capacity")),
        Some((None, limit)) => Some((limit, "limit of resident memory")),
        None => None,
    };
    let free = format!("{} for this user", found.free);
    let room = match wanted {
        _ if found.free < ByteCount::kib(4) => Check::new("free space", Verdict::Fail, free)
            .meaning("not one page can be evicted")
            .repair_when("choose a larger one:", "export FARHEAP_CONF=dir:/var/tmp"),
        Some((wanted, what)) if found.free < wanted => {
            Check::new("free space", Verdict::Warn, free)
                .meaning(format!("less than the {what}, {wanted}: evicted pages may not find room"))
                .repair_when("choose a larger one:", "export FARHEAP_CONF=dir:/var/tmp")
        }
        _ => Check::new("free space", Verdict::Pass, free),
    };
    vec![directory, room, direct_io(found.direct_io_refusal.as_deref())]
}

fn direct_io(refusal: Option<&str>) -> Check {
    const NAME: &str = "direct I/O";
    match refusal {
        None => Check::new(NAME, Verdict::Pass, "works"),
        Some(refusal) => Check::new(NAME, Verdict::Warn, format!("refused: {refusal}"))
            .meaning("evicted pages pass through the kernel's page cache, in memory once more"),
    }
}

fn unusable_device(path: &Path, error: &std::io::Error) -> Check {
    let check = Check::new("device", Verdict::Fail, format!("{}: {error}", path.display()));
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => {
            check.repair(format!("sudo setfacl -m u:$USER:rw {}", shell(path)))
        }
        std::io::ErrorKind::NotFound => check
            .repair_when("list the devices:", "lsblk --paths")
            .repair_when("or make a file:", format!("fallocate --length 10GiB {}", shell(path))),
        _ => check,
    }
}

fn device_checks(path: &Path, found: &StoreDevice, config: Option<&Configuration>) -> Vec<Check> {
    let mut checks = vec![identity(path, found, config), writable(path, found)];
    if found.kind == DeviceKind::Block {
        checks.push(unused(path, found));
        checks.push(discard(found));
    } else {
        checks.push(owner(path, found));
    }
    checks.push(contents(path, found, config));
    checks.push(direct_io(found.direct_io_refusal.as_deref()));
    checks
}

/// Kind, size and blocks of the device.
fn identity(path: &Path, found: &StoreDevice, config: Option<&Configuration>) -> Check {
    const NAME: &str = "device";
    let kind = match found.kind {
        DeviceKind::Block => "block device",
        _ => "regular file",
    };
    let place = format!("{}, {kind} of {}", path.display(), found.size);
    let needed = capacity(config).unwrap_or(STORE_MIN);
    if found.size < needed {
        let check = Check::new(NAME, Verdict::Fail, place)
            .meaning(format!("smaller than the {needed} needed"));
        return match found.kind {
            DeviceKind::Block => check,
            _ => check.repair(format!("fallocate --length 10GiB {}", shell(path))),
        };
    }
    match found.block {
        Some(block) if block > IO_ALIGN => Check::new(NAME, Verdict::Fail, place)
            .meaning(format!("its logical blocks of {block} are larger than {IO_ALIGN}")),
        _ => Check::new(NAME, Verdict::Pass, place),
    }
}

fn writable(path: &Path, found: &StoreDevice) -> Check {
    const NAME: &str = "writing";
    if !found.read_only {
        return Check::new(NAME, Verdict::Pass, "permitted");
    }
    let check = Check::new(NAME, Verdict::Fail, "refused: read-only, or not for this user");
    // What others may read is refused: a file has to be its user's own.
    let check = match found.kind {
        DeviceKind::Block => check
            .repair_when("for this user:", format!("sudo setfacl -m u:$USER:rw {}", shell(path))),
        _ => check.repair_when("for this user:", format!("sudo chown $USER {}", shell(path))),
    };
    match found.kind {
        DeviceKind::Block => check.repair_when(
            "for a read-only device:",
            format!("sudo blockdev --setrw {}", shell(path)),
        ),
        _ => check,
    }
}

/// Checks that other users keep away from what is evicted to a file.
fn owner(path: &Path, found: &StoreDevice) -> Check {
    const NAME: &str = "access";
    match found.other_owner {
        Some(owner) => Check::new(NAME, Verdict::Fail, format!("the file belongs to user {owner}"))
            .meaning("who could read and change evicted memory")
            .repair(format!("sudo chown $USER {}", shell(path))),
        None if found.is_open_to_others => Check::new(
            NAME,
            Verdict::Warn,
            "other users may use the file",
        )
        .meaning(
            "farheap makes it readable by its owner only, but a process that has it open keeps it",
        )
        .repair(format!("chmod 600 {}", shell(path))),
        None => Check::new(NAME, Verdict::Pass, "its owner's only"),
    }
}

fn unused(path: &Path, found: &StoreDevice) -> Check {
    const NAME: &str = "exclusive use";
    if !found.busy {
        return Check::new(NAME, Verdict::Pass, "no file system and no program holds it");
    }
    Check::new(NAME, Verdict::Fail, "a file system or a program holds it")
        .meaning("farheap would overwrite what they keep there")
        .repair_when("see who:", format!("lsblk --fs {}", shell(path)))
        .repair_when("if mounted:", format!("sudo umount {}", shell(path)))
}

fn discard(found: &StoreDevice) -> Check {
    const NAME: &str = "discard";
    match found.discard {
        Some(true) => Check::new(NAME, Verdict::Pass, "freed pages are given back"),
        _ => Check::new(NAME, Verdict::Pass, "not offered")
            .meaning("freed pages are reused, but the device is not told that they are free"),
    }
}

fn contents(path: &Path, found: &StoreDevice, config: Option<&Configuration>) -> Check {
    const NAME: &str = "contents";
    let holds = found.contents;
    if holds.is_free() {
        return Check::new(NAME, Verdict::Pass, format!("{holds}"));
    }
    let (verdict, meaning) = match config
        .is_some_and(|config| config.options.get("overwrite").as_deref() == Some("on"))
    {
        true => (Verdict::Warn, "farheap overwrites it, as `overwrite:on` asks for"),
        false => (Verdict::Fail, "farheap overwrites no data unless it is told to"),
    };
    let name = recognized(path).map(|name| format!(" ({name})"));
    let check = Check::new(NAME, verdict, format!("{holds}{}", name.unwrap_or_default()))
        .meaning(meaning)
        .repair_when("see what it is:", format!("sudo wipefs --no-act {}", shell(path)));
    match verdict {
        Verdict::Fail => {
            let conf = format!("device:{},overwrite:on", path.display());
            check.repair_when("if it can go:", format!("export FARHEAP_CONF={}", quoted(&conf)))
        }
        _ => check,
    }
}

/// The name of what a device or file holds, by `blkid`, where that is installed and recognizes it.
fn recognized(path: &Path) -> Option<String> {
    let mut blkid = Command::new("blkid");
    blkid.args(["--probe", "--output", "value", "--match-tag", "TYPE", "--match-tag", "PTTYPE"]);
    let names = blkid.arg(path).stderr(Stdio::null()).output().ok()?.stdout;
    let names: Vec<_> = std::str::from_utf8(&names).ok()?.split_whitespace().collect();
    (!names.is_empty()).then(|| names.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted_for_the_shell_when_they_need_it() {
        assert_eq!(shell(Path::new("/dev/nvme1n1")), "/dev/nvme1n1");
        assert_eq!(shell(Path::new("/mnt/a b")), "'/mnt/a b'");
        assert_eq!(shell(Path::new("/it's")), r"'/it'\''s'");
    }
}
