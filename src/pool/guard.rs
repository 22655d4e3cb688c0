//! Guards: what a fix returns. Dropping one is the unfix.
//!
//! A guard that is leaked keeps its page fixed; it is counted in the error of a fix that finds no
//! memory, and in [`BufferPool::holders`](super::BufferPool::holders).
#![expect(unsafe_code, reason = "lends the memory of fixed pages")]

use super::allocate;
use super::frames::PoolFrames;
use super::latch::{HeldWord, Holder, Latch, LatchWord};
use super::page_table::TRAILER;
use crate::base::error::Result;
use crate::base::units::PageId;
use crate::sys::vm::KERNEL_PAGE;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A value anywhere: volatile reads of it need no alignment.
#[repr(C, packed)]
struct Unaligned<T: Copy>(T);

/// A page that is looked at: what all guards have in common. Its number is where its latch is.
#[derive(Clone, Copy)]
pub(super) struct Held<'p> {
    pub(super) frames: &'p PoolFrames,
    latch: &'p Latch,
    word: HeldWord,
}

impl<'p> Held<'p> {
    #[inline]
    pub(super) fn new(frames: &'p PoolFrames, latch: &'p Latch, word: HeldWord) -> Held<'p> {
        Held { frames, latch, word }
    }

    #[inline]
    fn page(&self) -> PageId {
        self.frames.table.page_of(self.latch)
    }

    #[inline]
    pub(super) fn latch(&self) -> &'p Latch {
        self.latch
    }

    #[inline]
    fn ptr(&self) -> *mut u8 {
        self.frames.table.ptr_of(self.latch)
    }

    /// Bytes without the trailer.
    #[inline]
    fn len(&self) -> usize {
        self.frames.table.payload_bytes()
    }

    /// Where the number of the log record is, if the page has one: within the page, and aligned.
    fn lsn_ptr(&self) -> Option<*mut u64> {
        let at = self.frames.table.lsn_at()?;
        Some(self.ptr().wrapping_add(at).cast())
    }

    /// # Safety
    /// The page is held, so that nobody changes it while the slice is in use.
    #[inline]
    unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the pool's mapping outlives the guard, and the payload lies within; the rest is
        // the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr(), self.len()) }
    }

    /// # Safety
    /// The page is held.
    unsafe fn lsn(&self) -> u64 {
        // SAFETY: aligned and within the page; the number changes only under an exclusive guard.
        self.lsn_ptr().map_or(0, |place| unsafe { place.read() })
    }
}

/// Methods of both kinds of held guards.
macro_rules! of_a_held_page {
    ($guard:ident, $held:tt) => {
        impl $guard<'_> {
            /// The page's number.
            #[must_use]
            pub fn id(&self) -> PageId {
                self.$held.page()
            }

            /// The number of the log record that changed the page last; 0 of
            /// [whole pages](super::PoolConfig::whole_pages).
            #[must_use]
            pub fn lsn(&self) -> u64 {
                // SAFETY: this guard holds the page.
                unsafe { self.$held.lsn() }
            }
        }

        impl Deref for $guard<'_> {
            type Target = [u8];
            #[inline]
            fn deref(&self) -> &[u8] {
                // SAFETY: this guard holds the page: nobody else changes its payload.
                unsafe { self.$held.bytes() }
            }
        }

        impl fmt::Debug for $guard<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($guard), "({})"), self.$held.page())
            }
        }
    };
}

/// A page as it was at one moment: tells later, without the page being held meanwhile, whether its content is
/// the same still; see [`is_current`](PageVersion::is_current).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageVersion {
    pub(super) page: PageId,
    pub(super) seen: LatchWord,
}

/// Holds a page together with other readers.
#[must_use = "dropping the guard gives the page up"]
pub struct SharedGuard<'p>(pub(super) Held<'p>);

of_a_held_page!(SharedGuard, 0);

impl<'p> SharedGuard<'p> {
    /// The page as it is.
    #[must_use]
    pub fn version(&self) -> PageVersion {
        PageVersion { page: self.id(), seen: self.0.latch().load() }
    }

    /// Becomes exclusive if there is no other holder and the table may be changed; the guard comes back
    /// otherwise.
    ///
    /// # Errors
    /// The guard itself, when there are other holders.
    pub fn try_upgrade(self) -> std::result::Result<ExclusiveGuard<'p>, SharedGuard<'p>> {
        if self.0.frames.table.is_read_only() {
            return Err(self);
        }
        loop {
            let seen = self.0.latch().load();
            if self.0.latch().try_upgrade(seen) {
                let held = Held { word: HeldWord::locked(seen), ..self.0 };
                std::mem::forget(self);
                return Ok(ExclusiveGuard(held));
            }
            if seen.holder() != Holder::Shared(1) {
                return Err(self);
            }
        }
    }
}

impl Drop for SharedGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.latch().unshare();
    }
}

/// Holds a page alone. Borrowing its bytes for writing makes it dirty.
#[must_use = "dropping the guard gives the page up"]
pub struct ExclusiveGuard<'p>(pub(super) Held<'p>);

of_a_held_page!(ExclusiveGuard, 0);

impl<'p> ExclusiveGuard<'p> {
    /// Notes the log record that describes the change; see
    /// [`PoolConfig::before_write`](super::PoolConfig::before_write).
    ///
    /// # Panics
    /// In a pool of [whole pages](super::PoolConfig::whole_pages), which have no room for it.
    pub fn set_lsn(&mut self, lsn: u64) {
        let place = self.0.lsn_ptr();
        let place = place.expect("whole pages have no room for the number of a log record");
        self.0.word = self.0.word.changed();
        // SAFETY: aligned and within a page that this guard holds alone.
        unsafe { place.write(lsn) };
    }

    /// Makes all of the page zeros, the number of the log record too.
    pub(super) fn blank(&mut self) {
        self.fill(0);
        if self.0.lsn_ptr().is_some() {
            self.set_lsn(0);
        }
    }

    /// Becomes a shared guard without letting anybody in between.
    pub fn downgrade(self) -> SharedGuard<'p> {
        let held = self.0;
        std::mem::forget(self);
        held.latch().downgrade(held.word.is_changed());
        SharedGuard(held)
    }

    /// Frees the page: its contents are lost and its number will be used again.
    pub fn free(self) {
        let held = self.0;
        std::mem::forget(self);
        allocate::free(held.frames, held.page());
    }
}

impl DerefMut for ExclusiveGuard<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.word = self.0.word.changed();
        // SAFETY: this guard holds the resident page alone, and `&mut self` is the only borrow.
        // Optimistic readers may look meanwhile, by volatile reads through raw pointers, and
        // discard what they saw (latch, invariant 1).
        unsafe { std::slice::from_raw_parts_mut(self.0.ptr(), self.0.len()) }
    }
}

impl Drop for ExclusiveGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.latch().let_go(self.0.word);
    }
}

/// Looks at a page without holding it: what is read counts only if [`validate`](Self::validate)
/// says so afterwards. It writes nothing, so that readers on many processors do not disturb each
/// other.
#[derive(Clone, Copy)]
pub struct OptimisticGuard<'p> {
    pub(super) frames: &'p PoolFrames,
    pub(super) latch: &'p Latch,
    pub(super) seen: LatchWord,
}

/// Bytes that every page has, whatever the pool's page size: reads within them need no look at it.
const PAYLOAD_MIN: usize = KERNEL_PAGE - TRAILER;

impl<'p> OptimisticGuard<'p> {
    #[inline]
    fn held(&self) -> Held<'p> {
        Held::new(self.frames, self.latch, HeldWord::seen(self.seen))
    }

    #[inline]
    fn ptr(&self) -> *mut u8 {
        self.held().ptr()
    }

    /// The page's number.
    #[inline]
    #[must_use]
    pub fn id(&self) -> PageId {
        self.held().page()
    }

    /// The page as it was when the guard was made, for later than the guard can be kept.
    #[inline]
    #[must_use]
    pub fn version(&self) -> PageVersion {
        PageVersion { page: self.id(), seen: self.seen }
    }

    /// True if the page was neither changed nor evicted since the guard was made.
    #[inline]
    #[must_use]
    pub fn validate(&self) -> bool {
        self.latch.is_unchanged(self.seen)
    }

    /// Bytes that can be read: the pool's [payload](super::BufferPool::payload).
    #[inline]
    #[must_use]
    pub fn payload(&self) -> usize {
        self.held().len()
    }

    /// The first of them, for reads that the other methods do not offer. The memory stays readable as
    /// long as the pool exists, but others may change it at any time: read it as volatile or atomic,
    /// never through a reference, and [`validate`](Self::validate) before what was read counts.
    #[inline]
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.ptr()
    }

    #[inline]
    fn read<T: Copy>(&self, at: usize) -> Option<T> {
        let end = at.checked_add(size_of::<T>())?;
        if end > PAYLOAD_MIN && end > self.payload() {
            return None;
        }
        let ptr = self.ptr().wrapping_add(at).cast::<Unaligned<T>>();
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

    /// Copies bytes from `at` on; `None` when they are not all within the payload, or when `into` is a
    /// part of the page. Then the page is held exclusively, and this guard is not valid any more.
    #[inline]
    pub fn copy_to(&self, at: usize, into: &mut [u8]) -> Option<()> {
        let len = self.payload();
        if at.checked_add(into.len())? > len {
            return None;
        }
        // An exclusive guard lends slices of its page, also to the thread that looks at it.
        let (page, start) = (self.ptr().addr(), into.as_ptr().addr());
        if page < start + into.len() && start < page + len {
            return None;
        }
        let from = self.ptr().wrapping_add(at);
        // SAFETY: within the mapping as in `read`, and no byte of the page is in `into`, as was just
        // looked at.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
        Some(())
    }

    /// Compares the bytes at `at` with `key`.
    #[inline]
    #[must_use]
    pub fn compare(&self, at: usize, len: usize, key: &[u8]) -> Option<std::cmp::Ordering> {
        if at.checked_add(len)? > self.payload() {
            return None;
        }
        let common = len.min(key.len());
        let (words, rest) = key[..common].as_chunks::<8>();
        // Eight bytes in the order of their values: one by one a search took twice as long.
        for (n, word) in words.iter().enumerate() {
            let here = u64::from_be(self.read::<u64>(at + n * 8)?);
            match here.cmp(&u64::from_be_bytes(*word)) {
                std::cmp::Ordering::Equal => {}
                other => return Some(other),
            }
        }
        let first = at + common - rest.len();
        for (n, byte) in rest.iter().enumerate() {
            match self.byte(first + n)?.cmp(byte) {
                std::cmp::Ordering::Equal => {}
                other => return Some(other),
            }
        }
        Some(len.cmp(&key.len()))
    }

    /// Becomes shared if the page is as it was.
    #[inline]
    #[must_use]
    pub fn try_share(self) -> Option<SharedGuard<'p>> {
        loop {
            let now = self.latch.load();
            if !now.is_readable() || !now.has_room() || now.version() != self.seen.version() {
                return None;
            }
            if self.latch.try_share(now) {
                return Some(SharedGuard(Held::new(self.frames, self.latch, HeldWord::seen(now))));
            }
        }
    }

    /// Becomes exclusive if the page is as it was and has no holder. Where it fails,
    /// [`validate`](Self::validate) tells why: what is still valid is held by others.
    #[inline]
    #[must_use]
    pub fn try_upgrade(self) -> Option<ExclusiveGuard<'p>> {
        if self.frames.table.is_read_only() {
            return None;
        }
        loop {
            let now = self.latch.load();
            if !now.is_free() || now.version() != self.seen.version() {
                return None;
            }
            if self.latch.try_lock(now) {
                let word = HeldWord::locked(self.latch.load());
                return Some(ExclusiveGuard(Held::new(self.frames, self.latch, word)));
            }
        }
    }

    /// Becomes exclusive if the page is as it was, and waits for its holders, readers or a thread that writes
    /// the page back, up to the pool's [`deadline`](super::PoolConfig::deadline). `None`: the page was
    /// changed or evicted, which waiting does not mend. A thread that holds the page itself waits in vain.
    ///
    /// There is no such upgrade of a [`SharedGuard`]: two of one page would wait for each other.
    ///
    /// # Errors
    /// [`Error::LatchTimeout`](crate::Error::LatchTimeout) while the page is as it was and held;
    /// [`Error::Device`](crate::Error::Device) of a table that is only read.
    pub fn upgrade(self) -> Result<Option<ExclusiveGuard<'p>>> {
        let table = &self.frames.table;
        table.check_changeable()?;
        let mut backoff = self.frames.backoff();
        loop {
            let now = self.latch.load();
            if now.is_absent() || now.version() != self.seen.version() {
                return Ok(None);
            }
            if self.latch.try_lock(now) {
                let word = HeldWord::locked(self.latch.load());
                return Ok(Some(ExclusiveGuard(Held::new(self.frames, self.latch, word))));
            }
            // A writer's change shows in the version when it lets go.
            if !now.is_free() && !backoff.wait() {
                return Err(table.timeout(self.id(), &backoff));
            }
        }
    }
}

impl fmt::Debug for OptimisticGuard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OptimisticGuard({} {:?})", self.id(), self.seen)
    }
}
