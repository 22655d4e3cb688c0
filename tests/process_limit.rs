//! `process_limit`: far memory gives way to what of the process is not far.

mod common;

use allocator_api2::vec::Vec as FarVec;
use common::{child, eventually, heap};
use farheap::manager::{MemoryManager, Mode};
use farheap::{ByteCount, Config, Error, Far, FarHeap, Heap};

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

const MIB: u64 = 1 << 20;
const LIMIT: ByteCount = ByteCount::mib(96);
/// What the kernel's number may be wrong by.
const WRONG_MAX: u64 = MIB;

/// Resident bytes of this process, as `proc_pid_status(5)` has them.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

fn numbers(heap: &Heap) -> FarVec<u64, Far> {
    let mut numbers = FarVec::new_in(Far);
    numbers.extend(0..20 << 20); // 160 MiB.
    assert!(heap.stats().bytes_written > ByteCount::ZERO, "{}", heap.stats());
    numbers
}

#[test]
fn far_memory_gives_way_to_what_is_not_far_and_gets_it_back() {
    child::alone("far_memory_gives_way_to_what_is_not_far_and_gets_it_back", || {
        let Some(heap) = heap("process_limit:96MiB,capacity:512MiB") else { return };
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
        heap.set_limit(ByteCount::mib(20)).expect("nothing is pinned");
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
        let Some(heap) = heap("process_limit:96MiB,capacity:512MiB") else { return };
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

#[test]
fn it_conflicts_with_a_memory_manager_and_is_not_for_further_tiers() {
    let config = Config::parse("process_limit:64MiB,limit:1GiB,capacity:64MiB").expect("a size");
    assert_eq!(
        (config.limit(), config.process_limit()),
        (ByteCount::mib(64), Some(ByteCount::mib(64)))
    );
    let manager = MemoryManager::start(ByteCount::mib(64), Mode::Cooperative).expect("manager");
    let error = Heap::start_under(&manager, config).expect_err("both");
    assert!(
        error.to_string().contains("process_limit: conflicts with a memory manager"),
        "{error}"
    );
    assert!(matches!(Config::parse("process_limit:0"), Err(Error::Config { .. })));
    assert!(matches!(Config::parse("process_limit:1MiB"), Err(Error::LimitTooSmall { .. })));
}
