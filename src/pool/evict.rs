//! Eviction: the hand finds victims, batches of them leave together.
//!
//! The hand goes over the bitmap of resident pages in address order, 64 pages at a step; each
//! step is taken by one thread, so that several evict side by side without a lock. Victims of a
//! batch are dropped by one vectored call, neighbours as one range (`coalescing`).
#![expect(unsafe_code, reason = "drops the memory of victims")]

use super::BufferPool;
use super::coalescing::Gaps;
use super::latch::LatchWord;
use super::write_result::WriteResult;
use crate::base::error::{Error, Result};
use crate::base::sync::Ordering;
use crate::base::units::{ByteCount, PageId};
use crate::sys::vm::Piece;

/// Maximum number of pages in a batch. One page a call costs several times as much; see
/// `docs/measurements/pool.md`, eviction.
pub(super) const BATCH_MAX: usize = 256;

/// Laps of the hand after which a reclaim gives up: a page may have to be passed once for each
/// lap it earned, once to be cooled and once to be taken.
const LAPS_MAX: u64 = 6;

/// What to do with dirty pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dirty {
    Skip,
    Write,
}

/// Victims of a batch.
struct Batch {
    /// Locked.
    clean: [PageId; BATCH_MAX],
    clean_len: usize,
    /// Held for writing.
    dirty: [PageId; BATCH_MAX],
    dirty_len: usize,
}

impl Batch {
    fn new() -> Batch {
        let none = [PageId(0); BATCH_MAX];
        Batch { clean: none, clean_len: 0, dirty: none, dirty_len: 0 }
    }

    fn len(&self) -> usize {
        self.clean_len + self.dirty_len
    }
}

impl BufferPool {
    /// Evicts pages until `want` bytes are free; returns how many bytes became free.
    pub(super) fn evict(&self, want: ByteCount, dirty: Dirty) -> ByteCount {
        let steps = (self.end.load(Ordering::Acquire) as usize).div_ceil(64) as u64;
        // Without writing, what two laps do not find is dirty or hot: writing comes next.
        let laps = if dirty == Dirty::Skip { LAPS_MAX / 2 } else { LAPS_MAX };
        let mut left = steps * laps;
        let mut freed = 0;
        while freed < want.0 && left > 0 {
            let pages = (want.0 - freed).div_ceil(self.page_bytes as u64);
            let target = (pages as usize).min(self.batch);
            let mut batch = Batch::new();
            while batch.len() < target && left > 0 {
                left -= 1;
                let step = self.hand.fetch_add(1, Ordering::Relaxed) % steps;
                self.sweep(step as usize, dirty, target, &mut batch);
            }
            freed += self.finish(&mut batch);
        }
        ByteCount(freed)
    }

    /// The hand passes 64 pages.
    fn sweep(&self, step: usize, dirty: Dirty, target: usize, batch: &mut Batch) {
        let mut bits = self.resident[step].load(Ordering::Relaxed);
        while bits != 0 && batch.len() < target {
            let page = PageId((step * 64) as u64 + u64::from(bits.trailing_zeros()));
            bits &= bits - 1;
            self.sweep_page(page, dirty, batch);
        }
    }

    /// The hand passes one page. A lost race leaves it for the next lap.
    fn sweep_page(&self, page: PageId, dirty: Dirty, batch: &mut Batch) {
        let latch = self.word(page);
        let seen = latch.load();
        if !seen.is_readable() {
            return;
        }
        if !seen.cool() {
            latch.try_cool(seen, self.replacement.passes_touched(seen.heat()).min(3));
        } else if seen.heat() > 0 {
            latch.try_cool(seen, seen.heat() - 1);
        } else if !seen.is_free() || seen.dirty() && dirty == Dirty::Skip {
            // Held, or to be written another time.
        } else if !self.split_around(page) {
            // Its neighbours are written at the moment.
        } else if !seen.dirty() {
            if self.lock_victim(page, seen) {
                batch.clean[batch.clean_len] = page;
                batch.clean_len += 1;
            }
        } else if latch.try_begin_write(seen) {
            batch.dirty[batch.dirty_len] = page;
            batch.dirty_len += 1;
        }
    }

    /// Locks a free page that leaves singly; not one that lies in a huge page again.
    fn lock_victim(&self, page: PageId, seen: LatchWord) -> bool {
        let is_locked = self.word(page).try_lock_victim(seen);
        if is_locked && self.is_huge(page) {
            self.word(page).unlock(false);
            return false;
        }
        is_locked
    }

    /// Writes the dirty victims and drops what is clean then.
    fn finish(&self, batch: &mut Batch) -> u64 {
        // The clean ones go first: who waits for one of them need not wait for the device.
        let mut freed = self.drop_locked(&batch.clean[..batch.clean_len]);
        if batch.dirty_len > 0 {
            let dirty = &mut batch.dirty[..batch.dirty_len];
            dirty.sort_unstable();
            self.write_group(dirty);
            let mut count = 0;
            for page in dirty {
                let seen = self.word(*page).load();
                let unwanted = seen.is_free() && !seen.dirty() && seen.cool();
                if unwanted && self.lock_victim(*page, seen) {
                    batch.clean[count] = *page;
                    count += 1;
                }
            }
            freed += self.drop_locked(&batch.clean[..count]);
        }
        freed
    }

    /// Drops pages that this thread locked; returns their bytes.
    fn drop_locked(&self, pages: &[PageId]) -> u64 {
        if pages.is_empty() {
            return 0;
        }
        let mut pieces = [Piece::new(0, 0); BATCH_MAX];
        let (mut count, mut bytes) = (0, 0);
        let mut gaps = Gaps::new();
        // One past the page before.
        let mut after = usize::MAX;
        for page in pages {
            let order = self.word(*page).load().order();
            self.leave_resident(*page, order);
            let (start, len) = (self.ptr(*page).addr(), self.buffer_bytes(order));
            bytes += len as u64;
            match pieces[..count].last_mut() {
                Some(last) if last.start() + last.len() == start => last.grow(len),
                Some(last) if self.batch > 1 && gaps.lock(self, after, page.as_usize()) => {
                    last.grow(start + len - last.start() - last.len());
                }
                _ => {
                    pieces[count] = Piece::new(start, len);
                    count += 1;
                }
            }
            after = page.as_usize() + (1 << order);
        }
        // SAFETY: this thread holds the pages locked and their contents are on the device; what lies
        // between them within a range is absent and locked, too (`coalescing`).
        let dropped = unsafe { self.discarder.discard(&pieces[..count]) };
        assert!(dropped.is_ok(), "dropping {count} ranges: {dropped:?}");
        let stamp = self.stamp_now();
        for page in pages {
            self.word(*page).evicted(stamp);
        }
        gaps.unlock(self);
        self.counters.evicted.fetch_add(pages.len() as u64, Ordering::Relaxed);
        self.account.uncharge(ByteCount(bytes));
        bytes
    }

    /// Evicts about `want` bytes of clean pages now, whatever the limit; returns how many.
    pub fn evict_clean(&self, want: ByteCount) -> ByteCount {
        self.evict(want, Dirty::Skip)
    }

    /// Evicts all pages that nobody holds; dirty ones are written.
    ///
    /// # Errors
    /// As for [`flush`](Self::flush); with [`Error::WriteRefused`] all other pages are evicted.
    pub fn evict_all(&self) -> Result<()> {
        let flushed = self.flush();
        if matches!(flushed, Ok(()) | Err(Error::WriteRefused { .. })) {
            let all = ByteCount(self.counters.resident.load(Ordering::Relaxed));
            self.evict(all, Dirty::Write);
        }
        flushed
    }

    /// Checkpoint: writes all dirty pages and the header. Pages that are changed meanwhile may
    /// or may not be written in their newest state; pages held exclusively are waited for, with
    /// no other page held.
    ///
    /// After an error the log must be kept from where the last checkpoint began.
    ///
    /// # Errors
    /// [`Error::Io`] when pages could not be written (they stay dirty in memory),
    /// [`Error::WriteRefused`] when [`before_write`](super::PoolConfig::before_write) refused pages
    /// (the same; all others and the header are written),
    /// [`Error::LatchTimeout`] when a page is held exclusively for too long, or another flush takes
    /// too long to write the header, which is page 0.
    pub fn flush(&self) -> Result<()> {
        let mut result = WriteResult::default();
        let steps = (self.end.load(Ordering::Acquire) as usize).div_ceil(64);
        let mut batch = [PageId(0); BATCH_MAX];
        let mut len = 0;
        for step in 0..steps {
            let mut bits = self.resident[step].load(Ordering::Relaxed);
            while bits != 0 {
                let page = PageId((step * 64) as u64 + u64::from(bits.trailing_zeros()));
                bits &= bits - 1;
                let is_held = match self.try_hold_for_writing(page) {
                    Some(is_held) => is_held,
                    None => {
                        // Who is in the way may itself wait for one of the pages held here.
                        result.add(self.write_group(&batch[..len]));
                        len = 0;
                        self.hold_for_writing(page)?
                    }
                };
                if is_held {
                    batch[len] = page;
                    len += 1;
                }
                if len == BATCH_MAX {
                    result.add(self.write_group(&batch));
                    len = 0;
                }
            }
        }
        result.add(self.write_group(&batch[..len]));
        if result.failed > 0 {
            let len = result.failed << self.page_shift;
            return Err(Error::Io { op: "write", offset: 0, len, errno: crate::sys::EIO });
        }
        self.write_header()?;
        result.into_refusal().map_or(Ok(()), Err)
    }

    /// Holds a dirty page for writing; `false` when it is clean or gone.
    fn hold_for_writing(&self, page: PageId) -> Result<bool> {
        let mut backoff = super::fix::Backoff::new(self.deadline);
        loop {
            if let Some(is_held) = self.try_hold_for_writing(page) {
                return Ok(is_held);
            }
            if !backoff.wait() {
                return Err(self.timeout(page, &backoff));
            }
        }
    }

    /// The same without waiting. `None`: somebody is in the way.
    fn try_hold_for_writing(&self, page: PageId) -> Option<bool> {
        let latch = self.word(page);
        loop {
            let seen = latch.load();
            if seen.is_absent() || seen.is_readable() && !seen.dirty() {
                return Some(false);
            }
            if latch.try_begin_write(seen) {
                return Some(true);
            }
            if !seen.is_readable() || seen.writing() || !seen.has_room() {
                return None;
            }
        }
    }
}
