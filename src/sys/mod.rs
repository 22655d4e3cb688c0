//! The only module that makes system calls. Layer 1: uses `base`.
//!
//! A wrapper takes typed arguments, retries `EINTR` where that is right, gives expected `errno`
//! values a meaning, and cites the man page.

pub(crate) mod uffd;
pub(crate) mod vm;

use crate::base::error::Error;

/// The calling thread's `errno`.
pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// The last system call's failure as the crate's error.
pub(crate) fn os_error(call: &'static str) -> Error {
    Error::Os { call, errno: errno() }
}
