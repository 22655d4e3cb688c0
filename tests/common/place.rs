//! Small file systems and loop devices, for tests that run as root.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

fn run(command: &mut Command) -> Result<String, String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// A tmpfs; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    /// `None`, with the reason printed, where mounting is impossible.
    pub(crate) fn mount(options: &str) -> Option<Tmpfs> {
        let dir = tempfile::tempdir().expect("a directory");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "none"]).arg(dir.path());
        match run(&mut command) {
            Ok(_) => Some(Tmpfs(dir)),
            Err(why) => {
                println!("skipped: no tmpfs can be mounted: {why}");
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Lazily: a child that hangs or dies late must not keep the mount for ever.
        let result = run(Command::new("umount").arg("--lazy").arg(self.path()));
        assert_eq!(result.err(), None, "{:?} stays mounted", self.path());
    }
}

/// A loop device; detached when dropped.
#[derive(Debug)]
pub(crate) struct LoopDevice(PathBuf);

impl LoopDevice {
    /// `None`, with the reason printed, where there are no loop devices.
    pub(crate) fn attach(backing: &Path, options: &[&str]) -> Option<LoopDevice> {
        let mut command = Command::new("losetup");
        match run(command.args(options).args(["--find", "--show"]).arg(backing)) {
            Ok(path) => Some(LoopDevice(path.into())),
            Err(why) => {
                println!("skipped: no loop device can be had: {why}");
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let result = run(Command::new("losetup").arg("--detach").arg(&self.0));
        assert_eq!(result.err(), None, "{:?} stays attached", self.0);
    }
}

/// A mounted file system; unmounted when dropped.
#[derive(Debug)]
pub(crate) struct FileSystem {
    place: tempfile::TempDir,
    _device: LoopDevice,
}

impl FileSystem {
    /// Makes an ext4 in the file, and mounts it. `None`, with the reason printed, where that is impossible.
    pub(crate) fn ext4(backing: &Path) -> Option<FileSystem> {
        if let Err(why) = run(Command::new("mkfs.ext4").arg("-qF").arg(backing)) {
            println!("skipped: no ext4 can be made: {why}");
            return None;
        }
        FileSystem::mount(backing)
    }

    /// Mounts what is in the file. `None` as above.
    pub(crate) fn mount(backing: &Path) -> Option<FileSystem> {
        let device = LoopDevice::attach(backing, &[])?;
        let place = tempfile::tempdir().expect("a directory");
        match run(Command::new("mount").arg(device.path()).arg(place.path())) {
            Ok(_) => Some(FileSystem { place, _device: device }),
            Err(why) => {
                println!("skipped: it cannot be mounted: {why}");
                None
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.place.path()
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let result = run(Command::new("umount").arg(self.place.path()));
        assert_eq!(result.err(), None, "{:?} stays mounted", self.place);
    }
}
