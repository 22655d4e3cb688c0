//! Sub-allocators of a collective: kinds, fullness, freeing by address, and what faults.
//!
//! Guards: G1, G5.

#![expect(unsafe_code, reason = "frees and writes through plain pointers")]

use crate::common::{Dice, mem_store, seed};
use farheap::region::RegionConfig;
use farheap::{ByteCount, Error};
use farheap_collections::sub::{
    AllocError, AnySub, Collective, CollectiveConfig, Kind, SubAllocator,
};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

fn collective_of(page: ByteCount, local: ByteCount, store: ByteCount) -> Option<Collective> {
    let region = CollectiveConfig::default_region();
    let limit = RegionConfig::LIMIT_MIN;
    let config = CollectiveConfig::new().page(page).local(local).region(region.limit(limit));
    crate::new_collective(config, mem_store(store))
}

fn collective(local: ByteCount) -> Option<Collective> {
    collective_of(ByteCount::kib(4), local, ByteCount::mib(64))
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).expect("a valid layout")
}

fn free(collective: &Collective, ptr: NonNull<u8>, layout: Layout) {
    // SAFETY: tests free what they allocated, once, with its layout.
    unsafe { collective.deallocate(ptr, layout) };
}

#[test]
fn a_page_is_full_when_its_bytes_are_used_and_is_given_back_when_empty() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let node = layout(1024, 8);
    let page = collective.new_page().expect("a page");
    let objects: Vec<_> = (0..4).map(|_| page.allocate(node).expect("room")).collect();
    assert_eq!(page.allocate(layout(1, 1)), Err(AllocError::Full));
    assert!(objects.iter().all(|ptr| page.contains(ptr.as_ptr())));
    assert!(collective.share_a_page(objects[0].as_ptr(), objects[3].as_ptr()));
    assert!(page.occupancy_under(1.01) && !page.occupancy_under(1.0));
    drop(page);
    assert_eq!(collective.far_pages(), 1);
    for ptr in objects {
        free(&collective, ptr, node);
    }
    assert_eq!(collective.far_pages(), 0);
}

#[test]
fn an_empty_page_stays_while_somebody_holds_its_sub_allocator() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let node = layout(100, 4);
    let page = collective.new_page().expect("a page");
    let ptr = page.allocate(node).expect("room");
    let again = collective.suballocator_of(ptr.as_ptr()).expect("its own");
    drop(page);
    free(&collective, ptr, node);
    assert_eq!(collective.far_pages(), 1);
    let second = again.allocate(node).expect("the page is still there");
    assert!(again.contains(second.as_ptr()));
    free(&collective, second, node);
    drop(again);
    assert_eq!(collective.far_pages(), 0);
}

#[test]
fn purely_local_memory_is_bounded_and_room_comes_back() {
    let Some(collective) = collective(ByteCount(10 * 336 + 100)) else { return };
    let node = layout(336, 8);
    let local = collective.purely_local();
    let objects: Vec<_> = (0..10).map(|_| local.allocate(node).expect("room")).collect();
    assert_eq!(local.allocate(node), Err(AllocError::Full));
    assert!(!local.occupancy_under(0.9));
    assert_eq!(
        collective.suballocator_of(objects[5].as_ptr()).expect("its own").kind(),
        Kind::PurelyLocal
    );
    free(&collective, objects[5], node);
    assert_eq!(local.allocate(node), Ok(objects[5]));
    assert_eq!(collective.stats().faults_zero, 0, "local memory is not the region's");
}

#[test]
fn a_purely_local_capacity_of_zero_is_full_from_the_start() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    assert_eq!(collective.purely_local().allocate(layout(16, 8)), Err(AllocError::Full));
    assert!(!collective.is_local(std::ptr::null()));
}

#[test]
fn objects_that_no_page_can_hold_are_refused_or_get_pages_of_their_own() {
    let Some(collective) = collective(ByteCount::kib(64)) else { return };
    let large = layout(10_000, 8);
    let page = collective.new_page().expect("a page");
    assert_eq!(page.allocate(large), Err(AllocError::TooLarge { size: 10_000, max: 4096 }));
    let over_aligned = layout(8, 8192);
    assert_eq!(page.allocate(over_aligned), Err(AllocError::Align { align: 8192, max: 4096 }));
    let swappable = collective.swappable();
    let ptr = swappable.allocate(large).expect("three pages");
    assert!(swappable.contains(ptr.as_ptr()));
    assert_eq!(collective.far_pages(), 4);
    // SAFETY: 10,000 bytes were allocated.
    unsafe { ptr.as_ptr().write_bytes(7, 10_000) };
    free(&collective, ptr, large);
    assert_eq!(collective.far_pages(), 1);
    let whole = page.allocate(layout(4096, 4096)).expect("a whole page has no header in it");
    free(&collective, whole, layout(4096, 4096));
}

#[test]
fn objects_of_no_size_take_no_room() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let nothing = layout(0, 64);
    let page = collective.new_page().expect("the store has room");
    let subs: [(&dyn SubAllocator, Kind); 3] = [
        (&collective.purely_local(), Kind::PurelyLocal),
        (&page, Kind::PerPage),
        (&collective.swappable(), Kind::Swappable),
    ];
    for (sub, kind) in subs {
        assert_eq!(sub.kind(), kind);
        let ptr = sub.allocate(nothing).expect("nothing always fits");
        assert_eq!(ptr.as_ptr().addr() % 64, 0);
        free(&collective, ptr, nothing);
    }
}

#[test]
fn a_full_store_is_an_error_and_not_a_crash() {
    let Some(collective) = collective_of(ByteCount::kib(4), ByteCount::ZERO, ByteCount::mib(4))
    else {
        return;
    };
    let page = layout(4096, 8);
    let mut objects = Vec::new();
    let error = loop {
        match collective.swappable().allocate(page) {
            Ok(ptr) => objects.push(ptr),
            Err(error) => break error,
        }
        assert!(objects.len() < 10_000, "4 MiB of store and 8 MiB of cache are not endless");
    };
    assert!(matches!(error, AllocError::Far(Error::StoreFull { .. })), "{error}");
    free(&collective, objects.pop().expect("some fitted"), page);
    collective.swappable().allocate(page).expect("a page was given back");
}

#[test]
fn a_hint_places_nearby_only_while_there_is_room() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let node = layout(1000, 8);
    let hints = collective.hint_only();
    let first = hints.allocate(node, None).expect("room");
    let near: Vec<_> =
        (0..4).map(|_| hints.allocate(node, Some(first.as_ptr())).expect("room")).collect();
    let together = |ptr: &NonNull<u8>| collective.share_a_page(ptr.as_ptr(), first.as_ptr());
    assert_eq!(near.iter().filter(|ptr| together(ptr)).count(), 3);
}

#[test]
fn freeing_does_not_touch_the_page() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let node = layout(512, 8);
    let page = collective.new_page().expect("a page");
    let objects: Vec<_> = (0..8).map(|_| page.allocate(node).expect("room")).collect();
    for ptr in &objects {
        // SAFETY: 512 bytes were allocated.
        unsafe { ptr.as_ptr().write_bytes(1, 512) };
    }
    collective.region().evict_all().expect("the store has room");
    let before = collective.stats();
    for ptr in &objects[1..] {
        free(&collective, *ptr, node);
    }
    page.allocate(node).expect("room again");
    assert_eq!(collective.stats().faults_read, before.faults_read);
}

/// Pages of swappable memory, each one object, written to.
fn written_pages(collective: &Collective, count: usize, byte: u8) -> Vec<NonNull<u8>> {
    let page = layout(4096, 8);
    let make = || collective.swappable().allocate(page).expect("the store has room");
    let objects: Vec<_> = (0..count).map(|_| make()).collect();
    for ptr in &objects {
        // SAFETY: 4,096 bytes were allocated.
        unsafe { ptr.as_ptr().write_bytes(byte, 4096) };
    }
    objects
}

#[test]
fn an_empty_page_is_used_again_as_it_is_while_there_is_room() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let objects = written_pages(&collective, 100, 7);
    for ptr in &objects {
        free(&collective, *ptr, layout(4096, 8));
    }
    let before = collective.stats().resident_bytes.0;
    let byte = |ptr: &NonNull<u8>| {
        // SAFETY: 4,096 bytes were allocated, in a page that was written to before.
        unsafe { ptr.as_ptr().read_volatile() }
    };
    let page = layout(4096, 8);
    let again = (0..100).map(|_| collective.swappable().allocate(page).expect("room"));
    assert!(again.collect::<Vec<_>>().iter().all(|ptr| byte(ptr) == 7));
    assert_eq!(collective.stats().resident_bytes.0, before);
}

#[test]
fn an_empty_page_that_was_evicted_is_not_read_again() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    let objects = written_pages(&collective, 100, 7);
    for ptr in objects {
        free(&collective, ptr, layout(4096, 8));
    }
    collective.region().evict_all().expect("the store has room");
    let before = collective.stats();
    written_pages(&collective, 100, 8);
    let read = collective.stats().pages_in - before.pages_in;
    assert!(read <= 1, "{read} pages, of which one is the page that the pool continues with");
}

#[test]
fn empty_pages_are_given_back_when_others_need_their_room() {
    let Some(collective) = collective(ByteCount::ZERO) else { return };
    // Twice what may be resident: 8 MiB.
    let objects = written_pages(&collective, 4096, 7);
    for ptr in objects {
        free(&collective, ptr, layout(4096, 8));
    }
    let before = collective.stats();
    collective.region().evict_all().expect("the store has room");
    let after = collective.stats();
    let kept_max = before.limit_bytes.0 / 8 / 4096;
    let written = after.pages_out - before.pages_out;
    assert!(written <= kept_max + 1, "{written} dead pages were written, of {kept_max} kept");
    assert!(after.stored_bytes.0 <= (kept_max + 1) * 4096, "{after:?}");
}

/// An object of the random test: its layout and what its bytes are.
struct Object {
    layout: Layout,
    stamp: u8,
}

#[test]
fn objects_of_all_kinds_keep_their_bytes_and_never_overlap() {
    let seed = seed("objects_of_all_kinds");
    let Some(collective) =
        collective_of(ByteCount::kib(16), ByteCount::kib(100), ByteCount::mib(256))
    else {
        return;
    };
    let mut dice = Dice::new(seed);
    let mut objects: BTreeMap<usize, Object> = BTreeMap::new();
    for step in 0..30_000_u64 {
        if dice.below(100) < 55 {
            let most = if dice.below(50) == 0 { 40_000 } else { 2_000 };
            let size = 1 + dice.below(most) as usize;
            let layout = layout(size, 1 << dice.below(10));
            let sub = match dice.below(8) {
                0 => AnySub::PerPage(collective.new_page().expect("the store has room")),
                1..4 => AnySub::PurelyLocal(collective.purely_local()),
                4..6 => {
                    let some = objects.keys().nth(dice.below(objects.len().max(1) as u64) as usize);
                    match some.and_then(|addr| collective.suballocator_of(*addr as *const u8)) {
                        Some(sub) => sub,
                        None => AnySub::Swappable(collective.swappable()),
                    }
                }
                _ => AnySub::Swappable(collective.swappable()),
            };
            let Ok(ptr) = sub.allocate(layout) else { continue };
            assert!(sub.contains(ptr.as_ptr()), "{step}");
            assert_eq!(ptr.as_ptr().addr() % layout.align(), 0);
            let stamp = dice.roll() as u8;
            // SAFETY: `size` bytes were allocated.
            unsafe { ptr.as_ptr().write_bytes(stamp, size) };
            objects.insert(ptr.as_ptr() as usize, Object { layout, stamp });
        } else if let Some(addr) =
            objects.keys().nth(dice.below(objects.len().max(1) as u64) as usize)
        {
            let addr = *addr;
            let object = objects.remove(&addr).expect("just found");
            let ptr = NonNull::new(addr as *mut u8).expect("an object");
            // SAFETY: the object's bytes, which only this test uses.
            let bytes =
                unsafe { std::slice::from_raw_parts(addr as *const u8, object.layout.size()) };
            assert!(bytes.iter().all(|byte| *byte == object.stamp), "step {step}");
            free(&collective, ptr, object.layout);
        }
    }
    for (addr, object) in objects {
        free(&collective, NonNull::new(addr as *mut u8).expect("an object"), object.layout);
    }
    assert!(collective.far_pages() <= 1, "the swappable pool keeps one page to continue with");
    assert_eq!(collective.local_used(), ByteCount::ZERO);
}

#[test]
fn threads_share_a_collective() {
    let Some(collective) = collective(ByteCount::kib(64)) else { return };
    let collective = Arc::new(collective);
    let threads: Vec<_> = (0..4_u8)
        .map(|thread| {
            let collective = collective.clone();
            std::thread::spawn(move || {
                let node = layout(200, 8);
                let mut mine = Vec::new();
                for round in 0..2_000 {
                    let local = collective.purely_local().allocate(node);
                    let ptr = local.or_else(|_| collective.swappable().allocate(node));
                    let ptr = ptr.expect("the store has room");
                    // SAFETY: 200 bytes were allocated.
                    unsafe { ptr.as_ptr().write_bytes(thread, 200) };
                    mine.push(ptr);
                    if round % 3 == 0 {
                        let old = mine.swap_remove(round % mine.len());
                        // SAFETY: this thread's object.
                        assert_eq!(unsafe { old.as_ptr().wrapping_add(199).read() }, thread);
                        free(&collective, old, node);
                    }
                }
                for ptr in mine {
                    // SAFETY: this thread's object.
                    assert_eq!(unsafe { ptr.as_ptr().read() }, thread);
                    free(&collective, ptr, node);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("no thread fails");
    }
    assert!(collective.far_pages() <= 1);
}

/// Pages of 16 KiB, where the region has mappings of others between them, and of lengths that fit none.
#[test]
fn what_others_map_in_the_region_is_in_no_page_of_the_collective() {
    let page = ByteCount::kib(16);
    let Some(collective) = collective_of(page, ByteCount::ZERO, ByteCount::mib(64)) else { return };
    let mut all = Vec::new();
    for round in 0..4 {
        let len = ByteCount::kib(4 * (round % 3 + 1));
        let start = collective.region().map(len).expect("room").cast::<u8>().as_ptr() as usize;
        all.push(start..start + len.as_usize());
        for (size, count) in [(16 << 10, 300), (100 << 10, 1)] {
            for _ in 0..count {
                let ptr = collective.swappable().allocate(layout(size, 8)).expect("room");
                all.push(ptr.as_ptr() as usize..ptr.as_ptr() as usize + size);
            }
        }
    }
    all.sort_unstable_by_key(|range| range.start);
    assert!(all.is_sorted_by(|range, next| range.end <= next.start), "two share memory");
}
