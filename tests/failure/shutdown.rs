//! Regions that end while something is under way.

use crate::common::watchdog;
use crate::harness::{DEADLINE, Far, HUNG, WAYS, config, in_child, read_word, wait_until};
use farheap::region::{Install, RegionConfig};

const PAGES: usize = 256;

#[test]
fn prefetches_under_way_do_not_hold_up_the_end() {
    let _watchdog = watchdog("shutdown with prefetches", HUNG);
    for &(page, install) in WAYS {
        for paused in [false, true] {
            let config = RegionConfig { deadline: DEADLINE, ..config(page, install) };
            let Some(far) = Far::new(config, PAGES, 1) else { return };
            far.store(0..PAGES);
            if paused {
                far.control.pause();
            }
            far.region.prefetch(far.ptr(0), far.len(PAGES)).expect("inside the region");
            drop(far);
        }
    }
}

#[test]
fn writes_that_are_stuck_do_not_hold_up_the_end() {
    let _watchdog = watchdog("shutdown with writes", HUNG);
    for &(page, install) in WAYS {
        let Some(far) = Far::new(config(page, install), PAGES, 1) else { return };
        far.fill(0..PAGES);
        far.control.pause();
        std::thread::scope(|scope| {
            scope.spawn(|| drop(far.region.evict_all()));
            wait_until("writes", || far.control.held() > 0);
            // The call is answered when the device is; regions cannot be dropped before.
            far.control.release();
        });
        far.fill(0..PAGES);
        far.control.pause();
        drop(far);
    }
}

/// A thread that waits for a page when the region ends has nothing to go on with: it dies of a
/// signal, and never sees zeros.
#[test]
fn a_fault_under_way_at_the_end_is_a_signal() {
    let name = "shutdown::a_fault_under_way_at_the_end_is_a_signal";
    let ended = in_child(name, || {
        let Some(far) = Far::new(config(4, Install::Auto), PAGES, 1) else { return };
        far.store(0..PAGES);
        far.control.pause();
        let thread = far.touch(3);
        wait_until("the fault", || far.control.held() > 0);
        drop(far);
        println!("went on with {:?}", thread.join());
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGSEGV, libc::SIGBUS]);
}

#[test]
fn memory_of_a_region_that_has_ended_cannot_be_read() {
    let name = "shutdown::memory_of_a_region_that_has_ended_cannot_be_read";
    let ended = in_child(name, || {
        let Some(far) = Far::new(config(4, Install::Auto), PAGES, 1) else { return };
        far.fill(0..PAGES);
        let addr = far.addr(0);
        drop(far);
        println!("read {}", read_word(addr));
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGSEGV, libc::SIGBUS]);
}
