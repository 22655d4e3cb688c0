//! Code and constants of a program leave where they are worth less than far memory.

use crate::common::{compile, end, permitted, run};

/// 24 MiB of constants, of which the program has written some pages, beside 64 MiB of far memory.
#[test]
fn constants_leave_for_far_memory_but_not_what_was_written_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("code");
    if !leaves() || !compile("gcc", &[], include_str!("../c/code.c"), &program) {
        return;
    }
    let ended = end(run(&["--limit", "48MiB", "--stats"]).arg(&program), dir.path());
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.out, ended.errors);
    assert_eq!(ended.out.trim(), "equal", "{}", ended.errors);
    assert!(ended.errors.contains(" far "), "nothing was far: {}", ended.errors);
}

/// A child that the C library calls no function for has none of the threads that its parent's calls wait for.
#[test]
fn a_child_of_a_system_call_unmaps_memory_while_code_leaves() {
    change("fork");
}

/// The thread that drops code cannot end what a thread of a higher priority waits for, unless that one sleeps.
#[test]
fn a_real_time_thread_that_unmaps_memory_lets_code_leave() {
    change("real-time");
}

/// Forks 16 times, or unmaps for 6 s; half of it without `FARHEAP_TEST_LONG`.
fn change(how: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("changing");
    if !leaves() || !compile("gcc", &[], include_str!("../c/changing.c"), &program) {
        return;
    }
    let ended = end(run(&["--limit", "112MiB"]).arg(&program).arg(how), dir.path());
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.out, ended.errors);
    println!("{how}: {} {}", ended.out.trim(), ended.errors.trim());
}

/// Whether code leaves here; says why not.
fn leaves() -> bool {
    /// The first Linux with `PROCMAP_QUERY`.
    const FIRST: [u32; 2] = [6, 11];
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("its name");
    let numbers: Vec<u32> = release.split(['.', '-']).map_while(|part| part.parse().ok()).collect();
    let is_known = numbers.iter().take(2).ge(&FIRST);
    if !is_known {
        println!("skipped: all code stays before Linux 6.11, this is {}", release.trim());
    }
    is_known && permitted()
}
