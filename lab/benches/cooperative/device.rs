//! What the device can do: one file written and read in order, and single pages of it written, past the page cache.

use crate::Failure;
use crate::common::Unnamed;
use crate::options::Options;
use crate::random::Random;
use farheap::ByteCount;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

const CHUNK: usize = 1 << 20;

/// `O_DIRECT`.
#[cfg(target_arch = "x86_64")]
const DIRECT: i32 = 0o40000;
#[cfg(not(target_arch = "x86_64"))]
const DIRECT: i32 = 0o200000;

/// Writes of single pages that are under way at the same time, as many as the pool has.
const IN_FLIGHT: usize = 64;
const PAGE: usize = 4096;

/// A file of its own, written once, past the page cache.
pub(crate) struct Device {
    direct: File,
    bytes: u64,
    /// Megabytes a second of writing it in order.
    pub(crate) write: f64,
    _file: Unnamed,
}

impl Device {
    /// Writes a file of `bytes`.
    pub(crate) fn new(options: &Options, bytes: u64) -> Result<Device, Failure> {
        let file = Unnamed::new(options.dir.as_deref(), ByteCount(bytes))?;
        let mut open = OpenOptions::new();
        let open = open.read(true).write(true).custom_flags(DIRECT);
        let direct = open.open(file.path())?;
        let mut device = Device { direct, bytes, write: 0.0, _file: file };
        device.write = device.pass(|file, chunk, at| file.write_all_at(chunk, at))?;
        Ok(device)
    }

    /// Megabytes a second of reading it in order.
    pub(crate) fn read(&self) -> Result<f64, Failure> {
        self.pass(|file, chunk, at| file.read_exact_at(chunk, at))
    }

    fn pass(
        &self,
        each: impl Fn(&File, &mut [u8], u64) -> std::io::Result<()>,
    ) -> Result<f64, Failure> {
        let mut buffer = Buffer::new(CHUNK);
        let began = Instant::now();
        for at in (0..self.bytes).step_by(CHUNK) {
            each(&self.direct, buffer.bytes(), at)?;
        }
        Ok(self.bytes as f64 / 1e6 / began.elapsed().as_secs_f64())
    }

    /// Milliseconds to write this number of pages at random places, [`IN_FLIGHT`] at a time.
    pub(crate) fn scattered_ms(&self, pages: u64) -> Result<f64, Failure> {
        let threads = IN_FLIGHT.min(pages as usize).max(1);
        let all_there = Barrier::new(threads + 1);
        thread::scope(|scope| {
            let writers: Vec<_> = (0..threads as u64)
                .map(|thread| {
                    let all_there = &all_there;
                    scope.spawn(move || {
                        let mut random = Random::new(thread + 1);
                        let mut buffer = Buffer::new(PAGE);
                        all_there.wait();
                        (thread..pages).step_by(threads).try_for_each(|_| {
                            let at = random.below(self.bytes / PAGE as u64) * PAGE as u64;
                            self.direct.write_all_at(buffer.bytes(), at)
                        })
                    })
                })
                .collect();
            all_there.wait();
            let began = Instant::now();
            for writer in writers {
                writer.join().expect("a writer does not panic")?;
            }
            Ok(began.elapsed().as_secs_f64() * 1e3)
        })
    }
}

/// Bytes that begin at a page.
struct Buffer {
    room: Vec<u8>,
    from: usize,
}

impl Buffer {
    fn new(len: usize) -> Buffer {
        let room = vec![1u8; len + PAGE];
        let from = room.as_ptr().align_offset(PAGE);
        Buffer { room, from }
    }

    fn bytes(&mut self) -> &mut [u8] {
        let end = self.room.len() - PAGE + self.from;
        &mut self.room[self.from..end]
    }
}
