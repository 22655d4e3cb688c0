//! The device by itself: large blocks of a file, several in flight, sequential.
#![expect(unsafe_code, reason = "sees words as bytes")]

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

pub(crate) const BLOCK: usize = 1 << 20;
/// Threads that keep the device busy.
const THREADS: usize = 4;

/// Fills blocks with numbers and checks them, as a query that writes a run and reads it back.
pub(crate) fn fill_block(block: &mut [u64], first: u64) {
    block.iter_mut().zip(first..).for_each(|(word, n)| *word = n);
}

pub(crate) fn check_block(block: &[u64], first: u64) {
    let wrong = block.iter().zip(first..).filter(|(word, n)| **word != *n).count();
    assert_eq!(wrong, 0, "block at word {first}");
}

/// Opens a file past the page cache, where its file system can do that.
pub(crate) fn open(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options.clone().custom_flags(libc::O_DIRECT).open(path).or_else(|_| options.open(path))
}

/// Writes the first `len` bytes of a file, or reads them and checks what was written.
pub(crate) fn transfer(file: &File, len: usize, write: bool) -> std::io::Result<()> {
    for_blocks(len, &|block, at| {
        if write {
            fill_block(block, at);
            return file.write_all_at(bytes_of(block), at);
        }
        file.read_exact_at(bytes_of(block), at)?;
        check_block(block, at);
        Ok(())
    })
}

fn bytes_of(block: &mut [u64]) -> &mut [u8] {
    // SAFETY: the words of the block, seen as bytes.
    unsafe { std::slice::from_raw_parts_mut(block.as_mut_ptr().cast::<u8>(), BLOCK) }
}

/// What is done with a block and its offset.
type Work<'a> = &'a (dyn Fn(&mut [u64], u64) -> std::io::Result<()> + Sync);

/// Works on the blocks of the first `len` bytes, by several threads.
fn for_blocks(len: usize, work: Work<'_>) -> std::io::Result<()> {
    let result: Result<Vec<()>, std::io::Error> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..THREADS).map(|n| scope.spawn(move || every_other(len, n, work))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no check failed")).collect()
    });
    result.map(drop)
}

fn every_other(len: usize, thread: usize, work: Work<'_>) -> std::io::Result<()> {
    let mut words = vec![0_u64; BLOCK / 8 + 512];
    // O_DIRECT wants aligned buffers.
    let skip = words.as_ptr().align_offset(4096);
    let block = &mut words[skip..skip + BLOCK / 8];
    (thread * BLOCK..len).step_by(THREADS * BLOCK).try_for_each(|at| work(block, at as u64))
}
