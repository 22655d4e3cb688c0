//! Why a segment stays where it is.

use farheap::{ByteCount, Tier};
use std::io;

/// Why a segment was not made, or stays where it is.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SegmentError {
    /// The destination has no memory for it: its device is full or failing, its tier has been shut down,
    /// or the process has none left.
    #[error(
        "no memory for a segment of {bytes} in {to:?}; the segment stays where it was: free data there first"
    )]
    NoMemory {
        /// Bytes of the segment.
        bytes: ByteCount,
        /// Where it was to go.
        to: Tier,
    },
    /// The migration was cancelled before the segment was copied.
    #[error("the migration was cancelled; the segment stays where it was: migrate it again")]
    Cancelled,
}

impl SegmentError {
    /// Returns what kind of failure this is, in std's words.
    #[must_use]
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            SegmentError::NoMemory { .. } => io::ErrorKind::OutOfMemory,
            SegmentError::Cancelled => io::ErrorKind::Interrupted,
        }
    }
}

impl From<SegmentError> for io::Error {
    fn from(error: SegmentError) -> io::Error {
        io::Error::new(error.kind(), error)
    }
}
