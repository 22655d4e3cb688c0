//! Children of a process whose far memory is in use: they have it as it was at the fork, or, in the modes
//! in which they cannot, it does not exist in them, which they learn loudly. Whatever they do and however
//! they end, it changes nothing for the parent.
#![expect(unsafe_code, reason = "forks, and touches far memory in children")]

use crate::common::{StopOnDrop, bytes};
use crate::ground::{Ground, Stretch, UNIT, allocate, attacks, free, stamp};
use crate::kernel::{addr, addr_mut, call, fd, memory_file, pipe, take};
use farheap::{ByteCount, Heap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

attacks! {
    children_end_as_their_table_says: all,
    children_that_live_on_change_nothing: all,
    threads_fork_while_others_fault: all,
    children_in_a_row_while_threads_start_and_end: all,
    memory_that_a_child_drops_is_zero: all,
    advice_about_children_shows_them_no_zeros: all,
    memory_mapped_over_far_memory_is_inherited: all,
}

/// How a child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

const RIGHT: i32 = 0;
const WRONG: i32 = 1;

/// Runs `body` in a child; what it returns is the child's status.
fn fork(body: impl FnOnce() -> i32) -> usize {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child runs the body alone, and never returns from here.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "fork: {}", std::io::Error::last_os_error());
    if child == 0 {
        let _never = call(libc::SYS_exit_group, &[body() as usize]);
    }
    child as usize
}

fn end_of(child: usize) -> End {
    let mut status = 0_i32;
    let waited = call(libc::SYS_wait4, &[child, addr_mut(&mut status), 0, 0]);
    assert_eq!(waited, Ok(child));
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}

/// Ends a process as returning from `main` does, with what it registered for that.
fn leave(status: i32) -> ! {
    // SAFETY: ends the process; takes no pointers.
    unsafe { libc::exit(status) }
}

/// Far memory that a handler at the exit of a child frees.
static FREED_AT_EXIT: AtomicUsize = AtomicUsize::new(0);
const FREED_LEN: usize = 1 << 20;

extern "C" fn free_at_exit() {
    let at = FREED_AT_EXIT.swap(0, Ordering::Relaxed);
    if at != 0 {
        free(Stretch::of(at, FREED_LEN));
    }
}

/// Frees a block of the parent's by a handler at exit, in the caller's process only.
fn leave_and_free(block: Stretch) -> ! {
    FREED_AT_EXIT.store(block.at(0), Ordering::Relaxed);
    // SAFETY: the handler is a function without captures.
    let registered = unsafe { libc::atexit(free_at_exit) };
    leave(if registered == 0 { RIGHT } else { WRONG })
}

fn right(is_right: bool) -> i32 {
    if is_right { RIGHT } else { WRONG }
}

/// What a child does with far memory and a block of the parent's.
type Row = (&'static str, fn(&Ground, Stretch) -> i32, Needs);

/// What a child needs of the parent's far memory. Without it, it ends by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    Content,
}

const CHILDREN: &[Row] = &[
    ("end at once", |_, _| RIGHT, Needs::Nothing),
    ("free", |_, block| freed(block), Needs::Nothing),
    ("end with handlers at exit", |_, block| leave_and_free(block), Needs::Nothing),
    ("become another program", |_, _| become_true(), Needs::Nothing),
    (
        "fork again",
        |_, block| right(end_of(fork(|| freed(block))) == End::Exit(RIGHT)),
        Needs::Nothing,
    ),
    (
        "fork again, and end with handlers at exit",
        |_, block| {
            let second = end_of(fork(|| leave_and_free(block)));
            if second == End::Exit(RIGHT) { leave_and_free(block) } else { WRONG }
        },
        Needs::Nothing,
    ),
    (
        "touch far memory in a child of its own",
        |ground, _| right(end_of(fork(|| touched(ground, 0))) == end(ground, Needs::Content)),
        Needs::Nothing,
    ),
    (
        "allocate",
        |_, _| right(!allocates_far() && vec![7_u8; 1 << 20][1 << 19] == 7),
        Needs::Nothing,
    ),
    ("stop the heap", |ground, _| right(ground.heap.shutdown().is_err()), Needs::Nothing),
    ("have far memory read by a system call", |ground, _| asked(ground), Needs::Nothing),
    ("read the first page", |ground, _| touched(ground, 0), Needs::Content),
    ("read the last word", |ground, _| touched(ground, ground.far.len - 8), Needs::Content),
    (
        "read a block that was just written",
        |_, block| right(block.word(0) == stamp(3, 0)),
        Needs::Content,
    ),
    (
        "write",
        |ground, _| {
            ground.far.set_word(UNIT, 1);
            right(ground.far.word(UNIT) == 1)
        },
        Needs::Content,
    ),
];

/// How a child ends.
fn end(ground: &Ground, needs: Needs) -> End {
    match needs {
        Needs::Content if !ground.way.is_inherited() => End::Signal(libc::SIGSEGV),
        _ => End::Exit(RIGHT),
    }
}

/// Frees the child's view of a block, which does nothing.
fn freed(block: Stretch) -> i32 {
    free(block);
    RIGHT
}

/// A read, which must give what the twin in ordinary memory has.
fn touched(ground: &Ground, at: usize) -> i32 {
    right(ground.far.word(at) == ground.near.word(at))
}

/// A system call reads what is there, or finds nothing.
fn asked(ground: &Ground) -> i32 {
    let file = memory_file();
    let args = [fd(&file), ground.far.at(0), 8, 0];
    let asked = call(libc::SYS_pwrite64, &args);
    match ground.way.is_inherited() {
        true if ground.way.serves_kernel_faults() => right(asked == Ok(8)),
        true => right(matches!(asked, Ok(8) | Err(libc::EFAULT))),
        false => right(asked == Err(libc::EFAULT)),
    }
}

fn allocates_far() -> bool {
    use allocator_api2::alloc::Allocator;
    let block = farheap::Far.allocate(std::alloc::Layout::new::<u64>());
    block.is_ok_and(|block| farheap::Far::contains(block.as_ptr().cast::<u8>()))
}

fn become_true() -> i32 {
    let (name, nothing) = (c"/bin/true", 0_usize);
    let arguments = [addr(name), 0];
    let _error = call(libc::SYS_execve, &[addr(name), addr(&arguments), addr(&nothing)]);
    WRONG
}

fn children_end_as_their_table_says(ground: &Ground) {
    for _ in 0..ground.rounds(1) {
        for (what, act, needs) in CHILDREN {
            let block = allocate(FREED_LEN);
            block.fill(3);
            drop(ground.evict_far());
            let child = fork(|| act(ground, block));
            // The parent goes on meanwhile.
            ground.far.set_word(0, child as u64);
            ground.near.set_word(0, child as u64);
            assert_eq!(end_of(child), end(ground, *needs), "a child that is to {what}");
            let kept = (0..FREED_LEN / 8).all(|at| block.word(at * 8) == stamp(3, at));
            assert!(kept, "{what}: the parent's block");
            ground.assert_alike(what);
            free(block);
        }
    }
}

/// Waits until the parent closes its end of a pipe, which it never writes to.
fn outlive(wait: &OwnedFd, own_end: &OwnedFd) -> bool {
    // The child has that end too.
    let closed = call(libc::SYS_close, &[fd(own_end)]) == Ok(0);
    let mut byte = 0_u8;
    closed && call(libc::SYS_read, &[fd(wait), addr_mut(&mut byte), 1]) == Ok(0)
}

/// Children that wait, free what they inherited, and end, while the parent changes everything.
fn children_that_live_on_change_nothing(ground: &Ground) {
    const CHILDREN: usize = 4;
    for round in 0..ground.rounds(1) as u64 {
        let block = allocate(FREED_LEN);
        let mut children = Vec::new();
        for number in 0..CHILDREN as u64 {
            let (wait, end) = pipe();
            let ends: Vec<_> = children.iter().map(|(_, end)| fd(end)).collect();
            let child = fork(|| {
                // Those of the children before it would keep them waiting.
                ends.iter().for_each(|end| {
                    let _closed = call(libc::SYS_close, &[*end]);
                });
                if !outlive(&wait, &end) {
                    return WRONG;
                }
                leave_and_free(block)
            });
            children.push((child, end));
            ground.far.fill(round * 10 + number);
            ground.near.fill(round * 10 + number);
            drop(ground.evict_far());
            ground.assert_alike("a child lives on");
        }
        free(block);
        ground.await_passes(1);
        ground.assert_alike("children live on");
        for (child, end) in children {
            drop(end);
            assert_eq!(end_of(child), End::Exit(RIGHT), "a child that lived on");
        }
        ground.assert_alike("they have ended");
    }
}

/// From several threads at once, none of which is the one that started the heap.
fn threads_fork_while_others_fault(ground: &Ground) {
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..ground.rounds(4) {
                    let block = allocate(FREED_LEN);
                    block.set_word(0, 9);
                    assert_eq!(end_of(fork(|| freed(block))), End::Exit(RIGHT), "free");
                    let reads = fork(|| right(block.word(0) == 9));
                    assert_eq!(end_of(reads), end(ground, Needs::Content), "read");
                    assert_eq!(block.word(0), 9, "the parent's block");
                    free(block);
                }
            });
        }
        for number in 0..ground.rounds(4) as u64 {
            ground.far.fill(number);
            ground.near.fill(number);
            drop(ground.evict_far());
            ground.assert_alike("while threads fork");
        }
    });
}

/// Two children in a row and a child of a child's, from several threads, while others start and end, and
/// allocate. A lock that one of them holds at the fork, of std's for one, is never opened in the child.
fn children_in_a_row_while_threads_start_and_end(ground: &Ground) {
    const FORKERS: usize = 2;
    let is_over = AtomicBool::new(false);
    let come_and_go = || {
        while !is_over.load(Ordering::Relaxed) {
            let short = std::thread::spawn(|| {
                let block = allocate(FREED_LEN);
                block.set_word(0, 1);
                free(block);
            });
            short.join().expect("it has no reason to panic");
        }
    };
    let fork_twice = |number: u64| {
        let block = allocate(FREED_LEN);
        block.fill(number);
        let read = || right(block.word(FREED_LEN / 2) == stamp(number, FREED_LEN / 16));
        let children =
            [fork(read), fork(|| right(end_of(fork(|| freed(block))) == End::Exit(RIGHT)))];
        // The children have what was there.
        block.fill(number + 1);
        let ends = children.map(end_of);
        assert_eq!(ends, [end(ground, Needs::Content), End::Exit(RIGHT)], "two in a row");
        free(block);
    };
    std::thread::scope(|scope| {
        let _stop = StopOnDrop(&is_over);
        (0..FORKERS).for_each(|_| drop(scope.spawn(come_and_go)));
        std::thread::scope(|forkers| {
            for forker in 0..FORKERS {
                let rounds = ground.rounds(24) as u64;
                forkers
                    .spawn(move || (0..rounds).for_each(|at| fork_twice(at << 8 | forker as u64)));
            }
        });
    });
    ground.assert_alike("children came and went");
}

/// A child gives a part of memory up that it has put into a pipe. A page that the length covers in part counts whole.
fn memory_that_a_child_drops_is_zero(ground: &Ground) {
    const LEN: usize = 2 * UNIT;
    for at in [0, UNIT + UNIT, 3 * UNIT - LEN] {
        ground.far.fill(at as u64);
        ground.near.fill(at as u64);
        drop(ground.evict_far());
        let child = fork(|| {
            let mut is_right = (at..at + LEN).step_by(UNIT).all(|at| touched(ground, at) == RIGHT);
            // The child's own, not what it shares with its parent.
            ground.far.set_word(at, 1);
            let (out, into) = pipe();
            let vector = [ground.far.at(at), LEN];
            let sent = call(libc::SYS_vmsplice, &[fd(&into), addr(&vector), 1, 0]);
            let mut want = ground.near.bytes(at..at + LEN);
            want[..8].copy_from_slice(&1_u64.to_ne_bytes());
            let start = ground.far.at(at) as *mut u8;
            // SAFETY: the child gives the content up.
            is_right &= unsafe {
                Heap::madvise(bytes(start, ByteCount(LEN as u64)).cast_mut(), libc::MADV_DONTNEED)
            } == Ok(true);
            ground.near.put(at, &[0; LEN]);
            // Locked, a page is not dropped but filled.
            let last = ground.far.len - UNIT;
            let _may_fail = call(libc::SYS_mlock, &[ground.far.at(last), UNIT]);
            let range = bytes(ground.far.at(last) as *const u8, ByteCount(UNIT as u64 - 100));
            // SAFETY: as above.
            is_right &= unsafe { Heap::madvise(range.cast_mut(), libc::MADV_DONTNEED) } == Ok(true);
            ground.near.put(last, &[0; UNIT]);
            for _ in 0..2 {
                // The whole is more than the child may keep, so that its pages leave and come back.
                is_right &=
                    ground.far.bytes(0..ground.far.len) == ground.near.bytes(0..ground.near.len);
            }
            right(is_right && sent == Ok(LEN) && take(&out, LEN) == want)
        });
        assert_eq!(end_of(child), end(ground, Needs::Content), "from {at} on");
        ground.assert_alike("the parent's");
    }
}

/// Libraries that register memory with devices keep it from children, and take that back.
fn advice_about_children_shows_them_no_zeros(ground: &Ground) {
    let range = UNIT + UNIT..2 * UNIT + 2 * UNIT;
    for advice in [
        &[libc::MADV_DONTFORK][..],
        &[libc::MADV_DOFORK],
        &[libc::MADV_DONTFORK, libc::MADV_DOFORK],
    ] {
        // (The second fork is after what the first has set.)
        for _ in 0..2 {
            for advice in advice {
                let args = [ground.far.at(range.start), range.len(), *advice as usize];
                assert_eq!(call(libc::SYS_madvise, &args), Ok(0));
            }
            for at in [0, range.start, range.end - 8] {
                let end_of_child = end_of(fork(|| touched(ground, at)));
                assert_eq!(end_of_child, end(ground, Needs::Content), "{advice:?}: byte {at}");
            }
        }
        drop(ground.evict_far());
        ground.assert_alike("the parent's");
    }
}

/// It is the program's own, so that its children have it, also where they have no far memory.
fn memory_mapped_over_far_memory_is_inherited(ground: &Ground) {
    ground.spoiled.store(true, Ordering::Relaxed);
    let start = ground.far.len / 2 + UNIT;
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as usize;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED) as usize;
    let args = [ground.far.at(start), 2 * UNIT, protection, flags, usize::MAX, 0];
    call(libc::SYS_mmap, &args).expect("room");
    let words = [start, start + UNIT];
    words.iter().for_each(|at| ground.far.set_word(*at, 77));
    for round in 0..2 {
        let child = fork(|| right(words.iter().all(|at| ground.far.word(*at) == 77)));
        assert_eq!(end_of(child), End::Exit(RIGHT), "round {round}");
        ground.await_passes(1);
    }
    let end_of_child = end_of(fork(|| touched(ground, 0)));
    assert_eq!(end_of_child, end(ground, Needs::Content), "far memory beside it");
}
