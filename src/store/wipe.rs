//! Wiping of a store's bytes when its user is done with them.
//!
//! [`wipe`] runs once, at shutdown, when no queue is open any more.

#![expect(unsafe_code, reason = "discards what nobody needs any more")]

use super::Store;
use crate::base::error::Result;
use crate::base::units::ByteCount;

/// Treatment of the evicted pages on the device when a region stops.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wipe {
    /// Nothing but that the space of pages which were freed is given back, if it has not been yet and
    /// but for runs below 1 MiB. An unlinked temporary file is gone anyway; a device keeps what was
    /// written last of pages that were not freed.
    #[default]
    Off,
    /// The space is given back (`BLKDISCARD`, a hole in a file). Fast; whether the bytes can still
    /// be read afterwards is up to the device.
    Discard,
    /// Everything that was ever written is overwritten with zeros. Takes as long as writing it.
    Zero,
}

/// Wipes the first `used` bytes of a store that nobody uses any more.
///
/// # Errors
/// When the device refuses; the rest is as it was.
///
/// # Safety
/// As for [`Store::discard`].
pub(crate) unsafe fn wipe(store: &dyn Store, how: Wipe, used: ByteCount) -> Result<()> {
    match how {
        _ if used == ByteCount::ZERO => Ok(()),
        Wipe::Off => Ok(()),
        // SAFETY: the caller's promise.
        Wipe::Discard => unsafe { store.discard(0, used.0) },
        // SAFETY: the caller's promise.
        Wipe::Zero => unsafe { store.zero(0, used.0) },
    }
}
