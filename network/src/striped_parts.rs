//! State of a queue with parity: requests, pieces of reads, stripes of writes, and rows that are computed.

use crate::ends::NbdEnd;
use crate::link::BufferTable;
use crate::parity::COLUMNS_MAX;
use crate::spans::{RowPlace, Rows, ServerMask};
use crate::sys::{IoSlice, WaitTerm};
use std::collections::VecDeque;
use std::time::Instant;

/// Purpose of a request to a server, as its token.
///
/// 63..16 number | 15..8 column | 7..0 kind
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Errand {
    Piece(usize),
    Stripe(usize, usize),
    Rebuild(usize, usize),
}

impl Errand {
    pub(super) fn token(self) -> u64 {
        let (kind, number, column) = match self {
            Errand::Piece(number) => (0, number, 0),
            Errand::Stripe(number, column) => (1, number, column),
            Errand::Rebuild(number, column) => (2, number, column),
        };
        (number as u64) << 16 | (column as u64) << 8 | kind
    }

    pub(super) fn of(token: u64) -> Errand {
        let (number, column) = ((token >> 16) as usize, (token >> 8 & 0xff) as usize);
        match token & 0xff {
            0 => Errand::Piece(number),
            1 => Errand::Stripe(number, column),
            _ => Errand::Rebuild(number, column),
        }
    }
}

/// A request between `push` and its end.
#[derive(Clone, Copy, Debug)]
pub(super) struct StripedRequest {
    pub(super) token: u64,
    pub(super) is_read: bool,
    pub(super) offset: u64,
    pub(super) blocks: usize,
    /// Blocks that were begun.
    pub(super) next: usize,
    /// Of these, blocks that are not through.
    pub(super) left: usize,
    pub(super) errno: i32,
    /// A write counts only if its block still is there.
    pub(super) expected: Option<RowPlace>,
}

/// Blocks of a read that are on one server, one after the other.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadPiece {
    pub(super) request: usize,
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) place: RowPlace,
    pub(super) state: PieceState,
    pub(super) began: Instant,
    /// The server has it.
    pub(super) is_sent: bool,
    /// It was computed, or is to be, because the server is slow.
    pub(super) is_hedged: bool,
    /// The server has failed.
    pub(super) has_failed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceState {
    Free,
    /// Waits for the server.
    Read,
    /// Waits for a rebuild.
    Waiting,
    Rebuilt,
}

/// A block that is being written.
#[derive(Clone, Copy, Debug)]
pub(super) struct StripeBlock {
    pub(super) block: u64,
    pub(super) request: usize,
    pub(super) from: IoSlice,
    pub(super) sum: u32,
    pub(super) stripes: u8,
    /// Servers that have failed it.
    pub(super) bad: ServerMask,
    pub(super) errno: i32,
    pub(super) expected: Option<RowPlace>,
}

impl StripeBlock {
    /// Fills places of blocks that there are not yet.
    pub(super) const NONE: StripeBlock = StripeBlock {
        block: 0,
        request: 0,
        from: IoSlice::NONE,
        sum: 0,
        stripes: 0,
        bad: 0,
        errno: 0,
        expected: None,
    };
}

/// Blocks on their way to rows.
#[derive(Debug)]
pub(super) struct Stripe {
    /// `None`: it is free.
    pub(super) rows: Option<Rows>,
    /// Column by column.
    pub(super) blocks: Vec<StripeBlock>,
    /// Requests to servers under way.
    pub(super) left: usize,
    pub(super) bad: ServerMask,
    pub(super) is_failed: bool,
    pub(super) is_late: bool,
    pub(super) errno: i32,
    pub(super) parity: Box<[u8]>,
}

impl Stripe {
    /// The data columns that it uses, in order.
    pub(super) fn columns(&self) -> ([usize; COLUMNS_MAX], usize) {
        let mut columns = [0; COLUMNS_MAX];
        let usable = self.rows.map_or(0, |rows| rows.columns);
        let found = (0..COLUMNS_MAX).filter(|column| usable >> column & 1 == 1);
        let count = columns.iter_mut().zip(found).map(|(to, column)| *to = column).count();
        (columns, count)
    }
}

/// Rows of a piece that are being computed.
#[derive(Debug)]
pub(super) struct Rebuild {
    /// `None`: nobody waits for it; it is free once nothing is asked for.
    pub(super) piece: Option<usize>,
    /// Blocks of the piece that are done.
    pub(super) done: usize,
    /// Rows under way.
    pub(super) rows: usize,
    pub(super) factors: [u8; COLUMNS_MAX],
    pub(super) bad: ServerMask,
    /// Columns that are being read.
    pub(super) asked: ServerMask,
    pub(super) is_failed: bool,
    /// Column by column.
    pub(super) pages: Box<[u8]>,
}

/// Requests, by number.
#[derive(Debug)]
pub(super) struct StripedRequests {
    pub(super) depth: usize,
    pub(super) all: Box<[StripedRequest]>,
    pub(super) buffers: BufferTable,
    pub(super) free: Vec<usize>,
    /// Ends that nobody has taken.
    pub(super) ended: Vec<NbdEnd>,
    /// Requests whose end nobody has taken.
    pub(super) count: usize,
}

/// Reads under way.
#[derive(Debug)]
pub(super) struct StripedReads {
    /// Requests of which blocks were not begun.
    pub(super) waiting: VecDeque<usize>,
    pub(super) pieces: Box<[ReadPiece]>,
    pub(super) free_pieces: Vec<usize>,
    pub(super) rebuilds: Box<[Rebuild]>,
    /// Pieces that wait for a rebuild.
    pub(super) to_compute: usize,
    /// A block that is being computed.
    pub(super) page: Box<[u8]>,
}

impl StripedReads {
    pub(super) fn set_state(&mut self, number: usize, state: PieceState) {
        let piece = &mut self.pieces[number];
        self.to_compute -= usize::from(piece.state == PieceState::Waiting);
        self.to_compute += usize::from(state == PieceState::Waiting);
        piece.state = state;
    }
}

/// Writes under way.
#[derive(Debug)]
pub(super) struct StripedWrites {
    /// Requests of which blocks were not begun.
    pub(super) waiting: VecDeque<usize>,
    /// Blocks that are to be written again.
    pub(super) again: VecDeque<StripeBlock>,
    pub(super) stripes: Box<[Stripe]>,
    /// The wait for free rows, while there are none.
    pub(super) for_room: Option<WaitTerm>,
    /// The bytes of stripes were touched.
    pub(super) have_memory: bool,
}
