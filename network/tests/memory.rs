//! Memory of queues: as much as they say, and there from the start.
#![expect(unsafe_code, reason = "counts what is allocated")]

mod common;

use common::{Announced, PATIENT, Page, TestServer, client, push, run, striped};
use farheap_nbd::{Client, ServerAddress};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

const PAGE: usize = 4096;
/// Allocations of this size and more are looked at page by page.
const LARGE: usize = 2 * PAGE;
/// Requests in flight.
const DEPTH: usize = 256;
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

/// Pages of the allocations that were noted and are in memory, or swapped out.
fn present(ones: &[(usize, usize)]) -> BTreeSet<usize> {
    let pagemap = File::open("/proc/self/pagemap").expect("a map of pages");
    let is_there = |page: &usize| {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, *page as u64 * 8).expect("an entry");
        u64::from_ne_bytes(entry) >> 62 != 0
    };
    let pages = ones.iter().flat_map(|(start, len)| start.div_ceil(PAGE)..(start + len) / PAGE);
    pages.filter(is_there).collect()
}

#[test]
fn many_requests_touch_no_page_of_a_queue_that_one_has_not_touched() {
    let (_servers, clients) = clients();
    let places: Vec<u64> = (1..=DEPTH as u64).map(|n| n * PAGE as u64).collect();
    for client in &clients {
        IS_NOTED.set(true);
        let mut queue = client.open_queue(DEPTH).expect("a queue");
        IS_NOTED.set(false);
        let (ones, count) = LARGE_ONES.replace(([(0, 0); LARGE_MAX], 0));
        let ones = &ones[..count];
        let all: usize = ones.iter().map(|(_, len)| len / PAGE).sum();
        for is_read in [false, true] {
            run(&mut queue, is_read, PAGE as u64, &mut Page::of(7, PAGE));
        }
        let before = present(ones);
        println!("{} of {all} pages of {} servers", before.len(), client.servers().count());
        assert!(before.len() > all / 2, "{} of {all} pages", before.len());
        for is_read in [false, true] {
            let mut pages: Vec<Page> = places.iter().map(|_| Page::of(7, PAGE)).collect();
            for (place, page) in places.iter().zip(&mut pages) {
                push(&mut queue, 7, is_read, *place, page);
            }
            let mut left = DEPTH;
            while left > 0 {
                queue.wait(Duration::from_secs(1), &mut |_| left -= 1).expect("a wait");
            }
        }
        let more = present(ones).difference(&before).count();
        // Pages of a slow server were computed, in memory for that.
        let is_slow = client.stats().iter().any(|server| server.hedges > 0);
        assert!(more == 0 || is_slow, "{more} pages more");
    }
}
