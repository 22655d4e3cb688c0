//! Tests of what threads keep of large blocks, local and far.

use super::*;
use crate::heap::{local, thread_cache};

impl Running {
    /// As the maintenance thread of the default tier does.
    fn maintain(&self) {
        self.arenas.maintain();
        maintain_local();
    }

    fn give_back(&self, least: ByteCount) {
        self.arenas.give_back(least);
        give_local_back(least);
    }
}

/// Bytes that a block of `size` bytes takes in a cache.
fn kept(size: usize) -> usize {
    thread_cache::magazine::class_size(layout(size, 8)).expect("caches keep this size")
}

/// Large blocks that the calling thread's caches keep.
fn large_bytes(running: &Running, placement: Tier) -> usize {
    match placement {
        Tier::LOCAL => thread_cache::access_local().map_or(0, |mut cache| cache.large_bytes()),
        Tier::FAR => running.arenas.large_bytes(),
        tier => panic!("{tier:?} is none of this test's"),
    }
}

/// Allocates and frees without touching.
fn pair(size: usize) {
    drop(Untouched::new(layout(size, 8)));
}

#[test]
fn a_freed_large_block_is_kept_and_serves_the_next_allocation_of_its_class() {
    let running = start_default();
    thread::scope(|threads| {
        threads.spawn(|| {
            for placement in [Tier::LOCAL, Tier::FAR] {
                let _scope = Scope::enter(placement);
                for size in [33 << 10, 70_000, 256 << 10, 1 << 20, 3_000_000, 8 << 20] {
                    let before = large_bytes(&running, placement);
                    pair(size);
                    assert_eq!(large_bytes(&running, placement), before + kept(size), "{size}");
                    let mut block = block(size - 100);
                    assert_eq!(block.is_far(), placement == Tier::FAR);
                    assert_eq!(large_bytes(&running, placement), before, "{size} in {placement:?}");
                    block.check(size - 100);
                    drop(block);
                    while large_bytes(&running, placement) > 0 {
                        running.give_back(ByteCount::ZERO);
                    }
                }
                pair((8 << 20) + 1);
                assert_eq!(large_bytes(&running, placement), 0, "larger ones are not kept");
            }
        });
    });
    running.stop();
}

#[test]
fn a_kept_block_is_zero_when_zeroes_are_asked_for() {
    let running = start_default();
    for placement in [Tier::LOCAL, Tier::FAR] {
        let _scope = Scope::enter(placement);
        for size in [40_000, 300_000, 2 << 20] {
            drop(block(size)); // Filled with a pattern.
            drop(Block::zeroed(layout(size, 8), 1).expect("memory"));
        }
    }
    running.stop();
}

#[test]
fn sizes_that_are_used_no_more_make_place_for_others() {
    let running = start_default();
    let _scope = Scope::enter(Tier::LOCAL);
    (0..3).for_each(|_| drop([(); 3].map(|()| block(4 << 20))));
    for _ in 0..50 {
        drop([(); 20].map(|()| block(256 << 10)));
        drop([(); 20].map(|()| block(64 << 10)));
    }
    let before = large_bytes(&running, Tier::LOCAL);
    drop(block(512 << 10));
    drop(block(512 << 10));
    let after = large_bytes(&running, Tier::LOCAL);
    assert!(after.abs_diff(before) <= 4 << 20, "one block of the oldest class went: {after}");
    let taken = block(512 << 10);
    assert_eq!(large_bytes(&running, Tier::LOCAL), after - (512 << 10), "it was kept");
    drop(taken);
    running.stop();
}

#[test]
fn a_thousand_threads_keep_less_than_64_mib_and_nothing_once_they_sleep() {
    const THREADS: usize = 1000;
    let running = start_default();
    let (freed, woken) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    thread::scope(|threads| {
        for _ in 0..THREADS {
            let work = || {
                for placement in [Tier::LOCAL, Tier::FAR] {
                    let _scope = Scope::enter(placement);
                    [100, 3_000, 30_000, 70_000, 256 << 10, 1 << 20, 1 << 21]
                        .into_iter()
                        .for_each(pair);
                }
                freed.wait();
                woken.wait();
            };
            let builder = thread::Builder::new().stack_size(128 << 10);
            builder.spawn_scoped(threads, work).expect("the machine has threads");
        }
        freed.wait();
        let kept = running.arenas.caches().room().0 + local::cache_room().0;
        // The first round notes what the threads have done, the second finds them idle.
        running.maintain();
        running.maintain();
        let later = (running.arenas.caches().room(), local::cache_room());
        woken.wait();
        assert!(kept > 1 << 20, "{kept}: nothing was kept");
        assert!(kept < 64 << 20, "{} MiB are kept", kept >> 20);
        assert_eq!(later.0, ByteCount::ZERO);
        // Other tests of this process may use local memory meanwhile.
        assert!(later.1 < ByteCount::mib(4), "{}", later.1);
    });
    running.stop();
}

#[test]
fn what_busy_threads_keep_of_large_blocks_comes_back_when_memory_is_short() {
    let running = start_default();
    {
        let _scope = Scope::enter(Tier::FAR);
        drop(block(3_000));
        drop(block(8 << 20));
    }
    for placement in [Tier::LOCAL, Tier::FAR] {
        let _scope = Scope::enter(placement);
        drop(block(2 << 20));
        assert!(large_bytes(&running, placement) >= 2 << 20);
    }
    running.give_back(ByteCount::mib(1));
    assert_eq!(large_bytes(&running, Tier::FAR), 0);
    assert_eq!(large_bytes(&running, Tier::LOCAL), 0);
    assert!(running.source.committed() < ByteCount::mib(1), "{}", running.source.committed());
    running.stop();
}

#[test]
fn caches_follow_a_limit_that_is_set_lower() {
    let running = start_default();
    {
        let _scope = Scope::enter(Tier::FAR);
        drop(block(8 << 20));
        assert_eq!(large_bytes(&running, Tier::FAR), 8 << 20);
        running.arenas.follow_limit(ByteCount::mib(8), 1);
        drop(block(1 << 10)); // Not idle.
        running.arenas.maintain();
        assert!(running.arenas.caches().room() <= ByteCount::mib(1));
        drop(block(8 << 20));
        assert_eq!(large_bytes(&running, Tier::FAR), 0, "it is larger than all may keep");
        running.arenas.follow_limit(ByteCount::gib(8), 1);
        drop(block(8 << 20));
        assert_eq!(large_bytes(&running, Tier::FAR), 8 << 20);
    }
    running.stop();
}

#[test]
fn large_local_blocks_move_between_threads_and_keep_their_bytes() {
    let running = start_default();
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        let (send_first, first) = mpsc::sync_channel::<Block>(16);
        let (send_second, second) = mpsc::sync_channel::<Block>(16);
        threads.spawn(|| {
            let _stop = Stop(&stop);
            thread::scope(|pair| {
                pair.spawn(|| exchange(1, send_second, first));
                pair.spawn(|| exchange(2, send_first, second));
            });
        });
        while !stop.load(SeqCst) {
            running.maintain();
            running.give_back(ByteCount::ZERO);
            thread::yield_now();
        }
    });
    running.stop();
}

/// Random operations on local blocks up to 9 MiB, some of which come from and go to another thread.
fn exchange(seed: u64, next: mpsc::SyncSender<Block>, previous: mpsc::Receiver<Block>) {
    let _scope = Scope::enter(Tier::LOCAL);
    let mut random = dice(seed);
    let mut kept: Vec<Block> = Vec::new();
    for round in 0..600 {
        let shift = random(13);
        let made = layout(1 + random(2304 << shift), 1 << random(15));
        let make = if random(3) == 0 { Block::zeroed } else { Block::new };
        kept.extend(make(made, round as u8));
        let last = kept.len() - 1;
        if random(2) == 0 {
            let size = kept[last].layout.size();
            assert!(kept[last].resize(1 + random(2 * size)));
        }
        assert!(!kept[last].is_far());
        if random(2) == 0 {
            drop(next.try_send(kept.swap_remove(random(kept.len()))));
        }
        kept.extend(previous.try_recv());
        kept.truncate(6);
    }
}
