//! The feature probe on the machine that runs the tests.

use farheap::ByteCount;
use farheap::probe::{
    Contents, Device, DeviceKind, Directory, Features, Probe, Route, try_reserve,
};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::{fs, io};

#[test]
fn every_route_is_tried_and_each_refusal_has_a_reason() {
    let found = Probe::run().userfaultfd;
    let routes: Vec<Route> = found.attempts.iter().map(|attempt| attempt.route).collect();
    assert_eq!(routes, Route::ALL);
    for refusal in found.attempts.iter().filter_map(|attempt| attempt.outcome.as_ref().err()) {
        assert!(refusal.errno > 0 && !refusal.reason.is_empty(), "{refusal:?}");
    }
    // Where a route is open, the kernel names what it can do: SIGBUS since 4.14.
    assert_eq!(found.best().is_some(), found.features.contains(Features::SIGBUS), "{found:?}");
}

#[test]
fn a_probe_leaves_no_file_descriptor_open() {
    // Once for what the standard library opens for good.
    let _ = Probe::run();
    let open = || fs::read_dir("/proc/self/fd").expect("/proc").count();
    // Other tests of this binary open and close files meanwhile: the lowest of many readings.
    let least = || (0..200).map(|_| open()).min();
    let before = least();
    for _ in 0..50 {
        let _ = Probe::run();
    }
    let after = least();
    assert!(after < before.map(|count| count + 40), "{before:?} before, {after:?} after 50 probes");
}

#[test]
fn memory_available_never_exceeds_the_machine() {
    let memory = Probe::run().memory;
    let (total, available) = (memory.total.expect("/proc"), memory.available().expect("/proc"));
    assert!(ByteCount::ZERO < available && available <= total, "{memory:?}");
}

#[test]
fn more_address_space_than_there_is_cannot_be_reserved() {
    assert_eq!(try_reserve(ByteCount::mib(1)), Ok(()));
    assert_eq!(try_reserve(ByteCount::gib(1 << 20)), Err(libc::ENOMEM));
}

#[test]
fn a_writable_directory_passes_and_is_left_empty() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let found = Directory::probe(dir.path()).expect("probe");
    assert!(found.free > ByteCount::ZERO);
    assert_eq!(fs::read_dir(dir.path()).expect("read_dir").count(), 0);
}

#[test]
fn a_file_is_not_a_directory_and_a_directory_is_not_a_device() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    let error = Directory::probe(file.path()).expect_err("a file");
    assert_eq!(error.kind(), io::ErrorKind::NotADirectory);
    let error = Device::probe(Path::new("/")).expect_err("a directory");
    assert!(error.to_string().contains("neither a block device nor a regular file"));
}

#[test]
fn what_a_file_holds_is_recognized() {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.as_file().set_len(1 << 20).expect("set_len");
    let empty = Device::probe(file.path()).expect("probe");
    assert_eq!((empty.kind, empty.size), (DeviceKind::File, ByteCount::mib(1)));
    assert_eq!(empty.contents, Contents::Zeros);
    assert!(!empty.read_only && !empty.busy);
    file.as_file().write_all_at(b"ext", 1080).expect("write");
    let contents = || Device::probe(file.path()).expect("probe").contents;
    assert_eq!(contents(), Contents::Unknown);
    file.as_file().write_all_at(b"SWAPSPACE2", 4086).expect("write");
    assert_eq!(contents(), Contents::Known("swap space"));
}
