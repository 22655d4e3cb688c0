//! `limit`: far memory gives way to what of the process is not far.
//!
//! Guards: G1.

#![expect(unsafe_code, reason = "reads far memory that only its test has written")]

use crate::common::{Dice, StopOnDrop, amount, child, eventually, heap};
use allocator_api2::vec::Vec as FarVec;
use farheap::manager::MemoryManager;
use farheap::region::RegionConfig;
use farheap::{ByteCount, Error, Far, Heap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: ByteCount = ByteCount::mib(96);
/// What the kernel's number may be wrong by.
const WRONG_MAX: u64 = MIB;

/// Resident bytes of this process, as `proc_pid_status(5)` has them.
fn resident() -> u64 {
    status("VmRSS:")
}

/// Bytes that a line of `/proc/self/status` gives.
fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = text.lines().find_map(|line| line.strip_prefix(name)).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

fn numbers_of(count: u64) -> FarVec<u64, Far> {
    let mut numbers = FarVec::new_in(Far);
    numbers.extend(0..count);
    numbers
}

fn numbers(heap: &Heap) -> FarVec<u64, Far> {
    let numbers = numbers_of(20 << 20); // 160 MiB.
    assert!(heap.stats().bytes_written > ByteCount::ZERO, "{}", heap.stats());
    numbers
}

#[test]
fn far_memory_gives_way_to_what_is_not_far_and_gets_it_back() {
    child::alone("far_memory_gives_way_to_what_is_not_far_and_gets_it_back", || {
        let Some(heap) = heap("limit:96MiB,capacity:512MiB") else { return };
        let numbers = numbers(&heap);
        let is_within = || resident() <= LIMIT.get() + WRONG_MAX;
        assert!(eventually(is_within), "{} resident, {}", resident(), heap.stats());
        let had = heap.stats().limit_bytes;
        assert!(had < LIMIT, "the code of this test is resident too: {had}");
        let boxes: Vec<Box<[u8; 1000]>> = (0..40_000).map(|n| Box::new([n as u8; 1000])).collect();
        // Read over and over, far memory takes all that it may have.
        let reads_and_is_within = || {
            assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
            heap.stats().limit_bytes <= ByteCount(had.get() - 30 * MIB) && is_within()
        };
        assert!(eventually(reads_and_is_within), "{} resident, {}", resident(), heap.stats());
        assert!(boxes.iter().enumerate().all(|(n, bytes)| bytes[999] == n as u8));
        drop(boxes);
        let comes_back = || heap.stats().limit_bytes >= ByteCount(had.get() - 10 * MIB);
        assert!(eventually(comes_back), "{}", heap.stats());
        // The program's own limit holds below that.
        heap.region().set_limit(ByteCount::mib(20)).expect("nothing is pinned");
        assert_eq!(heap.stats().limit_bytes, ByteCount::mib(20));
        assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
        assert!(heap.stats().resident_bytes <= ByteCount::mib(20), "{}", heap.stats());
        drop(numbers);
        heap.shutdown().expect("nothing is in use");
    });
}

#[test]
fn a_process_above_its_limit_says_so_and_goes_on() {
    child::alone("a_process_above_its_limit_says_so_and_goes_on", || {
        let Some(heap) = heap("limit:96MiB,capacity:512MiB") else { return };
        let numbers = numbers(&heap);
        let local: Vec<_> = (0..110_000).map(|n| Box::new([n as u8; 1000])).collect();
        // The output of a child that is alone is a file.
        let told = || {
            let output = std::fs::read_to_string("/proc/self/fd/2").expect("a file");
            output.matches("the process is above its limit of 96.0 MiB").count()
        };
        assert!(eventually(|| told() > 0), "{}", heap.stats());
        assert!(heap.stats().limit_bytes <= ByteCount::mib(10), "{}", heap.stats());
        assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
        assert!(local.iter().enumerate().all(|(n, bytes)| bytes[500] == n as u8));
        assert_eq!(told(), 1, "once");
        drop((numbers, local));
        heap.shutdown().expect("nothing is in use");
    });
}

/// Tables of far memory cannot give way, and pages need room beside them.
#[test]
fn far_memory_with_many_tables_is_served_beside_too_much_local_memory() {
    child::alone("far_memory_with_many_tables_is_served_beside_too_much_local_memory", || {
        let conf = "limit:96MiB,capacity:4GiB";
        let Some(heap) = heap(conf) else { return };
        const LEN: usize = (1792 << 20) / 8;
        // A page of each 2 MiB is enough for most of its tables.
        const STEP: usize = (2 << 20) / 8;
        let mut far: FarVec<u64, Far> = FarVec::with_capacity_in(LEN, Far);
        let places = far.spare_capacity_mut();
        places.iter_mut().step_by(STEP).zip(0..).for_each(|(place, n)| {
            place.write(n);
        });
        assert!(heap.stats().metadata_bytes > ByteCount::mib(8), "{}", heap.stats());
        let local: Vec<_> = (0..110_000).map(|n| Box::new([n as u8; 1000])).collect();
        let gave_way = || heap.stats().limit_bytes < ByteCount::mib(40);
        assert!(eventually(gave_way), "{}", heap.stats());
        let is_there = |(place, n): &(&std::mem::MaybeUninit<u64>, u64)| {
            // SAFETY: written above.
            unsafe { place.assume_init_read() == *n }
        };
        let seen = places.iter().step_by(STEP).zip(0..).filter(is_there);
        assert_eq!(seen.count(), LEN / STEP);
        assert!(local.iter().enumerate().all(|(n, bytes)| bytes[500] == n as u8));
        drop((local, far));
        heap.shutdown().expect("nothing is in use");
    });
}

/// Local memory, stacks, children and the program's own limit change while far memory is read.
#[test]
fn far_memory_is_right_while_everything_beside_it_grows_and_shrinks() {
    fn deep(levels: usize) -> usize {
        let frame = std::hint::black_box([levels as u8; 4096]);
        if levels == 0 { 0 } else { deep(levels - 1) + usize::from(frame[7] == levels as u8) }
    }
    const CASES: &[&str] = &["mode:auto", "install:copy", "mode:in_thread"];
    let name = "far_memory_is_right_while_everything_beside_it_grows_and_shrinks";
    child::cases(name, CASES, |case| {
        let conf = format!("limit:64MiB,capacity:512MiB,{case}");
        let Some(heap) = heap(&conf) else { return };
        let mut far: FarVec<u64, Far> = FarVec::new_in(Far);
        far.extend(0..12 << 20); // 96 MiB.
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let others = StopOnDrop(&is_over);
            let (far, heap, is_over) = (&far, &heap, &is_over);
            let until_over = move |act: &dyn Fn(u64)| {
                let mut dice = Dice::new(7);
                while !is_over.load(Ordering::Relaxed) {
                    act(dice.roll());
                }
            };
            scope.spawn(move || {
                until_over(&|roll| {
                    let kept: Vec<_> = (0..roll % 300).map(|n| vec![n as u8; 100_000]).collect();
                    assert!(
                        kept.iter().zip(0..).all(|(kept, n): (_, u64)| kept[99_999] == n as u8)
                    );
                });
            });
            scope.spawn(move || {
                until_over(&|roll| {
                    let spawn = |_| std::thread::spawn(move || deep(roll as usize % 200));
                    let threads: Vec<_> = (0..16).map(spawn).collect();
                    let joined = threads.into_iter().map(|thread| thread.join().expect("no panic"));
                    assert_eq!(joined.max(), Some(roll as usize % 200));
                });
            });
            scope.spawn(move || {
                until_over(&|roll| {
                    let limit = ByteCount(RegionConfig::LIMIT_MIN.get() + roll % (60 << 20));
                    // Where local memory has left less, that holds.
                    drop(heap.region().set_limit(limit));
                });
            });
            let looks = (0..amount(3)).flat_map(|_| (0..far.len()).step_by(97));
            let wrong = looks.into_iter().find(|at| far[*at] != *at as u64);
            drop(others);
            assert_eq!(wrong, None, "{}", heap.stats());
        });
        assert_eq!(heap.stats().poisoned, 0, "{}", heap.stats());
        drop(far);
        heap.shutdown().expect("nothing is in use");
    });
}

#[test]
fn it_conflicts_with_a_memory_manager_and_is_not_for_further_tiers() {
    let options = Heap::builder().parse("limit:64MiB,far_limit:1GiB,capacity:64MiB");
    let options = options.expect("sizes");
    let limits = options.limits().expect("a configuration");
    assert_eq!(limits, (Some(ByteCount::mib(64)), ByteCount::mib(64)));
    let manager = MemoryManager::start(ByteCount::mib(64)).expect("manager");
    let error = options.manager(&manager).start().expect_err("both");
    assert!(error.to_string().contains("limit: conflicts with a memory manager"), "{error}");
    let limits = |text| Heap::builder().parse(text).and_then(|options| options.limits());
    assert!(matches!(limits("limit:0"), Err(Error::Config { .. })));
    assert!(matches!(limits("limit:1MiB"), Err(Error::LimitTooSmall { .. })));
}

/// What is charged and not there must not count as room: the program may touch it at any time.
#[test]
fn far_memory_that_the_program_has_emptied_does_not_hide_what_is_not_far() {
    child::alone("far_memory_that_the_program_has_emptied_does_not_hide_what_is_not_far", || {
        let Some(heap) = heap("limit:96MiB,capacity:512MiB") else { return };
        let mut numbers = numbers_of(8 << 20); // 64 MiB.
        assert_eq!(heap.stats().bytes_written, ByteCount::ZERO, "all of it fits");
        let start = 2 << 20;
        let place = numbers[start..].as_mut_ptr();
        let place = place.wrapping_add(place.align_offset(4096));
        #[expect(clippy::disallowed_methods, reason = "does what a program does to its own memory")]
        // SAFETY: part of an allocation of this test, whose numbers it writes again before it reads them.
        let rc = unsafe { libc::madvise(place.cast(), 32 << 20, libc::MADV_DONTNEED) };
        assert_eq!(rc, 0);
        // What is not far counts as its maximum of a fifth of a second at most. Nothing tells when that is over.
        std::thread::sleep(Duration::from_millis(500));
        let stats = heap.stats();
        assert!(stats.resident_bytes < ByteCount::mib(40), "{stats}");
        let beside = resident() - stats.resident_bytes.get();
        let had = LIMIT.get() - stats.limit_bytes.get();
        assert!(had + 3 * MIB >= beside, "{beside} bytes are not far, and {had} count");
        numbers[start..].iter_mut().zip(start as u64..).for_each(|(number, n)| *number = n);
        numbers.extend(8 << 20..16 << 20);
        assert!(numbers.iter().zip(0..).all(|(number, n)| *number == n));
        let is_within = || resident() <= LIMIT.get() + WRONG_MAX;
        assert!(eventually(is_within), "{} resident, {}", resident(), heap.stats());
        drop(numbers);
        heap.shutdown().expect("nothing is in use");
    });
}

#[test]
fn it_changes_while_the_program_runs() {
    child::alone("it_changes_while_the_program_runs", || {
        let Some(heap) = heap("limit:256MiB,capacity:512MiB") else { return };
        let numbers = numbers_of(16 << 20); // 128 MiB.
        assert_eq!(heap.stats().bytes_written, ByteCount::ZERO, "all of it fits");
        heap.set_limit(LIMIT).expect("nothing is pinned");
        let is_within = || resident() <= LIMIT.get() + WRONG_MAX;
        assert!(eventually(is_within), "{} resident, {}", resident(), heap.stats());
        assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
        heap.set_limit(ByteCount::mib(256)).expect("a higher one");
        let all = || numbers.iter().map(|number| number & 1).sum::<u64>() == 8 << 20;
        assert!(eventually(|| all() && resident() > 128 * MIB), "{}", heap.stats());
        assert!(matches!(heap.set_limit(ByteCount::mib(1)), Err(Error::LimitTooSmall { .. })));
        drop(numbers);
        heap.shutdown().expect("nothing is in use");
        assert_eq!(heap.set_limit(LIMIT), Err(Error::NotRunning));
    });
}

/// README's first program, with data of half, one and a half, and six times the limit.
#[test]
fn the_peak_of_the_first_program_of_the_readme_is_below_its_limit() {
    child::alone("the_peak_of_the_first_program_of_the_readme_is_below_its_limit", || {
        let Some(heap) = heap("limit:64MiB") else { return };
        for mib in [32, 96, 384] {
            let numbers = numbers_of(mib << 17);
            assert!(numbers.iter().zip(0..).all(|(number, n)| *number == n));
        }
        assert!(heap.stats().bytes_read > ByteCount::ZERO, "{}", heap.stats());
        heap.shutdown().expect("nothing is in use");
        let peak = status("VmHWM:");
        assert!(peak <= 64 * MIB + WRONG_MAX, "peak {}", ByteCount(peak));
    });
}
