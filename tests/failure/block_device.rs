//! Real block devices that fail while I/O runs: nbdkit's filters behind nbdfuse and a loop device,
//! and a tmpfs file behind a loop device that is cut short or has no space. Needs root and the
//! tools; says so when it skips.
#![expect(unsafe_code, reason = "discards far memory")]

use crate::common::{bytes, is_root};
use crate::harness::{
    PAGE, check_page, config, fill_page, in_child, park_on_sigbus, resume, sigbus_addrs, stamp,
    wait_until,
};
use farheap::ByteCount;
use farheap::region::{Advice, Install, Region};
use farheap::store::BlockStore;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const DEVICE_MIB: u64 = 64;
/// Of cases about devices that are late.
const DEADLINE: Duration = Duration::from_secs(1);
/// Of the others: the threads that serve a device are late themselves on a busy machine.
const DEADLINE_LONG: Duration = Duration::from_secs(8);
const BAD: usize = 77;

/// Why the cases cannot run here.
fn missing() -> Option<String> {
    if !is_root() {
        return Some("needs root".to_owned());
    }
    let absent = |tool: &&str| {
        let found = Command::new("sh").args(["-c", &format!("command -v {tool}")]).output();
        !found.is_ok_and(|output| output.status.success())
    };
    let tools = ["nbdkit", "nbdfuse", "losetup", "fusermount3", "mount", "umount"];
    if let Some(tool) = tools.iter().find(|tool| absent(tool)) {
        return Some(format!("needs {tool}"));
    }
    let node =
        ["/dev/fuse", "/dev/loop-control"].into_iter().find(|node| !Path::new(node).exists());
    node.map(|node| format!("needs {node}"))
}

fn run(command: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(command)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{command}: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    Err(format!("{command} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr)))
}

/// What a case has set up; taken down in the reverse order, also after a panic. The region must
/// be gone by then or the process about to end.
struct Setup {
    dir: tempfile::TempDir,
    loops: Vec<String>,
    mounts: Vec<PathBuf>,
    children: Vec<Child>,
}

impl Setup {
    fn new() -> Setup {
        let dir = tempfile::tempdir().expect("a temporary directory");
        Setup { dir, loops: Vec::new(), mounts: Vec::new(), children: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn switch(&self, name: &str, on: bool) {
        if on {
            std::fs::write(self.path(name), b"").expect("a switch is a file");
        } else {
            drop(std::fs::remove_file(self.path(name)));
        }
    }

    /// nbdkit with filters, nbdfuse, and a loop device on top.
    fn nbd_device(&mut self, filters: &[&str], parameters: &[String]) -> Option<String> {
        let (socket, file) = (self.path("nbd.sock"), self.path("disk"));
        std::fs::write(&file, b"").expect("a mount point");
        let size = format!("{DEVICE_MIB}M");
        let mut server = Command::new("nbdkit");
        server.args(["-f", "--exit-with-parent", "-U"]).arg(&socket);
        server.args(filters.iter().map(|filter| format!("--filter={filter}")));
        server.args(["memory", &size]).args(parameters);
        self.start(server);
        wait_until("nbdkit listens", || socket.exists());
        let mut fuse = Command::new("nbdfuse");
        fuse.arg(&file).arg("--unix").arg(&socket);
        self.start(fuse);
        wait_until("nbdfuse mounts", || {
            std::fs::metadata(&file).is_ok_and(|meta| meta.len() == DEVICE_MIB << 20)
        });
        self.mounts.push(file.clone());
        self.loop_device(&file)
    }

    /// Starts a server. It gets nothing of this process's: a case that dies would seem to go on
    /// for as long as a server holds its output open.
    fn start(&mut self, mut server: Command) {
        let [to, said] = [Stdio::null(), Stdio::null()];
        let child = server.stdin(Stdio::null()).stdout(to).stderr(said).spawn();
        self.children.push(child.expect("nbdkit and nbdfuse start"));
    }

    /// A tmpfs of its own with a sparse file, and a loop device on top.
    fn tmpfs_device(&mut self, tmpfs_mib: u64) -> Option<(String, PathBuf)> {
        let mount = self.path("tmpfs");
        std::fs::create_dir(&mount).expect("a mount point");
        let size = format!("size={tmpfs_mib}m");
        let target = mount.to_str().expect("a plain name");
        if let Err(reason) = run("mount", &["-t", "tmpfs", "-o", &size, "farheap-test", target]) {
            println!("skipped: {reason}");
            return None;
        }
        self.mounts.push(mount.clone());
        let file = mount.join("disk");
        let disk = std::fs::File::create(&file).expect("a file");
        disk.set_len(DEVICE_MIB << 20).expect("sparse");
        self.loop_device(&file).map(|device| (device, file))
    }

    fn loop_device(&mut self, file: &Path) -> Option<String> {
        let file = file.to_str().expect("a plain name");
        match run("losetup", &["-f", "--show", "--direct-io=on", file]) {
            Ok(device) => {
                self.loops.push(device.clone());
                Some(device)
            }
            Err(reason) => {
                println!("skipped: {reason}");
                None
            }
        }
    }

    fn kill_server(&mut self) {
        self.children[0].kill().expect("runs");
        drop(self.children[0].wait());
    }

    fn tear_down(&mut self) {
        for device in self.loops.drain(..) {
            drop(run("losetup", &["-d", &device]));
        }
        // nbdkit first: nbdfuse then gives up on what is in flight.
        for child in &mut self.children {
            drop(child.kill());
            drop(child.wait());
        }
        self.children.clear();
        for mount in self.mounts.drain(..).rev() {
            drop(run("umount", &["-l", mount.to_str().expect("a plain name")]));
        }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.tear_down();
    }
}

/// Stamped far memory on a device.
struct OnDevice {
    region: Region,
    base: usize,
    pages: usize,
}

impl OnDevice {
    fn new(device: &str, pages: usize) -> OnDevice {
        OnDevice::with_deadline(device, pages, DEADLINE_LONG)
    }

    fn with_deadline(device: &str, pages: usize, deadline: Duration) -> OnDevice {
        let store = BlockStore::open(device, None).expect("a block device");
        let config = config(Install::Auto).deadline(deadline);
        let region = Region::create(config, Arc::new(store)).expect("root may do everything");
        let len = ByteCount((pages * PAGE) as u64);
        let base = region.map(len).expect("the device has room").cast::<u8>().as_ptr() as usize;
        OnDevice { region, base, pages }
    }

    fn addr(&self, page: usize) -> usize {
        self.base + page * PAGE
    }

    fn fill(&self, pages: std::ops::Range<usize>) {
        pages.for_each(|page| fill_page(self.addr(page), stamp(page)));
    }

    fn check(&self, pages: std::ops::Range<usize>) {
        pages.for_each(|page| check_page(self.addr(page), stamp(page), page));
    }

    fn evict(&self, pages: std::ops::Range<usize>) -> farheap::Result<()> {
        let len = ByteCount((pages.len() * PAGE) as u64);
        self.region.advise(&[bytes(self.addr(pages.start) as *const u8, len)], Advice::PageOutNow)
    }

    fn discard(&self, page: usize) {
        let (ptr, len) = (self.addr(page) as *const u8, ByteCount(PAGE as u64));
        // SAFETY: the case gives the page up.
        unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }.expect("inside the region");
    }

    /// While `broken`, one page is touched and lost; afterwards all others are there.
    fn lose_one_page(&self, broken: impl FnOnce(), mended: impl FnOnce()) {
        park_on_sigbus();
        self.fill(0..self.pages);
        self.evict(0..self.pages).expect("the device works");
        broken();
        let addr = self.addr(BAD);
        let thread = std::thread::spawn(move || crate::harness::read_word(addr));
        assert_eq!(sigbus_addrs(1), [addr]);
        mended();
        self.check(0..BAD);
        self.check(BAD + 1..self.pages);
        self.discard(BAD);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
        assert_eq!(self.region.stats().poisoned, 1);
        self.fill(0..self.pages);
        wait_until("write-back works", || self.evict(0..self.pages).is_ok());
        self.check(0..self.pages);
    }
}

/// Runs a case with its set-up in a child; the set-up is taken down whatever happens in between.
fn with_device(name: &'static str, said: &[&str], body: impl FnOnce(&mut Setup)) {
    if let Some(reason) = missing() {
        println!("skipped: {reason}");
        return;
    }
    let ended = in_child(name, || {
        let mut setup = Setup::new();
        body(&mut setup);
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(said);
}

fn error_filter(setup: &Setup, errno: &str, what: &str) -> Vec<String> {
    let switch = setup.path("errors").display().to_string();
    vec![
        format!("error-{what}={errno}"),
        format!("error-{what}-rate=100%"),
        format!("error-{what}-file={switch}"),
    ]
}

#[test]
fn read_errors_of_a_device_cost_the_pages_touched_meanwhile() {
    let name = "block_device::read_errors_of_a_device_cost_the_pages_touched_meanwhile";
    with_device(name, &["page at 0x", "(EIO)", "SIGBUS"], |setup| {
        let parameters = error_filter(setup, "EIO", "pread");
        let Some(device) = setup.nbd_device(&["error"], &parameters) else { return };
        let far = OnDevice::new(&device, 2000);
        far.lose_one_page(|| setup.switch("errors", true), || setup.switch("errors", false));
    });
}

/// Writes until a fault has no room, mends, and goes on.
fn write_without_room(far: &OnDevice, broken: impl FnOnce(), mended: impl FnOnce()) {
    park_on_sigbus();
    broken();
    let written = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for page in 0..far.pages {
                fill_page(far.addr(page), stamp(page));
                written.store(page + 1, Ordering::Release);
            }
        });
        let addr = sigbus_addrs(1)[0];
        let done = written.load(Ordering::Acquire);
        assert_eq!(addr, far.addr(done));
        far.region.map(ByteCount(PAGE as u64)).expect_err("there is no room");
        mended();
        wait_until("write-back works again", || far.region.evict_all().is_ok());
        far.check(0..done);
        far.discard(done);
        resume();
    });
    far.check(0..far.pages);
}

#[test]
fn write_errors_of_a_device_keep_pages_in_memory() {
    let name = "block_device::write_errors_of_a_device_keep_pages_in_memory";
    with_device(name, &["write-back failed", "errno"], |setup| {
        let parameters = error_filter(setup, "EIO", "pwrite");
        let Some(device) = setup.nbd_device(&["error"], &parameters) else { return };
        let far = OnDevice::new(&device, 6000);
        let (on, off) = (|| setup.switch("errors", true), || setup.switch("errors", false));
        write_without_room(&far, on, off);
    });
}

#[test]
fn a_device_slower_than_the_deadline_is_an_error() {
    let name = "block_device::a_device_slower_than_the_deadline_is_an_error";
    with_device(name, &["page at 0x", "ETIMEDOUT", "SIGBUS"], |setup| {
        // Every read takes three deadlines; writes do not.
        let late = format!("rdelay={}ms", DEADLINE.as_millis() * 3);
        let Some(device) = setup.nbd_device(&["delay"], &[late]) else { return };
        let far = OnDevice::with_deadline(&device, 500, DEADLINE);
        park_on_sigbus();
        far.fill(0..500);
        far.evict(0..500).expect("writes are fast");
        let addr = far.addr(BAD);
        let thread = std::thread::spawn(move || crate::harness::read_word(addr));
        assert_eq!(sigbus_addrs(1), [addr]);
        far.discard(BAD);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
    });
}

#[test]
fn a_device_within_the_deadline_is_waited_for() {
    let name = "block_device::a_device_within_the_deadline_is_waited_for";
    with_device(name, &[], |setup| {
        let Some(device) = setup.nbd_device(&["delay"], &["delay-read=20ms".to_owned()]) else {
            return;
        };
        let far = OnDevice::new(&device, 500);
        far.fill(0..500);
        far.evict(0..500).expect("the device works");
        far.check(0..40);
        assert_eq!(far.region.stats().poisoned, 0);
        eprintln!("done");
    });
}

#[test]
fn a_paused_device_is_an_error_and_goes_on_later() {
    let name = "block_device::a_paused_device_is_an_error_and_goes_on_later";
    with_device(name, &["page at 0x", "ETIMEDOUT", "SIGBUS"], |setup| {
        let control = setup.path("pause.sock");
        let parameter = format!("pause-control={}", control.display());
        let Some(device) = setup.nbd_device(&["pause"], &[parameter]) else { return };
        // What is read while it is not paused must not be late.
        let far = OnDevice::new(&device, 500);
        let tell = |command: &[u8]| {
            use std::io::{Read, Write};
            let mut socket =
                std::os::unix::net::UnixStream::connect(&control).expect("nbdkit listens");
            socket.write_all(command).expect("nbdkit listens");
            let mut answer = [0u8; 1];
            socket.read_exact(&mut answer).expect("nbdkit answers");
        };
        far.lose_one_page(|| tell(b"p"), || tell(b"r"));
    });
}

#[test]
fn a_killed_server_is_an_error() {
    let name = "block_device::a_killed_server_is_an_error";
    with_device(name, &["page at 0x", "SIGBUS"], |setup| {
        let Some(device) = setup.nbd_device(&[], &[]) else { return };
        let far = OnDevice::new(&device, 2100);
        park_on_sigbus();
        far.fill(0..2100);
        far.evict(0..1000).expect("the device works");
        far.fill(1000..2000);
        setup.kill_server();
        let addr = far.addr(BAD);
        let thread = std::thread::spawn(move || crate::harness::read_word(addr));
        assert_eq!(sigbus_addrs(1), [addr]);
        far.check(1900..2000);
        far.discard(BAD);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
    });
}

#[test]
fn a_truncated_file_below_a_device_is_an_error() {
    let name = "block_device::a_truncated_file_below_a_device_is_an_error";
    with_device(name, &["page at 0x", "SIGBUS"], |setup| {
        let Some((device, file)) = setup.tmpfs_device(DEVICE_MIB + 8) else { return };
        let far = OnDevice::new(&device, 500);
        park_on_sigbus();
        far.fill(0..500);
        far.evict(0..500).expect("the device works");
        let disk = std::fs::OpenOptions::new().write(true).open(&file).expect("the file");
        disk.set_len(0).expect("the file can be cut");
        let addr = far.addr(BAD);
        let thread = std::thread::spawn(move || crate::harness::read_word(addr));
        assert_eq!(sigbus_addrs(1), [addr]);
        far.discard(BAD);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
    });
}

#[test]
fn a_full_file_system_below_a_device_keeps_pages_in_memory() {
    let name = "block_device::a_full_file_system_below_a_device_keeps_pages_in_memory";
    with_device(name, &["write-back failed", "errno"], |setup| {
        let Some((device, file)) = setup.tmpfs_device(DEVICE_MIB) else { return };
        let far = OnDevice::new(&device, 6000);
        let handler = file.with_file_name("handler");
        let fill = || {
            use std::io::Write;
            let mut full = std::fs::File::create(&handler).expect("a file");
            let block = vec![1u8; 1 << 20];
            while full.write_all(&block).is_ok() {}
        };
        let free = || std::fs::remove_file(&handler).expect("just written");
        write_without_room(&far, fill, free);
    });
}
