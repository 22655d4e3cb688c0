//! The manager without a kernel's help: order, floors, refusals, callbacks.
#![expect(unsafe_code, reason = "implements an unsafe trait")]

use crate::limit::manager::shared::Over;
use crate::limit::manager::*;
use crate::sys::vm::{Huge, KERNEL_PAGE, Mapping};
use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::{Mutex, Weak};

/// Returns the statistics of the first consumer of this name.
fn consumer(manager: &MemoryManager, name: &str) -> Option<ConsumerStats> {
    let found = manager.consumers().into_iter().find(|(of, _)| &**of == name);
    found.map(|(_, stats)| stats)
}

/// A cache that gives all it has.
struct Cache {
    account: Account,
    held: AtomicU64,
    cost: ReclaimCost,
}

impl Reclaim for Cache {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        if cost < self.cost {
            return ByteCount::ZERO;
        }
        let give = want.0.min(self.held.load(Ordering::Relaxed));
        self.held.fetch_sub(give, Ordering::Relaxed);
        self.account.uncharge(ByteCount(give));
        ByteCount(give)
    }
}

fn cache(manager: &MemoryManager, cost: ReclaimCost, bytes: ByteCount) -> Arc<Cache> {
    let account = manager.join("cache").expect("room");
    manager.charge(&account, bytes).expect("fits");
    let held = AtomicU64::new(bytes.0);
    let cache = Arc::new(Cache { account: account.clone(), held, cost });
    let weak: Weak<Cache> = Arc::downgrade(&cache);
    account.set_reclaimer(weak);
    cache
}

fn start(mib: u64) -> Arc<MemoryManager> {
    let manager = MemoryManager::start(ByteCount::mib(mib)).expect("starts");
    manager.set_deadline(Duration::from_millis(20));
    manager
}

#[test]
fn the_cheapest_consumer_gives_way_first() {
    let manager = start(64);
    let dear = cache(&manager, ReclaimCost::WriteBack, ByteCount::mib(30));
    let cheap = cache(&manager, ReclaimCost::Reread, ByteCount::mib(30));
    let memory = manager.allocate_temporary(ByteCount::mib(24)).expect("cheap gives way");
    assert!(cheap.account.used() <= ByteCount::mib(10));
    assert_eq!(dear.account.used(), ByteCount::mib(30));
    assert!(manager.stats().used_bytes <= manager.limit());
    drop(memory);
    assert_eq!(manager.temporary().used(), ByteCount::ZERO);
}

#[test]
fn a_floor_is_kept_from_others() {
    let manager = start(64);
    let cache = cache(&manager, ReclaimCost::Reread, ByteCount::mib(60));
    cache.account.set_floor(ByteCount::mib(40)).expect("below the limit");
    let error = manager.allocate_temporary(ByteCount::mib(30)).expect_err("floor");
    assert!(error.to_string().contains("cache"), "{error}");
    assert!(cache.account.used() >= ByteCount::mib(40));
    let memory = manager.allocate_temporary(ByteCount::mib(20)).expect("above the floor");
    drop(memory);
}

#[test]
fn allocations_side_by_side_leave_what_a_floor_keeps() {
    let manager = start(64);
    let keeper = manager.join("keeper").expect("room");
    keeper.set_floor(ByteCount::mib(30)).expect("below the limit");
    assert_eq!(manager.temporary().ceiling(), ByteCount::mib(34));
    // While one allocation reclaims, another one comes and is served.
    let (weak, entered) = (Arc::downgrade(&manager), AtomicBool::new(false));
    let cache = manager.join("cache").expect("room");
    manager.charge(&cache, ByteCount::mib(60)).expect("fits");
    let held = cache.clone();
    let other = Arc::new(Mutex::new(None));
    let of_other = Arc::clone(&other);
    let by = Arc::new(By(move |_, _| {
        let gives = held.used();
        if !entered.swap(true, Ordering::Relaxed) {
            let manager = weak.upgrade().expect("in use");
            let allocates = || manager.allocate_temporary(ByteCount::mib(20));
            let got = std::thread::scope(|scope| scope.spawn(allocates).join());
            *of_other.lock().expect("lock") = Some(got.expect("no panic"));
            return ByteCount::ZERO;
        }
        held.set_used(ByteCount::ZERO);
        gives
    }));
    cache.set_reclaimer(Arc::downgrade(&by) as Weak<dyn Reclaim>);
    let one = manager.allocate_temporary(ByteCount::mib(20));
    let other = other.lock().expect("lock").take().expect("the cache was asked");
    assert!(one.is_ok() != other.is_ok(), "{one:?} {other:?}");
    assert_eq!(manager.temporary().used(), ByteCount::mib(20));
    drop((one, other, keeper));
    let all = manager.allocate_temporary(ByteCount::mib(64));
    assert!(all.is_ok(), "the floor left with its consumer: {all:?}");
}

#[test]
fn temporary_memory_that_can_never_fit_nor_spill_fails_at_once() {
    let manager = start(48);
    manager.set_deadline(Duration::from_secs(3600)); // Nothing here may wait for it.
    let error = manager.allocate_temporary(ByteCount::mib(49)).expect_err("above the limit");
    let said = "49.0 MiB are more than it may ever have: ";
    assert!(error.to_string().contains(said) && !error.to_string().contains("0ns"), "{error}");
    let keeper = manager.join("keeper").expect("room");
    keeper.set_floor(ByteCount::mib(20)).expect("below the limit");
    manager.allocate_temporary(ByteCount::mib(29)).expect_err("above what the floor leaves");
    let memory = manager.allocate_temporary(ByteCount::mib(12)).expect("fits");
    manager.allocate_temporary(ByteCount::mib(17)).expect_err("16 are left");
    assert_eq!(manager.temporary().used(), memory.len());
}

#[test]
fn a_limit_below_what_is_pinned_is_refused_and_the_old_one_stays() {
    let manager = start(64);
    let pinned = manager.join("pinned").expect("room");
    manager.charge(&pinned, ByteCount::mib(20)).expect("fits");
    let _cache = cache(&manager, ReclaimCost::Reread, ByteCount::mib(30));
    let error = manager.set_limit(ByteCount::mib(10)).expect_err("20 MiB are pinned");
    assert!(error.to_string().contains("pinned 20"), "{error}");
    assert_eq!(manager.limit(), ByteCount::mib(64));
    manager.set_limit(ByteCount::mib(30)).expect("the cache gives way");
    assert!(manager.stats().used_bytes <= ByteCount::mib(30));
}

/// Mappings that are not charged, as a region's would be evicted.
struct Elsewhere(Mutex<Vec<Mapping>>);

// SAFETY: a mapping is kept until it is freed.
unsafe impl Spill for Elsewhere {
    fn allocate(&self, len: ByteCount) -> Result<NonNull<u8>> {
        let mapping = Mapping::reserve(len.as_usize(), KERNEL_PAGE, Huge::No)?;
        let ptr = NonNull::new(mapping.as_ptr()).expect("never at zero");
        self.0.lock().expect("lock").push(mapping);
        Ok(ptr)
    }

    unsafe fn free(&self, ptr: NonNull<u8>, _len: ByteCount) {
        self.0.lock().expect("lock").retain(|mapping| mapping.as_ptr() != ptr.as_ptr());
    }
}

#[test]
fn what_does_not_fit_spills_and_is_told() {
    let manager = start(16);
    let told = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&told);
    manager
        .on_pressure(move |event| {
            if let Pressure::Spilled { len } = event {
                seen.fetch_add(len.0, Ordering::Relaxed);
            }
        })
        .expect("the first callback");
    let elsewhere = Arc::new(Elsewhere(Mutex::new(Vec::new())));
    manager.set_spill(Arc::downgrade(&elsewhere) as Weak<dyn Spill>);
    let memory = manager.allocate_temporary(ByteCount::mib(32)).expect("spills");
    assert!(memory.is_spilled());
    assert_eq!(told.load(Ordering::Relaxed), 32 << 20);
    assert_eq!(manager.stats().spilled_bytes, ByteCount::mib(32));
    drop(memory);
    assert!(elsewhere.0.lock().expect("lock").is_empty());
}

#[test]
fn a_budget_of_a_consumer_is_part_of_the_limit() {
    let manager = start(16);
    let account = manager.join("region").expect("room");
    let budget = account.budget();
    assert!(budget.try_charge(ByteCount::mib(10)));
    assert_eq!(manager.stats().used_bytes, ByteCount::mib(10));
    assert!(!manager.temporary().try_charge(ByteCount::mib(7)));
}

/// A reclaimer that is a closure.
struct By<F>(F);

impl<F: Fn(ByteCount, ReclaimCost) -> ByteCount + Send + Sync> Reclaim for By<F> {
    fn reclaim(&self, want: ByteCount, cost: ReclaimCost) -> ByteCount {
        (self.0)(want, cost)
    }

    fn describe_held(&self) -> String {
        " (held by 3 pins)".to_owned()
    }
}

fn join_with<F>(manager: &MemoryManager, name: &str, reclaim: F) -> (Account, Arc<By<F>>)
where
    F: Fn(ByteCount, ReclaimCost) -> ByteCount + Send + Sync + 'static,
{
    let account = manager.join(name).expect("room");
    let by = Arc::new(By(reclaim));
    let weak = Arc::downgrade(&by);
    account.set_reclaimer(weak);
    (account, by)
}

#[test]
fn a_consumer_that_refuses_is_named_with_its_pins_after_the_deadline() {
    let manager = start(16);
    let (account, _by) = join_with(&manager, "stubborn", |_, _| ByteCount::ZERO);
    manager.charge(&account, ByteCount::mib(12)).expect("fits");
    let small = manager.join("small").expect("room");
    manager.charge(&small, ByteCount::mib(1)).expect("fits");
    let began = Instant::now();
    let error = manager.allocate_temporary(ByteCount::mib(8)).expect_err("nothing gives way");
    assert!(began.elapsed() >= Duration::from_millis(20), "not before the deadline");
    let text = error.to_string();
    let (largest, other) = (text.find("stubborn 12.0 MiB (held by 3 pins)"), text.find("small"));
    assert!(largest.is_some() && largest < other, "largest first: {text}");
    assert_eq!(manager.stats().failed, 1);
    assert_eq!(manager.temporary().used(), ByteCount::ZERO, "nothing of it stays charged");
}

#[test]
fn who_charges_little_while_a_large_claim_gathers_makes_room_for_it() {
    thread_local! {
        /// This thread charges a page: it is neither the one that claims nor the manager's.
        static CHARGES: Cell<bool> = const { Cell::new(false) };
    }
    let manager = start(64);
    let (weak, helps) = (Arc::downgrade(&manager), Arc::new(AtomicU64::new(0)));
    let account = Arc::new(OnceLock::<Account>::new());
    let (own, seen) = (Arc::clone(&account), Arc::clone(&helps));
    let charge_a_page = |manager: &MemoryManager, account: &Account| {
        let charges = || {
            CHARGES.set(true);
            manager.charge(account, ByteCount(KERNEL_PAGE as u64)).expect("free");
        };
        std::thread::scope(|scope| scope.spawn(charges).join()).expect("no panic");
    };
    let claims = std::thread::current().id();
    let (joined, _by) = join_with(&manager, "pool", move |want, _| {
        let account = own.get().expect("set below");
        let give = want.0.min(account.used().0);
        account.uncharge(ByteCount(give));
        seen.fetch_add(u64::from(CHARGES.get()), Ordering::Relaxed);
        if std::thread::current().id() == claims {
            // What was given back is free: this could be charged without a word.
            charge_a_page(&weak.upgrade().expect("in use"), account);
        }
        ByteCount(give)
    });
    account.set(joined.clone()).expect("once");
    manager.charge(&joined, ByteCount::mib(60)).expect("fits");
    let memory = manager.allocate_temporary(ByteCount::mib(32)).expect("the pool gives way");
    let before = helps.load(Ordering::Relaxed);
    assert!(before > 0, "it charged, and made no room");
    drop(memory);
    charge_a_page(&manager, &joined);
    assert_eq!(helps.load(Ordering::Relaxed), before, "nobody gathers any more");
}

/// Panics without a word of the panic hook.
fn broken_reclaimer() -> ByteCount {
    std::panic::resume_unwind(Box::new("reclaim"))
}

#[test]
fn a_reclaimer_that_panics_is_told_of_and_not_asked_again() {
    let manager = start(16);
    let broken = Arc::new(AtomicU64::new(0));
    let seen = Arc::clone(&broken);
    let on_pressure = move |event| {
        if let Pressure::Broken { consumer } = event {
            assert_eq!(&*consumer, "panics");
            seen.fetch_add(1, Ordering::Relaxed);
        }
    };
    manager.on_pressure(on_pressure).expect("the first callback");
    let (account, _by) = join_with(&manager, "panics", |_, _| broken_reclaimer());
    manager.charge(&account, ByteCount::mib(10)).expect("fits");
    let cache = cache(&manager, ReclaimCost::WriteBack, ByteCount::mib(5));
    let memory = manager.allocate_temporary(ByteCount::mib(4)).expect("the other gives way");
    assert!(cache.account.used() < ByteCount::mib(5));
    drop(memory);
    manager.allocate_temporary(ByteCount::mib(8)).expect_err("the rest is with the broken one");
    assert_eq!(broken.load(Ordering::Relaxed), 1);
}

#[test]
fn a_reclaimer_that_enters_the_manager_fails_at_once_instead_of_waiting_for_itself() {
    let manager = start(16);
    manager.set_deadline(Duration::from_secs(30));
    let (weak, entered) = (Arc::downgrade(&manager), Arc::new(AtomicU64::new(0)));
    let errors = Arc::clone(&entered);
    let (account, _by) = join_with(&manager, "recursive", move |_, _| {
        let manager = weak.upgrade().expect("in use");
        let temporary = manager.allocate_temporary(ByteCount::mib(9)).is_err();
        let resized = manager.set_limit(ByteCount::mib(2)).is_err();
        errors.fetch_add(u64::from(temporary && resized), Ordering::Relaxed);
        ByteCount::ZERO
    });
    manager.charge(&account, ByteCount::mib(10)).expect("fits");
    manager.set_deadline(Duration::from_millis(20));
    manager.allocate_temporary(ByteCount::mib(8)).expect_err("nothing gives way");
    assert!(entered.load(Ordering::Relaxed) > 0, "the reclaimer was called and got its errors");
    assert_eq!(manager.limit(), ByteCount::mib(16));
}

#[test]
fn the_callback_may_use_the_manager_because_no_lock_is_held() {
    let manager = start(16);
    let (weak, called) = (Arc::downgrade(&manager), Arc::new(AtomicU64::new(0)));
    let calls = Arc::clone(&called);
    let on_pressure = move |_| {
        let Some(manager) = weak.upgrade() else { return };
        assert!(manager.stats().used_bytes <= manager.limit());
        drop(manager.join("made under pressure").expect("room"));
        calls.fetch_add(1, Ordering::Relaxed);
    };
    manager.on_pressure(on_pressure).expect("the first callback");
    let error = manager.on_pressure(|_| ()).expect_err("there is one already");
    assert!(error.to_string().contains("registered already"), "{error}");
    manager.allocate_temporary(ByteCount::mib(17)).expect_err("more than the limit");
    assert!(called.load(Ordering::Relaxed) > 0);
}

#[test]
fn floors_cannot_promise_more_than_the_limit_and_the_limit_not_less_than_the_floors() {
    let manager = start(16);
    let (one, other) = (manager.join("one").expect("room"), manager.join("other").expect("room"));
    one.set_floor(ByteCount::mib(10)).expect("below the limit");
    other.set_floor(ByteCount::mib(7)).expect_err("17 of 16");
    assert_eq!(other.floor(), ByteCount::ZERO);
    other.set_floor(ByteCount::mib(6)).expect("just fits");
    let error = manager.set_limit(ByteCount::mib(15)).expect_err("floors of 16");
    assert_eq!(
        error,
        Error::LimitTooSmall { limit: ByteCount::mib(15), minimum: ByteCount::mib(16) }
    );
}

#[test]
fn a_floor_that_is_set_while_a_resize_waits_for_its_turn_is_kept() {
    let manager = start(64);
    manager.set_deadline(Duration::from_secs(30));
    let keeper = manager.join("keeper").expect("room");
    let (weak, floor) = (Arc::downgrade(&manager), keeper.clone());
    let second = Arc::new(Mutex::new(None));
    let resize = Arc::clone(&second);
    let account = manager.join("cache").expect("room");
    let held = account.clone();
    let by = Arc::new(By(move |_, _| {
        let mut resize = resize.lock().expect("lock");
        if resize.is_some() {
            return ByteCount::ZERO;
        }
        // The first resize is under way; another one comes, and then a floor.
        let manager = weak.upgrade().expect("in use");
        *resize = Some(std::thread::spawn(move || manager.set_limit(ByteCount::mib(16))));
        std::thread::sleep(Duration::from_millis(50));
        floor.set_floor(ByteCount::mib(20)).expect("below the limit of the first");
        held.set_used(ByteCount::ZERO);
        ByteCount::mib(40)
    }));
    manager.charge(&account, ByteCount::mib(40)).expect("fits");
    let reclaimer: Weak<dyn Reclaim> = Arc::downgrade(&by) as _;
    account.set_reclaimer(reclaimer);
    manager.set_limit(ByteCount::mib(32)).expect("the cache gives way");
    let second = second.lock().expect("lock").take().expect("the cache was asked");
    let error = second.join().expect("no panic").expect_err("a floor of 20 MiB");
    assert!(matches!(error, Error::LimitTooSmall { .. }), "{error}");
    assert_eq!((manager.limit(), keeper.floor()), (ByteCount::mib(32), ByteCount::mib(20)));
}

#[test]
fn a_ceiling_survives_a_resize_and_what_is_above_it_goes_in_the_background() {
    let manager = start(64);
    let cache = cache(&manager, ReclaimCost::Reread, ByteCount::mib(30));
    cache.account.set_ceiling(ByteCount::mib(10));
    let began = Instant::now();
    while cache.account.used() > ByteCount::mib(10) {
        assert!(began.elapsed() < Duration::from_secs(600), "{} are left", cache.account.used());
        std::thread::sleep(Duration::from_millis(1));
    }
    manager.set_limit(ByteCount::mib(128)).expect("more");
    assert_eq!(cache.account.ceiling(), ByteCount::mib(10));
    manager.charge(&cache.account, ByteCount::mib(11)).expect_err("above the ceiling");
    cache.account.set_ceiling(ByteCount(u64::MAX));
    assert_eq!(cache.account.ceiling(), ByteCount::mib(128));
}

/// A reclaimer that gives nothing and is told its ceiling.
struct Told<F>(F);

impl<F: Fn(ByteCount) + Send + Sync> Reclaim for Told<F> {
    fn reclaim(&self, _want: ByteCount, _cost: ReclaimCost) -> ByteCount {
        ByteCount::ZERO
    }

    fn ceiling_changed(&self, ceiling: ByteCount) {
        (self.0)(ceiling);
    }
}

#[test]
fn a_limit_that_changes_while_ceilings_are_applied_holds_for_all() {
    let manager = start(64);
    let first = manager.join("first").expect("room");
    let last = manager.join("last").expect("room");
    // As soon as the first is told of its ceiling, another thread raises the limit, to its end.
    let weak = Arc::downgrade(&manager);
    let last_told = Arc::new(AtomicU64::new(0));
    let heard = Arc::clone(&last_told);
    let told = Arc::new(Told(move |ceiling: ByteCount| {
        heard.store(ceiling.0, Ordering::Relaxed);
        let manager = weak.upgrade().expect("in use");
        let raises = || manager.set_limit(ByteCount::mib(128)).expect("more");
        std::thread::scope(|scope| scope.spawn(raises).join()).expect("no panic");
    }));
    let reclaimer: Weak<dyn Reclaim> = Arc::downgrade(&told) as _;
    first.set_reclaimer(reclaimer);
    first.set_ceiling(ByteCount::mib(10));
    let ceilings = (first.ceiling(), last.ceiling(), manager.temporary().ceiling());
    assert_eq!(ceilings, (ByteCount::mib(10), ByteCount::mib(128), ByteCount::mib(128)));
    assert_eq!(last_told.load(Ordering::Relaxed), 10 << 20);
    first.set_ceiling(ByteCount(u64::MAX));
    assert_eq!(last_told.load(Ordering::Relaxed), 128 << 20);
}

#[test]
fn what_a_consumer_leaves_charged_is_free_when_it_has_left() {
    let manager = start(16);
    let account = manager.join("leaves").expect("room");
    manager.charge(&account, ByteCount::mib(12)).expect("fits");
    let clone = account.clone();
    drop(account);
    assert_eq!(manager.stats().used_bytes, ByteCount::mib(12));
    drop(clone);
    assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
    assert!(consumer(&manager, "leaves").is_none());
}

#[test]
fn counted_memory_pushes_others_out() {
    let manager = start(64);
    let cache = cache(&manager, ReclaimCost::Reread, ByteCount::mib(50));
    let library = manager.join("library").expect("room");
    library.set_used(ByteCount::mib(40));
    let began = Instant::now();
    while library.used() < ByteCount::mib(40) {
        assert_eq!(library.held(), ByteCount::mib(40));
        assert!(began.elapsed() < Duration::from_secs(600), "{:?}", manager.stats());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(cache.account.used() <= ByteCount::mib(24));
    library.set_used(ByteCount::mib(1));
    assert_eq!(library.used(), ByteCount::mib(1));
}

#[test]
fn memory_that_two_threads_count_at_once_is_counted_once() {
    let manager = start(64);
    let library = manager.join("library").expect("room");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..100_000 {
                    library.set_used(ByteCount::mib(round % 2));
                    library.set_used(ByteCount::mib(round % 3));
                }
            });
        }
    });
    assert!(library.used() <= ByteCount::mib(2), "{}", library.used());
    library.set_used(ByteCount::ZERO);
    assert_eq!(manager.stats().used_bytes, ByteCount::ZERO);
}

#[test]
fn an_account_that_is_counted_and_charged_at_once_never_wraps_and_says_so() {
    let manager = start(64);
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    manager
        .on_pressure(move |event| {
            if let Pressure::Miscounted { consumer, bytes } = event {
                assert_eq!(&*consumer, "host");
                count.fetch_add(bytes.0, Ordering::Relaxed);
            }
        })
        .expect("the only one");
    let host = manager.join("host").expect("room");
    let other = manager.join("other").expect("room");
    assert!(other.try_charge(ByteCount::mib(1)));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..200_000 {
                host.set_used(ByteCount(round * 7919 % 4096));
            }
        });
        scope.spawn(|| {
            for _ in 0..200_000 {
                if host.try_charge(ByteCount(4096)) {
                    host.uncharge(ByteCount(4096));
                }
                assert!(host.used() < ByteCount::mib(1), "{}", host.used());
            }
        });
    });
    host.set_used(ByteCount(5));
    host.uncharge(ByteCount(8)); // The first that is certain.
    let stats = consumer(&manager, "host").expect("joined");
    let miscounted = stats.miscounted_bytes;
    assert!(miscounted >= ByteCount(3), "{stats}");
    assert_eq!(told.load(Ordering::Relaxed), miscounted.0);
    assert!(stats.to_string().contains("that it had not charged"), "{stats}");
    assert_eq!((host.used(), manager.stats().used_bytes), (ByteCount::ZERO, ByteCount::mib(1)));
    assert!(!host.try_uncharge(ByteCount(1)));
    assert!(manager.charge(&host, ByteCount::mib(63)).is_ok(), "{}", manager.stats());
}

#[test]
fn what_is_counted_without_room_shows_as_held_and_is_told_once() {
    let manager = start(64);
    let told = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&told);
    manager
        .on_pressure(move |event| {
            if let Pressure::Over { held, limit, consumer } = event {
                assert_eq!((&*consumer, limit), ("library", ByteCount::mib(64)));
                assert!(held >= ByteCount::mib(200));
                count.fetch_add(1, Ordering::Relaxed);
            }
        })
        .expect("the only one");
    let library = manager.join("library").expect("room");
    library.set_used(ByteCount::mib(200));
    let stats = manager.stats();
    assert_eq!(stats.used_bytes, ByteCount::mib(64));
    assert_eq!((stats.held_bytes, stats.over_bytes), (ByteCount::mib(200), ByteCount::mib(136)));
    assert_eq!(consumer(&manager, "library").expect("joined").held_bytes, ByteCount::mib(200));
    assert!(stats.to_string().contains("136.0 MiB OVER the limit"), "{stats}");
    let began = Instant::now();
    while told.load(Ordering::Relaxed) == 0 {
        assert!(began.elapsed() < Duration::from_secs(600), "{:?}", manager.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(manager.stats().held_bytes_max >= ByteCount::mib(200));
    library.set_used(ByteCount::mib(210));
    assert_eq!(manager.stats().over_bytes, ByteCount::mib(146));
    library.set_used(ByteCount::ZERO);
    assert_eq!((manager.stats().held_bytes, library.held()), (ByteCount::ZERO, ByteCount::ZERO));
    assert_eq!(told.load(Ordering::Relaxed), 1);
}

#[test]
fn an_excess_is_told_after_a_while_and_again_only_after_it_was_well_below() {
    let (mut over, start) = (Over::default(), Instant::now());
    let mut look = |ms: u64, held: u64| {
        over.look(ByteCount(held), ByteCount(160), start + Duration::from_millis(ms))
    };
    assert!(!look(0, 200) && !look(900, 200) && look(1000, 200) && !look(5000, 200));
    assert!(!look(5100, 155) && !look(5200, 200) && !look(9000, 200), "just below the limit");
    assert!(!look(9100, 150) && !look(9200, 161) && look(10_200, 161));
}

#[test]
fn too_many_consumers_are_refused() {
    let manager = start(16);
    let all: Vec<_> = (1..CONSUMERS_MAX).map(|_| manager.join("one").expect("room")).collect();
    let error = manager.join("last").expect_err("temporary memory is one too");
    assert!(matches!(error, Error::TooManyConsumers { most: CONSUMERS_MAX, .. }), "{error}");
    drop(all);
    drop(manager.join("last").expect("the others left"));
}

#[test]
fn a_large_claim_is_served_beside_small_ones_that_never_stop() {
    let manager = start(64);
    manager.set_deadline(Duration::from_secs(60));
    let cache = cache(&manager, ReclaimCost::Reread, ByteCount::mib(60));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // Fills again whatever is free, as a pool that misses all the time.
            while !stop.load(Ordering::Relaxed) {
                if cache.account.try_charge(ByteCount::kib(64)) {
                    cache.held.fetch_add(64 << 10, Ordering::Relaxed);
                }
            }
        });
        for _ in 0..20 {
            drop(manager.allocate_temporary(ByteCount::mib(48)).expect("gathered piece by piece"));
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(manager.stats().used_bytes_max <= manager.limit());
}
