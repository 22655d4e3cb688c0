//! What the benchmark asks of the kernel: mappings, clocks, direct I/O, a bare userfaultfd.
//!
//! Baselines must not run through the code they are compared with, so this makes its own system
//! calls.
#![expect(unsafe_code, reason = "maps memory and makes system calls of its own")]
#![expect(clippy::disallowed_methods, reason = "baselines do without the library's wrappers")]

use crate::process::check_interrupt;
use crate::{Failure, Result};
use farheap::region::Region;
use io_uring::{IoUring, opcode, types};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;

/// Bytes of a kernel page.
pub(crate) const KERNEL_PAGE: usize = 4096;

/// Memory seen as 64-bit words that other threads, and the kernel, may change.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Words {
    ptr: *mut u64,
    len: usize,
}

// SAFETY: all access is volatile and by word; the benchmark's threads agree on what they write.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// The words of `bytes` at `ptr`.
    ///
    /// # Safety
    /// The range is readable and writable as long as the words are used.
    pub(crate) unsafe fn new(ptr: *mut u8, bytes: usize) -> Words {
        assert!(ptr.addr().is_multiple_of(8) && bytes.is_multiple_of(8));
        Words { ptr: ptr.cast(), len: bytes / 8 }
    }

    /// The words of a mapped range of a region, which its owner keeps longer than the words.
    pub(crate) fn of_region(ptr: *mut u8, bytes: usize) -> Words {
        // SAFETY: far memory is readable and writable like any other until it is unmapped.
        unsafe { Words::new(ptr, bytes) }
    }

    /// Ends a mapping of a region that these are the words of.
    pub(crate) fn unmap(self, region: &Region) -> Result<()> {
        let ptr = NonNull::new(self.ptr.cast()).expect("mapped memory is not at zero");
        // SAFETY: the row that mapped the range is done with it.
        unsafe { region.unmap(NonNull::slice_from_raw_parts(ptr, self.len * 8)) }
            .map_err(Failure::of)
    }

    pub(crate) fn len(self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(self) -> *mut u8 {
        self.ptr.cast()
    }

    #[inline]
    pub(crate) fn read(self, index: usize) -> u64 {
        assert!(index < self.len);
        // SAFETY: in bounds, and readable by the promise of `new`.
        let at = unsafe { self.ptr.add(index) };
        // SAFETY: as above.
        unsafe { at.read_volatile() }
    }

    #[inline]
    pub(crate) fn write(self, index: usize, value: u64) {
        assert!(index < self.len);
        // SAFETY: in bounds, and writable by the promise of `new`.
        let at = unsafe { self.ptr.add(index) };
        // SAFETY: as above.
        unsafe { at.write_volatile(value) }
    }

    /// A part of them.
    pub(crate) fn part(self, from: usize, len: usize) -> Words {
        assert!(from + len <= self.len);
        // SAFETY: in bounds.
        Words { ptr: unsafe { self.ptr.add(from) }, len }
    }

    /// Copies as many words as this has to the front of `to`.
    pub(crate) fn copy_to(self, to: Words) {
        assert!(self.len <= to.len);
        // SAFETY: both ranges are valid for that number of words and belong to different mappings.
        unsafe { std::ptr::copy_nonoverlapping(self.ptr, to.ptr, self.len) };
    }
}

/// A mapping of this process.
#[derive(Debug)]
pub(crate) struct Memory {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread.
unsafe impl Send for Memory {}
// SAFETY: as above; access goes through `Words`.
unsafe impl Sync for Memory {}

impl Memory {
    /// Anonymous memory, aligned to 2 MiB.
    pub(crate) fn anonymous(len: usize) -> Result<Memory> {
        const HUGE: usize = 2 << 20;
        let memory = Memory::map(len + HUGE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        let (start, end) = (memory.ptr.addr(), memory.ptr.addr() + memory.len);
        let first = start.next_multiple_of(HUGE);
        let last = first + len.next_multiple_of(KERNEL_PAGE);
        let aligned = Memory { ptr: first as *mut u8, len: last - first };
        std::mem::forget(memory);
        for (from, to) in [(start, first), (last, end)] {
            drop(Memory { ptr: from as *mut u8, len: to - from });
        }
        Ok(aligned)
    }

    /// Anonymous memory with the pattern: word i is i.
    pub(crate) fn patterned(len: usize) -> Result<Memory> {
        let memory = Memory::anonymous(len)?;
        let words = memory.words();
        (0..words.len()).for_each(|index| words.write(index, index as u64));
        Ok(memory)
    }

    /// A shared mapping of a file or block device.
    pub(crate) fn of_file(file: &File, len: usize) -> Result<Memory> {
        Memory::map(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(len: usize, flags: i32, fd: i32) -> Result<Memory> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice.
        let ptr = unsafe { libc::mmap(null, len, access, flags | libc::MAP_NORESERVE, fd, 0) };
        if ptr == libc::MAP_FAILED {
            return Err(os("mmap"));
        }
        Ok(Memory { ptr: ptr.cast(), len })
    }

    /// `madvise` of all of it; what the kernel does not know is no error.
    pub(crate) fn advise(&self, advice: i32) {
        // SAFETY: the advice values used here change how memory is paged, not what it holds.
        let _ = unsafe { libc::madvise(self.ptr.cast(), self.len, advice) };
    }

    pub(crate) fn words(&self) -> Words {
        // SAFETY: mapped readable and writable until this is dropped, which outlives its users.
        unsafe { Words::new(self.ptr, self.len) }
    }

    pub(crate) fn addr(&self) -> usize {
        self.ptr.addr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is this value's own.
            unsafe { libc::munmap(self.ptr.cast(), self.len) };
        }
    }
}

/// The failure of the system call just made.
fn os(call: &str) -> Failure {
    Failure::Broken(format!("{call}: {}", io::Error::last_os_error()))
}

/// Opens a file or device past the page cache.
pub(crate) fn open_direct(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options.open(path).map_err(|error| Failure::Broken(format!("{}: {error}", path.display())))
}

/// Reads or writes of one size, several in flight from one thread.
pub(crate) struct Pipeline<'a> {
    ring: IoUring,
    file: &'a File,
    buffers: Memory,
    bytes: usize,
    free: Vec<usize>,
    depth: usize,
}

/// One transfer of a [`Pipeline`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Transfer {
    pub(crate) offset: u64,
    pub(crate) write: bool,
}

impl<'a> Pipeline<'a> {
    pub(crate) fn new(file: &'a File, depth: usize, bytes: usize) -> Result<Pipeline<'a>> {
        let ring = IoUring::new(depth.next_power_of_two() as u32).map_err(Failure::io)?;
        let buffers = Memory::anonymous(depth * bytes)?;
        Ok(Pipeline { ring, file, buffers, bytes, free: (0..depth).collect(), depth })
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.depth - self.free.len()
    }

    /// The words of a buffer.
    fn buffer(&self, index: usize) -> Words {
        let words = self.bytes / 8;
        self.buffers.words().part(index * words, words)
    }

    /// Queues a transfer; a write takes the pattern from `fill`. The caller keeps to the depth.
    pub(crate) fn push(&mut self, transfer: Transfer, fill: impl FnOnce(Words)) {
        let index = self.free.pop().expect("the caller keeps to the depth");
        let words = self.buffer(index);
        let (fd, len) = (types::Fd(self.file.as_raw_fd()), self.bytes as u32);
        let entry = if transfer.write {
            fill(words);
            opcode::Write::new(fd, words.as_ptr(), len).offset(transfer.offset).build()
        } else {
            opcode::Read::new(fd, words.as_ptr(), len).offset(transfer.offset).build()
        };
        let tag = transfer.offset << 9 | (index as u64) << 1 | u64::from(transfer.write);
        let entry = entry.user_data(tag);
        // SAFETY: the buffer belongs to the pipeline, which waits for all transfers when dropped.
        unsafe { self.ring.submission().push(&entry) }.expect("the ring is as large as the depth");
    }

    /// Waits until `least` transfers are done; shows what was read where.
    pub(crate) fn collect(&mut self, least: usize, mut seen: impl FnMut(u64, Words)) -> Result<()> {
        self.ring.submit_and_wait(least).map_err(Failure::io)?;
        let done: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (tag, result) in done {
            let index = (tag >> 1 & 0xFF) as usize;
            if result != self.bytes as i32 {
                return Err(Failure::Broken(format!("a device transfer returned {result}")));
            }
            if tag & 1 == 0 {
                seen(tag >> 9, self.buffer(index));
            }
            self.free.push(index);
        }
        Ok(())
    }
}

impl Drop for Pipeline<'_> {
    fn drop(&mut self) {
        while self.in_flight() > 0 && self.collect(1, |_, _| ()).is_ok() {}
    }
}

/// Writes the pattern, word i is i, to the first `len` bytes of a file or device.
pub(crate) fn write_pattern(file: &File, len: usize) -> Result<()> {
    const CHUNK: usize = 1 << 20;
    let buffer = Memory::anonymous(CHUNK)?;
    let words = buffer.words();
    for offset in (0..len).step_by(CHUNK) {
        check_interrupt()?;
        (0..words.len()).for_each(|at| words.write(at, (offset / 8 + at) as u64));
        write_at(file, words, offset as u64)?;
    }
    file.sync_all().map_err(Failure::io)
}

pub(crate) fn read_at(file: &File, words: Words, offset: u64) -> Result<()> {
    // SAFETY: `Words` are valid memory; nobody else uses this buffer during the call.
    let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_ptr(), words.len() * 8) };
    file.read_exact_at(bytes, offset).map_err(Failure::io)
}

pub(crate) fn write_at(file: &File, words: Words, offset: u64) -> Result<()> {
    // SAFETY: `Words` are valid memory; nobody else uses this buffer during the call.
    let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr(), words.len() * 8) };
    file.write_all_at(bytes, offset).map_err(Failure::io)
}
