//! The floor: a userfaultfd driven with nothing around it.
//!
//! [`Bare`] has a region, a "store" in memory with the pattern, and a first-in first-out cache of
//! pages installed by COPY and dropped 64 at a time by one `process_madvise`. No page words, no
//! policy, no checksums, no dirty pages. Either the benchmark's thread calls the ioctls itself
//! and nobody ever faults, or a handler thread answers faults.
#![expect(unsafe_code, reason = "drives a userfaultfd of its own")]
#![expect(clippy::disallowed_methods, reason = "baselines do without the library's wrappers")]

use crate::os::{KERNEL_PAGE, Memory, Words};
use crate::{Failure, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Pages dropped by one call.
const BATCH: usize = 64;

const API: u64 = 0xAA;
const API_ARGS: usize = 3;
const REGISTER_ARGS: usize = 4;
const COPY_ARGS: usize = 5;
const REGISTER_MISSING: u64 = 1;
const EVENT_PAGEFAULT: u8 = 0x12;

/// An ioctl number: read and write, `words` 64-bit words of arguments.
const fn request(number: u64, words: usize) -> libc::Ioctl {
    (3 << 30 | (words as u64 * 8) << 16 | API << 8 | number) as libc::Ioctl
}

/// `struct uffd_msg`: an event, and for a fault its flags, address and thread.
#[repr(C)]
#[derive(Clone, Copy)]
struct Message {
    event: u64,
    flags: u64,
    address: u64,
    thread: u64,
}

/// A region, its store and its cache.
pub(crate) struct Bare {
    uffd: OwnedFd,
    me: OwnedFd,
    region: Memory,
    store: Memory,
}

/// Which pages are in, oldest first.
pub(crate) struct Cache {
    pages: Vec<usize>,
    next: usize,
}

impl Bare {
    pub(crate) fn new(bytes: usize) -> Result<Bare> {
        // Only this process's own code faults, which everybody may handle.
        const USER_MODE_ONLY: i32 = 1;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: makes a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        if fd < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Failure::Skipped(format!("userfaultfd: {error}")));
        }
        // SAFETY: just made, and nobody else's.
        let uffd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
        // SAFETY: makes a descriptor of this process.
        let me = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
        if me < 0 {
            return Err(Failure::Skipped("pidfd_open is missing".to_owned()));
        }
        // SAFETY: just made, and nobody else's.
        let me = unsafe { OwnedFd::from_raw_fd(me as i32) };
        let region = Memory::anonymous(bytes)?;
        region.advise(libc::MADV_NOHUGEPAGE);
        let store = Memory::patterned(bytes)?;
        let bare = Bare { uffd, me, region, store };
        bare.ioctl(request(0x3F, API_ARGS), &mut [API, 0, 0])?;
        let (start, len) = (bare.region.addr() as u64, bytes as u64);
        let mut args: [u64; REGISTER_ARGS] = [start, len, REGISTER_MISSING, 0];
        bare.ioctl(request(0x00, REGISTER_ARGS), &mut args)?;
        Ok(bare)
    }

    pub(crate) fn words(&self) -> Words {
        self.region.words()
    }

    /// An empty cache of `bytes`.
    pub(crate) fn cache(&self, bytes: usize) -> Cache {
        Cache { pages: vec![usize::MAX; bytes / KERNEL_PAGE], next: 0 }
    }

    /// Brings a page in and drops the oldest when the cache is full.
    pub(crate) fn install(&self, cache: &mut Cache, page: usize) -> Result<()> {
        let at = cache.next;
        if at.is_multiple_of(BATCH) {
            self.drop_pages(&cache.pages[at..cache.pages.len().min(at + BATCH)])?;
        }
        cache.pages[at] = page;
        cache.next = (at + 1) % cache.pages.len();
        let offset = page * KERNEL_PAGE;
        let (to, from) = (self.region.addr() + offset, self.store.addr() + offset);
        let mut args: [u64; COPY_ARGS] = [to as u64, from as u64, KERNEL_PAGE as u64, 0, 0];
        self.ioctl(request(0x03, COPY_ARGS), &mut args)
    }

    fn drop_pages(&self, pages: &[usize]) -> Result<()> {
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; BATCH];
        let mut count = 0;
        for &page in pages.iter().filter(|page| **page != usize::MAX) {
            let start = self.region.addr() + page * KERNEL_PAGE;
            pieces[count] = libc::iovec { iov_base: start as *mut _, iov_len: KERNEL_PAGE };
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let call = libc::SYS_process_madvise;
        let (me, advice) = (self.me.as_raw_fd(), libc::MADV_DONTNEED);
        // SAFETY: drops pages of the bare region; the store still has their content.
        let done = unsafe { libc::syscall(call, me, pieces.as_ptr(), count, advice, 0) };
        if done != (count * KERNEL_PAGE) as i64 {
            let error = std::io::Error::last_os_error();
            return Err(Failure::Skipped(format!("process_madvise(MADV_DONTNEED): {error}")));
        }
        Ok(())
    }

    fn ioctl(&self, request: libc::Ioctl, args: &mut [u64]) -> Result<()> {
        loop {
            // SAFETY: the arguments are as many words as the request says.
            let rc = unsafe { libc::ioctl(self.uffd.as_raw_fd(), request, args.as_mut_ptr()) };
            if rc >= 0 {
                return Ok(());
            }
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EAGAIN) {
                return Err(Failure::Broken(format!("userfaultfd ioctl: {error}")));
            }
        }
    }

    /// Reads one fault's page; `None` when there was none for a while.
    fn next_fault(&self) -> Option<usize> {
        let mut poll = libc::pollfd { fd: self.uffd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let mut message = Message { event: 0, flags: 0, address: 0, thread: 0 };
        let size = size_of::<Message>();
        loop {
            // SAFETY: `message` is valid for the write.
            let got = unsafe { libc::read(poll.fd, (&raw mut message).cast(), size) };
            if got == size as isize {
                break;
            }
            // SAFETY: `poll` is one descriptor.
            if unsafe { libc::poll(&mut poll, 1, 20) } <= 0 {
                return None;
            }
        }
        (message.event as u8 == EVENT_PAGEFAULT)
            .then(|| (message.address as usize - self.region.addr()) / KERNEL_PAGE)
    }
}

/// A handler thread that answers the faults of a bare region.
pub(crate) struct Handler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Handler {
    pub(crate) fn start(bare: &Arc<Bare>, cache_bytes: usize) -> Handler {
        let stop = Arc::new(AtomicBool::new(false));
        let (bare, stopped) = (bare.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            let mut cache = bare.cache(cache_bytes);
            while !stopped.load(Ordering::Relaxed) {
                if let Some(page) = bare.next_fault()
                    && bare.install(&mut cache, page).is_err()
                {
                    std::process::abort(); // The faulting thread would wait for ever.
                }
            }
        });
        Handler { stop, thread: Some(thread) }
    }
}

impl Drop for Handler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}
