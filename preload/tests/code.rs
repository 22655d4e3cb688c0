//! Code and constants of a program leave where they are worth less than far memory.

mod common;

use common::{compile, end, permitted, run};

/// 24 MiB of constants, of which the program has written some pages, beside 64 MiB of far memory.
#[test]
fn constants_leave_for_far_memory_but_not_what_was_written_of_them() {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("code");
    if !permitted() || !compile("gcc", &[], include_str!("c/code.c"), &program) {
        return;
    }
    let ended = end(run(&["--limit", "48MiB", "--stats"]).arg(&program), dir.path());
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.out, ended.errors);
    assert_eq!(ended.out.trim(), "equal", "{}", ended.errors);
    assert!(ended.errors.contains(" far "), "nothing was far: {}", ended.errors);
}
