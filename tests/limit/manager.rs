//! One limit over a buffer pool, far memory and temporary memory, from outside.
//!
//! Guards: G1.

#![expect(unsafe_code, reason = "reads and writes far and temporary memory")]

use crate::common::faulty::FaultyStore;
use crate::common::{Dice, StopOnDrop, bytes, consumer, eventually, mem_store, watchdog};
use farheap::manager::{Account, MemoryManager, Reclaim, ReclaimCost, TemporaryMemory};
use farheap::pool::{BufferPool, PoolConfig};
use farheap::region::{Region, RegionConfig};
use farheap::store::{MemStore, Op, Store};
use farheap::{ByteCount, Error, PageId};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const STEP: usize = 4096;
const HANG: Duration = Duration::from_secs(240);

fn manager(mib: u64) -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(mib)).expect("manager");
    // What has to be done takes as long as the machine is busy.
    manager.set_deadline(crate::common::PATIENCE);
    manager
}

/// The deadline of what must fail.
const SOON: Duration = Duration::from_millis(300);

/// Temporary memory that has not spilled. What could spill does so soon after nothing more was reclaimed
/// for it, as happens where the threads that reclaim have to wait for a processor.
fn unspilled(manager: &Arc<MemoryManager>, len: ByteCount) -> TemporaryMemory {
    let mut memory = None;
    let fits = eventually(|| {
        let taken = manager.allocate_temporary(len).expect("others give way");
        memory = Some(taken).filter(|taken| !taken.is_spilled());
        memory.is_some()
    });
    assert!(fits, "it fits: {:?}", manager.stats());
    memory.expect("it fits")
}

/// A region under a manager, or `None` with the reason printed.
fn far(manager: &Arc<MemoryManager>, store: Arc<dyn Store>) -> Option<Arc<Region>> {
    far_with(manager, RegionConfig::new().span(ByteCount::gib(64)), store)
}

fn far_with(
    manager: &Arc<MemoryManager>,
    config: RegionConfig,
    store: Arc<dyn Store>,
) -> Option<Arc<Region>> {
    match Region::create_under(manager, config, store) {
        Ok(region) => Some(region),
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("region: {error}"),
    }
}

fn pool(manager: &Arc<MemoryManager>, mib: u64) -> Arc<BufferPool> {
    PoolConfig::new().create_on(mem_store(ByteCount::mib(mib)), manager).expect("pool")
}

/// Fills `count` fresh pages with their numbers.
fn fill_pool(pool: &BufferPool, count: u64) -> Vec<PageId> {
    let fill = |_| {
        let mut page = pool.allocate().expect("page");
        let id = page.id();
        page[..8].copy_from_slice(&id.0.to_le_bytes());
        id
    };
    (0..count).map(fill).collect()
}

fn assert_pool_holds(pool: &BufferPool, ids: &[PageId]) {
    for id in ids {
        let page = pool.fix_shared(*id).expect("page");
        assert_eq!(page[..8], id.0.to_le_bytes(), "{id}");
    }
}

/// Writes its own number into each 4 KiB of a range.
fn write_numbers(ptr: NonNull<u8>, len: ByteCount, seed: u64) {
    for at in (0..len.as_usize()).step_by(STEP) {
        // SAFETY: within the range, which the caller owns.
        let word = unsafe { ptr.add(at) }.cast::<u64>();
        // SAFETY: aligned to 4 KiB, and nobody else uses it.
        unsafe { word.write_volatile(seed ^ at as u64) };
    }
}

fn assert_numbers(ptr: NonNull<u8>, len: ByteCount, seed: u64) {
    for at in (0..len.as_usize()).step_by(STEP) {
        // SAFETY: within the range, which the caller owns.
        let word = unsafe { ptr.add(at) }.cast::<u64>();
        // SAFETY: written by `write_numbers`.
        let found = unsafe { word.read_volatile() };
        assert_eq!(found, seed ^ at as u64, "at {at}");
    }
}

fn used(manager: &MemoryManager, name: &str) -> ByteCount {
    consumer(manager, name).expect("it has joined").used_bytes
}

#[test]
fn temporary_memory_takes_the_room_of_far_pages_and_their_data_survives() {
    let _watch = watchdog("temporary memory over far pages", HANG);
    let manager = manager(64);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let len = ByteCount::mib(60);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 1);
    assert!(used(&manager, "far heap") > ByteCount::mib(30), "{:?}", manager.stats());
    let memory = unspilled(&manager, ByteCount::mib(40));
    write_numbers(memory.as_ptr(), memory.len(), 2);
    assert_numbers(memory.as_ptr(), memory.len(), 2);
    assert_numbers(data, len, 1);
    let stats = manager.stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    assert!(consumer(&manager, "far heap").expect("joined").reclaimed_bytes >= ByteCount::mib(20));
    drop(memory);
    assert_eq!(used(&manager, "temporary"), ByteCount::ZERO);
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(data, len.as_usize())) }
        .expect("mapped above");
}

/// Pages that wait in frames before they leave are given to others like any, down to the region's floor.
#[test]
fn far_memory_gives_up_the_pages_that_wait_to_leave() {
    let _watch = watchdog("pages that wait to leave", HANG);
    let manager = manager(256);
    manager.set_deadline(Duration::from_secs(30));
    let Some(region) = far(&manager, mem_store(ByteCount::mib(512))) else { return };
    let len = ByteCount::mib(300);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 5);
    // Read and written at random, pages wait.
    let mut dice = Dice::new(6);
    for _ in 0..len.as_usize() / STEP {
        let at = dice.below(len.get() / STEP as u64) as usize * STEP;
        // SAFETY: within the range, which this test alone uses.
        let word = unsafe { data.add(at) }.cast::<u64>();
        // SAFETY: written by `write_numbers`, aligned to 4 KiB.
        let number = unsafe { word.read_volatile() };
        // SAFETY: as above.
        unsafe { word.write_volatile(number) };
    }
    let other = manager.join("other").expect("an account");
    manager.charge(&other, ByteCount::mib(244)).expect("the rest is more than the floor");
    other.uncharge(ByteCount::mib(244));
    assert_numbers(data, len, 5);
}

#[test]
fn far_memory_takes_the_room_of_clean_table_pages_before_it_evicts_its_own() {
    let _watch = watchdog("far memory over table pages", HANG);
    let manager = manager(64);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let pool = pool(&manager, 128);
    let ids = fill_pool(&pool, 14_000);
    pool.flush().expect("written");
    assert_pool_holds(&pool, &ids);
    let pool_full = pool.stats().resident_bytes;
    assert!(pool_full > ByteCount::mib(45), "{:?}", pool.stats());
    let len = ByteCount::mib(40);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 3);
    // It evicts its own while it has waited for the pool for 5 ms, which a busy machine makes it. If
    // it went first, it would get what the pool leaves, and write the rest.
    let left = ByteCount::mib(64).get() - pool_full.get();
    let far = used(&manager, "far heap");
    assert!(far.get() >= left + ByteCount::mib(8).get(), "{:?}", manager.stats());
    assert!(pool.stats().resident_bytes <= ByteCount::mib(40), "{:?}", pool.stats());
    let written = region.stats().pages_out * 4096;
    assert!(written < len.get() / 2, "{written} bytes were written, though clean ones were there");
    assert_numbers(data, len, 3);
    assert_pool_holds(&pool, &ids);
    let stats = manager.stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}

#[test]
fn temporary_memory_of_twice_the_limit_spills_and_completes() {
    let _watch = watchdog("temporary memory of twice the limit", HANG);
    let manager = manager(32);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(128))) else { return };
    let pool = pool(&manager, 64);
    let ids = fill_pool(&pool, 6000);
    let memory = manager.allocate_temporary(ByteCount::mib(64)).expect("spills");
    assert!(memory.is_spilled());
    assert_eq!(manager.stats().spilled_bytes, ByteCount::mib(64));
    write_numbers(memory.as_ptr(), memory.len(), 4);
    assert_numbers(memory.as_ptr(), memory.len(), 4);
    assert!(region.stats().pages_out > 0, "half of it is on the device");
    drop(memory);
    let stats = manager.stats();
    assert_eq!(stats.spilled_bytes, ByteCount::ZERO);
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    // A write that was under way ends first.
    let freed = || region.stats().stored_bytes.0 == 0;
    assert!(eventually(freed), "freed on the device too: {:?}", region.stats());
    assert_pool_holds(&pool, &ids);
}

#[test]
fn collections_in_temporary_memory_spill_too() {
    let _watch = watchdog("collections in temporary memory", HANG);
    let manager = manager(32);
    let Some(_region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let temporary = farheap_collections::Temporary::new(&manager);
    let mut rows = allocator_api2::vec::Vec::new_in(temporary.clone());
    rows.extend(0..6_u64 << 20);
    let boxes: Vec<_> = (0..50_000_u64)
        .map(|n| allocator_api2::boxed::Box::new_in([n; 25], temporary.clone()))
        .collect();
    assert!(rows.iter().enumerate().all(|(at, row)| *row == at as u64));
    assert!(boxes.iter().enumerate().all(|(at, row)| row[24] == at as u64));
    assert!(manager.stats().spilled_bytes >= ByteCount::mib(48), "{:?}", manager.stats());
    drop((rows, boxes));
    let stats = manager.stats();
    assert_eq!((stats.spilled_bytes, used(&manager, "temporary")), Default::default());
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}

#[test]
fn a_limit_below_what_is_pinned_in_far_memory_is_refused_by_name() {
    let _watch = watchdog("a limit below pinned pages", HANG);
    let manager = manager(64);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let (len, rest) = (ByteCount::mib(24), ByteCount::mib(16));
    let [data, more] = [len, rest].map(|len| region.map(len).expect("mapped").cast::<u8>());
    write_numbers(data, len, 5);
    write_numbers(more, rest, 6);
    let pinned = region.pin(bytes(data.as_ptr(), len)).expect("pinned");
    manager.set_deadline(SOON);
    let error = manager.set_limit(ByteCount::mib(20)).expect_err("24 MiB are pinned");
    manager.set_deadline(crate::common::PATIENCE);
    assert!(error.to_string().contains("24.0 MiB pinned"), "{error}");
    assert_eq!(manager.limit(), ByteCount::mib(64));
    manager.set_limit(ByteCount::mib(30)).expect("the rest can go");
    assert!(manager.stats().used_bytes <= ByteCount::mib(30));
    drop(pinned);
    manager.set_limit(ByteCount::mib(20)).expect("nothing is pinned");
    assert!(manager.stats().used_bytes <= ByteCount::mib(20));
    assert_numbers(data, len, 5);
    assert_numbers(more, rest, 6);
}

#[test]
fn when_everything_is_pinned_the_error_names_the_holders_after_the_deadline() {
    let _watch = watchdog("everything is pinned", HANG);
    let manager = manager(64);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let pool = pool(&manager, 64);
    let len = ByteCount::mib(36);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 7);
    let _pinned = region.pin(bytes(data.as_ptr(), len)).expect("pinned");
    let ids = fill_pool(&pool, 2500);
    let fixed: Vec<_> = ids.iter().map(|id| pool.fix_shared(*id).expect("page")).collect();
    let account = manager.join("query").expect("room");
    manager.set_deadline(SOON);
    let began = Instant::now();
    let error = manager.charge(&account, ByteCount::mib(30)).expect_err("all is held");
    assert!(began.elapsed() >= SOON, "not before the deadline");
    manager.set_deadline(crate::common::PATIENCE);
    let text = error.to_string();
    assert!(text.contains("far heap") && text.contains("36.0 MiB pinned"), "{text}");
    assert!(text.contains("fixed by 2500 holders"), "{text}");
    assert!(text.find("far heap") < text.find("pool"), "the largest first: {text}");
    drop(fixed);
    manager.charge(&account, ByteCount::mib(10)).expect("table pages give way now");
    assert_numbers(data, len, 7);
}

#[test]
fn floors_keep_what_they_promise() {
    let _watch = watchdog("floors", HANG);
    let manager = manager(64);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    region.account().expect("joined").set_floor(ByteCount::mib(30)).expect("below the limit");
    let len = ByteCount::mib(50);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 8);
    // What would push far memory below its floor spills instead.
    let memory = manager.allocate_temporary(ByteCount::mib(40)).expect("spills");
    assert!(memory.is_spilled());
    drop(memory);
    let memory = unspilled(&manager, ByteCount::mib(30));
    assert_eq!(used(&manager, "temporary"), memory.len());
    assert!(used(&manager, "far heap") >= ByteCount::mib(28), "{:?}", manager.stats());
    assert_numbers(data, len, 8);
}

#[test]
fn two_managers_know_nothing_of_each_other() {
    let _watch = watchdog("two managers", HANG);
    let (one, other) = (manager(32), manager(32));
    let Some(first) = far(&one, mem_store(ByteCount::mib(128))) else { return };
    let Some(second) = far(&other, mem_store(ByteCount::mib(128))) else { return };
    let len = ByteCount::mib(48);
    let [a, b] = [&first, &second].map(|far| far.map(len).expect("mapped").cast::<u8>());
    write_numbers(a, len, 9);
    write_numbers(b, len, 10);
    let memory = one.allocate_temporary(ByteCount::mib(16)).expect("far pages give way");
    assert_eq!(used(&other, "temporary"), ByteCount::ZERO);
    assert_numbers(a, len, 9);
    assert_numbers(b, len, 10);
    drop(memory);
    for manager in [one, other] {
        let stats = manager.stats();
        assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
    }
}

#[test]
fn a_full_device_fails_the_allocation_that_would_spill_and_loses_nothing() {
    let _watch = watchdog("a full device", HANG);
    let manager = manager(32);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(64))) else { return };
    let len = ByteCount::mib(40);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 11);
    let error = manager.allocate_temporary(ByteCount::mib(64)).expect_err("24 MiB are left");
    assert!(matches!(error, Error::StoreFull { .. }), "{error}");
    let memory = manager.allocate_temporary(ByteCount::mib(24)).expect("fits");
    write_numbers(memory.as_ptr(), memory.len(), 12);
    assert_numbers(data, len, 11);
    assert_numbers(memory.as_ptr(), memory.len(), 12);
    assert_eq!(region.stats().poisoned, 0);
}

#[test]
fn a_device_that_refuses_writes_fails_claims_in_time_and_loses_nothing() {
    let _watch = watchdog("a device that refuses writes", HANG);
    let manager = manager(64);
    let inner = MemStore::new(ByteCount::mib(256)).expect("store");
    let store = FaultyStore::new(Arc::new(inner), 1);
    let control = store.control();
    let Some(region) = far(&manager, Arc::new(store)) else { return };
    let len = ByteCount::mib(50);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 13);
    control.fail_fraction(Op::Write, 1_000_000, libc::EIO);
    let account = manager.join("query").expect("room");
    manager.set_deadline(SOON);
    let error = manager.charge(&account, ByteCount::mib(40)).expect_err("nothing can be written");
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    control.heal();
    manager.set_deadline(crate::common::PATIENCE);
    assert_numbers(data, len, 13);
    manager.charge(&account, ByteCount::mib(40)).expect("written now");
    assert_numbers(data, len, 13);
}

#[test]
fn tables_are_charged_for_what_was_touched_not_for_what_is_reserved() {
    let _watch = watchdog("tables", HANG);
    let manager = manager(64);
    let config = RegionConfig::new();
    let Some(region) = far_with(&manager, config, mem_store(ByteCount::mib(256))) else { return };
    let tables = || consumer(&manager, "far heap").expect("joined").metadata_bytes;
    let start = tables();
    assert!(start <= ByteCount::kib(128), "1 TiB is reserved and nothing touched: {start}");
    let (count, each) = (64, ByteCount::mib(4));
    let mut last = None;
    for _ in 0..count {
        let range = region.map(each).expect("mapped").cast::<u8>();
        write_numbers(range, ByteCount::kib(4), 14);
        last = Some(range);
    }
    let sparse = tables();
    let more = ByteCount(sparse.get() - start.get());
    assert!(more >= ByteCount::kib(8 * count) && more <= ByteCount::kib(16 * count + 64));
    assert_eq!(region.stats().metadata_bytes.0, sparse.get());
    // SAFETY: mapped by this case, which is done with it.
    unsafe { region.unmap(NonNull::slice_from_raw_parts(last.expect("mapped"), each.as_usize())) }
        .expect("mapped above");
    let again = region.map(each).expect("mapped").cast::<u8>();
    assert_eq!(Some(again), last, "addresses are used again");
    write_numbers(again, ByteCount::kib(4), 14);
    assert_eq!(tables(), sparse, "tables that exist cost nothing again");
}

/// Memory that cannot be given back.
struct Stubborn;

impl Reclaim for Stubborn {
    fn reclaim(&self, _want: ByteCount, _cost: ReclaimCost) -> ByteCount {
        ByteCount::ZERO
    }
}

#[test]
fn far_memory_lives_on_its_floor_when_others_hold_the_rest() {
    let _watch = watchdog("far memory on its floor", HANG);
    let manager = manager(32);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(128))) else { return };
    let account: Account = manager.join("stubborn").expect("room");
    let stubborn: Weak<Stubborn> = Arc::downgrade(&Arc::new(Stubborn));
    account.set_reclaimer(stubborn);
    manager.charge(&account, ByteCount::mib(24)).expect("fits");
    let len = ByteCount::mib(48);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 15);
    assert_numbers(data, len, 15);
    let stats = manager.stats();
    assert!(stats.used_bytes_max <= stats.limit_bytes, "{stats:?}");
}

/// Memory that was counted has taken all that floors leave: far memory goes on, and for each page that
/// a scan touches few are read.
fn far_memory_lives_on_its_floor_beside_counted_memory(limit: ByteCount, config: RegionConfig) {
    let page = ByteCount::kib(4);
    let manager = manager(limit.get() >> 20);
    let floor = RegionConfig::LIMIT_MIN;
    let config = config.limit(limit).span(ByteCount::gib(16));
    let len = ByteCount(2 * floor.get());
    let Some(region) = far_with(&manager, config, mem_store(ByteCount(2 * len.get()))) else {
        return;
    };
    let account = region.account().expect("joined");
    account.set_floor(ByteCount::ZERO).expect("it keeps what it needs");
    assert_eq!(account.floor(), floor);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, 16);
    let library = manager.join("library").expect("room");
    library.set_used(ByteCount(2 * limit.get()));
    let is_on_its_floor = || {
        let far = consumer(&manager, "far heap").expect("joined");
        far.used_bytes.get() <= floor.get() + far.metadata_bytes.get() + page.get()
    };
    assert!(eventually(is_on_its_floor), "{}", manager.stats());
    assert!(library.used().get() <= limit.get() - floor.get(), "{}", manager.stats());
    let (before, scans) = (region.stats().pages_in, 4);
    for _ in 0..scans {
        assert_numbers(data, len, 16);
    }
    let read = region.stats().pages_in - before;
    let touched = scans * len.get() / page.get();
    println!("{read} pages were read for {touched}; {}", manager.stats());
    assert!(read < 3 * touched, "{read} pages were read for {touched}: {:?}", region.stats());
    // What nobody can take back may not take what the floor keeps either.
    let mut temporary = Vec::new();
    while let Ok(memory) = manager.allocate_temporary(ByteCount::kib(64)) {
        if memory.is_spilled() {
            break;
        }
        temporary.push(memory);
    }
    assert_numbers(data, len, 16);
    drop(temporary);
    assert_eq!(library.held(), ByteCount(2 * limit.get()));
    assert!(manager.stats().used_bytes_max <= limit, "{}", manager.stats());
    library.set_used(ByteCount::ZERO);
    write_numbers(data, len, 17);
    assert_numbers(data, len, 17);
}

#[test]
fn tables_of_slots_stay_within_the_limit_where_others_take_all_that_is_freed() {
    let _watch = watchdog("tables of slots beside counted memory", HANG);
    let manager = manager(96);
    let limit = manager.limit();
    let page = ByteCount::kib(4);
    let config = RegionConfig::new().limit(limit).span(ByteCount::gib(16));
    let Some(region) = far_with(&manager, config, mem_store(ByteCount::mib(256))) else { return };
    let account = region.account().expect("joined");
    account.set_floor(ByteCount::ZERO).expect("it keeps what it needs");
    let library = manager.join("library").expect("room");
    for (round, len) in [16, 40, 64].map(ByteCount::mib).into_iter().enumerate() {
        let data = region.map(len).expect("mapped").cast::<u8>();
        write_numbers(data, len, round as u64);
        // All of it leaves, to slots that had no tables, and each byte that it frees is taken.
        library.set_used(ByteCount(2 * limit.get()));
        let is_on_its_floor = || {
            let far = consumer(&manager, "far heap").expect("joined");
            far.used_bytes.get() <= account.floor().get() + far.metadata_bytes.get() + page.get()
        };
        assert!(eventually(is_on_its_floor), "{}", manager.stats());
        assert_numbers(data, len, round as u64);
        library.set_used(ByteCount::ZERO);
        let stats = manager.stats();
        assert!(stats.used_bytes_max <= limit, "round {round}: {stats:?}");
    }
    assert_eq!(region.stats().poisoned, 0);
}

#[test]
fn counted_memory_above_the_limit_leaves_far_memory_its_floor() {
    let _watch = watchdog("far memory beside counted memory", HANG);
    for limit in [32, 64, 1024].map(ByteCount::mib) {
        println!("limit of {limit}");
        far_memory_lives_on_its_floor_beside_counted_memory(limit, RegionConfig::new());
    }
}

#[test]
fn counted_memory_above_the_limit_leaves_a_pool_its_floor() {
    let _watch = watchdog("a pool beside counted memory", HANG);
    let manager = manager(32);
    let pool = pool(&manager, 64);
    pool.account().set_floor(ByteCount::mib(4)).expect("below the limit");
    let library = manager.join("library").expect("room");
    library.set_used(ByteCount::mib(40));
    let ids = fill_pool(&pool, 4000);
    library.set_used(ByteCount::mib(64));
    let has_taken = || library.used() > ByteCount::mib(26);
    assert!(eventually(has_taken), "{}", manager.stats());
    assert_pool_holds(&pool, &ids);
    assert!(library.used() <= ByteCount::mib(28), "{}", manager.stats());
    assert!(manager.stats().used_bytes_max <= manager.limit(), "{}", manager.stats());
}

#[test]
fn counted_memory_above_the_limit_leaves_threads_that_serve_themselves_their_floor() {
    let _watch = watchdog("in-thread far memory beside counted memory", HANG);
    let config = RegionConfig::new().mode(farheap::region::FaultMode::InThread);
    far_memory_lives_on_its_floor_beside_counted_memory(ByteCount::mib(64), config);
}

#[test]
fn everything_at_once_stays_below_a_limit_that_moves() {
    let _watch = watchdog("everything at once", HANG);
    let seed = crate::common::seed("everything at once");
    let manager = manager(48);
    let Some(region) = far(&manager, mem_store(ByteCount::mib(256))) else { return };
    let pool = pool(&manager, 128);
    let ids = fill_pool(&pool, 10_000);
    let len = ByteCount::mib(64);
    let data = region.map(len).expect("mapped").cast::<u8>();
    write_numbers(data, len, seed);
    let address = data.as_ptr().expose_provenance();
    let stop = AtomicBool::new(false);
    let (rounds, spilled) = (AtomicU64::new(0), AtomicU64::new(0));
    let running = || !stop.load(Ordering::Relaxed);
    std::thread::scope(|scope| {
        let others = StopOnDrop(&stop);
        scope.spawn(|| {
            let mut dice = Dice::new(seed);
            while running() {
                assert_pool_holds(&pool, &[ids[dice.below(ids.len() as u64) as usize]]);
            }
        });
        scope.spawn(|| {
            let mut dice = Dice::new(seed + 1);
            while running() {
                let at = dice.below(len.get() / STEP as u64) as usize * STEP;
                let data = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(address));
                // SAFETY: within the mapped range.
                let word = unsafe { data.expect("not null").add(at) }.cast::<u64>();
                // SAFETY: written above, and only read since.
                assert_eq!(unsafe { word.read_volatile() }, seed ^ at as u64);
            }
        });
        scope.spawn(|| {
            let mut dice = Dice::new(seed + 2);
            while running() {
                let len = ByteCount::mib(1 + dice.below(40));
                let memory: TemporaryMemory = manager.allocate_temporary(len).expect("or spilled");
                write_numbers(memory.as_ptr(), len, 1);
                assert_numbers(memory.as_ptr(), len, 1);
                rounds.fetch_add(1, Ordering::Relaxed);
                spilled.fetch_add(u64::from(memory.is_spilled()), Ordering::Relaxed);
            }
        });
        // Longer, where the thread that allocates has not come to it by then.
        let limits = [32, 64, 40, 48, 28, 56].into_iter().cycle().enumerate();
        let is_enough = |n| n >= 18 && rounds.load(Ordering::Relaxed) > 0;
        for (_, mib) in limits.take_while(|(n, _)| !is_enough(*n)) {
            std::thread::sleep(Duration::from_millis(100));
            match manager.set_limit(ByteCount::mib(mib)) {
                Ok(()) => {}
                Err(Error::OutOfMemory { .. }) => {} // Temporary memory held more.
                Err(error) => panic!("{error}"),
            }
        }
        drop(others);
    });
    let (rounds, spilled) = (rounds.into_inner(), spilled.into_inner());
    println!("{rounds} rounds, {spilled} of them spilled: {:?}", manager.stats());
    assert_numbers(data, len, seed);
    assert_pool_holds(&pool, &ids);
    assert_eq!(used(&manager, "temporary"), ByteCount::ZERO);
}
