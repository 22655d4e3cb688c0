//! Panics of the store's code on the handler threads: told, survived, nobody hangs.

use crate::common::bytes;
use crate::harness::{
    Far, PAGE, WAYS, config, in_child, park_on_sigbus, resume, sigbus_addrs, wait_until,
};
use crate::injector::Whose;
use farheap::region::{Advice, Install};
use farheap::store::Op;
use std::time::Duration;

const PAGES: usize = 128;

fn expect_told(name: &'static str, body: impl FnOnce()) {
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
    ended.expect_said(&["farheap: the store panicked"]);
}

#[test]
fn a_panic_while_a_handler_waits_costs_nothing() {
    expect_told("panics::a_panic_while_a_handler_waits_costs_nothing", || {
        for &install in WAYS {
            let Some(far) = Far::new(config(install), PAGES, 1) else { return };
            far.store(0..PAGES);
            far.control.delay(Duration::from_millis(5));
            far.injector.panic_in_wait(Whose::Handler, 3);
            far.region
                .advise(&[bytes(far.ptr(0), far.len(PAGES / 2))], Advice::WillNeed)
                .expect("inside the region");
            far.check(0..PAGES);
            far.expect_healthy();
            assert_eq!((far.injector.panics_left(), far.stats().panics), (0, 3));
            assert_eq!(far.stats().poisoned, 0);
        }
    });
}

/// Whether the device has the request is unknown, so the page cannot be had.
#[test]
fn a_panic_while_a_handler_asks_the_device_costs_the_page_asked_for() {
    expect_told("panics::a_panic_while_a_handler_asks_the_device_costs_the_page_asked_for", || {
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        park_on_sigbus();
        far.store(0..PAGES);
        far.injector.panic_in_push(Op::Read, 1);
        let thread = far.touch(7);
        assert_eq!(sigbus_addrs(1), [far.addr(7)]);
        far.check(0..7);
        far.check(8..PAGES);
        far.discard(7..8);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
        // A prefetch costs no page at all.
        far.store(0..PAGES);
        far.injector.panic_in_push(Op::Read, 1);
        far.region
            .advise(&[bytes(far.ptr(0), far.len(PAGES))], Advice::WillNeed)
            .expect("inside the region");
        wait_until("the second panic", || far.stats().panics == 2);
        far.check(0..PAGES);
        far.expect_healthy();
        assert_eq!(far.stats().poisoned, 1);
    });
}

#[test]
fn a_panic_while_the_evictor_waits_costs_nothing() {
    expect_told("panics::a_panic_while_the_evictor_waits_costs_nothing", || {
        for &install in WAYS {
            let Some(far) = Far::new(config(install), PAGES, 1) else { return };
            far.fill(0..PAGES);
            far.injector.panic_in_wait(Whose::Evictor, 3);
            far.evict(0..PAGES);
            far.check(0..PAGES);
            far.expect_healthy();
            assert_eq!((far.injector.panics_left(), far.stats().panics), (0, 3));
            assert_eq!(far.stats().poisoned, 0);
        }
    });
}

/// The pages stay in memory, and nothing of theirs is lost to further use.
#[test]
fn a_panic_while_the_evictor_asks_the_device_costs_no_page() {
    expect_told("panics::a_panic_while_the_evictor_asks_the_device_costs_no_page", || {
        for &install in WAYS {
            let Some(far) = Far::new(config(install), PAGES, 1) else { return };
            far.fill(0..PAGES);
            far.injector.panic_in_push(Op::Write, 1);
            drop(far.region.evict_all());
            far.check(0..PAGES);
            far.expect_healthy();
            assert_eq!((far.stats().panics, far.stats().poisoned), (1, 0));
            wait_until("write-back works again", || far.region.evict_all().is_ok());
            assert_eq!(far.stats().writes_in_flight, 0);
            far.discard(0..PAGES);
            wait_until("slots come back", || far.stats().stored_bytes.0 == 0);
        }
    });
}

/// Each request that panics takes the frame of the one before.
#[test]
fn frames_of_requests_that_panicked_are_used_again() {
    expect_told("panics::frames_of_requests_that_panicked_are_used_again", || {
        // No readahead, so that every read is one page.
        let config = config(Install::Auto).readahead(false);
        let Some(far) = Far::new(config, 16, 1) else { return };
        far.store(0..16);
        let charged = [0, 1, 2, 3, 4, 5, 6, 7].map(|page| {
            far.injector.panic_in_push(Op::Read, 1);
            far.region
                .advise(&[bytes(far.ptr(page), far.len(1))], Advice::WillNeed)
                .expect("inside the region");
            wait_until("the panic", || far.stats().panics == page as u64 + 1);
            far.stats().charged_bytes
        });
        let [first, .., last] = charged;
        assert!(last.get() <= first.get() + PAGE as u64, "{charged:?}");
        far.check(0..16);
        far.expect_healthy();
        assert_eq!(far.stats().poisoned, 0);
    });
}

#[test]
fn a_panic_while_space_is_returned_costs_nothing() {
    expect_told("panics::a_panic_while_space_is_returned_costs_nothing", || {
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        far.store(0..PAGES);
        far.injector.panic_in_discard(1);
        far.discard(0..PAGES);
        wait_until("the panic", || far.stats().panics == 1);
        far.expect_healthy();
        assert_eq!(far.stats().poisoned, 0);
    });
}

#[test]
fn a_store_that_panics_for_ever_ends_the_process() {
    let ended = in_child("panics::a_store_that_panics_for_ever_ends_the_process", || {
        let Some(far) = Far::new(config(Install::Auto), PAGES, 1) else { return };
        far.injector.panic_in_wait(Whose::Handler, u64::MAX);
        far.expect_healthy();
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGABRT]);
    ended.expect_said(&["farheap: fatal", "panicked too often"]);
}
