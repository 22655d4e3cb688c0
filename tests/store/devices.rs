//! Loop devices and mounts: what needs root to make. Without it these tests say so when they skip.

#![expect(unsafe_code, reason = "discards ranges of stores")]

use super::*;
use crate::common::child::{Victim, case};

/// A loop device; detached when dropped.
struct LoopDevice(PathBuf);

impl LoopDevice {
    /// `None`, with the reason printed, where there are no loop devices.
    fn attach(backing: &Path, options: &[&str]) -> Option<LoopDevice> {
        if !is_root() {
            return None;
        }
        let mut command = Command::new("losetup");
        let command = command.args(options).args(["--find", "--show"]).arg(backing);
        match output(command) {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).expect("a path");
                Some(LoopDevice(PathBuf::from(path.trim())))
            }
            other => {
                println!("skipped: losetup {options:?}: {other:?}");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let detached = succeeds(Command::new("losetup").arg("--detach").arg(&self.0));
        assert!(detached, "{:?} stays attached", self.0);
    }
}

#[test]
fn a_block_device_is_a_store_and_takes_discards() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &["--direct-io=on"]) else { return };
    for engine in [IoEngine::Sync, IoEngine::Auto] {
        settle();
        let store = BlockStore::open(&device.0, None).expect("open");
        let store = store.with_engine(engine).expect("engine");
        assert!(!store.describe().contains("in memory"), "{}", store.describe());
        assert_eq!((store.capacity(), store.occupied()), (ByteCount::mib(8), None));
        let mut queue = store.open_queue(4).expect("queue");
        let (mut written, mut read) = (pages(64, 16), pages(64, 17));
        run(&mut *queue, Op::Write, 4096, &scattered(&mut written)).expect("write");
        run(&mut *queue, Op::Read, 4096, &scattered(&mut read)).expect("read");
        assert!(read == written);
        assert!(fs::metadata(&backing).expect("backing").blocks() >= 512);
        // SAFETY: nobody else uses the store.
        unsafe { store.discard(4096, 64 * 4096) }.expect("discard");
        assert!(fs::metadata(&backing).expect("backing").blocks() <= 64, "space comes back");
    }
}

/// Opens a store for evicted pages, leaving data alone.
fn scratch(path: &Path) -> farheap::Result<BlockStore> {
    settle();
    BlockStore::scratch(path, None, false)
}

/// Writes to a block device as other programs do.
fn write_to(device: &LoopDevice, bytes: &[u8], offset: u64) {
    use std::os::unix::fs::FileExt as _;
    let file = File::options().write(true).open(&device.0).expect("open");
    file.write_all_at(bytes, offset).and_then(|()| file.sync_all()).expect("write");
}

#[test]
fn a_device_that_was_partitioned_or_formatted_later_is_refused() {
    const LEN: u64 = 128 << 20;
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), LEN);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    let formats: [&[&str]; 2] = [&["mkfs.ext4", "-q", "-F"], &["mkswap", "-f"]];
    for command in formats {
        settle();
        drop(BlockStore::scratch(&device.0, None, true).expect("allowed"));
        drop(scratch(&device.0).expect("marked"));
        let mut program = Command::new(command[0]);
        if !succeeds(program.args(&command[1..]).arg(&device.0)) {
            println!("skipped: no {}", command[0]);
            continue;
        }
        assert_says(scratch(&device.0), &device.0, "holds data at byte 10");
    }
    settle();
    drop(BlockStore::scratch(&device.0, None, true).expect("allowed"));
    // Superblocks at the end only: GPT, md 1.0 and 0.90, Intel, DRBD.
    let ends: [(u64, &[u8]); 5] = [
        (512, b"EFI PART"),
        (8192, b"\xfc\x4e\x2b\xa9"),
        (64 << 10, b"\xfc\x4e\x2b\xa9"),
        (1024, b"Intel Raid ISM Cfg Sig. "),
        (4096 - 60, b"\x83\x74\x02\x6d"),
    ];
    for (back, magic) in ends {
        drop(scratch(&device.0).expect("marked"));
        write_to(&device, magic, LEN - back);
        let refusal = format!("holds data at byte {}, which", LEN - back);
        assert_says(scratch(&device.0), &device.0, &refusal);
        settle();
        drop(BlockStore::scratch(&device.0, None, true).expect("allowed"));
    }
    let mut probe = Command::new("wipefs");
    match output(probe.args(["--no-act", "--parsable", "--noheadings"]).arg(&device.0)) {
        Ok(found) if found.status.success() => assert_eq!(found.stdout, b"", "left"),
        other => println!("skipped: wipefs: {other:?}"),
    }
}

#[test]
fn the_pages_of_a_store_stay_out_of_the_ends_of_a_device() {
    for (len, margin) in [(80 << 20, 1 << 20), ((8 << 20) + 512, 128 << 10)] {
        let dir = tempfile::tempdir().expect("directory");
        let backing = sparse(dir.path(), len);
        let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
        for _ in 0..2 {
            let store = scratch(&device.0).expect("free");
            assert_eq!(store.capacity().get(), (len - 2 * margin) / 4096 * 4096);
            let mut queue = store.open_queue(1).expect("queue");
            for offset in [0, store.capacity().get() - 4096] {
                run(&mut *queue, Op::Write, offset, &whole(&mut pages(1, 30))).expect("write");
            }
        }
    }
}

#[test]
fn a_device_without_the_mark_is_looked_at_in_many_places() {
    const LEN: u64 = 256 << 20;
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), LEN);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    for offset in [0, (1 << 20) - 1, 2 << 20, 4 << 20, LEN / 2 + 100, LEN - (1 << 20), LEN - 1] {
        write_to(&device, b"x", offset);
        assert_says(scratch(&device.0), &device.0, &format!("holds data at byte {offset}, which"));
        write_to(&device, b"\0", offset);
    }
    scratch(&device.0).expect("zeros");
}

#[test]
fn a_file_and_the_loop_devices_on_it_are_one_store() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    if !is_root() {
        return;
    }
    let file = scratch(&backing).expect("free");
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    let Some(second) = LoopDevice::attach(&backing, &[]) else { return };
    let says = format!("lies on {}, which is in use by another store", backing.display());
    assert_says(scratch(&device.0), &device.0, &says);
    drop(file);
    let store = scratch(&device.0).expect("free again");
    assert_says(scratch(&second.0), &second.0, &says);
    drop(store);
    for open in [|path: &Path| scratch(path), |path: &Path| BlockStore::open(path, None)] {
        settle();
        assert_says(open(&backing), &backing, "keeps its bytes in; name that instead");
    }
    drop((device, second));
    scratch(&backing).expect("detached");
}

#[test]
fn a_partition_of_a_loop_device_lies_on_its_file() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 16 << 20);
    let Some(device) = LoopDevice::attach(&backing, &["--partscan"]) else { return };
    // One partition of the kind Linux from 1 MiB on, in a DOS table (`sfdisk` writes the same).
    let mut entry = [0_u8; 66];
    entry[4] = 0x83;
    entry[8..12].copy_from_slice(&2048_u32.to_le_bytes());
    entry[12..16].copy_from_slice(&(8_u32 << 11).to_le_bytes());
    entry[64..].copy_from_slice(b"\x55\xaa");
    write_to(&device, &entry, 446);
    let reread = succeeds(Command::new("blockdev").arg("--rereadpt").arg(&device.0));
    let partition = PathBuf::from(format!("{}p1", device.0.display()));
    if !reread || !partition.exists() {
        println!("skipped: the kernel or the container makes no partitions of loop devices");
        return;
    }
    let store = scratch(&partition).expect("free");
    let Some(second) = LoopDevice::attach(&backing, &["--offset=1048576"]) else { return };
    assert_says(scratch(&second.0), &second.0, "is in use by another store");
    drop(store);
}

#[test]
fn a_device_whose_user_was_just_killed_is_taken_again() {
    const ROUNDS: u32 = 40;
    const TEST: &str = "a_device_whose_user_was_just_killed_is_taken_again";
    if let Some(path) = case(TEST) {
        // The child: keeps the device's ring busy until it is killed.
        let store = BlockStore::scratch(path, None, false).expect("free");
        let mut queue = store.open_queue(32).expect("queue");
        let mut buffer = pages(32, 31);
        println!("at work");
        loop {
            run(&mut *queue, Op::Write, 0, &whole(&mut buffer)).expect("write");
        }
    }
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &["--direct-io=on"]) else { return };
    for round in 0..ROUNDS {
        let running = CHILD.lock().unwrap_or_else(PoisonError::into_inner);
        let mut child = Victim::start(TEST, device.0.to_str().expect("UTF-8"));
        let works = child.said("at work").is_some();
        child.kill();
        assert!(works, "round {round}");
        let store = BlockStore::scratch(&device.0, None, false);
        store.unwrap_or_else(|error| panic!("round {round}: {error}"));
        drop(running);
    }
}

#[test]
fn a_claimed_block_device_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    let store = BlockStore::open(&device.0, Some(MIB)).expect("open");
    assert_eq!(store.capacity(), MIB);
    assert_refused(&device.0, None, "is in use");
    drop(store);
    assert_refused(&device.0, Some(ByteCount::mib(9)), "is too small");
    assert_refused(&device.0, Some(ByteCount(MIB.get() + 512)), "is not aligned");
}

#[test]
fn a_read_only_block_device_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &["--read-only"]) else { return };
    assert_refused(&device.0, None, "is read-only");
}

#[test]
fn a_block_device_below_the_minimum_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 512 << 10);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    assert_refused(&device.0, None, "is too small");
}

#[test]
fn a_device_that_shrank_fails_reads() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &["--direct-io=on"]) else { return };
    let store = BlockStore::open(&device.0, None).expect("open");
    File::options().write(true).open(&backing).expect("open").set_len(1 << 20).expect("truncate");
    let mut queue = store.open_queue(4).expect("queue");
    let mut buffer = pages(4, 18);
    let error = run(&mut *queue, Op::Read, 2 << 20, &whole(&mut buffer)).expect_err("gone");
    assert!(matches!(error, Error::Io { op: "read", errno: libc::EIO, .. }), "{error:?}");
}

/// A mounted file system; unmounted when dropped.
struct Mount(tempfile::TempDir);

impl Mount {
    /// `None`, with the reason printed, where mounting is impossible.
    fn new(kind: &str, source: &Path, options: &str) -> Option<Mount> {
        if !is_root() {
            return None;
        }
        let dir = tempfile::tempdir().expect("directory");
        let mut command = Command::new("mount");
        let command = command.args(["-t", kind, "-o", options]).arg(source).arg(dir.path());
        let output = output(command);
        if output.as_ref().is_ok_and(|output| output.status.success()) {
            return Some(Mount(dir));
        }
        println!("skipped: mount {kind}: {output:?}");
        None
    }

    fn tmpfs(options: &str) -> Option<Mount> {
        Mount::new("tmpfs", Path::new("none"), options)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let unmounted = succeeds(Command::new("umount").arg(self.0.path()));
        assert!(unmounted, "{:?} stays mounted", self.0);
    }
}

#[test]
fn a_full_file_system_fails_the_write() {
    let Some(tmpfs) = Mount::tmpfs("size=2m") else { return };
    for engine in [IoEngine::Sync, IoEngine::Uring] {
        let store = BlockStore::temporary(Some(tmpfs.0.path()), Some(ByteCount::mib(8)));
        let Ok(store) = store.expect("sparse").with_engine(engine) else { return };
        let mut queue = store.open_queue(4).expect("queue");
        let mut buffer = pages(1024, 19);
        let error = run(&mut *queue, Op::Write, 0, &whole(&mut buffer)).expect_err("full");
        assert!(matches!(error, Error::Io { op: "write", errno: libc::ENOSPC, .. }), "{error:?}");
    }
}

#[test]
fn a_file_in_memory_is_read_without_io_uring_unless_asked() {
    let Some(tmpfs) = Mount::tmpfs("size=2m") else { return };
    let store = BlockStore::temporary(Some(tmpfs.0.path()), Some(MIB)).expect("temporary");
    assert!(store.describe().contains("the file is in memory"), "{}", store.describe());
    match store.with_engine(IoEngine::Uring) {
        Ok(store) => assert!(store.describe().contains("io_uring"), "{}", store.describe()),
        Err(error) => println!("skipped: {error}"),
    }
}

#[test]
fn a_file_system_without_space_or_read_only_is_refused() {
    let Some(tmpfs) = Mount::tmpfs("size=512k") else { return };
    let dir = tmpfs.0.path();
    assert_says(BlockStore::temporary(Some(dir), None), dir, "is too small");
    let path = sparse(dir, 1 << 20);
    assert!(succeeds(Command::new("mount").args(["-o", "remount,ro"]).arg(dir)));
    assert_refused(&path, None, "is read-only");
    assert_says(BlockStore::temporary(Some(dir), None), dir, "is read-only");
}

#[test]
fn a_file_system_without_direct_io_is_used_buffered_and_says_so() {
    let Some(ramfs) = Mount::new("ramfs", Path::new("none"), "mode=700") else { return };
    let path = ramfs.0.path().join("new");
    let temporary = BlockStore::temporary(Some(ramfs.0.path()), Some(MIB)).expect("temporary");
    let named = BlockStore::open(&path, Some(MIB)).expect("created");
    for store in [temporary, named] {
        assert!(store.describe().contains("buffered"), "{}", store.describe());
        let mut queue = store.open_queue(4).expect("queue");
        let (mut written, mut read) = (pages(16, 20), pages(16, 21));
        run(&mut *queue, Op::Write, 4096, &scattered(&mut written)).expect("write");
        run(&mut *queue, Op::Read, 4096, &scattered(&mut read)).expect("read");
        assert!(read == written);
        // SAFETY: nobody else uses the store.
        unsafe { store.discard(4096, 4096) }.expect("where there is no discard, nothing happens");
    }
}

#[test]
fn a_mounted_block_device_is_refused() {
    let dir = tempfile::tempdir().expect("directory");
    let backing = sparse(dir.path(), 8 << 20);
    let Some(device) = LoopDevice::attach(&backing, &[]) else { return };
    if !succeeds(Command::new("mkfs.ext4").arg("-q").arg(&device.0)) {
        println!("skipped: no mkfs.ext4");
        return;
    }
    let Some(_mount) = Mount::new("ext4", &device.0, "ro") else { return };
    assert_refused(&device.0, None, "is in use");
}
