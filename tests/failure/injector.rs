//! A store that breaks in ways a device does not: it panics, or one place of it is bad.
#![expect(unsafe_code, reason = "passes buffers on")]

use crate::common::inject_panic;
use farheap::store::{Op, Queue, Request, Store};
use farheap::{ByteCount, Error, Result};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

const NOWHERE: u64 = u64::MAX;

/// What the queues of an [`Injector`] do.
#[derive(Debug)]
struct Plan {
    /// Stamp of the page whose place on the device goes bad; 0 for none.
    bad_stamp: AtomicU64,
    /// Where that page was last written.
    bad_offset: AtomicU64,
    bad_on: AtomicU64,
    wait_panics: AtomicU64,
    read_push_panics: AtomicU64,
    write_push_panics: AtomicU64,
    discard_panics: AtomicU64,
    /// Queues differ: the first opened is the evictor's.
    queues: AtomicU64,
    wait_panics_of: AtomicU64,
    hold: AtomicU64,
}

/// What becomes of one read of a handler but the first: none is held, the next one is to be, it is,
/// it fails.
const HOLD: [u64; 4] = [0, 1, 2, 3];

/// Wraps a store.
#[derive(Debug)]
pub(crate) struct Injector {
    inner: Arc<dyn Store>,
    plan: Arc<Plan>,
}

/// Whose queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    Evictor = 0,
    Handler = 1,
}

impl Injector {
    pub(crate) fn new(inner: Arc<dyn Store>) -> Injector {
        let plan = Plan {
            bad_stamp: AtomicU64::new(0),
            bad_offset: AtomicU64::new(NOWHERE),
            bad_on: AtomicU64::new(0),
            wait_panics: AtomicU64::new(0),
            read_push_panics: AtomicU64::new(0),
            write_push_panics: AtomicU64::new(0),
            discard_panics: AtomicU64::new(0),
            queues: AtomicU64::new(0),
            wait_panics_of: AtomicU64::new(0),
            hold: AtomicU64::new(HOLD[0]),
        };
        Injector { inner, plan: Arc::new(plan) }
    }

    /// Remembers where the page with this stamp is written from now on.
    pub(crate) fn follow(&self, stamp: u64) {
        self.plan.bad_stamp.store(stamp, Ordering::Relaxed);
        self.plan.bad_offset.store(NOWHERE, Ordering::Relaxed);
    }

    /// Fails every read that touches the followed page's place, or stops to.
    pub(crate) fn spoil(&self, on: bool) {
        assert_ne!(self.plan.bad_offset.load(Ordering::Relaxed), NOWHERE, "was never written");
        self.plan.bad_on.store(u64::from(on), Ordering::Relaxed);
    }

    pub(crate) fn panic_in_wait(&self, whose: Whose, count: u64) {
        self.plan.wait_panics_of.store(whose as u64, Ordering::Relaxed);
        self.plan.wait_panics.store(count, Ordering::Relaxed);
    }

    pub(crate) fn panic_in_push(&self, op: Op, count: u64) {
        match op {
            Op::Read => self.plan.read_push_panics.store(count, Ordering::Relaxed),
            Op::Write => self.plan.write_push_panics.store(count, Ordering::Relaxed),
        }
    }

    pub(crate) fn panic_in_discard(&self, count: u64) {
        self.plan.discard_panics.store(count, Ordering::Relaxed);
    }

    /// Keeps the answer to the next read of a handler that is not the first one.
    pub(crate) fn hold_a_helpers_read(&self) {
        self.plan.hold.store(HOLD[1], Ordering::Relaxed);
    }

    /// Whether such a read was met.
    pub(crate) fn has_held(&self) -> bool {
        self.plan.hold.load(Ordering::Relaxed) >= HOLD[2]
    }

    /// Answers the read that is held: it failed.
    pub(crate) fn fail_what_is_held(&self) {
        assert!(self.has_held(), "nothing is held");
        self.plan.hold.store(HOLD[3], Ordering::Relaxed);
    }

    /// Panics that are still to come.
    pub(crate) fn panics_left(&self) -> u64 {
        let plan = &self.plan;
        [&plan.wait_panics, &plan.read_push_panics, &plan.write_push_panics, &plan.discard_panics]
            .iter()
            .map(|left| left.load(Ordering::Relaxed))
            .sum()
    }
}

/// Made once: a thread that serves faults makes errors of it.
static NAME: LazyLock<Arc<str>> = LazyLock::new(|| "the injector".into());

/// The error of a read.
fn failed(offset: u64, len: u64) -> Error {
    Error::Io { op: "read", store: Arc::clone(&NAME), offset, len, errno: libc::EIO }
}

fn take_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}

fn panic_if(left: &AtomicU64) {
    if take_one(left) {
        inject_panic();
    }
}

// SAFETY: passes everything on to a store, or panics.
unsafe impl Store for Injector {
    fn capacity(&self) -> ByteCount {
        self.inner.capacity()
    }

    fn room(&self) -> ByteCount {
        self.inner.room()
    }

    fn open_queue(&self, depth: u32) -> Result<Box<dyn Queue>> {
        let number = self.plan.queues.fetch_add(1, Ordering::Relaxed);
        let whose = if number == 0 { Whose::Evictor } else { Whose::Handler };
        let inner = self.inner.open_queue(depth)?;
        let (plan, is_helpers) = (self.plan.clone(), number > Whose::Handler as u64);
        let failing = Vec::new();
        Ok(Box::new(BadQueue { inner, plan, whose, is_helpers, failing, held: None }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.read_now(offset, into) }
    }

    fn sync(&self) -> Result<()> {
        self.inner.sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        panic_if(&self.plan.discard_panics);
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.discard(offset, len) }
    }

    fn describe(&self) -> String {
        format!("spoilt {}", self.inner.describe())
    }

    fn inherit(&self) -> Result<Option<RawFd>> {
        self.inner.inherit()
    }

    fn open_in_child(&self) -> Result<Arc<dyn Store>> {
        self.inner.open_in_child()
    }
}

struct BadQueue {
    inner: Box<dyn Queue>,
    plan: Arc<Plan>,
    whose: Whose,
    is_helpers: bool,
    /// Tokens of reads that fail, with their ranges.
    failing: Vec<(u64, u64, u64)>,
    /// The read whose answer is kept, and whether it is there.
    held: Option<(u64, bool)>,
}

// SAFETY: passes everything on to a queue; what it reports as failed was reported by that as done.
unsafe impl Queue for BadQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let panics = match request.op {
            Op::Read => &self.plan.read_push_panics,
            Op::Write => &self.plan.write_push_panics,
        };
        panic_if(panics);
        let len = request.bytes();
        match request.op {
            Op::Write => self.find_stamp(&request),
            Op::Read => {
                let (hold, relaxed) = (&self.plan.hold, Ordering::Relaxed);
                if self.is_helpers
                    && hold.compare_exchange(HOLD[1], HOLD[2], relaxed, relaxed).is_ok()
                {
                    self.failing.push((request.token, request.offset, len));
                    self.held = Some((request.token, false));
                }
                let bad = self.plan.bad_offset.load(Ordering::Relaxed);
                let hit = (request.offset..request.offset + len).contains(&bad);
                if hit && self.plan.bad_on.load(Ordering::Relaxed) > 0 {
                    self.failing.push((request.token, request.offset, len));
                }
            }
        }
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
        let mine = self.plan.wait_panics_of.load(Ordering::Relaxed) == self.whose as u64;
        if mine {
            panic_if(&self.plan.wait_panics);
        }
        let (failing, held) = (&mut self.failing, &mut self.held);
        if let Some((token, true)) = *held
            && self.plan.hold.load(Ordering::Relaxed) == HOLD[3]
        {
            *held = None;
            let at = failing.iter().position(|entry| entry.0 == token).expect("noted when held");
            let (_, offset, len) = failing.swap_remove(at);
            let error = failed(offset, len);
            done(token, Err(error));
            return Ok(true);
        }
        self.inner.wait(timeout, &mut |token, mut result| {
            if *held == Some((token, false)) {
                *held = Some((token, true));
                return;
            }
            if let Some(at) = failing.iter().position(|entry| entry.0 == token) {
                let (_, offset, len) = failing.swap_remove(at);
                result = Err(failed(offset, len));
            }
            done(token, result);
        })
    }

    fn in_flight(&self) -> u32 {
        self.inner.in_flight() + u32::from(matches!(self.held, Some((_, true))))
    }
}

impl BadQueue {
    /// A segment holds one page or several neighbours; a stamp begins its page.
    fn find_stamp(&self, request: &Request<'_>) {
        let stamp = self.plan.bad_stamp.load(Ordering::Relaxed);
        let mut offset = request.offset;
        for segment in request.segments {
            for at in (0..segment.len()).step_by(4096) {
                let unit = segment.cast::<u8>().wrapping_add(at).cast::<u64>();
                // SAFETY: the buffer of a write is readable until its completion.
                if unsafe { unit.read_volatile() } == stamp {
                    self.plan.bad_offset.store(offset + at as u64, Ordering::Relaxed);
                    return;
                }
            }
            offset += segment.len() as u64;
        }
    }
}
