//! The pager: what handlers, evictors and discarding threads share.
//!
//! [`Pager`] holds the page words, the frames, the budget, the slots and the userfaultfd of one
//! region, and the operations on one page that every side needs: install, zero-fill, take back,
//! discard, poison. Threads live in [`handler`](crate::paging::fault::handler) and [`evictor`](crate::paging::evict).
//!
//! | module | does |
//! |---|---|
//! | this one | state, geometry, hashes, changes of a page's word |
//! | `room` | limit, watermarks, frames with their charge, bells |
//! | `install` | maps frames and zeros, marks lost pages |
//! | `discard` | drops pages that nobody needs |
//!
//! # Invariants
//! 1. Memory of a page changes hands only by a change of its word; see `page::word`.
//! 2. A page is in the policy's lists from just before it becomes `Resident` until a victim is
//!    taken or it is discarded.
//! 3. Every mapped page and every frame with memory is charged, before it has memory.
//! 4. A slot belongs to one page word or one frame note, never to both.
#![expect(unsafe_code, reason = "sees frames as bytes")]

pub(in crate::paging) mod discard;
pub(in crate::paging) mod health;
pub(super) mod install;
pub(super) mod room;
pub(in crate::paging) mod table;

use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering, Rank};
use crate::base::units::{ByteCount, PageCount, PageId, SlotCount, SlotId};
use crate::limit::budget::Budget;
use crate::limit::manager::Account;
use crate::meta::LazyArray;
use crate::paging::bell::Bell;
use crate::paging::config::{Install, Mode, RegionConfig};
use crate::paging::counters::Counters;
use crate::paging::evict::arrivals::Residents;
use crate::paging::evict::policy::Insert;
use crate::paging::fault::sched::HandlerSched;
use crate::paging::managed::Joined;
use crate::paging::page::chunks::{CHUNK_PAGES_MAX, ChunkId, Chunks};
use crate::paging::page::frames::Frames;
use crate::paging::page::word::{FrameId, PageWord, Word};
use crate::paging::pager::health::Health;
use crate::paging::pager::table::PageTable;
use crate::paging::purge::Care;
use crate::paging::readahead::Readahead;
use crate::paging::starved::{FAULTS_HELD_MAX, Starved};
use crate::paging::tables::Tables;
use crate::store::slots::SlotMap;
use crate::store::{OnlyUser, Store};
use crate::sys::signals::FaultLock;
use crate::sys::uffd::{Uffd, feature};
use crate::sys::vm::{Discarder, HUGE_PAGE, Huge, KERNEL_PAGE, Mapping};
use crossbeam_utils::CachePadded;
use std::sync::Arc;
use std::time::Instant;

/// A 128-bit content hash.
pub(crate) type Sum = [u64; 2];

/// What the threads of one region share.
#[derive(Debug)]
pub(crate) struct Pager {
    table: PageTable,
    pub(crate) frames: Frames,
    chunks: Chunks,
    pub(crate) uffd: Uffd,
    pub(crate) discarder: Discarder,
    pub(crate) budget: Arc<Budget>,
    /// Its place under a memory manager.
    pub(in crate::paging) joined: Joined,
    pub(in crate::paging) tables: Tables,
    pub(in crate::paging) care: Care,
    policy: FaultLock<Residents>,
    pub(crate) store: Arc<dyn Store>,
    /// As long as a thread may write to the store.
    _user: OnlyUser,
    /// What the store is, for messages.
    pub(in crate::paging) place: Box<str>,
    pub(crate) slots: SlotMap,
    /// Per slot: hash of what was written there.
    pub(in crate::paging) sums: LazyArray<[AtomicU64; 2]>,
    hash_seed: u64,
    zero_sum: Sum,
    pub(crate) verify: bool,
    /// Fills install single frames by MOVE, else by COPY. (Runs of them always go by MOVE.)
    pub(crate) fill_by_move: bool,
    /// Evictions take pages out by MOVE, else by write-protect, copy and DONTNEED.
    pub(crate) evict_by_move: bool,
    /// Chunks that a stream leads to are read whole, into runs of frames.
    pub(in crate::paging) reads_chunks: bool,
    /// Reads as zero, never written: the source of zero fills by COPY.
    zeros: Mapping,
    counters: Counters,
    pub(in crate::paging) readahead: Readahead,
    /// Most pages that may be in the resident state and still be taken as a reserve.
    pub(crate) low_bytes: AtomicU64,
    pub(crate) high_bytes: AtomicU64,
    pub(in crate::paging) in_thread: bool,
    pub(in crate::paging) evictor_bell: Bell,
    pub(in crate::paging) sched: Arc<HandlerSched>,
    /// Faults that wait for room.
    pub(in crate::paging) starved: Starved,
    /// How many of them there are, where threads serve themselves too, and handlers that wait for
    /// room to read ahead.
    pub(crate) starving: CachePadded<AtomicU32>,
    health: Health,
    /// A frame without a charge of its own uses the one that is kept for copies. Only the evictor
    /// lends it, and has it back before it takes the next page out.
    pub(in crate::paging) copy_charge_lent: AtomicBool,
    /// Since when no page could be mapped, in milliseconds from `began` on; 0: the last one could.
    map_fails_since: AtomicU64,
    began: Instant,
}

impl Pager {
    /// `account` is the region's at a memory manager, where it has one; `user` says that nobody else
    /// writes to the store.
    pub(crate) fn new(
        config: &RegionConfig,
        store: Arc<dyn Store>,
        account: Option<Account>,
        user: OnlyUser,
    ) -> Result<Pager> {
        let own = || Arc::new(Budget::new(config.limit));
        let budget = account.as_ref().map_or_else(own, |account| Arc::clone(account.budget()));
        let page_bytes = config.page.as_usize();
        let pages = config.span.as_usize() / page_bytes;
        let in_thread = config.mode == Mode::InThread;
        let required = if in_thread { feature::SIGBUS } else { 0 };
        let copies = config.install == Install::Copy;
        let newer = if copies { 0 } else { feature::MOVE | feature::POISON };
        let uffd = Uffd::open(
            feature::PAGEFAULT_FLAG_WP | required,
            feature::THREAD_ID | feature::EVENT_REMAP | newer,
            config.kernel_faults_required,
        )?;
        let (fill_by_move, evict_by_move) =
            config.install.resolve(page_bytes, uffd.has(feature::MOVE))?;
        // Open chunks use huge pages; staging frames only where a page is one.
        let huge = if page_bytes >= HUGE_PAGE { Huge::Yes } else { Huge::No };
        let table = PageTable::new(config.span.as_usize(), page_bytes)?;
        let (singles, runs) = (frame_count(config.page, budget.limit()), run_count(budget.limit()));
        let frames = Frames::new(singles, runs, page_bytes, huge)?;
        let reads_chunks = evict_by_move && !in_thread && holds_chunks(&frames);
        uffd.register_faults(table.start(), table.len())?;
        let (staging, staging_len) = frames.range();
        uffd.register_unwatched(staging, staging_len)?;
        if config.dump {
            table.include_in_dumps()?;
            frames.include_in_dumps()?;
        }
        let slot_count = slot_count(config, &*store)?;
        let limit = PageCount(config.limit.0 / config.page.0);
        let policy = config.policy.build(PageCount(pages as u64), limit)?;
        // Random, so that content cannot be made to collide ahead of time.
        let hash_seed = crate::sys::random_u64()?;
        let zeros = Mapping::reserve(page_bytes, page_bytes, Huge::No)?;
        let zero_sum = sum_of_zeros(&zeros, hash_seed);
        let pager = Pager {
            table,
            chunks: Chunks::new(config.span.as_usize(), evict_by_move)?,
            frames,
            uffd,
            discarder: Discarder::new(),
            budget,
            care: Care::new(),
            joined: Joined::new(account),
            tables: Tables::new(config.span.as_usize(), page_bytes)?,
            policy: FaultLock::new(Rank::Policy, Residents::new(policy)),
            slots: SlotMap::new(SlotCount(slot_count as u64))?,
            sums: LazyArray::new(slot_count)?,
            place: store.describe().into(),
            store,
            _user: user,
            hash_seed,
            zero_sum,
            verify: config.checksum,
            fill_by_move,
            evict_by_move,
            reads_chunks,
            zeros,
            counters: Counters::new(config.handlers)?,
            readahead: Readahead::new(config.span, config.page, config.readahead)?,
            low_bytes: AtomicU64::new(0),
            high_bytes: AtomicU64::new(0),
            in_thread,
            evictor_bell: Bell::new()?,
            sched: Arc::new(HandlerSched::new(config.handlers)?),
            starved: Starved::new(config.handlers * FAULTS_HELD_MAX, config.deadline),
            starving: CachePadded::new(AtomicU32::new(0)),
            health: Health::new(config.deadline),
            copy_charge_lent: AtomicBool::new(false),
            map_fails_since: AtomicU64::new(0),
            began: Instant::now(),
        };
        pager.set_limit(config.limit);
        pager.start_tables();
        pager.keep_copy_charge().map(|()| pager)
    }

    // Parts.

    /// Addresses and words of the pages.
    pub(in crate::paging) fn table(&self) -> &PageTable {
        &self.table
    }

    /// Which chunks the kernel fills.
    pub(in crate::paging) fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// What the policy knows.
    pub(in crate::paging) fn policy(&self) -> &FaultLock<Residents> {
        &self.policy
    }

    pub(in crate::paging) fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What fails at the moment, and whether the region stops.
    pub(in crate::paging) fn health(&self) -> &Health {
        &self.health
    }

    /// Calls code of the store, see [`Health::guarded`]: `None` after a panic.
    pub(in crate::paging) fn guarded<T>(&self, call: impl FnOnce() -> T) -> Option<T> {
        let result = self.health.guarded(call);
        self.counters.panics.add(u64::from(result.is_none()));
        result
    }

    /// Whether faults of the kernel on far memory are served.
    pub(in crate::paging) fn serves_kernel_faults(&self) -> bool {
        self.uffd.route().has_kernel_faults() && !self.in_thread
    }

    // Geometry.

    pub(crate) fn page_count(&self) -> PageCount {
        self.table.page_count()
    }

    pub(crate) fn page_bytes(&self) -> usize {
        self.table.page_bytes()
    }

    pub(crate) fn page_size(&self) -> ByteCount {
        self.table.page_size()
    }

    pub(crate) fn addr(&self, page: PageId) -> usize {
        self.table.addr(page)
    }

    /// The page an address of the region lies in.
    pub(crate) fn page_at(&self, addr: usize) -> PageId {
        self.table.page_at(addr)
    }

    pub(crate) fn word(&self, page: PageId) -> &PageWord {
        self.table.word(page)
    }

    /// The chunk a page lies in.
    pub(in crate::paging) fn chunk_of(&self, page: PageId) -> ChunkId {
        self.table.chunk_of(page)
    }

    pub(in crate::paging) fn pages_per_chunk(&self) -> u64 {
        self.table.pages_per_chunk()
    }

    pub(crate) fn slot_offset(&self, slot: SlotId) -> u64 {
        slot.0 * self.page_bytes() as u64
    }

    // Content.

    /// Hash of a frame's bytes. The frame may be taken away meanwhile; then the value is
    /// meaningless and the caller's next change of the page word fails.
    pub(crate) fn hash_frame(&self, frame: FrameId) -> Sum {
        // SAFETY: a frame is `page_bytes` of readable memory for ever; the kernel may replace its
        // pages meanwhile, which changes what is read but not that it can be read.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.frames.ptr(frame), self.page_bytes()) };
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

    // Words.

    /// Makes a mapped `Moving` page resident. The policy hears of it first (invariant 2).
    pub(crate) fn settle_resident(&self, page: PageId, from: Word, to: Word, how: Option<Insert>) {
        {
            let mut policy = self.policy().lock();
            match how {
                Some(how) => policy.arrive(page, how),
                None => {
                    policy.retouched(page);
                    // Nothing new, unless the policy was told to forget the page.
                    policy.inserted(page, Insert::Fresh);
                }
            }
        }
        self.settle(page, from, to);
    }

    /// As [`settle_resident`](Self::settle_resident), for a page that was missing: wakes who waits
    /// for it, as the last thing, because a thread that is woken may run at once in place of this
    /// one and must not find the page in its hands.
    pub(crate) fn settle_mapped(&self, page: PageId, from: Word, to: Word, how: Option<Insert>) {
        self.settle_resident(page, from, to, how);
        self.wake(page);
    }

    /// As [`settle_resident`](Self::settle_resident), for the pages of a chunk that were read
    /// together: `from` says of each what its word is, and whether somebody waits for it.
    pub(in crate::paging) fn settle_read(&self, first: PageId, from: &[(Word, bool)]) {
        let pages = || (first.0..).map(PageId).zip(from);
        {
            let mut policy = self.policy().lock();
            for (page, &(_, wanted)) in pages() {
                policy.arrive(page, if wanted { Insert::Filled } else { Insert::Prefetched });
            }
        }
        for (page, &(moving, wanted)) in pages() {
            let resident = Word::resident(moving.slot()).with_prefetched(!wanted);
            self.settle(page, moving, resident);
        }
    }

    /// Ends this thread's `Moving`, see [`PageTable::settle`].
    pub(crate) fn settle(&self, page: PageId, from: Word, to: Word) {
        self.table.settle(page, from, to);
    }

    /// Wakes the threads that wait for a page, to fault again.
    pub(crate) fn wake(&self, page: PageId) {
        if self.in_thread {
            return; // Faults are signals there: nobody waits.
        }
        // A failed wake means the range is not registered any more: nobody can wait there.
        drop(self.uffd.wake(self.addr(page), self.page_bytes()));
    }

    /// As [`wake`](Self::wake), for the chunk that begins with a page.
    pub(in crate::paging) fn wake_chunk(&self, first: PageId) {
        drop(self.uffd.wake(self.addr(first), HUGE_PAGE));
    }
}

/// Pages that fit into a store.
///
/// # Errors
/// When none does.
fn slot_count(config: &RegionConfig, store: &dyn Store) -> Result<usize> {
    let count = store.capacity().as_usize() / config.page.as_usize();
    if count == 0 {
        let reason = format!("no page of {} fits into {}", config.page, store.describe());
        return Err(Error::Config { key: "page".to_owned(), reason });
    }
    Ok(count)
}

/// Whether there are runs of frames that chunks can be read into.
fn holds_chunks(frames: &Frames) -> bool {
    frames.has_runs() && frames.run_frames() <= CHUNK_PAGES_MAX
}

/// The hash of a page of zeros, as which `zeros` is mapped.
fn sum_of_zeros(zeros: &Mapping, seed: u64) -> Sum {
    // SAFETY: the mapping is as long as it says and nobody writes it, ever.
    let bytes = unsafe { std::slice::from_raw_parts(zeros.as_ptr(), zeros.len()) };
    split(twox_hash::XxHash3_128::oneshot_with_seed(seed, bytes))
}

fn split(sum: u128) -> Sum {
    [sum as u64, (sum >> 64) as u64]
}

/// Staging frames of a region: a quarter of the limit, within bounds.
fn frame_count(page: ByteCount, limit: ByteCount) -> usize {
    const FRAMES_MIN: usize = 16;
    const FRAMES_MAX: usize = 1024;
    const BYTES_MAX: usize = 256 << 20;
    let page = page.as_usize();
    let quarter = limit.as_usize() / 4 / page;
    quarter.clamp(FRAMES_MIN, FRAMES_MAX).min((BYTES_MAX / page).max(FRAMES_MIN))
}

/// Runs of frames that fresh chunks are evicted to and chunks are read into: an eighth of the limit,
/// within bounds.
fn run_count(limit: ByteCount) -> usize {
    const RUNS_MAX: usize = 8;
    (limit.as_usize() / 8 / HUGE_PAGE).min(RUNS_MAX)
}

const _: () = assert!(KERNEL_PAGE == 4096);
