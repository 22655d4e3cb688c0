//! `FarHeap` as the global allocator of a program with a far tier.
//!
//! The heap layer is compiled into this test, over plain memory instead of a region, so that it
//! runs everywhere and can install its own tier. No test harness: its threads would allocate in
//! the middle of every step, and the heap's own unit tests would run here too.

#![allow(dead_code, unused_imports, unreachable_pub, reason = "not all of the layers is used")]
#![allow(clippy::disallowed_methods, reason = "a part of sys is compiled in here")]

#[path = "../src/base/mod.rs"]
mod base;
#[path = "../src/sys/block.rs"]
mod block;
#[path = "../src/sys/ending.rs"]
mod ending;
#[path = "../src/sys/fork.rs"]
mod fork;
#[path = "../src/heap/mod.rs"]
mod heap;
#[path = "../src/sys/inherited.rs"]
mod inherited;
#[path = "../src/sys/membarrier.rs"]
mod membarrier;
mod sys {
    pub(crate) use crate::{block, ending, fork, inherited, membarrier};
}

use base::error::{Error, Result};
use base::units::ByteCount;
use heap::testing::TestSource;
use heap::{
    ExtentSource, Far, FarArenas, FarArenasOptions, FarHeap, Scope, Tier, default_tier, install,
    pin_thread_local, uninstall,
};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::thread;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

fn main() {
    let before = vec![1_u8; 10_000];
    assert!(!Far::contains(before.as_ptr()));
    let source = Arc::new(TestSource::new(ByteCount::gib(4), ByteCount::gib(1)));
    // All that is not said to be local is far.
    let options = FarArenasOptions { threshold: Some(ByteCount(1)), ..FarArenasOptions::default() };
    let arenas = FarArenas::create(source, options).expect("jemalloc has an arena left");
    install(arenas).expect("no other heap is running");

    what_was_allocated_before_the_heap_ran_is_freed_after(before);
    collections_live_in_far_memory_and_move_between_threads();
    threads_start_and_end_with_all_of_their_own_memory_far();
    a_pinned_thread_maintains_the_tier_while_others_work();
    uninstall(&[arenas]).expect("every far allocation has been freed");
    println!("heap_global: 4 steps passed");
}

fn collections_live_in_far_memory_and_move_between_threads() {
    let mut numbers: Vec<u64> = (0..1_000_000).collect();
    assert!(Far::contains(numbers.as_ptr()));
    let names: HashMap<u64, String> = (0..10_000).map(|n| (n, n.to_string())).collect();
    let tree = thread::spawn(move || {
        numbers.retain(|number| number % 1_000 == 0);
        numbers.shrink_to_fit();
        numbers.into_iter().map(|n| (n, names.get(&n).cloned())).collect::<BTreeMap<_, _>>()
    })
    .join()
    .expect("the thread asserts nothing false");
    assert_eq!(tree.len(), 1_000);
    assert_eq!(tree[&9_000].as_deref(), Some("9000"));
}

fn what_was_allocated_before_the_heap_ran_is_freed_after(before: Vec<u8>) {
    let mut after = before.clone();
    assert!(Far::contains(after.as_ptr()));
    drop(before);
    after.extend_from_slice(&[2; 100_000]);
    assert_eq!(after.iter().map(|&byte| u64::from(byte)).sum::<u64>(), 210_000);
}

fn threads_start_and_end_with_all_of_their_own_memory_far() {
    // Destructors before and after the heap's own; each allocates once more.
    thread_local! {
        static WORDS: RefCell<Words> = const { RefCell::new(Words(Vec::new())) };
        static LAZY: RefCell<Words> = RefCell::new(Words(vec!["first".to_owned()]));
    }
    struct Words(Vec<String>);
    impl Drop for Words {
        fn drop(&mut self) {
            self.0.push(format!("{} words", self.0.len()));
            assert!(Far::contains(self.0.last().expect("was just pushed").as_ptr()));
        }
    }
    let threads: Vec<_> = (0..64)
        .map(|index| {
            thread::Builder::new().name(format!("worker {index}")).spawn(move || {
                WORDS.with_borrow_mut(|words| words.0.push(index.to_string()));
                LAZY.with_borrow_mut(|words| words.0.push(index.to_string()));
            })
        })
        .collect();
    for thread in threads {
        thread.expect("a thread starts").join().expect("the thread asserts nothing false");
    }
}

fn a_pinned_thread_maintains_the_tier_while_others_work() {
    let arenas = default_tier().expect("the heap runs");
    let worker = thread::spawn(|| {
        let bytes = |n: usize| -> usize {
            vec![n as u8; n * 1_000].iter().map(|&byte| byte as usize).sum()
        };
        (0..200).map(bytes).sum::<usize>()
    });
    let maintainer = thread::spawn(move || {
        pin_thread_local();
        for _ in 0..50 {
            arenas.maintain();
            assert!(!Far::contains(vec![0_u8; 100_000].as_ptr()));
        }
    });
    let expected: usize = (0..200_usize).map(|n| n * n * 1_000).sum();
    assert_eq!(worker.join().expect("the thread asserts nothing false"), expected);
    maintainer.join().expect("the thread asserts nothing false");
}
