//! Zeroed far memory is zero, also where it was used before and shares pages with live data; and so is what
//! was dropped of a page.
//!
//! Guards: G3, G4.
#![expect(unsafe_code, reason = "allocates through the allocator trait, drops parts of pages")]

use crate::common::child::cases;
use crate::common::{bytes, eventually, heap, watchdog};
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as FarVec;
use farheap::{ByteCount, Error, Far, Heap};
use std::alloc::Layout;
use std::time::Duration;

const BLOCK: usize = 96 << 10;
const BLOCKS: usize = 400;

fn layout() -> Layout {
    Layout::from_size_align(BLOCK, 4096).expect("a valid layout")
}

#[test]
fn recycled_memory_is_zero_when_asked_for() {
    let _watchdog = watchdog("heap_zeroed", Duration::from_secs(120));
    for limit in [ByteCount::mib(16), ByteCount::mib(128)] {
        let heap = match Heap::builder().far_limit(limit).start() {
            Ok(heap) => heap,
            Err(Error::UffdUnavailable { reasons }) => {
                println!("skipped: userfaultfd is not permitted here: {reasons}");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let dirty = || {
            let block = Far.allocate(layout()).expect("below the limit").cast::<u8>();
            // SAFETY: the block is `BLOCK` bytes of this test's.
            unsafe { block.as_ptr().write_bytes(0xAB, BLOCK) };
            block
        };
        let mut blocks: Vec<_> = (0..BLOCKS).map(|_| dirty()).collect();
        // Every other block goes, so that most pages keep live neighbours.
        for at in (0..BLOCKS).step_by(2) {
            // SAFETY: allocated above with this layout, and replaced below.
            unsafe { Far.deallocate(blocks[at], layout()) };
        }
        heap.purge();
        for at in (0..BLOCKS).step_by(2) {
            let zeroed = Far.allocate_zeroed(layout()).expect("below the limit").cast::<u8>();
            // SAFETY: the block is `BLOCK` initialised bytes of this test's.
            let bytes = unsafe { std::slice::from_raw_parts(zeroed.as_ptr(), BLOCK) };
            let wrong = bytes.iter().position(|byte| *byte != 0);
            assert_eq!(wrong, None, "{limit}: block {at} is not zero");
            blocks[at] = zeroed;
        }
        for (at, block) in blocks.into_iter().enumerate() {
            // SAFETY: inside of the block.
            let middle = unsafe { block.as_ptr().add(BLOCK / 2) };
            // SAFETY: as above.
            let byte = unsafe { middle.read() };
            assert_eq!(byte, if at % 2 == 0 { 0 } else { 0xAB }, "{limit}: block {at}");
            // SAFETY: allocated above with this layout.
            unsafe { Far.deallocate(block, layout()) };
        }
        heap.shutdown().expect("everything was freed");
    }
}

/// A kernel page.
const UNIT: usize = 4096;
const WORDS: usize = (48 << 20) / 8;

/// More data than the limit; some of what is behind its middle is read until pages there count as ones that are not
/// written, and all is evicted.
fn data_only_read(heap: &Heap) -> FarVec<u64, Far> {
    // Each of them learns it by itself.
    const CHUNK: usize = (2 << 20) / 8;
    let mut data = FarVec::new_in(Far);
    data.resize(WORDS, 7);
    let evict = || heap.region().evict_all().expect("the device has room");
    for _ in 0..4 {
        evict();
        let middle = &data[WORDS / 2..WORDS / 2 + 2 * CHUNK];
        assert!(middle.iter().step_by(UNIT / 2).all(|word| *word == 7));
    }
    evict();
    data
}

/// Where a page in the middle begins.
fn page_of(data: &FarVec<u64, Far>, bytes: usize) -> *mut u64 {
    let middle = data.as_ptr().addr() + WORDS * 4;
    data.as_ptr().cast_mut().with_addr(middle.next_multiple_of(bytes))
}

fn load(at: *mut u64) -> u64 {
    // SAFETY: a word of the test's far memory, which the kernel may drop.
    unsafe { at.read_volatile() }
}

fn store(at: *mut u64, word: u64) {
    // SAFETY: as above.
    unsafe { at.write_volatile(word) };
}

#[test]
fn what_is_dropped_of_a_page_stays_zero_when_the_page_comes_back() {
    const TEST: &str = "what_is_dropped_of_a_page_stays_zero_when_the_page_comes_back";
    let kinds = ["mode:auto", "install:copy", "mode:in_thread", "checksum:off"];
    cases(TEST, &kinds, |conf| {
        let conf = format!("far_limit:32MiB,capacity:256MiB,readahead:off,{conf}");
        let Some(heap) = heap(&conf) else { return };
        let data = data_only_read(&heap);
        let page = page_of(&data, 2 << 20);
        let words = UNIT / 8;
        let at = |unit: usize| page.wrapping_add(unit * words);
        let mut is_zero = [false; 4];
        // In memory and clean, written, and on the device.
        for (unit, is_written) in [(1, false), (2, true), (0, false)] {
            if unit > 0 {
                assert_eq!(load(at(3)), 7, "it is in memory");
            }
            if is_written {
                store(at(unit), 8);
            }
            // SAFETY: the test gives the content up.
            let dropped = unsafe {
                Heap::madvise(
                    bytes(at(unit).cast(), ByteCount(UNIT as u64)).cast_mut(),
                    libc::MADV_DONTNEED,
                )
            };
            assert_eq!(dropped, Ok(true));
            is_zero[unit] = true;
            for when in ["dropped", "back from the device"] {
                for (unit, is_zero) in is_zero.iter().enumerate() {
                    let want = if *is_zero { 0 } else { 7 };
                    for word in [0, words - 1] {
                        let found = load(at(unit).wrapping_add(word));
                        assert_eq!(found, want, "{when}: unit {unit}, word {word}");
                    }
                }
                heap.region().evict_all().expect("the device has room");
            }
        }
        // Not zero any more.
        store(at(1), 9);
        heap.region().evict_all().expect("the device has room");
        assert_eq!((load(at(1)), load(at(1).wrapping_add(1)), load(at(2))), (9, 0, 0));
    });
}

#[test]
fn a_page_can_be_written_after_a_hole_of_it_was_read() {
    const TEST: &str = "a_page_can_be_written_after_a_hole_of_it_was_read";
    let kinds = ["mode:auto", "mode:in_thread"];
    cases(TEST, &kinds, |conf| {
        // A fault was served for ever there.
        let _watchdog = watchdog(TEST, Duration::from_secs(120));
        let conf = format!("far_limit:32MiB,capacity:256MiB,readahead:off,{conf}");
        let Some(heap) = heap(&conf) else { return };
        let data = data_only_read(&heap);
        let page = page_of(&data, 64 << 10);
        let at = |unit: usize| page.wrapping_add(unit * UNIT / 8);
        assert_eq!(
            [0, 1, 2, 3].map(|unit| load(at(unit))),
            [7; 4],
            "in memory, and write-protected"
        );
        #[expect(clippy::disallowed_methods, reason = "what the kernel drops is tested")]
        // SAFETY: the test gives the content up.
        let dropped = unsafe { libc::madvise(at(1).cast(), UNIT, libc::MADV_DONTNEED) };
        assert_eq!((dropped, load(at(1))), (0, 0));
        let opened = || heap.stats().faults_protect;
        let before = opened();
        store(at(2), 9);
        assert!(eventually(|| opened() > before), "it was write-protected");
        store(at(1), 8);
        heap.region().evict_all().expect("the device has room");
        assert_eq!([0, 1, 2, 3].map(|unit| load(at(unit))), [7, 8, 9, 7]);
    });
}
