//! Tiers used against their grain: started and ended while others allocate from them, and on a device that
//! is small, and fails.
//!
//! Guards: G5.

use crate::common::child::alone;
use crate::common::faulty::FaultyStore;
use crate::common::{Dice, StopOnDrop, heap, mem_store, seed, watchdog};
use allocator_api2::vec::Vec as TierVec;
use farheap::config::Builder;
use farheap::store::Op;
use farheap::{ByteCount, Error, Heap, Scope, Tier};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const EIO: i32 = 5;

fn config(text: &str) -> Builder {
    Heap::builder().parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Bytes with a pattern, of a tier or of what a scope of one gives.
enum Block {
    Asked(TierVec<u8, Tier>, u8),
    Scoped(Vec<u8>, u8),
}

impl Block {
    /// From the tier, if it still runs.
    fn asked(tier: Tier, len: usize, seed: u8) -> Option<Block> {
        let mut bytes = TierVec::new_in(tier);
        bytes.try_reserve_exact(len).ok()?;
        bytes.resize(len, seed);
        assert_eq!(Tier::of(bytes.as_ptr()), Some(tier), "{len} bytes");
        Some(Block::Asked(bytes, seed))
    }

    /// In a scope of the tier: local once that has ended.
    fn scoped(tier: Tier, len: usize, seed: u8) -> Block {
        let _scope = Scope::enter(tier);
        let bytes = vec![seed; len];
        let of = Tier::of(bytes.as_ptr()).expect("no child's");
        assert!(of == tier || of == Tier::LOCAL, "{len} bytes of {of:?} for {tier:?}");
        Block::Scoped(bytes, seed)
    }

    fn check(&self) {
        let (bytes, seed) = match self {
            Block::Asked(bytes, seed) => (&bytes[..], seed),
            Block::Scoped(bytes, seed) => (&bytes[..], seed),
        };
        let wrong = bytes.iter().position(|byte| byte != seed);
        assert_eq!(wrong, None, "of {} bytes of {:?}", bytes.len(), Tier::of(bytes.as_ptr()));
    }
}

/// What threads hand each other, and which tier they allocate from.
struct Exchange {
    tier: Mutex<Option<Tier>>,
    /// Blocks from `tier`, since it is that.
    allocated: AtomicU64,
    blocks: Mutex<VecDeque<Block>>,
    is_over: AtomicBool,
}

impl Exchange {
    /// A short life: allocates, leaves blocks to others and frees some of theirs.
    fn live(&self, seed: u64) {
        let mut dice = Dice::new(seed);
        for _ in 0..8 {
            let tier = *self.tier.lock().expect("no thread fails");
            let Some(tier) = tier else { continue };
            let most = 64 << dice.below(14);
            let (len, pattern) = (1 + dice.below(most) as usize, dice.roll() as u8);
            let block = match dice.below(2) {
                0 => Some(Block::scoped(tier, len, pattern)),
                _ => Block::asked(tier, len, pattern),
            };
            self.allocated.fetch_add(u64::from(block.is_some()), SeqCst);
            let mut blocks = self.blocks.lock().expect("no thread fails");
            blocks.extend(block);
            let old = if blocks.len() > 60 { blocks.pop_front() } else { None };
            drop(blocks);
            old.iter().for_each(Block::check);
        }
    }

    fn drain(&self) {
        let blocks = std::mem::take(&mut *self.blocks.lock().expect("no thread fails"));
        blocks.iter().for_each(Block::check);
    }
}

#[test]
fn tiers_start_and_end_under_short_lived_threads_that_use_them() {
    const TEST: &str = "tiers_start_and_end_under_short_lived_threads_that_use_them";
    const TEXTS: [&str; 4] = [
        "far_limit:8MiB,capacity:128MiB,span:4GiB",
        "far_limit:24MiB,capacity:128MiB,span:4GiB",
        "far_limit:16MiB,capacity:128MiB,far_metadata:on,span:4GiB",
        "far_limit:8MiB,capacity:128MiB,mode:in_thread,span:4GiB",
    ];
    alone(TEST, || {
        let _watchdog = watchdog(TEST, Duration::from_secs(240));
        let Some(default) = heap("far_limit:8MiB,capacity:256MiB") else { return };
        let seed = seed(TEST);
        let exchange = Exchange {
            tier: Mutex::new(None),
            allocated: AtomicU64::new(0),
            blocks: Mutex::new(VecDeque::new()),
            is_over: AtomicBool::new(false),
        };
        let (mut in_use, lives) = (0, AtomicU64::new(0));
        std::thread::scope(|starters| {
            let others = StopOnDrop(&exchange.is_over);
            for _ in 0..3 {
                starters.spawn(|| {
                    while !exchange.is_over.load(SeqCst) {
                        let seed = seed ^ lives.fetch_add(1, SeqCst);
                        std::thread::scope(|one| {
                            one.spawn(|| exchange.live(seed));
                        });
                    }
                });
            }
            for round in 0..24 {
                let text = TEXTS[round % TEXTS.len()];
                let tier = match default.add_tier("guest", config(text)) {
                    // jemalloc's metadata needs faults of system calls served, which not everybody may.
                    Err(Error::UffdUnavailable { reasons }) if text.contains("far_metadata:on") => {
                        println!("left out: {text}: {reasons}");
                        continue;
                    }
                    tier => tier.expect("the place is free again"),
                };
                exchange.allocated.store(0, SeqCst);
                *exchange.tier.lock().expect("no thread fails") = Some(tier.tier());
                while exchange.allocated.load(SeqCst) < 200 {
                    std::thread::yield_now();
                }
                // Mostly in use, as long as it is what threads use.
                for _ in 0..3 {
                    match tier.shutdown() {
                        Ok(()) => break,
                        Err(Error::InUse { .. }) => in_use += 1,
                        Err(error) => panic!("round {round}: {error}"),
                    }
                    exchange.drain();
                }
                *exchange.tier.lock().expect("no thread fails") = None;
                loop {
                    // Threads that saw it before leave their blocks a moment later.
                    exchange.drain();
                    match tier.shutdown() {
                        Ok(()) | Err(Error::NotRunning) => break,
                        Err(Error::InUse { .. }) => std::thread::yield_now(),
                        Err(error) => panic!("round {round}: {error}"),
                    }
                }
                assert!(Block::asked(tier.tier(), 100, 1).is_none(), "it has ended");
            }
            drop(others);
        });
        println!("{} threads lived, {in_use} refusals", lives.load(SeqCst));
        assert!(in_use > 0, "no tier was in use when it was to end");
        exchange.drain();
        default.shutdown().expect("everything was freed");
    });
}

/// Words that are all different, or the same.
fn word(at: usize, version: u64, noisy: bool) -> u64 {
    if noisy { Dice::new(at as u64 ^ version << 40).roll() } else { version }
}

#[test]
fn a_tier_on_a_small_device_that_fails_now_and_then_keeps_its_data() {
    const TEST: &str = "a_tier_on_a_small_device_that_fails_now_and_then_keeps_its_data";
    const THREADS: usize = 3;
    /// Words of a part that is rewritten as one, and parts of a thread: 8 MiB.
    const PART: usize = 4 << 10;
    const PARTS: usize = 256;
    alone(TEST, || {
        let _watchdog = watchdog(TEST, Duration::from_secs(240));
        let Some(default) = heap("far_limit:8MiB,capacity:64MiB") else { return };
        let store = FaultyStore::new(mem_store(ByteCount::mib(40)), 1);
        let device = store.control();
        let text = "far_limit:12MiB,span:4GiB";
        let tier = default.add_tier("small", config(text).store(Arc::new(store)));
        let tier = tier.expect("the machine has room");
        let seed = seed(TEST);
        let first_round = AtomicU64::new(0);
        std::thread::scope(|threads| {
            for thread in 0..THREADS as u64 {
                let (tier, first_round, device) = (&tier, &first_round, &device);
                threads.spawn(move || {
                    let mut dice = Dice::new(seed ^ thread);
                    let mut words = TierVec::new_in(tier.tier());
                    words.resize(PART * PARTS, 0_u64);
                    let mut versions = [(0, false); PARTS];
                    for round in 1..1_500 {
                        let part = dice.below(PARTS as u64) as usize;
                        let range = part * PART..(part + 1) * PART;
                        let (version, noisy) = versions[part];
                        for at in range.clone() {
                            assert_eq!(words[at], word(at, version, noisy), "part {part}");
                        }
                        versions[part] = (round, dice.below(2) == 0);
                        let (version, noisy) = versions[part];
                        range.for_each(|at| words[at] = word(at, version, noisy));
                        if first_round.fetch_add(1, SeqCst) == 300 {
                            device.fail_fraction(Op::Write, 200_000, EIO);
                        }
                    }
                    device.heal();
                    for (part, (version, noisy)) in versions.into_iter().enumerate() {
                        for at in part * PART..(part + 1) * PART {
                            assert_eq!(words[at], word(at, version, noisy), "part {part}");
                        }
                    }
                });
            }
        });
        let stats = tier.stats();
        println!("{stats}");
        assert!(device.injected() > 0, "nothing failed: {stats}");
        assert_eq!(stats.poisoned, 0, "{stats}");
        assert!(stats.resident_bytes_max <= stats.limit_bytes, "{stats}");
        // More than limit and device hold is refused, and what there is stays.
        let mut kept = Vec::new();
        while let Some(block) = Block::asked(tier.tier(), 1 << 20, kept.len() as u8) {
            kept.push(block);
            assert!(kept.len() < 64, "64 MiB are more than there is");
        }
        assert!(kept.len() > 16, "{} MiB were had", kept.len());
        kept.iter().for_each(Block::check);
        drop(kept);
        default.shutdown().expect("everything was freed");
    });
}
