//! Processes that share a control group without a limit of their own.
//!
//! Guards: G1.
#![expect(unsafe_code, reason = "forks")]

use crate::common::child::{case, run};
use crate::common::group::Group;
use crate::common::{eventually, heap};
use allocator_api2::vec::Vec as FarVec;
use farheap::{ByteCount, Far, Heap};
use std::path::Path;

/// A heap that may have what the group has, and `mib` of far numbers.
fn start(mib: u64) -> Option<(Heap, FarVec<u64, Far>)> {
    Group::join();
    let heap = heap("capacity:512MiB")?;
    let mut numbers = FarVec::new_in(Far);
    numbers.extend(0..mib << 17);
    Some((heap, numbers))
}

fn expect_all(numbers: &[u64]) {
    assert!(numbers.iter().enumerate().all(|(at, number)| *number == at as u64));
}

/// Has more data than the group takes, until the other one has got its part.
fn large(dir: &Path) {
    let started = start(160);
    // Without a heap, too: the other one waits for it.
    std::fs::write(dir.join("filled"), "").expect("room");
    let Some((heap, numbers)) = started else { return };
    assert!(eventually(|| dir.join("done").exists()), "the other one waits for ever");
    expect_all(&numbers);
    drop(numbers);
    heap.shutdown().expect("nothing is in use");
}

/// Comes when the group is full, and reads what it has until it may keep it.
fn small(dir: &Path) {
    if !eventually(|| dir.join("filled").exists()) {
        return;
    }
    let Some((heap, numbers)) = start(40) else { return };
    let got = eventually(|| {
        expect_all(&numbers);
        heap.stats().limit_bytes > ByteCount::mib(32)
    });
    assert!(got, "{}", heap.stats());
    std::fs::write(dir.join("done"), "").expect("room");
    drop(numbers);
    heap.shutdown().expect("nothing is in use");
}

#[test]
fn a_process_gets_memory_of_its_full_group_from_one_that_has_more() {
    const NAME: &str = "a_process_gets_memory_of_its_full_group_from_one_that_has_more";
    if let Some(case) = case(NAME) {
        let (who, dir) = case.split_once('/').expect("given below");
        return if who == "large" { large(Path::new(dir)) } else { small(Path::new(dir)) };
    }
    let Some(group) = Group::new(ByteCount::mib(128)) else {
        println!("skipped: no control group can be made here");
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    std::thread::scope(|scope| {
        let ends = ["large", "small"].map(|who| {
            let case = format!("{who}/{}", dir.path().display());
            let group = &group;
            scope.spawn(move || run(NAME, &case, |command| group.admit(command)))
        });
        for end in ends {
            end.join().expect("it ran").expect_success();
        }
    });
}

/// Forks; the child writes to one page in `every`, most of which it shares.
fn fork_writer(numbers: &mut [u64], every: usize) -> i32 {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child uses inherited far memory, its parent's numbers, and ends; no other thread has a lock that
    // it needs.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "a child");
    if pid == 0 {
        let step = every * 4096 / size_of::<u64>();
        numbers.iter_mut().step_by(step).for_each(|number| *number += 1);
        let written = numbers
            .iter()
            .zip(0_u64..)
            .all(|(number, at)| *number == at + u64::from(at.is_multiple_of(step as u64)));
        // SAFETY: ends the child without what its parent has registered for its own end.
        unsafe { libc::_exit(if written { 0 } else { 1 }) }
    }
    pid
}

/// Fills the group, and forks children that write to one page in `every`: two of them one after the other, or at once. What
/// they write is less than what is made free for them, however late it is seen.
fn parent_of_writers(at_once: usize, every: usize) {
    let Some((heap, mut numbers)) = start(72) else { return };
    for _ in 0..2 / at_once {
        expect_all(&numbers);
        let writers: Vec<i32> = (0..at_once).map(|_| fork_writer(&mut numbers, every)).collect();
        for pid in writers {
            let mut status = 0;
            // SAFETY: waits for a child that was just made.
            let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            assert_eq!((ended, status), (pid, 0), "{}", heap.stats());
        }
    }
    drop(numbers);
    heap.shutdown().expect("nothing is in use");
}

#[test]
fn children_that_write_what_they_share_have_room_in_a_full_group() {
    const NAME: &str = "children_that_write_what_they_share_have_room_in_a_full_group";
    if let Some(case) = case(NAME) {
        return match &*case {
            "one" => parent_of_writers(1, 8),
            _ => parent_of_writers(2, 6),
        };
    }
    let Some(group) = Group::new(ByteCount::mib(64)) else {
        println!("skipped: no control group can be made here");
        return;
    };
    for case in ["one", "two at once"] {
        run(NAME, case, |command| group.admit(command)).expect_success();
    }
}
