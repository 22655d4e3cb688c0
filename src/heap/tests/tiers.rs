//! Tests of several far tiers at once.

use super::*;
use std::collections::HashSet;

/// The default tier and three more, each over a source of its own.
struct Four {
    default: Running,
    more: Vec<(&'static FarArenas, Arc<TestSource>)>,
}

/// A tier in a slot, over a source of its own.
fn add(slot: usize) -> (&'static FarArenas, Arc<TestSource>) {
    let source = Arc::new(TestSource::new(ByteCount::gib(1), ByteCount::mib(256)));
    let options =
        FarArenasOptions { slot, threshold: None, arenas: 1, ..FarArenasOptions::default() };
    let arenas = FarArenas::create(source.clone(), options).expect("jemalloc has an arena left");
    install(arenas).expect("the slot is free");
    (arenas, source)
}

fn start_four() -> Four {
    let default = start_default();
    Four { default, more: (1..4).map(add).collect() }
}

impl Four {
    fn all(&self) -> Vec<&'static FarArenas> {
        let more = self.more.iter().map(|(arenas, _)| *arenas);
        [self.default.arenas].into_iter().chain(more).collect()
    }

    /// All places that memory can come from, local memory first.
    fn places(&self) -> Vec<Tier> {
        let tiers = self.all().into_iter().map(FarArenas::tier);
        [Tier::LOCAL].into_iter().chain(tiers).collect()
    }

    fn stop(self) {
        let more: Vec<_> = self.more.iter().rev().map(|(arenas, _)| *arenas).collect();
        uninstall(&more).expect("all memory of these tiers has been freed");
        for (_, source) in &self.more {
            assert_eq!(source.committed(), ByteCount::ZERO);
            assert_eq!(source.reserved(), ByteCount::ZERO);
        }
        self.default.stop();
    }
}

impl Tier {
    /// Allocates here, by a scope or by the handle.
    fn block(self, layout: Layout, seed: u8, by_scope: bool) -> Option<Block> {
        let _scope = Scope::enter(self);
        let block = if by_scope {
            Block::new(layout, seed)
        } else {
            let ptr = self.allocate(layout).map_or(std::ptr::null_mut(), |ptr| ptr.as_ptr().cast());
            Block::filled(ptr, layout, seed)
        };
        if let Some(block) = &block {
            assert_eq!(Tier::of(block.ptr), Some(self), "{layout:?} at {:p}", block.ptr);
        }
        block
    }
}

#[test]
fn each_tier_serves_what_names_it() {
    let four = start_four();
    for place in four.places() {
        for size in [8, 1_000, 40_000, 300_000, 9 << 20] {
            for by_scope in [false, true] {
                let mut block = place.block(layout(size, 8), 3, by_scope).expect("memory");
                // A local block would go far when it grows.
                let _local = (place == Tier::LOCAL).then(|| Scope::enter(Tier::LOCAL));
                assert!(block.resize(size * 2), "{place:?}");
                assert_eq!(Tier::of(block.ptr), Some(place), "a block stays in its tier");
                assert_eq!(Far::contains(block.ptr), place != Tier::LOCAL);
            }
        }
    }
    let _scope = Scope::enter(Tier::FAR);
    assert_eq!(Tier::of(block(8).ptr), Some(Tier::FAR));
    drop(_scope);
    four.stop();
}

#[test]
fn what_is_far_by_its_size_is_of_the_default_tier() {
    let four = start_four();
    let mut small = block(1_000);
    assert!(!small.is_far());
    assert!(small.resize(100_000));
    for block in [&small, &block(70_000)] {
        assert_eq!(Tier::of(block.ptr), Some(Tier::FAR));
    }
    drop(small);
    four.stop();
}

#[test]
fn memory_of_no_tier_crosses_to_another_however_it_is_freed_by_short_lived_threads() {
    const THREADS: u64 = 2_000;
    const AT_ONCE: usize = 4;
    let four = start_four();
    let places = four.places();
    // What ended threads have left; the next ones free it and add their own.
    let left: Mutex<Vec<(Tier, Block)>> = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let short_lived = |seed: u64| {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut random = move |bound: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as usize % bound
        };
        let lock = || left.lock().unwrap_or_else(PoisonError::into_inner);
        let mut mine: Vec<(Tier, Block)> = Vec::new();
        for round in 0..60 {
            let place = places[random(places.len())];
            let most = 200 << random(11);
            let made = layout(1 + random(most), 1 << random(8));
            let made = place.block(made, round, random(2) == 0);
            mine.extend(made.map(|block| (place, block)));
            if random(3) == 0 && !mine.is_empty() {
                let at = random(mine.len());
                let (place, mut block) = mine.swap_remove(at);
                block.resize(1 + random(50_000));
                assert_eq!(Tier::of(block.ptr), Some(place), "a block stays in its tier");
                mine.push((place, block));
            }
            if random(2) == 0 && !mine.is_empty() {
                let at = random(mine.len());
                lock().push(mine.swap_remove(at));
            }
            let others = (random(2) == 0).then(|| lock().pop()).flatten();
            mine.extend(others);
            mine.truncate(8);
        }
        // Half of it outlives the thread.
        mine.truncate(4);
        lock().append(&mut mine);
        let many = lock().len().saturating_sub(64);
        let too_much: Vec<_> = lock().drain(..many).collect();
        drop(too_much);
    };
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        let (stop, short_lived, next, tiers) = (&stop, &short_lived, &next, four.all());
        let maintainer = threads.spawn(move || {
            pin_thread_local();
            while !stop.load(SeqCst) {
                for arenas in &tiers {
                    arenas.maintain();
                    arenas.give_back(ByteCount::mib(1));
                }
                maintain_local();
                thread::sleep(Duration::from_millis(1));
            }
        });
        let starters: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                threads.spawn(move || {
                    loop {
                        let seed = next.fetch_add(1, SeqCst) as u64;
                        if seed >= THREADS {
                            return;
                        }
                        // Of its own, so that it begins without caches and gives its own back.
                        thread::scope(|one| {
                            one.spawn(|| short_lived(seed));
                        });
                    }
                })
            })
            .collect();
        let ended: Vec<_> = starters.into_iter().map(thread::ScopedJoinHandle::join).collect();
        stop.store(true, SeqCst);
        maintainer.join().expect("maintenance asserts nothing false");
        ended.into_iter().for_each(|ended| ended.expect("the threads assert nothing false"));
    });
    drop(left);
    for arenas in four.all() {
        assert_eq!(arenas.allocated(), ByteCount::ZERO);
    }
    four.stop();
}

#[test]
fn caches_of_all_tiers_keep_no_more_than_those_of_one() {
    let four = start_four();
    let tiers = four.all();
    let follow = || tiers.iter().for_each(|arenas| arenas.follow_limit(ByteCount::gib(64), 4));
    follow();
    for arenas in &tiers {
        for size in [100, 3_000, 70_000, 256 << 10, 1 << 20, 3 << 20, 8 << 20, 8 << 20] {
            let place = arenas.tier();
            drop([0, 1].map(|seed| place.block(layout(size, 8), seed, false)));
        }
        assert!(arenas.caches().room() > ByteCount::ZERO, "nothing was kept");
    }
    let kept: u64 = tiers.iter().map(|arenas| arenas.caches().room().0).sum();
    assert!(kept <= FarArenasOptions::default().cache_max.0, "{} MiB are kept", kept >> 20);
    four.stop();
}

#[test]
fn a_tier_with_memory_in_use_keeps_all_from_ending() {
    let four = start_four();
    let tiers = four.all();
    let held = tiers[2].tier().block(layout(5_000, 8), 1, false).expect("memory");
    assert_eq!(uninstall(&tiers), Err(Error::InUse { bytes: ByteCount(5_000) }));
    for place in four.places() {
        drop(place.block(layout(70_000, 8), 2, true).expect("all tiers go on"));
    }
    drop(held);
    four.stop();
}

#[test]
fn the_name_of_a_tier_that_has_ended_names_no_later_one() {
    let default = start_default();
    let mut names = HashSet::new();
    for _ in 0..5 {
        let (arenas, _source) = add(1);
        let old = arenas.tier();
        assert!(names.insert(old), "{old:?} was another tier's");
        let one = old.block(layout(100, 8), 1, false).expect("memory");
        drop(one);
        uninstall(&[arenas]).expect("everything was freed");
        let (next, _source) = add(1);
        assert_eq!(next.tier().slot(), old.slot());
        assert!(old.allocate(layout(100, 8)).is_err());
        // As in a far scope without a heap.
        let _scope = Scope::enter(old);
        assert!(!block(100).is_far());
        uninstall(&[next]).expect("everything was freed");
    }
    default.stop();
}

#[test]
fn addresses_beside_a_tier_are_of_none() {
    let four = start_four();
    let bounds: Vec<(usize, usize)> = four.all().iter().map(|arenas| arenas.bounds()).collect();
    let is_far = |addr: usize| bounds.iter().any(|(first, end)| (*first..*end).contains(&addr));
    let (low, high) = bounds
        .iter()
        .fold((usize::MAX, 0), |(low, high), (first, end)| (low.min(*first), high.max(*end)));
    let borders = bounds.iter().flat_map(|(first, end)| [*first, *end - 1, *first - 1, *end]);
    for addr in borders.chain([low - 1, high, 0, usize::MAX]) {
        assert_eq!(Far::contains(addr as *const u8), is_far(addr), "{addr:#x}");
    }
    four.stop();
}

#[test]
fn addresses_of_a_tier_that_has_ended_are_local() {
    let mut four = start_four();
    let (ended, source) = four.more.remove(1); // The kernel mapped it between two others, mostly.
    let (first, end) = ended.bounds();
    let addrs = [first, first + 4096, end - 1].map(|addr| addr as *const u8);
    assert!(addrs.iter().all(|addr| Tier::of(*addr) == Some(ended.tier())));
    uninstall(&[ended]).expect("nothing was allocated");
    drop(source);
    assert!(addrs.iter().all(|addr| !Far::contains(*addr) && Tier::of(*addr) == Some(Tier::LOCAL)));
    for (arenas, _) in &four.more {
        assert_eq!(Tier::of(arenas.bounds().0 as *const u8), Some(arenas.tier()));
    }
    four.stop();
}
