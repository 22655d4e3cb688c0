//! A heap in a program of one thread. No test harness: that has threads of its own.

#![expect(unsafe_code, reason = "asks the kernel what the process is registered for")]
#![expect(clippy::disallowed_methods, reason = "asks the kernel, not farheap")]

use farheap::{ByteCount, Heap};

/// Of the commands of `membarrier(2)`, the one that says which others the process is registered for; Linux 6.3.
const GET_REGISTRATIONS: libc::c_int = 1 << 9;

/// What the kernel says that the process is registered for; `None`: it does not tell.
fn registrations() -> Option<i64> {
    // SAFETY: takes numbers only, and changes nothing.
    let answer = unsafe { libc::syscall(libc::SYS_membarrier, GET_REGISTRATIONS, 0, 0) };
    (answer >= 0).then_some(answer)
}

fn main() {
    // Lists of tests are asked for by `cargo test -- --list`.
    if std::env::args().any(|argument| argument == "--list") {
        return;
    }
    let Some(before) = registrations() else {
        return println!("skipped: the kernel does not tell what a process is registered for");
    };
    assert_eq!(before, 0, "no heap has run");
    let options = Heap::builder().far_limit(ByteCount::mib(8)).capacity(ByteCount::mib(64));
    let heap = match options.start() {
        Ok(heap) => heap,
        Err(error @ farheap::Error::UffdUnavailable { .. }) => return println!("skipped: {error}"),
        Err(error) => panic!("{error}"),
    };
    let expedited = i64::from(libc::MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED);
    let registered = registrations().expect("it told before");
    // Later, with the region's threads, the kernel would keep the thread that registers waiting for 18 ms.
    assert_ne!(registered & expedited, 0, "not registered while there was one thread");
    heap.shutdown().expect("nothing is far");
    println!("heap_single: passed");
}
