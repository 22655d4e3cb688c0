//! What a heap says of its memory, against what the kernel says; and jemalloc's metadata in far memory.
//!
//! Guards: G1, G3.

use crate::common::child::alone;
use crate::common::{Dice, eventually, heap, seed, watchdog};
use allocator_api2::vec::Vec as TierVec;
use farheap::{ByteCount, Far, Heap, Local, Tier};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

/// What the kernel counts as this process's resident memory, in bytes.
fn rss() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").expect("the kernel has it");
    let line = text.lines().find_map(|line| line.strip_prefix("Rss:")).expect("a line");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    kib << 10
}

/// What we count: local memory and all tiers.
fn counted() -> u64 {
    let tiers = Heap::tiers();
    let far: u64 = tiers.iter().map(|tier| tier.usage().resident_bytes.get()).sum();
    Local::usage().resident_bytes.get() + far
}

/// A block that is written whole.
enum Block {
    Local(#[allow(dead_code, reason = "is held")] TierVec<u64, Local>),
    Far(#[allow(dead_code, reason = "is held")] TierVec<u64, Tier>),
}

fn block(dice: &mut Dice, tiers: &[Tier]) -> Block {
    // Every power of two from 64 bytes to 512 KiB is as likely as any other. Sizes between jemalloc's classes: it
    // takes all of a block for resident, of which the last pages are never touched then.
    let power = 64 << dice.below(14);
    let words = (power + dice.below(power)) as usize / 8;
    let at = dice.below(2 * tiers.len() as u64) as usize;
    match tiers.get(at) {
        Some(tier) => {
            let mut block = TierVec::with_capacity_in(words, *tier);
            block.resize(words, 7);
            Block::Far(block)
        }
        None => {
            let mut block = TierVec::with_capacity_in(words, Local);
            block.resize(words, 7);
            Block::Local(block)
        }
    }
}

#[test]
fn what_is_counted_is_what_the_kernel_counts_while_threads_come_and_go() {
    const NAME: &str = "what_is_counted_is_what_the_kernel_counts_while_threads_come_and_go";
    alone(NAME, || {
        let _watchdog = watchdog("heap_memory", Duration::from_secs(300));
        let Some(default) = heap("far_limit:96MiB,capacity:512MiB") else { return };
        let config = Heap::builder().parse("far_limit:48MiB,capacity:512MiB").expect("options");
        let more = default.add_tier("more", config).expect("the machine has room");
        let tiers = [default.tier(), more.tier()];
        let seed = seed(NAME);
        // What both count beside blocks: code, stacks, tables.
        let (rss_before, counted_before) = (rss(), counted());
        let kept = Mutex::new(Vec::new());
        for round in 0..20 {
            std::thread::scope(|all| {
                for thread in 0..10 {
                    let kept = &kept;
                    all.spawn(move || {
                        let mut dice = Dice::new(seed ^ (round << 8 | thread));
                        let mut mine: Vec<Block> =
                            (0..100).map(|_| block(&mut dice, &tiers)).collect();
                        // Half of it outlives the thread; some of the others' ends here.
                        mine.truncate(50);
                        let mut kept = kept.lock().expect("no thread panics");
                        kept.append(&mut mine);
                        let end = kept.len() - dice.below(5) as usize;
                        kept.truncate(end);
                    });
                }
            });
            // What is evicted meanwhile is counted by both a moment later: nothing is, while all rest.
            let (rss, counted) = (rss() - rss_before, counted() - counted_before);
            println!(
                "round {round}: the kernel {rss}, we {counted}, {} blocks",
                kept.lock().expect("no panic").len()
            );
        }
        // The evictor may still be at it: both counts change, and are not taken at the same moment.
        let (mut difference, mut last) = (1.0, (0, 0));
        let is_alike = eventually(|| {
            let (kernel, ours) = (rss() - rss_before, counted() - counted_before);
            assert!(kernel > 150 << 20, "{kernel} bytes: the test is too small");
            difference = kernel.abs_diff(ours) as f64 / kernel as f64;
            last = (kernel, ours);
            difference < 0.01
        });
        println!("at the end: the kernel {}, we {}", last.0, last.1);
        let local = Local::usage();
        println!("local:\n{local}");
        for tier in Heap::tiers() {
            println!("{}:\n{}{}", tier.name(), tier.usage(), tier.stats());
        }
        assert!(is_alike, "{difference:.4} apart");
        for tier in Heap::tiers() {
            let memory = tier.usage();
            assert!(memory.allocated_bytes <= memory.active_bytes, "{memory}");
            let (metadata, blocks) =
                (memory.metadata_bytes.0, memory.small_bytes.0 + memory.large_bytes.0);
            assert!(metadata > 0 && metadata < (blocks + metadata) / 20, "{memory}");
        }
        drop(kept);
        default.shutdown().expect("all far memory is freed");
    });
}

#[test]
fn freed_local_memory_goes_back_though_the_threads_that_freed_it_sleep() {
    const NAME: &str = "freed_local_memory_goes_back_though_the_threads_that_freed_it_sleep";
    const THREADS: usize = 4;
    alone(NAME, || {
        let _watchdog = watchdog("heap_memory", Duration::from_secs(300));
        let Some(heap) = heap("far_limit:16MiB,capacity:64MiB") else { return };
        let (freed, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
        std::thread::scope(|all| {
            for _ in 0..THREADS {
                all.spawn(|| {
                    // Of sizes that jemalloc's arenas have, and of those that threads keep themselves.
                    let blocks: Vec<Vec<u8>> = (0..500)
                        .map(|n| vec![7; if n % 2 == 0 { 24 << 10 } else { 48 << 10 }])
                        .collect();
                    drop(blocks);
                    freed.wait();
                    end.wait();
                });
            }
            freed.wait();
            let dirty = || Local::usage().dirty_bytes;
            println!("{} dirty at first", dirty());
            let is_back = eventually(|| dirty() < ByteCount::mib(1));
            let memory = Local::usage();
            end.wait();
            assert!(is_back, "{memory}");
        });
        heap.shutdown().expect("no far memory is allocated");
    });
}

/// jemalloc takes 2 MiB of tables for resident wherever its addresses enter another GiB.
#[test]
fn addresses_that_were_given_back_are_not_counted_as_local_memory() {
    const NAME: &str = "addresses_that_were_given_back_are_not_counted_as_local_memory";
    const SIZE: usize = 5 << 29;
    alone(NAME, || {
        let _watchdog = watchdog("heap_memory", Duration::from_secs(60));
        let Some(heap) = heap("far_limit:16MiB,capacity:64MiB") else { return };
        let before = Local::usage().resident_bytes;
        drop(TierVec::<u8, Local>::with_capacity_in(SIZE, Local));
        let mut more = ByteCount::ZERO;
        let is_gone = eventually(|| {
            more = ByteCount(Local::usage().resident_bytes.get().saturating_sub(before.get()));
            more < ByteCount::mib(1)
        });
        assert!(is_gone, "{more} of a block that was never touched");
        heap.shutdown().expect("no far memory is allocated");
    });
}

#[test]
fn far_metadata_leaves_and_comes_back_like_all_far_memory() {
    const NAME: &str = "far_metadata_leaves_and_comes_back_like_all_far_memory";
    alone(NAME, || {
        let _watchdog = watchdog("heap_memory", Duration::from_secs(300));
        let Some(heap) = heap("far_limit:16MiB,capacity:512MiB,far_metadata:on") else {
            return;
        };
        let mut dice = Dice::new(seed(NAME));
        let mut blocks: Vec<TierVec<u64, Far>> = Vec::new();
        for round in 0..10_u64 {
            for _ in 0..5_000 {
                let mut block = TierVec::with_capacity_in(1 + dice.below(500) as usize, Far);
                block.extend((0..block.capacity() as u64).map(|n| n ^ round));
                blocks.push(block);
            }
            heap.region().evict_all().expect("the device works");
            let gone = blocks.len() / 3;
            for _ in 0..gone {
                let at = dice.below(blocks.len() as u64) as usize;
                let block = blocks.swap_remove(at);
                let salt = block[0];
                assert!(block.iter().zip(0..).all(|(seen, n)| *seen == n ^ salt), "round {round}");
            }
            heap.purge();
        }
        let memory = heap.usage();
        assert!(memory.metadata_bytes > ByteCount::kib(256), "{memory}");
        assert!(memory.resident_bytes <= ByteCount::mib(16), "{memory}");
        assert!(heap.stats().bytes_read > ByteCount::ZERO);
        drop(blocks);
        heap.shutdown().expect("all far memory is freed");
    });
}
