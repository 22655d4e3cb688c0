//! Moving pages allocates nothing: a thread that serves page faults must not wait for the heap.

#![expect(unsafe_code, reason = "hands buffers to queues")]

use crate::allocations_of_this_thread;
use crate::common::faulty::FaultyStore;
use farheap::ByteCount;
use farheap::store::{BlockStore, EncryptedStore, IoEngine, MemStore, Op, Queue, Request, Store};
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::time::Duration;

#[repr(align(4096))]
struct Page([u8; 4096]);

/// Writes, reads and fails requests, looks and times out; returns the allocations that took.
fn allocations_of_transfers(store: &dyn Store, queue: &mut dyn Queue, page: &mut Page) -> u64 {
    let before = allocations_of_this_thread();
    let mut reported = 0;
    for round in 0..64 {
        let op = if round % 2 == 0 { Op::Write } else { Op::Read };
        let segments = [slice_from_raw_parts_mut(page.0.as_mut_ptr(), 4096)];
        let request = Request { token: round, op, offset: round * 4096, segments: &segments };
        // SAFETY: the page is not touched before the completion, awaited below.
        assert!(unsafe { queue.push(request) });
        while queue.in_flight() > 0 {
            let mut done = |token, _| {
                reported += u64::from(token == round);
            };
            queue.wait(Duration::from_secs(60), &mut done).expect("wait");
        }
        queue.wait(Duration::ZERO, &mut |_, _| reported += 1).expect("wait");
    }
    // SAFETY: nothing is in flight; the page is ours.
    let _ = unsafe { store.read_now(0, slice_from_raw_parts_mut(page.0.as_mut_ptr(), 4096)) };
    // SAFETY: nobody else uses the store.
    unsafe { store.discard(0, 4096) }.expect("discard");
    assert_eq!(reported, 64);
    allocations_of_this_thread() - before
}

#[test]
fn transfers_allocate_nothing_on_any_store() {
    let mib = ByteCount::mib(1);
    let faulty = FaultyStore::new(Arc::new(MemStore::new(mib).expect("memory")), 1);
    faulty.control().fail_fraction(Op::Read, 500_000, 5);
    let temporary = || BlockStore::temporary(None, Some(mib)).expect("temporary");
    let memory = Arc::new(MemStore::new(mib).expect("memory"));
    let sealed = EncryptedStore::new(memory).expect("a key");
    let stores: [Box<dyn Store>; 5] = [
        Box::new(temporary().with_engine(IoEngine::Sync).expect("synchronous")),
        Box::new(temporary()),
        Box::new(MemStore::new(mib).expect("memory")),
        Box::new(faulty),
        Box::new(sealed),
    ];
    let mut page = Box::new(Page([1; 4096]));
    for store in stores {
        let (reader, _writer) = std::io::pipe().expect("pipe");
        let mut queue = store.open_queue(8).expect("queue");
        queue.watch(std::os::fd::AsRawFd::as_raw_fd(&reader)).expect("watch");
        let count = allocations_of_transfers(&*store, &mut *queue, &mut page);
        assert_eq!(count, 0, "{}", store.describe());
    }
}
