//! Regions that end while something is under way.

use crate::common::place::LoopDevice;
use crate::common::{bytes, region, watchdog};
use crate::harness::{
    DEADLINE, Far, HUNG, PAGE, WAYS, config, in_child, read_word, wait_until, write_word,
};
use farheap::ByteCount;
use farheap::region::{Advice, Install};
use farheap::store::{BlockStore, Store};
use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;

const PAGES: usize = 256;

#[test]
fn prefetches_under_way_do_not_hold_up_the_end() {
    let _watchdog = watchdog("shutdown with prefetches", HUNG);
    for &install in WAYS {
        for paused in [false, true] {
            let config = config(install).deadline(DEADLINE);
            let Some(far) = Far::new(config, PAGES, 1) else { return };
            far.store(0..PAGES);
            if paused {
                far.control.pause();
            }
            far.region
                .advise(&[bytes(far.ptr(0), far.len(PAGES))], Advice::WillNeed)
                .expect("inside the region");
            drop(far);
        }
    }
}

#[test]
fn writes_that_are_stuck_do_not_hold_up_the_end() {
    let _watchdog = watchdog("shutdown with writes", HUNG);
    for &install in WAYS {
        let Some(far) = Far::new(config(install), PAGES, 1) else { return };
        far.fill(0..PAGES);
        far.control.pause();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(far.region.evict_all()));
            wait_until("writes", || far.control.held() > 0);
            // The call is answered when the device is; regions cannot be dropped before.
            far.control.release();
        });
        far.fill(0..PAGES);
        far.control.pause();
        drop(far);
    }
}

/// A thread that waits for a page when the region ends has nothing to go on with: it dies of a
/// signal, and never sees zeros.
#[test]
fn a_fault_under_way_at_the_end_is_a_signal() {
    let name = "shutdown::a_fault_under_way_at_the_end_is_a_signal";
    let ended = in_child(name, || {
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        far.store(0..PAGES);
        far.control.pause();
        let thread = far.touch(3);
        wait_until("the fault", || far.control.held() > 0);
        drop(far);
        println!("went on with {:?}", thread.join());
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGSEGV, libc::SIGBUS]);
}

#[test]
fn memory_of_a_region_that_has_ended_cannot_be_read() {
    let name = "shutdown::memory_of_a_region_that_has_ended_cannot_be_read";
    let ended = in_child(name, || {
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        far.fill(0..PAGES);
        let addr = far.addr(0);
        drop(far);
        println!("read {}", read_word(addr));
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGSEGV, libc::SIGBUS]);
}

// A device that never answers.

fn command(program: &str, args: &[&OsStr]) -> bool {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// A small file system on a loop device, for the child of this process.
struct Mounted {
    dir: PathBuf,
    device: Option<LoopDevice>,
}

impl Mounted {
    /// `None`, with the reason printed, where that is not possible.
    fn new() -> Option<Mounted> {
        let dir = Mounted::dir_of(std::process::id());
        std::fs::create_dir_all(dir.join("on")).expect("a directory");
        let mut mounted = Mounted { dir, device: None };
        let file = mounted.dir.join("backing");
        File::create(&file).and_then(|file| file.set_len(64 << 20)).expect("a sparse file");
        let device = mounted.device.insert(LoopDevice::attach(&file, &[])?);
        let (path, on) = (device.path().as_os_str(), mounted.dir.join("on"));
        let made = command("mkfs.ext4", &["-q".as_ref(), path]);
        if !made || !command("mount", &[path, on.as_os_str()]) {
            println!("skipped: no ext4 can be mounted");
            return None;
        }
        // A child that fails while the file system is frozen cannot even end.
        let rescued = mounted.dir.join("on");
        std::thread::spawn(move || {
            std::thread::sleep(HUNG / 2);
            drop(Frozen(rescued));
        });
        Some(mounted)
    }

    fn dir_of(parent: u32) -> PathBuf {
        std::env::temp_dir().join(format!("farheap-test-frozen-{parent}"))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        drop(Frozen(self.dir.join("on")));
        command("umount", &["--lazy".as_ref(), self.dir.join("on").as_os_str()]);
        drop(self.device.take());
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// A file system that takes no writes while this lives.
struct Frozen(PathBuf);

impl Frozen {
    fn new(on: PathBuf) -> Option<Frozen> {
        command("fsfreeze", &["--freeze".as_ref(), on.as_os_str()]).then_some(Frozen(on))
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        command("fsfreeze", &["--unfreeze".as_ref(), self.0.as_os_str()]);
    }
}

/// The mappings of this process that a userfaultfd watches.
fn watched_mappings() -> Vec<Range<usize>> {
    let mut found = Vec::new();
    let mut range = 0..0;
    for line in std::fs::read_to_string("/proc/self/smaps").expect("readable").lines() {
        if let Some(next) = mapping_of(line) {
            range = next;
        }
        let flags = line.strip_prefix("VmFlags:").unwrap_or_default();
        if flags.split(' ').any(|flag| flag == "um" || flag == "uw") {
            found.push(range.clone());
        }
    }
    found
}

/// The range at the beginning of a line of `/proc/self/maps`.
fn mapping_of(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    let hex = |text| usize::from_str_radix(text, 16).ok();
    Some(hex(start)?..hex(end)?)
}

fn is_mapped(range: &Range<usize>) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let mut at = range.start;
    maps.lines().filter_map(mapping_of).for_each(|mapping| {
        if mapping.contains(&at) {
            at = mapping.end;
        }
    });
    at >= range.end
}

/// The kernel goes by addresses: memory that a write still waits for must not become something else.
#[test]
fn memory_that_a_stuck_device_may_still_use_stays_mapped() {
    let name = "shutdown::memory_that_a_stuck_device_may_still_use_stays_mapped";
    let is_child = Mounted::dir_of(parent_id()).exists();
    let mounted = if is_child { None } else { Mounted::new() };
    if !is_child && mounted.is_none() {
        return;
    }
    let ended = in_child(name, || {
        let on = Mounted::dir_of(parent_id()).join("on");
        let path = on.join("far");
        let store = BlockStore::open(&path, Some(ByteCount::mib(32))).expect("a store");
        if !store.describe().contains("io_uring") {
            println!("skipped: without io_uring the writing thread itself is stuck");
            return;
        }
        let config = config(Install::Auto);
        let pages = config.limit.0 as usize / PAGE;
        let Some(region) = region(config, Arc::new(store)) else { return };
        let base =
            region.map(ByteCount::mib(16)).expect("there is room").cast::<u8>().as_ptr() as usize;
        let Some(frozen) = Frozen::new(on) else {
            println!("skipped: the file system cannot be frozen");
            return;
        };
        // The evictor is to write, and nobody to wait for it.
        let some = pages / 4;
        (0..some).for_each(|at| write_word(base + at * PAGE, 1));
        let len = ByteCount((some * PAGE) as u64);
        region.advise(&[bytes(base as *const u8, len)], Advice::PageOut).expect("in the region");
        wait_until("a write is stuck", || region.stats().writes_in_flight > 0);
        let watched = watched_mappings();
        drop(region);
        let kept = watched.iter().filter(|range| is_mapped(range)).count();
        assert!(kept > 0, "nothing is left of {watched:x?}");
        drop(frozen);
        let again = BlockStore::open(&path, None);
        assert!(again.is_err(), "{again:?} would be overwritten");
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["has not answered for 10 s"]);
}
