//! Certificates for tests, and servers that have them.
#![allow(dead_code, reason = "each test binary uses a part")]

use super::common::TestServer;
use farheap_nbd::ServerAddress;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, date_time_ymd};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// An authority, whose certificates are in directories.
pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
    dir: tempfile::TempDir,
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let key = KeyPair::generate().expect("a key");
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).expect("a certificate").pem();
        let dir = tempfile::tempdir().expect("a directory");
        Authority { issuer: Issuer::new(params, key), pem, dir }
    }

    /// A directory with certificates for a server and for a client by these names.
    pub(crate) fn make(&self, folder: &str, names: &[&str], is_expired: bool) -> PathBuf {
        let dir = self.dir.path().join(folder);
        std::fs::create_dir(&dir).expect("made");
        std::fs::write(dir.join("ca-cert.pem"), &self.pem).expect("written");
        for side in ["server", "client"] {
            let key = KeyPair::generate().expect("a key");
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let mut params = CertificateParams::new(names).expect("names");
            if is_expired {
                params.not_after = date_time_ymd(2001, 1, 1);
            }
            let pem = params.signed_by(&key, &self.issuer).expect("a certificate").pem();
            std::fs::write(dir.join(format!("{side}-cert.pem")), pem).expect("written");
            std::fs::write(dir.join(format!("{side}-key.pem")), key.serialize_pem())
                .expect("written");
        }
        dir
    }
}

/// A server that exists, on a port that this process listens on: it may end and begin anew.
pub(crate) struct Activated {
    listener: TcpListener,
    child: Option<Child>,
}

impl Activated {
    pub(crate) fn new() -> Activated {
        Activated { listener: TcpListener::bind("127.0.0.1:0").expect("a port"), child: None }
    }

    /// Starts a server; `None`, after saying so, where it is not installed.
    pub(crate) fn start(&mut self, program: &str, arguments: &[&str]) -> Option<()> {
        let version = Command::new(program).arg("--version").stdout(Stdio::null()).status();
        if version.is_err() {
            println!("skipped: {program} is not installed");
            return None;
        }
        self.stop();
        // Servers take a socket that listens as descriptor 3.
        const ACTIVATE: &str = "exec 3<&0 </dev/null; LISTEN_FDS=1 LISTEN_PID=$$; export LISTEN_FDS LISTEN_PID; exec \"$@\"";
        let socket: OwnedFd = self.listener.try_clone().expect("a copy").into();
        let child = Command::new("sh")
            .args(["-c", ACTIVATE, "sh", program])
            .args(arguments)
            .stdin(Stdio::from(socket))
            .spawn();
        self.child = Some(child.expect("a shell"));
        Some(())
    }

    pub(crate) fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Its address by TLS.
    pub(crate) fn address(&self, certificates: &Path) -> ServerAddress {
        let port = self.listener.local_addr().expect("its address").port();
        secured(port, certificates)
    }

    /// Its address without.
    pub(crate) fn plain_address(&self) -> ServerAddress {
        let port = self.listener.local_addr().expect("its address").port();
        format!("nbd://127.0.0.1:{port}/").parse().expect("an address")
    }
}

impl Drop for Activated {
    fn drop(&mut self) {
        self.stop();
    }
}

/// nbdkit that demands TLS, with certificates of this directory.
pub(crate) fn nbdkit_tls(certificates: &Path, options: &[&str]) -> Option<Activated> {
    let mut server = Activated::new();
    let certificates = format!("--tls-certificates={}", certificates.display());
    // One thread: with several, one may receive the next key while another sends, for which GnuTLS 3.7 has no lock. On a
    // busy machine some connection in ten test runs broke.
    let fixed =
        ["--foreground", "--exit-with-parent", "--threads=1", "--tls=require", &certificates];
    server.start("nbdkit", &[&fixed, options, &["memory", "64M"]].concat())?;
    Some(server)
}

/// The address of a server of ours, by TLS, which it does not know.
pub(crate) fn secured_address(server: &TestServer, certificates: &Path) -> ServerAddress {
    secured(server.port, certificates)
}

fn secured(port: u16, certificates: &Path) -> ServerAddress {
    let certificates = certificates.display();
    format!("nbds://127.0.0.1:{port}/?tls-certificates={certificates}").parse().expect("an address")
}
