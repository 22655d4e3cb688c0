//! The functions that programs call: the malloc family, as the C library documents it.
//!
//! C++'s operators are the C++ library's, which call these. `malloc`, `calloc` and `realloc` pass
//! on the address that they return to, which tells the loader's requests apart. Uses the other modules.
//!
//! # Invariants
//! 1. `errno` is changed by failures only.

#![expect(unsafe_code, reason = "exports functions of C that take its pointers")]

use crate::own::{enter, keep_errno, set_errno};
use crate::{inner, start};
use farheap::{Heap, malloc};
use libc::{c_int, c_void, size_t};
use std::arch::naked_asm;
use std::ptr::{self, NonNull};

/// Alignment of every block.
const ALIGN: usize = 16;
const PAGE: usize = 4096;
/// Blocks up to this size are cleared by writing. Pages of larger ones may have left memory, and need not come back for it.
const CLEARED_MAX: usize = 32 << 10;

/// Passes `block` on; says "no memory" for none.
pub(crate) extern "C" fn given(block: *mut c_void) -> *mut c_void {
    if block.is_null() {
        set_errno(libc::ENOMEM);
    }
    block
}

/// Allocates for a caller at `code`; null, and no `errno`, when there is no memory.
#[inline]
pub(crate) fn allocate_for(code: usize, size: usize, align: usize, zeroed: bool) -> *mut c_void {
    if let Some(_inside) = enter().filter(|_| !start::is_loader(code)) {
        let _kept = keep_errno();
        start::notice(size);
        // At least a word more than nothing, aligned whatever the size: programs count on 16.
        let block = malloc::allocate(size.max(ALIGN), align.max(ALIGN), None, zeroed);
        return block.map_or(ptr::null_mut(), |block| block.as_ptr().cast());
    }
    let block = inner::allocate(size, align, zeroed);
    if !block.is_null() {
        return block;
    }
    let local = Some(farheap::Tier::LOCAL);
    let block = malloc::allocate(size.max(ALIGN), align.max(ALIGN), local, zeroed);
    block.map_or(ptr::null_mut(), |block| block.as_ptr().cast())
}

/// Frees any block.
///
/// # Safety
/// The block is from this library, was not freed, and is not used again.
#[inline]
unsafe fn release(block: NonNull<c_void>) {
    if inner::owns(block.as_ptr()) {
        // SAFETY: as the caller promises, and from there.
        return unsafe { inner::free(block.as_ptr()) };
    }
    let _kept = keep_errno();
    let _inside = enter();
    // SAFETY: as the caller promises, and from farheap, like all that is not from `inner`.
    unsafe { malloc::free(block.cast()) };
}

/// Bytes of a block that may be used.
///
/// # Safety
/// The block is from this library and was not freed.
unsafe fn usable(block: NonNull<c_void>) -> usize {
    if inner::owns(block.as_ptr()) {
        // SAFETY: as the caller promises, and from there.
        return unsafe { inner::usable(block.as_ptr()) };
    }
    // SAFETY: as the caller promises, and from farheap.
    unsafe { malloc::usable_size(block.cast()) }
}

/// Allocates far memory if a block of this size is at hand, as it mostly is: the common case of `malloc` and `calloc`,
/// in half of the time of [`allocate_for`], and without a call that might change `errno`.
#[inline(always)]
fn at_hand(code: usize, size: usize) -> Option<NonNull<c_void>> {
    if !start::is_over() {
        return None; // What is allocated is counted still.
    }
    let _inside = enter().filter(|_| !start::is_loader(code))?;
    malloc::allocate_at_hand_by_size(size.max(ALIGN), ALIGN).map(NonNull::cast)
}

extern "C" fn allocate(size: size_t, code: usize) -> *mut c_void {
    if let Some(block) = at_hand(code, size) {
        return block.as_ptr();
    }
    given(allocate_for(code, size, ALIGN, false))
}

extern "C" fn allocate_zeroed(count: size_t, size: size_t, code: usize) -> *mut c_void {
    let Some(bytes) = count.checked_mul(size) else { return given(ptr::null_mut()) };
    if bytes <= CLEARED_MAX
        && let Some(block) = at_hand(code, bytes)
    {
        // SAFETY: the block has that many bytes, and is nobody else's.
        unsafe { block.cast::<u8>().write_bytes(0, bytes) };
        return block.as_ptr();
    }
    given(allocate_for(code, bytes, ALIGN, true))
}

/// `realloc(3)`: a size of zero frees, as in the C library.
///
/// # Safety
/// As there.
unsafe extern "C" fn reallocate(block: *mut c_void, size: size_t, code: usize) -> *mut c_void {
    let Some(old) = NonNull::new(block) else { return allocate(size, code) };
    if size == 0 {
        // SAFETY: as the caller promises.
        unsafe { release(old) };
        return ptr::null_mut();
    }
    if !inner::owns(block) {
        let kept = keep_errno();
        let _inside = enter();
        start::notice(size);
        // SAFETY: as the caller promises, and from farheap.
        let moved = unsafe { malloc::reallocate(old.cast(), size.max(ALIGN)) };
        drop(kept);
        return given(moved.map_or(ptr::null_mut(), |moved| moved.as_ptr().cast()));
    }
    // SAFETY: as the caller promises, and from there.
    let had = unsafe { inner::usable(block) };
    let moved = allocate_for(code, size, ALIGN, false);
    if !moved.is_null() {
        // SAFETY: both have that many bytes, and the new block overlaps nothing.
        unsafe { moved.copy_from_nonoverlapping(block, had.min(size)) };
        // SAFETY: as the caller promises, and from there.
        unsafe { inner::free(block) };
    }
    given(moved)
}

/// `malloc(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn malloc(size: size_t) -> *mut c_void {
    naked_asm!("mov rsi, qword ptr [rsp]", "jmp {}", sym allocate)
}

/// `calloc(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn calloc(count: size_t, size: size_t) -> *mut c_void {
    naked_asm!("mov rdx, qword ptr [rsp]", "jmp {}", sym allocate_zeroed)
}

/// `realloc(3)`.
///
/// # Safety
/// As there.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(block: *mut c_void, size: size_t) -> *mut c_void {
    naked_asm!("mov rdx, qword ptr [rsp]", "jmp {}", sym reallocate)
}

/// `free(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn free(block: *mut c_void) {
    if let Some(block) = NonNull::new(block) {
        // SAFETY: as the caller promises.
        unsafe { release(block) }
    }
}

/// `reallocarray(3)`: by the name `realloc`, which is the program's own where it has one.
///
/// # Safety
/// As there.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn reallocarray(block: *mut c_void, count: size_t, size: size_t) -> *mut c_void {
    naked_asm!(
        "mov rax, rsi",
        "mul rdx",
        "mov rsi, rax",
        "jno realloc@PLT",
        "xor edi, edi",
        "jmp {}",
        sym given,
    )
}

/// `posix_memalign(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_memalign(to: *mut *mut c_void, align: size_t, size: size_t) -> c_int {
    if !align.is_power_of_two() || !align.is_multiple_of(size_of::<*mut c_void>()) {
        return libc::EINVAL;
    }
    let block = allocate_for(0, size, align, false);
    if block.is_null() {
        return libc::ENOMEM;
    }
    // SAFETY: a place for the result, as the caller promises.
    unsafe { to.write(block) };
    0
}

/// `memalign(3)`: an alignment that is no power of two is rounded up to one.
#[unsafe(no_mangle)]
extern "C" fn memalign(align: size_t, size: size_t) -> *mut c_void {
    match align.checked_next_power_of_two() {
        Some(align) => given(allocate_for(0, size, align, false)),
        None => given(ptr::null_mut()),
    }
}

/// `aligned_alloc(3)`.
#[unsafe(no_mangle)]
extern "C" fn aligned_alloc(align: size_t, size: size_t) -> *mut c_void {
    if !align.is_power_of_two() {
        set_errno(libc::EINVAL);
        return ptr::null_mut();
    }
    memalign(align, size)
}

/// `valloc(3)`.
#[unsafe(no_mangle)]
extern "C" fn valloc(size: size_t) -> *mut c_void {
    memalign(PAGE, size)
}

/// `pvalloc(3)`: whole pages.
#[unsafe(no_mangle)]
extern "C" fn pvalloc(size: size_t) -> *mut c_void {
    match size.max(1).checked_next_multiple_of(PAGE) {
        Some(size) => memalign(PAGE, size),
        None => given(ptr::null_mut()),
    }
}

/// `malloc_usable_size(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn malloc_usable_size(block: *mut c_void) -> size_t {
    // SAFETY: as the caller promises.
    NonNull::new(block).map_or(0, |block| unsafe { usable(block) })
}

/// `malloc_trim(3)`: gives freed far memory back; 1 where a heap runs.
#[unsafe(no_mangle)]
extern "C" fn malloc_trim(_keep: size_t) -> c_int {
    let Some(_inside) = enter() else { return 0 };
    let heap = Heap::running();
    heap.iter().for_each(Heap::purge);
    heap.is_some().into()
}

/// `mallopt(3)`: says that it has done what it is asked for, which does not concern this allocator.
#[unsafe(no_mangle)]
extern "C" fn mallopt(_parameter: c_int, _value: c_int) -> c_int {
    1
}

/// Bytes of local and far memory.
fn size() -> usize {
    let Some(_inside) = enter() else { return 0 };
    let far = Heap::running().map_or(0, |heap| heap.usage().allocated_bytes.as_usize());
    malloc::local_resident().as_usize() + far
}

/// `mallinfo2(3)`: all memory is `arena`, and in use. Programs add `hblkhd` to `arena`, and some to `uordblks`: as zero it
/// makes no sum wrong.
#[unsafe(no_mangle)]
extern "C" fn mallinfo2() -> libc::mallinfo2 {
    // SAFETY: numbers, of which zero is one.
    let mut info: libc::mallinfo2 = unsafe { std::mem::zeroed() };
    info.arena = size();
    info.uordblks = info.arena;
    info
}

/// `mallinfo(3)`: as [`mallinfo2`], with numbers up to 2 GiB.
#[unsafe(no_mangle)]
extern "C" fn mallinfo() -> libc::mallinfo {
    // SAFETY: numbers, of which zero is one.
    let mut info: libc::mallinfo = unsafe { std::mem::zeroed() };
    info.arena = c_int::try_from(size()).unwrap_or(c_int::MAX);
    info.uordblks = info.arena;
    info
}
