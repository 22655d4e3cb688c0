//! farheap in a program with a `_rjem_malloc_conf` of its own, among it what farheap cannot have: it is linked, its
//! choices hold, and what has to be repaired is.

#![expect(unsafe_code, reason = "exports a symbol, and asks jemalloc")]

use farheap::allocator_api2::boxed::Box;
use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{Config, Far, FarHeap, Heap};
use std::ffi::{CStr, c_char};
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

/// As the tests of C and C++: the machine does not allow it.
const SKIPPED: u8 = 77;

#[repr(transparent)]
pub struct Text(*const c_char);

// SAFETY: points to a constant.
unsafe impl Sync for Text {}

// SAFETY: jemalloc's documented name, and its type.
#[unsafe(export_name = "_rjem_malloc_conf")]
pub static OPTIONS: Text = Text(
    c"prof:true,lg_prof_sample:14,background_thread:true,cache_oblivious:true,dirty_decay_ms:5000"
        .as_ptr(),
);

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
    assert_eq!(ask::<u8>(c"opt.prof"), 1, "the program's options reach jemalloc");
    assert_eq!(ask::<u8>(c"background_thread"), 1);
    let config = Config::parse("capacity:256MiB,threshold:0").expect("a configuration");
    let heap = match Heap::start(config) {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return ExitCode::from(SKIPPED);
        }
    };
    assert_eq!(ask::<u8>(c"background_thread"), 0, "its threads would call for far memory");
    assert_eq!(ask::<isize>(c"arenas.dirty_decay_ms"), 5_000, "chosen by the program");

    // Sampled blocks of all sizes, which jemalloc places and sizes in another way than others.
    let mut far: FarVec<Box<[u8], Far>, Far> = FarVec::new_in(Far);
    for turn in 0..20_000_usize {
        let mut block = FarVec::new_in(Far);
        block.resize(1 + turn * 7919 % 40_000, turn as u8);
        far.push(block.into_boxed_slice());
        if turn % 3 == 0 {
            far.swap_remove(turn / 5);
        }
        if turn % 5_000 == 0 {
            heap.evict_all().expect("a device");
        }
    }
    for block in &far {
        assert!(block.iter().all(|byte| *byte == block[0]), "{} bytes", block.len());
    }
    let list: Vec<String> = (0..100_000).map(|number| number.to_string()).collect();
    assert!(list.iter().enumerate().all(|(number, text)| *text == number.to_string()));
    assert!(heap.stats().bytes_read.0 > 0);
    drop((far, list));
    println!("ok: {}", env!("CARGO_PKG_DESCRIPTION"));
    ExitCode::SUCCESS
}
