//! The header of a table file: pages 0 and 1, two copies of the same.
//!
//! ```text
//! both:  magic 8 | page size 4 | flags 4 | identity 8 | generation 8 | end 8 | free pages (`free_chain`)
//! ```
//! A flush writes the pages, makes them durable, writes one copy with the next generation, makes that
//! durable, and then writes the other. The copy of the larger generation that is whole counts when the
//! table is opened. `end` and the free pages are noted before the flush writes its first page: a page
//! that the header says is in use was written, or is being allocated at that moment.
//!
//! # Invariants
//! 1. A copy is overwritten only while the other is whole, durable and not older.
//! 2. What a header names is durable before the header is written.
//! 3. Space of the device is given back only behind the end that a durable header names.
#![expect(unsafe_code, reason = "gives back the space of free pages")]

use super::allocate;
use super::file::TableFile;
use super::frames::PoolFrames;
use super::free_chain::{self, PageBuffer, transfer};
use super::page_table::FIRST;
use crate::base::error::Result;
use crate::base::local::keep_local;
use crate::base::sync::{AtomicU64, Ordering, Rank, Ranked};
use crate::base::units::PageId;
use crate::limit::admission::{Taken, Turn};
use crate::store::Op;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

const MAGIC: u64 = u64::from_le_bytes(*b"farpool5");
/// Beginning of the magic of every version.
const MAGIC_START: [u8; 7] = *b"farpool";
const FLAG_CHECKSUM: u32 = 1;
/// Pages have no trailer.
const FLAG_WHOLE: u32 = 2;
const FLAGS: u32 = FLAG_CHECKSUM | FLAG_WHOLE;

const COPIES: [PageId; 2] = [PageId(0), PageId(1)];
const _: () = assert!(COPIES[1].0 < FIRST.0);

// Words of a copy.
const AT_MAGIC: usize = 0;
const AT_PAGE_SIZE_AND_FLAGS: usize = 1;
const AT_IDENTITY: usize = 2;
const AT_GENERATION: usize = 3;
const AT_END: usize = 4;
/// Where the first of the free pages are.
const AT_CHAIN: usize = 5;

/// The header of one table file.
pub(super) struct Header {
    file: Arc<TableFile>,
    /// Whose turn it is to write the header.
    turn: Turn,
    /// Changed by the thread whose turn it is.
    written: Ranked<DeviceHeader>,
    snapshots: AtomicU64,
}

/// Header on the device.
#[derive(Clone, Debug, Default)]
struct DeviceHeader {
    generation: u64,
    /// The number of the snapshot that it is of.
    snapshot: u64,
    /// Which copies are whole and of this generation.
    is_good: [bool; 2],
    /// Pages with the rest of the list of free ones.
    chain: Vec<PageId>,
}

impl DeviceHeader {
    /// The copy that can be overwritten: invariant 1.
    fn first(&self) -> usize {
        usize::from(self.is_good[0] && !self.is_good[1])
    }
}

/// Content for the header.
pub(super) struct Snapshot {
    /// Grows with time.
    number: u64,
    end: u64,
    free: Vec<u64>,
}

impl Header {
    pub(super) fn new(file: Arc<TableFile>) -> Header {
        let written = Ranked::new(Rank::Leaf, DeviceHeader::default());
        Header { file, turn: Turn::default(), written, snapshots: AtomicU64::new(0) }
    }

    /// The header of a new table; both copies are durable then, or a header of an older table in
    /// their place might count after a power cut.
    pub(super) fn create(&self, frames: &PoolFrames) -> Result<()> {
        if frames.table.capacity() <= FIRST.as_usize() {
            return Err(self.file.refused(format!("has no room for a table of {FIRST}")));
        }
        self.file.set_identity(RandomState::new().build_hasher().finish());
        self.write(frames, &self.snapshot(frames))?;
        self.file.sync()
    }

    /// Content for the header at this moment.
    pub(super) fn snapshot(&self, frames: &PoolFrames) -> Snapshot {
        let _ours = keep_local();
        let free = frames.free.lock();
        // The lock orders the numbers as the table changes.
        let number = self.snapshots.fetch_add(1, Ordering::Relaxed) + 1;
        // The free tail is no part of the table any more, as far as the device is concerned.
        let end = allocate::free_tail(frames, &free, FIRST.0);
        Snapshot { number, end, free: free.before(end) }
    }

    /// Makes all writes so far durable, and then the header, unless a later one is.
    pub(super) fn write(&self, frames: &PoolFrames, snapshot: &Snapshot) -> Result<()> {
        let _ours = keep_local();
        let _turn = self.take_turn(frames)?;
        let mut written = self.written.lock().clone();
        if snapshot.number < written.snapshot {
            // A flush that began later is done: its header names what this one would, and more.
            return self.file.sync();
        }
        let checksum = if self.file.has_checksums() { FLAG_CHECKSUM } else { 0 };
        let flags = checksum | if frames.table.has_trailer() { 0 } else { FLAG_WHOLE };
        let mut head = PageBuffer::new(frames.table.page_bytes())?;
        let words = head.words_mut();
        words[AT_MAGIC] = MAGIC;
        words[AT_PAGE_SIZE_AND_FLAGS] = frames.table.page_bytes() as u64 | u64::from(flags) << 32;
        words[AT_IDENTITY] = self.file.identity();
        words[AT_GENERATION] = written.generation + 1;
        words[AT_END] = snapshot.end;
        let (free, last) = (&snapshot.free, &written.chain);
        let chain = free_chain::write(&self.file, frames, &mut head, AT_CHAIN, free, last)?;
        self.file.sync()?;
        let first = written.first();
        written.is_good[first] = false;
        self.written.lock().is_good = written.is_good;
        transfer(&self.file, frames, Op::Write, COPIES[first], &mut head)?;
        self.file.sync()?;
        written.is_good = [first == 0, first == 1];
        written.generation += 1;
        (written.snapshot, written.chain) = (snapshot.number, chain);
        *self.written.lock() = written;
        // Durable with the next sync, which comes before the first copy is overwritten.
        transfer(&self.file, frames, Op::Write, COPIES[1 - first], &mut head)?;
        self.written.lock().is_good = [true; 2];
        self.cut_tail(frames, snapshot.end);
        Ok(())
    }

    /// Ends the table where its free pages at the end begin, if the header that was written names none of
    /// these, and gives their space on the device back. It is this thread's turn to write the header.
    fn cut_tail(&self, frames: &PoolFrames, end: u64) {
        allocate::cut_tail(frames, end, |first, pages| {
            // SAFETY: `cut_tail` has locked the pages, which are free and behind the end that the header
            // says, which is durable. The list of free pages lies before it.
            unsafe { self.file.give_back(&frames.table, first, pages) };
        });
    }

    /// The turn to write the header, one thread at a time.
    fn take_turn(&self, frames: &PoolFrames) -> Result<Taken<'_>> {
        let mut backoff = frames.backoff();
        backoff
            .until(|| self.turn.take())
            .ok_or_else(|| frames.table.timed_out(COPIES[0], "another flush".to_owned(), &backoff))
    }

    /// Reads header and free list.
    pub(super) fn read(&self, frames: &PoolFrames) -> Result<()> {
        let _ours = keep_local();
        let (table, refused) = (&frames.table, |reason: &str| self.file.refused(reason));
        if table.capacity() <= COPIES[1].as_usize() {
            return Err(refused("is no table file: shorter than a header"));
        }
        let copies = COPIES.map(|page| self.read_copy(frames, page));
        let generation = |copy: &PageBuffer| copy.words()[AT_GENERATION];
        let newest = copies.iter().flatten().map(generation).max();
        let is_newest = |copy: &PageBuffer| Some(generation(copy)) == newest;
        let is_good = copies.each_ref().map(|copy| copy.as_ref().is_ok_and(is_newest));
        let [first, second] = copies;
        let head = if is_good[0] { first } else { second.or(first) }?;
        let words = head.words();
        let flags = (words[AT_PAGE_SIZE_AND_FLAGS] >> 32) as u32;
        if flags & !FLAGS != 0 {
            return Err(refused("has pages of a kind that this version does not know"));
        }
        if (flags & FLAG_WHOLE == 0) != table.has_trailer() {
            return Err(refused("was created with another setting of `whole_pages`"));
        }
        if (flags & FLAG_CHECKSUM != 0) != self.file.has_checksums() {
            return Err(refused("was created with another setting of `checksum`"));
        }
        let (end, room) = (words[AT_END], table.capacity() as u64);
        if end < FIRST.0 || end > room {
            return Err(self.file.refused(format!("is short: {end} pages, but room for {room}")));
        }
        self.file.set_identity(words[AT_IDENTITY]);
        table.set_end(end);
        let generation = words[AT_GENERATION];
        let chain = free_chain::read(&self.file, frames, head, AT_CHAIN)?;
        *self.written.lock() = DeviceHeader { generation, snapshot: 0, is_good, chain };
        Ok(())
    }

    /// Reads a copy of the header that is whole.
    fn read_copy(&self, frames: &PoolFrames, page: PageId) -> Result<PageBuffer> {
        let mut copy = PageBuffer::new(frames.table.page_bytes())?;
        transfer(&self.file, frames, Op::Read, page, &mut copy)?;
        let words = copy.words();
        if words[AT_MAGIC] != MAGIC {
            let is_table = words[AT_MAGIC].to_le_bytes().starts_with(&MAGIC_START);
            let reason = if is_table {
                "is a table of another version of the format"
            } else {
                "is no table file: it does not begin as one"
            };
            return Err(self.file.refused(reason));
        }
        let (here, there) =
            (frames.table.page_bytes(), words[AT_PAGE_SIZE_AND_FLAGS] as u32 as usize);
        if there != here {
            // The sum is over a page of that size. An odd one is damage.
            let is_size = there.is_power_of_two() && there.is_multiple_of(4096);
            let reason = format!("has pages of {there} bytes, not {here}");
            let damaged = || "has a damaged header".to_owned();
            return Err(self.file.refused(if is_size { reason } else { damaged() }));
        }
        if !free_chain::is_whole(&copy, AT_CHAIN) {
            return Err(self.file.refused("has a damaged header"));
        }
        Ok(copy)
    }
}
