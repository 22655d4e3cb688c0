//! farheap in a program with a `_rjem_malloc_conf` of its own, among it what farheap cannot have: it is linked, its
//! choices hold, and what has to be repaired is.

#![expect(unsafe_code, reason = "exports a symbol")]

#[path = "../../ask.rs"]
mod ask;
#[path = "../../common.rs"]
mod common;

use ask::ask;
use farheap::allocator_api2::boxed::Box;
use farheap::allocator_api2::vec::Vec as FarVec;
use farheap::{Far, FarHeap};
use std::ffi::c_char;
use std::process::ExitCode;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

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

fn main() -> ExitCode {
    assert_eq!(ask::<u8>(c"opt.prof"), 1, "the program's options reach jemalloc");
    assert_eq!(ask::<u8>(c"background_thread"), 1);
    let heap = match common::start("capacity:256MiB,threshold:0") {
        Ok(heap) => heap,
        Err(skipped) => return skipped,
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
            heap.region().evict_all().expect("a device");
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
