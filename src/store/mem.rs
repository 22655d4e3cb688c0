//! A store in memory: no device, no latency. For tests and as the baseline of benchmarks.

#![expect(unsafe_code, reason = "copies between raw buffers")]

use super::inline_queue::{InlineQueue, Mover};
use super::{IO_ALIGN, Op, Queue, Store, check_range};
use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::file::{IoVec, SysResult};
use crate::sys::vm::{Huge, Mapping};
use std::os::fd::RawFd;
use std::sync::Arc;

/// A store in anonymous memory of the process, which counts towards its resident size. Like all
/// far data it is not in core dumps.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{MemStore, Store};
///
/// let store = MemStore::new(ByteCount::gib(1))?; // Costs memory when written only.
/// assert_eq!(store.capacity(), ByteCount::gib(1));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct MemStore {
    memory: Arc<MemContent>,
}

/// State that a store's queues share.
#[derive(Debug)]
struct MemContent {
    mapping: Mapping,
    /// Name in errors.
    name: Arc<str>,
}

impl MemStore {
    /// Reserves address space for `capacity` bytes, rounded up to whole 4,096.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::BadRange`] when there is no address range of this size.
    pub fn new(capacity: ByteCount) -> Result<MemStore> {
        let len = capacity.as_usize().max(1).checked_next_multiple_of(IO_ALIGN);
        let len = len.ok_or(Error::BadRange { reason: "length overflows".into() })?;
        let mapping = Mapping::reserve(len, IO_ALIGN, Huge::Default)?;
        let name = "the memory store".into();
        Ok(MemStore { memory: Arc::new(MemContent { mapping, name }) })
    }
}

// SAFETY: bytes are copied to and from memory that nobody else has, by the call that asks for it.
unsafe impl Store for MemStore {
    fn capacity(&self) -> ByteCount {
        self.memory.capacity()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        Ok(Box::new(InlineQueue::new(Arc::clone(&self.memory), depth)?))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let len = into.len() as u64;
        check_range(offset, len, self.capacity());
        let mut iovecs = [IoVec::new(into.cast(), into.len())];
        // SAFETY: the caller vouches for the buffer and for the store's range.
        unsafe { self.memory.transfer(Op::Read, &mut iovecs, offset) }
            .map_err(|errno| Op::Read.failed(&self.memory.name, offset, len, errno))
    }

    fn sync(&self) -> Result<()> {
        Ok(()) // Memory ends with the process.
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        check_range(offset, len, self.capacity());
        // SAFETY: who discards a range of the store gives its contents up, and nobody but the
        // store has a pointer into the mapping.
        unsafe { self.memory.mapping.discard(offset as usize, len as usize) }
    }

    fn describe(&self) -> String {
        format!("memory, {}", self.capacity())
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.memory.name)
    }

    fn inherit(&self) -> Result<Option<RawFd>> {
        self.memory.mapping.set_inherited(true).map(|()| None)
    }

    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(MemStore::new(self.capacity())?))
    }
}

impl Mover for Arc<MemContent> {
    fn capacity(&self) -> ByteCount {
        ByteCount(self.mapping.len() as u64)
    }

    fn name(&self) -> &Arc<str> {
        &self.name
    }

    unsafe fn transfer(&self, op: Op, iovecs: &mut [IoVec], offset: u64) -> SysResult {
        let mut at = offset as usize;
        for iovec in iovecs {
            assert!(at + iovec.len() <= self.mapping.len(), "request past the end of the store");
            // SAFETY: within the mapping, checked above.
            let stored = unsafe { self.mapping.as_ptr().add(at) };
            let (from, to) = match op {
                Op::Read => (stored.cast_const(), iovec.ptr()),
                Op::Write => (iovec.ptr().cast_const(), stored),
            };
            // SAFETY:
            // - The mapping's side is in bounds, checked above; the caller vouches for the other
            //   side and that nobody else writes either.
            // - They do not overlap: nobody but this store has a pointer into the mapping.
            unsafe { std::ptr::copy_nonoverlapping(from, to, iovec.len()) };
            at += iovec.len();
        }
        Ok(())
    }
}
