//! A device in memory that remembers every write and every sync, and what a power cut leaves of it.
#![expect(unsafe_code, reason = "copies between buffers of requests and the device")]

use super::Dice;
use farheap::store::{Op, Queue, Request, Store};
use farheap::{ByteCount, Error, Result};
use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

/// What a device writes whole or not at all.
const SECTOR: usize = 512;

/// What was asked of the device.
#[derive(Clone)]
pub(crate) enum Event {
    Write { offset: usize, bytes: Vec<u8> },
    Sync,
}

#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    events: Vec<Event>,
    /// When each was asked for, on a clock that devices side by side share.
    times: Vec<usize>,
    clock: Arc<AtomicUsize>,
    /// Calls so far: reads, writes, discards, syncs, queues opened.
    calls: u64,
    fails_at: Option<u64>,
}

impl Disk {
    /// Whether this call is the one to fail.
    fn fails(&mut self) -> bool {
        self.calls += 1;
        self.fails_at == Some(self.calls - 1)
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
        self.note(Event::Write { offset, bytes: bytes.to_vec() });
    }

    fn note(&mut self, event: Event) {
        self.events.push(event);
        self.times.push(self.clock.fetch_add(1, Ordering::SeqCst));
    }

    fn sync(&mut self) -> Result<()> {
        if self.fails() {
            let store = "a device that remembers".into();
            return Err(Error::Io { op: "sync", store, offset: 0, len: 0, errno: libc::EIO });
        }
        self.note(Event::Sync);
        Ok(())
    }
}

/// The device.
#[derive(Clone)]
pub(crate) struct PowerStore(Arc<Mutex<Disk>>);

impl PowerStore {
    pub(crate) fn new(bytes: Vec<u8>) -> PowerStore {
        PowerStore(Arc::new(Mutex::new(Disk { bytes, ..Disk::default() })))
    }

    /// Another device of the same machine: the power of both is cut at one moment.
    pub(crate) fn beside(&self, bytes: Vec<u8>) -> PowerStore {
        let clock = Arc::clone(&self.disk().clock);
        PowerStore(Arc::new(Mutex::new(Disk { bytes, clock, ..Disk::default() })))
    }

    /// The time on the clock of this machine.
    pub(crate) fn time(&self) -> usize {
        self.disk().clock.load(Ordering::SeqCst)
    }

    /// Events of this device before a time.
    pub(crate) fn until(&self, time: usize) -> usize {
        self.disk().times.partition_point(|then| *then < time)
    }

    /// Reads bytes, for a user that needs no queue; zeros behind the end.
    pub(crate) fn get(&self, offset: usize, into: &mut [u8]) {
        let disk = self.disk();
        let from = disk.bytes.get(offset..).unwrap_or_default();
        let there = from.len().min(into.len());
        into[..there].copy_from_slice(&from[..there]);
        into[there..].fill(0);
    }

    /// Writes bytes, for a user that needs no queue; `false` when there is no room.
    pub(crate) fn put(&self, offset: usize, bytes: &[u8]) -> bool {
        let mut disk = self.disk();
        let has_room = offset + bytes.len() <= disk.bytes.len();
        if has_room {
            disk.write(offset, bytes);
        }
        has_room
    }

    fn disk(&self) -> MutexGuard<'_, Disk> {
        self.0.lock().expect("no panic")
    }

    /// Events so far: the moment.
    pub(crate) fn now(&self) -> usize {
        self.disk().events.len()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.disk().events.clone()
    }

    /// Fails the call of this number, counted from the start, with `EIO`. A write is done in part then.
    pub(crate) fn fail_at(&self, call: Option<u64>) {
        self.disk().fails_at = call;
    }

    pub(crate) fn calls(&self) -> u64 {
        self.disk().calls
    }

    /// Bytes now, as a process that is killed leaves them.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        self.disk().bytes.clone()
    }
}

/// What the device holds for sure, event by event.
pub(crate) struct Replay {
    pub(crate) durable: Vec<u8>,
    /// Events up to the last sync are in `durable`.
    pub(crate) synced: usize,
}

impl Replay {
    pub(crate) fn new(len: usize) -> Replay {
        Replay { durable: vec![0; len], synced: 0 }
    }

    /// Goes on to the moment `at`: all before the last sync by then is durable.
    pub(crate) fn go_to(&mut self, events: &[Event], at: usize) {
        let Some(last) = (self.synced..at).rev().find(|n| matches!(events[*n], Event::Sync)) else {
            return;
        };
        for event in &events[self.synced..last] {
            if let Event::Write { offset, bytes } = event {
                self.durable[*offset..offset + bytes.len()].copy_from_slice(bytes);
            }
        }
        self.synced = last + 1;
    }

    /// What a cut at the moment `at` can leave: each write since the last sync whole, in part or not
    /// at all.
    pub(crate) fn cut(&self, events: &[Event], at: usize, dice: &mut Dice) -> Vec<u8> {
        let mut image = self.durable.clone();
        let likely = dice.below(101);
        for event in &events[self.synced..at] {
            let Event::Write { offset, bytes } = event else { continue };
            let is_torn = dice.below(4) == 0;
            let is_kept = dice.below(100) < likely;
            for (n, sector) in bytes.chunks(SECTOR).enumerate() {
                if if is_torn { dice.below(2) == 0 } else { is_kept } {
                    let start = offset + n * SECTOR;
                    image[start..start + sector.len()].copy_from_slice(sector);
                }
            }
        }
        image
    }

    /// Whether a write since the last sync touches a range.
    pub(crate) fn is_in_doubt(
        &self,
        events: &[Event],
        at: usize,
        start: usize,
        len: usize,
    ) -> bool {
        events[self.synced..at].iter().any(|event| match event {
            Event::Write { offset, bytes } => *offset < start + len && start < offset + bytes.len(),
            Event::Sync => false,
        })
    }
}

impl fmt::Debug for PowerStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PowerStore")
    }
}

fn failed(op: Op, offset: u64, len: u64) -> Error {
    let op = if op == Op::Read { "read" } else { "write" };
    Error::Io { op, store: "a device that remembers".into(), offset, len, errno: libc::EIO }
}

// SAFETY: reads fill their buffers from the bytes that were written; a transfer that fails says so.
unsafe impl Store for PowerStore {
    fn capacity(&self) -> ByteCount {
        ByteCount(self.disk().bytes.len() as u64)
    }

    fn open_queue(&self, _: u32) -> Result<Box<dyn Queue>> {
        if self.disk().fails() {
            return Err(Error::Os { call: "io_uring_setup", errno: libc::ENOMEM });
        }
        Ok(Box::new(PowerQueue { store: self.clone(), done: Vec::new() }))
    }

    unsafe fn read_now(&self, offset: u64, into: *mut [u8]) -> Result<()> {
        let mut disk = self.disk();
        if disk.fails() {
            return Err(failed(Op::Read, offset, into.len() as u64));
        }
        let from = &disk.bytes[offset as usize..offset as usize + into.len()];
        // SAFETY: the caller's buffer is as long; it is none of the device's bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into.cast(), into.len()) };
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.disk().sync()
    }

    unsafe fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let mut disk = self.disk();
        if disk.fails() {
            let store = "a device that remembers".into();
            return Err(Error::Io { op: "discard", store, offset, len, errno: libc::EIO });
        }
        // Anything may be there from now on; a cut leaves what was there, this, or some of both.
        let rubbish: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
        disk.write(offset as usize, &rubbish);
        Ok(())
    }

    fn describe(&self) -> String {
        "a device that remembers".to_owned()
    }
}

struct PowerQueue {
    store: PowerStore,
    done: Vec<(u64, Result<()>)>,
}

// SAFETY: a request is done by the time that `push` returns, and reported once.
unsafe impl Queue for PowerQueue {
    unsafe fn push(&mut self, request: Request<'_>) -> bool {
        let fails = self.store.disk().fails();
        let mut at = request.offset;
        for segment in request.segments {
            match request.op {
                Op::Read if fails => {}
                Op::Read => {
                    let disk = self.store.disk();
                    let from = &disk.bytes[at as usize..at as usize + segment.len()];
                    // SAFETY: the caller's buffer is as long; it is none of the device's bytes.
                    unsafe {
                        std::ptr::copy_nonoverlapping(from.as_ptr(), segment.cast(), segment.len())
                    };
                }
                Op::Write => {
                    let len = if fails { segment.len() / 2 } else { segment.len() };
                    // SAFETY: the caller's buffer, which nobody changes before it is reported.
                    let bytes = unsafe { std::slice::from_raw_parts(segment.cast::<u8>(), len) };
                    self.store.disk().write(at as usize, bytes);
                }
            }
            at += segment.len() as u64;
        }
        let (op, len) = (request.op, request.bytes());
        let result = if fails { Err(failed(op, request.offset, len)) } else { Ok(()) };
        self.done.push((request.token, result));
        true
    }

    fn submit(&mut self) -> Result<()> {
        Ok(())
    }

    fn watch(&mut self, _: RawFd) -> Result<()> {
        Ok(())
    }

    fn wait(&mut self, _: Duration, done: &mut dyn FnMut(u64, Result<()>)) -> Result<bool> {
        let is_news = !self.done.is_empty();
        self.done.drain(..).for_each(|(token, result)| done(token, result));
        Ok(is_news)
    }

    fn in_flight(&self) -> u32 {
        self.done.len() as u32
    }
}
