//! Loads the plug-in and unloads it, several times, with threads that have used it and go on, and end later.

#![expect(unsafe_code, reason = "loads a library")]

use std::ffi::{CString, c_int, c_void};
use std::process::ExitCode;
use std::sync::mpsc;
use std::thread;

const ROUNDS: usize = 3;

fn load(path: &CString) -> *mut c_void {
    // SAFETY: a string; the library's constructors are those of Rust and jemalloc.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{path:?} is loaded");
    library
}

fn function(library: usize, name: &std::ffi::CStr) -> extern "C" fn() -> c_int {
    // SAFETY: a library that is loaded, and a string.
    let found = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?}");
    // SAFETY: both functions of the plug-in have this type.
    unsafe { std::mem::transmute::<*mut c_void, extern "C" fn() -> c_int>(found) }
}

fn main() -> ExitCode {
    let path = std::env::args().nth(1).expect("the plug-in's path");
    let path = CString::new(path).expect("a path");
    for round in 0..ROUNDS {
        let library = load(&path) as usize;
        let (used, wait) = mpsc::channel();
        let (end, ending) = mpsc::channel::<()>();
        let thread = thread::spawn(move || {
            let status = function(library, c"plugin_allocate")();
            used.send(status).expect("the host waits");
            ending.recv().expect_err("the plug-in is gone by now");
        });
        assert_eq!(wait.recv(), Ok(0));
        // The first round without a heap: the allocator alone has to survive, too.
        let status = if round == 0 { 0 } else { function(library, c"plugin_work")() };
        if status != 0 {
            return ExitCode::from(status as u8);
        }
        // SAFETY: nothing of it is called again by this handle.
        assert_eq!(unsafe { libc::dlclose(library as *mut c_void) }, 0);
        drop(end);
        thread.join().expect("it ends after the plug-in was closed");
    }
    println!("ok: {}", env!("CARGO_PKG_DESCRIPTION"));
    ExitCode::SUCCESS
}
