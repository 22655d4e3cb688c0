//! What becomes of a store's bytes when its user is done with them.
//!
//! [`wipe`] runs once, at shutdown, when no queue is open any more; [`overwrite`] is how a store
//! without a better way writes zeros.

#![expect(unsafe_code, reason = "lends a buffer of zeros to a queue")]

use super::{IO_ALIGN, Op, Queue, Request, Segment, Store, check_range};
use crate::base::error::Result;
use crate::base::units::ByteCount;
use crate::sys::vm::{Huge, Mapping};
use std::time::Duration;

/// Bytes of one write of zeros.
const ZEROS_LEN: u64 = 1 << 20;
/// Writes of zeros in flight.
const DEPTH: u32 = 8;
/// Longest look at the queue.
const WAIT: Duration = Duration::from_secs(1);

/// What happens to the evicted pages on the device when a region stops.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wipe {
    /// Nothing. An unlinked temporary file is gone anyway; a device keeps what was written last.
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

/// Writes zeros through a queue of the store.
pub(super) fn overwrite<S: Store + ?Sized>(store: &S, offset: u64, len: u64) -> Result<()> {
    check_range(offset, len, store.capacity());
    // Outlives the queue: dropping that waits for the device.
    let zeros = Mapping::reserve(ZEROS_LEN as usize, IO_ALIGN, Huge::No)?;
    let mut queue = store.open_queue(DEPTH)?;
    let end = offset + len;
    let mut at = offset;
    let mut outcome = Ok(());
    while at < end && outcome.is_ok() {
        let piece = ZEROS_LEN.min(end - at);
        let segments = [Segment { ptr: zeros.as_ptr(), len: piece as usize }];
        let request = Request { token: at, op: Op::Write, offset: at, segments: &segments };
        // SAFETY: nobody ever writes the mapping, which lives longer than the queue; the pieces
        // do not overlap, and the caller uses the range for nothing else.
        if unsafe { queue.push(request) } {
            at += piece;
        } else {
            collect(&mut *queue, &mut outcome)?;
        }
    }
    while queue.in_flight() > 0 {
        collect(&mut *queue, &mut outcome)?;
    }
    outcome
}

fn collect(queue: &mut dyn Queue, outcome: &mut Result<()>) -> Result<()> {
    queue.wait(WAIT, &mut |completion| {
        if let (Ok(()), Err(error)) = (&*outcome, completion.result) {
            *outcome = Err(error);
        }
    })
}

const _: () = assert!(ZEROS_LEN.is_multiple_of(IO_ALIGN as u64));
