//! Data of small objects under a limit, with `threshold:0`: maps, strings and boxes of a program that
//! knows nothing of far memory.
//!
//! Guards: G1, G5.

use crate::common::child::alone;
use crate::common::{Dice, heap, seed, watchdog};
use farheap::{ByteCount, Far, Local};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// Enough small objects for three times the limit.
const OBJECTS: u64 = 150_000;

/// A value of 16 to 215 bytes that its key decides.
fn value(key: u64) -> Box<[u8]> {
    let len = 16 + key.wrapping_mul(0x9E37_79B9_7F4A_7C15) as usize % 200;
    vec![key as u8 ^ len as u8; len].into()
}

#[test]
fn small_objects_are_far_and_stay_below_the_limit() {
    alone("small_objects_are_far_and_stay_below_the_limit", || {
        let _watchdog = watchdog("small objects", Duration::from_secs(400));
        let conf = "far_limit:8MiB,capacity:1GiB,threshold:0,mode:user";
        let Some(heap) = heap(conf) else { return };
        let mut map: BTreeMap<u64, Box<[u8]>> = BTreeMap::new();
        (0..OBJECTS).for_each(|key| drop(map.insert(key, value(key))));
        assert!(map.values().all(|value| Far::contains(value.as_ptr())), "a small object is local");
        let stats = heap.stats();
        let far = heap.usage();
        assert!(far.allocated_bytes >= ByteCount::mib(20), "{far}");
        assert!(stats.bytes_written >= ByteCount::mib(8), "nothing left: {stats}");
        // jemalloc's metadata and what its caches keep; without `threshold:0` it is all of the data.
        let local = Local::usage().resident_bytes;
        assert!(local < ByteCount::mib(16), "{local} local for {} far", far.allocated_bytes);
        // Some die, some change, all others are as they were.
        let mut dice = Dice::new(seed("small objects"));
        for _ in 0..OBJECTS / 4 {
            let key = dice.below(OBJECTS);
            assert!(map.remove(&key).is_none_or(|found| found == value(key)), "{key} is another");
        }
        assert!(map.iter().all(|(key, found)| *found == value(*key)), "a value is another");
        drop(map);
        assert!(heap.stats().resident_bytes_max <= ByteCount::mib(8), "{}", heap.stats());
    });
}

#[test]
fn threads_share_small_far_objects() {
    alone("threads_share_small_far_objects", || {
        let _watchdog = watchdog("shared small objects", Duration::from_secs(400));
        let conf = "far_limit:8MiB,capacity:1GiB,threshold:0,mode:user";
        let Some(heap) = heap(conf) else { return };
        // Each thread frees what another one allocated; threads come and go meanwhile.
        let (sender, receiver) = std::sync::mpsc::channel::<HashMap<u64, Box<[u8]>>>();
        let makers: Vec<_> = (0..8)
            .map(|n| {
                let sender = sender.clone();
                std::thread::spawn(move || {
                    for part in 0..8 {
                        let first = (n * 8 + part) * 2000;
                        let keys = first..first + 2000;
                        sender.send(keys.map(|key| (key, value(key))).collect()).expect("taken");
                    }
                })
            })
            .collect();
        drop(sender);
        let mut kept = VecDeque::new();
        for map in receiver {
            kept.push_back(map);
            if kept.len() > 32 {
                drop(kept.pop_front());
            }
        }
        makers.into_iter().for_each(|maker| maker.join().expect("made"));
        for (key, found) in kept.iter().flatten() {
            assert!(Far::contains(found.as_ptr()), "a small object is local");
            assert_eq!(*found, value(*key), "{key} is another");
        }
        assert!(heap.stats().resident_bytes_max <= ByteCount::mib(8), "{}", heap.stats());
    });
}
