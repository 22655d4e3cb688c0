//! Children of a process, or children themselves, that may not open a descriptor, start a thread, or look at themselves.

#![expect(unsafe_code, reason = "changes limits and rights of processes")]

use super::{Signal, WORDS, data, data_of, fork, is_version, is_version_in, start, wait_for};
use crate::common;
use crate::common::child::cases;
use farheap::Heap;
use std::io;

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
        let Some(heap) = start("page:16KiB") else { return };
        let data = data(0);
        heap.evict_all().expect("the device has room");
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
        for round in 0..20 {
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

/// A user whose processes nobody else has any of.
fn lone_user() -> u32 {
    1_000_000 + std::process::id()
}

/// Runs a case as a user without privileges and without other processes. `None`: it was skipped.
fn run_as_lone_user(test: &str, case: &str) -> Option<common::child::Ended> {
    use std::os::unix::process::CommandExt;
    if !common::is_root() {
        println!("skipped: only root can become another user");
        return None;
    }
    let ended = common::child::run(test, case, |command| {
        command.uid(lone_user()).gid(lone_user());
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
        match Heap::start(farheap::Config::parse("far_limit:8MiB,capacity:64MiB").expect("valid")) {
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
    let Some(heap) = start("page:16KiB") else { return };
    let data = data(0);
    heap.evict_all().expect("the device has room");
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
    let Some(heap) = start("page:16KiB") else { return };
    let data = data(0);
    heap.evict_all().expect("the device has room");
    hide();
    assert_eq!(wait_for(fork(|| is_version(&data, 0))), -libc::SIGSEGV);
    assert_eq!(wait_for(fork(|| true)), 0, "one that touches nothing");
    assert!(is_version(&data, 0), "the parent's");
}
