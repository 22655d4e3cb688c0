//! The pager: what fillers, evictors and discarding threads share.
//!
//! [`Pager`] holds the page words, the frames, the budget, the slots and the userfaultfd of one
//! region, and the operations on one page that every side needs: install, zero-fill, take back,
//! discard, poison. Threads live in [`filler`](super::filler) and [`evictor`](super::evictor).
//!
//! # Invariants
//! 1. Memory of a page changes hands only by a change of its word; see `page::word`.
//! 2. A page is in the policy's lists from just before it becomes `Resident` until a victim is
//!    taken or it is discarded.
//! 3. Every mapped page and every frame with memory is charged, before it has memory.
//! 4. A slot belongs to one page word or one frame note, never to both.
#![expect(unsafe_code, reason = "installs, moves and drops pages of the region")]

use super::chunk::{CHUNK, Chunks};
use super::counters::Counters;
use super::latency::Recorder;
use super::readahead::{Streams, Window};
use super::{Advice, Install, Mode, RegionConfig};
use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
use crate::meta::LazyArray;
use crate::page::frames::Frames;
use crate::page::note::Fate;
use crate::page::protocol::{self, Discard};
use crate::page::word::{FrameId, PageWord, Word};
use crate::store::Store;
use crate::store::slots::SlotMap;
use crate::sys;
use crate::sys::event::EventFd;
use crate::sys::uffd::{Outcome, Protect, Uffd, Wake, feature};
use crate::sys::vm::{Discarder, HUGE_PAGE, Huge, KERNEL_PAGE, Mapping, Piece};
use crate::tier::budget::Budget;
use crate::tier::policy::{EvictionPolicy, Insert};
use crossbeam_queue::ArrayQueue;
use crossbeam_utils::CachePadded;
use std::sync::Arc;
use std::time::Duration;

/// Most pages handled by one batch of installs, evictions or discards.
pub(crate) const BATCH_MAX: usize = 64;

/// Write-back fails because all slots are in use, which is no failure of the device.
pub(crate) const NO_SLOT: u32 = u32::MAX;

/// Requests for read-ahead that may wait at the same time; more are dropped.
const AHEAD_MAX: usize = 1024;

/// A run of pages asked for by `prefetch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) first: PageId,
    pub(crate) count: PageCount,
}

/// A 128-bit content hash.
pub(crate) type Sum = [u64; 2];

/// What the threads of one region share.
#[derive(Debug)]
pub(crate) struct Pager {
    pub(crate) region: Mapping,
    pub(crate) page_bytes: usize,
    page_shift: u32,
    pub(crate) words: LazyArray<PageWord>,
    pub(crate) frames: Frames,
    pub(crate) chunks: Chunks,
    pub(crate) uffd: Uffd,
    pub(crate) discarder: Discarder,
    pub(crate) budget: Budget,
    pub(crate) policy: Ranked<Box<dyn EvictionPolicy>>,
    pub(crate) store: Arc<dyn Store>,
    pub(crate) slots: SlotMap,
    /// Per slot: hash of what was written there.
    sums: LazyArray<[AtomicU64; 2]>,
    hash_seed: u64,
    zero_sum: Sum,
    pub(crate) verify: bool,
    /// Fills install frames by MOVE, else by COPY.
    pub(crate) fill_by_move: bool,
    /// Evictions take pages out by MOVE, else by write-protect, copy and DONTNEED.
    pub(crate) evict_by_move: bool,
    /// Reads as zero, never written: the source of zero fills by COPY.
    zeros: Mapping,
    pub(crate) counters: Counters,
    /// Streams of device faults; `None`: nothing is read ahead.
    streams: Option<Ranked<Streams>>,
    advised: LazyArray<AtomicU32>,
    /// Per filler.
    pub(crate) fault_times: Box<[Recorder]>,
    /// Per filler.
    pub(crate) read_times: Box<[Recorder]>,
    pub(crate) write_times: Recorder,
    pub(crate) evict_times: Recorder,
    /// Most pages that may be in the resident state and still be taken as a reserve.
    pub(crate) low_bytes: AtomicU64,
    pub(crate) high_bytes: AtomicU64,
    /// Runs of pages that `prefetch` and streams ask for.
    pub(super) ahead: ArrayQueue<Ahead>,
    in_thread: bool,
    /// How long the device may take for a request.
    pub(super) deadline: Duration,
    pub(crate) evictor_bell: EventFd,
    evictor_called: CachePadded<AtomicBool>,
    pub(crate) filler_bells: Box<[EventFd]>,
    /// Beside each bell: it was rung and nobody has looked yet.
    filler_called: Box<[CachePadded<AtomicBool>]>,
    /// Fillers that hold faults they have no frame for.
    pub(crate) starving: CachePadded<AtomicU32>,
    /// Why write-back fails at the moment: 0, an `errno` or [`NO_SLOT`].
    pub(crate) write_errno: AtomicU32,
    /// Pins of all pages. Changed only together with a page word that it counts.
    pub(crate) pinned: AtomicU64,
    /// Set by the evictor when a whole pass freed nothing.
    pub(crate) exhausted: AtomicBool,
    pub(crate) stop: AtomicBool,
}

impl Pager {
    pub(crate) fn new(config: &RegionConfig, store: Arc<dyn Store>) -> Result<Pager> {
        let page_bytes = config.page.as_usize();
        let pages = config.span.as_usize() / page_bytes;
        let in_thread = config.mode == Mode::InThread;
        let required = if in_thread { feature::SIGBUS } else { 0 };
        let newer = match config.install {
            Install::Copy => 0,
            Install::Auto | Install::Move => feature::MOVE | feature::POISON,
        };
        let uffd = Uffd::open(
            feature::PAGEFAULT_FLAG_WP | required,
            feature::THREAD_ID | newer,
            config.kernel_faults_required,
        )?;
        let (fill_by_move, evict_by_move) =
            config.install.resolve(page_bytes, uffd.has(feature::MOVE))?;
        // Open chunks use huge pages; staging frames only where a page is one.
        let huge = if page_bytes >= HUGE_PAGE { Huge::Yes } else { Huge::No };
        let region = Mapping::reserve(config.span.as_usize(), HUGE_PAGE, Huge::Yes)?;
        let frames = Frames::new(frame_count(config), page_bytes, huge)?;
        uffd.register_faults(region.addr(), region.len())?;
        let (staging, staging_len) = frames.range();
        uffd.register_staging(staging, staging_len)?;
        if config.dump {
            region.include_in_dumps()?;
            frames.include_in_dumps()?;
        }
        let slot_count = store.capacity().as_usize() / page_bytes;
        if slot_count == 0 {
            let reason = format!("no page of {} fits into {}", config.page, store.describe());
            return Err(Error::Config { key: "page".to_owned(), reason });
        }
        let limit_pages = PageCount(config.limit.0 / config.page.0);
        let policy = config.policy.build(PageCount(pages as u64), limit_pages)?;
        // Random, so that content cannot be made to collide ahead of time.
        let hash_seed = crate::sys::random_u64()?;
        let zeros = Mapping::reserve(page_bytes, page_bytes, Huge::No)?;
        // SAFETY: the mapping is `page_bytes` long and nobody writes it, ever.
        let zero_bytes = unsafe { std::slice::from_raw_parts(zeros.as_ptr(), page_bytes) };
        let zero_sum = split(twox_hash::XxHash3_128::oneshot_with_seed(hash_seed, zero_bytes));
        let bells: Result<Vec<EventFd>> = (0..config.handlers).map(|_| new_bell()).collect();
        let pager = Pager {
            region,
            page_bytes,
            page_shift: page_bytes.trailing_zeros(),
            words: LazyArray::new(pages)?,
            chunks: Chunks::new(config.span.as_usize(), evict_by_move)?,
            frames,
            uffd,
            discarder: Discarder::new(),
            budget: Budget::new(config.limit),
            policy: Ranked::new(Rank::Policy, policy),
            slots: SlotMap::new(SlotCount(slot_count as u64))?,
            sums: LazyArray::new(slot_count)?,
            store,
            hash_seed,
            zero_sum,
            verify: config.checksum,
            fill_by_move,
            evict_by_move,
            zeros,
            counters: Counters::default(),
            streams: config.readahead.then(|| Ranked::new(Rank::Leaf, Streams::new())),
            advised: LazyArray::new(config.span.as_usize() / CHUNK)?,
            fault_times: recorders(config.handlers)?,
            read_times: recorders(config.handlers)?,
            write_times: Recorder::new()?,
            evict_times: Recorder::new()?,
            low_bytes: AtomicU64::new(0),
            high_bytes: AtomicU64::new(0),
            ahead: ArrayQueue::new(AHEAD_MAX),
            in_thread,
            deadline: config.deadline,
            evictor_bell: new_bell()?,
            evictor_called: CachePadded::new(AtomicBool::new(false)),
            filler_bells: bells?.into_boxed_slice(),
            filler_called: (0..config.handlers).map(|_| CachePadded::default()).collect(),
            starving: CachePadded::new(AtomicU32::new(0)),
            write_errno: AtomicU32::new(0),
            pinned: AtomicU64::new(0),
            exhausted: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        };
        pager.set_limit(config.limit);
        Ok(pager)
    }

    /// Whether faults of the kernel on far memory are served.
    pub(super) fn serves_kernel_faults(&self) -> bool {
        self.uffd.route().has_kernel_faults() && !self.in_thread
    }

    // Geometry.

    pub(crate) fn page_count(&self) -> PageCount {
        PageCount(self.words.len() as u64)
    }

    pub(crate) fn page_size(&self) -> ByteCount {
        ByteCount(self.page_bytes as u64)
    }

    pub(crate) fn addr(&self, page: PageId) -> usize {
        self.region.addr() + (page.as_usize() << self.page_shift)
    }

    /// The page an address of the region lies in.
    pub(crate) fn page_at(&self, addr: usize) -> PageId {
        PageId(((addr - self.region.addr()) >> self.page_shift) as u64)
    }

    pub(crate) fn word(&self, page: PageId) -> &PageWord {
        &self.words[page.as_usize()]
    }

    pub(crate) fn slot_offset(&self, slot: SlotId) -> u64 {
        slot.0 << self.page_shift
    }

    // Limit and watermarks.

    /// Sets the limit and the watermarks that follow from it.
    pub(crate) fn set_limit(&self, limit: ByteCount) {
        const RESERVE_MAX: u64 = 16 << 20;
        let page = self.page_bytes as u64;
        let high = (limit.0 / 32).min(RESERVE_MAX.max(8 * page)).max(2 * page);
        self.low_bytes.store(high / 2, Ordering::Relaxed);
        self.high_bytes.store(high, Ordering::Relaxed);
        self.budget.set_limit(limit);
        self.call_evictor();
    }

    /// Bytes that fills can take without evicting: unused budget and spare frames.
    pub(crate) fn available(&self) -> u64 {
        self.budget.free().0 + (self.frames.spare_len() * self.page_bytes) as u64
    }

    /// Calls the evictor when less than the low watermark is available.
    pub(crate) fn check_low(&self) {
        if self.available() < self.low_bytes.load(Ordering::Relaxed) {
            self.call_evictor();
        }
    }

    /// Wakes the evictor, once until it has looked.
    pub(crate) fn call_evictor(&self) {
        if !self.evictor_called.swap(true, Ordering::AcqRel) {
            self.evictor_bell.signal();
        }
    }

    /// The evictor has woken and will look at everything it is called for.
    pub(crate) fn evictor_looks(&self) {
        self.evictor_called.store(false, Ordering::Release);
        self.evictor_bell.drain();
    }

    /// Wakes the fillers that wait for frames.
    pub(crate) fn feed_fillers(&self) {
        if self.starving.load(Ordering::Acquire) > 0 {
            self.ring_fillers();
        }
    }

    /// Wakes a filler, once until it has looked.
    pub(crate) fn call_filler(&self, index: usize) {
        if !self.filler_called[index].swap(true, Ordering::AcqRel) {
            self.filler_bells[index].signal();
        }
    }

    /// A filler has woken and will look at everything it can be called for. Costs no system call
    /// when it was not called. One that has nothing else to do looks at the bell as well: the
    /// flag is set before the bell rings, so a ring can come after the flag was taken back.
    pub(crate) fn filler_looks(&self, index: usize, idle: bool) {
        if idle || self.filler_called[index].load(Ordering::Acquire) {
            self.filler_called[index].store(false, Ordering::Release);
            self.filler_bells[index].drain();
        }
    }

    pub(crate) fn ring_fillers(&self) {
        (0..self.filler_bells.len()).for_each(|index| self.call_filler(index));
    }

    // Read-ahead.

    /// What to read ahead after a device fault.
    pub(super) fn next_window(&self, page: PageId) -> Option<Window> {
        const WINDOW_BYTES_MAX: u64 = 4 << 20;
        const WINDOW_PAGES_MAX: u64 = 128;
        /// What all streams together may have read ahead, as a part of the limit: less than the
        /// policy keeps of pages that nobody is known to have used (`tier::policy::tenure`).
        const LIMIT_PART: u64 = 12;
        let streams = self.streams.as_ref()?;
        let advice = self.advice(page);
        if advice == Advice::Random {
            return None;
        }
        let page_bytes = self.page_bytes as u64;
        let window = (WINDOW_BYTES_MAX / page_bytes).clamp(2, WINDOW_PAGES_MAX);
        let all = self.budget.limit().0 / LIMIT_PART / page_bytes;
        streams.lock().fault(page, window, all, advice == Advice::Sequential)
    }

    fn advice(&self, page: PageId) -> Advice {
        Advice::decode(self.advised[self.chunk_of(page).0].load(Ordering::Relaxed))
    }

    /// Notes what the program says of a chunk.
    pub(super) fn set_advice(&self, page: PageId, advice: Advice) {
        self.advised[self.chunk_of(page).0].store(advice.encode(), Ordering::Relaxed);
    }

    // Frames with their charge.

    /// What fills leave of the limit. Evicting by copy needs a frame before it frees a page.
    fn headroom(&self) -> ByteCount {
        const PAGES: u64 = 8;
        if self.evict_by_move { ByteCount::ZERO } else { ByteCount(PAGES * self.page_size().0) }
    }

    /// Bytes above what the limit allows while nothing is under way.
    pub(crate) fn excess(&self) -> u64 {
        let allowed = self.budget.limit().0.saturating_sub(self.headroom().0 / 2);
        self.budget.charged().0.saturating_sub(allowed)
    }

    /// A frame with memory: a spare one, or an empty one that is charged.
    pub(crate) fn charged_frame(&self, headroom: ByteCount) -> Option<FrameId> {
        if let Some(frame) = self.frames.take_spare() {
            return Some(frame);
        }
        if !self.budget.try_charge_leaving(self.page_size(), headroom) {
            return None;
        }
        let frame = self.frames.take_empty();
        if frame.is_none() {
            self.budget.uncharge(self.page_size());
        }
        frame
    }

    /// Takes what a fill needs: a frame, and with COPY a charge for the page as well.
    pub(crate) fn reserve_fill(&self) -> Option<FrameId> {
        let frame = self.charged_frame(self.headroom())?;
        if !self.fill_by_move && !self.charge_page() {
            self.recycle(frame);
            return None;
        }
        Some(frame)
    }

    /// What of the limit pages without a slot cannot have.
    pub(crate) fn reserve(&self) -> ByteCount {
        let high = self.high_bytes.load(Ordering::Relaxed);
        ByteCount(high.max(self.headroom().0 + 2 * self.page_size().0))
    }

    /// Whether fresh pages may still be mapped. They leave some room, because they cannot be
    /// evicted while the device is full: pages that have a slot come and go through it, so that
    /// what was written stays readable.
    fn has_room_for_fresh(&self) -> bool {
        let page = self.page_size().0;
        let reserve = (self.low_bytes.load(Ordering::Relaxed) / 2).max(page);
        self.available() >= reserve + page
    }

    /// Charges one page; spare frames give way when the limit is reached.
    pub(crate) fn charge_page(&self) -> bool {
        let headroom = self.headroom();
        if self.budget.try_charge_leaving(self.page_size(), headroom) {
            return true;
        }
        let Some(frame) = self.frames.take_spare() else { return false };
        self.free_frame(frame);
        self.budget.try_charge_leaving(self.page_size(), headroom)
    }

    /// Returns what [`reserve_fill`](Self::reserve_fill) took, unused.
    pub(crate) fn cancel_fill(&self, frame: FrameId) {
        if !self.fill_by_move {
            self.budget.uncharge(self.page_size());
        }
        self.recycle(frame);
    }

    /// Lists a frame with memory as spare, or frees its memory when there are plenty.
    pub(crate) fn recycle(&self, frame: FrameId) {
        let keep = if self.fill_by_move {
            self.frames.count()
        } else {
            BATCH_MAX.min(self.frames.count() / 2)
        };
        if self.frames.spare_len() < keep {
            self.frames.put_spare(frame);
        } else {
            self.free_frame(frame);
        }
    }

    /// Frees the memory of a frame and its charge.
    pub(crate) fn free_frame(&self, frame: FrameId) {
        if self.frames.release(frame).is_ok() {
            self.budget.uncharge(self.page_size());
        }
    }

    // Content.

    /// Hash of a frame's bytes. The frame may be taken away meanwhile; then the value is
    /// meaningless and the caller's next change of the page word fails.
    pub(crate) fn hash_frame(&self, frame: FrameId) -> Sum {
        // SAFETY: a frame is `page_bytes` of readable memory for ever; the kernel may replace its
        // pages meanwhile, which changes what is read but not that it can be read.
        let bytes = unsafe { std::slice::from_raw_parts(self.frames.ptr(frame), self.page_bytes) };
        split(twox_hash::XxHash3_128::oneshot_with_seed(self.hash_seed, bytes))
    }

    pub(crate) fn zero_sum(&self) -> Sum {
        self.zero_sum
    }

    pub(crate) fn sum(&self, slot: SlotId) -> Sum {
        let [a, b] = &self.sums[slot.as_usize()];
        // Relaxed: published by the word change that named the slot.
        [a.load(Ordering::Relaxed), b.load(Ordering::Relaxed)]
    }

    pub(crate) fn set_sum(&self, slot: SlotId, sum: Sum) {
        let [a, b] = &self.sums[slot.as_usize()];
        a.store(sum[0], Ordering::Relaxed);
        b.store(sum[1], Ordering::Relaxed);
    }

    // Installing.

    /// Maps a frame's content as `page`, which is `Moving` by this thread, and wakes who waits
    /// for it. The frame is consumed, its memory or the charge of the fill now the page's.
    ///
    /// # Errors
    /// When the kernel is out of memory: the page is still missing, the frame still the caller's.
    pub(crate) fn install(&self, page: PageId, frame: FrameId, protect: Protect) -> Result<()> {
        let (dst, src) = (self.addr(page), self.frames.addr(frame));
        if self.fill_by_move {
            // SAFETY: the page is missing and this thread alone may fill it (it is `Moving`); the
            // frame is this thread's and holds the page's content.
            match unsafe { self.uffd.move_pages(dst, src, self.page_bytes, Wake::Yes) } {
                Outcome::Done => self.frames.put_empty(frame),
                // Rarely, just after a device read, the kernel still holds the frame.
                Outcome::Busy { bytes } => {
                    self.counters.install_busy.bump();
                    self.copy_rest(page, frame, bytes)?;
                    self.frames.release(frame)?;
                }
                outcome => return Err(install_error(outcome)),
            }
            return Ok(());
        }
        // SAFETY: as above.
        let outcome =
            unsafe { self.uffd.copy(dst, src as *const u8, self.page_bytes, protect, Wake::Yes) };
        match outcome {
            Outcome::Done => {
                self.recycle(frame);
                Ok(())
            }
            outcome => Err(install_error(outcome)),
        }
    }

    /// Whether fills for reads are installed write-protected, so that the first write is seen.
    pub(crate) fn protects_fills(&self) -> bool {
        !self.fill_by_move
    }

    /// Copies what of a page is not mapped yet from a frame, which keeps its memory.
    ///
    /// # Errors
    /// When the kernel is out of memory and nothing of the page is mapped.
    pub(crate) fn copy_rest(&self, page: PageId, frame: FrameId, mapped: usize) -> Result<()> {
        let (dst, src) = (self.addr(page) + mapped, self.frames.addr(frame) + mapped);
        // SAFETY: the rest of the page is missing, this thread alone may fill it (it is
        // `Moving`), and the rest of the frame holds its content.
        let outcome = unsafe {
            let rest = self.page_bytes - mapped;
            self.uffd.copy(dst, src as *const u8, rest, Protect::No, Wake::Yes)
        };
        match outcome {
            Outcome::Done => Ok(()),
            Outcome::Failed { bytes: 0, .. } if mapped == 0 => Err(install_error(outcome)),
            outcome => super::report::fatal("a page was left half mapped", &install_error(outcome)),
        }
    }

    /// Maps zeros as `page`, which is `Moving` by this thread. Returns `false` when the limit
    /// leaves no memory for it.
    ///
    /// # Errors
    /// When the kernel is out of memory: the page is still missing.
    pub(crate) fn install_zeros(&self, page: PageId) -> Result<bool> {
        if !self.has_room_for_fresh() {
            return Ok(false);
        }
        if self.fill_by_move
            && let Some(frame) = self.frame_for_zeros()
        {
            // SAFETY: the frame is this thread's, `page_bytes` long.
            unsafe { std::ptr::write_bytes(self.frames.ptr(frame), 0, self.page_bytes) };
            return match self.install(page, frame, Protect::No) {
                Ok(()) => Ok(true),
                Err(error) => {
                    self.recycle(frame);
                    Err(error)
                }
            };
        }
        let only_huge = self.fill_by_move && self.page_bytes >= HUGE_PAGE;
        if only_huge || !self.charge_page() {
            return Ok(false);
        }
        // SAFETY: the page is missing and this thread alone may fill it (it is `Moving`);
        // `zeros` is never written.
        let outcome = unsafe {
            let zeros = self.zeros.as_ptr();
            self.uffd.copy(self.addr(page), zeros, self.page_bytes, Protect::No, Wake::Yes)
        };
        match outcome {
            Outcome::Done => Ok(true),
            Outcome::Failed { bytes: 0, .. } => {
                self.budget.uncharge(self.page_size());
                Err(install_error(outcome))
            }
            outcome => super::report::fatal("a page was left half mapped", &install_error(outcome)),
        }
    }

    /// A frame to clear and move in as a page of zeros. Huge pages always go this way, because
    /// COPY builds small pages; smaller ones only when a frame is at hand.
    fn frame_for_zeros(&self) -> Option<FrameId> {
        if self.page_bytes >= HUGE_PAGE {
            self.charged_frame(self.headroom())
        } else {
            self.frames.take_spare()
        }
    }

    /// Makes a mapped `Moving` page resident. The policy hears of it first (invariant 2).
    pub(crate) fn settle_resident(&self, page: PageId, from: Word, to: Word, how: Option<Insert>) {
        {
            let mut policy = self.policy.lock();
            match how {
                Some(how) => policy.inserted(page, how),
                None => {
                    policy.retouched(page);
                    // Nothing new, unless the policy was told to forget the page.
                    policy.inserted(page, Insert::Fresh);
                }
            }
        }
        self.settle(page, from, to);
    }

    /// Ends this thread's `Moving`.
    pub(crate) fn settle(&self, page: PageId, from: Word, to: Word) {
        if let Err(now) = self.word(page).try_change(from, to) {
            panic!("{page} changed from {from:?} to {now:?} while being moved");
        }
    }

    /// Wakes the threads that wait for a page, to fault again.
    pub(crate) fn wake(&self, page: PageId) {
        // A failed wake means the range is not registered any more: nobody can wait there.
        drop(self.uffd.wake(self.addr(page), self.page_bytes));
    }

    // Discarding.

    /// Makes `count` pages from `first` read as zero: frames, slots and pending writes go.
    pub(crate) fn discard(&self, first: PageId, count: PageCount) {
        let end = PageId(first.0 + count.0);
        let per_chunk = (CHUNK / self.page_bytes) as u64;
        let mut next = first;
        while next < end {
            let part_end = PageId(((next.0 / per_chunk + 1) * per_chunk).min(end.0));
            if !self.discard_in_open(self.chunk_of(next), next, part_end) {
                self.discard_in_closed(next, part_end);
            }
            next = part_end;
        }
    }

    fn discard_in_closed(&self, first: PageId, end: PageId) {
        let mut batch: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
        let mut batched = 0;
        for page in (first.0..end.0).map(PageId) {
            if let Some(word) = self.discard_start(page) {
                batch[batched] = (page, word);
                batched += 1;
            }
            if batched == BATCH_MAX {
                self.discard_resident_run(&batch);
                batched = 0;
            }
        }
        self.discard_resident_run(&batch[..batched]);
    }

    /// Discards one page unless it is mapped; a mapped one is returned, `Resident`, for a batch.
    fn discard_start(&self, page: PageId) -> Option<Word> {
        let mut spins = 0u32;
        loop {
            match protocol::discard(self.word(page), |frame| self.frames.note_of(frame)) {
                Discard::Done => return None,
                Discard::Mapped(word) => return Some(word),
                Discard::Freed(slot) => {
                    self.put_slot(slot);
                    return None;
                }
                Discard::Dropped(frame, slot) => {
                    self.put_slot(slot);
                    self.counters.died_before_write.bump();
                    self.frames.decide(frame, Fate::Dropped);
                    return None;
                }
                Discard::Abandoned(frame) => {
                    // The evictor frees the old slot, and the frame when the device lets go of it.
                    self.counters.died_during_write.bump();
                    self.frames.decide(frame, Fate::Dropped);
                    return None;
                }
                Discard::Mend(slot) => {
                    self.put_slot(slot);
                    self.unpoison(page);
                    self.settle(page, Word::moving(None), Word::EMPTY);
                    return None;
                }
                Discard::Busy => backoff(&mut spins),
                Discard::Changed => {}
            }
        }
    }

    /// Unmaps a batch of resident pages that are discarded, in ascending order.
    fn discard_resident_run(&self, batch: &[(PageId, Word)]) {
        let mut pieces: [Piece; BATCH_MAX] = [Piece::new(0, 0); BATCH_MAX];
        let mut taken: [(PageId, Word); BATCH_MAX] = [(PageId(0), Word::EMPTY); BATCH_MAX];
        let (mut piece_count, mut taken_count) = (0, 0);
        for &(page, seen) in batch {
            let Some(word) = self.take_for_discard(page, seen) else { continue };
            taken[taken_count] = (page, word);
            taken_count += 1;
            self.push_piece(&mut pieces, &mut piece_count, page);
        }
        if taken_count == 0 {
            return;
        }
        let taken = &taken[..taken_count];
        {
            let mut policy = self.policy.lock();
            taken.iter().for_each(|(page, _)| policy.removed(*page));
        }
        // SAFETY: each page is `Moving` by this thread, and its owner gave its content up.
        unsafe { self.discarder.discard(&pieces[..piece_count]) }
            .expect("MADV_DONTNEED of own anonymous pages succeeds");
        let unwritten = taken.iter().filter(|(_, word)| word.slot().is_none()).count();
        self.counters.freed_unwritten.add(unwritten as u64);
        for &(page, word) in taken {
            self.put_slot(word.slot());
            self.pinned.fetch_sub(word.pins(), Ordering::Relaxed);
            self.settle(page, word, Word::EMPTY);
        }
        self.budget.uncharge(ByteCount((taken.len() * self.page_bytes) as u64));
    }

    /// Takes a page seen `Resident` for unmapping; discards it otherwise when it moved on.
    fn take_for_discard(&self, page: PageId, seen: Word) -> Option<Word> {
        let mut word = seen;
        while self.word(page).try_change(word, word.leaving()).is_err() {
            word = self.discard_start(page)?;
        }
        Some(word.leaving())
    }

    /// Adds a page to a list of ranges, growing the last one when the page follows it.
    pub(crate) fn push_piece(&self, pieces: &mut [Piece], count: &mut usize, page: PageId) {
        let start = self.addr(page);
        if let Some(last) = count.checked_sub(1).map(|last| &mut pieces[last])
            && last.start() + last.len() == start
        {
            last.grow(self.page_bytes);
            return;
        }
        pieces[*count] = Piece::new(start, self.page_bytes);
        *count += 1;
    }

    /// Frees a page's slot.
    pub(crate) fn put_slot(&self, slot: Option<SlotId>) {
        if let Some(slot) = slot {
            self.slots.put(slot);
        }
    }

    // Failure.

    /// Makes a `Moving`, missing page lost: a touch is SIGBUS from now on, and who waits gets it.
    /// Says so on standard error.
    pub(crate) fn poison(&self, page: PageId, from: Word, cause: &Error) {
        self.counters.poisoned.bump();
        super::report::lost_page(self.addr(page), self.page_bytes, cause);
        if self.uffd.has(feature::POISON) {
            // SAFETY: the page is missing and its content is lost.
            let outcome = unsafe { self.uffd.poison(self.addr(page), self.page_bytes) };
            if outcome != Outcome::Done {
                super::report::fatal("a lost page could not be poisoned", &install_error(outcome));
            }
        } else if let Err(error) = self.region.fence(self.offset(page), self.page_bytes) {
            super::report::fatal("a lost page could not be fenced off", &error);
        }
        self.settle(page, from, Word::poisoned(from.slot()));
        self.wake(page);
    }

    /// Makes a poisoned page that was discarded usable again.
    fn unpoison(&self, page: PageId) {
        let mended = if self.uffd.has(feature::POISON) {
            let piece = Piece::new(self.addr(page), self.page_bytes);
            // SAFETY: the page's content is lost already; this clears the marker.
            unsafe { self.discarder.discard(&[piece]) }
        } else {
            self.region.unfence(self.offset(page), self.page_bytes, || {
                self.uffd.register_faults(self.addr(page), self.page_bytes)
            })
        };
        if let Err(error) = mended {
            super::report::fatal("a lost page could not be made usable again", &error);
        }
    }

    fn offset(&self, page: PageId) -> usize {
        self.addr(page) - self.region.addr()
    }
}

pub(super) fn install_error(outcome: Outcome) -> Error {
    let errno = match outcome {
        Outcome::Done => 0,
        Outcome::Present { .. } => sys::EEXIST,
        Outcome::Busy { .. } => sys::EBUSY,
        Outcome::Failed { errno, .. } => errno,
    };
    Error::Os { call: "installing a page", errno }
}

/// Spins shortly, then yields: for states that last microseconds.
pub(crate) fn backoff(spins: &mut u32) {
    *spins += 1;
    if *spins < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
}

fn new_bell() -> Result<EventFd> {
    EventFd::new().map_err(|errno| Error::Os { call: "eventfd", errno: errno.0 })
}

fn recorders(count: usize) -> Result<Box<[Recorder]>> {
    (0..count).map(|_| Recorder::new()).collect()
}

fn split(sum: u128) -> Sum {
    [sum as u64, (sum >> 64) as u64]
}

/// Staging frames of a region: a quarter of the limit, within bounds.
fn frame_count(config: &RegionConfig) -> usize {
    const FRAMES_MIN: usize = 16;
    const FRAMES_MAX: usize = 1024;
    const BYTES_MAX: usize = 256 << 20;
    let page = config.page.as_usize();
    let quarter = config.limit.as_usize() / 4 / page;
    quarter.clamp(FRAMES_MIN, FRAMES_MAX).min((BYTES_MAX / page).max(FRAMES_MIN))
}

const _: () = assert!(KERNEL_PAGE == 4096);
