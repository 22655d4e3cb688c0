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
use crate::code::Changing;
use crate::own::{enter, keep_errno, set_errno};
use crate::{report, start};
use farheap::{ByteCount, Far, Heap};
use libc::{c_int, c_void, off_t, size_t};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

const PAGE: usize = 4096;
/// Minimum size of a mapping that is far.
const LEAST: usize = 256 << 10;
/// Address space that a program reserves without access is far up to this size. What is larger is mostly for
/// code (V8's: 512 MiB), or sparse, and would count against what the device can keep.
const RESERVED_MAX: usize = 256 << 20;
const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;
/// Flags of plain memory, and those that it may have besides.
const PLAIN: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
const FREE_FLAGS: c_int = libc::MAP_NORESERVE | libc::MAP_POPULATE;

/// Maximum of [`LEAST`] and the option `threshold`; none are far with `threshold:off`.
static FAR_FROM: AtomicUsize = AtomicUsize::new(LEAST);

/// Bytes of far memory that are mapped.
static FAR: AtomicUsize = AtomicUsize::new(0);

/// Bytes that the program has mapped beside far memory since what is resident was last looked at for that.
static BESIDE: AtomicUsize = AtomicUsize::new(0);
/// From how many of them on it is looked at again.
static BESIDE_FREE: AtomicUsize = AtomicUsize::new(0);

/// Sets from which size on mappings are far, `None`: none are.
pub(crate) fn be_far_from(threshold: Option<ByteCount>) {
    let threshold = threshold.map_or(usize::MAX, ByteCount::as_usize);
    FAR_FROM.store(threshold.max(LEAST), Ordering::Relaxed);
}

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
            unsafe { $inner(MmapArgs { hint, len, protection, flags, fd, offset }) }
        }
    )*};
}

/// The arguments of a call of `mmap(2)`.
#[derive(Clone, Copy)]
struct MmapArgs {
    hint: *mut c_void,
    len: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
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
unsafe fn map(call: MmapArgs) -> *mut c_void {
    let MmapArgs { hint, len, protection, flags, .. } = call;
    let is_fixed = flags & (libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE) != 0;
    if is_fixed && let Some(there) = InFar::of(hint, len) {
        // SAFETY: as the caller promises.
        return unsafe { map_over(&there, call) };
    }
    let is_used = hint.is_null() && protection == READ_WRITE;
    // V8 gives a random place for each. It is a hint: the kernel may choose another one as well.
    let is_reserved = protection == libc::PROT_NONE && len <= RESERVED_MAX;
    if flags & !FREE_FLAGS == PLAIN
        && len >= LEAST
        && start::is_served()
        && (is_used || is_reserved)
        && let Some(far) = map_far(len, protection)
    {
        return far.as_ptr().cast();
    }
    // SAFETY: as the caller promises.
    unsafe { map_beside(call) }
}

/// `mmap(2)` of what is not far.
///
/// # Safety
/// As there.
unsafe fn map_beside(call: MmapArgs) -> *mut c_void {
    let MmapArgs { len, protection, flags, .. } = call;
    if flags & libc::MAP_ANONYMOUS != 0 && protection & libc::PROT_WRITE != 0 && start::is_served()
    {
        notice(len);
        make_room(len);
    }
    let _changing = (flags & libc::MAP_FIXED != 0).then(Changing::begin);
    // SAFETY: as the caller promises.
    unsafe { kernel_map(call) }
}

/// `mmap(2)` to a place in far address space, `there`: nobody else gets that until the program unmaps it. Plain memory
/// is far memory that reads as zero; what else is mapped over far memory is not looked at by farheap.
///
/// # Safety
/// As for `mmap(2)`.
unsafe fn map_over(there: &InFar, call: MmapArgs) -> *mut c_void {
    let all_free = call.flags & libc::MAP_FIXED_NOREPLACE != 0;
    if all_free && !there.is_all {
        return failed(libc::EEXIST); // As the kernel would say: all of far address space is mapped.
    }
    if let Err(errno) = there.claim(all_free) {
        return failed(errno);
    }
    // Free addresses are mapped already for the kernel.
    let flags = call.flags & !libc::MAP_FIXED_NOREPLACE | libc::MAP_FIXED;
    if flags & !FREE_FLAGS == PLAIN | libc::MAP_FIXED
        && there.is_all
        // SAFETY: the program gives up what is there.
        && unsafe { map_anew(there, call.protection) }
    {
        return call.hint;
    }
    // SAFETY: as the caller promises.
    unsafe { map_beside(MmapArgs { flags, ..call }) }
}

/// Evicts far memory for memory that stays, before the program touches it. The look at what is resident
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
unsafe fn map_anew(there: &InFar, protection: c_int) -> bool {
    let start = there.start.as_ptr();
    // What it has mapped there before is for the kernel to replace.
    there.is_far() == Some(true)
        // SAFETY: as the caller promises.
        && unsafe { drop_far(start, there.len) }
        // SAFETY: the program asks for it.
        && unsafe { kernel_mprotect(start.cast(), there.len, protection) } == 0
}

/// `munmap(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap(start: *mut c_void, len: size_t) -> c_int {
    let unmap = |start: *mut c_void, len: size_t| {
        let _changing = Changing::begin();
        // SAFETY: as the caller promises.
        unsafe { kernel_munmap(start, len) }
    };
    let Some(there) = InFar::of(start, len) else { return unmap(start, len) };
    // SAFETY: as the caller promises.
    unsafe { unmap_far(&there) };
    // A program's own allocator puts neighbours together, of which one may be far.
    let (from, end) = (start.addr(), start.addr().saturating_add(len));
    let (far, far_end) = (there.start.addr().get(), there.start.addr().get() + there.len);
    let before = if from < far { unmap(start, far - from) } else { 0 };
    if before == 0 && far_end < end {
        return unmap(start.with_addr(far_end), end - far_end);
    }
    before
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
    let is_fixed = flags & libc::MREMAP_FIXED != 0;
    let Some(there) = InFar::of(old, old_len).filter(|there| there.is_all) else {
        if is_fixed
            && let Some(to) = InFar::of(new, new_len)
            && let Err(errno) = to.claim(false)
        {
            return failed(errno);
        }
        let _changing = Changing::begin();
        // SAFETY: as the caller promises.
        return unsafe { kernel_mremap(old, old_len, new_len, flags, new) };
    };
    let (start, had) = (there.start, there.len);
    let wanted = new_len.checked_next_multiple_of(PAGE).filter(|wanted| *wanted > 0);
    let (Some(wanted), false) = (wanted, flags & libc::MREMAP_DONTUNMAP != 0) else {
        return failed(libc::EINVAL);
    };
    let (from, to) = (old.addr(), new.addr());
    if is_fixed && flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::EINVAL);
    }
    if is_fixed && to < from.saturating_add(had) && from < to.saturating_add(wanted) {
        return failed(libc::EINVAL); // As the kernel says of places that overlap.
    }
    if !is_fixed && wanted <= had {
        if wanted < had {
            // SAFETY: lies in the range.
            let behind = unsafe { start.add(wanted) };
            // SAFETY: the program gives up what lies behind the new length.
            unsafe { unmap_far(&InFar { start: behind, len: had - wanted, is_all: true }) };
        }
        return old;
    }
    let kept = InFar { len: had.min(wanted), ..there };
    if flags & libc::MREMAP_MAYMOVE == 0 {
        return failed(libc::ENOMEM);
    }
    let place = is_fixed.then_some(new);
    let to = match kept.is_far() {
        // SAFETY: as the caller promises.
        Some(false) => unsafe { move_own(&kept, wanted, place) },
        // SAFETY: as the caller promises.
        _ => unsafe { copy_away(&kept, wanted, place) },
    };
    if to != libc::MAP_FAILED {
        // SAFETY: the program uses the new place from now on. (Where it cannot be moved, all of it is as it was.)
        unsafe { unmap_far(&there) };
    }
    to
}

/// Copies far memory to new memory, which is `wanted` bytes long.
///
/// # Safety
/// As for `mmap(2)`.
unsafe fn copy_away(from: &InFar, wanted: usize, place: Option<*mut c_void>) -> *mut c_void {
    let flags = PLAIN | if place.is_some() { libc::MAP_FIXED } else { 0 };
    let hint = place.unwrap_or_default();
    let call = MmapArgs { hint, len: wanted, protection: READ_WRITE, flags, fd: -1, offset: 0 };
    // SAFETY: maps new memory, or as the caller promises: what is there is given up.
    let to = unsafe { map(call) };
    if to != libc::MAP_FAILED {
        // SAFETY: both have that many bytes, and do not overlap: one is new.
        unsafe { to.cast::<u8>().copy_from_nonoverlapping(from.start.as_ptr(), from.len) };
    }
    to
}

/// Moves what the program has mapped over far memory, a file for example. By itself the kernel would leave a hole, in
/// which it maps what others ask for; so it keeps the old mapping. First to a place of the kernel's choice: that is
/// refused, with nothing moved, where the range is more than one mapping, of which to a given place (from Linux 6.17 on)
/// the first would have gone when another cannot.
///
/// # Safety
/// As for `mremap(2)`.
unsafe fn move_own(from: &InFar, wanted: usize, place: Option<*mut c_void>) -> *mut c_void {
    if let Some(to) = place.and_then(|place| InFar::of(place, wanted))
        && let Err(errno) = to.claim(false)
    {
        return failed(errno);
    }
    let (old, len) = (from.start.as_ptr().cast::<c_void>(), from.len);
    let (anywhere, fixed) = (libc::MREMAP_MAYMOVE, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
    let _changing = Changing::begin();
    // SAFETY: as the caller promises.
    let moved =
        unsafe { kernel_mremap(old, len, len, anywhere | libc::MREMAP_DONTUNMAP, ptr::null_mut()) };
    if moved == libc::MAP_FAILED {
        return moved;
    }
    let flags = if place.is_some() { fixed } else { anywhere };
    // SAFETY: just mapped, and known to nobody; the place is the caller's to give.
    let to = unsafe { kernel_mremap(moved, len, wanted, flags, place.unwrap_or_default()) };
    if to == libc::MAP_FAILED {
        let _kept = keep_errno();
        // SAFETY: as before it was moved.
        unsafe { kernel_mremap(moved, len, len, fixed, old) };
    }
    to
}

/// `shmat(2)`. Over far memory (`SHM_REMAP`) it is refused: `shmdt(2)` would leave a hole in it, and says of no length.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn shmat(id: c_int, place: *const c_void, flags: c_int) -> *mut c_void {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if flags & libc::SHM_REMAP != 0 && Far::contains(place.cast::<u8>()) {
        if !TOLD.swap(true, Ordering::Relaxed)
            && let Some(_inside) = enter()
        {
            report::say("the program attaches shared memory over far memory (shmat): refused");
        }
        return failed(libc::EINVAL);
    }
    // SAFETY: as the caller promises; the arguments of this call.
    let place = unsafe { libc::syscall(libc::SYS_shmat, id, place, flags) };
    place as *mut c_void
}

fn failed(errno: c_int) -> *mut c_void {
    set_errno(errno);
    libc::MAP_FAILED
}

/// The part of a range that lies in far address space, in whole pages of the kernel.
struct InFar {
    start: NonNull<u8>,
    len: usize,
    /// True if it is all of the range.
    is_all: bool,
}

impl InFar {
    /// `None`: nothing of the range, or it does not begin with a page, which is for the kernel to refuse.
    fn of(start: *mut c_void, len: usize) -> Option<InFar> {
        let len = len.checked_next_multiple_of(PAGE).filter(|len| *len > 0)?;
        let from = start.addr();
        from.checked_add(len).filter(|_| from.is_multiple_of(PAGE))?;
        let is_far = |page: usize| Far::contains(start.with_addr(from + page * PAGE).cast::<u8>());
        let (pages, first, last) = (len / PAGE, is_far(0), is_far(len / PAGE - 1));
        // Where the range crosses a bound of far address space.
        let bound = |is_before: bool| {
            let (mut low, mut high) = (0, pages);
            while low < high {
                let middle = usize::midpoint(low, high);
                if is_far(middle) == is_before { low = middle + 1 } else { high = middle }
            }
            low
        };
        let (first, end) = match (first, last) {
            (true, true) => (0, pages),
            (true, false) => (0, bound(true)),
            (false, true) => (bound(false), pages),
            (false, false) => return None,
        };
        let start = NonNull::new(start.with_addr(from + first * PAGE).cast())?;
        Some(InFar { start, len: (end - first) * PAGE, is_all: end - first == pages })
    }

    /// Makes all of it the program's that is nobody's: it is about to map something there.
    ///
    /// # Errors
    /// The number of what `mmap(2)` says: `EEXIST` where all of it was to be free and is not.
    fn claim(&self, all_free: bool) -> Result<(), c_int> {
        // In a signal handler that has interrupted an allocation it cannot be done.
        let _inside = enter().ok_or(libc::ENOMEM)?;
        let Some(heap) = Heap::running() else {
            // In a forked child nothing of it is handed out, and all of it is in use.
            return if all_free { Err(libc::EEXIST) } else { Ok(()) };
        };
        let len = ByteCount(self.len as u64);
        match heap.region().claim(self.start, len, all_free) {
            Ok(Some(claimed)) => {
                FAR.fetch_add(claimed.as_usize(), Ordering::Relaxed);
                // A system call of the program's own may have mapped something there.
                let is_taken = all_free && !heap.region().is_far(self.start, len);
                if is_taken { Err(libc::EEXIST) } else { Ok(()) }
            }
            Ok(None) => Err(libc::EEXIST),
            Err(_) => Err(libc::ENOMEM),
        }
    }

    /// True if all of it is far memory: the program has mapped nothing over it. A forked child does not know.
    fn is_far(&self) -> Option<bool> {
        let _inside = enter()?;
        Some(Heap::running()?.region().is_far(self.start, ByteCount(self.len as u64)))
    }
}

/// Maps far memory; `None` where there is none, or only larger mappings are far.
fn map_far(len: usize, protection: c_int) -> Option<NonNull<u8>> {
    let _inside = enter()?;
    if protection != libc::PROT_NONE {
        start::notice_mapping(len);
    }
    let heap = Heap::running()?;
    let is_large = len >= FAR_FROM.load(Ordering::Relaxed) && heap.threshold().is_some();
    let len = len.checked_next_multiple_of(PAGE).filter(|_| is_large)?;
    let start = heap.region().map(ByteCount(len as u64)).ok()?.cast::<u8>();
    if protection != READ_WRITE
        // SAFETY: nobody has this memory yet.
        && unsafe { kernel_mprotect(start.as_ptr().cast(), len, protection) } != 0
    {
        // SAFETY: as above.
        let _ = unsafe { heap.region().unmap_parts(start, ByteCount(len as u64)) };
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
    if protection == READ_WRITE && !Far::contains(start.cast::<u8>()) && start::is_served() {
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

/// Takes far memory back, and what the program has mapped over it.
///
/// # Safety
/// The program does not use the range any more.
unsafe fn unmap_far(there: &InFar) {
    // A signal handler that interrupted an allocation cannot take the memory back: it is leaked.
    let Some(_inside) = enter() else { return };
    // None in a forked child: the memory is its parent's, and goes with the child.
    let Some(heap) = Heap::running() else { return };
    let len = ByteCount(there.len as u64);
    // The next owner of this memory may read and write it.
    let open = |at: usize, len: usize| {
        // SAFETY: lies in the range.
        let start = unsafe { there.start.add(at) };
        // SAFETY: changes no more than that the range can be read and written.
        unsafe { kernel_mprotect(start.as_ptr().cast(), len, READ_WRITE) == 0 }
    };
    if !open(0, there.len) {
        // A file that may not be written is mapped over a part, and is about to go.
        (0..there.len).step_by(PAGE).for_each(|at| _ = open(at, PAGE));
    }
    // SAFETY: as the caller promises.
    if let Ok(mapped) = unsafe { heap.region().unmap_parts(there.start, len) } {
        FAR.fetch_sub(mapped.as_usize(), Ordering::Relaxed);
    }
}

/// `mmap(2)`, asked of the kernel.
///
/// # Safety
/// As there.
unsafe fn kernel_map(call: MmapArgs) -> *mut c_void {
    let MmapArgs { hint, len, protection, flags, fd, offset } = call;
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
