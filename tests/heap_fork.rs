//! `fork` and child processes while a heap runs. The program's allocator is the heap.

#![expect(unsafe_code, reason = "forks")]

mod common;

use allocator_api2::vec::Vec as FarVec;
use common::child::alone;
use common::heap;
use farheap::{Far, FarHeap, Placement, scope};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

const WORDS: usize = (32 << 20) / 8;

/// How a forked child ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    Exit(i32),
    Signal(i32),
}

/// Runs `body` in a forked child; its result is the exit status.
fn fork(body: impl FnOnce() -> bool) -> End {
    #[expect(clippy::disallowed_methods, reason = "what becomes of a child is tested")]
    // SAFETY: the child calls `body`, which only reads memory, and ends without cleaning up.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let status = i32::from(!body());
        // SAFETY: ends the process; takes no pointers.
        unsafe { libc::_exit(status) };
    }
    assert!(pid > 0, "fork: {}", io::Error::last_os_error());
    let mut status = 0;
    // SAFETY: the status is a valid place to write to.
    let waited = unsafe { libc::waitpid(pid, &raw mut status, 0) };
    assert_eq!(waited, pid, "{}", io::Error::last_os_error());
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}

fn read(word: &u64) -> u64 {
    // SAFETY: a reference is valid; volatile, so that the access happens.
    unsafe { std::ptr::from_ref(word).read_volatile() }
}

fn numbers() -> FarVec<u64, Far> {
    let mut numbers = FarVec::with_capacity_in(WORDS, Far);
    numbers.extend((0..WORDS as u64).map(|n| n | 1 << 63));
    numbers
}

#[test]
fn a_forked_child_never_reads_zeros_for_the_parents_far_data() {
    alone("a_forked_child_never_reads_zeros_for_the_parents_far_data", || {
        let Some(heap) = heap("limit:8MiB,capacity:128MiB") else { return };
        let (data, local) = (numbers(), vec![7_u64; 1000]);
        heap.evict_all().expect("the device has room");
        // All evicted, then one page of each kind: written, read, and never touched again.
        for touched in [None, Some(0), Some(WORDS / 2)] {
            touched.map(|at| read(&data[at]));
            for at in [0, 1, WORDS / 2, WORDS - 1] {
                let end = fork(|| read(&data[at]) == data.len() as u64);
                assert_eq!(end, End::Signal(libc::SIGSEGV), "word {at}, touched {touched:?}");
            }
        }
        assert_eq!(fork(|| local.iter().sum::<u64>() == 7000), End::Exit(0), "local memory");
        assert!(data.iter().zip(0..).all(|(seen, n)| *seen == n | 1 << 63), "the parent's data");
        heap.evict_all().expect("as before");
    });
}

#[test]
fn forking_while_threads_fault_harms_nobody() {
    alone("forking_while_threads_fault_harms_nobody", || {
        let Some(heap) = heap("limit:8MiB,capacity:512MiB,page:4KiB") else { return };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let done = &done;
                scope.spawn(move || {
                    let mut data = FarVec::new_in(Far);
                    data.resize(1 << 20, thread);
                    let mut round = 0;
                    while !done.load(Ordering::Relaxed) {
                        for at in (0..data.len()).step_by(500) {
                            assert_eq!(data[at], thread + round);
                            data[at] += 1;
                        }
                        round += 1;
                    }
                });
            }
            let mut forks = 0;
            while forks < 100 || heap.stats().bytes_read < 16 << 20 {
                forks += 1;
                let local = vec![1_u8; 30_000];
                assert_eq!(fork(|| local.iter().all(|byte| *byte == 1)), End::Exit(0));
            }
            done.store(true, Ordering::Relaxed);
        });
    });
}

#[test]
fn programs_can_be_started_from_a_far_scope() {
    alone("programs_can_be_started_from_a_far_scope", || {
        let Some(heap) = heap("limit:8MiB,capacity:128MiB") else { return };
        let _data = numbers();
        for round in 0..20 {
            let output = {
                let _far = scope(Placement::Far);
                let mut command = Command::new("sh");
                command.args(["-c", "echo $WORD $0", "argument"]).env("WORD", "environment");
                let output = command.output();
                drop(command);
                output
            };
            let output = match output {
                Err(error) if !heap.serves_kernel_faults() => {
                    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
                    return;
                }
                output => output.expect("sh starts"),
            };
            assert!(Far::contains(output.stdout.as_ptr()), "the output was read into far memory");
            assert_eq!(output.stdout, b"environment argument\n", "round {round}");
            heap.evict_all().expect("the device has room");
        }
    });
}

/// A `Command` that must fork (for `pre_exec`, `uid`, ...) reads its arguments in the child, so
/// they must be local.
#[test]
fn commands_that_fork_need_local_arguments() {
    alone("commands_that_fork_need_local_arguments", || {
        let Some(_heap) = heap("limit:8MiB,capacity:128MiB") else { return };
        let forking = |placement| {
            let _scope = scope(placement);
            let mut command = Command::new("sh");
            command.args(["-c", "exit 7"]);
            // SAFETY: the closure does nothing.
            unsafe { command.pre_exec(|| Ok(())) };
            command.status().map(|status| status.code())
        };
        assert_eq!(forking(Placement::Local).expect("sh starts"), Some(7));
        assert_ne!(forking(Placement::Far).ok(), Some(Some(7)), "then the documentation is wrong");
    });
}
