//! Tiers whose memory is that of a NUMA node. On a machine with one node there is one to test;
//! `tests/numa.sh` runs this on an emulated machine with two.
//!
//! Guards: the interface.

#![expect(unsafe_code, reason = "asks the kernel where pages are")]
#![expect(clippy::disallowed_methods, reason = "no wrapper of the library tells where pages are")]

use crate::common::child::alone;
use crate::common::{heap, watchdog};
use allocator_api2::vec::Vec as TierVec;
use farheap::probe::NumaNode;
use farheap::{ByteCount, Error, Heap, Tier};
use std::time::Duration;

const KERNEL_PAGE: usize = 4096;

/// Limits whose pages come and go in different ways: copied, in chunks.
const LIMITS: [&str; 2] = ["far_limit:16MiB", "far_limit:128MiB"];

/// The nodes of the resident pages of a range.
fn nodes_of(bytes: &[u64]) -> Vec<i32> {
    let first = bytes.as_ptr() as usize / KERNEL_PAGE * KERNEL_PAGE;
    let end = bytes.as_ptr_range().end as usize;
    let pages: Vec<usize> = (first..end).step_by(KERNEL_PAGE).collect();
    let mut nodes = vec![0_i32; pages.len()];
    let (count, none, to) = (pages.len(), std::ptr::null::<i32>(), nodes.as_mut_ptr());
    // SAFETY: asks where pages of this process are, and moves none; both arrays have `count` entries.
    let asked =
        unsafe { libc::syscall(libc::SYS_move_pages, 0, count, pages.as_ptr(), none, to, 0) };
    assert_eq!(asked, 0, "move_pages: {}", std::io::Error::last_os_error());
    // What is negative says why there is none: -ENOENT where nothing is resident.
    nodes.retain(|node| *node >= 0);
    nodes
}

fn numbers(tier: &Heap, count: u64) -> TierVec<u64, Tier> {
    let mut numbers = TierVec::with_capacity_in(count as usize, tier.tier());
    numbers.extend(0..count);
    numbers
}

fn all_are_on(numbers: &[u64], node: NumaNode, least: ByteCount) {
    // Eviction runs ahead of fresh memory, and for longer where the machine is busy: what is read comes back.
    let enough = || {
        std::hint::black_box(numbers.iter().fold(0, |sum, number| sum ^ number));
        nodes_of(numbers).len() as u64 * KERNEL_PAGE as u64 >= least.get()
    };
    assert!(crate::common::eventually(enough), "less than {least} are resident");
    let nodes = nodes_of(numbers);
    let number = i32::try_from(node.number).expect("a small number");
    let elsewhere = nodes.iter().filter(|at| **at != number).count();
    assert_eq!(elsewhere, 0, "of {} pages that belong to node {number}", nodes.len());
}

#[test]
fn pages_of_a_tier_are_on_its_node_fresh_and_read_back() {
    const NAME: &str = "pages_of_a_tier_are_on_its_node_fresh_and_read_back";
    alone(NAME, || {
        let _watchdog = watchdog("heap_node", Duration::from_secs(300));
        let nodes = NumaNode::all();
        let Some(default) = heap("far_limit:16MiB,capacity:64MiB") else { return };
        assert!(!nodes.is_empty(), "/sys says which nodes have memory");
        for (node, limit) in nodes.iter().flat_map(|node| LIMITS.map(|limit| (*node, limit))) {
            let text = format!("{limit},capacity:1GiB,node:{}", node.number);
            let config = Heap::builder().parse(&text).expect("an option");
            let (_, limit) = config.limits().expect("the node is there");
            let tier = default.add_tier("of-node", config).expect("the machine has room");
            // Half of the limit: without a device, as it were.
            let fits = numbers(&tier, limit.get() / 2 / 8);
            all_are_on(&fits, node, ByteCount(limit.get() / 2));
            assert_eq!(tier.stats().bytes_written, ByteCount::ZERO, "{text}");
            // Three times the limit: what is resident is what came last, and then what was read.
            let large = numbers(&tier, 3 * limit.get() / 8);
            all_are_on(&large, node, ByteCount(limit.get() / 4));
            assert!(large.iter().zip(0..).all(|(seen, n)| *seen == n), "{text}");
            all_are_on(&large, node, ByteCount(limit.get() / 4));
            assert!(tier.stats().bytes_read >= limit, "{text}: {}", tier.stats());
            println!("{text}: all on node {}", node.number);
            drop((fits, large));
            tier.shutdown().expect("all of it is freed");
        }
        default.shutdown().expect("all far memory is freed");
    });
}

#[test]
fn a_node_that_is_not_there_and_a_limit_beyond_its_memory_are_refused() {
    let limits = |text: &str| Heap::builder().parse(text).and_then(|options| options.limits());
    let nodes = NumaNode::all();
    let error = limits("node:999").expect_err("no machine has it");
    assert!(matches!(&error, Error::Config { key, .. } if key == "node"), "{error}");
    assert!(error.to_string().contains("there is no node 999"), "{error}");
    let Some(node) = nodes.first() else { return };
    let text = format!("node:{},far_limit:{}", node.number, node.total.get() + 1);
    let error = limits(&text).expect_err("more than there is");
    assert!(matches!(&error, Error::Config { key, .. } if key == "far_limit"), "{error}");
    let (_, half) = limits(&format!("node:{}", node.number)).expect("half of the node");
    assert!(half <= ByteCount(node.total.get() / 2), "{half}");
}
