//! What a program may tell the kernel about its memory: locks, protections, advice, and mappings
//! that it moves or takes away.
#![expect(unsafe_code, reason = "gives up what attacked memory holds")]

use crate::common::bytes;
use crate::ground::{
    Ground, Stretch, UNIT, all, allocate, attack_or_end, attacks, free, map, stamp,
};
use crate::kernel::{Errno, Outcome, addr, addr_mut, call, fd, memory_file, take};
use farheap::region::Advice;
use farheap::{ByteCount, Heap};
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

attacks! {
    locked_memory_keeps_its_bytes: all,
    memory_locked_on_fault_keeps_its_bytes: all,
    locking_everything_keeps_every_byte: all,
    protections_keep_the_bytes: all,
    advice_keeps_the_bytes: all,
    memory_dropped_by_the_program_is_zero_or_as_before: all,
    memory_that_the_heap_is_told_to_drop_is_zero: all,
    memory_unmapped_by_the_program_harms_nothing_else: all,
    memory_mapped_over_far_memory_is_the_programs: all,
    memory_mapped_over_fresh_far_memory_is_the_programs: all,
    memory_freed_after_it_was_mapped_over_is_far_memory: all,
    sealed_memory_keeps_its_bytes: all,
}

#[test]
fn memory_moved_away_by_the_program_keeps_its_bytes_or_ends_it() {
    const NAME: &str =
        "attack::advice::memory_moved_away_by_the_program_keeps_its_bytes_or_ends_it";
    attack_or_end(NAME, &all(), moved_away, "the program has moved far memory");
}

type Row = (&'static str, fn(&Stretch, Range<usize>) -> Outcome);

/// A call on a range of memory, with one more argument.
fn ranged(number: libc::c_long, stretch: &Stretch, range: Range<usize>, last: i32) -> Outcome {
    call(number, &[stretch.at(range.start), range.len(), last as usize]).map(|_| Vec::new())
}

/// Ranges of every kind: parts of clusters, several, and all.
fn ranges(ground: &Ground) -> Vec<Range<usize>> {
    vec![UNIT..3 * UNIT, 3 * UNIT..9 * UNIT, 0..ground.far.len]
}

/// Does the same to both twins; what is there stays, through evictions before and after.
fn keeps(ground: &Ground, rows: &[Row], undo: Option<Row>) {
    let mut dice = ground.dice();
    for (what, act) in rows {
        let ranges = ranges(ground);
        let range = ranges[dice.below(ranges.len() as u64) as usize].clone();
        let _outcome = ground.same(what, |stretch| act(stretch, range.clone()));
        drop(ground.evict_far());
        ground.assert_alike(what);
        if let Some((undo, act)) = undo {
            let _outcome = ground.same(undo, |stretch| act(stretch, range.clone()));
        }
    }
    ground.await_passes(1);
    ground.assert_alike("afterwards");
}

/// Whether memory can be locked may depend on what is resident, and on a limit that the twins
/// share; nothing else may.
fn tolerate(outcome: Result<usize, Errno>) -> Result<bool, Errno> {
    match outcome {
        Ok(_) => Ok(true),
        // Not all of it could be brought in, or locked.
        Err(libc::ENOMEM | libc::EAGAIN | libc::EFAULT | libc::EPERM) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Locks ranges in a way, goes on, and unlocks them.
fn locked(ground: &Ground, flags: usize) {
    for range in ranges(ground) {
        let start = ground.far.at(range.start);
        let locked = tolerate(call(libc::SYS_mlock2, &[start, range.len(), flags]));
        locked.expect("locked, or refused as documented");
        drop(ground.evict_far());
        ground.await_passes(1);
        ground.assert_alike("locked");
        // Written while it is locked.
        let number = range.start as u64 + 5;
        ground.far.fill(number);
        ground.near.fill(number);
        drop(ground.evict_far());
        ground.assert_alike("written while locked");
        call(libc::SYS_munlock, &[start, range.len()]).expect("is mapped");
        drop(ground.evict_far());
        ground.assert_alike("unlocked");
    }
}

fn locked_memory_keeps_its_bytes(ground: &Ground) {
    locked(ground, 0);
}

fn memory_locked_on_fault_keeps_its_bytes(ground: &Ground) {
    locked(ground, libc::MLOCK_ONFAULT as usize);
}

fn locking_everything_keeps_every_byte(ground: &Ground) {
    let current = libc::MCL_CURRENT as usize;
    for flags in [current | libc::MCL_ONFAULT as usize, current] {
        tolerate(call(libc::SYS_mlockall, &[flags])).expect("locked, or refused as documented");
        for _ in 0..2 {
            drop(ground.evict_far());
            ground.await_passes(1);
            ground.assert_alike("everything is locked");
        }
        call(libc::SYS_munlockall, &[]).expect("needs nothing");
        drop(ground.evict_far());
        ground.assert_alike("everything is unlocked");
    }
}

fn protections_keep_the_bytes(ground: &Ground) {
    const WRITABLE: Row = ("mprotect back", |stretch, range| {
        ranged(libc::SYS_mprotect, stretch, range, libc::PROT_READ | libc::PROT_WRITE)
    });
    let readable: &[Row] = &[
        ("mprotect(PROT_READ)", |stretch, range| {
            ranged(libc::SYS_mprotect, stretch, range, libc::PROT_READ)
        }),
        ("mprotect(PROT_READ | PROT_EXEC)", |stretch, range| {
            ranged(libc::SYS_mprotect, stretch, range, libc::PROT_READ | libc::PROT_EXEC)
        }),
    ];
    keeps(ground, readable, Some(WRITABLE));
    for range in ranges(ground) {
        let none =
            |stretch: &Stretch| ranged(libc::SYS_mprotect, stretch, range.clone(), libc::PROT_NONE);
        ground.same("mprotect(PROT_NONE)", none).expect("is mapped");
        ground.await_passes(1);
        ground.same("mprotect back", |stretch| WRITABLE.1(stretch, range.clone())).expect("mapped");
        ground.assert_alike("closed and opened again");
    }
}

/// Advice after which memory reads as before.
macro_rules! advice {
    ($($advice:ident),* $(,)?) => {
        &[$((stringify!($advice), |stretch, range| {
            ranged(libc::SYS_madvise, stretch, range, libc::$advice)
        })),*]
    };
}

const ADVICE: &[Row] = advice![
    MADV_NORMAL,
    MADV_RANDOM,
    MADV_SEQUENTIAL,
    MADV_WILLNEED,
    MADV_COLD,
    MADV_PAGEOUT,
    MADV_HUGEPAGE,
    MADV_NOHUGEPAGE,
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    MADV_MERGEABLE,
    MADV_UNMERGEABLE,
    MADV_DODUMP,
    MADV_DONTDUMP,
    MADV_DOFORK,
    MADV_DONTFORK,
];

/// Other calls after which memory reads as before.
const CALLS: &[Row] = &[
    // It may lack a huge page, or find too little to do: the outcome does not matter.
    ("MADV_COLLAPSE", |stretch, range| {
        const MADV_COLLAPSE: i32 = 25;
        let _attempt = ranged(libc::SYS_madvise, stretch, range, MADV_COLLAPSE);
        Ok(Vec::new())
    }),
    // Anonymous memory has nothing to remove it from.
    ("MADV_REMOVE", |stretch, range| ranged(libc::SYS_madvise, stretch, range, libc::MADV_REMOVE)),
    ("msync", |stretch, range| ranged(libc::SYS_msync, stretch, range, libc::MS_SYNC)),
    ("mincore", |stretch, range| {
        let mut resident = vec![0_u8; range.len() / UNIT];
        let args = [stretch.at(range.start), range.len(), addr_mut(&mut resident[..])];
        call(libc::SYS_mincore, &args).map(|_| Vec::new())
    }),
    ("mbind", |stretch, range| {
        // Memory of node 0 is preferred; a kernel without NUMA knows no such call.
        let (preferred, node) = (1, 1_usize);
        let args = [stretch.at(range.start), range.len(), preferred, addr(&node), 64, 0];
        call(libc::SYS_mbind, &args).map(|_| Vec::new())
    }),
    ("a name", |stretch, range| {
        const PR_SET_VMA: usize = 0x5356_4D41;
        let name = addr(c"attacked");
        let args = [PR_SET_VMA, 0, stretch.at(range.start), range.len(), name];
        call(libc::SYS_prctl, &args).map(|_| Vec::new())
    }),
];

fn advice_keeps_the_bytes(ground: &Ground) {
    keeps(ground, ADVICE, None);
    keeps(ground, CALLS, None);
}

/// Every 4 KiB of a range is zero, or as in ordinary memory, where the range was left alone.
fn assert_zero_or_alike(ground: &Ground, what: &str, range: Range<usize>) {
    for unit in range.step_by(UNIT) {
        let far = ground.far.bytes(unit..unit + UNIT);
        let zero = far.iter().all(|byte| *byte == 0);
        assert!(zero || far == ground.near.bytes(unit..unit + UNIT), "{what}: {unit} is neither");
    }
}

/// book/src/reference/limits.md: the kernel drops what is resident, and far memory does not learn of it;
/// `discard` is the call that drops all.
fn memory_dropped_by_the_program_is_zero_or_as_before(ground: &Ground) {
    let (mut dice, ranges) = (ground.dice(), ranges(ground));
    for round in 0..ground.rounds(1) as u64 {
        for advice in [libc::MADV_DONTNEED, libc::MADV_FREE] {
            let range = ranges[dice.below(ranges.len() as u64) as usize].clone();
            let number = 2 * round + 7;
            ground.far.fill(number);
            ground.near.fill(number);
            ranged(libc::SYS_madvise, &ground.far, range.clone(), advice).expect("is allowed");
            assert_zero_or_alike(ground, "dropped", range.clone());
            ground.await_passes(1);
            assert_zero_or_alike(ground, "dropped, and evicted", range.clone());
            ground.assert_alike_in("before what was dropped", 0..range.start);
            ground.assert_alike_in("after what was dropped", range.end..ground.far.len);
            ground.far.fill(number + 1);
            ground.near.fill(number + 1);
            drop(ground.evict_far());
            ground.assert_alike("written again");
        }
    }
}

/// `Heap::madvise` does to far memory, wherever it is and however it is protected, what the kernel does
/// to ordinary memory.
fn memory_that_the_heap_is_told_to_drop_is_zero(ground: &Ground) {
    const WRITABLE: i32 = libc::PROT_READ | libc::PROT_WRITE;
    let mut dice = ground.dice();
    let mut number = 11;
    for protection in [WRITABLE, libc::PROT_READ, libc::PROT_NONE] {
        for range in ranges(ground) {
            number += 1;
            ground.far.fill(number);
            ground.near.fill(number);
            if dice.below(2) == 0 {
                drop(ground.evict_far());
            }
            let protect = |protection| {
                let act = |stretch: &Stretch| {
                    ranged(libc::SYS_mprotect, stretch, range.clone(), protection)
                };
                ground.same("mprotect", act).expect("is mapped");
            };
            protect(protection);
            // A page that the length covers in part counts whole.
            let range = range.start..range.end - dice.below(UNIT as u64) as usize;
            let (start, len) =
                (ground.far.at(range.start) as *mut u8, ByteCount(range.len() as u64));
            // SAFETY: the attack gives the content up.
            let dropped =
                unsafe { Heap::madvise(bytes(start, len).cast_mut(), libc::MADV_DONTNEED) };
            assert_eq!(dropped, Ok(true), "{range:?}");
            ranged(libc::SYS_madvise, &ground.near, range.clone(), libc::MADV_DONTNEED)
                .expect("is allowed");
            protect(WRITABLE);
            ground.assert_alike("dropped");
        }
    }
    ground.await_passes(1);
    ground.assert_alike("dropped, and evicted");
}

/// What a system call finds at a place: a word, or that nothing is mapped there.
fn look(at: usize) -> Result<Vec<u8>, Errno> {
    let file = memory_file();
    call(libc::SYS_write, &[fd(&file), at, 8])?;
    call(libc::SYS_lseek, &[fd(&file), 0, 0])?;
    Ok(take(&file, 8))
}

/// A page and a half in the middle.
fn hole(ground: &Ground) -> Range<usize> {
    let start = ground.far.len / 2;
    start..start + 2 * UNIT
}

fn assert_alike_around(ground: &Ground, what: &str, hole: &Range<usize>) {
    // The page that lost a part may have lost all of it, if it was on the device.
    let (start, end) = (hole.start, hole.end.next_multiple_of(UNIT));
    ground.assert_alike_in(what, 0..start);
    ground.assert_alike_in(what, end..ground.far.len);
}

fn memory_unmapped_by_the_program_harms_nothing_else(ground: &Ground) {
    ground.spoiled.store(true, Ordering::Relaxed);
    let hole = hole(ground);
    call(libc::SYS_munmap, &[ground.far.at(hole.start), hole.len()]).expect("was mapped");
    for _ in 0..2 {
        drop(ground.evict_far());
        ground.await_passes(1);
        assert_eq!(look(ground.far.at(hole.start)), Err(libc::EFAULT));
        assert_alike_around(ground, "a part is unmapped", &hole);
    }
}

/// What a program maps over far memory.
#[derive(Clone, Copy, Debug)]
enum Over {
    Anonymous,
    /// Memory that is shared, as both halves of a ring buffer are.
    Shared,
    File,
}

impl Over {
    const ALL: [Over; 3] = [Over::Anonymous, Over::Shared, Over::File];

    /// Maps it over a part of a stretch.
    fn map(self, stretch: &Stretch, hole: &Range<usize>) {
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
        let file = match self {
            Over::Anonymous => None,
            Over::Shared => Some(File::from(memory_file())),
            Over::File => Some(tempfile::tempfile_in("/var/tmp").expect("a file system")),
        };
        let private = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let flags = libc::MAP_FIXED | if file.is_none() { private } else { libc::MAP_SHARED };
        let number = file.as_ref().map_or(usize::MAX, |file| {
            file.set_len(hole.len() as u64).expect("room");
            file.as_raw_fd() as usize
        });
        let start = stretch.at(hole.start);
        let args = [start, hole.len(), protection, flags as usize, number, 0];
        call(libc::SYS_mmap, &args).expect("room");
    }
}

/// Writes to what was mapped over a part of far memory, through evictions.
fn use_mapped(ground: &Ground, stretch: &Stretch, hole: &Range<usize>, around: impl Fn(&str)) {
    for number in 0..3_u64 {
        for at in hole.clone().step_by(8) {
            stretch.set_word(at, number + at as u64);
        }
        let evicted = ground.heap.region().advise(
            &[bytes(stretch.at(0) as *const u8, ByteCount(stretch.len as u64))],
            Advice::PageOutNow,
        );
        drop(evicted);
        ground.await_passes(1);
        for at in hole.clone().step_by(8) {
            assert_eq!(stretch.word(at), number + at as u64, "the program's word at {at}");
        }
        around("a part is another mapping");
    }
}

fn memory_mapped_over_far_memory_is_the_programs(ground: &Ground) {
    ground.spoiled.store(true, Ordering::Relaxed);
    for (over, start) in Over::ALL.into_iter().zip([2, 0, 1]) {
        let len = hole(ground).len();
        let start = ground.far.len / 4 * start;
        let hole = start..start + len.min(ground.far.len / 4 - UNIT);
        // All of it is resident, or as much as fits.
        ground.far.fill(start as u64);
        ground.near.fill(start as u64);
        over.map(&ground.far, &hole);
        over.map(&ground.near, &hole);
        use_mapped(ground, &ground.far, &hole, |what| {
            hole.clone().step_by(8).for_each(|at| ground.near.set_word(at, ground.far.word(at)));
            ground.assert_alike(what);
        });
    }
}

/// The kernel fills fresh memory by itself where the neighbourhood is in use.
fn memory_mapped_over_fresh_far_memory_is_the_programs(ground: &Ground) {
    ground.spoiled.store(true, Ordering::Relaxed);
    for over in Over::ALL {
        let fresh = allocate(4 << 20);
        fresh.fill(9);
        let start = fresh.len / 2 + UNIT;
        let hole = start..start + 2 * UNIT;
        over.map(&fresh, &hole);
        use_mapped(ground, &fresh, &hole, |what| {
            for at in (0..hole.start).chain(hole.end..fresh.len).step_by(8) {
                assert_eq!(fresh.word(at), stamp(9, at / 8), "{what}, {over:?}: {at}");
            }
        });
    }
}

/// book/src/reference/limits.md: what the program has mapped over far memory ends with the allocation.
fn memory_freed_after_it_was_mapped_over_is_far_memory(ground: &Ground) {
    let len = 4 << 20;
    for over in Over::ALL {
        let lent = allocate(len);
        lent.fill(3);
        let hole = len / 2 + UNIT..len / 2 + 3 * UNIT;
        over.map(&lent, &hole);
        hole.clone().step_by(8).for_each(|at| lent.set_word(at, 5));
        ground.await_passes(1);
        let base = lent.at(0);
        free(lent);
        ground.heap.purge();
        // Blocks that begin elsewhere are kept until the place comes again.
        let mut others = Vec::new();
        let again = loop {
            let block = allocate(len);
            if block.at(0) == base {
                break block;
            }
            others.push(block);
            // Another thread may have been at the place just now: it is given back by a later purge.
            ground.heap.purge();
            assert!(others.len() < 32, "the address did not come again");
        };
        others.into_iter().for_each(free);
        (0..len).step_by(8).for_each(|at| assert_eq!(again.word(at), 0, "{over:?}: {at}"));
        again.fill(4);
        // What the evictor takes is far memory; what is not stays resident.
        let mut resident = vec![0_u8; hole.len() / UNIT];
        let gone = (0..100).any(|_| {
            drop(ground.heap.region().advise(
                &[bytes(again.at(0) as *const u8, ByteCount(len as u64))],
                Advice::PageOutNow,
            ));
            let args = [again.at(hole.start), hole.len(), addr_mut(&mut resident[..])];
            call(libc::SYS_mincore, &args).expect("is mapped");
            resident.iter().all(|resident| resident & 1 == 0)
        });
        assert!(gone, "{over:?}: some of it is not far memory: {resident:?}");
        (0..len / 8).for_each(|at| assert_eq!(again.word(at * 8), stamp(4, at), "{over:?}: {at}"));
        free(again);
    }
}

/// What is resident goes along; what is on the device cannot, so that the process is ended with a
/// message when that is noticed.
fn moved_away(ground: &Ground) {
    ground.spoiled.store(true, Ordering::Relaxed);
    let hole = hole(ground);
    let room = map(hole.len());
    let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as usize;
    ground.pinned(|| {
        let args = [ground.far.at(hole.start), hole.len(), hole.len(), flags, room.at(0)];
        call(libc::SYS_mremap, &args).expect("is one mapping");
    });
    for _ in 0..2 {
        drop(ground.evict_far());
        ground.await_passes(1);
        let moved = room.bytes(0..room.len);
        assert!(moved == ground.near.bytes(hole.clone()), "the bytes did not come along");
        assert_alike_around(ground, "a part is elsewhere", &hole);
    }
}

fn sealed_memory_keeps_its_bytes(ground: &Ground) {
    const SYS_MSEAL: libc::c_long = 462;
    let range = UNIT..2 * UNIT;
    let sealed = call(SYS_MSEAL, &[ground.far.at(range.start), range.len(), 0]);
    match sealed {
        Ok(_) => ground.spoiled.store(true, Ordering::Relaxed),
        Err(error) => return println!("skipped: nothing can be sealed here: errno {error}"),
    }
    for number in 0..3 {
        drop(ground.evict_far());
        ground.await_passes(1);
        ground.assert_alike("sealed");
        ground.far.fill(number);
        ground.near.fill(number);
    }
}
