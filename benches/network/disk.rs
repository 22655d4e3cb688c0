//! The same server as a disk: nbdfuse shows its export as a file, and a loop device is made of it. Needs root.

use crate::bare::number_of;
use crate::common::Dice;
use crate::servers::{Server, wait_until};
use crate::{Failure, LEN, PLACES, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

pub(crate) struct Disk {
    device: PathBuf,
    mount: PathBuf,
    fuse: Child,
    _dir: tempfile::TempDir,
}

/// A buffer that direct input and output take.
#[repr(align(4096))]
struct Aligned([u8; LEN]);

impl Disk {
    /// # Errors
    /// [`Failure::Skipped`] where a program is missing, or the user's rights are.
    pub(crate) fn create(server: &Server) -> Result<Disk> {
        let dir = tempfile::tempdir().map_err(Failure::io)?;
        let mount = dir.path().join("disk");
        std::fs::write(&mount, b"").map_err(Failure::io)?;
        let mut command = Command::new("nbdfuse");
        command.arg(&mount).arg(server.address.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut fuse =
            command.spawn().map_err(|error| Failure::Skipped(format!("nbdfuse: {error}")))?;
        let shows = || std::fs::metadata(&mount).is_ok_and(|file| file.len() == server.len());
        let made = wait_until("nbdfuse shows the export", &mut fuse, shows)
            .and_then(|()| said("losetup", &["-f", "--show", "--direct-io=on"], &mount));
        match made {
            Ok(device) => Ok(Disk { device: device.into(), mount, fuse, _dir: dir }),
            Err(why) => {
                end(&mut fuse, &mount);
                Err(Failure::Skipped(why.to_string()))
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.device
    }

    /// Requests a second, by as many threads as requests at once.
    pub(crate) fn run(&self, is_read: bool, depth: usize, count: u64) -> Result<f64> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).custom_flags(libc::O_DIRECT).open(&self.device);
        let file = file.map_err(Failure::io)?;
        let start = Instant::now();
        let each = count.div_ceil(depth as u64);
        let done = std::thread::scope(|scope| {
            let file = &file;
            let start = |seed| scope.spawn(move || requests(file, is_read, Dice(seed), each));
            let threads: Vec<_> = (0..depth as u64).map(start).collect();
            threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
        });
        done.map_err(Failure::io)?;
        Ok((each * depth as u64) as f64 / start.elapsed().as_secs_f64())
    }
}

fn requests(file: &File, is_read: bool, mut dice: Dice, count: u64) -> io::Result<()> {
    let mut page = Box::new(Aligned([0; LEN]));
    for _ in 0..count {
        let place = dice.below(PLACES);
        let offset = place * LEN as u64;
        if is_read {
            file.read_exact_at(&mut page.0, offset)?;
            assert_eq!(page.0[..8], number_of(place));
        } else {
            page.0[..8].copy_from_slice(&number_of(place));
            file.write_all_at(&page.0, offset)?;
        }
    }
    Ok(())
}

/// The output of a command that was given a path.
fn said(command: &str, arguments: &[&str], path: &Path) -> Result<String> {
    let output = Command::new(command).args(arguments).arg(path).stdin(Stdio::null()).output();
    let output = output.map_err(|error| Failure::Skipped(format!("{command}: {error}")))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(Failure::Skipped(format!("{command}: {}", text(&output.stderr)))),
    }
}

/// Takes the file away, which ends nbdfuse.
fn end(fuse: &mut Child, mount: &Path) {
    if said("umount", &[], mount).is_err() {
        drop(fuse.kill());
        drop(said("umount", &["-l"], mount));
    }
    drop(fuse.wait());
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(said("losetup", &["-d"], &self.device));
        end(&mut self.fuse, &self.mount);
    }
}
