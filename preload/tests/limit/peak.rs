//! What a process has resident at its peak, against its limit.

use crate::common::{compile, end, permitted, run};

/// The limit of the programs here.
const LIMIT_MIB: u64 = 256;

/// The peak of `c/peak.c` under the limit, in KiB: with so much far memory, and so much that it maps in small pieces.
fn peak(mode: &str, far_mib: u64, local_mib: u64) -> Option<u64> {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("peak");
    if !permitted() || !compile("gcc", &[], include_str!("../c/peak.c"), &program) {
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

/// The limit and 5 %, in KiB. A machine at rest keeps within 1 % (`book/src/measurements/programs.md`); where many threads wait for a
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

/// Memory that is never malloc's, of a program that says when it was told: in `mode`, with these options.
fn over(mode: &str, options: &[&str]) -> Option<crate::common::Ended> {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("over");
    if !permitted() || !compile("gcc", &[], include_str!("../c/over.c"), &program) {
        return None;
    }
    let options = [&["--limit", "32MiB"], options].concat();
    let ended = end(run(&options).arg(&program).arg(mode), dir.path());
    (ended.status.code() == Some(0)).then_some(ended).or_else(|| panic!("{mode}: it was not told"))
}

#[test]
fn a_limit_that_is_exceeded_is_said_when_it_happens_and_at_the_end() {
    for mode in ["variables", "fixed", "unreserved"] {
        let Some(ended) = over(mode, &[]) else { return };
        let said = |what| ended.errors.matches(what).count();
        assert_eq!(
            said("the process is above its limit of 32.0 MiB"),
            1,
            "{mode}: {}",
            ended.errors
        );
        assert_eq!(said("of at most 32.0 MiB, above its limit"), 1, "{mode}: {}", ended.errors);
    }
}

#[test]
fn statistics_tell_peak_and_limit_whatever_is_far() {
    let Some(ended) = over("variables", &["--stats"]) else { return };
    assert_eq!(
        ended.errors.matches("of at most 32.0 MiB, above its limit").count(),
        1,
        "{}",
        ended.errors
    );
    let dir = tempfile::tempdir().expect("a directory");
    let little = end(run(&["--limit", "32MiB", "--stats"]).arg("true"), dir.path()).errors;
    assert!(little.contains("nothing far") && little.contains("; process: peak "), "{little}");
    assert!(little.trim_end().ends_with(" of at most 32.0 MiB"), "{little}");
    let within = end(run(&["--limit", "32MiB"]).arg("true"), dir.path()).errors;
    assert_eq!(within, "");
}
