//! Tests of where a tier's metadata lies, of what its memory is for, and of the bound on what is dirty.

use super::*;

/// Time for which freed memory is kept in these tests: longer than they take.
const LONG: Duration = Duration::from_secs(1000);

fn options() -> FarArenasOptions {
    FarArenasOptions { decay: LONG, ..FarArenasOptions::default() }
}

fn far_blocks(count: usize, size: usize) -> Vec<Block> {
    let _scope = Scope::enter(Tier::FAR);
    (0..count).map(|_| block(size)).collect()
}

#[test]
fn local_metadata_takes_nothing_of_a_tier() {
    let running = start(ByteCount::gib(1), options());
    assert_eq!(running.source.reserved(), ByteCount::ZERO);
    assert!(running.arenas.memory().metadata_bytes > ByteCount::ZERO, "it lies elsewhere");
    running.stop();
}

#[test]
fn far_metadata_is_the_tiers_and_goes_back_with_it() {
    let options = FarArenasOptions { metadata_is_far: true, ..options() };
    let running = start(ByteCount::gib(1), options);
    let empty = running.arenas.memory();
    assert!(empty.metadata_bytes > ByteCount::ZERO);
    assert!(running.source.committed() >= empty.metadata_bytes, "{}", running.source.committed());
    assert_eq!(running.arenas.arenas().committed(), running.source.committed());
    let local = local_memory().metadata_bytes;
    // Blocks of 16 KiB: an extent each, of which jemalloc has 128 bytes.
    let mut blocks = far_blocks(10_000, 16 << 10);
    let full = running.arenas.memory();
    assert!(full.metadata_bytes.0 > empty.metadata_bytes.0 + 1_000_000, "{full}");
    let local = local_memory().metadata_bytes.0.saturating_sub(local.0);
    // jemalloc's own tables of addresses, 2 MiB for each GiB, are always local, and tests beside this one allocate.
    let local = local % (2 << 20);
    let far = full.metadata_bytes.0 - empty.metadata_bytes.0;
    assert!(local < far, "{local} bytes of local metadata, {far} of far");
    blocks.iter_mut().for_each(|block| block.check(16 << 10));
    drop(blocks);
    running.stop();
}

#[test]
fn memory_says_what_blocks_and_pages_are_for() {
    let running = start(ByteCount::gib(1), options());
    let before = running.arenas.memory();
    assert_eq!((before.allocated_bytes, before.dirty_bytes), (ByteCount::ZERO, ByteCount::ZERO));
    let small = far_blocks(1_000, 1_000);
    let large = far_blocks(10, 1 << 20);
    let now = running.arenas.memory();
    assert_eq!(now.allocated_bytes, ByteCount(1_000 * 1_000 + (10 << 20)));
    assert!(
        now.small_bytes >= ByteCount(1_024_000) && now.small_bytes < ByteCount(1_300_000),
        "{now}"
    );
    assert_eq!(now.large_bytes, ByteCount::mib(10));
    assert!(now.active_bytes.0 >= now.small_bytes.0 + now.large_bytes.0, "{now}");
    assert!(now.active_bytes.0 + now.dirty_bytes.0 <= running.source.committed().0, "{now}");
    drop((small, large));
    running.arenas.give_all_back();
    let after = running.arenas.memory();
    assert_eq!(
        (after.allocated_bytes, after.dirty_bytes),
        (ByteCount::ZERO, ByteCount::ZERO),
        "{after}"
    );
    running.stop();
}

#[test]
fn what_is_dirty_is_bounded_though_nobody_maintains_the_tier() {
    let dirty_max = ByteCount::mib(8);
    let running = start(ByteCount::gib(1), options());
    running.arenas.follow_limit(ByteCount(dirty_max.0 * 8), 1);
    // Too large for caches, which have a bound of their own; and in the second round of sizes that come
    // from slabs.
    for (count, size) in [(16, 9 << 20), (100_000, 1 << 10)] {
        for mut block in far_blocks(count, size) {
            block.check(1);
            drop(block);
        }
        let (memory, caches) = (running.arenas.memory(), running.arenas.caches().room());
        assert!(memory.dirty_bytes <= dirty_max, "{memory}{caches} in caches");
    }
    assert!(running.source.decommits.load(SeqCst) > 0);
    running.stop();
}

/// A thread frees the last block of a tier, and is stopped; the tier is closed; the thread goes on.
#[test]
fn who_freed_the_last_block_leaves_a_closed_tier_alone() {
    let running = start(ByteCount::gib(1), options());
    drop(far_blocks(2, 9 << 20));
    let dirty = || running.arenas.memory().dirty_bytes;
    let before = dirty();
    running.arenas.follow_limit(ByteCount::ZERO, 1);
    let closed = running.arenas.close().expect("all was freed");
    running.arenas.note_freed(usize::MAX / 2);
    running.arenas.maintain();
    running.arenas.give_back(ByteCount::ZERO);
    running.arenas.give_all_back();
    assert!(before > ByteCount::ZERO);
    assert_eq!(dirty(), before, "somebody was at arenas that may be gone");
    drop(closed);
    running.arenas.note_freed(1);
    assert_eq!(dirty(), ByteCount::ZERO, "it is open again");
    running.stop();
}

#[test]
fn what_is_dirty_waits_for_its_decay_while_memory_is_plentiful() {
    let running = start(ByteCount::gib(1), options());
    running.source.has_plenty.store(true, SeqCst);
    running.arenas.follow_limit(ByteCount::mib(64), 1);
    drop(far_blocks(16, 9 << 20));
    running.arenas.maintain();
    let dirty = running.arenas.memory().dirty_bytes;
    assert!(dirty >= ByteCount::mib(100), "{dirty}");
    running.source.has_plenty.store(false, SeqCst);
    running.arenas.maintain();
    let dirty = running.arenas.memory().dirty_bytes;
    assert!(dirty <= ByteCount::mib(8), "{dirty}");
    running.stop();
}

#[test]
fn caches_that_are_emptied_are_part_of_the_bound_when_the_tier_is_maintained() {
    let dirty_max = ByteCount::mib(8);
    let running = start(ByteCount::gib(1), options());
    drop(far_blocks(16, 2 << 20)); // Kept in the thread's cache, which is as large as it likes.
    running.arenas.follow_limit(ByteCount(dirty_max.0 * 8), 1);
    running.arenas.maintain();
    running.arenas.maintain();
    let memory = running.arenas.memory();
    assert!(memory.dirty_bytes <= dirty_max, "{memory}");
    running.stop();
}
