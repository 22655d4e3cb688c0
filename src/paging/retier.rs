//! Retier: pages of a range go to the other device in place; addresses stay, readers and writers go on.
//!
//! The calling thread walks through the range chunk by chunk, a few at a time, and has others do the work:
//! handlers read what is on the old side, as for any prefetch, and the evictor writes it to the new one.
//!
//! ```text
//!   mapped, old slot --------------> the slot is given up: the page is written when it leaves
//!   stored, old slot --prefetched--> mapped --evictor: not clean, its slot is misplaced--> stored, new slot
//! ```
//! A page that is touched meanwhile stays mapped, and gives its old slot up.
//!
//! # Invariants
//! 1. Each page has one slot at most. It keeps the old one until the new one is written, or until the page is
//!    mapped and writes to the new side have not failed.
//! 2. A page that was seen with a slot of the new side or none, after the evictor has answered, has no
//!    old one later: only the evictor gives slots out, and it knows what the chunk wants by then.

use crate::base::deadline::Deadline;
use crate::base::error::{Error, Result};
use crate::base::units::{ByteCount, PageCount, PageId};
use crate::paging::page::chunks::{CHUNK, ChunkId};
use crate::paging::page::protocol::{self, Misplaced};
use crate::paging::page::word::State;
use crate::paging::pager::Pager;
use crate::paging::pager::wants::Wants;
use crate::paging::region::Region;
use crate::store::Side;
use crate::sys;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Chunks that are under way at most: while the evictor writes one, others are read.
const CHUNKS_MAX: u64 = 8;
/// Those under way take at most 1/LIMIT_PART of the limit, but for the first.
const LIMIT_PART: u64 = 8;
/// Times the pages of a chunk are taken out to be written; what came back each time is in use.
const TAKES_MAX: u32 = 2;
/// After this long, what has come goes on alone, and what has not come is asked for again.
const PATIENCE: Duration = Duration::from_millis(50);
/// Pause between two looks that found nothing new: neither handlers nor the evictor have somebody to tell.
const NAP: Duration = Duration::from_micros(100);
/// Longest sleep for the sake of a rate: after this time it notices that it was cancelled.
const NAP_MAX: Duration = Duration::from_millis(5);

/// Moves pages of a range to another device; see [`Region::retier`].
#[must_use = "does nothing before it runs"]
#[derive(Debug)]
pub struct Retier<'a> {
    region: &'a Region,
    wants: &'a Wants,
    /// The chunks of the range.
    first: usize,
    end: usize,
    to: Side,
    rate: Option<ByteCount>,
    cancel: Option<&'a AtomicBool>,
}

/// How far a [`Retier`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retiered {
    bytes: ByteCount,
    of_bytes: ByteCount,
    read: ByteCount,
    elapsed: Duration,
}

impl Retiered {
    /// Bytes of addresses none of whose pages has a place on the other side any more.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Bytes of addresses in all: the range, rounded outwards to 2 MiB.
    #[must_use]
    pub fn of_bytes(&self) -> ByteCount {
        self.of_bytes
    }

    /// Bytes that were to be read from the other side, because they were there only.
    #[must_use]
    pub fn read(&self) -> ByteCount {
        self.read
    }

    /// Since it began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }

    /// Whether the whole range is where it is to be; else it was cancelled.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.bytes == self.of_bytes
    }
}

impl Region {
    /// Moves the pages of a range to one side of a [`JoinedStore`](crate::store::JoinedStore), in place: their
    /// addresses stay, and other threads go on reading and writing them. Pages that will be written later
    /// go to that side as well, until the addresses are given back. It works in chunks of 2 MiB; those that
    /// the range covers in part count whole. [`Retier::run`] does it. (The page size cannot change in place.)
    ///
    /// # Errors
    /// [`Error::BadRange`] when the range is not in this region, [`Error::Forked`] in a forked child,
    /// [`Error::Unsupported`] when the region's store is not a joined one.
    ///
    /// # Examples
    /// ```
    /// use farheap::ByteCount;
    /// use farheap::region::{Region, RegionConfig};
    /// use farheap::store::{JoinedStore, MemStore, Side};
    /// use std::sync::Arc;
    ///
    /// let store = || MemStore::new(ByteCount::mib(64)).map(Arc::new);
    /// let joined = Arc::new(JoinedStore::new(store()?, store()?)?);
    /// match Region::create(RegionConfig::new().limit(ByteCount::mib(8)), joined) {
    ///     Ok(region) => {
    ///         let ptr = region.map(ByteCount::mib(32))?;
    ///         let done = region.retier(ptr.as_ptr(), ByteCount::mib(32), Side::Second)?.run(|_| {})?;
    ///         assert!(done.is_complete());
    ///     }
    ///     Err(error) => println!("{error}"), // Says how to allow userfaultfd.
    /// }
    /// # Ok::<(), farheap::Error>(())
    /// ```
    pub fn retier(&self, ptr: *const u8, len: ByteCount, to: Side) -> Result<Retier<'_>> {
        let (first, count) = self.extents.pages_of(ptr, len)?;
        if !self.is_here() {
            return Err(Error::Forked { what: "a region" });
        }
        let Some(wants) = self.pager.slots().wants() else {
            let (feature, why) =
                ("pages that change their device", "the store is not a joined one");
            return Err(Error::Unsupported { feature, why });
        };
        let last = PageId(first.0 + count.0.max(1) - 1);
        let (first, end) = (self.pager.chunk_of(first).0, self.pager.chunk_of(last).0 + 1);
        Ok(Retier { region: self, wants, first, end, to, rate: None, cancel: None })
    }

    /// Bytes of the slots that are in use on one side of a joined store; on the first, of any store.
    #[must_use]
    pub fn stored_on(&self, side: Side) -> ByteCount {
        let maps = self.pager.slots().maps();
        let slots = maps.sides().find(|other| *other == side).map(|side| maps.in_use_of(side).0);
        ByteCount(slots.unwrap_or(0) * self.pager.page_bytes() as u64)
    }
}

/// Notes that the heap over a region has ended: a [`Retier`] that is under way ends soon, further ones at once, and
/// hints and control are refused.
#[cfg(feature = "heap")]
pub(crate) fn end(region: &Region) {
    region.extents.end();
    if let Some(wants) = region.pager.slots().wants() {
        wants.end_all();
    }
}

impl<'a> Retier<'a> {
    /// Reads at most this many bytes a second on average; zero, the default, is no bound.
    pub fn rate(mut self, bytes_a_second: ByteCount) -> Retier<'a> {
        self.rate = (bytes_a_second.0 > 0).then_some(bytes_a_second);
        self
    }

    /// Stops soon after `cancel` is set.
    pub fn cancelled_by(mut self, cancel: &'a AtomicBool) -> Retier<'a> {
        self.cancel = Some(cancel);
        self
    }

    /// Moves the pages, and tells `progress` after each chunk. Returns when all have moved, or it was cancelled.
    ///
    /// Whenever it ends, each page is whole, on one side or the other: what has moved stays there, and chunks
    /// that have not moved want the side again that they wanted before. A process may fork meanwhile; the
    /// places of pages that move then are free when the child ends.
    ///
    /// # Errors
    /// [`Error::StoreFull`] when the side has no room for more, [`Error::Io`] when a write to it fails, or when
    /// pages cannot be read within the region's deadline, [`Error::LimitExceeded`] when they find no room in
    /// memory for so long, [`Error::NotRunning`] once the heap that the region is of was shut down,
    /// [`Error::Unsupported`] while another thread retiers pages of this region.
    pub fn run(self, progress: impl FnMut(&Retiered)) -> Result<Retiered> {
        if !self.wants.begin(self.to) {
            let (feature, why) = ("two retiers of one region", "another one is under way");
            return Err(Error::Unsupported { feature, why });
        }
        let pager = &*self.region.pager;
        let chunks = (pager.budget().limit().0 / LIMIT_PART / CHUNK as u64).clamp(1, CHUNKS_MAX);
        let chunk_bytes = CHUNK as u64;
        let done = Retiered {
            bytes: ByteCount::ZERO,
            of_bytes: ByteCount((self.end - self.first) as u64 * chunk_bytes),
            read: ByteCount::ZERO,
            elapsed: Duration::ZERO,
        };
        let mut walk = Walk {
            pager,
            begun: Instant::now(),
            next: self.first,
            window: VecDeque::with_capacity(chunks as usize),
            done,
            retier: &self,
        };
        walk.run(chunks as usize, progress)?;
        walk.done.elapsed = walk.begun.elapsed();
        Ok(walk.done)
    }
}

/// A chunk that is under way.
struct Piece {
    chunk: ChunkId,
    /// Pages that were not seen where they are to be.
    pending: Vec<PageId>,
    /// What it wanted before.
    before: Side,
    /// When its pages were asked for, or taken out.
    acted: Instant,
    /// Times its pages were taken out.
    takes: u32,
}

/// What the pending pages of a chunk are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Look {
    stored: usize,
    /// Mapped, with a slot of the old side.
    mapped: usize,
    /// Being read or mapped.
    coming: usize,
    leaving: usize,
}

struct Walk<'a> {
    retier: &'a Retier<'a>,
    pager: &'a Pager,
    begun: Instant,
    /// The next chunk to begin with.
    next: usize,
    window: VecDeque<Piece>,
    done: Retiered,
}

impl Drop for Walk<'_> {
    /// Cancelled, or failed: the rest is wanted where it was.
    fn drop(&mut self) {
        let wants = self.retier.wants;
        self.window.drain(..).for_each(|piece| wants.set(piece.chunk, piece.before));
        wants.end();
    }
}

impl Walk<'_> {
    fn run(&mut self, chunks_max: usize, mut progress: impl FnMut(&Retiered)) -> Result<()> {
        let mut stall = Deadline::new(self.pager.health().deadline());
        while self.next < self.retier.end || !self.window.is_empty() {
            if self.retier.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                return Ok(());
            }
            if self.pager.health().is_stopping() || self.retier.wants.is_over() {
                return Err(Error::NotRunning);
            }
            let mut is_new = false;
            if self.window.len() < chunks_max && self.next < self.retier.end && self.is_due() {
                self.begin()?;
                is_new = true;
            }
            for at in (0..self.window.len()).rev() {
                let before = self.window[at].pending.len();
                is_new |= self.step(at)? || self.window[at].pending.len() < before;
                if self.window[at].pending.is_empty() {
                    self.window.remove(at);
                    self.done.bytes.0 += CHUNK as u64;
                    self.done.elapsed = self.begun.elapsed();
                    progress(&self.done);
                }
            }
            if is_new {
                stall.restart();
            } else if stall.is_over() && !self.window.is_empty() {
                return Err(self.stalled());
            } else {
                std::thread::sleep(if self.window.is_empty() { NAP_MAX } else { NAP });
            }
        }
        Ok(())
    }

    /// Whether the rate allows another chunk.
    fn is_due(&self) -> bool {
        let read = self.done.read.0 as f64;
        self.retier
            .rate
            .is_none_or(|rate| self.begun.elapsed().as_secs_f64() * rate.0 as f64 >= read)
    }

    /// Begins with the next chunk: what is mapped gives its slots up, what is stored is asked for.
    fn begin(&mut self) -> Result<()> {
        let chunk = ChunkId(self.next);
        self.next += 1;
        let pending: Vec<PageId> = self.pager.table().pages_of_chunk(chunk).collect();
        let before = self.retier.wants.of(chunk);
        let piece = Piece { chunk, pending, before, acted: Instant::now(), takes: 0 };
        self.window.push_back(piece);
        let at = self.window.len() - 1;
        let look = self.look(at, true)?;
        self.done.read.0 += (look.stored * self.pager.page_bytes()) as u64;
        self.ask(at)
    }

    /// Does what a chunk needs next; returns whether that was something.
    fn step(&mut self, at: usize) -> Result<bool> {
        let (takes, acted) = (self.window[at].takes, self.window[at].acted);
        let look = self.look(at, takes >= TAKES_MAX)?;
        let is_late = acted.elapsed() > PATIENCE;
        let is_in = look.stored + look.coming == 0 || is_late;
        if is_in && (takes == 0 || look.mapped > 0) {
            self.window[at].takes += 1;
            self.window[at].acted = Instant::now();
            self.take_out(at)?;
            return Ok(true);
        }
        if look.stored > 0 && is_late {
            self.ask(at)?;
        }
        Ok(false)
    }

    /// Looks at the pages of a chunk that are pending; those that are where they are to be are so no more, once
    /// the evictor knows. With `give_up` the mapped ones give old slots up.
    ///
    /// # Errors
    /// When the side has failed, or is full.
    fn look(&mut self, at: usize, give_up: bool) -> Result<Look> {
        let (pager, to) = (self.pager, self.retier.to);
        let maps = pager.slots().maps();
        let piece = &mut self.window[at];
        let is_known = piece.takes > 0;
        let mut look = Look::default();
        piece.pending.retain(|page| {
            let word = pager.word(*page).load();
            match protocol::misplaced(word, |slot| maps.side_of(slot) != to) {
                Misplaced::No => return !is_known,
                Misplaced::Stored => look.stored += 1,
                Misplaced::Mapped(slot) => {
                    let gives_up = give_up && self.retier.wants.failed(to) == 0;
                    if gives_up && protocol::give_up(pager.word(*page), word) {
                        pager.put_slot(Some(slot));
                        return !is_known;
                    }
                    look.mapped += 1;
                }
                Misplaced::Coming => look.coming += 1,
                Misplaced::Leaving => look.leaving += 1,
            }
            true
        });
        match self.retier.wants.failed(to) {
            0 if look.stored + look.mapped > 0 && maps.room(to).0 == 0 => {
                Err(pager.slots().full_side(to))
            }
            0 => Ok(look),
            errno => Err(pager.slots().failed("write", None, 0, errno as i32)),
        }
    }

    /// Asks for the pages of a chunk that are stored.
    fn ask(&mut self, at: usize) -> Result<()> {
        let pager = self.pager;
        let (page_bytes, maps) = (pager.page_bytes(), pager.slots().maps());
        let piece = &mut self.window[at];
        piece.acted = Instant::now();
        let mut ranges: Vec<(*const u8, ByteCount)> = Vec::new();
        for page in &piece.pending {
            let word = pager.word(*page).load();
            let is_old = || word.slot().is_some_and(|slot| maps.side_of(slot) != self.retier.to);
            if word.state() != State::Stored || !is_old() {
                continue;
            }
            let start = pager.addr(*page);
            match ranges.last_mut() {
                Some((first, len)) if first.addr() + len.as_usize() == start => {
                    len.0 += page_bytes as u64;
                }
                _ => ranges.push((start as *const u8, pager.page_size())),
            }
        }
        self.retier.region.fetch_many(&ranges)
    }

    /// Has the evictor know what a chunk wants, and take those of its pages out that have an old slot.
    fn take_out(&self, at: usize) -> Result<()> {
        let (pager, region) = (self.pager, self.retier.region);
        let first = PageId(self.window[at].chunk.0 as u64 * pager.pages_per_chunk());
        let count = PageCount(pager.pages_per_chunk());
        let ring = || pager.pool().waiters().call_evictor();
        match region.requests.evict(first, count, Some(self.retier.to), ring) {
            true => Ok(()),
            false => Err(Error::NotRunning),
        }
    }

    /// Why nothing happens any more.
    fn stalled(&self) -> Error {
        let pager = self.pager;
        if pager.pool().available() < pager.page_bytes() as u64 {
            let reason = "no page could be read that is to change its device".to_owned();
            return Error::LimitExceeded { reason };
        }
        let pending = self.window.iter().flat_map(|piece| &piece.pending);
        let mut words = pending.map(|page| pager.word(*page).load());
        let stored = words.find(|word| word.state() == State::Stored);
        let slot = stored.and_then(|word| word.slot());
        pager.slots().failed("read", slot, pager.page_bytes() as u64, sys::ETIMEDOUT)
    }
}
