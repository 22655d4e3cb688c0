//! userfaultfd: registering ranges, reading faults, installing and taking pages.
//!
//! [`Uffd`] is a thin typed layer over `userfaultfd(2)` and `ioctl_userfaultfd(2)`. Structures and
//! numbers are the kernel's, as `linux-raw-sys` generates them, and `nix` makes the calls of them. The
//! crate `userfaultfd` is not used because it needs libclang to build, lacks MOVE and POISON, and
//! reports EAGAIN of a copy as a partial copy of a negative length.
//!
//! # Invariants
//! 1. Results that are normal in a race (`EEXIST`, `EAGAIN`, `ENOENT`, `EBUSY`) are values of
//!    [`Outcome`], never errors.
//! 2. A call that moves several kernel pages reports how many bytes it moved, also on failure.
#![expect(unsafe_code, reason = "userfaultfd ioctls install and remove pages of this process")]

use super::fork::Private;
use super::pagemap::{NO_PAGE_MAP, Pagemap};
use super::probe::{Route, negotiate, open_route};
use super::vm::KERNEL_PAGE;
use super::{raw, refused};
use crate::base::error::{Error, Result};
use linux_raw_sys::general as kernel;
use nix::errno::Errno;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Feature bits, `include/uapi/linux/userfaultfd.h`.
pub(crate) mod feature {
    use linux_raw_sys::general as kernel;

    pub(crate) const PAGEFAULT_FLAG_WP: u64 = kernel::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
    pub(crate) const EVENT_REMAP: u64 = kernel::UFFD_FEATURE_EVENT_REMAP as u64;
    pub(crate) const SIGBUS: u64 = kernel::UFFD_FEATURE_SIGBUS as u64;
    pub(crate) const THREAD_ID: u64 = kernel::UFFD_FEATURE_THREAD_ID as u64;
    pub(crate) const POISON: u64 = kernel::UFFD_FEATURE_POISON as u64;
    pub(crate) const MOVE: u64 = kernel::UFFD_FEATURE_MOVE as u64;
}

const REGISTER_MISSING: u64 = kernel::UFFDIO_REGISTER_MODE_MISSING as u64;
const REGISTER_WP: u64 = kernel::UFFDIO_REGISTER_MODE_WP as u64;
const COPY_DONTWAKE: u64 = kernel::UFFDIO_COPY_MODE_DONTWAKE as u64;
const COPY_WP: u64 = kernel::UFFDIO_COPY_MODE_WP as u64;
const ZEROPAGE_DONTWAKE: u64 = kernel::UFFDIO_ZEROPAGE_MODE_DONTWAKE as u64;
// Bindings are not generated of constants that the header casts, as it does with these.
const WRITEPROTECT_WP: u64 = 1;
const MOVE_DONTWAKE: u64 = 1;

/// The requests.
mod ioctl {
    use linux_raw_sys::general::*;

    nix::ioctl_readwrite!(register, UFFDIO, _UFFDIO_REGISTER, uffdio_register);
    nix::ioctl_read!(unregister, UFFDIO, _UFFDIO_UNREGISTER, uffdio_range);
    nix::ioctl_read!(wake, UFFDIO, _UFFDIO_WAKE, uffdio_range);
    nix::ioctl_readwrite!(copy, UFFDIO, _UFFDIO_COPY, uffdio_copy);
    nix::ioctl_readwrite!(zeropage, UFFDIO, _UFFDIO_ZEROPAGE, uffdio_zeropage);
    nix::ioctl_readwrite!(move_pages, UFFDIO, _UFFDIO_MOVE, uffdio_move);
    nix::ioctl_readwrite!(write_protect, UFFDIO, _UFFDIO_WRITEPROTECT, uffdio_writeprotect);
    nix::ioctl_readwrite!(go_on, UFFDIO, _UFFDIO_CONTINUE, uffdio_continue);
    nix::ioctl_readwrite!(poison, UFFDIO, _UFFDIO_POISON, uffdio_poison);
}

fn range(start: usize, len: usize) -> kernel::uffdio_range {
    kernel::uffdio_range { start: start as u64, len: len as u64 }
}

/// A fault message.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Message(kernel::uffd_msg);

impl Message {
    /// A message to read into.
    // SAFETY: a message is numbers; all zero is one of no event.
    pub(crate) const EMPTY: Message = Message(unsafe { std::mem::zeroed() });

    /// The page fault this message reports, `None` for other events.
    pub(crate) fn fault(&self) -> Option<Fault> {
        if u32::from(self.0.event) != kernel::UFFD_EVENT_PAGEFAULT {
            return None;
        }
        // SAFETY: the argument is numbers, whichever event it belongs to.
        let fault = unsafe { self.0.arg.pagefault };
        // SAFETY: a number, which is 0 where the kernel does not tell the thread.
        let thread = unsafe { fault.feat.ptid };
        let has = |flag: u32| fault.flags & u64::from(flag) != 0;
        Some(Fault {
            address: fault.address as usize,
            write: has(kernel::UFFD_PAGEFAULT_FLAG_WRITE),
            protected: has(kernel::UFFD_PAGEFAULT_FLAG_WP),
            thread,
        })
    }

    /// The first address of registered memory that the program has moved by `mremap(2)`, where
    /// [`feature::EVENT_REMAP`] is enabled.
    pub(crate) fn moved_from(&self) -> Option<usize> {
        // SAFETY: as for a fault.
        let moved = unsafe { self.0.arg.remap };
        (u32::from(self.0.event) == kernel::UFFD_EVENT_REMAP).then_some(moved.from as usize)
    }
}

/// A page fault of some thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The faulting address, rounded down to a kernel page.
    pub(crate) address: usize,
    /// The access was a write.
    pub(crate) write: bool,
    /// The page is present and write-protected.
    pub(crate) protected: bool,
    /// Kernel thread id of the faulting thread.
    pub(crate) thread: u32,
}

/// How an operation on pages ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All of it was done.
    Done,
    /// Stopped after `bytes` because a destination page is present already (`EEXIST`).
    Present { bytes: usize },
    /// Stopped after `bytes` because a source page is in use by the kernel or shared (`EBUSY`).
    Busy { bytes: usize },
    /// Stopped after `bytes` for another reason.
    Failed { bytes: usize, errno: i32 },
}

impl Outcome {
    /// How many of `len` bytes are done.
    pub(crate) fn bytes_of(self, len: usize) -> usize {
        match self {
            Outcome::Done => len,
            Outcome::Present { bytes }
            | Outcome::Busy { bytes }
            | Outcome::Failed { bytes, .. } => bytes,
        }
    }

    /// The same for a range that begins `before` bytes earlier, which are done.
    pub(crate) fn after(self, before: usize) -> Outcome {
        match self {
            Outcome::Done => Outcome::Done,
            Outcome::Present { bytes } => Outcome::Present { bytes: before + bytes },
            Outcome::Busy { bytes } => Outcome::Busy { bytes: before + bytes },
            Outcome::Failed { bytes, errno } => Outcome::Failed { bytes: before + bytes, errno },
        }
    }
}

/// Wake-up of the threads that wait for pages as these are installed, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Yes,
    No,
}

/// Protection of copied pages against writes, or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protect {
    Yes,
    No,
}

/// An open userfaultfd with its features enabled.
#[derive(Debug)]
pub struct Uffd {
    fd: Private<OwnedFd>,
    features: u64,
    /// Tells which pages a MOVE took; without it there is no MOVE.
    pagemap: Option<Pagemap>,
    route: Route,
}

impl Uffd {
    /// Opens a userfaultfd by the first route that works, with the `wanted` features the kernel
    /// has, and all of `required`.
    ///
    /// # Errors
    /// [`Error::UffdUnavailable`] with the reason of each route's refusal.
    pub fn open(required: u64, wanted: u64, kernel_faults_only: bool) -> Result<Uffd> {
        let mut reasons = Vec::new();
        for route in Route::ALL {
            if kernel_faults_only && !route.has_kernel_faults() {
                continue;
            }
            let supported = match open_route(route) {
                Ok(fd) => handshake(&fd, 0)?,
                // Not the route's fault: a region without its best route would be there for good.
                Err(errno @ (libc::EMFILE | libc::ENFILE)) => {
                    return Err(Error::Os { call: "userfaultfd", errno });
                }
                Err(errno) => {
                    let error = std::io::Error::from_raw_os_error(errno);
                    reasons.push(format!("{route}: {error}"));
                    continue;
                }
            };
            if supported & required != required {
                let missing = required & !supported;
                return Err(Error::UffdUnavailable {
                    reasons: format!("the kernel lacks the userfaultfd features {missing:#x}"),
                });
            }
            // The API handshake can be made once per descriptor, so open another.
            let fd = open_route(route).map_err(|errno| Error::Os { call: "userfaultfd", errno })?;
            let mut features = required | (wanted & supported);
            handshake(&fd, features)?;
            let pagemap = Pagemap::open()?;
            if pagemap.is_none() {
                features &= !feature::MOVE;
            }
            return Ok(Uffd { fd: Private::new(fd), features, pagemap, route });
        }
        Err(Error::UffdUnavailable { reasons: reasons.join("; ") })
    }

    /// Opens another one by the same route, with the same features: for a forked child.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses now, [`Error::Unsupported`] when there is no page map.
    pub(crate) fn open_again(&self) -> Result<Uffd> {
        let refused = |errno| Error::Os { call: "userfaultfd", errno };
        let fd = open_route(self.route).map_err(refused)?;
        handshake(&fd, self.features)?;
        let (features, route) = (self.features, self.route);
        let feature = "inherited far memory";
        let pagemap = Pagemap::open()?.ok_or(Error::Unsupported { feature, why: NO_PAGE_MAP })?;
        Ok(Uffd { fd: Private::new(fd), features, pagemap: Some(pagemap), route })
    }

    /// True if a feature is enabled.
    pub(crate) fn has(&self, feature: u64) -> bool {
        self.features & feature == feature
    }

    /// How it was opened.
    pub(crate) fn route(&self) -> Route {
        self.route
    }

    /// Which pages of the process are there, if that can be told.
    pub(crate) fn pagemap(&self) -> Option<&Pagemap> {
        self.pagemap.as_ref()
    }

    /// The descriptor, to wait on.
    pub(crate) fn raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Registers a range for missing faults and write-protection faults.
    pub(crate) fn register_faults(&self, start: usize, len: usize) -> Result<()> {
        self.register(start, len, REGISTER_MISSING | REGISTER_WP)
    }

    /// Registers a range for missing faults.
    pub(crate) fn register_missing(&self, start: usize, len: usize) -> Result<()> {
        self.register(start, len, REGISTER_MISSING)
    }

    /// Registers a range that is not, so that it can be told from others, and be the destination of
    /// MOVE; the kernel still fills its holes.
    pub fn register_unwatched(&self, start: usize, len: usize) -> Result<()> {
        self.register(start, len, REGISTER_WP)
    }

    fn register(&self, start: usize, len: usize, mode: u64) -> Result<()> {
        let mut args = kernel::uffdio_register { range: range(start, len), mode, ioctls: 0 };
        // SAFETY: registering changes who resolves faults of the range, not its contents; the
        // kernel checks the range.
        let done = unsafe { ioctl::register(self.raw_fd(), &raw mut args) };
        done.map(drop).map_err(refused("UFFDIO_REGISTER"))
    }

    /// Ends the registration of a range; threads that wait in it are woken.
    pub(crate) fn unregister(&self, start: usize, len: usize) -> Result<()> {
        let mut range = range(start, len);
        // SAFETY: the range's holes are filled by the kernel from now on; contents stay.
        let done = unsafe { ioctl::unregister(self.raw_fd(), &raw mut range) };
        done.map(drop).map_err(refused("UFFDIO_UNREGISTER"))
    }

    /// True if one mapping that is registered holds all of a range; `None` where the kernel cannot
    /// tell (before Linux 5.13), or a mapping is being moved at this moment. Changes nothing: CONTINUE
    /// is for shared memory, and the kernel looks at the range (`ENOENT`) before it says that anonymous
    /// memory has no page to go on with (`EINVAL`).
    pub(crate) fn is_registered(&self, start: usize, len: usize) -> Option<bool> {
        const REFUSED: i64 = -(libc::EINVAL as i64);
        for _ in 0..AGAIN_MAX {
            let mut args = kernel::uffdio_continue { range: range(start, len), mode: 0, mapped: 0 };
            // SAFETY: on anonymous memory CONTINUE does nothing. On shared memory, which is never far
            // memory, it maps at most what a touch would.
            match unsafe { ioctl::go_on(self.raw_fd(), &raw mut args) } {
                // The kernel does not know the request.
                Err(Errno::EINVAL) if args.mapped == 0 => return None,
                Err(Errno::EINVAL) if args.mapped == REFUSED => return Some(true),
                Err(Errno::EAGAIN | Errno::EINTR) => std::hint::spin_loop(),
                // The kernel has no memory for the mapping's records: nothing is known.
                Err(Errno::ENOMEM) => return None,
                _ => return Some(false),
            }
        }
        None
    }

    /// Wakes the threads that wait for a fault in the range.
    pub(crate) fn wake(&self, start: usize, len: usize) -> Result<()> {
        let mut range = range(start, len);
        // SAFETY: waking threads makes them fault again at worst.
        let done = unsafe { ioctl::wake(self.raw_fd(), &raw mut range) };
        done.map(drop).map_err(refused("UFFDIO_WAKE"))
    }

    /// Reads pending fault messages without waiting; returns how many there were.
    ///
    /// # Errors
    /// [`Error::Os`] when the descriptor is broken. `EAGAIN` and `EINTR` are "none".
    pub(crate) fn read(&self, messages: &mut [Message]) -> Result<usize> {
        let bytes = size_of_val(messages);
        // SAFETY: `messages` is valid for writes of `bytes`, and any bit pattern is a `Message`.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), bytes) };
        match Errno::result(got) {
            Ok(got) => Ok(got.unsigned_abs() / size_of::<Message>()),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(0),
            Err(errno) => Err(refused("read(userfaultfd)")(errno)),
        }
    }

    /// Copies `len` bytes from `src` into missing pages at `dst`.
    ///
    /// # Safety
    /// `src` is readable for `len` bytes and unchanged during the call; the pages at `dst` are
    /// missing, or what they hold is what `src` holds.
    pub(crate) unsafe fn copy(
        &self,
        dst: usize,
        src: *const u8,
        len: usize,
        protect: Protect,
        wake: Wake,
    ) -> Outcome {
        let mut mode = 0;
        mode |= if wake == Wake::No { COPY_DONTWAKE } else { 0 };
        mode |= if protect == Protect::Yes { COPY_WP } else { 0 };
        install(len, |at| {
            let (dst, src) = ((dst + at) as u64, (src.addr() + at) as u64);
            let len = (len - at) as u64;
            let mut args = kernel::uffdio_copy { dst, src, len, mode, copy: 0 };
            // SAFETY: the caller's promises hold for every part of the range; COPY never overwrites
            // a present page.
            (unsafe { ioctl::copy(self.raw_fd(), &raw mut args) }, args.copy)
        })
    }

    /// Moves the pages of `[src, src + len)` to the missing pages at `dst`; holes stay holes.
    /// Refuses pages that the kernel is using (`Busy`). Needs [`feature::MOVE`].
    ///
    /// The kernel's own account of what it moved cannot be relied on. From 6.18 on it moves pages in
    /// batches, and once a page was not ready within a call (`EAGAIN`: it was being migrated, or
    /// accessed at that moment), it moves the next batch, does not count it, finds its own work in
    /// the way and says `EEXIST`; where a hole follows, and holes are allowed, it never returns.
    /// (`move_pages` in `mm/userfaultfd.c` keeps the error of the page before.) So holes are not
    /// allowed, and where the kernel stops the page map tells what is gone from the source.
    ///
    /// # Safety
    /// The owner of the range at `src` expects its pages to vanish from there; the contents
    /// belong at `dst`.
    pub(crate) unsafe fn move_pages(
        &self,
        dst: usize,
        src: usize,
        len: usize,
        wake: Wake,
    ) -> Outcome {
        let mode = if wake == Wake::No { MOVE_DONTWAKE } else { 0 };
        let mut moved = 0;
        while moved < len {
            let (dst, src, left) = (dst + moved, src + moved, len - moved);
            let outcome = install(left, |at| {
                let (dst, src, len) = ((dst + at) as u64, (src + at) as u64, (left - at) as u64);
                let mut args = kernel::uffdio_move { dst, src, len, mode, move_: 0 };
                // SAFETY: the caller's promises hold for every part of the range; MOVE never
                // overwrites a present page.
                (unsafe { ioctl::move_pages(self.raw_fd(), &raw mut args) }, args.move_)
            });
            let outcome = outcome.after(moved);
            let stopped = match outcome {
                Outcome::Present { bytes } | Outcome::Failed { bytes, errno: libc::ENOENT } => {
                    bytes
                }
                _ => return outcome,
            };
            let (dst, src) = (dst + stopped - moved, src + stopped - moved);
            let gone = self.pagemap().map_or(0, |map| map.absent_from(src, len - stopped));
            if gone == 0 {
                return outcome;
            }
            if wake == Wake::Yes {
                // In vain only if the range is not registered, and then nobody waits.
                let _ = self.wake(dst, gone);
            }
            moved = stopped + gone;
        }
        Outcome::Done
    }

    /// Maps the shared zero page where the page at `start` is missing.
    ///
    /// # Safety
    /// The page's content is zero by definition.
    pub(crate) unsafe fn zeropage(&self, start: usize, wake: Wake) -> Outcome {
        let mode = if wake == Wake::No { ZEROPAGE_DONTWAKE } else { 0 };
        install(KERNEL_PAGE, |_| {
            let range = range(start, KERNEL_PAGE);
            let mut args = kernel::uffdio_zeropage { range, mode, zeropage: 0 };
            // SAFETY: the caller's promise; ZEROPAGE never overwrites a present page.
            (unsafe { ioctl::zeropage(self.raw_fd(), &raw mut args) }, args.zeropage)
        })
    }

    /// Makes touching the missing page at `start` SIGBUS. Needs [`feature::POISON`].
    ///
    /// # Safety
    /// The page's content is lost.
    pub(crate) unsafe fn poison(&self, start: usize) -> Outcome {
        install(KERNEL_PAGE, |_| {
            let range = range(start, KERNEL_PAGE);
            let mut args = kernel::uffdio_poison { range, mode: 0, updated: 0 };
            // SAFETY: the caller's promise; POISON never overwrites a present page.
            (unsafe { ioctl::poison(self.raw_fd(), &raw mut args) }, args.updated)
        })
    }

    /// Removes the write protection of a range and wakes the threads that wait to write.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    pub(crate) fn allow_writes(&self, start: usize, len: usize) -> Result<()> {
        self.write_protect_mode(start, len, 0)
    }

    /// Write-protects the page at `start` if it is present.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    pub(crate) fn forbid_writes(&self, start: usize) -> Result<()> {
        self.write_protect_mode(start, KERNEL_PAGE, WRITEPROTECT_WP)
    }

    fn write_protect_mode(&self, start: usize, len: usize, mode: u64) -> Result<()> {
        let range = range(start, len);
        let mut again = 0;
        loop {
            let mut args = kernel::uffdio_writeprotect { range, mode };
            // SAFETY: changes when writes to the range fault, not what it holds.
            match unsafe { ioctl::write_protect(self.raw_fd(), &raw mut args) } {
                Ok(_) => return Ok(()),
                Err(Errno::EAGAIN | Errno::EINTR) if again < AGAIN_MAX => again += 1,
                Err(errno) => return Err(refused("UFFDIO_WRITEPROTECT")(errno)),
            }
        }
    }
}

/// Calls without progress after which the kernel's `EAGAIN` is a failure.
const AGAIN_MAX: u32 = 10_000;

/// Repeats `call`, which is given the bytes done so far and returns how the kernel ended and what it
/// says that it has done, until `len` bytes are done or it cannot go on.
fn install(len: usize, mut call: impl FnMut(usize) -> (nix::Result<i32>, i64)) -> Outcome {
    let mut bytes = 0;
    let mut again = 0;
    while bytes < len {
        let (result, done) = call(bytes);
        // On a partial transfer the call fails with EAGAIN and `done` holds the bytes of it; on
        // failure it holds the negative errno, or stays 0 for a refused argument.
        let progress = usize::try_from(done).unwrap_or(0);
        bytes += progress;
        match result {
            Ok(_) => {}
            Err(Errno::EAGAIN | Errno::EINTR) if progress > 0 => {}
            Err(Errno::EAGAIN | Errno::EINTR) if again < AGAIN_MAX => again += 1,
            Err(Errno::EEXIST) => return Outcome::Present { bytes },
            Err(Errno::EBUSY) => return Outcome::Busy { bytes },
            Err(errno) => return Outcome::Failed { bytes, errno: raw(errno) },
        }
    }
    Outcome::Done
}

/// Makes the API handshake; returns the features the kernel supports.
fn handshake(fd: &OwnedFd, features: u64) -> Result<u64> {
    negotiate(fd, features).map_err(|errno| Error::Os { call: "UFFDIO_API", errno })
}
