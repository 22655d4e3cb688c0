//! Children that may die, a SIGBUS handler that parks its thread, and stamped far memory.
#![expect(unsafe_code, reason = "reads and writes far memory, and handles SIGBUS")]

use crate::common::child::{self, Ended};
use crate::common::faulty::{FaultControl, FaultyStore};
use crate::common::{bytes, region, watchdog};
use crate::injector::Injector;
use farheap::region::{Advice, Install, Region, RegionConfig};
use farheap::store::{MemStore, Store};
use farheap::{ByteCount, Stats};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a case may take before it counts as hung.
pub(crate) const HUNG: Duration = Duration::from_secs(600);
/// The deadline of device requests in cases that pass it.
pub(crate) const DEADLINE: Duration = Duration::from_millis(200);

/// Runs `body` in a process of its own. `None` where the child skipped itself.
pub(crate) fn in_child(test: &'static str, body: impl FnOnce()) -> Option<Ended> {
    if child::case(test).is_some() {
        let _watchdog = watchdog(test, HUNG);
        body();
        std::process::exit(0);
    }
    let ended = child::run(test, "", |_| ());
    if ended.show_skips() {
        ended.expect_success();
        return None;
    }
    Some(ended)
}

// SIGBUS.

const HITS_MAX: usize = 64;
static HITS: [AtomicUsize; HITS_MAX] = [const { AtomicUsize::new(0) }; HITS_MAX];
static HIT_COUNT: AtomicUsize = AtomicUsize::new(0);
static RESUMED: AtomicUsize = AtomicUsize::new(0);
/// The thread that resumes the others, and must not be parked itself.
static RESUMER: AtomicI32 = AtomicI32::new(0);

/// Parks the thread until it is resumed; then the access is repeated.
extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler with SA_SIGINFO a valid structure.
    let info = unsafe { &*info };
    // SAFETY: takes no pointers.
    if unsafe { libc::gettid() } == RESUMER.load(Ordering::Relaxed) {
        const SAID: &[u8] = b"a page is lost that the case needs: the device is late?\n";
        // SAFETY: a static, as long as it is.
        unsafe { libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len()) };
        std::process::abort();
    }
    // SAFETY: a SIGBUS carries an address.
    let addr = unsafe { info.si_addr() } as usize;
    let hit = HIT_COUNT.fetch_add(1, Ordering::AcqRel);
    if hit < HITS_MAX {
        HITS[hit].store(addr, Ordering::Release);
    }
    while RESUMED.load(Ordering::Acquire) <= hit {
        // SAFETY: usleep is a plain system call, allowed in a handler.
        unsafe { libc::usleep(500) };
    }
}

/// Makes every SIGBUS park its thread, but for the caller, which it ends with the process.
pub(crate) fn park_on_sigbus() {
    // SAFETY: takes no pointers.
    RESUMER.store(unsafe { libc::gettid() }, Ordering::Relaxed);
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler makes only calls that are allowed in one.
    let rc = unsafe { libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) };
    assert_eq!(rc, 0, "SIGBUS can be handled");
}

/// Waits for `count` SIGBUS signals since the start; returns the addresses of all so far.
pub(crate) fn sigbus_addrs(count: usize) -> Vec<usize> {
    wait_until("SIGBUS", || HIT_COUNT.load(Ordering::Acquire) >= count);
    let seen = HIT_COUNT.load(Ordering::Acquire).min(HITS_MAX);
    let addr = |hit: usize| {
        wait_until("the address of a SIGBUS", || HITS[hit].load(Ordering::Acquire) != 0);
        HITS[hit].load(Ordering::Acquire)
    };
    (0..seen).map(addr).collect()
}

pub(crate) fn sigbus_count() -> usize {
    HIT_COUNT.load(Ordering::Acquire)
}

/// Lets all threads that are parked now repeat their accesses.
pub(crate) fn resume() {
    RESUMED.store(HIT_COUNT.load(Ordering::Acquire), Ordering::Release);
}

/// Waits for something that happens soon; the watchdog bounds it.
pub(crate) fn wait_until(what: &str, mut reached: impl FnMut() -> bool) {
    let started = Instant::now();
    while !reached() {
        assert!(started.elapsed() < HUNG / 2, "never came: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

// Far memory.

/// Bytes of a page.
pub(crate) const PAGE: usize = 4096;

/// Pages of a region whose first and last words are stamped.
pub(crate) struct Far {
    pub(crate) region: Region,
    pub(crate) control: FaultControl,
    pub(crate) injector: Arc<Injector>,
    pub(crate) base: usize,
    pub(crate) pages: usize,
}

/// The content of a page: what its number says.
pub(crate) fn stamp(page: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1
}

impl Far {
    /// A region with `pages` pages mapped on a store that breaks on demand, twice as large.
    pub(crate) fn new(config: RegionConfig, pages: usize, seed: u64) -> Option<Far> {
        let len = ByteCount((pages * PAGE) as u64);
        let capacity = ByteCount((len.0 * 2).max(64 << 20));
        let memory: Arc<dyn Store> = Arc::new(MemStore::new(capacity).expect("memory for a store"));
        let faulty = FaultyStore::new(memory, seed);
        let control = faulty.control();
        let injector = Arc::new(Injector::new(Arc::new(faulty)));
        let region = region(config, injector.clone())?;
        let base = region.map(len).expect("the span has room").cast::<u8>().as_ptr() as usize;
        Some(Far { region, control, injector, base, pages })
    }

    pub(crate) fn addr(&self, page: usize) -> usize {
        assert!(page < self.pages);
        self.base + page * PAGE
    }

    pub(crate) fn ptr(&self, page: usize) -> *const u8 {
        self.addr(page) as *const u8
    }

    pub(crate) fn len(&self, pages: usize) -> ByteCount {
        ByteCount((pages * PAGE) as u64)
    }

    pub(crate) fn fill(&self, pages: Range<usize>) {
        pages.for_each(|page| fill_page(self.addr(page), stamp(page)));
    }

    pub(crate) fn check(&self, pages: Range<usize>) {
        pages.for_each(|page| check_page(self.addr(page), stamp(page), page));
    }

    /// Evicts a range and makes sure that it is out.
    pub(crate) fn evict(&self, pages: Range<usize>) {
        self.region
            .advise(&[bytes(self.ptr(pages.start), self.len(pages.len()))], Advice::PageOutNow)
            .expect("the store works");
    }

    /// Stamps a range and has it written out.
    pub(crate) fn store(&self, pages: Range<usize>) {
        self.fill(pages.clone());
        self.evict(pages);
    }

    /// The same, such that each comes back alone: neighbours that left together may come back together.
    pub(crate) fn store_apart(&self, pages: Range<usize>) {
        self.fill(pages.clone());
        for first in 0..4 {
            pages.clone().skip(first).step_by(4).for_each(|page| self.evict(page..page + 1));
        }
    }

    pub(crate) fn discard(&self, pages: Range<usize>) {
        let (ptr, len) = (self.ptr(pages.start), self.len(pages.len()));
        // SAFETY: the case gives the content up and holds no reference.
        unsafe { self.region.discard(bytes(ptr, len).cast_mut()) }.expect("inside the region");
    }

    /// Flips a bit in each of the next reads. All cases verify what they read.
    pub(crate) fn corrupt_reads(&self, count: u64) {
        // SAFETY: the configurations of these cases have checksums.
        unsafe { self.control.corrupt_reads(count) };
    }

    pub(crate) fn stats(&self) -> Stats {
        self.region.stats()
    }

    /// Reads a page's first word in a thread of its own.
    pub(crate) fn touch(&self, page: usize) -> JoinHandle<u64> {
        let addr = self.addr(page);
        std::thread::spawn(move || read_word(addr))
    }

    /// Everything works: pages go out, come back, and are what they were.
    pub(crate) fn expect_healthy(&self) {
        wait_until("write-back works again", || {
            self.fill(0..8.min(self.pages));
            self.region
                .advise(&[bytes(self.ptr(0), self.len(8.min(self.pages)))], Advice::PageOutNow)
                .is_ok()
        });
        self.fill(0..self.pages);
        self.check(0..self.pages);
        let range = self.region.map(self.len(1)).expect("there is room");
        // SAFETY: mapped by this case, which is done with it.
        unsafe { self.region.unmap(range) }.expect("just mapped");
    }
}

/// Stamps the first and last word of a page.
pub(crate) fn fill_page(addr: usize, stamp: u64) {
    write_word(addr, stamp);
    write_word(addr + PAGE - 8, !stamp);
}

pub(crate) fn check_page(addr: usize, stamp: u64, page: usize) {
    let words = (read_word(addr), read_word(addr + PAGE - 8));
    assert_eq!(words, (stamp, !stamp), "page {page}");
}

pub(crate) fn read_word(addr: usize) -> u64 {
    // SAFETY: callers pass addresses of mapped far memory, or of the guarded case under test.
    unsafe { (addr as *const u64).read_volatile() }
}

pub(crate) fn write_word(addr: usize, value: u64) {
    // SAFETY: as above.
    unsafe { (addr as *mut u64).write_volatile(value) };
}

/// A region of the smallest limit.
pub(crate) fn config(install: Install) -> RegionConfig {
    RegionConfig::new()
        .limit(RegionConfig::LIMIT_MIN)
        .install(install)
        .span(ByteCount::gib(1))
        .readahead(false)
}

/// The ways pages come and go.
pub(crate) const WAYS: &[Install] = &[Install::Auto, Install::Copy];

/// Set by cases whose threads run until told to stop.
#[derive(Debug, Default)]
pub(crate) struct Stop(AtomicBool);

impl Stop {
    pub(crate) fn now(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
