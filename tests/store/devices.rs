//! Loop devices and mounts: what needs root to make. Without it these tests say so when they skip.

use super::*;

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
        store.discard(4096, 64 * 4096).expect("discard");
        assert!(fs::metadata(&backing).expect("backing").blocks() <= 64, "space comes back");
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
        store.discard(4096, 4096).expect("where there is no discard, nothing happens");
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
