//! A segment: its values, its readers, its migration.

use crate::error::SegmentError;
use crate::stream::{ReadAhead, Rest, WriteBehind, tier_of};
use crate::sys;
use crate::values::Values;
use crate::visits::Visits;
use arc_swap::{ArcSwap, Guard};
use farheap::{ByteCount, Heap, Scope, Tier};
use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, PoisonError};

/// One copy of a segment's values.
pub(super) struct Chunk<T> {
    values: Values<T>,
}

/// An immutable array that can move to another tier while others read it; see the [crate's page](crate).
///
/// Memory safety rests on `T: Copy`: values are copied by their bytes, and never dropped.
///
/// # Examples
/// ```
/// use farheap_segments::Segment;
/// use farheap::{Heap, Tier};
///
/// let heap = match Heap::builder().parse("far_limit:8MiB,capacity:64MiB")?.start() {
///     Ok(heap) => heap,
///     Err(error) => {
///         println!("{error}"); // Says how to allow userfaultfd.
///         return Ok(());
///     }
/// };
/// let prices = Segment::collect(Tier::LOCAL, (0..65_536).map(|row| row * 3))?;
/// let before = prices.read();
/// prices.migrate(Tier::FAR)?;
/// assert_eq!((before[7], prices.read()[7]), (21, 21));
/// assert_eq!(prices.tier(), Tier::FAR);
/// drop((before, prices));
/// heap.shutdown()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Segment<T> {
    current: ArcSwap<Chunk<T>>,
    /// Held by the thread that migrates it.
    migrating: Mutex<()>,
    visits: Visits,
}

impl<T: Copy> Chunk<T> {
    /// Frees the old copy of a segment if no reader has it; else its last reader frees it.
    pub(super) fn leave(this: Arc<Chunk<T>>) {
        if let Some(chunk) = Arc::into_inner(this) {
            chunk.values.free_now();
        }
    }
}

impl<T: Copy> Segment<T> {
    /// A segment of these values.
    ///
    /// # Errors
    /// [`SegmentError::NoMemory`].
    ///
    /// # Panics
    /// When the iterator yields more or fewer values than it said.
    pub fn collect(
        tier: Tier,
        values: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    ) -> Result<Segment<T>, SegmentError> {
        let values = values.into_iter();
        let len = values.len();
        let mut copy = Values::with_capacity(tier, len)?;
        values.for_each(|value| copy.push(value));
        assert_eq!(copy.len(), len, "the iterator said how many values it yields");
        Ok(Segment::of(copy))
    }

    /// A segment of the same values as `values`.
    ///
    /// # Errors
    /// [`SegmentError::NoMemory`].
    pub fn copy_of(tier: Tier, values: &[T]) -> Result<Segment<T>, SegmentError> {
        let mut copy = Values::with_capacity(tier, values.len())?;
        copy.extend(values);
        Ok(Segment::of(copy))
    }

    fn of(values: Values<T>) -> Segment<T> {
        let _local = Scope::enter(Tier::LOCAL); // Whatever scope the caller is in: this counts readers.
        let current = ArcSwap::from_pointee(Chunk { values });
        Segment { current, migrating: Mutex::new(()), visits: Visits::default() }
    }

    /// The values, from where they lie at present. Never blocks; the copy that is read stays for as
    /// long as the guard lives, also when the segment migrates meanwhile.
    pub fn read(&self) -> Reading<T> {
        self.visits.note();
        Reading(self.current.load())
    }

    /// The tier where the values lie at present.
    pub fn tier(&self) -> Tier {
        self.current.load().values.tier()
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.current.load().values.len()
    }

    /// True if there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the values.
    pub fn bytes(&self) -> ByteCount {
        ByteCount((self.len() * size_of::<T>()) as u64)
    }

    /// Moves the values to another tier, while others may read them. Returns when new readers read the
    /// new copy; the old one is freed when its last reader leaves. Where the values lie there already,
    /// nothing happens. A thread that migrates the same segment meanwhile is waited for.
    ///
    /// # Errors
    /// [`SegmentError::NoMemory`]: the segment stays where it was.
    pub fn migrate(&self, to: Tier) -> Result<(), SegmentError> {
        self.move_to(to, Rest::InMemory, &mut |_| true).map(|old| old.map_or((), Chunk::leave))
    }

    /// Counted reads since the last call.
    pub(super) fn take_visits(&self) -> u32 {
        self.visits.take()
    }

    /// Asks for the first values to be read ahead, if they are far.
    pub(super) fn read_soon(&self) {
        let from = self.current.load();
        ReadAhead::of(&from.values).reached(0);
    }

    /// Moves the values as long as `may_go_on`, which is told the bytes copied since the last time,
    /// says so. Returns the old copy, unless the values lay there already.
    pub(super) fn move_to(
        &self,
        to: Tier,
        rest: Rest,
        may_go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<Arc<Chunk<T>>>, SegmentError> {
        /// Bytes copied between two questions whether to go on.
        const BLOCK_BYTES: usize = 1 << 20;
        // A thread that panicked here has changed nothing: the switch is the last step.
        let _turn = self.migrating.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.current.load_full();
        if from.values.tier() == to {
            return Ok(None);
        }
        let mut copy: Values<T> = Values::with_capacity(to, from.values.len())?;
        if to == Tier::LOCAL {
            sys::fill_soon(copy.as_ptr().cast(), self.bytes().as_usize());
        }
        let mut read_ahead = ReadAhead::of(&from.values);
        let begin = copy.as_ptr().cast();
        let tier = tier_of(begin).filter(|_| rest == Rest::Written);
        let mut write_behind = WriteBehind::of(begin, tier.as_ref().map(Heap::region));
        let block_len = (BLOCK_BYTES / size_of::<T>().max(1)).max(1);
        while copy.len() < from.values.len() {
            let done = copy.len();
            let left = &from.values[done..];
            read_ahead.reached(size_of_val(&*copy));
            if tier.as_ref().map(Heap::region).is_some_and(|tier| copy.store_chunk(left, tier) > 0)
            {
                write_behind.stored(size_of_val(&*copy));
            } else {
                // Up to the next chunk, which may go to the device whole.
                let most = block_len.min(copy.len_to_chunk());
                copy.extend(&left[..left.len().min(most)]);
                write_behind.reached(size_of_val(&*copy), copy.len() == from.values.len());
            }
            if !may_go_on((copy.len() - done) * size_of::<T>()) {
                return Err(SegmentError::Cancelled);
            }
        }
        drop(from);
        let _local = Scope::enter(Tier::LOCAL);
        Ok(Some(self.current.swap(Arc::new(Chunk { values: copy }))))
    }
}

impl<T: Copy + fmt::Debug> fmt::Debug for Segment<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Not the values: they may be far, and many.
        f.debug_struct("Segment")
            .field("len", &self.len())
            .field("tier", &self.tier())
            .finish_non_exhaustive()
    }
}

/// The values of a [`Segment`], as a slice, from one copy of them.
///
/// Threads may share it. Held for long, it keeps the copy's memory, and a [`Migrator`](crate::Migrator) waiting that
/// moves the segment.
pub struct Reading<T>(Guard<Arc<Chunk<T>>>);

impl<T> Deref for Reading<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        &self.0.values
    }
}

impl<T: fmt::Debug> fmt::Debug for Reading<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&**self).finish()
    }
}
