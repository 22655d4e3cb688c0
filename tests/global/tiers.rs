//! Several far tiers at once: each with its own device and limit.
//!
//! Guards: G1, G5.

#![expect(unsafe_code, reason = "forks")]

use crate::common::child::alone;
use crate::common::{
    Dice, config, consumer, eventually, heap, heap_under, mem_store, seed, watchdog,
};
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec as TierVec;
use farheap::manager::MemoryManager;
use farheap::{ByteCount, Error, Far, Heap, Scope, Tier, malloc};
use std::alloc::Layout;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// What the further tiers of most tests are: of other limits.
const TIERS: [(&str, &str); 3] = [
    ("small", "far_limit:8MiB,capacity:256MiB"),
    ("large", "far_limit:16MiB,capacity:256MiB"),
    ("plain", "far_limit:8MiB,capacity:256MiB,io:sync"),
];

/// The default tier and three more, or `None` where userfaultfd is not permitted.
fn four() -> Option<[Heap; 4]> {
    let default = heap("far_limit:8MiB,capacity:256MiB")?;
    let [a, b, c] = TIERS
        .map(|(name, text)| default.add_tier(name, config(text)).expect("the machine has room"));
    Some([default, a, b, c])
}

fn numbers(tier: Tier, count: u64) -> TierVec<u64, Tier> {
    let mut numbers = TierVec::with_capacity_in(count as usize, tier);
    numbers.extend((0..count).map(|n| n ^ tier_salt(tier)));
    numbers
}

/// Something that another tier has another of.
fn tier_salt(tier: Tier) -> u64 {
    use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
    BuildHasherDefault::<DefaultHasher>::default().hash_one(tier)
}

fn are_right(numbers: &TierVec<u64, Tier>) -> bool {
    let salt = tier_salt(*numbers.allocator());
    numbers.iter().zip(0..).all(|(seen, n)| *seen == n ^ salt)
}

#[test]
fn each_tier_has_its_own_device_and_limit() {
    alone("each_tier_has_its_own_device_and_limit", || {
        let _watchdog = watchdog("heap_tiers", Duration::from_secs(120));
        let Some(tiers) = four() else { return };
        let columns = tiers.each_ref().map(|tier| numbers(tier.tier(), 6 << 20)); // 48 MiB each
        assert!(columns.iter().all(are_right));
        for (tier, column) in tiers.iter().zip(&columns) {
            let (name, stats) = (tier.name(), tier.stats());
            assert_eq!(Tier::of(column.as_ptr()), Some(tier.tier()));
            assert!(
                tier.region().contains(column.as_ptr().cast()) && Far::contains(column.as_ptr())
            );
            assert_eq!(tier.usage().allocated_bytes, ByteCount::mib(48), "{name}");
            assert!(stats.resident_bytes_max <= stats.limit_bytes, "{name}: {stats}");
            assert!(stats.bytes_written >= ByteCount::mib(24), "{name}: {stats}");
            assert!(stats.stored_bytes <= ByteCount::mib(64), "{name}: {stats}");
        }
        let each = tiers.iter().map(Heap::stats);
        let total = each.reduce(|sum, stats| sum.plus(&stats)).expect("four tiers");
        assert_eq!(total.limit_bytes, ByteCount::mib(8 + 8 + 16 + 8));
        assert!(total.committed_bytes >= ByteCount::mib(4 * 48), "{total}");
        let names: Vec<String> = Heap::tiers().iter().map(|tier| tier.name().to_owned()).collect();
        assert_eq!(names, ["far", "small", "large", "plain"]);
        drop(columns);
        tiers[0].shutdown().expect("everything was freed");
    });
}

#[test]
fn tiers_end_alone_or_with_the_default_one_and_only_when_they_are_empty() {
    alone("tiers_end_alone_or_with_the_default_one_and_only_when_they_are_empty", || {
        let Some([default, small, large, plain]) = four() else { return };
        let held = numbers(large.tier(), 1 << 18);
        let in_use = Err(Error::InUse { bytes: ByteCount::mib(2) });
        assert_eq!(large.shutdown(), in_use);
        assert_eq!(default.shutdown(), in_use);
        // All four go on.
        for tier in [&default, &small, &large, &plain] {
            assert!(are_right(&numbers(tier.tier(), 2 << 20)), "{}", tier.name());
        }
        plain.shutdown().expect("it is empty");
        assert_eq!(plain.shutdown(), Err(Error::NotRunning));
        assert!(plain.tier().allocate(Layout::new::<u64>()).is_err());
        {
            let _scope = Scope::enter(plain.tier());
            assert!(!Far::contains(Box::new(1_u64).as_ref()), "as without a heap");
        }
        // Its name and its place are free again; its handle names none of it.
        let again = default.add_tier("plain", config(TIERS[2].1)).expect("as before");
        assert_ne!(again.tier(), plain.tier());
        assert!(plain.tier().allocate(Layout::new::<u64>()).is_err());
        assert!(are_right(&held) && are_right(&numbers(again.tier(), 2 << 20)));
        drop(held);
        default.shutdown().expect("all are empty");
        for tier in [&default, &small, &large, &again] {
            assert_eq!(tier.shutdown(), Err(Error::NotRunning), "{}", tier.name());
        }
        assert!(Heap::tiers().is_empty() && Heap::running().is_none());
        let late = default.add_tier("late", config("far_limit:8MiB,capacity:64MiB"));
        assert!(matches!(late, Err(Error::NotRunning)), "{late:?}");
        let next = heap("far_limit:8MiB,capacity:64MiB").expect("as before");
        let tier =
            next.add_tier("small", config("far_limit:8MiB,capacity:64MiB")).expect("as before");
        assert!(are_right(&numbers(tier.tier(), 2 << 20)));
        next.shutdown().expect("all are empty");
    });
}

#[test]
fn what_cannot_be_a_further_tier_is_refused_by_name() {
    alone("what_cannot_be_a_further_tier_is_refused_by_name", || {
        let Some(heap) = heap("far_limit:8MiB,capacity:64MiB,span:1GiB") else { return };
        let plain = "far_limit:8MiB,capacity:64MiB,span:1GiB";
        let refused = |name: &str, text: &str| match heap.add_tier(name, config(text)) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{name} with {text} was added"),
        };
        for name in ["", "a b", "a,b", "größe", &"x".repeat(33)] {
            assert!(refused(name, plain).contains("a name is 1 to 32"), "{name}");
        }
        assert!(refused("far", plain).contains("runs already"));
        assert!(refused("t", "far_limit:8MiB,threshold:1KiB").contains("threshold"));
        assert!(refused("t", "far_limit:8MiB,threshold:0").contains("threshold"));
        assert!(refused("t", "far_limit:8MiB,dir:/nowhere").contains("/nowhere"));
        let with_device = heap.add_tier("t", config(plain).store(mem_store(ByteCount::mib(64))));
        assert!(with_device.is_err(), "`capacity` says what to open");
        let manager = MemoryManager::start(ByteCount::mib(16)).expect("manager");
        let managed = heap.add_tier("t", config("far_limit:8MiB,span:1GiB").manager(&manager));
        let error = managed.expect_err("a limit for one of the tiers").to_string();
        assert!(error.contains("a memory manager"), "{error}");
        let own = config("far_limit:8MiB,span:1GiB");
        let own = heap.add_tier("own", own.store(mem_store(ByteCount::mib(64)))).expect("room");
        assert!(are_right(&numbers(own.tier(), 2 << 20)));
        let more: Vec<Heap> =
            (2..8).map(|n| heap.add_tier(&n.to_string(), config(plain)).expect("room")).collect();
        assert!(refused("ninth", plain).contains("8 far tiers run already"));
        assert!(more.iter().all(|tier| are_right(&numbers(tier.tier(), 1 << 10))));
        heap.shutdown().expect("all are empty");
    });
}

#[test]
fn one_limit_holds_for_all_tiers_under_a_manager() {
    alone("one_limit_holds_for_all_tiers_under_a_manager", || {
        let _watchdog = watchdog("heap_tiers", Duration::from_secs(120));
        let manager = MemoryManager::start(ByteCount::mib(64)).expect("manager");
        let Some(default) = heap_under(&manager, "far_limit:64MiB,capacity:256MiB") else { return };
        let cold = default.add_tier("cold", config("far_limit:64MiB,capacity:256MiB"));
        let cold = cold.expect("the manager has room");
        let columns = [&default, &cold].map(|tier| numbers(tier.tier(), 8 << 20)); // 64 MiB each
        // Which of them has how much at one moment depends on when their evictors run.
        let has_share = |name| {
            let used = || consumer(&manager, name).expect("it has joined").used_bytes;
            eventually(|| {
                assert!(columns.iter().all(are_right));
                used() >= ByteCount::mib(4)
            })
        };
        for name in ["far heap", "far tier cold"] {
            assert!(has_share(name), "{name}: {}", manager.stats());
        }
        let stats = manager.stats();
        assert!(stats.used_bytes_max <= manager.limit(), "{stats}");
        assert!(cold.region().manager().is_some());
        // Temporary memory spills where it did: to the default tier.
        let temporary = manager.allocate_temporary(ByteCount::mib(96)).expect("it spills");
        assert!(temporary.is_spilled() && default.region().contains(temporary.as_ptr().as_ptr()));
        drop((temporary, columns));
        default.shutdown().expect("all are empty");
        assert!(consumer(&manager, "far tier cold").is_none() || Heap::tiers().is_empty());
    });
}

/// A block of a tier, or of local memory, with its pattern.
struct Block {
    bytes: Vec<u8>,
    from: Tier,
    seed: u8,
}

impl Block {
    fn new(from: Tier, len: usize, seed: u8) -> Block {
        let _scope = Scope::enter(from);
        let block = Block { bytes: vec![seed; len], from, seed };
        block.check();
        block
    }

    fn check(&self) {
        assert_eq!(Tier::of(self.bytes.as_ptr()), Some(self.from), "{} bytes", self.bytes.len());
        let wrong = self.bytes.iter().position(|byte| *byte != self.seed);
        assert_eq!(wrong, None, "of {} bytes in {:?}", self.bytes.len(), self.from);
    }
}

#[test]
fn blocks_of_four_tiers_and_local_ones_cross_short_lived_threads_while_pages_leave() {
    const TEST: &str =
        "blocks_of_four_tiers_and_local_ones_cross_short_lived_threads_while_pages_leave";
    const THREADS: usize = 1_500;
    alone(TEST, || {
        let _watchdog = watchdog("heap_tiers", Duration::from_secs(240));
        let Some(tiers) = four() else { return };
        let seed = seed(TEST);
        let places: Vec<Tier> = tiers.iter().map(Heap::tier).chain([Tier::LOCAL]).collect();
        let left: Mutex<Vec<Block>> = Mutex::new(Vec::new());
        let next = AtomicUsize::new(0);
        let work = |number: usize| {
            let mut dice = Dice::new(seed ^ number as u64);
            for _ in 0..12 {
                let place = places[dice.below(places.len() as u64) as usize];
                let most = 64 << dice.below(13);
                let len = 1 + dice.below(most) as usize;
                let mut block = Block::new(place, len, dice.roll() as u8);
                if dice.below(3) == 0 && place != Tier::LOCAL {
                    let len = len + dice.below(len as u64) as usize;
                    block.bytes.resize(len, block.seed);
                    block.check();
                }
                let mut left = left.lock().expect("no thread has failed");
                left.push(block);
                // About 40 MiB at a time, twice what the tiers may hold.
                let many = left.len().saturating_sub(500);
                let freed: Vec<Block> = (0..many.min(2))
                    .map(|_| {
                        let at = dice.below(left.len() as u64) as usize;
                        left.swap_remove(at)
                    })
                    .collect();
                drop(left);
                freed.iter().for_each(Block::check);
            }
        };
        std::thread::scope(|starters| {
            for _ in 0..2 {
                starters.spawn(|| {
                    while let number @ ..THREADS = next.fetch_add(1, Ordering::Relaxed) {
                        std::thread::scope(|one| {
                            one.spawn(|| work(number));
                        });
                    }
                });
            }
        });
        let left = left.into_inner().expect("no thread has failed");
        left.iter().for_each(Block::check);
        drop(left);
        for tier in &tiers {
            let stats = tier.stats();
            assert!(stats.resident_bytes_max <= stats.limit_bytes, "{}: {stats}", tier.name());
            assert_eq!(tier.usage().allocated_bytes, ByteCount::ZERO, "{}", tier.name());
        }
        tiers[0].shutdown().expect("everything was freed");
    });
}

#[test]
fn a_forked_child_has_no_tier_of_its_parent_but_what_is_in_them() {
    alone("a_forked_child_has_no_tier_of_its_parent_but_what_is_in_them", || {
        let Some(tiers) = four() else { return };
        let mut columns = tiers.each_ref().map(|tier| numbers(tier.tier(), 1 << 18));
        let raw = tiers.each_ref().map(|tier| {
            let placement = Some(tier.tier());
            malloc::allocate(5_000, 16, placement, false).expect("the device has room")
        });
        #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
        // SAFETY: the child has no other threads to wait for, and ends without returning.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let mut right = Heap::tiers().is_empty();
            // Where a child cannot have its parent's far memory, it gets none for itself either.
            let inherits = Far.allocate(Layout::new::<u64>()).is_ok();
            for (tier, column) in tiers.iter().zip(&mut columns) {
                right &= Far::contains(column.as_ptr()) && Tier::of(column.as_ptr()).is_none();
                right &= !inherits || are_right(column);
                right &= column.try_reserve(1 << 20).is_ok() == inherits;
                right &= Far::contains(column.as_ptr()) != inherits;
                right &= !inherits || are_right(column);
                right &= tier.tier().allocate(Layout::new::<u64>()).is_ok() == inherits;
                right &= matches!(tier.shutdown(), Err(Error::Forked { .. }));
                let added = tier.add_tier("child", config("far_limit:8MiB,capacity:64MiB"));
                right &= matches!(added, Err(Error::Forked { .. }));
                let _scope = Scope::enter(tier.tier());
                right &= !Far::contains(vec![1_u8; 100_000].as_ptr());
                tier.purge();
            }
            for block in raw {
                // SAFETY: blocks of the parent's heap, used no more.
                unsafe { malloc::free(block) };
            }
            drop(columns);
            drop(tiers);
            // SAFETY: ends the process; takes no pointers.
            unsafe { libc::exit(i32::from(!right)) };
        }
        let mut status = 0;
        // SAFETY: the status is a valid place to write to.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
        assert_eq!((waited, status), (pid, 0), "the child ended with {status:#x}");
        assert!(columns.iter().all(are_right), "the parent's data");
        drop(columns);
        for block in raw {
            // SAFETY: blocks of the heap's, freed once.
            unsafe { malloc::free(block) };
        }
        tiers[0].shutdown().expect("everything was freed");
    });
}
