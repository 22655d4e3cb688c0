//! A store that calls the test before every transfer, which may wait there, or panic.
#![expect(unsafe_code, reason = "passes buffers on")]

use farheap::store::{MemStore, Op, Queue, Request, Store};
use farheap::{ByteCount, Result};
use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

/// Gets what a transfer does and its first byte on the store.
type Hook = dyn Fn(Op, u64) + Send + Sync;

/// A store in memory with a hook.
pub(crate) struct Hooked {
    inner: Arc<dyn Store>,
    hook: Arc<Hook>,
}

impl Hooked {
    pub(crate) fn new(
        inner: Arc<MemStore>,
        hook: impl Fn(Op, u64) + Send + Sync + 'static,
    ) -> Arc<Hooked> {
        Arc::new(Hooked { inner, hook: Arc::new(hook) })
    }
}

impl fmt::Debug for Hooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hooked")
    }
}

// SAFETY: passes everything on to a store.
unsafe impl Store for Hooked {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn room(&self) -> ByteCount {
        self.inner.room()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let inner = self.inner.open_queue(depth)?;
        Ok(Box::new(HookedQueue { inner, hook: Arc::clone(&self.hook) }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        (self.hook)(Op::Read, offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.read_now(offset, into) }
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.discard(offset, len) }
    }

    fn describe(&self) -> String {
        format!("hooked {}", self.inner.describe())
    }
}

struct HookedQueue {
    inner: Box<dyn Queue>,
    hook: Arc<Hook>,
}

// SAFETY: passes everything on to a queue.
unsafe impl Queue for HookedQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        (self.hook)(request.op, request.offset);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.push(request) }
    }

    fn submit(&mut self) -> Result<()> {
        self.inner.submit()
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.inner.watch(fd)
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        self.inner.wait(timeout, done)
    }

    fn in_flight(&self) -> u32 {
        self.inner.in_flight()
    }
}
