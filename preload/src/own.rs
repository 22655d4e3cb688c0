//! State of a thread: whether it is inside of the allocator, or one of farheap's own. And how threads start.
//!
//! The variable is of the initial-exec kind, which no access allocates for. `thread_local!` makes
//! variables of the general-dynamic kind: the first access of a thread may ask the loader for memory,
//! which comes back to `malloc`, and so on for ever (C library 2.36, after a program has loaded more
//! than 14 libraries with such variables).

#![expect(unsafe_code, reason = "has a thread-local variable in assembler, starts threads")]

use crate::{report, start};
use libc::{c_int, c_void, pthread_attr_t, pthread_t};
use std::arch::{asm, global_asm};
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

global_asm!(
    ".pushsection .tbss.farheap_preload_thread,\"awT\",@nobits",
    ".globl farheap_preload_thread",
    ".hidden farheap_preload_thread",
    ".type farheap_preload_thread, @object",
    ".size farheap_preload_thread, 32",
    ".p2align 5",
    "farheap_preload_thread:",
    ".zero 32",
    ".popsection",
);

/// A thread's state: zero when it starts. Has the size that is reserved above.
#[repr(C, align(32))]
struct Thread {
    /// How many calls it is inside of; a thread of farheap's is inside for life.
    depth: Cell<u64>,
    /// Bytes that it has allocated since it was last asked about.
    allocated: Cell<u64>,
    /// Where its `errno` is; null until it is asked for.
    errno: Cell<*mut c_int>,
}

const _: () = assert!(size_of::<Thread>() == 32);

#[inline(always)]
fn current() -> &'static Thread {
    let thread: *const Thread;
    // SAFETY: computes the address of the variable above for this thread: the thread's pointer plus
    // the offset that the loader has written into the table.
    unsafe {
        asm!(
            "mov {thread}, qword ptr fs:[0]",
            "add {thread}, qword ptr [rip + farheap_preload_thread@GOTTPOFF]",
            thread = out(reg) thread,
            options(pure, readonly, nostack),
        );
    }
    // SAFETY: the variable has this type, is zero at first, which is a value of it, lives as long as
    // the thread, which alone uses it: a reference to it cannot be sent, because of its cells.
    unsafe { &*thread }
}

/// The calling thread is inside of the allocator until this is dropped.
pub(crate) struct Inside(&'static Thread);

/// Enters the allocator; `None` when the thread is inside already.
#[inline]
pub(crate) fn enter() -> Option<Inside> {
    let thread = current();
    if thread.depth.get() > 0 {
        return None;
    }
    thread.depth.set(1);
    Some(Inside(thread))
}

impl Drop for Inside {
    #[inline]
    fn drop(&mut self) {
        self.0.depth.set(self.0.depth.get() - 1);
    }
}

/// Counts bytes that the thread allocates; returns the sum, and begins anew, once it is `step` or more.
#[inline]
pub(crate) fn count(bytes: usize, step: u64) -> Option<u64> {
    let thread = current();
    let sum = thread.allocated.get().saturating_add(bytes as u64);
    let is_step = sum >= step;
    thread.allocated.set(if is_step { 0 } else { sum });
    is_step.then_some(sum)
}

/// Where the calling thread's `errno` is. Kept: the C library's function cost 2 of the 30 ns that a pair of `malloc` and
/// `free` took.
#[inline]
fn errno_place() -> *mut c_int {
    let thread = current();
    if thread.errno.get().is_null() {
        // SAFETY: takes no arguments.
        thread.errno.set(unsafe { libc::__errno_location() });
    }
    thread.errno.get()
}

/// Sets the calling thread's `errno`.
pub(crate) fn set_errno(value: c_int) {
    // SAFETY: the calling thread's own variable.
    unsafe { errno_place().write(value) }
}

/// The calling thread's `errno` as it was; written back when this is dropped.
pub(crate) struct KeptErrno {
    place: *mut c_int,
    value: c_int,
}

/// Keeps `errno` as it is, whatever is called meanwhile.
#[inline]
pub(crate) fn keep_errno() -> KeptErrno {
    let place = errno_place();
    // SAFETY: the calling thread's own variable.
    KeptErrno { place, value: unsafe { place.read() } }
}

impl Drop for KeptErrno {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the variable of the thread that made this, which has a pointer and so stayed with it.
        unsafe { self.place.write(self.value) }
    }
}

/// The signature of a function that a thread runs. It may be left by unwinding: `pthread_exit(3)` does so.
type StartRoutine = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// The signature of `pthread_create(3)`.
type Create =
    unsafe extern "C" fn(*mut pthread_t, *const pthread_attr_t, StartRoutine, *mut c_void) -> c_int;

/// Function that a thread is to run.
struct Start {
    run: StartRoutine,
    argument: *mut c_void,
}

/// The C library's function, behind that of this library.
fn next_pthread_create() -> Option<Create> {
    static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let mut found = FOUND.load(Ordering::Relaxed);
    if found.is_null() {
        // SAFETY: looks up a name.
        found = unsafe { libc::dlsym(libc::RTLD_NEXT, c"pthread_create".as_ptr()) };
        FOUND.store(found, Ordering::Relaxed);
    }
    // SAFETY: null or a function of this signature.
    unsafe { std::mem::transmute::<*mut c_void, Option<Create>>(found) }
}

/// Starts a thread that begins by `begin`.
///
/// # Safety
/// As for `pthread_create(3)`; `begin` takes a [`Start`].
unsafe fn create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    begin: StartRoutine,
    start: Start,
) -> c_int {
    let Some(create) = next_pthread_create() else { return libc::EAGAIN };
    let start = Box::into_raw(Box::new(start));
    // SAFETY: as the caller promises.
    let failure = unsafe { create(thread, attributes, begin, start.cast()) };
    if failure != 0 {
        // SAFETY: made above; no thread has it.
        drop(unsafe { Box::from_raw(start) });
    }
    failure
}

/// `pthread_create(3)`: when the thread ends, far memory that the kernel needs then is kept.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn pthread_create(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    run: StartRoutine,
    argument: *mut c_void,
) -> c_int {
    if !start::is_served() {
        let Some(create) = next_pthread_create() else { return libc::EAGAIN };
        // SAFETY: as the caller promises.
        return unsafe { create(thread, attributes, run, argument) };
    }
    let _inside = enter();
    // SAFETY: as the caller promises.
    unsafe { create(thread, attributes, begin, Start { run, argument }) }
}

extern "C-unwind" fn begin(start: *mut c_void) -> *mut c_void {
    let Start { run, argument } = {
        let _inside = enter();
        farheap::malloc::watch_end_of_thread();
        // SAFETY: made by `create` for this thread alone.
        *unsafe { Box::from_raw(start.cast::<Start>()) }
    };
    run(argument)
}

/// `pthread_create` for the code of this library, by the linker (`build.rs`): each such thread is
/// farheap's own. It is inside of the allocator for life, so that whatever the C library allocates
/// for it is local, and takes no signals of the program.
///
/// # Safety
/// As for `pthread_create(3)`.
#[unsafe(export_name = "__wrap_pthread_create")]
unsafe extern "C" fn start_thread(
    thread: *mut pthread_t,
    attributes: *const pthread_attr_t,
    run: StartRoutine,
    argument: *mut c_void,
) -> c_int {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: writes a set of signals.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: reads the set just written, and writes the other one.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: as the caller promises.
    let failure = unsafe { create(thread, attributes, begin_own, Start { run, argument }) };
    // SAFETY: reads the set that was written above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), ptr::null_mut()) };
    failure
}

extern "C-unwind" fn begin_own(start: *mut c_void) -> *mut c_void {
    std::mem::forget(enter());
    // SAFETY: made by `create` for this thread alone.
    let Start { run, argument } = *unsafe { Box::from_raw(start.cast::<Start>()) };
    run(argument)
}

/// `unshare(2)`. A process with several threads, as one with a heap is, cannot change its name space of users.
#[unsafe(no_mangle)]
extern "C" fn unshare(flags: c_int) -> c_int {
    #[expect(clippy::disallowed_methods, reason = "the C library's function is this one")]
    // SAFETY: takes no pointers.
    let done = unsafe { libc::syscall(libc::SYS_unshare, flags) } as c_int;
    if done != 0
        && flags & libc::CLONE_NEWUSER != 0
        && start::is_over()
        && let Some(_inside) = enter()
    {
        let _kept = keep_errno();
        report::say(
            "the program cannot have a name space of users, because the threads of its far heap are there: \
             run farheap in the name space (unshare -U farheap run ...)",
        );
    }
    done
}
