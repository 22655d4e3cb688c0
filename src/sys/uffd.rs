//! userfaultfd: registering ranges, reading faults, installing and taking pages.
//!
//! [`Uffd`] is a thin typed layer over `userfaultfd(2)` and `ioctl_userfaultfd(2)`. The ABI is
//! written out here because the `userfaultfd` crate needs libclang to build, lacks MOVE and
//! POISON, and reports EAGAIN of a copy as a partial copy of a negative length.
//!
//! # Invariants
//! 1. Results that are normal in a race (`EEXIST`, `EAGAIN`, `ENOENT`, `EBUSY`) are values of
//!    [`Outcome`], never errors.
//! 2. A call that moves several kernel pages reports how many bytes it moved, also on failure.
#![expect(unsafe_code, reason = "userfaultfd ioctls install and remove pages of this process")]

use super::fork::Private;
use super::pagemap::Pagemap;
use super::probe::{Route, open_route};
use super::{errno, os_error};
use crate::base::error::{Error, Result};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Feature bits, `include/uapi/linux/userfaultfd.h`.
pub(crate) mod feature {
    pub(crate) const PAGEFAULT_FLAG_WP: u64 = 1 << 0;
    pub(crate) const EVENT_REMAP: u64 = 1 << 2;
    pub(crate) const SIGBUS: u64 = 1 << 7;
    pub(crate) const THREAD_ID: u64 = 1 << 8;
    pub(crate) const POISON: u64 = 1 << 14;
    pub(crate) const MOVE: u64 = 1 << 16;
}

const API: u64 = 0xAA;

const REGISTER_MISSING: u64 = 1;
const REGISTER_WP: u64 = 2;

const COPY_DONTWAKE: u64 = 1;
const COPY_WP: u64 = 2;
const ZEROPAGE_DONTWAKE: u64 = 1;
const WRITEPROTECT_WP: u64 = 1;
const MOVE_DONTWAKE: u64 = 1;

const EVENT_PAGEFAULT: u8 = 0x12;
const EVENT_REMAP: u8 = 0x14;
const FAULT_WRITE: u64 = 1;
const FAULT_WP: u64 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
struct Range {
    start: u64,
    len: u64,
}

#[repr(C)]
struct ApiArgs {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterArgs {
    range: Range,
    mode: u64,
    ioctls: u64,
}

/// Arguments of COPY and MOVE, which share one layout.
#[repr(C)]
struct TransferArgs {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

/// Arguments of ZEROPAGE and POISON, which share one layout.
#[repr(C)]
struct FillArgs {
    range: Range,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct WriteProtectArgs {
    range: Range,
    mode: u64,
}

/// Encodes an ioctl request number as `_IOC` of `asm-generic/ioctl.h` does.
const fn request(direction: u64, number: u64, size: usize) -> libc::Ioctl {
    (direction << 30 | (size as u64) << 16 | API << 8 | number) as libc::Ioctl
}
const READ_WRITE: u64 = 3;
const READ: u64 = 2;

const IOC_API: libc::Ioctl = request(READ_WRITE, 0x3F, size_of::<ApiArgs>());
const IOC_REGISTER: libc::Ioctl = request(READ_WRITE, 0x00, size_of::<RegisterArgs>());
const IOC_UNREGISTER: libc::Ioctl = request(READ, 0x01, size_of::<Range>());
const IOC_WAKE: libc::Ioctl = request(READ, 0x02, size_of::<Range>());
const IOC_COPY: libc::Ioctl = request(READ_WRITE, 0x03, size_of::<TransferArgs>());
const IOC_ZEROPAGE: libc::Ioctl = request(READ_WRITE, 0x04, size_of::<FillArgs>());
const IOC_MOVE: libc::Ioctl = request(READ_WRITE, 0x05, size_of::<TransferArgs>());
const IOC_WRITEPROTECT: libc::Ioctl = request(READ_WRITE, 0x06, size_of::<WriteProtectArgs>());
const IOC_POISON: libc::Ioctl = request(READ_WRITE, 0x08, size_of::<FillArgs>());

/// A fault message, `struct uffd_msg`: 32 bytes.
#[repr(C, packed)]
#[derive(Clone, Copy)]
pub(crate) struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    thread: u32,
    padding: u32,
}
const _: () = assert!(size_of::<Message>() == 32);

impl Message {
    /// A message to read into.
    pub(crate) const EMPTY: Message =
        Message { event: 0, reserved: [0; 7], flags: 0, address: 0, thread: 0, padding: 0 };

    /// The page fault this message reports, `None` for other events.
    pub(crate) fn fault(&self) -> Option<Fault> {
        (self.event == EVENT_PAGEFAULT).then_some(Fault {
            address: self.address as usize,
            write: self.flags & FAULT_WRITE != 0,
            protected: self.flags & FAULT_WP != 0,
            thread: self.thread,
        })
    }

    /// The first address of registered memory that the program has moved by `mremap(2)`, where
    /// [`feature::EVENT_REMAP`] is enabled.
    pub(crate) fn moved_from(&self) -> Option<usize> {
        // `arg.remap.from` lies where `arg.pagefault.flags` does.
        (self.event == EVENT_REMAP).then_some(self.flags as usize)
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

/// Whether installing pages wakes the threads that wait for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wake {
    Yes,
    No,
}

/// Whether copied pages are installed write-protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protect {
    Yes,
    No,
}

/// An open userfaultfd with its features enabled.
#[derive(Debug)]
pub(crate) struct Uffd {
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
    pub(crate) fn open(required: u64, wanted: u64, kernel_faults_only: bool) -> Result<Uffd> {
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

    /// Whether a feature is enabled.
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

    /// Registers a range as a possible destination of MOVE: the kernel still fills its holes.
    pub(crate) fn register_staging(&self, start: usize, len: usize) -> Result<()> {
        self.register(start, len, REGISTER_WP)
    }

    fn register(&self, start: usize, len: usize, mode: u64) -> Result<()> {
        let range = Range { start: start as u64, len: len as u64 };
        let mut args = RegisterArgs { range, mode, ioctls: 0 };
        // SAFETY: registering changes who resolves faults of the range, not its contents; the
        // kernel checks the range.
        unsafe { self.ioctl(IOC_REGISTER, &mut args) }
            .map_err(|errno| Error::Os { call: "UFFDIO_REGISTER", errno })
    }

    /// Ends the registration of a range; threads that wait in it are woken.
    pub(crate) fn unregister(&self, start: usize, len: usize) -> Result<()> {
        let mut range = Range { start: start as u64, len: len as u64 };
        // SAFETY: the range's holes are filled by the kernel from now on; contents stay.
        unsafe { self.ioctl(IOC_UNREGISTER, &mut range) }
            .map_err(|errno| Error::Os { call: "UFFDIO_UNREGISTER", errno })
    }

    /// Wakes the threads that wait for a fault in the range.
    pub(crate) fn wake(&self, start: usize, len: usize) -> Result<()> {
        let mut range = Range { start: start as u64, len: len as u64 };
        // SAFETY: waking threads makes them fault again at worst.
        unsafe { self.ioctl(IOC_WAKE, &mut range) }
            .map_err(|errno| Error::Os { call: "UFFDIO_WAKE", errno })
    }

    /// Reads pending fault messages without waiting; returns how many there were.
    ///
    /// # Errors
    /// [`Error::Os`] when the descriptor is broken. `EAGAIN` and `EINTR` are "none".
    pub(crate) fn read(&self, messages: &mut [Message]) -> Result<usize> {
        let bytes = size_of_val(messages);
        // SAFETY: `messages` is valid for writes of `bytes`, and any bit pattern is a `Message`.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), messages.as_mut_ptr().cast(), bytes) };
        if let Ok(got) = usize::try_from(got) {
            return Ok(got / size_of::<Message>());
        }
        match errno() {
            libc::EAGAIN | libc::EINTR => Ok(0),
            errno => Err(Error::Os { call: "read(userfaultfd)", errno }),
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
        // SAFETY: the caller's promises; COPY never overwrites a present page.
        unsafe { self.transfer(IOC_COPY, dst, src as usize, len, mode) }
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
    /// Whoever owns the range at `src` expects its pages to vanish from there; the contents
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
            // SAFETY: the caller's promises; MOVE never overwrites a present page.
            let outcome = unsafe { self.transfer(IOC_MOVE, dst, src, left, mode) }.after(moved);
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

    unsafe fn transfer(
        &self,
        request: libc::Ioctl,
        dst: usize,
        src: usize,
        len: usize,
        mode: u64,
    ) -> Outcome {
        const AGAIN_MAX: u32 = 10_000;
        let mut moved = 0;
        let mut again = 0;
        while moved < len {
            let mut args = TransferArgs {
                dst: (dst + moved) as u64,
                src: (src + moved) as u64,
                len: (len - moved) as u64,
                mode,
                done: 0,
            };
            // SAFETY: the caller's promises hold for every part of the range.
            let result = unsafe { self.ioctl(request, &mut args) };
            // On a partial transfer the call fails with EAGAIN and `done` holds the bytes moved;
            // on failure it holds the negative errno, or stays 0 for a refused argument.
            let progress = usize::try_from(args.done).unwrap_or(0);
            moved += progress;
            match result {
                Ok(()) => {}
                Err(libc::EAGAIN | libc::EINTR) if progress > 0 => {}
                Err(libc::EAGAIN | libc::EINTR) if again < AGAIN_MAX => again += 1,
                Err(libc::EEXIST) => return Outcome::Present { bytes: moved },
                Err(libc::EBUSY) => return Outcome::Busy { bytes: moved },
                Err(errno) => return Outcome::Failed { bytes: moved, errno },
            }
        }
        Outcome::Done
    }

    /// Maps the shared zero page at the missing pages of a range.
    ///
    /// # Safety
    /// The pages' contents are zero by definition.
    pub(crate) unsafe fn zeropage(&self, start: usize, len: usize, wake: Wake) -> Outcome {
        let mode = if wake == Wake::No { ZEROPAGE_DONTWAKE } else { 0 };
        // SAFETY: the caller's promise; ZEROPAGE never overwrites a present page.
        unsafe { self.fill(IOC_ZEROPAGE, start, len, mode) }
    }

    /// Makes touching the missing pages of a range SIGBUS. Needs [`feature::POISON`].
    ///
    /// # Safety
    /// The pages' contents are lost.
    pub(crate) unsafe fn poison(&self, start: usize, len: usize) -> Outcome {
        // SAFETY: the caller's promise; POISON never overwrites a present page.
        unsafe { self.fill(IOC_POISON, start, len, 0) }
    }

    unsafe fn fill(&self, request: libc::Ioctl, start: usize, len: usize, mode: u64) -> Outcome {
        const AGAIN_MAX: u32 = 10_000;
        let mut filled = 0;
        let mut again = 0;
        while filled < len {
            let range = Range { start: (start + filled) as u64, len: (len - filled) as u64 };
            let mut args = FillArgs { range, mode, done: 0 };
            // SAFETY: the caller's promises hold for every part of the range.
            let result = unsafe { self.ioctl(request, &mut args) };
            let progress = usize::try_from(args.done).unwrap_or(0);
            filled += progress;
            match result {
                Ok(()) => {}
                Err(libc::EAGAIN | libc::EINTR) if progress > 0 => {}
                Err(libc::EAGAIN | libc::EINTR) if again < AGAIN_MAX => again += 1,
                Err(libc::EEXIST) => return Outcome::Present { bytes: filled },
                Err(errno) => return Outcome::Failed { bytes: filled, errno },
            }
        }
        Outcome::Done
    }

    /// Removes the write protection of a range and wakes the threads that wait to write.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    pub(crate) fn allow_writes(&self, start: usize, len: usize) -> Result<()> {
        self.write_protect_mode(start, len, 0)
    }

    /// Write-protects the present pages of a range.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses.
    pub(crate) fn forbid_writes(&self, start: usize, len: usize) -> Result<()> {
        self.write_protect_mode(start, len, WRITEPROTECT_WP)
    }

    fn write_protect_mode(&self, start: usize, len: usize, mode: u64) -> Result<()> {
        const AGAIN_MAX: u32 = 10_000;
        let range = Range { start: start as u64, len: len as u64 };
        let mut again = 0;
        loop {
            let mut args = WriteProtectArgs { range, mode };
            // SAFETY: changes when writes to the range fault, not what it holds.
            match unsafe { self.ioctl(IOC_WRITEPROTECT, &mut args) } {
                Ok(()) => return Ok(()),
                Err(libc::EAGAIN | libc::EINTR) if again < AGAIN_MAX => again += 1,
                Err(errno) => return Err(Error::Os { call: "UFFDIO_WRITEPROTECT", errno }),
            }
        }
    }

    unsafe fn ioctl<T>(&self, request: libc::Ioctl, args: &mut T) -> std::result::Result<(), i32> {
        // SAFETY: `args` is the structure that `request` takes (each caller pairs them); what the
        // call does to memory is the caller's promise.
        let rc = unsafe { libc::ioctl(self.fd.as_raw_fd(), request, args) };
        if rc < 0 { Err(errno()) } else { Ok(()) }
    }
}

/// Makes the API handshake; returns the features the kernel supports.
fn handshake(fd: &OwnedFd, features: u64) -> Result<u64> {
    let mut args = ApiArgs { api: API, features, ioctls: 0 };
    // SAFETY: UFFDIO_API fills in the structure it is given.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), IOC_API, &mut args) };
    if rc < 0 { Err(os_error("UFFDIO_API")) } else { Ok(args.features) }
}
