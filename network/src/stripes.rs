//! Servers that hold pages with parity: what queues, the mover and signal handlers share.

#![expect(unsafe_code, reason = "lends pages for bytes of servers, by turns")]

use crate::blocks::BLOCK;
use crate::link::FlightEnd;
use crate::parity::{COLUMNS_MAX, add_times, recipe, sum_of};
use crate::server::{NbdServer, ServerEvent};
use crate::shared::ServerSet;
use crate::spans::{Layout, RowPlace, SPAN_ROWS, ServerMask, Spans};
use crate::sync::{AtomicBool, Ordering};
use crate::sys::IoSlice;
use crate::wire::NbdCommand;
use std::cell::UnsafeCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Thread;
use std::time::Duration;

/// Pages for threads that compute a block themselves.
const SCRATCHES: usize = 4;
/// Spans of one trim. One that is lost takes them all.
const TRIM_SPANS: u64 = 8;
/// Pause while all of them are in use.
const SCRATCH_PAUSE: Duration = Duration::from_micros(100);

/// A page that threads use by turns.
#[derive(Debug)]
struct Scratch {
    is_busy: AtomicBool,
    page: UnsafeCell<Box<[u8]>>,
}

// SAFETY: the cell is used by the thread that has made the scratch busy, see `Stripes::with_scratch`.
unsafe impl Sync for Scratch {}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Stripes {
    pub(super) spans: Spans,
    /// A set for each server.
    sets: Box<[Arc<ServerSet>]>,
    scratches: [Scratch; SCRATCHES],
    mover: Mutex<Option<Thread>>,
    is_closed: AtomicBool,
}

impl Stripes {
    pub(crate) fn new(layout: Layout, sets: Box<[Arc<ServerSet>]>) -> Stripes {
        assert!(sets.len() == layout.columns(), "{} servers for {layout:?}", sets.len());
        let scratch = |_| Scratch {
            is_busy: AtomicBool::new(false),
            page: UnsafeCell::new(vec![0; BLOCK as usize].into()),
        };
        Stripes {
            spans: Spans::new(layout),
            sets,
            scratches: std::array::from_fn(scratch),
            mover: Mutex::default(),
            is_closed: AtomicBool::new(false),
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        self.spans.layout()
    }

    pub(crate) fn sets(&self) -> &[Arc<ServerSet>] {
        &self.sets
    }

    pub(crate) fn server(&self, at: usize) -> &NbdServer {
        &self.sets[at].servers()[0]
    }

    pub(crate) fn stall(&self) -> Duration {
        self.sets[0].stall()
    }

    pub(crate) fn check_range(&self, offset: u64, len: u64) {
        let capacity = self.layout().blocks() * BLOCK;
        let is_aligned = len > 0 && (offset | len).is_multiple_of(BLOCK);
        let is_inside = offset.checked_add(len).is_some_and(|end| end <= capacity);
        let is_short = len <= u64::from(u32::MAX);
        assert!(is_aligned && is_inside && is_short, "bytes {offset}+{len} of {capacity}");
    }

    /// A span is about to be written: nobody needs what was there.
    pub(crate) fn begin(&self, span: u64) {
        let offset = self.layout().offset(span, 0);
        self.sets.iter().for_each(|set| set.servers()[0].lacking.remove(offset, SPAN_ROWS * BLOCK));
    }

    /// Nothing is where no spans are.
    pub(crate) fn forget_margins(&self) {
        let (start, end) =
            (self.layout().offset(0, 0), self.layout().offset(self.layout().spans, 0));
        for set in &self.sets {
            let server = &set.servers()[0];
            server.lacking.remove(0, start);
            server.lacking.remove(end, server.export().size() / BLOCK * BLOCK - end);
        }
    }

    /// True if the column's server lacks one of the rows.
    pub(crate) fn lacks(&self, span: u64, column: usize, row: u64, rows: u64) -> bool {
        let server = self.server(self.layout().server(span, column));
        server.lacking.has_any(self.layout().offset(span, row), rows * BLOCK)
    }

    /// Columns of a row that have a block.
    pub(crate) fn present(&self, span: u64, row: u64) -> ServerMask {
        let Layout { data, parity, .. } = *self.layout();
        let is_there =
            |column: &usize| self.spans.owner(RowPlace { span, row, column: *column }).is_some();
        let blocks = (0..data).filter(is_there).fold(0, |all, column| all | 1 << column);
        blocks | ((1 << parity) - 1) << data
    }

    /// How often each column is in the block at a place, without columns that are `bad`: those with a number above zero
    /// are to be read.
    pub(crate) fn recipe(
        &self,
        place: RowPlace,
        rows: u64,
        bad: ServerMask,
    ) -> Option<[u8; COLUMNS_MAX]> {
        let Layout { data, parity, .. } = *self.layout();
        let RowPlace { span, row, column } = place;
        let present = self.present(span, row);
        let has = |column: &usize| {
            let is_there = present >> column & 1 == 1;
            !is_there || bad >> column & 1 == 0 && !self.lacks(span, *column, row, rows)
        };
        let has = (0..data + parity).filter(has).fold(0, |all, column| all | 1 << column);
        let mut factors = recipe(data, parity, column, has)?;
        let absent = (0..data).filter(|column| present >> column & 1 == 0);
        absent.for_each(|column| factors[column] = 0);
        Some(factors)
    }

    /// True if a block of a column of data is what was written there. (Parity has no sum.)
    pub(crate) fn is_right(&self, place: RowPlace, block: &[u8]) -> bool {
        place.column >= self.layout().data || self.spans.sum(place) == sum_of(block)
    }

    /// Nobody needs the bytes of a range any more.
    pub(crate) fn forget(&self, offset: u64, len: u64) {
        (offset / BLOCK..(offset + len) / BLOCK).for_each(|block| self.spans.forget(block));
    }

    /// Gives the space of free spans back, of some that follow each other; returns whether there may be more now. A server
    /// that is away keeps its part until they are written again.
    pub(crate) fn trim_some(&self) -> Result<bool, i32> {
        let Some(run) = self.spans.take_stale(TRIM_SPANS) else { return Ok(false) };
        // At the same place on all servers.
        let offset = self.layout().offset(run.start, 0);
        let len = (run.end - run.start) * SPAN_ROWS * BLOCK;
        let (mut result, mut is_done) = (Ok(()), true);
        for set in &self.sets {
            let server = &set.servers()[0];
            if !server.export().can_trim() {
                continue;
            }
            match set.exchange(0, NbdCommand::Trim, offset, IoSlice::NONE, len as u32) {
                FlightEnd::Lost => {
                    server.barred.insert(offset, len);
                    run.clone().for_each(|span| self.spans.bar(span));
                }
                FlightEnd::Refused(errno) => result = result.and(Err(errno)),
                // A connection is being made, or others use all of them.
                FlightEnd::Unsent if server.is_up() => is_done = false,
                FlightEnd::Done | FlightEnd::Unsent => {}
            }
        }
        match is_done {
            true => run.for_each(|span| self.spans.give_clean(span)),
            false => run.for_each(|span| self.spans.release(span, 1)),
        }
        result.map(|()| is_done)
    }

    // A thread that reads for itself. Neither locks nor allocates.

    /// Reads blocks and waits.
    ///
    /// # Safety
    /// The memory can be written, and nobody else uses it.
    pub(crate) unsafe fn read_now(&self, offset: u64, into: IoSlice) -> Result<(), i32> {
        self.check_range(offset, into.len() as u64);
        for (at, block) in (offset / BLOCK..(offset + into.len() as u64) / BLOCK).enumerate() {
            let into = into.part(at * BLOCK as usize, BLOCK as usize);
            let Some(place) = self.spans.pin(block) else {
                // SAFETY: the caller's promise.
                unsafe { into.clear() };
                continue;
            };
            // SAFETY: the caller's promise.
            let result = unsafe { self.read_place(place, into) };
            self.spans.release(place.span, 1);
            result?;
        }
        Ok(())
    }

    /// # Safety
    /// As for `read_now`.
    unsafe fn read_place(&self, place: RowPlace, into: IoSlice) -> Result<(), i32> {
        let offset = self.layout().offset(place.span, place.row);
        let server = self.layout().server(place.span, place.column);
        let read = |column: usize, into: IoSlice| {
            let at = self.layout().server(place.span, column);
            self.sets[at].read_now(0, offset, into) == FlightEnd::Done
        };
        let is_read = read(place.column, into);
        // SAFETY: the caller's promise: a block of bytes that nobody else uses, and the read is over.
        let bytes = unsafe { into.bytes_mut() };
        if is_read && self.is_right(place, bytes) {
            return Ok(());
        }
        self.server(server).count(ServerEvent::Rebuild);
        self.with_scratch(|scratch| {
            let mut bad = 1 << place.column;
            'others: while let Some(factors) = self.recipe(place, 1, bad) {
                bytes.fill(0);
                for (column, factor) in factors.into_iter().enumerate().filter(|of| of.1 > 0) {
                    let is_read = read(column, IoSlice::new(scratch.as_mut_ptr(), scratch.len()));
                    if !is_read || !self.is_right(RowPlace { column, ..place }, scratch) {
                        bad |= 1 << column;
                        continue 'others;
                    }
                    add_times(bytes, factor, scratch);
                }
                if self.is_right(place, bytes) {
                    return Ok(());
                }
                bad |= wrong_parity(&factors, self.layout());
            }
            Err(libc::EIO)
        })
    }

    fn with_scratch<T>(&self, use_it: impl FnOnce(&mut [u8]) -> T) -> T {
        loop {
            for scratch in &self.scratches {
                // Acquire pairs with the Release below: the last user is done.
                if scratch.is_busy.swap(true, Ordering::Acquire) {
                    continue;
                }
                // SAFETY: this thread alone found it not busy, and it stays busy until the reference is gone.
                let result = use_it(unsafe { &mut *scratch.page.get() });
                scratch.is_busy.store(false, Ordering::Release);
                return result;
            }
            // A lock could not be taken in a signal handler, where its owner may be interrupted.
            std::thread::sleep(SCRATCH_PAUSE);
        }
    }

    // The mover's thread.

    pub(crate) fn set_mover(&self, thread: Thread) {
        *self.mover.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    /// Tells the mover that there may be work. Never waits.
    pub(crate) fn wake_mover(&self) {
        if let Ok(mover) = self.mover.try_lock()
            && let Some(mover) = &*mover
        {
            mover.unpark();
        }
    }

    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        if let Some(mover) = &*self.mover.lock().unwrap_or_else(PoisonError::into_inner) {
            mover.unpark();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }
}

/// The parity column to do without, where all blocks of a sum were right and the sum was not.
pub(crate) fn wrong_parity(factors: &[u8; COLUMNS_MAX], layout: &Layout) -> ServerMask {
    let used = (layout.data..layout.columns()).find(|column| factors[*column] > 0);
    used.map_or(ServerMask::MAX, |column| 1 << column)
}
