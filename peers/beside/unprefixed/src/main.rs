//! farheap in a program whose jemalloc has another crate's features: it is the C library's malloc, and reads its options
//! from another symbol.

#[path = "../../ask.rs"]
mod ask;
#[path = "../../common.rs"]
mod common;

use ask::ask;
use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{Far, FarHeap};
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

fn main() -> ExitCode {
    assert_eq!(libc::malloc as *const () as usize, tikv_jemalloc_sys::malloc as *const () as usize);
    let heap = match common::start("capacity:256MiB,threshold:64KiB") {
        Ok(heap) => heap,
        Err(skipped) => return skipped,
    };
    assert_eq!(ask::<u8>(c"opt.cache_oblivious"), 0, "by the feature");
    assert_eq!(ask::<isize>(c"arenas.dirty_decay_ms"), 2_000, "by a control");

    let mut far: FarVec<u64, Far> = FarVec::new_in(Far);
    far.extend(0..4 << 20);
    heap.region().evict_all().expect("a device");
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
