//! The `exec` family: programs into which this library cannot be loaded are started without it.
//!
//! `LD_PRELOAD` reaches all that a program starts. The loader of another C library gives up where a library does not fit, and
//! so does a sanitizer where another malloc comes before its own. So the file is looked at before it is executed, and the
//! environment that is passed on leaves the library out where it does not fit, which is said once.
//!
//! # Invariants
//! 1. Memory is from `inner`, and only for a program without the library: the caller may be a signal handler, or a
//!    child of `vfork(2)`.

#![expect(unsafe_code, reason = "exports functions of C that take its pointers")]
#![expect(clippy::disallowed_methods, reason = "the C library's functions are these")]

use crate::elf::{self, ProgramKind};
use crate::mapping::kernel_mmap;
use crate::own::enter;
use crate::{inner, report};
use libc::{c_char, c_int, c_void};
use std::arch::naked_asm;
use std::ffi::CStr;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// Maximum number of scripts that name each other, as the kernel follows them.
const SCRIPTS_MAX: usize = 5;
/// Bytes of a script's first line that the kernel reads.
const LINE_MAX: usize = 256;
const PATH_MAX: usize = libc::PATH_MAX as usize;
const VARIABLE: &[u8] = b"LD_PRELOAD=";
const LIBRARY: &[u8] = b"/libfarheap_preload.so";

/// An array of strings that ends with a null pointer.
type Strings = *const *const c_char;

unsafe extern "C" {
    static environ: Strings;
}

/// True once a message was sent that the library was left out: in a page that forked children share, so that one of them sends it.
static TOLD: AtomicPtr<AtomicBool> = AtomicPtr::new(ptr::null_mut());

/// To be called before the program runs.
pub(crate) fn prepare() {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let page = unsafe { kernel_mmap(ptr::null_mut(), 4096, access, flags, -1, 0) };
    if page != libc::MAP_FAILED {
        TOLD.store(page.cast(), Ordering::Relaxed);
    }
}

mod next {
    use super::{AtomicPtr, Ordering, Strings, c_char, c_int, c_void, ptr};

    type Pid = *mut libc::pid_t;

    macro_rules! functions {
        ($($name:ident($($argument:ident: $kind:ty),*);)*) => {$(
            /// The C library's function of this name, behind the one of this library.
            ///
            /// # Safety
            /// As there.
            pub(super) unsafe fn $name($($argument: $kind),*) -> c_int {
                type Function = unsafe extern "C" fn($($kind),*) -> c_int;
                type Found = Option<Function>;
                static FOUND: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
                let mut found = FOUND.load(Ordering::Relaxed);
                if found.is_null() {
                    let name = concat!(stringify!($name), "\0").as_ptr().cast();
                    // SAFETY: looks up a name.
                    found = unsafe { libc::dlsym(libc::RTLD_NEXT, name) };
                    FOUND.store(found, Ordering::Relaxed);
                }
                // SAFETY: null or a function of this signature.
                let function = unsafe { std::mem::transmute::<*mut c_void, Found>(found) };
                // SAFETY: as the caller promises.
                function.map_or(-1, |function| unsafe { function($($argument),*) })
            }
        )*};
    }

    functions! {
        execvpe(file: *const c_char, arguments: Strings, environment: Strings);
        posix_spawn(pid: Pid, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings);
        posix_spawnp(pid: Pid, file: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: Strings, environment: Strings);
    }
}

/// Opens a file to be read.
pub(crate) fn open(path: &CStr) -> Option<File> {
    open_at(libc::AT_FDCWD, path)
}

fn open_at(dir: c_int, path: &CStr) -> Option<File> {
    // SAFETY: a string of C.
    let fd = unsafe { libc::openat(dir, path.as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    // SAFETY: nobody else owns a descriptor that was just made.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
}

/// Why the program in a file cannot take the library; `None`: it can, no loader is asked, or the kernel will refuse it.
fn refusal_of(mut file: File) -> Option<&'static str> {
    for _ in 0..SCRIPTS_MAX {
        match elf::kind_of(&file) {
            ProgramKind::Other => {}
            // What it starts in turn may take the library.
            ProgramKind::Static => return None,
            kind => return kind.refusal(),
        }
        let mut line = [0; LINE_MAX + 1];
        file.read_at(&mut line[..LINE_MAX], 0).ok()?;
        let is_end = |byte: &u8| b" \t\n\0".contains(byte);
        let name = line.strip_prefix(b"#!")?;
        let start = 2 + name.iter().position(|byte| !b" \t".contains(byte))?;
        let end = start + line[start..].iter().position(is_end)?;
        line[end] = 0;
        file = open(CStr::from_bytes_with_nul(&line[start..=end]).ok()?)?;
    }
    None
}

/// The value of a variable, whose name ends with `=`.
fn value_of(environment: Strings, name: &[u8]) -> Option<&'static [u8]> {
    strings(environment).find_map(|text| text.to_bytes().strip_prefix(name))
}

/// The strings of an array; none of a null pointer.
fn strings(of: Strings) -> impl Iterator<Item = &'static CStr> {
    let mut next = of;
    std::iter::from_fn(move || {
        if next.is_null() {
            return None;
        }
        // SAFETY: callers have an array that ends with a null pointer, after which this is not called again.
        let text = unsafe { next.read() };
        if text.is_null() {
            return None;
        }
        next = next.wrapping_add(1);
        // SAFETY: a string of C, which stays as long as the call that it was passed to.
        Some(unsafe { CStr::from_ptr(text) })
    })
}

/// The file that `execvp(3)` executes for a name, as far as this can be told.
fn search(file: &CStr) -> Option<File> {
    let name = file.to_bytes();
    if name.contains(&b'/') {
        return open(file);
    }
    // SAFETY: the C library's variable.
    let path = value_of(unsafe { environ }, b"PATH=").unwrap_or(b"/bin:/usr/bin");
    path.split(|byte| *byte == b':').find_map(|dir| {
        let mut place = [0; PATH_MAX];
        let len = dir.len() + 1 + name.len();
        let text = place.get_mut(..len + 1)?;
        text[..dir.len()].copy_from_slice(dir);
        text[dir.len()] = b'/';
        text[dir.len() + 1..len].copy_from_slice(name);
        let text = CStr::from_bytes_with_nul(text).ok()?;
        // SAFETY: a string of C.
        let is_executable = unsafe { libc::access(text.as_ptr(), libc::X_OK) } == 0;
        open(text).filter(|_| is_executable)
    })
}

/// A copy of an environment that leaves the library out; freed when dropped.
struct Without(*mut *const c_char);

impl Without {
    /// `None`: it does not name the library, or there is no memory.
    fn of(environment: Strings) -> Option<Without> {
        let preloaded = value_of(environment, VARIABLE)?;
        let is_other = |path: &&[u8]| !path.is_empty() && !path.ends_with(LIBRARY);
        let paths = || preloaded.split(|byte| b": ".contains(byte));
        if !paths().any(|path| path.ends_with(LIBRARY)) {
            return None;
        }
        let count = strings(environment).count();
        let words = (count + 1) * size_of::<*const c_char>();
        let block = inner::allocate(words + VARIABLE.len() + preloaded.len() + 1, 16, true);
        if block.is_null() {
            return None;
        }
        let (copy, text) = (block.cast::<*const c_char>(), block.cast::<u8>().wrapping_add(words));
        let mut len = 0;
        let mut add = |bytes: &[u8]| {
            // SAFETY: the block has room behind the pointers for the whole variable, of which this is a part.
            unsafe { text.wrapping_add(len).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            len += bytes.len();
        };
        add(VARIABLE);
        for (n, path) in paths().filter(is_other).enumerate() {
            if n > 0 {
                add(b":");
            }
            add(path);
        }
        let others = paths().any(|path| is_other(&path));
        let kept = strings(environment).map(CStr::as_ptr).filter_map(|entry| {
            // SAFETY: one of the strings above.
            let is_it = unsafe { CStr::from_ptr(entry) }.to_bytes().starts_with(VARIABLE);
            if is_it { others.then_some(text.cast_const().cast()) } else { Some(entry) }
        });
        for (n, entry) in kept.enumerate() {
            // SAFETY: there is room for as many pointers as were counted, and for the null behind them.
            unsafe { copy.wrapping_add(n).write(entry) };
        }
        Some(Without(copy))
    }
}

impl Drop for Without {
    fn drop(&mut self) {
        // SAFETY: allocated above, not used any more.
        unsafe { inner::free(self.0.cast()) };
    }
}

/// Says once why a program has its own memory.
fn tell(name: &CStr, refusal: &str) {
    // SAFETY: null, or a page that stays mapped.
    let told = unsafe { TOLD.load(Ordering::Relaxed).as_ref() };
    let Some(_inside) = enter() else { return };
    if told.is_some_and(|told| !told.swap(true, Ordering::Relaxed)) {
        let name = if name.is_empty() { c"the file of a descriptor" } else { name };
        let name = name.to_string_lossy();
        report::say(&format!("{name} is started without far memory: {refusal}"));
    }
}

/// Passes an environment on that leaves the library out if the program cannot take it.
fn with_fitting(
    name: *const c_char,
    file: impl FnOnce(&CStr) -> Option<File>,
    environment: Strings,
    call: impl FnOnce(Strings) -> c_int,
) -> c_int {
    // SAFETY: a string of C, or null, which is for the kernel to refuse.
    let name = if name.is_null() { None } else { Some(unsafe { CStr::from_ptr(name) }) };
    let without = name.and_then(|name| {
        let refusal = refusal_of(file(name)?)?;
        let without = Without::of(environment)?;
        tell(name, refusal);
        Some(without)
    });
    call(without.as_ref().map_or(environment, |without| without.0))
}

/// `execve(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn execve(
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    with_fitting(path, open, environment, |environment| {
        // SAFETY: as the caller promises; the arguments of this call.
        unsafe { libc::syscall(libc::SYS_execve, path, arguments, environment) as c_int }
    })
}

/// `execv(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn execv(path: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the caller promises; the C library's variable.
    unsafe { execve(path, arguments, environ) }
}

/// `execvpe(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn execvpe(
    file: *const c_char,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    with_fitting(file, search, environment, |environment| {
        // SAFETY: as the caller promises.
        unsafe { next::execvpe(file, arguments, environment) }
    })
}

/// `execvp(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn execvp(file: *const c_char, arguments: Strings) -> c_int {
    // SAFETY: as the caller promises; the C library's variable.
    unsafe { execvpe(file, arguments, environ) }
}

/// `execveat(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn execveat(
    dir: c_int,
    path: *const c_char,
    arguments: Strings,
    environment: Strings,
    flags: c_int,
) -> c_int {
    let open = |path: &CStr| {
        if path.is_empty() && flags & libc::AT_EMPTY_PATH != 0 {
            // SAFETY: borrowed, and not closed.
            return ManuallyDrop::new(unsafe { File::from_raw_fd(dir) }).try_clone().ok();
        }
        open_at(dir, path)
    };
    with_fitting(path, open, environment, |environment| {
        // SAFETY: as the caller promises; the arguments of this call.
        unsafe {
            libc::syscall(libc::SYS_execveat, dir, path, arguments, environment, flags) as c_int
        }
    })
}

/// `fexecve(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn fexecve(fd: c_int, arguments: Strings, environment: Strings) -> c_int {
    // SAFETY: as the caller promises.
    unsafe { execveat(fd, c"".as_ptr(), arguments, environment, libc::AT_EMPTY_PATH) }
}

/// Functions that take the program's arguments as their own: makes an array of them, and calls another one.
macro_rules! listed {
    ($($(#[$doc:meta])* $name:ident = $function:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// As there.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, first: *const c_char) -> c_int {
            // The arguments in registers are put before those on the stack, where the address to return to was.
            naked_asm!(
                "pop rax",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                "push rax",
                "call {}",
                "pop rcx",
                "add rsp, 40",
                "push rcx",
                "ret",
                sym $function,
            )
        }
    )*};
}

listed! {
    /// `execl(3)`.
    execl = execv;
    /// `execlp(3)`.
    execlp = execvp;
    /// `execle(3)`.
    execle = execute_listed;
}

/// `execle(3)`, whose environment is behind the arguments.
unsafe extern "C" fn execute_listed(path: *const c_char, arguments: Strings) -> c_int {
    let behind = arguments.wrapping_add(strings(arguments).count() + 1).cast::<Strings>();
    // SAFETY: the caller has passed it.
    let environment = unsafe { behind.read() };
    // SAFETY: as the caller promises.
    unsafe { execve(path, arguments, environment) }
}

/// `posix_spawn(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawn(
    pid: *mut libc::pid_t,
    path: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    with_fitting(path, open, environment, |environment| {
        // SAFETY: as the caller promises.
        unsafe { next::posix_spawn(pid, path, actions, attributes, arguments, environment) }
    })
}

/// `posix_spawnp(3)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
unsafe extern "C" fn posix_spawnp(
    pid: *mut libc::pid_t,
    file: *const c_char,
    actions: *const c_void,
    attributes: *const c_void,
    arguments: Strings,
    environment: Strings,
) -> c_int {
    with_fitting(file, search, environment, |environment| {
        // SAFETY: as the caller promises.
        unsafe { next::posix_spawnp(pid, file, actions, attributes, arguments, environment) }
    })
}
