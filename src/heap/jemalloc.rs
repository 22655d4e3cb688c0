//! jemalloc, typed: allocation flags, arenas, explicit thread caches and their controls.
//!
//! [`Flags`] says where an allocation goes, [`JemallocArena`] and [`Cache`] own the two things that are
//! created at run time, [`options`] asks how jemalloc was built and configured. The rest of the heap names no control
//! by string. Lowest part of the heap; uses `base` and `sys` only.
//!
//! # Invariants
//! 1. A [`Cache`] is used by one thread at a time; jemalloc does not lock it.
//! 2. A [`Cache`] never sees a pointer of an arena outside its tier.

#![expect(unsafe_code, reason = "calls jemalloc")]

/// The control of a name, translated once.
macro_rules! control {
    ($name:literal) => {{
        use $crate::heap::jemalloc::{Control, parts};
        static CONTROL: Control<{ parts($name) }> = Control::new($name);
        &CONTROL
    }};
}

pub(crate) mod options;

use crate::base::error::{Error, Result};
use crate::base::units::ByteCount;
use crate::sys::inherited;
use std::ffi::{CStr, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;
use tikv_jemalloc_sys as ffi;

pub(crate) use tikv_jemalloc_sys::extent_hooks_t;

/// jemalloc's page; extents are multiples of it.
pub(crate) const PAGE: usize = 4096;

/// Largest size that jemalloc's own caches keep, in bytes.
pub(crate) const SMALL_MAX: usize = 32 << 10;

/// Alignment that every size has without asking, and that every size above it has.
const ALIGN_FREE: usize = 8;
const ALIGN_FREE_ABOVE: usize = 16;

/// Where an allocation goes and how: jemalloc's `flags` argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flags(c_int);

impl Flags {
    /// The calling thread's automatic arena and cache.
    pub(crate) const LOCAL: Flags = Flags(0);

    /// `arena`, past all caches.
    pub(crate) const fn uncached(arena: u32) -> Flags {
        Flags(ffi::MALLOCX_ARENA(arena as usize) | NO_CACHE)
    }

    /// `arena` through `cache`.
    pub(crate) const fn cached(arena: u32, cache: u32) -> Flags {
        Flags(ffi::MALLOCX_ARENA(arena as usize) | ffi::MALLOCX_TCACHE(cache as usize))
    }

    /// True if jemalloc's natural alignment of `size` is `align` or more.
    #[inline]
    pub(crate) const fn is_natural(size: usize, align: usize) -> bool {
        align <= ALIGN_FREE || (align == ALIGN_FREE_ABOVE && size > ALIGN_FREE)
    }

    /// The same with what `size` and `align` need beyond jemalloc's natural alignment.
    #[inline]
    pub(crate) const fn aligned(self, size: usize, align: usize) -> Flags {
        if Flags::is_natural(size, align) {
            self
        } else {
            Flags(self.0 | align.trailing_zeros() as c_int)
        }
    }

    /// The same with zeroed memory.
    #[inline]
    pub(crate) const fn zeroed(self) -> Flags {
        Flags(self.0 | ffi::MALLOCX_ZERO)
    }
}

/// `MALLOCX_TCACHE_NONE`.
const NO_CACHE: c_int = ffi::MALLOCX_TCACHE(usize::MAX);

/// Allocates `size` bytes, or returns null.
///
/// # Safety
/// `size` is not zero; a cache in `flags` belongs to the calling thread.
#[inline]
pub(crate) unsafe fn allocate(size: usize, flags: Flags) -> *mut u8 {
    let ptr = if flags == Flags::LOCAL {
        // Half the price of `mallocx` without flags.
        // SAFETY: any size is allowed.
        unsafe { ffi::malloc(size) }
    } else {
        // SAFETY: as the caller promises.
        unsafe { ffi::mallocx(size, flags.0) }
    };
    ptr.cast()
}

/// Frees an allocation.
///
/// # Safety
/// `ptr` was allocated by this jemalloc with `size` (or resized to it) and the alignment in
/// `flags`, and is not used again; a cache in `flags` belongs to the calling thread and to the
/// tier of `ptr`.
#[inline]
pub(crate) unsafe fn free(ptr: *mut u8, size: usize, flags: Flags) {
    // SAFETY: as the caller promises.
    unsafe { ffi::sdallocx(ptr.cast(), size, flags.0) }
}

/// Frees a local allocation of any size.
///
/// # Safety
/// As for [`free`], and `ptr` is of no arena with a cache of its own.
#[inline]
pub(crate) unsafe fn free_unsized(ptr: *mut u8) {
    // SAFETY: as the caller promises.
    unsafe { ffi::free(ptr.cast()) }
}

/// Bytes that an allocation has.
///
/// # Safety
/// `ptr` was allocated by this jemalloc and has not been freed.
#[inline]
pub(crate) unsafe fn size_of_block(ptr: *const u8) -> usize {
    // SAFETY: as the caller promises.
    unsafe { ffi::sallocx(ptr.cast(), 0) }
}

/// True if jemalloc has memory at an address: one that it has not, [`free`] and [`size_of_block`] must not be asked
/// about. Takes the lock of its controls.
pub(crate) fn knows(ptr: *const u8) -> bool {
    // SAFETY: takes a pointer, which may be any, and yields an `unsigned`.
    unsafe { control!(c"arenas.lookup").exchange::<*const u8, u32>(ptr) }.is_ok()
}

/// Bytes that an allocation of `size` bytes would really have; 0 for an impossible one.
pub(crate) fn usable_size_or_zero(size: usize, flags: Flags) -> usize {
    if size == 0 {
        return 0;
    }
    // SAFETY: computes only; `size` is not zero.
    unsafe { ffi::nallocx(size, flags.0) }
}

/// Resizes an allocation, moving it within what `flags` name if needed; null leaves it as it was.
///
/// # Safety
/// As for [`free`], and `size` is not zero.
#[inline]
pub(crate) unsafe fn reallocate(ptr: *mut u8, size: usize, flags: Flags) -> *mut u8 {
    // SAFETY: as the caller promises.
    unsafe { ffi::rallocx(ptr.cast(), size, flags.0) }.cast()
}

/// Bytes that an allocation of `size` bytes would really have; 0 for an impossible one.
///
/// # Panics
/// When `size` is zero.
#[cfg(test)]
pub(crate) fn usable_size(size: usize, flags: Flags) -> usize {
    assert_ne!(size, 0, "jemalloc has no class for empty objects");
    // SAFETY: computes only; `size` is not zero.
    unsafe { ffi::nallocx(size, flags.0) }
}

/// Where an arena's metadata lies: in local mappings, which end with the arena. With its default
/// hooks jemalloc keeps their addresses for ever (`opt.retain`): 2 MiB an arena.
static METADATA_HOOKS: extent_hooks_t = plain_hooks(map_metadata, unmap_metadata);

/// Hooks for extents that are taken and given back, and nothing else.
pub(super) const fn plain_hooks(
    alloc: ffi::extent_alloc_t,
    dalloc: ffi::extent_dalloc_t,
) -> extent_hooks_t {
    extent_hooks_t {
        alloc: Some(alloc),
        dalloc: Some(dalloc),
        destroy: None,
        commit: None,
        decommit: None,
        purge_lazy: None,
        purge_forced: None,
        split: None,
        merge: None,
    }
}

/// Hooks that keep an arena's metadata in local memory; they live for ever and are only read.
pub(super) fn local_metadata() -> *mut extent_hooks_t {
    (&raw const METADATA_HOOKS).cast_mut()
}

unsafe extern "C" fn map_metadata(
    _hooks: *mut extent_hooks_t,
    new_addr: *mut c_void,
    size: usize,
    align: usize,
    zero: *mut bool,
    commit: *mut bool,
    _arena: c_uint,
) -> *mut c_void {
    if !new_addr.is_null() {
        return ptr::null_mut(); // A wish for a certain address, which may be refused.
    }
    let Ok(base) = inherited::map(size, align.max(PAGE)) else { return ptr::null_mut() };
    // SAFETY: jemalloc passes a valid pointer.
    unsafe { zero.write(true) };
    // SAFETY: jemalloc passes a valid pointer.
    unsafe { commit.write(true) };
    base.as_ptr().cast()
}

/// Returns `false`, which is success.
unsafe extern "C" fn unmap_metadata(
    _hooks: *mut extent_hooks_t,
    addr: *mut c_void,
    size: usize,
    _committed: bool,
    _arena: c_uint,
) -> bool {
    // SAFETY: called by jemalloc, when it destroys an arena, with what `map_metadata` returned.
    // Without a hook for splitting it is all of that.
    unsafe { inherited::unmap(addr.addr(), size) };
    false
}

/// One arena with hooks of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JemallocArena(u32);

/// Content of an arena, in jemalloc pages; as of the last [`advance_epoch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaPages {
    /// In allocations, cached ones and the unused rest of slabs included.
    pub(crate) active: usize,
    /// Free, with contents not yet given back.
    pub(crate) dirty: usize,
}

/// Content of an arena, in bytes; as of the last [`advance_epoch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ArenaBytes {
    /// Of small and of large blocks, cached ones included.
    pub(crate) small: usize,
    pub(crate) large: usize,
    /// Of pages: see [`ArenaPages`].
    pub(crate) active: usize,
    pub(crate) dirty: usize,
    /// Metadata of the arena.
    pub(crate) metadata: usize,
    /// Resident bytes by jemalloc's account, metadata included.
    pub(crate) resident: usize,
    /// Address space without memory, kept for later.
    pub(crate) retained: usize,
}

impl JemallocArena {
    /// Creates an arena whose data extents come from `hooks`, and whose metadata from others: that of
    /// [`local_metadata`] or of a tier.
    ///
    /// # Errors
    /// [`Error::Jemalloc`] when jemalloc has no arena left or no memory.
    ///
    /// # Safety
    /// Both stay valid, and their functions keep jemalloc's contract, until
    /// [`destroy`](Self::destroy).
    pub(crate) unsafe fn create(
        hooks: *mut extent_hooks_t,
        metadata: *mut extent_hooks_t,
    ) -> Result<JemallocArena> {
        // SAFETY: `arenas.create` takes a pointer to hooks, which the caller keeps valid, and yields an
        // `unsigned`.
        let index: u32 = unsafe { control!(c"arenas.create").exchange(metadata) }?;
        // Hooks given at creation serve the arena's metadata, those given later its data only.
        // SAFETY: takes a pointer to hooks, which the caller keeps valid.
        unsafe { control!(c"arena.0.extent_hooks").write(&[(1, index)], hooks) }?;
        Ok(JemallocArena(index))
    }

    /// jemalloc's index of the arena.
    pub(crate) const fn index(self) -> u32 {
        self.0
    }

    /// Sets how long freed extents keep their contents, in ms: first dirty, then muzzy.
    ///
    /// # Errors
    /// [`Error::Jemalloc`].
    pub(crate) fn set_decay(self, dirty_ms: isize, muzzy_ms: isize) -> Result<()> {
        // SAFETY: takes an `ssize_t`.
        unsafe { control!(c"arena.0.dirty_decay_ms").write(&[(1, self.0)], dirty_ms) }?;
        // SAFETY: takes an `ssize_t`.
        unsafe { control!(c"arena.0.muzzy_decay_ms").write(&[(1, self.0)], muzzy_ms) }
    }

    /// Bounds the address ranges asked for at once. Where the program has switched `retain` off, jemalloc
    /// asks for what it needs and no more, and there is nothing to bound.
    ///
    /// # Errors
    /// [`Error::Jemalloc`], for one when `bytes` is less than a page.
    pub(crate) fn set_grow_limit(self, bytes: ByteCount) -> Result<()> {
        // SAFETY: yields a `bool`.
        if !unsafe { control!(c"opt.retain").read::<bool>(&[]) }? {
            return Ok(());
        }
        // SAFETY: takes a `size_t`.
        unsafe { control!(c"arena.0.retain_grow_limit").write(&[(1, self.0)], bytes.as_usize()) }
    }

    /// Sets the size from which a freed extent is given back at once, whatever its decay.
    ///
    /// # Errors
    /// [`Error::Jemalloc`].
    pub(crate) fn set_oversize_threshold(self, bytes: usize) -> Result<()> {
        // SAFETY: takes a `size_t`.
        unsafe { control!(c"arena.0.oversize_threshold").write(&[(1, self.0)], bytes) }
    }

    /// Gives back the free extents whose time has passed.
    pub(crate) fn decay(self) {
        // Fails only for an arena that does not exist.
        let done = control!(c"arena.0.decay").call(&[(1, self.0)]);
        debug_assert_eq!(done, Ok(()));
    }

    /// Gives back all free extents now.
    pub(crate) fn purge(self) {
        let done = control!(c"arena.0.purge").call(&[(1, self.0)]);
        debug_assert_eq!(done, Ok(()));
    }

    /// Content of the arena at the last [`advance_epoch`].
    ///
    /// # Errors
    /// [`Error::Jemalloc`].
    pub(crate) fn pages(self) -> Result<ArenaPages> {
        // SAFETY: yields a `size_t`.
        let active = unsafe { control!(c"stats.arenas.0.pactive").read(&[(2, self.0)]) }?;
        // SAFETY: yields a `size_t`.
        let dirty = unsafe { control!(c"stats.arenas.0.pdirty").read(&[(2, self.0)]) }?;
        Ok(ArenaPages { active, dirty })
    }

    /// Content of the arena at the last [`advance_epoch`], in bytes.
    ///
    /// # Errors
    /// [`Error::Jemalloc`].
    pub(crate) fn bytes(self) -> Result<ArenaBytes> {
        let part = [(2, self.0)];
        let pages = self.pages()?;
        // SAFETY: yields a `size_t`.
        let small = unsafe { control!(c"stats.arenas.0.small.allocated").read(&part) }?;
        // SAFETY: yields a `size_t`.
        let large = unsafe { control!(c"stats.arenas.0.large.allocated").read(&part) }?;
        // SAFETY: yields a `size_t`.
        let base: usize = unsafe { control!(c"stats.arenas.0.base").read(&part) }?;
        // SAFETY: yields a `size_t`.
        let internal: usize = unsafe { control!(c"stats.arenas.0.internal").read(&part) }?;
        // SAFETY: yields a `size_t`.
        let resident = unsafe { control!(c"stats.arenas.0.resident").read(&part) }?;
        // SAFETY: yields a `size_t`.
        let retained = unsafe { control!(c"stats.arenas.0.retained").read(&part) }?;
        let (active, dirty, metadata) = (pages.active * PAGE, pages.dirty * PAGE, base + internal);
        Ok(ArenaBytes { small, large, active, dirty, metadata, resident, retained })
    }

    /// Discards the arena with everything in it; its extents go to the `destroy` hook.
    ///
    /// # Errors
    /// [`Error::Jemalloc`].
    ///
    /// # Safety
    /// No allocation of the arena is used again, and no [`Cache`] holds one.
    pub(crate) unsafe fn destroy(self) -> Result<()> {
        control!(c"arena.0.destroy").call(&[(1, self.0)])
    }
}

/// An explicit thread cache.
///
/// Belongs to the holder of the value; see invariant 1.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cache(u32);

impl Cache {
    /// Creates an empty cache; `None` when jemalloc has none left (about 4,094 exist).
    pub(crate) fn create() -> Option<Cache> {
        // SAFETY: yields an `unsigned`.
        unsafe { control!(c"tcache.create").read(&[]) }.ok().map(Cache)
    }

    /// jemalloc's index of the cache.
    pub(crate) const fn index(&self) -> u32 {
        self.0
    }

    /// Returns the cached objects to their arenas.
    pub(crate) fn flush(&self) {
        // SAFETY: takes an `unsigned`.
        let done = unsafe { control!(c"tcache.flush").write(&[], self.0) };
        debug_assert_eq!(done, Ok(()));
    }

    /// Flushes and removes the cache.
    pub(crate) fn destroy(self) {
        // SAFETY: takes an `unsigned`.
        let done = unsafe { control!(c"tcache.destroy").write(&[], self.0) };
        debug_assert_eq!(done, Ok(()));
    }
}

/// Makes statistics current. Walks all arenas under their locks: not for hot paths.
pub(crate) fn advance_epoch() {
    // SAFETY: takes a `uint64_t`.
    let done = unsafe { control!(c"epoch").write(&[], 1_u64) };
    debug_assert_eq!(done, Ok(()));
}

/// Resident bytes of all arenas, metadata included; as of the last [`advance_epoch`].
///
/// # Errors
/// [`Error::Jemalloc`].
pub(crate) fn resident() -> Result<ByteCount> {
    // SAFETY: yields a `size_t`.
    let bytes: usize = unsafe { control!(c"stats.resident").read(&[]) }?;
    Ok(ByteCount(bytes as u64))
}

/// Bytes of the tree by which jemalloc finds the extent of an address; as of the last [`advance_epoch`]. It
/// counts a node of 2 MiB for each GiB of addresses as resident, of which little ever is.
///
/// # Errors
/// [`Error::Jemalloc`].
pub(crate) fn address_tree() -> Result<ByteCount> {
    // SAFETY: yields a `size_t`.
    let bytes: usize = unsafe { control!(c"stats.metadata_rtree").read(&[]) }?;
    Ok(ByteCount(bytes as u64))
}

/// All arenas there may be, far and local ones; some of them may be gone.
///
/// # Errors
/// [`Error::Jemalloc`].
pub(crate) fn arenas() -> Result<impl Iterator<Item = JemallocArena>> {
    // SAFETY: yields an `unsigned`.
    let count: u32 = unsafe { control!(c"arenas.narenas").read(&[]) }?;
    Ok((0..count).map(JemallocArena))
}

/// Parts of a control's name, with dots between them.
const fn parts(name: &CStr) -> usize {
    let (name, mut at, mut parts) = (name.to_bytes(), 0, 1);
    while at < name.len() {
        parts += (name[at] == b'.') as usize;
        at += 1;
    }
    parts
}

/// A control of jemalloc's with `N` name parts, translated from text once.
struct Control<const N: usize> {
    name: &'static CStr,
    mib: OnceLock<[usize; N]>,
}

impl<const N: usize> Control<N> {
    const fn new(name: &'static CStr) -> Control<N> {
        Control { name, mib: OnceLock::new() }
    }

    /// Reads a value. `parts` replaces name parts by numbers, `(position, number)`.
    ///
    /// # Safety
    /// `T` is the control's type.
    unsafe fn read<T: Copy + Default>(&self, parts: &[(usize, u32)]) -> Result<T> {
        let mut value = T::default();
        // SAFETY: as the caller promises.
        unsafe { self.control::<T, ()>(parts, Some(&mut value), None) }?;
        Ok(value)
    }

    /// Writes a value and reads another one.
    ///
    /// # Safety
    /// The types are the control's, and what it does with `value` is sound.
    unsafe fn exchange<I: Copy, O: Copy + Default>(&self, mut value: I) -> Result<O> {
        let mut old = O::default();
        // SAFETY: as the caller promises.
        unsafe { self.control(&[], Some(&mut old), Some(&mut value)) }?;
        Ok(old)
    }

    /// Writes a value.
    ///
    /// # Safety
    /// `T` is the control's type, and what it does with `value` is sound.
    unsafe fn write<T: Copy>(&self, parts: &[(usize, u32)], mut value: T) -> Result<()> {
        // SAFETY: as the caller promises.
        unsafe { self.control::<(), T>(parts, None, Some(&mut value)) }
    }

    /// Calls a control that takes and yields nothing.
    fn call(&self, parts: &[(usize, u32)]) -> Result<()> {
        // SAFETY: no value moves.
        unsafe { self.control::<(), ()>(parts, None, None) }
    }

    /// Makes the call, with room for what the control yields, and with what it takes.
    ///
    /// # Safety
    /// The types are the control's, and what it does with `new` is sound.
    unsafe fn control<O, I>(
        &self,
        parts: &[(usize, u32)],
        old: Option<&mut O>,
        new: Option<&mut I>,
    ) -> Result<()> {
        fn place<T>(value: Option<&mut T>) -> (*mut c_void, usize) {
            value.map_or((ptr::null_mut(), 0), |value| ((&raw mut *value).cast(), size_of::<T>()))
        }
        let mib = self.translate(parts)?;
        let ((old, mut old_len), (new, new_len)) = (place(old), place(new));
        let old_len = if old.is_null() { ptr::null_mut() } else { &raw mut old_len };
        // SAFETY: `mib` has `N` parts; `old` is writable and `new` readable for their sizes, which jemalloc compares
        // with the control's, or null.
        let errno = unsafe { ffi::mallctlbymib(mib.as_ptr(), N, old, old_len, new, new_len) };
        self.check(errno)
    }

    fn translate(&self, parts: &[(usize, u32)]) -> Result<[usize; N]> {
        let mut mib = match self.mib.get() {
            Some(mib) => *mib,
            None => {
                let mut mib = [0; N];
                let mut len = N;
                // SAFETY: the name ends with a zero; `mib` has room for `len` parts.
                let errno = unsafe {
                    ffi::mallctlnametomib(self.name.as_ptr(), mib.as_mut_ptr(), &raw mut len)
                };
                self.check(errno)?;
                assert_eq!(len, N, "{:?} has {len} parts", self.name);
                *self.mib.get_or_init(|| mib)
            }
        };
        for &(position, number) in parts {
            mib[position] = number as usize;
        }
        Ok(mib)
    }

    fn check(&self, errno: c_int) -> Result<()> {
        if errno == 0 {
            return Ok(());
        }
        Err(Error::Jemalloc { name: self.name.to_str().unwrap_or("?"), errno })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_that_does_not_exist_is_an_error_that_names_it() {
        static MISSING: Control<2> = Control::new(c"arenas.missing");
        let error = MISSING.call(&[]).expect_err("no such control");
        assert!(error.to_string().contains("arenas.missing"), "{error}");
    }

    #[test]
    fn natural_alignment_needs_no_flag() {
        assert_eq!(Flags::LOCAL.aligned(16, 16), Flags::LOCAL);
        assert_eq!(Flags::LOCAL.aligned(8, 8), Flags::LOCAL);
        assert_eq!(Flags::LOCAL.aligned(1, 8), Flags::LOCAL);
        assert_eq!(Flags::LOCAL.aligned(9, 16), Flags::LOCAL);
        assert_ne!(Flags::LOCAL.aligned(8, 16), Flags::LOCAL);
        assert_ne!(Flags::LOCAL.aligned(64, 32), Flags::LOCAL);
    }
}
