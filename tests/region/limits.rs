//! What counts against a region's limit: pinned pages, tables.
//!
//! Guards: G1.

#![expect(unsafe_code, reason = "reads and writes far memory")]
#![expect(clippy::disallowed_methods, reason = "does to far memory what a program may do")]

use crate::common::child::{case, run};
use crate::common::group::Group;
use crate::common::{bytes, eventually, mem_store, watchdog};
use farheap::manager::MemoryManager;
use farheap::pool::PoolConfig;
use farheap::region::{Region, RegionConfig};
use farheap::store::BlockStore;
use farheap::{ByteCount, Error};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

const HANG: Duration = Duration::from_secs(900);
const PAGE: usize = 4096;

/// A region alone, or `None` with the reason printed.
fn region(config: RegionConfig, store: ByteCount) -> Option<Region> {
    let config = config.span(ByteCount::gib(64));
    match Region::create(config, mem_store(store)) {
        Ok(region) => Some(region),
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("region: {error}"),
    }
}

/// Each of two regions or pools would overwrite the other's pages.
#[test]
fn a_store_has_one_user_at_a_time() {
    let store = mem_store(ByteCount::mib(16));
    let config = || smallest().span(ByteCount::gib(1));
    let first = match Region::create(config(), store.clone()) {
        Ok(first) => first,
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            return;
        }
        Err(error) => panic!("region: {error}"),
    };
    let sealed = config().encrypt(true);
    for config in [config(), sealed] {
        match Region::create(config, store.clone()) {
            Err(Error::Device { reason, .. }) => assert!(reason.contains("another region")),
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("a second region on one store"),
        }
    }
    let manager = MemoryManager::start(ByteCount::mib(8)).expect("a manager");
    match PoolConfig::new().create_on(store.clone(), &manager) {
        Err(Error::Device { reason, .. }) => assert!(reason.contains("another region or pool")),
        other => panic!("a pool on the store of a region: {other:?}"),
    }
    let _other = Region::create(config(), mem_store(ByteCount::mib(16))).expect("another store");
    drop(first);
    drop(Region::create(config(), store).expect("the store is free"));
}

/// 32 MiB on a device, of which every other MiB is freed then: bytes of the file before and after, as
/// soon as they are few.
fn free_every_other_mib(free: impl Fn(&Region)) -> Option<(u64, u64)> {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let store = BlockStore::create(&path, Some(ByteCount::mib(64)), false).expect("a new file");
    let config = smallest().span(ByteCount::gib(1));
    let region = crate::common::region(config, Arc::new(store))?;
    let base = region.map(ByteCount::mib(32)).expect("the span has room").cast::<u8>().as_ptr();
    for at in (0..32 << 20).step_by(PAGE) {
        // SAFETY: within the mapping, which this test alone uses.
        unsafe { base.wrapping_add(at).cast::<usize>().write_volatile(at + 1) };
    }
    region.evict_all().expect("the store has room");
    let occupied = || fs::metadata(&path).expect("the file").blocks() * 512;
    let before = occupied();
    for at in (0..32 << 20).step_by(2 << 20) {
        // SAFETY: nobody needs what is there.
        unsafe { region.discard(bytes(base.wrapping_add(at), ByteCount::mib(1)).cast_mut()) }
            .expect("inside");
    }
    free(&region);
    eventually(|| occupied() <= 17 << 20);
    for at in (1 << 20..2 << 20).step_by(PAGE) {
        // SAFETY: within the mapping.
        assert_eq!(unsafe { base.wrapping_add(at).cast::<usize>().read_volatile() }, at + 1);
    }
    Some((before, occupied()))
}

#[test]
fn freed_space_of_a_file_comes_back_when_it_is_asked_for_or_nothing_moves() {
    let _watchdog = watchdog("freed space", HANG);
    for free in [Region::return_space, |_: &Region| ()] {
        let Some((before, after)) = free_every_other_mib(free) else { return };
        assert!(before >= 32 << 20, "{before} bytes");
        assert!(after <= 17 << 20, "{after} bytes are left");
    }
}

/// Those of a device that others use again.
#[test]
fn a_region_that_ends_empty_leaves_its_file_empty() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("store");
    let store = BlockStore::create(&path, Some(ByteCount::mib(64)), false).expect("a new file");
    let config = smallest().span(ByteCount::gib(1)).encrypt(true);
    let Some(region) = crate::common::region(config, Arc::new(store)) else { return };
    let base = region.map(ByteCount::mib(32)).expect("the span has room").cast::<u8>();
    // SAFETY: the mapping, which this test alone uses.
    unsafe { base.as_ptr().write_bytes(7, 32 << 20) };
    region.evict_all().expect("the store has room");
    let occupied = || fs::metadata(&path).expect("the file").blocks() * 512;
    assert!(occupied() >= 32 << 20, "{} bytes", occupied());
    // SAFETY: nobody uses it any more.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(base, ByteCount::mib(32).as_usize())) }
        .expect("mapped");
    drop(region);
    assert!(occupied() <= 64 << 10, "{} bytes are left", occupied());
}

fn smallest() -> RegionConfig {
    RegionConfig::new().limit(ByteCount::mib(8))
}

#[test]
fn a_page_that_is_pinned_many_times_counts_once() {
    let _watch = watchdog("pins of one page", HANG);
    let Some(region) = region(smallest(), ByteCount::mib(32)) else { return };
    let most = (8 << 20) / PAGE * 3 / 4;
    let data = region.map(ByteCount((2 * most * PAGE) as u64)).expect("mapped").cast::<u8>();
    let byte = |page: usize| data.as_ptr().wrapping_add(page * PAGE);
    for _ in 0..255 {
        region
            .pin(bytes(byte(0), ByteCount(1)))
            .map(std::mem::forget)
            .expect("one page, many pins");
    }
    let error =
        region.pin(bytes(byte(0), ByteCount(1))).expect_err("its pins are counted in 8 bits");
    assert!(error.to_string().contains("255 pins"), "{error}");
    // All but one of the pages that may be pinned are left, and pinning them again costs nothing.
    let rest = ByteCount(((most - 1) * PAGE) as u64);
    let pinned = region.pin(bytes(byte(1), rest)).expect("one page is pinned");
    region.pin(bytes(byte(1), rest)).map(std::mem::forget).expect("pinned already");
    let error = region.pin(bytes(byte(most), ByteCount(1))).expect_err("one page too many");
    assert!(matches!(error, Error::LimitExceeded { .. }), "{error}");
    drop(pinned);
    region.pin(bytes(byte(most), ByteCount(1))).expect_err("still pinned once");
    region.unpin(bytes(byte(1), ByteCount(1))).expect("pinned once");
    region.pin(bytes(byte(most), ByteCount(1))).map(std::mem::forget).expect("in its place");
    // A discard ends pins.
    // SAFETY: nobody needs the contents.
    unsafe { region.discard(bytes(byte(0), ByteCount(PAGE as u64)).cast_mut()) }.expect("mapped");
    region.pin(bytes(byte(most + 1), ByteCount(1))).map(std::mem::forget).expect("in its place");
    region.pin(bytes(byte(most + 2), ByteCount(1))).expect_err("as many as may be");
}

/// Every second page has a mapping of its own, so that none leaves with its neighbours, and faults take whatever room
/// there is.
#[test]
fn pages_of_many_mappings_leave_within_the_limit() {
    let _watch = watchdog("pages of many mappings", HANG);
    const PAGES: usize = 4096;
    const THREADS: usize = 4;
    let config = RegionConfig::new().limit(ByteCount::mib(8));
    let Some(region) = region(config, ByteCount::mib(512)) else { return };
    let data = region.map(ByteCount((PAGES * PAGE) as u64)).expect("mapped").cast::<u8>().as_ptr()
        as usize;
    let word = |page: usize| (data + page * PAGE) as *mut u64;
    for page in 0..PAGES {
        // SAFETY: inside the range that was mapped above, which only this case uses.
        unsafe { word(page).write(page as u64) };
        if page % 2 == 0 {
            continue;
        }
        // SAFETY: advice; contents stay.
        let advised = unsafe { libc::madvise(word(page).cast(), PAGE, libc::MADV_NOHUGEPAGE) };
        assert_eq!(advised, 0, "{}", std::io::Error::last_os_error());
    }
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for round in 0..8 {
                    for page in (thread..PAGES).step_by(THREADS) {
                        let word = (data + page * PAGE) as *mut u64;
                        // SAFETY: as above, and each thread has pages of its own.
                        let value = unsafe { word.read() };
                        assert_eq!(value, (page + round * PAGES) as u64);
                        // SAFETY: as above.
                        unsafe { word.write(value + PAGES as u64) };
                    }
                }
            });
        }
    });
    let stats = region.stats();
    assert!(stats.pages_out > 0 && stats.poisoned == 0, "{stats}");
    assert!(stats.resident_bytes_max.0 <= stats.limit_bytes.0, "{stats:?}");
}

/// Writes one word of each page, or checks it.
fn write_pages(data: NonNull<u8>, pages: usize, seed: u64) {
    for page in 0..pages {
        // SAFETY: mapped by the test, which has given away no reference.
        unsafe { data.as_ptr().wrapping_add(page * PAGE).cast::<u64>().write(seed ^ page as u64) };
    }
}

fn check_pages(data: NonNull<u8>, pages: usize, seed: u64) {
    for page in 0..pages {
        // SAFETY: as above; written before.
        let word = unsafe { data.as_ptr().wrapping_add(page * PAGE).cast::<u64>().read() };
        assert_eq!(word, seed ^ page as u64, "page {page}");
    }
}

#[test]
fn tables_come_back_when_what_they_describe_is_freed() {
    let _watch = watchdog("tables come back", HANG);
    let Some(region) = region(smallest(), ByteCount::mib(96)) else { return };
    let tables = || ByteCount(region.stats().metadata_bytes.0);
    let start = tables();
    let len = ByteCount::mib(64);
    let pages = len.as_usize() / PAGE;
    for round in 0..2 {
        let data = region.map(len).expect("room").cast::<u8>();
        write_pages(data, pages, round);
        check_pages(data, pages, round);
        let full = tables();
        assert!(full.get() >= start.get() + (500 << 10), "{full} for {len}");
        // SAFETY: nobody uses it any more.
        unsafe { region.unmap(NonNull::slice_from_raw_parts(data, len.as_usize())) }
            .expect("mapped above");
        // Of slots that were in use a few stay ready.
        let back = || tables() <= ByteCount(start.get() + (64 << 10));
        assert!(eventually(back), "{} of {full} are still charged\n{}", tables(), region.stats());
    }
    let stats = region.stats();
    assert!(stats.resident_bytes_max.0 <= 8 << 20, "{stats}");
    assert!(eventually(|| region.stats().stored_bytes.0 == 0), "{stats}");
}

#[test]
fn tables_of_a_part_stay_while_another_part_is_in_use() {
    let _watch = watchdog("tables of parts", HANG);
    let Some(region) = region(smallest(), ByteCount::mib(64)) else { return };
    let (count, part) = (16, ByteCount::mib(2));
    let pages = part.as_usize() / PAGE;
    let parts: Vec<_> = (0..count).map(|_| region.map(part).expect("room").cast::<u8>()).collect();
    for round in 0..6_u64 {
        // Threads fill some while others are freed and filled again.
        std::thread::scope(|scope| {
            for thread in 0..4_usize {
                let (region, parts) = (&region, &parts);
                let part_of = move |n: usize| (n * 4 + thread, parts[n * 4 + thread]);
                let ptrs: Vec<(usize, usize)> =
                    (0..4).map(part_of).map(|(n, ptr)| (n, ptr.as_ptr() as usize)).collect();
                scope.spawn(move || {
                    for (n, addr) in ptrs {
                        let data = NonNull::new(addr as *mut u8).expect("mapped");
                        let seed = round << 32 | (n as u64) << 24;
                        write_pages(data, pages, seed);
                        check_pages(data, pages, seed);
                        if (n as u64 + round).is_multiple_of(3) {
                            // SAFETY: this thread's part; nobody needs the contents.
                            unsafe { region.discard(bytes(data.as_ptr(), part).cast_mut()) }
                                .expect("mapped");
                            // SAFETY: mapped, and zero again.
                            assert_eq!(unsafe { data.as_ptr().cast::<u64>().read() }, 0);
                            write_pages(data, pages, seed);
                        }
                    }
                });
            }
        });
        for (n, data) in parts.iter().enumerate() {
            check_pages(data.cast(), pages, round << 32 | (n as u64) << 24);
        }
    }
    assert!(region.stats().resident_bytes_max.0 <= 8 << 20, "{}", region.stats());
}

#[test]
fn memory_whose_tables_do_not_fit_is_refused_and_what_is_granted_can_be_used() {
    let _watch = watchdog("tables that do not fit", HANG);
    let config = smallest();
    let most = config.far_max();
    assert!(most >= ByteCount::mib(200) && most <= ByteCount::gib(1), "{most}");
    let Some(region) = region(config, ByteCount::gib(1)) else { return };
    let part = ByteCount::mib(8);
    let pages = part.as_usize() / PAGE;
    let mut parts = Vec::new();
    let error = loop {
        match region.map(part) {
            Ok(data) => parts.push(data),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::LimitExceeded { .. }), "{error}");
    assert!(error.to_string().contains("tables of"), "{error}");
    let got = ByteCount(parts.len() as u64 * part.get());
    assert!(got <= most && got.get() + 2 * part.get() >= most.get(), "{got} of {most}");
    // Each page of it is touched, and leaves.
    for (n, data) in parts.iter().enumerate() {
        write_pages(data.cast(), pages, n as u64);
    }
    for (n, data) in parts.iter().enumerate().step_by(8) {
        check_pages(data.cast(), pages, n as u64);
    }
    let stats = region.stats();
    assert_eq!(stats.poisoned, 0, "{stats}");
    assert!(stats.resident_bytes_max.0 <= stats.limit_bytes.0, "{stats}");
    assert!(stats.metadata_bytes.0 <= stats.limit_bytes.0 * 5 / 8, "{}", stats.metadata_bytes.0);
    // With some given back, as much is granted again.
    let given = parts.pop().expect("several");
    // SAFETY: nobody uses it any more.
    unsafe { region.unmap(given) }.expect("mapped above");
    region.map(part).expect("room for the same again");
    region.map(part).expect_err("and not for more");
}

/// Tables cannot leave. Where they took all of a limit that was lowered, no fault found room for a page.
#[test]
fn a_limit_below_what_tables_need_is_refused_and_the_least_works() {
    let _watch = watchdog("a limit below tables", HANG);
    const CHUNK: usize = 2 << 20;
    let config = smallest().limit(ByteCount::mib(64));
    let Some(region) = region(config, ByteCount::gib(2)) else { return };
    let len = ByteCount::mib(1792);
    let data = region.map(len).expect("the limit is large enough for its tables").cast::<u8>();
    // A page of each chunk is enough for most of its tables.
    let pages = (0..len.as_usize() / PAGE).step_by(CHUNK / PAGE);
    let word = |page: usize| data.as_ptr().wrapping_add(page * PAGE).cast::<usize>();
    // SAFETY: mapped above, and only this case uses it.
    pages.clone().for_each(|page| unsafe { word(page).write(page) });
    let tables = region.stats().metadata_bytes;
    assert!(tables > ByteCount::mib(8), "{tables} of tables");
    let error = region.set_limit(ByteCount::mib(8)).expect_err("tables alone take more");
    let Error::LimitTooSmall { minimum, .. } = error else { panic!("{error}") };
    assert_eq!(region.stats().limit_bytes, ByteCount::mib(64), "nothing has changed");
    region.set_limit(minimum).expect("what the error says works");
    // SAFETY: as above.
    pages.for_each(|page| assert_eq!(unsafe { word(page).read() }, page));
    let stats = region.stats();
    assert!(stats.resident_bytes <= minimum && stats.poisoned == 0, "{stats}");
}

#[test]
fn a_limit_above_the_control_groups_is_warned_of_at_the_start() {
    const NAME: &str = "a_limit_above_the_control_groups_is_warned_of_at_the_start";
    let Some(case) = case(NAME) else {
        let warning = "than the machine's memory";
        assert!(run(NAME, "machine", |_| ()).text.contains(warning));
        let Some(group) = Group::new(ByteCount::mib(256)) else {
            println!("skipped: no control group can be made here");
            return;
        };
        let warning = "that the process can have in its control group";
        for (limit, warns) in [("64", false), ("512", true), ("manager", true)] {
            let ended = run(NAME, limit, |command| group.admit(command));
            ended.expect_success();
            assert_eq!(ended.text.contains(warning), warns, "{limit}: {}", ended.text);
        }
        return;
    };
    Group::join();
    let limit = match case.as_str() {
        "machine" => ByteCount::gib(64 << 10),
        "manager" => {
            let limit = ByteCount::mib(512);
            drop(MemoryManager::start(limit).expect("starts"));
            return;
        }
        mib => ByteCount::mib(mib.parse().expect("a number")),
    };
    drop(region(RegionConfig::new().limit(limit), ByteCount::mib(16)));
}

#[test]
fn what_a_high_limit_takes_comes_back_when_it_is_lowered() {
    let _watch = watchdog("a limit that was high", HANG);
    let Some(region) = region(smallest(), ByteCount::mib(32)) else { return };
    let before = region.stats().metadata_bytes.0;
    region.set_limit(ByteCount(u64::MAX)).expect("higher");
    assert!(eventually(|| region.stats().metadata_bytes.0 > before), "no tables were charged");
    region.set_limit(ByteCount::mib(8)).expect("it holds nothing");
    assert!(eventually(|| region.stats().metadata_bytes.0 <= before), "they stay charged");
}
