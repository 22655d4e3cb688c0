//! The start of a program beside which farheap is tried.

use farheap::Heap;
use std::process::ExitCode;

/// Exit status where the machine does not allow a heap, as in the tests of C and C++.
const SKIPPED: u8 = 77;

/// Starts a heap; where the machine does not allow it, the error is the exit status of a program that is skipped.
pub(crate) fn start(config: &str) -> Result<Heap, ExitCode> {
    Heap::builder().parse(config).expect("a configuration").start().map_err(|error| {
        println!("skipped: {error}");
        ExitCode::from(SKIPPED)
    })
}
