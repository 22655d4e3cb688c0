//! The feature probe on the machine that runs the tests.
//!
//! Guards: the interface.

use farheap::ByteCount;
use farheap::probe::{Contents, Memory, Route, contents, try_reserve, try_ring};
use std::fs;
use std::os::unix::fs::FileExt;

#[test]
fn every_route_is_tried() {
    const SIGBUS: u64 = 1 << 7;
    for route in Route::ALL {
        match route.features() {
            // The kernel names what it can do: SIGBUS since 4.14.
            Ok(features) => assert!(features & SIGBUS != 0, "{route}: {features:#x}"),
            Err(errno) => assert!(errno > 0, "{route}: {errno}"),
        }
    }
}

#[test]
fn a_probe_leaves_no_file_descriptor_open() {
    let look = || (Route::ALL.map(Route::features), try_ring(), Memory::detect());
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
    let memory = Memory::detect();
    let (total, available) = (memory.total.expect("/proc"), memory.available().expect("/proc"));
    assert!(ByteCount::ZERO < available && available <= total, "{memory:?}");
}

#[test]
fn more_address_space_than_there_is_cannot_be_reserved() {
    assert_eq!(try_reserve(ByteCount::mib(1)), Ok(()));
    assert_eq!(try_reserve(ByteCount::gib(1 << 20)), Err(libc::ENOMEM));
}

#[test]
fn what_a_file_holds_is_recognized() {
    let temporary = tempfile::NamedTempFile::new().expect("a temporary file");
    let (file, len) = (temporary.as_file(), ByteCount::mib(1));
    file.set_len(len.get()).expect("set_len");
    let found = || contents(file, len).expect("a readable file");
    assert_eq!(found(), Contents::Zeros);
    file.write_all_at(b"ext", 1080).expect("write");
    assert_eq!(found(), Contents::Data { offset: 1080 });
}
