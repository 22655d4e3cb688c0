//! What a process has resident at its peak, against its limit.

mod common;

use common::{compile, end, permitted, run};

/// The limit of the programs here.
const LIMIT_MIB: u64 = 256;

/// The peak of `c/peak.c` under the limit, in KiB: with so much far memory, and so much that it maps in small pieces.
fn peak(mode: &str, far_mib: u64, local_mib: u64) -> Option<u64> {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("peak");
    if !permitted() || !compile("gcc", &[], include_str!("c/peak.c"), &program) {
        return None;
    }
    let mut command = run(&["--limit", &format!("{LIMIT_MIB}MiB"), "--stats"]);
    command.arg(&program).args([mode, &far_mib.to_string(), &local_mib.to_string()]);
    let ended = end(&mut command, dir.path());
    assert_eq!(ended.status.code(), Some(0), "{}{}", ended.out, ended.errors);
    assert!(ended.errors.contains(" far "), "nothing was far: {}", ended.errors);
    println!("{mode}: {}", ended.errors.trim());
    Some(ended.out.trim().parse().expect("a number"))
}

/// The limit and 5 %, in KiB. A machine at rest keeps within 1 % (`docs/hosts.md`); where many threads wait for a
/// processor, so does the one that looks. Without waiting for room, small pieces come to 20 % above.
fn allowed() -> u64 {
    LIMIT_MIB * 1024 * 105 / 100
}

/// Chunks of 2 MiB are charged before the program has touched them, and filled between two looks.
#[test]
fn fresh_far_memory_keeps_the_process_within_its_limit() {
    let Some(peak) = peak("far", 600, 0) else { return };
    assert!(peak <= allowed(), "{peak} KiB of {} KiB", allowed());
}

/// As fast as the kernel gives it: what is mapped waits for far memory to leave.
#[test]
fn memory_mapped_in_small_pieces_keeps_the_process_within_its_limit() {
    let Some(peak) = peak("local", 400, 128) else { return };
    assert!(peak <= allowed(), "{peak} KiB of {} KiB", allowed());
}
