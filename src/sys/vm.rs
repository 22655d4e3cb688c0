//! Address space: reservations, advice, giving pages back.
//!
//! [`Mapping`] owns a range of private anonymous memory. Neighbours: `meta` builds its arrays on
//! it, `region` its far address space and staging frames.
#![expect(unsafe_code, reason = "maps, advises and unmaps address space")]

use super::fork::{self, Born, Private};
use super::map_anew::map_anew;
use super::{inherited, refused};
use crate::base::error::{Error, Result};
use crate::base::sync::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use linux_raw_sys::general as kernel;
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
#[cfg(feature = "encrypt")]
use nix::sys::mman::mlock;
use nix::sys::mman::{
    MRemapFlags, MapFlags, ProtFlags, mmap, mmap_anonymous, mprotect, mremap, munlock,
};
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

/// The kernel's page size this crate is written for, in bytes.
pub(crate) const KERNEL_PAGE: usize = 4096;

/// Bytes of a transparent huge page.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// NUMA nodes that a kernel has at most: `MAX_NUMNODES`, `CONFIG_NODES_SHIFT` being 10 at most.
const NODES_MAX: usize = 1024;

/// How a mapping uses transparent huge pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Huge {
    /// Ask for them (`MADV_HUGEPAGE`).
    Yes,
    /// Refuse them (`MADV_NOHUGEPAGE`).
    No,
    /// As the system is set.
    Default,
}

/// A private anonymous, zero-filled, readable and writable range that costs nothing until
/// touched. Not inherited by `fork` and not in core dumps. Unmapped when dropped, but not by a
/// forked child.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// The NUMA node that the range is bound to, plus one; 0: none.
    node: AtomicU32,
    born: Born,
    #[cfg(miri)]
    align: usize,
}

// SAFETY: a `Mapping` is a range of addresses; it hands out raw pointers only, and unmapping
// needs ownership.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared use is `as_ptr` and advice calls, which the kernel serialises.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves `len` bytes at a multiple of `align` (a power of two), see `mmap(2)`.
    ///
    /// # Errors
    /// [`Error::Os`] when the address space or the overcommit policy does not allow it.
    pub(crate) fn reserve(len: usize, align: usize, huge: Huge) -> Result<Mapping> {
        assert!(align.is_power_of_two() && len.is_multiple_of(KERNEL_PAGE), "{len} {align}");
        let align = align.max(KERNEL_PAGE);
        #[cfg(miri)]
        return Ok(Mapping::allocate(len, align));
        #[cfg(not(miri))]
        Mapping::map(inherited::map, len, align, huge)
    }

    /// As [`reserve`](Self::reserve), but nothing of it can be touched until it is [opened](Self::open), and so
    /// `mlockall(2)` fills nothing of it.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn reserve_closed(len: usize, align: usize, huge: Huge) -> Result<Mapping> {
        #[cfg(miri)]
        return Mapping::reserve(len, align, huge);
        #[cfg(not(miri))]
        Mapping::map(inherited::map_closed, len, align, huge)
    }

    /// Makes a part of a [closed](Self::reserve_closed) mapping readable and writable. Costs one call of the kernel,
    /// and at most one mapping more.
    ///
    /// # Errors
    /// [`Error::Os`] where the overcommit policy or a limit of the process does not allow it.
    pub(crate) fn open(&self, offset: usize, len: usize) -> Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len}");
        if cfg!(miri) {
            return Ok(());
        }
        inherited::open(self.at(offset).cast(), len).map_err(refused("mprotect"))
    }

    /// Miri knows no address space: there a mapping is allocated, and takes all of its memory.
    #[cfg(miri)]
    fn allocate(len: usize, align: usize) -> Mapping {
        let layout = std::alloc::Layout::from_size_align(len, align).expect("a small mapping");
        // SAFETY: nobody maps nothing.
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        let base = NonNull::new(base).expect("memory for a small mapping");
        let node = AtomicU32::new(0);
        Mapping { base, len, node, born: Born::here(), align }
    }

    #[cfg(not(miri))]
    fn map(
        map: fn(usize, usize) -> nix::Result<NonNull<u8>>,
        len: usize,
        align: usize,
        huge: Huge,
    ) -> Result<Mapping> {
        len.checked_add(align).ok_or(Error::BadRange { reason: "length overflows".into() })?;
        let base = map(len, align).map_err(refused("mmap"))?;
        let node = AtomicU32::new(0);
        let mapping = Mapping { base, len, node, born: Born::here() };
        mapping.advise_all(libc::MADV_DONTFORK)?;
        mapping.advise_all(libc::MADV_DONTDUMP)?;
        match huge {
            // A kernel without huge pages refuses with EINVAL; that only costs speed.
            Huge::Yes => drop(mapping.advise_all(libc::MADV_HUGEPAGE)),
            Huge::No => drop(mapping.advise_all(libc::MADV_NOHUGEPAGE)),
            Huge::Default => {}
        }
        Ok(mapping)
    }

    /// True if this process mapped it: a forked child has no such mapping.
    pub(crate) fn is_here(&self) -> bool {
        self.born.is_here()
    }

    /// Lets children that are forked from now on have the range as it is then (copied when it is
    /// written), or not at all.
    ///
    /// # Errors
    /// [`Error::Os`] when the process has too many mappings.
    pub(crate) fn set_inherited(&self, inherited: bool) -> Result<()> {
        self.advise_all(if inherited { libc::MADV_DOFORK } else { libc::MADV_DONTFORK })
    }

    /// Keeps the range reserved in forked children, without access.
    pub(crate) fn keep_place_in_children(&self) {
        fork::keep_place(self.addr(), self.len);
    }

    /// First byte.
    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// First address.
    pub(crate) fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Bytes.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Keeps the mapping's pages out of swap, see `mlock(2)`.
    ///
    /// # Errors
    /// [`Error::Os`] where the process may not lock so much.
    #[cfg(feature = "encrypt")]
    pub(crate) fn lock_in_ram(&self) -> Result<()> {
        // SAFETY: the range is this mapping's own; its contents stay.
        unsafe { mlock(self.base.cast(), self.len) }.map_err(refused("mlock"))
    }

    /// Ends all memory locks of the mapping, see `munlock(2)`; costs one call however large it is.
    pub(crate) fn unlock(&self) {
        // SAFETY: the range is this mapping's own; its contents stay.
        // ENOMEM: a part is not mapped any more; the parts before it are unlocked.
        let _ = unsafe { munlock(self.base.cast(), self.len) };
    }

    /// True if a part of `[offset, offset + len)` is locked (`mlock(2)`): the kernel then refuses
    /// the advice `MADV_COLD` (5.4), which does nothing else where there is no swap.
    pub(crate) fn is_locked(&self, offset: usize, len: usize) -> bool {
        let advised = self.advise(offset, len, libc::MADV_COLD);
        matches!(advised, Err(Error::Os { errno: libc::EINVAL, .. }))
    }

    /// Binds all memory that the range gets from now on to a NUMA node, see `mbind(2)`, `MPOL_BIND`.
    /// Where the node has none left, the kernel ends a process rather than use another node's.
    ///
    /// # Errors
    /// [`Error::Os`] when there is no such node, or the process may not use it (control groups, seccomp).
    pub(crate) fn bind(&self, node: u32) -> Result<()> {
        self.node.store(node + 1, Ordering::Relaxed);
        self.bind_part(0, self.len)
    }

    /// Binds a part of the range as the whole is.
    fn bind_part(&self, offset: usize, len: usize) -> Result<()> {
        let Some(node) = self.node.load(Ordering::Relaxed).checked_sub(1) else { return Ok(()) };
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len}");
        let mut mask = [0_u64; NODES_MAX / 64];
        let word = mask.get_mut(node as usize / 64);
        *word.ok_or(Error::Os { call: "mbind", errno: libc::EINVAL })? = 1 << (node % 64);
        // The kernel looks at one bit fewer than it is told of (mm/mempolicy.c, `get_nodes`).
        let bits = NODES_MAX + 1;
        let (start, mode) = (self.at(offset).as_ptr(), libc::c_long::from(libc::MPOL_BIND));
        // SAFETY: the range lies in this mapping (checked above), and a policy changes where new memory of it
        // comes from, not what it holds; the mask has as many bits as are said, rounded up to words.
        let bound =
            unsafe { libc::syscall(libc::SYS_mbind, start, len, mode, mask.as_ptr(), bits, 0) };
        Errno::result(bound).map(drop).map_err(refused("mbind"))
    }

    fn advise_all(&self, advice: i32) -> Result<()> {
        if cfg!(miri) { Ok(()) } else { self.advise(0, self.len, advice) }
    }

    /// Drops the pages of `[offset, offset + len)`: they read as zero (or fault, when registered
    /// with userfaultfd) afterwards. See `madvise(2)`, `MADV_DONTNEED`.
    ///
    /// # Safety
    /// Nobody needs the contents of the range any more, and no reference into it exists.
    pub(crate) unsafe fn discard(&self, offset: usize, len: usize) -> Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len}");
        // SAFETY: the range lies in this mapping (checked above); dropping its contents is what
        // the caller allows.
        unsafe { discard_one(Piece::new(self.addr() + offset, len)) }.map(drop)
    }

    /// Moves the pages of `[offset, offset + len)` to `to_offset` of another mapping, whose pages
    /// there are dropped; all are multiples of [`HUGE_PAGE`], so that page tables move whole. The
    /// range stays mapped here and is without pages. See `mremap(2)`, `MREMAP_DONTUNMAP` (5.7).
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses: it is too old, or the process has too many mappings, or
    /// too much address space. The pages are where they were. But with `MREMAP_FIXED` it unmaps the
    /// target before it tries, so the target may be mapped no more, or another thread may have
    /// mapped something there since: it is to be left alone from then on
    /// ([`unmap_around`](Self::unmap_around)).
    ///
    /// # Safety
    /// Nobody uses the two ranges meanwhile, the kernel for I/O included; nobody needs what the
    /// target range holds.
    pub(crate) unsafe fn move_pages(
        &self,
        offset: usize,
        len: usize,
        to: &Mapping,
        to_offset: usize,
    ) -> Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len}");
        assert!(to_offset.checked_add(len).is_some_and(|end| end <= to.len), "{to_offset} + {len}");
        let (from, target) = (self.addr() + offset, to.addr() + to_offset);
        assert!([from, target, len].iter().all(|n| n.is_multiple_of(HUGE_PAGE)), "{from:x}");
        let flags =
            MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED | MRemapFlags::MREMAP_DONTUNMAP;
        // SAFETY: both ranges lie within mappings of this type (checked above), and both keep
        // being mapped: the source by DONTUNMAP, the target by what is moved there. The rest is
        // the caller's promise.
        let moved = unsafe { mremap(self.at(offset), len, len, flags, Some(to.at(to_offset))) };
        moved.map(drop).map_err(refused("mremap"))
    }

    /// Unmaps all but `[offset, offset + len)`, of which nobody knows whose it is.
    pub(crate) fn unmap_around(self, offset: usize, len: usize) {
        let rest = offset.checked_add(len).and_then(|end| self.len.checked_sub(end));
        let rest = rest.expect("the range is a part of the mapping");
        unmap_piece(self.addr(), offset);
        unmap_piece(self.addr() + offset + len, rest);
        std::mem::forget(self);
    }

    /// Puts the pages of `[offset, offset + HUGE_PAGE)`, all of which are there, into one huge page.
    /// See `madvise(2)`, `MADV_COLLAPSE` (6.1). The rest of the mapping stays without huge pages.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses: it is too old, has no huge page, or somebody holds one
    /// of the pages.
    pub(crate) fn collapse(&self, offset: usize) -> Result<()> {
        self.advise(offset, HUGE_PAGE, libc::MADV_HUGEPAGE)?;
        let collapsed = self.advise(offset, HUGE_PAGE, kernel::MADV_COLLAPSE as i32);
        // Where that fails the kernel may make another huge page here one day; but what the caller
        // has to know is whether there is one now.
        let _ = self.advise(offset, HUGE_PAGE, libc::MADV_NOHUGEPAGE);
        collapsed
    }

    /// Makes the huge page that the page at `offset` lies in, if it does, small ones. See
    /// `madvise(2)`, `MADV_COLD`: advice on a part splits the whole (`madvise_cold_or_pageout`).
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel does not know the advice (5.4).
    pub(crate) fn split(&self, offset: usize) -> Result<()> {
        self.advise(offset, KERNEL_PAGE, libc::MADV_COLD)
    }

    /// Asks for huge pages in a part of the mapping, see `madvise(2)`, `MADV_HUGEPAGE`.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel has none.
    pub(crate) fn use_huge_pages(&self, offset: usize, len: usize) -> Result<()> {
        self.advise(offset, len, libc::MADV_HUGEPAGE)
    }

    /// Calls `act` while code may run in the page at `offset`, or without that where the system forbids it.
    pub(crate) fn while_executable<T>(&self, offset: usize, act: impl FnOnce() -> T) -> T {
        assert!(offset + KERNEL_PAGE <= self.len, "{offset}");
        let (page, executable) = (self.at(offset), READ_WRITE | ProtFlags::PROT_EXEC);
        // SAFETY: the page is this mapping's own; its contents stay, and nothing runs there.
        let allowed = unsafe { mprotect(page, KERNEL_PAGE, executable) };
        let done = act();
        if allowed.is_ok() {
            // SAFETY: as it was.
            let back = unsafe { mprotect(page, KERNEL_PAGE, READ_WRITE) };
            back.expect("mappings that were split are joined");
        }
        done
    }

    /// Gives advice that changes no contents.
    fn advise(&self, offset: usize, len: usize, advice: i32) -> Result<()> {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len}");
        if cfg!(miri) {
            return Err(Error::Os { call: "madvise", errno: libc::EINVAL });
        }
        // SAFETY: the range lies in this mapping (checked above); the advice that this is called with
        // changes where contents lie in RAM and not what they are.
        unsafe { madvise(self.at(offset), len, advice) }.map_err(refused("madvise"))
    }

    fn at(&self, offset: usize) -> NonNull<c_void> {
        NonNull::new(self.as_ptr().wrapping_add(offset).cast()).expect("an offset in the mapping")
    }

    /// Makes touching the page at `offset` SIGBUS, for kernels without `UFFDIO_POISON`: maps a
    /// file of length zero over it (`mmap(2)`: access beyond the end of the file).
    pub(crate) fn fence(&self, offset: usize) -> Result<()> {
        let (start, len) = self.page(offset);
        let file = memfd_create(c"farheap-fence", MFdFlags::MFD_CLOEXEC);
        let file = file.map_err(refused("memfd_create"))?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: replaces a part of this mapping whose contents are lost.
        let mapped = unsafe { mmap(Some(start), len, READ_WRITE, flags, file, 0) };
        mapped.map(drop).map_err(refused("mmap"))
    }

    /// Maps zero-filled memory at the page at `offset`, whatever is there. It can be touched only after `prepare`.
    pub(crate) fn map_anew(
        &self,
        offset: usize,
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        map_anew(|| self.map_page(offset, prepare))
    }

    fn map_page(&self, offset: usize, prepare: impl FnOnce() -> Result<()>) -> Result<()> {
        let (start, bytes) = self.page(offset);
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        // SAFETY: replaces a part of this mapping whose contents are lost.
        let mapped = unsafe { mmap_anonymous(Some(start), bytes, ProtFlags::PROT_NONE, flags) };
        mapped.map_err(refused("mmap"))?;
        self.bind_part(offset, KERNEL_PAGE)?;
        self.advise(offset, KERNEL_PAGE, libc::MADV_DONTFORK)?;
        self.advise(offset, KERNEL_PAGE, libc::MADV_DONTDUMP)?;
        // A kernel without huge pages refuses with EINVAL.
        let _ = self.advise(offset, KERNEL_PAGE, libc::MADV_NOHUGEPAGE);
        prepare()?;
        // SAFETY: the page is this mapping's own, without content, and becomes accessible again.
        unsafe { mprotect(self.at(offset), KERNEL_PAGE, READ_WRITE) }.map_err(refused("mprotect"))
    }

    /// Address and length of a page of the mapping.
    fn page(&self, offset: usize) -> (NonZeroUsize, NonZeroUsize) {
        assert!(offset + KERNEL_PAGE <= self.len, "{offset}");
        (self.at(offset).addr(), NonZeroUsize::new(KERNEL_PAGE).expect("a page has bytes"))
    }
}

pub(super) const READ_WRITE: ProtFlags = ProtFlags::PROT_READ.union(ProtFlags::PROT_WRITE);

/// See `madvise(2)`. Not by `nix`, which does not know `MADV_COLLAPSE` and `MADV_DONTNEED_LOCKED`.
///
/// # Safety
/// The caller may do to the range what the advice does.
pub(super) unsafe fn madvise(start: NonNull<c_void>, len: usize, advice: i32) -> nix::Result<()> {
    // SAFETY: the caller's promise.
    Errno::result(unsafe { libc::madvise(start.as_ptr(), len, advice) }).map(drop)
}

/// Drops the content of a mapping of the program's, as far as there is one.
///
/// # Errors
/// [`Error::Os`] when the kernel refuses.
///
/// # Safety
/// Nobody needs what the range holds.
pub(crate) unsafe fn drop_content(start: usize, len: usize) -> Result<()> {
    let Some(place) = NonNull::new(start as *mut c_void) else { return Ok(()) };
    // SAFETY: as the caller promises.
    match unsafe { madvise(place, len, libc::MADV_DONTNEED) } {
        Ok(()) | Err(Errno::ENOMEM) => Ok(()),
        Err(errno) => Err(refused("madvise")(errno)),
    }
}

/// Excludes a range from children that are forked from now on. See `madvise(2)`, `MADV_DONTFORK`.
///
/// # Errors
/// [`Error::Os`] when a part is not mapped, or the process has too many mappings.
pub(crate) fn keep_from_children(start: usize, len: usize) -> Result<()> {
    let Some(place) = NonNull::new(start as *mut c_void) else { return Ok(()) };
    // SAFETY: changes nothing for this process.
    unsafe { madvise(place, len, libc::MADV_DONTFORK) }.map_err(refused("madvise"))
}

/// Makes the kernel pages of a range this process's own, which it shares with a forked child, as writing
/// to them would, and changes nothing of what they hold. Never waits for a page that is missing: of a
/// system call that writes under a fault, `FUTEX_WAKE_OP` is one whose faults userfaultfd does not hand
/// out (`fixup_user_fault` in `mm/gup.c` allows no retry). See `futex(2)`.
pub(crate) fn make_own(start: usize, len: usize) {
    static WORD: AtomicU32 = AtomicU32::new(0);
    /// Add 0 to the second word, and wake nobody of its waiters: it is never below the least number.
    const ADD_NOTHING: u32 = 1 << 28 | 2 << 24 | 0x800;
    let call = libc::FUTEX_WAKE_OP | libc::FUTEX_PRIVATE_FLAG;
    for page in (start..start + len).step_by(KERNEL_PAGE) {
        // SAFETY: the first word is a static; nothing is added to the second, atomically, if it is
        // mapped and may be written.
        unsafe {
            libc::syscall(libc::SYS_futex, WORD.as_ptr(), call, 0, 0, page, ADD_NOTHING);
        }
    }
}

impl Drop for Mapping {
    #[cfg(not(miri))]
    fn drop(&mut self) {
        // What a forked child has there is something else.
        if self.is_here() && !LENT.overlaps(self.addr(), self.addr() + self.len) {
            fork::give_up_place(self.addr());
            unmap_piece(self.addr(), self.len);
        }
    }

    #[cfg(miri)]
    fn drop(&mut self) {
        let layout = std::alloc::Layout::from_size_align(self.len, self.align).expect("as before");
        // SAFETY: allocated with this layout, and nobody uses it any more.
        unsafe { std::alloc::dealloc(self.as_ptr(), layout) };
    }
}

fn unmap_piece(start: usize, len: usize) {
    // SAFETY: called on pieces of a mapping that the caller owns and that nobody uses yet or any
    // more.
    unsafe { inherited::unmap(start, len) };
}

/// Ranges of addresses that the kernel may read or write at any time, for a device that has not answered.
/// A mapping that overlaps one stays for ever: what would be mapped there next would be overwritten.
struct Lent {
    ranges: [(AtomicUsize, AtomicUsize); LENT_MAX],
    count: AtomicUsize,
}

/// Ranges that are remembered. After more of them no mapping is unmapped any more.
const LENT_MAX: usize = 32;

static LENT: Lent = Lent {
    ranges: [const { (AtomicUsize::new(0), AtomicUsize::new(0)) }; LENT_MAX],
    count: AtomicUsize::new(0),
};

impl Lent {
    fn overlaps(&self, start: usize, end: usize) -> bool {
        // Acquire: pairs with `never_unmap`.
        let count = self.count.load(Ordering::Acquire);
        let mut ranges = self.ranges.iter().take(count);
        count > LENT_MAX
            || ranges.any(|(from, to)| {
                start < to.load(Ordering::Relaxed) && from.load(Ordering::Relaxed) < end
            })
    }
}

/// Keeps all mappings that overlap `[start, end)` mapped from now on.
pub(crate) fn never_unmap(start: usize, end: usize) {
    static TURN: Mutex<()> = Mutex::new(());
    let _one = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = LENT.count.load(Ordering::Relaxed);
    if let Some((from, to)) = LENT.ranges.get(count) {
        from.store(start, Ordering::Relaxed);
        to.store(end, Ordering::Relaxed);
    }
    LENT.count.store((count + 1).min(LENT_MAX + 1), Ordering::Release);
}

/// A range of addresses to drop.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Piece(libc::iovec);

impl Piece {
    pub(crate) fn new(start: usize, len: usize) -> Piece {
        Piece(libc::iovec { iov_base: start as *mut _, iov_len: len })
    }

    pub(crate) fn start(&self) -> usize {
        self.0.iov_base as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Extends the piece by `len` bytes at its end.
    pub(crate) fn grow(&mut self, len: usize) {
        self.0.iov_len += len;
    }
}

/// Drops many scattered ranges of this process with one call where the kernel can.
///
/// `process_madvise(MADV_DONTNEED)` on oneself came with Linux 6.13; before, each piece costs a
/// `madvise`. Measured at 64 pages: 0.4-0.7 us a page against 2.4-4.4.
#[derive(Debug)]
pub(crate) struct Discarder {
    pidfd: Option<Private<OwnedFd>>,
    vectored: AtomicBool,
    /// Memory was locked when it was dropped.
    met_locks: AtomicBool,
}

impl Discarder {
    pub(crate) fn new() -> Discarder {
        if cfg!(miri) {
            let [vectored, met_locks] = [(); 2].map(|()| AtomicBool::new(false));
            return Discarder { pidfd: None, vectored, met_locks };
        }
        // SAFETY: pidfd_open(2) takes two integers and returns a new descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), 0) };
        let pidfd = Errno::result(fd).ok().map(|fd| {
            // SAFETY: the descriptor was just made and nobody else owns it.
            Private::new(unsafe { OwnedFd::from_raw_fd(fd as i32) })
        });
        let vectored = AtomicBool::new(pidfd.is_some());
        Discarder { pidfd, vectored, met_locks: AtomicBool::new(false) }
    }

    /// True if memory was locked (`mlock(2)`) that was dropped since this was asked last.
    pub(crate) fn met_locks(&self) -> bool {
        self.met_locks.load(Ordering::Relaxed) && self.met_locks.swap(false, Ordering::Relaxed)
    }

    /// Drops the pages of all `pieces`.
    ///
    /// # Errors
    /// [`Error::Os`] when the kernel refuses a piece; pieces before it are dropped.
    ///
    /// # Safety
    /// As for [`Mapping::discard`], for every piece.
    pub(crate) unsafe fn discard(&self, pieces: &[Piece]) -> Result<()> {
        let mut rest = pieces;
        let mut supported = true;
        if self.vectored.load(Ordering::Relaxed) && pieces.len() > 1 {
            // SAFETY: the caller's promise, passed on.
            let done = unsafe { self.discard_vectored(pieces) };
            supported = done.is_some();
            rest = &pieces[done.unwrap_or(0)..];
        }
        let mut locked = false;
        for piece in rest {
            // SAFETY: the caller allows dropping this piece.
            locked |= unsafe { discard_one(*piece) }? == Met::Locks;
        }
        if locked {
            self.met_locks.store(true, Ordering::Relaxed);
        } else if !supported {
            // Nothing about the pieces explains the refusal.
            self.vectored.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Returns how many pieces were dropped whole; `None` when the kernel refused the first.
    unsafe fn discard_vectored(&self, pieces: &[Piece]) -> Option<usize> {
        let pidfd = self.pidfd.as_ref()?;
        // SAFETY: `Piece` is a transparent iovec; the slice is valid during the call, and the
        // caller allows dropping each range.
        let dropped = unsafe {
            libc::syscall(
                libc::SYS_process_madvise,
                pidfd.as_raw_fd(),
                pieces.as_ptr(),
                pieces.len(),
                libc::MADV_DONTNEED,
                0,
            )
        };
        let mut dropped = usize::try_from(dropped).ok()?;
        // A short count is normal (process_madvise(2)): the caller goes on piece by piece.
        let mut whole = 0;
        for piece in pieces {
            if dropped < piece.len() {
                break;
            }
            dropped -= piece.len();
            whole += 1;
        }
        Some(whole)
    }
}

#[cfg(miri)]
unsafe fn discard_one(piece: Piece) -> Result<Met> {
    // SAFETY: the caller allows dropping this range: it reads as zero then.
    unsafe { piece.0.iov_base.cast::<u8>().write_bytes(0, piece.len()) };
    Ok(Met::Nothing)
}

#[cfg(not(miri))]
unsafe fn discard_one(piece: Piece) -> Result<Met> {
    let start = NonNull::new(piece.0.iov_base).expect("nothing is mapped at address zero");
    let len = piece.len();
    let (mut advice, mut met) = (libc::MADV_DONTNEED, Met::Nothing);
    loop {
        // SAFETY: the caller allows dropping this range.
        match unsafe { madvise(start, len, advice) } {
            Ok(()) => return Ok(met),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            // The program has unmapped a part of the range. The rest was dropped.
            Err(Errno::ENOMEM) => return Ok(met),
            // Locked memory is dropped by an advice of its own (5.18).
            Err(Errno::EINVAL) if met == Met::Nothing => {
                (advice, met) = (libc::MADV_DONTNEED_LOCKED, Met::Locks);
            }
            // An older kernel, or a sandbox that allows the advice of old ones.
            Err(_) if advice == libc::MADV_DONTNEED_LOCKED => {
                // SAFETY: ends locks; contents stay.
                let _ = unsafe { munlock(start, len) };
                advice = libc::MADV_DONTNEED;
            }
            Err(errno) => return Err(refused("madvise")(errno)),
        }
    }
}

/// Copies memory of this process that may not be readable: `process_vm_readv(2)` then says so, where
/// a load would be SIGSEGV. Returns whether all of it was copied.
///
/// # Safety
/// `to` is valid for writes of `len` bytes, and nobody else uses it meanwhile.
pub(crate) unsafe fn copy_checked(from: usize, to: *mut u8, len: usize) -> bool {
    let local = libc::iovec { iov_base: to.cast(), iov_len: len };
    let remote = Piece::new(from, len).0;
    // The first thread's would find nothing once that has ended.
    let own = super::thread::current().cast_signed();
    // SAFETY: the caller's promise for `to`; the call checks the range that it reads.
    let copied = unsafe { libc::process_vm_readv(own, &local, 1, &remote, 1, 0) };
    copied == len as isize
}

/// Obstacle to dropping memory that was overcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Met {
    Nothing,
    Locks,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU8;

    fn byte(mapping: &Mapping, offset: usize) -> &AtomicU8 {
        assert!(offset < mapping.len());
        // SAFETY: in bounds, checked above.
        let ptr = unsafe { mapping.as_ptr().add(offset) };
        // SAFETY: the mapping is readable and writable while it is borrowed, and all access to
        // it in these tests is atomic.
        unsafe { AtomicU8::from_ptr(ptr) }
    }

    #[test]
    fn a_reservation_is_aligned_and_zero() {
        let mapping = Mapping::reserve(8 << 20, 2 << 20, Huge::No).expect("8 MiB map");
        assert!(mapping.addr().is_multiple_of(2 << 20));
        assert_eq!(byte(&mapping, 5 << 20).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn discarding_scattered_pieces_zeroes_just_those() {
        let mapping = Mapping::reserve(1 << 20, KERNEL_PAGE, Huge::No).expect("1 MiB maps");
        for page in 0..8 {
            byte(&mapping, page * KERNEL_PAGE).store(7, Ordering::Relaxed);
        }
        let piece = |page: usize| Piece::new(mapping.addr() + page * KERNEL_PAGE, KERNEL_PAGE);
        let discarder = Discarder::new();
        // SAFETY: the test owns the pages.
        unsafe { discarder.discard(&[piece(1), piece(3), piece(6)]) }.expect("own pages drop");
        let seen = [0, 1, 2, 3, 4, 5, 6, 7]
            .map(|page| byte(&mapping, page * KERNEL_PAGE).load(Ordering::Relaxed));
        assert_eq!(seen, [7, 0, 7, 0, 7, 7, 0, 7]);
    }

    #[test]
    #[cfg_attr(miri, ignore = "knows no address space")]
    fn a_mapping_that_the_kernel_may_still_use_stays_mapped() {
        let map = || Mapping::reserve(4 * KERNEL_PAGE, KERNEL_PAGE, Huge::No).expect("maps");
        let (lent, other) = (map(), map());
        let (first, second) = (lent.addr(), other.addr());
        never_unmap(first + KERNEL_PAGE, first + 2 * KERNEL_PAGE);
        drop((lent, other));
        let is_mapped = |addr: usize| {
            // SAFETY: asks about a range of addresses; ENOMEM where none is mapped (msync(2)).
            unsafe { libc::msync(addr as *mut _, 4 * KERNEL_PAGE, libc::MS_ASYNC) == 0 }
        };
        assert!(is_mapped(first));
        // (Another thread's mapping may be where the second one was, but mostly is not.)
        let freed = (0..64).any(|_| {
            let other = map();
            let addr = other.addr();
            drop(other);
            !is_mapped(addr)
        });
        assert!(freed, "{second:x} and all others stay");
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads /proc")]
    fn the_page_map_tells_touched_pages_from_others() {
        let Some(pagemap) = crate::sys::pagemap::Pagemap::open().expect("a descriptor") else {
            println!("skipped: /proc/self/pagemap is not readable");
            return;
        };
        let mapping = Mapping::reserve(8 * KERNEL_PAGE, KERNEL_PAGE, Huge::No).expect("maps");
        for page in [1, 4] {
            byte(&mapping, page * KERNEL_PAGE).store(1, Ordering::Relaxed);
        }
        let mut there = [false; 8];
        pagemap.scan(mapping.addr(), &mut there).expect("readable");
        assert_eq!(there, [false, true, false, false, true, false, false, false]);
    }
}
