//! Forked children that have their parent's far memory. The program's allocator is the heap.
//!
//! Guards: G1, G5.

#![expect(unsafe_code, reason = "forks")]

mod limits;

use crate::common::child::{alone, cases, each_of};
use crate::common::{Dice, StopOnDrop, amount, heap, seed};
use allocator_api2::vec::Vec as FarVec;
use farheap::{Far, Heap, Scope, Tier};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::ops::Range;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// One and a half times the limit of the tests' heaps: of each process's share, a quarter of the limit, six
/// times as much. (A page costs the kernel about 0.1 ms each time that it comes and goes beside a fork.)
const WORDS: usize = (12 << 20) / 8;
/// Words that are looked at are a sector of the device apart: whatever goes wrong, it goes wrong with whole
/// sectors. To look at all words took 30 times as long.
const STEP: usize = 512 / 8;
const KINDS: [&str; 2] = ["readahead:on", "readahead:off"];

/// Forks; the child runs `body` and ends with 0 if it returns `true`.
fn fork(body: impl FnOnce() -> bool) -> i32 {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child calls `body` and ends without cleaning up. It takes no lock that another thread
    // of the parent's could hold: what it allocates is jemalloc's, which is prepared for forks.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(i32::from(!right.unwrap_or(false))) };
    }
    assert!(pid > 0, "fork: {}", io::Error::last_os_error());
    pid
}

/// The exit status of a child, or minus the signal that has ended it.
fn wait_for(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "{}", io::Error::last_os_error());
    match libc::WIFSIGNALED(status) {
        true => -libc::WTERMSIG(status),
        false => libc::WEXITSTATUS(status),
    }
}

/// What a word holds in a version of the data.
fn content(at: usize, version: u64) -> u64 {
    (at as u64) << 20 | version
}

fn data_of(words: usize, version: u64) -> FarVec<u64, Far> {
    let mut data = FarVec::with_capacity_in(words, Far);
    for at in (0..words).step_by(STEP) {
        data.extend_from_slice(&[content(at, version); STEP]);
    }
    data
}

fn data(version: u64) -> FarVec<u64, Far> {
    data_of(WORDS, version)
}

/// The words of a part that are looked at.
fn looked_at(part: Range<usize>) -> impl Iterator<Item = usize> {
    (part.start.next_multiple_of(STEP)..part.end).step_by(STEP)
}

fn write(data: &mut [u64], part: Range<usize>, version: u64) {
    looked_at(part).for_each(|at| data[at] = content(at, version));
}

fn write_all(data: &mut [u64], version: u64) {
    write(data, 0..WORDS, version);
}

fn is_version(data: &[u64], version: u64) -> bool {
    is_version_in(data, 0..WORDS, version)
}

fn is_version_in(data: &[u64], part: Range<usize>, version: u64) -> bool {
    let mut words = looked_at(part).map(|at| (at, data[at]));
    let wrong = words.find(|(at, word)| *word != content(*at, version));
    if let Some((at, word)) = wrong {
        eprintln!("word {at} is {word:#x}, of version {}, not {version}", word & 0xF_FFFF);
    }
    wrong.is_none()
}

/// A way for one process to tell another that it has got somewhere.
struct Signal(Option<PipeReader>, Option<PipeWriter>);

impl Signal {
    fn new() -> Signal {
        let (reader, writer) = io::pipe().expect("a pipe");
        Signal(Some(reader), Some(writer))
    }

    fn give(&mut self) {
        self.1.as_mut().expect("open").write_all(&[1]).expect("a reader");
    }

    fn wait(&mut self) {
        let got = self.0.as_mut().expect("open").read_exact(&mut [0]);
        got.expect("a writer");
    }
}

fn start(conf: &str) -> Option<Heap> {
    heap(&format!("far_limit:8MiB,capacity:512MiB,{conf}"))
}

#[test]
fn a_child_reads_what_was_at_the_fork_while_the_parent_rewrites_all() {
    const TEST: &str = "a_child_reads_what_was_at_the_fork_while_the_parent_rewrites_all";
    // What was written is also told from what was not without hashes.
    let kinds = [&KINDS[..], &["checksum:off"]].concat();
    cases(TEST, &kinds, |conf| {
        let Some(heap) = start(conf) else { return };
        let mut data = data(0);
        heap.region().evict_all().expect("the device has room");
        // Half is written anew, of which a part is in memory.
        write(&mut data, WORDS / 2..WORDS, 0);
        let (mut go, mut done) = (Signal::new(), Signal::new());
        let child = fork(|| {
            let rounds = [(); 2].map(|()| {
                go.wait();
                let right = is_version(&data, 0);
                done.give();
                right
            });
            rounds == [true; 2]
        });
        for round in 1..=2 {
            go.give();
            write_all(&mut data, round);
            assert!(is_version(&data, round), "the parent's, round {round}");
            done.wait();
        }
        assert_eq!(wait_for(child), 0);
        assert!(is_version(&data, 2), "the parent's");
        assert_eq!(heap.stats().poisoned, 0);
    });
}

#[test]
fn what_a_child_writes_is_its_own() {
    const TEST: &str = "what_a_child_writes_is_its_own";
    cases(TEST, &KINDS, |conf| {
        let Some(heap) = start(conf) else { return };
        let mut data = data(0);
        heap.region().evict_all().expect("the device has room");
        let seed = seed(TEST);
        let children: Vec<i32> = (1..=2)
            .map(|child| {
                fork(|| {
                    let mut dice = Dice::new(seed + child);
                    for round in 1..=2 {
                        write_all(&mut data, child * 100 + round);
                        // Some again, in no order.
                        for _ in 0..500 {
                            let at = dice.below((WORDS / STEP) as u64) as usize * STEP;
                            data[at] = content(at, child * 100 + round);
                        }
                        if !is_version(&data, child * 100 + round) {
                            return false;
                        }
                    }
                    true
                })
            })
            .collect();
        assert!(is_version(&data, 0), "the parent's while the children write");
        write_all(&mut data, 7);
        assert_eq!(children.into_iter().map(wait_for).collect::<Vec<_>>(), [0, 0]);
        assert!(is_version(&data, 7), "the parent's");
    });
}

#[test]
fn a_childs_child_has_what_the_child_had() {
    const TEST: &str = "a_childs_child_has_what_the_child_had";
    cases(TEST, &KINDS, |conf| {
        let Some(heap) = start(conf) else { return };
        let mut data = data(0);
        heap.region().evict_all().expect("the device has room");
        let child = fork(|| {
            write(&mut data, 0..WORDS / 2, 1);
            let grandchild = fork(|| {
                let is_childs = |data: &[u64]| {
                    is_version_in(data, 0..WORDS / 2, 1) && is_version_in(data, WORDS / 2..WORDS, 0)
                };
                let right = is_childs(&data);
                // And one that only reads, while this one writes.
                let last = fork(|| is_childs(&data));
                write_all(&mut data, 3);
                right && is_version(&data, 3) && wait_for(last) == 0
            });
            write_all(&mut data, 2);
            is_version(&data, 2) && wait_for(grandchild) == 0
        });
        write_all(&mut data, 9);
        assert_eq!(wait_for(child), 0);
        assert!(is_version(&data, 9), "the parent's");
    });
}

#[test]
fn children_are_forked_while_threads_fault_and_allocate() {
    const TEST: &str = "children_are_forked_while_threads_fault_and_allocate";
    // With far metadata children end in `fork`, where jemalloc resets its locks; nobody waits for anybody.
    let kinds = ["readahead:on", "readahead:off", "far_metadata:on"];
    cases(TEST, &kinds, |conf| {
        let expected = if conf.contains("far_metadata:on") { -libc::SIGSEGV } else { 0 };
        let Some(heap) = start(conf) else { return };
        let still = data(0);
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let others = StopOnDrop(&is_over);
            // Walks all arenas, under their locks.
            threads.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    heap.purge();
                    assert!(heap.usage().allocated_bytes.0 > 0);
                }
            });
            // Small blocks: what is known of them is on many pages, most of which have left.
            threads.spawn(|| {
                let mut dice = Dice::new(3);
                let mut blocks: Vec<FarVec<u64, Far>> = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let mut block = FarVec::with_capacity_in(1 + dice.below(500) as usize, Far);
                    block.push(7);
                    blocks.push(block);
                    if blocks.len() > 10_000 {
                        let at = dice.below(10_000) as usize;
                        assert_eq!(blocks.swap_remove(at)[0], 7);
                    }
                }
            });
            for thread in 0..3_u64 {
                let is_over = &is_over;
                threads.spawn(move || {
                    let mut dice = Dice::new(thread);
                    let mut blocks: Vec<Vec<u64>> = vec![Vec::new(); 64];
                    while !is_over.load(Ordering::Relaxed) {
                        let at = dice.below(64) as usize;
                        assert!(blocks[at].iter().all(|word| *word == at as u64));
                        let _far = Scope::enter(Tier::FAR);
                        blocks[at] = vec![at as u64; dice.below(40_000) as usize];
                    }
                });
            }
            let mut dice = Dice::new(seed(TEST));
            for round in 0..amount(25) {
                let from = dice.below((WORDS - 100_000) as u64) as usize;
                let child = fork(|| is_version_in(&still, from..from + 100_000, 0));
                assert_eq!(wait_for(child), expected, "round {round}");
            }
            drop(others);
        });
        assert!(is_version(&still, 0), "the parent's");
        drop(still);
        drop(heap);
    });
}

#[test]
fn a_child_forks_while_its_threads_fault() {
    const TEST: &str = "a_child_forks_while_its_threads_fault";
    cases(TEST, &["readahead:on", "readahead:off"], |conf| {
        let Some(heap) = start(conf) else { return };
        let data = data(0);
        heap.region().evict_all().expect("the device has room");
        let part = |dice: &mut Dice| {
            let from = dice.below((WORDS - 20_000) as u64) as usize;
            from..from + 20_000
        };
        let child = fork(|| {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|threads| {
                let others = StopOnDrop(&is_over);
                for thread in 0..3_u64 {
                    let (data, is_over) = (&data, &is_over);
                    threads.spawn(move || {
                        let mut dice = Dice::new(thread);
                        while !is_over.load(Ordering::Relaxed) {
                            assert!(is_version_in(data, part(&mut dice), 0));
                        }
                    });
                }
                let mut dice = Dice::new(seed(TEST));
                let mut grandchild = || wait_for(fork(|| is_version_in(&data, part(&mut dice), 0)));
                let right = (0..amount(60)).all(|_| grandchild() == 0);
                drop(others);
                right
            })
        });
        assert_eq!(wait_for(child), 0);
    });
}

#[test]
fn threads_fork_at_once_and_children_end_with_their_destructors() {
    const TEST: &str = "threads_fork_at_once_and_children_end_with_their_destructors";
    cases(TEST, &["readahead:on", "far_metadata:on"], |conf| {
        let expected = if conf.contains("far_metadata:on") { -libc::SIGSEGV } else { 0 };
        let Some(heap) = start(conf) else { return };
        let data = data(0);
        heap.region().evict_all().expect("the device has room");
        let is_over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            let others = StopOnDrop(&is_over);
            threads.spawn(|| {
                let _far = Scope::enter(Tier::FAR);
                let mut dice = Dice::new(1);
                while !is_over.load(Ordering::Relaxed) {
                    let block = vec![7_u8; 1 + dice.below(100_000) as usize];
                    assert_eq!(block[block.len() - 1], 7);
                }
            });
            let forkers: Vec<_> = (0..8_u64)
                .map(|thread| {
                    let data = &data;
                    threads.spawn(move || {
                        let mut dice = Dice::new(thread);
                        for round in 0..6 {
                            let from = dice.below((WORDS - 20_000) as u64) as usize;
                            let child = fork(|| {
                                let right = is_version_in(data, from..from + 20_000, 0);
                                // SAFETY: ends the process with all that is registered for that.
                                unsafe { libc::exit(i32::from(!right)) }
                            });
                            assert_eq!(wait_for(child), expected, "round {round} of {thread}");
                        }
                    })
                })
                .collect();
            forkers.into_iter().for_each(|forker| forker.join().expect("no panic"));
            drop(others);
        });
        assert!(is_version(&data, 0), "the parent's");
    });
}

#[test]
fn programs_are_started_with_arguments_in_far_memory() {
    alone("programs_are_started_with_arguments_in_far_memory", || {
        let Some(heap) = start("readahead:on") else { return };
        let data = data(0);
        for _ in 0..10 {
            heap.region().evict_all().expect("the device has room");
            let child = fork(|| {
                let words: Vec<_> = ["/bin/echo", "-n", ""].into_iter().map(cstring).collect();
                let mut arguments: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
                arguments.push(std::ptr::null());
                // SAFETY: strings of C, and a list that ends with null.
                unsafe { libc::execv(arguments[0], arguments.as_ptr()) };
                false
            });
            assert_eq!(wait_for(child), 0);
        }
        let out = Command::new("sh").arg("-c").arg("echo right").output().expect("a shell");
        assert_eq!(out.stdout, b"right\n");
        assert!(is_version(&data, 0));
    });
}

fn cstring(text: &str) -> std::ffi::CString {
    std::ffi::CString::new(text).expect("no zero in it")
}

/// Bytes of a process in memory, each page divided by the number of processes that map it.
fn share_of_memory(pid: i32) -> u64 {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

#[test]
fn parent_and_child_settle_within_a_quarter_more_than_the_limit() {
    const TEST: &str = "parent_and_child_settle_within_a_quarter_more_than_the_limit";
    const LIMIT: u64 = 16 << 20;
    const WORDS: usize = 32 << 17;
    // Each process has memory that is not far: pages of the test program and of its allocator that were
    // written since the fork, stacks, tables.
    const OTHER: u64 = 8 << 20;
    cases(TEST, &["readahead:on", "readahead:off"], |conf| {
        let conf = format!("far_limit:16MiB,capacity:512MiB,{conf}");
        let Some(_heap) = heap(&conf) else { return };
        let own = std::process::id() as i32;
        let before = share_of_memory(own);
        let mut data = data_of(WORDS, 0);
        let (mut began, mut go) = (Signal::new(), Signal::new());
        let child = fork(|| {
            let rounds = [(); 2].map(|()| {
                let right = is_version_in(&data, 0..WORDS, 0);
                began.give();
                // The parent writes all while the child looks on.
                go.wait();
                right
            });
            rounds == [true; 2]
        });
        for version in 1..=2 {
            began.wait();
            let mut most = 0;
            for from in (0..WORDS).step_by(1 << 17) {
                write(&mut data, from..from + (1 << 17), version);
                most = most.max(share_of_memory(own) + share_of_memory(child));
            }
            let mut both = 0;
            let settled = crate::common::eventually(|| {
                let is_alive = share_of_memory(child) > 0;
                both = (share_of_memory(own) + share_of_memory(child)).saturating_sub(before);
                is_alive && both <= LIMIT + LIMIT / 4 + OTHER
            });
            println!("{both} of {LIMIT}, while the parent wrote {most}");
            assert!(settled, "{both}");
            go.give();
        }
        assert_eq!(wait_for(child), 0);
    });
}

/// Where a child whose parent is killed says what it has found.
const OUT: &str = "FARHEAP_TEST_OUT";

/// Runs a case whose process is killed, and waits for what its child says. `false`: it was skipped.
fn is_right_when_its_parent_is_killed(test: &str, conf: &str) -> bool {
    let dir = tempfile::tempdir().expect("a directory");
    let out = dir.path().join("out");
    let ended = crate::common::child::run(test, conf, |command| {
        command.env(OUT, &out);
    });
    if ended.show_skips() {
        return false;
    }
    assert!(!ended.status.success(), "it was killed: {}", ended.text);
    let said = || std::fs::read_to_string(&out).unwrap_or_default();
    assert!(crate::common::eventually(|| said().ends_with('\n')), "{}", ended.text);
    assert_eq!(said(), "right\n", "{}", ended.text);
    true
}

#[test]
fn a_child_outlives_its_parent() {
    const TEST: &str = "a_child_outlives_its_parent";
    let Some(conf) = crate::common::child::case(TEST) else {
        each_of(&KINDS, |conf| is_right_when_its_parent_is_killed(TEST, conf));
        return;
    };
    let Some(heap) = start(&conf) else { return };
    let mut data = data(0);
    heap.region().evict_all().expect("the device has room");
    let parent = std::process::id();
    let mut ready = Signal::new();
    let _child = fork(|| {
        ready.give();
        while std::os::unix::process::parent_id() == parent {
            std::thread::yield_now();
        }
        let right = is_version(&data, 0);
        write_all(&mut data, 5);
        let right = right && is_version(&data, 5);
        let out = std::env::var(OUT).expect("set by the test");
        std::fs::write(out, if right { "right\n" } else { "wrong\n" }).is_ok()
    });
    ready.wait();
    write(&mut data, 0..WORDS / 3, 1);
    // SAFETY: takes no pointers.
    unsafe { libc::kill(parent as i32, libc::SIGKILL) };
}

#[test]
fn a_daemon_has_what_the_program_had() {
    const TEST: &str = "a_daemon_has_what_the_program_had";
    let Some(conf) = crate::common::child::case(TEST) else {
        each_of(&KINDS, |conf| {
            let dir = tempfile::tempdir().expect("a directory");
            let out = dir.path().join("out");
            let ended = crate::common::child::run(TEST, conf, |command| {
                command.env(OUT, &out);
            });
            if ended.show_skips() {
                return;
            }
            assert!(ended.status.success(), "daemon(3) ends the first process: {}", ended.text);
            let said = || std::fs::read_to_string(&out).unwrap_or_default();
            assert!(crate::common::eventually(|| said().ends_with('\n')), "{}", ended.text);
            assert_eq!(said(), "right\n");
        });
        return;
    };
    let Some(heap) = start(&conf) else { return };
    let mut data = data(0);
    heap.region().evict_all().expect("the device has room");
    write(&mut data, 0..WORDS / 3, 0);
    // SAFETY: the process goes on in a child, with this thread alone; its directory and outputs stay.
    let rc = unsafe { libc::daemon(1, 1) };
    let mut right = rc == 0 && is_version(&data, 0);
    for version in 1..=3 {
        write_all(&mut data, version);
        right &= is_version(&data, version);
    }
    // A child of its own, which has what the daemon has.
    right &= wait_for(fork(|| is_version(&data, 3))) == 0;
    right &= Command::new("true").status().is_ok_and(|status| status.success());
    let out = std::env::var(OUT).expect("set by the test");
    std::fs::write(out, if right { "right\n" } else { "wrong\n" }).expect("room");
}

/// What functions around a fork have allocated: how often each has run.
static AROUND: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];

/// Allocates, writes, reads and frees, as a function that runs around a fork.
fn allocate_around(which: usize, placement: Tier) {
    let _there = Scope::enter(placement);
    let blocks: Vec<Vec<usize>> = (0..32).map(|n| vec![n; 1 << 10]).collect();
    let is_right = |(n, block): (usize, &Vec<usize>)| block.iter().all(|word| *word == n);
    assert!(blocks.iter().enumerate().all(is_right));
    AROUND[which].fetch_add(1, Ordering::Relaxed);
}

#[test]
fn functions_that_run_around_a_fork_allocate() {
    /// Registered before the heap's own: runs while nobody serves faults.
    extern "C" fn early_before() {
        allocate_around(0, Tier::LOCAL);
    }
    extern "C" fn late_before() {
        allocate_around(1, Tier::FAR);
    }
    extern "C" fn early_after() {
        allocate_around(2, Tier::LOCAL);
    }
    extern "C" fn late_after() {
        allocate_around(3, Tier::FAR);
    }
    alone("functions_that_run_around_a_fork_allocate", || {
        // SAFETY: functions that live as long as the program and take no arguments.
        unsafe { libc::pthread_atfork(Some(early_before), Some(early_after), Some(early_after)) };
        let Some(heap) = start("readahead:on") else { return };
        // SAFETY: as above.
        unsafe { libc::pthread_atfork(Some(late_before), Some(late_after), Some(late_after)) };
        let mut data = data(0);
        for round in 1..=3 {
            heap.region().evict_all().expect("the device has room");
            let child = fork(|| {
                let counts: Vec<_> = AROUND.iter().map(|at| at.load(Ordering::Relaxed)).collect();
                // Once in each process for what runs after a fork: the child has the parent's earlier ones.
                counts == [round; 4] && is_version(&data, round as u64 - 1)
            });
            write_all(&mut data, round as u64);
            assert_eq!(wait_for(child), 0, "round {round}");
        }
        assert!(is_version(&data, 3));
    });
}

/// How many processes a test kills: `FARHEAP_TEST_KILLS`, or `usual`.
fn kills(usual: u32) -> u32 {
    let said = std::env::var("FARHEAP_TEST_KILLS").ok();
    said.map_or(usual, |text| text.parse().expect("a number"))
}

#[test]
fn children_are_right_when_their_parent_is_killed_at_any_moment() {
    const TEST: &str = "children_are_right_when_their_parent_is_killed_at_any_moment";
    let Some(conf) = crate::common::child::case(TEST) else {
        each_of(&KINDS, |conf| {
            let rounds = 0..kills(amount(5) as u32);
            rounds.into_iter().all(|_| is_right_when_its_parent_is_killed(TEST, conf))
        });
        return;
    };
    let Some(heap) = start(&conf) else { return };
    let mut dice = Dice::new(seed(TEST));
    let mut data = data(0);
    heap.region().evict_all().expect("the device has room");
    write(&mut data, WORDS / 2..WORDS, 0);
    let parent = std::process::id();
    let (mut ready, mut go) = (Signal::new(), Signal::new());
    let _child = fork(|| {
        let out = std::env::var(OUT).expect("set by the test");
        ready.give();
        go.wait();
        let mut right = true;
        let mut has_ended = false;
        // Once more after the parent's end.
        while right && !has_ended {
            has_ended = std::os::unix::process::parent_id() != parent;
            right = is_version(&data, 0);
        }
        write_all(&mut data, 5);
        let right = right && is_version(&data, 5);
        std::fs::write(out, if right { "right\n" } else { "wrong\n" }).is_ok()
    });
    ready.wait();
    let after = std::time::Duration::from_micros(dice.below(40_000));
    std::thread::spawn(move || {
        go.give();
        std::thread::sleep(after);
        // SAFETY: takes no pointers.
        unsafe { libc::kill(parent as i32, libc::SIGKILL) };
    });
    for version in 1.. {
        write_all(&mut data, version);
    }
}

#[test]
fn children_are_killed_at_any_moment() {
    const TEST: &str = "children_are_killed_at_any_moment";
    cases(TEST, &["readahead:on", "readahead:off"], |conf| {
        let Some(heap) = start(conf) else { return };
        let mut data = data(0);
        let mut dice = Dice::new(seed(TEST));
        for round in 1..=kills(amount(50) as u32) {
            let child = fork(|| {
                looked_at(0..WORDS).for_each(|at| data[at] = 1);
                false
            });
            let until =
                std::time::Instant::now() + std::time::Duration::from_micros(dice.below(20_000));
            let mut at = dice.below((WORDS / STEP / 2) as u64) as usize * STEP;
            while std::time::Instant::now() < until {
                data[at % WORDS] = content(at % WORDS, 0);
                at += 2 * STEP;
            }
            // SAFETY: takes no pointers; the child was not waited for.
            unsafe { libc::kill(child, libc::SIGKILL) };
            assert!(matches!(wait_for(child), -9 | 1), "round {round}");
        }
        assert!(is_version(&data, 0), "the parent's");
        write_all(&mut data, 1);
        assert!(is_version(&data, 1), "the parent's");
        // All that was held is free again, so that everything fits as before.
        assert!(crate::common::eventually(|| heap.region().evict_all().is_ok()));
    });
}
