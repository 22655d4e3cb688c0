//! Pages and frames: the state word, its protocol, the staging frames. Uses `base`,
//! `sys`, `meta`, and `diagnostics` for the message of a wait that lasts.

pub(crate) mod chunk_state;
#[cfg(not(loom))]
pub(in crate::paging) mod chunks;
pub(crate) mod frame_meta;
#[cfg(not(loom))]
pub(crate) mod frames;
pub(crate) mod gaps;
#[cfg(all(test, loom))]
mod models;
pub(crate) mod protocol;
#[cfg(not(loom))]
pub(crate) mod spare_runs;
pub(crate) mod word;

#[cfg(not(loom))]
use crate::paging::diagnostics;

/// Bytes of a page, which is the kernel's.
#[cfg(not(loom))]
pub(in crate::paging) const PAGE: usize = crate::sys::vm::KERNEL_PAGE;

/// Pages of a chunk, and frames of a run: what a huge page has.
#[cfg(not(loom))]
pub(in crate::paging) const CHUNK_PAGES: usize = crate::sys::vm::HUGE_PAGE / PAGE;

/// The same as a number of neighbouring pages.
#[cfg(not(loom))]
pub(in crate::paging) const CHUNK_LEN: crate::base::units::PageCount =
    crate::base::units::PageCount(CHUNK_PAGES as u64);

/// Bytes of a page.
#[cfg(not(loom))]
pub(in crate::paging) const PAGE_SIZE: crate::base::units::ByteCount =
    crate::base::units::ByteCount(PAGE as u64);

/// Maximum number of pages handled by one batch of installs, evictions or discards.
#[cfg(not(loom))]
pub(in crate::paging) const BATCH_MAX: usize = 256;

/// Spins shortly, then yields: for states of words that last microseconds. A wait that lasts is told of: nothing else tells
/// of a thread that waits for itself.
#[cfg(not(loom))]
pub(in crate::paging) fn backoff(spins: &mut u32) {
    /// Some seconds of nothing else. A process that is stopped does not spin.
    const LONG: u32 = 1 << 24;
    *spins = spins.wrapping_add(1);
    if spins.is_multiple_of(LONG) {
        diagnostics::waits_for_thread();
    }
    if *spins < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

#[cfg(loom)]
pub(in crate::paging) fn backoff(_: &mut u32) {
    loom::thread::yield_now();
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::paging::diagnostics::WAITS_FOR_THREAD;
    use crate::sys::messages;

    #[test]
    #[cfg_attr(miri, ignore = "writes to standard error")]
    fn a_wait_that_lasts_is_told_of_and_goes_on() {
        let mut spins = u32::MAX - 1;
        backoff(&mut spins);
        assert!(!messages::was_told(WAITS_FOR_THREAD), "it is short");
        backoff(&mut spins);
        assert!(messages::was_told(WAITS_FOR_THREAD));
        assert_eq!(spins, 0, "it is counted anew");
    }
}
