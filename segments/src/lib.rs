//! Segments: immutable arrays that move from one tier to another while they are read.
//!
//! A column store cuts its columns into chunks that are never changed once they are full (Hyrise calls
//! them segments), and decides for each where it lies. A [`Segment`] is such a chunk. It
//! [migrates](Segment::migrate) in three steps: its values are copied with the destination's allocator,
//! the segment is switched to the copy atomically, and the old copy is freed when its last reader leaves.
//! Readers never wait, and never see half a segment. A [`Migrator`] moves many.
//!
//! ```text
//!   readers:    read() ---- values ----> drop          always one copy, the whole time
//!   migrate():  copy to `to` --> switch --> [readers of the old copy leave] --> free it
//!                    '-- no memory, cancelled: the copy is freed, the segment stays where it was
//! ```
//! The switch is `arc-swap`'s, and not an epoch: an epoch frees the old copy when every reader of
//! anything has moved on, at some later time, and migrations are done to make room. Counted readers
//! free it with the last of them, and the migrator can wait for that, so that no more than one segment
//! is there twice. What it frees itself goes back to the kernel at once: kept for reuse, it was a second
//! segment of memory.
//!
//! **Rate.** The tier that is read is asked for the next 8 MiB all the time, those of the next segment
//! included. Where [written](Migrator::write_out), whole chunks of 2 MiB go to the device past the tier's
//! memory, the rest behind the copying, and local memory comes by huge pages. (`cargo bench -p farheap-lab --bench tiers -- migrate`.)
//!
//! **Placement.** Where each segment lies is the program's decision. An [`AutoPlacement`] takes it over for the
//! segments that it is given: by counted reads, within a budget of local memory, segment by segment
//! or column by column. (`cargo run --release -p farheap-segments --example tiers -- --auto 20%`.)
//!
//! The three steps are those of *Separated Allocator Metadata in Disaggregated In-Memory Databases:
//! Friend or Foe?* for Hyrise.

mod auto_placement;
mod column_chunk;
mod error;
mod migrator;
mod plan;
mod stream;
mod sys;
mod values;
mod visits;

pub use auto_placement::AutoPlacement;
pub use column_chunk::{Reading, Segment};
pub use error::SegmentError;
pub use migrator::{Migration, Migrator, Progress};
