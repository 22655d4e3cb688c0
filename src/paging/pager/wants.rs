//! Which side of a joined store the pages of each chunk are wanted on.
//!
//! A page that is written takes a slot of that side, and one whose slot is of the other side is *misplaced*: it is
//! not dropped as clean, for what it needs is a slot elsewhere. Where there is no room on the wanted side, the
//! other one has to do, and nothing is misplaced. Only the evictor chooses slots, so that what a request to it
//! has set counts from its answer on; who frees a chunk's addresses may set it back at any time.

use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU32, Ordering};
use crate::meta::LazyArray;
use crate::paging::page::chunks::ChunkId;
use crate::store::Side;

/// See [module](self).
#[derive(Debug)]
pub(in crate::paging) struct Wants {
    /// Per chunk: 1 for the second side.
    chunks: LazyArray<AtomicU32>,
    /// The `errno` of the last write to each side, 0 where it went well.
    failed: [AtomicU32; 2],
    /// A thread changes what chunks want.
    is_busy: AtomicBool,
    /// Nobody is to change it any more.
    is_over: AtomicBool,
}

impl Wants {
    /// For a region of this number of chunks.
    ///
    /// # Errors
    /// When the kernel refuses the mapping.
    pub(super) fn new(chunks: usize) -> Result<Wants> {
        Ok(Wants {
            chunks: LazyArray::new(chunks)?,
            failed: Default::default(),
            is_busy: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        })
    }

    /// The side that a chunk's pages are wanted on.
    pub(in crate::paging) fn of(&self, chunk: ChunkId) -> Side {
        // Relaxed: see the module's documentation.
        match self.chunks[chunk.0].load(Ordering::Relaxed) {
            0 => Side::First,
            _ => Side::Second,
        }
    }

    pub(in crate::paging) fn set(&self, chunk: ChunkId, side: Side) {
        // What was never wanted elsewhere takes no memory for that.
        if self.of(chunk) != side {
            self.chunks[chunk.0].store(u32::from(side == Side::Second), Ordering::Relaxed);
        }
    }

    /// Begins to move pages to a side, whose failures are forgotten; `false`: another thread is at it.
    pub(in crate::paging) fn begin(&self, to: Side) -> bool {
        let begun = !self.is_busy.swap(true, Ordering::AcqRel);
        if begun {
            self.note_write(to, 0);
        }
        begun
    }

    /// Ends what [`begin`](Self::begin) began.
    pub(in crate::paging) fn end(&self) {
        self.is_busy.store(false, Ordering::Release);
    }

    /// Has nobody move pages any more: what the region is for has ended.
    #[cfg(feature = "heap")]
    pub(in crate::paging) fn end_all(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    /// Whether nobody is to move pages any more.
    pub(in crate::paging) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Notes how a write to a side went: 0, or an `errno`.
    pub(in crate::paging) fn note_write(&self, side: Side, errno: u32) {
        // Release: who sees the page of a failed write back in memory sees why.
        self.failed[side as usize].store(errno, Ordering::Release);
    }

    /// The `errno` of the last write to a side; 0 where it went well, or nobody has tried again.
    pub(in crate::paging) fn failed(&self, side: Side) -> u32 {
        self.failed[side as usize].load(Ordering::Acquire)
    }
}
