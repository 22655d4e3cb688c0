//! Regions: far address space whose cold pages live on a store. Layer 6.
//!
//! A [`Region`] is one reservation of addresses, the page words that say where each page is, and
//! the threads that bring pages in ([`filler`]) and take them out ([`evictor`]). It is usable by
//! itself, as a buffer larger than memory; the heap cuts jemalloc's extents from one.
//!
//! ```text
//!  thread touches p ---fault---> userfaultfd --> filler: word(p)?
//!                                                  Empty   -> zeros, no I/O
//!                                                  Cooling -> frame back, no I/O
//!                                                  Stored  -> read slot into a frame (io_uring)
//!                                                               ... done -> MOVE/COPY, wake
//!  low watermark --> evictor: victims -> MOVE into frames -> cool -> hash: clean? zero? dirty
//!                                                             -> runs of slots, one write each
//! ```
//! # Invariants
//! 1. Resident bytes (mapped pages and staging frames) never exceed the limit.
//! 2. No thread of a region touches far memory of its own region.

mod counters;
mod evictor;
mod filler;
mod pager;
mod report;
mod requests;
mod space;
mod stats;

pub use stats::Stats;

use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::page::word::State;
use crate::store::{Queue, Request, Store};
use crate::sys::vm::{HUGE_PAGE, KERNEL_PAGE};
use crate::tier::policy::{Hint, PolicyKind};
use evictor::Evictor;
use filler::Filler;
use pager::{Ahead, Pager};
use requests::Requests;
use space::Space;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Smallest page size.
pub const PAGE_MIN: ByteCount = ByteCount::kib(4);
/// Largest page size.
pub const PAGE_MAX: ByteCount = ByteCount::mib(2);
/// Requests for read-ahead that may wait at the same time; more are dropped.
const AHEAD_MAX: usize = 1024;

/// How pages come and go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Install {
    /// The fastest for the page size, by measurement: COPY fills up to 16 KiB, MOVE fills from
    /// 32 KiB up; evictions MOVE what may be dirty and drop what is known to be clean.
    #[default]
    Auto,
    /// COPY, write protection and `MADV_DONTNEED` only: the one way below Linux 6.8. Memory that
    /// an application's direct I/O is reading into must be pinned.
    Copy,
    /// MOVE both ways.
    Move,
}

impl Install {
    /// Whether fills and evictions use MOVE.
    fn resolve(self, page_bytes: usize, kernel_moves: bool) -> Result<(bool, bool)> {
        const COPY_MAX: usize = 16 << 10;
        match self {
            Install::Auto => Ok((kernel_moves && page_bytes > COPY_MAX, kernel_moves)),
            Install::Copy => Ok((false, false)),
            Install::Move if kernel_moves => Ok((true, true)),
            Install::Move => Err(Error::Unsupported {
                feature: "UFFDIO_MOVE (Linux 6.8)",
                why: "`install:move` was asked for; use `install:auto`",
            }),
        }
    }
}

/// What a region is made of.
#[derive(Clone, Debug)]
pub struct RegionConfig {
    /// Most bytes that may be resident. Default 1 GiB.
    pub limit: ByteCount,
    /// Bytes that come and go as one; a power of two from 4 KiB to 2 MiB. Default 64 KiB.
    pub page: ByteCount,
    /// Address space to reserve; rounded up to 2 MiB. Default 1 TiB.
    pub span: ByteCount,
    /// Threads that serve faults, 1 to 64. Default 1: one thread with asynchronous I/O serves
    /// several faulting threads.
    pub handlers: usize,
    /// How pages are installed and evicted. Default by page size.
    pub install: Install,
    /// Whether each slot's content is verified when it is read back. Default yes.
    pub checksum: bool,
    /// How long a handler looks for the next fault before it sleeps. Default 0.
    pub spin: Duration,
    /// How long the device may take for one request. Default 30 s.
    pub deadline: Duration,
    /// Which page goes next. Default S3-FIFO.
    pub policy: PolicyKind,
    /// Refuses to start where only faults of user mode can be served. Default no.
    pub kernel_faults_required: bool,
}

impl Default for RegionConfig {
    fn default() -> RegionConfig {
        RegionConfig {
            limit: ByteCount::gib(1),
            page: ByteCount::kib(64),
            span: ByteCount::gib(1024),
            handlers: 1,
            install: Install::Auto,
            checksum: true,
            spin: Duration::ZERO,
            deadline: Duration::from_secs(30),
            policy: PolicyKind::default(),
            kernel_faults_required: false,
        }
    }
}

impl RegionConfig {
    /// The smallest limit that works with a page size.
    #[must_use]
    pub fn limit_min(page: ByteCount) -> ByteCount {
        const PAGES_MIN: u64 = 64;
        ByteCount::mib(8).max(ByteCount(page.0.saturating_mul(PAGES_MIN)))
    }

    fn check(mut self) -> Result<RegionConfig> {
        let bad = |key: &str, reason: String| Error::Config { key: key.to_owned(), reason };
        if !self.page.is_power_of_two() || self.page < PAGE_MIN || self.page > PAGE_MAX {
            let reason = format!("{} is not a power of two from 4 KiB to 2 MiB", self.page);
            return Err(bad("page", reason));
        }
        let minimum = RegionConfig::limit_min(self.page);
        if self.limit < minimum {
            return Err(Error::LimitTooSmall { limit: self.limit, minimum });
        }
        if !(1..=64).contains(&self.handlers) {
            return Err(bad("handlers", format!("{} is not from 1 to 64", self.handlers)));
        }
        let huge = HUGE_PAGE as u64;
        let span = self.span.0.checked_next_multiple_of(huge).filter(|span| *span < 1 << 46);
        let Some(span) = span.filter(|span| *span >= huge) else {
            return Err(bad("span", format!("{} is not from 2 MiB to 64 TiB", self.span)));
        };
        self.span = ByteCount(span);
        Ok(self)
    }
}

/// Far memory: addresses whose cold pages are kept on a store, under one limit.
///
/// # Examples
/// ```
/// use farheap::region::{Region, RegionConfig};
/// use farheap::store::MemStore;
/// use farheap::ByteCount;
/// use std::sync::Arc;
///
/// let store = Arc::new(MemStore::new(ByteCount::mib(64))?);
/// let config = RegionConfig { limit: ByteCount::mib(8), ..RegionConfig::default() };
/// match Region::create(config, store) {
///     Ok(region) => {
///         let ptr = region.map(ByteCount::mib(32))?;
///         assert!(region.contains(ptr.as_ptr()));
///         region.unmap(ptr, ByteCount::mib(32))?;
///     }
///     // The message says how to allow userfaultfd.
///     Err(error) => println!("{error}"),
/// }
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct Region {
    pager: Arc<Pager>,
    space: Space,
    requests: Arc<Requests>,
    ahead: Arc<crossbeam_queue::ArrayQueue<Ahead>>,
    threads: Vec<JoinHandle<()>>,
    pin_lock: std::sync::Mutex<u64>,
}

impl Region {
    /// Reserves the address space and starts the threads.
    ///
    /// # Errors
    /// [`Error::UffdUnavailable`] without permission for userfaultfd, [`Error::Config`] and
    /// [`Error::LimitTooSmall`] for settings that cannot work, [`Error::Os`] when the kernel
    /// refuses resources.
    pub fn create(config: RegionConfig, store: Arc<dyn Store>) -> Result<Region> {
        let config = config.check()?;
        let space = Space::new(config.span.as_usize(), config.page.as_usize())?;
        let pager = Arc::new(Pager::new(&config, store)?);
        let requests = Arc::new(Requests::new());
        let ahead = Arc::new(crossbeam_queue::ArrayQueue::new(AHEAD_MAX));
        let evictor = Evictor::new(pager.clone(), requests.clone(), config.deadline)?;
        let fillers: Result<Vec<Filler>> = (0..config.handlers)
            .map(|n| Filler::new(pager.clone(), n, ahead.clone(), config.spin, config.deadline))
            .collect();
        let mut region = Region {
            pager,
            space,
            requests,
            ahead,
            threads: Vec::with_capacity(config.handlers + 1),
            pin_lock: std::sync::Mutex::new(0),
        };
        region.spawn("farheap-evict", evictor, Evictor::run, |_| {})?;
        for filler in fillers? {
            region.spawn("farheap-fill", filler, Filler::run, Filler::abandon)?;
        }
        Ok(region)
    }

    /// Starts a thread that survives a panic of its work: it reports it, cleans up and goes on.
    fn spawn<T: Send + 'static>(
        &mut self,
        name: &str,
        mut state: T,
        run: fn(&mut T),
        abandon: fn(&mut T),
    ) -> Result<()> {
        const PANICS_MAX: u32 = 16;
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                for _ in 0..PANICS_MAX {
                    let work = std::panic::AssertUnwindSafe(|| run(&mut state));
                    if std::panic::catch_unwind(work).is_ok() {
                        return;
                    }
                    let cause = Error::Os { call: "a handler thread", errno: crate::sys::EIO };
                    report::warn("a handler thread panicked and goes on", &cause);
                    abandon(&mut state);
                }
                let cause = Error::Os { call: "a handler thread", errno: crate::sys::EIO };
                report::fatal("a handler thread panicked too often", &cause);
            })
            .map_err(|error| Error::Os {
                call: "starting a handler thread",
                errno: error.raw_os_error().unwrap_or(crate::sys::EIO),
            })?;
        self.threads.push(thread);
        Ok(())
    }

    // Ranges.

    /// Hands out `len` bytes of far memory, rounded up to whole pages, that read as zero.
    ///
    /// # Errors
    /// [`Error::BadRange`] for a length of zero, [`Error::AddressSpace`] when no range is left,
    /// [`Error::StoreFull`] when limit and device together could not keep so much.
    pub fn map(&self, len: ByteCount) -> Result<NonNull<u8>> {
        let len = self.whole_pages(len)?;
        let offset = self.space.reserve(len, self.pager.page_bytes)?;
        if !self.space.commit(offset, len, self.capacity()) {
            self.space.release(offset, len);
            return Err(Error::StoreFull { slots: self.pager.slots.slots() });
        }
        let addr = self.pager.region.addr() + offset;
        Ok(NonNull::new(addr as *mut u8).expect("a region is never at address zero"))
    }

    /// Takes back a range from [`map`](Region::map): contents, frames and slots go.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not one of this region's.
    pub fn unmap(&self, ptr: NonNull<u8>, len: ByteCount) -> Result<()> {
        let len = self.whole_pages(len)?;
        let offset = self.offset_of(ptr.as_ptr(), len)?;
        if !offset.is_multiple_of(self.pager.page_bytes) {
            return Err(Error::BadRange { reason: "does not start at a page" });
        }
        self.space.decommit(offset, len, &self.pager);
        self.space.release(offset, len);
        Ok(())
    }

    /// Whether an address lies in this region.
    #[must_use]
    pub fn contains(&self, ptr: *const u8) -> bool {
        (ptr as usize).wrapping_sub(self.pager.region.addr()) < self.pager.region.len()
    }

    /// Bytes that come and go as one.
    #[must_use]
    pub fn page_size(&self) -> ByteCount {
        self.pager.page_size()
    }

    fn whole_pages(&self, len: ByteCount) -> Result<usize> {
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero" });
        }
        let len = len.as_usize().checked_next_multiple_of(self.pager.page_bytes);
        len.ok_or(Error::BadRange { reason: "length overflows" })
    }

    fn offset_of(&self, ptr: *const u8, len: usize) -> Result<usize> {
        let outside = Error::BadRange { reason: "lies outside of the region" };
        let offset = (ptr as usize).checked_sub(self.pager.region.addr()).ok_or(outside.clone())?;
        let end = offset.checked_add(len).ok_or(Error::BadRange { reason: "length overflows" })?;
        if end > self.pager.region.len() { Err(outside) } else { Ok(offset) }
    }

    /// Pages that limit and device can keep together.
    fn capacity(&self) -> PageCount {
        let pager = &self.pager;
        let exhausted = pager.exhausted.load(Ordering::Acquire);
        if exhausted && pager.write_errno.load(Ordering::Acquire) != 0 {
            return PageCount(0);
        }
        let reserve = pager.high_bytes.load(Ordering::Relaxed);
        let resident = pager.budget.limit().0.saturating_sub(reserve) / pager.page_bytes as u64;
        PageCount(pager.slots.slots().0.saturating_add(resident))
    }

    /// First and number of the pages that a range touches.
    fn pages_of(&self, ptr: *const u8, len: ByteCount) -> Result<(PageId, PageCount)> {
        if len.0 == 0 {
            return Err(Error::BadRange { reason: "length is zero" });
        }
        let offset = self.offset_of(ptr, len.as_usize())?;
        let first = offset / self.pager.page_bytes;
        let end = (offset + len.as_usize()).div_ceil(self.pager.page_bytes);
        Ok((PageId(first as u64), PageCount((end - first) as u64)))
    }

    // Hints and control.

    /// Makes all pages that lie whole in a range read as zero; nothing of them is written back.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region.
    ///
    /// # Safety
    /// Nobody needs the range's contents, and no reference into it exists.
    #[expect(unsafe_code, reason = "drops contents that references could point to")]
    pub unsafe fn discard(&self, ptr: *const u8, len: ByteCount) -> Result<()> {
        let offset = self.offset_of(ptr, len.as_usize())?;
        let first = offset.div_ceil(self.pager.page_bytes);
        let end = (offset + len.as_usize()) / self.pager.page_bytes;
        if first < end {
            self.pager.discard(PageId(first as u64), PageCount((end - first) as u64));
        }
        Ok(())
    }

    /// Starts to bring the range's pages in, and returns at once. Pages for which there is no
    /// room are left out when too many requests wait.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region.
    pub fn prefetch(&self, ptr: *const u8, len: ByteCount) -> Result<()> {
        self.prefetch_many(&[(ptr, len)])
    }

    /// [`prefetch`](Region::prefetch) of many scattered ranges with one wake-up: much cheaper
    /// than as many faults.
    ///
    /// # Errors
    /// [`Error::BadRange`] when a range is not in this region; those before it are on their way.
    pub fn prefetch_many(&self, ranges: &[(*const u8, ByteCount)]) -> Result<()> {
        let mut asked = false;
        let mut outcome = Ok(());
        for (ptr, len) in ranges {
            match self.pages_of(*ptr, *len) {
                // A full queue drops the request: it is advice.
                Ok((first, count)) => asked |= self.ahead.push(Ahead { first, count }).is_ok(),
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        if asked {
            self.pager.filler_bells[0].signal();
        }
        outcome
    }

    /// Evicts the range's resident pages and waits until they are out. Pages that are pinned or
    /// in use by the kernel stay.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region, [`Error::Os`] with the device's
    /// error while write-back fails.
    pub fn evict(&self, ptr: *const u8, len: ByteCount) -> Result<()> {
        let (first, count) = self.pages_of(ptr, len)?;
        self.evict_pages(first, count)
    }

    /// Evicts everything that is resident, see [`evict`](Region::evict).
    ///
    /// # Errors
    /// As [`evict`](Region::evict).
    pub fn evict_all(&self) -> Result<()> {
        let end = self.space.fresh_pages(self.pager.page_bytes);
        if end.0 == 0 { Ok(()) } else { self.evict_pages(PageId(0), end) }
    }

    fn evict_pages(&self, first: PageId, count: PageCount) -> Result<()> {
        if !self.requests.evict(first, count, || self.pager.call_evictor()) {
            return Err(Error::NotRunning);
        }
        match self.pager.write_errno.load(Ordering::Acquire) {
            0 => Ok(()),
            errno => Err(Error::Os { call: "write-back", errno: errno as i32 }),
        }
    }

    /// Brings the range's pages in and keeps them: they are not evicted until as many
    /// [`unpin`](Region::unpin)s. For memory that a device request reads into on kernels without
    /// MOVE, or that must not fault.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region, [`Error::LimitExceeded`] when so
    /// much pinned memory would leave no room for the rest, or a page has 255 pins already;
    /// nothing is pinned then.
    pub fn pin(&self, ptr: *const u8, len: ByteCount) -> Result<()> {
        let (first, count) = self.pages_of(ptr, len)?;
        let mut pinned = self.pin_lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let room = self.pager.budget.limit().0 / self.pager.page_bytes as u64 * 3 / 4;
        if *pinned + count.0 > room {
            let reason = format!("{} pinned pages of {room} possible", *pinned + count.0);
            return Err(Error::LimitExceeded { reason });
        }
        for page in (first.0..first.0 + count.0).map(PageId) {
            if !self.pin_page(page) {
                self.unpin_pages(first, PageCount(page.0 - first.0));
                let reason = "a page has 255 pins already".to_owned();
                return Err(Error::LimitExceeded { reason });
            }
        }
        *pinned += count.0;
        Ok(())
    }

    /// Ends one [`pin`](Region::pin) of the range.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region or is not pinned.
    pub fn unpin(&self, ptr: *const u8, len: ByteCount) -> Result<()> {
        let (first, count) = self.pages_of(ptr, len)?;
        let mut pinned = self.pin_lock.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let all = (first.0..first.0 + count.0)
            .map(PageId)
            .all(|page| self.pager.word(page).load().pins() > 0);
        if !all {
            return Err(Error::BadRange { reason: "is not pinned" });
        }
        self.unpin_pages(first, count);
        *pinned = pinned.saturating_sub(count.0);
        Ok(())
    }

    fn pin_page(&self, page: PageId) -> bool {
        loop {
            let word = self.pager.word(page).load();
            if word.state() != State::Resident {
                touch(self.pager.addr(page) as *const u8);
                std::thread::yield_now();
                continue;
            }
            let Some(pinned) = word.pinned() else { return false };
            if self.pager.word(page).try_change(word, pinned).is_ok() {
                return true;
            }
        }
    }

    fn unpin_pages(&self, first: PageId, count: PageCount) {
        for page in (first.0..first.0 + count.0).map(PageId) {
            let mut spins = 0;
            loop {
                let word = self.pager.word(page).load();
                // A pinned page is `Resident`, or for microseconds `Moving`.
                if word.state() == State::Moving {
                    pager::backoff(&mut spins);
                    continue;
                }
                let Some(unpinned) = word.unpinned() else { break };
                if self.pager.word(page).try_change(word, unpinned).is_ok() {
                    break;
                }
            }
        }
    }

    /// Tells the policy what to expect of a range.
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region.
    pub fn advise(&self, ptr: *const u8, len: ByteCount, hint: Hint) -> Result<()> {
        let (first, count) = self.pages_of(ptr, len)?;
        if hint == Hint::WillNeed {
            self.prefetch(ptr, len)?;
        }
        for page in (first.0..first.0 + count.0).map(PageId) {
            if self.pager.word(page).load().state() == State::Resident {
                self.pager.policy.lock().advise(page, hint);
            }
        }
        Ok(())
    }

    /// Changes the limit while running. Lowering it returns when the pages above it are out.
    ///
    /// # Errors
    /// [`Error::LimitTooSmall`] below the minimum for the page size; [`Error::LimitExceeded`]
    /// when pinned pages or a failing device keep the old size (the new limit holds for new pages
    /// all the same).
    pub fn set_limit(&self, limit: ByteCount) -> Result<()> {
        const STALL_MAX: Duration = Duration::from_secs(5);
        let minimum = RegionConfig::limit_min(self.page_size());
        if limit < minimum {
            return Err(Error::LimitTooSmall { limit, minimum });
        }
        self.pager.set_limit(limit);
        let pages = PageCount(limit.0 / self.pager.page_bytes as u64);
        self.pager.policy.lock().resize(pages);
        let (mut last, mut since) = (self.pager.budget.charged(), std::time::Instant::now());
        while self.pager.budget.charged() > limit {
            self.pager.call_evictor();
            std::thread::sleep(Duration::from_micros(200)); // The evictor has no one to tell.
            let now = self.pager.budget.charged();
            if now < last {
                (last, since) = (now, std::time::Instant::now());
            } else if since.elapsed() > STALL_MAX {
                let reason = format!("{now} stay resident of {limit} allowed");
                return Err(Error::LimitExceeded { reason });
            }
        }
        Ok(())
    }

    /// A snapshot of the region's statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats::of(&self.pager, self.space.committed())
    }

    /// Whether system calls may be given far memory that is not resident: `false` where only
    /// faults of user mode are served, and `read(2)` into such memory fails with `EFAULT`.
    #[must_use]
    pub fn serves_kernel_faults(&self) -> bool {
        self.pager.uffd.route() != crate::sys::uffd::Route::UserModeOnly
    }
}

/// What the heap asks for; see `heap::source`.
impl Region {
    pub(crate) fn base(&self) -> usize {
        self.pager.region.addr()
    }

    pub(crate) fn span(&self) -> usize {
        self.pager.region.len()
    }

    pub(crate) fn reserve_extent(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>> {
        let offset = self.space.reserve(len.as_usize(), align.as_usize()).ok()?;
        NonNull::new((self.base() + offset) as *mut u8)
    }

    pub(crate) fn commit_extent(&self, ptr: NonNull<u8>, len: ByteCount) -> bool {
        let offset = ptr.as_ptr() as usize - self.base();
        if !self.space.commit(offset, len.as_usize(), self.capacity()) {
            return false;
        }
        for page in self.space.partly_covered(offset, len.as_usize()) {
            self.zero_part(page, offset, len.as_usize());
        }
        true
    }

    /// Clears what a page that other extents share has left of an earlier use.
    fn zero_part(&self, page: PageId, offset: usize, len: usize) {
        if self.pager.word(page).load().state() == State::Empty {
            return;
        }
        let page_start = self.pager.addr(page) - self.base();
        let start = offset.max(page_start);
        let end = (offset + len).min(page_start + self.pager.page_bytes);
        zero((self.base() + start) as *mut u8, end - start);
    }

    pub(crate) fn decommit_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.space.decommit(ptr.as_ptr() as usize - self.base(), len.as_usize(), &self.pager);
    }

    pub(crate) fn release_extent(&self, ptr: NonNull<u8>, len: ByteCount) {
        self.space.release(ptr.as_ptr() as usize - self.base(), len.as_usize());
    }
}

impl Drop for Region {
    /// Stops the threads and unmaps the address space. Nobody may use the region's memory any
    /// more.
    fn drop(&mut self) {
        self.pager.stop.store(true, Ordering::Release);
        self.requests.close();
        self.pager.evictor_bell.signal();
        self.pager.ring_fillers();
        for thread in self.threads.drain(..) {
            // A handler that panicked has said so already.
            drop(thread.join());
        }
    }
}

/// Reads one byte of far memory, so that its page comes in.
#[expect(unsafe_code, reason = "touches far memory")]
fn touch(ptr: *const u8) {
    // SAFETY: the address lies in the region, which is readable for as long as it exists; a
    // volatile read of a byte others may write is discarded.
    let _ = unsafe { ptr.read_volatile() };
}

/// Zeroes far memory.
#[expect(unsafe_code, reason = "writes far memory")]
fn zero(ptr: *mut u8, len: usize) {
    // SAFETY: the range lies in the region and was just committed: nobody uses it yet.
    unsafe { std::ptr::write_bytes(ptr, 0, len) };
}

/// Hands a request to a queue whose buffers are staging frames.
#[expect(unsafe_code, reason = "lends frames to the device")]
fn push(queue: &mut dyn Queue, request: Request<'_>) -> bool {
    // SAFETY: the frames are taken off all lists by the thread that pushes and touched by nobody
    // until the completion is reported: fillers read into frames they own (filler, invariant 3),
    // and a frame being written is only read (evictor, invariant 1).
    unsafe { queue.push(request) }
}

/// The `errno` of a failed request.
fn errno_of(error: &Error) -> i32 {
    match error {
        Error::Io { errno, .. } | Error::Os { errno, .. } => *errno,
        _ => crate::sys::EIO,
    }
}

const _: () = assert!(KERNEL_PAGE == PAGE_MIN.0 as usize);
