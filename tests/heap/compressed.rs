//! Pages that are kept compressed in memory before they go to the device.
//!
//! Guards: G2, G5, G6.

use crate::common::child::{alone, cases};
use crate::common::faulty::{FaultControl, FaultyStore};
use crate::common::{Dice, eventually, heap, mem_store, watchdog};
use allocator_api2::vec::Vec as FarVec;
use farheap::region::{Region, RegionConfig};
use farheap::store::Op;
use farheap::{ByteCount, Config, Error, Far, Heap};
use std::sync::Arc;
use std::time::Duration;

const EIO: i32 = 5;

/// Numbers that repeat: they compress to a thirtieth.
fn plain(n: u64, salt: u64) -> u64 {
    (n / 64) ^ salt
}

/// Numbers that do not compress.
fn noise(n: u64, salt: u64) -> u64 {
    Dice::new(n ^ salt << 32).roll()
}

/// Numbers of which each fourth does not compress: to a third.
fn mixed(n: u64, salt: u64) -> u64 {
    if n.is_multiple_of(4) { noise(n, salt) } else { salt }
}

fn column(number: fn(u64, u64) -> u64, bytes: u64) -> FarVec<u64, Far> {
    let mut column = FarVec::with_capacity_in((bytes / 8) as usize, Far);
    column.extend((0..bytes / 8).map(|n| number(n, 1)));
    column
}

fn is_right(column: &[u64], number: fn(u64, u64) -> u64) -> bool {
    column.iter().zip(0..).all(|(seen, n)| *seen == number(n, 1))
}

/// A heap whose device can be broken, or `None` where userfaultfd is not permitted.
fn heap_on_faulty(text: &str, device: ByteCount) -> Option<(Heap, FaultControl)> {
    let store = FaultyStore::new(mem_store(device), 1);
    let control = store.control();
    match Heap::start_on(Config::parse(text).expect("valid"), Arc::new(store)) {
        Ok(heap) => Some((heap, control)),
        Err(Error::UffdUnavailable { reasons }) => {
            println!("skipped: userfaultfd is not permitted here: {reasons}");
            None
        }
        Err(error) => panic!("{text}: {error}"),
    }
}

#[test]
fn what_compresses_does_not_need_the_device() {
    cases("what_compresses_does_not_need_the_device", &["handler", "in_thread"], |mode| {
        let _watchdog = watchdog("heap_compressed", Duration::from_secs(120));
        let conf = format!("far_limit:24MiB,compress:12MiB,span:1GiB,mode:{mode}");
        let Some((heap, device)) = heap_on_faulty(&conf, ByteCount::mib(256)) else { return };
        // A device that nobody can use.
        device.fail_fraction(Op::Write, 1_000_000, EIO);
        device.fail_fraction(Op::Read, 1_000_000, EIO);
        let data = column(plain, 48 << 20);
        for _ in 0..3 {
            assert!(is_right(&data, plain));
        }
        let stats = heap.stats();
        println!("{stats}");
        assert!(stats.compressed_bytes >= ByteCount::mib(24), "{stats}");
        assert!(stats.resident_bytes_max <= ByteCount::mib(24), "{stats}");
        assert_eq!((stats.read_errors, stats.write_errors), (0, 0), "the device was asked");
        assert_eq!(device.injected(), 0);
        drop(data);
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn what_does_not_compress_or_does_not_fit_goes_to_the_device() {
    const TEST: &str = "what_does_not_compress_or_does_not_fit_goes_to_the_device";
    cases(TEST, &["off", "on"], |encrypt| {
        let _watchdog = watchdog("heap_compressed", Duration::from_secs(120));
        let conf = format!(
            "far_limit:16MiB,compress:4MiB,capacity:512MiB,span:1GiB,page:16KiB,encrypt:{encrypt}"
        );
        let Some(heap) = heap(&conf) else { return };
        let random = column(noise, 32 << 20);
        assert!(is_right(&random, noise));
        let stats = heap.stats();
        assert!(stats.compressed_bytes <= ByteCount::mib(1), "noise was kept: {stats}");
        let many = column(mixed, 128 << 20);
        for _ in 0..2 {
            assert!(is_right(&many, mixed) && is_right(&random, noise));
        }
        let stats = heap.stats();
        println!("{stats}");
        let kept = stats.compressed_bytes;
        assert!(kept >= ByteCount::mib(8) && kept < ByteCount::mib(100), "{stats}");
        assert!(stats.resident_bytes_max <= ByteCount::mib(16), "{stats}");
        drop((random, many));
        heap.purge();
        let is_forgotten = || heap.stats().compressed_bytes == ByteCount::ZERO;
        assert!(eventually(is_forgotten), "{}", heap.stats());
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn a_device_that_fails_loses_nothing_that_is_kept() {
    alone("a_device_that_fails_loses_nothing_that_is_kept", || {
        let _watchdog = watchdog("heap_compressed", Duration::from_secs(120));
        let conf = "far_limit:24MiB,compress:4MiB,span:1GiB,page:16KiB";
        let Some((heap, device)) = heap_on_faulty(conf, ByteCount::mib(256)) else { return };
        let mut data = column(mixed, 40 << 20);
        device.fail_fraction(Op::Write, 200_000, EIO);
        for round in 2..6 {
            for (n, word) in (0..).zip(&mut data) {
                assert_eq!(*word, mixed(n, round - 1));
                *word = mixed(n, round);
            }
        }
        assert!(device.injected() > 0, "nothing failed: {}", heap.stats());
        device.heal();
        assert!(data.iter().zip(0..).all(|(seen, n)| *seen == mixed(n, 5)), "{}", heap.stats());
        assert_eq!(heap.stats().poisoned, 0, "{}", heap.stats());
        drop(data);
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn limits_that_do_not_hold_the_compressed_pages_are_refused() {
    let refused = |text: &str| Config::parse(text).expect_err(text).to_string();
    assert!(refused("far_limit:16MiB,compress:12MiB").contains("limit"));
    assert!(refused("far_limit:16MiB,compress:many").contains("compress"));
    let store = || mem_store(ByteCount::mib(64));
    let small = RegionConfig::new().limit(ByteCount::mib(64)).compress(Some(ByteCount::mib(1)));
    let error = Region::create(small, store()).expect_err("1 MiB is too little");
    assert!(error.to_string().contains("compress"), "{error}");
    let config = RegionConfig::new().limit(ByteCount::mib(15)).compress(Some(ByteCount::mib(8)));
    let error = Region::create(config.clone(), store()).expect_err("7 MiB are left");
    assert!(matches!(error, Error::LimitTooSmall { .. }), "{error}");
    let config = config.limit(ByteCount::mib(32));
    let Some(region) = crate::common::region(config, store()) else { return };
    let lower = region.set_limit(ByteCount::mib(15));
    let minimum = ByteCount::mib(16);
    assert_eq!(lower, Err(Error::LimitTooSmall { limit: ByteCount::mib(15), minimum }));
    region.set_limit(minimum).expect("that suffices");
    assert_eq!(region.stats().limit_bytes, minimum);
}
