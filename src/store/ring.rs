//! A log of compressed blocks in memory: what the compressed tier keeps.
//!
//! Blocks are appended in the order in which they leave the region, so that the oldest are together:
//! a whole *segment* of them is moved on to the next store at a time, by the queue that asks for it
//! ([`Ring::begin_move`]). Finding room is an addition, and nothing is ever fragmented; what is
//! overwritten or forgotten meanwhile is dropped when its segment comes round.
//!
//! ```text
//!   segments:  [full: oldest][full][full][being filled][clean][clean]
//!                    |                        ^ keep
//!                    '-- take, settle: to the next store, then clean
//!
//!   a block's word:
//!             keep               forget, or another keep or leave
//!     away ----------> kept(place) ---------------------------------> away
//!                       |     ^
//!                  take |     | settle: the write failed
//!                       v     |
//!                     moving(place) -- settle: written --> away
//!                       | forget
//!                       v
//!                     moving(nowhere) -- settle --> away
//! ```
//! A reader announces itself at the segment (`announced`), looks at the word again, and decompresses what is
//! there. A segment is clean once no word leads to it and nobody has announced himself there.
//!
//! # Invariants
//! 1. The bytes of a record do not change while a word leads to it, nor while a reader that has seen
//!    such a word is announced at its segment.
//! 2. A block that is moving is not written: its writer waits until it is settled.

#![expect(unsafe_code, reason = "copies to and from memory that others read")]

use super::announced::Announced;
use crate::base::error::Result;
use crate::base::sync::{
    AtomicU64,
    Ordering::{AcqRel, Acquire, Relaxed},
    Rank, Ranked,
};
use crate::base::units::ByteCount;
use crate::meta::LazyArray;
use crate::sys::vm::{Huge, KERNEL_PAGE, Mapping};

/// Places are multiples of this.
const GRAIN: usize = 16;
/// Bytes of a segment, unless that is less than SEGMENT_BLOCKS blocks: moving one on takes a millisecond or
/// so.
const SEGMENT: usize = 256 << 10;
const SEGMENT_BLOCKS: usize = 16;
/// Minimum number of segments: one is being filled, one moved on, and some are between.
const SEGMENTS_MIN: usize = 8;
/// Of all segments, 1/CLEAN_SHARE are clean or about to be.
const CLEAN_SHARE: usize = 8;

/// A block's word: place + 1 in grains, 0 for none, and the mark of a block that is moving.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Word(u64);

impl Word {
    const AWAY: Word = Word(0);
    const MOVING: u64 = 1 << 63;
    /// Moving, and forgotten meanwhile.
    const MOVING_NOWHERE: Word = Word(Word::MOVING);

    fn kept(place: usize) -> Word {
        Word((place / GRAIN + 1) as u64)
    }

    fn place(self) -> Option<usize> {
        let grain = self.0 & !Word::MOVING;
        (grain != 0).then(|| (grain as usize - 1) * GRAIN)
    }

    fn is_moving(self) -> bool {
        self.0 & Word::MOVING != 0
    }

    fn moving(self) -> Word {
        Word(self.0 | Word::MOVING)
    }
}

/// Header of a block.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct Header {
    block: u64,
    len: u32,
}

const HEADER: usize = size_of::<Header>();
const _: () = assert!(HEADER == GRAIN);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Clean,
    Filling,
    Full,
    /// Nothing leads there any more; readers may be there.
    Drained,
}

#[derive(Debug)]
struct State {
    phases: Box<[Phase]>,
    /// Bytes of each segment that hold records.
    filled: Box<[usize]>,
    /// The segment that is being filled, or was last.
    head: usize,
    /// The oldest one that is not clean.
    tail: usize,
    clean: usize,
    /// A queue moves the oldest segment on.
    is_moving: bool,
}

/// Outcome of keeping a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    Yes,
    /// All segments are in use.
    NoRoom,
    /// The block is moving: try again later.
    Moving,
}

/// A record that was taken to be moved on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Taken {
    pub(super) block: u64,
    place: usize,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Mapping,
    block: usize,
    segment: usize,
    words: LazyArray<AtomicU64>,
    /// Readers, by segment.
    readers: Box<[Announced]>,
    state: Ranked<State>,
    /// Blocks that are kept.
    kept: AtomicU64,
}

impl Ring {
    /// Bytes that a ring of such blocks needs at least.
    pub(super) fn memory_min(block: usize) -> ByteCount {
        ByteCount((Ring::segment_of(block) * SEGMENTS_MIN) as u64)
    }

    fn segment_of(block: usize) -> usize {
        SEGMENT.max(block * SEGMENT_BLOCKS)
    }

    /// Takes `memory` bytes, at least [`memory_min`](Self::memory_min), for blocks numbered below `blocks`.
    pub(super) fn new(memory: ByteCount, block: usize, blocks: usize) -> Result<Ring> {
        let segment = Ring::segment_of(block);
        let count = memory.as_usize() / segment;
        assert!(count >= SEGMENTS_MIN, "{memory} for blocks of {block}");
        let mut phases = vec![Phase::Clean; count].into_boxed_slice();
        phases[0] = Phase::Filling;
        let filled = vec![0; count].into();
        let state = State { phases, filled, head: 0, tail: 0, clean: count - 1, is_moving: false };
        Ok(Ring {
            memory: Mapping::reserve(count * segment, KERNEL_PAGE, Huge::Default)?,
            block,
            segment,
            words: LazyArray::new(blocks)?,
            readers: (0..count).map(|_| Announced::new()).collect(),
            state: Ranked::new(Rank::Leaf, state),
            kept: AtomicU64::new(0),
        })
    }

    /// Blocks, and bytes of one.
    pub(super) fn blocks(&self) -> usize {
        self.words.len()
    }

    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// Bytes of memory.
    pub(super) fn memory(&self) -> ByteCount {
        ByteCount(self.memory.len() as u64)
    }

    /// Blocks that are kept, as they were before they were compressed.
    pub(super) fn kept(&self) -> ByteCount {
        ByteCount(self.kept.load(Relaxed) * self.block as u64)
    }

    fn word(&self, block: u64) -> Word {
        Word(self.words[block as usize].load(Acquire))
    }

    /// Changes a block's word; `false`: it is another one.
    fn change(&self, block: u64, from: Word, to: Word) -> bool {
        // Release: a reader that is led to a record sees its bytes.
        let changed = self.words[block as usize].compare_exchange(from.0, to.0, AcqRel, Relaxed);
        if changed.is_ok() {
            match (from.place().is_some(), to.place().is_some()) {
                (false, true) => drop(self.kept.fetch_add(1, Relaxed)),
                (true, false) => drop(self.kept.fetch_sub(1, Relaxed)),
                _ => {}
            }
        }
        changed.is_ok()
    }

    /// Whether a block's content is here.
    pub(super) fn is_here(&self, block: u64) -> bool {
        self.word(block).place().is_some()
    }

    /// Decompresses a block, whole. `None`: it is not here. `Some(false)`: what is here is not what was
    /// kept. Takes no lock and allocates nothing.
    pub(super) fn read(&self, block: u64, into: &mut [u8]) -> Option<bool> {
        loop {
            let place = self.word(block).place()?;
            let is_there = || self.word(block).place() == Some(place);
            // SAFETY: a word led there after the announcement, which stands (invariant 1).
            let read = || unsafe { self.decompress(place, block, into) };
            let outcome = self.readers[place / self.segment].read(is_there, read);
            if outcome.is_some() {
                return outcome;
            }
        }
    }

    /// Decompresses a record; returns whether it is that of the block, and whole.
    ///
    /// # Safety
    /// There is a record at `place` that does not change during the call.
    unsafe fn decompress(&self, place: usize, block: u64, into: &mut [u8]) -> bool {
        // SAFETY: there is a record, as the caller promises.
        let (header, bytes) = unsafe { self.record(place) };
        let len = lz4_flex::block::decompress_into(bytes, into);
        let is_right = header.block == block && len.is_ok_and(|len| len == self.block);
        debug_assert!(is_right, "the record of block {block} at {place}");
        is_right
    }

    /// The record at a place.
    ///
    /// # Safety
    /// There is one, and it does not change while what is returned is used.
    unsafe fn record(&self, place: usize) -> (Header, &[u8]) {
        assert!(place + HEADER <= self.memory.len(), "a record at {place}");
        // SAFETY: within the mapping.
        let start = unsafe { self.memory.as_ptr().add(place) };
        // SAFETY: a header was written there; places are aligned.
        let header = unsafe { start.cast::<Header>().read() };
        let len = header.len as usize;
        assert!(place + HEADER + len <= self.memory.len(), "{len} bytes at {place}");
        // SAFETY: within the mapping.
        let bytes = unsafe { start.add(HEADER) };
        // SAFETY: within the mapping; nobody changes it, as the caller promises.
        (header, unsafe { std::slice::from_raw_parts(bytes, len) })
    }

    /// Keeps a block, compressed to `bytes`, in place of what there was of it.
    pub(super) fn keep(&self, block: u64, bytes: &[u8]) -> Kept {
        let len = (HEADER + bytes.len()).next_multiple_of(GRAIN);
        let mut state = self.state.lock();
        let before = self.word(block);
        if before.is_moving() {
            return Kept::Moving;
        }
        let Some(at) = self.room(&mut state, len) else { return Kept::NoRoom };
        let place = state.head * self.segment + at;
        // SAFETY: within the mapping: `room` says so.
        let start = unsafe { self.memory.as_ptr().add(place) };
        let header = Header { block, len: bytes.len() as u32 };
        // SAFETY: the segment is being filled, and nothing leads to this part of it yet; the lock keeps
        // others from filling it.
        unsafe { start.cast::<Header>().write(header) };
        // SAFETY: as above.
        let after = unsafe { start.add(HEADER) };
        // SAFETY: as above; `bytes` are the caller's.
        unsafe { after.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        if !self.change(block, before, Word::kept(place)) {
            return Kept::Moving; // Since it was looked at. The room is used by the next one.
        }
        let head = state.head;
        state.filled[head] = at + len;
        Kept::Yes
    }

    /// Finds `len` bytes in the head segment, or makes another one the head; returns where in it.
    fn room(&self, state: &mut State, len: usize) -> Option<usize> {
        let head = state.head;
        if state.phases[head] == Phase::Filling {
            if state.filled[head] + len <= self.segment {
                return Some(state.filled[head]);
            }
            state.phases[head] = Phase::Full;
        }
        self.clean_drained(state);
        let next = (head + 1) % state.phases.len();
        if state.phases[next] != Phase::Clean {
            return None;
        }
        state.phases[next] = Phase::Filling;
        state.filled[next] = 0;
        state.clean -= 1;
        state.head = next;
        Some(0)
    }

    /// Notes which of the oldest segments have lost their last reader.
    fn clean_drained(&self, state: &mut State) {
        while state.phases[state.tail] == Phase::Drained && self.readers[state.tail].is_alone() {
            let tail = state.tail;
            state.phases[tail] = Phase::Clean;
            state.clean += 1;
            state.tail = (tail + 1) % state.phases.len();
        }
    }

    /// Ends what there is of a block here, for a writer of it. `false`: the block is moving, try again
    /// later.
    pub(super) fn leave(&self, block: u64) -> bool {
        let before = self.word(block);
        !before.is_moving() && (before == Word::AWAY || self.change(block, before, Word::AWAY))
    }

    /// Ends what there is of a block here, whose content nobody needs.
    pub(super) fn forget(&self, block: u64) {
        loop {
            let before = self.word(block);
            let after = if before.is_moving() { Word::MOVING_NOWHERE } else { Word::AWAY };
            if before == after || self.change(block, before, after) {
                return;
            }
        }
    }

    // Moving on.

    /// Takes the oldest segment to move it on, if it is time for that and nobody does it.
    pub(super) fn begin_move(&self) -> Option<usize> {
        let mut state = self.state.lock();
        self.clean_drained(&mut state);
        let enough = (state.phases.len() / CLEAN_SHARE).max(1);
        let tail = state.tail;
        if state.is_moving || state.clean >= enough || state.phases[tail] != Phase::Full {
            return None;
        }
        state.is_moving = true;
        Some(tail)
    }

    /// Takes the next block of a segment that is being moved on, from `cursor`, decompressed; `None`: there
    /// are no more. To be settled.
    pub(super) fn take(
        &self,
        segment: usize,
        cursor: &mut usize,
        into: &mut [u8],
    ) -> Option<Taken> {
        let filled = self.state.lock().filled[segment];
        while *cursor < filled {
            let place = segment * self.segment + *cursor;
            // SAFETY: records fill the segment up to there, and stay: only the mover, which calls this,
            // ends it.
            let (header, bytes) = unsafe { self.record(place) };
            *cursor += (HEADER + bytes.len()).next_multiple_of(GRAIN);
            let kept = Word::kept(place);
            if !self.change(header.block, kept, kept.moving()) {
                continue; // Overwritten or forgotten.
            }
            // SAFETY: as above.
            if unsafe { self.decompress(place, header.block, into) } {
                return Some(Taken { block: header.block, place });
            }
            // Its reader will be told.
            self.settle(Taken { block: header.block, place }, false);
        }
        None
    }

    /// Ends the move of a block: it has been written to the next store, or that has failed.
    pub(super) fn settle(&self, taken: Taken, is_written: bool) {
        let kept = Word::kept(taken.place);
        let to = if is_written { Word::AWAY } else { kept };
        if !self.change(taken.block, kept.moving(), to) {
            let forgotten = self.change(taken.block, Word::MOVING_NOWHERE, Word::AWAY);
            debug_assert!(forgotten, "block {} was settled twice", taken.block);
        }
    }

    /// Ends the move of a segment. Without `all` some of its blocks are still here, and it stays.
    pub(super) fn end_move(&self, segment: usize, all: bool) {
        let mut state = self.state.lock();
        state.is_moving = false;
        if all {
            state.phases[segment] = Phase::Drained;
            self.clean_drained(&mut state);
        }
    }
}
