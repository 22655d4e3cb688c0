//! The kernel refuses to map a page, and does it soon afterwards: for want of memory, in a control group that is full.
#![expect(unsafe_code, reason = "takes the C library's place, and reads far memory")]

use crate::common::{bytes, watchdog};
use crate::harness::{Far, HUNG, check_page, config, fill_page, stamp, wait_until};
use farheap::ByteCount;
use farheap::region::{Advice, Install};
use std::ffi::{c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The address that memory is not moved to, once.
static REFUSED: AtomicU64 = AtomicU64::new(0);
static REFUSALS: AtomicUsize = AtomicUsize::new(0);

/// `struct uffdio_move`.
#[repr(C)]
struct Move {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    moved: i64,
}

/// The C library's, but for a MOVE that is to be refused.
///
/// # Safety
/// As for ioctl(2).
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl(file: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    const UFFDIO_MOVE: c_ulong = 0xC028_AA05;
    if request == UFFDIO_MOVE && REFUSED.load(Ordering::Relaxed) != 0 {
        // SAFETY: the argument of this request.
        let wanted = unsafe { &mut *argument.cast::<Move>() };
        let order = Ordering::Relaxed;
        if REFUSED.compare_exchange(wanted.to, 0, order, order).is_ok() {
            wanted.moved = -i64::from(libc::ENOMEM);
            REFUSALS.fetch_add(1, Ordering::Relaxed);
            // SAFETY: takes no pointers.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: this thread's.
            unsafe { *errno = libc::ENOMEM };
            return -1;
        }
    }
    #[expect(clippy::disallowed_methods, reason = "the function that libc has for it is this one")]
    // SAFETY: the caller's promise.
    let result = unsafe { libc::syscall(libc::SYS_ioctl, file, request, argument) };
    result as c_int
}

/// Pages come back from the frames in which they cool; of each of two the first attempt is refused.
#[test]
fn refusals_further_apart_than_the_deadline_cost_no_page() {
    const PATIENT: Duration = Duration::from_secs(2);
    /// Writes that the evictor keeps in flight: what it takes out beyond them cools.
    const WRITES: usize = 32;
    const CHUNK: usize = 512;
    const ROUNDS: usize = 6;
    let _watchdog = watchdog("refusals far apart", HUNG);
    let config = config(Install::Auto).limit(ByteCount::mib(32)).deadline(PATIENT);
    let Some(far) = Far::new(config, ROUNDS * 2 * CHUNK, 1) else { return };
    let mut in_a_row = 0;
    for first in (0..ROUNDS).map(|round| round * 2 * CHUNK) {
        // Fresh ones: a page that is read back in between would tell that the kernel maps pages again.
        let pages = || (first..).step_by(2).take(WRITES + 1);
        pages().for_each(|page| fill_page(far.addr(page), stamp(page)));
        far.control.pause();
        for page in pages() {
            // Again where the kernel refuses to give it, as it may beside others.
            wait_until("it has left", || {
                let out = far.region.advise(&[bytes(far.ptr(page), far.len(1))], Advice::PageOut);
                out.expect("inside the region");
                !far.region.is_at_hand(far.ptr(page))
            });
        }
        let last = first + 2 * WRITES;
        REFUSED.store(far.addr(last) as u64, Ordering::Relaxed);
        check_page(far.addr(last), stamp(last), last);
        // Where a page leaves by copy it comes back by one, and so does one that is being written.
        in_a_row = if REFUSED.swap(0, Ordering::Relaxed) == 0 { in_a_row + 1 } else { 0 };
        far.control.heal();
        wait_until("all is written", || far.stats().writes_in_flight == 0);
        match in_a_row {
            0 => {}
            // The case is time that passes between two refusals: more than a deadline, in which nothing else happens.
            1 => std::thread::sleep(PATIENT + PATIENT / 4),
            _ => break,
        }
    }
    let refused = REFUSALS.load(Ordering::Relaxed);
    assert!(in_a_row == 2 || refused == 0, "{refused} were refused");
    assert_eq!(far.stats().poisoned, 0, "{}", far.stats());
}
