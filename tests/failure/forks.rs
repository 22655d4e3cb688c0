//! Forked children of a process whose device is slow or fails, at every state that a page can be in. In processes of their
//! own: while a child lives the kernel does not move what it shares, whatever test has it.
#![expect(unsafe_code, reason = "forks, and gives far memory up")]

use crate::common::child::alone;
use crate::common::{bytes, seed, watchdog};
use crate::harness::{
    DEADLINE, Far, HUNG, PAGE, check_page, config, fill_page, read_word, stamp, wait_until,
};
use farheap::region::{Advice, Install};
use farheap::store::Op;
use farheap::{ByteCount, Error};
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Forks; the child runs `body` and ends with 0 if nothing in it panics.
fn fork(body: impl FnOnce()) -> i32 {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child calls `body` and ends without cleaning up; the C library's allocator is prepared for forks.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    assert!(pid > 0, "fork: {}", std::io::Error::last_os_error());
    pid
}

/// The status of a child as `waitpid(2)` tells it.
fn wait_for(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "{}", std::io::Error::last_os_error());
    status
}

/// Pages of a chunk of 2 MiB.
const CHUNK: usize = 512;
/// The pages that states and droppers are tried on: in the middle of a chunk, and a whole one.
const SOME: Range<usize> = 8..24;
const WHOLE: Range<usize> = 0..CHUNK;
/// Writes that the evictor keeps in flight: what it takes out beyond them cools.
const WRITES: usize = 32;

fn far(name: &str, deadline: Duration) -> Option<Far> {
    let config = config(Install::Auto).limit(ByteCount::mib(32));
    Far::new(config.deadline(deadline), 2 * CHUNK, seed(name))
}

/// Whether a page has memory, or a part of it.
fn is_mapped(far: &Far, page: usize) -> bool {
    let mut there = [0_u8; 4];
    // SAFETY: an address range of the region, and room for a byte for each 4 KiB of it.
    let rc = unsafe { libc::mincore(far.addr(page) as *mut _, PAGE, there.as_mut_ptr()) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
    there.iter().any(|there| there & 1 != 0)
}

/// What pages read as that were not dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Zeros,
    Stamps,
    Lost,
}

/// A state that pages can be in, how they get there, and whether the device hangs meanwhile.
struct State {
    name: &'static str,
    pages: Range<usize>,
    holds: Content,
    enter: fn(&Far, Range<usize>),
}

const STATES: [State; 10] = [
    State { name: "never touched", pages: SOME, holds: Content::Zeros, enter: |_, _| () },
    State { name: "written", pages: SOME, holds: Content::Stamps, enter: Far::fill },
    State { name: "filled by the kernel", pages: WHOLE, holds: Content::Stamps, enter: open },
    State { name: "read back", pages: SOME, holds: Content::Stamps, enter: read_back },
    State { name: "stored", pages: SOME, holds: Content::Stamps, enter: Far::store },
    State { name: "being read", pages: SOME, holds: Content::Stamps, enter: being_read },
    State {
        name: "being read as a chunk",
        pages: WHOLE,
        holds: Content::Stamps,
        enter: being_read,
    },
    State { name: "being written", pages: SOME, holds: Content::Stamps, enter: being_written },
    State { name: "cooling", pages: SOME, holds: Content::Stamps, enter: cooling },
    State { name: "lost", pages: 8..9, holds: Content::Lost, enter: lost },
];

/// (A chunk is not opened while another thread is at it, or room is short.)
fn open(far: &Far, pages: Range<usize>) {
    wait_until("the kernel fills a chunk", || {
        far.discard(pages.clone());
        far.fill(pages.clone());
        far.stats().chunks_opened > far.stats().chunks_closed
    });
}

fn read_back(far: &Far, pages: Range<usize>) {
    far.store(pages.clone());
    far.check(pages);
}

fn being_read(far: &Far, pages: Range<usize>) {
    far.store(pages.clone());
    far.control.pause();
    let before = far.stats().pages_prefetched;
    far.region
        .advise(&[bytes(far.ptr(pages.start), far.len(pages.len()))], Advice::WillNeed)
        .expect("a range of the region");
    let asked = || far.stats().pages_prefetched - before;
    wait_until("all pages are being read", || asked() == pages.len() as u64);
    wait_until("the device has read them", || far.control.held() > 0);
}

fn being_written(far: &Far, pages: Range<usize>) {
    far.fill(pages.clone());
    far.control.pause();
    far.region
        .advise(&[bytes(far.ptr(pages.start), far.len(pages.len()))], Advice::PageOut)
        .expect("inside the region");
    wait_until("the device has got them", || far.control.held() > 0);
    wait_until("none is mapped", || pages.clone().all(|page| !is_mapped(far, page)));
}

/// As many writes as there may be are under way, each of a page without neighbours; then others leave.
fn cooling(far: &Far, pages: Range<usize>) {
    let before = (CHUNK..2 * CHUNK).step_by(2).take(WRITES);
    for page in before.clone().chain(pages.clone()) {
        fill_page(far.addr(page), stamp(page));
    }
    far.control.pause();
    let leave = |page| {
        far.region
            .advise(&[bytes(far.ptr(page), far.len(1))], Advice::PageOut)
            .expect("inside the region");
        wait_until("it has left", || !is_mapped(far, page));
    };
    before.for_each(leave);
    wait_until("all writes are under way", || far.control.held() == WRITES as u64);
    pages.for_each(leave);
}

/// A page that is lost: its first word is touched by a system call, which fails.
fn lost(far: &Far, pages: Range<usize>) {
    far.store(pages.clone());
    far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
    let file = tempfile::tempfile().expect("a file");
    for page in pages {
        // SAFETY: a page of the region, which is mapped.
        let bytes = unsafe { std::slice::from_raw_parts(far.ptr(page), PAGE) };
        let written = (&file).write(bytes);
        assert_eq!(written.map_err(|error| error.raw_os_error()), Err(Some(libc::EFAULT)));
    }
}

/// A way to give content up.
type Drop = (&'static str, fn(&Far, Range<usize>));

const DROPPERS: [Drop; 3] =
    [("discard", Far::discard), ("clear", clear), ("unmap, and map again", map_again)];

fn clear(far: &Far, pages: Range<usize>) {
    // SAFETY: the case gives the content up and holds no reference.
    unsafe { far.region.clear(bytes(far.ptr(pages.start), far.len(pages.len())).cast_mut()) }
        .expect("it is dropped");
}

fn map_again(far: &Far, pages: Range<usize>) {
    let (ptr, len) = (far.ptr(pages.start).cast_mut(), far.len(pages.len()));
    let ptr = NonNull::new(ptr).expect("not null");
    // SAFETY: mapped by this case, which does not need its content.
    unsafe { far.region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
        .expect("mapped");
    assert_eq!(
        far.region.map(len).expect("there is room").cast::<u8>(),
        ptr,
        "the same place again"
    );
}

fn expect_zeros(far: &Far, pages: Range<usize>) {
    for page in pages {
        for at in (0..PAGE).step_by(512) {
            assert_eq!(read_word(far.addr(page) + at), 0, "page {page} at {at}");
        }
    }
}

fn expect(far: &Far, pages: Range<usize>, holds: Content) {
    match holds {
        Content::Zeros => expect_zeros(far, pages),
        Content::Stamps => far.check(pages),
        Content::Lost => {
            read_word(far.addr(pages.start));
        }
    }
}

/// Each state with each way to give content up, in both orders: a fork after that, whose children read zeros, and one
/// before, whose children read what was there.
#[test]
fn children_read_what_was_there_at_the_fork_and_zeros_where_it_was_dropped() {
    alone("children_read_what_was_there_at_the_fork_and_zeros_where_it_was_dropped", || {
        let name = "forks::children_read_what_was_there_at_the_fork_and_zeros_where_it_was_dropped";
        let _watchdog = watchdog(name, HUNG);
        for State { name: state, pages, holds, enter } in STATES {
            for (dropper, drop_content) in DROPPERS {
                let case = format!("{state}, then {dropper}");
                let Some(far) = far(&case, DEADLINE) else { return };
                let pages = || pages.clone();
                enter(&far, pages());
                // In a child the device works: it has a copy of the plan.
                let before = fork(|| {
                    far.control.heal();
                    expect(&far, pages(), holds);
                });
                drop_content(&far, pages());
                let after = fork(|| {
                    far.control.heal();
                    let grandchild = fork(|| expect_zeros(&far, pages()));
                    expect_zeros(&far, pages());
                    assert_eq!(wait_for(grandchild), 0, "a child of the child's");
                    pages().for_each(|page| fill_page(far.addr(page), !stamp(page)));
                    pages().for_each(|page| check_page(far.addr(page), !stamp(page), page));
                });
                far.control.heal();
                expect_zeros(&far, pages());
                // The place is used anew, while the children read.
                pages().for_each(|page| fill_page(far.addr(page), !stamp(page)));
                far.evict(pages());
                let ends = (wait_for(before), wait_for(after));
                // Without faults of kernel mode a child may read again what its parent has given up.
                if holds == Content::Lost && !far.region.serves_kernel_faults() {
                    assert_eq!(ends.1, 0, "{case}: a child forked after");
                    continue;
                }
                let sigbus = if holds == Content::Lost { libc::SIGBUS } else { 0 };
                assert_eq!(
                    ends,
                    (sigbus, 0),
                    "{case}: a child forked before, and one forked after"
                );
                pages().for_each(|page| check_page(far.addr(page), !stamp(page), page));
            }
        }
    });
}

/// Maps memory of the program's own over far memory.
fn map_over(start: usize, len: usize) {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    let (access, at) = (libc::PROT_READ | libc::PROT_WRITE, start as *mut libc::c_void);
    #[expect(clippy::disallowed_methods, reason = "a program does so")]
    // SAFETY: over a part of the case's own memory.
    let mapped = unsafe { libc::mmap(at, len, access, flags, -1, 0) };
    assert_eq!(mapped, at, "{}", std::io::Error::last_os_error());
}

/// Memory that the program maps over pages that have left, and that nobody touches, reads
/// as zero in children and theirs, also what a child has mapped; around it is what was there.
#[test]
fn what_is_mapped_over_far_memory_that_has_left_is_the_childs_own() {
    alone("what_is_mapped_over_far_memory_that_has_left_is_the_childs_own", || {
        let name = "forks::what_is_mapped_over_far_memory_that_has_left_is_the_childs_own";
        let _watchdog = watchdog(name, HUNG);
        let Some(far) = far(name, DEADLINE) else { return };
        far.store(WHOLE);
        map_over(far.addr(8), 2 * PAGE);
        map_over(far.addr(20), PAGE);
        let child = fork(|| {
            map_over(far.addr(40), 2 * PAGE);
            map_over(far.addr(50), PAGE);
            let expect_all = || {
                [8..10, 20..21, 40..42, 50..51]
                    .into_iter()
                    .for_each(|pages| expect_zeros(&far, pages));
                [0..8, 10..20, 21..40, 42..50, 51..CHUNK]
                    .into_iter()
                    .for_each(|pages| far.check(pages));
            };
            let grandchild = fork(expect_all);
            assert_eq!(wait_for(grandchild), 0, "a child of the child's");
            expect_all();
        });
        assert_eq!(wait_for(child), 0, "the child");
    });
}

/// A thread frees memory over which it has mapped its own, which is far memory again from then on: children that are
/// forked meanwhile have all of the region.
#[test]
fn children_inherit_all_while_a_thread_maps_over_far_memory_and_frees_it() {
    alone("children_inherit_all_while_a_thread_maps_over_far_memory_and_frees_it", || {
        let name = "forks::children_inherit_all_while_a_thread_maps_over_far_memory_and_frees_it";
        let _watchdog = watchdog(name, HUNG);
        let Some(far) = far(name, DEADLINE) else { return };
        far.store(SOME);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    let start = far.region.map(far.len(1)).expect("there is room").cast::<u8>();
                    map_over(start.as_ptr() as usize, PAGE);
                    // SAFETY: just mapped, and nobody's any more.
                    unsafe {
                        far.region
                            .unmap(NonNull::slice_from_raw_parts(start, far.len(1).as_usize()))
                    }
                    .expect("just mapped");
                }
            });
            let ends: Vec<i32> = (0..40)
                .map(|_| wait_for(fork(|| far.check(SOME))))
                .filter(|end| *end != 0)
                .collect();
            is_over.store(true, Ordering::Relaxed);
            assert_eq!(ends, [], "children that could not read");
        });
    });
}

#[test]
fn a_child_drops_the_guard_of_its_parents_pin() {
    alone("a_child_drops_the_guard_of_its_parents_pin", || {
        for inherits in [true, false] {
            let config = config(Install::Auto).inherit(inherits);
            let Some(far) = Far::new(config, 8, seed("pins of a parent")) else { return };
            let guard = far.region.pin(bytes(far.ptr(0), far.len(8))).expect("a few pages");
            let mut guard = Some(guard);
            let child = fork(|| drop(guard.take()));
            assert_eq!(wait_for(child), 0, "inherit: {inherits}");
            drop(guard);
            far.region.unpin(bytes(far.ptr(0), far.len(8))).expect_err("is not pinned any more");
        }
    });
}

#[test]
fn a_child_that_advises_what_it_has_inherited_is_told_whose_that_is() {
    alone("a_child_that_advises_what_it_has_inherited_is_told_whose_that_is", || {
        let Some(far) = Far::new(config(Install::Auto), 64, seed("advice of a child")) else {
            return;
        };
        far.fill(0..64);
        far.region.evict_all().expect("written");
        far.check(0..8);
        let child = fork(|| {
            // The parent's descriptors are closed: a file of the child has the number of one.
            let mine: Vec<File> = (0..64).map_while(|_| tempfile::tempfile().ok()).collect();
            let range: *const [u8] = bytes(far.ptr(0), far.len(64));
            for advice in [Advice::WillNeed, Advice::WillNeedNow, Advice::Cold, Advice::PageOutNow]
            {
                let refused = far.region.advise(&[range], advice);
                assert!(matches!(refused, Err(Error::Forked { .. })), "{advice:?}: {refused:?}");
            }
            let refused = [
                far.region.evict_all(),
                // The parent's word says for ever that these pages have left.
                far.region.pin(range).map(drop),
                far.region.unpin(range),
                far.region.set_limit(ByteCount::mib(64)),
            ];
            assert!(
                refused.iter().all(|error| matches!(error, Err(Error::Forked { .. }))),
                "{refused:?}"
            );
            far.region.return_space();
            for file in mine {
                assert_eq!(
                    file.metadata().expect("a file").len(),
                    0,
                    "a foreign descriptor was written"
                );
            }
            far.check(0..64);
        });
        assert_eq!(wait_for(child), 0);
        far.check(0..64);
    });
}

#[test]
fn a_child_repeats_reads_that_fail_until_the_deadline() {
    alone("a_child_repeats_reads_that_fail_until_the_deadline", || {
        let name = "forks::a_child_repeats_reads_that_fail_until_the_deadline";
        let _watchdog = watchdog(name, HUNG);
        let Some(far) = far(name, Duration::from_secs(60)) else { return };
        far.store(SOME);
        let breaks: [fn(&Far); 4] = [
            |far| far.control.fail_next(Op::Read, 8, libc::EIO),
            |far| far.control.shorten_reads(3),
            |far| far.corrupt_reads(2),
            |far| far.control.fail_fraction(Op::Read, 300_000, libc::EIO),
        ];
        for (n, breaks) in breaks.into_iter().enumerate() {
            let child = fork(|| {
                let before = far.control.injected();
                breaks(&far);
                far.check(SOME);
                assert!(far.control.injected() > before, "no read has failed");
            });
            assert_eq!(wait_for(child), 0, "failure {n}");
        }
        far.check(SOME);
    });
}

#[test]
fn a_child_gives_a_page_up_that_cannot_be_read_for_a_whole_deadline() {
    alone("a_child_gives_a_page_up_that_cannot_be_read_for_a_whole_deadline", || {
        let name = "forks::a_child_gives_a_page_up_that_cannot_be_read_for_a_whole_deadline";
        let _watchdog = watchdog(name, HUNG);
        let Some(far) = far(name, DEADLINE) else { return };
        far.store(SOME);
        let child = fork(|| {
            far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
            read_word(far.addr(SOME.start));
        });
        assert_eq!(wait_for(child), libc::SIGBUS);
        far.check(SOME);
    });
}
