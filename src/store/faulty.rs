//! A store that breaks on demand: the device of failure tests.
//!
//! [`FaultyStore`] wraps any store and follows a plan that a test changes through its
//! [`FaultControl`] while I/O runs. What becomes of a request is decided when it is pushed; its
//! completion is held back in a fixed table until its time has come and the device is not paused.

#![expect(unsafe_code, reason = "passes buffers on and flips bits in them")]

use super::{Completion, DEPTH_MAX, IO_ALIGN, Op, Queue, Request, Segment, Store};
use crate::base::error::Result;
use crate::base::sync::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use crate::base::units::ByteCount;
use crate::sys::file::Errno;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a held-back completion is looked at again.
const HELD_POLL: Duration = Duration::from_millis(1);

/// Longest single wait: keeps deadlines representable.
const WAIT_MAX: Duration = Duration::from_secs(24 * 60 * 60);

const MILLION: u64 = 1_000_000;

/// Wraps a store and breaks it as its [`FaultControl`] says.
///
/// # Examples
/// ```
/// use farheap::ByteCount;
/// use farheap::store::{FaultyStore, MemStore, Op};
/// use std::sync::Arc;
///
/// let store = FaultyStore::new(Arc::new(MemStore::new(ByteCount::mib(1))?), 42);
/// let control = store.control();
/// let (writes, enospc) = (3, 28);
/// control.fail_next(Op::Write, writes, enospc);
/// # Ok::<(), farheap::Error>(())
/// ```
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    plan: Arc<Plan>,
}

/// Changes what a [`FaultyStore`] does, from any thread and at any time.
///
/// A request that is in flight when the plan changes may still follow the old one.
#[derive(Clone, Debug)]
pub struct FaultControl {
    plan: Arc<Plan>,
}

/// Atomics are `Relaxed` unless said otherwise: each is a setting of its own.
#[derive(Debug, Default)]
struct Plan {
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
}

#[derive(Debug, Default)]
struct Failures {
    next_left: AtomicU64,
    next_errno: AtomicU32,
    per_million: AtomicU32,
    fraction_errno: AtomicU32,
}

/// What is to become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    Fail(Errno),
    Short,
    Corrupt,
}

impl FaultyStore {
    /// Wraps `inner`; nothing is broken yet. `seed` decides which requests a fraction hits and
    /// which bits flip.
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, seed: u64) -> FaultyStore {
        let plan = Plan { random: AtomicU64::new(seed), ..Plan::default() };
        FaultyStore { inner, plan: Arc::new(plan) }
    }

    /// Returns a handle that changes the plan.
    #[must_use]
    pub fn control(&self) -> FaultControl {
        FaultControl { plan: Arc::clone(&self.plan) }
    }
}

impl FaultControl {
    /// Fails the next `count` requests of the kind with `errno`.
    pub fn fail_next(&self, op: Op, count: u64, errno: i32) {
        let failures = self.plan.failures(op);
        failures.next_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `take_one`: who counts down sees the errno.
        failures.next_left.store(count, Ordering::Release);
    }

    /// Fails about `per_million` of a million requests of the kind with `errno`; 0 ends that.
    pub fn fail_fraction(&self, op: Op, per_million: u32, errno: i32) {
        let failures = self.plan.failures(op);
        failures.fraction_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `verdict`.
        failures.per_million.store(per_million, Ordering::Release);
    }

    /// Fails the next `count` calls of [`Store::sync`] with `errno`; what was written stays.
    pub fn fail_syncs(&self, count: u64, errno: i32) {
        self.plan.sync_errno.store(errno.unsigned_abs(), Ordering::Relaxed);
        // Pairs with the Acquire in `take_one`.
        self.plan.sync_left.store(count, Ordering::Release);
    }

    /// Cuts the next `count` reads short: half of the first buffer is filled, the result is `EIO`.
    pub fn shorten_reads(&self, count: u64) {
        self.plan.short_left.store(count, Ordering::Relaxed);
    }

    /// Flips one bit in each of the next `count` reads, which report success.
    ///
    /// # Safety
    /// The reader verifies what it reads (a region with checksums or encryption, a pool with checksums)
    /// or accepts any bytes.
    pub unsafe fn corrupt_reads(&self, count: u64) {
        self.plan.corrupt_left.store(count, Ordering::Relaxed);
    }

    /// Flips one bit in about `per_million` of a million reads; 0 ends that.
    ///
    /// # Safety
    /// As for [`corrupt_reads`](FaultControl::corrupt_reads).
    pub unsafe fn corrupt_fraction(&self, per_million: u32) {
        self.plan.corrupt_per_million.store(per_million, Ordering::Relaxed);
    }

    /// Reports every request pushed from now on `delay` after it was pushed, or later.
    pub fn delay(&self, delay: Duration) {
        let ns = u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX);
        self.plan.delay_ns.store(ns, Ordering::Relaxed);
    }

    /// Reports nothing before [`release`](FaultControl::release), as a device that hangs.
    pub fn pause(&self) {
        self.plan.paused.store(true, Ordering::Relaxed);
    }

    /// Ends a [`pause`](FaultControl::pause).
    pub fn release(&self) {
        self.plan.paused.store(false, Ordering::Relaxed);
    }

    /// Takes the device away: everything, also what is in flight, fails with `errno`.
    pub fn vanish(&self, errno: i32) {
        self.plan.gone.store(errno.unsigned_abs(), Ordering::Relaxed);
    }

    /// Ends every fault. Bytes keep what was done to them.
    pub fn heal(&self) {
        for failures in [&self.plan.reads, &self.plan.writes] {
            failures.next_left.store(0, Ordering::Relaxed);
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
    pub fn injected(&self) -> u64 {
        self.plan.injected.load(Ordering::Relaxed)
    }

    /// Requests of all queues that are finished but held back.
    #[must_use]
    pub fn held(&self) -> u64 {
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
        if take_one(&failures.next_left) {
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
    fn sync_failure(&self) -> Option<Errno> {
        let failure = self
            .gone()
            .or_else(|| take_one(&self.sync_left).then(|| load_errno(&self.sync_errno)))?;
        self.injected.fetch_add(1, Ordering::Relaxed);
        Some(failure)
    }

    fn gone(&self) -> Option<Errno> {
        Some(load_errno(&self.gone)).filter(|errno| errno.0 != 0)
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
    unsafe fn flip_bit(&self, segment: Segment) {
        let random = self.next_random();
        let offset = (random >> 3) as usize % segment.len;
        // SAFETY: within the buffer.
        let byte = unsafe { segment.ptr.add(offset) };
        // SAFETY: valid by the caller's word.
        let old = unsafe { byte.read() };
        // SAFETY: as above.
        unsafe { byte.write(old ^ 1 << (random & 7)) };
    }
}

/// Counts down by one; returns whether there was anything left.
fn take_one(left: &AtomicU64) -> bool {
    // Acquire pairs with the Release in `fail_next`.
    left.fetch_update(Ordering::Acquire, Ordering::Acquire, |n| n.checked_sub(1)).is_ok()
}

fn load_errno(errno: &AtomicU32) -> Errno {
    Errno(errno.load(Ordering::Relaxed).cast_signed())
}

// SAFETY: what it breaks it reports as broken, except for `corrupt_reads` and `corrupt_fraction`, whose
// caller takes over the promise about bytes.
unsafe impl Store for FaultyStore {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn occupied(&self) -> Option<ByteCount> {
        self.inner.occupied()
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

    unsafe fn read_now(&self, offset: u64, into: *mut u8, len: usize) -> Result<()> {
        let delay = self.plan.delay();
        if !delay.is_zero() {
            std::thread::sleep(delay);
        }
        while self.plan.is_paused() {
            std::thread::sleep(HELD_POLL);
        }
        let fail = |errno| Err(Op::Read.failed(offset, len as u64, errno));
        match self.plan.verdict(Op::Read) {
            Verdict::Fail(errno) => fail(errno),
            Verdict::Short => fail(Errno(libc::EIO)),
            // SAFETY: the caller vouches for the buffer.
            Verdict::Pass => unsafe { self.inner.read_now(offset, into, len) },
            Verdict::Corrupt => {
                // SAFETY: the caller vouches for the buffer.
                unsafe { self.inner.read_now(offset, into, len) }?;
                // SAFETY: as above.
                unsafe { self.plan.flip_bit(Segment { ptr: into, len }) };
                Ok(())
            }
        }
    }

    fn sync(&self) -> Result<()> {
        match self.plan.sync_failure() {
            Some(errno) => Err(crate::Error::Os { call: "sync", errno: errno.0 }),
            None => self.inner.sync(),
        }
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        match self.plan.gone() {
            Some(errno) => Err(crate::Error::Io { op: "discard", offset, len, errno: errno.0 }),
            // SAFETY: the caller's promise, passed on.
            None => unsafe { self.inner.discard(offset, len) },
        }
    }

    fn describe(&self) -> String {
        format!("faulty {}", self.inner.describe())
    }
}

#[derive(Debug)]
struct Entry {
    token: u64,
    op: Op,
    offset: u64,
    len: u64,
    first: Segment,
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
        let fail = |errno| Err(self.op.failed(self.offset, self.len, errno));
        self.result = Some(match (self.verdict, result) {
            (Verdict::Fail(errno), _) => fail(errno),
            (Verdict::Short, _) => fail(Errno(libc::EIO)),
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
        let waited = self.inner.wait(timeout, &mut |completion| {
            let entry = entries[completion.token as usize].as_mut();
            entry.expect("the request is in flight").settle(plan, completion.result);
            finished += 1;
        });
        self.hold(finished);
        waited.map(|()| finished)
    }

    fn hold(&mut self, count: u64) {
        self.held += count;
        self.plan.held.fetch_add(count, Ordering::Relaxed);
    }

    fn report(&mut self, done: &mut dyn FnMut(Completion)) -> usize {
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
                Some(errno) => Err(entry.op.failed(entry.offset, entry.len, errno)),
                None => result,
            };
            reported += 1;
            done(Completion { token: entry.token, result });
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
        let len = request.check(self.capacity);
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
        let half = Segment { len: entry.first.len / 2 / IO_ALIGN * IO_ALIGN, ..entry.first };
        let halves = [half];
        let segments: &[Segment] = match verdict {
            Verdict::Fail(_) => &[],
            Verdict::Short if half.len == 0 => &[],
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

    fn wait(&mut self, timeout: Duration, done: &mut dyn FnMut(Completion)) -> Result<()> {
        let deadline = Instant::now() + timeout.min(WAIT_MAX);
        self.inner.submit()?;
        loop {
            if self.report(done) > 0 {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let slice = self.slice(left);
            let started = Instant::now();
            let finished = self.collect(slice)?;
            // The inner queue came back early and empty-handed: a watched descriptor or a signal.
            let woken = finished == 0 && started.elapsed() < slice;
            if woken || left.is_zero() {
                self.report(done);
                return Ok(());
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MemStore;
    use crate::sys::event::EventFd;
    use std::os::fd::{AsFd, AsRawFd};

    const PAGE: usize = IO_ALIGN;

    #[repr(align(4096))]
    struct Buffer([u8; 2 * PAGE]);

    /// A store of two pages of sevens, a queue on it, and what breaks it.
    struct Bench {
        store: FaultyStore,
        queue: Box<dyn Queue>,
        control: FaultControl,
        buffer: Box<Buffer>,
    }

    impl Bench {
        fn new() -> Bench {
            let memory = MemStore::new(ByteCount(2 * PAGE as u64)).expect("memory");
            let store = FaultyStore::new(Arc::new(memory), 7);
            let queue = store.open_queue(4).expect("queue");
            let control = store.control();
            let buffer = Box::new(Buffer([7; 2 * PAGE]));
            let mut bench = Bench { store, queue, control, buffer };
            assert_eq!(bench.run(Op::Write), Ok(()));
            bench.buffer.0.fill(0);
            bench
        }

        fn push(&mut self, op: Op) {
            let segments = [Segment { ptr: self.buffer.0.as_mut_ptr(), len: 2 * PAGE }];
            let request = Request { token: 5, op, offset: 0, segments: &segments };
            // SAFETY: one request at a time uses the buffer, which is looked at when it is done
            // and outlives the queue's use of it.
            assert!(unsafe { self.queue.push(request) });
        }

        fn wait(&mut self, timeout: Duration) -> Option<Result<()>> {
            let mut result = None;
            let mut done = |completion: Completion| {
                assert_eq!(completion.token, 5);
                assert!(result.replace(completion.result).is_none());
            };
            self.queue.wait(timeout, &mut done).expect("wait");
            result
        }

        fn run(&mut self, op: Op) -> Result<()> {
            self.push(op);
            self.wait(Duration::from_secs(60)).expect("a completion")
        }

        fn wrong_bits(&self) -> u32 {
            self.buffer.0.iter().map(|byte| (byte ^ 7).count_ones()).sum()
        }
    }

    fn failed(op: Op, errno: i32) -> Result<()> {
        Err(op.failed(0, 2 * PAGE as u64, Errno(errno)))
    }

    #[test]
    fn the_next_requests_of_a_kind_fail_and_then_no_more() {
        let mut bench = Bench::new();
        bench.control.fail_next(Op::Write, 2, libc::ENOSPC);
        assert_eq!(bench.run(Op::Read), Ok(()));
        assert_eq!(bench.run(Op::Write), failed(Op::Write, libc::ENOSPC));
        assert_eq!(bench.run(Op::Write), failed(Op::Write, libc::ENOSPC));
        assert_eq!(bench.run(Op::Write), Ok(()));
        assert_eq!(bench.control.injected(), 2);
    }

    #[test]
    fn a_fraction_of_requests_fails() {
        let mut bench = Bench::new();
        bench.control.fail_fraction(Op::Read, 500_000, libc::EIO);
        let failures = (0..1000).filter(|_| bench.run(Op::Read).is_err()).count();
        assert!((300..700).contains(&failures), "{failures} of 1000");
        bench.control.heal();
        assert_eq!(bench.run(Op::Read), Ok(()));
    }

    #[test]
    fn a_short_read_is_an_error_that_leaves_the_rest_of_the_buffer() {
        let mut bench = Bench::new();
        bench.control.shorten_reads(1);
        assert_eq!(bench.run(Op::Read), failed(Op::Read, libc::EIO));
        assert_eq!(bench.buffer.0[PAGE - 1..=PAGE], [7, 0]);
    }

    #[test]
    fn a_corrupted_read_succeeds_with_one_wrong_bit() {
        let mut bench = Bench::new();
        // SAFETY: these bytes are numbers.
        unsafe { bench.control.corrupt_reads(1) };
        assert_eq!(bench.run(Op::Read), Ok(()));
        assert_eq!(bench.wrong_bits(), 1);
        assert_eq!(bench.run(Op::Read), Ok(()));
        assert_eq!(bench.wrong_bits(), 0);
    }

    #[test]
    fn a_paused_device_reports_nothing_until_released() {
        let mut bench = Bench::new();
        bench.control.pause();
        bench.push(Op::Read);
        assert_eq!(bench.wait(Duration::from_millis(5)), None);
        assert_eq!((bench.queue.in_flight(), bench.control.held()), (1, 1));
        bench.control.release();
        assert_eq!(bench.wait(Duration::from_secs(60)), Some(Ok(())));
        assert_eq!((bench.queue.in_flight(), bench.control.held()), (0, 0));
    }

    #[test]
    fn a_watched_descriptor_ends_a_wait_while_completions_are_held_back() {
        let mut bench = Bench::new();
        let event = EventFd::new().expect("eventfd");
        bench.queue.watch(event.as_fd().as_raw_fd()).expect("watch");
        bench.control.pause();
        bench.push(Op::Read);
        event.signal();
        assert_eq!(bench.wait(Duration::MAX), None);
        assert_eq!(bench.queue.in_flight(), 1);
    }

    #[test]
    fn a_delayed_request_is_reported_when_it_is_due() {
        let mut bench = Bench::new();
        let delay = Duration::from_millis(20);
        bench.control.delay(delay);
        let started = Instant::now();
        assert_eq!(bench.run(Op::Read), Ok(()));
        assert!(started.elapsed() >= delay);
    }

    #[test]
    fn a_device_that_vanishes_fails_what_is_in_flight_and_what_follows() {
        let mut bench = Bench::new();
        bench.control.pause();
        bench.push(Op::Read);
        bench.control.vanish(libc::ENODEV);
        bench.control.release();
        assert_eq!(bench.wait(Duration::from_secs(60)), Some(failed(Op::Read, libc::ENODEV)));
        assert_eq!(bench.run(Op::Write), failed(Op::Write, libc::ENODEV));
        // SAFETY: nobody needs the bytes.
        assert!(unsafe { bench.store.discard(0, PAGE as u64) }.is_err());
        bench.control.heal();
        assert_eq!(bench.run(Op::Write), Ok(()));
    }

    #[test]
    fn the_next_syncs_fail_and_then_no_more() {
        let bench = Bench::new();
        bench.control.fail_syncs(1, libc::EIO);
        assert_eq!(bench.store.sync(), Err(crate::Error::Os { call: "sync", errno: libc::EIO }));
        assert_eq!(bench.store.sync(), Ok(()));
        bench.control.vanish(libc::ENODEV);
        assert!(bench.store.sync().is_err());
        bench.control.heal();
        assert_eq!((bench.store.sync(), bench.control.injected()), (Ok(()), 2));
    }

    #[test]
    fn faults_also_hit_reads_that_use_no_queue() {
        let mut bench = Bench::new();
        bench.control.fail_next(Op::Read, 1, libc::EIO);
        // SAFETY: these bytes are numbers.
        unsafe { bench.control.corrupt_reads(1) };
        let ptr = bench.buffer.0.as_mut_ptr();
        // SAFETY: the buffer is ours and as long.
        let first = unsafe { bench.store.read_now(0, ptr, 2 * PAGE) };
        // SAFETY: as above.
        let second = unsafe { bench.store.read_now(0, ptr, 2 * PAGE) };
        assert_eq!((first, second), (failed(Op::Read, libc::EIO), Ok(())));
        assert_eq!(bench.wrong_bits(), 1);
    }
}
