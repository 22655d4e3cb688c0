//! Variables of the environment, which are not to be trusted everywhere.

#![expect(unsafe_code, reason = "asks the kernel's auxiliary vector")]

use std::ffi::OsString;

/// Returns a variable that has a say about files and devices, if it is set.
///
/// A program with more rights than its caller has, as a set-user-ID one, gets none: the caller would choose which
/// of the owner's files are overwritten, and what is written is not encrypted. As `secure_getenv(3)`, which not every
/// C library has; and it is said, in one line.
pub(crate) fn variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    // SAFETY: reads a word that the kernel has passed to the process; see `getauxval(3)`.
    let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    if is_secure {
        eprintln!(
            "farheap: {name} is ignored: this program has rights that its caller has not (set-user-ID, \
             set-group-ID, or capabilities of the file)"
        );
    }
    (!is_secure).then_some(value)
}
