//! A source of anonymous memory that checks how it is used; for tests.

#![expect(unsafe_code, reason = "maps memory")]
#![expect(clippy::disallowed_methods, reason = "the memory of tests is not the library's")]

use super::hooks::ExtentSource;
use crate::base::sync::{
    AtomicBool, AtomicU64, AtomicUsize,
    Ordering::{Relaxed, SeqCst},
    Rank, Ranked,
};
use crate::base::units::ByteCount;
use std::ptr::{self, NonNull};

const PAGE: usize = 4096;

/// State of a page by the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Reserved,
    Committed,
}

/// Anonymous memory without reserve. Pages that are not committed cannot be touched; a call that
/// breaks the protocol panics, which aborts, since hooks must not unwind.
#[derive(Debug)]
pub(crate) struct TestSource {
    base: NonNull<u8>,
    span: usize,
    /// Bytes that may be committed.
    capacity: AtomicUsize,
    committed: AtomicUsize,
    /// Calls that take or drop contents.
    pub(crate) commits: AtomicU64,
    pub(crate) decommits: AtomicU64,
    pages: Ranked<Box<[State]>>,
    /// True if uncommitted pages are protected, at the price of a system call each way.
    protects: bool,
    /// True if it says that memory is plentiful.
    pub(crate) has_plenty: AtomicBool,
}

// SAFETY: the pointer names a mapping that the value owns; all else is `Send` and `Sync`.
unsafe impl Send for TestSource {}

// SAFETY: as for `Send`; nothing is written without the lock or an atomic.
unsafe impl Sync for TestSource {}

impl TestSource {
    /// A source that protects what is not committed.
    pub(crate) fn new(span: ByteCount, capacity: ByteCount) -> TestSource {
        TestSource::with_protection(span, capacity, true)
    }

    pub(crate) fn with_protection(
        span: ByteCount,
        capacity: ByteCount,
        protects: bool,
    ) -> TestSource {
        let span = span.as_usize();
        let prot = if protects { libc::PROT_NONE } else { libc::PROT_READ | libc::PROT_WRITE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, which touches nothing that exists.
        let base = unsafe { libc::mmap(ptr::null_mut(), span, prot, flags, -1, 0) };
        assert_ne!(base, libc::MAP_FAILED, "mmap of {span} bytes");
        TestSource {
            base: NonNull::new(base.cast()).expect("not at address zero"),
            span,
            capacity: AtomicUsize::new(capacity.as_usize()),
            committed: AtomicUsize::new(0),
            commits: AtomicU64::new(0),
            decommits: AtomicU64::new(0),
            pages: Ranked::new(Rank::Space, vec![State::Free; span / PAGE].into()),
            protects,
            has_plenty: AtomicBool::new(false),
        }
    }

    pub(crate) fn set_capacity(&self, capacity: ByteCount) {
        self.capacity.store(capacity.as_usize(), SeqCst);
    }

    pub(crate) fn committed(&self) -> ByteCount {
        ByteCount(self.committed.load(SeqCst) as u64)
    }

    /// Bytes handed out and not released.
    pub(crate) fn reserved(&self) -> ByteCount {
        let pages = self.pages.lock();
        let used = pages.iter().filter(|&&state| state != State::Free).count();
        ByteCount((used * PAGE) as u64)
    }

    /// Moves all pages of a range from one state to another.
    fn change(&self, ptr: NonNull<u8>, len: ByteCount, from: State, to: State) {
        let offset = ptr.addr().get().checked_sub(self.base.addr().get()).expect("above the base");
        let len = len.as_usize();
        assert!(
            offset.is_multiple_of(PAGE) && len.is_multiple_of(PAGE) && len > 0,
            "{offset:#x}+{len:#x}"
        );
        assert!(offset + len <= self.span, "{offset:#x}+{len:#x} ends beyond {:#x}", self.span);
        let mut pages = self.pages.lock();
        for (index, page) in pages[offset / PAGE..][..len / PAGE].iter_mut().enumerate() {
            assert_eq!(*page, from, "page {index} of {offset:#x}+{len:#x} on its way to {to:?}");
            *page = to;
        }
    }

    fn protect(&self, ptr: NonNull<u8>, len: ByteCount, prot: libc::c_int) {
        if self.protects {
            // SAFETY: the range was checked to lie in our mapping.
            let result = unsafe { libc::mprotect(ptr.as_ptr().cast(), len.as_usize(), prot) };
            assert_eq!(result, 0, "mprotect");
        }
    }
}

impl Drop for TestSource {
    fn drop(&mut self) {
        // SAFETY: our mapping, which nothing uses any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.span) };
    }
}

impl ExtentSource for TestSource {
    fn base(&self) -> usize {
        self.base.addr().get()
    }

    fn span(&self) -> usize {
        self.span
    }

    fn has_plenty(&self) -> bool {
        self.has_plenty.load(Relaxed)
    }

    fn reserve(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        let mut pages = self.pages.lock();
        let (want, base) = (len.as_usize() / PAGE, self.base());
        let (mut start, mut index) = (0, 0);
        while index < pages.len() {
            if index == start {
                let addr = (base + start * PAGE).next_multiple_of(align.as_usize());
                start = (addr - base) / PAGE;
                index = start;
                if index >= pages.len() {
                    return None;
                }
            }
            if pages[index] != State::Free {
                (start, index) = (index + 1, index + 1);
                continue;
            }
            index += 1;
            if index - start == want {
                pages[start..index].fill(State::Reserved);
                // SAFETY: inside the mapping.
                return Some(unsafe { self.base.add(start * PAGE) });
            }
        }
        None
    }

    fn commit(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        let capacity = self.capacity.load(SeqCst);
        let add = |now: usize| (now + len.as_usize() <= capacity).then(|| now + len.as_usize());
        if self.committed.fetch_update(SeqCst, SeqCst, add).is_err() {
            return false;
        }
        self.commits.fetch_add(1, Relaxed);
        self.change(ptr, len, State::Reserved, State::Committed);
        self.protect(ptr, len, libc::PROT_READ | libc::PROT_WRITE);
        true
    }

    unsafe fn clear(&self, ptr: NonNull<u8>, len: ByteCount) {
        // SAFETY: as the caller promises.
        unsafe { ptr.as_ptr().write_bytes(0, len.as_usize()) }
    }

    fn decommit(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.decommits.fetch_add(1, Relaxed);
        self.change(ptr, len, State::Committed, State::Reserved);
        // SAFETY: the range was checked to lie in our mapping, and its contents are given up.
        let result =
            unsafe { libc::madvise(ptr.as_ptr().cast(), len.as_usize(), libc::MADV_DONTNEED) };
        assert_eq!(result, 0, "madvise");
        self.protect(ptr, len, libc::PROT_NONE);
        self.committed.fetch_sub(len.as_usize(), SeqCst);
    }

    fn release(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.change(ptr, len, State::Reserved, State::Free);
    }
}
