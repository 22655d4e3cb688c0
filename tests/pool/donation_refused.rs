//! The kernel refuses to move pages in the middle of a hand-over: temporary memory is whole, and the
//! pages are where they were. A process of its own: the refusal is a limit of the process's.
//!
//! Guards: G5, G6.
#![expect(unsafe_code, reason = "lowers a limit of the process, looks at its mappings")]

use crate::common::child::alone;
use crate::common::numbered::{add_pages, await_given_back, fill, holds};
use farheap::manager::{Donation, MemoryManager, Reclaim, ReclaimCost};
use farheap::pool::PoolConfig;
use farheap::store::MemStore;
use farheap::{ByteCount, PageId};
use std::sync::{Arc, Weak};

const PAGES: u64 = 7600;
const LEN: usize = 16 << 20;

/// Sets how much address space the process may have, when it is asked for memory.
struct Limits(libc::rlim_t);

impl Reclaim for Limits {
    fn reclaim(&self, _want: ByteCount, _cost: ReclaimCost) -> ByteCount {
        ByteCount::ZERO
    }

    fn donate(&self, _room: &mut Donation<'_>) {
        let limit = libc::rlimit { rlim_cur: self.0, rlim_max: libc::RLIM_INFINITY };
        // SAFETY: setrlimit(2) reads the structure.
        let rc = unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) };
        assert_eq!(rc, 0, "setrlimit");
    }
}

#[test]
fn memory_is_whole_although_the_kernel_fails_to_move_pages() {
    alone("memory_is_whole_although_the_kernel_fails_to_move_pages", || {
        let manager = MemoryManager::start(ByteCount::mib(32)).expect("manager");
        // Consumers are asked in the order in which they joined: while the pool hands pages over, the
        // process has more address space than it may have, and mremap(2) fails with ENOMEM.
        let (too_little, enough) =
            (Arc::new(Limits(1 << 20)), Arc::new(Limits(libc::RLIM_INFINITY)));
        let first = manager.join("before the pool").expect("room");
        first.set_reclaimer(Arc::downgrade(&too_little) as Weak<dyn Reclaim>);
        let store = Arc::new(MemStore::new(ByteCount::mib(96)).expect("store"));
        let config = PoolConfig::new().page(ByteCount::kib(4)).cleaner(false);
        let pool = config.create_on(store, &manager).expect("pool");
        let last = manager.join("after the pool").expect("room");
        last.set_reclaimer(Arc::downgrade(&enough) as Weak<dyn Reclaim>);
        add_pages(&pool, PAGES);

        let memory = manager.allocate_temporary(ByteCount(LEN as u64)).expect("pages are dropped");
        assert_eq!(pool.stats().donated, 0, "the kernel refused");
        let start = memory.as_ptr().as_ptr();
        let mut seen = vec![0_u8; LEN / 4096];
        // SAFETY: mincore(2) writes a byte a page of the range; it fails where nothing is mapped.
        let rc = unsafe { libc::mincore(start.cast(), LEN, seen.as_mut_ptr()) };
        assert_eq!(rc, 0, "there is a hole in it");
        // SAFETY: `LEN` mapped bytes that are this test's.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start, LEN) };
        fill(bytes, 77);
        assert!(manager.stats().used_bytes <= manager.limit(), "{:?}", manager.stats());
        for page in (2..PAGES + 2).rev() {
            assert!(holds(&pool.fix_shared(PageId(page)).expect("page"), page), "{page}");
        }
        assert!(holds(bytes, 77));
        drop(memory);
        let more =
            manager.allocate_temporary(ByteCount::mib(24)).expect("without the kernel's help");
        assert_eq!(pool.stats().donated, 0, "it is not asked again");
        drop((more, pool, first, last));
        await_given_back(&manager);
    });
}
