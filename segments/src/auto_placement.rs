//! Segments placed by how often they are read, within a budget of local memory.

use crate::column_chunk::Segment;
use crate::migrator::{Migration, Migrator, Movable};
use crate::plan::{Candidate, plan};
use farheap::{ByteCount, Tier};
use std::fmt;
use std::sync::atomic::AtomicBool;

/// Places segments: those that are read most lie in local memory, as many as a budget holds, the others
/// on their far tiers.
///
/// [`Segment::read`] counts one of four reads of a thread, on average; nothing else of a reader's is looked at. Which of
/// its values a reader uses is not known: a segment counts as read whole. [`rebalance`](AutoPlacement::rebalance)
/// makes a plan of the counts, and has a [`Migrator`] do the moves while readers go on. A program calls it every
/// few seconds, from a thread of its own; nothing moves between two calls. Earlier counts weigh half as
/// much with each call.
///
/// # Examples
/// ```
/// use farheap_segments::{AutoPlacement, Segment};
/// use farheap::{ByteCount, Heap, Tier};
///
/// let heap = match Heap::builder().parse("far_limit:8MiB,capacity:64MiB")?.start() {
///     Ok(heap) => heap,
///     Err(error) => {
///         println!("{error}"); // Says how to allow userfaultfd.
///         return Ok(());
///     }
/// };
/// let far = |salt| Segment::collect(Tier::FAR, (0..100_000_u32).map(move |row| row ^ salt));
/// let (prices, comments) = (far(1)?, far(2)?);
/// let mut placement = AutoPlacement::new(ByteCount::kib(512));
/// placement.add(&prices, Tier::FAR).add(&comments, Tier::FAR);
///
/// for row in 0..10_000 {
///     assert_eq!(prices.read()[row], row as u32 ^ 1);
/// }
/// let moved = placement.rebalance();
/// assert_eq!((moved.moved(), moved.error()), (1, None));
/// assert_eq!((prices.tier(), comments.tier()), (Tier::LOCAL, Tier::FAR));
/// # drop(placement);
/// drop((prices, comments));
/// heap.shutdown()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AutoPlacement<'a> {
    budget: ByteCount,
    groups: Vec<Group<'a>>,
    rate: ByteCount,
    cancel: Option<&'a AtomicBool>,
}

/// Segments that move together.
struct Group<'a> {
    segments: Vec<&'a dyn Movable>,
    /// Where they lie when they are not local.
    far: Tier,
    bytes: ByteCount,
    /// Counted reads, and these times the bytes of the segment that was read; halved with each plan.
    samples: f64,
    read_bytes: f64,
}

impl<'a> AutoPlacement<'a> {
    /// Places nothing yet. The budget is for the values of the segments that are added, as far as they are local.
    #[must_use]
    pub fn new(budget: ByteCount) -> AutoPlacement<'a> {
        AutoPlacement { budget, groups: Vec::new(), rate: ByteCount::ZERO, cancel: None }
    }

    /// Adds a segment that is placed by itself, and the tier on which it lies when it is not local.
    pub fn add<T: Copy + Send + Sync + 'a>(
        &mut self,
        segment: &'a Segment<T>,
        far: Tier,
    ) -> &mut AutoPlacement<'a> {
        self.add_together(std::iter::once(segment), far)
    }

    /// Adds segments that are local all together or not at all, such as those of a column.
    pub fn add_together<T: Copy + Send + Sync + 'a>(
        &mut self,
        segments: impl IntoIterator<Item = &'a Segment<T>>,
        far: Tier,
    ) -> &mut AutoPlacement<'a> {
        let segments: Vec<_> =
            segments.into_iter().map(|segment| segment as &dyn Movable).collect();
        let bytes = ByteCount(segments.iter().map(|segment| segment.bytes().0).sum());
        self.groups.push(Group { segments, far, bytes, samples: 0.0, read_bytes: 0.0 });
        self
    }

    /// Moves at most this many bytes a second on average; zero, the default, is no bound.
    pub fn rate(&mut self, bytes_a_second: ByteCount) -> &mut AutoPlacement<'a> {
        self.rate = bytes_a_second;
        self
    }

    /// Stops moving soon after `cancel` is set.
    pub fn cancelled_by(&mut self, cancel: &'a AtomicBool) -> &mut AutoPlacement<'a> {
        self.cancel = Some(cancel);
        self
    }

    /// Bytes of the segments that are local at present.
    #[must_use]
    pub fn local_bytes(&self) -> ByteCount {
        let segments = self.groups.iter().flat_map(|group| &group.segments);
        let local = segments.filter(|segment| segment.tier() == Tier::LOCAL);
        ByteCount(local.map(|segment| segment.bytes().0).sum())
    }

    /// Plans by the reads that were counted, and moves what is to lie elsewhere. What makes room moves
    /// first, so the budget also holds while it moves, and when it ends early: with an error,
    /// what has not moved stays where it was, and the next call plans anew. As with [`Migrator::run`], the
    /// calling thread must hold no [`Reading`](super::Reading) of the segments.
    pub fn rebalance(&mut self) -> Migration {
        let candidates: Vec<Candidate> = self.groups.iter_mut().map(Group::look).collect();
        let is_local = plan(&candidates, self.budget);
        let mut migrator = Migrator::new();
        migrator.rate(self.rate).write_out();
        if let Some(cancel) = self.cancel {
            migrator.cancelled_by(cancel);
        }
        for to_local in [false, true] {
            let planned = self.groups.iter().zip(&is_local);
            for (group, _) in planned.filter(|(_, is_local)| **is_local == to_local) {
                let to = if to_local { Tier::LOCAL } else { group.far };
                for segment in &group.segments {
                    // A tier that the program has chosen itself is left at that.
                    if (segment.tier() == Tier::LOCAL) != to_local {
                        migrator.add_any(*segment, to);
                    }
                }
            }
        }
        migrator.run(|_| {})
    }
}

impl Group<'_> {
    /// Takes in what was counted since the last plan.
    fn look(&mut self) -> Candidate {
        /// Weight of a plan's counts in the next.
        const MEMORY: f64 = 0.5;
        (self.samples, self.read_bytes) = (self.samples * MEMORY, self.read_bytes * MEMORY);
        for segment in &self.segments {
            let visits = f64::from(segment.take_visits());
            self.samples += visits;
            self.read_bytes += visits * segment.bytes().0 as f64;
        }
        let mut placements = self.segments.iter().map(|segment| segment.tier());
        Candidate {
            bytes: self.bytes,
            heat: self.read_bytes / (self.bytes.0.max(1) as f64),
            samples: self.samples,
            is_local: placements.all(|placement| placement == Tier::LOCAL),
        }
    }
}

impl fmt::Debug for AutoPlacement<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AutoPlacement")
            .field("budget", &self.budget)
            .field("groups", &self.groups.len())
            .finish_non_exhaustive()
    }
}
