//! A store that encrypts what another one keeps.
//!
//! [`EncryptedStore`] sits between the pager and any store. Writes are encrypted on the way, in
//! bounce buffers, because a handler may read a frame while it is being written; reads arrive in
//! the reader's own buffers and are decrypted there. A block's number, the number of its write and
//! its tag stay in this process's memory, so that blocks keep their size on the device and an older
//! or foreign block does not pass for the present one.
//!
//! ```text
//!   push(write) -> accepted, waiting -> encrypted into a bounce buffer -> inner queue -> done
//!   push(read)  -> inner queue -> decrypted in place, tag compared -> done, or `Corrupt`
//! ```
//! # Invariants
//! 1. A bounce buffer is free or belongs to exactly one request of the inner queue.
//! 2. A block's seal is noted before its bytes are handed on; a reader of the block learns of it
//!    from the writer, after the write, so that it sees the seal too.

#![expect(unsafe_code, reason = "copies, encrypts and decrypts in raw buffers")]

use super::cipher::{Cipher, Seal};
use super::pending::{Pending, PendingRequest};
use super::{DEPTH_MAX, IO_ALIGN, OnlyUser, Op, Queue, Request, Store, check_range};
use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::meta::LazyArray;
use crate::sys::vm::{Huge, Mapping};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a block, which is encrypted as one.
const BLOCK: usize = IO_ALIGN;
/// Bounce buffers of a queue: writes that the device works on at the same time.
const BOUNCES: usize = 8;
/// Bytes of a bounce buffer.
const BOUNCE_LEN: usize = 1 << 20;
/// Marks the inner queue's tokens of writes; the rest is the bounce buffer's index.
const TOKEN_WRITE: u64 = 1 << 32;

/// A store whose bytes are encrypted under a key that lives only in this process.
///
/// Encrypts by blocks of 4 KiB. Reading a block that was never written, or was discarded or zeroed since, is
/// [`Error::Corrupt`].
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{MemStore, EncryptedStore, Store};
/// use std::sync::Arc;
///
/// let memory = Arc::new(MemStore::new(ByteCount::mib(1))?);
/// let store = EncryptedStore::new(memory)?;
/// assert_eq!(store.capacity(), ByteCount::mib(1));
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct EncryptedStore {
    inner: OnlyUser,
    vault: Arc<Vault>,
}

/// The key, and what there is to know of each block.
#[derive(Debug)]
struct Vault {
    cipher: Cipher,
    /// Name of the store in errors.
    name: Arc<str>,
    /// Per block: number of the write, 0 for none, and the tag's halves.
    seals: LazyArray<[AtomicU64; 3]>,
}

impl EncryptedStore {
    /// Wraps `inner`, whose contents are of no use from now on, under a fresh key.
    ///
    /// # Errors
    /// [`Error::Os`] without random numbers or memory, [`Error::Device`] when a region, a pool or another encrypted
    /// store uses `inner`.
    pub fn new(inner: Arc<dyn Store>) -> Result<EncryptedStore> {
        let inner = OnlyUser::of(inner)?;
        let blocks = inner.capacity().as_usize() / BLOCK;
        let (cipher, name) = (Cipher::new()?, inner.name());
        let vault = Vault { cipher, name, seals: LazyArray::new(blocks)? };
        Ok(EncryptedStore { inner, vault: Arc::new(vault) })
    }

    /// Forgets the seals of a range's blocks.
    fn forget(&self, offset: u64, len: u64) {
        check_range(offset, len, self.capacity());
        let blocks = offset as usize / BLOCK..(offset + len) as usize / BLOCK;
        for seal in &self.vault.seals[blocks] {
            seal[0].store(0, Ordering::Relaxed);
        }
    }
}

impl Vault {
    fn capacity(&self) -> ByteCount {
        ByteCount((self.seals.len() * BLOCK) as u64)
    }

    /// Encrypts whole blocks in place and notes their seals.
    fn seal(&self, offset: u64, bytes: &mut [u8]) {
        let first = offset / BLOCK as u64;
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let seal = self.cipher.seal(block, bytes);
            let [number, low, high] = &self.seals[block as usize];
            // Relaxed: invariant 2.
            number.store(seal.number, Ordering::Relaxed);
            low.store(seal.tag[0], Ordering::Relaxed);
            high.store(seal.tag[1], Ordering::Relaxed);
        }
    }

    /// Decrypts whole blocks in place, up to the first that is not what was written.
    fn open(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let first = offset / BLOCK as u64;
        for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(BLOCK)) {
            let [number, low, high] = &self.seals[block as usize];
            // Relaxed: invariant 2.
            let load = |half: &AtomicU64| half.load(Ordering::Relaxed);
            let seal = Seal { number: load(number), tag: [load(low), load(high)] };
            if seal.number == 0 || !self.cipher.open(block, seal, bytes) {
                return Err(Error::Corrupt { store: Arc::clone(&self.name), slot: block });
            }
        }
        Ok(())
    }
}

// SAFETY: moves bytes by a store that keeps the promises, and refuses what is not what it wrote.
unsafe impl Store for EncryptedStore {
    fn capacity(&self) -> ByteCount {
        self.vault.capacity()
    }

    fn outlives_process(&self) -> bool {
        self.inner.outlives_process()
    }

    fn room(&self) -> ByteCount {
        self.inner.room().min(self.capacity())
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let depth = depth.clamp(1, DEPTH_MAX - BOUNCES as u32);
        Ok(Box::new(EncryptedQueue {
            inner: self.inner.open_queue(depth + BOUNCES as u32)?,
            vault: Arc::clone(&self.vault),
            pending: Pending::new(depth),
            owners: [0; BOUNCES],
            free_bounces: (0..BOUNCES).rev().collect(),
            bounces: Mapping::reserve(BOUNCES * BOUNCE_LEN, IO_ALIGN, Huge::No)?,
        }))
    }

    fn queue_bytes(&self, depth: u32) -> ByteCount {
        let inner = self.inner.queue_bytes(depth + BOUNCES as u32);
        ByteCount(inner.0 + u64::from(depth) * Pending::REQUEST as u64)
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        check_range(offset, into.len() as u64, self.capacity());
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.read_now(offset, into) }?;
        // SAFETY: the buffer is the caller's, which nobody else uses, just written.
        let bytes = unsafe { &mut *into };
        self.vault.open(offset, bytes)
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.forget(offset, len);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.discard(offset, len) }
    }

    unsafe fn zero(&self, offset: u64, len: u64) -> Result<()> {
        self.forget(offset, len);
        // SAFETY: as in `discard`.
        unsafe { self.inner.zero(offset, len) }
    }

    #[cfg(feature = "network")]
    fn server(&self, at: usize) -> Option<super::ServerStats> {
        self.inner.server(at)
    }

    fn describe(&self) -> String {
        format!("{}, encrypted (AES-256-GCM)", self.inner.describe())
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.vault.name)
    }
}

/// A queue that encrypts and decrypts on the way to and from another one, with the buffers that writes pass through.
struct EncryptedQueue {
    /// Dropped before the bounce buffers, which its requests use.
    inner: Box<dyn Queue>,
    vault: Arc<Vault>,
    /// Writes wait until they are encrypted; reads do not.
    pending: Pending,
    /// Per bounce buffer in use: its entry.
    owners: [usize; BOUNCES],
    free_bounces: Vec<usize>,
    bounces: Mapping,
}

impl EncryptedQueue {
    /// Encrypts what waits, as far as there are bounce buffers, and hands it on.
    fn hand_on(&mut self) {
        while let Some(index) = self.pending.first_waiting() {
            let entry = self.pending.entry_mut(index);
            if entry.is_handed() {
                self.pending.end_first_wait();
                continue;
            }
            let Some(bounce) = self.free_bounces.pop() else { return };
            let len = (entry.len - entry.handed).min(BOUNCE_LEN as u64) as usize;
            // SAFETY: within the mapping, which holds `BOUNCES` buffers.
            let start = unsafe { self.bounces.as_ptr().add(bounce * BOUNCE_LEN) };
            // SAFETY: the buffer is free (invariant 1): nobody else uses it.
            let bytes = unsafe { std::slice::from_raw_parts_mut(start, len) };
            entry.copy_to(entry.handed, bytes);
            let offset = entry.offset + entry.handed;
            self.vault.seal(offset, bytes);
            let segments = [&raw mut *bytes];
            let token = TOKEN_WRITE | bounce as u64;
            let request = Request { token, op: Op::Write, offset, segments: &segments };
            // SAFETY: the bounce buffer is left alone until the completion (invariant 1); the
            // caller of `push` promised that the range overlaps no other request's.
            let pushed = unsafe { self.inner.push(request) };
            assert!(pushed, "the inner queue has room for all bounce buffers");
            self.owners[bounce] = index;
            entry.handed += len as u64;
            entry.pieces += 1;
        }
    }

    /// Waits for the inner queue and books what it has finished.
    fn wait_inner(&mut self, timeout: Duration) -> Result<bool> {
        let EncryptedQueue { inner, vault, pending, owners, free_bounces, .. } = self;
        inner.wait(timeout, &mut |token, result| {
            let index = if token & TOKEN_WRITE != 0 {
                let bounce = (token & !TOKEN_WRITE) as usize;
                free_bounces.push(bounce);
                owners[bounce]
            } else {
                token as usize
            };
            let entry = pending.entry(index);
            let is_read = entry.op == Op::Read;
            let result =
                result.and_then(|()| if is_read { open_all(vault, entry) } else { Ok(()) });
            pending.settle(index, result);
        })
    }
}

// SAFETY: a request is reported when the inner queue has reported all of its pieces, none of which is
// handed on any more.
unsafe impl Queue for EncryptedQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let accepted = self.pending.accept(&request, self.vault.capacity());
        let Some(index) = accepted else { return false };
        if request.op == Op::Write {
            self.pending.wait(index);
            return true;
        }
        // SAFETY: the caller's promise, passed on.
        let pushed = unsafe { self.inner.push(Request { token: index as u64, ..request }) };
        assert!(pushed, "the inner queue has room for all that were accepted");
        let entry = self.pending.entry_mut(index);
        (entry.handed, entry.pieces) = (entry.len, 1);
        true
    }

    fn submit(&mut self) -> Result<()> {
        self.hand_on();
        self.inner.submit()
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.inner.watch(fd)
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        self.hand_on();
        let waited = self.wait_inner(timeout);
        // Bounce buffers came back: what waited for them goes now, not with the next call.
        let before = self.inner.in_flight();
        self.hand_on();
        self.pending.report(done);
        if self.inner.in_flight() > before {
            self.inner.submit()?;
        }
        waited
    }

    fn in_flight(&self) -> u32 {
        self.pending.in_flight()
    }
}

/// Decrypts a read's buffers in place.
fn open_all(vault: &Vault, entry: &PendingRequest) -> Result<()> {
    let mut offset = entry.offset;
    for segment in entry.segments() {
        // SAFETY: the caller of `push` leaves the buffers to the queue until the completion is
        // reported, and the inner queue is done with them.
        let bytes = unsafe { &mut **segment };
        vault.open(offset, bytes)?;
        offset += segment.len() as u64;
    }
    Ok(())
}
