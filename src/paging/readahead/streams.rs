//! Detected read-ahead: faults that follow each other at a steady distance are a stream, and the
//! pages that come next are asked for before they are touched.
//!
//! One thread often reads several streams in turn (the columns of a table), and several threads
//! read at once, so streams are found by position, not by thread: [`Streams`] keeps the last few
//! and matches each device fault against them. Pages that were read ahead do not fault, so a
//! stream has to be told where its reader is by a page that was left out on purpose, the *mark*.
//! One block is asked for up to the mark and one behind it: when the mark faults, the device is
//! still busy with the second, and the next block is added behind that. Each mark that is met
//! doubles the block, unless most marks in front of blocks of that size were not met of late ([`MetMarks`]): the columns
//! of a query are pieces with others between them, behind whose ends half as much again was read in vain.
//!
//! ```text
//!   fault: t [ block ] m                     the first time
//!          m [ block ] m' [ block ]          the second: the blocks that the device has after it
//!                      m' [ block ] m" [ block ]
//! ```
//! Where the block would be as large as a chunk of memory and the pages follow each other, whole chunks
//! are asked for and there is no mark: a chunk that was read is mapped when its reader gets there
//! (`fault::huge_reads`), and that fault is told as well.
//!
//! All of it counts in clusters ([`CLUSTER_SHIFT`]): "page" stands for one here, but where windows are used.
//!
//! Any other fault near a stream ends its confidence: wrong guesses stop after one small block. Where faults are followed by
//! their neighbours' ([`Shares`]), the first reads its cluster, and the second makes a stream.
//! Used by handlers, under one leaf lock.

use crate::base::error::Result;
use crate::base::units::PageId;
use crate::paging::page::CHUNK_LEN;
use crate::paging::pager::table::CLUSTER_SHIFT;
use crate::paging::readahead::shares::Shares;

/// Streams that are followed at the same time.
const STREAMS_MAX: usize = 64;
/// Farthest distance between two faults of a stream, in pages.
const STRIDE_MAX: u64 = 64;
/// Pages of the first block of a stream: 64 KiB.
const FIRST_BLOCK: u64 = 4;
/// Pages of a chunk, which is read whole where a stream leads through all of it.
const CHUNK: u64 = CHUNK_LEN.0 >> CLUSTER_SHIFT;
/// How far ahead of one stream pages are asked for by chunks, which are a request or two each: 8 MiB.
const WINDOW_MAX: u64 = 4 * CHUNK;
/// Chunks ahead of a stream that is read by them, at least: one is used while the next is read.
const CHUNKS_MIN: u64 = 2;
/// The same page by page: what is asked for must leave the device room for faults.
const WINDOW_BY_PAGES_MAX: u64 = 192;
/// Pages behind a mark that need not fault although the reader gets there.
const MISSED_MAX: u64 = 16;
/// Number of the last streams that the share of a chunk's which go on follows.
const GOING_ON_MEMORY: u32 = 8;
/// The next is expected to where more than one in this number did: its cluster is read at once, and one fault more makes it a
/// stream.
const GOING_ON_PART: u32 = 2;
/// Equal distances in a row that make a stream. Where data is a few thousand pages, one in a hundred
/// random faults is as far from the one before as that was from its own: with two distances, 5 % of what
/// a hash table and a B-tree of twice the memory read was read ahead in vain.
const CONFIDENT: u8 = 3;
/// A block grows if this number of 256 marks in front of blocks of that size were met. Half are met where each stream ends in
/// its second block of a size.
const MET_MIN: u8 = 144;
/// Marks after which a block grows in any case.
const STAYS: u8 = 4;
/// Additional slack of longer streams: a stream may leave its course once without being looked for anew.
const CONFIDENT_MAX: u8 = CONFIDENT + 1;

/// How far ahead pages may be asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct WindowLimits {
    /// Pages ahead of all streams together.
    pub(super) in_total: u64,
    /// The same of streams that are read by whole chunks; 0: chunks cannot be.
    pub(super) in_chunks: u64,
}

impl WindowLimits {
    /// The part of one of `active` streams.
    fn of_one(self, active: u64) -> WindowLimits {
        let (in_total, in_chunks) = (self.in_total / active, self.in_chunks / active);
        let by_chunks = in_chunks >= CHUNKS_MIN * CHUNK;
        let most = if by_chunks { WINDOW_MAX } else { WINDOW_BY_PAGES_MAX };
        WindowLimits {
            in_total: in_total.clamp(1, most),
            in_chunks: if by_chunks { in_chunks.min(WINDOW_MAX) } else { 0 },
        }
    }
}

/// Place of a fault that the streams were told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) enum FaultOn {
    /// A page that is on the device only.
    StoredPage,
    /// A page that was asked for ahead.
    PageReadAhead,
}

/// No page is the mark.
const NO_MARK: u64 = u64::MAX;

/// Pages to ask for: `count` pages from `first`, `stride` pages apart, but for the mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::paging) struct Window {
    first: u64,
    stride: i64,
    count: u64,
    mark: u64,
}

impl Window {
    /// The clusters, nearest first, as far as they lie below the page `end`.
    fn clusters(self, end: u64) -> impl Iterator<Item = u64> {
        (0..self.count)
            .map_while(move |n| self.first.checked_add_signed(self.stride * n as i64))
            .take_while(move |cluster| *cluster < end >> CLUSTER_SHIFT)
            .filter(move |cluster| *cluster != self.mark)
    }

    /// The pages, nearest first, as far as they lie below `end`; neighbours as one: the lowest and how many.
    pub(in crate::paging) fn rows(self, end: u64) -> impl Iterator<Item = (PageId, u64)> {
        let mut clusters = self.clusters(end).peekable();
        let is_dense = self.stride.unsigned_abs() == 1;
        std::iter::from_fn(move || {
            let first = clusters.next()?;
            let (mut last, mut count) = (first, 1);
            while let Some(next) = clusters.next_if(|next| is_dense && next.abs_diff(last) == 1) {
                (last, count) = (next, count + 1);
            }
            Some((PageId(first.min(last) << CLUSTER_SHIFT), count << CLUSTER_SHIFT))
        })
    }

    /// The first pages of the whole chunks at the window's end, below the page `end` and nearest first; what comes before
    /// them is left in the window.
    pub(in crate::paging) fn split_chunks(
        &mut self,
        end: u64,
    ) -> impl Iterator<Item = PageId> + use<> {
        let descends = self.stride < 0;
        let (low, high) = match descends {
            true => ((self.first + 1).saturating_sub(self.count), self.first + 1),
            false => (self.first, self.first + self.count),
        };
        let low = low.next_multiple_of(CHUNK);
        let high = high.min(end >> CLUSTER_SHIFT) / CHUNK * CHUNK;
        let is_dense = self.mark == NO_MARK && self.stride.unsigned_abs() == 1;
        let chunks = if is_dense { high.saturating_sub(low) / CHUNK } else { 0 };
        if chunks > 0 {
            self.count = if descends { self.first + 1 - high } else { low - self.first };
        }
        let at = move |n| if descends { high - (n + 1) * CHUNK } else { low + n * CHUNK };
        (0..chunks).map(move |n| PageId(at(n) << CLUSTER_SHIFT))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    /// The last page that followed none beside it, until one beside it follows.
    alone: Option<u64>,
    /// The last page that faulted.
    last: u64,
    /// Where the next fault falls if the guess was right.
    next: u64,
    /// Pages asked for behind `next`.
    behind: u64,
    stride: i64,
    /// Pages of the last block.
    block: u64,
    /// Marks that were met since the block grew.
    stayed: u8,
    /// Where the chunks end that were asked for, of a stream that descends where they begin; `None` while pages are.
    asked_end: Option<u64>,
    confidence: u8,
    /// When it was last matched, and the pages asked for by then.
    used: u64,
    asked: u64,
}

/// Of the last marks in front of blocks of each size, in powers of two of [`FIRST_BLOCK`], how many of 256 were met. Each
/// that was not has left a block which nobody reads.
#[derive(Debug)]
struct MetMarks([u8; 6]);

impl MetMarks {
    fn rate(&mut self, block: u64) -> &mut u8 {
        let size = (block.max(FIRST_BLOCK) / FIRST_BLOCK).ilog2();
        &mut self.0[size.min(5) as usize]
    }

    /// Notes what became of the mark in front of a block; 0: there was none.
    fn note(&mut self, block: u64, is_met: bool) {
        if block > 0 {
            let rate = self.rate(block);
            *rate = *rate - *rate / 16 + u8::from(is_met) * 15;
        }
    }

    /// The size of the next block of a stream that has stayed with the last one so often: one that goes on is longer
    /// than others.
    fn grown(&mut self, block: u64, stayed: &mut u8) -> u64 {
        let is_worth = *self.rate(block * 2) >= MET_MIN || *stayed == STAYS;
        *stayed = if is_worth { 0 } else { *stayed + 1 };
        block << u32::from(is_worth)
    }
}

/// The streams that are being followed.
#[derive(Debug)]
pub(super) struct Streams {
    streams: [Option<Stream>; STREAMS_MAX],
    met: MetMarks,
    clock: u64,
    /// Pages asked for so far.
    asked: u64,
    /// Of the streams that begin, how many go on.
    going_on: Shares,
}

impl Streams {
    /// In this number of chunks of memory.
    ///
    /// # Errors
    /// When the kernel refuses a mapping.
    pub(super) fn new(chunks: usize) -> Result<Streams> {
        let met = MetMarks([u8::MAX; 6]);
        let going_on = Shares::new(chunks, GOING_ON_MEMORY, GOING_ON_PART)?;
        Ok(Streams { streams: [None; STREAMS_MAX], met, clock: 0, asked: 0, going_on })
    }

    /// Notes a device fault, or one on a chunk that was read ahead; returns what to read ahead. All
    /// streams together keep at most `limits.in_total` pages read ahead and not used yet. With `eager` (the program
    /// said that it reads sequentially) the first fault is enough. `is_stored` says which pages can fault, and be marks.
    pub(super) fn fault(
        &mut self,
        page: u64,
        on: FaultOn,
        limits: WindowLimits,
        eager: bool,
        is_stored: &dyn Fn(u64) -> bool,
    ) -> Option<Window> {
        self.clock += 1;
        let limits = limits.of_one(self.active(limits.in_total).max(1));
        let cluster = Window { first: page, stride: 1, count: 0, mark: NO_MARK };
        if let Some(stream) = self.streams.iter_mut().flatten().find(|stream| stream.last == page) {
            // Of another page of its cluster: the rest of that.
            stream.learn(page, true, &self.going_on);
            return Some(cluster);
        }
        let goes_on = self.going_on.expects(PageId(page << CLUSTER_SHIFT)).then_some(cluster);
        let at = self.find(page);
        let (clock, asked) = (self.clock, self.asked);
        let Some(stream) = self.streams[at].as_mut().filter(|stream| stream.is_near(page)) else {
            let confidence = match goes_on {
                _ if eager => CONFIDENT,
                Some(_) => CONFIDENT - 1,
                None => 0,
            };
            let (last, next, stride, used) = (page, page + 1, 1, clock);
            let mut stream =
                Stream { last, next, stride, confidence, used, asked, ..Stream::default() };
            stream.learn(page, false, &self.going_on);
            let window = eager.then(|| stream.advance(page, limits, &mut self.met, is_stored));
            let ended = self.streams[at].replace(stream);
            self.met.note(ended.map_or(0, |ended| ended.block), false);
            return self.note(window.flatten().or(goes_on));
        };
        (stream.used, stream.asked) = (clock, asked);
        let is_expected = stream.is_on_course(page);
        self.met.note(stream.block, is_expected);
        stream.learn(page, is_expected && stream.stride.unsigned_abs() == 1, &self.going_on);
        stream.follow(page);
        if on == FaultOn::StoredPage {
            // The chunks that were asked for are not there: they are asked for again.
            stream.asked_end = None;
        }
        if stream.confidence < CONFIDENT {
            return goes_on;
        }
        let window = stream.advance(page, limits, &mut self.met, is_stored);
        self.note(window)
    }

    /// Notes what is asked for.
    fn note(&mut self, window: Option<Window>) -> Option<Window> {
        self.asked += window.map_or(0, |window| window.count);
        window
    }

    /// Streams that go on. One that does not, while twice as much was asked for as all together may have ahead, has
    /// ended: those that go on have their turns sooner.
    fn active(&self, in_total: u64) -> u64 {
        let active = |stream: &Stream| {
            stream.confidence >= CONFIDENT && self.asked - stream.asked < 2 * in_total
        };
        self.streams.iter().flatten().filter(|stream| active(stream)).count() as u64
    }

    /// The place of the stream that a fault belongs to, else of the one to replace.
    fn find(&self, page: u64) -> usize {
        let position = |matches: &dyn Fn(&Stream) -> bool| {
            self.streams.iter().position(|stream| stream.as_ref().is_some_and(matches))
        };
        let exact = position(&|stream| stream.next == page);
        exact.or_else(|| position(&|stream| stream.is_near(page))).unwrap_or_else(|| self.oldest())
    }

    fn oldest(&self) -> usize {
        let age = |stream: &Option<Stream>| stream.map_or(0, |stream| stream.used);
        (0..STREAMS_MAX).min_by_key(|at| age(&self.streams[*at])).expect("there are streams")
    }
}

impl Stream {
    /// Notes that a fault followed that of a neighbour, or that it has to show whether one follows.
    fn learn(&mut self, page: u64, is_beside: bool, going_on: &Shares) {
        let before = std::mem::replace(&mut self.alone, (!is_beside).then_some(page));
        let at = |cluster: u64| PageId(cluster << CLUSTER_SHIFT);
        match before {
            _ if !is_beside => going_on.count(at(page)),
            Some(first) => going_on.happened(at(first)),
            None => {}
        }
    }

    fn is_near(&self, page: u64) -> bool {
        self.is_on_course(page) || (page != self.last && page.abs_diff(self.last) <= STRIDE_MAX)
    }

    /// True if a fault is the mark's, or one behind it of a reader that has missed the mark: it
    /// came in otherwise, as did perhaps a few pages that follow.
    fn is_on_course(&self, page: u64) -> bool {
        let end = if self.block > 0 { self.behind + 1 + MISSED_MAX } else { 0 };
        let distance = page.wrapping_sub(self.next) as i64;
        let steps = distance.checked_div(self.stride).unwrap_or(-1);
        distance == steps.wrapping_mul(self.stride) && (0..=end as i64).contains(&steps)
    }

    /// Learns from a fault whether the guess was right.
    fn follow(&mut self, page: u64) {
        if self.is_on_course(page) {
            if page != self.next {
                self.behind = 0;
            }
            self.confidence = (self.confidence + 1).min(CONFIDENT_MAX);
        } else {
            let stride = page.wrapping_sub(self.last) as i64;
            if stride == self.stride {
                self.confidence = self.confidence.saturating_sub(1);
            } else {
                self.confidence = 1;
                self.stride = stride;
            }
            (self.block, self.stayed, self.behind, self.asked_end) = (0, 0, 0, None);
        }
        self.last = page;
        self.next = page.wrapping_add_signed(self.stride);
    }

    /// All up to the last end of a chunk within the window that was not asked for before.
    fn advance_by_chunks(&mut self, page: u64, ahead: u64) -> Option<Window> {
        self.block = CHUNK;
        if self.stride < 0 {
            let end = page.saturating_sub(ahead).next_multiple_of(CHUNK).min(page);
            let above = self.asked_end.map_or(page, |asked| asked.min(page));
            self.asked_end = Some(end.min(above));
            self.next = page.wrapping_sub(1);
            self.behind = page - end.min(above);
            let count = above.checked_sub(end).filter(|count| *count > 0)?;
            return Some(Window { first: above - 1, stride: -1, count, mark: NO_MARK });
        }
        let end = (page + ahead) / CHUNK * CHUNK;
        let first = self.asked_end.map_or(page + 1, |asked| asked.max(page + 1));
        self.asked_end = Some(end.max(first));
        self.next = page + 1;
        self.behind = end.max(first) - self.next;
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some(Window { first, stride: 1, count, mark: NO_MARK })
    }

    /// Pages to ask for after a fault that came as expected, within `limits` for one stream: a block behind what is
    /// asked for already, with the mark in front of it. The first time there is nothing in front: the mark
    /// comes last.
    fn advance(
        &mut self,
        page: u64,
        limits: WindowLimits,
        met: &mut MetMarks,
        is_stored: &dyn Fn(u64) -> bool,
    ) -> Option<Window> {
        if limits.in_chunks > 0 && self.stride.unsigned_abs() == 1 && self.block * 2 >= CHUNK {
            return self.advance_by_chunks(page, limits.in_chunks);
        }
        self.asked_end = None;
        let (before, first_time) = (self.behind, self.block == 0);
        let grown = if first_time { FIRST_BLOCK } else { met.grown(self.block, &mut self.stayed) };
        self.block = grown.min((limits.in_total / 2).max(1));
        let at = |n: u64| page.checked_add_signed(self.stride.checked_mul(n as i64)?);
        // The block up to the mark is there already, or is asked for now.
        let front = if before > 0 { before } else { self.block };
        let marks = (0..MISSED_MAX).map_while(|more| at(front + 1 + more));
        let mark = marks.clone().find(|page| is_stored(*page)).or_else(|| at(front + 1))?;
        let first = at(before + 1)?;
        let front = mark.abs_diff(page) / self.stride.unsigned_abs() - 1;
        self.next = mark;
        self.behind = if first_time { 0 } else { self.block };
        let count = front + 1 + self.behind - before;
        Some(Window { first, stride: self.stride, count, mark })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streams() -> Streams {
        Streams::new(1 << 16).expect("address space")
    }

    const FAULTS: &dyn Fn(u64) -> bool = &|_| true;
    const LIMITS: WindowLimits = WindowLimits { in_total: 1 << 10, in_chunks: 0 };

    fn pages(window: Option<Window>) -> Vec<u64> {
        window.map_or(Vec::new(), |window| window.clusters(1 << 30).collect())
    }

    /// Feeds faults; returns the pages each made the streams ask for.
    fn play(streams: &mut Streams, faults: &[u64]) -> Vec<Vec<u64>> {
        let ask =
            |page: &u64| pages(streams.fault(*page, FaultOn::StoredPage, LIMITS, false, FAULTS));
        faults.iter().map(ask).collect()
    }

    /// Reads `count` pages in sequence from a cold start, `resident` ones without a fault; returns
    /// the number of faults, and of marks at which the block behind was not there yet.
    fn scan(count: u64, resident: &dyn Fn(u64) -> bool) -> (u64, u64) {
        let mut streams = streams();
        let mut asked: std::collections::BTreeSet<u64> =
            (0..count).filter(|n| resident(*n)).collect();
        let (mut faults, mut stalls) = (0, 0);
        for page in 0..count {
            if asked.contains(&page) {
                continue;
            }
            faults += 1;
            stalls += u64::from(!asked.contains(&(page + 1)));
            let stored = |page: u64| !asked.contains(&page);
            let window = streams.fault(page, FaultOn::StoredPage, LIMITS, false, &stored);
            asked.extend(pages(window));
        }
        (faults, stalls)
    }

    #[test]
    fn a_sequence_is_found_at_its_fourth_fault_and_its_block_doubles() {
        let asked = play(&mut streams(), &[9, 10, 11, 12, 17, 26]);
        assert!(asked[..3].iter().all(Vec::is_empty), "{asked:?}");
        assert_eq!(asked[3], [13, 14, 15, 16]);
        assert_eq!(asked[4], (18..26).chain(27..35).collect::<Vec<_>>());
        assert_eq!(asked[5], (36..52).collect::<Vec<_>>(), "one block stays ahead");
    }

    #[test]
    fn blocks_stop_growing_where_streams_end_before_their_marks_and_grow_again() {
        // So much that streams which have ended take nothing from one that goes on.
        const LIMITS: WindowLimits = WindowLimits { in_total: 1 << 16, in_chunks: 0 };
        let mut streams = streams();
        // Pieces of 50 pages, far from each other; returns what was asked for behind the end of one.
        let mut read_piece = |n: u64| {
            let (start, end) = (n * 1000, n * 1000 + 50);
            let mut asked = std::collections::BTreeSet::new();
            for page in start..end {
                if asked.insert(page) {
                    let window = streams.fault(page, FaultOn::StoredPage, LIMITS, false, FAULTS);
                    asked.extend(pages(window));
                }
            }
            asked.range(end..).count()
        };
        let first = read_piece(0);
        let learnt = (1..400).map(&mut read_piece).collect::<Vec<_>>();
        let late = learnt[200..].iter().sum::<usize>() / learnt[200..].len();
        assert!(late * 2 < first, "{first} pages in vain at first, {late} later");
        let mut far = std::collections::BTreeSet::new();
        let mut faults = 0;
        for page in 1_000_000..1_004_000 {
            if far.insert(page) {
                faults += 1;
                far.extend(pages(streams.fault(page, FaultOn::StoredPage, LIMITS, false, FAULTS)));
            }
        }
        assert!(faults < 4000 / 32, "{faults} faults of a long scan");
    }

    #[test]
    fn a_steady_reader_always_finds_a_block_ahead_of_it() {
        let (faults, stalls) = scan(10_000, &|_| false);
        assert!((10_000 / 97..10_000 / 97 + 10).contains(&faults), "{faults} faults");
        assert!(stalls <= 5, "{stalls} stalls");
    }

    #[test]
    fn resident_pages_on_the_way_do_not_end_a_stream() {
        let (faults, stalls) = scan(10_000, &|page| page.wrapping_mul(0x9E37_79B1) >> 8 & 7 == 0);
        assert!(faults < 10_000 / 97 + 10, "{faults} faults");
        assert!(stalls <= 13 + 8, "{stalls} stalls: where a resident page follows a mark too");
    }

    #[test]
    fn a_reader_that_missed_the_mark_is_still_followed() {
        let mut streams = streams();
        let asked = play(&mut streams, &[9, 10, 11, 12, 17, 35]);
        assert_eq!(asked[5], (36..52).chain(53..69).collect::<Vec<_>>());
    }

    #[test]
    fn strides_and_descending_sequences_are_streams_too() {
        let asked = play(&mut streams(), &[97, 100, 103, 106, 121]);
        assert_eq!(asked[3], [109, 112, 115, 118]);
        let ahead = (124..148).step_by(3).chain((151..175).step_by(3));
        assert_eq!(asked[4], ahead.collect::<Vec<_>>());
        let asked = play(&mut streams(), &[101, 100, 99, 98, 93]);
        assert_eq!(asked[3], [97, 96, 95, 94]);
        assert_eq!(asked[4], (85..93).rev().chain((76..84).rev()).collect::<Vec<_>>());
    }

    const BY_CHUNKS: WindowLimits = WindowLimits { in_total: 1 << 20, in_chunks: 1 << 20 };

    /// The whole chunks at the end of `window`, counted as in this module.
    fn split(window: &mut Window) -> Option<std::ops::Range<u64>> {
        let chunks: Vec<u64> =
            window.split_chunks(1 << 30).map(|first| first.0 >> CLUSTER_SHIFT).collect();
        let (first, last) = (chunks.iter().min()?, chunks.iter().max()?);
        assert!(chunks.is_sorted() || chunks.iter().rev().is_sorted(), "{chunks:?}");
        Some(*first..last + CHUNK)
    }

    #[test]
    fn a_sequence_whose_block_is_as_large_as_a_chunk_asks_for_whole_chunks() {
        let mut streams = streams();
        let mut ask = |page, on| streams.fault(page, on, BY_CHUNKS, false, FAULTS);
        let by_pages = [9, 10, 11, 12, 17, 26, 35, 52].map(|page| ask(page, FaultOn::StoredPage));
        let too_small =
            |window: Option<Window>| window.is_none_or(|mut it| split(&mut it).is_none());
        assert!(by_pages.into_iter().all(too_small), "blocks of 4 to {} pages", CHUNK / 2);
        let mut window = ask(85, FaultOn::StoredPage).expect("a block of a chunk");
        assert_eq!(split(&mut window), Some(CHUNK..4 * CHUNK));
        assert_eq!(
            pages(Some(window)),
            (86..CHUNK).collect::<Vec<_>>(),
            "what is before the chunks"
        );
        let next = ask(CHUNK, FaultOn::PageReadAhead).map(|mut next| split(&mut next));
        assert_eq!(next, Some(Some(4 * CHUNK..5 * CHUNK)));
        let within = ask(2 * CHUNK - 1, FaultOn::PageReadAhead);
        assert_eq!(pages(within), [] as [u64; 0], "no chunk ends within the window");
        let again = ask(2 * CHUNK, FaultOn::StoredPage).expect("what was asked for is not there");
        assert_eq!(pages(Some(again)).first(), Some(&(2 * CHUNK + 1)));
    }

    #[test]
    fn a_stream_that_descends_asks_for_the_chunks_below_it() {
        let mut streams = streams();
        let top = 10 * CHUNK - 1;
        let mut ask = |page, on| streams.fault(page, on, BY_CHUNKS, false, FAULTS);
        for below in [9, 10, 11, 12, 17, 26, 35, 52] {
            let window = ask(top - below, FaultOn::StoredPage);
            assert!(window.is_none_or(|mut window| split(&mut window).is_none()), "{below}");
        }
        let mut window = ask(top - 85, FaultOn::StoredPage).expect("a block of a chunk");
        assert_eq!(split(&mut window), Some(6 * CHUNK..9 * CHUNK));
        let before: Vec<u64> = (9 * CHUNK..top - 85).rev().collect();
        assert_eq!(pages(Some(window)), before, "what is above the chunks");
        let next = ask(9 * CHUNK - 1, FaultOn::PageReadAhead).map(|mut next| split(&mut next));
        assert_eq!(next, Some(Some(5 * CHUNK..6 * CHUNK)));
        let again =
            ask(8 * CHUNK - 1, FaultOn::StoredPage).expect("what was asked for is not there");
        assert_eq!(pages(Some(again)).first(), Some(&(8 * CHUNK - 2)));
        // Down to the first page, and not below it.
        let rest = (0..7).map(|chunk| ask((7 - chunk) * CHUNK - 1, FaultOn::PageReadAhead));
        let ends: Vec<u64> = rest.flat_map(|window| pages(window).into_iter().min()).collect();
        assert_eq!(ends.iter().min(), Some(&0), "{ends:?}");
    }

    #[test]
    fn chunks_beyond_the_end_of_the_region_are_left_out() {
        const PAGES: u64 = CHUNK_LEN.0;
        let mut window = Window { first: CHUNK - 8, stride: 1, count: 3 * CHUNK, mark: NO_MARK };
        let within: Vec<PageId> = window.split_chunks(3 * PAGES - 7).collect();
        assert_eq!(within, [PageId(PAGES)]);
        assert_eq!(window.rows(1 << 30).collect::<Vec<_>>(), [(PageId(PAGES - 32), 32)]);
        let mut window = Window { count: 3 * CHUNK, mark: CHUNK, ..window };
        assert_eq!(window.split_chunks(1 << 30).count(), 0, "a mark is in the way");
    }

    #[test]
    fn where_streams_go_on_a_cluster_is_read_at_once_and_one_fault_more_makes_a_stream() {
        let mut streams = streams();
        let mut ask = |page| streams.fault(page, FaultOn::StoredPage, LIMITS, false, FAULTS);
        assert_eq!(ask(60_000), None, "nothing is known");
        // Pieces of four clusters, far from each other.
        (0..64).flat_map(|piece| (0..4).map(move |n| piece * 300 + n)).for_each(|page| {
            ask(page);
        });
        let first = ask(40_000).expect("its cluster");
        assert_eq!((first.clusters(1 << 30).count(), first.rows(1 << 30).count()), (0, 0));
        assert_eq!(pages(ask(40_001)), [40_002, 40_003, 40_004, 40_005]);
        // One that asks for nothing is read alone.
        (0..512).for_each(|n| {
            ask(n * n * 37 % 50_000);
        });
        assert_eq!(ask(60_000), None);
    }

    #[test]
    fn random_faults_on_little_data_are_read_alone_although_all_are_near_streams() {
        let mut streams = streams();
        let mut is_alone =
            |page| streams.fault(page, FaultOn::StoredPage, LIMITS, false, FAULTS).is_none();
        // It was read cluster by cluster before, each by two faults.
        (0..4096).flat_map(|n| [n * 1001 % 4096; 2]).for_each(|page| {
            is_alone(page);
        });
        let mut dice = 1_u64;
        let mut random = || {
            dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            dice >> 33 & 4095
        };
        let alone = (0..10_000).filter(|_| is_alone(random())).count();
        assert!(alone > 9_000, "{alone}");
    }

    #[test]
    fn clusters_are_asked_for_with_all_their_pages() {
        let window = Window { first: 2, stride: 1, count: 4, mark: 4 };
        let rows: Vec<_> = window.rows(1 << 30).collect();
        assert_eq!(rows, [(PageId(8), 8), (PageId(20), 4)]);
        let down = Window { stride: -1, mark: NO_MARK, ..window };
        assert_eq!(down.rows(1 << 30).collect::<Vec<_>>(), [(PageId(0), 12)]);
        let strided = Window { stride: 3, ..down };
        assert_eq!(strided.rows(24).collect::<Vec<_>>(), [(PageId(8), 4), (PageId(20), 4)]);
    }

    #[test]
    fn the_second_fault_in_a_cluster_asks_for_the_rest_of_it_and_is_no_step_of_a_stream() {
        let mut streams = streams();
        let mut ask = |page| streams.fault(page, FaultOn::StoredPage, LIMITS, false, FAULTS);
        assert!(ask(9).is_none() && ask(10).is_none());
        assert!(ask(10).is_some_and(|window| window.clusters(1 << 30).count() == 0));
        assert!(ask(11).is_none());
        assert_eq!(pages(ask(12)), [13, 14, 15, 16]);
    }

    #[test]
    fn interleaved_streams_are_told_apart() {
        let mut streams = streams();
        let faults: Vec<u64> = (0..4).flat_map(|n| [1_000 + n, 5_000 + n, 9_000 + n]).collect();
        let asked = play(&mut streams, &faults);
        assert!(asked[..9].iter().all(Vec::is_empty), "{asked:?}");
        assert_eq!(asked[9], [1_004, 1_005, 1_006, 1_007]);
        assert_eq!(asked[10], [5_004, 5_005, 5_006, 5_007]);
        assert_eq!(asked[11], [9_004, 9_005, 9_006, 9_007]);
    }

    #[test]
    fn scattered_faults_ask_for_nothing() {
        let scattered: Vec<u64> =
            (0..1_000).map(|n: u64| n.wrapping_mul(0x9E37_79B1) % (1 << 20)).collect();
        let asked = play(&mut streams(), &scattered);
        let wasted = asked.iter().filter(|pages| !pages.is_empty()).count();
        assert!(wasted <= 5, "{wasted} windows for random faults");
    }

    #[test]
    fn scattered_faults_among_few_pages_ask_for_next_to_nothing() {
        // 32 MiB, of which half fit: some fault is always near.
        let limits = WindowLimits { in_total: (1 << 10) / 12, in_chunks: 0 };
        let mut random = 42_u64;
        let mut streams = streams();
        let asked = (0..20_000).map(|_| {
            random = random.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let page = (random >> 40) % 2_048;
            pages(streams.fault(page, FaultOn::StoredPage, limits, false, FAULTS)).len()
        });
        let wasted: usize = asked.sum();
        assert!(wasted < 1_000, "{wasted} pages read ahead of 20,000 random faults");
    }

    #[test]
    fn a_broken_stream_stops_asking() {
        let asked = play(&mut streams(), &[9, 10, 11, 12, 40, 33, 45]);
        assert!(!asked[3].is_empty() && asked[4..].iter().all(Vec::is_empty), "{asked:?}");
    }

    #[test]
    fn many_streams_share_what_may_be_read_ahead() {
        let mut streams = streams();
        let limits = WindowLimits { in_total: 64, ..LIMITS };
        let mut last = 0;
        for n in 0..4 {
            for stream in 0..16 {
                let page = stream * 10_000 + n;
                last = pages(streams.fault(page, FaultOn::StoredPage, limits, false, FAULTS)).len();
            }
        }
        assert_eq!(last, 2, "16 streams and 64 pages, of which half is a block");
    }

    #[test]
    fn a_scan_that_begins_anew_is_read_by_chunks_as_the_one_before_it() {
        const LEN: u64 = 100 * CHUNK;
        // A stream alone has room for chunks, two together have not.
        let limits = WindowLimits { in_total: 2 * CHUNK, in_chunks: 3 * CHUNK };
        let mut streams = streams();
        let mut by_chunks = [0; 3];
        for chunks in &mut by_chunks {
            let (mut page, mut read_ahead) = (0, 0..0);
            while page < LEN {
                let is_ahead = read_ahead.contains(&page);
                let on = if is_ahead { FaultOn::PageReadAhead } else { FaultOn::StoredPage };
                let window = streams.fault(page, on, limits, false, FAULTS);
                page = match window {
                    Some(mut window) if window.mark == NO_MARK => {
                        if let Some(range) = split(&mut window) {
                            *chunks += (range.end - range.start) / CHUNK;
                            read_ahead = range;
                        }
                        (page / CHUNK + 1) * CHUNK
                    }
                    Some(window) => window.mark,
                    None => page + 1,
                };
            }
        }
        assert!(by_chunks.iter().all(|chunks| *chunks > 90), "{by_chunks:?} of 100 each");
    }

    #[test]
    fn windows_end_at_the_edges_of_the_region() {
        let mut streams = streams();
        play(&mut streams, &[3, 2, 1]);
        let window = streams.fault(0, FaultOn::StoredPage, LIMITS, false, FAULTS);
        assert!(window.is_none_or(|window| window.clusters(100).count() == 0));
        let window = Window { first: 98, stride: 1, count: 8, mark: 106 };
        assert_eq!(window.clusters(400).count(), 2);
        let mut below = Window { first: 3, stride: -1, count: 8, mark: 0 };
        assert_eq!((below.split_chunks(400).count(), below.clusters(400).count()), (0, 3));
    }
}
