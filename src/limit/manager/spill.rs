//! Where temporary memory goes that does not fit.

#![expect(unsafe_code, reason = "declares the unsafe trait whose memory the manager hands out")]

use crate::base::error::Result;
use crate::base::units::ByteCount;
use std::ptr::NonNull;

/// Memory beyond the limit for temporary data: pages of it come and go by themselves.
///
/// # Safety
/// The result of [`allocate`](Spill::allocate) is memory of `len` bytes, aligned to 4,096, that
/// nobody else uses and that can be read and written until it is freed.
pub(crate) unsafe trait Spill: Send + Sync {
    /// Reserves `len` bytes of evictable memory.
    ///
    /// # Errors
    /// When there is no room for so much, saying what is full.
    fn allocate(&self, len: ByteCount) -> Result<NonNull<u8>>;

    /// Gives back what [`allocate`](Spill::allocate) returned.
    ///
    /// # Safety
    /// `ptr` and `len` are of one allocation of this spill, which is given back once, and which
    /// nobody uses any more.
    unsafe fn free(&self, ptr: NonNull<u8>, len: ByteCount);
}
