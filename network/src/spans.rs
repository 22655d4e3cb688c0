//! Where blocks with parity are: spans of rows on all servers, and what lives there.
//!
//! A *row* is one block on each server, at the same offset: `data` columns and `parity` columns. A *span* is
//! [`SPAN_ROWS`] rows; columns go round the servers from one span to the next. A row is written once, whole, and is never
//! written again before its span is free: no parity is ever changed, so that there is no moment at which it does not fit
//! the blocks that it protects. A block that is written again goes to another row, as in a log; a table has the place of
//! each block, another one the block of each place.
//!
//! ```text
//!   span:  free --take_rows--> open --no rows left--> closed --the last reference goes--> free, stale
//!                               |                       |
//!                               '--a write is lost------'--> barred: as it was, and never free again
//!          free, stale --take_stale--> being trimmed --> free: takes no space at the servers
//!
//!   references of a span: one while it is open, one for each stripe that is being written there, one for each block that
//!   lives there, one for each reader
//!
//!   block: nowhere --publish--> place --publish--> another place: the reference to the old one goes
//!                                 '----forget----> nowhere
//! ```
//! # Why not otherwise
//! Rows at fixed places, as in a RAID, cost no table (here 12 bytes a block: 0.3 %), but four requests a block where this
//! takes `1 + parity / data`, and their parity is changed in place: a write to it that is lost makes it useless for all
//! blocks of the row, for ever, because its place may not be written again. What this costs is space: an eighth stays
//! free, and spans most of whose blocks have gone are emptied ([`mover`](crate::mover)).
//!
//! # Invariants
//! 1. The table names a place of a block only after all columns of its row were written.
//! 2. A place's block, and its sum, do not change while its span has references.

use crate::blocks::{BLOCK, BlockSet};
use crate::parity::COLUMNS_MAX;
use crate::sync::{AtomicU32, AtomicU64, Ordering, zeros};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Rows of a span. (Models have few.)
pub(crate) const SPAN_ROWS: u64 = if cfg!(loom) { 1 } else { 32 };
/// Bytes at both ends of exports that stay free: all who look for labels of volumes look there.
const MARGIN: u64 = 1 << 20;
const MARGIN_SMALL: u64 = 64 << 10;
const LARGE_MIN: u64 = 64 << 20;
/// One of this number of spans is more than blocks can fill.
const SPANS_PER_SPARE: u64 = 8;
/// And this number: two are open, two are the mover's.
const SPARE_MIN: u64 = 4;
/// Free spans that only the mover takes: it needs one to make room for more.
pub(crate) const MOVER_SPANS: u64 = 2;
/// Bit of a span's references: it is never free again.
const BARRED: u32 = 1 << 31;

/// A set of servers, as bits.
pub(crate) type ServerMask = u8;

/// Numbers of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(super) data: usize,
    pub(super) parity: usize,
    pub(super) spans: u64,
    base: u64,
}

/// Place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowPlace {
    pub(crate) span: u64,
    pub(crate) row: u64,
    pub(crate) column: usize,
}

impl Layout {
    /// For exports of `size` bytes.
    pub(crate) fn new(data: usize, parity: usize, size: u64) -> Layout {
        assert!(data + parity <= COLUMNS_MAX, "{data} and {parity} columns");
        let margin = if size < LARGE_MIN { MARGIN_SMALL } else { MARGIN };
        let spans = size.saturating_sub(2 * margin) / (SPAN_ROWS * BLOCK);
        // Places have numbers of 32 bits, and none for nowhere.
        let spans = spans.min((u64::from(u32::MAX) - 1) / (SPAN_ROWS * data as u64));
        Layout { data, parity, spans, base: margin }
    }

    /// Blocks that may live there.
    pub(crate) fn blocks(&self) -> u64 {
        let spare = self.spans / SPANS_PER_SPARE + SPARE_MIN;
        self.spans.saturating_sub(spare) * SPAN_ROWS * self.data as u64
    }

    /// Bytes of blocks in a span.
    pub(crate) fn span_len(&self) -> u64 {
        SPAN_ROWS * BLOCK * self.data as u64
    }

    pub(crate) fn columns(&self) -> usize {
        self.data + self.parity
    }

    pub(crate) fn server(&self, span: u64, column: usize) -> usize {
        (column + (span % self.columns() as u64) as usize) % self.columns()
    }

    pub(crate) fn offset(&self, span: u64, row: u64) -> u64 {
        self.base + (span * SPAN_ROWS + row) * BLOCK
    }

    fn number(&self, place: RowPlace) -> u32 {
        let row = place.span * SPAN_ROWS + place.row;
        (row * self.data as u64) as u32 + place.column as u32 + 1
    }

    fn place(&self, number: u32) -> Option<RowPlace> {
        let number = u64::from(number.checked_sub(1)?);
        let (row, column) = (number / self.data as u64, number % self.data as u64);
        Some(RowPlace { span: row / SPAN_ROWS, row: row % SPAN_ROWS, column: column as usize })
    }

    /// Data columns of a span whose servers are in `up`, if those of its parity are, and there is one.
    fn usable(&self, span: u64, up: ServerMask) -> ServerMask {
        let is_up = |column: &usize| up >> self.server(span, *column) & 1 == 1;
        let has_parity = (self.data..self.columns()).all(|column| is_up(&column));
        let data = (0..self.data).filter(is_up).fold(0, |all, column| all | 1 << column);
        if has_parity { data } else { 0 }
    }

    /// Blocks for which a span has room while those servers are up.
    pub(crate) fn room(&self, up: ServerMask) -> u64 {
        let columns = |span| self.usable(span, up).count_ones();
        let most = (0..self.columns() as u64).map(columns).max().unwrap_or(0);
        SPAN_ROWS * u64::from(most)
    }
}

/// Rows that a stripe is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) span: u64,
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// Data columns that may be written.
    pub(crate) columns: ServerMask,
}

/// Why there are no rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRows {
    /// The mover may make some.
    Full,
    /// Too few servers are there.
    Unreachable,
}

/// Purpose of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowsFor {
    User,
    Mover,
}

/// A span that has rows left.
#[derive(Clone, Copy, Debug)]
struct OpenSpan {
    span: u64,
    next: u64,
}

/// See [module](self).
#[derive(Debug)]
pub(crate) struct Spans {
    layout: Layout,
    /// Place of each block, as a number; 0: nowhere.
    places: Box<[AtomicU32]>,
    /// Block that was written to each place, plus 1; 0: none, and zeros in the parity of its row.
    owners: Box<[AtomicU32]>,
    /// Sum of the block that was written to each place.
    sums: Box<[AtomicU32]>,
    references: Box<[AtomicU32]>,
    /// Span by span as if it were a block.
    free: BlockSet,
    /// Free spans that were written, so that they still take space at the servers; the same way.
    stale: BlockSet,
    /// Blocks that live somewhere.
    living: AtomicU64,
    /// Spans that users have taken.
    taken: AtomicU64,
    /// The span of users, and that of the mover: what was moved once goes on to live, mostly.
    open: Mutex<[Option<OpenSpan>; 2]>,
}

impl Spans {
    pub(crate) fn new(layout: Layout) -> Spans {
        let places = (layout.spans * SPAN_ROWS) as usize * layout.data;
        let free = BlockSet::new(layout.spans * BLOCK);
        free.insert(0, layout.spans * BLOCK);
        Spans {
            layout,
            places: zeros(layout.blocks() as usize),
            owners: zeros(places),
            sums: zeros(places),
            references: zeros(layout.spans as usize),
            free,
            stale: BlockSet::new(layout.spans * BLOCK),
            living: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            open: Mutex::new([None; 2]),
        }
    }

    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn free(&self) -> u64 {
        self.free.count()
    }

    /// Number of spans that users have ever taken.
    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// True if blocks that live fill less than half of the spans in use.
    pub(crate) fn is_sparse(&self) -> bool {
        /// Spans that may be in use besides: the open ones, and a few.
        const BESIDES: u64 = 4;
        let used = (self.layout.spans - self.free()).saturating_sub(BESIDES);
        // Relaxed: a moment old.
        used * SPAN_ROWS * self.layout.data as u64 > 2 * self.living.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, [Option<OpenSpan>; 2]> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    // Spans.

    /// Takes up to `rows_max` rows for up to `blocks` blocks, and a reference to their span. `begin` is called with a span that was free.
    pub(crate) fn take_rows(
        &self,
        purpose: RowsFor,
        blocks: u64,
        rows_max: u64,
        up: ServerMask,
        begin: impl Fn(u64),
    ) -> Result<Rows, NoRows> {
        let classes = 0..self.layout.columns() as u64;
        if classes.clone().all(|class| self.layout.usable(class, up) == 0) {
            return Err(NoRows::Unreachable);
        }
        let mut all = self.lock();
        let open = &mut all[purpose as usize];
        loop {
            let Some(OpenSpan { span, next }) = *open else {
                let span = self.take_free(purpose, up).ok_or(NoRows::Full)?;
                begin(span);
                *open = Some(OpenSpan { span, next: 0 });
                continue;
            };
            let columns = self.layout.usable(span, up);
            if columns == 0 || next == SPAN_ROWS {
                *open = None;
                self.release(span, 1);
                continue;
            }
            let count = blocks.div_ceil(columns.count_ones().into());
            let count = count.min(rows_max).min(SPAN_ROWS - next);
            *open = Some(OpenSpan { span, next: next + count });
            self.references[span as usize].fetch_add(1, Ordering::SeqCst);
            return Ok(Rows { span, first: next, count, columns });
        }
    }

    /// Takes the first free span that can be written, with one reference. The lock of open spans is held.
    fn take_free(&self, purpose: RowsFor, up: ServerMask) -> Option<u64> {
        if purpose == RowsFor::User && self.free.count() <= MOVER_SPANS {
            return None;
        }
        let mut from = 0;
        loop {
            let span = self.free.next_run(from, BLOCK)?.0 / BLOCK;
            if self.layout.usable(span, up) != 0 {
                self.free.remove(span * BLOCK, BLOCK);
                self.stale.remove(span * BLOCK, BLOCK);
                self.references[span as usize].fetch_add(1, Ordering::SeqCst);
                self.taken.fetch_add(u64::from(purpose == RowsFor::User), Ordering::Relaxed);
                return Some(span);
            }
            from = (span + 1) * BLOCK;
        }
    }

    /// Takes stale spans that follow each other, up to `most`, with one reference each.
    pub(crate) fn take_stale(&self, most: u64) -> Option<Range<u64>> {
        let _all = self.lock();
        let mut from = 0;
        loop {
            let (start, len) = self.stale.next_run(from, most * BLOCK)?;
            let run = start / BLOCK..(start + len) / BLOCK;
            // One that is just becoming free is stale before.
            let is_free = |span: &u64| self.free.has_any(span * BLOCK, BLOCK);
            let count = run.take_while(is_free).count() as u64;
            let run = start / BLOCK..start / BLOCK + count;
            if count == 0 {
                from = start + BLOCK;
                continue;
            }
            self.free.remove(start, count * BLOCK);
            self.stale.remove(start, count * BLOCK);
            run.clone().for_each(|span| {
                self.references[span as usize].fetch_add(1, Ordering::SeqCst);
            });
            return Some(run);
        }
    }

    /// Gives a span back that was taken and not written.
    pub(crate) fn give_clean(&self, span: u64) {
        if self.references[span as usize].fetch_sub(1, Ordering::SeqCst) == 1 {
            self.free.insert(span * BLOCK, BLOCK);
        }
    }

    /// Calls `with` while a span is free, and stays so; returns whether it was.
    pub(crate) fn with_free(&self, span: u64, with: impl FnOnce()) -> bool {
        let _all = self.lock();
        let is_free = self.free.has_any(span * BLOCK, BLOCK);
        if is_free {
            with();
        }
        is_free
    }

    /// Closes a span, if it is open.
    pub(crate) fn close(&self, span: u64) {
        for open in &mut *self.lock() {
            if open.is_some_and(|open| open.span == span) {
                *open = None;
                self.release(span, 1);
            }
        }
    }

    /// Never frees a span again: a write may come late there.
    pub(crate) fn bar(&self, span: u64) {
        self.references[span as usize].fetch_or(BARRED, Ordering::SeqCst);
    }

    /// True if a span is never free again and nothing lives there: nobody will ever read or write it.
    pub(crate) fn is_given_up(&self, span: u64) -> bool {
        self.references[span as usize].load(Ordering::SeqCst) == BARRED
    }

    /// Takes a reference to a span, unless it is free.
    pub(crate) fn hold(&self, span: u64) -> bool {
        let references = &self.references[span as usize];
        let mut before = references.load(Ordering::SeqCst);
        while before != 0 {
            match references.compare_exchange(
                before,
                before + 1,
                Ordering::SeqCst,
                Ordering::SeqCst,
            ) {
                Ok(_) => return true,
                Err(now) => before = now,
            }
        }
        false
    }

    /// Gives references back.
    pub(crate) fn release(&self, span: u64, count: u32) {
        let before = self.references[span as usize].fetch_sub(count, Ordering::SeqCst);
        assert!(before & !BARRED >= count, "{before} references of span {span}");
        if before == count {
            self.stale.insert(span * BLOCK, BLOCK);
            self.free.insert(span * BLOCK, BLOCK);
        }
    }

    /// References of a span that may become free again.
    pub(crate) fn references(&self, span: u64) -> Option<u32> {
        let references = self.references[span as usize].load(Ordering::Relaxed);
        (references & BARRED == 0 && references > 0).then_some(references)
    }

    /// Spans that are open.
    pub(crate) fn open(&self) -> [Option<u64>; 2] {
        self.lock().map(|open| open.map(|open| open.span))
    }

    // Blocks.

    /// The place of a block, with a reference to its span.
    pub(crate) fn pin(&self, block: u64) -> Option<RowPlace> {
        let number = &self.places[block as usize];
        loop {
            let before = number.load(Ordering::SeqCst);
            let place = self.layout.place(before)?;
            // While there is a reference, the span is not written again: what the table still names then is there.
            if self.hold(place.span) {
                if number.load(Ordering::SeqCst) == before {
                    return Some(place);
                }
                self.release(place.span, 1);
            }
        }
    }

    /// True if the block is at this place, to whose span the caller has a reference.
    pub(crate) fn is_at(&self, block: u64, place: RowPlace) -> bool {
        self.places[block as usize].load(Ordering::SeqCst) == self.layout.number(place)
    }

    fn index(&self, place: RowPlace) -> usize {
        self.layout.number(place) as usize - 1
    }

    /// The block that was written to a place.
    pub(crate) fn owner(&self, place: RowPlace) -> Option<u64> {
        let owner = self.owners[self.index(place)].load(Ordering::SeqCst);
        owner.checked_sub(1).map(u64::from)
    }

    pub(crate) fn sum(&self, place: RowPlace) -> u32 {
        self.sums[self.index(place)].load(Ordering::SeqCst)
    }

    /// Records what was written to a place of a row that no block is published of.
    pub(crate) fn record(&self, place: RowPlace, written: Option<(u64, u32)>) {
        let index = self.index(place);
        let (owner, sum) = written.map_or((0, 0), |(block, sum)| (block as u32 + 1, sum));
        self.owners[index].store(owner, Ordering::SeqCst);
        self.sums[index].store(sum, Ordering::SeqCst);
    }

    /// Makes a place the block's, if it is still where it is expected to be; the caller holds the span.
    pub(crate) fn publish(&self, block: u64, place: RowPlace, expected: Option<RowPlace>) {
        self.references[place.span as usize].fetch_add(1, Ordering::SeqCst);
        let (number, new) = (&self.places[block as usize], self.layout.number(place));
        let old = match expected.map(|expected| self.layout.number(expected)) {
            None => number.swap(new, Ordering::SeqCst),
            Some(expected) => {
                let (success, failure) = (Ordering::SeqCst, Ordering::SeqCst);
                match number.compare_exchange(expected, new, success, failure) {
                    Ok(old) => old,
                    // It was written meanwhile.
                    Err(_) => new,
                }
            }
        };
        match self.layout.place(old) {
            Some(old) => self.release(old.span, 1),
            None => drop(self.living.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// Nobody needs the block any more.
    pub(crate) fn forget(&self, block: u64) {
        let old = self.places[block as usize].swap(0, Ordering::SeqCst);
        if let Some(old) = self.layout.place(old) {
            self.living.fetch_sub(1, Ordering::Relaxed);
            self.release(old.span, 1);
        }
    }

    /// Places of a span whose blocks live there, to which the caller has a reference.
    pub(crate) fn living(&self, span: u64) -> impl Iterator<Item = (u64, RowPlace)> {
        let rows =
            (0..SPAN_ROWS).flat_map(|row| (0..self.layout.data).map(move |column| (row, column)));
        rows.filter_map(move |(row, column)| {
            let place = RowPlace { span, row, column };
            let block = self.owner(place)?;
            self.is_at(block, place).then_some((block, place))
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const ALL: ServerMask = u8::MAX;

    fn spans(data: usize, parity: usize, count: u64) -> Spans {
        Spans::new(Layout::new(data, parity, 2 * MARGIN_SMALL + count * SPAN_ROWS * BLOCK))
    }

    fn take(spans: &Spans, blocks: u64, up: ServerMask) -> Result<Rows, NoRows> {
        spans.take_rows(RowsFor::User, blocks, SPAN_ROWS, up, |_| ())
    }

    /// Writes blocks to one stripe, as the queue does.
    fn write(spans: &Spans, blocks: std::ops::Range<u64>) -> Rows {
        let rows = take(spans, blocks.end - blocks.start, ALL).expect("room");
        for (n, block) in (0..).zip(blocks) {
            let place = RowPlace {
                span: rows.span,
                row: rows.first + n % rows.count,
                column: (n / rows.count) as usize,
            };
            spans.record(place, Some((block, block as u32)));
            spans.publish(block, place, None);
        }
        spans.release(rows.span, 1);
        rows
    }

    #[test]
    fn large_exports_take_no_memory_before_something_is_there() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells it");
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            kib.expect("a number") << 10
        };
        let before = resident();
        let spans = Spans::new(Layout::new(4, 1, 256 << 30));
        // Tables of 3 GiB, and a bit for each span, all of which are free; other tests have some memory, too.
        let grown = resident().saturating_sub(before);
        assert!(grown < 256 << 20, "{grown} bytes");
        assert_eq!(spans.free(), spans.layout().spans);
        write(&spans, 0..64);
        assert!(spans.pin(63).is_some());
    }

    #[test]
    fn places_have_numbers_of_their_own() {
        let layout = *spans(3, 2, 16).layout();
        let mut numbers = std::collections::BTreeSet::new();
        for (span, row) in (0..16).flat_map(|span| (0..SPAN_ROWS).map(move |row| (span, row))) {
            for column in 0..3 {
                let place = RowPlace { span, row, column };
                assert!(numbers.insert(layout.number(place)));
                assert_eq!(layout.place(layout.number(place)), Some(place));
            }
        }
        assert_eq!(layout.place(0), None);
    }

    #[test]
    fn columns_of_a_row_are_on_different_servers() {
        let layout = *spans(4, 2, 16).layout();
        for span in 0..16 {
            let servers = (0..6).fold(0_u8, |all, column| all | 1 << layout.server(span, column));
            assert_eq!(servers, 0b11_1111);
        }
    }

    #[test]
    fn a_span_is_free_when_all_of_its_blocks_are_elsewhere_and_no_reader_is_left() {
        let spans = spans(2, 1, 16);
        let first = write(&spans, 0..64);
        let pinned = spans.pin(5).expect("there");
        assert_eq!((first.count, pinned.span), (32, first.span));
        let second = write(&spans, 0..64);
        assert_ne!(first.span, second.span);
        assert!(!spans.with_free(first.span, || ()), "it is being read");
        spans.release(pinned.span, 1);
        assert!(spans.with_free(first.span, || ()));
        (0..64).for_each(|block| spans.forget(block));
        spans.close(second.span);
        assert_eq!(spans.free(), 16);
    }

    #[test]
    fn a_barred_span_is_never_free_again() {
        let spans = spans(2, 1, 16);
        let rows = write(&spans, 0..64);
        spans.bar(rows.span);
        (0..64).for_each(|block| spans.forget(block));
        spans.close(rows.span);
        assert!(!spans.with_free(rows.span, || ()) && spans.references(rows.span).is_none());
        assert_eq!(spans.free(), 15);
    }

    #[test]
    fn without_a_server_rows_are_where_it_has_no_parity() {
        let spans = spans(2, 1, 16);
        for gone in 0..3 {
            let rows = take(&spans, 8, ALL & !(1 << gone)).expect("room");
            let servers: Vec<usize> = (0..2)
                .filter(|column| rows.columns >> column & 1 == 1)
                .chain([2])
                .map(|column| spans.layout().server(rows.span, column))
                .collect();
            assert!(servers.len() == 2 && !servers.contains(&gone), "{rows:?}");
            assert_eq!(rows.count, 8, "one block a row");
        }
        assert_eq!(take(&spans, 8, 0b001), Err(NoRows::Unreachable));
    }

    #[test]
    fn users_leave_spans_to_the_mover() {
        let spans = spans(2, 1, 8);
        let user = std::iter::from_fn(|| take(&spans, 64, ALL).ok()).count();
        assert_eq!((user, take(&spans, 1, ALL)), (6, Err(NoRows::Full)));
        assert!(spans.take_rows(RowsFor::Mover, 64, SPAN_ROWS, ALL, |_| ()).is_ok());
    }

    #[test]
    fn a_move_does_not_count_where_the_block_was_written_meanwhile() {
        let spans = spans(2, 1, 16);
        write(&spans, 0..1);
        let old = spans.pin(0).expect("there");
        write(&spans, 0..1);
        let (new, rows) = (spans.pin(0).expect("there"), take(&spans, 1, ALL).expect("room"));
        let moved = RowPlace { span: rows.span, row: rows.first, column: 0 };
        spans.publish(0, moved, Some(old));
        assert!(spans.is_at(0, new));
        spans.publish(0, moved, Some(new));
        assert!(spans.is_at(0, moved));
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use crate::sync::AtomicU64;
    use crate::sync::Ordering::SeqCst;
    use loom::sync::Arc;
    use loom::thread;

    const SPANS: u64 = 6;

    /// Spans of a row, whose first column's content is a version number.
    struct World {
        spans: Spans,
        content: [AtomicU64; SPANS as usize],
    }

    impl World {
        /// Block 0 is written, version 1.
        fn new() -> Arc<World> {
            let layout = Layout::new(1, 1, 2 * MARGIN_SMALL + SPANS * SPAN_ROWS * BLOCK);
            let content = std::array::from_fn(|_| AtomicU64::new(0));
            let world = World { spans: Spans::new(layout), content };
            world.publish(world.take(), 0, 1, None);
            Arc::new(world)
        }

        fn take(&self) -> Rows {
            self.spans.take_rows(RowsFor::Mover, 1, 1, u8::MAX, |_| ()).expect("room")
        }

        fn publish(&self, rows: Rows, block: u64, version: u64, expected: Option<RowPlace>) {
            let place = RowPlace { span: rows.span, row: rows.first, column: 0 };
            self.content[rows.span as usize].store(version, SeqCst);
            self.spans.record(place, Some((block, version as u32)));
            self.spans.publish(block, place, expected);
            self.spans.release(rows.span, 1);
        }
    }

    #[test]
    fn loom_a_reader_finds_what_was_written_although_its_place_is_used_again() {
        loom::model(|| {
            let world = World::new();
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || {
                other.publish(other.take(), 0, 2, None);
                // The first place, unless it is being read.
                other.publish(other.take(), 1, 9, None);
            });
            let place = world.spans.pin(0).expect("it is somewhere");
            let version = world.content[place.span as usize].load(SeqCst);
            assert!(version == 1 || version == 2, "{version}");
            assert_eq!(u64::from(world.spans.sum(place)), version);
            world.spans.release(place.span, 1);
            writer.join().expect("the writer");
        });
    }

    #[test]
    fn loom_a_move_beside_a_write_leaves_what_was_written() {
        loom::model(|| {
            let world = World::new();
            let (mine, its) = (world.take(), world.take());
            let other = Arc::clone(&world);
            let writer = thread::spawn(move || other.publish(its, 0, 2, None));
            let place = RowPlace { span: 0, row: 0, column: 0 };
            if world.spans.hold(0) {
                if world.spans.is_at(0, place) {
                    let version = world.content[0].load(SeqCst);
                    world.publish(mine, 0, version, Some(place));
                }
                world.spans.release(0, 1);
            }
            writer.join().expect("the writer");
            let place = world.spans.pin(0).expect("it is somewhere");
            assert_eq!(world.content[place.span as usize].load(SeqCst), 2);
        });
    }
}
