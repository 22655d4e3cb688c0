//! Reads that fail, lie, or come late.

use crate::common::child::Ended;
use crate::common::{bytes, seed, watchdog};
use crate::harness::{
    DEADLINE, Far, HUNG, PAGE, WAYS, config, in_child, park_on_sigbus, read_word, resume,
    sigbus_addrs, sigbus_count, stamp, wait_until,
};
use farheap::ByteCount;
use farheap::region::{Advice, FaultMode, Install, RegionConfig};
use farheap::store::Op;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) const PAGES: usize = 96;
/// The page that is lost.
pub(crate) const BAD: usize = 10;
pub(crate) const FOREVER: u64 = u64::MAX;

#[test]
fn a_read_error_that_passes_is_not_seen_by_anybody() {
    let _watchdog = watchdog("transient", HUNG);
    let seed = seed("transient");
    for &install in WAYS {
        let Some(far) = Far::new(config(install), PAGES, seed) else { return };
        far.store_apart(0..PAGES);
        for errors in 1..=2 {
            far.control.fail_next(Op::Read, errors, libc::EIO);
            far.check(errors as usize..errors as usize + 1);
        }
        far.control.shorten_reads(2);
        far.check(3..4);
        let stats = far.stats();
        assert_eq!((stats.read_errors, stats.poisoned), (5, 0), "{install:?}");
        far.corrupt_reads(2);
        far.check(4..5);
        let stats = far.stats();
        assert_eq!((stats.checksum_errors, stats.poisoned), (2, 0), "{install:?}");
        far.expect_healthy();
    }
}

/// A device that fails every read for seconds, as one whose path or controller is reset, costs
/// nothing but time: reads are repeated up to the deadline.
#[test]
fn read_errors_of_seconds_are_waited_out() {
    let _watchdog = watchdog("errors for seconds", HUNG);
    for &install in WAYS {
        let Some(far) = Far::new(config(install), PAGES, 1) else { return };
        wait_out_errors(&far);
        far.expect_healthy();
    }
}

/// Touches pages of a device that fails everything for a second, and works then: for long after three
/// attempts made at once would have been over.
pub(crate) fn wait_out_errors(far: &Far) {
    const SECONDS: Duration = Duration::from_secs(1);
    far.store(0..PAGES);
    let began = Instant::now();
    far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO);
    let threads: Vec<_> = (0..8).map(|n| (8 * n, far.touch(8 * n))).collect();
    wait_until("failed reads", || far.stats().read_errors > 8);
    std::thread::sleep(SECONDS);
    assert!(threads.iter().all(|(_, thread)| !thread.is_finished()), "nothing can be read");
    let errors = far.stats().read_errors;
    // However long they had.
    let most = 8.0 * 200.0 * began.elapsed().as_secs_f64();
    assert!((errors as f64) < most, "{errors} errors: not as fast as the device fails");
    far.control.heal();
    for (page, thread) in threads {
        assert_eq!(thread.join().expect("the page is there"), stamp(page));
    }
    far.check(0..PAGES);
    assert_eq!(far.stats().poisoned, 0);
}

/// A device that is slow, not dead: threads that wait for a place in its queue for longer than the
/// deadline of a request get their pages all the same. The deadline is that of a request that the
/// device has got.
#[test]
fn pages_are_not_lost_while_their_faults_wait_for_a_slow_device() {
    const THREADS: usize = 1_200;
    const SLOW: Duration = Duration::from_millis(500);
    let _watchdog = watchdog("a thousand threads", HUNG);
    // Five times 256 reads at once: the last ones wait for two seconds.
    let config = config(Install::Auto).handlers(1).limit(ByteCount::mib(16)).deadline(3 * SLOW);
    let Some(far) = Far::new(config, THREADS, 1) else { return };
    far.store(0..THREADS);
    far.control.delay(SLOW);
    let far = &far;
    std::thread::scope(|scope| {
        for page in 0..THREADS {
            let thread = std::thread::Builder::new().stack_size(64 << 10);
            // Not in the order in which they lie on the device: they are not read together.
            let page = page * 7 % THREADS;
            thread.spawn_scoped(scope, move || far.check(page..page + 1)).expect("a thread");
        }
    });
    assert_eq!((far.stats().poisoned, far.stats().read_errors), (0, 0));
    far.control.heal();
    far.expect_healthy();
}

/// A helper is sent off duty while its last read is under way, and the read fails: it is repeated,
/// and the thread that waits for the page goes on. (One round in three meets it so.)
#[test]
fn a_read_that_fails_at_a_helper_off_duty_is_repeated() {
    const ROUNDS: u64 = 8;
    let _watchdog = watchdog("helper off duty", HUNG);
    let config = config(Install::Auto).handlers(2).deadline(HUNG);
    let pages = 8 * (config.limit.0 / 4096) as usize;
    let Some(far) = Far::new(config, pages, 1) else { return };
    far.store(0..pages);
    (0..ROUNDS).for_each(|_| fail_a_helpers_read(&far));
    let stats = far.stats();
    // Neighbours that are wanted at the same time are one read, and each page of it counts.
    assert!(stats.read_errors >= ROUNDS && stats.poisoned == 0, "{stats}");
    far.expect_healthy();
}

fn fail_a_helpers_read(far: &Far) {
    const CROWD: usize = 4;
    const LONELY: usize = 20_000;
    let crowded = far.pages / 2;
    far.injector.hold_a_helpers_read();
    std::thread::scope(|scope| {
        for first in 0..CROWD {
            // One of them comes to wait for what the helper reads.
            scope.spawn(move || {
                let mut own = (first..crowded).step_by(CROWD).cycle();
                while !far.injector.has_held() {
                    let page = own.next().expect("round and round");
                    far.check(page..page + 1);
                }
            });
        }
        wait_until("a helper reads", || far.injector.has_held());
        // A thread that faults alone sends the helper off duty.
        (crowded..far.pages).cycle().take(LONELY).for_each(|page| far.check(page..page + 1));
        far.injector.fail_what_is_held();
    });
}

/// One page's place on the device is bad; three threads wait for it at the same time.
fn lose_one_page(config: RegionConfig) {
    const WAITING: usize = 3;
    let config = config.deadline(DEADLINE);
    let Some(far) = Far::new(config, PAGES, 1) else { return };
    park_on_sigbus();
    far.injector.follow(stamp(BAD));
    far.store(0..PAGES);
    far.injector.spoil(true);
    // Neighbours are read together with the bad place, and live on.
    far.region
        .advise(&[bytes(far.ptr(0), far.len(PAGES))], Advice::WillNeed)
        .expect("inside the region");
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    assert_eq!((sigbus_count(), far.stats().poisoned), (0, 0), "nobody has touched the bad page");
    far.control.delay(Duration::from_millis(50));
    let threads: Vec<_> = (0..WAITING).map(|_| far.touch(BAD)).collect();
    let addrs = sigbus_addrs(WAITING);
    let page = far.addr(BAD)..far.addr(BAD) + PAGE;
    assert!(addrs.iter().all(|addr| page.contains(addr)), "{addrs:x?} not in {page:x?}");
    far.control.delay(Duration::ZERO);
    assert_eq!(far.stats().poisoned, 1);
    far.evict(0..PAGES);
    far.region
        .advise(&[bytes(far.ptr(0), far.len(PAGES))], Advice::WillNeed)
        .expect("inside the region");
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    assert_eq!(sigbus_count(), WAITING, "no other page is lost");
    give_up(&far, threads);
    far.injector.spoil(false);
    far.expect_healthy();
    assert_eq!((sigbus_count(), far.stats().poisoned), (WAITING, 1));
}

/// Threads wait for a page that is lost: given up, it is as good as new.
pub(crate) fn give_up(far: &Far, threads: Vec<JoinHandle<u64>>) {
    far.discard(BAD..BAD + 1);
    resume();
    for thread in threads {
        assert_eq!(thread.join().expect("resumed"), 0);
    }
}

pub(crate) fn expect_lost_page(ended: Option<Ended>, cause: &str) {
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["farheap: page at 0x", cause, "SIGBUS"]);
}

#[test]
fn a_read_error_that_stays_costs_one_page() {
    let name = "reads::a_read_error_that_stays_costs_one_page";
    let body = || lose_one_page(config(Install::Auto));
    expect_lost_page(in_child(name, body), "(EIO)");
}

/// Three chunks that are read whole, but for the one of the bad page.
#[test]
fn a_read_error_that_stays_costs_one_page_of_a_chunk() {
    let name = "reads::a_read_error_that_stays_costs_one_page_of_a_chunk";
    let limit = farheap::ByteCount::mib(64);
    let body = || lose_one_page(config(Install::Auto).limit(limit));
    expect_lost_page(in_child(name, body), "(EIO)");
}

/// `install:copy` uses nothing newer than Linux 5.7: lost pages are fenced off, not poisoned.
#[test]
fn a_read_error_that_stays_costs_one_page_on_an_old_kernel() {
    let name = "reads::a_read_error_that_stays_costs_one_page_on_an_old_kernel";
    let body = || lose_one_page(config(Install::Copy));
    expect_lost_page(in_child(name, body), "(EIO)");
}

#[test]
fn without_a_handler_a_lost_page_ends_the_process() {
    let ended = in_child("reads::without_a_handler_a_lost_page_ends_the_process", || {
        let short = config(Install::Auto).deadline(DEADLINE);
        let Some(far) = Far::new(short, PAGES, 1) else { return };
        far.store(0..PAGES);
        far.control.fail_next(Op::Read, FOREVER, libc::EIO);
        println!("{}", read_word(far.addr(BAD)));
    });
    let Some(ended) = ended else { return };
    ended.expect_signal(&[libc::SIGBUS]);
    ended.expect_said(&["page at 0x", "(EIO)", "SIGBUS"]);
}

/// Breaks all reads by `damage`, expects SIGBUS, heals and expects that nothing else suffered.
fn lose_by(install: Install, damage: impl Fn(&Far), counted: impl Fn(&Far) -> bool) {
    let short = config(install).deadline(DEADLINE);
    let Some(far) = Far::new(short, PAGES, 1) else { return };
    park_on_sigbus();
    far.store_apart(0..PAGES);
    damage(&far);
    let thread = far.touch(BAD);
    let addr = sigbus_addrs(1)[0];
    assert_eq!(addr & !4095, far.addr(BAD));
    assert!(counted(&far), "{:?}", far.stats());
    far.control.heal();
    far.check(0..BAD);
    far.check(BAD + 1..PAGES);
    far.discard(BAD..BAD + 1);
    resume();
    assert_eq!(thread.join().expect("resumed"), 0);
    far.expect_healthy();
    assert_eq!((sigbus_count(), far.stats().poisoned), (1, 1));
}

#[test]
fn a_short_read_is_an_error() {
    let body = || {
        lose_by(
            Install::Auto,
            |far| far.control.shorten_reads(FOREVER),
            |far| far.stats().read_errors > 3,
        );
    };
    expect_lost_page(in_child("reads::a_short_read_is_an_error", body), "(EIO)");
}

#[test]
fn wrong_bytes_are_never_shown() {
    let body = || {
        lose_by(
            Install::Auto,
            |far| far.corrupt_reads(FOREVER),
            |far| far.stats().checksum_errors > 3,
        );
    };
    expect_lost_page(in_child("reads::wrong_bytes_are_never_shown", body), "checksum mismatch");
}

/// Content that is wrong stays so: pages that are damaged cost no deadline each.
#[test]
fn damaged_pages_are_given_up_long_before_the_deadline() {
    const DAMAGED: usize = 24;
    let body = || {
        for patient in [config(Install::Auto), config(Install::Copy).mode(FaultMode::InThread)] {
            park_on_sigbus(); // A region that serves its own faults passes others on.
            let Some(far) = Far::new(patient.deadline(HUNG), PAGES, 1) else { return };
            let before = sigbus_count();
            far.store_apart(0..PAGES);
            far.corrupt_reads(FOREVER);
            let threads: Vec<_> = (0..DAMAGED)
                .map(|page| {
                    let thread = far.touch(page);
                    sigbus_addrs(before + page + 1);
                    thread
                })
                .collect();
            far.corrupt_reads(0);
            assert_eq!(far.stats().poisoned, DAMAGED as u64);
            far.check(DAMAGED..PAGES);
            far.discard(0..DAMAGED);
            resume();
            assert!(threads.into_iter().all(|thread| thread.join().is_ok_and(|word| word == 0)));
            far.expect_healthy();
        }
    };
    let name = "reads::damaged_pages_are_given_up_long_before_the_deadline";
    expect_lost_page(in_child(name, body), "checksum mismatch");
}

#[test]
fn a_device_that_is_gone_is_an_error() {
    let body = || {
        let gone = |far: &Far| far.control.vanish(libc::ENODEV);
        lose_by(Install::Auto, gone, |far| far.stats().read_errors > 0);
    };
    expect_lost_page(in_child("reads::a_device_that_is_gone_is_an_error", body), "errno 19");
}

#[test]
fn an_answer_after_the_deadline_is_an_error() {
    let body = || {
        // It comes when the page is lost: one that comes after a time is early where the process was stopped meanwhile.
        let late = |far: &Far| far.control.pause();
        lose_by(Install::Auto, late, |far| far.stats().read_errors == 1);
    };
    expect_lost_page(
        in_child("reads::an_answer_after_the_deadline_is_an_error", body),
        "ETIMEDOUT",
    );
}

#[test]
fn a_device_that_never_answers_is_an_error() {
    let body =
        || lose_by(Install::Copy, |far| far.control.pause(), |far| far.stats().read_errors == 1);
    expect_lost_page(in_child("reads::a_device_that_never_answers_is_an_error", body), "ETIMEDOUT");
}

#[test]
fn an_answer_before_the_deadline_is_waited_for() {
    let _watchdog = watchdog("slow device", HUNG);
    for &install in WAYS {
        let Some(far) = Far::new(config(install), PAGES, 1) else { return };
        far.store(0..PAGES);
        far.control.delay(Duration::from_millis(20));
        far.region
            .advise(&[bytes(far.ptr(20), far.len(PAGES - 20))], Advice::WillNeed)
            .expect("inside the region");
        far.check(0..PAGES);
        assert_eq!(far.stats().poisoned, 0);
    }
}

/// More requests than a handler can have are stuck; a fault then has its deadline all the same.
#[test]
fn a_fault_behind_a_full_queue_has_a_deadline_too() {
    const MANY: usize = 1000;
    let name = "reads::a_fault_behind_a_full_queue_has_a_deadline_too";
    let body = || {
        let short = config(Install::Auto).deadline(DEADLINE);
        let Some(far) = Far::new(short, MANY, 1) else { return };
        park_on_sigbus();
        // Evicted one by one in an order that leaves no neighbours on the device.
        far.fill(0..MANY);
        let mut order: Vec<usize> = (0..MANY).collect();
        order.sort_unstable_by_key(|page| stamp(*page));
        order.iter().for_each(|&page| far.evict(page..page + 1));
        far.control.pause();
        for page in 0..MANY - 1 {
            far.region
                .advise(&[bytes(far.ptr(page), far.len(1))], Advice::WillNeed)
                .expect("inside the region");
        }
        wait_until("a full queue", || far.control.held() >= 120);
        let thread = far.touch(MANY - 1);
        let addrs = sigbus_addrs(1);
        assert_eq!(addrs, [far.addr(MANY - 1)]);
        far.control.release();
        far.check(0..MANY - 1);
        far.discard(MANY - 1..MANY);
        resume();
        assert_eq!(thread.join().expect("resumed"), 0);
        far.expect_healthy();
        assert_eq!(far.stats().poisoned, 1);
    };
    expect_lost_page(in_child(name, body), "ETIMEDOUT");
}

/// Nobody has asked for the pages yet: a device that fails for a while costs none of them.
#[test]
fn failed_prefetches_cost_no_pages() {
    let _watchdog = watchdog("failed prefetch", HUNG);
    for damage in [Damage::Errors, Damage::Silence] {
        let short = config(Install::Auto).deadline(DEADLINE);
        let Some(far) = Far::new(short, PAGES, 1) else { return };
        far.store(0..PAGES);
        match damage {
            Damage::Errors => far.control.fail_fraction(Op::Read, 1_000_000, libc::EIO),
            Damage::Silence => far.control.pause(),
        }
        far.region
            .advise(&[bytes(far.ptr(0), far.len(PAGES))], Advice::WillNeed)
            .expect("inside the region");
        wait_until("failed reads", || far.stats().read_errors > 0);
        std::thread::sleep(DEADLINE);
        far.control.heal();
        far.check(0..PAGES);
        assert_eq!(far.stats().poisoned, 0);
    }
}

#[derive(Clone, Copy)]
enum Damage {
    Errors,
    Silence,
}
