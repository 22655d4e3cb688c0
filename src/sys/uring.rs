//! io_uring: many transfers in flight and one place to wait for all of them.
//!
//! [`Ring`] narrows the `io-uring` crate to what a queue needs: vectored transfers, one-shot polls,
//! and one `io_uring_enter(2)` that submits, waits and times out. Allocates at construction only.
//!
//! # Invariants
//! 1. No more entries are pushed between two submissions than the ring was built for, and no more
//!    are in flight: neither ring overflows.

#![expect(unsafe_code, reason = "hands buffers to the kernel")]

use crate::sys::file::{Errno, IoDirection, IoVec};
use crate::sys::fork::Private;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

/// Longest transfer of one non-vectored entry; its length field has 32 bits.
const SINGLE_LEN_MAX: usize = 1 << 30;

/// Times a submission that the kernel had no memory for is repeated.
const SUBMIT_RETRIES_MAX: u32 = 64;

/// A submission and a completion ring.
pub(crate) struct Ring {
    ring: Private<IoUring>,
}

/// Outcome of one entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingOutcome {
    /// The tag it was pushed with.
    pub(crate) tag: u64,
    /// Bytes moved or bits polled.
    pub(crate) result: Result<u32, Errno>,
}

impl Ring {
    /// Builds a ring for `entries` entries in flight.
    ///
    /// `ENOSYS`, `EPERM`: the kernel does not have it or does not let this process (sysctl
    /// `kernel.io_uring_disabled`, seccomp). `EOPNOTSUPP`: the kernel is older than 5.11.
    pub(crate) fn new(entries: u32) -> Result<Ring, Errno> {
        let entries = entries.checked_next_power_of_two().ok_or(Errno(libc::EINVAL))?;
        let ring = Ring::build(entries, true).or_else(|errno| match errno {
            // A flag that this kernel does not know; all of them only save time.
            Errno(libc::EINVAL) => Ring::build(entries, false),
            errno => Err(errno),
        })?;
        let params = ring.params();
        let usable = params.is_feature_ext_arg()
            && params.is_feature_nodrop()
            && params.is_feature_submit_stable();
        if usable { Ok(Ring { ring: Private::new(ring) }) } else { Err(Errno(libc::EOPNOTSUPP)) }
    }

    fn build(entries: u32, modern: bool) -> Result<IoUring, Errno> {
        let mut builder = IoUring::builder();
        builder.dontfork();
        if modern {
            // No interrupt for a thread that will enter the kernel anyway; a bit in the ring says
            // when that is worth while (Linux 5.19). Not SINGLE_ISSUER: a queue may be opened and
            // dropped by other threads than the one that uses it.
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        builder.build(entries).map_err(|error| to_errno(&error))
    }

    /// True if this process built the ring; a forked child has no part in it.
    pub(crate) fn is_here(&self) -> bool {
        self.ring.is_here()
    }

    /// Appends a transfer of all of `iovecs` to or from `offset`.
    ///
    /// # Safety
    /// `iovecs` and the buffers they name stay valid, and the buffers untouched (a write:
    /// unchanged), until the outcome with this tag has been taken. `fd` stays open until then.
    ///
    /// # Panics
    /// When more entries are pushed than the ring has.
    pub(crate) unsafe fn push_transfer(
        &mut self,
        tag: u64,
        fd: BorrowedFd<'_>,
        direction: IoDirection,
        iovecs: &[IoVec],
        offset: u64,
    ) {
        let fd = Fd(fd.as_raw_fd());
        let (vec, count) = (iovecs.as_ptr().cast::<libc::iovec>(), iovecs.len() as u32);
        let entry = match (direction, iovecs) {
            (IoDirection::Read, [one]) if one.len() <= SINGLE_LEN_MAX => {
                opcode::Read::new(fd, one.ptr(), one.len() as u32).offset(offset).build()
            }
            (IoDirection::Write, [one]) if one.len() <= SINGLE_LEN_MAX => {
                opcode::Write::new(fd, one.ptr(), one.len() as u32).offset(offset).build()
            }
            (IoDirection::Read, _) => opcode::Readv::new(fd, vec, count).offset(offset).build(),
            (IoDirection::Write, _) => opcode::Writev::new(fd, vec, count).offset(offset).build(),
        };
        // SAFETY: the caller keeps descriptor, vector and buffers alive until the outcome.
        unsafe { self.push(&entry.user_data(tag)) }
    }

    /// Appends a poll that ends when `fd` is readable, at once if it is already (`poll(2)`).
    pub(crate) fn push_poll(&mut self, tag: u64, fd: RawFd) {
        let entry = opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(tag);
        // SAFETY: the entry refers to no memory.
        unsafe { self.push(&entry) }
    }

    /// Appends a request to cancel the entry with tag `target`.
    pub(crate) fn push_cancel(&mut self, tag: u64, target: u64) {
        let entry = opcode::AsyncCancel::new(target).build().user_data(tag);
        // SAFETY: the entry refers to no memory.
        unsafe { self.push(&entry) }
    }

    /// # Safety
    /// The memory that the entry refers to stays valid until its outcome has been taken.
    unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: passed on to the caller.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.expect("the ring has room for every request that may be in flight");
    }

    /// True if entries wait for a submission.
    pub(crate) fn has_unsubmitted(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Submits everything pushed. On an error the rest stays pushed.
    pub(crate) fn submit(&mut self) -> Result<(), Errno> {
        let mut retries = 0;
        while self.has_unsubmitted() {
            match self.ring.submit() {
                Ok(_) => {}
                Err(error) => match to_errno(&error) {
                    Errno(libc::EINTR) => {}
                    // Out of request memory for the moment.
                    Errno(libc::EAGAIN | libc::EBUSY) if retries < SUBMIT_RETRIES_MAX => {
                        retries += 1;
                        std::thread::yield_now();
                    }
                    errno => return Err(errno),
                },
            }
        }
        Ok(())
    }

    /// Submits everything pushed and waits for at least one outcome for at most `timeout`, in one
    /// system call (`IORING_ENTER_EXT_ARG`). May return early without an outcome.
    pub(crate) fn submit_and_wait(&mut self, timeout: Duration) -> Result<(), Errno> {
        let limit = Timespec::from(timeout);
        let args = SubmitArgs::new().timespec(&limit);
        let want = usize::from(!timeout.is_zero());
        match self.ring.submitter().submit_with_args(want, &args).map_err(|e| to_errno(&e)) {
            // ETIME: nothing came. EAGAIN, EBUSY: the caller takes outcomes and comes again.
            Ok(_) | Err(Errno(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY)) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// True if an outcome is there, or work that the kernel does at the next entry and that may
    /// bring one. No system call.
    pub(crate) fn has_news(&mut self) -> bool {
        self.ring.submission().taskrun() || self.has_outcomes()
    }

    /// True if an outcome is there. No system call.
    pub(crate) fn has_outcomes(&mut self) -> bool {
        !self.ring.completion().is_empty()
    }

    /// Takes one outcome, if there is one. Enters the kernel only for `submit` and `wait`.
    pub(crate) fn take(&mut self) -> Option<RingOutcome> {
        let entry = self.ring.completion().next()?;
        let result = u32::try_from(entry.result()).map_err(|_| Errno(-entry.result()));
        Some(RingOutcome { tag: entry.user_data(), result })
    }
}

fn to_errno(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}
