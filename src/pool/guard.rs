//! Guards: what a fix returns. Dropping one is the unfix.
//!
//! A guard that is leaked keeps its page fixed; it is counted in the error of a fix that finds no
//! memory, and in [`BufferPool::holders`].
#![expect(unsafe_code, reason = "lends the memory of fixed pages")]

use super::latch::Word;
use super::{BufferPool, TRAILER};
use crate::base::units::PageId;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A value anywhere: volatile reads of it need no alignment.
#[repr(C, packed)]
struct Unaligned<T: Copy>(T);

/// Bytes from a buffer's end to the number of the log record.
const LSN_AT: usize = TRAILER;

/// Holds a page with others who read it.
#[must_use = "dropping the guard gives the page up"]
pub struct SharedGuard<'p> {
    pub(super) pool: &'p BufferPool,
    pub(super) page: PageId,
    pub(super) order: u8,
}

impl<'p> SharedGuard<'p> {
    /// The page's number.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.page
    }

    /// The number of the log record that changed the page last.
    #[must_use]
    pub fn lsn(&self) -> u64 {
        lsn(self.pool, self.page, self.order)
    }

    /// Becomes exclusive if nobody else holds the page; the guard comes back otherwise.
    ///
    /// # Errors
    /// The guard itself, when there are other holders.
    pub fn try_upgrade(self) -> Result<ExclusiveGuard<'p>, SharedGuard<'p>> {
        let latch = self.pool.word(self.page);
        loop {
            let seen = latch.load();
            if latch.try_upgrade(seen) {
                let SharedGuard { pool, page, order } = self;
                std::mem::forget(self);
                return Ok(ExclusiveGuard { pool, page, order, changed: false });
            }
            if seen.holder() != super::latch::Holder::Shared(1) {
                return Err(self);
            }
        }
    }
}

impl Deref for SharedGuard<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let len = self.pool.buffer_bytes(self.order) - TRAILER;
        // SAFETY: the page is resident and nobody changes its payload while this thread is one of
        // its shared holders; the pool's mapping outlives the guard.
        unsafe { std::slice::from_raw_parts(self.pool.ptr(self.page), len) }
    }
}

impl Drop for SharedGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.pool.word(self.page).unshare();
    }
}

impl fmt::Debug for SharedGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedGuard({})", self.page)
    }
}

/// Holds a page alone. Borrowing its bytes for writing makes it dirty.
#[must_use = "dropping the guard gives the page up"]
pub struct ExclusiveGuard<'p> {
    pub(super) pool: &'p BufferPool,
    pub(super) page: PageId,
    pub(super) order: u8,
    pub(super) changed: bool,
}

impl<'p> ExclusiveGuard<'p> {
    /// The page's number.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.page
    }

    /// The number of the log record that changed the page last.
    #[must_use]
    pub fn lsn(&self) -> u64 {
        lsn(self.pool, self.page, self.order)
    }

    /// Notes the log record that describes the change; see
    /// [`PoolConfig::before_write`](super::PoolConfig::before_write).
    pub fn set_lsn(&mut self, lsn: u64) {
        self.changed = true;
        let at = self.pool.buffer_bytes(self.order) - LSN_AT;
        let ptr = self.pool.ptr(self.page).wrapping_add(at).cast::<u64>();
        // SAFETY: within the trailer of a page that this guard holds alone; aligned, for page
        // sizes and the trailer's are multiples of 8.
        unsafe { ptr.write(lsn) };
    }

    /// Becomes a shared guard without letting anybody in between.
    pub fn downgrade(self) -> SharedGuard<'p> {
        let ExclusiveGuard { pool, page, order, changed } = self;
        std::mem::forget(self);
        pool.word(page).downgrade(changed);
        SharedGuard { pool, page, order }
    }

    /// Frees the page: its contents are lost and its number will be used again.
    pub fn free(self) {
        let ExclusiveGuard { pool, page, order, .. } = self;
        std::mem::forget(self);
        pool.free_locked(page, order);
    }
}

impl Deref for ExclusiveGuard<'_> {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        let len = self.pool.buffer_bytes(self.order) - TRAILER;
        // SAFETY: this guard holds the resident page alone.
        unsafe { std::slice::from_raw_parts(self.pool.ptr(self.page), len) }
    }
}

impl DerefMut for ExclusiveGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.changed = true;
        let len = self.pool.buffer_bytes(self.order) - TRAILER;
        // SAFETY: this guard holds the resident page alone, and `&mut self` is the only borrow.
        // Optimistic readers may look meanwhile, by volatile reads through raw pointers, and
        // discard what they saw (latch, invariant 1).
        unsafe { std::slice::from_raw_parts_mut(self.pool.ptr(self.page), len) }
    }
}

impl Drop for ExclusiveGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.pool.word(self.page).unlock(self.changed);
    }
}

impl fmt::Debug for ExclusiveGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ExclusiveGuard({})", self.page)
    }
}

fn lsn(pool: &BufferPool, page: PageId, order: u8) -> u64 {
    let at = pool.buffer_bytes(order) - LSN_AT;
    // SAFETY: within the trailer of a page that the caller's guard holds; aligned as above. The
    // number changes only under an exclusive guard.
    unsafe { pool.ptr(page).wrapping_add(at).cast::<u64>().read() }
}

/// Looks at a page without holding it: what is read counts only if [`validate`](Self::validate)
/// says so afterwards. It writes nothing, so that readers on many processors do not disturb each
/// other.
#[derive(Clone, Copy)]
pub struct OptimisticGuard<'p> {
    pub(super) pool: &'p BufferPool,
    pub(super) page: PageId,
    pub(super) seen: Word,
}

impl<'p> OptimisticGuard<'p> {
    /// The page's number.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.page
    }

    /// Whether nobody changed or evicted the page since the guard was made.
    #[inline]
    #[must_use]
    pub fn validate(&self) -> bool {
        self.pool.word(self.page).is_unchanged(self.seen)
    }

    /// Bytes that can be read.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.pool.buffer_bytes(self.seen.order()) - TRAILER
    }

    /// Never: pages have a payload.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    #[inline]
    fn read<T: Copy>(&self, at: usize) -> Option<T> {
        if at.checked_add(size_of::<T>())? > self.len() {
            return None;
        }
        let ptr = self.pool.ptr(self.page).wrapping_add(at).cast::<Unaligned<T>>();
        // SAFETY: within the pool's mapping, which is readable whether the page is resident or
        // not. The bytes may change meanwhile: every bit pattern is a valid value of the integer
        // types this is called with, and the caller validates before it believes the value.
        Some(unsafe { ptr.read_volatile() }.0)
    }

    /// The byte at `at`; `None` beyond the payload.
    #[inline]
    #[must_use]
    pub fn byte(&self, at: usize) -> Option<u8> {
        self.read::<u8>(at)
    }

    /// The two bytes at `at`, little endian.
    #[inline]
    #[must_use]
    pub fn u16(&self, at: usize) -> Option<u16> {
        self.read::<u16>(at).map(u16::from_le)
    }

    /// The four bytes at `at`, little endian.
    #[inline]
    #[must_use]
    pub fn u32(&self, at: usize) -> Option<u32> {
        self.read::<u32>(at).map(u32::from_le)
    }

    /// The eight bytes at `at`, little endian.
    #[inline]
    #[must_use]
    pub fn u64(&self, at: usize) -> Option<u64> {
        self.read::<u64>(at).map(u64::from_le)
    }

    /// Copies bytes from `at` on; `None` when they are not all within the payload.
    #[inline]
    pub fn copy_to(&self, at: usize, into: &mut [u8]) -> Option<()> {
        if at.checked_add(into.len())? > self.len() {
            return None;
        }
        let from = self.pool.ptr(self.page).wrapping_add(at);
        // SAFETY: within the mapping as in `read`, and `into` is not part of it, for it is
        // borrowed mutably.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Compares the bytes at `at` with `key`.
    #[inline]
    #[must_use]
    pub fn compare(&self, at: usize, len: usize, key: &[u8]) -> Option<std::cmp::Ordering> {
        if at.checked_add(len)? > self.len() {
            return None;
        }
        for (i, b) in key.iter().enumerate().take(len) {
            match self.byte(at + i)?.cmp(b) {
                std::cmp::Ordering::Equal => {}
                other => return Some(other),
            }
        }
        Some(len.cmp(&key.len()))
    }

    /// Becomes exclusive if the page is as it was and nobody holds it.
    #[must_use]
    pub fn try_upgrade(self) -> Option<ExclusiveGuard<'p>> {
        let latch = self.pool.word(self.page);
        loop {
            let now = latch.load();
            if !now.is_free() || now.version() != self.seen.version() {
                return None;
            }
            if latch.try_lock(now) {
                let (pool, page, order) = (self.pool, self.page, now.order());
                return Some(ExclusiveGuard { pool, page, order, changed: false });
            }
        }
    }
}

impl fmt::Debug for OptimisticGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OptimisticGuard({} {:?})", self.page, self.seen)
    }
}
