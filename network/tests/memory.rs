//! Memory of queues: as much as they say, and there from the start.
#![expect(unsafe_code, reason = "counts what is allocated")]

mod common;

use common::{Announced, PATIENT, TestServer, client, striped};
use farheap_nbd::{Client, ServerAddress};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs::File;
use std::os::unix::fs::FileExt;

const PAGE: usize = 4096;
/// Allocations of this size and more are looked at page by page.
const LARGE: usize = 8 * PAGE;
const LARGE_MAX: usize = 256;

/// The system's allocator, with a count for each thread.
struct Counted;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static IS_NOTED: Cell<bool> = const { Cell::new(false) };
    static LARGE_ONES: Cell<([(usize, usize); LARGE_MAX], usize)> =
        const { Cell::new(([(0, 0); LARGE_MAX], 0)) };
}

#[global_allocator]
static COUNTED: Counted = Counted;

fn count(ptr: *mut u8, len: usize) -> *mut u8 {
    HELD.with(|held| held.set(held.get() + len as isize));
    if len >= LARGE && IS_NOTED.get() {
        LARGE_ONES.with(|ones| {
            let (mut all, count) = ones.get();
            all[count] = (ptr.addr(), len);
            ones.set((all, count + 1));
        });
    }
    ptr
}

// SAFETY: the system's allocator does it all; the counts allocate nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        count(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        count(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HELD.with(|held| held.set(held.get() - layout.size() as isize));
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Servers, and clients of one, of two copies, and with parity 1 and 2.
fn clients() -> (Vec<TestServer>, Vec<Client>) {
    let servers: Vec<_> = (0..6).map(|_| TestServer::start(Announced::default())).collect();
    let addresses: Vec<ServerAddress> =
        servers.iter().map(|server| server.address.clone()).collect();
    let clients = vec![
        client(&addresses[..1], PATIENT),
        client(&addresses[..2], PATIENT),
        striped(&addresses[..5], 1, PATIENT),
        striped(&addresses, 2, PATIENT),
    ];
    (servers, clients)
}

#[test]
fn a_queue_holds_as_many_bytes_as_it_says() {
    let (_servers, clients) = clients();
    for (client, depth) in clients.iter().flat_map(|client| [1, 32, 256].map(|n| (client, n))) {
        let before = HELD.get();
        let queue = client.open_queue(depth).expect("a queue");
        let held = HELD.get() - before;
        let told = client.queue_bytes(depth) as isize;
        println!("{} servers, depth {depth}: {held} bytes, {told} told", client.servers().count());
        // The place of a connection goes when the next one is made, and a connection has some bytes more.
        let slack = 4096 * client.servers().count() as isize;
        assert!((held - told).abs() < slack, "{held} bytes, {told} told");
        drop(queue);
    }
}

#[test]
fn a_queue_has_its_pages_before_its_first_request() {
    let (_servers, clients) = clients();
    let pagemap = File::open("/proc/self/pagemap").expect("a map of pages");
    for client in &clients {
        IS_NOTED.set(true);
        let _queue = client.open_queue(256).expect("a queue");
        IS_NOTED.set(false);
        let (ones, count) = LARGE_ONES.replace(([(0, 0); LARGE_MAX], 0));
        assert!(count > 0, "none is large");
        for (start, len) in &ones[..count] {
            let pages = start.div_ceil(PAGE)..(start + len) / PAGE;
            for page in pages {
                let mut entry = [0; 8];
                pagemap.read_exact_at(&mut entry, page as u64 * 8).expect("an entry");
                // In memory, or swapped out.
                let is_there = u64::from_ne_bytes(entry) >> 62 != 0;
                assert!(is_there, "page {} of {len} bytes", page - start.div_ceil(PAGE));
            }
        }
    }
}
