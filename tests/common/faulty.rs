//! A store that breaks on demand: the device of failure tests.
//!
//! [`FaultyStore`] wraps any store and follows a plan that a test changes through its
//! [`FaultControl`] while I/O runs. What becomes of a request is decided when it is pushed; its
//! completion is held back in a fixed table until its time has come and the device is not paused.

#![allow(dead_code, reason = "each test binary uses a part")]
#![expect(unsafe_code, reason = "passes buffers on and flips bits in them")]

use farheap::store::{Op, Queue, Request, Store};
use farheap::{ByteCount, Error};
use std::os::fd::RawFd;
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Error>;

/// What offsets, lengths and addresses are multiples of.
const IO_ALIGN: usize = 4096;
/// Maximum number of requests that a queue holds.
const DEPTH_MAX: u32 = 4096;

/// How often a held-back completion is looked at again.
const HELD_POLL: Duration = Duration::from_millis(1);

/// Longest single wait: keeps deadlines representable.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

const MILLION: u64 = 1_000_000;

/// Wraps a store and breaks it as its [`FaultControl`] says.
#[derive(Debug)]
pub(crate) struct FaultyStore {
    inner: Arc<dyn Store>,
    plan: Arc<Plan>,
}

/// Changes what a [`FaultyStore`] does, from any thread and at any time.
///
/// A request that is in flight when the plan changes may still follow the old one.
#[derive(Clone, Debug)]
pub(crate) struct FaultControl {
    plan: Arc<Plan>,
}

/// Atomics are `Relaxed` unless said otherwise: each is a setting of its own.
#[derive(Debug, Default)]
struct Plan {
    /// The wrapped store's.
    name: Arc<str>,
    reads: Failures,
    writes: Failures,
    sync_left: AtomicU64,
    sync_errno: AtomicU32,
    short_left: AtomicU64,
    corrupt_left: AtomicU64,
    corrupt_per_million: AtomicU32,
    delay_ns: AtomicU64,
    paused: AtomicBool,
    /// The `errno` of everything, 0 while the device is there.
    gone: AtomicU32,
    random: AtomicU64,
    injected: AtomicU64,
    held: AtomicU64,
    discards: AtomicU64,
}

#[derive(Debug, Default)]
struct Failures {
    /// Requests that pass before the next ones fail.
    skip_left: AtomicU64,
    next_left: AtomicU64,
    next_errno: AtomicU32,
    per_million: AtomicU32,
    fraction_errno: AtomicU32,
}

/// What is to become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    Fail(i32),
    Short,
    Corrupt,
}

impl FaultyStore {
    /// Wraps `inner`; nothing is broken yet. `seed` decides which requests a fraction hits and
    /// which bits flip.
    #[must_use]
    pub(crate) fn new(inner: Arc<dyn Store>, seed: u64) -> FaultyStore {
        let (name, random) = (inner.name(), AtomicU64::new(seed));
        let plan = Plan { name, random, ..Plan::default() };
        FaultyStore { inner, plan: Arc::new(plan) }
    }

    /// Returns a handle that changes the plan.
    #[must_use]
    pub(crate) fn control(&self) -> FaultControl {
        FaultControl { plan: Arc::clone(&self.plan) }
    }
}

impl FaultControl {
    /// Fails the next `count` requests of the kind with `errno`.
    pub(crate) fn fail_next(&self, op: Op, count: u64, errno: i32) {
        self.fail_after(op, 0, count, errno);
    }

    /// Lets `skip` requests of the kind pass, and fails the next `count` with `errno`.
    pub(crate) fn fail_after(&self, op: Op, skip: u64, count: u64, errno: i32) {
        let failures = self.plan.failures(op);
        failures.skip_left.store(skip, Ordering::Relaxed);
        failures.next_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `take_one`: who counts down sees the errno.
        failures.next_left.store(count, Ordering::Release);
    }

    /// Fails about `per_million` of a million requests of the kind with `errno`; 0 ends that.
    pub(crate) fn fail_fraction(&self, op: Op, per_million: u32, errno: i32) {
        let failures = self.plan.failures(op);
        failures.fraction_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `verdict`.
        failures.per_million.store(per_million, Ordering::Release);
    }

    /// Fails the next `count` calls of [`Store::sync`] with `errno`; what was written stays.
    pub(crate) fn fail_syncs(&self, count: u64, errno: i32) {
        self.plan.sync_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `take_one`.
        self.plan.sync_left.store(count, Ordering::Release);
    }

    /// Cuts the next `count` reads short: half of the first buffer is filled, the result is `EIO`.
    pub(crate) fn shorten_reads(&self, count: u64) {
        self.plan.short_left.store(count, Ordering::Relaxed);
    }

    /// Flips one bit in each of the next `count` reads, which report success.
    ///
    /// # Safety
    /// The reader verifies what it reads (a region with checksums or encryption, a pool with checksums)
    /// or accepts any bytes.
    pub(crate) unsafe fn corrupt_reads(&self, count: u64) {
        self.plan.corrupt_left.store(count, Ordering::Relaxed);
    }

    /// Flips one bit in about `per_million` of a million reads; 0 ends that.
    ///
    /// # Safety
    /// As for [`corrupt_reads`](FaultControl::corrupt_reads).
    pub(crate) unsafe fn corrupt_fraction(&self, per_million: u32) {
        self.plan.corrupt_per_million.store(per_million, Ordering::Relaxed);
    }

    /// Reports every request pushed from now on `delay` after it was pushed, or later.
    pub(crate) fn delay(&self, delay: Duration) {
        let ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.plan.delay_ns.store(ns, Ordering::Relaxed);
    }

    /// Reports nothing before [`release`](FaultControl::release), as a device that hangs.
    pub(crate) fn pause(&self) {
        self.plan.paused.store(true, Ordering::Relaxed);
    }

    /// Ends a [`pause`](FaultControl::pause).
    pub(crate) fn release(&self) {
        self.plan.paused.store(false, Ordering::Relaxed);
    }

    /// Takes the device away: everything, also what is in flight, fails with `errno`.
    pub(crate) fn vanish(&self, errno: i32) {
        self.plan.gone.store(errno.unsigned_abs(), Ordering::Relaxed);
    }

    /// Ends every fault. Bytes keep what was done to them.
    pub(crate) fn heal(&self) {
        for failures in [&self.plan.reads, &self.plan.writes] {
            failures.next_left.store(0, Ordering::Relaxed);
            failures.skip_left.store(0, Ordering::Relaxed);
            failures.per_million.store(0, Ordering::Relaxed);
        }
        self.plan.sync_left.store(0, Ordering::Relaxed);
        self.shorten_reads(0);
        self.plan.corrupt_left.store(0, Ordering::Relaxed);
        self.plan.corrupt_per_million.store(0, Ordering::Relaxed);
        self.delay(Duration::ZERO);
        self.vanish(0);
        self.release();
    }

    /// Requests failed, cut short or corrupted so far.
    #[must_use]
    pub(crate) fn injected(&self) -> u64 {
        self.plan.injected.load(Ordering::Relaxed)
    }

    /// Calls of [`Store::discard`] so far.
    #[must_use]
    pub(crate) fn discards(&self) -> u64 {
        self.plan.discards.load(Ordering::Relaxed)
    }

    /// Requests of all queues that are finished but held back.
    #[must_use]
    pub(crate) fn held(&self) -> u64 {
        self.plan.held.load(Ordering::Relaxed)
    }
}

impl Plan {
    fn failures(&self, op: Op) -> &Failures {
        match op {
            Op::Read => &self.reads,
            Op::Write => &self.writes,
        }
    }

    fn verdict(&self, op: Op) -> Verdict {
        let verdict = self.decide(op);
        if verdict != Verdict::Pass {
            self.injected.fetch_add(1, Ordering::Relaxed);
        }
        verdict
    }

    fn decide(&self, op: Op) -> Verdict {
        if let Some(errno) = self.gone() {
            return Verdict::Fail(errno);
        }
        let failures = self.failures(op);
        if !take_one(&failures.skip_left) && take_one(&failures.next_left) {
            return Verdict::Fail(load_errno(&failures.next_errno));
        }
        // Pairs with the Release in `fail_fraction`: the errno is visible.
        if self.hits(failures.per_million.load(Ordering::Acquire)) {
            return Verdict::Fail(load_errno(&failures.fraction_errno));
        }
        if op == Op::Read && take_one(&self.short_left) {
            return Verdict::Short;
        }
        let corrupt = op == Op::Read
            && (take_one(&self.corrupt_left)
                || self.hits(self.corrupt_per_million.load(Ordering::Relaxed)));
        if corrupt { Verdict::Corrupt } else { Verdict::Pass }
    }

    /// What a call of `sync` fails with.
    fn sync_failure(&self) -> Option<i32> {
        let failure = self
            .gone()
            .or_else(|| take_one(&self.sync_left).then(|| load_errno(&self.sync_errno)))?;
        self.injected.fetch_add(1, Ordering::Relaxed);
        Some(failure)
    }

    fn gone(&self) -> Option<i32> {
        Some(load_errno(&self.gone)).filter(|errno| *errno != 0)
    }

    fn hits(&self, per_million: u32) -> bool {
        per_million > 0 && self.next_random() % MILLION < u64::from(per_million)
    }

    /// The next number of a splitmix64 sequence, which any number of threads may draw from.
    fn next_random(&self) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut z = self.random.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn delay(&self) -> Duration {
        Duration::from_nanos(self.delay_ns.load(Ordering::Relaxed)).min(WAIT_MAX)
    }

    fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// # Safety
    /// `segment` is valid for reads and writes, and nobody else uses it during the call.
    unsafe fn flip_bit(&self, segment: *mut [u8]) {
        let random = self.next_random();
        let offset = (random >> 3) as usize % segment.len();
        // SAFETY: within the buffer.
        let byte = unsafe { segment.cast::<u8>().add(offset) };
        // SAFETY: valid by the caller's word.
        let old = unsafe { byte.read() };
        // SAFETY: as above.
        unsafe { byte.write(old ^ 1 << (random & 7)) };
    }
}

/// The error of a transfer that failed.
pub(crate) fn failed(store: &Arc<str>, op: Op, offset: u64, len: u64, errno: i32) -> Error {
    let op = match op {
        Op::Read => "read",
        Op::Write => "write",
    };
    Error::Io { op, store: Arc::clone(store), offset, len, errno }
}

/// Counts down by one; returns whether there was anything left.
fn take_one(left: &AtomicU64) -> bool {
    // Acquire pairs with the Release in `fail_next`.
    left.fetch_update(Ordering::Acquire, Ordering::Acquire, |n| n.checked_sub(1)).is_ok()
}

fn load_errno(errno: &AtomicU32) -> i32 {
    errno.load(Ordering::Relaxed).cast_signed()
}

// SAFETY: what it breaks it reports as broken, except for `corrupt_reads` and `corrupt_fraction`, whose
// caller takes over the promise about bytes.
unsafe impl Store for FaultyStore {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn outlives_process(&self) -> bool {
        self.inner.outlives_process()
    }

    fn room(&self) -> ByteCount {
        self.inner.room()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let depth = depth.clamp(1, DEPTH_MAX);
        Ok(Box::new(FaultyQueue {
            inner: self.inner.open_queue(depth)?,
            plan: Arc::clone(&self.plan),
            entries: (0..depth).map(|_| None).collect(),
            held: 0,
            capacity: self.inner.capacity(),
        }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let delay = self.plan.delay();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        while self.plan.is_paused() {
            std::thread::sleep(HELD_POLL);
        }
        let fail = |errno| Err(failed(&self.plan.name, Op::Read, offset, into.len() as u64, errno));
        match self.plan.verdict(Op::Read) {
            Verdict::Fail(errno) => fail(errno),
            Verdict::Short => fail(libc::EIO),
            // SAFETY: the caller vouches for the buffer.
            Verdict::Pass => unsafe { self.inner.read_now(offset, into) },
            Verdict::Corrupt => {
                // SAFETY: the caller vouches for the buffer.
                unsafe { self.inner.read_now(offset, into) }?;
                // SAFETY: as above.
                unsafe { self.plan.flip_bit(into) };
                Ok(())
            }
        }
    }

    fn sync(&self) -> Result<()> {
        match self.plan.sync_failure() {
            Some(errno) => Err(Error::Io {
                op: "sync",
                store: Arc::clone(&self.plan.name),
                offset: 0,
                len: 0,
                errno,
            }),
            None => self.inner.sync(),
        }
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        self.plan.discards.fetch_add(1, Ordering::Relaxed);
        match self.plan.gone() {
            Some(errno) => Err(Error::Io {
                op: "discard",
                store: Arc::clone(&self.plan.name),
                offset,
                len,
                errno,
            }),
            // SAFETY: the caller's promise, passed on.
            None => unsafe { self.inner.discard(offset, len) },
        }
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.inner.describe())
    }

    fn inherit(&self) -> Result<Option<RawFd>> {
        self.inner.inherit()
    }

    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        self.inner.open_in_child()
    }

    fn name(&self) -> Arc<str> {
        Arc::clone(&self.plan.name)
    }
}

#[derive(Debug)]
struct Entry {
    token: u64,
    op: Op,
    offset: u64,
    len: u64,
    first: *mut [u8],
    verdict: Verdict,
    due: Instant,
    /// `None` while the inner queue has the request.
    result: Option<Result<()>>,
}

// SAFETY: the entry only remembers the buffer of a request whose owner lets the queue use it from
// whichever thread the queue is on (`Queue::push`, `Queue: Send`).
unsafe impl Send for Entry {}

struct FaultyQueue {
    inner: Box<dyn Queue>,
    plan: Arc<Plan>,
    /// A request's index is its token in the inner queue.
    entries: Box<[Option<Entry>]>,
    /// Entries with a result.
    held: u64,
    capacity: ByteCount,
}

impl Entry {
    /// Books what became of the request.
    fn settle(&mut self, plan: &Plan, result: Result<()>) {
        assert!(self.result.is_none(), "request {} is reported twice", self.token);
        let fail = |errno| Err(failed(&plan.name, self.op, self.offset, self.len, errno));
        self.result = Some(match (self.verdict, result) {
            (Verdict::Fail(errno), _) => fail(errno),
            (Verdict::Short, _) => fail(libc::EIO),
            (Verdict::Corrupt, Ok(())) => {
                // SAFETY: the caller of `push` leaves the buffer alone until the completion is
                // reported, and the inner queue is done with it.
                unsafe { plan.flip_bit(self.first) };
                Ok(())
            }
            (_, result) => result,
        });
    }
}

impl FaultyQueue {
    /// Lets the inner queue wait; returns how many requests it finished.
    fn collect(&mut self, timeout: Duration) -> Result<u64> {
        let mut finished = 0;
        let (entries, plan) = (&mut self.entries, &self.plan);
        let waited = self.inner.wait(timeout, &mut |token, result| {
            let entry = entries[token as usize].as_mut();
            entry.expect("the request is in flight").settle(plan, result);
            finished += 1;
        });
        self.hold(finished);
        waited.map(|_| finished)
    }

    fn hold(&mut self, count: u64) {
        self.held += count;
        self.plan.held.fetch_add(count, Ordering::Relaxed);
    }

    fn report(&mut self, done: &mut dyn FnMut(u64, Result<()>)) -> usize {
        if self.held == 0 || self.plan.is_paused() {
            return 0;
        }
        let now = Instant::now();
        let mut reported = 0;
        for slot in &mut self.entries {
            let Some(entry) = slot.take_if(|entry| entry.result.is_some() && entry.due <= now)
            else {
                continue;
            };
            let result = entry.result.expect("checked above");
            let result = match self.plan.gone() {
                Some(errno) => {
                    Err(failed(&self.plan.name, entry.op, entry.offset, entry.len, errno))
                }
                None => result,
            };
            reported += 1;
            done(entry.token, result);
        }
        self.release(reported as u64);
        reported
    }

    fn release(&mut self, count: u64) {
        self.held -= count;
        self.plan.held.fetch_sub(count, Ordering::Relaxed);
    }

    /// How long to wait for the inner queue before looking at held-back completions again.
    fn slice(&self, left: Duration) -> Duration {
        if self.held == 0 { left } else { left.min(HELD_POLL) }
    }
}

// SAFETY: an entry is settled when the inner queue has reported its request, or without one; and
// reported once after that.
unsafe impl Queue for FaultyQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let len = request.bytes();
        let end = request.offset.checked_add(len).expect("a range");
        assert!(end <= self.capacity.get(), "bytes {}+{len} of {}", request.offset, self.capacity);
        let Some(index) = self.entries.iter().position(Option::is_none) else { return false };
        let verdict = self.plan.verdict(request.op);
        let mut entry = Entry {
            token: request.token,
            op: request.op,
            offset: request.offset,
            len,
            first: request.segments[0],
            verdict,
            due: Instant::now() + self.plan.delay(),
            result: None,
        };
        let half = entry.first.len() / 2 / IO_ALIGN * IO_ALIGN;
        let half = slice_from_raw_parts_mut(entry.first.cast::<u8>(), half);
        let halves = [half];
        let segments: &[*mut [u8]] = match verdict {
            Verdict::Fail(_) => &[],
            Verdict::Short if half.is_empty() => &[],
            Verdict::Short => &halves,
            Verdict::Pass | Verdict::Corrupt => request.segments,
        };
        if segments.is_empty() {
            entry.settle(&self.plan, Ok(()));
            self.hold(1);
        } else {
            let inner = Request { token: index as u64, segments, ..request };
            // SAFETY: the caller's word covers these buffers, which are its own or a part of them.
            let pushed = unsafe { self.inner.push(inner) };
            assert!(pushed, "the inner queue is as deep as this one");
        }
        self.entries[index] = Some(entry);
        true
    }

    fn submit(&mut self) -> Result<()> {
        self.inner.submit()
    }

    fn watch(&mut self, fd: RawFd) -> Result<()> {
        self.inner.watch(fd)
    }

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        let deadline = Instant::now() + timeout.min(WAIT_MAX);
        self.inner.submit()?;
        loop {
            if self.report(done) > 0 {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = self.slice(left);
            let started = Instant::now();
            let finished = self.collect(slice)?;
            // The inner queue came back early and empty-handed: a watched descriptor or a signal.
            let woken = finished == 0 && started.elapsed() < slice;
            if woken || left.is_zero() {
                return Ok(self.report(done) > 0 || woken);
            }
        }
    }

    fn in_flight(&self) -> u32 {
        self.entries.iter().flatten().count() as u32
    }
}

impl Drop for FaultyQueue {
    fn drop(&mut self) {
        self.release(self.held);
    }
}
