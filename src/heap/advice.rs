//! Advice on blocks of memory, local or far, from owners that know what they do with them next.
//!
//! Blocks of megabytes, which are filled, read or given up as a whole: for smaller ones the calls cost
//! more than they save. Uses `tiers`; used by `segment`.

#![expect(unsafe_code, reason = "drops what the elements of a vector hold, and passes promises on")]

use super::tiers::{Origin, origin};
use crate::base::units::ByteCount;
use crate::sys::block;
use allocator_api2::alloc::Allocator;
use allocator_api2::vec::Vec;
use std::mem::ManuallyDrop;

/// The range, which is allocated, will be filled. Local memory comes by huge pages then: each costs one
/// fault of the kernel, where small ones cost 512.
pub(crate) fn fill_soon(ptr: *const u8, len: ByteCount) {
    if let Origin::Local = origin(ptr) {
        block::prefer_huge_pages(ptr.addr(), len.as_usize());
    }
}

/// How much of a block it is worth to read ahead, as far as its tier is concerned; zero if it is local.
pub(crate) fn read_ahead_max(ptr: *const u8) -> ByteCount {
    match origin(ptr) {
        Origin::Far(arenas) => arenas.source().map_or(ByteCount::ZERO, |source| source.fetch_max()),
        Origin::Local | Origin::Parent => ByteCount::ZERO,
    }
}

/// The range, which is allocated, will be read: far memory begins to come in.
pub(crate) fn read_soon(ptr: *const u8, len: ByteCount) {
    if let Origin::Far(arenas) = origin(ptr)
        && let Some(source) = arenas.source()
    {
        source.fetch(ptr, len);
    }
}

/// The range, which is allocated, will not be used for a while: far memory goes to its device.
pub(crate) fn leave_alone(ptr: *const u8, len: ByteCount) {
    if let Origin::Far(arenas) = origin(ptr)
        && let Some(source) = arenas.source()
    {
        source.send_out(ptr, len);
    }
}

/// Has 2 MiB that a caller would write to `ptr` written to the device, past the tier's memory. `false`: nothing has
/// changed, and the caller writes them: `ptr` is local, or its tier cannot do it at present.
///
/// # Safety
/// `ptr` is a multiple of 2 MiB; as much is allocated there, which the caller alone uses, and needs nothing of. As
/// much can be read at `from`, and does not change meanwhile.
pub(crate) unsafe fn store_chunk(ptr: *mut u8, from: *const u8) -> bool {
    match origin(ptr) {
        Origin::Far(arenas) => {
            let Some(source) = arenas.source() else { return false };
            // SAFETY: as the caller promises; what is allocated is committed.
            unsafe { source.store_chunk(ptr, from) }
        }
        Origin::Local | Origin::Parent => false,
    }
}

/// Frees a vector, and gives its pages back at once: what the allocator keeps for reuse is the addresses
/// alone. For memory that is freed to make room, which another allocation will not use again.
pub(crate) fn free_now<T: Copy, A: Allocator>(values: Vec<T, A>) {
    let mut values = ManuallyDrop::new(values);
    let (ptr, len) = (values.as_ptr().cast::<u8>(), values.capacity() * size_of::<T>());
    if len > 0 {
        // SAFETY: the vector's memory, which is used by nobody else.
        unsafe { forget(ptr, len) };
    }
    // SAFETY: not used again; its elements, whose bytes have changed, are `Copy` and not dropped.
    unsafe { ManuallyDrop::drop(&mut values) };
}

/// Drops what the pages hold that lie whole in a range.
///
/// # Safety
/// The range is allocated, nobody needs what it holds, and no reference into it exists.
unsafe fn forget(ptr: *const u8, len: usize) {
    match origin(ptr) {
        Origin::Local => {
            // SAFETY: jemalloc's memory is anonymous and private; the rest is the caller's promise.
            unsafe { block::discard(ptr.addr(), len) };
        }
        Origin::Far(arenas) => {
            if let Some(source) = arenas.source() {
                // SAFETY: as the caller promises; what is allocated is committed.
                unsafe { source.forget(ptr, ByteCount(len as u64)) };
            }
        }
        Origin::Parent => {}
    }
}
