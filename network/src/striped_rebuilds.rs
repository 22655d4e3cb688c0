//! Pieces of reads that are computed: whose server has failed, is late or is silent.
//!
//! Their sources are read as other pieces are, some rows at a time; a source that fails or whose bytes are wrong is left
//! out from then on, as long as the others suffice. Which pieces are computed although their servers may
//! answer is up to [`hedging`](crate::hedging): the first of both that is there counts.

#![expect(unsafe_code, reason = "lends pages of its own, and fills the buffers of requests")]

use crate::ends::{Ending, NbdBuffer};
use crate::parity::{COLUMNS_MAX, add_times};
use crate::server::ServerEvent;
use crate::spans::{RowPlace, ServerMask};
use crate::striped_parts::{Errand, PieceState, ReadPiece, Rebuild};
use crate::striped_queue::{BLOCK_LEN, REBUILD_ROWS, STRIPES, StripedQueue};
use crate::stripes::wrong_parity;
use std::time::Instant;

impl StripedQueue {
    /// Columns of a span whose servers are silent.
    fn silent(&self, span: u64, now: Instant) -> ServerMask {
        let layout = self.stripes.layout();
        let is_silent = |column: &usize| self.lanes[layout.server(span, *column)].is_silent(now);
        (0..layout.columns()).filter(is_silent).fold(0, |all, column| all | 1 << column)
    }

    /// True if blocks can be computed from servers that are not silent.
    pub(super) fn is_computable(&self, place: RowPlace, rows: usize) -> bool {
        let bad = self.silent(place.span, Instant::now()) | 1 << place.column;
        self.stripes.recipe(place, rows as u64, bad).is_some()
    }

    /// Lets pieces be computed whose servers take long, and leaves out what silent ones were asked for that.
    pub(super) fn hedge(&mut self) {
        let now = Instant::now();
        let every = self.stripes.sets()[0].look_every();
        if self.requests.count == 0 || now - self.checked < every {
            return;
        }
        self.checked = now;
        let layout = *self.stripes.layout();
        for number in 0..self.reads.pieces.len() {
            let ReadPiece { place, state, began, is_hedged, count, .. } = self.reads.pieces[number];
            if state != PieceState::Read || is_hedged {
                continue;
            }
            let at = layout.server(place.span, place.column);
            let (is_silent, server) = (self.lanes[at].is_silent(now), self.stripes.server(at));
            let is_due = is_silent || self.hedging.is_due(server, began, now);
            if is_due && self.is_computable(place, count) {
                self.reads.set_state(number, PieceState::Waiting);
                self.reads.pieces[number].is_hedged = true;
                self.hedging.note_requests(if is_silent { 0 } else { layout.data as u64 });
                server.count(ServerEvent::Hedge);
            }
        }
        for index in 0..self.reads.rebuilds.len() {
            self.leave_silent_out(index, now);
        }
    }

    /// Waits no more for the columns of a rebuild whose servers are silent, if it can do without them.
    fn leave_silent_out(&mut self, index: usize, now: Instant) {
        let &Rebuild { piece, asked, bad, .. } = &self.reads.rebuilds[index];
        let Some(number) = piece else { return };
        let ReadPiece { place, count, .. } = self.reads.pieces[number];
        let silent = self.silent(place.span, now);
        if silent & asked == 0 || self.stripes.recipe(place, count as u64, bad | silent).is_none() {
            return;
        }
        for column in (0..COLUMNS_MAX).filter(|column| (silent & asked) >> column & 1 == 1) {
            let lane = self.stripes.layout().server(place.span, column);
            self.lanes[lane].abandon(Errand::Rebuild(index, column).token());
        }
        let rebuild = &mut self.reads.rebuilds[index];
        (rebuild.asked, rebuild.is_failed) = (asked & !silent, true);
        if rebuild.asked == 0 {
            self.begin_rows(index);
        }
    }

    pub(super) fn begin_rebuilds(&mut self) {
        while self.reads.to_compute > 0 {
            let is_waiting = |piece: &ReadPiece| piece.state == PieceState::Waiting;
            let Some(number) = self.reads.pieces.iter().position(is_waiting) else { return };
            let is_free = |rebuild: &Rebuild| rebuild.piece.is_none() && rebuild.asked == 0;
            let Some(index) = self.reads.rebuilds.iter().position(is_free) else { return };
            self.reads.set_state(number, PieceState::Rebuilt);
            let column = self.reads.pieces[number].place.column;
            let rebuild = &mut self.reads.rebuilds[index];
            (rebuild.piece, rebuild.done, rebuild.bad) = (Some(number), 0, 1 << column);
            self.begin_rows(index);
        }
    }

    /// Reads what the next rows of a piece are computed from.
    fn begin_rows(&mut self, index: usize) {
        let rebuild = &self.reads.rebuilds[index];
        let number = rebuild.piece.expect("it has begun");
        let piece = self.reads.pieces[number];
        let RowPlace { span, column, .. } = piece.place;
        let row = piece.place.row + rebuild.done as u64;
        // The same columns for all of them.
        let present = self.stripes.present(span, row);
        let is_alike = |n: &u64| self.stripes.present(span, row + n) == present;
        let most = ((piece.count - rebuild.done) as u64).min(REBUILD_ROWS);
        let rows = 1 + (1..most).take_while(is_alike).count() as u64;
        let layout = *self.stripes.layout();
        // Reads that nobody waits for any more may have all places of a server but those of stripes.
        let is_full = |column: &usize| self.lanes[layout.server(span, *column)].room() <= STRIPES;
        let full = (0..layout.columns()).filter(is_full).fold(0, |all, column| all | 1 << column);
        let place = RowPlace { span, row, column };
        let bad = rebuild.bad | full;
        let without_silent =
            self.stripes.recipe(place, rows, bad | self.silent(span, Instant::now()));
        let Some(factors) = without_silent.or_else(|| self.stripes.recipe(place, rows, bad)) else {
            self.reads.rebuilds[index].piece = None;
            return self.do_without_rebuild(number);
        };
        let used = (0..layout.columns()).filter(|column| factors[*column] > 0);
        let rebuild = &mut self.reads.rebuilds[index];
        (rebuild.factors, rebuild.rows, rebuild.is_failed) = (factors, rows as usize, false);
        rebuild.asked = used.clone().fold(0, |all, column| all | 1 << column);
        for column in used {
            let pages = &mut rebuild.pages[column * REBUILD_ROWS as usize * BLOCK_LEN..];
            let buffer = NbdBuffer { ptr: pages.as_mut_ptr(), len: rows as usize * BLOCK_LEN };
            let token = Errand::Rebuild(index, column).token();
            let lane = &mut self.lanes[layout.server(span, column)];
            // SAFETY: pages of the rebuild, which nobody uses until all columns are there; lanes are dropped first.
            let pushed = unsafe {
                lane.push(token, true, layout.offset(span, row), std::iter::once(buffer))
            };
            assert!(pushed, "the lane had room");
        }
    }

    /// Goes on with a piece that cannot be computed.
    fn do_without_rebuild(&mut self, number: usize) {
        let piece = self.reads.pieces[number];
        let lane = self.stripes.layout().server(piece.place.span, piece.place.column);
        if piece.is_sent {
            self.reads.set_state(number, PieceState::Read);
        } else if !piece.has_failed && self.lanes[lane].room() > STRIPES {
            self.send_piece(number);
        } else {
            self.end_piece(number, libc::EIO);
        }
    }

    pub(super) fn column_read(&mut self, index: usize, column: usize, ending: Ending) {
        let rebuild = &mut self.reads.rebuilds[index];
        rebuild.asked &= !(1 << column);
        if ending != Ending::Done {
            (rebuild.is_failed, rebuild.bad) = (true, rebuild.bad | 1 << column);
        }
        let Some(number) = rebuild.piece.filter(|_| rebuild.asked == 0) else { return };
        if !rebuild.is_failed {
            self.compute_rows(index);
        }
        let rebuild = &mut self.reads.rebuilds[index];
        if rebuild.done < self.reads.pieces[number].count {
            return self.begin_rows(index);
        }
        rebuild.piece = None;
        self.end_piece(number, 0);
    }

    /// Computes rows of which all columns have come; one that is wrong is not used any more.
    fn compute_rows(&mut self, index: usize) {
        let rebuild = &mut self.reads.rebuilds[index];
        let number = rebuild.piece.expect("it has begun");
        let piece = &mut self.reads.pieces[number];
        let layout = *self.stripes.layout();
        // Or part of what its server sends would be written over these rows, and the others be there first.
        if rebuild.done + rebuild.rows < piece.count && std::mem::take(&mut piece.is_sent) {
            let lane = layout.server(piece.place.span, piece.place.column);
            self.lanes[lane].abandon(Errand::Piece(number).token());
        }
        let piece = *piece;
        for n in 0..rebuild.rows {
            let row = piece.place.row + (rebuild.done + n) as u64;
            self.reads.page.fill(0);
            for (column, factor) in rebuild.factors.into_iter().enumerate().filter(|of| of.1 > 0) {
                let from = (column * REBUILD_ROWS as usize + n) * BLOCK_LEN;
                let bytes = &rebuild.pages[from..][..BLOCK_LEN];
                if !self.stripes.is_right(RowPlace { row, column, ..piece.place }, bytes) {
                    rebuild.bad |= 1 << column;
                    return;
                }
                add_times(&mut self.reads.page, factor, bytes);
            }
            if !self.stripes.is_right(RowPlace { row, ..piece.place }, &self.reads.page) {
                rebuild.bad |= wrong_parity(&rebuild.factors, &layout);
                return;
            }
            let at = (piece.first + rebuild.done + n) * BLOCK_LEN;
            if let Some(into) = self.requests.buffers.from(piece.request, at).next() {
                // SAFETY: a buffer of a read that has not ended; no server has it any more.
                unsafe { into.copy_from(&self.reads.page) };
            }
        }
        rebuild.done += rebuild.rows;
        let server = self.stripes.server(layout.server(piece.place.span, piece.place.column));
        (0..rebuild.rows).for_each(|_| server.count(ServerEvent::Rebuild));
    }
}
