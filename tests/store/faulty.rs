//! The store that breaks on demand, which other tests rest on.

#![expect(unsafe_code, reason = "hands buffers to queues")]

use super::{LONG, PAGE};
use crate::common::faulty::{self, FaultControl, FaultyStore};
use farheap::store::{MemStore, Op, Queue, Request, Store};
use farheap::{ByteCount, Error};
use std::io::Write as _;
use std::os::fd::AsRawFd;
use std::ptr::slice_from_raw_parts_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Error>;

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
        let segments = [slice_from_raw_parts_mut(self.buffer.0.as_mut_ptr(), 2 * PAGE)];
        let request = Request { token: 5, op, offset: 0, segments: &segments };
        // SAFETY: one request at a time uses the buffer, which is looked at when it is done
        // and outlives the queue's use of it.
        assert!(unsafe { self.queue.push(request) });
    }

    fn wait(&mut self, timeout: Duration) -> Option<Result<()>> {
        let mut result = None;
        let mut done = |token, done| {
            assert_eq!(token, 5);
            assert!(result.replace(done).is_none());
        };
        self.queue.wait(timeout, &mut done).expect("wait");
        result
    }

    fn run(&mut self, op: Op) -> Result<()> {
        self.push(op);
        self.wait(LONG).expect("a completion")
    }

    fn wrong_bits(&self) -> u32 {
        self.buffer.0.iter().map(|byte| (byte ^ 7).count_ones()).sum()
    }
}

fn failed(op: Op, errno: i32) -> Result<()> {
    Err(faulty::failed(&"the memory store".into(), op, 0, 2 * PAGE as u64, errno))
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
    assert_eq!(bench.wait(LONG), Some(Ok(())));
    assert_eq!((bench.queue.in_flight(), bench.control.held()), (0, 0));
}

#[test]
fn a_watched_descriptor_ends_a_wait_while_completions_are_held_back() {
    let mut bench = Bench::new();
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    bench.queue.watch(reader.as_raw_fd()).expect("watch");
    bench.control.pause();
    bench.push(Op::Read);
    writer.write_all(b"x").expect("room for a byte");
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
    assert_eq!(bench.wait(LONG), Some(failed(Op::Read, libc::ENODEV)));
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
    let error = bench.store.sync().expect_err("the device refuses");
    assert!(matches!(error, Error::Io { op: "sync", errno: libc::EIO, .. }), "{error}");
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
    let first = unsafe { bench.store.read_now(0, slice_from_raw_parts_mut(ptr, 2 * PAGE)) };
    // SAFETY: as above.
    let second = unsafe { bench.store.read_now(0, slice_from_raw_parts_mut(ptr, 2 * PAGE)) };
    assert_eq!((first, second), (failed(Op::Read, libc::EIO), Ok(())));
    assert_eq!(bench.wrong_bits(), 1);
}
