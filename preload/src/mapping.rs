//! `mmap(2)` and its like: large anonymous memory that a program maps past malloc is far.
//!
//! Interpreters map memory for their objects. The linker sends the calls of this library's own code,
//! jemalloc's included, to the functions below that begin with `kernel` (`build.rs`).
//! The C library maps its threads' stacks without calling these.
//!
//! # Invariants
//! 1. No call that arrives here makes the kernel unmap or move far memory, or map something over it.
//! 2. What changes mappings of others holds a [`Changing`]: code that leaves is neither written nor replaced meanwhile.
//! 3. What is taken back can be read and written, whatever the program had protected.

#![expect(unsafe_code, reason = "exports functions of C that take its pointers")]
#![expect(clippy::disallowed_methods, reason = "the C library's functions are these")]

use crate::advice::drop_far;
use crate::own::{enter, set_errno};
use crate::start;
use farheap::code::Changing;
use farheap::{ByteCount, Far, Heap};
use libc::{c_int, c_void, off_t, size_t};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

const PAGE: usize = 4096;
/// Mappings from this size on are far, or from the size from which allocations are.
const LEAST: usize = 256 << 10;
/// Address space that a program reserves without access is far up to this size. What is larger is mostly for
/// code (V8's: 512 MiB), or sparse, and would count against what the device can keep.
const RESERVED_MAX: usize = 256 << 20;
const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Bytes of far memory that are mapped.
static FAR: AtomicUsize = AtomicUsize::new(0);

/// Bytes that the program has mapped beside far memory since what is resident was last looked at for that.
static BESIDE: AtomicUsize = AtomicUsize::new(0);
/// From how many of them on it is looked at again.
static BESIDE_FREE: AtomicUsize = AtomicUsize::new(0);

/// Bytes of far memory that the program has mapped past malloc.
pub(crate) fn far_bytes() -> ByteCount {
    ByteCount(FAR.load(Ordering::Relaxed) as u64)
}

/// Functions of `mmap(2)`'s signature, by the names that C and the linker know.
macro_rules! like_mmap {
    ($($(#[$doc:meta])* $name:literal $visible:vis $function:ident = $inner:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As `mmap(2)`.
        #[unsafe(export_name = $name)]
        $visible unsafe extern "C" fn $function(
            hint: *mut c_void,
            len: size_t,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: off_t,
        ) -> *mut c_void {
            // SAFETY: as the caller promises.
            unsafe { $inner(hint, len, protection, flags, fd, offset) }
        }
    )*};
}

like_mmap! {
    /// `mmap(2)`.
    "mmap" mmap = map;
    /// `mmap64`, the same on this machine.
    "mmap64" mmap64 = map;
    /// `mmap(2)` itself: for this library, by the linker, and for what is not far. The linker leaves alone
    /// what stands in the same object file: code of this package calls it by this name.
    "__wrap_mmap" pub(crate) kernel_mmap = kernel_map;
    /// `mmap64` itself.
    "__wrap_mmap64" kernel_mmap64 = kernel_map;
}

/// `mmap(2)`, by a name that the linker leaves alone.
///
/// # Safety
/// As there.
unsafe fn map(
    hint: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    let others = libc::MAP_NORESERVE | libc::MAP_POPULATE;
    let is_plain = flags & !others == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let is_used = hint.is_null() && protection == READ_WRITE;
    // V8 gives a random place for each. It is a hint: the kernel may choose another one as well.
    let is_reserved = protection == libc::PROT_NONE && len <= RESERVED_MAX;
    if is_plain
        && len >= LEAST
        && (is_used || is_reserved)
        && let Some(far) = map_far(len, protection)
    {
        return far.as_ptr().cast();
    }
    let is_plain_at = flags & !others == libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
    if is_plain_at
        && let Some((start, len)) = far_range(hint, len)
        // SAFETY: the program gives up what is there.
        && unsafe { map_anew(start, len, protection) }
    {
        return hint;
    }
    if flags & libc::MAP_ANONYMOUS != 0 && protection & libc::PROT_WRITE != 0 {
        notice(len);
        make_room(len);
    }
    let _changing = (flags & libc::MAP_FIXED != 0).then(Changing::begin);
    // SAFETY: as the caller promises.
    unsafe { kernel_map(hint, len, protection, flags, fd, offset) }
}

/// Has far memory give way to memory that stays, before the program touches it. The look at what is resident
/// comes only after as many bytes as the last one has said.
fn make_room(len: usize) {
    // A large mapping is touched bit by bit, if at all; that is seen when it happens.
    let len = len.min(LEAST);
    let mapped = BESIDE.fetch_add(len, Ordering::Relaxed) + len;
    if mapped >= BESIDE_FREE.load(Ordering::Relaxed)
        && let Some(_inside) = enter()
    {
        let mapped = BESIDE.swap(0, Ordering::Relaxed).max(len);
        let free = Heap::make_room_beside(ByteCount(mapped as u64));
        BESIDE_FREE.store(usize::try_from(free.0).unwrap_or(usize::MAX), Ordering::Relaxed);
    }
}

/// Makes far memory what a new mapping in its place would be: zeros, with this protection. `false`: it
/// cannot be done so.
///
/// # Safety
/// The program gives up what the range holds.
unsafe fn map_anew(start: NonNull<u8>, len: usize, protection: c_int) -> bool {
    let is_far = || {
        let _inside = enter()?;
        Some(Heap::running()?.region().is_far(start, ByteCount(len as u64)))
    };
    // What it has mapped there before is for the kernel to replace.
    is_far() == Some(true)
        // SAFETY: as the caller promises.
        && unsafe { drop_far(start.as_ptr(), len) }
        // SAFETY: the program asks for it.
        && unsafe { kernel_mprotect(start.as_ptr().cast(), len, protection) } == 0
}

/// `munmap(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(start: *mut c_void, len: size_t) -> c_int {
    match far_range(start, len) {
        // SAFETY: as the caller promises.
        Some((start, len)) => unsafe { unmap_far(start, len) },
        None => {
            let _changing = Changing::begin();
            // SAFETY: as the caller promises.
            return unsafe { kernel_munmap(start, len) };
        }
    }
    0
}

/// `mremap(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: size_t,
    new_len: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    let Some((start, had)) = far_range(old, old_len) else {
        let _changing = Changing::begin();
        // SAFETY: as the caller promises.
        return unsafe { kernel_mremap(old, old_len, new_len, flags, new) };
    };
    let wanted = new_len.checked_next_multiple_of(PAGE).filter(|wanted| *wanted > 0);
    let (Some(wanted), false) = (wanted, flags & libc::MREMAP_DONTUNMAP != 0) else {
        return failed(libc::EINVAL);
    };
    if flags & libc::MREMAP_FIXED == 0 && wanted <= had {
        if wanted < had {
            // SAFETY: lies in the range.
            let behind = unsafe { start.add(wanted) };
            // SAFETY: the program gives up what lies behind the new length.
            unsafe { unmap_far(behind, had - wanted) };
        }
        return old;
    }
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let (from, place) = (old.addr(), new.addr());
    if flags & libc::MREMAP_FIXED != 0
        && place < from.saturating_add(had)
        && from < place.saturating_add(wanted)
    {
        return failed(libc::EINVAL); // As the kernel says of places that overlap.
    }
    let to = if flags & libc::MREMAP_FIXED != 0 {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        // SAFETY: as the caller promises: what is there is given up.
        unsafe { map(new, wanted, READ_WRITE, flags, -1, 0) }
    } else {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: maps new memory.
        unsafe { map(std::ptr::null_mut(), wanted, READ_WRITE, flags, -1, 0) }
    };
    if to == libc::MAP_FAILED {
        return to;
    }
    // SAFETY: both have that many bytes, and do not overlap: one is new.
    unsafe { to.cast::<u8>().copy_from_nonoverlapping(start.as_ptr(), had.min(wanted)) };
    // SAFETY: the program uses the new place from now on.
    unsafe { unmap_far(start, had) };
    to
}

fn failed(errno: c_int) -> *mut c_void {
    set_errno(errno);
    libc::MAP_FAILED
}

/// The range in whole pages of the kernel, if it is far memory.
fn far_range(start: *mut c_void, len: usize) -> Option<(NonNull<u8>, usize)> {
    let len = len.checked_next_multiple_of(PAGE).filter(|len| *len > 0)?;
    let is_far = start.addr().is_multiple_of(PAGE) && Far::contains(start.cast::<u8>());
    Some((NonNull::new(start.cast())?, len)).filter(|_| is_far)
}

/// Maps far memory; `None` where there is none, or only larger blocks are far.
fn map_far(len: usize, protection: c_int) -> Option<NonNull<u8>> {
    let _inside = enter()?;
    if protection != libc::PROT_NONE {
        start::notice_mapping(len);
    }
    let heap = Heap::running()?;
    let is_large = heap.threshold().is_some_and(|least| len as u64 >= least.0);
    let len = len.checked_next_multiple_of(PAGE).filter(|_| is_large)?;
    let start = heap.region().map_part_pages(ByteCount(len as u64)).ok()?;
    if protection != READ_WRITE
        // SAFETY: nobody has this memory yet.
        && unsafe { kernel_mprotect(start.as_ptr().cast(), len, protection) } != 0
    {
        // SAFETY: as above.
        let _ = unsafe { heap.region().unmap_part_pages(start, ByteCount(len as u64)) };
        return None; // The process has too many mappings.
    }
    FAR.fetch_add(len, Ordering::Relaxed);
    Some(start)
}

/// Counts memory that stays local: it is in the limit all the same.
fn notice(len: usize) {
    if len >= LEAST
        && let Some(_inside) = enter()
    {
        start::notice_mapping(len);
    }
}

/// `mprotect(2)`. Far memory takes any protection; what is reserved and not far counts as mapped when it is
/// opened.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn mprotect(start: *mut c_void, len: size_t, protection: c_int) -> c_int {
    if protection == READ_WRITE && !Far::contains(start.cast::<u8>()) {
        notice(len);
        make_room(len);
    }
    let _changing = (protection & libc::PROT_WRITE != 0).then(Changing::begin);
    // SAFETY: as the caller promises.
    unsafe { kernel_mprotect(start, len, protection) }
}

/// `pkey_mprotect(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn pkey_mprotect(
    start: *mut c_void,
    len: size_t,
    protection: c_int,
    key: c_int,
) -> c_int {
    let _changing = Changing::begin();
    // SAFETY: as the caller promises; the arguments of this call.
    unsafe { libc::syscall(libc::SYS_pkey_mprotect, start, len, protection, key) as c_int }
}

/// `mprotect(2)` itself: for this library, by the linker, and for what is not far.
///
/// # Safety
/// As there.
#[unsafe(export_name = "__wrap_mprotect")]
unsafe extern "C" fn kernel_mprotect(start: *mut c_void, len: size_t, protection: c_int) -> c_int {
    // SAFETY: as the caller promises; the arguments of this call.
    unsafe { libc::syscall(libc::SYS_mprotect, start, len, protection) as c_int }
}

/// Takes far memory back.
///
/// # Safety
/// The program does not use the range any more.
unsafe fn unmap_far(start: NonNull<u8>, len: usize) {
    // A signal handler that interrupted an allocation cannot take the memory back: it is leaked.
    let Some(_inside) = enter() else { return };
    // None in a forked child: the memory is its parent's, and goes with the child.
    let Some(heap) = Heap::running() else { return };
    // The next owner of this memory may read and write it.
    // SAFETY: changes no more than that the range can be read and written.
    unsafe { kernel_mprotect(start.as_ptr().cast(), len, READ_WRITE) };
    // SAFETY: as the caller promises.
    if unsafe { heap.region().unmap_part_pages(start, ByteCount(len as u64)) }.is_ok() {
        FAR.fetch_sub(len, Ordering::Relaxed);
    }
}

/// `mmap(2)`, asked of the kernel.
///
/// # Safety
/// As there.
unsafe fn kernel_map(
    hint: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: as the caller promises; the arguments of this call.
    let place = unsafe { libc::syscall(libc::SYS_mmap, hint, len, protection, flags, fd, offset) };
    place as *mut c_void
}

/// `munmap(2)` itself.
///
/// # Safety
/// As there.
#[unsafe(export_name = "__wrap_munmap")]
unsafe extern "C" fn kernel_munmap(start: *mut c_void, len: size_t) -> c_int {
    // SAFETY: as the caller promises; the arguments of this call.
    unsafe { libc::syscall(libc::SYS_munmap, start, len) as c_int }
}

/// `mremap(2)` itself.
///
/// # Safety
/// As there.
#[unsafe(export_name = "__wrap_mremap")]
unsafe extern "C" fn kernel_mremap(
    old: *mut c_void,
    old_len: size_t,
    new_len: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // SAFETY: as the caller promises; the arguments of this call.
    let place = unsafe { libc::syscall(libc::SYS_mremap, old, old_len, new_len, flags, new) };
    place as *mut c_void
}
