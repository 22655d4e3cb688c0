//! What the device can do: one file written and read in order, past the page cache.

use crate::Failure;
use crate::common::Unnamed;
use crate::options::Options;
use farheap::ByteCount;
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

const CHUNK: usize = 1 << 20;

/// `O_DIRECT`.
#[cfg(target_arch = "x86_64")]
const DIRECT: i32 = 0o40000;
#[cfg(not(target_arch = "x86_64"))]
const DIRECT: i32 = 0o200000;

/// Megabytes a second: writing and reading `bytes`.
pub(crate) fn speed(options: &Options, bytes: u64) -> Result<(f64, f64), Failure> {
    let file = Unnamed::new(options.dir.as_deref(), ByteCount(bytes))?;
    let mut open = OpenOptions::new();
    let open = open.read(true).write(true).custom_flags(DIRECT);
    let device = open.open(file.path())?;
    let mut buffer = vec![1u8; CHUNK + 4096];
    let from = buffer.as_ptr().align_offset(4096);
    let chunk = &mut buffer[from..from + CHUNK];
    let pass = |each: &mut dyn FnMut(u64) -> std::io::Result<()>| -> Result<f64, Failure> {
        let began = Instant::now();
        for at in (0..bytes).step_by(CHUNK) {
            each(at)?;
        }
        Ok(bytes as f64 / 1e6 / began.elapsed().as_secs_f64())
    };
    let write = pass(&mut |at| device.write_all_at(chunk, at))?;
    let read = pass(&mut |at| device.read_exact_at(chunk, at))?;
    Ok((write, read))
}
