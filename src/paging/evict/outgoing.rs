//! Pages on their way out of a region.

use crate::base::units::{PageId, SlotId};
use crate::paging::page::word::FrameId;
use crate::paging::pager::slot_store::ContentHash;
use std::collections::VecDeque;
use std::time::Instant;

/// Pages on their way out.
pub(super) struct Outgoing {
    /// Frames whose pages cool, oldest first: the standby line.
    pub(super) cooling: VecDeque<FrameId>,
    /// How many of them wait, at most.
    pub(super) line: usize,
    /// Of these, the first ones, which do not wait.
    pub(super) due: usize,
    /// Chunks in a row that were in use, and came back from the line.
    pub(super) given_back: u32,
    /// Pages that have joined the line since those were taken out of it that another hand has.
    pub(super) joined: usize,
    /// Frames whose pages left by another hand that is not finished with them, and the slots that those were being
    /// written to.
    pub(super) borrowed: VecDeque<(FrameId, Option<SlotId>)>,
    /// Pages that have left, and frames that nobody uses any more: until the next `release`.
    pub(super) left: Vec<PageId>,
    pub(super) freed: Vec<FrameId>,
    /// Per frame: when its page was chosen.
    pub(super) chosen: Vec<Instant>,
    /// Per frame: the hash of what is being written.
    pub(super) hashes: Vec<ContentHash>,
}

impl Outgoing {
    /// Bytes for a frame.
    pub(super) const FRAME_BYTES: usize = size_of::<FrameId>() // cooling
        + size_of::<(FrameId, Option<SlotId>)>() // borrowed
        + size_of::<PageId>() // left
        + size_of::<FrameId>() // freed
        + size_of::<Instant>() // chosen
        + size_of::<ContentHash>();

    /// Nothing, with room for what can be in `frames`.
    pub(super) fn new(frames: usize) -> Outgoing {
        Outgoing {
            cooling: VecDeque::with_capacity(frames),
            line: 0,
            due: 0,
            given_back: 0,
            joined: 0,
            borrowed: VecDeque::with_capacity(frames),
            left: Vec::with_capacity(frames),
            freed: Vec::with_capacity(frames),
            chosen: vec![Instant::now(); frames],
            hashes: vec![0; frames],
        }
    }

    /// Nothing in the line waits: all of it was asked for.
    pub(super) fn make_due(&mut self) {
        self.due = self.cooling.len();
    }
}
