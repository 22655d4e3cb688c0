//! A store of a program's own under the global allocator.
//!
//! ```text
//! cargo run --release --example own_store
//! ```
//!
//! [`Counting`] passes all requests on to another store and counts them. The program sorts four times
//! as much as the limit lets into memory, checks the result, and compares what its store has counted
//! with the statistics of the heap: every byte that left or came back went through it.
//!
//! A store that compresses, mirrors or sends pages to another machine has the same two parts: the
//! [`Store`], and the [`Queue`]s through which threads make requests.

#![expect(unsafe_code, reason = "implements a store, on which memory safety rests")]

use farheap::store::{BlockStore, Op, Queue, Request, Store};
use farheap::{ByteCount, Error, FarHeap, Heap};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

#[global_allocator]
static HEAP: FarHeap = FarHeap::new();

const LIMIT: ByteCount = ByteCount::mib(16);
const DATA: ByteCount = ByteCount::mib(64);

/// Bytes that were asked for. Nothing else depends on the counts, so `Relaxed` is enough.
#[derive(Debug, Default)]
struct Counts {
    read: AtomicU64,
    written: AtomicU64,
}

/// Counts what another store is asked to do.
#[derive(Debug)]
struct Counting<S> {
    inner: S,
    counts: Arc<Counts>,
}

// SAFETY: all is passed on unchanged to a store, which keeps the promises of the trait.
unsafe impl<S: Store> Store for Counting<S> {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn room(&self) -> ByteCount {
        self.inner.room()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>, Error> {
        let inner = self.inner.open_queue(depth)?;
        Ok(Box::new(CountingQueue { inner, counts: Arc::clone(&self.counts) }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<(), Error> {
        self.counts.read.fetch_add(into.len() as u64, Relaxed);
        // SAFETY: passed on, as the caller promises.
        unsafe { self.inner.read_now(offset, into) }
    }

    fn sync(&self) -> Result<(), Error> {
        self.inner.sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<(), Error> {
        // SAFETY: passed on, as the caller promises.
        unsafe { self.inner.discard(offset, len) }
    }

    fn describe(&self) -> String {
        format!("{}, counted", self.inner.describe())
    }
}

/// A queue of a [`Counting`] store.
struct CountingQueue {
    inner: Box<dyn Queue>,
    counts: Arc<Counts>,
}

// SAFETY: all is passed on unchanged to a queue, which keeps the promises of the trait.
unsafe impl Queue for CountingQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let len = request.bytes();
        let count = match request.op {
            Op::Read => &self.counts.read,
            Op::Write => &self.counts.written,
        };
        // SAFETY: passed on, as the caller promises.
        let accepted = unsafe { self.inner.push(request) };
        if accepted {
            count.fetch_add(len, Relaxed);
        }
        accepted
    }

    fn submit(&mut self) -> Result<(), Error> {
        self.inner.submit()
    }

    fn watch(&mut self, fd: RawFd) -> Result<(), Error> {
        self.inner.watch(fd)
    }

    fn wait(
        &mut self,
        timeout: Duration,
        done: &mut dyn FnMut(u64, Result<(), Error>),
    ) -> Result<bool, Error> {
        self.inner.wait(timeout, done)
    }

    fn in_flight(&self) -> u32 {
        self.inner.in_flight()
    }
}

fn main() -> Result<(), Error> {
    let counts = Arc::new(Counts::default());
    let file = BlockStore::temporary(None, None)?;
    let store = Arc::new(Counting { inner: file, counts: Arc::clone(&counts) });
    // The numbers are in no system call, so they may be far without kernel faults too.
    let options = Heap::builder().parse("mode:user")?.far_limit(LIMIT);
    let heap = match options.store(store).start() {
        Ok(heap) => heap,
        Err(error) => {
            println!("skipped: {error}");
            return Ok(());
        }
    };

    let count = DATA.get() / size_of::<u64>() as u64;
    // An odd factor makes the low bits of the products of 0, 1, 2, ... all different.
    let mut numbers: Vec<u64> = (0..count).map(|n| n.wrapping_mul(0x9e37_79b9) % count).collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..count), "count is a power of two: a permutation, sorted");

    let stats = heap.stats();
    assert!(stats.resident_bytes_max <= LIMIT, "resident: {}", stats.resident_bytes_max);
    drop(numbers);
    heap.shutdown()?;
    let (read, written) = (counts.read.load(Relaxed), counts.written.load(Relaxed));
    assert!(written >= (DATA.get() - LIMIT.get()), "{written} bytes written");
    assert!(ByteCount(read) >= stats.bytes_read, "{read} of {} read", stats.bytes_read);
    assert!(
        ByteCount(written) >= stats.bytes_written,
        "{written} of {} written",
        stats.bytes_written
    );
    println!("{DATA} sorted in {LIMIT}: {} read, {} written", ByteCount(read), ByteCount(written));
    Ok(())
}
