//! Bytes in far memory that stay where they are.
#![expect(unsafe_code, reason = "promises that the bytes of a file stay where they are")]

use farheap::allocator_api2::vec::Vec;
use farheap::{ByteCount, Heap, Tier};
use stable_deref_trait::StableDeref;
use std::io;
use std::ops::Deref;

/// Bytes in far memory, at most as many as were asked for.
pub(crate) struct FarBytes(Vec<u8, Tier>);

impl FarBytes {
    /// # Errors
    /// [`io::ErrorKind::OutOfMemory`] where the tier has no memory for them.
    pub(crate) fn with_capacity(tier: &Heap, len: usize) -> io::Result<FarBytes> {
        let mut bytes = Vec::new_in(tier.tier());
        bytes.try_reserve_exact(len).map_err(|_| {
            let (len, name) = (ByteCount(len as u64), tier.name());
            let reason = format!(
                "no memory for {len} of an index in the tier `{name}`: its device is full or failing, or it was shut down"
            );
            io::Error::new(io::ErrorKind::OutOfMemory, reason)
        })?;
        Ok(FarBytes(bytes))
    }

    /// Appends bytes within the capacity.
    pub(crate) fn push(&mut self, data: &[u8]) {
        assert!(data.len() <= self.0.capacity() - self.0.len(), "the capacity was reserved");
        self.0.extend_from_slice(data);
    }
}

impl Deref for FarBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

// SAFETY: the bytes are an allocation of their own, which stays where it is when the vector moves; `deref` has no
// effect, and nobody pushes through a shared reference.
unsafe impl StableDeref for FarBytes {}
