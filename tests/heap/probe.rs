//! The feature probe on the machine that runs the tests.
//!
//! Guards: the interface.

use farheap::ByteCount;
use farheap::probe::{Contents, Route, look};
use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn every_route_is_tried() {
    const SIGBUS: u64 = 1 << 7;
    let routes = look().routes;
    assert_eq!(routes.map(|(route, _)| route), Route::ALL);
    for (route, outcome) in routes {
        match outcome {
            // The kernel names what it can do: SIGBUS since 4.14.
            Ok(features) => assert!(features & SIGBUS != 0, "{route}: {features:#x}"),
            Err(errno) => assert!(errno > 0, "{route}: {errno}"),
        }
    }
}

#[test]
fn a_probe_leaves_no_file_descriptor_open() {
    // Once for what the standard library opens for good.
    let _ = look();
    let open = || fs::read_dir("/proc/self/fd").expect("/proc").count();
    // Other tests of this binary open and close files meanwhile: the lowest of many readings.
    let least = || (0..200).map(|_| open()).min();
    let before = least();
    for _ in 0..50 {
        let _ = look();
    }
    let after = least();
    assert!(after < before.map(|count| count + 40), "{before:?} before, {after:?} after 50 probes");
}

#[test]
fn memory_available_never_exceeds_the_machine() {
    let memory = look().memory;
    let (total, available) = (memory.total.expect("/proc"), memory.available().expect("/proc"));
    assert!(ByteCount::ZERO < available && available <= total, "{memory:?}");
}

#[test]
fn more_address_space_than_there_is_cannot_be_reserved() {
    assert_eq!(look().try_reserve(ByteCount::mib(1)), Ok(()));
    assert_eq!(look().try_reserve(ByteCount::gib(1 << 20)), Err(libc::ENOMEM));
}

#[test]
fn what_a_file_holds_is_recognized() {
    let temporary = tempfile::NamedTempFile::new().expect("a temporary file");
    let (file, len) = (temporary.as_file(), ByteCount::mib(1));
    file.set_len(len.get()).expect("set_len");
    let contents = || look().contents(file, len).expect("a readable file");
    assert_eq!(contents(), Contents::Zeros);
    file.write_all_at(b"ext", 1080).expect("write");
    assert_eq!(contents(), Contents::Data { offset: 1080 });
}
