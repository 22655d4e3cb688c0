//! The program's environment as the kernel has handed it over, read and changed without allocating.
//!
//! The C library's `setenv` allocates by the name `malloc`, which may be the program's own and not ready before its
//! constructors have run; and `unsetenv` may be the program's too: bash has one that knows only the shell's variables.
//! Used by `start`, before the program's constructors.

#![expect(unsafe_code, reason = "reads and writes the environment's array")]

use libc::c_char;
use std::ffi::CStr;

/// The array that `main` gets, which ends with a null pointer.
#[derive(Clone, Copy)]
pub(crate) struct Environment(*mut *mut c_char);

impl Environment {
    /// # Safety
    /// It is the process's environment, and nobody else uses it as long as this exists.
    pub(crate) unsafe fn new(variables: *mut *mut c_char) -> Environment {
        Environment(variables)
    }

    /// The entries, each `NAME=VALUE`, with their place in the array.
    fn entries(&self) -> impl Iterator<Item = (*mut *mut c_char, &[u8])> {
        // SAFETY: lies in the array, as no entry before was the last.
        (0..).map(|n| unsafe { self.0.add(n) }).map_while(|place| {
            // SAFETY: as above.
            let entry = unsafe { place.read() };
            // SAFETY: an entry is a text of C that nobody changes while this is borrowed.
            (!entry.is_null()).then(|| (place, unsafe { CStr::from_ptr(entry) }.to_bytes()))
        })
    }

    /// The value of a variable, if it is UTF-8.
    pub(crate) fn get(&self, name: &str) -> Option<&str> {
        let value = |entry| value_of(entry, name);
        self.entries().find_map(|(_, entry)| value(entry)).and_then(|v| std::str::from_utf8(v).ok())
    }

    /// Takes an element out of a variable whose value is a list divided by colons or blanks, and with the last element
    /// the variable.
    pub(crate) fn leave_out(&mut self, name: &str, is_out: impl Fn(&[u8]) -> bool) {
        let found =
            self.entries().find_map(|(place, entry)| Some((place, value_of(entry, name)?.len())));
        let Some((place, len)) = found else { return };
        // SAFETY: the place of an entry.
        let entry = unsafe { place.read() };
        // SAFETY: the value follows on the name and the sign.
        let value: *mut u8 = unsafe { entry.add(name.len() + 1) }.cast();
        // SAFETY: that many bytes, which nobody else uses; the value becomes shorter.
        let bytes = unsafe { std::slice::from_raw_parts_mut(value, len + 1) };
        let (mut kept, mut next) = (0, 0);
        while next < len {
            let end = bytes[next..len].iter().position(|byte| b": ".contains(byte));
            let end = end.map_or(len, |at| next + at);
            if end > next && !is_out(&bytes[next..end]) {
                if kept > 0 {
                    bytes[kept] = b':';
                    kept += 1;
                }
                bytes.copy_within(next..end, kept);
                kept += end - next;
            }
            next = end + 1;
        }
        bytes[kept] = 0;
        if kept == 0 {
            self.remove(place);
        }
    }

    /// Takes an entry out of the array.
    fn remove(&mut self, mut place: *mut *mut c_char) {
        loop {
            // SAFETY: at most the null pointer at the end, which is not followed by another step.
            let next = unsafe { place.add(1) };
            // SAFETY: as above.
            let moved = unsafe { next.read() };
            // SAFETY: an entry's place.
            unsafe { place.write(moved) };
            if moved.is_null() {
                return;
            }
            place = next;
        }
    }
}

fn value_of<'a>(entry: &'a [u8], name: &str) -> Option<&'a [u8]> {
    entry.strip_prefix(name.as_bytes())?.strip_prefix(b"=")
}
