//! Code and constants of a program leave where they are worth less than far memory.

mod common;

use common::{compile, end, permitted, run};

/// 24 MiB of constants, of which the program has written some pages, beside 64 MiB of far memory.
#[test]
fn constants_leave_for_far_memory_but_not_what_was_written_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("code");
    if !leaves() || !compile("gcc", &[], include_str!("c/code.c"), &program) {
        return;
    }
    let ended = end(run(&["--limit", "48MiB", "--stats"]).arg(&program), dir.path());
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.out, ended.errors);
    assert_eq!(ended.out.trim(), "equal", "{}", ended.errors);
    assert!(ended.errors.contains(" far "), "nothing was far: {}", ended.errors);
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
