//! farheap in a program whose jemalloc has another crate's features: it is the C library's malloc, and reads its options
//! from another symbol.

#![expect(unsafe_code, reason = "asks jemalloc")]

use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{Config, Far, FarHeap, Heap};
use std::ffi::CStr;
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

/// As the tests of C and C++: the machine does not allow it.
const SKIPPED: u8 = 77;

/// A number of jemalloc's.
fn ask<T: Copy + Default>(name: &CStr) -> T {
    let (mut value, mut len) = (T::default(), size_of::<T>());
    let (into, none) = ((&raw mut value).cast(), std::ptr::null_mut());
    // SAFETY: `value` is writable for `len` bytes, which jemalloc compares with the control's size.
    let errno = unsafe { tikv_jemalloc_sys::mallctl(name.as_ptr(), into, &raw mut len, none, 0) };
    assert_eq!(errno, 0, "{name:?}");
    value
}

fn main() -> ExitCode {
    assert_eq!(libc::malloc as *const () as usize, tikv_jemalloc_sys::malloc as *const () as usize);
    let config = Config::parse("capacity:256MiB,threshold:64KiB").expect("a configuration");
    let heap = match Heap::start(config) {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::from(SKIPPED);
        }
    };
    assert_eq!(ask::<u8>(c"opt.cache_oblivious"), 0, "by the feature");
    assert_eq!(ask::<isize>(c"arenas.dirty_decay_ms"), 2_000, "by a control");

    let mut far: FarVec<u64, Far> = FarVec::new_in(Far);
    far.extend(0..4 << 20);
    heap.evict_all().expect("a device");
    let by_size: Vec<u64> = (0..1 << 20).collect();
    let sum = far.iter().sum::<u64>() + by_size.iter().sum::<u64>();
    assert_eq!(sum, (0..4_u64 << 20).sum::<u64>() + (0..1_u64 << 20).sum::<u64>());
    assert!(heap.stats().bytes_read.0 > 0);
    #[cfg(feature = "rocksdb")]
    rocks();
    drop((far, by_size));
    heap.shutdown().expect("nothing is allocated");
    println!("ok: {}", env!("CARGO_PKG_DESCRIPTION"));
    ExitCode::SUCCESS
}

/// A table of RocksDB's, with values that are far memory while they are written.
#[cfg(feature = "rocksdb")]
fn rocks() {
    let dir = std::env::temp_dir().join(format!("farheap-rocks-{}", std::process::id()));
    let db = rocksdb::DB::open_default(&dir).expect("a directory");
    for key in 0..1000_u32 {
        db.put(key.to_be_bytes(), vec![key as u8; 100_000]).expect("a write");
    }
    db.flush().expect("a flush");
    for key in 0..1000_u32 {
        let value = db.get(key.to_be_bytes()).expect("a read").expect("a value");
        assert!(value.len() == 100_000 && value.iter().all(|byte| *byte == key as u8));
    }
    drop(db);
    std::fs::remove_dir_all(dir).expect("own directory");
}
