//! Moves many segments: with progress, at a bounded rate, until it is cancelled.

use crate::column_chunk::{Chunk, Segment};
use crate::error::SegmentError;
use crate::stream::{ReadAhead, Rest};
use farheap::{ByteCount, Tier};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time that a migrator sleeps at once: after this time it notices that it was cancelled.
const NAP_MAX: Duration = Duration::from_millis(5);
const NAP_MIN: Duration = Duration::from_micros(20);

/// Waits until no reader has the old copy, and frees it. It asks its argument before each wait, and
/// returns `false` when that said to stop.
pub(super) type Release<'a> = Box<dyn FnOnce(&mut dyn FnMut() -> bool) -> bool + 'a>;

/// A segment of values of whatever type.
pub(super) trait Movable: Sync {
    fn bytes(&self) -> ByteCount;

    fn tier(&self) -> Tier;

    /// As `Segment::take_visits`.
    fn take_visits(&self) -> u32;

    /// As `Segment::move_to`.
    fn move_while(
        &self,
        to: Tier,
        rest: Rest,
        may_go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<Release<'_>>, SegmentError>;

    fn read_soon(&self);
}

impl<T: Copy + Send + Sync> Movable for Segment<T> {
    fn bytes(&self) -> ByteCount {
        Segment::bytes(self)
    }

    fn tier(&self) -> Tier {
        Segment::tier(self)
    }

    fn take_visits(&self) -> u32 {
        Segment::take_visits(self)
    }

    fn move_while(
        &self,
        to: Tier,
        rest: Rest,
        may_go_on: &mut dyn FnMut(usize) -> bool,
    ) -> Result<Option<Release<'_>>, SegmentError> {
        let old = self.move_to(to, rest, may_go_on)?;
        Ok(old.map(|old| {
            let wait = move |may_wait: &mut dyn FnMut() -> bool| {
                // No reader can come any more: the segment names another copy.
                while Arc::strong_count(&old) > 1 {
                    if !may_wait() {
                        return false;
                    }
                }
                Chunk::leave(old);
                true
            };
            Box::new(wait) as Release<'_>
        }))
    }

    fn read_soon(&self) {
        Segment::read_soon(self);
    }
}

/// Moves many segments, one after the other; see [`Migrator::run`].
///
/// # Examples
/// ```
/// use farheap_segments::{Migrator, Segment};
/// use farheap::{ByteCount, Heap, Tier};
///
/// let heap = match Heap::builder().parse("far_limit:8MiB,capacity:64MiB")?.start() {
///     Ok(heap) => heap,
///     Err(error) => {
///         println!("{error}"); // Says how to allow userfaultfd.
///         return Ok(());
///     }
/// };
/// let keys = Segment::collect(Tier::LOCAL, 0..100_000_u32)?;
/// let prices = Segment::collect(Tier::LOCAL, (0..100_000).map(|row| row as f32))?;
///
/// let mut migrator = Migrator::new();
/// migrator.add(&keys, Tier::FAR).add(&prices, Tier::FAR).rate(ByteCount::mib(512));
/// let migration = migrator.run(|progress| println!("{progress}"));
/// assert_eq!((migration.moved(), migration.error()), (2, None));
/// drop((keys, prices));
/// heap.shutdown()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Migrator<'a> {
    moves: Vec<(&'a dyn Movable, Tier)>,
    rest: Rest,
    rate: Option<ByteCount>,
    cancel: Option<&'a AtomicBool>,
}

impl<'a> Migrator<'a> {
    /// A migrator with nothing to do yet.
    #[must_use]
    pub fn new() -> Migrator<'a> {
        Migrator::default()
    }

    /// Adds a segment, and where it is to go.
    pub fn add<T: Copy + Send + Sync>(
        &mut self,
        segment: &'a Segment<T>,
        to: Tier,
    ) -> &mut Migrator<'a> {
        self.add_any(segment, to);
        self
    }

    pub(super) fn add_any(&mut self, segment: &'a dyn Movable, to: Tier) {
        self.moves.push((segment, to));
    }

    /// Copies at most this many bytes a second on average; zero, the default, is no bound.
    pub fn rate(&mut self, bytes_a_second: ByteCount) -> &mut Migrator<'a> {
        self.rate = (bytes_a_second.0 > 0).then_some(bytes_a_second);
        self
    }

    /// Writes what goes to a far tier to its device, whole chunks of 2 MiB past the tier's memory and the rest
    /// behind the copying, so that what is in use there stays. For segments that make room
    /// for others and will not be read soon; without it, they stay in the memory of their tier until it is
    /// needed. What [`run`](Migrator::run) has moved last is still on its way when it returns:
    /// [`Advice::PageOutNow`](farheap::region::Advice::PageOutNow) waits for that.
    pub fn write_out(&mut self) -> &mut Migrator<'a> {
        self.rest = Rest::Written;
        self
    }

    /// Stops soon after `cancel` is set: the segment under way stays where it was.
    pub fn cancelled_by(&mut self, cancel: &'a AtomicBool) -> &mut Migrator<'a> {
        self.cancel = Some(cancel);
        self
    }

    /// Moves the segments in the order in which they were added, and tells `progress` after each.
    ///
    /// Before it goes on to the next it waits until the last reader of the old copy has left, so that
    /// no more memory is taken twice than one segment's. The calling thread must hold none of
    /// their [`Reading`](super::Reading)s: it would wait for itself, until it is cancelled.
    ///
    /// It stops at the first segment that cannot be moved; each segment is whole at any time.
    pub fn run(&self, mut progress: impl FnMut(&Progress)) -> Migration {
        let mut state = Progress {
            segments: 0,
            of_segments: self.moves.len(),
            bytes: ByteCount::ZERO,
            of_bytes: ByteCount(self.moves.iter().map(|(segment, _)| segment.bytes().0).sum()),
            elapsed: Duration::ZERO,
        };
        let pace = Pace { begun: Instant::now(), rate: self.rate, cancel: self.cancel };
        let (mut copied, mut reader_wait_max, mut error) = (0, Duration::ZERO, None);
        for (index, &(segment, to)) in self.moves.iter().enumerate() {
            let next = self.moves.get(index + 1);
            let (mut left, mut is_next_asked) = (segment.bytes().0, false);
            let mut may_go_on = |bytes: usize| {
                (copied, left) = (copied + bytes as u64, left.saturating_sub(bytes as u64));
                if left < ReadAhead::BYTES_MAX as u64
                    && !std::mem::replace(&mut is_next_asked, true)
                    && let Some((segment, _)) = next
                {
                    segment.read_soon(); // Its device works while this segment ends.
                }
                pace.keep(copied)
            };
            let moved = match pace.is_cancelled() {
                true => Err(SegmentError::Cancelled),
                false => segment.move_while(to, self.rest, &mut may_go_on),
            };
            match moved {
                Ok(Some(release)) => reader_wait_max = reader_wait_max.max(pace.wait(release)),
                Ok(None) => {}
                Err(cause) => {
                    error = Some(cause);
                    break;
                }
            }
            state.segments += 1;
            state.bytes = ByteCount(state.bytes.0 + segment.bytes().0);
            state.elapsed = pace.begun.elapsed();
            progress(&state);
        }
        state.elapsed = pace.begun.elapsed();
        Migration { progress: state, reader_wait_max, error }
    }
}

impl fmt::Debug for Migrator<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Migrator")
            .field("segments", &self.moves.len())
            .field("rate", &self.rate)
            .finish_non_exhaustive()
    }
}

/// How fast to copy, and until when.
struct Pace<'a> {
    begun: Instant,
    rate: Option<ByteCount>,
    cancel: Option<&'a AtomicBool>,
}

impl Pace<'_> {
    fn is_cancelled(&self) -> bool {
        self.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    /// Waits until `copied` bytes in all are no more than the rate allows; `false`: cancelled.
    fn keep(&self, copied: u64) -> bool {
        let due = self
            .rate
            .map_or(Duration::ZERO, |rate| Duration::from_secs_f64(copied as f64 / rate.0 as f64));
        while !self.is_cancelled() {
            let early = due.saturating_sub(self.begun.elapsed());
            if early.is_zero() {
                return true;
            }
            // The rate asks for it; in naps, so that cancelling is noticed.
            std::thread::sleep(early.min(NAP_MAX));
        }
        false
    }

    /// Waits for the readers of an old copy; returns how long.
    fn wait(&self, release: Release<'_>) -> Duration {
        let begun = Instant::now();
        let mut nap = NAP_MIN;
        let all_left = release(&mut || {
            // Readers only decrement a count: waking the migrator would cost every one of them.
            std::thread::sleep(nap);
            nap = (nap * 2).min(NAP_MAX);
            !self.is_cancelled()
        });
        // A cancelled migrator leaves it to the last reader to free the copy.
        if all_left { begun.elapsed() } else { Duration::ZERO }
    }
}

/// How far a [`Migrator`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    segments: usize,
    of_segments: usize,
    bytes: ByteCount,
    of_bytes: ByteCount,
    elapsed: Duration,
}

impl Progress {
    /// Segments that are where they are to be.
    #[must_use]
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Segments in all.
    #[must_use]
    pub fn of_segments(&self) -> usize {
        self.of_segments
    }

    /// Bytes of the segments that are where they are to be.
    #[must_use]
    pub fn bytes(&self) -> ByteCount {
        self.bytes
    }

    /// Bytes of all segments.
    #[must_use]
    pub fn of_bytes(&self) -> ByteCount {
        self.of_bytes
    }

    /// Since the migrator began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.elapsed
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Progress { segments, of_segments, bytes, of_bytes, elapsed } = self;
        write!(f, "{segments} of {of_segments} segments, {bytes} of {of_bytes}")?;
        let rate = bytes.0 as f64 / elapsed.as_secs_f64().max(1e-9);
        write!(f, ", {}/s", ByteCount(rate as u64))
    }
}

/// Outcomes of a [`Migrator`]'s segments.
#[must_use = "says what was not moved, and why"]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Migration {
    progress: Progress,
    reader_wait_max: Duration,
    error: Option<SegmentError>,
}

impl Migration {
    /// Number of segments that are where they are to be: the ones added first.
    pub fn moved(&self) -> usize {
        self.progress.segments
    }

    /// How far it came, and how long that took.
    pub fn progress(&self) -> Progress {
        self.progress
    }

    /// The longest time for which it waited until the readers of an old copy had left.
    pub fn reader_wait_max(&self) -> Duration {
        self.reader_wait_max
    }

    /// Why the next segment was not moved; `None`: all were.
    pub fn error(&self) -> Option<&SegmentError> {
        self.error.as_ref()
    }
}
