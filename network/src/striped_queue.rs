//! A thread's requests to servers that hold pages with parity.
//!
//! Blocks that are written together become a *stripe*: rows of a span ([`spans`](crate::spans)), of which each server gets
//! its part by one request. A block is read by one request to the server that has it, or computed from the others.
//!
//! # Writes
//! ```text
//!   push -> waiting --submit--> in a stripe --all columns done--> published: done
//!              ^                   |
//!              |                   |--one refused, unsent or lost: the rows are abandoned, the blocks written again,
//!              '-- again <---------'    without that server; lost: the span is barred
//!                   |
//!                   '--too few servers, or too often--> Failed
//! ```
//! A stripe counts as a whole or not at all. So a write that is done survives the loss of as many servers as there is
//! parity, also while servers are away: those that are get no block, and no stripe lacks anything when they are back.
//! Nothing is ever written where a lost write may arrive, because its span is never free again; the caller's place is a
//! name only, and no write is [`Ending::Late`].
//!
//! # Reads
//! ```text
//!   push -> waiting -> piece: blocks that follow each other on one server --read, sums right--> done
//!                        |--refused, lost, unsent, lacking, or a wrong sum--> computed, without that server
//!                        |       ^                                              |--all sums right--> done
//!                        |       '--a source refused, lost or wrong: without it-'--too few left----> Failed
//!                        '--late or silent (`hedging`)--> computed, and waited for: the first that is right counts
//! ```
//! While a server is silent, pieces of its are computed without asking it.
//!
//! # Invariants
//! 1. A request is reported once, after the last use of its buffers.
//! 2. A piece and a stripe have a reference to their span from their begin to their end.

#![expect(unsafe_code, reason = "takes the buffers of requests")]

use crate::blocks::BLOCK;
use crate::ends::{Ending, IDLE_END, NbdBuffer, NbdEnd, SERVERS_MAX};
use crate::hedging::Hedging;
use crate::link::{BUFFERS_MAX, BufferTable};
use crate::parity::{COLUMNS_MAX, add, double, sum_of};
use crate::resident::{reserved, touch, zeroed};
use crate::server::ServerEvent;
use crate::set_queue::SetQueue;
use crate::spans::{Layout, NoRows, RowPlace, Rows, RowsFor, SPAN_ROWS, ServerMask};
use crate::striped_parts::{
    Errand, PieceState, ReadPiece, Rebuild, Stripe, StripeBlock, StripedReads, StripedRequest,
    StripedRequests, StripedWrites,
};
use crate::stripes::Stripes;
use crate::sys::{self, Awaited, IoSlice, WaitTerm};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Stripes in flight. What is written meanwhile waits, and becomes one of more blocks.
pub(super) const STRIPES: usize = 4;
/// Rows of each: their parity is in memory while it is written, and stays there for the next one.
const STRIPE_ROWS: u64 = 16;
/// Pieces in flight beyond the depth: requests may have several.
const PIECES_MORE: usize = 32;
/// Of these, pieces on one server, with those that it still has and nobody waits for any more.
const LANE_PIECES: usize = 64;
/// The same of queues of few requests.
const LANE_PIECES_MIN: usize = 16;
/// Pieces that are computed at once.
const REBUILDS: usize = 8;
/// Rows that are computed at once, of a piece.
pub(super) const REBUILD_ROWS: u64 = 2;
/// Requests in flight to a server, with those of stripes and of pieces that are computed.
fn lane_depth(depth: usize) -> usize {
    depth.clamp(LANE_PIECES_MIN, LANE_PIECES) + STRIPES + REBUILDS
}
/// Buffers of such a request.
const LANE_BUFFERS: usize = STRIPE_ROWS as usize;
/// Stripes that a block may be in until its write has failed.
const STRIPES_MAX: u8 = 8;
/// Pause before rows are looked for again that the mover is to make.
const FULL_PAUSE: Duration = Duration::from_millis(1);
pub(super) const BLOCK_LEN: usize = BLOCK as usize;

/// A queue of requests; owned by one thread.
#[derive(Debug)]
pub(crate) struct StripedQueue {
    /// One for each server. Before what they read and write: they are dropped first.
    pub(super) lanes: Box<[SetQueue]>,
    pub(super) stripes: Arc<Stripes>,
    purpose: RowsFor,
    pub(super) requests: StripedRequests,
    pub(super) reads: StripedReads,
    writes: StripedWrites,
    pub(super) hedging: Hedging,
    pub(super) checked: Instant,
    /// Ends at the server that is being looked at.
    news: Vec<NbdEnd>,
}

impl StripedQueue {
    pub(crate) fn new(
        stripes: Arc<Stripes>,
        purpose: RowsFor,
        depth: usize,
    ) -> io::Result<StripedQueue> {
        let Layout { data, parity, .. } = *stripes.layout();
        let pieces = depth + PIECES_MORE;
        let lane_depth = lane_depth(depth);
        let lane = |set| SetQueue::new(Arc::clone(set), lane_depth, LANE_BUFFERS);
        let lanes = stripes.sets().iter().map(lane);
        let lanes = lanes.collect::<io::Result<Box<[_]>>>()?;
        let blocks_max = STRIPE_ROWS as usize * data;
        let stripe = || Stripe {
            rows: None,
            blocks: reserved(blocks_max, StripeBlock::NONE),
            left: 0,
            bad: 0,
            is_failed: false,
            is_late: false,
            errno: 0,
            parity: vec![0; parity * STRIPE_ROWS as usize * BLOCK_LEN].into(),
        };
        let rebuild = || Rebuild {
            piece: None,
            done: 0,
            rows: 0,
            factors: [0; COLUMNS_MAX],
            bad: 0,
            asked: 0,
            is_failed: false,
            pages: vec![0; (data + parity) * REBUILD_ROWS as usize * BLOCK_LEN].into(),
        };
        let request = StripedRequest {
            token: 0,
            is_read: true,
            offset: 0,
            blocks: 0,
            next: 0,
            left: 0,
            errno: 0,
            expected: None,
        };
        let place = RowPlace { span: 0, row: 0, column: 0 };
        let piece = ReadPiece {
            request: 0,
            first: 0,
            count: 0,
            place,
            state: PieceState::Free,
            began: Instant::now(),
            is_sent: false,
            is_hedged: false,
            has_failed: false,
        };
        Ok(StripedQueue {
            news: reserved(lane_depth, IDLE_END),
            lanes,
            purpose,
            hedging: Hedging::default(),
            checked: Instant::now(),
            requests: StripedRequests {
                depth,
                all: vec![request; depth].into(),
                buffers: BufferTable::new(depth, BUFFERS_MAX),
                free: (0..depth).rev().collect(),
                ended: reserved(depth, IDLE_END),
                count: 0,
            },
            reads: StripedReads {
                waiting: reserved(depth, 0).into(),
                pieces: vec![piece; pieces].into(),
                free_pieces: (0..pieces).rev().collect(),
                rebuilds: (0..REBUILDS).map(|_| rebuild()).collect(),
                to_compute: 0,
                page: zeroed(BLOCK_LEN),
            },
            writes: StripedWrites {
                waiting: reserved(depth, 0).into(),
                // Nothing is begun while there is any: no more than was in stripes before.
                again: reserved(STRIPES * blocks_max, StripeBlock::NONE).into(),
                stripes: (0..STRIPES).map(|_| stripe()).collect(),
                for_room: None,
                have_memory: false,
            },
            stripes,
        })
    }

    /// Bytes that such a queue holds. Those of stripes have their memory from the first write on, as readers write
    /// nothing, and those of pieces that are computed from when they are.
    pub(crate) fn bytes(stripes: &Stripes, depth: usize) -> usize {
        let Layout { data, parity, .. } = *stripes.layout();
        let lane_depth = lane_depth(depth);
        let lane = |set| SetQueue::bytes(set, lane_depth, LANE_BUFFERS);
        let lanes: usize = stripes.sets().iter().map(|set| lane(set)).sum();
        let blocks = STRIPE_ROWS as usize * data * size_of::<StripeBlock>();
        let stripe = size_of::<Stripe>() + blocks + parity * STRIPE_ROWS as usize * BLOCK_LEN;
        let rebuild = size_of::<Rebuild>() + (data + parity) * REBUILD_ROWS as usize * BLOCK_LEN;
        let request = size_of::<StripedRequest>() + size_of::<NbdEnd>() + 3 * size_of::<usize>();
        let piece = size_of::<ReadPiece>() + size_of::<usize>();
        size_of::<StripedQueue>()
            + lanes
            + STRIPES * (stripe + blocks)
            + REBUILDS * rebuild
            + depth * request
            + BufferTable::bytes(depth, BUFFERS_MAX)
            + (depth + PIECES_MORE) * piece
            + lane_depth * size_of::<NbdEnd>()
            + BLOCK_LEN
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.requests.count
    }

    /// See [`NbdQueue::push`](crate::NbdQueue::push).
    ///
    /// # Safety
    /// As there.
    pub(crate) unsafe fn push(
        &mut self,
        token: u64,
        is_read: bool,
        offset: u64,
        buffers: impl ExactSizeIterator<Item = NbdBuffer>,
    ) -> bool {
        if self.requests.count == self.requests.depth {
            return false;
        }
        let index = self.requests.free.pop().expect("fewer than the depth are in use");
        assert!(buffers.len() <= BUFFERS_MAX, "{} buffers", buffers.len());
        let mut len = 0;
        let slices = buffers.map(|buffer| {
            assert!(buffer.len.is_multiple_of(BLOCK_LEN), "a buffer of {} bytes", buffer.len);
            len += buffer.len as u64;
            IoSlice::new(buffer.ptr, buffer.len)
        });
        self.requests.buffers.set(index, slices);
        self.stripes.check_range(offset, len);
        let blocks = (len / BLOCK) as usize;
        self.requests.all[index] = StripedRequest {
            token,
            is_read,
            offset,
            blocks,
            next: 0,
            left: 0,
            errno: 0,
            expected: None,
        };
        self.requests.count += 1;
        if is_read {
            self.reads.waiting.push_back(index);
            self.begin_reads();
        } else {
            self.writes.waiting.push_back(index);
            if !std::mem::replace(&mut self.writes.have_memory, true) {
                self.writes.stripes.iter_mut().for_each(|stripe| touch(&mut stripe.parity));
            }
        }
        true
    }

    /// As `push`, of a write of one block that counts only if the block still is at a place to whose span the caller has
    /// a reference.
    ///
    /// # Safety
    /// As for `push`, but that others may write the block at the same time.
    pub(crate) unsafe fn push_move(
        &mut self,
        token: u64,
        block: u64,
        from: NbdBuffer,
        expected: RowPlace,
    ) -> bool {
        // SAFETY: the caller's promise.
        let pushed = unsafe { self.push(token, false, block * BLOCK, std::iter::once(from)) };
        if let Some(index) = self.writes.waiting.back().filter(|_| pushed) {
            self.requests.all[*index].expected = Some(expected);
        }
        pushed
    }

    // Requests.

    fn block_of(&self, request: usize, at: usize) -> IoSlice {
        let slice = self.requests.buffers.from(request, at * BLOCK_LEN).next();
        slice.map_or(IoSlice::NONE, |slice| slice.part(0, BLOCK_LEN))
    }

    /// Blocks of a request are through.
    fn end_blocks(&mut self, index: usize, count: usize, errno: i32) {
        let request = &mut self.requests.all[index];
        request.left -= count;
        if errno != 0 {
            request.errno = errno;
        }
        self.end_if_over(index);
    }

    fn end_if_over(&mut self, index: usize) {
        let StripedRequest { token, is_read, offset, blocks, next, left, errno, .. } =
            self.requests.all[index];
        if next == blocks && left == 0 {
            let ending = if errno == 0 { Ending::Done } else { Ending::Failed(errno) };
            let len = (blocks * BLOCK_LEN) as u32;
            self.requests.ended.push(NbdEnd { token, is_read, offset, len, ending });
            self.requests.free.push(index);
        }
    }

    /// Reports the ends that are known; returns whether there was one.
    pub(crate) fn report(&mut self, done: &mut dyn FnMut(NbdEnd)) -> bool {
        let has_any = !self.requests.ended.is_empty();
        while let Some(end) = self.requests.ended.pop() {
            self.requests.count -= 1;
            done(end);
        }
        has_any
    }

    // Reads.

    fn begin_reads(&mut self) {
        while let Some(index) = self.reads.waiting.front().copied() {
            while self.requests.all[index].next < self.requests.all[index].blocks {
                if !self.begin_piece(index) {
                    return; // No piece is free: the end of one comes back here.
                }
            }
            self.reads.waiting.pop_front();
            self.end_if_over(index);
        }
    }

    /// Begins the next blocks of a read; returns whether there is room for them.
    fn begin_piece(&mut self, index: usize) -> bool {
        let Some(number) = self.reads.free_pieces.last().copied() else { return false };
        let StripedRequest { offset, next: first, blocks, .. } = self.requests.all[index];
        let block = offset / BLOCK + first as u64;
        let spans = &self.stripes.spans;
        let Some(place) = spans.pin(block) else {
            let into = self.block_of(index, first);
            // SAFETY: a buffer of a request that has not ended, of a read.
            unsafe { into.clear() };
            self.requests.all[index].next += 1;
            return true;
        };
        let follows = |n: &usize| {
            let row = place.row + *n as u64;
            row < SPAN_ROWS && spans.is_at(block + *n as u64, RowPlace { row, ..place })
        };
        let most = (blocks - first).min(LANE_BUFFERS);
        let count = 1 + (1..most).take_while(follows).count();
        let began = Instant::now();
        let lane = &self.lanes[self.stripes.layout().server(place.span, place.column)];
        let is_silent = lane.is_silent(began) && self.is_computable(place, count);
        // One that waits keeps others waiting, also of other servers: there are enough under way then.
        if !is_silent && lane.room() <= STRIPES + REBUILDS {
            spans.release(place.span, 1);
            return false;
        }
        self.reads.free_pieces.pop();
        self.reads.pieces[number] = ReadPiece {
            request: index,
            first,
            count,
            place,
            state: PieceState::Free,
            began,
            is_sent: false,
            is_hedged: is_silent,
            has_failed: false,
        };
        let request = &mut self.requests.all[index];
        (request.next, request.left) = (first + count, request.left + count);
        self.hedging.note_read();
        if is_silent {
            self.reads.set_state(number, PieceState::Waiting);
            self.stripes
                .server(self.stripes.layout().server(place.span, place.column))
                .count(ServerEvent::Hedge);
        } else {
            self.send_piece(number);
        }
        true
    }

    /// Asks a piece's server for it.
    pub(super) fn send_piece(&mut self, number: usize) {
        self.reads.set_state(number, PieceState::Read);
        let piece = &mut self.reads.pieces[number];
        piece.is_sent = true;
        let ReadPiece { request, first, count, place, .. } = *piece;
        let mut left = count * BLOCK_LEN;
        let mut list = [NbdBuffer { ptr: std::ptr::null_mut(), len: 0 }; LANE_BUFFERS];
        let mut used = 0;
        for slice in self.requests.buffers.from(request, first * BLOCK_LEN) {
            let len = slice.len().min(left);
            if len == 0 {
                break;
            }
            list[used] = NbdBuffer { ptr: slice.ptr(), len };
            (used, left) = (used + 1, left - len);
        }
        let lane = &mut self.lanes[self.stripes.layout().server(place.span, place.column)];
        let offset = self.stripes.layout().offset(place.span, place.row);
        let token = Errand::Piece(number).token();
        // SAFETY: buffers of a request that has not ended, which belong to this piece of it.
        let pushed = unsafe { lane.push(token, true, offset, list.into_iter().take(used)) };
        assert!(pushed, "the lane had room");
    }

    fn piece_read(&mut self, number: usize, ending: Ending) {
        let piece = &mut self.reads.pieces[number];
        piece.is_sent = false;
        let ReadPiece { request, first, count, place, state, .. } = *piece;
        let is_right = |n: usize| {
            // SAFETY: a buffer of a request that has not ended, and the server is through with it.
            let bytes = unsafe { self.block_of(request, first + n).bytes() };
            self.stripes.is_right(RowPlace { row: place.row + n as u64, ..place }, bytes)
        };
        let is_done = ending == Ending::Done && (0..count).all(is_right);
        let of_piece = |rebuild: &&mut Rebuild| rebuild.piece == Some(number);
        let rebuild = self.reads.rebuilds.iter_mut().find(of_piece);
        if is_done {
            if let Some(rebuild) = rebuild {
                rebuild.piece = None;
            }
            return self.end_piece(number, 0);
        }
        // What was computed may have been written over.
        if let Some(rebuild) = rebuild {
            (rebuild.done, rebuild.is_failed) = (0, true);
        }
        self.reads.pieces[number].has_failed = true;
        if state == PieceState::Read {
            self.reads.set_state(number, PieceState::Waiting);
        }
    }

    pub(super) fn end_piece(&mut self, number: usize, errno: i32) {
        self.reads.set_state(number, PieceState::Free);
        let ReadPiece { request, count, place, is_sent, .. } = self.reads.pieces[number];
        if is_sent {
            let lane = self.stripes.layout().server(place.span, place.column);
            self.lanes[lane].abandon(Errand::Piece(number).token());
        }
        self.stripes.spans.release(place.span, 1);
        self.reads.free_pieces.push(number);
        self.end_blocks(request, count, errno);
    }

    // Writes.

    /// Servers that can be written to.
    fn up(&mut self) -> ServerMask {
        let ready = self
            .lanes
            .iter_mut()
            .enumerate()
            .filter_map(|(at, lane)| lane.is_ready().then_some(at));
        ready.fold(0, |all, at| all | 1 << at)
    }

    /// Blocks for which a span has room that is written now; 0: none can be.
    pub(crate) fn room(&mut self) -> u64 {
        let up = self.up();
        self.stripes.layout().room(up)
    }

    fn begin_stripes(&mut self) {
        loop {
            let unbegun =
                |index: &usize| self.requests.all[*index].blocks - self.requests.all[*index].next;
            let waiting: usize = self.writes.waiting.iter().map(unbegun).sum();
            let blocks =
                if self.writes.again.is_empty() { waiting } else { self.writes.again.len() };
            let Some(at) = self.writes.stripes.iter().position(|stripe| stripe.rows.is_none())
            else {
                return;
            };
            if blocks == 0 {
                self.writes.for_room = None;
                return;
            }
            let up = self.up();
            let bad = self.writes.again.front().map_or(0, |block| block.bad);
            let stripes = Arc::clone(&self.stripes);
            let begin = |span| stripes.begin(span);
            let (purpose, up) = (self.purpose, up & !bad);
            match stripes.spans.take_rows(purpose, blocks as u64, STRIPE_ROWS, up, begin) {
                Ok(rows) => {
                    self.writes.for_room = None;
                    self.begin_stripe(at, rows);
                }
                Err(NoRows::Full) => {
                    stripes.wake_mover();
                    let term = || WaitTerm::within(stripes.stall());
                    if !self.writes.for_room.get_or_insert_with(term).left().is_zero() {
                        return;
                    }
                    self.fail_waiting(libc::ENOSPC);
                }
                Err(NoRows::Unreachable) => self.fail_waiting(libc::ENOTCONN),
            }
        }
    }

    /// Ends what waits for a stripe; what has failed before with its own error.
    fn fail_waiting(&mut self, errno: i32) {
        self.writes.for_room = None;
        if self.writes.again.is_empty() {
            while let Some(index) = self.writes.waiting.pop_front() {
                let request = &mut self.requests.all[index];
                (request.next, request.errno) = (request.blocks, errno);
                self.end_if_over(index);
            }
        }
        while let Some(block) = self.writes.again.pop_front() {
            self.end_blocks(block.request, 1, block.errno);
        }
    }

    /// Takes as many blocks as rows have room for, and sends them.
    fn begin_stripe(&mut self, at: usize, rows: Rows) {
        let most = rows.count as usize * rows.columns.count_ones() as usize;
        let mut blocks = std::mem::take(&mut self.writes.stripes[at].blocks);
        if self.writes.again.is_empty() {
            self.take_waiting(&mut blocks, most);
        } else {
            let count = most.min(self.writes.again.len());
            blocks.extend(self.writes.again.drain(..count));
        }
        let stripe = &mut self.writes.stripes[at];
        stripe.blocks = blocks;
        (stripe.rows, stripe.left, stripe.errno) = (Some(rows), 0, 0);
        (stripe.bad, stripe.is_failed, stripe.is_late) = (0, false, false);
        self.encode(at);
        self.send(at);
    }

    fn take_waiting(&mut self, blocks: &mut Vec<StripeBlock>, most: usize) {
        while blocks.len() < most
            && let Some(index) = self.writes.waiting.front().copied()
        {
            let StripedRequest { offset, next, expected, blocks: count, .. } =
                self.requests.all[index];
            let taken = (count - next).min(most - blocks.len());
            for n in next..next + taken {
                blocks.push(StripeBlock {
                    block: offset / BLOCK + n as u64,
                    request: index,
                    from: self.block_of(index, n),
                    sum: 0,
                    stripes: 0,
                    bad: 0,
                    errno: 0,
                    expected,
                });
            }
            let request = &mut self.requests.all[index];
            (request.next, request.left) = (next + taken, request.left + taken);
            if request.next == count {
                self.writes.waiting.pop_front();
            }
        }
    }

    /// Computes parity and sums.
    fn encode(&mut self, at: usize) {
        let Layout { data, parity, .. } = *self.stripes.layout();
        let stripe = &mut self.writes.stripes[at];
        let (columns, _) = stripe.columns();
        let rows = stripe.rows.map_or(0, |rows| rows.count as usize);
        let (first, second) = stripe.parity.split_at_mut(STRIPE_ROWS as usize * BLOCK_LEN);
        for row in 0..rows {
            let range = row * BLOCK_LEN..(row + 1) * BLOCK_LEN;
            let first = &mut first[range.clone()];
            let mut second = (parity > 1).then(|| &mut second[range]);
            first.fill(0);
            if let Some(second) = &mut second {
                second.fill(0);
            }
            for column in (0..data).rev() {
                if let Some(second) = &mut second {
                    double(second);
                }
                let nth = columns[..data].iter().position(|used| *used == column);
                let block = nth.and_then(|nth| stripe.blocks.get_mut(nth * rows + row));
                // Zeros are there by default: a column that is not used has its number nowhere, or no block.
                let Some(block) = block else { continue };
                // SAFETY: a buffer of a write that has not ended, which nobody changes.
                let bytes = unsafe { block.from.bytes() };
                block.sum = sum_of(bytes);
                add(first, bytes);
                if let Some(second) = &mut second {
                    add(second, bytes);
                }
            }
        }
    }

    fn send(&mut self, at: usize) {
        let layout = *self.stripes.layout();
        let stripe = &mut self.writes.stripes[at];
        let Some(Rows { span, first, count, .. }) = stripe.rows else { return };
        let offset = layout.offset(span, first);
        let (columns, _) = stripe.columns();
        for (column, blocks) in columns.into_iter().zip(stripe.blocks.chunks(count as usize)) {
            let mut list = [NbdBuffer { ptr: std::ptr::null_mut(), len: 0 }; LANE_BUFFERS];
            let mut used = 0;
            for block in blocks {
                let ptr = block.from.ptr();
                let is_next =
                    used > 0 && list[used - 1].ptr.wrapping_add(list[used - 1].len) == ptr;
                if !is_next {
                    list[used] = NbdBuffer { ptr, len: 0 };
                    used += 1;
                }
                list[used - 1].len += BLOCK_LEN;
            }
            stripe.left += 1;
            let lane = &mut self.lanes[layout.server(span, column)];
            let token = Errand::Stripe(at, column).token();
            // SAFETY: buffers of writes that have not ended.
            let pushed = unsafe { lane.push(token, false, offset, list.into_iter().take(used)) };
            assert!(pushed, "a lane has room for all stripes");
        }
        for column in layout.data..layout.columns() {
            let from = (column - layout.data) * STRIPE_ROWS as usize * BLOCK_LEN;
            let ptr = stripe.parity[from..].as_mut_ptr();
            let buffer = NbdBuffer { ptr, len: count as usize * BLOCK_LEN };
            stripe.left += 1;
            let lane = &mut self.lanes[layout.server(span, column)];
            let token = Errand::Stripe(at, column).token();
            // SAFETY: the stripe's own bytes, which nobody changes until it has ended; lanes are dropped first.
            let pushed = unsafe { lane.push(token, false, offset, std::iter::once(buffer)) };
            assert!(pushed, "a lane has room for all stripes");
        }
    }

    fn column_written(&mut self, at: usize, column: usize, ending: Ending) {
        let stripe = &mut self.writes.stripes[at];
        let Some(rows) = stripe.rows else { return };
        stripe.left -= 1;
        let failed = match ending {
            Ending::Done => None,
            Ending::Failed(errno) => Some(errno),
            Ending::Late | Ending::Barred => Some(libc::ECONNRESET),
        };
        stripe.is_late |= matches!(ending, Ending::Late | Ending::Barred);
        if let Some(errno) = failed {
            let server = self.stripes.layout().server(rows.span, column);
            (stripe.is_failed, stripe.errno) = (true, errno);
            stripe.bad |= 1 << server;
        }
        if stripe.left == 0 {
            self.settle(at, rows);
        }
    }

    /// All columns are through: the stripe counts, or it is abandoned.
    fn settle(&mut self, at: usize, rows: Rows) {
        let (columns, _) = self.writes.stripes[at].columns();
        let Rows { span, first, count, .. } = rows;
        let layout = *self.stripes.layout();
        let mut blocks = std::mem::take(&mut self.writes.stripes[at].blocks);
        let used = blocks.len().div_ceil(count as usize);
        let data = blocks.chunks(count as usize).map(|of| of.len() as u64);
        let parity = (layout.data..layout.columns()).map(|column| (column, count));
        // A server that began anew after it had written. (What it was not sent of the rows it may lack.)
        let is_lost = columns
            .into_iter()
            .zip(data)
            .chain(parity)
            .any(|(column, rows)| self.stripes.lacks(span, column, first, rows));
        let Stripe { is_failed, is_late, bad, errno, .. } = self.writes.stripes[at];
        if is_failed || is_lost {
            if is_late {
                self.stripes.spans.bar(span);
            }
            for mut block in blocks.drain(..) {
                (block.stripes, block.bad) = (block.stripes + 1, block.bad | bad);
                block.errno = if errno == 0 { libc::EIO } else { errno };
                if block.stripes == STRIPES_MAX {
                    self.end_blocks(block.request, 1, block.errno);
                } else {
                    self.writes.again.push_back(block);
                }
            }
        } else {
            let spans = &self.stripes.spans;
            for (row, column) in
                (0..count).flat_map(|row| (0..layout.data).map(move |of| (row, of)))
            {
                let nth = columns[..used].iter().position(|used| *used == column);
                let block = nth.and_then(|nth| blocks.get(nth * count as usize + row as usize));
                let place = RowPlace { span, row: first + row, column };
                spans.record(place, block.map(|block| (block.block, block.sum)));
            }
            for (n, block) in blocks.drain(..).enumerate() {
                let (column, row) = (columns[n / count as usize], (n % count as usize) as u64);
                let place = RowPlace { span, row: first + row, column };
                self.stripes.spans.publish(block.block, place, block.expected);
                self.end_blocks(block.request, 1, 0);
            }
        }
        (self.writes.stripes[at].blocks, self.writes.stripes[at].rows) = (blocks, None);
        self.stripes.spans.release(span, 1);
    }

    // Servers.

    /// Sends what was pushed.
    pub(crate) fn submit(&mut self) {
        loop {
            self.begin_rebuilds();
            self.begin_reads();
            self.begin_stripes();
            let mut has_news = false;
            for at in 0..self.lanes.len() {
                let lane = &mut self.lanes[at];
                lane.submit();
                has_news |= lane.report(&mut |end| self.news.push(end));
                while let Some(NbdEnd { token, ending, .. }) = self.news.pop() {
                    match Errand::of(token) {
                        Errand::Piece(number) => self.piece_read(number, ending),
                        Errand::Rebuild(index, column) => self.column_read(index, column, ending),
                        Errand::Stripe(stripe, column) => {
                            self.column_written(stripe, column, ending);
                        }
                    }
                }
            }
            if !has_news {
                return;
            }
        }
    }

    /// Receives from the connections with a bit in `ready`, of those of `awaited`, and looks at the health of all.
    pub(crate) fn look(&mut self, mut ready: u32) {
        for lane in &mut self.lanes {
            if lane.awaited().next().is_some() {
                if ready & 1 == 1 {
                    lane.pump();
                }
                ready >>= 1;
            }
            lane.check();
        }
        // First: a read whose answer has come is not late. What is asked for then waits for the caller's `submit`.
        self.submit();
        self.hedge();
    }

    /// See [`SetQueue::look_every`].
    pub(crate) fn look_every(&self) -> Option<Duration> {
        let lanes = self.lanes.iter().filter_map(SetQueue::look_every);
        lanes.chain(self.writes.for_room.as_ref().map(|_| FULL_PAUSE)).min()
    }

    /// The connections with requests under way.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = Awaited> {
        self.lanes.iter().flat_map(SetQueue::awaited)
    }

    /// Waits for a server, no longer than the health of connections may wait.
    pub(crate) fn wait_once(&mut self) -> io::Result<()> {
        self.submit();
        let mut awaited = [Awaited { fd: -1, write: false }; SERVERS_MAX];
        let count = awaited.iter_mut().zip(self.awaited()).map(|(to, link)| *to = link).count();
        if self.requests.ended.is_empty() {
            let timeout = self.look_every().unwrap_or(Duration::ZERO);
            let ready = sys::wait(&awaited[..count], timeout)?;
            self.look(ready);
        }
        Ok(())
    }
}

impl Drop for StripedQueue {
    fn drop(&mut self) {
        let mut term = WaitTerm::within(self.stripes.stall());
        while self.requests.count > 0 && !term.left().is_zero() {
            // A failure to wait shows in the time that passes.
            let _ = self.wait_once();
            self.report(&mut |_| ());
        }
        // The spans of what is still under way keep their references: they are never free again.
    }
}

// The array of columns is as long as the longest row.
const _: () = assert!(COLUMNS_MAX <= SERVERS_MAX && COLUMNS_MAX <= ServerMask::BITS as usize);
