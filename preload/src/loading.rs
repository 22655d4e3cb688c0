//! `dlopen(3)` and its like: libraries that the program loads have this library's malloc too.
//!
//! With `RTLD_DEEPBIND` a library looks for functions in itself and in what it needs, the C library, before it does in the
//! program: it would have the C library's malloc, and what one allocates the other would free. PHP loads all of its
//! extensions so. The flag is left out.
//!
//! The functions jump to the C library's, which so see the program's return address: a library is looked for where the
//! caller says (`DT_RUNPATH`).

#![expect(unsafe_code, reason = "exports functions in assembler, asks the loader for others")]

use crate::own::enter;
use crate::{report, start};
use libc::{c_char, c_int, c_long, c_void};
use std::arch::naked_asm;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The name space that the program is in, `LM_ID_BASE`. In others nothing is preloaded, and their mallocs do not meet this one.
const BASE: c_long = 0;

/// The function to go on with, and its flags, as a function of C returns them in two registers.
#[repr(C)]
struct LoaderCall {
    function: usize,
    flags: usize,
}

extern "C" fn admit(flags: c_int) -> LoaderCall {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    LoaderCall { function: find(&FOUND, c"dlopen"), flags: without_deep_binding(flags) }
}

extern "C" fn admit_in(space: c_long, flags: c_int) -> LoaderCall {
    static FOUND: AtomicUsize = AtomicUsize::new(0);
    let flags = if space == BASE { without_deep_binding(flags) } else { flags as usize };
    LoaderCall { function: find(&FOUND, c"dlmopen"), flags }
}

/// The C library's function of a name.
fn find(found: &AtomicUsize, name: &CStr) -> usize {
    if found.load(Ordering::Relaxed) == 0 {
        let _inside = enter();
        // SAFETY: a text of C.
        let function = unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) };
        found.store(function.addr(), Ordering::Relaxed);
    }
    found.load(Ordering::Relaxed)
}

fn without_deep_binding(flags: c_int) -> usize {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if flags & libc::RTLD_DEEPBIND == 0 || !start::is_served() {
        return flags as usize;
    }
    if !TOLD.swap(true, Ordering::Relaxed)
        && let Some(_inside) = enter()
    {
        report::say(
            "the program loads libraries with RTLD_DEEPBIND, by which they would have another malloc: \
             the flag is left out",
        );
    }
    (flags & !libc::RTLD_DEEPBIND) as usize
}

/// `dlopen(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "sub rsp, 16",
        "mov edi, esi",
        "call {admit}",
        "mov esi, edx",
        "add rsp, 16",
        "pop rdi",
        "jmp rax",
        admit = sym admit,
    )
}

/// `dlmopen(3)`.
#[unsafe(naked)]
#[unsafe(no_mangle)]
extern "C" fn dlmopen(space: c_long, path: *const c_char, flags: c_int) -> *mut c_void {
    naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov esi, edx",
        "call {admit}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        admit = sym admit_in,
    )
}
