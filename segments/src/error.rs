//! Why a segment stays where it is.

use farheap::{ByteCount, Placement};

/// Why a segment was not made, or stays where it is.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The destination has no memory for it: its device is full or failing, its tier has been shut down,
    /// or the process has none left.
    #[error("no memory for a segment of {bytes} in {to:?}; the segment stays where it was")]
    NoMemory {
        /// Bytes of the segment.
        bytes: ByteCount,
        /// Where it was to go.
        to: Placement,
    },
    /// The migration was cancelled before the segment was copied.
    #[error("the migration was cancelled; the segment stays where it was")]
    Cancelled,
}
