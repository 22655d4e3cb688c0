//! Servers on this machine, with memory: each in a process of its own on a Unix socket.
#![allow(dead_code, reason = "each benchmark uses a part")]

use crate::{Failure, Result};
use clap::ValueEnum;
use farheap_nbd::ServerAddress;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A server that people run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    /// nbdkit, with its memory plugin.
    Nbdkit,
    /// qemu-storage-daemon, with a file in memory.
    Qemu,
}

impl Kind {
    pub(crate) const ALL: [Kind; 2] = [Kind::Nbdkit, Kind::Qemu];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Nbdkit => "nbdkit",
            Kind::Qemu => "qemu-storage-daemon",
        }
    }
}

/// A server with its memory, killed when dropped.
pub(crate) struct Server {
    child: Child,
    kind: Kind,
    len: u64,
    pub(crate) address: ServerAddress,
    dir: tempfile::TempDir,
}

/// A file system in memory.
const IN_MEMORY: &str = "/dev/shm";

impl Server {
    /// Starts one with this number of MiB.
    ///
    /// # Errors
    /// [`Failure::Skipped`] where it is not installed.
    pub(crate) fn start(kind: Kind, mib: u64) -> Result<Server> {
        Server::start_with(kind, mib, &[])
    }

    /// The same with options of nbdkit's, which have names of filters and their settings.
    pub(crate) fn start_with(kind: Kind, mib: u64, options: &[&str]) -> Result<Server> {
        let dir = match kind {
            Kind::Nbdkit => tempfile::tempdir(),
            Kind::Qemu => tempfile::tempdir_in(IN_MEMORY),
        };
        let dir = dir.map_err(Failure::io)?;
        let (socket, len) = (socket_in(dir.path()), mib << 20);
        let mut command = Command::new(kind.name());
        match kind {
            Kind::Nbdkit => {
                command.args(["--foreground", "--exit-with-parent", "--unix"]).arg(&socket);
                let (filters, settings): (Vec<&str>, Vec<&str>) =
                    options.iter().partition(|option| option.starts_with("--"));
                command.args(filters).args(["memory", &format!("{mib}M")]).args(settings);
            }
            Kind::Qemu => {
                let file = dir.path().join("memory");
                File::create(&file).and_then(|file| file.set_len(len)).map_err(Failure::io)?;
                let file = file.display();
                command.args(["--blockdev", &format!("driver=file,node-name=m,filename={file}")]);
                let address = format!("addr.type=unix,addr.path={}", socket.display());
                command.args(["--nbd-server", &format!("{address},max-connections=64")]);
                command.args(["--export", "type=nbd,id=m,node-name=m,name=m,writable=on"]);
            }
        }
        // Connections that end without a word, as those that look whether it listens, are worth lines to servers.
        let child =
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let child = child.map_err(|error| Failure::Skipped(format!("{}: {error}", kind.name())))?;
        let export = if kind == Kind::Nbdkit { "" } else { "m" };
        let address = format!("nbd+unix:///{export}?socket={}", socket.display());
        let address = address.parse().expect("an address");
        let mut server = Server { child, kind, len, address, dir };
        wait_until("it listens", &mut server.child, || UnixStream::connect(&socket).is_ok())?;
        Ok(server)
    }

    /// Its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn socket(&self) -> PathBuf {
        socket_in(self.dir.path())
    }

    pub(crate) fn export(&self) -> &'static str {
        if self.kind == Kind::Nbdkit { "" } else { "m" }
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn socket_in(dir: &Path) -> PathBuf {
    dir.join("socket")
}

/// Looks again and again until something holds.
///
/// # Errors
/// When the process ends before, or after a minute.
pub(crate) fn wait_until(what: &str, child: &mut Child, holds: impl Fn() -> bool) -> Result<()> {
    const PATIENCE: Duration = Duration::from_secs(60);
    let start = Instant::now();
    while !holds() {
        let ended = child.try_wait().map_err(Failure::io)?;
        if let Some(status) = ended {
            return Err(Failure::Broken(format!("{status} before {what}")));
        }
        if start.elapsed() > PATIENCE {
            return Err(Failure::Broken(format!("no sign that {what}")));
        }
        // Servers and mounts tell nobody when they are ready.
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
