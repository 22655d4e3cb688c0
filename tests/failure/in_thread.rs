//! Reads that fail, lie or come late where threads serve their own faults.
//!
//! The program's SIGBUS handler is there before the region, whose own passes on what it cannot
//! serve.

use crate::common::{bytes, seed, watchdog};
use crate::harness::{
    DEADLINE, Far, HUNG, config, in_child, park_on_sigbus, resume, sigbus_addrs, sigbus_count,
};
use crate::reads::{BAD, FOREVER, PAGES, expect_lost_page, give_up};
use farheap::ByteCount;
use farheap::region::{Advice, FaultMode, Install, RegionConfig};
use farheap::store::Op;
use std::time::{Duration, Instant};

fn in_thread(install: Install) -> RegionConfig {
    config(install).mode(FaultMode::InThread)
}

#[test]
fn a_read_error_that_passes_is_not_seen_in_thread() {
    let _watchdog = watchdog("transient, in thread", HUNG);
    let seed = seed("transient, in thread");
    for install in [Install::Auto, Install::Copy] {
        let Some(far) = Far::new(in_thread(install), PAGES, seed) else { return };
        far.store(0..PAGES);
        far.control.fail_next(Op::Read, 2, libc::EIO);
        far.check(1..2);
        far.control.shorten_reads(2);
        far.check(2..3);
        corrupt_reads(&far, 2);
        far.check(3..4);
        let stats = far.stats();
        let seen = (stats.read_errors, stats.checksum_errors, stats.poisoned);
        assert_eq!(seen, (4, 2, 0), "{install:?}");
        far.expect_healthy();
    }
}

#[test]
fn read_errors_of_seconds_are_waited_out_in_thread() {
    let _watchdog = watchdog("errors for seconds, in thread", HUNG);
    for install in [Install::Auto, Install::Copy] {
        let Some(far) = Far::new(in_thread(install), PAGES, 1) else { return };
        crate::reads::wait_out_errors(&far);
        far.expect_healthy();
    }
}

/// Three threads touch a page that cannot be read; `spoil` makes the device fail, or not.
fn lose_one_page(config: RegionConfig, spoil: impl Fn(&Far, u64)) {
    const WAITING: usize = 3;
    let config = config.deadline(DEADLINE);
    park_on_sigbus();
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
    far.check(0..BAD);
    spoil(&far, FOREVER);
    let threads: Vec<_> = (0..WAITING).map(|_| far.touch(BAD)).collect();
    let addrs = sigbus_addrs(WAITING);
    spoil(&far, 0);
    assert!(addrs.iter().all(|addr| *addr == far.addr(BAD)), "{addrs:x?} of page {BAD}");
    assert!(threads.iter().all(|thread| !thread.is_finished()), "the signals went elsewhere");
    assert_eq!(far.stats().poisoned, 1);
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    assert_eq!(sigbus_count(), WAITING, "no other page is lost");
    give_up(&far, threads);
    far.expect_healthy();
    assert_eq!((sigbus_count(), far.stats().poisoned), (WAITING, 1));
}

fn fail_reads(far: &Far, count: u64) {
    far.control.fail_next(Op::Read, count, libc::EIO);
}

fn corrupt_reads(far: &Far, count: u64) {
    far.corrupt_reads(count);
}

#[test]
fn a_read_error_that_stays_is_a_sigbus_of_the_thread_that_touched_the_page() {
    let name = "in_thread::a_read_error_that_stays_is_a_sigbus_of_the_thread_that_touched_the_page";
    let body = || lose_one_page(in_thread(Install::Auto), fail_reads);
    expect_lost_page(in_child(name, body), "(EIO)");
}

/// Lost pages are fenced off, not poisoned.
#[test]
fn a_read_error_that_stays_is_a_sigbus_on_an_old_kernel() {
    let name = "in_thread::a_read_error_that_stays_is_a_sigbus_on_an_old_kernel";
    let body = || lose_one_page(in_thread(Install::Copy), fail_reads);
    expect_lost_page(in_child(name, body), "(EIO)");
}

#[test]
fn content_that_fails_its_checksum_is_a_sigbus() {
    let name = "in_thread::content_that_fails_its_checksum_is_a_sigbus";
    let body = || lose_one_page(in_thread(Install::Auto), corrupt_reads);
    expect_lost_page(in_child(name, body), "checksum");
}

#[test]
fn a_page_that_could_not_be_fetched_is_read_when_it_is_touched() {
    let _watchdog = watchdog("fetch, in thread", HUNG);
    for install in [Install::Auto, Install::Copy] {
        let Some(far) = Far::new(in_thread(install), PAGES, 1) else { return };
        far.store(0..PAGES);
        fail_reads(&far, FOREVER);
        let pages = [1, 2, 3].map(|page| bytes(far.addr(page) as *const u8, ByteCount(1)));
        far.region.advise(&pages, Advice::WillNeedNow).expect("in the region");
        fail_reads(&far, 0);
        let stats = far.stats();
        assert_eq!((stats.poisoned, stats.pages_prefetched), (0, 0), "{install:?}");
        assert!(stats.read_errors > 0);
        far.region.advise(&pages[1..], Advice::WillNeedNow).expect("in the region");
        far.check(1..4);
        let stats = far.stats();
        assert_eq!((stats.faults_read, stats.pages_prefetched), (1, 2), "{install:?}");
        far.expect_healthy();
    }
}

#[test]
fn a_late_device_holds_up_only_the_thread_that_reads() {
    const LATE: Duration = Duration::from_millis(300);
    let _watchdog = watchdog("late, in thread", HUNG);
    let Some(far) = Far::new(in_thread(Install::Auto), PAGES, 1) else { return };
    far.store(0..PAGES);
    far.check(0..BAD);
    far.control.pause();
    let late = far.touch(BAD);
    let started = Instant::now();
    while started.elapsed() < LATE {
        far.check(0..BAD);
    }
    assert!(!late.is_finished(), "the device has not answered");
    far.control.release();
    assert_eq!(late.join().expect("answered late"), crate::harness::stamp(BAD));
    assert_eq!(far.stats().poisoned, 0);
    far.expect_healthy();
}

#[test]
fn without_a_handler_of_the_program_a_lost_page_ends_the_process() {
    let name = "in_thread::without_a_handler_of_the_program_a_lost_page_ends_the_process";
    let ended = in_child(name, || {
        let short = in_thread(Install::Auto).deadline(DEADLINE);
        let Some(far) = Far::new(short, PAGES, 1) else { return };
        far.store(0..PAGES);
        fail_reads(&far, FOREVER);
        far.check(BAD..BAD + 1);
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGBUS]);
    ended.expect_said(&["farheap: page at 0x", "(EIO)"]);
}

/// The device does not answer a read. The threads that wait for the reader's page get SIGBUS at the
/// deadline, and the reader when its read returns.
fn never_answered(config: RegionConfig) {
    const TOUCHING: usize = 4;
    park_on_sigbus();
    let config = config.deadline(Duration::from_secs(1));
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    far.store(0..PAGES);
    far.check(0..BAD);
    far.control.pause();
    let threads: Vec<_> = (0..TOUCHING).map(|_| far.touch(BAD)).collect();
    let addrs = sigbus_addrs(TOUCHING - 1);
    assert!(addrs.iter().all(|addr| *addr == far.addr(BAD)), "{addrs:x?} of page {BAD}");
    assert_eq!((sigbus_count(), far.stats().poisoned), (TOUCHING - 1, 1), "one thread reads");
    // Of use again before the read has returned; what that brings is not installed.
    far.discard(BAD..BAD + 1);
    assert_eq!(far.touch(BAD).join().expect("a page like any other"), 0);
    let pinned = far.region.pin(bytes(far.ptr(BAD), far.len(1))).expect("far below the limit");
    far.control.release();
    resume();
    for thread in threads {
        assert_eq!(thread.join().expect("resumed"), 0);
    }
    drop(pinned);
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    far.expect_healthy();
    assert_eq!((sigbus_count(), far.stats().poisoned), (TOUCHING - 1, 1));
}

#[test]
fn a_read_that_is_not_answered_is_a_sigbus_of_the_threads_that_wait_for_it() {
    let name = "in_thread::a_read_that_is_not_answered_is_a_sigbus_of_the_threads_that_wait_for_it";
    let body = || never_answered(in_thread(Install::Auto));
    expect_lost_page(in_child(name, body), "(ETIMEDOUT");
}

/// Lost pages are fenced off, not poisoned.
#[test]
fn a_read_that_is_not_answered_is_a_sigbus_on_an_old_kernel() {
    let name = "in_thread::a_read_that_is_not_answered_is_a_sigbus_on_an_old_kernel";
    let body = || never_answered(in_thread(Install::Copy));
    expect_lost_page(in_child(name, body), "(ETIMEDOUT");
}

#[test]
fn a_read_that_returns_after_its_deadline_is_a_sigbus_of_its_thread() {
    let name = "in_thread::a_read_that_returns_after_its_deadline_is_a_sigbus_of_its_thread";
    let ended = in_child(name, || {
        park_on_sigbus();
        let short = in_thread(Install::Auto).deadline(DEADLINE);
        let Some(far) = Far::new(short, PAGES, 1) else { return };
        far.store(0..PAGES);
        far.control.pause();
        let late = far.touch(BAD);
        crate::harness::wait_until("the deadline", || far.stats().poisoned == 1);
        assert_eq!(sigbus_count(), 0, "its call has not returned");
        far.control.release();
        assert_eq!(sigbus_addrs(1), [far.addr(BAD)]);
        far.discard(BAD..BAD + 1);
        resume();
        assert_eq!(late.join().expect("resumed"), 0);
        far.expect_healthy();
    });
    expect_lost_page(ended, "(ETIMEDOUT");
}

#[test]
fn a_page_discarded_under_a_read_that_is_not_answered_is_of_use_again() {
    let _watchdog = watchdog("discarded, in thread", HUNG);
    let short = in_thread(Install::Auto).deadline(DEADLINE);
    let Some(far) = Far::new(short, PAGES, 1) else { return };
    far.store(0..PAGES);
    far.control.pause();
    far.discard(BAD + 1..BAD + 2);
    let late = far.touch(BAD);
    // Long enough for the read to begin. If it has not, the rest is true all the same.
    std::thread::sleep(DEADLINE / 4);
    far.discard(BAD..BAD + 1);
    assert_eq!(far.touch(BAD).join().expect("nothing is lost"), 0);
    far.control.release();
    assert_eq!(late.join().expect("nothing is lost"), 0);
    assert_eq!(far.stats().poisoned, 0);
    far.expect_healthy();
}

#[test]
fn a_page_that_nobody_waits_for_outlasts_a_device_that_does_not_answer() {
    let _watchdog = watchdog("fetch of a silent device", HUNG);
    let short = in_thread(Install::Auto).deadline(DEADLINE);
    let Some(far) = Far::new(short, PAGES, 1) else { return };
    far.store(0..PAGES);
    far.control.pause();
    std::thread::scope(|scope| {
        let far = &far;
        let fetch = scope.spawn(|| {
            far.region
                .advise(&[bytes(far.addr(BAD) as *const u8, ByteCount(1))], Advice::WillNeedNow)
        });
        std::thread::sleep(DEADLINE * 4);
        far.control.release();
        fetch.join().expect("no panic").expect("in the region");
    });
    assert_eq!(far.stats().poisoned, 0);
    far.check(BAD..BAD + 1);
    far.expect_healthy();
}
