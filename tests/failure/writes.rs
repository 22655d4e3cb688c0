//! Write-back that fails, lags, or never ends.
#![expect(unsafe_code, reason = "takes far memory back")]

use crate::common::child::Ended;
use crate::common::{bytes, seed, watchdog};
use crate::harness::{
    DEADLINE, Far, HUNG, PAGE, WAYS, config, fill_page, in_child, park_on_sigbus, resume,
    sigbus_addrs, sigbus_count, stamp, wait_until,
};
use farheap::Error;
use farheap::region::{Advice, Install};
use farheap::store::Op;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Stamps pages in order in a thread of its own, and counts them.
fn write_behind<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    far: &'scope Far,
    written: &'scope AtomicUsize,
) {
    scope.spawn(move || {
        for page in 0..far.pages {
            fill_page(far.addr(page), stamp(page));
            written.store(page + 1, Ordering::Release);
        }
    });
}

/// Fills memory while nothing can be written back, until a fault ends in SIGBUS; then heals.
fn no_write_back(install: Install, damage: impl Fn(&Far)) {
    let config = config(install).deadline(DEADLINE);
    let pages = 3 * (config.limit.0 / 4096) as usize;
    let Some(far) = Far::new(config.clone(), pages, seed("no write-back")) else { return };
    park_on_sigbus();
    damage(&far);
    let written = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        write_behind(scope, &far, &written);
        let addr = sigbus_addrs(1)[0];
        let done = written.load(Ordering::Acquire);
        assert_eq!(addr / PAGE, far.addr(done) / PAGE, "the page being written");
        assert!(done * 2 > pages / 3, "only {done} pages fit");
        // What was written is there, and what cannot be kept is refused.
        far.check(done - done / 2..done);
        let refused = far.region.map(far.len(1)).expect_err("there is no room");
        let Error::Device { reason, .. } = &refused else { panic!("{refused}") };
        assert!(reason.contains("takes no writes"), "{refused}");
        let stats = far.stats();
        assert!(
            stats.resident_bytes_max.0 <= config.limit.0 && stats.write_errors > 0,
            "{stats:?}"
        );
        far.control.heal();
        wait_until("write-back works again", || far.region.evict_all().is_ok());
        far.check(0..done);
        far.discard(done..done + 1);
        resume();
    });
    // The thread has gone on where it stopped.
    far.check(0..pages);
    far.expect_healthy();
    assert_eq!((sigbus_count(), far.stats().poisoned), (1, 1));
    let stats = far.stats();
    assert!(stats.resident_bytes_max.0 <= config.limit.0, "{stats:?}");
}

fn expect_no_room(ended: Option<Ended>) {
    let Some(ended) = ended else { return };
    let lines = ended.text.lines().count();
    assert!(lines < 100, "{lines} lines of messages:\n{}", ended.text);
    ended.expect_success();
    ended.expect_said(&["farheap: page at 0x", "no page can be evicted", "SIGBUS"]);
}

fn write_errors(errno: i32) -> impl Fn(&Far) {
    move |far| far.control.fail_fraction(Op::Write, 1_000_000, errno)
}

#[test]
fn write_errors_keep_pages_in_memory() {
    let name = "writes::write_errors_keep_pages_in_memory";
    expect_no_room(in_child(name, || no_write_back(Install::Auto, write_errors(libc::EIO))));
}

#[test]
fn write_errors_keep_pages_in_memory_on_an_old_kernel() {
    let name = "writes::write_errors_keep_pages_in_memory_on_an_old_kernel";
    expect_no_room(in_child(name, || no_write_back(Install::Copy, write_errors(libc::EIO))));
}

#[test]
fn a_full_device_keeps_pages_in_memory() {
    let name = "writes::a_full_device_keeps_pages_in_memory";
    expect_no_room(in_child(name, || no_write_back(Install::Auto, write_errors(libc::ENOSPC))));
}

#[test]
fn a_full_device_keeps_pages_in_memory_on_an_old_kernel() {
    let name = "writes::a_full_device_keeps_pages_in_memory_on_an_old_kernel";
    expect_no_room(in_child(name, || no_write_back(Install::Copy, write_errors(libc::ENOSPC))));
}

/// Has the kernel write to the start of a page; returns whether it could.
fn fill_by_the_kernel(far: &Far, page: usize) -> bool {
    let random = std::fs::File::open("/dev/urandom").expect("every system has it");
    let place = std::ptr::with_exposed_provenance_mut::<u8>(far.addr(page));
    // SAFETY: the first bytes of a page of this case, to which nobody else refers.
    let bytes = unsafe { std::slice::from_raw_parts_mut(place, 8) };
    random.read_at(bytes, 0).is_ok_and(|read| read == bytes.len())
}

#[test]
fn faults_one_after_the_other_wait_for_a_full_device_once() {
    const REFUSED: usize = 10;
    for &install in WAYS {
        let config = config(install).deadline(Duration::from_secs(2));
        let pages = 3 * (config.limit.0 / 4096) as usize;
        let Some(far) = Far::new(config.clone(), pages, seed("full device")) else { return };
        if !far.region.serves_kernel_faults() {
            return println!("skipped: a call of the kernel fails here without a fault");
        }
        far.control.fail_fraction(Op::Write, 1_000_000, libc::ENOSPC);
        let fill = |page| {
            let began = Instant::now();
            (!fill_by_the_kernel(&far, page)).then(|| began.elapsed())
        };
        let waits: Vec<Duration> = (0..pages).filter_map(fill).take(REFUSED).collect();
        assert_eq!(waits.len(), REFUSED, "there was room");
        assert!(waits.iter().sum::<Duration>() >= config.deadline, "given up after {waits:?}");
        // Each of the others is refused at once: even where a thread does not run for seconds, not half of them wait.
        let long = waits.iter().filter(|wait| **wait >= config.deadline / 2).count();
        assert!(long < REFUSED / 2, "waited {waits:?}");
        // Writes that the device takes are progress: later faults have a deadline of their own.
        far.control.heal();
        wait_until("write-back works again", || far.region.evict_all().is_ok());
        far.discard(0..pages);
        assert!(fill_by_the_kernel(&far, pages - 1));
        far.expect_healthy();
    }
}

#[test]
fn a_device_that_is_gone_keeps_pages_in_memory() {
    let name = "writes::a_device_that_is_gone_keeps_pages_in_memory";
    let gone = |far: &Far| far.control.vanish(libc::ENODEV);
    expect_no_room(in_child(name, || no_write_back(Install::Auto, gone)));
}

/// What was handed to a device that never answers can still be read, until there is no room.
#[test]
fn a_device_that_never_answers_a_write_ends_in_sigbus_not_in_a_hang() {
    let name = "writes::a_device_that_never_answers_a_write_ends_in_sigbus_not_in_a_hang";
    let body = || {
        for install in [Install::Auto, Install::Copy] {
            let config = config(install).deadline(DEADLINE);
            let pages = 3 * (config.limit.0 / 4096) as usize;
            let Some(far) = Far::new(config, pages, 1) else { return };
            park_on_sigbus();
            far.control.pause();
            let before = sigbus_count();
            let written = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                write_behind(scope, &far, &written);
                sigbus_addrs(before + 1);
                let done = written.load(Ordering::Acquire);
                // One that the device still holds on to: no room for it either, and no hang.
                let thread = far.touch(0);
                wait_until("an answer", || thread.is_finished() || sigbus_count() == before + 2);
                let lost = sigbus_count() - before;
                far.control.release();
                wait_until("write-back works again", || far.region.evict_all().is_ok());
                far.check(1..done);
                far.discard(0..1);
                far.discard(done..done + 1);
                resume();
                thread.join().expect("resumed");
                assert_eq!(far.stats().poisoned, lost as u64);
            });
            far.check(1..pages);
            far.expect_healthy();
        }
    };
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
    ended.expect_said(&["does not answer a write", "ETIMEDOUT"]);
}

#[test]
fn slow_writes_are_waited_for() {
    let _watchdog = watchdog("slow writes", HUNG);
    for &install in WAYS {
        let config = config(install);
        let pages = 2 * (config.limit.0 / 4096) as usize;
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.control.delay(Duration::from_millis(10));
        far.fill(0..pages);
        far.control.delay(Duration::ZERO);
        far.check(0..pages);
        assert_eq!((far.stats().poisoned, far.stats().write_errors), (0, 0));
    }
}

/// Writes that come back after their deadline count as errors, and cost nothing.
#[test]
fn late_writes_are_reported_and_lose_nothing() {
    let _watchdog = watchdog("late writes", HUNG);
    let config = config(Install::Auto).deadline(DEADLINE);
    let Some(far) = Far::new(config, 256, 1) else { return };
    far.fill(0..256);
    far.control.delay(DEADLINE * 3);
    far.region.evict_all().expect_err("the device is late");
    assert!(far.stats().write_errors > 0);
    // Still in memory, whatever the device does.
    far.check(0..256);
    far.control.heal();
    wait_until("write-back works again", || far.region.evict_all().is_ok());
    far.check(0..256);
    far.expect_healthy();
    assert_eq!(far.stats().poisoned, 0);
}

/// A store whose memory the kernel does not pin gives stuck pages back whole: no room is needed.
#[test]
fn pages_of_a_write_that_never_ends_are_there_without_room_for_a_copy() {
    let name = "writes::pages_of_a_write_that_never_ends_are_there_without_room_for_a_copy";
    let body = || {
        {
            // Long enough for the thread that looks, also on a busy machine.
            let config = config(Install::Auto).deadline(DEADLINE * 5);
            let most = (config.limit.0 / 4096) as usize;
            let Some(far) = Far::new(config.clone(), 3 * most, 1) else { return };
            park_on_sigbus();
            let before = sigbus_count();
            far.control.pause();
            let written = AtomicUsize::new(0);
            std::thread::scope(|scope| {
                write_behind(scope, &far, &written);
                // There is no room for a fresh page any more, nor for a copy of an old one.
                sigbus_addrs(before + 1);
                let done = written.load(Ordering::Acquire);
                far.check(0..done);
                assert_eq!(sigbus_count(), before + 1);
                far.control.release();
                wait_until("write-back works again", || far.region.evict_all().is_ok());
                far.check(0..done);
                far.discard(done..done + 1);
                resume();
            });
            far.check(0..far.pages);
            far.expect_healthy();
            let stats = far.stats();
            assert_eq!(stats.poisoned, 1);
            assert!(stats.resident_bytes_max.0 <= config.limit.0, "{stats:?}");
            far.discard(0..far.pages);
            wait_until("slots come back", || far.stats().stored_bytes.0 == 0);
        }
    };
    let Some(ended) = in_child(name, body) else { return };
    ended.expect_success();
    ended.expect_said(&["does not answer a write", "ETIMEDOUT"]);
}

/// Memory that is freed and used again while its old content is stuck on the way out.
#[test]
fn a_discarded_page_can_be_used_while_its_write_is_stuck() {
    let _watchdog = watchdog("discard under write", HUNG);
    let Some(far) = Far::new(config(Install::Auto), 64, 1) else { return };
    far.fill(0..64);
    far.control.pause();
    std::thread::scope(|scope| {
        scope.spawn(|| far.region.evict_all());
        wait_until("writes", || far.control.held() > 0);
        far.discard(0..64);
        far.fill(0..64);
        far.check(0..64);
        far.control.release();
    });
    far.expect_healthy();
    far.discard(0..64);
    wait_until("slots come back", || far.stats().stored_bytes.0 == 0);
}

/// A write that hangs moves no pages, which is no reason to take the device for a quiet one: the evictor would wait for it.
#[test]
fn a_device_that_hangs_is_not_asked_to_take_space_back() {
    let _watchdog = watchdog("space of a device that hangs", HUNG);
    let config = config(Install::Auto).deadline(HUNG);
    let pages = 3 * (config.limit.0 / 4096) as usize;
    let Some(far) = Far::new(config, pages, 1) else { return };
    far.fill(0..64);
    far.region.evict_all().expect("the device takes them");
    far.control.pause();
    std::thread::scope(|scope| {
        scope.spawn(|| far.fill(64..pages));
        wait_until("writes", || far.control.held() > 0);
        let before = far.control.discards();
        far.discard(0..32);
        // Three times as long as until a device counts as quiet.
        std::thread::sleep(Duration::from_millis(1500));
        let meanwhile = far.control.discards();
        far.control.release();
        assert_eq!(meanwhile, before);
    });
    far.check(32..pages);
    far.expect_healthy();
    far.discard(32..pages);
    wait_until("space goes back", || far.control.discards() > 0);
}

/// Places where an earlier write may still come.
#[test]
fn pages_whose_places_are_barred_go_elsewhere_and_nothing_has_failed() {
    let _watchdog = watchdog("barred places", HUNG);
    for &install in WAYS {
        let pages = 3 * (config(install).limit.0 / 4096) as usize;
        let Some(far) = Far::new(config(install), pages, seed("barred places")) else { return };
        far.control.fail_fraction(Op::Write, 200_000, libc::EREMCHG);
        far.fill(0..pages);
        far.region.evict_all().expect("no write has failed");
        far.check(0..pages);
        far.expect_healthy();
        assert!(far.control.injected() > 0 && far.stats().write_errors == 0, "{:?}", far.stats());
    }
}

/// As above, where nothing is to be written: only zeros tell that the device works again.
#[test]
fn a_device_is_not_asked_more_slowly_because_places_are_barred() {
    const BARRED: u64 = 16;
    let _watchdog = watchdog("barred places of probes", HUNG);
    for &install in WAYS {
        let Some(far) = Far::new(config(install), 8, seed("barred probes")) else { return };
        far.control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
        far.fill(0..8);
        far.region.evict_all().expect_err("the device takes no writes");
        far.discard(0..8);
        let before = far.control.injected();
        far.control.fail_next(Op::Write, BARRED, libc::EREMCHG);
        far.control.fail_fraction(Op::Write, 0, libc::EIO);
        wait_until("write-back works again", || match far.region.evict_all() {
            Ok(()) => true,
            // That a place is barred is no failure, and so not the cause of one.
            Err(Error::Io { errno: libc::EIO, .. }) => false,
            Err(error) => panic!("{error}"),
        });
        assert!(far.control.injected() >= before + BARRED, "{}", far.control.injected() - before);
        far.expect_healthy();
    }
}

#[test]
fn random_write_errors_lose_nothing() {
    let _watchdog = watchdog("random write errors", HUNG);
    let seed = seed("random write errors");
    for &install in WAYS {
        let config = config(install);
        let pages = 2 * (config.limit.0 / 4096) as usize;
        let Some(far) = Far::new(config, pages, seed) else { return };
        far.control.fail_fraction(Op::Write, 300_000, libc::EIO);
        far.fill(0..pages);
        far.check(0..pages);
        assert!(far.control.injected() > 0);
        far.control.heal();
        far.expect_healthy();
        assert_eq!(far.stats().poisoned, 0);
    }
}

/// Takes memory, a few pages at a time, and fills it, until it is refused.
fn fill_until_refused(far: &Far) -> Vec<NonNull<[u8]>> {
    let mut blocks = Vec::new();
    while let Ok(block) = far.region.map(far.len(8)) {
        (0..8).for_each(|page| fill_page(block.as_ptr().addr() + page * PAGE, 7));
        blocks.push(block);
    }
    blocks
}

/// Write-back fails until all data is gone: then there is nothing to write that would tell that the
/// device has recovered.
fn recover(install: Install, errno: i32) {
    let config = config(install);
    let pages = 2 * (config.limit.0 / 4096) as usize;
    let Some(far) = Far::new(config, 8, 1) else { return };
    far.control.fail_fraction(Op::Write, 1_000_000, errno);
    far.fill(0..8);
    far.region
        .advise(&[bytes(far.ptr(0), far.len(8))], Advice::PageOutNow)
        .expect_err("the device takes no writes");
    let blocks = fill_until_refused(&far);
    let freed = blocks.len();
    for block in blocks {
        // SAFETY: mapped by this case, which is done with it.
        unsafe { far.region.unmap(block) }.expect("just mapped");
    }
    far.discard(0..8);
    // What was there before is there again, though the device still fails.
    let blocks = fill_until_refused(&far);
    assert!(blocks.len() + 2 >= freed, "{} of {freed} blocks", blocks.len());
    for block in blocks {
        // SAFETY: as above.
        unsafe { far.region.unmap(block) }.expect("just mapped");
    }
    far.control.heal();
    let mut taken = None;
    wait_until("more than the limit is granted again", || {
        taken = far.region.map(far.len(pages)).ok();
        taken.is_some()
    });
    let range = taken.expect("waited for");
    // SAFETY: as above.
    unsafe { far.region.unmap(range) }.expect("just mapped");
    far.expect_healthy();
}

#[test]
fn a_device_that_recovers_is_used_again_though_there_is_nothing_to_write() {
    let name = "writes::a_device_that_recovers_is_used_again_though_there_is_nothing_to_write";
    let body = || {
        for &install in WAYS {
            recover(install, libc::ENOSPC);
            recover(install, libc::EIO);
        }
    };
    if let Some(ended) = in_child(name, body) {
        ended.expect_success();
    }
}
