//! What the heap asks of a region: address ranges that jemalloc's extents are cut from.

#![expect(unsafe_code, reason = "declares the unsafe call that clears")]

use crate::base::units::ByteCount;
use std::ptr::NonNull;

/// The parts of a committed range that may hold bytes of an earlier use, because their pages are
/// shared with other extents: its first `head` and its last `tail` bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Edges {
    pub(crate) head: usize,
    pub(crate) tail: usize,
}

/// A source of far address space for one arena set.
///
/// Called from extent hooks, that is with jemalloc's arena locks held: nothing here may allocate
/// from the heap it serves or wait for a device.
///
/// All addresses and lengths are multiples of 4 KiB (jemalloc's page), not of the tier's page
/// size; the implementation keeps track of pages that are only partly given back.
pub(crate) trait ExtentSource: Send + Sync {
    /// First address of the reservation; "is this pointer far?" is one compare.
    fn base(&self) -> usize;

    /// Bytes of the reservation.
    fn span(&self) -> usize;

    /// Hands out an unused, uncommitted range. `None`: no address range of this size and alignment
    /// is left.
    fn reserve(&self, len: ByteCount, align: ByteCount) -> Option<NonNull<u8>>;

    /// Charges `[ptr, ptr + len)` against the tier's capacity, before its first use. It reads as
    /// zero afterwards, but for its [`Edges`]: to clear those would bring shared pages in. Returns
    /// `None`, changing nothing, when limit and device together could not keep it.
    fn commit(&self, ptr: NonNull<u8>, len: ByteCount) -> Option<Edges>;

    /// Makes `[ptr, ptr + len)`, which is committed, read as zero. This may wait for a device: not
    /// to be called from a hook.
    ///
    /// # Safety
    /// The caller alone uses the range, and needs nothing of what it holds.
    unsafe fn clear(&self, ptr: NonNull<u8>, len: ByteCount);

    /// Drops the contents of `[ptr, ptr + len)`, which is committed: frames, slots and pending
    /// writes go; the range must be committed again before use.
    fn decommit(&self, ptr: NonNull<u8>, len: ByteCount);

    /// Returns an uncommitted range for ever: it may be handed out by a later `reserve`.
    fn release(&self, ptr: NonNull<u8>, len: ByteCount);
}
