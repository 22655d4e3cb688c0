//! What a program does to its own memory by system calls: locks it, protects it, drops, moves and
//! unmaps parts of it. Nothing hangs, nothing is lost, and no line is repeated for ever.
#![expect(unsafe_code, reason = "hands far memory to system calls")]
#![expect(clippy::disallowed_methods, reason = "does what a program does to its own memory")]

use crate::common::bytes;
use crate::common::child::Ended;
use crate::harness::{Far, PAGE, WAYS, config, in_child, read_word, stamp, wait_until};
use farheap::ByteCount;
use farheap::region::{Advice, FaultMode, Install, RegionConfig};
use nix::sys::resource::{Resource, getrlimit};
use std::ops::Range;
use std::os::unix::fs::FileExt;

/// Lines on standard error that a case may cost.
const LINES_MAX: usize = 30;

/// The ways pages come and go, chunks included.
fn configs() -> Vec<RegionConfig> {
    let mut configs: Vec<RegionConfig> = WAYS.iter().map(|&install| config(install)).collect();
    let chunks = config(Install::Auto);
    configs.push(chunks.limit(ByteCount::mib(32)).readahead(true));
    // Little address space, for `mlockall` touches what describes it.
    configs.iter_mut().for_each(|config| config.span = ByteCount(config.limit.0 * 3));
    configs
}

/// Calls `body` for each way with a region of somewhat more than its limit, filled.
fn for_each_way(body: impl Fn(&Far)) {
    for config in configs() {
        let pages = (config.limit.0 * 5 / 4 / 4096) as usize;
        let Some(far) = Far::new(config.clone(), pages, 1) else { return };
        println!("{:?}", config.install);
        far.fill(0..pages);
        body(&far);
        let stats = far.stats();
        assert_eq!((stats.poisoned, stats.panics), (0, 0), "{:?}", config.install);
        assert!(stats.resident_bytes_max.0 <= config.limit.0, "{stats:?}");
    }
}

/// Everything goes out and comes back, as it was, and can be written over.
fn expect_all_there(far: &Far) {
    far.evict(0..far.pages);
    far.check(0..far.pages);
    far.fill(0..far.pages);
    far.check(0..far.pages);
}

fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

fn protect(addr: usize, len: usize, access: libc::c_int) {
    // SAFETY: the case owns the memory, and touches it as it may.
    let rc = unsafe { libc::mprotect(addr as *mut _, len, access) };
    assert_eq!(rc, 0, "{}", last_error());
}

/// The child ended as it should, without a flood.
fn expect_few_lines(ended: Option<Ended>) -> Option<Ended> {
    let ended = ended?;
    let lines = ended.text.lines().filter(|line| line.contains("farheap:")).count();
    assert!(lines <= LINES_MAX, "{lines} lines:\n{}", ended.text);
    Some(ended)
}

fn locks(test: &'static str, lock: impl Fn(&Far) -> libc::c_int) {
    let ended = in_child(test, || {
        for_each_way(|far| {
            if lock(far) != 0 {
                println!("skipped: memory may not be locked: {}", last_error());
                std::process::exit(0);
            }
            expect_all_there(far);
        });
    });
    let Some(ended) = expect_few_lines(ended) else { return };
    ended.expect_success();
    ended.expect_said(&["mlock", "pin"]);
}

#[test]
fn locked_far_memory_leaves_all_the_same() {
    locks("program::locked_far_memory_leaves_all_the_same", |far| {
        let (start, len) = (far.addr(1), 9 * PAGE);
        // SAFETY: the case's own memory.
        unsafe { libc::mlock(start as *const _, len) }
    });
}

#[test]
fn far_memory_that_is_locked_by_its_faults_leaves_all_the_same() {
    locks("program::far_memory_that_is_locked_by_its_faults_leaves_all_the_same", |far| {
        let (start, len) = (far.addr(0), far.pages * PAGE);
        // SAFETY: the case's own memory.
        unsafe { libc::mlock2(start as *const _, len, libc::MLOCK_ONFAULT) }
    });
}

#[test]
fn far_memory_of_a_process_that_locks_all_of_it_leaves_all_the_same() {
    locks("program::far_memory_of_a_process_that_locks_all_of_it_leaves_all_the_same", |_| {
        // SAFETY: locks memory, changes nothing.
        unsafe { libc::mlockall(libc::MCL_CURRENT) }
    });
}

#[test]
fn locking_all_memory_fills_no_far_memory_that_nobody_has() {
    let ended = in_child("program::locking_all_memory_fills_no_far_memory_that_nobody_has", || {
        let config = config(Install::Auto).span(ByteCount(64 << 30));
        let pages = (config.limit.0 * 5 / 4 / 4096) as usize;
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.fill(0..pages);
        // SAFETY: locks memory, changes nothing.
        if unsafe { libc::mlockall(libc::MCL_CURRENT) } != 0 {
            println!("skipped: memory may not be locked");
            std::process::exit(0);
        }
        // SAFETY: ends the locks.
        unsafe { libc::munlockall() };
        let stats = far.stats();
        assert!(stats.faults_zero < 10 * pages as u64, "{} zero pages", stats.faults_zero);
        assert!(stats.metadata_bytes < ByteCount::mib(1), "{}", stats.metadata_bytes);
        far.check(0..pages);
        far.fill(0..pages);
        expect_all_there(&far);
        assert_eq!(far.stats().poisoned, 0);
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn a_process_that_locks_what_it_maps_later_has_far_memory_filled_by_faults_only() {
    let test =
        "program::a_process_that_locks_what_it_maps_later_has_far_memory_filled_by_faults_only";
    let ended = in_child(test, || {
        // Of a process that locks what it maps, the kernel refuses mappings beyond this limit.
        let (lockable, _) = getrlimit(Resource::RLIMIT_MEMLOCK).expect("a limit");
        // SAFETY: locks memory, changes nothing.
        if lockable < 1 << 30 || unsafe { libc::mlockall(libc::MCL_FUTURE) } != 0 {
            println!("skipped: memory may not be locked: at most {lockable} bytes");
            std::process::exit(0);
        }
        let config = config(Install::Auto).span(ByteCount::mib(256));
        let Some(far) = Far::new(config, 64, 1) else { return };
        // Of the page map's words bit 63 says that there is memory.
        let mut words = vec![0_u8; (256 << 20) / PAGE * 8];
        let file = std::fs::File::open("/proc/self/pagemap").expect("/proc is mounted");
        let at = far.addr(0) as u64 / PAGE as u64 * 8;
        file.read_at(&mut words, at).expect("the page map");
        let there = words.chunks(8).filter(|word| word[7] & 0x80 != 0).count();
        assert!(there * PAGE <= 8 << 20, "{there} pages are there");
        far.fill(0..64);
        expect_all_there(&far);
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn protected_far_memory_comes_and_goes() {
    let test = "program::protected_far_memory_comes_and_goes";
    let ended = in_child(test, || {
        for_each_way(|far| {
            let step = (far.pages / 6).max(3);
            let parts = || (1..far.pages - 2).step_by(step).enumerate();
            // One page, or two.
            let len = |n: usize| PAGE * (1 + n % 2);
            for (n, page) in parts() {
                protect(far.addr(page), len(n), libc::PROT_READ);
            }
            for _ in 0..2 {
                far.evict(0..far.pages);
                far.check(0..far.pages);
            }
            for (n, page) in parts() {
                protect(far.addr(page), len(n), libc::PROT_READ | libc::PROT_WRITE);
            }
            expect_all_there(far);
        });
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

#[test]
fn what_was_read_and_may_not_be_written_leaves_again() {
    let test = "program::what_was_read_and_may_not_be_written_leaves_again";
    let ended = in_child(test, || {
        let config = config(Install::Auto);
        let pages = (config.limit.0 * 3 / 4096) as usize;
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.fill(0..pages);
        far.evict(0..pages);
        protect(far.addr(0), pages * PAGE, libc::PROT_READ);
        for _ in 0..2 {
            far.check(0..pages);
        }
        protect(far.addr(0), pages * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        expect_all_there(&far);
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

#[test]
fn what_was_written_and_may_not_be_written_stays_and_leaves_when_it_may() {
    let test = "program::what_was_written_and_may_not_be_written_stays_and_leaves_when_it_may";
    let ended = in_child(test, || {
        let config = config(Install::Auto);
        let limit = (config.limit.0 / 4096) as usize;
        let (sealed, pages) = (limit * 3 / 4, limit * 2);
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.fill(0..sealed);
        far.check(0..sealed);
        protect(far.addr(0), sealed * PAGE, libc::PROT_READ);
        let reads = far.stats().faults_read;
        // What is written beside it has the rest of the limit.
        for _ in 0..4 {
            far.fill(sealed..pages);
            far.check(sealed..pages);
        }
        let before = far.stats();
        far.check(0..sealed);
        let after = far.stats();
        assert!(before.faults_read > reads, "the rest did not leave");
        // A read is counted after its thread was woken: the last one before may not be in `before`.
        assert!(after.faults_read <= before.faults_read + 1, "what is sealed had left");
        assert!(after.evict_busy > 0, "what stays is counted");
        protect(far.addr(0), sealed * PAGE, libc::PROT_READ | libc::PROT_WRITE);
        expect_all_there(&far);
        assert!(far.stats().faults_read >= after.faults_read + sealed as u64, "it stayed");
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

#[test]
fn what_the_program_may_not_read_keeps_its_content() {
    let test = "program::what_the_program_may_not_read_keeps_its_content";
    let ended = in_child(test, || {
        for_each_way(|far| {
            let guard = far.pages / 2;
            protect(far.addr(guard), PAGE, libc::PROT_NONE);
            for _ in 0..2 {
                far.evict(0..far.pages);
                far.check(0..guard);
                far.check(guard + 1..far.pages);
            }
            protect(far.addr(guard), PAGE, libc::PROT_READ | libc::PROT_WRITE);
            expect_all_there(far);
        });
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

/// Drops pages and sees zeros there.
fn drop_and_look(far: &Far, pages: Range<usize>) {
    let (first, len) = (far.ptr(pages.start), far.len(pages.len()));
    // A page that leaves before it is dropped would come back as it was, and so would one that is as the
    // device has it and leaves before it is touched again.
    let pinned = far.region.pin(bytes(first, len)).expect("a few pages");
    // SAFETY: the case gives the content up.
    let rc = unsafe { libc::madvise(first as *mut _, len.as_usize(), libc::MADV_DONTNEED) };
    assert_eq!(rc, 0, "{}", last_error());
    pages.clone().for_each(|page| assert_eq!(read_word(far.addr(page)), 0, "page {page}"));
    drop(pinned);
    // What is written there now is kept.
    far.fill(pages.clone());
    far.check(pages.clone());
    far.evict(pages.clone());
    far.check(pages);
}

fn drops(far: &Far) {
    // In memory when they are dropped: as they were filled, as they were read, and written since.
    let resident = |first: usize| {
        let pinned = far.region.pin(bytes(far.ptr(first), far.len(4))).expect("four pages");
        far.check(first..first + 4);
        drop(pinned);
    };
    for first in [far.pages - 8, 4, far.pages / 2] {
        resident(first);
        drop_and_look(far, first..first + 4);
        resident(first);
        drop_and_look(far, first + 1..first + 2);
        far.fill(first..first + 4);
        drop_and_look(far, first..first + 2);
    }
}

#[test]
fn far_memory_that_the_program_drops_reads_as_zero() {
    let test = "program::far_memory_that_the_program_drops_reads_as_zero";
    let ended = in_child(test, || {
        for_each_way(|far| {
            drops(far);
            expect_all_there(far);
            far.discard(0..far.pages);
            // What was read ahead is given back when the device has answered. Frames for copies stay, an eighth of
            // this limit at most while fresh memory streams in, and tables.
            wait_until("discarded memory is charged no longer", || {
                let stats = far.stats();
                stats.resident_bytes.0 <= stats.limit_bytes.0 / 4
            });
        });
        {
            let config = config(Install::Auto).mode(FaultMode::InThread);
            let pages = (config.limit.0 * 2 / 4096) as usize;
            let Some(far) = Far::new(config, pages, 1) else { return };
            far.fill(0..pages);
            drops(&far);
            expect_all_there(&far);
        }
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

#[test]
fn what_the_program_drops_may_leave_before_it_is_touched() {
    let test = "program::what_the_program_drops_may_leave_before_it_is_touched";
    let ended = in_child(test, || {
        for_each_way(|far| {
            let pages = 4..8;
            // What is on its way out when it is dropped comes back as it was.
            let pinned = far.region.pin(bytes(far.ptr(4), far.len(4))).expect("four pages");
            far.fill(pages.clone());
            for page in pages.clone().step_by(2) {
                // SAFETY: the case gives the content up.
                let rc =
                    unsafe { libc::madvise(far.addr(page) as *mut _, PAGE, libc::MADV_DONTNEED) };
                assert_eq!(rc, 0, "{}", last_error());
            }
            drop(pinned);
            for _ in 0..2 {
                far.evict(0..far.pages);
                for page in pages.clone() {
                    let want = if page.is_multiple_of(2) { 0 } else { stamp(page) };
                    assert_eq!(read_word(far.addr(page)), want, "page {page}");
                }
            }
            expect_all_there_but(far, pages);
        });
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_success();
    }
}

fn expect_all_there_but(far: &Far, pages: Range<usize>) {
    far.fill(pages);
    expect_all_there(far);
}

#[test]
fn far_memory_that_the_program_unmaps_is_gone_and_the_rest_is_not() {
    let test = "program::far_memory_that_the_program_unmaps_is_gone_and_the_rest_is_not";
    let ended = in_child(test, || {
        for_each_way(|far| {
            let holes = [2, far.pages / 2, far.pages - 3];
            far.check(0..3);
            for page in holes {
                // SAFETY: the case does not touch it again.
                let rc = unsafe { libc::munmap(far.addr(page) as *mut _, PAGE) };
                assert_eq!(rc, 0, "{}", last_error());
            }
            let is_there = |page: &usize| !holes.contains(page);
            for _ in 0..2 {
                far.evict(0..far.pages);
                (0..far.pages).filter(is_there).for_each(|page| far.check(page..page + 1));
                (0..far.pages).filter(is_there).for_each(|page| far.fill(page..page + 1));
            }
            far.region
                .advise(&[bytes(far.ptr(0), far.len(far.pages))], Advice::WillNeed)
                .expect("a range of it");
            far.discard(0..far.pages);
        });
        let Some(far) = Far::new(config(Install::Auto), 256, 1) else { return };
        far.store(0..256);
        // SAFETY: what comes of touching it is the case.
        unsafe { libc::munmap(far.addr(7) as *mut _, PAGE) };
        read_word(far.addr(7));
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_signal(&[libc::SIGSEGV]);
    }
}

#[test]
fn a_process_that_moves_far_memory_ends_with_the_cause() {
    let test = "program::a_process_that_moves_far_memory_ends_with_the_cause";
    let ended = in_child(test, || {
        let Some(far) = Far::new(config(Install::Auto), 256, 1) else { return };
        far.store(0..256);
        let len = 8 * PAGE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a mapping of its own, at an address of the kernel's choice.
        let room = unsafe { libc::mmap(std::ptr::null_mut(), len, access, flags, -1, 0) };
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: the case.
        unsafe { libc::mremap(far.addr(8) as *mut _, len, len, flags, room) };
        read_word(room as usize);
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_signal(&[libc::SIGABRT]);
        ended.expect_said(&["mremap"]);
    }
}

/// Forbids `ioctl(2)` for all threads of the process, with EPERM.
fn forbid_ioctl() {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = [
        // The number of the system call; one that is `ioctl` is refused.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        libc::sock_filter {
            code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
            jt: 0,
            jf: 1,
            k: libc::SYS_ioctl as u32,
        },
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes privileges away, and nothing else.
    let rc = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(rc, 0, "{}", last_error());
    // SAFETY: the filter is valid during the call.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const filter,
        )
    };
    assert_eq!(rc, 0, "{}", last_error());
}

#[test]
fn a_process_that_forbids_what_faults_need_ends_with_the_cause() {
    let test = "program::a_process_that_forbids_what_faults_need_ends_with_the_cause";
    let ended = in_child(test, || {
        let config = config(Install::Auto);
        let pages = (config.limit.0 / 4096 / 4) as usize;
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.store(0..pages);
        forbid_ioctl();
        far.check(0..pages);
    });
    if let Some(ended) = expect_few_lines(ended) {
        ended.expect_signal(&[libc::SIGABRT, libc::SIGBUS]);
        ended.expect_said(&["errno 1"]);
    }
}
