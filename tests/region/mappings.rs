//! A process that has used up its mappings (`vm.max_map_count`) while chunks are open: memory that
//! runs short then still comes and goes. Processes of their own: the limit is the process's.
//!
//! Guards: G5, G6.

#![expect(unsafe_code, reason = "reads and writes far memory, maps address space")]

use crate::common::child::alone;
use crate::common::{bytes, mem_store, watchdog};
use farheap::ByteCount;
use farheap::region::{Advice, Region, RegionConfig};
use std::ptr::NonNull;
use std::time::Duration;

const HANG: Duration = Duration::from_secs(600);
const PAGE: usize = 4096;
const CHUNK: usize = 2 << 20;

fn region() -> Option<Region> {
    let config = RegionConfig::new().limit(ByteCount::mib(48));
    match Region::create(config, mem_store(ByteCount::mib(256))) {
        Ok(region) => Some(region),
        Err(farheap::Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("region: {error}"),
    }
}

fn touch(data: NonNull<u8>, from: usize, to: usize) {
    for at in (from..to).step_by(PAGE) {
        // SAFETY: within what the test has mapped and given no reference to.
        unsafe { data.as_ptr().wrapping_add(at).cast::<u64>().write(at as u64 + 1) };
    }
}

fn check(data: NonNull<u8>, from: usize, to: usize) {
    for at in (from..to).step_by(PAGE) {
        // SAFETY: as above; written before.
        let word = unsafe { data.as_ptr().wrapping_add(at).cast::<u64>().read() };
        assert_eq!(word, at as u64 + 1, "at {at:#x}");
    }
}

/// Maps single pages that the kernel cannot join, until it refuses.
#[expect(clippy::disallowed_methods, reason = "the case is about mappings")]
fn use_up_mappings() {
    for n in 0.. {
        let access = if n % 2 == 0 { libc::PROT_READ } else { libc::PROT_NONE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, -1, 0) };
        if ptr == libc::MAP_FAILED {
            println!("{n} mappings of the program's own");
            return;
        }
        assert!(n < 4_000_000, "no limit on mappings was met");
    }
}

#[test]
fn chunks_are_closed_although_the_process_has_no_mapping_left() {
    alone("chunks_are_closed_although_the_process_has_no_mapping_left", || {
        let _watch = watchdog("no mapping left", HANG);
        let Some(region) = region() else { return };
        let len = 96 << 20;
        let data = region.map(ByteCount(len as u64)).expect("room").cast::<u8>();
        touch(data, 0, 32 << 20);
        let opened = region.stats().chunks_opened;
        use_up_mappings();
        // In the middle of a run of open chunks: freed, pinned, made cold.
        let at = |chunk: usize| data.as_ptr().wrapping_add(chunk * CHUNK);
        let chunk = ByteCount(CHUNK as u64);
        // SAFETY: nobody needs the contents.
        unsafe { region.discard(bytes(at(4), chunk).cast_mut()) }.expect("mapped");
        // SAFETY: mapped, and zero again.
        assert_eq!(unsafe { at(4).cast::<u64>().read() }, 0);
        touch(data, 4 * CHUNK, 5 * CHUNK);
        let pinned = region.pin(bytes(at(7), ByteCount(1))).expect("its run is closed");
        region.advise(&[bytes(at(10), chunk)], Advice::Cold).expect("mapped");
        region.advise(&[bytes(at(12), chunk)], Advice::PageOutNow).expect("written");
        touch(data, 32 << 20, len);
        check(data, 0, len);
        drop(pinned);
        let stats = region.stats();
        assert!(
            stats.resident_bytes_max.0 <= stats.limit_bytes.0 && stats.poisoned == 0,
            "{stats}"
        );
        assert!(opened == 0 || stats.chunks_closed > 0, "{stats}");
    });
}
