//! Pages of a heap that change their device in place, up to its shutdown.

#![expect(unsafe_code, reason = "allocates and frees far memory by hand")]

mod common;

use allocator_api2::alloc::Allocator;
use common::child::{alone, cases};
use common::{eventually, mem_store, watchdog, where_permitted};
use farheap::store::{JoinedStore, Side, Store};
use farheap::{ByteCount, Config, Error, Far, FarHeap, Heap};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

const WORDS: usize = 3 << 20; // 24 MiB, three times the limit.

fn layout() -> Layout {
    Layout::array::<u64>(WORDS).expect("24 MiB")
}

/// A heap on two stores, and these; `None` with the reason printed where userfaultfd is not permitted.
fn two_sided() -> Option<(Heap, [Arc<dyn Store>; 2])> {
    let stores = [(); 2].map(|()| mem_store(ByteCount::mib(64)));
    let [first, second] = stores.clone();
    let joined = Arc::new(JoinedStore::new(first, second).expect("nobody uses them"));
    let config = Config::parse("far_limit:8MiB,readahead:off").expect("a configuration");
    where_permitted("a heap on two stores", Heap::start_on(config, joined))
        .map(|heap| (heap, stores))
}

fn word(start: NonNull<u8>, at: usize) -> *mut u64 {
    assert!(at < WORDS);
    start.cast::<u64>().as_ptr().wrapping_add(at)
}

/// A block of far memory with its numbers, all of which have left.
fn column(heap: &Heap) -> NonNull<u8> {
    let start = Far.allocate(layout()).expect("the device has room").cast::<u8>();
    for at in 0..WORDS {
        // SAFETY: in the block, which nobody else uses.
        unsafe { word(start, at).write(at as u64) };
    }
    heap.evict_all().expect("the store has room");
    start
}

fn is_right(start: NonNull<u8>) -> bool {
    // SAFETY: in the block, which nobody writes.
    (0..WORDS).all(|at| unsafe { word(start, at).read_volatile() } == at as u64)
}

fn free(start: NonNull<u8>) {
    // SAFETY: allocated by `column` with this layout, and not used any more.
    unsafe { Far.deallocate(start, layout()) };
}

#[test]
fn a_shutdown_that_is_refused_leaves_a_retier_alone() {
    alone("a_shutdown_that_is_refused_leaves_a_retier_alone", || {
        let _watch = watchdog("a refused shutdown beside a retier", Duration::from_secs(120));
        let Some((heap, _)) = two_sided() else { return };
        let start = column(&heap);
        let len = ByteCount(layout().size() as u64);
        let retier = heap.retier(start.as_ptr(), len, Side::Second).expect("a range");
        let mut refused = 0;
        let done = retier.run(|_| {
            let outcome = heap.shutdown();
            assert!(matches!(outcome, Err(Error::InUse { .. })), "{outcome:?}");
            refused += 1;
        });
        assert!(done.expect("there is room").is_complete());
        assert!(refused >= 12, "{refused} chunks");
        assert!(heap.stored_on(Side::Second) > ByteCount::ZERO);
        assert!(is_right(start));
        free(start);
        heap.shutdown().expect("everything was freed");
    });
}

#[test]
fn a_shutdown_ends_a_retier_and_nothing_is_left() {
    alone("a_shutdown_ends_a_retier_and_nothing_is_left", || {
        let _watch = watchdog("a shutdown beside a retier", Duration::from_secs(120));
        let Some((heap, stores)) = two_sided() else { return };
        let start = column(&heap);
        let len = ByteCount(layout().size() as u64);
        let retier = heap.retier(start.as_ptr(), len, Side::Second).expect("a range");
        let mut chunks = 0;
        let outcome = retier.run(|_| {
            chunks += 1;
            if chunks == 3 {
                assert!(is_right(start));
                free(start);
                heap.shutdown().expect("everything was freed");
            }
        });
        assert_eq!(outcome, Err(Error::NotRunning));
        assert_eq!(chunks, 3, "it ended at once");
        let again = heap.retier(start.as_ptr(), len, Side::First);
        assert_eq!(again.err(), Some(Error::NotRunning));
        let is_clear =
            || [Side::First, Side::Second].map(|side| heap.stored_on(side)) == [ByteCount::ZERO; 2];
        assert!(eventually(is_clear), "{}", heap.stats());
        // The region ends with its last handle, and its threads with it.
        drop(heap);
        assert!(eventually(|| stores.iter().all(|store| Arc::strong_count(store) == 1)));
    });
}

#[test]
fn a_configuration_names_the_second_device() {
    const NAME: &str = "a_configuration_names_the_second_device";
    cases(
        NAME,
        &["page:16KiB", "page:4KiB,mode:in_thread", "encrypt:on", "compress:4MiB"],
        |more| {
            if more.contains("encrypt") && !cfg!(feature = "encrypt") {
                return println!("skipped: without the feature `encrypt`");
            }
            if more.contains("compress") && !cfg!(feature = "compress") {
                return println!("skipped: without the feature `compress`");
            }
            let _watch = watchdog(NAME, Duration::from_secs(120));
            let dir = tempfile::tempdir().expect("a directory");
            let second = dir.path().join("second");
            let config = |more: &str| {
                let second = second.display();
                let text =
                    format!("far_limit:16MiB,readahead:off,capacity:64MiB,second:{second},{more}");
                Config::parse(&text).expect("a configuration")
            };
            // As for the first device, a file that is to be made needs a size.
            let refused = Heap::start(config(more)).map(drop);
            assert!(matches!(refused, Err(Error::Device { .. })), "{refused:?}");
            let text = format!("second_capacity:64MiB,{more}");
            let Some(heap) = where_permitted(&text, Heap::start(config(&text))) else { return };
            let start = column(&heap);
            let len = ByteCount(layout().size() as u64);
            for to in [Side::Second, Side::First, Side::Second] {
                let retier = heap.retier(start.as_ptr(), len, to).expect("a range");
                assert!(retier.run(|_| {}).expect("there is room").is_complete());
                assert!(heap.stored_on(to) > ByteCount::mib(4), "{to:?}: {}", heap.stats());
                assert!(is_right(start), "{to:?}");
            }
            // The device is this heap's.
            let other = heap.add_tier("other", config(&text)).map(drop);
            assert!(matches!(other, Err(Error::Device { .. })), "{other:?}");
            free(start);
            heap.shutdown().expect("everything was freed");
            drop(heap);
            // Like the first, it holds pages that the next heap may overwrite.
            let again =
                where_permitted("again", Heap::start(config("page:64KiB"))).expect("as before");
            again.shutdown().expect("nothing was allocated");
        },
    );
}
