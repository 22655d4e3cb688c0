//! The limit when it cannot be held, and arguments that make no sense.
#![expect(unsafe_code, reason = "forks, and discards far memory")]

use crate::common::{amount, bytes, mem_store, region, watchdog};
use crate::harness::{
    Far, HUNG, Stop, WAYS, config, in_child, park_on_sigbus, read_word, sigbus_count, stamp,
    wait_until,
};
use farheap::region::{Advice, Install, Region, RegionConfig};
use farheap::store::Op;
use farheap::{ByteCount, Error};
use std::ptr::NonNull;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

/// Pages that fit into the smallest limit.
fn resident_pages(config: &RegionConfig) -> usize {
    (config.limit.0 / 4096) as usize
}

#[test]
fn more_pins_than_the_limit_has_room_for_are_an_error() {
    let _watchdog = watchdog("too many pins", HUNG);
    for &install in WAYS {
        let config = config(install);
        let fit = resident_pages(&config);
        let Some(far) = Far::new(config, 2 * fit, 1) else { return };
        let error =
            far.region.pin(bytes(far.ptr(0), far.len(2 * fit))).expect_err("twice the limit");
        assert!(matches!(error, Error::LimitExceeded { .. }), "{error}");
        // As many as there may be; everything else goes on in the rest.
        let pinned =
            far.region.pin(bytes(far.ptr(0), far.len(fit / 2))).expect("half of the limit");
        far.region.pin(bytes(far.ptr(fit / 2), far.len(fit / 2))).expect_err("as much again");
        far.fill(0..2 * fit);
        far.check(0..2 * fit);
        // What is not there would have to be read, and the first read fails.
        let failed = far.control.injected();
        far.control.fail_next(Op::Read, 1, libc::EIO);
        far.check(0..fit / 2);
        assert_eq!(far.control.injected(), failed, "pinned pages do not fault");
        far.control.heal();
        drop(pinned);
        far.region.unpin(bytes(far.ptr(0), far.len(fit / 2))).expect_err("is not pinned any more");
        far.expect_healthy();
    }
}

#[test]
fn unmapped_and_discarded_pages_give_their_pins_back() {
    let _watchdog = watchdog("pins of unmapped pages", HUNG);
    let config = config(Install::Auto);
    let half = resident_pages(&config) / 2;
    let Some(far) = Far::new(config, 8, 1) else { return };
    for _ in 0..4 {
        let len = far.len(half);
        let ptr = far.region.map(len).expect("there is room").cast::<u8>();
        far.region
            .pin(bytes(ptr.as_ptr(), len))
            .map(std::mem::forget)
            .expect("nothing else is pinned");
        // SAFETY: mapped by this case, which is done with it.
        unsafe { far.region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
            .expect("just mapped");
        let ptr = far.region.map(len).expect("there is room").cast::<u8>();
        far.region
            .pin(bytes(ptr.as_ptr(), len))
            .map(std::mem::forget)
            .expect("nothing else is pinned");
        // SAFETY: nobody needs the content.
        unsafe { far.region.discard(bytes(ptr.as_ptr(), len).cast_mut()) }.expect("just mapped");
        far.region.unpin(bytes(ptr.as_ptr(), len)).expect_err("a discarded page is not pinned");
        // SAFETY: mapped by this case, which is done with it.
        unsafe { far.region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
            .expect("just mapped");
    }
    far.expect_healthy();
}

/// A page with content is not lost for want of room: its thread waits, and the process is told.
#[test]
fn a_limit_below_what_is_pinned_is_an_error_and_faults_wait() {
    let name = "limits::a_limit_below_what_is_pinned_is_an_error_and_faults_wait";
    let ended = in_child(name, || {
        let small = config(Install::Auto);
        let lowered = small.limit;
        let config = small.clone().limit(ByteCount(small.limit.0 * 4));
        let pages = resident_pages(&config);
        let nobody_reads = crate::messages::FullPipe::new();
        let Some(far) = Far::new(config.clone(), pages, 1) else { return };
        park_on_sigbus();
        let pinned = pages / 2;
        far.fill(0..pages);
        let pins = far.region.pin(bytes(far.ptr(0), far.len(pinned))).expect("half of the limit");
        let error = far.region.set_limit(lowered).expect_err("more than that is pinned");
        assert!(matches!(error, Error::LimitExceeded { .. }), "{error}");
        far.check(0..pinned);
        let thread = far.touch(pages - 1);
        nobody_reads.read_until("a thread waits for its page");
        assert!(!thread.is_finished());
        drop(pins);
        far.region.set_limit(lowered).expect("nothing is pinned");
        assert!(far.stats().resident_bytes.0 <= lowered.0);
        assert_eq!(thread.join().expect("there is room"), stamp(pages - 1));
        far.check(0..pages);
        far.region.set_limit(config.limit).expect("raising needs nothing");
        far.expect_healthy();
        assert_eq!((sigbus_count(), far.stats().poisoned), (0, 0));
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
    ended.expect_said(&["a thread waits", "no page can be evicted", "raise the limit"]);
}

#[test]
fn a_lowered_limit_is_reached_with_every_page_dirty() {
    let _watchdog = watchdog("lowered limit", HUNG);
    for &install in WAYS {
        let small = config(install);
        let lowered = small.limit;
        let config = small.clone().limit(ByteCount(small.limit.0 * 2));
        let pages = resident_pages(&config);
        let Some(far) = Far::new(config.clone(), pages, 1) else { return };
        for _ in 0..3 {
            far.fill(0..pages);
            far.region.set_limit(lowered).expect("everything can be written back");
            assert!(far.stats().resident_bytes.0 <= lowered.0);
            far.check(0..pages);
            far.region.set_limit(config.limit).expect("raising needs nothing");
        }
        assert!(far.stats().resident_bytes_max.0 <= config.limit.0);
    }
}

/// What an explicit eviction could not take out can still be taken out later.
#[test]
fn pages_that_refused_an_eviction_are_not_forgotten() {
    let _watchdog = watchdog("refused evictions", HUNG);
    let small = config(Install::Auto);
    let lowered = small.limit;
    let config = small.clone().limit(ByteCount(small.limit.0 * 4));
    let pages = resident_pages(&config) / 2;
    let Some(far) = Far::new(config, pages, 1) else { return };
    far.fill(0..pages);
    let pinned = far.region.pin(bytes(far.ptr(0), far.len(pages))).expect("half of the limit");
    far.evict(0..pages);
    drop(pinned);
    far.region.set_limit(lowered).expect("nothing is pinned");
    far.check(0..pages);
}

/// A prefetch that there is no room for is dropped, not waited for.
#[test]
fn prefetching_more_than_fits_leaves_room_for_faults() {
    let _watchdog = watchdog("prefetch of too much", HUNG);
    for &install in WAYS {
        let config = config(install);
        let pages = 4 * resident_pages(&config);
        let Some(far) = Far::new(config, pages, 1) else { return };
        far.fill(0..pages);
        for _ in 0..4 {
            far.region
                .advise(&[bytes(far.ptr(0), far.len(pages))], Advice::WillNeed)
                .expect("inside the region");
            far.check(pages - 64..pages);
        }
        far.check(0..pages);
    }
}

#[test]
fn many_threads_that_fault_on_one_page_all_go_on() {
    const THREADS: usize = 6;
    const ROUNDS: usize = 1500;
    let _watchdog = watchdog("racing faults", HUNG);
    for &install in WAYS {
        for handlers in [1, 2] {
            let config = config(install).handlers(handlers);
            let Some(far) = Far::new(config, 4, 1) else { return };
            far.fill(0..4);
            let (start, end) = (Barrier::new(THREADS), Barrier::new(THREADS));
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (far, start, end) = (&far, &start, &end);
                    scope.spawn(move || {
                        for round in 0..ROUNDS / WAYS.len() {
                            if thread == 0 {
                                match round % 3 {
                                    0 => far.evict(0..1),
                                    1 => far.discard(1..2),
                                    _ => far.evict(0..4),
                                }
                            }
                            start.wait();
                            far.check(0..1);
                            read_word(far.addr(1));
                            far.check(2..4);
                            end.wait();
                        }
                    });
                }
            });
            far.expect_healthy();
        }
    }
}

// The rows of the table in which the public peer fails.

#[test]
fn a_region_may_be_longer_than_its_store_but_not_hold_more() {
    let _watchdog = watchdog("longer than its store", HUNG);
    let config = config(Install::Auto);
    let store = ByteCount::mib(16);
    let Some(region) = region(config.clone(), mem_store(store)) else { return };
    let too_much = ByteCount(store.0 + config.limit.0 + 4096);
    let error = region.map(too_much).expect_err("device and limit cannot keep so much");
    assert!(matches!(error, Error::StoreFull { .. }), "{error}");
    // As much as is granted can be used to the last byte.
    let piece = ByteCount::kib(64);
    let base = region.map(piece).expect("there is room").cast::<u8>().as_ptr() as usize;
    let mut pages = piece.as_usize() / 4096;
    while let Ok(next) = region.map(piece) {
        assert_eq!(next.cast::<u8>().as_ptr() as usize, base + pages * 4096, "in order");
        pages += piece.as_usize() / 4096;
    }
    let least = (store.0 + config.limit.0 * 3 / 4) / 4096;
    assert!(pages as u64 >= least, "{pages} pages, at least {least}");
    for round in 0..2u64 {
        for page in 0..pages {
            let value = (page as u64) << 8 | round | 1 << 63;
            crate::harness::write_word(base + page * 4096, value);
        }
        for page in 0..pages {
            assert_eq!(read_word(base + page * 4096), (page as u64) << 8 | round | 1 << 63);
        }
    }
}

#[test]
fn a_limit_of_a_few_pages_is_refused_and_the_smallest_works() {
    let _watchdog = watchdog("small limits", HUNG);
    for pages in [1, 8, 16, 63] {
        let tiny = RegionConfig::new().limit(ByteCount(4096 * pages));
        let error = Region::create(tiny, mem_store(ByteCount::mib(1))).expect_err("too small");
        assert!(matches!(error, Error::LimitTooSmall { .. }), "{error}");
    }
    {
        let config = config(Install::Auto);
        let pages = 2 * resident_pages(&config);
        let Some(far) = Far::new(config.clone(), pages, 1) else { return };
        std::thread::scope(|scope| {
            for part in 0..4 {
                let (far, range) = (&far, part * pages / 4..(part + 1) * pages / 4);
                scope.spawn(move || {
                    far.fill(range.clone());
                    far.check(range);
                });
            }
        });
        assert!(far.stats().resident_bytes_max.0 <= config.limit.0);
    }
}

#[test]
fn one_of_two_regions_outlives_the_other() {
    let _watchdog = watchdog("two regions", HUNG);
    for _ in 0..8 {
        let Some(one) = Far::new(config(Install::Auto), 512, 1) else { return };
        let Some(two) = Far::new(config(Install::Auto), 512, 2) else { return };
        one.fill(0..512);
        two.fill(0..512);
        let base = NonNull::new(one.addr(0) as *mut u8).expect("mapped");
        // SAFETY: all that the case has mapped.
        unsafe { one.region.unmap(NonNull::slice_from_raw_parts(base, one.len(512).as_usize())) }
            .expect("mapped by the case");
        drop(one);
        two.check(0..512);
        two.expect_healthy();
    }
}

#[test]
fn evicting_in_a_loop_while_others_rewrite_and_cause_evictions_does_not_deadlock() {
    let _watchdog = watchdog("evict under load", HUNG);
    for &install in WAYS {
        let config = config(install);
        let pages = 2 * resident_pages(&config);
        let Some(far) = Far::new(config, pages, 1) else { return };
        let stop = Stop::default();
        std::thread::scope(|scope| {
            for half in 0..2 {
                let (far, stop) = (&far, &stop);
                let range = half * pages / 2..(half + 1) * pages / 2;
                scope.spawn(move || {
                    for _ in 0..3 {
                        far.fill(range.clone());
                        far.check(range.clone());
                    }
                    stop.now();
                });
            }
            while !stop.is_set() {
                far.region.evict_all().expect("the store works");
                far.evict(0..64);
            }
        });
        far.check(0..pages);
    }
}

/// Open descriptors of this process, and its resident and virtual bytes.
fn footprint() -> (usize, usize, usize) {
    let open = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    let statm = std::fs::read_to_string("/proc/self/statm").expect("procfs");
    let mut fields = statm.split(' ').map(|field| field.parse::<usize>().expect("a number"));
    let (size, resident) = (fields.next().expect("size"), fields.next().expect("resident"));
    (open, size * 4096, resident * 4096)
}

#[test]
fn two_hundred_regions_one_after_the_other_leak_nothing() {
    // A process of its own: other cases open and close descriptors.
    let ended = in_child("limits::two_hundred_regions_one_after_the_other_leak_nothing", || {
        let cycle = || {
            let far = Far::new(config(Install::Auto), 256, 1)?;
            far.fill(0..256);
            far.check(0..256);
            Some(())
        };
        for _ in 0..5 {
            if cycle().is_none() {
                return;
            }
        }
        let before = footprint();
        (0..200).for_each(|_| assert!(cycle().is_some()));
        // The kernel closes what io_uring held a little later.
        wait_until("descriptors are closed", || footprint().0 <= before.0);
        let after = footprint();
        assert!(after.1 < before.1 + (64 << 20), "address space: {before:?} -> {after:?}");
        assert!(after.2 < before.2 + (32 << 20), "memory: {before:?} -> {after:?}");
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn a_fork_child_dies_instead_of_reading_zeros() {
    let name = "limits::a_fork_child_dies_instead_of_reading_zeros";
    let ended = in_child(name, || {
        let Some(far) = Far::new(config(Install::Copy), 64, 1) else { return };
        far.fill(0..64);
        far.evict(0..32);
        for page in [3, 40] {
            let addr = far.addr(page);
            // SAFETY: the child makes no call but `_exit`.
            #[expect(clippy::disallowed_methods, reason = "the case is about fork")]
            let child = unsafe { libc::fork() };
            if child == 0 {
                let wrong = i32::from(read_word(addr) != stamp(page));
                // SAFETY: ends the child.
                unsafe { libc::_exit(wrong) };
            }
            let mut status = 0;
            // SAFETY: the child is this process's and `status` is valid.
            let waited = unsafe { libc::waitpid(child, &mut status, 0) };
            assert_eq!(waited, child);
            assert!(libc::WIFSIGNALED(status), "page {page}: ended with {status:#x}");
        }
        far.check(0..64);
        far.expect_healthy();
    });
    let Some(ended) = ended else { return };
    ended.expect_success();
}

#[test]
fn bad_arguments_are_errors() {
    let _watchdog = watchdog("bad arguments", HUNG);
    let Some(far) = Far::new(config(Install::Auto), 16, 1) else { return };
    far.fill(0..16);
    let region = &far.region;
    let bad = |result: farheap::Result<()>, what: &str| {
        let error = result.expect_err(what);
        assert!(matches!(error, Error::BadRange { .. }), "{what}: {error}");
    };
    let huge = ByteCount(u64::MAX);
    let local = Box::new([0u8; 4096]);
    bad(region.map(ByteCount(0)).map(drop), "map of nothing");
    bad(region.map(huge).map(drop), "map of too much");
    let error = region.map(ByteCount::gib(2)).expect_err("larger than the span");
    assert!(matches!(error, Error::AddressSpace { .. }), "{error}");
    let ranges = [
        (far.ptr(0), ByteCount(0), "nothing"),
        (far.ptr(0), huge, "too much"),
        (far.ptr(0), ByteCount::gib(2), "beyond the end"),
        (local.as_ptr(), ByteCount(4096), "foreign memory"),
        (std::ptr::null(), ByteCount(4096), "null"),
        (usize::MAX as *const u8, ByteCount(4096), "the last address"),
    ];
    let outside = region
        .advise(&[bytes(local.as_ptr(), ByteCount(4096))], Advice::PageOutNow)
        .expect_err("local memory");
    let said = format!("4096 bytes at {:p} lie outside of the region, 0x", local.as_ptr());
    assert!(outside.to_string().contains(&said), "{outside}");
    for (ptr, len, what) in ranges {
        bad(region.advise(&[bytes(ptr, len)], Advice::PageOutNow), what);
        bad(region.advise(&[bytes(ptr, len)], Advice::WillNeed), what);
        bad(region.pin(bytes(ptr, len)).map(std::mem::forget), what);
        bad(region.unpin(bytes(ptr, len)), what);
        if len.0 > 0 {
            // SAFETY: refused before anything happens.
            bad(unsafe { region.discard(bytes(ptr, len).cast_mut()) }, what);
        }
        if let Some(ptr) = NonNull::new(ptr.cast_mut()) {
            // SAFETY: refused before anything happens.
            bad(unsafe { region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }, what);
        }
    }
    let inside = |offset: usize| NonNull::new((far.addr(0) + offset) as *mut u8).expect("mapped");
    // SAFETY: refused before anything happens, as the next one.
    bad(
        unsafe { region.unmap(NonNull::slice_from_raw_parts(inside(100), far.len(1).as_usize())) },
        "not the start of a page",
    );
    // SAFETY: as above.
    bad(
        unsafe { region.unmap(NonNull::slice_from_raw_parts(inside(0), far.len(17).as_usize())) },
        "more than was mapped",
    );
    bad(region.unpin(bytes(far.ptr(0), far.len(1))), "never pinned");
    far.check(0..16);
    let twice = region.map(far.len(4)).expect("there is room").cast::<u8>();
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(twice, far.len(4).as_usize())) }
        .expect("just mapped");
    // SAFETY: as above.
    bad(
        unsafe { region.unmap(NonNull::slice_from_raw_parts(twice, far.len(4).as_usize())) },
        "unmapped already",
    );
    assert_eq!(far.stats().committed_bytes.0, far.len(16).0);
    far.expect_healthy();
}

#[test]
fn settings_that_cannot_work_are_refused() {
    let store = || mem_store(ByteCount::mib(8));
    let good = config(Install::Auto);
    let bad = [
        good.clone().limit(ByteCount(0)),
        good.clone().span(ByteCount(0)),
        good.clone().span(ByteCount(u64::MAX)),
        good.clone().handlers(0),
        good.clone().handlers(65),
    ];
    for config in bad {
        let error = Region::create(config.clone(), store()).expect_err("cannot work");
        let named = matches!(error, Error::Config { .. } | Error::LimitTooSmall { .. });
        assert!(named, "{config:?}: {error}");
    }
}

#[test]
fn hundreds_of_regions_at_once() {
    const REGIONS: usize = 300;
    let _watchdog = watchdog("many regions", HUNG);
    let small = config(Install::Auto).span(ByteCount::mib(64));
    let mut all = Vec::new();
    for n in 0..REGIONS {
        let Some(far) = Far::new(small.clone(), 8, n as u64) else { return };
        far.fill(0..8);
        all.push(far);
    }
    all.iter().for_each(|far| far.evict(0..4));
    all.iter().for_each(|far| far.check(0..8));
    // Every second one goes, the rest does not notice.
    let mut keep = false;
    all.retain(|_| {
        keep = !keep;
        keep
    });
    all.iter().for_each(|far| far.check(0..8));
}

#[test]
fn thousands_of_mappings_in_one_region() {
    let mappings = amount(40_000);
    let _watchdog = watchdog("many mappings", HUNG);
    let config = config(Install::Auto).span(ByteCount::gib(4));
    let Some(region) = region(config, mem_store(ByteCount::mib(512))) else { return };
    let len = ByteCount::kib(4);
    let mut all = Vec::with_capacity(mappings);
    for n in 0..mappings {
        let ptr = region.map(len).expect("there is room").cast::<u8>();
        crate::harness::write_word(ptr.as_ptr() as usize, n as u64 + 1);
        all.push(ptr);
    }
    for (n, ptr) in all.iter().enumerate() {
        assert_eq!(read_word(ptr.as_ptr() as usize), n as u64 + 1);
    }
    // In an order that leaves no two neighbours for long.
    all.sort_unstable_by_key(|ptr| stamp(ptr.as_ptr() as usize >> 12));
    for ptr in all {
        // SAFETY: mapped by this case, which is done with it.
        unsafe { region.unmap(NonNull::slice_from_raw_parts(ptr, len.as_usize())) }
            .expect("mapped above");
    }
    assert_eq!(region.stats().committed_bytes.0, 0);
}

#[test]
fn wakes_without_a_reason_do_no_harm() {
    let _watchdog = watchdog("spurious wakes", HUNG);
    let Some(far) = Far::new(config(Install::Auto), 1024, 1) else { return };
    far.fill(0..1024);
    let (stop, rounds) = (Stop::default(), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Prefetches of what is there, evictions of what is not: bells without work.
            while !stop.is_set() {
                far.region
                    .advise(&[bytes(far.ptr(0), far.len(1))], Advice::WillNeed)
                    .expect("inside the region");
                far.evict(1023..1024);
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        });
        for _ in 0..20 {
            far.evict(0..512);
            far.check(0..1024);
        }
        wait_until("rounds", || rounds.load(Ordering::Relaxed) > 100);
        stop.now();
    });
    far.expect_healthy();
}
