//! Children of a process, or children themselves, that may not open a descriptor, start a thread, or look at themselves.

#![expect(unsafe_code, reason = "changes limits and rights of processes")]

use super::{Signal, WORDS, data, data_of, fork, is_version, is_version_in, start, wait_for};
use crate::common::child::{alone, cases};
use crate::common::{self, StopOnDrop};
use farheap::Heap;
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

/// The limits of a resource: the soft one and the hard one.
fn limit_of(resource: libc::__rlimit_resource_t) -> (u64, u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    assert_eq!(unsafe { libc::getrlimit(resource, &raw mut limit) }, 0);
    (limit.rlim_cur, limit.rlim_max)
}

fn set_limit(resource: libc::__rlimit_resource_t, (soft, hard): (u64, u64)) {
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: hard };
    // SAFETY: reads the limit.
    let rc = unsafe { libc::setrlimit(resource, &raw const limit) };
    assert_eq!(rc, 0, "{}", io::Error::last_os_error());
}

#[test]
fn children_have_far_memory_where_no_descriptor_is_left() {
    const TEST: &str = "limits::children_have_far_memory_where_no_descriptor_is_left";
    cases(TEST, &["soft limit", "hard limit", "lowered", "lowered for good"], |case| {
        let files = libc::RLIMIT_NOFILE;
        // Below 1,024, so that the descriptors of the heap and those of the program share the numbers there are.
        set_limit(files, (700, limit_of(files).1.max(700)));
        let Some(heap) = start("readahead:on") else { return };
        let data = data(0);
        heap.region().evict_all().expect("the device has room");
        let hard = limit_of(files).1;
        match case {
            "soft limit" => {}
            "hard limit" => set_limit(files, (700, 700)),
            "lowered" => set_limit(files, (0, hard)),
            _ => set_limit(files, (0, 0)),
        }
        let expected = if case == "lowered for good" { -libc::SIGSEGV } else { 0 };
        let mut taken = Vec::new();
        let mut take_all = || {
            while let Ok(file) = std::fs::File::open("/dev/null") {
                taken.push(file);
            }
        };
        for round in 0..common::amount(20) {
            take_all();
            let child = fork(|| is_version_in(&data, 0..WORDS / 8, 0));
            take_all();
            assert_eq!(wait_for(child), expected, "round {round}");
        }
        let mut go: Vec<Signal> = Vec::new();
        if case == "hard limit" {
            taken.truncate(taken.len() - 8);
            go.extend((0..4).map(|_| Signal::new()));
        }
        // Several at once, each of which has a child of its own.
        let children: Vec<i32> = go
            .iter_mut()
            .map(|go| {
                fork(|| {
                    go.wait();
                    wait_for(fork(|| is_version_in(&data, 0..WORDS / 8, 0))) == 0
                })
            })
            .collect();
        go.iter_mut().for_each(Signal::give);
        children.into_iter().for_each(|child| assert_eq!(wait_for(child), 0));
        assert_eq!(wait_for(fork(|| true)), 0, "one that touches nothing");
        assert!(is_version(&data, 0), "the parent's");
    });
}

#[test]
fn a_thread_that_takes_every_number_costs_no_child_its_far_memory() {
    const TEST: &str = "limits::a_thread_that_takes_every_number_costs_no_child_its_far_memory";
    /// What it keeps, of the numbers that are held for children.
    const KEPT_MAX: usize = 3;
    alone(TEST, || {
        let files = libc::RLIMIT_NOFILE;
        set_limit(files, (700, 700));
        let Some(heap) = start("readahead:on") else { return };
        let data = data(0);
        heap.region().evict_all().expect("the device has room");
        let open = || File::open("/dev/null");
        let taken: Vec<File> = std::iter::from_fn(|| open().ok()).collect();
        let (is_over, kept) = (AtomicBool::new(false), AtomicUsize::new(0));
        std::thread::scope(|threads| {
            let _over = StopOnDrop(&is_over);
            threads.spawn(|| {
                let mut own = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    let room = own.len() < KEPT_MAX;
                    own.extend(room.then(open).and_then(Result::ok));
                    kept.store(own.len(), Ordering::Relaxed);
                }
            });
            for round in 0..200 {
                let child = fork(|| is_version_in(&data, 0..WORDS / 64, 0));
                assert_eq!(wait_for(child), 0, "round {round}");
                if kept.load(Ordering::Relaxed) == KEPT_MAX {
                    break;
                }
            }
        });
        println!("{} numbers were taken", kept.into_inner());
        drop(taken);
        // Numbers are held anew where there are any.
        assert_eq!(wait_for(fork(|| true)), 0);
        let mut go = [(); 6].map(|()| Signal::new());
        let _taken: Vec<File> = std::iter::from_fn(|| open().ok()).collect();
        let children = go.each_mut().map(|go| {
            fork(|| {
                go.wait();
                is_version_in(&data, 0..WORDS / 64, 0)
            })
        });
        go.iter_mut().for_each(Signal::give);
        children.into_iter().for_each(|child| assert_eq!(wait_for(child), 0));
    });
}

/// Closes all descriptors but the first three, past all that could leave one open.
#[expect(clippy::disallowed_methods, reason = "a program closes what it does not know")]
fn close_all() {
    // SAFETY: takes no pointers. What the heap has open is closed on purpose.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    assert_eq!(rc, 0, "{}", io::Error::last_os_error());
}

#[test]
fn after_all_descriptors_were_closed_a_child_reads_right_bytes_or_is_told() {
    const TEST: &str =
        "limits::after_all_descriptors_were_closed_a_child_reads_right_bytes_or_is_told";
    if let Some(case) = common::child::case(TEST) {
        let Some(heap) = start("readahead:on") else { return };
        let data = data(0);
        heap.region().evict_all().expect("the device has room");
        if case == "parent" {
            close_all();
        }
        let child = fork(|| {
            if case == "child" {
                close_all();
            }
            is_version_in(&data, 0..WORDS / 8, 0)
        });
        std::process::exit(match wait_for(child) {
            0 => 0,
            1 => 1,
            _ => 2,
        });
    }
    for case in ["parent", "child"] {
        let ended = common::child::run(TEST, case, |_| ());
        let has_ended = |code| ended.status.code() == Some(code);
        let is_told = ended.text.contains("farheap: ") && !has_ended(1);
        assert!(has_ended(0) || is_told, "{case}: {ended:?}");
        assert!(!ended.text.contains("of version"), "{case}: {ended:?}");
        ended.show_skips();
    }
}

/// A user whose processes nobody else has any of.
fn lone_user() -> u32 {
    static USERS: AtomicU32 = AtomicU32::new(0);
    const MOST: u32 = 16;
    1_000_000 + std::process::id() * MOST + USERS.fetch_add(1, Ordering::Relaxed) % MOST
}

/// Runs a case as a user without privileges and without other processes. `None`: it was skipped.
fn run_as_lone_user(test: &str, case: &str) -> Option<common::child::Ended> {
    use std::os::unix::process::CommandExt;
    if !common::is_root() {
        println!("skipped: only root can become another user");
        return None;
    }
    let user = lone_user();
    let ended = common::child::run(test, case, |command| {
        command.uid(user).gid(user);
    });
    ended.expect_success();
    (!ended.show_skips()).then_some(ended)
}

/// Threads of this process by their names.
fn threads_named(prefix: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("mounted").flatten();
    let names = tasks.map(|task| std::fs::read_to_string(task.path().join("comm")));
    names.flatten().filter(|name| name.starts_with(prefix)).count()
}

/// How many threads there may be beyond those that there are.
fn allow_threads(more: u64) {
    let tasks = std::fs::read_dir("/proc/self/task").expect("mounted").count() as u64;
    set_limit(libc::RLIMIT_NPROC, (tasks + more, limit_of(libc::RLIMIT_NPROC).1));
}

#[test]
fn a_heap_starts_whole_or_not_at_all_where_threads_are_limited() {
    const TEST: &str = "limits::a_heap_starts_whole_or_not_at_all_where_threads_are_limited";
    if common::child::case(TEST).is_none() {
        run_as_lone_user(TEST, "");
        return;
    }
    let mut refused = 0;
    // Other tests may have threads of this user: the limit rises until one heap starts.
    let mut has_started = false;
    for more in 0..64 {
        if has_started {
            break;
        }
        allow_threads(more);
        match Heap::builder().parse("far_limit:8MiB,capacity:64MiB").expect("valid").start() {
            Ok(heap) => {
                assert!(is_version_in(&data_of(10_000, 1), 0..10_000, 1));
                heap.shutdown().expect("nothing is in use");
                has_started = true;
            }
            Err(farheap::Error::UffdUnavailable { reasons }) => {
                println!("skipped: userfaultfd is not permitted here: {reasons}");
                return;
            }
            Err(error) => {
                assert!(error.to_string().contains("thread"), "{error}");
                assert!(Heap::running().is_none(), "half a heap runs");
                refused += 1;
            }
        }
        let ended = common::eventually(|| threads_named("farheap") == 0);
        assert!(ended, "{} threads of the heap are left", threads_named("farheap"));
    }
    assert!(has_started && refused > 0, "{refused} starts were refused");
}

#[test]
fn a_child_that_may_not_start_a_thread_is_told() {
    const TEST: &str = "limits::a_child_that_may_not_start_a_thread_is_told";
    if common::child::case(TEST).is_none() {
        let Some(ended) = run_as_lone_user(TEST, "") else { return };
        assert!(ended.text.contains("a forked child cannot use far memory"), "{}", ended.text);
        assert!(ended.text.contains("pthread_create"), "{}", ended.text);
        return;
    }
    let Some(heap) = start("readahead:on") else { return };
    let data = data(0);
    heap.region().evict_all().expect("the device has room");
    // The child, and no thread of its own.
    allow_threads(1);
    assert_eq!(wait_for(fork(|| is_version(&data, 0))), -libc::SIGSEGV);
    assert_eq!(wait_for(fork(|| true)), 0, "one that touches nothing");
    allow_threads(2);
    assert_eq!(wait_for(fork(|| is_version(&data, 0))), 0);
    assert!(is_version(&data, 0), "the parent's");
}

#[test]
fn a_process_that_is_not_dumpable_is_told_that_its_children_inherit_nothing() {
    const TEST: &str =
        "limits::a_process_that_is_not_dumpable_is_told_that_its_children_inherit_nothing";
    let Some(case) = common::child::case(TEST) else {
        for case in ["before", "after"] {
            let Some(ended) = run_as_lone_user(TEST, case) else { return };
            assert!(ended.text.contains("PR_SET_DUMPABLE"), "{case}: {}", ended.text);
        }
        return;
    };
    let hide = || {
        // SAFETY: takes no pointers.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
    };
    if case == "before" {
        hide();
    }
    let Some(heap) = start("readahead:on") else { return };
    let data = data(0);
    heap.region().evict_all().expect("the device has room");
    hide();
    assert_eq!(wait_for(fork(|| is_version(&data, 0))), -libc::SIGSEGV);
    assert_eq!(wait_for(fork(|| true)), 0, "one that touches nothing");
    assert!(is_version(&data, 0), "the parent's");
}
